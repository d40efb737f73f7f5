"""`StopRequest`: a wish to stop, as before preemption, agreed on at the end of a step.

[Note: the last step] A signal reaches ranks at different instants, or only one of them, and none
may stop while others go on. So the rank that is asked writes that into the store. The monitor of
each rank answers with the number of the step that this rank has begun, whatever its main thread
does meanwhile, and the last step is the highest of these numbers. A rank that comes to the end of a
step after its monitor has answered reads the answers of all, and waits for those that are missing:
they do not depend on how far the others are, so this wait ends. Until some rank is asked, the end
of a step is a comparison in this process, without a message.
"""

import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, cast

from mics_fn import checks
from mics_fn.errors import CollectiveError, MicsError, name_ranks
from mics_fn.groups import Groups
from mics_fn.store import CHANGES, Store, later, poll

_SIGNALS = (signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))

_NEVER_HANDLED = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}


class StopRequest:
    """A block in which signals do not end this process, but all ranks after the same step.

    Args:
      groups: their ranks stop together.
      signals: those that ask to stop; SIGTERM and SIGUSR1 by default. Outside of the main thread
        pass none. After the block, their previous handlers are back.

    Communication: none in a step, until some rank is asked to stop. Then each rank writes a few
      bytes to the store, and reads those of the others.

    Raises:
      PlanError: one of `signals` is not a signal that a process can handle.

    Example:
      >>> with make_groups(1) as groups, StopRequest(groups) as stop:
      ...     for step in range(1, 100):
      ...         if step == 3:
      ...             signal.raise_signal(signal.SIGTERM)
      ...         if stop.due():
      ...             break
      >>> step, stop.stopping
      (3, True)
    """

    def __init__(self, groups: Groups, signals: Iterable[int] = _SIGNALS) -> None:
        fix = "pass signals that a process can handle, such as [signal.SIGTERM]"
        signals = tuple(signals)
        for number in signals:
            known = isinstance(number, int) and not isinstance(number, bool)
            if not known or number not in signal.valid_signals() or number in _NEVER_HANDLED:
                checks.refuse("StopRequest", "signals", [*signals], "a list of signals", fix)
        self.stopping = False  # whether all ranks stop after the step that has ended
        self._state, self._signals = groups.state, tuple(signals)
        self._timeout_s = groups.timeout_s
        self._state.stops += 1
        self._key = f"{self._state.key}/stop/{self._state.stops}"
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._step = 1  # that this rank has begun
        self._wanted = False  # whether this rank was asked
        self._said: int | None = None  # what the monitor has answered
        self._new = True  # whether the monitor has not looked yet
        self._last: int | None = None

    def ask(self) -> None:
        """Ask all ranks to stop, as a signal does; returns at once."""
        self._wanted = True

    def due(self) -> bool:
        """Whether to stop now; every rank calls it at the end of each step.

        Returns:
          True on all ranks after the same step, and from then on; `stopping` says the same.

        Communication: none until some rank is asked to stop; then once, through the store.

        Raises:
          PeerFailed: another rank failed meanwhile.
          CollectiveError: some rank does not answer.
        """
        if self.stopping:
            return True
        with self._lock:
            alone = len(self._state.ranks) == 1
            if self._said is None and not (alone and self._wanted):
                self._step += 1
                return False
        if self._last is None:
            self._last = self._step if alone else self._agreed()
        self.stopping = self._step >= self._last
        self._step += 1
        return self.stopping

    def _agreed(self) -> int:
        """The last step; see [Note: the last step]."""
        state, store = self._state, cast(Store, self._state.channel.store)
        keys = {rank: f"{self._key}/{rank}" for rank in state.ranks}
        if not poll(
            lambda: store.check(list(keys.values())),
            len(keys),
            time.monotonic() + self._timeout_s,
            lambda idle_s: state.watch.check((), idle_s, state.ranks),
        ):
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            what = f"StopRequest: {name_ranks(missing)} did not answer in {self._timeout_s:g} s"
            fix = "look for a rank that stopped, or that is not in a StopRequest of its own"
            raise CollectiveError(what, fix=fix)
        return max(int(store.get(key)) for key in keys.values())

    def _listen(self, store: Any, changed: bool) -> None:
        """Called by the monitor at each tick, with its own connection to the store."""
        if self._said is not None:
            return
        asked, changed, self._new = f"{self._key}/asked", changed or self._new, False
        if self._wanted:
            store.set(asked, "")
            store.add(CHANGES, 1)
        elif not (changed and store.check([asked])):
            return
        with self._lock:
            self._said = self._step
        store.set(f"{self._key}/{self._state.rank}", str(self._said))

    def _depart(self, store: Store) -> None:
        """Write the answers that others may ask for later; the last rank deletes the keys."""
        with self._lock:
            said, self._said = self._said, self._said or self._step
        if said is None:
            store.set(f"{self._key}/{self._state.rank}", str(self._said))
        if store.add(f"{self._key}/left", 1) == len(self._state.ranks):
            for name in ("asked", "left", *self._state.ranks):
                later(store, "delete_key", f"{self._key}/{name}")

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child, such as a worker of a loader
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._wanted = True

    def __enter__(self) -> "StopRequest":
        self._state.listeners.append(self._listen)
        for number in self._signals:
            self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._state.listeners.remove(self._listen)
        if len(self._state.ranks) > 1 and error is None and not self._state.closed:
            with suppress(MicsError):  # a rank or the store is gone, and nobody will ask
                self._depart(cast(Store, self._state.channel.store))
