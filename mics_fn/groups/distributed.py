"""Start torch.distributed, and choose the ranks, the device and the backend of the groups."""

import os
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from mics_fn import _device, _torch, checks, errors, spans
from mics_fn.groups import environment
from mics_fn.groups.group_state import hooks
from mics_fn.groups.rendezvous import meet_once, part_of_start
from mics_fn.groups.topology import fold_ranks
from mics_fn.store import StoreLost
from mics_fn.threads import bounded

# Which accelerator a rank uses, and whether another rank uses the same one.


class Machine:
    """The accelerators that this process sees."""

    def kind(self) -> str:
        """Their type, such as "cuda"; "cpu" if there are none with a backend of their own."""
        found = torch.accelerator.current_accelerator(check_available=True)
        kind = "cpu" if found is None else found.type
        return (
            kind if dist.Backend.default_device_backend_map.get(kind, "gloo") != "gloo" else "cpu"
        )

    def count(self) -> int:
        """How many of them this process sees."""
        return torch.accelerator.device_count()

    def use(self, device: torch.device) -> None:
        """Make one of them the current one."""
        torch.accelerator.set_device_index(device)

    def uuid(self, device: torch.device) -> str:
        """Return the UUID of an accelerator, if torch knows it."""
        properties = torch.get_device_module(device).get_device_properties(device)
        return str(getattr(properties, "uuid", ""))


machine = Machine()  # all that this wing asks about hardware; tests put another one here


def device_of(device: Any) -> tuple[torch.device, str]:
    """The device that an argument means, and why this process cannot use it."""
    if not isinstance(device, str | torch.device):
        text = f"{checks.given('device', device)}, expected the name of a device"
        return torch.device("cpu"), text
    try:
        wanted = torch.device(device)
    except RuntimeError:
        return torch.device("cpu"), f"device={device!r}, which torch does not know"
    if wanted.type == "meta":
        return torch.device("cpu"), f"device={str(device)!r}, which holds no data"
    if not _device.is_async(wanted):
        return wanted, ""
    count = machine.count() if machine.kind() == wanted.type else 0
    if (wanted.index or 0) < count:
        return wanted, ""
    return wanted, f"{wanted} is asked for, and this process sees {count} devices of its kind"


def backends_of(config: str) -> dict[str, str]:
    """The backend of each type of device, from "cpu:gloo,cuda:nccl" or from "nccl" alone."""
    if ":" not in config:
        return dict.fromkeys(dist.Backend.backend_capability.get(config, ()), config)
    return dict(part.split(":", 1) for part in config.split(","))


class Spot(NamedTuple):
    """Description of a rank's device that is sent to the other ranks."""

    device: str  # such as "cuda:0"
    host: str
    unit: str  # equal on ranks that share an accelerator; empty if that does no harm


def spot_of(device: torch.device, *, alone: bool) -> Spot:
    """Where this rank computes.

    Args:
      device: its device.
      alone: whether the other ranks must use other devices, as every backend but gloo requires.
    """
    host, unit = socket.gethostname(), ""
    if _device.is_async(device) and alone:
        # A number alone says nothing where each process sees other devices.
        masks = sorted(x for x in os.environ.items() if x[0].endswith(("VISIBLE_DEVICES", "_MASK")))
        unit = machine.uuid(device) or f"{device} of {host}, {masks}"
        # NCCL accepts ranks that share a GPU if this tells them apart, as people do in tests.
        unit = " ".join((unit, os.environ.get("NCCL_HOSTID", ""))).strip()
    return Spot(str(device), host, unit)


def check_distinct(verb: str, spots: Mapping[int, Spot]) -> None:
    """Raise GroupsError if several ranks share an accelerator; NCCL would fail later, or hang."""
    users: dict[str, list[int]] = {}
    for rank, spot in spots.items():
        users.setdefault(spot.unit or f"rank {rank}", []).append(rank)
    lines = []
    for unit, ranks in users.items():
        if len(ranks) > 1:
            spot = spots[ranks[0]]
            lines.append(f"{errors.name_ranks(ranks)} on {spot.host}: {spot.device}, {unit}")
    if lines:
        fix = "start one rank per device, show each rank one of its own (srun --gpus-per-task=1), "
        fix += "or pass device='cpu'; to share one in a test, set another NCCL_HOSTID on each rank"
        what = f"{verb}: several ranks use one device"
        raise errors.GroupsError(what, [*lines[:8], *(["..."] if len(lines) > 8 else [])], fix)


def init_distributed(
    *, device: str | torch.device = "auto", cpu_groups: bool = False, timeout_s: float = 600.0
) -> torch.device:
    """Start torch.distributed from the launcher's environment, and choose this rank's device.

    It reads torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without those,
    Open MPI's OMPI_COMM_WORLD_RANK and the like, together with MASTER_ADDR and MASTER_PORT; without
    those, Slurm's SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID. Under any other launcher set the
    five variables of torchrun. On several nodes Slurm needs this line before srun:
    `export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)`. If
    torch.distributed is initialised already, or no launcher started this process, it only chooses
    the device. A process that takes the place of a rank that was lost does not wait for the others:
    see `reset`.

    Args:
      device: "auto" takes an accelerator if this process sees one, else the CPU. Of several that it
        sees, it takes the one with its number on the node; all ranks must get different ones.
      cpu_groups: whether the default group also has gloo, for tensors on the CPU. Otherwise it has
        only the backend of the device.
      timeout_s: bound in seconds of the start, and of collectives on the default group.

    Returns:
      The device, which is also made the current one if it is an accelerator.

    Communication: the start of torch.distributed, and a few small messages through its store.

    Raises:
      GroupsError: some of the launcher's variables are missing, the store cannot be held, a rank
        does not have its device, or several have the same; the text names the ranks and the fix.
      DesyncError: some ranks would use the CPU and others would not.
      PlanError: `timeout_s` is not a number above 0, or `cpu_groups` is not a bool.
      CollectiveError: some rank did not call it in time.

    Example:
      >>> init_distributed(device="cpu")
      device(type='cpu')
    """
    checks.number("init_distributed", "timeout_s", timeout_s, above=0, below=1e8)
    checks.flag("init_distributed", "cpu_groups", cpu_groups)
    if spans.observers:
        spans.passing("start: init_distributed")
    launch = None if dist.is_initialized() else environment.read_launch(os.environ)
    deadline = time.monotonic() + timeout_s
    chosen, problem = _choose(device, launch)
    own = _device.backend(chosen)
    mine = {"asked": str(device), "problem": problem, "spot": spot_of(chosen, alone=not problem)}
    if launch is None:
        _judge_devices({0: mine})
    else:
        store, back = _agreed_store(launch, mine, timeout_s, deadline)
    if _device.is_async(chosen):
        machine.use(chosen)
    if launch is None:
        return chosen
    own_failures(own, begun=False)
    backend = f"cpu:gloo,{chosen.type}:{own}" if cpu_groups and own != "gloo" else own
    if back:
        _torch.start_alone(backend, store, launch.rank, launch.world_size, timeout_s)
        return chosen
    how = {"store": store, "rank": launch.rank, "world_size": launch.world_size}
    limit = timedelta(seconds=timeout_s)
    start = partial(dist.init_process_group, backend, timeout=limit, **how)
    if own == "gloo":  # it connects the ranks, in C++
        try:
            bounded(start, deadline)
        except (RuntimeError, TimeoutError) as error:
            raise _not_connected(launch, timeout_s, error) from error
    else:
        start()
    return chosen


def _choose(
    device: str | torch.device, launch: environment.Launch | None
) -> tuple[torch.device, str]:
    """Choose this rank's device; return the device and a problem, if any."""
    if device == "auto" and dist.is_initialized():
        device = _served_kind(dist.get_backend_config())
    wanted, problem = device_of(machine.kind() if device == "auto" else device)
    if problem or not _device.is_async(wanted) or wanted.index is not None:
        return wanted, problem
    near = launch and torch.device(wanted.type, launch.local_rank % machine.count())
    return near or _device.with_index(wanted), ""


def _agreed_store(
    launch: environment.Launch, mine: dict[str, Any], timeout_s: float, deadline: float
) -> tuple[Any, bool]:
    """The store of the launch, once all ranks found their devices fit for a start.

    The second value is whether this process comes back into a job that has begun long ago.
    """
    rank, size = launch.rank, launch.world_size
    limit = timedelta(seconds=timeout_s)

    def connect() -> Any:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # that of torchrun's agent
            return next(rendezvous("env://", rank, size, timeout=limit))[0]
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            launch.master_addr,
            launch.master_port,
            size,
            is_master=rank == 0,
            timeout=limit,
            wait_for_workers=False,  # `meet_once` waits for them, and names those that are missing
            multi_tenant=True,
        )

    try:
        store = _torch.prefixed(bounded(connect, deadline), "mics_fn")
    except (RuntimeError, TimeoutError, OSError) as error:
        raise _no_store(launch, timeout_s, error) from error
    lost = partial(_no_store, launch, timeout_s)
    with hooks.enter(store, rank, size, timeout_s, lost) as (served, start):
        if start is not None:
            _judge_devices({rank: mine})
            return part_of_start(store, start), True
        wait = {"verb": "init_distributed", "timeout_s": timeout_s, "deadline": deadline}
        key, *_ = meet_once(served, range(size), rank, mine, _judge_devices, **wait)
    return part_of_start(store, int(key.rpartition("/")[2])), False


def _no_store(launch: environment.Launch, timeout_s: float, error: Exception) -> errors.MicsError:
    """The error of a rank that cannot reach the store."""
    first = errors.first_line(error, f"no answer within {timeout_s:g} s")
    where = f"{launch.master_addr}:{launch.master_port}"
    what = f"init_distributed: rank {launch.rank} cannot start with the store at {where}"
    fix = "start rank 0, or torchrun, on the host of MASTER_ADDR and with a free MASTER_PORT"
    timed_out = isinstance(error, TimeoutError | StoreLost) or "timed out" in first
    return (errors.CollectiveError if timed_out else errors.GroupsError)(
        errors.message(what, [first], fix)
    )


def _not_connected(
    launch: environment.Launch, timeout_s: float, error: Exception
) -> errors.CollectiveError:
    """The error of a rank that has met the others, and that gloo could not connect with them."""
    first = errors.first_line(error, f"they did not connect within {timeout_s:g} s")
    what = f"init_distributed: rank {launch.rank} found the store, but gloo could not connect it"
    # A host's name often leads to its own loopback address.
    fix = "look whether another rank has ended, and set GLOO_SOCKET_IFNAME, on each node, to the"
    fix += " interface that the other nodes reach, such as eth0; `ip -br addr` lists interfaces"
    return errors.CollectiveError(f"{what} with the other ranks", [first], fix)


def _judge_devices(found: Mapping[int, dict[str, Any]]) -> None:
    """Raise an error if the devices of all ranks do not fit together."""
    spots = {rank: Spot(*mine["spot"]) for rank, mine in found.items()}
    odd = [rank for rank, mine in found.items() if mine["problem"]]
    wrong = {rank: f"{found[rank]['problem']}, on {spots[rank].host}" for rank in odd}
    if wrong:
        what = "init_distributed: a rank does not have the device that was asked for"
        fix = "pass device='auto' or 'cpu', or use a torch and a driver for this device"
        raise errors.GroupsError(what, errors.rank_lines(wrong), fix)
    if len({spot.device.partition(":")[0] for spot in spots.values()}) > 1:
        texts = {
            rank: f"{spot.device.partition(':')[0]} on {spot.host} (device={found[rank]['asked']})"
            for rank, spot in spots.items()
        }
        fix = "look why some ranks see no accelerator, or pass the same device= on all of them"
        raise errors.disagreement(
            "init_distributed: ranks use different kinds of devices", texts, fix
        )
    check_distinct("init_distributed", spots)


def own_failures(backend: str, *, begun: bool) -> None:
    """Set what NCCL and torch's watchdog read, and warn of what forbids that; see NCCL_SETTINGS.

    Gathers and reductions are in flight at once, on communicators of their own. If two ranks start
    them in different orders, each can fill its GPU with a kernel that waits for the other. All
    ranks call them in one order, which NCCL (2.26 or newer) keeps if it is told to; from CUDA 12.3
    on they still overlap.

    Args:
      backend: of the groups.
      begun: whether a group with NCCL may have been made before.
    """
    found = environment.nccl_problems(os.environ, begun=begun) if backend == "nccl" else {}
    for name, problem in found.items():
        if (name, problem) not in _WARNED:
            _WARNED.add((name, problem))
            fix = f"export {name}={_VALUES[name]} before the start, or leave it unset"
            warnings.warn(errors.message(name, [problem], fix), stacklevel=3)


_VALUES = {setting.name: setting.value for setting in environment.NCCL_SETTINGS}
_WARNED = set[tuple[str, str]]()  # of what this process was warned


def _served_kind(config: str) -> str:
    """The accelerator if a backend serves it that does not serve the CPU as well, else the CPU."""
    kind, served = machine.kind(), backends_of(config)
    return kind if served.get(kind) not in (None, served.get("cpu")) else "cpu"


def require_distributed() -> bool:
    """Whether torch.distributed is initialised; a world of one rank does not need it.

    Raises:
      GroupsError: several ranks were launched, but it is not initialised.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    size = environment.launched_world_size(os.environ)
    if size > 1:
        what = f"make_groups: {size} ranks were launched, but torch.distributed is not initialised"
        fix = "call mics_fn.init_distributed() or torch.distributed.init_process_group() first"
        raise errors.GroupsError(what, fix=fix)
    return False


def universe_of(
    ranks: Sequence[int] | None, mesh: DeviceMesh | None, rank: int, world_size: int
) -> tuple[int, ...]:
    """The global ranks of this rank's data-parallel job, by position.

    Raises:
      PlanError: they are not distinct ranks of the world, or this rank is not one of them.
    """
    if mesh is not None and ranks is not None:
        raise errors.PlanError("make_groups: ranks= and mesh= are both given", fix="pass one")
    if mesh is None and ranks is None:
        return tuple(range(world_size))
    if mesh is not None:
        # The tensor of a sub-mesh holds only the ranks that share this rank's other coordinates.
        found, given = tuple(mesh.mesh.flatten().tolist()), "mesh="
    else:
        found, given = tuple([] if ranks is None else ranks), "ranks="
    wrong = [other for other in found if type(other) is not int or not 0 <= other < world_size]
    if wrong or len(set(found)) != len(found):
        world, fix = f"a world of {world_size}", f"give each of 0 to {world_size - 1} at most once"
        what = f"make_groups: {given}{list(found)} are not distinct ranks of {world}"
        raise errors.PlanError(what, fix=fix)
    if rank not in found:
        what = f"make_groups: rank {rank} is not one of {given}{fold_ranks(found) or []}"
        fix = "pass on each rank the ranks that it shares groups with, itself included"
        raise errors.PlanError(what, fix=fix)
    return found


def device_and_backend(
    device: str | torch.device | None, mesh: DeviceMesh | None, backend: str | None
) -> tuple[torch.device, str]:
    """The device of tensors that the groups communicate, and the backend that serves it.

    Raises:
      GroupsError: this process lacks the device, or the default group has no backend for it.
    """
    if device is not None:
        device, problem = device_of(device)
        if problem:
            fix = "pass device='cpu', or use a torch and a driver for this device"
            raise errors.GroupsError(f"make_groups: {problem}", fix=fix)
    if not dist.is_initialized():
        return _device.with_index(torch.get_default_device() if device is None else device), ""
    config = backend or dist.get_backend_config()
    if device is None:
        device = _served_kind(config) if mesh is None else mesh.device_type
    chosen = _device.with_index(torch.device(device))
    if backend is not None:
        return chosen, backend
    # A config such as "cpu:gloo,cuda:nccl" names one backend per device. Groups that are made for
    # one of them keep torch from creating idle communicators for the others.
    of_device = backends_of(config)
    if chosen.type not in of_device:
        what = f"make_groups: the default group serves {config}, not {chosen.type}"
        fix = "pass device= or backend=, or start it with a backend for that device; for the CPU, "
        raise errors.GroupsError(what, fix=f"{fix}init_distributed(cpu_groups=True)")
    return chosen, of_device[chosen.type]
