"""`Cluster`: the ranks of a notebook, and what a person asks of them."""

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from mics_fn import checks
from mics_fn._torch import serve_store
from mics_fn.errors import (
    CellError,
    CollectiveError,
    GroupsError,
    PlanError,
    message,
    name_ranks,
    rank_lines,
)
from mics_fn.groups import Topology, plan_groups
from mics_fn.notebook import engine, magic
from mics_fn.notebook.bootstrap import LOOPBACK
from mics_fn.notebook.cells import FOLLOWS, Cell, Outcome, Refused, folded, plain

# The processes of a cluster as the kernel sees them: two, of which one forks the ranks.

BOOT = Path(__file__).with_name("bootstrap.py")
_LOOK_S = 0.02
_PATIENCE_S = 5.0  # for a process that was told to end


class Processes:
    """Processes of a cluster: ipyparallel's controller, the one that forks ranks, and the ranks.

    Args:
      folder: the folder of the cluster, which nobody else can read.
      size: number of ranks.
    """

    def __init__(self, folder: str, size: int) -> None:
        self._folder, self._size = folder, size
        self._started: list[subprocess.Popen] = []
        self._node, self._theirs = Pipe()  # to the process that forks ranks
        self._lost = False  # whether that process ended
        self.ended: dict[int, str] = {}  # how ranks ended, by rank
        self._killed = set[int]()

    def boot(self) -> None:
        """Start both processes."""
        self._boot("controller")
        descriptor = self._theirs.fileno()
        self._boot("node", pass_fds=[descriptor], descriptor=descriptor)
        self._theirs.close()

    def _boot(self, work: str, pass_fds: Sequence[int] = (), **told: Any) -> None:
        """Start a process that the Ctrl-C of a terminal does not reach."""
        told |= {"work": work, "parent": os.getpid(), "path": sys.path, "folder": self._folder}
        with open(f"{self._folder}/{work}.txt", "wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(BOOT), json.dumps(told)],
                pass_fds=pass_fds,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "IPYTHONDIR": f"{self._folder}/ipython"},
            )
        self._started.append(process)

    def wait_for_controller(self, deadline: float) -> tuple[str, dict[str, Any]]:
        """Wait for the controller; return its file for clients, and the options of engines."""
        folder = Path(self._folder) / "security"
        files = folder / "ipcontroller-client.json", folder / "ipcontroller-engine.json"
        while not all(file.exists() and file.read_text().endswith("}") for file in files):
            self._check(deadline, "ipyparallel's controller")
        return str(files[0]), json.loads(files[1].read_text())

    def start(
        self, told: Callable[[int], Mapping[str, Any]], connection: Mapping[str, Any]
    ) -> None:
        """Fork all ranks.

        Args:
          told: what a rank needs, by rank.
          connection: what engines need to reach ipyparallel's controller.
        """
        ranks = {rank: told(rank) for rank in range(self._size)}
        self._tell({"do": "start", "ranks": ranks, "connection": connection})
        self.ended.clear()
        self._killed.clear()

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks."""
        self._tell({"do": "signal", "ranks": list(ranks), "number": number})

    def kill(self) -> None:
        """End all ranks, and wait for their end."""
        ranks = list(range(self._size))
        self._tell({"do": "kill", "ranks": ranks})
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            self.look()
            if all(rank in self._killed or rank in self.ended for rank in ranks):
                return
            time.sleep(_LOOK_S)

    def _tell(self, order: Mapping[str, Any]) -> None:
        """Send an order to the process that forks ranks, unless that has ended."""
        try:
            self._node.send_bytes(json.dumps(order).encode())
        except OSError:
            self._lost = True

    def look(self) -> dict[int, str]:
        """Return how ranks ended since the start, by rank; never wait."""
        try:
            while not self._lost and self._node.poll():
                said = json.loads(self._node.recv_bytes())
                if "ended" in said:
                    self.ended[said["ended"]] = _ending(said["code"], said["output"])
                self._killed.update(said.get("killed", ()))
        except (EOFError, OSError):
            self._lost = True
        if self._lost:
            for rank in range(self._size):
                self.ended.setdefault(rank, "the process that forked it ended")
        return self.ended

    def check_start(self, deadline: float, what: str) -> None:
        """Raise if some rank ended, or at the time limit; then wait for a moment.

        Raises:
          GroupsError: a rank or a process ended.
          CollectiveError: time is up.
        """
        for rank, how in self.look().items():
            fix = "look at what it says, and start again"
            raise GroupsError(f"notebook.start: rank {rank} ended", [how], fix)
        self._check(deadline, what)

    def _check(self, deadline: float, what: str) -> None:
        for process in self._started:
            if process.poll() is not None:
                text = "notebook.start: a process ended that ranks need"
                raise GroupsError(text, self._printed(), "look at what it says")
        if time.monotonic() > deadline:
            text = f"notebook.start: {what} took too long"
            raise CollectiveError(text, self._printed(), "pass timeout_s=")
        time.sleep(_LOOK_S)

    def _printed(self) -> list[str]:
        """Return the last lines that both processes printed."""
        files = [Path(self._folder) / f"{work}.txt" for work in ("controller", "node")]
        return [line for file in files for line in file.read_text().splitlines()[-4:]]

    def stop(self) -> None:
        """End all processes."""
        self._node.close()  # the process at its other end ends with it
        for process in self._started:
            # Its group is its session, with all that it forked.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ending(code: int, output: str) -> str:
    """Describe how a process ended."""
    how = f"exited with code {code}"
    if code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    last = output.strip().splitlines()[-4:]
    return "\n".join([how, *last])


def gone(ended: Mapping[int, str]) -> str:
    """Describe which ranks have ended, and how, in one line."""
    by_how: dict[str, list[int]] = {}
    for rank, how in sorted(ended.items()):
        by_how.setdefault(how.partition("\n")[0], []).append(rank)
    return "; ".join(f"{name_ranks(ranks)}: {how}" for how, ranks in by_how.items())


_ASK_AGAIN_S = 0.3


class StartInfo(NamedTuple):
    """Options of ranks at their start."""

    environment: Callable[[int], Mapping[str, str]]  # by rank
    begin: str  # as `engine.begin` reads it


class Cluster:
    """Ranks that a notebook drives; made by `start`.

    In cells that begin with `%%ranks`, all ranks run what the cell says; `%%ranks 0` and
    `%%ranks 0,2` are for some. What a cell defines is there in the next one. Output that is the
    same on all ranks is shown once. As a context manager it stops the ranks at its end.

    Args:
      size: number of ranks.
      processes: what forks and watches them.
      client: the client of ipyparallel.
      connection: what engines need to reach ipyparallel's controller.
      places: makes what ranks are told at a start, and the store that they meet in.
      folder: the folder for files of this cluster.
    """

    def __init__(
        self,
        size: int,
        processes: Processes,
        client: Any,
        connection: Mapping[str, Any],
        places: Callable[[], tuple[StartInfo, Any]],
        folder: str,
    ) -> None:
        self.size = size
        self._processes, self._client, self._connection = processes, client, connection
        self._make_places, self._folder = places, folder
        self._places: StartInfo | None = None
        self._store: Any = None  # which ranks meet in; it outlives each of them
        self._engines: dict[int, int] = {}  # ipyparallel's number of each rank
        self._count = 0  # engines so far
        self._busy: dict[int, Any] = {}  # what ranks were left with that did not react
        self._facts: dict[int, dict[str, str]] = {}
        self._owner = os.getpid()  # a fork of it ends nothing
        self.stopped = False

    # Cells and functions

    def cell(self, code: str, ranks: Sequence[int] | None = None) -> None:
        """Run code on ranks, as `%%ranks` does, and show their output.

        Args:
          code: the text of a cell.
          ranks: which; None takes all.

        Communication: what the code sends.

        Raises:
          CellError: it failed on some ranks; each different error is shown once.
          GroupsError: some of these ranks are gone or busy.
        """
        self._done(self._run(ranks, lambda view: view.execute(code, silent=False, block=False)))

    def run(self, fn: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list:
        """Call a function on ranks, and return the results in the order of ranks.

        Args:
          fn: any function, also one of the notebook; names that it uses and does not define are
            those of the ranks. It, its arguments and results are copied by ipyparallel.
          args: its arguments.
          ranks: which; None takes all.

        Returns:
          One result per rank.

        Communication: what the function sends.

        Raises:
          CellError, GroupsError: as `cell`.
        """
        found = self._run(ranks, lambda view: view.apply_async(engine.call, fn, args))
        self._done(found)
        return [found.values[rank][0] for rank in sorted(found.values)]

    def push(self, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Define names on ranks, such as `cluster.push(x=1)`; values are copied by ipyparallel.

        Args:
          ranks: which; None takes all.
          values: by name.

        Raises:
          CellError, GroupsError: as `cell`.
        """
        told = list(values), list(values.values())
        self._done(self._run(ranks, lambda view: view.apply_async(engine.define, *told)))

    def pull(self, name: str, rank: int | None = None) -> Any:
        """Return the value of a name on a rank; of all ranks, a list.

        Args:
          name: what cells call it.
          rank: which; None takes all.

        Returns:
          The value, copied by ipyparallel.

        Raises:
          CellError, GroupsError: as `cell`.
        """
        chosen = None if rank is None else [rank]
        found = self._run(chosen, lambda view: view.apply_async(engine.value_of, name))
        self._done(found)
        every = [found.values[rank][0] for rank in sorted(found.values)]
        return every if rank is None else every[0]

    # After a fault

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt on all ranks, as the stop button of a notebook does."""
        self._processes.signal(range(self.size), signal.SIGINT)

    def reset(self) -> None:
        """Rebuild groups on all ranks after an error, by `groups = mf.reset(groups)`.

        States and shards stay as they are. A `Trainer` has a `reset` of its own, for a cell.

        Communication: that of `reset`.

        Raises:
          CellError, GroupsError: as `cell`; a rank that is gone has to be restarted before.
        """
        self.cell("groups = mf.reset(groups)")

    def restart(self) -> None:
        """End all ranks and start new ones, without the names that cells had defined.

        Communication: the start of torch.distributed, and small messages.

        Raises:
          GroupsError, CollectiveError: they do not start.
        """
        self._check_open()
        self._processes.kill()
        self._busy.clear()
        self.begin()
        print("all ranks are new: what cells had defined is gone, so run those cells again")

    def stop(self) -> None:
        """End all ranks and their helper processes. Stopping twice is fine."""
        if self.stopped or self._owner != os.getpid():
            return
        self.stopped = True
        with contextlib.suppress(Exception):  # of sockets whose other end is gone
            self._client.close(linger=0)
        self._processes.stop()
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        if self.stopped:
            return f"Cluster({self.size} ranks, stopped)"
        ended = self._processes.look()
        lines = rank_lines({rank: f"on {facts['device']}" for rank, facts in self._facts.items()})
        lines += sorted({f"groups: {facts['groups']}" for facts in self._facts.values()})
        if ended:
            lines.append(f"{gone(ended)}; restart() starts new ones")
        busy = [rank for rank, sent in self._busy.items() if not sent.ready()]
        if busy:
            lines.append(f"{name_ranks(busy)}: busy, and does not react to an interrupt")
        state = "" if ended or busy else ", all alive"
        return message(f"Cluster({self.size} ranks{state})", lines)

    # How ranks begin

    def begin(self, timeout_s: float = 60.0) -> None:
        """Start all ranks, with torch.distributed in a new store; called by `start`.

        Args:
          timeout_s: for all of it.
        """
        deadline, ranks = time.monotonic() + timeout_s, range(self.size)
        self._places, self._store = self._make_places()
        self._engines = {rank: self._count + rank for rank in ranks}
        self._count += self.size  # no number is used twice
        self._processes.start(self._told, self._connection)
        while not set(self._engines.values()) <= set(self._client.ids):
            self._processes.check_start(deadline, "ranks")
        self._meet(ranks, deadline)
        begin = self._places.begin
        found = self._run(None, lambda view: view.apply_async(engine.begin, begin))
        self._done(found)
        self._facts = found.values

    def _meet(self, ranks: Sequence[int], deadline: float) -> None:
        """Wait until each rank answers; an engine loses messages that were sent before."""
        waiting = {rank: list[Any]() for rank in ranks}
        asked = 0.0
        while waiting:
            if time.monotonic() - asked > _ASK_AGAIN_S:
                asked = time.monotonic()
                for rank, sent in waiting.items():
                    view = self._client[self._engines[rank]]
                    sent.append(view.execute("", silent=False, block=False))
            for rank in list(waiting):
                if any(one.ready() and one.wait_for_output(0) for one in waiting[rank]):
                    del waiting[rank]
            self._processes.check_start(deadline, "ranks")

    def _told(self, rank: int) -> Mapping[str, Any]:
        environment = self._places.environment(rank) if self._places else {}
        return {"environment": environment, "engine": self._engines[rank]}

    # How cells run

    def _run(self, ranks: Sequence[int] | None, send: Callable[[Any], Any]) -> Outcome:
        self._check_open()
        chosen = self._chosen(ranks)
        self._check_alive(chosen)
        sent = {rank: send(self._client[self._engines[rank]]) for rank in chosen}
        others = [rank for rank in range(self.size) if rank not in chosen]
        stop = partial(self._processes.signal, number=signal.SIGINT)
        cell = Cell(sent, others, self._processes.look, self._aside, stop)
        outcome = cell.wait()
        self._busy.update((rank, sent[rank]) for rank in outcome.busy)
        return outcome

    def _aside(self, rank: int) -> None:
        if rank not in self._busy:
            self._client[self._engines[rank]].apply_async(engine.aside)

    def _done(self, outcome: Outcome) -> None:
        """Raise the error of a cell, if there is one."""
        if not outcome.failures:
            return
        lines, fixes = folded(outcome.failures), []
        kinds = {failed.kind for failed in outcome.failures.values()}
        if "busy" in kinds or "gone" in kinds:
            fixes.append("cluster.restart() starts new ranks, without what cells defined")
        elif not kinds.isdisjoint(FOLLOWS):
            fixes.append("cluster.reset() makes new groups; states stay as they are")
        lines += [f"fix: {fix}" for fix in fixes]
        texts = {rank: failed.line for rank, failed in outcome.failures.items()}
        if outcome.interrupted:
            raise Interrupted(lines, plain(lines))
        raise CellError(plain(lines), texts, lines)

    def _chosen(self, ranks: Sequence[int] | None) -> list[int]:
        if ranks is None:
            return list(range(self.size))
        wrong = [rank for rank in ranks if type(rank) is not int or not 0 <= rank < self.size]
        if wrong or not ranks:
            what = f"notebook: ranks={ranks!r} of a cluster of {self.size}"
            raise Refused(message(what, fix=f"give a list of some of 0 to {self.size - 1}"))
        return sorted(set(ranks))

    def _check_open(self) -> None:
        if self.stopped:
            fix = "start another one: cluster = mf.notebook.start()"
            raise Refused(message("notebook: this cluster was stopped", fix=fix))

    def _check_alive(self, ranks: Sequence[int]) -> None:
        """Raise GroupsError if ranks cannot run a cell."""
        ended = {rank: how for rank, how in self._processes.look().items() if rank in ranks}
        if ended:
            fix = "cluster.restart() starts new ranks, without what cells defined"
            raise Refused(message(f"notebook: {gone(ended)}", fix=fix))
        self._busy = {rank: sent for rank, sent in self._busy.items() if not sent.ready()}
        busy = [rank for rank in ranks if rank in self._busy]
        if busy:
            what = f"notebook: {name_ranks(busy)} still at an earlier cell, inside C++ or stopped"
            raise Refused(message(what, fix="wait until that ends, or call cluster.restart()"))


class Interrupted(KeyboardInterrupt):
    """Interrupt of the kernel while ranks ran a cell; shows where each of them was."""

    def __init__(self, lines: Sequence[str], text: str) -> None:
        super().__init__(text)
        self._lines = list(lines)

    def _render_traceback_(self) -> list[str]:
        return self._lines


# `start`: the ranks of a notebook.

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
      GroupsError: a rank does not start.
      CollectiveError: it took too long.

    Example:
      >>> with notebook.start(1, device="cpu") as cluster:
      ...     cluster.push(x=20)
      ...     cluster.cell("y = 2 * x + len(groups.ranks)")
      ...     cluster.pull("y", rank=0)
      41
    """
    size = _ranks_here() if n is None else n
    checks.number("notebook.start", "timeout_s", timeout_s, above=0)
    fix = "pass 'auto', 'cpu', or the kind of this machine's accelerators"
    checks.instance("notebook.start", "device", device, str, "the name of a device", fix)
    if device != "auto":
        torch.device(device)  # ranks would find much later that there is none of this name
    _check_sizes(size, nodes, topology)
    if partition_size is not None:  # as each rank would find, but at once
        plan_groups(topology or Topology.of(size), partition_size)
    options = {"device": device, "partition_size": partition_size, "timeout_s": timeout_s}
    options["topology"] = topology.sizes if topology else None
    node_size = topology.sizes[-1] if topology else size // (nodes or 1)
    from ipyparallel import Client

    stop_earlier()
    folder = tempfile.mkdtemp(prefix="mics_fn_notebook_")
    deadline = time.monotonic() + timeout_s
    processes = Processes(folder, size)
    cluster: Cluster | None = None
    try:
        processes.boot()
        file, connection = processes.wait_for_controller(deadline)
        told = partial(_places, size, node_size, json.dumps(options))
        cluster = Cluster(size, processes, Client(file), connection, told, folder)
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
    """Return one rank per accelerator, or a few on the CPU."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return count or RANKS_ON_CPU


def _check_sizes(size: int, nodes: int | None, topology: Any) -> None:
    """Raise PlanError for numbers that do not fit together."""
    for name, value in (("n", size), ("nodes", nodes)):
        optional = name == "nodes"
        checks.integer("notebook.start", name, value, optional=optional, fix="give 1 or more")
    if nodes is not None and topology is not None:
        fix = "pass one of them"
        raise PlanError("notebook.start: nodes= and topology= are both given", fix=fix)
    if size % (nodes or 1):
        what = f"notebook.start: {size} ranks cannot be {nodes} equal nodes"
        raise PlanError(what, fix=f"choose nodes= from the divisors of {size}")
    if topology is not None and topology.world_size != size:
        what = f"notebook.start: {topology} has {topology.world_size} ranks, not {size}"
        raise PlanError(what, fix="pass n= to match")


def _places(size: int, node_size: int, begin: str) -> tuple[StartInfo, Any]:
    """Return the options of each rank at a start, and their store."""
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

    return StartInfo(environment, begin), store
