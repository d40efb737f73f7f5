"""A rank that is killed while it writes its states to files, and what the others make of it."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from cases import random, same_bits
from jobs import run_job
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import optim, testing, tree
from mics_fn.errors import PeerFailed
from mics_fn.offload import Scratch
from mics_fn.optim.flat import by_leaf

STEPS, KILLED_AT, WHO = 4, 3, 1
LIMIT_S = 25.0  # for what takes about a second where nothing else runs
ADAMW = optim.adamw(1e-2)


def batch(step: int, rank: int) -> Tensor:
    return random(10 * step + rank, 6, 40)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 3))


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Loop:
    """A loop of `opt_step` on sums whose buckets are still reduced, which saves each step."""

    def __init__(self, rank: int, folder: str, resume: bool) -> None:
        self.rank, self.groups = rank, mf.make_groups(2, timeout_s=LIMIT_S)
        self.folder, self.params = f"{folder}/saved", dict(net().named_parameters())
        shards = mf.shard(self.params, self.groups, bucket_bytes=5_000)
        self.state = mf.init_state(shards, ADAMW, where=f"states=disk:{folder}/scratch")
        if resume:
            found = mf.checkpoint.load(self.folder, self.state, self.groups, donate=True)
            self.state = found.state

    def step(self) -> None:
        total, model = mf.GradSum(), net()
        x = batch(self.state.step, self.rank)
        with mf.defer(self.state.params, self.groups, mf.on_demand(), into=total) as full:
            total.backward(loss_of(lambda x: torch.func.functional_call(model, full, (x,)), x))
        self.state = mf.opt_step(self.state, total, donate=True)
        total.release()
        mf.checkpoint.save(self.folder, self.state, self.groups, step=self.state.step)


def trained(rank: int, folder: str, dies: bool, resume: bool) -> Any:
    """What a rank comes to: its error and the seconds until then, or its state."""
    mf.init_distributed()
    loop, started = Loop(rank, folder, resume), 0.0
    begun = loop.state.step
    try:
        while loop.state.step < STEPS:
            started = time.monotonic()
            now = dies and loop.state.step + 1 == KILLED_AT
            fault = testing.inject(WHO, loop.state.step + 1, "offload: write", "kill")
            with fault if now else nullcontext():
                loop.step()
    except PeerFailed as error:
        files = list(Path(folder, "scratch").glob("*.scratch"))
        told = error.kind, error.rank, time.monotonic() - started, len(files)
        del loop, error
        return told
    values = tree.map_leaves(lambda x: x + 0, (loop.state.params, by_leaf(loop.state.opt)))
    del loop
    return begun, [x for x in tree.flatten(values)[0] if isinstance(x, Tensor)]


def test_the_others_hear_of_it_and_a_new_job_goes_on_to_the_same_bits(tmp_path):
    plain, folder = f"{tmp_path}/plain", f"{tmp_path}/killed"
    want = run_job(2, trained, plain, False, False, limit_s=90.0)
    lost = run_job(2, trained, folder, True, False, limit_s=90.0)
    assert lost[WHO].status == -9
    (told, other, seconds, _), status = lost[1 - WHO].value, lost[1 - WHO].status
    assert (told, other, status) == ("killed", WHO, 0)
    assert seconds < LIMIT_S
    (left,) = Path(folder, "scratch").glob("*.scratch")  # that of the rank that was killed
    Scratch(f"{folder}/scratch").close()
    assert not left.exists()
    again = run_job(2, trained, folder, False, True, limit_s=90.0)
    for rank in range(2):
        begun, found = again[rank].value
        assert begun == KILLED_AT - 1
        same_bits(found, want[rank].value[1])
    assert not list(Path(folder, "scratch").glob("*.scratch"))
