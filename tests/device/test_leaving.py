"""A rank that fails leaves its groups at once, although to destroy them is collective on NCCL."""

from pathlib import Path

import pytest
from mistakes import Change, copied
from simcuda.server import Server

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]


def test_an_error_gets_out_at_once(device: Server):
    (_, others_s), (error, own_s) = device.run("left_by_an_error", 2)
    assert error == "KeyError"
    assert own_s < 4  # half a second, on a machine that does other things too
    assert others_s < 30  # it waits for rank 1 for at most its limit


def test_it_would_wait_where_groups_are_destroyed(device: Server, tmp_path: Path):
    """With the other end, rank 1 waits for rank 0 up to the limit, and its own error is lost.

    It is the limit of torch, which is twice that of the groups on a device.
    """
    root = copied(tmp_path, Change("groups/groups.py", "life.close(error)", "life.close()"))
    with pytest.raises(RuntimeError, match="rank 1: RuntimeError.*Timed out waiting 16000ms"):
        device.run("left_by_an_error", 2, root=root)
