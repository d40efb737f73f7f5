"""Buckets that get no gradient on some ranks: right, or refused by name before anything hangs."""

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random
from telling import told

import mics_fn as mf

PAIR, REPLICAS = Layout((2,), 2), Layout((2, 2), 2)
BUCKETS, SIZE = 8, 6  # half of them are more than a ring has parts in flight
END, MIDDLE, BEGINNING = 1, BUCKETS // 2, BUCKETS - 1  # of the backward pass


def weights():
    return [random(i, SIZE) for i in range(BUCKETS)]


def loss_of(full, rank, without):
    """Each bucket is used in forward and in backward, also one that gets no gradient."""
    x = random(rank, SIZE) * full[0]
    for i, w in enumerate(full[1:], 1):
        x = torch.tanh(x * (w.detach() if i == without else w))
    return x.square().sum()


def make_run(layout):
    """A function that runs a step of some passes, and gives its gradients and its run."""
    groups, rank = groups_of(layout, timeout_s=30.0), dist.get_rank()
    shards = mf.shard(weights(), groups, bucket_bytes=8)

    def run(schedule, withouts):
        total = mf.GradSum(len(withouts))
        with (here := mf.defer(shards, groups, schedule, into=total)) as full:
            for without in withouts:
                total.backward(loss_of(full, rank, without))
        grads = mf.unshard(total.grads(), groups)
        total.release()
        return grads, here

    return run


def twin(ranks, withouts_of):
    """The mean of all ranks' gradients in one process; `withouts_of(rank)` has one per pass."""
    params = [w.requires_grad_() for w in weights()]
    losses = [loss_of(params, r, without) for r in range(ranks) for without in withouts_of(r)]
    return torch.autograd.grad(torch.stack(losses).mean(), params, allow_unused=True)


def same_gradients(got, want):
    # gradients of order one: some tens of roundings in sums that are associated differently
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, torch.zeros(()) if b is None else b, rtol=0, atol=1e-5)


def schedule_of(run, kind, live, passes):
    """A policy that has learned the order, or the fixed schedule that it made."""
    if kind == "keep_all":
        return mf.keep_all()
    policy = mf.on_demand(live_bytes=live, prefetch=0)
    if kind == "fixed":
        run(policy, [None] * passes)
        return mf.schedules.Schedule.parse(str(policy.schedule))
    return policy


def right(layout, kind, live, without, passes):
    """The last rank has no gradient for a bucket in one pass of each second step."""
    run, last = make_run(layout), layout.world_size - 1
    schedule = schedule_of(run, kind, live, passes)
    run(schedule, [None] * passes)
    for step in range(4):
        odd = [without if step % 2 and i == passes - 1 else None for i in range(passes)]
        plain = [None] * passes
        got, here = run(schedule, odd if dist.get_rank() == last else plain)
        same_gradients(got, twin(layout.world_size, lambda r: odd if r == last else plain))  # noqa: B023
        assert here.following == (kind != "keep_all")


# Nothing is fetched after these reductions.
RIGHT = [
    *((kind, None, MIDDLE) for kind in ("keep_all", "fixed", "learned")),
    ("keep_all", None, END),
    ("learned", None, BEGINNING),
    *((kind, 0, END) for kind in ("fixed", "learned")),
]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("kind", "live", "without"), RIGHT)
@pytest.mark.parametrize("layout", [PAIR, REPLICAS], ids=str)
@pytest.mark.short("2-p2-learned-None-7-2")
def test_a_bucket_without_gradient_on_one_rank_is_right(ranks, layout, kind, live, without, passes):
    ranks(layout.world_size).run(right, layout, kind, live, without, passes)


def refused(layout, kind, without, passes, before):
    def make(_):
        run, plain = make_run(layout), [None] * passes
        schedule = schedule_of(run, kind, 0, passes)
        for _ in range(before):
            run(schedule, plain)
        odd = [*plain[1:], without] if dist.get_rank() == layout.world_size - 1 else plain
        return lambda: run(schedule, odd)

    return told(layout, make)


@pytest.mark.parametrize(
    ("kind", "before", "without", "passes"),
    [
        pytest.param("learned", 2, BEGINNING, 2, marks=pytest.mark.thorough),
        ("fixed", 0, BEGINNING, 1),
        pytest.param("learned", 1, MIDDLE, 1, marks=pytest.mark.thorough),
        pytest.param("fixed", 1, MIDDLE, 2, marks=pytest.mark.thorough),
    ],
)
def test_a_fetch_after_a_reduction_that_a_rank_lacks_is_refused(
    ranks, kind, before, without, passes
):
    found, last = ranks(2).run(refused, PAIR, kind, without, passes, before), 1
    for text, seconds in found:
        lines = text.splitlines()
        assert any(line.startswith(f"  rank {last}: ") for line in lines), text
        assert seconds < 15, "and not 30"
        # One waits for a fetch, the other for the reduction.
        assert lines[0] == "ranks wait for each other in different collectives"
        assert "fetch of bucket" in text
        assert "reduce-scatter" in text
    assert len({text for text, _ in found}) == 1, "the same words everywhere"
