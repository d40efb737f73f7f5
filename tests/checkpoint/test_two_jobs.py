"""Two jobs of two ranks each on one folder, some of whose processes die and come back."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import trainer_in

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.errors import FileError, MicsError
from mics_fn.store import poll
from tests.stress.fault_trials import end, fork, free_port, host_store, take_place

LAST = {"a": 10**6, "b": 40}  # step; only the newer job comes to its own


def note(folder: Path, job: str, rank: int, text: str) -> None:
    """Say something where the test looks: one line in one write."""
    with open(folder / f"{job}{rank}", "a") as file:
        file.write(f"{text}\n")


def said(folder: Path, job: str, rank: int) -> list[str]:
    path = folder / f"{job}{rank}"
    return path.read_text().splitlines() if path.exists() else []


def is_over(lines: list[str]) -> bool:
    return bool(lines) and lines[-1].startswith(("refused", "ends"))


def train(folder: Path, job: str, rank: int, pause_s: float, *, again: bool) -> None:
    """Step and save until the last step, or until another job has the folder."""
    mf.init_distributed(device="cpu", timeout_s=20)
    groups = mf.make_groups(1, timeout_s=20, heartbeat_s=5.0)
    trainer, resets = trainer_in(folder / "steps", groups), again
    note(folder, job, rank, f"begins at {trainer.state.step}")
    while True:
        try:
            if resets:
                trainer.reset()
                resets = False
            if trainer.state.step >= LAST[job]:
                full = trainer.params()
                note(folder, job, rank, f"ends with {[x.tolist() for x in full.values()]}")
                return
            trainer.step(torch.ones(1, 2))
            trainer.checkpoint.close()  # pyright: ignore[reportOptionalMemberAccess]
            note(folder, job, rank, f"step {trainer.state.step}")
            time.sleep(pause_s)
        except MicsError as error:
            if isinstance(error, FileError) and "taken over" in str(error):
                note(folder, job, rank, f"refused: {' '.join(str(error).split())}")
                return
            resets = True  # also of a save that ended with the other rank


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[int]]]:
    pids: list[int] = []
    ports: dict[str, int] = {}

    def started(job: str, pause_s: float, ranks: tuple[int, ...], *, again: bool) -> list[int]:
        if job not in ports:
            ports[job] = free_port(time.monotonic_ns() % 10_000)
            pids.append(fork(lambda: host_store(ports[job])))

        def program(rank: int) -> None:
            torch.set_num_threads(1)
            take_place(rank, 2, ports[job], apart=True)
            train(tmp_path, job, rank, pause_s, again=again)

        new = [fork(lambda rank=rank: program(rank)) for rank in ranks]
        pids.extend(new)
        return new

    yield started
    end(pids)


def until(done: Callable[[], Any], limit_s: float = 40.0) -> bool:
    return poll(done, 1, time.monotonic() + limit_s)


@pytest.mark.limit(200)
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(each, marks=pytest.mark.thorough) for each in range(2, 14))]
)
def test_the_newer_of_two_jobs_keeps_the_folder(start: Any, tmp_path: Path, seed: int) -> None:
    """Whatever process dies: the older one is refused and takes nothing, the newer one ends."""
    draw = random.Random(seed)
    pauses = {job: draw.choice([0.0, 0.02]) for job in "ab"}
    alive = {"a": start("a", pauses["a"], (0, 1), again=False)}
    assert until(lambda: len(said(tmp_path, "a", 0)) > draw.randrange(2, 6))
    os.kill(alive["a"][0], signal.SIGSTOP)  # so that it saves no more before the newer job begins
    alive["b"] = start("b", pauses["b"], (0, 1), again=False)
    assert until(lambda: len(said(tmp_path, "b", 0)) > 1), "the newer job does not begin"
    gone = set[tuple[str, int]]()

    def replace(job: str, rank: int) -> None:
        """Kill a process, and start another one in its place unless its job has ended just then."""
        if any(is_over(said(tmp_path, job, each)) for each in range(2)):
            return
        os.kill(alive[job][rank], signal.SIGKILL)
        time.sleep(0.5)  # in which the other rank says so if its job has ended
        if any(is_over(said(tmp_path, job, each)) for each in range(2)):
            gone.add((job, rank))
            return
        before = len(said(tmp_path, job, rank)) + 1  # and that it begins: it has no state yet
        (alive[job][rank],) = start(job, pauses[job], (rank,), again=True)
        is_back = lambda: len(said(tmp_path, job, rank)) > before  # noqa: E731
        assert until(lambda: is_back() or is_over(said(tmp_path, job, 1 - rank))), (job, rank)
        if not is_back():
            gone.add((job, rank))

    if seed % 2:  # its first rank is replaced before it hears that another job has the folder
        replace("a", 0)
    else:
        os.kill(alive["a"][0], signal.SIGCONT)
    for job, rank in draw.sample([("a", 0), ("a", 1), ("b", 0), ("b", 1)], 2):
        time.sleep(draw.uniform(0.0, 0.1))
        replace(job, rank)
    for job in "ab":
        for rank in {0, 1} - {each for name, each in gone if name == job}:
            assert until(lambda: is_over(said(tmp_path, job, rank))), (job, rank)  # noqa: B023
            last = said(tmp_path, job, rank)[-1]
            assert ("taken over by another job" in last) == (job == "a"), last
    # A save may end with a process: the job goes on from memory and never makes that save again.
    lines = [line for rank in range(2) for line in said(tmp_path, "b", rank)]
    saved = sorted({int(line.split()[1]) for line in lines if line.startswith("step")})
    older, newer = checkpoint.steps(tmp_path / "steps")
    assert saved[-1] <= newer <= LAST["b"], (newer, saved)
    assert saved[-2] <= older, (older, saved)
    assert checkpoint.verify(tmp_path / "steps").step == newer
