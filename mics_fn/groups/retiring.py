"""How process groups are let go of that nobody uses any more.

[Note: retired groups] Collectives may still be under way on groups that ranks let go of, after an
error. gloo's destructor waits for them, without the lock of the interpreter. They end once every
rank has let go, for at least one of the ranks has nothing under way on a group, and those that wait
for it fail then. So a thread waits for it, one group after the other, in one order on all ranks.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch.distributed as dist

from mics_fn import _torch
from mics_fn.threads import start


def discard(group: dist.ProcessGroup) -> None:
    """Take a process group out of use, without waiting for what is under way on it."""
    if dist.get_backend(group) == "gloo":
        dist.destroy_process_group(group)
    else:
        task = partial(_torch.abort, group)
        start(threading.Thread(target=quietly, args=(task,), daemon=True))


def free(groups: list[dist.ProcessGroup], tidy: Callable[[], None]) -> None:
    """Destruct process groups to which nothing else refers, the oldest first.

    Args:
      groups: emptied.
      tidy: called before.
    """
    quietly(tidy)
    while groups:
        del groups[0]


def quietly(task: Callable[[], None]) -> None:
    """Call something that may fail because other ranks or the store are gone already."""
    with suppress(Exception):
        task()
