"""Each fault does what its name says, at the point that was asked for, once, on that rank alone."""

import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, forget_groups, groups_of

import mics_fn as mf
from mics_fn import spans, testing
from mics_fn.errors import DesyncError
from mics_fn.train import StepMetrics
from tests.stress.fault_trials import batch_of, digest, trainer_for

LIMIT_S = 30.0


def made(groups: mf.Groups) -> mf.Trainer:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    guard = mf.optim.Guard(on_nonfinite="skip")
    return mf.Trainer(model, mf.optim.adamw(1e-2), groups, loss=loss, bucket_bytes=64, guard=guard)


def fit(trainer: mf.Trainer, steps: int = 3) -> list[StepMetrics]:
    return [trainer.step(torch.ones(2, 4)) for _ in range(steps)]


def trained(**where: Any) -> tuple[mf.Trainer, str | None]:
    """Three steps of a world of one with a fault in it."""
    trainer = made(mf.make_groups(1))
    with testing.inject(rank=0, **where) as injection:
        fit(trainer)
    return trainer, injection.at


def test_a_fault_that_does_not_happen_gives_a_warning():
    with pytest.warns(
        UserWarning, match=r"'nan' did not happen on rank 0\n  no point of step 2 had"
    ):
        _, at = trained(step=2, operation="no such thing", fault="nan")
    assert at is None
    with pytest.warns(UserWarning, match="no point of step 9 had 'step' in its name"):
        trained(step=9, operation="step", fault="raise")


@pytest.mark.parametrize("operation", ["step", "fetch of bucket 1", "commit"])
def test_an_error_comes_at_its_point_and_leaves_the_steps_before(operation: str):
    trainer = made(mf.make_groups(1))
    with (
        testing.inject(0, 2, operation, "raise") as injection,
        pytest.raises(testing.InjectedError, match=f"step 2, at .*{operation}"),
    ):
        fit(trainer)
    assert operation in (injection.at or "")
    assert trainer.state.step == 1
    assert spans.observers == []


@pytest.mark.parametrize(
    ("operation", "fault", "error"),
    [
        ("fetch", "interrupt", KeyboardInterrupt),
        ("fetch", "oom", RuntimeError),
        ("step", "nan", IndexError),  # where there is no tensor
        ("fetch", "wrong_call", IndexError),  # nobody to disagree with
        ("fetch", "nope", KeyError),
    ],
)
def test_an_error_of_its_own(operation: str, fault: str, error: type):
    with pytest.raises(error):
        trained(step=1, operation=operation, fault=fault)


def test_a_bit_or_an_element_changes_as_the_seed_says():
    def changed(fault: str, seed: int) -> list[tuple[int, ...]]:
        seen: list[list[torch.Tensor]] = []

        def see(point: spans.Point) -> None:
            if (point.step, point.name) == (2, "opt_step"):
                seen.append([x.clone().view(torch.int32) for x in point.tensors])

        spans.observers.append(see)
        try:
            with testing.inject(0, 2, "opt_step", fault, seed):
                spans.observers.append(see)
                fit(made(mf.make_groups(1)))
        finally:
            del spans.observers[:]
        return [
            (leaf, int(i), bin(int((a ^ b).view(-1)[i]) & 0xFFFFFFFF).count("1"))
            for leaf, (a, b) in enumerate(zip(*seen, strict=True))
            for i in (a ^ b).view(-1).nonzero().view(-1)
        ]

    flips = [changed("flip", seed) for seed in (1, 1, 2)]
    assert [len(flip) for flip in flips] == [1, 1, 1]
    assert flips[0] == flips[1] != flips[2]
    assert all(flip[0][2] == 1 for flip in flips)
    assert len(changed("nan", 1)) == 1


def test_a_full_disk_until_the_block_ends(tmp_path: Path):
    trainer = made(mf.make_groups(1))
    with testing.inject(0, 1, "step", "disk_full") as injection:
        (tmp_path / "before").write_text("fits")
        fit(trainer)
        with pytest.raises(OSError, match="File too large|No space left"):
            (tmp_path / "meanwhile").write_text("does not fit")
    (tmp_path / "after").write_text("fits again")
    assert injection.at == "step"


def with_faults_on_rank_one() -> dict[str, Any]:
    """What the ranks of two see of faults that one of them has."""
    found: dict[str, Any] = {}
    trainer = made(groups_of(layout := Layout((2,), 2)))
    with testing.inject(1, 2, "reduction", "nan") as injection:
        found["accepted"] = [each.accepted for each in fit(trainer)]
    found["at"] = injection.at
    step = trainer.state.step
    with testing.inject(None, step + 2, "step", "raise"), pytest.raises(testing.InjectedError):
        fit(trainer)
    found["both"] = trainer.state.step - step
    dist.barrier()
    wrong = testing.inject(1, trainer.state.step + 1, "fetch", "wrong_call")
    with wrong, pytest.raises(DesyncError, match="injected wrong call"):
        fit(trainer)
    dist.barrier()
    forget_groups(layout)
    return found


def test_what_other_ranks_see(ranks: Callable):
    found = ranks(2).run(with_faults_on_rank_one)
    assert [one["at"] is None for one in found] == [True, False]
    for one in found:
        assert (one["accepted"], one["both"]) == ([True, False, True], 1)


def test_a_function_as_a_fault():
    seen: list[spans.Point] = []
    with testing.inject(0, 3, "commit", seen.append) as injection:
        fit(made(mf.make_groups(1)), 4)
    assert [point.step for point in seen] == [3]
    assert (injection.at, injection.fault) == ("commit", "append")


# An error that all ranks share leaves the next step right, and groups usable before a commit.

STEPS, AT = 3, 2
LAYOUTS = [Layout((2, 2), 1), Layout((2, 2), 2), Layout((2, 2), 4)]


def again_after(
    layout: Layout, operation: str | None, fault: str
) -> tuple[list[str], str | None, int]:
    """States after each step, where one step fails on all ranks and is taken again.

    Without an operation none fails.
    """
    groups = groups_of(layout)
    trainer, rank, found, errors = trainer_for(groups), groups.rank, [], 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        block = testing.inject(None, AT, operation, fault) if operation else nullcontext()
        with block as injection:
            while trainer.state.step < STEPS:
                try:
                    trainer.step(batch_of(rank, trainer.state.step + 1))
                except (testing.InjectedError, KeyboardInterrupt):
                    errors += 1
                    if operation in ("opt_step", "commit"):  # ranks may be at other steps
                        trainer.reset()
                found.append(digest(trainer))
    finally:
        signal.signal(signal.SIGINT, before)
    return found, injection and injection.at, errors


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("operation", ["step", "fetch", "reduction", "opt_step", "commit"])
@pytest.mark.parametrize("fault", ["raise", "interrupt"])
@pytest.mark.short("raise-fetch-2x2-p4", "interrupt-reduction-2x2-p2", "raise-opt_step-2x2-p1")
def test_the_next_step_is_right(layout: Layout, operation: str, fault: str, ranks: Callable):
    plain = ranks(4).run(again_after, layout, None, fault)
    for (states, at, errors), (wanted, nowhere, none) in zip(
        ranks(4).run(again_after, layout, operation, fault), plain, strict=True
    ):
        assert operation in (at or "")
        assert (nowhere, errors, none) == (None, 1, 0)
        assert list(dict.fromkeys(states)) == list(dict.fromkeys([*states[:1], *wanted]))
        assert len(set(wanted)) == STEPS, "states differ from step to step"
