"""`python -m mics_fn bench`: steps against plain torch and FSDP2, and the traffic of a step."""

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
from mics_fn.lab.bench.formulas import PLACES, check_places
from mics_fn.lab.bench.init import measure_init, render_init
from mics_fn.lab.bench.links import AS_IS, LINKS, read_rates
from mics_fn.lab.bench.opt import OptConfig, measure_opt, render_opt
from mics_fn.lab.bench.peers import PEERS, check_peers
from mics_fn.lab.bench.rss import check_rss, render_rss, run_rss
from mics_fn.lab.bench.stage import DEFAULT_PEERS, StepConfig
from mics_fn.lab.bench.states import StatesConfig, measure_states, render_states
from mics_fn.lab.bench.step import measure_step, render_step
from mics_fn.lab.bench.touch import TouchConfig, measure_touch, render_touch
from mics_fn.lab.bench.turns import Turns, num_ranks, on_ranks
from mics_fn.lab.models.gpt import GPTConfig
from mics_fn.shards import Precision

DEFAULT_RANKS = 4


class Bench(NamedTuple):
    """One subcommand: how its flags become a config, what measures, what prints."""

    summary: str
    config: Callable[[argparse.Namespace, int], Any]
    run: Callable[[Any, int], dict]  # with a config, on so many ranks
    render: Callable[[dict, Any], str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of each bench."""
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, bench in BENCHES.items():
        one = kinds.add_parser(name, help=bench.summary, description=bench.summary)
        add = one.add_argument
        add("--json", type=Path, metavar="FILE", help="write all figures there too")
        add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: auto")
        add("--dim", type=_count, default=512, help="width of the GPT (default 512)")
        add("--blocks", type=_count, default=4, help="its blocks (default 4)")
        add("--heads", type=_count, default=8, help="its attention heads (default 8)")
        add("--vocab", type=_bytes_and_more, default=1024, help="its tokens (default 1024)")
        few = name == "memory"  # tokens, so that activations are small; and steps
        context, warmup, steps = (4, 3, 2) if few else (64, 2, 5)
        text = f"tokens of a sample (default {context})"
        add("--context", type=_count, default=context, help=text)
        text = f"steps before measuring (default {warmup})"
        add("--warmup", type=_count, default=warmup, help=text)
        if name not in ("bytes", "memory"):
            add("--rounds", type=_count, default=5, help="turns of each (default 5)")
        if name == "touch":
            add("--steps", type=_count, default=50, help="steps of a turn (default 50)")
            add("--layers", type=_count, default=64, help="linear layers (default 64)")
            continue
        if name == "opt":
            add("--steps", type=_count, default=10, help="steps of a turn (default 10)")
            add("--small-leaves", type=_count, default=2000, help="of the second tree (2000)")
            continue
        add("--ranks", type=_count, help=f"ranks to launch (default {DEFAULT_RANKS})")
        add("--node-size", type=_count, help="ranks of a node (default the job's, or 2)")
        add("--steps", type=_count, default=steps, help=f"steps of a turn (default {steps})")
        add("--accumulate", type=_count, default=1, help="micro-steps in a step (default 1)")
        if name == "memory":
            _add_memory_flags(one)
            continue
        add("--sequences", type=_count, default=1, help="samples of a rank and micro-step (1)")
        sizes = {"nargs": "+", "default": []} if name == "bytes" else {}
        default = "all that fit" if name == "bytes" else "node size"
        add("--partition-size", type=_count, help=f"(default {default})", **sizes)
        if name == "step":
            _add_step_flags(one)


def _add_memory_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"of {' '.join(PLACES)} (default all)"
    lists: dict[str, Any] = {"nargs": "+", "type": _names}
    add("--placement", default=[tuple(PLACES)], help=text, metavar="NAME", **lists)
    default = " ".join(StatesConfig.policies)
    text = f"precision policies, each a text such as compute=bf16 (default {default})"
    add("--policy", default=StatesConfig.policies, help=text, metavar="TEXT", nargs="+")
    add("--init", action="store_true", help="instead, while a model becomes shards over all ranks")


def _add_step_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names, default = " ".join(PEERS), " ".join(DEFAULT_PEERS)
    lists: dict[str, Any] = {"nargs": "+", "type": _names}
    text = f"what to compare, of {names}; those that make sense in each world (default {default})"
    add("--peers", default=[DEFAULT_PEERS], help=text, metavar="NAME", **lists)
    text = (
        "of the links between nodes, such as unshaped:5 1gbit:3 200mbit:1, with the steps of a turn"
    )
    text += f"; the first for warm-up too. A module that {LINKS} names sets them (default {AS_IS})"
    add("--rates", default=[(AS_IS,)], help=text, metavar="RATE", **lists)
    text = "precision policies, each a text such as compute=bf16,reduce=bf16: every peer that knows"
    text += " any is measured with each, and compared with itself under the first"
    add("--policy", default=[], help=text, metavar="TEXT", nargs="+")
    add("--skip-alone", action="store_true", help="no comparison in a world of one")
    add("--rss", action="store_true", help="memory instead of time, each peer in fresh processes")


def main(args: argparse.Namespace) -> int:
    """Run one bench; returns the exit code. In a job every rank calls it, and rank 0 prints.

    Raises:
        PlanError: sizes that do not fit, or nowhere to write, before any process starts.
        LaunchError: a rank failed.
    """
    bench = BENCHES[args.bench]
    if args.bench == "step" and args.rss:
        bench = RSS
    if args.bench == "memory" and args.init:
        bench = INIT
    if args.json is not None and not args.json.parent.is_dir():
        raise PlanError(f"--json {args.json}: there is no folder {args.json.parent}")
    ranks = 1 if args.bench in ("opt", "touch") else num_ranks(args.ranks, DEFAULT_RANKS)
    config = bench.config(args, ranks)
    figures = bench.run(config, ranks)
    if figures:
        print("\n" + bench.render(figures, config), flush=True)
        if args.json is not None:
            written = {"bench": args.bench, "ranks": ranks, "config": asdict(config), **figures}
            args.json.write_text(json.dumps(written, indent=1))
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _bytes_and_more(text: str) -> int:
    value = int(text)
    if value < 256:
        raise argparse.ArgumentTypeError(f"{text} is less than the 256 values of a byte")
    return value


def _names(text: str) -> tuple[str, ...]:
    """One word of a list whose words are separated by spaces or commas."""
    return tuple(filter(None, text.split(",")))


def _on_ranks(measure: Callable[[Any], dict]) -> Callable[[Any, int], dict]:
    return lambda config, ranks: on_ranks(measure, ranks, config)


def _model(args: argparse.Namespace) -> GPTConfig:
    if args.dim % args.heads:
        raise PlanError(f"--dim {args.dim} is no multiple of --heads {args.heads}")
    return GPTConfig(
        vocab_size=args.vocab,
        context=args.context,
        dim=args.dim,
        num_heads=args.heads,
        num_blocks=args.blocks,
    )


def _node_size(args: argparse.Namespace, ranks: int) -> int:
    """The node size asked for, else the job's own, else two ranks."""
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
        turns=Turns(args.rounds, args.steps, args.warmup),
        peers=tuple(itertools.chain(*args.peers)),
        policies=_policies(args),
        rates=read_rates(list(itertools.chain(*args.rates)), args.steps),
        alone=not (args.skip_alone or args.rss),
        accumulate=args.accumulate,
        sequences=args.sequences,
        device=args.device,
        model=_model(args),
    )
    check_peers(config, ranks)
    if args.rss:
        check_rss(config)
    return config


def _policies(args: argparse.Namespace) -> tuple[str, ...]:
    """The texts of policies, each of which is one."""
    if len(set(map(Precision.parse, args.policy))) < len(args.policy):
        text = f"--policy {' '.join(map(repr, args.policy))}: one is there twice"
        raise PlanError(message(text, fix="give each once"))
    return tuple(args.policy)


def _states_config(args: argparse.Namespace, ranks: int) -> StatesConfig:
    node_size = _node_size(args, ranks)
    Topology.of(ranks, node_size)
    placements = tuple(itertools.chain(*args.placement))
    check_places(placements)
    return StatesConfig(
        node_size=node_size,
        placements=placements,
        policies=_policies(args),
        steps=args.steps,
        warmup=args.warmup,
        accumulate=args.accumulate,
        device=args.device,
        model=_model(args),
    )


def _bytes_config(args: argparse.Namespace, ranks: int) -> BytesConfig:
    node_size = _node_size(args, ranks)
    topology = Topology.of(ranks, node_size)
    for partition_size in args.partition_size:
        plan_groups(topology, partition_size)
    return BytesConfig(
        node_size=node_size,
        partition_sizes=tuple(args.partition_size),
        steps=args.steps,
        warmup=args.warmup,
        accumulate=args.accumulate,
        sequences=args.sequences,
        device=args.device,
        model=_model(args),
    )


def _touch_config(args: argparse.Namespace, ranks: int) -> TouchConfig:
    turns = Turns(args.rounds, args.steps, args.warmup)
    return TouchConfig(turns=turns, layers=args.layers, device=args.device)


def _opt_config(args: argparse.Namespace, ranks: int) -> OptConfig:
    return OptConfig(
        turns=Turns(args.rounds, args.steps, args.warmup),
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
    "touch": Bench(
        "host time that a deferred weight costs an op",
        _touch_config,
        _on_ranks(measure_touch),
        render_touch,
    ),
    "bytes": Bench(
        "bytes of a step at each level: ledger, formula, and what leaves a node",
        _bytes_config,
        _on_ranks(measure_bytes),
        render_bytes,
    ),
    "memory": Bench(
        "what a rank holds, placement by placement, against the formulas",
        _states_config,
        _on_ranks(measure_states),
        render_states,
    ),
}

RSS = Bench("the memory of a rank", _step_config, run_rss, render_rss)
INIT = Bench("the making of a model", _states_config, _on_ranks(measure_init), render_init)
