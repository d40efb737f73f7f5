"""Safetensors files: 8 bytes of length, a header of JSON, and the values of all tensors."""

import json
from math import prod
from typing import Any

import torch

from mics_fn.init.reading import File, Weights, check_shape, contiguous, is_text, shown

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_NEITHER = "is neither a safetensors file nor a zip file of torch.save"


def read_json(file: File, start: int, length: int, wrong: str) -> Any:
    """A part of a file that is JSON, without names that are there twice.

    Args:
      file: what to read.
      start: of the part, in bytes.
      length: of the part, in bytes.
      wrong: what to say of a file that has something else there.

    Raises:
      FileError: it has something else there, or more than its limits allow.
    """
    file.require_small(length)
    data = file.read(start, length)
    try:
        return strict_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise file.error(wrong, [f"{error}"]) from None


def strict_json(text: str) -> Any:
    """The value of a JSON text without names that are there twice, and without NaN.

    Raises:
      ValueError, RecursionError: it is something else.
    """
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)


def of_safetensors(file: File) -> Weights:
    """The tensors of a safetensors file; see `with_texts`."""
    return with_texts(file)[0]


def with_texts(file: File) -> tuple[Weights, dict[str, str]]:
    """The tensors of a safetensors file, whose bytes have neither gaps nor overlaps; and its texts.

    Raises:
      FileError: it is damaged, or has more leaves than its limits allow.
    """
    length = int.from_bytes(file.read(0, 8), "little")
    if length > file.size - 8:
        raise file.error(_NEITHER, ["its header would be longer than the file"])
    header = read_json(file, 8, length, _NEITHER)
    if not isinstance(header, dict):
        raise file.error(_NEITHER, [f"its header is a {type(header).__name__}"])
    texts = header.pop("__metadata__", {})
    said = [*texts, *texts.values()] if isinstance(texts, dict) else [None]
    if not all(isinstance(x, str) and is_text(x) for x in said):
        raise file.error("is damaged", ["its metadata has something else than texts"])
    file.require_small(length, len(header))
    base, found = 8 + length, {}
    places: list[tuple[int, int, str]] = []
    for leaf, facts in header.items():
        try:
            kind, shape, begin, end = _facts(leaf, facts, file.size - base)
        except ValueError as error:
            raise file.error("is damaged", [f"{error}"], leaf) from None
        found[leaf] = file.entry(leaf, base + begin, kind, shape, contiguous(shape))
        places.append((begin, end, leaf))
    _require_dense(file, places, file.size - base)
    return found, texts


def _require_dense(file: File, places: list[tuple[int, int, str]], room: int) -> None:
    """Refuse tensors that overlap, and bytes that belong to none."""
    last = 0
    for begin, end, leaf in sorted(places):
        if begin != last:
            how = "overlap others" if begin < last else "leave a gap before them"
            raise file.error("is damaged", [f"its bytes {begin} to {end} {how}"], leaf)
        last = end
    if last != room:
        raise file.error("is damaged", [f"{room - last} bytes follow the last tensor"])


def _facts(leaf: str, facts: Any, room: int) -> tuple[torch.dtype, list[int], int, int]:
    """Dtype, shape and place of a tensor in a file of safetensors, by its header.

    Raises:
      ValueError: they do not fit together, or not into the bytes of all tensors, `room`.
    """
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("the header has something else than its dtype, shape and data_offsets")
    if not is_text(leaf):
        raise ValueError("its name cannot be written")
    code, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    kind = getattr(torch, DTYPES.get(code, ""), None) if isinstance(code, str) else None
    if kind is None:
        raise ValueError(f"torch has no dtype {shown(code)}")
    check_shape(shape, kind)
    pair: Any = offsets if isinstance(offsets, list) and len(offsets) == 2 else [None, None]
    if not all(type(n) is int for n in pair):
        raise ValueError(f"data_offsets {shown(offsets)} are not two whole numbers")
    begin, end = pair
    if end - begin != prod(shape) * kind.itemsize or not 0 <= begin <= end <= room:
        raise ValueError(
            f"shape {shown(shape)} of {code} does not fit bytes {shown(begin)} to {shown(end)}"
        )
    return kind, shape, begin, end


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; raises ValueError if a name is there twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} is there twice")
        found[name] = value
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")
