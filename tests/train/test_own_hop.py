"""Hop 2 by a function of one's own, and collectives of one's own that go wrong."""

import os
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from cases import Layout, forget_groups, groups_of, random, same_bits

import mics_fn as mf
from mics_fn import tree

ALONE, PAIR, COPIES, BOTH = Layout((1,), 1), Layout((2,), 2), Layout((2,), 1), Layout((2, 2), 2)


def loss_fn(full: Any, x: Any) -> Any:
    return (x @ full["w"] + full["b"]).tanh().square().mean()


def params() -> Any:
    return {"w": random(1, 5, 4), "b": random(2, 4)}


def batch(step: int, groups: mf.Groups) -> Any:
    return random(100 + 10 * step + groups.position, 4, 5)


def trainer_of(groups: mf.Groups, **options: Any) -> mf.Trainer:
    return mf.Trainer(loss_fn, mf.optim.adamw(0.1), groups, params=params(), **options)


def trained(trainer: mf.Trainer, steps: int) -> mf.Trainer:
    for step in range(steps):
        trainer.step(batch(step, trainer.member.home))
    return trainer


def plain_hop(grads: Any, groups: Any) -> Any:
    return mf.sync_replicas(grads, groups)


def counting(grads: Any, state: Any, groups: Any) -> Any:
    mean = mf.sync_replicas(grads, groups)
    return mean, {"steps": state["steps"] + 1, "last": grads}


def begin(shards: Any) -> Any:
    return {"steps": torch.zeros(()), "last": mf.shards.map(torch.zeros_like, shards)}


def same_as_hop_2(layout: Layout, accumulate: int) -> None:
    """As the library's own hop 2, with and without a state."""
    groups = groups_of(layout)
    want = trained(trainer_of(groups, accumulate=accumulate), 3).state
    policy = mf.replicas.reduced_by(counting, init=begin)
    for how in ({"hop2": plain_hop}, {"replica_sync": policy}):
        trainer = trained(trainer_of(groups, accumulate=accumulate, check_replicas=1, **how), 3)
        pairs = zip(tree.flatten(trainer.state)[0], tree.flatten(want)[0], strict=True)
        assert all(
            float((x - y).abs().max()) < 1e-6 for x, y in pairs if hasattr(x, "abs") and x.numel()
        )
    assert float(trainer.sync_state.outer["steps"]) == 3.0
    mine = tree.flatten(trainer.sync_state.outer["last"])[0]
    copies = [x.clone() for x in mine]
    trainer.step(batch(3, groups))  # its gradients lie elsewhere than those that were kept
    assert all(torch.equal(x, y) for x, y in zip(mine, copies, strict=True))


@pytest.mark.parametrize("layout", [ALONE, COPIES, BOTH], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.covering(layout=BOTH)
def test_a_plain_mean_gives_the_same(ranks, layout, accumulate):
    ranks(layout.world_size).run(same_as_hop_2, layout, accumulate)


def wrong_means(layout: Layout) -> None:
    """Replicas that come out different are told, in the next step that compares them."""
    groups = groups_of(layout)
    trainer = trainer_of(groups, hop2=lambda grads, groups: grads, check_replicas=1)
    with pytest.raises(mf.errors.DesyncError, match="replicas have drifted apart"):
        trained(trainer, 3)


def refused_steps(layout: Layout) -> None:
    """A step that is refused leaves the state of hop 2 as it was."""
    groups = groups_of(layout)
    sync = mf.replicas.reduced_by(counting, init=begin)
    guard = mf.optim.Guard(on_nonfinite="skip")
    trainer = trained(trainer_of(groups, replica_sync=sync, guard=guard), 1)
    before = tree.map_leaves(torch.clone, trainer.sync_state.outer)
    bad = batch(1, groups) * (float("nan") if groups.position == 1 else 1.0)
    assert not trainer.step(bad).accepted
    same_bits(trainer.sync_state.outer, before)
    assert trainer.sync_state.step == 2
    assert trainer.step(batch(2, groups)).accepted
    assert float(trainer.sync_state.outer["steps"]) == 2.0


def saved_states(layout: Layout, folder: str) -> None:
    """Each replica's own state is saved, and a run goes on to the same bits."""
    groups = groups_of(layout)

    def trainer(every: int) -> mf.Trainer:
        sync = mf.replicas.reduced_by(counting, init=begin)
        saves = mf.Checkpoints(folder, every=every)
        return trainer_of(groups, replica_sync=sync, checkpoint=saves)

    first = trained(trainer(2), 2)
    kept = tree.map_leaves(torch.clone, first.sync_state.outer)
    for step in (2, 3):
        first.step(batch(step, groups))
    first.checkpoint.close()
    os.sync()
    other = trainer(100)
    assert other.state.step == 4
    same_bits(other.sync_state.outer, first.sync_state.outer)
    assert float(kept["steps"]) == 2.0
    for each in (first, other):
        each.step(batch(4, groups))
    same_bits((other.state.params, other.sync_state), (first.state.params, first.sync_state))


def refused_options() -> None:
    groups = groups_of(ALONE)
    for how, text in (
        ({"hop2": 3}, "reduced_by: hop2=3, expected a function"),
        (
            {"hop2": plain_hop, "replica_sync": mf.replicas.local_sgd(2)},
            "Trainer: replica_sync= and hop2= are both given",
        ),
    ):
        with pytest.raises(mf.errors.PlanError) as caught:
            trainer_of(groups, **how)
        assert text in str(caught.value)
        assert "\n  fix: " in str(caught.value)
    for wrong in (None, 3, {"w": torch.ones(5, 4)}):
        trainer = trainer_of(groups, hop2=lambda grads, groups, wrong=wrong: wrong)
        with pytest.raises(mf.errors.LeafError, match="it gave no gradients like those"):
            trainer.step(batch(0, groups))
    sync = mf.replicas.reduced_by(lambda grads, state, groups: grads, init=begin)
    with pytest.raises(mf.errors.LeafError, match="with init= also the next state"):
        trainer_of(groups, replica_sync=sync).step(batch(0, groups))


def test_what_hop_2_must_not_do(ranks, tmp_path):
    ranks(1).run(refused_options)
    ranks(2).run(wrong_means, COPIES)
    ranks(2).run(refused_steps, COPIES)
    ranks(2).run(saved_states, COPIES, str(tmp_path))


def lost_states(layout: Layout) -> None:
    """What hop 2 keeps on a rank cannot be had from another one."""
    groups = groups_of(layout)
    sync = mf.replicas.reduced_by(counting, init=begin)
    trainer = trained(trainer_of(groups, replica_sync=sync), 1)
    if groups.position == 1:  # as after a step that this rank could not write
        from dataclasses import replace

        trainer.state = replace(trainer.state, step=0)
        trainer.sync_state = replace(trainer.sync_state, step=0)
    try:
        with pytest.raises(mf.errors.LostStateError, match="keeps a state on each rank"):
            trainer.reset()
    finally:
        forget_groups(layout)


def test_a_state_of_its_own_is_lost_with_its_rank(ranks):
    ranks(2).run(lost_states, COPIES)


def by_hand(layout: Layout) -> None:
    """Hop 1 over one replica, and then a mean over replicas, is the mean over all ranks."""
    groups = groups_of(layout)
    alone, p = groups.without_replicas(), layout.partition_size
    assert (alone.num_replicas, alone.world_size) == (1, p)
    full = {"w": random(groups.position, 7, 3), "b": random(9 + groups.position, 2)}
    grads = mf.reduce_grads(full, alone)
    want = mf.reduce_grads(full, groups)
    comm = groups.communicators["replicas"]
    mean = mf.shards.map(lambda g: mf.collectives.all_gather(comm, g).mean(0), grads)
    pairs = zip(tree.flatten(mean)[0], tree.flatten(want)[0], strict=True)
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in pairs)
    levels = [
        name for level in groups.plan.level_names for name in (f"gather {level}", f"reduce {level}")
    ]
    assert list(groups.communicators) == [*levels, "partition", "replicas"]
    for name, comm in groups.communicators.items():
        assert comm.name == name
        assert comm.ranks[comm.rank] == groups.rank
        assert comm.size == len(comm.ranks)


@pytest.mark.parametrize("layout", [ALONE, COPIES, Layout((2, 2), 4), BOTH], ids=str)
@pytest.mark.covering(layout=BOTH)
def test_hop_2_by_hand(ranks, layout):
    ranks(layout.world_size).run(by_hand, layout)


# Collectives of one's own


def wrong_calls() -> None:
    groups, all_gather = groups_of(ALONE), cast(Any, mf.collectives.all_gather)
    comm = groups.communicators["replicas"]
    start = partial(mf.collectives.start, name="own", sent_bytes=0)
    x = torch.ones(2)
    for call, text in (
        (lambda: all_gather(comm, [1.0]), "all_gather: tensor 0 is list"),
        (lambda: all_gather(comm, x.to("meta")), "tensor 0 is on meta"),
        (lambda: start(comm, print, [x]), "holds rank 0 alone and has no process group"),
    ):
        with pytest.raises(mf.MicsError) as caught:
            call()
        assert text in str(caught.value), caught.value
        assert "\n  fix: " in str(caught.value)
    for value in (torch.ones(3, 2), torch.ones(0), torch.tensor(True), torch.ones(2).bfloat16()):
        found = mf.collectives.all_gather(comm, value)
        assert torch.equal(found, value.unsqueeze(0))
    assert str(comm).startswith("Comm(name='replicas', ranks=(0,)")


def faults(layout: Layout) -> None:
    """Other names, other sizes, nothing to wait for, a rank that raises: errors on all, by name."""
    rank = dist.get_rank()

    def renewed() -> Any:
        forget_groups(layout)
        groups = groups_of(layout)
        return groups, groups.communicators["partition"]

    groups, comm = renewed()
    for value in (torch.ones(3, 2) * rank, torch.tensor(rank > 0), torch.ones(2).bfloat16() * rank):
        found = mf.collectives.all_gather(comm, value)
        assert torch.equal(found[1 - rank], value.new_ones(value.shape) * (1 - rank))
    large = mf.collectives.all_gather(comm, torch.full((50_000,), float(rank)))
    assert [float(row.mean()) for row in large] == [0.0, 1.0]
    x = torch.ones(2 + rank)
    issue = partial(dist.all_reduce, x)
    with pytest.raises(mf.errors.DesyncError, match="ranks differ in it"):
        mf.collectives.start(comm, issue, [x], name="sum", sent_bytes=8).wait()
    groups, comm = renewed()
    x = torch.ones(2)
    with pytest.raises(mf.errors.DesyncError, match="rank 1: sum of 1"):
        mf.collectives.start(
            comm, partial(dist.all_reduce, x), [x], name=f"sum of {rank}", sent_bytes=8
        ).wait()
    groups, comm = renewed()
    with pytest.raises(mf.errors.CollectiveError, match="gave NoneType, and nothing to wait for"):
        mf.collectives.start(comm, lambda **_: None, [x], name="nothing", sent_bytes=0).wait()
    groups, comm = renewed()
    groups.traffic.clear()
    begun = mf.collectives.start(comm, partial(dist.all_reduce, x), [x], name="sum", sent_bytes=9)
    assert begun.wait() is x
    assert x.tolist() == [2.0, 2.0]
    assert groups.traffic.snapshot() == {"partition": (1, 9)}
    kind, text = (mf.errors.PeerFailed, "rank 1") if rank == 0 else (OSError, "a rank that fails")
    with pytest.raises(kind, match=text):
        fail_on_one(groups, comm, x)
    forget_groups(layout)


def fail_on_one(groups: mf.Groups, comm: Any, x: Any) -> None:
    with groups:
        if comm.rank == 1:
            raise OSError("a rank that fails")
        mf.collectives.all_gather(comm, x)


def test_collectives_that_go_wrong(ranks):
    ranks(1).run(wrong_calls)
    ranks(2).run(faults, PAIR)
