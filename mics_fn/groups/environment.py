"""Parse what a launcher wrote into the environment: torchrun, a kind of MPI, or Slurm.

[Note: nested launchers] Launchers start each other. For example, mpirun inside a Slurm job starts
its daemons with srun, and the ranks then inherit Slurm's variables of the daemon. So the launcher
that is nearest to the process has precedence: torchrun, then MPI, then Slurm. A process that was
started as one of several must never train alone silently, so an incomplete set of variables is an
error.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mics_fn.errors import GroupsError, message


class _Mpi(NamedTuple):
    """The variables that one kind of mpirun sets."""

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str


def _prefixed(source: str, prefix: str) -> _Mpi:
    return _Mpi(source, *(prefix + x for x in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


_MPI = (
    _prefixed("Open MPI", "OMPI_COMM_WORLD_"),
    _prefixed("MVAPICH", "MV2_COMM_WORLD_"),
    _prefixed("jsrun", "JSM_NAMESPACE_"),
    # MPICH, Intel MPI, Cray and Flux share the first two names; the other two tell them apart.
    _Mpi("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Mpi("Cray PALS", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    _Mpi("Flux", "PMI_RANK", "PMI_SIZE", "FLUX_TASK_LOCAL_ID", ""),
)
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
_SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


class Launch(NamedTuple):
    """This process's place in a launch, and the address at which its ranks connect."""

    source: str  # "torchrun", "Slurm" or a kind of MPI
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
      GroupsError: some of the variables are missing, or one is not a number.

    Example:
      >>> env = dict(RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
      >>> read_launch(env | dict(MASTER_ADDR="a", MASTER_PORT="29500")).rank
      1
    """
    if "RANK" in env or env.get("WORLD_SIZE", "1") != "1":
        return _torchrun(env)
    mpi = _mpi_of(env)
    if mpi is not None:
        return _mpirun(env, mpi)
    return _slurm(env) if _in_slurm_step(env) else None


def launched_world_size(env: Mapping[str, str]) -> int:
    """How many ranks were started together with this process, according to the environment.

    This process may run alone in a Slurm allocation of many tasks, so only the size of its own step
    counts.

    >>> launched_world_size({"WORLD_SIZE": "8"}), launched_world_size({"SLURM_NTASKS": "8"})
    (8, 1)
    """
    if "WORLD_SIZE" in env:
        return _int(env, "WORLD_SIZE")
    mpi = _mpi_of(env)
    name = "SLURM_STEP_NUM_TASKS" if mpi is None else mpi.size
    return _int(env, name) if name in env else 1


def node_of(env: Mapping[str, str], rank: int) -> tuple[int, str] | None:
    """The number of the node that a global rank is on, and the variable that it follows from.

    >>> node_of({"LOCAL_WORLD_SIZE": "4"}, 5), node_of({"SLURM_TASKS_PER_NODE": "4(x2),3"}, 9)
    ((1, 'LOCAL_WORLD_SIZE=4'), (2, 'SLURM_TASKS_PER_NODE=4(x2),3'))
    """
    if "LOCAL_WORLD_SIZE" in env:
        return rank // _int(env, "LOCAL_WORLD_SIZE"), f"LOCAL_WORLD_SIZE={env['LOCAL_WORLD_SIZE']}"
    if _mpi_of(env) is not None:  # MPI may map ranks to nodes in any order; use host names
        return None
    for name in _SLURM_TASKS:
        if name not in env:
            continue
        counts = tasks_per_node(env[name], name)
        node = rank // counts[0] if len(set(counts)) == 1 else _node_by_counts(counts, rank)
        if node is not None:
            return node, f"{name}={env[name]}"
    return None


def tasks_per_node(text: str, name: str = "SLURM_TASKS_PER_NODE") -> tuple[int, ...]:
    """Number of tasks on each node, from Slurm's short form.

    >>> tasks_per_node("4(x2),3")
    (4, 4, 3)
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([1-9][0-9]*)(?:\(x([1-9][0-9]*)\))?\s*", part)
        if found is None:
            fix = "unset it, or pass node_size="
            raise GroupsError(message(f"{name}={text!r} is not of the form '4(x2),3'", fix=fix))
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _node_by_counts(counts: tuple[int, ...], rank: int) -> int | None:
    for node, count in enumerate(counts):
        if rank < count:
            return node
        rank -= count
    return None


def _torchrun(env: Mapping[str, str]) -> Launch:
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    _require(env, needed, "launch with torchrun")
    rank, world, local, port = (
        _int(env, name, least=least)
        for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("MASTER_PORT", 1))
    )
    node_size = _int(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else None
    return Launch("torchrun", rank, world, local, node_size, env["MASTER_ADDR"], port)


def _mpi_of(env: Mapping[str, str]) -> _Mpi | None:
    """The kind of MPI that started this process as one of several ranks; None if none did."""
    for mpi in _MPI:
        size = _int(env, mpi.size) if mpi.size in env else 1
        rank = _int(env, mpi.rank, least=0) if mpi.rank in env else 0
        by_srun = (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS"))
        if by_srun == (env.get(mpi.rank), env.get(mpi.size)):  # set by srun --mpi=pmi2
            continue
        if size > 1 or (rank > 0 and mpi.size not in env):
            here = [other for other in _MPI if other.rank == mpi.rank and other.local_rank in env]
            return next(iter(here), mpi)
    return None


def _mpirun(env: Mapping[str, str], mpi: _Mpi) -> Launch:
    _require(env, (mpi.rank, mpi.size, mpi.local_rank), f"launch all ranks with {mpi.source}")
    rank, local = (_int(env, name, least=0) for name in (mpi.rank, mpi.local_rank))
    world = _int(env, mpi.size)
    node_size = _int(env, mpi.local_size) if mpi.local_size in env else None
    addr = env.get("MASTER_ADDR", "127.0.0.1" if node_size == world else None)
    port = _int(env, "MASTER_PORT") if "MASTER_PORT" in env else _port_of_job(env)
    if addr is None or port is None:
        found = {"MASTER_ADDR": addr, "MASTER_PORT": port}
        missing = " and ".join(name for name, value in found.items() if value is None)
        what = f"{mpi.source} runs {world} ranks, without {missing}"
        fix = "export the host name of rank 0's node as MASTER_ADDR and a free port of it as "
        fix += "MASTER_PORT, to all ranks (Open MPI: mpirun -x MASTER_ADDR -x MASTER_PORT)"
        raise GroupsError(message(f"init_distributed: {what}", fix=fix))
    return Launch(mpi.source, rank, world, local, node_size, addr, port)


def _port_of_job(env: Mapping[str, str]) -> int | None:
    """A port derived from the job's number, so that ranks agree and other jobs get another one."""
    for name in _JOBS:
        digits = re.sub(r"\D", "", env.get(name, ""))
        if digits:
            return 20000 + int(digits) % 10000
    return None


def _require(env: Mapping[str, str], needed: Sequence[str], fix: str) -> None:
    """Raise GroupsError if some of a launcher's variables are missing."""
    missing = [name for name in needed if name not in env]
    if missing:
        there = [name for name in needed if name in env]
        what = f"the environment has {', '.join(there)} but not {', '.join(missing)}"
        raise GroupsError(message(f"init_distributed: {what}", fix=f"{fix}, or set them all"))


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


def _slurm(env: Mapping[str, str]) -> Launch:
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    _require(env, ("SLURM_PROCID", size, "SLURM_LOCALID"), "launch with srun")
    rank, local = (_int(env, name, least=0) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    world = _int(env, size)
    name = next((name for name in _SLURM_TASKS if name in env), None)
    counts = set(tasks_per_node(env[name], name)) if name else set()
    node_size = counts.pop() if len(counts) == 1 else None
    num_nodes = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "1"))
    addr = env.get("MASTER_ADDR")
    if addr is None and num_nodes != "1":
        what = (
            f"init_distributed: Slurm runs {world} tasks on {num_nodes} nodes, without MASTER_ADDR"
        )
        line = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        raise GroupsError(
            message(what, fix=f"put this line before srun in the batch script: {line}")
        )
    port = _int(env, "MASTER_PORT") if "MASTER_PORT" in env else _port_of_job(env) or 20000
    return Launch("Slurm", rank, world, local, node_size, addr or "127.0.0.1", port)


def _int(env: Mapping[str, str], name: str, *, least: int = 1) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = least - 1
    if value < least:
        kind = "a positive number" if least else "a number"
        raise GroupsError(message(f"{name}={env[name]!r} is not {kind}", fix="set it, or unset it"))
    return value
