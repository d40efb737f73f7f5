"""The first lines of a launched rank, run by path: nothing of this package is imported before them.

Importing torch takes seconds. A rank that loses its launcher in that time must end too.
"""

import json
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its launcher, set its `sys.path`, and run the call."""
    folder = Path(sys.argv[1])
    try:
        boot = json.loads((folder / "boot.json").read_text())
    except FileNotFoundError:
        os._exit(1)  # the launch was interrupted before it knew of this process
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != boot["launcher"]:
        os._exit(1)  # it went away before the line above could tie us to it
    sys.path[:] = boot["path"]

    from mics_fn.lab.ranks.launch import work

    work(folder)


if __name__ == "__main__":
    main()
