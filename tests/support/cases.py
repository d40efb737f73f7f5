"""What the contract tests run over: layouts of ranks, nasty trees, dtypes; and slow twins."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import tree
from mics_fn.groups import communicator
from mics_fn.optim.flat import by_leaf
from mics_fn.shards.leaf import is_leaf


class Layout(NamedTuple):
    """A world: its sizes outermost first, and the size of a partition group."""

    sizes: tuple[int, ...]
    partition_size: int

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    @property
    def features(self) -> dict[str, Any]:
        """What a defect may depend on: the levels of a partition group, and how many there are."""
        plan = mf.groups.plan_groups(mf.groups.Topology(self.sizes), self.partition_size)
        return {"levels": plan.level_sizes, "replicas": self.world_size // self.partition_size}

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.sizes))}-p{self.partition_size}"


LAYOUTS = [
    Layout((1,), 1),
    Layout((2,), 1),
    Layout((2,), 2),
    Layout((2, 2), 1),
    Layout((2, 2), 2),
    Layout((2, 2), 4),
    Layout((4,), 4),
    Layout((4, 2), 4),
    Layout((2, 4), 2),
    Layout((2, 4), 8),
    Layout((2, 2, 2), 4),
    Layout((2, 2, 2), 8),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def small_first(layouts: Iterable[Layout], *rest: Any) -> list[Any]:
    """Cases of layouts, each with the same further values; more than 4 ranks are `thorough`."""
    marks = {True: pytest.mark.thorough, False: ()}
    return [pytest.param(x, *rest, marks=marks[x.world_size > 4]) for x in layouts]


_made: dict[Layout, mf.Groups] = {}  # per process: groups outlive one example


def groups_of(layout: Layout, timeout_s: float = 20.0) -> mf.Groups:
    """This rank's groups of a layout, made once."""
    if layout not in _made or _made[layout].closed:
        topology = mf.groups.Topology(layout.sizes)
        _made[layout] = mf.make_groups(
            layout.partition_size, topology=topology, timeout_s=timeout_s
        )
    return _made[layout]


def placed_as(groups: mf.Groups, scheme: str) -> mf.Groups:
    """The groups in a placement by its name, or in fixed order."""
    if scheme == "fixed_order":
        return mf.placement.fixed_order(groups)
    return mf.placement.place(groups, scheme)


def full_of(shards: Any, groups: Any, schedule: Any = None, into: Any = None) -> Any:
    """Full parameters: gathered now, or deferred under a schedule."""
    if schedule is None:
        return mf.gather(shards, groups)
    return mf.defer(shards, groups, schedule, into=into).params


def forget_groups(layout: Layout) -> None:
    """Close the groups of a layout, which a test has broken; `groups_of` makes new ones.

    Open groups are watched: what nobody uses any more would cost each later test some time.
    """
    groups = _made.pop(layout, None)
    if groups is not None:
        groups.close()


def close_groups() -> None:
    """Close all groups of this process."""
    _made.clear()
    for state in list(communicator.OPEN):
        state.close()


class Pair(NamedTuple):
    left: Any
    right: Any


@tree.node
@dataclass(frozen=True)
class Block:
    weight: Any
    bias: Any
    name: str = tree.static()


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _plain(dtype: torch.dtype, seed: int) -> Any:
    shapes = {"h.10.w": (2, 3), "h.2.w": (7,), "w": (5, 3), "b": (16,)}
    return {k: random(seed + i, *s, dtype=dtype) for i, (k, s) in enumerate(shapes.items())}


def _nested(dtype: torch.dtype, seed: int) -> Any:
    def leaf(i: int, *shape: int) -> Tensor:
        return random(seed + i, *shape, dtype=dtype)

    return OrderedDict(
        z=[leaf(0, 3), (leaf(1, 2, 2), None)],
        a=Pair(leaf(2, 9), {"x": leaf(3, 1)}),
        block=Block(leaf(4, 4, 5), leaf(5, 5), "first"),
    )


def _odd(dtype: torch.dtype, seed: int) -> Any:
    return {
        "scalar": random(seed, dtype=dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "one": random(seed + 1, 1, dtype=dtype),
        "tiny": random(seed + 2, 3, dtype=dtype),
        "prime": random(seed + 3, 101, dtype=dtype),
        "transposed": random(seed + 4, 3, 5, dtype=dtype).t(),
        "expanded": random(seed + 5, 1, 4, dtype=dtype).expand(3, 4),
        "strided": random(seed + 6, 12, dtype=dtype)[::3],
        "negated": _negated(random(seed + 7, 6, dtype=dtype)),
    }


def _tied(dtype: torch.dtype, seed: int) -> Any:
    shared = random(seed, 6, 4, dtype=dtype)
    return {"wte": shared, "h": [random(seed + 1, 4, 4, dtype=dtype)], "zhead": shared.detach()}


def _mixed(dtype: torch.dtype, seed: int) -> Any:
    other = torch.float64 if dtype != torch.float64 else torch.float32
    return {
        "a": random(seed, 10, dtype=dtype),
        "b": random(seed + 1, 4, 4, dtype=other),
        "count": torch.tensor([seed, 7]),
        "mask": torch.tensor([True, False, True]),
        "frozen": nn.Parameter(random(seed + 2, 3, 3, dtype=dtype), requires_grad=False),
        "z": random(seed + 3, 5, dtype=dtype),
    }


TREES: dict[str, Callable[[torch.dtype, int], Any]] = {
    "plain": _plain,
    "nested": _nested,
    "odd": _odd,
    "tied": _tied,
    "mixed": _mixed,
    "nothing": lambda dtype, seed: {},
    "all-empty": lambda dtype, seed: [torch.zeros(0, dtype=dtype), torch.zeros(2, 0, dtype=dtype)],
}


def _parts(pieces: list[Tensor], starts: list[int]) -> list[Tensor]:
    """Views of one tensor that begin at `starts`; what lies around them is NaN."""
    size = 5 + max([start + len(x) for start, x in zip(starts, pieces, strict=True)], default=0)
    base = torch.full((size,), float("nan"), dtype=pieces[0].dtype if pieces else None)
    parts = [base[start : start + len(x)] for start, x in zip(starts, pieces, strict=True)]
    for part, x in zip(parts, pieces, strict=True):
        part.copy_(x)
    return parts


def _columns(x: Tensor) -> Tensor:
    return torch.stack([x - 1, x, x + 1], 1)[:, 1]


def _negated(x: Tensor) -> Tensor:
    """The same values, of which torch keeps the negative and a mark; not in 16 bits."""
    return torch.complex(x * 0, -x).conj().imag if x.itemsize > 2 else x


# 1D pieces in memory that is not theirs alone, or not in order; overlaps change the values.
ODD_MEMORY: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "expanded": lambda pieces: [x[:1].expand(len(x)) for x in pieces],
    "columns": lambda pieces: [_columns(x) for x in pieces],
    "negated": lambda pieces: [_negated(x) for x in pieces],
    "parts": lambda pieces: _parts(pieces, [5 + 50 * i for i in range(len(pieces))]),
    "overlapping": lambda pieces: _parts(pieces, [5 + 2 * i for i in range(len(pieces))]),
    "the same": lambda pieces: _parts(pieces, [5 for _ in pieces]),
}


def in_odd_memory(kind: str, shards: Any) -> Any:
    """The tree with its pieces in memory of another kind, and maybe other values."""
    leaves, spec = tree.flatten(shards)
    pieces = iter(ODD_MEMORY[kind]([x for x in leaves if _is_piece(x)]))
    return spec.unflatten([next(pieces) if _is_piece(x) else x for x in leaves])


def in_own_memory(shards: Any) -> Any:
    """The tree with each piece dense and alone in its memory."""
    return tree.map_leaves(
        lambda x: x.clone(memory_format=torch.contiguous_format) if _is_piece(x) else x, shards
    )


def _is_piece(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1


def poison(shards: Any) -> Any:
    """Write NaN to all padding: whatever is not a piece in the chunks' memory."""
    pieces, _ = tree.flatten(shards)
    frozen = [
        leaf for leaf in tree.flatten(shards, is_leaf)[0] if isinstance(leaf, mf.shards.Fixed)
    ]
    pieces += [leaf.data for leaf in frozen if leaf.bucket is not None]
    kept = [piece.clone() for piece in pieces]
    for piece in pieces:
        if piece.numel():
            numel = piece.untyped_storage().nbytes() // piece.itemsize
            piece.as_strided((numel,), (1,), 0).fill_(float("nan"))
    for piece, values in zip(pieces, kept, strict=True):
        piece.copy_(values)
    return shards


def same_bits(a: Any, b: Any) -> None:
    """Raise unless two trees are equal in structure, shape, dtype and every bit; not in padding."""
    a, b = by_leaf(a), by_leaf(b)
    leaves_a, spec_a = tree.flatten(a)
    leaves_b, spec_b = tree.flatten(b)
    assert spec_a == spec_b, f"{spec_a} != {spec_b}"
    for x, y, path in zip(leaves_a, leaves_b, tree.paths(a), strict=True):
        if not isinstance(x, Tensor):
            assert x == y, path
            continue
        assert x.shape == y.shape, path
        assert x.dtype == y.dtype, path
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
        bits = [t.detach().resolve_neg().contiguous().view(-1).view(kind) for t in (x, y)]
        assert torch.equal(*bits), f"{path}: {x} != {y}"


def plain_values(value: Any) -> Any:
    """A tree of plain tensors without Parameters, to compare with."""
    return tree.map_leaves(lambda x: x.detach().clone(), value)


def everywhere(tensor: Tensor, ranks: int) -> list[Tensor]:
    """A tensor of each of the world's ranks, by the test's own plain collective."""
    out = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(out, tensor.contiguous())
    return out


def unit_roundoff(dtype: torch.dtype) -> float:
    """u: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def mean_bound(parts: list[Tensor], roundings: int, dtype: torch.dtype) -> Tensor:
    """How far a mean may be from the exact one: k roundings of a sum (Higham, 2002, 3.1).

    Args:
      parts: float64 values of the summands.
      roundings: operations that each element passes through.
      dtype: the coarsest dtype that a partial result is rounded to.
    """
    ku = roundings * unit_roundoff(dtype)
    return ku / (1 - ku) * torch.stack([p.abs() for p in parts]).sum(0) / len(parts)
