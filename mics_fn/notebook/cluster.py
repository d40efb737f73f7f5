"""`%%ranks` and `Cluster`: the ranks of a notebook, and what a person asks of them.

[Note: no cell hangs] A cell ends when each of its ranks has ended it, or is gone. Ranks wait for
each other in collectives, so one that fails must not leave the others waiting:

- One that raises, is killed or has ended its cell is known to the others, see [Note: a cell is a
  unit]; what waits for it raises `PeerFailed`.
- Where a rank failed, the others are interrupted after `_GRACE_S`: their cell cannot succeed, and
  they may wait for it in a way that this library does not know, such as a collective of torch.
- An interrupt of the kernel interrupts the ranks. Those that do not react to it, since they are
  inside C++, are left behind after `_REACT_S`: the kernel is free, and `restart()` ends them.

[Note: a cell is a unit] Ranks begin a cell together, and a rank that has ended it calls nothing
until the next one. So while some ranks still run, those that have ended, or take no part, say so in
the journal of their groups, as they would say that they raised an error. A rank that waits for a
collective that they never called raises `PeerFailed` at once, instead of waiting for `timeout_s`;
one that waits for nothing goes on. The next cell takes back what they said.
"""

import atexit
import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

import mics_fn
from mics_fn import errors, threads
from mics_fn._torch import serve_store
from mics_fn.groups import announce_all, withdraw_all

RESTART = "cluster.restart() starts new ranks, without what cells defined"
_POLL_S = 0.02

# What ranks printed and raised, as one text: equal parts once, others with the names of ranks.

FOLLOWS = ("PeerFailed", "PeerFileError")  # errors of ranks that wait for another one
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CELL_FILE = re.compile(r"/ipykernel_\d+/")  # in the file name that warnings give to a cell
_BAR = re.compile(r"\d+%\|.*\| *\d")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class Failed(NamedTuple):
    """Error of a rank in a cell."""

    kind: str  # the name of its type
    text: str
    trace: str = ""  # its traceback, as IPython shows it

    @property
    def line(self) -> str:
        """Type of the error and the first line of its text."""
        return f"{self.kind}: {self.text}".strip().partition("\n")[0].removesuffix(":")


def shown(error: Any, lines: Sequence[str] = ()) -> BaseException:
    """Let IPython show an error by these lines, or by its text with the fix; return it."""
    found = list(lines) or [f"{type(error).__name__}: {error}"]
    error._render_traceback_ = lambda: found
    return error


def refused(text: str, fix: str) -> BaseException:
    """Return the error of a request that ranks cannot fulfil."""
    return shown(errors.GroupsError(f"notebook: {text}", fix=fix))


def labelled(texts: Mapping[int, str]) -> str:
    r"""Merge texts of ranks: each different one with its ranks.

    >>> print(labelled({0: "3\n", 1: "4\n", 2: "3\n", 3: "4\n5\n"}), end="")
    ranks 0, 2: 3
    rank 1: 4
    rank 3:
      4
      5
    """
    parts = []
    for text, ranks in sorted(errors.by_value(texts), key=lambda found: found[1]):
        lines = text.splitlines()
        if len(lines) == 1:
            parts.append(f"{errors.name_ranks(ranks)}: {lines[0]}\n")
        elif lines:
            parts.append(f"{errors.name_ranks(ranks)}:\n{textwrap.indent(text.rstrip(), '  ')}\n")
    return "".join(parts)


def comparable(text: str) -> str:
    r"""Remove from a text what differs between equal ranks: bars, and numbers of processes.

    >>> comparable("warning\n 50%|#####     | 1/2 [00:01<00:01]\n")
    'warning\n'
    >>> comparable("/tmp/ipykernel_12/34.py:1: UserWarning: no")
    '/tmp/ipykernel_/34.py:1: UserWarning: no'
    """
    lines = (line for line in text.splitlines(keepends=True) if not _BAR.search(line))
    return _CELL_FILE.sub("/ipykernel_/", "".join(lines))


def more(shown: str, text: str) -> str:
    r"""Return what to write after `shown` to get `text`, whose last line may differ.

    >>> more("a\n", "a\nb"), more("a\n 50%", "a\n100%\nb")
    ('b', '\r100%\nb')
    """
    if text.startswith(shown):
        return text[len(shown) :]
    return "\r" + text[shown.rfind("\n") + 1 :]


def folded(failures: Mapping[int, Failed]) -> list[str]:
    """Render one traceback for each error that ranks share, and one line for followers.

    >>> lost = Failed("PeerFailed", "rank 2 failed")
    >>> failed = Failed("ValueError", "no", "Traceback:\\nValueError: no")
    >>> print(*folded({0: lost, 1: lost, 2: failed}), sep="\\n")
    rank 2:
    Traceback:
    ValueError: no
    ranks 0, 1: PeerFailed: rank 2 failed
    """
    same: dict[tuple[bool, str, str], list[int]] = {}
    for rank, failed in sorted(failures.items()):
        follows = failed.kind in FOLLOWS
        text = failed.line if follows else _ADDRESS.sub("0x..", failed.text)
        same.setdefault((follows, failed.kind, text), []).append(rank)
    lines = list[str]()
    for (follows, *_), ranks in sorted(same.items(), key=lambda found: found[0][0]):
        failed = failures[ranks[0]]
        if failed.trace and not (follows and lines):
            lines += [f"{errors.name_ranks(ranks)}:", *failed.trace.splitlines()]
        else:
            lines.append(f"{errors.name_ranks(ranks)}: {failed.line}")
    return lines


# A running cell.

_SHORT_S = 0.5  # a cell that is done by then is shown at once; else the first rank's text streams
_ASIDE_S = 1.0  # after which ranks that have ended the cell say so to those that have not
_GRACE_S = 5.0  # for ranks to hear of a failure of another one
_REACT_S = 4.5  # for ranks to react to an interrupt
_OUTPUT_S = 2.0  # for what was printed to come after the answer


class Cell:
    """Running cell, and its end by rank.

    Args:
      sent: ipyparallel's result of each rank that takes part.
      cluster: whose cell it is.
    """

    def __init__(self, sent: Mapping[int, Any], cluster: "Cluster") -> None:
        self.values: dict[int, Any] = {}  # of ranks that ended it well
        self.failures: dict[int, Failed] = {}
        self.interrupts = 0  # of the kernel
        self._sent, self._cluster = sent, cluster
        self._first = min(sent)
        self._shown = {"stdout": "", "stderr": ""}  # what the first rank printed, so far
        self._reported = set[int]()  # ranks that said that they have ended it
        self._begun = dict[str, float]()  # when what `_seconds` is asked for began

    def wait(self) -> None:
        """Wait for all ranks, and show their output; bounded as [Note: no cell hangs] says."""
        while self.interrupts < 2:
            try:
                self._wait()
                break
            except KeyboardInterrupt:
                self.interrupts += 1
                self._stop()
        self._collect()
        self._show()
        self._display()

    def _seconds(self, what: str) -> float:
        """Return for how long something is so, from the first time that it is asked for."""
        now = time.monotonic()
        return now - self._begun.setdefault(what, now)

    def _running(self) -> list[int]:
        ended = self._cluster._ended()
        return [x for x, sent in self._sent.items() if not sent.ready() and x not in ended]

    def _stop(self) -> None:
        self._cluster._signal(self._running(), signal.SIGINT)
        self._seconds("stopped")

    def _wait(self) -> None:
        while running := self._running():
            self._sent[running[0]].wait(_POLL_S)
            if self._seconds("running") > _SHORT_S:
                for name in self._shown:
                    self._stream(name)
            ended, done = self._cluster._ended(), [x for x in self._sent if x not in running]
            every = range(self._cluster.size)
            idle = {*every} - {*running, *ended} - self._reported
            if idle and self._seconds("idle") > _ASIDE_S:
                for rank in sorted(idle):
                    self._cluster._aside(rank)
                self._reported |= idle
            failed = any(x in ended or not self._sent[x].successful() for x in done)
            stopped = "stopped" in self._begun
            if failed and self._seconds("failed") > _GRACE_S and not stopped:
                self._stop()
            if stopped and self._seconds("stopped") > _REACT_S:
                return

    def _collect(self) -> None:
        """Receive the values and the errors of all ranks."""
        ended, deadline = self._cluster._ended(), time.monotonic() + _OUTPUT_S
        for rank, sent in self._sent.items():
            if sent.ready():
                sent.wait_for_output(max(0.0, deadline - time.monotonic()))
            if not sent.ready():
                ending = Failed("gone", ended[rank]) if rank in ended else None
                busy = Failed(
                    "busy", "does not react to an interrupt, as it is inside C++ or stopped"
                )
                self.failures[rank] = ending or busy
            elif sent.successful():
                self.values[rank] = sent.get()
            else:
                error = sent.exception()
                kind = getattr(error, "ename", type(error).__name__)
                text = getattr(error, "evalue", str(error))
                self.failures[rank] = Failed(kind, text, getattr(error, "traceback", ""))

    def _text(self, name: str, rank: int) -> str:
        return getattr(self._sent[rank].metadata, name) or ""

    def _stream(self, name: str) -> None:
        """Show the new output of the first rank."""
        text, stream = self._text(name, self._first), getattr(sys, name)
        stream.write(more(self._shown[name], text))
        stream.flush()
        self._shown[name] = text

    def _show(self) -> None:
        """Show the output of all ranks: once where equal; bars are those of the first rank."""
        for name in self._shown:
            texts = {rank: comparable(self._text(name, rank)) for rank in self._sent}
            others = {r: text for r, text in texts.items() if text != texts[self._first]}
            if others and not self._shown[name]:
                getattr(sys, name).write(labelled(texts))
            else:  # what was streamed stays
                self._stream(name)
                getattr(sys, name).write(labelled(others))

    def _display(self) -> None:
        """Show pictures of the first rank, and the value of the last expression of the cell."""
        for content in self._sent[self._first].metadata.outputs:
            show(content)
        found = {rank: sent.metadata.execute_result for rank, sent in self._sent.items()}
        texts = {r: c["data"].get("text/plain", "") if c else "" for r, c in found.items()}
        if len(set(texts.values())) > 1:
            sys.stdout.write(labelled(texts))
        elif found[self._first]:
            show(found[self._first])


def show(content: Mapping[str, Any]) -> None:
    """Show a picture or a value of a rank."""
    if shell_here() is None:
        print(content["data"].get("text/plain", ""))
        return
    from IPython.display import display

    display(content["data"], metadata=content.get("metadata", {}), raw=True)


def shell_here() -> Any:
    """Return IPython's shell if this process has one."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)  # it may be half imported
    return None if get is None else get()


# What a rank is: a forked process with an engine of ipyparallel, and what it runs for the kernel.

LOOPBACK = "127.0.0.1"
# Files of frames that a user has not written: what calls the functions of a notebook, and below.
_CALLERS = re.compile(r"<string>|.*/(mics_fn/notebook|ipyparallel)/")
_INSIDE = re.compile(r"<string>|.*/(mics_fn|ipyparallel|torch|optree)/")


class CellEnded(RuntimeError):
    """Error of a rank that has ended its cell; see [Note: a cell is a unit]."""


def run_forked(work: Callable[..., None], folder: str, name: str, place: str, *args: Any) -> None:
    """Run the work of a process that was forked for a cluster; it ends with the kernel.

    Args:
      work: takes the folder and `args`.
      folder: the folder for files of the cluster.
      name: of the file in it for what the process prints.
      place: the current folder of the kernel.
      args: of the work.
    """
    os.setsid()  # the Ctrl-C of a terminal does not reach it
    threads.start(threading.Thread(target=_end_with_kernel, args=(folder,), daemon=True))
    with open(f"{folder}/{name}.txt", "ab") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    os.chdir(place)
    os.environ["IPYTHONDIR"] = f"{folder}/ipython"
    work(folder, *args)


def _end_with_kernel(folder: str) -> None:
    """Wait for the end of the kernel, and end this process with all that it has started."""
    kernel = parent_process()
    if kernel is not None:
        kernel.join()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def control(folder: str) -> None:
    """Run ipyparallel's controller, which passes messages between kernel and engines."""
    from ipyparallel.controller.app import IPController

    options = {
        "IPController.ip": LOOPBACK,
        "IPController.location": LOOPBACK,
        "IPController.use_threads": True,  # one process and one for heartbeats, instead of nine
        "IPController.db_class": "nodb",  # which else keeps all messages for ever
        "TaskScheduler.scheme_name": "none",
        "HeartMonitor.period": 100,  # an engine is registered after its first heartbeat
        "HeartMonitor.max_heartmonitor_misses": 600,
    }
    argv = [f"--{name}={value}" for name, value in options.items()]
    IPController.launch_instance([f"--profile-dir={folder}", "--log-level=50", *argv])


def serve(folder: str, environment: Mapping[str, str]) -> None:
    """Serve as the engine of a rank until the process ends.

    Args:
      folder: the folder for files of the cluster.
      environment: the variables of the rank.
    """
    from ipyparallel.engine.app import IPEngine

    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    if "OMP_NUM_THREADS" not in os.environ:  # as torchrun does; the variable was read long ago
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    if "numpy" in sys.modules:  # a fork has the random state of its parent
        sys.modules["numpy"].random.seed()
    options = {
        "IPEngine.id": int(environment["RANK"]),
        "IPEngine.url_file": f"{folder}/security/ipcontroller-engine.json",
        "IPEngine.enable_nanny": False,  # the kernel watches it
        "IPEngine.max_heartbeat_misses": 0,
        "IPEngine.timeout": 30,
        "HistoryManager.enabled": False,
        "InteractiveShell.colors": "nocolor" if "NO_COLOR" in os.environ else "neutral",
    }
    argv = [f"--{name}={value}" for name, value in options.items()]
    IPEngine.launch_instance([f"--profile-dir={folder}", "--log-level=50", *argv])


def begin(device: str, partition_size: int | None, timeout_s: float) -> dict[str, Any]:
    """Start torch.distributed and make groups; return what `Cluster` shows of them.

    The arguments are those of `start`.
    """
    chosen = mics_fn.init_distributed(device=device, timeout_s=timeout_s)
    groups = mics_fn.make_groups(partition_size, device=chosen)
    shell = shell_here()
    shell.events.register("pre_run_cell", lambda info: withdraw_all())
    shell.showtraceback = partial(_show_error, shell.showtraceback)
    # With ipykernel 7.4 a cell of an engine that awaits would never end: now it is a SyntaxError.
    shell.autoawait = False
    known = {"mf": mics_fn, "torch": torch, "groups": groups, "rank": groups.rank, "device": chosen}
    shell.user_ns.update(known)
    return {"device": str(chosen), "groups": groups.describe()}


def _show_error(show: Callable[..., None], *args: Any, **options: Any) -> None:
    """Show the error of a cell; where it explains itself, without the frames below the user's own.

    IPython would read and parse their files, which takes seconds where ranks share few cores.
    """
    error = sys.exc_info()[1]
    if error is not None:
        explained = isinstance(error, errors.MicsError | KeyboardInterrupt)
        error.__traceback__ = _outside(error.__traceback__, _INSIDE if explained else _CALLERS)
    show(*args, **options)


def _outside(trace: TracebackType | None, inside: re.Pattern[str]) -> TracebackType | None:
    """Remove frames of some files from a traceback."""
    found = list[TracebackType]()
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    kept = [x for x in found if not inside.match(x.tb_frame.f_code.co_filename)]
    for each in reversed(kept or found):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace


def aside() -> None:
    """Report to the other ranks that this one has ended the cell, or takes no part."""
    announce_all(CellEnded("it has ended this cell, or takes no part in it"))


def call(fn: Any, args: tuple[Any, ...]) -> list[Any]:
    """Call a function as a cell would: its error is reported to the other ranks.

    Returns:
      Its result in a list, since ipyparallel sorts a dict that it copies, but not one in a list.
    """
    withdraw_all()
    try:
        return [fn(*args)]
    except BaseException as error:
        announce_all(error)
        raise


def define(keys: list[str], values: list[Any]) -> None:
    """Define names for cells; ipyparallel copies functions of a notebook if they are in a list."""
    shell_here().user_ns.update(zip(keys, values, strict=True))


def value_of(name: str) -> list[Any]:
    """Return the value of a name in cells, in a list as that of `call`."""
    return [shell_here().user_ns[name]]


# The processes of a cluster as the kernel sees them.


def ended_text(ended: Mapping[int, str]) -> str:
    """Describe which ranks have ended, and how, in one line."""
    first = {rank: how.partition("\n")[0] for rank, how in ended.items()}
    return "; ".join(errors.rank_lines(first))


class Cluster:
    """Ranks that a notebook drives; made by `start`.

    In cells that begin with `%%ranks`, all ranks run what the cell says; `%%ranks 0` and
    `%%ranks 0,2` are for some. What a cell defines is there in the next one. Output that is the
    same on all ranks is shown once. As a context manager it stops the ranks at its end.

    Args:
      size: number of ranks.
      node_size: number of ranks that pretend to be one node.
      options: the arguments of `begin`.
    """

    def __init__(self, size: int, node_size: int, options: Sequence[Any]) -> None:
        self.size = size
        self._node_size, self._options = node_size, options
        # It imports this once, and forks the processes; torch.func imports the last one.
        imported = ["mics_fn", "ipyparallel.controller.app", "ipyparallel.engine.app"]
        self._forks = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload([*imported, "torch._dynamo"])
        self._folder = ""  # which nobody else can read
        self._controller: Any = None  # the process of ipyparallel's controller
        self._ranks: list[Any] = []  # those of the ranks
        self._client: Any = None  # of ipyparallel
        self._store: Any = None  # which ranks meet in; it outlives each of them
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
        self._run(ranks, lambda view: view.execute(code, silent=False, block=False))

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
        return [value for (value,) in self._apply(ranks, call, fn, args)]

    def push(self, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Define names on ranks, such as `cluster.push(x=1)`; values are copied by ipyparallel.

        Args:
          ranks: which; None takes all.
          values: by name.

        Raises:
          CellError, GroupsError: as `cell`.
        """
        self._apply(ranks, define, list(values), list(values.values()))

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
        every = [value for (value,) in self._apply(chosen, value_of, name)]
        return every if rank is None else every[0]

    # After a fault

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt on all ranks, as the stop button of a notebook does."""
        self._signal(range(self.size), signal.SIGINT)

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
        self._end()
        self.begin()
        print("all ranks are new: what cells had defined is gone, so run those cells again")

    def stop(self) -> None:
        """End all ranks and their helper processes. Stopping twice is fine."""
        if self.stopped or self._owner != os.getpid():
            return
        self.stopped = True
        self._end()

    def _end(self) -> None:
        """End all processes, with all that they have started, and wait for their end."""
        with contextlib.suppress(Exception):  # of sockets whose other end is gone
            self._client.close(linger=0)
        processes = [x for x in (self._controller, *self._ranks) if x is not None]
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # one that is too young for a session of its own
        for process in processes:
            process.join()
        self._store = None
        self._busy.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        if self.stopped:
            return f"Cluster({self.size} ranks, stopped)"
        ended, busy = self._ended(), self._still_busy()
        lines = errors.rank_lines({rank: f"on {x['device']}" for rank, x in self._facts.items()})
        lines += sorted({f"groups: {facts['groups']}" for facts in self._facts.values()})
        if ended:
            lines.append(f"{ended_text(ended)}; restart() starts new ones")
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
        from ipyparallel import Client

        deadline = time.monotonic() + timeout_s
        self._folder = tempfile.mkdtemp(prefix="mics_fn_notebook_")
        self._controller, self._ranks = self._fork("controller", control), []
        self._client = Client(self._wait_for_controller(deadline))
        self._store = serve_store(LOOPBACK)
        for rank in range(self.size):
            given = dict(os.environ) | self._environment(rank)
            self._ranks.append(self._fork(f"rank{rank}", serve, given))
        while len(self._client.ids) < self.size:
            self._check_start(deadline)
        self._facts = dict(enumerate(self._apply(None, begin, *self._options)))

    def _fork(self, name: str, work: Callable[..., None], *args: Any) -> Any:
        """Start a process, which is the leader of a session, and ends with this one."""
        given = (work, self._folder, name, os.getcwd(), *args)
        process = self._forks.Process(target=run_forked, args=given, name=name)
        Path(self._folder, f"{name}.txt").write_bytes(b"")
        process.start()
        return process

    def _wait_for_controller(self, deadline: float) -> str:
        """Wait for the controller; return its file for clients."""
        folder = Path(self._folder, "security")
        files = folder / "ipcontroller-client.json", folder / "ipcontroller-engine.json"
        while not all(file.exists() and file.read_text().endswith("}") for file in files):
            self._check_start(deadline)
        return str(files[0])

    def _signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                if self._ranks[rank].exitcode is None:
                    os.kill(self._ranks[rank].pid, number)

    def _ended(self) -> dict[int, str]:
        """Return how ranks ended since the start, by rank; never wait."""
        found = {rank: self._ending(process) for rank, process in enumerate(self._ranks)}
        return {rank: how for rank, how in found.items() if how}

    def _ending(self, process: Any) -> str:
        """Describe how a process ended, and the last lines that it printed; "" if it lives."""
        code = process.exitcode
        if code is None:
            return ""
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        printed = Path(self._folder, f"{process.name}.txt").read_text(errors="replace")
        return "\n".join([how, *printed.strip().splitlines()[-4:]])

    def _check_start(self, deadline: float) -> None:
        """Raise if a process has ended, or at the time limit; then wait for a moment.

        Raises:
          GroupsError: a process ended.
          CollectiveError: time is up.
        """
        for process in (self._controller, *self._ranks):
            if how := self._ending(process):
                text = f"notebook.start: {process.name} ended"
                raise errors.GroupsError(text, [how], "look at what it says, and start again")
        if time.monotonic() > deadline:
            raise errors.CollectiveError("notebook.start: it took too long", fix="pass timeout_s=")
        time.sleep(_POLL_S)

    def _environment(self, rank: int) -> dict[str, str]:
        """Return the variables of a rank, as a launcher sets them."""
        found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size}
        found |= {"LOCAL_WORLD_SIZE": self._node_size, "GROUP_RANK": rank // self._node_size}
        found |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": self._store.port}
        found["TORCHELASTIC_USE_AGENT_STORE"] = True  # the store is not that of rank 0
        return {name: f"{value}" for name, value in found.items()}

    # How cells run

    def _apply(self, ranks: Sequence[int] | None, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function of this page on ranks; return the results in the order of ranks."""
        return self._run(ranks, lambda view: view.apply_async(fn, *args))

    def _run(self, ranks: Sequence[int] | None, send: Callable[[Any], Any]) -> list[Any]:
        """Send something to ranks, and wait for what comes of it, in their order."""
        chosen = self._chosen(ranks)
        sent = {rank: send(self._client[rank]) for rank in chosen}
        cell = Cell(sent, self)
        cell.wait()
        busy = [rank for rank, failed in cell.failures.items() if failed.kind == "busy"]
        self._busy |= {rank: sent[rank] for rank in busy}
        if not cell.failures:
            return [cell.values[rank] for rank in chosen]
        lines, kinds = folded(cell.failures), {x.kind for x in cell.failures.values()}
        if not kinds.isdisjoint(("busy", "gone")):
            lines.append(f"fix: {RESTART}")
        elif not kinds.isdisjoint(FOLLOWS):
            lines.append("fix: cluster.reset() makes new groups; states stay as they are")
        plain = _COLOR.sub("", "\n".join(lines))
        if cell.interrupts:
            raise shown(KeyboardInterrupt(plain), lines)
        texts = {rank: failed.line for rank, failed in cell.failures.items()}
        raise errors.CellError(plain, texts, lines)

    def _aside(self, rank: int) -> None:
        """Let a rank tell the others that it has ended the cell."""
        if rank not in self._busy:
            self._client[rank].apply_async(aside)

    def _chosen(self, ranks: Sequence[int] | None) -> list[int]:
        """Return the ranks that are to run a cell, if they can."""
        self._check_open()
        every = range(self.size)
        if ranks is not None and (not ranks or any(rank not in every for rank in ranks)):
            text = f"ranks={ranks!r} of a cluster of {self.size}"
            raise refused(text, f"give a list of some of 0 to {self.size - 1}")
        chosen = sorted(set(every if ranks is None else ranks))
        ended = {rank: how for rank, how in self._ended().items() if rank in chosen}
        if ended:
            raise refused(ended_text(ended), RESTART)
        if busy := [rank for rank in self._still_busy() if rank in chosen]:
            text = f"{errors.name_ranks(busy)} still at an earlier cell, inside C++ or stopped"
            raise refused(text, "wait until that ends, or cluster.restart()")
        return chosen

    def _still_busy(self) -> list[int]:
        self._busy = {rank: sent for rank, sent in self._busy.items() if not sent.ready()}
        return list(self._busy)

    def _check_open(self) -> None:
        if self.stopped:
            fix = "start another one: cluster = mf.notebook.start()"
            raise refused("this cluster was stopped", fix)


# `%%ranks`.

current: Cluster | None = None  # the cluster that was started last


def offer_magic() -> None:
    """Register `%%ranks` in IPython, also before there is a cluster: a call then names `start`."""
    shell = shell_here()
    if shell is not None:
        shell.register_magic_function(run_cell, "cell", "ranks")


def run_cell(line: str, cell: str) -> None:
    """Run this cell on all ranks; `%%ranks 0` and `%%ranks 0,2` run it on some."""
    if current is None:
        fix = "cluster = mf.notebook.start()"
        raise shown(errors.GroupsError("%%ranks: no cluster was started", fix=fix))
    current.cell(cell, ranks_in(line, current.size))


def ranks_in(line: str, size: int) -> list[int] | None:
    """Parse the ranks of `size` in the first line of a cell; None if there are none.

    >>> ranks_in("", 8), ranks_in("0", 8), ranks_in("0, 2", 8)
    (None, [0], [0, 2])
    """
    parts = line.replace(",", " ").split()
    for part in parts:
        if not part.isdecimal() or int(part) >= size:
            text = f"%%ranks {line.strip()}: {part!r} is not a rank of a cluster of {size}"
            raise refused(text, "write %%ranks, %%ranks 0 or %%ranks 0,2")
    return [int(part) for part in parts] or None


# `start`: the ranks of a notebook.


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
    gpus = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    size = (gpus or 4) if n is None else n
    if size % (nodes or 1):
        what = f"notebook.start: {size} ranks cannot be {nodes} equal nodes"
        raise errors.PlanError(what, fix=f"choose nodes= from the divisors of {size}")
    stop_earlier()
    cluster = Cluster(size, size // (nodes or 1), [device, partition_size, timeout_s])
    try:
        cluster.begin(timeout_s)
    except BaseException:
        cluster.stop()
        raise
    global current
    current = cluster
    offer_magic()
    return cluster


@atexit.register
def stop_earlier() -> None:
    """Stop the cluster that was started before."""
    if current is not None:
        current.stop()
