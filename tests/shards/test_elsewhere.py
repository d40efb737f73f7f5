"""Pieces in files, as values and as codes: every verb gives the same bits as for pieces in memory.

The twin is the same tree of shards, with the same precision, all of it in memory.
"""

import copy
import os
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
from cases import TREES, Layout, groups_of, placed_as, random, same_bits
from disks import taken
from torch import Tensor

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import FileError, LeafError
from mics_fn.offload import in_file
from mics_fn.offload.scratch import Extent
from mics_fn.shards import is_leaf

ALONE, PAIR, BOTH, FOUR = Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2), Layout((2, 2), 4)
LAYOUTS = [ALONE, PAIR, BOTH, FOUR]
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
CODES = [
    "gather=int8[64]",
    "gather=int4[32]@node; *b*: gather=f32",
    "compute=bf16, gather=fp8[64], hop1=int8[64], hop2=int4[64]",
    "param=bf16, gather=int8[32]; *a*: gather=int4[64]",
]
PLACES = {"all": (), "some": ("device", "host")}  # of the first leaves of a tree


def values() -> dict[str, Tensor]:
    """Leaves that end inside of blocks."""
    sizes = {"a": (130,), "b": (9, 50), "c": (2, 3), "d": (700,), "e": (5,)}
    return {k: random(i, *size) * 3 for i, (k, size) in enumerate(sizes.items())}


def pair(groups: mf.Groups, make: Any, folder: str, place: str, **how: Any) -> tuple[Any, Any]:
    """The shards of a tree in memory and in files."""
    few = zip(tree.paths(make()), PLACES[place], strict=False)
    where = "; ".join([f"params=disk:{folder}", *(f"{path}: params={at}" for path, at in few)])
    in_memory, stored = (
        mf.shard(make(), groups, **how),
        mf.shard(make(), groups, where=where, **how),
    )
    assert tree.flatten(in_memory, is_leaf)[1] == tree.flatten(stored, is_leaf)[1]
    cut = [x for x in tree.flatten(stored, is_leaf)[0] if getattr(x, "bucket", None) is not None]
    data = [x.data for x in cut if getattr(x, "data", None) is not None and x.data.numel()]
    assert place != "all" or all(map(in_file, data))
    return in_memory, stored


def loss_of(full: Any) -> Tensor:
    floats = [x for x in tree.flatten(full)[0] if x.is_floating_point()]
    return sum(((x.double() + i) ** 3).sum() for i, x in enumerate(floats, 1)) + torch.zeros(())


def computed(full: Any) -> Any:
    """Each value by an op that reads it, in the dtype that it has in full."""
    return tree.map_leaves(lambda x: x * 1, full)


def gathered(shards: Any, groups: mf.Groups) -> list[Any]:
    """What each verb gives that gathers, or looks at leaves."""
    found: list[Any] = [mf.gather(shards, groups)]
    found.append([mf.get(shards, path, groups) for path in tree.paths(shards, "", is_leaf)])
    found += [mf.unshard(copy.deepcopy(shards), groups), mf.summary(shards).here_bytes]
    with torch.no_grad():
        for schedule in (mf.on_demand(live_bytes=300), mf.keep_all()):
            for _ in range(2):  # the second run follows what the first one has learned
                with mf.defer(shards, groups, schedule) as full:
                    found.append(computed(full))
    return [*found, mf.unshard(shards, groups)]


def derived(shards: Any, groups: mf.Groups) -> list[Any]:
    policy = mf.on_demand(live_bytes=0)

    def later(shards: Any) -> Tensor:
        with mf.defer(shards, groups, policy) as full:
            return loss_of(full)

    found = [torch.func.grad(lambda s: loss_of(mf.gather(s, groups)))(shards)]
    found += [torch.func.grad(later)(shards) for _ in range(2)]
    for schedule in (mf.on_demand(live_bytes=0), mf.keep_all()):
        total = mf.GradSum(micro_steps=2)
        with mf.defer(shards, groups, schedule, into=total) as full:
            for _ in range(2):
                total.backward(loss_of(full))
        found.append(total.grads())
        total.release()
    if tree.flatten(shards)[0]:
        directions = tree.map_leaves(lambda x: torch.ones(x.shape, dtype=x.dtype), shards)
        found += torch.func.jvp(later, (shards,), (directions,))
    return found


def verbs(layout: Layout, trees: Any, codes: Any) -> None:
    for name, dtype, place in trees:
        both(layout, lambda name=name, dtype=dtype: TREES[name](dtype, 3), place, bucket_bytes=100)
    for precision, place, scheme in codes:
        precision = precision if len(layout.sizes) > 1 else precision.replace("@node", "")
        how: Any = {"precision": precision, "frozen": lambda path: "e" in path}
        both(layout, values, place, scheme, bucket_bytes=1500, **how)


def both(layout: Layout, make: Any, place: str, scheme: str | None = None, **how: Any) -> None:
    groups = groups_of(layout)
    with tempfile.TemporaryDirectory() as folder:
        shards = pair(groups, make, folder, place, **how)
        groups = groups if scheme is None else placed_as(groups, scheme)
        for found in (gathered, derived):
            for a, b in zip(*(found(each, groups) for each in shards), strict=True):
                same_bits(a, b)
        if make is values:  # and of a tree that lacks a leaf of its buckets
            few = [gathered({k: x for k, x in each.items() if k != "a"}, groups) for each in shards]
            same_bits(*few)


@pytest.mark.parametrize(
    ("layout", "trees", "codes"),
    [
        (ALONE, [("odd", BF16, "some"), ("nothing", F32, "all")], [(CODES[0], "some", None)]),
        (PAIR, [("mixed", BF16, "some"), ("odd", F32, "all")], [(CODES[3], "some", None)]),
        (PAIR, [(name, F32, "some") for name in TREES], [(CODES[2], "all", "zero1")]),
        (BOTH, [("tied", F64, "all"), ("nested", BF16, "some")], [(CODES[1], "some", "zero1")]),
        (FOUR, [("tied", F64, "all"), ("all-empty", BF16, "all")], [(CODES[2], "some", "hpz")]),
        (FOUR, [("plain", F32, "some")], [(CODES[1], "all", "hybrid"), (CODES[0], "all", "hpz")]),
    ],
    ids=["one", "two", "all trees", "replicas", "levels", "placed"],
)
@pytest.mark.short("two")
def test_the_same_bits_as_in_memory(ranks: Any, layout: Layout, trees: Any, codes: Any) -> None:
    ranks(layout.world_size).run(verbs, layout, trees, codes)


def test_pieces_in_files_take_no_memory_and_files_end_with_them(tmp_path: Any) -> None:
    groups = mf.make_groups(1)
    shards = mf.shard({"w": torch.ones(1000, 1000)}, groups, where=f"params=disk:{tmp_path}")
    assert in_file(shards["w"].data)
    kept: Any = shards["w"].data
    assert taken(kept.extent.scratch) >= 4_000_000
    assert mf.bucket_sizes(shards, groups) == [4_000_000]  # it is copied while it is live
    with pytest.raises(LeafError, match=r"params\.w, shape"):
        shards["w"].data.add_(1)
    assert os.listdir(tmp_path) == []


def broken(how: str) -> None:
    """What cannot be read on one rank is an error on all."""
    groups = mf.make_groups(2, timeout_s=20)
    fails = groups.position == 1
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        precision, read = "gather=int8[64]" if how == "codes" else None, Extent.read
        given = {"w": torch.ones(400, 400)}
        shards = mf.shard(given, groups, precision=precision, where=f"params=disk:{folder}")
        if fails:
            read = mock.Mock(side_effect=FileError(f"params.w: {folder} is broken"))
        with (
            mock.patch.object(Extent, "read", read),
            pytest.raises(FileError if fails else mf.MicsError) as caught,
            mf.defer(shards, groups, mf.on_demand(live_bytes=0)) as full,
        ):
            computed(full)
        assert not fails or ("params.w: " in str(caught.value) and folder in str(caught.value))
        groups.state.abandon(KeyboardInterrupt())


@pytest.mark.parametrize("how", ["values", "codes"])
def test_a_file_that_is_broken_is_an_error_on_all_ranks(ranks: Any, how: str) -> None:
    ranks(2).run(broken, how)


def make_model() -> torch.nn.Module:
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))
    model[1].weight.requires_grad_(False)
    return model


def made(layout: Layout) -> None:
    """Models made or read as shards, chunk by chunk, in files and in memory."""
    groups = groups_of(layout)
    with tempfile.TemporaryDirectory() as folder:
        for text, nbytes in (("", 100_000), ("*0*: params=device; ", 500_000)):
            places = f"params=disk:{folder}; {text}*2*: params=host"
            where = mf.where(places, host_bytes=2**20)
            how: Any = {"seed": 1, "bucket_bytes": nbytes}
            full = mf.unshard(mf.init_model(make_model, groups, **how)[1], groups)
            found = [mf.init_model(make_model, groups, where=where, **how)[1]]
            found += [mf.init_model(make_model, groups, where=where, weights=full, **how)[1]]
            found += [mf.load_shards(full, groups, where=where, order=lambda p: p[::-1])]
            for each in found:
                same_bits(mf.unshard(each, groups), full)


@pytest.mark.parametrize("layout", [ALONE, PAIR], ids=str)
def test_models_made_as_shards_in_files(ranks: Any, layout: Layout) -> None:
    ranks(layout.world_size).run(made, layout)
