"""A tree of shards kept as a few long tensors, one per run; see [Note: runs] in `flat`.

[Note: runs] The leaves of `tree.flatten` on a tree of shards are this rank's pieces, and the pieces
of a bucket are views of one chunk. An elementwise function may as well take them as one tensor: the
numbers are the same, and the work does not grow with the number of leaves. A tree may hold only
some leaves of a bucket, as the two parts of a model with two optimizers do. What lies between and
around them belongs to somebody else, so a run ends where a leaf is missing: between its pieces lies
nothing but padding, which is computed with and never looked at. A leaf that lies whole on one rank
is a run of its own.

Which leaves a run has does not depend on the rank, so that structures compare across ranks; where
its pieces begin does.

[Note: coded moments] With `state=int8[256]` in the precision of shards, moments of large leaves are
kept as codes. A step decodes a part of a column, lets the optimizer write to it, and codes what it
has written; see `columns`. Leaves begin on borders of blocks and so do chunks, so that no block
has elements of two leaves or two ranks: codes, and with them all numbers, do not depend on how many
ranks share a tensor. Second moments are kept by their roots; see [Note: roots] in `offload.placed`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from mics_fn import _torch, shards, tree
from mics_fn.errors import LeafError, PlanError
from mics_fn.offload import FileTensor, coded, in_file, is_coded, is_placed, placed_like
from mics_fn.shards import Bucket, GradStream, Nothing, Sharded, Tied, is_leaf
from mics_fn.tree import Tree

# Where the pieces of a tree of shards lie in the memory of their buckets.

V = TypeVar("V")
Place = tuple[Bucket, int]  # bucket and slot of a piece
Ints = tuple[int, ...]


@dataclass(frozen=True)
class FlatRun:
    """Leaves of one bucket, in its order, between which nothing but padding lies.

    Args:
      bucket: the run as the only leaf of a bucket.
      members: the leaves' numbers among the pieces of the tree.
      index: the numbers of those that have elements on this rank.
      starts, lengths: where these lie in the run, in elements.
      gaps, sizes: how much padding lies before the piece of each member, and how long that is.
      numel: elements on this rank, gaps included.
      complete: whether the tree holds every element of the bucket.
    """

    bucket: Bucket
    members: Ints
    index: Ints
    starts: Ints
    lengths: Ints
    gaps: Ints
    sizes: Ints
    numel: int
    complete: bool


def split(run: FlatRun, whole: Tensor) -> list[Tensor]:
    """The pieces of a run, one per member, as views of (*batch, run.numel)."""
    if not any(run.gaps):
        return list(whole.split_with_sizes(run.sizes, -1))
    sizes = list(chain.from_iterable(zip(run.gaps, run.sizes, strict=True)))
    return list(whole.split_with_sizes(sizes, -1)[1::2])


def joined(run: FlatRun, pieces: Sequence[Tensor]) -> Tensor:
    """A copy of the pieces of a run, one per member, as one tensor; differentiable."""
    blank, parts = pieces[0].new_zeros((*pieces[0].shape[:-1], max(run.gaps))), []
    for gap, piece in zip(run.gaps, pieces, strict=True):
        parts += [blank[..., :gap], piece] if gap else [piece]
    return torch.cat(parts, -1)


def whole_run(run: FlatRun, pieces: Sequence[Any]) -> Tensor | None:
    """The pieces of a run as one tensor without a copy; None where they do not lie like that.

    Args:
      run: which pieces, and how they lie in their bucket.
      pieces: all of the tree.
    """
    mine = list(map(pieces.__getitem__, run.index))
    if not mine or tuple(map(Tensor.numel, mine)) != run.lengths:
        return None
    first, in_files = mine[0], FileTensor in map(type, mine)
    if in_files:
        if not all(map(in_file, mine)) or any(x.extent is not first.extent for x in mine):
            return None
        found = [x.start for x in mine]
    elif _torch.has_no_data(first):
        return None
    else:
        found = list(map(Tensor.data_ptr, mine))
    size = first.dtype.itemsize
    if found != [found[0] + start * size for start in run.starts]:
        return None  # as gradients in groups of one rank
    if not set(map(Tensor.dim, mine)) <= {1} or len(set(map(_DTYPE, mine))) > 1:
        return None
    if in_files:
        return first.part(0, torch.empty(run.numel, dtype=first.dtype, device="meta"))
    if not all_dense(mine):
        return None
    # Addresses in one stretch within the first piece's storage are of that storage.
    first, begin = first.detach(), int(first.storage_offset())
    if first.untyped_storage().nbytes() < (begin + run.numel) * size:
        return None
    return first if len(mine) == 1 else first.as_strided((run.numel,), (1,), begin)


@lru_cache(maxsize=64)
def runs_of(buckets: tuple[Bucket, ...], slots: Ints, lengths: Ints) -> tuple[FlatRun, ...]:
    """The runs of pieces of these lengths; of leaves that occur again, others than the first."""
    seen: Counter[tuple] = Counter()
    by_bucket: dict[tuple, dict[int, int]] = {}
    for i, (bucket, slot) in enumerate(zip(buckets, slots, strict=True)):
        by_bucket.setdefault((bucket, seen[bucket, slot]), {})[slot] = i
        seen[bucket, slot] += 1
    found = []
    for (bucket, _), by_slot in by_bucket.items():
        near: list[int] = []
        for slot in sorted(by_slot):
            if near and (bucket.whole or any(bucket.numels[near[-1] + 1 : slot])):
                found.append(_run(bucket, near, by_slot, lengths))
                near = []
            near.append(slot)
        found.append(_run(bucket, near, by_slot, lengths))
    return tuple(found)


def _run(
    bucket: Bucket, slots: Sequence[int], by_slot: dict[int, int], lengths: Sequence[int]
) -> FlatRun:
    numels, offsets = bucket.numels, bucket.offsets
    index, starts, gaps, end, before = [], [], [], 0, None
    for slot in slots:
        i, gap = by_slot[slot], 0
        if lengths[i]:
            gap = 0 if before is None else offsets[slot] - offsets[before] - numels[before]
            index.append(i)
            starts.append(end + gap)
            end, before = end + gap + lengths[i], slot
        gaps.append(gap)
    full = [slot for slot in slots if numels[slot]] or slots[:1]
    start, stop = offsets[full[0]], offsets[full[-1]] + numels[full[-1]]
    own = replace(bucket, shapes=((stop - start,),), offsets=(start,))
    members = tuple(by_slot[slot] for slot in slots)
    complete = sum(numels[slot] for slot in slots) == sum(numels)
    here = tuple(index), tuple(starts), tuple([lengths[i] for i in index])
    sizes = tuple([lengths[i] for i in members])
    return FlatRun(own, members, *here, tuple(gaps), sizes, end, complete)


# The next loops over leaves inside the interpreter: a step has nothing else to do for each.


def any_requires_grad(tensors: Sequence[Tensor]) -> bool:
    return any(map(_REQUIRES, tensors))


def all_dense(tensors: Sequence[Tensor]) -> bool:
    return all(map(Tensor.is_contiguous, tensors)) and not any(map(Tensor.is_neg, tensors))


def copied(run: FlatRun, x: Tensor) -> Tensor:
    """A dense copy of a part of a run; in a chunk of its own where it lay in one."""
    if is_placed(x):
        return x.copied()  # pyright: ignore[reportAttributeAccessIssue]
    return by_chunk(run, x, lambda x: x.detach().clone(memory_format=torch.contiguous_format))


def by_chunk(run: FlatRun, x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """What `fn` gives for a part of a run; for all of its chunk if it has one of its own."""
    if not is_in_chunk(run, x):
        return fn(x)
    chunk = x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    new = fn(chunk)
    return x if new is chunk else new.narrow(0, int(x.storage_offset()), x.numel())


def is_in_chunk(run: FlatRun, x: Tensor) -> bool:
    """Whether a part is all that a chunk holds, and its memory is of the chunk's size."""
    if is_placed(x) or not run.complete or not x.numel() == run.numel > 0:
        return False
    return all_dense([x]) and x.untyped_storage().nbytes() == run.bucket.chunk * x.itemsize


# What is done with each new moment before the next is made, from a layout, a run and its moment:
# one of a state that lies elsewhere goes to its place.
TAKING: ContextVar[Any] = ContextVar("taking", default=None)

# What torch's optimizers keep, by name: means, and what goes into an update by its root.
_MEANS = ("mean", "exp_avg", "momentum_buffer", "grad_avg")
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta")


def made(layout: Any, r: int, moment: Tensor, name: str) -> Tensor:
    """A moment of this name that was just made for a run of a layout, as codes and in its place.

    Raises:
      PlanError: `state=` of a precision asks for codes, and there are none for this moment.
    """
    run, taking = layout.runs[r], TAKING.get()
    bucket = run.bucket
    if bucket.state is not None:
        text = f"init_state: state={bucket.state} of a precision"
        if name not in (*_MEANS, *_SQUARES):
            fix = "use adamw, adam, sgd or lion; or shard without state="
            raise PlanError(f"{text}: there are no codes for {name!r}", fix=fix)
        if moment.ndim > 1 or _torch.inside_torch_func():
            fix = "shard without state= where derivatives or vmap are wanted"
            raise PlanError(f"{text}: codes have no derivative", fix=fix)
        moment = coded(moment, bucket.state, name in _SQUARES, f"{bucket.names}, {name}")
    return moment if taking is None else taking(layout, run, moment)


def check_coded(params: Tree, opt: Any) -> None:
    """Raise PlanError if moments are to be kept as codes, and an optimizer keeps its own."""
    codecs = [x.bucket.state for x in unpacked(params).trained if x.bucket.state is not None]
    if not codecs:
        return
    for path, x in zip(tree.paths(opt, "opt", is_leaf), tree.flatten(opt, is_leaf)[0], strict=True):
        coded = not isinstance(x, Sharded) or x.bucket.state is not None
        data = x.data if isinstance(x, Sharded) else x
        if coded and isinstance(data, Tensor) and data.ndim and not is_coded(data):
            text = f"init_state: {path} is not kept as the codes that precision= asks for"
            fix = "use an optimizer of this package or of torch; or shard without state="
            raise PlanError(text, [f"state={codecs[0]}"], fix)


@dataclass(frozen=True)
class FlatLayout:
    """The structure of a tree of shards, and its runs on this rank.

    Args:
      spec: its structure down to leaves.
      leaves: what stands at each leaf: the place of a piece, `Tied`, or `Nothing` for what is not
        trained.
      runs: this rank's, so they are not compared.
    """

    spec: Any
    leaves: tuple[Place | Tied | Nothing, ...]
    runs: tuple[FlatRun, ...] = field(compare=False)


@tree.node
@dataclass(frozen=True, eq=False)
class FlatShards:
    """A tree of shards kept as one long shard per run: what optimizers keep for each parameter.

    Args:
      runs: one `Sharded` per run.
      layout: the tree that they stand for.

    Example:
      >>> groups = make_groups(1)
      >>> params = shard({"b": torch.ones(4), "w": torch.ones(2, 2)}, groups)
      >>> mean = init_state(params, optim.lion(0.1)).opt.moments["exp_avg"]
      >>> mean.runs
      [Sharded(shape=(8,), float32, here 8 of 8)]
      >>> mean["w"]
      Sharded(shape=(2, 2), float32, here 4 of 4)
    """

    runs: list[Sharded]
    layout: FlatLayout = tree.static()

    def by_leaf(self) -> Tree:
        """The tree itself: its pieces are views of the long tensors."""
        kept: dict[int, Tensor] = {}
        for run, x in zip(self.layout.runs, self.runs, strict=True):
            if not isinstance(x, Sharded):
                text = "by_leaf: these are the runs of a tree in full, no longer shards"
                fix = "take the leaves first: unshard(moment.by_leaf(), groups)"
                raise LeafError(text, fix=fix)
            kept.update(zip(run.members, split(run, x.data), strict=True))
        pieces, leaves = iter([kept[i] for i in range(len(kept))]), []
        for x in self.layout.leaves:
            leaves.append(Sharded(next(pieces), *x) if isinstance(x, tuple) else x)
        return self.layout.spec.unflatten(leaves)

    def replaced(self, before: Tree, after: Tree) -> "FlatShards":
        """With leaves of `after` where they are not those of `before`, which is `by_leaf()`.

        Memory: a copy of the runs that have such a leaf; the others are the same objects.
        """
        old, new, runs = unpacked(before), unpacked(after), list(self.runs)
        same = [a is b for a, b in zip(old.trained, new.trained, strict=True)]
        for r, run in enumerate(self.layout.runs):
            if not all(same[i] for i in run.members):
                whole = joined(run, [new.pieces[i] for i in run.members])
                (whole,) = placed_like([whole], [runs[r].data])
                runs[r] = Sharded(whole, run.bucket, 0)
        return FlatShards(runs, self.layout)

    def __getitem__(self, key: Any) -> Any:
        return self.by_leaf()[key]

    @property
    def wholes(self) -> list[Tensor]:
        """The long tensors."""
        return list(map(_DATA, self.runs))


_DATA, _BUCKET, _SLOT = attrgetter("data"), attrgetter("bucket"), attrgetter("slot")
_DTYPE, DEVICE, _REQUIRES = attrgetter("dtype"), attrgetter("device"), attrgetter("requires_grad")


def by_leaf(value: Tree) -> Tree:
    """A tree in which each `FlatShards` is the tree that it stands for; the rest is the same."""
    fn = lambda x: x.by_leaf() if isinstance(x, FlatShards) else x  # noqa: E731
    return tree.map_leaves(fn, value, is_leaf=is_node)


def replaced(value: Tree, before: Tree, after: Tree) -> Tree:
    """`after` with `FlatShards` where `value` has them.

    Args:
      value: the tree as it was.
      before: `by_leaf(value)`.
      after: the same with other leaves.
    """
    fn = lambda x, old, new: x.replaced(old, new) if isinstance(x, FlatShards) else new  # noqa: E731
    return tree.map_leaves(fn, value, before, after, is_leaf=is_node)


def as_before(new: V, old: Any) -> V:
    """Move a state to the places of the one before, if their trees are alike.

    Optimizers of one's own, and states that come from other ranks, make new shards in memory.
    """
    (found, spec), (before, same) = (tree.flatten(x, is_leaf) for x in (new, old))
    if spec != same:
        return new
    both = [i for i, x in enumerate(found) if isinstance(x, Sharded)]
    own = [i for i in both if isinstance(before[i], Sharded) and not shards.is_donated(before[i])]
    placed = placed_like([found[i].data for i in own], [before[i].data for i in own])
    for i, data in zip(own, placed, strict=True):
        found[i] = Sharded(data, found[i].bucket, found[i].slot)
    return spec.unflatten(found)  # pyright: ignore[reportReturnType]


def is_node(value: Any) -> bool:
    """Whether a value is a leaf of a tree of shards, or `FlatShards`."""
    return is_leaf(value) or isinstance(value, FlatShards)


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A flattened tree of shards, whose attributes are read once in a step.

    Args:
      leaves, spec: of the tree.
      trained: those of the leaves that are `Sharded`.
      pieces: theirs on this rank. Until a gradient is complete, its place is held by the piece of
        its parameter, which has the same shape and device.
      stream: of gradients that are not all complete; None of any other tree.
    """

    leaves: list[Any]
    spec: Any
    trained: list[Sharded]
    pieces: list[Tensor]
    stream: GradStream | None = None

    @cached_property
    def geometry(self) -> tuple[Any, Any, Any, Any]:
        """Buckets and slots of the pieces, their lengths, and their shapes if they are batched."""
        trained, pieces = self.trained, self.pieces
        shapes, lengths = None, tuple(map(Tensor.numel, pieces))
        if not set(map(Tensor.dim, pieces)) <= {1}:
            shapes = [x.shape for x in pieces]
            lengths = tuple([shape[-1] for shape in shapes])
        return tuple(map(_BUCKET, trained)), tuple(map(_SLOT, trained)), lengths, shapes

    @property
    def paths(self) -> list[str]:
        """The path of each piece's leaf."""
        pairs = zip(tree.spec_paths(self.spec), self.leaves, strict=True)
        return [path for path, leaf in pairs if isinstance(leaf, Sharded)]

    def layout(self) -> FlatLayout:
        """What `FlatShards` for this tree remember of it."""
        places: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, Sharded):
                places.append((leaf.bucket, leaf.slot))
            else:  # a frozen leaf itself would keep its tensor alive
                places.append(leaf if isinstance(leaf, Tied) else Nothing())
        return FlatLayout(self.spec, tuple(places), runs_of(*self.geometry[:3]))

    def with_pieces(self, pieces: Sequence[Tensor]) -> "Unpacked":
        """The same tree with other pieces, in new nodes, as the old ones may be given away."""
        leaves = trained = list(map(Sharded, pieces, *self.geometry[:2]))
        if len(trained) < len(self.leaves):
            new = iter(trained)
            leaves = [next(new) if isinstance(x, Sharded) else x for x in self.leaves]
        # Limits on gradients change their pieces.
        shards.mark_reduced(trained, shards.reduction_groups(self.trained))
        return Unpacked(leaves, self.spec, trained, list(pieces))

    def part(self, leaves: list[Any], own: Sequence[int]) -> "Unpacked":
        """The tree with other leaves, of which only these pieces are left."""
        stream = None if self.stream is None else self.stream.part(own)
        trained = [self.trained[i] for i in own]
        return Unpacked(leaves, self.spec, trained, [self.pieces[i] for i in own], stream)

    def completed(self) -> Iterator[list[int]]:
        """Take gradients as their buckets complete; yield the numbers of the pieces."""
        stream: Any = self.stream
        for buckets in stream.ready():
            found = []
            for k in buckets:
                for i, piece in zip(stream.order[k], stream.take(k), strict=True):
                    self.pieces[i] = piece.detach()
                    found.append(i)
            yield found

    def whole(self) -> "Unpacked":
        """Wait for all gradients; the same tree if it is no stream."""
        if self.stream is None:
            return self
        for _ in self.completed():
            pass
        made = self.with_pieces(self.pieces)
        shards.mark_reduced(made.trained, self.stream.home)
        return made

    @cached_property
    def shards(self) -> Tree:
        """The tree itself."""
        return self.spec.unflatten(self.leaves)


def unpacked(given: Tree) -> Unpacked:
    """Flatten a tree of shards, or gradients that are not all complete, unless it is flattened."""
    if isinstance(given, Unpacked):
        return given
    stream = shards.grad_stream(given)
    if stream is not None:
        like = unpacked(stream.like)
        like = like.with_pieces([x.detach() for x in like.pieces])
        return replace(like, stream=stream)
    leaves, spec = tree.flatten(given, is_leaf)
    trained = leaves
    if set(map(type, leaves)) != {Sharded}:
        trained = [x for x in leaves if isinstance(x, Sharded)]
    found = Unpacked(leaves, spec, trained, list(map(_DATA, trained)))
    vars(found)["shards"] = given
    return found


def zeros(
    params: Tree, name: str = "", begins: Callable[[Tensor], Tensor] | None = None
) -> FlatShards:
    """Zeros for every element of a tree of shards, or the numbers that a moment begins with.

    Args:
      params: the tree.
      name: of the moment that begins like this, which may have codes.
      begins: gives one element of it, for parameters like a tensor.

    Memory: the trained shards' once more.
    """
    found = unpacked(params)
    layout, wholes = found.layout(), list[Tensor]()
    for r, run in enumerate(layout.runs):
        like = found.pieces[run.members[0]]
        begun = None if begins is None else begins(like)
        dtype = like.dtype if begun is None else begun.dtype
        whole = _torch.lazy_zeros((*like.shape[:-1], run.numel), dtype, like.device)
        if begun is not None and begun.item():
            whole.fill_(begun.item())
        wholes.append(made(layout, r, whole, name))
    return with_wholes(layout, wholes)


def with_wholes(layout: FlatLayout, wholes: Sequence[Tensor]) -> FlatShards:
    """Flat shards of a layout from their long tensors."""
    runs = list(map(Sharded, wholes, map(_BUCKET, layout.runs), repeat(0)))
    return FlatShards(runs, layout)
