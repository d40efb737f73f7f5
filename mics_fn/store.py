"""The key-value store that the ranks of a job share, their calls, and the channel of groups."""

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

# A `torch.distributed.Store`, or what has `set`, `get`, `check`, `add`, `delete_key`, `list_keys`
# and `compare_set` as that has.
Store = Any


class StoreLost(RuntimeError):
    """The connection to the store failed, or the store does not answer (`silent`)."""

    def __init__(self, text: str, *, silent: bool) -> None:
        super().__init__(text)
        self.silent = silent


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


_RUNS_KEPT = 4  # every run has collectives, so ranks are never that many runs apart


@dataclass(eq=False)
class Channel:
    """What the runs of a partition group share through the store; without one, of a single rank.

    It says nothing of faults. What does takes its place as `of_several`, and overrides what is done
    before each call is issued (`calls_of`), where a wait has no progress (`poll_peers`) and where
    an error concerns other ranks; see `mics_fn.faults`.

    Args:
      store: shared by all ranks.
      key: prefix of its keys, which no other groups of this job use.
      ranks: global ranks of the partition group.
      rank: this rank.
      timeout_s: bound in seconds of each wait.
      job_size: number of ranks of the whole job.
    """

    of_several: ClassVar[Callable[..., Any]]  # what is made for several ranks

    store: Any = None
    key: str = ""
    ranks: Sequence[int] = ()
    rank: int = 0
    timeout_s: float = 300.0
    job_size: int = 1

    def __post_init__(self) -> None:
        self.runs = 0  # number of runs so far; the n-th one is the same on all ranks
        self.fixed: dict[Any, Any] = {}  # policy and `Learned` of schedules given without a policy
        self.learned = WeakSet[Any]()  # each a `Learned`, as long as a policy remembers it
        self.calls: list[Any] = []  # of each communicator that this rank is in
        self.run_keys = deque[tuple[int, str]]()  # to delete, by the run that wrote them
        # Raises if a rank of the groups has failed without which a wait cannot end.
        self.check: Callable[..., None] = lambda *args, **kwargs: None

    def delete_old(self) -> None:
        """Delete messages of old runs: nobody reads them, but the store would keep them."""
        while self.run_keys and self.run_keys[0][0] <= self.runs - _RUNS_KEPT:
            later(self.store, "delete_key", self.run_keys.popleft()[1])

    def first_of(self, event: str, text: str) -> str:
        """The text of the rank that came to this event first, among all replicas."""
        if self.store is None:
            return text
        return self.store.compare_set(self._key_of(event), "", text).decode()

    def tally(self, event: str, amount: int) -> int:
        """Add to a number that all replicas share, and return the sum; never waits."""
        return amount if self.store is None else self.store.add(self._key_of(event), amount)

    def _key_of(self, event: str) -> str:
        key = f"{self.key}/all/{event}"
        self.run_keys.append((self.runs, key))
        return key

    def calls_of(self, name: str, ranks: Sequence[int]) -> Calls:
        """The calls of a communicator of these ranks."""
        return Calls()

    def poll_peers(self, stuck: Sequence[Stuck] = ()) -> None:
        """Raise the error that explains a wait without progress."""

    def glance(self) -> None:
        """Call `poll_peers` now and then."""

    def raise_reported(self) -> None:
        """Raise an error that another rank reported."""

    def report(self, text: str) -> None:
        """Make all ranks of the groups raise this error at their next poll."""

    def depart(self, how: str) -> Callable[[], None]:
        """Say that this rank makes no more calls; return what frees the rest."""
        return lambda: None


Channel.of_several = Channel
