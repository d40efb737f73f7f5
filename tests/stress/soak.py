"""`stress faults --soak`: what grows where a process trains, saves, resets and makes trainers."""

import gc
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import mics_fn as mf
from mics_fn import _torch
from mics_fn.collectives.levels import start_all_gather
from mics_fn.errors import MicsError, human_bytes
from mics_fn.lab.bench.turns import memory_bytes, of_all_ranks, on_ranks, say
from mics_fn.lab.report import table
from tests.stress.fault_trials import batch_of, trainer_for

GROWTH_BYTES = 3e6  # of resident memory, from the first look to the last
SETTLES_S = 3.0  # how long threads that end saves and free groups may take
COUNTS = ("descriptors", "threads", "store keys")
WORK = ("steps", "saves", "resets", "trainers")


@dataclass(frozen=True)
class SoakConfig:
    """How long `stress faults --soak` goes on.

    Args:
      steps, saves, resets, trainers: how many of each. Counts are compared from the half of each to
        its end, memory from the first tenth of the steps to the end of all.
      ranks: of the job, in two replicas.
    """

    steps: int = 5_000
    saves: int = 200
    resets: int = 100
    trainers: int = 200
    ranks: int = 4


def run_soak(config: SoakConfig) -> dict[str, Any]:
    """Go on for long on new ranks, and compare what they hold."""
    return on_ranks(soak, config.ranks, config)


def soak(config: SoakConfig) -> dict[str, Any]:
    """Steps, resets and trainers, as one rank of several."""
    started = time.monotonic()
    mf.init_distributed(device="cpu", timeout_s=120.0)
    groups = mf.make_groups(config.ranks // 2, timeout_s=120.0)
    trainer, rank = trainer_for(groups), dist.get_rank()

    def step() -> None:
        trainer.step(batch_of(rank, 1))

    def save() -> None:
        number = next(numbers)
        how: dict[str, Any] = {"step": number, "keep": 2}
        save_one = mf.checkpoint.start_save if number % 2 else mf.checkpoint.save
        save_one(folder, trainer.state, trainer.groups, **how)

    def reset() -> None:
        if rank == 0:  # with a gather under way that the others do not make, and may tell of
            with suppress(MicsError):
                start_all_gather(trainer.groups.hierarchy.route, torch.ones(4))
        trainer.reset()
        step()

    def make() -> None:
        trainer_for(trainer.groups).step(batch_of(rank, 1))

    looks, numbers, work = {}, itertools.count(1), (step, save, reset, make)
    folder = of_all_ranks(tempfile.mkdtemp(prefix="mics_soak_") if rank == 0 else "")[0]
    for name, do in zip(WORK, work, strict=True):
        count = getattr(config, name)
        say(f"{count} {name} ...")
        done, looks[name] = 0, []
        for look in _looks(count):
            looks[name].append(_after(do, look - done, looks[name][-1:]))
            done = look
    if rank == 0:
        shutil.rmtree(folder)
    found = {name: of_all_ranks(each) for name, each in looks.items()}
    return {"looks": found, "seconds": time.monotonic() - started, "missed": grown(found)}


def _looks(count: int) -> tuple[int, int, int]:
    """After how many times to look at what a process holds."""
    return max(1, count // 10), max(1, count // 2), count


def _after(
    do: Callable[[], None], count: int, before: Sequence[dict[str, float]]
) -> dict[str, float]:
    """What this process holds after doing something so many times.

    Threads end saves and free groups a moment later, so what is more than `before` is looked at
    again for a while: what grows stays.
    """
    for _ in range(count):
        do()
    gc.collect()
    dist.barrier()
    found, deadline = _held(), time.monotonic() + SETTLES_S
    while any(found[what] > last[what] for last in before for what in COUNTS):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
        found = _held()
    dist.barrier()
    return found


def _held() -> dict[str, float]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "store keys": _torch.default_store().num_keys(),
        "memory": memory_bytes(torch.device("cpu")) or 0,
    }


def grown(looks: dict[str, list[list[dict[str, float]]]]) -> list[str]:
    """What grew, by name."""
    wrong = [
        f"{what} in {name}"
        for name, ranks in looks.items()
        for what in COUNTS
        if any(last[what] > half[what] for _, half, last in ranks)
    ]
    first = [before["memory"] for before, _, _ in looks["steps"]]
    last = [after["memory"] for _, _, after in looks["trainers"]]
    if max(after - before for before, after in zip(first, last, strict=True)) > GROWTH_BYTES:
        wrong.append("memory")
    return wrong


def render_soak(figures: dict[str, Any], config: SoakConfig) -> str:
    """The figures as a table: of the fullest rank."""
    lines: list[tuple[str, ...]] = [("", "", *COUNTS, "memory")]
    for name, ranks in figures["looks"].items():
        for place, done in enumerate(_looks(getattr(config, name))):
            most = {what: max(each[place][what] for each in ranks) for what in (*COUNTS, "memory")}
            counts = [f"{most[what]:g}" for what in COUNTS]
            lines.append((name, str(done), *counts, human_bytes(most["memory"])))
    title = f"what a rank of {config.ranks} holds, in {figures['seconds']:.0f} s"
    grew = ", ".join(figures["missed"]) or "nothing"
    return f"{table(title, lines)}\n\ngrew: {grew}"
