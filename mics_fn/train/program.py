"""A model or a loss function as one call, from full parameters to the loss and its backward.

Modules are read and never changed: `functional_call` swaps parameters into a copy on meta.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from mics_fn import checks, points
from mics_fn.deferred import check_loss
from mics_fn.errors import LeafError, TreeError, message
from mics_fn.init import on_meta_copy, refuse_lazy
from mics_fn.shards import Precision
from mics_fn.train.buffers import ModuleBuffers, Values
from mics_fn.train.casting import Casting
from mics_fn.tree import Tree

_PASS_LOSS = "pass loss=, such as lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
_NAMED = "name the arguments of forward in the batch, or pass loss=: it is given (model, batch)"
Backward = Callable[[Tensor], None]


class Result(NamedTuple):
    """What a call of a program gives."""

    loss: Tensor  # 0-dim, detached
    buffers: Values  # those after the call


class FunctionProgram:
    """A pure `loss_fn(params, batch)`, which has no buffers and no modes.

    Args:
      loss_fn: the function.
      precision: the batch is cast to its `compute`, the loss to its `output`.
    """

    def __init__(self, loss_fn: Callable[[Tree, Any], Tensor], precision: Precision) -> None:
        self.loss_fn, self.precision = loss_fn, precision
        self.buffers = ModuleBuffers({}, {}, {})

    def __call__(
        self, params: Tree, buffers: Values, batch: Any, backward: Backward | None = None
    ) -> Result:
        """The loss of a batch, after `backward` was called with it."""
        loss = self.loss_fn(params, self.precision.cast_inputs(batch))
        return Result(_finished(self.precision.cast_output(loss), backward), buffers)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A block in evaluation mode, which a function does not have."""
        yield

    def state_dict(self, params: Callable[[], Tree], buffers: Values) -> Values:
        """Raise TreeError: the parameters of a function have no names of a module."""
        text = "Trainer.state_dict: a loss_fn has no module whose names these could be"
        raise TreeError(message(text, fix="use trainer.params(), which has the form of params="))

    def take(self) -> tuple[None, Values]:
        """Parameters and buffers, of which a function has none of its own."""
        return None, {}


class ModuleProgram:
    """A module and a `loss(model, batch)`.

    Args:
      model: read once. Its parameters and buffers become values, and its structure a skeleton on
        meta.
      loss: called with the skeleton while the given values are swapped in.
      precision: at each call of the skeleton inputs are cast to its `compute`, and outputs to its
        `output`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor] | None,
        precision: Precision,
    ) -> None:
        refuse_lazy(model)
        params: Values = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        self.buffers = ModuleBuffers(params, buffers, model.state_dict(keep_vars=True))
        self.skeleton = on_meta_copy(model, [*params.values(), *buffers.values()])
        self._values = params, self.buffers.copies({k: x.detach() for k, x in buffers.items()})
        self._step = _Step(self.skeleton, loss or _own_loss, precision)

    def __call__(
        self, params: Tree, buffers: Values, batch: Any, backward: Backward | None = None
    ) -> Result:
        """The loss of a batch, after `backward` was called with it inside the swap."""
        given = {f"model.{name}": value for name, value in {**params, **buffers}.items()}
        # All names are given. strict=True would check that by walking the module at every call.
        loss = functional_call(self._step, given, (batch, backward), tie_weights=False)
        # If a module replaces a buffer instead of writing to it, the new one is in the dict.
        if backward is not None and self.buffers.shared:
            self.buffers.replaced([k for k, x in buffers.items() if given[f"model.{k}"] is not x])
        return Result(loss, {k: given[f"model.{k}"].detach() for k in buffers})

    def take(self) -> tuple[Values, Values]:
        """Parameters and buffers by name, once: nothing here refers to them afterwards."""
        values, self._values = self._values, ({}, {})
        return values

    def state_dict(self, params: Callable[[], Tree], buffers: Values) -> Values:
        """What the module itself gives as its state dict while these values are swapped in.

        Args:
          params: gives full parameters by name, in memory of their own.
          buffers: by name, and still in use: they are copied.

        Raises:
          LeafError: something in it has no value, since the skeleton alone has it.
        """
        values = {**params(), **self.buffers.copies(buffers)}
        given = {f"model.{name}": value for name, value in values.items()}
        found = functional_call(_Saved(self.skeleton), given, (), tie_weights=False)
        for name, value in found.items():
            if isinstance(value, Tensor) and value.is_meta:
                text = f"Trainer.state_dict: the model saves {name!r}, which is neither a parameter"
                fix = "register it as a buffer, or take trainer.params() and state.buffers"
                raise LeafError(message(f"{text} nor a buffer", fix=fix))
        return found

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A block in evaluation mode; afterwards every module is in its previous mode again."""
        modes = [(module, module.training) for module in self.skeleton.modules()]
        try:
            self.skeleton.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


class _Step(nn.Module):
    """Model, loss and backward as one module, so that backward runs while values are swapped in.

    Otherwise a model that recomputes activations in backward would do so on meta.
    """

    def __init__(
        self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], precision: Precision
    ) -> None:
        super().__init__()
        self.model, self.loss, self.precision = model, loss, precision

    def forward(self, batch: Any, backward: Backward | None) -> Tensor:
        model: Any = self.model
        if self.precision.casts:
            model = Casting(model, self.precision)
        try:
            loss = self.loss(model, batch)
        except (AttributeError, TypeError) as error:
            _say_how_called(error, self.model, batch)
            raise
        return _finished(loss, backward)


class _Saved(nn.Module):
    """The state dict of a model as a call, so that it is taken while values are swapped in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Values:
        return self.model.state_dict()


def program_of(
    model: nn.Module | Callable[[Tree, Any], Tensor],
    loss: Callable[[nn.Module, Any], Tensor] | None,
    params: Tree,
    precision: Precision,
) -> ModuleProgram | FunctionProgram:
    """The program of a model with its loss, or of a loss function.

    Raises:
      TreeError: a loss function comes without `params`, or with another `loss`.
    """
    if points.observers:
        points.passing("build: Trainer")
    if isinstance(model, nn.Module):
        return ModuleProgram(model, loss, precision)
    if params is None or loss is not None:
        text = "needs params=" if params is None else "takes no loss="
        fix = "pass the pytree that it is called with; it gives the loss itself"
        raise TreeError(message(f"Trainer: a loss_fn {text}", fix=fix))
    return FunctionProgram(model, precision)


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The result of the model for a batch, or the `.loss` of that result.

    Raises:
      TreeError: the model does not take the parts of the batch as its arguments.
      LeafError: the result is not one number, and has none as its `.loss`.
    """
    named = isinstance(batch, Mapping)
    args = () if named else batch if isinstance(batch, tuple | list) else (batch,)
    kwargs = dict(batch) if named else {}
    try:
        out = model(*args, **kwargs)
    except TypeError as error:
        if (why := checks.misfit(model.forward, args, kwargs)) is None:
            raise  # from inside of the model
        given = ", ".join([*(type(x).__name__ for x in args), *(f"{key}=" for key in kwargs)])
        text = f"Trainer: the {model.__class__.__name__} cannot be called with this batch, as "
        text, fix = f"{text}model({given})", _NAMED if named else _PASS_LOSS
        raise TreeError(message(text, [f"its forward takes {why}"], fix)) from error
    loss = out if isinstance(out, Tensor) else getattr(out, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    name = model.__class__.__name__
    if loss is None and hasattr(out, "loss"):
        text = f"Trainer: the {name} gave no loss: its .loss is None"
        raise LeafError(message(text, fix="give the batch what it computes the loss from: labels"))
    got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    text = f"Trainer: the {name} gave {got}, and without loss= that is the loss"
    raise LeafError(message(text, ["expected one number, or a result with a .loss"], _PASS_LOSS))


def _say_how_called(error: Exception, model: nn.Module, batch: Any) -> None:
    """Add a note to the error of a loss that did not come from inside of a module."""
    frames = traceback.walk_tb(error.__traceback__)
    if not any(frame.f_code is nn.Module.__call__.__code__ for frame, _ in frames):
        given = f"the {type(model).__name__} and a {type(batch).__name__}, the whole batch"
        error.add_note(f"  Trainer called loss(model, batch) with {given}")


def _finished(loss: Any, backward: Backward | None) -> Tensor:
    """The loss as a detached number, after a check of its shape and `backward` of it."""
    check_loss("Trainer", loss)
    if backward is not None:
        backward(loss)
    return loss.detach().reshape(())
