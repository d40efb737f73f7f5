"""Ranks: results, errors, hangs, recovery, nothing left behind, and where they listen."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from children import left_of
from rank_pool import RankPool, run_ranks
from sockets import HAS_LIST, listening

import mics_fn as mf
from mics_fn.lab.ranks import RankError, launch


def summed(value: torch.Tensor) -> torch.Tensor:
    value = value + dist.get_rank()
    dist.all_reduce(value)
    return value


def raise_on(bad: list[int]) -> int:
    if dist.get_rank() in bad:
        raise ValueError("no such thing\nsecond line")
    return dist.get_rank()


def sleep_on(bad: int, seconds: float) -> int:
    if dist.get_rank() == bad:
        time.sleep(seconds)
    return os.getpid()


def die(bad: int) -> None:
    if dist.get_rank() == bad:
        os.kill(os.getpid(), signal.SIGKILL)


def group_on_rank_0_only() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)


def pids() -> int:
    return os.getpid()


def test_an_error_names_its_ranks_and_quotes_a_shared_traceback_once(ranks: Any) -> None:
    before = ranks(4).run(pids)
    with pytest.raises(RankError, match="raise_on: 2 of 4 ranks failed") as caught:
        ranks(4).run(raise_on, [1, 3])
    text = str(caught.value)
    assert text.count("ranks 1, 3: ValueError: no such thing") == 1
    assert text.count("Traceback") == 1
    assert 'raise ValueError("no such thing' in text
    assert set(caught.value.errors) == {1, 3}
    assert caught.value.errors[3][:2] == ("ValueError", "no such thing\nsecond line")
    # All answered and their group still works, so the same processes go on.
    assert ranks(4).run(pids) == before


def leave_the_others(kind: str) -> None:
    """Rank 1 fails, and the others wait for it in a collective of the library."""
    with mf.make_groups(dist.get_world_size()) as groups:
        shards = mf.shard({"w": torch.ones(4)}, groups)
        if groups.rank == 1:
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("it began here")
        mf.unshard(shards, groups)


@pytest.mark.parametrize(
    ("kind", "cause", "follows"),
    [
        ("raised", "ValueError: it began here", "  ranks 0, 2: PeerFailed: rank 1 left its"),
        ("killed", "RankDied: process was killed by SIGKILL", "PeerFailed: rank 1 is gone"),
    ],
)
def test_the_cause_comes_first_and_those_that_waited_have_no_traceback(
    kind: str, cause: str, follows: str
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(leave_the_others, 3, kind)
    text = str(caught.value)
    assert text.splitlines()[:2] == ["leave_the_others: 3 of 3 ranks failed", f"  rank 1: {cause}"]
    assert follows in text
    assert text.count("Traceback") <= 1
    assert "Traceback" in caught.value.errors[0].traceback  # which is still there to be asked for


def test_ranks_that_hang_die_or_are_out_of_step_are_replaced_and_leave_nothing() -> None:
    with RankPool(3) as pool:
        before = pool.run(pids)
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            pool.run(sleep_on, 1, 60.0, timeout_s=1.0)
        assert time.monotonic() - start < 10.0
        assert "rank 1: RankTimeout: no answer within 1 s" in str(caught.value)
        assert "in sleep_on" in caught.value.errors[1].traceback
        assert left_of(before) == []
        results = pool.try_run(die, 1)
        assert results[0] is None
        assert results[1].message == "process was killed by SIGKILL"
        between = pool.run(pids)
        pool.run(group_on_rank_0_only)
        after = pool.run(pids)
        assert len({*before, *between, *after}) == 9
        (folder,) = pool.folders
    assert left_of(after) == []
    assert not folder.exists()
    seen = torch.arange(3.0)  # which ranks of one call inherit
    results = run_ranks(lambda scale: summed(seen * scale), 2, 10.0)
    assert torch.equal(results[0], torch.tensor([1.0, 21.0, 41.0]))


# Where they listen.


def sockets_of_a_step() -> tuple[list[str], list[str]]:
    """Where this rank and the process that started it listen, in the middle of a job."""
    mf.init_distributed(device="cpu", timeout_s=60)
    with mf.make_groups(2, node_size=1) as groups:
        shards = mf.shard({"w": torch.ones(4)}, groups)
        mf.unshard(shards, groups)
        found = listening(), listening(os.getppid())
        dist.barrier()
    return found


def check(found: list[list[str]]) -> None:
    """All on loopback, and every process has a socket, so that an empty list proves nothing."""
    assert all(found)
    assert {address for each in found for address in each} == {"127.0.0.1"}


@pytest.mark.thorough
@pytest.mark.skipif(not HAS_LIST, reason="needs /proc/net/tcp")
def test_launched_ranks_and_their_launcher_listen_on_loopback(monkeypatch: pytest.MonkeyPatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for own, parent in launch(sockets_of_a_step, 2):
        check([own, parent])


@pytest.mark.skipif(not HAS_LIST, reason="needs /proc/net/tcp")
def test_ranks_of_a_pool_listen_on_loopback():
    found = run_ranks(sockets_of_a_step, 2)  # new ones: other tests open stores of their own
    check([own for own, _ in found])
