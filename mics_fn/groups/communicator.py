"""Communicators: their members, this rank's place among them, the bytes sent, and their making."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from mics_fn import _device, _torch
from mics_fn.errors import GroupsError, PeerFailed, first_line, name_ranks
from mics_fn.groups.group_state import NO_FORK, GroupState
from mics_fn.groups.rendezvous import rejoin_error
from mics_fn.groups.topology import fold_ranks
from mics_fn.schedules import Channel
from mics_fn.store import Calls, later, poll
from mics_fn.threads import bounded

_FIX = "look at these ranks' own errors, then call make_groups again on all"


class Traffic:
    """The ledger of a `Groups`: calls and bytes that this rank sent, by purpose.

    Example:
      >>> traffic = Traffic()
      >>> traffic.add("gather node", 4096)
      >>> traffic.snapshot()
      {'gather node': (1, 4096)}
      >>> print(traffic)
      gather node: 4,096 bytes sent in 1 call
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()

    def add(self, what: str, nbytes: int) -> None:
        """Record one call that sends `nbytes`."""
        self.calls[what] += 1
        self.sent_bytes[what] += nbytes

    def clear(self) -> None:
        """Forget everything, for example between two measured steps."""
        self.calls.clear()
        self.sent_bytes.clear()

    def snapshot(self) -> dict[str, tuple[int, int]]:
        """Purpose -> (calls, bytes sent) so far."""
        return {what: (calls, self.sent_bytes[what]) for what, calls in self.calls.items()}

    def __str__(self) -> str:
        lines = [
            f"{what}: {sent:,} bytes sent in {'1 call' if calls == 1 else f'{calls} calls'}"
            for what, (calls, sent) in self.snapshot().items()
        ]
        return "\n".join(lines) or "nothing sent"


@dataclass(frozen=True, eq=False)
class Comm:
    """One communicator, as this rank sees it. With one rank it has no process group.

    Args:
      name: its purpose, such as "gather node" or "replicas".
      ranks: global ranks, in the order of the group.
      rank: this rank's place in `ranks`.
      group: makes the process group at the first call; None for one rank.
      timeout_s: bound in seconds of each wait.
      traffic: the ledger of the groups.
      life: the state of the groups.
      queue: `Pending`s that will issue a collective on it, in the order in which they must do so.
      calls: what this rank has called on it, compared between its ranks.
      fixed_order: whether reductions add up in the order of `ranks` on every backend.
      second: a communicator of the same ranks for the second collective of a mean of codes. The
        first one is on this communicator, so that the next mean can begin there meanwhile.

    Example:
      >>> comm = make_groups(1).communicators["replicas"]
      >>> comm.name, comm.ranks, comm.rank, comm.size
      ('replicas', (0,), 0, 1)
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: Callable[[], dist.ProcessGroup] | None = field(repr=False)
    timeout_s: float
    traffic: Traffic = field(repr=False)
    state: GroupState = field(repr=False)
    queue: deque[Any] = field(default_factory=deque, repr=False)
    calls: Calls = field(default_factory=Calls, repr=False)
    fixed_order: bool = False
    second: "Comm | None" = field(default=None, repr=False)
    _streams: dict[torch.device, torch.Stream] = field(default_factory=dict, repr=False)

    @classmethod
    def of_one(cls, name: str, rank: int, state: "GroupState | None" = None) -> "Comm":
        """A communicator of this rank alone."""
        return cls(name, (rank,), 0, None, 0.0, Traffic(), state or GroupState())

    @property
    def size(self) -> int:
        """Ranks in it."""
        return len(self.ranks)

    @property
    def silent(self) -> bool:
        """Whether there are no connections yet; see [Note: rejoining] in `faults.rejoin`."""
        return self.state.rejoining

    @property
    def adds(self) -> str:
        """How its reductions add up, as text for digests; nothing if the backend decides."""
        return " in fixed order" if self.fixed_order else ""

    @property
    def closed(self) -> bool:
        """Whether its groups were closed."""
        return self.state.closed

    def check_open(self) -> None:
        """Raise GroupsError if its groups were closed or failed, even if its size is 1.

        The first call after they failed while this rank waited for its device raises why.
        """
        closed, failed, unraised = self.state.closed, self.state.failed, self.state.unraised
        if unraised is not None and not closed:
            self.state.unraised = None
            raise unraised
        if not closed and failed is None:
            return
        what = f"'{self.name}' of ranks {fold_ranks(self.ranks)} is used"
        if closed:
            fix = "keep them open, or call make_groups again"
            raise GroupsError(f"{what} after its groups were closed", fix=fix)
        if self.state.forked:
            raise GroupsError(f"{what} in a fork of rank {self.state.rank}", fix=NO_FORK)
        fix = "call groups = mics_fn.reset(groups), or trainer.reset(), on all ranks"
        lines = [f"rank {self.state.rank}: {failed}"]
        raise GroupsError(f"{what} after its groups have failed", lines, fix)

    def stream(self, device: torch.device) -> torch.Stream:
        """The stream of all its collectives on an accelerator, in the order they are issued in."""
        if device not in self._streams:
            self._streams[device] = _device.own_stream(device)
        return self._streams[device]

    def process_group(self) -> dist.ProcessGroup:
        """The process group to communicate over.

        Raises:
          GroupsError: its groups are closed, torch.distributed is shut down, or its size is 1.
        """
        self.check_open()
        if self.state.rejoining:
            raise rejoin_error(f"'{self.name}' of {name_ranks(self.ranks)}", self.state.rank)
        if self.group is None:
            what = f"'{self.name}' holds rank {self.ranks[0]} alone and has no process group"
            raise GroupsError(what, fix="skip communication where size is 1")
        group = self.group()
        if not _torch.is_alive(group):
            what = f"'{self.name}' is used after torch.distributed was shut down"
            fix = "close the groups before destroy_process_group(), make new ones after init"
            raise GroupsError(what, fix=fix)
        return group


@dataclass(frozen=True, eq=False)
class Maker:
    """Makes the communicators of one `Groups`, each with a process group of its own."""

    ranks: tuple[int, ...]  # global rank of each position
    rank: int  # this rank, global
    backend: str
    timeout_s: float
    deadline: float = math.inf  # in seconds of `time.monotonic`, when all groups have to be made
    store: Any = None  # of the job; None for a single rank
    channel: Channel = field(default_factory=Channel)  # of the partition group
    traffic: Traffic = field(default_factory=Traffic)
    state: GroupState = field(default_factory=GroupState)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that ends once every rank has made its groups in it; if one rank fails, all do.

        A rank that went on alone and closed its groups would break connections that others are
        still making.

        Communication: a few small messages to the store.

        Raises:
          GroupsError: another rank failed, or did not finish in time.
        """
        if len(self.ranks) == 1 or self.state.rejoining:
            yield
            return
        store, n, key = self.store, len(self.ranks), self.state.key
        made, failed = f"{key}/made", f"{key}/not made"
        try:
            yield
            store.set(f"{made}/{self.rank}", "made")
            store.add(made, 1)

            def all_made() -> bool:
                return store.check([failed]) or store.add(made, 0) == n

            if not poll(all_made, n, self.deadline, partial(self.state.watch.check, ())):
                ranks = self.ranks[:1024]
                missing = [rank for rank in ranks if not store.check([f"{made}/{rank}"])]
                what = f"{name_ranks(missing)} did not make all groups within {self.timeout_s:g} s"
                store.compare_set(failed, "", what if missing else "")
            what = store.get(failed).decode() if store.check([failed]) else ""
            if what:  # of a rank that failed because of another one, it may be
                raise self.state.watch.explained(
                    GroupsError(f"make_groups: {what}", fix=_FIX), wait=True
                )
        except BaseException as error:
            what = "could not make its groups"
            if isinstance(error.__cause__, TimeoutError):
                what = f"did not make all groups within {self.timeout_s:g} s"
            text = f"rank {self.rank} {what}"
            if isinstance(error, PeerFailed):
                text = first_line(error)
            later(store, "compare_set", failed, "", text)
            self.state.abandon(error)
            raise

    def comm(self, name: str, positions: Sequence[int], *, lazy: bool = False) -> Comm:
        """A communicator of these positions; all of its members call this with equal arguments.

        Args:
          name: its purpose.
          positions: of its members, in its order.
          lazy: whether its process group is made when they first communicate, and not now.

        Raises:
          GroupsError: torch cannot make the process group.
        """
        members = tuple(self.ranks[position] for position in positions)
        make = partial(self._group, name, members, lazy=lazy)
        group = cache(make) if len(members) > 1 and not self.state.rejoining else None
        if group is not None:
            self.state.forgets.append(group.cache_clear)
            if not lazy:
                group()
        place = members.index(self.rank)
        calls = self.channel.calls_of(name, members)
        shared = {"traffic": self.traffic, "state": self.state, "calls": calls}
        comm = Comm(name, members, place, group, self.timeout_s, **shared)
        self.state.forgets.append(comm.queue.clear)
        return comm

    def _group(self, name: str, members: tuple[int, ...], *, lazy: bool) -> dist.ProcessGroup:
        # Groups of one purpose are disjoint, so one member tells them apart.
        unique = f"{self.state.key}/{name}/{members[0]}"
        # Waits and the monitor keep the limit, and name who is behind; torch's must not come first.
        options = {"timeout_s": 2 * self.timeout_s, "backend": self.backend, "name": unique}
        make = partial(_torch.new_group, members, **options, purpose=f"mics_fn {name}")
        try:
            if self.backend == "gloo":  # it connects the members, in C++
                deadline = max(self.deadline, time.monotonic() + self.timeout_s * lazy)
                try:
                    group = bounded(make, deadline, partial(self.state.watch.check, ()))
                except BaseException:
                    _torch.drop_connection()
                    raise
            else:
                group = make()
        except TimeoutError as error:
            for group in _torch.groups_named(unique):
                self.state.own(group)
            what = f"{name_ranks([self.rank])} did not make all groups within {self.timeout_s:g} s"
            raise GroupsError(f"make_groups: {what}", fix=_FIX) from error
        except PeerFailed:
            raise
        except (RuntimeError, ValueError) as error:
            failed = self._failed("make", name, members, error)
            raise self.state.watch.explained(
                failed, wait=isinstance(error, RuntimeError)
            ) from error
        self.state.own(group)
        return group

    def warm_up(self, comms: Iterable[Comm], device: torch.device) -> None:
        """Connect the members of these communicators now, and not inside the first backward.

        Every rank passes them in the order in which they were made. The groups of one purpose are
        disjoint, so each rank is in one group at a time, and the one that is furthest behind never
        waits for a rank that is behind it.

        Raises:
          GroupsError: the backend cannot connect them.
        """
        for comm in comms:
            if comm.size > 1:
                try:
                    _torch.warm_up(comm.process_group(), device)
                except RuntimeError as error:
                    self.state.abandon(error)
                    raise self._failed("connect", comm.name, comm.ranks, error) from error

    def _failed(
        self, did: str, name: str, members: tuple[int, ...], error: Exception
    ) -> GroupsError:
        what = f"make_groups: rank {self.rank} cannot {did} '{name}' of {name_ranks(members)}"
        return GroupsError(what, [first_line(error)], _FIX)
