"""`python -m mics_fn doctor`: is this machine fit, and are the numbers right on its GPUs?

Each part of the report runs in processes of its own with a time limit, and is printed as soon as it
is done. `--gpu` asks what one GPU can answer, with two or four ranks that share it where there are
too few; `--gpus` what needs several: its ranks have a GPU each, and measure their links.

As one of several ranks that a launcher has started, it is the smallest job there is, for the first
minute on new nodes: one process per node is enough, and one per GPU is the real thing. It moves
known values over all ranks, along the nodes and across them, and says which are wrong and how long
it took; with `--gpus` or `--profile FILE` it measures the links between them, too.
"""

import argparse
import getpass
import json
import os
import platform
import re
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.cuda import nccl

import mics_fn as mf
from mics_fn import _torch
from mics_fn._version import __version__
from mics_fn.errors import PlanError, human_bytes, rank_lines
from mics_fn.groups import nccl_problems, read_launch
from mics_fn.lab.doctor_gpu import PARTS, links, measure
from mics_fn.lab.doctor_parts import (
    TIMEOUT_S,
    Check,
    DoctorConfig,
    ReportPart,
    loopback,
    reach_checks,
)
from mics_fn.lab.models import GPTConfig
from mics_fn.lab.ranks import LOOPBACK, RankFailure, run_bounded
from mics_fn.lab.report import add_count, new_file, table

LEAST_S = 5.0  # with less time a part is not begun
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
    facts: Mapping[str, Any] = {}

    @property
    def well(self) -> bool:
        """Whether nothing is wrong here."""
        return self.verdict in (OK, LEFT_OUT)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add("--gpu", action="store_true", help="check numbers, memory and errors on the GPUs")
    text = "check ranks on GPUs of their own, and measure links; under a launcher as its ranks"
    add("--gpus", action="store_true", help=text)
    text = "a file for measured links and devices as JSON; with --gpus, or under a launcher"
    add("--profile", type=new_file, metavar="FILE", help=text)
    add("--parts", nargs="+", choices=[*PARTS], default=(), help="some of these checks")
    add("--device", default="auto", help="of those parts; cpu runs them with gloo (default auto)")
    add("--out", type=new_file, metavar="FILE", help="a file for the report as JSON")
    add_count(parser, "limit", 590, "seconds that all parts may take together")


def main(args: argparse.Namespace) -> int:
    """Print the report part by part, and return the exit code: 1 if something is wrong.

    As one of several ranks that a launcher has started, check the job that they are.

    Raises:
        PlanError: with `--gpu`, there is no accelerator, with `--gpus` only one; or arguments do
            not fit together.
    """
    launched = read_launch(os.environ)
    if launched is not None and launched.world_size > 1:
        if args.gpu or args.parts or args.out:
            text = "doctor: a launcher started this process as one of several ranks"
            fix = "leave out --gpu, --parts and --out to check the job; or start it by itself"
            raise PlanError(text, fix=fix)
        return check_job(args)
    if (args.gpus and (args.gpu or args.parts)) or (args.profile and not args.gpus):
        text = "doctor: --gpu and --parts share one GPU, --gpus and --profile need several"
        raise PlanError(text, fix="pass --gpu, or --gpus with or without --profile FILE")
    args.gpu = args.gpu or args.gpus or bool(args.parts)
    began, gloo = time.monotonic(), config_for("cpu")
    findings = [run_part("environment", ReportPart(environment, 1, 60), gloo, args.limit)]
    facts = findings[0].facts
    device = _device_of(args, facts) if facts else "not known"
    devices = 0 if device == "cpu" else facts.get("devices", 0)
    parts = _parts_of(args, devices) if facts else {}

    def show() -> None:
        print(as_text(findings[-1]) + "\n", flush=True)
        if args.out is not None:
            report = as_json(findings, device, time.monotonic() - began)
            args.out.write_text(json.dumps(report, indent=1))

    show()
    parts = {"loopback": ReportPart(loopback, 2, 60)} | parts
    for name, part in parts.items():
        job = gloo if name == "loopback" else config_for(device, args.profile)
        shared = job is not gloo and 0 < devices < part.ranks
        remaining_s = began + args.limit - time.monotonic()
        findings.append(run_part(name, part, job, remaining_s, shared))
        show()
    wrong = ", ".join(one.name for one in findings if not one.well)
    verdict = f"look at: {wrong}" if wrong else "nothing is wrong"
    print(f"{time.monotonic() - began:.0f} s in all; {verdict}")
    return 1 if wrong else 0


def _parts_of(args: argparse.Namespace, devices: int) -> dict[str, ReportPart]:
    """Return the parts that were asked for; with `--gpus`, those that fit one rank per device."""
    if not args.gpus:
        return {name: PARTS[name] for name in args.parts or PARTS} if args.gpu else {}
    if devices == 1:
        raise PlanError("--gpus: there is one device here", fix="pass --gpu; or start it on more")
    ranks = devices or 4
    fit = {name: part for name, part in PARTS.items() if 1 < part.ranks <= ranks}
    return {"links": ReportPart(links, ranks, 150), **fit}


def _device_of(args: argparse.Namespace, facts: Mapping) -> str:
    """Return the type of device to check."""
    if not args.gpu or args.device == "cpu":
        return "cpu"
    found = facts.get("accelerator", "none")
    if found == "none" or args.device not in ("auto", found):
        wanted = "accelerator" if args.device == "auto" else args.device
        raise PlanError(f"torch finds no {wanted} here; --device cpu runs all parts with gloo")
    return found


def config_for(device: str, profile: Path | None = None) -> DoctorConfig:
    """Make the config of the ranks; small on the CPU, where each part only has to run."""
    if device == "cpu":
        small = GPTConfig(context=16, dim=32, num_blocks=2)
        return DoctorConfig(model=small, profile=profile)
    model = GPTConfig(context=64, dim=256, num_blocks=6)
    return DoctorConfig(device=device, model=model, timed=True, profile=profile)


def _variables(shared: bool, rank: int) -> Mapping[str, str]:
    """Return the environment variables of a rank.

    NCCL refuses several ranks on one GPU of a host. So each of them says that it is another host,
    and they talk through sockets.
    """
    found = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # equal runs then have equal bits
    if shared:
        found |= {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": LOOPBACK}
        found["NCCL_HOSTID"] = f"rank{rank}"
    return found


def run_part(
    name: str, part: ReportPart, job: DoctorConfig, remaining_s: float, shared: bool = False
) -> Finding:
    """Run one part and return its finding, whatever happens to its ranks.

    Args:
        name: of the part.
        part: what its ranks run.
        job: what they are told.
        remaining_s: seconds that are left for all parts.
        shared: whether several ranks share a GPU.
    """
    limit_s, began = min(part.limit_s, remaining_s), time.monotonic()
    if limit_s < LEAST_S:
        return Finding(name, LEFT_OUT, part.ranks, errors=["no time is left"])
    with tempfile.TemporaryDirectory(prefix="mics_doctor_") as folder:
        replies = run_bounded(
            part.run,
            part.ranks,
            replace(job, folder=folder),
            limit_s=limit_s,
            environment=partial(_variables, shared),
        )
        checks = checks_of(Path(folder), part.ranks)
    failures = {rank: one for rank, one in replies.items() if isinstance(one, RankFailure)}
    verdict = OK if all(check.ok for check in checks) else WRONG
    if failures:
        stopped = all(one.type_name == "RankTimeout" for one in failures.values())
        verdict = HANGS if stopped else FAILED
    facts, seconds = replies[0], time.monotonic() - began
    facts = facts if isinstance(facts, dict) else {}
    return Finding(name, verdict, part.ranks, seconds, checks, errors_of(failures), facts)


# The report.


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


def errors_of(failures: Mapping[int, RankFailure]) -> list[str]:
    """List how ranks failed, each distinct text once, then their tracebacks."""
    found = {}
    for rank, (kind, text, trace) in sorted(failures.items()):
        lines = [f"{kind}: {text}", *trace.splitlines()[-TRACE_LINES:]]
        found[rank] = clean("\n".join(lines))
    return rank_lines(found)


def clean(text: str) -> str:
    """Remove folders, names of hosts and users, and addresses from a text.

    >>> clean('File "/home/ann/env/lib/torch/nn.py", line 3: peer 10.0.0.7 closed')
    'File "nn.py", line 3: peer <address> closed'
    """
    text = _ADDRESS.sub("<address>", _PATH.sub("", text))
    for name, stand_in in _own_names().items():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stand_in, text, flags=re.IGNORECASE)
    return re.sub(r"0x[0-9a-f]+", "0x..", text)


def _own_names() -> dict[str, str]:
    """Return the names that identify this machine and its user, with their replacements."""
    host = socket.gethostname()
    found = dict.fromkeys((host, host.partition(".")[0]), "<host>")
    with suppress(OSError, KeyError, ImportError):
        found[getpass.getuser()] = "<user>"
    found[Path.home().name] = "<user>"
    return {name: own for name, own in found.items() if len(name) > 2 and name not in _COMMON}


def as_json(findings: Sequence[Finding], device: str, seconds: float) -> dict[str, Any]:
    """Return the report as plain data."""
    parts = []
    for one in findings:
        checks = [check._asdict() | {"ok": check.ok} for check in one.checks]
        parts.append({**one._asdict(), "checks": checks, "facts": dict(one.facts)})
    found = {"report": "mics_fn doctor", "device": device, "seconds": seconds, "parts": parts}
    return found | {"well": all(one.well for one in findings)}


def as_text(finding: Finding) -> str:
    """Render one part: its verdict, its checks, and its errors."""
    if finding.verdict == LEFT_OUT:
        return f"{finding.name}: {LEFT_OUT}, because {finding.errors[0]}"
    ranks = f"{finding.ranks} rank{'s' * (finding.ranks > 1)}"
    title = f"{finding.name}: {finding.verdict} ({ranks}, {finding.seconds:.0f} s)"
    lines = [title, *(f"  {name}: {fact}" for name, fact in finding.facts.items())]
    if not finding.facts:
        rows = [_row(check) for check in finding.checks]
        lines = [table(title, rows or [("nothing was found", "")])]
    lines += [f"  {line}" for error in finding.errors for line in error.splitlines()]
    return "\n".join(lines)


def _row(check: Check) -> tuple[str, ...]:
    if check.value is None:
        return check.what, "not available", "", ""
    limit = "" if check.limit is None else f"of {_figure(check.limit, check.unit)}"
    return check.what, _figure(check.value, check.unit), limit, "" if check.ok else WRONG


def _figure(value: float, unit: str) -> str:
    if unit == "bytes":
        return human_bytes(value)
    if unit:
        return f"{value:.3f} {unit}"
    return f"{value:d}" if isinstance(value, int) else f"{value:.1e}"


# `python -m mics_fn doctor` as a rank of a job.

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_job(args: argparse.Namespace) -> int:
    """Check the ranks of a job, as each of them; the first one prints.

    Returns the exit code: 1 if something is wrong.

    Args:
        args: of the command.

    Raises:
        MicsError: the ranks do not find each other in a minute, or one failed.
    """
    began = time.monotonic()
    chosen = mf.init_distributed(device=args.device, timeout_s=TIMEOUT_S)
    checks = [Check("until ranks are connected", time.monotonic() - began, unit="s")]
    topology, found = reach_checks(chosen)
    checks += found
    if args.gpus or args.profile:
        say = lambda *check, **fields: checks.append(Check(*check, **fields))  # noqa: E731
        measure(config_for(chosen.type, args.profile), chosen, say)
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


# What this machine and its torch are, without names of hosts, users or folders.


def environment(job: DoctorConfig) -> dict[str, Any]:
    """Return the facts of this machine by name.

    Args:
        job: of a rank; it has no part in this.
    """
    facts: dict[str, Callable[[], Any]] = {
        "mics_fn": lambda: __version__,
        "python": platform.python_version,
        "torch": lambda: torch.__version__,
        "CUDA": lambda: torch.version.cuda or torch.version.hip or "none",
        "NCCL": lambda: ".".join(map(str, nccl.version())),
        "system": lambda: " ".join((platform.system(), platform.machine(), *platform.libc_ver())),
        "cores": lambda: f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": lambda: human_bytes(_torch.total_memory(torch.device("cpu"))),
        "settings of NCCL": _nccl_settings,
    }
    found: dict[str, Any] = {name: _or_why_not(fact) for name, fact in facts.items()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found["accelerator"] = "none" if accelerator is None else accelerator.type
    found["devices"] = 0 if accelerator is None else torch.accelerator.device_count()
    for i in range(found["devices"]):
        device = torch.device(found["accelerator"], i)
        found[f"device {i}"] = _or_why_not(partial(_device_text, device))
    return found


def _nccl_settings() -> str:
    found = [f"{name}: {why}" for name, why in nccl_problems(dict(os.environ)).items()]
    return "; ".join(found) or "as init_distributed sets them"


def _or_why_not(fact: Callable[[], Any]) -> Any:
    try:
        return fact()
    except Exception as error:  # a fact that cannot be had is no reason to go without the others
        return f"not available ({type(error).__name__})"


def _device_text(device: torch.device) -> str:
    name = torch.get_device_module(device).get_device_properties(device).name
    return f"{name}, {human_bytes(_torch.total_memory(device))}"
