"""`Channels`: messages for a tree whose leaves live on several groups."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from mics_fn.errors import DesyncError
from mics_fn.schedules.desync import Channel, Progress, Step, Told
from mics_fn.schedules.policy import Learned
from mics_fn.schedules.stalled import Stuck


class Channels(Channel):
    """The channel of a tree whose leaves live on several groups: its ranks agree in each."""

    def __init__(self, parts: Sequence[Channel]) -> None:
        super().__init__()
        self._parts = parts
        self._widest = max(parts, key=lambda part: part.job_size)

    def begin_run(self, progress: Progress, number: int | None = None) -> int:
        """Begin a run with the same number in every group."""
        number = number or 1 + max(part.runs for part in self._parts)
        return max(part.begin_run(progress, number) for part in self._parts)

    def remember(self, learned: Learned) -> None:
        """Note in every group what a run begins with."""
        self._in_each(lambda part: part.remember(learned))

    def compare(self, text: str) -> None:
        """Compare the text in every group of the tree."""
        self._in_each(lambda part: part.compare(text))

    def extremes(
        self, event: str, count: int, text: str, *, lasting: bool = False
    ) -> tuple[Told, Told]:
        """The extremes over all groups."""
        found = [part.extremes(event, count, text, lasting=lasting) for part in self._parts]
        return min(least for least, _ in found), max(most for _, most in found)

    def forget(self, events: Iterable[str]) -> None:
        """Forget in every group."""
        events = list(events)
        self._in_each(lambda part: part.forget(events))

    def refuse(self, texts: Mapping[int, str]) -> None:
        """Refuse in every group."""
        self._in_each(lambda part: part.refuse(texts))

    def leave(self, number: int, step: Step, text: str) -> None:
        """Leave the schedule in every group.

        Ranks may wait in any of them, so this rank announces it in all before it waits in one.
        """
        self._in_each(lambda part: part.announce_leave(number, step, text))
        self._in_each(lambda part: part.await_leave(number, text))

    def look(self, stuck: Sequence[Stuck] = (), issued: Mapping[str, int] | None = None) -> None:
        """Look in every group."""
        self._in_each(lambda part: part.look(stuck, issued))

    def check(self) -> None:
        """Check in every group."""
        self._in_each(lambda part: part.check())

    def glance(self) -> None:
        """Glance in every group."""
        self._in_each(lambda part: part.glance())

    def _in_each(self, call: Callable[[Channel], None]) -> None:
        """Call something in each group; an error in one is reported to the ranks of all."""
        try:
            for part in self._parts:
                call(part)
        except DesyncError as error:
            for part in self._parts:
                part.report(str(error))
            raise

    def first_of(self, event: str, text: str) -> str:
        """Ask the groups that span most of the job."""
        return self._widest.first_of(event, text)

    def tally(self, event: str, amount: int) -> int:
        """Count in the groups that span most of the job."""
        return self._widest.tally(event, amount)


def joined(channels: Sequence[Channel]) -> Channel:
    """The channel of a tree, given that of each of its buckets."""
    distinct = list(dict.fromkeys(channels))
    if len(distinct) > 1:
        return Channels(distinct)
    return distinct[0] if distinct else Channel()
