"""A step that is cut short is taken in full or not at all, or its state is refused from then on.

By Ctrl-C at random instants, which is held, and by any other exception at planted ones: one is
raised at each call that a write makes, of Python or of C, and behind each one of C.
"""

import copy
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import same_bits
from rank_pool import run_ranks
from torch import Tensor, nn
from torch.autograd import grad_mode
from torch.utils import _contextlib

import mics_fn as mf
from mics_fn import threads, tree
from mics_fn.errors import LostStateError
from mics_fn.optim import by_leaf
from mics_fn.shards import any_lost
from mics_fn.train import Checkpoints
from mics_fn.train import stepping as pure

KINDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plain": lambda folder: {"optimizer": mf.optim.adamw(1e-2)},
    "clip": lambda folder: {
        "optimizer": mf.optim.from_torch(torch.optim.RMSprop, lr=1e-3),
        "guard": mf.optim.Guard(mf.optim.dynamic_scale(8.0, interval=3), max_norm=1.0),
    },
    "merge": lambda folder: {
        "optimizer": mf.optim.lion(1e-3), "replica_sync": mf.replicas.diloco(2), "accumulate": 2,
    },
}  # fmt: skip
PATHS: dict[str, Callable[[str], dict[str, Any]]] = {
    **KINDS,
    "overlap": lambda folder: {
        "optimizer": mf.optim.adamw(1e-2), "overlap_step": True,
        "guard": mf.optim.Guard(on_nonfinite="ignore"),
    },
    "files": lambda folder: {
        "optimizer": mf.optim.adamw(1e-2), "where": f"params=disk:{folder}, states=disk:{folder}"
    },
    "judged files": lambda folder: {
        "optimizer": mf.optim.lion(1e-2), "where": f"states=disk:{folder}",
        "guard": mf.optim.Guard(max_norm=1.0, on_nonfinite="skip"),
    },
    "recoverable": lambda folder: {
        "optimizer": mf.optim.sgd(0.1, momentum=0.9), "faults": mf.FaultPolicy(recoverable=True),
    },
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def made(groups: mf.Groups, path: str, folder: str = "") -> mf.Trainer:
    torch.manual_seed(0)
    options = PATHS[path](folder)
    return mf.Trainer(Net(), options.pop("optimizer"), groups, bucket_bytes=1_200, **options)


def batch() -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))


def bits(trainer: mf.Trainer) -> list[Any]:
    """All that a step changes, copied; raises where it is lost."""
    found = by_leaf((trainer.state, trainer.sync_state))
    leaves = tree.flatten(mf.optim.move(found[0], ""))[0] + tree.flatten(found[1])[0]
    return [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]


class Sender:
    """A process that sends SIGINT to this one after so many seconds."""

    def __init__(self) -> None:
        read, self._write = os.pipe()
        receiver, self._child = os.getpid(), os.fork()
        if self._child == 0:
            os.close(self._write)
            while len(word := os.read(read, 8)) == 8:
                time.sleep(struct.unpack("d", word)[0])
                os.kill(receiver, signal.SIGINT)
            os._exit(0)
        os.close(read)

    def after(self, seconds: float) -> None:
        os.write(self._write, struct.pack("d", seconds))

    def __enter__(self) -> "Sender":
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        os.close(self._write)
        os.waitpid(self._child, 0)


def timed(trainer: mf.Trainer) -> float:
    started = time.perf_counter()
    trainer.step(batch())
    return time.perf_counter() - started


def interrupted(kind: str, trials: int) -> int:
    """One rank alone; returns how many steps were not taken."""
    groups, refused, draw = mf.make_groups(1), 0, random.Random(kind)
    trainer, twin = made(groups, kind), made(groups, kind)
    with Sender() as sender:
        step_s = min(timed(made(groups, kind)) for _ in range(3))
        for _ in range(trials):
            with suppress(KeyboardInterrupt):
                sender.after(draw.uniform(0.0, 1.3) * step_s)
                trainer.step(batch())
                time.sleep(1)
            assert torch.is_grad_enabled()
            if trainer.sync_state.step > twin.sync_state.step:
                twin.step(batch())
            else:
                refused += 1
            same_bits([*bits(trainer), trainer.guard.scale], [*bits(twin), twin.guard.scale])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return refused


def by_hand(trials: int) -> tuple[int, int]:
    """A loop of `opt_step` that keeps each state; how many signals came inside of one, of trials.

    A signal that is held is sent again, maybe into the next held block, and so on: on a loaded
    machine a trial takes long, so there are as many as there is time for.
    """
    groups, x, step = mf.make_groups(1), torch.ones(1000), 0
    state = mf.init_state(mf.shard({"w": torch.zeros(1000)}, groups), mf.optim.sgd(1.0))
    draw, again, held, done = random.Random(0), threads.resend, [], 0
    threads.resend = lambda number: (held.append(number), again(number))
    end = time.monotonic() + 15
    try:
        with Sender() as sender:
            while done < trials and time.monotonic() < end:
                try:
                    sender.after(draw.uniform(0.0, 0.004))
                    while True:
                        assert time.monotonic() < end + 15, "a signal was lost"
                        step = state.step
                        grads = mf.reduce_grads({"w": x}, groups)
                        state = mf.opt_step(state, grads, donate=True)
                except KeyboardInterrupt:
                    done += 1
                assert state.step - step in (0, 1)
                assert state.params["w"].data.unique().tolist() == [-float(state.step)]
    finally:
        torch.set_grad_enabled(True)  # torch's own contexts do not survive an interrupt
        threads.resend = again
    return len(held), done


def test_a_step_by_hand_ends_before_the_interrupt():
    # Not where torch.compile ran before; see [Note: between two instructions] in `threads`.
    ((held, done),) = run_ranks(by_hand, 1, 200)
    assert held > done / 10, "or few signals came where they could tear a step"


@pytest.mark.parametrize("trials", [25, pytest.param(200, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.short("merge-25")
def test_a_step_is_taken_in_full_or_not_at_all(ranks, kind, trials):
    (refused,) = ranks(1).run(interrupted, kind, trials)
    assert 0 < refused < trials


def together(kind: str, seed: int) -> tuple[int, str]:
    """Ctrl-C for all ranks within one step; returns the step of this rank, and an error."""
    groups, error = mf.make_groups(2, node_size=1, timeout_s=20), ""
    trainer = made(groups, kind)
    with Sender() as sender:
        step_s = min(timed(trainer) for _ in range(2))
        draw = random.Random(f"{seed} {dist.get_rank()}")
        dist.barrier()
        delay = random.Random(seed).uniform(0.0, 2.0) + draw.uniform(0.0, 0.3)
        try:
            sender.after(delay * step_s)
            trainer.step(batch())
            time.sleep(1)
        except KeyboardInterrupt:
            pass
        except mf.MicsError as found:
            error = f"{found}"
    groups.state.abandon(KeyboardInterrupt())
    return trainer.state.step, error


@pytest.mark.thorough
@pytest.mark.limit(500)
@pytest.mark.parametrize(("n", "kind"), [(2, "plain"), (4, "clip"), (4, "merge")])
def test_ranks_end_at_one_step(ranks, n, kind):
    """All ranks are at one step, or told, in each trial; both ends of a step occur."""
    ends: set[int] = set()
    for seed in range(100, 150):
        found = ranks(n).run(together, kind, seed)
        # Replicas that are independent count their own steps until they merge.
        parts = [found[i : i + 2] for i in range(0, len(found), 2)] if kind == "merge" else [found]
        for part in parts:
            steps = {step for step, _ in part}
            assert len(steps) == 1 or any(error for _, error in found), found
            ends |= steps
        if len(ends) == 2 and seed >= 109:
            break  # both were seen
    assert ends == {2, 3}


# Planted instants.


class Cut(BaseException):
    """What nobody catches: an asynchronous exception, a handler that raises, no memory left."""


_ROOT = f"{Path(mf.__file__).parent}"


@contextmanager
def cut_where(number: int, is_instant: Callable[[Any, str, Any], bool]) -> Iterator[list[int]]:
    """Raise `Cut` at an instant of this number, as a profiler sees them; counts the instants."""
    counted = [0]

    def watch(frame: Any, event: str, arg: Any) -> None:
        if is_instant(frame, event, arg):
            counted[0] += 1
            if counted[0] == number:
                sys.setprofile(None)
                raise Cut

    sys.setprofile(watch)
    try:
        yield counted
    finally:
        sys.setprofile(None)


def cut_at(number: int, begin: Any) -> AbstractContextManager[list[int]]:
    """Raise `Cut` at a call of this number within a function of the package."""
    inside = list[Any]()

    def is_instant(frame: Any, event: str, arg: Any) -> bool:
        if event == "call" and frame.f_code in begin and not inside:
            inside.append(frame)
        elif event == "return" and inside and frame is inside[0]:
            inside.clear()
        elif inside and event != "return" and frame.f_code.co_filename.startswith(_ROOT):
            # What a generator raises where it is dropped is lost; no lock is ever left held; and
            # what holds signals has tests of its own.
            lost = frame.f_code.co_name == "<genexpr>" or frame.f_code in HOLDING
            return not lost and (event == "call" or arg.__name__ not in ("__exit__", "release"))
        return False

    return cut_where(number, is_instant)


def codes_of(*functions: Any) -> list[Any]:
    return [getattr(fn, "__wrapped__", fn).__code__ for fn in functions]


HOLDING = codes_of(*(x for x in vars(threads.Commit).values() if hasattr(x, "__code__")))
UPDATES = codes_of(pure.update, pure.merge)


def equal(found: list[Any], want: list[Any]) -> bool:
    pairs = zip(found, want, strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


USES: list[Callable[[mf.Trainer, str], Any]] = [
    lambda trainer, folder: trainer.step(batch()),
    lambda trainer, folder: Checkpoints(folder).save(trainer),
    lambda trainer, folder: mf.get(trainer.state, "params.layers.0.bias", trainer.groups),
    lambda trainer, folder: copy.deepcopy(trainer.state),
    lambda trainer, folder: mf.gather(trainer.state.params, trainer.groups),
]


def refused(trainer: mf.Trainer, folder: str) -> None:
    # A merge that is cut may have lost what it keeps alone, without which no step is taken.
    for use in USES if any_lost(trainer.state) else USES[:2]:
        with pytest.raises(LostStateError, match="is lost: .* was cut short while it wrote it"):
            use(trainer, folder)


def ends_of(path: str, folder: str, every: bool, patch: pytest.MonkeyPatch) -> list[str]:
    """How a step ends that is cut at each of its instants, or at every so many of them."""
    trainer = made(mf.make_groups(1), path, f"{folder}/scratch")
    trainer.step(batch())
    kept = copy.deepcopy((trainer.state, trainer.sync_state)), trainer.guard

    def put_back() -> None:
        (state, sync), trainer.guard = copy.deepcopy(kept[0]), kept[1]
        trainer.state, trainer.sync_state = mf.optim.move(state, trainer.options.where), sync
        trainer.member.merges = False

    put_back()
    with patch.context() as patched:
        patched.setattr(pure, "merge", lambda options, state, written: state)
        known = {"old": bits(trainer)}
        trainer.step(batch())
        known["not merged"] = bits(trainer)
    put_back()
    with cut_at(0, UPDATES) as counted:
        trainer.step(batch())
    known["new"], ends, count = bits(trainer), list[str](), counted[0]
    assert not equal(known["old"], known["new"])
    for number in range(1, count + 1, 1 if every else 1 + count // 30):
        put_back()
        with cut_at(number, UPDATES), suppress(Cut):
            trainer.step(batch())
        try:
            now = bits(trainer)
        except LostStateError:
            ends.append("lost")
            if ends.count("lost") in (1, 9):
                refused(trainer, f"{folder}/saved")
            continue
        ends.append(next((name for name, x in known.items() if equal(now, x)), "torn"))
        if trainer.member.merges:  # the next step begins with it
            trainer._merge()
            assert equal(bits(trainer), known["new"])
    return ends


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers
@pytest.mark.limit(900)
@pytest.mark.parametrize("every", [False, True], ids=["some", "every"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.short("merge-some", "overlap-some", "judged files-some")
def test_a_write_that_is_cut_leaves_the_old_state_the_new_one_or_none(
    path, every, tmp_path, monkeypatch
):
    ends = ends_of(path, f"{tmp_path}", every, monkeypatch)
    assert "torn" not in ends, ends
    assert {"old", "lost"} <= set(ends), ends
    assert "lost" not in ends[: ends.index("old") + 1], "a step that had not begun is not lost"


def cut_in_grad_mode(number: int) -> AbstractContextManager[list[int]]:
    """Raise `Cut` at an instant of this number at which torch's contexts look for signals."""
    files = (grad_mode.__file__, _contextlib.__file__)

    def is_instant(frame: Any, event: str, arg: Any) -> bool:
        return event in ("call", "c_return") and frame.f_code.co_filename in files

    return cut_where(number, is_instant)


@pytest.mark.parametrize("mode", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("verb", ["step", "eval"])
@pytest.mark.short("step-grad", "eval-no_grad")
def test_grad_mode_is_as_before_wherever_it_is_cut(verb, mode):
    groups = mf.make_groups(1)

    def mode_after(number: int) -> tuple[bool, int]:
        use = getattr(made(groups, "merge"), verb)
        try:
            torch.set_grad_enabled(mode)
            with suppress(Cut), cut_in_grad_mode(number) as counted:
                use(batch())
                use(batch())  # a second step merges
            return torch.is_grad_enabled(), counted[0]
        finally:
            torch.set_grad_enabled(True)

    _, count = mode_after(0)
    assert count > 5
    for number in range(1, count + 1, 1 + count // 20):
        assert mode_after(number) == (mode, number)


def test_a_load_that_is_cut_leaves_the_old_state_or_none(tmp_path):
    """Into the memory of the state: by `load`, and as `reset` goes back to a save."""
    trainer = made(mf.make_groups(1), "plain")
    trainer.step(batch())
    mf.checkpoint.save(f"{tmp_path}/one", trainer.state, trainer.groups, step=1)
    Checkpoints(f"{tmp_path}/all").save(trainer)
    want, resumed = bits(trainer), Checkpoints(f"{tmp_path}/all")

    def load() -> None:
        found = mf.checkpoint.load(f"{tmp_path}/one", trainer.state, trainer.groups, donate=True)
        trainer.state = found.state

    for way in (load, lambda: resumed.begin(trainer)):
        trainer.step(batch())
        old, kept = bits(trainer), copy.deepcopy((trainer.state, trainer.sync_state))
        codes, ends, number = [way.__code__], list[str](), 1
        with cut_at(0, codes) as counted:
            way()
        assert equal(bits(trainer)[:-1], want[:-1])
        for number in range(1, counted[0] + 1, 1 + counted[0] // 20):
            trainer.state, trainer.sync_state = copy.deepcopy(kept)
            with cut_at(number, codes), suppress(Cut, mf.errors.FileError):
                way()
            try:
                now = bits(trainer)
                ends.append("old" if equal(now[:-1], old[:-1]) else "new")
                assert ends[-1] == "old" or equal(now[:-1], want[:-1]), number
            except LostStateError:
                ends.append("lost")
                way()  # what is lost can be loaded into
                assert equal(bits(trainer)[:-1], want[:-1])
        assert {"old", "lost"} <= set(ends), ends
