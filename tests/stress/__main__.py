"""Stress tests of faults, from a clone with the extra "test": `python -m tests.stress faults`.

They inject faults into many small jobs, kill jobs while they save, kill ranks and start them again,
and look at what grows. Figures: two shared cores, gloo, torch 2.13.0; each is one command.

- 500 faults of every kind on 4 and 8 ranks, at the start, while a model is built and in steps, with
  a heartbeat limit of 2 s: 0 hangs, 0 processes that died unasked, 0 wrong states, 0 false alarms,
  the rank named in all errors; 488 s. Seconds until the last rank had its error, median and most:
  raised 0.44 and 0.56, exited 0.42 and 0.62, killed 0.30 and 0.51, stopped 2.7 and 3.2. `python -m
  tests.stress faults`; `--soak` looks at what grows, `--cost` at the price of the monitor. 3,000
  more, three times 1,000, while about twenty other processes computed: the same counts, and 13
  errors later than their goals, the latest by 2.8 s. In 4 trials a rank was not heard in time; made
  again with twice the limits they found nothing wrong. `--trials 1000 --seed 101` (102, 103). 420
  on a quiet machine, in saves and loads too: the same counts, none made again; raised, exited or
  killed at most 0.55 s, stopped 2.6 and 2.8; two stores that ended at the start took 6 s of 4.5.
  `--trials 420 --seed 41`
- 100 losses of 1 to p ranks, killed at random moments of steps on 4 and 8 ranks and started again,
  a fifth of them killed once more as they came back: all states right to the bit, no step lost.
  From the start of a process, torch being imported, to the end of its next step 0.68 s (median) and
  1.94 s (most), on a machine that was busy. `python -m tests.stress faults --rejoin --seed 5`
- 300 jobs on 1 to 4 ranks, 617 of whose ranks were killed, 282 times in a save, in 68 s: no
  committed step lost, none that did not load, no save refused afterwards; 5,000 more on a busy
  machine, of which 10,506 ranks were killed, 4,864 times in a save, the same.
  `python -m tests.stress faults --kills 300 --seed 21` (`--kills 5000`)
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mics_fn.lab.report import add_count
from tests.stress.cost import CostConfig, render_cost, run_cost
from tests.stress.faults import FaultsConfig, measure_faults, render_faults
from tests.stress.kills import KillsConfig, measure_kills, render_kills
from tests.stress.rejoin import RejoinConfig, measure_rejoin, render_rejoin
from tests.stress.soak import WORK, SoakConfig, render_soak, run_soak

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
    for name in WORK:
        add_count(parser, name, getattr(SoakConfig, name), f"{name} of --soak")
    add_count(parser, "rounds", CostConfig.rounds, "turns of --cost")
    instead: Any = parser.add_mutually_exclusive_group()
    instead.add_argument("--soak", action="store_true", help="look at what grows instead")
    instead.add_argument("--cost", action="store_true", help="look at what the monitor takes")
    instead.add_argument("--rejoin", action="store_true", help="kill ranks, and start them again")
    text = "kill instead so many jobs while they save, and look at what the next one finds"
    add_count(instead, "kills", None, text)


def config_of(args: argparse.Namespace) -> Any:
    """What the flags ask for."""
    if args.soak:
        return SoakConfig(*(getattr(args, name) for name in WORK))
    if args.cost:
        return CostConfig(args.rounds)
    sizes = tuple(args.ranks or FaultsConfig.ranks)
    if args.kills is not None:
        return KillsConfig(args.kills, args.seed, args.lanes)
    if args.rejoin:
        return RejoinConfig(args.trials or RejoinConfig.trials, sizes, args.seed)
    return FaultsConfig(args.trials or FaultsConfig.trials, sizes, args.seed, args.lanes)


STRESS = {"faults": add_flags}  # by name, what adds the flags of a stress test


def main(argv: Sequence[str] | None = None) -> int:
    """Run a stress test and return its exit code: 1 where a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description="stress tests")
    parser.add_argument("stress", choices=STRESS, help="who hangs, dies, is wrong, is named")
    add_flags(parser)
    config = config_of(parser.parse_args(argv))
    run, render = PARTS[type(config)]
    figures = run(config)
    if figures:
        print("\n" + render(figures, config), flush=True)
    return 1 if figures.get("missed") else 0


if __name__ == "__main__":
    sys.exit(main())
