"""The key-value store of a job, as this library uses it, and how one waits for it."""

import time
from collections.abc import Callable
from typing import Any, Protocol


class Store(Protocol):
    """The part of `torch.distributed.Store` used here."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


def poll(done: Callable[[], bool], num_waiting: int, deadline: float) -> bool:
    """Wait by asking, so that an interrupt is heard; False after the deadline."""
    # One store serves all ranks, so the more that wait the more rarely each one asks.
    pause_s, longest_s = 0.001, max(0.05, 5e-5 * num_waiting)
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, longest_s)
    return True
