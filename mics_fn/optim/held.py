"""Trees on their way through a step: the pieces of each run as one tensor, or one by one."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import finish_readers
from mics_fn.errors import TreeError, message
from mics_fn.offload import Stored, is_apart, is_coded, is_stored, laid_like, read
from mics_fn.optim.coming import Coming
from mics_fn.optim.flat import FlatShards, Unpacked, unpacked, with_wholes
from mics_fn.optim.runs import Run, any_requires_grad, copied, is_dense, joined, split, whole_run
from mics_fn.tree import Tree


class Held(NamedTuple):
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

    def look(self) -> "Held":
        """See which runs lie in one stretch of memory; those in several places are brought there.

        Kernels round the last elements of a tensor in another way, so leaf by leaf bits differ.
        """
        if isinstance(self.given, FlatShards | Coming):
            return self
        pieces = list(self.pieces)
        return self._replace(wholes=[_brought(run, pieces) for run in self.runs], pieces=pieces)

    def arrived(self, ready: Sequence[int]) -> "Held":
        """`look` for some runs alone, whose pieces have arrived; the others are left out."""
        wholes: list[Tensor | None] = [None] * len(self.runs)
        pieces = list(self.given.pieces)  # pyright: ignore
        for r in ready:
            wholes[r] = _brought(self.runs[r], pieces)
        return self._replace(pieces=pieces, wholes=wholes)

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

    def change(
        self, fn: Callable[[Run, Tensor], Tensor], only: Sequence[int] | None = None
    ) -> "Held":
        """The same with `fn(run, x)` in place of each part x of each run, empty pieces too."""
        pieces, wholes = list(self.pieces), list(self.wholes)
        numbers = range(len(self.runs)) if only is None else only
        for r in numbers:
            run, old = self.runs[r], wholes[r]
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
        """What it holds, in new nodes, where it lay before."""
        if isinstance(self.given, Unpacked):
            old, new = self.given.pieces, self.pieces
            # To ask each of them takes long.
            return self.given.with_pieces(laid_like(new, old) if Stored in map(type, old) else new)
        wholes = [
            joined(run, [self.pieces[i] for i in run.members]) if whole is None else whole
            for run, whole in zip(self.runs, self.wholes, strict=True)
        ]
        return with_wholes(self.given.layout, wholes, self.given.cuts)


def _brought(run: Run, pieces: list[Tensor]) -> Tensor | None:
    """`whole_run`, once its pieces that lie in several places of files are brought to one."""
    whole, mine = whole_run(run, pieces), [pieces[i] for i in run.members]
    if whole is None and run.laid and Stored in map(type, mine):
        device = next(x.device for x in mine if is_stored(x))
        whole = joined(run, [read(x.detach()).to(device) for x in mine])
        for i, piece in zip(run.members, split(run, whole), strict=True):
            pieces[i] = piece
    return whole


def held_of(trees: Sequence[Tree]) -> list[Held]:
    found: list[Held] = []
    for shards in trees:
        if isinstance(shards, FlatShards):
            runs = shards.layout.runs
            if found and runs is not found[0].runs and runs != found[0].runs:
                fix = "pass the optimizer's state of these parameters"
                raise TreeError(message("opt_step: the state is of another tree", fix=fix))
            found.append(Held(shards, runs, [], list(shards.wholes)))
            continue
        given = unpacked(shards)
        runs = found[0].runs if found else given.runs()
        if len(given.pieces) != sum(len(run.members) for run in runs):
            raise TreeError(message("opt_step: trees of different numbers of leaves"))
        found.append(Held(given, runs, given.pieces, [None] * len(runs)))
    return found


def in_place(held: Sequence[Held]) -> list[Held]:
    """Trees to be written to as they are, but for copies of what is not dense or overlaps."""
    parts = [x for each in held for r in range(len(each.runs)) for x in each.parts(r)]
    finish_readers([x for x in parts if not is_coded(x)])
    parts = [x for x in parts if not is_apart(x)]
    far = {id(x) for each in held for x in each.wholes}  # whose parts are brought here later
    spans = sorted(
        (_torch.storage_id(x), int(x.storage_offset()), x.numel()) for x in parts if is_dense(x)
    )
    odd = {a[0] for a, b in pairwise(spans) if a[0] == b[0] and b[1] < a[1] + a[2]}

    def settled(run: Run, x: Tensor) -> Tensor:
        if is_apart(x):
            return x if id(x) in far else copied(run, x)
        return x if is_dense(x) and not (odd and _torch.storage_id(x) in odd) else copied(run, x)

    return [each.change(settled) for each in held]


def readable(
    held: Sequence[Held], targets: Sequence[Held], only: Sequence[int] | None = None
) -> list[Held]:
    """Trees to be read from: with copies of what is in files, not dense, or going to be written to.

    Each run comes to the device of the first target, which computes.
    """
    parts = [x for each in targets for r in range(len(each.runs)) for x in each.parts(r)]
    written = {_torch.storage_id(x) for x in parts if not is_apart(x)}
    first = {id(run): targets[0].parts(r)[:1] for r, run in enumerate(targets[0].runs)}

    def settled(run: Run, x: Tensor) -> Tensor:
        if any(x.device != home.device for home in first.get(id(run), ())):
            return copied(run, x.to(first[id(run)][0].device))
        here = not is_stored(x) and is_dense(x)
        return x if here and _torch.storage_id(x) not in written else copied(run, x)

    return [each.change(settled, only) for each in held]
