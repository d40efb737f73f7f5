"""`inject`: a fault on one rank, at one step, in one operation."""

import ctypes
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn import checks, spans
from mics_fn.collectives import start_mean
from mics_fn.errors import PlanError, message
from mics_fn.groups import read_launch
from mics_fn.spans import Point

# What can go wrong, one function each: what a process does to itself or its data.

EXIT_CODE = 3  # of "exit"


class InjectedError(Exception):
    """The error of the fault "raise"."""


class Moment(NamedTuple):
    """When and where a fault happens."""

    point: Point
    where: str  # in words
    draw: random.Random
    seconds: float  # how long what passes lasts
    end: ExitStack  # closed when the block of `inject` ends


def _raise(moment: Moment) -> None:
    raise InjectedError(f"injected {moment.where}")


def _exit(moment: Moment) -> None:
    sys.exit(EXIT_CODE)


def _signal(number: int) -> Callable[[Moment], None]:
    return lambda moment: os.kill(os.getpid(), number)


def _interrupt(moment: Moment) -> None:
    signal.raise_signal(signal.SIGINT)


def _keep_gil(moment: Moment) -> None:
    ctypes.PyDLL(None).usleep(int(1e6 * moment.seconds))


def _be_slow(moment: Moment) -> None:
    time.sleep(moment.seconds)


def _run_out_of_memory(moment: Moment) -> None:
    tensors = moment.point.tensors
    torch.empty(2**60, dtype=torch.uint8, device=tensors[0].device if tensors else "cpu")


def _put_nan(moment: Moment) -> None:
    found = [x for x in moment.point.tensors if x.dtype.is_floating_point and x.numel()]
    _some_element(found, moment).fill_(float("nan"))


def _flip_a_bit(moment: Moment) -> None:
    found = [x for x in moment.point.tensors if x.numel() and x.dtype != torch.bool]
    flipped = _some_element(found, moment).view(1).view(torch.uint8)
    bit = moment.draw.randrange(8 * len(flipped))
    flipped[bit // 8] ^= 1 << bit % 8


def _some_element(tensors: list[Tensor], moment: Moment) -> Tensor:
    """One element of one of them, 0-dim and in place, also under autograd."""
    chosen = moment.draw.choice(tensors).detach()
    return chosen.data[tuple(moment.draw.randrange(n) for n in chosen.shape)]


def _call_something_else(moment: Moment) -> None:
    comms = [comm for comm in moment.point.comms if comm.size > 1]
    tensor = torch.zeros(1, device=moment.point.tensors[0].device)
    start_mean(comms[0], tensor, what=("", "injected wrong call", "")).wait()


def _fill_the_disk(moment: Moment) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    moment.end.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)


FAULTS: dict[str, Callable[[Moment], None]] = {
    "raise": _raise,
    "exit": _exit,
    "interrupt": _interrupt,
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "gil": _keep_gil,
    "slow": _be_slow,
    "oom": _run_out_of_memory,
    "nan": _put_nan,
    "flip": _flip_a_bit,
    "wrong_call": _call_something_else,
    "disk_full": _fill_the_disk,
}


class Injection:
    """A fault that waits for its moment.

    Args:
      rank, step, operation, fault, seed, seconds: as for `inject`.
    """

    def __init__(
        self,
        rank: int | None,
        step: int,
        operation: str,
        fault: str | Callable[[Point], None],
        seed: int,
        seconds: float,
    ) -> None:
        self.rank, self.step, self.operation = rank, step, operation
        self.at: str | None = None  # the point at which it happened
        self._draw, self._seconds, self._end = random.Random(seed), seconds, ExitStack()
        self._now = 0  # the step under way
        self._announced = False  # whether steps say when they begin
        if callable(fault):
            self.fault = getattr(fault, "__name__", "function")
            self._happen = lambda moment: fault(moment.point)
        else:
            self.fault, self._happen = fault, FAULTS[fault]

    def __call__(self, point: Point) -> None:
        """Make the fault if this is its moment, once."""
        self._follow(point)
        due = self.at is None and self._now == self.step and self.operation in point.name
        if due and self.rank in (None, own_place()[0]):
            self.at = point.name
            where = f"{self.fault} on rank {own_place()[0]}, step {self._now}, at {point.name}"
            self._happen(Moment(point, where, self._draw, self._seconds, self._end))
        if point.name == "opt_step" and not self._announced:
            self._now += 1  # what follows belongs to the next step of a loop written by hand

    def _follow(self, point: Point) -> None:
        """Learn which step is under way."""
        if point.step is not None:
            self._now = point.step
            self._announced = self._announced or point.name == "step"

    def warn_if_missed(self) -> None:
        """Warn that the fault did not happen on this rank, if it should have."""
        if self.at is None and self.rank in (None, own_place()[0]):
            text = f"inject: {self.fault!r} did not happen on rank {own_place()[0]}"
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
        hop 2; see [Note: points] in `spans`.
      fault: "raise" (an `InjectedError`), "exit", "interrupt" (Ctrl-C), "kill" and "stop" (SIGSTOP)
        end, stop or leave this rank. "gil" (held by a call of C) and "slow"
        delay it. "oom" asks for 2**60 bytes. "nan" and "flip" change an element, or one bit of it,
        in what the operation sends or writes. "wrong_call" makes a collective that other ranks do
        not make. Until the block ends, "disk_full" lets no file grow. Or a function of the `Point`.
      seed: chooses the tensor, the element and the bit.
      seconds: how long "gil" and "slow" last.

    Returns:
      An `Injection`, whose `at` is the name of the point once it has happened. A block that ends
      without an error before it has happened gives a warning on the ranks where it was to happen.

    Raises:
      PlanError: an argument is not what it should be.
      KeyError: there is no such fault.

    Example:
      >>> groups = make_groups(1)
      >>> loss = lambda model, x: model(x).square().mean()
      >>> trainer = Trainer(torch.nn.Linear(2, 1), optim.sgd(0.1), groups, loss=loss)
      >>> with testing.inject(rank=0, step=2, operation="opt_step", fault="raise"):
      ...     trainer.fit([torch.ones(4, 2)], steps=3, progress=False)
      Traceback (most recent call last):
      mics_fn.testing.injector.InjectedError: injected raise on rank 0, step 2, at opt_step
      >>> trainer.state.step
      1
    """
    checks.integer("inject", "rank", rank, 0, optional=True, fix="None means every rank")
    _, size = own_place()
    if rank is not None and rank >= size:
        text = f"inject: rank={rank} in a world of {size}"
        raise PlanError(text, fix=f"pass one of 0 to {size - 1}, or None for every rank")
    checks.integer("inject", "step", step, 0, fix="1 is the first one")
    if not isinstance(operation, str) or not operation:
        fix = "pass a part of the name of a point, such as 'step' or 'hop 1'"
        checks.refuse("inject", "operation", operation, "a text that is not empty", fix)
    injection = Injection(rank, step, operation, fault, seed, seconds)
    spans.observers.append(injection)
    try:
        yield injection
        injection.warn_if_missed()
    finally:
        spans.observers.remove(injection)
        injection.close()


def own_place() -> tuple[int, int]:
    """The global rank, and the number of ranks, also before torch.distributed has started."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launch = read_launch(os.environ)
    return (0, 1) if launch is None else (launch.rank, launch.world_size)
