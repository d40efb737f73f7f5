"""How processes end: all soon if one fails, and none outlives its launcher."""

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
LIMIT_S = 2.0  # `heartbeat_s` there
# With two idle processors ranks end within 3 s of an error, and within the limit of their launcher.
# A whole process ends more slowly where others compete for them.
SLACK_S = 5.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it asks Linux for its children")


def ended(folder: Path, *cases: str) -> dict[str, Any]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(ENDINGS), str(folder), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, env=env)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.thorough
@pytest.mark.limit(240)
def test_ranks_end_together(tmp_path):
    found = ended(tmp_path, "raises", "exits", "outlives", "outlives, asleep")
    for how, codes in (("raises", [1, 1]), ("exits", [1, 3])):
        assert found[how]["codes"] == codes, found
        assert max(found[how]["seconds"]) <= 5 + SLACK_S, found
    assert "PeerFailed: rank 1 left its groups: KeyError: 'mine'" in found["raises"]["output"][0]
    for how in ("outlives", "outlives, asleep"):
        assert all(found[how]["codes"]), found
        assert max(found[how]["seconds"]) <= LIMIT_S + 1 + SLACK_S, found
        for text in found[how]["output"]:  # its own, or that of the rank that it waits for
            assert "the launcher of rank " in text


# Who has a launcher, and what is done when that is gone.


def test_a_process_ends_once_the_launcher_is_gone(monkeypatch):
    seen, mine = list[Any](), monitor.Launcher()
    monkeypatch.setattr(os, "_exit", seen.append)
    life = GroupState((0, 1), 1)
    monkeypatch.setattr(
        monitor, "announce_all", lambda error, **how: seen.append((f"{error}", how))
    )
    mine.check([life])
    mine._pid = os.getppid()
    mine.check([life])
    mine._pid += 1
    mine.check([])  # no groups are open
    assert seen == []
    mine.check([life])
    text = f"the launcher of rank 1 (process {mine._pid}) is gone\n  fix: start the job again"
    assert seen == [(text, {"final": True, "kind": "exited"}), 1], "others are told before"


@pytest.mark.parametrize("left", [False, True])
def test_a_rank_that_left_its_groups_in_order_may_end(left: bool):
    store: Any = HashStore()
    life = GroupState(ranks=(0, 1), key="groups")
    watch = Watcher(life, monitor.monitor)
    if left:
        store.set(departure_of("groups", 1), "")
    watch.say(without_a_word(1, "killed"), store)
    assert list(life.standing) == [1] * (not left)
