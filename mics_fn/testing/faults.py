"""What can go wrong, one function each: what a process does to itself, its data, or its store."""

import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from mics_fn.collectives import start_mean
from mics_fn.errors import PlanError, message
from mics_fn.points import Point
from mics_fn.testing.machine import link_down, store_hosts

EXIT_CODE = 3  # of "exit"


class InjectedError(Exception):
    """The error of the faults "raise" and "torn"."""


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


def _abort(moment: Moment) -> None:
    _write_no_core()
    os.abort()


def _segfault(moment: Moment) -> None:
    _write_no_core()
    ctypes.string_at(0)


def _write_no_core() -> None:
    import resource  # which not every system has

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _hold_gil(moment: Moment) -> None:
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
    if not tensors:
        text = f"inject: there is no tensor to change at '{moment.point.name}'"
        fix = "take an operation that moves or writes data, such as 'hop 1' or 'opt_step'"
        raise PlanError(message(text, fix=fix))
    chosen = moment.draw.choice(tensors).detach()
    return chosen.data[tuple(moment.draw.randrange(n) for n in chosen.shape)]


def _call_something_else(moment: Moment) -> None:
    comms = [comm for comm in moment.point.comms if comm.size > 1]
    if not comms:
        text = f"inject: no other rank takes part in '{moment.point.name}'"
        fix = "take a collective over more than one rank, such as 'hop 2'"
        raise PlanError(message(text, fix=fix))
    tensor = torch.zeros(1, device=moment.point.tensors[0].device)
    start_mean(comms[0], tensor, what=("", "injected wrong call", "")).wait()


def _fill_the_disk(moment: Moment) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    moment.end.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)


def _cut_off(moment: Moment) -> None:
    moment.end.enter_context(link_down())


def _signal_store(number: int) -> Callable[[Moment], None]:
    def send(moment: Moment) -> None:
        for pid in store_hosts():
            os.kill(pid, number)

    return send


FAULTS: dict[str, Callable[[Moment], None]] = {
    "raise": _raise,
    "torn": _raise,
    "exit": _exit,
    "interrupt": _interrupt,
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "abort": _abort,
    "segfault": _segfault,
    "gil": _hold_gil,
    "slow": _be_slow,
    "oom": _run_out_of_memory,
    "nan": _put_nan,
    "flip": _flip_a_bit,
    "wrong_call": _call_something_else,
    "disk_full": _fill_the_disk,
    "link_down": _cut_off,
    "store_killed": _signal_store(signal.SIGKILL),
    "store_stopped": _signal_store(signal.SIGSTOP),
}
