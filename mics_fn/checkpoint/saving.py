"""`save` and `start_save`: a state becomes a committed step, written by all ranks together.

[Note: no plan travels] Each rank knows by itself what it writes, so nobody collects plans. At the
start ranks compare digests, and the first rank makes the folder. Then each of them writes its file
and leaves a record of it in the store, the table of its slices; the first rank reads the records,
writes the manifest, commits, and says so. After the start this needs no collective, so a thread
does it while training goes on.

[Note: parts are saved] All ranks of a model in parts write one step. Of a leaf that is cut into m
parts of a shape s, one tensor of the shape (m, *s) is saved, so that part i is its elements from
i * numel on, under a name that says along which dim. Copies are leaves like any others. What other
stages of a pipeline have is saved under names that end with the stage, such as `step of stage 1`;
what it is called and its form, which only its own ranks know, goes to the first rank with a record.
"""

import heapq
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from mics_fn import _torch, checks, collectives, shards, spans, tree
from mics_fn.checkpoint import directory
from mics_fn.collectives import agree, together
from mics_fn.errors import DesyncError, FileError, LeafError, PlanError, message
from mics_fn.faults import StopRequest
from mics_fn.groups import Groups
from mics_fn.offload import ReadLock, in_file, is_coded, read
from mics_fn.optim import TrainState, by_leaf
from mics_fn.shards import is_leaf
from mics_fn.spans import LOG
from mics_fn.store import later, poll
from mics_fn.threads import Job
from mics_fn.tree import Tree

# What a state holds, as named tensors and numbers; which slices this rank writes, and copies.

OnHost = AbstractContextManager[dict[directory.Slice, Tensor]]  # a block that has what is written


class LocalPiece(NamedTuple):
    """What this rank has of a tensor.

    Args:
      data: elements `origin` to `origin + data.numel()` of the flattened tensor.
      origin: where it begins.
      shape: of the tensor, in full.
      home: the groups in which it is cut, whose replicas have the same; None if every rank has all.
    """

    data: Tensor
    origin: int
    shape: tuple[int, ...]
    home: Groups | None = None


@dataclass(frozen=True, eq=False)
class Contents:
    """A state as a checkpoint has it.

    Args:
      home: the groups whose ranks save it.
      stage: what names of this stage of a pipeline end with; "" if there is one.
      pieces: of the tensors that are cut, and those that this rank has in full, by name.
      tensors: the form of each, and of those that only other replicas have.
      values: numbers and texts, by name.
    """

    home: Groups
    stage: str = ""
    pieces: dict[str, LocalPiece] = field(default_factory=dict)
    tensors: dict[str, directory.Form] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, piece: LocalPiece, replicas: directory.Replicas) -> None:
        """Add what this rank has of a tensor, of which each independent replica has its own."""
        home, names = piece.home, [name]
        if home and replicas == "independent":
            names = [f"{name} of replica {i}" for i in range(home.num_replicas)]
            name, piece = names[home.replicas.rank], piece._replace(home=home.replica)
        form = shards.dtype_name(piece.data.dtype), piece.shape
        self.tensors.update(dict.fromkeys(names, form))
        self.pieces[name] = piece

    def facts(self) -> list[tuple[str, str]]:
        """What ranks compare of it: of what each of them has in full, its values too."""
        facts = {name: f"{x!r}" for name, x in self.values.items()}
        facts |= {name: f"{shape} {kind}" for name, (kind, shape) in self.tensors.items()}
        for name, x in self.pieces.items():
            if not x.home:
                facts[name] += f", values {int(collectives.checksum(x.data)):x}"
        return [*facts.items()]


def written_here(contents: Contents, extras: Mapping[str, Tensor]) -> dict[directory.Slice, Tensor]:
    """The slices that this rank writes; of ranks that hold the same, each writes a part.

    The next slice is of whoever has fewest bytes so far. As all of these ranks hold the same, each
    knows that without a message.

    Args:
      contents: of the state.
      extras: other tensors that this rank alone saves.
    """
    main, own, place = contents.home, dict[str, LocalPiece](), contents.home.place
    alike = main.stage.stacked_ranks
    for name, x in extras.items():
        raw = _dense(x).as_strided((x.numel(),), (1,)).view(torch.uint8)
        own[f"{name} of rank {place}"] = LocalPiece(raw, 0, (), main.replica)
    heaps: dict[Any, list[tuple[int, int]]] = {}
    found: dict[directory.Slice, Tensor] = {}
    for name, piece in (contents.pieces | own).items():
        me, ranks = alike.index(main.rank), len(alike)
        if piece.home is not None:
            me, ranks = piece.home.replicas.rank, piece.home.num_replicas
        heap = heaps.setdefault((piece.home, ranks), [(0, i) for i in range(ranks)])
        data = piece.data if piece.data.dim() == 1 else piece.data.reshape(-1)
        at_once = directory.SLICE_BYTES // data.dtype.itemsize
        for low in range(0, len(data), at_once):
            part = data[low : low + at_once]
            load, writer = heap[0]
            heapq.heapreplace(heap, (load + len(part) * data.dtype.itemsize, writer))
            if writer == me:
                first = piece.origin + low
                found[directory.Slice(name, first, first + len(part))] = part
    return found


def contents_of(
    verb: str, state: Tree, groups: Any, home: Groups, replicas: directory.Replicas
) -> Contents:
    """What a state holds; `home` is its `main_home`.

    Raises:
      LeafError: a leaf is neither a shard nor a dense tensor, a number or a text.
      PlanError: shards were made for other groups.
    """
    homes, found, plain = homes_by_bucket(verb, state, groups), Contents(home), by_leaf(state)
    if home.model is not None and home.model.stages.size > 1:
        found = Contents(home, f" of stage {home.model.stages.rank}")
    tree.refuse_equal_paths(verb, plain, "", is_leaf)
    leaves = tree.flatten(plain, is_leaf)[0]
    for name, leaf in zip(tree.paths(plain, "", is_leaf), leaves, strict=True):
        if isinstance(leaf, shards.Nothing | shards.Tied):
            continue
        if is_leaf(leaf) and leaf.bucket is not None:
            own = homes.get(leaf.bucket, home)
            own = own if own.model is None or leaf.bucket.cut else own.copies
            for key, piece in _pieces_of(verb, name, leaf, own).items():
                found.add(key + found.stage, piece, replicas)
        elif isinstance(leaf, Tensor) or is_leaf(leaf):
            x = directory.savable(verb, name, leaf.data if is_leaf(leaf) else leaf)
            found.add(name + found.stage, LocalPiece(x, 0, tuple(x.shape)), replicas)
        elif isinstance(leaf, bool | int | float | str):
            found.values[name + found.stage] = leaf
        else:
            fix = "keep shards, tensors, numbers and texts in a state; pass the rest as extra="
            raise LeafError(f"{verb}: {name} is {type(leaf).__name__}", fix=fix)
    return found


def _pieces_of(verb: str, name: str, leaf: Any, home: Groups) -> dict[str, LocalPiece]:
    """What this rank has of a shard, by the names under which it is saved.

    Codes are saved as they are kept, under names that say which they are, so that no state takes
    them for codes of another kind. Their blocks do not depend on the ranks that hold them.
    """
    bucket, route, model = leaf.bucket, home.hierarchy.route, home.model
    data = directory.savable(verb, name, leaf.data)
    right = bucket.parts == route.size and (model is not None or not bucket.cut)
    piece = shards.pieces(bucket, route.chunk)[leaf.slot] if right else None
    if piece is None or data.shape != (piece.length,):
        text = f"{verb}: {name} is cut in {bucket.parts}, here {tuple(data.shape)}"
        fix = "pass the groups that the tree was sharded with"
        raise PlanError(f"{text}; its groups have {route.size} ranks", fix=fix)
    count, part, of, shape = 1, 0, "", leaf.shape
    if model is not None and bucket.cut:
        count, part, shape = model.parts.size, model.parts.rank, (model.parts.size, *shape)
        of = f" in parts along {bucket.cut[leaf.slot]}"
    codec: collectives.Codec | None = bucket.codes
    if codec is None or not is_coded(leaf.data):
        first = part * bucket.numels[leaf.slot] + piece.origin
        return {name + of: LocalPiece(data, first, shape, home)}
    kept: Any = data
    codes, scales = kept.part_codes()
    nbytes, block = kept.codes.elements.shape[1], codec.block
    blocks, of = -(-bucket.numels[leaf.slot] // block), of.replace("in", f"in {count}")
    first, name, every = part * blocks + piece.origin // block, f"{name} as {codec}", count * blocks
    return {  # of which as many parts are read
        name + of: LocalPiece(codes, first * nbytes, (every * nbytes,), home),
        f"{name}, scales{of}": LocalPiece(scales, first, (every,), home),
    }


def homes_by_bucket(verb: str, state: Tree, groups: Any) -> dict[shards.Bucket, Groups]:
    """The groups of each bucket of a state; those of its parameters if it is a `TrainState`."""
    if isinstance(groups, Groups):
        return {}
    nodes = tree.flatten(state, lambda x: isinstance(x, TrainState))[0]
    states = [x for x in nodes if isinstance(x, TrainState)]
    params = states[0].params if states else state
    leaves = tree.flatten(params, is_leaf)[0]
    pairs = zip(leaves, shards.homes_of(verb, groups, params), strict=True)
    return {leaf.bucket: home for leaf, home in pairs if getattr(leaf, "bucket", None)}


def main_home(verb: str, state: Tree, groups: Any) -> Groups:
    """Return the groups whose ranks save one checkpoint.

    Raises:
      PlanError: leaves live on groups that do not reach the same ranks.
    """
    found = [*dict.fromkeys(homes_by_bucket(verb, state, groups).values())] or [groups]
    for home in found:
        home.partition.check_open()
        if {*home.all_ranks} != {*found[0].all_ranks}:
            fix = "save the leaves of each of them in a folder of its own"
            text = f"{verb}: leaves live on groups of different ranks"
            raise PlanError(text, [found[0].describe(), home.describe()], fix)
    return found[0]


# Copies of what a save writes, in host memory that is used again by the next one.

_ALIGN = 64  # bytes; of a copy, for vector loads


# Host memory of this process that no save uses, by the kind of device that copies to it. A save
# takes it and gives it back when it has ended. Of several pieces, as saves to several folders may
# be under way at the same time, the largest is kept for each kind of device.
FREE: dict[str, Tensor] = {}


def on_host(tensors: Mapping[Any, Tensor]) -> AbstractContextManager[dict[Any, Tensor]]:
    """A block that has these tensors on the host: themselves if they are there already."""
    if all(x.is_cpu or in_file(x) for x in tensors.values()):
        return nullcontext({name: _dense(x) for name, x in tensors.items()})
    return copied(tensors)


def copied(tensors: Mapping[Any, Tensor]) -> AbstractContextManager[dict[Any, Tensor]]:
    """Copy tensors; the result is a block that has the copies.

    What lies in files is not copied but held, so that steps meanwhile write to other parts, and
    the block has it as it was; see [Note: locked parts] in `offload.placed`.

    On an accelerator the copies are queued on the current stream, in front of whatever changes
    the tensors next, and the block waits for them, not the caller.
    """
    in_files: dict[Any, Any] = {name: x for name, x in tensors.items() if in_file(x)}
    lock = ReadLock(in_files.values())
    near = {k: x for k, x in tensors.items() if k not in in_files}
    devices = {x.device for x in near.values() if _torch.is_async(x.device)}
    sizes = [-(-x.nbytes // _ALIGN) * _ALIGN for x in near.values()]
    device = next(iter(devices), torch.device("cpu"))
    memory = FREE.pop(device.type, None)
    if memory is None or len(memory) < sum(sizes):
        memory = None  # if it is too small, it goes before a larger one is made
        memory = _torch.host_buffer(sum(sizes), device)
    parts = memory[: sum(sizes)].split(sizes)
    copies = {
        name: part[: x.nbytes].view(x.dtype).view(x.shape)
        for (name, x), part in zip(near.items(), parts, strict=True)
    }
    if near:
        pinned = bool(devices) and memory.is_pinned()
        with torch.no_grad():
            _torch.foreach_copy(list(copies.values()), list(near.values()), non_blocking=pinned)
    events = [_torch.record(device) for device in devices]
    order = list(tensors)

    @contextmanager
    def block() -> Iterator[dict[Any, Tensor]]:
        try:
            for event in events:
                event.synchronize()
            yield {k: in_files[k].mapped() if k in in_files else copies[k] for k in order}
        finally:
            lock.release()
            if len(memory) > len(FREE.get(device.type, ())):
                FREE[device.type] = memory

    return block()


def _dense(x: Any) -> Tensor:
    if _torch.is_wrapper(x):  # it lies in a file, or as codes
        return x.mapped() if in_file(x) else read(x)
    return x.detach().resolve_conj().resolve_neg().contiguous()


# The start of a save: what all ranks compare before the first byte is written.


class SaveOptions(TypedDict, total=False):
    """Options of `save` and `start_save`; see `save`."""

    overwrite: directory.Overwrite
    replicas: directory.Replicas
    keep: int | None


def _check(step: int, options: SaveOptions) -> None:
    """Raise PlanError or TypeError unless they are what they should be."""
    for name in options.keys() - SaveOptions.__annotations__.keys():
        raise TypeError(f"save() got an unexpected keyword argument {name!r}")
    checks.integer("save", "step", step, 0)
    checks.integer("save", "keep", options.get("keep"), optional=True)
    checks.choice("save", "overwrite", options.get("overwrite", "never"), "never", "newer")
    checks.choice("save", "replicas", options.get("replicas", "equal"), "equal", "independent")


_STATE = "save: the state"


def agree_on(
    verb: str, path: Any, state: Tree, groups: Any, step: int, extra: Any, options: SaveOptions
) -> tuple["PendingSave", Callable[[], dict[directory.Slice, Tensor]]]:
    """Compare a save between ranks, and let the first one make its folder.

    Args:
      verb: "save" or "start_save".
      path, state, groups, step, extra, options: as it was given. If `extra` is an error, which
        this rank met when it made it, all ranks raise.

    Returns:
      The save, and what gives the slices that this rank writes; only that refers to the state.

    Raises:
      FileError: on all ranks, if it cannot begin; also if the save before this one failed.
      DesyncError: ranks save other steps or other states.
    """
    shards.refuse_derivative(f"checkpoint.{verb}", (), "call it outside of torch.func")
    checks.path(verb, "path", path)
    spans.passing("save", step)
    replicas: directory.Replicas = options.get("replicas", "equal")
    folder, home = folder_to_write(path), main_home("save", state, groups)
    if home.state.members and not home.state.saves:  # another process may be the first rank since
        with together("save", home) as exchange:
            exchange.mine = folder.epoch
        folder.epoch = max(exchange.all.values())
    try:
        with together("save", home) as exchange:
            _check(step, options)
            folder_to_read("save", folder, raises=True)
            contents = contents_of("save", state, groups, home, replicas)
            if not contents.pieces:
                fix = "pass a TrainState, or a tree with shards or tensors"
                raise LeafError("save: the state has no tensor to save", fix=fix)
            if isinstance(extra, Exception):
                raise extra
            text, extras = directory.encoded(extra)
            of_extra = [text, *(f"{int(collectives.checksum(x))}" for x in extras.values())]
            facts, values = contents.facts(), contents.values
            exchange.fact = f"step {step} in {folder.path}, {sorted(options.items())}"
            exchange.mine = {"state": tree.digest([f"{facts}"]).hex()}
            exchange.mine["extra"] = tree.digest(of_extra).hex()
            if not home.place:
                new = folder.begin(step, options.get("overwrite", "never"))
                exchange.mine["new"] = str(new), folder.epoch
        said, ranks = exchange.differing("state"), home.all_ranks  # stages have other states
        starts = range(0, len(ranks), len(home.stage.stacked_ranks))
        if said and any(len({*map(said.get, ranks[i : i + starts.step])}) > 1 for i in starts):
            # Ranks that differ now may have saved each of these states together before.
            home.agreed.difference_update([seen for seen in home.agreed if seen[0] == _STATE])
            fix = "let it be equal on all ranks, or pass it in extra=, where each rank has its own;"
            fix += " a state that is torn is mended by same_step(state, groups, heal=True)"
            full = [*values, *(name for name, x in contents.pieces.items() if not x.home)]
            agree(home, _STATE, facts, dict.fromkeys(full, fix))
            raise DesyncError(f"{_STATE} differs between ranks of another stage", fix=fix)
    except BaseException:
        folder.abandon()
        raise
    if home.place and not exchange.differing("extra"):
        text, extras = "", {}
    # Any rank may be the first one later, in groups that follow these.
    new, folder.epoch = exchange.all[home.all_ranks[0]]["new"]
    found = directory.Manifest(step, contents.tensors, values)
    pending = PendingSave(home, folder, Path(new), options, found, text)
    return pending, partial(written_here, contents, extras)


# `PendingSave`: a save under way, and how its ranks come to one end; see [Note: no plan
# travels].

_GRACE_S = 5.0  # in which a rank that failed may still leave its record
_GONE = ("killed", "silent")  # failures of ranks that leave none
_WAIT_S = 0.1  # between two looks of whoever waits for a save
_BEHIND = 19  # how nice a thread is that only writes


@dataclass(eq=False, repr=False)
class PendingSave:
    """A save that all ranks have agreed on, without anything of the state; made by `start_save`.

    Args:
      home: the groups whose ranks save.
      folder: the folder of the job.
      new: the folder that files are written into.
      options: how to save.
      found: what the step holds, but for its files.
      extra: what this rank gave besides the state, as JSON; "" if the first one has it for all.
    """

    home: Groups
    folder: directory.Folder
    new: Path
    options: SaveOptions
    found: directory.Manifest
    extra: str

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.found.step

    def write(self, block: OnHost) -> directory.SavedFile:
        """Write this rank's file, of what a block has."""
        path = self.new / directory.part_name(self.home.place)
        with block as tensors:
            spans.passing("save: write", self.step)
            with directory.write_errors("save: cannot write", path):
                return directory.write_part(path, tensors)._replace(extra=self.extra)

    def begin(self, write: Callable[[], directory.SavedFile], *, follows: bool) -> None:
        """Go on in a thread.

        Args:
          write: writes this rank's file, or gives what came of that.
          follows: whether training goes on, and `due` is called after each step.
        """
        home, state = self.home, self.home.state
        state.saves += 1
        self._place, self._store = os.path.realpath(self.folder.path), state.channel.store
        self._key = f"{state.key}/save/{home.all_ranks[0]}"  # all replicas have one state
        self._number, self._write = state.saves, write
        self._reported = not follows  # whether the program knows how it ended: it waits for itself
        self._stop = StopRequest(home, ()).__enter__() if follows else None
        state.endings.append(self.finish)
        self._job = Job(self._run)
        _UNDER_WAY[self._place] = self
        # A process that ends waits for this thread, as it is not a daemon.
        self._job.begin("mics_fn save", daemon=False)

    @property
    def error(self) -> BaseException | None:
        """What it ended with, if it failed."""
        return self._job.error

    @property
    def done(self) -> bool:
        """Whether it has ended on this rank; ranks may see that in different steps."""
        thread = self._job.thread
        return thread is None or not thread.is_alive()  # of a fork it never is

    def due(self) -> bool:
        """Whether it has failed, and `wait` would raise; all ranks call it at the end of each step.

        Returns:
          True on all ranks after the same step, and from then on.

        Communication: none until it has failed; then once, through the store.
        """
        return self._stop is not None and self._stop.due()

    def wait(self) -> Path:
        """Wait until the step is committed.

        Returns:
          The folder of the step.

        Raises:
          FileError: it failed, with one text on all ranks. Nothing has changed on the disk.
        """
        self.finish()
        self._reported = True
        if not self._job.done.is_set():
            text = f"save: step {self.step} is saved by the process that this one was forked from"
            raise FileError(text, self._place)
        return self._job.result()

    def finish(self) -> None:
        """Wait for the end of the save."""
        while not self.done:
            self._job.done.wait(_WAIT_S)
        if _UNDER_WAY.get(self._place) is self and (self._reported or self.error is None):
            del _UNDER_WAY[self._place]
        if self.finish in self.home.state.endings:
            self.home.state.endings.remove(self.finish)
            if self._stop is not None:
                self._stop.__exit__(None, None, None)

    # On the thread.

    def _run(self) -> Path:
        if self._stop is not None:
            with suppress(AttributeError, OSError):  # below the threads that compute, if it can be
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND)
        written = Job(self._write)
        written.run()
        try:
            return self._end(written)
        except BaseException:
            if self._stop is not None:
                self._stop.ask()
            raise
        finally:
            self.folder.abandon()  # which keeps what is committed
            del self._write, written  # they refer to the state, which may have been replaced

    def _end(self, written: Job) -> Path:
        """Publish this rank's record, and wait for the result of the rank that commits."""
        home, store, key = self.home, self._store, f"{self._key}/{self._number}"
        place, ranks = home.place, home.all_ranks
        if len(ranks) == 1:
            if written.error is not None:
                self.folder.check_owned()
            return self._commit([written.result()])
        record = [collectives.encoded_error(written.error), written.value, {}, {}]
        if place and home.rank == home.stage.stacked_ranks[0]:  # of another stage
            record[2:] = self.found.tensors, self.found.values
        store.set(f"{key}/{place}", json.dumps(record))
        if not place:
            store.set(f"{key}/end", json.dumps(self._judged(key)))
            # All ranks have read the end of the save before this one, or had not begun this one.
            before = f"{self._key}/{self._number - 1}/end"
            for done in (*(f"{key}/{i}" for i in range(len(ranks))), before):
                later(store, "delete_key", done)
        first, end = ranks[0], [f"{key}/end"]
        # The first rank waits for the others itself, so it may take as long as that again.
        what = f"the word of rank {first} that it is committed"
        self._await(lambda: store.check(end), what, lambda: [first], 2 * _GRACE_S)
        failed, path = json.loads(store.get(*end))
        if failed:
            raise collectives.decoded_error({int(rank): each for rank, each in failed.items()})
        return Path(path)

    def _judged(self, key: str) -> tuple[dict[int, Any], str]:
        """Commit once all files are written; return the ranks that failed, and the step's path."""
        home, store = self.home, self._store
        places = {rank: f"{key}/{i}" for i, rank in enumerate(home.all_ranks)}
        try:
            self._await(
                lambda: store.check([*places.values()]),
                "the files of all ranks",
                lambda: [rank for rank, place in places.items() if not store.check([place])],
            )
            said = {rank: json.loads(store.get(place)) for rank, place in places.items()}
            failed = {rank: error for rank, (error, *_) in said.items() if error}
            if failed:
                self.folder.check_owned()
                return failed, ""
            files = [directory.SavedFile.of_json(file) for _, file, *_ in said.values()]
            for *_, tensors, values in said.values():
                self.found.tensors.update(tensors)
                self.found.values.update(values)
            return {}, str(self._commit(files))
        except BaseException as error:  # also of a program that ends this thread
            return {home.rank: collectives.encoded_error(error)}, ""

    def _commit(self, files: list[directory.SavedFile]) -> Path:
        home, folder, options = self.home, self.folder, self.options
        spans.passing("save: commit", self.step)
        for position, rank in enumerate(home.all_ranks):
            path = self.new / directory.part_name(position)
            if not path.is_file():
                folder.check_owned()
                text = f"save: {path} of rank {rank} is not seen by rank {home.rank}"
                fix = "save to a folder that all ranks share"
                raise FileError(message(text, fix=fix), str(path))
        with directory.write_errors("save: cannot commit", self.new):
            found = replace(self.found, files=files)
            found.check()
            path = folder.commit(self.new, found)
        try:
            folder.prune(options.get("keep"))
        except (OSError, FileError) as error:  # the step is committed all the same
            LOG.warning("save: older steps in %s stay: %s", folder.path, error)
        LOG.info("saved step %d in %s", self.step, path)
        return path

    def _await(
        self,
        done: Callable[[], bool],
        what: str,
        missing: Callable[[], list[int]],
        grace_s: float = _GRACE_S,
    ) -> None:
        """Wait for other ranks, unless one of them has failed.

        Args:
          done: whether what is waited for is there.
          what: what is waited for, in words, for errors.
          missing: the ranks that are waited for; if one of them is gone, waiting is of no use.
          grace_s: how long to wait if another rank has failed, which may still write its file.
        """
        state, failed_s, limit_s = self.home.state, list[float](), self.home.timeout_s

        def lost(why: str) -> FileError:
            path = self.folder.path
            fix = "look at latest(), which tells whether the step counts, and save again"
            text = f"save: step {self.step} in {path} ended without {what}"
            return FileError(message(text, [why], fix), str(path))

        def check(idle_s: float) -> None:
            final = [each.text for each in state.standing.values() if each.final]
            if state.failed is None and not final:
                return
            failed_s.append(idle_s)
            known_dead = {x.rank: x.text for x in state.standing.values() if x.kind in _GONE}
            texts = [known_dead[rank] for rank in missing() if rank in known_dead]
            if (texts and not done()) or idle_s - failed_s[0] > grace_s:
                raise lost([*texts, *final, f"the groups have failed: {state.failed}"][0])

        if not poll(done, len(self.home.all_ranks), time.monotonic() + limit_s, check):
            raise lost(f"nothing came within {limit_s:g} s")


_UNDER_WAY: dict[str, PendingSave] = {}  # the last save of this process, by folder


# By process and path, the folder as it was last saved to; a forked process is another writer.
_WRITERS: dict[tuple[int, str], directory.Folder] = {}


def folder_to_write(path: str | os.PathLike[str]) -> directory.Folder:
    """The folder at a path, in the epoch in which this process owns it; see [Note: epochs]."""
    key = os.getpid(), os.path.realpath(path)
    if isinstance(path, directory.Folder):
        _WRITERS[key] = path
    return _WRITERS.setdefault(key, directory.Folder(path))


def folder_to_read(
    verb: str, path: str | os.PathLike[str], *, raises: bool = False
) -> directory.Folder:
    """The folder at a path, once the save to it that this process has under way has ended.

    Args:
      verb: for errors.
      path: the folder, by any of its names.
      raises: whether all ranks call this, so that a save that failed is raised if nobody was told;
        else the next save or load raises it. If the groups of the save are closed, other ranks may
        have heard something else: then it is logged.

    Raises:
      FileError: it failed.
    """
    pending = _UNDER_WAY.get(os.path.realpath(path))
    if pending is not None:
        pending.finish()  # if Ctrl-C ends this wait, the next save still waits for it
        if raises and _UNDER_WAY.pop(os.path.realpath(path), None) is not None:
            if not pending.home.state.closed:
                pending.wait()
            LOG.warning("%s: step %d was not saved: %s", verb, pending.step, pending.error)
    return directory.Folder(path)


def save(
    path: str | os.PathLike[str],
    state: Tree,
    groups: Any,
    *,
    step: int,
    extra: Any = None,
    **options: Unpack[SaveOptions],
) -> Path:
    """Save a state as a step that counts once it is whole. All ranks call it.

    Args:
      path: the folder of the job's checkpoints, which all ranks share; it need not exist.
      state: a `TrainState`, or any pytree of shards, tensors, numbers and texts. Numbers are equal
        on all ranks, and so are tensors that are not sharded.
      groups: as for `shard`; for a `TrainState` those of its parameters. If they are several, each
        reaches the same ranks. All ranks of a model in parts write one step.
      step: the number of the step, at least 0.
      extra: what else to keep: dicts, lists, tuples, numbers, texts and tensors. It may differ
        between ranks, and each of them has its own again; on other ranks one of these.
      options: `overwrite`, `replicas` and `keep`. With `overwrite="never"`, the
        default, a step that is not above all committed ones is refused. "newer" writes it, and
        the steps from it on that were there do not count any more, as after a rollback. They are
        removed as soon as two others count; see [Note: epochs] in `checkpoint.directory`. Say
        `replicas="independent"` while replicas have values of their own, as with `local_sgd`; each
        is saved. `keep` is how many of the newest steps are kept, at least 2; None, the default,
        keeps all.

    Returns:
      The folder of the step.

    Communication: two small all-gathers over the partition group and over the replication group,
      and two messages to the store, one of which has about 60 bytes and a name for each slice, a
      leaf or 4 MiB of it. Nothing is planned.

    Memory: none on the CPU; on an accelerator what this rank writes, 1/r of its shards, in host
      memory that is kept for the next save.

    Raises:
      FileError: the step would not be the newest, or a newer job has taken the folder.
      FileError: some rank cannot write; on all of them. Nothing has changed.
      DesyncError: ranks save other steps or states, or a tensor that is not sharded differs.
      PlanError, LeafError: the state cannot be saved like this, or has no tensor.

    Example:
      >>> import tempfile
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.adamw(0.1))
      >>> folder = tempfile.mkdtemp()
      >>> checkpoint.save(folder, state, groups, step=1).name
      'step-00000001'
      >>> checkpoint.steps(folder)
      [1]

    References: CheckFreq, Mohan et al., FAST 2021.
    """
    return _begun("save", path, state, groups, step, extra, options).wait()


def start_save(
    path: str | os.PathLike[str],
    state: Tree,
    groups: Any,
    *,
    step: int,
    extra: Any = None,
    **options: Unpack[SaveOptions],
) -> PendingSave:
    """Copy the state, and write the copy in the background.

    The state may change, and may be donated, as soon as this returns. One save is under way at a
    time: the next one waits for it first. Leaving the groups, and the end of the process, wait too.

    Args:
      path, state, groups, step, extra, options: as for `save`.

    Returns:
      A `PendingSave`. `latest`, `steps`, `verify` and `load` of this process wait for its end.

    Communication: as for `save`. The messages to the store are those of a thread.

    Memory: a copy of what this rank writes, 1/r of its shards, kept for the next save. What lies in
      files is read from there while it is written, and takes none. Steps with `donate=True` write
      it to other parts of the files meanwhile, which so grow by what is saved until that ends.

    Raises:
      FileError: the save before this one failed, and nobody was told; and as for `save`.

    Example:
      >>> import tempfile
      >>> groups = make_groups(1)
      >>> params = shard({"w": torch.ones(2)}, groups)
      >>> pending = checkpoint.start_save(tempfile.mkdtemp(), params, groups, step=1)
      >>> pending.wait().name
      'step-00000001'
    """
    return _begun("start_save", path, state, groups, step, extra, options)


def _begun(
    verb: str, path: Any, state: Tree, groups: Any, step: int, extra: Any, options: SaveOptions
) -> PendingSave:
    """Copy or write what this rank saves; whether that fails or not, all ranks come to one end."""
    pending, slices = agree_on(verb, path, state, groups, step, extra, options)
    if follows := verb == "start_save":
        done = Job(lambda: copied(slices()))
    else:
        done = Job(lambda: pending.write(on_host(slices())))
    done.run()
    pending.begin(
        (lambda: pending.write(done.result())) if follows else done.result, follows=follows
    )
    if done.error is not None and not isinstance(done.error, Exception):
        raise done.error  # Ctrl-C; the other ranks hear of it
    return pending


def take_folder(
    folder: directory.Folder, home: Groups, buffers: Mapping[str, Tensor], *, own: bool
) -> int | None:
    """Make a folder if it is missing, and try whether every rank can save there.

    Args:
      folder: the folder that steps will be saved in.
      home: the groups whose ranks will save.
      buffers: tensors that will be saved, by name.
      own: whether to take it, so that no older job saves there from now on; see [Note: epochs].

    Returns:
      The newest step in it, if there is one.

    Communication: two small all-gathers over the partition group and the replication group.

    Raises:
      FileError: some rank cannot, or a newer job has it; on all of them.
      LeafError: a tensor cannot be saved; on other ranks a FileError.
    """
    what = "Checkpoints: cannot write to"
    with together("Checkpoints", home) as exchange, directory.write_errors(what, folder.path):
        for name, x in buffers.items():
            directory.savable("Checkpoints", f"buffer {name!r}", x)
        folder.path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        if own:
            folder_to_read("Checkpoints", folder, raises=True)
            folder_to_write(folder)
            if not home.place:
                folder.own()
        exchange.mine = folder.epoch, max(folder.committed(), default=None)
    folder.epoch = max(epoch for epoch, _ in exchange.all.values())  # the first rank may be new
    return exchange.all[home.all_ranks[0]][1]
