"""Models in parts: what is one step, what is drift, and what goes on after a fault."""

import copy
import time
from typing import Any

import in_parts
import pytest
import torch
import torch.distributed as dist
from cases import same_bits
from in_parts import RATE, batch_of, by_one_process, groups_in_parts, params_of, trainer_in_parts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import DesyncError, LostStateError, MicsError, PeerFailed
from mics_fn.faults import same_replicas

OPTIONS: dict[str, Any] = {
    "plain": {},
    "budget 0": {"live_bytes": 0},
    "deterministic": {"deterministic": True},
    "two micro-steps": {"accumulate": 2},
    "overlap": {"overlap_step": True, "guard": mf.optim.Guard(on_nonfinite="ignore")},
    "recoverable": {"faults": mf.FaultPolicy(1, recoverable=True)},
    "on the host": {"where": "states=host"},
    "buckets": {"bucket_bytes": 64, "guard": mf.optim.Guard(max_norm=1e9)},
}


def as_one_process(p: int, scheme: str, options: dict[str, Any], stages: int = 1) -> None:
    with groups_in_parts(p, stages=stages) as groups:
        placed = mf.placement.place(groups, scheme) if scheme else groups
        trainer = trainer_in_parts(placed, **options)
        for step in range(3):
            trainer.step(batch_of(groups, step))
        want = by_one_process(3, groups.world_size)
        same_bits(trainer.params(), params_of(groups, want))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("p", [1, 2])
def test_three_steps_are_those_of_one_process(ranks, p: int, name: str) -> None:
    ranks(4).run(as_one_process, p, "", OPTIONS[name])


@pytest.mark.parametrize("scheme", ["zero1", "zero2", "hpz"])
def test_three_steps_of_a_placement_are_those_of_one_process(ranks, scheme: str) -> None:
    ranks(4).run(as_one_process, 2, scheme, {})


# After a fault.


def broken(trainer: mf.Trainer, k: int, odd: int) -> None:
    """A step in which one rank raises while its other part waits for it."""
    own, seen = in_parts.summed, [0]

    def fail(x: Any, groups: Any) -> Any:
        seen[0] += 1
        if seen[0] == 2 and dist.get_rank() == odd:
            raise ValueError("of one rank alone")
        return own(x, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_parts, "summed", fail)
        step([trainer], k)


def twins(p: int, stages: int = 1, **options: Any) -> list[mf.Trainer]:
    """Two trainers that are alike, each on groups of its own."""
    optimizer = mf.optim.adamw(RATE)
    each = [groups_in_parts(p, stages=stages) for _ in range(2)]
    return [trainer_in_parts(groups, optimizer=optimizer, **options) for groups in each]


def step(trainers: list[mf.Trainer], *ks: int) -> None:
    for k in ks:
        for each in trainers:
            each.step(batch_of(each.options.home, k))


def same(one: mf.Trainer, other: mf.Trainer) -> None:
    mine, wanted = (
        [x for x in tree.flatten(each.state)[0] if isinstance(x, torch.Tensor)]
        for each in (one, other)
    )
    same_bits(mine, wanted)
    assert one.state.step == other.state.step


def go_on(p: int, odd: int, stages: int) -> str:
    """One rank raises in a step; all reset, and a twin without the fault has the same bits."""
    both = trainer, twin = twins(p, stages)
    step(both, 0)
    before = trainer.groups
    with pytest.raises((ValueError, MicsError)) as caught:
        broken(trainer, 1, odd)
    text = f"{caught.value}"
    del caught
    trainer.reset()
    assert trainer.groups is not before
    assert trainer.groups.model.parts.size == 2
    step([trainer], 1)
    step([twin], 1)
    same(trainer, twin)
    step(both, 2)
    same(trainer, twin)
    for each in both:
        each.groups.close()
    return text


@pytest.mark.parametrize(("p", "odd", "stages"), [(2, 1, 1), (1, 2, 1), (1, 3, 2)])
def test_the_next_step_is_right(ranks, p: int, odd: int, stages: int) -> None:
    for text in ranks(4).run(go_on, p, odd, stages):
        assert "of one rank alone" in text


def behind(p: int, late: tuple[int, ...], stages: int = 1) -> str:
    """Some ranks have lost their last step; all reset, and go on or are told."""
    both = trainer, twin = twins(p, stages, faults=mf.FaultPolicy(1))
    step(both, 0, 1)
    before = copy.deepcopy((trainer.state, trainer.sync_state)), trainer.guard
    step(both, 2)
    if dist.get_rank() in late:
        (trainer.state, trainer.sync_state), trainer.guard = before
    try:
        trainer.reset()
    except LostStateError as error:
        with pytest.raises(LostStateError):  # and no step mixes them
            step([trainer], 3)
        return str(error)
    step(both, 3)
    same(trainer, twin)
    for each in both:
        each.groups.close()
    return "healed"


@pytest.mark.parametrize(
    ("n", "p", "stages", "late", "end"),
    [
        (4, 1, 1, (0, 3), "healed"),  # each part has another replica
        (4, 1, 1, (1, 3), "at different steps"),  # both replicas of part 1
        (4, 2, 1, (1,), "at different steps"),  # copies are elsewhere, what is cut is not
        (4, 1, 2, (1,), "at different steps"),  # of one stage alone, whose part has no replica
        pytest.param(8, 2, 1, (1, 2), "healed", marks=pytest.mark.thorough),
        pytest.param(8, 1, 2, (1, 4), "healed", marks=pytest.mark.thorough),
        pytest.param(8, 2, 2, (1,), "at different steps", marks=pytest.mark.thorough),
    ],
)
def test_a_part_is_taken_from_its_replica_or_all_are_told(
    ranks, n: int, p: int, stages: int, late: tuple[int, ...], end: str
) -> None:
    texts = ranks(n).run(behind, p, late, stages)
    assert all(end in text for text in texts)
    assert len({*texts}) == 1


class Breaks(nn.Module):
    """A layer that raises on one rank, while its other part waits for it in torch."""

    on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.on:
            raise ValueError("of one rank alone")
        return x


def on_the_groups_of_a_mesh(p: int, odd: int, times: int) -> None:
    """DTensors send over groups that torch made, which a reset makes anew."""
    both: list[mf.Trainer] = []
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), Breaks(), nn.Linear(8, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        groups = mf.make_groups(p, mesh=mesh, model="tp", timeout_s=20)
        how: Any = {"loss": lambda model, x: model(x).square().mean()}
        both.append(mf.Trainer(model, mf.optim.adamw(1e-2), groups, **how))
    trainer, twin = both

    def step(k: int, *trainers: mf.Trainer) -> None:
        seed = 10 * k + twin.groups.position
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        for each in trainers:
            each.step(x)

    for k in range(0, 3 * times, 3):
        step(k, *both)
        began, Breaks.on = time.monotonic(), dist.get_rank() == odd
        with pytest.raises((ValueError, PeerFailed), match="of one rank alone"):
            step(k + 1, trainer)
        assert time.monotonic() - began < 5, "at once, and not at a limit"
        Breaks.on = False
        trainer.reset()
        step(k + 1, *both)
        step(k + 2, *both)
        same(trainer, twin)
    for each in both:
        each.groups.close()


@pytest.mark.parametrize(("p", "odd", "times"), [(2, 3, 1), (1, 0, 2)])
def test_a_reset_makes_groups_of_a_mesh_anew(ranks, p: int, odd: int, times: int) -> None:
    ranks(4).run(on_the_groups_of_a_mesh, p, odd, times)


# Batches.


def batches() -> list[int]:
    with groups_in_parts(1) as groups:
        trainer = trainer_in_parts(groups)
        which = groups.position if dist.get_rank() != 3 else 7
        with pytest.raises(DesyncError, match="give all parts the same batch"):
            trainer.step(batch_of(groups, 0, which))
        sampler = mf.sampler(range(8), groups)
        return [sampler.num_replicas, sampler.rank, groups.position]


def test_parts_that_have_other_batches_are_told(ranks) -> None:
    for replicas, rank, position in ranks(4).run(batches):
        assert (replicas, rank) == (2, position)


# Drift, and options.


def drifted(p: int, stages: int, name: str, odd: int) -> str:
    """One rank has other bits in a leaf, which the next step finds on all ranks."""
    groups = groups_in_parts(p, stages=stages)
    trainer = trainer_in_parts(groups, optimizer=mf.optim.adamw(RATE), faults=mf.FaultPolicy(1))
    step([trainer], 0)
    step([trainer], 1)
    leaf = trainer.state.params[name]
    if dist.get_rank() == odd:
        leaf.data.add_(2.0**-8)
    with pytest.raises(MicsError) as caught:
        step([trainer], 2)
    groups.close()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("p", "stages", "name", "odd"),
    [
        (2, 1, "bias", 0),  # a chunk of a copy, whose only replicas are in the other part
        (1, 1, "scale", 2),
        (1, 1, "up", 1),
        (1, 2, "bias", 3),
    ],
)
def test_drift_in_one_part_is_an_error_on_all_ranks(
    ranks, p: int, stages: int, name: str, odd: int
) -> None:
    found = ranks(4).run(drifted, p, stages, name, odd)
    for text in found:
        assert "DesyncError" in text, text
        assert f"state.params.{name}" in text, text
        assert f"rank {odd}" in text, text


def no_drift() -> None:
    """What belongs to no leaf, such as a buffer, may differ between parts."""
    with groups_in_parts(1) as groups:
        trainer = trainer_in_parts(groups)
        state = trainer.state
        state.buffers["own"] = torch.tensor(float(dist.get_rank() % 2))  # its part
        same_replicas(state, groups)
        state.buffers["own"] = torch.tensor(float(groups.position))
        with pytest.raises(DesyncError, match="state.buffers.own"):
            same_replicas(state, groups)


def test_a_buffer_may_differ_between_parts_and_not_between_replicas(ranks) -> None:
    ranks(4).run(no_drift)


def other_options(what: str) -> str:
    odd = dist.get_rank() == 3
    how: dict[str, Any] = {}
    if what == "lr" and odd:
        how = {"optimizer": mf.optim.sgd(0.5)}
    if what == "guard" and odd:
        how = {"guard": mf.optim.Guard(max_norm=0.5)}
    groups = None
    try:
        given: dict[str, Any] = {}
        if what == "cut" and odd:
            given = {"cut": "up: 0"}
        if what == "model" and odd:
            given = {"model": "dp"}
        if what == "mesh" and odd:
            given = {"mesh": in_parts.mesh_of(4)}
        groups = groups_in_parts(1, **given)
        if what == "cut function":
            groups.close()
            rule = lambda path: 0 if path == "up" and not odd else None  # noqa: E731
            groups = groups_in_parts(1, cut=rule)
        trainer_in_parts(groups, **how)
    except MicsError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if groups is not None:
            groups.close()
    return "none"


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("lr", "lr"),
        ("guard", "max_norm"),
        ("cut", "cut"),
        ("model", "model"),
        ("mesh", "dp_ranks"),
        ("cut function", "up"),
    ],
)
def test_other_options_in_one_part_are_an_error_on_all_ranks(ranks, what: str, named: str) -> None:
    for text in ranks(4).run(other_options, what):
        assert text.startswith("DesyncError"), text
        assert named in text, text
        assert "rank 3" in text, text
