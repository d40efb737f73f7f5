"""The step of a `Trainer` as a pure function: options, a state and a batch to a state and metrics.

`train_step` is the page of the algorithm: it needs nothing else of a `Trainer`, and the page of
this wing shows how it is called. The state that is given is used up, as by `opt_step(donate=True)`.

A `Program` is a model or a loss function as one call, from full parameters to the loss and its
backward. Modules are read and never changed: parameters are swapped into a copy on meta.

[Note: shared buffers] A buffer that two modules hold is one tensor under two names, so that one
module reads what the other writes. A step begins with one copy for both, even if the state has been
copied tensor by tensor. If a module assigns a new tensor to a name, that name no longer shares
memory, as in any module.

[Note: steps that overlap hop 2] With `overlap_step=True` a bucket is stepped while others are still
reduced, so nothing may have to be known of all gradients before: no guard that has a limit or may
refuse, as the default one does; no mean of buffers; no hop 2 of one's own. A bucket that is written
cannot be taken back, so a step is refused as a whole only if all of it is known: this needs
`Guard(on_nonfinite="ignore")`. It has a price: if a rank fails in just these moments, others have
written a part of their states. `reset` then takes whole ones from replicas; if all had begun to
write, it raises LostStateError: go on from a checkpoint then.

A rank that cannot read its files has not written anything; what is lost in them it takes from a
replica, too.
"""

import math
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mics_fn import _torch, errors, optim, shards, spans
from mics_fn.collectives import levels
from mics_fn.deferred import GradSum, Region, check_loss, defer
from mics_fn.errors import LeafError, PlanError
from mics_fn.groups import Groups
from mics_fn.init import on_meta_copy, refuse_lazy
from mics_fn.offload import Where
from mics_fn.optim import Guard, StepTotals, TrainState, Verdict, opt_step
from mics_fn.schedules import keep_all
from mics_fn.shards import Precision
from mics_fn.train.compiling import name_regions, regions_of
from mics_fn.train.loop import cast_floats, count, cut, to_device
from mics_fn.train.replicas import ReplicaSync, SyncState, every_step
from mics_fn.tree import Tree

AS_GIVEN = Precision()

# The buffers of a module as values: copied at each step, averaged over ranks after it.

Values = dict[str, Tensor]


class ModuleBuffers:
    """Which buffers of a module are averaged, and which names stand for one tensor.

    Args:
      params: the module's parameters by name.
      buffers: the module's buffers by name.
      saved: the module's state dict, whose names tell which buffers are persistent.

    Raises:
      LeafError: a buffer lies in the memory of a parameter, or is another view of a buffer; or it
        is a DTensor.
    """

    def __init__(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], saved: Mapping
    ) -> None:
        for name in filter(lambda name: _torch.is_dtensor(buffers[name]), buffers):
            fix = "make it a frozen parameter, or the same plain tensor in each part"
            raise LeafError(f"Trainer: buffer {name!r} is a DTensor", fix=fix)
        names, self.shared = [*params, *buffers], list[list[str]]()
        tensors = [*params.values(), *buffers.values()]
        for group in shards.overlaps(tensors):
            if group[-1] < len(params):  # tied weights
                continue
            first, *others = (names[i] for i in group)
            places = {(shards.MemoryPlace.of(tensors[i]), tensors[i].dtype) for i in group}
            if group[0] < len(params) or len(places) > 1:
                kind = "parameter" if group[0] < len(params) else "buffer"
                text = f"Trainer: buffer {others[-1]!r} lies in the memory of {kind} {first!r}"
                raise LeafError(text, fix="clone it, or take the view of it in forward")
            self.shared.append([first, *others])
        persistent = {name for name in buffers if name in saved}
        for group in self.shared:
            persistent |= set(group) if persistent & set(group) else set()
        numbers = [k for k, x in buffers.items() if x.is_floating_point() or x.is_complex()]
        self.averaged = [name for name in numbers if name in persistent]

    def copies(self, values: Values) -> Values:
        """Return copies, one for all names of a tensor; see [Note: shared buffers]."""
        found = {name: x.clone() for name, x in values.items()}
        for first, *others in self.shared:
            found |= dict.fromkeys(others, found[first])
        return found

    def replaced(self, names: list[str]) -> None:
        """Take note of names to which modules assigned new tensors."""
        kept = ([name for name in group if name not in names] for group in self.shared)
        self.shared = [group for group in kept if len(group) > 1]

    def average(self, values: Values, home: Groups) -> Values:
        """The values with persistent buffers of floats and complex numbers averaged over ranks.

        Communication: for each dtype one mean of all of them, over each of the two groups.
        """
        if home.world_size == 1 or not self.averaged:
            return values
        for dtype in dict.fromkeys(values[name].dtype for name in self.averaged):
            mine = [name for name in self.averaged if values[name].dtype == dtype]
            mine = {name: _real(values[name]) for name in mine}
            flat = torch.cat([x.flatten() for x in mine.values()])
            means = levels.mean_over_ranks(home, flat).split([x.numel() for x in mine.values()])
            for (name, x), mean in zip(mine.items(), means, strict=True):
                mean = mean.view(x.shape)
                values[name] = torch.view_as_complex(mean) if dtype.is_complex else mean
        return self.copies(values) if self.shared else values


def _real(x: Tensor) -> Tensor:
    """A tensor as real numbers, two for each that is complex."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


# A stand-in for a model, whose calls cast their inputs and outputs as a `Precision` says.


class Casting:
    """Takes the place of a module in a loss: calls are cast, everything else reaches the module.

    The calls of the module itself are cast, those of the methods that its class adds to
    `nn.Module`, and those of its submodules, whether they are reached by name, index or iteration.
    Nothing is cast inside a call. For `isinstance` a stand-in has the class of its module.

    Args:
      module: the module, which also receives assignments to attributes.
      precision: float tensors among the arguments of a call are cast to its `compute`, and those in
        the result to its `output`.

    Example:
      >>> layers = nn.Sequential(nn.Linear(2, 2).bfloat16())
      >>> model = Casting(layers, Precision.parse("compute=bf16"))
      >>> model(torch.ones(1, 2)).dtype, model[0](torch.ones(1, 2)).dtype
      (torch.bfloat16, torch.bfloat16)
      >>> len(model), isinstance(model, nn.Sequential)
      (1, True)
    """

    __slots__ = ("_module", "_precision")

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        # Plain assignments would set attributes of the module.
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_precision", precision)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._cast(self._module)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._stand_in(getattr(self._module, name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value._module if type(value) is Casting else value)

    def __getitem__(self, key: Any) -> Any:
        return self._stand_in(self._module[key])  # pyright: ignore[reportIndexIssue]

    def __iter__(self) -> Iterator[Any]:
        return map(self._stand_in, iter(self._module))  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __len__(self) -> int:
        return len(self._module)  # pyright: ignore[reportArgumentType]

    def _stand_in(self, value: Any, name: str = "") -> Any:
        """The stand-in for a submodule or a method; any other value as it is."""
        if isinstance(value, nn.Module):
            return Casting(value, self._precision)
        added = isinstance(value, MethodType) and not hasattr(nn.Module, name)
        if added or (name == "forward" and callable(value)):
            return self._cast(value)
        return value

    def _cast(self, call: Callable) -> Callable:
        @wraps(call, updated=())  # a module's attributes are not those of its call
        def cast(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = cast_floats((args, kwargs), self._precision.inputs)
            return cast_floats(call(*args, **kwargs), self._precision.output)

        return cast


_PASS_LOSS = "pass loss=, such as lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
Backward = Callable[[Tensor], None]


Result = tuple[Tensor, Values]  # of a call: the loss, 0-dim and detached; the buffers after it


class Program:
    """A module and a `loss(model, batch)`, or a pure `loss_fn(params, batch)`, as one call.

    Args:
      model: a module, which is read once: its parameters and buffers become values, and its
        structure a skeleton on meta. Or a function, which has no buffers and no modes.
      loss: called with the skeleton while the given values are swapped in; None for a function.
      precision: at each call of the skeleton inputs are cast to its `compute`, and outputs to its
        `output`; of a function the batch and the loss.
      compile: a pattern of submodules that become compiled regions, beside those that are compiled.

    Raises:
      LeafError: a function is given with another loss.
    """

    def __init__(
        self,
        model: Any,
        loss: Any = None,
        precision: Precision = AS_GIVEN,
        compile: str | None = None,
    ) -> None:
        self.skeleton: Any = None
        self._values: tuple[Any, Values] = None, {}
        self.regions: list[str] = []
        if not isinstance(model, nn.Module):
            if loss is not None:
                raise LeafError("Trainer: a loss_fn takes no loss=", fix="it gives the loss itself")
            self.buffers, self._swapped_in = ModuleBuffers({}, {}, {}), nullcontext
            if compile is not None:
                fix = "compile the function itself: torch.compile(loss_fn), or mf.compile"
                raise PlanError("Trainer: compile= is of modules, and this is a function", fix=fix)
            plain = _torch.compiled_from(model)
            call = model if plain is None else Region(plain, model)
            self._model, self._loss = None, partial(_cast_loss, call, precision)
            return
        refuse_lazy(model)
        params: Values = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        cut: Any = {name: x for name, x in params.items() if _torch.is_dtensor(x)}
        self._dtensors = {name: (x.device_mesh, x.placements) for name, x in cut.items()}
        own = {name: _torch.local_of(x) for name, x in params.items()}
        self.buffers = ModuleBuffers(own, buffers, model.state_dict(keep_vars=True))
        self.skeleton = on_meta_copy(model, [*params.values(), *buffers.values()])
        if compile is not None:
            name_regions(self.skeleton, compile, {})
        self.regions = regions_of(model, self.skeleton)
        plain = _torch.compiled_from(loss)
        if plain is not None and not isinstance(loss, nn.Module):
            loss, self.regions = Region(plain, loss, self.skeleton), [""]
        if self.regions and self._dtensors:
            fix = "leave compile() out, or cut leaves by make_groups(cut=)"
            raise PlanError(
                "Trainer: compiled regions take no parameters that are DTensors", fix=fix
            )
        self._values = params, self.buffers.copies({k: x.detach() for k, x in buffers.items()})
        self._swapped_in = _torch.SwappedIn(self.skeleton, [*params, *buffers])
        casts = precision.inputs is not None or precision.output is not None
        self._model: Any = Casting(self.skeleton, precision) if casts else self.skeleton
        self._loss = loss or _own_loss

    def __call__(
        self, params: Tree, buffers: Values, batch: Any, backward: Backward | None = None
    ) -> Result:
        """The loss of a batch, after `backward` was called with it while values are swapped in.

        A model that recomputes activations in backward would else do so on meta.
        """
        of_function = self.skeleton is None
        given, name = (params, "the parameters") if of_function else (self._model, "the model")
        params = self._wrapped(params) if not of_function and self._dtensors else params
        values = params if of_function else {**params, **buffers}
        with self._swapped_in(values):
            try:
                loss = self._loss(given, batch)
            except (AttributeError, TypeError) as error:
                text = f"  Trainer called the loss with {name} and a {type(batch).__name__}"
                if self._loss is _own_loss:
                    text = f"  Trainer called the model with parts of the batch; {_PASS_LOSS}"
                error.add_note(text)
                raise
            check_loss("Trainer", loss)
            if backward is not None:
                backward(loss)
        # If a module replaces a buffer instead of writing to it, the new one is in the dict.
        if backward is not None and self.buffers.shared:
            self.buffers.replaced([k for k, x in buffers.items() if values[k] is not x])
        after = {name: values[name].detach() for name in buffers} if buffers else {}
        return loss.detach().reshape(()), after

    def take(self) -> tuple[Values | None, Values]:
        """Parameters and buffers by name, once: nothing here refers to them afterwards."""
        values, self._values = self._values, (None, {})
        return values

    def _wrapped(self, params: Tree) -> Tree:
        """Parameters, of which those are DTensors that were such in the model."""
        return params | {k: _torch.as_dtensor(params[k], *how) for k, how in self._dtensors.items()}

    def state_dict(self, params: Callable[[], Tree], buffers: Values) -> Values:
        """What the module itself gives as its state dict while these values are swapped in.

        Args:
          params: gives full parameters by name, in memory of their own.
          buffers: by name, and still in use: they are copied.

        Raises:
          LeafError: something in it has no value, since the skeleton alone has it.
          AttributeError: there is no module.
        """
        read = self.skeleton.state_dict
        values = {**self._wrapped(params()), **self.buffers.copies(buffers)}
        with self._swapped_in(values):
            found = read()
        for name, value in found.items():
            if isinstance(value, Tensor) and value.is_meta:
                text = f"Trainer.state_dict: the model saves {name!r}, which is neither a parameter"
                fix = "register it as a buffer, or take trainer.params() and state.buffers"
                raise LeafError(f"{text} nor a buffer", fix=fix)
        return found

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A block in evaluation mode; afterwards every module is in its previous mode again."""
        skeleton = nn.Module() if self.skeleton is None else self.skeleton
        modes = {module: module.training for module in skeleton.modules()}
        try:
            skeleton.eval()
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _cast_loss(loss_fn: Callable, precision: Precision, params: Tree, batch: Any) -> Any:
    """The loss of a function, whose batch and result are cast."""
    loss = loss_fn(params, cast_floats(batch, precision.inputs))
    return cast_floats(loss, precision.output)


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The result of the model for a batch, or the `.loss` of that result.

    Raises:
      LeafError: the result is not one number, and has none as its `.loss`.
    """
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = out if isinstance(out, Tensor) else getattr(out, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    text = f"Trainer: the {type(model).__name__} gave {got}, and without loss= that is the loss"
    lines = ["expected one number, or a result whose .loss is one: give the batch its labels"]
    raise LeafError(text, lines, _PASS_LOSS)


# Weights of losses: of how many things each is the mean.


class Weights:
    """The weights of the micro-batches of a step; see [Note: weighted means] in `levels`.

    Args:
      options: the `StepOptions`, which have a weight.
      parts: this rank's micro-batches.

    Communication: 8 bytes over the partition group and over the replication group, under way while
      the first micro-step computes.
    """

    def __init__(self, options: Any, parts: Sequence[Any]) -> None:
        home = options.home.replica if options.replica_sync.independent else options.home
        found = [weight_of(options.weight, part, home.device) for part in parts]
        self._values = torch.stack(found)
        self._mean = levels.start_mean_over_ranks(home, self._values.mean())
        void = self._values == 0
        self.void = list(void) if _torch.is_async(home.device) else void.tolist()

    def factor(self, i: int, loss: Tensor) -> Tensor:
        """What the loss of a micro-step is multiplied by; NaN if all weights of all ranks are 0."""
        factor = self._values[i] / self._mean.wait()
        return factor.to(torch.promote_types(loss.dtype, torch.float32))


def weight_of(weight: Callable[[Any], Any], batch: Any, device: torch.device) -> Tensor:
    """The weight of a batch, 0-dim and float64 on the device; the host does not wait for it.

    Raises:
      LeafError: it is not one number of at least 0.
    """
    found = weight(batch)
    one = isinstance(found, Tensor) and found.numel() == 1 and not found.is_complex()
    if not one and not (isinstance(found, numbers.Real) and 0 <= float(found) < math.inf):
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else found
        text, fix = f"Trainer: weight gave {got!r:.80}", "return one number of at least 0"
        raise LeafError(text, fix=fix)
    one = torch.as_tensor(found).detach().reshape(())
    return one.to(device, torch.float64, non_blocking=True)


def counted(loss: Tensor, void: bool | Tensor) -> Tensor:
    """A loss, or 0 where it counts nothing."""
    return torch.where(torch.as_tensor(void, device=loss.device), 0.0, loss)


# What stays as it is from step to step, what a step changes, and what it reports.


@dataclass(frozen=True)
class StepOptions:
    """Name what stays as it is from step to step.

    Args:
      program: a `Program`.
      groups: as for `shard`.
      home: the first of them, whose ranks share losses and buffers.
      accumulate, weight, replica_sync, where, overlap_step: as for `Trainer`.
      schedule: as for `defer`.
    """

    program: Any
    groups: Any
    home: Groups
    accumulate: int = 1
    weight: Callable[[Any], Tensor | float] | None = None
    replica_sync: ReplicaSync = field(default_factory=every_step)
    schedule: Any = field(default_factory=keep_all)
    where: Where = Where.parse(None)
    overlap_step: bool = False


class RunState(NamedTuple):
    """What a step changes; see `StepOptions` for what it does not."""

    train: TrainState
    sync: SyncState = SyncState(0)
    guard: Guard = Guard()


@dataclass(frozen=True)
class StepMetrics:
    """What a step reports. On an accelerator, to read a number that is no tensor may wait for it.

    Args:
      step: the number of optimizer steps after it.
      loss: 0-dim tensor on the device: the mean over micro-steps and ranks, by weight if there are
        weights.
      samples: samples on all ranks together.
      tokens: elements of the batch's first integer tensor with two or more dims, on all ranks
        together; 0 if there is none.
      seconds: host time of the call.
      grad_norm: 0-dim float64 tensor, the norm of the gradient before clipping; None if the guard
        does not need it, or cannot know it.
      scale: the factor that the loss was multiplied by.
      accepted: whether the step was taken; if not, only the guard has changed.
      spike: whether the norm was a spike.
      nonfinite: as in the guard's `Verdict`: which leaf was not finite, and where that arose. Of
        the first of such steps in a row an accelerator knows neither.
      skipped: how many steps its guard has refused so far.
    """

    step: int
    loss: Tensor
    samples: int
    tokens: int
    seconds: float
    grad_norm: Tensor | None
    scale: float
    accepted: bool
    spike: bool
    nonfinite: str | None
    skipped: int

    @classmethod
    def known_later(cls, rest: Callable[[], Mapping[str, Any]], **known: Any) -> "StepMetrics":
        """Metrics of which some values are asked for when the first of them is read."""
        found = object.__new__(cls)
        vars(found).update(known, rest=rest)
        return found

    if not TYPE_CHECKING:  # for which there is no other attribute

        def __getattr__(self, name: str) -> Any:  # of what is not known yet
            rest = vars(self).pop("rest", None)
            if rest is None:
                raise AttributeError(f"StepMetrics has no attribute {name!r}")
            vars(self).update(rest())
            return getattr(self, name)

    def __reduce__(self) -> Any:
        return StepMetrics, tuple([getattr(self, each.name) for each in fields(self)])


# The step.


class Judged(NamedTuple):
    """All that a rank needs to write a step without any other rank."""

    verdict: Verdict
    buffers: Values  # those after the step
    sync: SyncState  # if it is taken


class Between:
    """Do what a caller, such as a `Trainer`, adds between the parts of a step; here nothing."""

    def block(self) -> None:
        """Hold signals; called before the last gradients are sent."""

    def reduced(self, total: GradSum, state: RunState) -> RunState:
        """Return the state that is stepped, with all gradients on their way."""
        return state

    def masks(self, state: RunState, grads: Any) -> bool:
        """Return whether the step is launched before the host knows if it is taken."""
        return False

    def judged(self, state: RunState, judged: Judged, totals: StepTotals) -> None:
        """Begin to write; from here on no other rank is needed."""

    def written(self, state: RunState, *, merges: bool) -> None:
        """Take the state within the write; `merges` if a merge of replicas is left to do."""


NO_BACKWARD = errors.message(
    "Trainer: the loss called backward(), which Trainer does once the loss is returned",
    fix="return the loss, and leave out backward(), zero_grad() and the optimizer's step()",
)


def train_step(
    options: StepOptions, state: RunState, batch: Any, between: Between | None = None
) -> tuple[RunState, StepMetrics]:
    """Take one optimizer step on a batch, on all ranks together.

    Args:
      options: what stays as it is.
      state: the state before it; given away.
      batch: this rank's samples of the whole step.
      between: what else is done in it.

    Returns:
      The state after it, and what it reports.

    Communication: see `Trainer`.
    """
    between, started, scale = between or Between(), time.perf_counter(), state.guard.scale
    home, sync, weighted = options.home, options.replica_sync, options.weight is not None
    batch = to_device(batch, home.device)
    parts = cut(batch, options.accumulate) if options.accumulate > 1 else [batch]
    where = options.where if "grads" in options.where.moved else None
    total = GradSum(len(parts), where=where)
    total.other_backward, total.before_last = NO_BACKWARD, between.block
    # Gathers, forward and backward; hop 1 of each micro-step, and behind the last one hop 2.
    groups = options.groups
    if sync.independent or sync.reduce is not None:
        groups = sync.groups(groups)
    with defer(state.train.params, groups, options.schedule, into=total) as full:
        losses, buffers = micro_steps(options, state, total, full, parts)
    del full  # else the update would copy shards that parameters share
    between.block()
    state = between.reduced(total, state)
    # One message of 32 bytes: is all finite, how long is the gradient, what is the loss.
    totals = StepTotals(home, losses.mean(dtype=torch.float64), *count(batch), weighted=weighted)
    state, verdict, merges = update(options, state, total, buffers, totals, between)
    if merges:
        state = merge(options, state, between.written)
    total.release()
    known = {"loss": totals.loss.to(losses.dtype), "scale": scale.value}
    known |= {"seconds": time.perf_counter() - started}
    return state, metrics_of(state.train.step, totals, verdict, known)


def micro_steps(
    options: StepOptions, state: RunState, total: GradSum, full: Tree, parts: Sequence[Any]
) -> tuple[Tensor, Values]:
    """Run forward and backward of each micro-step, which begins with the buffers of the last one.

    Args:
      options, state: those of the step; buffers of the state are not written to.
      total: takes the gradients.
      full: deferred parameters.
      parts: the micro-batches.

    Returns:
      The losses of this rank, and the buffers, before their mean over ranks.
    """
    program, losses, buffers = options.program, list[Tensor](), state.train.buffers
    buffers = program.buffers.copies(buffers) if buffers else {}
    weights = None if options.weight is None else Weights(options, parts)
    for i, part in enumerate(parts):

        def backward(loss: Tensor, i: int = i) -> None:
            if weights is not None:
                total.void = weights.void[i]
                loss = loss * weights.factor(i, loss)
            total.backward(state.guard.scale.scale(loss))

        loss, buffers = program(full, buffers, part, backward)
        if weights is not None:
            loss = counted(loss, weights.void[i]) * weights.factor(i, loss)
        losses.append(loss)
    return torch.stack(losses), buffers


@torch.no_grad()
def update(
    options: StepOptions,
    state: RunState,
    total: GradSum,
    buffers: Values,
    totals: StepTotals,
    between: Between,
) -> tuple[RunState, Verdict, bool]:
    """Step on the gradients if the guard accepts them.

    Gradients elsewhere stay there until they are stepped; a step that overlaps still reduces all.

    Args:
      options, state: those of the step.
      total: all micro-steps; given away.
      buffers: as this rank computed them.
      totals: of this step.
      between: what else is done in it.

    Returns:
      The state after it, the verdict, and whether a merge of replicas is left to do.
    """
    sync, early = options.replica_sync, options.overlap_step
    if spans.watchers:  # a step that is refused ends here
        optim.record_memory(state.train)
    with shards.Writing():
        grads, kept, after = total, state.sync, buffers
        if not early and total.placed and sync.reduce is None:
            total.wait()
            shards.grad_stream(total)  # which raises where a step has no gradient
        elif not early:
            grads = total.grads()
        if sync.reduce is not None:
            grads, kept = sync.reduced(grads, kept, options.groups)
        said = None if early else totals  # else that message would wait for every hop 2
        wait = not between.masks(state, grads)
        verdict = state.guard.judge(grads, options.groups, donate=True, wait=wait, totals=said)
        if verdict.accept and options.program.buffers.averaged:
            over = options.home if sync.due(state.sync) else sync.groups(options.home)
            after = options.program.buffers.average(buffers, over)
        judged = Judged(verdict, after, kept)
        between.judged(state, judged, totals)
        written, merges = write(options, state, judged)
        between.written(written, merges=merges)
    if early:
        totals.exchange()
        totals.fetch()
    return written, verdict, merges


@torch.no_grad()
def write(options: StepOptions, state: RunState, judged: Judged) -> tuple[RunState, bool]:
    """Write a step, for which no other rank is needed.

    Args:
      options, state: those of the step.
      judged: what is to be written.

    Returns:
      The state after it, and whether a merge of replicas is left to do.
    """
    (verdict, buffers, kept), sync, train = judged, options.replica_sync, state.train
    if verdict.accept:
        with optim.masked_by(verdict.found_inf):
            stepped = opt_step(train, verdict.grads, donate=True)
        train = replace(stepped, buffers=buffers)
    else:
        kept = state.sync
    merges = sync.independent and sync.due(kept)
    return RunState(train, replace(kept, step=kept.step + 1), verdict.next), merges


@torch.no_grad()
def merge(options: StepOptions, state: RunState, written: Callable) -> RunState:
    """Merge replicas, which is left to do of a step; the state is whole until it is done.

    Communication: that of `ReplicaSync.after`.
    """
    (train, kept, _), sync = state, options.replica_sync
    with shards.Writing():
        params, kept = sync.merged(train.params, kept, options.groups, donate=True)
        state = state._replace(train=replace(train, params=params), sync=kept)
        written(state, merges=False)
    return state


def can_overlap(options: StepOptions, guard: Guard) -> bool:
    """Whether nothing has to be known of all gradients before buckets are stepped.

    The mean of buffers comes before the step, and on the wire behind every hop 2.
    """
    means = bool(options.program.buffers.averaged) and options.home.world_size > 1
    return not (
        guard.decides
        or guard.max_norm is not None
        or means
        or options.replica_sync.reduce is not None
    )


def evaluated(options: StepOptions, loss: Tensor, batch: Any, flag: Tensor | None) -> Tensor:
    """The mean of losses of batches over ranks, by weight if there are weights.

    Args:
      options: of the steps.
      loss: of this rank.
      batch: its samples.
      flag: of before they were computed on; read by the device behind the last collective, it makes
        what an abort has torn no number.

    Communication: that of a `StepTotals`.
    """
    home, dtype = options.home, loss.dtype
    weight = loss.new_ones((), dtype=torch.float64)  # where it is, so that the host need not wait
    if options.weight is not None:
        weight = weight_of(options.weight, batch, home.device)
        loss = counted(loss, weight == 0) * weight
    weighted = options.weight is not None
    totals = StepTotals(home, loss.double(), *count(batch), weighted=weighted)
    total = totals.exchange(weight.to(home.device))
    if not _torch.is_async(home.device):  # there only steps look, which need not wait for it
        totals.warn_of_unequal()
    mean = (totals.loss / total).to(dtype)
    if flag is None:
        return mean
    return mean.masked_fill(flag.to(mean.device, non_blocking=True) != 0, float("nan"))


def metrics_of(
    step: int, totals: StepTotals, verdict: Verdict, known: dict[str, Any]
) -> StepMetrics:
    """The metrics of a step; of a masked one, what the host has to wait for is read later."""
    known |= {"grad_norm": verdict.norm, "spike": verdict.spike}
    masked, skipped = verdict.found_inf is not None, verdict.next.skipped

    def rest() -> dict[str, Any]:
        refused, aborted = totals.outcome() if masked else (False, False)
        _, samples, tokens = totals.of_all
        why = "collectives were aborted" if aborted else "a loss or a gradient is not finite"
        found = {"step": step - refused, "samples": samples, "tokens": tokens}
        found |= {"nonfinite": why if refused else verdict.nonfinite, "skipped": skipped + refused}
        return {**found, "accepted": verdict.accept and not refused}

    if masked:
        return StepMetrics.known_later(rest, **known)
    totals.warn_of_unequal()
    return StepMetrics(**known, **rest())
