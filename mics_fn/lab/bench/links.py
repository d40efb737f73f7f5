"""The links between nodes: the bytes that leave a node, and links whose rate can be changed.

[Note: link rates] The bench cannot make a link slower, but some clusters can. Such a cluster has an
importable module with a function `set_rate(rate)`, which every rank calls while all are idle, and
which returns on rank 0 once the rate is in force. The variable MICS_FN_LINKS names the module.
"""

import importlib
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from mics_fn.errors import PlanError
from mics_fn.lab.bench.turns import BenchSetting, of_all_ranks

HEADER_BYTES = 66  # per packet: Ethernet 14, IPv4 20, TCP 20, and timestamps of TCP 12
NET_DEV = Path("/proc/net/dev")
LINKS = "MICS_FN_LINKS"
DEFAULT_LINKS = "rigmark"
AS_IS = "as-is"


class Counters(NamedTuple):
    """What a network interface has sent so far."""

    nbytes: int
    packets: int

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(self.nbytes - earlier.nbytes, self.packets - earlier.packets)


class Rate(NamedTuple):
    """The rate of the links between nodes, and the steps of a turn at it."""

    name: str  # as-is, unshaped, 200mbit
    steps: int


def node_interface(node_size: int) -> str | None:
    """The network interface that counts the bytes leaving this node; None if there is none.

    It is the one that gloo is told to use. Nodes that are only pretended share the interface of one
    machine, and the bytes between them do not go through it, so there is nothing to count.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        mine = f"{kernel} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        mine = None
    seen = of_all_ranks((mine, name != "lo" and read_counters(name) is not None))
    nodes = [seen[i : i + node_size] for i in range(0, len(seen), node_size)]
    own = [{place for place, _ in node} for node in nodes]
    apart = all(len(places) == 1 for places in own) and len(set.union(*own)) == len(nodes)
    counted = all(readable and place is not None for place, readable in seen)
    return name if len(nodes) > 1 and apart and counted else None


def read_counters(interface: str | None) -> Counters | None:
    """What an interface of this network namespace has sent; None if it does not exist."""
    if interface is None or not NET_DEV.exists():
        return None
    for line in NET_DEV.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == interface:
            columns = rest.split()
            return Counters(int(columns[8]), int(columns[9]))
    return None


def sent_bytes(interface: str | None) -> int | None:
    """Bytes that this node has sent so far; None if it has no interface of its own."""
    found = read_counters(interface)
    return None if found is None else found.nbytes


def read_rates(words: Sequence[str], steps: int) -> tuple[Rate, ...]:
    """Rates of links from texts such as 200mbit, or 200mbit:2 for turns of 2 steps.

    Args:
        words: the texts.
        steps: the steps of a turn, if a text does not say.

    Raises:
        PlanError: a text is not a rate, or nothing here can set rates. See [Note: link rates].

    >>> read_rates(["as-is"], 5)
    (Rate(name='as-is', steps=5),)
    """
    text = f"--rates {' '.join(words)}"
    found = []
    for word in words:
        match = re.fullmatch(rf"({AS_IS}|unshaped|\d+(?:\.\d+)?[kmg]bit)(?::([1-9]\d*))?", word)
        if match is None:
            fix = f"write 200mbit, 1gbit, unshaped or {AS_IS}, followed by :3 for turns of 3 steps"
            raise PlanError(f"{text}: {word} is not a rate", fix=fix)
        found.append(Rate(match[1], int(match[2] or steps)))
    names = [rate.name for rate in found]
    if AS_IS in names and len(names) > 1:
        fix = f"leave {AS_IS} out: the rate that the links had before is not known here"
        raise PlanError(f"{text}: {AS_IS} cannot be combined", fix=fix)
    if AS_IS not in names:
        _links(text)
    return tuple(found)


def settings_of(rates: Sequence[Rate]) -> list[BenchSetting]:
    """The settings of a comparison in which every rank calls for these rates."""
    if rates[0].name == AS_IS:
        return [BenchSetting(rates[0].steps)]
    links = _links(rates[0].name)

    def put(name: str) -> None:
        dist.barrier()
        links.set_rate(name)
        dist.barrier()

    return [BenchSetting(rate.steps, partial(put, rate.name)) for rate in rates]


def _links(asked: str) -> Any:
    """The module that sets rates, for what was `asked`."""
    name = os.environ.get(LINKS, DEFAULT_LINKS)
    fix = f"use a cluster that can, with its module in {LINKS}; or leave --rates out"
    what = f"{asked}: nothing here sets the rate of a link"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise PlanError(what, [f"{LINKS}={name}: {error}"], fix) from None
    if not callable(getattr(module, "set_rate", None)):
        raise PlanError(what, [f"{LINKS}={name}: it has no set_rate"], fix)
    return module
