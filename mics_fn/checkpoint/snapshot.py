"""What a state holds, as named tensors on lines and as numbers, and what of it this rank writes.

[Note: other codes] A frozen leaf that is kept as codes is saved as these codes, so a state that
keeps the same codes gets them back exactly. A state that keeps the leaf as values, or as other
codes, can load it as well, and the other way round. What was saved is read into memory of its own
and decoded, and then it is rounded to what the state keeps, as `shard` does with full values. One
leaf after the other is converted, so this takes the memory of one piece.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mics_fn import _device, _torch, tree
from mics_fn.checkpoint import manifest
from mics_fn.collectives import Codec, checksum
from mics_fn.errors import LeafError, PlanError
from mics_fn.groups import Groups
from mics_fn.offload import Hold, in_file, is_coded, is_placed, read
from mics_fn.optim import TrainState, by_leaf
from mics_fn.shards import (
    Bucket,
    Nothing,
    Tied,
    check_finite,
    dtype_name,
    homes_of,
    is_leaf,
    pieces,
)
from mics_fn.tree import Tree

Replicas = Literal["equal", "apart"]


@dataclass(frozen=True, eq=False)
class LocalPiece:
    """What this rank has of a tensor.

    Args:
      data: 1D, elements `origin` to `origin + len(data)` of the flattened tensor.
      origin: where it begins.
    """

    data: Tensor
    origin: int = 0


@dataclass(frozen=True, eq=False)
class SavedLeaf:
    """A leaf on a line, as this rank holds it; see [Note: other codes] in `snapshot`.

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

    lines: list[manifest.Line] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    cut: list[manifest.SavedTensor] = field(default_factory=list)
    plain: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, LocalPiece] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    homes: list[Groups] = field(default_factory=list)  # of the lines, by number
    ties: dict[str, str] = field(default_factory=dict)
    leaves: list[SavedLeaf] = field(default_factory=list)

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

    def mine(self) -> dict[str, tuple[manifest.Slice, Tensor]]:
        """The slices of cut tensors that this rank writes, by name."""
        found: dict[str, tuple[manifest.Slice, Tensor]] = {}
        for tensor in self.cut:
            piece = self.held.get(tensor.name)
            part = manifest.within(tensor, self.lines[tensor.line], self.cells[tensor.line])
            if piece is not None and part is not None:
                low = part.start - piece.origin
                found[tensor.name] = part, piece.data[low : low + part.stop - part.start]
        return found


def on_bytes(
    plain: Mapping[str, Tensor], ranks: int, number: int, place: int
) -> tuple[manifest.Line, list[manifest.SavedTensor], dict[str, tuple[manifest.Slice, Tensor]]]:
    """Tensors that are equal on all ranks: their line, their places, and what this rank writes.

    Args:
      plain: the tensors by name.
      ranks: number of ranks that share the work.
      number: the number of the line.
      place: the number of this rank among them.
    """
    facts = [(name, x.dtype, tuple(x.shape)) for name, x in plain.items()]
    line, found = manifest.line_of_bytes(facts, ranks), {}
    stored = manifest.places_in_bytes(facts, number)
    for tensor in stored:
        part = manifest.within(tensor, line, place)
        if part is not None:
            flat = plain[tensor.name].detach().reshape(-1)
            found[tensor.name] = part, flat[part.start : part.stop]
    return line, stored, found


class CodedPart(NamedTuple):
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


def parts_of(name: str, data: Any, leaf: Any) -> list[CodedPart]:
    """What the piece of a leaf is saved as.

    Codes are saved as they are kept, under names that say which they are, so that no state takes
    them for codes of another kind. Their blocks do not depend on the ranks that hold them.
    """
    codec = codec_of(leaf)
    if codec is None:
        return [CodedPart(name, data, leaf.shape)]
    codes, scales = data.part_codes()
    first, second = names_of_codes(name, codec)
    blocks, nbytes = -(-leaf.bucket.numels[leaf.slot] // codec.block), data.codes.elements.shape[1]
    return [
        CodedPart(first, codes, (blocks * nbytes,), (nbytes, codec.block)),
        CodedPart(second, scales, (blocks,), (1, codec.block)),
    ]


def names_of_codes(name: str, codec: Codec, image: str = "") -> tuple[str, str]:
    """The names of the codes and the scales of a leaf; `image` tells of which replica."""
    return f"{name} as {codec}{image}", f"{name} as {codec}, scales{image}"


def codec_of(leaf: Any) -> Any:
    """The codes that a leaf of a bucket is kept as; None for values."""
    codec = leaf.bucket.codes
    return codec if codec is not None and is_coded(leaf.data) else None


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
            self.found.plain[name] = manifest.savable(
                self.verb, name, leaf.data if is_leaf(leaf) else leaf
            )
        elif isinstance(leaf, bool | int | float | str):
            self.found.values[name] = leaf
        else:
            fix = "keep shards, tensors, numbers and texts in a state; pass the rest as extra="
            raise LeafError(f"{self.verb}: {name} is {type(leaf).__name__}", fix=fix)

    def _cut(self, name: str, leaf: Any) -> None:
        bucket, home = leaf.bucket, self.homes.get(leaf.bucket, self.main)
        route, data = home.hierarchy.route, manifest.savable(self.verb, name, leaf.data)
        right = bucket.parts == route.size
        piece = pieces(bucket, route.chunk)[leaf.slot] if right else None
        if piece is None or data.shape != (piece.length,):
            text = f"{self.verb}: {name} is cut in {bucket.parts}, here {tuple(data.shape)}"
            fix = "pass the groups that the tree was sharded with"
            raise PlanError(f"{text}; its groups have {route.size} ranks", fix=fix)
        images = home.num_replicas if self.apart else 1
        image = home.replicas.rank if self.apart else 0
        parts = parts_of(name, data, leaf)
        for i in range(images):
            whose = f" of replica {i}" if i else ""
            for part in parts:
                number, length = self._line(bucket, home, part), part.of(bucket.numel)
                offset = i * length + part.of(bucket.offsets[leaf.slot])
                own = f"{part.name}{whose}"
                self.found.cut.append(
                    manifest.SavedTensor(own, part.data.dtype, part.shape, number, offset)
                )
                if i == image:
                    self.found.held[own] = LocalPiece(part.data, part.of(piece.origin))
            mine = data if i == image else None
            names = [f"{part.name}{whose}" for part in parts]
            held = SavedLeaf(name, whose, mine, piece.origin, leaf.shape, codec_of(leaf), names)
            self.found.leaves.append(held)

    def _line(self, bucket: Bucket, home: Groups, part: "CodedPart") -> int:
        """The number of the line that a bucket is; one of codes is a line for each of its parts."""
        key, length = (bucket, part.unit), part.of(bucket.numel)
        if key not in self._lines:
            self._lines[key] = len(self.found.lines)
            p, r, chunk = home.partition_size, home.num_replicas, home.hierarchy.route.chunk
            at, number = home.replicas.rank, self.found.homes.index(home)
            if self.apart:
                self.found.lines.append(manifest.Line(length * r, p * r, 1, number))
                self.found.cells.append(at * p + chunk)
            else:
                self.found.lines.append(manifest.Line(length, p, r, number))
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
    """Return the groups whose ranks save one checkpoint.

    Raises:
      PlanError: leaves live on groups of different ranks.
    """
    found = [groups] if isinstance(groups, Groups) else list(dict.fromkeys(homes.values()))
    for home in found:
        home.partition.check_open()
        if sorted(home.ranks) != sorted(found[0].ranks):
            fix = "save the leaves of each of them in a folder of its own"
            text = f"{verb}: leaves live on groups of different ranks"
            raise PlanError(text, [found[0].describe(), home.describe()], fix)
    return found[0]


# Leaves that are kept in another form than they were saved in: as values, or as other codes.

_CODES = re.compile(r"(.*) as (\w+\[\d+\])( of replica \d+)?", re.DOTALL | re.ASCII)


class Conversion(NamedTuple):
    """What is read of a leaf that was saved in another form, and how it gets its own.

    Args:
      held: the leaf as this rank holds it.
      saved: what it was saved as: its values, or its codes and their scales.
      codec: of these codes; None for values.
    """

    held: SavedLeaf
    saved: list[manifest.SavedTensor]
    codec: Codec | None

    def memory(self) -> list[tuple[str, Tensor, int]]:
        """New tensors to read into: each with its name, and the element that it begins with."""
        data: Any = self.held.data
        first, end = self.held.origin, self.held.origin + data.numel()
        if self.codec is None:
            return [
                (self.saved[0].name, torch.empty(end - first, dtype=self.saved[0].dtype), first)
            ]
        block: Any = self.codec.block
        low, numel = first // block, (-(-end // block) - first // block) * block
        row = torch.empty(self.codec.nbytes(numel), dtype=torch.uint8)
        codes, scales = self.codec.blocks(row, numel)
        places = (low * codes.shape[1], low)
        parts = zip(self.saved, (codes, scales), places, strict=True)
        return [(stored.name, part.view(-1), place) for stored, part, place in parts]

    def put(self, found: list[Tensor]) -> None:
        """Write what was read, in the order of `memory`, in the form that the leaf has here.

        Raises:
          LeafError: a value is not finite, and codes cannot hold it.
        """
        data: Any = self.held.data
        values = found[0]
        if self.codec is not None:
            block: Any = self.codec.block
            codes, scales = found[0].view(len(found[1]), -1), found[1].view(-1, 1)
            out = torch.empty(len(scales), block)
            self.codec.decode_blocks(codes, scales, out)
            values = out.view(-1)[self.held.origin % block :][: data.numel()]
        if self.held.codec is not None:
            values = values.float()
            check_finite(f"load: {self.held.name}", self.held.codec, values)
            data.write(0, values.to(data.device))
        elif is_placed(data):
            data.fill(0, values.to(data.dtype))
        else:
            data.copy_(values)


def as_saved(
    target: Contents, saved: Mapping[str, manifest.SavedTensor]
) -> tuple[Contents, list[Conversion]]:
    """The contents of a state in the form in which they were saved, and what has to be converted.

    Args:
      target: the contents of the state that is loaded into.
      saved: what the checkpoint holds, by name.
    """
    codecs, found, gone = _codecs_in(saved), list[Conversion](), set[str]()
    for held in target.leaves:
        name = f"{held.name}{held.image}"
        codec = codecs.get(name)
        # What is not there in any form is left to the check that names it.
        if all(part in saved for part in held.parts) or (codec is None and name not in saved):
            continue
        if codec is None and held.codec is None:
            continue
        gone.update(held.parts)
        found.append(Conversion(held, _stored(held, codec, saved), codec))
    cut = [x for x in target.cut if x.name not in gone]
    cut += [stored for each in found for stored in each.saved]
    pieces = {name: piece for name, piece in target.held.items() if name not in gone}
    own = [each for each in found if each.held.data is not None and each.held.data.numel()]
    return replace(target, cut=cut, held=pieces), own


def _stored(
    held: SavedLeaf, codec: Codec | None, saved: Mapping[str, manifest.SavedTensor]
) -> list[manifest.SavedTensor]:
    """What a leaf of this shape is saved as; whether that is what was saved is checked later."""
    if codec is None:
        name = f"{held.name}{held.image}"
        dtype = saved[name].dtype
        return [
            manifest.SavedTensor(
                name, dtype if dtype.is_floating_point else torch.float32, held.shape
            )
        ]
    block: Any = codec.block
    numel = manifest.SavedTensor(held.name, torch.float32, held.shape).numel
    blocks = -(-numel // block)
    row = torch.empty(codec.nbytes(block), dtype=torch.uint8, device="meta")
    nbytes = codec.blocks(row, block)[0].shape[1]
    first, second = names_of_codes(held.name, codec, held.image)
    shapes = (first, torch.uint8, (blocks * nbytes,)), (second, torch.bfloat16, (blocks,))
    return [manifest.SavedTensor(*each) for each in shapes]


def _codecs_in(saved: Iterable[str]) -> dict[str, Codec]:
    """The codecs of the leaves that were saved as codes, by their names."""
    found = {}
    for name in saved:
        parts = _CODES.fullmatch(name)
        if parts:
            try:
                found[f"{parts[1]}{parts[3] or ''}"] = Codec.parse(parts[2])
            except PlanError:  # of a later version: its codes are named as not expected
                continue
    return found


# Copies of what a save writes, in host memory that is used again by the next one.

_ALIGN = 64  # bytes; of a copy, for vector loads


class SnapshotMemory:
    """Host memory of this process for copies, whichever folder they go to.

    A save takes one piece and gives it back when it has ended; so there are as many pieces as saves
    were under way at the same time, which is one for each folder at most.
    """

    def __init__(self) -> None:
        self.free: list[tuple[str, Tensor]] = []  # the kind of device that copies to it, and it
        self._turn = threading.Lock()

    def lend(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory of at least so many bytes, which a device can copy to."""
        with self._turn:
            mine = [i for i, (kind, _) in enumerate(self.free) if kind == device.type]
            if mine:  # the largest; if that is too small, it goes for a larger one
                largest = max(mine, key=lambda i: len(self.free[i][1]))
                _, memory = self.free.pop(largest)
                if len(memory) >= nbytes:
                    return memory
                del memory
        # A little more, since lengths in JSON may grow from one save to the next.
        return _device.host_buffer(nbytes + 4096, device)

    def give_back(self, memory: Tensor, device: torch.device) -> None:
        """Let other saves use it."""
        with self._turn:
            self.free.append((device.type, memory))


MEMORY = SnapshotMemory()


class Snapshot:
    """The copies of one save, or the tensors themselves where they can be read as they are."""

    def on_host(self, tensors: Mapping[str, Tensor]) -> Any:
        """A block that has these tensors on the host: themselves if they are there already."""
        if all(x.is_cpu or in_file(x) for x in tensors.values()):
            dense = {name: _dense(x) for name, x in tensors.items()}
            return _given(lambda: dense)
        return self.copied(tensors)

    def copied(self, tensors: Mapping[str, Tensor]) -> Any:
        """Copy tensors; the result is a block that has the copies.

        What lies in files is not copied but held, so that steps meanwhile write to other parts, and
        the block has it as it was; see [Note: held parts] in `offload.placed`.

        On an accelerator the copies are queued on the current stream, in front of whatever changes
        the tensors next, and the block waits for them, not the caller.
        """
        far: dict[str, Any] = {name: x for name, x in tensors.items() if in_file(x)}
        hold, near = Hold(far.values()), {k: x for k, x in tensors.items() if k not in far}
        devices = {x.device for x in near.values() if _device.is_async(x.device)}
        places, sources, end = dict[str, int](), list[tuple[int, Tensor]](), 0
        for names in _runs(near):
            sources.append((end, _as_one([near[name].detach() for name in names])))
            for name in names:
                places[name] = end
                end += near[name].numel() * near[name].itemsize
            end = -(-end // _ALIGN) * _ALIGN
        device = next(iter(devices), torch.device("cpu"))
        memory = MEMORY.lend(end, device)
        if sources:
            copies = [_view(memory, place, x.dtype, x.shape) for place, x in sources]
            pinned = bool(devices) and memory.is_pinned()
            with torch.no_grad():
                _torch.foreach_copy(copies, [x for _, x in sources], non_blocking=pinned)
        events = [_device.record(device) for device in devices]
        facts = {name: (places[name], x.dtype, x.shape) for name, x in near.items()}
        order = list(tensors)

        def made() -> dict[str, Tensor]:  # in the block, for which nobody waits
            return {k: far[k].mapped() if k in far else _view(memory, *facts[k]) for k in order}

        return _given(made, events, hold, lambda: MEMORY.give_back(memory, device))


@contextmanager
def _given(
    make: Callable[[], dict[str, Tensor]],
    events: Any = (),
    hold: Hold | None = None,
    end: Callable[[], None] | None = None,
) -> Iterator[dict[str, Tensor]]:
    try:
        for event in events:
            event.synchronize()
        yield make()
    finally:
        if hold is not None:
            hold.release()
        if end is not None:
            end()


def _runs(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of tensors, together where these lie one after the other in memory, as in a bucket.

    Each copy ends with a wait for the slowest thread, or has a launch of its own; so one copy of
    a bucket takes less time than one for each of its leaves.
    """
    runs, flat = list[list[str]](), list[tuple[int, str]]()
    for name, x in tensors.items():
        if is_placed(x) or x.is_neg() or x.is_conj() or not x.is_contiguous():
            runs.append([name])
        else:
            flat.append((x.data_ptr(), name))
    before, end = None, -1
    for start, name in sorted(flat):
        kind = _torch.storage_id(tensors[name]), tensors[name].dtype
        if (start, kind) == (end, before):
            runs[-1].append(name)
        else:
            runs.append([name])
        before, end = kind, start + tensors[name].numel() * tensors[name].itemsize
    return runs


def _as_one(parts: Sequence[Tensor]) -> Tensor:
    """The tensors of a run as one."""
    numel = sum(map(Tensor.numel, parts))
    return parts[0] if len(parts) == 1 else parts[0].as_strided((numel,), (1,))


def _view(memory: Tensor, place: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """A tensor that lies in bytes."""
    return memory[place : place + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _dense(x: Any) -> Tensor:
    return x.mapped() if in_file(x) else read(x).detach().resolve_conj().resolve_neg().contiguous()
