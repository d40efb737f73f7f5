"""Precision as a value: the dtypes of parameters, computation, gradients and outputs."""

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
    """The dtypes of one leaf: of its shard, of computation, of both hops, of the gradients' sum."""

    param: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype


@dataclass(frozen=True)
class Precision:
    """The dtypes of training. `str` gives a canonical text, which `parse` reads.

    `shard` writes them into the layout of the shards, and every verb follows it. Shards in bfloat16
    are rounded to nearest in an update, without stochastic rounding or Kahan summation: torch has
    neither, and torchao's rounding is private and compiles each parameter.

    Args:
      param: dtype of shards and of the optimizer's state; None means that of each tensor.
      compute: dtype of gathered parameters, which are cast before they are sent, and of a model's
        inputs; None means `param`.
      reduce: dtype of gradients in hop 1 and hop 2; None means `param`.
      output: dtype of what a model returns; None leaves it as it is.
      accumulate: dtype of the sum of gradients over micro-steps; None means the wider of float32
        and `reduce`.
      overrides: pairs of a pattern and a `Precision`. The fields that this one sets replace those
        above for leaves whose whole path matches; if several patterns match, the last one counts.
        In a pattern `*` stands for any characters and `?` for one. Brackets are literal, since
        paths contain them. `shard` warns about a pattern that matches no leaf.

    Raises:
      PlanError: a dtype is not float32, bfloat16, float16 or float64; an override sets no field, or
        one that a leaf does not have.

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
        for name, dtype in self._fields():
            if not isinstance(dtype, torch.dtype) or dtype not in _SHORT:
                why = "not a torch.dtype"
                if isinstance(dtype, torch.dtype):
                    why = _NARROW if dtype.is_floating_point else "not a float dtype"
                raise PlanError(message(f"Precision: {name}={dtype!r} is {why}", fix=_ALLOWED))
        object.__setattr__(self, "overrides", tuple(map(_checked, self.overrides)))

    @classmethod
    def parse(cls, text: str) -> "Precision":
        """Read the text form; `parse(str(precision))` equals `precision`.

        A text is `field=dtype, ...`, followed by `; pattern: field=dtype, ...` for each override. A
        dtype without a field means `compute`.

        Raises:
          PlanError: a clause does not give a dtype for a field, or gives two for the same one.
        """
        base: dict[str, Any] | None = None
        overrides = []
        for clause in filter(None, map(str.strip, text.split(";"))):
            pattern, colon, fields = clause.rpartition(":")
            if colon:
                overrides.append((pattern.strip(), cls(**_read(clause, fields))))
            elif base is None and not overrides:
                base = _read(clause, fields)
            else:
                fix = "write overrides as in '*norm*: compute=f32', after the rest"
                raise PlanError(message(f"Precision.parse: no pattern in {clause!r}", fix=fix))
        return cls(**(base or {}), overrides=tuple(overrides))

    def __str__(self) -> str:
        own = ",".join(f"{name}={_SHORT[dtype]}" for name, dtype in self._fields())
        parts = [own] if own else []
        return "; ".join([*parts, *(f"{p}: {precision}" for p, precision in self.overrides)])

    def _fields(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in _FIELDS if getattr(self, name) is not None]

    def at(self, path: str) -> "Precision":
        """The precision of one leaf, without overrides; its path begins with `''`."""
        found = dict(self._fields())
        for pattern, precision in self.overrides:
            if _regex(pattern).fullmatch(path):
                found.update(precision._fields())
        return Precision(**found)

    def dtypes(self, path: str, own_dtype: torch.dtype) -> Dtypes:
        """The four dtypes of a leaf; if it is not a float tensor they are all its own."""
        if not own_dtype.is_floating_point:
            return Dtypes(own_dtype, own_dtype, own_dtype, own_dtype)
        here = self.at(path) if self.overrides else self
        param = here.param or own_dtype
        reduce = here.reduce or param
        wide = torch.float64 if reduce == torch.float64 else torch.float32
        return Dtypes(param, here.compute or param, reduce, here.accumulate or wide)

    def unmatched(self, paths: Iterable[str]) -> list[str]:
        """The patterns of overrides that match none of these paths, which is likely a mistake."""
        patterns, known = dict.fromkeys(pattern for pattern, _ in self.overrides), list(paths)
        return [p for p in patterns if not any(_regex(p).fullmatch(path) for path in known)]

    @property
    def casts(self) -> bool:
        """Whether inputs or outputs of a model are cast."""
        return (self.compute or self.param or self.output) is not None

    def cast_inputs(self, values: Tree) -> Tree:
        """The pytree with float tensors in `compute`; the same object if nothing changes."""
        return _cast(values, self.compute or self.param)

    def cast_output(self, values: Tree) -> Tree:
        """The pytree with float tensors in `output`; the same object if nothing changes."""
        return _cast(values, self.output)


def precision_of(value: Precision | str | None) -> Precision:
    """The `Precision` that an argument means: one, its text, or None for the default."""
    if value is None or isinstance(value, Precision):
        return value or Precision()
    if isinstance(value, str):
        return Precision.parse(value)
    fix = "pass a Precision, or a text such as 'compute=bf16'"
    raise PlanError(message(f"precision: got {type(value).__name__}", fix=fix))


def _checked(override: Any) -> tuple[str, Precision]:
    """An override, after a check that it has a text form and an effect."""
    pair = isinstance(override, tuple | list) and len(override) == 2
    pattern, precision = override if pair else ("", None)
    if not isinstance(pattern, str) or not isinstance(precision, Precision):
        fix = "give pairs of a pattern and a Precision"
        raise PlanError(message(f"Precision: override {override!r} is not a pair", fix=fix))
    what = f"Precision: the override {pattern!r}"
    if not pattern or pattern != pattern.strip() or set(pattern) & {";", "\n"}:
        fix = "write ? for ';' and for spaces at its ends"
        raise PlanError(message(f"{what} has a pattern without a text form", fix=fix))
    if pattern in _FIELDS:
        raise PlanError(message(f"{what} looks like a field", fix=f"write {pattern}=bf16"))
    if precision.overrides or precision.output is not None:
        fix = "give it param, compute, reduce or accumulate"
        raise PlanError(message(f"{what} sets what a leaf does not have", [f"{precision}"], fix))
    if not precision._fields():
        raise PlanError(
            message(f"{what} sets no field", fix="write one, as in '*norm*: compute=f32'")
        )
    return pattern, precision


def _read(clause: str, fields: str) -> dict[str, Any]:
    """The fields that a clause of a text sets, with their dtypes."""
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, fields.split(","))):
        name, equals, value = map(str.strip, part.rpartition("="))
        name, value = name if equals else "compute", value.removeprefix("torch.")
        wrong, fix = "", _ALLOWED
        if name not in _FIELDS:
            wrong, fix = f"{name!r} is not a field", f"fields are {', '.join(_FIELDS)}"
        elif name in found:
            wrong, fix = f"{name} is given twice", "give it once"
        elif re.match("(fp|f|float)8", value):
            wrong = f"{value} is {_NARROW}"
        elif value not in _NAMES:
            known = isinstance(getattr(torch, value, None), torch.dtype)
            wrong = f"{value!r} is not a {'float dtype' if known else 'dtype'}"
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
