"""Where parameters, gradients and optimizer state live: each a choice of ranks, as plain values.

A `Groups` says over which ranks states are cut: its partition group. `place` adds over how many of
them, innermost first, gathered parameters stay cut for the rest of a step, and over how many the
gradients are reduced in each micro-step. Every scheme of the ZeRO family is such a pair of numbers,
and every verb takes its value as it takes any groups. See [Note: placements] in `communicator`.

| placement | states over | parameters over | gradients over |
|---|---|---|---|
| `ddp` | 1 | 1 | 1 |
| `zero1` | p | 1 | 1 |
| `zero2` | p | 1 | p |
| `zero3`, `mics`, `fsdp` | p | p | p |
| `hpz` | p | k | p |
| `hybrid` | p | k | k |
"""

from dataclasses import replace
from math import prod

from mics_fn.errors import PlanError, message
from mics_fn.groups.communicator import Comm, Hierarchy, Level
from mics_fn.groups.make import Groups


def place(groups: Groups, *, params: int | None = None, grads: int | None = None) -> Groups:
    """The same groups with a placement of parameters and gradients.

    Args:
      groups: whose partition group (p ranks) states are cut over.
      params: over how many ranks parameters stay cut from their first use in a run to its end; 1
        keeps them whole. Default p: nothing is kept beyond what a schedule keeps.
      grads: over how many ranks the gradients of a micro-step are cut, when a `GradSum` adds them
        up; the rest of hop 1 waits for the sum. Default p.

    Returns:
      `Groups` for every verb that takes them. Where a gather has no schedule nothing is kept, and
      where gradients are the result of backward nothing waits; the numbers are the same.

    Communication: none.

    Memory: none here. With a schedule a run keeps 1/params of the parameters, in the dtype that
      travels, and a `GradSum` 1/grads of the gradients; where grads < p, their 1/p as well.

    Raises:
      PlanError: the innermost levels have no such product; with those that there are.

    Example:
      >>> place(make_groups(1), params=1, grads=1)
      Groups(n=1 p=1 levels=none, rank 0, cpu)

    References: ZeRO, Rajbhandari et al., SC 2020, arXiv:1910.02054.
    """
    sizes = groups.hierarchy.sizes
    found = {}
    for name, size in (("params", params), ("grads", grads)):
        inner = [prod(sizes[level:]) for level in range(len(sizes) + 1)]
        if size is not None and size not in inner:
            lines = [f"the levels of a partition group are {sizes}, outermost first"]
            fix = f"pass one of {', '.join(map(str, inner))}, or make groups with other levels"
            raise PlanError(message(f"place: {name}={size} ends inside a level", lines, fix=fix))
        found[name] = 0 if size is None else inner.index(size)
    flat = {name: int(count > 0 and count == len(sizes)) for name, count in found.items()}
    if len(groups.flat.levels) != 1:
        flat = found
    return replace(
        groups,
        hierarchy=replace(groups.hierarchy, hold=found["params"], late=found["grads"]),
        flat=replace(groups.flat, hold=flat["params"], late=flat["grads"]),
    )


def ddp(groups: Groups) -> Groups:
    """Everything on every rank, as `DistributedDataParallel` has it.

    Args:
      groups: with partition groups of one rank.

    Returns:
      The very groups.

    Communication: none. A step: hop 2 alone, 2(n - 1)/n of the gradients.

    Memory: none here. A step holds all parameters, gradients and states.

    Raises:
      PlanError: the partition groups are larger.

    Example:
      >>> groups = ddp(make_groups(1))
    """
    if groups.partition_size != 1:
        text = f"ddp: a partition group has {groups.partition_size} ranks, expected 1"
        raise PlanError(message(text, fix="pass make_groups(partition_size=1)"))
    return groups


def zero1(groups: Groups) -> Groups:
    """ZeRO-1: states cut over the partition group, parameters and gradients whole.

    Args:
      groups: with partition groups of all ranks, for ZeRO proper; smaller ones are replicated.

    Returns:
      Placed `Groups`.

    Communication: none. A step: (p - 1)/p of the parameters and as much of the gradients, however
      many micro-steps there are; then hop 2 as ever.

    Memory: none here. A step holds all parameters, and all gradients in the dtype of their sum.

    Example:
      >>> groups = zero1(make_groups(1))

    References: Rajbhandari et al., SC 2020, arXiv:1910.02054, section 5.1.
    """
    return place(groups, params=1, grads=1)


def zero2(groups: Groups) -> Groups:
    """ZeRO-2: states and gradients cut over the partition group, parameters whole.

    Args:
      groups: as for `zero1`.

    Returns:
      Placed `Groups`.

    Communication: none. A step: (p - 1)/p of the parameters once, and of the gradients in each
      micro-step; then hop 2 as ever.

    Memory: none here. A step holds all parameters, and 1/p of the gradients.

    Example:
      >>> groups = zero2(make_groups(1))

    References: Rajbhandari et al., SC 2020, arXiv:1910.02054, section 5.2.
    """
    return place(groups, params=1)


def zero3(groups: Groups) -> Groups:
    """ZeRO-3: all cut over the partition group; how much stays gathered is the schedule's to say.

    Args:
      groups: as for `zero1`.

    Returns:
      Placed `Groups`.

    Communication: none. A step: (p - 1)/p of the parameters each time that they are fetched, and of
      the gradients in each micro-step; then hop 2 as ever.

    Memory: none here.

    Example:
      >>> groups = zero3(make_groups(1))

    References: Rajbhandari et al., SC 2020, arXiv:1910.02054, section 5.3.
    """
    return place(groups)


def mics(groups: Groups) -> Groups:
    """MiCS: as `zero3`, over the smallest groups that hold a replica, inside a node or over some.

    Args:
      groups: with small partition groups.

    Returns:
      Placed `Groups`.

    Communication: none. A step: as `zero3` inside partition groups, and hop 2: 2(r - 1)/r of the
      gradients' shards, once.

    Memory: none here.

    Example:
      >>> groups = mics(make_groups(1))

    References: Zhang et al., VLDB 2022, arXiv:2205.00119.
    """
    return place(groups)


def fsdp(groups: Groups) -> Groups:
    """The 2-D mesh of FSDP (hybrid sharding): as `mics`, in one flat all-gather.

    Args:
      groups: with partition groups as the mesh's shard dimension.

    Returns:
      Placed `Groups`.

    Communication: none. A step: as `mics`; where partition groups span nodes more bytes enter one.

    Memory: none here.

    Example:
      >>> groups = fsdp(make_groups(1))

    References: Zhao et al., VLDB 2023, arXiv:2304.11277, section 3.2.
    """
    return place(replace(groups, hierarchy=groups.flat))


def hpz(groups: Groups, params: int | None = None) -> Groups:
    """ZeRO++ hpZ: states over all, and for the rest of a step a copy of the parameters in a node.

    Args:
      groups: with partition groups over several nodes.
      params: ranks that share such a copy; default those of the innermost level.

    Returns:
      Placed `Groups`.

    Communication: none. A step: the first fetch of a bucket goes over all levels, later ones, as in
      backward, over the innermost alone; gradients as `zero3`.

    Memory: none here. A step holds 1/params of the parameters besides; the update drops them.

    Raises:
      PlanError: as `place`.

    Example:
      >>> groups = hpz(make_groups(1))

    References: Wang et al., 2023, arXiv:2306.10209, section 3.2.
    """
    return place(groups, params=_innermost(groups) if params is None else params)


def hybrid(groups: Groups, params: int | None = None) -> Groups:
    """Parameters and gradients over few ranks, optimizer state over all (pytorch#148257).

    Args:
      groups: with partition groups of all ranks that hold states.
      params: ranks that parameters and gradients are cut over; default those of the innermost
        level.

    Returns:
      Placed `Groups`.

    Communication: none. A step: as `mics` with groups of `params` ranks, but hop 2 is a
      reduce-scatter, and the first fetch of the next step gathers the new shards back: as many
      bytes as the all-reduce that they replace.

    Memory: none here. A step holds 1/params of parameters and gradients, and always 1/p of states.

    Raises:
      PlanError: as `place`.

    Example:
      >>> groups = hybrid(make_groups(1))
    """
    few = _innermost(groups) if params is None else params
    return place(groups, params=few, grads=few)


def _innermost(groups: Groups) -> int:
    return groups.hierarchy.sizes[-1] if groups.hierarchy.levels else 1


def fixed_order(groups: Groups) -> Groups:
    """The same groups, whose reductions add up in the order of ranks on every backend.

    Each rank gets the parts of all others and adds them itself, in the order of the group, in
    float32 or wider; the means are then what is sent on. So neither the algorithm that a library
    chooses nor what else is under way changes a bit. Two ranks average as b - (b - a)/2.

    Args:
      groups: any.

    Returns:
      `Groups` for every verb.

    Communication: none. Hop 2 becomes an all-to-all and an all-gather, of as many bytes in all.

    Memory: none here. Hop 2 takes two more buffers of a chunk.

    Example:
      >>> groups = fixed_order(make_groups(1))
    """

    def ordered(comm: Comm) -> Comm:
        return replace(comm, fixed_order=True)

    def route(hierarchy: Hierarchy) -> Hierarchy:
        levels = tuple(
            Level(level.name, level.gather, ordered(level.reduce)) for level in hierarchy.levels
        )
        return replace(hierarchy, levels=levels)

    return replace(
        groups,
        hierarchy=route(groups.hierarchy),
        flat=route(groups.flat),
        partition=ordered(groups.partition),
        replicas=ordered(groups.replicas),
    )
