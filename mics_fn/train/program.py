"""A model or a loss function as one call, from full parameters to the loss and its backward.

Modules are read and never changed: parameters are swapped into a copy on meta.

[Note: shared buffers] A buffer that two modules hold is one tensor under two names, so that one
module reads what the other writes. A step begins with one copy for both, even if the state has been
copied tensor by tensor. If a module assigns a new tensor to a name, that name no longer shares
memory, as in any module.
"""

import copy
import dataclasses
import enum
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from operator import getitem, is_, setitem
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from mics_fn import _torch
from mics_fn.collectives import levels
from mics_fn.deferred import check_loss
from mics_fn.errors import LeafError
from mics_fn.groups import Groups
from mics_fn.init import on_meta_copy, refuse_lazy
from mics_fn.shards import MemoryPlace, Precision, overlaps
from mics_fn.tree import Tree

AS_GIVEN = Precision()

# Contents of batches, and of the arguments and results of models. Trees of parameters are the
# pytrees of `mics_fn.tree`; these come in those of torch, whose dicts keep their order, and in
# other mappings, lists and dataclasses.

# Kinds of values that hold no tensor and mean the same for any part of a batch.
PLAIN = (type(None), numbers.Number, str, bytes, enum.Enum, os.PathLike, range, slice, type)
PLAIN += (torch.dtype, torch.device, torch.layout, torch.Size, torch.Generator)
PLAIN += (FunctionType, BuiltinFunctionType, MethodType)
_CLOSED = (Tensor, *PLAIN, nn.Module, PackedSequence)


def map_contents(fn: Callable[[Any], Any], value: Any, is_leaf: Any = None) -> Any:
    """Apply `fn` to everything that a value holds.

    Args:
      fn: called with each tensor and each object that cannot be opened.
      value: anything.
      is_leaf: says which containers are not to be opened.

    Returns:
      The value with the results in it, or the same object if `fn` changed nothing.

    Example:
      >>> map_contents(lambda x: x + 1, {"b": [0, 1], "a": 2})
      {'b': [1, 2], 'a': 3}
    """

    def closed(x: Any) -> bool:
        return isinstance(x, _CLOSED) or (is_leaf is not None and is_leaf(x))

    leaves, spec = _torch.flatten(value, closed)
    new = [fn(x) if closed(x) else _map_others(fn, x, is_leaf) for x in leaves]
    return value if all(map(is_, new, leaves)) else _torch.unflatten(new, spec)


def _map_others(fn: Callable[[Any], Any], value: Any, is_leaf: Any) -> Any:
    """Do the same with a list, mapping or dataclass that torch does not open, or another object."""
    get: Any = getitem
    put: Any = setitem
    if isinstance(value, list | Mapping):
        names = list(value) if isinstance(value, Mapping) else range(len(value))
    elif dataclasses.is_dataclass(value):
        get, put = getattr, object.__setattr__
        names: Any = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    else:
        return fn(value)
    old = {name: get(value, name) for name in names}
    new = {name: map_contents(fn, x, is_leaf) for name, x in old.items()}
    if all(map(is_, new.values(), old.values())):
        return value
    made = copy.copy(value)
    for name, x in new.items():
        put(made, name, x)
    return made


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """A value with its float tensors in a dtype; the same object if nothing changes."""

    def one(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return value if dtype is None else map_contents(one, value)


# Batches: moved to the device, cut into micro-batches, counted.


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device.

    Raises:
      LeafError: it is None, or what gives batches; or it holds no sample, whose mean would be NaN.
      AttributeError: it holds an object that cannot be opened and has no `.to` of its own.
    """
    if batch is None:
        fix = "return a batch from what makes them, such as the collate_fn of a DataLoader"
        raise LeafError("Trainer: the batch is None", fix=fix)
    if isinstance(batch, DataLoader | Iterator):
        text = f"Trainer: the batch is a {type(batch).__name__}, which gives batches"
        fix = "pass it to trainer.fit(loader, steps), or pass one of its batches"
        raise LeafError(text, fix=fix)
    rows: list[int] = []

    def moved(x: Any) -> Any:
        if isinstance(x, Tensor):
            rows.extend(x.shape[:1])
            return x.to(device, non_blocking=True)
        if device.type == "cpu" or isinstance(x, PLAIN) or type(x).__module__ == "numpy":
            return x
        return x.to(device)

    found = map_contents(moved, batch)
    if (rows and not any(rows)) or (isinstance(batch, list | tuple | dict) and not batch):
        fix = "give each rank a sample in each step, as DataLoader(..., drop_last=True) does"
        raise LeafError("Trainer: the batch has no sample", fix=fix)
    return found


def cut(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into equal micro-batches along dim 0.

    Lists of strings with one string per sample, as torch's loader makes them, are cut as well.
    Anything else that holds no tensor goes to each micro-batch.

    Raises:
      LeafError: a tensor's dim 0 is not a multiple of `parts`, or an object cannot be opened.
    """
    samples, _ = count(batch)

    def texts(x: Any) -> bool:
        fits = type(x) in (list, tuple) and len(x) == samples
        return fits and all(isinstance(each, str | bytes) for each in x)

    def part(i: int, x: Any) -> Any:
        if texts(x):
            n = samples // parts
            return x[i * n : (i + 1) * n]
        if not isinstance(x, (Tensor, *PLAIN)):
            text = f"Trainer.step: a {type(x).__name__} in the batch cannot be cut in {parts}"
            fix = "use tensors in tuples, lists, mappings and dataclasses, or accumulate=1"
            raise LeafError(text, fix=fix)
        if not isinstance(x, Tensor):
            return x
        if x.ndim == 0 or x.shape[0] % parts:
            text = f"Trainer.step: a batch has shape {tuple(x.shape)}, accumulate={parts}"
            raise LeafError(text, fix="make dim 0 a multiple of accumulate")
        return x.chunk(parts)[i]

    return [map_contents(partial(part, i), batch, texts) for i in range(parts)]


def count(batch: Any) -> tuple[int, int]:
    """The number of samples and of tokens in a batch; see `StepMetrics`."""
    found: list[Tensor] = []

    def note(x: Any) -> Any:
        if isinstance(x, Tensor) and x.ndim:
            found.append(x)
        return x

    map_contents(note, batch)
    tokens = (x.numel() for x in found if x.ndim > 1 and not x.is_floating_point())
    return found[0].shape[0] if found else 1, next(tokens, 0)


# The buffers of a module as values: copied at each step, averaged over ranks after it.

Values = dict[str, Tensor]


class ModuleBuffers:
    """Which buffers of a module are averaged, and which names stand for one tensor.

    Args:
      params: the module's parameters by name.
      buffers: the module's buffers by name.
      saved: the module's state dict, whose names tell which buffers are persistent.

    Raises:
      LeafError: a buffer lies in the memory of a parameter, or is another view of a buffer.
    """

    def __init__(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], saved: Mapping
    ) -> None:
        names, self.shared = [*params, *buffers], list[list[str]]()
        tensors = [*params.values(), *buffers.values()]
        for group in overlaps(tensors):
            if group[-1] < len(params):  # tied weights
                continue
            first, *others = (names[i] for i in group)
            places = {(MemoryPlace.of(tensors[i]), tensors[i].dtype) for i in group}
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

    Raises:
      LeafError: a function is given with another loss.
    """

    def __init__(self, model: Any, loss: Any = None, precision: Precision = AS_GIVEN) -> None:
        self.skeleton: Any = None
        self._values: tuple[Any, Values] = None, {}
        if not isinstance(model, nn.Module):
            if loss is not None:
                raise LeafError("Trainer: a loss_fn takes no loss=", fix="it gives the loss itself")
            self.buffers, self._swapped_in = ModuleBuffers({}, {}, {}), nullcontext
            self._model, self._loss = None, partial(_cast_loss, model, precision)
            return
        refuse_lazy(model)
        params: Values = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        self.buffers = ModuleBuffers(params, buffers, model.state_dict(keep_vars=True))
        self.skeleton = on_meta_copy(model, [*params.values(), *buffers.values()])
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
        values = params if of_function else {**params, **buffers}
        with self._swapped_in(values):
            try:
                loss = self._loss(params if of_function else self._model, batch)
            except (AttributeError, TypeError) as error:
                given = "the parameters" if of_function else f"the {type(self.skeleton).__name__}"
                text = f"  Trainer called the loss with {given} and a {type(batch).__name__}"
                if self._loss is _own_loss:
                    text = f"  Trainer called {given} with the parts of the batch; {_PASS_LOSS}"
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
        values = {**params(), **self.buffers.copies(buffers)}
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
        modules = () if self.skeleton is None else tuple(self.skeleton.modules())
        modes = {module: module.training for module in modules}
        try:
            for module in modules[:1]:
                module.eval()
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
