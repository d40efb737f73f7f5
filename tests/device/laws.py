"""What must hold in every scenario: each law gives the texts of what breaks it."""

from collections.abc import Callable

import torch
from matrix import SCENARIOS, Seen

Run = list[tuple[dict[str, torch.Tensor], dict[str, Seen]]]  # by rank: on the CPU, on the device
Law = Callable[[str, Run], list[str]]


def _each(run: Run) -> list[tuple[str, dict[str, torch.Tensor], Seen]]:
    """Where, the numbers on the CPU, and what was seen on the device."""
    return [
        (f"rank {rank}, events {mode} over", cpu, seen)
        for rank, (cpu, modes) in enumerate(run)
        for mode, seen in modes.items()
    ]


def ordered(name: str, run: Run) -> list[str]:
    """CUDA orders any two accesses that conflict."""
    return [f"{where}: {race}" for where, _, seen in _each(run) for race in seen.races]


def no_host_waits(name: str, run: Run) -> list[str]:
    """In a steady step the host waits only for a guard's number, or for gradients it updates by.

    A trainer also waits for the totals of the step before, or of one that a guard has decided on.
    """
    allowed = SCENARIOS[name].host_waits
    if allowed is None:
        return []
    return [
        f"{where}: {seen.waits}"
        for where, _, seen in _each(run)
        if sum(seen.waits.values()) - min(1, seen.waits.get("event.synchronize", 0)) != allowed
    ]


def equal_numbers(name: str, run: Run) -> list[str]:
    """Numbers are those of gloo, bit by bit, but where `bound_of` says otherwise.

    The stand-in for NCCL rounds a mean of two ranks as the library does on gloo.
    """
    wrong = []
    for where, cpu, seen in _each(run):
        for key, value in cpu.items():
            exact = value.double()
            error = (seen.numbers[key].double() - exact).abs()
            if not (error <= bound_of(name, key, exact)).all():  # nor where one is not a number
                wrong.append(f"{where}, {key}: differs by {error.max()}")
    return wrong


def bound_of(name: str, key: str, value: torch.Tensor) -> torch.Tensor:
    """How far a number may be from that on the CPU: 0, but where both must round differently.

    The loss of an evaluation is a mean over the partition group. If that has more than two ranks,
    gloo adds in another order. Each of the p - 1 additions of positive values rounds by at most
    half an ulp of the sum, on either side.

    A mean in float16 is rounded once by NCCL, by half an ulp, after each of two values was halved,
    which rounds by 2**-25 where the half is subnormal. On the CPU the mean of two is made in
    float32, in three operations on values that are positive and at most twice the mean.
    """
    partition = SCENARIOS[name].partition
    if key == "eval" and partition > 2:
        return 2 * (partition - 1) * 2**-24 * value
    if key == "rounded to float16":
        return (2**-11 + 6 * 2**-24) * value + 2**-24
    return torch.zeros(())


def one_order(name: str, run: Run) -> list[str]:
    """All ranks issue the same collectives in one order, whatever the device says when asked."""
    first = next(iter(run[0][1].values())).issued
    wrong = ["nothing was issued"] if len(run) > 1 and not first else []
    for where, _, seen in _each(run):
        pairs = zip(first, seen.issued, strict=False)
        differs = next((f"{a}, {b}" for a, b in pairs if a != b), "")
        if seen.issued != first:
            wrong.append(f"{where}: {len(first)} and {len(seen.issued)} collectives {differs}")
    return wrong


def kept_by_references(name: str, run: Run) -> list[str]:
    """`record_stream` is not needed; autograd itself calls it between two compute streams."""
    return [
        f"{where}: {seen.recorded_streams} calls"
        for where, _, seen in _each(run)
        if seen.recorded_streams and SCENARIOS[name].program != "forked"
    ]


LAWS: tuple[Law, ...] = (ordered, no_host_waits, equal_numbers, one_order, kept_by_references)
