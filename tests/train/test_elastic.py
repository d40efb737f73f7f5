"""Replicas go on without ranks that are lost, keep the batch, and meet them once they return."""

import atexit
import hashlib
import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import same_bits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives import mean_over_ranks
from mics_fn.errors import PeerFailed, PlanError, TreeError
from mics_fn.lab.bench.rejoin import Outcome, judged, run_loss
from mics_fn.lab.bench.rejoin_ranks import WIDTH, Heard, Loss, Rank, batch_of, made
from mics_fn.lab.ranks.pool import RankPool
from mics_fn.train.shares import Dealt, check_loader

Pools = Callable[[int], RankPool]
AWAY = Loss(0, 4, 1, (3,), 3, 0.0, steps=12, timeout_s=15.0, elastic=True, away_s=0.5)


@cache
def twin(plain: Loss) -> dict[int, Heard]:
    return run_loss(plain).heard


def check(trial: Loss, kind: type[Rank] = Rank) -> Outcome:
    """All ranks reach the last step with the bits of a job to which nothing happened."""
    found = run_loss(trial, kind)
    row = judged(found, twin(trial.plain))
    assert row["problems"] == [], row["problems"]
    assert max(heard.alone for heard in found.heard.values()) > 0
    return found


def test_a_run_without_some_replicas_has_the_bits_of_one_with_all() -> None:
    found = check(AWAY._replace(partition_size=2))
    assert found.heard[2].alone == 0  # it has waited for rank 3


@pytest.mark.thorough
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("scheme", ["", "zero2", "hpz"])
@pytest.mark.parametrize("killed", [(3,), (0,), (0, 1), (2, 3)])
def test_what_is_left_of_a_partition_group_waits(
    killed: tuple[int, ...], scheme: str, accumulate: int
) -> None:
    how: dict[str, Any] = {"scheme": scheme, "accumulate": accumulate, "delay_s": 0.004}
    found = check(AWAY._replace(partition_size=2, killed=killed, **how))
    group = killed[0] // 2
    assert all((heard.alone > 0) == (rank // 2 != group) for rank, heard in found.heard.items())


@pytest.mark.thorough
def test_any_rank_is_lost() -> None:
    check(AWAY)
    check(AWAY._replace(killed=(0,)))
    check(AWAY._replace(killed=(0, 1), accumulate=2))


@pytest.mark.thorough
def test_others_are_lost_meanwhile() -> None:
    found = check(AWAY._replace(second=(1,)))
    assert found.heard[2].alone > 0  # it has waited, and takes the place of rank 1


def errors_of(found: Outcome) -> set[str]:
    assert not found.silent
    return {heard.error for heard in found.heard.values()}


@pytest.mark.thorough
def test_an_old_state_is_not_taken_for_the_newest() -> None:
    # Ranks 0 and 1 go on, and rank 2 waits; then all that went on are lost.
    (text,) = errors_of(run_loss(AWAY._replace(second=(0, 1)), again=False))
    assert text.startswith("LostStateError: Trainer.reset: no replica holds the state that a lost")


class FromAStep(Rank):
    """Saves each step, also those that few ranks take."""

    def make(self) -> mf.Trainer:
        folder = Path(self.stacks).parent / "steps"
        return made(self.trial, checkpoint=mf.Checkpoints(folder, every=1))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_all_go_on_from_a_step_that_few_have_saved() -> None:
    check(AWAY._replace(second=(0, 1)), FromAStep)
    check(AWAY, FromAStep)


class Stopped(Rank):
    """Rank 3 is stopped for a while, and finds that the others went on without it."""

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
    trial = AWAY._replace(killed=(), heartbeat_s=1.0)
    found = check(trial, Stopped)
    assert found.heard[3].resets >= 1


@pytest.mark.thorough
@pytest.mark.parametrize("again_s", [0.1, 0.3, 0.6])
def test_a_rank_that_is_lost_again_while_it_comes_back(again_s: float) -> None:
    check(AWAY._replace(again_s=again_s))
    check(AWAY._replace(partition_size=2, killed=(0, 3), again_s=again_s, away_s=0.0), Together)


class Together(Rank):
    """No whole replica is left, so nobody goes on before all are back."""

    def _wait_for_all(self, trainer: mf.Trainer) -> None:
        self.alone = 1


class Ends(Rank):
    """Waits for nobody before its last steps."""

    def _wait_for_all(self, trainer: mf.Trainer) -> None:
        self._trainer = trainer


class Exits(Ends):
    """And does then what Python does at its end, which forked ranks leave out."""

    def _train(self, started: float) -> None:
        super()._train(started)
        atexit._run_exitfuncs()


class Closes(Ends):
    """And closes its groups then."""

    def _train(self, started: float) -> None:
        super()._train(started)
        self._trainer.groups.close()


@pytest.mark.parametrize("kind", [Exits, Closes])
def test_those_that_wait_hear_that_the_job_has_ended(kind: type[Rank]) -> None:
    trial = AWAY._replace(partition_size=2, away_s=0.0, steps=10)
    heard = run_loss(trial, kind, again=False).heard
    assert [heard[rank].error for rank in (0, 1)] == ["", ""]
    assert heard[2].error.startswith("GroupsError: reset: the job has ended without rank 2")
    assert "ranks 0, 1 took the last steps" in heard[2].error


@pytest.mark.thorough
def test_without_a_whole_replica_all_say_so() -> None:
    trial = AWAY._replace(partition_size=2, killed=(0, 3), timeout_s=4.0)
    found = run_loss(trial, again=False)
    for text in errors_of(found):
        assert text.startswith("CollectiveTimeoutError: reset: rank ")
        assert "ranks 0" in text
        assert "whole partition groups of 2 go on, as many as divide 2" in text


# Data.


class Items:
    """Micro-batches by number; `seen` is where they were asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Tensor:
        return batch_of(0, number)


def loader_of(position: int, positions: int, **options: Any) -> DataLoader:
    deals = DistributedSampler(Items(42), positions, position, shuffle=True, seed=3)  # pyright: ignore
    return DataLoader(Items(42), sampler=deals, **{"batch_size": 4} | options)  # pyright: ignore


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"batch_size": None}])
def test_the_shares_of_a_loader_are_what_their_ranks_would_have(options: dict[str, Any]) -> None:
    for share, others in ((0, (0, 2)), (1, (1, 3)), (3, (0, 1, 2, 3))):
        own = Dealt(loader_of(share, 4, **options), others, 4)
        whole = [loader_of(position, 4, **options) for position in others]
        assert len(own) == len(whole[0])
        for epoch in (0, 5):
            for loader in (own, *whole):
                loader.sampler.set_epoch(epoch)  # pyright: ignore
            found = [given.batches for given in own]
            same_bits(found, list(zip(*whole, strict=True)))


class Fits(Rank):
    """Trains with `fit`, which goes through the data of all positions."""

    def make(self) -> mf.Trainer:
        trainer = made(self.trial)
        self._loader = DataLoader(
            Items(400),  # pyright: ignore
            batch_size=self.trial.accumulate,
            sampler=mf.sampler(Items(400), trainer.groups, shuffle=False),
            collate_fn=torch.cat,
        )
        return trainer

    def _train(self, started: float) -> None:
        trainer = self.make()
        step, whole = trainer.step, self.trial.steps

        def noted(batch: Any) -> Any:
            self.board[4 * self.rank : 4 * self.rank + 4] = (trainer.state.step + 1).to_bytes(
                4, "little"
            )
            self._wait_before(trainer.state.step + 1)
            self._wait_for_all(trainer)
            self.alone += len(trainer.shares) > 1
            return step(batch)

        trainer.step = noted
        while trainer.state.step < whole:
            try:
                trainer.fit(self._loader, whole - trainer.state.step, progress=False)
            except PeerFailed:
                self.resets += 1
                trainer.reset()
        at: Any = trainer.epochs.kept()
        self.digests[whole] = f"pass {at['epoch']}, batch {at['batches']}"


def test_fit_goes_on_with_the_data_of_all() -> None:
    found = run_loss(AWAY, Fits)
    assert errors_of(found) == {""}
    # One pass, of which each step used one batch, whoever was away.
    digests = {heard.digests[AWAY.steps] for heard in found.heard.values()}
    assert digests == {f"pass 0, batch {AWAY.steps}"}
    assert max(heard.alone for heard in found.heard.values()) > 0


def refusal(loader: Any) -> str:
    groups = mf.make_groups(1)
    with pytest.raises(TreeError) as error:
        check_loader(loader, groups, 4)
    assert "fix: give DataLoader sampler=mf.sampler(dataset, groups)" in str(error.value)
    return str(error.value)


def test_other_loaders_are_refused_by_name() -> None:
    assert "the loader is a list, expected torch's DataLoader" in refusal([torch.ones(2)])
    data: Any = Items(8)
    assert "its sampler is a SequentialSampler" in refusal(DataLoader(data))
    assert "its sampler is a RandomSampler" in refusal(
        DataLoader(data, sampler=RandomSampler(data))
    )
    assert "its sampler deals to 2 ranks, expected 4" in refusal(loader_of(0, 2))
    groups = mf.make_groups(1)
    check_loader(loader_of(0, 4), groups, 4)


# The same step on half as many ranks, without `canonical`: up to rounding.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.b = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(torch.tanh(self.norm(self.a(x)))) - 1).square().mean()


def more_of(position: int, step: int) -> Tensor:
    """Enough samples for a norm over a micro-batch that does not magnify how it is rounded."""
    return torch.cat([batch_of(position, 10 * step + k) for k in range(5)])


def steps_of(positions: int, p: int, accumulate: int, steps: int) -> list[Any]:
    """Steps of a job of so many positions on the ranks that are here; what came of them."""
    torch.manual_seed(0)
    guard = mf.optim.Guard(mf.optim.dynamic_scale(8.0, interval=2), max_norm=0.1)
    with mf.make_groups(p) as groups:
        how: dict[str, Any] = {"guard": guard, "accumulate": accumulate, "elastic": 1.0}
        trainer = mf.Trainer(Normed(), mf.optim.sgd(0.1, momentum=0.9), groups, **how)
        trainer.member.positions = positions
        found = [trainer.step(lambda position, k=k: more_of(position, k)) for k in range(steps)]
        losses = [float(mean_over_ranks(groups, each.loss)) for each in found]
        buffers = {name: x.double() for name, x in trainer.state.buffers.items()}
        samples = [each.samples for each in found]
        norms = [float(each.grad_norm) for each in found if each.grad_norm is not None]
        return [losses, norms, samples, buffers, trainer.params()]


def twin_in_float64(positions: int, accumulate: int, steps: int) -> list[Any]:
    """The same in one process, a position after the other, in double precision."""
    torch.manual_seed(0)
    model = Normed().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses, norms = [], []
    for k in range(steps):
        before, after, total = dict(model.named_buffers()), [], 0.0
        before = {name: x.clone() for name, x in before.items()}
        for position in range(positions):
            model.load_state_dict(before, strict=False)
            for part in more_of(position, k).double().chunk(accumulate):
                loss = model(part) / (positions * accumulate)
                loss.backward()
                total += loss.item()
            after.append({name: x.clone() for name, x in model.named_buffers()})
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        mean = {name: torch.stack([x[name].double() for x in after]).mean(0) for name in before}
        model.load_state_dict(
            {name: x.to(before[name].dtype) for name, x in mean.items()}, strict=False
        )
        losses.append(total)
    return [losses, norms, dict(model.named_buffers()), dict(model.named_parameters())]


@pytest.mark.parametrize(("n", "p"), [(1, 1), (2, 1), (2, 2)])
def test_half_as_many_ranks_take_the_same_steps(ranks: Pools, n: int, p: int) -> None:
    losses, norms, buffers, params = twin_in_float64(4, 2, 4)
    for found in ranks(n).run(steps_of, 4, p, 2, 4):
        assert found[2] == [80] * 4
        for mine, want in ((found[0], losses), (found[1], norms)):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(want), rtol=1e-5, atol=1e-6)
        for mine, want in ((found[3], buffers), (found[4], params)):
            for name, x in want.items():
                torch.testing.assert_close(mine[name].double(), x.double(), rtol=1e-4, atol=1e-5)


# Checkpoints, and what is refused.


def saved_and_back(folder: str, positions: int, steps: int, saves: bool) -> str:
    """Train with `fit` from what is in a folder, and save; the state at the end, as a digest."""
    torch.manual_seed(0)
    n = dist.get_world_size()
    with mf.make_groups(1, timeout_s=20) as groups:
        saved = mf.Checkpoints(folder or "unused", every=2, resume=True, background=False)
        how: dict[str, Any] = {"deterministic": "canonical", "elastic": 1.0}
        how |= {"guard": mf.optim.Guard(mf.optim.dynamic_scale(8.0, interval=3))}
        trainer = mf.Trainer(Normed(), mf.optim.adamw(1e-2), groups, **how)
        trainer.member.positions = positions
        if saves:
            trainer.checkpoint = saved
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # random states belong to as many ranks
                saved.begin(trainer)
        dealt = loader_of(groups.position, positions, batch_size=1, collate_fn=lambda x: x[0])
        if n == positions:
            assert trainer.shares == (groups.position,)
        trainer.fit(dealt, steps - trainer.state.step, progress=False)
        state = [x for x in tree.flatten(trainer.state)[0] if isinstance(x, Tensor)]
        return hashlib.sha256(b"".join(x.numpy().tobytes() for x in state)).hexdigest()


@pytest.mark.parametrize("order", [(4, 2, 4), (2, 4, 1)])
def test_a_step_that_few_have_saved_loads_in_the_whole_job(
    ranks: Pools, tmp_path: Path, order: tuple[int, ...]
) -> None:
    (want,) = set(ranks(4).run(saved_and_back, "", 4, 6, False))
    for n, steps in zip(order, (2, 4, 6), strict=True):
        (found,) = set(ranks(n).run(saved_and_back, str(tmp_path), 4, steps, True))
    assert found == want


def test_what_cannot_be_elastic_is_refused() -> None:
    groups, model = mf.make_groups(1), nn.Linear(2, 1)

    def refused(text: str, **options: Any) -> None:
        home, options = options.pop("groups", groups), {"elastic": True, **options}
        with pytest.raises(PlanError, match=text):
            mf.Trainer(model, mf.optim.sgd(0.1), home, **options)

    refused("replica_sync=local_sgd", replica_sync=mf.replicas.local_sgd(2))
    refused("replica_sync=reduced_by", hop2=lambda grads, groups: grads)
    refused("replica_sync=diloco", replica_sync=mf.replicas.diloco(2))
    refused("leaves live on several groups", groups=lambda path: groups)
    refused("schedule= is fixed", schedule=mf.schedules.Schedule.parse("fetch 0; use 0; drop 0"))
    refused("elastic='soon'", elastic="soon")
    refused("elastic=-1", elastic=-1)


def test_a_batch_is_not_enough_for_several_shares() -> None:
    with mf.make_groups(1) as groups:
        loss = lambda model, x: model(x).mean()  # noqa: E731
        trainer = mf.Trainer(nn.Linear(2, 1), mf.optim.sgd(0.1), groups, loss=loss, elastic=True)
        assert trainer.step(torch.ones(3, 2)).samples == 3
        trainer.member.positions = 4
        assert trainer.shares == (0, 1, 2, 3)
        with pytest.raises(TreeError, match="the samples of positions 0-3 now"):
            trainer.step(torch.ones(3, 2))
        assert trainer.step(lambda position: torch.ones(3, 2)).samples == 12


def sent(elastic: bool) -> tuple[dict[str, Any], list[str]]:
    """What a rank sends in a step, and what it asks the store, after the first ones."""
    torch.manual_seed(0)
    with mf.make_groups(2, timeout_s=20) as groups:
        trainer = mf.Trainer(Normed(), mf.optim.sgd(0.1), groups, elastic=elastic)
        for k in range(3):
            trainer.step(batch_of(groups.position, k))
        asked: list[str] = []
        store: Any = groups.life.job.store
        ask = store._ask
        store._ask = lambda name, *args: (asked.append(name), ask(name, *args))[1]
        groups.life.look = lambda stuck, issued: None  # a wait that lasts long asks, too
        groups.traffic.clear()
        trainer.step(batch_of(groups.position, 3))
        store._ask = ask
        return groups.traffic.snapshot(), asked


def test_while_nobody_is_lost_a_step_sends_nothing_more(ranks: Pools) -> None:
    plain, elastic = ranks(4).run(sent, False), ranks(4).run(sent, True)
    assert [traffic for traffic, _ in elastic] == [traffic for traffic, _ in plain]
    assert all(
        len(asked) <= len(before) for (_, asked), (_, before) in zip(elastic, plain, strict=True)
    )
