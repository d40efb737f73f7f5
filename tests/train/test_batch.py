"""Batches in any container: moved, cut and cast where they can be opened, refused where not."""

import dataclasses
import importlib.util
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import optree
import pytest
import torch
from cases import Block
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as torch_pytree

import mics_fn as mf
from mics_fn.shards.contents import leaves_of, map_contents
from mics_fn.shards.precision import Precision
from mics_fn.train.program import count, cut, to_device

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Plain:
    x: Any
    name: str = "plain"


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    n: int = 3
    late: Any = dataclasses.field(default=None, init=False)


class Words(dict):
    """A dict of somebody's own."""


class Row(list):
    """A list of somebody's own."""


class Two(tuple):
    """A tuple of somebody's own."""


class Optrees:
    def __init__(self, x: Any) -> None:
        self.x = x


class Torchs:
    def __init__(self, x: Any) -> None:
        self.x = x


register: Any = optree.register_pytree_node
register(Optrees, lambda v: ([v.x], None, None), lambda _, v: Optrees(*v), namespace="mics_fn")
torch_pytree.register_pytree_node(Torchs, lambda v: ([v.x], None), lambda v, _: Torchs(*v))

MAKERS: dict[str, Any] = {
    "tuple": lambda x: (x, 1),
    "list": lambda x: [x, "text"],
    "namedtuple": lambda x: Pair(x, None),
    "dict": lambda x: {"b": x, "a": 2.5},
    "OrderedDict": lambda x: OrderedDict(b=x, a=None),
    "defaultdict": lambda x: defaultdict(list, b=x),
    "deque": lambda x: deque([x, 1], maxlen=4),
    "UserDict": lambda x: UserDict(b=x, a=1),
    "ChainMap": lambda x: ChainMap({"b": x}, {"c": 1}),
    "mappingproxy": lambda x: MappingProxyType({"b": x}),
    "dataclass": Plain,
    "slots": Slotted,
    "dict's child": lambda x: Words(b=x),
    "list's child": lambda x: Row([x]),
    "tuple's child": lambda x: Two((x,)),
    "mf.tree.node": lambda x: Block(x, None, "name"),
    "optree's": Optrees,
    "torch's": Torchs,
}
if importlib.util.find_spec("transformers"):
    from transformers import BatchEncoding
    from transformers.modeling_outputs import CausalLMOutput

    MAKERS |= {"BatchEncoding": lambda x: BatchEncoding({"input_ids": x})}
    MAKERS |= {"ModelOutput": lambda x: CausalLMOutput(logits=x)}


def held(value: Any) -> list[Tensor]:
    """The tensors in a value, found by the test itself."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, dict):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    elif isinstance(value, Optrees | Torchs):
        value = [value.x]
    elif hasattr(value, "keys"):
        value = [value[k] for k in value]
    return (
        [x for each in value for x in held(each)] if isinstance(value, (list, tuple, deque)) else []
    )


containers = st.recursive(
    st.just(None),
    lambda inner: st.tuples(st.sampled_from(sorted(MAKERS)), inner),
    max_leaves=4,
)


def build(shape: Any, x: Tensor) -> Any:
    return x if shape is None else MAKERS[shape[0]](build(shape[1], x))


def same_kind(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    for x, y in zip(held(a), held(b), strict=True):
        assert x.shape == y.shape
    if isinstance(a, defaultdict):
        assert a.default_factory is b.default_factory
    if isinstance(a, Slotted | Plain):
        assert [f.name for f in dataclasses.fields(a)] == [f.name for f in dataclasses.fields(b)]


@given(containers, st.sampled_from([1, 2, 3]))
@settings(max_examples=150)
def test_any_container_is_cut_moved_and_cast(shape, parts):
    x = torch.arange(12.0).view(6, 2)
    batch = build(shape, x)
    assert len(held(batch)) == 1
    found = cut(batch, parts)
    assert len(found) == parts
    for part, want in zip(found, x.chunk(parts), strict=True):
        (mine,) = held(part)
        assert torch.equal(mine, want)
        assert type(part) is type(batch)
    (kept,) = held(batch)
    assert kept is x, "the caller's batch was changed"
    moved, cast = to_device(batch, torch.device("meta")), Precision(compute=torch.bfloat16)
    same_kind(moved, batch)
    assert held(moved)[0].is_meta
    assert to_device(batch, torch.device("cpu")) is batch
    cast = cast.cast_inputs(batch)
    same_kind(cast, batch)
    assert held(cast)[0].dtype == torch.bfloat16
    assert Precision(output=torch.float32).cast_output(batch) is batch
    assert count(batch) == (6, 0)
    assert [each for each in leaves_of(batch) if isinstance(each, Tensor)] == [x]


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_the_rest_of_a_container_stays(name):
    batch = MAKERS[name](torch.ones(2, 2))
    part = cut(batch, 2)[0]
    for attribute in ("name", "n", "maxlen", "default_factory", "late"):
        assert getattr(part, attribute, None) == getattr(batch, attribute, None)
    rest = [[v for v in leaves_of(b) if not isinstance(v, Tensor)] for b in (part, batch)]
    assert rest[0] == rest[1]


def test_what_goes_to_each_part_and_what_is_cut():
    captions, names = ["a", "b", "c", "d"], ["cat", "dog", "cow"]
    batch = {
        "x": torch.arange(4), "captions": captions, "files": ("a", "b", "c", "d"), "names": names,
        "size": [32, 32, 3, 1], "flag": True, "text": "abcd", "dtype": torch.float32, "no": None,
        "key": Plain, "call": len, "empty": [], "raw": [b"a", b"b", b"c", b"d"],
    }  # fmt: skip
    first, second = cut(batch, 2)
    assert (first["captions"], second["captions"]) == (["a", "b"], ["c", "d"])
    assert (first["files"], second["files"]) == (("a", "b"), ("c", "d"))
    assert (first["raw"], second["raw"]) == ([b"a", b"b"], [b"c", b"d"])
    for name in ("names", "size", "flag", "text", "dtype", "no", "key", "call", "empty"):
        assert first[name] == second[name] == batch[name], name
    assert batch["captions"] is captions


class Own:
    """An object of which nobody knows what it holds."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Moves(Own):
    def to(self, device: torch.device) -> "Moves":
        return Moves(self.x.to(device))


UNKNOWN = {
    "Own": Own(torch.ones(4)),
    "SimpleNamespace": SimpleNamespace(x=torch.ones(4)),
    "set": {torch.ones(4)},
    "ndarray": np.ones(4),
    "PackedSequence": pack_sequence([torch.ones(2), torch.ones(1)]),
    "list_iterator": iter([torch.ones(4)]),
}


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_what_can_not_be_opened_is_refused_where_it_matters(name):
    batch = {"x": torch.ones(4, 2), "rest": [UNKNOWN[name]]}
    with pytest.raises(mf.errors.LeafError, match=rf"batch.rest.0 is {name}, which cannot be cut"):
        cut(batch, 2)
    assert cut(batch, 1) == [batch]
    assert to_device(batch, torch.device("cpu")) is batch
    if name not in ("ndarray", "PackedSequence"):
        with pytest.raises(AttributeError, match="no attribute 'to'"):
            to_device(batch, torch.device("meta"))


def test_an_object_may_move_itself():
    batch = [Moves(torch.ones(2)), pack_sequence([torch.ones(2), torch.ones(1)]), np.ones(2)]
    own, packed, array = to_device(batch, torch.device("meta"))
    assert own.x.is_meta
    assert packed.data.is_meta
    assert array is batch[2]


def test_paths_name_what_is_wrong():
    batch = {"a": Plain([torch.ones(4), Pair(torch.ones(3), 1)])}
    with pytest.raises(mf.errors.LeafError, match=r"batch.a.x.1.left has shape \(3,\)"):
        cut(batch, 2)
    seen = []
    map_contents(lambda x, path: seen.append(path), UserDict(a=Slotted((1,))), "b")
    assert seen == ["b.a.x.0", "b.a.n", "b.a.late"]


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(2, 1)
        self.sizes: list[int] = []

    def forward(self, x: Tensor, y: Tensor) -> Plain:
        self.sizes.append(len(x))
        return Plain((self.w(x).squeeze(-1) - y).square().mean())


def test_batches_that_optree_does_not_know_train_as_tuples_do():
    """Cut in micro-steps, spread over the model's arguments where they are mappings."""
    x, y = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.arange(6.0)
    found, sizes = [], []
    ways: list[tuple[Any, Any]] = [
        ((x, y), None),
        (UserDict(x=x, y=y), None),
        (Words(x=x, y=y), None),
        (Plain((x, y)), lambda m, batch: m(*batch.x).x),
        (MappingProxyType({"x": x, "y": y}), None),
    ]
    with mf.make_groups(1) as groups:
        for batch, loss in ways:
            torch.manual_seed(0)
            model = Scores()
            loss = loss or (lambda m, b: (m(**b) if hasattr(b, "keys") else m(*b)).x)
            trainer = mf.Trainer(model, mf.optim.sgd(0.1), groups, loss=loss, accumulate=3)
            metrics = trainer.step(batch)
            found.append((metrics.loss, trainer.params()))
            sizes.append((metrics.samples, trainer.program.skeleton.sizes))  # pyright: ignore
    assert sizes == [(6, [2, 2, 2])] * len(ways)
    for loss, params in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert all(torch.equal(params[k], found[0][1][k]) for k in params)


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).sum()


def test_any_mapping_is_spread_over_the_models_arguments():
    with mf.make_groups(1) as groups:
        for kind in (dict, UserDict, Words, MappingProxyType):
            trainer = mf.Trainer(Spread(), mf.optim.sgd(0.1), groups, accumulate=2)
            assert trainer.step(kind({"x": torch.ones(2, 2)})).loss.item() == 2.0
