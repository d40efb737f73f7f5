"""The leaves of a tree of shards, and the checks of what may become or be used as one.

[Note: kinds of leaves] A tree of shards has four kinds of leaves. `Sharded` has one child, this
rank's piece, so maps, optimizers and `torch.func` see exactly what is trained, each element once.
`Fixed` (frozen parameters, integers), `Tied` (a tensor that occurred before) and `Nothing` (None)
have no children, so nothing differentiates, reduces, counts or updates them, and no code needs to
treat them as a special case. Their structure is the same on every rank, so tree specs compare
across ranks.
"""

import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from inspect import currentframe
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.errors import DonatedError, LeafError, LostStateError, message
from mics_fn.groups import any_aborted
from mics_fn.offload import Placed, is_coded
from mics_fn.shards.bucket import Bucket
from mics_fn.tree import Tree

V = TypeVar("V")  # a tree

# Texts of errors about it; see [Note: rows of ranks] in `shards.linear`.
LOCAL_BASIS = "jacfwd, hessian, and jacrev of shards take a basis of each rank's own pieces"
SHARED_BASIS = "use jacrev of full values, or vmap over directions that ranks share, cut by shard"
_GATHER = "gather(shards, groups) gives tensors, and shards.map(fn, shards) works on pieces"


class _Leaf:
    """A leaf of a tree of shards; torch says so where it is given one in the place of a tensor."""

    bucket: Any
    slot: int
    data: Any
    _donated: ClassVar[Any] = None  # who took its data, and its number there
    _reduction_groups: ClassVar[Any] = None  # see `mark_reduced`

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", func)
        text = f"torch: {name} is given a {cls.__name__} leaf, a piece of a tensor"
        raise LeafError(text, fix=_GATHER)

    @property
    def shape(self) -> tuple[int, ...]:
        """The full tensor's shape."""
        return tuple(self.data.shape) if self.bucket is None else self.bucket.shapes[self.slot]

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.data.dtype if self.bucket is None else self.bucket.dtype


def _reduced(self: Any) -> tuple:
    """What a copy or a pickle of a leaf with data is made of; the copy is in memory."""
    x = self.data
    x = x.clone() if isinstance(x, Placed) and not is_coded(x) else x
    return type(self), (x, self.bucket, self.slot)


@tree.node
@dataclass(frozen=True, eq=False, repr=False)
class Sharded(_Leaf):
    """One leaf of a tree of shards: this rank's piece of a tensor.

    Args:
      data: the piece, 1D and possibly empty, a view of the rank's chunk of the bucket. Under `vmap`
        it has shape (*batch, length).
      bucket: the bucket it belongs to; the same on every rank.
      slot: its number among the leaves of the bucket.
    """

    data: Tensor
    bucket: Bucket = tree.static()
    slot: int = tree.static()
    __reduce__ = _reduced

    def refuse_children(self) -> None:
        """Raise LeafError for shards of shards, which torch.func makes for a Jacobian of shards."""
        if self.bucket.parts == 1 or isinstance(self.data, Tensor):
            return
        if any(isinstance(x, Sharded) for x in tree.flatten(self.data, is_leaf)[0]):
            text = f"the Jacobian of shards of {self.shape} with respect to shards"
            raise LeafError(text, [LOCAL_BASIS], SHARED_BASIS)

    def __getattr__(self, name: str) -> Any:
        # Called only for an attribute that is missing, such as the data of a donated leaf.
        if name == "data" and is_lost(self):
            fix = "Trainer.reset takes it from a replica, or load a save: trainer.state = loaded"
            why = "a write that was cut short leaves values of two steps"
            raise LostStateError(self._story(), [why], fix)
        if name == "data" and is_donated(self):
            fix = "use the value that came back, or pass donate=False"
            raise DonatedError(self._story(), fix=fix)
        fix = _GATHER if hasattr(Tensor, name) else ""
        raise AttributeError(message(f"Sharded has no attribute {name!r}", fix=fix))

    def _story(self) -> str:
        (spec, root, to, _), number = self._donated
        path = tree.join(root, tree.spec_paths(spec)[number])
        if is_lost(self):
            return f"{path} is lost: {to} was cut short while it wrote it"
        return f"{path} was donated to {to}"

    def __repr__(self) -> str:
        if is_donated(self):
            return f"Sharded({self._story()})"
        here, full = self.data.shape[-1], self.bucket.numels[self.slot]
        return f"Sharded(shape={self.shape}, {dtype_name(self.dtype)}, here {here} of {full})"


@tree.atom
@dataclass(frozen=True, eq=False, repr=False)
class Fixed(_Leaf):
    """A leaf that is not trained: a frozen parameter (sharded) or a non-float one (replicated).

    Args:
      data: the piece, as in `Sharded`, or the whole tensor if `bucket` is None.
      bucket: the bucket it belongs to; None if the tensor is replicated on every rank.
      slot: its number among the leaves of the bucket.
    """

    data: Tensor
    bucket: Bucket | None = None
    slot: int = 0
    __reduce__ = _reduced

    def _structure(self) -> tuple:
        return self.bucket, self.slot, self.shape, self.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self._structure() == other._structure()

    def __hash__(self) -> int:
        return hash(self._structure())

    def __repr__(self) -> str:
        how = "replicated" if self.bucket is None else "frozen"
        return f"Fixed(shape={self.shape}, {dtype_name(self.dtype)}, {how})"


@tree.atom
@dataclass(frozen=True)
class Tied(_Leaf):
    """A leaf that is the same tensor as an earlier one of its tree.

    Args:
      bucket: the bucket of that leaf.
      slot: the number of that leaf in the bucket.
    """

    bucket: Bucket
    slot: int
    data: ClassVar[None] = None

    def __repr__(self) -> str:
        return f"Tied(shape={self.shape}, {dtype_name(self.dtype)})"


@tree.atom
@dataclass(frozen=True)
class Nothing(_Leaf):
    """Replaces None, which is a leaf of a tree to torch and makes `torch.func` raise."""

    bucket: ClassVar[None] = None
    slot: ClassVar[int] = 0
    data: ClassVar[None] = None


Leaf = Sharded | Fixed | Tied | Nothing
_KINDS = frozenset([Sharded, Fixed, Tied, Nothing])  # nothing derives from them


def is_leaf(value: Any) -> bool:
    """Whether a value is a leaf of a tree of shards."""
    return type(value) in _KINDS


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Writing:
    """A block that writes into the memory of given values, which nobody may use until it ends well.

    [Note: torn writes] From its first write to its last the memory of a state holds the values of
    two steps. Whatever ends the block in between, in any thread and at any instant, leaves its
    leaves without data: using them raises LostStateError. If it ends before the first write, they
    stay as they were; if it ends well, what was given away raises DonatedError from then on.
    `reclaimed` gives lost leaves their memory back, to be overwritten. A block inside of another
    one is a part of it.

    Example:
      >>> shards = shard([torch.ones(2)], make_groups(1))
      >>> try:
      ...     with Writing() as writing:
      ...         writing.covers(shards, "params", "a step")
      ...         note_write()
      ...         raise MemoryError
      ... except MemoryError:
      ...     print(shards[0])
      Sharded(params.0 is lost: a step was cut short while it wrote it)
    """

    def __init__(self) -> None:
        self.open = ExitStack()  # what is closed when the outermost block ends
        self.whole = self  # the outermost block
        self.begun = False
        self.memory: dict[int, Tensor] | None = {}  # of leaves without data, by their id
        self._parts: list[tuple[Sequence[Any], tuple]] = []

    def covers(self, shards: Tree, root: str, to: str) -> None:
        """Add a tree to what is lost if the block is cut short after its first write."""
        leaves, spec = tree.flatten(shards, is_leaf)
        part = leaves, (spec, root, to, self.whole)
        for block in {self, self.whole}:
            block._parts.append(part)

    def mark_donated(self, keep: Sequence[Any] = ()) -> None:
        """Take the data of what this block covers, but for the leaves that are kept."""
        self.whole.begun = True
        for leaves, story in self._parts:
            _mark_donated(leaves, story, keep)

    def __enter__(self) -> "Writing":
        outer, frame = _WRITING.get(), getattr(currentframe(), "f_back", None)
        self._frame = frame
        # One whose exit was cut short may still be there, but nothing that it is a part of runs.
        while outer is not None and frame is not outer._frame:
            frame = getattr(frame, "f_back", None)
            outer = outer if frame is not None else None
        if outer is not None:
            self.whole = outer
            return self
        try:
            _WRITING.set(self)
            return self
        except BaseException:
            _WRITING.set(None)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._frame = None
        if self.whole is not self:
            return
        try:
            _WRITING.set(None)
            self.open.close()
            if error is None:
                self.memory, self._parts = None, []
        finally:
            try:
                self._lose()
            finally:  # where that was cut short, too
                self._lose()
                self._parts = []

    def _lose(self) -> None:
        """Mark the covered values as lost, unless the block ended without an error."""
        if self.begun:
            self.mark_donated()


def lose_if_aborted(shards: Tree, to: str, device: torch.device, home: Any) -> None:
    """Let leaves be lost where collectives are aborted before a device has written them.

    See [Note: aborted collectives] in `_torch`.

    Args:
      shards: parameters, as a step has left them.
      to: what has written them.
      device: that has done so, an accelerator.
      home: the groups whose collectives they depend on; None if that is not known.
    """
    leaves, spec = tree.flatten(shards, is_leaf)
    refs = [weakref.ref(leaf) for leaf in leaves]

    def lose() -> None:
        _mark_donated([ref() for ref in refs], (spec, "params", to, Writing()), ())

    _torch.Queued(device, lose)
    if any_aborted() if home is None else home.partition.state.aborted:
        lose()


_WRITING: ContextVar[Writing | None] = ContextVar("writing", default=None)


def note_write() -> None:
    """Say that the memory of what the outermost block covers is written from here on."""
    writing = _WRITING.get()
    if writing is not None:
        writing.begun = True


def closed_after(blocks: Generator[Any]) -> Generator[Any]:
    """The same generator, which ends with the outermost block if it has not ended before."""
    writing = _WRITING.get()
    return blocks if writing is None else writing.open.enter_context(closing(blocks))


def donate(shards: Tree, root: str, to: str, *, keep: Tree = ()) -> None:
    """Mark every `Sharded` leaf of a tree as donated, so that reading its data raises DonatedError.

    Args:
      shards: the tree that was given.
      root: the beginning of its paths in the error.
      to: the verb that took it.
      keep: a tree whose leaves stay usable even if they are the same objects.
    """
    leaves, spec = tree.flatten(shards, is_leaf)
    _mark_donated(leaves, (spec, root, to, None), tree.flatten(keep, is_leaf)[0])


def _mark_donated(leaves: Sequence[Any], story: tuple, keep: Sequence[Any]) -> None:
    """Take the data of leaves; the story is their structure, root, taker and block."""
    kept = set(map(id, keep))
    memory = None if story[-1] is None else story[-1].memory
    # Leaves are frozen. A second new attribute, or asking for their `__dict__`, would make a dict
    # for each, and Python would have as many more objects to search for garbage.
    put, drop = object.__setattr__, object.__delattr__
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Sharded) or id(leaf) in kept:
            continue
        if memory is not None:
            if is_donated(leaf) and leaf._donated[0] is not story:
                continue
            if id(leaf) not in memory:
                memory[id(leaf)] = leaf.data
            elif is_donated(leaf) and "data" not in vars(leaf):
                continue
        put(leaf, "_donated", (story, i))  # paths are computed only for an error
        drop(leaf, "data")


def is_donated(leaf: Any) -> bool:
    """Whether a leaf was donated or lost, so that it has no data any more."""
    return leaf._donated is not None


def is_lost(leaf: Any) -> bool:
    """Whether a block that wrote a leaf was cut short; see [Note: torn writes]."""
    taken = getattr(leaf, "_donated", None)
    block = None if taken is None else taken[0][-1]
    return block is not None and block.memory is not None


def any_lost(value: Tree) -> bool:
    """Whether some leaf of a tree is lost."""
    return any(map(is_lost, tree.flatten(value, is_leaf)[0]))


def reclaimed(value: V) -> V:
    """A tree with new leaves where some are lost, in their memory, which is to be overwritten."""

    def back(leaf: Any) -> Any:
        if not is_lost(leaf):
            return leaf
        memory: Any = leaf._donated[0][-1].memory
        return Sharded(memory[id(leaf)], leaf.bucket, leaf.slot)

    return tree.map_leaves(back, value, is_leaf=is_leaf)


def mark_reduced(leaves: Iterable[Leaf], home: Any) -> None:
    """Note on the first trained leaf of gradients over which groups it was reduced, if on any."""
    for leaf in leaves if home is not None else ():
        if isinstance(leaf, Sharded):
            object.__setattr__(leaf, "_reduction_groups", home)
            break


def reduction_groups(leaves: Iterable[Any]) -> Any:
    """The groups that `mark_reduced` noted; None if there are none."""
    for leaf in leaves:
        if isinstance(leaf, Sharded):
            return leaf._reduction_groups
    return None


# Where a leaf lies: its kind, and its bucket, if it lies in one, with its slot.
LeafPlace = tuple[type, tuple[Bucket | None, int]]
_PLACE = attrgetter("bucket", "slot")


def places_of(leaves: Sequence[Leaf]) -> tuple[LeafPlace, ...]:
    """Where each leaf lies, whatever its data are."""
    return tuple(zip(map(type, leaves), map(_PLACE, leaves), strict=True))


def owner_index(places: Sequence[LeafPlace]) -> list[int]:
    """For each leaf the index of the leaf that holds its data: its own, unless it is `Tied`."""
    at: dict[Any, int] = {}
    found = []
    for i, (kind, place) in enumerate(places):
        if kind is not Tied:
            at[place] = i
        elif place not in at:
            text = f"{Tied(*place)!r} is tied to a leaf that is not in this tree"  # pyright: ignore
            raise LeafError(text, fix="keep tied leaves in one tree")
        found.append(at[place])
    return found


def names(shards: Tree) -> list[str]:
    """The path of each trained leaf, in the order of the tree's children."""
    pairs = zip(tree.paths(shards, "", is_leaf), tree.flatten(shards, is_leaf)[0], strict=True)
    return [path for path, leaf in pairs if not isinstance(leaf, Fixed | Tied | Nothing)]


def refuse_tracing() -> None:
    """Raise LeafError if torch is recording ops in order to repeat them later."""
    if _torch.is_tracing():
        text = (
            "gather: torch records this program (linearize, make_fx, export), but not what is sent"
        )
        raise LeafError(text, fix="use jvp or vjp; or gather outside, and pass on full tensors")


# Gradients of which some buckets can be used while others are still being reduced.


@dataclass(frozen=True, eq=False)
class GradStream:
    """Gradients whose buckets complete one by one, in an order that is known.

    Args:
      like: the tree of shards that they are gradients of.
      home: the groups that they are reduced over.
      order: for each bucket, in the order in which they complete, the numbers of its pieces among
        those of the tree; the same on every rank.
      here: whether the bucket with this number in the order is complete, on the device; nothing
        waits.
      take: waits for a bucket, and gives its pieces, one per number. What is placed elsewhere is
        fetched at each call, into memory of its own.
    """

    like: Tree
    home: Any
    order: Sequence[Sequence[int]]
    here: Callable[[int], bool]
    take: Callable[[int], list[Tensor]]

    def ready(self) -> Iterator[list[int]]:
        """Yield numbers of buckets to take: those that are complete, or else the next one."""
        remaining = list(range(len(self.order)))
        while remaining:
            here = [k for k in remaining if self.here(k)] or remaining[:1]
            remaining = [k for k in remaining if k not in here]
            yield here

    def part(self, own: Sequence[int]) -> "GradStream":
        """Select pieces by their numbers; these are numbered anew."""
        number = {n: i for i, n in enumerate(own)}
        buckets = [k for k, found in enumerate(self.order) if not number.keys().isdisjoint(found)]
        order = [[number[n] for n in self.order[k] if n in number] for k in buckets]

        def take(place: int) -> list[Tensor]:
            k = buckets[place]
            pairs = zip(self.order[k], self.take(k), strict=True)
            return [piece for n, piece in pairs if n in number]

        here = lambda place: self.here(buckets[place])  # noqa: E731
        return replace(self, order=order, here=here, take=take)


def grad_stream(grads: Any) -> GradStream | None:
    """Return gradients that may not all be complete, such as a `GradSum`, as a stream; else None.

    Args:
      grads: a `GradStream`; what has a method `__grad_stream__` that gives one; or a tree.
    """
    if isinstance(grads, GradStream):
        return grads
    make = getattr(grads, "__grad_stream__", None)
    return None if make is None else make()


# Which tensors share memory.


class MemoryPlace(NamedTuple):
    """Where a tensor lies in memory. Two tensors with equal places are the same tensor."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements

    @classmethod
    def of(cls, x: Tensor) -> "MemoryPlace":
        """The place of a strided tensor, which may be on meta."""
        where = int(x.storage_offset())
        return cls(_torch.storage_id(x), x.dtype, tuple(x.shape), x.stride(), where)

    @property
    def span(self) -> tuple[int, int]:
        """Where its bytes begin and end, counted from the start of the storage."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        width = self.dtype.itemsize
        return self.offset * width, (self.offset + last + 1) * width


def owners_of(leaves: Sequence[Tensor]) -> list[int]:
    """For each leaf the first one that is the same tensor: the same object or the same place."""
    first: dict[Any, int] = {}
    owners = []
    for i, leaf in enumerate(leaves):
        key: Any = id(leaf) if leaf.is_floating_point() else (i, "no ties between integers")
        if leaf.is_floating_point() and leaf.numel() and not leaf.is_meta:
            key = MemoryPlace.of(_torch.unwrapped(_torch.local_of(leaf)))
        owners.append(first.setdefault(key, i))
    return owners


def overlaps(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Groups of tensors, by their numbers, that reach into each other's stretch of memory.

    So do columns of a matrix, of which no byte is shared.

    Example:
      >>> x = torch.zeros(4, 2)
      >>> overlaps([x[:2], torch.ones(2), x[1, :1], x[2:]])
      [[0, 2]]
    """
    with_memory = [i for i, x in enumerate(tensors) if x.numel() and x.layout is torch.strided]
    places = {i: MemoryPlace.of(tensors[i]) for i in with_memory}
    groups, storage, end = list[list[int]](), None, 0
    for i in sorted(places, key=lambda i: (places[i].storage, places[i].span)):
        start, stop = places[i].span
        if places[i].storage == storage and start < end:
            groups[-1].append(i)
            end = max(end, stop)
        else:
            groups.append([i])
            storage, end = places[i].storage, stop
    return sorted(sorted(group) for group in groups if len(group) > 1)


def refuse_overlaps(verb: str, leaves: Mapping[str, Tensor], trained: Collection[str]) -> None:
    """Raise LeafError if trained leaves share memory with others without being the same tensor.

    An update of one would have to change the other, which is lost because shards have memory of
    their own.

    Args:
      verb: named in the error.
      leaves: the tensors, by path.
      trained: the paths of those that are trained.
    """
    first: dict[MemoryPlace, str] = {}
    for path, leaf in leaves.items():
        first.setdefault(MemoryPlace.of(leaf), path)
    paths = list(first.values())
    for group in overlaps([leaves[path] for path in paths]):
        found = [paths[i] for i in group]
        if set(found) & set(trained):
            text = f"{verb}: {' and '.join(found)} overlap in memory, and are not the same tensor"
            raise LeafError(text, fix="clone one of them, or take views of one tensor in forward")
