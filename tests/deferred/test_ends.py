"""Where a run of deferred parameters ends: with its block, by `close`, or with its derivative."""

import warnings

import pytest
import torch
from cases import Layout, groups_of, random
from torch import Tensor

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import GroupsError

PAIR = Layout((2,), 2)


def make(groups):
    values = {name: random(i, 5, 3) for i, name in enumerate("abc")}
    return values, mf.shard(values, groups, bucket_bytes=60)


def loss_of(full) -> Tensor:
    return sum((x.sin().sum() for x in full.values()), torch.zeros(()))


def refused(full) -> bool:
    with pytest.raises(GroupsError, match="used after its run ended"):
        full["a"].sum()
    return True


def blocks(layout):
    """A block ends its run wherever no derivative is to come."""
    groups = groups_of(layout)
    values, shards = make(groups)
    for into in (False, True):
        policy = mf.on_demand(live_bytes=0)
        for _ in range(3):
            total = mf.GradSum() if into else None
            with mf.defer(shards, groups, policy, into=total) as full:
                loss = loss_of(full)
                if total is not None:
                    total.backward(loss)
            assert torch.equal(loss, loss_of(values))
            assert refused(full)
            if total is not None:
                got = mf.unshard(total.grads(), groups)
                assert all(torch.allclose(got[k], values[k].cos(), atol=1e-6) for k in values)
                total.release()
    assert policy.schedule is not None
    run = mf.defer(shards, groups, mf.keep_all())
    loss_of(run.params)
    run.close()
    run.close()
    # With one rank nothing was fetched, and the values are those of the run.
    assert layout.partition_size == 1 or refused(run.params)


def derivatives(layout):
    """A block inside of what is differentiated leaves the run to the derivative."""
    groups = groups_of(layout)
    values, shards = make(groups)
    policy = mf.on_demand(live_bytes=0)

    def inside(s):
        with mf.defer(s, groups, policy) as full:
            return loss_of(full)

    for _ in range(3):
        got = mf.unshard(torch.func.grad(inside)(shards), groups)
        assert all(torch.allclose(got[k], values[k].cos(), atol=1e-6) for k in values)
    assert policy.schedule is not None
    variables = tree.map_leaves(lambda x: x.detach().requires_grad_(), shards)
    pieces = tree.flatten(variables)[0]
    with mf.defer(variables, groups, mf.on_demand(live_bytes=0)) as full:
        loss = loss_of(full)
    after = torch.autograd.grad(loss, pieces)  # the block ended before its backward
    with mf.defer(variables, groups, mf.on_demand(live_bytes=0)) as full:
        within = torch.autograd.grad(loss_of(full), pieces)
    assert refused(full)
    assert all(torch.equal(a, b) for a, b in zip(after, within, strict=True))


def errors(layout):
    """An error in the block ends the run without a word to other ranks; the next run is right."""
    groups = groups_of(layout)
    values, shards = make(groups)
    policy, made = mf.on_demand(live_bytes=0), []
    for step in range(6):
        total = mf.GradSum()
        try:
            with (  # the first that fails leaves the schedule
                warnings.catch_warnings(action="ignore"),
                mf.defer(shards, groups, policy, into=total) as full,
            ):
                loss = loss_of(full)
                if step % 2:
                    raise KeyError("of the model")
                total.backward(loss)
        except KeyError:
            assert refused(full)
            made.append(groups.hierarchy.pools.fetched.made)
            continue
        got = mf.unshard(total.grads(), groups)
        assert all(torch.allclose(got[k], values[k].cos(), atol=1e-6) for k in values)
        total.release()
    assert made[1] == made[2], "memory of a run that failed is used again"


def into_a_hierarchy(layout):
    groups = groups_of(layout)
    _, shards = make(groups)
    for route in (groups.hierarchy, groups.flat):
        with pytest.raises(GroupsError, match=r"defer\(into=\): got a hierarchy, needs groups"):
            mf.defer(shards, route, mf.keep_all(), into=mf.GradSum())


@pytest.mark.parametrize("what", [blocks, derivatives, errors, into_a_hierarchy])
@pytest.mark.parametrize("layout", [Layout((1,), 1), PAIR], ids=str)
def test_where_a_run_ends(ranks, layout, what):
    ranks(layout.world_size).run(what, layout)
