"""Whose samples a rank gives in a step, if fewer replicas go on than the job has.

[Note: the same step on fewer ranks] A step of a job of n ranks has the samples of n positions. If
only n' of them go on, rank position j takes those of the positions j, j + n', j + 2n', ..., which
are n/n' *shares*. It does `accumulate` micro-steps of each, so the means over micro-steps and over
ranks are those over the same micro-batches as before, equally weighted: the same loss and gradient,
up to rounding. First come micro-batches 0 of all shares, then micro-batches 1. So micro-batch i of
micro-step k is number k * n + i of the step, as ever, which is what `placement.canonical` needs for
equal bits. The micro-steps of one share hand their buffers on to each other, as on a rank of its
own, and the mean over ranks becomes one over shares and ranks.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from mics_fn.collectives import same_call
from mics_fn.errors import TreeError, message, name_ranks
from mics_fn.groups import Groups

# What a loader of torch is made of, besides its data and who deals it out.
_PARTS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator",
    "prefetch_factor", "pin_memory_device", "in_order",
)  # fmt: skip
_ASK = "give DataLoader sampler=mf.sampler(dataset, groups), with the groups of the whole job"


@dataclass(frozen=True)
class Given:
    """The batches of the shares of a rank, in the order of their positions."""

    batches: tuple[Any, ...]


def given(batch: Any, shares: Sequence[int], *, elastic: bool) -> Given:
    """The batches of all shares.

    Args:
      batch: what `Trainer.step` was given: a batch, or a function from a position to one.
      shares: the positions whose samples this rank gives.
      elastic: whether replicas may go on without others.

    Raises:
      TreeError: it is a batch of one rank, and this rank has to give those of several.
    """
    if isinstance(batch, Given):
        return batch
    if elastic and callable(batch):
        return Given(tuple(batch(position) for position in shares))
    if len(shares) > 1:
        whose = name_ranks(shares).partition(" ")[2]
        text = f"Trainer.step: this rank gives the samples of positions {whose} now"
        fix = "pass a function: trainer.step(lambda position: batch_of(step, position))"
        raise TreeError(message(text, ["got one batch"], fix))
    return Given((batch,))


def check_loader(loader: Any, home: Groups, positions: int) -> None:
    """Raise TreeError, on all ranks, unless the samples of other positions can be had from it.

    Communication: that of `same_call`.
    """
    error = None
    try:
        _sampler_of(loader, positions)
    except TreeError as wrong:
        error = wrong
    same_call("Trainer.fit", [home], f"train with {type(loader).__name__}", error)
    if error is not None:
        raise error


def _sampler_of(loader: Any, positions: int) -> DistributedSampler:
    """What deals out the samples of a loader that can be made once more for other positions."""
    batches, own = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    why = ""
    if type(loader) is not DataLoader:
        why = f"the loader is a {type(loader).__name__}, expected torch's DataLoader"
    elif type(own) is not DistributedSampler:
        why = f"its sampler is a {type(own).__name__}, expected a DistributedSampler"
    elif batches is not None and type(batches) is not BatchSampler:
        why = f"its batch_sampler is a {type(batches).__name__}, expected that of torch"
    elif own.num_replicas != positions:
        why = f"its sampler deals to {own.num_replicas} ranks, expected {positions}"
    if why or not isinstance(own, DistributedSampler):
        text = "Trainer.fit: with elastic=, others must be able to give the samples of a lost rank"
        raise TreeError(message(text, [why], _ASK))
    return own


class Dealt:
    """A loader that gives the batches of several positions at once, as `Given`.

    Args:
      loader: the loader of one position, which `check_loader` has accepted.
      shares: the positions.
      positions: how many there are in all.
    """

    def __init__(self, loader: Any, shares: Sequence[int], positions: int) -> None:
        self._loader, self._shares = loader, shares
        self.sampler = _sampler_of(loader, positions)
        self.generator = loader.generator

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Given]:
        passes: Iterable[Any] = zip(*map(self._of, self._shares), strict=True)
        return (Given(batches) for batches in passes)

    def _of(self, position: int) -> DataLoader:
        """The loader of another position, in the pass that the sampler is set to."""
        loader, sampler = self._loader, copy.copy(self.sampler)
        sampler.rank = position
        options = {name: getattr(loader, name) for name in _PARTS if hasattr(loader, name)}
        if loader.num_workers:
            options["multiprocessing_context"] = loader.multiprocessing_context
        size, drop = loader.batch_size, loader.drop_last
        return DataLoader(loader.dataset, size, sampler=sampler, drop_last=drop, **options)


def interleaved(cuts: Sequence[Sequence[Any]]) -> list[Any]:
    """Micro-batches of all shares, in the order of micro-steps.

    >>> interleaved([["a0", "a1"], ["b0", "b1"]])
    ['a0', 'b0', 'a1', 'b1']
    """
    return [part for parts in zip(*cuts, strict=True) for part in parts]
