"""`init` gives, bit for bit, what sharding a model that was made in full gives."""

import copy
import importlib.util
import math
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from zoo import CASES, Case

import mics_fn as mf
from mics_fn import tree
from mics_fn.construct import Recorder
from mics_fn.hollow import Hollow
from mics_fn.lab import gpt
from mics_fn.leaf import is_leaf
from mics_fn.replay import Memory
from mics_fn.stamps import number_in, stamped

if importlib.util.find_spec("transformers"):
    from zoo_transformers import CASES as TRANSFORMERS
else:
    TRANSFORMERS: dict[str, Case] = {}

ZOO = CASES | {k: v for k, v in TRANSFORMERS.items() if not k.endswith("recomputing")}
SEED = 11


def zoo_model(name: str) -> nn.Module:
    return ZOO[name].model().to(ZOO[name].dtype)


# Models that are made in other ways than by modules' own resets.


def scaled_gpt(tied: bool = False) -> nn.Module:
    return gpt.GPT(gpt.GPTConfig(64, 16, 16, num_heads=2, num_blocks=2, tied=tied))


def divided_at_the_end() -> nn.Module:
    """What was drawn first is needed until the last op."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.div_(i + 1)
            p.data[:1].mul_(2)
    return model


def every_initialiser() -> nn.Module:
    layers: Any = [nn.Linear(12, 9) for _ in range(12)]
    nn.init.orthogonal_(layers[0].weight)
    nn.init.trunc_normal_(layers[1].weight, std=1.0)
    nn.init.trunc_normal_(layers[2].weight, std=0.5, a=0.4, b=1.0)
    nn.init.sparse_(layers[3].weight, 0.4)
    nn.init.eye_(layers[4].weight)
    nn.init.kaiming_normal_(layers[5].weight)
    nn.init.xavier_uniform_(layers[6].weight)
    nn.init.constant_(layers[7].bias, 0.25)
    layers[8].weight.data = torch.randn(9, 12) / 3
    layers[9].weight.data.normal_(0, 0.1)
    layers[10].weight = nn.Parameter(torch.arange(108.0).view(9, 12) / 10)
    layers[11].bias = nn.Parameter(torch.tensor([float(i) for i in range(9)]))
    conv = nn.Conv2d(4, 4, 3)
    nn.init.dirac_(conv.weight)
    return nn.Sequential(*layers, conv)


class FromTwo(nn.Module):
    """A reset that depends on two parameters, on a third draw, and on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(6, 4)), nn.Parameter(torch.empty(4, 6))
        self.product = nn.Parameter(torch.empty(6, 6))
        self.register_buffer("gain", torch.ones(()))
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        self.a.normal_()
        self.b.uniform_(-1, 1)
        self.product.copy_(self.a @ self.b + torch.rand(6, 1))
        self.gain.fill_(self.product.abs().max().item())
        self.a.div_(self.gain)


class Reader(nn.Module):
    """Construction that asks for values in all ways, and goes on as they say."""

    def __init__(self) -> None:
        super().__init__()
        drops = [x.item() for x in torch.linspace(0, 0.5, 4)]
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Dropout(p)) for p in drops)
        weight = self.body[1][0].weight.data  # pyright: ignore
        if bool(weight.mean() > 0) or weight.tolist()[0][0] > weight.numpy()[1, 1]:
            weight.mul_(-1)
        weight[weight.abs() > weight.abs().median()] = 0.5
        rows = weight.abs().sum(1).argsort().tolist()
        self.register_buffer("kept", torch.nonzero(weight == 0.5))
        self.register_buffer("order", torch.tensor(rows))
        self.text = f"{weight[0, 0]:.4f} {weight.max()!r}"
        self.scale = nn.Parameter(torch.full((3,), float(weight.norm())))
        np.asarray(weight)


class OwnGenerator(nn.Module):
    """Draws from generators of its own, seeds again, and lets a part leave no trace."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(3) if generator is None else generator
        self.a = nn.Parameter(torch.randn(7, 3, generator=own))
        self.b = nn.Parameter(torch.empty(33).normal_())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.c = nn.Parameter(torch.rand(5))
            self.d = nn.Parameter(torch.rand(5))
            torch.manual_seed(5)
            self.e = nn.Parameter(torch.rand(5))
        self.f = nn.Parameter(torch.randn(17))
        state = own.get_state()
        self.g = nn.Parameter(torch.randn(4, generator=own))
        own.set_state(state)
        self.h = nn.Parameter(torch.randn(4, generator=own))
        self.i = nn.Parameter(torch.randn(4, generator=torch.default_generator))
        self.seeds = (torch.initial_seed(), own.initial_seed())


class OddAttributes(nn.Module):
    """Tensors outside of parameters and buffers, and marks on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.weight.no_decay = True  # pyright: ignore
        self.mask = torch.ones(4, 4).tril()
        self.tables = {"a": [torch.arange(3), (torch.rand(2), "x")]}
        self.half = self.weight * 2  # not a leaf
        self.loose = [nn.Parameter(torch.rand(3))]
        self.parts = self.weight.data[1:]

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.mask) + self.tables["a"][1][0].sum()  # pyright: ignore


def from_numpy() -> nn.Module:
    """Python's and numpy's random numbers are drawn once, also where tensors share memory."""
    model = nn.Linear(4, 3)
    model.weight.data.copy_(torch.from_numpy(np.random.randn(3, 4)))
    model.bias.data.fill_(random.random())
    return model


def pieces_of_one() -> nn.Module:
    """Parameters that are parts of one tensor, some of them views of it."""
    big = torch.randn(6, 5)
    model = nn.Module()
    model.rows = nn.ParameterList(row.clone() for row in big)
    model.left, model.right = nn.Parameter(big[:, :2]), nn.Parameter(big[:, 2:].t())
    return model


def memory_ties() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    first, second, third = model[0], model[1], model[2]
    second.weight = first.weight
    third.weight = nn.Parameter(first.weight.detach())
    third.bias.requires_grad_(False)
    return model


def cloned_layers() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return nn.Sequential(*(copy.deepcopy(block) for _ in range(3)))


def halves() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


def odd_parameters() -> nn.Module:
    model = nn.Module()
    model.empty, model.scalar = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.rand(()))
    model.whole = nn.Parameter(torch.randint(9, (5,)), requires_grad=False)
    model.flags = nn.Parameter(torch.rand(4) > 0.5, requires_grad=False)
    model.turned = nn.Parameter(torch.randn(3, 4).t())
    model.complex_part = nn.Parameter(torch.view_as_real(torch.randn(3, dtype=torch.complex64)))
    model.multinomial = nn.Parameter(torch.multinomial(torch.rand(9), 4).float())
    model.register_buffer("none", None)
    model.register_buffer("frequencies", torch.polar(torch.ones(3), torch.rand(3)), False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "scaled-gpt": scaled_gpt,
    "tied-gpt": partial(scaled_gpt, tied=True),
    "divided": divided_at_the_end,
    "initialisers": every_initialiser,
    "from-two": FromTwo,
    "reader": Reader,
    "generators": OwnGenerator,
    "attributes": OddAttributes,
    "numpy": from_numpy,
    "pieces": pieces_of_one,
    "ties": memory_ties,
    "clones": cloned_layers,
    "halves": halves,
    "odd": odd_parameters,
    "bfloat16": lambda: scaled_gpt().to(torch.bfloat16),
    "channels-last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),  # pyright: ignore
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
    ),
    "norms": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 5))),
}
MODELS |= {f"zoo-{name}": partial(zoo_model, name) for name in ZOO}
LAYOUTS = [Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2), Layout((4,), 4)]


def seeded() -> None:
    random.seed(SEED)
    np.random.seed(SEED)


def made(model_fn: Callable[[], nn.Module]) -> nn.Module:
    seeded()
    torch.manual_seed(SEED)
    return model_fn()


def module_order(params: dict[str, Any]) -> Callable[[str], int]:
    place = {f"[{name!r}]": i for i, name in enumerate(params)}
    return lambda path: place[path]


def data_of(shards: Any) -> list[Tensor]:
    """Of all leaves that have some, frozen and replicated ones too."""
    leaves = tree.flatten(shards, is_leaf)[0]
    return [leaf.data for leaf in leaves if isinstance(leaf, mf.Sharded | mf.Fixed)]


def same_as_in_full(
    model_fn: Callable[[], nn.Module],
    groups: mf.Groups,
    *,
    falls_back: bool = False,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Compare `init` with making the model and sharding it."""
    model = made(model_fn)
    states = torch.get_rng_state(), random.random(), np.random.rand()
    params = dict(model.named_parameters(remove_duplicate=False))
    want = mf.shard(params, groups, order=module_order(params), **options)
    seeded()
    expected = pytest.warns(UserWarning, match="can not be made in parts")
    with expected if falls_back else warnings.catch_warnings():
        skeleton, shards = mf.init(model_fn, groups, seed=SEED, **options)
    assert torch.equal(states[0], torch.get_rng_state()), "torch's generator"
    assert states[1:] == (random.random(), np.random.rand()), "other generators"
    assert list(shards) == list(params)
    assert tree.flatten(shards)[1] == tree.flatten(want)[1]
    same_bits(data_of(shards), data_of(want))
    chunks = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in data_of(shards)}
    wanted = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in data_of(want)}
    assert sorted(chunks.values()) == sorted(wanted.values()), "chunks in memory of their own"
    same_structure(skeleton, model)
    return skeleton, shards


def same_structure(skeleton: nn.Module, model: nn.Module) -> None:
    """Parameters on meta, all else as in the model that was made in full."""
    kinds = [
        [(name, type(m).__name__, m.training) for name, m in x.named_modules()]
        for x in (skeleton, model)
    ]
    assert kinds[0] == kinds[1]
    got = dict(skeleton.named_parameters(remove_duplicate=False))
    want = dict(model.named_parameters(remove_duplicate=False))
    for name, value in want.items():
        assert type(got[name]) is nn.Parameter, name
        assert got[name].is_meta, name
        assert got[name].requires_grad == value.requires_grad, name
        assert (got[name].shape, got[name].dtype) == (value.shape, value.dtype), name
        assert got[name].stride() == value.stride(), name
    buffers = dict(skeleton.named_buffers(remove_duplicate=False))
    expected = dict(model.named_buffers(remove_duplicate=False))
    assert list(buffers) == list(expected)
    for name, value in expected.items():
        assert type(buffers[name]) is Tensor, name
        assert buffers[name].stride() == value.stride(), name
        same_bits(
            torch.view_as_real(buffers[name]) if value.is_complex() else buffers[name],
            torch.view_as_real(value) if value.is_complex() else value,
        )
    assert list(skeleton.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_has_what_a_plain_construction_gives(name: str):
    with mf.make_groups(1) as groups:
        same_as_in_full(MODELS[name], groups)


def on_ranks(layout: Layout, names: list[str]) -> None:
    groups = groups_of(layout)
    for name in names:
        same_as_in_full(MODELS[name], groups, bucket_bytes=300)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
@pytest.mark.parametrize("part", range(4))
def test_each_rank_has_its_part_of_that(ranks, layout: Layout, part: int):
    ranks(layout.world_size).run(on_ranks, layout, list(MODELS)[part::4])


# Programs: any mixture of draws, views and writes.


class Interpreter:
    """Runs a list of small steps on a few tensors; what they do is the same in every run."""

    def __init__(self) -> None:
        self.at = [torch.empty(0) for _ in range(4)]
        self.own = torch.Generator().manual_seed(1)
        self.read: list[float] = []
        for i in range(4):
            self.at[i] = torch.full((4, 6), float(i))
        self.at[0].normal_(generator=self.own)

    def run(self, steps: list[tuple[int, int, int, int]]) -> None:
        kinds = [self.draw, self.write, self.view, self.copy, self.make, self.look, self.reseed]
        for kind, a, b, n in steps:
            kinds[kind % len(kinds)](a % 4, b % 4, n)

    def part(self, i: int, n: int) -> Tensor:
        x = self.at[i]
        if x.ndim != 2 or x.numel() < 8 or not x.is_contiguous():
            return x
        parts = [x, x.t(), x[:1], x.view(-1)[n % 5 :], x[..., ::2], x.unsqueeze(0), x.diagonal()]
        return parts[n % len(parts)]

    def draw(self, a: int, b: int, n: int) -> None:
        part, own = self.part(a, n), self.own if n % 3 == 0 else None
        draws = [
            lambda: part.normal_(generator=own),
            lambda: part.uniform_(-1, n + 1, generator=own),
            lambda: part.bernoulli_(0.5, generator=own),
            lambda: part.copy_(torch.rand(part.shape, generator=own)),
            lambda: part.mul_(torch.rand_like(part)),
            lambda: part.copy_(torch.poisson(part.abs().contiguous() + n, own)),
        ]
        draws[n // 3 % len(draws)]()

    def write(self, a: int, b: int, n: int) -> None:
        part = self.part(a, n)
        writes = [
            lambda: part.fill_(n),
            lambda: part.add_(1),
            lambda: part.zero_(),
            lambda: part.mul_(self.at[b].sum()),
            lambda: part.div_(self.at[b].double().norm() + 1),
            lambda: part.clamp_(-n, n),
        ]
        writes[n // 7 % len(writes)]()

    def view(self, a: int, b: int, n: int) -> None:
        part = self.part(b, n)
        self.at[a] = part if part.numel() > 1 else part.clone()
        if n % 4 == 0:
            self.at[b].unsqueeze_(0).squeeze_(0)

    def copy(self, a: int, b: int, n: int) -> None:
        if self.at[a].shape == self.at[b].shape:
            self.at[a].copy_(self.at[b].clone())
        elif n % 2:
            self.at[a].data = self.at[b].detach().clone()

    def make(self, a: int, b: int, n: int) -> None:
        x = self.at[b]
        makes = [
            lambda: torch.zeros(4, 6),
            lambda: torch.randn(4, 6),
            lambda: x.double().to(torch.bfloat16).float(),
            lambda: x + self.at[a].flatten()[0],
            lambda: torch.cat([x.flatten(), self.at[a].flatten()])[:24].clone(),
            lambda: torch.where(x > x.mean(), x, torch.randn(())),
            lambda: copy.deepcopy(x),
        ]
        self.at[a] = makes[n % len(makes)]()

    def look(self, a: int, b: int, n: int) -> None:
        x = self.at[b]
        self.read.append(float(x.double().sum()))
        if self.read[-1] > 0:
            x[x > x.mean()] = 0.5
        self.read.append(float(x.flatten()[0]))

    def reseed(self, a: int, b: int, n: int) -> None:
        states = [torch.get_rng_state(), self.own.get_state()]
        if n % 3 == 0:
            torch.manual_seed(n)
        elif n % 3 == 1:
            torch.rand(n)
            torch.set_rng_state(states[0])
        else:
            self.own.set_state(states[0])


STEPS = st.tuples(*[st.integers(0, 6)] * 3, st.integers(0, 41))


@settings(max_examples=150)
@given(steps=st.lists(STEPS, max_size=25), chosen=st.sets(st.integers(0, 3), min_size=1))
def test_any_program_is_repeated_bit_by_bit(steps, chosen: set[int]):
    torch.manual_seed(SEED)
    real = Interpreter()
    real.run(steps)
    want, state = [x.clone() for x in real.at], torch.get_rng_state()
    torch.manual_seed(SEED)
    with Recorder() as recorder:
        found = Interpreter()
        found.run(steps)
    assert found.read == real.read or any(map(math.isnan, real.read))
    recorder.finish()
    views = {i: recorder.view_of(found.at[i]) for i in chosen}
    got: dict[int, Tensor] = {}

    def ready(cell: int, memory: Memory) -> None:
        for i, view in views.items():
            if view.cell == cell:
                got[i] = recorder.replay.show(view, memory).clone()

    recorder.replay.parts({view.cell for view in views.values()}, ready)
    recorder.replay.finish()
    same_bits(got, {i: want[i] for i in chosen})
    assert all(got[i].stride() == want[i].stride() for i in chosen)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(real.own.get_state(), found.own.get_state())
