"""`init_model`: the shards of a model that no rank ever holds in full."""

import random
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from os.path import dirname
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from mics_fn import checks, tree
from mics_fn.collectives import in_step
from mics_fn.errors import PlanError, first_line, message
from mics_fn.groups import Groups
from mics_fn.init import reading
from mics_fn.init.files import Weights
from mics_fn.init.filling import (
    Filling,
    meta_like,
    tensors_of,
    warn_of_compile,
    with_tensors,
)
from mics_fn.init.tape import Memory, NotRecorded, Recorded, Recorder
from mics_fn.shards import LayoutOptions, Leaf, owners_of, require_groups


def init_model(
    model_fn: Callable[[], nn.Module],
    groups: Any,
    *,
    seed: int,
    weights: reading.Source | None = None,
    names: Callable[[str], str | None] | None = None,
    missing: Callable[[str], bool] | None = None,
    trust: bool = False,
    **options: Unpack[LayoutOptions],
) -> tuple[nn.Module, dict[str, Leaf]]:
    """Make a model as shards; no rank ever holds more of it than its part and one parameter.

    What `model_fn` does is recorded without data. Then the parameters are made one after the other,
    each with the random numbers that it would have had, and this rank keeps its part. All values
    are, bit for bit, those of `torch.manual_seed(seed); model_fn()` on the device of the groups,
    and torch's generators end in the same states. This takes somewhat longer, because every rank
    draws all numbers. If something in `model_fn` cannot be recorded or repeated, a warning names
    it, and each rank makes the whole model and keeps its part: the values are the same, but not the
    peak of memory.

    Args:
      model_fn: makes the model, with the device of the groups as torch's default device. It may
        read values, set seeds and draw random numbers as it likes.
      groups: as for `shard`.
      seed: for `torch.manual_seed`, the same on all ranks.
      weights: a file or a mapping with the values of all parameters and persistent buffers, as for
        `load_shards`. No parameter is then drawn, and the generators stay as the seed sets them.
        A buffer that is not there is as `model_fn` makes it.
      names: gives the parameter's name for a name in the weights, or None to ignore that tensor.
      missing: whether the weights may lack a parameter, by its name. It then has the value that
        `model_fn` gives it, such as adapters that are new.
      trust: of the files of weights, as for `load_shards`.
      options: `frozen`, `precision`, `bucket_bytes`, `order`, `bucket` and `where` as for `shard`;
        by default leaves lie in buckets in the order of the module.

    Returns:
      The module, with its parameters on meta and its buffers in full on the device, ready for
      `functional_call(module, gather(shards, groups), args)`; and the shards by name, as `shard`
      gives them for `dict(model.named_parameters(remove_duplicate=False))`. Tied parameters stay
      tied, and frozen ones stay frozen.

    Communication: digests of the seed, the tree and the shards (tens of bytes per leaf).

    Memory: this rank's shards, the buffers, and what making a single parameter takes; 5 KB for each
      draw that has to be repeated later.

    Raises:
      DesyncError: the ranks gave different seeds, or made different trees or values.
      LeafError, PlanError: as `shard` and, with weights, `load_shards`.
      FileError, OSError: with weights, as `load_shards`.
      FileError: with `where=`, as `load_shards`.

    Example:
      >>> groups = make_groups(1)
      >>> model, shards = init_model(lambda: torch.nn.Linear(2, 3), groups, seed=0)
      >>> shards["weight"], model.weight.is_meta
      (Sharded(shape=(3, 2), float32, here 6 of 6), True)
      >>> full = gather(shards, groups)
      >>> torch.func.functional_call(model, full, torch.ones(1, 2)).shape
      torch.Size([1, 3])

    References: the deferred initialisation of torchdistX, which also records ops and replays them.
    """
    require_groups("init_model", groups)
    homes = [home for home in tree.flatten(groups)[0] if isinstance(home, Groups)]
    device = homes[0].device if homes else torch.get_default_device()
    again = _same_again(model_fn, device, seed)
    with ExitStack() as opened:
        with in_step("init_model", groups, f"seed={seed}"):
            checks.integer("init_model", "seed", seed, 0, fix="pass the same number on all ranks")
            checks.options("init_model", options, LayoutOptions.__annotations__)
            made, reason = _record(model_fn, device, seed)
            made = made or _Model(again())
            sources: Weights = {}
            if weights is None and (names or missing):
                fix = "pass weights= too, or leave them out"
                raise PlanError("init_model: names= and missing= need weights=", fix=fix)
            if weights is not None:
                given = reading.open_weights("init_model", weights, trust=trust)
                found = reading.renamed("init_model", opened.enter_context(given), names)
                wanted = made.params, made.saved_buffers()
                sources = reading.matched("init_model", found, *wanted, missing=missing)
        options.setdefault("order", tree.own_order(made.params))
        filling = Filling("init_model", made.params, groups, {**options})
        with filling.under_way():
            try:
                made.fill(filling, sources)
            except NotRecorded as error:
                reason = made.give_up(error)
                made = _Model(again())
                made.fill(filling, sources)
    if reason:
        fix = "mend that, or make the model where there is room for all of it"
        text = "init_model: this model cannot be made in parts, so each rank made all of it"
        warnings.warn(message(text, [reason], fix=fix), stacklevel=2)
    filling.check_copies()
    skeleton = made.skeleton()
    if skeleton is not made.model:
        warn_of_compile("init_model", made.model, stacklevel=3)
    return skeleton, filling.shards


class _Model:
    """A model, real or recorded.

    Args:
      model: if it was recorded, its tensors have no data.
      recorder: what recorded it.
    """

    def __init__(self, model: nn.Module, recorder: Recorder | None = None) -> None:
        self.model, self.recorder = model, recorder
        self.params = dict(model.named_parameters(remove_duplicate=False))
        self._new: dict[int, Tensor] = {}  # in place of recorded tensors, by their `id`
        self._saved: dict[str, Tensor] = {}  # buffers that were read

    def saved_buffers(self) -> dict[str, Tensor | None]:
        """Return the entries of a state dict besides parameters; None for other than buffers."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        saved = self.model.state_dict(keep_vars=True)
        return {name: buffers.get(name) for name in saved if name not in self.params}

    def fill(self, filling: Filling, sources: Weights) -> None:
        """Give the shards their values, from sources as far as there are some."""
        drawn = {}
        for name in filling.order:
            value = self.params[name]
            if name in sources:
                filling.read(name, sources[name].read)
            elif not isinstance(value, Recorded):
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

    def _replay(self, filling: Filling, recorder: Recorder, drawn: dict[str, Recorded]) -> None:
        params = list(self.params.values())
        for value, owner in zip(params, owners_of(params), strict=True):
            if isinstance(value, Recorded):
                first = params[owner]
                self._new[id(value)] = self._new.setdefault(id(first), meta_like(first))
        wanted: list[tuple[str | None, Recorded]] = list(drawn.items())
        for key, value in tensors_of(self.model, Recorded).items():
            if not value.is_leaf:  # a module computes it again from parameters
                self._new[key] = meta_like(value)
            elif key not in self._new:
                wanted.append((None, value))
        users: dict[int, list[tuple[str | None, Recorded]]] = {}
        for name, value in wanted:
            users.setdefault(recorder.view_of(value).storage, []).append((name, value))

        def use(storage: int, memory: Memory) -> None:
            for name, recorded in users[storage]:
                value = recorder.replay.show(recorder.view_of(recorded), memory)
                if name is not None:
                    filling.put(name, value)
                    continue
                if isinstance(recorded, nn.Parameter):
                    value = nn.Parameter(value, recorded.requires_grad)
                self._new[id(recorded)] = value.requires_grad_(recorded.requires_grad)

        recorder.replay.parts(users, use)

    def give_up(self, error: NotRecorded) -> str:
        """Reset the generators; say what failed, and for which parameter or buffer."""
        where = "an attribute of the model"
        if self.recorder is not None:
            self.recorder.forget()
            named = (*self.params.items(), *self.model.named_buffers(remove_duplicate=False))
            recorded = [(name, x) for name, x in named if isinstance(x, Recorded)]
            views = {name: self.recorder.view_of(x) for name, x in recorded}
            where = next((k for k, view in views.items() if view.storage == error.storage), where)
        return f"{where}: {error}"

    def skeleton(self) -> nn.Module:
        """The model with its parameters on meta, and everything else real."""
        model = with_tensors(self.model, self._new)
        with torch.no_grad():
            for name, value in self._saved.items():
                model.get_buffer(name).copy_(value)
        return model


def _record(
    model_fn: Callable[[], nn.Module], device: torch.device, seed: int
) -> tuple[_Model | None, str]:
    """The model without data; or None, and why it could not be recorded."""
    recorder = Recorder()
    try:
        torch.manual_seed(seed)
        with torch.device(device), recorder:
            model = model_fn()
        recorder.finish()
        return _Model(model, recorder), ""
    except BaseException as error:
        recorder.forget()
        if not isinstance(error, Exception):
            raise
        kind = "" if isinstance(error, NotRecorded) else f"{type(error).__name__}: "
        first = first_line(error)
        return None, f"{kind}{first} (after {recorder.last}{_place(error)})"


def _place(error: BaseException) -> str:
    """The last line of the user's code that an error came through, as text."""
    libraries = (dirname(torch.__file__), dirname(dirname(__file__)))
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f", at {ours[-1].filename}:{ours[-1].lineno}" if ours else ""


def _same_again(
    model_fn: Callable[[], nn.Module], device: torch.device, seed: int
) -> Callable[[], nn.Module]:
    """A function that makes the model for real, from the random states that are there now."""
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
