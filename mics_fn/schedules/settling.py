"""What is learned from a run once it has ended."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from mics_fn.schedules.desync import Channel
from mics_fn.schedules.policy import Learned, OnDemand


def settle(learned: Learned, policy: OnDemand, sizes: Sequence[int], channel: Channel) -> None:
    """Learn from the last run, unless it followed a schedule to its end."""
    last: Any = learned.last
    if last is None or last.settled:
        return
    last.end()
    last.settled = True
    if last.following:
        learned.passes = learned.passes or last.passes or None
        learned.since = last.number if learned.before is None else learned.since
        learned.before = tuple(last.before)
        return
    channel.forget(f"{learned.since}/{k}" for k, _ in learned.before or ())
    learned.before = None
    if not policy.at_once or last.left:
        uses = sha256(repr(last.uses).encode()).hexdigest()[:16]
        channel.compare(f"{last.use_text(len(last.uses))} (digest of its uses: {uses})")
    if not last.uses:
        return
    if not policy.at_once:
        learned.schedule, learned.passes = policy.plan(last.marked, sizes), last.passes or None
        planned = sha256(str(learned.schedule).encode()).hexdigest()[:16]
        channel.compare(f"made a schedule that differs ({planned})")
    if learned.order is None:
        # Replicas reduce together in hop 2, so all ranks of the job keep the order of one rank.
        reduced = [action.buckets[0] for action in last.events if action.kind == "reduce"]
        rest = reversed(range(len(sizes)))
        learned.order = _first_order(channel, f"order/{last.number}", [*reduced, *rest])
        used = [i for ids in last.uses for i in ids]
        learned.firsts = _first_order(channel, f"firsts/{last.number}", [*used, *range(len(sizes))])


def _first_order(channel: Channel, event: str, order: Sequence[int]) -> tuple[int, ...]:
    """The order of first occurrences, as found by the rank that asks first among all ranks."""
    text = channel.first_of(event, " ".join(map(str, dict.fromkeys(order))))
    return tuple(map(int, text.split()))
