"""What ranks have told for an event, on torch's store, while ranks that are ahead delete it."""

from typing import Any

import pytest
import torch.distributed as dist

from mics_fn.schedules.desync import Channel


class Deleting:
    """A store in which a rank that is ahead deletes a key after some of the next calls."""

    def __init__(self, store: Any, after: set[int]) -> None:
        self.store, self.after, self.asked = store, after, 0

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As the store's; fails if it is asked for ever."""
        self.asked += 1
        assert self.asked < 50
        found = self.store.compare_set(key, expected, desired)
        if self.asked in self.after:
            self.store.delete_key(key)
        return found


def new_store() -> Any:
    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


def channel(store: Any, rank: int) -> Channel:
    return Channel(store, "groups", [0, 1], rank, 5.0)


def test_each_rank_adds_its_number():
    store = new_store()
    assert channel(store, 0).extremes("1/0", 3, "a") == ((3, 0, "a"), (3, 0, "a"))
    assert channel(store, 1).extremes("1/0", 5, "b") == ((3, 0, "a"), (5, 1, "b"))
    assert channel(store, 0).extremes("1/0", 3, "a") == ((3, 0, "a"), (5, 1, "b"))


@pytest.mark.parametrize("after", [{1}, {1, 2}, {2}], ids=str)
def test_a_key_that_is_deleted_meanwhile_begins_anew(after: set[int]):
    store = new_store()
    channel(store, 0).extremes("1/0", 3, "a")
    deleting = Deleting(store, after)
    least, most = channel(deleting, 1).extremes("1/0", 5, "b")
    assert most == (5, 1, "b")
    assert least in ((3, 0, "a"), (5, 1, "b"))
    assert deleting.asked <= 4
