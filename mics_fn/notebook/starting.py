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
from mics_fn.notebook.cluster import Cluster, Places
from mics_fn.notebook.machines import Machines

RANKS_ON_CPU = 4  # where there is no accelerator
LOOPBACK = "127.0.0.1"


def start(
    n: int | None = None,
    *,
    partition_size: int | None = None,
    nodes: int | None = None,
    topology: Topology | None = None,
    device: str = "auto",
    hosts: int = 1,
    listen: str = LOOPBACK,
    timeout_s: float = 60.0,
) -> Cluster:
    """Start ranks that the cells of this notebook drive, with groups among them.

    Each rank is a process. In cells that begin with `%%ranks` it knows these names: `mf` (this
    library), `torch`, `groups`, `rank` and `device`. They end with this process, however it ends.
    A cluster that was started before is stopped.

    Args:
      n: number of ranks on each machine; None takes its accelerators, or four on the CPU.
      partition_size: number of ranks that share one replica, as `make_groups` takes it.
      nodes: number of nodes that the ranks of this machine pretend to be.
      topology: how they pretend to be wired, instead of `nodes`.
      device: as `init_distributed` takes it.
      hosts: number of machines, this one included. With more than one it prints the line to run on
        each of the others, which have this library and ipyparallel installed.
      listen: address at which this machine is reached by the others. By default nothing listens
        beyond loopback.
      timeout_s: bound of the start in seconds, and of the wait for other machines.

    Returns:
      The `Cluster`.

    Communication: the start of torch.distributed, and small messages through its store.

    Memory: each rank imports torch, which most of its memory shares with the others of its machine.

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
    each = _ranks_here() if n is None else n
    checks.number("notebook.start", "timeout_s", timeout_s, above=0)
    _check_kinds(device, listen, topology)
    _check_sizes(each, hosts, listen, nodes, topology)
    if partition_size is not None:  # as each rank would find, but at once
        plan_groups(topology or Topology.of(each * hosts), partition_size)
    client_of = _ipyparallel()
    stop_earlier()
    folder = tempfile.mkdtemp(prefix="mics_fn_notebook_")
    deadline = time.monotonic() + timeout_s
    machines = Machines(folder, each)
    cluster: Cluster | None = None
    try:
        machines.start_here(listen, listen != LOOPBACK)
        if hosts > 1:
            print(f"run this on {hosts - 1} more:\n{machines.listen(listen)}", flush=True)
            machines.wait_for_others(hosts - 1, deadline)
        file, connection = machines.wait_for_controller(deadline)
        options = {"device": device, "partition_size": partition_size, "timeout_s": timeout_s}
        options["topology"] = topology.sizes if topology else None
        node_size = topology.sizes[-1] if topology else each // (nodes or 1)
        told = partial(_places, each, hosts, node_size, listen, json.dumps(options))
        client = client_of(file)
        cluster = Cluster(each * hosts, machines, client, connection, told, folder)
        cluster.begin(deadline - time.monotonic())
    except BaseException:
        (cluster or machines).stop()
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


def _check_kinds(device: Any, listen: Any, topology: Any) -> None:
    """Raise PlanError unless these are what they should be; ranks would find it much later."""
    verb, fix = "notebook.start", "pass mf.groups.Topology(sizes, names), or nodes="
    checks.instance(verb, "topology", topology, Topology | None, "a Topology", fix)
    fix = "pass an address of this machine, such as '10.0.0.1'"
    if not isinstance(listen, str) or not listen.strip():
        checks.refuse(verb, "listen", listen, "an address", fix)
    fix = "pass 'auto', 'cpu', or the kind of this machine's accelerators"
    checks.instance(verb, "device", device, str, "the name of a device", fix)
    try:
        if device != "auto":
            torch.device(device)
    except RuntimeError:
        text = f"{verb}: device={device!r}, which torch does not know"
        raise PlanError(message(text, fix=fix)) from None


def _check_sizes(each: int, hosts: int, listen: str, nodes: int | None, topology: Any) -> None:
    """Raise PlanError for numbers that do not fit together."""
    for name, value in (("n", each), ("hosts", hosts), ("nodes", nodes)):
        optional = name == "nodes"
        checks.integer("notebook.start", name, value, optional=optional, fix="give 1 or more")
    if nodes is not None and topology is not None:
        fix = "pass one of them"
        raise PlanError(message("notebook.start: nodes= and topology= are both given", fix=fix))
    if each % (nodes or 1):
        what = f"notebook.start: {each} ranks cannot be {nodes} equal nodes"
        raise PlanError(message(what, fix=f"choose nodes= from the divisors of {each}"))
    if topology is not None and topology.world_size != each * hosts:
        what = f"notebook.start: {topology} has {topology.world_size} ranks, not {each * hosts}"
        raise PlanError(message(what, fix="pass n= to match"))
    if hosts > 1 and listen == LOOPBACK:
        fix = "pass listen= with the address at which the other machines reach this one"
        raise PlanError(message(f"notebook.start: {hosts} hosts, and no address", fix=fix))


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


def _places(each: int, hosts: int, node_size: int, listen: str, begin: str) -> tuple[Places, Any]:
    """What ranks are told at a start, and the store that they meet in."""
    store = serve_store(listen)
    common = {
        "WORLD_SIZE": each * hosts,
        "LOCAL_WORLD_SIZE": node_size,
        "MICS_FN_RANKS_HERE": each,
        "MASTER_ADDR": listen,
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is not that of rank 0
    }

    def environment(rank: int, local: int) -> Mapping[str, str]:
        own = common | {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": rank // node_size}
        return {name: str(value) for name, value in own.items()}

    return Places(environment, begin), store
