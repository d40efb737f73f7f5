"""`bench step --mesh`: the same steps with the GPT cut over pairs of ranks, by torch's DTensors.

Every peer trains the model that `parallelized` makes, with the norm of all its gradients limited.
For that norm a `Trainer` sends one message of 32 bytes over the parts, with what else a step has to
add up; FSDP2 reduces over two dimensions of the mesh.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PARTS, MAX_NORM = 2, 1.0


@cache
def mesh_of(device_type: str, p: int, parts: int) -> Any:
    """Make the mesh of all ranks, in replicas of p times `parts` ranks."""
    sizes = (dist.get_world_size() // parts // p, p, parts)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard", "tp"))


def parallelized(model: Any, mesh: Any) -> Any:
    """Cut the attention and the MLP of each block of a GPT over a mesh."""
    up, down = ColwiseParallel(), RowwiseParallel()
    plan = {"attention.qkv": up, "attention.out": down, "mlp.0": up, "mlp.2": down}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def clip(params: Iterable[Any], max_norm: float = MAX_NORM) -> None:
    """Limit the norm of gradients, as `clip_grad_norm_`, which takes those of one mesh alone."""
    by_mesh: dict[Any, list[Any]] = {}
    for param in params:
        by_mesh.setdefault(param.device_mesh, []).append(param)
    norms: list[Any] = [nn.utils.get_total_norm([p.grad for p in x]) for x in by_mesh.values()]
    norm = torch.stack([x.full_tensor() for x in norms]).norm()
    for own in by_mesh.values():
        nn.utils.clip_grads_with_norm_(own, max_norm, norm)
