"""The arguments of a `Trainer`, checked before anything trains; parameters become shards."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mics_fn import _torch, checks, faults, optim, spans, tree
from mics_fn.collectives import collect_values
from mics_fn.errors import GroupsError, LeafError, PlanError, message, name_some
from mics_fn.groups import Groups, placement
from mics_fn.init import warn_of_compile
from mics_fn.offload import where_of
from mics_fn.schedules import OnDemand, Schedule, keep_all, on_demand
from mics_fn.shards import (
    BUCKET_BYTES,
    Precision,
    Sharded,
    check_dtype,
    dtype_name,
    homes_of,
    is_leaf,
    names,
    open_shards,
    owners_of,
    shard,
)
from mics_fn.train.plain import guard_numbers
from mics_fn.train.program import Values
from mics_fn.train.replicas import SyncState
from mics_fn.tree import Tree

# Defaults of `Trainer`: the size of buckets, and the schedules for its memory budget.


def schedules_for(
    live_bytes: float | str | None, prefetch: int, full_bytes: int, home: Groups
) -> tuple[OnDemand, OnDemand]:
    """A policy for training, and one for evaluation, which uses parameters in another order."""
    if isinstance(live_bytes, str) and live_bytes == "auto":
        live_bytes = _quarter_of_memory(home)
    budget = None if live_bytes is None else checks.nbytes("Trainer", "live_bytes", live_bytes)
    if budget is None or budget >= full_bytes:
        return OnDemand(None, 0, at_once=True, lets_go=True), keep_all()
    training, evaluation = (on_demand(live_bytes=budget, prefetch=prefetch) for _ in range(2))
    return training, evaluation


def bucket_bytes_for(params: Tree, home: Groups) -> int:
    """A size that gives a model several buckets to overlap, each large enough for the network.

    Without gathers fewer do, and the host has less to do.
    """
    if home.world_size == 1:
        return BUCKET_BYTES
    leaves = {id(x): x for x in tree.flatten(params)[0] if isinstance(x, Tensor)}
    nbytes = sum(x.nbytes for x in leaves.values() if x.is_floating_point())
    return min(BUCKET_BYTES, max(2**20, nbytes // (4 if home.partition_size == 1 else 16)))


def _quarter_of_memory(home: Groups) -> int:
    """A quarter of the memory of the rank that has least; the same number on all ranks."""
    found = _torch.total_memory(home.device)
    if not _torch.is_async(home.device):  # the ranks of a machine share its memory
        found //= home.plan.topology.sizes[-1]
    mine = torch.tensor(found // 4, dtype=torch.int64, device=home.device)
    return min(collect_values(home, mine).values())


# What is compared for a `Trainer`: options that change numbers, and every K steps replicas.


def compare_options(trainer: Any, params: Tree, groups: Any, guard: optim.Guard) -> None:
    """Compare the options of a `Trainer` between ranks.

    Args:
      trainer: the `Trainer`, with its state.
      params: the tree of shards that it trains.
      groups: as for `shard`.
      guard: the guard to compare, which need not be that of the trainer yet.

    Communication: that of `same_options`.

    Raises:
      DesyncError: ranks have other options.
    """
    guard.check_groups(params, groups)
    homes = list(dict.fromkeys(homes_of("Trainer", groups, params)))
    several = any(home.partition_size * home.num_replicas > 1 for home in homes)
    facts = _facts(trainer, guard, names(params), several) | {
        "deterministic": f"{trainer.deterministic}",
        "recoverable": f"{trainer.recoverable}",
        "placement": "; ".join(home.describe() for home in homes),
        "guard numbers": f"{guard_numbers(guard)}",
    }
    faults.same_options("Trainer", facts, homes)


def lasting_options(trainer: Any) -> dict[str, str]:
    """Return the options and versions that a resumed run must share, as texts by name.

    Where ranks are and what they hold at a time may differ: that changes only how sums are rounded.
    """
    paths = names(trainer.state.params)
    return {**_facts(trainer, trainer.guard, paths, several=False), **faults.versions()}


def _facts(trainer: Any, guard: optim.Guard, paths: Sequence[str], several: bool) -> dict[str, str]:
    """The options that ranks and later runs must share."""
    transform, sync, scale = trainer.state.transform, trainer.replica_sync, guard.scale
    changes = {*scale.CHANGING} - ({"value"} if scale.kind != "dynamic" else set())
    facts = {
        "accumulate": f"{trainer.accumulate}",
        "grad_dtype": f"{trainer.grad_dtype}",
        "precision": f"{trainer.precision}" or "as given",
        "replica_sync": sync.name,
        "weight": "none" if trainer.weight is None else "a function",
    }
    for f in fields(guard):
        if f.repr and f.name != "scale":  # the others change from step to step
            facts[f"guard {f.name}"] = f"{getattr(guard, f.name)}"
    for f in fields(scale):
        if f.name not in changes:
            facts[f"guard scale {f.name}"] = f"{getattr(scale, f.name)}"
    outer = {} if sync.facts is None else faults.texts_of(sync.facts, paths)
    facts |= {f"outer {name}": text for name, text in outer.items()}
    return {**facts, **faults.optimizer_facts("Trainer", transform, paths, several)}


def start_comparison(trainer: Any, buffers: Sequence[str]) -> faults.Comparison | None:
    """Start to compare replicas if it is due before this step; None if it is not.

    Replicas that are independent are equal after a merge alone, and only in their parameters.

    Args:
      trainer: the `Trainer`, with its state.
      buffers: the names of those that are averaged over ranks.

    Communication: that of `same_replicas`.
    """
    if spans.observers:
        spans.passing("step", trainer.state.step + 1)
    sync, step, every = trainer.replica_sync, trainer.sync_state.step, trainer.check_replicas
    if sync.independent:
        every = -(-every // sync.every) * sync.every
    if not every or not step or step % every:
        return None
    names, whole = ([], False) if sync.independent else (buffers, True)
    return faults.Comparison("Trainer", trainer.state, trainer.groups, names, moments=whole)


_COUNT = "return of how many things the loss of this batch is the mean, such as its valid tokens"
_FUNCTION = "write loss_fn(params, batch), with full tensors as params, and return one number"
_LOSS = "call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
# Names of arguments of losses of torch, and of such as people write.
_OUTPUTS = {"input", "inputs", "out", "output", "outputs", "logits", "pred", "preds", "prediction"}
_OUTPUTS |= {"predictions", "y_hat", "yhat", "y_pred"}
_TARGETS = {"target", "targets", "label", "labels", "y", "y_true", "ground_truth"}
_SAME = "pass the shards that init_model or load_shards made for this model"


def check_model(
    model: Any,
    loss: Any,
    optimizer: Any,
    groups: Any,
    guard: Any,
    deterministic: Any,
) -> None:
    """Raise unless a `Trainer` is given a model, an optimizer and groups, in this order.

    Of some options the kind is checked here, before anybody asks whether they are true.

    Raises:
      PlanError: the model, the loss or an option is something else.
      PlanError: the optimizer is none.
      GroupsError: there are no groups.
    """
    fix = "the order is Trainer(model, optimizer, groups, loss=...)"
    if isinstance(model, type):
        name = model.__name__
        checks.refuse("Trainer", "model", model, "an instance", f"pass {name}(...), not {name}")
    if not isinstance(model, nn.Module):
        expected = "an nn.Module or a function loss_fn(params, batch)"
        if not callable(model):
            checks.refuse("Trainer", "model", model, expected, fix)
        checks.call("Trainer", model, "model(params, batch)", _FUNCTION)
    checks.function("Trainer", "loss", loss, "loss(model, batch)", _LOSS)
    if loss is not None:
        _check_loss(loss)
    if groups is None or isinstance(groups, nn.Module | optim.Transform):
        checks.refuse("Trainer", "groups", groups, "groups", fix, GroupsError)
    optim.as_transform(optimizer)
    verb, fix = "Trainer", "make one: optim.Guard(...)"
    checks.instance(verb, "guard", guard, optim.Guard | None, "a Guard", fix)
    checks.flag(verb, "deterministic", deterministic)


def _check_loss(loss: Any) -> None:
    """Raise PlanError for a loss of other arguments, such as `loss(output, target)` of torch."""
    call = loss.forward if isinstance(loss, nn.Module) else loss
    checks.call("Trainer", call, "loss(model, batch)", _LOSS)
    names = list(checks.parameters(call))[:2]
    if len(names) == 2 and names[0] in _OUTPUTS and names[1] in _TARGETS:
        name = getattr(loss, "__name__", type(loss).__name__)
        text = f"Trainer: loss={name} takes ({', '.join(names)}), expected loss(model, batch)"
        raise PlanError(text, fix=_LOSS)


def check_options(trainer: Any, prefetch: Any, schedule: Any, checkpoint: Any) -> None:
    """Raise PlanError unless the options of a `Trainer` are what they should be.

    Args:
      trainer: with its first attributes, named as the options.
      prefetch, schedule, checkpoint: as they were given. Options of `shard` are checked there.
    """
    verb = "Trainer"
    checks.function(verb, "weight", trainer.weight, "weight(batch)", _COUNT)
    checks.call(verb, trainer.weight, "weight(batch)", _COUNT)
    checks.integer(verb, "accumulate", trainer.accumulate)
    fix = "0 never compares replicas"
    checks.integer(verb, "check_replicas", trainer.check_replicas, 0, fix=fix)
    checks.choice(verb, "on_drift", trainer.on_drift, "raise", "heal")
    checks.flag(verb, "recoverable", trainer.recoverable)
    checks.flag(verb, "overlap_step", trainer.overlap_step)
    if trainer.overlap_step and trainer.recoverable:
        text = "Trainer: overlap_step=True with recoverable=True, which keeps states whole"
        raise PlanError(text, fix="leave one of them out")
    if trainer.overlap_step and trainer.guard == optim.Guard():
        text = "Trainer: overlap_step=True has no effect with a guard that may refuse a step"
        why = "to refuse one that is not finite, all gradients have to be known before any is used"
        fix = "pass guard=optim.Guard(on_nonfinite='ignore'), or leave overlap_step= out"
        warnings.warn(message(text, [why], fix), stacklevel=4)
    trainer.where = where_of(trainer.where)
    checks.integer(verb, "prefetch", prefetch, 0, fix="0 fetches nothing ahead")
    if trainer.grad_dtype is not None:
        check_dtype(verb, "grad_dtype", trainer.grad_dtype)
    fix, kinds = "pass a Schedule, on_demand(...) or keep_all()", Schedule | OnDemand | None
    checks.instance(verb, "schedule", schedule, kinds, "a Schedule or a policy", fix)
    saves = checkpoint is None or hasattr(checkpoint, "begin")
    if not saves or isinstance(checkpoint, type):
        checks.refuse(verb, "checkpoint", checkpoint, "a Checkpoints", "pass Checkpoints(folder)")


def check_compiled(model: Any, loss: Any, full_bytes: int) -> None:
    """Warn of modules whose `compile()` is dropped, and refuse what `torch.compile` wraps.

    Compiled code takes only plain tensors, which parameters are where each rank holds all of them.

    Args:
      model, loss: as they were given.
      full_bytes: bytes of the parameters that are gathered.

    Raises:
      PlanError: such code would be given parameters that are gathered while it runs, or those of
        the model as it was given.
    """
    made, bound = {"model": model}, []
    if isinstance(model, nn.Module):
        warn_of_compile("Trainer", model, stacklevel=5)
        named = {f"model.{name}".rstrip("."): module for name, module in model.named_modules()}
        made |= {name: module.forward for name, module in named.items()}
        own = [name for name, module in named.items() if "forward" in vars(module)]
        bound = [name for name in own if not hasattr(named[name], "_orig_mod")]
    compiled = [name for name, call in {**made, "loss": loss}.items() if _torch.is_compiled(call)]
    bound = [name for name in bound if name in compiled]
    if bound or (compiled and full_bytes):
        why = "it would go on with the parameters of the modules as they were given"
        if not bound:
            why = "it would be given parameters that are gathered while it runs"
        text = f"Trainer: torch.compile wraps {name_some(bound or compiled)}"
        fix = "use its _orig_mod, or the function itself; or partition_size=1; see Limits in README"
        raise PlanError(text, [why], fix)


def as_shards(
    own: Mapping[str, Tensor] | None,
    given: Tree,
    groups: Any,
    home: Groups,
    precision: Precision | None,
    options: dict[str, Any],
) -> Tree:
    """The shards to train.

    Args:
      own: the module's parameters by name; None for a function.
      given: the argument `params`: shards or full tensors; None takes the module's own.
      groups: as for `shard`.
      home: the first of these groups.
      precision: the argument `precision`; None if it was not given.
      options: options of `shard`; of those that are None, defaults are taken here.

    Communication: as for `shard`; none if shards are given.

    Raises:
      LeafError: names, shapes or ties of the parameters differ from those of the model.
      LeafError: a parameter has no value, or another dtype or device than the model or its groups;
        or none is trained.
      PlanError: shards were made for other groups or another precision, or an option has no effect.
    """
    params = own if given is None else given
    options = {name: value for name, value in options.items() if value is not None}
    leaves, _ = tree.flatten(params, is_leaf)
    if own is not None and given is not None:
        _check_names(own, given)
    if any(map(is_leaf, leaves)):
        _check_shards(params, groups, precision, options)
        found = params
    else:
        for path, leaf in zip(tree.paths(params, "params", is_leaf), leaves, strict=True):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                fix = "pass params=: the shards that init_model gave with this model, or tensors"
                raise LeafError(f"Trainer: {path} is on meta, without a value", fix=fix)
        if own is not None:
            options.setdefault("order", tree.own_order(own))
        options.setdefault("bucket_bytes", bucket_bytes_for(params, home))
        found = shard(params, groups, precision=precision, **options)
    if not any(isinstance(leaf, Sharded) for leaf in tree.flatten(found, is_leaf)[0]):
        text = "Trainer: no parameter is trained: all are frozen, or there is none"
        raise LeafError(text, fix="leave requires_grad=True on some, and out of frozen=")
    return found


def check_buffers(buffers: Mapping[str, Tensor], home: Groups) -> None:
    """Raise LeafError unless all buffers have values and are on the device of the groups."""
    for name, value in buffers.items():
        if value.device != home.device:
            where = "on meta, without a value" if value.is_meta else f"on {value.device}"
            text = f"Trainer: buffer {name!r} is {where}; the groups are on {home.device}"
            fix = "make the model with init_model, or move it to the device of its groups first"
            raise LeafError(text, fix=fix)


def _check_names(own: Mapping[str, Tensor], given: Tree) -> None:
    """Raise unless parameters have the names, shapes, kinds of dtypes and ties of the model's."""
    text = "Trainer: params= are not those of the model"
    if not isinstance(given, Mapping) or sorted(own) != sorted(map(str, given)):
        found = tree.first_mismatch(dict.fromkeys(own, 0), given, "params", is_leaf)
        raise LeafError(text, [found], _SAME)
    want, got = _described(own), _described(given)
    odd = [name for name in own if want[name] != got[name]]
    lines = [f"params.{name}: expected {want[name]}, got {got[name]}" for name in odd[:1]]
    if lines:
        raise LeafError(text, lines, _SAME)


def _described(values: Mapping[str, Any]) -> dict[str, str]:
    """The shape of each leaf, whether it has floats, and the first leaf that is the same tensor."""
    found, first = dict[str, str](), dict[Any, str]()
    plain = [name for name in sorted(values) if isinstance(values[name], Tensor)]
    owners = owners_of([values[name] for name in plain])
    keys: dict[str, Any] = dict(zip(plain, owners, strict=True))
    for name, x in sorted(values.items()):
        if not isinstance(x, Tensor):
            keys[name] = x.bucket, getattr(x, "slot", name)
        if x.dtype.is_floating_point:
            owner = first.setdefault(keys[name], name)
            tied = f"tied to {owner!r}" if owner != name else "not tied"
            found[name] = f"floats of {tuple(x.shape)}, {tied}"
        else:
            found[name] = f"{dtype_name(x.dtype)} of {tuple(x.shape)}"
    return found


def _check_shards(
    params: Tree,
    groups: Any,
    precision: Precision | None,
    options: dict[str, Any],
) -> None:
    """Raise unless shards are on their groups' device, have this precision, and need no options."""
    if options:
        text = f"Trainer: {', '.join(f'{name}=' for name in options)}: params= are shards already"
        fix = "give them to what made the shards: shard, init_model or load_shards"
        raise PlanError(text, fix=fix)
    tree.refuse_equal_paths("Trainer", params, "params", is_leaf)
    opened, bare = open_shards("Trainer", params, groups), tree.paths(params, "", is_leaf)
    patterns = precision.patterns if precision is not None else []
    checks.check_matched("Trainer: precision", patterns, bare)
    for leaf, home, path in zip(opened.leaves, opened.homes, bare, strict=True):
        data, name = getattr(leaf, "data", None), tree.join("params", path)
        if isinstance(data, Tensor) and data.device != home.device:
            text = f"Trainer: {name} is on {data.device}, its groups are on {home.device}"
            raise LeafError(text, fix="make shards on the device of their groups")
        if precision is not None and leaf.bucket is not None:
            _check_precision(leaf, precision, name, path)


def _check_precision(leaf: Any, precision: Precision, name: str, path: str) -> None:
    """Raise PlanError unless a leaf has the formats of a precision."""
    bucket, numel = leaf.bucket, leaf.bucket.numels[getattr(leaf, "slot", 0)]
    own = bucket.dtype if bucket.codes is None else bucket.compute  # of what became codes
    want = precision.formats(path, own, numel, bucket.trainable)
    if want != bucket.formats:
        lines = [f"expected {want}", f"got {bucket.formats}"]
        text = f"Trainer: {name} was not made with this precision="
        raise PlanError(text, lines, fix="make the shards with the same precision")


def homes_for(groups: Any, params: Tree, deterministic: bool) -> tuple[Any, Groups]:
    """The groups of a tree, in a fixed order if `deterministic`; and the first of them."""
    found = [groups] if isinstance(groups, Groups) else homes_by_leaf(groups, params)
    first = found[0] if found else groups
    if not deterministic:
        return groups, first
    new = {home: placement.fixed_order(home) for home in dict.fromkeys(found)}
    return with_homes(groups, params, new), new.get(first, first)


def homes_by_leaf(groups: Any, params: Tree) -> list[Groups]:
    """The groups of each leaf."""
    form = {"what": "groups", "is_leaf": is_leaf, "is_value": lambda v: isinstance(v, Groups)}
    return tree.spread(groups, params, **form)


def with_homes(groups: Any, params: Tree, new: Mapping[Groups, Groups]) -> Any:
    """The groups of a tree with others in their places, in the form in which they were given."""
    if not callable(groups):
        return tree.map_leaves(lambda home: new.get(home, home), groups)
    paths, found = tree.paths(params, is_leaf=is_leaf), homes_by_leaf(groups, params)
    return {path: new[home] for path, home in zip(paths, found, strict=True)}.__getitem__


# This rank as a member of its job, which may go on with other processes after a fault.


class Masked(NamedTuple):
    """A step that a device may not have taken; see [Note: masked steps] in `optim.optimizers`."""

    totals: optim.StepTotals  # they say whether it was
    before: list[Any]  # the leaves of the optimizer's state before it that are no tensors
    sync: SyncState  # before it


class Ready(NamedTuple):
    """All that a rank needs to write a step without any other rank."""

    verdict: optim.Verdict
    buffers: Values  # those after the step
    sync: SyncState  # if it is taken
    masked: Masked | None = None  # if the host does not know yet whether it is


@dataclass(eq=False)
class Member:
    """What a `Trainer` knows of its job, besides what it trains; steps and `reset` change it.

    Args:
      home: the first of its groups, whose ranks share buffers and metrics.
      compared: whether all ranks are known to be at one step; replicas that are independent need
        not be.
      lost: whether this rank is to take its state from others.
      ready: what is left to do of a step that all ranks can write; None if nothing is.
      merges: whether the last step is written, and the merge of replicas after it is left to do.
      masked: the last step, as long as the host has not looked whether it was taken.
    """

    home: Groups
    compared: bool
    lost: bool
    ready: Ready | None = None
    merges: bool = False
    masked: Masked | None = None
