"""`get`, `set` and `summary`: one leaf by its path, on every layout, and what a tree holds."""

from math import prod

import pytest
import torch
import torch.distributed as dist
from cases import TREES, Layout, everywhere, groups_of, plain_values, poison, random, same_bits
from torch import nn

import mics_fn as mf
from mics_fn import tree
from mics_fn.optim.flat import by_leaf
from mics_fn.shards.leaf import is_leaf
from mics_fn.shards.opened import grouped
from mics_fn.shards.pack import whole_chunk

FOUR, WHOLE = Layout((2, 2), 2), Layout((2, 2), 4)
two_layouts = pytest.mark.parametrize("layout", [FOUR, WHOLE], ids=str)


def on_all_ranks(ranks, fn, *args, n=4) -> tuple[str, str]:
    """The name of the one error that all ranks raise, and its text."""
    found = {(f.type_name, f.message) for f in ranks(n).try_run(fn, *args)}
    assert len(found) == 1, found
    return found.pop()


def same_leaf(got, want) -> None:
    same_bits([got], [want.detach()])
    assert not got.requires_grad
    assert got.untyped_storage().nbytes() == got.nbytes, "it keeps more than itself alive"


# get


def longest_piece(leaf, parts: int) -> int:
    """The most elements of a leaf that one rank holds, counted one by one."""
    start = leaf.bucket.offsets[leaf.slot]
    held = [0] * parts
    for i in range(start, start + prod(leaf.shape)):
        held[i // leaf.bucket.chunk] += 1
    return max(held)


def reads_and_writes(layout, name, dtype, bucket_bytes):
    groups, params = groups_of(layout), TREES[name](dtype, 5)
    full, spec = tree.flatten(plain_values(params))
    paths, tied, p = tree.paths(params), ("wte", "zhead"), groups.partition_size
    shards = poison(mf.shard(params, groups, bucket_bytes=bucket_bytes))
    before = here(shards)
    leaves = [leaf for leaf in tree.flatten(shards, is_leaf)[0] if hasattr(leaf, "shape")]
    for at, (leaf, want, path) in enumerate(zip(leaves, full, paths, strict=True)):
        groups.traffic.clear()
        for name, home in ((path, groups), (f"params.{path}", groups.hierarchy)):
            same_leaf(mf.get(shards, name, home), want)
        if isinstance(leaf, mf.shards.Sharded):
            traffic = groups.traffic.snapshot().items()
            sent = sum(nbytes for on, (_, nbytes) in traffic if on.startswith("gather"))
            assert sent == 2 * (p - 1) * longest_piece(leaf, p) * want.itemsize, path
        value = random(50 + at, *want.shape)
        value = value.to(want.dtype) if want.is_floating_point() else ~want
        new = mf.set(shards, path, value, groups)
        assert tree.flatten(new)[1] == tree.flatten(shards)[1], "another structure"
        changed = [
            value if i == at or (path in tied and paths[i] in tied) else leaf
            for i, leaf in enumerate(full)
        ]
        same_bits(mf.unshard(new, groups), spec.unflatten(changed))
        same_here(here(shards), before)
        chunks_are_whole(new, groups)
    for path in paths[:1]:
        filled = mf.set(shards, path, 2, groups)
        same_leaf(mf.get(filled, path, groups), torch.full_like(full[0], 2))


@pytest.mark.parametrize("layout", [FOUR, WHOLE, Layout((2, 2, 2), 4)], ids=str)
@pytest.mark.short("2x2-p2")
def test_get_gives_a_leaf_in_full_and_set_changes_one_leaf(ranks, layout):
    small = torch.float32, 40
    for name in TREES:
        how = small if layout == FOUR or name == "nested" else (torch.bfloat16, 25 * 2**20)
        ranks(layout.world_size).run(reads_and_writes, layout, name, *how)


class Net(nn.Module):
    """Uneven sizes, and one of each kind: tied, frozen, buffers of floats and integers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.h = nn.ModuleList([nn.Linear(5, 5) for _ in range(2)])
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)

    def forward(self, tokens):
        x = self.embed(tokens).mean(1) * self.frozen
        for layer in self.h:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_net(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes = ((6, 3), (6,))
    return tuple(torch.randint(7, shape, generator=generator) for shape in shapes)


def clip_and_adam(groups):
    return mf.optim.chain(mf.optim.clip_by_global_norm(5.0, groups), mf.optim.adamw(1e-2, eps=1e-3))


def trained(layout, optimizer=clip_and_adam, steps=2, **options):
    groups = groups_of(layout)
    trainer = mf.Trainer(make_net(), optimizer(groups), groups, loss=loss_of, **options)
    for step in range(steps):
        trainer.step(batch_of(dist.get_rank(), step))
    return trainer


def gets_state(groups, state):
    full = mf.unshard(state.params, groups)
    for name, value in full.items():
        for path in (f"params.{name}", f"state.params.{name}", name):
            same_leaf(mf.get(state, path, groups), value)
        same_leaf(mf.get(state.params, name, groups), value)
    for moment in ("exp_avg", "exp_avg_sq"):
        whole = mf.unshard(state.opt[1].moments[moment].by_leaf(), groups)
        assert whole["h.1.weight"].abs().max() > 0
        for name in set(full) - {"frozen"}:
            same_leaf(mf.get(state, f"opt.1.moments.{moment}.{name}", groups), whole[name])
    for name, value in state.buffers.items():
        for path in (f"buffers.{name}", name):
            same_leaf(mf.get(state, path, groups), value)
    assert mf.get(state, "step", groups) == mf.get(state, "opt.1.count", groups) == 2
    mf.get(state, "opt.1.scalars.step", groups).add_(1)  # a copy: the state is as it was
    assert torch.equal(mf.get(state, "opt.1.scalars.step", groups), torch.tensor(2.0))


# set


def here(value) -> dict[str, torch.Tensor | int]:
    """Copies of everything that this rank holds of a value, by path; nothing is sent."""
    value = by_leaf(value)
    leaves = tree.flatten(value, is_leaf)[0]
    held = [getattr(leaf, "data", None) if is_leaf(leaf) else leaf for leaf in leaves]
    paths = tree.paths(value, "", is_leaf)
    return {
        path: one.detach().clone() if torch.is_tensor(one) else one
        for path, one in zip(paths, held, strict=True)
        if one is not None
    }


def same_here(a, b, but=()) -> None:
    """Raise unless two values have the same bits on this rank, except at some paths."""
    assert a.keys() == b.keys()
    for path in a.keys() - set(but):
        if torch.is_tensor(a[path]):
            same_bits([a[path]], [b[path]])
        else:
            assert a[path] == b[path], path


def chunks_are_whole(shards, groups) -> None:
    """Each bucket's pieces on this rank are views of one memory of the chunk's size."""
    leaves = tree.flatten(shards, is_leaf)[0]
    for use in grouped(leaves, [groups] * len(leaves)):
        data = use.by_slot([leaves[i].data for i in use.members])
        if any(piece.numel() for piece in data):
            assert whole_chunk(use.bucket, groups.hierarchy.route.chunk, data) is not None


def sets_loose_pieces(layout):
    """Pieces that have their own memory, in another dtype than that of their bucket."""
    groups, params = groups_of(layout), TREES["plain"](torch.float32, 5)
    loose = tree.map_leaves(lambda x: x.double(), mf.shard(params, groups))
    new = mf.set(loose, "w", random(1, 5, 3), groups)
    for name, value in params.items():
        same_leaf(mf.get(loose, name, groups), value.double())
        changed = random(1, 5, 3) if name == "w" else value
        same_leaf(mf.get(new, name, groups), changed.double())


def test_set_joins_pieces_that_lie_apart(ranks):
    ranks(4).run(sets_loose_pieces, FOUR)


def writes_later():
    groups = groups_of(FOUR)
    shards = mf.shard({"n": torch.tensor([1, 2]), "w": random(0, 5)}, groups)
    state = mf.init_state(shards, mf.optim.adam(0.1), buffers={"b": torch.zeros(2)})
    for path, value in (("n", torch.tensor([3, 4])), ("b", torch.ones(2)), ("w", random(1, 5))):
        kept = value.clone()
        new = mf.set(state, path, value, groups)
        value.zero_()
        same_leaf(mf.get(new, path, groups), kept)
        mf.get(new, path, groups).zero_()
        same_leaf(mf.get(new, path, groups), kept)


def test_nothing_shares_memory_with_the_caller(ranks):
    ranks(4).run(writes_later)


def of_state(layout):
    groups, state = groups_of(layout), trained(layout, bucket_bytes=200).state
    gets_state(groups, state)
    before = here(state)
    moments = [f"opt.1.moments.exp_avg.{n}.weight" for n in ("head", "embed")]
    cases = [
        ("params.h.0.weight", random(1, 5, 5)),
        ("params.embed.weight", random(2, 7, 5)),
        ("params.frozen", random(3, 5)),
        (moments[0], random(4, 7, 5)),
        ("opt.1.moments.exp_avg_sq.h.1.bias", 0),
        ("buffers.norm.running_mean", random(5, 5)),
        ("buffers.norm.num_batches_tracked", 7),
        ("opt.1.scalars.step", 0.0),
        ("opt.1.count", 0),
        ("step", 11),
    ]
    for path, value in cases:
        new = mf.set(state, path, value, groups)
        held, want = mf.get(state, path, groups), value
        if torch.is_tensor(held):
            want = torch.as_tensor(value).expand(held.shape).to(held)
        same_here({"": mf.get(new, path, groups)}, {"": want})
        written = {path, *moments} if path in moments else {path}
        same_here(here(new), before, written)
        same_here(here(state), before)
    tied = random(7, 7, 5).double()
    new = mf.set(state, "params.head.weight", tied, groups)
    for name in ("head.weight", "embed.weight"):
        same_leaf(mf.get(new, name, groups), tied)
    kept = mf.set(state, "frozen", random(6, 5), groups).opt[1].moments["exp_avg"].by_leaf()
    held = tree.flatten(kept, is_leaf)[0]
    assert not any(isinstance(x, mf.shards.Fixed) for x in held), "the old tensor is kept alive"


@two_layouts
@pytest.mark.thorough
def test_get_reads_all_of_a_state_and_set_changes_one_value_of_it(ranks, layout):
    ranks(layout.world_size).run(of_state, layout)


# What a path means


def ambiguous(value, path, groups, choices):
    text = f"{path!r} names several leaves\n  it may be {choices}"
    with pytest.raises(mf.errors.LeafError, match=text):
        mf.get(value, path, groups)


def test_paths_are_read_as_they_are_written():
    groups = mf.make_groups(1)
    pair = {"layers": [{"w": torch.tensor([1.0])}], "a.b": torch.tensor([2.0])}
    shards = mf.shard(pair | {"params": [torch.tensor([3.0])]}, groups)
    for path in ("layers.0.w", "params.layers.0.w", "grads.layers.0.w"):
        assert mf.get(shards, path, groups) == 1.0, path
    assert mf.get(shards, "a.b", groups) == mf.get(shards, "params.a.b", groups) == 2.0
    assert mf.get(shards, "params.0", groups) == 3.0  # a key that is called as a root is
    assert mf.get(mf.shard(torch.tensor([4.0]), groups), "params", groups) == 4.0
    twice = mf.shard({"params": {"w": torch.ones(1)}, "w": torch.zeros(1)}, groups)
    ambiguous(twice, "params.w", groups, "params.params.w or params.w")
    assert (mf.get(twice, "params.params.w", groups), mf.get(twice, "w", groups)) == (1, 0)
    state = mf.init_state(twice, mf.optim.sgd(0.1))
    ambiguous(state, "params.w", groups, "state.params.params.w or state.params.w")
    assert mf.get(state, "state.params.params.w", groups) == 1
    assert mf.get(state, "state.params.w", groups) == mf.get(state, "w", groups) == 0
    assert mf.get(mf.shard([None, torch.ones(1)], groups), "0", groups) is None


def test_an_unknown_path_names_the_nearest():
    groups, model = mf.make_groups(1), make_net()
    shards = mf.shard(dict(model.named_parameters(remove_duplicate=False)), groups)
    state = mf.init_state(shards, mf.optim.adam(0.1), buffers=dict(model.named_buffers()))
    for path, nearest in (
        ("h.O.weight", "params.h.1.weight, params.h.0.weight"),
        ("opt.moments.exp_avg", "opt.moments.exp_avg.embed.weight"),
        ("norm.runing_mean", "buffers.norm.running_mean"),
    ):
        with pytest.raises(
            mf.errors.LeafError, match=f"no leaf '{path}' here\n  nearest: {nearest}"
        ):
            mf.get(state, path, groups)


# Bad calls


def bad_set(value, odd, path="w", p=2):
    groups = groups_of(FOUR)
    tensors = {"w": random(0, 4, 3), "n": torch.tensor([1, 2]), "b": random(1, 9)}
    tensors["small"] = torch.tensor([1], dtype=torch.int8)
    shards = mf.shard(tensors, groups)
    before = mf.unshard(shards, groups)
    mine = value if odd is None or dist.get_rank() == odd else torch.zeros(4, 3)
    try:
        mf.set(shards, path, mine, groups)
    finally:
        same_bits(mf.unshard(shards, groups), before)


def test_set_refuses_values_that_do_not_fit(ranks):
    what = "the value does not fit its dtype"
    for value, path, text in (
        (torch.zeros(3, 4), "w", "a value of another shape\n  expected (4, 3)\n  got (3, 4)"),
        (torch.zeros(2), "n", f"{what}\n  expected int64\n  got float32"),
        (torch.zeros(4, 3).to(torch.complex64), "w", f"{what}\n  expected float32"),
        (300, "small", f"{what}\n  expected int8\n  got int64"),
        (1e300, "w", f"{what}\n  expected float32\n  got float64"),
    ):
        name, said = on_all_ranks(ranks, bad_set, value, None, path)
        assert (name, said.startswith(f"set: {path}: {text}")) == ("LeafError", True), said


def test_ranks_that_give_different_values_are_named(ranks):
    name, text = on_all_ranks(ranks, bad_set, torch.ones(4, 3), 2)
    assert (name, text.splitlines()[0]) == ("DesyncError", "set: ranks differ in what they ask for")
    where = "w, (4, 3) float32 at 12 of 24, in 2 parts = values of digest "
    assert f"\n  ranks 0, 1, 3: {where}" in text
    assert f"\n  rank 2: {where}" in text


def test_an_error_on_one_rank_is_one_on_all(ranks):
    found = ranks(4).try_run(bad_set, [1.0], 1)
    assert found[1].type_name == "AttributeError"
    for other in (found[0], *found[2:]):
        text = "set: it failed on other ranks\n  rank 1: AttributeError: "
        assert (other.type_name, other.message.startswith(text)) == ("DesyncError", True)


def other_paths():
    groups = groups_of(FOUR)
    shards = mf.shard({"a": random(0, 4), "b": random(1, 6)}, groups)
    for name in ("a", "b"):  # what was agreed on before does not hide a difference now
        mf.get(shards, name, groups)
    mf.get(shards, "b" if dist.get_rank() == 3 else "a", groups)


def test_ranks_that_ask_for_different_leaves_are_named(ranks):
    name, text = on_all_ranks(ranks, other_paths)
    assert name == "DesyncError"
    assert "\n  ranks 0-2: a, (4,) float32 at 0 of 16, in 2 parts\n  rank 3: b, (6,)" in text


def wrong_groups():
    groups = groups_of(FOUR)
    shards = mf.shard({"w": random(0, 4, 3)}, groups)
    with pytest.raises(mf.errors.PlanError, match="is one of 2 pieces.*these groups have 4 parts"):
        mf.get(shards, "w", groups_of(Layout((2, 2), 4)))
    with pytest.raises(mf.errors.GroupsError, match="set: got a hierarchy"):
        mf.set(shards, "w", 0, groups.hierarchy)


def test_groups_must_be_those_of_the_shards(ranks):
    ranks(4).run(wrong_groups)


def test_a_tensor_of_an_optimizer_of_another_library_is_not_taken_for_a_whole_one():
    groups = mf.make_groups(1)
    heavy = mf.optim.from_update(lambda p: {"w": torch.zeros(5)}, lambda g, s, p: (g, s))
    state = mf.init_state(mf.shard({"w": random(0, 5)}, groups), heavy)
    for call in (mf.get, lambda x, at, home: mf.set(x, at, torch.zeros(5), home)):
        with pytest.raises(mf.errors.LeafError, match="is a plain tensor of shape"):
            call(state, "opt.w", groups)


def several_groups():
    """A leaf is read over its own groups, and ranks of all groups learn of a difference."""
    two, four = groups_of(FOUR), groups_of(Layout((2, 2), 4))
    groups = {"a": two, "b": four}
    tensors = {"a": {"w": random(0, 5)}, "b": {"w": random(1, 3, 3)}}
    shards = mf.shard(tensors, groups)
    state = mf.init_state(shards, mf.optim.adam(0.1))
    state = mf.opt_step(state, mf.shard(tensors, groups))
    by_path = lambda path: four if path.startswith("b") else two  # noqa: E731
    moments = {k: mf.unshard(v.by_leaf(), groups) for k, v in state.opt.moments.items()}
    for given_groups in (groups, by_path):
        for key, value in tensors.items():
            same_leaf(mf.get(shards, f"{key}.w", given_groups), value["w"])
            path = f"opt.moments.exp_avg.{key}.w"
            same_leaf(mf.get(state, path, given_groups), moments["exp_avg"][key]["w"])
            new = mf.set(state, path, 3, given_groups)
            same_leaf(mf.get(new, path, given_groups), torch.full_like(value["w"], 3))
    names = {row.path: row.groups for row in mf.summary(state, groups).rows}
    assert names["params.a.w"] == names["opt.moments.exp_avg.a.w"] == two.describe()
    assert names["params.b.w"] == names["opt.moments.exp_avg.b.w"] == four.describe()


def test_leaves_on_several_groups(ranks):
    ranks(4).run(several_groups)


# summary


def summarised(layout):
    groups = groups_of(layout)
    trainer = trained(layout, bucket_bytes=200)
    full = trainer.params()
    groups.traffic.clear()
    table = mf.summary(trainer.state, groups)
    assert not groups.traffic.snapshot()
    rows = {row.path: row for row in table.rows}
    p, rank = layout.partition_size, dist.get_rank()
    first = rank // p * p
    kinds = {"frozen": "frozen", "head.weight": "tied"}
    for name, value in full.items():
        kind = kinds.get(name, "trained")
        roots = ["params", "opt.1.moments.exp_avg", "opt.1.moments.exp_avg_sq"]
        for path in (f"{root}.{name}" for root in roots[: 1 if kind == "frozen" else 3]):
            row = rows.pop(path)
            assert (row.shape, row.dtype, row.kind) == (tuple(value.shape), "float64", kind)
            assert row.groups == groups.describe()
            assert row.full_bytes == (0 if kind == "tied" else value.numel() * 8)
            held = everywhere(torch.tensor(row.here_bytes), layout.world_size)
            assert sum(map(int, held[first : first + p])) == row.full_bytes, path
    for name, value in trainer.state.buffers.items():
        row = rows.pop(f"buffers.{name}")
        assert row.here_bytes == row.full_bytes == value.nbytes
        assert (row.kind, row.bucket, row.groups) == ("full", None, "")
    assert rows.pop("opt.1.scalars.step").here_bytes == 4
    assert not rows
    # the totals: three trees of trained leaves, one of frozen ones, buffers and the step
    trained_bytes = 8 * sum(v.numel() for k, v in full.items() if k not in kinds)
    rest = sum(b.nbytes for b in trainer.state.buffers.values()) + 4
    assert table.full_bytes == 3 * trained_bytes + full["frozen"].nbytes + rest
    assert table.elements * 8 == table.full_bytes + 4  # the step is a float32
    chunks = {id(x.bucket): x.bucket for x in tree.flatten(trainer.state.params, is_leaf)[0]}
    held = sum(b.chunk * 8 * (3 if b.trainable else 1) for b in chunks.values())
    assert table.here_bytes + table.padding_bytes == held + rest
    return str(table)


@two_layouts
@pytest.mark.short("2x2-p2")
def test_summary_counts_what_a_state_holds(ranks, layout):
    for text in ranks(layout.world_size).run(summarised, layout):
        last = text.splitlines()[-1]
        assert last.startswith("29 leaves of ")
        assert last.endswith("in full")


def test_tables_are_shortened_in_the_middle():
    groups = mf.make_groups(1)
    tensors: dict = {f"w{i}": torch.ones(i + 1) for i in range(100)}
    tensors["whole"] = torch.ones(2, dtype=torch.int64)
    table, paths = mf.summary(mf.shard(tensors, groups)), tree.paths(tensors)
    shown = [line.split("  ")[0] for line in str(table).splitlines()[1:-1]]
    assert shown == [*paths[:20], "... 61 more ...", *paths[-20:]]
    assert [row.path for row in table.rows] == paths
    assert table.here_bytes == table.full_bytes == 4 * sum(range(1, 101)) + 16
    assert str(mf.summary([])).splitlines()[-1].startswith("0 leaves of 0 elements: 0 B here")


def test_a_buffer_with_two_names_stays_one():
    groups = mf.make_groups(1)
    running = torch.zeros(2)
    buffers = {"first.mean": running, "second.mean": running, "other": torch.zeros(2)}
    params = mf.shard({"w": torch.ones(2)}, groups)
    state = mf.init_state(params, mf.optim.sgd(0.1), buffers=buffers)
    new = mf.set(state, "buffers.second.mean", torch.ones(2), groups)
    assert new.buffers["first.mean"] is new.buffers["second.mean"]
    assert new.buffers["first.mean"].tolist() == [1, 1]
    assert new.buffers["other"].tolist() == running.tolist() == [0, 0]
