"""Precision as a value: which dtype each thing has."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn.errors import PlanError, message
from mics_fn.shards.contents import map_contents
from mics_fn.tree import Tree

_SHORT = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
}
_NAMES = {
    **{name: dtype for dtype, name in _SHORT.items()},
    **{f"{dtype}".removeprefix("torch."): dtype for dtype in _SHORT},
    **{"fp32": torch.float32, "fp64": torch.float64},
    **{"fp16": torch.float16, "half": torch.float16},
}
_FIELDS = ("param", "compute", "reduce", "output", "accumulate")
_ALLOWED = f"use {', '.join(_SHORT.values())}, or torch's names for them"
_NARROW = "not a dtype to compute, reduce or keep parameters in here"


class Dtypes(NamedTuple):
    """The dtypes of one leaf: its shard, what a model computes with, hop 1 and 2, their sum."""

    param: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype


@dataclass(frozen=True)
class Precision:
    """Which dtype each thing has. Its `str` is canonical, `parse` reads it.

    Args:
      param: of shards and of the optimizer's state; None: the tensor's own.
      compute: of gathered parameters and of a model's inputs; None: `param`.
      reduce: of gradients in hop 1 and hop 2; None: `param`.
      output: of what a model returns; None: left alone.
      accumulate: of the sum of gradients over micro-steps; None: the wider of float32 and `reduce`.
      overrides: pairs of a pattern and a `Precision`. What that one says replaces this one for
        leaves whose whole path matches, of several the last. In a pattern `*` stands for any
        characters and `?` for one; brackets are literal, as paths hold them.

    Raises:
      PlanError: a dtype is not float32, bfloat16, float16 or float64; an override says nothing, or
        what no leaf has.

    Example:
      >>> precision = Precision.parse("param=f32, compute=bf16; *norm*: compute=f32")
      >>> precision.dtypes("['h.0.norm.weight']", torch.float32).compute
      torch.float32
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    overrides: tuple[tuple[str, "Precision"], ...] = ()  # any iterable of pairs is taken

    def __post_init__(self) -> None:
        for name, dtype in self._said():
            if not isinstance(dtype, torch.dtype) or dtype not in _SHORT:
                why = "no torch.dtype"
                if isinstance(dtype, torch.dtype):
                    why = _NARROW if dtype.is_floating_point else "no float dtype"
                raise PlanError(message(f"Precision: {name}={dtype!r} is {why}", fix=_ALLOWED))
        object.__setattr__(self, "overrides", tuple(map(_checked, self.overrides)))

    @classmethod
    def parse(cls, text: str) -> "Precision":
        """Read the text form; `parse(str(precision))` equals `precision`.

        A text is `field=dtype, ...`, then `; pattern: field=dtype, ...` for each override. A bare
        dtype means `compute`.

        Raises:
          PlanError: a clause does not say which dtype a field has, or says it twice.
        """
        base: dict[str, Any] | None = None
        overrides = []
        for clause in filter(None, map(str.strip, text.split(";"))):
            pattern, colon, said = clause.rpartition(":")
            if colon:
                overrides.append((pattern.strip(), cls(**_read(clause, said))))
            elif base is None and not overrides:
                base = _read(clause, said)
            else:
                fix = "write overrides as in '*norm*: compute=f32', after the rest"
                raise PlanError(message(f"Precision.parse: no pattern in {clause!r}", fix=fix))
        return cls(**(base or {}), overrides=tuple(overrides))

    def __str__(self) -> str:
        own = ",".join(f"{name}={_SHORT[dtype]}" for name, dtype in self._said())
        parts = [own] if own else []
        return "; ".join([*parts, *(f"{p}: {precision}" for p, precision in self.overrides)])

    def _said(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in _FIELDS if getattr(self, name) is not None]

    def at(self, path: str) -> "Precision":
        """The precision of one leaf, without overrides; the path as written from the root `''`."""
        said = dict(self._said())
        for pattern, precision in self.overrides:
            if _regex(pattern).fullmatch(path):
                said.update(precision._said())
        return Precision(**said)

    def dtypes(self, path: str, own_dtype: torch.dtype) -> Dtypes:
        """The four dtypes of a leaf; all are its own where that is no float."""
        if not own_dtype.is_floating_point:
            return Dtypes(own_dtype, own_dtype, own_dtype, own_dtype)
        here = self.at(path) if self.overrides else self
        param = here.param or own_dtype
        reduce = here.reduce or param
        wide = torch.float64 if reduce == torch.float64 else torch.float32
        return Dtypes(param, here.compute or param, reduce, here.accumulate or wide)

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """The patterns of overrides that match none of these paths; each is likely a mistake."""
        patterns, known = dict.fromkeys(pattern for pattern, _ in self.overrides), list(paths)
        return [p for p in patterns if not any(_regex(p).fullmatch(path) for path in known)]

    @property
    def casts(self) -> bool:
        """Whether inputs or outputs of a model are cast."""
        return (self.compute or self.param or self.output) is not None

    def cast_inputs(self, values: Tree) -> Tree:
        """The pytree with float tensors in `compute`; the very object where nothing changes."""
        return _cast(values, self.compute or self.param)

    def cast_output(self, values: Tree) -> Tree:
        """The pytree with float tensors in `output`; the very object where nothing changes."""
        return _cast(values, self.output)


def precision_of(value: Precision | str | None) -> Precision:
    """A precision from a precision, its text or None."""
    if value is None or isinstance(value, Precision):
        return value or Precision()
    if isinstance(value, str):
        return Precision.parse(value)
    fix = "pass a Precision, or a text such as 'compute=bf16'"
    raise PlanError(message(f"precision: got {type(value).__name__}", fix=fix))


def _checked(override: Any) -> tuple[str, Precision]:
    """An override, if it has a text form and means something."""
    pair = isinstance(override, tuple | list) and len(override) == 2
    pattern, precision = override if pair else ("", None)
    if not isinstance(pattern, str) or not isinstance(precision, Precision):
        fix = "give pairs of a pattern and a Precision"
        raise PlanError(message(f"Precision: override {override!r} is no pair", fix=fix))
    what = f"Precision: the override {pattern!r}"
    if not pattern or pattern != pattern.strip() or set(pattern) & {";", "\n"}:
        fix = "write ? for ';' and for spaces at its ends"
        raise PlanError(message(f"{what} has a pattern without a text form", fix=fix))
    if pattern in _FIELDS:
        raise PlanError(message(f"{what} looks like a field", fix=f"write {pattern}=bf16"))
    if precision.overrides or precision.output is not None:
        fix = "give it param, compute, reduce or accumulate"
        raise PlanError(message(f"{what} says what no leaf has", [f"{precision}"], fix))
    if not precision._said():
        raise PlanError(message(f"{what} says nothing", fix="as in '*norm*: compute=f32'"))
    return pattern, precision


def _read(clause: str, said: str) -> dict[str, Any]:
    """The fields of a clause."""
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, said.split(","))):
        name, equals, value = map(str.strip, part.rpartition("="))
        name, value = name if equals else "compute", value.removeprefix("torch.")
        wrong, fix = "", _ALLOWED
        if name not in _FIELDS:
            wrong, fix = f"{name!r} is no field", f"fields are {', '.join(_FIELDS)}"
        elif name in found:
            wrong, fix = f"{name} is said twice", "say it once"
        elif re.match("(fp|f|float)8", value):
            wrong = f"{value} is {_NARROW}"
        elif value not in _NAMES:
            other = isinstance(getattr(torch, value, None), torch.dtype)
            wrong = f"{value!r} is no {'float ' * other}dtype"
        if wrong:
            raise PlanError(message(f"Precision.parse: {part!r} in {clause!r}", [wrong], fix))
        found[name] = _NAMES[value]
    return found


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    wild = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(wild, re.DOTALL)


def _cast(values: Tree, dtype: torch.dtype | None) -> Tree:
    if dtype is None:
        return values

    def cast(x: Any, _path: str) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return map_contents(cast, values)
