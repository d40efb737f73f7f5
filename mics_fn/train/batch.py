"""Batches: moved to the device, cut into micro-batches, counted."""

from collections.abc import Iterator
from functools import partial
from inspect import isroutine
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mics_fn.errors import TreeError, message
from mics_fn.shards import PLAIN, leaves_of, map_contents

_KINDS = "tensors in tuples, lists, mappings, dataclasses and registered pytree nodes"


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device.

    Raises:
      TreeError: it is None, or what gives batches; or it holds no sample, whose mean would be NaN.
      TreeError: it holds an object that cannot be opened and has no `.to` of its own.
    """
    if batch is None:
        fix = "return a batch from what makes them, such as the collate_fn of a DataLoader"
        raise TreeError(message("Trainer: the batch is None", fix=fix))
    _refuse_makers(batch)
    rows = [x.shape[0] for x in leaves_of(batch) if isinstance(x, Tensor) and x.ndim]
    if (rows and not any(rows)) or (isinstance(batch, list | tuple | dict) and not batch):
        fix = "give each rank a sample in each step, as DataLoader(..., drop_last=True) does"
        raise TreeError(message("Trainer: the batch has no sample", fix=fix))

    def moved(x: Any, path: str) -> Any:
        if isinstance(x, Tensor):
            return x.to(device, non_blocking=True)
        if device.type == "cpu" or isinstance(x, PLAIN) or _is_numpy(x):
            return x
        if not callable(getattr(x, "to", None)):
            text = f"Trainer: {path} is {type(x).__name__}, which cannot be moved to {device}"
            raise TreeError(message(text, fix=f"give it a method to(device), or use {_KINDS}"))
        return x.to(device)

    return map_contents(moved, batch, "batch")


def _refuse_makers(batch: Any) -> None:
    """Raise TreeError for what gives batches in the place of a batch."""
    if isinstance(batch, DataLoader | Iterator):
        text = f"Trainer: the batch is a {type(batch).__name__}, which gives batches"
        fix = "pass it to trainer.fit(loader, steps), or pass one of its batches"
        raise TreeError(message(text, fix=fix))
    if isinstance(batch, type | partial) or isroutine(batch):
        text = "Trainer: the batch is a function"
        raise TreeError(message(text, fix="pass what it returns"))


def cut(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into equal micro-batches along dim 0.

    Lists of strings with one string per sample, as torch's loader makes them, are cut as well.
    Anything else that holds no tensor goes to each micro-batch.

    Raises:
      TreeError: a tensor's dim 0 is not a multiple of `parts`, or an object cannot be opened.
    """
    if parts == 1:
        return [batch]
    samples, _ = count(batch)

    def texts(x: Any) -> bool:
        fits = type(x) in (list, tuple) and len(x) == samples
        return fits and all(isinstance(each, str | bytes) for each in x)

    def check(x: Any, path: str) -> Any:
        if isinstance(x, Tensor) and (x.ndim == 0 or x.shape[0] % parts):
            text = f"Trainer.step: {path} has shape {tuple(x.shape)}, accumulate={parts}"
            raise TreeError(message(text, fix="make dim 0 a multiple of accumulate"))
        if not isinstance(x, (Tensor, *PLAIN)) and not texts(x):
            text = f"Trainer.step: {path} is {type(x).__name__}, which cannot be cut in {parts}"
            raise TreeError(message(text, fix=f"use {_KINDS}, or accumulate=1"))
        return x

    def part(x: Any, i: int) -> Any:
        if isinstance(x, Tensor):
            return x.chunk(parts)[i]
        n = samples // parts
        return x[i * n : (i + 1) * n] if texts(x) else x

    map_contents(check, batch, "batch", texts)
    return [map_contents(lambda x, _, i=i: part(x, i), batch, is_leaf=texts) for i in range(parts)]


def count(batch: Any) -> tuple[int, int]:
    """The number of samples and of tokens in a batch; see `StepMetrics`."""
    tensors = [x for x in leaves_of(batch) if isinstance(x, Tensor) and x.ndim]
    ints = next((x for x in tensors if not x.is_floating_point() and x.ndim > 1), None)
    return (tensors[0].shape[0] if tensors else 1), (0 if ints is None else ints.numel())


def _is_numpy(x: Any) -> bool:
    """Whether a value comes from numpy, so that it stays on the CPU."""
    return type(x).__module__ == "numpy"
