"""`bench bytes`: what a step sends at each level, as counted, by formula, and on the wire."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

import mics_fn as mf
from mics_fn.collectives import Codec
from mics_fn.groups import Comm, Topology, valid_partition_sizes
from mics_fn.lab.bench.links import HEADER_BYTES, Counters, node_interface, read_counters
from mics_fn.lab.bench.stage import TrainConfig, joined, make_batches, make_trainer
from mics_fn.lab.bench.turns import is_first, of_all_ranks, say, start, timed
from mics_fn.lab.report import buckets_of, table, wire_bytes
from mics_fn.shards import Bucket, Precision


@dataclass(frozen=True, kw_only=True)
class BytesConfig(TrainConfig):
    """Everything that decides what is measured.

    Args:
        partition_sizes: ranks that share one replica; () takes all sizes that fit.
        live_buckets: the budget for gathered parameters in units of the largest one, as peers of
            `bench step` have it; None keeps all.
    """

    partition_sizes: tuple[int, ...] = ()
    live_buckets: int | None = None


class RankBytes(NamedTuple):
    """What one rank counted in its steps."""

    ledger: list[dict[str, tuple[int, int]]]  # for each step: name -> (calls, bytes)
    formula: dict[str, tuple[float, str]]  # for one step: name -> (bytes, formula in words)
    crossing: float  # bytes of the formula that leave the node
    wire: Counters | None  # of its node in all steps; None if the node has no counters of its own


def measure_bytes(config: BytesConfig) -> dict[str, Any]:
    """Count a step's bytes for each partition size and precision, as one rank of a job.

    Returns:
        On rank 0 the figures; {} on the others.
    """
    device = start(config.device)
    interface = node_interface(config.node_size)
    sizes = config.partition_sizes
    sizes = sizes or valid_partition_sizes(Topology.of(dist.get_world_size(), config.node_size))
    found = []
    for p, precision in itertools.product(sizes, config.precisions):
        say(f"p = {p}, {precision}: counting ...")
        with mf.make_groups(p, node_size=config.node_size, device=device) as groups:
            full_bytes, mine = _run(config, groups, interface, precision)
            every = [_rebuilt(*one) for one in of_all_ranks(mine)]
            part = _summarize(config, groups, full_bytes, every)
            found.append({**part, "precision": precision})
    if not is_first():
        return {}
    return {"interface": interface, "partition_sizes": found}


def _run(
    config: BytesConfig, groups: mf.Groups, interface: str | None, precision: str
) -> tuple[int, RankBytes]:
    """Padded bytes of the parameters, and what this rank's steps sent."""
    trainer, _ = make_trainer(config, groups, config.live_buckets, Precision.parse(precision))
    batch = joined(make_batches(config, groups.device, 1)[0])
    for _ in range(config.turns.warmup):
        trainer.step(batch)
    ledger = []

    def measured() -> None:
        for _ in range(config.turns.steps):
            groups.traffic.clear()
            trainer.step(batch)
            ledger.append(groups.traffic.snapshot())

    _, wire = timed(
        measured,
        device=groups.device,
        fence=dist.barrier,
        gauge=lambda: read_counters(interface),
    )
    buckets = buckets_of(trainer.state.params)
    schedule = getattr(trainer.schedule, "schedule", None)
    formula, crossing = formulas_of(
        groups,
        buckets,
        config.node_size,
        accumulate=config.accumulate,
        fetches=None if schedule is None else Counter(schedule.fetches),
    )
    full_bytes = sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets)
    return full_bytes, RankBytes(ledger, formula, crossing, wire)


def _rebuilt(*values: Any) -> RankBytes:
    found = RankBytes(*values)
    return found._replace(wire=found.wire and Counters(*found.wire))


def formulas_of(
    groups: mf.Groups, buckets: Sequence[Bucket], node_size: int, **how: Any
) -> tuple[dict[str, tuple[float, str]], float]:
    """`wire_bytes` of a rank, and how many of them it sends to other nodes.

    Args:
        groups: those of the rank.
        buckets: of the parameters.
        node_size: ranks of a node.
        how: options of `wire_bytes`.
    """
    route, r = groups.hierarchy.route, groups.num_replicas
    comms = [comm for level in route.levels for comm in (level.gather, level.reduce)]
    comms.append(groups.replicas)
    # In hop 2 values go around a ring, and codes straight to each replica.
    crossing = 0.0
    for coded in (False, True):
        some = [bucket for bucket in buckets if isinstance(bucket.mean_wire, Codec) == coded]
        formula = wire_bytes(some, route, r, **how)
        sent = [(comm, formula.get(comm.name, (0.0, ""))[0]) for comm in comms]
        crossing += sum(n * leaving_share(comm, node_size, ring=not coded) for comm, n in sent)
    return wire_bytes(buckets, route, r, **how), crossing


def leaving_share(comm: Comm, node_size: int, *, ring: bool) -> float:
    """The share of what this rank sends through a communicator that leaves its node.

    A level lies inside a node, or has one rank in each. A replication group may have several ranks
    in a node: in a ring a rank sends everything to the next one, else equally much to each.

    Args:
        comm: the communicator.
        node_size: ranks of a node.
        ring: whether it sends to the next rank alone. The few bytes of codes that gloo gathers in a
            ring, because a bucket is small, count as if they were not.
    """
    others = [comm.ranks[(comm.rank + step) % comm.size] for step in range(1, comm.size)]
    own, to = comm.ranks[comm.rank] // node_size, others[:1] if ring else others
    return sum(rank // node_size != own for rank in to) / max(1, len(to))


def _summarize(
    config: BytesConfig, groups: mf.Groups, full_bytes: int, every: list[RankBytes]
) -> dict[str, Any]:
    first = every[0]
    names = list(dict.fromkeys([*first.formula, *(w for r in every for w in r.ledger[-1])]))
    rows = {}
    for name in names:
        counted = [rank.ledger[-1].get(name, (0, 0)) for rank in every]
        formula, why = first.formula.get(name, (0.0, "not part of a step"))
        rows[name] = {
            "calls": [calls for calls, _ in counted],
            "ledger": [nbytes for _, nbytes in counted],
            "formula": formula,
            "why": why,
        }
    nodes = [every[i : i + config.node_size] for i in range(0, len(every), config.node_size)]
    return {
        "partition_size": groups.partition_size,
        "num_replicas": groups.num_replicas,
        "levels": [[level.name, level.gather.size] for level in groups.hierarchy.route.levels],
        "full_bytes": full_bytes,
        "steady": all(step == rank.ledger[0] for rank in every for step in rank.ledger),
        "rows": rows,
        "wire": [_wire(node, config.turns.steps) for node in nodes],
    }


def _wire(node: list[RankBytes], steps: int) -> dict[str, float | None]:
    """The bytes that left one node in a step, and those of the formula."""
    formula, wire = sum(rank.crossing for rank in node), node[0].wire
    if wire is None:
        return {"formula": formula, "counted": None, "payload": None}
    payload = (wire.nbytes - HEADER_BYTES * wire.packets) / steps
    return {"formula": formula, "counted": wire.nbytes / steps, "payload": payload}


def render_bytes(figures: dict[str, Any], config: BytesConfig) -> str:
    """The figures as tables."""
    interface = figures["interface"]
    blocks = []
    for part in figures["partition_sizes"]:
        levels = " x ".join(f"{name} {size}" for name, size in part["levels"]) or "none"
        title = (
            f"p = {part['partition_size']}, levels {levels}, r = {part['num_replicas']} replicas, "
            f"M = {part['full_bytes']:,} bytes, s = {config.accumulate}, "
            f"{part['precision']}; each rank in one step"
        )
        rows = [("", "calls", "ledger", "formula", "ratio", "")]
        for name, row in part["rows"].items():
            worst = max(row["ledger"], key=lambda sent: abs(sent - row["formula"]))
            cells = (f"{max(row['calls'])}", f"{worst:,}", f"{row['formula']:,.0f}")
            rows.append((name, *cells, _ratio(worst, row["formula"]), row["why"]))
        leaving = part["wire"][0]["formula"]
        if not interface and leaving:
            rows.append(("out of a node", "", "", f"{leaving:,.0f}", "-", "of all its ranks"))
        for number, wire in enumerate(part["wire"] if interface else ()):
            formula = wire["formula"]
            cells = (f"{wire['counted']:,.0f}", f"{formula:,.0f}", _ratio(wire["counted"], formula))
            less = f"{_ratio(wire['payload'], formula)} without headers"
            rows.append((f"node {number}, {interface}", "", *cells, less))
        steady = "the same in every step" if part["steady"] else "NOT THE SAME IN EVERY STEP"
        blocks.append(f"{table(title, rows)}\n  {steady}")
    last = "the bytes that leave a node are not counted, because the nodes here share a network"
    if interface:
        last = f"node: bytes of its ranks through {interface}, the mean of {config.turns.steps} "
        last += f"steps; headers are {HEADER_BYTES} bytes per packet"
    return "\n\n".join([*blocks, last])


def _ratio(counted: float, formula: float) -> str:
    return f"{counted / formula:.4f}" if formula else "-"
