"""What training carries from step to step, and the step of an optimizer."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mics_fn import _torch, shards, spans, tree
from mics_fn.checks import check_matched
from mics_fn.collectives import refuse_derivative
from mics_fn.errors import FileError, GroupsError, LeafError, MicsError, PlanError
from mics_fn.groups import Groups, any_aborted, hooks, reports
from mics_fn.offload import DEVICE, Where, is_coded, is_placed, place_tensor
from mics_fn.optim import columns, flat
from mics_fn.optim.optimizers import FOUND_INF, Optimizer, Transform, as_transform
from mics_fn.threads import Commit
from mics_fn.tree import Tree

# Whether gradients fit the parameters that a step is taken on.


def check_grads(want: flat.Unpacked, got: flat.Unpacked) -> bool:
    """Check that trees fit; whether parameters are leaves of autograd, and nothing else derives.

    Raises:
      LeafError: a gradient does not fit its parameter, by name.
    """
    if want.spec != got.spec:
        where = tree.first_mismatch(want.shards, got.shards, "grads", shards.is_leaf)
        text = "opt_step: the gradients' tree differs from the parameters'"
        raise LeafError(text, [where], fix="differentiate with respect to state.params")
    if not _fits(want, got):
        rows = zip(tree.spec_paths(want.spec), want.leaves, got.leaves, strict=True)
        for path, a, b in rows:
            if not _fits(flat.unpacked(a), flat.unpacked(b)):
                text = f"opt_step: {tree.join('grads', path)} does not match its parameter"
                odd = "of another shape, dtype, device or bucket"
                fix = "do both hops first: reduce_grads(grads, groups, like=state.params)"
                raise LeafError(text, [f"expected {a}", f"got {b} {odd}"], fix)
    if flat.any_requires_grad(got.pieces) or _torch.inside_torch_func():
        return False
    live = flat.any_requires_grad(want.pieces)
    return live and all(x.is_leaf for x in want.pieces if x.requires_grad)


def _fits(want: flat.Unpacked, got: flat.Unpacked) -> bool:
    """Whether gradients fit; those of parameters on the host may be on a device."""
    fits = want.geometry == got.geometry
    devices = zip(map(flat.DEVICE, want.pieces), map(flat.DEVICE, got.pieces), strict=False)
    for home, own in set(devices):
        fits = fits and (home == own or (home.type == "cpu" and _torch.is_async(own)))
    return fits


P = TypeVar("P")  # a tree of shards
V = TypeVar("V")


@tree.node
@dataclass(frozen=True)
class TrainState(Generic[P]):
    """All that a training run carries from step to step.

    `copy.deepcopy` copies it, and each rank may keep its own by `pickle` or `torch.save`. What
    comes out of a pickle has no optimizer, which is functions: say
    `replace(state, transform=optimizer)` before the next step, on groups like those it was made on.
    To load such a file is to run what is in it, and it serves the rank that wrote it.
    `checkpoint.save` has neither limit.

    Args:
      step: optimizer steps done.
      params: tree of shards.
      opt: the transform's state.
      buffers: what a model has besides parameters, such as BatchNorm's statistics: full tensors by
        name.
      transform: the optimizer.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.1))
      >>> state.step, state.params["w"].data, state.buffers
      (0, tensor([1., 1.]), {})
      >>> from dataclasses import replace
      >>> replace(state, transform=optim.sgd(0.2), step=7).step
      7
    """

    step: int
    params: P
    opt: Any
    buffers: dict[str, Tensor]
    transform: Transform = tree.static()

    def __reduce__(self) -> tuple:
        return TrainState, (self.step, self.params, self.opt, self.buffers, _NO_OPTIMIZER)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainState":
        values = copy.deepcopy((self.step, self.params, self.opt, self.buffers), memo)
        return TrainState(*values, self.transform)


def _no_optimizer(*_: Any) -> Any:
    fix = "from dataclasses import replace; state = replace(state, transform=optimizer)"
    raise PlanError("opt_step: this state comes from a pickle, which has no optimizer", fix=fix)


_NO_OPTIMIZER = Transform(_no_optimizer, _no_optimizer, _no_optimizer)


# Where parameters and moments lie: on the device, in host memory or in files.


class _Mover:
    """Takes tensors to their places.

    Args:
      where: the places.
      field: "params" or "states".
      device: the one that computes.
    """

    def __init__(self, where: Where, field: str, device: torch.device) -> None:
        self._where, self._field, self._device = where, field, device

    def taken(self, x: Tensor, path: str) -> Tensor:
        """A tensor at the place of a leaf; the same one if it is there."""
        place = self._where.at(path, self._field, self._device)
        if not is_coded(x):
            leaf = tree.join(self._field, path)
            return place_tensor(x, place, self._device, self._where.host_bytes, leaf)
        if place != DEVICE:
            text = f"move: {path} is to go to {place}, and is kept as codes"
            fix = "give states= a pattern that leaves it out; or shard without state="
            raise PlanError(text, fix=fix)
        return x

    def of_run(self, layout: flat.FlatLayout, run: flat.FlatRun, x: Tensor) -> Tensor:
        """`taken` for a run, all of which lies where its largest leaf should."""
        rows = zip(layout.leaves, tree.spec_paths(layout.spec), strict=True)
        pieces = [(x[0].numels[x[1]], path) for x, path in rows if isinstance(x, tuple)]
        _, path = max((pieces[i] for i in run.members), key=itemgetter(0))  # of the largest leaf
        return flat.by_chunk(run, x, lambda x: self.taken(x, path))


def _moved_states(opt: Any, params: flat.Unpacked, mover: _Mover) -> Any:
    """The state of an optimizer with its moments at their places."""
    names = dict(zip(zip(*params.geometry[:2], strict=True), params.paths, strict=True))

    def take(x: Any) -> Any:
        if isinstance(x, flat.FlatShards):
            return columns.changed(x, partial(mover.of_run, x.layout))
        if not isinstance(x, shards.Sharded) or (x.bucket, x.slot) not in names:
            return x
        data = mover.taken(x.data, names[x.bucket, x.slot])
        return x if data is x.data else shards.Sharded(data, x.bucket, x.slot)

    return tree.map_leaves(take, opt, is_leaf=flat.is_node)


def _device_of(every: Sequence[Tensor]) -> torch.device:
    """Return the device that computes with a state, if its tensors show it.

    Locked host memory is that of something which a device has moved there.
    """
    for x in every:
        if _torch.is_async(x.device):
            return x.device
    pinned = any(not is_placed(x) and x.numel() and x.is_pinned() for x in every)
    found = torch.accelerator.current_accelerator() if pinned else None
    return torch.device("cpu") if found is None else _torch.with_index(found)


def _init_placed(init: Callable[[Any], Any], params: Any, where: Where | str | None) -> Any:
    """What `init(params)` gives, its moments made at their places one after the other."""
    places, found = Where.parse(where), flat.unpacked(params)
    check_matched("init_state: where", places.patterns, tree.spec_paths(found.spec))
    if "states" not in places.moved:
        return init(params)
    mover = _Mover(places, "states", _device_of(found.pieces))
    with reports(FileError):
        token = flat.TAKING.set(mover.of_run)
        try:
            opt = init(params)
        finally:
            flat.TAKING.reset(token)
        return _moved_states(opt, found, mover)  # those of optimizers of one's own


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
    state: Any = value
    params, opt = (state.params, state.opt) if isinstance(value, TrainState) else (value, ())
    shards.check_leaves("move", params, tree.flatten(params, shards.is_leaf)[0], "value")
    given, found = [x for x in tree.flatten(opt)[0] if isinstance(x, Tensor)], flat.unpacked(params)
    given += found.pieces
    why = "move outside, and differentiate by what came back"
    refuse_derivative("move", [x for x in given if not x.is_leaf], why)
    places = Where.parse(where)
    check_matched("move: where", places.patterns, tree.spec_paths(found.spec))
    home = _device_of(given) if device is None else _torch.with_index(torch.device(device))
    with reports(FileError):
        mover = _Mover(places, "params", home)
        params = columns.changed(params, partial(mover.of_run, found.layout()))
        if not isinstance(value, TrainState):
            return params
        opt = _moved_states(opt, found, _Mover(places, "states", home))
        return replace(state, params=params, opt=opt)


# The state before the first step, and a step.


def init_state(
    params: P,
    optimizer: Optimizer,
    *,
    buffers: dict[str, Tensor] | None = None,
    groups: Any = None,
    where: Where | str | None = None,
) -> TrainState[P]:
    """The state before the first step.

    Args:
      params: tree of shards.
      optimizer: a `Transform`, or anything with `init(params)` and `update(grads, state, params)`.
      buffers: the model's buffers, full tensors by name.
      groups: as for `shard`; if they are given, their ranks compare the options of the optimizer.
      where: what it says of `states` is where moments are made, and where `opt_step` leaves them;
        see `where`. Parameters stay where they are.

    Returns:
      A `TrainState` at step 0.

    Communication: with `groups`, 32 bytes over the partition group and the replication group.

    Memory: the optimizer's state for this rank's shards, where `where` says; what is made elsewhere
      takes memory here for one run of leaves at a time. Zeros on the CPU take theirs when the
      first step writes them.

    Raises:
      FileError: a file cannot be made, or the disk has not so much room; see `opt_step`.
      PlanError: `optimizer` is neither of these, or keeps what `state=` has no codes for.
      LeafError: `params` are not shards.
      DesyncError: ranks of `groups` have other options; on all of them, by name.

    Example:
      >>> groups = make_groups(1)
      >>> init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.1)).step
      0
    """
    transform = as_transform(optimizer)
    shards.check_leaves("init_state", params, tree.flatten(params, shards.is_leaf)[0], "params")
    if groups is not None:
        homes = shards.homes_of("init_state", groups, params)
        hooks.compare("init_state", TrainState(0, params, (), {}, transform), homes)
    opt = _init_placed(transform.init, params, where)
    flat.check_coded(params, opt)
    return TrainState(0, params, opt, dict(buffers or {}), transform)


def opt_step(state: TrainState[P], grads: Tree, *, donate: bool = False) -> TrainState[P]:
    """The next state.

    Args:
      state: the state that the gradients were taken at.
      grads: tree of shards with the structure of `state.params`, both hops done (see
        `reduce_grads`); or a `GradSum`, of which each bucket is stepped once its hop 2 is done,
        while others are still reduced. In a `chain` all of it is waited for first.
      donate: update in the memory of `state`, which cannot be used afterwards: doing so raises and
        names the value. What else lies in that memory, such as leaves of another tree, stays. A
        Ctrl-C meanwhile is raised after the return, once the result is assigned, so assign it at
        once. In a process that uses torch.compile it may, rarely, come before the assignment: then
        the state is lost, and using it raises. `Trainer` has no such gap.

    Returns:
      A new `TrainState`, one step later. It has derivatives where one is asked for: inside
      torch.func, or where gradients, state or learning rate require one and grad mode is on. `sgd`,
      `adam`, `adamw`, `lion`, clipping and optimizers of `init` and `update` have them, also by a
      tensor `lr`: each rank gets the derivative of its own shards, to be added up over the
      partition group. Parameters that are leaves of autograd count as constants unless the
      gradients require a derivative.

    If an error ends it between its first write and its last, then with `donate` the state is lost,
    and using it raises LostStateError: `same_step` takes it from a replica. Else it is as before.

    Communication: only that of transforms that were given groups, such as clipping by norm. The
      first time that gradients come from these groups, 8 bytes to compare the step and 32 for the
      options of the optimizer; see [Note: one step] in `faults.comparing`. With `donate` it waits
      for gathers of these shards under way.

    Memory: a second copy of the state; with `donate` only that of small gradients, see `Columns`.

    Raises:
      LeafError: `grads` does not match `state.params`, or still owes hop 1.
      DonatedError: `state` was donated before.
      LostStateError: ranks are at different steps; on all of them, and nothing was written.
      GroupsError: on an accelerator, collectives of the groups of these gradients were aborted.
      DesyncError: ranks have different optimizers; on all of them, and nothing was written.
      FileError: a file with states cannot be read or written. The other ranks raise it as
        `PeerFileError`, in the next call that waits for this one, here or in a later step. As
        they may have taken this one, these groups are finished, as after any error that is not
        named here: go on after `mf.reset(groups)`.
      PlanError: a derivative is asked for with `donate`, or of an optimizer without one; or
        `state` belongs to another optimizer, or the rate is not a number of at least 0.
      PlanError: `donate` is not a bool.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.1))
      >>> grads = reduce_grads({"w": torch.ones(2)}, groups)
      >>> opt_step(state, grads).params["w"].data
      tensor([0.9000, 0.9000])
    """
    ahead = flat.unpacked(grads)
    home = shards.reduction_groups(ahead.leaves) if ahead.stream is None else ahead.stream.home
    unknown = home is None and ahead.pieces and _torch.is_async(ahead.pieces[0].device)
    torn = any_aborted() if unknown else home is not None and home.partition.state.aborted
    if torn:  # before they were there; later ones lose what is written
        text = "opt_step: collectives of these gradients may have been aborted; nothing was written"
        raise GroupsError(text, fix="compute them again, on the groups that reset gives")
    if isinstance(home, Groups) and "opt_step" not in home.agreed:
        hooks.compare("opt_step", state, [home])
    if spans.observers:
        spans.passing("opt_step", state.step + 1, flat.unpacked(state.params).pieces)
    if not donate:
        return _stepped(state, ahead, home, donate)
    with Commit() as commit:
        if ahead.stream is not None:
            commit.block()  # a wait for a rank that is gone gives way to a signal
        else:
            commit.write()
        if spans.observers:
            spans.passing("commit", state.step + 1, flat.unpacked(state.params).pieces)
        found = _stepped(state, ahead, home, donate)
        ending = commit.ending()
    ending[0]  # see [Note: between two instructions] in `threads`
    return found


def _stepped(state: TrainState, ahead: flat.Unpacked, home: Any, donate: bool) -> TrainState:
    before = flat.unpacked(state.params)
    variables = check_grads(before, ahead)
    if spans.watchers:
        record_memory(state)
    # Parameters may be leaves of autograd: a step is a function of them only if gradients are.
    start = before.with_pieces([x.detach() for x in before.pieces]) if variables else before
    seen = spans.Span("opt_step", state.step + 1, parts=True) if spans.seen() else spans.UNSEEN
    with seen, shards.Writing() as writing:
        if donate:
            to = f"opt_step at step {state.step}"
            writing.covers(state.params, "params", to)
            writing.covers(state.opt, "opt", to)
        try:
            after, opt = state.transform.step(ahead, state.opt, start, donate)
        except BaseException as error:
            _announced(error, home)
            raise
        params = after.shards
        if donate:
            writing.mark_donated([*after.leaves, *tree.flatten(opt, shards.is_leaf)[0]])
            # torch's optimizers write through tensors that count versions separately; autograd must
            # notice if somebody saved or gathered the old values.
            increment_version(after.pieces)
            if variables:
                params = tree.map_leaves(Tensor.requires_grad_, params)
    if FOUND_INF.get() is None and after.pieces:  # a masked step is not written then
        device = after.pieces[0].device if home is None else home.device
        if _torch.is_async(device):
            shards.lose_if_aborted(params, f"opt_step at step {state.step}", device, home)
    return TrainState(state.step + 1, params, opt, state.buffers, state.transform)


def _announced(error: BaseException, home: Any) -> None:
    """End the groups if some ranks may have taken a step that others have not."""
    known = isinstance(error, MicsError) and not isinstance(error, FileError)
    if isinstance(home, Groups) and len(home.state.ranks) > 1 and not known:
        home.state.finish(error)  # the others may have taken this step


def record_memory(state: TrainState) -> None:
    """Tell watchers the memory of a state by kind, each storage once, padding included."""
    kinds = {"shards": state.params, "moments": state.opt, "buffers": state.buffers}
    for kind, part in kinds.items():
        data = [getattr(leaf, "data", leaf) for leaf in tree.flatten(part, shards.is_leaf)[0]]
        tensors = [y for x in data for y in getattr(x, "memory", [x]) if isinstance(y, Tensor)]
        sizes = {_torch.storage_id(x): x.untyped_storage().nbytes() for x in tensors}
        spans.resident(kind, kind, sum(sizes.values()))
