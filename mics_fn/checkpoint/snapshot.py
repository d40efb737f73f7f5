"""What a state holds, as named tensors and numbers; which slices this rank writes, and copies."""

import heapq
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.checkpoint import manifest
from mics_fn.collectives import Codec
from mics_fn.errors import LeafError, PlanError
from mics_fn.groups import Groups
from mics_fn.offload import ReadLock, in_file, is_coded, read
from mics_fn.optim import TrainState, by_leaf
from mics_fn.shards import Bucket, Nothing, Tied, dtype_name, homes_of, is_leaf, pieces
from mics_fn.tree import Tree

OnHost = AbstractContextManager[dict[manifest.Slice, Tensor]]  # a block that has what is written


class LocalPiece(NamedTuple):
    """What this rank has of a tensor.

    Args:
      data: elements `origin` to `origin + data.numel()` of the flattened tensor.
      origin: where it begins.
      shape: of the tensor, in full.
      home: the groups in which it is cut; None if every rank has all of it.
      copy: which of its copies this is, where replicas have values of their own.
      copies: how many there are.
    """

    data: Tensor
    origin: int
    shape: tuple[int, ...]
    home: Groups | None = None
    copy: int = 0
    copies: int = 1


@dataclass(frozen=True, eq=False)
class Contents:
    """A state as a checkpoint has it.

    Args:
      home: the groups whose ranks save it.
      pieces: of the tensors that are cut, and those that this rank has in full, by name.
      values: numbers and texts, by name.
    """

    home: Groups
    pieces: dict[str, LocalPiece] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> dict[str, manifest.SavedTensor]:
        """All tensors that ranks save together."""
        return {
            name: manifest.SavedTensor(dtype_name(x.data.dtype), x.shape, x.copies)
            for name, x in self.pieces.items()
        }

    def equal(self) -> list[str]:
        """The names of all that is equal on all ranks."""
        return [*self.values, *(name for name, x in self.pieces.items() if x.home is None)]


def written_here(contents: Contents, extras: Mapping[str, Tensor]) -> dict[manifest.Slice, Tensor]:
    """The slices that this rank writes; of ranks that hold the same, each writes a part.

    The next slice is of whoever has fewest bytes so far. As all of these ranks hold the same, each
    knows that without a message.

    Args:
      contents: of the state.
      extras: other tensors that this rank alone saves.
    """
    main, pieces = contents.home, dict(contents.pieces)
    for name, x in extras.items():
        raw = _dense(x).as_strided((x.numel(),), (1,)).view(torch.uint8)
        pieces[name] = LocalPiece(raw, 0, (), copy=main.position, copies=main.world_size)
    heaps: dict[Any, list[tuple[int, int]]] = {}
    found: dict[manifest.Slice, Tensor] = {}
    for name, piece in pieces.items():
        me, ranks = 0, 1
        if piece.copies == 1 and piece.home is None:
            me, ranks = main.position, main.world_size
        elif piece.copies == 1 and piece.home is not None:
            me, ranks = piece.home.replicas.rank, piece.home.num_replicas
        heap = heaps.setdefault((piece.home, ranks), [(0, i) for i in range(ranks)])
        data = piece.data if piece.data.dim() == 1 else piece.data.reshape(-1)
        at_once = manifest.SLICE_BYTES // data.dtype.itemsize
        for start in range(0, len(data), at_once):
            part = data[start : start + at_once]
            load, writer = heap[0]
            heapq.heapreplace(heap, (load + len(part) * data.dtype.itemsize, writer))
            if writer == me:
                low = piece.origin + start
                found[manifest.Slice(name, piece.copy, low, low + len(part))] = part
    return found


def contents_of(
    verb: str, state: Tree, groups: Any, home: Groups, replicas: manifest.Replicas
) -> Contents:
    """What a state holds; `home` is its `main_home`.

    Raises:
      LeafError: a leaf is neither a shard nor a dense tensor, a number or a text.
      PlanError: shards were made for other groups.
    """
    homes, found, plain = homes_by_bucket(verb, state, groups), Contents(home), by_leaf(state)
    tree.refuse_equal_paths(verb, plain, "", is_leaf)
    leaves = tree.flatten(plain, is_leaf)[0]
    for name, leaf in zip(tree.paths(plain, "", is_leaf), leaves, strict=True):
        if isinstance(leaf, Nothing | Tied):
            continue
        if is_leaf(leaf) and leaf.bucket is not None:
            own = homes.get(leaf.bucket, home)
            copy = (own.replicas.rank, own.num_replicas) if replicas == "independent" else (0, 1)
            found.pieces.update(_pieces_of(verb, name, leaf, own, copy))
        elif isinstance(leaf, Tensor) or is_leaf(leaf):
            x = manifest.savable(verb, name, leaf.data if is_leaf(leaf) else leaf)
            found.pieces[name] = LocalPiece(x, 0, tuple(x.shape))
        elif isinstance(leaf, bool | int | float | str):
            found.values[name] = leaf
        else:
            fix = "keep shards, tensors, numbers and texts in a state; pass the rest as extra="
            raise LeafError(f"{verb}: {name} is {type(leaf).__name__}", fix=fix)
    return found


def _pieces_of(
    verb: str, name: str, leaf: Any, home: Groups, copy: tuple[int, int]
) -> dict[str, LocalPiece]:
    """What this rank has of a shard, by the names under which it is saved.

    Codes are saved as they are kept, under names that say which they are, so that no state takes
    them for codes of another kind. Their blocks do not depend on the ranks that hold them.
    """
    bucket, route = leaf.bucket, home.hierarchy.route
    data = manifest.savable(verb, name, leaf.data)
    right = bucket.parts == route.size
    piece = pieces(bucket, route.chunk)[leaf.slot] if right else None
    if piece is None or data.shape != (piece.length,):
        text = f"{verb}: {name} is cut in {bucket.parts}, here {tuple(data.shape)}"
        fix = "pass the groups that the tree was sharded with"
        raise PlanError(f"{text}; its groups have {route.size} ranks", fix=fix)
    codec: Codec | None = bucket.codes
    if codec is None or not is_coded(leaf.data):
        return {name: LocalPiece(data, piece.origin, leaf.shape, home, *copy)}
    kept: Any = data
    codes, scales = kept.part_codes()
    nbytes, block = kept.codes.elements.shape[1], codec.block
    first, blocks = piece.origin // block, -(-bucket.numels[leaf.slot] // block)
    return {
        f"{name} as {codec}": LocalPiece(codes, first * nbytes, (blocks * nbytes,), home, *copy),
        f"{name} as {codec}, scales": LocalPiece(scales, first, (blocks,), home, *copy),
    }


def homes_by_bucket(verb: str, state: Tree, groups: Any) -> dict[Bucket, Groups]:
    """The groups of each bucket of a state; those of its parameters if it is a `TrainState`."""
    if isinstance(groups, Groups):
        return {}
    nodes = tree.flatten(state, lambda x: isinstance(x, TrainState))[0]
    states = [x for x in nodes if isinstance(x, TrainState)]
    params = states[0].params if states else state
    leaves = tree.flatten(params, is_leaf)[0]
    pairs = zip(leaves, homes_of(verb, groups, params), strict=True)
    return {leaf.bucket: home for leaf, home in pairs if getattr(leaf, "bucket", None)}


def main_home(verb: str, state: Tree, groups: Any) -> Groups:
    """Return the groups whose ranks save one checkpoint.

    Raises:
      PlanError: leaves live on groups of different ranks.
    """
    found = [*dict.fromkeys(homes_by_bucket(verb, state, groups).values())] or [groups]
    for home in found:
        home.partition.check_open()
        if sorted(home.ranks) != sorted(found[0].ranks):
            fix = "save the leaves of each of them in a folder of its own"
            text = f"{verb}: leaves live on groups of different ranks"
            raise PlanError(text, [found[0].describe(), home.describe()], fix)
    return found[0]


# Copies of what a save writes, in host memory that is used again by the next one.

_ALIGN = 64  # bytes; of a copy, for vector loads


# Host memory of this process that no save uses, by the kind of device that copies to it. A save
# takes it and gives it back when it has ended. Of several pieces, as saves to several folders may
# be under way at the same time, the largest is kept for each kind of device.
FREE: dict[str, Tensor] = {}


def on_host(tensors: Mapping[Any, Tensor]) -> AbstractContextManager[dict[Any, Tensor]]:
    """A block that has these tensors on the host: themselves if they are there already."""
    if all(x.is_cpu or in_file(x) for x in tensors.values()):
        return nullcontext({name: _dense(x) for name, x in tensors.items()})
    return copied(tensors)


def copied(tensors: Mapping[Any, Tensor]) -> AbstractContextManager[dict[Any, Tensor]]:
    """Copy tensors; the result is a block that has the copies.

    What lies in files is not copied but held, so that steps meanwhile write to other parts, and
    the block has it as it was; see [Note: locked parts] in `offload.placed`.

    On an accelerator the copies are queued on the current stream, in front of whatever changes
    the tensors next, and the block waits for them, not the caller.
    """
    in_files: dict[Any, Any] = {name: x for name, x in tensors.items() if in_file(x)}
    lock = ReadLock(in_files.values())
    near = {k: x for k, x in tensors.items() if k not in in_files}
    devices = {x.device for x in near.values() if _torch.is_async(x.device)}
    sizes = [-(-x.nbytes // _ALIGN) * _ALIGN for x in near.values()]
    device = next(iter(devices), torch.device("cpu"))
    memory = FREE.pop(device.type, None)
    if memory is None or len(memory) < sum(sizes):
        memory = None  # if it is too small, it goes before a larger one is made
        memory = _torch.host_buffer(sum(sizes), device)
    parts = memory[: sum(sizes)].split(sizes)
    copies = {
        name: part[: x.nbytes].view(x.dtype).view(x.shape)
        for (name, x), part in zip(near.items(), parts, strict=True)
    }
    if near:
        pinned = bool(devices) and memory.is_pinned()
        with torch.no_grad():
            _torch.foreach_copy(list(copies.values()), list(near.values()), non_blocking=pinned)
    events = [_torch.record(device) for device in devices]
    order = list(tensors)

    @contextmanager
    def block() -> Iterator[dict[Any, Tensor]]:
        try:
            for event in events:
                event.synchronize()
            yield {k: in_files[k].mapped() if k in in_files else copies[k] for k in order}
        finally:
            lock.release()
            if len(memory) > len(FREE.get(device.type, ())):
                FREE[device.type] = memory

    return block()


def _dense(x: Any) -> Tensor:
    if _torch.is_wrapper(x):  # it lies in a file, or as codes
        return x.mapped() if in_file(x) else read(x)
    return x.detach().resolve_conj().resolve_neg().contiguous()
