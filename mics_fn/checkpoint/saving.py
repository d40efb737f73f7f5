"""`save` and `start_save`: a state becomes a committed step, written by all ranks together."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, cast

from torch import Tensor

from mics_fn import checks, points
from mics_fn.checkpoint.agreeing import Agreed, Options, agree_on
from mics_fn.checkpoint.contents import Replicas
from mics_fn.checkpoint.directory import Commit, Folder, Overwrite
from mics_fn.checkpoint.extras import savable
from mics_fn.checkpoint.parts import Record, cannot_write, write_part
from mics_fn.checkpoint.snapshot import Snapshot
from mics_fn.checkpoint.together import together
from mics_fn.checkpoint.under_way import PendingSave, settle
from mics_fn.errors import CheckpointError, CheckpointWriteError, TreeError, message
from mics_fn.groups import Groups
from mics_fn.shards import refuse_derivative, require_groups
from mics_fn.tree import Tree


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
        removed as soon as two others count; see [Note: branches] in `checkpoint.committed`.
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
      CheckpointExists: the step would not be the newest, or another job saves there.
      CheckpointWriteError: some rank cannot write; on all of them. Nothing has changed.
      DesyncError: ranks save other steps or states.
      PlanError, LeafError, TreeError: the state cannot be saved like this, or has no tensor.

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
    outcome: Record | BaseException
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
    """Copy what a save writes, and write it while the program goes on.

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
      CheckpointError: the save before this one failed, and nobody was told; and as for `save`.

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

    def write() -> Record | BaseException:
        if copied is None:
            return cast(BaseException, failed)
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
      CheckpointWriteError: some rank cannot; on all of them.
      LeafError: a tensor cannot be saved; on other ranks a CheckpointError.
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
            raise CheckpointWriteError(message(text, [why], fix), str(folder)) from error


def _begun(verb: str, path: Any, state: Tree, groups: Any, extra: Any, options: Options) -> Agreed:
    refuse_derivative(f"checkpoint.{verb}", (), "call it outside of torch.func")
    require_groups(verb, groups)
    if state is None:
        raise TreeError(message(f"{verb}: state is None", fix="pass a TrainState or a tree"))
    checks.path(verb, "path", path)
    if points.observers:
        points.passing("save", options.step)
    folder = Folder(path)
    return agree_on(folder, state, groups, extra, options, settle)


def _written(agreed: Agreed, tensors: dict[str, Any]) -> Record | BaseException:
    """Write this rank's file; returns its record, or the error."""
    try:
        if points.observers:
            points.passing("save: write", agreed.options.step)
        if agreed.failed is not None:
            return agreed.failed
        _check_room(agreed, tensors)
        return write_part(agreed.file, tensors) if tensors else Record(0, "")
    except CheckpointError as error:
        return error
    except OSError as error:
        return cannot_write(agreed.file, error)
    except Exception as error:
        return error


def _check_room(agreed: Agreed, tensors: dict[str, Any]) -> None:
    needed = sum(x.numel() * x.itemsize for x in tensors.values())
    facts = os.statvfs(agreed.path)
    free = facts.f_bavail * facts.f_frsize
    if needed > free:
        error = OSError(f"{free} bytes are free")
        raise cannot_write(agreed.file, error, f"{needed} bytes are needed")
