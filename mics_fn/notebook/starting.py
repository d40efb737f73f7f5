"""`start`: the ranks of a notebook."""

import atexit
import json
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from mics_fn import checks
from mics_fn._torch_store import serve_store
from mics_fn.errors import GroupsError, PlanError, message
from mics_fn.groups import Topology, plan_groups
from mics_fn.notebook import magic
from mics_fn.notebook.boot import LOOPBACK
from mics_fn.notebook.cluster import Cluster, Places
from mics_fn.notebook.processes import Processes

RANKS_ON_CPU = 4  # where there is no accelerator


def start(
    n: int | None = None,
    *,
    partition_size: int | None = None,
    nodes: int | None = None,
    topology: Topology | None = None,
    device: str = "auto",
    timeout_s: float = 60.0,
) -> Cluster:
    """Start ranks that the cells of this notebook drive, with groups among them.

    Each rank is a process of this machine. In cells that begin with `%%ranks` it knows these names:
    `mf` (this library), `torch`, `groups`, `rank` and `device`. They end with this process, however
    it ends. A cluster that was started before is stopped.

    Args:
      n: number of ranks; None takes one per accelerator, or four on the CPU.
      partition_size: number of ranks that share one replica, as `make_groups` takes it.
      nodes: number of nodes that the ranks pretend to be.
      topology: how they pretend to be wired, instead of `nodes`.
      device: as `init_distributed` takes it.
      timeout_s: bound of the start in seconds.

    Returns:
      The `Cluster`.

    Communication: the start of torch.distributed, and small messages through its store.

    Memory: each rank imports torch, which most of its memory shares with the others.

    Raises:
      PlanError: the numbers do not fit together.
      GroupsError: ipyparallel is not installed, or a rank does not start.
      CollectiveTimeoutError: it took too long.

    Example:
      >>> with notebook.start(1, device="cpu") as cluster:
      ...     cluster.push(x=20)
      ...     cluster.cell("y = 2 * x + len(groups.ranks)")
      ...     cluster.pull("y", rank=0)
      41
    """
    size = _ranks_here() if n is None else n
    checks.number("notebook.start", "timeout_s", timeout_s, above=0)
    _check_kinds(device, topology)
    _check_sizes(size, nodes, topology)
    if partition_size is not None:  # as each rank would find, but at once
        plan_groups(topology or Topology.of(size), partition_size)
    client_of = _ipyparallel()
    stop_earlier()
    folder = tempfile.mkdtemp(prefix="mics_fn_notebook_")
    deadline = time.monotonic() + timeout_s
    processes = Processes(folder, size)
    cluster: Cluster | None = None
    try:
        processes.boot()
        file, connection = processes.wait_for_controller(deadline)
        options = {"device": device, "partition_size": partition_size, "timeout_s": timeout_s}
        options["topology"] = topology.sizes if topology else None
        node_size = topology.sizes[-1] if topology else size // (nodes or 1)
        told = partial(_places, size, node_size, json.dumps(options))
        client = client_of(file)
        cluster = Cluster(size, processes, client, connection, told, folder)
        cluster.begin(deadline - time.monotonic())
    except BaseException:
        (cluster or processes).stop()
        raise
    magic.register(cluster)
    return cluster


@atexit.register
def stop_earlier() -> None:
    """Stop the cluster that was started before."""
    if magic.current is not None:
        magic.current.stop()


def _ranks_here() -> int:
    """One rank per accelerator, or a few on the CPU."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return count or RANKS_ON_CPU


def _check_kinds(device: Any, topology: Any) -> None:
    """Raise PlanError unless these are what they should be; ranks would find it much later."""
    verb, fix = "notebook.start", "pass mf.groups.Topology(sizes, names), or nodes="
    checks.instance(verb, "topology", topology, Topology | None, "a Topology", fix)
    fix = "pass 'auto', 'cpu', or the kind of this machine's accelerators"
    checks.instance(verb, "device", device, str, "the name of a device", fix)
    try:
        if device != "auto":
            torch.device(device)
    except RuntimeError:
        text = f"{verb}: device={device!r}, which torch does not know"
        raise PlanError(message(text, fix=fix)) from None


def _check_sizes(size: int, nodes: int | None, topology: Any) -> None:
    """Raise PlanError for numbers that do not fit together."""
    for name, value in (("n", size), ("nodes", nodes)):
        optional = name == "nodes"
        checks.integer("notebook.start", name, value, optional=optional, fix="give 1 or more")
    if nodes is not None and topology is not None:
        fix = "pass one of them"
        raise PlanError(message("notebook.start: nodes= and topology= are both given", fix=fix))
    if size % (nodes or 1):
        what = f"notebook.start: {size} ranks cannot be {nodes} equal nodes"
        raise PlanError(message(what, fix=f"choose nodes= from the divisors of {size}"))
    if topology is not None and topology.world_size != size:
        what = f"notebook.start: {topology} has {topology.world_size} ranks, not {size}"
        raise PlanError(message(what, fix="pass n= to match"))


def _ipyparallel() -> Any:
    """The class `Client` of ipyparallel.

    Raises:
      GroupsError: it is not installed.
    """
    try:
        from ipyparallel import Client
    except ImportError as error:
        fix = "pip install 'mics-fn[notebook]'"
        what = "notebook.start: ipyparallel is not installed"
        raise GroupsError(message(what, fix=fix)) from error
    return Client


def _places(size: int, node_size: int, begin: str) -> tuple[Places, Any]:
    """What ranks are told at a start, and the store that they meet in."""
    store = serve_store(LOOPBACK)
    common = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": node_size,
        "MICS_FN_RANKS_HERE": size,
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is not that of rank 0
    }

    def environment(rank: int) -> Mapping[str, str]:
        own = common | {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": rank // node_size}
        return {name: str(value) for name, value in own.items()}

    return Places(environment, begin), store
