"""Formulas for what a step sends and holds, beside what is counted; tables, and types of flags.

The formulas are written down from the definitions, and share no code with the collectives but the
bytes of a codec and the levels of a `Wire`.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import torch

from mics_fn import tree
from mics_fn.collectives import SHORT_NAMES, Codec, mean_bytes
from mics_fn.errors import human_bytes
from mics_fn.groups import Route
from mics_fn.shards import Bucket, is_leaf

# Flags of the command line for numbers, which the demo and the benches share.


def add_count(
    parser: argparse.ArgumentParser,
    name: str,
    default: int | list[int] | None,
    text: str,
    *,
    smallest: int = 1,
    **options: Any,
) -> None:
    """Add a flag for an int that is not less than `smallest`.

    Args:
        parser: gets the flag.
        name: of the flag, without dashes.
        default: its default, a list for a flag of several; help names it, unless it is None.
        text: its help.
        smallest: the least number that is allowed.
        options: other options of `add_argument`.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_count(parser, "steps", 5, "steps of a turn")
        >>> parser.parse_args(["--steps", "3"]).steps, parser.parse_args([]).steps
        (3, 5)
    """

    def integer(given: str) -> int:  # argparse shows this name
        value = int(given)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{given} is less than {smallest}")
        return value

    shown = text if default is None else f"{text} (default {default})"
    parser.add_argument(f"--{name}", type=integer, default=default, help=shown, **options)


def new_file(given: str) -> Path:
    """Parse the path of a file to write, whose folder has to be there before anything runs."""
    path = Path(given)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{given}: there is no folder {path.parent}")
    return path


def gather_bytes(level_sizes: Sequence[int], full_bytes: float) -> list[float]:
    """Compute what each rank sends at each level of a gather, outermost level first.

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
    shard_bytes = full_bytes / prod(level_sizes)
    sent = []
    for size in level_sizes:
        sent.append((size - 1) * shard_bytes)
        shard_bytes *= size
    return sent


def bytes_or_dash(nbytes: float | None) -> str:
    """Format bytes with a unit; "-" if they could not be measured."""
    return "-" if nbytes is None else human_bytes(nbytes)


def buckets_of(shards: tree.Tree) -> list[Bucket]:
    """List the buckets of a tree, those of frozen leaves too, by their numbers."""
    leaves, _ = tree.flatten(shards, is_leaf)
    found = {bucket for leaf in leaves if (bucket := getattr(leaf, "bucket", None)) is not None}
    return sorted(found, key=lambda bucket: bucket.index)


def table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Render a title and rows of aligned columns, all but the first to the right.

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


# What the buckets of a model send in a step, by formula: as values, or as codes.


class Sent(NamedTuple):
    """Bytes of one bucket that a rank sends through one communicator, each time."""

    nbytes: float
    kind: str  # the dtype or the codec that travels, as text


def wire_bytes(
    buckets: Sequence[Bucket],
    route: Route,
    num_replicas: int,
    *,
    accumulate: int = 1,
    fetches: Mapping[int, int] | None = None,
) -> dict[str, tuple[float, str]]:
    """Compute what each rank sends in a step through each communicator, and the formula.

    Levels over which a placement keeps parameters are gathered once, and those over which it
    reduces late once per step; see [Note: placements] in `groups.groups`. "step totals" are sent
    over the partition group and the replication group.

    Args:
        buckets: those of the parameters. Of one that is not trained only gathers count.
        route: the levels of the partition group.
        num_replicas: r, the ranks in a replication group.
        accumulate: s, the micro-steps in a step.
        fetches: f, how often a step gathers each bucket, by its number; None means once.

    Returns:
        The bytes and the formula of each communicator, by its name. In a formula M are the bytes of
        all parameters as they are kept, padding included. Where something else travels, be it
        another dtype or codes, the formula ends with its name.

    Example:
        >>> from mics_fn.groups import Route
        >>> from mics_fn.shards.bucket import LeafSpec, plan_buckets
        >>> formats = Precision.parse("hop2=int8[256]").formats("w", torch.float32)
        >>> leaf = LeafSpec("w", (1000,), formats, 1)
        >>> [(bucket, _)] = plan_buckets([leaf])
        >>> wire_bytes([bucket], Route(), 2)["replicas"]
        (1032, '2 (r-1)/r M/p as int8[256]')
    """
    often = {b.index: 1 if fetches is None else fetches.get(b.index, 0) for b in buckets}
    once = {b.index: min(1, count) for b, count in zip(buckets, often.values(), strict=True)}
    trained = [bucket for bucket in buckets if bucket.trainable]
    found: dict[str, tuple[float, str]] = {}
    for i, (level, words) in enumerate(zip(route.levels, _in_words(route.sizes), strict=True)):
        times = once if i < route.outer_params else often
        factor = "f " if any(count != 1 for count in times.values()) else ""
        every = [(b, times[b.index], gathered(b, route)[i]) for b in buckets]
        found[f"gather {level.name}"] = _total(every, factor + words)
    for i, (level, words) in enumerate(zip(route.levels, _in_words(route.sizes), strict=True)):
        once = i < route.outer_grads
        every = [(b, 1 if once else accumulate, scattered(b, route)[i]) for b in trained]
        found[f"reduce {level.name}"] = _total(every, words if once else f"s {words}")
    if num_replicas > 1:
        every = [(b, 1, averaged(b, num_replicas)) for b in trained]
        found["replicas"] = _total(every, "2 (r-1)/r M/p")
    if route.size * num_replicas > 1:  # four float64 over both groups
        totals = sum(2 * (n - 1) * 32 // n for n in (route.size, num_replicas))
        found["step totals"] = (totals, "2 (n-1)/n 32, n = p, r")
    return found


def gathered(bucket: Bucket, route: Route) -> list[Sent]:
    """Compute what a rank sends of a bucket in one gather, by level, outermost first.

    On coded levels a chunk is one row of codes, which is sent on as it arrived.
    """
    values = gather_bytes(route.sizes, bucket.nbytes)
    found = [Sent(nbytes, _name(bucket.compute)) for nbytes in values]
    wire = bucket.gather_wire
    if wire is not None:
        codec, count = wire.codec, wire.levels(route)
        codes = gather_bytes(route.sizes, bucket.parts * codec.nbytes(bucket.chunk))
        found[:count] = [Sent(nbytes, f"{codec}") for nbytes in codes[:count]]
    return found


def scattered(bucket: Bucket, route: Route) -> list[Sent]:
    """Compute what a rank sends of a bucket in hop 1, by level, outermost first.

    On coded levels it sends a row of codes to each other rank, of all that this one is to hold.
    """
    values = gather_bytes(route.sizes, bucket.numel * bucket.reduce.itemsize)
    found = [Sent(nbytes, _name(bucket.reduce)) for nbytes in values]
    if bucket.hop1 is not None:
        codec, sizes = bucket.hop1.codec, route.sizes
        for i in range(bucket.hop1.levels(route)):
            row = codec.nbytes(bucket.chunk * prod(sizes[:i]))
            found[i] = Sent((sizes[i] - 1) * row, f"{codec}")
    return found


def averaged(bucket: Bucket, num_replicas: int) -> Sent:
    """Compute what a rank sends of a bucket in hop 2.

    Codes are sent in an exchange and an all-gather, in which each replica has equally many blocks;
    values in an all-reduce.
    """
    wire, chunk, r = bucket.hop2_format, bucket.chunk, num_replicas
    if isinstance(wire, Codec):
        return Sent(averaged_codes(wire, chunk, r), f"{wire}")
    return Sent(2 * (r - 1) * chunk * wire.itemsize // r, _name(wire))


def averaged_codes(codec: Codec, numel: int, size: int) -> int:
    """Compute what a rank sends in a mean of codes, half of it in each of two collectives."""
    return 2 * (size - 1) * codec.nbytes(-(-numel // (codec.block * size)) * codec.block)


def _name(dtype: torch.dtype) -> str:
    return SHORT_NAMES.get(dtype, f"{dtype}")


def _in_words(sizes: Sequence[int]) -> list[str]:
    """Return the formula of each level, outermost first; a rank starts with M/p."""
    parts, found = prod(sizes), []
    for size in sizes:
        found.append(f"({size}-1) M/{parts}")
        parts //= size
    return found


def _total(every: Iterable[tuple[Bucket, int, Sent]], words: str) -> tuple[float, str]:
    """Sum the bytes of all buckets, and name what travels behind the formula.

    The name of a dtype is left out where all of it is what the shards have.
    """
    every = [(bucket, count, sent) for bucket, count, sent in every if count and sent.nbytes]
    kinds = dict.fromkeys(sent.kind for _, _, sent in every)
    same = all(sent.kind == _name(bucket.dtype) for bucket, _, sent in every)
    total = sum(count * sent.nbytes for _, count, sent in every)
    return total, words if same else f"{words} as {', '.join(kinds)}"


# What a rank holds in a step.

FILLED = 2  # buckets of full gradients that backward is making, in the dtype that computes


class Cut(NamedTuple):
    """Number of ranks over which each kind of data is cut."""

    states: int
    params: int  # gathered parameters, from their first use in a step to its end
    grads: int  # gradients, after each micro-step

    @classmethod
    def of(cls, route: Route) -> "Cut":
        """Read the numbers of a placement off a route."""
        params, grads = (route.split(n)[1].size for n in (route.outer_params, route.outer_grads))
        return cls(route.size, params, grads)


def memory_formula(
    buckets: Sequence[Bucket],
    cut: Cut,
    sizes: Sequence[int],
    *,
    live_bytes: int | None,
    num_replicas: int = 1,
    micro_steps: int = 1,
) -> dict[str, float]:
    """Compute the most bytes that one of several ranks holds in a step with AdamW, by kind.

    Args:
        buckets: the buckets of the model, all of them trained; padding counts.
        cut: over how many ranks each kind is cut.
        sizes: the ranks of each level of a partition group, outermost first.
        live_bytes: the budget for gathered parameters; None keeps all, as `Trainer` does, which in
            the last pass packs gradients where their parameters were.
        num_replicas: the ranks of a replication group.
        micro_steps: the micro-steps of a step.

    Returns:
        Bytes of "states" (parameters and both moments, which is all that exists between steps),
        "parameters" (a copy kept for the step, and gathered buckets), "sums" (sums of gradients,
        and this rank's means if these are cut further), "hops" (the few buckets that are being
        reduced), and "in full" (gradients that backward is making). Activations are not included,
        nor is the least memory for hops, `LEAST_RING` of `deferred.memory`.
    """
    compute = [bucket.nbytes for bucket in buckets]
    live = 0
    if cut.params > 1 or (cut.states == 1 and any(b.compute != b.dtype for b in buckets)):
        live = sum(compute)
    if live and live_bytes is not None:  # one bucket is always allowed, and one more ahead
        budget = max(live_bytes, max(compute))
        live = min(live, budget + (max(compute) if live_bytes > max(compute) else 0))
    numbers = {0, min(1, micro_steps - 1), micro_steps - 1}  # of passes that differ
    passes = [(number == 0, number == micro_steps - 1) for number in numbers]
    hops, reused = 0.0, bool(live) and live_bytes is None
    sums = [
        bucket.numel * sum_dtype(bucket, micro_steps).itemsize
        for bucket in buckets
        if not (reused and _stays(bucket, cut, micro_steps))
    ]
    for first, last in passes:
        found = [
            _in_hops(b, cut, sizes, num_replicas, micro_steps, first, last, reused) for b in buckets
        ]
        few = max(count for _, count in found) * median_low(nbytes for nbytes, _ in found)
        few = 0 if live_bytes == 0 else few
        hops = max(hops, few, *(nbytes for nbytes, _ in found))
    return {
        "states": 3 * sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets) / cut.states,
        "parameters": live + (sum(compute) / cut.params if cut.params < cut.states else 0),
        "sums": sum(sums) / cut.grads + (sum(sums) / cut.states if cut.grads < cut.states else 0),
        "hops": hops,
        "in full": min(FILLED, len(buckets)) * max(compute),
    }


def _fits(bucket: Bucket, cut: Cut) -> bool:
    """Return whether gradients reuse the memory of gathered parameters in the last pass."""
    sent = [x for x in (bucket.reduce, bucket.hop2_format) if isinstance(x, torch.dtype)]
    return cut.grads > 1 and max(x.itemsize for x in sent) <= bucket.compute.itemsize


def _stays(bucket: Bucket, cut: Cut, micro_steps: int) -> bool:
    """Return whether the mean reuses that memory too, also where hop 2 sends a code of the mean."""
    same = micro_steps == 1 and sum_dtype(bucket, micro_steps) == bucket.reduce
    same = same and not isinstance(bucket.hop2, torch.dtype)
    return same and cut.grads == cut.states and _fits(bucket, cut)


def _in_hops(
    bucket: Bucket,
    cut: Cut,
    sizes: Sequence[int],
    num_replicas: int,
    micro_steps: int,
    first: bool,
    last: bool,
    reused: bool,
) -> tuple[float, int]:
    """Compute the bytes of a bucket's reduction in one pass, and how many there are at most.

    In the first pass a mean goes where the sum will be, in later ones it has to be added to it. If
    the memory of gathered parameters is `reused`, see `_fits` and `_stays`.
    """
    if cut.states == num_replicas == 1:
        return 0, 1
    places = [i for i in range(len(sizes) + 1) if prod(sizes[i:]) == cut.grads]
    outer, inner = sizes[: places[0]], sizes[places[0] :]
    total, width = sum_dtype(bucket, micro_steps), bucket.reduce.itemsize
    same, numel = total == bucket.reduce, bucket.numel
    outer, hop2 = outer if last else (), bucket.hop2_format
    copies = last and total != hop2 and num_replicas > 1
    packed = [0.0, numel * width if cut.grads > 1 else 0 if first else numel * total.itemsize]
    packed.append(numel / cut.grads * width if prod(outer) > 1 and not same else 0)
    if copies and isinstance(hop2, torch.dtype):
        packed.append(numel / cut.states * hop2.itemsize)
    if reused and last and _fits(bucket, cut):
        packed = [0.0]
    direct = same and first and not (reused and _stays(bucket, cut, micro_steps))
    received = max(
        _received(bucket, inner, numel, direct), _received(bucket, outer, numel / cut.grads, same)
    )
    if copies and isinstance(hop2, Codec):
        received = max(received, mean_bytes(hop2, numel // cut.states, num_replicas))
    gathers = copies and isinstance(hop2, Codec)  # of codes, while others are exchanged
    return max(packed) + received, 1 + len(inner) + len(outer) + copies + gathers


def _received(bucket: Bucket, sizes: Sequence[int], numel: float, direct: bool) -> float:
    """Compute the bytes of receive buffers, if the last level can `direct` them to the mean.

    Ranks exchange parts of gradients: of two one arrives, else all. Codes of hop 1 count as if all
    levels sent them.
    """
    most, width = 0.0, bucket.reduce.itemsize
    for i in reversed(range(len(sizes))):
        all_parts = sizes[i] > 2
        if bucket.hop1 is not None:  # those that are sent, and those that arrive
            most = max(most, 2 * (sizes[i] - 1) * bucket.hop1.codec.nbytes(int(numel) // sizes[i]))
        elif all_parts or not (direct and i == 0):
            most = max(most, width * (numel if all_parts else numel / sizes[i]))
        numel /= sizes[i]
    return most


def sum_dtype(bucket: Bucket, micro_steps: int) -> torch.dtype:
    """Return the dtype of a sum of gradients; for one micro-step the wider of its two ends."""
    if micro_steps > 1:
        return bucket.accumulate
    return torch.promote_types(bucket.dtype, bucket.reduce)
