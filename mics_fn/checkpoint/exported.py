"""Parameters on their way into files of others: in what order, and on which rank.

Others keep whole tensors, while a rank has a piece of each. So the leaves are dealt to files of
bounded size, and the files to the ranks of the first partition group, of each part of the model.
They gather what the files of one *round* need, one bucket after the other, and join the parts of
one leaf after the other; each keeps what belongs to its file and drops the rest. Then all write at
once. Other replicas do not take part, since between two synchronisations their values may be their
own.

`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, flattened as torchtitan does,
has `state.<parameter>.<moment>` for tensors and `param_groups.<parameter>.<option>` for options.

Each file of such a directory has values in the form of `torch.save`, one after the other; the
first rank writes `.metadata`, which says where each lies. How such a directory is read without
running anything in it is described in `init/files.py`.
"""

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mics_fn import _torch, checks, shards, tree
from mics_fn.checkpoint import directory
from mics_fn.collectives import agree, together
from mics_fn.errors import FileError, LeafError, PlanError, message
from mics_fn.groups import Groups
from mics_fn.optim import TrainState, by_leaf


class Saved(NamedTuple):
    """A tensor that is written, whole and once."""

    name: str  # in the file
    key: str  # in the parameters, of the leaf that has its data
    shape: tuple[int, ...]
    dtype: torch.dtype  # in the file
    bucket: int  # its number; -1 for a tensor that every rank has in full
    tree: int = 0  # of several trees with the same buckets
    dim: int | None = None  # along which it is joined of parts
    also: tuple[str, ...] = ()  # its other names, if it is tied

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


Files = Sequence[Sequence[Saved]]  # what each file has


def saved_leaves(
    verb: str, params: Any, groups: Groups, names: Any, dtype: torch.dtype | None
) -> list[Saved]:
    """What is written of parameters, in the order of their buckets.

    Args:
      verb: for errors.
      params: shards by name; and tensors that every rank has in full, such as buffers.
      groups: as for `gather`.
      names: gives the name in the file for a name of a parameter, or None to leave it out.
      dtype: the dtype of floating-point tensors in the file; None for that of the shards.

    Raises:
      LeafError: none is left, or two get the same name.
      PlanError, DonatedError: as `gather`.
    """
    if not isinstance(params, Mapping):
        fix = "pass shards by name, such as state.params"
        raise LeafError(f"{verb}: params is {type(params).__name__}", fix=fix)
    if dtype is not None:
        shards.check_dtype(verb, "dtype", dtype)
    cut = {key: value for key, value in params.items() if shards.is_leaf(value)}
    opened = shards.open_shards(verb, cut, groups, root="params")
    keys = tree.flatten({key: key for key in cut})[0]
    owner = {key: keys[at] for key, at in zip(keys, opened.layout.owner, strict=True)}
    rename = names or (lambda name: name)
    found: dict[str, Saved] = {}  # by the leaf with the data, so that tied ones are written once
    key_of: dict[str, str] = {}  # by the name in the file
    for key, value in params.items():  # of tied names the first one, as a module lists them
        own, name = owner.get(key, key), rename(key)
        if name is None or isinstance(value, shards.Nothing):
            continue
        if key_of.setdefault(name, key) != key:
            what = f"{verb}: params.{key_of[name]} and params.{key} would both be {name!r}"
            raise LeafError(what, fix="let names= give each its own name, or None")
        if own in found:
            found[own] = found[own]._replace(also=(*found[own].also, name))
        else:
            found[own] = saved(verb, name, own, params[own], dtype)
    if not found:
        raise LeafError(f"{verb}: there is no leaf to write", fix="pass parameters")
    return sorted(found.values(), key=lambda leaf: leaf.bucket)


def saved(
    verb: str, name: str, key: str, leaf: Any, dtype: torch.dtype | None = None, tree: int = 0
) -> Saved:
    """How a leaf is written: a shard, or a tensor that every rank has in full.

    Raises:
      LeafError: it is a piece in another dtype than its bucket, so that gathering it would round;
        or a tensor that could not be loaded as a shard.
    """
    data = leaf.data if shards.is_leaf(leaf) else leaf
    if data is leaf:
        where = f"params.{key}"
        shards.check_tensor(verb, where, directory.savable(verb, where, data), data.device)
    bucket = getattr(leaf, "bucket", None)
    if bucket is not None and data.dtype != bucket.dtype:
        what = f"{verb}: {key} is {data.dtype} in a bucket of {bucket.dtype}"
        raise LeafError(what, fix="write it from a tree that was sharded in that dtype")
    kind = dtype if dtype is not None and data.dtype.is_floating_point else data.dtype
    dim = bucket.cut[leaf.slot] if bucket is not None and bucket.cut else None
    index = -1 if bucket is None else bucket.index
    return Saved(name, key, tuple(leaf.shape), kind, index, tree, dim)


def in_files(verb: str, leaves: Sequence[Saved], max_file_bytes: float | str) -> list[list[Saved]]:
    """Leaves by file, each of at most so many bytes; a leaf that is larger has its own.

    Raises:
      PlanError: `max_file_bytes` is not a positive number.
    """
    most = checks.nbytes(verb, "max_file_bytes", max_file_bytes, 1)
    files: list[list[Saved]] = [[]]
    room = most
    for leaf in leaves:
        if files[-1] and leaf.nbytes > room:
            files.append([])
            room = most
        files[-1].append(leaf)
        room -= leaf.nbytes
    return files


@torch.no_grad()
def rounds(
    params: Mapping[str, Any], groups: Groups, files: Files
) -> Iterator[tuple[int | None, dict[str, Tensor]]]:
    """What this rank writes, round after round; all ranks have the same number of rounds.

    Yields:
      The number of a file, None if this rank writes none; and what is in it, by name.

    Communication: in the first partition group, an all-gather of each bucket once per round in
      which it is needed, and one over the parts of the model of each leaf that is cut; no other
      rank sends anything.

    Memory: the tensors of one file, and a bucket twice; of a model in parts a leaf twice besides.
      What a round gave is freed by the next.
    """
    writers = _writers(groups)
    here = writers.index(groups.rank) if groups.rank in writers else None
    for start in range(0, len(files), len(writers)):
        batch = files[start : start + len(writers)]
        mine = set(batch[here]) if here is not None and here < len(batch) else set()
        kept: dict[str, Tensor] = {}
        every = [] if here is None else sorted(chain(*batch), key=_bucket_of)
        for _, group in groupby(every, key=_bucket_of):
            leaves = list(group)
            cut = {x.key: params[x.key] for x in leaves if shards.is_leaf(params[x.key])}
            full = shards.unshard(cut, groups.hierarchy)
            for leaf in leaves:
                given = params[leaf.key]
                x = full.pop(leaf.key, given)
                if leaf.dim is not None:
                    x = shards.join_parts(groups, given, x)
                if leaf not in mine:
                    continue
                copy = x is given  # its memory may be that of others
                kept[leaf.name] = x.detach().to("cpu", leaf.dtype, copy=copy).contiguous()
        yield (start + (here or 0) if mine else None), kept
        kept.clear()  # so that nobody holds two files


def _bucket_of(leaf: Saved) -> tuple[int, int]:
    return leaf.tree, leaf.bucket


def _writers(groups: Groups) -> list[int]:
    """The global ranks that write: of each part of the model those of its first replica."""
    return [ranks[i] for ranks in groups.dp_ranks for i in groups.plan.partition_groups[0]]


def _as_whole(leaf: Saved, parts: int) -> Saved:
    """How a leaf is written if it is joined of parts."""
    shape = [n * parts if i == leaf.dim else n for i, n in enumerate(leaf.shape)]
    return leaf._replace(shape=tuple(shape))


# The directory, which is there as a whole or not at all.


def free_path(verb: str, path: str | os.PathLike) -> Path:
    """The absolute path of a directory that is still to be written.

    Raises:
      FileError: something is there that would be lost.
    """
    checks.path(verb, "path", path)
    real = Path(os.path.realpath(path))
    if os.path.lexists(real) and not (real.is_dir() and not any(real.iterdir())):
        fix = "pass a new path, or move away what is there; nothing is overwritten"
        text = f"{verb}: {real} is neither new nor an empty directory"
        raise FileError(message(text, fix=fix), str(real))
    return real


def export(
    verb: str,
    path: Any,
    params: Mapping[str, Any],
    groups: Any,
    options: Mapping[str, Any],
    write: Callable[[Path, Files, int, dict[str, Tensor]], Any],
    finish: Callable[[Path, Files, list[Any]], None],
    more: Callable[[list[Saved]], tuple[Mapping[str, Any], list[Saved]]] | None = None,
) -> None:
    """Write files into a folder beside the path, which gets its name when all are complete.

    A process that is killed may leave that folder behind; its name begins with a dot and ends with
    `.tmp`, and it can be deleted.

    Args:
      verb: for errors.
      path: what the folder will be called.
      params: shards and tensors by name.
      groups: whose ranks write, or wait until it is there.
      options: `names`, `dtype` and `max_file_bytes`.
      write: writes a file, and gives what the first rank is to know of it.
      finish: writes on the first rank what makes the rest readable.
      more: given the leaves of the parameters, gives other values, and all leaves to write.

    Communication: five small all-gathers over the partition group and over the replication group,
      two more for each round, and 32 bytes.

    Raises:
      GroupsError, LeafError, PlanError: an argument is not what it should be.
      FileError: some rank cannot write; on every rank.
      DesyncError: ranks differ in what they write; the first leaf is named.
    """
    shards.require_groups(verb, groups)
    shards.refuse_derivative(verb, (), "call it outside of torch.func")
    groups.partition.check_open()
    with together(verb, groups) as exchange:
        target, most, dtype = free_path(verb, path), options["max_file_bytes"], options["dtype"]
        exchange.fact = f"path={str(target)!r}, max_file_bytes={most}, {dtype}"
        leaves = saved_leaves(verb, params, groups, options["names"], dtype)
        if more is not None:
            others, leaves = more(leaves)
            params = {**params, **others}
        if groups.model is not None:
            if groups.model.stages.size > 1:
                fix = "save with checkpoint.save, and export from groups without stages"
                raise PlanError(f"{verb}: these are the leaves of one stage alone", fix=fix)
            leaves = [_as_whole(leaf, groups.model.parts.size) for leaf in leaves]
        files = in_files(verb, leaves, most)
    # Even if these were compared before, another rank may now come with different ones.
    groups.agreed.difference_update([seen for seen in groups.agreed if seen[0] == verb])
    agree(groups, verb, [(f"params.{x.key}", f"{x.name!r} {x.shape} {x.dtype}") for x in leaves])
    first = _writers(groups)[0]
    made, said = None, list[Any]()
    errors = partial(directory.write_errors, f"{verb}: cannot write", target)
    try:
        with together(verb, groups) as exchange, errors():
            if groups.rank == first:
                target.parent.mkdir(parents=True, exist_ok=True)
                exchange.mine = f".{target.name}.{secrets.token_hex(4)}.tmp"
                target.with_name(exchange.mine).mkdir()
                made = target.with_name(exchange.mine)
        folder = target.with_name(exchange.all[first])
        for number, tensors in rounds(params, groups, files):
            with together(verb, groups) as exchange, errors():
                if number is not None:
                    exchange.mine = write(folder, files, number, tensors)
            said += [each for each in exchange.all.values() if each is not None]
        with together(verb, groups), errors():
            if made is not None:
                finish(folder, files, said)
                directory.publish(made, target)
                made = None
    except BaseException:
        if made is not None:
            directory.remove_folder(made)
        raise


# What an optimizer keeps, under the names that torch gives it in a state dict.

OPTIMIZER = "optimizer."


def optimizer_leaves(
    verb: str, opt: Any, params: Sequence[Saved]
) -> tuple[dict[str, Any], list[Saved]]:
    """The moments and scalars of each trained leaf, by name; and how they are written.

    Args:
      verb: for errors.
      opt: the field `opt` of a `TrainState`.
      params: the parameters that are written; others are left out.

    Raises:
      PlanError: it is not, or does not contain, one optimizer with moments under names of torch.
    """
    found = tree.flatten(opt, lambda x: isinstance(getattr(x, "moments", None), dict))[0]
    found = [x for x in found if isinstance(getattr(x, "moments", None), dict)]
    if len(found) != 1:
        what = f"{verb}: the state has {len(found)} optimizers that torch has names for, expected 1"
        fix = "use adamw, adam, sgd, lion or from_torch, alone or in a chain; or pass state.params"
        raise PlanError(what, fix=fix)
    moments = {kind: by_leaf(moment) for kind, moment in found[0].moments.items()}
    values: dict[str, Any] = {}
    leaves: list[Saved] = []
    for param in params:
        kept = {kind: moment.get(param.key) for kind, moment in moments.items()}
        if not all(isinstance(leaf, shards.Sharded) for leaf in kept.values()):
            continue  # it is not trained
        for number, (kind, leaf) in enumerate({**kept, **found[0].scalars}.items(), start=1):
            name = f"{OPTIMIZER}state.{param.name}.{kind}"
            values[name] = leaf
            leaves.append(saved(verb, name, name, leaf, tree=number))
    return values, leaves


# `save_dcp`: directories of torch.distributed.checkpoint (DCP).

Place = tuple[str, tuple[str, int, int]]  # of a value: its name; its file, first byte and length


def save_dcp(
    path: str | os.PathLike,
    params: Mapping[str, Any] | TrainState,
    groups: Any,
    *,
    prefix: str = "",
    names: Callable[[str], str | None] | None = None,
    dtype: torch.dtype | None = None,
    param_group: Mapping[str, Any] | None = None,
    max_file_bytes: float | str = 1_000_000_000,
) -> None:
    """Write shards as a directory that `torch.distributed.checkpoint.load` reads.

    It reads them into a state dict of plain tensors or of DTensors (FSDP2, torchtitan), on any
    number of ranks; `load_shards` reads it, too. The directory is there as a whole or not at all.

    Args:
      path: of the directory, as for `save_pretrained`.
      params: as for `save_pretrained`; or a `TrainState`, of which the parameters are written and
        what its optimizer keeps for each of them: `optimizer.state.<parameter>.exp_avg` and so on,
        as `get_optimizer_state_dict` of torch names them, flattened, under "optimizer".
      groups: as for `gather`, one `Groups` for all leaves.
      prefix: what the names of parameters begin with: "model." for `dcp.load({"model": ...})`, and
        "" for torchtitan, which has these names at the top.
      names: as for `save_pretrained`; without the prefix.
      dtype: the dtype of floating-point parameters in the files; default that of the shards.
      param_group: with a `TrainState`, the options that an optimizer of torch keeps beside its
        tensors, such as `torch.optim.AdamW(...).param_groups[0]`: `lr`, `betas` and all others. If
        they are missing, torch loads the optimizer only with `allow_partial_load`. Those of the
        first rank are written.
      max_file_bytes: the most bytes of a file. A leaf that is larger has a file of its own.

    A tensor with several names is written once, and can be loaded by each of them.

    Communication: as `save_pretrained`; at the end about 100 bytes per leaf to all ranks.

    Memory: as `save_pretrained`.

    Raises:
      PlanError: the optimizer is not one of torch's.
      FileError, LeafError, GroupsError, PlanError, DonatedError, DesyncError,
      CollectiveError: as `save_pretrained`.

    Example:
      >>> import tempfile
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.adamw(0.1))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_dcp(f"{folder}/a", state, groups)
      ...     sorted(load_shards(f"{folder}/a", groups))
      ['optimizer.state.w.exp_avg', 'optimizer.state.w.exp_avg_sq', 'optimizer.state.w.step', 'w']
    """
    verb, opt = "save_dcp", params.opt if isinstance(params, TrainState) else None
    values = params.params if isinstance(params, TrainState) else params
    objects = dict[str, Any]()

    def more(leaves: Sequence[Saved]) -> tuple[Mapping[str, Any], list[Saved]]:
        moments, others = ({}, []) if opt is None else optimizer_leaves(verb, opt, leaves)
        given = {} if opt is None or param_group is None else param_group
        found = list[Saved]()
        for leaf in leaves:
            for key in given.keys() - {"params"}:  # frozen ones have them, too
                objects[f"{OPTIMIZER}param_groups.{leaf.name}.{key}"] = given[key]
            name, *also = [prefix + name for name in (leaf.name, *leaf.also)]
            found.append(leaf._replace(name=name, also=tuple(also)))
        return moments, found + others

    def finish(folder: Path, files: Files, said: list[list[Place]]) -> None:
        if objects:  # the last file is theirs
            said.append(_write_dcp(folder, files, len(files), objects))
        _describe(folder, list(chain(*files)), objects, prefix, list(chain(*said)))

    options = {"names": names, "dtype": dtype, "max_file_bytes": max_file_bytes}
    export(verb, path, values, groups, options, _write_dcp, finish, more)


def _write_dcp(folder: Path, files: Files, number: int, values: Mapping[str, Any]) -> list[Place]:
    """Write a file and sync it, one value after the other in the form of `torch.save`."""
    name, places = f"__{number}_0.distcp", list[Place]()
    with open(folder / name, "xb") as file:
        for key, value in values.items():
            start = file.tell()
            torch.save(value, file)
            places.append((key, (name, start, file.tell() - start)))
    directory.sync(folder / name)
    return places


def _describe(
    folder: Path,
    leaves: Sequence[Saved],
    objects: Mapping[str, Any],
    prefix: str,
    places: Sequence[Place],
) -> None:
    """Write what describes all files: of each name the place, and where a state dict has it.

    That is flat, but for the part of a prefix up to its last dot, which is a key of an outer dict.
    """
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.storage import WriteResult

    place_of = {name: _torch.place_in_dcp(*place) for name, place in places}
    described: dict[str, Any] = {name: dcp.BytesStorageMetadata() for name in objects}
    results = [WriteResult(dcp.MetadataIndex(name), 0, place_of[name]) for name in objects]
    outer = dict.fromkeys(objects, OPTIMIZER)
    for leaf in leaves:
        start, shape = torch.Size([0] * len(leaf.shape)), torch.Size(leaf.shape)
        chunks, kind = [dcp.ChunkStorageMetadata(start, shape)], dcp.TensorProperties(leaf.dtype)
        for name in (leaf.name, *leaf.also):
            described[name] = dcp.TensorStorageMetadata(kind, shape, chunks)
            index = dcp.MetadataIndex(name, start, 0)
            results.append(WriteResult(index, leaf.nbytes, place_of[leaf.name]))
            outer[name] = OPTIMIZER if leaf.tree else prefix[: prefix.rfind(".") + 1]
    paths = {
        name: (*begin.split(".")[:-1], name.removeprefix(begin)) for name, begin in outer.items()
    }
    FileSystemWriter(folder).finish(dcp.Metadata(described, paths), [results])


# `save_pretrained`: a directory that `from_pretrained` of transformers loads.


def save_pretrained(
    path: str | os.PathLike,
    params: Mapping[str, Any],
    groups: Any,
    *,
    config: Any = None,
    max_file_bytes: float | str = 5_000_000_000,
    names: Callable[[str], str | None] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write shards as a directory of safetensors files that transformers loads.

    The directory is there as a whole or not at all: the files are written beside it and synced, and
    the first rank renames them when all of them are complete. `load_shards` reads it, too.

    Args:
      path: the directory, the same on all ranks and on a file system that they share. Nothing may
        be there, except an empty directory.
      params: shards by name, as `init_model` and `load_shards` give them. It may also hold plain
        tensors that every rank has in full, such as buffers.
      groups: as for `gather`, one `Groups` for all leaves.
      config: what else belongs there: an object with `save_pretrained(path)`, such as the `config`
        of a model, or a dict that becomes config.json. Its `dtype`, if it has one, becomes that of
        the files.
      max_file_bytes: the most bytes of a file. If there are several files, they are listed in
        `model.safetensors.index.json`. A leaf that is larger has a file of its own.
      names: gives the name in the file for the name of a parameter, or None to leave it out.
      dtype: the dtype of floating-point tensors in the files; default that of the shards.

    A tensor with several names is written once, under the one that comes first in `params`: that is
    the embedding, as in transformers, if the names have the order of the module.

    Communication: in the first partition group an all-gather of each bucket, for each round of
      files that it has leaves in; and over the parts of the model one of each leaf that is cut. All
      ranks compare small messages once per round.

    Memory: one file of at most max_file_bytes (or the largest leaf, if that is more) on the CPU,
      and one bucket twice; of a model in parts a leaf twice besides. The p ranks of the first
      partition group, in each part, write another file at the same time; no rank holds the model in
      full.

    Raises:
      FileError: something is at the path, or a file cannot be written, as on a full disk; all ranks
        raise it, and nothing is left there.
      LeafError: two of `params` get the same name, or there is none.
      PlanError: the groups are those of one stage of a pipeline, which has some of the leaves.
      GroupsError, PlanError, LeafError, DonatedError: as `gather`.
      DesyncError: the ranks were given different arguments, or one of the errors before is raised
        on some of them only.
      CollectiveError: writing one round took longer than `timeout_s` of the groups.

    Example:
      >>> import tempfile
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2, 3)}, groups)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_pretrained(f"{folder}/model", shards, groups, config={"model_type": "mine"})
      ...     load_shards(f"{folder}/model", groups)
      {'w': Sharded(shape=(2, 3), float32, here 6 of 6)}
    """
    from safetensors.torch import save_file

    verb = "save_pretrained"
    with together(verb, groups):
        saves = callable(getattr(config, "save_pretrained", None))
        wrong = isinstance(config, nn.Module)  # which would save its own weights
        if wrong or not (config is None or isinstance(config, dict) or saves):
            what = f"{verb}: config is {type(config).__name__}, expected a dict, or an object with"
            raise LeafError(f"{what} save_pretrained(path)", fix="pass model.config")
    options = {"names": names, "dtype": dtype, "max_file_bytes": max_file_bytes}

    def write(folder: Path, files: Files, number: int, tensors: dict[str, Tensor]) -> None:
        file = folder / _file_name(number, len(files))
        save_file(tensors, file, metadata={"format": "pt"})
        directory.finish_file(file)

    def finish(folder: Path, files: Files, said: list[Any]) -> None:
        if isinstance(config, dict):
            _write_json(folder / "config.json", config)
        elif config is not None:
            config.save_pretrained(folder)
        _note_dtype(folder / "config.json", list(chain(*files)))
        for extra in folder.iterdir():
            directory.sync(extra)
        if len(files) > 1:  # the index comes last
            names = [(leaf.name, i) for i, file in enumerate(files) for leaf in file]
            places = {name: _file_name(i, len(files)) for name, i in sorted(names)}
            total = sum(leaf.nbytes for leaf in chain(*files))
            index = {"metadata": {"total_size": total}, "weight_map": places}
            _write_json(folder / "model.safetensors.index.json", index)

    export(verb, path, params, groups, options, write, finish)


def _file_name(number: int, count: int) -> str:
    """The name of a file, counted from 0, as transformers names it.

    >>> _file_name(0, 1), _file_name(0, 2)
    ('model.safetensors', 'model-00001-of-00002.safetensors')
    """
    return f"model-{number + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"


def _note_dtype(path: Path, leaves: Sequence[Saved]) -> None:
    """Let a config name the dtype of the files, in which transformers makes the model."""
    kinds = {leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point}
    config = json.loads(path.read_text()) if path.exists() else {}
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    if keys and len(kinds) == 1:
        _write_json(path, config | dict.fromkeys(keys, shards.dtype_name(*kinds)))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
    directory.sync(path)
