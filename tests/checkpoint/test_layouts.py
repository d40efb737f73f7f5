"""A state comes back bit for bit, from any layout to any other."""

import contextlib
import copy
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    DTYPES,
    LAYOUTS,
    TREES,
    Layout,
    groups_of,
    placed_as,
    random,
    same_bits,
    small_first,
)
from torch import Tensor

import mics_fn as mf
from mics_fn import checkpoint, optim, tree
from mics_fn.checkpoint.directory import SAVED
from mics_fn.checkpoint.loading import memory_like
from mics_fn.errors import DesyncError, FileError, LeafError, MicsError
from mics_fn.offload import Coded
from mics_fn.optim.flat import by_leaf


def state_on(layout: Layout, kind: str, dtype: torch.dtype, seed: int, scheme: str = "") -> Any:
    """A state after two steps of AdamW, so that moments have values; and its groups."""
    groups = groups_of(layout)
    groups = placed_as(groups, scheme) if scheme else groups
    params = mf.shard(TREES[kind](dtype, seed), groups, bucket_bytes=300)
    buffers = {"mean": torch.arange(7.0) + seed, "seen": torch.tensor(seed)}
    state = mf.init_state(params, optim.adamw(0.1), buffers=buffers)
    for k in range(2):
        grads = tree.map_leaves(lambda x, k=k: torch.full_like(x, 0.1 + k), state.params)
        state = mf.opt_step(state, grads)
    return state, groups


def whole_of(state: Any, groups: Any) -> Any:
    """Everything in a state, in full."""
    plain = by_leaf(state)
    moments = {kind: mf.unshard(x, groups) for kind, x in plain.opt.moments.items()}
    rest = plain.opt.count, plain.opt.scalars, plain.buffers, plain.step
    return mf.unshard(plain.params, groups), moments, rest


def saved(layout: Layout, kind: str, dtype: torch.dtype, folder: str, scheme: str = "") -> Any:
    state, groups = state_on(layout, kind, dtype, 3, scheme)
    state = replace(state, step=2)
    before = copy.deepcopy(state)
    path = checkpoint.save(folder, state, groups, step=2, extra={"rank": groups.rank})
    same_bits(state, before)
    return path, whole_of(state, groups)


def loaded(
    layout: Layout, kind: str, dtype: torch.dtype, folder: str, donate: bool, scheme: str = ""
) -> Any:
    like, groups = state_on(layout, kind, dtype, 8, scheme)
    kept, spec = copy.deepcopy(like), tree.flatten(like)[1]
    found = checkpoint.load(folder, like, groups, donate=donate)
    if not donate:
        same_bits(like, kept)
    assert tree.flatten(found.state)[1] == spec
    whole = copy.deepcopy(whole_of(found.state, groups))
    grads = tree.map_leaves(torch.ones_like, found.state.params)
    assert mf.opt_step(found.state, grads, donate=True).step == 3  # memory is as steps need it
    return found.extra, whole


TARGETS = [Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2), Layout((2, 2), 4)]


@pytest.mark.parametrize("source", small_first(LAYOUTS), ids=str)
@pytest.mark.short("2-p1", "2x2-p4")
def test_any_layout_loads_what_any_other_saved(ranks, tmp_path: Path, source: Layout) -> None:
    for kind in TREES:
        folder = str(tmp_path / kind)
        dtype = DTYPES[len(kind) % 3]
        found = ranks(source.world_size).run(saved, source, kind, dtype, folder)
        paths, states = zip(*found, strict=True)
        assert len(set(paths)) == 1
        target = TARGETS[len(kind) % 4]
        got = ranks(target.world_size).run(loaded, target, kind, dtype, folder, len(kind) % 2 == 0)
        for rank, (extra, state) in enumerate(got):
            assert extra == {"rank": rank % source.world_size}
            same_bits(state, states[0])
        assert checkpoint.verify(folder).step == 2


@pytest.mark.parametrize("scheme", ["zero2", "hpz", "fixed_order"])
def test_placements_do_not_matter(ranks, tmp_path: Path, scheme: str) -> None:
    everywhere, two = Layout((2, 2), 4), Layout((2,), 1)
    found = ranks(4).run(saved, everywhere, "mixed", torch.float32, str(tmp_path), scheme)
    got = ranks(2).run(loaded, two, "mixed", torch.float32, str(tmp_path), False)
    same_bits(got[0][1], found[0][1])
    got = ranks(4).run(loaded, everywhere, "mixed", torch.float32, str(tmp_path), True, scheme)
    same_bits(got[0][1], found[0][1])


def balanced(layout: Layout, folder: str) -> None:
    groups = groups_of(layout)
    torch.manual_seed(0)
    params = {f"h.{i}.w": torch.randn(64, 65) for i in range(12)}
    params |= {f"h.{i}.b": torch.randn(65) for i in range(12)}
    state = mf.init_state(mf.shard(params, groups), optim.adamw(0.1))
    checkpoint.save(folder, state, groups, step=0)


@pytest.mark.parametrize("layout", [Layout((2, 2), 2), Layout((2, 2), 1)])
def test_each_byte_is_written_once_and_by_all(ranks, tmp_path: Path, layout: Layout) -> None:
    ranks(layout.world_size).run(balanced, layout, str(tmp_path))
    (step,) = tmp_path.glob("step-*")
    body = json.loads((step / "MANIFEST.json").read_text())
    sizes = []
    for file in sorted(step.glob("*.safetensors")):
        header = int.from_bytes(file.read_bytes()[:8], "little")
        sizes.append(file.stat().st_size - 8 - header)
    full = 3 * 12 * (64 * 65 + 65) * 4 + 4  # and the step of AdamW
    assert full <= sum(sizes) <= full + 8
    assert max(sizes) <= 1.1 * sum(sizes) / len(sizes)
    assert len(body["tensors"]) == 3 * 24 + 1


# Every dtype that torch has: what is saved can be loaded, and all else is refused by name.

ALL_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
FORMED = [torch.float32, torch.complex64]  # whose views are saved too


def value_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A tensor of any bits; those of complex numbers are numbers, and those of bool are."""
    if dtype.is_complex:
        real = value_of(dtype.to_real(), (*shape, 2), seed)
        return torch.view_as_complex(real)
    random, count = torch.Generator().manual_seed(seed), int(torch.Size(shape).numel())
    most = 2 if dtype == torch.bool else 100
    raw = torch.randint(most, (count * dtype.itemsize,), dtype=torch.uint8, generator=random)
    return raw.view(dtype).view(shape)


def bits(x: Tensor) -> list[int]:
    whole = x.detach().resolve_conj().resolve_neg().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).tolist()


def forms_of(dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of a dtype; of some dtypes of every shape, and views of other tensors."""
    found = {"2D": value_of(dtype, (5, 3))}
    if dtype in FORMED:
        whole = value_of(dtype, (6, 4), 9)
        found |= {"0-dim": whole[0, 0].clone(), "empty": whole[:0], "one": whole[1:2, 0]}
        found |= {"transposed": whole.t(), "every other": whole[::2, 1:]}
        flipped = value_of(torch.complex64, (5,), 4).conj()
        found["conj or neg"] = flipped if dtype.is_complex else flipped.imag
    return found


def saves_dtypes(layout: Layout, folder: str) -> dict[str, set[str]]:
    """Save and load each dtype in each form, in the state and the extra; what each ended in."""
    groups, ends = groups_of(layout), dict[str, set[str]]()
    warnings.simplefilter("ignore")  # torch warns of some dtypes
    for dtype in ALL_DTYPES:
        for form, x in forms_of(dtype).items():
            state: dict[str, Any] = {"full": x, "w": mf.shard({"w": torch.ones(3)}, groups)}
            with contextlib.suppress(MicsError):
                state["cut"] = mf.shard({"x": x}, groups, frozen=lambda path: True)
            own = value_of(x.dtype, tuple(x.shape), 77) if groups.rank else x
            extra = {"deep": [{"x": own}, 1]}
            for place, args in {"state": (state, extra), "extra": (state["w"], extra)}.items():
                where = f"{folder}/{dtype}-{form}-{place}"
                end = comes_back(where, args[0], args[1], groups)
                ends.setdefault(str(dtype), set()).add(end)
    return ends


def comes_back(where: str, state: Any, extra: Any, groups: mf.Groups) -> str:
    """Whether a state that was saved is the same, to the bit; or what the refusal says."""
    try:
        checkpoint.save(where, state, groups, step=1, extra=extra)
    except LeafError as error:
        assert not os.path.exists(where) or os.listdir(where) == []
        return str(error)
    checkpoint.verify(where)
    like = memory_like(state)
    for donate in (False, True):
        found = checkpoint.load(where, like, groups, donate=donate)
        pairs = [*zip(tree.flatten(found.state)[0], tree.flatten(state)[0], strict=True)]
        pairs.append((found.extra["deep"][0]["x"], extra["deep"][0]["x"]))
        for a, b in pairs:
            assert (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b)), where
    return "comes back"


@pytest.mark.thorough
def test_every_dtype_comes_back_or_is_refused(ranks, tmp_path: Path) -> None:
    for ends in ranks(2).run(saves_dtypes, Layout((2,), 2), str(tmp_path)):
        assert set(ends) == set(map(str, ALL_DTYPES))
        for dtype, end in ends.items():
            if dtype.removeprefix("torch.") in SAVED:
                assert end == {"comes back"}, dtype
            else:
                assert all("save: " in text and dtype in text for text in end), (dtype, end)


def differs(layout: Layout, folder: str) -> str:
    """Save a state of which one buffer differs between ranks."""
    groups = groups_of(layout)
    own = torch.tensor([1.0, float(groups.rank == 1)])
    params, buffers = mf.shard({"w": torch.ones(6)}, groups), {"mean": torch.ones(2), "own": own}
    state = mf.init_state(params, optim.adamw(0.1), buffers=buffers)
    with pytest.raises(DesyncError) as raised:
        checkpoint.save(folder, state, groups, step=1)
    shared = replace(state, buffers={"mean": buffers["mean"]})
    checkpoint.save(folder, shared, groups, step=1, extra=own)
    assert torch.equal(checkpoint.load(folder, shared, groups).extra, own)
    return str(raised.value)


def test_a_buffer_that_differs_is_named_alone(ranks, tmp_path: Path) -> None:
    one, two = ranks(2).run(differs, Layout((2,), 2), str(tmp_path))
    assert one == two
    assert "buffers.own" in one
    assert "buffers.mean" not in one
    assert "pass it in extra=" in one


# Frozen leaves that are kept as codes: saved as these, to the bit, on any number of ranks.

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


def codes_saved(layout: Layout, folder: str, replicas: Any) -> None:
    """One folder for each form."""
    groups = groups_of(layout)
    for form in FORMS:
        alone, full = values_of(groups, replicas)
        state = state_of(alone, form, full)
        mf.checkpoint.save(f"{folder}/{form}", state, groups, step=3, replicas=replicas)


def codes_loaded(layout: Layout, folder: str, replicas: Any, donate: bool) -> None:
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
    ranks(4).run(codes_saved, FOUR, str(tmp_path), replicas)
    ranks(there.world_size).run(codes_loaded, there, str(tmp_path), replicas, donate)


@pytest.mark.parametrize("form", ["", FORMS[1]])
def test_another_form_is_refused_by_name(tmp_path: Path, form: str):
    groups = mf.make_groups(1)
    mf.checkpoint.save(tmp_path, state_of(groups, FORMS[0], values()), groups, step=1)
    like = state_of(groups, form, values())
    with pytest.raises(FileError, match=r"params\.base\.a.*: saved nothing, expected"):
        mf.checkpoint.load(tmp_path, like, groups)
