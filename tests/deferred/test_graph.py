"""Backward passes that run others inside are refused; losses that give parameters no gradient."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random, same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mics_fn as mf

ALONE, PAIR, COPIES = Layout((1,), 1), Layout((2,), 2), Layout((2,), 1)
RATE = 0.5


# Recomputation that runs a backward of its own.


class Again(torch.autograd.Function):
    """Runs a backward of its own, and has another name than those who are known to."""

    @staticmethod
    def forward(ctx, layer, x):  # pyright: ignore
        ctx.layer, ctx.x = layer, x.detach()
        return layer(x)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore
        x = ctx.x.requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), grad)
        return None, x.grad


def reentrant(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x.detach().requires_grad_(), use_reentrant=True).sum()  # pyright: ignore


def in_parts(model: nn.Module, x: Tensor) -> Tensor:
    return Again.apply(model, model(x)).sum()  # pyright: ignore


REFUSED = {
    "gradients in two parts in one pass": in_parts,
    "block is checkpointed with use_reentrant=True": reentrant,
}


@pytest.mark.parametrize("begins", [0, 1])
@pytest.mark.parametrize("text", REFUSED)
def test_a_backward_in_backward_is_refused(text, begins):
    """Also one that begins in a later step, in a block that has no other way to the parameters."""
    groups, chosen = mf.make_groups(1), [lambda model, x: model(x).sum()] * begins
    chosen.append(REFUSED[text])
    trainer = mf.Trainer(
        nn.Linear(3, 3), mf.optim.sgd(1.0), groups, loss=lambda model, x: chosen[0](model, x)
    )
    for _ in range(begins):
        trainer.step(random(0, 2, 3))
        del chosen[0]
    before = trainer.params()
    with pytest.raises(mf.errors.LeafError, match=text):
        trainer.step(random(0, 2, 3))
    same_bits(trainer.params(), before)


# Losses that give no gradient.

OUTER = nn.Linear(3, 3)


def closes_over(model: nn.Module, x: Tensor) -> Tensor:
    return OUTER(x).square().mean()


def detached(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean().detach()


def of_inputs(model: nn.Module, x: Tensor) -> Tensor:
    return x.requires_grad_().square().mean()


NOTHING = {
    closes_over: r"on Parameters that it was not given, of shape \(3, 3\), \(3,\): it closes over",
    detached: r"it requires no gradient: it was detached",
    of_inputs: r"it requires a gradient, but depends on none of these parameters",
}


def trains_nothing(layout: Layout, live_bytes: int | None) -> None:
    torch.manual_seed(0)
    groups = groups_of(layout)
    for loss, cause in NOTHING.items():
        chosen = [loss]
        trainer = mf.Trainer(
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
            mf.optim.sgd(RATE, momentum=0.9), groups,
            loss=lambda model, x, chosen=chosen: chosen[0](model, x), accumulate=2,
            live_bytes=live_bytes, bucket_bytes=16,
        )  # fmt: skip
        x = random(groups.rank, 4, 3)
        before = [trainer.params(), dict(trainer.state.buffers), trainer.state.step]
        many = layout.world_size
        who = f", on any of {many} ranks" if many > 1 else ""
        text = f"(?s)the loss gave no parameter a gradient{who}\n.*{cause}.*fix: compute it from"
        with pytest.raises(mf.errors.LeafError, match=text):
            trainer.step(x)
        same_bits([trainer.params(), dict(trainer.state.buffers)], before[:2])
        assert trainer.state.step == before[2]
        chosen[0] = lambda model, x: model(x).square().mean()
        with warnings.catch_warnings():  # it does take another way
            warnings.filterwarnings("ignore", "defer: the order of use changed")
            trainer.step(x)
        assert not torch.equal(trainer.params()["0.weight"], before[0]["0.weight"])


@pytest.mark.parametrize("live_bytes", [0, None])
@pytest.mark.parametrize("layout", [ALONE, PAIR, COPIES], ids=str)
@pytest.mark.short("2-p2-0")
def test_a_step_that_would_train_nothing_is_refused_on_all_ranks(ranks, layout, live_bytes):
    ranks(layout.world_size).run(trains_nothing, layout, live_bytes)


def some_train(layout: Layout) -> dict:
    """Only one rank, and only in one micro-step, has a loss that uses the parameters."""
    trainer = mf.Trainer(
        copy.deepcopy(OUTER), mf.optim.sgd(RATE), groups_of(layout),
        accumulate=2,
        loss=lambda model, x: model(x).sum() if x.min() > 0 else x.sum(), live_bytes=None,
    )  # fmt: skip
    x = torch.tensor([[0.0] * 3, [float(dist.get_rank())] * 3])
    for _ in range(2):
        trainer.step(x)
    return trainer.params()


@pytest.mark.parametrize("layout", [PAIR, COPIES], ids=str)
def test_one_rank_with_a_gradient_is_enough(ranks, layout):
    first, second = ranks(2).run(some_train, layout)
    same_bits(first, second)
    assert not torch.equal(first["weight"], OUTER.weight)


def test_a_loss_that_also_uses_other_parameters_says_so_once():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) + OUTER(x)).sum()

    with mf.make_groups(1) as groups:
        trainer = mf.Trainer(nn.Linear(3, 3), mf.optim.sgd(RATE), groups, loss=loss)
        with pytest.warns(UserWarning, match=r"it was not given, of shape \(3, 3\), \(3,\)\n"):
            trainer.step(random(0, 2, 3))
        trainer.step(random(1, 2, 3))
        assert OUTER.weight.grad is None
