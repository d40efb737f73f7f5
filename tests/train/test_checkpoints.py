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
from test_carried import STEPS, fit, held, loader_of, made
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
    "of torch": (TWO, ("torch sgd", "plain", "generator"), None),
    "coded": (FOUR, ("adagrad", "coded", "epochs"), None),
    "coded hop 2": (FOUR, ("adam", "coded hop2", "stateful by epoch"), None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.short("local_sgd")
def test_a_run_goes_on_in_new_processes(ranks: Pools, tmp_path: Path, name: str) -> None:
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


def simple(
    groups: mf.Groups, folder: Any, width: int = 3, optimizer: Any = None, **options: Any
) -> mf.Trainer:
    torch.manual_seed(0)
    model, loss = torch.nn.Linear(6, width), lambda model, x: model(x).square().mean()
    saved, optimizer = mf.Checkpoints(folder, **options), optimizer or optim.adamw(0.1)
    return mf.Trainer(model, optimizer, groups, loss=loss, checkpoint=saved)


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


def test_other_ranks_go_on(ranks: Pools, tmp_path: Path) -> None:
    saved = ranks(4).run(params_on, FOUR, str(tmp_path), 6)
    for world in (World((1,), 1), World((2, 2), 4)):
        for begun, params in ranks(world.world_size).run(params_on, world, str(tmp_path), 0):
            assert begun == 6
            same_bits(params, saved[0][1])


def fails_once(world: World, folder: str) -> tuple[int, str, list[int]]:
    groups, plain = groups_of(world), saving.write_part
    trainer, data = simple(groups, folder, every=2), batches(groups.position)
    saved: Any = trainer.checkpoint
    trainer.fit(data, 2, progress=False)

    def broken(path: Path, tensors: Any) -> Any:
        if groups.position == 1:
            raise OSError(5, "Input/output error")
        return plain(path, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_part", broken)
        trainer.fit(data, 1, progress=False)
        trainer.step(next(data))  # step 4 is saved
        patch.setattr(saved, "every", 10_000)  # and none while files cannot be written
        with pytest.raises(FileError, match="rank 1") as caught:
            trainer.fit(data, 2000, progress=False)
    at = trainer.state.step
    assert at >= 5
    rest = trainer.fit(data, 4, progress=False)
    assert [m.step for m in rest] == list(range(at + 1, at + 5))
    return at, str(caught.value), checkpoint.steps(folder)


def test_a_save_that_fails_is_raised_after_the_same_step(ranks: Pools, tmp_path: Path) -> None:
    found = ranks(2).run(fails_once, TWO, str(tmp_path))
    assert len({repr(each) for each in found}) == 1
    assert 4 not in found[0][2]
    assert found[0][2][-1] > found[0][0]


def stops(world: World, folder: str) -> tuple[int, list[int]]:
    groups = groups_of(world)
    trainer, data = simple(groups, folder, every=1000), batches(groups.position)
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
    trainer.fit(batches(groups.position), 8, progress=False)
    assert checkpoint.steps(tmp_path) == [2, 4, 6, 8]
    trainer = simple(groups, tmp_path, every=3, keep=None, resume=False)
    back = checkpoint.load(tmp_path, carried(trainer)[0], groups, step=4)
    take_back(trainer, back.state, back.extra)
    trainer.fit(batches(groups.position), 2, progress=False)
    assert checkpoint.steps(tmp_path) == [2, 4, 6]


def test_relative_folders_are_those_of_the_place_in_which_they_were_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, made = tmp_path / "named", tmp_path / "made"
    named.mkdir()
    made.mkdir()
    monkeypatch.chdir(named)
    groups, saved = mf.make_groups(1), mf.Checkpoints("saved", every=1)
    where = mf.offload.where("params=disk:a, states=disk:./a/../b, grads=disk:c")
    scratch = mf.offload.Scratch("d")
    monkeypatch.chdir(made)
    model, loss = torch.nn.Linear(6, 3), lambda model, x: model(x).square().mean()
    options: dict[str, Any] = {"loss": loss, "where": where, "accumulate": 2, "checkpoint": saved}
    trainer = mf.Trainer(model, optim.adamw(0.1), groups, **options)
    by_hand = checkpoint.start_save("by hand", {"w": torch.ones(2)}, groups, step=1)
    monkeypatch.chdir(tmp_path)
    trainer.fit(batches(), 2, progress=False)
    assert by_hand.wait() == made / "by hand" / "step-00000001"
    assert scratch.usable().path.parent == named / "d"
    assert sorted(os.listdir(named)) == [*"abcd", "saved"]
    assert all(os.listdir(named / name) for name in "abcd")
    assert checkpoint.steps(named / "saved") == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["made", "named"]


def other_sampler(world: World, folder: str) -> list[str]:
    """What a run says that goes on with a sampler of another seed, and then with its own."""
    groups, found = groups_of(world), list[str]()
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(0)))
    for seed in (0, 1, 0):
        sampler = mf.sampler(data, groups, seed=seed)
        loader = DataLoader(
            data, 4, sampler=sampler, collate_fn=lambda x: torch.stack([y for (y,) in x])
        )
        try:
            simple(groups, folder, every=1).fit(loader, 2, progress=False)
        except LeafError as error:
            found.append(str(error))
    return [*found, f"{checkpoint.steps(folder)}"]


def test_a_sampler_of_another_order_is_refused_on_all_ranks(ranks: Pools, tmp_path: Path) -> None:
    one, two = ranks(2).run(other_sampler, TWO, str(tmp_path))
    assert one == two
    assert "seed: saved 0, now 1" in one[0]
    assert one[1:] == ["[3, 4]"], "two steps, none with the other, and two more"


def test_another_model_is_refused(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    simple(groups, tmp_path, every=1).fit(batches(groups.position), 1, progress=False)
    with pytest.raises(FileError, match=r"params.weight: saved \(3, 6\) float32"):
        simple(groups, tmp_path, width=4)
    with pytest.raises(mf.errors.PlanError, match="lr: saved 0.1, now 0.2"):
        simple(groups, tmp_path, optimizer=optim.adamw(0.2))
    with pytest.raises(mf.errors.PlanError, match="every=0"):
        mf.Checkpoints(tmp_path, every=0)


def on_a_full_disk(folder: str) -> str:
    """What a `Trainer` says if the second rank cannot write to the folder of its checkpoints."""
    groups = mf.make_groups(2)
    with pytest.MonkeyPatch.context() as patch:
        if groups.rank == 1:
            patch.setattr(saving, "TemporaryFile", full)
        with pytest.raises(FileError) as caught:
            simple(groups, folder)
    return str(caught.value)


def full(dir: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(dir))


def test_a_folder_that_one_rank_cannot_write_is_an_error_of_all_at_once(ranks, tmp_path: Path):
    folder = tmp_path / "new"
    for text in ranks(2).run(on_a_full_disk, str(folder)):
        assert text.startswith(f"Checkpoints: {folder} cannot be written\n  on rank 1\n  No space")
    assert not list(folder.iterdir())
