"""A signal on any rank, at any time, ends all ranks after the same step."""

import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, forget_groups, groups_of
from torch import nn

import mics_fn as mf
from mics_fn.store import poll

StopRequest = mf.StopRequest
PAIR, FOUR, COPIES = Layout((2,), 2), Layout((4,), 4), Layout((2, 2), 2)


def loop(layout: Layout, seed: int, trials: int) -> list[tuple[int, bool]]:
    """Steps without and with collectives, until some ranks are asked at some instant."""
    groups, rank, found = groups_of(layout), dist.get_rank(), []
    for trial in range(trials):
        draw, own = random.Random(f"{seed} {trial}"), random.Random(f"{seed} {trial} {rank}")
        asked = draw.sample(range(layout.world_size), draw.randrange(1, layout.world_size + 1))
        meets = draw.random() < 0.5  # whether ranks wait for each other in each step
        with StopRequest(groups, ()) as stop:
            if rank in asked:
                threading.Timer(own.uniform(0.0, 0.2), stop.ask).start()
            # Those that never meet may be many steps apart, which the slow ones must make up for.
            pause_s = own.choice([0.001, 0.002, 0.02 if meets else 0.004])
            step = 0
            while step < 5000:
                step += 1
                time.sleep(pause_s)
                if meets:
                    mf.optim.global_norm(mf.reduce_grads([torch.ones(2)], groups), groups)
                if stop.due():
                    break
            assert stop.due()  # from then on
            found.append((step, stop.stopping))
    return found


@pytest.mark.parametrize("trials", [2, pytest.param(20, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("layout", [PAIR, COPIES, FOUR], ids=str)
@pytest.mark.short("2x2-p2-2")
def test_all_ranks_stop_after_one_step(ranks, layout, trials):
    found = ranks(layout.world_size).run(loop, layout, trials, trials)
    assert all(each == found[0] for each in found)
    assert all(stopping for _, stopping in found[0])


def fitted(layout: Layout) -> tuple[int, int, bool, float]:
    """One rank gets a signal in its third step."""
    groups, count = groups_of(layout), [0]

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] == 3 and dist.get_rank() == 3:
            signal.raise_signal(signal.SIGUSR1)
        time.sleep(0.01)
        return model(x).square().mean()

    before = signal.getsignal(signal.SIGUSR1)
    torch.manual_seed(0)
    trainer = mf.Trainer(nn.Linear(3, 1), mf.optim.sgd(0.1), groups, loss=loss)
    with StopRequest(groups, [signal.SIGUSR1]) as stop:
        steps = len(trainer.fit([torch.ones(2, 3)], 2000, progress=False, stop=stop))
    assert signal.getsignal(signal.SIGUSR1) == before
    more = trainer.fit([torch.ones(2, 3)], 2, progress=False)  # the groups are as good as before
    return steps, trainer.state.step, stop.stopping, float(more[-1].loss)


def test_fit_returns_on_all_ranks(ranks):
    found = ranks(4).run(fitted, COPIES)
    assert all(each == found[0] for each in found)
    steps, taken, stopping, _ = found[0]
    assert 3 <= steps < 1000
    assert (taken, stopping) == (steps + 2, True)


def left_behind(layout: Layout) -> list[int]:
    """One rank has done all of its steps when another one is asked in its last one."""
    groups, counts = groups_of(layout), []
    store: Any = groups.state.channel.store
    for asks in (True, False):
        with StopRequest(groups, ()) as stop:
            key = stop._key
            for step in range(3):
                if dist.get_rank() == 1 and step == 2 and asks:
                    time.sleep(0.4)
                    stop.ask()
                    time.sleep(0.4)
                assert not stop.due(), "the other rank did not know of it when this step ended"
        mf.optim.global_norm(mf.reduce_grads([torch.ones(2)], groups), groups)
        deadline = time.monotonic() + 5
        names = [f"{key}/{name}" for name in ("asked", "left", 0, 1)]
        while (left := sum(store.check([name]) for name in names)) and time.monotonic() < deadline:
            time.sleep(0.05)
        counts.append(left)
    return counts


def test_a_rank_that_has_left_is_not_waited_for_and_nothing_is_left_in_the_store(ranks):
    assert ranks(2).run(left_behind, PAIR) == [[0, 0]] * 2


def alone_in_it(layout: Layout) -> str:
    """Only rank 0 is in the block, and is asked."""
    groups = groups_of(layout)
    if dist.get_rank() == 0:
        with StopRequest(groups, ()) as stop:
            stop._timeout_s = 0.5
            stop.ask()
            assert poll(lambda: stop._said is not None, 1, time.monotonic() + 10)
            with pytest.raises(mf.errors.CollectiveError) as caught:
                stop.due()
    dist.barrier()
    return str(caught.value).partition("\n")[0] if dist.get_rank() == 0 else ""


def test_a_rank_that_does_not_answer_is_named(ranks):
    layout = Layout((2,), 1)
    try:
        said = ranks(2).run(alone_in_it, layout)
        assert said == ["StopRequest: rank 1 did not answer in 0.5 s", ""]
    finally:
        ranks(2).run(forget_groups, layout)
