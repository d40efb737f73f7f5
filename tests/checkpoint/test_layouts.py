"""A state comes back bit for bit, from any layout to any other."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DTYPES, LAYOUTS, TREES, Layout, groups_of, placed_as, small_first
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mics_fn as mf
from mics_fn import checkpoint, optim, tree
from mics_fn.checkpoint.contents import on_bytes
from mics_fn.checkpoint.layout import Line, Slice, Stored, covering, within
from mics_fn.checkpoint.loading import copy_of
from mics_fn.lab.ranks.pool import RankPool
from mics_fn.optim.flat import by_leaf
from mics_fn.shards.leaf import is_leaf

Pools = Callable[[int], RankPool]


@given(
    parts=st.integers(1, 6),
    copies=st.integers(1, 6),
    chunk=st.integers(0, 40),
    data=st.data(),
)
def test_cells_cover_a_line_once(parts: int, copies: int, chunk: int, data: Any) -> None:
    line = Line(parts * chunk, parts, copies)
    bounds = [line.bounds(cell) for cell in range(line.cells)]
    assert [low for low, _ in bounds[1:]] == [high for _, high in bounds[:-1]]
    assert (bounds[0][0], bounds[-1][1]) == (0, line.length)
    sizes = {high - low for low, high in bounds}
    assert max(sizes) - min(sizes) <= 1
    for position in range(line.length):
        low, high = bounds[line.cell_at(position)]
        assert low <= position < high
    offset = data.draw(st.integers(0, line.length))
    tensor = Stored(
        "w", torch.float32, (data.draw(st.integers(0, line.length - offset)),), 0, offset
    )
    start = data.draw(st.integers(0, tensor.numel))
    stop = data.draw(st.integers(start, tensor.numel))
    held = [within(tensor, line, cell) for cell in range(line.cells)]
    want = [x for x in held if x is not None and x.start < stop and x.stop > start]
    assert list(covering(tensor, line, start, stop)) == (want if start < stop else [])
    whole = [i for x in held if x is not None for i in range(x.start, x.stop)]
    assert whole == list(range(tensor.numel))


@given(sizes=st.lists(st.integers(0, 30), max_size=6), ranks=st.integers(1, 9), data=st.data())
def test_tensors_in_bytes_are_written_once(sizes: list[int], ranks: int, data: Any) -> None:
    kinds = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64])
    plain = {f"x{i}": torch.arange(n).to(data.draw(kinds)) for i, n in enumerate(sizes)}
    parts: dict[str, list[tuple[Slice, Tensor]]] = {name: [] for name in plain}
    for place in range(ranks):
        line, stored, mine = on_bytes(plain, ranks, 0, place)
        for name, part in mine.items():
            parts[name].append(part)
        for tensor in stored:
            found = [x.cell for x in covering(tensor, line, 0, tensor.numel)]
            assert found == sorted(set(found))
    for name, x in plain.items():
        joined = [values for _, values in sorted(parts[name], key=lambda pair: pair[0])]
        assert torch.equal(torch.cat([x[:0], *joined]), x)


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


def whole_of(state: Any, groups: Any) -> list[Any]:
    """Everything in a state, in full."""
    plain = by_leaf(state)
    found = []
    for leaf in tree.flatten(plain, is_leaf)[0]:
        if is_leaf(leaf) and getattr(leaf, "bucket", None) is not None and hasattr(leaf, "data"):
            exact = mf.unshard([leaf], groups)[0]
            found.append(exact)
        elif is_leaf(leaf):
            found.append(getattr(leaf, "data", None))
        else:
            found.append(leaf)
    return found


def saved(layout: Layout, kind: str, dtype: torch.dtype, folder: str, scheme: str = "") -> Any:
    state, groups = state_on(layout, kind, dtype, 3, scheme)
    state = replace(state, step=2)
    before = [x.clone() for x in tree.flatten(state)[0] if isinstance(x, Tensor)]
    path = checkpoint.save(folder, state, groups, step=2, extra={"rank": groups.rank})
    after = [x for x in tree.flatten(state)[0] if isinstance(x, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return path, whole_of(state, groups)


def loaded(
    layout: Layout, kind: str, dtype: torch.dtype, folder: str, donate: bool, scheme: str = ""
) -> Any:
    like, groups = state_on(layout, kind, dtype, 8, scheme)
    kept, spec = copy_of(like), tree.flatten(like)[1]
    found = checkpoint.load(folder, like, groups, donate=donate)
    if not donate:
        pairs = zip(tree.flatten(kept)[0], tree.flatten(like)[0], strict=True)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
    assert tree.flatten(found.state)[1] == spec
    whole = [x.clone() if isinstance(x, Tensor) else x for x in whole_of(found.state, groups)]
    grads = tree.map_leaves(torch.ones_like, found.state.params)
    assert mf.opt_step(found.state, grads, donate=True).step == 3  # memory is as steps need it
    return found.extra, whole


def check_equal(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert type(x) is type(y)
        if isinstance(x, Tensor):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
        else:
            assert x == y


TARGETS = [Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2), Layout((2, 2), 4)]


@pytest.mark.parametrize("source", small_first(LAYOUTS))
def test_any_layout_loads_what_any_other_saved(
    ranks: Pools, tmp_path: Path, source: Layout
) -> None:
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
            check_equal(state, states[0])
        assert checkpoint.verify(folder).step == 2


@pytest.mark.thorough
@pytest.mark.parametrize("kind", list(TREES))
@pytest.mark.parametrize("target", [x for x in LAYOUTS if x.world_size <= 8])
def test_all_pairs_of_layouts(ranks: Pools, tmp_path: Path, target: Layout, kind: str) -> None:
    half = list(TREES).index(kind) % 2  # so each pair comes with half of the trees
    for i, source in list(enumerate(LAYOUTS))[half::2]:
        folder = str(tmp_path / str(i))
        found = ranks(source.world_size).run(saved, source, kind, torch.float32, folder)
        got = ranks(target.world_size).run(
            loaded, target, kind, torch.float32, folder, bool(i // 2 % 2)
        )
        for _, state in got:
            check_equal(state, found[0][1])


@pytest.mark.parametrize("scheme", ["zero2", "hpz", "fixed_order"])
def test_placements_do_not_matter(ranks: Pools, tmp_path: Path, scheme: str) -> None:
    everywhere, two = Layout((2, 2), 4), Layout((2,), 1)
    found = ranks(4).run(saved, everywhere, "mixed", torch.float32, str(tmp_path), scheme)
    got = ranks(2).run(loaded, two, "mixed", torch.float32, str(tmp_path), False)
    check_equal(got[0][1], found[0][1])
    got = ranks(4).run(loaded, everywhere, "mixed", torch.float32, str(tmp_path), True, scheme)
    check_equal(got[0][1], found[0][1])


def balanced(layout: Layout, folder: str) -> None:
    groups = groups_of(layout)
    params = {f"h.{i}.w": torch.randn(64, 65) for i in range(12)}
    params |= {f"h.{i}.b": torch.randn(65) for i in range(12)}
    torch.manual_seed(0)
    state = mf.init_state(mf.shard(params, groups, replicas="broadcast"), optim.adamw(0.1))
    checkpoint.save(folder, state, groups, step=0)


@pytest.mark.parametrize("layout", [Layout((2, 2), 2), Layout((2, 2), 1), Layout((2, 2), 4)])
def test_each_byte_is_written_once_and_by_all(ranks: Pools, tmp_path: Path, layout: Layout) -> None:
    ranks(layout.world_size).run(balanced, layout, str(tmp_path))
    (step,) = tmp_path.glob("step-*")
    manifest = json.loads((step / "MANIFEST.json").read_text())
    sizes = []
    for file in sorted(step.glob("*.safetensors")):
        header = int.from_bytes(file.read_bytes()[:8], "little")
        sizes.append(file.stat().st_size - 8 - header)
    full = 3 * 12 * (64 * 65 + 65) * 4 + 4  # and the step of AdamW
    assert full <= sum(sizes) <= full + 8
    assert max(sizes) <= 1.1 * sum(sizes) / len(sizes)
    assert len(manifest["tensors"]) == 3 * 24 + 1


def counted(layout: Layout, folder: str) -> tuple[int, int]:
    """Bytes that this rank reads, and those that it needs."""
    from mics_fn.init.reading import File

    groups = groups_of(layout)
    params = {f"h.{i}": torch.zeros(512, 513) for i in range(4)}
    like = mf.shard(params, groups)
    read, plain = [0], File.read_into

    def read_counted(self: File, rest: memoryview, offset: int, leaf: str = "") -> None:
        if leaf:
            read[0] += len(rest)
        plain(self, rest, offset, leaf)

    File.read_into = read_counted
    try:
        found = checkpoint.load(folder, like, groups)
    finally:
        File.read_into = plain
    assert all(bool((x == 7).all()) for x in tree.flatten(found.state)[0])
    return read[0], sum(x.numel() * 4 for x in tree.flatten(like)[0])


def filled(layout: Layout, folder: str) -> None:
    groups = groups_of(layout)
    params = {f"h.{i}": torch.full((512, 513), 7.0) for i in range(4)}
    checkpoint.save(folder, mf.shard(params, groups), groups, step=0)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout((2, 2), 2), Layout((2, 2), 4)),
        (Layout((1,), 1), Layout((2, 2), 4)),
        (Layout((2, 2), 4), Layout((2,), 1)),
    ],
)
def test_a_rank_reads_its_own_part(
    ranks: Pools, tmp_path: Path, source: Layout, target: Layout
) -> None:
    ranks(source.world_size).run(filled, source, str(tmp_path))
    for read, needed in ranks(target.world_size).run(counted, target, str(tmp_path)):
        assert needed <= read <= 1.05 * needed
