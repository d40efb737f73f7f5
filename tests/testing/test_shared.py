"""An error that all ranks share leaves the next step right, and groups usable before a commit."""

import signal
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from cases import Layout, groups_of

from mics_fn import testing
from tests.stress.fault_ranks import batch_of, digest, trainer_for

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
