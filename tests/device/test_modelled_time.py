"""What delays what, in the modelled time of the simulated device: no clock is read."""

from pathlib import Path

import pytest
from mistakes import Change, copied
from simcuda import Issued
from simcuda.server import Server

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]

LINK_US = {"rank": 0.1}  # per byte, inside a node
SLOW_US = {**LINK_US, "replicas": 2.0}  # the link between replicas is much slower


def _times(found: list[Issued]) -> tuple[list[Issued], list[float]]:
    """All collectives but hop 2, and when each hop 2 is through.

    Left out are the totals of the step, which come after hop 2 by design: two messages of 32 bytes.
    """
    *found, inside, across = found
    assert [each.op for each in (inside, across)] == ["all_reduce"] * 2
    assert inside.nbytes == across.nbytes == 32
    assert across.group.endswith("replicas")
    assert not inside.group.endswith("replicas")
    others = [each for each in found if not each.group.endswith("replicas")]
    return others, [each.done_us for each in found if each not in others]


def test_hop_2_delays_nothing_else(device: Server):
    """Gathers and hop 1 are through at the same time, however slow hop 2 is."""
    fast, slow = (device.run("timed", 4, us) for us in (LINK_US, SLOW_US))
    for quick, late in zip(fast, slow, strict=True):
        (others, _), (same, hop_2) = _times(quick), _times(late)
        assert same == others
        assert len(hop_2) > 3
        # Hop 2 is what takes longest here, so most of it is in flight while hop 1 goes on.
        last_hop_1 = max(each.done_us for each in same if each.op == "reduce_scatter")
        assert max(hop_2) > 1.2 * last_hop_1 > 0


def test_it_would_be_seen(device: Server, tmp_path: Path):
    """With one stream for all communicators, hop 1 waits for hop 2 of the bucket before."""
    root = copied(
        tmp_path,
        Change(
            "groups/communicator.py",
            "self._streams[device] = _device.own_stream(device)",
            "self._streams[device] = vars(self.life).setdefault(\n"
            "                str(device), _device.own_stream(device)\n            )",
        ),
    )
    fast, slow = (device.run("timed", 4, us, root=root)[0] for us in (LINK_US, SLOW_US))
    assert _times(fast)[0] != _times(slow)[0]
