"""One rank calls other verbs than the rest: all ranks raise soon, and nothing came out wrong."""

import time
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, forget_groups, groups_of, random

import mics_fn as mf
from mics_fn.errors import DesyncError

ODD, STEPS, AT = 1, 7, 4  # the rank that is wrong, in which step of how many
LAYOUTS = [Layout((2,), 1), Layout((2,), 2), Layout((2, 2), 2)]


class Gathers:
    """Two trees of equal or unequal size, both agreed on, are gathered in every step."""

    def __init__(self, groups, size=8):
        self.groups = groups
        self.trees = [mf.shard({n: torch.full((k,), v)}, groups) for n, k, v in self.wanted(size)]
        self.size = size
        for tree in self.trees:
            mf.gather(tree, groups)

    def wanted(self, size):
        return ("a", 8, 1.0), ("b", size, 2.0), ("c", 8, 3.0)

    def gather(self, i):
        name, count, value = self.wanted(self.size)[i]
        assert mf.gather(self.trees[i], self.groups)[name].tolist() == [value] * count

    def step(self, odd):
        for i in self.order(odd):
            self.gather(i)
        mf.sync_replicas(self.trees[0], self.groups)  # else the other replicas never wait

    def order(self, odd):
        return (1, 0) if odd else (0, 1)


class OtherTree(Gathers):
    """Another tree that was agreed on is gathered once."""

    def order(self, odd):
        return (0, 2) if odd else (0, 1)


class Reductions(Gathers):
    """Gradients of the two trees are reduced in every step."""

    def gather(self, i):
        name, count, value = self.wanted(self.size)[i]
        grads = {name: torch.full((count,), value)}
        grads = mf.reduce_grads(grads, self.groups, like=self.trees[i])
        assert set(grads[name].data.tolist()) <= {value, 0.0}


class ByHand(Gathers):
    """One more or fewer call of some verb, in a step of several."""

    def __init__(self, groups, verb, calls):
        super().__init__(groups)
        self.verb, self.calls = verb, calls

    def step(self, odd):
        self.gather(0)
        for _ in range(self.calls if odd else 1):
            self.verb(self.trees[1], self.groups)
        mf.reduce_grads({"a": torch.ones(8)}, self.groups, like=self.trees[0])


# What the odd rank's `Trainer` is given besides.
OTHER: dict[str, Any] = {
    "other accumulate": {"accumulate": 2},
    "other guard": {"guard": mf.optim.Guard(on_nonfinite="skip")},
    "other live_bytes": {"live_bytes": 100},
}


def trainer_of(groups, loss, **given):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    given = {"live_bytes": 0, "bucket_bytes": 80, **given}
    return mf.Trainer(model, mf.optim.sgd(0.1), groups, loss=loss, **given)


class Training:
    """A `Trainer` that steps and evaluates, with a mistake of one rank."""

    def __init__(self, groups, mistake):
        self.mistake, self.rank, self.order = mistake, dist.get_rank(), (0, 1, 2)
        given = {"live_bytes": None} if "all kept" in mistake else {}
        given |= OTHER.get(mistake, {}) if self.rank == ODD else {}
        self.trainer = trainer_of(groups, self.loss, **given)

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
PROGRAMS = {
    "gathers swapped": Gathers,
    "unequal gathers swapped": lambda groups: Gathers(groups, 24),
    "another agreed tree": OtherTree,
    "reductions swapped": Reductions,
    "sync_replicas too many": lambda groups: ByHand(groups, mf.sync_replicas, 2),
    "unshard too few": lambda groups: ByHand(groups, mf.unshard, 0),
    **{name: partial(Training, mistake=name) for name in TRAINED},
}
# What sends nothing in partition groups of one rank, and what sends nothing without replicas.
INSIDE = {"gathers swapped", "unequal gathers swapped", "another agreed tree", "unshard too few"}
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


class Interrupted(torch.autograd.Function):
    """The identity, whose backward may raise."""

    raises: type[BaseException] | None = None

    @staticmethod
    def forward(ctx, x):  # pyright: ignore
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore
        if Interrupted.raises is not None:
            raise Interrupted.raises("all ranks")
        return grad


def quietly(*args):
    with warnings.catch_warnings(action="ignore"):  # that the order of use changed
        interrupted(*args)


def interrupted(layout, where, kind, live):
    """Parameters after some steps, of which some were begun in vain on all ranks."""
    groups, odd = groups_of(layout), iter(())
    found = []

    def loss(model, x):
        x = Interrupted.apply(model[1](model[0](x)))
        if where == "forward" and next(odd, False):
            raise kind("all ranks")
        return model[2](x).square().mean()

    for times in (0, 2):
        trainer = trainer_of(groups, loss, live_bytes=live)
        for k in range(4):
            for _ in range(times if k in (0, 2) else 0):
                odd, Interrupted.raises = iter([True]), None if where == "forward" else kind
                with pytest.raises(kind, match="all ranks"):
                    trainer.step(random(dist.get_rank(), 2, 4))
                Interrupted.raises = None
            trainer.step(random(dist.get_rank(), 2, 4))
        found.append(list(trainer.params().values()))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("layout", "where", "kind", "live"),
    [
        (LAYOUTS[2], "backward", ValueError, 0),
        (LAYOUTS[1], "forward", KeyboardInterrupt, 0),
        pytest.param(LAYOUTS[2], "forward", ValueError, None, marks=pytest.mark.thorough),
    ],
)
def test_a_step_that_all_ranks_begin_in_vain_leaves_no_trace(ranks, layout, where, kind, live):
    ranks(layout.world_size).run(quietly, layout, where, kind, live)
