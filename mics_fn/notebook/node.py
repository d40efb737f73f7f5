"""The process that forks ranks: it imports everything once, and watches what it forked.

Four processes that import torch at once take four times as long on few cores, so only this one
does. What it forks has its own interpreter from there on. Nothing here starts a thread pool or an
accelerator, which a fork would lose.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mics_fn.notebook.bootstrap import tie

_LOOK_S = 0.05
_LAST_CHARACTERS = 2_000  # of what a rank that ended has printed outside of cells


def serve(descriptor: int, folder: str) -> None:
    """Execute orders of the kernel, and report ended ranks, until the connection ends.

    Args:
      descriptor: of an inherited connection to the kernel.
      folder: the folder for files.
    """
    kernel = Connection(descriptor)
    for name in ("mics_fn.notebook.engine", "ipyparallel.engine.app", "torch._dynamo"):
        importlib.import_module(name)  # torch.func imports the last one, in each rank
    _show_an_error()
    node = _Node(kernel, folder)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            if kernel.poll(_LOOK_S):
                node.obey(json.loads(kernel.recv_bytes()))
            node.look()
    node.kill(list(node.pids))
    os._exit(0)


def _show_an_error() -> None:
    """Format an error, so that ranks need not each import what IPython needs for that."""
    from IPython.core.ultratb import AutoFormattedTB

    try:
        raise ValueError
    except ValueError as error:
        shown = AutoFormattedTB("Context", theme_name="neutral")
        shown.text(ValueError, error, error.__traceback__)


class _Node:
    """Ranks, and the connection to the kernel."""

    def __init__(self, kernel: Connection, folder: str) -> None:
        self._kernel, self._folder = kernel, folder
        self.pids: dict[int, int] = {}  # by rank

    def say(self, what: Mapping[str, Any]) -> None:
        self._kernel.send_bytes(json.dumps(what).encode())

    def obey(self, order: dict[str, Any]) -> None:
        """Start ranks, or send a signal to some."""
        if order["do"] == "start":
            for rank, told in order["ranks"].items():
                self._fork(int(rank), told, order["connection"])
        elif order["do"] == "kill":
            self.kill(order["ranks"])
            self.say({"killed": order["ranks"]})
        else:
            for rank in order["ranks"]:
                if rank in self.pids:
                    os.kill(self.pids[rank], order["number"])

    def look(self) -> None:
        """Report ended ranks to the kernel."""
        for rank, pid in list(self.pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self.pids[rank]
                code = os.waitstatus_to_exitcode(status)
                self.say({"ended": rank, "code": code, "output": self._output(rank)})

    def kill(self, ranks: list[int]) -> None:
        """End ranks, and wait for their end."""
        pids = [self.pids.pop(rank) for rank in ranks if rank in self.pids]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)

    def _output(self, rank: int) -> str:
        path = Path(self._folder) / f"rank{rank}.txt"
        return path.read_text(errors="replace")[-_LAST_CHARACTERS:] if path.exists() else ""

    def _fork(self, rank: int, told: dict[str, Any], connection: dict[str, Any]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self.pids[rank] = pid
            return
        try:
            tie(parent)
            output = os.open(f"{self._folder}/rank{rank}.txt", os.O_CREAT | os.O_WRONLY, 0o600)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            os.environ.update(told["environment"])
            loopback = "lo" if sys.platform == "linux" else "lo0"
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            self._kernel.close()
            sys.argv[:] = [""]
            from mics_fn.notebook import engine

            engine.serve(connection, self._folder, rank, told["engine"])
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
