"""The process of one machine: it imports everything once, forks the ranks, and watches them.

Four processes that import torch at once take four times as long on few cores, so only this one
does. What it forks has its own interpreter from there on. Nothing here starts a thread pool or an
accelerator, which a fork would lose.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mics_fn.notebook.boot import tie

_ADDRESS_OF = 0x8915  # Linux's SIOCGIFADDR
_LOOK_S = 0.05
_LAST_CHARACTERS = 2_000  # of what a rank that ended has printed outside of cells


def serve_kernel(descriptor: int) -> None:
    """Do what the kernel says over an inherited connection, until that ends."""
    serve(Connection(descriptor))


def serve(kernel: Any, folder: str = "") -> None:
    """Do what the kernel says, and tell it which ranks end; ends with the connection.

    Args:
      kernel: a connection to the kernel.
      folder: the folder for files; "" if the kernel names one.
    """
    for name in ("mics_fn.notebook.engine", "ipyparallel.engine.app", "torch._dynamo"):
        importlib.import_module(name)  # torch.func imports the last one, in each rank
    _show_an_error()
    node = _Node(kernel, folder)
    with contextlib.suppress(EOFError, ConnectionError):
        node.say({"ready": True})
        while True:
            if kernel.poll(_LOOK_S):
                node.obey(json.loads(kernel.recv_bytes()))
            node.look()
    node.kill(list(node.pids))
    os._exit(0)


def _show_an_error() -> None:
    """Make the text of an error, so that ranks do not each import what IPython needs for that."""
    from IPython.core.ultratb import AutoFormattedTB

    try:
        raise ValueError
    except ValueError as error:
        shown = AutoFormattedTB("Context", theme_name="neutral")
        shown.text(ValueError, error, error.__traceback__)


class _Node:
    """The ranks of this machine."""

    def __init__(self, kernel: Any, folder: str) -> None:
        self._kernel, self._folder = kernel, folder
        self.pids: dict[int, int] = {}  # by rank

    def say(self, what: Mapping[str, Any]) -> None:
        self._kernel.send_bytes(json.dumps(what).encode())

    def obey(self, order: dict[str, Any]) -> None:
        """Start ranks, or send a signal to some."""
        if order["do"] == "start":
            self._folder = order["folder"] or self._folder
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
        """Tell the kernel of ranks that ended."""
        for rank, pid in list(self.pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self.pids[rank]
                code = os.waitstatus_to_exitcode(status)
                self.say({"ended": rank, "code": code, "output": self._output(rank)})

    def kill(self, ranks: list[int]) -> None:
        """End ranks, and wait until they are gone."""
        pids = [self.pids.pop(rank) for rank in ranks if rank in self.pids]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)

    def _interface(self) -> str:
        """The network interface of this machine that the kernel's machine is reached by."""
        address = os.environ["MASTER_ADDR"]
        with contextlib.suppress(OSError), socket.socket(fileno=self._kernel.fileno()) as end:
            if end.family == socket.AF_INET:
                address = end.getsockname()[0]
            end.detach()
        return interface_of(address)

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
            if self._interface():
                os.environ.setdefault("GLOO_SOCKET_IFNAME", self._interface())
            self._kernel.close()
            sys.argv[:] = [""]
            from mics_fn.notebook import engine

            engine.serve(connection, self._folder, rank, told["engine"])
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)


def interface_of(address: str) -> str:
    """The network interface that has an IPv4 address; "" if none is found.

    >>> interface_of("127.0.0.1") in ("lo", "lo0")
    True
    """
    if address.startswith("127."):
        return "lo" if sys.platform == "linux" else "lo0"
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(end.fileno(), _ADDRESS_OF, asked)[20:24]
                if socket.inet_ntoa(found) == address:
                    return name
    return ""
