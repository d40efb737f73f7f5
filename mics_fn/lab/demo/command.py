"""`python -m mics_fn demo`: train a GPT sharded over ranks of this machine, and check it."""

import argparse
import importlib.util
import json
import statistics
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mics_fn.collectives import Wire, check_level
from mics_fn.errors import PlanError, message
from mics_fn.groups import Plan, Topology, plan_groups
from mics_fn.lab.demo.before import CURVE, RESULTS, check_memory, check_text, folder_for
from mics_fn.lab.demo.checking import compare, render_check
from mics_fn.lab.demo.curve import save_curve
from mics_fn.lab.demo.run import AloneResult, DemoConfig, RankResult, train_alone, train_rank
from mics_fn.lab.flags import add_count
from mics_fn.lab.models.gpt import GPTConfig
from mics_fn.lab.models.text import Text, load_text
from mics_fn.lab.ranks.launch import choose_device, launch
from mics_fn.lab.report import bytes_or_dash, human_bytes, table
from mics_fn.shards import Precision

LEGEND = "M: parameter bytes, p: partition size,\n  r: replicas, s: micro-steps"
COLUMNS = 60  # no line is longer, paths aside
MOST_STEPS = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's flags."""
    add = parser.add_argument
    add_count(parser, "ranks", 4, "processes, one per rank")
    text = "ranks that count as one node (default 2 if that divides)"
    add_count(parser, "node-size", None, text)
    text = "ranks that share one replica (default node size)"
    add_count(parser, "partition-size", None, text)
    add_count(parser, "steps", 60, "optimizer steps, at least 2", largest=MOST_STEPS)
    add_count(parser, "accumulate", 2, "micro-steps in a step")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    text = "folder for the results (default mics_fn_demo, or with a number if that has some)"
    add("--out", type=_folder, help=text)
    add("--overwrite", action="store_true", help="replace the results of an earlier run")
    add_count(parser, "sequences", 6, "samples per rank and micro-step")
    add_count(parser, "context", 128, "length of a sample in bytes")
    add_count(parser, "dim", 128, "width of the GPT, a multiple of 4")
    text = "what travels and how it is kept, such as hop2=int8[256] (default: float32)"
    add("--precision", default="", help=text, metavar="TEXT")
    text = f"learning rate of AdamW (default {DemoConfig.lr:g})"
    add("--lr", type=_rate, default=DemoConfig.lr, help=text)
    add_count(parser, "seed", 0, "of parameters and batches", smallest=0)
    add("--no-check", action="store_true", help="without the run in a single process")


def _folder(given: str) -> Path:
    """The folder of a flag; an empty one, as of a variable that is not set, would be this one."""
    if not given.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return Path(given)


def _rate(given: str) -> float:
    """A learning rate."""
    try:
        rate = float(given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{given!r} is not a number") from error
    if not 0 < rate < 1:
        raise argparse.ArgumentTypeError(f"{given} is not between 0 and 1")
    return rate


def main(args: argparse.Namespace) -> int:
    """Run the demo; returns the program's exit code: 0, or 1 if the check fails.

    Raises:
        PlanError: sizes do not fit, or results cannot be written; before any process starts.
        MicsError: a rank failed.
    """
    config, text = make_config(args), load_text()
    check_text(config, [len(text.train), len(text.held_out)])
    check_memory(config, _given(args))
    out = folder_for(args.out, args.overwrite)
    _introduce(config, text)
    results = launch(train_rank, config.ranks, config)
    alone = None if args.no_check else train_alone(config, _progress)
    summary = summarize(config, results, alone)
    print("\n" + render(summary))
    _write(out, config, summary, results[0], alone)
    return 1 if summary.check.get("ok") is False else 0


def _given(args: argparse.Namespace) -> list[str]:
    """The sizes that are not at their defaults, as flags."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    sizes = ("ranks", "accumulate", "sequences", "context", "dim")
    found = {name: getattr(args, name) for name in sizes}
    return [f"--{name} {x}" for name, x in found.items() if x != parser.get_default(name)]


def _introduce(config: DemoConfig, text: Text) -> None:
    """Print what is about to happen."""
    plan = plan_groups(Topology.of(config.ranks, config.node_size), config.partition_size)
    blocks = config.model.num_blocks
    print(f"mics_fn demo: a {blocks}-block GPT learns bytes of Python's library")
    train, held_out = human_bytes(len(text.train)), human_bytes(len(text.held_out))
    print(f"text: {train} to learn from, {held_out} held out")
    count = "1 process" if config.ranks == 1 else f"{config.ranks} processes"
    for line in str(plan).splitlines():
        indent = len(line) - len(line.lstrip()) + 2
        print(textwrap.fill(line, COLUMNS, subsequent_indent=" " * indent))
    if config.precision:
        print(textwrap.fill(f"precision: {config.precision}", COLUMNS, subsequent_indent="  "))
    print(f"starting {count} on {config.device} ...")
    if importlib.util.find_spec("tqdm") is None:
        print("a progress bar needs tqdm: pip install 'mics-fn[demo]'")
    sys.stdout.flush()


def make_config(args: argparse.Namespace) -> DemoConfig:
    """The flags as a `DemoConfig`, with defaults that depend on each other filled in.

    Raises:
        PlanError: the flags do not fit together, or do not fit this machine.
    """
    node_size = args.node_size or (2 if args.ranks % 2 == 0 else args.ranks)
    partition_size = args.partition_size or node_size
    plan = plan_groups(Topology.of(args.ranks, node_size), partition_size)
    precision = _precision(args.precision, plan)
    if args.steps < 2:
        raise PlanError(f"--steps {args.steps}: a curve needs at least 2")
    if args.dim % GPTConfig.num_heads:
        raise PlanError(f"--dim {args.dim} is not a multiple of {GPTConfig.num_heads} heads")
    device = choose_device(args.device, args.ranks)
    if device == "cuda" and torch.cuda.device_count() < args.ranks:
        text = f"--device cuda with {args.ranks} ranks needs as many GPUs"
        found = [f"found: {torch.cuda.device_count()}"]
        raise PlanError(message(text, found, "use --device cpu, or fewer ranks"))
    return DemoConfig(
        ranks=args.ranks,
        node_size=node_size,
        partition_size=partition_size,
        steps=args.steps,
        accumulate=args.accumulate,
        sequences=args.sequences,
        device=device,
        precision=precision,
        lr=args.lr,
        seed=args.seed,
        model=GPTConfig(context=args.context, dim=args.dim),
    )


def _precision(given: str, plan: Plan) -> str:
    """The canonical text of a precision, after a check that its levels exist."""
    precision = Precision.parse(given)
    for part in (precision, *(override for _, override in precision.overrides)):
        for sent in (part.gather, part.hop1):
            if isinstance(sent, Wire):
                check_level(sent, plan.topology.names)
    return str(precision)


def _progress(steps: Iterable[int]) -> Iterable[int]:
    if importlib.util.find_spec("tqdm") is None:
        print("checking against one process ...", file=sys.stderr)
        return steps
    from tqdm import tqdm

    return tqdm(steps, desc="check, one process", unit="step", leave=True)


@dataclass(frozen=True)
class Summary:
    """The figures that the demo prints and writes to results.json."""

    train_loss: tuple[float, float]  # first and last step
    held_out_loss: tuple[float, float]  # before and after
    num_params: int
    full_bytes: int  # of all parameters, padding included
    held_bytes: list[int]  # parameters and optimizer state, by rank
    full_held_bytes: int | None  # the same unsharded
    traffic: dict[str, dict[str, Any]]  # by communicator: the count of each rank, and the formula
    step_seconds: float  # median
    tokens_per_second: float
    device: str
    check: dict[str, Any]


def summarize(config: DemoConfig, results: list[RankResult], alone: AloneResult | None) -> Summary:
    """The figures of the two runs."""
    first = results[0]
    formulas = first.formulas
    counted = {what for result in results for what in result.sent}
    traffic = {
        what: {
            "counted": [result.sent.get(what, 0) for result in results],
            "formula": formulas[what][0] if what in formulas else None,
            "why": formulas[what][1] if what in formulas else "not part of a step",
        }
        for what in [*formulas, *sorted(counted - set(formulas))]
    }
    # The first steps are slower, because allocators and connections warm up.
    seconds = statistics.median(first.seconds[min(2, len(first.seconds) - 1) :])
    return Summary(
        train_loss=(first.losses[0], first.losses[-1]),
        held_out_loss=(first.held_out[0][1], first.held_out[-1][1]),
        num_params=sum(p.numel() for p in first.params.values()),
        full_bytes=first.full_bytes,
        held_bytes=[result.held_bytes for result in results],
        full_held_bytes=alone.held_bytes if alone else None,
        traffic=traffic,
        step_seconds=seconds,
        tokens_per_second=config.tokens_per_step / seconds,
        device=first.device,
        check=_checked(config, first, alone) if alone else {},
    )


def _checked(config: DemoConfig, run: RankResult, alone: AloneResult) -> dict[str, Any]:
    """The comparison of both runs, with the bounds that such runs have."""
    return compare(run, alone, bounded=config.bounded, coded_bound=config.coded_bound)


def render(summary: Summary) -> str:
    """The figures as tables."""
    (train0, train1), (held0, held1) = summary.train_loss, summary.held_out_loss
    losses = [
        ("", "start", "end"),
        ("train", f"{train0:.3f}", f"{train1:.3f}"),
        ("held out", f"{held0:.3f}", f"{held1:.3f}"),
    ]
    most, full = max(summary.held_bytes), summary.full_held_bytes
    states = [("the fullest rank holds", human_bytes(most), "")]
    if full:
        states.append(("one process holds", human_bytes(full), f"{full / most:.2f} x as much"))
    sent = [("", "counted", "formula", "")]
    for what, row in summary.traffic.items():
        formula = bytes_or_dash(row["formula"])
        why, _, kinds = row["why"].partition(" as ")
        sent.append((what, human_bytes(max(row["counted"])), formula, why))
        sent += [("", "", "", f"as {kinds}")] if kinds else []
    if not summary.traffic:
        sent = [("nothing, since it is alone", "")]
    speed = [
        ("median step", f"{summary.step_seconds * 1e3:.0f} ms"),
        ("all ranks together", f"{summary.tokens_per_second:,.0f} tokens/s"),
    ]
    tables = [
        table("loss, nats per byte", losses),
        table(f"parameters and AdamW state, {summary.num_params:,} parameters", states),
        table("bytes that a rank sends in a step", sent) + f"\n  {LEGEND}",
        table(f"speed on {summary.device}", speed),
    ]
    if summary.check:
        tables.append(render_check(summary.check))
    return "\n\n".join(tables)


def _write(
    out: Path, config: DemoConfig, summary: Summary, run: RankResult, alone: AloneResult | None
) -> None:
    """Write results.json and the loss curve to `out`, and print where they are."""
    figures = asdict(summary) | {
        "config": asdict(config),
        "losses": run.losses,
        "held_out": run.held_out,
        "losses_alone": alone.losses if alone else [],
        "seconds": run.seconds,
    }
    (out / RESULTS).write_text(json.dumps(figures, indent=1))
    print(f"\nfigures:    {out / RESULTS}")
    if importlib.util.find_spec("matplotlib") is None:
        print("loss curve: needs matplotlib; pip install 'mics-fn[demo]'")
        return
    save_curve(
        out / CURVE,
        title=f"{summary.num_params:,} parameters on {config.ranks} ranks, "
        f"partition groups of {config.partition_size}",
        train=run.losses,
        alone=alone.losses if alone else [],
        held_out=run.held_out,
    )
    print(f"loss curve: {out / CURVE}")
