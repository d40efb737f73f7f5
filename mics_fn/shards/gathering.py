"""`gather` and `unshard`: shards become full tensors. For the gradient see [Note: adjoint]."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from mics_fn.shards.arguments import GroupsTree
from mics_fn.shards.elsewhere import brought
from mics_fn.shards.leaf import Fixed, Leaf, Sharded
from mics_fn.shards.linear import Started, apply, put, start
from mics_fn.shards.opened import BucketUse, open_shards
from mics_fn.shards.pack import refuse_sparse
from mics_fn.tree import Tree

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
      hierarchy: the route: `groups.hierarchy`, `groups.flat`, or `groups`; or a prefix pytree of
        these, or a function from path to one.

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
      compare a tree that is new to the groups once (32 bytes).

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
    """A tree whose transfer was started; `wait()` gives it.

    Args:
      started: the transfers.
      build: makes the tree of their results, one argument for each.

    Communication: on gloo `wait()` starts the levels that remain; see the verb that made this.

    Example:
      >>> groups = make_groups(1)
      >>> pending = shards.start_gather(shard({"w": torch.ones(2)}, groups), groups)
      >>> pending.wait()["w"]
      tensor([1., 1.])
    """

    def __init__(self, started: Sequence[Started], build: Callable[..., Tree]) -> None:
        self._started, self._build = started, build
        self._tree: Tree = None
        self._done = False

    def wait(self) -> Tree:
        """The tree. All ranks must wait for their trees in the same order.

        A second call gives the same tree and does not communicate.
        """
        if not self._done:
            self._tree = self._build(*(started.wait() for started in self._started))
            self._done, self._started = True, ()
        return self._tree


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
    data, far = opened.data, [use for use in opened.uses if use.far]
    started = start("gather", "gather", far, data)

    def build(found: list[Tensor]) -> Tree:
        full = _near(opened.uses, data)
        put(full, far, found)
        return opened.build(full)

    return PendingTree([started], build)


def _near(uses: Sequence[BucketUse], data: Sequence[Any]) -> list[Any]:
    """The data of all leaves, viewed as full tensors where one rank holds the whole bucket."""
    full = list(data)
    for use in uses:
        if not use.far:
            for i, shape in zip(use.index, use.bucket.shapes, strict=True):
                if i is not None:
                    piece = data[i]
                    if use.away:
                        piece = brought(piece, use.hierarchy.device, use.bucket.compute)
                    piece = piece.to(use.bucket.compute)
                    batch = piece.shape[:-1]
                    full[i] = piece.reshape((*batch, *shape) if batch else shape)
                    if full[i].requires_grad and not full[i].is_leaf:  # it will be differentiated
                        full[i].register_hook(refuse_sparse)
    return full


def _gathered(data: Sequence[Any], uses: Sequence[BucketUse]) -> list[Any]:
    """One full tensor per leaf of the tree, from the data of each leaf."""
    far = [use for use in uses if use.far]
    trained = [use for use in far if use.bucket.trainable]
    frozen = [use for use in far if not use.bucket.trainable]
    full = _near(uses, data)
    put(full, trained, apply("gather", trained, data))
    with torch.no_grad():  # frozen leaves get no gradient
        put(full, frozen, apply("gather", frozen, data))
    return full


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
