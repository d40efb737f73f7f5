"""`Departures`: ranks that make no more calls on their groups, since they closed or reset them.

[Note: ranks that have left] A rank that closes its groups issues no more collectives. If others
still wait for one that it has issued, they get it; but for one that it has not, they would wait
until the timeout. So a rank that leaves writes down, in one entry, how many it has issued over each
communicator, and a rank that waits without progress compares. The last rank that leaves deletes all
that the groups have written in the store, for then nobody reads it any more.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from mics_fn.errors import GroupsError, MicsError, message
from mics_fn.schedules.stalled import Stuck
from mics_fn.schedules.telling import Job
from mics_fn.store import later

LEFT = "left its groups by an error"  # an error that it has already told the others
_RESET = "called reset"


class Departures:
    """Which ranks have left their groups; see [Note: ranks that have left].

    Args:
      job: what all ranks of the groups tell each other.
      size: how many ranks these are.
    """

    def __init__(self, job: Job, size: int) -> None:
        self._job, self._size = job, size
        self._key = f"{job.key}/gone"
        self._notes: dict[int, tuple[str, Mapping[str, int]]] = {}  # what others wrote, by rank
        self._tidy: Callable[[], None] = lambda: None
        self.kept = ""  # a key that outlives the groups
        self._any = self._left = False  # whether any rank has left, and whether this one has

    def depart(self, how: str) -> Callable[[], None]:
        """Say that this rank makes no more calls; a second call has no effect.

        Args:
          how: what it did, for errors of others.

        Returns:
          What deletes all entries of the groups, if this is the last rank; it may take a while.
        """
        job, store = self._job, self._job.store
        if store is None or self._left:
            return self._tidy
        self._left = True
        issued = {calls.key: calls.issued for calls in job.calls}
        job.calls.clear()  # these refer to the channel, and it to them
        try:
            store.set(f"{self._key}/{job.rank}", json.dumps([how, issued]))
            if store.add(self._key, 1) == self._size:
                self._tidy = self._delete_all
            else:
                job.tell()
        except (MicsError, RuntimeError):  # the store is gone, with all that is in it
            pass
        return self._tidy

    def _delete_all(self) -> None:
        store: Any = self._job.store
        with suppress(RuntimeError, NotImplementedError):
            for key in store.list_keys():
                if key.startswith(f"{self._job.key}/") and key != self.kept:
                    later(store, "delete_key", key)

    def read(self) -> None:
        """Read whether any rank has left."""
        if self._job.store is not None:
            self._any = self._job.store.add(self._key, 0) > 0

    def check(self, call: Stuck) -> None:
        """Raise GroupsError if a rank has left without its part of a call that this one waits for.

        Args:
          call: the call.
        """
        error = self.found(call) if self._any else None
        if error is not None:  # a rank that resets its groups does so because of another error
            raise self._job.explain(error, wait=_RESET in f"{error}")

    def closed(self, call: Stuck) -> GroupsError | None:
        """The error of a rank that closed its groups in order, if one did so without its part."""
        error = self.found(call)
        return None if error is None or _RESET in f"{error}" else error

    def found(self, call: Stuck) -> GroupsError | None:
        """The error that `check` raises; None if there is none."""
        for rank in call.ranks:
            how, issued = self._note(rank)
            if how not in ("", LEFT) and issued.get(call.group, 0) < call.number:
                lines = [f"rank {self._job.rank}: waits for {call.text}"]
                fix = "call the same verbs on all ranks before any of them closes its groups"
                if how == _RESET:
                    fix = "call groups = mics_fn.reset(groups), or trainer.reset(), on all ranks"
                what = f"a call that rank {rank} will not make, since it {how}"
                return GroupsError(message(what, lines, fix))
        return None

    def _note(self, rank: int) -> tuple[str, Mapping[str, int]]:
        store, key = self._job.store, f"{self._key}/{rank}"
        if rank not in self._notes and store is not None:
            if not store.check([key]):
                return "", {}
            how, issued = json.loads(store.get(key))
            self._notes[rank] = how, issued
        return self._notes[rank]
