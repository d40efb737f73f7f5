"""Replicas that drift apart are reported within K steps: which leaf, which ranks, which is odd."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random
from torch import Tensor, nn

import mics_fn as mf
from mics_fn.optim.flat import by_leaf

TWO, FOUR = Layout((2, 2), 2), Layout((2, 2), 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.norm(self.first(x))) * self.fixed).square().mean()


def flip(piece: Tensor) -> None:
    if piece.numel():
        piece.view(torch.int32)[0] ^= 1


def spoil(state: Any, what: str) -> None:
    """Change one bit of what a rank holds."""
    held = {
        "params": state.params["first.weight"].data,
        "opt": by_leaf(state.opt.moments["exp_avg"])["first.weight"].data,
        "buffers": state.buffers["norm.running_var"],
        "fixed": state.params["fixed"].data,
    }
    if what in held:
        flip(held[what])


def batch_of(step: int, rank: int) -> Tensor:
    return random(9 * step + rank, 4, 5)


def trained(layout: Layout, what: str, every: int) -> tuple[int, str]:
    """How many steps after a fault it was reported, and the report."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    trainer = mf.Trainer(
        Net(),
        mf.optim.adamw(1e-2),
        groups_of(layout),
        faults=mf.FaultPolicy(every),
        bucket_bytes=100,
    )
    for step in range(6):
        if step == 2 and rank == 2:
            spoil(trainer.state, what)
        before = trainer.state
        try:
            trainer.step(batch_of(step, rank))
        except mf.errors.DesyncError as error:
            assert trainer.state is before, "the step was not taken"
            return step - 2, str(error)
    return -1, ""


PATHS = {
    "params": "state.params.first.weight",
    "opt": "state.opt.moments.exp_avg.first.weight",
    "buffers": "state.buffers.norm.running_var",
    "fixed": "state.params.fixed",
}


@pytest.mark.parametrize("what", PATHS)
@pytest.mark.parametrize("layout", [TWO, FOUR], ids=str)
@pytest.mark.covering
def test_a_flipped_bit_is_reported_with_its_leaf_and_ranks(ranks, layout, what):
    found = ranks(layout.world_size).run(trained, layout, what, 1)
    assert all(each == found[0] for each in found)
    steps, text = found[0]
    assert steps == 0
    head = f"Trainer: replicas have drifted apart\n  first difference: {PATHS[what]}\n"
    assert text.startswith(head)
    if layout is TWO:  # of two nobody knows which is right
        assert "  rank 0: own bits\n  rank 2: other bits\n" in text
    else:
        assert "the same bits\n  rank 2: odd\n" in text


def test_it_is_reported_within_as_many_steps_as_were_asked_for(ranks):
    assert [steps for steps, _ in ranks(4).run(trained, FOUR, "fixed", 5)] == [3] * 4


def apart(layout: Layout) -> None:
    """Replicas on their own differ, and are compared after merges alone."""
    torch.manual_seed(0)
    sync = mf.replicas.local_sgd(2)
    how: Any = {"replica_sync": sync, "faults": mf.FaultPolicy(1)}
    trainer = mf.Trainer(Net(), mf.optim.adamw(1e-2), groups_of(layout), **how)
    for step in range(5):
        trainer.step(batch_of(step, dist.get_rank()))
    spoil(trainer.state, "params" if dist.get_rank() == 2 else "")
    trainer.step(torch.ones(4, 5))
    spoil(trainer.state, "params" if dist.get_rank() == 2 else "")
    with pytest.raises(mf.errors.DesyncError, match="drifted apart"):
        trainer.step(torch.ones(4, 5))


def test_replicas_that_are_apart_are_compared_after_merges(ranks):
    ranks(4).run(apart, FOUR)


def with_experts(what: str) -> str:
    """Leaves on two sets of groups, of which one has a bit that flipped on rank 2."""
    dense, experts = groups_of(TWO), groups_of(FOUR)

    def place(path: str) -> mf.Groups:
        return experts if "experts" in path else dense

    params: Any = {"dense": torch.ones(5, 3), "experts": [torch.ones(4), torch.ones(7, 2)]}
    state = mf.init_state(mf.shard(params, place), mf.optim.adamw(1e-2))
    state = mf.opt_step(state, mf.shard(params, place))
    assert mf.same_replicas(state, place) is state
    moments = by_leaf(state.opt.moments["exp_avg"])
    pieces = {
        "params.dense": state.params["dense"].data,
        "opt.moments.exp_avg.experts.0": moments["experts"][0].data,
    }
    if dist.get_rank() == 2:
        flip(pieces[what])
    with pytest.raises(mf.errors.DesyncError) as caught:
        mf.same_replicas(state, place)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "odd"),
    [("params.dense", "rank 2: other bits"), ("opt.moments.exp_avg.experts.0", "rank 2: odd")],
)
def test_leaves_on_several_groups_are_compared_on_each(ranks, what, odd):
    for text in ranks(4).run(with_experts, what):
        assert f"first difference: state.{what}\n" in text
        assert odd in text
