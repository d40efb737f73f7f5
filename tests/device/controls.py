"""Programs without mics_fn: what the checker says of torch alone."""

import torch
import torch.distributed as dist
from models import Forked, Net, batches, loss_of
from simcuda import nccl, torch_cuda
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

Found = tuple[list[str], int, int]  # races, elements trained, collectives


def _train(model: nn.Module) -> Found:
    device = torch.device("cuda", dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch_cuda.reset()
    for batch in batches(device):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    numel = sum(p.numel() for p in model.parameters())
    return torch_cuda.races(), numel, len(nccl.issued)


def two_streams_of_torch() -> Found:
    """A model on two compute streams, on each rank alone."""
    return _train(Forked().to(f"cuda:{dist.get_rank()}"))


def fsdp2() -> Found:
    """FSDP2, each block a unit of its own."""
    return _train(_sharded(Net()))


def fsdp2_on_two_streams() -> Found:
    return _train(_sharded(Forked()))


def _sharded(model: Net) -> nn.Module:
    for module in (_fsdp_param, _fsdp_param_group):  # a simulated storage cannot be resized
        for name in ("alloc_storage", "free_storage"):
            if hasattr(module, name):
                setattr(module, name, lambda tensor: None)
    model = model.to(f"cuda:{dist.get_rank()}")
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # FSDP2 refuses ties
    mesh = DeviceMesh("cuda", list(range(dist.get_world_size())))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
