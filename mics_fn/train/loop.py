"""A loop of steps, and what it needs around them: reproducible numbers, and how far it is."""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch.utils import deterministic as torch_deterministic

from mics_fn import checks
from mics_fn.errors import CheckpointError
from mics_fn.groups import StopRequest, Telling
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


def check_fit(loader: Any, steps: Any, log_every: Any, progress: Any, stop: Any) -> None:
    """Raise PlanError unless the arguments of `Trainer.fit` are what they should be."""
    verb, fix = "Trainer.fit", "the order is fit(loader, steps); a loader gives a batch per step"
    if isinstance(loader, str | bytes | Mapping):  # would be gone through by character or by key
        checks.refuse(verb, "loader", loader, "batches", fix)
    checks.instance(verb, "loader", loader, Iterable, "batches", fix)
    checks.integer(verb, "steps", steps, 0, fix="pass the number of optimizer steps to take")
    checks.integer(verb, "log_every", log_every, fix="progress=False shows nothing")
    checks.flag(verb, "progress", progress)
    fix = "with StopRequest(groups) as stop: trainer.fit(loader, steps, stop=stop)"
    checks.instance(verb, "stop", stop, StopRequest | None, "a StopRequest", fix)


class Progress:
    """A progress bar, if one is wanted; lines if tqdm is not installed."""

    def __init__(self, steps: int, log_every: int, *, shown: bool) -> None:
        self._steps, self._log_every, self._started = steps, log_every, time.perf_counter()
        self._bar: Any = None
        self._shown = shown
        if shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=steps, unit="step")

    def update(self, metrics: list[Any]) -> None:
        """Count one more step. The loss is read only every `log_every` steps."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.update()
        done = len(metrics)
        if done % self._log_every == 0 or done == self._steps:
            seconds = time.perf_counter() - self._started
            tokens, samples = sum(m.tokens for m in metrics), sum(m.samples for m in metrics)
            rate, unit = (tokens, "tokens") if tokens else (samples, "samples")
            text = f"loss {metrics[-1].loss.item():.3f}, {rate / seconds:,.0f} {unit}/s"
            if self._bar is not None:
                self._bar.set_postfix_str(text)
            else:
                print(f"step {done}/{self._steps}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.close()


def train_for(
    trainer: Any, loader: Iterable[Any], steps: int, bar: Progress, stop: StopRequest | None
) -> list[StepMetrics]:
    """Take steps until there are so many, or all ranks stop after the same one."""
    metrics: list[StepMetrics] = []
    home = trainer.member.home
    try:
        with (
            Telling(home.life, trainer.state.step + 1),  # of the loader, or of the bar
            closing(trainer.epochs.batches(loader, home)) as batches,
        ):
            for _ in range(steps):
                batch = next(batches)
                try:
                    metrics.append(trainer.step(batch))
                except CheckpointError:  # an earlier save failed; this one may be the last chance
                    if stop is not None and stop.due():
                        trainer.checkpoint.save(trainer)
                    raise
                bar.update(metrics)
                if stop is not None and stop.due():
                    trainer.checkpoint.save(trainer)
                    break
    except BaseException:
        trainer.epochs.interrupted = True
        raise
    finally:
        bar.close()
    trainer.checkpoint.close()
    return metrics
