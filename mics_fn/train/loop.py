"""A loop of steps, and what it needs around them: reproducible numbers, and a progress bar."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic as torch_deterministic

from mics_fn.groups import StopRequest
from mics_fn.train.metrics import StepMetrics


@contextmanager
def reproducible(on: bool) -> Iterator[None]:
    """A block in which torch uses deterministic algorithms only, if `on`."""
    if not on:
        yield
        return
    mode, filled = torch.get_deterministic_debug_mode(), fills_memory()
    tuned = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # That mode would also write to all new memory, to reveal code that reads it uninitialised.
    torch_deterministic.fill_uninitialized_memory = False  # pyright: ignore
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = tuned
        torch_deterministic.fill_uninitialized_memory = filled  # pyright: ignore


@contextmanager
def learning(deterministic: bool) -> Iterator[None]:
    """A block in grad mode, and `reproducible`; an interrupt leaves grad mode as it was.

    Inside of torch's own contexts it may be raised when the mode is set and nobody is to reset it.
    """
    before = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(True)
        with reproducible(deterministic):
            yield
    finally:
        torch.set_grad_enabled(before)


def fills_memory() -> bool:
    """Whether torch writes to new memory in its deterministic mode."""
    return bool(torch_deterministic.fill_uninitialized_memory)  # pyright: ignore


class Progress:
    """A progress bar if one is wanted and tqdm is installed; else nothing."""

    def __init__(self, steps: int, log_every: int, *, shown: bool) -> None:
        self._steps, self._log_every, self._started = steps, log_every, time.perf_counter()
        self._bar: Any = None
        if shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=steps, unit="step")

    def update(self, metrics: list[Any]) -> None:
        """Count one more step. The loss is read only every `log_every` steps."""
        if self._bar is None:
            return
        self._bar.update()
        if len(metrics) % self._log_every == 0 or len(metrics) == self._steps:
            seconds = time.perf_counter() - self._started
            tokens, samples = sum(m.tokens for m in metrics), sum(m.samples for m in metrics)
            rate, unit = (tokens, "tokens") if tokens else (samples, "samples")
            loss = metrics[-1].loss.item()
            self._bar.set_postfix_str(f"loss {loss:.3f}, {rate / seconds:,.0f} {unit}/s")

    def close(self) -> None:
        """End the bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.close()


def train_for(
    step: Callable[[Any], StepMetrics],
    batches: Iterator[Any],
    steps: int,
    bar: Progress,
    stop: StopRequest | None,
) -> list[StepMetrics]:
    """Take steps until there are so many, or all ranks stop after the same one."""
    metrics: list[StepMetrics] = []
    try:
        for _ in range(steps):
            metrics.append(step(next(batches)))
            bar.update(metrics)
            if stop is not None and stop.due():
                break
    finally:
        bar.close()
    return metrics
