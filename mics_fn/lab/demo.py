"""`python -m mics_fn demo`: train a GPT sharded over ranks of this machine, and check it.

The same training, sharded over ranks and in one process of plain torch; then losses, parameters,
memory and bytes are compared with that process and with formulas.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mics_fn as mf
from mics_fn import _torch
from mics_fn.errors import PlanError, human_bytes
from mics_fn.groups import Topology, plan_groups
from mics_fn.lab.bench.turns import nbytes
from mics_fn.lab.models import Batch, GPTConfig, Text, TrainingTask, join, load_text, loss_of
from mics_fn.lab.ranks import launch
from mics_fn.lab.report import add_count, buckets_of, bytes_or_dash, table, wire_bytes

WEIGHT_DECAY = 0.1
HELD_OUT_SEQUENCES = 16  # samples per rank in a test on held-out text
# Both runs do the same arithmetic in different orders, so they differ by rounding (1e-7), which
# training magnifies: two single processes that add up a batch in different orders end 4e-6 apart in
# either figure after 60 steps. At three times this learning rate, where losses begin to jump, they
# end 1e-2 apart. If one rank's samples get a weight that is 10 % wrong, the figures reach 2e-4 and
# 3e-3 within five steps.
LOSS_BOUND = 1e-4  # relative, at every step
PARAM_BOUND = 1e-3  # L2 norm of the difference over the norm of the parameters
LATE = 30  # the last losses whose mean is compared, or half of them if there are fewer than 60
RESULTS, CURVE = "results.json", "loss.png"
LEGEND = "M: parameter bytes, p: partition size,\n  r: replicas, s: micro-steps"
COLUMNS = 60  # no line is longer, paths aside


@dataclass(frozen=True, kw_only=True)
class DemoConfig(TrainingTask):
    """Options of the demo.

    Args:
        ranks, node_size, partition_size: the layout; nodes are groups of `node_size` ranks.
        steps: optimizer steps.
        device: "cpu" or "cuda".
    """

    ranks: int
    node_size: int
    partition_size: int
    steps: int
    device: str
    lr: float = 1e-3

    def held_out_batch(self, text: Text, ranks: Iterable[int]) -> Batch:
        """Return the batch on which ranks are tested, always the same one."""
        each = [self.batch(text, 0, 0, rank, "held_out", HELD_OUT_SEQUENCES) for rank in ranks]
        return join(each, self.device)


# The flags, and what is checked before the demo starts a process.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the demo."""
    add = parser.add_argument
    add_count(parser, "ranks", 4, "processes, one per rank")
    text = "ranks that count as one node (default 2 if that divides)"
    add_count(parser, "node-size", None, text)
    text = "ranks that share one replica (default node size)"
    add_count(parser, "partition-size", None, text)
    add_count(parser, "steps", 60, "optimizer steps, at least 2", smallest=2)
    add_count(parser, "accumulate", 2, "micro-steps in a step")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
    text = "folder for the results (default mics_fn_demo), with a number if it has some already"
    add("--out", type=Path, default=Path("mics_fn_demo"), help=text)
    add_count(parser, "sequences", 6, "samples per rank and micro-step")
    add_count(parser, "context", 128, "length of a sample in bytes")
    add_count(parser, "dim", 128, "width of the GPT, a multiple of 4")


def make_config(args: argparse.Namespace) -> DemoConfig:
    """Make a `DemoConfig` of the flags, with defaults that depend on each other filled in.

    Raises:
        PlanError: the flags do not fit together, or do not fit this machine.
    """
    node_size = args.node_size or (2 if args.ranks % 2 == 0 else args.ranks)
    partition_size = args.partition_size or node_size
    plan_groups(Topology.of(args.ranks, node_size), partition_size)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() >= args.ranks else "cpu"
    same = {name: getattr(args, name) for name in ("ranks", "steps", "accumulate", "sequences")}
    how = {"node_size": node_size, "partition_size": partition_size, "device": device}
    return DemoConfig(model=GPTConfig(context=args.context, dim=args.dim), **same, **how)


def folder_for(out: Path) -> Path:
    """Make a folder that can be written to and holds no results: `out`, `out-2` and so on.

    Raises:
        PlanError: it cannot be written to.
    """
    folder, number = out, 1
    while (folder / RESULTS).exists():
        number += 1
        folder = out.with_name(f"{out.name}-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as err:
        fix = "pass --out with a folder that you may write to"
        raise PlanError(f"--out {folder}: {err.strerror}", fix=fix) from err
    return folder


def main(args: argparse.Namespace) -> int:
    """Run the demo; returns the program's exit code: 0, or 1 if the check fails.

    Raises:
        PlanError: sizes do not fit, or results cannot be written; before any process starts.
        MicsError: a rank failed.
    """
    config, text, out = make_config(args), load_text(), folder_for(args.out)
    _introduce(config, text)
    results = launch(train_rank, config.ranks, config)
    figures = summarize(config, results, train_alone(config))
    print("\n" + render(figures))
    (out / RESULTS).write_text(json.dumps(figures | {"config": asdict(config)}, indent=1))
    print(f"\nfigures:    {out / RESULTS}")
    if importlib.util.find_spec("matplotlib") is None:
        print("loss curve: needs matplotlib; pip install 'mics-fn[demo]'")
    else:
        save_curve(out / CURVE, config, figures)
        print(f"loss curve: {out / CURVE}")
    return 0 if figures["check"]["ok"] else 1


def _introduce(config: DemoConfig, text: Text) -> None:
    """Print what the demo will do."""
    plan = plan_groups(Topology.of(config.ranks, config.node_size), config.partition_size)
    print(f"mics_fn demo: a {config.model.num_blocks}-block GPT learns bytes of Python's library")
    train, held_out = human_bytes(len(text.train)), human_bytes(len(text.held_out))
    print(f"text: {train} to learn from, {held_out} held out")
    for line in str(plan).splitlines():
        indent = len(line) - len(line.lstrip()) + 2
        print(textwrap.fill(line, COLUMNS, subsequent_indent=" " * indent))
    count = "1 process" if config.ranks == 1 else f"{config.ranks} processes"
    print(f"starting {count} on {config.device} ...")
    if importlib.util.find_spec("tqdm") is None:
        print("a progress bar needs tqdm: pip install 'mics-fn[demo]'")
    sys.stdout.flush()


# The two ways to train.


def train_rank(config: DemoConfig) -> dict[str, Any]:
    """Run the sharded training, as one of the ranks that `python -m mics_fn demo` launches."""
    device = mf.init_distributed(device=config.device)
    groups = mf.make_groups(
        partition_size=config.partition_size, node_size=config.node_size, device=device
    )
    text = load_text()
    trainer = mf.Trainer(
        config.make_model(device),
        mf.optim.adamw(config.lr, weight_decay=WEIGHT_DECAY),
        groups,
        loss=loss_of,
        accumulate=config.accumulate,
    )
    test = config.held_out_batch(text, [groups.rank])
    found: dict[str, Any] = {"seconds": [], "held_out": [], "sent": {}, "device": str(device)}
    batches = _batches(config, text, groups, found, lambda: trainer.eval(test).item())
    found["losses"] = [float(m.loss) for m in trainer.fit(batches, config.steps)]
    found["held_out"].append((config.steps, trainer.eval(test).item()))
    params, buckets = trainer.params(), buckets_of(trainer.state.params)
    found["params"] = {k: v.cpu() for k, v in params.items()} if groups.rank == 0 else {}
    found["state_bytes"] = nbytes((trainer.state.params, trainer.state.opt))
    found["full_bytes"] = sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets)
    route, replicas = groups.hierarchy.route, groups.num_replicas
    found["formulas"] = wire_bytes(buckets, route, replicas, accumulate=config.accumulate)
    groups.close()
    return found


def _batches(
    config: DemoConfig,
    text: Text,
    groups: mf.Groups,
    found: dict[str, Any],
    test: Callable[[], float],
) -> Iterator[Batch]:
    """Yield this rank's batches, and measure the training step between two of them."""
    for step in range(config.steps):
        if step % max(1, config.steps // 12) == 0:
            found["held_out"].append((step, test()))
        batch = config.step_batch(text, step, [groups.rank], groups.device)
        groups.traffic.clear()
        started = time.perf_counter()
        yield batch
        _torch.finish(groups.device)
        found["seconds"].append(time.perf_counter() - started)
        found["sent"] = {what: sent for what, (_, sent) in groups.traffic.snapshot().items()}


def train_alone(config: DemoConfig) -> dict[str, Any]:
    """Train on the same batches and parameters in one process with `torch.optim.AdamW`."""
    # Half of the cores: an op waits for its slowest thread, and others may use some of the cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    text, model = load_text(), config.make_model(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=WEIGHT_DECAY)
    ranks, losses = range(config.ranks), []
    for step in _progress(range(config.steps)):
        total = 0.0
        for m in range(config.accumulate):
            batch = join([config.batch(text, step, m, r) for r in ranks], config.device)
            loss = loss_of(model, batch)
            (loss / config.accumulate).backward()
            total += loss.item() / config.accumulate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    params = {name: p.detach().cpu() for name, p in model.named_parameters()}
    state_bytes = nbytes(([*model.parameters()], [*optimizer.state.values()]))
    return {"losses": losses, "params": params, "state_bytes": state_bytes}


def _progress(steps: Iterable[int]) -> Iterable[int]:
    if importlib.util.find_spec("tqdm") is None:
        print("checking against one process ...", file=sys.stderr)
        return steps
    from tqdm import tqdm

    return tqdm(steps, desc="check, one process", unit="step", leave=True)


# What the demo prints and writes.


def summarize(
    config: DemoConfig, results: list[dict[str, Any]], alone: dict[str, Any]
) -> dict[str, Any]:
    """Compute the figures of the two runs, as plain data."""
    first, traffic = results[0], {}
    formulas = first["formulas"]
    for what in dict.fromkeys([*formulas, *(x for result in results for x in result["sent"])]):
        formula, why = formulas.get(what, (None, "not part of a step"))
        counted = [result["sent"].get(what, 0) for result in results]
        traffic[what] = {"counted": counted, "formula": formula, "why": why}
    # The first steps are slower, because allocators and connections warm up.
    seconds = statistics.median(first["seconds"][min(2, len(first["seconds"]) - 1) :])
    samples = config.ranks * config.accumulate * config.sequences
    same = ("losses", "held_out", "seconds", "full_bytes", "device")
    return {
        **{name: first[name] for name in same},
        "losses_alone": alone["losses"],
        "num_params": sum(p.numel() for p in first["params"].values()),
        "state_bytes": [result["state_bytes"] for result in results],
        "full_state_bytes": alone["state_bytes"],
        "traffic": traffic,
        "step_seconds": seconds,
        "tokens_per_second": samples * config.model.context / seconds,
        "check": compare(first, alone),
    }


def compare(run: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Compare the sharded run with the single process, and with the bounds."""
    ours, theirs = torch.tensor(run["losses"]), torch.tensor(alone["losses"])
    gaps = {k: (run["params"][k].double() - p.double()) for k, p in alone["params"].items()}
    param_rel = _norm(gaps) / _norm(alone["params"])
    loss_rel = ((ours - theirs).abs() / theirs).max().item()
    last = max(1, min(LATE, len(ours) // 2))
    return {
        "loss_max_abs": (ours - theirs).abs().max().item(),
        "loss_max_rel": loss_rel,
        "loss_bound": LOSS_BOUND,
        "param_max_abs": max(gap.abs().max().item() for gap in gaps.values()),
        "param_rel": param_rel,
        "param_bound": PARAM_BOUND,
        "last_steps": last,
        "last_losses": [losses[-last:].double().mean().item() for losses in (ours, theirs)],
        "ok": loss_rel <= LOSS_BOUND and param_rel <= PARAM_BOUND,
    }


def _norm(tensors: dict[str, Tensor]) -> float:
    return sum(t.double().square().sum().item() for t in tensors.values()) ** 0.5


def render(figures: dict[str, Any]) -> str:
    """Render the figures as tables."""
    curves = {"train": figures["losses"], "held out": [loss for _, loss in figures["held_out"]]}
    losses = [(name, f"{of[0]:.3f}", f"{of[-1]:.3f}") for name, of in curves.items()]
    most, full = max(figures["state_bytes"]), figures["full_state_bytes"]
    states = [
        ("the fullest rank holds", human_bytes(most), ""),
        ("one process holds", human_bytes(full), f"{full / most:.2f} x as much"),
    ]
    sent = [("", "counted", "formula", "")]
    for what, row in figures["traffic"].items():
        counted = human_bytes(max(row["counted"]))
        sent.append((what, counted, bytes_or_dash(row["formula"]), row["why"]))
    if not figures["traffic"]:
        sent = [("nothing, since it is alone", "")]
    speed = [
        ("median step", f"{figures['step_seconds'] * 1e3:.0f} ms"),
        ("all ranks together", f"{figures['tokens_per_second']:,.0f} tokens/s"),
    ]
    tables = [
        table("loss, nats per byte", [("", "start", "end"), *losses]),
        table(f"parameters and AdamW state, {figures['num_params']:,} parameters", states),
        table("bytes that a rank sends in a step", sent) + f"\n  {LEGEND}",
        table(f"speed on {figures['device']}", speed),
        render_check(figures["check"]),
    ]
    return "\n\n".join(tables)


def render_check(check: dict[str, Any]) -> str:
    """Render the figures of `compare` as a table."""
    rows = [("", "largest", "relative", "bound")]
    for title, name, rel in (
        ("train losses", "loss", "loss_max_rel"),
        ("parameters at the end", "param", "param_rel"),
    ):
        largest, bound = f"{check[f'{name}_max_abs']:.1e}", f"{check[f'{name}_bound']:.0e}"
        rows.append((title, largest, f"{check[rel]:.1e}", bound))
    ours, theirs = check["last_losses"]
    wrong = "OUT OF BOUNDS: the runs are not the same"
    found = table("difference from one process on the same batches, in float32", rows)
    mean = f"  mean of the last {check['last_steps']} losses: {ours:.4f}, alone {theirs:.4f}"
    mean += f", {ours / theirs - 1:+.2%}"
    return f"{found}\n{mean}\n  {'within the bounds: ok' if check['ok'] else wrong}"


def save_curve(path: Path, config: DemoConfig, figures: dict[str, Any]) -> None:
    """Draw the losses of a run and of its check over the steps into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    train, alone = figures["losses"], figures["losses_alone"]
    steps = range(len(train))  # done before that loss was taken
    axes.plot(steps, train, color="#1f77b4", linewidth=4, alpha=0.45, label="train, sharded")
    axes.plot(steps, alone, "--", color="black", linewidth=1.2, label="train, one process")
    at, losses = zip(*figures["held_out"], strict=True)
    axes.plot(at, losses, "o-", color="#d62728", markersize=4, label="held out, sharded")
    axes.set_xlabel("optimizer steps done")
    axes.set_ylabel("loss (nats per byte)")
    title = f"{figures['num_params']:,} parameters on {config.ranks} ranks, partition groups of"
    axes.set_title(f"{title} {config.partition_size}", fontsize=11)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))
