"""How processes end: all soon if one fails."""

import os
import subprocess
import sys
import time
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from mics_fn.faults import monitor
from mics_fn.faults.heartbeat import departure_of
from mics_fn.faults.journal import Watcher, without_a_word
from mics_fn.groups import GroupState
from tests.stress.fault_trials import free_port

LIMIT_S = 10.0  # with two idle processors 3; a process ends slowly where others compete for them
SCRIPT = """
import sys, time, torch, mics_fn as mf
mf.init_distributed(device="cpu")
torch.manual_seed(0)
groups = mf.make_groups(heartbeat_s=2.0, timeout_s=30)
loss, sgd = lambda model, x: model(x).square().mean(), mf.optim.sgd(0.1)
trainer = mf.Trainer(torch.nn.Linear(3, 1), sgd, groups, loss=loss)
for step in range(1000):
    if step == 3 and groups.rank == 1:
        print(time.monotonic(), flush=True)
        {cause}
    trainer.step(torch.ones(2, 3))
"""


@pytest.mark.thorough
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    ("cause", "codes", "named"),
    [
        ("raise KeyError('mine')", [1, 1], "rank 1 left its groups: KeyError: 'mine'"),
        ("sys.exit(3)", [1, 3], "rank 1 exited"),
    ],
)
def test_ranks_end_together(cause: str, codes: list[int], named: str):
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_PORT": f"{free_port(0)}", "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": "2"}
    env |= {"RES_OPTIONS": "timeout:1 attempts:1"}  # else the store looks for names of hosts
    command = [sys.executable, "-c", SCRIPT.format(cause=cause)]
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    places = [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    ranks = [subprocess.Popen(command, env=env | place, **how) for place in places]
    try:
        (began, _), (_, said) = (rank.communicate(timeout=200) for rank in reversed(ranks))
    finally:
        for rank in ranks:
            rank.kill()
    assert time.monotonic() - float(began) < LIMIT_S
    assert [rank.returncode for rank in ranks] == codes
    assert f"PeerFailed: {named}" in said


@pytest.mark.parametrize("left", [False, True])
def test_a_rank_that_left_its_groups_in_order_may_end(left: bool):
    store: Any = HashStore()
    life = GroupState(ranks=(0, 1), key="groups")
    watch = Watcher(life, monitor.MONITOR)
    if left:
        store.set(departure_of("groups", 1), "")
    watch.say(without_a_word(1, "killed"), store)
    assert list(life.standing) == [1] * (not left)
