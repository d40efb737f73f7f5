"""The memory of reductions during backward: as large as its formula, whatever the buckets are."""

from typing import Any

import pytest
import torch
from cases import Layout, groups_of, placed_as
from costs import counted
from torch import nn

import mics_fn as mf
from mics_fn.deferred.memory import LEAST_RING, Ring
from mics_fn.lab.report import Cut, buckets_of, memory_formula

WIDTH = 192
LARGE = 6 * WIDTH  # width of one layer
UNIT = 4 * WIDTH * WIDTH
ROUNDED = 2 * 512 * 4  # bytes: both buffers of at most four parts begin at multiples of 512


def make(large: bool) -> nn.Module:
    torch.manual_seed(0)
    wide = LARGE if large else WIDTH
    widths = [WIDTH, WIDTH, WIDTH, wide, WIDTH, WIDTH, WIDTH]
    return nn.Sequential(
        *(nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:], strict=False))
    )


def hops(layout, cases):
    """Bytes of the ring after each of two steps, and how often it was made, by case."""
    found = []
    for scheme, precision, accumulate, live, large in cases:
        groups = counted(placed_as(groups_of(layout), scheme))
        route, ring = groups.hierarchy.route, groups.hierarchy.pools.sums.setdefault("ring", Ring())
        trainer = mf.Trainer(
            make(large), mf.optim.sgd(0.1), groups, accumulate=accumulate, live_bytes=live,
            precision=precision, bucket_bytes=UNIT,
            loss=lambda model, x: model(x).float().square().mean(),
        )  # fmt: skip
        got = []
        for _ in range(2):
            trainer.step(torch.ones(2 * accumulate, WIDTH))
            got.append((ring.nbytes, ring.made))
        kept: Any = trainer.schedule
        cut = Cut.of(route)
        parts = memory_formula(
            buckets_of(trainer.state.params), cut, route.sizes, live_bytes=kept.live_bytes,
            num_replicas=groups.num_replicas, micro_steps=accumulate,
        )  # fmt: skip
        found.append((got, parts["hops"]))
    return found


PRECISIONS = ["f32", "compute=bf16,reduce=bf16", "reduce=bf16"]
CASES = [
    (scheme, PRECISIONS[(i + j) % 3], 1 + 2 * (j % 2), live, bool(i % 2))
    for i, scheme in enumerate(["zero3", "zero1", "hybrid", "zero2", "hpz"])
    for j, live in enumerate([0, 3 * UNIT, None])
]


CODED = [
    ("zero3", "hop1=int8[64],hop2=int8[64]", 1, 0, False),
    ("zero3", "hop1=int8[64],hop2=int4[64]", 3, None, True),
    ("hybrid", "reduce=bf16,hop1=fp8[64],hop2=f32", 1, 2 * UNIT, False),
    ("zero2", "hop2=int8[64]", 1, None, False),
]


@pytest.mark.parametrize("cases", [CASES, CODED], ids=["values", "codes"])
@pytest.mark.parametrize("layout", [Layout((2,), 2), Layout((2, 2), 4), Layout((2, 2), 2)], ids=str)
@pytest.mark.thorough
def test_the_ring_is_as_large_as_its_formula(ranks, layout, cases):
    for found in ranks(layout.world_size).run(hops, layout, cases):
        for case, (got, want) in zip(cases, found, strict=True):
            assert got[0] == got[1], (case, "a later step makes memory")
            least = max(want, LEAST_RING)
            assert least <= got[0][0] <= least + ROUNDED, case
            assert 0.2 * least > ROUNDED, "the tolerance is small"
