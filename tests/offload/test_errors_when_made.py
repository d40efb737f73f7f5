"""Shards are made or read in files, and one rank's disk fails: all ranks raise its error, soon."""

import gc
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, same_bits
from disks import files_of, heard
from torch import Tensor, nn

import mics_fn as mf

LAYOUTS = [Layout((2,), 2), Layout((2,), 1), Layout((2, 2), 2)]
NAMES = [f"{i}.{kind}" for i in range(6) for kind in ("weight", "bias")]


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(300, 200) for _ in range(6)))


def full() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: x.detach() for name, x in make_model().named_parameters()}


VERBS: dict[str, Callable[..., Any]] = {
    "shard": lambda groups, folder, o: mf.shard(full(), groups, **o),
    "load_shards": lambda groups, folder, o: mf.load_shards(full(), groups, **o),
    "load_shards, DCP": lambda groups, folder, o: mf.load_shards(
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
    if verb == "load_shards, DCP":
        mf.checkpoint.save_dcp(f"{folder}/dcp", mf.shard(full(), groups), groups)
    wanted = mf.unshard(mf.shard(full(), groups), groups)
    gc.disable()  # nothing may need it to end
    before = threading.active_count()
    call = lambda: make(groups, folder, {**options, "where": where})  # noqa: E731
    found = heard(call, fault, bad, after)
    assert "reset" not in str(found)
    told = found.path, found.leaf, str(found).partition("offload: ")[2].partition("\n")[0]
    where_lines = [line for line in str(found).split("\n") if "Errno" in line]
    del found
    assert files_of(own) == [], "what was made ends with the error"
    assert threading.active_count() == before
    gc.enable()
    again = call()  # the groups can be used
    same_bits(mf.unshard(again, groups), wanted)
    del again
    assert files_of(own) == []
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
