"""`train_step` as a user copies it into a notebook takes the steps of a `Trainer`, to the bit."""

import doctest
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from torch import nn

import mics_fn as mf
from mics_fn import train
from mics_fn.train import stepping as pure
from mics_fn.train.stepping import Program

ALONE, FOUR = Layout((1,), 1), Layout((2, 2), 2)


def copied() -> dict[str, Any]:
    """What a notebook has after the text of the function ran in it."""
    names: dict[str, Any] = {}
    exec("from mics_fn.train.stepping import *", names)
    exec(inspect.getsource(pure.train_step), names)
    assert names["train_step"] is not pure.train_step
    return names


def test_the_block_of_the_page_runs_with_a_copy_of_the_function():
    whole = doctest.DocTestParser().get_examples(inspect.getdoc(train) or "")
    begin = next(i for i, each in enumerate(whole) if "train_step" in each.source)
    block = [each for each in whole[begin:] if "import" not in each.source]
    scope = {**vars(mf), "torch": torch, "Program": Program} | copied()
    torch.manual_seed(0)
    for each in block[:-1]:
        exec(each.source, scope)
    want = [scope[name] for name in ("state", "metrics")]

    torch.manual_seed(0)
    model, groups = nn.Linear(2, 1), mf.make_groups(1)
    trainer = mf.Trainer(
        model, mf.optim.adamw(1e-2), groups, loss=scope["loss"], accumulate=2,
        guard=mf.optim.Guard(max_norm=1.0), params=mf.shard(dict(model.named_parameters()), groups),
    )  # fmt: skip
    for _ in range(3):
        metrics = trainer.step(torch.ones(4, 2))
    same_bits((trainer.state.params, trainer.state.opt), (want[0].train.params, want[0].train.opt))
    assert replace(metrics, seconds=0.0) == replace(want[1], seconds=0.0)


CASES: dict[str, Any] = {
    "usual": lambda: {},
    "weights": lambda: {"weight": lambda x: x.numel(), "accumulate": 3},
    "merged": lambda: {"replica_sync": mf.replicas.diloco(2)},
    "own hop": lambda: {"replica_sync": mf.replicas.reduced_by(mf.sync_replicas)},
}


def as_a_trainer(layout: Layout, case: str) -> None:
    groups, given = groups_of(layout), CASES[case]()
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    guard = mf.optim.Guard(mf.optim.dynamic_scale(8.0), max_norm=0.1)
    program = Program(model, loss)
    params, buffers = program.take()
    twin = mf.shard(params, groups)
    trainer = mf.Trainer(
        model, mf.optim.adamw(1e-2), groups, loss=loss, guard=guard, params=twin, **given
    )
    options = pure.StepOptions(program, groups, groups, **given)
    shards = mf.shard(params, groups)
    sync = options.replica_sync.init(shards, groups)
    state = pure.RunState(mf.init_state(shards, mf.optim.adamw(1e-2), buffers=buffers), sync, guard)
    step = copied()["train_step"]
    for k in range(4):
        x = random(10 * k + groups.rank, 6, 4) * (float("inf") if k == 2 else 1.0)
        want = trainer.step(x)
        state, metrics = step(options, state, x)
        assert torch.equal(metrics.loss, want.loss) or k == 2
        assert (
            (metrics.step, metrics.accepted) == (want.step, want.accepted) == (k + (k < 2), k != 2)
        )
    same_bits((state.train.params, state.train.opt), (trainer.state.params, trainer.state.opt))
    same_bits((state.train.buffers, state.sync), (trainer.state.buffers, trainer.sync_state))
    assert state.guard == trainer.guard


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [ALONE, FOUR], ids=str)
@pytest.mark.short("2x2-p2-merged")
def test_a_copy_takes_the_steps_of_a_trainer(ranks, layout: Layout, case: str) -> None:
    ranks(layout.world_size).run(as_a_trainer, layout, case)
