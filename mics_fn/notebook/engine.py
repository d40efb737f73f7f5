"""What a rank is: a forked process with an engine of ipyparallel, and what it runs for the kernel.

[Note: a cell is a unit] Ranks begin a cell together, and a rank that has ended it calls nothing
until the next one. So while some ranks still run, those that have ended, or take no part, say so in
the journal of their groups, as they would say that they raised an error. A rank that waits for a
collective that they never called raises `PeerFailed` at once, instead of waiting for `timeout_s`;
one that waits for nothing goes on. The next cell takes back what they said.
"""

import os
import re
import shutil
import signal
import sys
import threading
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import parent_process
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch

import mics_fn
from mics_fn import threads
from mics_fn.errors import GroupsError, MicsError
from mics_fn.groups import announce_all, withdraw_all

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
        "IPController.enable_curve": False,  # messages are signed, and do not leave this machine
        "IPController.use_threads": True,  # one process and one for heartbeats, instead of nine
        "IPController.db_class": "nodb",  # which else keeps all messages for ever
        "TaskScheduler.scheme_name": "none",
        "HeartMonitor.period": 100,  # an engine is registered after its first heartbeat
        "HeartMonitor.max_heartmonitor_misses": 600,
    }
    argv = [f"--{name}={value}" for name, value in options.items()]
    IPController.launch_instance([f"--profile-dir={folder}", "--log-level=50", *argv])


def serve(folder: str, environment: Mapping[str, str], engine: int) -> None:
    """Serve as the engine of a rank until the process ends.

    Args:
      folder: the folder for files of the cluster.
      environment: the variables of the rank.
      engine: the number that the engine asks for.
    """
    from ipyparallel.engine.app import IPEngine

    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    if "OMP_NUM_THREADS" not in os.environ:  # as torchrun does; the variable was read long ago
        here = int(os.environ["WORLD_SIZE"])
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
    if "numpy" in sys.modules:  # a fork has the random state of its parent
        sys.modules["numpy"].random.seed()
    options = {
        "IPEngine.id": engine,
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
    from IPython.core.getipython import get_ipython

    chosen = mics_fn.init_distributed(device=device, timeout_s=timeout_s)
    groups = mics_fn.make_groups(partition_size, device=chosen)
    shell: Any = get_ipython()
    shell.events.register("pre_run_cell", lambda info: _before_cell())
    rank = int(os.environ["RANK"])
    shell.showtraceback = partial(_undisturbed, shell.showtraceback)
    shell.ask_exit = _refuse_exit
    # With ipykernel 7.4 a cell of an engine that awaits would never end: now it is a SyntaxError.
    shell.autoawait = False
    known = {"mf": mics_fn, "torch": torch, "groups": groups, "rank": rank, "device": chosen}
    shell.user_ns.update(known)
    return {"device": str(chosen), "groups": groups.describe()}


def _before_cell() -> None:
    withdraw_all()
    signal.signal(signal.SIGINT, _interrupted)  # for this cell, as ipykernel does


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, except in a finalizer, where Python would only print that."""
    inner = frame
    while inner is not None:
        if inner.f_code.co_filename == weakref.__file__ or inner.f_code.co_name == "__del__":
            start_new_thread(threads.resend, (number,))
            return
        inner = inner.f_back
    signal.default_int_handler(number, frame)


def _refuse_exit() -> NoReturn:
    """Refuse `exit()` in a cell, which would end the rank."""
    fix = "cluster.stop() in a cell without %%ranks ends all ranks, cluster.restart() renews them"
    raise GroupsError("exit(): a cell cannot end its rank", fix=fix)


def _undisturbed(show: Callable[..., None], *args: Any, **options: Any) -> None:
    """Show the error of a cell without an interrupt, which would replace the error.

    Where the error explains itself, all frames below the user's own are left out. IPython would
    read and parse their files, which takes seconds where ranks share few cores.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        error = sys.exc_info()[1]
        if error is not None:
            explained = isinstance(error, MicsError | KeyboardInterrupt)
            error.__traceback__ = _outside(error.__traceback__, _INSIDE if explained else _CALLERS)
        show(*args, **options)
    finally:
        signal.signal(signal.SIGINT, before)


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
    names().update(zip(keys, values, strict=True))


def value_of(name: str) -> list[Any]:
    """Return the value of a name in cells, in a list as that of `call`."""
    return [names()[name]]


def names() -> dict[str, Any]:
    """Return the names that cells have defined."""
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    return shell.user_ns
