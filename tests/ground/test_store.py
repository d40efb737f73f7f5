"""What is looked up in a store never waits, whatever other ranks delete meanwhile."""

from typing import Any

import pytest
import torch.distributed as dist

from mics_fn.groups.deciding import tickets_of
from mics_fn.store import looked_up


def store_of(kind: str) -> Any:
    if kind == "served":
        return dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)  # pyright: ignore
    plain = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    return plain if kind == "plain" else dist.PrefixStore("a", plain)  # pyright: ignore


@pytest.mark.parametrize("kind", ["served", "plain", "with a prefix"])
def test_a_key_is_looked_up_without_a_trace(kind: str) -> None:
    store = store_of(kind)
    assert looked_up(store, "key") == ""
    assert not store.check(["key"])
    store.set("key", "value")
    assert looked_up(store, "key") == "value"
    assert store.get("key") == b"value"
    store.delete_key("key")
    assert looked_up(store, "key") == ""


class Leaving:
    """A store in which another rank takes its ticket back right after it was seen."""

    def __init__(self) -> None:
        self.inner = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        self.inner.set("round/here/0", "[1]")
        self.inner.set("round/here/1", "[2]")

    def check(self, keys: list[str]) -> bool:
        found = self.inner.check(keys)
        self.inner.delete_key("round/here/1")
        return found

    def get(self, key: str) -> bytes:
        assert self.inner.check([key]), "this waits for a key that nobody sets"
        return self.inner.get(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.inner.compare_set(key, expected, desired)


def test_tickets_that_are_taken_back_meanwhile_are_not_waited_for() -> None:
    assert tickets_of(Leaving(), "round", [0, 1, 2]) == {0: [1], 1: [2]}
