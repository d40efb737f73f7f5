"""Frozen leaves that were saved in one form, as values or codes, and load into another one.

What is loaded is what `shard` makes of the full values that were saved: to the bit, for every pair
of forms, on other numbers of ranks too.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from torch import Tensor

import mics_fn as mf
from mics_fn.errors import FileError, LeafError
from mics_fn.offload import Coded

FORMS = ["", "param=int4[64]", "param=int8[256]", "param=fp8[2]"]
ONE, FOUR = Layout((1,), 1), Layout((2, 2), 2)


def values() -> dict[str, Tensor]:
    sizes = {"base.a": (33, 7), "base.b": (64,), "base.c": (5, 100), "base.d": (), "top": (9, 9)}
    return {name: random(i, *size) * 3 for i, (name, size) in enumerate(sizes.items())}


def is_base(path: str) -> bool:
    return "base" in path


def sharded(full: Any, groups: Any, form: str) -> Any:
    how: dict[str, Any] = {"frozen": is_base, "bucket_bytes": 700}
    return mf.shard(full, groups, precision=f"*base*: {form}" if form else None, **how)


def state_of(groups: Any, form: str, full: Any = None) -> mf.TrainState:
    full = values() if full is None else full
    return mf.init_state(sharded(full, groups, form), mf.optim.adamw(0.1))


def values_of(groups: Any, replicas: str) -> tuple[Any, dict[str, Tensor]]:
    """The groups to shard with, and full values, which are other ones in each replica if apart."""
    if replicas == "equal":
        return groups, values()
    return groups.without_replicas(), {k: x + groups.replicas.rank for k, x in values().items()}


PAIRS = [(a, b) for a in FORMS for b in FORMS if a != b]


def codes_of(params: Any) -> list[Tensor]:
    return [y for x in params.values() if type(x.data) is Coded for y in x.data.part_codes()]


def saved(layout: Layout, folder: str, replicas: Any) -> None:
    """One folder for each form."""
    groups = groups_of(layout)
    for form in FORMS:
        alone, full = values_of(groups, replicas)
        state = state_of(alone, form, full)
        where = f"{folder}/{form or 'plain'}"
        mf.checkpoint.save(where, state, groups, step=3, replicas=replicas)


def loaded(layout: Layout, folder: str, replicas: Any, donate: bool) -> None:
    """Each form into each other one, compared with `shard` of the values that were saved."""
    groups = groups_of(layout)
    for before, form in PAIRS:
        alone, full = values_of(groups, replicas)
        held = mf.unshard(sharded(full, alone, before), alone)
        zeros = {k: torch.zeros_like(x) for k, x in full.items()}
        like = state_of(alone, form, zeros)
        rows = [x.data_ptr() for x in codes_of(like.params)]
        found = mf.checkpoint.load(
            f"{folder}/{before or 'plain'}", like, groups, replicas=replicas, donate=donate
        )
        want = sharded({k: x.float() for k, x in held.items()}, alone, form)
        got = found.state.params
        assert not donate or [x.data_ptr() for x in codes_of(got)] == rows
        for mine, theirs in zip(codes_of(got), codes_of(want), strict=True):
            assert torch.equal(mine, theirs), (before, form)
        for name, x in got.items():
            same_bits(mf.offload.read(x.data), mf.offload.read(want[name].data))


@pytest.mark.parametrize(
    ("there", "replicas", "donate"),
    [(ONE, "equal", True), (FOUR, "apart", False)],
    ids=str,
)
def test_every_form_loads_into_every_other_one(ranks, tmp_path: Path, there, replicas, donate):
    """Replicas that are apart get their own values."""
    ranks(4).run(saved, FOUR, str(tmp_path), replicas)
    ranks(there.world_size).run(loaded, there, str(tmp_path), replicas, donate)


def test_what_codes_cannot_hold_is_refused_by_name(tmp_path: Path):
    groups, full = mf.make_groups(1), values()
    full["base.b"][5] = torch.inf
    mf.checkpoint.save(tmp_path, sharded(full, groups, ""), groups, step=1)
    with pytest.raises(LeafError) as caught:
        mf.checkpoint.load(tmp_path, sharded(values(), groups, "param=int4[64]"), groups)
    text = "load: base.b has a value that is not finite, which param=int4[64] cannot hold"
    assert str(caught.value).startswith(text)


def test_other_shapes_are_refused_in_every_form(tmp_path: Path):
    groups = mf.make_groups(1)
    for before, form in PAIRS[::4]:
        folder, other = tmp_path / (before or "plain"), {**values(), "base.c": torch.ones(5, 1000)}
        if not folder.exists():
            mf.checkpoint.save(folder, sharded(values(), groups, before), groups, step=1)
        with pytest.raises(FileError, match=r"\n  base\.c( as .*)?: saved "):
            mf.checkpoint.load(folder, sharded(other, groups, form), groups)
