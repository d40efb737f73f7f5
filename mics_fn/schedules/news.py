"""What ranks write in the store for the others: one key says whether there is anything new.

[Note: news] A rank that tells something writes it under a key of its own, and then adds one to a
counter that the whole job shares. So whoever looks reads this counter, and the rest only if it has
changed: while nobody tells anything a look is one call to the store, whatever the number of ranks.
A reader reads the counter first, so what is told meanwhile changes it once more. Whether news
matters depends on what the reader itself does later, so it keeps what it has read.
"""

import json
from typing import Any

from mics_fn.store import Store

NEWS = "mics_fn/news"  # the key of the counter


class News:
    """The counter; see [Note: news]."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read = self._seen = 0

    def tell(self) -> None:
        """Say that this rank has written something."""
        self._store.add(NEWS, 1)

    def any(self) -> bool:
        """Whether ranks have told anything since what `mark_seen` marks."""
        self._read = self._store.add(NEWS, 0)
        return self._read != self._seen

    def mark_seen(self) -> None:
        """Mark as seen what `any` has found; only after all of it was read without an error."""
        self._seen = self._read


class Log:
    """Entries that ranks append, and that each of them reads once and in one order.

    Args:
      store: shared by these ranks.
      key: prefix of the keys.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._read = 0

    def append(self, entry: Any) -> str:
        """Append what JSON can write; returns its key, to delete once all ranks have read it."""
        key = f"{self._key}/{self._store.add(self._key, 1)}"
        self._store.set(key, json.dumps(entry))
        return key

    def unread(self) -> list[Any]:
        """The entries that this rank has not read, up to one that is not written yet."""
        found = []
        while self._store.check([key := f"{self._key}/{self._read + 1}"]):
            found.append(json.loads(self._store.get(key)))
            self._read += 1
        return found
