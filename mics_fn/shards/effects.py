"""Patterns in `precision=`, `where=` and `frozen=` that change nothing, which is likely a mistake.

A pattern that matches no leaf is an error. One that matches leaves on which a field that it sets
has no effect is warned of: a tied leaf goes by the path of the one that it is tied to, integers are
replicated as they are, and frozen leaves have no gradients and no moments.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mics_fn.collectives import Codec
from mics_fn.errors import PlanError, message
from mics_fn.groups import job_size
from mics_fn.patterns import check_matched, matches
from mics_fn.shards.bucketing import LeafSpec
from mics_fn.shards.fields import CODED_NUMEL, FIELDS, text_of
from mics_fn.shards.options import Chosen

_OF_GRADIENTS = ("reduce", "accumulate", "hop1", "hop2")


class LeafFacts(NamedTuple):
    """What decides which fields of a `Precision` have an effect on a leaf."""

    path: str
    numel: int
    is_float: bool
    tied_to: str = ""  # the path of the leaf that owns its data, if another one does
    trained: bool = False
    codes: Codec | None = None  # as which it is kept


def facts_of(
    paths: Sequence[str],
    leaves: Sequence[Tensor],
    owners: Sequence[int],
    specs: Mapping[int, LeafSpec],
) -> list[LeafFacts]:
    """The facts of all leaves of a tree.

    Args:
      paths: their paths.
      leaves: the tensors.
      owners: for each leaf the first one that is the same tensor.
      specs: of the float leaves that own their data, by number.
    """
    found = []
    for i, (path, leaf, owner) in enumerate(zip(paths, leaves, owners, strict=True)):
        spec, tied_to = specs.get(owner), paths[owner] if owner != i else ""
        own = (False, None) if spec is None else (spec.trainable, spec.codes)
        found.append(LeafFacts(path, leaf.numel(), leaf.is_floating_point(), tied_to, *own))
    return found


def check_patterns(
    verb: str,
    given: Mapping[str, Sequence[str]],
    paths: Sequence[str],
    homes: Iterable[Any],
    stacklevel: int = 1,
) -> None:
    """Refuse a pattern that matches none of these paths.

    Args:
      verb: for errors.
      given: patterns, by the option that has them.
      paths: of all leaves.
      homes: the groups of each leaf.
      stacklevel: as for `warnings.warn`, counted from the caller.

    Raises:
      PlanError: a pattern matches no leaf.
    """
    for name, patterns in given.items():
        try:
            check_matched(f"{verb}: {name}", patterns, paths)
        except PlanError as error:
            # A precision is that of a whole model. A part that lies on a part of the ranks, such as
            # a stage of a pipeline, may have no leaf that is meant. Places are those of ranks.
            if name == "where" or not all(home.world_size < job_size() for home in homes):
                raise
            warnings.warn(str(error), stacklevel=stacklevel + 1)


def warn_of_idle(
    verb: str, options: Chosen, leaves: Sequence[LeafFacts], stacklevel: int = 1
) -> None:
    """Warn of each field of an override that has no effect on any leaf that its pattern matches.

    Args:
      verb: for the text.
      options: whose `precision` has overrides.
      leaves: all leaves of the tree.
      stacklevel: as for `warnings.warn`, counted from the caller.
    """
    for pattern, own in options.precision.overrides:
        matched = [leaf for leaf in leaves if matches(pattern, leaf.path)]
        for name in FIELDS:
            value = getattr(own, name)
            why = [] if value is None else [_why_idle(name, value, leaf) for leaf in matched]
            if why and all(why):
                text = f"{verb}: precision: {name}={text_of(value)} has no effect on the leaves"
                text += f" that {pattern!r} matches"
                fix = "leave it out, or write a pattern of the leaves that are meant"
                lines = [f"{matched[0].path} {why[0]}"]
                warnings.warn(message(text, lines, fix), stacklevel=stacklevel + 1)


def _why_idle(name: str, value: Any, leaf: LeafFacts) -> str:
    """Why a field has no effect on a leaf; "" if it has one."""
    if leaf.tied_to:
        return f"is tied to {leaf.tied_to}, whose path counts"
    if not leaf.is_float:
        return "is not a float tensor"
    if name in _OF_GRADIENTS and not leaf.trained:
        return "is frozen, and has no gradient"
    if name == "state" and not leaf.trained:
        return "is frozen, and has no moments"
    if name == "state" and isinstance(value, Codec) and leaf.numel < CODED_NUMEL:
        return f"has fewer than {CODED_NUMEL:,} elements, so its moments stay values"
    if name == "gather" and leaf.codes is not None:
        return f"is kept as {leaf.codes}, which gathers send as they are"
    return ""
