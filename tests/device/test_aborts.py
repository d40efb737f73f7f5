"""An abort of collectives leaves nothing that looks whole, on any rank."""

from pathlib import Path

import pytest
import torch
from mistakes import Change, copied
from simcuda.server import Server

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]


def test_a_step_in_which_an_abort_begins_is_not_taken_and_made_again(device: Server):
    """A device reads the flag behind the last collective; nothing is lost."""
    for found in device.run("aborted_within", 2):
        assert (found["accepted"], found["why"]) == (False, "collectives were aborted")
        assert (found["lost"], found["step"], found["calls"]) == (False, 2, 0)
        assert found["same"]
        assert found["next"] == (True, 3)


def test_it_would_be_taken_without_the_flag(device: Server, tmp_path: Path):
    """The mistake that the test before is there for."""
    flag = Change("optim/guard.py", "torch.maximum(found_inf, flag, out=found_inf)", "pass")
    root = copied(tmp_path, flag)
    assert not any(found["same"] for found in device.run("aborted_within", 2, root=root))


def test_a_step_that_was_over_is_kept(device: Server):
    kept, same = device.run("aborted", 2, ())
    for found in (kept, same):
        assert (found["lost"], found["used"], found["reset"]) == (False, "", "")


def test_a_step_that_was_not_over_is_lost_and_taken_from_a_replica(device: Server):
    ranks = device.run("aborted", 4, (0, 1))  # the first replica
    assert [found["lost"] for found in ranks] == [True, True, False, False]
    for found in ranks[:2]:
        assert found["used"].startswith("LostStateError: params.blocks.0.down.bias is lost")
        assert "opt_step at step 3 was cut short" in found["used"]
    assert [found["reset"] for found in ranks] == [""] * 4
    whole = device.run("aborted", 4, ())[0]["params"]
    for found in ranks:
        assert all(torch.equal(found["params"][name], x) for name, x in whole.items())


def test_where_no_replica_has_it_all_ranks_say_so(device: Server):
    for found in device.run("aborted", 2, (0, 1)):
        assert found["reset"].startswith("LostStateError: Trainer.reset: no replica holds")
        assert "rank 0 was cut short while it wrote a step" in found["reset"]


def test_it_would_look_whole_if_nothing_were_judged(device: Server, tmp_path: Path):
    """The mistake that these tests are there for."""
    judged = Change("groups/group_state.py", "True\n            _device.lose_queued()", "True")
    root = copied(tmp_path, judged)
    assert not any(found["lost"] for found in device.run("aborted", 2, (0, 1), root=root))
