"""Pieces in files: every verb gives the same bits as for pieces in memory.

The twin is the same tree of shards, all of it in memory.
"""

import copy
import os
import tempfile
from itertools import product
from typing import Any

import pytest
import torch
from cases import DTYPES, TREES, Layout, groups_of, same_bits
from torch import Tensor

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives import broadcast
from mics_fn.errors import FileError, LeafError, PeerFileError
from mics_fn.offload import Where, is_stored
from mics_fn.shards import is_leaf

LAYOUTS = [Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2), Layout((2, 2), 4)]
PRECISION = "compute=f32, reduce=bf16"
PLACES = {"all": (), "some": ("params=device", "params=host")}  # of the first leaves of a tree


def pair(
    layout: Layout,
    name: str,
    dtype: torch.dtype,
    folder: str,
    some: tuple[str, ...] = (),
    **options: Any,
) -> tuple[mf.Groups, Any, Any]:
    """Groups, and the shards of a tree in memory and in files."""
    groups = groups_of(layout)
    options.setdefault("bucket_bytes", 100)
    in_memory = mf.shard(TREES[name](dtype, 3), groups, **options)
    few = zip(tree.paths(TREES[name](dtype, 3)), some, strict=False)
    where = "; ".join([f"params=disk:{folder}", *(f"{path}: {place}" for path, place in few)])
    stored = mf.shard(TREES[name](dtype, 3), groups, where=where, **options)
    return groups, in_memory, stored


def loss_of(full: Any) -> Tensor:
    floats = [x for x in tree.flatten(full)[0] if x.is_floating_point()]
    return sum(((x.double() + i) ** 3).sum() for i, x in enumerate(floats, 1)) + torch.zeros(())


def computed(full: Any) -> Any:
    """Each value by an op that reads it, in the dtype that it has in full."""
    return tree.map_leaves(lambda x: x * 1, full)


def gathered(shards: Any, groups: mf.Groups) -> list[Any]:
    found = [mf.gather(shards, groups), mf.shards.start_gather(shards, groups).wait()]
    with torch.no_grad():
        for schedule in (mf.on_demand(live_bytes=0), mf.on_demand(live_bytes=300), mf.keep_all()):
            for _ in range(2):  # the second run follows what the first one has learned
                with mf.defer(shards, groups, schedule) as full:
                    found.append(computed(full))
    return [*found, mf.unshard(shards, groups)]


def deferred(groups: mf.Groups) -> Any:
    """A loss of shards by deferred parameters, with a policy of its own."""
    policy = mf.on_demand(live_bytes=0)

    def loss_fn(shards: Any) -> Tensor:
        with mf.defer(shards, groups, policy) as full:
            return loss_of(full)

    return loss_fn


def derived(shards: Any, groups: mf.Groups) -> list[Any]:
    def at_once(shards: Any) -> Tensor:
        return loss_of(mf.gather(shards, groups))

    found = [torch.func.grad(at_once)(shards)]
    later = deferred(groups)
    found += [torch.func.grad(later)(shards) for _ in range(2)]
    total = mf.GradSum(micro_steps=2)
    with mf.defer(shards, groups, mf.on_demand(live_bytes=0), into=total) as full:
        for _ in range(2):
            total.backward(loss_of(full))
    found.append(total.grads())
    directions = tree.map_leaves(lambda x: torch.ones(x.shape, dtype=x.dtype), shards)
    for loss_fn in (at_once, deferred(groups)) if tree.flatten(shards)[0] else ():
        found += torch.func.jvp(loss_fn, (shards,), (directions,))
    return found


def verbs(layout: Layout, name: str, dtype: torch.dtype, some: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        groups, in_memory, stored = pair(layout, name, dtype, folder, some)
        assert tree.flatten(in_memory, is_leaf)[1] == tree.flatten(stored, is_leaf)[1]
        for a, b in zip(gathered(in_memory, groups), gathered(stored, groups), strict=True):
            same_bits(a, b)
        if not some:
            for leaf in tree.flatten(stored, is_leaf)[0]:
                cut = getattr(leaf, "bucket", None) is not None and hasattr(leaf, "data")
                assert not cut or is_stored(leaf.data) or not leaf.data.numel()
        for a, b in zip(derived(in_memory, groups), derived(stored, groups), strict=True):
            same_bits(a, b)


@pytest.mark.parametrize("name", TREES)
def test_verbs_on_one_rank(ranks: Any, name: str) -> None:
    ranks(1).run(verbs, LAYOUTS[0], name, torch.bfloat16, PLACES["some"])


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
@pytest.mark.short("2-p2")
def test_verbs_on_several_ranks(ranks: Any, layout: Layout) -> None:
    for name, dtype, some in [
        ("mixed", torch.bfloat16, "some"),
        ("odd", torch.float32, "all"),
        ("tied", torch.float64, "all"),
    ]:
        ranks(layout.world_size).run(verbs, layout, name, dtype, PLACES[some])


@pytest.mark.thorough
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_verbs_for_every_tree_dtype_and_place(ranks: Any, layout: Layout, name: str) -> None:
    """Each dtype and place with half of the layouts and trees: any two of these meet."""
    half = (LAYOUTS.index(layout) + list(TREES).index(name)) % 2
    for dtype, some in [*product([*DTYPES, torch.float16], PLACES.values())][half::2]:
        ranks(layout.world_size).run(verbs, layout, name, dtype, some)


def looked_at(layout: Layout, scheme: str | None, precision: str | None) -> None:
    """Prompts, checkpoints, copies; also in a placement, and in another dtype on the wire."""
    with tempfile.TemporaryDirectory() as folder:
        groups, in_memory, stored = pair(
            layout, "plain", torch.float32, f"{folder}/scratch", precision=precision
        )
        if scheme is not None:
            groups = mf.placement.place(groups, scheme)
        for a, b in zip(gathered(in_memory, groups), gathered(stored, groups), strict=True):
            same_bits(a, b)
        for path in in_memory:
            same_bits(mf.get(in_memory, path, groups), mf.get(stored, path, groups))
        changed = [mf.set(shards, "w", 2.0, groups) for shards in (in_memory, stored)]
        same_bits(*(mf.unshard(shards, groups) for shards in changed))
        same_bits(mf.unshard(stored, groups), mf.unshard(in_memory, groups))
        assert mf.summary(stored).here_bytes == mf.summary(in_memory).here_bytes
        same_bits(mf.unshard(copy.deepcopy(stored), groups), mf.unshard(in_memory, groups))
        path = _shared(groups, folder)
        mf.checkpoint.save(path, {"params": stored}, groups, step=1)
        loaded = mf.checkpoint.load(path, {"params": in_memory}, groups).state["params"]
        same_bits(mf.unshard(loaded, groups), mf.unshard(in_memory, groups))


def _shared(groups: mf.Groups, folder: str) -> str:
    """The folder of the first rank, on all ranks."""
    raw = folder.encode().ljust(200)
    first = torch.tensor(list(raw), dtype=torch.uint8)
    broadcast(groups, first, groups.ranks[0])
    return bytes(first.tolist()).decode().strip() + "/checkpoint"


@pytest.mark.parametrize(
    ("layout", "scheme", "precision"),
    [
        (LAYOUTS[0], None, PRECISION),
        (LAYOUTS[1], None, None),
        (LAYOUTS[1], "zero2", PRECISION),
        (LAYOUTS[3], "hpz", PRECISION),
    ],
    ids=str,
)
def test_what_looks_at_shards(ranks: Any, layout: Layout, scheme: Any, precision: Any) -> None:
    ranks(layout.world_size).run(looked_at, layout, scheme, precision)


def test_pieces_in_files_take_no_memory_and_files_end_with_them(tmp_path: Any) -> None:
    groups = mf.make_groups(1)
    shards = mf.shard({"w": torch.ones(1000, 1000)}, groups, where=f"params=disk:{tmp_path}")
    (file,) = os.listdir(tmp_path)
    assert os.path.getsize(tmp_path / file) >= 4_000_000
    assert is_stored(shards["w"].data)
    assert mf.bucket_sizes(shards, groups) == [4_000_000]  # it is copied while it is live
    del shards
    assert os.listdir(tmp_path) == []


def test_a_write_raises(tmp_path: Any) -> None:
    groups = mf.make_groups(1)
    shards = mf.shard({"w": torch.ones(3)}, groups, where=f"params=disk:{tmp_path}")
    with pytest.raises(LeafError, match=r"params\.w, shape"):
        shards["w"].data.add_(1)


def changed_file(layout: Layout) -> None:
    """What others wrote to the file of one rank is an error on all, at the fetch."""
    groups = mf.make_groups(layout.partition_size, timeout_s=20)
    with tempfile.TemporaryDirectory() as folder:
        where = f"params=disk:{folder}"
        shards = mf.shard({"w": torch.ones(400, 400)}, groups, where=where)
        if groups.position == 1:
            (file,) = os.listdir(folder)
            with open(f"{folder}/{file}", "r+b") as other:
                other.seek(8192)
                other.write(b"other values")
        kind = FileError if groups.position == 1 else mf.MicsError
        with (
            pytest.raises(kind) as caught,
            torch.no_grad(),
            mf.defer(shards, groups, mf.on_demand(live_bytes=0)) as full,
        ):
            computed(full)
        if groups.position == 1:
            assert "params.w: " in str(caught.value)
            assert folder in str(caught.value)


def test_a_changed_file_is_an_error_on_all_ranks(ranks: Any) -> None:
    ranks(2).run(changed_file, LAYOUTS[1])


def no_room(layout: Layout) -> None:
    """A rank that cannot make its file raises that, and the others hear of it."""
    groups = mf.make_groups(layout.partition_size, timeout_s=20)
    with tempfile.TemporaryDirectory() as folder:
        if groups.position == 1:
            folder = f"{folder}/file"
            open(folder, "w").close()
        kind = FileError if groups.position == 1 else PeerFileError
        for make in (
            lambda: mf.shard({"w": torch.ones(40)}, groups, where=f"params=disk:{folder}"),
            lambda: mf.load_shards({"w": torch.ones(40)}, groups, where=f"params=disk:{folder}"),
        ):
            with pytest.raises(kind, match="cannot be made"):
                make()


def test_a_file_that_cannot_be_made_is_an_error_on_all_ranks(ranks: Any) -> None:
    ranks(2).run(no_room, LAYOUTS[1])


def made(layout: Layout) -> None:
    """Models made or read as shards, chunk by chunk, in files and in memory."""
    groups = groups_of(layout)
    with tempfile.TemporaryDirectory() as folder:
        blocks = 5

        def make_model() -> torch.nn.Module:
            model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(blocks)))
            model[1].weight.requires_grad_(False)
            return model

        for text in (f"params=disk:{folder}", f"params=disk:{folder}; *0*: params=device"):
            where = Where.parse(text + "; *2*: params=host")
            where = Where(where.params, overrides=where.overrides, host_bytes=2**20)
            for nbytes in (100_000, 500_000):
                options: Any = {"bucket_bytes": nbytes}
                _, want = mf.init_model(make_model, groups, seed=1, **options)
                _, found = mf.init_model(make_model, groups, seed=1, where=where, **options)
                same_bits(mf.unshard(found, groups), mf.unshard(want, groups))
                full = mf.unshard(want, groups)
                read = mf.load_shards(full, groups, where=where, order=lambda p: p[::-1])
                same_bits(mf.unshard(read, groups), full)
                _, found = mf.init_model(
                    make_model, groups, seed=1, where=where, weights=full, bucket_bytes=nbytes
                )
                same_bits(mf.unshard(found, groups), full)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_models_made_as_shards_in_files(ranks: Any, layout: Layout) -> None:
    ranks(layout.world_size).run(made, layout)
