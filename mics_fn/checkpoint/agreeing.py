"""The start of a save: what all ranks compare before the first byte is written."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mics_fn import tree
from mics_fn._version import __version__
from mics_fn.checkpoint.committed import MAX_STEP
from mics_fn.checkpoint.contents import (
    Contents,
    Replicas,
    contents_of,
    homes_by_bucket,
    main_home,
    on_bytes,
)
from mics_fn.checkpoint.directory import Commit, Folder, Overwrite
from mics_fn.checkpoint.extras import encoded
from mics_fn.checkpoint.layout import Stored
from mics_fn.checkpoint.manifest import Manifest, Writer
from mics_fn.checkpoint.parts import slice_name
from mics_fn.checkpoint.together import together
from mics_fn.collectives import agree
from mics_fn.errors import (
    CheckpointError,
    PlanError,
    TornStepError,
    TreeError,
    disagreement,
    message,
    rank_lines,
)
from mics_fn.groups import Groups
from mics_fn.tree import Tree

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
        counts = {
            "step": (self.step, 0),
            "keep": (self.keep, 1),
            "keep_every": (self.keep_every, 1),
        }
        for name, (value, least) in counts.items():
            optional = value is None and name != "step"
            if not optional and (type(value) is not int or value < least):
                raise PlanError(f"save: {name}={value!r}, expected an int of at least {least}")
        if self.step > MAX_STEP:
            raise PlanError(f"save: step={self.step}, expected at most {MAX_STEP}")
        words = {
            "overwrite": (self.overwrite, ("never", "newer")),
            "replicas": (self.replicas, ("equal", "apart")),
            "commit": (self.commit, ("rename", "file")),
        }
        for name, (value, known) in words.items():
            if value not in known:
                raise PlanError(f"save: {name}={value!r}, expected {known[0]!r} or {known[1]!r}")


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
    raise CheckpointError("save: it has ended")


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
      CheckpointError: on all ranks, if it cannot begin.
      DesyncError: ranks save other steps or other states.
      TornStepError: their states have taken different numbers of steps.
    """
    home = main_home("save", groups, homes_by_bucket("save", state, groups))
    try:
        with together(home) as words:
            options.check()
            settle(folder.path)
            found = contents_of("save", state, groups, options.replicas)
            if not (found.cut or found.plain):
                fix = "pass a TrainState, or a tree with shards or tensors"
                raise TreeError(message("save: the state has no tensor to save", fix=fix))
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
            words.mine = [said, [tree.digest([each]).hex() for each in digests], path]
        _compare({rank: each[0] for rank, each in words.all.items()})
        agree(home, "save: the state", found.facts())
        equal = [len({each[1][i] for each in words.all.values()}) == 1 for i in range(2)]
        own = {} if equal[0] else _differing(home, found, sums)
    except BaseException:
        if home.position == 0:
            folder.abandon()
        raise
    first = words.all[home.ranks[0]]
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
    alone = [Stored(name, x.dtype, tuple(x.shape)) for name, x in own.items()]
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
    """The tensors held in full that are not equal on all ranks."""
    with together(home) as words:
        words.mine = sums
    own = {name for each in words.all.values() for name in sums if each[name] != sums[name]}
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
                raise TornStepError(message(text, rank_lines(texts), fix))
            raise disagreement(text, texts, fix)
