"""A pass over a loader that is gone on with, batch by batch; and what is refused."""

import copy
import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
)
from torchdata import stateful_dataloader

from mics_fn.train.loop import DataPasses, Position
from mics_fn.train.plain import Randoms

CPU = torch.device("cpu")


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor(i)


class Stream(IterableDataset):
    """An order that Python's generator draws when a pass begins."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return iter(random.sample(range(self.size), self.size))


def stateful(*given: Any, **options: Any) -> Any:
    """torchdata's loader, which still calls what torch no longer wants to be called."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return stateful_dataloader.StatefulDataLoader(*given, **options)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


LOADERS: dict[str, Callable[[Any, int], Any]] = {
    "in order": lambda data, b: DataLoader(data, b),
    "shuffled": lambda data, b: DataLoader(data, b, shuffle=True),
    "own generator": lambda data, b: DataLoader(data, b, shuffle=True, generator=seeded()),
    "by epoch": lambda data, b: DataLoader(data, b, sampler=DistributedSampler(data, 2, 1)),
    "stream": lambda data, b: DataLoader(Stream(len(data)), b),
    "stateful": lambda data, b: stateful(data, b, shuffle=True),
    "stateful by epoch": lambda data, b: stateful(data, b, sampler=DistributedSampler(data, 2, 1)),
    "stateful with a generator": lambda data, b: stateful(
        data, b, shuffle=True, generator=seeded()
    ),
    "a list": lambda data, b: torch.arange(len(data)).split(b),
}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Run(DataPasses):
    """Passes of a process of its own, with the calls of `step` in it."""

    calls = 0

    def over(self, loader: Any, ranks: int = 1) -> Any:
        return self.batches(loader, CPU, ranks)


def train(batches: Any, run: Run, steps: int, ranks: int = 1) -> list[Any]:
    """Steps that draw from every generator, as dropout and augmentation do."""
    found = []
    for _ in range(steps):
        batch = next(batches)
        run.give(ranks * len(batch), run.calls)
        draws = torch.rand(3).tolist(), random.random(), np.random.random(), np.random.normal()
        found.append((batch.tolist(), *draws))
        run.calls += 1
    return found


def gone_on(run: Run, *, strict: bool = True, exact: bool = True) -> Run:
    """Another process, which goes on from what this one has kept."""
    kept: Any = run.kept(run.calls)
    data, now = copy.deepcopy((kept, run.randoms(CPU).plain()))
    other = Run()
    now = Randoms.from_plain(now, CPU) if exact else None
    other.resume(Position.from_plain(data, now, CPU), strict=strict)
    return other


@pytest.mark.parametrize("kind", ["in order", "by epoch", "stateful by epoch"])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_steps_that_are_taken_back_get_their_batches_again(kind: str, lost: int) -> None:
    """Also behind a resume, and where the last batch of a pass is one of them."""
    numbers = Numbers(8 if kind == "in order" else 16)  # of two ranks; a pass has four batches
    make = LOADERS[kind]
    run = Run()
    want = [x for x, *_ in train(run.over(make(numbers, 2)), run, 9)]
    run = Run()
    train(batches := run.over(make(numbers, 2)), run, 1)
    run, loader = gone_on(run), make(numbers, 2)
    batches.close()
    train(run.over(loader), run, 2 + lost)
    run.calls -= lost
    back = Run()  # a rank that came back, which has lost all that it knew of its pass
    back.take(json.loads(json.dumps(run.report())))
    back.calls = run.calls
    for each in (run, back):
        each.go_on(each.calls)
        assert [x for x, *_ in train(each.over(loader), each, 6)] == want[3:]


@pytest.mark.parametrize("kind", LOADERS)
@examples(10, 200)
@given(
    size=st.integers(2, 13),
    batch_size=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    ends=st.booleans(),
)
def test_cut_anywhere(kind: str, size: int, batch_size: int, cuts: list[int], ends: bool) -> None:
    """Also cut several times: each part goes on from the one before it."""
    make, last = LOADERS[kind], 5
    seed(1)
    run = Run()
    want = train(run.over(make(Numbers(size), batch_size)), run, sum(cuts) + last)
    seed(1)
    run, found = Run(), []
    loader = make(Numbers(size), batch_size)
    batches = run.over(loader)
    for cut in cuts:
        found += train(batches, run, cut)
        if ends:  # the loop is over, and the loader may be gone
            batches.close()
        run = gone_on(run)
        seed(7)
        loader = make(Numbers(size), batch_size)
        batches = run.over(loader)
    found += train(batches, run, last)
    assert found == want
