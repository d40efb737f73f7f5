"""Set the rate of the links between nodes, where a cluster can.

[Note: link rates] The bench cannot make a link slower, but some clusters can. Such a cluster has an
importable module with a function `set_rate(rate)`, which every rank calls while all are idle, and
which returns on rank 0 once the rate is in force. The variable MICS_FN_LINKS names the module.
"""

import importlib
import os
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mics_fn.errors import PlanError

LINKS = "MICS_FN_LINKS"
DEFAULT_LINKS = "rigmark"


def read_rate(text: str, steps: int) -> tuple[str, int]:
    """Parse a rate of links and the steps of a turn, such as 200mbit, or 200mbit:2.

    Args:
        text: as given; "" leaves the links as they are.
        steps: the steps of a turn, if the text does not say.

    Raises:
        PlanError: it is not a rate, or nothing here can set rates. See [Note: link rates].

    >>> read_rate("", 5)
    ('', 5)
    """
    if not text:
        return "", steps
    match = re.fullmatch(r"(unshaped|\d+(?:\.\d+)?[kmg]bit)(?::([1-9]\d*))?", text)
    if match is None:
        fix = "write 200mbit, 1gbit or unshaped, followed by :3 for turns of 3 steps"
        raise PlanError(f"--rates {text}: it is not a rate", fix=fix)
    _setter(match[1])
    return match[1], int(match[2] or steps)


def set_rate(rate: str) -> None:
    """Set the rate on every rank, while all are idle; "" leaves the links as they are."""
    if rate:
        dist.barrier()
        _setter(rate)(rate)
        dist.barrier()


def _setter(rate: str) -> Callable[[str], Any]:
    """Import what sets rates."""
    name = os.environ.get(LINKS, DEFAULT_LINKS)
    try:
        return importlib.import_module(name).set_rate
    except (ImportError, AttributeError) as error:
        fix = f"use a cluster that can, with its module in {LINKS}; or leave --rates out"
        what = f"--rates {rate}: nothing here sets the rate of a link"
        raise PlanError(what, [f"{LINKS}={name}: {error}"], fix) from None
