"""What a rank is: a forked process with an engine of ipyparallel, and what it runs for the kernel.

[Note: a cell is a unit] Ranks begin a cell together, and a rank that has ended it calls nothing
until the next one. So while some ranks still run, those that have ended, or take no part, say so in
the journal of their groups, as they would say that they raised an error. A rank that waits for a
collective that they never called raises `PeerFailed` at once, instead of waiting for `timeout_s`;
one that waits for nothing goes on. The next cell takes back what they said.
"""

import json
import os
import signal
import sys
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch

import mics_fn
from mics_fn.errors import GroupsError, MicsError
from mics_fn.groups import Topology, tell_all, withdraw_all
from mics_fn.interrupts import send_again
from mics_fn.notebook.cells import is_inside


class CellEnded(RuntimeError):
    """Error of a rank that has ended its cell; see [Note: a cell is a unit]."""


def serve(connection: Mapping[str, Any], folder: str, rank: int, engine: int) -> None:
    """Serve as the engine of a rank until the process ends.

    Args:
      connection: what ipyparallel says of its controller.
      folder: the folder for files of the engine.
      rank: this rank.
      engine: the number that the engine asks for.
    """
    from ipyparallel.engine.app import IPEngine

    os.environ["IPP_CONNECTION_INFO"] = json.dumps(connection)
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    if "OMP_NUM_THREADS" not in os.environ:  # as torchrun does; the variable was read long ago
        here = int(os.environ["MICS_FN_RANKS_HERE"])
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
    if "numpy" in sys.modules:  # a fork has the random state of its parent
        sys.modules["numpy"].random.seed()
    options = {
        "IPEngine.id": engine,
        "IPEngine.enable_nanny": False,  # the process that forked it watches it
        "IPEngine.max_heartbeat_misses": 0,
        "IPEngine.timeout": 30,
        "HistoryManager.enabled": False,
        "InteractiveShell.colors": "nocolor" if "NO_COLOR" in os.environ else "neutral",
    }
    argv = [f"--{name}={value}" for name, value in options.items()]
    IPEngine.launch_instance([f"--profile-dir={folder}", "--log-level=50", *argv])


def begin(told: str) -> dict[str, Any]:
    """Start torch.distributed and make groups; return the names that cells find.

    Args:
      told: what all ranks are told, as JSON.
    """
    from IPython.core.getipython import get_ipython

    options = json.loads(told)
    device = mics_fn.init_distributed(device=options["device"], timeout_s=options["timeout_s"])
    sizes = options["topology"]
    groups = mics_fn.make_groups(
        options["partition_size"], topology=Topology(tuple(sizes)) if sizes else None, device=device
    )
    shell: Any = get_ipython()
    shell.events.register("pre_run_cell", lambda info: _before_cell())
    rank = int(os.environ["RANK"])
    shell.showtraceback = partial(_undisturbed, shell.showtraceback)
    shell.ask_exit = _refuse_exit
    # With ipykernel 7.4 a cell of an engine that awaits would never end: now it is a SyntaxError.
    shell.autoawait = False
    known = {"mf": mics_fn, "torch": torch, "groups": groups, "rank": rank, "device": device}
    shell.user_ns.update(known)
    return {"device": str(device), "groups": groups.describe()}


def _before_cell() -> None:
    withdraw_all()
    signal.signal(signal.SIGINT, _interrupted)  # for this cell, as ipykernel does


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, except in a finalizer, where Python would only print that."""
    inner = frame
    while inner is not None:
        if inner.f_code.co_filename == weakref.__file__ or inner.f_code.co_name == "__del__":
            start_new_thread(send_again, (number,))
            return
        inner = inner.f_back
    signal.default_int_handler(number, frame)


def _refuse_exit() -> NoReturn:
    """Refuse `exit()` in a cell, which would end the rank."""
    fix = "cluster.stop() in a cell without %%ranks ends all ranks, cluster.restart() renews them"
    raise GroupsError("exit(): a cell cannot end its rank", fix=fix)


def _undisturbed(show: Callable[..., None], *args: Any, **options: Any) -> None:
    """Show the error of a cell without an interrupt, which would replace the error."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        error = sys.exc_info()[1]
        if isinstance(error, MicsError | KeyboardInterrupt):
            error.__traceback__ = _outside(error.__traceback__)
        show(*args, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """Remove frames of this library and below from a traceback.

    IPython would read and parse their files, which takes seconds where ranks share few cores.
    """
    found = list[TracebackType]()
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    # IPython leaves out the first one, which is its own.
    kept = [x for x in found[1:] if not is_inside(x.tb_frame.f_code.co_filename)]
    for each in reversed([*found[:1], *(kept or found[1:])]):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace


def aside() -> None:
    """Report to the other ranks that this one has ended the cell, or takes no part."""
    tell_all(CellEnded("it has ended this cell, or takes no part in it"))


def call(fn: Any, args: tuple[Any, ...]) -> list[Any]:
    """Call a function as a cell would: its error is reported to the other ranks.

    Returns:
      Its result in a list, since ipyparallel sorts a dict that it copies, but not one in a list.
    """
    withdraw_all()
    try:
        return [fn(*args)]
    except BaseException as error:
        tell_all(error)
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
