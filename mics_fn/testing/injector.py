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
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn import spans
from mics_fn.collectives import levels
from mics_fn.errors import PlanError, message
from mics_fn.groups import read_launch
from mics_fn.spans import Point


@dataclass(eq=False)
class Injection:
    """A fault that waits for its moment.

    Args:
      rank, step, operation, fault, seconds: as for `inject`.
      draw: chooses by its `seed`.
      end: closed when the block of `inject` ends.
      at: the name of the point at which it happened, once it has.
    """

    rank: int | None
    step: int
    operation: str
    fault: str | Callable[[Point], None]
    draw: random.Random
    seconds: float
    end: ExitStack = field(default_factory=ExitStack)
    at: str | None = None
    _now: int = 0  # the step under way
    _announced: bool = False  # whether steps say when they begin

    def __post_init__(self) -> None:
        given = self.fault
        self._act = (lambda own: given(own.point)) if callable(given) else FAULTS[given]
        self.fault = getattr(given, "__name__", given)

    def __call__(self, point: Point) -> None:
        """Make the fault if this is its moment, once."""
        if point.step is not None:
            self._now = point.step
            self._announced = self._announced or point.name == "step"
        due = self.at is None and self._now == self.step and self.operation in point.name
        if due and self.rank in (None, own_place()[0]):
            self.at, self.point = point.name, point
            self.where = f"{self.fault} on rank {own_place()[0]}, step {self._now}, at {point.name}"
            self._act(self)
        if point.name == "opt_step" and not self._announced:
            self._now += 1  # what follows belongs to the next step of a loop written by hand

    def warn_if_missed(self) -> None:
        """Warn that the fault did not happen on this rank, if it should have."""
        if self.at is None and self.rank in (None, own_place()[0]):
            text = f"inject: {self.fault!r} did not happen on rank {own_place()[0]}"
            lines = [f"no point of step {self.step} had {self.operation!r} in its name"]
            fix = "pass a step that the block takes, and a part of the name of a point in it"
            warnings.warn(message(text, lines, fix), stacklevel=4)


# What can go wrong, one function each: what a process does to itself or its data.

EXIT_CODE = 3  # of "exit"


class InjectedError(Exception):
    """The error of the fault "raise"."""


def _raise(own: Injection) -> None:
    raise InjectedError(f"injected {own.where}")


def _send_itself(number: int, own: Injection) -> None:
    signal.raise_signal(number)


def _run_out_of_memory(own: Injection) -> None:
    tensors = own.point.tensors
    torch.empty(2**60, dtype=torch.uint8, device=tensors[0].device if tensors else "cpu")


def _put_nan(own: Injection) -> None:
    found = [x for x in own.point.tensors if x.dtype.is_floating_point and x.numel()]
    _some_element(found, own).fill_(float("nan"))


def _flip_a_bit(own: Injection) -> None:
    found = [x for x in own.point.tensors if x.numel() and x.dtype != torch.bool]
    flipped = _some_element(found, own).view(1).view(torch.uint8)
    bit = own.draw.randrange(8 * len(flipped))
    flipped[bit // 8] ^= 1 << bit % 8


def _some_element(tensors: list[Tensor], own: Injection) -> Tensor:
    """One element of one of them, 0-dim and in place, also under autograd."""
    chosen = own.draw.choice(tensors).detach()
    return chosen.data[tuple(own.draw.randrange(n) for n in chosen.shape)]


def _call_something_else(own: Injection) -> None:
    comms = [comm for comm in own.point.comms if comm.size > 1]
    tensor = torch.zeros(1, device=own.point.tensors[0].device)
    levels.start_mean([comms[0]], tensor, what=("", "injected wrong call", "")).wait()


def _fill_the_disk(own: Injection) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    own.end.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)


FAULTS: dict[str, Callable[[Injection], None]] = {
    "raise": _raise,
    "exit": lambda own: sys.exit(EXIT_CODE),
    "interrupt": partial(_send_itself, signal.SIGINT),
    "kill": partial(_send_itself, signal.SIGKILL),
    "stop": partial(_send_itself, signal.SIGSTOP),
    "gil": lambda own: ctypes.PyDLL(None).usleep(int(1e6 * own.seconds)),
    "slow": lambda own: time.sleep(own.seconds),
    "oom": _run_out_of_memory,
    "nan": _put_nan,
    "flip": _flip_a_bit,
    "wrong_call": _call_something_else,
    "disk_full": _fill_the_disk,
}


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
      PlanError: there is no such rank.
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
    _, size = own_place()
    if rank is not None and rank not in range(size):
        text = f"inject: rank={rank} in a world of {size}"
        raise PlanError(text, fix=f"pass one of 0 to {size - 1}, or None for every rank")
    injection = Injection(rank, step, operation, fault, random.Random(seed), seconds)
    spans.observers.append(injection)
    try:
        yield injection
        injection.warn_if_missed()
    finally:
        spans.observers.remove(injection)
        injection.end.close()


def own_place() -> tuple[int, int]:
    """The global rank, and the number of ranks, also before torch.distributed has started."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    launch = read_launch(os.environ)
    return (0, 1) if launch is None else (launch.rank, launch.world_size)
