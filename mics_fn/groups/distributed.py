"""Start torch.distributed, and choose the ranks, the device and the backend of the groups."""

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mics_fn.errors import GroupsError, PlanError, message
from mics_fn.groups.environment import Launch, launched_world_size, read_launch
from mics_fn.groups.topology import fold_ranks


def init_distributed(
    *, device: str | torch.device = "auto", timeout_s: float = 300.0
) -> torch.device:
    """Start torch.distributed from the launcher's environment, and choose this rank's device.

    It reads torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without those,
    the variables of Open MPI, MVAPICH, MPICH, Intel MPI, Cray PALS, jsrun or Flux (such as
    OMPI_COMM_WORLD_RANK), together with MASTER_ADDR and MASTER_PORT; without those, Slurm's
    SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID. On several nodes Slurm needs this line before
    srun: `export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)`. If
    torch.distributed is initialised already, or no launcher started this process, it only chooses
    the device.

    Args:
      device: "auto" takes CUDA if every rank of the node has a GPU, else the CPU. Pass "cuda" if
        the launcher shows each process only its own GPU.
      timeout_s: bound in seconds of the start, and of collectives on the default group.

    Returns:
      The device, which is also made the current one if it is CUDA.

    Communication: the start of torch.distributed, with NCCL and gloo on CUDA, gloo on the CPU.

    Raises:
      GroupsError: some of the launcher's variables are missing; the text names what to add.

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
    # env:// also finds the store of torchrun's agent; other launchers have no such store.
    address = f"tcp://{launch.master_addr}:{launch.master_port}"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
        init_method="env://" if launch.source == "torchrun" else address,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return chosen


def _own_device(device: torch.device, launch: Launch | None) -> torch.device:
    """The device; a CUDA device without an index gets that of this process."""
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    if launch is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", launch.local_rank % torch.cuda.device_count())


def _has_gpus(launch: Launch | None) -> bool:
    """Whether each rank of this node has a GPU; all ranks of the node get the same answer."""
    if not torch.cuda.is_available():
        return False
    if launch is None:
        return not dist.is_initialized() or "nccl" in dist.get_backend_config()
    return (launch.node_size or launch.world_size) <= torch.cuda.device_count()


def require_distributed() -> bool:
    """Whether torch.distributed is initialised; a world of one rank does not need it.

    Raises:
      GroupsError: several ranks were launched, but it is not initialised.
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
    """The global ranks of this rank's data-parallel job, by position.

    Raises:
      PlanError: they are not distinct ranks of the world, or this rank is not one of them.
    """
    if mesh is not None and ranks is not None:
        raise PlanError(message("make_groups: ranks= and mesh= are both given", fix="pass one"))
    if mesh is None and ranks is None:
        return tuple(range(world_size))
    if mesh is not None:
        # The tensor of a sub-mesh holds only the ranks that share this rank's other coordinates.
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
        fix = "pass on each rank the ranks that it shares groups with, itself included"
        raise PlanError(message(what, fix=fix))
    return found


def device_and_backend(
    device: str | torch.device | None, mesh: DeviceMesh | None, backend: str | None
) -> tuple[torch.device, str]:
    """The device of tensors that the groups communicate, and the backend that serves it.

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
    # A config such as "cpu:gloo,cuda:nccl" names one backend per device. Groups that are made for
    # one of them keep torch from creating idle communicators for the others.
    of_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    if chosen.type not in of_device:
        what = f"make_groups: the default group serves {config}, not {chosen.type}"
        fix = "pass device= or backend=, or init with 'cpu:gloo,cuda:nccl'"
        raise GroupsError(message(what, fix=fix))
    return chosen, of_device[chosen.type]
