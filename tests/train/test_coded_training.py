"""Training in which parameters and gradients travel as codes."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random, same_bits

import mics_fn as mf

CODED = "gather=int8[64],hop1=int8[64],hop2=int8[64]"
ALL = ["hop2=int4[64]", "gather=fp8[64],hop1=int8[64]@node", CODED]
LAYOUTS = [Layout((2, 2), 4), Layout((2, 2), 2), Layout((2,), 1)]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def trainer_of(groups, precision, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 50), torch.nn.LayerNorm(50), torch.nn.Tanh(), torch.nn.Linear(50, 3)
    )
    options = {"bucket_bytes": 2000, **options}
    return mf.Trainer(
        model,
        mf.optim.adamw(2e-2),
        groups,
        loss=lambda model, xy: (model(xy[0]) - xy[1]).square().mean(),
        precision=precision,
        **options,
    )


def batch(step, rank, size=8):
    x = random(1000 * step + rank, size, 20)
    return x, torch.stack([x[:, 0], x[:, 1] * x[:, 2], x.sum(1) / 5], 1)


def steps(layout, precision, count, options):
    """Losses, and parameters after every step."""
    groups = groups_of(layout)
    if options.pop("fixed", False):
        groups = mf.placement.fixed_order(groups)
    trainer, losses, seen = trainer_of(groups, precision, **options), [], []
    for step in range(count):
        losses.append(float(trainer.step(batch(step, groups.rank)).loss))
        seen.append(mf.unshard(trainer.state.params, groups))
        if step == 0:  # what ranks compare once is not counted
            groups.traffic.clear()
    return losses, seen, groups.traffic.snapshot()


@every_layout
@pytest.mark.parametrize("precision", ALL)
@pytest.mark.covering
@pytest.mark.short("hop2=int4[64]-2-p1", "hop2=int4[64]-2x2-p4")
def test_replicas_have_the_same_bits_after_every_step(ranks, layout, precision):
    pool = ranks(layout.world_size)
    if len(layout.sizes) == 1:  # there is one level alone
        precision = precision.replace("@node", "")
    found = pool.run(steps, layout, precision, 12, {"accumulate": 2})
    for _, seen, _ in found[1:]:
        for mine, theirs in zip(found[0][1], seen, strict=True):
            same_bits(mine, theirs)
    plain = pool.run(steps, layout, None, 12, {"accumulate": 2})
    coded, exact = ([sum(r[0][-4:]) for r in run] for run in (found, plain))
    assert abs(sum(coded) / sum(exact) - 1) < 0.1, "the loss falls as without codes"
    assert sum(r[0][0] for r in found) > 1.2 * sum(r[0][-1] for r in found)


@every_layout
@pytest.mark.short("2x2-p4", "2-p1")
def test_a_dtype_that_is_the_default_changes_no_bit_and_no_byte(ranks, layout):
    pool = ranks(layout.world_size)
    default = pool.run(steps, layout, None, 3, {})
    for precision in ("hop2=f32", "gather=f32,hop1=f32,hop2=f32"):
        for (_, want, sent), (_, got, also) in zip(
            default, pool.run(steps, layout, precision, 3, {}), strict=True
        ):
            same_bits(got, want)
            assert also == sent
    bf16 = pool.run(steps, layout, "reduce=bf16", 3, {})
    same = pool.run(steps, layout, "hop1=bf16,hop2=bf16", 3, {})
    assert [(r[0], r[2]) for r in bf16] == [(r[0], r[2]) for r in same]


def test_fixed_order_and_codes_compose(ranks):
    layout = Layout((2, 2), 2)
    run = [ranks(4).run(steps, layout, CODED, 4, {"fixed": True}) for _ in range(2)]
    same_bits(run[0][0][1], run[1][3][1])


@pytest.mark.parametrize(
    ("size", "precision", "silent"),
    [(1, "gather=int8[64],hop1=int8[64]", "gather"), (2, "hop2=int8[64]", "replicas")],
)
def test_one_rank_or_one_replica_sends_and_codes_nothing(ranks, size, precision, silent):
    layout = Layout((2,), size)
    _, seen, sent = ranks(2).run(steps, layout, precision, 3, {})[0]
    assert not any(name.startswith(silent) for name in sent)
    for mine, plain in zip(seen, ranks(2).run(steps, layout, None, 3, {})[0][1], strict=True):
        same_bits(mine, plain)


# A gradient that is not finite, on one rank.


def refused(layout, precision, bad_rank):
    groups = groups_of(layout)
    guard = mf.optim.Guard(on_nonfinite="skip")
    trainer = trainer_of(groups, precision, guard=guard)
    found = []
    for step in range(3):
        x, y = batch(step, groups.rank)
        y = y * math.nan if step == 1 and groups.rank == bad_rank else y
        trainer.step((x, y))
        found.append((trainer.state.step, mf.unshard(trainer.state.params, groups)))
    same_bits(found[0][1], found[1][1])
    return [step for step, _ in found], found[-1][1]


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
@pytest.mark.parametrize("precision", [CODED, "hop1=int4[64]@node,hop2=fp8[64]"])
@pytest.mark.parametrize("bad_rank", [0, 3])
@pytest.mark.covering
def test_all_ranks_refuse_a_step_that_is_not_finite_on_one(ranks, layout, precision, bad_rank):
    found = ranks(4).run(refused, layout, precision, bad_rank)
    assert found[0][0][0] == found[0][0][1] == found[0][0][2] - 1
    for counts, params in found[1:]:
        assert counts == found[0][0]
        same_bits(params, found[0][1])
        assert all(bool(x.isfinite().all()) for x in params.values())


# Merges of replicas.


def merged(layout, policy):
    groups = groups_of(layout)
    sync = {
        "local_sgd": lambda: mf.replicas.local_sgd(2),
        "diloco": lambda: mf.replicas.diloco(2, mf.optim.sgd(0.7)),
    }[policy]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that local_sgd sends no codes
        trainer = trainer_of(groups, "hop2=int8[64]", replica_sync=sync)
    for step in range(3):
        trainer.step(batch(step, groups.rank))
    groups.traffic.clear()
    trainer.step(batch(3, groups.rank))
    sent = groups.traffic.snapshot()["replicas"]
    return mf.unshard(trainer.state.params, groups), sent


def test_merges_send_parameters_as_they_are_and_differences_as_codes(ranks):
    layout = Layout((2, 2), 2)
    (local, diloco) = (ranks(4).run(merged, layout, x) for x in ("local_sgd", "diloco"))
    for found in (local, diloco):
        for params, _ in found[1:]:
            same_bits(params, found[0][0])
    assert 3 * diloco[0][1][1] < local[0][1][1]


NO_EFFECT = """
Trainer: hop2=int8[64] of precision= has no effect with local_sgd(4)
  its merges average parameters, which are sent in their own dtype
  fix: leave hop2= out, or merge with diloco(...), which sends differences
"""


def test_codes_that_merges_never_send_are_named():
    groups, local = mf.make_groups(1), mf.replicas.local_sgd(4)
    with pytest.warns(UserWarning, match="has no effect") as found:
        trainer_of(groups, "hop2=int8[64]", replica_sync=local)
    assert [str(each.message) for each in found] == [NO_EFFECT.strip()]
    assert found[0].filename == __file__
    # What has an effect, or is a dtype that hop 2 has anyway, says nothing.
    trainer_of(groups, "hop1=bf16", replica_sync=local)
    trainer_of(groups, "gather=int8[64]", replica_sync=local)
    trainer_of(groups, "hop2=int8[64]", replica_sync=mf.replicas.diloco(4))
    trainer_of(groups, "hop2=int8[64]")


# What is never coded, and what is refused.


def derivatives(layout):
    groups = groups_of(layout)
    params, vector = {"w": random(0, 70, dtype=torch.float64)}, random(9, 70, dtype=torch.float64)
    coded, plain = (mf.shard(params, groups, precision=x) for x in (CODED, None))

    def loss(shards):
        full = mf.gather(shards, groups)["w"]
        return (full * vector).sum() + 0.5 * full.square().sum()

    def along(shards):
        direction = mf.shards.cut({"w": vector}, groups, like=shards)
        tangent = torch.func.jvp(loss, (shards,), (direction,))[1]
        twice = torch.func.jvp(torch.func.grad(loss), (shards,), (direction,))[1]
        return tangent, mf.unshard(twice, groups)["w"], mf.gather(shards, groups)["w"]

    tangent, twice, full = along(coded)
    assert not torch.equal(full, params["w"])
    torch.testing.assert_close(tangent, ((vector + full) * vector).sum())
    same_bits(twice, along(plain)[1])
    torch.testing.assert_close(twice, vector, rtol=1e-14, atol=0)
    with mf.defer(coded, groups, mf.on_demand()) as deferred:
        same_bits(deferred["w"] + 0, full)
    rows = torch.stack([vector, 2 * vector])
    gradient = torch.func.grad(lambda s, v: (mf.gather(s, groups)["w"] * v).sum())
    found = torch.func.vmap(gradient, (None, 0))(coded, rows)
    same_bits(mf.unshard(tree_row(found, 1), groups)["w"], 2 * vector)


def tree_row(shards, row):
    return {name: replace(leaf, data=leaf.data[row]) for name, leaf in shards.items()}


@pytest.mark.parametrize("layout", [Layout((2, 2), 4), Layout((2,), 2)], ids=str)
def test_derivatives_of_derivatives_are_never_coded(ranks, layout):
    ranks(layout.world_size).run(derivatives, layout)


def kept_exactly(layout, folder):
    groups = groups_of(layout)
    trainer = trainer_of(groups, CODED)
    for step in range(2):
        trainer.step(batch(step, groups.rank))
    params = mf.unshard(trainer.state.params, groups)
    name = next(iter(params))
    same_bits(mf.get(trainer.state.params, name, groups), params[name])
    mf.checkpoint.save(folder, trainer.state, groups, step=2)
    other = trainer_of(groups, "hop2=int4[32]")
    loaded = mf.checkpoint.load(folder, other.state, groups).state
    same_bits(mf.unshard(loaded.params, groups), params)
    linear = torch.nn.Linear(2, 2)
    shards = mf.shard(dict(linear.named_parameters()), groups, replicas="broadcast")
    how = {"loss": lambda model, x: model(x).sum(), "params": shards}
    with pytest.raises(mf.errors.PlanError, match="is not sent as this precision= says"):
        mf.Trainer(linear, mf.optim.sgd(0.1), groups, precision="hop2=int8[64]", **how)


def test_what_is_read_and_saved_is_exact(ranks, tmp_path):
    ranks(4).run(kept_exactly, Layout((2, 2), 2), tmp_path / "saved")


def refusals(layout):
    groups = groups_of(layout)
    with pytest.raises(mf.errors.PlanError) as caught:
        mf.shard({"w": torch.ones(9)}, groups, precision="gather=int8[64]@rack")
    assert "int8[64]@rack names a level that these groups do not have" in str(caught.value)
    assert "name one of node, rank" in str(caught.value)
    mine = "hop2=int8[64]" if dist.get_rank() else "hop2=int8[32]"
    with pytest.raises(mf.errors.DesyncError, match="rank"):
        mf.shard({"w": torch.ones(9)}, groups, precision=mine)


def test_codes_that_can_not_be_are_refused_on_all_ranks(ranks):
    ranks(4).run(refusals, Layout((2, 2), 4))
