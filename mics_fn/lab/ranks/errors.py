"""What a call on forked ranks may raise, and how failures of many ranks become one text."""

import re
import signal
from typing import NamedTuple

from mics_fn.errors import MicsError, message, name_ranks

MAX_LINES = 60  # of one rank's traceback; a recursion error has thousands


class RankFailure(NamedTuple):
    """What went wrong on one rank, as text."""

    type_name: str
    message: str
    traceback: str


class RankError(MicsError, RuntimeError):
    """Some ranks failed. `errors` maps each of them to its `RankFailure`."""

    def __init__(self, text: str, errors: dict[int, RankFailure]):
        super().__init__(text)
        self.errors = errors


class RankTimeoutError(RankError, TimeoutError):
    """Some ranks did not answer in time; `errors` holds their stacks as tracebacks."""


def describe(what: str, errors: dict[int, RankFailure]) -> str:
    """A headline, then each distinct failure once with the ranks that share it.

    >>> bad = RankFailure("ValueError", "no", "Traceback:\\n  f()\\nValueError: no")
    >>> print(describe("f: 2 of 4 ranks failed", {1: bad, 3: bad}))
    f: 2 of 4 ranks failed
      ranks 1, 3: ValueError: no
        Traceback:
          f()
        ValueError: no
    """
    shared: dict[tuple[str, str, str], list[int]] = {}
    for rank in sorted(errors):
        failure = errors[rank]
        # Thread ids differ between processes, and nobody looks for them.
        text = re.sub(r"0x[0-9a-f]+", "0x..", failure.traceback)
        shared.setdefault((failure.type_name, failure.message, text), []).append(rank)
    blocks = []
    for (type_name, text, trace), ranks in shared.items():
        first, *rest = f"{type_name}: {text}".splitlines()
        quoted = [*rest, *_shorten(trace.rstrip().splitlines())]
        blocks.append("\n".join([f"{name_ranks(ranks)}: {first}", *(f"    {q}" for q in quoted)]))
    return message(what, blocks)


def _shorten(lines: list[str]) -> list[str]:
    """The first and last lines of a long text: both ends of a stack are of use."""
    if len(lines) <= MAX_LINES:
        return lines
    half = MAX_LINES // 2
    return [*lines[:half], f"... {len(lines) - 2 * half} lines left out ...", *lines[-half:]]


def exit_text(code: int | None) -> str:
    """How a process ended, from its exit code as Python's launchers give it.

    >>> exit_text(3), exit_text(-9)
    ('exited with code 3', 'was killed by SIGKILL')
    """
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with code {code}"
