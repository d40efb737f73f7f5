"""Backward passes that run others inside, and losses that give parameters no gradient."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random, same_bits
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import mics_fn as mf

ALONE, PAIR, COPIES = Layout((1,), 1), Layout((2,), 2), Layout((2,), 1)
RATE = 0.5


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# Recomputation that runs a backward of its own.


class Blocks(nn.Module):
    """Four layers, of which subclasses recompute some."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))


class Shared(Blocks):
    """Layers that are used in two blocks, and outside of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(lambda x: self.c(self.b(x)), x, use_reentrant=True))
        return self.d(self.c(x)) + linear(x, self.d.weight.t())


class Nested(Blocks):
    """A block that recomputes a part of itself."""

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.c(torch.tanh(self.b(x)))

        def outer(x: Tensor) -> Tensor:
            with warnings.catch_warnings():  # torch sees no gradient in the first forward
                warnings.filterwarnings("ignore", "None of the inputs")
                return checkpoint(inner, self.a(x), use_reentrant=True) + self.c(x)

        return self.d(checkpoint(outer, x.detach().requires_grad_(), use_reentrant=True))


def made(case: type) -> nn.Module:
    torch.manual_seed(0)
    return case().double()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def batch_of(step: int, rank: int) -> Tensor:
    return random(10 * step + rank, 4, 6, dtype=torch.float64)


def recomputed(case: type, layout: Layout, live_bytes: int | None, accumulate: int) -> dict:
    trainer = mf.Trainer(
        made(case), mf.optim.sgd(RATE), groups_of(layout), loss=loss_of, accumulate=accumulate,
        live_bytes=live_bytes, bucket_bytes=400,
    )  # fmt: skip
    for step in range(3):
        trainer.step(batch_of(step, rank_of()))
    return trainer.params()


def recomputed_alone(case: type, n: int, accumulate: int) -> dict:
    """Plain backward, on the batches of all ranks."""
    model = made(case)
    optimizer = torch.optim.SGD(model.parameters(), RATE / (n * accumulate))
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(n):
            for part in batch_of(step, rank).chunk(accumulate):
                loss_of(model, part).backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("case", [Shared, Nested], ids=lambda case: case.__name__)
@pytest.mark.thorough
def test_reentrant_checkpoints_train_as_with_plain_backward(ranks, case):
    for layout, live_bytes, accumulate in ((PAIR, 0, 2), (COPIES, None, 1)):
        want = recomputed_alone(case, 2, accumulate)
        for found in ranks(2).run(recomputed, case, layout, live_bytes, accumulate):
            for name, value in want.items():
                torch.testing.assert_close(found[name], value.detach(), rtol=1e-12, atol=1e-13)


def test_blocks_that_begin_to_recompute_later_are_noticed():
    recompute = [False]

    def loss(model: Any, x: Tensor) -> Tensor:
        if recompute[0]:
            x = checkpoint(model.a, x.detach().requires_grad_(), use_reentrant=True)
        return model.b(x if recompute[0] else model.a(x)).square().mean()

    groups, found = mf.make_groups(1), []
    for steps in ([False] * 3, [False, True, True]):
        sgd = mf.optim.sgd(RATE)
        trainer = mf.Trainer(made(Blocks), sgd, groups, loss=loss, bucket_bytes=400)
        for step, recompute[0] in enumerate(steps):
            x, before = batch_of(step, 0), trainer.params()
            if recompute[0] and not steps[step - 1]:
                with pytest.raises(mf.errors.LeafError, match="use_reentrant=True, unlike before"):
                    trainer.step(x)
                same_bits(trainer.params(), before)
            trainer.step(x)
        found.append(trainer.params())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-13)


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


def test_gradients_in_two_parts_are_refused():
    groups = mf.make_groups(1)
    loss = lambda model, x: Again.apply(model, model(x)).sum()  # noqa: E731  # pyright: ignore
    trainer = mf.Trainer(nn.Linear(3, 3), mf.optim.sgd(1.0), groups, loss=loss)
    before = trainer.params()
    with pytest.raises(mf.errors.LeafError, match="gradients in two parts in one pass"):
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
        x = random(rank_of(), 4, 3)
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
        replicas="broadcast", accumulate=2,
        loss=lambda model, x: model(x).sum() if x.min() > 0 else x.sum(), live_bytes=None,
    )  # fmt: skip
    x = torch.tensor([[0.0] * 3, [float(rank_of())] * 3])
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


def test_what_has_no_parameters_that_are_trained_has_nothing_to_miss():
    groups = mf.make_groups(1)
    for frozen in ({"n": torch.ones(2, dtype=torch.int64)}, {"e": torch.ones(0)}):
        total = mf.GradSum()
        mf.defer(mf.shard(frozen, groups), groups, mf.on_demand(), into=total)
        total.backward(torch.zeros(()))
        total.grads()
