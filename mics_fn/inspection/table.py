"""`summary`: a table of what a sharded value holds, leaf by leaf."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from mics_fn.errors import TreeError, human_bytes
from mics_fn.inspection.paths import Leaves, leaves_of
from mics_fn.shards import Fixed, Nothing, Sharded, Tied, dtype_name, grouped
from mics_fn.tree import Tree

_HEAD = ("path", "shape", "dtype", "kind", "bucket", "groups", "here", "full")
_RIGHT = ("bucket", "here", "full")  # columns of numbers


class SummaryRow(NamedTuple):
    """One leaf of a `Summary`.

    Args:
      path: as `get` takes it.
      shape: that of the full tensor.
      dtype: that of the stored elements.
      kind: "trained" or "frozen" for pieces, "replicated" or "full" for leaves that are whole on
        this rank, "tied" for leaves without memory of their own.
      bucket: the number of its bucket, or None.
      groups: the groups that share it, in a few words.
      here_bytes: bytes on this rank, without padding.
      full_bytes: bytes of the full tensor; 0 if tied, so that each tensor counts once.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    bucket: int | None
    groups: str
    here_bytes: int
    full_bytes: int

    def cells(self) -> tuple[str, ...]:
        """The texts of the row in a table, one per column."""
        bucket = "" if self.bucket is None else str(self.bucket)
        shown = (self.path, str(self.shape), self.dtype, self.kind, bucket, self.groups)
        return (*shown, human_bytes(self.here_bytes), human_bytes(self.full_bytes))


@dataclass(frozen=True, repr=False)
class Summary:
    """The leaves of a sharded value, as this rank sees them; prints as a table.

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
        lines = [_HEAD, *(row.cells() for row in self.rows)]
        # Widths take every row into account, so that two tables of one value line up.
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        top, bottom = self._ends()
        kept = [*lines[: top + 1], *lines[len(lines) - bottom :]]
        text = [_aligned(cells, widths) for cells in kept]
        if self._hidden():
            text.insert(top + 1, f"... {self._hidden()} more ...")
        return "\n".join([*text, self._total()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table for a notebook, in the notebook's own colours."""
        top, bottom = self._ends()
        cells = [row.cells() for row in self.rows]
        body = [_html_row(row) for row in cells[:top]]
        if self._hidden():
            more = f"&hellip; {self._hidden()} more &hellip;"
            body.append(f'<tr><td colspan="{len(_HEAD)}">{more}</td></tr>')
        body += [_html_row(row) for row in cells[len(cells) - bottom :]]
        head = "".join(f'<th scope="col"{_style(name)}>{name}</th>' for name in _HEAD)
        return (
            '<div style="overflow:auto;max-height:40em"><table>'
            f'<caption style="caption-side:bottom;text-align:left">{escape(self._total())}'
            f"</caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        )

    def _ends(self) -> tuple[int, int]:
        """How many rows are shown before and after the hidden ones."""
        if self.shown is None or len(self.rows) <= self.shown:
            return len(self.rows), 0
        return self.shown - self.shown // 2, self.shown // 2

    def _hidden(self) -> int:
        return len(self.rows) - sum(self._ends())

    def _total(self) -> str:
        plural = "" if len(self.rows) == 1 else "s"
        here, padding = human_bytes(self.here_bytes), human_bytes(self.padding_bytes)
        return (
            f"{len(self.rows)} leaf{plural} of {self.elements:,} elements: {here} here "
            f"and {padding} of padding, {human_bytes(self.full_bytes)} in full"
        ).replace("leafs", "leaves")


def summary(shards: Tree, groups: Any = None, *, rows: int | None = 40) -> Summary:
    """A table of what a sharded value holds: each leaf with its shape, dtype, kind and bytes.

    Args:
      shards: tree of shards, or a `TrainState`.
      groups: as for `gather`; the table then names them. With None it says how many pieces a leaf
        has.
      rows: the most rows that a table shows, the first and the last ones; None shows all.

    Returns:
      A `Summary`: `print` it, or end a notebook's cell with it. Plain numbers are left out, and so
      are the frozen parameters that an optimizer's tree only repeats.

    Raises:
      TreeError: `rows` is not an int of at least 2.
      DonatedError: the value was given away earlier.

    Example:
      >>> groups = make_groups(1)
      >>> summary(shard({"b": torch.ones(2), "w": torch.ones(2, 3)}, groups), groups)
      path   shape   dtype    kind     bucket  groups               here  full
      ['b']  (2,)    float32  trained       0  n=1 p=1 levels=none   8 B   8 B
      ['w']  (2, 3)  float32  trained       0  n=1 p=1 levels=none  24 B  24 B
      2 leaves of 8 elements: 32 B here and 16 B of padding, 32 B in full
    """
    if rows is not None and not (isinstance(rows, int) and rows >= 2):
        raise TreeError(f"summary: rows={rows!r}, expected None or an int of at least 2")
    found = leaves_of("summary", shards, groups, local=True)
    listed = [_row(found, i) for i, path in enumerate(found.paths) if path is not None]
    return Summary(tuple(row for row in listed if row is not None), _padding(found), rows)


def _row(found: Leaves, at: int) -> SummaryRow | None:
    leaf, path, home = found.all[at], found.paths[at] or "", found.homes[at]
    held = leaf if isinstance(leaf, Tensor) else getattr(leaf, "data", None)
    if isinstance(leaf, Nothing) or not isinstance(leaf, Tied | Tensor | Sharded | Fixed):
        return None
    bucket = None if isinstance(leaf, Tensor) else leaf.bucket
    dtype = leaf.dtype if held is None else held.dtype
    full = 0 if held is None else prod(leaf.shape) * dtype.itemsize
    return SummaryRow(
        path=path,
        shape=tuple(leaf.shape),
        dtype=dtype_name(dtype),
        kind=_kind(leaf),
        bucket=None if bucket is None else bucket.index,
        groups="" if bucket is None else _short(home, bucket.parts),
        here_bytes=0 if held is None else held.numel() * dtype.itemsize,
        full_bytes=full,
    )


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Fixed):
        return "replicated" if leaf.bucket is None else "frozen"
    return {Sharded: "trained", Tied: "tied"}.get(type(leaf), "full")


def _short(home: Any, parts: int) -> str:
    """Groups in a few words."""
    return f"p={parts}" if home is None else home.describe()


def _padding(found: Leaves) -> int:
    """Bytes of this rank's chunks that belong to no leaf."""
    shown = [i for i in found.shards if found.paths[i] is not None]
    leaves, total = [found.all[i] for i in shown], 0
    for use in grouped(leaves, [None] * len(leaves)):
        data = [leaves[i].data for i in use.members]
        total += use.bucket.chunk * data[0].itemsize - sum(piece.nbytes for piece in data)
    return total


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """A line of text, numbers to the right."""
    padded = [
        cell.rjust(width) if name in _RIGHT else cell.ljust(width)
        for name, cell, width in zip(_HEAD, cells, widths, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _style(name: str) -> str:
    return f' style="text-align:{"right" if name in _RIGHT else "left"}"'


def _html_row(cells: Sequence[str]) -> str:
    pairs = zip(_HEAD, cells, strict=True)
    return f"<tr>{''.join(f'<td{_style(name)}>{escape(cell)}</td>' for name, cell in pairs)}</tr>"
