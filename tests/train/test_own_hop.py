"""Hop 2 by a function of one's own, and collectives of one's own that go wrong."""

from dataclasses import replace
from functools import partial
from typing import Any

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
        trainer.step(batch(step, trainer.groups))
    return trainer


def plain_hop(grads: Any, groups: Any) -> Any:
    return mf.sync_replicas(grads, groups)


def counting(grads: Any, state: Any, groups: Any) -> Any:
    mean = mf.sync_replicas(grads, groups)
    return mean, {"steps": state["steps"] + 1, "last": grads}


def begin(shards: Any) -> Any:
    return {"steps": torch.zeros(()), "last": mf.shards.map(torch.zeros_like, shards)}


def same_as_hop_2(layout: Layout) -> None:
    """As the library's own hop 2, with and without a state."""
    groups = groups_of(layout)
    want = trained(trainer_of(groups, accumulate=2), 2).state
    policy = mf.replicas.reduced_by(counting, init=begin)
    for how in ({"replica_sync": mf.replicas.reduced_by(plain_hop)}, {"replica_sync": policy}):
        trainer = trained(trainer_of(groups, accumulate=2, faults=mf.FaultPolicy(1), **how), 2)
        pairs = zip(pieces(trainer.state), pieces(want), strict=True)
        assert all(torch.allclose(x, y, rtol=0, atol=1e-6) for x, y in pairs)
    assert float(trainer.sync_state.outer["steps"]) == 2.0
    mine = pieces(trainer.sync_state.outer["last"])
    copies = [x.clone() for x in mine]
    trainer.step(batch(3, groups))  # its gradients lie elsewhere than those that were kept
    same_bits(mine, copies)


def pieces(value: Any) -> list[Any]:
    return [x for x in tree.flatten(value)[0] if hasattr(x, "abs")]


def test_a_plain_mean_gives_the_same(ranks):
    ranks(4).run(same_as_hop_2, BOTH)


def wrong_means(layout: Layout) -> None:
    """Replicas that come out different are told, in the next step that compares them."""
    groups, sync = groups_of(layout), mf.replicas.reduced_by(lambda grads, groups: grads)
    trainer = trainer_of(groups, replica_sync=sync, faults=mf.FaultPolicy(check_replicas=1))
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
    first.checkpoint.close()
    other = trainer(100)
    assert other.state.step == 2
    for each in (first, other):
        each.step(batch(4, groups))
    same_bits((other.state.params, other.sync_state), (first.state.params, first.sync_state))


def refused_options() -> None:
    groups = groups_of(ALONE)
    for wrong in (None, {"w": torch.ones(5, 4)}):
        sync = mf.replicas.reduced_by(lambda grads, groups, wrong=wrong: wrong)
        trainer = trainer_of(groups, replica_sync=sync)
        with pytest.raises(mf.errors.LeafError):
            trainer.step(batch(0, groups))
    sync = mf.replicas.reduced_by(lambda grads, state, groups: grads, init=begin)
    with pytest.raises(mf.errors.LeafError):
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
        trainer.state = replace(trainer.state, step=0)
        trainer.sync_state = replace(trainer.sync_state, step=0)
    with pytest.raises(mf.errors.LostStateError, match="keeps a state on each rank"):
        trainer.reset()
    forget_groups(layout)


def test_a_state_of_its_own_is_lost_with_its_rank(ranks):
    ranks(2).run(lost_states, COPIES)


# Collectives of one's own


def faults(layout: Layout) -> None:
    """Other names, other sizes, nothing to wait for, a rank that raises: errors on all, by name."""
    rank, x = dist.get_rank(), torch.ones(2)

    def renewed() -> Any:
        forget_groups(layout)
        groups = groups_of(layout)
        return groups, groups.communicators["partition"]

    def summed(comm: Any, x: Any = x, name: str = "sum", issue: Any = dist.all_reduce) -> Any:
        return mf.collectives.start(comm, partial(issue, x), [x], name=name, sent_bytes=9).wait()

    groups, comm = renewed()
    with pytest.raises(mf.errors.DesyncError, match="rank 1: sum of 1"):
        summed(comm, name=f"sum of {rank}")
    groups, comm = renewed()
    with pytest.raises(mf.errors.CollectiveError, match="gave NoneType, and nothing to wait for"):
        summed(comm, issue=lambda x, **_: None)
    groups, comm = renewed()
    groups.traffic.clear()
    assert summed(comm) is x
    assert x.tolist() == [2.0, 2.0]
    assert groups.traffic.snapshot() == {"partition": (1, 9)}
    forget_groups(layout)


def test_collectives_that_go_wrong(ranks):
    ranks(2).run(faults, PAIR)
