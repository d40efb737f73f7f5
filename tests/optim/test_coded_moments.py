"""Moments as codes: numbers that no layout changes, memory by formula, and errors by name."""

import copy
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from torch import Tensor

import mics_fn as mf
from mics_fn import optim, tree
from mics_fn.collectives import Codec
from mics_fn.errors import PlanError
from mics_fn.offload import Coded, coded, is_coded, read
from mics_fn.optim.flat import by_leaf

# Lengths that end inside of blocks, lines and vectors; "b" and "d" stay values.
SHAPES = {"a": (9023,), "b": (7,), "c": (101, 51), "d": (40, 5), "e": (4096,), "none": (0, 3)}
LARGE = ("a", "c", "e")


def values(seed: int) -> dict[str, Tensor]:
    return {k: random(seed + i, *shape) for i, (k, shape) in enumerate(SHAPES.items())}


def state_of(groups: Any, make: Any = None, kind: str = "int8[256]", **options: Any) -> Any:
    params = mf.shard(values(0), groups, precision=f"state={kind}", **options)
    return mf.init_state(params, make or optim.adamw(1e-2, decay_mask=lambda path: "c" in path))


def steps(state: Any, groups: Any, first: int, count: int, donate: bool = True) -> Any:
    for i in range(first, first + count):
        grads = mf.reduce_grads(values(10 * i + 5), groups, like=state.params)
        state = mf.opt_step(state, grads, donate=donate)
    return state


def full_of(state: Any, groups: Any) -> Any:
    """Parameters and moments in full."""
    return mf.unshard((state.params, by_leaf(state.opt.moments)), groups)


def memories(state: Any) -> list[Coded]:
    return [x for x in tree.flatten(state.opt)[0] if is_coded(x)]


# Codes


@pytest.mark.parametrize("kind", ["int8[256]", "int8[1024]"])
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("size", [-44, -3, 18])
def test_codes_are_near_and_stay_what_they_are(kind: str, root: bool, size: int):
    x = random(3, 5001) * random(4, 5001).exp() * 10.0**size
    x = x.abs() if root else x
    x[7], x[4000:4100] = 0.0, 0.0
    kept = coded(x, Codec.parse(kind), root)
    got = read(kept)
    again = kept.coded(got)
    assert torch.equal(kept.codes.elements, again.codes.elements)
    assert torch.equal(kept.codes.tops, again.codes.tops)
    length = kept.codes.codec.block or 0
    blocks = torch.nn.functional.pad(x.sqrt() if root else x, (0, -5001 % length)).view(-1, length)
    top = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[:5001]
    near = got.sqrt() if root else got
    far = (near - (x.sqrt() if root else x)).abs()
    assert (far <= top / 127 * 1.001 + (2.0**-45 if root else 2.0**-100)).all()
    assert torch.equal(got == 0, x == 0) if root else (got[x == 0] == 0).all()


def test_codes_are_right_on_average():
    """Rounding to nearest would leave a mean that moves by a thousandth a step where it is."""
    draw = torch.Generator().manual_seed(0)
    for root in (False, True):
        wide = torch.rand(4096, generator=draw).square() + 0.01
        kept = coded(wide, Codec("int8", 256), root)
        for _ in range(800):
            new = 0.2 * torch.rand(4096, generator=draw)
            wide = wide.lerp(new, 2e-3)
            kept = kept.coded(read(kept).lerp(new, 2e-3))
        assert abs(float(read(kept).mean() / wide.mean()) - 1) < 0.03
        assert float((read(kept) - wide).abs().mean()) < 0.1 * float(wide.mean())


def test_what_is_not_finite_makes_its_own_block_nan():
    x = torch.ones(1024)
    x[5], x[300] = float("nan"), float("inf")
    got = read(coded(x, Codec("int8", 256)))
    assert got[:512].isnan().all()
    assert torch.equal(got[512:], x[512:])


# Steps


def of_numbers(layout: Layout, kind: str, make: str) -> Any:
    groups = mf.placement.fixed_order(groups_of(layout))
    makes = {"by mask": None, "lion": optim.lion(1e-3)}
    found = []
    for bucket_bytes in (25 * 2**20, 50_000):
        for donate in (True, False):
            state = state_of(groups, makes[make], kind, bucket_bytes=bucket_bytes)
            state = steps(state, groups, 0, 3, donate)
            moments = by_leaf(state.opt.moments)
            found.append(mf.unshard((state.params, moments), groups))
    for other in found[1:]:
        large(other, found[0])
    return found[0]


def large(got: Any, want: Any) -> None:
    """The bits of the leaves whose moments are codes."""
    for a, b in zip(tree.flatten(got)[0], tree.flatten(want)[0], strict=True):
        if b.numel() >= 4096:
            assert torch.equal(a, b)


NUMBERS = [("int8[64]", "by mask"), ("int8[256]", "lion")]


@pytest.mark.parametrize(("kind", "make"), NUMBERS)
def test_numbers_do_not_depend_on_the_layout(ranks, kind: str, make: str):
    """For any number of ranks, of buckets, and with donation and without."""
    want = of_numbers(Layout((1,), 1), kind, make)
    for layout in (Layout((2,), 2), Layout((2, 2), 4)):
        for found in ranks(layout.world_size).run(of_numbers, layout, kind, make):
            large(found, want)


def test_a_step_is_that_of_decoded_moments():
    """The slow twin: torch's own optimizer on the decoded values, which are coded again."""
    groups = mf.make_groups(1)
    state = steps(state_of(groups, optim.adamw(1e-2)), groups, 0, 2)
    params, moments = full_of(state, groups)
    grads = values(25)
    after = steps(state, groups, 2, 1)
    for name in LARGE:
        own = params[name].clone().requires_grad_()
        own.grad = grads[name]
        twin = torch.optim.AdamW([own], lr=1e-2)
        kept = {k: moments[k][name].clone() for k in moments}
        twin.state[own] = {**kept, "step": torch.tensor(2.0)}
        twin.step()
        torch.testing.assert_close(mf.get(after, name, groups), own.detach())
        for k, x in kept.items():
            want = read(coded(x.reshape(-1), Codec("int8", 256), k == "exp_avg_sq"))
            got = mf.get(after, f"opt.moments.{k}.{name}", groups)
            # A value whose last bit differs may be rounded to the code on its other side.
            assert (got.reshape(-1) != want).double().mean() < 0.01


OPTIMIZERS = [
    optim.sgd(0.1, momentum=0.9, nesterov=True),
    optim.by_path({"*c*": optim.lion(1e-2)}, default=optim.adam(1e-2)),
    optim.chain(optim.clip_by_value(0.5), optim.adamw(1e-2)),
    optim.from_torch(torch.optim.RMSprop, lr=1e-2),
    optim.from_torch(torch.optim.AdamW, lr=1e-2, amsgrad=True),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_with_codes_steps_near_its_own_steps(optimizer: Any):
    groups, full = mf.make_groups(1), []
    for precision in ("state=int8[64]", None):
        params = mf.shard(values(0), groups, precision=precision)
        state = steps(mf.init_state(params, optimizer), groups, 0, 4)
        assert bool(memories(state)) is (precision is not None)
        full.append(mf.unshard(state.params, groups))
    for leaf in SHAPES:  # of small leaves the moments are values
        got, want = (x[leaf] - values(0)[leaf] for x in full)
        assert (0 < (got - want).norm() < 0.2 * want.norm()) or leaf not in LARGE
        assert torch.equal(got, want) or leaf in LARGE


def test_padding_that_is_nan_reaches_nothing():
    groups, plain = mf.make_groups(1), optim.adamw(1e-2)
    want = full_of(steps(state_of(groups, plain), groups, 0, 2), groups)
    state = state_of(groups, plain)
    grads = mf.shard(values(5), groups, precision="state=int8[256]")
    for shards in (state.params, grads):
        for leaf in tree.flatten(shards, mf.shards.is_leaf)[0]:
            memory = leaf.data.as_strided((leaf.bucket.chunk,), (1,), 0)
            inside = torch.zeros(leaf.bucket.chunk, dtype=torch.bool)
            for start, n in zip(leaf.bucket.offsets, leaf.bucket.numels, strict=True):
                inside[start : start + n] = True
            memory[~inside] = float("nan")
    state = mf.opt_step(state, grads, donate=True)
    large(full_of(steps(state, groups, 1, 1), groups), want)


def test_memory_is_by_formula():
    groups = mf.make_groups(1)
    state = state_of(groups)
    blocks = {k: -(-torch.Size(SHAPES[k]).numel() // 256) for k in LARGE}
    assert sum(x.nbytes for m in memories(state) for x in m.part_codes()) == 2 * sum(
        260 * n for n in blocks.values()
    )


# States that are read, set, saved and copied


def test_copies_and_what_is_read_and_set():
    groups = mf.make_groups(1)
    state = steps(state_of(groups), groups, 0, 2)
    name = "opt.moments.exp_avg_sq.c"
    same = mf.set(state, name, mf.get(state, name, groups), groups)
    moved = mf.move(state, "params=host, states=host")
    want = full_of(steps(state, groups, 2, 1, donate=False), groups)
    for other in (same, moved, copy.deepcopy(state)):
        assert len(memories(other)) == len(memories(state)) == 2
        same_bits(full_of(steps(other, groups, 2, 1, donate=False), groups), want)
    zero = mf.set(state, name, 0, groups)
    assert not mf.get(zero, name, groups).any()
    assert mf.get(state, name, groups).all()


# Errors


def test_what_cannot_be_kept_as_codes_is_refused_by_name(tmp_path):
    groups = mf.make_groups(1)
    with pytest.raises(PlanError, match=r"state=int8\[256\] for a, whose shards are"):
        mf.shard(values(0), groups, precision="param=bf16, state=int8")
    with pytest.raises(PlanError, match="there are no codes for 'prev'"):
        state_of(groups, optim.from_torch(torch.optim.Rprop))
    own = optim.from_update(lambda p: mf.shards.map(torch.zeros_like, p), lambda g, s, p: (g, s))
    with pytest.raises(PlanError, match=r"opt.a is not kept as the codes"):
        state_of(groups, own)
    with pytest.raises(PlanError, match="is to go to disk:.*, and is kept as codes"):
        mf.move(state_of(groups), f"states=disk:{tmp_path}")
    state, grads = state_of(groups), mf.shard(values(5), groups, precision="state=int8")
    live = tree.map_leaves(lambda x: x.clone().requires_grad_(), grads)
    with pytest.raises(PlanError, match="moments are kept as codes"):
        mf.opt_step(state, live)
