"""`python -m mics_fn bench`: the flags of every bench, and what runs it and prints its tables."""

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from mics_fn.errors import PlanError
from mics_fn.groups import Topology, plan_groups
from mics_fn.lab.bench import alone, mesh, muon, predict, step, touch
from mics_fn.lab.bench.step import DEFAULT_PEERS, LINKS, OVERLAP_PEERS, PEERS, StepConfig
from mics_fn.lab.bench.turns import BenchTurns, num_ranks, on_ranks
from mics_fn.lab.models import GPTConfig
from mics_fn.lab.report import add_count, new_file
from mics_fn.shards import Precision

DEFAULT_RANKS = 4

# Flags of the benches that train a GPT.


def _add_gpt_flags(parser: argparse.ArgumentParser, steps: int) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add_count(parser, "dim", 512, "width of the GPT")
    add_count(parser, "blocks", 4, "blocks of the GPT")
    add_count(parser, "heads", 8, "attention heads of the GPT")
    add_count(parser, "vocab", 1024, "tokens that it knows, at least 256", smallest=256)
    add_count(parser, "context", 64, "tokens of a sample")
    add_count(parser, "warmup", 2, "steps before measuring")
    add_count(parser, "steps", steps, "steps of a turn")


def _add_rank_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a bench that runs on several ranks."""
    _add_gpt_flags(parser, 5)
    add_count(parser, "ranks", None, f"ranks to launch (default {DEFAULT_RANKS})")
    add_count(parser, "node-size", None, "ranks per node (default that of the job, or 2)")
    add_count(parser, "accumulate", 1, "micro-steps in a step")
    text = "precisions, each a text such as hop2=int8[256]; all that takes one is measured in each"
    parser.add_argument("--precision", default=(), help=text, metavar="TEXT", nargs="+")


def _add_bytes_flags(parser: argparse.ArgumentParser) -> None:
    _add_rank_flags(parser)
    text = "ranks of a replica (default all sizes that fit)"
    add_count(parser, "partition-size", None, text, nargs="+")
    text = "budget for gathered parameters, in parameters of the largest size (default all)"
    add_count(parser, "live-buckets", None, text)


def _add_opt_flags(parser: argparse.ArgumentParser) -> None:
    _add_gpt_flags(parser, 10)
    add_count(parser, "rounds", 5, "turns of each peer")
    add_count(parser, "small-leaves", 2000, "leaves of the second tree")
    parser.add_argument("--muon", action="store_true", help="measure Muon on matrices instead")


def _add_touch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add_count(parser, "layers", 32, f"layers, of {touch.LEAVES} leaves each")
    add_count(parser, "ranks", None, "ranks to launch (default 1)")
    add_count(parser, "partition-size", None, "ranks of a replica (default all)")
    add_count(
        parser, "live-bytes", None, "budget for gathered parameters (default all)", smallest=0
    )
    add_count(parser, "rounds", 5, "turns of each peer")
    add_count(parser, "steps", 10, "steps of a turn")


def _add_predict_flags(parser: argparse.ArgumentParser) -> None:
    _add_rank_flags(parser)
    text = "rates of the links between nodes, such as 1gbit 200mbit (default as they are)"
    parser.add_argument("--rates", default=(), help=text, metavar="RATE", nargs="+")
    parser.set_defaults(dim=256, steps=6)


def _add_save_flags(parser: argparse.ArgumentParser) -> None:
    add_count(parser, "mib", 384, "size of the state, in MiB")
    add_count(parser, "rounds", 5, "turns of each peer")
    _add_folder(parser)


def _add_folder(parser: argparse.ArgumentParser) -> None:
    folder = tempfile.gettempdir()
    parser.add_argument("--folder", default=folder, help=f"where to write (default {folder})")


def _add_step_flags(parser: argparse.ArgumentParser) -> None:
    _add_rank_flags(parser)
    add_count(parser, "rounds", 5, "turns of each peer")
    add_count(parser, "partition-size", None, "ranks of a replica (default node size)")
    names, default = " ".join(PEERS), " ".join(DEFAULT_PEERS)
    text = f"what to compare, of {names}, as far as it makes sense (default {default})"
    how: Any = {"default": (), "choices": PEERS, "metavar": "NAME", "nargs": "+"}
    parser.add_argument("--peers", help=text, **how)
    text = "rate of the links between nodes, such as 1gbit, or 200mbit:1 for turns of one step;"
    text += f" a module that {LINKS} names sets it (default: as it is)"
    parser.add_argument("--rates", default="", help=text, metavar="RATE")
    _add_folder(parser)
    text = f"cut the model over {mesh.PARTS} ranks, and limit the norm of its gradients"
    parser.add_argument("--mesh", action="store_true", help=text)
    text = "measure each peer with its blocks compiled, too"
    parser.add_argument("--compile", action="store_true", help=text)
    instead = parser.add_mutually_exclusive_group()
    text = "measure memory instead of time, with each peer in new processes"
    instead.add_argument("--rss", action="store_true", help=text)
    text = "measure also which share of the optimizer is hidden behind hop 2 (default peers"
    text = f"{text} {' '.join(OVERLAP_PEERS)})"
    instead.add_argument("--overlap", action="store_true", help=text)


# The config, the figures, and what renders both as tables.
Measured = tuple[Any, dict, Callable[[dict, Any], str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of each bench."""
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, (summary, add_flags, _) in BENCHES.items():
        one = kinds.add_parser(name, help=summary, description=summary)
        one.add_argument("--json", type=new_file, metavar="FILE", help="a file for all figures")
        add_flags(one)


def main(args: argparse.Namespace) -> int:
    """Run one bench and return the exit code.

    In a job every rank calls it, and rank 0 prints.

    Raises:
        PlanError: sizes do not fit. No process has started.
        RankError: a rank failed.
    """
    *_, run = BENCHES[args.bench]
    ranks = num_ranks(args.ranks, DEFAULT_RANKS) if "ranks" in args else 1
    config, figures, render = run(args, ranks)
    if figures:
        print("\n" + render(figures, config), flush=True)
        if args.json is not None:
            written = {"bench": args.bench, "ranks": ranks, "config": asdict(config), **figures}
            args.json.write_text(json.dumps(written, indent=1))
    return 0


def _of_gpt(args: argparse.Namespace, rounds: int) -> dict[str, Any]:
    """Return the fields of a config that trains a GPT."""
    model = GPTConfig(args.vocab, args.context, args.dim, args.heads, args.blocks)
    turns = BenchTurns(rounds, args.steps, args.warmup)
    return {"turns": turns, "device": args.device, "model": model}


def _of_ranks(
    args: argparse.Namespace, rounds: int, ranks: int, sizes: Sequence[int | None]
) -> dict[str, Any]:
    """Return the fields of a config for several ranks; nodes default to those of the job, or 2."""
    usual = 2 if ranks % 2 == 0 else ranks
    node_size: Any = args.node_size or int(os.environ.get("LOCAL_WORLD_SIZE", usual))
    partition_sizes = tuple(p or node_size for p in sizes)
    topology = Topology.of(ranks, node_size)
    for p in partition_sizes:
        plan_groups(topology, p)
    fields = {"node_size": node_size, "accumulate": args.accumulate}
    fields["precisions"] = tuple({Precision.parse(text): text for text in args.precision}.values())
    return {**_of_gpt(args, rounds), **fields, "partition_sizes": partition_sizes}


def _step(args: argparse.Namespace, ranks: int) -> Measured:
    rate, args.steps = _read_rate(args.rates, args.steps)
    peers = tuple(dict.fromkeys(args.peers)) or (OVERLAP_PEERS if args.overlap else DEFAULT_PEERS)
    how: dict[str, Any] = {"peers": peers, "rate": rate, "overlap": args.overlap, "rss": args.rss}
    how["compiled"] = args.compile
    how["parts"] = parts = mesh.PARTS if args.mesh else 1
    how |= _of_ranks(args, args.rounds, ranks // parts, [args.partition_size])
    config = StepConfig(folder=args.folder, **how)
    step.check_peers(config, ranks)
    if config.rss:
        return config, step.run_rss(config, ranks), step.render_rss
    return config, on_ranks(step.measure_step, ranks, config), step.render_step


def _read_rate(text: str, steps: int) -> tuple[str, int]:
    """Parse a rate of links and the steps of a turn, such as 200mbit, or 200mbit:2.

    >>> _read_rate("", 5)
    ('', 5)
    """
    if not text:
        return "", steps
    match = re.fullmatch(r"(unshaped|\d+(?:\.\d+)?[kmg]bit)(?::([1-9]\d*))?", text)
    if match is None:
        fix = "write 200mbit, 1gbit or unshaped, followed by :3 for turns of 3 steps"
        raise PlanError(f"--rates {text}: it is not a rate", fix=fix)
    step.link_setter(match[1])
    return match[1], int(match[2] or steps)


def _bytes(args: argparse.Namespace, ranks: int) -> Measured:
    fields = _of_ranks(args, 1, ranks, args.partition_size or ())
    config = StepConfig(live_buckets=args.live_buckets, **fields)
    return config, on_ranks(step.measure_bytes, ranks, config), step.render_bytes


def _opt(args: argparse.Namespace, ranks: int) -> Measured:
    config = alone.OptConfig(args.small_leaves, **_of_gpt(args, args.rounds))
    if args.muon:
        ranks = num_ranks(None, DEFAULT_RANKS)
        return config, on_ranks(muon.measure_muon, ranks, config), muon.render_muon
    return config, on_ranks(alone.measure_opt, ranks, config), alone.render_opt


def _touch(args: argparse.Namespace, ranks: int) -> Measured:
    ranks = num_ranks(args.ranks, 1)
    if args.partition_size:
        plan_groups(ranks, args.partition_size)
    how: Any = {"turns": BenchTurns(args.rounds, args.steps, 3), "device": args.device}
    config = touch.TouchConfig(args.layers, args.live_bytes, args.partition_size, **how)
    return config, on_ranks(touch.measure_touch, ranks, config), touch.render_touch


def _predict(args: argparse.Namespace, ranks: int) -> Measured:
    how = _of_ranks(args, 1, ranks, ())
    rates = tuple(_read_rate(rate, 1)[0] for rate in args.rates)
    taken = ("model", "turns", "node_size", "accumulate")
    config = predict.PredictConfig(rates=rates, **{key: how[key] for key in taken})
    return config, on_ranks(predict.measure_predictions, ranks, config), predict.render_predictions


def _saves(args: argparse.Namespace, ranks: int) -> Measured:
    config = alone.SaveConfig(args.mib, args.rounds, args.folder)
    return config, on_ranks(alone.measure_saves, ranks, config), alone.render_saves


# By name: its help text, what adds its flags, and what measures as they say, on so many ranks.
BENCHES: dict[str, tuple[str, Callable, Callable[[argparse.Namespace, int], Measured]]] = {
    "step": ("whole steps, against a plain torch loop and FSDP2", _add_step_flags, _step),
    "opt": ("steps of the optimizer, against torch's fused AdamW", _add_opt_flags, _opt),
    "touch": ("host time of a layer of tiny leaves, by part", _add_touch_flags, _touch),
    "plan": ("predicted steps beside measured ones", _add_predict_flags, _predict),
    "bytes": ("bytes of a step by level: counted, and by formula", _add_bytes_flags, _bytes),
    "checkpoint": ("saving and loading, against plain files", _add_save_flags, _saves),
}
