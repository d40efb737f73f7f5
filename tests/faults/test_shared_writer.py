"""The ranks of a host share one writer of signs of life in a large job; how often these come."""

import os
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from jobs import run_job
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import mics_fn as mf
from mics_fn import _torch
from mics_fn.errors import PeerFailed, PlanError
from mics_fn.faults import heartbeat, limit_s
from mics_fn.faults.heartbeat import HostPage, count_of, heartbeat_of

N, LIMIT_S = 4, 2.0


@pytest.mark.parametrize(
    ("ranks", "per_host", "tick_s", "least_s"),
    [
        (64, 8, 0.25, 0.75),
        (128, 1, 0.25, 0.75),
        (1024, 8, 0.25, 1.5),
        (16_384, 8, 4.0, 24.0),
        (16_384, 1, 32.0, 192.0),
    ],
)
def test_signs_of_life_come_so_often(
    monkeypatch: Any, ranks: int, per_host: int, tick_s: float, least_s: float
) -> None:
    monkeypatch.setattr(heartbeat, "_ranks_per_host", lambda: per_host)
    assert heartbeat.interval_s(ranks) == tick_s
    assert limit_s(least_s, ranks) == least_s
    with pytest.raises(PlanError, match=f"signs of life come every {tick_s:g} s"):
        limit_s(least_s * 0.99, ranks)


def test_a_rank_that_counts_no_more_is_left_out_at_the_third_count() -> None:
    store: Any = HashStore()
    pages = [HostPage(store, rank) for rank in (3, 7, 40)]
    try:
        for _ in range(3):
            found = [page.count() for page in pages]
        assert [min(each) for each in found] == [3, 3, 3]
        assert found[-1] == {3: 3, 7: 3, 40: 3}
        pages[0].changes = "12"
        seen = [[min(page.count()) for page in pages[1:]] for _ in range(3)]
        assert seen[-1] == [7, 7]
        assert pages[2].changes == "12"
        pages[0].count()
        assert pages[1].count()[3] == 4, "it counts again"
    finally:
        pages[0].remove()


def live(rank: int, odd: int, fault: str) -> Any:
    """Steps until one rank fails; how often each rank wrote by itself, and the error."""
    heartbeat.WRITERS_PER_TICK = 1
    mf.init_distributed(device="cpu", timeout_s=20)
    groups = mf.make_groups(2, node_size=2, timeout_s=20, heartbeat_s=LIMIT_S)
    shards = mf.shard({"w": torch.ones(8)}, groups)
    store, counts = _torch.default_store().clone(), []
    store.set(f"process/{rank}", f"{os.getpid()}")
    for k in range(40):
        if k == 20:
            counts = [count(store.get(heartbeat_of(each))) for each in range(N)]
        if k == 39:
            now = [count(store.get(heartbeat_of(each))) for each in range(N)]
            counts = [b - a for a, b in zip(counts, now, strict=True)]
            counts.append(min(int(store.get(count_of(each))) for each in range(N)))
            stopped = int(store.get(f"process/{odd}"))
        mf.gather(shards, groups)
        mf.reduce_grads({"w": torch.ones(8)}, groups, like=shards)
        time.sleep(0.1)
    if rank == odd:
        os.kill(os.getpid(), signal.SIGSTOP if fault == "silent" else signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            mf.gather(shards, groups)
            mf.reduce_grads({"w": torch.ones(8)}, groups, like=shards)
    except PeerFailed as error:
        took_s = time.monotonic() - began
        time.sleep(
            1.5
        )  # until all others have raised; nobody has to wait for the end of one stopped
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
        return counts, error.rank, error.kind, took_s, list(groups.state.standing)


def count(sign: bytes) -> int:
    return int(sign.split()[1])


@pytest.mark.limit(120)
@pytest.mark.parametrize(("odd", "fault"), [(0, "silent"), (2, "silent"), (1, "killed")])
@pytest.mark.short((0, "silent"))
def test_one_rank_writes_for_all_of_a_host_and_each_that_fails_is_named(
    odd: int, fault: str
) -> None:
    """Also the one that writes, in whose place another one writes from then on."""
    found = run_job(N, live, odd, fault, limit_s=20.0)
    for rank, ended in enumerate(found):
        if rank == odd:
            continue
        assert ended.value is not None, ended.text
        (*own, least), who, kind, seconds, standing = ended.value
        assert (who, kind) == (odd, fault)
        assert standing[0] == who
        assert seconds < 2 * LIMIT_S + 1.5
        assert own[0] >= 5, "about 8 counts in 2 s"
        assert max(own[1:]) <= 2, "of which every 16th is written by each itself"
        assert least > 10
