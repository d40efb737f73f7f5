"""Unequal counts: weighted losses against one process on all samples, and what finds them."""

import warnings

import pytest
import torch
from cases import Layout, groups_of
from torch import nn
from torch.func import functional_call

import mics_fn as mf
from mics_fn.optim import guard

F64 = torch.float64
ROWS, LENGTH = (4, 3, 2, 1), 5  # of the ranks, in units of micro-steps; tokens in a row
PAIR, COPIES, BOTH, FOUR = Layout((2,), 2), Layout((4,), 1), Layout((2, 2), 2), Layout((2, 2), 4)
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


def mean_of_all(net, every):
    """The mean over what is kept in some batches."""
    total = torch.stack([sum_of(net, b) for b in every]).sum()
    return total / torch.stack([b["keep"].sum() for b in every]).sum()


def twin(n, accumulate, kind, max_norm):
    """One process on all samples: what each step gives, and the loss of a last batch."""
    net, losses, norms = model(), [], []
    adamw = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(4):
        every = [batch_of(rank, accumulate, step, kind) for rank in range(n)]
        loss = mean_of_all(net, every)
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
    groups, options = groups_of(layout), dict(options)
    placed = mf.placement.place(groups, options.pop("place", "mics"))
    options = {"guard": mf.optim.Guard(max_norm=0.05), **options}
    limits = options["guard"].max_norm
    params, losses, norms = twin(layout.world_size, accumulate, kind, limits or 1e9)
    if "hop2" in options:
        options["replica_sync"] = mf.replicas.reduced_by(options.pop("hop2"))
    options |= {"loss": mean_of, "weight": COUNTS[kind], "accumulate": accumulate}
    trainer = mf.Trainer(model(), mf.optim.adamw(0.1), placed, bucket_bytes=128, **options)
    for step in range(3):
        found = trainer.step(batch_of(groups.rank, accumulate, step, kind))
        close(found.loss, losses[step], "loss")
        if limits:
            close(found.grad_norm, norms[step], "norm")
        assert found.samples == sum(ROWS[: layout.world_size]) * accumulate
    close(trainer.eval(batch_of(groups.rank, accumulate, 3, kind)), losses[3], "eval")
    for name, value in trainer.params().items():
        close(value, params[name].detach(), name)


def called(net, full):
    return lambda x: functional_call(net, full, (x,))


def by_hand(layout, accumulate, kind):
    """The documented form: a sum by the mean count, in a GradSum."""
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
        mean = mf.collectives.levels.mean_over_ranks(groups, torch.stack(found).mean())
        close(mean, losses[step], "loss")
        state = mf.opt_step(state, total.grads())
        total.release()
    for name, value in mf.unshard(state.params, groups).items():
        close(value, params[name].detach(), name)


OPTIONS = [
    {"overlap_step": True, "guard": mf.optim.Guard(on_nonfinite="ignore")},
    {"faults": mf.FaultPolicy(recoverable=True), "where": "states=host, grads=host"},
    {"hop2": mf.sync_replicas, "place": "zero1"},
    {"place": "hybrid"},
]


@pytest.mark.parametrize(
    ("layout", "accumulate", "kind", "options"),
    [
        (Layout((1,), 1), 3, "tokens", {}),
        (PAIR, 1, "numbers", {}),
        (COPIES, 3, "samples", {}),
        (FOUR, 3, "tokens", {}),
        *((BOTH, 3, "tokens", options) for options in OPTIONS),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else f"{x}",
)
@pytest.mark.short(
    "2-p2-1-numbers-",
    "4-p1-3-samples-",
    "2x2-p2-3-tokens-overlap_step guard",
    "2x2-p2-3-tokens-faults where",
    "2x2-p2-3-tokens-hop2 place",
)
def test_any_counts_are_those_of_one_process(ranks, layout, accumulate, kind, options):
    ranks(layout.world_size).run(by_trainer, layout, accumulate, kind, options)


@pytest.mark.parametrize(
    ("layout", "accumulate", "kind"), [(BOTH, 3, "tokens"), (FOUR, 1, "samples")], ids=str
)
@pytest.mark.short("2x2-p2-3-tokens")
def test_so_are_those_of_a_loop_by_hand(ranks, layout, accumulate, kind):
    ranks(layout.world_size).run(by_hand, layout, accumulate, kind)


def guarded(groups, **options):
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    torch.manual_seed(0)
    return mf.Trainer(nn.Linear(3, 2), mf.optim.adamw(0.1), groups, loss=loss, **options)


def of_nothing():
    groups = groups_of(PAIR)
    trainer = guarded(groups, weight=lambda x: 0 * x.sum() if groups.rank else 0.0)
    metrics = trainer.step(torch.ones(4, 3))
    assert (metrics.accepted, trainer.state.step) == (False, 0)
    assert metrics.nonfinite == "the loss is NaN on ranks 0, 1; every gradient is finite"


def test_a_step_in_which_every_weight_is_0_is_refused(ranks):
    ranks(2).run(of_nothing)


def unequal(layout, rows):
    groups = groups_of(layout)
    guard._warned.clear()
    with warnings.catch_warnings(record=True, action="always") as found:
        trainer = guarded(groups)
        samples = [trainer.step(torch.ones(rows[groups.rank], 3)).samples for _ in range(3)]
        guarded(groups, weight=len).step(torch.ones(rows[groups.rank], 3))
    return samples, [f"{each.message}".split("\n")[0] for each in found]


def test_unequal_batches_are_found_and_said_once(ranks):
    found = ranks(4).run(unequal, BOTH, ROWS)
    for rank, (samples, said) in enumerate(found):
        text = f"Trainer: rank {rank} has {ROWS[rank]} samples in this step, and the 4 ranks"
        assert samples == [10] * 3
        assert said == [f"{text} have 10 together"]
    for samples, said in ranks(4).run(unequal, BOTH, (3, 3, 3, 3)):
        assert (samples, said) == ([12] * 3, [])


def apart(layout, sync):
    """Each replica is weighted by itself, so it is as one process on its own samples."""
    groups = groups_of(layout)
    mine = [0, 1] if groups.rank < 2 else [2, 3]
    net = model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    how = {"loss": mean_of, "weight": COUNTS["tokens"], "replica_sync": sync(100)}
    trainer = mf.Trainer(model(), mf.optim.sgd(0.1), groups, **how)
    for step in range(2):
        trainer.step(batch_of(groups.rank, 1, step, "tokens"))
        every = [batch_of(rank, 1, step, "tokens") for rank in mine]
        sgd.zero_grad()
        mean_of_all(net, every).backward()
        sgd.step()
    own = mf.unshard(trainer.state.params, groups.without_replicas())
    for name, value in own.items():
        close(value, dict(net.named_parameters())[name].detach(), name)


def test_a_replica_that_steps_alone_is_weighted_by_itself(ranks):
    ranks(4).run(apart, BOTH, mf.replicas.diloco)
