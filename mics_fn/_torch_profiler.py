"""Ranges of torch's profilers, by private names of torch.

The public `torch.profiler.record_function` calls an op, which transforms and modes around the
caller would see. What is called here goes to the profilers alone.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler


def profiling() -> bool:
    """Whether a profiler of torch is on: `torch.profiler.profile`, or `emit_nvtx`."""
    return profiler._is_profiler_enabled


def enter(name: str) -> Any:
    """Begin a range of this thread; `leave` ends it."""
    return torch.autograd._record_function_with_args_enter(name)  # pyright: ignore


def leave(record: Any) -> None:
    """End a range; those of a thread end in reverse order."""
    torch.autograd._record_function_with_args_exit(record)  # pyright: ignore


@contextmanager
def _unrecorded() -> Iterator[None]:
    torch.autograd._enable_record_function(False)  # pyright: ignore
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)  # pyright: ignore


_NOTHING = nullcontext()


def unrecorded(on: bool) -> AbstractContextManager[None]:
    """A block in which profilers record nothing of this thread, if `on`.

    What gloo's threads do would be recorded with a copy of the issuing thread's state, in which
    `torch.utils.checkpoint` keeps hooks in Python. Such a thread needs the interpreter to let go of
    them while it holds the lock of its transfer, and `is_completed` waits for that lock with the
    interpreter in its hands: both would wait for ever.
    """
    return _unrecorded() if on and profiling() else _NOTHING
