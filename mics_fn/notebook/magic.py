"""`%%ranks`: a cell that runs on ranks."""

import re
from typing import Any

from mics_fn.errors import message
from mics_fn.notebook.cells import Refused, shell_here

current: Any = None  # the cluster that was started last


def register(cluster: Any) -> None:
    """Register `%%ranks` for this cluster, if this process is a notebook or IPython."""
    global current
    current = cluster
    offer()


def offer() -> None:
    """Register `%%ranks` in IPython before there is a cluster; a call then names `start`."""
    shell = shell_here()
    if shell is not None:
        shell.register_magic_function(run_cell, "cell", "ranks")


def run_cell(line: str, cell: str) -> None:
    """Run this cell on all ranks; `%%ranks 0` and `%%ranks 0,2-3` run it on some."""
    if current is None:
        fix = "cluster = mf.notebook.start()"
        raise Refused(message("%%ranks: no cluster was started", fix=fix))
    current.cell(cell, ranks_in(line, current.size))


def ranks_in(line: str, size: int) -> list[int] | None:
    """Parse the ranks of `size` in the first line of a cell; None if there are none.

    >>> ranks_in("", 8), ranks_in("0", 8), ranks_in("0, 2-4", 8)
    (None, [0], [0, 2, 3, 4])
    """
    ranks: list[int] = []
    for part in re.split(r"[,\s]+", line.strip()):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if first <= last < size:
            ranks += range(first, last + 1)
        elif part:
            what = f"%%ranks {line.strip()}: {part!r} is not a rank of a cluster of {size}"
            raise Refused(message(what, fix="write %%ranks, %%ranks 0 or %%ranks 0,2-3"))
    return ranks or None
