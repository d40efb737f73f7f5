"""What ranks do on the simulated device in tests of their own; see `apart.py`."""

from pathlib import Path

import pytest
import torch
from simcuda import Issued
from simcuda.server import Server

from mics_fn.lab.doctor import checks_of
from mics_fn.lab.doctor_gpu import PARTS

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]


def test_each_rank_takes_its_own_device_and_asks_its_memory(device: Server):
    found = device.run("with_defaults", 2)
    budget = 80 * 2**30 // 4  # a quarter of the simulated memory holds all that is gathered
    assert [(groups, chosen) for groups, chosen, _ in found] == [("cuda:0",) * 2, ("cuda:1",) * 2]
    assert all(0 < gathered < budget for *_, gathered in found)


# A rank that fails leaves its groups at once, although to destroy them is collective on NCCL.


def test_an_error_gets_out_at_once(device: Server):
    (_, others_s), (error, own_s) = device.run("left_by_an_error", 2)
    assert error == "KeyError"
    assert own_s < 4  # half a second, on a machine that does other things too
    assert others_s < 30  # it waits for rank 1 for at most its limit


def test_a_step_that_is_masked_changes_nothing(device: Server):
    """What the host reads a step late on a device is what it reads at once on the CPU."""
    for on_cpu, there, gap in device.run("masked", 2):
        assert there == on_cpu
        assert gap < 1e-5
        said, error, step, skipped = on_cpu
        assert [n for n, (_, taken, *_) in enumerate(said, 1) if not taken] == [2, 4, 5, 7, 8]
        assert (step, skipped, [samples for *_, samples in said]) == (3, 5, [12] * 8)
        assert error.startswith("grads")
        assert error.endswith("is NaN on rank 1")


# An abort of collectives leaves nothing that looks whole, on any rank.


def test_a_step_in_which_an_abort_begins_is_not_taken_and_made_again(device: Server):
    """A device reads the flag behind the last collective; nothing is lost."""
    for found in device.run("aborted_within", 2):
        assert (found["accepted"], found["why"]) == (False, "collectives were aborted")
        assert (found["lost"], found["step"], found["calls"]) == (False, 2, 0)
        assert found["same"]
        assert found["next"] == (True, 3)


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
        assert ": was cut short while it wrote a step" in found["reset"]


# Python's context variables have defaults on the thread in which a device runs backward.

BACKWARD = {
    2: ("budget 0", "keep all", "recomputation", "torch.func", "torch.func, deferred", "bf16")
    + ("clipping", "states on the host", "two compute streams, budget"),
    4: ("codes, two replicas", "overlapped", "watched"),
}


@pytest.mark.parametrize("ranks", BACKWARD)
def test_backward_reads_no_context_variable(device: Server, ranks: int):
    for known, read, issued in device.run("reads_of_backward", ranks, BACKWARD[ranks]):
        assert known == ["FOUND_INF", "TAKING", "_WRITING"]
        assert {*read} <= {*known}, "no thread but that of the caller reads them"
        assert ranks > 2 or read == known, "each is read"
        assert issued > 100, "backward issues collectives on a thread of its own"


# What delays what, in the modelled time of the simulated device: no clock is read.

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


# The parts of `python -m mics_fn doctor --gpu` on the simulated CUDA device.


# `ends` and `lost` need processes that end, and two checks of `communicators` what NCCL says.
ON_DEVICE = ["alone", "ways", "delays", "levels", "pools", "communicators", "speed"]
NOT_AVAILABLE = {"communicators": 2}


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_part_finds_nothing_wrong_and_leaves_nothing_out(
    name: str, device: Server, tmp_path: Path
):
    races = device.run("doctor", PARTS[name].ranks, name, str(tmp_path), timeout_s=240.0)
    assert races == [[]] * PARTS[name].ranks
    checks = checks_of(tmp_path, PARTS[name].ranks)
    assert [check for check in checks if not check.ok] == []
    left_out = [check for check in checks if check.value is None]
    assert len(left_out) == NOT_AVAILABLE.get(name, 0)
    late = [check.value or 0 for check in checks if check.what.endswith("delays")]
    assert (min(late) > 5) if name == "delays" else not late
    waits = {(check.value, check.limit) for check in checks if "waits of the host" in check.what}
    none, one = (0, 0), (1, 1)  # the latter of a guard that reads
    assert waits == {"alone": {none, one}, "ways": {none}, "levels": {none}}.get(name, set())
