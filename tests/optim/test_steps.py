"""States of different steps are never mixed, and a rank that is behind takes a replica's state."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, same_bits
from torch import Tensor

import mics_fn as mf
from mics_fn import tree

LAYOUTS = [Layout((2,), 1), Layout((2,), 2), Layout((2, 2), 2)]


def new_groups(layout: Layout) -> mf.Groups:
    topology = mf.groups.Topology(layout.sizes)
    return mf.make_groups(layout.partition_size, topology=topology, timeout_s=20)


def started(groups: mf.Groups) -> Any:
    params = {"b": torch.ones(3), "w": torch.ones(5, 3)}
    buffers = {"mean": torch.zeros(2, 3).t()}
    shards = mf.shard(params, groups, bucket_bytes=50)
    return mf.init_state(shards, mf.optim.adamw(0.1), buffers=buffers)


def stepped(state: Any, groups: mf.Groups, donate: bool = False) -> Any:
    def loss_fn(shards: Any) -> Tensor:
        full = mf.gather(shards, groups.hierarchy)
        return (full["w"].sin() + full["b"]).sum() * (1 + dist.get_rank())

    grads = torch.func.grad(loss_fn)(state.params)
    buffers, grads = {"mean": state.buffers["mean"] + 1}, mf.reduce_grads(grads, groups)
    if donate:  # gradients that were changed tell of new groups, too
        grads = mf.optim.Guard(max_norm=1.0).judge(grads, groups, donate=True).grads
    state = mf.opt_step(state, grads, donate=donate)
    return replace(state, buffers=buffers)


def tensors(state: Any) -> list[Tensor]:
    return [x.clone() for x in tree.flatten(state)[0] if isinstance(x, Tensor)]


def torn(layout: Layout, donate: bool, behind: list[int]) -> tuple[str, str]:
    """The error of a step by hand, and that of a heal; ranks that are behind missed one step."""
    rank = dist.get_rank()
    with new_groups(layout) as groups:
        state = old = started(groups)
        for _ in range(3):
            old, state = state, stepped(state, groups)
        wanted = tensors(state)
    with new_groups(layout) as groups:
        mine = old if rank in behind else state
        kept = tensors(mine)
        with pytest.raises(mf.errors.LostStateError) as caught:
            stepped(mine, groups, donate)
        same_bits(tensors(mine), kept)
        try:
            mine = mf.same_step(mine, groups, heal=True)
        except mf.errors.LostStateError as error:
            return str(caught.value), str(error)
        assert mine.step == 3
        same_bits(tensors(mine), wanted)
        same_bits(tensors(stepped(mine, groups)), tensors(stepped(state, groups)))
        return str(caught.value), ""


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.covering
def test_a_step_on_new_groups_names_the_ranks_that_are_behind(ranks, layout, donate):
    n, p = layout.world_size, layout.partition_size
    found = ranks(n).run(torn, layout, donate, [1])
    others = {2: "rank 0", 4: "ranks 0, 2, 3"}[n]
    lines = [f"  {others}: step 3", "  rank 1: step 2"]
    fix = "same_step(state, groups, heal=True) takes the newer state from a replica"
    lost = "no replica has all of the newest state: go back to one that all ranks have saved"
    text = "\n".join(
        ["opt_step: ranks are at different steps", *lines, f"  fix: {lost if p == n else fix}"]
    )
    assert [error for error, _ in found] == [text] * n
    healed = text.replace("opt_step", "same_step") if p == n else ""
    assert [error for _, error in found] == [healed] * n


def test_what_no_replica_has_cannot_be_healed(ranks):
    found = ranks(4).run(torn, LAYOUTS[2], False, [1, 3])
    assert all("no replica has all of the newest state" in error for _, error in found)
    assert all(error == "" for _, error in ranks(4).run(torn, LAYOUTS[2], False, [0, 1]))


def put_in_place(layout: Layout) -> str:
    """A Trainer that was given an older state on one rank."""
    with new_groups(layout) as groups:
        torch.manual_seed(0)
        trainer = mf.Trainer(torch.nn.Linear(2, 2), mf.optim.sgd(0.1), groups)
        trainer.state = replace(trainer.state, step=7 * dist.get_rank())
        with pytest.raises(mf.errors.LostStateError) as caught:
            trainer.step(torch.ones(2, 2))
        return str(caught.value)


def test_a_trainer_compares_the_state_that_it_begins_with(ranks):
    for found in ranks(2).run(put_in_place, LAYOUTS[1]):
        assert found.startswith("same_step: ranks are at different steps\n  rank 0: step 0\n")
