"""Frozen leaves that are kept as codes: `param=int4[64]` of a `Precision`.

[Note: kept codes] A rank keeps its chunk of such a bucket as one row of bytes, the codes of all
blocks and then their scales, and a piece is a `Coded` that is a part of it. A gather sends this row
as it is, and each rank decodes all rows, its own too, in the dtype of computation. Leaves and
chunks begin on borders of blocks. So a block has elements of one leaf and one rank alone, and what
is decoded does not depend on how many ranks share a leaf.

Ops on such a piece decode it to float32, which holds exactly what codes stand for: a code has at
most 8 significant bits, and a scale 8. Coding these values again gives the same bytes, so `set`,
and whatever else reads values and writes them back, changes no other leaf.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import Codec, checksum
from mics_fn.errors import LeafError, PlanError, message
from mics_fn.offload import Coded, as_codes, is_coded
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.ranges import pieces


def check_frozen(verb: str, trained: Mapping[str, Codec | None]) -> None:
    """Raise PlanError if leaves that are trained are to be kept as codes.

    Args:
      verb: for errors.
      trained: the codec of each trained leaf, if any, by path.
    """
    coded = [f"{path}: param={codec}" for path, codec in trained.items() if codec is not None]
    if coded:
        more = [f"and {len(coded) - 5} more"] if len(coded) > 5 else []
        text = f"{verb}: leaves that are trained cannot be kept as codes: updates would be lost"
        fix = "name them in frozen=, or give param= behind a pattern that leaves them out"
        raise PlanError(message(text, [*coded[:5], *more], fix))


def has_codes(data: Any) -> bool:
    """Whether a tensor is a part of a row of codes, as that of a frozen leaf may be."""
    return is_coded(data) and data.codes.row is not None


def coded_pieces(bucket: Bucket, chunk: int, flat: Tensor, names: Sequence[str]) -> list[Tensor]:
    """The pieces of a chunk, by slot, as codes.

    Args:
      bucket: the bucket, which says as which codes.
      chunk: the number of the chunk.
      flat: its values, float32, with zeros where padding is.
      names: paths of the leaves, for errors.

    Raises:
      LeafError: a value is not finite.
    """
    codec: Any = bucket.codes
    whole = as_codes(flat, codec, ", ".join(names[:2]))
    laid = pieces(bucket, chunk)
    found = [whole[piece.start : piece.start + piece.length] for piece in laid]
    if bool(whole.codes.tops.isfinite().all()):
        return found
    for name, piece in zip(names, laid, strict=True):
        check_finite(name, codec, flat.narrow(0, piece.start, piece.length))
    return found


def check_finite(what: str, codec: Codec, values: Tensor) -> None:
    """Raise LeafError if values that are to be kept as codes are not all finite."""
    if not bool(values.isfinite().all()):
        text = f"{what} has a value that is not finite, which param={codec} cannot hold"
        fix = "keep this leaf as values: give param= behind a pattern that leaves it out"
        raise LeafError(message(text, fix=fix))


def check_kept(verb: str, bucket: Bucket, data: Sequence[Any]) -> None:
    """Raise LeafError for values in the place of codes: a gather would round them, if p > 1.

    Args:
      verb: for errors.
      bucket: one whose leaves are kept as codes.
      data: the pieces, by slot; None for a leaf that the tree lacks. Those on meta may be anything.
    """
    for slot, x in enumerate(data):
        if x is None or not bucket.chunk or _torch.has_no_data(x):
            continue
        if has_codes(x) and x.codes.codec == bucket.codes:
            continue
        text = f"{verb}: leaf {slot} of bucket {bucket.index} ({bucket.names}) is {_kind(x)}"
        fix = "keep the leaf that shard or load_shards gave; set() changes its values"
        raise LeafError(message(text, [f"expected codes, {bucket.codes}"], fix))


def _kind(x: Any) -> str:
    """A piece in a word, for errors."""
    codec = f" of {x.codes.codec}" if is_coded(x) else ""
    return f"a tensor of {tuple(x.shape)}, {x.dtype}{codec}"


def checksum_of(data: Tensor) -> Tensor:
    """64 bits that depend on every bit of a piece: on its codes and scales, if it has them."""
    if not has_codes(data):
        return checksum(data)
    kept: Any = data
    return checksum(torch.cat([x.view(torch.uint8) for x in kept.part_codes()]))


def kept_row(bucket: Bucket, chunk: int, data: Sequence[Any]) -> Tensor | None:
    """The codes of a chunk as the row of bytes that a gather sends; None if there are none.

    Args:
      bucket: the bucket.
      chunk: the number of the chunk.
      data: the pieces, by slot; None for a leaf that the tree lacks.

    Memory: none if the pieces are parts of one row, as `shard` makes them; else a new row.
    """
    if bucket.codes is None or not bucket.chunk:
        return None
    given = [_torch.unwrapped(x) if isinstance(x, Tensor) else x for x in data]
    if not all(x is None or has_codes(x) for x in given):
        return None  # on meta
    nbytes, first = bucket.codes.nbytes(bucket.chunk), None
    for piece, value in zip(pieces(bucket, chunk), given, strict=True):
        if value is None:
            continue
        x: Any = value
        first = x.codes.row if first is None else first
        row, moved = x.codes.row, piece.length and x.start != piece.start
        if moved or row.data_ptr() != first.data_ptr() or len(row) != nbytes:
            return _packed(bucket, chunk, given)
    return first


def _packed(bucket: Bucket, chunk: int, data: Sequence[Any]) -> Tensor:
    """A new row with the codes of pieces that lie in several."""
    some: Coded = next(x for x in data if x is not None)
    made = some.codes.unset(bucket.chunk)
    for piece, x in zip(pieces(bucket, chunk), data, strict=True):
        if x is not None and piece.length:
            like = torch.empty(piece.length, device="meta")
            into = Coded(made, piece.start, like).part_codes()
            for to, part in zip(into, x.part_codes(), strict=True):
                to.copy_(part)
    row: Any = made.row
    return row
