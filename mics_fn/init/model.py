"""`init_model`: the shards of a model that no rank ever holds in full."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from mics_fn import checks, tree
from mics_fn.collectives import together
from mics_fn.errors import PlanError
from mics_fn.groups import Groups
from mics_fn.init import reading
from mics_fn.init.files import Weights
from mics_fn.init.filling import (
    Filling,
    Read,
    computed_in,
    meta_like,
    tensors_of,
    warn_of_compile,
    with_tensors,
)
from mics_fn.init.tape import Recorded, Recorder
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
    draws all numbers. What cannot be recorded or repeated, such as memory that numpy writes to, is
    an error: make such a model in full, and `shard` it.

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
      draw.

    Raises:
      DesyncError: the ranks gave different seeds, or made different trees or values.
      LeafError: something in `model_fn` cannot be recorded or repeated.
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
    with ExitStack() as opened:
        with together("init_model", groups, f"seed={seed}"):
            checks.integer("init_model", "seed", seed, 0, fix="pass the same number on all ranks")
            checks.options("init_model", options, LayoutOptions.__annotations__)
            made = _Construction(model_fn, device, seed)
            sources: Weights = {}
            if weights is None and (names or missing):
                fix = "pass weights= too, or leave them out"
                raise PlanError("init_model: names= and missing= need weights=", fix=fix)
            if weights is not None:
                given = reading.open_weights("init_model", weights, trust=trust)
                found = reading.renamed(opened.enter_context(given), names)
                wanted = made.params, made.saved_buffers()
                sources = reading.matched("init_model", found, *wanted, missing=missing)
        options.setdefault("order", tree.own_order(made.params))
        filling = Filling("init_model", made.params, groups, {**options})
        with filling.under_way():
            filling.fill(lambda name: sources[name].read if name in sources else made.read(name))
            skeleton = made.skeleton(sources)
    filling.check_copies()
    if skeleton is not made.model:
        warn_of_compile("init_model", made.model, stacklevel=3)
    return skeleton, filling.shards


class _Construction:
    """A model that is recorded, and whose values are made one after the other.

    Args:
      model_fn: makes it.
      device: for the tensors of the model.
      seed: for `torch.manual_seed`.

    Raises:
      NotRecorded: it cannot be recorded.
    """

    def __init__(self, model_fn: Callable[[], nn.Module], device: torch.device, seed: int) -> None:
        self._contents: dict[int, Any] = {}  # of storages of the tape that were replayed
        self.recorder = recorder = Recorder()
        try:
            torch.manual_seed(seed)
            with torch.device(device), recorder:
                self.model = model_fn()
            recorder.finish()
        finally:
            recorder.forget()
        self.params = dict(self.model.named_parameters(remove_duplicate=False))

    def saved_buffers(self) -> dict[str, Tensor | None]:
        """Return the entries of a state dict besides parameters; None for other than buffers."""
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        saved = self.model.state_dict(keep_vars=True)
        return {name: buffers.get(name) for name in saved if name not in self.params}

    def read(self, name: str) -> Read:
        """Make the value of a parameter, of which parts are then read."""
        value = self.params[name]
        value = self._value(value) if isinstance(value, Recorded) else value
        flat = value.detach().reshape(-1)
        return lambda low, high: flat[low:high]

    def _value(self, recorded: Recorded, *, keep: bool = False) -> Tensor:
        """Replay a tensor; `keep` keeps the storages that were replayed before."""
        view = self.recorder.view_of(recorded)
        if view.storage not in self._contents:
            if not keep:
                self._contents.clear()
            self._contents[view.storage] = self.recorder.content(view.storage)
        return view.on(self._contents[view.storage])

    def skeleton(self, sources: Weights) -> nn.Module:
        """Return the model with its parameters on meta, and everything else real.

        Args:
          sources: what is read; then all generators stay as the seed sets them.
        """
        new = computed_in(self.model, Recorded)
        params = list(self.params.values())
        for value, owner in zip(params, owners_of(params), strict=True):
            if isinstance(value, Recorded):
                first = params[owner]
                new[id(value)] = new.setdefault(id(first), meta_like(first))
        self._contents.clear()
        for key, recorded in tensors_of(self.model, Recorded).items():
            if key not in new:
                value = self._value(recorded, keep=True)
                if isinstance(recorded, nn.Parameter):
                    value = nn.Parameter(value, recorded.requires_grad)
                new[key] = value.requires_grad_(recorded.requires_grad)
        self._contents.clear()
        if not sources:
            self.recorder.finish_generators()
        model = with_tensors(self.model, new)
        with torch.no_grad():
            for name, value in model.named_buffers(remove_duplicate=False):
                if name in sources:
                    value.copy_(sources[name].read(0, value.numel()).view(value.shape))
        return model
