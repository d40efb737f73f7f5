"""Laws 4 and 5: training over any layout equals a single process on the concatenated batch.

The twin is plain torch on one process: full parameters, full batches, torch.optim. Gradients differ
by rounding only, so the bound is on the parameters' distance after the steps, derived below.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, everywhere, groups_of, small_first
from torch import nn

import mics_fn as mf
from mics_fn import tree

STEPS, F64 = 3, torch.float64


class Net(nn.Module):
    """Uneven sizes; weights that are tied, frozen, never used, and used on some ranks only."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.extra = nn.Linear(6, 6)
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens, extra):
        h = self.embed(tokens) * self.frozen
        h = h + torch.tanh(self.mix(self.norm(h))) * self.scale
        if extra:
            h = h + self.extra(h)
        return self.head(h)


def loss_of(model, batch):
    """`extra` is off in some micro-steps or on some ranks, which then lack a gradient for it."""
    tokens, use_extra = batch
    logits = model(tokens[:, :-1], bool(use_extra.all()))
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_net(dtype, seed=0):
    torch.manual_seed(seed)
    return Net().to(dtype)


def micro_batch(step, part, rank, mode):
    generator = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    tokens = torch.randint(11, (2, 5), generator=generator)
    on = {"always": True, "not-last": part == 0, "some-ranks": rank % 2 == 0}[mode]
    return tokens, torch.full((2,), on)


def step_batch(step, accumulate, rank, mode):
    parts = [micro_batch(step, part, rank, mode) for part in range(accumulate)]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}


def reference(world_size, accumulate, mode):
    """A single process over all ranks' micro-batches."""
    model = make_net(F64)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:  # one without a gradient has gradient zero, as on shards
        p.grad = torch.zeros_like(p)
    torch_optimizer = torch.optim.AdamW(trained, **ADAMW)
    losses = []
    for step in range(STEPS):
        torch_optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for rank in range(world_size):
            for part in range(accumulate):
                loss = loss_of(model, micro_batch(step, part, rank, mode))
                loss = loss / (world_size * accumulate)
                loss.backward()
                total += loss.item()
        torch_optimizer.step()
        losses.append(total)
    return {k: v.detach() for k, v in model.named_parameters(remove_duplicate=False)}, losses


def train(layout, accumulate, mode, options):
    groups = groups_of(layout)
    rank = dist.get_rank()
    model = make_net(F64)
    torch.manual_seed(1234 + rank)  # what a rank is seeded with must not matter
    options = {"loss": loss_of, "accumulate": accumulate, **options}
    trainer = mf.Trainer(model, mf.optim.adamw(**ADAMW), groups, **options)
    losses, traffic = [], []
    for step in range(STEPS):
        groups.traffic.clear()
        metrics = trainer.step(step_batch(step, accumulate, rank, mode))
        losses.append(metrics.loss.double())
        traffic.append(groups.traffic.snapshot())
    assert all(t == traffic[1] for t in traffic[1:]), "step 2 issues other collectives than step 3"
    hops = {name: calls for name, (calls, _) in traffic[1].items()}
    leaves = tree.flatten(trainer.state.params, lambda v: isinstance(v, mf.shards.Sharded))[0]
    buckets = len({x.bucket for x in leaves})
    assert hops.get("replicas", 0) == (buckets if layout.world_size > layout.partition_size else 0)
    of_hop1 = {calls for name, calls in hops.items() if name.startswith("reduce")}
    assert of_hop1 <= {accumulate * buckets}
    mine = torch.cat([x.double() for x in tree.flatten(trainer.state.params)[0]])
    mean_losses = [torch.stack(everywhere(x, layout.world_size)).mean().item() for x in losses]
    return trainer.params(), mean_losses, mine


# How far parameters may be apart after the steps. A gradient element here is a sum of at most
# some 40 terms (2 samples x 4 tokens, 6 features) of order one or less, re-associated: its
# relative error is at most about 100 u of its terms' sum. AdamW divides by sqrt(v) + eps with
# eps = 1e-3, so an error e in g moves a step by at most lr * e / eps; each step rounds a
# parameter of order 1 twice. Feedback through the loss (Lipschitz constant below 10) is below a
# factor 10 for three steps of this size.
U = torch.finfo(F64).eps / 2
BOUND = 10 * (STEPS * 1e-2 * 100 * U / 1e-3 + 2 * STEPS * U)


@pytest.mark.parametrize(
    ("layout", "accumulate", "mode", "options"),
    [
        (Layout((1,), 1), 3, "always", {}),
        (Layout((2,), 2), 2, "always", {"live_bytes": 0, "bucket_bytes": 200}),
        (Layout((2, 2), 4), 2, "always", {"live_bytes": 600, "bucket_bytes": 200}),
        # A parameter is not used in the last micro-step, or on some ranks: replicas could drift.
        (Layout((2, 2), 1), 3, "not-last", {}),
        (Layout((2, 2), 2), 3, "some-ranks", {}),
        *small_first([Layout((4, 2), 4), Layout((2, 2, 2), 4), Layout((2, 4), 8)], 3, "always", {}),
    ],
    ids=str,
)
def test_equals_a_single_process(ranks, layout, accumulate, mode, options):
    found = ranks(layout.world_size).run(train, layout, accumulate, mode, options)
    want, losses = reference(layout.world_size, accumulate, mode)
    for rank, (params, seen, mine) in enumerate(found):
        assert params.keys() == want.keys()
        for name, value in params.items():
            assert (value - want[name]).abs().max() <= BOUND, name
        assert all(abs(a - b) <= 10 * BOUND for a, b in zip(seen, losses, strict=True))
        assert torch.equal(mine, found[rank % layout.partition_size][2]), "replicas differ"
        assert all(torch.equal(params[k], found[0][0][k]) for k in params)
    moved = max((want[k] - v).abs().max() for k, v in make_net(F64).named_parameters())
    assert moved > 100 * BOUND, "nothing was learned, and so compared"
    assert torch.equal(found[0][0]["frozen"], make_net(F64).frozen)
