"""torch.compile: regions with deferred parameters are as eager blocks: to the bit in aot_eager."""

import copy
import ctypes
import re
import shutil
import warnings
from typing import Any

import pytest
import torch
from cases import random
from torch import nn
from torch._dynamo.utils import counters
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mics_fn as mf
from mics_fn.deferred.regions import _Saved

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 16),
            nn.Linear(16, WIDTH),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Inner(Block):
    """A block that recomputes a part of itself."""

    def forward(self, x):
        return x + checkpoint(
            lambda y: self.down(F.gelu(self.up(y))), self.norm(x), use_reentrant=False
        )


class Normed(Block):
    """A block with buffers that its forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class Tied(Block):
    """A block that gives its weight, too, which lies in a bucket."""

    def forward(self, x):
        return x + F.linear(F.linear(x, self.up.weight), self.down.weight), self.up.weight.t()


class Model(nn.Module):
    def __init__(self, kind=Block, wrapped: Any = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(3))
        self.kind, self.wrapped = kind, wrapped

    def forward(self, x):
        x, given = self.first(x), []
        for block in self.blocks:
            call = block if self.wrapped is None else (lambda y, b=block: self.wrapped(b, y))
            out = call(x)
            x, *more = out if isinstance(out, tuple) else (out,)
            given += more
        return x + sum(each.sum() for each in given)  # when their buckets may have gone


def around(block, x):
    return checkpoint(block, x, use_reentrant=False)


def square(model, x):
    return model(x).square().mean()


def eager(model):
    return model


def named(model):
    return mf.compile_blocks(model, "blocks.*", backend="aot_eager", fullgraph=True)


def trained(groups, compiled, kind=Block, wrapped=None, steps=3, muon=False, loss=square, **how):
    """Losses, parameters, and the schedule of the last step; buckets are those of regions."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = compiled(Model(kind, wrapped))
    optimizer = mf.optim.sgd(0.1)  # whose bits do not depend on where a chunk ends
    if muon:
        optimizer = mf.optim.by_path({"*up.weight": mf.optim.muon(0.1)}, default=optimizer)
    trainer = mf.Trainer(model, optimizer, groups, loss=loss, **how)
    losses, graphs = [], []
    for step in range(steps):
        batch = random(10 * step + groups.rank, 8, WIDTH)
        losses.append(trainer.step(batch).loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    losses.append(trainer.eval(random(99 + groups.rank, 8, WIDTH)).item())
    values = {k.replace("_orig_mod.", ""): x for k, x in trainer.state_dict().items()}
    return losses, values, graphs, trainer


def same(found, want):
    assert found[0] == want[0]
    assert found[1].keys() == want[1].keys()
    for name, value in want[1].items():
        assert torch.equal(found[1][name], value), name


def half(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    return out.float().square().mean()


CASES: dict[str, dict[str, Any]] = {
    "autocast": {"live_bytes": 0, "loss": half},
    "a limit": {"live_bytes": 0},
    "all kept": {"live_bytes": None},
    "two micro-steps": {"live_bytes": 0, "accumulate": 2},
    "checkpoints around": {"live_bytes": 0, "wrapped": around},
    "checkpoints inside": {"live_bytes": 0, "kind": Inner},
    "buffers": {"live_bytes": 0, "kind": Normed},
    "an output in a bucket": {"live_bytes": 0, "kind": Tied},
    "frozen leaves": {"live_bytes": 0, "frozen": lambda path: "up" in path},
    "bf16": {"live_bytes": 0, "precision": "compute=bf16, output=f32"},
    "codes": {"live_bytes": 0, "precision": "gather=int8[64]"},
    "parameters on the host": {"live_bytes": 0, "where": "params=host, states=host"},
    "whole matrices": {"live_bytes": 0, "muon": True},
}


def as_eager(p, case, node_size=None):
    groups = mf.make_groups(p, node_size=node_size)
    want = trained(groups, eager, **CASES[case])
    found = trained(groups, named, **CASES[case])
    same(found, want)
    assert found[2][0] >= 1
    assert set(found[2][1:]) == {found[2][0]}, "a step made a new graph"
    assert not counters["graph_break"]
    assert found[3].program.regions == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [1, 2])
def test_regions_train_to_the_bit_of_eager_blocks(ranks, world, case):
    ranks(world).run(quiet, as_eager, world, case)


@pytest.mark.thorough
@pytest.mark.parametrize("p", [2, 4])  # in levels, and with a second replica
@pytest.mark.parametrize("case", ["a limit", "all kept", "codes"])
def test_regions_on_four_ranks_train_to_the_bit_of_eager_blocks(ranks, p, case):
    ranks(4).run(quiet, as_eager, p, case, 2)


def by_inductor(live_bytes):
    """The default compiler fuses kernels, so sums are rounded in other places."""
    groups = mf.make_groups(2)
    torch._dynamo.reset()
    losses = []
    for compiled in (None, "blocks.*"):
        torch.manual_seed(0)
        how: dict[str, Any] = {"loss": square, "live_bytes": live_bytes, "compile": compiled}
        trainer = mf.Trainer(Model(), mf.optim.adamw(1e-3), groups, **how)
        losses.append([trainer.step(random(step, 8, WIDTH)).loss.item() for step in range(4)])
    for want, got in zip(*losses, strict=True):
        assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("g++"), reason="its kernels for CPUs need a compiler of C++")
@pytest.mark.parametrize("live_bytes", [0, None])
def test_the_default_compiler_trains_as_eager_blocks(ranks, live_bytes):
    ranks(2).run(quiet, by_inductor, live_bytes)


def quiet(fn, *args):
    with warnings.catch_warnings(action="ignore"):  # dynamo's own
        fn(*args)


def uses_and_places():
    """A region is one use of its bucket, and saves of its weights places alone."""
    groups, seen = mf.make_groups(2), []
    pack = _Saved.pack
    _Saved.pack = lambda self, value: seen.append(pack(self, value)) or seen[-1]
    try:
        found = trained(groups, named, live_bytes=0, steps=2)
    finally:
        _Saved.pack = pack
        in_buckets = [bucket for bucket, _ in seen if bucket is not None]
    assert len(in_buckets) >= 2 * 3 * 3  # in two steps of three blocks: norm, up and down
    params = {x.data_ptr() for x in tree_of(found[3])}
    assert not any(isinstance(x, torch.Tensor) and x.data_ptr() in params for _, x in seen)
    (learned,) = found[3].schedule.learned.values()
    schedule = learned.schedule
    sizes = mf.bucket_sizes(found[3].state.params, groups)
    assert len(sizes) == 4  # that of the first layer, and one for each block
    print(schedule.uses)
    assert schedule.uses[:4] == ((0,), (1,), (2,), (3,))
    assert schedule.uses[4:] in (((2,), (1,)), ((2,), (1,), (0,)))
    assert schedule.peak_bytes(sizes) == max(sizes)


def tree_of(trainer):
    return [leaf.data for leaf in trainer.state.params.values()]


def test_a_region_is_one_use_of_its_bucket_and_saves_places(ranks):
    ranks(2).run(quiet, uses_and_places)


# What a user compiled in the model.


def by_compile(model):
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def by_wrapping(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")
    return model


def by_forward(model):
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    return model


class Decorated(Block):
    forward = torch.compile(Block.forward, backend="aot_eager")


def by_class(model):
    for block in model.blocks:
        block.__class__ = Decorated
    return model


def all_of_it(model):
    return torch.compile(by_wrapping(model), backend="aot_eager")


def all_by_compile(model):
    model.compile(backend="aot_eager")
    return model


USERS = by_compile, by_wrapping, by_forward, by_class, all_of_it, all_by_compile


def compiled_by_users(world):
    groups = mf.make_groups(world)
    want = trained(groups, eager, live_bytes=0, bucket_bytes=1000)
    for user in USERS:
        torch.manual_seed(0)
        before = user(Model())
        calls = {
            name: (vars(x).get("forward"), x._compiled_call_impl)
            for name, x in before.named_modules()
        }
        found = trained(groups, lambda _, model=before: model, live_bytes=0, bucket_bytes=1000)
        same(found, want)
        assert found[2][-1] >= 1, user
        after = {
            name: (vars(x).get("forward"), x._compiled_call_impl)
            for name, x in before.named_modules()
        }
        assert after == calls  # the model of the user is as it was
    compiled = torch.compile(square, backend="aot_eager")
    torch._dynamo.reset()
    torch.manual_seed(0)
    trainer = mf.Trainer(Model(), mf.optim.sgd(0.1), groups, loss=compiled, live_bytes=0)
    for step, loss in enumerate(want[0][:3]):
        assert trainer.step(random(10 * step + groups.rank, 8, WIDTH)).loss.item() == loss
    assert counters["stats"]["unique_graphs"] >= 1


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_user_has_compiled_becomes_regions(ranks, world):
    ranks(world).run(quiet, compiled_by_users, world)


# Functions of parameters, and torch.func.


def block_of(params, x):
    return torch.tanh(F.linear(x, params["w"], params["b"]))


def functions():
    groups = mf.make_groups(2)
    full = {"w": random(0, WIDTH, WIDTH), "b": random(1, WIDTH)}
    shards, x = mf.shard(full, groups), random(2 + groups.rank, 4, WIDTH)
    fast = mf.compile(block_of, backend="aot_eager", fullgraph=True)
    found = []
    for call in (block_of, fast):
        total = mf.GradSum()
        with mf.defer(shards, groups, mf.on_demand(live_bytes=0), into=total) as deferred:
            total.backward(call(deferred, call(deferred, x)).square().sum())
        found.append(mf.unshard(total.grads(), groups))
        loss = lambda s, call=call: call(mf.gather(s, groups), x).square().sum()  # noqa: E731
        found.append(mf.unshard(mf.reduce_grads(grad_and_value(loss)(shards)[0], groups), groups))
    for got, want in zip(found[2:], found[:2], strict=True):
        for name, value in want.items():
            assert torch.equal(got[name], value), name
    trainer = mf.Trainer(
        torch.compile(lambda p, x: block_of(p, x).square().sum(), backend="aot_eager"),
        mf.optim.sgd(0.1),
        groups,
        params=full,
        live_bytes=0,
    )
    plain = mf.Trainer(
        lambda p, x: block_of(p, x).square().sum(),
        mf.optim.sgd(0.1),
        groups,
        params=full,
        live_bytes=0,
    )
    for each in range(3):
        assert trainer.step(x + each).loss == plain.step(x + each).loss


def test_compiled_functions_take_deferred_parameters(ranks):
    ranks(2).run(quiet, functions)


def under_torch_func():
    groups = mf.make_groups(2)
    torch.manual_seed(0)
    model = Model()
    skeleton = mf.compile_blocks(copy.deepcopy(model).to("meta"), "blocks.*", backend="aot_eager")
    shards, x = mf.shard(dict(model.named_parameters()), groups), random(groups.rank, 4, WIDTH)
    counters.clear()
    results = []
    for each in (model, skeleton):

        def loss(s, each=each):
            with mf.defer(s, groups, mf.on_demand(live_bytes=0)) as full:
                return functional_call(each, full, (x,)).square().mean()

        results.append(grad_and_value(loss)(shards))
    assert torch.equal(results[0][1], results[1][1])
    got, want = (mf.unshard(grads, groups) for grads, _ in results[::-1])
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert not counters["stats"]["unique_graphs"]


def test_inside_of_torch_func_a_region_runs_as_it_is(ranks):
    ranks(2).run(quiet, under_torch_func)


# What is refused.


class Writing(Block):
    def forward(self, x):
        self.up.bias.detach().add_(1.0)
        return super().forward(x)


def refused(world):
    groups = mf.make_groups(world)
    model = named(Model(Writing))
    trainer = mf.Trainer(model, mf.optim.sgd(0.1), groups, loss=square, live_bytes=0)
    before = trainer.params()
    with pytest.raises(mf.errors.LeafError, match="a compiled region writes to its parameters"):
        trainer.step(random(0, 4, WIDTH))
    assert all(torch.equal(x, before[name]) for name, x in trainer.params().items())
    raw = torch.compile(block_of, backend="aot_eager")  # which is no region
    shards = mf.shard({"w": random(0, WIDTH, WIDTH), "b": random(1, WIDTH)}, groups)
    full = mf.defer(shards, groups, mf.on_demand(live_bytes=0)).params
    with pytest.raises(Exception, match="mf.compile, mf.compile_blocks or Trainer"):
        raw(full, random(2, 4, WIDTH))
    with pytest.raises(mf.errors.PlanError, match=re.escape("mode='reduce-overhead' replays")):
        mf.compile_blocks(Model(), "blocks.*", mode="reduce-overhead")
    with pytest.raises(mf.errors.PlanError, match="compile= is of modules"):
        mf.Trainer(block_of, mf.optim.sgd(0.1), groups, params={}, compile="*")
    with pytest.raises(mf.errors.PlanError, match="block.*nearest|matches no module|no module"):
        mf.Trainer(Model(), mf.optim.sgd(0.1), groups, loss=square, compile="block.*")


@pytest.mark.parametrize("world", [1, 2])
def test_what_regions_cannot_do_is_refused(ranks, world):
    ranks(world).run(quiet, refused, world)


def sizes_that_change():
    """With dynamic=True other sizes of batches make no graph; recomputing by reentry is named."""
    groups, losses = mf.make_groups(2), []
    dynamic = lambda m: mf.compile_blocks(m, "blocks.*", backend="aot_eager", dynamic=True)  # noqa: E731
    for compiled in (eager, dynamic):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        trainer = mf.Trainer(
            compiled(Model()), mf.optim.sgd(0.1), groups, loss=square, live_bytes=0
        )
        losses.append([trainer.step(random(n, n, WIDTH)).loss.item() for n in (4, 6, 9)])
    assert losses[0] == losses[1]
    assert counters["stats"]["unique_graphs"] == 1
    reentrant = lambda block, x: checkpoint(block, x, use_reentrant=True)  # noqa: E731
    with pytest.raises(mf.errors.LeafError, match="use_reentrant=False"):
        trained(groups, named, wrapped=reentrant, live_bytes=0)


def test_batches_of_other_sizes_and_reentry(ranks):
    ranks(2).run(quiet, sizes_that_change)


def others():
    groups = mf.make_groups(2)
    pattern = "blocks.*" if groups.rank else "blocks.0"
    with pytest.raises(mf.errors.DesyncError):
        mf.Trainer(Model(), mf.optim.sgd(0.1), groups, loss=square, compile=pattern)


def test_ranks_with_other_regions_are_named(ranks):
    ranks(2).run(quiet, others)


# A compiler that lets no other thread run.


def starving(graph, inputs):
    """A backend that holds the interpreter for longer than ranks wait for a sign of life."""
    ctypes.PyDLL(None).usleep(2_500_000)
    return graph.forward


def compiled_for_long():
    groups = mf.make_groups(2, heartbeat_s=1.0)
    if groups.rank:  # the other one waits for this one
        model = mf.compile_blocks(Model(), "blocks.0", backend=starving)
    else:
        model = mf.compile_blocks(Model(), "blocks.0", backend="eager")
    trainer = mf.Trainer(model, mf.optim.sgd(0.1), groups, loss=square, live_bytes=0)
    for step in range(2):
        trainer.step(random(step, 4, WIDTH))
    groups.close()


def test_a_rank_that_compiles_for_long_is_not_dead(ranks):
    ranks(2).run(quiet, compiled_for_long)
