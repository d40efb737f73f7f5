"""Decisions that all ranks take together: if one of them fails, all raise the same error."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mics_fn import errors
from mics_fn.collectives import collect_bytes
from mics_fn.errors import CheckpointError, MicsError, name_ranks
from mics_fn.groups import Groups

# Bytes that a message is a multiple of: calls of one size repeat, and are foreseen by all ranks.
_ROUND = 512


class Words:
    """What a rank says at the end of a block, and what all of them said."""

    def __init__(self) -> None:
        self.mine: Any = None
        self.all: dict[int, Any] = {}


@contextmanager
def together(home: Groups) -> Iterator[Words]:
    """A block of work that sends nothing; if it raises on some ranks, all raise that error.

    Args:
      home: groups whose ranks do it.

    Yields:
      `Words`, to which the block may give something that all ranks get.

    Communication: two small all-gathers over the partition group and over the replication group.

    Raises:
      CheckpointError: the first error of any rank, on all of them, with its type and text. Other
        errors come first; they come as they are on their rank, and as a CheckpointError on others.
    """
    words, error = Words(), None
    try:
        yield words
    except Exception as found:
        error = found
    if home.world_size == 1:
        if error is not None:
            raise error
        words.all = {home.rank: words.mine}
        return
    said = json.dumps({"error": told(error), "words": words.mine}).encode()
    said = said.ljust(-(-len(said) // _ROUND) * _ROUND)
    found = {rank: json.loads(text) for rank, text in collect_bytes(home, said).items()}
    failed = {rank: each["error"] for rank, each in sorted(found.items()) if each["error"]}
    if failed:
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        raise retold(failed) from error
    words.all = {rank: each["words"] for rank, each in found.items()}


def told(error: Exception | None) -> list[str] | None:
    """An error as ranks send it."""
    if error is None:
        return None
    first = str(error) if isinstance(error, MicsError) else f"{type(error).__name__}: {error}"
    place = [getattr(error, "path", ""), getattr(error, "leaf", "")]
    return [type(error).__name__, first, *map(str, place)]


def retold(failed: Mapping[int, list[str]]) -> CheckpointError:
    """The error that all ranks raise: the first one, with the ranks that had it."""
    # Of two kinds all ranks must raise one, or some would try an older step without the others.
    first = failed[min(failed, key=lambda rank: (_kind(failed[rank]) is not CheckpointError, rank))]
    name, text, path, leaf = first
    kind = _kind(first)
    alike = [rank for rank, each in failed.items() if each[0] == name]
    head, *rest = text.split("\n")
    lines = [head, f"  on {name_ranks(alike)}", *rest]
    return kind("\n".join(lines), path, leaf)


def _kind(said: list[str]) -> type[CheckpointError]:
    """The type that an error has on the other ranks."""
    kind = getattr(errors, said[0], None)
    if isinstance(kind, type) and issubclass(kind, CheckpointError):
        return kind
    return CheckpointError
