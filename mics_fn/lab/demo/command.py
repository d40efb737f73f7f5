"""`python -m mics_fn demo`: train a GPT sharded over ranks of this machine, and check it."""

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mics_fn.errors import PlanError, message
from mics_fn.groups import Topology, plan_groups
from mics_fn.lab.demo.curve import save_curve
from mics_fn.lab.demo.run import AloneResult, DemoConfig, RankResult, train_alone, train_rank
from mics_fn.lab.flags import add_count
from mics_fn.lab.models.gpt import GPTConfig
from mics_fn.lab.models.text import load_text
from mics_fn.lab.ranks.launch import choose_device, launch
from mics_fn.lab.report import bytes_or_dash, human_bytes, step_bytes, table

# Both runs do the same arithmetic in different orders, so they differ by rounding (1e-7), which
# training magnifies: two single processes that add up a batch in different orders end 4e-6 apart in
# either figure after 60 steps. At three times this learning rate, where losses begin to jump, they
# end 1e-2 apart. If one rank's samples get a weight that is 10 % wrong, the figures reach 2e-4 and
# 3e-3 within five steps.
LOSS_BOUND = 1e-4  # relative, at every step
PARAM_BOUND = 1e-3  # L2 norm of the difference over the norm of the parameters
LEGEND = "M: parameter bytes, p: partition size, r: replicas, s: micro-steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's flags."""
    add = parser.add_argument
    add_count(parser, "ranks", 4, "processes, one per rank")
    text = "ranks that count as one node (default 2 if that divides)"
    add_count(parser, "node-size", None, text)
    text = "ranks that share one replica (default node size)"
    add_count(parser, "partition-size", None, text)
    add_count(parser, "steps", 60, "optimizer steps, at least 2")
    add_count(parser, "accumulate", 2, "micro-steps in a step")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    add("--out", type=Path, default=Path("mics_fn_demo"), help="folder for the results")
    add_count(parser, "sequences", 6, "samples per rank and micro-step")
    add_count(parser, "context", 128, "length of a sample in bytes")
    add_count(parser, "dim", 128, "width of the GPT, a multiple of 4")
    add("--no-check", action="store_true", help="without the run in a single process")


def main(args: argparse.Namespace) -> int:
    """Run the demo; returns the program's exit code: 0, or 1 if the check fails.

    Raises:
        PlanError: sizes do not fit; raised before any process starts.
        MicsError: a rank failed.
    """
    config = make_config(args)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise PlanError(f"--out {args.out}: {err.strerror}") from err
    _introduce(config)
    results = launch(train_rank, config.ranks, config)
    alone = None if args.no_check else train_alone(config, _progress)
    summary = summarize(config, results, alone)
    print("\n" + render(summary))
    _write(args.out, config, summary, results[0], alone)
    return 0 if alone is None or summary.check["ok"] else 1


def _introduce(config: DemoConfig) -> None:
    """Print what is about to happen."""
    text = load_text()
    plan = plan_groups(Topology.of(config.ranks, config.node_size), config.partition_size)
    blocks = config.model.num_blocks
    print(f"mics_fn demo: a {blocks}-block GPT learns Python's library, byte by byte")
    train, held_out = human_bytes(len(text.train)), human_bytes(len(text.held_out))
    print(f"text: {text.num_files} files, {train} to learn from and {held_out} held out")
    count = "1 process" if config.ranks == 1 else f"{config.ranks} processes"
    print(f"{plan}\nstarting {count} on {config.device} ...")
    if importlib.util.find_spec("tqdm") is None:
        print("progress bar: needs tqdm; install it with: pip install 'mics-fn[demo]'")
    sys.stdout.flush()


def make_config(args: argparse.Namespace) -> DemoConfig:
    """The flags as a `DemoConfig`, with defaults that depend on each other filled in.

    Raises:
        PlanError: the flags do not fit together, or do not fit this machine.
    """
    node_size = args.node_size or (2 if args.ranks % 2 == 0 else args.ranks)
    partition_size = args.partition_size or node_size
    plan_groups(Topology.of(args.ranks, node_size), partition_size)
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
        model=GPTConfig(context=args.context, dim=args.dim),
    )


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
    names, sizes = zip(*first.levels, strict=True) if first.levels else ((), ())
    formulas = step_bytes(names, sizes, first.num_replicas, first.full_bytes, config.accumulate)
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
        check=compare(first, alone) if alone else {},
    )


def compare(run: RankResult, alone: AloneResult) -> dict[str, Any]:
    """How far the sharded run is from the single process, and whether that is within the bounds."""
    ours, theirs = torch.tensor(run.losses), torch.tensor(alone.losses)
    loss_gap = (ours - theirs).abs()
    gaps = {k: (run.params[k].double() - p.double()) for k, p in alone.params.items()}
    param_rel = _norm(gaps) / _norm(alone.params)
    loss_rel = (loss_gap / theirs).max().item()
    return {
        "loss_max_abs": loss_gap.max().item(),
        "loss_max_rel": loss_rel,
        "loss_first_rel": (loss_gap[0] / theirs[0]).item(),
        "held_out_abs": abs(run.held_out[-1][1] - alone.held_out),
        "param_max_abs": max(gap.abs().max().item() for gap in gaps.values()),
        "param_rel": param_rel,
        "loss_bound": LOSS_BOUND,
        "param_bound": PARAM_BOUND,
        "ok": loss_rel <= LOSS_BOUND and param_rel <= PARAM_BOUND,
    }


def _norm(tensors: dict[str, Tensor]) -> float:
    return sum(t.double().square().sum().item() for t in tensors.values()) ** 0.5


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
        sent.append((what, human_bytes(max(row["counted"])), formula, row["why"]))
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
        tables.append(_render_check(summary.check))
    return "\n\n".join(tables)


def _render_check(check: dict[str, Any]) -> str:
    rows = [
        ("", "largest", "relative", "bound"),
        (
            "train losses",
            f"{check['loss_max_abs']:.1e}",
            f"{check['loss_max_rel']:.1e}",
            f"{check['loss_bound']:.0e}",
        ),
        (
            "parameters at the end",
            f"{check['param_max_abs']:.1e}",
            f"{check['param_rel']:.1e}",
            f"{check['param_bound']:.0e}",
        ),
    ]
    verdict = "within the bounds: ok" if check["ok"] else "OUT OF BOUNDS: the runs are not the same"
    return table("difference from one process on the same batches", rows) + f"\n  {verdict}"


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
    (out / "results.json").write_text(json.dumps(figures, indent=1))
    print(f"\nfigures:    {out / 'results.json'}")
    if importlib.util.find_spec("matplotlib") is None:
        print("loss curve: needs matplotlib; install it with: pip install 'mics-fn[demo]'")
        return
    save_curve(
        out / "loss.png",
        title=f"{summary.num_params:,} parameters on {config.ranks} ranks, "
        f"partition groups of {config.partition_size}",
        train=run.losses,
        alone=alone.losses if alone else [],
        held_out=run.held_out,
    )
    print(f"loss curve: {out / 'loss.png'}")
