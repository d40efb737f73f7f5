"""A rank of a trial of `stress faults --kills`: it loads, checks, and saves until it dies.

The state is a function of the step, so that whoever loads it knows each bit of it.
"""

import mmap
import os
import random
import signal
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import MicsError
from tests.stress.fault_ranks import take_place

SAVING = struct.Struct("b")  # on the board, one per rank: whether it is inside of a save
KEPT = 3  # steps


class Job(NamedTuple):
    """One job, which some of its ranks do not survive."""

    seed: int
    ranks: int
    partition_size: int
    folder: Path
    rolls_back: bool  # whether it goes on from the step before the newest one


def base() -> dict[str, Tensor]:
    """Parameters before the first step: pieces of odd sizes, in two dtypes."""
    found = {"w": torch.arange(42.0).view(6, 7), "b": torch.arange(13.0) / 8}
    return found | {"half": torch.arange(5.0).bfloat16(), "long": torch.arange(6000.0)}


def state_at(step: int, shards: Any) -> dict[str, Any]:
    """The state after a step, given `shard(base())`."""
    moved = tree.map_leaves(lambda x: x + step % 100, shards)
    return {"params": moved, "seen": torch.full((3,), step), "epoch": step}


def is_right(found: mf.checkpoint.Loaded, shards: Any) -> bool:
    """Whether a state is that of its step, bit for bit."""
    wanted = state_at(found.step, shards)
    pairs = zip(tree.flatten(found.state)[0], tree.flatten(wanted)[0], strict=True)
    same = [torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs]
    return all(same) and found.extra == {"step": found.step}


class Rank:
    """One rank of a job, in its own process.

    Args:
      job: it is a part of.
      rank: its number.
      port: of the store.
      board: memory that all processes share.
      pipe: to the process that started it; each line is one thing that it says.
    """

    def __init__(self, job: Job, rank: int, port: int, board: mmap.mmap, pipe: int) -> None:
        self.job, self.rank, self.port = job, rank, port
        self.board, self.pipe = board, pipe

    def serve(self) -> None:
        """Train, and say what happens, until this process is killed."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        take_place(self.rank, self.job.ranks, self.port, apart=True)
        try:
            self._train()
        except BaseException as error:
            typed = isinstance(error, MicsError)
            text = f"{type(error).__name__}: {error}".replace("\n", " | ")
            self._say("ended", int(typed), text[:1500])
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]

    def _train(self) -> None:
        job, folder = self.job, self.job.folder
        mf.init_distributed(device="cpu", timeout_s=20.0)
        groups = mf.make_groups(job.partition_size, timeout_s=20.0, heartbeat_s=4.0)
        shards = mf.shard(base(), groups)
        newest, at = mf.checkpoint.latest(folder), 0
        if newest is not None:
            steps = mf.checkpoint.steps(folder)
            chosen = steps[-2] if job.rolls_back and len(steps) > 1 else None
            found = mf.checkpoint.load(folder, state_at(0, shards), groups, step=chosen)
            at = found.step
            self._say("loaded", at, int(is_right(found, shards)))
        self._say("ready", at)
        draw = random.Random(job.seed)  # the same on all ranks
        while True:
            at += 1
            self._save(at, shards, groups, draw)
            time.sleep(draw.random() * 2e-3)

    def _save(self, step: int, shards: Any, groups: mf.Groups, draw: random.Random) -> None:
        state: Any = state_at(step, shards)
        how: dict[str, Any] = {"step": step, "extra": {"step": step}, "keep": KEPT}
        how |= {"overwrite": "newer"}
        apart = draw.random() < 0.5
        self._say("begins", step)
        self._mark(True)
        if apart:
            pending = mf.checkpoint.start_save(self.job.folder, state, groups, **how)
            for x in tree.flatten(state)[0]:
                if isinstance(x, Tensor):
                    x.zero_()  # the copy is what counts
            while not (pending.done or pending.due()):
                time.sleep(1e-3)
            pending.wait()
        else:
            mf.checkpoint.save(self.job.folder, state, groups, **how)
        self._mark(False)
        self._say("committed", step)

    def _mark(self, saving: bool) -> None:
        SAVING.pack_into(self.board, self.rank * SAVING.size, saving)

    def _say(self, *words: Any) -> None:
        with suppress(BrokenPipeError):
            os.write(self.pipe, (" ".join(map(str, words)) + "\n").encode())
