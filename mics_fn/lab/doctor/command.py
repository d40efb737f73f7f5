"""`python -m mics_fn doctor`: the flags, and what runs the parts of the report in time."""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from mics_fn.errors import PlanError
from mics_fn.groups import read_launch
from mics_fn.lab.bench.turns import BenchTurns
from mics_fn.lab.doctor.parts import PARTS, ReportPart
from mics_fn.lab.doctor.rank import DoctorConfig
from mics_fn.lab.doctor.report import (
    FAILED,
    HANGS,
    LEFT_OUT,
    OK,
    WRONG,
    Finding,
    as_json,
    as_text,
    check_job,
    checks_of,
    environment,
    errors_of,
    loopback,
)
from mics_fn.lab.doctor.training import Training
from mics_fn.lab.models.gpt import GPTConfig
from mics_fn.lab.ranks.launch import LOOPBACK, run_bounded
from mics_fn.lab.report import add_count

LIMIT_S = 480
LEAST_S = 5.0  # with less time a part is not begun
ENVIRONMENT, TWO_RANKS = ReportPart(environment, 1, 60), ReportPart(loopback, 2, 60)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add("--gpu", action="store_true", help="check numbers, memory, errors and speed on the GPUs")
    names = " ".join(PARTS)
    add("--parts", type=_names, help=f"of {names} (default all), with commas between them")
    add("--device", default="auto", help="of those parts; cpu runs them with gloo (default auto)")
    add("--out", type=Path, metavar="FILE", help="a file for the report as JSON")
    add_count(parser, "ranks", 4, "ranks of a part at most")
    add_count(parser, "limit", LIMIT_S, "seconds that all parts may take together")


def _names(text: str) -> tuple[str, ...]:
    found = tuple(filter(None, text.split(",")))
    wrong = [name for name in found if name not in PARTS]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]}: choose from {' '.join(PARTS)}")
    return found


def main(args: argparse.Namespace) -> int:
    """Print the report part by part, and return the exit code: 1 if something is wrong.

    As one of several ranks that a launcher has started, check the job that they are.

    Raises:
        PlanError: with `--gpu`, there is no accelerator; or arguments do not fit together.
    """
    launch = read_launch(os.environ)
    if launch is not None and launch.world_size > 1:
        if args.gpu or args.parts or args.out:
            text = "doctor: a launcher started this process as one of several ranks"
            fix = "leave out --gpu, --parts and --out to check the job; or start it by itself"
            raise PlanError(text, fix=fix)
        return check_job(args.device)
    _check(args)
    began, nothing = time.monotonic(), DoctorConfig("cpu", Training())
    findings = [run_part("environment", ENVIRONMENT, nothing, args.limit)]
    facts = findings[0].facts
    device = _device_of(args, facts) if facts else "not known"

    def show() -> None:
        print(as_text(findings[-1]) + "\n", flush=True)
        if args.out is not None:
            report = as_json(findings, device, time.monotonic() - began)
            args.out.write_text(json.dumps(report, indent=1))

    show()
    devices = 0 if device == "cpu" else len(facts.get("devices", ()))
    parts = {"loopback": TWO_RANKS} | (_planned(args, devices) if args.gpu and facts else {})
    for name, part in parts.items():
        job = nothing if part is TWO_RANKS else _job(device)
        findings.append(run_part(name, part, job, began + args.limit - time.monotonic()))
        show()
    wrong = ", ".join(one.name for one in findings if not one.well)
    verdict = f"look at: {wrong}" if wrong else "nothing is wrong"
    print(f"{time.monotonic() - began:.0f} s in all; {verdict}")
    return 1 if wrong else 0


def _check(args: argparse.Namespace) -> None:
    if args.parts and not args.gpu:
        text = f"--parts {','.join(args.parts)} without --gpu"
        raise PlanError(text, fix="add --gpu, and --device cpu where there is no GPU")
    if args.out is not None and not args.out.parent.is_dir():
        raise PlanError(f"--out {args.out}: there is no folder {args.out.parent}")


def _device_of(args: argparse.Namespace, facts: Mapping) -> str:
    """Return the type of device to check."""
    if not args.gpu or args.device == "cpu":
        return "cpu"
    found = facts.get("accelerator", "none")
    if found == "none" or args.device not in ("auto", found):
        wanted = "accelerator" if args.device == "auto" else args.device
        raise PlanError(f"torch finds no {wanted} here; --device cpu runs all parts with gloo")
    return found


def _job(device: str) -> DoctorConfig:
    """Make the config of the ranks; small on the CPU, where each part only has to run."""
    if device == "cpu":
        small = Training(model=GPTConfig(context=16, dim=32, num_blocks=2))
        return DoctorConfig(device, small, BenchTurns(rounds=3, steps=1, warmup=1))
    training = Training(model=GPTConfig(context=64, dim=256, num_blocks=6))
    return DoctorConfig(device, training, BenchTurns(rounds=7, steps=5, warmup=3))


def _planned(args: argparse.Namespace, devices: int) -> dict[str, ReportPart]:
    """Select the parts that were asked for, each with as many ranks as possible."""
    found = {name: PARTS[name] for name in args.parts or PARTS}
    if "speed" in found:  # times say something where each rank has a device of its own
        found["speed"] = found["speed"]._replace(ranks=max(1, min(devices, 4, args.ranks)))
    return {
        name: part._replace(
            ranks=part.ranks if part.ranks <= args.ranks else 0,
            variables=partial(_variables, 0 < devices < part.ranks),
        )
        for name, part in found.items()
    }


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


def run_part(name: str, part: ReportPart, job: DoctorConfig, remaining_s: float) -> Finding:
    """Run one part and return its finding, whatever happens to its ranks.

    Args:
        name: of the part.
        part: what its ranks run; with no ranks, more are needed than may be started.
        job: what they are told.
        left_s: seconds that are left for all parts.
    """
    limit_s = min(part.limit_s, remaining_s)
    if not part.ranks or limit_s < LEAST_S:
        why = "no time is left" if part.ranks else "it needs more ranks than --ranks allows"
        return Finding(name, LEFT_OUT, part.ranks, errors=[why])
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mics_doctor_") as folder:
        ended = run_bounded(
            part.run,
            part.ranks,
            replace(job, folder=folder),
            limit_s=limit_s,
            grace_s=part.grace_s,
            environment=part.variables,
        )
        checks = checks_of(Path(folder), part.ranks)
    seconds, errors = time.monotonic() - began, errors_of(ended)
    verdict = OK
    if part.judge:
        checks += part.judge(ended)
        errors = [error.partition("\n")[0] for error in errors]
    elif errors:
        verdict = HANGS if all(one.stopped or one.well for one in ended) else FAILED
    if verdict == OK and not all(check.ok for check in checks):
        verdict = WRONG
    facts = ended[0].result if isinstance(ended[0].result, dict) else {}
    return Finding(name, verdict, part.ranks, seconds, checks, errors, facts)
