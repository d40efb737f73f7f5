"""Signals that come while a step is written wait for its end, and none is lost."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mics_fn import threads
from mics_fn.threads import Commit, give_way


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Handlers that note SIGUSR1 and SIGUSR2; pytest's own stays for the rest."""
    found: list[int] = []
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(number, lambda n, frame: found.append(n)) for number in numbers]
    yield found
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in threads._SIGNALS]


def test_the_users_own_handlers_are_called_after_the_block_and_stay(heard: list[int]):
    before = handlers()
    with Commit() as commit:
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1], "nothing is held yet"
        commit.write()
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        assert heard == [signal.SIGUSR1]
    assert heard == [signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1]
    assert handlers() == before


def error_of(
    begin: Callable[[Commit], Any], *numbers: int, error: Exception | None = None
) -> BaseException | None:
    """What comes out of a block in which signals come, and which gets to its end."""
    ended = False
    try:
        with Commit() as commit:
            begin(commit)
            for number in numbers:
                signal.raise_signal(number)
            ended = True
            if error is not None:
                raise error
    except BaseException as found:
        assert ended
        return found
    return None


@pytest.mark.parametrize("name", ["SIGCHLD", "SIGXCPU", "SIGQUIT", "SIGVTALRM", "SIGTERM"])
def test_what_raises_in_a_handler_waits_for_the_end_of_a_write(name: str):
    """As torch's own handler does, where a worker of a DataLoader has died."""

    def handler(number: int, frame: Any) -> None:
        raise RuntimeError(name)

    number = getattr(signal, name)
    before = signal.signal(number, handler)
    try:
        assert f"{error_of(Commit.write, number)}" == name
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("begin", [Commit.block, Commit.write])
def test_handlers_that_raise_do_not_keep_the_others_away(heard: list[int], begin: Any):
    """Nor the error of the block."""
    before = handlers()
    found = error_of(begin, signal.SIGINT, signal.SIGUSR1, error=ValueError("mine"))
    assert isinstance(found, KeyboardInterrupt)
    assert isinstance(found.__context__, ValueError)
    assert (heard, handlers()) == ([signal.SIGUSR1], before)


def result(*numbers: int) -> int:
    """A function in which signals come, and which ends before they are raised."""
    with Commit() as commit:
        commit.write()
        for number in numbers:
            signal.raise_signal(number)
        ending = commit.ending()
    ending[0]
    return 7


def rest_until(done: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Instructions at which Python handles signals, which another thread sends within a moment."""
    deadline = time.monotonic() + limit_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.001)


def test_a_result_is_assigned_before_the_interrupt(heard: list[int]):
    before, kept = handlers(), 0
    try:
        kept = result(signal.SIGINT, signal.SIGUSR1)
        rest_until(lambda: False)
        kept = 0
    except KeyboardInterrupt:
        assert kept == 7
    rest_until(lambda: len(heard) == 1)
    assert (kept, heard, handlers()) == (7, [signal.SIGUSR1], before)
    with Commit() as commit:
        commit.block()
        result(signal.SIGUSR1, signal.SIGUSR2)
        rest_until(lambda: False, limit_s=0.01)
        assert len(heard) == 1
    assert heard[1:] == [signal.SIGUSR1, signal.SIGUSR2]
    assert handlers() == before


def test_an_inner_block_leaves_signals_to_the_outer_one(heard: list[int]):
    with Commit() as outer:
        outer.block()
        with Commit() as inner:
            inner.write()
            signal.raise_signal(signal.SIGUSR1)
        give_way(1e9)
        assert heard == [], "the inner block writes for the outer one"
    assert heard == [signal.SIGUSR1]


def test_a_wait_gives_way_until_something_is_written(heard: list[int]):
    def came(times: int, idle_s: float) -> int:
        for _ in range(times):
            signal.raise_signal(signal.SIGUSR1)
        give_way(idle_s)
        return len(heard)

    with Commit() as commit:
        commit.block()
        assert came(0, 1e9) == 0
        assert came(1, 0.5) == 0, "other ranks may be about to send"
        assert came(0, 1.5) == 1
        assert came(1, 0.0) == 2, "and from here on nothing is held"
        commit.block()
        assert came(2, 0.0) == 3, "a second one insists"
        commit.write()
        assert came(2, 1e9) == 3
    assert len(heard) == 4


def test_other_threads_hold_nothing():
    before, found = handlers(), []
    thread = threading.Thread(
        target=lambda: error_of(lambda commit: (commit.write(), found.append(handlers())))
    )
    thread.start()
    thread.join()
    assert found == [before]


def test_what_python_does_not_handle_is_left_alone(heard: list[int]):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with Commit() as commit:
        commit.write()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_what_was_held_ends_a_sleep():
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(20 + result(signal.SIGINT))
    assert time.monotonic() - begun < 10
