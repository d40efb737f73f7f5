"""How groups end: destroyed in order, or given up without the others when an error leaves them."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mics_fn import _torch
from mics_fn.collectives import collect
from mics_fn.collectives.hierarchical import start_all_gather
from mics_fn.errors import GroupsError, PeerFailed
from mics_fn.groups import Groups, make_groups
from mics_fn.lab.ranks.pool import RankPool

Pools = Callable[[int], RankPool]


def wait_or_raise() -> None:
    """Rank 0 raises with a gather under way, which no other rank joins; the others wait."""
    with make_groups(timeout_s=30) as groups:
        if dist.get_rank() == 0:
            start_all_gather(groups.hierarchy.route, torch.ones(4))
            raise KeyError("mine")
        collect(groups.partition, torch.ones(1))


def leave_by_an_error() -> tuple[str, float, int]:
    started = time.monotonic()
    with pytest.raises((KeyError, PeerFailed)) as caught:
        wait_or_raise()
    text = str(caught.value)
    del caught
    gc.collect()  # nothing that is dropped now may wait for the others either
    return text, time.monotonic() - started, _torch.num_process_groups()


def test_a_rank_that_raises_ends_at_once_and_the_others_soon(ranks: Pools) -> None:
    before = ranks(3).run(_torch.num_process_groups)
    first, *others = ranks(3).run(leave_by_an_error)
    assert first[0] == "'mine'"
    assert first[1] < 2, "to make groups, and at most half a second to end them"
    for text, seconds, _ in others:
        assert text == (
            "rank 0 left its groups: KeyError: 'mine'\n"
            "  its last call: gather, 16 bytes\n"
            "  this rank waits for all-gather over 'partition' (comparison, 4 bytes)\n"
            "  fix: look at its own error, then call groups = mf.reset(groups) on all ranks"
        )
        assert seconds < 5
    assert [left for *_, left in (first, *others)] == before


UNCAUGHT = """
import sys, time, torch, mics_fn as mf, torch.distributed as dist
from mics_fn.collectives.hierarchical import start_all_gather
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
groups = mf.make_groups(timeout_s=60)
if rank == 0:
    pending = start_all_gather(groups.hierarchy.route, torch.ones(4))
    print(time.monotonic(), flush=True)
    raise KeyError("mine")
time.sleep(60)
"""


@pytest.mark.thorough
def test_an_uncaught_error_ends_a_process_that_no_block_closes(tmp_path: Any) -> None:
    command = [sys.executable, "-c", UNCAUGHT]
    other = subprocess.Popen([*command, "1", str(tmp_path / "store")])
    try:
        ended = subprocess.run(
            [*command, "0", str(tmp_path / "store")], capture_output=True, text=True, timeout=100
        )
        assert time.monotonic() - float(ended.stdout) < 10
    finally:
        other.kill()
        other.wait()
    assert ended.returncode == 1
    assert "KeyError: 'mine'" in ended.stderr


class FakeGroup:
    """A process group that says what was done to it."""

    def __init__(self, hangs: bool = False) -> None:
        self.hangs, self.ended = hangs, ""

    def end(self, how: str) -> None:
        self.ended = how
        if self.hangs:
            threading.Event().wait()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Groups, list[Any]]]:
    """Groups of one rank that own fake process groups."""
    monkeypatch.setattr(_torch, "is_alive", lambda group: True)
    monkeypatch.setattr(_torch, "abort", lambda group: group.end("aborted"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: group.end("destroyed"))

    def make(*hangs: bool) -> tuple[Groups, list[Any]]:
        groups, owned = make_groups(), [FakeGroup(hang) for hang in hangs]
        for group in owned:
            groups.life.own(group)  # pyright: ignore[reportArgumentType]
        return groups, owned

    return make


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, "destroyed"),
        (SystemExit(0), "destroyed"),
        (SystemExit(), "destroyed"),
        (SystemExit(2), "aborted"),
        (SystemExit("no data"), "aborted"),
        (ValueError("no"), "aborted"),
        (KeyboardInterrupt(), "aborted"),
    ],
    ids=repr,
)
def test_an_error_destroys_nothing(fakes: Any, error: BaseException | None, end: str) -> None:
    groups, owned = fakes(False, False)
    told: list[Any] = []
    groups.life.report = told.append
    with pytest.raises(type(error)) if error is not None else nullcontext(), groups:
        if error is not None:
            raise error
    assert [group.ended for group in owned] == [end] * 2
    assert bool(told) == (end == "aborted")
    with pytest.raises(GroupsError, match="is used after its groups were closed"):
        groups.partition.process_group()
    groups.close()  # later, as in a `finally`: nothing
    assert [group.ended for group in owned] == [end] * 2


def test_groups_that_cannot_be_aborted_in_time_are_left(fakes: Any) -> None:
    groups, owned = fakes(False, True, True, False)
    started = time.monotonic()
    with pytest.raises(ValueError, match="mine"), groups:
        raise ValueError("mine")
    assert time.monotonic() - started < 1.5
    assert [group.ended for group in owned] == ["aborted"] * 4, "all at once, whichever hangs"
