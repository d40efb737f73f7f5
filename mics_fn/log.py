"""The logger `mics_fn`: quiet, unless somebody configures it or `MICS_FN_LOG` does.

A program configures it as any logger of Python's `logging`. With `MICS_FN_LOG=debug` (or `info`,
`warning`, `error`) in the environment of a rank, it writes lines to stderr that begin with the
rank: resets and saves from `info` on, each fetch, hop, drop, wait and update of an optimizer at
`debug`.
"""

import logging
import os
import sys
import warnings
from collections.abc import Mapping

import torch.distributed as dist

VARIABLE = "MICS_FN_LOG"
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

LOG = logging.getLogger("mics_fn")
LOG.addHandler(logging.NullHandler())  # else Python would write warnings of it to stderr


class _OnRank(logging.Formatter):
    """Lines that begin with the rank, which is known only once torch.distributed has started."""

    def format(self, record: logging.LogRecord) -> str:
        started = dist.is_available() and dist.is_initialized()
        rank = f"rank {dist.get_rank()}: " if started else ""
        return f"[mics_fn] {rank}{record.levelname.lower()}: {super().format(record)}"


def set_up(environ: Mapping[str, str]) -> None:
    """Write to stderr what a variable of the environment asks for; called once, at the import.

    >>> set_up({})
    """
    wanted = environ.get(VARIABLE, "")
    if not wanted:
        return
    level = _LEVELS.get(wanted.lower())
    if level is None:
        text = f"{VARIABLE}={wanted!r} is none of {', '.join(_LEVELS)}; nothing is logged"
        warnings.warn(text, stacklevel=3)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OnRank("%(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(level)
    LOG.propagate = False  # the root's handlers would write each line once more


set_up(os.environ)
