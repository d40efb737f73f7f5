"""The launcher of this process, and what becomes of a rank that has outlived it.

[Note: outlived] A launcher that is killed cannot end its ranks, and they would train on, with
nobody to stop them or to start them again. So each rank notices at a tick of its monitor that its
parent is another process. It tells the other ranks, and its next call on its groups raises. If it
has not ended after half of `heartbeat_s`, since it computes or waits for something else, the
process ends; so those that wait for it end before the whole of it has passed.
Only what a launcher has started is ended so: a shell or a kernel may go and leave a program alone.
"""

import os
import sys
import threading
from collections.abc import Mapping, Sequence

from mics_fn.errors import GroupsError, message
from mics_fn.groups.environment import read_launch
from mics_fn.groups.life import Life


def was_launched(env: Mapping[str, str]) -> bool:
    """Whether the parent of a process with this environment is a launcher of several ranks.

    Ranks that a shell has started have the variables of torchrun, too, but no run of it.

    >>> was_launched({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"})
    True
    >>> was_launched({"RANK": "0", "WORLD_SIZE": "2"}), was_launched({})
    (False, False)
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return True
    try:
        launch = read_launch(env)
    except GroupsError:
        return False
    return launch is not None and launch.source != "torchrun"


class Launcher:
    """The parent of this process, if it is a launcher; see [Note: outlived]."""

    def __init__(self) -> None:
        self._pid = os.getppid() if was_launched(os.environ) else None

    def look(self, lives: Sequence[Life]) -> None:
        """Give up these groups if it is gone; called at each tick of the monitor."""
        if self._pid is None or not lives or os.getppid() == self._pid:
            return
        text = f"the launcher of rank {lives[0].rank} (process {self._pid}) is gone"
        self._pid = None
        error = GroupsError(message(text, fix="start the job again"))
        grace_s = min(life.heartbeat_s for life in lives) / 2
        end = threading.Timer(grace_s, _end, (text, grace_s))
        end.daemon = True
        end.start()
        for life in lives:
            life.fail(error)
            life.tell(error, final=True, kind="exited")


def _end(text: str, grace_s: float) -> None:
    sys.stderr.write(f"{text}, and this process did not end in {grace_s:g} s\n")
    sys.stderr.flush()
    os._exit(1)


launcher = Launcher()


def _forget() -> None:
    """Forget the launcher in a forked child: its parent is a rank, which is not a launcher."""
    launcher._pid = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
