"""JSON with tensors, tuples and every float: what a rank saves besides its state."""

import json
import math
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.checkpoint.layout import SAVED, in_file
from mics_fn.errors import LeafError, TreeError, message
from mics_fn.offload import is_apart
from mics_fn.shards import dtype_name

_TENSOR, _TUPLE, _FLOAT = "$tensor", "$tuple", "$float"


def encoded(value: Any, root: str = "extra") -> tuple[str, dict[str, Tensor]]:
    """A value as JSON, and its tensors by the names that the JSON has for them.

    Raises:
      LeafError: something in it is neither of JSON nor a tensor nor a tuple; it is named.

    >>> text, tensors = encoded({"rate": math.inf, "order": (1, 2)})
    >>> text, decoded(text, tensors)
    ('{"rate":{"$float":"inf"},"order":{"$tuple":[1,2]}}', {'rate': inf, 'order': (1, 2)})
    """
    tensors: dict[str, Tensor] = {}

    def plain(x: Any, path: str) -> Any:
        if isinstance(x, Tensor):
            if path in tensors:
                text, fix = f"save: two tensors have the path {path}", "rename a key of one of them"
                raise TreeError(message(text, fix=fix))
            tensors[path] = savable("save", path, x)
            as_bytes = in_file(x.dtype, 1)[0] != x.dtype
            return {_TENSOR: [path, dtype_name(x.dtype), *x.shape] if as_bytes else path}
        if x is None or isinstance(x, bool | int | str):
            return x
        if isinstance(x, float):
            return float(x) if math.isfinite(x) else {_FLOAT: repr(float(x))}
        if isinstance(x, dict) and all(isinstance(k, str) and k[:1] != "$" for k in x):
            return {key: plain(each, f"{path}.{key}") for key, each in x.items()}
        if isinstance(x, list | tuple):
            found = [plain(each, f"{path}.{i}") for i, each in enumerate(x)]
            return found if isinstance(x, list) else {_TUPLE: found}
        text = f"save: {path} is {type(x).__name__}"
        fix = "keep dicts of texts, lists, tuples, numbers, texts and tensors in it"
        raise LeafError(message(text, fix=fix))

    return json.dumps(plain(value, root), separators=(",", ":")), tensors


def kind_of(x: Any) -> type:
    """The type that a number or a text has in a file: that of Python, also for one of numpy."""
    return next((kind for kind in (bool, int, float, str) if isinstance(x, kind)), type(x))


def decoded(text: str, tensors: dict[str, Tensor]) -> Any:
    """The value of `encoded`."""

    def known(x: dict[str, Any]) -> Any:
        if len(x) == 1:
            (key, held), *_ = x.items()
            if key == _TENSOR and isinstance(held, list):
                path, dtype, *shape = held
                return tensors[path].view(SAVED[dtype]).view(shape)
            if key == _TENSOR:
                return tensors[held]
            if key == _TUPLE:
                return tuple(held)
            if key == _FLOAT:
                return float(held)
        return x

    return json.loads(text, object_hook=known)


def savable(verb: str, name: str, x: Tensor) -> Tensor:
    """A tensor without its graph, if it is one that can be saved, and loaded.

    Raises:
      LeafError: it is not dense, has no values, or is of a dtype that is not saved.
    """
    what, fix = "", "pass dense tensors with values"
    if _torch.has_no_data(x):
        what = "has no values"
    elif _torch.is_wrapper(x) and not is_apart(x):
        what = f"is {type(x).__name__}, which keeps its values in other tensors"
        fix = "pass a plain tensor, such as a DTensor's full_tensor() or to_local()"
    elif x.layout != torch.strided or x.is_nested:
        what = f"is not dense: {'nested' if x.is_nested else x.layout}"
    elif dtype_name(x.dtype) not in SAVED:
        what = f"is of {x.dtype}, which is not saved"
        fix = "pass the integers or floats that it stands for, such as x.view(torch.uint8)"
    if what:
        raise LeafError(message(f"{verb}: {name} {what}", fix=fix))
    return x.detach()
