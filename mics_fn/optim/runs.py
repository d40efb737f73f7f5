"""Where the pieces of a tree of shards lie in the memory of their buckets.

[Note: runs] The leaves of `tree.flatten` on a tree of shards are this rank's pieces, and the pieces
of a bucket are views of one chunk. An elementwise function may as well take them as one tensor: the
numbers are the same, and the work does not grow with the number of leaves. A tree may hold only
some leaves of a bucket, as the two parts of a model with two optimizers do. What lies between and
around them belongs to somebody else, so a run ends where a leaf is missing: between its pieces lies
nothing but padding, which is computed with and never looked at.

Which leaves a run has does not depend on the rank, so that structures compare across ranks; where
its pieces begin does.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.offload import Coded, Stored, is_apart, is_coded, is_stored, read
from mics_fn.shards import Bucket

Place = tuple[Bucket, int] | None  # bucket and slot of a piece; None for a plain tensor


class Laid(NamedTuple):
    """A piece that is not empty: its leaf's number, and where it lies in the run, in elements."""

    index: int
    start: int
    length: int


@dataclass(frozen=True)
class Run:
    """Leaves of one bucket, in its order, between which nothing but padding lies.

    Args:
      bucket: the run as the only leaf of a bucket; None for a plain tensor.
      members: the leaves' numbers among the pieces of the tree.
      laid: those that have elements on this rank.
      sizes: (gap, piece, gap, piece, ...): how to split the run on this rank, a piece per member.
      numel: elements on this rank, gaps included.
      complete: whether the tree holds every element of the bucket.
    """

    bucket: Bucket | None
    members: tuple[int, ...]
    laid: tuple[Laid, ...]
    sizes: tuple[int, ...]
    numel: int
    complete: bool

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """`laid` by column: the leaves' numbers, their starts and their lengths."""
        return tuple(zip(*self.laid, strict=True))

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Where padding lies between pieces: starts and ends."""
        ends = [(x.start + x.length, y.start) for x, y in pairwise(self.laid)]
        return tuple((a, b) for a, b in ends if a < b)


def split(run: Run, whole: Tensor) -> list[Tensor]:
    """The pieces of a run, one per member, as views of (*batch, run.numel)."""
    if run.bucket is None:
        return [whole]
    return list(whole.split_with_sizes(run.sizes, -1)[1::2])


def joined(run: Run, pieces: Sequence[Tensor]) -> Tensor:
    """A copy of the pieces of a run, one per member, as one tensor; differentiable."""
    if run.bucket is None:
        return pieces[0]
    parts = []
    for gap, piece in zip(run.sizes[::2], pieces, strict=True):
        parts += [piece.new_zeros((*piece.shape[:-1], gap)), piece] if gap else [piece]
    return torch.cat(parts, -1)


def whole_run(run: Run, pieces: Sequence[Tensor]) -> Tensor | None:
    """The pieces of a run as one tensor without a copy; None where they do not lie like that.

    Args:
      run: which pieces, and how they lie in their bucket.
      pieces: all of the tree.
    """
    if not run.laid:
        return None
    index, starts, lengths = run.columns
    mine = [pieces[i] for i in index]
    if any(map(is_coded, mine)):
        return None
    if any(map(is_stored, mine)):
        return _in_one_file(run, mine)
    first = mine[0].detach()
    if _torch.has_no_data(first) or tuple(map(Tensor.numel, mine)) != lengths:
        return None
    if not all(map(Tensor.is_contiguous, mine)) or any(map(Tensor.is_neg, mine)):
        return None
    if not all_rows(mine) or len(set(map(attrgetter("dtype"), mine))) > 1:
        return None
    # Addresses in one stretch within the first piece's storage are of that storage.
    address, size, begin = first.data_ptr(), first.itemsize, int(first.storage_offset())
    if list(map(Tensor.data_ptr, mine)) != [address + start * size for start in starts]:
        return None
    if first.untyped_storage().nbytes() < (begin + run.numel) * size:
        return None
    return first if len(mine) == 1 else first.as_strided((run.numel,), (1,), begin)


def _in_one_file(run: Run, pieces: Sequence[Any]) -> Tensor | None:
    """The same of pieces that are not empty and lie in files."""
    first, (_, starts, lengths) = pieces[0], run.columns
    if not all(map(is_stored, pieces)) or any(x.extent is not first.extent for x in pieces):
        return None
    extent, size = first.extent, first.dtype.itemsize
    if any((x.dtype, x.ndim) != (first.dtype, 1) for x in pieces):
        return None
    here = [(x.start - first.start, x.numel()) for x in pieces]
    if here != [(start * size, n) for start, n in zip(starts, lengths, strict=True)]:
        return None
    for x in pieces:
        x.check()  # the whole would be valid although a piece was given away
    like = torch.empty(run.numel, dtype=first.dtype, device="meta")
    return Stored(extent, first.start, like, first.device, first.leaf)


@lru_cache(maxsize=64)
def runs_of(
    buckets: tuple[Bucket | None, ...], slots: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[Run, ...]:
    """The runs of pieces of these lengths; of leaves that occur again, others than the first."""
    seen: Counter[tuple] = Counter()
    by_bucket: dict[tuple, dict[int, int]] = {}
    for i, (bucket, slot) in enumerate(zip(buckets, slots, strict=True)):
        key = (bucket, i if bucket is None else seen[bucket, slot])
        by_bucket.setdefault(key, {})[slot] = i
        seen[bucket, slot] += 1
    found = []
    for (bucket, _), by_slot in by_bucket.items():
        if bucket is None:
            i, n = by_slot[0], lengths[by_slot[0]]
            laid = (Laid(i, 0, n),) if n else ()
            found.append(Run(None, (i,), laid, (0, n), n, complete=False))
            continue
        near: list[int] = []
        for slot in sorted(by_slot):
            if near and any(bucket.numels[near[-1] + 1 : slot]):
                found.append(_run(bucket, near, by_slot, lengths))
                near = []
            near.append(slot)
        found.append(_run(bucket, near, by_slot, lengths))
    return tuple(found)


def _run(
    bucket: Bucket, slots: Sequence[int], by_slot: dict[int, int], lengths: Sequence[int]
) -> Run:
    numels, offsets = bucket.numels, bucket.offsets
    laid, sizes, end, before = [], [], 0, None
    for slot in slots:
        i, gap = by_slot[slot], 0
        if lengths[i]:
            gap = 0 if before is None else offsets[slot] - offsets[before] - numels[before]
            laid.append(Laid(i, end + gap, lengths[i]))
            end, before = end + gap + lengths[i], slot
        sizes += [gap, lengths[i]]
    full = [slot for slot in slots if numels[slot]] or slots[:1]
    start, stop = offsets[full[0]], offsets[full[-1]] + numels[full[-1]]
    own = replace(bucket, shapes=((stop - start,),), offsets=(start,))
    members = tuple(by_slot[slot] for slot in slots)
    complete = sum(numels[slot] for slot in slots) == sum(numels)
    return Run(own, members, tuple(laid), tuple(sizes), end, complete)


# The next three loop over leaves inside the interpreter: a step has nothing else to do for each.


def all_rows(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors have one dimension."""
    return set(map(Tensor.dim, tensors)) <= {1}


def devices(tensors: Sequence[Tensor]) -> list[torch.device]:
    return list(map(attrgetter("device"), tensors))


def any_requires_grad(tensors: Sequence[Tensor]) -> bool:
    return any(map(attrgetter("requires_grad"), tensors))


def is_dense(x: Tensor) -> bool:
    return x.is_contiguous() and not x.is_neg()


def copied(run: Run, x: Tensor) -> Tensor:
    """A dense copy of a part of a run; in a chunk of its own where it lay in one."""
    if is_apart(x):
        return x.copied() if isinstance(x, Coded) else read(x)
    if not is_in_chunk(run, x):
        return x.detach().clone(memory_format=torch.contiguous_format)
    chunk = x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    return chunk.clone().narrow(0, int(x.storage_offset()), x.numel())


def is_in_chunk(run: Run, x: Tensor) -> bool:
    """Whether a part is all that a chunk holds, and its memory is of the chunk's size."""
    if run.bucket is None or not run.complete or not x.numel() == run.numel > 0:
        return False
    if is_apart(x):
        return False
    return is_dense(x) and x.untyped_storage().nbytes() == run.bucket.chunk * x.itemsize
