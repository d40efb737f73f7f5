"""Options that change numbers: compared between ranks before the first step, by name.

An optimizer is a few functions, which ranks cannot compare. So a `Transform` has `facts`, from the
paths of the trained leaves to texts by the name of an option. A learning rate that is a function of
the step is compared at steps 0, 1, 10 and 1,000.
"""

import json
import platform
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn._version import __version__
from mics_fn.collectives import collect_all, collect_bytes
from mics_fn.errors import disagreement, message, rank_lines
from mics_fn.groups import Groups

Facts = Mapping[str, str]
_STEPS = (0, 1, 10, 1_000)
_VERSION = "version of "
OPTIONS = "options"  # in `Groups.agreed`: those of an optimizer were compared


def same_options(verb: str, facts: Facts, homes: Iterable[Any]) -> None:
    """Compare options between the ranks of groups.

    Args:
      verb: the call, for errors.
      facts: texts by the name of the option.
      homes: the groups of the leaves.

    Communication: 32 bytes over each partition group and each replication group.

    Raises:
      DesyncError: on all ranks, naming the options that differ, and who has what. Versions that
        differ after the first number are a warning.
    """
    homes = [x for x in dict.fromkeys(homes) if isinstance(x, Groups) and x.world_size > 1]
    mine = {**facts, **versions()} if homes else {}
    for home in homes:
        sent = tree.digest(f"{name}\n{text}" for name, text in sorted(mine.items()))
        digest = torch.tensor(list(sent), dtype=torch.uint8, device=home.device)
        if len({bytes(x.tolist()) for x in collect_all(home, digest).values()}) > 1:
            found = collect_bytes(home, json.dumps(mine).encode())
            _differ(verb, {rank: json.loads(text) for rank, text in found.items()})
        home.agreed.add(OPTIONS)


def _differ(verb: str, said: Mapping[int, Facts]) -> None:
    grave, small = differing(list(said.values()))
    lines = {
        rank: ", ".join(f"{name}: {each.get(name, 'not given')}" for name in grave or small)
        for rank, each in said.items()
    }
    if grave:
        text = f"{verb}: ranks differ in what changes numbers: {', '.join(grave)}"
        raise disagreement(text, lines, "pass the same options, and use one version, on all ranks")
    text = f"{verb}: ranks differ in the {', '.join(small)}"
    warnings.warn(message(text, rank_lines(lines), "use one version on all ranks"), stacklevel=4)


def differing(said: Sequence[Facts]) -> tuple[list[str], list[str]]:
    """The names of options that differ: those that change numbers, and small steps of versions."""
    names = sorted({name for each in said for name in each})
    odd = [name for name in names if len({each.get(name) for each in said}) > 1]
    small = [name for name in odd if name.startswith(_VERSION) and _near(name, said)]
    return [name for name in odd if name not in small], small


def _near(name: str, said: Iterable[Facts]) -> bool:
    """Whether a version is the same up to its first dot on all ranks."""
    return len({each.get(name, "").partition(".")[0] for each in said}) == 1


@cache
def versions() -> dict[str, str]:
    """The versions that ranks compare, by the name of that fact."""
    found = {
        "mics_fn": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    return {f"{_VERSION}{name}": f"{text}" for name, text in found.items()}


def optimizer_facts(verb: str, transform: Any, paths: Sequence[str], several: bool) -> Facts:
    """The facts of a `Transform`, by the name of the option.

    Args:
      verb: the call, for a warning.
      transform: the optimizer.
      paths: of the trained leaves.
      several: whether there are other ranks, so that a transform without facts is worth a warning.
    """
    if transform.facts is not None:
        return transform.facts(paths)
    if several:
        text = f"{verb}: this optimizer has no facts, so ranks cannot compare its options"
        fix = "give its Transform facts= of its options, or make sure that all ranks have the same"
        warnings.warn(message(text, fix=fix), stacklevel=4)
    return {"optimizer": "a function"}


def facts_from(kind: str, options: Mapping[str, Any]) -> Callable[[Sequence[str]], Facts]:
    """Facts of an optimizer that is made with options; those that are masks see all paths."""

    def facts(paths: Sequence[str]) -> Facts:
        found = {"optimizer": kind}
        for name, value in options.items():
            if name == "lr" and callable(value):
                rates = ", ".join(_text(_rate(value, step)) for step in _STEPS)
                found[f"lr at steps {', '.join(map(str, _STEPS))}"] = rates
            elif name == "decay_mask" and value is not None:
                found[name] = f"decays {[path for path in paths if value(path)]}"
            else:
                found[name] = _text(value)
        return found

    return facts


def _rate(lr: Callable[[int], Any], step: int) -> Any:
    try:
        return lr(step)
    except Exception as error:  # a schedule may end before
        return f"{type(error).__name__}"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_torch.unwrapped(value).detach().tolist()}"
    return "a function" if callable(value) else f"{value}"


def chained(parts: Sequence[Any]) -> Callable[[Sequence[str]], Facts] | None:
    """The facts of transforms in sequence; None if one has none."""
    every = [part.facts for part in parts]
    if None in every:
        return None
    return lambda paths: {
        f"chain[{i}].{name}": text
        for i, facts in enumerate(every)
        for name, text in facts(paths).items()
    }
