"""`init_model` gives, bit for bit, what sharding a model that was made in full gives."""

import copy
import importlib.util
import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, same_bits
from test_files import data_of, module_order, same_shards
from torch import Tensor, nn
from torch.func import functional_call
from zoo import CASES, Case

import mics_fn as mf
from mics_fn.init.tape import start_of
from mics_fn.shards import owners_of

if importlib.util.find_spec("transformers"):
    from zoo_transformers import CASES as TRANSFORMERS
else:
    TRANSFORMERS: dict[str, Case] = {}

ZOO = CASES | {k: v for k, v in TRANSFORMERS.items() if not k.endswith("recomputing")}
SEED = 11


def zoo_model(name: str) -> nn.Module:
    return ZOO[name].model().to(ZOO[name].dtype)


# Models that are made in other ways than by modules' own resets.


class Reader(nn.Module):
    """A construction that asks for values in every way and depends on them."""

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
    """Draws from its own generators, seeds again, and restores a state after a part."""

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
        self.loose = [nn.Parameter(torch.rand(3))]
        self.parts = self.weight.data[1:]

    def forward(self, x: Tensor) -> Tensor:
        tables: Any = self.tables
        return x @ (self.weight * self.mask) + tables["a"][1][0].sum()


def from_numpy() -> nn.Module:
    """Random numbers of Python and numpy are drawn once, even if tensors share memory."""
    model = nn.Linear(4, 3)
    model.weight.data.copy_(torch.from_numpy(np.random.randn(3, 4)))
    model.bias.data.fill_(random.random())
    return model


def memory_ties() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    first, second, third = cast(Any, model)
    second.weight = first.weight
    third.weight = nn.Parameter(first.weight.detach())
    third.bias.requires_grad_(False)
    return model


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
    big = torch.randn(6, 5)  # of which some are views
    model.rows = nn.ParameterList(row.clone() for row in big)
    model.left, model.right = nn.Parameter(big[:2]), nn.Parameter(big[2:].t())
    model.register_buffer("none", None)
    model.register_buffer("frequencies", torch.polar(torch.ones(3), torch.rand(3)), False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "reader": Reader,
    "generators": OwnGenerator,
    "attributes": OddAttributes,
    "numpy": from_numpy,
    "ties": memory_ties,
    "halves": halves,
    "odd": odd_parameters,
}
MODELS |= {f"zoo-{name}": partial(zoo_model, name) for name in ZOO}
LAYOUTS = [Layout((1,), 1), Layout((4,), 4), Layout((2, 2), 2)]


def seeded() -> None:
    random.seed(SEED)
    np.random.seed(SEED)


def made(model_fn: Callable[[], nn.Module]) -> nn.Module:
    seeded()
    torch.manual_seed(SEED)
    return model_fn()


def same_as_in_full(
    model_fn: Callable[[], nn.Module], groups: mf.Groups, **options: Any
) -> tuple[nn.Module, Any]:
    """Compare `init_model` with making the model and sharding it."""
    model = made(model_fn)
    states = torch.get_rng_state(), random.random(), np.random.rand()
    params = dict(model.named_parameters(remove_duplicate=False))
    want = mf.shard(params, groups, order=module_order(params), **options)
    seeded()
    skeleton, shards = mf.init_model(model_fn, groups, seed=SEED, **options)
    assert torch.equal(states[0], torch.get_rng_state()), "torch's generator"
    assert states[1:] == (random.random(), np.random.rand()), "other generators"
    assert list(shards) == list(params)
    same_shards(shards, want)
    chunks = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in data_of(shards)}
    wanted = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in data_of(want)}
    assert sorted(chunks.values()) == sorted(wanted.values()), "chunks in memory of their own"
    same_structure(skeleton, model)
    return skeleton, shards


def same_structure(skeleton: nn.Module, model: nn.Module) -> None:
    """Check that parameters are on meta and the rest is as in the model made in full."""
    kinds = [
        [(name, type(m).__name__, m.training) for name, m in x.named_modules()]
        for x in (skeleton, model)
    ]
    assert kinds[0] == kinds[1]
    got = dict(skeleton.named_parameters(remove_duplicate=False))
    for name, x in model.named_parameters(remove_duplicate=False):
        assert type(got[name]) is nn.Parameter, name
        assert got[name].is_meta, name
        facts = [(p.requires_grad, p.shape, p.dtype, p.stride()) for p in (got[name], x)]
        assert facts[0] == facts[1], name
    every = [list(x.parameters()) for x in (skeleton, model)]
    assert len(every[0]) == len(set(owners_of(every[1]))), "one for those that share memory"
    buffers = [
        {k: torch.view_as_real(x) if x.is_complex() else x for k, x in each.named_buffers()}
        for each in (skeleton, model)
    ]
    same_bits(*buffers)
    assert all(type(x) is Tensor for x in buffers[0].values())
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
@pytest.mark.covering("part", layout=LAYOUTS[2])
@pytest.mark.thorough
def test_each_rank_has_its_part_of_that(ranks, layout: Layout, part: int):
    ranks(layout.world_size).run(on_ranks, layout, list(MODELS)[part::4])


# What cannot be recorded or repeated is refused.

OUTSIDE = torch.zeros(3)


def writes_outside() -> nn.Module:
    OUTSIDE.add_(torch.ones(3)).sub_(torch.ones(3))
    return nn.Linear(2, 2)


def outside_changes() -> nn.Module:
    """Numpy writes to memory that a tensor shares, after an op read it."""
    array, model = np.random.randn(3, 4), nn.Linear(4, 3)
    model.weight.data.copy_(torch.from_numpy(array))
    array[:] = 0
    return model


@torch.library.custom_op("mics_fn_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x.contiguous()


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1]).t()  # other strides than it has


def wrong_rule() -> nn.Module:
    model = nn.Linear(3, 4)
    model.bias = nn.Parameter(torch.rand(5))
    model.weight = nn.Parameter(doubled(model.weight.detach()))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "outside": (writes_outside, "aten.add_.Tensor writes to a tensor that was made outside"),
    "changes": (outside_changes, "shares memory that other code wrote to"),
    "lazy": (lambda: nn.LazyLinear(4), "as lazy modules do"),
    "wrong-rule": (wrong_rule, "doubled.default gave .*rule for tensors without data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused(name: str):
    model_fn, why = REFUSED[name]
    text = f"init_model: this model cannot be made in parts\n  .*{why}.*\n  fix: "
    with mf.make_groups(1) as groups, pytest.raises(mf.errors.LeafError, match=text):
        mf.init_model(model_fn, groups, seed=SEED)
    assert torch.equal(OUTSIDE, torch.zeros(3))


def test_generators_of_others_end_as_after_a_plain_construction():
    own = [torch.Generator().manual_seed(9) for _ in range(2)]
    made(lambda: OwnGenerator(own[0]))
    with mf.make_groups(1) as groups:
        mf.init_model(lambda: OwnGenerator(own[1]), groups, seed=SEED)
    assert torch.equal(own[0].get_state(), own[1].get_state())


def test_generators_stay_as_seeded_where_weights_are_read():
    model = made(OwnGenerator)
    with mf.make_groups(1) as groups:
        skeleton, _ = mf.init_model(OwnGenerator, groups, seed=SEED)
        assert skeleton.seeds == (SEED, 3), "a seed can be read meanwhile"
        _, shards = mf.init_model(OwnGenerator, groups, seed=5, weights=model.state_dict())
        same_bits(mf.gather(shards, groups), {k: p.data for k, p in model.named_parameters()})
    state = torch.get_rng_state()
    assert torch.equal(state, torch.manual_seed(5).get_state())


class Unset(nn.Module):
    """Memory to which nothing is written, or only to a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.empty(400))
        self.part = nn.Parameter(torch.empty(400))
        self.part.data[:3].normal_()
        self.copied = nn.Parameter(torch.empty(5, 80).t().clone())


def unset(layout: Layout) -> None:
    groups = groups_of(layout)
    dirt = [torch.full((400,), 7.0) for _ in range(20)]  # what fresh memory would show
    del dirt
    _, shards = mf.init_model(Unset, groups, seed=SEED)
    full = mf.unshard(shards, groups)
    assert full["part"][:3].all()
    assert not any(x.any() for x in (full["whole"], full["part"][3:], full["copied"]))


def test_memory_that_nothing_sets_is_zero_on_all_ranks(ranks):
    ranks(4).run(unset, Layout((2, 2), 2))


# The skeleton.


def test_what_a_module_holds_besides_is_real():
    with mf.make_groups(1) as groups:
        skeleton: Any
        skeleton, shards = mf.init_model(OddAttributes, groups, seed=SEED)
        model: Any = made(OddAttributes)
        assert set(shards) == {"weight"}
        assert skeleton.weight.no_decay is True
        held = [(x.mask, x.parts, x.tables["a"][1][0], x.loose[0]) for x in (skeleton, model)]
        assert [type(x) for x in held[0]] == [Tensor, Tensor, Tensor, nn.Parameter]
        same_bits(*held)
        x = torch.rand(2, 4)
        same_bits(functional_call(skeleton, mf.gather(shards, groups), x), model(x))


def test_a_model_of_somebody_else_stays_as_it_is():
    inner = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), inner)
    before = copy.deepcopy(model.state_dict())
    with mf.make_groups(1) as groups:
        for model_fn in (lambda: model, lambda: nn.Sequential(nn.Linear(4, 4), inner)):
            skeleton, shards = mf.init_model(model_fn, groups, seed=SEED)
            assert all(p.is_meta for p in skeleton.parameters())
            for buffer in skeleton.buffers():
                buffer.add_(1)
            same_bits(mf.gather(shards, groups)["1.weight"], before["1.weight"])
    same_bits(dict(model.state_dict()), dict(before))
    assert all(type(p) is nn.Parameter and p.requires_grad for p in model.parameters())


# Options, groups and mistakes.


def experts(layout: Layout) -> None:
    dense, alone = groups_of(layout), groups_of(Layout(layout.sizes, 1))

    def groups(path: str) -> mf.Groups:
        return alone if "experts" in path else dense

    def model_fn() -> nn.Module:
        return nn.ModuleDict({"body": nn.Linear(5, 3), "experts": nn.Linear(3, 7)})

    model = made(model_fn)
    params = dict(model.named_parameters())
    options: Any = {"frozen": lambda path: "bias" in path, "bucket_bytes": 50}
    for home in (groups, {k: groups(k) for k in params}):
        want = mf.shard(params, home, order=module_order(params), **options)
        _, shards = mf.init_model(model_fn, home, seed=SEED, **options)
        same_shards(shards, want)
        assert isinstance(shards["body.bias"], mf.shards.Fixed)


def test_experts_on_other_groups(ranks):
    ranks(4).run(experts, Layout((2, 2), 2))


def refused(layout: Layout, kind: str) -> tuple[str, bool]:
    groups, rank = groups_of(layout), dist.get_rank()

    def model_fn() -> nn.Module:
        if kind == "raises" and rank == 2:
            raise ValueError("no such config")
        width = 3 + (kind == "tree" and rank == 3)
        model = nn.Linear(4, width)
        if kind == "values" and rank == 3:
            model.weight.data[2, 3] += 1e-3
        return model

    mf.init_model(lambda: nn.Linear(4, 3), groups, seed=SEED)  # seen before, and compared again
    try:
        mf.init_model(model_fn, groups, seed=SEED + (kind == "seed" and rank == 1))
    except (mf.errors.DesyncError, ValueError) as error:
        return f"{type(error).__name__}: {error}", not isinstance(
            start_of(torch.get_rng_state()), int
        )
    return "nothing was refused", True


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("seed", ["ranks 0, 2, 3: seed=11", "rank 1: seed=12"]),
        ("raises", ["rank 2: ValueError: no such config"]),
        ("tree", ["rank 3: params.bias (4,) float32"]),
        ("values", ["first difference: params.weight", "rank 3: not as in the first replica"]),
    ],
)
def test_ranks_that_differ_all_hear_of_it(ranks, kind: str, lines: list[str]):
    found = ranks(4).run(refused, Layout((2, 2), 2), kind)
    for rank, (text, left_alone) in enumerate(found):
        assert left_alone, "a generator that no longer follows from a seed"
        if kind == "raises" and rank == 2:
            assert text == "ValueError: no such config"
        else:
            assert text.startswith("DesyncError: init_model: ")
            assert all(line in text for line in lines), text
