"""`Life`: the process groups of one `Groups`, what is in flight on them, and their two ends.

[Note: leaving by an error] To destroy a group of NCCL is collective, and the destructor of one of
gloo waits for what is under way. So a rank that left by an error would wait for the others, which
wait for it, and its traceback would be lost. It abandons its groups instead: it writes down why,
which ranks that wait on the host read within about a second, and aborts its groups. Aborting frees
memory, for which a device waits for all of its kernels, those of other groups too, and NCCL may
wait for other ranks of the node. So each group is aborted on a thread of its own, all at once, and
this rank goes on after `_PATIENCE_S` in any case.
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from mics_fn import _torch
from mics_fn.errors import message
from mics_fn.schedules import Stuck

_PATIENCE_S = 0.5  # how long a rank that leaves by an error waits for its groups to be aborted


@dataclass(eq=False)
class Life:
    """State shared by all communicators of one `Groups`: what is in flight, and what to destroy."""

    ranks: tuple[int, ...] = ()  # global ranks of the job
    rank: int = 0  # this rank, global
    whole: bool = True  # False if ranks outside the job may hold parts of the same model
    closed: bool = False
    owned: list[dist.ProcessGroup] = field(default_factory=list)  # in the order of creation
    active: list[Any] = field(default_factory=list)  # `Pending`s in flight, oldest first
    # `Channel.look` and `Channel.moved`: called while a wait makes no progress, and at its end.
    look: Callable[[Sequence[Stuck], Mapping[str, int]], None] = lambda stuck, issued: None
    moved: Callable[[], None] = lambda: None
    report: Callable[[str], None] = lambda text: None  # `Channel.report`

    def own(self, group: dist.ProcessGroup) -> None:
        """Take over a process group, which `close` will destroy."""
        self.owned.append(group)
        _OPEN.add(self)

    def abandon(self, error: BaseException) -> None:
        """Give up the process groups without the other ranks; see [Note: leaving by an error].

        Args:
          error: why; ranks of the job that wait for this one raise an error that names it.
        """
        first = f"{type(error).__name__}: {error}".partition("\n")[0]
        fix = "look at its own error, then make new groups on all ranks"
        report = partial(
            self.report, message(f"rank {self.rank} left its groups: {first}", fix=fix)
        )
        groups = [group for group in self.owned if _torch.is_alive(group)]
        tasks = [report, *(partial(_torch.abort, group) for group in groups)]
        self._let_go()
        self.owned.clear()
        threads = [threading.Thread(target=_try, args=(task,), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _PATIENCE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _let_go(self) -> None:
        self.closed = True
        self.active.clear()
        _OPEN.discard(self)

    def close(self) -> None:
        """Destroy the owned process groups, newest first; a second call has no effect."""
        self._let_go()
        while self.owned:
            group = self.owned.pop()
            if _torch.is_alive(group):
                dist.destroy_process_group(group)


_OPEN: set[Life] = set()  # what owns process groups, until it is closed


def _try(task: Callable[[], None]) -> None:
    """Call something that may fail because other ranks or the store are gone already."""
    with suppress(Exception):
        task()


@atexit.register
def _keep_after_an_error() -> None:
    """Let a process end that an error ended, although it could not leave its groups in order.

    Torch destructs them at exit. Those of NCCL abort then, but those of gloo would wait.
    """
    if getattr(sys, "last_value", None) is not None:
        for group in [group for life in _OPEN for group in life.owned]:
            if _torch.is_alive(group) and dist.get_backend(group) == "gloo":
                _torch.never_destruct(group)
