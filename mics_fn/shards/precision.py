"""Precision as a value: the dtypes of parameters, computation, gradients and outputs.

A pattern that matches no leaf is an error. A tied leaf goes by the path of the one that it is tied
to, integers are replicated as they are, and frozen leaves have no gradients and no moments: a field
that says something else about these has no effect.
"""

from dataclasses import dataclass
from typing import Any

import torch

from mics_fn import checks
from mics_fn.collectives import SHORT_NAMES, Codec, Wire
from mics_fn.errors import PlanError
from mics_fn.offload import AT_REST
from mics_fn.shards.bucket import Formats

# The fields of a `Precision`, and what each of them may be.

NAMES = {
    **{name: dtype for dtype, name in SHORT_NAMES.items()},
    **{f"{dtype}".removeprefix("torch."): dtype for dtype in SHORT_NAMES},
    **{"fp32": torch.float32, "fp64": torch.float64},
    **{"fp16": torch.float16, "half": torch.float16},
}
FIELDS = ("param", "compute", "reduce", "output", "accumulate", "gather", "hop1", "hop2", "state")
_CODED = ("param", "gather", "hop1", "hop2", "state")  # a dtype or a codec
_LEVELED = ("gather", "hop1")  # a codec may name a level
# Lines of a column, and parts of files, have whole blocks of moments.
_STATE_BLOCKS = range(64, 4097)
CODED_NUMEL = 4096  # elements of a tensor from which on its moments are coded


def text_of(value: Any) -> str:
    """The text of a field."""
    return SHORT_NAMES[value] if isinstance(value, torch.dtype) else f"{value}"


def read_field(name: str, given: Any) -> torch.dtype | Codec | Wire:
    """A field of a precision, from its value or its text.

    Raises:
      PlanError: it is not what this field may be, nor a text of that.
    """
    value: Any = given
    level = ""
    if isinstance(given, str):
        text, at, level = given.removeprefix("torch.").partition("@")
        value = NAMES.get(text, given)
        if value is given and name in _CODED:
            value = Codec.parse(text)
        if at and not (name in _LEVELED and isinstance(value, Codec) and level.isidentifier()):
            fix = "codecs of gather and hop1 may name a level behind @, as in int8[256]@node"
            raise PlanError(f"Precision: {name}={given}: it has no such level", fix=fix)
    if name == "state" and value != torch.float32:
        if isinstance(value, Codec) and value.name in AT_REST and value.block in _STATE_BLOCKS:
            return value
        fix = "use int8 or fp8, as in state=int8[256], with a block of 64 to 4096 elements; or f32"
        raise PlanError(f"Precision: state={text_of(value)} is not a way to keep moments", fix=fix)
    if isinstance(value, Codec) and name in _CODED:
        return Wire(value, level) if name in _LEVELED else value
    if not (isinstance(value, Wire) and name in _LEVELED):
        check_dtype("Precision", name, value)
    return value


def check_dtype(verb: str, name: str, dtype: Any) -> None:
    """Raise PlanError unless a value is one of the dtypes that parameters can have here."""
    if not isinstance(dtype, torch.dtype) or dtype not in SHORT_NAMES:
        fix = f"pass one of {', '.join(map(str, SHORT_NAMES))}"
        raise PlanError(f"{verb}: {name}={dtype!r} is not a float dtype of torch", fix=fix)


@dataclass(frozen=True)
class Precision:
    """The dtypes of training, and what travels. `str` gives a canonical text, which `parse` reads.

    `shard` writes them into the layout of the shards, and every verb follows it. Shards in bfloat16
    are rounded to nearest in an update, without stochastic rounding or Kahan summation: torch has
    neither, and torchao's rounding is private and compiles each parameter.

    Args:
      param: dtype of shards and of the optimizer's state; None means that of each tensor. For
        frozen leaves it may be a `Codec`, such as "int4[64]": they are kept as codes, sent as these
        codes, and decoded in `compute` (None means the dtype of each tensor) where they are
        gathered. Their shards count as float32, which holds exactly what codes stand for.
      compute: dtype of gathered parameters, which are cast before they are sent, and of a model's
        inputs; None means `param`.
      reduce: dtype of gradients in hop 1 and hop 2; None means `param`.
      output: dtype of what a model returns; None leaves it as it is.
      accumulate: dtype of the sum of gradients over micro-steps; None means the wider of float32
        and `reduce`.
      overrides: pairs of a pattern and a `Precision`. The fields that this one sets replace those
        above for leaves whose whole path matches; if several patterns match, the last one counts.
        Patterns are those of `mics_fn.checks`: `*` stands for any characters and `?` for one.
        `shard` refuses a pattern that matches no leaf.
      gather: what a gather sends: a `Codec` such as "int8[256]"; None, or that dtype, means
        `compute`. With "@node" behind it, it is sent on the level "node" and on those outside of
        it, and `compute` on the others. Every rank uses what was decoded, its own chunk too.
      hop1: what hop 1 sends, in the same way; None means `reduce`, and another dtype is that of
        hop 1 alone. A rank's own part of a mean is not rounded.
      hop2: what hop 2 sends, a dtype or a `Codec`; None means `reduce`. It has no levels.
      state: how moments of an optimizer are kept: a `Codec` "int8" or "fp8", whose blocks have 64
        to 4096 elements, or float32; None means values in `param`. It needs
        shards in float32, and leaves with at least 4,096 elements in full; those of others stay
        values. With "int8" an element whose gradients are below about 1/127 of the largest of its
        block takes smaller steps than without codes; "fp8" has room for 1/229,376. See
        [Note: coded moments] in `optim.flat`, and [Note: roots] in `offload.placed`.

    Leaves are padded to the longest of the blocks of their codecs.

    Codes are sent only between ranks. Derivatives of derivatives, forward-mode tangents, values
    under `vmap`, and what `unshard`, `get`, `checkpoint` and `sync_replicas(exact=True)` send are
    never coded; nor are the parameters that `replicas.local_sgd` averages.

    Raises:
      PlanError: a dtype is not float32, bfloat16, float16 or float64; an override sets no field, or
        one that a leaf does not have; a codec is unknown, or hop 2 names a level; moments cannot be
        kept as `state` says.

    Example:
      >>> precision = Precision.parse("param=f32, compute=bf16; *norm*: compute=f32")
      >>> precision.formats("h.0.norm.weight", torch.float32).compute
      torch.float32
    """

    param: torch.dtype | Codec | str | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    overrides: tuple[tuple[str, "Precision"], ...] = ()  # any iterable of pairs is taken
    gather: torch.dtype | Codec | Wire | str | None = None
    hop1: torch.dtype | Codec | Wire | str | None = None
    hop2: torch.dtype | Codec | str | None = None
    state: torch.dtype | Codec | str | None = None

    def __post_init__(self) -> None:
        for name, value in self._fields():
            object.__setattr__(self, name, read_field(name, value))
        object.__setattr__(self, "overrides", tuple(self.overrides))
        for pattern, own in self.overrides:
            if not own._fields() or own.overrides or own.output:
                fix = f"set some of {', '.join(name for name in FIELDS if name != 'output')}"
                raise PlanError(f"Precision: the override {pattern!r} sets no field", fix=fix)

    @classmethod
    def parse(cls, value: "Precision | str | None") -> "Precision":
        """Read the text form; `parse(str(precision))` equals `precision`. None is the default.

        A text is `field=dtype, ...`, followed by `; pattern: field=dtype, ...` for each override. A
        dtype without a field means `compute`. The fields `param`, `gather`, `hop1`, `hop2` and
        `state` take codecs too, as in `hop1=int8[256]@node`.

        Raises:
          PlanError: a clause does not give a dtype for a field, or gives two for the same one.
        """
        if isinstance(value, Precision):
            return value
        base, overrides = dict[str, Any](), list[tuple[str, Precision]]()
        for number, clause in enumerate(filter(None, map(str.strip, (value or "").split(";")))):
            pattern, colon, fields = clause.rpartition(":")
            if colon:
                overrides.append((pattern.strip(), cls(**_read(clause, fields))))
            elif number:
                fix = "write overrides as in '*norm*: compute=f32', after the rest"
                raise PlanError(f"Precision.parse: no pattern in {clause!r}", fix=fix)
            else:
                base = _read(clause, fields)
        return cls(**base, overrides=tuple(overrides))

    def __str__(self) -> str:
        own = ",".join(f"{name}={text_of(value)}" for name, value in self._fields())
        parts = [own] if own else []
        return "; ".join([*parts, *(f"{p}: {precision}" for p, precision in self.overrides)])

    def _fields(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in FIELDS if getattr(self, name) is not None]

    def at(self, path: str) -> "Precision":
        """The precision of one leaf, without overrides."""
        found = dict(self._fields())
        for pattern, precision in self.overrides:
            if checks.matches(pattern, path):
                found.update(precision._fields())
        return Precision(**found)

    def formats(
        self, path: str, own: torch.dtype, numel: int = CODED_NUMEL, trained: bool = True
    ) -> Formats:
        """The formats of a leaf of this dtype; if it is not a float tensor all are its own.

        Args:
          path: its path.
          own: its dtype.
          numel: its elements.
          trained: whether it has moments.

        Raises:
          PlanError: a gather would send another dtype than that of computation, or moments would be
            codes of shards that are not in float32.
        """
        if not own.is_floating_point:
            return Formats(own, own, own, own)
        here = self.at(path) if self.overrides else self
        if isinstance(here.param, Codec):  # the dtype of what codes stand for, and no gradients
            return Formats(torch.float32, here.compute or own, codes=here.param)
        param: Any = here.param or own
        gather, hop1, hop2, reduce = here.gather, here.hop1, here.hop2, here.reduce or param
        compute = here.compute or param
        if isinstance(hop1, torch.dtype):  # what gradients are packed in
            reduce, hop1, hop2 = hop1, None, hop2 or reduce
        if isinstance(gather, torch.dtype) and gather != compute:
            text = f"Precision: gather={text_of(gather)} for {path}, which is computed in {compute}"
            raise PlanError(text, fix="set compute to it, or send codes, as in gather=int8[256]")
        is_coded = trained and isinstance(here.state, Codec) and numel >= CODED_NUMEL
        if is_coded and param != torch.float32:
            text = f"Precision: state={here.state} for {path}, whose shards are {param}"
            fix = "give it param=f32, or write state=f32 for it behind a pattern"
            raise PlanError(text, fix=fix)
        sent: Any = {"hop1": hop1, "hop2": None if hop2 == reduce else hop2}
        sent["gather"] = None if gather == compute else gather
        sent["state"] = here.state if is_coded else None
        return Formats(param, compute, reduce, here.accumulate, **sent)  # pyright: ignore

    @property
    def patterns(self) -> list[str]:
        """The patterns of its overrides."""
        return [pattern for pattern, _ in self.overrides]

    @property
    def inputs(self) -> torch.dtype | None:
        """The dtype that inputs of a model are cast to; None leaves them as they are."""
        return self.compute or (None if isinstance(self.param, Codec) else self.param)  # pyright: ignore


def _read(clause: str, fields: str) -> dict[str, Any]:
    """The fields that a clause of a text sets, as texts."""
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, fields.split(","))):
        name, equals, value = map(str.strip, part.rpartition("="))
        name = name if equals else "compute"
        if name in found or name not in FIELDS:
            fix = f"give each of {', '.join(FIELDS)} once at most"
            raise PlanError(f"Precision.parse: {part!r} in {clause!r}", fix=fix)
        found[name] = value
    return found
