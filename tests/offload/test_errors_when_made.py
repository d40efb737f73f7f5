"""Shards are made or read in files, and one rank's disk fails: all ranks raise its error, soon."""

import gc
import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from disks import broken, files_of
from torch import Tensor, nn

import mics_fn as mf
from mics_fn.collectives import broadcast
from mics_fn.errors import DesyncError, FileError, PeerFailed, PeerFileError
from mics_fn.offload import scratch as scratch_module

LIMIT_S = 30.0
LAYOUTS = [Layout((2,), 2), Layout((2,), 1), Layout((2, 2), 2)]
NAMES = [f"{i}.{kind}" for i in range(6) for kind in ("weight", "bias")]


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(300, 200) for _ in range(6)))


def full() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: x.detach() for name, x in make_model().named_parameters()}


VERBS: dict[str, Callable[..., Any]] = {
    "shard": lambda groups, folder, o: mf.shard(full(), groups, **o),
    "shard, broadcast": lambda groups, folder, o: mf.shard(
        full(), groups, replicas="broadcast", **o
    ),
    "load_shards": lambda groups, folder, o: mf.load_shards(full(), groups, **o),
    "load_dcp": lambda groups, folder, o: mf.checkpoint.load_dcp(
        f"{folder}/dcp", groups, like=full(), **o
    ),
    "init_model": lambda groups, folder, o: mf.init_model(make_model, groups, seed=3, **o)[1],
    "init_model, read": lambda groups, folder, o: mf.init_model(
        make_model, groups, seed=0, weights=full(), **o
    )[1],
}
FAULTS = ["no room", "cannot write", "cannot read", "cannot be made"]


def has(verb: str, fault: str, layout: Layout) -> bool:
    """Whether a verb meets a fault: what was made is read to compare it with that of replicas."""
    return fault != "cannot read" or (
        not verb.startswith("shard") and layout.world_size > layout.partition_size
    )


CASES = [case for case in product(VERBS, FAULTS, LAYOUTS) if has(*case)]


def trial(layout: Layout, verb: str, fault: str, folder: str) -> tuple[Any, ...]:
    """Rank 1 fails in the middle; what this rank heard of it."""
    groups = groups_of(layout)
    bad = groups.position == 1
    make, after = VERBS[verb], 0 if "made" in fault or "read" in fault else 3
    options: dict[str, Any] = {"bucket_bytes": 300_000}
    own = f"{folder}/{groups.position}"
    where = mf.where(f"params=disk:{own}", host_bytes=2**20)
    if verb == "load_dcp":
        mf.checkpoint.save_dcp(f"{folder}/dcp", mf.shard(full(), groups), groups)
    wanted = mf.unshard(mf.shard(full(), groups), groups)
    gc.disable()  # nothing may need it to end
    before = threading.active_count()
    found: Any = None
    started = time.monotonic()
    try:
        with broken(fault if bad else "", own if bad else "/proc/none", after):
            make(groups, folder, {**options, "where": where})
    except mf.MicsError as error:
        found = error
    assert time.monotonic() - started < LIMIT_S
    assert type(found) is (FileError if bad else PeerFileError), found
    if not bad:
        assert isinstance(found, PeerFailed)
        assert (found.rank, found.kind) == (1, "raised")
        assert "reset" not in str(found)
    told = found.path, found.leaf, str(found).partition("offload: ")[2].partition("\n")[0]
    where_lines = [line for line in str(found).split("\n") if "Errno" in line]
    del found
    assert files_of(own, 0) == [], "what was made ends with the error"
    assert threading.active_count() == before
    gc.enable()
    again = make(groups, folder, {**options, "where": where})  # the groups can be used
    same_bits(mf.unshard(again, groups), wanted)
    del again
    assert files_of(own, 0) == []
    return told, where_lines


@pytest.mark.covering
@pytest.mark.parametrize(("verb", "fault", "layout"), CASES)
def test_all_ranks_raise_the_error_of_one(ranks, tmp_path, verb, fault, layout):
    told, *rest = ranks(layout.world_size).run(trial, layout, verb, fault, f"{tmp_path}")
    assert all(each == told for each in rest), "file, leaf and cause are those of the rank"
    (path, leaf, _), lines = told
    assert path.startswith(f"{tmp_path}/1")
    assert lines
    assert "made" in fault or any(name in leaf for name in NAMES)


def slow(layout: Layout, folder: str) -> int:
    """Writes of rank 0 take long, and rank 1 fails at its first one; how many were done."""
    groups = groups_of(layout)
    bad, writes = groups.position == 1, []
    real = scratch_module.write_all

    def written(*given: Any) -> None:
        writes.append(1)
        if bad:
            raise OSError("it is broken")
        time.sleep(0.02)
        real(*given)

    values = {f"{i}": random(i, 500, 40) for i in range(600)}
    with (
        broken("cannot write" if bad else "", "/proc/none"),
        mock.patch.object(
            scratch_module, "write_all", scratch_module.write_all if bad else written
        ),
        pytest.raises(FileError),
    ):
        mf.shard(values, groups, bucket_bytes=50_000, where=f"params=disk:{folder}")
    return len(writes)


def test_ranks_hear_of_it_before_they_have_done_their_part(ranks, tmp_path):
    writes, _ = ranks(2).run(slow, LAYOUTS[0], f"{tmp_path}")
    assert writes < 550, "of 600, which take 12 s"


def other_errors(layout: Layout) -> None:
    """What is no error of a disk is named, too; and a rank that has none goes on afterwards."""
    groups = groups_of(layout)
    values = full()
    if groups.position == 1:
        values["0.bias"].fill_(7)
    with pytest.raises(DesyncError, match="replicas hold different values"):
        mf.load_shards(values, groups)
    same_bits(mf.unshard(mf.load_shards(full(), groups), groups), full())
    mine = torch.zeros(3) + groups.position
    broadcast(groups, mine, 0)
    assert mine.tolist() == [0, 0, 0]


def test_replicas_that_read_other_values(ranks):
    ranks(2).run(other_errors, LAYOUTS[1])
