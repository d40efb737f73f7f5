"""`Habit`: what comes next in a sequence that repeats, found from the sequence alone.

[Note: one guess everywhere] A guess depends on nothing but the sequence. So ranks that have made
the same calls guess the same next one, without a message, and each of them knows what the others
guess.
"""

from collections.abc import Hashable, Sequence
from typing import Any

_MOST = 8192  # entries that are remembered; when there are more, the older half is forgotten


class Habit:
    """A sequence, and a guess of its next entry: what followed where the past was most alike.

    Example:
      >>> habit = Habit()
      >>> for entry in "abcab":
      ...     habit.add(entry)
      >>> habit.guess
      'c'
      >>> habit.add("x")
      >>> habit.guess is None
      True
    """

    def __init__(self) -> None:
        self._past: list[Any] = []
        self._known: dict[Hashable, Any] = {}  # the first of equal entries, to compare identities
        self._at = -1  # place of what is expected next; below 0 if nothing is
        self.guess: Any = None  # the expected entry; None if nothing is

    def follow(self) -> None:
        """Add the entry that was expected."""
        self._past.append(self.guess)
        self._at += 1
        self.guess = self._past[self._at]
        if len(self._past) > _MOST:
            self._forget()

    def add(self, entry: Hashable) -> None:
        """Add any entry."""
        if self.guess is not None and entry == self.guess:
            self.follow()
            return
        known = entry in self._known
        self._past.append(self._known.setdefault(entry, entry))
        self._at = _alike(self._past) if known else -1
        self.guess = self._past[self._at] if self._at >= 0 else None
        if len(self._past) > _MOST:
            self._forget()

    def back(self, count: int) -> Any:
        """The entry so many places before the next one; None if it was forgotten."""
        return self._past[-count] if 0 < count <= len(self._past) else None

    def _forget(self) -> None:
        gone = len(self._past) // 2
        del self._past[:gone]
        self._known = {entry: entry for entry in reversed(self._past)}
        self._past = [self._known[entry] for entry in self._past]
        self._at -= gone
        if self._at < 0:
            self._at = _alike(self._past)
        self.guess = self._past[self._at] if self._at >= 0 else None


def _alike(past: Sequence[Any]) -> int:
    """The place behind the longest earlier match of the end of a sequence, the latest of equals.

    It takes linear time: for each place, how much of the reversed sequence equals its beginning
    follows from what is known of the places before it (the Z algorithm). Equal entries must be the
    same object. The result is -1 if the last entry occurs nowhere else.

    >>> _alike("abcab"), _alike("ab"), _alike("xabyabxab")
    (2, -1, 3)
    """
    back, count = past[::-1], len(past)
    lengths, low, high = [0] * count, 0, 0  # back[low:high] equals the beginning of `back`
    best, found = 0, -1
    for i in range(1, count):
        n = min(high - i, lengths[i - low]) if i < high else 0
        while i + n < count and back[n] is back[i + n]:
            n += 1
        lengths[i] = n
        if i + n > high:
            low, high = i, i + n
        if n > best:
            best, found = n, count - i
    return found
