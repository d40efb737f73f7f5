"""`python -m mics_fn demo`: train a GPT sharded over ranks of this machine, and check it."""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mics_fn.collectives import Wire, check_level
from mics_fn.errors import PlanError, human_bytes
from mics_fn.groups import Plan, Topology, plan_groups
from mics_fn.lab.demo.training import (
    CODED_LR,
    CODED_STEPS,
    AloneResult,
    DemoConfig,
    RankResult,
    train_alone,
    train_rank,
)
from mics_fn.lab.models.gpt import GPTConfig
from mics_fn.lab.models.text import Text, load_text
from mics_fn.lab.ranks.launch import launch
from mics_fn.lab.report import add_count, bytes_or_dash, table
from mics_fn.shards import Precision

# The demo's figure: the losses over the steps.


def save_curve(
    path: Path,
    *,
    title: str,
    train: Sequence[float],
    alone: Sequence[float],
    held_out: Sequence[tuple[int, float]],
) -> None:
    """Draw the losses of a run and of its check into a PNG file.

    Args:
        path: the file to write.
        title: the text above the axes.
        train: the loss of each step of the sharded run in nats per byte, the mean over ranks.
        alone: the same for the single process; empty if there was none.
        held_out: pairs (steps done, loss) of the sharded run.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    steps = range(len(train))  # done before that loss was taken
    axes.plot(steps, train, color="#1f77b4", linewidth=4, alpha=0.45, label="train, sharded")
    if alone:
        axes.plot(steps, alone, "--", color="black", linewidth=1.2, label="train, one process")
    at, losses = zip(*held_out, strict=True)
    axes.plot(at, losses, "o-", color="#d62728", markersize=4, label="held out, sharded")
    axes.set_xlabel("optimizer steps done")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(title, fontsize=11)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))


# What is checked before the demo starts a process.

RESULTS, CURVE = "results.json", "loss.png"


def folder_for(out: Path | None, overwrite: bool) -> Path:
    """Make a folder that can be written to and holds no results.

    Args:
        out: the one that was asked for; None for the first of `mics_fn_demo`, `mics_fn_demo-2`
            and so on that is free.
        overwrite: whether results of an earlier run may be replaced.

    Raises:
        PlanError: it cannot be written to, or has results of an earlier run.
    """
    folder, number = out or Path("mics_fn_demo"), 1
    while out is None and not overwrite and _results(folder):
        number += 1
        folder = Path(f"mics_fn_demo-{number}")
    there = _results(folder)
    if there and not overwrite:
        fix = "pass another --out, or --overwrite to replace them"
        what = f"--out {folder}: it has the results of an earlier run"
        raise PlanError(what, [", ".join(there)], fix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as err:
        fix, why = "pass --out with a folder that you may write to", getattr(err, "strerror", err)
        raise PlanError(f"--out {folder}: {why}", fix=fix) from err
    return folder


def _results(folder: Path) -> list[str]:
    return [name for name in (RESULTS, CURVE) if os.path.exists(folder / name)]


def check_text(config: DemoConfig, lengths: Sequence[int]) -> None:
    """Raise PlanError if a sample is longer than one of the parts of the text, in bytes."""
    if config.model.context >= min(lengths):
        what = f"--context {config.model.context}: the shortest part of the text has"
        fix = "pass a smaller --context, such as 128"
        raise PlanError(f"{what} {min(lengths):,} bytes", fix=fix)


# How far the demo's sharded run is from one process on the same batches, which is in float32.

# Both runs do the same arithmetic in different orders, so they differ by rounding (1e-7), which
# training magnifies: two single processes that add up a batch in different orders end 4e-6 apart in
# either figure after 60 steps. At three times this learning rate, where losses begin to jump, they
# end 1e-2 apart. If one rank's samples get a weight that is 10 % wrong, the figures reach 2e-4 and
# 3e-3 within five steps.
LOSS_BOUND = 1e-4  # relative, at every step
PARAM_BOUND = 1e-3  # L2 norm of the difference over the norm of the parameters
LATE = 30  # the last losses whose mean is compared, or half of them if there are fewer than 60


def compare(
    run: RankResult, alone: AloneResult, bounded: bool, coded_bound: float | None
) -> dict[str, Any]:
    """Compare the sharded run with the single process, and with the bounds.

    Args:
        run, alone: the results of both.
        bounded: whether the bounds of float32 hold for such a run.
        coded_bound: the bound on the mean of the last losses, for a run that sends codes. Without
            any bound "ok" is None.
    """
    ours, theirs = torch.tensor(run.losses), torch.tensor(alone.losses)
    loss_gap = (ours - theirs).abs()
    gaps = {k: (run.params[k].double() - p.double()) for k, p in alone.params.items()}
    param_rel = _norm(gaps) / _norm(alone.params)
    loss_rel = (loss_gap / theirs).max().item()
    last = max(1, min(LATE, len(ours) // 2))
    means = [losses[-last:].double().mean().item() for losses in (ours, theirs)]
    last_rel = abs(means[0] / means[1] - 1)
    ok = None if coded_bound is None else last_rel <= coded_bound
    if bounded:
        ok = loss_rel <= LOSS_BOUND and param_rel <= PARAM_BOUND
    return {
        "loss_max_abs": loss_gap.max().item(),
        "loss_max_rel": loss_rel,
        "loss_first_rel": (loss_gap[0] / theirs[0]).item(),
        "last_steps": last,
        "last_losses": means,  # of this run, and of the single process
        "held_out_abs": abs(run.held_out[-1][1] - alone.held_out),
        "param_max_abs": max(gap.abs().max().item() for gap in gaps.values()),
        "param_rel": param_rel,
        "loss_bound": LOSS_BOUND if bounded else None,
        "param_bound": PARAM_BOUND if bounded else None,
        "last_bound": None if bounded else coded_bound,
        "ok": ok,
    }


def _norm(tensors: dict[str, Tensor]) -> float:
    return sum(t.double().square().sum().item() for t in tensors.values()) ** 0.5


def render_check(check: dict[str, Any]) -> str:
    """Render the figures of `compare` as a table."""
    rows = [("", "largest", "relative", "bound")]
    for title, name in (("train losses", "loss"), ("parameters at the end", "param")):
        bound = check[f"{name}_bound"]
        of_bound = "none" if bound is None else f"{bound:.0e}"
        largest = check[f"{name}_max_abs"]
        relative = check["loss_max_rel" if name == "loss" else "param_rel"]
        rows.append((title, f"{largest:.1e}", f"{relative:.1e}", of_bound))
    ours, theirs = check["last_losses"]
    verdicts = {
        True: "within the bounds: ok",
        False: "OUT OF BOUNDS: the runs are not the same",
        None: "no bounds: they are for float32 at the default lr and\n"
        f"  seed, and for codes up to lr {CODED_LR:g} and {CODED_STEPS} steps",
    }
    found = table("difference from one process on the same batches, in float32", rows)
    mean = f"  mean of the last {check['last_steps']} losses: {ours:.4f}, alone {theirs:.4f}"
    mean += f", {ours / theirs - 1:+.2%}"
    if check["last_bound"] is not None:
        mean += f"\n  bound on that for these codes: {check['last_bound']:.1%}"
    return f"{found}\n{mean}\n  {verdicts[check['ok']]}"


LEGEND = "M: parameter bytes, p: partition size,\n  r: replicas, s: micro-steps"
COLUMNS = 60  # no line is longer, paths aside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the demo."""
    add = parser.add_argument
    add_count(parser, "ranks", 4, "processes, one per rank")
    text = "ranks that count as one node (default 2 if that divides)"
    add_count(parser, "node-size", None, text)
    text = "ranks that share one replica (default node size)"
    add_count(parser, "partition-size", None, text)
    add_count(parser, "steps", 60, "optimizer steps, at least 2")
    add_count(parser, "accumulate", 2, "micro-steps in a step")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    text = "folder for the results (default mics_fn_demo, or with a number if that has some)"
    add("--out", type=Path, help=text)
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


def _rate(given: str) -> float:
    """Parse a learning rate."""
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
    out = folder_for(args.out, args.overwrite)
    _introduce(config, text)
    results = launch(train_rank, config.ranks, config)
    alone = None if args.no_check else train_alone(config, _progress)
    summary = summarize(config, results, alone)
    print("\n" + render(summary))
    _write(out, config, summary, results[0], alone)
    return 1 if summary.check.get("ok") is False else 0


def _introduce(config: DemoConfig, text: Text) -> None:
    """Print what the demo will do."""
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
    """Make a `DemoConfig` of the flags, with defaults that depend on each other filled in.

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
    device = args.device
    if device == "auto":
        enough = torch.cuda.is_available() and torch.cuda.device_count() >= args.ranks
        device = "cuda" if enough else "cpu"
    if device == "cuda" and torch.cuda.device_count() < args.ranks:
        text = f"--device cuda with {args.ranks} ranks needs as many GPUs"
        found = [f"found: {torch.cuda.device_count()}"]
        raise PlanError(text, found, "use --device cpu, or fewer ranks")
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
    """Return the canonical text of a precision, after a check that its levels exist."""
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
class DemoSummary:
    """Figures that the demo prints and writes to results.json."""

    train_loss: tuple[float, float]  # first and last step
    held_out_loss: tuple[float, float]  # before and after
    num_params: int
    full_bytes: int  # of all parameters, padding included
    state_bytes: list[int]  # parameters and optimizer state, by rank
    full_state_bytes: int | None  # the same unsharded
    traffic: dict[str, dict[str, Any]]  # by communicator: the count of each rank, and the formula
    step_seconds: float  # median
    tokens_per_second: float
    device: str
    check: dict[str, Any]


def summarize(
    config: DemoConfig, results: list[RankResult], alone: AloneResult | None
) -> DemoSummary:
    """Compute the figures of the two runs."""
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
    return DemoSummary(
        train_loss=(first.losses[0], first.losses[-1]),
        held_out_loss=(first.held_out[0][1], first.held_out[-1][1]),
        num_params=sum(p.numel() for p in first.params.values()),
        full_bytes=first.full_bytes,
        state_bytes=[result.state_bytes for result in results],
        full_state_bytes=alone.state_bytes if alone else None,
        traffic=traffic,
        step_seconds=seconds,
        tokens_per_second=config.tokens_per_step / seconds,
        device=first.device,
        check=compare(first, alone, config.bounded, config.coded_bound) if alone else {},
    )


def render(summary: DemoSummary) -> str:
    """Render the figures as tables."""
    (train0, train1), (test0, test1) = summary.train_loss, summary.held_out_loss
    losses = [
        ("", "start", "end"),
        ("train", f"{train0:.3f}", f"{train1:.3f}"),
        ("held out", f"{test0:.3f}", f"{test1:.3f}"),
    ]
    most, full = max(summary.state_bytes), summary.full_state_bytes
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
    out: Path, config: DemoConfig, summary: DemoSummary, run: RankResult, alone: AloneResult | None
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
