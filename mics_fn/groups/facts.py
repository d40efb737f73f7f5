"""What ranks tell each other before they make groups, and what must be equal or distinct there."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mics_fn.errors import DesyncError, PlanError, by_value, message, name_ranks
from mics_fn.groups.devices import Spot, check_distinct


class Fact(NamedTuple):
    """What must be equal on all ranks, as text for people."""

    name: str
    value: str
    fix: str  # what to do if ranks differ


class Location(NamedTuple):
    """The node that a rank runs on."""

    node: str  # equal on ranks that share a node
    source: str  # what `node` follows from, for errors
    host: str  # empty if the user defines what a node is


def told(facts: Sequence[Fact], location: Location, spot: Spot) -> list[Any]:
    """What a rank writes down for `judged`."""
    return [[fact.value for fact in facts], location, spot]


def judged(facts: Sequence[Fact], found: Mapping[int, Any]) -> int:
    """The number of these ranks on one node, if what they `told` allows to make groups.

    Raises:
      DesyncError: facts differ; the text has the values and who has them.
      GroupsError: several ranks use one device.
      PlanError: nodes hold unequal numbers of ranks, or ranks of a node are not next to each other.
    """
    _compare(facts, {rank: values for rank, (values, _, _) in found.items()})
    check_distinct("make_groups", {rank: Spot(*spot) for rank, (_, _, spot) in found.items()})
    return node_size_of({rank: Location(*location) for rank, (_, location, _) in found.items()})


def _compare(facts: Sequence[Fact], found: Mapping[int, Sequence[str]]) -> None:
    """Raise DesyncError if a fact differs between ranks."""
    names, lines, fixes = [], [], []
    for i, fact in enumerate(facts):
        holders = by_value({rank: values[i] for rank, values in found.items()})
        if len(holders) > 1:
            held = [f"{value} on {name_ranks(ranks)}" for value, ranks in holders]
            names.append(fact.name)
            lines.append(f"{fact.name}: {'; '.join(held)}")
            fixes.append(fact.fix)
    if names:
        what = f"make_groups: ranks disagree on {', '.join(names)}"
        raise DesyncError(message(what, lines, "; ".join(fixes)))


def node_size_of(locations: Mapping[int, Location]) -> int:
    """The number of these ranks on each node.

    Raises:
      PlanError: nodes hold unequal numbers of ranks, or ranks of a node are not next to each other.

    >>> node_size_of({rank: Location(str(rank // 2), "node_size=2", "") for rank in range(4)})
    2
    """
    nodes: dict[str, list[int]] = {}
    hosts: dict[str, set[str]] = {}
    last = None
    for rank, (node, source, host) in locations.items():
        if node in nodes and node != last:
            lines = [f"one node, by {source}: {name_ranks([*nodes[node], rank])}"]
            fix = "order ranks= by node, or pass node_size= or topology="
            raise PlanError(
                message("make_groups: ranks of one node are not next to each other", lines, fix)
            )
        nodes.setdefault(node, []).append(rank)
        hosts.setdefault(node, set()).add(host)
        last = node
    source = next(iter(locations.values())).source
    for node, names in hosts.items():
        if len(names) > 1:
            what = f"make_groups: {source} puts {name_ranks(nodes[node])} on one node"
            fix = "start ranks node by node (Slurm: --distribution=block), or pass node_size="
            raise PlanError(message(what, [f"but they run on {', '.join(sorted(names))}"], fix))
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        what = f"make_groups: nodes hold different numbers of these ranks, by {source}"
        lines = [f"{len(ranks)} on one node: {name_ranks(ranks)}" for ranks in nodes.values()]
        fix = "use equally many ranks of every node, or pass node_size= or topology="
        shown = lines if len(lines) <= 8 else [*lines[:8], "..."]
        raise PlanError(message(what, shown, fix))
    return len(nodes[last or ""])
