"""Ranks that live through the session, one hypothesis profile, and a time limit for every test."""

import faulthandler
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from typing import Any

import cases
import hypothesis
import one_device
import pytest
import torch
from covering import choose, mark_the_rest
from rank_pool import RankPool

LIMIT_S = 120.0

# Ranks fork from here: there are more of them than cores, and no fork can use a GPU of its parent.
# With CUDA_VISIBLE_DEVICES=0, `pytest -n 0 -k cuda` runs what needs one.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
torch.set_num_threads(1)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
one_device.install()

hypothesis.settings.register_profile(
    "mics_fn",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("mics_fn")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)`: the session's pool of n ranks, forked when first used."""

    def pool(n: int) -> RankPool:
        if n not in _pools:
            _pools[n] = RankPool(n)  # a hang is a failure with a stack, within the limit of a test
        return _pools[n]

    yield pool
    _close_pools()


@pytest.fixture(scope="module", autouse=True)
def groups_end_with_their_module() -> Iterator[None]:
    """Ranks watch each other while groups are open, so those of ended tests would slow all others.

    Thirty ranks that wait for their next test took more than one of two cores.
    """
    yield
    for pool in _pools.values():
        pool.run(cases.close_groups)


_pools: dict[int, RankPool] = {}  # by their numbers of ranks


def _close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """The tests behind one that failed get new ranks: its groups may have failed, too."""
    report = yield
    if report.failed:
        _close_pools()
    return report


class LimitExceeded(BaseException):
    """Not an Exception: hypothesis would run an example that hangs again, to shrink it."""


class TimeLimit:
    """Fails a test whose setup, call or teardown takes too long, and shows every stack.

    A plugin and not a fixture, so that doctests are bounded too.
    """

    def __init__(self, stderr_fd: int):
        self.stderr_fd = stderr_fd

    @pytest.hookimpl(wrapper=True)
    def bounded(self, item: pytest.Item) -> Generator[None, Any, Any]:
        marker = item.get_closest_marker("limit")
        limit_s = float(marker.args[0]) if marker else LIMIT_S

        def stop(signum: int, frame: object) -> None:
            raise LimitExceeded(f"{item.nodeid}: over its limit of {limit_s:g} s\n{all_stacks()}")

        before = signal.signal(signal.SIGALRM, stop)
        # Again every 10 s, in case something swallowed the first one.
        signal.setitimer(signal.ITIMER_REAL, limit_s, 10.0)
        # A wait inside C++ never gets to the handler: then the whole session ends, with stacks.
        faulthandler.dump_traceback_later(limit_s + 30.0, exit=True, file=self.stderr_fd)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = bounded


def all_stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


@pytest.hookimpl(tryfirst=True)  # before `-m` takes its choice
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_rest(items)


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection of garbage looks through all that was imported again


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "limit(seconds): hard limit of this test, instead of 120 s",
        "thorough: not part of the short suite; `pytest -m thorough` runs these alone",
        "covering(*together): few cases are in the short suite; see support/covering.py",
        "short(*ids): the cases of a slow test that are in the short suite; see there",
        "exhaustive: the rest of these; `pytest -m exhaustive` runs it alone",
    ):
        config.addinivalue_line("markers", marker)
    choose(config.option.markexpr)
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        stderr_fd = os.dup(2)
    else:
        with capture.global_and_fixture_disabled():
            stderr_fd = os.dup(2)
    config.pluginmanager.register(TimeLimit(stderr_fd), "mics_fn_time_limit")
