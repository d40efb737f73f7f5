"""What a device still has to do when collectives are aborted, with events that are over at will."""

from typing import Any

import pytest
import torch

from mics_fn import _torch

CPU = torch.device("cpu")


class FakeEvent:
    def __init__(self) -> None:
        self.has_ended = False

    def query(self) -> bool:
        return self.has_ended

    def synchronize(self) -> None:
        self.has_ended = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    made: list[FakeEvent] = []

    def record(device: torch.device) -> Any:
        made.append(FakeEvent())
        return made[-1]

    monkeypatch.setattr(_torch, "record", record)
    _torch._QUEUED.clear()
    _torch._FLAGS.clear()
    return made


def test_what_was_not_over_before_an_abort_is_lost(events: list[FakeEvent]):
    lost: list[int] = []
    queued = [_torch.Queued(CPU, lambda i=i: lost.append(i)) for i in range(4)]
    events[0].has_ended = events[2].has_ended = True
    _torch.lose_queued()
    assert lost == [1, 3]
    assert [each.wait() for each in queued] == [True, False, True, False]  # however they end
    _torch.lose_queued()
    assert (lost, len(_torch._QUEUED)) == ([1, 3], 0), "what is over is not kept"


def test_a_flag_says_whether_an_abort_began_since_it_was_asked_for(events, monkeypatch):
    assert _torch.abort_flag(CPU) is None  # a device reads such memory at the call
    monkeypatch.setattr(_torch, "is_locked", lambda memory: True)
    before = _torch.abort_flag(CPU)
    assert before is _torch.abort_flag(CPU)
    assert before == 0
    _torch.lose_queued()
    after = _torch.abort_flag(CPU)
    assert (before, after) == (1, 0)


def test_time_is_given_to_what_is_queued(events: list[FakeEvent]):
    lost = list[int]()
    _torch.Queued(CPU, lambda: lost.append(0))
    events[0].has_ended = True
    _torch.lose_queued(60.0)  # at once
    _torch.Queued(CPU, lambda: lost.append(1))
    _torch.lose_queued(0.01)
    assert lost == [1]
