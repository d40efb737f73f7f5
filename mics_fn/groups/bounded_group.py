"""`BoundedGroup`: a process group of a `DeviceMesh`, in whose place a model waits under watch.

[Note: groups of a mesh] The layers of a model in parts send over groups of their own, as DTensors
do, and a rank that waits there for one that has failed waits in torch, until the limit of that
group. So `make_groups` puts a `BoundedGroup` in the place of the groups of `model=` and `stages=`,
under their names, which torch looks up at each call. It passes calls on, and its waits end with the
groups that were made. After an error each rank may have left other calls undone in the group of the
mesh, so `reset` gives a new one to the same `BoundedGroup`. On an accelerator calls are not waited
for by the host: there the groups of the mesh are aborted with the others, and are bounded once
`reset` makes new ones.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mics_fn import _torch
from mics_fn.errors import CollectiveError, first_line, name_ranks
from mics_fn.groups.communicator import LAST_STEP, Comm, GroupState

_SLEEP = timedelta(milliseconds=50)


class BoundedGroup(dist.ProcessGroup):
    """Passes all calls to another process group; see [Note: groups of a mesh].

    Args:
      group: which; another one may take its place.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # pyright: ignore[reportCallIssue]
        self.group, self.users = group, list[tuple[GroupState, Comm]]()


class _Work(dist.Work):
    """What is waited for, as a call on a `BoundedGroup` gave it."""

    def __init__(self, work: Any, bounded: BoundedGroup, name: str) -> None:
        super().__init__()
        self.work, self.bounded, self.name = work, bounded, name

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait, at most until a rank of the group has failed."""
        began, users = time.monotonic(), [x for x in self.bounded.users if not x[0].closed]
        users = [x for x in users if x[0] in LAST_STEP] or users[-1:]  # the one that waits
        watched = [(state, comm) for state, comm in users if not state.on_device]
        while watched and not self.work.is_completed():
            with suppress(RuntimeError):  # of time that is up; another one is raised at the end
                return self.work.wait(_SLEEP)  # some know only then that they are done
            for state, comm in watched:
                waited_s = time.monotonic() - began
                state.watch.check((), waited_s, comm.ranks)
                if waited_s > comm.timeout_s:
                    raise state.watch.timeout_error(self._failed(comm, "it took too long"))
        try:
            return self.work.wait()
        except RuntimeError as error:
            for state, comm in users:
                failed = self._failed(comm, first_line(error))
                raise state.watch.explained(failed, wait=True) from error
            raise

    def _failed(self, comm: Comm, why: str) -> CollectiveError:
        what = f"{self.name} of the model over '{comm.name}' of {name_ranks(comm.ranks)}: {why}"
        return CollectiveError(what, fix="look at the other ranks' errors, then reset the groups")

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def get_future(self) -> Any:
        return self.work.get_future()

    def result(self) -> Any:
        return self.work.result()


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: BoundedGroup, *args: Any, **kwargs: Any) -> _Work:
        return _Work(getattr(self.group, name)(*args, **kwargs), self, name.strip("_"))

    return call


for _name in _torch.GROUP_CALLS:
    setattr(BoundedGroup, _name, _passed_on(_name))


# By their ranks, since torch takes meshes of one shape for one.
_BOUNDED: dict[tuple[int, ...], BoundedGroup] = {}


def bound_group(name: str, comm: Comm, renewed: Comm | None) -> None:
    """Let a model wait under watch in a group of a mesh.

    Args:
      name: of the group.
      comm: the communicator of these groups among the same ranks.
      renewed: the one that takes the place of the group of the mesh after a `reset`.
    """
    state, group = comm.state, _torch.group_named(name)
    if state.on_device and renewed is None:
        state.mesh_groups.append(group)
        return
    made = group if isinstance(group, BoundedGroup) else BoundedGroup(group)
    bounded = _BOUNDED.setdefault(comm.ranks, made)
    if group is not bounded:
        _torch.put_in_place(name, bounded)
        if bounded.group not in _torch.LIVE_GROUPS:  # as groups were closed that a `reset` had made
            bounded.group = group
    if renewed is not None:
        _torch.never_destruct(bounded.group)
        bounded.group = renewed.process_group()
    bounded.users = [(other, x) for other, x in bounded.users if not other.closed] + [(state, comm)]
