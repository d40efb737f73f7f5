"""`bench step`: whole training steps of `Trainer` against plain torch loops and against FSDP2.

And `bench bytes`: what such a step sends at each level, as counted and by formula.

[Note: what is hidden] A second of the optimizer is hidden if a hop 2 was under way in all of it. On
the CPU a rank notices late that a transfer is over, so a timeline shows transfers longer than they
were. One counts here only if it ended while the host waited for a hop 2, a millisecond or more
after the wait had begun: then it was under way until the wait. So the shares are lower bounds. What
is left is exposed: the step is longer by it.

[Note: resident memory] Peers that take turns in one process share its memory, so here each peer has
its own processes. Memory counts from the end of a few steps of a tiny model, when all code is
loaded. Glibc keeps freed blocks of up to 32 MB for later, so the peak of resident memory is larger
than the peak of memory in use. Both are measured, each in processes of its own: "resident" with the
usual allocator, "used" with an allocator that returns blocks to the system at once. "made" is the
peak of the latter until the peer was built, with its parameters and the states of its optimizer.

[Note: link rates] The bench cannot make a link slower, but some clusters can. Such a cluster has an
importable module with a function `set_rate(rate)`, which every rank calls while all are idle, and
which returns on rank 0 once the rate is in force. The variable MICS_FN_LINKS names the module.
"""

import contextlib
import gc
import importlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mics_fn as mf
from mics_fn.errors import PlanError
from mics_fn.groups import Topology, placement, read_launch, valid_partition_sizes
from mics_fn.lab.bench import mesh, turns
from mics_fn.lab.bench.turns import BenchPeer, BenchTurns, Laps
from mics_fn.lab.models import Batch, GPTConfig, TrainingTask, join, load_text, loss_of, num_params
from mics_fn.lab.ranks import launch
from mics_fn.lab.report import buckets_of, bytes_or_dash, table, wire_bytes
from mics_fn.shards import Precision

TEXT_BYTES = 500_000
DEFAULT_PEERS = ("keep", "zero3", "fsdp2", "fsdp2-keep", "plain")
OVERLAP_PEERS = ("keep", "overlap")
LINKS, DEFAULT_LINKS = "MICS_FN_LINKS", "rigmark"  # see [Note: link rates]


@dataclass(frozen=True, kw_only=True)
class StepConfig(TrainingTask):
    """Options of `bench step` and `bench bytes`.

    Args:
        node_size: nodes are groups of so many ranks.
        partition_sizes: ranks that share one replica: one number; for bytes several, or all that
            fit if there are none.
        turns: how many steps.
        precisions: texts of precisions, in each of which is measured; () means float32, which is
            then not part of a peer's label.
        device: "auto", "cpu" or "cuda".
        peers: names from `PEERS`.
        folder: where the states of the peer "disk" lie.
        rate: of the links between nodes; "" leaves them as they are.
        overlap: measure also what is hidden behind hop 2.
        rss: measure memory instead, each peer in processes of its own.
        parts: number of ranks over which a model is cut, and which have the same batches.
        compiled: measure each peer with compiled blocks as well.
        live_buckets: for bytes, the budget for gathered parameters in units of the largest one, as
            peers have it; None keeps all.
    """

    node_size: int
    partition_sizes: tuple[int, ...] = ()
    turns: BenchTurns = field(default_factory=BenchTurns)
    precisions: tuple[str, ...] = ()
    device: str = "auto"
    peers: tuple[str, ...] = DEFAULT_PEERS
    folder: str = ""
    rate: str = ""
    overlap: bool = False
    rss: bool = False
    parts: int = 1
    compiled: bool = False
    live_buckets: int | None = None

    def make_model(self, device: Any = "cpu") -> Any:
        """Make the initial model of every peer, cut over `parts`, with its blocks `compiled`."""
        model = super().make_model(device)
        for block in model.blocks if self.compiled else ():
            block.compile(dynamic=False)
        return mesh.parallelized(model, self.mesh(device)["tp"]) if self.parts > 1 else model

    def mesh(self, device: Any, p: int = 0) -> Any:
        """Return the mesh (replicate, shard, tp) of all ranks; by default for the first p."""
        return mesh.mesh_of(torch.device(device).type, p or self.partition_sizes[0], self.parts)


class Stage(NamedTuple):
    """Inputs from which a peer is built, on this rank."""

    config: StepConfig
    device: torch.device
    batches: list[list[Batch]]  # by step and micro-step, the same for every peer
    closing: contextlib.ExitStack  # closes what peers leave open
    precision: Precision = Precision()  # of the next peer


def make_batches(config: StepConfig, device: torch.device, steps: int) -> list[list[Batch]]:
    """Make the batches of this rank, by step and micro-step."""
    text, micros = load_text(TEXT_BYTES), range(config.accumulate)
    rank = dist.get_rank() // config.parts
    return [
        [join([config.batch(text, step, micro, rank)], device) for micro in micros]
        for step in range(steps)
    ]


# The peers of `bench step`: `Trainer` in several modes, and the ways to train of torch itself.


def _trainer(
    stage: Stage, *, live: int | None, wide: bool = False, place: str = "", more: str = ""
) -> BenchPeer:
    """Build a `Trainer` that keeps all gathered parameters, or has a budget of `live` buckets.

    Two give the memory of ZeRO-3: a bucket in use, the next one, and one more that `live_bytes`
    allows. Its partition groups are those of the stage, or `wide` ones of all ranks. Parameters
    may have a placement. With `more`, buckets are stepped while others are in hop 2, or the states
    of the optimizer lie in files.
    """
    config = stage.config
    p = dist.get_world_size() if wide else config.partition_sizes[0]
    how: dict[str, Any] = {"node_size": config.node_size * config.parts, "device": stage.device}
    if config.parts > 1:
        how |= {"mesh": config.mesh(stage.device), "model": "tp"}
    groups = mf.make_groups(p, **how)
    groups = stage.closing.enter_context(placement.place(groups, place) if place else groups)
    how = {"where": f"states=disk:{config.folder}"} if more == "on disk" else {}
    if more == "overlapped":
        how = {"overlap_step": True, "guard": mf.optim.Guard(on_nonfinite="ignore")}
    trainer = make_trainer(config, groups, live, stage.precision, **how)
    batches = [join(micros) for micros in stage.batches]
    kind = place or {None: "keep", 0: "least", 2: "two buckets"}[live]
    name = f"Trainer p={p}, {kind}{more and f', {more}'}"
    return BenchPeer(name, lambda step: trainer.step(batches[step]).loss)


def make_trainer(
    config: StepConfig, groups: mf.Groups, live: int | None, precision: Precision, **options: Any
) -> mf.Trainer:
    """Make a trainer of the GPT with a budget of `live` buckets; None keeps all."""
    model = config.make_model(groups.device)
    if config.parts > 1:
        options["guard"] = mf.optim.Guard(max_norm=mesh.MAX_NORM)
    # A parameter that is larger than a bucket has a bucket of its own.
    largest = max(parameter.numel() for parameter in model.parameters())
    largest *= precision.formats("", torch.float32).compute.itemsize
    return mf.Trainer(
        model,
        mf.optim.adamw(config.lr),
        groups,
        loss=loss_of,
        accumulate=config.accumulate,
        live_bytes=None if live is None else live * largest,
        precision=precision,
        **options,
    )


def _plain(stage: Stage) -> BenchPeer:
    return _torch_loop("plain torch loop", stage, stage.config.make_model(stage.device))


def _ddp(stage: Stage) -> BenchPeer:
    """Build DistributedDataParallel, which reduces in the last micro-step alone."""
    model = DistributedDataParallel(stage.config.make_model(stage.device))

    def begin(last: bool) -> None:
        model.require_backward_grad_sync = last  # what `no_sync` sets

    return _torch_loop("DDP", stage, model, begin)


def _fsdp2(stage: Stage, *, full: bool, keep: bool) -> BenchPeer:
    """Build FSDP2 on a (replicate, shard) mesh, or on one of all ranks.

    With `keep` parameters are gathered once per step, otherwise again for backward.
    """
    config = stage.config
    p = dist.get_world_size() if full else config.partition_sizes[0]
    formats = stage.precision.formats("", torch.float32)
    model = config.make_model(stage.device).to(formats.dtype)
    over = config.mesh(stage.device, p)  # of which one replica takes no dimension
    over = over["shard" if over["replicate"].size() == 1 else ("replicate", "shard")]
    options: dict[str, Any] = {"mesh": over, "reshard_after_forward": not keep}
    options["mp_policy"] = MixedPrecisionPolicy(formats.compute, formats.reduce)
    for block in model.blocks:
        fully_shard(block, **options)
    root = fully_shard(model, **options)

    def begin(last: bool) -> None:
        # As in MiCS: hop 1 in each micro-step, hop 2 in the last one.
        root.set_requires_all_reduce(last)
        if keep:
            root.set_reshard_after_backward(last)

    name = ("FSDP2 full" if full else "FSDP2") + f" p={p}, " + ("keep" if keep else "default")
    return _torch_loop(name, stage, model, begin)


def _torch_loop(
    name: str, stage: Stage, model: nn.Module, begin: Callable[[bool], None] = lambda last: None
) -> BenchPeer:
    """Build a loop of plain torch; `begin` gets whether a micro-step is the last one."""
    config = stage.config
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, fused=True)
    last = config.accumulate - 1

    def step(number: int) -> Tensor:
        losses = []
        for micro, batch in enumerate(stage.batches[number]):
            begin(micro == last)
            loss = loss_of(model, batch)
            (loss / config.accumulate if last else loss).backward()
            losses.append(loss.detach())
        if config.parts > 1:
            mesh.clip(model.parameters())
        optimizer.step()
        # At the end, so that no gradients stay in memory between steps, as for every peer.
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    return BenchPeer(name, step)


class PeerKind(NamedTuple):
    """Way to train: what builds the peer, and in which worlds."""

    build: Callable[[Stage], BenchPeer]
    ours: bool = False
    alone: bool = True  # in a world of one
    together: bool = True
    mixed: bool = True  # takes a precision
    cut: bool = False  # takes a model in parts


PEERS = {
    "keep": PeerKind(partial(_trainer, live=None), ours=True, cut=True),
    "zero3": PeerKind(partial(_trainer, live=2), ours=True, cut=True),
    "least": PeerKind(partial(_trainer, live=0), ours=True, cut=True),
    "wide-zero3": PeerKind(partial(_trainer, wide=True, live=2), ours=True, alone=False),
    "hpz": PeerKind(partial(_trainer, wide=True, live=2, place="hpz"), ours=True, alone=False),
    "overlap": PeerKind(partial(_trainer, live=None, more="overlapped"), ours=True, alone=False),
    "disk": PeerKind(partial(_trainer, live=None, more="on disk"), ours=True),
    "fsdp2": PeerKind(partial(_fsdp2, full=False, keep=False), cut=True),
    "fsdp2-keep": PeerKind(partial(_fsdp2, full=False, keep=True), cut=True),
    "fsdp2-full": PeerKind(partial(_fsdp2, full=True, keep=False), alone=False),
    "ddp": PeerKind(_ddp, mixed=False),
    "plain": PeerKind(_plain, together=False, mixed=False),
}


_COMPILED = "+compile"


def fitting(peers: Iterable[str], world_size: int) -> list[str]:
    """Select the peers that make sense in a world of this size."""
    found = [(name, PEERS[name]) for name in peers]
    return [name for name, x in found if (x.alone if world_size == 1 else x.together)]


def labels(config: StepConfig, world_size: int) -> list[str]:
    """Label the peers that fit: by name, or once in each precision, such as "keep@bf16"."""
    found, plain = [], fitting(config.peers, world_size)
    for name in [*plain, *(f"{name}{_COMPILED}" for name in plain if config.compiled)]:
        every = config.precisions if PEERS[name.removesuffix(_COMPILED)].mixed else ()
        found += [f"{name}@{text}" for text in every] or [name]
    return found


def build(stage: Stage, label: str) -> BenchPeer:
    """Build the peer with a label of `labels`."""
    name, _, text = label.partition("@")
    config = replace(stage.config, compiled=name.endswith(_COMPILED))
    given = stage._replace(config=config, precision=Precision.parse(text))
    return PEERS[name.removesuffix(_COMPILED)].build(given)


def check_peers(config: StepConfig, world_size: int) -> None:
    """Raise PlanError for peers, precisions and flags that do not fit together."""
    fit = fitting(config.peers, world_size)
    if not fit:
        what = f"--peers {' '.join(config.peers)}: none is measured with {world_size} ranks"
        raise PlanError(what, fix=f"choose from {' '.join(fitting(PEERS, world_size))}")
    others = [name for name in fit if config.parts > 1 and not PEERS[name].cut]
    if others or world_size % config.parts:
        what = f"--mesh: {[*others, f'a world of {world_size}'][0]} takes no model in parts"
        raise PlanError(what, fix="leave that peer out, and launch pairs of ranks")
    others = [name for name in fit if not PEERS[name].ours]
    if config.overlap and others:
        raise PlanError(f"--overlap: {others[0]} has no timeline", fix="leave that peer out")
    if config.overlap and config.partition_sizes[0] == world_size:
        raise PlanError("--overlap: one replica has no hop 2", fix="lower --partition-size")
    others = [name for name in others if PEERS[name].mixed]
    if others and any(Precision.parse(text).overrides for text in config.precisions):
        raise PlanError(f"--precision: {others[0]} has one for all leaves", fix="leave it out")
    if config.rss and config.rate:
        raise PlanError("--rss: memory does not depend on --rates", fix="leave one of them out")
    if config.rss and read_launch(os.environ) is not None:
        fix = "run it without a launcher, on any machine: --rss starts ranks of its own"
        raise PlanError("--rss in a job: it needs new processes for each peer", fix=fix)


def link_setter(rate: str) -> Callable[[str], Any]:
    """Import what sets the rate of links; see [Note: link rates]."""
    name = os.environ.get(LINKS, DEFAULT_LINKS)
    try:
        return importlib.import_module(name).set_rate
    except (ImportError, AttributeError) as error:
        fix = f"use a cluster that can, with its module in {LINKS}; or leave --rates out"
        what = f"--rates {rate}: nothing here sets the rate of a link"
        raise PlanError(what, [f"{LINKS}={name}: {error}"], fix) from None


# `bench step`: times.

_WAITED_S = 1e-3
SHARES = ("optimizer", "exposed", "hidden")
LEGEND = """\
seconds per step: of the slowest rank. x/it: the time of x divided by that of this row, round by
round. processor: seconds of the processor in a step, the mean over ranks. gap: the largest relative
difference from the loss of {first} at any of these steps."""
_OVER_FIRST = "\nover {first}: the time of a peer divided by its own in that precision."
_HIDDEN = """
optimizer, exposed: seconds of a step in which leaves are updated, and those of them in which no hop
2 was certainly under way; means over ranks. hidden: the share of the optimizer not exposed."""


def measure_step(config: StepConfig) -> dict[str, Any]:
    """Compare peers that take turns, as one rank of a job.

    Returns:
        On rank 0 the figures by peer; {} on the others.
    """
    device = turns.start(config.device)
    names = labels(config, dist.get_world_size())
    turns.say(f"world {dist.get_world_size()}: {', '.join(names)} take turns ...")
    with contextlib.ExitStack() as closing:
        batches = make_batches(config, device, config.turns.all_steps)
        stage = Stage(config, device, batches, closing)
        peers = [_watched(build(stage, name), config.overlap) for name in names]
        if config.rate:
            dist.barrier()
            link_setter(config.rate)(config.rate)
            dist.barrier()
        laps = turns.take_turns(peers, config.turns, device=device, fence=dist.barrier)
    every = turns.of_all_ranks(laps)
    if not turns.is_first():
        return {}
    merged = [_merge([Laps(*lap) for lap in found]) for found in zip(*every, strict=True)]
    return _compare(config, dict(zip(names, merged, strict=True)))


def _merge(laps: Sequence[Laps]) -> Laps:
    """Merge the laps of one peer on all ranks: a step takes as long as its slowest rank."""
    _, seconds, busy, results = (list(zip(*each, strict=True)) for each in zip(*laps, strict=True))
    means = [list(map(fmean, zip(*ranks, strict=True))) for ranks in results]
    return Laps(laps[0].name, list(map(max, seconds)), list(map(fmean, busy)), means)


def _watched(peer: BenchPeer, overlap: bool) -> BenchPeer:
    """Make its step return a list of the loss and, if asked, what `updates_of` its timeline is."""

    def step(number: int) -> list[Any]:
        with mf.inspection.watch() if overlap else contextlib.nullcontext() as watched:
            loss = peer.step(number)
        return [loss, *(updates_of(watched.timeline()) if watched else ())]

    return peer._replace(step=step)


def updates_of(timeline: mf.inspection.Timeline) -> tuple[float, float]:
    """Return a step's seconds of the optimizer, and those of them that are exposed.

    See [Note: what is hidden].

    >>> from mics_fn.inspection import Event, Timeline
    >>> timeline = Timeline("step 1", (
    ...     Event("hop2", "w", (0,), "replicas", 8, 0.0, 3.0),
    ...     Event("opt", "b", (1,), "", 0, 1.0, 2.0),
    ...     Event("wait", "hop2 bucket 0: w", (0,), "", 0, 2.0, 3.0),
    ...     Event("opt", "w", (0,), "", 0, 3.0, 3.5)), 3.5)
    >>> updates_of(timeline)
    (1.5, 0.5)
    """
    waits, hops, updates = (
        [(x.start_s, x.end_s) for x in timeline.events if f"{x.kind} {x.about}".startswith(kind)]
        for kind in ("wait hop2", "hop2 ", "opt ")
    )
    sent = [(a, b) for a, b in hops if any(c + _WAITED_S <= b <= d for c, d in waits)]
    exposed = seconds = sum(b - a for a, b in updates)
    for reached, end in updates:
        for a, b in sorted(sent):  # each second counts once, however many are under way
            exposed -= max(0.0, min(b, end) - max(a, reached))
            reached = max(b, reached)
    return seconds, exposed


def _hidden(results: Sequence[list[float]], config: StepConfig) -> dict[str, Any]:
    """Compute what is hidden of one peer from what its steps returned."""
    steps, timed = config.turns.steps, results[config.turns.warmup :]
    rounds = [timed[i : i + steps] for i in range(0, len(timed), steps)]
    sums = [[fmean(step[i] for step in own) for i in (1, 2)] for own in rounds]
    found = zip(*[(a, b, 1 - b / a) for a, b in sums], strict=True)
    return {x: turns.spread(values) for x, values in zip(SHARES, found, strict=True)}


def _compare(config: StepConfig, laps: dict[str, Laps]) -> dict[str, Any]:
    """Compute the figures of one comparison from the laps by peer."""
    parts = {label: label.partition("@") for label in laps}
    losses = {label: [result[0] for result in lap.results] for label, lap in laps.items()}
    mine = [
        label for label, (name, _, _) in parts.items() if PEERS[name.removesuffix(_COMPILED)].ours
    ]
    first, ours = (mine or [*laps])[0], list(dict.fromkeys(parts[label][0] for label in mine))
    peers = []
    for label, lap in laps.items():
        name, _, precision = parts[label]
        pairs = zip(losses[first], losses[label], strict=True)
        # Peers are compared in one precision, and each peer with itself in the first one.
        others = {parts[x][0]: x for x in mine if x != label and parts[x][2] == precision}
        same = next(x for x in laps if parts[x][0] == name)
        over_first = None if same == label else turns.ratio(lap.seconds, laps[same].seconds)
        found = {
            "name": label,
            "title": lap.name,
            "seconds_by_round": lap.seconds,
            "seconds": turns.spread(lap.seconds),
            "processor": turns.spread(lap.processor),
            "over_it": {x: turns.ratio(laps[y].seconds, lap.seconds) for x, y in others.items()},
            "over_first": over_first,
            "losses": losses[label],
            "largest_loss_gap": max(abs(a - b) / abs(b) for a, b in pairs),
        }
        peers.append(found | (_hidden(lap.results, config) if config.overlap else {}))
    return {"params": num_params(config.model), "ours": ours, "first": first, "peers": peers}


def render_step(figures: dict[str, Any], config: StepConfig) -> str:
    """Render the figures as a table."""
    ours, several = figures["ours"], config.precisions[:1] * (len(config.precisions) > 1)
    hidden = SHARES * config.overlap
    head = ["", "seconds per step", *(f"{name}/it" for name in ours)]
    rows = [[*head, *(f"over {text}" for text in several), *hidden, "processor", "gap"]]
    for peer in figures["peers"]:
        ratios = [peer["over_it"].get(x) for x in ours] + [peer["over_first"] for _ in several]
        row = [f"{peer['name']}: {peer['title']}", turns.between(peer["seconds"], ".4f")]
        row += [turns.between(found, ".3f") if found else "" for found in ratios]
        row += [turns.between(peer[x], ".2f" if x == "hidden" else ".4f") for x in hidden]
        rows.append([*row, f"{peer['processor']['median']:.4f}", f"{peer['largest_loss_gap']:.1e}"])
    links = f", links {config.rate}" if config.rate else ""
    links = f", cut over {config.parts}{links}" if config.parts > 1 else links
    title = f"{_world(figures, config)}{links}: {config.turns}"
    legend = LEGEND.format(first=figures["first"]) + _HIDDEN * config.overlap
    legend += "".join(_OVER_FIRST.format(first=text) for text in several)
    return f"{table(title, rows)}\n\n{legend}"


def _world(figures: dict[str, Any], config: StepConfig) -> str:
    world = f"nodes of {config.node_size}, p = {config.partition_sizes[0]}"
    return f"{world}, {figures['params']:,} parameters, accumulate {config.accumulate}"


# `bench step --rss`: the memory of a rank that runs one peer and nothing else.

GROWN = ("resident", "used", "made")
_RSS_LEGEND = """\
Each peer ran alone in new processes, twice; figures are those of the fullest rank. before: resident
memory once all code was loaded, from which the others count. resident: the most in the steps. used:
the same with an allocator that returns freed memory at once; made: the most until it was built."""


def run_rss(config: StepConfig, ranks: int) -> dict[str, Any]:
    """Measure one peer after the other, each on its own ranks."""
    peers = []
    for name in labels(config, ranks):
        turns.say(f"{name}: alone in new processes, twice ...")
        usual, tight = (launch(measure_rss, ranks, config, name, each) for each in (False, True))
        found = {"name": name, "title": tight[0]["title"]}
        found["before"] = max(rank["before"] or 0 for rank in usual)
        grown = [_grown(usual, "steps"), _grown(tight, "steps"), _grown(tight, "made")]
        peers.append(found | dict(zip(GROWN, grown, strict=True)))
    return {"params": num_params(config.model), "peers": peers}


def measure_rss(config: StepConfig, name: str, tight: bool) -> dict[str, Any]:
    """Measure one peer as a rank of several; if `tight`, the allocator frees memory at once."""
    device = turns.start(config.device)
    if tight:
        turns.give_back_at_once()
    tiny = GPTConfig(256, config.model.context, dim=16, num_heads=2, num_blocks=1)
    _take_steps(replace(config, model=tiny), name, device, 2, 0)
    gc.collect()
    steps = config.turns.rounds * config.turns.steps
    known, before = turns.reset_peak(device) is not None, turns.memory_bytes(device)
    found = _take_steps(config, name, device, config.turns.warmup, steps)
    return {**found, "known": known, "before": before}


def _take_steps(
    config: StepConfig, name: str, device: torch.device, warmup: int, steps: int
) -> dict[str, Any]:
    """Build the peer and take its steps; return the peaks of memory, made and in steps."""
    with contextlib.ExitStack() as closing:
        stage = Stage(config, device, make_batches(config, device, warmup + steps), closing)
        peer = build(stage, name)
        made = turns.peak_bytes(device)
        for number in range(warmup):
            peer.step(number)
        dist.barrier()
        turns.reset_peak(device)
        for number in range(warmup, warmup + steps):
            peer.step(number)
        return {"title": peer.name, "made": made, "steps": turns.peak_bytes(device)}


def _grown(ranks: Sequence[dict], key: str) -> int | None:
    """Return by how many bytes the fullest rank grew; None if that could not be measured."""
    if not all(rank["known"] for rank in ranks):
        return None
    return max(rank[key] - rank["before"] for rank in ranks)


def render_rss(figures: dict[str, Any], config: StepConfig) -> str:
    """Render the figures as a table."""
    rows = [["", "before", *GROWN]]
    for peer in figures["peers"]:
        sizes = [bytes_or_dash(peer[key]) for key in ("before", *GROWN)]
        rows.append([f"{peer['name']}: {peer['title']}", *sizes])
    return f"{table(f'memory of a rank, {_world(figures, config)}', rows)}\n\n{_RSS_LEGEND}"


# `bench bytes`.


def measure_bytes(config: StepConfig) -> dict[str, Any]:
    """Count the bytes of a step for each partition size and precision, as one rank of a job.

    Returns:
        On rank 0 the figures; {} on the others.
    """
    device = turns.start(config.device)
    topology = Topology.of(dist.get_world_size(), config.node_size)
    sizes = config.partition_sizes or valid_partition_sizes(topology)
    found = []
    for p, text in itertools.product(sizes, config.precisions or ("f32",)):
        turns.say(f"p = {p}, {text}: counting ...")
        with mf.make_groups(p, node_size=config.node_size, device=device) as groups:
            found.append({"precision": text, **_count(config, groups, Precision.parse(text))})
    return {"partition_sizes": found} if turns.is_first() else {}


def _count(config: StepConfig, groups: mf.Groups, precision: Precision) -> dict[str, Any]:
    """Count the bytes that the steps of all ranks send, beside the formulas for this one."""
    trainer = make_trainer(config, groups, config.live_buckets, precision)
    batch = join(make_batches(config, groups.device, 1)[0])
    for _ in range(config.turns.warmup):
        trainer.step(batch)
    ledger = []  # of each step: by communicator its calls, and bytes
    for _ in range(config.turns.steps):
        groups.traffic.clear()
        trainer.step(batch)
        ledger.append(groups.traffic.snapshot())
    every = turns.of_all_ranks(ledger)
    buckets, route = buckets_of(trainer.state.params), groups.hierarchy.route
    planned = getattr(trainer.schedule, "schedule", None)  # on a budget buckets are gathered again
    fetches = None if planned is None else Counter(planned.fetches)
    r, s = groups.num_replicas, config.accumulate
    formulas = wire_bytes(buckets, route, r, accumulate=s, fetches=fetches)
    rows = {}
    for name in dict.fromkeys([*formulas, *(name for steps in every for name in steps[-1])]):
        formula, why = formulas.get(name, (0.0, "not part of a step"))
        calls, nbytes = zip(*[steps[-1].get(name, (0, 0)) for steps in every], strict=True)
        rows[name] = {"calls": calls, "ledger": nbytes, "formula": formula, "why": why}
    return {
        "partition_size": groups.partition_size,
        "num_replicas": r,
        "levels": [[level.name, level.gather.size] for level in route.levels],
        "full_bytes": sum(x.numel * x.dtype.itemsize for x in buckets),
        "steady": all(step == steps[0] for steps in every for step in steps),
        "rows": rows,
    }


def render_bytes(figures: dict[str, Any], config: StepConfig) -> str:
    """Render the figures as tables."""
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
            formula = row["formula"]
            worst = max(row["ledger"], key=lambda sent: abs(sent - formula))
            ratio = f"{worst / formula:.4f}" if formula else "-"
            cells = (f"{max(row['calls'])}", f"{worst:,}", f"{formula:,.0f}", ratio, row["why"])
            rows.append((name, *cells))
        steady = "the same in every step" if part["steady"] else "NOT THE SAME IN EVERY STEP"
        blocks.append(f"{table(title, rows)}\n  {steady}")
    return "\n\n".join(blocks)
