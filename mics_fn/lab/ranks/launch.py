"""Launch a function as n ranks on this machine, through torch's own elastic launcher.

Each rank is a fresh process. The first one that fails ends them all, and what comes back is one
readable message: which rank, how, and where its full traceback is.

torch's own `TCPStore` listens on every address of the host, and what is in a store is trusted. The
agent's `c10d` rendezvous even unpickles it: whoever reaches the port runs code. So the store of
ranks that are all on this machine is given a socket that is bound to loopback alone, and the agent
meets nobody.
"""

import contextlib
import faulthandler
import json
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mics_fn import _torch
from mics_fn.errors import MicsError, message, name_ranks
from mics_fn.groups import tell_all
from mics_fn.lab.ranks.failures import exit_text

# A store that only this machine can reach, and how torch's elastic agent finds its ranks with
# it.

ADDRESS = "127.0.0.1"
BACKEND = "mics_fn_loopback"


def serve_store(port: int = 0) -> Any:
    """Serve a store at a port of the loopback address; 0 takes a free one."""
    return _torch.serve_store(ADDRESS, port)


class _Alone(RendezvousHandler):
    """Rendezvous of one agent, which meets no other; its ranks share its store."""

    def __init__(self, run_id: str) -> None:
        self._run_id, self._store = run_id, serve_store()

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(ADDRESS, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _alone(params: RendezvousParameters) -> RendezvousHandler:
    return _Alone(params.run_id)


rendezvous_handler_registry.register(BACKEND, _alone)


BOOT = Path(__file__).with_name("boot.py")
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
DEFAULTS = {"OMP_NUM_THREADS": "1"} | dict.fromkeys(
    ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), LOOPBACK
)
MONITOR_S = 0.1
# A rank that raised waits this long before it ends. When a rank is killed, its peers raise at once
# ("connection closed"); the one that was killed must be the first that the launcher sees.
LINGER_S = 0.4
MAX_LINES = 12  # of an error's message


class LaunchError(MicsError, RuntimeError):
    """The ranks did not finish. `exit_code` is what the launching program should end with."""

    def __init__(self, text: str, exit_code: int):
        super().__init__(text)
        self.exit_code = exit_code


def choose_device(device: str, n: int) -> str:
    """Return "cuda" for `auto` if there is a GPU for each of n ranks, else "cpu".

    >>> choose_device("cpu", 4)
    'cpu'
    """
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= n else "cpu"


def launch(fn: Callable[..., Any], n: int, *args: Any) -> list[Any]:
    """Run `fn(*args)` as n ranks on this machine and return their results in rank order.

    Args:
        fn: a function of an importable module; it, `args` and results travel by pickle.
        n: number of ranks.

    Returns:
        Each rank's result. Ranks find RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and the
        rendezvous in their environment; only rank 0 writes to this terminal, the others to files
        that are kept when something fails. OMP_NUM_THREADS is 1 unless it is set. Nothing listens
        beyond loopback, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME says so.

    Raises:
        LaunchError: a rank failed, or the launch was interrupted (exit code 130). No process is
            left over in either case.
    """
    folder = leave_call(fn, args)
    try:
        with _quiet_elastic(), _environment():
            elastic_launch(_config(n, folder), sys.executable)(str(BOOT), str(folder))
        results = [
            pickle.loads((folder / f"result{rank}.pickle").read_bytes()) for rank in range(n)
        ]
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise LaunchError(f"interrupted: {_all(n)} stopped", 130) from None
    except SignalException as err:
        shutil.rmtree(folder, ignore_errors=True)
        name = signal.Signals(err.sigval).name
        raise LaunchError(f"{name} received: {_all(n)} stopped", 128 + err.sigval) from None
    except ChildFailedError as err:
        raise LaunchError(_explain(err.failures, n, folder), 1) from None
    shutil.rmtree(folder, ignore_errors=True)
    return results


def leave_call(fn: Callable[..., Any], args: tuple) -> Path:
    """Write a call to a new folder, for processes that run `BOOT` with that folder."""
    call = _dumps(fn, args)
    folder = Path(tempfile.mkdtemp(prefix="mics_launch_"))
    boot = {"path": [os.path.abspath(p) for p in sys.path], "launcher": os.getpid()}
    (folder / "boot.json").write_text(json.dumps(boot))
    (folder / "call.pickle").write_bytes(call)
    return folder


def _all(n: int) -> str:
    return "the rank was" if n == 1 else f"all {n} ranks were"


def _dumps(fn: Callable[..., Any], args: tuple) -> bytes:
    if fn.__module__ == "__main__":
        raise TypeError(f"launch: {fn.__qualname__} lives in __main__; move it to a module")
    return pickle.dumps((fn, args))


def _config(n: int, folder: Path) -> LaunchConfig:
    redirects = {rank: Std.ALL if rank else Std.NONE for rank in range(n)}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n,
        run_id=uuid.uuid4().hex,
        rdzv_backend=BACKEND,
        local_addr=ADDRESS,  # not the host's name, which may resolve to nothing
        max_restarts=0,
        monitor_interval=MONITOR_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=redirects),
        # Not SIGINT: the agent would pass it on, and a rank that is still starting would answer
        # with a traceback. As a KeyboardInterrupt it makes the agent send SIGTERM instead.
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
    )


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Silence the agent's own reports, and restore the signal handlers that it replaces."""
    names = ("torch.distributed.elastic", "torch.distributed.launcher")
    loggers = [logging.getLogger(n) for n in logging.root.manager.loggerDict if n.startswith(names)]
    levels = [logger.level for logger in loggers]
    handled = [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
    handlers = [signal.getsignal(sig) for sig in handled]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        with contextlib.suppress(ValueError):  # not the main thread: nothing was set
            for sig, handler in zip(handled, handlers, strict=True):
                signal.signal(sig, handler)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Return the environment of the ranks, unless the caller has set it."""
    before = dict(os.environ)
    os.environ.update(DEFAULTS | before)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _explain(failures: dict[int, ProcessFailure], n: int, folder: Path) -> str:
    """Describe the first cause: a rank that died, else the first that raised.

    Peers of one that died raise too, but they linger (see LINGER_S), so it did not die later.
    """
    raised = {
        rank: json.loads(path.read_text())
        for rank in range(n)
        if (path := folder / f"error{rank}.json").exists()
    }
    # The agent ends the others with SIGTERM, so that signal explains nothing unless it is first.
    silent = [
        rank
        for rank, failure in failures.items()
        if rank not in raised and failure.exitcode != -signal.SIGTERM
    ]
    if silent or not raised:
        rank = next(iter(silent or failures))
        what = f"rank {rank} of {n} {exit_text(failures[rank].exitcode)}"
        return message(what, _where(folder, rank, n))
    rank = min(raised, key=lambda r: raised[r]["time_ns"])
    text = raised[rank]["text"]
    same = [r for r in sorted(raised) if raised[r]["text"] == text]
    first, *rest = text.splitlines()[:MAX_LINES]
    what = "\n".join([f"{name_ranks(same)} of {n} failed: {first}", *(f"  {r}" for r in rest)])
    return message(what, _where(folder, rank, n))


def _where(folder: Path, rank: int, n: int) -> list[str]:
    """Name the file of the full traceback, and how the other ranks ended."""
    trace = folder / f"trace{rank}.txt"
    full = trace.exists() and trace.stat().st_size > 0
    lines = [f"full traceback: {trace}" if full else f"output of the ranks: {folder}"]
    if n > 1:
        lines = [*lines, "the other ranks were stopped"]
    return lines


def work(folder: Path) -> None:
    """Run the call in `folder` on this rank, and write its result there."""
    if not folder.exists():
        os._exit(1)  # the launch was interrupted before it knew of this process
    rank = int(os.environ["RANK"])
    trace = open(folder / f"trace{rank}.txt", "w")  # noqa: SIM115  the fault handler keeps it
    faulthandler.enable(trace)
    faulthandler.register(signal.SIGUSR1, trace)  # how `bounded` asks a rank that hangs
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        fn, args = pickle.loads((folder / "call.pickle").read_bytes())
        result = pickle.dumps(fn(*args))
        (folder / f"result{rank}.pickle").write_bytes(result)
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as err:
        text = "".join(traceback.format_exception_only(err)).strip().removeprefix("mics_fn.errors.")
        trace.write("".join(traceback.format_exception(err)))
        trace.flush()
        tell_all(err, final=True)
        partial = folder / f"error{rank}.partial"
        partial.write_text(json.dumps({"time_ns": time.time_ns(), "text": text}))
        partial.rename(folder / f"error{rank}.json")
        time.sleep(LINGER_S)
        # Not by a normal exit: threads of a broken group may hold it up.
        os._exit(1)
    # A thread of gloo that has yet to let go of a tensor would abort a normal exit.
    os._exit(0)
