"""What a `Trainer` tells the object that saves it, and when."""

import sys
from typing import Any

import pytest
import torch
from cases import same_bits
from test_carried import Net, Rows, held, loaded, saved
from torch import Tensor
from torch.utils.data import DataLoader

import mics_fn as mf
from mics_fn import optim
from mics_fn.train.carried import carried, take_back

KEPT: dict[int, Any] = {}  # by the number of calls


class Memory:
    """Saves into a dict, every so many steps, and loads the newest."""

    def __init__(self, every: int = 1) -> None:
        self.every, self.told = every, []

    def begin(self, trainer: mf.Trainer) -> bool:
        self.told.append("begin")
        if KEPT:
            take_back(trainer, *loaded(trainer, KEPT[max(KEPT)]))
        return bool(KEPT)

    def reset(self, trainer: mf.Trainer) -> None:
        self.told.append("reset")

    def after(self, trainer: mf.Trainer) -> None:
        step = trainer.sync_state.step
        self.told.append(step)
        if step % self.every == 0:
            KEPT[step] = saved(trainer)

    def save(self, trainer: mf.Trainer) -> None:
        self.told.append("save")

    def close(self) -> None:
        self.told.append("close")

    def took_back(self, trainer: mf.Trainer) -> None:
        self.told.append("took back")


def told_by(trainer: Any) -> list[Any]:
    return trainer.checkpoint.told


class Stumbling(Net):
    """Raises before some forward."""

    at, forgiving = -1, True

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        Stumbling.at -= 1
        if Stumbling.at == 0:
            raise ValueError("stumbled")
        return super().forward(x, numbers)


def made(groups: Any, checkpoint: Any = None, seed: int = 0) -> mf.Trainer:
    torch.manual_seed(seed)
    return mf.Trainer(Stumbling(), optim.adam(1e-2), groups, checkpoint=checkpoint)


@pytest.fixture(autouse=True)
def nothing_kept() -> Any:
    KEPT.clear()
    yield
    KEPT.clear()


def test_a_run_that_failed_goes_on() -> None:
    """A run that fails in a step, and another trainer that goes on from the last save before it."""
    groups, loader = mf.make_groups(1), DataLoader(Rows(1), 4, shuffle=True)
    whole, first = made(groups), made(groups, Memory(3))
    torch.manual_seed(0)
    whole.fit(loader, 12, progress=False)
    torch.manual_seed(0)
    Stumbling.at = 9
    with pytest.raises(ValueError, match="stumbled"):
        first.fit(loader, 12, progress=False)
    second = made(groups, Memory(3), seed=5)
    second.fit(DataLoader(Rows(1), 4, shuffle=True), 12 - second.sync_state.step, progress=False)
    same_bits(held(second), held(whole))
    assert told_by(first) == ["begin", *range(1, 9)]
    assert told_by(second) == ["begin", "took back", *range(7, 13), "close"]


def test_steps_by_hand_are_saved_too_and_a_save_that_fails_leaves_the_step_done() -> None:
    class Full(Memory):
        def after(self, trainer: mf.Trainer) -> None:
            super().after(trainer)
            raise OSError("disk full")

    trainer, loader = made(mf.make_groups(1), Memory()), DataLoader(Rows(1), 4)
    trainer.step(next(iter(loader)))
    assert told_by(trainer) == ["begin", 1]
    assert carried(trainer)[1]["data"] is None
    KEPT.clear()
    trainer = made(mf.make_groups(1), Full())
    with pytest.raises(OSError, match="disk full"):
        trainer.fit(loader, 2, progress=False)
    assert trainer.state.step == 1
    assert told_by(trainer) == ["begin", 1]


def test_a_missing_package_is_told_before_a_step_is_taken(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(mf.errors.FileError) as raised:
        mf.Checkpoints(tmp_path / "run")
    assert "saving needs the package safetensors\n  fix: pip install" in str(raised.value)
