"""Formulas for the traffic of MiCS, what they need to know of a training state, and tables."""

from collections.abc import Sequence
from math import prod

from mics_fn import tree
from mics_fn.errors import human_bytes as human_bytes
from mics_fn.shards import Bucket, Sharded, is_leaf


def gather_bytes(level_sizes: Sequence[int], full_bytes: float) -> list[float]:
    """What each rank sends at each level of one gather of `full_bytes`, outermost level first.

    A rank starts with 1/p of the bytes. At a level of k ranks it sends all that it holds to k - 1
    others, and then holds k times as much. A reduce-scatter goes through the levels backwards.

    Args:
        level_sizes: ranks at each level of the partition group.
        full_bytes: bytes of the full parameters, padding included.

    Example:
        >>> gather_bytes((2, 4), 800)  # over 2 nodes, then over the 4 ranks of a node
        [100.0, 600.0]
        >>> gather_bytes((8,), 800)  # flat: (p - 1)/p in total as well, but all of it between nodes
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
    """What each rank sends in one step through each communicator, with the formula in words.

    Parameters are gathered once, hop 1 runs in every micro-step, hop 2 once on 1/p of the bytes.

    Args:
        level_names, level_sizes: the levels of the partition group, outermost first.
        num_replicas: r, the ranks in a replication group.
        full_bytes: M, bytes of the full parameters, padding included.
        accumulate: s, the micro-steps in a step.

    Returns:
        The bytes and the formula of each communicator, by its name.

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
        parts = p  # when a level begins; each rank holds one of them
        for name, size, sent in zip(level_names, level_sizes, gathers, strict=True):
            found[f"{purpose} {name}"] = (times * sent, f"{factor}({size}-1) M/{parts}")
            parts //= size
    if num_replicas > 1:
        sent = 2 * (num_replicas - 1) / num_replicas * full_bytes / p
        found["replicas"] = (sent, "2 (r-1)/r M/p")
    return found


def totals_bytes(p: int, r: int, *, fixed_order: bool = False) -> dict[str, tuple[float, str]]:
    """What a rank sends for the totals of a step, four float64 numbers over both groups."""
    if p * r == 1:
        return {}
    sent = sum(2 * (n - 1) * (8 * -(-4 // n) if fixed_order else 32 / n) // 1 for n in (p, r))
    return {"step totals": (int(sent), "2 (n-1)/n 32, n = p, r")}


def bytes_or_dash(nbytes: float | None) -> str:
    """Bytes with a unit; "-" if they could not be measured."""
    return "-" if nbytes is None else human_bytes(nbytes)


def buckets_of(shards: tree.Tree) -> list[Bucket]:
    """The buckets of a tree's trained leaves, by their numbers."""
    leaves, _ = tree.flatten(shards, is_leaf)
    found = {leaf.bucket for leaf in leaves if isinstance(leaf, Sharded)}
    return sorted(found, key=lambda bucket: bucket.index)


def table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """A title, then rows whose columns are aligned: the first to the left, the others to the right.

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
