"""Start a job: what its launcher says, which device each rank takes, and how ranks meet.

[Note: nested launchers] Launchers start each other. For example, mpirun inside a Slurm job starts
its daemons with srun, and the ranks then inherit Slurm's variables of the daemon. So the launcher
that is nearest to the process has precedence: torchrun, then Open MPI, then Slurm. A process that
was started as one of several must never train alone silently, so an incomplete set of variables is
an error, and so are the ranks of another launcher: its script sets the variables of torchrun.

[Note: meetings] Ranks that create different groups would hang without any error. So before any
group exists, every rank writes its facts to the store, the first rank judges them all and publishes
one verdict, and all ranks read it: n small writes, n small reads by one rank, and n reads of one
key. Ranks that were given others as `ranks=` meet under another key, where some do not come: that
is an error after the time limit.

[Note: the epoch of membership] Which process is which rank changes only in a meeting, and each
meeting begins an epoch with a number of its own. A process that takes a rank's place registers
first, and is a member since an epoch that is later than all before it. Whatever a rank writes under
a key of its own, such as its signs of life and its part of a meeting, begins with this number, and
is written by `compare_set` in the place of what is there: so a process never writes over what a
later one of its rank has written, and finds out that it was replaced. What all ranks of some groups
write lies under the key of their meeting, and so of one epoch.
"""

import json
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mics_fn import _torch, checks, errors, spans
from mics_fn.errors import GroupsError
from mics_fn.groups.communicator import hooks
from mics_fn.store import Store, StoreLost, later, poll, value_of
from mics_fn.threads import bounded

# What a launcher wrote into the environment.

_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
# By launcher, nearest first: the variables of the number of a rank, of all ranks, and on the node.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK")),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
_FIXES = {
    "torchrun": "launch with torchrun, or set them all",
    "Open MPI": "pass rank 0's host and a free port: mpirun -x MASTER_ADDR=... -x MASTER_PORT=...",
    "Slurm": "put this line before srun in the batch script: "
    'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
}
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
# The number of ranks, of launchers whose other variables are not read: MPICH and what descends of
# it, MVAPICH, jsrun.
_OTHER_SIZES = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE")


class Launch(NamedTuple):
    """This process's place in a launch, and the address at which its ranks connect."""

    source: str  # "torchrun", "Open MPI" or "Slurm"
    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int


def read_launch(env: Mapping[str, str]) -> Launch | None:
    """The launch that an environment describes; None if no launcher started this process.

    Args:
      env: such as `os.environ`; see [Note: nested launchers].

    Raises:
      GroupsError: some of the variables are missing, or a launcher that is not known started this
        process.

    Example:
      >>> env = dict(RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", MASTER_ADDR="a")
      >>> read_launch(env | dict(MASTER_PORT="29500")).rank
      1
    """
    source = launcher_of(env)
    if source is None:
        return None
    names = _LAUNCHERS[source]
    found = {**_address_of(env, source), **env}
    missing = [name for name in (*names, *_ADDRESS) if name not in found]
    if missing:
        what = f"init_distributed: {source} started this process, without {', '.join(missing)}"
        raise GroupsError(what, fix=_FIXES[source])
    rank, size, local_rank = (int(found[name]) for name in names)
    port = int(found["MASTER_PORT"])
    return Launch(source, rank, size, local_rank, found["MASTER_ADDR"], port)


def launcher_of(env: Mapping[str, str]) -> str | None:
    """Which launcher started this process, as one of several ranks or for a job of one.

    This process may run alone in a Slurm allocation of many tasks, so only its own step counts.

    >>> launcher_of({"WORLD_SIZE": "8"}), launcher_of({"SLURM_NTASKS": "8"})
    ('torchrun', None)
    """
    _, of_mpi, of_slurm = (size for _, size, _ in _LAUNCHERS.values())
    if "RANK" in env or env.get("WORLD_SIZE", "1") != "1":
        return "torchrun"
    if env.get(of_mpi, "1") != "1":
        return "Open MPI"
    # srun sets some of these, too, to the size of its step.
    others = [name for name in _OTHER_SIZES if env.get(name, "1") not in ("1", env.get(of_slurm))]
    if others:
        text = f"init_distributed: {others[0]}={env[others[0]]}, of a launcher that is not known"
        names = ", ".join((*_LAUNCHERS["torchrun"], *_ADDRESS))
        raise GroupsError(text, fix=f"let the script that it runs set {names}")
    # A batch script sees rank 0 of a job of many tasks, but what it calls without srun runs alone.
    in_step = env[of_slurm] != "1" if of_slurm in env else env.get("SLURM_PROCID", "0") != "0"
    return "Slurm" if in_step else None


def _address_of(env: Mapping[str, str], source: str) -> dict[str, str]:
    """The address of a job that says none: its only node, and a port that other jobs do not use."""
    if source == "torchrun":
        return {}
    one_node = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == env.get("OMPI_COMM_WORLD_SIZE")
    if source == "Slurm":
        one_node = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "1")) == "1"
    found = {"MASTER_ADDR": "127.0.0.1"} if one_node else {}
    job = next(filter(None, (re.sub(r"\D", "", env.get(name, "")) for name in _JOBS)), "")
    return found | ({"MASTER_PORT": f"{20000 + int(job) % 10000}"} if job else {})


# This library finds failures, ends what waits for a lost rank, and raises `PeerFailed`. So torch's
# watchdog must do neither first: a process that it ends cannot go on with `reset`. By variable, its
# value, and what another one does.
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "it ends or spoils what waits for a lost rank"),
    "TORCH_NCCL_ENABLE_MONITORING": ("0", "it ends a process whose watchdog is held up"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("0", "it writes files, and delays the end of a rank"),
    "TORCH_NCCL_BLOCKING_WAIT": ("0", "a wait in C++ hears neither Ctrl-C nor of failures"),
    "NCCL_LAUNCH_ORDER_IMPLICIT": ("1", "kernels of two ranks may wait for each other"),
}
_READ_ONCE = ("TORCH_NCCL_ENABLE_MONITORING", "NCCL_LAUNCH_ORDER_IMPLICIT")  # with the first group
_OF_TORCHRUN = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # what it sets if nobody does


def nccl_problems(env: MutableMapping[str, str], *, begun: bool = False) -> dict[str, str]:
    """Set missing variables of `NCCL_SETTINGS`; return problems by name.

    torchrun sets error handling to 1 where its user did not, so there this counts as not set.

    Args:
      env: the environment, which is changed.
      begun: whether a group with NCCL may have been made before.
    """
    problems = {}
    for name, (value, why) in NCCL_SETTINGS.items():
        given = env.get(name)
        if given is None or ((name, given) == _OF_TORCHRUN and "TORCHELASTIC_RUN_ID" in env):
            env[name] = value
            if begun and name in _READ_ONCE:
                problems[name] = f"it was set after torch.distributed was started: {why}"
        elif given != value:
            problems[name] = f"it is {given!r}, expected {value!r}: {why}"
    return problems


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
    problems = nccl_problems(os.environ, begun=begun) if backend == "nccl" else {}
    for name, problem in problems.items():
        fix = f"export {name}={NCCL_SETTINGS[name][0]} before the start, or leave it unset"
        warnings.warn(errors.message(name, [problem], fix), stacklevel=3)


# Which accelerator a rank uses, and whether another rank uses the same one.


def accelerator() -> str:
    """The type of this process's accelerators; "cpu" if none has a backend of its own."""
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if found is None else found.type
    return kind if dist.Backend.default_device_backend_map.get(kind, "gloo") != "gloo" else "cpu"


def choose_device(
    device: str | torch.device, launch: Launch | None = None, config: str = ""
) -> tuple[torch.device, str]:
    """The device that an argument means, and why this process cannot use it.

    Args:
      device: "auto" is the accelerator, if a backend serves it that does not serve the CPU as well.
      launch: has the number of this rank on its node, and so of its device.
      config: the backends of the default group; "" if there is none.
    """
    if device == "auto":
        kind, served = accelerator(), backends_of(config)
        alone = not config or served.get(kind) not in (None, served.get("cpu"))
        device = kind if alone else "cpu"
    wanted = torch.device(device)
    if wanted.type == "meta":
        return torch.device("cpu"), f"device={str(device)!r}, which holds no data"
    if not _torch.is_async(wanted):
        return wanted, ""
    count = torch.accelerator.device_count() if accelerator() == wanted.type else 0
    if (wanted.index or 0) >= count:
        return wanted, f"{wanted} is asked for, and this process sees {count} devices of its kind"
    if launch is not None and wanted.index is None:
        return torch.device(wanted.type, launch.local_rank % count), ""
    return _torch.with_index(wanted), ""


def backends_of(config: str) -> dict[str, str]:
    """The backend of each type of device, from "cpu:gloo,cuda:nccl" or from "nccl" alone."""
    if ":" not in config:
        return dict.fromkeys(dist.Backend.backend_capability.get(config, ()), config)
    return dict(part.split(":", 1) for part in config.split(","))


class Facts(NamedTuple):
    """What a rank tells the others before groups exist."""

    compared: Mapping[str, str]  # by name, what must be equal on all ranks
    node: str  # equal on ranks that share a node
    place: str  # the host and the device, such as "node0: cuda:0"
    unit: str  # equal on ranks that share an accelerator; empty if that does no harm
    problem: str  # why the rank cannot use its device


def facts_of(
    compared: Mapping[str, str], device: torch.device, problem: str, node: str = ""
) -> Facts:
    """The facts of this rank; every backend but gloo requires that ranks use other devices."""
    host, unit = socket.gethostname(), ""
    if _torch.is_async(device) and compared.get("backend") != "gloo" and not problem:
        # A number alone says nothing where each process sees other devices.
        masks = sorted(x for x in os.environ.items() if x[0].endswith(("VISIBLE_DEVICES", "_MASK")))
        properties = torch.get_device_module(device).get_device_properties(device)
        unit = f"{getattr(properties, 'uuid', '')}" or f"{device} of {host}, {masks}"
        # NCCL accepts ranks that share a GPU if this tells them apart, as people do in tests.
        unit = " ".join((unit, os.environ.get("NCCL_HOSTID", ""))).strip()
    return Facts(compared, node, f"{host}: {device}", unit, problem)


# What ranks tell each other as they start, and what must be equal or distinct there.


def judged(verb: str, found: Mapping[int, Any], *, dp_ranks: Sequence[Sequence[int]] = ()) -> int:
    """Check the facts, the node and the device of each rank; return the size of a node.

    Args:
      verb: for errors.
      found: the facts of each rank.
      dp_ranks: of a model in parts, the ranks of each part: nodes have so many ranks of one.

    Raises:
      DesyncError: facts differ; the text has the values and who has them.
      GroupsError: a rank does not have its device, or several use one; NCCL would fail, or hang.
      PlanError: nodes hold unequal numbers of ranks, or ranks of a node are not next to each other.
    """
    facts = {rank: Facts(*entry) for rank, entry in found.items()}
    wrong = {rank: f"{x.problem}, on {x.place}" for rank, x in facts.items() if x.problem}
    if wrong:
        what = f"{verb}: a rank does not have the device that was asked for"
        fix = "pass device='auto' or 'cpu', or use a torch, driver and backend for this device"
        raise GroupsError(what, errors.rank_lines(wrong), fix)
    _compare(verb, {rank: x.compared for rank, x in facts.items()})
    units = {rank: x.unit or f"rank {rank}" for rank, x in facts.items()}
    unit, users = errors.by_value(units)[0]
    if len(users) > 1:
        fix = "start one rank per device; to share one in a test, NCCL_HOSTID differs on each rank"
        lines = [f"{errors.name_ranks(users)} on {facts[users[0]].place}, {unit}"]
        raise GroupsError(f"{verb}: several ranks use one device", lines, fix)
    sizes = set[int]()
    for ranks in dp_ranks if len(facts) > 1 and dp_ranks else [facts]:
        sizes.add(node_size_of({rank: facts[rank].node for rank in ranks}))
    if len(sizes) > 1:
        what = f"{verb}: nodes have unequal numbers of ranks of the parts of a model"
        raise errors.PlanError(what, fix="start equally many ranks of each part on each node")
    return sizes.pop()


def _compare(verb: str, found: Mapping[int, Mapping[str, str]]) -> None:
    """Raise DesyncError if a fact differs between ranks."""
    lines = {}
    for name in next(iter(found.values())):
        holders = errors.by_value({rank: facts[name] for rank, facts in found.items()})
        if len(holders) > 1:
            texts = [f"{value} on {errors.name_ranks(ranks)}" for value, ranks in holders]
            lines[name] = f"{name}: {'; '.join(texts)}"
    if lines:
        what = f"{verb}: ranks disagree on {', '.join(lines)}"
        fix = f"pass the same {'=, '.join(lines)}= on every rank, launched in the same way"
        raise errors.DesyncError(what, lines.values(), fix)


def node_size_of(nodes: Mapping[int, str]) -> int:
    """The number of these ranks on each node.

    Args:
      nodes: of each rank a name that is equal on ranks that share a node.

    Raises:
      PlanError: nodes hold unequal numbers of ranks, or ranks of a node are not next to each other.

    >>> node_size_of({0: "a", 1: "a", 2: "b", 3: "b"})
    2
    """
    sizes = [len(list(run)) for _, run in groupby(nodes.values())]
    if len(set(sizes)) > 1 or len(sizes) > len(set(nodes.values())):
        what = "make_groups: these ranks do not fill nodes of one size, one after the other"
        fix = "start equally many ranks on each, node by node, or pass node_size= or topology="
        raise errors.PlanError(what, errors.rank_lines(nodes)[:8], fix)
    return sizes[0]


def init_distributed(
    *, device: str | torch.device = "auto", timeout_s: float = 600.0
) -> torch.device:
    """Start torch.distributed from the launcher's environment, and choose this rank's device.

    It reads torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without those,
    Open MPI's OMPI_COMM_WORLD_RANK and the like, together with MASTER_ADDR and MASTER_PORT; without
    those, Slurm's SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_LOCALID. Under any other launcher
    set the five variables of torchrun. On several nodes Slurm needs this line before srun:
    `export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)`. If
    torch.distributed is initialised already, or no launcher started this process, it only chooses
    the device. A process that takes the place of a rank that was lost does not wait for the others:
    see `reset`.

    Args:
      device: "auto" takes an accelerator if this process sees one, else the CPU. Of several that it
        sees, it takes the one with its number on the node; all ranks must get different ones.
      timeout_s: bound in seconds of the start, and of collectives on the default group.

    Returns:
      The device, which is also made the current one if it is an accelerator.

    Communication: the start of torch.distributed, and a few small messages through its store.

    Raises:
      GroupsError: some of the launcher's variables are missing, the store cannot be held, a rank
        does not have its device, or several have the same; the text names the ranks and the fix.
      DesyncError: some ranks would use the CPU and others would not.
      PlanError: `timeout_s` is not a number above 0.
      CollectiveError: some rank did not call it in time.

    Example:
      >>> init_distributed(device="cpu")
      device(type='cpu')
    """
    checks.number("init_distributed", "timeout_s", timeout_s, above=0, below=1e8)
    if spans.observers:
        spans.passing("start: init_distributed")
    begun, deadline = dist.is_initialized(), time.monotonic() + timeout_s
    launch = None if begun else read_launch(os.environ)
    chosen, problem = choose_device(device, launch, dist.get_backend_config() if begun else "")
    mine = facts_of({"device": chosen.type}, chosen, problem)
    store, start = None, None
    if launch is None:
        judged("init_distributed", {0: mine})
    else:
        store, start = _agreed_store(launch, mine, timeout_s, deadline)
    if _torch.is_async(chosen):
        torch.accelerator.set_device_index(chosen)
    if launch is None:
        return chosen
    backend = dist.get_default_backend_for_device(chosen)
    own_failures(backend, begun=False)
    how = {"store": store, "rank": launch.rank, "world_size": launch.world_size}
    connect = partial(dist.init_process_group, backend, timeout=timedelta(seconds=timeout_s), **how)
    if start is not None:
        _torch.start_alone(backend, timeout_s=timeout_s, **how)
    elif backend != "gloo":
        connect()
    else:
        _connect(connect, launch.rank, timeout_s, deadline)
    return chosen


def _connect(connect: Callable[[], Any], rank: int, timeout_s: float, deadline: float) -> None:
    """Let gloo connect the ranks, in C++."""
    try:
        bounded(connect, deadline)
    except (RuntimeError, TimeoutError) as error:
        first = errors.first_line(error, f"they did not connect within {timeout_s:g} s")
        what = f"init_distributed: rank {rank} found the store, but gloo could not connect"
        # A host's name often leads to its own loopback address.
        fix = "set GLOO_SOCKET_IFNAME, on each node, to what the others reach: `ip -br addr`"
        raise errors.CollectiveError(f"{what} it with the other ranks", [first], fix) from error


def _agreed_store(
    launch: Launch, mine: Any, timeout_s: float, deadline: float
) -> tuple[Any, int | None]:
    """The store of the launch, once all ranks found their devices fit for a start.

    The second value is the number of the start that this process comes back into, if it does.
    """
    rank, size = launch.rank, launch.world_size
    limit, judge = timedelta(seconds=timeout_s), partial(judged, "init_distributed")

    def connect() -> Any:
        holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun
        # `meet` waits for the other ranks, and names those that are missing.
        options = {"is_master": holds, "wait_for_workers": False, "multi_tenant": True}
        where = launch.master_addr, launch.master_port, size
        return dist.TCPStore(*where, timeout=limit, **options)  # pyright: ignore

    def lost(error: Exception) -> errors.MicsError:
        first = errors.first_line(error, f"no answer within {timeout_s:g} s")
        where = f"{launch.master_addr}:{launch.master_port}"
        what = f"init_distributed: rank {rank} cannot start with the store at {where}"
        fix = "start rank 0, or torchrun, on the host of MASTER_ADDR and with a free MASTER_PORT"
        timed_out = isinstance(error, TimeoutError | StoreLost) or "timed out" in first
        return (errors.CollectiveError if timed_out else GroupsError)(what, [first], fix)

    try:
        store = _torch.PrefixStore("mics_fn", bounded(connect, deadline))
    except (RuntimeError, TimeoutError, OSError) as error:
        raise lost(error) from error
    with hooks.enter(store, rank, size, timeout_s, lost) as (served, start):
        if start is not None:
            judge({rank: mine})
            return part_of_start(store, start), start
        wait = {"verb": "init_distributed", "timeout_s": timeout_s, "deadline": deadline}
        key, *_ = meet(served, range(size), rank, mine, judge, **wait)
    return part_of_start(store, int(key.rpartition("/")[2])), None


# Meetings of ranks, before any process group exists: see [Note: meetings].

EPOCH = "mics_fn/epoch"  # the key of its number; see [Note: the epoch of membership]
_LINGER_S = 1.0  # how long a rank that fails keeps the store for others to read why

Judge = Callable[[dict[int, Any]], Any]  # what each rank wrote -> what all get; raises a verdict


class Meeting(NamedTuple):
    """What the ranks agreed on."""

    key: str  # not used by an earlier meeting
    verdict: Any  # of the judge
    members: Mapping[int, int] = {}  # rank -> since when its process is one


def meet(
    store: Store,
    ranks: Sequence[int],
    rank: int,
    mine: Any,
    judge: Judge,
    *,
    verb: str,
    timeout_s: float,
    deadline: float,
    check: Callable[[float], None] = lambda idle_s: None,
) -> Meeting:
    """Judge the facts of `ranks`; each of them calls this the same number of times for a verb.

    Args:
      store: shared by all ranks.
      ranks: global ranks that meet, in the order of their positions.
      rank: this rank.
      mine: the facts of this rank, in a form that JSON keeps.
      judge: gets those of all ranks by rank; what it returns or raises comes to all of them.
      verb: who calls, for errors.
      timeout_s: bound in seconds of all that it is a part of, for errors.
      deadline: when it gives up; by `time.monotonic`.
      check: as for `poll`.

    Returns:
      A key that is new and the same on all ranks, and what the judge returned.

    Communication: O(n) small messages in all, through the store only.

    Raises:
      DesyncError, GroupsError, PlanError: what the judge raised, on every rank.
      CollectiveError: some rank did not call this in time.
    """
    prefix, number = prefix_of(ranks, verb), last_of(store, ranks, verb) + 1
    since, key = getattr(store, "since", 1), f"{prefix}/{number}"
    end = f"{key}/verdict"
    try:
        # As `faults.heartbeat.claim`, if the store knows which process writes.
        write = getattr(store, "claim", None) or (lambda key, text: store.set(key, f"1 {text}"))
        write(f"{key}/{rank}", json.dumps(mine))
        if rank == ranks[0]:
            found = _judged(store, key, ranks, judge, deadline, check)
            if found is not None:
                store.compare_set(end, "", json.dumps(found))
        if not poll(partial(store.check, [end]), len(ranks), deadline, check):
            store.compare_set(end, "", json.dumps(_absence(store, key, ranks, verb, timeout_s)))
        verdict = json.loads(store.get(end))
        store.compare_set(f"{prefix}/last", f"{number - 1}" if number > 1 else "", f"{number}")
    except BaseException:
        # So that after an interrupt all ranks can call again.
        later(store, "delete_key", f"{key}/{rank}")
        raise
    if "error" in verdict:
        with suppress(RuntimeError, errors.MicsError):
            wanted = -(-store.add(f"{prefix}/read", 1) // len(ranks)) * len(ranks)
            if rank == 0:  # which may hold the store
                had = time.monotonic() + _LINGER_S
                poll(lambda: store.add(f"{prefix}/read", 0) >= wanted, 1, had)
        raise getattr(errors, verdict["error"])(verdict["text"])
    meeting = Meeting(key, verdict["found"], dict(verdict["members"]))
    if meeting.members.get(rank, 1) != since:
        text = f"{verb}: the ranks met a process of rank {rank} that has ended since"
        raise GroupsError(text, fix=f"call {verb} again on all ranks")
    return meeting


def prefix_of(ranks: Sequence[int], verb: str) -> str:
    return f"mics_fn/{sha256(json.dumps([verb, *ranks]).encode()).hexdigest()[:16]}"


def last_of(store: Store, ranks: Sequence[int], verb: str) -> int:
    """The number of the last meeting of these ranks that came to a verdict, counted from 1 on.

    All count by verdicts, so a rank that one was given without, or that comes back as another
    process, meets the others in the next one.
    """
    return int(value_of(store, f"{prefix_of(ranks, verb)}/last") or 0)


def _judged(
    store: Store, key: str, ranks: Sequence[int], judge: Judge, *wait: Any
) -> dict[str, Any] | None:
    """The verdict on what all ranks wrote; None if some did not come, or one gave up on that."""
    found, members, waiting = {}, dict[int, int](), [*reversed(ranks)]

    def decided() -> bool:
        while waiting and store.check([f"{key}/{waiting[-1]}"]):
            since, _, text = store.get(f"{key}/{waiting[-1]}").decode().partition(" ")
            found[waiting[-1]] = json.loads(text)
            members[waiting.pop()] = int(since)
        return not waiting or store.check([f"{key}/verdict"])

    if not poll(decided, 1, *wait) or waiting:
        return None
    try:
        judgement = judge(found)
    except (errors.DesyncError, GroupsError, errors.PlanError) as error:
        return {"error": type(error).__name__, "text": str(error)}
    epoch, least = store.add(EPOCH, 1), max(members.values())
    if epoch < least:
        store.add(EPOCH, least - epoch)
    later_ones = [(other, since) for other, since in members.items() if since > 1]
    return {"found": judgement, "members": later_ones}


def _absence(
    store: Store, key: str, ranks: Sequence[int], verb: str, timeout_s: float
) -> dict[str, str]:
    """The verdict if not all ranks came in time."""
    missing = [rank for rank in ranks[:1024] if not store.check([f"{key}/{rank}"])]
    absent = f"{errors.name_ranks(missing)} did not call it"
    who = absent if missing else f"rank {ranks[0]} did not answer"
    fix = f"call {verb} on all of these ranks, equally often and in the same order"
    lines = [f"expected: {errors.name_ranks(ranks)}"]
    text = errors.message(f"{verb}: {who} within {timeout_s:g} s", lines, fix)
    return {"error": "CollectiveError", "text": text}


def part_of_start(store: Any, number: int) -> Any:
    """The part of a store for the n-th start with it; the keys of the first are those of torch."""
    return store if number == 1 else _torch.PrefixStore(f"start {number}", store)
