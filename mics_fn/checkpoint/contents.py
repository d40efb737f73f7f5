"""What a state holds, as named tensors on lines and as numbers, and what of it this rank writes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor

from mics_fn import tree
from mics_fn.checkpoint.extras import savable
from mics_fn.checkpoint.layout import (
    Line,
    Slice,
    Stored,
    line_of_bytes,
    places_in_bytes,
    within,
)
from mics_fn.collectives import Codec, checksum
from mics_fn.errors import LeafError, PlanError, message
from mics_fn.groups import Groups
from mics_fn.offload import is_coded
from mics_fn.optim import TrainState, by_leaf
from mics_fn.shards import Bucket, Nothing, Tied, dtype_name, homes_of, is_leaf, pieces
from mics_fn.tree import Tree

Replicas = Literal["equal", "apart"]


@dataclass(frozen=True, eq=False)
class Piece:
    """What this rank has of a tensor.

    Args:
      data: 1D, elements `origin` to `origin + len(data)` of the flattened tensor.
      origin: where it begins.
    """

    data: Tensor
    origin: int = 0


@dataclass(frozen=True, eq=False)
class Held:
    """A leaf on a line, as this rank holds it; see [Note: other codes] in `converting`.

    Args:
      name: its path.
      image: which replica's it is, as the names in a checkpoint end; "" for the first one.
      data: this rank's piece, values or a `Coded`; None for a leaf of another replica.
      origin: which element of the flattened leaf it begins with.
      shape: of the leaf, in full.
      codec: of the codes that it is kept as; None for values.
      parts: the names of what it is saved as.
    """

    name: str
    image: str
    data: Tensor | None
    origin: int
    shape: tuple[int, ...]
    codec: Codec | None
    parts: list[str]


@dataclass(frozen=True, eq=False)
class Contents:
    """A state as a checkpoint has it.

    Args:
      lines: the lines of buckets.
      cells: the cell of this rank on each of these lines.
      cut: tensors that lie on them.
      plain: tensors that a rank holds in full, by name.
      held: what this rank has of the tensors in `cut`, by name.
      values: numbers and texts, by name.
      ties: the name of the tensor that another name means.
      leaves: the leaves that lie on lines; while replicas are apart once for each replica.
    """

    lines: list[Line] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    cut: list[Stored] = field(default_factory=list)
    plain: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, Piece] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    homes: list[Groups] = field(default_factory=list)  # of the lines, by number
    ties: dict[str, str] = field(default_factory=dict)
    leaves: list[Held] = field(default_factory=list)

    def facts(self) -> list[tuple[str, str]]:
        """What must be equal on all ranks, as pairs for `agree`."""
        lines = [(f"line {i}", str(line)) for i, line in enumerate(self.lines)]
        texts = [(x.name, f"{x.shape} {dtype_name(x.dtype)} at {x.offset}") for x in self.cut]
        plain = [(k, f"{tuple(x.shape)} {dtype_name(x.dtype)}") for k, x in self.plain.items()]
        return [*lines, *texts, *plain, *((k, f"the same as {v}") for k, v in self.ties.items())]

    def cells_of_homes(self) -> list[list[int]]:
        """For each set of groups, the numbers of this rank's chunk and replica."""
        return [[each.hierarchy.route.chunk, each.replicas.rank] for each in self.homes]

    def plain_sums(self) -> dict[str, str]:
        """The checksum of each tensor that this rank holds in full, by name."""
        return {name: f"{int(checksum(x))}" for name, x in self.plain.items()}

    def mine(self) -> dict[str, tuple[Slice, Tensor]]:
        """The slices of cut tensors that this rank writes, by name."""
        found: dict[str, tuple[Slice, Tensor]] = {}
        for tensor in self.cut:
            piece = self.held.get(tensor.name)
            part = within(tensor, self.lines[tensor.line], self.cells[tensor.line])
            if piece is not None and part is not None:
                low = part.start - piece.origin
                found[tensor.name] = part, piece.data[low : low + part.stop - part.start]
        return found


def on_bytes(
    plain: Mapping[str, Tensor], ranks: int, number: int, place: int
) -> tuple[Line, list[Stored], dict[str, tuple[Slice, Tensor]]]:
    """Tensors that are equal on all ranks: their line, their places, and what this rank writes.

    Args:
      plain: the tensors by name.
      ranks: number of ranks that share the work.
      number: the number of the line.
      place: the number of this rank among them.
    """
    facts = [(name, x.dtype, tuple(x.shape)) for name, x in plain.items()]
    line, found = line_of_bytes(facts, ranks), {}
    stored = places_in_bytes(facts, number)
    for tensor in stored:
        part = within(tensor, line, place)
        if part is not None:
            flat = plain[tensor.name].detach().reshape(-1)
            found[tensor.name] = part, flat[part.start : part.stop]
    return line, stored, found


class Part(NamedTuple):
    """What a piece is saved as: its values; or its codes, and the scales of their blocks.

    Args:
      name: the name in the checkpoint.
      data: 1D, what this rank has.
      shape: the shape in full.
      unit: so many of its elements stand for so many elements of the leaf.
    """

    name: str
    data: Tensor
    shape: tuple[int, ...]
    unit: tuple[int, int] = (1, 1)

    def of(self, numel: int) -> int:
        """How many of its elements stand for so many of the leaf, which are whole units."""
        return numel // self.unit[1] * self.unit[0]


def parts_of(name: str, data: Any, leaf: Any) -> list[Part]:
    """What the piece of a leaf is saved as.

    Codes are saved as they are kept, under names that say which they are, so that no state takes
    them for codes of another kind. Their blocks do not depend on the ranks that hold them.
    """
    codec = codec_of(leaf)
    if codec is None:
        return [Part(name, data, leaf.shape)]
    codes, scales = data.part_codes()
    first, second = names_of_codes(name, codec)
    blocks, nbytes = -(-leaf.bucket.numels[leaf.slot] // codec.block), data.codes.elements.shape[1]
    return [
        Part(first, codes, (blocks * nbytes,), (nbytes, codec.block)),
        Part(second, scales, (blocks,), (1, codec.block)),
    ]


def names_of_codes(name: str, codec: Codec, image: str = "") -> tuple[str, str]:
    """The names of the codes and the scales of a leaf; `image` tells of which replica."""
    return f"{name} as {codec}{image}", f"{name} as {codec}, scales{image}"


def codec_of(leaf: Any) -> Any:
    """The codes that a leaf of a bucket is kept as; None for values."""
    return leaf.bucket.codes if is_coded(leaf.data) else None


class _Reader:
    """Sorts the leaves of a state into `Contents`."""

    def __init__(
        self, verb: str, homes: Mapping[Bucket, Groups], main: Groups, apart: bool
    ) -> None:
        self.verb, self.homes, self.main, self.apart = verb, homes, main, apart
        self.found = Contents()
        self.found.homes.extend(dict.fromkeys([main, *homes.values()]))
        self._lines: dict[tuple[Bucket, tuple[int, int]], int] = {}
        self._owners: dict[tuple[Bucket, int], str] = {}  # those of the tree that is read now

    def take(self, name: str, leaf: Any) -> None:
        """Sort one leaf."""
        if isinstance(leaf, Nothing):
            return
        if isinstance(leaf, Tied):
            self.found.ties[name] = self._owners[leaf.bucket, leaf.slot]
        elif is_leaf(leaf) and leaf.bucket is not None:
            self._owners[leaf.bucket, leaf.slot] = name
            self._cut(name, leaf)
        elif isinstance(leaf, Tensor) or is_leaf(leaf):
            self.found.plain[name] = savable(self.verb, name, leaf.data if is_leaf(leaf) else leaf)
        elif isinstance(leaf, bool | int | float | str):
            self.found.values[name] = leaf
        else:
            text = f"{self.verb}: {name} is {type(leaf).__name__}"
            fix = "keep shards, tensors, numbers and texts in a state; pass the rest as extra="
            raise LeafError(message(text, fix=fix))

    def _cut(self, name: str, leaf: Any) -> None:
        bucket, home = leaf.bucket, self.homes.get(leaf.bucket, self.main)
        route, data = home.hierarchy.route, savable(self.verb, name, leaf.data)
        right = bucket.parts == route.size
        piece = pieces(bucket, route.chunk)[leaf.slot] if right else None
        if piece is None or data.shape != (piece.length,):
            text = f"{self.verb}: {name} is cut in {bucket.parts}, here {tuple(data.shape)}"
            fix = "pass the groups that the tree was sharded with"
            raise PlanError(message(f"{text}; its groups have {route.size} ranks", fix=fix))
        images = home.num_replicas if self.apart else 1
        image = home.replicas.rank if self.apart else 0
        parts = parts_of(name, data, leaf)
        for i in range(images):
            whose = f" of replica {i}" if i else ""
            for part in parts:
                number, length = self._line(bucket, home, part), part.of(bucket.numel)
                offset = i * length + part.of(bucket.offsets[leaf.slot])
                own = f"{part.name}{whose}"
                self.found.cut.append(Stored(own, part.data.dtype, part.shape, number, offset))
                if i == image:
                    self.found.held[own] = Piece(part.data, part.of(piece.origin))
            mine = data if i == image else None
            names = [f"{part.name}{whose}" for part in parts]
            held = Held(name, whose, mine, piece.origin, leaf.shape, codec_of(leaf), names)
            self.found.leaves.append(held)

    def _line(self, bucket: Bucket, home: Groups, part: "Part") -> int:
        """The number of the line that a bucket is; one of codes is a line for each of its parts."""
        key, length = (bucket, part.unit), part.of(bucket.numel)
        if key not in self._lines:
            self._lines[key] = len(self.found.lines)
            p, r, chunk = home.partition_size, home.num_replicas, home.hierarchy.route.chunk
            at, number = home.replicas.rank, self.found.homes.index(home)
            if self.apart:
                self.found.lines.append(Line(length * r, p * r, 1, number))
                self.found.cells.append(at * p + chunk)
            else:
                self.found.lines.append(Line(length, p, r, number))
                self.found.cells.append(chunk * r + at)
        return self._lines[key]


def contents_of(verb: str, state: Tree, groups: Any, replicas: Replicas) -> Contents:
    """What a state holds.

    Raises:
      LeafError: a leaf is neither a shard nor a dense tensor, a number or a text.
      PlanError: shards were made for other groups.
    """
    homes = homes_by_bucket(verb, state, groups)
    reader = _Reader(verb, homes, main_home(verb, groups, homes), replicas == "apart")
    plain = by_leaf(state)
    tree.refuse_equal_paths(verb, plain, "", is_leaf)
    leaves = tree.flatten(plain, is_leaf)[0]
    for name, leaf in zip(tree.paths(plain, "", is_leaf), leaves, strict=True):
        reader.take(name, leaf)
    return reader.found


def homes_by_bucket(verb: str, state: Tree, groups: Any) -> dict[Bucket, Groups]:
    """The groups of each bucket of a state; those of its parameters if it is a `TrainState`."""
    if isinstance(groups, Groups):
        return {}
    nodes = tree.flatten(state, lambda x: isinstance(x, TrainState))[0]
    states = [x for x in nodes if isinstance(x, TrainState)]
    params = states[0].params if states else state
    leaves = tree.flatten(params, is_leaf)[0]
    homes = homes_of(verb, groups, params)
    pairs = zip(leaves, homes, strict=True)
    return {leaf.bucket: home for leaf, home in pairs if getattr(leaf, "bucket", None)}


def main_home(verb: str, groups: Any, homes: Mapping[Bucket, Groups]) -> Groups:
    """The groups whose ranks save together.

    Raises:
      PlanError: leaves live on groups of different ranks.
    """
    found = [groups] if isinstance(groups, Groups) else list(dict.fromkeys(homes.values()))
    wrong = [home for home in found if not isinstance(home, Groups)]
    if wrong or not found:
        text = f"{verb}: got {type(wrong[0]).__name__ if wrong else 'no groups'}, expected Groups"
        raise PlanError(message(text, fix="pass what make_groups or place gave"))
    for home in found:
        home.partition.check_open()
        if sorted(home.ranks) != sorted(found[0].ranks):
            lines = [found[0].describe(), home.describe()]
            fix = "save the leaves of each of them in a folder of its own"
            text = f"{verb}: leaves live on groups of different ranks"
            raise PlanError(message(text, lines, fix))
    return found[0]
