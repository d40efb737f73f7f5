"""Ranks as a shell or a launcher starts them, for what becomes of processes: each forked from this
one, which has imported everything, and ended as Python ends a script.

`python endings.py FOLDER CASE ...` prints, for each case, how long after the cause each rank ended,
and its exit code, as JSON.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import mics_fn as mf
from tests.stress.fault_trials import free_port, take_place

WORLD, LIMIT_S, LONGEST_S = 2, 2.0, 50.0


def step_until_the_end(case: str, folder: Path, rank: int) -> None:
    """Steps until something ends them; in the fourth rank 1 is the cause."""

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return model(x).square().mean()

    mf.init_distributed(device="cpu")
    groups = mf.make_groups(heartbeat_s=LIMIT_S, timeout_s=30)
    trainer = mf.Trainer(torch.nn.Linear(3, 1), mf.optim.sgd(0.1), groups, loss=loss)
    for step in range(1000):
        if step == 3 and rank == 1:
            (folder / "cause").write_text(f"{time.monotonic()}")
            if case == "exits":
                sys.exit(3)
            raise KeyError("mine")
        trainer.step(torch.ones(2, 3))


def start(case: str, folder: Path, port: int, rank: int) -> int:
    """Fork a rank, which ends as a script does."""
    pid = os.fork()
    if pid:
        return pid
    take_place(rank, WORLD, port, apart=False)
    with open(folder / f"output{rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    torch.manual_seed(0)
    step_until_the_end(case, folder, rank)
    sys.exit(0)


def run(case: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    port = free_port(0)
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
