"""A short stateful loop around the verbs; a hand-written step can do everything that it does."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from mics_fn import _torch, checks, optim, shards, spans, tree
from mics_fn.collectives import collect_values
from mics_fn.deferred import bucket_sizes, defer
from mics_fn.errors import GroupsError, LeafError, PlanError, message, name_some
from mics_fn.faults import StopRequest
from mics_fn.groups import Groups, rejoin_error, reports_step
from mics_fn.init import warn_of_compile
from mics_fn.inspection import Watched
from mics_fn.offload import Where
from mics_fn.optim import Guard, Optimizer, TrainState, init_state, move
from mics_fn.schedules import OnDemand, Schedule, keep_all, on_demand
from mics_fn.train import stepping
from mics_fn.train.loop import DataPasses, check_fit, train_for
from mics_fn.train.program import FunctionProgram, ModuleProgram, to_device
from mics_fn.train.replicas import ReplicaSync, SyncState, policy_of
from mics_fn.train.stepping import Member, StepMetrics
from mics_fn.tree import Tree

# What trainers of other libraries have, and what is there instead.

_SAVE = "pass checkpoint=Checkpoints(folder, every=100); weights alone are trainer.state_dict()"
_LOAD = "checkpoint=Checkpoints(folder) goes on from the newest step; init_model takes weights="
_STEP = "trainer.step(batch) is one step, with backward and optimizer; trainer.fit(loader, steps)"
_EVAL = "trainer.eval(batch) is the loss of a batch in evaluation mode, over all ranks"
_MODEL = "model.load_state_dict(trainer.state_dict()); your model is read once, and not changed"
_RATE = "a rate is a function of the step: optim.adamw(optim.warmup_cosine(1e-3, 100, 1000))"
_INSTEAD = {
    **dict.fromkeys(("save", "save_checkpoint", "save_model", "save_state"), _SAVE),
    **dict.fromkeys(("load", "load_checkpoint", "load_state_dict", "resume"), _LOAD),
    **dict.fromkeys(("train", "train_step", "training_step", "backward", "zero_grad"), _STEP),
    **dict.fromkeys(("evaluate", "validate", "test", "predict", "forward"), _EVAL),
    **dict.fromkeys(("model", "module", "unwrap_model"), _MODEL),
    **dict.fromkeys(("lr", "scheduler", "lr_scheduler", "param_groups"), _RATE),
    "optimizer": "trainer.state.opt is its state; the optimizer itself is a function of values",
    "last_step": "nobody has watched that step: with mf.inspection.watch(): trainer.step(batch)",
}


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
        return shards.BUCKET_BYTES
    leaves = {id(x): x for x in tree.flatten(params)[0] if isinstance(x, Tensor)}
    nbytes = sum(x.nbytes for x in leaves.values() if x.is_floating_point())
    return min(shards.BUCKET_BYTES, max(2**20, nbytes // (4 if home.partition_size == 1 else 16)))


def _quarter_of_memory(home: Groups) -> int:
    """A quarter of the memory of the rank that has least; the same number on all ranks."""
    found = _torch.total_memory(home.device)
    if not _torch.is_async(home.device):  # the ranks of a machine share its memory
        found //= home.plan.topology.sizes[-1]
    mine = torch.tensor(found // 4, dtype=torch.int64, device=home.device)
    return min(collect_values(home, mine).values())


_COUNT = "return of how many things the loss of this batch is the mean, such as its valid tokens"
_FUNCTION = "write loss_fn(params, batch), with full tensors as params, and return one number"
_LOSS = "call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
# Names of arguments of losses of torch, and of such as people write.
_OUTPUTS = {"input", "inputs", "out", "output", "outputs", "logits", "pred", "preds", "prediction"}
_OUTPUTS |= {"predictions", "y_hat", "yhat", "y_pred"}
_TARGETS = {"target", "targets", "label", "labels", "y", "y_true", "ground_truth"}


def check_model(model: Any, loss: Any, optimizer: Any, groups: Any, guard: Any) -> None:
    """Raise unless a `Trainer` is given a model, an optimizer and groups, in this order.

    Raises:
      PlanError: the model, the loss or the guard is something else.
      PlanError: the optimizer is none.
      GroupsError: there are no groups.
    """
    if spans.observers:
        spans.passing("build: Trainer")
    verb, fix = "Trainer", "the order is Trainer(model, optimizer, groups, loss=...)"
    if isinstance(model, type):
        name = model.__name__
        checks.refuse(verb, "model", model, "an instance", f"pass {name}(...), not {name}")
    if not isinstance(model, nn.Module):
        expected = "an nn.Module or a function loss_fn(params, batch)"
        if not callable(model):
            checks.refuse(verb, "model", model, expected, fix)
        checks.call(verb, model, "model(params, batch)", _FUNCTION)
    if loss is not None:
        _check_loss(loss)
    if groups is None or isinstance(groups, nn.Module | optim.Transform):
        checks.refuse(verb, "groups", groups, "groups", fix, GroupsError)
    optim.as_transform(optimizer)
    checks.instance(verb, "guard", guard, Guard | None, "a Guard", "make one: optim.Guard(...)")


def _check_loss(loss: Any) -> None:
    """Raise PlanError for a loss of other arguments, such as `loss(output, target)` of torch."""
    call = loss.forward if isinstance(loss, nn.Module) else loss
    checks.call("Trainer", call, "loss(model, batch)", _LOSS)
    names = list(checks.parameters(call))[:2]
    if len(names) == 2 and names[0] in _OUTPUTS and names[1] in _TARGETS:
        name = getattr(loss, "__name__", type(loss).__name__)
        text = f"Trainer: loss={name} takes ({', '.join(names)}), expected loss(model, batch)"
        raise PlanError(text, fix=_LOSS)


def check_options(trainer: Any, schedule: Any, checkpoint: Any) -> None:
    """Raise PlanError unless the options of a `Trainer` are what they should be.

    Args:
      trainer: with its first attributes, named as the options.
      schedule, checkpoint: as they were given. Options of `shard` are checked there.
    """
    verb = "Trainer"
    checks.call(verb, trainer.weight, "weight(batch)", _COUNT)
    checks.integer(verb, "accumulate", trainer.accumulate)
    checks.choice(verb, "on_drift", trainer.on_drift, "raise", "heal")
    if trainer.overlap_step and trainer.recoverable:
        text = "Trainer: overlap_step=True with recoverable=True, which keeps states whole"
        raise PlanError(text, fix="leave one of them out")
    if trainer.overlap_step and trainer.guard == Guard():
        text = "Trainer: overlap_step=True has no effect with a guard that may refuse a step"
        fix = "pass guard=optim.Guard(on_nonfinite='ignore'), or leave overlap_step= out"
        warnings.warn(message(text, fix=fix), stacklevel=4)
    trainer.where = Where.parse(trainer.where)
    fix, kinds = "pass a Schedule, on_demand(...) or keep_all()", Schedule | OnDemand | None
    checks.instance(verb, "schedule", schedule, kinds, "a Schedule or a policy", fix)
    if checkpoint is not None and not hasattr(checkpoint, "begin"):
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
    trainer: Any, own: Any, given: Tree, buffers: Mapping[str, Tensor], options: dict[str, Any]
) -> Tree:
    """The shards to train.

    Args:
      trainer: the `Trainer`, with its groups.
      own: the module's parameters by name; None for a function.
      given: the argument `params`: shards or full tensors; None takes the module's own.
      buffers: of the module, which are on the device of its groups too.
      options: options of `shard`; of those that are None, defaults are taken here.

    Communication: as for `shard`; none if shards are given.

    Raises:
      LeafError: names, shapes or ties of the parameters differ from those of the model.
      LeafError: a parameter has no value, or another dtype or device than the model or its groups;
        or none is trained.
      PlanError: shards were made for other groups or another precision, or an option has no effect.
    """
    groups, home = trainer.groups, trainer.member.home
    for name, value in buffers.items():
        _check_place(f"buffer {name!r}", value, home)
    params = own if given is None else given
    options = {name: value for name, value in options.items() if value is not None}
    leaves, _ = tree.flatten(params, shards.is_leaf)
    if own is not None and given is not None:
        _check_names(own, given)
    if any(map(shards.is_leaf, leaves)):
        _check_shards(params, groups, options.pop("precision", None), options)
        found = params
    else:
        for path, leaf in zip(tree.paths(params, "params", shards.is_leaf), leaves, strict=True):
            _check_place(path, leaf, home)
        if own is not None:
            options.setdefault("order", tree.own_order(own))
        options.setdefault("bucket_bytes", bucket_bytes_for(params, home))
        found = shards.shard(params, groups, **options)
    if not any(isinstance(leaf, shards.Sharded) for leaf in tree.flatten(found, shards.is_leaf)[0]):
        text = "Trainer: no parameter is trained: all are frozen, or there is none"
        raise LeafError(text, fix="leave requires_grad=True on some, and out of frozen=")
    return found


def _check_place(name: str, leaf: Any, home: Any) -> None:
    """Raise LeafError unless a tensor, or a shard, has a value and is on the device of groups."""
    data = leaf if isinstance(leaf, Tensor) else getattr(leaf, "data", None)
    if isinstance(data, Tensor) and data.device != home.device:
        where = "on meta, without a value" if data.is_meta else f"on {data.device}"
        text = f"Trainer: {name} is {where}; its groups are on {home.device}"
        fix = "pass what init_model gives, or move it to the device of its groups first"
        raise LeafError(text, fix=fix)


def _check_names(own: Mapping[str, Tensor], given: Tree) -> None:
    """Raise unless parameters have the names, shapes, kinds of dtypes and ties of the model's."""
    odd = [tree.first_mismatch(dict.fromkeys(own, 0), given, "params", shards.is_leaf)]
    if odd == [""]:
        want, got = _described(own), _described(given)
        pairs = [(name, want[name], got[name]) for name in own]
        odd = [f"params.{name}: expected {x}, got {y}" for name, x, y in pairs if x != y]
    if odd:
        text = "Trainer: params= are not those of the model"
        raise LeafError(text, odd[:1], "pass what init_model or load_shards made for this model")


def _described(values: Mapping[str, Any]) -> dict[str, str]:
    """The shape of each leaf, whether it has floats, and the first leaf that is the same tensor."""
    found, first = dict[str, str](), dict[Any, str]()
    for name, x in sorted(values.items()):
        own = isinstance(x, Tensor)
        key = shards.MemoryPlace.of(x) if own else (x.bucket, getattr(x, "slot", name))
        if x.dtype.is_floating_point:
            owner = first.setdefault(key, name)
            tied = f"tied to {owner!r}" if owner != name else "not tied"
            found[name] = f"floats of {tuple(x.shape)}, {tied}"
        else:
            found[name] = f"{shards.dtype_name(x.dtype)} of {tuple(x.shape)}"
    return found


def _check_shards(
    params: Tree, groups: Any, precision: shards.Precision | None, options: dict[str, Any]
) -> None:
    """Raise unless shards are on their groups' device, have this precision, and need no options."""
    if options:
        text = f"Trainer: {', '.join(f'{name}=' for name in options)}: params= are shards already"
        fix = "give them to what made the shards: shard, init_model or load_shards"
        raise PlanError(text, fix=fix)
    tree.refuse_equal_paths("Trainer", params, "params", shards.is_leaf)
    opened = shards.open_shards("Trainer", params, groups)
    paths = tree.paths(params, "", shards.is_leaf)
    if precision is not None:
        checks.check_matched("Trainer: precision", precision.patterns, paths)
    for leaf, home, path in zip(opened.leaves, opened.homes, paths, strict=True):
        name = tree.join("params", path)
        _check_place(name, leaf, home)
        if precision is None or (bucket := leaf.bucket) is None:
            continue
        own = bucket.dtype if bucket.codes is None else bucket.compute  # of what became codes
        numel = bucket.numels[getattr(leaf, "slot", 0)]
        want = precision.formats(path, own, numel, bucket.trainable)
        if want != bucket.formats:
            lines = [f"expected {want}", f"got {bucket.formats}"]
            text = f"Trainer: {name} was not made with this precision="
            raise PlanError(text, lines, fix="make the shards with the same precision")


class Trainer:
    """Train a model with sharded states, one call per step.

    Args:
      model: an `nn.Module`, which is read once and never changed (its parameters, buffers and tied
        weights are found); or a pure `loss_fn(params, batch) -> scalar`.
      optimizer: a `Transform`, or any object with `init` and `update`.
      groups: as for `shard`, with or without a placement. Buffers and metrics use the first groups
        in it.
      loss: `loss(model, batch) -> scalar`. By default the model is called with the batch (a tuple
        or dict is unpacked), and the loss is its result, or the `.loss` of that.
      weight: `weight(batch) -> count`, of how many things the loss of a micro-batch is the mean,
        such as its tokens that are no padding: a number, or a tensor of one element, for which the
        host does not wait. Gradients, losses and `eval` are then those of the mean over all things
        of all ranks and micro-steps, or of a replica while replicas step on their own. A
        micro-batch of weight 0 counts nothing: its loss may be NaN, and its gradients are zeros. A
        step in which every weight is 0 is refused. By default the weights are equal.
      params: a pytree of tensors, for a `loss_fn`; or the shards that `init_model` gave with this
        skeleton.
      accumulate: the number of micro-steps per step. Every tensor of a batch, and every list of
        strings with one per sample, is cut into so many parts along dim 0.
      precision: a `Precision` or its text. At each call of the model its inputs are cast to
        `compute` and its result to `output`; `loss` gets a stand-in for the model that does this.
      guard: scales the loss, clips gradients, and decides which steps are refused.
      replica_sync: when replicas are merged; by default hop 2 in every step.
      hop2: `hop2(grads, groups) -> grads` in place of hop 2; see `replicas.reduced_by`.
      deterministic: make equal runs give equal bits. In a step torch then uses deterministic
        algorithms, and reductions add up in the order of ranks; see the page of this wing.
      check_replicas: every so many steps replicas are compared bit by bit; 0 for never.
      on_drift: raise DesyncError if they differ, or "heal" as `same_replicas` does.
      recoverable: write each step only once all ranks can, so that those that are left when one is
        killed are at one step; see [Note: steps written together] in `stepping`.
      live_bytes: budget for gathered parameters, as for `on_demand`. "auto" is a quarter of the
        memory of the smallest device, or of a rank's share of the CPU's memory. With None, or if
        all parameters fit, it is as with `keep_all`, until the last backward pass: there gradients
        take the memory of their parameters, once nothing needs these. Gradients on their way lie
        beside the budget: one bucket per level of links and one more, with 0 one bucket alone.
      prefetch: as for `on_demand`.
      schedule: a `Schedule` or a policy, used instead of `live_bytes` and `prefetch`.
      where: where trained leaves, the optimizer's states and sums of gradients live; see `where`.
      overlap_step: step each bucket once its hop 2 is done, while others are still reduced, with
        `guard=optim.Guard(on_nonfinite="ignore")`; see [Note: steps that overlap hop 2] in
        `stepping`.
      replicas, frozen: as for `shard`. These and the next three cannot be given with shards.
      bucket_bytes: as for `shard`; default a sixteenth of the parameters, from 1 to 25 MiB.
      order, bucket: as for `shard`; the default order is the module's own.
      checkpoint: saves this trainer after steps, and lets it go on; see `Checkpoints`.

    Communication: that of `shard` when it is made, and 32 bytes to compare options. In a step each
      bucket is gathered once if all fit the budget, else each time that it is needed again. There
      is one hop 1 per micro-step, one hop 2, and what the guard needs. At the end persistent float
      buffers are averaged over all ranks, or over those of a replica while replicas are
      independent; integer and non-persistent buffers stay as this rank computed them.

    Memory: 1/p of the states. Within a step also `live_bytes` and one bucket of gathered
      parameters, 1/p of the gradients, and a few buckets of them in full. With None these 1/p lie
      in the memory of the parameters if `accumulate` is 1 and they travel in the dtype of the
      shards. Placements keep more.

    Raises:
      LeafError: names, shapes or ties of `params` differ from those of the model.
      LeafError: a parameter or buffer has no value, is on another device than the groups, or
        overlaps with another one in memory.
      PlanError: shards were made for other groups or another precision, or an option is of no use.
      DesyncError: ranks have other options that change numbers; on all of them, by name.

    Example:
      >>> from mics_fn.optim import sgd
      >>> groups = make_groups(1)
      >>> loss = lambda model, x: model(x).square().mean()
      >>> trainer = Trainer(torch.nn.Linear(2, 1), sgd(0.1), groups, loss=loss)
      >>> trainer.step(torch.ones(4, 2)).samples
      4
    """

    ahead: TrainState  # as if the last step was taken, if the host has not looked yet
    sync_state: SyncState
    program: Any
    checkpoint: Any  # a `Checkpoints`, another object with its methods, or None
    on_drift: Literal["raise", "heal"]
    last_step: Watched  # if it was watched

    def __init__(
        self,
        model: nn.Module | Callable[[Tree, Any], Tensor],
        optimizer: Optimizer,
        groups: shards.GroupsTree,
        *,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        weight: Callable[[Any], Tensor | float] | None = None,
        params: Tree = None,
        accumulate: int = 1,
        precision: shards.Precision | str | None = None,
        guard: Guard | None = None,
        replica_sync: ReplicaSync | None = None,
        hop2: Callable[[Tree, Any], Tree] | None = None,
        deterministic: bool = False,
        check_replicas: int = 100,
        on_drift: Literal["raise", "heal"] = "raise",
        recoverable: bool = False,
        live_bytes: float | str | None = "auto",
        prefetch: int = 4,
        schedule: Schedule | OnDemand | None = None,
        where: Where | str | None = None,
        overlap_step: bool = False,
        replicas: Literal["check", "broadcast"] | None = None,
        frozen: Callable[[str], bool] | None = None,
        bucket_bytes: float | str | None = None,
        order: Callable[[str], object] | None = None,
        bucket: Callable[[str], object] | None = None,
        checkpoint: Any = None,  # a `Checkpoints`
    ) -> None:
        check_model(model, loss, optimizer, groups, guard)
        self.accumulate, self.deterministic, self.weight = accumulate, deterministic, weight
        self.recoverable, self.check_replicas, self.on_drift = recoverable, check_replicas, on_drift
        self.where, self.overlap_step = where, overlap_step
        self.precision, self.guard = shards.Precision.parse(precision), guard or Guard()
        self.replica_sync = policy_of(replica_sync, hop2)
        check_options(self, schedule, checkpoint)
        program: Any = ModuleProgram if isinstance(model, nn.Module) else FunctionProgram
        self.program, self.passes = program(model, loss, self.precision), DataPasses()
        own, buffers = self.program.take()
        groups, home = stepping.homes_for(groups, own if params is None else params, deterministic)
        self.groups, independent = cast(Any, groups), self.replica_sync.independent
        self.member = Member(home, compared=independent, lost=home.state.rejoining)
        options: dict[str, Any] = {"replicas": replicas, "order": order}
        options |= {"frozen": frozen, "bucket_bytes": bucket_bytes, "bucket": bucket}
        options["precision"] = None if precision is None else self.precision
        params = as_shards(self, own, params, buffers, options)
        full_bytes = sum(bucket_sizes(params, groups))
        check_compiled(model, loss, full_bytes)
        self.budget, self._given_schedule = (live_bytes, prefetch, full_bytes), schedule
        self.plan_memory()
        params = move(params, self.where, device=home.device)
        self.state = init_state(params, optimizer, buffers=buffers, where=self.where)
        stepping.compare_options(self)
        self.sync_state = self.replica_sync.init(params, self.groups)
        self.checkpoint = checkpoint
        if checkpoint is not None and not self.member.lost:
            checkpoint.begin(self)

    if not TYPE_CHECKING:  # for which there is no other attribute

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                message(f"Trainer has no attribute {name!r}", fix=_INSTEAD.get(name, ""))
            )

    def plan_memory(self) -> None:
        """Set the schedules for its budget; ranks that plan together take the least of "auto"."""
        chosen, self.eval_schedule = schedules_for(*self.budget, self.member.home)
        self.schedule = self._given_schedule or chosen

    def __reduce__(self) -> tuple:
        text = "a Trainer belongs to this process: it cannot be in a pickle or a deep copy"
        fix = "take trainer.state_dict(), or save it with Trainer(checkpoint=Checkpoints(folder))"
        raise GroupsError(text, fix=fix)

    @property
    def state(self) -> TrainState:
        """The state behind the last step, which may be replaced by another one.

        On an accelerator, to read it waits for the verdict on the last step.
        """
        if self.member.masked is not None:
            stepping.finish_step(self)
        return self.ahead

    @state.setter
    def state(self, state: TrainState) -> None:
        self.member.masked, self.ahead = None, state

    @_torch.keeps_grad_mode
    def step(self, batch: Any) -> StepMetrics:
        """One optimizer step.

        Args:
          batch: this rank's samples of the whole step, along dim 0 of tensors, in tuples, lists,
            mappings, dataclasses or pytree nodes.

        Returns:
          `StepMetrics`; the new state is `self.state`.

        Communication: gathers, hop 1 in each micro-step, one hop 2, what the guard needs, and the
          mean of the buffers. The first one compares `state.step` between ranks.

        Raises:
          LeafError: dim 0 of a tensor is not a multiple of `accumulate`, or an object that has to
            be cut or moved cannot be opened.
          LeafError: the loss gave no parameter a gradient on any rank; or it is called inside
            torch.func, where a step has no derivative.
          LostStateError: in the first call, if ranks hold states of different steps.
          DesyncError: replicas have drifted apart; the step was not taken.
          FileError: of a file; a `PeerFileError` on other ranks, here or in the next step.
          LostStateError: a step before this one was cut short while it was written.
          PeerFailed: another rank failed in this step; or this one came back, and is to call
            `reset`.
          GroupsError: the groups are closed, have failed, or another thread or step uses them.
          NonFiniteError: the guard raises it; the step was not taken.
        """
        shards.refuse_derivative("Trainer.step", (), "call it outside of torch.func")
        member, home = self.member, self.member.home
        if member.lost:  # the batch is that of the first step, and the others have come further
            raise rejoin_error("Trainer.step", home.rank)
        seen = spans.span("step", self.ahead.step + 1, parts=True)
        vars(self).pop("last_step", None)
        with home.state.turns.alone(step=True), reports_step(home.state, self.ahead.step + 1), seen:
            metrics = stepping.one_step(self, batch)
            if self.checkpoint is not None:
                self.checkpoint.after(self)
        if seen.result is not None:
            self.last_step = seen.result
        return metrics

    @_torch.keeps_grad_mode
    def eval(self, batch: Any) -> Tensor:
        """The loss of a batch in evaluation mode, averaged over all ranks; no state changes.

        Args:
          batch: this rank's samples.

        Returns:
          0-dim tensor on the device; the mean by weight if there are weights.

        Communication: the gathers of one forward, and 32 bytes over each of the two groups.

        Raises:
          LeafError: it is called inside torch.func, where the result has no derivative.
        """
        shards.refuse_derivative("Trainer.eval", (), "call it outside of torch.func")
        home = self.member.home
        with reports_step(home.state, self.ahead.step), home.state.turns.alone(), torch.no_grad():
            batch = to_device(batch, home.device)
            before = self.program.buffers.copies(self.ahead.buffers)
            # The run ends before the mean over ranks: ranks whose ways differ are told there.
            deferred = defer(self.ahead.params, self.groups, self.eval_schedule)
            with self.program.evaluating(), deferred as full:
                loss, _ = self.program(full, before, batch)
            return stepping.evaluated(self, loss.clone(), batch)

    def params(self) -> Tree:
        """Full parameters as plain tensors, on every rank, for export.

        Returns:
          The tree that was sharded; for a module a dict from name to tensor. While replicas are
          independent they are those of this rank's replica.

        Communication: as for `unshard`.

        Memory: the full parameters, on the device.
        """
        return shards.unshard(self.state.params, self.groups)

    def state_dict(self) -> dict[str, Tensor]:
        """What `model.load_state_dict` takes: full parameters and buffers, as in plain torch.

        It has the names that `model.state_dict()` has, in their order: tied weights under each of
        their names, and no buffer that is not persistent. So `strict=True` accepts it, here and in
        a program without this library. For a model that no rank can hold, write
        `checkpoint.save_pretrained(path, trainer.state.params, groups)` instead.

        Returns:
          A dict from name to tensor, in memory of its own, on every rank. While replicas are
          independent, parameters and buffers are those of this rank's replica: merge them first, or
          take the dict of one rank. Integer buffers, such as the number of batches that a BatchNorm
          has seen, are always those of this rank.

        Communication: as for `unshard`.

        Memory: the full parameters and the buffers, on the device.

        Raises:
          AttributeError: this `Trainer` has a loss function instead of a module.
          LeafError: the module saves something that has no value here.

        Example:
          >>> loss = lambda model, x: model(x).sum()
          >>> model = torch.nn.BatchNorm1d(2)
          >>> trainer = Trainer(model, optim.sgd(0.1), make_groups(1), loss=loss)
          >>> list(trainer.state_dict())
          ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
          >>> model.load_state_dict(trainer.state_dict())
          <All keys matched successfully>
        """
        return self.program.state_dict(self.params, self.state.buffers)

    def reset(self, *, heal: bool = True) -> None:
        """Go on after an error has ended the groups: new ones, all ranks at one step. All call it.

        The state, the guard, when replicas are merged and the epochs of `fit` are kept, and nothing
        of a step that was not completed. A rank that was lost and started again calls it, too, and
        takes all of these from its replicas.

        Args:
          heal: let a rank that is behind, or has come back, take what it lacks from a replica.

        Communication: that of `mics_fn.reset`, and small all-gathers over the partition group and
          over the replication group. To heal, each rank that lacks something receives its part of
          parameters, optimizer state and buffers once, from one rank of its replication group.

        Raises:
          LostStateError: on all ranks, if no replica holds some part of the state of a lost rank:
            all that had it were lost, or replicas are independent, or leaves live on several
            groups. The new groups are good: put a saved `state` in its place, and go on.
          LostStateError: on all ranks, if they are at different steps, and `heal` is false or no
            replica that steps together with the others has all of the newest state.
          DesyncError: a rank came back with other options, another model or other frozen leaves.
          CollectiveError: some rank did not call it in time.
          PeerFailed: the store of the job is lost.
        """
        stepping.renew(self, heal=heal)

    def fit(
        self,
        loader: Iterable[Any],
        steps: int,
        *,
        log_every: int = 10,
        progress: bool = True,
        stop: StopRequest | None = None,
    ) -> list[StepMetrics]:
        """Train for a number of steps; the first rank shows how far it is.

        Args:
          loader: gives this rank's batches, and is started again when it ends. If it or its sampler
            has `set_epoch`, that is called before each pass, so that each has another order. A
            later `fit` goes on with the next epoch; after `take_back` or `reset`, in its pass.
          steps: the number of optimizer steps.
          log_every: steps between updates of the loss and the rate that are shown.
          progress: whether to show a bar; or, where tqdm is not installed, lines. It is written to
            the standard error output.
          stop: with it, a signal ends the loop on all ranks after the same step, in which
            `stop.stopping` becomes true; its metrics are the last ones.

        Returns:
          The metrics of each step.

        Communication: that of the steps.

        Raises:
          PlanError, LeafError: an argument is of no use, or the loader is empty.
        """
        check_fit(loader, steps, log_every, stop)
        shown = log_every if progress and self.member.home.position == 0 else 0
        return train_for(self, loader, steps, shown, stop)
