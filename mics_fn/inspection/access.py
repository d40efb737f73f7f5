"""`get`, `set` and `summary`: leaves of a sharded value by their paths, for people at a prompt.

Calls of `get` and `set` are compared between ranks every time, even if the same call was made
before: ranks differ most easily where a person types at a prompt.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from mics_fn import _torch, checks, tree
from mics_fn import shards as sharding
from mics_fn.collectives import checksum, levels, together
from mics_fn.errors import LeafError, PlanError, human_bytes
from mics_fn.groups import Groups, Hierarchy, fold_ranks, require_replicas
from mics_fn.offload import Coded, in_file, is_coded, placed_like
from mics_fn.optim import TrainState, by_leaf, replaced
from mics_fn.shards import Bucket, Fixed, Sharded, Tied, is_leaf, pack
from mics_fn.tree import Tree

# Which leaf of a sharded value a path means, and whether all ranks mean the same.

_ROOTS = ("params", "grads", "shards", "opt", "buffers")  # as errors write them


class Leaves(NamedTuple):
    """Leaves of a tree of shards or of a `TrainState`, each with its path."""

    verb: str
    all: list[Any]
    spec: Any
    paths: list[str | None]  # None for a leaf that only repeats another one
    homes: list[Any]  # `Groups` or `Hierarchy` of each leaf; None if no groups were given
    groups: list[Any]  # the distinct ones among them
    is_state: bool

    @property
    def shards(self) -> list[int]:
        """Return the indices of the leaves that belong to a tree of shards."""
        return [i for i, leaf in enumerate(self.all) if is_leaf(leaf)]

    def in_optimizer(self, at: int) -> bool:
        """Return whether a leaf belongs to the optimizer's part of a `TrainState`."""
        return self.is_state and (self.paths[at] or "").partition(".")[0] == "opt"

    def find(self, path: str) -> int:
        """Return the index of the leaf that a path means; for a tied leaf that of its owner.

        Raises:
          LeafError: the path means no leaf, or several.
        """
        wanted = self._readings(path)
        hits = [i for i, own in enumerate(self.paths) if own in wanted]
        if len(hits) == 1:
            return self._owner(hits[0])
        root = "state" if self.is_state else "params"
        full = [tree.join(root, self.paths[i] or "") for i in hits]
        what = f"{path!r} names several leaves" if hits else f"no leaf {path!r} here"
        near = f"it may be {' or '.join(full)}" if hits else f"nearest: {self._near(path)}"
        raise LeafError(f"{self.verb}: {what}", [near], "print(summary(...)) shows all paths")

    def _owner(self, at: int) -> int:
        if not isinstance(self.all[at], Tied):
            return at
        places = self.shards
        owners = sharding.owner_index(sharding.places_of([self.all[i] for i in places]))
        return places[owners[places.index(at)]]

    def _readings(self, text: str) -> set[str]:
        """Return the paths that a text may mean: with a root, or without."""
        root, _, bare = text.partition(".")
        if not self.is_state:
            return {text, bare} if root in _ROOTS else {text}
        return {bare} if root == "state" else {text, tree.join("params", text), f"buffers.{text}"}

    def _near(self, text: str) -> str:
        """List paths below a branch of the tree; otherwise paths of similar spelling."""
        named = [own for own in self.paths if own is not None]
        below = [own for own in named if own.startswith(f"{text}.")][:3]
        return ", ".join(below or difflib.get_close_matches(text, named, n=3, cutoff=0.5)) or "none"


def leaves_of(verb: str, shards: Tree, groups: Any, *, local: bool = False) -> Leaves:
    """Collect the leaves of a tree of shards or a `TrainState`, with paths and groups.

    Args:
      verb: the caller's name, for errors.
      shards: the tree, or the state.
      groups: as for `gather`; for a state those of its parameters; None only with `local`.
      local: the caller does not communicate.

    Raises:
      LeafError: the call is inside torch.func.
      LeafError, GroupsError: as `gather`, if `groups` does not fit.
    """
    if _torch.inside_torch_func() and not local:
        fix = "call it outside; gather is what has a derivative"
        raise LeafError(f"{verb}: cannot be used inside torch.func", fix=fix)
    shown = by_leaf(shards)
    values, spec = tree.flatten(shown, is_leaf)
    paths: list[str | None] = [*tree.paths(shown, "", is_leaf)]
    is_state = isinstance(shards, TrainState)
    named = shards.params if is_state else shown
    given = [] if local and groups is None else sharding.homes_of(verb, groups, named)
    homes = given or [None] * len(values)
    distinct = list(dict.fromkeys(given))
    if isinstance(groups, Groups | Hierarchy):
        distinct = [groups]  # even if there is no leaf
    if is_state:
        homes = _homes_of_state(values, tree.flatten(named, is_leaf)[0], given)
    found = Leaves(verb, values, spec, paths, homes, distinct, is_state)
    # An optimizer's trees may repeat the frozen leaves of the parameters.
    for i, leaf in enumerate(values):
        if isinstance(leaf, Fixed | sharding.Nothing) and found.in_optimizer(i):
            paths[i] = None
    return found


def _homes_of_state(values: Sequence[Any], params: Sequence[Any], given: Sequence[Any]) -> list:
    """Return the groups of each leaf of a state: those of the parameters in its bucket."""
    # By its number, as the optimizer's copy of a bucket may have another dtype.
    numbers = [leaf.bucket.index if getattr(leaf, "bucket", None) else None for leaf in params]
    homes = dict(zip(numbers, given, strict=False))
    homes[None] = next(iter(given), None)
    own = [getattr(value, "bucket", None) for value in values]
    return [homes.get(bucket and bucket.index, homes[None]) for bucket in own]


# `summary`: a table of what a sharded value holds, leaf by leaf.

_HEAD = ("path", "shape", "dtype", "kind", "bucket", "groups", "here", "full")
_RIGHT = ("bucket", "here", "full")  # columns of numbers
_SHOWN = 40  # rows of a table, the first and the last ones


class SummaryRow(NamedTuple):
    """Row of a `Summary`, for one leaf.

    Args:
      path: as `get` takes it.
      shape: the shape of the full tensor.
      dtype: the dtype of the stored elements, or the codec of codes.
      kind: "trained" or "frozen" for pieces, "replicated" or "full" for leaves that are whole on
        this rank, "tied" for leaves without memory of their own.
      bucket: the number of its bucket, or None.
      groups: the groups that share it, in a few words.
      here_bytes: bytes on this rank, without padding.
      full_bytes: bytes of the full tensor; 0 if tied, so that each tensor counts once.
      place: where this rank's part lies: "device", "host" or "disk". On the CPU the host is the
        device; and only where groups are given do the two differ.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    bucket: int | None
    groups: str
    here_bytes: int
    full_bytes: int
    place: str = "device"

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the row in a table, one per column."""
        bucket = "" if self.bucket is None else str(self.bucket)
        kind = self.kind if self.place == "device" else f"{self.kind}, {self.place}"
        sizes = human_bytes(self.here_bytes), human_bytes(self.full_bytes)
        return (self.path, str(self.shape), self.dtype, kind, bucket, self.groups, *sizes)


@dataclass(frozen=True, repr=False)
class Summary:
    """Leaves of a sharded value on this rank; prints as a table.

    Args:
      rows: one per leaf, in the order of the tree.
      padding_bytes: bytes of this rank's chunks that belong to no leaf.
      whole_padding_bytes: those of all chunks of buckets whose leaves lie whole on one rank each.
    """

    rows: tuple[SummaryRow, ...]
    padding_bytes: int
    whole_padding_bytes: int = 0

    @property
    def here_bytes(self) -> int:
        """Bytes of all leaves on this rank, without padding."""
        return sum(row.here_bytes for row in self.rows)

    @property
    def full_bytes(self) -> int:
        """Bytes of all full tensors, tied ones once."""
        return sum(row.full_bytes for row in self.rows)

    @property
    def elements(self) -> int:
        """Elements of all full tensors, tied ones once."""
        return sum(prod(row.shape) for row in self.rows if row.kind != "tied")

    def __str__(self) -> str:
        rows = [_HEAD, *(row.cells() for row in self.rows)]
        aligned = map(_aligned, zip(*rows, strict=True))
        lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
        if len(self.rows) > _SHOWN:
            middle = 1 + _SHOWN // 2
            hidden = len(self.rows) - _SHOWN
            lines[middle : middle + hidden] = [f"... {hidden} more ..."]
        leaves = "1 leaf" if len(self.rows) == 1 else f"{len(self.rows)} leaves"
        here, padding = human_bytes(self.here_bytes), human_bytes(self.padding_bytes)
        text = f"{leaves} of {self.elements:,} elements: {here} here and {padding} of padding"
        text += f", {human_bytes(self.full_bytes)} in full"
        if self.whole_padding_bytes:
            text += f" beside {human_bytes(self.whole_padding_bytes)} of padding of whole leaves"
        return "\n".join([*lines, text])

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class GroupsSummary:
    """Process groups that `Groups` have made on this rank; prints as a table.

    On an accelerator each has buffers of its own, such as 17 MiB of an H200 with NCCL 2.27: `python
    -m mics_fn doctor --gpu` measures them.

    Args:
      rows: the purpose and the global ranks of each, in the order in which they were made.
      backend: of all of them.
    """

    rows: tuple[tuple[str, tuple[int, ...]], ...]
    backend: str

    def __str__(self) -> str:
        rows = [("communicator", "ranks"), *((name, fold_ranks(x)) for name, x in self.rows)]
        aligned = map(_aligned, zip(*rows, strict=True))
        lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
        count = f"{len(self.rows)} process group{'s' * (len(self.rows) != 1)}"
        return "\n".join([*lines, f"{count} of {self.backend or 'no backend'} on this rank"])

    __repr__ = __str__


@overload
def summary(shards: Groups, groups: None = None) -> GroupsSummary: ...
@overload
def summary(shards: Tree, groups: Any = None) -> Summary: ...
def summary(shards: Any, groups: Any = None) -> Any:
    """List what a sharded value holds: each leaf with its shape, dtype, kind and bytes.

    Args:
      shards: tree of shards, such as parameters or gradients, or a `TrainState`. Of `Groups` it
        lists the process groups.
      groups: as for `gather`; the table then names them. With None it says how many pieces a leaf
        has.

    Returns:
      A `Summary`, or of groups a `GroupsSummary`: `print` it, or end a notebook's cell with it, for
      the first and the last 20 rows; its `rows` has all. Plain numbers are left out, and so are the
      frozen parameters that an optimizer's tree only repeats.

    Raises:
      LeafError: there is neither a shard nor a tensor.
      DonatedError: the value was given away earlier.

    Example:
      >>> groups = make_groups(1)
      >>> summary(shard({"b": torch.ones(2), "w": torch.ones(2, 3)}, groups), groups)
      path   shape   dtype    kind     bucket  groups               here  full
      b      (2,)    float32  trained       0  n=1 p=1 levels=none   8 B   8 B
      w      (2, 3)  float32  trained       0  n=1 p=1 levels=none  24 B  24 B
      2 leaves of 8 elements: 32 B here and 16 B of padding, 32 B in full
    """
    if isinstance(shards, Groups):
        return GroupsSummary(shards.state.listed(), shards.state.backend)
    found = leaves_of("summary", shards, groups, local=True)
    listed = [_row(found, i) for i, path in enumerate(found.paths) if path is not None]
    shown = [row for row in listed if row is not None]
    if shards is None or (found.all and not shown and not any(map(is_leaf, found.all))):
        fix = "pass a tree of shards, or a TrainState such as trainer.state"
        checks.refuse("summary", "shards", shards, "shards or tensors", fix, LeafError)
    return Summary(tuple(shown), _padding(found), _whole_padding(found))


def _row(found: Leaves, at: int) -> SummaryRow | None:
    leaf, path, home = found.all[at], found.paths[at] or "", found.homes[at]
    data = leaf if isinstance(leaf, Tensor) else getattr(leaf, "data", None)
    if isinstance(leaf, sharding.Nothing) or not (isinstance(leaf, Tensor) or is_leaf(leaf)):
        return None
    bucket = None if isinstance(leaf, Tensor) else leaf.bucket
    dtype = leaf.dtype if data is None else data.dtype
    kept, here, full = sharding.dtype_name(dtype), 0, 0
    if data is not None:
        here, full = (n * dtype.itemsize for n in (data.numel(), prod(leaf.shape)))
    if isinstance(data, Coded):
        kept, here, full = f"{data.codes.codec}", data.size_bytes, data.bytes_of(prod(leaf.shape))
    index = None if bucket is None else bucket.index
    parts = "" if bucket is None else f"p={bucket.parts}" if home is None else home.describe()
    place, kind, shape = _place(data, home), _kind(leaf), tuple(leaf.shape)
    return SummaryRow(path, shape, kept, kind, index, parts, here, full, place)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Fixed):
        return "replicated" if leaf.bucket is None else "frozen"
    return {Sharded: "trained", Tied: "tied"}.get(type(leaf), "full")


def _place(data: Tensor | None, home: Any) -> str:
    """Return the place of a tensor."""
    if data is not None and in_file(data):
        return "disk"
    on_other_device = data is not None and home is not None and data.device != home.device
    return "host" if on_other_device and data.is_cpu else "device"  # pyright: ignore


def _whole_padding(found: Leaves) -> int:
    """Count the bytes of padding in full of buckets of whole leaves, in the dtype of shards."""
    kept = [found.all[i].bucket for i in found.shards if found.paths[i] is not None]
    whole = {bucket for bucket in kept if getattr(bucket, "whole", False)}
    return sum((x.numel - sum(x.numels)) * x.dtype.itemsize for x in whole)


def _padding(found: Leaves) -> int:
    """Count the bytes of this rank's chunks that belong to no leaf."""
    shown = [i for i in found.shards if found.paths[i] is not None]
    leaves, total = [found.all[i] for i in shown], 0
    for use in sharding.grouped(leaves, [None] * len(leaves)):
        data = [leaves[i].data for i in use.members]
        coded, size = isinstance(data[0], Coded), use.bucket.chunk
        total += data[0].bytes_of(size) if coded else size * data[0].itemsize
        total -= sum(piece.size_bytes if coded else piece.nbytes for piece in data)
    return total


def _aligned(cells: Sequence[str]) -> list[str]:
    """Pad the cells of a column, whose head is the first of them; numbers to the right."""
    width = max(map(len, cells))
    right = cells[0] in _RIGHT
    return [cell.rjust(width) if right else cell.ljust(width) for cell in cells]


# This file defines `set`, so its code cannot use the builtin of that name.


@torch.no_grad()
def get(shards: Tree, path: str, groups: Any) -> Any:
    """Return one leaf in full, by its path, on every rank.

    Args:
      shards: tree of shards (parameters, gradients, moments), or a `TrainState`.
      path: as errors and `summary` write it: `params.layers.0.w`, and in a `TrainState` also
        `opt.moments.exp_avg.layers.0.w` and `buffers.norm.running_mean`. The name of a parameter or
        buffer, `layers.0.w`, is enough.
      groups: as for `gather`; for a `TrainState` those of its parameters.

    Returns:
      The tensor in the dtype of the shards, in memory of its own, without a gradient. A tied leaf
      gives the tensor of its owner. What is not a shard comes as this rank has it: replicated
      tensors, buffers and 0-dim tensors as copies, numbers as they are, and None for a leaf that is
      None.

    Communication: what each rank asks for (a few hundred bytes), then one all-gather per level, of
      this leaf alone: each rank receives p - 1 times the leaf's largest piece, because shorter
      pieces are padded. The rest of the bucket does not travel. All ranks must call it.

    Memory: the tensor, and p times its largest piece.

    Raises:
      LeafError: no leaf has this path, or several have it; the nearest paths are named.
      LeafError: the call is inside torch.func; or the leaf is a tensor of an optimizer that keeps
        pieces in its own way, so that the full tensor is not known.
      PlanError: the groups are not those that the tree was sharded with.
      DonatedError: the value was given away earlier.
      DesyncError: the ranks ask for different leaves, or another rank has one of these errors.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"h.0.w": torch.ones(2)}, groups), optim.adam(0.1))
      >>> get(state, "h.0.w", groups), get(state, "opt.moments.exp_avg.h.0.w", groups)
      (tensor([1., 1.]), tensor([0., 0.]))
    """
    found = leaves_of("get", shards, groups)
    with together("get", found.groups) as exchange:
        at = found.find(path)
        exchange.fact = _described(found, at)
    leaf = found.all[at]
    bucket = getattr(leaf, "bucket", None)
    if bucket is not None:  # a piece; others are whole on this rank, or no tensors
        return _gathered(leaf, bucket, found.homes[at].hierarchy)
    value = leaf.data if is_leaf(leaf) else leaf
    return value.detach().clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def set(shards: Tree, path: str, value: Any, groups: Any) -> Tree:
    """Return a copy of the tree or state in which one leaf is replaced.

    Args:
      shards: as for `get`.
      path: as for `get`.
      value: a tensor of the leaf's full shape, the same on every rank, which is cast to the leaf's
        dtype; or a number, with which the leaf is filled.
      groups: as for `shard`; for a `TrainState` those of its parameters.

    Returns:
      The new tree or `TrainState`. A tensor that is tied changes under all its names. The leaves of
      other buckets are the same objects as before, so if one of the two values is donated later,
      the other loses what they share.

    Communication: what each rank sets, with a digest of the value (a few hundred bytes). All ranks
      must call it.

    Memory: this rank's chunk of the leaf's bucket, a second time.

    Raises:
      LeafError: the leaf is cut over parts of a model.
      LeafError: the value has another shape, its numbers do not fit the leaf's dtype (fractions for
        integers, True for a number) or its codes (what is not finite, or is negative in a second
        moment).
      DesyncError: the ranks give different values or paths, or another rank has such an error.
      GroupsError: a hierarchy was given, which does not reach the replicas.
      LeafError, PlanError, DonatedError: as `get`.

    Example:
      >>> groups = make_groups(1)
      >>> params = shard({"w": torch.ones(2), "b": torch.ones(1)}, groups)
      >>> new = set(params, "params.w", torch.tensor([3.0, 4.0]), groups)
      >>> get(new, "w", groups), get(params, "w", groups)
      (tensor([3., 4.]), tensor([1., 1.]))
    """
    found = leaves_of("set", shards, groups)
    require_replicas("set", found.groups)

    with together("set", found.groups) as exchange:
        at = found.find(path)
        where = _described(found, at)
        if getattr(getattr(found.all[at], "bucket", None), "cut", ()):
            text = f"set: {found.paths[at]} is cut over the parts of a model"
            raise LeafError(text, fix="shards.map changes this rank's piece of this rank's part")
        new = _fitting(f"set: {found.paths[at]}", found.all[at], value)
        text = repr(value)
        if isinstance(value, Tensor):
            text = f"values of digest {int(checksum(new)) % 2**64:016x}"
        exchange.fact = f"{where} = {text}"
    changed = _replaced(found, at, new)
    by_id = {id(found.all[i]): leaf for i, leaf in changed.items()}
    out = [changed.get(i, leaf) for i, leaf in enumerate(found.all)]
    for i, own in enumerate(found.paths):
        if own is None:  # else the optimizer's trees would keep the old frozen tensor in memory
            out[i] = by_id.get(id(out[i]), out[i])
    return replaced(shards, found.spec.unflatten(found.all), found.spec.unflatten(out))


def _described(found: Leaves, at: int) -> str:
    """Describe a leaf by the same text on every rank, after checks that a gather can work.

    Raises:
      LeafError, PlanError: as `get`.
    """
    leaf, where = found.all[at], f"{found.verb}: {found.paths[at]}"
    if not is_leaf(leaf) and not isinstance(leaf, Tensor):
        return f"{found.paths[at]}, {type(leaf).__name__}"
    if isinstance(leaf, Tensor) and leaf.ndim and found.in_optimizer(at):
        text = f"{where} is a plain tensor of shape {tuple(leaf.shape)}"
        why = "an optimizer from outside mics_fn may keep pieces in such tensors, of unknown leaves"
        raise LeafError(text, [why], fix="read this rank's own tensor from state.opt")
    bucket = getattr(leaf, "bucket", None)
    if bucket is None:
        shape, dtype = tuple(getattr(leaf, "shape", ())), getattr(leaf, "dtype", None)
        return f"{found.paths[at]}, {shape} {dtype}"
    route, data, slot = found.homes[at].hierarchy.route, leaf.data, getattr(leaf, "slot", 0)
    here = sharding.pieces(bucket, min(route.chunk, bucket.parts - 1))[slot].length
    if route.size != bucket.parts or data.shape != (here,):
        text = f"{where} is one of {bucket.parts} pieces, here of shape {tuple(data.shape)}; "
        text += f"these groups have {route.size} parts"
        raise PlanError(text, fix="pass the groups that the tree was sharded with")
    place = f"at {bucket.offsets[slot]} of {bucket.numel}, in {bucket.parts} parts"
    return f"{found.paths[at]}, {leaf.shape} {sharding.dtype_name(data.dtype)} {place}"


def _gathered(leaf: Any, bucket: Bucket, hierarchy: Hierarchy) -> Tensor:
    """Gather one leaf in full; each piece is padded to the length of the longest one."""
    slot, sent = leaf.slot, pack.fetched_to(leaf.data.detach(), hierarchy.device)
    start, stop = bucket.offsets[slot], bucket.offsets[slot] + bucket.numels[slot]
    bounds = [(i * bucket.chunk, (i + 1) * bucket.chunk) for i in range(bucket.parts)]
    lengths = [max(0, min(high, stop) - max(low, start)) for low, high in bounds]
    if len(sent) < max(lengths):
        sent = torch.cat([sent, sent.new_zeros(max(lengths) - len(sent))])
    found = levels.start_all_gather(hierarchy.route, sent, what=("get", "gather", bucket)).wait()
    hierarchy.partition.check_done(hierarchy.device)
    return torch.cat([found[i, :length] for i, length in enumerate(lengths)]).view(leaf.shape)


def _fitting(where: str, leaf: Any, value: Any) -> Any:
    """Convert a value to the full leaf: a tensor of its shape and dtype, or a number."""
    data = leaf.data if is_leaf(leaf) else leaf
    if not isinstance(data, Tensor):
        if not isinstance(value, (int, float) if type(data) is float else type(data)):
            raise LeafError(f"{where} is {type(data).__name__}, got {value!r}")
        return type(data)(value)
    if isinstance(value, int | float):
        kind = torch.float64 if isinstance(value, float) else torch.int64  # the widest
        value = torch.tensor(value, dtype=kind).expand(leaf.shape)
    if tuple(value.shape) != tuple(leaf.shape) or type(value) not in _torch.PLAIN:
        fix = "pass the full tensor, or a number to fill the leaf with"
        found = f"got {tuple(value.shape)}, {type(value).__name__}"
        lines = [f"expected {tuple(leaf.shape)}", found]
        raise LeafError(f"{where}: a value of another shape", lines, fix)
    moved = value.detach().to(data.device)
    if pack.has_codes(data):
        pack.check_finite(where, leaf.bucket.codes, moved)
    elif is_coded(data):
        codec: Any = data.codes.codec  # pyright: ignore[reportAttributeAccessIssue]
        if not bool((moved.isfinite() & (moved >= (0 if codec.root else -torch.inf))).all()):
            text = f"{where} has a value that state={codec} cannot hold"
            raise LeafError(text, fix="pass finite numbers, and for a second moment none below 0")
    cast = moved.to(data.dtype) if torch.can_cast(moved.dtype, data.dtype) else None
    if cast is None or not _survives(moved, cast):
        want, got = (sharding.dtype_name(x.dtype) for x in (data, value))
        text = f"{where}: the value does not fit its dtype"
        raise LeafError(text, [f"expected {want}", f"got {got}"], "pass values that it can hold")
    return cast


def _survives(moved: Tensor, cast: Tensor) -> bool:
    """Return whether a cast kept integers equal and finite numbers finite."""
    if not cast.is_floating_point():
        return torch.equal(cast.to(moved.dtype), moved)
    return bool((cast.double().isfinite() | ~moved.isfinite()).all())


def _replaced(found: Leaves, at: int, value: Any) -> dict[int, Any]:
    """Return the leaves that change, by index; for a piece all of its bucket."""
    leaf = found.all[at]
    if getattr(leaf, "bucket", None) is None:
        if isinstance(value, Tensor):  # since the caller may write to this one
            value = value.clone(memory_format=torch.contiguous_format)
        if isinstance(leaf, Tensor):  # a buffer may have several names
            tensors = {i: x for i, x in enumerate(found.all) if isinstance(x, Tensor) and x.numel()}
            place = sharding.MemoryPlace.of
            alike = (i for i, x in tensors.items() if place(x) == place(leaf))
            return dict.fromkeys([at, *alike], value)
        return {at: Fixed(value) if is_leaf(leaf) else value}
    places, slot = found.shards, leaf.slot
    uses = sharding.grouped([found.all[i] for i in places], [found.homes[i] for i in places])
    use = next(use for use in uses if places.index(at) in use.members)
    members = [places[i] for i in use.members]
    # The dtype of pieces may not be that of their bucket: sums of gradients are wider.
    bucket, chunk = replace(use.bucket, dtype=leaf.data.dtype), use.route.chunk
    data = use.by_slot([found.all[i].data for i in members])
    flat, device = pack.whole_chunk(bucket, chunk, data), leaf.data.device
    flat = pack.pack_chunk(bucket, chunk, data, device=device) if flat is None else flat.clone()
    views, piece = pack.split_chunk(bucket, chunk, flat), sharding.pieces(bucket, chunk)[slot]
    views[slot].copy_(value.reshape(-1)[piece.origin : piece.origin + piece.length])
    if pack.has_codes(leaf.data):
        paths = [found.paths[i] or "" for i in members]
        names = [path or "" for path in use.by_slot(paths)]
        placed = use.by_member(pack.coded_pieces(use.bucket, chunk, flat, names))
    else:
        placed = placed_like(use.by_member(views), [found.all[i].data for i in members])
    pairs = zip(members, placed, strict=True)
    return {i: type(leaf)(view, found.all[i].bucket, found.all[i].slot) for i, view in pairs}
