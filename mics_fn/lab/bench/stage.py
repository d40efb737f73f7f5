"""What the peers of `bench step` are built from: sizes, batches, and a world of ranks."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from statistics import median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mics_fn as mf
from mics_fn.collectives import Codec, mean_bytes
from mics_fn.errors import PlanError
from mics_fn.groups import placement, read_launch
from mics_fn.lab.bench.turns import BenchPeer, BenchTurns
from mics_fn.lab.models import gpt
from mics_fn.lab.models.task import Batch, TrainingTask, join
from mics_fn.lab.models.text import load_text
from mics_fn.shards import Bucket, Precision

# The formula for what a rank should hold.

FILLED = 2  # buckets of full gradients that backward is making, in the dtype that computes


class Cut(NamedTuple):
    """Number of ranks over which each kind of data is cut."""

    states: int
    params: int  # gathered parameters, from their first use in a step to its end
    grads: int  # gradients, after each micro-step


def memory_formula(
    buckets: Sequence[Bucket],
    cut: Cut,
    sizes: Sequence[int],
    *,
    live_bytes: int | None,
    num_replicas: int = 1,
    micro_steps: int = 1,
    exchanged: bool = True,
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
        exchanged: whether ranks exchange parts of gradients, as they do with gloo. Of two parts one
            arrives, else all. With NCCL one arrives, which is the mean.

    Returns:
        Bytes of "states" (parameters and both moments, which is all that exists between steps),
        "parameters" (a copy kept for the step, and gathered buckets), "sums" (sums of gradients,
        and this rank's means if these are cut further), "hops" (the few buckets that are being
        reduced), and "in full" (gradients that backward is making). Activations are not included,
        nor is the least memory for hops, `groups.LEAST_RING`.

    Example:
        >>> from mics_fn.shards.bucket import Formats, LeafSpec, plan_buckets
        >>> leaves = [LeafSpec(f"w{i}", (100,), Formats(torch.float32), 4) for i in range(8)]
        >>> buckets = [bucket for bucket, _ in plan_buckets(leaves, bucket_bytes=400)]
        >>> memory_formula(buckets, Cut(4, 4, 4), (2, 2), live_bytes=0)
        {'states': 2688.0, 'parameters': 448, 'sums': 896.0, 'hops': 672.0, 'in full': 896}
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
            _in_hops(b, cut, sizes, num_replicas, micro_steps, first, last, exchanged, reused)
            for b in buckets
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
    exchanged: bool,
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
        _received(bucket, inner, numel, direct, exchanged),
        _received(bucket, outer, numel / cut.grads, same, exchanged),
    )
    if copies and isinstance(hop2, Codec):
        received = max(received, mean_bytes(hop2, numel // cut.states, num_replicas))
    gathers = copies and isinstance(hop2, Codec)  # of codes, while others are exchanged
    return max(packed) + received, 1 + len(inner) + len(outer) + copies + gathers


def _received(
    bucket: Bucket, sizes: Sequence[int], numel: float, direct: bool, exchanged: bool
) -> float:
    """Compute the bytes of receive buffers, if the last level can `direct` them to the mean.

    Codes of hop 1 count as if all levels sent them.
    """
    most, width = 0.0, bucket.reduce.itemsize
    for i in reversed(range(len(sizes))):
        all_parts = exchanged and sizes[i] > 2
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


TEXT_BYTES = 500_000
DEFAULT_PEERS = ("keep", "zero3", "fsdp2", "fsdp2-keep", "plain")
OVERLAP_PEERS = ("keep", "overlap")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainingTask):
    """Options of what is trained by AdamW, and on what.

    Args:
        node_size: nodes are groups of so many ranks.
        turns: how many steps.
        precisions: texts of precisions, in each of which is measured; () means float32, which is
            then not part of a peer's label.
        device: "auto", "cpu" or "cuda".
    """

    node_size: int
    turns: BenchTurns = field(default_factory=BenchTurns)
    precisions: tuple[str, ...] = ()
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class StepConfig(TrainConfig):
    """Options of `bench step`.

    Args:
        partition_size: ranks that share one replica.
        peers: names from `PEERS`.
        rate: of the links between nodes; "" leaves them as they are.
        overlap: measure also what is hidden behind hop 2.
        rss: measure memory instead, each peer in processes of its own.
    """

    partition_size: int
    peers: tuple[str, ...] = DEFAULT_PEERS
    rate: str = ""
    overlap: bool = False
    rss: bool = False


class Stage(NamedTuple):
    """Inputs from which a peer is built, on this rank."""

    config: StepConfig
    device: torch.device
    batches: list[list[Batch]]  # by step and micro-step, the same for every peer
    closing: contextlib.ExitStack  # closes what peers leave open
    precision: Precision = Precision()  # of the next peer


def make_batches(config: TrainConfig, device: torch.device, steps: int) -> list[list[Batch]]:
    """Make the batches of this rank, by step and micro-step."""
    text, rank, micros = load_text(TEXT_BYTES), dist.get_rank(), range(config.accumulate)
    return [
        [join([config.batch(text, step, micro, rank)], device) for micro in micros]
        for step in range(steps)
    ]


# The peers of `bench step`: `Trainer` in several modes, and the ways to train of torch itself.


def _trainer(
    stage: Stage, *, live: int | None, wide: bool = False, place: str = "", overlap: bool = False
) -> BenchPeer:
    """Build a `Trainer` that keeps all gathered parameters, or has a budget of `live` buckets.

    Two give the memory of ZeRO-3: a bucket in use, the next one, and one more that `live_bytes`
    allows. Its partition groups are those of the stage, or `wide` ones of all ranks. Parameters
    may have a placement, and buckets be stepped while others are in hop 2.
    """
    config = stage.config
    p = dist.get_world_size() if wide else config.partition_size
    groups = mf.make_groups(p, node_size=config.node_size, device=stage.device)
    groups = stage.closing.enter_context(placement.place(groups, place) if place else groups)
    guard = mf.optim.Guard(on_nonfinite="ignore") if overlap else None
    options = {"overlap_step": overlap, "guard": guard}
    trainer = make_trainer(config, groups, live, stage.precision, **options)
    batches = [join(micros) for micros in stage.batches]
    how = place or {None: "keep", 0: "least", 2: "two buckets"}[live]
    name = f"Trainer p={p}, {how}{', overlapped' * overlap}"
    return BenchPeer(name, lambda step: trainer.step(batches[step]).loss)


def make_trainer(
    config: TrainConfig, groups: mf.Groups, live: int | None, precision: Precision, **options: Any
) -> mf.Trainer:
    """Make a trainer of the GPT with a budget of `live` buckets; None keeps all."""
    model = config.make_model(groups.device)
    # A parameter that is larger than a bucket has a bucket of its own.
    largest = max(parameter.numel() for parameter in model.parameters())
    largest *= precision.formats("", torch.float32).compute.itemsize
    return mf.Trainer(
        model,
        mf.optim.adamw(config.lr),
        groups,
        loss=gpt.loss,
        accumulate=config.accumulate,
        live_bytes=None if live is None else live * largest,
        precision=precision,
        **options,
    )


def _plain(stage: Stage) -> BenchPeer:
    return _torch_loop("plain torch loop", stage, stage.config.make_model(stage.device))


def _fsdp2(stage: Stage, *, full: bool, keep: bool) -> BenchPeer:
    """Build FSDP2 on a (replicate, shard) mesh, or on one of all ranks.

    With `keep` parameters are gathered once per step, otherwise again for backward.
    """
    config, n = stage.config, dist.get_world_size()
    p = n if full else config.partition_size
    formats = stage.precision.formats("", torch.float32)
    model = config.make_model(stage.device).to(formats.dtype)
    sizes = (n,) if full or n == 1 else (n // p, p)
    names = ("replicate", "shard")[-len(sizes) :]
    mesh = init_device_mesh(stage.device.type, sizes, mesh_dim_names=names)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": not keep}
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
            loss = gpt.loss(model, batch)
            (loss / config.accumulate if last else loss).backward()
            losses.append(loss.detach())
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


PEERS = {
    "keep": PeerKind(partial(_trainer, live=None), ours=True),
    "zero3": PeerKind(partial(_trainer, live=2), ours=True),
    "least": PeerKind(partial(_trainer, live=0), ours=True),
    "wide-zero3": PeerKind(partial(_trainer, wide=True, live=2), ours=True, alone=False),
    "hpz": PeerKind(partial(_trainer, wide=True, live=2, place="hpz"), ours=True, alone=False),
    "overlap": PeerKind(partial(_trainer, live=None, overlap=True), ours=True, alone=False),
    "fsdp2": PeerKind(partial(_fsdp2, full=False, keep=False)),
    "fsdp2-keep": PeerKind(partial(_fsdp2, full=False, keep=True)),
    "fsdp2-full": PeerKind(partial(_fsdp2, full=True, keep=False), alone=False),
    "plain": PeerKind(_plain, together=False, mixed=False),
}


def fitting(peers: Iterable[str], world_size: int) -> list[str]:
    """Select the peers that make sense in a world of this size."""
    found = [(name, PEERS[name]) for name in peers]
    return [name for name, x in found if (x.alone if world_size == 1 else x.together)]


def labels(config: StepConfig, world_size: int) -> list[str]:
    """Label the peers that fit: by name, or once in each precision, such as "keep@bf16"."""
    found = []
    for name in fitting(config.peers, world_size):
        every = config.precisions if PEERS[name].mixed else ()
        found += [f"{name}@{text}" for text in every] or [name]
    return found


def build(stage: Stage, label: str) -> BenchPeer:
    """Build the peer with a label of `labels`."""
    name, _, text = label.partition("@")
    return PEERS[name].build(stage._replace(precision=Precision.parse(text)))


def check_peers(config: StepConfig, world_size: int) -> None:
    """Raise PlanError for peers, precisions and flags that do not fit together."""
    asked = f"--peers {' '.join(config.peers)}"
    wrong = [name for name in config.peers if name not in PEERS]
    if wrong:
        what = f"{asked}: there is no peer {' '.join(wrong)}"
        raise PlanError(what, fix=f"choose from {' '.join(PEERS)}")
    fit = fitting(config.peers, world_size)
    if not fit:
        what = f"{asked}: none of these is measured with {world_size} ranks"
        raise PlanError(what, fix=f"choose from {' '.join(fitting(PEERS, world_size))}")
    others = [name for name in fit if PEERS[name].mixed and not PEERS[name].ours]
    if config.overlap and others:
        raise PlanError(f"--overlap: {others[0]} has no timeline", fix="leave that peer out")
    if config.overlap and config.partition_size == world_size:
        raise PlanError("--overlap: one replica has no hop 2", fix="lower --partition-size")
    own = [text for text in config.precisions if Precision.parse(text).overrides]
    if own and others:
        raise PlanError(f"--precision: {others[0]} has one for all leaves", fix="leave it out")
    if config.rss and config.rate:
        text = "--rss with --rates: memory does not depend on them"
        raise PlanError(text, fix="leave one of them out")
    if config.rss and read_launch(os.environ) is not None:
        fix = "run it without a launcher, on any machine: --rss starts ranks of its own"
        raise PlanError("--rss in a job: it needs new processes for each peer", fix=fix)
