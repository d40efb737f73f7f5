"""Frozen leaves that are kept as codes: saved as these, to the bit, on any number of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random
from torch import Tensor

import mics_fn as mf
from mics_fn.errors import FileError
from mics_fn.offload import Coded

FORMS = ["param=int4[64]", "param=int8[256]", "param=fp8[4]"]
ONE, FOUR = Layout((1,), 1), Layout((2, 2), 2)


def values() -> dict[str, Tensor]:
    sizes = {"base.a": (33, 7), "base.b": (64,), "base.c": (5, 100), "base.d": (), "top": (9, 9)}
    return {name: random(i, *size) * 3 for i, (name, size) in enumerate(sizes.items())}


def state_of(groups: Any, form: str, full: Any) -> mf.TrainState:
    how: dict[str, Any] = {"frozen": lambda path: "base" in path, "bucket_bytes": 700}
    shards = mf.shard(full, groups, precision=f"*base*: {form}" if form else None, **how)
    return mf.init_state(shards, mf.optim.adamw(0.1))


def values_of(groups: Any, replicas: str) -> tuple[Any, dict[str, Tensor]]:
    """The groups to shard with, and full values, which are other ones in each replica if apart."""
    if replicas == "equal":
        return groups, values()
    return groups.without_replicas(), {k: x + groups.replicas.rank for k, x in values().items()}


def codes_of(state: Any) -> list[Tensor]:
    leaves = [x.data for x in state.params.values() if type(x.data) is Coded]
    return [y for data in leaves for y in data.part_codes()]


def saved(layout: Layout, folder: str, replicas: Any) -> None:
    """One folder for each form."""
    groups = groups_of(layout)
    for form in FORMS:
        alone, full = values_of(groups, replicas)
        state = state_of(alone, form, full)
        mf.checkpoint.save(f"{folder}/{form}", state, groups, step=3, replicas=replicas)


def loaded(layout: Layout, folder: str, replicas: Any, donate: bool) -> None:
    groups = groups_of(layout)
    for form in FORMS:
        alone, full = values_of(groups, replicas)
        like = state_of(alone, form, {k: torch.zeros_like(x) for k, x in full.items()})
        rows = [x.data_ptr() for x in codes_of(like)]
        how: dict[str, Any] = {"replicas": replicas, "donate": donate}
        found = mf.checkpoint.load(f"{folder}/{form}", like, groups, **how).state
        assert not donate or [x.data_ptr() for x in codes_of(found)] == rows
        pairs = list(zip(codes_of(found), codes_of(state_of(alone, form, full)), strict=True))
        assert pairs
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs), form


@pytest.mark.parametrize(
    ("there", "replicas", "donate"), [(ONE, "equal", True), (FOUR, "independent", False)], ids=str
)
def test_codes_come_back_on_any_ranks(ranks, tmp_path: Path, there, replicas, donate):
    """Replicas that are independent get their own ones."""
    ranks(4).run(saved, FOUR, str(tmp_path), replicas)
    ranks(there.world_size).run(loaded, there, str(tmp_path), replicas, donate)


@pytest.mark.parametrize("form", ["", FORMS[1]])
def test_another_form_is_refused_by_name(tmp_path: Path, form: str):
    groups = mf.make_groups(1)
    mf.checkpoint.save(tmp_path, state_of(groups, FORMS[0], values()), groups, step=1)
    like = state_of(groups, form, values())
    with pytest.raises(FileError, match=r"params\.base\.a.*: saved nothing, expected"):
        mf.checkpoint.load(tmp_path, like, groups)
