"""The arguments of a `Trainer`, checked before anything trains; parameters become shards."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mics_fn import _torch, checks, tree
from mics_fn.collectives import SHORT_NAMES, Wire
from mics_fn.errors import GroupsError, LeafError, PlanError, TreeError, message, name_some
from mics_fn.groups import Groups, placement
from mics_fn.init import warn_of_compile
from mics_fn.offload import where_of
from mics_fn.optim import Guard, Transform, as_transform
from mics_fn.schedules import OnDemand, Schedule
from mics_fn.shards import (
    Precision,
    Sharded,
    check_dtype,
    check_leaves,
    check_patterns,
    dtype_name,
    is_leaf,
    open_shards,
    owners_of,
    shard,
)
from mics_fn.train.defaults import bucket_bytes_for
from mics_fn.train.syncing import ReplicaSync
from mics_fn.tree import Tree

_COUNT = "return of how many things the loss of this batch is the mean, such as its valid tokens"
_FUNCTION = "write loss_fn(params, batch), with full tensors as params, and return one number"
_LOSS = "call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
# Names of arguments of losses of torch, and of such as people write.
_OUTPUTS = {"input", "inputs", "out", "output", "outputs", "logits", "pred", "preds", "prediction"}
_OUTPUTS |= {"predictions", "y_hat", "yhat", "y_pred"}
_TARGETS = {"target", "targets", "label", "labels", "y", "y_true", "ground_truth"}
_ACCUMULATE = "accumulate= is the number of micro-steps"
_CLIP = "guard=optim.Guard(max_norm=1.0) clips gradients by their norm"
_PRECISION = "precision='param=f32, compute=bf16, reduce=f32', or another Precision"
_RATE = "give the optimizer a function of the step: adamw(optim.warmup_cosine(1e-3, 100, 1000))"
_STEPS = "fit(loader, steps=epochs * len(loader)); the loader is started again when it ends"
# Options of other trainers, and what is there instead.
INSTEAD = {
    **dict.fromkeys(("lr", "learning_rate", "scheduler", "lr_scheduler"), _RATE),
    **dict.fromkeys(("max_grad_norm", "clip_grad_norm", "gradient_clip_val", "grad_clip"), _CLIP),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), _ACCUMULATE),
    **dict.fromkeys(("amp", "fp16", "bf16", "mixed_precision", "dtype"), _PRECISION),
    **dict.fromkeys(
        ("epochs", "num_epochs", "max_epochs", "num_train_epochs", "max_steps"), _STEPS
    ),
    **dict.fromkeys(("loss_fn", "criterion"), "loss= is a function loss(model, batch)"),
    **dict.fromkeys(("callbacks", "logger"), "trainer.step returns StepMetrics, for any logger"),
    "device": "pass it to make_groups, and move the model there",
}
_SAME = "pass the shards that init_model or load_shards made for this model"


def check_model(
    model: Any,
    loss: Any,
    optimizer: Any,
    groups: Any,
    guard: Any,
    replica_sync: Any,
    deterministic: Any,
) -> None:
    """Raise unless a `Trainer` is given a model, an optimizer and groups, in this order.

    Of some options the kind is checked here, before anybody asks whether they are true.

    Raises:
      PlanError: the model, the loss or an option is something else.
      OptimizerError: the optimizer is none.
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
    if groups is None or isinstance(groups, nn.Module | Transform):
        checks.refuse("Trainer", "groups", groups, "groups", fix, GroupsError)
    as_transform(optimizer)
    verb, fix = "Trainer", "make one: optim.Guard(...)"
    checks.instance(verb, "guard", guard, Guard | None, "a Guard", fix)
    fix = "call every_step(), local_sgd(...) or diloco(...)"
    checks.instance(verb, "replica_sync", replica_sync, ReplicaSync | None, "a ReplicaSync", fix)
    checks.flag(verb, "deterministic", deterministic)


def check_weight(weight: Any) -> None:
    """Raise PlanError unless `weight` of a `Trainer` is a function of a batch, or None."""
    checks.function("Trainer", "weight", weight, "weight(batch)", _COUNT)
    checks.call("Trainer", weight, "weight(batch)", _COUNT)


def _check_loss(loss: Any) -> None:
    """Raise PlanError for a loss of other arguments, such as `loss(output, target)` of torch."""
    call = loss.forward if isinstance(loss, nn.Module) else loss
    checks.call("Trainer", call, "loss(model, batch)", _LOSS)
    names = list(checks.parameters(call))[:2]
    if len(names) == 2 and names[0] in _OUTPUTS and names[1] in _TARGETS:
        name = getattr(loss, "__name__", type(loss).__name__)
        text = f"Trainer: loss={name} takes ({', '.join(names)}), expected loss(model, batch)"
        raise PlanError(message(text, fix=_LOSS))


def check_options(trainer: Any, prefetch: Any, schedule: Any, checkpoint: Any) -> None:
    """Raise PlanError unless the options of a `Trainer` are what they should be.

    Args:
      trainer: with its first attributes, named as the options.
      prefetch, schedule, checkpoint: as they were given. Options of `shard` are checked there.
    """
    verb = "Trainer"
    checks.integer(verb, "accumulate", trainer.accumulate)
    fix = "0 never compares replicas"
    checks.integer(verb, "check_replicas", trainer.check_replicas, 0, fix=fix)
    checks.choice(verb, "on_drift", trainer.on_drift, "raise", "heal")
    checks.flag(verb, "recoverable", trainer.recoverable)
    checks.flag(verb, "overlap_step", trainer.overlap_step)
    if trainer.overlap_step and trainer.recoverable:
        text = "Trainer: overlap_step=True with recoverable=True, which keeps states whole"
        raise PlanError(message(text, fix="leave one of them out"))
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
    bound = [f"{name}.forward" for name in bound if name in compiled]
    if bound:
        text = f"Trainer: torch.compile made {name_some(bound)} for the modules as they were given"
        lines = ["it would go on with their parameters, and not with those that are trained"]
        raise PlanError(message(text, lines, "leave it out; see Limits in README"))
    if compiled and full_bytes:
        text = (
            f"Trainer: torch.compile wraps {name_some(compiled)}, which would be given parameters"
        )
        fix = "use its _orig_mod, or the function itself; or partition_size=1; see Limits in README"
        raise PlanError(message(f"{text} that are gathered while it runs", fix=fix))


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
      TreeError: names, shapes or ties of the parameters differ from those of the model.
      LeafError: a parameter has no value, or another dtype or device than the model or its groups;
        or none is trained.
      PlanError: shards were made for other groups or another precision, or an option has no effect.
    """
    params = own if given is None else given
    options = {name: value for name, value in options.items() if value is not None}
    for name in ("frozen", "order", "bucket"):
        fix = "pass a function such as lambda path: 'bias' in path"
        checks.function("Trainer", name, options.get(name), "of the path of a leaf", fix)
    if "bucket_bytes" in options:
        found = checks.nbytes("Trainer", "bucket_bytes", options["bucket_bytes"], 1)
        options["bucket_bytes"] = found
    leaves, _ = tree.flatten(params, is_leaf)
    sharded = any(map(is_leaf, leaves))
    if sharded:
        check_leaves("Trainer", params, leaves, "params")
    if own is not None and given is not None:
        _check_names(own, given)
    if sharded:
        _check_shards(params, groups, precision, options)
        _check_trained(leaves)
        return params
    for path, leaf in zip(tree.paths(params, "params", is_leaf), leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.is_meta:
            fix = "pass params=: the shards that init_model gave with this model, or full tensors"
            raise LeafError(message(f"Trainer: {path} is on meta, without a value", fix=fix))
    if own is not None:
        options.setdefault("order", tree.own_order(own))
    options.setdefault("bucket_bytes", bucket_bytes_for(params, home))
    found = shard(params, groups, precision=precision, **options)
    _check_trained(tree.flatten(found, is_leaf)[0])
    return found


def _check_trained(leaves: Sequence[Any]) -> None:
    """Raise LeafError unless some leaf is trained, as steps would change nothing."""
    if not any(isinstance(leaf, Sharded) for leaf in leaves):
        text = "Trainer: no parameter is trained: all are frozen, or there is none"
        fix = "leave requires_grad=True on some, and out of frozen="
        raise LeafError(message(text, fix=fix))


def warn_of_overlap(trainer: Any) -> None:
    """Warn if steps cannot overlap hop 2, since the default guard waits for all gradients."""
    if trainer.overlap_step and trainer.guard == Guard():
        text = "Trainer: overlap_step=True has no effect with a guard that may refuse a step"
        why = "to refuse one that is not finite, all gradients have to be known before any is used"
        fix = "pass guard=optim.Guard(on_nonfinite='ignore'), or leave overlap_step= out"
        warnings.warn(message(text, [why], fix), stacklevel=5)


def warn_of_hop2(params: Tree, sync: ReplicaSync) -> None:
    """Warn if hop 2 is to send codes of gradients, and replicas never send gradients."""
    leaves = [x for x in tree.flatten(params, is_leaf)[0] if isinstance(x, Sharded)]
    sent = [x.bucket.hop2 for x in leaves if isinstance(x.bucket.hop2, Wire)]
    found = dict.fromkeys(f"hop2={wire}" for wire in sent)
    if found and sync.exact:
        text = f"Trainer: {' and '.join(found)} of precision= has no effect with {sync.name}"
        why = "its merges average parameters, which are sent in their own dtype"
        fix = "leave hop2= out, or merge with diloco(...), which sends differences"
        warnings.warn(message(text, [why], fix), stacklevel=5)


def check_buffers(buffers: Mapping[str, Tensor], home: Groups) -> None:
    """Raise LeafError unless all buffers have values and are on the device of the groups."""
    for name, value in buffers.items():
        if value.device != home.device:
            where = "on meta, without a value" if value.is_meta else f"on {value.device}"
            text = f"Trainer: buffer {name!r} is {where}; the groups are on {home.device}"
            fix = "move the model to the device of its groups first"
            if value.is_meta:
                fix = "make the model with init_model, or give the buffer a value"
            raise LeafError(message(text, fix=fix))


def _check_names(own: Mapping[str, Tensor], given: Tree) -> None:
    """Raise unless parameters have the names, shapes, kinds of dtypes and ties of the model's."""
    text = "Trainer: params= are not those of the model"
    if not isinstance(given, Mapping) or sorted(own) != sorted(map(str, given)):
        found = tree.first_mismatch(dict.fromkeys(own, 0), given, "params", is_leaf)
        raise TreeError(message(text, [found], _SAME))
    for name, value in own.items():
        shape, want = getattr(given[name], "shape", None), tuple(value.shape)
        if shape is None or tuple(shape) != want:
            got = type(given[name]).__name__ if shape is None else tuple(shape)
            lines = [f"params.{name}: expected {want}, got {got}"]
            raise TreeError(message(text, lines, _SAME))
        if given[name].dtype.is_floating_point != value.dtype.is_floating_point:
            dtypes = [dtype_name(x.dtype) for x in (value, given[name])]
            lines = [f"params.{name}: expected {dtypes[0]}, got {dtypes[1]}"]
            raise LeafError(message(text, lines, _SAME))
    want, got = _owners(own), _owners(given)
    for name, owner in want.items():
        if owner != got[name]:
            words = [f"tied to {to!r}" if to != name else "not tied" for to in (owner, got[name])]
            lines = [f"params.{name}: expected {words[0]}, got {words[1]}"]
            raise TreeError(message(text, lines, _SAME))


def _owners(values: Mapping[str, Any]) -> dict[str, str]:
    """For each float leaf, by name, the first one that is the same tensor."""
    names = [name for name in sorted(values) if values[name].dtype.is_floating_point]
    if all(isinstance(values[name], Tensor) for name in names):
        owners = owners_of([values[name] for name in names])
        return {name: names[i] for name, i in zip(names, owners, strict=True)}
    first: dict[Any, str] = {}
    slots = {name: (values[name].bucket, values[name].slot) for name in names}
    return {name: first.setdefault(slots[name], name) for name in names}


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
        raise PlanError(message(text, fix=fix))
    tree.refuse_equal_paths("Trainer", params, "params", is_leaf)
    opened, bare = open_shards("Trainer", params, groups), tree.paths(params, "", is_leaf)
    patterns = precision.patterns if precision is not None else []
    check_patterns("Trainer", {"precision": patterns}, bare, opened.homes, stacklevel=6)
    for leaf, home, path in zip(opened.leaves, opened.homes, bare, strict=True):
        data, bucket, name = getattr(leaf, "data", None), leaf.bucket, tree.join("params", path)
        if isinstance(data, Tensor) and data.device != home.device:
            text = f"Trainer: {name} is on {data.device}, its groups are on {home.device}"
            raise LeafError(message(text, fix="make shards on the device of their groups"))
        if precision is not None and bucket is not None:
            own = bucket.dtype if bucket.codes is None else bucket.compute  # of what became codes
            want = precision.dtypes(path, own)
            got = (bucket.dtype, bucket.compute, bucket.reduce, bucket.accumulate)
            if want != got:
                lines = [f"{word} {_names(x)}" for word, x in (("expected", want), ("got", got))]
                text = f"Trainer: {name} was not made with this precision="
                fix = "make the shards with the same precision"
                raise PlanError(message(text, [*lines, "param/compute/reduce/accumulate"], fix))
            sent: list[Any] = [*precision.wires(path, bucket.dtype)]
            numel = bucket.numels[getattr(leaf, "slot", 0)]
            sent.append(
                precision.state_codes(path, bucket.dtype, numel) if bucket.trainable else None
            )
            sent.append(precision.codes(path, bucket.dtype))
            have = [bucket.gather, bucket.hop1, bucket.hop2, bucket.state, bucket.codes]
            if sent != have:
                lines = [f"{word} {_codes(x)}" for word, x in (("expected", sent), ("got", have))]
                how = "kept" if sent[:3] == have[:3] else "sent"
                text = f"Trainer: {name} is not {how} as this precision= says"
                fix = "make the shards with the same precision"
                raise PlanError(message(text, lines, fix))


def _codes(given: list[Any]) -> str:
    """What travels of a leaf and how its moments are kept, where that is not values."""
    pairs = zip(("gather", "hop1", "hop2", "state", "param"), given, strict=True)
    words = [f"{name}={SHORT_NAMES.get(x, x)}" for name, x in pairs if x is not None]
    return ", ".join(words) or "values"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return "/".join(map(dtype_name, dtypes))


def homes_for(groups: Any, params: Tree, deterministic: bool) -> tuple[Any, Groups]:
    """The groups of a tree, in a fixed order if `deterministic`; and the first of them."""
    found = tree.spread(
        groups, params, what="groups", is_leaf=is_leaf, is_value=lambda v: isinstance(v, Groups)
    )
    if deterministic and isinstance(groups, Groups):
        groups = placement.fixed_order(groups)
    elif deterministic:
        ordered = {home: placement.fixed_order(home) for home in dict.fromkeys(found)}
        paths = tree.paths(params, is_leaf=is_leaf)
        by_path = {path: ordered[home] for path, home in zip(paths, found, strict=True)}
        groups, found = by_path.__getitem__, list(by_path.values())
    return groups, groups if isinstance(groups, Groups) or not found else found[0]
