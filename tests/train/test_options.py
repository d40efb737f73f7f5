"""Ranks that differ in options or in the verbs that they call: all raise, with no wrong number."""

import time
import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Layout, forget_groups, groups_of, random, same_bits
from torch import nn

import mics_fn as mf
from mics_fn.errors import DesyncError
from mics_fn.faults import comparing

PAIR, FOUR = Layout((2,), 2), Layout((2, 2), 2)
optim = mf.optim


def cosine(peak: float) -> Any:
    return optim.warmup_cosine(peak, 5, 5_000)


def torchs(kind: Any, **options: Any) -> Any:
    return optim.from_torch(kind, lr=1e-2, **options)


# What an error names; what all ranks but one are given, and what that one is.
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "lr": (optim.adamw(1e-2), optim.adamw(2e-2)),
    "lr at steps 0, 1, 10, 1000": (optim.lion(cosine(0.1)), optim.lion(cosine(0.2))),
    "weight_decay": (optim.adamw(1e-2), optim.adamw(1e-2, weight_decay=0.1)),
    "optimizer": (torchs(torch.optim.Adam), torchs(torch.optim.AdamW)),
    "chain[0].max_value": (
        optim.chain(optim.clip_by_value(1.0), optim.sgd(0.1)),
        optim.chain(optim.clip_by_value(2.0), optim.sgd(0.1)),
    ),
}
outer = optim.sgd(0.5, momentum=0.9, nesterov=True)
OPTIONS: dict[str, tuple[str, Any, Any]] = {
    "accumulate": ("accumulate", 1, 2),
    "guard max_norm": ("guard", optim.Guard(max_norm=1.0), optim.Guard(max_norm=0.1)),
    "precision": ("precision", None, "output=f32"),
    "outer lr": ("replica_sync", mf.replicas.diloco(2), mf.replicas.diloco(2, outer)),
}
CASES = {name: ("optimizer", *pair) for name, pair in OPTIMIZERS.items()} | OPTIONS


def errors_of(layout: Layout, names: list[str], odd: int | None) -> list[str]:
    """What each option gives if it differs on a rank."""
    found = []
    for name in names:
        torch.manual_seed(0)
        option, usual, other = CASES[name]
        given: dict[str, Any] = {"optimizer": optim.sgd(0.1)}
        given[option] = other if dist.get_rank() == odd else usual
        try:
            with warnings.catch_warnings(action="error"):
                mf.Trainer(nn.Linear(8, 8), given.pop("optimizer"), groups_of(layout), **given)
            found.append("")
        except DesyncError as error:
            found.append(str(error))
    return found


def test_an_option_that_differs_is_named_on_all_ranks(ranks):
    found, same = ranks(2).run(errors_of, PAIR, [*CASES], 1)
    assert found == same
    for name, text in zip(CASES, found, strict=True):
        head = f"Trainer: ranks disagree on the options\n  rank 0: options {name}: "
        assert text.startswith(head), text
        assert f"\n  rank 1: options {name}: " in text
    assert ranks(2).run(errors_of, PAIR, [*CASES], None) == [[""] * len(CASES)] * 2
    for (text,) in ranks(4).run(errors_of, FOUR, ["lr"], 2):
        assert (
            "\n  ranks 0, 1, 3: options lr: 0.01\n  rank 2: options lr: 0.02\n  fix: pass" in text
        )


def by_hand(verb: str, odd: bool) -> str:
    """The error of `init_state` with groups, or of a first step that nobody compared before."""
    with mf.make_groups(2, timeout_s=20) as groups:
        shards = mf.shard({"w": torch.ones(4)}, groups)
        optimizer = optim.sgd(0.5 * (1 + odd * dist.get_rank()))
        state = mf.init_state(shards, optimizer)
        try:
            if verb == "init_state":
                mf.init_state(shards, optimizer, groups=groups)
            for _ in range(2):
                grads = mf.reduce_grads({"w": torch.ones(4)}, groups)
                state = mf.opt_step(state, grads)
        except DesyncError as error:
            assert set(state.params["w"].data.tolist()) <= {1.0}
            return str(error)
        return ""


@pytest.mark.parametrize("verb", ["init_state", "opt_step"])
def test_a_loop_by_hand_compares_its_optimizer(ranks, verb):
    for text in ranks(2).run(by_hand, verb, True):
        assert text.startswith(f"{verb}: ranks disagree on the options\n")
        assert "\n  rank 0: options lr: 0.5\n  rank 1: options lr: 1.0\n" in text
    assert ranks(2).run(by_hand, verb, False) == ["", ""]


def with_versions(*torch_versions: str) -> str:
    """The error if ranks have these versions."""
    shards = mf.shard({"w": torch.ones(4)}, groups_of(PAIR))
    versions = {**comparing.versions(), "version of torch": torch_versions[dist.get_rank()]}
    with mock.patch.object(comparing, "versions", return_value=versions):
        try:
            mf.init_state(shards, optim.sgd(0.1), groups=groups_of(PAIR))
        except DesyncError as error:
            return str(error)
    return ""


def test_versions_that_differ_are_named(ranks):
    assert comparing.versions()["version of torch"] == ".".join(torch.__version__.split(".")[:2])
    for text in ranks(2).run(with_versions, "2.13", "2.14"):
        assert "rank 1: options version of torch: 2.14\n" in text


# One rank calls other verbs than the rest.

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
PLACES = [
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


@pytest.mark.parametrize(("layout", "name"), PLACES)
@pytest.mark.covering
def test_all_ranks_raise_before_anything_wrong_is_moved(ranks, layout, name):
    found = ranks(layout.world_size).run(go_wrong, layout, name)
    (text,) = {text for text, *_ in found}
    assert f"rank {ODD}: " in text or f"rank {ODD}, " in text, text
    assert text.count("rank") > 2
    began, ended = (max(times) for times in zip(*(times for _, *times in found), strict=True))
    assert ended - began < 10, text  # and not 30
