"""Which samples a rank takes, pass after pass, and how a pass is gone on with."""

import copy
import json
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata import stateful_dataloader

import mics_fn as mf
from mics_fn.train.loop import DataPasses, Position

CPU, FOUR = torch.device("cpu"), Layout((2, 2), 2)


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
    data, now = copy.deepcopy((kept, run.randoms(CPU)))
    other = Run()
    at = Position(**data)
    if exact:
        other.resume(at, now, strict=strict)
    else:
        other.resume(at._replace(start=None, loader=None), strict=strict)
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
    back.take(json.loads(json.dumps(run.report(run.calls))))
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


# Which samples


def data_parallel_part(names):
    """This rank's samples, and its place in the part of a mesh that it draws with."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    with mf.make_groups(mesh=mesh["dp"], partition_size=2, timeout_s=20) as groups:
        sampler = mf.sampler(Numbers(23), groups, seed=5)
        return groups.position, groups.world_size, list(sampler)


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")], ids=["tp inside", "tp outside"])
def test_tensor_parallel_ranks_draw_the_same_samples(ranks, names):
    found = ranks(4).run(data_parallel_part, names)
    for rank, (position, size, share) in enumerate(found):
        place = dict(zip(names, divmod(rank, 2), strict=True))
        assert (position, size) == (place["dp"], 2)
        # all that have this position in the data-parallel part have this share, others another
        assert [share == theirs for _, _, theirs in found] == [
            position == their_position for their_position, _, _ in found
        ]
        twin = [s for p, _, s in found if p != position][0]
        assert set(share) | set(twin) == set(range(23))
        assert len(share) + len(twin) == 24


# Bad calls


BAD = {
    "length": (lambda groups, odd: mf.sampler(Numbers(9 if odd else 10), groups),
               "DesyncError: sampler: ranks differ in what they ask for\n  ranks 0, 1, 3: 10"),
    "few": (lambda groups, odd: mf.sampler(Numbers(3), groups, drop_last=True),
            "LeafError: sampler: 3 samples for 4 ranks, drop_last=True"),
    "one": (lambda groups, odd: mf.sampler(Numbers(0 if odd else 4), groups),
            "rank 2: LeafError: sampler: 0 samples for 4 ranks, drop_last=False"),
    "tree": (lambda groups, odd: mf.sampler(Numbers(4), {"w": groups}),  # pyright: ignore
             "GroupsError: sampler: groups is dict"),
}  # fmt: skip


def bad(kind):
    BAD[kind][0](groups_of(FOUR), dist.get_rank() == 2)


@pytest.mark.parametrize("kind", BAD)
def test_bad_calls_say_what_is_wrong_on_all_ranks(ranks, kind):
    for rank, found in enumerate(ranks(4).try_run(bad, kind)):
        text = BAD[kind][1].removeprefix("rank 2: " if rank == 2 else "")
        assert text in f"{found.type_name}: {found.message}"


# Passes


def take(batches, count):
    """The samples of the next batches."""
    return [int(i) for _ in range(count) for i in next(batches)]


def loaders(size, batch_size, **options):
    """Each way in which a loader of torch holds a sampler."""
    data = Numbers(size)
    one, two = (DistributedSampler(data, num_replicas=2, rank=1, **options) for _ in range(2))
    yield one, DataLoader(data, batch_size, sampler=one)
    yield two, DataLoader(data, batch_sampler=BatchSampler(two, batch_size, drop_last=False))


@examples(10, 40)
@given(size=st.integers(2, 20), batch_size=st.integers(1, 6), fits=st.lists(st.integers(1, 9)))
def test_passes_follow_the_epochs_of_the_sampler(size, batch_size, fits):
    for sampler, loader in loaders(size, batch_size, shuffle=True):
        twin, run, epoch = copy.deepcopy(sampler), Run(), 0
        for steps in fits:
            batches, want = run.over(loader), []
            found = [int(i) for _ in range(steps) for i in next(batches)]
            batches.close()
            left = steps
            while left > 0:  # this fit's passes, by the slow way
                twin.set_epoch(epoch)
                order = list(twin)
                cut = [order[i : i + batch_size] for i in range(0, len(order), batch_size)][:left]
                want += [i for batch in cut for i in batch]
                left -= len(cut)
                epoch += 1
            assert found == want
            assert sampler.epoch == epoch - 1


def test_a_sampler_that_was_set_to_an_epoch_begins_there():
    ((sampler, loader), _) = loaders(10, 5, shuffle=True)
    run = Run()
    sampler.set_epoch(7)
    want = []
    for epoch in (7, 8, 9):
        sampler.set_epoch(epoch)
        want += list(sampler)
    sampler.set_epoch(7)
    assert take(run.over(loader), 3) == want


# A loader that fails on one rank


def fit_alone():
    """Rank 1 fails in `fit` outside of a step, and its caller catches that; the others go on."""
    groups = mf.make_groups(timeout_s=20.0)

    def batches():
        for k in range(4):
            if dist.get_rank() == 1 and k == 2:
                raise ValueError("no such file")
            yield torch.ones(2, 2)

    train = mf.Trainer(nn.Linear(2, 1), mf.optim.sgd(0.1), groups, loss=lambda m, x: m(x).sum())
    began = time.monotonic()
    with pytest.raises((ValueError, mf.errors.PeerFailed)) as caught:
        train.fit(batches(), 4, progress=False)
    time.sleep(0.5)  # this rank goes on with something else, and closes nothing
    return mf.errors.first_line(caught.value), time.monotonic() - began


def test_an_error_of_fit_outside_of_a_step_is_told(ranks):
    first, own, last = ranks(3).run(fit_alone)
    assert "no such file" in own[0]
    for told, seconds in (first, last):
        assert told.startswith("rank 1 failed: ")
        assert "no such file" in told
        assert seconds < 10, "and not 20"
