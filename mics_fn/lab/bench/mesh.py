"""`bench step --mesh`: the same steps with the GPT cut over pairs of ranks, by torch's DTensors.

Every peer trains the model that `parallelized` makes, with the norm of all its gradients limited,
on data-parallel ranks that are a half of the job.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from mics_fn.errors import PlanError
from mics_fn.lab.models import GPT, Attention

PARTS, MAX_NORM = 2, 1.0
KINDS = ("tp", "sp")  # norms and embeddings are copies that see all tokens, or half of them


class AttentionByHead(Attention):
    """The same with the rows of `qkv` in the order of heads, so that a part has some of them."""

    def forward(self, x: Tensor) -> Tensor:
        width = self.out.in_features // self.num_heads
        heads = self.qkv(x).unflatten(2, (-1, 3, width))
        q, k, v = heads.permute(3, 0, 2, 1, 4)  # each [batch, head, time, width]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def data_ranks(ranks: int) -> int:
    """Return how many ranks have batches of their own."""
    if ranks % PARTS:
        raise PlanError(f"--mesh: {ranks} ranks are no pairs", fix="launch an even number of them")
    return ranks // PARTS


@cache
def mesh_of(device_type: str, p: int) -> DeviceMesh:
    """Make the mesh of all ranks, in replicas of p times `PARTS` ranks."""
    sizes = (dist.get_world_size() // PARTS // p, p, PARTS)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard", "tp"))


def parallelized(model: GPT, mesh: DeviceMesh, kind: str) -> GPT:
    """Cut the attention and the MLP of each block over a mesh; for "sp" also the sequence."""
    whole, cut = Replicate(), Shard(1)
    between, norm = (cut, SequenceParallel()) if kind == "sp" else (whole, None)
    up, down = ColwiseParallel(input_layouts=between), RowwiseParallel(output_layouts=between)
    plan: dict[str, Any] = {"attention.qkv": up, "attention.out": down, "mlp.0": up, "mlp.2": down}
    if norm:
        plan |= {"norm1": norm, "norm2": norm}
    for block in model.blocks:
        cast(Any, block.attention).__class__ = AttentionByHead
        parallelize_module(block, mesh, plan)
    if norm:
        rows = {"input_layouts": whole}
        tokens = RowwiseParallel(output_layouts=cut, **rows)
        places = RowwiseParallel(output_layouts=Shard(0), **rows)
        head = ColwiseParallel(input_layouts=cut, output_layouts=whole)
        plan = {"tokens": tokens, "positions": places, "norm": norm, "head": head}
        parallelize_module(model, mesh, plan)
    return model


def clip(params: Iterable[nn.Parameter], max_norm: float = MAX_NORM) -> None:
    """Limit the norm of gradients, as `clip_grad_norm_`, which takes those of one mesh alone."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
    norms = [nn.utils.get_total_norm([p.grad for p in own]) for own in by_mesh.values()]  # pyright: ignore
    norm = torch.stack([x.full_tensor() for x in norms]).norm()  # pyright: ignore
    for own in by_mesh.values():
        nn.utils.clip_grads_with_norm_(own, max_norm, norm)
