"""`Cluster`: the ranks of a notebook, and what a person asks of them."""

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mics_fn import checks, errors
from mics_fn._torch import serve_store
from mics_fn.groups import Topology, plan_groups
from mics_fn.notebook import engine, magic
from mics_fn.notebook.cells import FOLLOWS, Cell, Outcome, Refused, folded, plain

# The processes of a cluster as the kernel sees them.

_POLL_S = 0.02
# What the process that forks imports once; torch.func imports the last one.
_IMPORTED = ("mics_fn.notebook.engine", "ipyparallel.controller.app", "ipyparallel.engine.app")
_IMPORTED += ("torch._dynamo",)


class Processes:
    """Processes of a cluster: ipyparallel's controller, and the ranks.

    The fork server of `multiprocessing` imports torch once, and forks them. Each is the leader of a
    session, and ends with this process.

    Args:
      folder: the folder of the cluster, which nobody else can read.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(list(_IMPORTED))
        self.controller = self._fork("controller", engine.control)
        self.ranks: list[Any] = []

    def _fork(self, name: str, work: Callable[..., None], *args: Any) -> Any:
        given = (work, self._folder, name, os.getcwd(), *args)
        process = self._forks.Process(target=engine.run_forked, args=given, name=name)
        Path(self._folder, f"{name}.txt").write_bytes(b"")
        process.start()
        return process

    def wait_for_controller(self, deadline: float) -> str:
        """Wait for the controller; return its file for clients."""
        folder = Path(self._folder, "security")
        files = folder / "ipcontroller-client.json", folder / "ipcontroller-engine.json"
        while not all(file.exists() and file.read_text().endswith("}") for file in files):
            self.check_start(deadline)
        return str(files[0])

    def start(self, environments: Sequence[Mapping[str, str]], engines: Sequence[int]) -> None:
        """Fork all ranks, each with its variables and the number of its engine."""
        self.ranks = []
        for rank, environment in enumerate(environments):
            given = dict(os.environ) | dict(environment)
            self.ranks.append(self._fork(f"rank{rank}", engine.serve, given, engines[rank]))

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                if self.ranks[rank].exitcode is None:
                    os.kill(self.ranks[rank].pid, number)

    def ended(self) -> dict[int, str]:
        """Return how ranks ended since the start, by rank; never wait."""
        codes = {rank: process.exitcode for rank, process in enumerate(self.ranks)}
        return {
            rank: self._ending(f"rank{rank}", code)
            for rank, code in codes.items()
            if code is not None
        }

    def _ending(self, name: str, code: int) -> str:
        """Describe how a process ended, and the last lines that it printed."""
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        printed = Path(self._folder, f"{name}.txt").read_text(errors="replace")
        return "\n".join([how, *printed.strip().splitlines()[-4:]])

    def check_start(self, deadline: float) -> None:
        """Raise if a process has ended, or at the time limit; then wait for a moment.

        Raises:
          GroupsError: a process ended.
          CollectiveError: time is up.
        """
        for process in (self.controller, *self.ranks):
            if process.exitcode is not None:
                text = f"notebook.start: {process.name} ended"
                how = self._ending(process.name, process.exitcode)
                raise errors.GroupsError(text, [how], "look at what it says, and start again")
        if time.monotonic() > deadline:
            raise errors.CollectiveError("notebook.start: it took too long", fix="pass timeout_s=")
        time.sleep(_POLL_S)

    def kill(self, processes: Sequence[Any]) -> None:
        """End some of the processes, with all that they have started, and wait for their end."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # one that is too young for a session of its own
        for process in processes:
            process.join()


def ended_text(ended: Mapping[int, str]) -> str:
    """Describe which ranks have ended, and how, in one line."""
    return "; ".join(
        errors.rank_lines({rank: how.partition("\n")[0] for rank, how in ended.items()})
    )


class Cluster:
    """Ranks that a notebook drives; made by `start`.

    In cells that begin with `%%ranks`, all ranks run what the cell says; `%%ranks 0` and
    `%%ranks 0,2` are for some. What a cell defines is there in the next one. Output that is the
    same on all ranks is shown once. As a context manager it stops the ranks at its end.

    Args:
      size: number of ranks.
      node_size: number of ranks that pretend to be one node.
      options: the arguments of `engine.begin`.
    """

    def __init__(self, size: int, node_size: int, options: Sequence[Any]) -> None:
        self.size = size
        self._node_size, self._options = node_size, options
        self._folder = tempfile.mkdtemp(prefix="mics_fn_notebook_")
        self._processes = Processes(self._folder)
        self._client: Any = None  # of ipyparallel
        self._store: Any = None  # which ranks meet in; it outlives each of them
        self._engines: list[int] = []  # ipyparallel's number of each rank
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
        return [value for (value,) in self._apply(ranks, engine.call, fn, args)]

    def push(self, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Define names on ranks, such as `cluster.push(x=1)`; values are copied by ipyparallel.

        Args:
          ranks: which; None takes all.
          values: by name.

        Raises:
          CellError, GroupsError: as `cell`.
        """
        self._apply(ranks, engine.define, list(values), list(values.values()))

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
        every = [value for (value,) in self._apply(chosen, engine.value_of, name)]
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
        self._processes.kill(self._processes.ranks)
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
        self._processes.kill([self._processes.controller, *self._processes.ranks])
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
        ended = self._processes.ended()
        lines = errors.rank_lines(
            {rank: f"on {facts['device']}" for rank, facts in self._facts.items()}
        )
        lines += sorted({f"groups: {facts['groups']}" for facts in self._facts.values()})
        if ended:
            lines.append(f"{ended_text(ended)}; restart() starts new ones")
        busy = [rank for rank, sent in self._busy.items() if not sent.ready()]
        if busy:
            lines.append(f"{errors.name_ranks(busy)}: busy, and does not react to an interrupt")
        state = "" if ended or busy else ", all alive"
        return errors.message(f"Cluster({self.size} ranks{state})", lines)

    # How ranks begin

    def begin(self, timeout_s: float = 60.0) -> None:
        """Start all ranks, with torch.distributed in a new store; called by `start`.

        Args:
          timeout_s: for all of it.
        """
        deadline = time.monotonic() + timeout_s
        if self._client is None:
            from ipyparallel import Client

            self._client = Client(self._processes.wait_for_controller(deadline))
        self._store = serve_store(engine.LOOPBACK)
        first = self._engines[-1] + 1 if self._engines else 0  # no number is used twice
        self._engines = list(range(first, first + self.size))
        self._processes.start([self._environment(rank) for rank in range(self.size)], self._engines)
        while not set(self._engines) <= set(self._client.ids):
            self._processes.check_start(deadline)
        self._facts = dict(enumerate(self._apply(None, engine.begin, *self._options)))

    def _environment(self, rank: int) -> dict[str, str]:
        """Return the variables of a rank, as a launcher sets them."""
        found = {
            "RANK": rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": self._node_size,
            "GROUP_RANK": rank // self._node_size,
            "MICS_FN_RANKS_HERE": self.size,
            "MASTER_ADDR": engine.LOOPBACK,
            "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is not that of rank 0
        }
        return {name: str(value) for name, value in found.items()}

    # How cells run

    def _apply(self, ranks: Sequence[int] | None, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of `engine` on ranks; return the results in the order of ranks."""
        found = self._run(ranks, lambda view: view.apply_async(fn, *args))
        self._done(found)
        return [found.values[rank] for rank in sorted(found.values)]

    def _run(self, ranks: Sequence[int] | None, send: Callable[[Any], Any]) -> Outcome:
        self._check_open()
        chosen = self._chosen(ranks)
        self._check_alive(chosen)
        sent = {rank: send(self._client[self._engines[rank]]) for rank in chosen}
        others = [rank for rank in range(self.size) if rank not in chosen]
        stop = partial(self._processes.signal, number=signal.SIGINT)
        cell = Cell(sent, others, self._processes.ended, self._aside, stop)
        outcome = cell.wait()
        self._busy |= {rank: sent[rank] for rank in outcome.busy}
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
        raise errors.CellError(plain(lines), texts, lines)

    def _chosen(self, ranks: Sequence[int] | None) -> list[int]:
        if ranks is None:
            return list(range(self.size))
        wrong = [rank for rank in ranks if type(rank) is not int or not 0 <= rank < self.size]
        if wrong or not ranks:
            what = f"notebook: ranks={ranks!r} of a cluster of {self.size}"
            raise Refused(errors.message(what, fix=f"give a list of some of 0 to {self.size - 1}"))
        return sorted(set(ranks))

    def _check_open(self) -> None:
        if self.stopped:
            fix = "start another one: cluster = mf.notebook.start()"
            raise Refused(errors.message("notebook: this cluster was stopped", fix=fix))

    def _check_alive(self, ranks: Sequence[int]) -> None:
        """Raise GroupsError if ranks cannot run a cell."""
        ended = {rank: how for rank, how in self._processes.ended().items() if rank in ranks}
        if ended:
            fix = "cluster.restart() starts new ranks, without what cells defined"
            raise Refused(errors.message(f"notebook: {ended_text(ended)}", fix=fix))
        self._busy = {rank: sent for rank, sent in self._busy.items() if not sent.ready()}
        busy = [rank for rank in ranks if rank in self._busy]
        if busy:
            who = errors.name_ranks(busy)
            what = f"notebook: {who} still at an earlier cell, inside C++ or stopped"
            raise Refused(
                errors.message(what, fix="wait until that ends, or call cluster.restart()")
            )


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
    if device != "auto":
        torch.device(device)  # ranks would find much later that there is none of this name
    for name, value in (("n", size), ("nodes", nodes)):
        optional = name == "nodes"
        checks.integer("notebook.start", name, value, optional=optional, fix="give 1 or more")
    if size % (nodes or 1):
        what = f"notebook.start: {size} ranks cannot be {nodes} equal nodes"
        raise errors.PlanError(what, fix=f"choose nodes= from the divisors of {size}")
    if partition_size is not None:  # as each rank would find, but at once
        plan_groups(Topology.of(size), partition_size)
    stop_earlier()
    cluster = Cluster(size, size // (nodes or 1), [device, partition_size, timeout_s])
    try:
        cluster.begin(timeout_s)
    except BaseException:
        cluster.stop()
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
