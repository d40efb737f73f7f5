"""The pool of forked ranks: results, errors, hangs, recovery, and nothing left behind."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from children import left_of

import mics_fn as mf
from mics_fn.errors import GroupsError
from mics_fn.lab.ranks import RankError, RankPool, run_ranks


def summed(value: torch.Tensor) -> torch.Tensor:
    value = value + dist.get_rank()
    dist.all_reduce(value)
    return value


def place() -> tuple[int, int, int, str | None]:
    env = os.environ
    return dist.get_rank(), int(env["RANK"]), int(env["LOCAL_RANK"]), env["LOCAL_WORLD_SIZE"]


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


@pytest.mark.parametrize("n", [1, 4])
def test_results_come_in_rank_order_by_value(ranks: Any, n: int) -> None:
    pool = ranks(n)
    assert pool.run(place) == [(rank, rank, rank, str(n)) for rank in range(n)]
    results = pool.run(summed, torch.ones(3))
    assert torch.stack(results).tolist() == [[n + n * (n - 1) / 2] * 3] * n
    assert not any(result.is_shared() for result in results)
    assert pool.run(pids) == pool.run(pids)


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


def test_a_hang_becomes_an_error_with_its_stack_and_the_pool_recovers() -> None:
    with RankPool(3) as pool:
        before = pool.run(pids)
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            pool.run(sleep_on, 1, 60.0, timeout_s=1.0)
        assert time.monotonic() - start < 10.0
        assert "rank 1: RankTimeout: no answer within 1 s" in str(caught.value)
        assert "in sleep_on" in caught.value.errors[1].traceback
        assert set(caught.value.errors) == {1}
        assert left_of(before) == []
        assert not set(before) & set(pool.run(pids))


def test_ranks_that_die_or_are_out_of_step_are_replaced() -> None:
    with RankPool(2) as pool:
        results = pool.try_run(die, 1)
        assert results[0] is None
        assert results[1].message == "process was killed by SIGKILL"
        before = pool.run(pids)
        pool.run(group_on_rank_0_only)
        assert not set(before) & set(pool.run(pids))


def test_what_cannot_travel_is_refused_with_the_fix(ranks: Any) -> None:
    with pytest.raises(TypeError, match="use run_ranks"):
        ranks(2).run(lambda: 1)


def test_run_ranks_inherits_closures() -> None:
    seen = torch.arange(3.0)
    results = run_ranks(lambda scale: summed(seen * scale), 2, 10.0)
    assert torch.equal(results[0], torch.tensor([1.0, 21.0, 41.0]))
    with pytest.raises(RankError, match="rank 0: RankTimeout: no answer within 0.5 s"):
        run_ranks(lambda: sleep_on(0, 60.0), 2, timeout_s=0.5)


def test_ctrl_c_reaches_the_caller_only_and_frees_the_pool() -> None:
    with RankPool(2) as pool:
        before = pool.run(pids)
        for pid in before:
            os.kill(pid, signal.SIGINT)
        assert pool.run(pids) == before

        here = threading.main_thread().ident or 0  # only a signal of its own ends its wait in C
        threading.Timer(0.3, signal.pthread_kill, [here, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(sleep_on, 0, 30.0)
        assert left_of(before) == []
        assert pool.run(raise_on, []) == [0, 1]


def test_close_leaves_no_process_and_no_file() -> None:
    pool = RankPool(2)
    started = pool.run(pids)
    (folder,) = pool._dirs
    assert folder.exists()
    pool.close()
    assert left_of(started) == []
    assert not folder.exists()
    pool.close()


def test_what_cannot_be_forked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(GroupsError, match="destroy_process_group"):
            run_ranks(pids, 1)
    finally:
        dist.destroy_process_group()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(GroupsError, match="CUDA is initialised"):
        run_ranks(pids, 1)
