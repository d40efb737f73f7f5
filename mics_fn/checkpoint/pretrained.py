"""`save_pretrained`: a directory that `from_pretrained` of transformers loads."""

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mics_fn.checkpoint.exported import (
    Part,
    Saved,
    in_files,
    one_job,
    rounds,
    same_leaves,
    saved_leaves,
)
from mics_fn.checkpoint.new_directory import NewDirectory, free_path, new_directory, sync
from mics_fn.collectives import in_step
from mics_fn.errors import LeafError, MicsError, message
from mics_fn.shards import dtype_name

_VERB = "save_pretrained"
_CONFIG = "config.json"


def save_pretrained(
    path: str | PathLike,
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
      files that it has leaves in. All ranks compare small messages once per round.

    Memory: one file of at most max_file_bytes (or the largest leaf, if that is more) on the CPU,
      and one bucket twice. The p ranks of the first partition group each write another file at the
      same time; no rank holds the model in full.

    Raises:
      FileError: something is at the path, or a file cannot be written, as on a full disk; all ranks
        raise it, and nothing is left there.
      TreeError: `params` are not shards by name, or two of them get the same name.
      GroupsError, PlanError, LeafError, DonatedError: as `gather`.
      DesyncError: the ranks were given different arguments, or one of the errors before is raised
        on some of them only.
      CollectiveTimeoutError: writing one round took longer than `timeout_s` of the groups.
      MicsError: the library safetensors is not installed.

    Example:
      >>> import tempfile
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2, 3)}, groups)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_pretrained(f"{folder}/model", shards, groups, config={"model_type": "mine"})
      ...     load_shards(f"{folder}/model", groups)
      {'w': Sharded(shape=(2, 3), float32, here 6 of 6)}
    """
    home = one_job(_VERB, groups)
    with in_step(_VERB, home, f"path={str(path)!r}, max_file_bytes={max_file_bytes}, {dtype}"):
        save_file = _library()
        _check_config(config)
        target = free_path(_VERB, path)
        leaves = saved_leaves(_VERB, params, home, names, dtype)
        files = in_files(_VERB, leaves, max_file_bytes)
    same_leaves(_VERB, home, path, leaves)
    with new_directory(_VERB, target, home) as made:

        def write(part: Part) -> str:
            if part.file is not None:
                file = made.folder / _file_name(part.file, len(files))
                save_file(part.tensors, file, metadata={"format": "pt"})
                # The library makes files that only their owner may read, whatever the umask says.
                file.chmod(made.folder.stat().st_mode & 0o666)
                sync(file)
            return ""

        for part in rounds(params, home, files):
            made.together(lambda part=part: write(part))
        made.together(lambda: _finish(made, files, config))


def _library() -> Callable[..., None]:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        fix = "pip install 'mics-fn[checkpoint]'"
        raise MicsError(message(f"{_VERB}: the library safetensors is missing", fix=fix)) from error
    return save_file


def _check_config(config: Any) -> None:
    wrong = isinstance(config, nn.Module)  # which would save its own weights
    if wrong or not (config is None or isinstance(config, dict) or _saves_itself(config)):
        what = f"{_VERB}: config is {type(config).__name__}, expected a dict, or an object with"
        raise LeafError(message(f"{what} save_pretrained(path)", fix="pass model.config"))


def _saves_itself(config: Any) -> bool:
    return callable(getattr(config, "save_pretrained", None))


def _file_name(number: int, count: int) -> str:
    """The name of a file, counted from 0, as transformers names it.

    >>> _file_name(0, 1), _file_name(0, 2)
    ('model.safetensors', 'model-00001-of-00002.safetensors')
    """
    return f"model-{number + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"


def _finish(made: NewDirectory, files: Sequence[Sequence[Saved]], config: Any) -> str:
    """On the first rank, write what describes the files, and the index last."""
    if not made.is_first:
        return ""
    if isinstance(config, dict):
        _write_json(made.folder / _CONFIG, config)
    elif config is not None:
        config.save_pretrained(made.folder)
    _note_dtype(made.folder / _CONFIG, [leaf for file in files for leaf in file])
    for extra in made.folder.iterdir():
        sync(extra)
    if len(files) > 1:
        names = [(leaf.name, i) for i, file in enumerate(files) for leaf in file]
        places = {name: _file_name(i, len(files)) for name, i in sorted(names)}
        total = sum(leaf.nbytes for file in files for leaf in file)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(made.folder / "model.safetensors.index.json", index)
    return ""


def _note_dtype(path: Path, leaves: Sequence[Saved]) -> None:
    """Let a config name the dtype of the files, in which transformers makes the model."""
    kinds = {leaf.dtype for leaf in leaves if leaf.dtype.is_floating_point}
    config = json.loads(path.read_text()) if path.exists() else {}
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    if keys and len(kinds) == 1:
        _write_json(path, config | dict.fromkeys(keys, dtype_name(*kinds)))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
    sync(path)
