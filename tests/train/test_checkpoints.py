"""A `Trainer` that is saved to a folder goes on in new processes, to the bit."""

import errno
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout as World
from cases import groups_of, placed_as, same_bits
from test_carried import OPTIMIZERS, OPTIONS, STEPS, fit, held, loader_of, made
from torch.utils.data import DataLoader, TensorDataset

import mics_fn as mf
from mics_fn import checkpoint, optim
from mics_fn.checkpoint import saving
from mics_fn.errors import FileError, LeafError
from mics_fn.groups import StopRequest
from mics_fn.lab.ranks.pool import RankPool
from mics_fn.train.carried import carried, take_back
from mics_fn.train.plain import guard_numbers

Pools = Callable[[int], RankPool]
FOUR, TWO = World((2, 2), 2), World((2,), 2)


def trained(
    world: World,
    optimizer: str,
    options: str,
    kind: str,
    scheme: str | None,
    folder: str | None,
    steps: int,
    seed: int = 1,
) -> Any:
    """A trainer after a `fit`, which saves to a folder and goes on from it; as plain values."""
    groups = groups_of(world)
    place = groups if scheme is None else placed_as(groups, scheme)
    plain = mf.Trainer

    def with_folder(*args: Any, **given: Any) -> mf.Trainer:
        kept = None if folder is None else mf.Checkpoints(folder, every=5, background=bool(seed))
        return plain(*args, **given, checkpoint=kept)

    mf.Trainer = with_folder  # pyright: ignore
    try:
        torch.manual_seed(groups.position)
        trainer = made(place, optimizer, options, seed)
    finally:
        mf.Trainer = plain
    if not trainer.state.step:
        torch.manual_seed(groups.position)
    begun = trainer.sync_state.step
    with warnings.catch_warnings():  # torchdata calls what torch no longer wants to be called
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        loader = loader_of(kind, groups)
    found = fit(trainer, loader, steps - begun)
    return begun, held(trainer), guard_numbers(trainer.guard), [vars(each) for each in found]


def goes_on(
    ranks: Pools, folder: Path, world: World, *case: str, scheme: str | None = None
) -> None:
    """20 steps in one process, and 12 in one, and the others in new ones."""
    n = world.world_size
    want = ranks(n).run(trained, world, *case, scheme, None, STEPS)
    first = ranks(n).run(trained, world, *case, scheme, str(folder), 12)
    assert checkpoint.latest(folder) in range(8, 11)
    with RankPool(n) as fresh:
        second = fresh.run(trained, world, *case, scheme, str(folder), STEPS, 3)
    for a, b, c in zip(want, first, second, strict=True):
        assert (a[0], b[0]) == (0, 0)
        assert 8 <= c[0] <= 12  # calls, of which some were refused
        same_bits(c[1:3], a[1:3])
        same_bits([*b[3][: c[0]], *c[3]], a[3])
    checkpoint.verify(folder)


CASES = [
    ("adamw", "guard", "epochs", None, FOUR),
    ("adam", "diloco", "shuffle", None, FOUR),
    ("rmsprop", "bf16", "stateful by epoch", "zero2", World((2, 2), 4)),
    ("chain", "budget", "generator", None, TWO),
    ("lion", "local_sgd", "epochs", None, World((2,), 1)),
]
PLACED = [
    ("adamw", "plain", "epochs", "zero1", FOUR),
    ("sgd", "bf16", "shuffle", "zero3", FOUR),
    ("torch adamw", "watched bf16", "epochs", None, FOUR),
    ("torch sgd", "plain", "generator", None, TWO),
    ("adagrad", "budget", "epochs", None, FOUR),
    ("adamw", "coded", "epochs", None, FOUR),
    ("adam", "coded hop2", "epochs", None, World((2, 2), 2)),
]
LATER = [pytest.param(case, marks=pytest.mark.thorough) for case in (CASES[0], CASES[3])]


@pytest.mark.parametrize(
    "case", [*CASES[1:3], CASES[4], *LATER, *PLACED], ids=lambda case: "-".join(map(str, case))
)
@pytest.mark.short("lion-local_sgd-epochs-None-2-p1")
def test_a_run_goes_on_in_new_processes(ranks: Pools, tmp_path: Path, case: Any) -> None:
    *names, scheme, world = case
    goes_on(ranks, tmp_path, world, *names, scheme=scheme)


@pytest.mark.thorough
@pytest.mark.parametrize("world", [World((1,), 1), FOUR], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_run_goes_on(
    ranks: Pools, tmp_path: Path, world: World, options: str, optimizer: str
) -> None:
    goes_on(ranks, tmp_path, world, optimizer, options, "stateful by epoch")


def simple(groups: mf.Groups, folder: Any, **options: Any) -> mf.Trainer:
    torch.manual_seed(0)
    model, loss = torch.nn.Linear(6, 3), lambda model, x: model(x).square().mean()
    saved = mf.Checkpoints(folder, **options)
    return mf.Trainer(model, optim.adamw(0.1), groups, loss=loss, checkpoint=saved)


def batches(groups: mf.Groups) -> Any:
    random = torch.Generator().manual_seed(groups.position)
    while True:
        yield torch.randn(4, 6, generator=random)


def params_on(world: World, folder: str, steps: int) -> tuple[int, Any]:
    groups = groups_of(world)
    with warnings.catch_warnings():  # of random states, which are those of other ranks
        warnings.simplefilter("ignore")
        trainer = simple(groups, folder, every=3)
    begun = trainer.state.step
    if steps > begun:
        trainer.fit(batches(groups), steps - begun, progress=False)
    return begun, trainer.params()


def test_other_ranks_go_on(ranks: Pools, tmp_path: Path) -> None:
    saved = ranks(4).run(params_on, FOUR, str(tmp_path), 6)
    for world in (World((1,), 1), TWO, World((2, 2), 4)):
        for begun, params in ranks(world.world_size).run(params_on, world, str(tmp_path), 0):
            assert begun == 6
            same_bits(params, saved[0][1])


def fails_once(world: World, folder: str) -> tuple[int, str, list[int]]:
    groups = groups_of(world)
    trainer, data, plain = simple(groups, folder, every=2), batches(groups), saving.write_part
    saved: Any = trainer.checkpoint
    trainer.fit(data, 2, progress=False)

    def broken(path: Path, tensors: Any) -> Any:
        if groups.position == 1:
            raise OSError(5, "Input/output error")
        return plain(path, tensors)

    saving.write_part = broken
    try:
        trainer.step(next(data))
        trainer.step(next(data))  # step 4 is saved
        saved.every = 10_000  # and none while files cannot be written
        text, at = "", 0
        for _ in range(2000):
            try:
                trainer.step(next(data))
            except Exception as error:
                text, at = f"{type(error).__name__}: {error}", trainer.state.step
                break
    finally:
        saving.write_part, saved.every = plain, 2
    assert "FileError" in text
    assert "rank 1" in text
    assert at >= 5
    rest = trainer.fit(data, 4, progress=False)
    assert [m.step for m in rest] == list(range(at + 1, at + 5))
    return at, text, checkpoint.steps(folder)


def test_a_save_that_fails_is_raised_after_the_same_step(ranks: Pools, tmp_path: Path) -> None:
    found = ranks(2).run(fails_once, TWO, str(tmp_path))
    assert len({repr(each) for each in found}) == 1
    assert 4 not in found[0][2]
    assert found[0][2][-1] > found[0][0]


def stops(world: World, folder: str) -> tuple[int, list[int]]:
    groups = groups_of(world)
    trainer, data = simple(groups, folder, every=1000), batches(groups)
    with StopRequest(groups) as stop:
        trainer.fit(data, 3, progress=False, stop=stop)
        if groups.position == 0:
            signal.raise_signal(signal.SIGTERM)
        trainer.fit(data, 200_000, progress=False, stop=stop)
    return trainer.state.step, checkpoint.steps(folder)


def test_a_request_to_stop_saves(ranks: Pools, tmp_path: Path) -> None:
    for step, steps in ranks(2).run(stops, TWO, str(tmp_path)):
        assert steps == [step]


def test_a_rollback_replaces_later_steps(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    trainer = simple(groups, tmp_path, every=2, keep=None)
    trainer.fit(batches(groups), 8, progress=False)
    assert checkpoint.steps(tmp_path) == [2, 4, 6, 8]
    trainer = simple(groups, tmp_path, every=3, keep=None, resume=False)
    back = checkpoint.load(tmp_path, carried(trainer)[0], groups, step=4)
    take_back(trainer, back.state, back.extra)
    trainer.fit(batches(groups), 2, progress=False)
    assert checkpoint.steps(tmp_path) == [2, 4, 6]


def test_relative_folders_are_those_of_the_place_in_which_they_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / name for name in ("named", "made", "stepped")]
    for place in places:
        place.mkdir()
    monkeypatch.chdir(places[0])
    groups, saved = mf.make_groups(1), mf.Checkpoints("saved", every=1)
    where = mf.offload.where("params=disk:a, states=disk:./a/../b, grads=disk:c")
    assert mf.offload.where(str(where)) == where
    scratch = mf.offload.Scratch("d")
    monkeypatch.chdir(places[1])
    model, loss = torch.nn.Linear(6, 3), lambda model, x: model(x).square().mean()
    trainer = mf.Trainer(
        model, optim.adamw(0.1), groups, loss=loss, where=where, accumulate=2, checkpoint=saved
    )
    monkeypatch.chdir(places[2])
    trainer.step(next(batches(groups)))
    by_hand = checkpoint.start_save("by hand", {"w": torch.ones(2)}, groups, step=1)
    monkeypatch.chdir(tmp_path)
    trainer.fit(batches(groups), 1, progress=False)
    assert by_hand.wait() == places[2] / "by hand" / "step-00000001"
    assert scratch.usable().path.parent == places[0] / "d"
    assert [sorted(os.listdir(place)) for place in places] == [
        list("abcd") + ["saved"],
        [],
        ["by hand"],
    ]
    assert all(os.listdir(places[0] / name) for name in "abcd")
    assert checkpoint.steps(places[0] / "saved") == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "named", "stepped"]


def other_sampler(world: World, folder: str) -> list[str]:
    """What a run says that goes on with a sampler of another seed, or that does not shuffle."""
    groups, found = groups_of(world), list[str]()
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(0)))
    given: list[dict[str, Any]] = [{}, {"seed": 1}, {"shuffle": False}, {}]
    for options in given:
        sampler = mf.sampler(data, groups, **options)
        loader = DataLoader(
            data, 4, sampler=sampler, collate_fn=lambda x: torch.stack([y for (y,) in x])
        )
        trainer = simple(groups, folder, every=1)
        try:
            trainer.fit(loader, 2, progress=False)
        except LeafError as error:
            found.append(str(error))
    return [*found, f"{checkpoint.steps(folder)}"]


def test_a_sampler_of_another_order_is_refused_on_all_ranks(ranks: Pools, tmp_path: Path) -> None:
    one, two = ranks(2).run(other_sampler, TWO, str(tmp_path))
    assert one == two
    assert "seed: saved 0, now 1" in one[0]
    assert "shuffle: saved True, now False" in one[1]
    assert one[2:] == ["[3, 4]"], "two steps, none with the others, and two more"


def test_another_model_is_refused(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    simple(groups, tmp_path, every=1).fit(batches(groups), 1, progress=False)
    other = torch.nn.Linear(6, 4)
    with pytest.raises(FileError, match=r"params.weight: saved \(3, 6\) float32"):
        mf.Trainer(other, optim.adamw(0.1), groups, checkpoint=mf.Checkpoints(tmp_path))
    model, loss = torch.nn.Linear(6, 3), lambda model, x: model(x).square().mean()
    kept = mf.Checkpoints(tmp_path)
    with pytest.raises(mf.errors.PlanError, match="lr: saved 0.1, now 0.2"):
        mf.Trainer(model, optim.adamw(0.2), groups, loss=loss, checkpoint=kept)
    with pytest.raises(FileError, match="cannot be written"):
        simple(groups, "/proc/none", every=1).fit(batches(groups), 1, progress=False)
    with pytest.raises(mf.errors.PlanError, match="every=0"):
        mf.Checkpoints(tmp_path, every=0)


def on_a_full_disk(folder: str) -> str:
    """What a `Trainer` says if the second rank cannot write to the folder of its checkpoints."""
    groups = mf.make_groups(2)
    with pytest.MonkeyPatch.context() as patch:
        if groups.rank == 1:
            patch.setattr(saving, "TemporaryFile", full)
        with pytest.raises(FileError) as caught:
            mf.Trainer(
                torch.nn.Linear(2, 1),
                optim.sgd(0.1),
                groups,
                loss=lambda model, x: model(x).sum(),
                checkpoint=mf.Checkpoints(folder),
            )
    return str(caught.value)


def full(dir: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(dir))


def test_a_folder_that_one_rank_cannot_write_is_an_error_of_all_at_once(ranks, tmp_path: Path):
    folder = tmp_path / "new"
    for text in ranks(2).run(on_a_full_disk, str(folder)):
        assert text == (
            f"Checkpoints: {folder} cannot be written\n"
            "  on rank 1\n"
            "  No space left on device\n"
            "  fix: pass a folder that all ranks share and may write to"
        )
    assert not list(folder.iterdir())
