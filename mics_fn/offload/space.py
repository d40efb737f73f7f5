"""`Space`: which parts of a file are free, as arithmetic."""

from bisect import insort

PAGE = 4096  # bytes; what direct I/O counts in


def padded(nbytes: int) -> int:
    """So many bytes in whole pages.

    >>> padded(0), padded(1), padded(4096), padded(4097)
    (0, 4096, 4096, 8192)
    """
    return -(-nbytes // PAGE) * PAGE


class Space:
    """The free parts of a file, whose first bytes are a header.

    Args:
      start: where the header ends.

    Example:
      >>> space = Space(4096)
      >>> space.take(8192), space.take(4096), space.end
      (4096, 12288, 16384)
      >>> space.give(4096, 8192)
      >>> space.take(4096), space.used
      (4096, 8192)
    """

    def __init__(self, start: int) -> None:
        self._start = self.end = start  # behind the last byte that is taken
        self._free: list[tuple[int, int]] = []  # offset and bytes, by offset, never adjacent

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self.end - self._start - sum(nbytes for _, nbytes in self._free)

    def take(self, nbytes: int) -> int:
        """The offset of free bytes: the first part that is large enough, or the end of the file."""
        for i, (offset, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[i : i + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                return offset
        offset = self.end
        self.end += nbytes
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Take bytes back that `take` has given."""
        if not nbytes:
            return
        insort(self._free, (offset, nbytes))
        joined: list[tuple[int, int]] = []
        for at, size in self._free:
            if joined and sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((at, size))
        if sum(joined[-1]) == self.end:
            self.end, _ = joined.pop()
        self._free = joined
