"""Files of named tensors, from which any range of elements can be read by itself.

A safetensors file is 8 bytes of length, a JSON header and flat data, so the place of an element in
it is known from the header. A file of `torch.save` is a zip file with a pickle that describes the
tensors, and a record for each storage. An index (`*.index.json`) names the file of each tensor, and
a `.metadata` of torch.distributed.checkpoint says where the chunks of each tensor lie. All of them
may come from strangers: see [Note: files of strangers] in `reading.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from torch import Tensor

from mics_fn import checks
from mics_fn.errors import FileError, TreeError, message
from mics_fn.init.dcp_files import METADATA, of_dcp
from mics_fn.init.reading import TRUST, Entry, File, Limits, Weights, refusal, shown
from mics_fn.init.safetensors import of_safetensors, read_json
from mics_fn.init.torch_files import of_torch

NAMES = (
    "model.safetensors",
    "pytorch_model.bin",
)  # in a folder; or an index of such
_IN_FOLDER = [found for name in NAMES for found in (name, f"{name}.index.json")] + [METADATA]
Source = str | PathLike | Mapping[str, Tensor]

_TOGETHER = "copy all files of one save together"


class WeightsNotFound(FileError, FileNotFoundError):
    """There is no file or folder at the path that was given."""


@contextmanager
def open_weights(verb: str, source: Source, limits: Limits) -> Iterator[Weights]:
    """The tensors of a file, a folder, an index or a mapping, by name.

    Raises:
      FileError: the file is damaged, holds something else, or asks for more than the limits allow.
      WeightsNotFound: there is no such file.
      TreeError: the mapping holds something else.
      OSError: it cannot be opened.
    """
    with ExitStack() as closing:
        if isinstance(source, Mapping):
            yield _of_tensors(verb, source)
        else:
            name = "weights" if verb == "init_model" else "path"
            checks.path(verb, name, source)
            path = fspath(source)
            try:
                found = _Opening(verb, limits, closing).weights(Path(path))
            except FileNotFoundError as error:
                fix = "pass a file of weights, an index of such, or a folder that has one of them"
                text = f"{verb}: {name}={path!r} does not exist"
                raise WeightsNotFound(message(text, fix=fix), path) from error
            yield found


class _Opening:
    """The files that one verb reads from.

    Args:
      verb: for errors.
      limits: what the files may ask for.
      closing: closes them.
    """

    def __init__(self, verb: str, limits: Limits, closing: ExitStack) -> None:
        self.verb, self.limits, self.closing = verb, limits, closing

    def weights(self, path: Path) -> Weights:
        """The tensors of a file, a folder or an index."""
        if "\0" in str(path):
            fix = "pass the name of a file"
            raise FileError(message(f"{self.verb}: no file {str(path)!r}", fix=fix), str(path))
        if path.is_dir():
            path = self.file_in(path)
        file = self.open(path)
        if path.name == METADATA:
            return of_dcp(file, path.parent)
        return self.of_index(file, path.parent) if path.suffix == ".json" else self.of_file(file)

    def file_in(self, folder: Path) -> Path:
        """The file of weights in a folder."""
        for found in _IN_FOLDER:
            if not (folder / found).exists():
                continue
            reason = refusal(folder, found, trust=self.limits.trust)
            if reason:
                what = f"{self.verb}: {folder / found} is not opened: {reason}"
                raise FileError(message(what, fix=TRUST), str(folder / found))
            return folder / found
        fix = f"pass the file itself; looked for {' and '.join(NAMES)}, their .index.json, and"
        fix += f" {METADATA} of torch.distributed.checkpoint"
        what = f"{self.verb}: no weights in the folder {folder}"
        raise FileError(message(what, fix=fix), str(folder))

    def open(self, path: Path) -> File:
        """A file, which is closed with the others."""
        file = File(self.verb, path, self.limits)
        self.closing.callback(file.close)
        return file

    def of_file(self, file: File) -> Weights:
        """The tensors of a file that holds them itself."""
        is_zip = file.size > 4 and file.read(0, 4) == b"PK\3\4"
        return of_torch(file) if is_zip else of_safetensors(file)

    def of_index(self, index: File, folder: Path) -> Weights:
        """The tensors of the files that an index names."""
        wrong = "has no weight_map of names to files"
        content = read_json(index, 0, index.size, wrong)
        file_of = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(file_of, dict):
            raise index.error(wrong, fix="pass an index as transformers saves it")
        index.require_small(index.size, len(file_of))
        files: dict[str, Weights] = {}
        for leaf, name in file_of.items():
            if not isinstance(name, str) or name not in files:
                self.check_name(index, folder, leaf, name)
                files[name] = self.named_file(index, folder / name, leaf)
        lost = [leaf for leaf, name in file_of.items() if leaf not in files[name]]
        if lost:
            line = f"it should be in {shown(file_of[lost[0]])} ({len(lost)} are lost)"
            raise index.error("does not match its files", [line], lost[0], _TOGETHER)
        return {leaf: files[name][leaf] for leaf, name in file_of.items()}

    def check_name(self, index: File, folder: Path, leaf: str, name: Any) -> None:
        """Refuse a name that is none, leads out of the folder, or is an index again."""
        reason = refusal(folder, name, trust=self.limits.trust)
        if not reason and name.endswith(".json"):
            reason = "it is an index, too"
        if reason:
            raise index.error(f"names {shown(name)}, which is not opened", [reason], leaf, TRUST)

    def named_file(self, index: File, path: Path, leaf: str) -> Weights:
        """The tensors of a file that an index names."""
        try:
            file = self.open(path)
        except OSError as error:
            what = f"names {shown(path.name)}, which cannot be opened"
            raise index.error(what, [f"{error.strerror}"], leaf, _TOGETHER) from error
        return self.of_file(file)


def _of_tensors(verb: str, found: Mapping[str, Tensor]) -> Weights:
    others = [(key, x) for key, x in found.items() if not isinstance(x, Tensor)]
    if others:
        text = f"{verb}: the mapping does not hold tensors by name alone"
        wrong = [f"got {key!r}: {type(x).__name__}" for key, x in others[:1]]
        raise TreeError(message(text, wrong, fix="pass the part that does"))
    return {key: _of_tensor(value.detach()) for key, value in found.items()}


def _of_tensor(value: Tensor) -> Entry:
    inner = max(1, prod(value.shape[1:]))

    def read(start: int, stop: int) -> Tensor:
        if not value.ndim:
            return value.reshape(1)[start:stop]
        first, end = start // inner, -(-stop // inner)
        rows = value[first:end].reshape(-1)  # copies only rows that lie apart
        return rows[start - first * inner : stop - first * inner]

    return Entry(tuple(value.shape), value.dtype, read)
