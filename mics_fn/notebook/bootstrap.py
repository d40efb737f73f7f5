"""The first lines of a process that a notebook starts, run by path: little is imported before them.

Importing torch takes seconds. A process that loses the kernel in that time must end too, whatever
it does: so a thread watches its parent, and ends all processes of its group with it.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import threading
import time

LOOPBACK = "127.0.0.1"
_LOOK_S = 0.5


def main() -> None:
    """Tie this process to its parent, set `sys.path`, and run the named function."""
    told = json.loads(sys.argv[1])
    tie(told["parent"], told["folder"])
    sys.path[:] = told["path"]
    if told["work"] == "controller":
        control(told)
    node = importlib.import_module("mics_fn.notebook.node")
    node.serve(told["descriptor"], told["folder"])


def tie(parent: int, folder: str = "") -> None:
    """End this process and its group once its parent has ended, and remove a folder."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def control(told: dict) -> None:
    """Run ipyparallel's controller, which passes messages between kernel and engines."""
    from ipyparallel.controller.app import IPController

    options = {
        "IPController.ip": LOOPBACK,
        "IPController.location": LOOPBACK,
        "IPController.enable_curve": False,  # messages are signed, and do not leave this machine
        "IPController.use_threads": True,  # one process and one for signs of life, instead of nine
        "IPController.db_class": "nodb",  # which else keeps all messages for ever
        "TaskScheduler.scheme_name": "none",
        "HeartMonitor.period": 100,  # an engine is registered after its first sign of life
        "HeartMonitor.max_heartmonitor_misses": 600,
    }
    argv = [f"--{name}={value}" for name, value in options.items()]
    IPController.launch_instance([f"--profile-dir={told['folder']}", "--log-level=50", *argv])
    sys.exit(0)


if __name__ == "__main__":
    main()
