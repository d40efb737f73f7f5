"""Nothing that an abort has torn is stepped, saved, handed on or given out; see `stalled`."""

import pytest
from matrix import MASKED, TRAINERS
from simcuda.server import Server

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]


@pytest.mark.parametrize("name", [*TRAINERS, "by hand", "by hand, kept"])
def test_a_torn_state_is_not_used(device: Server, name: str):
    """All devices stall: what all have is whole, or all say that nobody has it."""
    ranks = device.run("torn", 2, name, (), 3, 15, timeout_s=200.0)
    assert [wrong for wrong, _ in ranks] == [[]] * 2
    assert ranks[0][1] == ranks[1][1]
    assert {*ranks[0][1]} <= ({""} if name in MASKED else {"", "LostStateError"})


@pytest.mark.parametrize(
    ("name", "late"),
    [
        *(("masked", (1,)), ("recoverable", (1,)), ("recoverable", (0, 1))),
        *((name, (0, 1)) for name in ("ignored", "overlapped", "by hand")),
    ],
    ids=str,
)
def test_a_torn_state_is_taken_from_a_replica(device: Server, name: str, late: tuple[int, ...]):
    """Some devices do not get the last collective of a step, which others have done."""
    ranks = device.run("torn", 4, name, late, 1, 100, timeout_s=200.0)
    assert [wrong for wrong, _ in ranks] == [[]] * 4
    assert ranks[0][1] == ranks[1][1] == ranks[2][1] == ranks[3][1]
    assert "" in ranks[0][1][1:], "nothing was handed on"


def test_what_leaves_is_right_or_an_error(device: Server):
    assert device.run("exported", 2) == [[]] * 2


@pytest.mark.parametrize("when", ["before", "amid", "after"])
@pytest.mark.parametrize("name", ["ignored", "masked", "by hand"])
def test_a_torn_state_is_not_saved(device: Server, name: str, when: str):
    assert device.run("saves", 2, name, when, 15, timeout_s=200.0) == [[]] * 2


def test_a_heal_that_is_aborted_leaves_nothing(device: Server):
    assert device.run("healed", 4, 8, timeout_s=200.0) == [[]] * 4


@pytest.mark.parametrize("program", ["judged_late", "stale"])
def test_what_is_whole_is_kept_and_what_is_not_is_refused(device: Server, program: str):
    """A step whose flag says that all was done; and gradients that know their groups."""
    assert device.run(program, 2) == [[]] * 2


@pytest.mark.parametrize("name", ["masked", "decided", "muon"])
def test_a_rank_that_raises_ends_what_others_wait_for(device: Server, name: str):
    """The monitor aborts collectives of devices that wait, and `reset` goes on."""
    *others, (error, wrong) = device.run("peer_raises", 4, name)
    assert (error, wrong) == ("KeyError: 'mine'", [])
    for error, wrong in others:
        assert error.startswith("PeerFailed: ")
        assert "rank 3" in error
        assert wrong == []
