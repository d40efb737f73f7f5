"""What a `Trainer` has besides steps, with a model in parts: merges, loaders, signals, guards.

The twins are one process, and most numbers are exact; see `in_parts`.
"""

import math
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import in_parts
import pytest
import torch
import torch.distributed as dist
from cases import same_bits
from in_parts import (
    FULL,
    RATE,
    batch_of,
    by_one_process,
    groups_in_parts,
    loss_in_parts,
    loss_of_one,
    mesh_of,
    params_of,
    trainer_in_parts,
    whole,
)
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import mics_fn as mf
from mics_fn.errors import NonFiniteError
from mics_fn.groups import current

CUT_LEAVES = ("up", "down")


def alone() -> mf.Groups:
    """This process as a job of its own."""
    return mf.make_groups(1, ranks=[dist.get_rank()], whole=True, timeout_s=20)


def everywhere(x: Tensor) -> list[Tensor]:
    """A tensor of all ranks."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return found


def copies_are_equal(trainer: mf.Trainer) -> None:
    """All parts and replicas have the same bits of what is not cut."""
    full = trainer.params()
    mine = torch.cat([x.flatten() for name, x in full.items() if name not in CUT_LEAVES])
    assert all(torch.equal(x, mine) for x in everywhere(mine))


# Merges of replicas. Gradients are so simple that many steps are exact.

PULL_RATE = 0.25


def target(step: int, place: int, full: dict[str, Tensor] = FULL) -> dict[str, Tensor]:
    seed = 1000 + 97 * step + 13 * place
    return {name: 4 * whole(seed + i, *x.shape) for i, (name, x) in enumerate(full.items())}


def half_square(x: Tensor, y: Tensor) -> Tensor:
    """The gradient is x - y."""
    return (x - y).square().sum() / 2


def product(x: Tensor, y: Tensor) -> Tensor:
    """The gradient is y."""
    return (x * y).sum()


def over_parts(groups: mf.Groups, loss: Any, params: Any, batch: Any) -> Tensor:
    """The sum of a loss of each leaf and its target, by all parts together."""
    own = params_of(current(groups), batch)
    each = {name: loss(params[name], x) for name, x in own.items()}
    cut = in_parts._Sum.apply(torch.stack([each[name] for name in CUT_LEAVES]).sum(), groups, False)
    return cut + sum(x for name, x in each.items() if name not in CUT_LEAVES)


def mean_by_hand(grads: Any, groups: mf.Groups) -> Any:
    return mf.sync_replicas(grads, groups)


def on_own_communicator(grads: Any, groups: mf.Groups) -> Any:
    """What is given is equal in all parts, so that copies need no other ranks than cut leaves."""
    comm = groups.communicators["replicas"]
    return mf.shards.map(
        lambda x: mf.collectives.all_gather(comm, x.contiguous()).sum(0) / comm.size, grads
    )


def half_of_it(grads: Any, state: Any, groups: mf.Groups) -> Any:
    return mf.shards.map(lambda x: x / 2, mf.sync_replicas(grads, groups)), state + 1


POLICIES: dict[str, Any] = {
    "local_sgd": lambda: mf.replicas.local_sgd(2),
    "diloco": lambda: mf.replicas.diloco(2, mf.optim.sgd(0.5, momentum=0.5)),
    "reduced_by": lambda: mf.replicas.reduced_by(mean_by_hand),
    "by hand": lambda: mf.replicas.reduced_by(on_own_communicator),
    "with a state": lambda: mf.replicas.reduced_by(half_of_it, init=lambda x: torch.zeros(())),
}


def merged_by_one(policy: str, p: int, r: int, steps: int) -> list[dict[str, Tensor]]:
    """Every replica after some steps, one after the other in one process."""
    models, anchor = [dict(FULL) for _ in range(r)], dict(FULL)
    velocity = {name: torch.zeros_like(x) for name, x in FULL.items()}
    apart, rate = policy in ("local_sgd", "diloco"), PULL_RATE
    rate = rate / 2 if policy == "with a state" else rate
    for step in range(steps):
        for i, model in enumerate(models):
            places = range(i * p, i * p + p) if apart else range(r * p)
            every = [target(step, place) for place in places]
            for name, x in model.items():
                far = torch.stack([x - each[name] for each in every])
                model[name] = x - rate * far.sum(0) / len(every)
        if apart and step % 2 == 1:
            for name, start in anchor.items():
                mean = torch.stack([model[name] for model in models]).sum(0) / r
                if policy == "diloco":
                    velocity[name] = 0.5 * velocity[name] + (start - mean)
                    mean = start - 0.5 * velocity[name]
                anchor[name] = mean
            models = [dict(anchor) for _ in range(r)]
    return models


def merged(policy: str, p: int) -> None:
    with groups_in_parts(p) as groups:
        how: dict[str, Any] = {"replica_sync": POLICIES[policy](), "bucket_bytes": 64}
        how |= {"faults": mf.FaultPolicy(1), "params": params_of(groups)}
        loss = partial(over_parts, groups, half_square)
        trainer = mf.Trainer(loss, mf.optim.sgd(PULL_RATE), groups, **how)
        for step in range(5):
            trainer.step(target(step, groups.position))
            models = merged_by_one(policy, p, groups.num_replicas, step + 1)
            want = models[groups.position // p]
            same_bits(mf.unshard(trainer.state.params, groups.replica), params_of(groups, want))
            if step % 2 == 1:
                copies_are_equal(trainer)


@pytest.mark.parametrize("policy", POLICIES)
def test_merges_are_those_of_one_process(ranks, policy: str) -> None:
    ranks(4).run(merged, policy, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES)
def test_merges_of_eight_ranks_are_those_of_one_process(ranks, policy: str) -> None:
    ranks(8).run(merged, policy, 2)


# Loaders.


def seen_by(groups: mf.Groups, seen: list[int], params: Any, batch: Any) -> Tensor:
    """The loss of some samples, whose numbers are noted."""
    x, y, number = batch
    seen.extend(number.tolist())
    return loss_in_parts(groups, params, (x, y))


def fitted(p: int, folder: str, stages: int) -> None:
    size, per_step = 16, 2
    data = TensorDataset(whole(1, size, 3), whole(2, size, 3), torch.arange(size))
    with groups_in_parts(p, stages=stages) as groups:

        def fit(steps: int, checkpoint: Any = None) -> tuple[mf.Trainer, list[int]]:
            seen: list[int] = []
            loader = DataLoader(data, batch_size=per_step, sampler=mf.sampler(data, groups))
            trainer = mf.Trainer(
                partial(seen_by, groups, seen), mf.optim.adamw(RATE), groups,
                params=params_of(groups), checkpoint=checkpoint, live_bytes="auto",
            )  # fmt: skip
            trainer.fit(loader, steps, progress=False)
            return trainer, seen

        whole_run, every = fit(8)
        saved = mf.Checkpoints(folder, every=1)
        _, first = fit(3, saved)
        gone_on, rest = fit(5, saved)
        assert first + rest == every
        same_bits(gone_on.params(), whole_run.params())
        by_rank = everywhere(torch.tensor(every))
        assert groups.model is not None
        for stage in range(stages):
            dp_ranks = groups.model.dp_ranks[2 * stage : 2 * stage + 2]
            for same in zip(*dp_ranks, strict=True):
                assert all(torch.equal(by_rank[rank], by_rank[same[0]]) for rank in same)
            once = torch.stack([by_rank[rank] for rank in dp_ranks[0]])
            epoch = once[:, : size // len(dp_ranks[0])]
            assert sorted(epoch.flatten().tolist()) == list(range(size))


@pytest.mark.parametrize(("p", "stages"), [(1, 1), (2, 1), (1, 2)])
def test_parts_of_one_place_have_the_same_samples_and_go_on_there(
    ranks, tmp_path: Path, p: int, stages: int
) -> None:
    ranks(4).run(fitted, p, str(tmp_path / "run"), stages)


def caught_and_forgotten() -> None:
    """All ranks raise that there is no checkpoint, so nobody else has to hear of it."""
    with groups_in_parts(1, stages=2) as groups:
        state = trainer_in_parts(groups).state
        with pytest.raises(mf.errors.CheckpointNotFound):
            mf.checkpoint.load("/nowhere", state, groups)
        channel: Any = groups.hierarchy.channel
        channel.raise_reported()


def test_what_all_stages_have_raised_is_not_raised_again(ranks) -> None:
    ranks(4).run(caught_and_forgotten)


def stopped(odd: int) -> tuple[int, bool]:
    """One rank of one part gets a signal in its third step."""
    with groups_in_parts(1) as groups:
        count = [0]

        def loss(params: Any, batch: Any) -> Tensor:
            count[0] += 1
            if count[0] == 3 and dist.get_rank() == odd:
                signal.raise_signal(signal.SIGUSR1)
            time.sleep(0.01)
            return loss_in_parts(groups, params, batch)

        how: Any = {"params": params_of(groups)}
        trainer = mf.Trainer(loss, mf.optim.sgd(0.0), groups, **how)
        batch = [batch_of(groups, 0)]
        with mf.StopRequest(groups, [signal.SIGUSR1]) as stop:
            steps = len(trainer.fit(batch, 2000, progress=False, stop=stop))
        assert stop.stopping
        trainer.fit(batch, 2, progress=False)  # the groups are as good as before
        return steps, trainer.state.step == steps + 2


def test_a_signal_on_one_rank_stops_all_parts_after_one_step(ranks) -> None:
    found = ranks(4).run(stopped, 3)
    assert len({*found}) == 1
    steps, taken = found[0]
    assert 3 <= steps < 1000
    assert taken


# Guards.


class _Spoil(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


Bad = dict[int, dict[str, float]]  # by rank and leaf: what its gradient is multiplied by


def guarded(groups: mf.Groups, bad: Bad, guard: Any, **options: Any) -> tuple[mf.Trainer, Bad]:
    """A trainer, and the table of what spoils its next step."""
    now: Bad = {}

    def loss(params: Any, batch: Any) -> Tensor:
        odd = now.get(dist.get_rank(), {})
        params = {name: _Spoil.apply(x, odd.get(name, 1.0)) for name, x in params.items()}
        return loss_in_parts(groups, params, batch)

    now |= bad
    how: dict[str, Any] = {"params": params_of(groups), "guard": guard, **options}
    return mf.Trainer(loss, mf.optim.sgd(RATE), groups, **how), now


NAN, INF = math.nan, math.inf
BAD: dict[str, tuple[Bad, str]] = {
    "cut": ({3: {"up": NAN}}, "grads.up is NaN on rank 3"),
    "a copy": ({1: {"bias": INF}}, "grads.bias is infinite on rank 1"),
    # Each part finds another one first.
    "two": ({0: {"up": NAN}, 3: {"down": NAN}}, "grads.down is NaN on rank 3"),
    "the other two": ({2: {"down": NAN}, 1: {"up": NAN}}, "grads.down is NaN on rank 2"),
}


def refused(p: int, stages: int, bad: Bad, says: str, mode: str) -> None:
    guard = mf.optim.Guard(on_nonfinite=mode or None)  # pyright: ignore[reportArgumentType]
    with groups_in_parts(p, stages=stages) as groups:
        trainer, now = guarded(groups, {}, guard)
        for step in range(3):
            if step == 1:
                now |= bad
                before = trainer.params()
                if mode == "raise":
                    with pytest.raises(NonFiniteError, match=says) as caught:
                        trainer.step(batch_of(groups, step))
                    assert caught.value.ranks == tuple(
                        rank for rank in bad if f"rank {rank}" in says
                    )
                else:
                    metrics = trainer.step(batch_of(groups, step))
                    # One that refuses by default looks for ranks from the first time on.
                    told = says if mode else says.partition(" is ")[0]
                    assert not metrics.accepted
                    assert str(metrics.nonfinite).startswith(told)
                same_bits(trainer.params(), before)
                now.clear()
            metrics = trainer.step(batch_of(groups, step))
            assert metrics.accepted
        same_bits(trainer.params(), params_of(groups, by_one_process(3, groups.world_size)))


@pytest.mark.parametrize("mode", ["", "skip", "raise"])
@pytest.mark.parametrize("name", BAD)
@pytest.mark.short("cut-raise", "a copy-", "two-skip", "the other two-skip")
def test_what_is_not_finite_in_one_part_is_named_on_all_ranks(ranks, name: str, mode: str) -> None:
    for p in (1, 2):
        ranks(4).run(refused, p, 1, *BAD[name], mode)


def test_what_is_not_finite_in_one_stage_is_named_on_all_ranks(ranks) -> None:
    bad: Bad = {2: {"scale": NAN}}
    ranks(4).run(refused, 1, 2, bad, "grads.scale is NaN on rank 2", "raise")


def other_trees() -> list[str | None]:
    """Stages have a leaf of one name at other places; one of them has others before it."""
    mesh = mesh_of(1, 2)  # with one part
    with mf.make_groups(1, mesh=mesh, model="tp", stages="pp", timeout_s=20) as groups:
        assert groups.model is not None
        last, found = groups.model.stages.rank == 1, list[str | None]()
        guard = mf.optim.Guard(on_nonfinite="skip")
        for rank in (0, 3):
            tree = {"norm": torch.ones(3)}
            if last:
                tree = {"a": torch.ones(2), "b": torch.ones(2), **tree}
            if dist.get_rank() == rank:
                tree["norm"] = tree["norm"] * NAN
            found.append(guard.judge(mf.reduce_grads(tree, groups), groups).nonfinite)
        return found


def test_stages_that_have_a_name_at_other_places_name_it(ranks) -> None:
    want = [f"grads.norm is NaN on rank {rank}" for rank in (0, 3)]
    assert ranks(4).run(other_trees) == [want] * 4


def decided(p: int, stages: int, guard: Any, factor: float, steps: int) -> None:
    """As one process that has all; gradients of rank 3 are multiplied in step 2."""
    with groups_in_parts(p, stages=stages) as groups, alone() as one:
        trainer, now = guarded(groups, {}, guard())
        places = range(groups.world_size)
        spoiled: list[float] = [1.0]

        def loss(params: Any, batches: Any) -> Tensor:
            params = {name: _Spoil.apply(x, spoiled[0]) for name, x in params.items()}
            losses = [loss_of_one(params, batch) for batch in batches]
            return torch.stack(losses).mean()

        twin = mf.Trainer(loss, mf.optim.sgd(RATE), one, params=FULL, guard=guard())
        for step in range(steps):
            ranks = range(dist.get_world_size()) if factor < INF else [3]
            now |= {rank: dict.fromkeys(FULL, factor) for rank in ranks if step == 2}
            spoiled[0] = factor if step == 2 else 1.0
            got = trainer.step(batch_of(groups, step))
            want = twin.step([batch_of(groups, step, place) for place in places])
            assert (got.accepted, got.spike, got.scale) == (want.accepted, want.spike, want.scale)
            assert got.accepted == (step != 2)
            now.clear()
            full = twin.params()
            for name, x in trainer.params().items():
                torch.testing.assert_close(x, params_of(groups, full)[name], rtol=1e-12, atol=1e-12)
        copies_are_equal(trainer)


def spiking() -> Any:
    return mf.optim.Guard(spike=mf.optim.norm_spike(10.0, warmup=2))


def scaled() -> Any:
    return mf.optim.Guard(mf.optim.dynamic_scale(8.0, interval=2))


@pytest.mark.parametrize(
    ("kind", "p", "stages"),
    [("spike", 1, 1), ("spike", 2, 1), ("spike", 1, 2), *(("scale", p, 2 // p) for p in (1, 2))],
)
@pytest.mark.short("spike-1-1", "scale-2-1")
def test_guards_decide_as_those_of_one_process(ranks, kind: str, p: int, stages: int) -> None:
    guard, factor = {"spike": (spiking, 2.0**20), "scale": (scaled, INF)}[kind]
    ranks(4).run(decided, p, stages, guard, factor, 4)


def experts(mode: str, odd: int, leaf: str) -> None:
    """Dense leaves on groups of all ranks, and one expert on each part."""
    world, rank = dist.get_world_size(), dist.get_rank()
    how: dict[str, Any] = {"model": "tp", "stages": "pp", "cut": "*: 0", "mean_over": world}
    how |= {"mesh": mesh_of(2), "timeout_s": 20}
    dense = mf.make_groups(2, timeout_s=20)
    of_experts = mf.make_groups(2, **how)
    now: list[float] = [1.0]

    def loss(params: Any, x: Tensor) -> Tensor:
        spoiled = {k: _Spoil.apply(v, now[0] if k == leaf else 1.0) for k, v in params.items()}
        return ((x @ spoiled["dense"]) * spoiled["expert"][0]).sum()

    with dense, of_experts:
        groups = lambda path: of_experts if path == "expert" else dense  # noqa: E731
        params = {"dense": whole(1, 3, 3), "expert": whole(rank % 2, 1, 3)}
        guard = mf.optim.Guard(on_nonfinite=mode or None)  # pyright: ignore[reportArgumentType]
        trainer = mf.Trainer(loss, mf.optim.sgd(RATE), groups, params=params, guard=guard)
        says = f"grads.{leaf} is NaN on rank {odd}"
        for step in range(3):
            x, before = whole(10 * step + rank, 4, 3), trainer.params()
            now[0] = NAN if step == 1 and rank == odd else 1.0
            if step == 1 and mode == "raise":
                with pytest.raises(NonFiniteError, match=says):
                    trainer.step(x)
            else:
                metrics = trainer.step(x)
                assert metrics.accepted == (step != 1)
                assert step != 1 or f"{metrics.nonfinite}".startswith(f"grads.{leaf} is")
            moved = [not torch.equal(x, before[name]) for name, x in trainer.params().items()]
            assert any(moved) == (step != 1)


@pytest.mark.parametrize("leaf", ["dense", "expert"])
@pytest.mark.parametrize("mode", ["", "raise"])
@pytest.mark.short("-expert", "raise-dense")
def test_what_is_not_finite_beside_experts_is_named_on_all_ranks(ranks, mode: str, leaf: str):
    ranks(4).run(experts, mode, 2, leaf)


# Sizes of buckets, places, and precisions.

EXACT: dict[str, dict[str, Any]] = {
    "one leaf a bucket": {"bucket_bytes": 1},
    "one bucket": {"bucket_bytes": 2**20},
    "on a disk": {"where": "states=disk:FOLDER", "bucket_bytes": 100},
}
LARGE = {k: whole(i, 64 * len(x), 64).float() for i, (k, x) in enumerate(FULL.items())}


def as_one(p: int, options: dict[str, Any]) -> None:
    with groups_in_parts(p) as groups:
        trainer = trainer_in_parts(groups, **options)
        adams = [
            trainer_in_parts(groups, optimizer=mf.optim.adamw(0.1), **x) for x in (options, {})
        ]
        for step in range(3):
            for each in (trainer, *adams):
                each.step(batch_of(groups, step))
        same_bits(trainer.params(), params_of(groups, by_one_process(3, groups.world_size)))
        same_bits(adams[0].params(), adams[1].params())


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.short("one leaf a bucket-1", "on a disk-2")
def test_no_place_and_no_size_of_buckets_changes_a_number(
    ranks, tmp_path: Path, name: str, p: int
) -> None:
    folder = str(tmp_path)
    options = {
        k: x.replace("FOLDER", folder) if k == "where" else x for k, x in EXACT[name].items()
    }
    ranks(4).run(as_one, p, options)


def of_one_part(params: Any, targets: Any) -> Tensor:
    """The loss of one process that has the samples of all places, and one part of the model."""
    every = [product(params[name], x) for each in targets for name, x in each.items()]
    return torch.stack(every).sum() / len(targets)


def coded(p: int, precision: str, exact: bool) -> None:
    """Codes of a part are those of one process that has this part, as each leaf has a bucket."""
    with groups_in_parts(p) as groups, alone() as one:
        start, optimizer = params_of(groups, LARGE), mf.optim.adamw(2.0**-3)
        how: dict[str, Any] = {"bucket_bytes": 1, "params": start}
        loss = partial(over_parts, groups, product)
        own = {"precision": precision, "faults": mf.FaultPolicy(1)}
        trainer = mf.Trainer(loss, optimizer, groups, **how, **own)
        uncoded = mf.Trainer(of_one_part, optimizer, one, **how)
        twin = mf.Trainer(of_one_part, optimizer, one, **how, precision=precision)
        for step in range(3):
            trainer.step(target(step, groups.position, LARGE))
            every = [target(step, place, LARGE) for place in range(groups.world_size)]
            for each in (twin, uncoded):
                each.step([params_of(groups, x) for x in every])
        copies_are_equal(trainer)
        assert groups.model is not None
        after, want = trainer.params(), uncoded.params()
        for x in map(everywhere, after.values()):
            for universe in groups.model.dp_ranks:
                assert all(torch.equal(x[rank], x[universe[0]]) for rank in universe)
        if exact:
            same_bits(after, twin.params())
        for name, x in after.items():
            assert (x - want[name]).norm() < 0.2 * (want[name] - start[name]).norm(), name
            sent = "state" in precision or name not in CUT_LEAVES or groups.num_replicas > 1
            assert torch.equal(x, want[name]) != sent, f"whether {name} has codes: {sent}"


CODES = [("state=int8[256]", True), ("hop2=int8[64]", False)]
CODES += [("state=int8[256], hop2=int8[64]", False)]


@pytest.mark.parametrize(("precision", "exact"), CODES)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.short("1-state=int8[256]-True", "2-hop2=int8[64]-False")
def test_codes_are_equal_on_all_ranks_and_near_to_what_they_stand_for(
    ranks, p: int, precision: str, exact: bool
) -> None:
    ranks(4).run(coded, p, precision, exact)


# What a step shows of itself.


def watched(p: int) -> None:
    with groups_in_parts(p) as groups:
        trainer = trainer_in_parts(groups, optimizer=mf.optim.adamw(RATE))
        trainer.step(batch_of(groups, 0))
        groups.traffic.clear()
        with mf.inspection.watch():
            trainer.step(batch_of(groups, 1))
        timeline = trainer.last_step.timeline()
        assert timeline.sent_bytes() == dict(groups.traffic.sent_bytes)
        levels = {event.level for event in timeline.events if event.kind == "hop2"}
        assert levels == ({"copies", "replicas"} if groups.num_replicas > 1 else {"copies"})
        assert "copies" in str(timeline)
        rows = mf.inspection.summary(trainer.state, groups)
        own = params_of(groups)
        moments = 2 * sum(x.nbytes for x in own.values())
        assert rows.full_bytes >= moments + sum(x.nbytes for x in own.values())
        assert "up" in str(rows)
        params = trainer.state.params
        for name, x in trainer.params().items():
            assert torch.equal(mf.inspection.get(params, name, groups), x)
            if name in CUT_LEAVES:
                with pytest.raises(mf.errors.LeafError, match=f"{name} is cut over the parts"):
                    mf.inspection.set(params, name, x, groups)
                continue
            new = mf.inspection.set(params, name, x + 1, groups)
            same_bits(mf.unshard(new, groups)[name], x + 1)
            with pytest.raises(mf.errors.DesyncError, match=name):
                mf.inspection.set(params, name, x + dist.get_rank() % 2, groups)


@pytest.mark.parametrize("p", [1, 2])
def test_a_step_shows_its_hops_of_copies(ranks, p: int) -> None:
    ranks(4).run(watched, p)
