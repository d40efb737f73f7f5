"""Errors that no block of the groups hears of, and the end of a process: other ranks are told."""

import atexit
import sys
from functools import cache
from typing import Any

from mics_fn.groups.group_state import never_destruct, tell_all
from mics_fn.groups.monitor import monitor
from mics_fn.groups.peers import end_aborts, least_limit_s


def _shell() -> Any:
    """IPython's shell if this process has one."""
    shell = sys.modules.get("IPython")
    return None if shell is None else shell.get_ipython()


def limit_by_default(ranks: int) -> float:
    """Seconds of silence after which one of so many ranks has failed.

    10 for people at a prompt, else 60; more where signs of life are too rare for that.
    """
    usual = 10.0 if hasattr(sys, "ps1") or _shell() is not None else 60.0
    return max(usual, least_limit_s(ranks))


@cache
def listen() -> None:
    """Report errors to the other ranks that no block of the groups catches."""
    shell = _shell()
    if shell is not None:
        shell.events.register("post_run_cell", _after_cell)
        return
    before = sys.excepthook

    def tell_and_show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        tell_all(error, final=not (hasattr(sys, "ps1") or sys.flags.interactive))
        before(kind, error, trace)

    sys.excepthook = tell_and_show


def _after_cell(result: Any) -> None:
    """Report the error of a cell; the next cell may continue."""
    if result.error_in_exec is not None:
        tell_all(result.error_in_exec)


@atexit.register
def _end() -> None:
    """Report to the other ranks, and end a process that could not close its groups.

    Torch destructs them at exit. Those of NCCL abort then, but those of gloo would wait.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        tell_all(SystemExit(), final=True, kind="exited")
    else:
        tell_all(error, final=True)
        never_destruct()
    monitor.linger()
    monitor.end()
    end_aborts(patience_s=5.0)
