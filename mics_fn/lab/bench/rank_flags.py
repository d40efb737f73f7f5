"""Flags of the benches that run on several ranks."""

import argparse
from typing import Any

from mics_fn.lab.bench.formulas import PLACES
from mics_fn.lab.bench.links import AS_IS, LINKS
from mics_fn.lab.bench.peers import PEERS
from mics_fn.lab.bench.stage import DEFAULT_PEERS, OVERLAP_PEERS
from mics_fn.lab.bench.states import StatesConfig
from mics_fn.lab.flags import add_count

DEFAULT_RANKS = 4


def add_flags_of_ranks(parser: argparse.ArgumentParser, name: str) -> None:
    """The flags of a bench that runs on several ranks."""
    add_count(parser, "ranks", None, f"ranks to launch (default {DEFAULT_RANKS})")
    add_count(parser, "node-size", None, "ranks per node (default that of the job, or 2)")
    add_count(parser, "accumulate", 1, "micro-steps in a step")
    if name == "memory":
        _add_memory_flags(parser)
        return
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


def _add_memory_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"of {' '.join(PLACES)} (default all)"
    lists: dict[str, Any] = {"nargs": "+", "type": _names}
    add("--placement", default=[tuple(PLACES)], help=text, metavar="NAME", **lists)
    default = " ".join(StatesConfig.precisions)
    text = f"precisions, each a text such as compute=bf16 (default {default})"
    add("--precision", default=StatesConfig.precisions, help=text, metavar="TEXT", nargs="+")
    text = "measure instead while a model becomes shards over all ranks"
    add("--init", action="store_true", help=text)


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
    add("--skip-alone", action="store_true", help="do not compare in a world of one")
    instead = parser.add_mutually_exclusive_group()
    text = "measure memory instead of time, with each peer in new processes"
    instead.add_argument("--rss", action="store_true", help=text)
    text = "measure instead which share of the optimizer is hidden behind hop 2 (default peers"
    text = f"{text} {' '.join(OVERLAP_PEERS)})"
    instead.add_argument("--overlap", action="store_true", help=text)


def _names(text: str) -> tuple[str, ...]:
    """The names in one argument of a list that spaces or commas separate."""
    return tuple(filter(None, text.split(",")))
