"""Compare facts between ranks through a key-value store, before any process group exists.

Ranks that create different groups would hang without any error. So every rank writes its facts to
the store, the first rank judges them all and publishes one verdict, and all ranks read it: n
small writes, n small reads by one rank, and n reads of one key. Ranks that were given others as
`ranks=` meet under another key, where some do not come: that is an error after the time limit.

[Note: the epoch of membership] Which process is which rank changes only in a meeting, and each
meeting begins an epoch with a number of its own. A process that takes a rank's place registers
first, and is a member since an epoch that is later than all before it. Whatever a rank writes under
a key of its own, such as its signs of life and its part of a meeting, begins with this number, and
is written by `compare_set` in the place of what is there: so a process never writes over what a
later one of its rank has written, and finds out that it was replaced. What all ranks of some groups
write lies under the key of their meeting, and so of one epoch.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

from mics_fn import _torch, errors
from mics_fn.store import Store, later, poll

EPOCH = "mics_fn/epoch"  # the key of its number; see [Note: the epoch of membership]
_LINGER_S = 1.0  # how long a rank that fails keeps the store for others to read why
_JUDGED = errors.DesyncError, errors.GroupsError, errors.PlanError
_KINDS = {kind.__name__: kind for kind in (*_JUDGED, errors.CollectiveError)}

Judge = Callable[[dict[int, Any]], Any]  # what each rank wrote -> what all get; raises a verdict


class Meeting(NamedTuple):
    """What the ranks agreed on."""

    key: str  # not used by an earlier meeting
    verdict: Any  # of the judge
    epoch: int = 0  # of the membership that it began; see [Note: the epoch of membership]
    members: Mapping[int, int] = {}  # rank -> since when its process is one


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
    number, since = _next(store, ranks, verb, rank), getattr(store, "since", 1)
    calls, key = f"{prefix_of(ranks, verb)}/calls/{rank}", f"{prefix_of(ranks, verb)}/{number}"
    end = f"{key}/verdict"
    try:
        # As `store.claim`, if the store knows which process writes.
        write = getattr(store, "claim", None) or (lambda key, text: store.set(key, f"1 {text}"))
        write(calls, str(number))
        write(f"{key}/{rank}", json.dumps(mine))
        if rank == ranks[0]:
            found = _judged(store, key, ranks, judge, deadline, check)
            if found is not None:
                store.compare_set(end, "", json.dumps(found))
        if not poll(partial(store.check, [end]), len(ranks), deadline, check):
            store.compare_set(end, "", json.dumps(_absence(store, key, ranks, verb, timeout_s)))
        verdict = json.loads(store.get(end))
    except BaseException:
        # Undo this call, so that after an interrupt all ranks can call again.
        later(store, "delete_key", f"{key}/{rank}")
        later(store, "set", calls, f"{since} {number - 1}")
        raise
    if "error" in verdict:
        raise _KINDS[verdict["error"]](verdict["text"])
    meeting = Meeting(key, verdict["found"], verdict["epoch"], dict(verdict["members"]))
    if meeting.members.get(rank, 1) != since:
        text = f"{verb}: the ranks met a process of rank {rank} that has ended since"
        raise errors.GroupsError(text, fix=f"call {verb} again on all ranks")
    return meeting


def meet_once(
    store: Store, ranks: Sequence[int], rank: int, mine: Any, judge: Judge, *, verb: str, **how: Any
) -> Meeting:
    """Call `meet`; after a failure rank 0, which may host the store, waits until others read it."""
    try:
        return meet(store, ranks, rank, mine, judge, verb=verb, **how)
    except errors.MicsError:
        with suppress(RuntimeError, errors.MicsError):
            key, size = f"{prefix_of(ranks, verb)}/read", len(ranks)
            wanted = -(-store.add(key, 1) // size) * size
            if rank == 0:
                poll(lambda: store.add(key, 0) >= wanted, 1, time.monotonic() + _LINGER_S)
        raise


def past(store: Store, ranks: Sequence[int], verb: str, call: int) -> Meeting | None:
    """What the n-th meeting of these ranks agreed on; None if there was none, or if it failed."""
    key = f"{prefix_of(ranks, verb)}/{call}"
    if not store.check([f"{key}/verdict"]):
        return None
    verdict = json.loads(store.get(f"{key}/verdict"))
    return None if "error" in verdict else Meeting(key, verdict["found"])


def prefix_of(ranks: Sequence[int], verb: str) -> str:
    return f"mics_fn/{sha256(json.dumps([verb, *ranks]).encode()).hexdigest()[:16]}"


def entered(store: Any, ranks: Sequence[int], verb: str, rank: int) -> int:
    """How many meetings of these ranks this one has entered.

    Another process of this rank may have entered one that came to no verdict. The others leave that
    one, and meet under the same key again. So the count goes on at the last verdict.
    """
    prefix = prefix_of(ranks, verb)
    calls = f"{prefix}/calls/{rank}"
    since, number = map(int, store.get(calls).split()) if store.check([calls]) else (1, 0)
    if since < getattr(store, "since", 1):
        while number and not store.check([f"{prefix}/{number}/verdict"]):
            store.delete_key(f"{prefix}/{number}/{rank}")
            number -= 1
    return number


def _next(store: Any, ranks: Sequence[int], verb: str, rank: int) -> int:
    """The number of a new meeting of these ranks, counted from 1 on."""
    number = entered(store, ranks, verb, rank)
    while True:
        number += 1
        end = f"{prefix_of(ranks, verb)}/{number}/verdict"
        # If the others gave up waiting for this rank in that meeting, their count is one ahead.
        missed = store.check([end]) and json.loads(store.get(end))
        if not missed or rank not in missed.get("absent", ()):
            return number


def _judged(
    store: Store,
    key: str,
    ranks: Sequence[int],
    judge: Judge,
    deadline: float,
    check: Callable[[float], None],
) -> dict[str, Any] | None:
    """The verdict on what all ranks wrote; None if some did not come, or one gave up on that."""
    found, members = {}, dict[int, int]()
    for other in ranks:
        mine = f"{key}/{other}"

        def decided(mine: str = mine) -> bool:
            return store.check([mine]) or store.check([f"{key}/verdict"])

        if not poll(decided, 1, deadline, check) or not store.check([mine]):
            return None
        since, _, text = store.get(mine).decode().partition(" ")
        found[other] = json.loads(text)
        if since != "1":
            members[other] = int(since)
    try:
        judgement = judge(found)
        epoch, least = store.add(EPOCH, 1), max(members.values(), default=1)
        if epoch < least:
            epoch = store.add(EPOCH, least - epoch)
        return {"found": judgement, "members": [*members.items()], "epoch": epoch}
    except _JUDGED as error:
        return {"error": type(error).__name__, "text": str(error)}


def _absence(
    store: Store, key: str, ranks: Sequence[int], verb: str, timeout_s: float
) -> dict[str, Any]:
    """The verdict if not all ranks came in time."""
    missing = [rank for rank in ranks[:1024] if not store.check([f"{key}/{rank}"])]
    who = f"{errors.name_ranks(missing)} did not call it"
    if not missing:
        who = f"rank {ranks[0]} did not answer"
    fix = f"call {verb} on all of these ranks, equally often and in the same order"
    lines = [f"expected: {errors.name_ranks(ranks)}"]
    text = errors.message(f"{verb}: {who} within {timeout_s:g} s", lines, fix)
    return {"error": "CollectiveError", "text": text, "absent": missing}


def part_of_start(store: Any, number: int) -> Any:
    """The part of a store for the n-th start with it; the keys of the first are those of torch."""
    return store if number == 1 else _torch.prefixed(store, f"start {number}")


def rejoin_error(what: str, rank: int) -> errors.PeerFailed:
    """The error of a process that uses groups as if it had been there from the start."""
    text = f"{what}: rank {rank} was lost, and this process has taken its place"
    fix = "call trainer.reset(), or groups = mf.reset(groups), on all ranks; go on at state.step"
    return errors.PeerFailed(errors.message(text, fix=fix), rank, "returned")
