"""What a launcher says in the environment: torchrun's variables, or Slurm's. Pure parsing."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from mics_fn.errors import GroupsError, message

_SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


class Launch(NamedTuple):
    """This process's place in a launch, and where its ranks meet."""

    source: str  # "torchrun" or "Slurm"
    rank: int
    world_size: int
    local_rank: int
    node_size: int | None  # ranks on this node, where the launcher says so
    master_addr: str
    master_port: int


def read_launch(env: Mapping[str, str]) -> Launch | None:
    """The launch that an environment describes; None where there is none.

    Args:
      env: such as `os.environ`; torchrun's variables go before Slurm's.

    Raises:
      GroupsError: only some of the variables are there, or one is no number.

    Example:
      >>> env = dict(RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
      >>> read_launch(env | dict(MASTER_ADDR="a", MASTER_PORT="29500")).rank
      1
    """
    if "RANK" in env or env.get("WORLD_SIZE", "1") != "1":
        return _torchrun(env)
    if "SLURM_PROCID" in env and _slurm_world(env) > 1:
        return _slurm(env)
    return None


def launched_world_size(env: Mapping[str, str]) -> int:
    """Ranks that were started together with this process, as far as the environment tells.

    A Slurm allocation may hold many tasks while this process runs alone in it, so that only the
    size of its own step counts.

    >>> launched_world_size({"WORLD_SIZE": "8"}), launched_world_size({"SLURM_NTASKS": "8"})
    (8, 1)
    """
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if name in env:
            return _int(env, name)
    return 1


def node_of(env: Mapping[str, str], rank: int) -> tuple[int, str] | None:
    """The number of the node that a global rank is on, and the variable that says so.

    >>> node_of({"LOCAL_WORLD_SIZE": "4"}, 5), node_of({"SLURM_TASKS_PER_NODE": "4(x2),3"}, 9)
    ((1, 'LOCAL_WORLD_SIZE=4'), (2, 'SLURM_TASKS_PER_NODE=4(x2),3'))
    """
    if "LOCAL_WORLD_SIZE" in env:
        return rank // _int(env, "LOCAL_WORLD_SIZE"), f"LOCAL_WORLD_SIZE={env['LOCAL_WORLD_SIZE']}"
    for name in _SLURM_TASKS:
        if name not in env:
            continue
        counts = tasks_per_node(env[name], name)
        node = rank // counts[0] if len(set(counts)) == 1 else _node_by_counts(counts, rank)
        if node is not None:
            return node, f"{name}={env[name]}"
    return None


def tasks_per_node(text: str, name: str = "SLURM_TASKS_PER_NODE") -> tuple[int, ...]:
    """Slurm's short form of tasks a node, one number a node.

    >>> tasks_per_node("4(x2),3")
    (4, 4, 3)
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([1-9]\d*)(?:\(x([1-9]\d*)\))?\s*", part)
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
    missing = [name for name in needed if name not in env]
    if missing:
        there = [name for name in needed if name in env]
        what = f"the environment has {', '.join(there)} but not {', '.join(missing)}"
        fix = "launch with torchrun, or set them all"
        raise GroupsError(message(f"init_distributed: {what}", fix=fix))
    rank, world, local, port = (
        _int(env, name, least=least)
        for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("MASTER_PORT", 1))
    )
    node_size = _int(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else None
    return Launch("torchrun", rank, world, local, node_size, env["MASTER_ADDR"], port)


def _slurm_world(env: Mapping[str, str]) -> int:
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    return _int(env, name) if name in env else 1


def _slurm(env: Mapping[str, str]) -> Launch:
    rank, world = _int(env, "SLURM_PROCID", least=0), _slurm_world(env)
    local = _int(env, "SLURM_LOCALID", least=0) if "SLURM_LOCALID" in env else 0
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
    # Jobs that share a node must not share a port, and every task must find the same one.
    job = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or 0)
    port = _int(env, "MASTER_PORT") if "MASTER_PORT" in env else 20000 + job % 10000
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
