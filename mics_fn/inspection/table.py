"""`summary`: a table of what a sharded value holds, leaf by leaf."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from mics_fn import checks
from mics_fn.deferred import GradSum
from mics_fn.errors import LeafError, human_bytes
from mics_fn.inspection.access import Leaves, leaves_of
from mics_fn.offload import Coded, in_file
from mics_fn.shards import Bucket, Fixed, Nothing, Sharded, Tied, dtype_name, grouped, is_leaf
from mics_fn.tree import Tree

_HEAD = ("path", "shape", "dtype", "kind", "bucket", "groups", "sent", "here", "full")
_RIGHT = ("bucket", "here", "full")  # columns of numbers


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
      sent: what travels of it in gathers, hop 1 and hop 2, as a `Precision` writes it, where that
        is not a value in `compute` or `reduce`. Of a `TrainState` only parameters travel.
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
    sent: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the texts of the row in a table, one per column."""
        bucket = "" if self.bucket is None else str(self.bucket)
        kind = self.kind if self.place == "device" else f"{self.kind}, {self.place}"
        shown = (self.path, str(self.shape), self.dtype, kind, bucket, self.groups, self.sent)
        return (*shown, human_bytes(self.here_bytes), human_bytes(self.full_bytes))


@dataclass(frozen=True, repr=False)
class Summary:
    """Leaves of a sharded value on this rank; prints as a table.

    The column "sent" is there if something travels as codes, or in a dtype of its own.

    Args:
      rows: one per leaf, in the order of the tree.
      padding_bytes: bytes of this rank's chunks that belong to no leaf.
      shown: the most rows that a table has; None for all.
    """

    rows: tuple[SummaryRow, ...]
    padding_bytes: int
    shown: int | None = None

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
        columns = [x for x in zip(*rows, strict=True) if x[0] != "sent" or any(x[1:])]
        # Widths take every row into account, so that two tables of one value line up.
        aligned = [_aligned(column) for column in columns]
        lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
        hidden = len(self.rows) - (self.shown or len(self.rows))
        if hidden > 0:
            top = 1 + len(self.rows) - hidden - (len(self.rows) - hidden) // 2
            lines[top : top + hidden] = [f"... {hidden} more ..."]
        return "\n".join([*lines, self._total()])

    __repr__ = __str__

    def _total(self) -> str:
        leaves = "1 leaf" if len(self.rows) == 1 else f"{len(self.rows)} leaves"
        here, padding = human_bytes(self.here_bytes), human_bytes(self.padding_bytes)
        text = f"{leaves} of {self.elements:,} elements: {here} here and {padding} of padding"
        return f"{text}, {human_bytes(self.full_bytes)} in full"


def summary(shards: Tree, groups: Any = None, *, rows: int | None = 40) -> Summary:
    """List what a sharded value holds: each leaf with its shape, dtype, kind and bytes.

    Args:
      shards: tree of shards, a `TrainState`, or a `GradSum` whose passes are done.
      groups: as for `gather`; the table then names them. With None it says how many pieces a leaf
        has.
      rows: the most rows that a table shows, the first and the last ones; None shows all.

    Returns:
      A `Summary`: `print` it, or end a notebook's cell with it. Plain numbers are left out, and so
      are the frozen parameters that an optimizer's tree only repeats.

    Raises:
      PlanError: `rows` is not an int of at least 2.
      LeafError: there is neither a shard nor a tensor.
      DonatedError: the value was given away earlier.

    Example:
      >>> groups = make_groups(1)
      >>> summary(shard({"b": torch.ones(2), "w": torch.ones(2, 3)}, groups), groups)
      path   shape   dtype    kind     bucket  groups               here  full
      b      (2,)    float32  trained       0  n=1 p=1 levels=none   8 B   8 B
      w      (2, 3)  float32  trained       0  n=1 p=1 levels=none  24 B  24 B
      2 leaves of 8 elements: 32 B here and 16 B of padding, 32 B in full

      What travels in the place of values has a column of its own:

      >>> params = {"b": torch.ones(2), "w": torch.ones(2, 3)}
      >>> summary(shard(params, groups, precision="gather=int8[8]@rank, hop2=bf16; *b*: hop2=f32"))
      path   shape   dtype    kind     bucket  groups  sent                            here  full
      b      (2,)    float32  trained       0  p=1     gather=int8[8]@rank              8 B   8 B
      w      (2, 3)  float32  trained       1  p=1     gather=int8[8]@rank, hop2=bf16  24 B  24 B
      2 leaves of 8 elements: 32 B here and 32 B of padding, 32 B in full
    """
    checks.integer("summary", "rows", rows, 2, optional=True)
    shards = shards.in_place() if isinstance(shards, GradSum) else shards
    found = leaves_of("summary", shards, groups, local=True)
    listed = [_row(found, i) for i, path in enumerate(found.paths) if path is not None]
    shown = [row for row in listed if row is not None]
    if shards is None or (found.all and not shown and not any(map(is_leaf, found.all))):
        fix = "pass a tree of shards, or a TrainState such as trainer.state"
        checks.refuse("summary", "shards", shards, "shards or tensors", fix, LeafError)
    return Summary(tuple(shown), _padding(found), rows)


def _row(found: Leaves, at: int) -> SummaryRow | None:
    leaf, path, home = found.all[at], found.paths[at] or "", found.homes[at]
    data = leaf if isinstance(leaf, Tensor) else getattr(leaf, "data", None)
    if isinstance(leaf, Nothing) or not isinstance(leaf, Tied | Tensor | Sharded | Fixed):
        return None
    bucket = None if isinstance(leaf, Tensor) else leaf.bucket
    dtype = leaf.dtype if data is None else data.dtype
    kept, full = dtype_name(dtype), 0 if data is None else prod(leaf.shape) * dtype.itemsize
    here = 0 if data is None else data.numel() * dtype.itemsize
    if isinstance(data, Coded):
        kept, here, full = f"{data.codes.codec}", data.size_bytes, data.bytes_of(prod(leaf.shape))
    return SummaryRow(
        path=path,
        shape=tuple(leaf.shape),
        dtype=kept,
        kind=_kind(leaf),
        bucket=None if bucket is None else bucket.index,
        groups="" if bucket is None else f"p={bucket.parts}" if home is None else home.describe(),
        here_bytes=here,
        full_bytes=full,
        place=_place(data, home),
        sent="" if bucket is None or found.in_optimizer(at) else _sent(bucket),
    )


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


def _sent(bucket: Bucket) -> str:
    """Return the wires of a bucket; without gradients only that of gathers."""
    found = filter(None, bucket.wires.split(", "))
    return ", ".join(x for x in found if bucket.trainable or x.startswith("gather="))


def _padding(found: Leaves) -> int:
    """Count the bytes of this rank's chunks that belong to no leaf."""
    shown = [i for i in found.shards if found.paths[i] is not None]
    leaves, total = [found.all[i] for i in shown], 0
    for use in grouped(leaves, [None] * len(leaves)):
        data = [leaves[i].data for i in use.members]
        if isinstance(data[0], Coded):
            size = data[0].bytes_of(use.bucket.chunk)
            total += size - sum(piece.size_bytes for piece in data)
        else:
            total += use.bucket.chunk * data[0].itemsize - sum(piece.nbytes for piece in data)
    return total


def _aligned(cells: Sequence[str]) -> list[str]:
    """Pad the cells of a column, whose head is the first of them; numbers to the right."""
    width = max(map(len, cells))
    right = cells[0] in _RIGHT
    return [cell.rjust(width) if right else cell.ljust(width) for cell in cells]
