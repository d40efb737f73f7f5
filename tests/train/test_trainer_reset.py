"""A `Trainer` goes on after a fault: on new groups, at one step, and to the same bits."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import same_bits
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import _torch, tree
from mics_fn.errors import GroupsError, LostStateError, MicsError, PeerFailed
from mics_fn.groups import Topology
from mics_fn.optim import Guard, adamw, dynamic_scale, norm_spike
from mics_fn.train import stepping as pure
from mics_fn.train import trainer as of_trainer

SIZE = 16


class Net(nn.Module):
    """Some layers; the rank that is told to raises before one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.norm = nn.BatchNorm1d(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == Fault.at:
                Fault.at = None
                raise ValueError("of one rank alone")
        return self.norm(x).square().mean()


class Fault:
    at: int | None = None  # the layer


def made(groups: Any, **options: Any) -> mf.Trainer:
    torch.manual_seed(0)
    guard = Guard(dynamic_scale(8.0, interval=3), max_norm=1.0, spike=norm_spike(warmup=1))
    given = {"guard": guard, "live_bytes": 0, "bucket_bytes": 1100} | options
    return mf.Trainer(Net(), adamw(1e-2), groups, **given)


def twins(p: int, saved: Any = None, **options: Any) -> tuple[mf.Trainer, mf.Trainer]:
    """Two trainers that are alike, each on groups of its own; the first may be saved."""
    n = dist.get_world_size()
    topology = Topology((n // 2, 2) if n > 2 else (n,))
    groups = [mf.make_groups(p, topology=topology, timeout_s=20) for _ in range(2)]
    return made(groups[0], checkpoint=saved, **options), made(groups[1], **options)


def batch(k: int) -> Tensor:
    seed = 100 * k + dist.get_rank()
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(seed))


def step(trainers: tuple[mf.Trainer, ...], *ks: int) -> None:
    for k in ks:
        for each in trainers:
            each.step(batch(k))


def held_by(trainer: mf.Trainer) -> tuple[list[Tensor], list[Any]]:
    leaves = tree.flatten((trainer.state, trainer.sync_state))[0]
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    return tensors, [*(x for x in leaves if not isinstance(x, Tensor)), trainer.guard]


def same(one: mf.Trainer, other: mf.Trainer) -> None:
    (mine, *rest), (wanted, *others) = held_by(one), held_by(other)
    same_bits(mine, wanted)
    assert rest == others


def close(*trainers: mf.Trainer) -> None:
    for each in trainers:
        each.groups.close()


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "usual": lambda: {},
    "all kept": lambda: {"live_bytes": None, "deterministic": True},
    "apart": lambda: {"replica_sync": mf.replicas.diloco(2), "accumulate": 2},
}


def go_on(p: int, faults: int, options: str) -> tuple[list[str], float]:
    """One rank raises in a step, all reset; a twin without faults has the same bits."""
    (trainer, twin), n = twins(p, **OPTIONS[options]()), dist.get_world_size()
    found, slowest = [], 0.0
    for k in range(faults):
        step((trainer, twin), k)
        if dist.get_rank() == (k + 1) % n:
            Fault.at = k % 3
        with pytest.raises((ValueError, MicsError)) as caught:
            trainer.step(batch(-k - 1))
        found.append(f"{caught.value}")
        del caught
        dist.barrier()  # time the reset alone, not how long others took to raise
        started = time.perf_counter()
        trainer.reset()
        slowest = max(slowest, time.perf_counter() - started)
        step((trainer, twin), -k - 1)
        same(trainer, twin)
    for each in (trainer, twin):
        each.eval(batch(0))
    close(trainer, twin)
    return found, slowest


@pytest.mark.parametrize(
    ("n", "p", "faults", "options"),
    [
        (4, 4, 2, "usual"),
        (4, 1, 1, "usual"),
        (4, 2, 1, "all kept"),
        (4, 2, 3, "apart"),
        (8, 4, 6, "usual"),
    ],
)
@pytest.mark.short("4-4-2-usual")
def test_the_next_step_is_right(ranks, n: int, p: int, faults: int, options: str) -> None:
    for texts, slowest in ranks(n).run(go_on, p, faults, options):
        assert all("of one rank alone" in text for text in texts)
        assert slowest < 10, "at once, and not at the limit of 20"


def behind(p: int, late: tuple[int, ...], heal: bool, apart: bool) -> str:
    """Some ranks have lost their last step; all reset, and are told or go on."""
    sync = mf.replicas.local_sgd(3) if apart else None
    trainer, twin = twins(p, replica_sync=sync, faults=mf.FaultPolicy(1))
    step((trainer, twin), 0, 1)
    before = copy.deepcopy((trainer.state, trainer.sync_state)), trainer.guard
    step((trainer, twin), 2)
    if dist.get_rank() in late:
        (trainer.state, trainer.sync_state), trainer.guard = before
    try:
        trainer.reset(heal=heal)
    except LostStateError as error:
        with pytest.raises(LostStateError):  # and no step mixes them
            trainer.step(batch(3))
        return str(error)
    step((trainer, twin), 3)
    same(trainer, twin)
    close(trainer, twin)
    return "healed"


@pytest.mark.parametrize(
    ("p", "late", "heal", "apart", "end"),
    [
        (2, (0, 3), True, False, "healed"),
        (1, (0, 3), True, False, "healed"),
        (2, (1,), False, False, "at different steps"),
        (2, (0, 2), True, False, "at different steps"),
        (2, (1,), True, True, "at different steps"),
    ],
    ids=["healed", "replicas-healed", "not to heal-told", "no replica-told", "apart-told"],
)
@pytest.mark.short("healed", "no replica-told")
def test_a_rank_that_is_behind_takes_the_newer_state_or_all_are_told(
    ranks, p: int, late: tuple[int, ...], heal: bool, apart: bool, end: str
) -> None:
    assert all(end in text for text in ranks(4).run(behind, p, late, heal, apart))


def told_late(late: tuple[int, ...]) -> None:
    """Some ranks do not hear that all can write the last step, which the others write."""
    (trainer, twin), is_late = (
        twins(2, faults=mf.FaultPolicy(recoverable=True)),
        dist.get_rank() in late,
    )
    step((trainer, twin), 0, 1)
    collect = of_trainer.collect_values

    def fail(*args: Any) -> Any:
        collect(*args)
        raise PeerFailed("a rank was lost", 9, "killed")

    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            patch.setattr(of_trainer, "collect_values", fail)
        with pytest.raises(PeerFailed) if is_late else nullcontext():
            step((trainer,), 2)
    step((twin,), 2)
    assert (trainer.member.ready is not None) == is_late
    trainer.reset()
    same(trainer, twin)
    step((trainer, twin), 3)
    same(trainer, twin)
    close(trainer, twin)


def test_a_step_that_some_have_written_is_written_by_all(ranks) -> None:
    ranks(4).run(told_late, (0, 2))


def by_path() -> bool:
    """Leaves live on several groups, given by a function from paths."""
    made_twice = [[mf.make_groups(p, timeout_s=20) for p in (4, 2)] for _ in range(2)]
    trainer, twin = (
        made(lambda path, both=both: both["0" in path], guard=None) for both in made_twice
    )
    for k in range(2):
        trainer.step(batch(k))
        trainer.reset()
        twin.step(batch(k))
        same(trainer, twin)
    return all(groups.closed for groups in made_twice[0])


def test_several_groups_by_path(ranks) -> None:
    assert all(ranks(4).run(by_path))


@pytest.mark.parametrize(
    ("verb", "where", "text"),
    [
        ("step", "the loss", "a step begins inside of another one"),
        ("eval", "the loss", "an evaluation in a step of the same groups"),
        ("eval", "backward", "an evaluation in a step of the same groups"),
    ],
)
def test_a_step_or_an_evaluation_in_a_step_is_refused(verb: str, where: str, text: str):
    """Gradients of a step would be applied to parameters that they were not taken at; and hooks of
    backward run on another thread on an accelerator, which could not evaluate."""
    groups, x, inside = mf.make_groups(), torch.ones(4, 2), list[bool]()

    def call(*args: Any) -> None:
        if inside:
            inside.clear()
            getattr(trainer, verb)(x)

    def loss(model: Any, batch: Any) -> Any:
        found = model(batch)
        if where == "the loss":
            call()
        elif found.requires_grad:
            found.register_hook(call)
        return found.sum()

    trainer = mf.Trainer(nn.Linear(2, 1), mf.optim.sgd(0.1), groups, loss=loss)
    trainer.step(x)
    before = trainer.params()
    inside.append(True)
    with pytest.raises(GroupsError, match=text):
        trainer.step(x)
    same_bits(trainer.params(), before)
    trainer.eval(x)
    assert trainer.step(x).step == 2  # and an error here leaves the next one right


# A state that is lost in a write, and what takes its place.


@contextmanager
def cut(where: str) -> Iterator[None]:
    """Rank 1 does not end a step, by an error that is none of this library's."""
    inside = where == "in the write"
    module, name = (_torch, "fused_adamw") if inside else (pure, "opt_step")
    whole = getattr(module, name)

    def raises(*args: Any, **options: Any) -> Any:
        if inside:
            whole(*args, **options)
        raise RuntimeError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(module, name, raises)
        yield


def cut_and_reset(p: int, where: str, apart: bool, folder: str) -> tuple[str, ...]:
    """What the reset says, and the last step; a twin without faults has the same bits after it."""
    saved = mf.Checkpoints(folder, every=2, background=False) if folder else None
    sync = mf.replicas.local_sgd(10) if apart else None
    trainer, twin = twins(p, saved, guard=Guard(), replica_sync=sync)
    step((trainer, twin), 0, 1)
    loaded = ""
    with cut(where), suppress(RuntimeError):
        trainer.step(batch(2))
    with pytest.raises(MicsError, match="no memory"):
        trainer.step(batch(3))
    try:
        trainer.reset()
    except LostStateError as error:
        loaded = f"{error}"
        trainer.state, trainer.sync_state = copy.deepcopy((twin.state, twin.sync_state))
    if trainer.sync_state.step == 3:
        twin.step(batch(2))
    step((trainer, twin), 3, 4)
    same(trainer, twin)
    close(trainer, twin)
    return loaded, f"{trainer.sync_state.step}"


LOST = "no replica holds the state that a lost rank had"


@pytest.mark.parametrize(
    ("p", "where", "apart", "saves", "end"),
    [
        (1, "in the write", False, False, "5"),  # from a replica
        (1, "before it", False, False, "5"),
        (2, "in the write", False, True, "4"),
        (1, "in the write", True, True, "4"),
        (2, "in the write", False, False, LOST),
        (1, "in the write", True, False, LOST),
    ],
)
@pytest.mark.short(
    "1-in the write-False-False-5",
    "2-in the write-False-True-4",
    f"1-in the write-True-False-{LOST}",
)
def test_a_write_that_is_cut_is_made_good_by_a_replica_or_a_save_on_all_ranks(
    ranks, tmp_path: Path, p: int, where: str, apart: bool, saves: bool, end: str
) -> None:
    folder = f"{tmp_path}" if saves else ""
    for loaded, last in ranks(2).run(cut_and_reset, p, where, apart, folder):
        assert last == ("4" if end == LOST else end)
        assert (LOST in loaded) == (end == LOST)
        if end == LOST:
            assert "rank 1: was cut short while it wrote a step" in loaded
            assert "rank 0: step" in loaded
            assert "a state in its place that all ranks have saved, of step" in loaded


def merge_again(policy: str, where: str) -> tuple[int, ...]:
    """Independent replicas go on after a merge that failed."""
    sync = {"local": mf.replicas.local_sgd, "diloco": mf.replicas.diloco}[policy](2)
    groups = mf.make_groups(1, timeout_s=20)
    options = {"guard": Guard(), "replica_sync": sync, "where": where}
    trainer = made(groups, **options)
    step((trainer,), 0)

    def fails(*given: Any) -> None:
        raise ValueError("of one rank alone")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(pure, "merge", fails)
        with pytest.raises((ValueError, MicsError), match="of one rank alone"):
            trainer.step(batch(1))
    with pytest.raises(MicsError, match="of one rank alone"):
        trainer.step(batch(1))
    trainer.reset()
    steps = [trainer.state.step, trainer.sync_state.step]
    mf.same_replicas(replace(trainer.state, opt=(), buffers={}), trainer.groups)
    trainer.step(batch(3))
    trainer.groups.close()
    return *steps, trainer.state.step


@pytest.mark.parametrize(
    ("policy", "where"), [("local", "params=disk:F,states=disk:F"), ("diloco", "")]
)
@pytest.mark.short("local-params=disk:F,states=disk:F")
def test_a_merge_that_failed_is_made_by_a_reset(ranks, tmp_path, policy: str, where: str) -> None:
    found = ranks(2).run(merge_again, policy, where.replace("F", f"{tmp_path}"))
    assert found == [(2, 2, 3)] * 2


def follow() -> None:
    """An optimizer that was given groups goes on on those that took their place, twice."""
    groups, plain = (mf.make_groups(2, timeout_s=20) for _ in range(2))

    def of(groups: Any) -> Any:
        def update(grads: Any, state: Any, params: Any) -> Any:
            norms = mf.optim.leaf_norms(params, groups)
            return mf.shards.map(lambda g, n: -0.1 * g * n, grads, norms), state

        lars = mf.optim.from_update(lambda params: (), update, {})
        clipped = mf.optim.chain(mf.optim.clip_by_global_norm(0.01, groups), adamw(1e-2))
        return mf.optim.by_path({"*norm*": clipped}, default=lars)

    torch.manual_seed(0)
    model = Net()
    trainer, twin = (mf.Trainer(model, of(each), each) for each in (groups, plain))
    for k in range(3):
        step((trainer, twin), k)
        if k < 2:
            trainer.reset()
    same_bits(held_by(trainer)[0], held_by(twin)[0])
    assert groups.closed
    close(trainer, twin)


def test_what_an_optimizer_knows_of_groups_follows_a_reset(ranks) -> None:
    ranks(2).run(follow)
