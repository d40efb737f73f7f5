"""`save` and `start_save`: a state becomes a committed step, written by all ranks together.

[Note: no plan travels] Each rank knows by itself what it writes, so nobody collects plans. At the
start ranks compare digests, and the first rank makes the folder. Then each of them writes its file
and leaves a record of it in the store, the table of its slices; the first rank reads the records,
writes the manifest, commits, and says so. After the start this needs no collective, so a thread
does it while training goes on.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, cast

from torch import Tensor

from mics_fn import checks, errors, spans, tree
from mics_fn.checkpoint import directory, manifest, snapshot
from mics_fn.collectives import (
    agree,
    checksum,
    decoded_error,
    encoded_error,
    together,
)
from mics_fn.faults import StopRequest
from mics_fn.groups import Groups
from mics_fn.shards import dtype_name, refuse_derivative
from mics_fn.spans import LOG
from mics_fn.store import Store, later, poll
from mics_fn.threads import Job, start
from mics_fn.tree import Tree

# The start of a save: what all ranks compare before the first byte is written.


@dataclass(frozen=True)
class Options:
    """The options of a save; see `save`."""

    step: int
    overwrite: directory.Overwrite
    replicas: manifest.Replicas
    keep: int | None
    keep_every: int | None

    def check(self) -> None:
        """Raise PlanError unless they are what they should be."""
        checks.integer("save", "step", self.step, 0)
        checks.integer("save", "keep", self.keep, optional=True)
        checks.integer("save", "keep_every", self.keep_every, optional=True)
        checks.choice("save", "overwrite", self.overwrite, "never", "newer")
        checks.choice("save", "replicas", self.replicas, "equal", "independent")


@dataclass(frozen=True, eq=False)
class Agreed:
    """A save that all ranks have agreed on, without anything of the state.

    Args:
      home: the groups whose ranks save.
      folder: the folder of the job.
      path: the folder that files are written into.
      options: how to save.
      found: what the step holds, but for its files.
      extra: what this rank gave besides the state, as JSON; "" if the first one has it for all.
    """

    home: Groups
    folder: directory.Folder
    path: Path
    options: Options
    found: manifest.Manifest
    extra: str

    def write(self, block: snapshot.OnHost) -> manifest.SavedFile:
        """Write this rank's file, of what a block has."""
        path = self.path / f"rank-{self.home.position:05d}.safetensors"
        with block as tensors:
            spans.passing("save: write", self.options.step)
            with directory.write_errors("save: cannot write", path):
                return directory.write_part(path, tensors)._replace(extra=self.extra)


def agree_on(
    verb: str, path: Any, state: Tree, groups: Any, extra: Any, options: Options
) -> tuple[Agreed, Callable[[], dict[manifest.Slice, Tensor]]]:
    """Compare a save between ranks, and let the first one make its folder.

    Args:
      verb: "save" or "start_save".
      path, state, groups, extra, options: as it was given. If `extra` is an error, which this
        rank met when it made it, all ranks raise.

    Returns:
      What they agreed on; and what gives the slices that this rank writes, and refers to the state.

    Raises:
      FileError: on all ranks, if it cannot begin; also if the save before this one failed.
      DesyncError: ranks save other steps or other states.
      LostStateError: their states have taken different numbers of steps.
    """
    refuse_derivative(f"checkpoint.{verb}", (), "call it outside of torch.func")
    checks.path(verb, "path", path)
    spans.passing("save", options.step)
    folder = folder_to_write(path)
    home = snapshot.main_home("save", state, groups)
    if home.state.members and not home.state.saves:  # another process may be the first rank since
        with together("save", home) as exchange:
            exchange.mine = folder.epoch
        folder.epoch = max(exchange.all.values())
    try:
        with together("save", home) as exchange:
            options.check()
            if before := _UNDER_WAY.get(os.path.realpath(folder.path)):
                before.conclude("save")
            contents = snapshot.contents_of("save", state, groups, home, options.replicas)
            if not contents.pieces:
                fix = "pass a TrainState, or a tree with shards or tensors"
                raise errors.LeafError("save: the state has no tensor to save", fix=fix)
            if isinstance(extra, Exception):
                raise extra
            text, extras = manifest.encoded(extra)
            of_extra = {name: int(checksum(x)) for name, x in extras.items()}
            facts = _facts(contents)
            steps = [f"{k}={x!r}" for k, x in contents.values.items() if f".{k}".endswith(".step")]
            exchange.fact = f"step {options.step} in {folder.path}, {options}"
            exchange.mine = {
                "steps": ", ".join(steps),
                "state": tree.digest([f"{facts}"]).hex(),
                "extra": tree.digest([f"{text}{of_extra}"]).hex(),
            }
            if home.position == 0:
                new = folder.begin(options.step, options.overwrite)
                exchange.mine["new"] = str(new), folder.epoch
        if texts := exchange.differing("steps"):
            fix = "same_step(state, groups, heal=True) takes the newer state from a replica"
            lines = errors.rank_lines(texts)
            raise errors.LostStateError("save: ranks differ in their steps", lines, fix)
        if exchange.differing("state"):
            # Ranks that differ now may have saved each of these states together before.
            home.agreed.difference_update([seen for seen in home.agreed if seen[0] == _STATE])
            fix = (
                "let it be equal on all ranks, or pass it in extra=, which each rank has for itself"
            )
            agree(home, _STATE, facts, dict.fromkeys(contents.equal(), fix))
    except BaseException:
        folder.abandon()
        raise
    if home.position and not exchange.differing("extra"):
        text, extras = "", {}
    new, folder.epoch = exchange.all[home.ranks[0]]["new"]  # any rank may be the first one later
    found = manifest.Manifest(options.step, options.replicas, contents.tensors(), contents.values)
    agreed = Agreed(home, folder, Path(new), options, found, text)
    return agreed, partial(snapshot.written_here, contents, extras)


_STATE = "save: the state"


def _facts(contents: snapshot.Contents) -> list[tuple[str, str]]:
    """What ranks compare of a state: of what each of them has in full, its values too."""
    facts = [(name, f"{x!r}") for name, x in contents.values.items()]
    for name, x in contents.pieces.items():
        text = f"{x.shape} {dtype_name(x.data.dtype)} {x.copies}"
        facts.append((name, text if x.home else f"{text}, values {int(checksum(x.data)):x}"))
    return facts


# `PendingSave`: a save under way, and how its ranks come to one end; see [Note: no plan
# travels].

_GRACE_S = 5.0  # in which a rank that failed may still leave its record
_GONE = ("killed", "silent")  # failures of ranks that leave none
_WAIT_S = 0.1  # between two looks of whoever waits for a save
_BEHIND = 19  # how nice a thread is that only writes


class PendingSave:
    """A save under way; made by `start_save`.

    Args:
      agreed: what is saved.
      write: writes this rank's file.
      follows: whether training goes on, and `due` is called after each step.
    """

    def __init__(
        self, agreed: Agreed, write: Callable[[], manifest.SavedFile], *, follows: bool = True
    ) -> None:
        self.step, self.timeout_s = agreed.options.step, agreed.home.timeout_s
        self._agreed, self._group_state = agreed, agreed.home.state
        self._write: Any = write
        self._store = cast(Store, self._group_state.channel.store)
        self._group_state.saves += 1
        key = f"{self._group_state.key}/save/{agreed.home.ranks[0]}"  # all replicas have one state
        self._key = f"{key}/{self._group_state.saves}"
        self._before = f"{key}/{self._group_state.saves - 1}"
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._reported = not follows  # whether the program knows how it ended: it waits for itself
        self._stop = StopRequest(agreed.home, ()).__enter__() if follows else None
        self._group_state.endings.append(self.finish)
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
        if self._path is None:  # its thread runs in another process
            text = f"save: step {self.step} is saved by the process that this one was forked from"
            raise errors.FileError(errors.message(text, fix="wait() for it there"), self._place)
        return self._path

    def finish(self, limit_s: float = math.inf) -> bool:
        """Wait for the end of the save, so long at most; returns whether it has ended."""
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive():
            if time.monotonic() > deadline:
                return False
            self._thread.join(_WAIT_S)
        if _UNDER_WAY.get(self._place) is self and (self._reported or self._error is None):
            del _UNDER_WAY[self._place]
        if self.finish in self._group_state.endings:
            self._group_state.endings.remove(self.finish)
            if self._stop is not None:
                self._stop.__exit__(None, None, None)
        return True

    def conclude(self, verb: str, limit_s: float = math.inf, *, raises: bool = True) -> None:
        """Wait for it, and raise its error if nobody was told of it.

        Args:
          verb: for errors.
          limit_s: the longest wait.
          raises: whether all ranks call this; else the error is logged, and raised later. If the
            groups of the save are closed, other ranks may have heard something else: then it is
            logged too.
        """
        if not self.finish(
            limit_s
        ):  # Ctrl-C may end this wait, and the next save still has to wait
            text = f"{verb}: step {self.step} in {self._place} is still being saved by this process"
            fix = "wait() for the save, or make its groups with a longer timeout_s"
            lines = [f"waited for {limit_s:g} s, the timeout_s of its groups"]
            raise errors.FileError(errors.message(text, lines, fix), self._place)
        if raises:
            _UNDER_WAY.pop(self._place, None)
        if self._reported:
            return
        if raises and not self._group_state.closed:
            self.wait()
        self._reported = raises
        if self._error is not None:
            LOG.warning("%s: step %d was not saved: %s", verb, self.step, self._error)

    # On the thread.

    def _run(self) -> None:
        if self._stop is not None:
            with suppress(AttributeError, OSError):  # below the threads that compute, if it can be
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND)
        try:
            try:
                file, error = self._write(), None
            except BaseException as wrong:  # which the other ranks are told
                file, error = None, wrong
            self._path = self._end(file, error)
        except BaseException as error:
            self._error = error
            if self._stop is not None:
                self._stop.ask()
        finally:
            self._agreed.folder.abandon()  # which keeps what is committed
            self._write = None  # it refers to the state, which the program may have replaced

    def _end(self, file: manifest.SavedFile | None, error: BaseException | None) -> Path:
        """Publish this rank's record, and wait for the result of the rank that commits."""
        home, store = self._agreed.home, self._store
        if home.world_size == 1:
            if file is None:
                self._agreed.folder.check_owned()
                raise error or errors.FileError("save: nothing was written")
            return self._commit([file])
        said = {"error": encoded_error(error), "file": file}
        store.set(f"{self._key}/{home.position}", json.dumps(said))
        store.add(f"{self._key}/written", 1)
        if home.position == 0:
            store.set(f"{self._key}/end", json.dumps(self._judged()))
            for name in ("written", *range(home.world_size)):
                later(store, "delete_key", f"{self._key}/{name}")
            # All ranks have read the end of the save before this one, or had not begun this one.
            later(store, "delete_key", f"{self._before}/end")
        first, end = home.ranks[0], [f"{self._key}/end"]
        # The first rank waits for the others itself, so it may take as long as that again.
        what = f"the word of rank {first} that it is committed"
        self._await(lambda: store.check(end), what, lambda: [first], 2 * _GRACE_S)
        failed, path = json.loads(store.get(*end))
        if failed:
            raise decoded_error({int(rank): each for rank, each in failed.items()})
        return Path(path)

    def _judged(self) -> tuple[dict[int, Any], str]:
        """Commit once all files are written; return the ranks that failed, and the step's path."""
        home, store = self._agreed.home, self._store
        try:
            n = home.world_size
            count = f"{self._key}/written"
            self._await(lambda: store.add(count, 0) >= n, "the files of all ranks", self._missing)
            files, failed = list[manifest.SavedFile](), dict[int, Any]()
            for i, rank in enumerate(home.ranks):
                said = json.loads(store.get(f"{self._key}/{i}"))
                if said["error"]:
                    failed[rank] = said["error"]
                else:
                    files.append(manifest.SavedFile.of_json(said["file"]))
            if failed:
                self._agreed.folder.check_owned()
            return failed, "" if failed else str(self._commit(files))
        except BaseException as error:  # also of a program that ends this thread
            return {home.rank: encoded_error(error)}, ""

    def _commit(self, files: list[manifest.SavedFile]) -> Path:
        agreed, options = self._agreed, self._agreed.options
        spans.passing("save: commit", options.step)
        for file, rank in zip(files, agreed.home.ranks, strict=True):
            path = agreed.path / file.name
            if not (path.is_file() and path.stat().st_size == file.nbytes):
                agreed.folder.check_owned()
                text = f"save: {path} of rank {rank} is not seen by rank {agreed.home.rank}"
                fix = "save to a folder that all ranks share"
                raise errors.FileError(errors.message(text, fix=fix), str(path))
        with directory.write_errors("save: cannot commit", agreed.path):
            found = replace(agreed.found, files=files)
            found.check()
            path = agreed.folder.commit(found)
        try:
            agreed.folder.prune(options.keep, options.keep_every)
        except (OSError, errors.FileError) as error:  # the step is committed all the same
            LOG.warning("save: older steps in %s stay: %s", agreed.folder.path, error)
        LOG.info("saved step %d in %s", options.step, path)
        return path

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
        home, group_state, failed_s = self._agreed.home, self._group_state, list[float]()

        def lost(why: str) -> errors.FileError:
            path = self._agreed.folder.path
            fix = "look at latest(), which tells whether the step counts, and save again"
            text = f"save: step {self.step} in {path} ended without {what}"
            return errors.FileError(errors.message(text, [why], fix), str(path))

        def check(idle_s: float) -> None:
            final = [each.text for each in group_state.standing.values() if each.final]
            if group_state.failed is None and not final:
                return
            failed_s.append(idle_s)
            known_dead = {x.rank: x.text for x in group_state.standing.values() if x.kind in _GONE}
            texts = [known_dead[rank] for rank in missing() if rank in known_dead]
            if (texts and not done()) or idle_s - failed_s[0] > grace_s:
                raise lost([*texts, *final, f"the groups have failed: {group_state.failed}"][0])

        deadline = time.monotonic() + home.timeout_s
        if not poll(done, home.world_size, deadline, check):
            raise lost(f"nothing came within {home.timeout_s:g} s")


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
        else it is logged, and the next save or load raises it.

    Raises:
      FileError: the save did not end within the `timeout_s` of its groups, or failed.
    """
    pending = _UNDER_WAY.get(os.path.realpath(path))
    if pending is not None:
        pending.conclude(verb, pending.timeout_s, raises=raises)
    return directory.Folder(path)


def save(
    path: str | os.PathLike[str],
    state: Tree,
    groups: Any,
    *,
    step: int,
    extra: Any = None,
    overwrite: directory.Overwrite = "never",
    replicas: manifest.Replicas = "equal",
    keep: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Save a state as a step that counts once it is whole. All ranks call it.

    Args:
      path: the folder of the job's checkpoints, which all ranks share; it need not exist.
      state: a `TrainState`, or any pytree of shards, tensors, numbers and texts. Numbers are equal
        on all ranks, and so are tensors that are not sharded.
      groups: as for `shard`; for a `TrainState` those of its parameters.
      step: the number of the step, at least 0.
      extra: what else to keep: dicts, lists, tuples, numbers, texts and tensors. It may differ
        between ranks, and each of them has its own again; on other ranks one of these.
      overwrite: "never" refuses a step that is not above all committed ones. "newer" writes it, and
        the steps from it on that were there do not count any more, as after a rollback. They are
        removed as soon as two others count; see [Note: epochs] in `checkpoint.directory`.
      replicas: "independent" while replicas have values of their own, as with `local_sgd`; each is
        saved.
      keep: how many of the newest steps are kept, at least 2; None keeps all.
      keep_every: steps that are a multiple of it are kept, too.

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
    options = Options(step, overwrite, replicas, keep, keep_every)
    return _begun("save", path, state, groups, extra, options).wait()


def start_save(
    path: str | os.PathLike[str],
    state: Tree,
    groups: Any,
    *,
    step: int,
    extra: Any = None,
    overwrite: directory.Overwrite = "never",
    replicas: manifest.Replicas = "equal",
    keep: int | None = None,
    keep_every: int | None = None,
) -> "PendingSave":
    """Copy the state, and write the copy in the background.

    The state may change, and may be donated, as soon as this returns. One save is under way at a
    time: the next one waits for it first. Leaving the groups, and the end of the process, wait too.

    Args:
      path, state, groups, step, extra, overwrite, replicas, keep, keep_every: as for `save`.

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
    options = Options(step, overwrite, replicas, keep, keep_every)
    return _begun("start_save", path, state, groups, extra, options)


def _begun(
    verb: str, path: Any, state: Tree, groups: Any, extra: Any, options: Options
) -> PendingSave:
    """Copy or write what this rank saves; whether that fails or not, all ranks come to one end."""
    agreed, slices = agree_on(verb, path, state, groups, extra, options)
    follows = verb == "start_save"
    if follows:
        done = Job(lambda: snapshot.copied(slices()))
    else:
        done = Job(lambda: agreed.write(snapshot.on_host(slices())))
    done.run()
    write = (lambda: agreed.write(done.result())) if follows else done.result
    pending = PendingSave(agreed, write, follows=follows)
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
            manifest.savable("Checkpoints", f"buffer {name!r}", x)
        folder.path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        if own:
            folder_to_read("Checkpoints", folder, raises=True)
            folder_to_write(folder)
            if home.position == 0:
                folder.own()
        exchange.mine = folder.epoch, max(folder.committed(), default=None)
    folder.epoch = max(epoch for epoch, _ in exchange.all.values())  # the first rank may be new
    return exchange.all[home.ranks[0]][1]
