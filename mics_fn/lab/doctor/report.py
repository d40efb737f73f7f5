"""The report of the doctor: what each part found, as JSON and as text that a user can send.

It is the smallest job there is, for the first minute on new nodes: one process per node is enough,
and one per GPU is the real thing. It moves known values over all ranks, along the nodes and across
them, and says which are wrong and how long it took.
"""

import getpass
import json
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.cuda import nccl

import mics_fn as mf
from mics_fn import _torch
from mics_fn._version import __version__
from mics_fn.errors import human_bytes, rank_lines
from mics_fn.groups import Topology, nccl_problems
from mics_fn.lab.doctor.rank import Check, DoctorConfig, Rank
from mics_fn.lab.ranks.launch import Ended
from mics_fn.lab.report import table

OK, WRONG, FAILED, HANGS, LEFT_OUT = "ok", "WRONG", "FAILED", "HANGS", "left out"
TRACE_LINES = 25
# A path loses its folders, and an address its numbers.
_PATH = re.compile(
    r"(?<![\w.:/])(?:~|[A-Za-z]:)?(?:[\\/][^\s\\/:,;'\"()<>\[\]]+)*[\\/](?=[^\s\\/])"
)
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){3,7}\b")
_COMMON = ("localhost", "root", "user", "nobody")  # these tell nobody apart


class Finding(NamedTuple):
    """Result of one part.

    Args:
        name: of the part.
        verdict: one of the words above.
        ranks, seconds: what it took.
        checks: what it looked at.
        errors: how ranks ended that did not end well, and where; or why it was left out.
        facts: of the environment.
    """

    name: str
    verdict: str
    ranks: int
    seconds: float = 0.0
    checks: Sequence[Check] = ()
    errors: Sequence[str] = ()
    facts: Mapping[str, Any] = MappingProxyType({})

    @property
    def well(self) -> bool:
        """Whether nothing is wrong here."""
        return self.verdict in (OK, LEFT_OUT)


def checks_of(folder: Path, ranks: int) -> list[Check]:
    """Read the checks of all ranks; of a check that several ranks made, the worst value."""
    worst: dict[str, Check] = {}
    for rank in range(ranks):
        with suppress(FileNotFoundError):
            for line in (folder / f"checks{rank}").read_text().splitlines():
                check = Check(*json.loads(line))
                seen = worst.setdefault(check.what, check)
                if check.value is not None and seen.value is not None:
                    worst[check.what] = max(seen, check, key=lambda c: c.value or 0.0)
    return list(worst.values())


def errors_of(ended: Sequence[Ended]) -> list[str]:
    """List how ranks failed, each distinct text once, then their tracebacks."""
    found = {}
    for rank, one in enumerate(ended):
        if not one.well:
            tail = [*one.trace.splitlines(), *([] if one.error else one.output.splitlines())]
            found[rank] = clean("\n".join([one.error or one.how, *tail[-TRACE_LINES:]]))
    return rank_lines(found)


def clean(text: str) -> str:
    """Remove folders, names of hosts and users, and addresses from a text.

    >>> clean('File "/home/ann/env/lib/torch/nn.py", line 3: peer 10.0.0.7 closed')
    'File "nn.py", line 3: peer <address> closed'
    """
    text = _ADDRESS.sub("<address>", _PATH.sub("", text))
    for name, stand_in in _names().items():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stand_in, text, flags=re.IGNORECASE)
    return re.sub(r"0x[0-9a-f]+", "0x..", text)


def _names() -> dict[str, str]:
    """Return the names that identify this machine and its user, with their replacements."""
    found = {}
    host = socket.gethostname()
    for name in (host, host.partition(".")[0]):
        found[name] = "<host>"
    with suppress(OSError, KeyError, ImportError):
        found[getpass.getuser()] = "<user>"
    found[Path.home().name] = "<user>"
    return {name: own for name, own in found.items() if len(name) > 2 and name not in _COMMON}


def as_json(findings: Sequence[Finding], device: str, seconds: float) -> dict[str, Any]:
    """Return the report as plain data."""
    return {
        "report": "mics_fn doctor",
        "device": device,
        "seconds": round(seconds, 1),
        "well": all(one.well for one in findings),
        "parts": [
            {
                **one._asdict(),
                "seconds": round(one.seconds, 1),
                "checks": [check._asdict() | {"ok": check.ok} for check in one.checks],
                "facts": dict(one.facts),
            }
            for one in findings
        ],
    }


def as_text(finding: Finding) -> str:
    """Render one part: its verdict, its checks, and its errors."""
    if finding.verdict == LEFT_OUT:
        return f"{finding.name}: {LEFT_OUT}, because {finding.errors[0]}"
    ranks = f"{finding.ranks} rank" + ("s" if finding.ranks > 1 else "")
    title = f"{finding.name}: {finding.verdict} ({ranks}, {finding.seconds:.0f} s)"
    lines = [table(title, _rows(finding.checks))]
    if finding.facts:
        lines = [title, *(f"  {name}: {_fact(fact)}" for name, fact in finding.facts.items())]
    lines += [f"  {line}" for error in finding.errors for line in error.splitlines()]
    return "\n".join(lines)


def _fact(fact: Any) -> str:
    return ("; ".join(fact) or "none") if isinstance(fact, list) else str(fact)


def _rows(checks: Sequence[Check]) -> list[tuple[str, ...]]:
    rows = []
    for check in checks:
        if check.value is None:
            rows.append((check.what, "not available", "", ""))
            continue
        limit = "" if check.limit is None else f"of {_figure(check.limit, check.unit)}"
        mark = "" if check.ok else WRONG
        rows.append((check.what, _figure(check.value, check.unit), limit, mark))
    return rows or [("nothing was found", "")]


def _figure(value: float, unit: str) -> str:
    if unit == "bytes":
        return human_bytes(value)
    if unit:
        return f"{value:.3f} {unit}"
    return f"{value:d}" if isinstance(value, int) else f"{value:.1e}"


# `python -m mics_fn doctor` as a rank of a job: whether the ranks of all nodes reach each
# other.

SIZE = 1_000_000  # elements that are moved
START_S = 60.0  # until all ranks must have started
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_job(device: str) -> int:
    """Check the ranks of a job, as each of them; the first one prints.

    Returns the exit code: 1 if something is wrong.

    Args:
        device: "auto", or a type of device.

    Raises:
        MicsError: the ranks do not find each other in a minute, or one failed.
    """
    began = time.monotonic()
    chosen = mf.init_distributed(device=device, timeout_s=START_S)
    checks = [Check("until ranks are connected", time.monotonic() - began, unit="s")]
    topology, found = reach_checks(chosen)
    checks += found
    world, seconds = dist.get_world_size(), time.monotonic() - began
    verdict = OK if all(check.ok for check in checks) else WRONG
    finding = Finding("job", verdict, world, seconds, checks)
    if dist.get_rank() == 0:
        sizes = " x ".join(map(str, topology.sizes))
        print(f"{world} ranks ({sizes}) on {chosen.type}, torch {torch.__version__}")
        for name in INTERFACES:
            print(f"{name}: {os.environ.get(name, 'not set')}")
        print("\n" + as_text(finding))
        print("\nall ranks reach each other" if finding.well else "\nsome values are wrong")
    return 0 if finding.well else 1


def reach_checks(device: torch.device) -> tuple[Topology, list[Check]]:
    """Check that all ranks reach each other: along the nodes, and across them."""
    with mf.make_groups(dist.get_world_size(), device=device, timeout_s=START_S) as groups:
        checks = _gather(groups)
    with mf.make_groups(device=device, timeout_s=START_S) as groups:  # one replica per node
        return groups.plan.topology, checks + _means(groups)


def _gather(groups: mf.Groups) -> list[Check]:
    """Gather known values of every rank, across nodes first."""
    want = torch.arange(SIZE, dtype=torch.float32, device=groups.device)
    shards = mf.shard({"known": want}, groups)
    mf.unshard(shards, groups)  # the first one also makes connections
    _torch.finish(groups.device)
    began = time.monotonic()
    full = mf.unshard(shards, groups)["known"]
    _torch.finish(groups.device)
    seconds = time.monotonic() - began
    return [
        Check("elements that are wrong in a gather", int((full != want).sum()), 0),
        Check(f"a gather of {SIZE * 4 // 10**6} MB over all ranks", seconds, unit="s"),
    ]


def _means(groups: mf.Groups) -> list[Check]:
    """Reduce a gradient by both hops: each rank gives its number, and gets the mean of all."""
    shards = mf.shard({"known": torch.zeros(SIZE, device=groups.device)}, groups)
    mine = {"known": torch.full((SIZE,), float(groups.position), device=groups.device)}
    wanted, seconds = (groups.world_size - 1) / 2, 0.0
    for _ in range(2):  # the first one also makes connections
        began = time.monotonic()
        means = mf.reduce_grads(mf.scatter_grads(mine, groups, like=shards), groups)
        _torch.finish(groups.device)
        seconds = time.monotonic() - began
    wrong = int((mf.unshard(means, groups)["known"] != wanted).sum())
    return [
        Check("elements that are wrong after both hops", wrong, 0),
        Check("both hops, with one replica per node", seconds, unit="s"),
    ]


# What this machine and its torch are, without names of hosts, users or folders.

BACKENDS = ("gloo", "nccl", "xccl", "mpi", "ucc")
UUID_DIGITS = 8  # enough to tell the devices of a machine apart


def environment(job: DoctorConfig) -> dict[str, Any]:
    """Return the facts of this machine by name, as text; the devices are a list.

    Args:
        job: of a rank; it has no part in this.
    """
    facts: dict[str, Callable[[], Any]] = {
        "mics_fn": lambda: __version__,
        "python": platform.python_version,
        "torch": lambda: torch.__version__,
        "optree": lambda: version("optree"),
        "CUDA": lambda: torch.version.cuda or torch.version.hip or "none",
        "NCCL": lambda: ".".join(map(str, nccl.version())),
        "system": lambda: " ".join((platform.system(), platform.machine(), *platform.libc_ver())),
        "cores": lambda: f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": lambda: human_bytes(_torch.total_memory(torch.device("cpu"))),
        "settings of NCCL": _nccl_settings,
        "backends": lambda: " ".join(b for b in BACKENDS if dist.is_backend_available(b)),
    }
    found: dict[str, Any] = {name: _or_why_not(fact) for name, fact in facts.items()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found["accelerator"] = "none" if accelerator is None else accelerator.type
    count = 0 if accelerator is None else torch.accelerator.device_count()
    kind = found["accelerator"]
    found["devices"] = [
        _or_why_not(lambda i=i: _device_text(torch.device(kind, i))) for i in range(count)
    ]
    return found


def _nccl_settings() -> list[str] | str:
    found = nccl_problems(dict(os.environ))
    return [f"{name}: {why}" for name, why in found.items()] or "as init_distributed sets them"


def _or_why_not(fact: Callable[[], Any]) -> Any:
    try:
        return fact()
    except Exception as error:  # a fact that cannot be had is no reason to go without the others
        return f"not available ({type(error).__name__})"


def _device_text(device: torch.device) -> str:
    properties = torch.get_device_module(device).get_device_properties(device)
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")[:UUID_DIGITS] or "unknown"
    return f"{properties.name}, {human_bytes(_torch.total_memory(device))}, UUID {uuid}"


def loopback(job: DoctorConfig) -> None:
    """Check that two ranks of gloo reach each other, as those of a job."""
    began = time.monotonic()
    me = Rank(job)
    me.say("until ranks are connected", time.monotonic() - began, unit="s")
    for check in reach_checks(me.device)[1]:
        me.say(*check)
