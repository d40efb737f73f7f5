"""The flags of `bench faults`, and which of its parts they ask for."""

import argparse
from typing import Any

from mics_fn.lab.bench.fault_cost import CostConfig, render_cost, run_cost
from mics_fn.lab.bench.fault_soak import SoakConfig, render_soak, run_soak
from mics_fn.lab.bench.faults import FaultsConfig, measure_faults, render_faults
from mics_fn.lab.bench.kills import KillsConfig, measure_kills, render_kills
from mics_fn.lab.bench.rejoin import RejoinConfig, measure_rejoin, render_rejoin
from mics_fn.lab.flags import add_count

PARTS: dict[type, tuple[Any, Any]] = {
    FaultsConfig: (measure_faults, render_faults),
    SoakConfig: (run_soak, render_soak),
    CostConfig: (run_cost, render_cost),
    KillsConfig: (measure_kills, render_kills),
    RejoinConfig: (measure_rejoin, render_rejoin),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What to inject, or to look at instead."""
    text = f"faults to inject (default {FaultsConfig.trials}, with --rejoin {RejoinConfig.trials})"
    add_count(parser, "trials", None, text)
    add_count(parser, "ranks", None, "sizes of the jobs (default 4 8)", nargs="+")
    add_count(parser, "lanes", FaultsConfig.lanes, "jobs at the same time")
    parser.add_argument("--seed", type=int, default=0, help="chooses the faults (default 0)")
    instead: Any = parser.add_mutually_exclusive_group()
    text = "look instead at what grows over many steps, resets and trainers"
    instead.add_argument("--soak", action="store_true", help=text)
    for name in ("steps", "saves", "resets", "trainers"):
        add_count(parser, name, getattr(SoakConfig, name), f"{name} of --soak")
    text = "compare instead steps with and without the monitor, and count their messages"
    instead.add_argument("--cost", action="store_true", help=text)
    text = "kill instead so many jobs while they save, and look at what the next one finds"
    add_count(instead, "kills", None, text)
    add_count(parser, "rounds", CostConfig.rounds, "pairs of turns of --cost")
    text = "kill ranks instead, and start them again, so that they go on from their replicas"
    instead.add_argument("--rejoin", action="store_true", help=text)


def config_of(args: argparse.Namespace, ranks: int) -> Any:
    """What the flags ask for."""
    if args.soak:
        return SoakConfig(args.steps, args.saves, args.resets, args.trainers)
    if args.cost:
        return CostConfig(args.rounds)
    sizes = tuple(args.ranks or FaultsConfig.ranks)
    if args.kills is not None:
        return KillsConfig(args.kills, args.seed, args.lanes)
    if args.rejoin:
        return RejoinConfig(args.trials or RejoinConfig.trials, sizes, args.seed)
    return FaultsConfig(args.trials or FaultsConfig.trials, sizes, args.seed, args.lanes)


def run(config: Any, ranks: int) -> dict[str, Any]:
    """Do it."""
    return PARTS[type(config)][0](config)


def render(figures: dict[str, Any], config: Any) -> str:
    """Its table."""
    return PARTS[type(config)][1](figures, config)
