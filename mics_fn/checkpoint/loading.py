"""`load`: a state as it was saved, on these ranks, however many wrote it and however it was cut."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mics_fn import checks, points, tree
from mics_fn.checkpoint.contents import Replicas, contents_of, homes_by_bucket, main_home
from mics_fn.checkpoint.directory import Folder
from mics_fn.checkpoint.opening import manifest_in
from mics_fn.checkpoint.sources import Sources
from mics_fn.checkpoint.together import together
from mics_fn.checkpoint.under_way import folder_to_read
from mics_fn.errors import CheckpointError, CheckpointFormatError, message
from mics_fn.groups import Groups
from mics_fn.log import LOG
from mics_fn.offload import is_apart, is_coded, unset_like
from mics_fn.optim import by_leaf, replaced
from mics_fn.shards import (
    Fixed,
    Sharded,
    Writing,
    is_leaf,
    reclaimed,
    refuse_derivative,
    require_groups,
)
from mics_fn.tree import Tree


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
    replicas: Replicas = "equal",
    donate: bool = False,
) -> Loaded:
    """A state that was saved, for any number of ranks, levels and placement. All ranks call it.

    A save to the folder that is under way on these ranks is waited for.

    Args:
      path: the folder that `save` was given.
      like: a state of the same structure, shapes and dtypes, such as that of before the first step.
        Its values are not used, so it may be lost. Leaves that are not trained may be kept in
        another form than they were saved in, as values or as codes; see [Note: other codes] in
        `checkpoint.converting`.
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
      CheckpointFormatError, CheckpointCorrupt, CheckpointSecurityError: it is damaged; on all
        ranks, with the file and the leaf.
      CheckpointError: the system cannot read a file; or a save of this process to the folder, which
        was under way, failed or did not end in time; on all ranks.
      CheckpointMismatch: it does not fit `like`; all differences are named.
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
    require_groups("load", groups)
    checks.path("load", "path", path)
    checks.integer("load", "step", step, 0, optional=True, fix="None takes the newest one")
    checks.choice("load", "on_corrupt", on_corrupt, "raise", "previous")
    checks.choice("load", "replicas", replicas, "equal", "apart")
    checks.flag("load", "donate", donate)
    if points.observers:
        points.passing("load")
    like = reclaimed(like)  # of what a write that was cut short has left, only the memory
    home = main_home("load", groups, homes_by_bucket("load", like, groups))
    folder, refused = Folder(path), dict[int, CheckpointError]()
    # Several steps may be read into this memory one after the other, but it is given away once.
    given = copy_of(like, into=lambda x: x) if donate else like
    with Writing() as writing:
        if donate:
            writing.covers(like, "like", "checkpoint.load")
        while True:
            with together(home) as words:
                folder_to_read("load", path, raises=True)
                if home.position == 0:
                    words.mine = _chosen(folder, step, refused)
            number, place = words.all[home.ranks[0]]
            try:
                how = replicas, writing if donate else None
                found = _load(Path(place), number, given, groups, home, *how)
            except CheckpointFormatError as error:
                if on_corrupt == "raise" or step is not None:
                    raise
                refused[number] = error
                folder.refuse(Path(place))
                if home.position == 0:
                    text = "load: step %d is refused, and an older one tried: %s"
                    LOG.warning(text, number, error)
            else:
                folder.accept(Path(place))
                return found


def _chosen(folder: Folder, step: int | None, refused: Mapping[int, CheckpointError]) -> list[Any]:
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
    replicas: Replicas,
    writing: Writing | None,
) -> Loaded:
    """Read one step; with `writing` into the memory of `like`, which it covers."""
    with together(home) as words:
        manifest, digest = manifest_in(path, step)
        target = contents_of("load", like, groups, replicas)
        sources = Sources(path, manifest, home)
        sources.check(target, replicas)
        words.mine = digest
    if len(set(words.all.values())) > 1:
        text = f"load: ranks see different files in {path}"
        raise CheckpointFormatError(message(text, fix="load from a folder that ranks share"))
    with together(home), torch.no_grad():
        state = copy_of(like, into=None if writing is None else lambda x: x)
        if writing is not None:
            writing.give_away()
        extra = sources.fill(contents_of("load", state, groups, replicas))
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
        if is_apart(x):
            return unset_like(x)
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
