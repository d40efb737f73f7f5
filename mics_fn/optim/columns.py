"""Elementwise work on trees of shards as work on a few long tensors.

If all trees have the pieces of a run in one stretch of memory, a column is a whole run; see
[Note: runs] in `runs`. Otherwise columns are single pieces. That is so in groups of one rank, where
gradients lie wherever autograd made them.

[Note: dense] In groups of one rank a gradient is what autograd gave: expanded, strided, negated as
a view. torch's fused kernels, and whoever looks at memory, take a tensor for `numel` numbers in a
row. So columns are dense: whatever is not is copied first.
"""

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.errors import OptimizerError, message
from mics_fn.offload import is_coded
from mics_fn.optim.column import Column, updating
from mics_fn.optim.coming import Coming
from mics_fn.optim.elsewhere import Elsewhere, far_runs
from mics_fn.optim.flat import FlatShards, Unpacked
from mics_fn.optim.held import Held, held_of, in_place, readable
from mics_fn.optim.runs import (
    any_requires_grad,
    copied,
    is_in_chunk,
)
from mics_fn.shards import closed_after, needs_derivative, note_write
from mics_fn.tree import Tree


class Columns(NamedTuple):
    """Several trees as columns.

    Args:
      blocks: the columns, of which those of one block are here together: write them before the next
        block is asked for. The tensors of a column are those of the targets and then of the reads.
        Columns cover every element once, and apart from that only padding between pieces.
      live: whether derivatives may be asked of what is written.
      targets: gives the targets in new nodes, once the columns are written: `Unpacked` trees, and
        `FlatShards`.
    """

    blocks: Iterable[list[Column]]
    live: bool
    targets: Callable[[], list[Any]]


def columns(
    targets: Sequence[Tree],
    reads: Sequence[Tree] = (),
    keys: Sequence[Hashable] | None = None,
    *,
    by: Sequence[Any] = (),
    donate: bool = False,
) -> Columns:
    """Corresponding pieces of several trees, joined to as few long tensors as their memory allows.

    Args:
      targets: trees of shards, `Unpacked` or not, or `FlatShards`; columns are to be written to,
        and are copies.
      reads: trees that are only read, or a single one that is `Coming`. All trees have the leaves
        of the first one, in its order.
      keys: one per piece; only neighbours with equal keys are joined. Default: all are equal.
      by: what else results depend on and may be differentiated by, such as a learning rate.
      donate: write to the targets themselves; to copies only where pieces are not dense, or overlap
        with other pieces of any target.

    Returns:
      `Columns`. Where `needs_derivative` holds, or pieces have batch dimensions, they are single
      pieces, and the copies are differentiable.

    Memory: a copy of the targets, none with `donate`.

    Raises:
      OptimizerError: `donate` where a derivative is asked for.
      TreeError: the trees do not have the same leaves.
    """
    held, n = held_of([*targets, *reads]), len(targets)
    live = needs_derivative(by) or (
        torch.is_grad_enabled() and any(any_requires_grad(each.tensors) for each in held)
    )
    if live and any(is_coded(x) for each in held for x in each.wholes):
        fix = "shard without state=, or call it under torch.no_grad()"
        text = "opt_step: a derivative is asked for, and moments are kept as codes"
        raise OptimizerError(message(text, fix=fix))
    if live and donate:
        fix = "pass donate=False, or call it under torch.no_grad()"
        text = "opt_step: donate=True where a derivative is asked for"
        raise OptimizerError(message(text, fix=fix))
    (coming,) = [x for x in reads if isinstance(x, Coming)] or [None]
    if live or any(each.batched for each in held):
        if coming is not None:
            return columns(targets, [coming.settled()], keys, by=by, donate=donate)
        done, found = _by_leaf(held, n, keys, by)
        blocks = [found]
    else:
        held = [each.look() for each in held]
        far = far_runs(held[:n])
        done = in_place(held[:n]) if donate else _copies(held[:n], far)
        if any(far):
            blocks = closed_after(Elsewhere(done, held[n:], coming, keys, donate).blocks())
        elif coming is None:
            blocks = _all(done, held[n:], keys, donate)
        else:
            blocks = closed_after(_as_they_arrive(done, held[n], coming, keys, donate))
    return Columns(blocks, live, lambda: [each.renewed() for each in done])


def map_columns(fn: Callable[..., None], target: Tree, *rest: Tree, donate: bool = False) -> Tree:
    """Apply an in-place elementwise function to a tree of shards.

    Args:
      fn: called as `fn(target, *rest)` with corresponding long tensors; it writes its result into
        the first.
      target: tree of shards.
      rest: trees of the same structure, read only.
      donate: write into `target` itself instead of a copy.

    Returns:
      The tree with the results.

    Memory: as `columns`.
    """
    work = columns([target], rest, donate=donate)
    for block in work.blocks:
        for column in block:
            with updating([column]):
                fn(*column.tensors)
    return _closed(work.targets()[0])


def fresh(shards: Tree) -> Tree:
    """A copy in new memory, or in new parts of the files that it lies in.

    Where the tree holds all leaves of a bucket, its chunk is copied as a whole, so that it stays a
    chunk. Otherwise runs are copied, and nothing of what the tree lacks.
    """
    if _torch.inside_torch_func():
        return tree.map_leaves(torch.clone, shards)
    (held,) = held_of([shards])
    return _closed(held.look().change(copied).renewed())


def in_chunks(shards: Tree) -> Tree:
    """The tree with copies of everything that does not lie in a chunk of its own.

    In groups of one rank a gradient is a view of what autograd gave, which may belong to others.
    """
    (held,) = held_of([shards])
    held = held.look().change(lambda run, x: x if is_in_chunk(run, x) else copied(run, x))
    return _closed(held.renewed())


def _closed(value: Unpacked | FlatShards) -> Tree:
    return value.closed() if isinstance(value, Unpacked) else value


def _by_leaf(
    held: Sequence[Held], n: int, keys: Sequence[Hashable] | None, by: Sequence[Any]
) -> tuple[list[Held], list[Column]]:
    """Columns of single pieces, for which nobody looks at memory; the first `n` are targets."""
    given = [x.given.pieces() if isinstance(x.given, FlatShards) else x.pieces for x in held]
    others = [value for value in by if isinstance(value, Tensor)]
    rows = list(zip(*given, strict=True))
    made = [[_livecopied(x, [*row, *others]) for x in row[:n]] for row in rows]
    found = [
        Column(keys[i] if keys else None, (*new, *row[n:]))
        for i, (new, row) in enumerate(zip(made, rows, strict=True))
    ]
    apart = [None] * len(held[0].runs)
    done = [
        each._replace(pieces=[new[k] for new in made], wholes=apart)
        for k, each in enumerate(held[:n])
    ]
    return done, found


def _livecopied(piece: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A copy to write to in place; batched under vmap where any of the others is."""
    copy = piece.clone()
    if not _torch.inside_torch_func():
        return copy
    for other in others:
        never = torch.zeros_like(other, dtype=torch.bool)
        copy = torch.where(never, other.to(copy.dtype), copy)
    return copy


def _columns_of_run(
    every: Sequence[Held], r: int, keys: Sequence[Hashable] | None
) -> Iterator[Column]:
    run, wholes = every[0].runs[r], [each.wholes[r] for each in every]
    if any(whole is None for whole in wholes):
        singles = zip(run.laid, *(each.single(r) for each in every), strict=True)
        for laid, *tensors in singles:
            yield Column(keys[laid.index] if keys else None, tuple(tensors), run.bucket)
    elif keys is None and run.numel:
        yield Column(None, tuple(wholes), run.bucket)  # pyright: ignore[reportArgumentType]
    elif keys is not None:
        for key, near in groupby(run.laid, lambda laid: keys[laid.index]):
            first, *_, last = [*near] * 2
            length = last.start + last.length - first.start
            cut = (x.narrow(0, first.start, length) for x in wholes if x is not None)
            yield Column(key, tuple(cut), run.bucket)


def _copies(held: Sequence[Held], far: Sequence[Sequence[int]]) -> list[Held]:
    """Trees to be written to in the place of others; what lies elsewhere is left for later."""
    return [
        each.change(copied, [r for r, others in enumerate(far) if k not in others])
        for k, each in enumerate(held)
    ]


def _all(
    targets: Sequence[Held],
    reads: Sequence[Held],
    keys: Sequence[Hashable] | None,
    donate: bool,
) -> Iterator[list[Column]]:
    """The columns of all runs."""
    every = [*targets, *readable(reads, targets)]
    found = [x for r in range(len(targets[0].runs)) for x in _columns_of_run(every, r, keys)]
    if donate:
        note_write()
    yield found


def _as_they_arrive(
    targets: Sequence[Held],
    grads: Held,
    coming: Coming,
    keys: Sequence[Hashable] | None,
    donate: bool,
) -> Generator[list[Column]]:
    """The columns of each run, once the gradients that it needs have arrived.

    What arrives from other ranks has memory of its own. A gradient that arises here may lie in that
    of any parameter; but those are here at once, and copied before anything is written.
    """
    left, there = dict(enumerate(grads.runs)), set[int]()
    coming.arrival.first()
    for numbers in coming.arriving():
        there.update(numbers)
        ready = [r for r, run in left.items() if there.issuperset(run.members)]
        every = [*targets, *readable([grads.arrived(ready)], targets, ready)]
        for r in ready:
            del left[r]
        found = [x for r in ready for x in _columns_of_run(every, r, keys)]
        if donate and found:
            note_write()
        yield found
        coming.drop(i for r in ready for i in grads.runs[r].members)
