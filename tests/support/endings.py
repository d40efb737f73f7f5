"""Ranks as a shell or a launcher starts them, for what becomes of processes: each forked from this
one, which has imported everything, and ended as Python ends a script.

`python endings.py FOLDER CASE ...` prints, for each case, how long after the cause each rank ended,
and its exit code, as JSON.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mics_fn as mf

WORLD, LIMIT_S, LONGEST_S = 2, 2.0, 50.0


def trainer_of(groups: mf.Groups, pause_s: float) -> mf.Trainer:
    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        time.sleep(pause_s)
        return model(x).square().mean()

    torch.manual_seed(0)
    return mf.Trainer(torch.nn.Linear(3, 1), mf.optim.sgd(0.1), groups, loss=loss)


def stepping(folder: Path, rank: int, cause: Callable[[], None]) -> None:
    """Steps until something ends them; in the fourth there may be a cause."""
    mf.init_distributed(device="cpu")
    groups = mf.make_groups(heartbeat_s=LIMIT_S, timeout_s=30)
    trainer = trainer_of(groups, 0.05)
    for step in range(1000):
        if step == 3:
            cause()
        trainer.step(torch.ones(2, 3))


def mark(path: Path) -> None:
    path.write_text(f"{time.monotonic()}")


def raises(folder: Path, rank: int) -> None:
    def cause() -> None:
        if rank == 1:
            mark(folder / "cause")
            raise KeyError("mine")

    stepping(folder, rank, cause)


def exits(folder: Path, rank: int) -> None:
    def cause() -> None:
        if rank == 1:
            mark(folder / "cause")
            sys.exit(3)

    stepping(folder, rank, cause)


# By case: what each rank does.
CASES: dict[str, Callable[[Path, int], None]] = {"raises": raises, "exits": exits}


def start(case: str, folder: Path, port: int, rank: int) -> int:
    """Fork a rank, which ends as a script does."""
    pid = os.fork()
    if pid:
        return pid
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ |= {name: str(value) for name, value in env.items()}
    # Else the store may look for names of hosts for seconds, and answers nobody meanwhile.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(folder / f"output{rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    CASES[case](folder, rank)
    sys.exit(0)


def run(case: str, folder: Path) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir()
    ranks = [start(case, folder, port, rank) for rank in range(WORLD)]
    ended: dict[int, tuple[int, float]] = {}
    deadline = time.monotonic() + LONGEST_S
    while len(ended) < WORLD and time.monotonic() < deadline:
        for pid in set(ranks) - set(ended):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.02)
    for pid in set(ranks) - set(ended):
        os.kill(pid, signal.SIGKILL)
    cause = float((folder / "cause").read_text())
    return {
        "codes": [ended.get(pid, (None, 0))[0] for pid in ranks],
        "seconds": [ended[pid][1] - cause if pid in ended else LONGEST_S for pid in ranks],
        "output": [(folder / f"output{rank}").read_text()[-3000:] for rank in range(WORLD)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {case: run(case, Path(sys.argv[1], case)) for case in sys.argv[2:]}
    sys.stdout.write(json.dumps(found))
