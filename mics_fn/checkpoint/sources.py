"""The files of a step as a source: whether they fit a state, and what a rank reads from them."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn.checkpoint.agreeing import EXTRA
from mics_fn.checkpoint.contents import Contents, Replicas
from mics_fn.checkpoint.converting import as_saved
from mics_fn.checkpoint.extras import decoded, kind_of
from mics_fn.checkpoint.layout import Stored, covering
from mics_fn.checkpoint.manifest import Manifest
from mics_fn.checkpoint.opening import check_files
from mics_fn.checkpoint.parts import READ, Part, Record, as_load_error, slice_name
from mics_fn.errors import CheckpointError, CheckpointMismatch, FileError, message, name_ranks
from mics_fn.groups import Groups
from mics_fn.offload import is_apart, set_part
from mics_fn.shards import dtype_name
from mics_fn.threads import each

_READERS = 2  # threads of a rank: while one reads, another compares; more would read out of order
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OWN = "which saved it, and these ranks are others"
_SHOWN = 8  # at most so many mismatches are listed


class Sources:
    """The files of a step, and what this rank reads from them.

    Args:
      path: the folder of the step.
      manifest: the manifest of the step.
      home: the groups whose ranks load it.
    """

    def __init__(self, path: Path, manifest: Manifest, home: Groups) -> None:
        self.path, self.manifest, self.home = path, manifest, home
        self.tensors = {x.name: x for x in manifest.tensors}

    # Does it fit?

    def check(self, target: Contents, replicas: Replicas) -> None:
        """Raise CheckpointMismatch unless everything in the target is here, and nothing else."""
        target, _ = as_saved(target, self.tensors)
        wrong, cells, writers = [], target.cells_of_homes(), self.manifest.writers
        sizes = [[each.partition_size, each.num_replicas] for each in target.homes]
        # Whether this rank has the place of the one that had its number.
        self.alike = len(writers) == self.home.world_size and sizes == self.manifest.homes
        self.alike = self.alike and writers[self.home.position].cells == cells
        if replicas != self.manifest.replicas:
            wrong.append(f"replicas: saved {self.manifest.replicas!r}, expected {replicas!r}")
        elif replicas == "apart":
            pairs = zip(self.manifest.homes, sizes, strict=False)
            wrong += [
                f"{a[1]} replicas were apart, here are {b[1]}" for a, b in pairs if a[1] != b[1]
            ]
        wanted = {x.name: (x.dtype, x.shape) for x in target.cut}
        wanted |= {name: (x.dtype, tuple(x.shape)) for name, x in target.plain.items()}
        for name, (dtype, shape) in wanted.items():
            wrong += self._differences(name, dtype, shape)
        extra = [name for name in self.tensors if name not in wanted and name not in target.ties]
        extra += [name for name in self.manifest.values if name not in target.values]
        wrong += [f"{name} is not expected" for name in extra]
        wrong += [f"{x} is missing" for x in target.values if x not in self.manifest.values]
        kinds = ((name, x) for name, x in target.values.items() if name in self.manifest.values)
        for name, x in kinds:
            got = self.manifest.values[name]
            if kind_of(got) is not kind_of(x):
                wrong.append(f"{name}: saved {got!r}, expected {type(x).__name__}")
        if wrong:
            more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            text = f"load: {self.path} does not fit the state"
            fix = "pass like= as it was saved: the same model, optimizer and options"
            if all(line.endswith(_OWN) for line in wrong):
                p, r = self.manifest.homes[0]
                fix = (
                    f"load it on {p * r} ranks with make_groups({p}), or save it equal on all ranks"
                )
            raise CheckpointMismatch(message(text, [*wrong[:_SHOWN], *more], fix), str(self.path))

    def _differences(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> list[str]:
        found = self.named(name)
        if found is None:
            return [f"{name} is missing"]
        if found.shape != shape or found.dtype != dtype:
            want, got = dtype_name(dtype), dtype_name(found.dtype)
            return [f"{name}: saved {found.shape} {got}, expected {shape} {want}"]
        if found.line < 0 and not self.alike:
            who = name_ranks(range(len(self.manifest.writers)))
            return [f"{name} differed between {who}, {_OWN}"]
        return []

    def named(self, name: str) -> Stored | None:
        """The tensor of a name, or the one that it was tied to."""
        return self.tensors.get(self.manifest.ties.get(name, name), self.tensors.get(name))

    # Reading.

    def fill(self, target: Contents) -> Any:
        """Read all that the target has on this rank; returns what this rank gave as extra."""
        target, conversions = as_saved(target, self.tensors)
        found = list[Wanted]()
        for name, piece in target.held.items():
            found += self._wanted(name, piece.data, piece.origin)
        for name, x in target.plain.items():
            found += self._wanted(name, x, 0)
        own = 0
        if self.manifest.extra == "own":  # on fewer or more ranks that of another one
            own = self.home.position % len(self.manifest.writers)
        with ExitStack() as closing:
            files = dict[int, Part]()

            def read(wanted: list[Wanted]) -> None:
                for i in sorted({x.writer for x in wanted}.difference(files)):
                    files[i] = closing.enter_context(self._open(i))
                each(lambda want: want.read(files[want.writer]), wanted, _READERS, "mics_fn load")

            read(found)
            for conversion in conversions:
                memory = conversion.memory()
                read([want for name, x, low in memory for want in self._wanted(name, x, low)])
                conversion.put([x for _, x, _ in memory])
            if own not in files:
                files[own] = closing.enter_context(self._open(own))
            return _extra_in(files[own])

    def _wanted(self, name: str, x: Tensor, origin: int) -> list["Wanted"]:
        """What is read to fill a tensor, which is a part of the one with this name."""
        found = self.named(name)
        if found is None:
            return []
        if found.line < 0:
            return [Wanted(self.home.position, name, 0, x, 0, x.numel())]
        wanted, stop = [], origin + x.numel()
        for part in covering(found, self.manifest.lines[found.line], origin, stop):
            low, high = max(part.start, origin), min(part.stop, stop)
            writer, where = (
                self.manifest.writer(found.line, part.cell),
                slice_name(found.name, part),
            )
            while low < high:  # in portions that several threads can take
                start = low - part.start
                end = (start * x.itemsize // READ + 1) * READ // x.itemsize
                until = min(high, part.start + end)
                wanted.append(Wanted(writer, where, start, x, low - origin, until - origin))
                low = until
        return wanted

    def _open(self, writer: int) -> Any:
        known = self.manifest.writers[writer]
        return _opened(self.path, known.file, Record(known.nbytes, known.header))


class Wanted(NamedTuple):
    """Elements that are read from a tensor of a file, and where they go."""

    writer: int
    name: str
    start: int  # in the tensor of the file
    target: Tensor
    low: int  # in the flattened target
    high: int

    def read(self, part: Part) -> None:
        """Read these elements into the target."""
        x: Any = self.target
        direct = x.is_cpu and x.is_contiguous() and not is_apart(x)
        count = self.high - self.low
        if direct:  # one element may have any stride
            out = x.as_strided((count,), (1,), x.storage_offset() + self.low)
        else:
            out = torch.empty(count, dtype=x.dtype)
        try:
            part.read(self.name, self.start, out)
        except FileError as error:
            if isinstance(error, CheckpointError):
                raise
            raise as_load_error(error, part.path) from error
        if is_apart(x):
            set_part(x, self.low, out)
        elif not direct and x.is_contiguous():
            x.view(-1)[self.low : self.high].copy_(out)
        elif not direct:
            at = torch.arange(self.low, self.high, device=x.device)
            kind = _BITS.get(x.itemsize, x.dtype)  # as torch cannot put values of every dtype
            given: Any = out
            x.view(kind).put_(at, given.view(kind).to(x.device))


class _opened:
    """A block with a file of a checkpoint."""

    def __init__(self, path: Path, name: str, record: Record) -> None:
        self._facts = path, name, record

    def __enter__(self) -> Part:
        path, name, record = self._facts
        check_files(path, [name])
        try:
            self._part = Part(path, name, record)
        except (OSError, FileError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise as_load_error(error, path / name) from error
        return self._part

    def __exit__(self, *error: Any) -> None:
        self._part.close()


def _extra_in(part: Part) -> Any:
    """What a rank gave to `save` besides the state."""
    names = [name for name in part.names() if name.startswith(EXTRA)]
    if EXTRA not in names:
        return None
    try:
        tensors = {name: part.whole(name) for name in names if name != EXTRA}
        return decoded(bytes(part.whole(EXTRA).tolist()).decode(), tensors)
    except CheckpointError:
        raise
    except FileError as error:
        raise as_load_error(error, part.path) from error
    except (LookupError, TypeError, ValueError, RuntimeError) as error:  # also of recursion
        raise as_load_error(ValueError(f"{EXTRA}: {error}"), part.path) from error
