"""A small model in two parts, whose numbers are exact, and the same in one process.

One layer is cut as in tensor parallelism, its first matrix by rows and its second by columns, and a
scale in front of it is a copy. Parts meet in sums over `Groups.communicators`, which a `reset`
makes anew. All values are small multiples of powers of two in float64, so every sum is exact, in
any order.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import mics_fn as mf
from mics_fn import collectives
from mics_fn.groups import current

F64 = torch.float64
WIDTH, HIDDEN, SAMPLES, RATE = 3, 8, 4, 2.0**-5
CUT = "up: 0; down: 1"


def whole(seed: int, *shape: int) -> Tensor:
    """Small whole numbers."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(F64)


FULL = {
    "scale": whole(0, WIDTH),
    "up": whole(1, HIDDEN, WIDTH),
    "down": whole(2, WIDTH, HIDDEN),
    "bias": whole(3, WIDTH),
}


def mesh_of(parts: int = 2, stages: int = 1) -> DeviceMesh:
    """The ranks as stages, data-parallel ranks and parts; without groups of torch's own."""
    n = dist.get_world_size()
    ranks = torch.arange(n).view(stages, n // parts // stages, parts)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "dp", "tp"), _init_backend=False)


def groups_in_parts(p: int, parts: int = 2, stages: int = 1, **how: Any) -> mf.Groups:
    """Groups of that mesh."""
    given: dict[str, Any] = {"timeout_s": 20, "mesh": mesh_of(parts, stages)}
    given |= {"model": "tp", "stages": "pp", "cut": CUT, "partition_size": p}
    return mf.make_groups(**given | how)


def piece(name: str, full: Tensor, part: int, parts: int = 2) -> Tensor:
    """What one part has of a leaf."""
    dims = {"up": 0, "down": 1}
    return full.chunk(parts, dims[name])[part].clone() if name in dims else full.clone()


def params_of(groups: mf.Groups, full: dict[str, Tensor] = FULL) -> dict[str, Tensor]:
    """What this rank's part has of all leaves."""
    parts: Any = groups.model and groups.model.parts
    return {name: piece(name, x, parts.rank, parts.size) for name, x in full.items()}


def batch_of(groups: mf.Groups, step: int, which: int | None = None) -> tuple[Tensor, Tensor]:
    """The samples of one place in the data-parallel ranks: equal in all parts."""
    which = groups.position if which is None else which
    seed = 100 * step + which
    return whole(10_000 + seed, SAMPLES, WIDTH), whole(20_000 + seed, SAMPLES, WIDTH)


class _Sum(torch.autograd.Function):
    """The sum over parts, in the forward or in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Any, backward: bool) -> Tensor:
        ctx.how = groups, backward
        return x.clone() if backward else summed(x, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        groups, backward = ctx.how
        return (summed(grads[0], groups) if backward else grads[0]), None, None


def summed(x: Tensor, groups: Any) -> Tensor:
    """The sum of a tensor over the parts, in new memory."""
    out, comm = x.detach().clone(), current(groups).model.parts
    if comm.size > 1:
        call = partial(dist.all_reduce, out)
        collectives.start(comm, call, [out], name="sum", sent_bytes=out.nbytes).wait()
    return out


def loss_in_parts(groups: Any, params: Any, batch: Any) -> Tensor:
    """The loss, by all parts together."""
    x, target = batch
    hidden = _Sum.apply(x * params["scale"], groups, True) @ params["up"].T
    out = _Sum.apply(hidden @ params["down"].T, groups, False)
    return ((out + params["bias"]) * target).sum() / len(x)


def loss_of_one(params: Any, batch: Any) -> Tensor:
    """The same by one process that has all."""
    x, target = batch
    out = (x * params["scale"]) @ params["up"].T @ params["down"].T + params["bias"]
    return (out * target).sum() / len(x)


def by_one_process(steps: int, places: int, rate: float = RATE) -> dict[str, Tensor]:
    """The full parameters after some steps of plain descent on the samples of all places."""
    params = {name: x.clone().requires_grad_() for name, x in FULL.items()}
    for step in range(steps):
        losses = [loss_of_one(params, batch_of(None, step, place)) for place in range(places)]  # pyright: ignore
        grads = torch.autograd.grad(torch.stack(losses).mean(), list(params.values()))
        for x, grad in zip(params.values(), grads, strict=True):
            x.data -= rate * grad
    return {name: x.detach() for name, x in params.items()}


def trainer_in_parts(groups: mf.Groups, **options: Any) -> mf.Trainer:
    """A trainer of it."""
    given: dict[str, Any] = {"optimizer": mf.optim.sgd(RATE), "params": params_of(groups)} | options
    optimizer = given.pop("optimizer")
    return mf.Trainer(partial(loss_in_parts, groups), optimizer, groups, **given)
