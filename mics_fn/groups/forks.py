"""What a process that was forked from a rank may do, such as a worker of a loader.

[Note: forks] A process that is forked from a rank has its connections, but none of the threads that
serve them, and what it sent to the store would be taken for words of the rank. So at a fork all
groups fail in the child, which never destructs them either.
"""

import os
from typing import Any

import torch.distributed as dist

from mics_fn import _torch
from mics_fn.errors import GroupsError, message
from mics_fn.groups.life import end_in_fork

NO_FORK = "use groups in the process that made them only; the workers of a loader need none"

_inherited: list[Any] = []  # in a fork of a rank: the store of the rank


def check_fork(what: str) -> None:
    """Raise GroupsError in a fork of a rank, which must not use the rank's store.

    Args:
      what: what was called.
    """
    if _inherited and dist.is_initialized() and _torch.default_store() is _inherited[0]:
        raise GroupsError(message(f"{what}: this process is a fork of a rank", fix=NO_FORK))


def _after_fork() -> None:
    end_in_fork(GroupsError("this process is a fork of a rank"))
    if dist.is_available() and dist.is_initialized():
        _inherited[:] = [_torch.default_store()]
        for kept in (*_torch.groups_named(None), *_inherited):
            _torch.never_destruct(kept)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
