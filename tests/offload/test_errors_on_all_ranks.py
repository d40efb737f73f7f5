"""An error of one rank's disk is one error on all ranks, and no state is torn without a word."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import random, same_bits
from disks import LIMIT_S, broken, heard
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import optim, tree
from mics_fn.collectives import levels
from mics_fn.errors import DonatedError, FileError, LostStateError, PeerFailed, PeerFileError
from mics_fn.offload import in_file
from mics_fn.optim.flat import by_leaf

SIZES = {"a": (301, 23), "b": (40, 33)}
ADAMW = optim.adamw(1e-2)


def values(seed: int) -> dict[str, Tensor]:
    return {k: random(seed + i, *size) for i, (k, size) in enumerate(SIZES.items())}


def summed(state: Any, groups: mf.Groups) -> Any:
    """Gradients of which all are still to arrive."""
    total = mf.GradSum()
    with mf.defer(state.params, groups, mf.on_demand(live_bytes=0), into=total) as full:
        losses = [x.square().sum() for x in full.values()]
        total.backward(torch.stack(losses).sum())
    return total


def guarded(state: Any, grads: Any, groups: mf.Groups, to: str) -> None:
    guard = optim.Guard(max_norm=1.0, on_nonfinite="skip")
    mf.opt_step(state, guard.judge(grads, groups, donate=True).grads, donate=True)


VERBS: dict[str, Callable[..., Any]] = {
    "opt_step": lambda state, grads, groups, to: mf.opt_step(state, grads),
    "opt_step, donated": lambda state, grads, groups, to: mf.opt_step(state, grads, donate=True),
    "opt_step, arriving": lambda state, grads, groups, to: mf.opt_step(state, grads, donate=True),
    "guarded opt_step, donated, arriving": guarded,
    "move": lambda state, grads, groups, to: mf.move(state, f"states=disk:{to}"),
    "init_state": lambda state, grads, groups, to: mf.init_state(
        state.params, ADAMW, where=f"states=disk:{to}"
    ),
}
FAULTS = ["no room", "cannot read", "cannot write"]


def has(verb: str, fault: str) -> bool:
    """Whether a verb meets a fault: steps in place take no room, and what is made reads nothing."""
    if fault == "no room":
        return "opt_step, " not in verb
    return fault == "cannot write" or verb != "init_state"


def trial(verb: str, fault: str, folder: str) -> tuple[Any, ...]:
    """Rank 1 fails; what this rank heard of it."""
    groups = mf.make_groups(2, timeout_s=LIMIT_S)
    bad = groups.position == 1
    state = mf.init_state(
        mf.shard(values(0), groups, bucket_bytes=10_000), ADAMW, where=f"states=disk:{folder}"
    )
    state = mf.opt_step(state, mf.reduce_grads(values(5), groups, like=state.params), donate=True)
    before = tree.map_leaves(lambda x: x + 0, (state.params, by_leaf(state.opt)))
    grads = mf.reduce_grads(values(9), groups, like=state.params)
    if "arriving" in verb:
        grads = summed(state, groups)

    def call() -> None:
        VERBS[verb](state, grads, groups, f"{folder}/{groups.position}")
        assert not bad
        levels.collect(groups.partition, torch.ones(1))

    found = heard(call, fault, bad, others=PeerFileError)
    assert bad or "mf.reset(groups)" in str(found)
    held = "torn"
    try:
        same_bits((state.params, by_leaf(state.opt)), before)
        held = "whole"
    except (DonatedError, LostStateError, FileError) as error:
        held = type(error).__name__
    if bad or "donated" not in verb:
        assert held == "whole" or (
            "opt_step, " in verb and held in ("DonatedError", "LostStateError")
        ), held
    groups.state.abandon(KeyboardInterrupt())
    first, *lines = str(found).split("\n")
    return found.path, found.leaf, first.partition("offload: ")[2], lines[0]


@pytest.mark.covering
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", VERBS)
def test_all_ranks_raise_the_same_error(ranks, tmp_path, verb, fault):
    if not has(verb, fault):
        return
    told, raised = ranks(2).run(trial, verb, fault, f"{tmp_path}")
    assert told == raised, "the file, the leaf and the cause are those of the rank that failed"
    assert str(tmp_path) in raised[0]
    assert raised[1].startswith("states.")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(40, 60), nn.Linear(60, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(torch.tanh(self.first(x)))).square().mean()


def trained(folder: str, fault: str, overlap: bool, guarded: bool) -> tuple[list[str], Any]:
    """Four steps, of which a guard refuses one at first.

    In the third one the disk of rank 1 fails, and all go on with its replica.
    """
    groups = mf.make_groups(1, timeout_s=LIMIT_S)
    torch.manual_seed(0)
    where = f"states=disk:{folder}" if folder else None
    guard = optim.Guard(max_norm=1.0, on_nonfinite="skip") if guarded else None
    guard = optim.Guard(on_nonfinite="ignore") if overlap else guard
    trainer = mf.Trainer(
        Net(), ADAMW, groups, bucket_bytes=5_000, where=where, overlap_step=overlap, guard=guard
    )
    bad, errors, refused = groups.position == 1, [], not guarded
    while trainer.state.step < 4:
        step = trainer.state.step
        if step == 1 and not refused:
            refused = not trainer.step(random(0, 8, 40) * torch.nan).accepted
        now = bad and step == 2 and fault and not errors
        try:
            with broken(fault if now else ""):
                trainer.step(random(10 * step + groups.position, 8, 40))
        except (FileError, PeerFailed) as error:
            errors.append(type(error).__name__)
            with pytest.raises(mf.MicsError):  # nothing is torn without a word
                trainer.step(random(0, 8, 40))
            trainer.reset()
    moments = [x for x in tree.flatten(trainer.state.opt.moments)[0] if isinstance(x, Tensor)]
    assert all(map(in_file, moments)) is bool(folder)
    values = tree.map_leaves(lambda x: x + 0, (trainer.state.params, by_leaf(trainer.state.opt)))
    trainer.groups.close()
    return errors, values


def check_trained(folder: str, fault: str, overlap: bool, guarded: bool) -> list[str]:
    errors, found = trained(folder, fault, overlap, guarded)
    _, want = trained("", "", False, guarded)
    same_bits(found, want)
    return errors


@pytest.mark.parametrize(
    ("fault", "overlap", "guarded"), [("cannot write", True, False), ("cannot read", False, True)]
)
def test_a_trainer_goes_on_with_its_replicas(ranks, tmp_path, fault, overlap, guarded):
    told, raised = ranks(2).run(check_trained, f"{tmp_path}", fault, overlap, guarded)
    assert raised == ["FileError"]
    assert told == ["PeerFileError"]
