"""`plan`: the rule of MiCS comes out, laws of its order, and every choice against brute force."""

from dataclasses import replace
from itertools import product
from math import log2, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mics_fn.__main__ import main
from mics_fn.errors import PlanError
from mics_fn.lab.hardware import Hardware
from mics_fn.lab.planner import MODELS, RESERVED, plan, transformer
from mics_fn.lab.simulator import simulate
from mics_fn.schedules import Schedule
from mics_fn.shards import Precision
from mics_fn.shards.bucket import LeafSpec, plan_buckets

SHAPES = transformer(3, 64, vocab=256, hidden=256)
STATES = 16 * sum(map(prod, SHAPES.values()))  # parameters, gradients and two moments
SMALL = Hardware.of("4 x 4 h100, 10 Gbit")
SMALL = replace(SMALL, links=tuple(replace(link, latency_us=0) for link in SMALL.links))


def cluster_with(memory: float, slower: float = 1.0, cluster: Hardware = SMALL) -> Hardware:
    """Devices with so much memory, and links between nodes that are slower by this factor."""
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=int(memory)))
    rate = cluster.link("node").gb_per_s / slower
    return cluster.with_link("node", gb_per_s=rate)


def planned(cluster: Hardware, **how: Any) -> Any:
    return plan(SHAPES, cluster, **{"tokens": 256, "bucket_bytes": 50_000, **how})


# The rule of MiCS.


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "cluster", "tokens", "size"),
    [
        ("bert-10b", "8 x 8 v100, 100 Gbit", 4096, 8),
        ("llama-3-70b", "64 x 8 h100, 8 x 400 Gbit", 8192, 32),
        ("llama-3-8b", "4 x 8 h100, 400 Gbit", 8192, 8),
    ],
)
def test_the_smallest_group_that_holds_the_states_is_the_best(model, cluster, tokens, size):
    found = plan(model, cluster, tokens=tokens, accumulate=4, placements=["mics", "hpz"])
    fitting = {each.partition_size for each in found.choices}
    assert (found.best.partition_size, min(p for p in fitting if p >= 8)) == (size, size)
    assert f"{size} is the smallest group that holds the states; " in found.reason or size == 8


def test_where_links_are_alike_a_small_group_is_no_better():
    """Nothing says that groups should be small: with links of one speed the plan differs."""
    alike = replace(SMALL, links=(SMALL.links[-1],) * 2)
    slow, fast = (planned(x, placements=["mics"], accumulate=2) for x in (SMALL, alike))
    assert slow.best.partition_size == 4
    of = lambda found, p: found.sizes(p)[0].seconds  # noqa: E731
    assert of(slow, 16) / of(slow, 4) > of(fast, 16) / of(fast, 4)


def test_a_reason_says_what_does_not_fit():
    found = planned(cluster_with(0.4 * STATES), placements=["mics"])
    (one, *_) = found.refused
    assert one.partition_size == 1
    assert found.reason.startswith("4 is the smallest group that holds the states; 2 needs ")
    assert f"{found.best}".startswith(f"groups = mf.make_groups({found.best.partition_size})")
    nothing = planned(cluster_with(1000))
    assert not nothing.choices
    with pytest.raises(PlanError, match="nothing fits this cluster"):
        _ = nothing.best
    assert "nothing fits: 1 needs" in f"{nothing}"


# Laws.

MEMORY = st.floats(0.15, 2.0).map(lambda share: share * STATES)
ONE = {"placements": ["mics"], "live_bytes": [0]}


@given(MEMORY, MEMORY, st.sampled_from([0.1, 1.0, 30.0]))
@settings(max_examples=15, deadline=None)
def test_more_memory_never_gives_a_larger_group_or_a_slower_step(low, high, slower):
    less, more = (planned(cluster_with(x, slower), **ONE) for x in sorted((low, high)))
    if less.choices:
        assert more.best.partition_size <= less.best.partition_size
        assert {x.partition_size for x in less.choices} <= {x.partition_size for x in more.choices}


@given(MEMORY, st.sampled_from([1.5, 4.0, 100.0]))
@settings(max_examples=10, deadline=None)
def test_a_faster_link_never_makes_a_choice_slower(memory: float, times: float):
    slow, fast = (planned(cluster_with(memory, x), **ONE) for x in (times, 1.0))
    seconds = {each.partition_size: each.seconds for each in slow.choices}
    assert all(each.seconds <= seconds[each.partition_size] for each in fast.choices)


# Against brute force.


def tried(
    cluster: Hardware, optimizer: str, p: int, name: str, live: int | None, count: int
) -> Any:
    """Score, bytes and seconds of one way to train, by the definitions."""
    matrix = lambda path: optimizer == "muon" and path.startswith("layers") and "norm" not in path  # noqa: E731
    specs = [
        LeafSpec(path, shape, Precision().formats(path, torch.float32), p, whole=matrix(path))
        for path, shape in SHAPES.items()
    ]
    placed = [bucket for bucket, _ in plan_buckets(specs, bucket_bytes=50_000)]
    buckets, used = sorted({*placed}, key=lambda x: x.index), [*dict.fromkeys(placed)]
    forward = "; ".join(f"use {x.index}" for x in used)
    backward = "; ".join(f"use {x.index}; reduce {x.index}" for x in reversed(used))
    record = Schedule.parse(f"{forward}; backward; {backward}\n" * count)
    work = count * 8 * 256 * sum(map(prod, SHAPES.values())) / cluster.device.flops["f32"]
    moments = 1 if optimizer == "muon" else 2
    how: Any = {"partition_size": p, "placement": name, "live_bytes": live, "moments": moments}
    step = simulate(record, buckets, cluster, compute_s=work, **how)
    orthogonal = [sorted(x) for path, x in SHAPES.items() if matrix(path)]
    flops = sum(5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n) for m, n in orthogonal)
    seconds = step.seconds + flops / p / cluster.device.flops["bf16"]
    node = [n for comm, n in step.sent_bytes().items() if not comm.endswith(" rank")]
    score = log2(seconds / 256 / count) + 0.01 * log2((1 + sum(node) / 256 / count) * p)
    return score, step.memory().total, seconds


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_choices_are_all_there_are_in_their_order(optimizer: str):
    cluster = cluster_with((0.4 if optimizer == "adamw" else 0.8) * STATES)
    names, budgets, counts = ("mics", "fsdp"), (None, 60_000, 0), (1, 2)
    how: dict[str, Any] = {"placements": names, "live_bytes": budgets, "accumulate": counts}
    found = planned(cluster, optimizer=optimizer, precision="f32", **how)
    every = dict[Any, Any]()
    for p, name, live, count in product((1, 2, 4, 8, 16), names, budgets, counts):
        if name == "mics" or p > 4:  # in one level both are the same
            every[p, name, live, count] = tried(cluster, optimizer, p, name, live, count)
    fits = {x: y for x, y in every.items() if y[1] <= cluster.device.memory_bytes * (1 - RESERVED)}
    key = lambda x: (x.partition_size, x.placement, x.live_bytes, x.accumulate)  # noqa: E731
    assert 0 < len(fits) < len(every)
    assert [*map(key, found.choices)] == sorted(fits, key=lambda x: fits[x][:2])
    assert [x.seconds for x in found.choices] == [
        pytest.approx(fits[key(x)][2]) for x in found.choices
    ]
    assert {x.partition_size for x in found.refused} == {x[0] for x in every.keys() - fits.keys()}


def test_a_module_and_a_record_of_it():
    """A recorded order of use gives the same as the order of leaves, if that is the order."""
    names = [name.split(".")[0] for name in ("first.w", "second.w", "third.w")]
    model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in names})
    model["second"].weight.requires_grad_(False)
    own: dict[str, Any] = {"tokens": 8, "bucket_bytes": 1, "partition_sizes": [4]}
    plain = plan(model, SMALL, **own)
    text = "use 0; use 1; use 2; backward; use 2; reduce 2; use 1; use 0; reduce 0"
    same = plan(model, SMALL, record=Schedule.parse(text), **own)
    assert [x.seconds for x in plain.choices] == [x.seconds for x in same.choices]
    assert len(plain.best.step.schedule.reduces) == 2


# What is refused, and the command.


@pytest.mark.parametrize(
    ("model", "how", "text"),
    [
        ("gpt-5", {}, "plan: model='gpt-5'"),
        ([1], {}, "plan: model is list"),
        ({"w": "x"}, {}, "plan: model is dict"),
        (SHAPES, {"cluster": None}, "plan: cluster=None, expected Hardware"),
        (SHAPES, {"tokens": 0}, "plan: tokens=0"),
        (SHAPES, {"optimizer": "adagrad"}, "plan: optimizer='adagrad'"),
        (SHAPES, {"partition_sizes": [3]}, "partition_size=3 does not fit"),
        (SHAPES, {"placements": ["zero9"]}, "zero9"),
        (SHAPES, {"accumulate": [0]}, "plan: accumulate=0"),
    ],
)
def test_what_is_refused(model: Any, how: dict[str, Any], text: str):
    with pytest.raises(PlanError, match=text):
        plan(model, **{"cluster": SMALL, "tokens": 8, **how})


def test_one_placement_is_a_text_as_well():
    one, several = (planned(SMALL, placements=x).choices for x in ("mics", ["mics"]))
    assert [str(x) for x in one] == [str(x) for x in several]


def test_the_command(capsys: pytest.CaptureFixture, tmp_path: Path):
    SMALL.save(tmp_path / "here.json")
    how = ["--placements", "mics", "--tokens", "1024"]
    assert main(["plan", "gpt2-xl", f"{tmp_path / 'here.json'}", *how]) == 0
    assert main(["plan", "llama-3-8b", "2 v100", *how]) == 1
    text = capsys.readouterr().out
    assert "groups = mf.make_groups(4)" in text
    assert "nothing fits: 1 needs" in text
    assert set(MODELS) > {"bert-10b", "llama-3-70b"}
