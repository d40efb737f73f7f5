"""Placements: over how many ranks parameters, gradients and optimizer states are sharded.

Optimizer states are sharded over the partition group of `Groups`. A placement adds two numbers of
ranks, counted from the innermost level: over how many of them gathered parameters stay sharded
until the end of a run, and over how many the gradients are reduced in each micro-step. Every scheme
of the ZeRO family is such a pair of numbers, and every verb takes placed groups like any others.
See [Note: placements] in `groups.py`.

| placement | states over | parameters over | gradients over | what a step sends, hop 1 aside |
|---|---|---|---|---|
| `ddp` | 1 | 1 | 1 | all-reduce of all gradients |
| `zero1` | p | 1 | 1 | parameters once; hop 1 only at the end of the step |
| `zero2` | p | 1 | p | parameters once |
| `zero3`, `mics`, `fsdp` | p | p | p | parameters whenever they are fetched |
| `hpz` | p | k | p | parameters once over all levels, then inside a node |
| `hybrid` | p | k | k | hop 2 as a reduce-scatter, new shards gathered back |

Here p is the size of a partition group, and k that of its innermost level, usually a node.
`place(groups, "hpz")` takes a row of the table, and `place(groups, params=8, grads=2)` makes a pair
of your own. Leaves may have different placements, given as a function from paths to groups.

What a placement keeps is kept from its first use in a run to the end of the run, as a second tier
under the budget `live_bytes`, and gathered again after the update. So `zero1` and `zero2` keep
whole parameters within a step, and not between steps: the gather that follows an update overlaps
the next forward, and evaluation gathers again.
"""

from dataclasses import replace
from functools import partial
from math import prod
from typing import Literal

from mics_fn import checks
from mics_fn.errors import PlanError
from mics_fn.groups.groups import Groups, Hierarchy

Span = Literal["one", "inner", "all"]

# Over which ranks of a partition group parameters and gradients are sharded, by name of the scheme.
PLACEMENTS: dict[str, tuple[Span, Span]] = {
    "ddp": ("all", "all"),  # DistributedDataParallel: partition groups have one rank
    "zero1": ("one", "one"),  # ZeRO, Rajbhandari et al., SC 2020, arXiv:1910.02054, section 5.1
    "zero2": ("one", "all"),  # the same, section 5.2
    "zero3": ("all", "all"),  # the same, section 5.3
    "mics": ("all", "all"),  # Zhang et al., VLDB 2022, arXiv:2205.00119
    "fsdp": ("all", "all"),  # Zhao et al., VLDB 2023, arXiv:2304.11277, section 3.2; one flat level
    "hpz": ("inner", "all"),  # ZeRO++, Wang et al., 2023, arXiv:2306.10209, section 3.2
    "hybrid": ("inner", "inner"),  # pytorch issue 148257
}


def place(
    groups: Groups,
    scheme: str | None = None,
    *,
    params: int | None = None,
    grads: int | None = None,
) -> Groups:
    """The same groups with a placement of parameters and gradients.

    Args:
      groups: their partition groups, of p ranks each, shard the states.
      scheme: a name of `PLACEMENTS`; `help(mics_fn.placement)` shows the table. In the papers,
        ZeRO's partition group is all ranks; with smaller ones its shards are replicated. `ddp`
        needs groups of one rank. `mics` and `fsdp` are meant for the smallest groups that hold a
        replica, and `fsdp` gathers in one flat level.
      params: over how many ranks parameters stay sharded from their first use in a run to its end;
        1 keeps them in full. Default: as in the scheme, else p, which keeps nothing beyond what a
        schedule keeps.
      grads: over how many ranks the gradients of a micro-step are sharded in a `GradSum`; the rest
        of hop 1 is done once, for their sum. Default: as in the scheme, else p.

    Returns:
      `Groups` for every verb that takes them. Results are the same: a `gather` outside a run keeps
      nothing, and gradients that backward returns have all of hop 1 behind them.

    Memory: nothing here. With a schedule, a run keeps 1/params of the parameters in the dtype that
      is sent, and a `GradSum` 1/grads of the gradients, and also their 1/p if grads < p.

    Raises:
      PlanError: there is no such scheme, or no number of innermost levels has so many ranks; the
        text lists what there is.

    Example:
      >>> from mics_fn import placement
      >>> placement.place(make_groups(1), "zero2")
      Groups(n=1 p=1 levels=none, rank 0, cpu)
    """
    step = partial(place, scheme=scheme, params=params, grads=grads)
    if scheme == "ddp" and groups.partition_size != 1:
        text = f"place: 'ddp' needs partition groups of 1 rank, these have {groups.partition_size}"
        raise PlanError(text, fix="pass make_groups(partition_size=1)")
    checks.choice("place", "scheme", scheme, None, *PLACEMENTS)
    if scheme == "fsdp":
        groups = replace(groups, hierarchy=groups.flat)
    sizes = groups.hierarchy.route.sizes
    if scheme is not None:
        counts = {"one": 1, "inner": sizes[-1] if sizes else 1, "all": None}
        cut_params, cut_grads = (counts[span] for span in PLACEMENTS[scheme])
        params = cut_params if params is None else params
        grads = cut_grads if grads is None else grads
    found = {}
    for name, size in (("outer_params", params), ("outer_grads", grads)):
        inner = [prod(sizes[level:]) for level in range(len(sizes) + 1)]
        if size is not None and size not in inner:
            text = f"place: {name[6:]}={size} ends inside a level of {sizes}, outermost first"
            raise PlanError(text, fix=f"pass one of {', '.join(map(str, inner))}")
        found[name] = 0 if size is None else inner.index(size)
    flat = {name: int(count > 0 and count == len(sizes)) for name, count in found.items()}
    return replace(
        groups,
        derive=(*groups.derive, step),
        hierarchy=_routed(groups.hierarchy, **found),
        flat=_routed(groups.flat, **flat),
    )


def fixed_order(groups: Groups) -> Groups:
    """The same groups, with reductions that add up in the order of ranks on every backend.

    gloo and NCCL promise no order. Here each rank receives the parts of all others and adds them up
    itself, in the order of the group and in float32 or wider; then it sends the mean. So neither
    the algorithm that a library chooses nor the timing of other transfers changes any bit. Hop 1
    adds level by level, the innermost first; then come micro-steps in order, then replicas. Two
    ranks average as b - (b - a)/2. Two runs have equal bits if the computation has them too:
    `Trainer(deterministic=True)` takes care of both.

    Args:
      groups: any.

    Returns:
      `Groups` for every verb.

    Communication: nothing here. Hop 2 becomes an all-to-all and an all-gather, which send as many
      bytes as the all-reduce.

    Memory: nothing here. Hop 2 takes two more buffers of the size of a chunk.

    Example:
      >>> from mics_fn import placement
      >>> groups = placement.fixed_order(make_groups(1))
    """

    change = partial(replace, fixed_order=True)
    partition, replicas, model = change(groups.partition), change(groups.replicas), groups.model
    if model is not None:
        model = model._replace(parts=change(model.parts), copies=change(model.copies))

    def along(hierarchy: Hierarchy) -> Hierarchy:
        levels = hierarchy.route.levels
        changed = tuple(replace(level, reduce=change(level.reduce)) for level in levels)
        return _routed(replace(hierarchy, partition=partition), levels=changed)

    both = {"hierarchy": along(groups.hierarchy), "flat": along(groups.flat)}
    derive = (*groups.derive, fixed_order)
    changed = {"partition": partition, "replicas": replicas, "model": model}
    return replace(groups, derive=derive, **changed, **both)


def _routed(hierarchy: Hierarchy, **changes: object) -> Hierarchy:
    return replace(hierarchy, route=replace(hierarchy.route, **changes))  # pyright: ignore
