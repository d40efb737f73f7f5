"""`load_shards`: shards from files, of which each rank reads its own part."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from mics_fn.collectives import in_step
from mics_fn.errors import TreeError, message
from mics_fn.init.files import Entry, Source, Weights, open_weights
from mics_fn.init.filling import Filling
from mics_fn.init.tape import place
from mics_fn.shards import Leaf, dtype_name, require_groups

SHOWN = 5  # of what does not match


def load_shards(
    path: Source,
    groups: Any,
    *,
    like: nn.Module | Mapping[str, Tensor] | None = None,
    names: Callable[[str], str | None] | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Leaf]:
    """Shards of parameters that lie in a file; each rank reads only its own part.

    Args:
      path: a safetensors file, a file of `torch.save` (a state dict), an index of such files or
        a folder with one of these, as transformers saves them; or a mapping of tensors by name.
      groups: as for `shard`.
      like: a module or tensors by name, on meta or not: which parameters there are, with their
        shapes, dtypes, ties and `requires_grad`. None takes all tensors of the file.
      names: gives the name of a parameter for one in the file, or None to pass over it.
      strict: whether a tensor that `like` does not have is an error. One that is missing always is,
        and a buffer of the module never: it is passed over.
      dtype: of the float shards; default that of `like`, else that of the file.
      options: `frozen`, `precision`, `bucket_bytes` and `order` as for `shard`; by default leaves
        lie in buckets in the order of `like`.

    Returns:
      The shards by name, as `shard` would give them for the same tensors in full.

    Communication: digests of tree and shards (tens of bytes a leaf).

    Memory: this rank's shards, and 16 MiB at a time while it reads.

    Raises:
      TreeError: the file does not match `like`, is damaged, or holds something else.
      OSError: it can not be read.
      DesyncError: that is so on some ranks only, or they read different names, shapes or values.
      LeafError, PlanError: as `shard`.

    Example:
      >>> groups = make_groups(1)
      >>> load_shards({"w": torch.ones(2, 3)}, groups, like={"w": torch.empty(2, 3).double()})
      {'w': Sharded(shape=(2, 3), float64, here 6 of 6)}
    """
    require_groups("load_shards", groups)
    with ExitStack() as opened:
        with in_step("load_shards", groups, ""):
            found = renamed(opened.enter_context(open_weights("load_shards", path)), names)
            params, others = _wanted(like, found)
            if dtype is not None:
                params = _cast(params, dtype)
            sources = matched("load_shards", found, params, others, strict=strict)
        if like is not None:
            options.setdefault("order", order_of(params))
        filling = Filling("load_shards", params, groups, options)
        for name in params:
            filling.read(name, sources[name].read)
    filling.check_copies()
    return filling.shards


def order_of(params: Mapping[str, Any]) -> Callable[[str], int]:
    """A sort key of paths: the order of the names."""
    place = {f"[{name!r}]": i for i, name in enumerate(params)}
    return lambda path: place[path]


def renamed(found: Weights, names: Callable[[str], str | None] | None) -> Weights:
    """The tensors under the names of parameters, without those that have none."""
    if names is None:
        return found
    pairs = ((names(key), entry) for key, entry in found.items())
    return {key: entry for key, entry in pairs if key is not None}


def matched(
    verb: str,
    found: Weights,
    params: Mapping[str, Tensor],
    others: Mapping[str, Tensor | None],
    *,
    strict: bool = True,
) -> Weights:
    """What to read for each parameter; a tied one may stand in the file under any of its names.

    Args:
      verb: for errors.
      found: what there is.
      params: what must be there.
      others: what may be there too, of these shapes.
      strict: whether anything else is an error.

    Raises:
      TreeError: something is missing, of another shape or kind, or not expected.
    """
    same: dict[Any, list[str]] = {}
    for name, value in params.items():
        same.setdefault(_identity(value), []).append(name)
    sources: Weights = {}
    wrong, missing = [], []
    for aliases in same.values():
        given = [name for name in aliases if name in found]
        for name in given:
            wrong += _difference("params", name, params[name], found[name])
        if given:
            sources |= {name: found[name if name in given else given[0]] for name in aliases}
        else:
            missing.append(f"params[{aliases[0]!r}] is missing")
    for name, value in others.items():
        if name in found and value is not None:
            wrong += _difference("buffers", name, value, found[name])
    extra = [f"{k!r} is not expected" for k in found if k not in params and k not in others]
    problems = wrong + missing + (extra if strict else [])
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        fix = "load what was saved for this model; names= can rename or pass over, and strict=False"
        fix += " takes a file with more in it"
        text = f"{verb}: the weights do not match the parameters"
        raise TreeError(message(text, problems[:SHOWN] + more, fix=fix))
    return sources


def _difference(root: str, name: str, want: Tensor, got: Entry) -> list[str]:
    if tuple(want.shape) != got.shape:
        return [f"{root}[{name!r}]: expected shape {tuple(want.shape)}, got {got.shape}"]
    if want.is_floating_point() != got.dtype.is_floating_point:
        kinds = dtype_name(want.dtype), dtype_name(got.dtype)
        return [f"{root}[{name!r}]: expected {kinds[0]}, got {kinds[1]}"]
    return []


def _wanted(
    like: nn.Module | Mapping[str, Tensor] | None, found: Weights
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor | None]]:
    """Which parameters are wanted, and what else may be in the file, whatever its shape."""
    if isinstance(like, nn.Module):
        params = dict(like.named_parameters(remove_duplicate=False))
        return params, dict.fromkeys(like.state_dict(keep_vars=True))
    if like is not None:
        return dict(like), {}
    empty = {k: torch.empty(e.shape, dtype=e.dtype, device="meta") for k, e in found.items()}
    return empty, {}


def _cast(params: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Float parameters on meta in another dtype; tied ones stay tied."""
    made: dict[Any, Tensor] = {}
    for value in params.values():
        if value.is_floating_point():
            other = torch.empty(value.shape, dtype=dtype, device="meta")
            is_param = isinstance(value, nn.Parameter)
            cast = nn.Parameter(other, value.requires_grad) if is_param else other
            made.setdefault(_identity(value), cast)
    return {name: made.get(_identity(value), value) for name, value in params.items()}


def _identity(value: Tensor) -> Any:
    """The same for parameters that are tied, as `shard` sees it."""
    if value.is_meta or not value.numel() or not value.is_floating_point():
        return id(value)
    return (*place(value), value.dtype)
