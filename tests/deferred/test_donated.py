"""Memory of shards that is written to while a gather still sends it: others get what was there."""

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random

import mics_fn as mf
from mics_fn.collectives import Pending

PAIR, REPLICAS = Layout((2,), 2), Layout((2, 2), 2)
SIZE = 24  # of each leaf, which is a bucket of its own


class Slow:
    """Gathers of some chunks do nothing on this rank until somebody waits for them."""

    def __init__(self, patch: pytest.MonkeyPatch, *tensors: torch.Tensor) -> None:
        self.storages = {x.untyped_storage()._cdata for x in tensors}
        self.waited: list[Pending] = []
        push, wait = Pending.push, Pending.wait

        def slow_push(pending: Pending) -> bool:
            kept = [x for x in pending._keep if isinstance(x, torch.Tensor)]
            held = any(x.untyped_storage()._cdata in self.storages for x in kept[:1])
            return False if held and pending not in self.waited else push(pending)

        def slow_wait(pending: Pending) -> torch.Tensor:
            self.waited.append(pending)
            return wait(pending)

        patch.setattr(Pending, "push", slow_push)
        patch.setattr(Pending, "wait", slow_wait)


def values():
    return {name: random(i, SIZE) for i, name in enumerate("ab")}


def kept(state, groups):
    """All are fetched at once, and what this rank does not use others may."""
    run = mf.defer(state.params, groups, mf.keep_all())
    _ = run.params["a"] + 0
    coming = run._live.buckets[state.params["b"].bucket.index].pending
    return lambda: coming.wait().view(-1)[:SIZE].clone(), run.close


def written_early(layout):
    """The first rank of each group writes before its gather of "b" is done, the others later."""
    groups, rank = groups_of(layout), dist.get_rank()
    shards = mf.shard(values(), groups, bucket_bytes=4)
    replica = rank // layout.partition_size
    with torch.no_grad():
        for leaf in shards.values():  # replicas that steps of their own have taken apart
            leaf.data.add_(replica)
    state = mf.init_state(shards, mf.optim.sgd(1.0))
    ones = {k: torch.ones(SIZE) for k in "ab"}
    grads = mf.reduce_grads(ones, groups, like=shards)
    mf.opt_step(state, grads)  # the first one on new groups compares the step
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        slow = Slow(patch, shards["b"].data)
        use, close = kept(state, groups)
        if rank % layout.partition_size:
            got = use()
            after = mf.opt_step(state, grads, donate=True).params
        else:
            assert all(pending.finished for pending in slow.waited), "its gather has not begun"
            after = mf.opt_step(state, grads, donate=True).params
            got = use()
        close()
    assert torch.equal(got, values()["b"] + replica), "what was there when the gather began"
    for name, value in mf.unshard(after, groups).items():  # three roundings of values below 4
        assert torch.allclose(value, values()[name] + replica - 1.0, rtol=0, atol=3 * 2**-23)


@pytest.mark.parametrize("layout", [PAIR, REPLICAS], ids=str)
@pytest.mark.covering
def test_a_gather_sends_what_was_there_when_it_began(ranks, layout):
    ranks(layout.world_size).run(written_early, layout)
