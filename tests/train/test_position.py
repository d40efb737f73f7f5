"""A pass over a loader that is gone on with, batch by batch; and what is refused."""

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
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

from mics_fn.train.loop import Epochs, Position, Resume
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


def train(batches: Any, epochs: Epochs, steps: int) -> list[Any]:
    """Steps that draw from every generator, as dropout and augmentation do."""
    found = []
    for _ in range(steps):
        batch = next(batches)
        epochs.using(batch)
        draws = torch.rand(3).tolist(), random.random(), np.random.random(), np.random.normal()
        found.append((batch.tolist(), *draws))
        epochs.took()
    return found


def gone_on(epochs: Epochs, *, strict: bool = True, exact: bool = True, ranks: int = 1) -> Epochs:
    """Another process' passes, which go on from what these have kept."""
    kept: Any = epochs.kept()
    data, now = copy.deepcopy((kept, Randoms.now(CPU).plain()))
    other = Epochs()
    at, now = Position.from_plain(data, "data"), Randoms.from_plain(now)
    other.go_on(Resume(replace(at, ranks=ranks), data, now, exact, strict))
    return other


@pytest.mark.parametrize("kind", LOADERS)
@examples(10, 200)
@given(
    size=st.integers(2, 13),
    batch_size=st.integers(1, 5),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    when=st.sampled_from(["in the loop", "behind it", "once the loader is gone"]),
)
def test_cut_anywhere(kind: str, size: int, batch_size: int, cuts: list[int], when: str) -> None:
    """Also cut several times: each part goes on from the one before it."""
    make, last = LOADERS[kind], 5
    seed(1)
    epochs = Epochs()
    want = train(epochs.batches(make(Numbers(size), batch_size)), epochs, sum(cuts) + last)
    seed(1)
    epochs, found = Epochs(), []
    loader = make(Numbers(size), batch_size)
    batches = epochs.batches(loader)
    for cut in cuts:
        found += train(batches, epochs, cut)
        if when != "in the loop":
            batches.close()
        if when == "once the loader is gone":
            del loader
        before, epochs = epochs, gone_on(epochs)
        seed(7)
        loader = make(Numbers(size), batch_size)
        batches = epochs.batches(loader)
        del before
    found += train(batches, epochs, last)
    assert found == want
