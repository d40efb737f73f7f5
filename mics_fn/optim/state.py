"""What training carries from step to step, and the step of an optimizer."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from mics_fn import _torch, points, tree
from mics_fn.errors import LeafError, TreeError, message
from mics_fn.interrupts import Commit
from mics_fn.optim.flat import Unpacked, unpacked
from mics_fn.optim.options import optimizer_facts, same_options
from mics_fn.optim.runs import any_requires_grad, devices
from mics_fn.optim.steps import compare_once
from mics_fn.optim.transform import Transform, as_transform
from mics_fn.shards import (
    Sharded,
    dtype_name,
    give_away,
    homes_of,
    is_leaf,
    names,
    reduced_over,
)
from mics_fn.shards import donate as mark_donated
from mics_fn.tree import Tree


@tree.node
@dataclass(frozen=True)
class TrainState:
    """All that a training run carries from step to step.

    Args:
      step: optimizer steps done.
      params: tree of shards.
      opt: the transform's state.
      buffers: what a model has besides parameters, such as BatchNorm's statistics: full tensors by
        name.
      transform: the optimizer.
    """

    step: int
    params: Tree
    opt: Any
    buffers: dict[str, Tensor]
    transform: Transform = tree.static()


def init_state(
    params: Tree,
    optimizer: Any,
    *,
    buffers: dict[str, Tensor] | None = None,
    groups: Any = None,
) -> TrainState:
    """The state before the first step.

    Args:
      params: tree of shards.
      optimizer: a `Transform`, or anything with `init(params)` and `update(grads, state, params)`.
      buffers: the model's buffers, full tensors by name.
      groups: as for `shard`; if they are given, their ranks compare the options of the optimizer.

    Returns:
      A `TrainState` at step 0.

    Communication: with `groups`, 32 bytes over the partition group and the replication group.

    Memory: the optimizer's state for this rank's shards.

    Raises:
      OptimizerError: `optimizer` is neither of these.
      DesyncError: ranks of `groups` have other options; on all of them, by name.

    Example:
      >>> groups = make_groups(1)
      >>> init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.1)).step
      0
    """
    transform = as_transform(optimizer)
    if groups is not None:
        homes = homes_of("init_state", groups, params)
        several = any(home.partition_size * home.num_replicas > 1 for home in homes)
        facts = optimizer_facts("init_state", transform, names(params), several)
        same_options("init_state", facts, homes)
    return TrainState(0, params, transform.init(params), dict(buffers or {}), transform)


def opt_step(state: TrainState, grads: Tree, *, donate: bool = False) -> TrainState:
    """The next state.

    Args:
      state: the state that the gradients were taken at.
      grads: tree of shards with the structure of `state.params`, both hops done (see
        `reduce_grads`).
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

    Communication: only that of transforms that were given groups, such as clipping by norm, and 8
      bytes the first time that gradients come from these groups, to compare the step; see [Note:
      one step] in `optim.steps`. With `donate` it waits for gathers of these shards under way.

    Memory: a second copy of the state; none with `donate`.

    Raises:
      TreeError: `grads` does not match `state.params`, or still owes hop 1.
      DonatedError: `state` was donated before.
      TornStepError: ranks are at different steps; on all of them, and nothing was written.
      OptimizerError: a derivative is asked for with `donate`, or of an optimizer without one.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.1))
      >>> grads = reduce_grads({"w": torch.ones(2)}, groups)
      >>> opt_step(state, grads).params["w"].data
      tensor([0.9000, 0.9000])
    """
    ahead = unpacked(grads)
    compare_once(state.step, reduced_over(ahead.leaves))
    if points.observers:
        points.passing("opt_step", state.step + 1, unpacked(state.params).pieces)
    if not donate:
        return _stepped(state, grads, ahead, donate)
    with Commit() as commit:
        commit.write()
        if points.observers:
            points.passing("commit", state.step + 1, unpacked(state.params).pieces)
        found = _stepped(state, grads, ahead, donate)
        ending = commit.ending()
    ending[0]  # see [Note: between two instructions] in `interrupts`
    return found


def _stepped(state: TrainState, grads: Tree, ahead: Unpacked, donate: bool) -> TrainState:
    before = unpacked(state.params)
    variables = _check_grads(before, ahead)
    # Parameters may be leaves of autograd: a step is a function of them only if gradients are.
    start = before.with_pieces([x.detach() for x in before.pieces]) if variables else before
    if state.transform.step_unpacked is not None:
        after, opt = state.transform.step_unpacked(ahead, state.opt, start, donate)
        params = after.closed()
    else:
        given = start.closed() if variables else state.params
        params, opt = state.transform.step(grads, state.opt, given, donate)
        after = unpacked(params) if donate else start
    if donate:
        to = f"opt_step at step {state.step}"
        give_away(before.leaves, (before.spec, "params", to), keep=after.leaves)
        mark_donated(state.opt, "opt", to, keep=opt)
        # torch's optimizers write through tensors that count versions separately; autograd must
        # notice if somebody saved or gathered the old values.
        increment_version(after.pieces)
        if variables:
            params = tree.map_leaves(Tensor.requires_grad_, params)
    return TrainState(state.step + 1, params, opt, state.buffers, state.transform)


def _check_grads(want: Unpacked, got: Unpacked) -> bool:
    """Check that trees fit; whether parameters are leaves of autograd, and nothing else derives."""
    if want.spec != got.spec:
        where = tree.first_mismatch(want.closed(), got.closed(), "grads", is_leaf)
        fix = "differentiate with respect to state.params"
        raise TreeError(
            message("opt_step: the gradients' tree differs from the parameters'", [where], fix=fix)
        )
    if _facts(want) != _facts(got):
        for i, (a, b) in enumerate(zip(want.leaves, got.leaves, strict=True)):
            if _facts(unpacked(a)) != _facts(unpacked(b)):
                raise _mismatch("grads" + tree.spec_paths(want.spec)[i], a, b)
    if any_requires_grad(got.pieces) or _torch.inside_torch_func():
        return False
    variables = [x for x in want.pieces if x.requires_grad]
    return bool(variables) and all(x.is_leaf for x in variables)


def _facts(found: Unpacked) -> tuple[Any, ...]:
    """What a gradient has in common with its parameter, piece by piece."""
    # Shapes of tensors take long to read.
    shapes = found.lengths if found.in_rows else [x.shape for x in found.pieces]
    return found.places, shapes, devices(found.pieces)


def _mismatch(path: str, param: Any, grad: Any) -> TreeError | LeafError:
    """The error for a gradient that does not fit its parameter."""
    what, fix = "does not match its parameter", "pass like=state.params to reduce_grads"
    lines = [f"expected {param}", f"got {grad if is_leaf(grad) else type(grad).__name__}"]
    if not isinstance(param, Sharded):
        fix = "differentiate with respect to state.params"
    elif isinstance(grad, Tensor):
        fix = "do both hops first: reduce_grads(grads, groups, like=state.params)"
    elif isinstance(grad, Sharded) and grad.data.device != param.data.device:
        text = f"opt_step: {path} is on {grad.data.device}, its parameter on {param.data.device}"
        return LeafError(message(text, fix="move it to the parameter's device"))
    elif isinstance(grad, Sharded) and grad.shape == param.shape:
        lines = [f"it lies at {_place(grad)}, the parameter at {_place(param)}"]
    return TreeError(message(f"opt_step: {path} {what}", lines, fix=fix))


def _place(leaf: Sharded) -> str:
    bucket = leaf.bucket
    size = f"{bucket.numel} x {dtype_name(bucket.dtype)}"
    return f"{bucket.offsets[leaf.slot]} of bucket {bucket.index} ({size})"
