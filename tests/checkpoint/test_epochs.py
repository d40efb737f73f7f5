"""Steps that are replaced or damaged, and folders that a newer job takes: what counts, and when."""

import errno
import logging
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of
from children import in_child
from hypothesis import given
from hypothesis import strategies as st
from steps import at, damage_values, load_at, save_at, trainer_in

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.checkpoint import saving
from mics_fn.checkpoint.directory import Folder, Manifest, SavedFile, divided
from mics_fn.errors import FileError


def save_all(folder: Path, *steps: int, **how: Any) -> None:
    groups = mf.make_groups(1)
    for step in steps:
        save_at(folder, step, groups, **how)


def load_here(folder: Path, step: int | None = None, **how: Any) -> int:
    return load_at(folder, mf.make_groups(1), step, **how)


def damage(folder: Path, step: int) -> None:
    (file,) = folder.glob(f"step-{step:08d}*/rank-00000.safetensors")
    damage_values(file)


def failing(name: str, number: int, after: int) -> Callable[..., Any]:
    """A function of `os` that fails once it was called so many times."""
    left, plain = iter(range(after)), getattr(os, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise OSError(number, os.strerror(number))
        return plain(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("name", "number", "after"), [("open", errno.EMFILE, 0), ("preadv", errno.ESTALE, 2)]
)
def test_a_file_that_the_system_cannot_read_is_no_reason_to_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: int
) -> None:
    save_all(tmp_path, 2, 4, 6)
    for verb in (checkpoint.verify, partial(load_here, on_corrupt="previous")):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(name, number, after))
            with pytest.raises(FileError, match=os.strerror(number)) as raised:
                verb(tmp_path)
        assert raised.value.damaged is False
    assert load_here(tmp_path, on_corrupt="previous") == 6


def test_two_steps_can_be_loaded_after_a_rollback(tmp_path: Path) -> None:
    how = {"overwrite": "newer", "keep": 2}
    save_all(tmp_path, 10, 20, 30)
    save_all(tmp_path, 5, **how)
    assert checkpoint.steps(tmp_path) == [5]
    assert checkpoint.latest(tmp_path) == load_here(tmp_path) == 5
    assert load_here(tmp_path, 30) == 30  # replaced, and still there
    damage(tmp_path, 5)
    with pytest.raises(FileError):
        load_here(tmp_path, on_corrupt="previous")
    save_all(tmp_path, 5, **how)
    assert load_here(tmp_path) == 5
    assert load_here(tmp_path, 30) == 30
    save_all(tmp_path, 7, **how)
    assert checkpoint.steps(tmp_path) == [5, 7]
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert [name[:13] for name in left] == ["step-00000005", "step-00000007"]
    save_all(tmp_path, 30, **how)
    assert checkpoint.steps(tmp_path) == [7, 30]


def test_replaced_steps_do_not_count_if_they_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    how = {"overwrite": "newer", "keep": 2}
    save_all(tmp_path, 2, 4, 6, 8)
    plain = os.rename

    def failing(path: Any, *args: Any) -> None:
        if "step-00000008" in os.fsdecode(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        plain(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with caplog.at_level(logging.WARNING, "mics_fn"):
            save_all(tmp_path, 3, **how)
        assert "cannot remove" in caplog.text
        assert "step-00000008" in caplog.text
        assert checkpoint.latest(tmp_path) == load_here(tmp_path) == 3
        save_all(tmp_path, 5, 7, 9, 11, **how)
        assert checkpoint.steps(tmp_path) == [2, 3, 5, 7, 9, 11]
    save_all(tmp_path, 13, **how)
    assert checkpoint.steps(tmp_path) == [11, 13]
    assert not list(tmp_path.glob("step-00000008*"))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), unique=True, max_size=12))
def test_a_step_counts_unless_a_later_epoch_has_one_at_or_below_it(
    found: list[tuple[int, int]],
) -> None:
    names = {pair: f"step-{pair[1]:08d}" + f".{pair[0]:06d}" * (pair[0] > 1) for pair in found}
    want = {
        step: names[epoch, step]
        for epoch, step in found
        if not any(e > epoch and s <= step for e, s in found)
    }
    counting, replaced = divided(names.values())
    assert counting == want
    assert list(counting) == sorted(want, reverse=True)
    assert sorted([*counting.values(), *(name for _, name in replaced)]) == sorted(names.values())


# Two writers of one folder.


def commit_empty(writer: Folder, step: int) -> None:
    """A step of one small file, as far as its folder is concerned."""
    try:
        new = writer.begin(step, "newer")
        (new / "part").write_text("x")
        file = SavedFile([])
        writer.commit(new, Manifest(step, {}, {}, [file]))
        writer.prune(3)
    finally:
        writer.abandon()


CALLS = ("open", "listdir", "rename", "mkdir", "unlink", "rmdir")


class Turns:
    """Threads that call `os` in turns that are drawn: each stands still while another goes on."""

    def __init__(self, seed: int, count: int) -> None:
        self.draw, self.here = random.Random(seed), threading.local()
        self.go, self.ready = [threading.Semaphore(0) for _ in range(count)], threading.Semaphore(0)

    def watched(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if hasattr(self.here, "number"):
                self.ready.release()
                self.go[self.here.number].acquire()
            return plain(*args, **kwargs)

        return call

    def run(self, works: list[Callable[[], None]]) -> None:
        alive = dict(enumerate(works))

        def serve(number: int, work: Callable[[], None]) -> None:
            self.here.number = number
            try:
                work()
            finally:
                del alive[number]
                self.ready.release()

        threads = [threading.Thread(target=serve, args=each) for each in enumerate(works)]
        for thread in threads:
            thread.start()
            self.ready.acquire()
        while alive:
            number = self.draw.choice(list(alive))
            for _ in range(self.draw.choice([1, 10, 100])):
                if number in alive:
                    self.go[number].release()
                    self.ready.acquire()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.thorough)])
def test_nothing_changes_under_an_owner_until_a_newer_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    refused = 0
    for seed in range(count):
        folder, turns = tmp_path / f"{seed}", Turns(seed, 2)
        for step in (1, 2):
            commit_empty(Folder(folder), step)
        wrong, replaced = list[str](), list[int]()

        def job() -> None:
            writer = Folder(folder)  # noqa: B023
            try:
                writer.own()
                known = writer.committed()
                for step in range(max(known) + 1, max(known) + 3):
                    found = writer.committed()
                    writer.check_owned()  # if not, what was seen may be of a newer one
                    commit_empty(writer, step)
                    seen = writer.committed()
                    writer.check_owned()
                    if found != known or max(seen) != step or len(seen) != 3:
                        wrong.append(f"{known}, {found}, {seen} after {step}")  # noqa: B023
                    known = seen
            except FileError as error:
                if "taken over by another job\n  host" not in str(error):
                    wrong.append(str(error))  # noqa: B023
                replaced.append(writer.epoch)  # noqa: B023

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, turns.watched(getattr(os, name)))
            turns.run([job, job])
        assert not wrong, seed
        last = max(int(x.name[7:]) for x in folder.glob(".epoch-*"))
        assert last not in replaced, seed
        assert next(iter(Folder(folder).committed().values())).suffix == f".{last:06d}", seed
        assert all((path / "part").exists() for path in Folder(folder).committed().values())
        refused += len(replaced)
        Folder(folder).own()
        assert not list(folder.glob(".tmp-*")), seed
    assert refused > count / 6


def test_an_older_job_removes_nothing_of_a_newer_one(tmp_path: Path) -> None:
    old, new = Folder(tmp_path), Folder(tmp_path)
    for writer, step in ((old, 1), (old, 2), (new, 3), (new, 4)):
        commit_empty(writer, step)
    with pytest.raises(FileError, match="taken over by another job"):
        old.prune(2)
    assert list(new.committed()) == [4, 3, 2]


def take(folder: Path) -> None:
    """Take a folder, as a job in another process would."""
    Folder(folder).own()


@contextmanager
def taken_at(instant: str, folder: Path) -> Iterator[None]:
    """Another job takes a folder at an instant of a save: at a point, or right before a call."""
    if instant in ("write", "commit"):
        with at(f"save: {instant}", lambda: take(folder)):
            yield
        return
    plain, left = getattr(os, instant), [1]

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if ".tmp-" in os.fspath(path) and left:
            left.clear()
            take(folder)
        return plain(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, instant, call)
        yield


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("instant", ["write", "commit", "mkdir", "rename"])
def test_a_save_that_another_job_overtakes_commits_nothing(
    tmp_path: Path, instant: str, background: bool
) -> None:
    save_all(tmp_path, 1)
    groups, before = mf.make_groups(1), checkpoint.steps(tmp_path)
    who = f"host {socket.gethostname()}, process {os.getpid()}, since .*, from step 1 on"
    with taken_at(instant, tmp_path), pytest.raises(FileError, match=who):
        save_at(tmp_path, 2, groups, background=background)
    with pytest.raises(FileError, match="taken over by another job"):
        save_at(tmp_path, 3, groups)
    assert checkpoint.steps(tmp_path) == before
    names = sorted(os.listdir(tmp_path))
    assert names == [".epoch-000002", "step-00000001"]


def overtaken(layout: Layout, folder: str) -> list[str]:
    groups, found = groups_of(layout), list[str]()
    save_at(folder, 1, groups)
    for background in (True, False):
        there = at("save: write", lambda: take(Path(folder)) if groups.rank else None)
        with there, pytest.raises(FileError) as caught:
            save_at(folder, 2, groups, background=background)
        found.append(str(caught.value))
    return [*found, str(checkpoint.steps(folder))]


def test_all_ranks_hear_who_has_taken_the_folder(ranks, tmp_path: Path) -> None:
    one, two = ranks(2).run(overtaken, Layout((2,), 2), str(tmp_path))
    assert one == two
    assert "has been taken over by another job\n  on rank 0\n  host " in one[0]
    assert one[2] == "[1]"


def with_a_new_first_rank(layout: Layout, folder: str) -> list[str]:
    groups = groups_of(layout)
    save_at(folder, 1, groups)
    if groups.rank == 0:
        take(Path(folder))
        saving._WRITERS.clear()  # as in a process that has just begun
    with mf.make_groups(layout.world_size) as again:
        again.state.members = {0: 2}  # what a meeting with such a process says
        with pytest.raises(FileError) as caught:
            save_at(folder, 2, again)
    return [str(caught.value), str(checkpoint.steps(folder))]


def test_a_process_in_the_place_of_the_first_rank_takes_no_folder_back(ranks, tmp_path) -> None:
    one, two = ranks(2).run(with_a_new_first_rank, Layout((2,), 2), str(tmp_path))
    assert one == two
    assert "has been taken over by another job\n  on rank 0\n  host " in one[0]
    assert one[1] == "[1]"


def trainer_here(folder: Path, width: int = 2) -> mf.Trainer:
    return trainer_in(folder, mf.make_groups(1), width)


def step_of(trainer: mf.Trainer) -> None:
    trainer.step(torch.ones(1, 2))
    trainer.checkpoint.close()  # pyright: ignore[reportOptionalMemberAccess]


def test_a_run_that_cannot_go_on_takes_nothing(tmp_path: Path) -> None:
    old = trainer_here(tmp_path)
    step_of(old)
    with pytest.raises(FileError, match="does not fit"):
        trainer_here(tmp_path, width=3)
    other = Folder(tmp_path)
    with pytest.raises(FileError, match="step 1 would follow"):
        other.begin(1, "never")
    step_of(old)
    assert checkpoint.steps(tmp_path) == [1, 2]


def test_a_step_that_is_committed_while_a_run_begins_is_not_passed_over(tmp_path: Path) -> None:
    old = trainer_here(tmp_path)
    step_of(old)
    plain, left = Folder.own, [1]

    def own(self: Folder, **how: Any) -> None:
        if left and self is not old.checkpoint._writer:  # pyright: ignore
            left.clear()
            step_of(old)
        plain(self, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "own", own)
        assert trainer_here(tmp_path).state.step == 2


def test_a_folder_without_epochs_is_taken_after_its_steps(tmp_path: Path) -> None:
    save_all(tmp_path, 1, 2)
    (tmp_path / ".epoch-000001").unlink()
    trained = in_child(lambda: save_all(tmp_path, 3))
    assert trained == 0
    assert {".epoch-000002", "step-00000003.000002"} < {*os.listdir(tmp_path)}
