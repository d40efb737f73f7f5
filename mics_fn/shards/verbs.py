"""The verbs: `gather`, `reduce_grads` and what makes shards of full values without a message.

A full value is what every rank has a copy of, and a shard is one value held in parts. The VJP of a
cut multiplies a rank's part of the gradient by the number of parts, as its mean over ranks is then
the gradient; see [Note: adjoint] in `linear`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.collectives import needs_derivative, refuse_derivative
from mics_fn.errors import DonatedError, LeafError
from mics_fn.groups import require_replicas
from mics_fn.offload import placed_like
from mics_fn.shards import pack
from mics_fn.shards.bucket import pieces
from mics_fn.shards.leaf import (
    Fixed,
    Leaf,
    Nothing,
    Sharded,
    Tied,
    Writing,
    dtype_name,
    is_leaf,
    mark_reduced,
    note_write,
    reduction_groups,
    same_tensor,
)
from mics_fn.shards.linear import Finish, apply, as_part, deal, linear_map, put, run, start
from mics_fn.shards.opened import (
    BucketUse,
    GroupsTree,
    Opened,
    check_leaves,
    open_shards,
    values_up_to,
)
from mics_fn.shards.sharding import layout_of
from mics_fn.tree import Tree

# `gather` and `unshard`: shards become full tensors. For the gradient see [Note: adjoint].


K = TypeVar("K")
T = TypeVar("T")


@overload
def gather(shards: Mapping[K, Leaf], hierarchy: GroupsTree) -> dict[K, Tensor]: ...
@overload
def gather(shards: list[Sharded], hierarchy: GroupsTree) -> list[Tensor]: ...
@overload
def gather(shards: T, hierarchy: GroupsTree) -> T: ...
def gather(shards: Tree, hierarchy: Any) -> Tree:
    """Rebuild full tensors from shards now. It is differentiable, and its VJP is hop 1.

    `defer` gives the same values in tensors that are fetched at the op that uses them.

    Args:
      shards: tree of shards (`Sharded`, `Fixed`, `Tied` leaves).
      hierarchy: the groups, as of `shard`, which gather level by level; `groups.flat` does so at
        once, over all ranks. Or a prefix pytree of these, or a function from path to one.

    Returns:
      The tree with tensors of the full shapes, which are for reading. Those of one bucket are views
      of one buffer, and tied leaves are one tensor. The gradient of a function of them is a tree of
      shards, averaged over the partition group. No raw collective is left to differentiate, so
      grad, vjp, jvp, vmap(grad), jacrev of full values and their compositions work. If p > 1,
      `jacfwd` and `hessian` over shards and `jacrev` of shards do not: they differentiate along
      directions that lie in one rank's piece alone. A Hessian is
      `vmap(lambda v: jvp(grad(loss), (shards,), (v,))[1])` over a stack of directions, each of
      which was cut by `shard`. Instead of `linearize` use `jvp`.

      A plain `loss.backward()` has nothing to differentiate by, as torch says ("element 0 of
      tensors does not require grad"): use `torch.func.grad`, or `defer` with a `GradSum`, or make
      the pieces leaves of autograd, `leaf.data.requires_grad_()`, which then have `leaf.data.grad`.

    Communication: one all-gather per level and bucket, in which each rank receives (p - 1)/p of the
      full bytes; the VJP is one reduce-scatter per level and bucket. None if p = 1. The ranks
      compare a tree that is new to the groups once: 32 bytes to each other rank of its group.

    Memory: the full tree, until the caller drops it. The VJP needs at most four buffers of the size
      of a bucket. If p = 1 full tensors are views of the shards and take no memory.

    Raises:
      PlanError: the groups are not those that the tree was sharded with.
      DonatedError: a shard was donated earlier.
      DesyncError: ranks gather different trees.
      LeafError: in `torch.func.linearize`, or in `jacfwd`, `hessian` or `jacrev` of shards.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> loss_fn = lambda s: gather(s, groups.hierarchy)["w"].square().sum()
      >>> torch.func.grad(loss_fn)(shards)["w"].data
      tensor([2., 2.])

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.3.
    """
    opened = open_shards("gather", shards, hierarchy).agree()
    return opened.build(_gathered(opened.data, opened.uses))


class PendingTree:
    """A tree that is being transferred; `wait()` returns it.

    Args:
      started: waits for the transfers of each bucket.
      build: makes the tree of their results.

    Communication: on gloo `wait()` starts the levels that remain; see the verb that made this.

    Example:
      >>> groups = make_groups(1)
      >>> pending = shards.start_gather(shard({"w": torch.ones(2)}, groups), groups)
      >>> pending.wait()["w"]
      tensor([1., 1.])
    """

    def __init__(self, started: Sequence[Finish], build: Callable[[list[Tensor]], Tree]) -> None:
        self._started: Sequence[Finish] | None = started
        self._build, self._tree = build, None

    def wait(self) -> Tree:
        """The tree. All ranks must wait for their trees in the same order.

        A second call gives the same tree and does not communicate.
        """
        if self._started is not None:
            found = [value for finish in self._started for value in finish()]
            self._tree, self._started = self._build(found), None
        return self._tree


def _start(
    verb: str, name: str, uses: Sequence[BucketUse], values: Sequence[Any], build: Callable
) -> PendingTree:
    """Start a map on plain tensors. Its result has no derivative, so it raises if one is needed."""
    refuse_derivative(f"start_{verb}", values, f"use {verb}, or torch.no_grad()")
    data = [values[i] for use in uses for i in use.members]
    return PendingTree(start(name, uses, data), build)


def start_gather(shards: Tree, hierarchy: Any) -> PendingTree:
    """Start a gather and return at once; `wait()` gives the full tensors.

    Args:
      shards: as for `gather`; they must not change until `wait()`. A verb with `donate` waits
        for the gather before it writes to them.
      hierarchy: as for `gather`.

    Returns:
      A `PendingTree`.

    Communication: as for `gather`. On gloo the outermost level runs in the background and the
      others run in `wait()`. On CUDA all levels run on a side stream, and `wait()` does not block
      the host.

    Memory: as for `gather`.

    Raises:
      LeafError: called inside torch.func, or a shard requires a gradient; the result has no
        derivative. Other errors are those of `gather`.

    Example:
      >>> groups = make_groups(1)
      >>> start_gather(shard([torch.ones(2)], groups), groups).wait()
      [tensor([1., 1.])]
    """
    opened = open_shards("start_gather", shards, hierarchy).agree()
    full, sent = list(opened.data), [use for use in opened.uses if use.crosses_ranks]
    for use in opened.uses:
        if not use.crosses_ranks:
            _view_local(use, full)

    def build(found: list[Tensor]) -> Tree:
        put(full, sent, found)
        return opened.build(full)

    return _start("gather", "gather", sent, opened.data, build)


def _gathered(data: Sequence[Any], uses: Sequence[BucketUse]) -> list[Any]:
    """One full tensor per leaf of the tree, from the data of each leaf."""
    full, trained, frozen = list(data), list[BucketUse](), list[BucketUse]()
    for use in uses:
        if not use.crosses_ranks:
            _view_local(use, full)
        elif use.bucket.trainable:
            trained.append(use)
        else:
            frozen.append(use)
    put(full, trained, apply("gather", trained, data))
    with torch.no_grad():  # frozen leaves get no gradient
        put(full, frozen, apply("gather", frozen, data))
    return full


def _view_local(use: BucketUse, data: list[Any]) -> None:
    """View as full tensors what one rank holds the whole of."""
    compute = use.bucket.compute
    for i, shape in zip(use.members, use.by_member(use.bucket.shapes), strict=True):
        piece = data[i]
        if use.placed:
            piece = pack.fetched_to(piece, use.hierarchy.device, compute)
        data[i] = piece.to(compute).reshape((*piece.shape[:-1], *shape))


@overload
def unshard(shards: Mapping[K, Leaf], hierarchy: GroupsTree) -> dict[K, Tensor]: ...
@overload
def unshard(shards: list[Sharded], hierarchy: GroupsTree) -> list[Tensor]: ...
@overload
def unshard(shards: T, hierarchy: GroupsTree) -> T: ...
def unshard(shards: Tree, hierarchy: Any) -> Tree:
    """Gather into tensors that own their memory, one bucket at a time, for export.

    Args:
      shards: tree of shards.
      hierarchy: as for `gather`.

    Returns:
      The tree with full tensors in the dtypes of the shards. Each has its own storage; tied leaves
      are one tensor.

    Communication: as for `gather`.

    Memory: the full tree and one bucket.

    Raises: the errors of `gather`.

    Example:
      >>> groups = make_groups(1)
      >>> unshard(shard([torch.arange(3.0)], groups), groups.hierarchy)
      [tensor([0., 1., 2.])]
    """
    opened = open_shards("unshard", shards, hierarchy).agree()
    data = opened.data
    whole = [isinstance(leaf, Fixed) and leaf.bucket is None for leaf in opened.leaves]
    out = [data[i].clone() if is_whole else None for i, is_whole in enumerate(whole)]
    for use in opened.uses:
        full = _gathered(data, [replace(use, bucket=use.bucket.exact)])
        for i in use.members:
            out[i] = full[i].clone(memory_format=torch.contiguous_format)
    return opened.build(out)


# Both hops of the gradients, which are means: hop 1 in partition groups, hop 2 over replicas.


def reduce_grads(grads: Tree, groups: Any, *, like: Tree | None = None) -> Tree:
    """Do the hops that gradients still need: both for full tensors, hop 2 for `Sharded` leaves.

    Args:
      grads: gradients, as a tree of full tensors, or of shards as `torch.func.grad` through
        `gather` gives them, or of both.
      groups: as for `shard`.
      like: the shards that the gradients belong to. It is needed with full tensors if the
        parameters have tied or frozen leaves or were sharded with other options than the default.

    Returns:
      A tree of shards: the gradient of the loss averaged over all ranks.

    Communication: hop 1 is one reduce-scatter per level and bucket, (p - 1)/p of the full bytes.
      Hop 2 is one all-reduce per bucket over the r replicas, 2(r - 1)/r of the shard's bytes.

    Memory: as for `scatter_grads`, and a copy of the shards in hop 2.

    Raises:
      LeafError: the structure or a shape differs from `like`.
      LeafError: there is a gradient for an integer leaf, or its dtype or device differs from the
        leaf's.

    Example:
      >>> groups = make_groups(1)
      >>> reduce_grads({"w": torch.ones(3)}, groups)
      {'w': Sharded(shape=(3,), float32, here 3 of 3)}

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.4 (2-hop gradient
      synchronisation).
    """
    leaves, _ = tree.flatten(grads, is_leaf)
    if like is not None or any(isinstance(leaf, Tensor) for leaf in leaves):
        grads = _scattered("reduce_grads", grads, groups, like)
    return _mean_over_replicas("reduce_grads", grads, groups)


def scatter_grads(grads: Tree, groups: Any, *, like: Tree | None = None) -> Tree:
    """Hop 1: average full gradients over the partition group; each rank keeps its shard.

    Args:
      grads: tree of full tensors, with None for leaves that have no gradient. `Sharded` leaves stay
        as they are.
      groups: as for `shard`.
      like: as for `reduce_grads`. Without it the layout is computed from the gradients, and
        compared between ranks.

    Returns:
      A tree of shards. Missing gradients become zeros, and gradients of tied leaves are added.

    Communication: one reduce-scatter per level and bucket, (p - 1)/p of the full bytes; none if
      p = 1.

    Memory: at most four buffers of the size of a bucket, which are kept for the next call. If p = 1
      none, since shards are views of the gradients.

    Raises: the errors of `reduce_grads`.

    Example:
      >>> groups = make_groups(1)
      >>> scatter_grads([torch.ones(2, 2)], groups)[0].data
      tensor([1., 1., 1., 1.])
    """
    return _scattered("scatter_grads", grads, groups, like)


def start_scatter_grads(grads: Tree, groups: Any, *, like: Tree | None = None) -> PendingTree:
    """Start hop 1 and return at once, so that the next micro-step can begin; `wait()` gives shards.

    Args:
      grads: as for `scatter_grads`. They are copied, so they may change after the call.
      groups: as for `shard`.
      like: as for `scatter_grads`.

    Returns:
      A `PendingTree`.

    Communication: as for `scatter_grads`. On gloo the innermost level runs in the background and
      the others run in `wait()`. On CUDA all levels run on a side stream, and `wait()` does not
      block the host.

    Memory: a flat copy of the full gradients until `wait()`.

    Raises:
      LeafError: called inside torch.func, or a gradient requires a gradient; the result has no
        derivative. Other errors are those of `scatter_grads`.

    Example:
      >>> groups = make_groups(1)
      >>> start_scatter_grads([torch.ones(2)], groups).wait()[0].data
      tensor([1., 1.])
    """
    sent, full, build = _owed("start_scatter_grads", grads, groups, like)
    return _start("scatter_grads", "scatter", sent, full, build)


def _scattered(verb: str, grads: Tree, groups: Any, like: Tree | None) -> Tree:
    sent, full, build = _owed(verb, grads, groups, like)
    return build(apply("scatter", sent, full))


def _owed(
    verb: str, grads: Tree, groups: Any, like: Tree | None
) -> tuple[list[BucketUse], list[Tensor | None], Callable[[list[Tensor]], Tree]]:
    """Match gradients with the layout of their parameters, and finish those of local buckets.

    Returns:
      The buckets that need hop 1, one full gradient per leaf, and what makes the tree of shards
      with the results of hop 1.
    """
    if like is not None:
        check_leaves(verb, like, tree.flatten(like, is_leaf)[0], "like")
    else:
        like = layout_of(verb, "grads", tree.map_leaves(pack.dense, grads, is_leaf=is_leaf), groups)
    opened = open_shards(verb, like, groups, root="grads")
    given = values_up_to(opened.spec, opened.given, grads, f"{verb}: grads")
    full, sent, out = _full_grads(opened, given), list[BucketUse](), list[Any](opened.leaves)
    for use in (each for each in opened.uses if each.bucket.trainable):
        done = [i for i in use.members if isinstance(given[i], Sharded)]
        if done and len(done) < len(use.members):
            text = f"{verb}: {opened.path(done[0])} is reduced already, others of its bucket"
            text += " are not"
            raise LeafError(text, fix="reduce a bucket's gradients together")
        if not done and use.crosses_ranks:
            sent.append(use)
            continue
        for i in use.members:
            out[i] = given[i] if done else _local(full[i], out[i], use.home.device)

    def build(found: Sequence[Tensor]) -> Tree:
        for use, values in deal(sent, found):
            for i, piece in zip(use.members, values, strict=True):
                out[i] = Sharded(piece, use.bucket, opened.leaves[i].slot)
        return opened.spec.unflatten(out)

    return sent, full, build


def _full_grads(opened: Opened, given: Sequence[Any]) -> list[Tensor | None]:
    """One full gradient per leaf, checked; those of tied leaves are added to their owner's."""
    full: list[Tensor | None] = [None] * len(given)
    for i, (grad, owner) in enumerate(zip(given, opened.layout.owner, strict=True)):
        slot: Any = opened.leaves[owner]
        if grad is None or is_leaf(grad):
            continue
        grad = pack.dense(grad)
        wrong = _misfit(slot, grad, batched=True)
        if wrong or not slot.dtype.is_floating_point:
            text = f"{opened.verb}: {opened.path(i)} {wrong or 'is of a leaf without gradients'}"
            raise LeafError(text, fix="give the gradient of the full parameter")
        if isinstance(slot, Sharded):
            before = full[owner]
            full[owner] = grad if before is None else before + grad
    return full


def _misfit(leaf: Any, value: Any, *, batched: bool = False) -> str:
    """Why a value cannot be the full tensor of a leaf; "" if it can.

    Args:
      leaf: the leaf, in whose dtype or in that of its computation the value has to be.
      value: anything.
      batched: whether dims of a batch may come before its own.
    """
    allowed = (leaf.dtype, leaf.bucket.compute if leaf.bucket else leaf.dtype)
    got = type(value).__name__
    if isinstance(value, Tensor):
        shape = value.shape[value.ndim - len(leaf.shape) :] if batched else value.shape
        if shape == leaf.shape and value.dtype in allowed:
            return ""
        got = f"{dtype_name(value.dtype)} of shape {tuple(value.shape)}"
    dtypes = " or ".join([dtype_name(dtype) for dtype in dict.fromkeys(allowed)])
    return f"is {got}, expected {dtypes} of shape {leaf.shape}"


def _local(grad: Tensor | None, slot: Sharded, device: torch.device) -> Sharded:
    """Hop 1 in a group of one rank, which is the gradient itself."""
    if grad is None:
        grad = torch.zeros(slot.shape, dtype=slot.dtype, device=device)
    batch, numel = grad.shape[: grad.ndim - len(slot.shape)], slot.bucket.numels[slot.slot]
    return Sharded(grad.reshape((*batch, numel)).to(slot.dtype), slot.bucket, slot.slot)


def sync_replicas(grads: Tree, groups: Any, *, donate: bool = False, exact: bool = False) -> Tree:
    """Hop 2: average shards of gradients over the replication group.

    Args:
      grads: tree of shards, hop 1 done.
      groups: as for `shard`.
      donate: average in the given buffers; the old tree cannot be used again.
      exact: send the dtype of the shards instead of that of reductions, as parameters need it.

    Returns:
      The averaged tree, its pieces where those of `grads` lie; if r = 1 the given tree itself.
      Averaging twice changes nothing.

    Communication: one all-reduce per bucket over r replicas, 2(r - 1)/r of the shard's bytes; none
      if r = 1. Where `hop2` of the precision is a codec, an all-to-all and an all-gather of codes.

    Memory: a copy of the shards; none with `donate`.

    Raises:
      LeafError: a leaf is not a shard.
      DonatedError: the tree was donated earlier, or `donate` is given under autograd.

    Example:
      >>> groups = make_groups(1)
      >>> sync_replicas(shard([torch.ones(2)], groups), groups)[0].data
      tensor([1., 1.])

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.4.
    """
    return _mean_over_replicas("sync_replicas", grads, groups, donate=donate, exact=exact)


def _mean_over_replicas(
    verb: str, grads: Tree, groups: Any, *, donate: bool = False, exact: bool = False
) -> Tree:
    opened = open_shards(verb, grads, groups, root="grads")
    require_replicas(verb, opened.layout.homes)
    sent = {
        i: x for i, x in enumerate(opened.uses) if x.bucket.trainable and x.home.replicas.size > 1
    }
    if not sent:
        if opened.leaves:
            mark_reduced(opened.leaves, opened.layout.homes[0])
        return grads
    uses, data = list(sent.values()), opened.data
    if exact:
        uses = [replace(use, bucket=use.bucket.exact) for use in uses]

    def build(found: list[Tensor]) -> Tree:
        made = {i: new for i, (_, new) in zip(sent, deal(uses, found), strict=True)}
        for i in sent:
            if opened.uses[i].placed:
                made[i] = placed_like(made[i], opened.tensors(i))
        return opened.rebuild(made)

    if not donate:
        return build(apply("mean", uses, data))
    if needs_derivative(data):
        fix = "pass donate=False where gradients are differentiated"
        raise DonatedError("sync_replicas: donate=True under autograd", fix=fix)
    with Writing() as writing, torch.no_grad():
        writing.covers(grads, "grads", verb)
        note_write()
        out = build(run("mean in place", uses, [data[i] for use in uses for i in use.members]))
        writing.mark_donated(tree.flatten(out, is_leaf)[0])
    return out


# `cut`: full values that all ranks know become shards, and nothing is sent.


def cut(full: Tree, groups: Any, *, like: Tree) -> Tree:
    """Shards of full values that are the same on all ranks: each rank keeps its part.

    Args:
      full: tree of full tensors, equal on all ranks, as what was computed from gathered values is,
        or from a seed that ranks share. Dtypes are those of the shards, or of their computation. In
        the place of a tied leaf the tensor of its owner, an equal one, or None.
      groups: as for `shard`.
      like: the shards that say how to cut, as parameters do; only their layout is read.

    Returns:
      The tree of shards, frozen and replicated leaves too, in memory of its own. It is
      differentiable.

    Memory: this rank's shards.

    Raises:
      LeafError: a shape, dtype or device differs from the shard's, or a tied leaf has a value of
        its own.

    Example:
      >>> groups = make_groups(1)
      >>> params = shard({"w": torch.ones(3)}, groups)
      >>> shards.cut({"w": torch.arange(3.0)}, groups, like=params)["w"].data
      tensor([0., 1., 2.])
    """
    opened = open_shards("cut", like, groups, root="like")
    values = _checked(opened, full)
    out: list[Any] = list(opened.leaves)
    for i, leaf in enumerate(opened.leaves):
        if isinstance(leaf, Fixed) and leaf.bucket is None:
            out[i] = Fixed(values[i].detach().clone())
    for use in opened.uses:
        parts = _parts(use, [values[i] for i in use.members])
        for i, piece in zip(use.members, parts, strict=True):
            out[i] = type(out[i])(piece, use.bucket, out[i].slot)
    return opened.spec.unflatten(out)


def _parts(use: BucketUse, values: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of each member."""
    bucket, number, found = use.bucket, use.route.chunk, []
    live = needs_derivative(values) and bucket.trainable
    for piece, value in zip(use.by_member(pieces(bucket, number)), values, strict=True):
        flat = (value if live else value.detach()).reshape(-1)
        found.append(flat.narrow(0, piece.origin, piece.length).to(bucket.dtype))
    if live:  # copies, since a gather in a group of one gives views
        return linear_map("part", [use], *[x.clone() for x in found])
    chunk = found[0].new_zeros(bucket.chunk)
    views = use.by_member(pack.split_chunk(bucket, number, chunk))
    for view, value in zip(views, found, strict=True):
        view.copy_(value)
    if bucket.codes is not None and chunk.numel() and not chunk.is_meta:
        names = [""] * len(bucket.shapes)  # `_checked` has found all values to be finite
        return use.by_member(pack.coded_pieces(bucket, number, chunk, names))
    return views


def _checked(opened: Opened, full: Tree) -> list[Any]:
    """One full value per leaf of the tree; None for those that are tied or `Nothing`."""
    given = values_up_to(opened.spec, opened.given, full, "cut: full")
    paths = tree.paths(opened.given, "full", is_leaf)
    for path, leaf, x, home, owner in zip(
        paths, opened.leaves, given, opened.homes, opened.layout.owner, strict=True
    ):
        if isinstance(leaf, Tied):
            if not (x is None or _are_equal(x, given[owner])):
                text = f"cut: {path} is tied to {paths[owner]}, and has a value of its own"
                raise LeafError(text, fix="pass the same tensor for both, or None for this one")
        elif not isinstance(leaf, Nothing):
            wrong = _misfit(leaf, x)
            if not wrong and not x.is_meta and x.device != home.device:
                wrong = f"is on {x.device}, expected {home.device}"
            if wrong:
                fix = "pass the full tensor, on the device of the groups"
                raise LeafError(f"cut: {path} {wrong}", fix=fix)
            if leaf.bucket is not None and leaf.bucket.codes is not None and not x.is_meta:
                pack.check_finite(f"cut: {path}", leaf.bucket.codes, x)
    return given


def _are_equal(x: Any, y: Any) -> bool:
    if x is y or same_tensor(x, y):
        return True
    plain = all(isinstance(each, Tensor) and not _torch.is_wrapped(each) for each in (x, y))
    return plain and torch.equal(x, y)


# `map`: an elementwise function of this rank's pieces.


def map(fn: Callable[..., Tensor], shards: Tree, *rest: Tree) -> Tree:
    """Apply an elementwise function to every trained leaf of a tree of shards.

    Each rank calls it with its own pieces, so it must not mix elements: `x / x.norm()` would divide
    by the norm of a piece. `optim.leaf_norms` gives norms of whole leaves, to be passed as `rest`.
    So pass every number that is differentiated: its derivative is the sum over all pieces, of which
    a rank that only closes over it would see its own.

    Args:
      fn: `fn(piece, *others)` gives a tensor like `piece`: 1D, maybe empty, of the same dtype.
      shards: tree of shards. Frozen, replicated and tied leaves stay as they are.
      rest: trees of the same structure; in place of a shard they may have a number or a tensor of
        one element, which `fn` gets as it is. A single number serves all leaves.

    Returns:
      The tree with what `fn` gave, in memory of its own if `fn` made new tensors. It is
      differentiated as `fn` is. What lay in files or on the host does so again, except where a
      derivative is asked for, which would end at a file.

    Raises:
      LeafError: a leaf of `shards` is not a shard, or `fn` gave something else than a tensor like
        the piece.
      LeafError: `shards` is None, or a tree of `rest` has another structure, or leaves
        that are cut in another way.

    Example:
      >>> groups = make_groups(1)
      >>> params = shard({"b": torch.ones(2), "w": torch.ones(2)}, groups)
      >>> shards.map(lambda x, y, c: x + c * y, params, params, {"b": 1.0, "w": 2.0})["w"].data
      tensor([3., 3.])
    """
    leaves, spec = tree.flatten(shards, is_leaf)
    check_leaves("map", shards, leaves, "shards")
    others = [_matched(shards, leaves, spec, other, f"rest[{i}]") for i, other in enumerate(rest)]
    trained = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Sharded)]
    own, made = [leaves[i].data for i in trained], list[Tensor]()
    for i, piece in zip(trained, own, strict=True):
        found: Any = fn(piece, *(other[i] for other in others))
        same = isinstance(found, Tensor) and found.shape == piece.shape
        if not same or (found.dtype, found.device) != (piece.dtype, piece.device):
            path = tree.paths(shards, "shards", is_leaf)[i]
            text = f"map: the function gave {_kind(found)} for {path}"
            fix = "let it give one element for each, and cast it back with .to(piece.dtype)"
            raise LeafError(text, [f"expected {_kind(piece)}"], fix)
        made.append(found)
    out: list[Any] = list(leaves)
    for i, data in zip(trained, placed_like(made, own), strict=True):
        out[i] = Sharded(data, leaves[i].bucket, leaves[i].slot)
    mark_reduced(out, reduction_groups(leaves))
    return spec.unflatten(out)


def _matched(shards: Tree, leaves: Sequence[Any], spec: Any, other: Tree, root: str) -> list[Any]:
    """One value per leaf of the tree: a piece, a number, or a tensor of one element."""
    given = [other] * len(leaves)
    if not _is_number(other):
        given = values_up_to(spec, shards, other, f"map: {root}")
    for i, (leaf, value) in enumerate(zip(leaves, given, strict=True)):
        if not isinstance(leaf, Sharded):
            continue
        if isinstance(value, Sharded) and (value.bucket, value.slot) == (leaf.bucket, leaf.slot):
            given[i] = value.data
        elif _is_number(value):
            given[i] = as_part(value, leaf.bucket.parts)
        else:
            what = f"{value}, which is cut in another way"
            what = what if isinstance(value, Sharded) else _kind(value)
            fix = "pass shards that were sharded together, or one number per leaf"
            raise LeafError(f"map: {tree.paths(shards, root, is_leaf)[i]} is {what}", fix=fix)
    return given


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"a tensor of {tuple(value.shape)}, {dtype_name(value.dtype)}{where}"
