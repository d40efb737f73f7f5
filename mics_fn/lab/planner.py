"""`plan`: the groups, placement and budget that a model takes on a cluster, before it is rented.

[Note: what is ranked] Each choice of partition size, placement, budget and micro-steps is laid out
in buckets as `shard` would, and its memory is that of formulas. Where it fits, its step is
simulated, and choices rank by the seconds of a token. What differs by less than a model of a
cluster can say is decided otherwise: half the bytes over the outermost link, or a group of half as
many ranks, are worth 1 % of time. That the smallest group which holds the states is the best, as in
MiCS, comes out of this where links between nodes are slower than those inside.

The order of two choices does not depend on others. So with one placement and one budget, more
memory of a device never gives a larger group, since it only adds smaller ones.

`python -m mics_fn plan llama-3-70b "64 x 8 h100, 8 x 400 Gbit"` prints the table.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import log2, prod
from typing import Any

import torch
from torch import nn

from mics_fn import checks
from mics_fn.errors import PlanError, human_bytes
from mics_fn.groups import Groups, valid_partition_sizes
from mics_fn.lab.hardware import Hardware
from mics_fn.lab.report import add_count, table
from mics_fn.lab.simulator import Simulated, simulate
from mics_fn.schedules import Action, Schedule
from mics_fn.shards import Bucket, LeafSpec, Precision, plan_buckets

PLACED = ("mics", "fsdp", "hpz", "hybrid", "zero2", "zero1")  # which are compared
BUDGETS = (None, "two", 0)  # of gathered parameters; "two" are two buckets
BUCKET_BYTES, MOST_BUCKETS = 25 * 2**20, 400  # of a model, whose buckets are larger if it is large
RESERVED = 0.08  # of the memory of a device: contexts, communicators, and an allocator's gaps
_SHOWN = 8  # rows of a table

Shapes = Mapping[str, tuple[int, ...]]


# What is trained.


def transformer(
    layers: int,
    dim: int,
    *,
    vocab: int,
    hidden: int,
    kv: int | None = None,
    gated: bool = False,
    tied: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices and norms of a transformer, by path, in the order of use.

    Args:
      layers: how many.
      dim: of the residual stream.
      vocab: tokens that it knows.
      hidden: width of the MLP.
      kv: width of keys and values; None: `dim`.
      gated: whether the MLP has a third matrix.
      tied: whether the head has the weight of the embedding.

    Example:
      >>> shapes = transformer(80, 8192, vocab=128256, hidden=28672, kv=1024, gated=True)
      >>> round(sum(map(prod, shapes.values())) / 1e9, 1)
      70.6
    """
    kv, found = kv or dim, dict[str, tuple[int, ...]]()
    found["embedding.weight"] = vocab, dim
    for i in range(layers):
        at = f"layers.{i}."
        found |= {f"{at}norm1.weight": (dim,), f"{at}q.weight": (dim, dim)}
        found |= {f"{at}{name}.weight": (kv, dim) for name in "kv"}
        found |= {f"{at}out.weight": (dim, dim), f"{at}norm2.weight": (dim,)}
        found |= {f"{at}{name}.weight": (hidden, dim) for name in ("up", "gate")[: 1 + gated]}
        found[f"{at}down.weight"] = (dim, hidden)
    found["norm.weight"] = (dim,)
    return found if tied else {**found, "head.weight": (vocab, dim)}


_SIZES = "layers", "dim", "vocab", "hidden", "kv", "gated", "tied"
MODELS: dict[str, dict[str, Any]] = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, *sizes in (
        ("bert-10b", 127, 2560, 32008, 10240, None, False, True),
        ("gpt2-xl", 48, 1600, 50257, 6400, None, False, True),
        ("llama-3-8b", 32, 4096, 128256, 14336, 1024, True, False),
        ("llama-3-70b", 80, 8192, 128256, 28672, 1024, True, False),
    )
}


def activations(layers: int, dim: int, hidden: int, tokens: int) -> int:
    """Bytes of activations in 16 bits where each layer is computed again in backward.

    What enters each layer is kept, and all of one layer: about 8 tensors of its width and 3 of that
    of its MLP.
    """
    return 2 * tokens * (layers * dim + 8 * dim + 3 * hidden)


_MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 0, "muon": 1}  # numbers kept per element


@dataclass(frozen=True)
class _Job:
    """What is to be planned, as `plan` takes it."""

    shapes: Shapes
    frozen: frozenset[str]
    cluster: Hardware
    tokens: int
    activation_bytes: int
    bucket_bytes: int
    precision: Precision = field(default_factory=Precision)
    optimizer: str = "adamw"
    recompute: bool = True
    record: Schedule | None = None

    def is_matrix(self, path: str) -> bool:
        """Whether Muon steps a leaf: a matrix, but of an embedding or a head."""
        others = path.startswith(("embedding", "head", "tokens", "positions"))
        mine = self.optimizer == "muon" and path not in self.frozen and not others
        return mine and len(self.shapes[path]) == 2

    def layout(self, p: int, accumulate: int) -> tuple[list[Bucket], Schedule]:
        """The buckets of partition groups of p ranks, and the record of a step.

        Each bucket is used in forward, and in backward the other way round, unless a record says
        something else.
        """
        formats = partial(self.precision.formats, own=torch.float32)
        leaves = [
            LeafSpec(path, shape, formats(path, trained=own), p, own, whole=self.is_matrix(path))
            for path, shape in self.shapes.items()
            for own in [path not in self.frozen]
        ]
        placed = plan_buckets(leaves, bucket_bytes=self.bucket_bytes)
        each = dict.fromkeys(bucket for bucket, _ in placed)  # in the order of their first use
        found = sorted(each, key=lambda bucket: bucket.index)
        if self.record is not None:
            return found, Schedule(self.record.actions * accumulate)
        uses = [Action("use", (bucket.index,)) for bucket in each]
        one = [*uses, Action("backward", ())]
        for use, bucket in zip(reversed(uses), reversed(each), strict=True):
            one += [use, *[Action("reduce", use.buckets)] * bucket.trainable]
        return found, Schedule(tuple(one * accumulate))

    def compute_s(self, accumulate: int) -> float:
        """Seconds that a rank computes in a step, the optimizer aside."""
        work = Counter[str]()
        for path, shape in self.shapes.items():
            wide = self.precision.formats(path, torch.float32).compute.itemsize > 2
            factor = (4 if path in self.frozen else 6) + 2 * self.recompute
            work["f32" if wide else "bf16"] += factor * prod(shape) * self.tokens
        return accumulate * sum(self.cluster.device.seconds(*each) for each in work.items())

    def matrices_s(self, p: int) -> float:
        """Seconds of a rank for what Muon computes: five iterations on each of its matrices."""
        sizes = [sorted(x) for path, x in self.shapes.items() if self.is_matrix(path)]
        work = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in sizes)
        return self.cluster.device.seconds("bf16", work) / p if work else 0.0


# What is chosen.


@dataclass(frozen=True)
class Choice:
    """One way to train a model on a cluster; prints as the calls that make it.

    Args:
      partition_size: number of ranks that share one replica.
      levels: of a partition group, as text.
      placement: its name.
      live_bytes: the budget of gathered parameters; None keeps all.
      bucket_bytes: the largest size of a bucket.
      accumulate: micro-steps of a step.
      needs_bytes: what it takes of a device, by kind, activations too.
      step: the simulated step, without what Muon computes.
      seconds: of a step.
      tokens: of a rank in a step.
    """

    partition_size: int
    levels: str
    placement: str
    live_bytes: int | None
    bucket_bytes: int
    accumulate: int
    needs_bytes: Mapping[str, int]
    step: Simulated
    seconds: float
    tokens: int

    @property
    def total_bytes(self) -> int:
        """What it takes of a device."""
        return sum(self.needs_bytes.values())

    def __str__(self) -> str:
        placed = f'\ngroups = mf.placement.place(groups, "{self.placement}")'
        placed = "" if self.placement == "mics" else placed
        how = f"live_bytes={self.live_bytes}, bucket_bytes={self.bucket_bytes}"
        how += f", accumulate={self.accumulate}" * (self.accumulate > 1)
        return f"groups = mf.make_groups({self.partition_size}){placed}\nTrainer(..., {how})"


@dataclass(frozen=True, repr=False)
class Planned:
    """Choices for a model on a cluster, the fastest first; prints as a table with reasons.

    Args:
      cluster: that they are for.
      choices: that fit, by the seconds of a token.
      refused: that need too much memory, by partition size; of each size the one that needs least.
      room_bytes: what a device has for them.
    """

    cluster: Hardware
    choices: tuple[Choice, ...]
    refused: tuple[Choice, ...]
    room_bytes: int

    @property
    def best(self) -> Choice:
        """The fastest.

        Raises:
          PlanError: nothing fits.
        """
        if not self.choices:
            raise PlanError("plan: nothing fits this cluster", [self.reason], _FIX)
        return self.choices[0]

    @property
    def reason(self) -> str:
        """Why it is this one, in words."""
        room, lines = human_bytes(self.room_bytes), list[str]()
        for each in self.refused:
            if not self.sizes(each.partition_size):
                need = human_bytes(each.total_bytes)
                kind, most = max(each.needs_bytes.items(), key=lambda pair: pair[1])
                own = f"{kind} {human_bytes(most)}"
                lines.append(f"{each.partition_size} needs {need} of {room} ({own})")
        if not self.choices:
            return "; ".join(lines)
        chosen = self.best.partition_size
        fitting = dict.fromkeys(each.partition_size for each in self.choices)  # the best first
        text = f"{chosen} is the smallest group that holds the states"
        if chosen == min(fitting):
            lines = [f"{text}; {lines[-1]}" if lines else f"{text}, of all sizes"]
        else:
            lines = [f"{chosen} is faster than smaller groups, of which {min(fitting)} fits, too"]
        for other in [p for p in fitting if p != chosen][:2]:
            best = self.sizes(other)[0]
            ratio = best.seconds / best.tokens * self.best.tokens / self.best.seconds
            sent = [
                human_bytes(self.crossing(x, self.cluster.outermost)) for x in (best, self.best)
            ]
            text = f"a rank sends {sent[0]} instead of {sent[1]} over '{self.cluster.outermost}'"
            lines.append(f"{other} takes {ratio:.2f} of its time: {text}")
        return "; ".join(lines)

    def rank(self, choice: Choice) -> tuple[float, ...]:
        """What choices are sorted by; see [Note: what is ranked]."""
        sent = 1 + self.crossing(choice, self.cluster.outermost) / choice.tokens
        score = log2(max(choice.seconds / choice.tokens, 1e-12))
        return score + 0.01 * (log2(sent) + log2(choice.partition_size)), choice.total_bytes

    def crossing(self, choice: Choice, name: str) -> int:
        """Bytes that a rank sends over a link in a step, by the name of its level.

        Communicators that are no level of a group cross the outermost link.
        """
        names, found = self.cluster.topology.names, 0
        for comm, nbytes in choice.step.sent_bytes().items():
            level = comm.split()[-1]
            found += nbytes * (name == (level if level in names else self.cluster.outermost))
        return found

    def sizes(self, partition_size: int) -> list[Choice]:
        """The choices with this partition size, the fastest first."""
        return [each for each in self.choices if each.partition_size == partition_size]

    def __str__(self) -> str:
        names = self.cluster.topology.names
        head = ("p", "levels", "placement", "live", "micro", "memory", "step", "exposed", *names)
        rows = [head, *(self._row(each, names) for each in self.choices[:_SHOWN])]
        if len(self.choices) > _SHOWN:
            rows.append((f"... {len(self.choices) - _SHOWN} more",))
        if not self.choices:
            return f"{self.cluster}\n  nothing fits: {self.reason}\n  fix: {_FIX}"
        kinds = ", ".join(f"{k} {human_bytes(n)}" for k, n in self.best.needs_bytes.items() if n)
        title = f"{self.cluster}\n{human_bytes(self.room_bytes)} of a device are free for it"
        calls = f"{self.best}".replace("\n", "\n  ")
        return f"{table(title, rows)}\n  {self.reason}\n  memory of the first: {kinds}\n  {calls}"

    __repr__ = __str__

    def _row(self, each: Choice, names: Sequence[str]) -> tuple[str, ...]:
        live = "all" if each.live_bytes is None else human_bytes(each.live_bytes)
        row = [f"{each.partition_size}", each.levels, each.placement, live, f"{each.accumulate}"]
        row += [human_bytes(each.total_bytes)]
        row += [f"{seconds:.3g} s" for seconds in (each.seconds, each.step.exposed_s)]
        return *row, *(human_bytes(self.crossing(each, name)) for name in names)


_FIX = "take more ranks, codes of states, where=, or fewer tokens at a time"


def plan(
    model: nn.Module | Shapes | str,
    cluster: Hardware | str,
    *,
    tokens: int,
    accumulate: int | Sequence[int] = 1,
    precision: Precision | str = "compute=bf16, reduce=bf16",
    optimizer: str = "adamw",
    activation_bytes: int | str | None = None,
    recompute: bool = True,
    partition_sizes: Sequence[int] | None = None,
    placements: Sequence[str] = PLACED,
    live_bytes: Sequence[int | str | None] = BUDGETS,
    bucket_bytes: int | str | None = None,
    record: Schedule | None = None,
) -> Planned:
    """Rank partition sizes, placements, budgets and micro-steps for a model on a cluster.

    Args:
      model: a module, which may be on meta; shapes by path, in the order of use; or a name of
        `MODELS`.
      cluster: where; or the text of a well-known one, as `Hardware.of` reads it.
      tokens: that a rank computes on in a micro-step.
      accumulate: micro-steps of a step, or several numbers to compare.
      precision: as for `shard`.
      optimizer: "adamw", "adam", "lion", "sgd", or "muon" for the matrices of layers.
      activation_bytes: what activations take of a device. None takes `activations` for a name of
        `MODELS`, and 0 for others.
      recompute: whether layers are computed again in backward.
      partition_sizes: that are compared; None takes all that fit the cluster.
      placements: names of them.
      live_bytes: budgets of gathered parameters; "two" are two buckets.
      bucket_bytes: the largest size of a bucket; None takes 25 MiB, and more for large models.
      record: uses and reductions of one micro-step, marked by `backward`, as `mf.record` finds them
        with these buckets; None: leaves are used in their order, and backwards in backward.

    Returns:
      A `Planned`, which prints as a table. A placement that equals another one for a partition size
      is left out.

    Memory: none for tensors.

    Raises:
      PlanError: an argument is not what it should be, or does not fit the cluster.

    Example:
      >>> how = {"tokens": 4096, "placements": ["mics"], "live_bytes": [0]}
      >>> found = plan("bert-10b", "8 x 8 v100, 100 Gbit", **how)
      >>> found.best.partition_size, [each.partition_size for each in found.refused]
      (8, [1, 2, 4])

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.2.
    """
    job = _job(model, cluster, tokens, activation_bytes, bucket_bytes)
    job = replace(job, precision=Precision.parse(precision), recompute=recompute, record=record)
    checks.choice("plan", "optimizer", optimizer, *_MOMENTS)
    job = replace(job, optimizer=optimizer)
    device = job.cluster.device
    room = int(device.memory_bytes * (1 - RESERVED))
    counts = [accumulate] if isinstance(accumulate, int) else list(accumulate)
    for count in counts:
        checks.integer("plan", "accumulate", count)
    found = list[Choice]()
    for p in partition_sizes or valid_partition_sizes(job.cluster.topology):
        seen = set[Any]()
        for name in [placements] if isinstance(placements, str) else placements:
            groups = job.cluster.groups(p, name)
            facts = groups.hierarchy.route.facts
            if facts not in seen:
                seen.add(facts)
                for count in counts:
                    found += _choices(job, groups, name, count, live_bytes)
    fits = [each for each in found if each.total_bytes <= room]
    fits.sort(key=Planned(job.cluster, (), (), room).rank)
    least = dict[int, Choice]()
    for each in sorted(found, key=lambda each: each.total_bytes):
        if each.total_bytes > room:
            least.setdefault(each.partition_size, each)
    refused = tuple(least[p] for p in sorted(least))
    return Planned(job.cluster, tuple(fits), refused, room)


def _choices(
    job: _Job, groups: Groups, name: str, accumulate: int, budgets: Sequence[int | str | None]
) -> list[Choice]:
    """The choices of some groups, one for each budget that differs from those before."""
    p, found = groups.partition_size, dict[int | None, Choice]()
    buckets, record = job.layout(p, accumulate)
    full = [bucket.nbytes for bucket in buckets]
    for asked in budgets:
        live = 2 * max(full, default=0) if asked == "two" else asked
        live = None if live is None else checks.nbytes("plan", "live_bytes", live)
        live = None if live is None or live >= sum(full) else live
        if live in found:
            continue
        how: Any = {"partition_size": p, "placement": name, "live_bytes": live}
        how |= {"compute_s": job.compute_s(accumulate), "moments": _MOMENTS[job.optimizer]}
        step = simulate(record, buckets, job.cluster, **how)
        needs = {k.replace("_", " "): n for k, n in step.memory()._asdict().items() if k != "total"}
        needs["activations"] = job.activation_bytes
        levels = zip(groups.plan.level_names, groups.plan.level_sizes, strict=True)
        text = " x ".join(f"{level} {size}" for level, size in levels) or "none"
        seconds, tokens = step.seconds + job.matrices_s(p), accumulate * job.tokens
        facts = (p, text, name, live, job.bucket_bytes, accumulate, needs, step, seconds, tokens)
        found[live] = Choice(*facts)
    return list(found.values())


def _job(
    model: Any,
    cluster: Hardware | str,
    tokens: int,
    activation_bytes: int | str | None,
    bucket_bytes: int | str | None,
) -> _Job:
    """Read the arguments of `plan`."""
    checks.integer("plan", "tokens", tokens)
    known, frozen = {}, frozenset[str]()
    if isinstance(model, str):
        checks.choice("plan", "model", model, *MODELS)
        known = MODELS[model]
        model = transformer(**known)
    if isinstance(model, nn.Module):
        frozen = frozenset(k for k, x in model.named_parameters() if not x.requires_grad)
        model = {name: tuple(x.shape) for name, x in model.named_parameters()}
    shapes = model.values() if isinstance(model, Mapping) else ()
    if not shapes or not all(isinstance(n, int) and n > 0 for shape in shapes for n in shape):
        fix = "pass a module, shapes by path, or a name of mics_fn.lab.planner.MODELS"
        raise PlanError(f"plan: model is {type(model).__name__}", fix=fix)
    if activation_bytes is None and known:
        activation_bytes = activations(known["layers"], known["dim"], known["hidden"], tokens)
    total = 4 * sum(map(prod, model.values()))
    largest = 4 * max(map(prod, model.values()))
    auto = max(BUCKET_BYTES, -(-max(total, largest) // MOST_BUCKETS))
    return _Job(
        *(model, frozen, Hardware.read("plan", cluster), tokens),
        activation_bytes=checks.nbytes("plan", "activation_bytes", activation_bytes or 0),
        bucket_bytes=checks.nbytes("plan", "bucket_bytes", bucket_bytes or auto, 1),
    )


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add, names = parser.add_argument, ", ".join(MODELS)
    add("model", choices=MODELS, metavar="MODEL", help=f"one of {names}")
    text = "such as '64 x 8 h100, 8 x 400 Gbit', or a file that `doctor --profile FILE` wrote"
    add("cluster", metavar="CLUSTER", help=text)
    add_count(parser, "tokens", 8192, "tokens of a rank in a micro-step")
    add_count(parser, "accumulate", [1], "micro-steps of a step", nargs="+")
    add("--optimizer", choices=_MOMENTS, default="adamw")
    add("--precision", default="compute=bf16, reduce=bf16", help="as for shard")
    add("--placements", nargs="+", default=PLACED, help="names of them")


def main(args: argparse.Namespace) -> int:
    """Print the table and return the exit code: 1 if nothing fits."""
    file = args.cluster.endswith(".json")
    cluster = Hardware.load(args.cluster) if file else Hardware.of(args.cluster)
    how = {
        key: getattr(args, key) for key in ("accumulate", "optimizer", "precision", "placements")
    }
    found = plan(args.model, cluster, tokens=args.tokens, **how)
    print(found)
    return 0 if found.choices else 1
