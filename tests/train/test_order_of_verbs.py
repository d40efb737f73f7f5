"""One rank calls other verbs than the rest: all ranks raise soon, and nothing came out wrong."""

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, forget_groups, groups_of, random, same_bits

import mics_fn as mf
from mics_fn.errors import DesyncError

ODD, STEPS, AT = 1, 7, 4  # the rank that is wrong, in which step of how many
LAYOUTS = [Layout((2,), 1), Layout((2,), 2), Layout((2, 2), 2)]


# What all ranks call in a step, what the odd one calls in one of them, and the size of tree 1:
# gather, unshard, reduce_grads, and sync_replicas, without which replicas never wait.
BY_HAND = {
    "gathers swapped": ("g0 g1 s0", "g1 g0 s0", 8),
    "unequal gathers swapped": ("g0 g1 s0", "g1 g0 s0", 24),
    "reductions swapped": ("r0 r1 s0", "r1 r0 s0", 8),
    "sync_replicas too many": ("g0 s1 r0", "g0 s1 s1 r0", 8),
    "unshard too few": ("g0 u1 r0", "g0 r0", 8),
}


class ByHand:
    """Two trees, both agreed on, are used in every step."""

    def __init__(self, given, groups):
        self.groups, (*self.calls, size) = groups, given
        self.full = {"a": torch.full((8,), 1.0)}, {"b": torch.full((size,), 2.0)}
        self.trees = [mf.shard(full, groups) for full in self.full]
        for shards in self.trees:
            mf.gather(shards, groups)

    def step(self, odd):
        for verb, i in self.calls[odd].split():
            full, shards = self.full[int(i)], self.trees[int(i)]
            if verb == "s":
                mf.sync_replicas(shards, self.groups)
            elif verb == "r":
                (grad,) = mf.reduce_grads(full, self.groups, like=shards).values()
                assert set(grad.data.tolist()) <= {1.0 + int(i), 0.0}
            else:
                same_bits((mf.gather if verb == "g" else mf.unshard)(shards, self.groups), full)


# What the odd rank's `Trainer` is given besides.
OTHER: dict[str, Any] = {
    "other accumulate": {"accumulate": 2},
    "other guard": {"guard": mf.optim.Guard(on_nonfinite="skip")},
    "other live_bytes": {"live_bytes": 100},
}


class Training:
    """A `Trainer` that steps and evaluates, with a mistake of one rank."""

    def __init__(self, mistake, groups):
        self.mistake, self.rank, self.order = mistake, dist.get_rank(), (0, 1, 2)
        given = {"live_bytes": None if "all kept" in mistake else 0, "bucket_bytes": 80}
        given |= OTHER.get(mistake, {}) if self.rank == ODD else {}
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
        self.trainer = mf.Trainer(model, mf.optim.sgd(0.1), groups, loss=self.loss, **given)

    def loss(self, model, x):
        for i in self.order:
            x = model[i](x)
        return x.square().mean()

    def step(self, odd):
        x = random(self.rank, 2, 4)
        self.order = (0, 2, 1) if odd and self.mistake == "another order of use" else (0, 1, 2)
        if odd and "too many" in self.mistake:
            (self.trainer.eval if "eval" in self.mistake else self.trainer.step)(x)
        self.trainer.step(x)
        self.trainer.eval(x)


TRAINED = ["eval too many, all kept", "step too many", *OTHER, "another order of use"]
PROGRAMS = {name: partial(ByHand, given) for name, given in BY_HAND.items()}
PROGRAMS |= {name: partial(Training, name) for name in TRAINED}
# What sends nothing in partition groups of one rank, and what sends nothing without replicas.
INSIDE = {"gathers swapped", "unequal gathers swapped", "unshard too few"}
INSIDE |= {"other live_bytes", "another order of use"}
BETWEEN = {"sync_replicas too many", "other guard"}
CASES = [
    pytest.param(layout, name, id=f"{layout}-{name}")
    for layout in LAYOUTS
    for name in PROGRAMS
    if not (name in INSIDE and layout.partition_size == 1)
    and not (name in BETWEEN and layout.partition_size == layout.world_size)
]


def go_wrong(layout, name):
    """The error of this rank, when the step that is wrong began on it, and when it raised."""
    forget_groups(layout)
    groups, started = groups_of(layout, timeout_s=30.0), time.monotonic()
    try:
        program = PROGRAMS[name](groups)
        for k in range(STEPS):
            if k == AT or k == 0 and name.startswith("other "):
                started = time.monotonic()
            program.step(k == AT and dist.get_rank() == ODD)
    except DesyncError as error:
        return str(error), started, time.monotonic()
    finally:
        forget_groups(layout)
    return "no error", started, started


@pytest.mark.parametrize(("layout", "name"), CASES)
@pytest.mark.covering
def test_all_ranks_raise_before_anything_wrong_is_moved(ranks, layout, name):
    found = ranks(layout.world_size).run(go_wrong, layout, name)
    (text,) = {text for text, *_ in found}
    assert f"rank {ODD}: " in text or f"rank {ODD}, " in text, text
    assert text.count("rank") > 2
    began, ended = (max(times) for times in zip(*(times for _, *times in found), strict=True))
    assert ended - began < 10, text  # and not 30
