"""`inject`: a fault on one rank, at one step, in one operation."""

import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

from mics_fn import checks, points
from mics_fn.errors import PlanError, message
from mics_fn.groups import read_launch
from mics_fn.points import Point
from mics_fn.testing.faults import FAULTS, Moment


class Injection:
    """A fault that waits for its moment.

    Args:
      rank, step, operation, seed, seconds: as for `inject`.
      fault: its name.
      happen: makes it.
    """

    def __init__(
        self,
        rank: int | None,
        step: int,
        operation: str,
        fault: str,
        happen: Callable[[Moment], None],
        *,
        seed: int,
        seconds: float,
    ) -> None:
        self.rank, self.step, self.operation, self.fault = rank, step, operation, fault
        self.at: str | None = None  # the point at which it happened
        self._happen, self._draw, self._seconds = happen, random.Random(seed), seconds
        self._end = ExitStack()
        self._now = 0  # the step under way
        self._told = False  # whether steps say when they begin

    def __call__(self, point: Point) -> None:
        """Make the fault if this is its moment, once."""
        self._follow(point)
        due = self.at is None and self._now == self.step and self.operation in point.name
        if due and self.rank in (None, own_rank()):
            self.at = point.name
            where = f"{self.fault} on rank {own_rank()}, step {self._now}, at {point.name}"
            self._happen(Moment(point, where, self._draw, self._seconds, self._end))
        if point.name == "opt_step" and not self._told:
            self._now += 1  # what follows belongs to the next step of a loop written by hand

    def _follow(self, point: Point) -> None:
        """Learn which step is under way."""
        if point.step is not None:
            self._now = point.step
            self._told = self._told or point.name == "step"

    def warn_if_missed(self) -> None:
        """Warn that the fault did not happen on this rank, if it should have."""
        if self.at is None and self.rank in (None, own_rank()):
            text = f"inject: {self.fault!r} did not happen on rank {own_rank()}"
            lines = [f"no point of step {self.step} had {self.operation!r} in its name"]
            fix = "pass a step that the block takes, and a part of the name of a point in it"
            warnings.warn(message(text, lines, fix), stacklevel=4)

    def close(self) -> None:
        """End what lasts as long as the block."""
        self._end.close()


@contextmanager
def inject(
    rank: int | None,
    step: int,
    operation: str,
    fault: str | Callable[[Point], None],
    seed: int = 0,
    *,
    seconds: float = 1.0,
) -> Iterator[Injection]:
    """A block in which one fault happens, once, on one rank. Several of them can be nested.

    Args:
      rank: the global rank; None for every rank.
      step: the step in which it happens, as `StepMetrics` counts: 1 is the first one, and 0 is all
        that comes before it, in a loop without `Trainer` all before the first `opt_step`. There a
        step ends with its `opt_step`.
      operation: a part of the name of the point at which it happens, the first of that step that
        has it: "start" (`init_distributed`, `make_groups`), "build" (`shard`, `Trainer`), "step",
        "opt_step", "commit" (the state is about to be written), "save: write", "save: commit" (on
        the first rank), "load", or some of the text of a collective, such as "fetch of bucket 0" or
        "reduction", or of one of its levels, such as "all-reduce" or "over 'replicas'", which is
        hop 2; see [Note: points] in `points`.
      fault: "raise" (an `InjectedError`), "exit", "interrupt" (Ctrl-C), "kill", "stop" (SIGSTOP),
        "abort" and "segfault" end, stop or leave this rank. "gil" (held by a call of C) and "slow"
        delay it. "oom" asks for 2**60 bytes. "nan" and "flip" change an element, or one bit of it,
        in what the operation sends or writes. "wrong_call" makes a collective that other ranks do
        not make; "torn" raises at "commit", while others write the step. Until the block ends,
        "disk_full" lets no file grow, and "link_down" takes down the link that MICS_FN_LINK_DOWN
        names, in a network namespace made for that. "store_killed" and "store_stopped" send SIGKILL
        or SIGSTOP to what hosts the store. Or a function of the `Point`.
      seed: chooses the tensor, the element and the bit.
      seconds: how long "gil" and "slow" last.

    Returns:
      An `Injection`, whose `at` is the name of the point once it has happened. A block that ends
      without an error before it has happened gives a warning on the ranks where it was to happen.

    Raises:
      PlanError: there is no such fault, or it cannot be where it is wanted, or an argument is not
        what it should be.

    Example:
      >>> groups = make_groups(1)
      >>> loss = lambda model, x: model(x).square().mean()
      >>> trainer = Trainer(torch.nn.Linear(2, 1), optim.sgd(0.1), groups, loss=loss)
      >>> with testing.inject(rank=0, step=2, operation="opt_step", fault="raise"):
      ...     trainer.fit([torch.ones(4, 2)], steps=3, progress=False)
      Traceback (most recent call last):
      mics_fn.testing.faults.InjectedError: injected raise on rank 0, step 2, at opt_step
      >>> trainer.state.step
      1
    """
    checks.integer("inject", "rank", rank, 0, optional=True, fix="None means every rank")
    size = _world_size()
    if rank is not None and rank >= size:
        text = f"inject: rank={rank} in a world of {size}"
        raise PlanError(message(text, fix=f"pass one of 0 to {size - 1}, or None for every rank"))
    checks.integer("inject", "step", step, 0, fix="1 is the first one")
    if not isinstance(operation, str) or not operation:
        fix = "pass a part of the name of a point, such as 'step' or 'hop 1'"
        checks.refuse("inject", "operation", operation, "a text that is not empty", fix)
    checks.integer("inject", "seed", seed, 0)
    checks.number("inject", "seconds", seconds, least=0)
    name, happen = _named(fault, operation)
    injection = Injection(rank, step, operation, name, happen, seed=seed, seconds=seconds)
    points.observers.append(injection)
    try:
        yield injection
        injection.warn_if_missed()
    finally:
        points.observers.remove(injection)
        injection.close()


def _named(
    fault: str | Callable[[Point], None], operation: str
) -> tuple[str, Callable[[Moment], None]]:
    """The name of a fault, and what makes it."""
    if callable(fault):
        return getattr(fault, "__name__", "function"), lambda moment: fault(moment.point)
    if not isinstance(fault, str) or fault not in FAULTS:
        raise PlanError(message(f"inject: fault={fault!r}", fix=f"pass one of {', '.join(FAULTS)}"))
    if fault == "torn" and operation != "commit":
        text = f"inject: fault='torn' at operation={operation!r}"
        raise PlanError(message(text, fix="pass operation='commit'"))
    return fault, FAULTS[fault]


def _world_size() -> int:
    """The number of ranks, also before torch.distributed has started."""
    if dist.is_initialized():
        return dist.get_world_size()
    launch = read_launch(os.environ)
    return 1 if launch is None else launch.world_size


def own_rank() -> int:
    """The global rank of this process, also before torch.distributed has started."""
    if dist.is_initialized():
        return dist.get_rank()
    launch = read_launch(os.environ)
    return 0 if launch is None else launch.rank
