"""Parse what a launcher wrote into the environment: torchrun, Open MPI's mpirun, or Slurm's srun.

[Note: nested launchers] Launchers start each other. For example, mpirun inside a Slurm job starts
its daemons with srun, and the ranks then inherit Slurm's variables of the daemon. So the launcher
that is nearest to the process has precedence: torchrun, then Open MPI, then Slurm. A process that
was started as one of several must never train alone silently, so an incomplete set of variables is
an error, and so are the ranks of another launcher: its script sets the variables of torchrun.
"""

import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from mics_fn.errors import GroupsError


class _Names(NamedTuple):
    """The variables in which a launcher gives each rank its place."""

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str = ""  # of Slurm: see `_node_size`


_KINDS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = _Names("Open MPI", *(f"OMPI_COMM_WORLD_{kind}" for kind in _KINDS))
_SLURM = _Names("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
_FIXES = {  # without an address or a port
    "Open MPI": "export the host name of rank 0's node as MASTER_ADDR and a free port of it as "
    "MASTER_PORT, to all ranks: mpirun -x MASTER_ADDR -x MASTER_PORT",
    "Slurm": "put this line before srun in the batch script: "
    'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
}
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
_SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
# The number of ranks, of launchers whose other variables are not read: MPICH and what descends of
# it, MVAPICH, jsrun.
_OTHER_SIZES = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE")


class Launch(NamedTuple):
    """This process's place in a launch, and the address at which its ranks connect."""

    source: str  # "torchrun", "Open MPI" or "Slurm"
    rank: int
    world_size: int
    local_rank: int
    node_size: int | None  # ranks on this node, if the launcher sets it
    master_addr: str
    master_port: int


def read_launch(env: Mapping[str, str]) -> Launch | None:
    """The launch that an environment describes; None if no launcher started this process.

    Args:
      env: such as `os.environ`; see [Note: nested launchers].

    Raises:
      GroupsError: some of the variables are missing, or one is not a number; or a launcher that is
        not known started this process.

    Example:
      >>> env = dict(RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
      >>> read_launch(env | dict(MASTER_ADDR="a", MASTER_PORT="29500")).rank
      1
    """
    if "RANK" in env or env.get("WORLD_SIZE", "1") != "1":
        return _launch_of(env, _TORCHRUN)
    if _by_open_mpi(env):
        return _launch_of(env, _OPEN_MPI)
    for name in _OTHER_SIZES:
        # srun sets some of these, too, to the size of its step.
        if name in env and _int(env, name) > 1 and env[name] != env.get(_SLURM.size):
            text = f"init_distributed: {name}={env[name]}, of a launcher that is not known"
            names = ", ".join((*_TORCHRUN[1:4], *_ADDRESS))
            raise GroupsError(text, fix=f"let the script that it runs set {names}")
    if not _in_slurm_step(env):
        return None
    return _launch_of(env, _SLURM if _SLURM.size in env else _SLURM._replace(size="SLURM_NTASKS"))


def launched_world_size(env: Mapping[str, str]) -> int:
    """How many ranks were started together with this process, according to the environment.

    This process may run alone in a Slurm allocation of many tasks, so only the size of its own step
    counts.

    >>> launched_world_size({"WORLD_SIZE": "8"}), launched_world_size({"SLURM_NTASKS": "8"})
    (8, 1)
    """
    if _TORCHRUN.size in env:
        return _int(env, _TORCHRUN.size)
    sizes = (_OPEN_MPI.size, _SLURM.size, *_OTHER_SIZES)
    return max((_int(env, name) for name in sizes if name in env), default=1)


def node_of(env: Mapping[str, str], rank: int) -> tuple[int, str] | None:
    """The number of the node that a global rank is on, and the variable that it follows from.

    >>> node_of({"LOCAL_WORLD_SIZE": "4"}, 5), node_of({"SLURM_TASKS_PER_NODE": "4(x2),3"}, 9)
    ((1, 'LOCAL_WORLD_SIZE=4'), (2, 'SLURM_TASKS_PER_NODE=4(x2),3'))
    """
    if "LOCAL_WORLD_SIZE" in env:
        return rank // _int(env, "LOCAL_WORLD_SIZE"), f"LOCAL_WORLD_SIZE={env['LOCAL_WORLD_SIZE']}"
    if _by_open_mpi(env):  # it may map ranks to nodes in any order; use host names
        return None
    for name in _SLURM_TASKS:
        if name not in env:
            continue
        counts = tasks_per_node(env[name])
        node = rank // counts[0] if len(set(counts)) == 1 else _node_by_counts(counts, rank)
        if node is not None:
            return node, f"{name}={env[name]}"
    return None


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Number of tasks on each node, from Slurm's short form.

    >>> tasks_per_node("4(x2),3")
    (4, 4, 3)
    """
    counts: list[int] = []
    for part in text.split(","):
        found: Any = re.fullmatch(r"\s*([1-9][0-9]*)(?:\(x([1-9][0-9]*)\))?\s*", part)
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _node_by_counts(counts: tuple[int, ...], rank: int) -> int | None:
    for node, count in enumerate(counts):
        if rank < count:
            return node
        rank -= count
    return None


def _by_open_mpi(env: Mapping[str, str]) -> bool:
    """Whether its mpirun started this process as one of several ranks."""
    if _OPEN_MPI.size in env:
        return _int(env, _OPEN_MPI.size) > 1
    return _OPEN_MPI.rank in env and _int(env, _OPEN_MPI.rank, least=0) > 0


def _launch_of(env: Mapping[str, str], names: _Names) -> Launch:
    """The launch that one launcher has described.

    Raises:
      GroupsError: some of its variables are missing, or one is not a number.
    """
    needed = (names.rank, names.size, names.local_rank)
    _require(env, (*needed, *_ADDRESS) if names is _TORCHRUN else needed, names.source)
    rank, local = (_int(env, name, least=0) for name in (names.rank, names.local_rank))
    world, node_size = _int(env, names.size), _node_size(env, names)
    one_node = node_size == world
    if names.source == "Slurm":
        one_node = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "1")) == "1"
    addr = env.get("MASTER_ADDR", "127.0.0.1" if one_node else None)
    port = _int(env, "MASTER_PORT") if "MASTER_PORT" in env else _port_of_job(env)
    if addr is None or port is None:
        pairs = zip(_ADDRESS, (addr, port), strict=True)
        missing = " and ".join(name for name, value in pairs if value is None)
        what = f"init_distributed: {names.source} runs {world} ranks, without {missing}"
        raise GroupsError(what, fix=_FIXES[names.source])
    return Launch(names.source, rank, world, local, node_size, addr, port)


def _node_size(env: Mapping[str, str], names: _Names) -> int | None:
    """The number of ranks on this node; None if the launcher does not say it."""
    if names.local_size:
        return _int(env, names.local_size) if names.local_size in env else None
    name = next((name for name in _SLURM_TASKS if name in env), None)
    counts = set(tasks_per_node(env[name])) if name else set()
    return counts.pop() if len(counts) == 1 else None


def _port_of_job(env: Mapping[str, str]) -> int | None:
    """A port derived from the job's number, so that ranks agree and other jobs get another one."""
    for name in _JOBS:
        digits = re.sub(r"\D", "", env.get(name, ""))
        if digits:
            return 20000 + int(digits) % 10000
    return None


def _require(env: Mapping[str, str], needed: Sequence[str], launcher: str) -> None:
    """Raise GroupsError if some of a launcher's variables are missing."""
    missing = [name for name in needed if name not in env]
    if missing:
        there = [name for name in needed if name in env]
        what = f"the environment has {', '.join(there)} but not {', '.join(missing)}"
        fix = f"launch with {launcher}, or set them all"
        raise GroupsError(f"init_distributed: {what}", fix=fix)


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process as one of several tasks.

    A batch script sees rank 0 of a job of many tasks, but what it calls without srun runs alone.
    """
    if "SLURM_STEP_NUM_TASKS" in env:
        return _int(env, "SLURM_STEP_NUM_TASKS") > 1
    if "SLURM_PROCID" not in env:
        return False
    world = _int(env, "SLURM_NTASKS") if "SLURM_NTASKS" in env else 1
    alone = world == 1 or env.get("ENVIRONMENT") == "BATCH"
    return _int(env, "SLURM_PROCID", least=0) > 0 or not alone


def _int(env: Mapping[str, str], name: str, *, least: int = 1) -> int:
    value = int(env[name])
    if value < least:
        kind = "a positive number" if least else "a number"
        raise GroupsError(f"{name}={env[name]!r} is not {kind}", fix="set it, or unset it")
    return value


class NcclSetting(NamedTuple):
    """A variable that NCCL, or torch's watchdog of it, reads when groups are made."""

    name: str
    value: str
    early: bool  # whether it is read once, with the first group of the process
    why: str  # what another value does
    fine: str = ""  # another value that does no harm


# This library finds failures, ends what waits for a lost rank, and raises `PeerFailed`. So torch's
# watchdog must do neither first: a process that it ends cannot go on with `reset`.
NCCL_SETTINGS = (
    NcclSetting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        False,
        "1 and 3 end a process that waits for a lost rank; 2 lets it compute on what never came",
    ),
    NcclSetting(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        True,
        "1 ends a process whose watchdog is held up for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, or after "
        "the error of another rank",
    ),
    NcclSetting(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "0",
        True,
        "1 writes a file on each rank when one fails, and delays its end",
        fine="1",
    ),
    NcclSetting(
        "TORCH_NCCL_BLOCKING_WAIT",
        "0",
        False,
        "1 waits in C++ for each collective, where a host hears neither Ctrl-C nor of failures",
    ),
    NcclSetting(
        "NCCL_LAUNCH_ORDER_IMPLICIT",
        "1",
        True,
        "0 starts kernels of two communicators in an order that may differ between ranks, which "
        "then wait for each other",
    ),
)
_OF_TORCHRUN = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # what it sets if nobody does


def nccl_problems(env: MutableMapping[str, str], *, begun: bool = False) -> dict[str, str]:
    """Set missing variables of `NCCL_SETTINGS`; return problems by name.

    torchrun sets error handling to 1 where its user did not, so there this counts as not set.

    Args:
      env: the environment, which is changed.
      begun: whether a group with NCCL may have been made before.
    """
    found = {}
    for name, value, early, why, fine in NCCL_SETTINGS:
        given = env.get(name)
        if given is None or ((name, given) == _OF_TORCHRUN and "TORCHELASTIC_RUN_ID" in env):
            env[name] = value
            if begun and early and not fine:
                found[name] = f"it was set to {value} after torch.distributed was started: {why}"
        elif given not in (value, fine):
            found[name] = f"it is {given!r}, expected {value!r}: {why}"
    return found
