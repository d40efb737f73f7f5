"""Formulas of the traffic that MiCS should cause, and tables that a person can read."""

from collections.abc import Sequence
from math import prod


def gather_bytes(level_sizes: Sequence[int], full_bytes: float) -> list[float]:
    """What each rank sends at each level of one gather of `full_bytes`, outermost level first.

    A rank starts with 1/p of the bytes. At a level of k ranks it sends all it has to k - 1 others,
    and then holds k times as much. A reduce-scatter is the same walk backwards.

    Args:
        level_sizes: ranks at each level of the partition group.
        full_bytes: bytes of the full parameters, padding included.

    Example:
        >>> gather_bytes((2, 4), 800)  # over 2 nodes, then over the 4 ranks of a node
        [100.0, 600.0]
        >>> gather_bytes((8,), 800)  # flat: as much in all, (p - 1)/p, but all of it between nodes
        [700.0]
    """
    held = full_bytes / prod(level_sizes)
    sent = []
    for size in level_sizes:
        sent.append((size - 1) * held)
        held *= size
    return sent


def step_bytes(
    level_names: Sequence[str],
    level_sizes: Sequence[int],
    num_replicas: int,
    full_bytes: float,
    accumulate: int,
) -> dict[str, tuple[float, str]]:
    """What each rank sends in one step, by what for, with the formula in words.

    Parameters are gathered once, hop 1 runs every micro-step, hop 2 once on 1/p of the bytes.

    Args:
        level_names, level_sizes: of the partition group, outermost first.
        num_replicas: r, ranks in a replication group.
        full_bytes: M, bytes of the full parameters, padding included.
        accumulate: s, micro-steps in a step.

    Returns:
        For each communicator its bytes and its formula.

    Example:
        >>> for name, (sent, why) in step_bytes(["rank"], [2], 2, 1000, 3).items():
        ...     print(f"{name}: {sent:g} = {why}")
        gather rank: 500 = (2-1) M/2
        reduce rank: 1500 = s (2-1) M/2
        replicas: 500 = 2 (r-1)/r M/p
    """
    p = prod(level_sizes)
    found: dict[str, tuple[float, str]] = {}
    gathers = gather_bytes(level_sizes, full_bytes)
    for purpose, times, factor in (("gather", 1, ""), ("reduce", accumulate, "s ")):
        parts = p  # how many parts M is in when a level begins, each rank holding one
        for name, size, sent in zip(level_names, level_sizes, gathers, strict=True):
            found[f"{purpose} {name}"] = (times * sent, f"{factor}({size}-1) M/{parts}")
            parts //= size
    if num_replicas > 1:
        sent = 2 * (num_replicas - 1) / num_replicas * full_bytes / p
        found["replicas"] = (sent, "2 (r-1)/r M/p")
    return found


def human_bytes(nbytes: float) -> str:
    """Bytes with a unit that suits them, in powers of 1,000 as link speeds are.

    >>> human_bytes(0), human_bytes(999), human_bytes(3_500_000)
    ('0 B', '999 B', '3.50 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A block of text: a title, then rows whose columns line up, the first one to the left.

    >>> print(table("loss", [("", "start", "end"), ("train", "5.51", "2.4")]))
    loss
              start  end
      train    5.51  2.4
    """
    columns = max(map(len, rows))
    filled = [[*row, *[""] * (columns - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in filled) for i in range(columns)]
    lines = [title]
    for first, *rest in filled:
        cells = [first.ljust(widths[0] + 1)]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)
