"""Where processes listen, as Linux lists it."""

import os
import socket
import struct
from pathlib import Path

LISTENING = "0A"
HAS_LIST = Path("/proc/net/tcp").exists()


def listening(pid: int | str = "self") -> list[str]:
    """The addresses on which a process listens, as text."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    open_files = {os.readlink(link) for link in links if link.is_symlink()}
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and f"socket:[{fields[9]}]" in open_files:
                found.append(address_of(fields[1]))
    return found


def address_of(text: str) -> str:
    """An address as Linux lists it: words of 32 bits in the order of the machine."""
    host = text.partition(":")[0]
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
