"""`load_shards`: shards from files, from which each rank reads only its own part.

A model that was just made is changed in place, so that hooks and other code which refer to its
modules stay right. A model whose tensors belong to other code is copied.

Shards are filled bucket by bucket, so of chunks that live in files, or as codes, one is in memory
as values at a time.
"""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from mics_fn import checks, shards, tree
from mics_fn._torch import compiles_itself
from mics_fn.collectives import Parts, in_step, refuse_unequal
from mics_fn.errors import LeafError, message, name_some
from mics_fn.groups import Groups
from mics_fn.init import reading
from mics_fn.init.files import Weights
from mics_fn.init.tape import META, Recorded
from mics_fn.offload import where_of

# The structure of a model: its parameters on meta, and everything else that it holds as it is.

OWN = {"recorder", "_is_param"}  # attributes of a recorded tensor that its user did not set
# A model owns nothing behind these.
CLOSED = (str, bytes, int, float, complex, type, torch.Tensor, torch.dtype, torch.device)
CLOSED += (ModuleType, FunctionType, MethodType, BuiltinFunctionType)


def tensors_of(model: Any, kind: type[Tensor] = Tensor) -> dict[int, Any]:
    """The tensors of a class that a model holds in modules, containers and objects, by `id`."""
    found: dict[int, Any] = {}
    _swap(model, kind, lambda x: found.setdefault(id(x), x))
    return found


def with_tensors(model: nn.Module, new: dict[int, Tensor]) -> nn.Module:
    """The model with its parameters on meta, and `new` tensors for recorded ones, by their `id`."""
    for recorded in tensors_of(model, Recorded).values():
        for name, value in vars(recorded).items():
            if name not in OWN and not isinstance(value, Recorded):  # such as `no_decay`
                setattr(new[id(recorded)], name, value)
    _swap(model, Recorded, lambda recorded: new[id(recorded)])
    real = [p for p in model.parameters() if not p.is_meta]
    return on_meta_copy(model, real) if real else model


class Computed(Tensor):
    """Stands in a skeleton for a tensor that its module computed from parameters.

    Such a tensor is out of date once the parameters are trained. Modules that compute it again in
    each forward, as those of `weight_norm` and `prune` do, replace it before they use it.
    """

    where: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        found = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Computed)]
        what = found[0].where if found else "a tensor of the model"
        text = f"{what} was computed from parameters before the model was trained, and is used"
        raise LeafError(text, fix="compute it in forward, from the parameters given there")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Computed({self.where})"


def computed_in(model: nn.Module, kind: type[Tensor] = Tensor) -> dict[int, Tensor]:
    """What stands for each tensor of a class that a model computed from parameters, by `id`.

    On meta it would be no error to use it: torch multiplies a matrix by one on meta, and the result
    is what happens to be in memory.
    """
    names = {
        id(value): f"model.{name}.{key}".replace("..", ".")
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }
    found: dict[int, Tensor] = {}
    for key, tensor in tensors_of(model, kind).items():
        if isinstance(tensor, Computed):
            found[key] = tensor
        elif not tensor.is_leaf:  # which torch cannot copy, either
            found[key] = torch.empty(0, device=META).as_subclass(Computed)
            found[key].where = names.get(key, "a tensor of the model")  # pyright: ignore
    return found


def refuse_lazy(model: nn.Module) -> None:
    """Raise LeafError for a model whose parameters have no shape yet."""
    if any(nn.parameter.is_lazy(value) for value in (*model.parameters(), *model.buffers())):
        text = f"Trainer: the {type(model).__name__} has parameters without a shape yet"
        raise LeafError(text, fix="call it once on a batch, which gives them one")


def warn_of_compile(verb: str, model: nn.Module, stacklevel: int) -> None:
    """Warn of modules that `compile()` was called on, which a copy of the model has not."""
    found = [f"model.{k}".rstrip(".") for k, x in model.named_modules() if compiles_itself(x)]
    if found:
        text = f"{verb}: compile() of {name_some(found)} is dropped: it runs eagerly"
        fix = "leave compile() out; see Limits in README for what can be compiled"
        warnings.warn(message(text, fix=fix), stacklevel=stacklevel)


def on_meta_copy(model: nn.Module, values: Iterable[Tensor]) -> nn.Module:
    """A copy of a model in which some of its parameters and buffers are on meta."""
    memo: dict[int, Any] = computed_in(model)
    memo |= {id(value): meta_like(value) for value in values}
    return copy.deepcopy(model, memo)


def meta_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A plain tensor of the same shape and strides on meta; a parameter gives a parameter."""
    empty = torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device=META)
    return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty


def _swap(model: Any, kind: type[Tensor], new: Callable[[Any], Tensor]) -> None:
    """Replace each tensor of a class by what `new` gives for it, wherever the model holds it."""
    seen: set[int] = set()
    todo: list[Any] = [model]

    def moved(x: Any) -> Any:
        if isinstance(x, kind):
            return new(x)
        if isinstance(x, tuple | frozenset | set) and not isinstance(x, torch.Size):
            parts = [moved(part) for part in x]
            same = all(a is b for a, b in zip(parts, x, strict=True))
            return x if same else _like(x, parts)
        if not isinstance(x, CLOSED) and id(x) not in seen:
            seen.add(id(x))
            todo.append(x)
        return x

    while todo:
        x = todo.pop()
        if isinstance(x, dict | list):
            items = list(x.items() if isinstance(x, dict) else enumerate(x))
            for key, value in items:
                if (other := moved(value)) is not value:
                    x[key] = other
        moved(getattr(x, "__dict__", None))


def _like(x: Any, parts: list[Any]) -> Any:
    return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)


# Shards that are filled leaf by leaf, so that the full values never exist all at once.

BLOCK_BYTES = 2**24  # that are read at once
Read = Callable[[int, int], Tensor]  # the elements of a flattened tensor between two indices


class Filling:
    """Shards of named parameters with the layout that `shard` would choose.

    Args:
      verb: for errors.
      params: by name; only their shapes, dtypes, kinds, devices and ties are read.
      groups: as for `shard`.
      options: as for `shard`.

    Communication: a digest of the tree.

    Memory: this rank's shards; of those that live in files, or as codes, one bucket.

    Raises:
      LeafError, PlanError, DesyncError: as `shard`.
    """

    def __init__(
        self, verb: str, params: Mapping[str, Tensor], groups: Any, options: dict[str, Any]
    ) -> None:
        names, _ = tree.flatten({name: name for name in params})
        homes = tree.spread(
            groups, params, what="groups", is_value=lambda value: isinstance(value, Groups)
        )
        self.groups: list[Groups] = list(dict.fromkeys(homes))
        for home in self.groups:
            # Even if this tree was compared before, another rank may now come with a different one.
            home.agreed.difference_update([seen for seen in home.agreed if seen[0] == verb])
        shapes = shards.layout_of(verb, "params", dict(params), groups, **options)
        self.verb = verb
        self.homes: dict[str, Groups] = dict(zip(names, homes, strict=True))
        leaves = dict(zip(names, tree.flatten(shapes, shards.is_leaf)[0], strict=True))
        self.shards: dict[str, shards.Leaf] = {name: leaves[name] for name in params}
        trained = [f"params.{k}" for k, leaf in leaves.items() if isinstance(leaf, shards.Sharded)]
        shards.refuse_overlaps(verb, {f"params.{k}": value for k, value in params.items()}, trained)
        self._where = where_of(options.get("where"))
        self._sums: dict[Groups, tuple[list[str], Tensor]] = {}
        self._parts = Parts()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The block in which all values are made or read.

        Communication: as `in_step`.

        Raises:
          FileError: a file cannot be made, read or written.
          PeerFileError, DesyncError: the block raised on other ranks.
        """
        with in_step(self.verb, self.groups) as self._parts:
            yield
            for home in self.groups:
                self._add_up(home)

    def fill(self, source: Callable[[str], Read]) -> None:
        """Give this rank's part of each leaf its values, one bucket after the other.

        Args:
          source: asked once for each leaf of which this rank keeps some elements.

        Raises:
          FileError: a file cannot be made, read or written.
        """
        buckets: dict[tuple[Groups, shards.Bucket], dict[int, str]] = {}  # names by slot
        for name, leaf in self.shards.items():
            if isinstance(leaf, shards.Sharded | shards.Fixed) and leaf.bucket is not None:
                buckets.setdefault((self.homes[name], leaf.bucket), {})[leaf.slot] = name
            elif isinstance(leaf, shards.Fixed):
                whole = torch.zeros(leaf.shape, dtype=leaf.dtype, device=self.homes[name].device)
                self._copy(source(name), whole.view(-1), 0)
                self.shards[name] = replace(leaf, data=whole)
        for (home, bucket), by_slot in buckets.items():
            self._fill_bucket(home, bucket, [by_slot[slot] for slot in sorted(by_slot)], source)

    def _fill_bucket(
        self, home: Groups, bucket: shards.Bucket, names: list[str], source: Callable[[str], Read]
    ) -> None:
        """Fill this rank's chunk of a bucket in memory, and put it in its place."""
        chunk = home.hierarchy.route.chunk
        flat = torch.zeros(bucket.chunk, dtype=bucket.dtype, device=home.device)
        parts = zip(
            names,
            shards.pieces(bucket, chunk),
            shards.split_chunk(bucket, chunk, flat),
            strict=True,
        )
        for name, piece, data in parts:
            if piece.length:
                self._copy(source(name), data, piece.origin)
        self._parts.check_others()
        places = [self._where.at(name).params.seen_from(home.device) for name in names]
        placed = shards.place_chunk(home, bucket, flat, places, names, self._where.host_bytes)
        for name, data in zip(names, placed, strict=True):
            self.shards[name] = replace(self.shards[name], data=data)  # pyright: ignore

    def _copy(self, read: Read, data: Tensor, origin: int) -> None:
        """Fill memory with the elements of a leaf from an index on."""
        step = max(1, BLOCK_BYTES // data.itemsize)
        for low in range(0, len(data), step):
            self._parts.check_others()
            part = data[low : low + step]
            part.copy_(read(origin + low, origin + low + len(part)))

    def _add_up(self, home: Groups) -> None:
        """Take the checksums that `check_copies` compares, which reads what lies in files."""
        found: dict[str, Tensor] = {}
        if home.num_replicas == 1:
            return
        for name, leaf in self.shards.items():
            if self.homes[name] is home and isinstance(leaf, shards.Sharded | shards.Fixed):
                self._parts.check_others()
                found[f"params.{name}"] = shards.checksum_of(leaf.data.view(-1))
        if found:
            self._sums[home] = list(found), torch.stack([*found.values()]).to(home.device)

    def check_copies(self) -> None:
        """Compare this rank's shards with those of the ranks that keep the same part.

        Each rank made or read its values alone, so they differ if its machine computes otherwise.

        Communication: 8 bytes per leaf.

        Raises:
          DesyncError: on every rank, with the first leaf that differs and the ranks that differ.
        """
        fix = "let all ranks make or read the same values, on machines that compute alike"
        for home, (paths, sums) in self._sums.items():
            refuse_unequal(self.verb, home, paths, sums, fix)


def load_shards(
    path: reading.Source,
    groups: Any,
    *,
    like: nn.Module | Mapping[str, Tensor] | None = None,
    names: Callable[[str], str | None] | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    trust: bool = False,
    **options: Unpack[shards.LayoutOptions],
) -> dict[str, shards.Leaf]:
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
      options: `frozen`, `precision`, `bucket_bytes`, `order`, `bucket` and `where` as for `shard`;
        by default leaves lie in buckets in the order of `like`.

    Returns:
      The shards by name, as `shard` would give them for the same tensors in full.

    Communication: digests of the tree and the shards (tens of bytes per leaf).

    Memory: this rank's shards, and 16 MiB at a time while it reads; the memory that a tensor lies
      in, if it was saved with strides of its own.

    Raises:
      FileError: the file is damaged, is cut while it is read, holds something else than tensors,
        or is not a regular file; it names the file and the leaf.
      LeafError: the file does not match `like`.
      OSError: there is no such file, which is a `FileNotFoundError` and a `FileError`; or it cannot
        be opened.
      FileError: with `where=`, a scratch file cannot be made or written; a `PeerFileError`
        with the same file and leaf on all other ranks.
      DesyncError: one of the others happened on some ranks only, or the ranks read different names,
        shapes or values.
      LeafError, PlanError: as `shard`.

    Example:
      >>> groups = make_groups(1)
      >>> load_shards({"w": torch.ones(2, 3)}, groups, like={"w": torch.empty(2, 3).double()})
      {'w': Sharded(shape=(2, 3), float64, here 6 of 6)}
    """
    how = {"like": like, "names": names, "strict": strict, "dtype": dtype, "trust": trust}
    return read_shards("load_shards", path, groups, how, {**options})


def read_shards(
    verb: str, path: reading.Source, groups: Any, how: Mapping[str, Any], options: dict[str, Any]
) -> dict[str, shards.Leaf]:
    """`load_shards` for a verb of any name; `how` has all its arguments but the options."""
    like, dtype = how["like"], how["dtype"]
    shards.require_groups(verb, groups)
    with ExitStack() as opened:
        with in_step(verb, groups, ""):
            if dtype is not None:
                shards.check_dtype(verb, "dtype", dtype)
            checks.flag(verb, "strict", how["strict"])
            checks.options(verb, options, shards.LayoutOptions.__annotations__)
            found = opened.enter_context(reading.open_weights(verb, path, trust=how["trust"]))
            found = reading.renamed(found, how["names"])
            params, others = _wanted(like, found)
            if dtype is not None:
                params = _cast(params, dtype)
            sources = reading.matched(verb, found, params, others, strict=how["strict"])
        if like is not None:
            options.setdefault("order", tree.own_order(params))
        filling = Filling(verb, params, groups, options)
        with filling.under_way():
            filling.fill(lambda name: sources[name].read)
    filling.check_copies()
    return filling.shards


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
    return {name: cast[owner] for name, owner in zip(params, shards.owners_of(values), strict=True)}
