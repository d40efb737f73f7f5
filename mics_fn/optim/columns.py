"""Elementwise work on trees of shards as work on a few long tensors.

If all trees have the pieces of a run in one stretch of memory, a column is a whole run; see
[Note: runs] in `runs`. Otherwise columns are single pieces. That is so in groups of one rank, where
gradients lie wherever autograd made them.

[Note: dense] In groups of one rank a gradient is what autograd gave: expanded, strided, negated as
a view. torch's fused kernels, and whoever looks at memory, take a tensor for `numel` numbers in a
row. So columns are dense: whatever is not is copied first.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.collectives import finish_readers
from mics_fn.errors import OptimizerError, TreeError, message
from mics_fn.optim.flat import FlatShards, Unpacked, unpacked, with_wholes
from mics_fn.optim.runs import (
    Run,
    any_requires_grad,
    copied,
    is_dense,
    is_in_chunk,
    joined,
    split,
    whole_run,
)
from mics_fn.shards import needs_derivative
from mics_fn.tree import Tree


class Column(NamedTuple):
    """Corresponding tensors of several trees, each a run of neighbouring pieces or a single one."""

    key: Hashable
    tensors: tuple[Tensor, ...]


class Columns(NamedTuple):
    """Several trees as columns.

    Args:
      found: the columns; the tensors of each are those of the targets and then of the reads. They
        cover every element once, and apart from that only padding between pieces.
      live: whether derivatives may be asked of what is written.
      targets: gives the targets in new nodes, once the columns are written: `Unpacked` trees, and
        `FlatShards`.
    """

    found: list[Column]
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
      reads: trees that are only read. All trees have the leaves of the first one, in its order.
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
    held, n = _held([*targets, *reads]), len(targets)
    live = needs_derivative(by) or (
        torch.is_grad_enabled() and any(any_requires_grad(each.tensors) for each in held)
    )
    if live and donate:
        fix = "pass donate=False, or call it under torch.no_grad()"
        text = "opt_step: donate=True where a derivative is asked for"
        raise OptimizerError(message(text, fix=fix))
    if live or any(each.batched for each in held):
        done, found = _by_leaf(held, n, keys, by)
    else:
        held = [each.look() for each in held]
        done = _in_place(held[:n]) if donate else [each.change(copied) for each in held[:n]]
        every = [*done, *_readable(held[n:], done)]
        found = [x for r in range(len(held[0].runs)) for x in _columns_of_run(every, r, keys)]
    return Columns(found, live, lambda: [each.renewed() for each in done])


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
    for column in work.found:
        fn(*column.tensors)
    return _closed(work.targets()[0])


def fresh(shards: Tree) -> Tree:
    """A copy in new memory.

    Where the tree holds all leaves of a bucket, its chunk is copied as a whole, so that it stays a
    chunk. Otherwise runs are copied, and nothing of what the tree lacks.
    """
    if _torch.inside_torch_func():
        return tree.map_leaves(torch.clone, shards)
    (held,) = _held([shards])
    return _closed(held.look().change(copied).renewed())


def in_chunks(shards: Tree) -> Tree:
    """The tree with copies of everything that does not lie in a chunk of its own.

    In groups of one rank a gradient is a view of what autograd gave, which may belong to others.
    """
    (held,) = _held([shards])
    held = held.look().change(lambda run, x: x if is_in_chunk(run, x) else copied(run, x))
    return _closed(held.renewed())


def _closed(value: Unpacked | FlatShards) -> Tree:
    return value.closed() if isinstance(value, Unpacked) else value


class _Held(NamedTuple):
    """A tree on its way through a step: the pieces of each run as one tensor, or one by one."""

    given: Unpacked | FlatShards
    runs: tuple[Run, ...]
    pieces: list[Tensor]  # all of the tree; none where it is kept as runs
    wholes: list[Tensor | None]  # by run

    @property
    def tensors(self) -> list[Any]:
        """What the tree was given as: its pieces or its runs."""
        return self.pieces or self.wholes

    @property
    def batched(self) -> bool:
        """Whether it is kept as runs with batch dimensions, whose pieces are not rows of memory."""
        return isinstance(self.given, FlatShards) and any(
            run.bucket is not None and whole is not None and whole.ndim > 1
            for run, whole in zip(self.runs, self.wholes, strict=True)
        )

    def look(self) -> "_Held":
        """See which runs lie in one stretch of memory."""
        if isinstance(self.given, FlatShards):
            return self
        return self._replace(wholes=[whole_run(run, self.pieces) for run in self.runs])

    def parts(self, r: int) -> list[Tensor]:
        """What a run consists of: one tensor, or its pieces that are not empty."""
        whole = self.wholes[r]
        if whole is not None:
            return [whole] if whole.numel() else []
        return [self.pieces[i] for i, _, _ in self.runs[r].laid]

    def single(self, r: int) -> list[Tensor]:
        """The pieces of a run that are not empty."""
        whole, run = self.wholes[r], self.runs[r]
        if isinstance(self.given, FlatShards) and whole is not None:
            found = self.given.cut(r, whole)
        else:
            found = [self.pieces[i] for i, _, _ in run.laid]
        return [x.detach() for x in found] if any_requires_grad(found) else found

    def change(self, fn: Callable[[Run, Tensor], Tensor]) -> "_Held":
        """The same with `fn(run, x)` in place of each part x of each run, empty pieces too."""
        pieces, wholes = list(self.pieces), list(self.wholes)
        for r, run in enumerate(self.runs):
            old = wholes[r]
            if old is None:
                for i in run.members:
                    pieces[i] = fn(run, pieces[i])
                continue
            new = wholes[r] = fn(run, old)
            if pieces and new is not old:
                for i, piece in zip(run.members, split(run, new), strict=True):
                    pieces[i] = piece
        return self._replace(pieces=pieces, wholes=wholes)

    def renewed(self) -> Unpacked | FlatShards:
        """What it holds, in new nodes."""
        if isinstance(self.given, Unpacked):
            return self.given.with_pieces(self.pieces)
        wholes = [
            joined(run, [self.pieces[i] for i in run.members]) if whole is None else whole
            for run, whole in zip(self.runs, self.wholes, strict=True)
        ]
        return with_wholes(self.given.layout, wholes, self.given.cuts)


def _held(trees: Sequence[Tree]) -> list[_Held]:
    found: list[_Held] = []
    for shards in trees:
        if isinstance(shards, FlatShards):
            runs = shards.layout.runs
            if found and runs is not found[0].runs and runs != found[0].runs:
                fix = "pass the optimizer's state of these parameters"
                raise TreeError(message("opt_step: the state is of another tree", fix=fix))
            found.append(_Held(shards, runs, [], list(shards.wholes)))
            continue
        given = unpacked(shards)
        runs = found[0].runs if found else given.runs()
        if len(given.pieces) != sum(len(run.members) for run in runs):
            raise TreeError(message("opt_step: trees of different numbers of leaves"))
        found.append(_Held(given, runs, given.pieces, [None] * len(runs)))
    return found


def _by_leaf(
    held: Sequence[_Held], n: int, keys: Sequence[Hashable] | None, by: Sequence[Any]
) -> tuple[list[_Held], list[Column]]:
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
    every: Sequence[_Held], r: int, keys: Sequence[Hashable] | None
) -> Iterator[Column]:
    run, wholes = every[0].runs[r], [each.wholes[r] for each in every]
    if any(whole is None for whole in wholes):
        singles = zip(run.laid, *(each.single(r) for each in every), strict=True)
        for laid, *tensors in singles:
            yield Column(keys[laid.index] if keys else None, tuple(tensors))
    elif keys is None and run.numel:
        yield Column(None, tuple(wholes))  # pyright: ignore[reportArgumentType]
    elif keys is not None:
        for key, near in groupby(run.laid, lambda laid: keys[laid.index]):
            first, *_, last = [*near] * 2
            length = last.start + last.length - first.start
            cut = (x.narrow(0, first.start, length) for x in wholes if x is not None)
            yield Column(key, tuple(cut))


def _in_place(held: Sequence[_Held]) -> list[_Held]:
    """Trees to be written to as they are, but for copies of what is not dense or overlaps."""
    parts = [x for each in held for r in range(len(each.runs)) for x in each.parts(r)]
    finish_readers(parts)
    spans = sorted(
        (_torch.storage_id(x), int(x.storage_offset()), x.numel()) for x in parts if is_dense(x)
    )
    odd = {a[0] for a, b in pairwise(spans) if a[0] == b[0] and b[1] < a[1] + a[2]}

    def settled(run: Run, x: Tensor) -> Tensor:
        stays = is_dense(x) and not (odd and _torch.storage_id(x) in odd)
        return x if stays else copied(run, x)

    return [each.change(settled) for each in held]


def _readable(held: Sequence[_Held], targets: Sequence[_Held]) -> list[_Held]:
    """Trees to be read from: with copies of what is not dense or is going to be written to."""
    parts = [x for each in targets for r in range(len(each.runs)) for x in each.parts(r)]
    written = {_torch.storage_id(x) for x in parts}

    def settled(run: Run, x: Tensor) -> Tensor:
        return x if is_dense(x) and _torch.storage_id(x) not in written else copied(run, x)

    return [each.change(settled) for each in held]
