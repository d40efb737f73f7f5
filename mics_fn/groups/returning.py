"""A process that takes the place of a rank that was lost, while the other ranks still hold theirs.

[Note: coming back] A rank that was killed is started again, with the same environment and the same
script. The store of the job, which outlives it, says which process had its number before, and what
the ranks have agreed on since. So `init_distributed` and `make_groups` ask nobody: they take from
the store what the first process had agreed on with the others, and give groups that are connected
to nobody. On these a comparison finds that all agree, as they did when the first process made it,
and whatever would move data raises. `reset` is where this process and the others meet: there all
get new groups, and the state that this rank lacks comes from a replica. The default group of torch
is not made again, as groups are made from its store alone, and never move data over it.

A launcher may also have ended all ranks and started all of them again, with the same store. Then
nobody is there to come back to, and they meet as at any start. So a process looks whether some
other rank still gives signs of life, for a few seconds at most; torchrun, which says so in the
environment, always starts all.

What the lost process had written for a meeting that came to no end is taken back. Each rank names
its process in `reset`, so that nobody takes what a process wrote that is gone for words of the one
that came after it.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mics_fn import _torch
from mics_fn.errors import PeerFailed, message
from mics_fn.groups.rendezvous import Meeting, past, take_over
from mics_fn.groups.signs import Process, beat_of
from mics_fn.store import poll

_SIGN_S = 3.0  # in which a rank that lives writes signs of life, in a job of up to 256
_LOOKED_AT = 64  # how many ranks are looked at, at least


class Returning:
    """Whether this process came back, and how much of the script it has done again."""

    def __init__(self) -> None:
        self.came_back = False
        self._calls = Counter[tuple[str, tuple[int, ...]]]()
        self._taken = set[tuple[str, tuple[int, ...]]]()

    def arrive(
        self, store: Any, rank: int, world_size: int, others_live: Callable[[int], bool]
    ) -> int | None:
        """Write down which process this rank is now.

        Args:
          store: of the job.
          rank: this rank.
          world_size: number of ranks.
          others_live: whether some other rank gives signs of life, after the n-th start of the job.

        Returns:
          the number of the start that this process comes back into; None if it is to start with the
          others.
        """
        self.__init__()
        key, mine = f"mics_fn/process/{rank}", Process.own().name
        before = store.get(key).decode() if store.check([key]) else mine
        store.set(key, mine)
        if before == mine:
            return None
        store.set(f"mics_fn/waits/{rank}", json.dumps({}))  # as the lost process may have left
        start = take_over(store, range(world_size), rank, "init_distributed")
        begun = past(store, range(world_size), "init_distributed", start) is not None
        self.came_back = begun and "TORCHELASTIC_RUN_ID" not in os.environ and others_live(start)
        return start if self.came_back else None

    def meeting(self, store: Any, ranks: Sequence[int], verb: str) -> Meeting | None:
        """What the ranks agreed on in this call before this process came; None if they did not."""
        if not self.came_back or len(ranks) == 1:
            return None
        call = (verb, tuple(ranks))
        self._calls[call] += 1
        return past(store, ranks, verb, self._calls[call])

    def take_over(self, store: Any, ranks: Sequence[int], rank: int, verb: str) -> None:
        """Before a meeting: take back what the lost process had begun, once for each kind."""
        call = (verb, tuple(ranks))
        if self.came_back and call not in self._taken:
            take_over(store, ranks, rank, verb)
            self._taken.add(call)


def part_of_start(store: Any, number: int) -> Any:
    """The part of a store for the n-th start with it; the keys of the first are those of torch."""
    return store if number == 1 else _torch.apart(store, f"start {number}")


def some_rank_lives(store: Any, rank: int, world_size: int) -> bool:
    """Whether some other rank writes signs of life now; looks at some of them for a few seconds.

    Args:
      store: under the keys of the monitor.
      rank: this rank.
      world_size: number of ranks.
    """
    others = range(0, world_size, max(1, world_size // _LOOKED_AT))
    keys = [beat_of(other) for other in others if other != rank]

    def beats() -> list[bytes]:
        return [store.get(key) for key in keys if store.check([key])]

    first, limit_s = beats(), _SIGN_S * max(1.0, world_size / 256)
    return poll(lambda: beats() != first, 1, time.monotonic() + limit_s)


def came_back(what: str, rank: int) -> PeerFailed:
    """The error of a process that uses groups as if it had been there from the start."""
    text = f"{what}: rank {rank} was lost, and this process has taken its place"
    fix = "call trainer.reset(), or groups = mf.reset(groups), on all ranks; go on at state.step"
    return PeerFailed(message(text, fix=fix), rank, "returned")


returning = Returning()  # of this process
