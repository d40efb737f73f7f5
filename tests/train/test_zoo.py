"""Training each model of the zoo, on one rank or several, equals one process on all their batches.

The one process, the twin, is plain torch: a whole model, every rank's batch after the other, the
mean of their gradients, torch.optim. Compared are the gradient of the first step (what SGD takes
away in it, over its rate), and after the last one parameters, buffers, losses, and the loss in
evaluation mode.

The bound is measured on the twin. Sharding changes the order in which kernels and hops add, which
is worth a relative error of `case.error` a kernel. A backward stable kernel gives what an exact one
would on inputs that are off by as much. So a second twin starts from parameters that are all off by
`case.error`, up or down at random: its distance from the first is how far such errors carry through
model, gradient and steps. The last kernel's own error is added to it.
"""

import contextlib
import functools
import importlib.util
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cases import Layout, everywhere, groups_of, random, same_bits, unit_roundoff
from torch import Tensor, nn
from zoo import CASES, Case, build, own_loss

import mics_fn as mf
from mics_fn import tree

if importlib.util.find_spec("transformers"):  # imported before ranks fork, which inherit it
    from zoo_transformers import CASES as TRANSFORMERS
else:
    TRANSFORMERS: dict[str, Case] = {}

ZOO = CASES | TRANSFORMERS
# One bucket is gathered at a time, or all gathered parameters stay.
WAYS = pytest.mark.parametrize(
    ("layout", "live_bytes"),
    [(Layout((1,), 1), None), (Layout((2,), 2), 0), (Layout((2, 2), 2), None)],
    ids=str,
)
MARKS: dict[str, pytest.MarkDecorator] = {
    "func": pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own jvp
}
BUCKETS = 6
RATE, MOMENTUM = 1 / 16, 0.9  # a power of two: to multiply and divide by it is exact

Values = dict[str, Tensor]


class Outcome(NamedTuple):
    """What came of training."""

    gradients: Values  # of the first step
    params: Values
    buffers: Values
    losses: list[Tensor]  # of the steps, then in evaluation mode; means over ranks


def train(layout: Layout, name: str, live_bytes: int | None, compiled: bool = False) -> Outcome:
    """On every rank; with each child of the model as a compiled region if `compiled`."""
    case, groups, rank = ZOO[name], groups_of(layout), dist.get_rank()
    model = given = build(case)
    if compiled:
        torch._dynamo.reset()
        given = mf.compile_blocks(model, "*", backend="aot_eager")
    trainer = mf.Trainer(
        given,
        mf.optim.sgd(RATE, momentum=MOMENTUM),
        groups,
        loss=case.loss,
        **options(model, live_bytes),
    )
    leaves, _ = tree.flatten(trainer.state.params, lambda v: isinstance(v, mf.shards.Sharded))
    buckets = {leaf.bucket for leaf in leaves if isinstance(leaf, mf.shards.Sharded)}
    assert len(buckets) > 2 or compiled
    losses, first = [], {}
    with warnings.catch_warnings():  # elsewhere that would be a false alarm, and fail
        if case.changes:
            warnings.filterwarnings("ignore", "defer: the order of use changed")
        for step in range(steps_of(case)):
            losses.append(trainer.step(case.batch(step, rank)).loss)
            first = first or trainer.params()
    means = [torch.stack(everywhere(loss, layout.world_size)).mean() for loss in losses]
    if case.evaluates:
        means.append(trainer.eval(case.batch(steps_of(case), rank)))
    return Outcome(taken(named(model), first), trainer.params(), trainer.state.buffers, means)


def steps_of(case: Case) -> int:
    """One that records the order of use, one that follows it, and one more where that changes."""
    return 3 if case.changes else 2


def options(model: nn.Module, live_bytes: int | None) -> dict[str, Any]:
    """Small buckets, so that every model has several."""
    bucket_bytes = sum(p.nbytes for p in model.parameters()) // BUCKETS
    return {"bucket_bytes": bucket_bytes, "live_bytes": live_bytes}


@functools.cache
def twin(name: str, world_size: int, *, shifted: bool) -> Outcome:
    """In one process; `shifted` starts with every parameter off by `case.error`."""
    case = ZOO[name]
    model = build(case)
    if shifted:
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.mul_(1 + case.error * random(i, *p.shape, dtype=p.dtype).sign())
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    losses, history = [], [copy_of(named(model))]
    for step in range(steps_of(case)):
        losses.append(add_gradients(model, case, step, world_size))
        optimizer.step()
        history.append(copy_of(named(model)))
    if case.evaluates:
        model.eval()
        with torch.no_grad():
            each = [loss_of(model, case, steps_of(case), rank) for rank in range(world_size)]
        losses.append(torch.stack(each).mean())
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return Outcome(taken(*history[:2]), history[-1], buffers, losses)


def add_gradients(model: nn.Module, case: Case, step: int, world_size: int) -> Tensor:
    """The mean of the ranks' gradients becomes `.grad`, that of their buffers the model's.

    A parameter without a gradient gets one of zeros, as on shards.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    totals = [torch.zeros_like(p) for p in params]
    start, ends, losses = copy_of(dict(model.named_buffers())), [], []
    for rank in range(world_size):
        for k, b in model.named_buffers():
            b.copy_(start[k])
        loss = loss_of(model, case, step, rank)
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        for total, grad in zip(totals, grads, strict=True):
            if grad is not None:
                total += grad.to_dense() / world_size
        losses.append(loss.detach())
        ends.append(copy_of(dict(model.named_buffers())))
    for p, total in zip(params, totals, strict=True):
        p.grad = total
    for k, b in model.named_buffers():
        values = torch.stack([end[k] for end in ends])
        b.copy_(values.mean(0) if b.is_floating_point() else values[0])
    return torch.stack(losses).mean()


def loss_of(model: nn.Module, case: Case, step: int, rank: int) -> Tensor:
    return (case.loss or own_loss)(model, case.batch(step, rank))


def named(model: nn.Module) -> Values:
    params = model.named_parameters(remove_duplicate=False)
    return {name: p.detach() for name, p in params}


def copy_of(values: Values) -> Values:
    return {k: v.clone() for k, v in values.items()}


def taken(before: Values, after: Values) -> Values:
    """The gradient that a first step of SGD has followed."""
    return {k: (before[k] - after[k]) / RATE for k in before}


def bounds(want: Outcome, shifted: Outcome, case: Case) -> dict[str, float]:
    """How far each kind of result may be from the twin's, by its largest element."""
    pairs = zip(Outcome._fields, want, shifted, strict=True)
    found = {kind: distance(a, b) + case.error * largest(a) for kind, a, b in pairs}
    # Both gradients are differences of rounded parameters.
    size = largest(want.params) / RATE + largest(want.gradients)
    rounded = 2 * unit_roundoff(case.dtype) * size
    return found | {"gradients": found["gradients"] + rounded}


def largest(values: Any) -> float:
    return max((x.double().abs().max().item() for x in tree.flatten(values)[0]), default=0.0)


def distance(a: Any, b: Any) -> float:
    leaves = zip(tree.flatten(a)[0], tree.flatten(b)[0], strict=True)
    return largest([x.double() - y.double() for x, y in leaves])


def check(ranks: Any, layout: Layout, name: str, live_bytes: int | None, *more: bool) -> None:
    case, n = ZOO[name], layout.world_size
    found = ranks(n).run(train, layout, name, live_bytes, *more)
    want, shifted = twin(name, n, shifted=False), twin(name, n, shifted=True)
    bound = bounds(want, shifted, case)
    for kind in Outcome._fields:
        mine, twins = getattr(found[0], kind), getattr(want, kind)
        paths = tree.paths(twins, kind)
        assert tree.paths(mine, kind) == paths
        for a, b, path in zip(tree.flatten(mine)[0], tree.flatten(twins)[0], paths, strict=True):
            assert a.shape == b.shape, path
            assert a.dtype == b.dtype, path
            assert distance(a, b) <= bound[kind], path
    assert largest(want.gradients) > 10 * bound["gradients"], "a gradient of zeros would pass"
    for other in found[1:]:
        same_bits(list(other), list(found[0]))
    model = build(case)
    frozen = [k for k, p in model.named_parameters() if not p.requires_grad]
    same_bits({k: found[0].params[k] for k in frozen}, {k: named(model)[k] for k in frozen})


@WAYS
@pytest.mark.parametrize("name", [pytest.param(k, marks=MARKS.get(k, ())) for k in CASES])
@pytest.mark.covering(live_bytes=0)
def test_equals_a_single_process(ranks, layout, name, live_bytes):
    check(ranks, layout, name, live_bytes)


@pytest.mark.skipif(not TRANSFORMERS, reason="transformers is not installed")
@WAYS
@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.covering(live_bytes=0)
@pytest.mark.short("mixtral-grouped-2-p2-0")
def test_transformers_equal_a_single_process(ranks, layout, name, live_bytes):
    check(ranks, layout, name, live_bytes)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(k, marks=MARKS.get(k, ())) for k in ZOO])
@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_compiled_regions_equal_a_single_process(ranks, name):
    twice = name in ("penalty", "sharpness")  # of which torch compiles one backward alone
    refused = pytest.raises(RuntimeError, match="does not currently support double backward")
    with refused if twice else contextlib.nullcontext():
        check(ranks, Layout((2,), 2), name, 0, True)
