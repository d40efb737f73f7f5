"""`python -m mics_fn bench`: the flags of every bench, and what runs it and prints its tables."""

import argparse
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from mics_fn.errors import PlanError, message
from mics_fn.groups import Topology, plan_groups, read_launch
from mics_fn.lab.bench.bytes import BytesConfig, measure_bytes, render_bytes
from mics_fn.lab.bench.disk import add_disk_flags, disk_config_of, measure_disk, render_disk
from mics_fn.lab.bench.links import AS_IS, LINKS, read_rates
from mics_fn.lab.bench.opt import OptConfig, measure_opt, render_opt
from mics_fn.lab.bench.saves import add_save_flags, measure_saves, render_saves, saves_config_of
from mics_fn.lab.bench.stage import (
    DEFAULT_PEERS,
    OVERLAP_PEERS,
    PEERS,
    StepConfig,
    check_peers,
)
from mics_fn.lab.bench.step import (
    check_overlap,
    check_rss,
    measure_overlap,
    measure_step,
    render_overlap,
    render_rss,
    render_step,
    run_rss,
)
from mics_fn.lab.bench.turns import BenchTurns, num_ranks, on_ranks
from mics_fn.lab.models.gpt import GPTConfig
from mics_fn.lab.report import add_count
from mics_fn.shards import Precision

# Flags of the benches that run on several ranks.

DEFAULT_RANKS = 4


def add_flags_of_ranks(parser: argparse.ArgumentParser, name: str) -> None:
    """The flags of a bench that runs on several ranks."""
    add_count(parser, "ranks", None, f"ranks to launch (default {DEFAULT_RANKS})")
    add_count(parser, "node-size", None, "ranks per node (default that of the job, or 2)")
    add_count(parser, "accumulate", 1, "micro-steps in a step")
    add_count(parser, "sequences", 1, "samples per rank and micro-step")
    if name == "bytes":
        text = "ranks of a replica (default all sizes that fit)"
        add_count(parser, "partition-size", None, text, nargs="+")
        text = "budget for gathered parameters, in parameters of the largest size (default all)"
        add_count(parser, "live-buckets", None, text)
        text = "precisions, each a text such as hop2=int8[256] (default f32)"
        parser.add_argument("--precision", default=("f32",), help=text, metavar="TEXT", nargs="+")
    else:
        add_count(parser, "partition-size", None, "ranks of a replica (default node size)")
        _add_step_flags(parser)


def _add_step_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names, default = " ".join(PEERS), " ".join(DEFAULT_PEERS)
    lists: dict[str, Any] = {"nargs": "+", "type": _names}
    text = f"what to compare, of {names}, as far as it makes sense (default {default})"
    add("--peers", default=[DEFAULT_PEERS], help=text, metavar="NAME", **lists)
    text = (
        "rates of the links between nodes, such as unshaped:5 1gbit:3, with the steps of a turn; "
    )
    text += f"the first also for warm-up. A module that {LINKS} names sets them (default {AS_IS})"
    add("--rates", default=[(AS_IS,)], help=text, metavar="RATE", **lists)
    text = "precisions, each a text such as compute=bf16,reduce=bf16: every peer that takes"
    text += " them is measured with each, and compared with itself under the first"
    add("--precision", default=[], help=text, metavar="TEXT", nargs="+")
    instead = parser.add_mutually_exclusive_group()
    text = "measure memory instead of time, with each peer in new processes"
    instead.add_argument("--rss", action="store_true", help=text)
    text = "measure instead which share of the optimizer is hidden behind hop 2 (default peers"
    text = f"{text} {' '.join(OVERLAP_PEERS)})"
    instead.add_argument("--overlap", action="store_true", help=text)


def _names(text: str) -> tuple[str, ...]:
    """The names in one argument of a list that spaces or commas separate."""
    return tuple(filter(None, text.split(",")))


class Bench(NamedTuple):
    """One subcommand.

    Args:
        summary: its help text.
        config: makes a config of the flags, for so many ranks.
        run: measures with a config on so many ranks.
        render: makes tables of the figures and the config.
    """

    summary: str
    config: Callable[[argparse.Namespace, int], Any]
    run: Callable[[Any, int], dict]
    render: Callable[[dict, Any], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of each bench."""
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, bench in BENCHES.items():
        one = kinds.add_parser(name, help=bench.summary, description=bench.summary)
        one.add_argument("--json", type=Path, metavar="FILE", help="a file for all figures")
        if name in FLAGS_ALONE:
            FLAGS_ALONE[name](one)
            continue
        one.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
        add_count(one, "dim", 512, "width of the GPT")
        add_count(one, "blocks", 4, "blocks of the GPT")
        add_count(one, "heads", 8, "attention heads of the GPT")
        add_count(one, "vocab", 1024, "tokens that it knows, at least 256", smallest=256)
        add_count(one, "context", 64, "tokens of a sample")
        add_count(one, "warmup", 2, "steps before measuring")
        if name != "bytes":
            add_count(one, "rounds", 5, "turns of each peer")
        if name == "opt":
            add_count(one, "steps", 10, "steps of a turn")
            add_count(one, "small-leaves", 2000, "leaves of the second tree")
        else:
            add_count(one, "steps", 5, "steps of a turn")
            add_flags_of_ranks(one, name)


def main(args: argparse.Namespace) -> int:
    """Run one bench and return the exit code.

    In a job every rank calls it, and rank 0 prints.

    Raises:
        PlanError: sizes do not fit, or the folder of `--json` is missing. No process has started.
        LaunchError: a rank failed.
    """
    bench = BENCHES[args.bench]
    if args.bench == "step" and (args.rss or args.overlap):
        bench = RSS if args.rss else OVERLAP
    if args.json is not None and not args.json.parent.is_dir():
        raise PlanError(f"--json {args.json}: there is no folder {args.json.parent}")
    alone = args.bench in ("opt", *FLAGS_ALONE)
    ranks = 1 if alone else num_ranks(args.ranks, DEFAULT_RANKS)
    config = bench.config(args, ranks)
    figures = bench.run(config, ranks)
    if figures:
        print("\n" + bench.render(figures, config), flush=True)
        if args.json is not None:
            written = {"bench": args.bench, "ranks": ranks, "config": asdict(config), **figures}
            args.json.write_text(json.dumps(written, indent=1))
    return 0


def _on_ranks(measure: Callable[[Any], dict]) -> Callable[[Any, int], dict]:
    return lambda config, ranks: on_ranks(measure, ranks, config)


def _model(args: argparse.Namespace) -> GPTConfig:
    if args.dim % args.heads:
        raise PlanError(f"--dim {args.dim} is not a multiple of --heads {args.heads}")
    return GPTConfig(
        vocab_size=args.vocab,
        context=args.context,
        dim=args.dim,
        num_heads=args.heads,
        num_blocks=args.blocks,
    )


def _node_size(args: argparse.Namespace, ranks: int) -> int:
    """The node size of the flags, else that of the job, else two ranks if that divides."""
    job = read_launch(os.environ)
    found = args.node_size or (job.node_size if job else None)
    return found or (2 if ranks % 2 == 0 else ranks)


def _step_config(args: argparse.Namespace, ranks: int) -> StepConfig:
    node_size = _node_size(args, ranks)
    partition_size = args.partition_size or node_size
    plan_groups(Topology.of(ranks, node_size), partition_size)
    config = StepConfig(
        node_size=node_size,
        partition_size=partition_size,
        turns=BenchTurns(args.rounds, args.steps, args.warmup),
        peers=tuple(itertools.chain(*args.peers)),
        precisions=_precisions(args),
        rates=read_rates(list(itertools.chain(*args.rates)), args.steps),
        accumulate=args.accumulate,
        sequences=args.sequences,
        device=args.device,
        model=_model(args),
    )
    check_peers(config, ranks)
    if args.overlap:
        config = check_overlap(config, ranks)
    if args.rss:
        check_rss(config)
    return config


def _precisions(args: argparse.Namespace) -> tuple[str, ...]:
    """The texts of the precisions, after a check that no precision is given twice."""
    if len(set(map(Precision.parse, args.precision))) < len(args.precision):
        text = f"--precision {' '.join(map(repr, args.precision))}: one of them is given twice"
        raise PlanError(message(text, fix="give each once"))
    return tuple(args.precision)


def _bytes_config(args: argparse.Namespace, ranks: int) -> BytesConfig:
    node_size = _node_size(args, ranks)
    topology = Topology.of(ranks, node_size)
    sizes = tuple(args.partition_size or ())
    for partition_size in sizes:
        plan_groups(topology, partition_size)
    return BytesConfig(
        node_size=node_size,
        partition_sizes=sizes,
        steps=args.steps,
        warmup=args.warmup,
        accumulate=args.accumulate,
        sequences=args.sequences,
        device=args.device,
        model=_model(args),
        precisions=_precisions(args),
        live_buckets=args.live_buckets,
    )


def _opt_config(args: argparse.Namespace, ranks: int) -> OptConfig:
    return OptConfig(
        turns=BenchTurns(args.rounds, args.steps, args.warmup),
        small_leaves=args.small_leaves,
        device=args.device,
        model=_model(args),
    )


BENCHES = {
    "step": Bench(
        "whole steps: Trainer against a plain torch loop, and against FSDP2",
        _step_config,
        _on_ranks(measure_step),
        render_step,
    ),
    "opt": Bench(
        "optimizer steps: opt_step on flat shards against torch's fused AdamW",
        _opt_config,
        _on_ranks(measure_opt),
        render_opt,
    ),
    "bytes": Bench(
        "bytes of a step at each level: counted, by formula, and those that leave a node",
        _bytes_config,
        _on_ranks(measure_bytes),
        render_bytes,
    ),
    "checkpoint": Bench(
        "saving and loading, against plain writing and reading of the same bytes",
        saves_config_of,
        _on_ranks(measure_saves),
        render_saves,
    ),
    "disk": Bench(
        "a step on states in a file, against plain reading and writing of the same bytes",
        disk_config_of,
        lambda config, ranks: measure_disk(config),
        render_disk,
    ),
}

# Benches that train no GPT, each with the flags that it adds.
FLAGS_ALONE: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "checkpoint": add_save_flags,
    "disk": add_disk_flags,
}

OVERLAP = Bench("what hop 2 hides", _step_config, _on_ranks(measure_overlap), render_overlap)
RSS = Bench("the memory of a rank", _step_config, run_rss, render_rss)
