"""This process among all: start torch.distributed, find the ranks, device and backend to use."""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mics_fn import _torch
from mics_fn.errors import GroupsError, PlanError, message
from mics_fn.groups.environment import Launch, launched_world_size, read_launch
from mics_fn.groups.topology import fold_ranks


def init_distributed(
    *, device: str | torch.device = "auto", timeout_s: float = 300.0
) -> torch.device:
    """Start torch.distributed from the launcher's environment, and choose this rank's device.

    Reads torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, else those of Open
    MPI, MVAPICH, MPICH, Intel MPI, Cray PALS, jsrun or Flux (as OMPI_COMM_WORLD_RANK), with
    MASTER_ADDR and MASTER_PORT, else Slurm's SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID. Does
    nothing but choose the device where torch.distributed is initialised already, or nothing was
    launched.

    Args:
      device: "auto" takes CUDA if every rank of the node has a GPU, else the CPU. Say "cuda" where
        the launcher shows each process its own GPU only.
      timeout_s: bound of the start, and of collectives on the default group, in seconds.

    Returns:
      The device, set as the current one if it is CUDA.

    Communication: the start of torch.distributed: NCCL and gloo on CUDA, gloo on the CPU.

    Memory: none.

    Raises:
      GroupsError: the launcher's variables are incomplete; it says which line to add.

    Example:
      >>> init_distributed(device="cpu")
      device(type='cpu')
    """
    launch = None if dist.is_initialized() else read_launch(os.environ)
    chosen = _own_device(torch.device("cuda") if device == "auto" else torch.device(device), launch)
    if device == "auto" and not _has_gpus(launch):
        chosen = torch.device("cpu")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            fix = "pass device='auto' or 'cpu', or install a torch with CUDA"
            raise GroupsError(message("init_distributed: device='cuda' finds no CUDA", fix=fix))
        torch.cuda.set_device(chosen)
    if launch is None:
        return chosen
    # env:// also finds a store that torchrun's agent keeps; the others have none.
    meeting = f"tcp://{launch.master_addr}:{launch.master_port}"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
        init_method="env://" if launch.source == "torchrun" else meeting,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return chosen


def _own_device(device: torch.device, launch: Launch | None) -> torch.device:
    """A CUDA device without a number gets this process's."""
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    if launch is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", launch.local_rank % torch.cuda.device_count())


def _has_gpus(launch: Launch | None) -> bool:
    """Whether each rank of this node has a GPU; the same answer on all of them."""
    if not torch.cuda.is_available():
        return False
    if launch is None:
        return not dist.is_initialized() or "nccl" in dist.get_backend_config()
    return (launch.node_size or launch.world_size) <= torch.cuda.device_count()


def require_distributed() -> bool:
    """Whether torch.distributed runs; False for a world of one without it.

    Raises:
      GroupsError: several ranks were launched, and it does not run.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    size = launched_world_size(os.environ)
    if size > 1:
        what = f"make_groups: {size} ranks were launched, but torch.distributed is not initialised"
        fix = "call mics_fn.init_distributed() or torch.distributed.init_process_group() first"
        raise GroupsError(message(what, fix=fix))
    return False


def universe_of(
    ranks: Sequence[int] | None, mesh: DeviceMesh | None, rank: int, world_size: int
) -> tuple[int, ...]:
    """The global ranks that share the data-parallel job with this rank, by position.

    Raises:
      PlanError: they are no distinct ranks of the world, or do not contain this one.
    """
    if mesh is not None and ranks is not None:
        raise PlanError(message("make_groups: ranks= and mesh= are both given", fix="pass one"))
    if mesh is None and ranks is None:
        return tuple(range(world_size))
    if mesh is not None:
        # A sub-mesh shows the part that holds this rank: other dimensions stay outside.
        found, given = tuple(mesh.mesh.flatten().tolist()), "mesh="
    else:
        found, given = tuple(ranks or ()), "ranks="
    wrong = [other for other in found if type(other) is not int or not 0 <= other < world_size]
    if wrong or len(set(found)) != len(found):
        what = (
            f"make_groups: {given}{list(found)} are not distinct ranks of a world of {world_size}"
        )
        raise PlanError(message(what, fix=f"give each of 0 to {world_size - 1} at most once"))
    if rank not in found:
        what = f"make_groups: rank {rank} is not one of {given}{fold_ranks(found) or []}"
        fix = "give on each rank the ranks that it shares groups with, itself among them"
        raise PlanError(message(what, fix=fix))
    if not _torch.keeps_rank_order and list(found) != sorted(found):
        what = f"make_groups: {given}{list(found)} do not ascend, and this torch sorts ranks"
        raise PlanError(message(what, fix="let them ascend, or take a newer torch"))
    return found


def device_and_backend(
    device: str | torch.device | None, mesh: DeviceMesh | None, backend: str | None
) -> tuple[torch.device, str]:
    """The device that tensors of the groups live on, and the backend that serves it.

    Raises:
      GroupsError: the default group has no backend for that device.
    """
    if not dist.is_initialized():
        own = torch.get_default_device() if device is None else torch.device(device)
        return _own_device(own, None), ""
    config = backend or dist.get_backend_config()
    if device is None and mesh is not None:
        device = mesh.device_type
    if device is None:
        device = "cuda" if "nccl" in config and torch.cuda.is_available() else "cpu"
    chosen = _own_device(torch.device(device), None)
    if backend is not None:
        return chosen, backend
    # As in "cpu:gloo,cuda:nccl". Naming one keeps torch from making idle groups for the others.
    of_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    if chosen.type not in of_device:
        what = f"make_groups: the default group serves {config}, not {chosen.type}"
        fix = "pass device= or backend=, or init with 'cpu:gloo,cuda:nccl'"
        raise GroupsError(message(what, fix=fix))
    return chosen, of_device[chosen.type]
