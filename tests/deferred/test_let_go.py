"""Where all parameters fit, gradients take the memory of their parameters in the last pass."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, placed_as, same_bits
from costs import counted
from telling import told
from torch import nn
from torch.func import functional_call

import mics_fn as mf
from mics_fn import tree
from mics_fn.lab.report import buckets_of

WIDTH, STEPS = 96, 3
UNIT = 4 * WIDTH * WIDTH
PAIR, LAYOUTS = Layout((2,), 2), [Layout((2, 2), 4), Layout((2, 2), 2)]


class Late(nn.Module):
    """Needs a weight in backward after its gradient is complete, where it is used detached."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
        self.late = late

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x).sin()
            if self.late and i == 0:
                weight: Any = self.layers[5].weight
                x = (x @ weight.detach()).sin()
        return x


def make(late=False):
    torch.manual_seed(0)
    return Late(late)


def loss_of(model, x):
    return model(x).float().square().mean()


def batch(rank, step, accumulate):
    random = torch.Generator().manual_seed(7 * rank + step)
    return torch.randn(2 * accumulate, WIDTH, generator=random)


def trained(groups, *, late=False, **options):
    """The bits after some steps, and a trainer."""
    trainer = mf.Trainer(
        make(late), mf.optim.adamw(1e-2), groups, loss=loss_of, bucket_bytes=UNIT, **options
    )
    for step in range(STEPS):
        trainer.step(batch(dist.get_rank(), step, trainer.options.accumulate))
    return tree.flatten(trainer.params())[0], trainer


def moved(groups):
    """Calls and bytes of gathers and of hop 1, which no agreement on a new tree has."""
    found = groups.traffic.snapshot()
    return {what: n for what, n in found.items() if what.startswith(("gather", "reduce"))}


def both(layout, cases):
    """Each case where all is planned to stay, and where nothing is: the same bits and traffic.

    Of each, how much memory it takes of pools, as parts of the parameters.
    """
    found = []
    for scheme, precision, accumulate in cases:
        options = {"precision": precision, "accumulate": accumulate}
        groups, other = (counted(placed_as(groups_of(layout), scheme)) for _ in range(2))
        groups.traffic.clear()
        got, trainer = trained(groups, live_bytes=None, **options)
        pools: Any = groups.hierarchy.pools
        sent, made = moved(groups), []
        for _ in range(2):
            trainer.step(batch(0, 0, accumulate))
            made.append((pools.fetched.made, pools.chunks.made, pools.sums["ring"].made))
        assert made[0] == made[1], "a later step makes memory"
        assert pools.fetched.used == pools.chunks.used == 0, "something is not given back"
        other.traffic.clear()
        same_bits(got, trained(other, schedule=mf.keep_all(), **options)[0])
        assert sent == moved(other), "what is sent differs"
        full = sum(b.nbytes for b in buckets_of(trainer.state.params))
        assert pools.fetched.peak <= full
        found.append((pools.fetched.peak / full, pools.chunks.peak / full))
    return found


CASES = [
    ("zero3", "f32", 1), ("zero3", "compute=bf16,reduce=bf16", 3), ("zero3", "reduce=bf16", 1),
    ("hybrid", "f32", 3), ("hybrid", "reduce=bf16", 3), ("hpz", "compute=bf16,reduce=bf16", 3),
    ("zero1", "f32", 3), ("zero1", "reduce=bf16", 1),
]  # fmt: skip


@pytest.mark.parametrize("layout", [PAIR, *LAYOUTS], ids=str)
@pytest.mark.parametrize("part", range(4))  # each within the limit of the pool
@pytest.mark.thorough
def test_gradients_in_the_memory_of_parameters_have_the_same_bits(ranks, layout, part):
    ranks(layout.world_size).run(both, layout, CASES[part::4])


@pytest.mark.parametrize("layout", [PAIR, *LAYOUTS], ids=str)
@pytest.mark.short("2x2-p4")
def test_no_other_memory_holds_gradients(ranks, layout):
    for ((fetched, sums),) in ranks(layout.world_size).run(both, layout, [("zero3", "f32", 1)]):
        assert (fetched, sums) == (1, 0)


def late(layout):
    groups = groups_of(layout)
    got, trainer = trained(groups, late=True, live_bytes=None)
    same_bits(got, trained(groups, late=True, schedule=mf.keep_all())[0])
    policy: Any = trainer.schedule
    (learned,) = policy.learned.values()
    calls = []
    for _ in range(2):
        groups.traffic.clear()
        trainer.step(batch(0, 0, 1))
        calls.append({k: n for k, n in groups.traffic.calls.items() if k.startswith("gather")})
    return sorted(learned.reused), calls


@pytest.mark.parametrize("layout", [PAIR, LAYOUTS[0]], ids=str)
def test_a_bucket_that_is_needed_later_is_fetched_again_once_and_then_stays(ranks, layout):
    for again, calls in ranks(layout.world_size).run(late, layout):
        assert again == [5]
        assert all(set(each.values()) == {6} for each in calls), calls


def only_on_the_last(layout):
    """What ranks are told if one of them alone needs a bucket later, in the second step."""

    def make_steps(groups):
        model, rank = make(), dist.get_rank()
        trainer = mf.Trainer(
            make(), mf.optim.sgd(0.1), groups, live_bytes=None, bucket_bytes=UNIT,
            loss=lambda net, x: functional_call(model, dict(net.named_parameters()), (x,)).mean(),
        )  # fmt: skip
        trainer.step(batch(rank, 0, 1))
        model.late = rank == layout.world_size - 1
        return lambda: [trainer.step(batch(rank, step, 1)) for step in (1, 2)]

    return told(layout, make_steps)


def test_a_rank_that_alone_needs_a_bucket_later_is_named(ranks):
    for text, seconds in ranks(2).run(only_on_the_last, PAIR):
        assert text.startswith("ranks wait for each other in different collectives")
        assert "rank 1: waits for all-gather over 'gather rank' (defer: fetch of bucket 5" in text
        assert "keep_all()" in text
        assert seconds < 15, "and not 30"
