"""`save_dcp` and `load_dcp`: directories of torch.distributed.checkpoint (DCP).

Torch's own classes write them: a planner and a `FileSystemWriter` on each rank, which make one
`.distcp` file per part, and at the end the writer of the first rank, which makes `.metadata`. These
classes are used without their collectives, so that waits are bounded and errors are named as
everywhere here. How such a directory is read without running anything in it is described in
`init.dcp_files`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from mics_fn import checks
from mics_fn.checkpoint.exported import (
    Part,
    Saved,
    in_files,
    one_job,
    rounds,
    same_leaves,
    saved_leaves,
)
from mics_fn.checkpoint.new_directory import free_path, new_directory
from mics_fn.checkpoint.torch_names import OPTIMIZER, group_options, optimizer_leaves
from mics_fn.collectives import in_step
from mics_fn.errors import PlanError, message
from mics_fn.init import Limits, read_shards
from mics_fn.optim import TrainState
from mics_fn.shards import LayoutOptions, Leaf

Place = tuple[str, int, int]  # of a tensor: its file, first byte and length


def load_dcp(
    path: str | PathLike,
    groups: Any,
    *,
    like: nn.Module | Mapping[str, Tensor] | None,
    prefix: str = "",
    names: Callable[[str], str | None] | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    trust: bool = False,
    max_header_bytes: int = 100_000_000,
    max_leaves: int = 100_000,
    **options: Unpack[LayoutOptions],
) -> dict[str, Leaf]:
    """Shards of the parameters in a directory that torch.distributed.checkpoint wrote.

    Each rank reads only the chunks that overlap its own part, however many ranks wrote them. The
    directory needs no trust to be read: `.metadata` is a pickle, but its opcodes are read as a
    description, and nothing that it names is imported or called.

    Args:
      path: the directory, as FSDP2 and torchtitan save it.
      groups: as for `shard`.
      like: as for `load_shards`.
      prefix: what the names begin with that are meant; behind it they are the names of
        parameters: "model." for `dcp.save({"model": ...})`, "" for torchtitan. Tensors whose names
        begin otherwise are ignored.
      names: gives the parameter's name for a name in the directory without its prefix, or None to
        ignore that tensor.
      strict: as for `load_shards`. Objects that are not tensors are ignored.
      dtype: as for `load_shards`.
      trust: whether a file that `.metadata` names may be a symbolic link or lie elsewhere. Nothing
        is run in any case.
      max_header_bytes: the most bytes that `.metadata` may have.
      max_leaves: the most tensors that the directory may have, with those that are ignored.
      options: as for `load_shards`.

    Returns:
      The shards by name, as `load_shards` gives them.

    Communication: digests of the tree and the shards (tens of bytes per leaf).

    Memory: this rank's shards, what `.metadata` describes (about 2 KB per chunk), and 16 MiB at a
      time while it reads.

    Raises:
      FileError: a file is damaged, is missing, holds something else, does not match `.metadata`, or
        asks for more than the limits; it names the file and the leaf.
      OSError: there is no `.metadata`, or it cannot be opened.
      TreeError, DesyncError, LeafError, PlanError, OffloadError: as `load_shards`.

    Example:
      >>> import tempfile
      >>> groups = make_groups(1)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_dcp(f"{folder}/a", shard({"w": torch.ones(2)}, groups), groups, prefix="model.")
      ...     load_dcp(f"{folder}/a", groups, like={"w": torch.empty(2)}, prefix="model.")
      {'w': Sharded(shape=(2,), float32, here 2 of 2)}
    """

    def meant(name: str) -> str | None:
        if not name.startswith(prefix):
            return None
        bare = name.removeprefix(prefix)
        return bare if names is None else names(bare)

    checks.path("load_dcp", "path", path)
    checks.instance("load_dcp", "prefix", prefix, str, "a str", "'' takes names as they are")
    limits = Limits.checked("load_dcp", trust, max_header_bytes, max_leaves)
    how = {"like": like, "names": meant, "strict": strict, "dtype": dtype}
    described = Path(fspath(path)) / ".metadata"
    return read_shards("load_dcp", described, groups, limits, **how, options={**options})


def save_dcp(
    path: str | PathLike,
    params: Mapping[str, Any] | TrainState,
    groups: Any,
    *,
    prefix: str = "",
    names: Callable[[str], str | None] | None = None,
    dtype: torch.dtype | None = None,
    param_group: Mapping[str, Any] | None = None,
    max_file_bytes: float | str = 1_000_000_000,
) -> None:
    """Write shards as a directory that `torch.distributed.checkpoint.load` reads.

    It reads them into a state dict of plain tensors or of DTensors (FSDP2, torchtitan), on any
    number of ranks. The directory is there as a whole or not at all.

    Args:
      path: of the directory, as for `save_pretrained`.
      params: as for `save_pretrained`; or a `TrainState`, of which the parameters are written and
        what its optimizer keeps for each of them: `optimizer.state.<parameter>.exp_avg` and so on,
        as `get_optimizer_state_dict` of torch names them, flattened, under "optimizer".
      groups: as for `gather`, one `Groups` for all leaves.
      prefix: what the names of parameters begin with: "model." for `dcp.load({"model": ...})`, and
        "" for torchtitan, which has these names at the top.
      names: as for `save_pretrained`; without the prefix.
      dtype: the dtype of floating-point parameters in the files; default that of the shards.
      param_group: with a `TrainState`, the options that an optimizer of torch keeps beside its
        tensors, such as `torch.optim.AdamW(...).param_groups[0]`: `lr`, `betas` and all others. If
        they are missing, torch loads the optimizer only with `allow_partial_load`. Those of the
        first rank are written.
      max_file_bytes: the most bytes of a file. A leaf that is larger has a file of its own.

    A tensor with several names is written once, and can be loaded by each of them.

    Communication: as `save_pretrained`; at the end about 100 bytes per leaf to all ranks.

    Memory: as `save_pretrained`.

    Raises:
      OptimizerError: the optimizer is not one of torch's.
      FileError, TreeError, GroupsError, PlanError, LeafError, DonatedError, DesyncError,
      CollectiveTimeoutError: as `save_pretrained`.

    Example:
      >>> import tempfile
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.adamw(0.1))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_dcp(f"{folder}/a", state, groups)
      ...     sorted(load_dcp(f"{folder}/a", groups, like=None))
      ['optimizer.state.w.exp_avg', 'optimizer.state.w.exp_avg_sq', 'optimizer.state.w.step', 'w']
    """
    verb = "save_dcp"
    home = one_job(verb, groups)
    with in_step(verb, home, f"path={str(path)!r}, {prefix!r}, {max_file_bytes}, {dtype}"):
        checks.instance(verb, "prefix", prefix, str, "a str", "'' takes names as they are")
        fix = "pass torch.optim.AdamW(...).param_groups[0]"
        expected = "a dict of options"
        checks.instance(verb, "param_group", param_group, Mapping | None, expected, fix)
        if param_group is not None and not isinstance(params, TrainState):
            text, fix = f"{verb}: param_group= has no effect", "pass a TrainState, or leave it out"
            raise PlanError(message(text, fix=fix))
        target = free_path(verb, path)
        opt = params.opt if isinstance(params, TrainState) else None
        values = params.params if isinstance(params, TrainState) else params
        leaves = saved_leaves(verb, values, home, names, dtype)
        moments, more = ({}, []) if opt is None else optimizer_leaves(verb, opt, leaves)
        objects = group_options(leaves, None if opt is None else param_group)
        leaves = [*(_prefixed(leaf, prefix) for leaf in leaves), *more]
        files = in_files(verb, leaves, max_file_bytes)
    same_leaves(verb, home, path, leaves)
    with new_directory(verb, target, home) as made:
        places: dict[str, Place] = {}
        own: list[Any] = []  # torch's own form of a place, of which the first rank needs one

        def write(part: Part) -> str:
            written = _write(made.folder, part)
            own.extend(at for _, at in written)
            return json.dumps(
                [(name, at.relative_path, at.offset, at.length) for name, at in written]
            )

        for part in rounds({**values, **moments}, home, files):
            found = made.together(lambda part=part: write(part))
            for text in found.values():
                places |= {name: (file, at, length) for name, file, at, length in json.loads(text)}

        def describe() -> str:
            nonlocal places
            if made.is_first:
                # The last file is that of the objects.
                for name, at in _write(made.folder, Part(len(files), objects)) if objects else []:
                    places[name] = (at.relative_path, at.offset, at.length)
                places |= {name: places[leaf.name] for leaf in leaves for name in leaf.also}
                _describe(made.folder, _state_dict(leaves, objects, prefix), places, own[0])
            return ""

        made.together(describe)


def _prefixed(leaf: Saved, prefix: str) -> Saved:
    return leaf._replace(name=prefix + leaf.name, also=tuple(prefix + name for name in leaf.also))


def _write(folder: Path, part: Part) -> list[tuple[str, Any]]:
    """Write a file and sync it; the name of each tensor, and where torch says that it lies."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    if part.file is None:
        return []
    planner, writer = DefaultSavePlanner(flatten_state_dict=False), FileSystemWriter(folder)
    planner.set_up_planner(part.tensors, is_coordinator=True)
    plan = planner.create_local_plan()
    # A writer names its file after the number of its plan.
    plan = writer.prepare_global_plan([plan] * (part.file + 1))[-1]
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    return [(result.index.fqn, result.storage_data) for result in written]


def _describe(folder: Path, state: dict[str, Any], places: Mapping[str, Place], own: Any) -> None:
    """Write what describes all files of a state dict; `own` is a place in torch's own form."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.storage import WriteResult

    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
    planner.set_up_planner(state, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    results = []
    for item in plans[0].items:
        file, start, length = places[item.index.fqn]
        place = replace(own, relative_path=file, offset=start, length=length)
        results.append(WriteResult(item.index, length, place))
    writer.finish(metadata, [results])


def _state_dict(leaves: Sequence[Saved], objects: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The state dict that was saved, tensors on meta: nested where a prefix has dots."""
    outer = prefix[: prefix.rfind(".") + 1]
    named: list[tuple[str, str, Any]] = [(OPTIMIZER, name, x) for name, x in objects.items()]
    for leaf in leaves:
        empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        begin = OPTIMIZER if leaf.tree else outer
        named += [(begin, name, empty) for name in (leaf.name, *leaf.also)]
    found: dict[str, Any] = {}
    for begin, name, value in named:
        inner = found
        for key in begin.split(".")[:-1]:
            inner = inner.setdefault(key, {})
        inner[name.removeprefix(begin)] = value
    return found
