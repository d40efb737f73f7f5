"""Weights that are read: which files a path stands for, and which parameter takes which tensor.

A path is a file, an index (`*.index.json`) that names the file of each tensor, a DCP directory, or
a folder with one of these. Whatever it is, and for a mapping of tensors too, `open_weights` gives
an `Entry` for each tensor by name, from which any range of elements can be read.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from os import PathLike
from pathlib import Path

from torch import Tensor

from mics_fn import checks
from mics_fn.errors import FileError, LeafError, message
from mics_fn.init import files, torch_files
from mics_fn.init.files import Entry, File, Weights
from mics_fn.shards import dtype_name, owners_of

NAMES = ("model.safetensors", "pytorch_model.bin")  # in a folder; or an index of such
_IN_FOLDER = [found for name in NAMES for found in (name, f"{name}.index.json")]
_IN_FOLDER += [torch_files.METADATA]
Source = str | PathLike | Mapping[str, Tensor]


class WeightsNotFound(FileError, FileNotFoundError):
    """There is no file or folder at the path that was given."""


@contextmanager
def open_weights(verb: str, source: Source, *, trust: bool) -> Iterator[Weights]:
    """The tensors of a file, a folder, an index or a mapping, by name.

    Args:
      verb: for errors.
      source: a path, or tensors by name.
      trust: whether files in a folder, or named in a file, may be links or lie elsewhere.

    Raises:
      FileError: the file is damaged, or holds something else.
      WeightsNotFound: there is no such file.
      OSError: it cannot be opened.
    """
    if isinstance(source, Mapping):
        yield {key: _of_tensor(value.detach()) for key, value in source.items()}
        return
    checks.flag(verb, "trust", trust)
    with ExitStack() as opened:
        path = Path(source)
        try:
            if path.is_dir():
                path = _file_in(verb, path, trust)
            file = File(verb, path)
        except FileNotFoundError as error:
            name = "weights" if verb == "init_model" else "path"
            fix = "pass a file of weights, an index of such, or a folder that has one of them"
            text = f"{verb}: {name}={str(source)!r} does not exist"
            raise WeightsNotFound(message(text, fix=fix), str(source)) from error
        opened.callback(file.close)
        if path.name == torch_files.METADATA:
            yield torch_files.of_dcp(file, trust=trust)
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
    fix += f" {torch_files.METADATA} of torch.distributed.checkpoint"
    raise FileError(message(f"{verb}: no weights in the folder {folder}", fix=fix), str(folder))


def _of_file(file: File) -> Weights:
    """The tensors of a file that holds them itself."""
    is_zip = file.size > 4 and file.read(0, 4) == b"PK\3\4"
    return torch_files.of_torch(file) if is_zip else files.of_safetensors(file)


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
    inner = max(1, prod(value.shape[1:]))

    def read(start: int, stop: int) -> Tensor:
        if not value.ndim:
            return value.reshape(1)[start:stop]
        first, end = start // inner, -(-stop // inner)
        rows = value[first:end].reshape(-1)  # copies only rows that do not adjoin
        return rows[start - first * inner : stop - first * inner]

    return Entry(tuple(value.shape), value.dtype, read)


# What to read for each parameter.

SHOWN = 5  # at most so many mismatches are listed


def renamed(found: Weights, names: Callable[[str], str | None] | None) -> Weights:
    """The tensors of a file under the names of parameters, without those that have none."""
    if names is None:
        return found
    kept: Weights = {}
    for name, entry in found.items():
        new = names(name)
        if new is not None:
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
      LeafError: a tensor is missing, not expected, or of another shape or kind.
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
        elif missing is None or not all(
            checks.answer(verb, f"missing({name!r})", missing(name)) for name in aliases
        ):
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
        raise LeafError(text, problems[:SHOWN] + more, fix=fix)
    return sources


def _difference(root: str, name: str, want: Tensor, got: Entry) -> list[str]:
    if tuple(want.shape) != got.shape:
        return [f"{root}.{name}: expected shape {tuple(want.shape)}, got {got.shape}"]
    if want.is_floating_point() != got.dtype.is_floating_point:
        kinds = dtype_name(want.dtype), dtype_name(got.dtype)
        return [f"{root}.{name}: expected {kinds[0]}, got {kinds[1]}"]
    return []
