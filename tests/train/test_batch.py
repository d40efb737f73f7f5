"""Batches in any container: moved, cut and cast where they can be opened, refused where not."""

import dataclasses
import importlib.util
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import Block
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as torch_pytree

import mics_fn as mf
from mics_fn.shards.bucket import Precision
from mics_fn.train.loop import cast_floats, count, cut, to_device

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


class Torchs:
    def __init__(self, x: Any) -> None:
        self.x = x


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
    "dataclass": Plain,
    "slots": Slotted,
    "dict's child": lambda x: Words(b=x),
    "list's child": lambda x: Row([x]),
    "mf.tree.node": lambda x: Block(x, None, "name"),
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
    elif isinstance(value, Torchs):
        value = [value.x]
    elif hasattr(value, "keys"):
        value = [value[k] for k in value]
    is_open = isinstance(value, list | tuple | deque)
    return [x for each in value for x in held(each)] if is_open else []


containers = st.recursive(
    st.just(None), lambda inner: st.tuples(st.sampled_from(sorted(MAKERS)), inner), max_leaves=4
)


def build(shape: Any, x: Tensor) -> Any:
    return x if shape is None else MAKERS[shape[0]](build(shape[1], x))


@given(containers, st.sampled_from([1, 2, 3]))
@examples(40, 150)
def test_any_container_is_cut_moved_and_cast(shape, parts):
    x = torch.arange(12.0).view(6, 2)
    batch = build(shape, x)
    found = cut(batch, parts)
    assert len(found) == parts
    for part, want in zip(found, x.chunk(parts), strict=True):
        (mine,) = held(part)
        assert torch.equal(mine, want)
        assert type(part) is type(batch)
    (kept,) = held(batch)
    assert kept is x, "the caller's batch was changed"
    assert to_device(batch, torch.device("cpu")) is batch
    assert cast_floats(batch, Precision(output=torch.float32).output) is batch
    moved = to_device(batch, torch.device("meta"))
    cast = cast_floats(batch, Precision(compute=torch.bfloat16).inputs)
    assert type(moved) is type(cast) is type(batch)
    assert held(moved)[0].is_meta
    assert held(cast)[0].dtype == torch.bfloat16
    assert count(batch) == (6, 0)


def test_what_goes_to_each_part_and_what_is_cut():
    batch = {
        "x": torch.arange(4), "captions": ["a", "b", "c", "d"], "files": ("a", "b", "c", "d"),
        "raw": [b"a", b"b", b"c", b"d"], "names": ["cat", "dog", "cow"], "size": [32, 32, 3, 1],
        "flag": True, "text": "abcd", "dtype": torch.float32, "no": None, "call": len, "empty": [],
    }  # fmt: skip
    first, second = cut(batch, 2)
    for name, value in batch.items():
        if name in ("x", "captions", "files", "raw"):
            assert (list(first[name]), list(second[name])) == (list(value[:2]), list(value[2:]))
            assert type(first[name]) is type(value)
        else:
            assert first[name] == second[name] == value, name
    assert len(batch["captions"]) == 4


UNKNOWN = {
    "SimpleNamespace": SimpleNamespace(x=torch.ones(4)),
    "set": {torch.ones(4)},
    "ndarray": np.ones(4),
    "PackedSequence": pack_sequence([torch.ones(2), torch.ones(1)]),
}


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_what_can_not_be_opened_is_refused_where_it_matters(name):
    batch = {"x": torch.ones(4, 2), "rest": [UNKNOWN[name]]}
    with pytest.raises(mf.errors.LeafError, match=f"a {name} in the batch cannot be cut"):
        cut(batch, 2)
    assert to_device(batch, torch.device("cpu")) is batch
    if name in ("ndarray", "PackedSequence"):  # numpy stays, and an object may move itself
        (moved,) = to_device(batch, torch.device("meta"))["rest"]
        assert moved is UNKNOWN[name] if name == "ndarray" else moved.data.is_meta
    else:
        with pytest.raises(AttributeError, match="no attribute 'to'"):
            to_device(batch, torch.device("meta"))
