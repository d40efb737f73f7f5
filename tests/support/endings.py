"""Ranks as a shell or a launcher starts them, for what becomes of processes: each forked from this
one, which has imported everything, and ended as Python ends a script.

`python endings.py FOLDER CASE ...` prints, for each case, how long after the cause each rank ended,
and its exit code, as JSON.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import mics_fn as mf
from mics_fn.faults.monitor import launcher

WORLD, LIMIT_S, LONGEST_S = 2, 2.0, 50.0
PR_SET_CHILD_SUBREAPER = 36


def stepping(folder: Path, rank: int, cause: Callable[[Path, int], None]) -> None:
    """Steps until something ends them; in the fourth there may be a cause."""

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return model(x).square().mean()

    mf.init_distributed(device="cpu")
    groups = mf.make_groups(heartbeat_s=LIMIT_S, timeout_s=30)
    torch.manual_seed(0)
    trainer = mf.Trainer(torch.nn.Linear(3, 1), mf.optim.sgd(0.1), groups, loss=loss)
    for step in range(1000):
        if step == 3:
            mark(folder / f"ready{rank}")
            cause(folder, rank)
        trainer.step(torch.ones(2, 3))


def mark(path: Path) -> None:
    path.write_text(f"{time.monotonic()}")


def raises(folder: Path, rank: int) -> None:
    if rank == 1:
        mark(folder / "cause")
        raise KeyError("mine")


def exits(folder: Path, rank: int) -> None:
    if rank == 1:
        mark(folder / "cause")
        sys.exit(3)


def nothing(folder: Path, rank: int) -> None:
    pass


def sleeps(folder: Path, rank: int) -> None:
    """Nothing that it calls ends before the limit."""
    time.sleep(60)


# By case: what a rank does in a step, and whether it has a launcher, which is killed.
CASES: dict[str, tuple[Callable[[Path, int], None], bool]] = {
    "raises": (raises, False),
    "exits": (exits, False),
    "outlives": (nothing, True),
    "outlives, asleep": (sleeps, True),
}


def start(case: str, folder: Path, port: int, rank: int) -> int:
    """Fork a rank, which ends as a script does."""
    (cause, launched), pid = CASES[case], os.fork()
    if pid:
        return pid
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ |= {name: str(value) for name, value in env.items()}
    # Else the store may look for names of hosts for seconds, and answers nobody meanwhile.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if launched:
        os.environ["TORCHELASTIC_RUN_ID"] = "test"
    launcher.__init__()  # as in a new process
    with open(folder / f"output{rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    stepping(folder, rank, cause)
    sys.exit(0)


def launch(case: str, folder: Path) -> None:
    """Fork the ranks; one that is not to be killed leaves them at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start(case, folder, port, rank) for rank in range(WORLD)]
    (folder / "pids.part").write_text(json.dumps(ranks))
    (folder / "pids.part").rename(folder / "pids")
    time.sleep(LONGEST_S if CASES[case][1] else 0)
    os._exit(0)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + LONGEST_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.01)
    return path.read_text()


def run(case: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    if not (launcher_pid := os.fork()):
        launch(case, folder)
    ranks = json.loads(wait_for(folder / "pids"))
    if CASES[case][1]:
        for rank in range(WORLD):
            wait_for(folder / f"ready{rank}")
        mark(folder / "cause")
        os.kill(launcher_pid, signal.SIGKILL)
    os.waitpid(launcher_pid, 0)
    ended: dict[int, tuple[int, float]] = {}
    deadline = time.monotonic() + LONGEST_S
    while len(ended) < WORLD and time.monotonic() < deadline:
        for pid in [pid for pid in ranks if pid not in ended]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.02)
    for pid in [pid for pid in ranks if pid not in ended]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cause = float((folder / "cause").read_text())
    return {
        "codes": [ended.get(pid, (None, 0))[0] for pid in ranks],
        "seconds": [ended[pid][1] - cause if pid in ended else LONGEST_S for pid in ranks],
        "output": [(folder / f"output{rank}").read_text()[-3000:] for rank in range(WORLD)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Ranks whose launcher is gone become children of this process, which so learns how they end.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    where = Path(sys.argv[1])
    found = {case: run(case, where / case.replace(" ", "_")) for case in sys.argv[2:]}
    sys.stdout.write(json.dumps(found))
