"""Both hops of the gradients, which are means: hop 1 in partition groups, hop 2 over replicas."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import checks, tree
from mics_fn.collectives import needs_derivative
from mics_fn.errors import DonatedError, LeafError, TreeError, message
from mics_fn.offload import laid_like
from mics_fn.shards.arguments import check_leaves, require_tree
from mics_fn.shards.gathering import PendingTree
from mics_fn.shards.leaf import Sharded, Writing, dtype_name, is_leaf, mark_reduced, note_write
from mics_fn.shards.linear import apply, deal, put, replica_mean, start
from mics_fn.shards.opened import BucketUse, Opened, open_shards
from mics_fn.shards.pack import dense
from mics_fn.shards.sharding import layout_of
from mics_fn.tree import Tree


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
      TreeError: the structure or a shape differs from `like`.
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
        owed = _owed("reduce_grads", grads, groups, like)
        grads = _settled(owed, apply("scatter", owed.far, owed.full))
    return _averaged("reduce_grads", grads, groups)


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
    owed = _owed("scatter_grads", grads, groups, like)
    return _settled(owed, apply("scatter", owed.far, owed.full))


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
    owed = _owed("start_scatter_grads", grads, groups, like)
    started = start("scatter_grads", "scatter", owed.far, owed.full)
    return PendingTree([started], lambda found: _settled(owed, found))


class _Owed(NamedTuple):
    """Gradients by what they need: hop 1, or nothing before hop 2."""

    spec: Any
    out: list[Any]  # the leaves that are done; None if they need hop 1
    far: list[BucketUse]  # the buckets that need it
    full: list[Tensor | None]


def _owed(verb: str, grads: Tree, groups: Any, like: Tree | None) -> _Owed:
    """Match gradients with the layout of their parameters, and finish those of local buckets."""
    require_tree(verb, grads, groups, "grads")
    if like is not None:
        check_leaves(verb, like, tree.flatten(like, is_leaf)[0], "like")
    given = tree.flatten(grads, is_leaf)[0]
    if any(isinstance(grad, Tensor) and grad.layout is not torch.strided for grad in given):
        grads = tree.map_leaves(
            lambda x: dense(x) if isinstance(x, Tensor) else x, grads, is_leaf=is_leaf
        )
    if like is None:
        like = layout_of(verb, "grads", grads, groups)
    opened = open_shards(verb, like, groups, root="grads")
    given, slots = _up_to(opened, grads), opened.leaves
    full = _full_grads(opened, given)
    out: list[Any] = [None if isinstance(slot, Sharded) else slot for slot in slots]
    far = []
    for use in opened.trained:
        done = [i for i in use.members if isinstance(given[i], Sharded)]
        if done and len(done) < len(use.members):
            text = f"{verb}: {opened.path(done[0])} is reduced already, others of its bucket"
            text += " are not"
            raise TreeError(message(text, fix="reduce a bucket's gradients together"))
        for i in done:
            out[i] = given[i]
        if not done and use.far:
            far.append(replace(use, verb=verb))
        elif not done:
            for i in use.members:
                out[i] = _local(full[i], slots[i], use.home.device)  # pyright: ignore
    return _Owed(opened.spec, out, far, full)


def _settled(owed: _Owed, found: Sequence[Tensor]) -> Tree:
    """The tree of shards, with the results of hop 1."""
    out = list(owed.out)
    pieces: list[Any] = [None] * len(out)
    put(pieces, owed.far, found)
    for use in owed.far:
        for slot, i in enumerate(use.index):
            if i is not None:
                out[i] = Sharded(pieces[i], use.bucket, slot)
    return owed.spec.unflatten(out)


def _up_to(opened: Opened, grads: Tree) -> list[Any]:
    """The gradients in the order of the parameters; None for a leaf without one."""
    try:
        return opened.spec.flatten_up_to(grads)
    except ValueError:
        where = tree.first_mismatch(opened.given, grads, "grads", is_leaf) or "structure"
        raise TreeError(
            message(
                f"{opened.verb}: the gradients' tree differs from the parameters'",
                [f"first difference: {where}"],
                fix="differentiate with respect to the tree that was sharded",
            )
        ) from None


def _full_grads(opened: Opened, given: Sequence[Any]) -> list[Tensor | None]:
    """One full gradient per leaf, checked; those of tied leaves are added to their owner's."""
    full: list[Tensor | None] = [None] * len(given)
    for i, (grad, owner) in enumerate(zip(given, opened.owner, strict=True)):
        slot = opened.leaves[owner]
        if grad is None or is_leaf(grad):
            continue
        if not (isinstance(slot, Sharded) and _fits(grad, slot)):
            _check_grad(f"{opened.verb}: {opened.path(i)}", slot, grad)
        if isinstance(slot, Sharded):
            before = full[owner]
            full[owner] = grad if before is None else before + grad
    return full


def _fits(grad: Any, slot: Sharded) -> bool:
    """Whether a gradient has a leaf's shape and dtype; `_check_grad` examines those that do not."""
    if not isinstance(grad, Tensor) or grad.shape != slot.shape:
        return False
    return grad.dtype is slot.dtype or grad.dtype is slot.bucket.compute


def _check_grad(what: str, slot: Any, grad: Any) -> None:
    """Raise LeafError or TreeError unless a value can be the gradient of a leaf.

    Args:
      what: the verb and the path, for errors.
      slot: the leaf.
      grad: the value.
    """
    if not isinstance(grad, Tensor):
        text = f"{what} is {type(grad).__name__}, expected torch.Tensor"
        raise LeafError(message(text, fix="give a full tensor, or None where there is no gradient"))
    if not slot.dtype.is_floating_point:
        text = f"{what}: a gradient for a leaf of {dtype_name(slot.dtype)}"
        raise LeafError(message(text, fix="only float leaves have gradients: give None there"))
    if tuple(grad.shape[grad.ndim - len(slot.shape) :]) != slot.shape:
        text = f"{what}: shape {tuple(grad.shape)}, expected {slot.shape}"
        raise TreeError(message(text, fix="pass the gradient of the full parameter"))
    allowed = dict.fromkeys((slot.dtype, slot.bucket.compute if slot.bucket else slot.dtype))
    if grad.dtype not in allowed:
        names = " or ".join(map(dtype_name, allowed))
        text = f"{what}: {dtype_name(grad.dtype)}, expected {names}"
        raise LeafError(message(text, fix=f"cast it with .to(torch.{dtype_name(slot.dtype)})"))


def _local(grad: Tensor | None, slot: Sharded, device: torch.device) -> Sharded:
    """Hop 1 in a group of one rank, which is the gradient itself."""
    numel = slot.bucket.numels[slot.slot]
    if grad is None:
        flat = torch.zeros(numel, dtype=slot.dtype, device=device)
    else:
        flat = grad.reshape((*grad.shape[: grad.ndim - len(slot.shape)], numel)).to(slot.dtype)
    return Sharded(flat, slot.bucket, slot.slot)


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
    return _averaged("sync_replicas", grads, groups, donate=donate, exact=exact)


def _averaged(
    verb: str, grads: Tree, groups: Any, *, donate: bool = False, exact: bool = False
) -> Tree:
    checks.flag(verb, "donate", donate)
    checks.flag(verb, "exact", exact)
    opened = open_shards(verb, grads, groups, root="grads")
    indexes = [
        i for i, use in enumerate(opened.uses) if use.bucket.trainable and use.replicas.size > 1
    ]
    if not indexes:
        if opened.leaves:
            mark_reduced(opened.leaves, opened.homes[0])
        return grads
    uses = [replace(opened.uses[i], verb=verb) for i in indexes]
    if exact:
        uses = [replace(use, bucket=use.bucket.exact) for use in uses]
    data = opened.data
    if donate and needs_derivative(data):
        text = "sync_replicas: donate=True under autograd"
        fix = "pass donate=False where gradients are differentiated"
        raise DonatedError(message(text, fix=fix))
    with Writing() as writing, torch.no_grad() if donate else nullcontext():
        if donate:
            writing.covers(grads, "grads", verb)
            note_write()
            members = [data[i] for use in uses for i in use.members]
            found = replica_mean(uses, members, in_place=True).wait()
        else:
            found = apply("mean", uses, data)
        dealt = zip(indexes, deal(uses, found), strict=True)
        out = opened.rebuild({i: laid_like(new, opened.held(i)) for i, (_, new) in dealt})
        if donate:
            writing.give_away(tree.flatten(out, is_leaf)[0])
    return out
