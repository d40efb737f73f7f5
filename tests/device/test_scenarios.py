"""What must hold in every scenario on the simulated CUDA device, however far it is behind the host.

See [Note: the simulated device] in `simcuda`. Each scenario runs once, and the tests look at what
its ranks saw.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrix import MODES, SCENARIOS, Seen
from simcuda.server import Server

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]

Run = list[tuple[dict[str, torch.Tensor], dict[str, Seen]]]  # by rank: on the CPU, on the device

scenarios = pytest.mark.parametrize("name", SCENARIOS)

RACES = {
    "an update before the run has ended": "a shard is overwritten that a gather still sends",
}


@pytest.fixture(scope="module")
def run(device: Server) -> Callable[[str], Run]:
    """What the ranks of a scenario saw; run when first asked for."""
    found: dict[str, Any] = {}

    def ran(name: str) -> Run:
        if name not in found:
            try:
                found[name] = device.run("compared", SCENARIOS[name].ranks, name)
            except RuntimeError as error:
                found[name] = error
        if isinstance(found[name], RuntimeError):
            raise found[name]
        return found[name]

    return ran


def each(found: Run) -> list[tuple[int, str, dict[str, torch.Tensor], Seen]]:
    """Rank, mode, numbers on the CPU, and what was seen on the device."""
    return [
        (rank, mode, cpu, seen[mode]) for rank, (cpu, seen) in enumerate(found) for mode in MODES
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.xfail(strict=True, reason=RACES[n])) if n in RACES else n
        for n in SCENARIOS
    ],
)
def test_all_accesses_are_ordered(run: Callable[[str], Run], name: str):
    for rank, mode, _, seen in each(run(name)):
        assert not seen.races, f"rank {rank}, {mode} over:\n" + "\n".join(seen.races)


@scenarios
def test_the_host_does_not_wait_in_a_steady_step(run: Callable[[str], Run], name: str):
    for rank, mode, _, seen in each(run(name)):
        assert sum(seen.waits.values()) == SCENARIOS[name].host_waits, (rank, mode, seen.waits)


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
        return 2 * (partition - 1) * torch.finfo(torch.float32).eps / 2 * value
    if key == "rounded to float16":
        return (2**-11 + 6 * 2**-24) * value + 2**-24
    return torch.zeros(())


@scenarios
def test_numbers_equal_those_of_gloo(run: Callable[[str], Run], name: str):
    """Bit by bit: the stand-in for NCCL rounds a mean of two ranks as the library does on gloo."""
    for rank, mode, cpu, seen in each(run(name)):
        for key, value in cpu.items():
            assert value.isfinite().all(), key
            error = (seen.numbers[key].double() - value.double()).abs()
            within = error <= bound_of(name, key, value.double())
            assert within.all(), f"rank {rank}, {mode} over, {key}: differs by {error.max()}"


@scenarios
def test_all_ranks_issue_collectives_in_one_order(run: Callable[[str], Run], name: str):
    found = run(name)
    for mode in MODES:
        first = found[0][1][mode].issued
        assert first or SCENARIOS[name].ranks == 1, "nothing was issued"
        for rank, (_, seen) in enumerate(found):
            other = seen[mode].issued
            differs = next((i for i, (a, b) in enumerate(zip(first, other)) if a != b), None)  # noqa: B905
            assert differs is None, f"rank {rank}, {mode} over: {first[differs]}, {other[differs]}"
            assert len(first) == len(other)


@scenarios
def test_nothing_depends_on_when_an_event_is_over(run: Callable[[str], Run], name: str):
    """The same collectives, whatever the device answers when it is asked how far it is."""
    for rank, (_, seen) in enumerate(run(name)):
        counts = [Counter(seen[mode].issued) for mode in MODES]
        assert counts[0] == counts[1] == counts[2], f"rank {rank}"


@scenarios
def test_buffers_live_by_references_and_events(run: Callable[[str], Run], name: str):
    """`record_stream` is not needed; autograd itself calls it between two compute streams."""
    for rank, mode, _, seen in each(run(name)):
        by_autograd = SCENARIOS[name].program == "forked"
        assert by_autograd or seen.recorded_streams == 0, (rank, mode, seen.recorded_streams)


@pytest.mark.parametrize("name", [n for n, s in SCENARIOS.items() if s.plans])
@pytest.mark.xfail(strict=True, reason="pools ask events, and keep more than the plan says")
def test_pools_keep_at_most_what_is_planned(run: Callable[[str], Run], name: str):
    for rank, mode, _, seen in each(run(name)):
        assert seen.planned_bytes is not None
        assert seen.kept_bytes <= seen.planned_bytes, (rank, mode, seen[-3:-1])
