"""`load_shards`: shards from files, from which each rank reads only its own part."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from mics_fn import checks, tree
from mics_fn.collectives import in_step
from mics_fn.errors import TreeError, message
from mics_fn.init.files import Source, open_weights
from mics_fn.init.filling import Filling
from mics_fn.init.reading import Entry, Limits, Weights
from mics_fn.init.skeleton import meta_like
from mics_fn.shards import (
    LayoutOptions,
    Leaf,
    check_dtype,
    dtype_name,
    owners_of,
    require_groups,
)

SHOWN = 5  # at most so many mismatches are listed


def load_shards(
    path: Source,
    groups: Any,
    *,
    like: nn.Module | Mapping[str, Tensor] | None = None,
    names: Callable[[str], str | None] | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    trust: bool = False,
    max_header_bytes: int = 100_000_000,
    max_leaves: int = 100_000,
    **options: Unpack[LayoutOptions],
) -> dict[str, Leaf]:
    """Shards of the parameters in a file; each rank reads only its own part.

    Args:
      path: a safetensors file, a file of `torch.save` (a state dict), an index of such files, or
        a folder with one of these, as transformers saves them; a folder that
        torch.distributed.checkpoint wrote; or a mapping of tensors by name.
      groups: as for `shard`.
      like: a module, or tensors by name, whose data is not read and may be on meta. It says which
        parameters there are, with their shapes, dtypes, ties and `requires_grad`. None takes all
        tensors of the file.
      names: gives the parameter's name for a name in the file, or None to ignore that tensor.
      strict: whether a tensor that `like` does not have is an error. A tensor that is missing
        always is one. Buffers of a module are ignored.
      dtype: of the floating-point shards; by default that of `like`, or else that of the file.
      trust: whether a file in a folder, or one that an index names, may be a symbolic link or lie
        elsewhere, as in a cache of Hugging Face. Nothing in a file is run in any case.
      max_header_bytes: of the part of a file that describes its tensors.
      max_leaves: of a file, or an index.
      options: `frozen`, `precision`, `bucket_bytes`, `order`, `bucket` and `where` as for `shard`;
        by default leaves lie in buckets in the order of `like`.

    Returns:
      The shards by name, as `shard` would give them for the same tensors in full.

    Communication: digests of the tree and the shards (tens of bytes per leaf).

    Memory: this rank's shards, and 16 MiB at a time while it reads; the memory that a tensor lies
      in, if it was saved with strides of its own.

    Raises:
      FileError: the file is damaged, is cut while it is read, holds something else than tensors, is
        not a regular file, or asks for more than the limits; it names the file and the leaf.
      TreeError: the file does not match `like`.
      OSError: there is no such file, which is a `FileNotFoundError` and a `FileError`; or it cannot
        be opened.
      OffloadError: with `where=`, a scratch file cannot be made or written; a `PeerOffloadError`
        with the same file and leaf on all other ranks.
      DesyncError: one of the others happened on some ranks only, or the ranks read different names,
        shapes or values.
      LeafError, PlanError: as `shard`.

    Example:
      >>> groups = make_groups(1)
      >>> load_shards({"w": torch.ones(2, 3)}, groups, like={"w": torch.empty(2, 3).double()})
      {'w': Sharded(shape=(2, 3), float64, here 6 of 6)}
    """
    limits = Limits.checked("load_shards", trust, max_header_bytes, max_leaves)
    how = {"like": like, "names": names, "strict": strict, "dtype": dtype}
    return read_shards("load_shards", path, groups, limits, **how, options={**options})


def read_shards(
    verb: str,
    path: Source,
    groups: Any,
    limits: Limits,
    *,
    like: nn.Module | Mapping[str, Tensor] | None,
    names: Callable[[str], str | None] | None,
    strict: bool,
    dtype: torch.dtype | None,
    options: dict[str, Any],
) -> dict[str, Leaf]:
    """`load_shards` for a verb of any name."""
    require_groups(verb, groups)
    with ExitStack() as opened:
        with in_step(verb, groups, ""):
            _check(verb, path, like, names, dtype)
            checks.flag(verb, "strict", strict)
            checks.options(verb, options, LayoutOptions.__annotations__)
            found = opened.enter_context(open_weights(verb, path, limits))
            found = renamed(verb, found, names)
            params, others = _wanted(like, found)
            if dtype is not None:
                params = _cast(params, dtype)
            sources = matched(verb, found, params, others, strict=strict)
        if like is not None:
            options.setdefault("order", tree.own_order(params))
        filling = Filling(verb, params, groups, options)
        with filling.under_way():
            for name in filling.order:
                filling.read(name, sources[name].read)
    filling.check_copies()
    return filling.shards


def _check(verb: str, path: Any, like: Any, names: Any, dtype: Any) -> None:
    """Raise PlanError unless the arguments of `load_shards` are what they should be."""
    if not isinstance(path, Mapping):
        checks.path(verb, "path", path)
    if like is not None and not isinstance(like, nn.Module):
        named = isinstance(like, Mapping) and all(isinstance(x, Tensor) for x in like.values())
        if not named:
            fix = "pass the module, or its state_dict(), which may be on meta"
            checks.refuse(verb, "like", like, "a module or tensors by name", fix)
    fix = "pass a function such as lambda name: name.removeprefix('model.')"
    checks.function(verb, "names", names, "from a name in the file to a parameter's", fix)
    if dtype is not None:
        check_dtype(verb, "dtype", dtype)


def renamed(verb: str, found: Weights, names: Callable[[str], str | None] | None) -> Weights:
    """The tensors of a file under the names of parameters, without those that have none.

    Raises:
      PlanError: `names` gives something else than a name or None.
    """
    if names is None:
        return found
    kept: Weights = {}
    for name, entry in found.items():
        new = names(name)
        if new is None:
            continue
        if not isinstance(new, str) or not new:
            fix = "return the name of a parameter, or None to ignore this tensor"
            checks.refuse(verb, f"names({name!r})", new, "a str that is not empty, or None", fix)
        kept[new] = entry
    return kept


def matched(
    verb: str,
    found: Weights,
    params: Mapping[str, Tensor],
    others: Mapping[str, Tensor | None],
    *,
    strict: bool = True,
    missing: Callable[[str], bool] | None = None,
) -> Weights:
    """What to read for each tensor; a tied parameter may be in the file under any of its names.

    Args:
      verb: for errors.
      found: the tensors of the file.
      params: what must be there.
      others: what else may be there, such as buffers; if it is a tensor, it has this shape, and
        is to be read too.
      strict: whether anything else is an error.
      missing: for which parameters there need not be anything to read, by their names.

    Raises:
      TreeError: a tensor is missing, not expected, or of another shape or kind.
    """
    same: dict[int, list[str]] = {}
    for name, owner in zip(params, owners_of(list(params.values())), strict=True):
        same.setdefault(owner, []).append(name)
    sources: Weights = {}
    wrong, absent = [], []
    for aliases in same.values():
        given = [name for name in aliases if name in found]
        for name in given:
            wrong += _difference("params", name, params[name], found[name])
        if given:
            sources |= {name: found[name if name in given else given[0]] for name in aliases}
        elif missing is None or not all(_is_new(verb, missing, name) for name in aliases):
            absent.append(f"params.{aliases[0]} is missing")
    for name, value in others.items():
        if name in found and value is not None:
            wrong += _difference("buffers", name, value, found[name])
            sources[name] = found[name]
    extra = [f"{k!r} is not expected" for k in found if k not in params and k not in others]
    problems = wrong + absent + (extra if strict else [])
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        fix = "load what was saved for this model; names= can rename or ignore tensors, and "
        makes = verb == "init_model"  # which can also make what a file lacks
        fix += "missing= says which are new" if makes else "strict=False takes a file with more"
        text = f"{verb}: the weights do not match the parameters"
        raise TreeError(message(text, problems[:SHOWN] + more, fix=fix))
    return sources


def _is_new(verb: str, missing: Callable[[str], bool], name: str) -> bool:
    """Whether the weights may lack this parameter."""
    return checks.answer(verb, f"missing({name!r})", missing(name))


def _difference(root: str, name: str, want: Tensor, got: Entry) -> list[str]:
    if tuple(want.shape) != got.shape:
        return [f"{root}.{name}: expected shape {tuple(want.shape)}, got {got.shape}"]
    if want.is_floating_point() != got.dtype.is_floating_point:
        kinds = dtype_name(want.dtype), dtype_name(got.dtype)
        return [f"{root}.{name}: expected {kinds[0]}, got {kinds[1]}"]
    return []


def _wanted(
    like: nn.Module | Mapping[str, Tensor] | None, found: Weights
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor | None]]:
    """Which parameters are wanted, and what else may be in the file."""
    if isinstance(like, nn.Module):
        params = dict(like.named_parameters(remove_duplicate=False))
        return params, dict.fromkeys(like.state_dict(keep_vars=True))
    if like is not None:
        return dict(like), {}
    empty = {k: torch.empty(e.shape, dtype=e.dtype, device="meta") for k, e in found.items()}
    return empty, {}


def _cast(params: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters, with floating-point ones on meta in another dtype; tied ones stay tied."""
    values = list(params.values())
    cast = [meta_like(x, dtype) if x.is_floating_point() else x for x in values]
    return {name: cast[owner] for name, owner in zip(params, owners_of(values), strict=True)}
