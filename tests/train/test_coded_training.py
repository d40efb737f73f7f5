"""Training in which parameters and gradients travel as codes."""

import pytest
import torch
from cases import Layout, groups_of, random, same_bits

import mics_fn as mf

CODED = "gather=int8[64],hop1=int8[64],hop2=int8[64]"
FOUR, PAIRS, COPIES = Layout((2, 2), 4), Layout((2, 2), 2), Layout((2,), 1)


def model_of():
    torch.manual_seed(0)
    first, last = torch.nn.Linear(20, 50), torch.nn.Linear(50, 3)
    return torch.nn.Sequential(first, torch.nn.LayerNorm(50), torch.nn.Tanh(), last)


def trainer_of(groups, precision, **options):
    options |= {"loss": lambda model, xy: (model(xy[0]) - xy[1]).square().mean()}
    options |= {"bucket_bytes": 2000, "precision": precision}
    return mf.Trainer(model_of(), mf.optim.adamw(2e-2), groups, **options)


def batch(step, rank, size=8):
    x = random(1000 * step + rank, size, 20)
    return x, torch.stack([x[:, 0], x[:, 1] * x[:, 2], x.sum(1) / 5], 1)


def steps(layout, precision, count, options):
    """Losses, and parameters after every step."""
    groups = groups_of(layout)
    trainer, losses, seen = trainer_of(groups, precision, **options), [], []
    for step in range(count):
        losses.append(float(trainer.step(batch(step, groups.rank)).loss))
        seen.append(mf.unshard(trainer.state.params, groups))
        if step == 0:  # what ranks compare once is not counted
            groups.traffic.clear()
    return losses, seen, groups.traffic.snapshot()


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(PAIRS, CODED), (FOUR, "gather=fp8[64],hop1=int8[64]@node"), (COPIES, "hop2=int4[64]")],
    ids=str,
)
@pytest.mark.short(f"2x2-p2-{CODED}")
def test_replicas_have_the_same_bits_after_every_step(ranks, layout, precision):
    found, plain = (
        ranks(layout.world_size).run(steps, layout, x, 12, {"accumulate": 2})
        for x in (precision, None)
    )
    for _, seen, _ in found[1:]:
        same_bits(seen, found[0][1])
    coded, exact = ([sum(r[0][-4:]) for r in run] for run in (found, plain))
    assert abs(sum(coded) / sum(exact) - 1) < 0.1, "the loss falls as without codes"
    assert sum(r[0][0] for r in found) > 1.2 * sum(r[0][-1] for r in found)


# Merges of replicas.


def merged(layout, sync):
    groups = groups_of(layout)
    trainer = trainer_of(groups, "hop2=int8[64]", replica_sync=sync(2))
    for step in range(2):
        groups.traffic.clear()
        trainer.step(batch(step, groups.rank))
    sent = groups.traffic.snapshot()["replicas"]
    return mf.unshard(trainer.state.params, groups), sent[1]


def test_merges_send_parameters_as_they_are_and_differences_as_codes(ranks):
    local, diloco = (
        ranks(4).run(merged, PAIRS, x) for x in (mf.replicas.local_sgd, mf.replicas.diloco)
    )
    for found in (local, diloco):
        for params, _ in found[1:]:
            same_bits(params, found[0][0])
    assert 3 * diloco[0][1] < local[0][1]


def derivatives(layout):
    groups, vector = groups_of(layout), random(9, 70, dtype=torch.float64)
    params, found = {"w": random(0, 70, dtype=torch.float64)}, []

    def loss(shards):
        return 0.5 * mf.gather(shards, groups)["w"].square().sum()

    for precision in (CODED, None):
        shards = mf.shard(params, groups, precision=precision)
        direction = mf.shard({"w": vector}, groups, precision=precision)
        twice = torch.func.jvp(torch.func.grad(loss), (shards,), (direction,))[1]
        found.append(mf.unshard(twice, groups))
        assert torch.equal(mf.gather(shards, groups)["w"], params["w"]) is (precision is None)
    same_bits(*found)


def test_derivatives_of_derivatives_are_never_coded(ranks):
    ranks(4).run(derivatives, FOUR)
