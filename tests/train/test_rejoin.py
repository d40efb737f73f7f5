"""Ranks that are killed and come back take their state from a replica, and lose no bit of it."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from in_parts import RATE, batch_of, groups_in_parts, trainer_in_parts

import mics_fn as mf
from tests.stress.rejoin import Loss, Rank, judged, made, run_loss

SHORT = Loss(0, 4, 2, (3,), 3, 0.0, steps=6, timeout_s=15.0)


class FromAStep(Rank):
    """Saves each step, and goes on from the newest where no replica holds it."""

    def make(self) -> mf.Trainer:
        folder = Path(self.stacks).parent / "steps"
        return made(self.trial, checkpoint=mf.Checkpoints(folder, every=1))


class Stopped(Rank):
    """Rank 3 is stopped for longer than a heartbeat, and finds that the others gave it up."""

    def _batch(self, step: int) -> Any:
        if (self.rank, step) == (3, 3) and not hasattr(self, "_was"):
            self._was, rank = True, os.getpid()
            if os.fork() == 0:
                time.sleep(4.0)
                os.kill(rank, signal.SIGCONT)
                os._exit(0)
            os.kill(rank, signal.SIGSTOP)
        return super()._batch(step)


class ResetBefore(Rank):
    """All ranks have reset their groups before one is lost, and nothing is left of the first."""

    def make(self) -> mf.Trainer:
        trainer = super().make()
        if not self.again:
            trainer.reset()
            time.sleep(0.5)  # until what the first groups wrote is deleted
        return trainer


class InParts(Rank):
    """Two parts of a model, which send over communicators of the groups."""

    def make(self) -> mf.Trainer:
        trial, bounds = self.trial, ("timeout_s", "heartbeat_s")
        mf.init_distributed(device="cpu", timeout_s=trial.timeout_s)
        how = {name: getattr(trial, name) for name in bounds}
        groups = groups_in_parts(trial.partition_size, **how)
        guard = mf.optim.Guard(mf.optim.dynamic_scale(8.0, interval=3), max_norm=1.0)
        options: dict[str, Any] = {"guard": guard, "deterministic": True, "bucket_bytes": 64}
        options["faults"] = mf.FaultPolicy(4, recoverable=True)
        return trainer_in_parts(groups, optimizer=mf.optim.adamw(RATE), **options)

    def _batch(self, step: int) -> Any:
        place: Any = self.rank // 2
        return batch_of(place, step, place)


LOSSES: dict[str, tuple[Loss, type[Rank]]] = {
    "a replica that saves": (SHORT, FromAStep),
    "a partition group": (SHORT._replace(killed=(0, 1), scheme="hpz", delay_s=0.004), Rank),
    "zero2": (SHORT._replace(killed=(0, 3), scheme="zero2", accumulate=2, at_step=1), Rank),
    "three of four": (SHORT._replace(partition_size=1, killed=(1, 2, 3), at_step=4), Rank),
    "four of eight": (Loss(1, 8, 4, (0, 5, 2, 7), 3, 0.003, 6, 2, "zero1"), Rank),
    "from a save": (SHORT._replace(killed=(1, 3)), FromAStep),
    "only stopped": (SHORT._replace(killed=(), heartbeat_s=1.0), Stopped),
    "lost again": (SHORT._replace(killed=(0, 3), again_s=0.1), Rank),
    "after a reset": (SHORT, ResetBefore),
    "a replica of each part": (SHORT._replace(partition_size=1, killed=(0, 3)), InParts),
    "chunks of both parts": (Loss(0, 8, 2, (1, 6), 3, 0.003, steps=6), InParts),
    "two parts, lost again": (Loss(0, 8, 1, (2, 5), 2, 0.0, steps=6, again_s=0.1), InParts),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.short("a partition group", "a replica of each part")
def test_a_run_with_a_loss_equals_one_without(name: str) -> None:
    """All ranks reach the last step with the bits of a job to which nothing happened."""
    trial, kind = LOSSES[name]
    plain = trial._replace(number=0, killed=(), at_step=0, delay_s=0.0, again_s=0.0)
    twin = run_loss(plain, kind if kind is InParts else Rank)
    row = judged(run_loss(trial, kind), twin.heard)
    assert row["problems"] == [], row["problems"]
    assert row["resets"] >= 1
    assert row["seconds"] < trial.timeout_s


class Apart(Rank):
    def make(self) -> mf.Trainer:
        return made(self.trial, replica_sync=mf.replicas.diloco(4), faults=mf.FaultPolicy())


class Odd(Rank):
    def make(self) -> mf.Trainer:
        return made(self.trial, optimizer=mf.optim.adamw(0.5 if self.again else 1e-2))


class HoldsTheStore(Rank):
    agent = False


PARTS = "ranks 1, 3: came back without a state"
ERRORS: dict[str, tuple[Loss, type[Rank], bool, tuple[str, ...]]] = {
    "no replica": (
        SHORT._replace(killed=(1, 3)), Rank, True,
        ("LostStateError: Trainer.reset: no replica holds the state that a lost", PARTS,
         "fix: put a state in its place that all ranks have saved, of step "),
    ),
    "no replica of a part": (
        SHORT._replace(partition_size=1, killed=(1, 3)), InParts, True,
        ("LostStateError: Trainer.reset: no replica holds the state that a lost", PARTS),
    ),
    "apart": (SHORT, Apart, True, ("replicas are independent, so each has a state of its own",)),
    "options": (SHORT, Odd, True, ("DesyncError: ", "lr", "rank 3")),
    "no store": (SHORT._replace(killed=(0,)), HoldsTheStore, False,
                 ("PeerFailed: rank 0, which holds the store,",)),
    "gone": (SHORT._replace(timeout_s=5.0), Rank, False,
             ("CollectiveError: reset: rank 3 did not call it within 5 s",)),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.short("no store")
def test_what_cannot_be_made_good_is_said_on_all_ranks(name: str) -> None:
    trial, kind, again, texts = ERRORS[name]
    found = run_loss(trial, kind, again=again)
    assert not found.silent
    assert sorted(found.heard) == [r for r in range(4) if again or r not in trial.killed]
    for heard in found.heard.values():
        assert all(text in heard.error for text in texts), heard.error


@pytest.mark.thorough
def test_a_job_that_is_started_again_as_a_whole_starts_anew() -> None:
    found, plain = (run_loss(SHORT._replace(killed=lost)) for lost in ((0, 1, 2, 3), ()))
    assert not found.silent
    for rank, heard in found.heard.items():
        assert (heard.error, heard.resets) == ("", 0)
        assert heard.digests == plain.heard[rank].digests
