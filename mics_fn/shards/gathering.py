"""`gather`: shards become full tensors. See [Note: adjoint] in `shards.linear` for its gradient."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mics_fn.shards.leaf import Fixed, Leaf, Tied, owner_index
from mics_fn.shards.linear import Started, apply, put, start
from mics_fn.shards.opened import BucketUse, read_shards
from mics_fn.shards.pack import refuse_sparse
from mics_fn.tree import Tree


class PendingTree:
    """A tree under way: `wait()` gives it.

    Communication: what was started; on gloo `wait()` issues the levels that are left.
    """

    def __init__(self, started: Sequence[Started], build: Callable[..., Tree]) -> None:
        self._started, self._build = started, build
        self._tree: Tree = None
        self._done = False

    def wait(self) -> Tree:
        """The tree. All ranks must wait for their trees in the same order; again is free."""
        if not self._done:
            self._tree = self._build(*(started.wait() for started in self._started))
            self._done, self._started = True, ()
        return self._tree


def start_gather(shards: Tree, hierarchy: Any) -> PendingTree:
    """Start a gather and go on; `wait()` gives the full tensors.

    Args:
      shards: as for `gather`; they must not change until `wait()`.
      hierarchy: as for `gather`.

    Returns:
      A `PendingTree`.

    Communication: as `gather`. On gloo the outermost level runs meanwhile, the others in `wait()`;
      on CUDA all of them run on a side stream, and `wait()` does not stop the host.

    Memory: as `gather`.

    Raises:
      LeafError: inside torch.func, or where a shard requires a gradient: it has no derivative.
      Else as `gather`.

    Example:
      >>> groups = make_groups(1)
      >>> start_gather(shard([torch.ones(2)], groups), groups).wait()
      [tensor([1., 1.])]
    """
    leaves, spec, uses = read_shards("gather", shards, hierarchy)
    data = [None if isinstance(leaf, Tied) else leaf.data for leaf in leaves]
    far = [use for use in uses if use.far]
    started = start("gather", "gather", far, data)
    owner = owner_index(leaves)

    def build(found: list[Tensor]) -> Tree:
        full = _near(uses, data)
        put(full, far, found)
        return spec.unflatten([full[owner[i]] for i in range(len(leaves))])

    return PendingTree([started], build)


def _near(uses: Sequence[BucketUse], data: Sequence[Any]) -> list[Any]:
    """Full tensors as views, where a group of one rank holds everything; other data as it is."""
    full = list(data)
    for use in uses:
        if not use.far:
            for i, shape in zip(use.index, use.bucket.shapes, strict=True):
                if i is not None:
                    piece = data[i].to(use.bucket.compute)
                    batch = piece.shape[:-1]
                    full[i] = piece.reshape((*batch, *shape) if batch else shape)
                    if full[i].requires_grad and not full[i].is_leaf:  # it is differentiated
                        full[i].register_hook(refuse_sparse)
    return full


def gather_uses(leaves: Sequence[Leaf], uses: Sequence[BucketUse]) -> list[Any]:
    data: list[Any] = [None if isinstance(leaf, Tied) else leaf.data for leaf in leaves]
    far = [use for use in uses if use.far]
    trained = [use for use in far if use.bucket.trainable]
    frozen = [use for use in far if not use.bucket.trainable]
    full = _near(uses, data)
    put(full, trained, apply("gather", trained, data))
    with torch.no_grad():  # frozen leaves are fetched, never reduced
        put(full, frozen, apply("gather", frozen, data))
    return full


def unshard(shards: Tree, hierarchy: Any) -> Tree:
    """Gather to plain tensors of their own memory, one bucket at a time, keeping nothing.

    Args:
      shards: tree of shards.
      hierarchy: as for `gather`.

    Returns:
      The tree with full tensors in the dtypes of the shards; each has its own storage, tied leaves
      are one tensor.

    Communication: as `gather`.

    Memory: the full tree and one bucket.

    Raises: as `gather`.

    Example:
      >>> groups = make_groups(1)
      >>> unshard(shard([torch.arange(3.0)], groups), groups.hierarchy)
      [tensor([0., 1., 2.])]
    """
    leaves, spec, uses = read_shards("unshard", shards, hierarchy)
    uses = [replace(use, bucket=use.bucket.exact) for use in uses]
    out: list[Any] = [leaf.data.clone() if isinstance(leaf, Fixed) else None for leaf in leaves]
    for use in uses:
        full = gather_uses(leaves, [use])
        for i in use.members:
            out[i] = full[i].clone(memory_format=torch.contiguous_format)
    owner = owner_index(leaves)
    return spec.unflatten([out[owner[i]] for i in range(len(leaves))])
