"""Groups that failed say so at once, and `reset` gives new ones in their place."""

import os
import re
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mics_fn as mf
from mics_fn.errors import CollectiveError, DesyncError, GroupsError, MicsError, PeerFailed
from mics_fn.groups import Groups, Topology
from mics_fn.groups.communicator import NO_FORK


def works(groups: Groups) -> bool:
    """Whether a gather and hop 2 give what they should."""
    mine = float(dist.get_rank())
    shards = mf.shard({"w": torch.arange(10.0)}, groups)
    grads = mf.reduce_grads({"w": torch.full((10,), mine)}, groups, like=shards)
    same = mf.gather(shards, groups)["w"].equal(torch.arange(10.0))
    return same and grads["w"].data.unique().tolist() in (
        [],
        [sum(groups.ranks) / len(groups.ranks)],
    )


def text_of(call: Callable[[], Any], kind: type[Exception] = GroupsError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def fail_and_reset() -> tuple[list[str], float, bool]:
    """Rank 1 joins no gather; returns what later uses raise, how long they take, and the end."""
    groups = mf.make_groups(timeout_s=1.5)
    shards = mf.shard({"w": torch.ones(4)}, groups)
    texts, seconds = [], 0.0
    if dist.get_rank() == 1:
        time.sleep(2.2)  # the other rank may look for a second who was the cause
    else:
        with pytest.raises((CollectiveError, PeerFailed)):
            mf.gather(shards, groups)
        started = time.perf_counter()
        uses = (lambda: mf.gather(shards, groups), lambda: mf.unshard(shards, groups))
        texts = [text_of(use) for use in uses]
        seconds = time.perf_counter() - started
    old, groups = groups, mf.reset(groups)
    good = old.closed and works(groups)
    groups.close()
    return texts, seconds, good


def test_failed_groups_say_why_and_what_to_call(ranks):
    (texts, seconds, good), (_, _, also) = ranks(2).run(fail_and_reset)
    late = "Collective(Timeout)?Error: all-gather over 'partition' |PeerFailed: rank 1 is behind"
    for text in texts:
        assert text.startswith("'partition' of ranks 0, 1 is used after its groups have failed\n")
        assert re.search(f"rank 0: ({late})", text)
        assert "groups = mics_fn.reset(groups), or trainer.reset(), on all ranks" in text
    assert len(texts) == 2
    assert seconds < 1, "two calls that waited would take 3"
    assert good
    assert also


def completed(coded: bool) -> list[list[str]]:
    """The process groups for hop 2 before and after a tree whose hop 2 sends codes, and a reset."""
    found = list[list[str]]()

    def look(groups: Groups) -> None:
        rows = mf.summary(groups).rows
        found.append(
            [name for name, on in rows if name.startswith("rep") and dist.get_rank() in on]
        )

    with mf.make_groups(2, timeout_s=20) as groups:
        precision = "hop2=int8[32]"
        look(groups)
        for _ in range(2):
            shards = mf.shard({"w": torch.zeros(64)}, groups, precision=precision if coded else "")
        look(groups)
        other = mf.placement.fixed_order(groups)
        mf.shard({"w": torch.zeros(64)}, other, precision=precision if coded else "")
        new = mf.reset(groups)
        look(new)
        mine = {"w": torch.full((64,), float(dist.get_rank()))}
        mean = mf.unshard(mf.reduce_grads(mine, new, like=shards), new)["w"]
        assert ((mean - 1.5).abs() <= 1.5 / 127).all()
        assert f"{mf.summary(new)}".endswith(
            f"{len(mf.summary(new).rows)} process groups of gloo on this rank"
        )
    return found


@pytest.mark.parametrize("coded", [True, False])
def test_hop_2_gets_a_second_communicator_if_it_sends_codes_and_keeps_it(ranks, coded: bool):
    second = ["replicas, second"] * coded
    found = [["replicas"], ["replicas", *second], ["replicas", *second]]
    assert [[sorted(x) for x in each] for each in ranks(4).run(completed, coded)] == [found] * 4


def reset_placed(scheme: str) -> None:
    made = mf.make_groups(4, topology=Topology((2, 2)), timeout_s=20)
    placed = mf.placement.place(made, scheme)
    ordered = mf.placement.fixed_order(placed)
    new = mf.reset({"a": made, "b": [placed, ordered]})
    for old, now in zip((made, placed, ordered), (new["a"], *new["b"]), strict=True):
        assert (now.describe(), now.flat.describe()) == (old.describe(), old.flat.describe())
        assert now.partition.fixed_order == old.partition.fixed_order
        assert (old.closed, now.closed) == (True, False)
        assert works(now)
    assert new["a"].state is new["b"][1].state
    assert new["a"].hierarchy.pools is new["b"][0].hierarchy.pools or scheme == "fsdp"
    new["a"].close()
    again = mf.reset(new["b"][0])  # of groups that are closed
    assert works(again)
    again.close()


@pytest.mark.parametrize("scheme", ["hpz", "fsdp"])
def test_placements_are_kept(ranks, scheme: str):
    ranks(4).run(reset_placed, scheme)


def fork() -> list[str]:
    """What a forked child is told; its rank goes on."""
    groups = mf.make_groups(2, timeout_s=20)
    shards = mf.shard({"w": torch.ones(4)}, groups)
    mf.gather(shards, groups)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        calls = (
            lambda: mf.gather(shards, groups),
            lambda: mf.defer(shards, groups, mf.on_demand()),
            mf.make_groups,
            lambda: mf.reset(groups),
        )
        try:
            told = ("; ".join(text_of(call).splitlines()[:2]) for call in calls)
            os.write(write, "\n".join(told).encode())
            groups.close()
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        told = file.read().splitlines()
    assert works(groups)
    assert works(mf.reset(groups))
    return told


def test_a_fork_is_refused(ranks):
    for rank, told in enumerate(ranks(2).run(fork)):
        used = "'partition' of ranks 0, 1 is used after its groups have failed; "
        used += f"  rank {rank}: GroupsError: this is a fork of rank {rank}; {NO_FORK}"
        forked = [f"{verb}: this process is a fork of a rank" for verb in ("make_groups", "reset")]
        assert told == [used, used, *(f"{text};   fix: {NO_FORK}" for text in forked)]


def learn() -> list[Any]:
    groups, policy = mf.make_groups(timeout_s=20), mf.on_demand(live_bytes=0)
    shards = mf.shard({"a": torch.ones(4), "b": torch.ones(4)}, groups, bucket_bytes=16)

    def run(now: Groups) -> None:
        with mf.defer(shards, now, policy) as full:
            (full["a"] + full["b"]).sum()

    for _ in range(3):
        run(groups)
    (learned,) = policy.learned.values()
    known = learned.schedule
    groups = mf.reset(groups)
    found = [known is not None, learned.schedule, learned.last]
    for _ in range(3):
        run(groups)
    groups.close()
    return [*found, learned.schedule == known]


def test_schedules_are_learned_again(ranks):
    assert ranks(2).run(learn) == [[True, None, None, True]] * 2


def reset_others() -> str:
    both = [mf.make_groups(timeout_s=20) for _ in range(2)]
    error = text_of(lambda: mf.reset(both[dist.get_rank()]), DesyncError)
    for groups in both:
        groups.close()
    return error


def test_ranks_that_reset_different_groups_are_told(ranks):
    for text in ranks(2).run(reset_others):
        assert text.startswith("reset: ranks reset different groups\n")


def test_a_world_of_one():
    old = mf.make_groups()
    groups = mf.reset(old)
    assert old.closed
    assert mf.gather(mf.shard({"w": torch.ones(2)}, groups), groups)["w"].tolist() == [1.0, 1.0]
    assert mf.reset([groups, {"a": groups}])[1]["a"].closed is False
    for wrong, says in (({}, "got dict"), (3, "got int")):
        with pytest.raises(MicsError, match=says):
            mf.reset(wrong)
