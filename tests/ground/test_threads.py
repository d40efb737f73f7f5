"""Threads and Ctrl-C: it always comes out, no thread is left, and nobody waits for ever."""

import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from children import in_child

import mics_fn
from mics_fn import threads
from mics_fn.checkpoint import loading
from mics_fn.checkpoint.loading import each
from mics_fn.threads import Job, Latch, ended

TRACED = {threads.__file__, threading.__file__, loading.__file__}


def settle(before: int, limit_s: float = 10.0) -> None:
    limit = time.monotonic() + limit_s
    while threading.active_count() > before and time.monotonic() < limit:
        time.sleep(0.01)
    assert threading.active_count() == before


def interrupted(at: int, work: Callable[[], Any]) -> bool:
    """Ctrl-C at one instruction of these files in this thread; False if there are not so many."""
    seen, raised = 0, False

    def instruction(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        seen += event == "opcode"
        if event == "opcode" and seen == at:
            signal.raise_signal(signal.SIGINT)
        return instruction

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes = frame.f_code.co_filename in TRACED
        return instruction if frame.f_trace_opcodes else None

    sys.settrace(call)
    try:
        work()
    except KeyboardInterrupt:
        raised = True
    finally:
        sys.settrace(None)
    assert raised == (seen >= at), f"Ctrl-C at instruction {at} was lost"
    return raised


def by_hand() -> None:
    jobs = [Job(lambda i=i: i) for i in range(3)]
    try:
        assert [job.begin("test").result() for job in jobs] == [0, 1, 2]
    finally:
        ended(jobs)


def shared() -> None:
    found = list[int]()
    each(found.append, [1, 2, 3], 2, "test")
    assert sorted(found) == [1, 2, 3]


def latched() -> None:
    latch = Latch()
    threads.start(threading.Thread(target=latch.set))
    while not latch.wait(0.01):
        pass


@pytest.mark.parametrize("work", [shared, latched, by_hand])
@pytest.mark.short("latched")
def test_ctrl_c_at_every_instruction_comes_out_and_leaves_no_thread(work: Callable[[], None]):
    def body() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        before, at = threading.active_count(), 1
        while interrupted(at, work):
            at += 1
        assert at > 100
        settle(before)
        work()
        settle(before)

    assert in_child(body) == 0


def test_a_second_ctrl_c_does_not_wait_for_a_job():
    def body() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        go_on, sent = Latch(), list[int]()
        job = Job(lambda: go_on.wait(30.0)).begin("test")

        def twice() -> None:
            for count in range(2):  # the system makes one of two that come at once
                while (holding := threads._blocking) is None or holding._count < count:
                    time.sleep(0.01)
                sent.append(count)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        begun, again = time.monotonic(), threading.Thread(target=twice)
        again.start()
        with pytest.raises(KeyboardInterrupt):
            ended([job])
        assert time.monotonic() - begun < 20
        assert sent == [0, 1]
        go_on.set()
        again.join()
        settle(1)

    assert in_child(body) == 0


def test_errors_of_jobs_are_raised_and_the_rest_is_dropped():
    before, done, slow = threading.active_count(), list[int](), Latch()

    def work(i: int) -> None:
        if i == 1:
            raise ValueError("of the second")
        slow.wait(0.05)
        done.append(i)

    with pytest.raises(ValueError, match="of the second"):
        each(work, range(100), 2, "test")
    assert threading.active_count() == before
    assert len(done) < 50


def test_jobs_end_in_time_or_it_is_said_that_they_have_not():
    latch, before = Latch(), threading.active_count()
    job = Job(lambda: latch.wait(30.0)).begin("test")
    assert not ended([job], 0.1)
    latch.set()
    assert ended([job], 30.0)
    assert job.result() is True
    assert threading.active_count() == before


def test_a_program_ends_with_a_job_that_has_not_ended():
    def body() -> None:
        Job(partial(signal.sigwait, [signal.SIGUSR2])).begin("test")

    assert in_child(body, 30) == 0


TAKE_LOCKS = (
    r"import concurrent|from concurrent|threading\.(Event|Condition|\w*Semaphore|Barrier)\b"
    r"|hread[^#\n]*\.start\(\)$"  # see `threads.start`
)


def test_no_lock_of_python_is_shared_with_the_main_thread():
    """Except by the tools of `lab`, which end with what they measure."""
    for path in Path(mics_fn.__file__).parent.rglob("*.py"):
        if "lab" not in path.parts and path.name != "threads.py":
            assert not re.search(TAKE_LOCKS, path.read_text(), re.MULTILINE), path
