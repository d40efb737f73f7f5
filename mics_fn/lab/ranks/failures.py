"""What a call on forked ranks may raise, and how failures of many ranks become one text."""

import re
import signal
from typing import NamedTuple

from mics_fn.errors import MicsError, message, name_ranks

MAX_LINES = 60  # of one rank's traceback; a recursion error has thousands
FAILED = ("PeerFailed", "PeerFileError")  # errors that name another rank
FOLLOWS = (*FAILED, "CollectiveError")  # errors of ranks that wait for another one


class RankFailure(NamedTuple):
    """Failure of one rank, as text."""

    type_name: str
    message: str
    traceback: str


class RankError(MicsError, RuntimeError):
    """Some ranks failed. `errors` maps each of them to its `RankFailure`."""

    def __init__(self, text: str, errors: dict[int, RankFailure] | None = None):
        super().__init__(text)
        self.errors = errors or {}


class RankTimeoutError(RankError, TimeoutError):
    """Some ranks did not answer in time; `errors` holds their stacks as tracebacks."""


def describe(what: str, errors: dict[int, RankFailure]) -> str:
    """Render each distinct failure once with the ranks that share it, causes first.

    Of equal kinds the one that comes first in `errors` is first.

    Of ranks that failed because another one did, the traceback only shows where they waited, so it
    is left out if that of the cause is there.

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
    blocks, order = [], _causes_first(errors)
    cause_is_known = any(failure.type_name not in FOLLOWS for failure in errors.values())
    for (type_name, text, trace), ranks in sorted(
        shared.items(), key=lambda item: min(order.index(rank) for rank in item[1])
    ):
        first, *rest = f"{type_name}: {text}".splitlines()
        follows = cause_is_known and type_name in FOLLOWS
        quoted = [*rest, *([] if follows else _shorten(trace.rstrip().splitlines()))]
        blocks.append("\n".join([f"{name_ranks(ranks)}: {first}", *(f"    {q}" for q in quoted)]))
    return message(what, blocks)


def _causes_first(errors: dict[int, RankFailure]) -> list[int]:
    """Sort ranks by their failures: causes first.

    First those that died or that others name, then those with an error of their own, then those
    that gave no answer, and those that waited for others.
    """
    texts = [failure.message for failure in errors.values() if failure.type_name in FAILED]
    named = {int(found[1]) for text in texts if (found := re.match(r"rank (\d+)\b", text))}

    def place(rank: int) -> int:
        kind = errors[rank].type_name
        if kind in FOLLOWS:
            return 3
        if kind == "RankDied" or rank in named:
            return 0
        return 2 if kind == "RankTimeout" else 1

    return sorted(errors, key=place)


def _shorten(lines: list[str]) -> list[str]:
    """Cut a long text to its first and last lines."""
    if len(lines) <= MAX_LINES:
        return lines
    half = MAX_LINES // 2
    return [*lines[:half], f"... {len(lines) - 2 * half} lines left out ...", *lines[-half:]]


def exit_text(code: int | None) -> str:
    """Describe how a process ended, from its exit code as Python's launchers give it.

    >>> exit_text(3), exit_text(-9)
    ('exited with code 3', 'was killed by SIGKILL')
    """
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with code {code}"
