"""Clusters as values: links, devices and ranks, from a text, from a file, or by hand.

The numbers of a link are those of one rank *while all ranks use it at once*: a rank has its share
of the network card of a node. So a collective takes a time that does not depend on what others do
in the same level, and what crosses one link in several collectives takes turns there.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mics_fn import checks
from mics_fn.errors import FileError, PlanError, message
from mics_fn.groups import Groups, Topology, imagined, placement, plan_groups

Placement = str | Callable[[Groups], Groups]  # a name of `PLACEMENTS`, or what places groups


@dataclass(frozen=True)
class Link:
    """One level of a cluster, as each rank sees it while all ranks use it at once.

    Args:
      latency_us: microseconds that each message takes, however short.
      gb_per_s: 10**9 bytes that a rank sends per second, while it receives as many.

    Raises:
      PlanError: a number is negative or not finite, or a bandwidth is 0.

    Example:
      >>> Link(latency_us=0, gb_per_s=50).seconds(8, 7e9)  # a ring of 8 ranks
      0.14
    """

    latency_us: float
    gb_per_s: float

    def __post_init__(self) -> None:
        checks.number("Link", "latency_us", self.latency_us, least=0)
        checks.number("Link", "gb_per_s", self.gb_per_s, above=0)

    def seconds(self, size: int, sent_bytes: float, rounds: int = 1) -> float:
        """How long a collective takes.

        Args:
          size: its ranks.
          sent_bytes: what each of them sends.
          rounds: how often data goes around all ranks: twice in an all-reduce.
        """
        return rounds * (size - 1) * self.latency_us * 1e-6 + sent_bytes / (self.gb_per_s * 1e9)


@dataclass(frozen=True)
class Device:
    """What a rank computes on.

    Args:
      name: of it.
      memory_bytes: that it has.
      flops: operations per second that a model reaches on it, by "f32", and "bf16" if that differs.
      gb_per_s: 10**9 bytes of its memory that it reads or writes per second.
      runs_ahead: whether the host queues work on streams and never waits, as with a GPU.
      coded_gb_per_s: 10**9 bytes of float32 values that it encodes or decodes per second; 0 takes
        a fifteenth of `gb_per_s`, as of int8 on an H200.
      shared: seconds of its own time that it takes to send a byte; 0 on a GPU.

    Raises:
      PlanError: a number is negative or not finite, or 0 where something has to be done.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float] = field(hash=False)
    gb_per_s: float
    runs_ahead: bool = True
    coded_gb_per_s: float = 0.0
    shared: float = 0.0

    def __post_init__(self) -> None:
        for name in ("shared", "coded_gb_per_s"):
            checks.number("Device", name, getattr(self, name), least=0)
        above = {"memory_bytes": self.memory_bytes, "gb_per_s": self.gb_per_s}
        for name, value in {**above, "flops of f32": self.flops.get("f32"), **self.flops}.items():
            checks.number("Device", name, value, above=0)

    def seconds(self, dtype: str, operations: float) -> float:
        """How long so many operations take in a dtype, else in float32."""
        return operations / self.flops.get(dtype, self.flops["f32"])


# Data sheets: memory, dense bf16, f32, memory GB/s, GB/s of the links in a node.
_SHEETS = {
    "v100": (32 * 2**30, 125e12, 15.7e12, 900, 150),
    "a100": (80 * 2**30, 312e12, 19.5e12, 2039, 300),
    "h100": (80 * 2**30, 989e12, 67e12, 3350, 450),
    "h200": (141 * 10**9, 989e12, 67e12, 4800, 450),
    "b200": (180 * 10**9, 2250e12, 75e12, 7700, 900),
    "core": (4 * 2**30, 50e9, 50e9, 5, 0.5),  # of a laptop, where gloo moves bytes
}
REACHED = 0.4  # of the operations of a data sheet: what large models reach when they train
OF_PRODUCTS = 0.6  # the same, of what products of large matrices reach
_INSIDE_US, _NETWORK_US = 3.0, 10.0  # latencies of NVLink, and of InfiniBand or EFA
_RATE = r"(?:(\d+)\s*x\s*)?([\d.]+)\s*gbit(?:/s)?"
_TEXT = re.compile(rf"(?:(\d+)\s*x\s*)?(\d+)\s*x?\s*([a-z]\w*)(?:\s*,\s*{_RATE})?")


@dataclass(frozen=True)
class Hardware:
    """Ranks, what they compute on, and what connects them.

    Args:
      topology: how ranks are wired.
      links: of each of its levels, outermost (slowest) first.
      device: that each rank has.

    Raises:
      PlanError: there are more links than levels, or fewer.

    Example:
      >>> cluster = Hardware.of("64 x 8 h100, 8 x 400 Gbit")
      >>> print(cluster)
      node 64 x rank 8 of h100; node: 10 us, 50 GB/s; rank: 3 us, 450 GB/s
      >>> cluster.with_sizes(2048, 8).topology.world_size
      16384
    """

    topology: Topology
    links: tuple[Link, ...]
    device: Device

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", tuple(self.links))
        checks.instance("Hardware", "topology", self.topology, Topology, "a Topology")
        checks.instance("Hardware", "device", self.device, Device, "a Device")
        names, count = self.topology.names, len(self.links)
        if count != len(names) or not all(isinstance(link, Link) for link in self.links):
            text = f"Hardware: {count} links {self.links} for the levels {', '.join(names)}"
            raise PlanError(text, fix="pass one Link for each level, outermost first")

    @classmethod
    def of(cls, text: str) -> "Hardware":
        """A well-known cluster: nodes, devices in each, and what connects a node to the others.

        "8 x 8 v100, 100 Gbit" has 100 Gbit/s for each node, which its 8 ranks share; "64 x 8 h100,
        8 x 400 Gbit" has eight such cards in each. Devices are those of data sheets, with the part
        of operations that models reach, `REACHED`.

        Raises:
          PlanError: the text has another form, or names another device.
        """
        found = _TEXT.fullmatch(text.strip().lower())
        nodes, count, name, cards, rate = found.groups() if found else ("", "0", "", "", "")
        one = nodes in (None, "1")
        sizes = tuple(int(n) for n in (nodes, count) if n)
        if name not in _SHEETS or min(sizes) < 1 or (not one and not float(rate or 0)):
            fix = f"write such as '64 x 8 h100, 8 x 400 Gbit'; devices: {', '.join(_SHEETS)}"
            raise PlanError(f"Hardware.of: {text!r} is no cluster that is known", fix=fix)
        memory, bf16, f32, copied, inside = _SHEETS[name]
        flops = {"bf16": REACHED * bf16, "f32": REACHED * f32}
        links = [Link(_INSIDE_US, inside)]
        if nodes:
            shared = int(cards or 1) * float(rate or inside * 8) / 8 / int(count)
            links.insert(0, Link(_NETWORK_US, shared))
        device = Device(name, memory, flops, copied, runs_ahead=name != "core")
        return cls(Topology(sizes), tuple(links), device)

    @classmethod
    def read(cls, verb: str, cluster: "Hardware | str") -> "Hardware":
        """The cluster that a verb is given, as a value or as a text.

        Raises:
          PlanError: it is neither, or nothing of that text is known.
        """
        if isinstance(cluster, str):
            return cls.of(cluster)
        fix = "pass such as mf.Hardware.of('64 x 8 h100, 8 x 400 Gbit'), or that text"
        checks.instance(verb, "cluster", cluster, cls, "Hardware or a text", fix)
        return cluster

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> "Hardware":
        """Read the profile of a cluster that `python -m mics_fn doctor --profile FILE` wrote.

        Raises:
          FileError: it cannot be read, or is no profile.
          PlanError: a number of it is out of its range.
        """
        checks.path("Hardware.load", "file", file)
        try:
            facts = json.loads(Path(file).read_text())
            levels, about = facts["levels"], dict(facts["device"])
            sizes = tuple(level["ranks"] for level in levels)
            topology = Topology(sizes, tuple(level["name"] for level in levels))
            links = [Link(level["latency_us"], level["gb_per_s"]) for level in levels]
            about.pop("copy_gb_per_s", None)
            if "runs_ahead" not in about:  # the doctor has measured products of matrices
                about["flops"] = {name: OF_PRODUCTS * x for name, x in about["flops"].items()}
                about["runs_ahead"] = "cpu" not in about["name"].lower()
            device = Device(**about)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, PlanError):
                raise
            text = f"Hardware.load: {file} is no profile: {type(error).__name__}: {error}"
            fix = "write one: python -m mics_fn doctor --profile FILE"
            raise FileError(message(text, fix=fix), f"{file}") from error
        return cls(topology, tuple(links), device)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the profile that `load` reads."""
        pairs = zip(self.topology.names, self.topology.sizes, self.links, strict=True)
        levels = [{"name": name, "ranks": size, **asdict(link)} for name, size, link in pairs]
        device: dict[str, Any] = {**asdict(self.device), "flops": dict(self.device.flops)}
        Path(file).write_text(json.dumps({"levels": levels, "device": device}, indent=2) + "\n")

    def with_link(self, name: str, **changes: float) -> "Hardware":
        """The same cluster, with fields of a link changed, by the name of its level."""
        changed = replace(self.link(name), **changes)
        pairs = zip(self.topology.names, self.links, strict=True)
        return replace(self, links=tuple([changed if n == name else x for n, x in pairs]))

    def with_sizes(self, *sizes: int) -> "Hardware":
        """The same cluster with other numbers of ranks in its levels, outermost first."""
        return replace(self, topology=Topology(sizes, self.topology.names))

    def link(self, name: str) -> Link:
        """The link of a level."""
        checks.choice("Hardware", "level", name, *self.topology.names)
        return self.links[self.topology.names.index(name)]

    @property
    def outermost(self) -> str:
        """The name of the slowest level that has several ranks."""
        wired = zip(self.topology.names, self.topology.sizes, strict=True)
        return next((name for name, size in wired if size > 1), self.topology.names[-1])

    def groups(self, partition_size: int, placed: Placement = "mics") -> Groups:
        """The groups of its first rank, without processes: nothing can be sent over them.

        Args:
          partition_size: number of ranks that share one replica.
          placed: as `scheme` of `placement.place`; or a function of groups, such as
            `mf.placement.fixed_order`.

        Raises:
          PlanError: the size or the placement does not fit; the text lists what would.

        Example:
          >>> Hardware.of("4 x 8 h100, 8 x 400 Gbit").groups(16, "hpz").num_replicas
          2
        """
        plan = plan_groups(self.topology, partition_size)
        made = imagined(plan, on_device=self.device.runs_ahead)
        return placement.place(made, placed) if isinstance(placed, str) else placed(made)

    def __str__(self) -> str:
        named = zip(self.topology.names, self.links, strict=True)
        links = [f"{name}: {x.latency_us:g} us, {x.gb_per_s:g} GB/s" for name, x in named]
        return "; ".join([f"{self.topology} of {self.device.name}", *links])
