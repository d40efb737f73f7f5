"""Faults of the process that hosts the store of torch.distributed, as Linux shows it."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mics_fn import _torch
from mics_fn.errors import GroupsError

_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_PROC = Path("/proc")


def store_hosts() -> list[int]:
    """The processes that host the store of torch.distributed, this one last.

    Raises:
      GroupsError: they are not on this machine, or the store is none of TCP.
    """
    _, address = _torch.store_host(_torch.default_store())
    port = address.rpartition(":")[2]
    found = _listeners(int(port)) if port else []
    if not found:
        text = "inject: the process that hosts the store was not found on this machine"
        fix = "choose a rank on the node of MASTER_ADDR, and a job with a TCPStore"
        raise GroupsError(text, [f"its address: {address}"], fix)
    return sorted(found, key=lambda pid: pid == os.getpid())


def _listeners(port: int) -> list[int]:
    """The processes that listen on a port of TCP, as far as they can be looked at."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    found = []
    for process in _PROC.iterdir():
        with suppress(OSError):
            if process.name.isdigit() and inodes & _files(process / "fd"):
                found.append(int(process.name))
    return found


def _files(folder: Path) -> set[str]:
    """What the descriptors in a folder of /proc point to."""
    found = set()
    for link in folder.iterdir():
        with suppress(OSError):
            found.add(os.readlink(link))
    return found


def _signal_store(number: int) -> Callable[[Any], None]:
    """A fault for `testing.inject`, which takes functions of a point."""

    def send(point: Any) -> None:
        for pid in store_hosts():
            os.kill(pid, number)

    return send


STORE = {
    "store_killed": _signal_store(signal.SIGKILL),
    "store_stopped": _signal_store(signal.SIGSTOP),
}
