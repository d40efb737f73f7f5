"""Unequal counts: weighted losses against one process on all samples, and what finds them."""

from functools import partial

import pytest
import torch
from cases import Layout, groups_of
from torch import nn
from torch.func import functional_call

import mics_fn as mf

F64 = torch.float64
ROWS, LENGTH = (4, 3, 2, 1), 5  # of the ranks, in units of micro-steps; tokens in a row
LAYOUTS = [Layout((1,), 1), Layout((2,), 2), Layout((4,), 1), Layout((2, 2), 2), Layout((2, 2), 4)]
COUNTS = {
    "samples": lambda batch: len(batch["x"]),
    "tokens": lambda batch: batch["keep"].sum(),
    "numbers": lambda batch: int(batch["keep"].sum()),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def batch_of(rank, accumulate, step, kind):
    """Rows of tokens, of which some are padding; of ranks 1 and 3 all those of a micro-step."""
    random = torch.Generator().manual_seed(100 * step + rank)
    rows = ROWS[rank] * accumulate
    keep = torch.rand(rows, LENGTH, generator=random) < 0.6
    if kind != "samples" and rank in (1, 3):
        keep[: rows // accumulate] = False
    keep = torch.ones_like(keep) if kind == "samples" else keep
    x = torch.randn(rows, LENGTH, 3, generator=random, dtype=F64)
    return {"x": x, "keep": keep}


def sum_of(model, batch):
    return (model(batch["x"]).square().sum(-1) * batch["keep"]).sum()


def mean_of(model, batch):
    """NaN, and so are its gradients, where nothing is kept."""
    return sum_of(model, batch) / batch["keep"].sum()


def twin(n, accumulate, kind, max_norm):
    """One process on all samples: what each step gives, and the loss of a last batch."""
    net, losses, norms = model(), [], []
    adamw = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(4):
        every = [batch_of(rank, accumulate, step, kind) for rank in range(n)]
        loss = sum(sum_of(net, b) for b in every) / sum(b["keep"].sum() for b in every)
        losses.append(loss.item())
        if step == 3:
            return dict(net.named_parameters()), losses, norms
        adamw.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), max_norm).item())
        adamw.step()
    raise AssertionError


def close(found, want, what):
    gap = torch.as_tensor(found, dtype=F64) - torch.as_tensor(want, dtype=F64)
    assert gap.abs().lt(1e-12).all(), (what, found, want)


def by_trainer(layout, accumulate, kind, options):
    groups = groups_of(layout)
    params, losses, norms = twin(layout.world_size, accumulate, kind, 0.05)
    trainer = mf.Trainer(
        model(),
        mf.optim.adamw(0.1),
        groups,
        loss=mean_of,
        weight=COUNTS[kind],
        accumulate=accumulate,
        guard=mf.optim.Guard(max_norm=0.05),
        bucket_bytes=128,
        **options,
    )
    for step in range(3):
        found = trainer.step(batch_of(groups.rank, accumulate, step, kind))
        close(found.loss, losses[step], "loss")
        close(found.grad_norm, norms[step], "norm")
        assert found.samples == sum(ROWS[: layout.world_size]) * accumulate
    close(trainer.eval(batch_of(groups.rank, accumulate, 3, kind)), losses[3], "eval")
    for name, value in trainer.params().items():
        close(value, params[name].detach(), name)


def called(net, full):
    return lambda x: functional_call(net, full, (x,))


def by_hand(layout, accumulate, kind):
    """The documented form: a sum by the mean count, in a GradSum and under torch.func."""
    groups = groups_of(layout)
    params, losses, _ = twin(layout.world_size, accumulate, kind, 1e9)
    net = model()
    state = mf.init_state(mf.shard(dict(net.named_parameters()), groups), mf.optim.adamw(0.1))
    for step in range(3):
        batch = batch_of(groups.rank, accumulate, step, kind)
        parts = [{k: x.chunk(accumulate)[i] for k, x in batch.items()} for i in range(accumulate)]
        counts = [part["keep"].sum() for part in parts]
        total, found = mf.GradSum(accumulate), []
        with mf.defer(state.params, groups, mf.keep_all(), into=total) as full:
            for part in parts:
                loss = mf.weighted(sum_of(called(net, full), part), counts, groups)
                total.backward(loss)
                found.append(loss.detach())

        def loss_fn(shards, parts=parts, counts=counts):
            full = mf.gather(shards, groups)
            of = partial(sum_of, called(net, full))
            losses = [mf.weighted(of(part), counts, groups) for part in parts]
            return torch.stack(losses).mean()

        pure = mf.reduce_grads(torch.func.grad(loss_fn)(state.params), groups)
        for a, b in zip(mf.tree.flatten(pure)[0], mf.tree.flatten(total.grads())[0], strict=True):
            close(a, b, "grads")
        mean = mf.collectives.mean_over_ranks(groups, torch.stack(found).mean())
        close(mean, losses[step], "loss")
        state = mf.opt_step(state, total.grads())
        total.release()
    for name, value in mf.unshard(state.params, groups).items():
        close(value, params[name].detach(), name)


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_counts_are_those_of_one_process(ranks, layout, accumulate, kind):
    ranks(layout.world_size).run(by_trainer, layout, accumulate, kind, {})
    ranks(layout.world_size).run(by_hand, layout, accumulate, kind)
