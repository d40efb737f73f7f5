"""Ranks that are killed and come back take their state from a replica, and lose no bit of it."""

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import same_bits
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import DesyncError, LostStateError, PeerFailed
from mics_fn.lab.ranks.pool import RankPool
from mics_fn.optim import Guard, dynamic_scale, norm_spike
from mics_fn.optim.comparing import _rounds
from mics_fn.train import stepping
from mics_fn.train.loop import Epochs
from tests.stress.rejoin import Outcome, judged, run_loss
from tests.stress.rejoin_ranks import Heard, Loss, Rank, batch_of, made

Pools = Callable[[int], RankPool]
SHORT = Loss(0, 4, 2, (3,), 3, 0.0, steps=6, timeout_s=15.0)


@cache
def twin(plain: Loss) -> dict[int, Heard]:
    return run_loss(plain).heard


def check(trial: Loss, kind: type[Rank] = Rank, slowest_s: float = 10.0) -> None:
    """All ranks reach the last step with the bits of a job to which nothing happened."""
    plain = trial._replace(number=0, killed=(), at_step=0, delay_s=0.0, again_s=0.0)
    row = judged(run_loss(trial, kind), twin(plain))
    assert row["problems"] == [], row["problems"]
    assert row["resets"] >= 1
    assert row["seconds"] < slowest_s


def errors_of(found: Outcome) -> set[str]:
    """The errors of all ranks that were heard, without what is their own."""
    assert not found.silent
    return {heard.error for heard in found.heard.values()}


@pytest.mark.parametrize(
    "trial",
    [
        SHORT,
        SHORT._replace(killed=(0, 1), scheme="hpz", delay_s=0.004),  # a whole partition group
        pytest.param(
            SHORT._replace(killed=(0, 3), scheme="zero2", accumulate=2, at_step=1),
            marks=pytest.mark.thorough,
        ),
        SHORT._replace(partition_size=1, killed=(1, 2, 3), at_step=4, delay_s=0.002),
    ],
)
@pytest.mark.short("trial1")
def test_a_run_with_a_loss_equals_one_without(trial: Loss) -> None:
    check(trial)


@pytest.mark.thorough
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("scheme", ["", "zero1", "zero2", "hpz", "fsdp"])
def test_eight_ranks(p: int, scheme: str) -> None:
    killed = tuple(place + p * (place % 2) for place in range(p))
    for k in range(2):
        trial = Loss(k, 8, p, killed, 2 + k, 0.003 * k, 6, 1 + k, scheme)
        check(trial)


def test_what_no_replica_holds_is_said_on_all_ranks() -> None:
    (text,) = errors_of(run_loss(SHORT._replace(killed=(1, 3))))
    assert text.startswith("LostStateError: Trainer.reset: no replica holds the state that a lost")
    assert "part 2 of 2: rank 1 came back without it, rank 3 came back without it" in text
    assert "fix: put a state in its place that all ranks have saved, of step " in text


class FromAFile(Rank):
    """Goes on from a state that each rank has saved, where no replica holds it."""

    def make(self) -> mf.Trainer:
        trainer = made(self.trial)
        file, reset, step = f"{self.stacks}.pt", trainer.reset, trainer.step

        def saved(batch: Any) -> Any:
            found = step(batch)
            if trainer.state.step == 1:
                torch.save((tensors(trainer), trainer.guard.scale, trainer.guard.spike), file)
            return found

        def reset_or_load() -> None:
            try:
                reset()
            except LostStateError:
                held, scale, spike = torch.load(file, weights_only=False)
                with torch.no_grad():
                    for x, y in zip(tensors(trainer), held, strict=True):
                        x.copy_(y)
                trainer.state = replace(trainer.state, step=1)
                trainer.sync_state = replace(trainer.sync_state, step=1)
                trainer.guard = replace(trainer.guard, scale=scale, spike=spike)

        vars(trainer).update(step=saved, reset=reset_or_load)
        return trainer


def test_all_can_go_on_from_a_file_instead() -> None:
    check(SHORT._replace(killed=(1, 3)), FromAFile)


class FromAStep(Rank):
    """Saves each step, and goes on from the newest where no replica holds it."""

    def make(self) -> mf.Trainer:
        folder = Path(self.stacks).parent / "steps"
        return made(self.trial, checkpoint=mf.Checkpoints(folder, every=1))


@pytest.mark.thorough
def test_all_go_on_from_the_newest_step_that_was_saved() -> None:
    check(SHORT._replace(killed=(1, 3)), FromAStep)
    check(SHORT._replace(killed=(0, 2), at_step=4, scheme="zero2", accumulate=2), FromAStep)


@pytest.mark.thorough
def test_with_checkpoints_a_replica_comes_first() -> None:
    check(SHORT, FromAStep)


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


@pytest.mark.thorough
def test_a_rank_that_was_only_stopped_comes_back() -> None:
    check(SHORT._replace(killed=(), heartbeat_s=1.0), Stopped)


class Apart(Rank):
    def make(self) -> mf.Trainer:
        return made(self.trial, replica_sync=mf.replicas.diloco(4), recoverable=False)


def test_replicas_that_are_apart_hold_nothing_for_each_other() -> None:
    (text,) = errors_of(run_loss(SHORT, Apart))
    assert text.startswith("LostStateError: ")
    assert "replicas are apart, so each has a state of its own" in text


class Odd(Rank):
    def make(self) -> mf.Trainer:
        return made(self.trial, optimizer=mf.optim.adamw(0.5 if self.again else 1e-2))


def test_a_rank_that_comes_back_with_other_options_is_refused() -> None:
    (text,) = errors_of(run_loss(SHORT, Odd))
    assert text.startswith("DesyncError: ")
    assert "lr" in text
    assert "rank 3" in text


class HoldsTheStore(Rank):
    agent = False


def test_without_the_store_the_job_is_over() -> None:
    found = run_loss(SHORT._replace(killed=(0,)), HoldsTheStore, again=False)
    assert not found.silent
    assert sorted(found.heard) == [1, 2, 3]
    for heard in found.heard.values():
        assert heard.error.startswith("PeerFailed: rank 0, which holds the store,")


@pytest.mark.thorough
def test_a_rank_that_never_comes_back_is_named() -> None:
    (text,) = errors_of(run_loss(SHORT._replace(timeout_s=5.0), again=False))
    assert text.startswith("CollectiveError: reset: rank 3 did not call it within 5 s")


@pytest.mark.thorough
def test_a_job_that_is_started_again_as_a_whole_starts_anew() -> None:
    found = run_loss(SHORT._replace(killed=(0, 1, 2, 3)))
    assert errors_of(found) == {""}
    plain = twin(SHORT._replace(killed=(), at_step=0))
    for rank, heard in found.heard.items():
        assert heard.resets == 0
        assert heard.digests == plain[rank].digests


@pytest.mark.thorough
@pytest.mark.parametrize("again_s", [0.02, 0.1, 0.2, 0.3, 0.4])
def test_a_rank_that_is_lost_again_while_it_comes_back(again_s: float) -> None:
    check(SHORT._replace(killed=(0, 3), again_s=again_s))


class ResetBefore(Rank):
    """All ranks have reset their groups before one is lost, and nothing is left of the first."""

    def make(self) -> mf.Trainer:
        trainer = super().make()
        if not self.again:
            trainer.reset()
            time.sleep(0.5)  # until what the first groups wrote is deleted
        return trainer


def test_a_rank_comes_back_into_groups_that_were_reset_before() -> None:
    check(SHORT, ResetBefore)


class ByHand(Rank):
    """A loop of verbs that goes on with `reset` and `same_step`."""

    def _train(self, started: float) -> None:
        trial = self.trial
        mf.init_distributed(device="cpu", timeout_s=trial.timeout_s)
        groups = mf.make_groups(2, timeout_s=trial.timeout_s, heartbeat_s=trial.heartbeat_s)
        torch.manual_seed(0)
        shards = mf.shard({"w": torch.randn(10, 24)}, groups)
        state = mf.init_state(shards, mf.optim.adamw(1e-2), groups=groups)
        while state.step < trial.steps:
            step = state.step
            self.board[4 * self.rank : 4 * self.rank + 4] = (step + 1).to_bytes(4, "little")
            try:

                def loss(shards: Any, home: mf.Groups = groups, step: int = step) -> Tensor:
                    w = mf.gather(shards, home)["w"]
                    return (batch_of(self.rank, step) @ w.T).square().mean()

                grads = torch.func.grad(loss)(state.params)
                state = mf.opt_step(state, mf.reduce_grads(grads, groups))
            except PeerFailed:
                self.resets += 1
                groups = mf.reset(groups)
                state = mf.optim.same_step(state, groups, heal=True)
                continue
            leaves = tree.flatten(state)[0]
            self.digests[state.step] = f"{[x.tolist() for x in leaves if isinstance(x, Tensor)]}"


def test_a_loop_by_hand() -> None:
    trial = SHORT._replace(partition_size=2, at_step=5, steps=7)
    plain = run_loss(trial._replace(killed=()), ByHand).heard
    found = run_loss(trial, ByHand)
    assert errors_of(found) == {""}
    for rank, heard in found.heard.items():
        assert heard.digests[7] == plain[rank].digests[7]


# In ranks that live on: who sends how much, and steps of which some ranks are told too late.


def guard() -> Guard:
    return Guard(dynamic_scale(8.0, interval=3), max_norm=1.0, spike=norm_spike(warmup=1))


def small(groups: Any, **options: Any) -> mf.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    given = {"guard": guard(), "bucket_bytes": 1100, "loss": lambda m, x: m(x).square().mean()}
    return mf.Trainer(model, mf.optim.adamw(1e-2), groups, **given | options)


def batch(k: int) -> Tensor:
    seed = 100 * k + dist.get_rank()
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


def tensors(trainer: mf.Trainer) -> list[Tensor]:
    return [x for x in tree.flatten(trainer.state)[0] if isinstance(x, Tensor)]


def lose(p: int, lost: tuple[int, ...]) -> tuple[int, int, list[str]]:
    """Some ranks forget their state; bytes that this rank sends to replicas, and of its state."""
    trainer, other = (small(mf.make_groups(p, timeout_s=20), deterministic=True) for _ in range(2))
    for k in range(3):
        for each in (trainer, other):
            each.step(batch(k))
    if dist.get_rank() in lost:
        trainer.guard, trainer.member.lost = guard(), True
        trainer.sync_state = replace(trainer.sync_state, step=0)
        for x in tensors(trainer):
            x.fill_(0)
        trainer.state = replace(trainer.state, step=0)
    said: list[str] = []
    log, handler = logging.getLogger("mics_fn"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    before = trainer.groups.traffic.sent_bytes["replicas"]
    trainer.reset()
    sent = trainer.groups.traffic.sent_bytes["replicas"] - before
    log.removeHandler(handler)
    nbytes = sum(x.nbytes for x in tensors(trainer))
    same_bits(tensors(trainer), tensors(other))
    assert trainer.guard == other.guard
    assert trainer.sync_state == other.sync_state
    for each in (trainer, other):
        each.step(batch(3))
    same_bits(tensors(trainer), tensors(other))
    for each in (trainer, other):
        each.groups.close()
    return sent, nbytes, said


WORDS = 1200  # bytes of what all ranks compare in a reset


@pytest.mark.parametrize(("p", "lost"), [(2, (3,)), (2, (0, 3)), (1, (1, 2)), (1, (0, 1, 3))])
def test_each_part_travels_once(ranks: Pools, p: int, lost: tuple[int, ...]) -> None:
    found = ranks(4).run(lose, p, lost)
    for rank, (sent, nbytes, said) in enumerate(found):
        whole = [other for other in range(rank % p, 4, p) if other not in lost]
        takers = [other for other in range(rank % p, 4, p) if other in lost]
        asked = [whole[i % len(whole)] for i in range(len(takers))].count(rank)
        assert asked * nbytes <= sent <= asked * nbytes + WORDS * (4 // p)
        assert bool(said) == (rank == 0)
    assert "had no state; all go on at step 3; state of rank" in found[0][2][0]


def told_late(late: tuple[int, ...]) -> str:
    """Some ranks do not hear that all can write the last step, which the others write."""
    trainer, other = (
        small(mf.make_groups(2, timeout_s=20), recoverable=True, deterministic=True)
        for _ in range(2)
    )
    collect = stepping.collect_values
    for k in range(2):
        for each in (trainer, other):
            each.step(batch(k))

    def fail(*args: Any) -> Any:
        collect(*args)
        raise PeerFailed("a rank was lost", 9, "killed")

    try:
        if dist.get_rank() in late:
            stepping.collect_values = fail
        trainer.step(batch(2))
    except PeerFailed:
        assert dist.get_rank() in late
    finally:
        stepping.collect_values = collect
    other.step(batch(2))
    assert (trainer.member.ready is not None) == (dist.get_rank() in late)
    trainer.reset()
    same_bits(tensors(trainer), tensors(other))
    assert trainer.guard == other.guard
    for each in (trainer, other):
        each.step(batch(3))
        each.groups.close()
    same_bits(tensors(trainer), tensors(other))
    return "same"


@pytest.mark.parametrize("late", [(0, 2), (1,)])
def test_a_step_that_some_have_written_is_written_by_all(
    ranks: Pools, late: tuple[int, ...]
) -> None:
    assert ranks(4).run(told_late, late) == ["same"] * 4


def test_rounds_of_takers() -> None:
    rounds = list(_rounds({1: 0, 2: 0, 3: 4, 9: 8}, (0, 1, 2, 3, 4)))
    assert [dict(sorted(pairs.items())) for pairs in rounds] == [{1: 0, 3: 4}, {2: 0}]


def test_epochs_go_on_in_another_process() -> None:
    class Loader:
        epoch = 0
        seen: list[int]

        def __init__(self) -> None:
            self.seen = []

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch
            self.seen.append(epoch)

        def __iter__(self) -> Any:
            return iter([1])

    first, second = Epochs(), Epochs()
    loader = Loader()
    batches = first.batches(loader)
    for _ in range(3):
        next(batches)
    batches.close()
    assert first.epoch == 2
    second.begin_after(first.epoch)
    other = Loader()
    batches = second.batches(other)
    next(batches)
    assert other.seen == [3]
    next(first.batches(loader))
    assert loader.epoch == 3
    batches.close()
    unused = Epochs()
    unused.begin_after(None)
    third = Loader()
    next(unused.batches(third))
    assert third.seen == [0]
    assert LostStateError in DesyncError.__subclasses__()
