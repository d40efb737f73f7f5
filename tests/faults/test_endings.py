"""How processes end: all soon if one fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from mics_fn.faults import monitor
from mics_fn.faults.heartbeat import departure_of
from mics_fn.faults.journal import Watcher, without_a_word
from mics_fn.groups import GroupState

ENDINGS = Path(__file__).parents[1] / "support" / "endings.py"
LIMIT_S = 10.0  # with two idle processors 3; a process ends slowly where others compete for them


def ended(folder: Path, *cases: str) -> dict[str, Any]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(ENDINGS.parents[2])
    command = [sys.executable, str(ENDINGS), str(folder), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, env=env)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.thorough
@pytest.mark.limit(240)
def test_ranks_end_together(tmp_path):
    found = ended(tmp_path, "raises", "exits")
    for how, codes in (("raises", [1, 1]), ("exits", [1, 3])):
        assert found[how]["codes"] == codes, found
        assert max(found[how]["seconds"]) <= LIMIT_S, found
    assert "PeerFailed: rank 1 left its groups: KeyError: 'mine'" in found["raises"]["output"][0]


@pytest.mark.parametrize("left", [False, True])
def test_a_rank_that_left_its_groups_in_order_may_end(left: bool):
    store: Any = HashStore()
    life = GroupState(ranks=(0, 1), key="groups")
    watch = Watcher(life, monitor.MONITOR)
    if left:
        store.set(departure_of("groups", 1), "")
    watch.say(without_a_word(1, "killed"), store)
    assert list(life.standing) == [1] * (not left)
