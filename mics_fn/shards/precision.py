"""Precision as a value: the dtypes of parameters, computation, gradients and outputs.

A pattern that matches no leaf is an error. One that matches leaves on which a field that it sets
has no effect is warned of: a tied leaf goes by the path of the one that it is tied to, integers are
replicated as they are, and frozen leaves have no gradients and no moments.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from mics_fn import checks
from mics_fn.checks import check_matched, matches
from mics_fn.collectives import SHORT_NAMES, Codec, Rounded, Wire
from mics_fn.errors import PlanError, message
from mics_fn.groups import job_size
from mics_fn.offload import AT_REST, Where, where_of
from mics_fn.shards.bucket import BUCKET_BYTES, LeafSpec
from mics_fn.shards.contents import map_contents
from mics_fn.tree import Tree

# The fields of a `Precision`, and what each of them may be.

NAMES = {
    **{name: dtype for dtype, name in SHORT_NAMES.items()},
    **{f"{dtype}".removeprefix("torch."): dtype for dtype in SHORT_NAMES},
    **{"fp32": torch.float32, "fp64": torch.float64},
    **{"fp16": torch.float16, "half": torch.float16},
}
DTYPES = ("param", "compute", "reduce", "output", "accumulate")
SENT = ("gather", "hop1", "hop2")  # a dtype or a codec
FIELDS = (*DTYPES, *SENT, "state")
# Lines of a column, and parts of files, have whole blocks of these lengths.
_BLOCKS = [2**n for n in range(6, 13)]
CODED_NUMEL = 4096  # elements of a tensor from which on its moments are coded


def text_of(value: Any) -> str:
    """The text of a field."""
    return SHORT_NAMES[value] if isinstance(value, torch.dtype) else f"{value}"


def sent_as(name: str, value: Any) -> torch.dtype | Wire:
    """A field that takes codecs, as a dtype or a `Wire`.

    Raises:
      PlanError: it is neither, nor a text of one.
    """
    if isinstance(value, str):
        value, at, level = value.partition("@")
        value = value.removeprefix("torch.")
        codec = NAMES[value] if value in NAMES else Codec.parse(value)
        if at and not (level.isidentifier() and level.isascii()):
            fix = "write the name of a level behind @, as in int8[256]@node"
            raise PlanError(f"Precision: {name}={value}@{level} names no level", fix=fix)
        value = Wire(Rounded(codec) if isinstance(codec, torch.dtype) else codec, level)
    value = Wire(value) if isinstance(value, Codec) else value
    if not isinstance(value, Wire):
        check_dtype("Precision", name, value)
        return value
    if name == "hop2" and value.level:
        text = f"Precision: hop2={value}: replicas have no levels"
        raise PlanError(text, fix=f"write hop2={value.codec}")
    plain = isinstance(value.codec, Rounded) and not value.level
    return value.codec.dtype if plain else value  # pyright: ignore[reportAttributeAccessIssue]


def kept_as(value: Any) -> torch.dtype | Codec:
    """The field `state`, as float32 or a codec for moments.

    Raises:
      PlanError: it is neither, nor a text of one.
    """
    if isinstance(value, str):
        value = NAMES[value] if value in NAMES else Codec.parse(value)
    if value == torch.float32:
        return value
    block = value.block if isinstance(value, Codec) and value.name in AT_REST else None
    if block is None or block not in _BLOCKS:
        fix = "use int8 or fp8, as in state=int8[256], with a power of two from 64 to 4096; or f32"
        raise PlanError(f"Precision: state={text_of(value)} is not a way to keep moments", fix=fix)
    return value


def stored_as(value: Any) -> torch.dtype | Codec:
    """The field `param`, as a dtype or the codec of frozen leaves.

    Raises:
      PlanError: it is neither, nor a text of one.
    """
    if isinstance(value, str):
        value = NAMES[value] if value in NAMES else Codec.parse(value)
    if not isinstance(value, Codec):
        check_dtype("Precision", "param", value)
    return value


def check_dtype(verb: str, name: str, dtype: Any) -> None:
    """Raise PlanError unless a value is one of the dtypes that parameters can have here."""
    if not isinstance(dtype, torch.dtype) or dtype not in SHORT_NAMES:
        why, allowed = "not a torch.dtype", ", ".join(map(str, SHORT_NAMES))
        if isinstance(dtype, torch.dtype):
            kept = "not a dtype to compute, reduce or keep parameters in here"
            why = kept if dtype.is_floating_point else "not a float dtype"
        raise PlanError(f"{verb}: {name}={dtype!r} is {why}", fix=f"pass one of {allowed}")


class Dtypes(NamedTuple):
    """The dtypes of one leaf: of its shard, of computation, of both hops, of the gradients' sum."""

    param: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype


class Wires(NamedTuple):
    """What travels of one leaf; None where the values themselves do, in the dtypes of `Dtypes`."""

    gather: Wire | None = None
    hop1: Wire | None = None
    hop2: Wire | torch.dtype | None = None  # a dtype other than that of hop 1


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
        `shard` refuses a pattern that matches no leaf, and warns of a field that has no effect on
        any leaf that its pattern matches.
      gather: what a gather sends: a dtype, or a `Codec` such as "int8[256]"; None means `compute`.
        With "@node" behind it, it is sent on the level "node" and on those outside of it, and
        `compute` on the others. Every rank uses what was decoded, its own chunk too.
      hop1: what hop 1 sends, in the same way; None means `reduce`. A rank's own part of a mean is
        not rounded.
      hop2: what hop 2 sends, a dtype or a `Codec`; None means `reduce`. It has no levels.
      state: how moments of an optimizer are kept: a `Codec` "int8" or "fp8", whose blocks have a
        power of two of elements from 64 to 4096, or float32; None means values in `param`. It needs
        shards in float32, and leaves with at least 4,096 elements in full; those of others stay
        values. With "int8" an element whose gradients are below about 1/127 of the largest of its
        block takes smaller steps than without codes; "fp8" has room for 1/229,376. See
        [Note: coded moments] in `optim.flat`, and [Note: roots] in `offload.codes`.

    Leaves are padded to blocks of their codecs. So the longest of the blocks of a leaf has to be a
    multiple of the others.

    Codes are sent only between ranks. Derivatives of derivatives, forward-mode tangents, values
    under `vmap`, and what `unshard`, `get`, `checkpoint` and `sync_replicas(exact=True)` send are
    never coded; nor are the parameters that `replicas.local_sgd` averages.

    Raises:
      PlanError: a dtype is not float32, bfloat16, float16 or float64; an override sets no field, or
        one that a leaf does not have; a codec is unknown, or hop 2 names a level; moments cannot be
        kept as `state` says.

    Example:
      >>> precision = Precision.parse("param=f32, compute=bf16; *norm*: compute=f32")
      >>> precision.dtypes("h.0.norm.weight", torch.float32).compute
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
            if name == "param":
                object.__setattr__(self, name, stored_as(value))
            elif name in DTYPES:
                check_dtype("Precision", name, value)
            elif name == "state":
                object.__setattr__(self, name, kept_as(value))
            else:
                object.__setattr__(self, name, sent_as(name, value))
        object.__setattr__(self, "overrides", tuple(map(_checked, self.overrides)))

    @classmethod
    def parse(cls, text: str) -> "Precision":
        """Read the text form; `parse(str(precision))` equals `precision`.

        A text is `field=dtype, ...`, followed by `; pattern: field=dtype, ...` for each override. A
        dtype without a field means `compute`. The fields `param`, `gather`, `hop1`, `hop2` and
        `state` take codecs too, as in `hop1=int8[256]@node`.

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
                raise PlanError(f"Precision.parse: no pattern in {clause!r}", fix=fix)
        return cls(**(base or {}), overrides=tuple(overrides))

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

    def dtypes(self, path: str, own_dtype: torch.dtype) -> Dtypes:
        """The four dtypes of a leaf; if it is not a float tensor they are all its own."""
        if not own_dtype.is_floating_point:
            return Dtypes(own_dtype, own_dtype, own_dtype, own_dtype)
        here = self.at(path) if self.overrides else self
        if isinstance(here.param, Codec):  # what codes stand for, and no gradients
            wide = torch.float32
            return Dtypes(wide, here.compute or own_dtype, wide, wide)
        param: torch.dtype = here.param or own_dtype  # pyright: ignore[reportAssignmentType]
        # What hop 1 sends as a dtype on all levels is what gradients are packed in.
        hop1 = here.hop1 if isinstance(here.hop1, torch.dtype) else None
        reduce = hop1 or here.reduce or param
        wide = torch.float64 if reduce == torch.float64 else torch.float32
        return Dtypes(param, here.compute or param, reduce, here.accumulate or wide)

    def wires(self, path: str, own_dtype: torch.dtype) -> Wires:
        """What travels of a leaf, where that is not a value in one of its `dtypes`."""
        here, dtypes = self.at(path), self.dtypes(path, own_dtype)
        if not own_dtype.is_floating_point or isinstance(here.param, Codec):
            return Wires()
        gather, hop1, hop2 = here.gather, here.hop1, here.hop2
        if isinstance(gather, torch.dtype):
            gather = None if gather == dtypes.compute else Wire(Rounded(gather))
        if isinstance(hop1, torch.dtype):
            hop1, hop2 = None, hop2 or here.reduce or dtypes.param
        return Wires(gather, hop1, None if hop2 == dtypes.reduce else hop2)  # pyright: ignore

    def codes(self, path: str, own_dtype: torch.dtype) -> Codec | None:
        """The codes that a leaf is kept as itself, if any."""
        param = self.at(path).param if own_dtype.is_floating_point else None
        return param if isinstance(param, Codec) else None

    def state_codes(self, path: str, dtype: torch.dtype, numel: int) -> Codec | None:
        """The codes that moments of a trained leaf of so many elements are kept as, if any.

        Raises:
          PlanError: its shards are not in float32.
        """
        codec = self.at(path).state if dtype.is_floating_point else None
        if not isinstance(codec, Codec) or numel < CODED_NUMEL:
            return None
        if dtype != torch.float32:
            text = f"Precision: state={codec} for {path}, whose shards are {dtype}"
            fix = "give it param=f32, or write state=f32 for it behind a pattern"
            raise PlanError(text, fix=fix)
        return codec

    @property
    def patterns(self) -> list[str]:
        """The patterns of its overrides."""
        return [pattern for pattern, _ in self.overrides]

    @property
    def casts(self) -> bool:
        """Whether inputs or outputs of a model are cast."""
        return (self._inputs or self.output) is not None

    @property
    def _inputs(self) -> torch.dtype | None:
        """The dtype of a model's inputs."""
        return self.compute or (None if isinstance(self.param, Codec) else self.param)  # pyright: ignore

    def cast_inputs(self, values: Tree) -> Tree:
        """The pytree with float tensors in `compute`; the same object if nothing changes."""
        return _cast(values, self._inputs)

    def cast_output(self, values: Tree) -> Tree:
        """The pytree with float tensors in `output`; the same object if nothing changes."""
        return _cast(values, self.output)


def precision_of(value: Precision | str | None) -> Precision:
    """The `Precision` that an argument means: one, its text, or None for the default."""
    return Precision.parse(value or "") if value is None or isinstance(value, str) else value


def _checked(override: Any) -> tuple[str, Precision]:
    """An override, after a check that it has a text form and an effect."""
    pattern, precision = checks.checked_override(override, Precision)
    what = f"Precision: the override {pattern!r}"
    if precision.overrides or precision.output is not None:
        fix = f"give it {', '.join(name for name in FIELDS if name != 'output')}"
        raise PlanError(f"{what} sets what a leaf does not have", [f"{precision}"], fix)
    if not precision._fields():
        raise PlanError(f"{what} sets no field", fix="write one, as in '*norm*: compute=f32'")
    return pattern, precision


def _read(clause: str, fields: str) -> dict[str, Any]:
    """The fields that a clause of a text sets, with their dtypes."""
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, fields.split(","))):
        name, equals, value = map(str.strip, part.rpartition("="))
        name, value = name if equals else "compute", value.removeprefix("torch.")
        if name in found or name not in FIELDS:
            fix = f"give each of {', '.join(FIELDS)} once at most"
            raise PlanError(f"Precision.parse: {part!r} in {clause!r}", fix=fix)
        found[name] = NAMES.get(value, value)
    return found


def _cast(values: Tree, dtype: torch.dtype | None) -> Tree:
    if dtype is None:
        return values

    def cast(x: Any, _path: str) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return map_contents(cast, values)


# The options of `shard`: as other verbs hand them on, and as they were checked.


class LayoutOptions(TypedDict, total=False):
    """Options of `shard` that say how leaves become buckets; other verbs take them, too."""

    frozen: Callable[[str], bool] | None
    precision: Precision | str | None
    bucket_bytes: float | str
    order: Callable[[str], object] | None
    bucket: Callable[[str], object] | None
    where: Where | str | None


class ShardOptions(LayoutOptions, total=False):
    """All options of `shard`."""

    replicas: Literal["check", "broadcast"]
    source_rank: int | None


class Chosen(NamedTuple):
    """The options of `shard` that say how leaves become buckets."""

    frozen: Callable[[str], bool] | None = None
    precision: Precision = Precision()
    bucket_bytes: int = BUCKET_BYTES
    order: Callable[[str], object] | None = None
    bucket: Callable[[str], object] | None = None
    where: Where = Where()

    @classmethod
    def checked(
        cls,
        verb: str,
        frozen: Any,
        precision: Any,
        bucket_bytes: Any,
        order: Any,
        bucket: Any,
        where: Any,
    ) -> "Chosen":
        """The options as they were given, if each of them is what it should be."""
        nbytes = checks.nbytes(verb, "bucket_bytes", bucket_bytes, 1)
        return cls(frozen, precision_of(precision), nbytes, order, bucket, where_of(where))


# Patterns in `precision=`, `where=` and `frozen=` that change nothing, which is likely a
# mistake.

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
    for name, some in given.items():
        try:
            check_matched(f"{verb}: {name}", some, paths)
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
