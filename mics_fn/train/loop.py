"""What a loop of steps needs around them: samples, batches, random states, and how far it is.

The sampler is torch's `DistributedSampler`, so any loader that accepts one can be used.

[Note: going on in a pass] A loader shuffles by the number of the pass, by a generator of its own,
or by random numbers that it draws when a pass begins. So the first two, and all random states at
that moment, give the order of the pass again. A loader that has `state_dict` and `load_state_dict`,
such as torchdata's `StatefulDataLoader`, goes on from its own state. Any other is begun again, and
its first batches are thrown away, as many as hold the samples that were used: that costs the time
of loading them. Then the random states of the save are put back, which dropout and later passes
draw from. What is drawn from the process' own generators *during* a pass, by a sampler or by a
dataset without workers, is drawn again only if training draws nothing from the same generator in
between.

After an error and `Trainer.reset` the next `fit` goes on in the same way, and begins with the batch
of the step that was not done. That step then draws other random numbers, such as those of dropout.
A rank that came back takes from another one how far the pass has come, and has the same samples as
before if the order follows from the number of the pass. An iterator, such as a generator, cannot
give a batch again, so it goes on behind that batch.
"""

import copy
import dataclasses
import enum
import numbers
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from operator import getitem, is_, setitem
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SequentialSampler

from mics_fn import _torch, checks
from mics_fn.collectives import together
from mics_fn.errors import GroupsError, LeafError, message
from mics_fn.groups import Groups

# Which samples a rank takes.


def sampler(
    dataset: Sized, groups: Groups, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler:
    """torch's `DistributedSampler` for the ranks of these groups, each with samples of its own.

    Pass it to a loader: `DataLoader(dataset, batch_size=8, sampler=sampler(dataset, groups))`.
    torchdata's `StatefulDataLoader` takes it in the same way. Its `state_dict` says how far a pass
    has come, but not which pass it is. `Trainer.fit` notes both; in a loop of your own save the
    sampler's `epoch` next to it, and call `set_epoch` again before you resume.

    Args:
      dataset: anything with a length and an index; equally long on every rank.
      groups: the groups whose ranks share the samples. A rank's share follows from its position in
        them, not from its global rank. So if they cover the data-parallel part of a mesh, tensor
        parallel ranks of equal position draw the same samples.
      shuffle: use another order in each epoch. `Trainer.fit` tells the sampler which epoch it is.
        In a loop of your own call `set_epoch(epoch)` before each pass, or every pass has the same
        order.
      seed: seed of the order; equal on every rank.
      drop_last: if the length n is not a multiple of the number of ranks, leave out the last
        n % world_size samples of the order, instead of repeating its first ones.

    Returns:
      The sampler. Every rank gets equally many samples, so that means over ranks are means over
      samples. Without `drop_last` up to world_size - 1 samples of an epoch occur twice.

    Communication: two small all-gathers over each of the two groups, to compare the arguments. All
      ranks of the groups must call it.

    Memory: the order of an epoch (8 bytes per sample) during its pass.

    Raises:
      PlanError: `seed` is not an int of at least 0.
      GroupsError: `groups` is not a `Groups`; with a tree of them the shares would be ambiguous.
      LeafError: there is not one sample for each rank.
      DesyncError: ranks differ in the length of the dataset or in an argument.

    Example:
      >>> with make_groups(1) as groups:
      ...     list(sampler(range(5), groups, shuffle=False))
      [0, 1, 2, 3, 4]
    """
    if not isinstance(groups, Groups):
        fix = "pass the dataset first, then the groups whose ranks take different samples"
        raise GroupsError(f"sampler: groups is {type(groups).__name__}", fix=fix)
    checks.integer("sampler", "seed", seed, 0, fix="pass the same number on all ranks")
    groups.partition.check_open()
    ranks, size = groups.world_size, len(dataset)
    about = f"{size} samples, shuffle={shuffle}, seed={seed}, drop_last={drop_last}"
    with together("sampler", groups, about):
        if size == 0 or (drop_last and size < ranks):
            text = f"sampler: {size} samples for {ranks} ranks, drop_last={drop_last}"
            raise LeafError(text, fix="give each rank at least one sample")
    samples = cast(Any, dataset)  # torch asks for less than it says
    return DistributedSampler(samples, ranks, groups.position, shuffle, seed, drop_last)


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
    new = list[Any]()
    for x in leaves:
        new.append(fn(x) if closed(x) else _map_others(fn, x, is_leaf))
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
    if isinstance(batch, DataLoader | Iterator | None):
        fix = "pass a batch, or what gives batches to trainer.fit(loader, steps)"
        raise LeafError(f"Trainer: the batch is a {type(batch).__name__}", fix=fix)
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
    samples = found[0].shape[0] if found else 1
    for x in found:
        if x.ndim > 1 and not x.is_floating_point():
            return samples, x.numel()
    return samples, 0


# The states of the generators that a step or a loader may draw from.

States = Mapping[str, Any]


def _generators(device: torch.device, loader: Any) -> dict[str, tuple[Callable, Callable]]:
    """How the state of each generator is read and set; of the loader's own ones, too."""
    found = {
        "cpu": (torch.get_rng_state, torch.set_rng_state),
        "python": (random.getstate, random.setstate),
    }
    if numpy := sys.modules.get("numpy"):
        found["numpy"] = (partial(_numpy_state, numpy), numpy.random.set_state)
    parts = [getattr(part, "generator", None) for part in parts_of(loader)]
    more = {f"loader {i}": each for i, each in enumerate(dict.fromkeys(parts))}
    if device.type != "cpu":
        more[device.type] = _torch.default_generator(device)  # None if it keeps none
    own = {name: each for name, each in more.items() if isinstance(each, torch.Generator)}
    return found | {name: (each.get_state, each.set_state) for name, each in own.items()}


def _numpy_state(numpy: Any) -> list[Any]:
    name, words, *rest = numpy.random.get_state()
    return [name, words.tolist(), *rest]


def random_states(device: torch.device, loader: Any = None) -> States:
    """Return the states at this moment, in the form in which they are saved: about 15 kB.

    Args:
      device: of this rank; its generator is asked unless it is the CPU.
      loader: its own generators are asked, too.
    """
    return {name: read() for name, (read, _) in _generators(device, loader).items()}


def put_back(states: States, device: torch.device, loader: Any = None) -> None:
    """Set the generators of this process to such states; that of another type of device stays."""
    for name, (_, put) in _generators(device, loader).items():
        if name in states:
            put(states[name])


# How far a pass over a loader has come, as a value; and a loader that goes on from there.


class Position(NamedTuple):
    """Position in a pass over a loader, as it is saved.

    Args:
      epoch: the number of the pass.
      order: what decides the order of the loader's samples; see `order_of`.
      samples: how many samples steps have used, on all ranks together.
      start: the random states when it began; None on another rank than the one that had them.
      loader: the state that the loader gave behind these samples, and the size of its batches;
        None if it gave none.
    """

    epoch: int
    order: str
    samples: int = 0
    start: States | None = None
    loader: Any = None


def has_state(loader: Any) -> bool:
    """Return whether a loader saves its own position, for batches of its size."""
    return all(hasattr(loader, name) for name in ("load_state_dict", "batch_size"))


def parts_of(loader: Any) -> tuple[Any, ...]:
    """Return a loader of torch and its samplers; None where it has none."""
    batches = getattr(loader, "batch_sampler", None)
    return (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))


def shuffler_of(loader: Any) -> Any:
    """Return what shuffles by epoch: a loader or one of its samplers; None if there is none."""
    return next((x for x in parts_of(loader) if callable(getattr(x, "set_epoch", None))), None)


def order_of(loader: Any) -> str:
    """Return what decides the order of a loader's samples, for any number of ranks."""
    samples = None
    with suppress(Exception):  # a stream of samples need not have a length
        samples = len(loader.dataset)
    sampler = next((part for part in parts_of(loader)[:0:-1] if part is not None), loader)
    shuffle = getattr(sampler, "shuffle", None)
    if not isinstance(shuffle, bool):
        shuffle = isinstance(sampler, Sampler) and not isinstance(sampler, SequentialSampler)
    seed = getattr(sampler, "seed", None) if shuffle else None
    return f"samples={samples}, shuffle={shuffle}, seed={seed if isinstance(seed, int) else None}"


# Passes over loaders, each in an order of its own, and how far the last one has come.


class DataPasses:
    """Go through loaders without end, and know which samples of the last pass steps have used.

    Passes are counted over the life of a trainer; a sampler that is set to a later one is followed.
    A batch counts as used once there are more calls of `step` than when it was given: a step that
    is taken back, or made good by other ranks, changes that number and nothing here.
    """

    def __init__(self) -> None:
        self.next = 0  # the number of the next pass
        self.interrupted = False  # whether a run has begun that has not ended well
        self._at: Position | None = None  # behind the last batch
        # Of the last two batches: calls and position before each, which may be in an earlier pass.
        # The step of one before them cannot be taken back any more.
        self._given: list[tuple[int, Position]] = []
        self._loader: Any = None  # while it is gone through
        self._resume: Position | None = None  # where the next run begins
        self._now: States | None = None  # the random states there, if they are this rank's
        self._strict = True  # whether a loader with another order is an error then
        self._once = False  # whether the last loader cannot give a batch again

    def batches(
        self, loader: Iterable[Any], device: torch.device, ranks: int
    ) -> Generator[Any, None, None]:
        """Return the batches of one pass after another, without end.

        Args:
          loader: what to go through.
          device: of this rank.
          ranks: how many ranks go through their share together.

        Raises:
          LeafError: a pass gave no batch, or the loader does not fit where the run resumes.
        """
        self._loader, self.interrupted, self._once = loader, True, isinstance(loader, Iterator)
        try:
            while True:
                batches = self._begin(loader, device, ranks)
                at: Any = self._at
                empty = not at.samples  # one that is gone on with may have nothing left
                for batch in batches:
                    empty = False
                    yield batch
                if empty:
                    text = "Trainer.fit: the loader gave no batch"
                    if self._once:
                        text += f": {type(loader).__name__} can be gone through only once"
                    fix = "pass a list or a DataLoader, with at least one sample per rank"
                    raise LeafError(text, fix=fix)
        finally:
            self._loader = None  # nothing here keeps it alive: it may have processes of its own

    def _begin(self, loader: Any, device: torch.device, ranks: int) -> Iterator[Any]:
        """Begin a pass, or go on in the one that is resumed, behind the samples that were used."""
        order, at, shuffler = order_of(loader), self._resume, shuffler_of(loader)
        now = self._now or random_states(device, loader)
        if at is None or not self._fits(at, order):
            at = Position(max(self.next, getattr(shuffler, "epoch", 0)), order, 0, now)
        if shuffler is not None:
            shuffler.set_epoch(at.epoch)
        if at.start is not None:
            put_back(at.start, device, loader)
        used, (state, size) = 0, at.loader or (None, None)
        if state and has_state(loader) and loader.batch_size == size:
            loader.load_state_dict(state)
            used = at.samples
        batches = iter(loader)
        while used < at.samples:
            batch = next(batches, None)
            if batch is None:
                text = f"Trainer.fit: a pass ended before the {at.samples} samples of it"
                fix = "pass a loader of the same data"
                raise LeafError(f"{text} that steps had used", fix=fix)
            used += ranks * max(1, count(batch)[0])
        if at.start is not None and used:  # else the pass has yet to draw its order
            put_back(now, device, loader)
        # What it resumes from is no state of the batches that follow.
        self._at, self._resume, self._now = at._replace(loader=None), None, None
        self.next = at.epoch + 1
        return batches

    def _fits(self, at: Position, order: str) -> bool:
        """Whether a loader has the order of a pass; if it has another, raise or warn."""
        if order == at.order:
            return True
        text = "Trainer.fit: this loader is not like the one of the pass that was begun"
        lines = [f"saved: {at.order}", f"now: {order}"]
        if self._strict:
            fix = "pass a loader like that one; Checkpoints(other_options='warn') begins a new pass"
            raise LeafError(text, lines, fix)
        warnings.warn(message(text, [*lines, "a new pass begins"]), stacklevel=6)
        return False

    def give(self, samples: int, calls: int) -> None:
        """Note the samples of a batch on all ranks, and the calls of `step` before it."""
        at: Any = self._at
        self._given = [*self._given[-1:], (calls, at)]
        self._at = at._replace(samples=at.samples + samples)

    def at(self, calls: int) -> Position | None:
        """Return the position after so many calls of `step`: before what these did not use."""
        return next((at for before, at in self._given if before >= calls), self._at)

    def kept(self, calls: int) -> dict[str, Any] | None:
        """Return the position as it is saved; None before any pass."""
        at = self._resume or self.at(calls)
        if at is None:
            return None
        behind = self._resume is None and all(before < calls for before, _ in self._given)
        if behind and has_state(self._loader):
            state = copy.deepcopy(self._loader.state_dict())
            at = at._replace(loader=(state, self._loader.batch_size))
        return at._asdict()

    def randoms(self, device: torch.device) -> States:
        """Return the random states of this moment, those of the loader among them."""
        return self._now or random_states(device, self._loader)

    def resume(self, at: Position | None, now: States | None = None, *, strict: bool) -> None:
        """Let the next run begin at a position; None begins a new pass."""
        self._resume, self._now, self._strict, self._at, self._given = at, now, strict, None, []

    def report(self, calls: int) -> list[Any]:
        """Return what a rank that has lost all of this takes from others; JSON keeps it."""
        at = self.at(calls)
        return [self.interrupted, self.next, at and at[:3]]

    def take(self, report: list[Any]) -> None:
        """Take over what `report` gave on another rank."""
        _, self.next, at = report
        self.resume(None, strict=False)
        self._at = at and Position(*at)

    def go_on(self, calls: int) -> None:
        """Let the next run go on with the last pass, which an error has ended on some rank."""
        if self._resume is None and not self._once:
            self.resume(self.at(calls), strict=False)


# What a loop shows.


@contextmanager
def showing(steps: int, every: int) -> Iterator[Callable[[Sequence[Any]], None]]:
    """Show how far a run is on the standard error output: in a bar, or in lines without tqdm.

    Args:
      steps: how many the run has.
      every: steps from one reading of the loss to the next; 0 shows nothing.

    Yields:
      What is called with the metrics of all steps so far, after each.
    """
    began, bar = time.perf_counter(), nullcontext()
    with suppress(ImportError):
        from tqdm import tqdm

        bar = tqdm(total=steps, unit="step", disable=not every)

    def show(found: Sequence[Any]) -> None:
        done = len(found)
        if shown is not None:
            shown.update()
        if not every or (done % every and done != steps):
            return
        seconds, tokens = time.perf_counter() - began, sum(m.tokens for m in found)
        amount, unit = (tokens or sum(m.samples for m in found)), "tokens" if tokens else "samples"
        text = f"loss {found[-1].loss.item():.3f}, {amount / seconds:,.0f} {unit}/s"
        if shown is not None:
            shown.set_postfix_str(text)
        else:
            print(f"step {done}/{steps}: {text}", file=sys.stderr, flush=True)

    with bar as shown:
        yield show
