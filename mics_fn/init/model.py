"""`init_model`: the shards of a model that no rank ever holds in full."""

import random
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from os.path import dirname
from typing import Any

import torch
from torch import Tensor, nn

from mics_fn import tree
from mics_fn.collectives import in_step
from mics_fn.errors import LeafError, message
from mics_fn.groups import Groups
from mics_fn.init.files import Source, Weights, open_weights
from mics_fn.init.filling import Filling
from mics_fn.init.loading import matched, order_of
from mics_fn.init.recorder import Recorder
from mics_fn.init.replay import Memory
from mics_fn.init.skeleton import hollow_parameter, tensors_of, with_parts
from mics_fn.init.tape import NotRecorded, place
from mics_fn.init.without_data import Hollow
from mics_fn.shards import Leaf, require_groups


def init_model(
    model_fn: Callable[[], nn.Module],
    groups: Any,
    *,
    seed: int,
    weights: Source | None = None,
    **options: Any,
) -> tuple[nn.Module, dict[str, Leaf]]:
    """Make a model as shards: no rank ever holds more of it than its part and one parameter.

    What `model_fn` does is recorded without data. Then each parameter is made by itself, with the
    random numbers that it would have had, and this rank's part is kept. So all values are, bit for
    bit, those of `torch.manual_seed(seed); model_fn()` on the groups' device, and torch's
    generators are left as that leaves them. It takes somewhat longer: every rank draws all
    numbers. If something in `model_fn` can not be recorded or repeated, a warning says what, and
    each rank makes the whole model and keeps its part: the values are the same, the memory is not.

    Args:
      model_fn: makes the model; it may read values, seed and draw as it likes, and runs with the
        groups' device as torch's default device.
      groups: as for `shard`.
      seed: for `torch.manual_seed`, the same on all ranks.
      weights: file or mapping with the values of all parameters and persistent buffers, as for
        `load_shards`; then no parameter is drawn, and generators stay as just seeded.
      options: `frozen`, `precision`, `bucket_bytes` and `order` as for `shard`; by default leaves
        lie in buckets in the module's order.

    Returns:
      The module, with its parameters on meta and its buffers in full on the device, ready for
      `functional_call(module, gather(shards, groups), args)`; and the shards by name, as `shard`
      gives them for `dict(model.named_parameters(remove_duplicate=False))`. Tied parameters are
      one, frozen ones stay frozen.

    Communication: digests of seed, tree and shards (tens of bytes a leaf).

    Memory: this rank's shards, the buffers, and what making a single parameter takes; 5 KB for each
      draw that has to be repeated later.

    Raises:
      DesyncError: ranks gave different seeds, or made different trees or values.
      LeafError, TreeError, PlanError: as `shard` and, with weights, `load_shards`.

    Example:
      >>> groups = make_groups(1)
      >>> model, shards = init_model(lambda: torch.nn.Linear(2, 3), groups, seed=0)
      >>> shards["weight"], model.weight.is_meta
      (Sharded(shape=(3, 2), float32, here 6 of 6), True)
      >>> full = gather(shards, groups)
      >>> torch.func.functional_call(model, full, torch.ones(1, 2)).shape
      torch.Size([1, 3])

    References: deferred initialisation of torchdistX; MiCS, Zhang et al., VLDB 2022,
      arXiv:2205.00119.
    """
    require_groups("init_model", groups)
    homes = [home for home in tree.flatten(groups)[0] if isinstance(home, Groups)]
    device = homes[0].device if homes else torch.get_default_device()
    again = _same_again(model_fn, device, seed)
    with ExitStack() as opened:
        with in_step("init_model", groups, f"seed={seed}"):
            made, reason = _record(model_fn, device, seed)
            made = made or _Made(again())
            sources: Weights = {}
            if weights is not None:
                found = opened.enter_context(open_weights("init_model", weights))
                sources = matched("init_model", found, made.params, made.saved_buffers())
        options.setdefault("order", order_of(made.params))
        filling = Filling("init_model", made.params, groups, options)
        try:
            made.fill(filling, sources)
        except NotRecorded as error:
            reason = made.give_up(error)
            made = _Made(again())
            made.fill(filling, sources)
    if reason:
        fix = "mend that, or make the model where there is room for all of it"
        text = "init_model: this model cannot be made in parts, so each rank made all of it"
        warnings.warn(message(text, [reason], fix=fix), stacklevel=2)
    filling.check_copies()
    return made.skeleton(), filling.shards


class _Made:
    """A model, real or recorded.

    Args:
      model: its tensors are hollow if it was recorded.
      recorder: what they are made of.
    """

    def __init__(self, model: nn.Module, recorder: Recorder | None = None) -> None:
        if not isinstance(model, nn.Module):
            text = f"init_model: model_fn gave {type(model).__name__}, expected nn.Module"
            raise LeafError(message(text, fix="return the model from it"))
        self.model, self.recorder = model, recorder
        self.params = dict(model.named_parameters(remove_duplicate=False))
        self._parts: dict[int, Tensor] = {}  # what comes instead of hollow tensors
        self._saved: dict[str, Tensor] = {}  # buffers that were read

    def saved_buffers(self) -> dict[str, Tensor | None]:
        """What a state dict has besides the parameters."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        saved = self.model.state_dict(keep_vars=True)
        return {name: buffers.get(name) for name in saved if name not in self.params}

    def fill(self, filling: Filling, sources: Weights) -> None:
        """Give shards their values, from sources where there are some."""
        drawn = {}
        for name, value in self.params.items():
            if name in sources:
                filling.read(name, sources[name].read)
            elif value.device.type == "meta":
                fix = "let model_fn make it without device='meta', or pass weights="
                text = f"init_model: params[{name!r}] is on meta, so it has no value"
                raise LeafError(message(text, fix=fix))
            elif not isinstance(value, Hollow):
                filling.put(name, value)
            elif filling.part(name) != (0, 0):
                drawn[name] = value
        if self.recorder is not None:
            self._replay(filling, self.recorder, drawn)
            if sources:
                self.recorder.forget()
            else:
                self.recorder.replay.finish()
        for name, value in self.model.named_buffers(remove_duplicate=False):
            if name in sources:
                self._saved[name] = sources[name].read(0, value.numel()).view(value.shape)

    def _replay(self, filling: Filling, recorder: Recorder, drawn: dict[str, Hollow]) -> None:
        new = self._parts = {}
        tied: dict[Any, Tensor] = {}
        for value in self.params.values():
            if isinstance(value, Hollow):
                key = (*place(value), value.dtype) if value.numel() else id(value)
                new[id(value)] = tied.setdefault(key, hollow_parameter(value))
        others = [h for h in tensors_of(self.model, Hollow).values() if id(h) not in new]
        for hollow in others:
            if not hollow.is_leaf:  # a module makes it again from parameters
                new[id(hollow)] = hollow_parameter(hollow).data
        others = [hollow for hollow in others if hollow.is_leaf]
        users: dict[int, list[Hollow | str]] = {}
        for user in (*drawn, *others):
            cell = recorder.view_of(drawn[user] if isinstance(user, str) else user).cell
            users.setdefault(cell, []).append(user)

        def ready(cell: int, memory: Memory) -> None:
            for user in users[cell]:
                hollow = drawn[user] if isinstance(user, str) else user
                value = recorder.replay.show(recorder.view_of(hollow), memory)
                if isinstance(user, str):
                    filling.put(user, value)
                elif isinstance(user, nn.Parameter):
                    new[id(user)] = nn.Parameter(value, user.requires_grad)
                else:
                    new[id(user)] = value.requires_grad_(user.requires_grad)

        recorder.replay.parts(users, ready)

    def give_up(self, error: NotRecorded) -> str:
        """Reset generators; say what could not be replayed, and for which parameter or buffer."""
        if self.recorder is not None:
            self.recorder.forget()
        named = (*self.params.items(), *self.model.named_buffers(remove_duplicate=False))
        names = [
            name
            for name, value in named
            if self.recorder is not None
            and isinstance(value, Hollow)
            and self.recorder.view_of(value).cell == error.cell
        ]
        return f"{names[0] if names else 'an attribute of the model'}: {error}"

    def skeleton(self) -> nn.Module:
        """The model with its parameters on meta, and everything else real."""
        model = with_parts(self.model, self._parts)
        with torch.no_grad():
            for name, value in self._saved.items():
                model.get_buffer(name).copy_(value)
        return model


def _record(
    model_fn: Callable[[], nn.Module], device: torch.device, seed: int
) -> tuple[_Made | None, str]:
    """The model without data; or None and why not."""
    recorder = Recorder()
    try:
        torch.manual_seed(seed)
        with torch.device(device), recorder:
            model = model_fn()
        recorder.finish()
        return _Made(model, recorder), ""
    except BaseException as error:
        recorder.forget()
        if not isinstance(error, Exception):
            raise
        kind = "" if isinstance(error, NotRecorded) else f"{type(error).__name__}: "
        first = str(error).partition("\n")[0]
        return None, f"{kind}{first} (after {recorder.last}{_place(error)})"


def _place(error: BaseException) -> str:
    """The line of code, in none of the libraries, that an error came through."""
    libraries = (dirname(torch.__file__), dirname(dirname(__file__)))
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f", at {ours[-1].filename}:{ours[-1].lineno}" if ours else ""


def _same_again(
    model_fn: Callable[[], nn.Module], device: torch.device, seed: int
) -> Callable[[], nn.Module]:
    """Makes the model for real, with Python's and numpy's random numbers as they are now."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    others = None if numpy is None else numpy.random.get_state()

    def again() -> nn.Module:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(others)
        torch.manual_seed(seed)
        with torch.device(device):
            return model_fn()

    return again
