"""Files of `torch.save`: a zip file of a pickle that describes tensors, and their storages."""

from math import prod
from typing import Any

from mics_fn.init.pickled import Other, Stored, read_pickle
from mics_fn.init.reading import Entry, File, Weights, is_text, shown
from mics_fn.init.zipped import Record, records

_WHOLE = "pass tensors by name alone: save model.state_dict() by itself, or pass the part that is"
_WHOLE += " one, load_shards(torch.load(path, mmap=True, weights_only=True)['model'], ...)"
_MIXED = "does not hold tensors by name alone"


def of_torch(file: File) -> Weights:
    """The tensors of a file of `torch.save`, which are read from the records of their storages.

    Raises:
      FileError: it is damaged, holds something else, or has more leaves than its limits allow.
    """
    value, storages = _read(file)
    if not isinstance(value, dict):
        raise file.error(_MIXED, [f"got {_kind(value)}"], fix=_WHOLE)
    file.require_small(0, len(value))
    return {leaf: _entry(file, storages, leaf, stored) for leaf, stored in value.items()}


def tensor_of_torch(file: File, leaf: str) -> Entry:
    """The tensor of a file that `torch.save` wrote for it alone.

    Raises:
      FileError: it is damaged, or holds something else.
    """
    value, storages = _read(file)
    return _entry(file, storages, leaf, value)


def _read(file: File) -> tuple[Any, dict[str, Record]]:
    """What the pickle of a file describes, and the storages of the tensors in it."""
    found = records(file)
    pickles = [name for name in found if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise file.error("is a zip file, and not one of torch.save", fix=_WHOLE)
    folder, record = pickles[0].removesuffix("data.pkl"), found[pickles[0]]
    if f"{folder}constants.pkl" in found:
        fix = "save torch.jit.load(path).state_dict() by itself"
        raise file.error("is an archive of TorchScript, which is a program", fix=fix)
    order = found.get(f"{folder}byteorder")
    if order and file.read(order.start, min(order.length, 8)) != b"little":
        fix = "save it again on a machine like this one"
        raise file.error("has another order of bytes than this machine", fix=fix)
    storages = {
        name.removeprefix(f"{folder}data/"): record
        for name, record in found.items()
        if name.startswith(f"{folder}data/")
    }
    file.require_small(record.length)
    data = file.read(record.start, record.length)
    try:
        return read_pickle(data), storages
    except ValueError as error:
        raise file.error("is damaged", [f"{error}"]) from None


def _entry(file: File, storages: dict[str, Record], leaf: Any, value: Any) -> Entry:
    """A tensor, compared with the storage that it lies in."""
    if not isinstance(leaf, str) or not is_text(leaf):
        raise file.error(_MIXED, [f"got a name that is no text: {_kind(leaf)}"], fix=_WHOLE)
    if not isinstance(value, Stored):
        raise file.error(_MIXED, [f"got {_kind(value)}"], leaf, _WHOLE)
    record = storages.get(value.storage)
    if record is None:
        raise file.error("is damaged", [f"its storage {shown(value.storage)} is missing"], leaf)
    if max(value.end, prod(value.shape) * value.dtype.itemsize) > record.length:
        what = f"shape {shown(value.shape)} and strides {shown(value.strides)} of {value.dtype}"
        raise file.error("is damaged", [f"{what} do not fit {record.length} bytes"], leaf)
    base = record.start + value.offset * value.dtype.itemsize
    return file.entry(leaf, base, value.dtype, value.shape, value.strides)


def _kind(value: Any) -> str:
    return value.name if isinstance(value, Other) else type(value).__name__
