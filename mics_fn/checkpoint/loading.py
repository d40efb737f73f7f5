"""`load`: a state as it was saved, on these ranks, however many wrote it and however it was cut."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mics_fn import checks, spans, tree
from mics_fn.checkpoint import directory, snapshot
from mics_fn.checkpoint.manifest import Manifest, SavedTensor, covering, decoded, kind_of, within
from mics_fn.checkpoint.saving import EXTRA, folder_to_read, together
from mics_fn.errors import (
    FileError,
    human_bytes,
    message,
    name_ranks,
)
from mics_fn.groups import Groups
from mics_fn.offload import is_coded, is_placed
from mics_fn.optim import by_leaf, replaced
from mics_fn.shards import (
    Fixed,
    Sharded,
    Writing,
    dtype_name,
    is_leaf,
    reclaimed,
    refuse_derivative,
)
from mics_fn.spans import LOG
from mics_fn.threads import each
from mics_fn.tree import Tree

# The files of a step as a source: whether they fit a state, and what a rank reads from them.

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

    def check(self, target: snapshot.Contents, replicas: snapshot.Replicas) -> None:
        """Raise FileError unless everything in the target is here, and nothing else."""
        target, _ = snapshot.as_saved(target, self.tensors)
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
            raise FileError(message(text, [*wrong[:_SHOWN], *more], fix), str(self.path))

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

    def named(self, name: str) -> SavedTensor | None:
        """The tensor of a name, or the one that it was tied to."""
        return self.tensors.get(self.manifest.ties.get(name, name), self.tensors.get(name))

    # Reading.

    def fill(self, target: snapshot.Contents) -> Any:
        """Read all that the target has on this rank; returns what this rank gave as extra."""
        target, conversions = snapshot.as_saved(target, self.tensors)
        found = list[Wanted]()
        for name, piece in target.held.items():
            found += self._wanted(name, piece.data, piece.origin)
        for name, x in target.plain.items():
            found += self._wanted(name, x, 0)
        own = 0
        if self.manifest.extra == "own":  # on fewer or more ranks that of another one
            own = self.home.position % len(self.manifest.writers)
        with ExitStack() as closing:
            files = dict[int, directory.PartFile]()

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
                directory.slice_name(found.name, part),
            )
            while low < high:  # in portions that several threads can take
                start = low - part.start
                end = (start * x.itemsize // directory.READ + 1) * directory.READ // x.itemsize
                until = min(high, part.start + end)
                wanted.append(Wanted(writer, where, start, x, low - origin, until - origin))
                low = until
        return wanted

    def _open(self, writer: int) -> Any:
        known = self.manifest.writers[writer]
        return _opened(self.path, known.file, directory.FileRecord(known.nbytes, known.header))


class Wanted(NamedTuple):
    """Elements that are read from a tensor of a file, and where they go."""

    writer: int
    name: str
    start: int  # in the tensor of the file
    target: Tensor
    low: int  # in the flattened target
    high: int

    def read(self, part: directory.PartFile) -> None:
        """Read these elements into the target."""
        x: Any = self.target
        direct = x.is_cpu and x.is_contiguous() and not is_placed(x)
        count = self.high - self.low
        if direct:  # one element may have any stride
            out = x.as_strided((count,), (1,), x.storage_offset() + self.low)
        else:
            out = torch.empty(count, dtype=x.dtype)
        with directory.load_errors(part.path):
            part.read(self.name, self.start, out)
        if is_placed(x):
            x.fill(self.low, out)
        elif not direct and x.is_contiguous():
            x.view(-1)[self.low : self.high].copy_(out)
        elif not direct:
            at = torch.arange(self.low, self.high, device=x.device)
            kind = _BITS.get(x.itemsize, x.dtype)  # as torch cannot put values of every dtype
            given: Any = out
            x.view(kind).put_(at, given.view(kind).to(x.device))


class _opened:
    """A block with a file of a checkpoint."""

    def __init__(self, path: Path, name: str, record: directory.FileRecord) -> None:
        self._facts = path, name, record

    def __enter__(self) -> directory.PartFile:
        path, name, record = self._facts
        directory.check_files(path, [name])
        with directory.load_errors(path / name):
            self._part = directory.PartFile(path, name, record)
        return self._part

    def __exit__(self, *error: Any) -> None:
        self._part.close()


def _extra_in(part: directory.PartFile) -> Any:
    """What a rank gave to `save` besides the state."""
    names = [name for name in part.names() if name.startswith(EXTRA)]
    if EXTRA not in names:
        return None
    try:
        with directory.load_errors(part.path):
            tensors = {name: part.whole(name) for name in names if name != EXTRA}
            return decoded(bytes(part.whole(EXTRA).tolist()).decode(), tensors)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:  # also of recursion
        raise directory.as_load_error(ValueError(f"{EXTRA}: {error}"), part.path) from error


class Loaded(NamedTuple):
    """What `load` found.

    Args:
      state: as it was saved, in the structure of `like`.
      step: the number of the step.
      extra: what this rank gave when it saved.
    """

    state: Tree
    step: int
    extra: Any


def load(
    path: str | os.PathLike[str],
    like: Tree,
    groups: Any,
    *,
    step: int | None = None,
    on_corrupt: Literal["raise", "previous"] = "raise",
    replicas: snapshot.Replicas = "equal",
    donate: bool = False,
) -> Loaded:
    """A state that was saved, for any number of ranks, levels and placement. All ranks call it.

    A save to the folder that is under way on these ranks is waited for.

    Args:
      path: the folder that `save` was given.
      like: a state of the same structure, shapes and dtypes, such as that of before the first step.
        Its values are not used, so it may be lost. Leaves that are not trained may be kept in
        another form than they were saved in, as values or as codes; see [Note: other codes] in
        `checkpoint.snapshot`.
      groups: those that `like` is sharded with.
      step: which one; default the newest committed one.
      on_corrupt: "previous" goes back to the next older step, on all ranks, where one is found to
        be damaged, and logs a warning. No save of this process removes what was refused so, but
        puts it aside. Where the system cannot read a file, nothing is known of it, which is an
        error.
      replicas: as it was saved.
      donate: read into the memory of `like`. If this raises, its values are lost.

    Returns:
      A `Loaded`: state, step and extra. Every value is compared with its checksum before it is
      used; a checksum that is missing is an error.

    Communication: a few small all-gathers over the partition group and the replication group.

    Memory: a second copy of the state, none with `donate`; and two buffers of 4 MiB while it reads
      what does not lie in host memory, or one leaf after the other that is kept in another form.

    Raises:
      CheckpointNotFound: there is no such step.
      FileError: it is damaged; on all
        ranks, with the file and the leaf.
      FileError: the system cannot read a file; or a save of this process to the folder, which
        was under way, failed or did not end in time; on all ranks.
      FileError: it does not fit `like`; all differences are named.
      LeafError: a value is not finite, and `like` keeps its leaf as codes.
      DesyncError: ranks load other states.
      PlanError: an argument is not what it should be.

    Example:
      >>> import tempfile
      >>> groups, folder = make_groups(1), tempfile.mkdtemp()
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.adamw(0.1))
      >>> path = checkpoint.save(folder, state, groups, step=7, extra={"seen": 70})
      >>> like = init_state(shard({"w": torch.zeros(2)}, groups), optim.adamw(0.1))
      >>> found = checkpoint.load(folder, like, groups)
      >>> found.step, found.extra, found.state.params["w"].data
      (7, {'seen': 70}, tensor([1., 1.]))
    """
    refuse_derivative("checkpoint.load", (), "call it outside of torch.func")
    checks.integer("load", "step", step, 0, optional=True, fix="None takes the newest one")
    checks.choice("load", "on_corrupt", on_corrupt, "raise", "previous")
    checks.flag("load", "donate", donate)
    if spans.observers:
        spans.passing("load")
    like = reclaimed(like)  # of what a write that was cut short has left, only the memory
    home = snapshot.main_home("load", groups, snapshot.homes_by_bucket("load", like, groups))
    folder, refused = directory.Folder(path), dict[int, FileError]()
    # Several steps may be read into this memory one after the other, but it is given away once.
    given = copy_of(like, into=lambda x: x) if donate else like
    with Writing() as writing:
        if donate:
            writing.covers(like, "like", "checkpoint.load")
        while True:
            with together(home) as exchange:
                folder_to_read("load", path, raises=True)
                if home.position == 0:
                    exchange.mine = _chosen(folder, step, refused)
            number, place = exchange.all[home.ranks[0]]
            try:
                how = replicas, writing if donate else None
                found = _load(Path(place), number, given, groups, home, *how)
            except FileError as error:
                if on_corrupt == "raise" or step is not None or not error.damaged:
                    raise
                refused[number] = error
                folder.refuse(Path(place))
                if home.position == 0:
                    text = "load: step %d is refused, and an older one tried: %s"
                    LOG.warning(text, number, error)
            else:
                folder.accept(Path(place))
                return found


def _chosen(
    folder: directory.Folder, step: int | None, refused: Mapping[int, FileError]
) -> list[Any]:
    """The step to load, and its folder; raises the first error if no step is left."""
    if refused:
        older = [each for each in folder.committed() if each < min(refused)]
        if not older:
            raise refused[max(refused)]
        step = max(older)
    number, path = folder.find(step)
    return [number, str(path)]


def _load(
    path: Path,
    step: int,
    like: Tree,
    groups: Any,
    home: Groups,
    replicas: snapshot.Replicas,
    writing: Writing | None,
) -> Loaded:
    """Read one step; with `writing` into the memory of `like`, which it covers."""
    with together(home) as exchange:
        manifest, digest = directory.manifest_in(path, step)
        target = snapshot.contents_of("load", like, groups, replicas)
        sources = Sources(path, manifest, home)
        sources.check(target, replicas)
        exchange.mine = digest
    if len(set(exchange.all.values())) > 1:
        text = f"load: ranks see different files in {path}"
        raise FileError(message(text, fix="load from a folder that ranks share"), damaged=True)
    with together(home), torch.no_grad():
        state = copy_of(like, into=None if writing is None else lambda x: x)
        if writing is not None:
            writing.give_away()
        extra = sources.fill(snapshot.contents_of("load", state, groups, replicas))
        state = with_values(state, manifest.values)
    return Loaded(state, step, extra)


def copy_of(state: Tree, into: Callable[[Tensor], Tensor] | None = None) -> Tree:
    """A state in new memory, in which tensors share memory where they did before.

    Args:
      state: any pytree of shards and tensors.
      into: gives the tensor that takes the place of another one; default a copy. In the place of
        those in files come new ones, in these files; and of those that are codes, of their kind.
    """
    kept: dict[tuple[Any, ...], Tensor] = {}

    def copied(x: Tensor) -> Tensor:
        held = x.untyped_storage()
        key = held.data_ptr(), held.nbytes(), x.device
        if key not in kept:
            whole = torch.empty(0, dtype=torch.uint8, device=x.device)
            kept[key] = whole.set_(held, 0, (held.nbytes(),), (1,)).clone()
        view, memory = torch.empty(0, dtype=x.dtype, device=x.device), kept[key].untyped_storage()
        return view.set_(memory, x.storage_offset(), x.size(), x.stride())

    def new(x: Any) -> Tensor:
        if is_coded(x) and x.codes.row is not None:  # it is read into as bytes
            row = x.codes.row if into is not None else copied(x.codes.row)
            return x.within(row)
        if is_placed(x):
            return x.unset()
        lazy = x.is_conj() or x.is_neg()  # memory that is read into holds the values themselves
        return copied(x) if into is None or lazy else into(x)

    def leaf_of(x: Any) -> Any:
        if isinstance(x, Sharded | Fixed):
            return type(x)(new(x.data.detach()), x.bucket, x.slot)  # pyright: ignore
        return new(x.detach()) if isinstance(x, Tensor) else x

    return tree.map_leaves(leaf_of, state, is_leaf=is_leaf)


def with_values(state: Tree, values: Mapping[str, Any]) -> Tree:
    """The state with these numbers and texts."""
    plain = by_leaf(state)
    leaves, spec = tree.flatten(plain, is_leaf)
    names = tree.paths(plain, is_leaf=is_leaf)
    out = [values.get(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    return replaced(state, plain, spec.unflatten(out))


# Which steps a folder has, and whether their files are as they were saved; without ranks.

_VERIFY_THREADS = 4


def steps(path: str | os.PathLike[str]) -> list[int]:
    """The committed steps in a folder, oldest first.

    Args:
      path: the folder that `save` was given.

    Returns:
      Their numbers; none for a folder that does not exist. A save of this process to it that is
      under way is waited for.

    Raises:
      FileError: the folder cannot be read.

    Example:
      >>> checkpoint.steps("no such folder")
      []
    """
    return list(folder_to_read("steps", path).committed())


def latest(path: str | os.PathLike[str]) -> int | None:
    """The newest committed step in a folder; None if there is none.

    Args:
      path: the folder that `save` was given.

    Returns:
      Its number. A save of this process to it that is under way is waited for. A step that another
      process is writing, or whose save failed, is not committed.

    Raises:
      FileError: the folder cannot be read.

    Example:
      >>> checkpoint.latest("no such folder") is None
      True
    """
    return max(folder_to_read("latest", path).committed(), default=None)


@dataclass(frozen=True)
class Verified:
    """Result of `verify`: a step whose files equal what was saved.

    Args:
      step: the number of the step.
      path: the folder of the step.
      files: number of files of values.
      tensors: number of tensors.
      nbytes: bytes of all files together.
      seconds: how long the comparison took.
    """

    step: int
    path: Path
    files: int
    tensors: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        rate = human_bytes(self.nbytes / max(self.seconds, 1e-9))
        what = f"{self.tensors} tensors in {self.files} files, {human_bytes(self.nbytes)}"
        return f"step {self.step}: {what}, as they were saved ({rate} per second)"


def verify(path: str | os.PathLike[str], step: int | None = None) -> Verified:
    """Read all files of a step and compare every value with its checksum.

    Args:
      path: the folder that `save` was given.
      step: which one; default the newest committed one.

    Returns:
      What was compared. `python -m mics_fn verify DIR` prints it.

    Memory: 1 MiB for each of 4 files that are read at once.

    Raises:
      CheckpointNotFound: there is no such step.
      PlanError: `step` is not an int.
      FileError: something is not as it was
        saved, or a checksum is missing; the text names file and leaf.

    Example:
      >>> import tempfile
      >>> groups, folder = make_groups(1), tempfile.mkdtemp()
      >>> path = checkpoint.save(folder, shard([torch.ones(8)], groups), groups, step=3)
      >>> checkpoint.verify(folder).tensors
      1
    """
    checks.integer("verify", "step", step, 0, optional=True, fix="None takes the newest one")
    started = time.perf_counter()
    number, place = folder_to_read("verify", path).find(step)
    manifest, _ = directory.manifest_in(place, number)
    written = [i for i, writer in enumerate(manifest.writers) if writer.file]
    directory.check_files(place, [manifest.writers[i].file for i in written])
    each(lambda i: _check_file(place, manifest, i), written, _VERIFY_THREADS, "mics_fn verify")
    nbytes = sum(writer.nbytes for writer in manifest.writers)
    seconds = time.perf_counter() - started
    return Verified(number, place, len(written), len(manifest.tensors), nbytes, seconds)


def _check_file(place: Path, manifest: Manifest, number: int) -> None:
    writer = manifest.writers[number]
    with directory.load_errors(place / writer.file):
        part = directory.PartFile(
            place, writer.file, directory.FileRecord(writer.nbytes, writer.header)
        )
        try:
            for name, tensor in wanted_in(manifest, number).items():
                part.expect(name, tensor)
            for name in part.names():
                part.check(name)
        finally:
            part.close()


def wanted_in(manifest: Manifest, number: int) -> dict[str, SavedTensor]:
    """All slices of the state that a file has, by the manifest: names, and what they are like."""
    found = {}
    for tensor in manifest.tensors:
        if tensor.line < 0:
            found[tensor.name] = tensor
            continue
        line = manifest.lines[tensor.line]
        part = within(tensor, line, manifest.cell(tensor.line, number))
        if part is not None:
            shape = (part.stop - part.start,)
            found[directory.slice_name(tensor.name, part)] = replace(tensor, shape=shape)
    return found
