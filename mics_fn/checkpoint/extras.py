"""JSON with tensors, tuples and every float: what a rank saves besides its state."""

import json
import math
from typing import Any

from torch import Tensor

from mics_fn.errors import LeafError, TreeError, message

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
            tensors[path] = x.detach()
            return {_TENSOR: path}
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
            if key == _TENSOR:
                return tensors[held]
            if key == _TUPLE:
                return tuple(held)
            if key == _FLOAT:
                return float(held)
        return x

    return json.loads(text, object_hook=known)
