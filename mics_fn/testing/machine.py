"""The links of this machine, and the processes that host the store, as Linux shows them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mics_fn import _torch
from mics_fn.errors import GroupsError, PlanError, message

_LISTENS = "0A"  # the state of a socket in /proc/net/tcp
_PROC = Path("/proc")
LINK = "MICS_FN_LINK_DOWN"  # names the one link that may be taken down


@contextmanager
def link_down() -> Iterator[None]:
    """A block in which the link that `LINK` names is down. Nothing is guessed: to take down the
    link of a machine loses its routes, so ranks belong into network namespaces for this.

    Raises:
      PlanError: no link is named.
      GroupsError: this process may not set it.
    """
    link = os.environ.get(LINK)
    if not link:
        text = f"inject: 'link_down' needs {LINK}"
        fix = "name a link there, of a network namespace that was made for these ranks"
        raise PlanError(message(text, fix=fix))
    _set(link, "down")
    try:
        yield
    finally:
        _set(link, "up")


def _set(link: str, state: str) -> None:
    command = ["ip", "link", "set", link, state]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    if done.returncode:
        text = f"inject: cannot set link {link} {state}"
        fix = "run as root of the namespace"
        raise GroupsError(message(text, [done.stderr.strip()], fix))


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
        raise GroupsError(message(text, [f"its address: {address}"], fix))
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
