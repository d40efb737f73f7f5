"""`save` and `start_save`: a state becomes a committed step, written by all ranks together.

[Note: no plan travels] Each rank knows by arithmetic what it writes, so nobody collects plans. At
the start ranks compare digests, and the first rank makes the folder. Then each of them writes its
file and leaves a record of fixed size in the store; the first rank reads the records, writes the
manifest, commits, and says so. After the start this needs no collective, so a thread does it while
training goes on.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, cast

import torch
from torch import Tensor

from mics_fn import checks, spans, tree
from mics_fn._version import __version__
from mics_fn.checkpoint.directory import (
    MAX_STEP,
    Commit,
    FileRecord,
    Folder,
    Overwrite,
    cannot_write,
    slice_name,
    step_back,
    write_part,
)
from mics_fn.checkpoint.manifest import Manifest, SavedTensor, Writer, encoded, savable
from mics_fn.checkpoint.snapshot import (
    Contents,
    Replicas,
    Snapshot,
    contents_of,
    homes_by_bucket,
    main_home,
    on_bytes,
)
from mics_fn.collectives import agree, collect_bytes
from mics_fn.errors import (
    CheckpointNotFound,
    FileError,
    LeafError,
    LostStateError,
    MicsError,
    PlanError,
    disagreement,
    message,
    name_ranks,
    rank_lines,
)
from mics_fn.groups import Groups, GroupState, StopRequest
from mics_fn.shards import refuse_derivative
from mics_fn.spans import LOG
from mics_fn.store import Store, later, poll
from mics_fn.threads import start
from mics_fn.tree import Tree

# Decisions that all ranks take together: if one of them fails, all raise the same error.

# Bytes that a message is a multiple of: calls of one size repeat, and are foreseen by all ranks.
_ROUND = 512


class Exchange:
    """Values that ranks exchange at the end of a block: `mine`, and those of all by rank."""

    def __init__(self) -> None:
        self.mine: Any = None
        self.all: dict[int, Any] = {}


@contextmanager
def together(home: Groups) -> Iterator[Exchange]:
    """A block of work that sends nothing; if it raises on some ranks, all raise that error.

    Args:
      home: groups whose ranks do it.

    Yields:
      `Exchange`, to which the block may give something that all ranks get.

    Communication: two small all-gathers over the partition group and over the replication group.

    Raises:
      FileError: the first error of any rank, on all of them, with its type and text. Other
        errors come first; they come as they are on their rank, and as a FileError on others.
    """
    exchange, error = Exchange(), None
    try:
        yield exchange
    except Exception as found:
        error = found
    if home.world_size == 1:
        if error is not None:
            raise error
        exchange.all = {home.rank: exchange.mine}
        return
    said = json.dumps({"error": encoded_error(error), "value": exchange.mine}).encode()
    said = said.ljust(-(-len(said) // _ROUND) * _ROUND)
    found = {rank: json.loads(text) for rank, text in collect_bytes(home, said).items()}
    failed = {rank: each["error"] for rank, each in sorted(found.items()) if each["error"]}
    if failed:
        if error is not None and not isinstance(error, FileError):
            raise error
        raise decoded_error(failed) from error
    exchange.all = {rank: each["value"] for rank, each in found.items()}


def encoded_error(error: Exception | None) -> list[Any] | None:
    """Encode an error for the other ranks."""
    if error is None:
        return None
    first = str(error) if isinstance(error, MicsError) else f"{type(error).__name__}: {error}"
    place = [getattr(error, "path", ""), getattr(error, "leaf", "")]
    return [type(error).__name__, first, *map(str, place), getattr(error, "damaged", None)]


def decoded_error(failed: Mapping[int, list[Any]]) -> FileError:
    """Decode the error that all ranks raise: the first one, with the ranks it occurred on."""
    # Of two errors all ranks must raise one, or some would try an older step without the others.
    name, text, path, leaf, damaged = failed[min(failed, key=lambda r: (bool(failed[r][4]), r))]
    kind = CheckpointNotFound if name == "CheckpointNotFound" else FileError
    alike = [rank for rank, each in failed.items() if each[0] == name]
    head, *rest = text.split("\n")
    lines = [head, f"  on {name_ranks(alike)}", *rest]
    return kind("\n".join(lines), path, leaf, damaged=damaged)


# The start of a save: what all ranks compare before the first byte is written.

EXTRA = "$extra"  # the name of what a rank gave besides the state, as JSON, in its file


@dataclass(frozen=True)
class Options:
    """The options of a save; see `save`."""

    step: int
    overwrite: Overwrite
    replicas: Replicas
    commit: Commit
    keep: int | None
    keep_every: int | None

    def check(self) -> None:
        """Raise PlanError unless they are what they should be."""
        checks.integer("save", "step", self.step, 0)
        if self.step > MAX_STEP:
            raise PlanError(f"save: step={self.step}, expected at most {MAX_STEP}")
        for name, value in (("keep", self.keep), ("keep_every", self.keep_every)):
            if value is not None:
                checks.integer("save", name, value)
        checks.choice("save", "overwrite", self.overwrite, "never", "newer")
        checks.choice("save", "replicas", self.replicas, "equal", "apart")
        checks.choice("save", "commit", self.commit, "rename", "file")


@dataclass(frozen=True, eq=False)
class Agreed:
    """A save that all ranks have agreed on, as one of them sees it.

    Args:
      home: the groups whose ranks save.
      folder: the folder of the job.
      path: the folder that files are written into.
      options: how to save.
      tensors: the tensors of this rank's file, by name.
      cells: for each set of groups the numbers of this rank's chunk and replica.
      manifest: made from the records of all files.
      failed: why this rank cannot write, if it cannot.
    """

    home: Groups
    folder: Folder
    path: Path
    options: Options
    tensors: dict[str, Tensor]
    cells: list[list[int]]
    manifest: Callable[[list[Writer]], Manifest]
    failed: Exception | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank commits."""
        return self.home.position == 0

    @property
    def file(self) -> Path:
        """The file of this rank."""
        return self.path / f"rank-{self.home.position:05d}.safetensors"

    def emptied(self) -> "Agreed":
        """This save without anything of the state."""
        return replace(self, tensors={}, manifest=_no_manifest)


def _no_manifest(writers: list[Writer]) -> Manifest:
    raise FileError("save: it has ended")


def agree_on(
    folder: Folder,
    state: Tree,
    groups: Any,
    extra: Any,
    options: Options,
    settle: Callable[[Path], None],
) -> Agreed:
    """Compare a save between ranks, and let the first one make its folder.

    Args:
      folder, state, groups, extra, options: as given to `save`. If `extra` is an error, which this
        rank met when it made it, all ranks raise.
      settle: waits for the save before this one, whose error all ranks raise if one does.

    Raises:
      FileError: on all ranks, if it cannot begin.
      DesyncError: ranks save other steps or other states.
      LostStateError: their states have taken different numbers of steps.
    """
    home = main_home("save", groups, homes_by_bucket("save", state, groups))
    try:
        with together(home) as exchange:
            options.check()
            settle(folder.path)
            found = contents_of("save", state, groups, options.replicas)
            if not (found.cut or found.plain):
                fix = "pass a TrainState, or a tree with shards or tensors"
                raise LeafError("save: the state has no tensor to save", fix=fix)
            if isinstance(extra, Exception):
                raise extra
            text, tensors = encoded(extra, EXTRA)
            extras = {EXTRA: torch.tensor(list(text.encode()), dtype=torch.uint8), **tensors}
            what = f"step {options.step} in {folder.path}, {options}"
            said = [what, _values(found, steps=True), _values(found)]
            sums = found.plain_sums()
            digests = [json.dumps(sums), text + json.dumps(Contents(plain=extras).plain_sums())]
            path = None
            if home.position == 0:
                path = str(folder.begin(options.step, options.overwrite, options.commit))
            exchange.mine = [said, [tree.digest([each]).hex() for each in digests], path]
        _compare({rank: each[0] for rank, each in exchange.all.items()})
        agree(home, "save: the state", found.facts())
        equal = [len({each[1][i] for each in exchange.all.values()}) == 1 for i in range(2)]
        own = {} if equal[0] else _differing(home, found, sums)
    except BaseException:
        if home.position == 0:
            folder.abandon()
        raise
    first = exchange.all[home.ranks[0]]
    kept, path = {} if equal[1] and home.position else extras, Path(first[2])
    try:
        return _agreed(home, folder, path, options, found, own, kept, "same" if equal[1] else "own")
    except Exception as error:  # the other ranks have begun, and hear of it as of one of writing
        return Agreed(home, folder, path, options, {}, [], _no_manifest, error)


def _agreed(
    home: Groups,
    folder: Folder,
    path: Path,
    options: Options,
    found: Contents,
    own: dict[str, Tensor],
    extras: dict[str, Tensor],
    kind: str,
) -> Agreed:
    """What this rank writes, and how the manifest is made; `own` differs between ranks."""
    shared = {name: x for name, x in found.plain.items() if name not in own}
    line, places, bytes_mine = on_bytes(shared, home.world_size, len(found.lines), home.position)
    mine = {slice_name(name, part): x for name, (part, x) in found.mine().items()}
    mine |= {slice_name(name, part): x for name, (part, x) in bytes_mine.items()}
    mine |= {name: x.contiguous() for name, x in own.items()}
    mine |= {name: x.contiguous() for name, x in extras.items()}
    alone = [SavedTensor(name, x.dtype, tuple(x.shape)) for name, x in own.items()]
    homes = [[each.partition_size, each.num_replicas] for each in found.homes]
    lines, tensors = [*found.lines, line], [*found.cut, *places, *alone]
    values, ties = found.values, found.ties
    cells = found.cells_of_homes()

    def manifest(writers: list[Writer]) -> Manifest:
        return Manifest(
            step=options.step,
            versions={"mics_fn": __version__, "torch": torch.__version__},
            replicas=options.replicas,
            homes=homes,
            lines=lines,
            tensors=tensors,
            values=values,
            ties=ties,
            writers=writers,
            extra=kind,
            commit=options.commit,
        )

    return Agreed(home, folder, path, options, mine, cells, manifest)


def _differing(home: Groups, found: Contents, sums: dict[str, str]) -> dict[str, Tensor]:
    """Return the unsharded tensors that differ between ranks."""
    with together(home) as exchange:
        exchange.mine = sums
    own = {name for each in exchange.all.values() for name in sums if each[name] != sums[name]}
    return {name: x for name, x in found.plain.items() if name in own}


def _values(found: Contents, *, steps: bool = False) -> str:
    """The numbers of a state, or only how many steps it has taken, as text."""
    pairs = found.values.items()
    return ", ".join(
        f"{k}={v!r}" for k, v in pairs if not steps or k == "step" or k.endswith(".step")
    )


def _compare(said: dict[int, list[str]]) -> None:
    """Raise DesyncError unless all ranks save the same step of the same values."""
    for i, what in enumerate(("what they save", "their steps", "the numbers of the state")):
        texts = {rank: each[i] for rank, each in said.items()}
        if len(set(texts.values())) > 1:
            fix = "save the same step of the same state on all ranks"
            text = f"save: ranks differ in {what}"
            if what == "their steps":
                fix = (
                    "optim.same_step(state, groups, heal=True) takes the newer state from a replica"
                )
                raise LostStateError(text, rank_lines(texts), fix)
            raise disagreement(text, texts, fix)


# `PendingSave`: a save under way, and how its ranks come to one end; see [Note: no plan
# travels].

_GRACE_S = 5.0  # in which a rank that failed may still leave its record
_GONE = ("killed", "silent")  # failures of ranks that leave none
_WAIT_S = 0.1  # between two looks of whoever waits for a save


class PendingSave:
    """A save under way; made by `start_save`.

    Args:
      agreed: what is saved.
      write: writes this rank's file.
      follows: whether training goes on, and `due` is called after each step.
    """

    def __init__(
        self,
        agreed: Agreed,
        write: Callable[[], FileRecord | BaseException],
        *,
        follows: bool = True,
    ) -> None:
        self.step = agreed.options.step
        self._agreed, self._write, self._life = agreed, write, agreed.home.life
        self._alone = agreed.home.world_size == 1
        self._store = cast(Store, self._life.job.store)
        self._life.saves += 1
        self._number = self._life.saves
        self._key = self._key_of(self._number)
        self._timeout_s = agreed.home.timeout_s
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._reported = not follows  # whether the program knows how it ended: it waits for itself
        self._stop = StopRequest(agreed.home, ()).__enter__() if follows else None
        self._life.endings.append(self.finish)
        self._place = os.path.realpath(agreed.folder.path)
        # A process that ends waits for this thread, as it is not a daemon.
        self._thread = threading.Thread(target=self._run, name="mics_fn save")
        _UNDER_WAY[self._place] = self
        try:
            start(self._thread)
        except RuntimeError:  # the system has no thread left, and the other ranks wait for this one
            self._run()

    @property
    def done(self) -> bool:
        """Whether it has ended on this rank; ranks may see that in different steps."""
        return not self._thread.is_alive()

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
        if self._error is not None:
            raise self._error
        return cast(Path, self._path)

    def settle(self) -> None:
        """Wait for the save; raise its error if it was not reported.

        If its groups are closed, other ranks may have heard something else: then it is logged.
        """
        self.finish()
        if not self._reported and self._life.closed:
            self._reported = True
            if self._error is not None:
                LOG.warning("step %d was not saved: %s", self.step, self._error)
        elif not self._reported:
            self.wait()

    def finish(self) -> None:
        """Wait for the end of the save."""
        self._join(math.inf)
        if _UNDER_WAY.get(self._place) is self and (self._reported or self._error is None):
            del _UNDER_WAY[self._place]
        if self.finish in self._life.endings:
            self._life.endings.remove(self.finish)
            if self._stop is not None:
                self._stop.__exit__(None, None, None)

    def _join(self, limit_s: float) -> bool:
        """Wait for the end of the thread, so long at most; returns whether it has ended."""
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(_WAIT_S)
        return not self._thread.is_alive()

    def before_read(self, verb: str, *, raises: bool) -> None:
        """Wait for its end, for somebody who reads the folder; see `folder_to_read`."""
        if self._thread is threading.current_thread():
            return
        if not self._join(self._timeout_s):
            text = f"{verb}: step {self.step} in {self._place} is still being saved by this process"
            fix = "wait() for the save, or make its groups with a longer timeout_s"
            lines = [f"waited for {self._timeout_s:g} s, the timeout_s of its groups"]
            raise FileError(message(text, lines, fix), self._place)
        if raises:
            settle(Path(self._place))
        elif self._error is not None and not self._reported:
            LOG.warning("%s: step %d was not saved: %s", verb, self.step, self._error)

    # On the thread.

    def _run(self) -> None:
        if self._stop is not None:
            step_back()
        outcome: FileRecord | BaseException
        try:
            outcome = self._write()
        except BaseException as error:  # which the other ranks are told
            outcome = error
        try:
            self._path = self._end_alone(outcome) if self._alone else self._end(outcome)
        except BaseException as error:
            self._error = error
            if self._stop is not None:
                self._stop.ask()
        finally:
            self._agreed.folder.unlock()
            # Both refer to the state that was written, which the program may have replaced.
            self._write, self._agreed = _nothing, self._agreed.emptied()

    def _end_alone(self, outcome: FileRecord | BaseException) -> Path:
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            return self._committed([self._record(outcome)])
        except BaseException:
            self._agreed.folder.abandon()
            raise

    def _record(self, outcome: FileRecord) -> list[Any]:
        agreed = self._agreed
        name = agreed.file.name if outcome.nbytes else ""
        return [name, outcome.nbytes, outcome.header, agreed.cells]

    def _end(self, outcome: FileRecord | BaseException) -> Path:
        """Publish this rank's record, and wait for the result of the rank that commits."""
        home, store = self._agreed.home, self._store
        failed = isinstance(outcome, BaseException)
        mine = {"error": _encoded_outcome(outcome)} if failed else {"record": self._record(outcome)}
        store.set(f"{self._key}/{home.position}", json.dumps(mine))
        store.add(f"{self._key}/written", 1)
        if self._agreed.is_first:
            store.set(f"{self._key}/end", json.dumps(self._judged()))
            self._tidy()
        first = home.ranks[0]
        end = [f"{self._key}/end"]
        # The first rank waits for the others itself, so it may take as long as that again.
        what = f"the word of rank {first} that it is committed"
        self._await(lambda: store.check(end), what, lambda: [first], 2 * _GRACE_S)
        said = json.loads(store.get(f"{self._key}/end"))
        if "failed" in said:
            raise decoded_error({int(rank): error for rank, error in said["failed"].items()})
        return Path(said["path"])

    def _judged(self) -> dict[str, Any]:
        """Commit once all files are written; return the outcome to send to the other ranks."""
        home, store = self._agreed.home, self._store
        try:
            n = home.world_size
            count = f"{self._key}/written"
            self._await(lambda: store.add(count, 0) >= n, "the files of all ranks", self._missing)
            found = [json.loads(store.get(f"{self._key}/{i}")) for i in range(n)]
            pairs = enumerate(found)
            failed = {home.ranks[i]: each["error"] for i, each in pairs if "error" in each}
            if failed:
                self._agreed.folder.abandon()
                return {"failed": failed}
            return {"path": str(self._committed([each["record"] for each in found]))}
        except BaseException as error:  # also of a program that ends this thread
            self._agreed.folder.abandon()
            return {"failed": {home.rank: _encoded_outcome(error)}}

    def _committed(self, records: list[list[Any]]) -> Path:
        agreed = self._agreed
        if spans.observers:
            spans.passing("save: commit", agreed.options.step)
        writers = [Writer(*record) for record in records]
        try:
            self._check_visible(writers)
            path = agreed.folder.commit(agreed.path, agreed.manifest(writers))
        except FileError:
            agreed.folder.abandon()
            raise
        except OSError as error:
            agreed.folder.abandon()
            raise cannot_write(agreed.path, error) from error
        options = agreed.options
        try:
            agreed.folder.prune(options.step, options.keep, options.keep_every)
        except (OSError, FileError) as error:  # the step is committed all the same
            LOG.warning("save: older steps in %s stay: %s", agreed.folder.path, error)
        LOG.info("saved step %d in %s", options.step, path)
        return path

    def _check_visible(self, writers: list[Writer]) -> None:
        """Refuse to commit files that this rank cannot see."""
        for position, writer in enumerate(writers):
            file = self._agreed.path / writer.file
            if writer.file and not (file.is_file() and file.stat().st_size == writer.nbytes):
                who = name_ranks([self._agreed.home.ranks[position]])
                text = f"save: {file} of {who} is not seen by rank {self._agreed.home.rank}"
                fix = "save to a folder that all ranks share"
                raise FileError(message(text, fix=fix), str(file))

    def _missing(self) -> list[int]:
        """Find the ranks that have published no record."""
        ranks = enumerate(self._agreed.home.ranks)
        return [rank for i, rank in ranks if not self._store.check([f"{self._key}/{i}"])]

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
        home, failed_s = self._agreed.home, list[float]()

        def check(idle_s: float) -> None:
            if not _has_failed(self._life):
                return
            failed_s.append(idle_s)
            gone = {x.rank: x for x in self._life.standing.values() if x.kind in _GONE}
            lost = [gone[rank].text for rank in missing() if rank in gone]
            if (lost and not done()) or idle_s - failed_s[0] > grace_s:
                raise self._lost(what, lost[0] if lost else _why(self._life))

        deadline = time.monotonic() + home.timeout_s
        if not poll(done, home.world_size, deadline, check):
            raise self._lost(what, f"nothing came within {home.timeout_s:g} s")

    def _lost(self, what: str, why: str) -> FileError:
        path = self._agreed.folder.path
        fix = "look at latest(), which tells whether the step counts, and save again"
        text = f"save: step {self.step} in {path} ended without {what}"
        return FileError(message(text, [why], fix), str(path))

    def _tidy(self) -> None:
        """Delete messages of this save that no rank reads any more."""
        for name in ("written", *range(self._agreed.home.world_size)):
            later(self._store, "delete_key", f"{self._key}/{name}")
        # All ranks have read the end of the save before this one, or they had not begun this one.
        later(self._store, "delete_key", f"{self._key_of(self._number - 1)}/end")

    def _key_of(self, number: int) -> str:
        """The key of the messages of a save; groups of one replica share the life of all."""
        return f"{self._life.key}/save/{self._agreed.home.ranks[0]}/{number}"


_UNDER_WAY: dict[str, PendingSave] = {}  # the last save of this process, by folder


def settle(path: Path) -> None:
    """Wait for the pending save to a folder; raise its error if it was not reported."""
    place = os.path.realpath(path)
    before = _UNDER_WAY.get(place)
    if before is not None:
        before.finish()  # Ctrl-C may end this wait, and the next save still has to wait
        _UNDER_WAY.pop(place, None)
        before.settle()


def folder_to_read(verb: str, path: str | os.PathLike[str], *, raises: bool = False) -> Folder:
    """The folder at a path, once the save to it that this process has under way has ended.

    Args:
      verb: for errors.
      path: the folder, by any of its names.
      raises: whether all ranks call this, so that a save that failed is raised if nobody was told;
        else it is logged, and the next save or load raises it.

    Raises:
      FileError: the save did not end within the `timeout_s` of its groups, or failed.
    """
    pending = _UNDER_WAY.get(os.path.realpath(path))
    if pending is not None:
        pending.before_read(verb, raises=raises)
    return Folder(path)


def _leave_saves() -> None:
    """Drop pending saves in a forked process: their threads run in its parent."""
    for each in _UNDER_WAY.values():
        if each._path is None and each._error is None:
            text = f"save: step {each.step} is saved by the process that this one was forked from"
            each._error = FileError(message(text, fix="wait() for it there"), each._place)
    _UNDER_WAY.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_saves)


def _nothing() -> FileRecord:
    return FileRecord(0, "")


def _encoded_outcome(error: Any) -> list[Any] | None:
    return encoded_error(error if isinstance(error, Exception) else FileError(f"save: {error!r}"))


def _has_failed(life: GroupState) -> bool:
    return life.failed is not None or any(each.final for each in life.standing.values())


def _why(life: GroupState) -> str:
    texts = [each.text for each in life.standing.values() if each.final]
    return texts[0] if texts else f"the groups have failed: {life.failed}"


def save(
    path: str | os.PathLike[str],
    state: Tree,
    groups: Any,
    *,
    step: int,
    extra: Any = None,
    overwrite: Overwrite = "never",
    replicas: Replicas = "equal",
    keep: int | None = None,
    keep_every: int | None = None,
    commit: Commit = "rename",
) -> Path:
    """Save a state as a step that counts once it is whole. All ranks call it.

    Args:
      path: the folder of the job's checkpoints, which all ranks share; it need not exist.
      state: a `TrainState`, or any pytree of shards, tensors, numbers and texts. Numbers are equal
        on all ranks. A tensor that is not sharded is written once if it is equal on all ranks, and
        else once per rank.
      groups: as for `shard`; for a `TrainState` those of its parameters.
      step: the number of the step, at least 0.
      extra: what else to keep: dicts, lists, tuples, numbers, texts and tensors. It may differ
        between ranks.
      overwrite: "never" refuses a step that is not above all committed ones. "newer" writes it, and
        the steps from it on that were there do not count any more, as after a rollback. They are
        removed as soon as two others count; see [Note: branches] in `checkpoint.directory`.
      replicas: "apart" while replicas have values of their own, as with `local_sgd`; each is saved.
      keep: how many of the newest steps are kept, at least 2; None keeps all.
      keep_every: steps that are a multiple of it are kept, too.
      commit: "file" for stores that cannot rename a folder: see [Note: commit] in
        `checkpoint.directory`.

    Returns:
      The folder of the step.

    Communication: two small all-gathers over the partition group and over the replication group, 32
      bytes for a new layout, and two small messages to the store. Nothing is planned or gathered.

    Memory: none on the CPU; on an accelerator what this rank writes, 1/r of its shards, in host
      memory that is kept for the next save.

    Raises:
      FileError: the step would not be the newest, or another job saves there.
      FileError: some rank cannot write; on all of them. Nothing has changed.
      DesyncError: ranks save other steps or states.
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
    options = Options(step, overwrite, replicas, commit, keep, keep_every)
    agreed = _begun("save", path, state, groups, extra, options)
    outcome: FileRecord | BaseException
    try:
        with Snapshot().on_host(agreed.tensors) as tensors:
            outcome = _written(agreed, tensors)
    except BaseException as error:
        outcome = error
    pending = PendingSave(agreed, lambda: outcome, follows=False)
    if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
        raise outcome  # Ctrl-C; the other ranks hear of it
    return pending.wait()


def start_save(
    path: str | os.PathLike[str],
    state: Tree,
    groups: Any,
    *,
    step: int,
    extra: Any = None,
    overwrite: Overwrite = "never",
    replicas: Replicas = "equal",
    keep: int | None = None,
    keep_every: int | None = None,
    commit: Commit = "rename",
) -> "PendingSave":
    """Copy the state, and write the copy in the background.

    The state may change, and may be donated, as soon as this returns. One save is under way at a
    time: the next one waits for it first. Leaving the groups, and the end of the process, wait too.

    Args:
      path, state, groups, step, extra, overwrite, replicas, keep, keep_every, commit: as for
        `save`.

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
    options = Options(step, overwrite, replicas, commit, keep, keep_every)
    agreed = _begun("start_save", path, state, groups, extra, options)
    copied, failed = None, None
    try:
        copied = Snapshot().copied(agreed.tensors)
    except BaseException as error:
        failed = error

    def write() -> FileRecord:
        if copied is None:
            raise cast(BaseException, failed)
        with copied as tensors:
            return _written(agreed, tensors)

    pending = PendingSave(agreed, write)
    if failed is not None and not isinstance(failed, Exception):
        raise failed  # Ctrl-C; the other ranks hear of it
    return pending


def check_folder(path: str | os.PathLike[str], home: Groups, buffers: Mapping[str, Tensor]) -> None:
    """Make a folder for checkpoints if it is missing, and try whether every rank can save there.

    Args:
      path: the folder that steps will be saved in.
      home: the groups whose ranks will save.
      buffers: tensors that will be saved, by name.

    Communication: two small all-gathers over the partition group and the replication group.

    Raises:
      FileError: some rank cannot; on all of them.
      LeafError: a tensor cannot be saved; on other ranks a FileError.
    """
    folder = Folder(path).path
    with together(home):
        for name, x in buffers.items():
            savable("Checkpoints", f"buffer {name!r}", x)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or f"{error}"
            text = f"Checkpoints: {folder} cannot be written"
            fix = "pass a folder that all ranks share and may write to"
            raise FileError(message(text, [why], fix), str(folder)) from error


def _begun(verb: str, path: Any, state: Tree, groups: Any, extra: Any, options: Options) -> Agreed:
    refuse_derivative(f"checkpoint.{verb}", (), "call it outside of torch.func")
    checks.path(verb, "path", path)
    if spans.observers:
        spans.passing("save", options.step)
    folder = Folder(path)
    return agree_on(folder, state, groups, extra, options, settle)


def _written(agreed: Agreed, tensors: dict[str, Any]) -> FileRecord:
    """Write this rank's file; returns its record."""
    if spans.observers:
        spans.passing("save: write", agreed.options.step)
    if agreed.failed is not None:
        raise agreed.failed
    needed = sum(x.numel() * x.itemsize for x in tensors.values())
    try:
        facts = os.statvfs(agreed.path)
        free = facts.f_bavail * facts.f_frsize
        if needed > free:
            raise OSError(f"{needed} bytes are needed, {free} bytes are free")
        return write_part(agreed.file, tensors) if tensors else FileRecord(0, "")
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise cannot_write(agreed.file, error) from error
