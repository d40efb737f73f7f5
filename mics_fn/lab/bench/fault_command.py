"""The flags of `bench faults`, and which of its parts they ask for."""

import argparse
from typing import Any

from mics_fn.lab.bench.fault_cost import CostConfig, render_cost, run_cost
from mics_fn.lab.bench.fault_soak import SoakConfig, render_soak, run_soak
from mics_fn.lab.bench.faults import FaultsConfig, measure_faults, render_faults
from mics_fn.lab.flags import add_count

PARTS: dict[type, tuple[Any, Any]] = {
    FaultsConfig: (measure_faults, render_faults),
    SoakConfig: (run_soak, render_soak),
    CostConfig: (run_cost, render_cost),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What to inject, or to look at instead."""
    add_count(parser, "trials", FaultsConfig.trials, "faults to inject")
    add_count(parser, "ranks", None, "sizes of the jobs (default 4 8)", nargs="+")
    add_count(parser, "lanes", FaultsConfig.lanes, "jobs at the same time")
    parser.add_argument("--seed", type=int, default=0, help="chooses the faults (default 0)")
    instead = parser.add_mutually_exclusive_group()
    text = "look instead at what grows over many steps, resets and trainers"
    instead.add_argument("--soak", action="store_true", help=text)
    for name in ("steps", "resets", "trainers"):
        add_count(parser, name, getattr(SoakConfig, name), f"{name} of --soak")
    text = "compare instead steps with and without the monitor, and count their messages"
    instead.add_argument("--cost", action="store_true", help=text)
    add_count(parser, "rounds", CostConfig.rounds, "pairs of turns of --cost")


def config_of(args: argparse.Namespace, ranks: int) -> Any:
    """What the flags ask for."""
    if args.soak:
        return SoakConfig(args.steps, args.resets, args.trainers)
    if args.cost:
        return CostConfig(args.rounds)
    return FaultsConfig(args.trials, tuple(args.ranks or FaultsConfig.ranks), args.seed, args.lanes)


def run(config: Any, ranks: int) -> dict[str, Any]:
    """Do it."""
    return PARTS[type(config)][0](config)


def render(figures: dict[str, Any], config: Any) -> str:
    """Its table."""
    return PARTS[type(config)][1](figures, config)
