"""`Checkpoints` after a failed save, a rollback, and in a folder that another run has used."""

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of
from torch.utils.data import DataLoader

import mics_fn as mf
from mics_fn import checkpoint, optim
from mics_fn.checkpoint import saving
from mics_fn.errors import FileError, LeafError, MicsError
from mics_fn.groups import StopRequest
from mics_fn.lab.ranks.pool import RankPool
from mics_fn.train.carried import carried, take_back

Pools = Callable[[int], RankPool]
TWO = Layout((2,), 2)


def made(groups: mf.Groups, folder: Any, **options: Any) -> mf.Trainer:
    torch.manual_seed(0)
    model, loss = torch.nn.Linear(6, 3), lambda model, x: model(x).square().mean()
    saved = mf.Checkpoints(folder, **options)
    return mf.Trainer(model, optim.adamw(0.1), groups, loss=loss, checkpoint=saved)


def batches(seed: int = 0) -> Any:
    random = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(4, 6, generator=random)


@contextmanager
def broken_disk(*, on: bool = True) -> Iterator[None]:
    """No file can be written."""
    plain = saving.write_part

    def broken(path: Path, tensors: Any) -> Any:
        raise OSError(5, "Input/output error")

    saving.write_part = broken if on else plain
    try:
        yield
    finally:
        saving.write_part = plain


def wait_for(trainer: mf.Trainer) -> None:
    """Until the save under way has ended, without a word to anybody."""
    trainer.checkpoint._pending.finish()  # pyright: ignore


def without_resuming(layout: Layout, folder: str) -> tuple[str, list[int]]:
    groups = groups_of(layout)
    made(groups, folder, every=2, keep=None).fit(batches(), 6, progress=False)
    other = made(groups, folder, every=2, resume=False)
    with pytest.raises(FileError) as raised:
        other.fit(batches(), 2, progress=False)
    steps = checkpoint.steps(folder)
    new = made(groups, f"{folder}/new", every=2, resume=False)
    new.fit(batches(), 4, progress=False)
    new.checkpoint.save(new)  # a step of its own is replaced
    return str(raised.value), steps


def test_a_run_that_did_not_go_on_from_a_folder_replaces_nothing(
    ranks: Pools, tmp_path: Path
) -> None:
    found = ranks(2).run(without_resuming, TWO, str(tmp_path))
    assert found[0] == found[1]
    assert "fix: " in found[0][0]
    assert found[0][1] == [2, 4, 6]


def test_a_trainer_that_was_put_back_saves_its_steps_again(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    trainer = made(groups, tmp_path, every=4)
    trainer.fit(batches(), 8, progress=False)
    back = checkpoint.load(tmp_path, carried(trainer)[0], groups, step=4)
    take_back(trainer, back.state, back.extra)
    trainer.fit(batches(seed=1), 4, progress=False)
    want, like = trainer.params(), carried(trainer)[0]
    found = checkpoint.load(tmp_path, like, groups)
    assert found.step == 8
    saved = mf.unshard(found.state["train"].params, groups)
    assert all(torch.equal(saved[name], want[name]) for name in want)


def test_a_save_that_is_due_begins_before_the_error_of_the_last_one(tmp_path: Path) -> None:
    trainer, data = made(mf.make_groups(1), tmp_path, every=1), batches()
    with broken_disk():
        trainer.step(next(data))
        wait_for(trainer)
    with pytest.raises(FileError, match="Input/output error"):
        trainer.step(next(data))
    trainer.checkpoint.close()
    assert checkpoint.steps(tmp_path) == [2]


def test_a_save_by_hand_is_made_though_the_last_one_failed(tmp_path: Path, caplog: Any) -> None:
    trainer = made(mf.make_groups(1), tmp_path, every=1)
    with broken_disk():
        trainer.step(next(batches()))
        wait_for(trainer)
    with caplog.at_level(logging.WARNING, "mics_fn"):
        trainer.checkpoint.save(trainer)
    assert "step 1 was not saved" in caplog.text
    assert checkpoint.steps(tmp_path) == [1]


def test_a_request_to_stop_saves_though_the_last_save_failed(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    trainer = made(groups, tmp_path, every=3)

    def data() -> Iterator[Any]:
        for i, batch in enumerate(batches()):
            if i == 3:
                wait_for(trainer)
                saving.write_part = plain
                signal.raise_signal(signal.SIGTERM)
            yield batch

    plain = saving.write_part
    failed = pytest.raises(FileError, match="Input/output error")
    with StopRequest(groups) as stop, broken_disk(), failed:
        trainer.fit(data(), 9, progress=False, stop=stop)
    assert trainer.state.step == 4
    assert checkpoint.steps(tmp_path) == [4]


def test_a_step_that_a_file_ends_is_not_saved_at_a_request_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = mf.make_groups(1)
    trainer = made(groups, tmp_path, every=100)

    def fails(*args: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        raise FileError("offload: a scratch file cannot be read", "states", "w")

    monkeypatch.setattr("mics_fn.train.trainer.one_step", fails)
    with StopRequest(groups) as stop, pytest.raises(FileError, match="scratch file"):
        trainer.fit(batches(), 9, progress=False, stop=stop)
    assert checkpoint.steps(tmp_path) == []


def fails_before_a_reset(layout: Layout, folder: str) -> tuple[list[int], list[str]]:
    groups = mf.make_groups(layout.partition_size, timeout_s=30)
    trainer, data, lines = made(groups, folder, every=4, keep=None), batches(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("mics_fn").addHandler(handler)
    try:
        with broken_disk(on=groups.rank == 1):
            for _ in range(4):
                trainer.step(next(data))
            wait_for(trainer)
        trainer.reset()
        trainer.step(next(data))
        trainer.checkpoint.close()
    finally:
        logging.getLogger("mics_fn").removeHandler(handler)
    steps = checkpoint.steps(folder)
    trainer.groups.close()
    return steps, [line for line in lines if "was not saved" in line]


def test_a_step_that_was_not_saved_before_a_reset_is_made_up_for(
    ranks: Pools, tmp_path: Path
) -> None:
    for steps, lines in ranks(2).run(fails_before_a_reset, TWO, str(tmp_path)):
        assert steps == [5]
        assert len(lines) == 1
        assert "step 4 was not saved" in lines[0]


class Odd:
    """A loader with a state that cannot be saved on one rank."""

    def __init__(self, odd: bool) -> None:
        self.odd = odd

    def __iter__(self) -> Iterator[Any]:
        return batches()

    def state_dict(self) -> dict[str, Any]:
        return {"at": object() if self.odd else 0}

    def load_state_dict(self, state: Any) -> None:
        pass


def with_an_odd_loader(layout: Layout, folder: str) -> str:
    groups = groups_of(layout)
    trainer = made(groups, folder, every=1, background=False)
    try:
        trainer.fit(Odd(groups.rank == 1), 1, progress=False)
    except (FileError, LeafError) as error:
        groups.partition.check_open()
        return f"{type(error).__name__}: {error}"
    return "none"


def test_a_loader_that_cannot_be_saved_on_one_rank_is_an_error_of_all(
    ranks: Pools, tmp_path: Path
) -> None:
    found = ranks(2).run(with_an_odd_loader, TWO, str(tmp_path))
    assert [text.partition(":")[0] for text in found] == ["FileError", "LeafError"]
    assert "on rank 1" in found[0]
    assert "state_dict() of Odd" in found[0]


class Rows(torch.utils.data.Dataset):
    """Samples that say which they are, in their last number."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.cat(
            [torch.randn(5, generator=torch.Generator().manual_seed(i)), torch.tensor([i])]
        )


LOADERS = ("sampler", "shuffle", "generator", "list")


def loader_of(kind: str, groups: mf.Groups) -> Any:
    rows = Rows()
    if kind == "sampler":
        return DataLoader(rows, 2, sampler=mf.sampler(rows, groups))
    if kind == "list":
        return list(DataLoader(rows, 4))
    generator = torch.Generator().manual_seed(groups.position) if kind == "generator" else None
    return DataLoader(rows, 4, shuffle=True, generator=generator)


def with_a_fault(layout: Layout, kind: str, at: int) -> bool:
    """Losses of 13 steps in passes of 5; with a step that raises on one rank, and without."""
    runs = []
    for fault in (0, at):
        groups, seen, calls = mf.make_groups(layout.partition_size, timeout_s=30), [], [0]

        def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1  # noqa: B023
            if calls[0] == fault and groups.rank == groups.ranks[-1]:  # noqa: B023
                raise ValueError("stumbled")
            return model(x).square().mean()

        torch.manual_seed(0)
        trainer = mf.Trainer(torch.nn.Linear(6, 3), optim.adamw(0.1), groups, loss=loss)
        torch.manual_seed(groups.position)
        loader, steps = loader_of(kind, groups), 13
        if fault:
            try:
                trainer.fit(loader, steps, progress=False)
            except (ValueError, MicsError):
                trainer.reset()
            seen = list(range(trainer.state.step))
        left = steps - len(seen)
        trainer.fit(loader, left, progress=False)
        runs.append([carried(trainer)[1]["data"][x] for x in ("epoch", "batches", "samples")])
        runs[-1] += [x.tolist() for x in trainer.params().values()]
        trainer.groups.close()
    return runs[0] == runs[1]


@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_reset_goes_on_in_the_pass(kind: str, at: int) -> None:
    assert with_a_fault(Layout((1,), 1), kind, at)


def test_a_reset_of_all_ranks_goes_on_in_the_pass(ranks: Pools) -> None:
    for kind, at in (("sampler", 4), ("shuffle", 8)):
        assert ranks(2).run(with_a_fault, TWO, kind, at) == [True, True]
