"""A run that is cut in two and goes on from saved values has the bits of one that is not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Layout as World
from cases import groups_of, placed_as, same_bits
from test_data import stateful
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import mics_fn as mf
from mics_fn import optim, tree
from mics_fn.optim import Guard, dynamic_scale, norm_spike
from mics_fn.train import StepMetrics
from mics_fn.train.resuming import guard_numbers

STEPS, SIZE, PER_PASS = 14, 6, 5
ONE = World((1,), 1)


class Rows(Dataset):
    """Samples with their numbers; one of them overflows, and one is far too large."""

    def __init__(self, ranks: int) -> None:
        self.numbers = torch.arange(PER_PASS * 4 * ranks)
        self.x = torch.randn(len(self.numbers), SIZE, generator=torch.Generator().manual_seed(5))
        self.x[3] = torch.inf
        self.x[9] *= 1e4

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.numbers[i]


class Net(nn.Module):
    """Dropout, statistics of batches, and a buffer that is each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(SIZE, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("usual", torch.zeros(SIZE), persistent=False)
        self.register_buffer("last", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        x = torch.where(x.isfinite(), x, 0.0) if self.forgiving else x
        self.usual: Tensor = 0.9 * self.usual.detach() + 0.1 * x.detach().mean(0)
        self.last: Tensor = numbers[-1]
        x = self.norm(self.one(x).float()).to(self.frozen.dtype)
        x = nn.functional.dropout(x, 0.3) + self.frozen
        return self.two(torch.tanh(x)).float().square().mean()

    forgiving = False


def optimizers(name: str, groups: Any) -> Any:
    """An optimizer by its name."""
    return {
        "sgd": lambda: optim.sgd(0.05, momentum=0.9),
        "adam": lambda: optim.adam(1e-2),
        "adamw": lambda: optim.adamw(optim.warmup_cosine(1e-2, 3, STEPS)),
        "lion": lambda: optim.lion(1e-3),
        "rmsprop": lambda: optim.from_torch(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
        "torch adamw": lambda: optim.from_torch(torch.optim.AdamW, lr=1e-2, amsgrad=True),
        "chain": lambda: optim.chain(optim.clip_by_global_norm(1.0, groups), optim.adamw(1e-2)),
    }[name]()


OPTIMIZERS = ["sgd", "adam", "adamw", "lion", "rmsprop", "chain"]
WATCH = norm_spike(3.0, warmup=2, window=4)
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {},
    "guard": lambda: {"guard": Guard(dynamic_scale(8.0, interval=3), max_norm=1.0, spike=WATCH)},
    "diloco": lambda: {"replica_sync": mf.replicas.diloco(3)},
    "local_sgd": lambda: {"replica_sync": mf.replicas.local_sgd(4)},
    "bf16": lambda: {"precision": "compute=bf16", "accumulate": 2},
    "budget": lambda: {"live_bytes": 0, "bucket_bytes": 200, "deterministic": True},
}
# Those that go on in new processes, not with every optimizer.
MORE: dict[str, Callable[[], dict[str, Any]]] = {
    "watched bf16": lambda: {**OPTIONS["guard"](), **OPTIONS["bf16"]()},
    "coded": lambda: {"precision": "hop1=int8[16], gather=int8[16], state=int8[64]"},
    "coded hop2": lambda: {"precision": "hop2=int8[16], param=bf16", "accumulate": 2},
}


def loader_of(kind: str, groups: mf.Groups, workers: int = 0) -> Any:
    """A loader of `PER_PASS` batches on each rank."""
    data = Rows(groups.world_size)
    every: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
    shuffled = {"sampler": mf.sampler(data, groups)}
    if kind == "shuffle":  # by random states, so each rank has its own data
        return DataLoader(Rows(1), shuffle=True, **every)
    if kind == "generator":
        return DataLoader(Rows(1), shuffle=True, generator=torch.Generator(), **every)
    if kind == "epochs":
        return DataLoader(data, **shuffled, **every)
    if kind == "stateful by epoch":
        return stateful(data, **shuffled, **every)
    return stateful(Rows(1), shuffle=True, **every)


LOADERS = ["shuffle", "generator", "epochs", "stateful", "stateful by epoch"]


def made(groups: Any, optimizer: str, options: str, seed: int, **more: Any) -> mf.Trainer:
    torch.manual_seed(seed)
    model = Net()
    model.forgiving = options != "guard"
    torch.manual_seed(seed + 1 + groups.position)
    more |= (OPTIONS | MORE)[options]()
    return mf.Trainer(model, optimizers(optimizer, groups), groups, **more)


def fit(trainer: mf.Trainer, loader: Any, steps: int) -> list[StepMetrics]:
    """`fit`, with this rank's own losses: how a mean over ranks is rounded depends on `steps`."""
    found, plain = [], trainer.step

    def step(batch: Any) -> StepMetrics:
        found.append(replace(plain(batch), seconds=0.0))
        return found[-1]

    trainer.step = step
    trainer.fit(loader, steps, progress=False)
    del trainer.step
    return found


def held(trainer: mf.Trainer) -> Any:
    """The whole state, in which only the functions of the optimizer may differ."""
    state, sync = trainer.state, trainer.sync_state
    outer = sync.outer
    outer = (outer.params, outer.opt) if isinstance(outer, mf.TrainState) else outer
    leaves = [optim.by_leaf(x) for x in (state.params, state.opt, outer)]
    leaves = [tree.flatten(x)[0] for x in leaves]
    return [state.step, sync.step, *leaves, state.buffers]


def cut_in_two(
    folder: Any,
    world: World,
    optimizer: str,
    options: str,
    kind: str,
    at: int,
    scheme="",
    workers=0,
) -> None:
    """All steps in one `fit`, and in two of different trainers."""
    groups = groups_of(world)
    place = placed_as(groups, scheme) if scheme else groups
    saver = mf.Checkpoints(folder, every=10_000)
    whole, first = (made(place, optimizer, options, 1) for _ in range(2))
    torch.manual_seed(groups.position)
    want = fit(whole, loader_of(kind, groups, workers), STEPS)
    end = torch.get_rng_state()
    torch.manual_seed(groups.position)
    loader = loader_of(kind, groups, workers)
    found = fit(first, loader, at)
    used = 4 * groups.world_size * ((at - 1) % PER_PASS + 1)
    kept: Any = first.passes.kept(at)
    assert kept["samples"] == used
    saver.save(first)
    del loader
    fit(first, loader_of(kind, groups), 2)  # which writes into its own memory
    torch.manual_seed(99)
    second = made(place, optimizer, options, 3, checkpoint=saver)
    loader = loader_of(kind, groups, workers)  # made at another time: draws other random numbers
    found += fit(second, loader, STEPS - at)
    same_bits([vars(each) for each in found], [vars(each) for each in want])
    same_bits(held(second), held(whole))
    assert second.guard == whole.guard
    assert guard_numbers(second.guard) == guard_numbers(whole.guard)  # counts are not in `==`
    assert torch.equal(torch.get_rng_state(), end)
    if options == "guard":
        assert [each.accepted for each in want].count(False) > 1
        assert whole.guard.scale.overflows


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("at", [3, 7, 10])
@pytest.mark.covering
def test_alone(tmp_path, optimizer: str, options: str, kind: str, at: int) -> None:
    cut_in_two(tmp_path, ONE, optimizer, options, kind, at)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["shuffle", "stateful", "stateful by epoch"])
def test_workers(tmp_path, kind: str) -> None:
    """Batches come from processes that run ahead of the steps."""
    cut_in_two(tmp_path, ONE, "sgd", "plain", kind, 7, workers=2)
