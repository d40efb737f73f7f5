"""The key-value store that the ranks of a job share, and the calls that they count."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol


class Store(Protocol):
    """The part of `torch.distributed.Store` that this library uses."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...
    def list_keys(self) -> list[str]: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class StoreLost(RuntimeError):
    """The connection to the store failed, or the store does not answer (`silent`)."""

    def __init__(self, text: str, *, silent: bool) -> None:
        super().__init__(text)
        self.silent = silent


class Replaced(StoreLost):
    """Another process has taken the place of this one; its entry says since which epoch."""

    def __init__(self, entry: str) -> None:
        super().__init__(entry, silent=False)
        self.entry = entry


def claim(store: Any, key: str, since: int, text: str, before: str | None = None) -> str:
    """Write an entry of a rank, unless a later process of the same rank has written it.

    Args:
      store: shared by all ranks.
      key: of the entry.
      since: the epoch from which on this process is a member; each entry begins with its writer's.
      text: the rest of it.
      before: what is there, as far as this process knows; None reads it.

    Returns:
      The whole entry.

    Raises:
      Replaced: a later process has written it, and nothing was written.
    """
    mine = f"{since} {text}"
    there = before
    if there is None:
        there = store.get(key).decode() if store.check([key]) else ""
    while True:
        if int(there.partition(" ")[0] or 0) > since:
            raise Replaced(there)
        found = store.compare_set(key, there, mine).decode()
        if found == mine:
            return mine
        there = "" if found == there else found  # it is not there if that was no match


def later(store: Any, name: str, *args: Any) -> None:
    """Queue a call without waiting for its result, if the store can.

    It may fail, as the store may be gone too; so an error that is shown later stays the first.
    """
    ask = getattr(store, "later", None)
    if ask is not None:
        ask(name, *args)
    else:
        with suppress(RuntimeError, NotImplementedError):
            getattr(store, name)(*args)


def value_of(store: Store, key: str) -> str:
    """The text of a key; "" if there is none."""
    return store.get(key).decode() if store.check([key]) else ""


def poll(
    done: Callable[[], bool],
    num_waiting: int,
    deadline: float,
    check: Callable[[float], None] = lambda idle_s: None,
) -> bool:
    """Ask until `done()` is true; False if the deadline passes first.

    Polling, unlike a blocking wait on the store, lets Ctrl-C interrupt at once.

    Args:
      done: asked again and again.
      num_waiting: how many ranks wait on the same store.
      deadline: in seconds of `time.monotonic`.
      check: called with the seconds waited so far; raises if waiting has become useless.
    """
    started = time.monotonic()
    # One server answers all ranks, so each of them asks less often the more of them wait.
    pause_s, longest_s = 0.001, max(0.05, 5e-5 * num_waiting)
    while not done():
        now = time.monotonic()
        if now > deadline:
            return False
        check(now - started)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)
    return True


# What ranks count and say of their calls.

CHANGES = "mics_fn/news"  # the key of a counter of all that ranks write for each other
LEFT = "left its groups by an error"  # of a rank that the others have heard of
Call = tuple[str, str, Hashable, int]  # the verb, what it does, to what, and the bytes


def call_text(call: Call) -> str:
    """A call in words, which other calls do not have.

    >>> call_text(("gather", "gather", "bucket 0 (w)", 8)), call_text(("", "a run ends", "", 0))
    ('gather: gather of bucket 0 (w), 8 bytes', 'a run ends')
    """
    verb, does, about, nbytes = call
    what = f"{does} of {about}" if about else does
    what = f"{what}, {nbytes} bytes" if nbytes else what
    return f"{verb}: {what}" if verb else what


class Stuck(NamedTuple):
    """A call over one communicator that this rank made, and that is not done."""

    group: str  # the key of the communicator's `Calls`, which is the same on all of its ranks
    number: int  # of the call, counted from 1 on in its communicator
    ranks: Sequence[int]
    text: str

    def lacks(self, rank: int, counts: Mapping[str, int]) -> bool:
        """Whether a rank with so many calls on each communicator has not made its part of this."""
        return rank in self.ranks and counts.get(self.group, 0) < self.number


class Calls:
    """The calls of one communicator, counted and not compared."""

    key = ""  # the same on all of its ranks, and no other communicator has it
    number = 0  # of calls so far
    issued = 0  # those of them whose collective was issued

    def add(self, call: Call, meanwhile: Callable[[], object]) -> None:
        """Note a call that is about to be made; returns once it is safe to move data."""
        self.number += 1
