"""With `canonical` a run has the same bits for every p, and on every number of ranks."""

import hashlib
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random, same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader
from zoo import CASES, build

import mics_fn as mf
from mics_fn import checkpoint, optim, placement, tree
from mics_fn.collectives import mean_in_tree, mean_over_ranks
from mics_fn.lab.ranks.pool import RankPool
from mics_fn.train.carried import carried, take_back

Pools = Callable[[int], RankPool]
Batch = tuple[Tensor, ...]

STEPS, LR, MAX_NORM, SCALE = 5, 1e-2, 0.5, 1024.0
FOUR = [
    Layout((1,), 1),
    Layout((2,), 1),
    Layout((2,), 2),
    Layout((2, 2), 1),
    Layout((2, 2), 2),
    Layout((2, 2), 4),
    Layout((4,), 4),
]
EIGHT = [*FOUR, Layout((2, 2, 2), 4), Layout((2, 4), 2), Layout((2, 2, 2), 8), Layout((4, 2), 8)]


class Net(nn.Module):
    """Layers of odd sizes, a tied and a frozen weight, batch norm, and a weight rarely used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 13)
        self.c, self.tied, self.rare = nn.Linear(13, 3), nn.Linear(7, 33), nn.Linear(3, 3)
        self.tied.weight = self.a.weight
        self.b.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(torch.tanh(self.b(torch.relu(self.norm(self.a(x)) + self.tied(x.flip(0))))))
        return self.rare(y) if x[0, 0] > 1 else y


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def loss_of(model: Any, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def micro_batch(step: int, number: int) -> Batch:
    return random(1000 * step + number, 3, 7), 5 * random(1000 * step + number + 500, 3, 3)


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def batch_here(of: Callable[[int, int], Any], layout: Layout, total: int, step: int) -> Any:
    """What this rank computes in a step of `total` micro-batches."""
    n, rank = layout.world_size, rank_here()
    parts = [tree.flatten(of(step, k * n + rank)) for k in range(total // n)]
    joined = [torch.cat(leaves) for leaves in zip(*(part[0] for part in parts), strict=True)]
    return parts[0][1].unflatten(joined)


def trainer_on(layout: Layout, total: int = 4, model: nn.Module | None = None, **options: Any):
    groups = groups_of(layout)
    given = {"loss": loss_of, "deterministic": "canonical", "bucket_bytes": 600, **options}
    given.setdefault("guard", optim.Guard(optim.dynamic_scale(SCALE), max_norm=MAX_NORM))
    groups = given.pop("placed", lambda x: x)(groups)
    accumulate = total // layout.world_size
    optimizer = given.pop("optimizer", None) or optim.adamw(LR)
    return mf.Trainer(model or net(), optimizer, groups, accumulate=accumulate, **given)


def values_of(trainer: Any) -> dict[str, Tensor]:
    """Parameters, moments and buffers, in full."""
    found = {f"param {name}": x for name, x in trainer.params().items()}
    moments = getattr(trainer.state.opt, "moments", {})
    for kind in moments:
        whole = mf.unshard(moments[kind].by_leaf(), trainer.groups)
        found |= {f"{kind} {name}": x for name, x in whole.items() if x is not None}
    return found | {f"buffer {name}": x for name, x in trainer.state.buffers.items()}


def digest(trainer: Any, *more: Any) -> str:
    sha = hashlib.sha256(repr(more).encode())
    for name, x in sorted(values_of(trainer).items()):
        sha.update(name.encode() + x.contiguous().view(-1).numpy().tobytes())
    return sha.hexdigest()


def steps_on(layout: Layout, total: int, of: Any, steps: range, **options: Any) -> str:
    trainer = trainer_on(layout, total, **options)
    found = [trainer.step(batch_here(of, layout, total, step)) for step in steps]
    norms = [None if m.grad_norm is None else m.grad_norm.item() for m in found]
    return digest(trainer, [m.loss.item() for m in found], norms)


# The slow twin: one process, plain torch, a tree written as a recursion, exact fractions.


def mean_of_tree(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return (mean_of_tree(values[:half]) + mean_of_tree(values[half:])) / 2


def exact_norm(values: list[Tensor]) -> float:
    total = sum(Fraction(x) ** 2 for value in values for x in value.double().flatten().tolist())
    return float(total) ** 0.5


def twin(total: int) -> tuple[dict[str, Tensor], list[float]]:
    model = net()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, weight_decay=1e-2, foreach=False)
    losses = []
    for step in range(STEPS):
        start = {name: x.clone() for name, x in model.named_buffers()}
        grads, after, each = [], [], []
        for number in range(total):
            for name, x in model.named_buffers():
                x.copy_(start[name])
            loss = loss_of(model, micro_batch(step, number))
            found = torch.autograd.grad(loss * SCALE, [*trained.values()], allow_unused=True)
            pairs = zip(found, trained.values(), strict=True)
            grads.append([torch.zeros_like(p) if g is None else g for g, p in pairs])
            after.append({name: x.clone() for name, x in model.named_buffers()})
            each.append(loss.detach())
        means = [mean_of_tree([*parts]) for parts in zip(*grads, strict=True)]
        norm = exact_norm(means) / SCALE
        for p, g in zip(trained.values(), means, strict=True):
            p.grad = g * (min(1.0, MAX_NORM / (norm + 1e-6)) / SCALE)
        optimizer.step()
        losses.append(mean_of_tree([x.double() for x in each]).float().item())
        for name, x in model.named_buffers():
            if x.is_floating_point():
                x.copy_(mean_of_tree([values[name].double() for values in after]))
    found = {f"param {name}": p.detach() for name, p in model.named_parameters()}
    for kind in ("exp_avg", "exp_avg_sq"):
        found |= {f"{kind} {name}": optimizer.state[p][kind] for name, p in trained.items()}
    return found | {f"buffer {name}": x for name, x in model.named_buffers()}, losses


def on_ranks(layout: Layout, total: int, live_bytes: int | None) -> tuple[dict, list[float], str]:
    trainer = trainer_on(layout, total, live_bytes=live_bytes)
    batches = (batch_here(micro_batch, layout, total, step) for step in range(STEPS))
    losses = [trainer.step(batch).loss.item() for batch in batches]
    found = {name: x.clone() for name, x in values_of(trainer).items()}
    return found if rank_here() == 0 else {}, losses, digest(trainer)


def check_twin(ranks: Pools, layouts: list[Layout], total: int) -> None:
    (want, want_losses), digests = twin(total), set()
    for layout in layouts:
        for live_bytes in (0, None):
            results = ranks(layout.world_size).run(on_ranks, layout, total, live_bytes)
            found = results[0][0]
            same_bits({name: found[name] for name in want}, want)
            assert all(losses == want_losses for _, losses, _ in results)
            digests |= {sha for _, _, sha in results}
    assert len(digests) == 1


def test_every_layout_has_the_bits_of_one_process(ranks: Pools) -> None:
    check_twin(ranks, FOUR, 4)


@pytest.mark.thorough
def test_eight_micro_batches_on_up_to_eight_ranks(ranks: Pools) -> None:
    check_twin(ranks, EIGHT, 8)


# Other models, optimizers, precisions and placements, compared between layouts.

ZOO = ["channels-last", "embedding", "bag", "decoder", "checkpoint", "tied", "shared", "lora"]
ZOO += ["penalty", "lstm"]
WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "sgd": lambda: {"optimizer": optim.sgd(LR, momentum=0.9, nesterov=True)},
    "lion": lambda: {"optimizer": optim.lion(LR)},
    "rmsprop": lambda: {"optimizer": optim.from_torch(torch.optim.RMSprop, lr=LR)},
    "bf16": lambda: {"precision": "compute=bf16,reduce=f32,output=f32; *norm*: compute=f32"},
    "chain": lambda: {
        "optimizer": optim.chain(optim.clip_by_value(0.1), optim.adamw(LR)),
        "guard": optim.Guard(max_norm=1.0, max_value=0.2),
    },
    "no guard": lambda: {"guard": optim.Guard()},
    **{
        scheme: lambda scheme=scheme: {
            "placed": lambda groups: placement.place(groups, scheme),
            "live_bytes": 0,
        }
        for scheme in ("zero1", "zero2", "hpz", "hybrid", "fsdp")
    },
}


def in_ways(layout: Layout, total: int, names: list[str]) -> dict[str, str]:
    return {name: steps_on(layout, total, micro_batch, range(3), **WAYS[name]()) for name in names}


def in_the_zoo(layout: Layout, total: int, names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        case = CASES[name]
        how = {"model": build(case), "loss": case.loss}
        found[name] = steps_on(layout, total, case.batch, range(2), **how)
    return found


def check_equal(ranks: Pools, job: Any, layouts: list[Layout], total: int, names: Any) -> None:
    want = None
    for layout in layouts:
        for found in ranks(layout.world_size).run(job, layout, total, names):
            want = want or found
            assert found == want, layout


@pytest.mark.thorough
def test_optimizers_precisions_and_placements(ranks: Pools) -> None:
    check_equal(ranks, in_ways, [FOUR[0], FOUR[2], FOUR[5]], 4, list(WAYS)[:8])


@pytest.mark.thorough
def test_models_of_the_zoo(ranks: Pools) -> None:
    check_equal(ranks, in_the_zoo, [FOUR[0], FOUR[4]], 4, ZOO)


@pytest.mark.thorough
@pytest.mark.limit(400)  # ten layouts, on two cores
def test_more_on_eight_ranks(ranks: Pools) -> None:
    check_equal(ranks, in_ways, EIGHT, 8, list(WAYS))
    check_equal(ranks, in_the_zoo, EIGHT[::2], 8, ZOO)


# A run that goes on with other ranks.


def begun(layout: Layout, folder: str) -> None:
    trainer = trainer_on(layout)
    for step in range(2):
        trainer.step(batch_here(micro_batch, layout, 4, step))
    state, extra = carried(trainer)
    checkpoint.save(folder, state, trainer.groups, step=2, extra=extra)


def gone_on(layout: Layout, folder: str, start: int) -> str:
    trainer = trainer_on(layout)
    if start:
        found = checkpoint.load(folder, carried(trainer)[0], trainer.groups)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "take_back: rank")
            take_back(trainer, found.state, found.extra)
    for step in range(start, STEPS):
        trainer.step(batch_here(micro_batch, layout, 4, step))
    return digest(trainer)


def test_a_run_goes_on_with_other_ranks(ranks: Pools, tmp_path: Path) -> None:
    folder, want = str(tmp_path), ranks(4).run(gone_on, FOUR[4], "", 0)[0]
    ranks(4).run(begun, FOUR[5], folder)
    for layout in (FOUR[0], FOUR[1], FOUR[2], FOUR[4]):
        assert set(ranks(layout.world_size).run(gone_on, layout, folder, 2)) == {want}


def flat_loss(model: Any, batch: Any) -> Tensor:
    return loss_of(model, tuple(x.flatten(0, 1) for x in batch))


def fitted(layout: Layout, folder: str, stop: int, start: int) -> str:
    """A loader of whole micro-batches, dealt out by the sampler; the run is saved or goes on."""
    trainer = trainer_on(layout, loss=flat_loss)
    if start:
        found = checkpoint.load(folder, carried(trainer)[0], trainer.groups)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "take_back: rank")
            take_back(trainer, found.state, found.extra)
    items: Any = [micro_batch(0, number) for number in range(12)]  # three steps per pass
    order = mf.sampler(items, trainer.groups, seed=5)
    loader = DataLoader(items, batch_size=4 // layout.world_size, sampler=order)
    losses = [m.loss.item() for m in trainer.fit(loader, stop - start, progress=False)]
    if folder and not start:
        state, extra = carried(trainer)
        checkpoint.save(folder, state, trainer.groups, step=stop, extra=extra)
    return digest(trainer, losses[-1])


@pytest.mark.thorough
def test_a_fit_goes_on_with_other_ranks(ranks: Pools, tmp_path: Path) -> None:
    folder, want = str(tmp_path), ranks(1).run(fitted, FOUR[0], "", STEPS, 0)[0]
    ranks(4).run(fitted, FOUR[4], folder, 2, 0)
    for layout in (FOUR[0], FOUR[2], FOUR[5]):
        assert set(ranks(layout.world_size).run(fitted, layout, "", STEPS, 0)) == {want}
        assert set(ranks(layout.world_size).run(fitted, layout, folder, STEPS, 2)) == {want}


def of_another_step(layout: Layout, folder: str) -> str:
    trainer = trainer_on(layout, total=8)
    found = checkpoint.load(folder, carried(trainer)[0], trainer.groups)
    with warnings.catch_warnings():  # of random states, which are those of other ranks
        warnings.simplefilter("ignore")
        with pytest.raises(mf.errors.OptimizerError) as caught:
            take_back(trainer, found.state, found.extra)
    return str(caught.value)


def test_a_step_of_other_micro_batches_is_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(4).run(begun, FOUR[4], str(tmp_path))
    for text in ranks(2).run(of_another_step, FOUR[2], str(tmp_path)):
        assert "accumulate: saved 4 on all ranks, now 8 on all ranks" in text


# Verbs by hand.


def by_hand(layout: Layout) -> None:
    """One micro-step, reduced by each verb, equals the tree over ranks."""
    base = groups_of(layout)
    rank, n = rank_here(), layout.world_size
    want = mean_of_tree([random(number, 101) for number in range(n)])
    for scheme in (None, "fsdp", "zero1"):
        groups = base if scheme is None else placement.place(base, scheme)
        groups = placement.canonical(groups)
        assert "in one tree" in groups.describe()
        shards = mf.shard({"w": torch.zeros(101), "v": torch.ones(3)}, groups)

        def loss(tree_of: Any) -> Tensor:
            return (tree_of["w"] * random(rank, 101)).sum()

        grads = torch.func.grad(lambda s, g=groups: loss(mf.gather(s, g)))(shards)
        found = mf.reduce_grads(grads, groups)
        again = mf.reduce_grads({"w": random(rank, 101), "v": torch.zeros(3)}, groups)
        total = mf.GradSum()
        with mf.defer(shards, groups, mf.on_demand(live_bytes=0), into=total) as full:
            total.backward(loss(full))
        for each in (found, again, total.grads()):
            assert torch.equal(mf.unshard(each, groups)["w"], want)
    groups = placement.canonical(base)
    assert placement.place(groups, "zero1").hierarchy.route.late == 0
    narrow = mean_over_ranks(groups, random(rank, 9).bfloat16())
    wide = [random(number, 9).bfloat16().float() for number in range(n)]
    assert torch.equal(narrow, mean_of_tree(wide).bfloat16())


@pytest.mark.parametrize("layout", [*FOUR, pytest.param(EIGHT[9], marks=pytest.mark.thorough)])
def test_verbs_by_hand(ranks: Pools, layout: Layout) -> None:
    ranks(layout.world_size).run(by_hand, layout)


def sent(layout: Layout) -> dict[Any, dict]:
    """What hop 2 sends in a step, by mode."""
    found = {}
    for mode in (True, "canonical"):
        trainer = trainer_on(layout, 16, deterministic=mode, guard=optim.Guard())
        trainer.step(batch_here(micro_batch, layout, 16, 0))
        trainer.groups.traffic.clear()
        trainer.step(batch_here(micro_batch, layout, 16, 1))
        found[mode] = trainer.groups.traffic.snapshot()
        pool = trainer.groups.hierarchy.pools.chunks
        found[mode]["chunks"] = (pool.waiting_bytes, 0)
    return found


def test_it_costs_a_hop_2_per_micro_step_and_a_sum_per_level(ranks: Pools) -> None:
    buffers = 2 * 33 * 4  # their mean over replicas, of both statistics
    for found in ranks(4).run(sent, FOUR[4]):
        usual, canonical = (found[mode] for mode in (True, "canonical"))
        usual_bytes = usual["replicas"][1] - buffers
        # Losses and buffers travel once more, in float64, for each of four micro-steps.
        extra = 4 * (2 * 33 + 1) * 8 + buffers
        assert abs(canonical["replicas"][1] - extra - 4 * usual_bytes) < 64
        assert usual["chunks"][0] < canonical["chunks"][0] <= 2 * usual["chunks"][0]


# What cannot be had is refused by name.


def refusal(layout: Layout, options: dict[str, Any]) -> str:
    with pytest.raises(mf.errors.PlanError) as caught:
        trainer_on(layout, options.pop("total", 4), **options)
    return str(caught.value)


REFUSED = {
    "local_sgd": ({"replica_sync": mf.replicas.local_sgd(2)}, "replica_sync=local_sgd"),
    "grad_dtype": ({"grad_dtype": torch.float64}, "grad_dtype=torch.float64"),
    "accumulate": ({"total": 12}, "accumulate=3 is not a power of two"),
    "mode": ({"deterministic": "Canonical"}, "deterministic='Canonical'"),
    "bf16": ({"precision": "bf16,reduce=bf16"}, "one dtype with at least 32 bits"),
    "param": ({"precision": "param=bf16,reduce=f32"}, "param=bfloat16, reduce=float32"),
    "sum": ({"precision": "reduce=f32,accumulate=f64"}, "accumulate=float64"),
}


def refusals(layout: Layout) -> dict[str, str]:
    found = {name: refusal(layout, dict(options)) for name, (options, _) in REFUSED.items()}
    with mf.make_groups(1, mean_over=8) as fewer, pytest.raises(mf.errors.PlanError) as caught:
        placement.canonical(fewer)
    found["mean_over"] = str(caught.value)
    groups = placement.canonical(groups_of(layout))
    shards = mf.shard({"w": torch.ones(5)}, groups)
    with pytest.raises(mf.errors.PlanError, match="no derivative"):
        torch.func.grad(lambda s: optim.global_norm(s, groups))(shards)
    for total in (mf.GradSum(3), mf.GradSum(2, dtype=torch.float64)):
        with pytest.raises(mf.errors.PlanError, match="which canonical groups refuse"):
            mf.defer(shards, groups, mf.keep_all(), into=total)
    mixed = mf.shard([torch.ones(5), torch.ones(5)], [groups, groups_of(layout)])
    with pytest.raises(mf.errors.PlanError, match="and others are not"):
        mf.defer(mixed, [groups, groups_of(layout)], mf.keep_all(), into=mf.GradSum())
    return found


def test_refusals(ranks: Pools) -> None:
    for found in ranks(4).run(refusals, FOUR[4]):
        for name, (_, text) in REFUSED.items():
            assert text in found[name], found[name]
        assert "average gradients over 8" in found["mean_over"]


def three_ranks() -> str:
    with pytest.raises(mf.errors.PlanError) as caught:
        placement.canonical(groups_of(Layout((3,), 1)))
    return str(caught.value)


def test_three_ranks_are_refused(ranks: Pools) -> None:
    assert "3 ranks are not a power of two" in ranks(3).run(three_ranks)[0]


# Arithmetic.


@given(st.integers(0, 4), st.integers(0, 2**16))
def test_a_mean_in_a_tree(depth: int, seed: int) -> None:
    rows = [random(seed + i, 7) for i in range(2**depth)]
    want = mean_of_tree(rows)
    assert torch.equal(mean_in_tree([row.clone() for row in rows]), want)


@given(st.integers(0, 2**16), st.lists(st.integers(0, 300), max_size=4), st.integers(-9, 9))
def test_a_norm_does_not_depend_on_cuts(seed: int, cuts: list[int], power: int) -> None:
    values = random(seed, 300) * 10.0 ** (power * random(seed + 1, 300).clamp(-2, 2))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
    with mf.make_groups(1) as groups:
        groups = placement.canonical(groups)
        whole = optim.global_norm(mf.shard([values], groups), groups)
        parts = [*values[order].tensor_split(sorted(cuts))]
        found = optim.global_norm(mf.shard(parts, groups), groups)
    assert whole == found
    want = exact_norm([values])
    assert abs(found.item() - want) <= 1e-14 * want


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_a_norm_of_what_is_not_finite(odd: float) -> None:
    with mf.make_groups(1) as groups:
        groups = placement.canonical(groups)
        shards = mf.shard([torch.tensor([1.0, odd]), torch.zeros(2)], groups)
        assert not optim.global_norm(shards, groups).isfinite()
        assert optim.global_norm(mf.shard([torch.zeros(2)], groups), groups) == 0


@given(st.integers(0, 2**16), st.lists(st.integers(0, 99), max_size=3))
@pytest.mark.thorough
def test_unfused_steps_do_not_depend_on_cuts(seed: int, cuts: list[int]) -> None:
    value, grads = random(seed, 99), [random(seed + i, 99) for i in (1, 2, 3)]
    makers = (optim.adamw, optim.adam, lambda lr: optim.sgd(lr, momentum=0.9), optim.lion)
    with mf.make_groups(1) as groups:
        for make in makers:
            whole, parts = (
                mf.init_state(mf.shard(tree_of, groups), optim.unfused(make(LR)))
                for tree_of in ([value], [*value.tensor_split(sorted(cuts))])
            )
            for grad in grads:
                whole = mf.opt_step(whole, mf.shard([grad], groups))
                cut = mf.shard([*grad.tensor_split(sorted(cuts))], groups)
                parts = mf.opt_step(parts, cut)
            found = torch.cat(mf.unshard(parts.params, groups))
            assert torch.equal(found, mf.unshard(whole.params, groups)[0])


def after_a_reset(layout: Layout) -> None:
    groups = mf.make_groups(layout.partition_size, topology=mf.groups.Topology(layout.sizes))
    groups = mf.reset(placement.canonical(groups))
    with groups:
        assert "in one tree" in groups.describe()
        by_rank = {"w": random(rank_here(), 33)}
        found = mf.unshard(mf.reduce_grads(by_rank, groups), groups)["w"]
        same_bits(found, mean_of_tree([random(i, 33) for i in range(layout.world_size)]))
        assert tree.flatten(found)[0]


def test_groups_after_a_reset(ranks: Pools) -> None:
    ranks(4).run(after_a_reset, FOUR[4])
