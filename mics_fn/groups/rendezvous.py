"""How ranks agree, through a key-value store, before any process group exists.

Ranks that make different groups hang with no word of why. So every rank writes its facts, the
first rank compares them all and writes one verdict, and everyone reads that: n small writes, n
small reads by one rank, and n reads of one key.

[Note: waiting for each other] A rank whose `ranks=` differ meets elsewhere, and nobody would ever
come. Each rank therefore also notes where it waits. If the first rank misses one that waits at
another place for this very rank, neither can go on, and both places are told at once.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

from mics_fn.errors import CollectiveTimeoutError, DesyncError, PlanError, message, name_ranks
from mics_fn.store import Store, poll

_KINDS = {"desync": DesyncError, "plan": PlanError, "timeout": CollectiveTimeoutError}


class Fact(NamedTuple):
    """What all ranks must have in common, as people read it."""

    name: str
    value: str
    fix: str  # what to do where ranks differ


class Place(NamedTuple):
    """Where a rank runs."""

    node: str  # equal on ranks that share a node
    source: str  # what says so
    host: str  # empty where the user says what a node is


class Meeting(NamedTuple):
    """What ranks agreed on."""

    key: str  # no earlier meeting had it
    node_size: int  # how many of these ranks a node holds


def meet(
    store: Store,
    ranks: Sequence[int],
    rank: int,
    facts: Sequence[Fact],
    place: Place,
    *,
    timeout_s: float,
) -> Meeting:
    """Compare facts between `ranks`; each of them calls this the same number of times.

    Args:
      store: shared by all ranks.
      ranks: global ranks that meet, in the order of their positions.
      rank: this one.
      facts: what must be equal on all ranks.
      place: this rank's node, which may differ.
      timeout_s: bound in seconds of waiting for the others.

    Returns:
      A key that is new and the same on all ranks, and the ranks a node holds.

    Communication: through the store only; O(n) small messages in all.

    Raises:
      DesyncError: facts differ; on every rank, with who holds what.
      PlanError: nodes hold unequal numbers of ranks, or one node's ranks do not stand together.
      CollectiveTimeoutError: some rank did not come.
    """
    deadline = time.monotonic() + timeout_s
    here = _enter(store, ranks, rank)
    here["timeout_s"] = timeout_s
    waits = f"mics_fn/waits/{rank}"
    try:
        store.set(waits, json.dumps(here))
        mine = {"facts": [fact.value for fact in facts], "place": place}
        store.set(f"{here['key']}/{rank}", json.dumps(mine))
        if rank == ranks[0]:
            _judge(store, ranks, here, facts, deadline)
        verdict = f"{here['key']}/verdict"
        if not poll(lambda: store.check([verdict]), len(ranks), deadline):
            _tell(store, [here["key"]], _no_show(store, here, ranks))
        told = json.loads(store.get(verdict))
    except BaseException:
        # As if it never came, so that after an interrupt all can call again.
        with suppress(RuntimeError):
            store.delete_key(f"{here['key']}/{rank}")
            store.add(_calls(here["digest"], rank), -1)
        raise
    finally:
        with suppress(RuntimeError):  # a store that is gone must not hide the error that says so
            store.set(waits, "{}")
    if "error" in told:
        raise _KINDS[told["error"]](told["text"])
    return Meeting(here["key"], told["node_size"])


def _enter(store: Store, ranks: Sequence[int], rank: int) -> dict[str, Any]:
    """A new place to meet: the n-th of these ranks, by this rank's own count."""
    digest = sha256(json.dumps(list(ranks)).encode()).hexdigest()[:16]
    while True:
        call = store.add(_calls(digest, rank), 1)
        key = f"mics_fn/{digest}/{call}"
        # The others gave up waiting for this rank there, so that their count is one ahead.
        missed = store.check([f"{key}/verdict"]) and json.loads(store.get(f"{key}/verdict"))
        if not missed or rank not in missed.get("absent", ()):
            return {"key": key, "digest": digest, "call": call, "rank": rank, "ranks": _runs(ranks)}


def _judge(
    store: Store,
    ranks: Sequence[int],
    here: dict[str, Any],
    facts: Sequence[Fact],
    deadline: float,
) -> None:
    """On the first rank: read what all wrote, and tell the verdict."""
    key, found = here["key"], {}
    for other in ranks:
        mine, there = f"{key}/{other}", {}
        if not poll(partial(_settled, store, other, here, there), 1, deadline):
            return _tell(store, [key], _no_show(store, here, ranks))
        if there:
            return _tell(store, [key, there["key"]], _elsewhere(here, there))
        if not store.check([mine]):
            return None
        found[other] = json.loads(store.get(mine))
    try:
        _compare(facts, {other: written["facts"] for other, written in found.items()})
        places = {other: Place(*written["place"]) for other, written in found.items()}
        verdict: dict[str, Any] = {"node_size": node_size_of(places)}
    except (DesyncError, PlanError) as error:
        kind = "desync" if isinstance(error, DesyncError) else "plan"
        verdict = {"error": kind, "text": str(error)}
    return _tell(store, [key], verdict)


def _settled(store: Store, other: int, here: Mapping[str, Any], there: dict[str, Any]) -> bool:
    """Whether `other` came, or never will; where it waits instead is put into `there`."""
    if store.check([f"{here['key']}/{other}"]):
        return True
    there.update(_waits_for(store, other, here) or {})
    # Another first rank may have told this place already.
    return bool(there) or store.check([f"{here['key']}/verdict"])


def _tell(store: Store, keys: Sequence[str], verdict: dict[str, Any]) -> None:
    """Write a verdict for all who wait at these keys; the first one written stands.

    Two ranks may tell the same two places at once: all begin at the same one, and pass on what
    stands there.
    """
    text = json.dumps(verdict)
    for key in sorted(keys):
        stands = store.compare_set(f"{key}/verdict", "", text).decode()
        text = stands if "error" in json.loads(stands) else text


def _calls(digest: str, rank: int) -> str:
    return f"mics_fn/{digest}/calls/{rank}"


def _waits_for(store: Store, other: int, here: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where `other` waits for this rank, if not here; see [Note: waiting for each other]."""
    if not store.check([f"mics_fn/waits/{other}"]):
        return None
    there = json.loads(store.get(f"mics_fn/waits/{other}"))
    if not there or there["key"] == here["key"] or here["rank"] not in _expanded(there["ranks"]):
        return None
    came = store.add(_calls(there["digest"], here["rank"]), 0)
    return there if came < there["call"] else None


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as runs [first, step, count], so that a large regular group stays a short text.

    >>> _runs([0, 2, 4, 5]), _expanded(_runs([0, 2, 4, 5])) == [0, 2, 4, 5]
    ([[0, 2, 3], [5, 1, 1]], True)
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and (runs[-1][2] == 1 or rank == runs[-1][0] + runs[-1][1] * runs[-1][2]):
            run = runs[-1]
            run[1], run[2] = (rank - run[0], 2) if run[2] == 1 else (run[1], run[2] + 1)
        else:
            runs.append([rank, 1, 1])
    return runs


def _expanded(runs: list[list[int]]) -> list[int]:
    return [first + step * i for first, step, count in runs for i in range(count)]


def _elsewhere(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, Any]:
    both = sorted((here, there), key=lambda place: place["rank"])
    lines = [f"ranks: {_expanded(at['ranks'])} on rank {at['rank']}" for at in both]
    fix = "pass the same ranks= or mesh= on all ranks that it names"
    text = message("make_groups: ranks disagree on which ranks share the groups", lines, fix)
    return {"error": "desync", "text": text, "absent": [at["rank"] for at in both]}


def _compare(facts: Sequence[Fact], found: Mapping[int, Sequence[str]]) -> None:
    """Raise where ranks hold different values of a fact."""
    names, lines, fixes = [], [], []
    for i, fact in enumerate(facts):
        holders: dict[str, list[int]] = {}
        for rank, values in found.items():
            holders.setdefault(values[i], []).append(rank)
        if len(holders) > 1:
            held = [f"{value} on {name_ranks(ranks)}" for value, ranks in holders.items()]
            names.append(fact.name)
            lines.append(f"{fact.name}: {'; '.join(held)}")
            fixes.append(fact.fix)
    if names:
        what = f"make_groups: ranks disagree on {', '.join(names)}"
        raise DesyncError(message(what, lines, "; ".join(fixes)))


def node_size_of(places: Mapping[int, Place]) -> int:
    """How many of these ranks a node holds; each node's ranks must stand together, equally many.

    >>> node_size_of({rank: Place(str(rank // 2), "node_size=2", "here") for rank in range(4)})
    2
    """
    nodes: dict[str, list[int]] = {}
    hosts: dict[str, set[str]] = {}
    last = None
    for rank, (node, source, host) in places.items():
        if node in nodes and node != last:
            lines = [f"one node, by {source}: {name_ranks([*nodes[node], rank])}"]
            fix = "order ranks= by node, or pass node_size= or topology="
            raise PlanError(
                message("make_groups: ranks of one node do not stand together", lines, fix)
            )
        nodes.setdefault(node, []).append(rank)
        hosts.setdefault(node, set()).add(host)
        last = node
    source = next(iter(places.values())).source
    for node, names in hosts.items():
        if len(names) > 1:
            what = f"make_groups: {source} puts {name_ranks(nodes[node])} on one node"
            fix = "start ranks node by node (Slurm: --distribution=block), or pass node_size="
            raise PlanError(message(what, [f"but they run on {', '.join(sorted(names))}"], fix))
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        what = f"make_groups: nodes hold different numbers of these ranks, by {source}"
        lines = [f"{len(ranks)} on one node: {name_ranks(ranks)}" for ranks in nodes.values()]
        fix = "use equally many ranks of every node, or pass node_size= or topology="
        raise PlanError(message(what, lines[:8] + ["..."] * (len(lines) > 8), fix))
    return len(nodes[last or ""])


def _no_show(store: Store, here: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    late = [rank for rank in ranks[:1024] if not store.check([f"{here['key']}/{rank}"])]
    who = f"{name_ranks(late)} did not come" if late else f"rank {ranks[0]} gave no answer"
    who = f"{who} within {here['timeout_s']:g} s"
    fix = "call make_groups on all of these ranks, equally often and in the same order"
    text = message(f"make_groups: {who}", [f"expected: {name_ranks(ranks)}"], fix)
    return {"error": "timeout", "text": text, "absent": late}
