"""Compare facts between ranks through a key-value store, before any process group exists.

Ranks that create different groups would hang without any error. So every rank writes its facts to
the store, the first rank judges them all and publishes one verdict, and all ranks read it: n
small writes, n small reads by one rank, and n reads of one key.

[Note: waiting for each other] Ranks meet under a key that depends on `ranks=`, so a rank that was
given others would wait under another key, where nobody comes. Each rank therefore also writes down
where it waits. If a rank is missing here because it waits elsewhere for the first rank of this
meeting, then neither meeting can succeed, and the same verdict is published to both at once.

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

from mics_fn import _torch, errors
from mics_fn.groups.peers import Process, heartbeat_of
from mics_fn.store import Store, later, poll

_LINGER_S = 1.0  # how long a rank that fails keeps the store for others to read why
_JUDGED = {
    kind.__name__: kind for kind in (errors.DesyncError, errors.GroupsError, errors.PlanError)
}
_KINDS = _JUDGED | {"CollectiveError": errors.CollectiveError}

Judge = Callable[[dict[int, Any]], Any]  # what each rank wrote -> what all get; raises a verdict


class Meeting(NamedTuple):
    """What the ranks agreed on."""

    key: str  # not used by an earlier meeting
    verdict: Any  # of the judge


def meet(
    store: Store,
    ranks: Sequence[int],
    rank: int,
    mine: Any,
    judge: Judge,
    *,
    verb: str,
    timeout_s: float,
    deadline: float | None = None,
    check: Callable[[float], None] = lambda idle_s: None,
) -> Meeting:
    """Judge the facts of `ranks`; each of them calls this the same number of times for a verb.

    Args:
      store: shared by all ranks.
      ranks: global ranks that meet, in the order of their positions.
      rank: this rank.
      mine: the facts of this rank, in a form that JSON keeps.
      judge: gets those of all ranks by rank; what it returns or raises comes to all of them.
      verb: who calls, for errors.
      timeout_s: bound in seconds of the wait for the others.
      deadline: when it gives up, if other things take of that time; by `time.monotonic`.
      check: as for `poll`.

    Returns:
      A key that is new and the same on all ranks, and what the judge returned.

    Communication: O(n) small messages in all, through the store only.

    Raises:
      DesyncError, GroupsError, PlanError: what the judge raised, on every rank.
      CollectiveError: some rank did not call this in time.
    """
    deadline = time.monotonic() + timeout_s if deadline is None else deadline
    here = _enter(store, ranks, rank, verb)
    here["timeout_s"] = timeout_s
    waits = f"mics_fn/waits/{rank}"
    try:
        store.set(waits, json.dumps(here))
        store.set(f"{here['key']}/{rank}", json.dumps(mine))
        if rank == ranks[0]:
            _judge_all(store, ranks, here, judge, deadline, check)
        key = f"{here['key']}/verdict"
        if not poll(lambda: store.check([key]), len(ranks), deadline, check):
            _publish(store, [here["key"]], _absence(store, here, ranks))
        verdict = json.loads(store.get(key))
    except BaseException:
        # Undo this call, so that after an interrupt all ranks can call again.
        later(store, "delete_key", f"{here['key']}/{rank}")
        later(store, "add", _calls(here["digest"], rank), -1)
        raise
    finally:
        later(store, "set", waits, "{}")
    if "error" in verdict:
        raise _KINDS[verdict["error"]](verdict["text"])
    return Meeting(here["key"], verdict["found"])


def meet_once(
    store: Store, ranks: Sequence[int], rank: int, mine: Any, judge: Judge, *, verb: str, **how: Any
) -> Meeting:
    """Call `meet`; after a failure keep the store until other ranks have read why."""
    try:
        return meet(store, ranks, rank, mine, judge, verb=verb, **how)
    except errors.MicsError:
        until_read(store, ranks, rank, verb)
        raise


def until_read(store: Store, ranks: Sequence[int], rank: int, verb: str) -> None:
    """Make rank 0, which may host the store, wait until others have read a failure.

    Args:
      store: shared by all ranks.
      ranks: that meet, each of which calls this after it has read.
      rank: this rank.
      verb: who called.
    """
    with suppress(RuntimeError, errors.MicsError):
        key, size = f"mics_fn/read/{_digest(ranks, verb)}", len(ranks)
        wanted = -(-store.add(key, 1) // size) * size
        if rank == 0:
            poll(lambda: store.add(key, 0) >= wanted, 1, time.monotonic() + _LINGER_S)


def past(store: Store, ranks: Sequence[int], verb: str, call: int) -> Meeting | None:
    """What the n-th meeting of these ranks agreed on; None if there was none, or if it failed."""
    key = f"mics_fn/{_digest(ranks, verb)}/{call}"
    if not store.check([f"{key}/verdict"]):
        return None
    verdict = json.loads(store.get(f"{key}/verdict"))
    return None if "error" in verdict else Meeting(key, verdict["found"])


def take_over(store: Store, ranks: Sequence[int], rank: int, verb: str) -> int:
    """Go on counting meetings where another process with this rank was lost.

    It may have entered one that came to no verdict. The others leave that one, and meet under the
    same key again. Returns the number of the last one that came to a verdict, or 0.
    """
    digest = _digest(ranks, verb)
    while call := store.add(_calls(digest, rank), 0):
        key = f"mics_fn/{digest}/{call}"
        if store.check([f"{key}/verdict"]):
            break
        store.delete_key(f"{key}/{rank}")
        store.add(_calls(digest, rank), -1)
    return call


def _digest(ranks: Sequence[int], verb: str) -> str:
    return sha256(json.dumps([verb, *ranks]).encode()).hexdigest()[:16]


def _enter(store: Store, ranks: Sequence[int], rank: int, verb: str) -> dict[str, Any]:
    """A new meeting: the n-th of these ranks, where n is this rank's own count of calls."""
    digest = _digest(ranks, verb)
    while True:
        call = store.add(_calls(digest, rank), 1)
        key = f"mics_fn/{digest}/{call}"
        # If the others gave up waiting for this rank in that meeting, their count is one ahead.
        missed = store.check([f"{key}/verdict"]) and json.loads(store.get(f"{key}/verdict"))
        if not missed or rank not in missed.get("absent", ()):
            mine = {"key": key, "digest": digest, "call": call, "verb": verb}
            return mine | {"rank": rank, "ranks": _runs(ranks)}


def _judge_all(
    store: Store,
    ranks: Sequence[int],
    here: dict[str, Any],
    judge: Judge,
    deadline: float,
    check: Callable[[float], None],
) -> None:
    """On the first rank: read what all ranks wrote, and publish the verdict."""
    key, found = here["key"], {}
    for other in ranks:
        mine, there = f"{key}/{other}", {}
        if not poll(partial(_settled, store, other, here, there), 1, deadline, check):
            return _publish(store, [key], _absence(store, here, ranks))
        if there:
            return _publish(store, [key, there["key"]], _conflict(here, there))
        if not store.check([mine]):
            return None
        found[other] = json.loads(store.get(mine))
    try:
        verdict = {"found": judge(found)}
    except tuple(_JUDGED.values()) as error:
        verdict = {"error": type(error).__name__, "text": str(error)}
    return _publish(store, [key], verdict)


def _settled(store: Store, other: int, here: Mapping[str, Any], there: dict[str, Any]) -> bool:
    """Whether `other` came or never will; if it waits elsewhere, that is written to `there`."""
    if store.check([f"{here['key']}/{other}"]):
        return True
    there.update(_waits_for(store, other, here) or {})
    # The first rank of another meeting may have published a verdict for this one already.
    return bool(there) or store.check([f"{here['key']}/verdict"])


def _publish(store: Store, keys: Sequence[str], verdict: dict[str, Any]) -> None:
    """Write a verdict for all ranks that wait under these keys, unless there is one already.

    Two ranks may publish different verdicts to the same two keys at once. Both begin with the same
    key and carry the error that they find there on to the other key, so that all ranks raise the
    same one.
    """
    text = json.dumps(verdict)
    for key in sorted(keys):
        first = store.compare_set(f"{key}/verdict", "", text).decode()
        text = first if "error" in json.loads(first) else text


def _calls(digest: str, rank: int) -> str:
    return f"mics_fn/{digest}/calls/{rank}"


def _waits_for(store: Store, other: int, here: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where else `other` waits for this rank, if it does; see [Note: waiting for each other]."""
    if not store.check([f"mics_fn/waits/{other}"]):
        return None
    there = json.loads(store.get(f"mics_fn/waits/{other}"))
    if not there or there["key"] == here["key"] or here["rank"] not in _expanded(there["ranks"]):
        return None
    came = store.add(_calls(there["digest"], here["rank"]), 0)
    return there if came < there["call"] else None


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as runs [first, step, count], so that the text of a large regular group is short.

    >>> _runs([0, 2, 4, 5]), _expanded(_runs([0, 2, 4, 5])) == [0, 2, 4, 5]
    ([[0, 2, 3], [5, 1, 1]], True)
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and (runs[-1][2] == 1 or rank == runs[-1][0] + runs[-1][1] * runs[-1][2]):
            run = runs[-1]
            run[1], run[2] = (rank - run[0], 2) if run[2] == 1 else (run[1], run[2] + 1)
        else:
            runs.append([rank, 1, 1])
    return runs


def _expanded(runs: list[list[int]]) -> list[int]:
    return [first + step * i for first, step, count in runs for i in range(count)]


def _conflict(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on two ranks that wait for each other in different meetings."""
    both = sorted((here, there), key=lambda meeting: meeting["rank"])
    lines = [f"rank {at['rank']}: ranks {_expanded(at['ranks'])}" for at in both]
    fix = "pass the same ranks= or mesh= on all of these ranks"
    what = f"{here['verb']}: ranks disagree on which ranks share the groups"
    text = errors.message(what, lines, fix)
    return {"error": "DesyncError", "text": text, "absent": [at["rank"] for at in both]}


def _absence(store: Store, here: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    """The verdict if not all ranks came in time."""
    late = [rank for rank in ranks[:1024] if not store.check([f"{here['key']}/{rank}"])]
    who = (
        f"{errors.name_ranks(late)} did not call it" if late else f"rank {ranks[0]} did not answer"
    )
    who = f"{who} within {here['timeout_s']:g} s"
    fix = f"call {here['verb']} on all of these ranks, equally often and in the same order"
    text = errors.message(f"{here['verb']}: {who}", [f"expected: {errors.name_ranks(ranks)}"], fix)
    return {"error": "CollectiveError", "text": text, "absent": late}


# A process that takes the place of a rank that was lost, while the other ranks still hold
# theirs.

_SIGN_S = 3.0  # in which a rank that lives writes signs of life, in a job of up to 256
_LOOKED_AT = 64  # how many ranks are looked at, at least


class Rejoining:
    """Whether this process came back, and how much of the script it has done again."""

    def __init__(self) -> None:
        self.rejoins = False
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
        self.rejoins = begun and "TORCHELASTIC_RUN_ID" not in os.environ and others_live(start)
        return start if self.rejoins else None

    def meeting(self, store: Any, ranks: Sequence[int], verb: str) -> Meeting | None:
        """What the ranks agreed on in this call before this process came; None if they did not."""
        if not self.rejoins or len(ranks) == 1:
            return None
        call = (verb, tuple(ranks))
        self._calls[call] += 1
        return past(store, ranks, verb, self._calls[call])

    def take_over(self, store: Any, ranks: Sequence[int], rank: int, verb: str) -> None:
        """Before a meeting: take back what the lost process had begun, once for each kind."""
        call = (verb, tuple(ranks))
        if self.rejoins and call not in self._taken:
            take_over(store, ranks, rank, verb)
            self._taken.add(call)


def part_of_start(store: Any, number: int) -> Any:
    """The part of a store for the n-th start with it; the keys of the first are those of torch."""
    return store if number == 1 else _torch.apart(store, f"start {number}")


def some_rank_lives(store: Any, rank: int, world_size: int) -> bool:
    """Return whether another rank writes heartbeats; some are polled for a few seconds.

    Args:
      store: under the keys of the monitor.
      rank: this rank.
      world_size: number of ranks.
    """
    others = range(0, world_size, max(1, world_size // _LOOKED_AT))
    keys = [heartbeat_of(other) for other in others if other != rank]

    def beats() -> list[bytes]:
        return [store.get(key) for key in keys if store.check([key])]

    first, limit_s = beats(), _SIGN_S * max(1.0, world_size / 256)
    return poll(lambda: beats() != first, 1, time.monotonic() + limit_s)


def rejoin_error(what: str, rank: int) -> errors.PeerFailed:
    """The error of a process that uses groups as if it had been there from the start."""
    text = f"{what}: rank {rank} was lost, and this process has taken its place"
    fix = "call trainer.reset(), or groups = mf.reset(groups), on all ranks; go on at state.step"
    return errors.PeerFailed(errors.message(text, fix=fix), rank, "returned")


returning = Rejoining()  # of this process
