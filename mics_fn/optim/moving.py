"""`move`: the same state elsewhere, on the device, in host memory or in files."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mics_fn import _device, checks, tree
from mics_fn.checks import check_matched
from mics_fn.collectives import refuse_derivative
from mics_fn.errors import FileError, LeafError, PlanError
from mics_fn.groups import reports
from mics_fn.offload import DEVICE, Where, is_coded, is_placed, place_tensor, where_of
from mics_fn.optim import columns, flat
from mics_fn.shards import Bucket, Sharded, check_kept_place, is_leaf

V = TypeVar("V")


class Mover:
    """Takes tensors to their places.

    Args:
      where: the places.
      field: "params" or "states".
      device: the one that computes.
    """

    def __init__(self, where: Where, field: str, device: torch.device) -> None:
        self._where, self._field, self._device = where, field, device

    def taken(self, x: Tensor, path: str, bucket: Bucket | None = None) -> Tensor:
        """A tensor at the place of a leaf; the same one if it is there."""
        place = getattr(self._where.at(path), self._field).seen_from(self._device)
        if bucket is not None:
            check_kept_place("move", bucket, place)
        if not is_coded(x):
            leaf = tree.join(self._field, path)
            return place_tensor(x, place, self._device, self._where.host_bytes, leaf)
        if place != DEVICE:
            text = f"move: {path} is to go to {place.kind}, and is kept as codes"
            fix = "give states= a pattern that leaves it out; or shard without state="
            raise PlanError(text, fix=fix)
        return x

    def of_run(self, layout: flat.FlatLayout, run: flat.FlatRun, x: Tensor) -> Tensor:
        """`taken` for a run, with the rest of its chunk if it has one of its own."""
        path = _leader(layout, run)
        if not flat.is_in_chunk(run, x):
            return self.taken(x, path, run.bucket)
        chunk = x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        new = self.taken(chunk, path, run.bucket)
        return x if new is chunk else new.narrow(0, int(x.storage_offset()), x.numel())

    def shards(self, value: V, layout: flat.FlatLayout) -> V:
        """A tree of shards, or `FlatShards`, of a layout; the same one if it is there."""
        return columns.changed(value, partial(self.of_run, layout))


def _leader(layout: flat.FlatLayout, run: flat.FlatRun) -> str:
    """The path of the largest leaf of a run, which says where all of it lies."""
    tensors = [i for i, x in enumerate(layout.leaves) if x is None or isinstance(x, tuple)]
    paths = tree.spec_paths(layout.spec)

    def size(i: int) -> int:
        place: Any = layout.leaves[tensors[i]]
        return 0 if place is None else place[0].numels[place[1]]

    return paths[tensors[max(run.members, key=size)]]


def moved_states(opt: Any, params: flat.Unpacked, mover: Mover) -> Any:
    """The state of an optimizer with its moments at their places."""
    names = dict(zip(zip(*params.geometry[:2], strict=True), params.paths, strict=True))

    def take(x: Any) -> Any:
        if isinstance(x, flat.FlatShards):
            return mover.shards(x, x.layout)
        if not isinstance(x, Sharded) or (x.bucket, x.slot) not in names:
            return x
        data = mover.taken(x.data, names[x.bucket, x.slot])
        return x if data is x.data else Sharded(data, x.bucket, x.slot)

    return tree.map_leaves(take, opt, is_leaf=flat.is_node)


def device_of(pieces: Sequence[Tensor], also: Sequence[Tensor] = ()) -> torch.device:
    """Return the device that computes with a state, if its tensors show it.

    Locked host memory is that of something which a device has moved there.
    """
    every = [*pieces, *also]
    for x in every:
        if _device.is_async(x.device):
            return x.device
    if any(not is_placed(x) and x.numel() and x.is_pinned() for x in every):
        found = torch.accelerator.current_accelerator()
        return _device.with_index(found) if found is not None else torch.device("cpu")
    return torch.device("cpu")


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a value."""
    return [x for x in tree.flatten(value)[0] if isinstance(x, Tensor)]


def init_placed(init: Callable[[Any], Any], params: Any, where: Where | str | None) -> Any:
    """What `init(params)` gives, its moments made at their places one after the other."""
    places, found = where_of(where), flat.unpacked(params)
    check_matched("init_state: where", places.patterns, tree.spec_paths(found.spec))
    if "states" not in places.moved:
        return init(params)
    mover = Mover(places, "states", device_of(found.pieces))
    with reports(FileError):
        with flat.making(mover.of_run):
            opt = init(params)
        return moved_states(opt, found, mover)  # those of optimizers of one's own


def move(value: V, where: Where | str | None, *, device: str | torch.device | None = None) -> V:
    """The same state elsewhere: on the device, in host memory, or in files.

    Leaves of one run of a bucket lie together, where the largest of them should; `bucket=` of
    `shard` keeps leaves separate. Buffers, counts and frozen leaves stay where they are.

    Args:
      value: a `TrainState`, whose parameters go to `params` and whose moments go to `states`; or a
        tree of shards, which goes to `params`.
      where: as `where` gives it, or its text; "" is the device.
      device: the one that computes; by default that on which some tensor is.

    Returns:
      A value of the same structure and the same bits. `opt_step` leaves moments where they are.
      Tensors that are in their places are shared with `value`.

    Memory: what is moved, at its new place. Files are scratch: they end with the process, and no
      checkpoint is made of them.

    Raises:
      FileError: a file cannot be made, or the disk has not so much room; see `opt_step`.
      PlanError: `where` has no such form, has a pattern that matches no leaf, or takes moments that
        are codes from the device.
      LeafError: `value` is neither a state nor a tree of shards.
      LeafError: a derivative is asked for.

    Example:
      >>> import tempfile
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.adamw(0.1))
      >>> state = move(state, f"states=disk:{tempfile.mkdtemp()}")
      >>> state = opt_step(state, reduce_grads({"w": torch.ones(2)}, groups), donate=True)
      >>> get(move(state, ""), "opt.moments.exp_avg.w", groups)
      tensor([0.1000, 0.1000])
    """
    if not _is_state(value) and not any(map(is_leaf, tree.flatten(value, is_leaf)[0])):
        fix = "make one with init_state, or with shard"
        checks.refuse("move", "value", value, "a TrainState or a tree of shards", fix, LeafError)
    computes = None if device is None else _device.with_index(torch.device(device))
    with reports(FileError):
        return _moved(value, where_of(where), computes)


def _is_state(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("params", "opt", "transform"))


def _moved(value: V, places: Where, device: torch.device | None) -> V:
    given = [x for x in tensors_of(value) if not x.is_leaf]
    refuse_derivative("move", given, "move outside, and differentiate by what came back")
    state: Any = value
    params, opt = (state.params, state.opt) if _is_state(value) else (value, ())
    found = flat.unpacked(params)
    check_matched("move: where", places.patterns, tree.spec_paths(found.spec))
    home = device or device_of(found.pieces, tensors_of(opt))
    params = Mover(places, "params", home).shards(params, found.layout())
    if not _is_state(value):
        return params
    opt = moved_states(opt, found, Mover(places, "states", home))
    return replace(state, params=params, opt=opt)
