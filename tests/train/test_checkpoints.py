"""A `Trainer` that is saved to a folder goes on in new processes, to the bit."""

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout as World
from cases import groups_of, placed_as, same_bits
from rank_pool import RankPool
from test_carried import STEPS, fit, held, loader_of, made
from test_data import stateful
from torch.utils.data import DataLoader, TensorDataset

import mics_fn as mf
from mics_fn import checkpoint, optim
from mics_fn.checkpoint import directory, saving
from mics_fn.errors import DesyncError, FileError, LeafError, MicsError
from mics_fn.spans import LOG
from mics_fn.train.resuming import guard_numbers

FOUR, TWO = World((2, 2), 2), World((2,), 2)


def trained(
    world: World,
    case: tuple[str, ...],
    scheme: str | None,
    folder: str | None,
    steps: int,
    seed: int = 1,
) -> Any:
    """A trainer after a `fit`, which saves to a folder and goes on from it; as plain values."""
    (optimizer, options, kind), groups = case, groups_of(world)
    place = groups if scheme is None else placed_as(groups, scheme)
    kept = None if folder is None else mf.Checkpoints(folder, every=3, background=seed == 1)
    torch.manual_seed(groups.position)
    trainer = made(place, optimizer, options, seed, checkpoint=kept)
    if not trainer.state.step:
        torch.manual_seed(groups.position)
    begun = trainer.sync_state.step
    found = fit(trainer, loader_of(kind, groups), steps - begun)
    return begun, held(trainer), guard_numbers(trainer.guard), [vars(each) for each in found]


CASES = {
    "local_sgd": (World((2,), 1), ("lion", "local_sgd", "epochs"), None),
    "diloco": (FOUR, ("adam", "diloco", "shuffle"), None),
    "guard": (FOUR, ("adamw", "guard", "epochs"), None),
    "zero2": (World((2, 2), 4), ("rmsprop", "bf16", "stateful by epoch"), "zero2"),
    "budget": (TWO, ("chain", "budget", "generator"), None),
    "zero3": (FOUR, ("sgd", "bf16", "shuffle"), "zero3"),
    "watched": (FOUR, ("torch adamw", "watched bf16", "epochs"), "zero1"),
    "coded": (FOUR, ("sgd", "coded", "epochs"), None),
    "coded hop 2": (FOUR, ("adam", "coded hop2", "stateful by epoch"), None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.short("local_sgd")
def test_a_run_goes_on_in_new_processes(ranks, tmp_path: Path, name: str) -> None:
    """All steps in one process, and 8 in one, and the others in new ones."""
    (world, case, scheme), pool = CASES[name], ranks(CASES[name][0].world_size)
    want = pool.run(trained, world, case, scheme, None, STEPS)
    first = pool.run(trained, world, case, scheme, str(tmp_path), 8)
    assert checkpoint.latest(tmp_path) in (3, 6)
    with RankPool(world.world_size) as fresh:
        second = fresh.run(trained, world, case, scheme, str(tmp_path), STEPS, 3)
    for a, b, c in zip(want, first, second, strict=True):
        assert (a[0], b[0]) == (0, 0)
        assert 3 <= c[0] <= 8  # calls, of which some were refused
        same_bits(c[1:3], a[1:3])
        same_bits([*b[3][: c[0]], *c[3]], a[3])
    checkpoint.verify(tmp_path)


def simple(groups: mf.Groups, folder: Any, **options: Any) -> mf.Trainer:
    torch.manual_seed(0)
    model, loss = torch.nn.Linear(6, 3), lambda model, x: model(x).square().mean()
    saved = mf.Checkpoints(folder, **options)
    return mf.Trainer(model, optim.adamw(0.1), groups, loss=loss, checkpoint=saved)


def batches(seed: int = 0) -> Any:
    random = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(4, 6, generator=random)


def params_on(world: World, folder: str, steps: int) -> tuple[int, Any]:
    groups = groups_of(world)
    with warnings.catch_warnings():  # of random states, which are those of other ranks
        warnings.simplefilter("ignore")
        trainer = simple(groups, folder, every=3)
    begun = trainer.state.step
    if steps > begun:
        trainer.fit(batches(groups.position), steps - begun, progress=False)
    return begun, trainer.params()


def test_other_ranks_go_on(ranks, tmp_path: Path) -> None:
    saved = ranks(4).run(params_on, FOUR, str(tmp_path), 6)
    for world in (World((1,), 1), World((2, 2), 4)):
        for begun, params in ranks(world.world_size).run(params_on, world, str(tmp_path), 0):
            assert begun == 6
            same_bits(params, saved[0][1])


@contextmanager
def broken_disk(*, on: bool = True) -> Iterator[None]:
    """No file can be written."""

    def broken(path: Path, tensors: Any) -> Any:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        if on:
            patch.setattr(directory, "write_part", broken)
        yield


def fails_once(world: World, folder: str) -> tuple[int, str, list[int]]:
    groups = groups_of(world)
    trainer, data = simple(groups, folder, every=2), batches(groups.position)
    saved: Any = trainer.checkpoint
    trainer.fit(data, 2, progress=False)

    with broken_disk(on=groups.position == 1):
        trainer.fit(data, 1, progress=False)
        trainer.step(next(data))  # step 4 is saved
        saved.every = 10_000  # and none while files cannot be written
        with pytest.raises(FileError, match="rank 1") as caught:
            trainer.fit(data, 2000, progress=False)
    at, saved.every = trainer.state.step, 2
    assert at >= 5
    rest = trainer.fit(data, 4, progress=False)
    assert [m.step for m in rest] == list(range(at + 1, at + 5))
    return at, str(caught.value), checkpoint.steps(folder)


def test_a_save_that_fails_is_raised_after_the_same_step(ranks, tmp_path: Path) -> None:
    found = ranks(2).run(fails_once, TWO, str(tmp_path))
    assert len({repr(each) for each in found}) == 1
    assert 4 not in found[0][2]
    assert found[0][2][-1] > found[0][0]


def test_relative_folders_are_those_of_the_place_in_which_they_were_named(tmp_path, monkeypatch):
    named, made = tmp_path / "named", tmp_path / "made"
    named.mkdir()
    made.mkdir()
    monkeypatch.chdir(named)
    saved, where = mf.Checkpoints("saved", every=1), mf.offload.where("states=disk:./a/../b")
    monkeypatch.chdir(made)
    options: dict[str, Any] = {"where": where, "checkpoint": saved}
    trainer = mf.Trainer(torch.nn.Linear(6, 1), optim.adamw(0.1), mf.make_groups(1), **options)
    monkeypatch.chdir(tmp_path)
    trainer.fit([torch.ones(1, 6)], 2, progress=False)
    assert sorted(os.listdir(named)) == ["b", "saved"]
    assert (sorted(os.listdir(tmp_path)), os.listdir(made)) == (["made", "named"], [])


def on_a_full_disk(folder: str) -> str:
    """What a `Trainer` says if the second rank cannot write to the folder of its checkpoints."""

    def full(dir: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(dir))

    groups = groups_of(TWO)
    with pytest.MonkeyPatch.context() as patch:
        if groups.rank == 1:
            patch.setattr(saving, "TemporaryFile", full)
        with pytest.raises(FileError) as caught:
            simple(groups, folder)
    return str(caught.value)


def test_a_folder_that_one_rank_cannot_write_is_an_error_of_all_at_once(ranks, tmp_path: Path):
    folder = tmp_path / "new"
    for text in ranks(2).run(on_a_full_disk, str(folder)):
        assert text.startswith("Checkpoints: ")
        assert "\n  on rank 1\n" in text
        assert "No space left" in text
    assert not list(folder.iterdir())


# After a failed save, a rollback, and in a folder that another run has used.


def wait_for(trainer: mf.Trainer) -> None:
    """Until the save under way has ended, without a word to anybody."""
    trainer.checkpoint._pending.finish()  # pyright: ignore


def without_resuming(layout: World, folder: str) -> tuple[str, list[int]]:
    groups = groups_of(layout)
    simple(groups, folder, every=2, keep=None).fit(batches(), 6, progress=False)
    other = simple(groups, folder, every=2, resume=False)
    with pytest.raises(FileError) as raised:
        other.fit(batches(), 2, progress=False)
    steps = checkpoint.steps(folder)
    new = simple(groups, f"{folder}/new", every=2, resume=False)
    new.fit(batches(), 4, progress=False)
    new.checkpoint.save(new)  # a step of its own is replaced
    return str(raised.value), steps


def test_a_run_that_did_not_go_on_from_a_folder_replaces_nothing(ranks, tmp_path: Path) -> None:
    found = ranks(2).run(without_resuming, TWO, str(tmp_path))
    assert found[0] == found[1]
    assert "fix: " in found[0][0]
    assert found[0][1] == [2, 4, 6]


def fails_before_a_reset(layout: World, folder: str) -> tuple[list[int], list[str]]:
    groups = mf.make_groups(layout.partition_size, timeout_s=30)
    trainer, data, lines = simple(groups, folder, every=4, keep=None), batches(), list[str]()
    with broken_disk(on=groups.rank == 1):
        for _ in range(4):
            trainer.step(next(data))
        wait_for(trainer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LOG, "warning", lambda text, *args: lines.append(text % args))
        trainer.reset()
    trainer.step(next(data))
    trainer.checkpoint.close()
    trainer.groups.close()
    return checkpoint.steps(folder), lines


def test_a_step_that_was_not_saved_before_a_reset_is_made_up_for(ranks, tmp_path: Path) -> None:
    for steps, lines in ranks(2).run(fails_before_a_reset, TWO, str(tmp_path)):
        assert steps == [5]
        assert [line.partition(":")[0] for line in lines] == ["step 4 was not saved"]


def with_an_odd_loader(layout: World, folder: str) -> str:
    """The state of a loader cannot be saved on one rank."""
    groups = groups_of(layout)
    trainer, loader = simple(groups, folder, every=1, background=False), stateful([torch.ones(6)])
    loader.state_dict = lambda: {"at": object() if groups.rank == 1 else 0}
    with pytest.raises((DesyncError, LeafError)) as caught:
        trainer.fit(loader, 1, progress=False)
    groups.partition.check_open()
    return f"{caught.typename}: {caught.value}"


def test_a_loader_that_cannot_be_saved_on_one_rank_is_an_error_of_all(
    ranks, tmp_path: Path
) -> None:
    other, own = ranks(2).run(with_an_odd_loader, TWO, str(tmp_path))
    assert other.startswith("DesyncError: ")
    assert "rank 1: LeafError: " in other
    assert own.startswith("LeafError: ")
    assert "$extra.data.loader.0.at is object" in own


def with_a_fault(layout: World, at: int) -> bool:
    """Losses of 13 steps in passes of 5; with a step that raises on one rank, and without."""
    runs = []
    for fault in (0, at):
        groups, calls = mf.make_groups(layout.partition_size, timeout_s=30), [0]

        def loss(model: Any, batch: Any) -> torch.Tensor:
            calls[0] += 1  # noqa: B023
            if calls[0] == fault and groups.rank == groups.ranks[-1]:  # noqa: B023
                raise ValueError("stumbled")
            return model(batch[0]).square().mean()

        torch.manual_seed(0)
        trainer = mf.Trainer(torch.nn.Linear(6, 3), optim.adamw(0.1), groups, loss=loss)
        torch.manual_seed(groups.position)
        rows = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
        loader, steps = DataLoader(TensorDataset(rows), 4, shuffle=True), 13
        if fault:
            with pytest.raises((ValueError, MicsError)):
                trainer.fit(loader, steps, progress=False)
            trainer.reset()
        trainer.fit(loader, steps - trainer.state.step, progress=False)
        kept: Any = trainer.passes.kept(13)
        runs.append([kept[x] for x in ("epoch", "samples")])
        runs[-1] += [x.tolist() for x in trainer.params().values()]
        trainer.groups.close()
    return runs[0] == runs[1]


@pytest.mark.parametrize("at", [6, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_reset_of_all_ranks_goes_on_in_the_pass(ranks, at: int) -> None:
    assert ranks(2).run(with_a_fault, TWO, at) == [True, True]
