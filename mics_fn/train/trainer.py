"""A short stateful loop around the verbs; a hand-written step can do everything that it does.

[Note: steps written together] A rank that is killed in the last collectives of a step may have let
some ranks finish it and others not, and the newest state may then be nowhere in full. With
`FaultPolicy(recoverable=True)` every rank says, before it writes a step, that it has all that it
needs to do so, and writes only once all have said it. If one is killed meanwhile, each of the
others either has written the step or can do so later, on new groups, from what it has kept.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import deterministic as torch_deterministic

from mics_fn import _torch, checks, errors, faults, optim, shards, spans, tree
from mics_fn.collectives import collect_values
from mics_fn.deferred import GradSum, bucket_sizes, defer
from mics_fn.errors import GroupsError, LeafError, PlanError, message
from mics_fn.groups import Groups, current, placement, rejoin_error, reports_step
from mics_fn.inspection import Watched
from mics_fn.offload import Where
from mics_fn.optim import Guard, Optimizer, StepTotals, TrainState, init_state, move
from mics_fn.schedules import OnDemand, Schedule, keep_all, on_demand
from mics_fn.threads import Commit
from mics_fn.train import resuming, stepping
from mics_fn.train.compiling import region_of
from mics_fn.train.loop import DataPasses, count, showing, to_device
from mics_fn.train.replicas import CopiesCheck, ReplicaSync, SyncState, every_step
from mics_fn.train.stepping import Between, Judged, Program, RunState, StepMetrics, StepOptions
from mics_fn.tree import Tree

# What trainers of other libraries have, and what is there instead.

_INSTEAD = {
    "save save_checkpoint save_model save_state": "pass checkpoint=; weights are state_dict()",
    "load load_checkpoint load_state_dict resume": "checkpoint=Checkpoints(folder) goes on",
    "train train_step training_step backward zero_grad": "trainer.step(batch) is a whole step",
    "evaluate validate test predict forward": "trainer.eval(batch) is the loss of a batch",
    "model module unwrap_model": "model.load_state_dict(trainer.state_dict())",
    "lr scheduler lr_scheduler param_groups": "a rate is a function of the step, as warmup_cosine",
    "optimizer": "trainer.state.opt is its state; the optimizer itself is a function of values",
    "last_step": "nobody has watched that step: with mf.inspection.watch(): trainer.step(batch)",
}


# Defaults of `Trainer`: the schedules for its memory budget, and the size of buckets.


def schedules_for(
    live_bytes: float | str | None, full_bytes: int, home: Groups
) -> tuple[OnDemand, OnDemand]:
    """A policy for training, and one for evaluation, which uses parameters in another order."""
    if live_bytes == "auto":
        live_bytes = _quarter_of_memory(home)
    budget = None if live_bytes is None else checks.nbytes("Trainer", "live_bytes", live_bytes)
    if budget is None or budget >= full_bytes:
        return OnDemand(None, 0, at_once=True, lets_go=True), keep_all()
    return on_demand(live_bytes=budget), on_demand(live_bytes=budget)


def _quarter_of_memory(home: Groups) -> int:
    """A quarter of the memory of the rank that has least; the same number on all ranks."""
    found = _torch.total_memory(home.device)
    if not _torch.is_async(home.device):  # the ranks of a machine share its memory
        found //= home.plan.topology.sizes[-1] * len(home.dp_ranks)
    mine = torch.tensor(found // 4, dtype=torch.int64, device=home.device)
    return min(collect_values(home, mine).values())


def bucket_bytes_for(params: Tree, home: Groups) -> int:
    """A size that gives a model several buckets to overlap, each large enough for the network.

    Without gathers fewer do, and the host has less to do.
    """
    if home.world_size == 1:
        return shards.BUCKET_BYTES
    leaves = {id(x): x for x in tree.flatten(params)[0] if isinstance(x, Tensor)}
    nbytes = sum(x.nbytes for x in leaves.values() if x.is_floating_point())
    return min(shards.BUCKET_BYTES, max(2**20, nbytes // (4 if home.partition_size == 1 else 16)))


_COUNT = "return of how many things the loss of this batch is the mean, such as its valid tokens"
_FUNCTION = "write loss_fn(params, batch), with full tensors as params, and return one number"
_LOSS = "call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
# Names of arguments of losses of torch, and of such as people write.
_OUTPUTS = {"input", "inputs", "out", "output", "outputs", "logits", "pred", "preds", "y_pred"}
_TARGETS = {"target", "targets", "label", "labels", "y", "y_true"}


def check_model(model: Any, loss: Any, weight: Any, groups: Any, checkpoint: Any) -> None:
    """Raise unless a `Trainer` is given a model, an optimizer and groups, in this order.

    Raises:
      PlanError: the model, the loss, the weight or the checkpoints are something else; such as a
        loss of other arguments, as those of torch.
      GroupsError: there are no groups.
    """
    verb, fix = "Trainer", "the order is Trainer(model, optimizer, groups, loss=...)"
    if isinstance(model, type) or not (isinstance(model, nn.Module) or callable(model)):
        expected = "an nn.Module or a function loss_fn(params, batch)"
        checks.refuse(verb, "model", model, expected, fix)
    if not isinstance(model, nn.Module):
        checks.call(verb, model, "model(params, batch)", _FUNCTION)
    call = loss.forward if isinstance(loss, nn.Module) else loss
    checks.call(verb, call, "loss(model, batch)", _LOSS)
    names = list(checks.parameters(call))[:2] if call is not None else []
    if len(names) == 2 and names[0] in _OUTPUTS and names[1] in _TARGETS:
        name = getattr(loss, "__name__", type(loss).__name__)
        text = f"Trainer: loss={name} takes ({', '.join(names)}), expected loss(model, batch)"
        raise PlanError(text, fix=_LOSS)
    checks.call(verb, weight, "weight(batch)", _COUNT)
    if groups is None or isinstance(groups, nn.Module | optim.Transform):
        checks.refuse(verb, "groups", groups, "groups", fix, GroupsError)
    kind, fix = resuming.Checkpoints | None, "pass Checkpoints(folder)"
    checks.instance(verb, "checkpoint", checkpoint, kind, "a Checkpoints", fix)


def as_shards(
    groups: Any, home: Groups, own: Any, params: Tree, buffers: Any, options: dict[str, Any]
) -> Tree:
    """The shards to train.

    Args:
      groups: those of the tree.
      home: the first of them.
      own: the module's parameters by name; None for a function.
      params: as for `Trainer`: shards or full tensors; None takes the module's own.
      buffers: of the module, which are on the device of its groups too.
      options: options of `shard`; of those that are None, defaults are taken here.

    Communication: as for `shard`; none if shards are given.

    Raises:
      LeafError: names, shapes or ties of the parameters differ from those of the model.
      LeafError: a parameter has no value, or another dtype or device than the model or its groups;
        or none is trained.
      PlanError: shards were made for other groups or another precision, or an option has no effect.
    """
    options = {name: value for name, value in options.items() if value is not None}
    given, params = params is not None, own if params is None else params
    leaves, _ = tree.flatten(params, shards.is_leaf)
    paths = tree.paths(params, "params", shards.is_leaf)
    named = {f"buffer {name!r}": x for name, x in buffers.items()} | dict(
        zip(paths, leaves, strict=True)
    )
    for name, leaf in named.items():
        data = getattr(leaf, "data", None)
        if isinstance(data, Tensor) and data.device != home.device:
            text = f"Trainer: {name} is on {data.device}; its groups are on {home.device}"
            fix = "pass what init_model gives, or move it to the device of its groups first"
            raise LeafError(text, fix=fix)
    if given and own is not None:
        _check_names(own, params)
    if any(map(shards.is_leaf, leaves)):
        options.pop("bucket", None)
        options.pop("whole", None)  # whether they lie so is checked where a state is made
        _check_shards(params, groups, options.pop("precision", None), options)
    else:
        if own is not None:
            options.setdefault("order", tree.own_order(own))
        options.setdefault("bucket_bytes", bucket_bytes_for(params, home))
        params = shards.shard(params, groups, **options)
        leaves = tree.flatten(params, shards.is_leaf)[0]
    if not any(isinstance(leaf, shards.Sharded) for leaf in leaves):
        text = "Trainer: no parameter is trained: all are frozen, or there is none"
        raise LeafError(text, fix="leave requires_grad=True on some, and out of frozen=")
    return params


def _check_names(own: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
    """Raise unless parameters have the names, shapes, kinds of dtypes and ties of the model's."""
    want, got = _described(own), _described(given)
    for name in {**own, **given}:
        if want.get(name) != got.get(name):
            lines = [f"params.{name}: expected {want.get(name)}, got {got.get(name)}"]
            fix = "pass what init_model or load_shards made for this model"
            raise LeafError("Trainer: params= are not those of the model", lines, fix)


def _described(values: Mapping[str, Any]) -> dict[str, str]:
    """The shape of each leaf, whether it has floats, and the first leaf that is the same tensor."""
    found, first = dict[str, str](), dict[Any, str]()
    for name, x in sorted(values.items()):
        own, kind = isinstance(x, Tensor), shards.dtype_name(x.dtype)
        key = shards.MemoryPlace.of(x) if own else (x.bucket, getattr(x, "slot", name))
        if x.dtype.is_floating_point:
            owner = first.setdefault(key, name)
            kind = "floats" if owner == name else f"floats tied to {owner!r}"
        found[name] = f"{kind} of {tuple(x.shape)}"
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
    for leaf, path in zip(opened.leaves, paths, strict=True):
        bucket = leaf.bucket
        if precision is None or bucket is None:
            continue
        own = bucket.dtype if bucket.codes is None else bucket.compute  # of what became codes
        numel = bucket.numels[getattr(leaf, "slot", 0)]
        want = precision.formats(path, own, numel, bucket.trainable)
        if want != bucket.formats:
            text = f"Trainer: params.{path} was not made with this precision="
            raise PlanError(text, [f"it was made with {bucket.formats}"])


@dataclass(frozen=True)
class FaultPolicy:
    """Decide what a `Trainer` does against faults.

    Args:
      check_replicas: every so many steps replicas are compared bit by bit, and a DesyncError names
        what differs; 0 for never.
      recoverable: write each step only once all ranks can, so that those that are left when one is
        killed are at one step; see [Note: steps written together] in `trainer`.

    Example:
      >>> FaultPolicy().check_replicas
      100
    """

    check_replicas: int = 100
    recoverable: bool = False


# This rank as a member of its job, which may go on with other processes after a fault.


_NOTHING = nullcontext()


class Masked(NamedTuple):
    """A step that a device may not have taken; see [Note: masked steps] in `optim.optimizers`."""

    totals: StepTotals  # they say whether it was
    before: list[Any]  # the leaves of the optimizer's state before it that are no tensors
    sync: SyncState  # before it


@dataclass(eq=False)
class Member:
    """What a `Trainer` knows of its job, besides what it trains; steps and `reset` change it.

    Args:
      compared: whether all ranks are known to be at one step; replicas that are independent need
        not be.
      lost: whether this rank is to take its state from others.
      ready: what is left to do of a step that all ranks can write; None if nothing is.
      merges: whether the last step is written, and the merge of replicas after it is left to do.
      masked: the last step, as long as the host has not looked whether it was taken.
      begun: the same, of a step that is not written yet.
    """

    compared: bool
    lost: bool
    ready: Judged | None = None
    merges: bool = False
    masked: Masked | None = None
    begun: Masked | None = None


class JobStep(Between):
    """Do what a job adds to a step: compare replicas, agree on the write, mask, hold signals.

    Args:
      trainer: the `Trainer`, before the step.
      first: whether it is the first one on these groups.
    """

    def __init__(self, trainer: Any, first: bool) -> None:
        sync, every = trainer.options.replica_sync, trainer.faults.check_replicas
        self.trainer, self.drift, self.commit = trainer, None, Commit()
        self.block, self.written = self.commit.block, trainer._put
        calls, device = trainer.sync_state.step, trainer.options.home.device
        if sync.independent:  # equal after a merge alone, and only in their parameters
            every = -(-every // sync.every) * sync.every
        if every and calls and calls % every == 0:
            names = [] if sync.independent else trainer.program.buffers.averaged
            given = "Trainer", trainer.state, trainer.groups, names
            self.drift = faults.Comparison(*given, moments=not sync.independent)
        self.flag = _torch.abort_flag(device) if _torch.is_async(device) else None
        self.copies = None
        if first and trainer.options.home.model is not None and trainer.faults.check_replicas:
            self.copies = CopiesCheck(trainer.ahead.params, trainer.groups)

    def reduced(self, total: GradSum, state: RunState) -> RunState:
        """Compare replicas if that is due, and look at the last step if it was masked."""
        if self.drift is not None:
            total.wait()
            self.drift.finish()
        if self.copies is not None:
            self.copies.compare()
        check_masked(self.trainer)  # the guard counts steps in a row
        return self.trainer.run

    def masks(self, state: RunState, grads: Any) -> bool:
        """Return whether a step can be launched before the host knows if it is taken.

        Where more than parameters, moments and buffers changes with a step, or a step writes
        without torch's fused kernels, the host waits. See [Note: masked steps] in
        `optim.optimizers`.
        """
        options = self.trainer.options
        sync, recoverable = options.replica_sync, self.trainer.faults.recoverable
        if self.flag is None or recoverable or sync.independent or sync.reduce is not None:
            return False
        leaves = tree.flatten(state.train.params, shards.is_leaf)[0]
        buckets = [getattr(x, "bucket", None) for x in leaves]
        coded = any(x is not None and (x.state or x.codes) for x in buckets)
        more = options.where.moved & {"params", "states"} or isinstance(grads, GradSum)
        return state.train.transform.masked and not (coded or more)

    def judged(self, state: RunState, judged: Judged, totals: StepTotals) -> None:
        """Mask the step, or agree that all ranks can write it; no collective is left then."""
        found_inf, member, home = judged.verdict.found_inf, self.trainer.member, totals.home
        member.begun = None
        if found_inf is not None:
            totals.flag = self.flag
            totals.fetch(found_inf)
            counts = [x for x in tree.flatten(state.train.opt)[0] if not isinstance(x, Tensor)]
            member.begun = Masked(totals, counts, state.sync)
            for name, new in judged.buffers.items():
                before = state.train.buffers[name]
                if new.shape == before.shape:
                    new.copy_(torch.where(found_inf > 0, before, new))
        if self.trainer.faults.recoverable:  # see [Note: steps written together]
            member.ready = judged
            collect_values(home, torch.zeros(1, dtype=torch.int64, device=home.device))
            member.ready = None  # from here on a part of it may be written
        self.commit.write()


def check_masked(trainer: Any) -> None:
    """Look whether the last step, if it was masked, was taken, and take its counts back if not.

    The host waits for it. If a rank is lost, that ends when collectives are aborted.
    """
    masked, state, guard = trainer.member.masked, trainer.ahead, trainer.guard
    if masked is None:
        return
    refused, aborted = masked.totals.outcome()
    if aborted:  # the step is to be made again, with the same batch
        trainer.sync_state = masked.sync
    else:
        masked.totals.warn_of_unequal()
    if refused:
        leaves, spec = tree.flatten(state.opt)
        before = iter(masked.before)
        leaves = [x if isinstance(x, Tensor) else next(before) for x in leaves]
        state = replace(state, step=state.step - 1, opt=spec.unflatten(leaves))
        more = 0 if aborted else 1
        guard = replace(guard, in_row=guard.in_row + more, skipped=guard.skipped + more)
    trainer.ahead, trainer.guard, trainer.member.masked = state, guard, None


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let torch take algorithms that give equal bits.

    Its mode would also write to all new memory, to reveal code that reads it too early.
    """
    cudnn: Any = torch.backends.cudnn
    own: Any = torch_deterministic
    mode = torch.get_deterministic_debug_mode()
    before = cudnn.benchmark, own.fill_uninitialized_memory
    try:
        torch.set_deterministic_debug_mode("error")
        cudnn.benchmark = own.fill_uninitialized_memory = False
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.benchmark, own.fill_uninitialized_memory = before


def homes_for(groups: Any, params: Tree, deterministic: bool) -> tuple[Any, Groups]:
    """The groups of a tree, in a fixed order if `deterministic`; and those of most ranks."""
    homes = [x.origin for x in shards.homes_of("Trainer", groups, params, "params", Groups)]
    if callable(groups):
        groups = tree.flatten(params, shards.is_leaf)[1].unflatten(homes)
    groups = tree.map_leaves(current, groups)
    if deterministic:
        new = {home: placement.fixed_order(home) for home in dict.fromkeys(homes)}
        groups, homes = tree.map_leaves(new.get, groups), [new[home] for home in homes]
    return groups, max(homes, key=lambda home: home.world_size) if homes else groups


class Trainer:
    """Train a model with sharded states, one call per step.

    Args:
      model: an `nn.Module`, which is read once and never changed (its parameters, buffers and tied
        weights are found); or a pure `loss_fn(params, batch) -> scalar`.
      optimizer: a `Transform`, or any object with `init` and `update`.
      groups: as for `shard`, with or without a placement. Buffers and metrics use those of most
        ranks in it.
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
      replica_sync: when replicas are merged; by default hop 2 in every step. With
        `replicas.reduced_by(f)` that is a function of your own.
      deterministic: make equal runs give equal bits. In a step torch then uses deterministic
        algorithms, and reductions add up in the order of ranks; see the page of this wing.
      live_bytes: budget for gathered parameters, as for `on_demand`. "auto" is a quarter of the
        memory of the smallest device, or of a rank's share of the CPU's memory. With None, or if
        all parameters fit, it is as with `keep_all`, until the last backward pass: there gradients
        take the memory of their parameters, once nothing needs these. Gradients on their way lie
        beside the budget: one bucket per level of links and one more, with 0 one bucket alone.
      schedule: a `Schedule` or a policy, used instead of `live_bytes`, such as
        `on_demand(live_bytes=0, prefetch=2)`.
      where: where trained leaves, the optimizer's states and sums of gradients live; see `where`.
      overlap_step: step each bucket once its hop 2 is done, while others are still reduced, with
        `guard=optim.Guard(on_nonfinite="ignore")`; see [Note: steps that overlap hop 2] in
        `stepping`.
      frozen: as for `shard`; this and the next one cannot be given with shards.
      bucket_bytes: as for `shard`; default a sixteenth of the parameters, from 1 to 25 MiB. For its
        other options call `shard`, and pass `params=`.
      compile: a pattern of submodules, such as "blocks.*", that become regions of `torch.compile`
        beside those that were compiled in `model`; for options see `compile_blocks`. While one is
        computed all of its parameters are gathered, and buckets end where regions do.
      checkpoint: saves this trainer after steps, and lets it go on; see `Checkpoints`.
      faults: how replicas are compared, and steps written; see `FaultPolicy`.

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
    checkpoint: Any  # a `Checkpoints`, or None
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
        deterministic: bool = False,
        live_bytes: float | str | None = "auto",
        schedule: Schedule | OnDemand | None = None,
        where: Where | str | None = None,
        overlap_step: bool = False,
        frozen: Callable[[str], bool] | None = None,
        bucket_bytes: float | str | None = None,
        compile: str | None = None,
        checkpoint: resuming.Checkpoints | None = None,
        faults: FaultPolicy | None = None,
    ) -> None:
        if spans.observers:
            spans.passing("build: Trainer")
        check_model(model, loss, weight, groups, checkpoint)
        self.precision, place = shards.Precision.parse(precision), Where.parse(where)
        self.program = Program(model, loss, self.precision, compile)
        self.passes = DataPasses()
        own, buffers = self.program.take()
        groups, home = homes_for(groups, own if params is None else params, deterministic)
        sync = replica_sync or every_step()
        self.member = Member(compared=sync.independent, lost=home.state.rejoining)
        given = None if precision is None else self.precision
        options = {"frozen": frozen, "bucket_bytes": bucket_bytes, "precision": given}
        options["whole"] = whole = getattr(optimizer, "whole", None)
        if names := self.program.regions:  # buckets end where regions do
            options["bucket"] = lambda path: whole and whole(path) or region_of(names, path)
        params = as_shards(groups, home, own, params, buffers, options)
        full_bytes = sum(bucket_sizes(params, groups))
        params = move(params, place, device=home.device)
        self.state = init_state(params, optimizer, buffers=buffers, where=place)
        self.guard, self.deterministic = guard or Guard(), deterministic
        self.faults, self.checkpoint = faults or FaultPolicy(), checkpoint
        self.budget, self._given = (live_bytes, full_bytes), schedule
        self.options = StepOptions(
            self.program, groups, home, accumulate, weight, sync, schedule, place, overlap_step
        )
        self.plan_memory()
        more = self.faults.recoverable or not stepping.can_overlap(self.options, self.guard)
        if overlap_step and more:
            text = "Trainer: overlap_step=True writes a step before all is known that is asked for"
            raise PlanError(text, fix="pass optim.Guard(on_nonfinite='ignore') and nothing else")
        resuming.compare_options(self)
        self.sync_state = sync.init(params, self.groups)
        if checkpoint is not None and not self.member.lost:
            checkpoint.begin(self)

    if not TYPE_CHECKING:  # for which there is no other attribute

        def __getattr__(self, name: str) -> Any:
            fix = next((_INSTEAD[names] for names in _INSTEAD if name in names.split()), "")
            raise AttributeError(message(f"Trainer has no attribute {name!r}", fix=fix))

    @property
    def groups(self) -> Any:
        """The groups that it trains on, in the form in which they were given."""
        return self.options.groups

    @property
    def schedule(self) -> Any:
        """The schedule or the policy of its gathers."""
        return self.options.schedule

    @property
    def run(self) -> RunState:
        """All that a step changes."""
        return RunState(self.ahead, self.sync_state, self.guard)

    def _put(self, run: RunState, *, merges: bool = False) -> None:
        """Put what a step has changed in its place."""
        member = self.member
        # Between these nothing can interrupt; see [Note: between two instructions] in `threads`.
        self.ahead, self.sync_state, self.guard = run
        member.merges, member.masked, member.begun = merges, member.begun, None

    def _merge(self) -> None:
        """Merge replicas, which is left to do of the last step."""
        stepping.merge(self.options, self.run, self._put)

    def plan_memory(self) -> None:
        """Set the schedules for its budget; ranks that plan together take the least of "auto"."""
        chosen, self.eval_schedule = schedules_for(*self.budget, self.options.home)
        self.options = replace(self.options, schedule=self._given or chosen)

    @property
    def state(self) -> TrainState:
        """The state behind the last step, which may be replaced by another one.

        On an accelerator, to read it waits for the verdict on the last step.
        """
        check_masked(self)
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
        member, home = self.member, self.options.home
        if member.lost:  # the batch is that of the first step, and the others have come further
            raise rejoin_error("Trainer.step", home.rank)
        seen = spans.span("step", self.ahead.step + 1, parts=True)
        vars(self).pop("last_step", None)
        with home.state.turns.alone(step=True), reports_step(home.state, self.ahead.step + 1), seen:
            home.partition.check_open()  # a state may be lost because they have failed
            if member.merges:  # as that of the last step was cut short
                self._merge()
            first = not member.compared
            if first:  # a state may have been put in its place since
                faults.same_step(self.ahead, self.groups)
                member.compared = True
            member.ready = None
            if spans.observers:
                spans.passing("step", self.state.step + 1)
            job = JobStep(self, first)
            try:
                torch.set_grad_enabled(True)
                exact = _deterministic() if self.deterministic else _NOTHING
                with job.commit, job.copies or _NOTHING, exact:
                    _, metrics = stepping.train_step(self.options, self.run, batch, job)
            except BaseException as error:
                # Of this library it is raised before the last message of the step, or on all ranks.
                if (
                    job.commit.began
                    and len(home.state.ranks) > 1
                    and not isinstance(error, errors.MicsError)
                ):
                    home.state.finish(error)  # so that `reset` compares
                raise
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

        Communication: the gathers of one forward, and 32 bytes over each of the two groups. On an
          accelerator whose collectives are aborted meanwhile the loss is not a number.

        Raises:
          LeafError: it is called inside torch.func, where the result has no derivative.
        """
        shards.refuse_derivative("Trainer.eval", (), "call it outside of torch.func")
        home = self.options.home
        with reports_step(home.state, self.ahead.step), home.state.turns.alone(), torch.no_grad():
            batch = to_device(batch, home.device)
            flag = _torch.abort_flag(home.device) if _torch.is_async(home.device) else None
            before = self.program.buffers.copies(self.ahead.buffers)
            # The run ends before the mean over ranks: ranks whose ways differ are told there.
            deferred = defer(self.ahead.params, self.groups, self.eval_schedule)
            with self.program.evaluating(), deferred as full:
                loss, _ = self.program(full, before, batch)
            return stepping.evaluated(self.options, loss.clone(), batch, flag)

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
        resuming.renew(self, heal=heal)

    def fit(
        self,
        loader: Iterable[Any],
        steps: int,
        *,
        log_every: int = 10,
        progress: bool = True,
        stop: faults.StopRequest | None = None,
    ) -> list[StepMetrics]:
        """Train for a number of steps; the first rank shows how far it is.

        Args:
          loader: gives this rank's batches, and is started again when it ends. If it or its sampler
            has `set_epoch`, that is called before each pass, so that each has another order. A
            later `fit` goes on with the next epoch; after a resume or `reset`, in its pass.
          steps: the number of optimizer steps.
          log_every: steps between updates of what is shown.
          progress: whether to show a bar; or, where tqdm is not installed, lines. It is written to
            the standard error output.
          stop: with it, a signal ends the loop on all ranks after the same step, in which
            `stop.stopping` becomes true; its metrics are the last ones.

        Returns:
          The metrics of each step.

        Communication: that of the steps.

        Raises:
          PlanError, LeafError: the loader gives no batches, or none in a pass.
        """
        metrics, home, passes = list[StepMetrics](), self.options.home, self.passes
        every = log_every if progress and home.rank == home.state.ranks[0] else 0
        with (
            reports_step(home.state, self.state.step + 1),  # of the loader, or of what is shown
            closing(passes.batches(loader, home.device, home.world_size)) as batches,
            showing(steps, every) as show,
        ):
            for _ in range(steps):
                batch = next(batches)
                passes.give(home.world_size * count(batch)[0], self.sync_state.step)
                metrics.append(self.step(batch))
                show(metrics)
                if stop is not None and stop.due():
                    if self.checkpoint is not None:
                        self.checkpoint.save(self)
                    break
            passes.interrupted = False
        if self.checkpoint is not None:
            self.checkpoint.close()
        return metrics
