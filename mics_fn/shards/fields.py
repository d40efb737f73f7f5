"""The fields of a `Precision`, and what each of them may be."""

from typing import Any

import torch

from mics_fn.collectives import SHORT_NAMES, Codec, Rounded, Wire
from mics_fn.errors import PlanError, message
from mics_fn.offload import AT_REST

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
ALLOWED = f"use {', '.join(SHORT_NAMES.values())}, or torch's names for them"
NARROW = "not a dtype to compute, reduce or keep parameters in here"


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
            raise PlanError(message(f"Precision: {name}={value}@{level} names no level", fix=fix))
        value = Wire(Rounded(codec) if isinstance(codec, torch.dtype) else codec, level)
    value = Wire(value) if isinstance(value, Codec) else value
    if not isinstance(value, Wire):
        check_dtype("Precision", name, value)
        return value
    if name == "hop2" and value.level:
        text = f"Precision: hop2={value}: replicas have no levels"
        raise PlanError(message(text, fix=f"write hop2={value.codec}"))
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
        text = f"Precision: state={text_of(value)} is not a way to keep moments"
        fix = "use int8 or fp8, as in state=int8[256], with a power of two from 64 to 4096; or f32"
        raise PlanError(message(text, fix=fix))
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


def read_coded(name: str, value: str) -> Any:
    """The text of a field that takes codecs, read; None if it is that of a dtype."""
    if value in NAMES:
        return None
    if name in SENT:
        return sent_as(name, value)
    if name == "state":
        return kept_as(value)
    coded = name == "param" and value.startswith(("int4", "int8", "fp8"))
    return stored_as(value) if coded else None


def check_dtype(verb: str, name: str, dtype: Any) -> None:
    """Raise PlanError unless a value is one of the dtypes that parameters can have here."""
    if not isinstance(dtype, torch.dtype) or dtype not in SHORT_NAMES:
        why, allowed = "not a torch.dtype", ", ".join(map(str, SHORT_NAMES))
        if isinstance(dtype, torch.dtype):
            why = NARROW if dtype.is_floating_point else "not a float dtype"
        fix = ALLOWED if verb == "Precision" else f"pass one of {allowed}"
        raise PlanError(message(f"{verb}: {name}={dtype!r} is {why}", fix=fix))
