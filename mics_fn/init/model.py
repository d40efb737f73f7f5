"""`load_shards` and `init_model`: shards of what no rank ever holds in full.

A path is a file, an index (`*.index.json`) that names the file of each tensor, a DCP directory, or
a folder with one of these. Whatever it is, and for a mapping of tensors too, `open_weights` gives
an `Entry` for each tensor by name, from which any range of elements can be read.

Shards are filled bucket by bucket, so of chunks that live in files, or as codes, one is in memory
as values at a time.

What `init_model` gives of the module is a copy, as `copy.deepcopy` makes it, in which parameters
are on meta; recorded tensors are made where the copy comes upon them. A model whose tensors belong
to other code stays as it is.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from mics_fn import _torch, checks, shards, tree
from mics_fn._torch import compiled_call
from mics_fn.collectives import checksum, refuse_unequal, together
from mics_fn.errors import FileError, LeafError, PlanError, message, name_some
from mics_fn.groups import Groups
from mics_fn.init import files
from mics_fn.init.files import Entry, File, Weights
from mics_fn.init.tape import META, Recorded, Recorder, marks_of
from mics_fn.offload import Where

# Weights that are read: which files a path stands for, and which parameter takes which tensor.

NAMES = ("model.safetensors", "pytorch_model.bin")  # in a folder; or an index of such
_IN_FOLDER = [found for name in NAMES for found in (name, f"{name}.index.json")]
_IN_FOLDER += [files.METADATA]
Source = str | PathLike | Mapping[str, Tensor]


@contextmanager
def open_weights(verb: str, source: Source, *, trust: bool) -> Iterator[Weights]:
    """The tensors of a file, a folder, an index or a mapping, by name.

    Args:
      verb: for errors.
      source: a path, or tensors by name.
      trust: whether files in a folder, or named in a file, may be links or lie elsewhere.

    Raises:
      FileError: the file is damaged, or holds something else.
      OSError: there is no such file, or it cannot be opened.
      PlanError: `trust` is not a bool.
    """
    if isinstance(source, Mapping):
        yield {key: _of_tensor(value.detach()) for key, value in source.items()}
        return
    checks.choice(verb, "trust", trust, True, False)
    with ExitStack() as opened:
        path = Path(source)
        if path.is_dir():
            path = _file_in(verb, path, trust)
        file = File(verb, path)
        opened.callback(file.close)
        if path.name == files.METADATA:
            yield files.of_dcp(file, trust=trust)
        elif path.suffix == ".json":
            yield _of_index(file, trust, opened)
        else:
            yield _of_file(file)


def _file_in(verb: str, folder: Path, trust: bool) -> Path:
    """The file of weights in a folder."""
    for found in _IN_FOLDER:
        if not (folder / found).exists():
            continue
        reason = files.refusal(folder, found, trust=trust)
        if reason:
            what = f"{verb}: {folder / found} is not opened: {reason}"
            raise FileError(message(what, fix=files.TRUST), str(folder / found))
        return folder / found
    fix = f"pass the file itself; looked for {' and '.join(NAMES)}, their .index.json, and"
    fix += f" {files.METADATA} of torch.distributed.checkpoint"
    raise FileError(message(f"{verb}: no weights in the folder {folder}", fix=fix), str(folder))


def _of_file(file: File) -> Weights:
    """The tensors of a file that holds them itself."""
    is_zip = file.size > 4 and file.read(0, 4) == b"PK\3\4"
    return files.of_torch(file) if is_zip else files.of_safetensors(file)


def _of_index(index: File, trust: bool, opened: ExitStack) -> Weights:
    """The tensors of the files that an index names."""
    wrong = "has no weight_map of names to files"
    file_of = files.read_json(index, 0, index.size, wrong).get("weight_map")
    if not isinstance(file_of, dict):
        raise index.error(wrong, fix="pass an index as transformers saves it")
    found: dict[str, Weights] = {}
    for leaf, name in file_of.items():
        if not isinstance(name, str) or name not in found:
            file = index.named(name, leaf, trust=trust)
            opened.callback(file.close)
            found[name] = _of_file(file)
        if leaf not in found[name]:
            line = f"it should be in {files.shown(name)}"
            raise index.error("does not match its files", [line], leaf, files.TOGETHER)
    return {leaf: found[name][leaf] for leaf, name in file_of.items()}


def _of_tensor(value: Tensor) -> Entry:
    return Entry(tuple(value.shape), value.dtype, lambda low, high: value.reshape(-1)[low:high])


# What to read for each parameter.

SHOWN = 5  # at most so many mismatches are listed


def renamed(found: Weights, names: Callable[[str], str | None] | None) -> Weights:
    """The tensors of a file under the names of parameters, without those that have none."""
    if names is None:
        return found
    new = {name: names(name) for name in found}
    return {own: found[name] for name, own in new.items() if own is not None}


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
      LeafError: a tensor is missing, not expected, or of another shape or kind.
    """
    same: dict[int, list[str]] = {}
    for name, owner in zip(params, shards.owners_of(list(params.values())), strict=True):
        same.setdefault(owner, []).append(name)
    sources: Weights = {}
    wrong = list[str]()
    for aliases in same.values():
        given = [name for name in aliases if name in found]
        for name in given:
            wrong += _difference("params", name, params[name], found[name])
        if given:
            sources |= {name: found[name if name in given else given[0]] for name in aliases}
        elif missing is None or not all(
            checks.answer(verb, f"missing({name!r})", missing(name)) for name in aliases
        ):
            wrong.append(f"params.{aliases[0]} is missing")
    for name, value in others.items():
        if name in found and value is not None:
            wrong += _difference("buffers", name, value, found[name])
            sources[name] = found[name]
    if strict:
        rest = [name for name in found if name not in params and name not in others]
        wrong += [f"{name!r} is not expected" for name in rest]
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        fix = "load what was saved for this model; names= can rename or ignore tensors, missing= of"
        fix += " init_model says which are new, strict=False of load_shards takes a file with more"
        text = f"{verb}: the weights do not match the parameters"
        raise LeafError(text, wrong[:SHOWN] + more, fix=fix)
    return sources


def _difference(root: str, name: str, want: Tensor, got: Entry) -> list[str]:
    if tuple(want.shape) != got.shape:
        return [f"{root}.{name}: expected shape {tuple(want.shape)}, got {got.shape}"]
    if want.is_floating_point() != got.dtype.is_floating_point:
        kinds = shards.dtype_name(want.dtype), shards.dtype_name(got.dtype)
        return [f"{root}.{name}: expected {kinds[0]}, got {kinds[1]}"]
    return []


# The structure of a model: its parameters on meta, and everything else that it holds as it is.


def refuse_lazy(model: nn.Module) -> None:
    """Raise LeafError for a model whose parameters have no shape yet."""
    if any(nn.parameter.is_lazy(value) for value in (*model.parameters(), *model.buffers())):
        text = f"Trainer: the {type(model).__name__} has parameters without a shape yet"
        raise LeafError(text, fix="call it once on a batch, which gives them one")


def warn_of_compile(model: nn.Module, stacklevel: int) -> None:
    """Warn of modules that `compile()` was called on, which a skeleton has not."""
    found = [f"model.{k}".rstrip(".") for k, x in model.named_modules() if compiled_call(x)]
    if found:
        text = f"init_model: compile() of {name_some(found)} is dropped: it runs eagerly"
        fix = "call mf.compile_blocks(skeleton, pattern), or give Trainer compile=pattern"
        warnings.warn(message(text, fix=fix), stacklevel=stacklevel)


def on_meta_copy(model: nn.Module, values: Sequence[Tensor]) -> nn.Module:
    """A copy of a model in which some of its parameters and buffers are on meta; tied ones are one.

    A tensor that an op has made of parameters is None in it, since it is out of date after a step:
    `weight_norm` and `prune` make theirs again in each forward.

    Args:
      model: the model.
      values: those parameters and buffers.
    """
    made = [x for each in model.modules() for x in vars(each).values() if isinstance(x, Tensor)]
    memo: dict[int, Any] = {id(x): None for x in made if not x.is_leaf}
    for x, owner in zip(values, shards.owners_of(values), strict=True):
        first = values[owner]
        memo[id(x)] = memo.setdefault(id(first), meta_like(first))
    return copy_with(model, memo)


def copy_with(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a model, with other objects in the place of some, by their ids."""
    try:
        return copy.deepcopy(model, dict(memo))
    except TypeError:  # of a lock, a file or a process group, which the copy shares with the model
        for module in model.modules():
            for key, value in vars(module).items():
                try:
                    if key != "_modules":
                        copy.deepcopy(value, dict(memo))
                except TypeError:
                    memo[id(value)] = value
        return copy.deepcopy(model, memo)


def meta_like(x: Tensor) -> Tensor:
    """A plain tensor of the same shape and strides on meta; a parameter gives a parameter."""
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
    made = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
    vars(made).update(marks_of(x))
    return made


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
        is_group = lambda value: isinstance(value, Groups)  # noqa: E731
        homes = tree.spread(groups, params, what="groups", is_value=is_group)
        on, owners = dict(zip(names, homes, strict=True)), shards.owners_of([*params.values()])
        parts = [_part_like(verb, name, x, on[name]) for name, x in params.items()]
        given = {name: parts[own] for name, own in zip(params, owners, strict=True)}
        self.groups: list[Groups] = list(dict.fromkeys(homes))
        for home in self.groups:
            # Even if this tree was compared before, another rank may now come with a different one.
            home.agreed.difference_update([seen for seen in home.agreed if seen[0] == verb])
        shapes = shards.layout_of(verb, "params", given, groups, **options)
        homes = shards.homes_of(verb, groups, shapes)  # those of copies
        self.verb = verb
        self.homes: dict[str, Groups] = dict(zip(names, homes, strict=True))
        leaves = dict(zip(names, tree.flatten(shapes, shards.is_leaf)[0], strict=True))
        self.shards: dict[str, shards.Leaf] = {name: leaves[name] for name in params}
        trained = [f"params.{k}" for k, leaf in leaves.items() if isinstance(leaf, shards.Sharded)]
        shards.refuse_overlaps(verb, {f"params.{k}": value for k, value in params.items()}, trained)
        self._where = Where.parse(options.get("where"))

    def fill(self, source: Callable[[str], Read], then: Callable[[], Any] = lambda: None) -> Any:
        """Give this rank's part of each leaf its values, one bucket after the other.

        Afterwards shards are compared with those of the ranks that keep the same part: each rank
        made or read its values alone, so they differ if its machine computes otherwise.

        Args:
          source: asked once for each leaf of which this rank keeps some elements.
          then: what else is to be made; if it raises on some ranks, all of them raise.

        Returns:
          What `then` gave.

        Communication: as `together`; 8 bytes per leaf.

        Raises:
          FileError: a file cannot be made, read or written, on some rank; on all of them.
          DesyncError: the block raised on other ranks, or shards differ, with the first leaf that
            does.
        """
        buckets: dict[tuple[Groups, shards.Bucket], dict[int, str]] = {}  # names by slot
        with together(self.verb, self.groups):
            for name, leaf in self.shards.items():
                if isinstance(leaf, shards.Sharded | shards.Fixed) and leaf.bucket is not None:
                    buckets.setdefault((self.homes[name], leaf.bucket), {})[leaf.slot] = name
                elif isinstance(leaf, shards.Fixed):
                    whole = torch.zeros(
                        leaf.shape, dtype=leaf.dtype, device=self.homes[name].device
                    )
                    self._copy(source(name), whole.view(-1), 0)
                    self.shards[name] = replace(leaf, data=whole)
            for (home, bucket), by_slot in buckets.items():
                self._fill_bucket(home, bucket, [by_slot[i] for i in sorted(by_slot)], source)
            made = then()
            each = dict.fromkeys(self.homes.values())
            sums = {home: self._sums(home) for home in each if home.num_replicas > 1}
        fix = "let all ranks make or read the same values, on machines that compute alike"
        for home, found in sums.items():
            refuse_unequal(self.verb, home, found, fix)
        return made

    def _fill_bucket(
        self, home: Groups, bucket: shards.Bucket, names: list[str], source: Callable[[str], Read]
    ) -> None:
        """Fill this rank's chunk of a bucket in memory, and put it in its place."""
        chunk = home.hierarchy.route.chunk
        flat = torch.zeros(bucket.chunk, dtype=bucket.dtype, device=home.device)
        found = shards.pieces(bucket, chunk), shards.pack.split_chunk(bucket, chunk, flat)
        for slot, (name, piece, data) in enumerate(zip(names, *found, strict=True)):
            if piece.length:
                read = source(name)
                if bucket.cut and home.model is not None:
                    read = _of_part(read, bucket.shapes[slot], bucket.cut[slot], home.model.parts)
                self._copy(read, data, piece.origin)
        places = [self._where.at(name, "params", home.device) for name in names]
        placed = shards.place_chunk(home, bucket, flat, places, names, self._where.host_bytes)
        for name, data in zip(names, placed, strict=True):
            self.shards[name] = replace(self.shards[name], data=data)  # pyright: ignore

    def _copy(self, read: Read, data: Tensor, origin: int) -> None:
        """Fill memory with the elements of a leaf from an index on."""
        step = max(1, BLOCK_BYTES // data.itemsize)
        for low in range(0, len(data), step):
            part = data[low : low + step]
            part.copy_(read(origin + low, origin + low + len(part)))

    def _sums(self, home: Groups) -> dict[str, Tensor]:
        """The checksums that ranks compare, which reads what lies in files."""
        return {
            f"params.{name}": checksum(leaf.data.view(-1)).to(home.device)
            for name, leaf in self.shards.items()
            if self.homes[name] is home and isinstance(leaf, shards.Sharded | shards.Fixed)
        }


def _part_like(verb: str, name: str, x: Tensor, home: Groups) -> Tensor:
    """A tensor on meta like the part of a full one that this rank has; a copy is as it is."""
    model = home.model
    if model is None or _torch.is_dtensor(x) or not x.is_floating_point():
        return x
    if (dim := model.cut(name)) is None:
        return x
    if x.shape[dim] % model.parts.size:
        text = f"{verb}: params.{name} of {tuple(x.shape)} is cut unevenly along dim {dim}"
        raise LeafError(text, fix=f"pad it to a multiple of {model.parts.size}")
    made = meta_like(x).detach().chunk(model.parts.size, dim)[0]
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def _of_part(read: Read, sizes: Sequence[int], dim: int, parts: Any) -> Read:
    """Reads of a part of a leaf, each with what lies in the leaf between its elements."""
    inner = prod(sizes[dim:])  # so many of them lie together

    def part(start: int, stop: int) -> Tensor:
        index = torch.arange(start, stop)
        index += (index // inner * (parts.size - 1) + parts.rank) * inner
        low = int(index[0])
        return read(low, int(index[-1]) + 1).reshape(-1)[index - low]

    return part


def load_shards(
    path: Source,
    groups: Any,
    *,
    like: nn.Module | Mapping[str, Tensor] | None = None,
    names: Callable[[str], str | None] | None = None,
    strict: bool = True,
    trust: bool = False,
    **options: Unpack[shards.LayoutOptions],
) -> dict[str, shards.Leaf]:
    """Shards of the parameters in a file; each rank reads only its own part.

    Args:
      path: a safetensors file, a file of `torch.save` (a state dict), an index of such files, or
        a folder with one of these, as transformers saves them; a folder that
        torch.distributed.checkpoint wrote; or a mapping of tensors by name.
      groups: as for `shard`. Leaves of a model in parts are in full in the file, and in `like`:
        each rank reads its part.
      like: a module, or tensors by name, whose data is not read and may be on meta. It says which
        parameters there are, with their shapes, dtypes, ties and `requires_grad`. None takes all
        tensors of the file.
      names: gives the parameter's name for a name in the file, or None to ignore that tensor.
      strict: whether a tensor that `like` does not have is an error. A tensor that is missing
        always is one. Buffers of a module are ignored.
      trust: whether a file in a folder, or one that an index names, may be a symbolic link or lie
        elsewhere, as in a cache of Hugging Face. Nothing in a file is run in any case.
      options: `frozen`, `precision`, `bucket_bytes`, `order`, `bucket` and `where` as for `shard`;
        by default leaves lie in buckets in the order of `like`. The dtype of shards is that of
        `like`, or else that of the file; `precision="param=bfloat16"` says another one.

    Returns:
      The shards by name, as `shard` would give them for the same tensors in full.

    Communication: digests of the tree and the shards (tens of bytes per leaf).

    Memory: this rank's shards, and 16 MiB at a time while it reads, for each part of the model that
      a leaf is cut in, with 24 bytes per element then; the memory that a tensor lies in, if it was
      saved with strides of its own.

    Raises:
      FileError: the file is damaged, is cut while it is read, holds something else than tensors,
        or is not a regular file; it names the file and the leaf.
      LeafError: the file does not match `like`.
      OSError: there is no such file, or it cannot be opened.
      FileError: with `where=`, a scratch file cannot be made or written on some rank; on all of
        them, with the same text, which names the rank.
      DesyncError: one of the others happened on some ranks only, or the ranks read different names,
        shapes or values.
      LeafError, PlanError: as `shard`.

    Example:
      >>> groups = make_groups(1)
      >>> load_shards({"w": torch.ones(2, 3)}, groups, like={"w": torch.empty(2, 3).double()})
      {'w': Sharded(shape=(2, 3), float64, here 6 of 6)}
    """
    verb = "load_shards"
    shards.require_groups(verb, groups)
    with ExitStack() as opened:
        with together(verb, groups):
            found = opened.enter_context(open_weights(verb, path, trust=trust))
            found = renamed(found, names)
            params, others = _wanted(like, found)
            sources = matched(verb, found, params, others, strict=strict)
        if like is not None:
            options.setdefault("order", tree.own_order(params))
        filling = Filling(verb, params, groups, {**options})
        filling.fill(lambda name: sources[name].read)
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


def init_model(
    model_fn: Callable[[], nn.Module],
    groups: Any,
    *,
    seed: int,
    weights: Source | None = None,
    names: Callable[[str], str | None] | None = None,
    missing: Callable[[str], bool] | None = None,
    trust: bool = False,
    **options: Unpack[shards.LayoutOptions],
) -> tuple[nn.Module, dict[str, shards.Leaf]]:
    """Make a model as shards; no rank ever holds more of it than its part and one parameter.

    What `model_fn` does is recorded without data. Then the parameters are made one after the other,
    each with the random numbers that it would have had, and this rank keeps its part. All values
    are, bit for bit, those of `torch.manual_seed(seed); model_fn()` on the device of the groups,
    and torch's generators end in the same states. This takes somewhat longer, because every rank
    draws all numbers. What cannot be recorded or repeated, such as memory that numpy writes to, is
    an error: make such a model in full, and `shard` it.

    Args:
      model_fn: makes the model, with the device of the groups as torch's default device. It may
        read values, set seeds and draw random numbers as it likes.
      groups: as for `shard`. `model_fn` makes a model in parts in full: each rank keeps its part.
      seed: for `torch.manual_seed`, the same on all ranks.
      weights: a file or a mapping with the values of all parameters and persistent buffers, as for
        `load_shards`. No parameter is then drawn, and the generators stay as the seed sets them.
        A buffer that is not there is as `model_fn` makes it.
      names: gives the parameter's name for a name in the weights, or None to ignore that tensor.
      missing: whether the weights may lack a parameter, by its name. It then has the value that
        `model_fn` gives it, such as adapters that are new.
      trust: of the files of weights, as for `load_shards`.
      options: `frozen`, `precision`, `bucket_bytes`, `order`, `bucket` and `where` as for `shard`;
        by default leaves lie in buckets in the order of the module.

    Returns:
      The module, with its parameters on meta and its buffers in full on the device, ready for
      `functional_call(module, gather(shards, groups), args)`; and the shards by name, as `shard`
      gives them for `dict(model.named_parameters(remove_duplicate=False))`. Tied parameters stay
      tied, and frozen ones stay frozen.

    Communication: digests of the seed, the tree and the shards (tens of bytes per leaf).

    Memory: this rank's shards, the buffers, and what making a single parameter takes; 5 KB for each
      draw.

    Raises:
      DesyncError: the ranks gave different seeds, or made different trees or values.
      LeafError: something in `model_fn` cannot be recorded or repeated.
      RuntimeError: the module holds a tensor that an op made of parameters, which has no copy.
      LeafError, PlanError: as `shard` and, with weights, `load_shards`.
      FileError, OSError: with weights, as `load_shards`.
      FileError: with `where=`, as `load_shards`.

    Example:
      >>> groups = make_groups(1)
      >>> model, shards = init_model(lambda: torch.nn.Linear(2, 3), groups, seed=0)
      >>> shards["weight"], model.weight.is_meta
      (Sharded(shape=(3, 2), float32, here 6 of 6), True)
      >>> full = gather(shards, groups)
      >>> torch.func.functional_call(model, full, torch.ones(1, 2)).shape
      torch.Size([1, 3])

    References: the deferred initialisation of torchdistX, which also records ops and replays them.
    """
    shards.require_groups("init_model", groups)
    homes = [home for home in tree.flatten(groups)[0] if isinstance(home, Groups)]
    device = homes[0].device if homes else torch.get_default_device()
    with ExitStack() as opened:
        with together("init_model", groups, f"seed={seed}"):
            checks.integer("init_model", "seed", seed, 0, fix="pass the same number on all ranks")
            if weights is None and (names is not None or missing is not None):
                text = "init_model: names= and missing= are about weights=, which is not given"
                raise PlanError(text, fix="pass weights=, or leave them out")
            made = _Construction(model_fn, device, seed)
            sources: Weights = {}
            if weights is not None:
                given = open_weights("init_model", weights, trust=trust)
                found = renamed(opened.enter_context(given), names)
                wanted = made.params, made.saved_buffers()
                sources = matched("init_model", found, *wanted, missing=missing)
        options.setdefault("order", tree.own_order(made.params))
        filling = Filling("init_model", made.params, groups, {**options})
        skeleton = filling.fill(
            lambda name: sources[name].read if name in sources else made.read(name),
            then=lambda: made.skeleton(sources),
        )
    warn_of_compile(made.model, stacklevel=3)
    return skeleton, filling.shards


class _Construction:
    """A model that is recorded, and whose values are made one after the other.

    Args:
      model_fn: makes it.
      device: for the tensors of the model.
      seed: for `torch.manual_seed`.

    Raises:
      NotRecorded: it cannot be recorded.
    """

    def __init__(self, model_fn: Callable[[], nn.Module], device: torch.device, seed: int) -> None:
        self.recorder = recorder = Recorder()
        try:
            torch.manual_seed(seed)
            with torch.device(device), recorder:
                self.model = model_fn()
            recorder.finish()
        finally:
            recorder.forget()
        self.params = dict(self.model.named_parameters(remove_duplicate=False))

    def saved_buffers(self) -> dict[str, Tensor | None]:
        """Return the entries of a state dict besides parameters; None for other than buffers."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        saved = self.model.state_dict(keep_vars=True)
        return {name: buffers.get(name) for name in saved if name not in self.params}

    def read(self, name: str) -> Read:
        """Make the value of a parameter, of which parts are then read."""
        value = self.params[name]
        value = self.recorder.value(value) if isinstance(value, Recorded) else value
        flat = value.detach().reshape(-1)
        return lambda low, high: flat[low:high]

    def skeleton(self, sources: Weights) -> nn.Module:
        """Return a copy of the model with its parameters on meta, and everything else real.

        Args:
          sources: what is read; then all generators stay as the seed sets them.
        """
        model = on_meta_copy(self.model, list(self.params.values()))
        if not sources:
            self.recorder.finish_generators()
        with torch.no_grad():
            for name, value in model.named_buffers(remove_duplicate=False):
                if name in sources:
                    value.copy_(sources[name].read(0, value.numel()).view(value.shape))
        return model
