"""What is counted as memory and as traffic, and the formulas beside it."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from costs import cut_of, memory_formula
from storage_count import StorageCount

import mics_fn as mf
from mics_fn.collectives import checksum
from mics_fn.lab import report
from mics_fn.lab.models import GPTConfig, TrainingTask, load_text, loss_of, seeded

F32, NODE = torch.float32, 2
BF16_TEXT = "compute=bf16,reduce=bf16"

pytestmark = pytest.mark.limit(300)


CASES = [(name, "f32") for name in ("ddp", "mics", "zero2", "zero3")]
CASES += [(name, BF16_TEXT) for name in ("hpz", "hybrid")]  # parameters over fewer than states
SMALL = GPTConfig(256, 2, dim=64, num_heads=2, num_blocks=4)
BUCKETS, LIVE_BUCKETS = 16, 2
TOLERANCE = 0.02  # of the formula, on top of one bucket


def held_bytes(name: str, precision: str) -> dict[str, Any]:
    """The bytes of tensors on this rank between and within steps, and the formula for them."""
    groups = mf.make_groups(cut_of(name, 4, NODE).states, node_size=NODE, device="cpu")
    groups = mf.placement.place(groups, name)
    batch = TrainingTask(model=SMALL).batch(load_text(100_000), 0, 0, groups.rank)
    checksum(torch.zeros(1))  # the first call in a process makes a table of 8 MiB
    itemsize = mf.Precision.parse(precision).formats("", F32).compute.itemsize
    with StorageCount() as count:
        model = seeded(SMALL, groups.device)
        sizes = [p.numel() for p in model.parameters()]
        trainer = mf.Trainer(
            model,
            mf.optim.adamw(3e-4),
            groups,
            loss=loss_of,
            live_bytes=LIVE_BUCKETS * max(sizes) * itemsize,
            precision=precision,
            bucket_bytes=4 * sum(sizes) // BUCKETS,
        )
        del model
        gc.collect()  # what a cycle still holds of it would count
        for steps in (3, 2):
            count.reset_peak()
            for _ in range(steps):
                trainer.step(batch)
        waiting = groups.hierarchy.pools.waiting_bytes
        between, within = count.now - waiting, count.peak
    buckets = report.buckets_of(trainer.state.params)
    formula = memory_formula(
        buckets,
        cut_of(name, 4, NODE),
        groups.hierarchy.route.sizes,
        # Where nothing has to be fetched again, the trainer needs no budget.
        live_bytes=getattr(trainer.schedule, "live_bytes", LIVE_BUCKETS * max(sizes) * itemsize),
        num_replicas=groups.num_replicas,
    )
    bucket = max(b.numel * max(b.dtype.itemsize, b.accumulate.itemsize) for b in buckets)
    groups.close()
    found = {"between": between, "within": within, "waiting": waiting}
    return {**found, "formula": formula, "bucket": bucket, "full": 12 * sum(sizes)}


@pytest.mark.parametrize(("name", "precision"), CASES)
@pytest.mark.thorough
def test_memory_of_every_placement(name: str, precision: str, ranks: Callable):
    every = ranks(4).run(held_bytes, name, precision)
    first, share = every[0], {"ddp": 1, "mics": 2, "fsdp": 2}.get(name, 4)
    states, total = first["formula"]["states"], sum(first["formula"].values())
    between, within = (max(found[key] for found in every) for key in ("between", "within"))
    assert between == pytest.approx(states, rel=1e-3)
    assert abs(within - total) <= TOLERANCE * total + first["bucket"]
    assert first["bucket"] < 0.09 * first["full"] / 3, "the tolerance is small"
    assert within >= between + max(found["waiting"] for found in every) / 2
    assert first["full"] <= states * share <= 1.02 * first["full"]
