"""Fair measurements on a noisy machine: the things that are compared take turns in one run.

[Note: taking turns] A shared machine is fast one minute and slow the next, so two times that were
taken minutes apart cannot be compared. Here the peers of a comparison take steps in turns, round by
round, and each of them begins a round equally often. A ratio is taken inside each round, between
neighbours in time. The report is the median over rounds, with the least and the most.

Memory on an accelerator is what torch allocated. On the CPU it is resident memory, which includes
code and what the allocator keeps for later.
"""

import contextlib
import ctypes
import itertools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import mics_fn as mf
from mics_fn import _torch, tree
from mics_fn.errors import PlanError
from mics_fn.groups import read_launch
from mics_fn.lab.ranks import launch

# How much memory this process has, and the most that it had since a moment.

STATUS = Path("/proc/self/status")


def memory_bytes(device: torch.device) -> int | None:
    """Return the bytes in use now; None if they cannot be read."""
    if _torch.is_async(device):
        return torch.accelerator.memory_allocated(device)
    return _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int | None:
    """Return the most bytes since `reset_peak`, or ever; None if they cannot be read."""
    if _torch.is_async(device):
        return torch.accelerator.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def reset_peak(device: torch.device) -> int | None:
    """Set the peak to the bytes in use now, and return them; None where that is not possible."""
    if _torch.is_async(device):
        torch.accelerator.reset_peak_memory_stats(device)
        return torch.accelerator.memory_allocated(device)
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps for later does not count
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return _status_bytes("VmRSS")


def give_back_at_once() -> None:
    """Make the allocator return freed blocks of 64 KiB or more to the system at once, if it can.

    Glibc raises the size by itself, up to 32 MB, whenever a larger block is freed, and keeps
    smaller blocks. Resident memory is then more than the memory in use.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD


def _status_bytes(name: str) -> int | None:
    """Read a field of /proc/self/status."""
    text = STATUS.read_text() if STATUS.exists() else ""
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


_calls = itertools.count()  # of `of_all_ranks`, equal on all ranks


def spread(values: Sequence[float]) -> dict[str, float]:
    """Compute the median, the least and the most of some numbers.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'least': 1.0, 'most': 3.0}
    """
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def between(values: dict[str, float], form: str) -> str:
    """Format a spread as text.

    >>> between(spread([1.0, 2.0, 4.0]), ".1f")
    '2.0 (1.0-4.0)'
    """
    return f"{values['median']:{form}} ({values['least']:{form}}-{values['most']:{form}})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Divide our times by theirs, round by round.

    See [Note: taking turns].

    >>> ratio([1.0, 4.0, 3.0], [1.0, 2.0, 2.0])
    {'median': 1.5, 'least': 1.0, 'most': 2.0}
    """
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


class BenchPeer(NamedTuple):
    """Peer of a comparison.

    Args:
        name: its name in tables.
        step: takes one step; called with the number of the step, counted from 0.
    """

    name: str
    step: Callable[[int], Any]


class Laps(NamedTuple):
    """Measurements of one peer on one rank, by `take_turns`."""

    name: str
    seconds: list[float]  # per step, one for each turn
    processor: list[float]  # the same of processor time, with that of all threads
    results: list[Any]  # one per step


@dataclass(frozen=True)
class BenchTurns:
    """Number of steps of a comparison.

    Args:
        rounds: turns of each peer.
        steps: steps of a turn.
        warmup: steps of each peer before its first turn, which are not timed.
    """

    rounds: int = 5
    steps: int = 5
    warmup: int = 2

    @property
    def all_steps(self) -> int:
        """Number of steps that each peer takes."""
        return self.warmup + self.rounds * self.steps

    def __str__(self) -> str:
        return f"{self.rounds} rounds of {self.steps} steps in turns, median (least-most)"


def take_turns(
    peers: Sequence[BenchPeer],
    turns: BenchTurns,
    *,
    device: torch.device,
    fence: Callable[[], Any] = lambda: None,
) -> list[Laps]:
    """Time peers in turns.

    Args:
        peers: what to compare; each takes the same steps in the same order.
        turns: how many steps.
        device: the device on which they work.
        fence: called around each turn, so that the ranks start together.

    Returns:
        The measurements of each peer.
    """
    laps = [Laps(peer.name, [], [], []) for peer in peers]

    def turn(i: int, steps: int) -> tuple[float, float]:
        fence()
        _torch.finish(device)
        started, used = time.perf_counter(), time.process_time()
        for _ in range(steps):
            laps[i].results.append(peers[i].step(len(laps[i].results)))
        _torch.finish(device)
        found = (time.perf_counter() - started) / steps, (time.process_time() - used) / steps
        fence()
        return found

    for i in range(len(peers)):
        turn(i, turns.warmup)
    for number in range(turns.rounds):
        for place in range(len(peers)):
            i = (number + place) % len(peers)
            seconds, processor = turn(i, turns.steps)
            laps[i].seconds.append(seconds)
            laps[i].processor.append(processor)
    return laps


def nbytes(values: Any) -> int:
    """Sum the bytes of all tensors in a pytree."""
    leaves, _ = tree.flatten(values)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def num_ranks(asked: int | None, default: int) -> int:
    """Return the number of ranks of the job around this process, otherwise that asked for.

    Raises:
        PlanError: the job has another number of ranks than was asked for.
    """
    job = read_launch(os.environ)
    if job is None:
        return asked or default
    if asked not in (None, job.world_size):
        what = f"--ranks {asked} in a job of {job.world_size}"
        raise PlanError(what, fix="leave it out, because the job has its ranks already")
    return job.world_size


def on_ranks(work: Callable[[Any], dict], ranks: int, config: Any) -> dict:
    """Run `work(config)` on every rank; return the result of rank 0, and {} on the others.

    In a job this process is one of the ranks; otherwise ranks are launched on this machine.

    Args:
        work: a function of an importable module.
        ranks: how many ranks to launch.
        config: the argument of `work`.
    """
    if read_launch(os.environ) is None:
        return launch(work, ranks, config)[0]
    found = work(config)
    if dist.is_initialized():
        dist.barrier()  # the rank that hosts the store must not leave first
        dist.destroy_process_group()
    return found


def start(device: str) -> torch.device:
    """Start torch.distributed as this rank, and choose its device."""
    # An hour, because ranks of a job wait while the first one measures alone.
    return mf.init_distributed(device=device, timeout_s=3600.0)


def of_all_ranks(value: Any) -> list[Any]:
    """Gather the values of all ranks on every rank, by JSON: with lists for tuples."""
    text = json.dumps(value, default=float)  # such as the loss of a step
    if not dist.is_initialized():
        return [json.loads(text)]
    store, call = _torch.PrefixStore("bench", _torch.default_store()), next(_calls)
    store.set(f"{call}/{dist.get_rank()}", text)
    return [json.loads(store.get(f"{call}/{rank}")) for rank in range(dist.get_world_size())]


def is_first() -> bool:
    """Return whether this process is the one that prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    """Print a line of progress on the terminal of rank 0."""
    if is_first():
        print(text, file=sys.stderr, flush=True)
