"""A short stateful loop around the verbs; all that it does, a hand-written step can do."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mics_fn import tree
from mics_fn.agreement import collect_all
from mics_fn.collectives import mean_over_ranks
from mics_fn.data import Epochs
from mics_fn.errors import TreeError, message
from mics_fn.gather import defer, unshard
from mics_fn.grad_sum import GradSum
from mics_fn.groups import Groups
from mics_fn.layout import BUCKET_BYTES
from mics_fn.optim import TrainState, init_state, opt_step
from mics_fn.policy import OnDemand, keep_all, on_demand
from mics_fn.program import Buffers, FunctionProgram, ModuleProgram
from mics_fn.schedule import Schedule
from mics_fn.sharded import shard
from mics_fn.tree import Tree


class StepMetrics(NamedTuple):
    """What a step reports.

    Args:
      step: optimizer steps done after it.
      loss: 0-dim tensor on the device; this rank's mean over micro-steps (`fit` averages it over
        ranks).
      samples: on all ranks together.
      tokens: elements of the batch's first integer tensor, on all ranks together; 0 if it has none.
      seconds: host time of the call.
    """

    step: int
    loss: Tensor
    samples: int
    tokens: int
    seconds: float


class Trainer:
    """Trains a model whose states are sharded, one call a step.

    Args:
      model: an `nn.Module` (it is read once, never changed; parameters, buffers and tied weights
        are found in it), or a pure `loss_fn(params, batch) -> scalar`.
      optimizer: a `Transform`, or anything of `init` and `update`.
      groups: as for `shard`; buffers and metrics use the first groups in it.
      loss: `loss(model, batch) -> scalar`; default calls the model with the batch (a tuple or dict
        is spread) and takes the result, or its `.loss`.
      params: pytree of tensors, with a `loss_fn`.
      accumulate: micro-steps a step; every tensor of a batch is cut in that many along dim 0.
      live_bytes: budget for gathered parameters, as for `on_demand`; "auto" is a quarter of the
        device's memory (of the smallest device; on the CPU a rank's share of it). If all fit, or
        with None, it is as `keep_all`.
      prefetch: as for `on_demand`.
      schedule: a `Schedule` or policy of your own, instead of these two.
      grad_dtype: of the sum of gradients over micro-steps; default the parameters'.
      replicas, source_rank, frozen: as for `shard`.
      bucket_bytes: as for `shard`; default a sixteenth of the parameters, 1 to 25 MiB.

    Communication: building it as `shard`. A step: each bucket is gathered once if all fit the
      budget, else again when it is needed again; hop 1 each micro-step, one hop 2; persistent
      float buffers are averaged over all ranks at the end (integer and non-persistent ones stay as
      this rank computed them).

    Memory: states of 1/p; within a step `live_bytes` and a bucket of gathered parameters, 1/p of
      the gradients and a few buckets of them in full.

    Example:
      >>> groups = make_groups(1)
      >>> loss = lambda model, x: model(x).square().mean()
      >>> trainer = Trainer(torch.nn.Linear(2, 1), sgd(0.1), groups, loss=loss)
      >>> trainer.step(torch.ones(4, 2)).samples
      4
    """

    def __init__(
        self,
        model: nn.Module | Callable[[Tree, Any], Tensor],
        optimizer: Any,
        groups: Any,
        *,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        params: Tree = None,
        accumulate: int = 1,
        live_bytes: int | Literal["auto"] | None = "auto",
        prefetch: int = 4,
        schedule: Schedule | OnDemand | None = None,
        grad_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"Trainer: accumulate={accumulate}, expected an int of at least 1")
        self.groups, self.accumulate = groups, accumulate
        self._program: ModuleProgram | FunctionProgram
        buffers: Buffers = {}
        if isinstance(model, nn.Module):
            self._program = ModuleProgram(model, loss)
            params, buffers = self._program.take_params(), self._program.buffers
            place = {f"[{name!r}]": i for i, name in enumerate(params)}
            options.setdefault("order", lambda path: place[path])
        elif params is None:
            fix = "pass the pytree that it is called with"
            raise TreeError(message("Trainer: a loss_fn needs params=", fix=fix))
        else:
            self._program = FunctionProgram(model)
        homes = tree.spread(groups, params, what="groups", is_value=lambda v: isinstance(v, Groups))
        self._home: Groups = homes[0] if homes else groups
        options.setdefault("bucket_bytes", _bucket_bytes(params, self._home))
        shards = shard(params, groups, **options)
        if live_bytes == "auto":
            live_bytes = _quarter_of_memory(self._home)
        if live_bytes is not None and live_bytes >= _float_bytes(params):
            live_bytes = None
        # Evaluation uses parameters in another order than training, so it has a memory of its own.
        own, self._eval_schedule = (
            keep_all()
            if live_bytes is None
            else on_demand(live_bytes=live_bytes, prefetch=prefetch)
            for _ in range(2)
        )
        self.schedule = schedule or own
        self.grad_dtype = grad_dtype
        self.state: TrainState = init_state(shards, optimizer, buffers=buffers)
        self._epochs = Epochs()

    def step(self, batch: Any) -> StepMetrics:
        """One optimizer step on this rank's samples of it.

        Args:
          batch: pytree of tensors, this rank's samples of the whole step along dim 0.

        Returns:
          `StepMetrics`; the new state is `self.state`.

        Communication: gathers, hop 1 each micro-step, one hop 2, and the mean of the buffers.

        Raises:
          TreeError: a tensor's dim 0 can not be cut in `accumulate` equal parts.
        """
        started = time.perf_counter()
        batch = _to(batch, self._home.device)
        parts, state, losses = _cut(batch, self.accumulate), self.state, []
        buffers = {name: value.clone() for name, value in state.buffers.items()}
        total = GradSum(self.accumulate, dtype=self.grad_dtype)
        full, cache = defer(state.params, self.groups, self.schedule, total)
        with torch.enable_grad():
            for part in parts:
                loss, buffers = self._program(full, buffers, part, total.backward)
                losses.append(loss)
        cache.close()
        grads = total.grads()
        buffers = self._average(buffers)
        self.state = replace(opt_step(state, grads, donate=True), buffers=buffers)
        total.release()
        samples, tokens = _count(batch)
        n, loss = self._home.world_size, torch.stack(losses).mean()
        seconds = time.perf_counter() - started
        return StepMetrics(self.state.step, loss, samples * n, tokens * n, seconds)

    def _average(self, buffers: Buffers) -> Buffers:
        """Persistent float buffers become their mean over all ranks, coalesced by dtype."""
        names = getattr(self._program, "averaged", [])
        if self._home.world_size == 1:
            return buffers
        for dtype in dict.fromkeys(buffers[name].dtype for name in names):
            mine = [name for name in names if buffers[name].dtype == dtype]
            flat = torch.cat([buffers[name].flatten() for name in mine])
            sizes = [buffers[name].numel() for name in mine]
            means = mean_over_ranks(self._home, flat).split(sizes)
            for name, mean in zip(mine, means, strict=True):
                buffers[name] = mean.view(buffers[name].shape)
        return buffers

    def eval(self, batch: Any) -> Tensor:
        """The loss of a batch in evaluation mode, averaged over all ranks; nothing changes.

        Args:
          batch: this rank's samples.

        Returns:
          0-dim tensor on the device.

        Communication: one gather, and an all-reduce of one number over each of the two groups.
        """
        batch = _to(batch, self._home.device)
        buffers = {name: value.clone() for name, value in self.state.buffers.items()}
        with torch.no_grad(), self._program.evaluating():
            full, cache = defer(self.state.params, self.groups, self._eval_schedule)
            loss = self._program(full, buffers, batch).loss
            cache.close()
        return mean_over_ranks(self._home, loss.clone())

    def params(self) -> Tree:
        """Full parameters as plain tensors, on every rank, for export.

        Returns:
          The tree that was sharded; for a module a dict from name to tensor.

        Communication: as `unshard`.
        """
        return unshard(self.state.params, self.groups)

    def fit(
        self, loader: Iterable[Any], steps: int, *, log_every: int = 10, progress: bool = True
    ) -> list[StepMetrics]:
        """Train for a number of steps; the first rank shows a progress bar where tqdm is installed.

        Args:
          loader: gives this rank's batches; it is started again when it ends. Its sampler (or the
            loader) is told the epoch, if it has `set_epoch`, so that each pass has another order.
            A later `fit` goes on with the next epoch.
          steps: optimizer steps to take.
          log_every: steps between updates of the bar's loss and rate.
          progress: whether to show the bar.

        Returns:
          Metrics of each step, with losses averaged over ranks.

        Communication: that of the steps; one small all-reduce over each of the two groups at the
          end.

        Raises:
          ValueError: the loader is empty.
        """
        metrics: list[StepMetrics] = []
        bar = _bar(steps) if progress and self._home.position == 0 else None
        started, batches = time.perf_counter(), self._epochs.batches(loader)
        try:
            for _ in range(steps):
                metrics.append(self.step(next(batches)))
                if bar is not None:
                    bar.update()
                    if len(metrics) % log_every == 0 or len(metrics) == steps:
                        bar.set_postfix_str(_rate(metrics, time.perf_counter() - started))
        finally:
            if bar is not None:
                bar.close()
        if not metrics:
            return metrics
        losses = mean_over_ranks(self._home, torch.stack([m.loss for m in metrics]))
        return [m._replace(loss=loss) for m, loss in zip(metrics, losses, strict=True)]


def _float_bytes(params: Tree) -> int:
    """Bytes of the full parameters, tied ones once."""
    leaves = {id(x): x for x in tree.flatten(params)[0] if isinstance(x, Tensor)}
    return sum(x.nbytes for x in leaves.values() if x.is_floating_point())


def _bucket_bytes(params: Tree, home: Groups) -> int:
    """Small enough that a model has buckets to overlap, large enough for the network."""
    if home.world_size == 1:
        return BUCKET_BYTES
    return min(BUCKET_BYTES, max(2**20, _float_bytes(params) // 16))


def _quarter_of_memory(home: Groups) -> int:
    """A quarter of the memory that a rank has, the same number on all ranks."""
    if home.device.type == "cuda":
        found = torch.cuda.get_device_properties(home.device).total_memory
    else:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found //= home.plan.topology.sizes[-1]
    mine = torch.tensor(found // 4, dtype=torch.int64, device=home.device)
    return int(min(other.item() for other in collect_all(home, mine).values()))


def _to(batch: Any, device: torch.device) -> Any:
    return tree.map_leaves(
        lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, batch
    )


def _cut(batch: Any, parts: int) -> list[Any]:
    """A batch as equal micro-batches along dim 0; what is no tensor goes to each."""
    if parts == 1:
        return [batch]
    leaves, spec = tree.flatten(batch)
    for leaf, path in zip(leaves, tree.paths(batch, "batch"), strict=True):
        if isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] % parts):
            text = f"Trainer.step: {path} has shape {tuple(leaf.shape)}, accumulate={parts}"
            raise TreeError(message(text, fix="make dim 0 a multiple of accumulate"))
    cut = [x.chunk(parts) if isinstance(x, Tensor) else (x,) * parts for x in leaves]
    return [spec.unflatten([each[i] for each in cut]) for i in range(parts)]


def _count(batch: Any) -> tuple[int, int]:
    """Samples and tokens of a batch."""
    tensors = [x for x in tree.flatten(batch)[0] if isinstance(x, Tensor) and x.ndim]
    whole = next((x for x in tensors if not x.is_floating_point() and x.ndim > 1), None)
    return (tensors[0].shape[0] if tensors else 1), (0 if whole is None else whole.numel())


def _rate(metrics: list[StepMetrics], seconds: float) -> str:
    tokens, samples = sum(m.tokens for m in metrics), sum(m.samples for m in metrics)
    rate = f"{tokens / seconds:,.0f} tokens/s" if tokens else f"{samples / seconds:,.0f} samples/s"
    return f"loss {metrics[-1].loss.item():.3f}, {rate}"


def _bar(steps: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=steps, unit="step")
