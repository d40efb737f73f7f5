"""A short stateful loop around the verbs; all that it does, a hand-written step can do."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mics_fn.collectives import mean_over_ranks
from mics_fn.deferred import GradSum, bucket_sizes, defer
from mics_fn.errors import TreeError, message
from mics_fn.optim import Guard, TrainState, Verdict, init_state, opt_step
from mics_fn.schedules import OnDemand, Schedule
from mics_fn.shards import Precision, precision_of, refuse_derivative, unshard
from mics_fn.train.batch import count, cut, to_device
from mics_fn.train.buffers import Values
from mics_fn.train.data import Epochs
from mics_fn.train.defaults import schedules_for
from mics_fn.train.given import as_shards, check_buffers, homes_for
from mics_fn.train.loop import Progress, reproducible
from mics_fn.train.program import FunctionProgram, ModuleProgram
from mics_fn.train.replicas import ReplicaSync, every_step
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
      grad_norm: 0-dim float64 tensor, of the gradient before it was clipped; None where the guard
        needs none.
      scale: what the loss was scaled by.
      accepted: whether the step was taken; if not, nothing changed but the guard.
      spike: whether the norm was a spike.
    """

    step: int
    loss: Tensor
    samples: int
    tokens: int
    seconds: float
    grad_norm: Tensor | None = None
    scale: float = 1.0
    accepted: bool = True
    spike: bool = False


class Trainer:
    """Trains a model whose states are sharded, one call a step.

    Args:
      model: an `nn.Module` (it is read once, never changed; parameters, buffers and tied weights
        are found in it), or a pure `loss_fn(params, batch) -> scalar`.
      optimizer: a `Transform`, or anything of `init` and `update`.
      groups: as for `shard`, with a placement or without; buffers and metrics use the first groups
        in it.
      loss: `loss(model, batch) -> scalar`; default calls the model with the batch (a tuple or dict
        is spread) and takes the result, or its `.loss`.
      params: pytree of tensors, with a `loss_fn`; or shards that `init` gave, with its skeleton.
      accumulate: micro-steps a step; every tensor of a batch, and every list of strings with one a
        sample, is cut in that many along dim 0.
      precision: a `Precision` or its text. Inputs of the model are cast to `compute` and what it
        returns to `output` at each call; `loss` gets a stand-in for the model that does so.
      guard: scale of the loss, clipping, and which steps are refused.
      replica_sync: when replicas become one; default hop 2 in every step.
      deterministic: equal runs give equal bits: torch uses deterministic algorithms in a step, and
        reductions add up in the order of ranks.
      live_bytes: budget for gathered parameters, as for `on_demand`; "auto" is a quarter of the
        device's memory (of the smallest device; on the CPU a rank's share of it). If all fit, or
        with None, it is as `keep_all`.
      prefetch: as for `on_demand`.
      schedule: a `Schedule` or policy of your own, instead of these two.
      grad_dtype: of the sum of gradients over micro-steps; default that of the policy, at least
        float32.
      replicas, source_rank, frozen: as for `shard`; these and the next two not with shards.
      bucket_bytes: as for `shard`; default a sixteenth of the parameters, 1 to 25 MiB.
      order: as for `shard`; default the module's own order.

    Communication: building it as `shard`. A step: each bucket is gathered once if all fit the
      budget, else again when it is needed again; hop 1 each micro-step, one hop 2; what the guard
      needs; persistent float buffers are averaged at the end over all ranks, or over those of a
      replica while replicas are apart (integer and non-persistent ones stay as this rank computed
      them).

    Memory: states of 1/p; within a step `live_bytes` and a bucket of gathered parameters, 1/p of
      the gradients and a few buckets of them in full. A placement keeps more.

    Raises:
      TreeError: `params` are not those of the model: names, shapes, which are tied.
      LeafError: a parameter or buffer has no value, is on another device than the groups, or
        overlaps with another in memory.
      PlanError: shards were cut for other groups or another precision, or an option has no effect.

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
        precision: Precision | str | None = None,
        guard: Guard | None = None,
        replica_sync: ReplicaSync | None = None,
        deterministic: bool = False,
        live_bytes: int | Literal["auto"] | None = "auto",
        prefetch: int = 4,
        schedule: Schedule | OnDemand | None = None,
        grad_dtype: torch.dtype | None = None,
        replicas: Literal["check", "broadcast"] | None = None,
        source_rank: int | None = None,
        frozen: Callable[[str], bool] | None = None,
        bucket_bytes: int | None = None,
        order: Callable[[str], object] | None = None,
    ) -> None:
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"Trainer: accumulate={accumulate}, expected an int of at least 1")
        self.accumulate, self.deterministic = accumulate, deterministic
        self.precision, self.guard = precision_of(precision), guard or Guard()
        self.replica_sync, self.grad_dtype = replica_sync or every_step(), grad_dtype
        self._program: ModuleProgram | FunctionProgram
        own, buffers = None, {}
        if isinstance(model, nn.Module):
            self._program = ModuleProgram(model, loss, self.precision)
            own, buffers = self._program.take()
        else:
            self._program = FunctionProgram(model, self.precision)
            if params is None or loss is not None:
                text = "needs params=" if params is None else "takes no loss="
                fix = "pass the pytree that it is called with; it gives the loss itself"
                raise TreeError(message(f"Trainer: a loss_fn {text}", fix=fix))
        groups, self._home = homes_for(groups, own if params is None else params, deterministic)
        self.groups, self._step_groups = groups, self.replica_sync.groups(groups)
        check_buffers(buffers, self._home)
        options: dict[str, Any] = {
            "replicas": replicas, "source_rank": source_rank, "frozen": frozen,
            "bucket_bytes": bucket_bytes, "order": order,
        }  # fmt: skip
        options = {name: value for name, value in options.items() if value is not None}
        policy = None if precision is None else self.precision
        params = as_shards(own, params, groups, self._home, policy, options)
        self.guard.check_groups(params, groups)
        full_bytes = sum(bucket_sizes(params, groups))
        chosen, self._eval_schedule = schedules_for(live_bytes, prefetch, full_bytes, self._home)
        self.schedule = schedule or chosen
        self.state: TrainState = init_state(params, optimizer, buffers=buffers)
        self.sync_state = self.replica_sync.init(params, groups)
        self._epochs = Epochs()

    def step(self, batch: Any) -> StepMetrics:
        """One optimizer step on this rank's samples of it.

        Args:
          batch: tensors in tuples, lists, mappings, dataclasses or pytree nodes, this rank's
            samples of the whole step along dim 0; with a module, what `loss` takes.

        Returns:
          `StepMetrics`; the new state is `self.state`.

        Communication: gathers, hop 1 each micro-step, one hop 2, what the guard needs, and the mean
          of the buffers.

        Raises:
          TreeError: a tensor's dim 0 can not be cut in `accumulate` equal parts, or an object can
            not be opened that has to be cut or moved.
          LeafError: on no rank did the loss give any parameter a gradient; or inside torch.func: a
            step has no derivative.
        """
        refuse_derivative("Trainer.step", (), "call it outside of torch.func")
        started, guard = time.perf_counter(), self.guard
        batch = to_device(batch, self._home.device)
        parts, state, losses = cut(batch, self.accumulate), self.state, []
        buffers = self._program.buffers.copies(state.buffers)
        total = GradSum(self.accumulate, dtype=self.grad_dtype)
        with torch.enable_grad(), reproducible(self.deterministic):
            with defer(state.params, self._step_groups, self.schedule, into=total) as full:
                for part in parts:
                    loss, buffers = self._program(
                        full, buffers, part, lambda loss: total.backward(guard.scale.scale(loss))
                    )
                    losses.append(loss)
            verdict = self._update(total.grads(), buffers)
        total.release()
        samples, tokens = count(batch)
        n, loss = self._home.world_size, torch.stack(losses).mean()
        return StepMetrics(
            step=self.state.step,
            loss=loss,
            samples=samples * n,
            tokens=tokens * n,
            seconds=time.perf_counter() - started,
            grad_norm=verdict.norm,
            scale=guard.scale.value,
            accepted=verdict.accept,
            spike=verdict.spike,
        )

    @torch.no_grad()
    def _update(self, grads: Tree, buffers: Values) -> Verdict:
        """The optimizer's step, if the guard accepts it; and what the replicas do together."""
        verdict, state = self.guard.judge(grads, self.groups, donate=True), self.state
        if verdict.accept:
            home = self._home
            if not self.replica_sync.due(self.sync_state):
                home = self.replica_sync.groups(home)
            buffers = self._program.buffers.average(buffers, home)
            state = replace(opt_step(state, verdict.grads, donate=True), buffers=buffers)
        params, self.sync_state = self.replica_sync.after(
            state.params, self.sync_state, self.groups, donate=True
        )
        self.state, self.guard = replace(state, params=params), verdict.next
        return verdict

    def eval(self, batch: Any) -> Tensor:
        """The loss of a batch in evaluation mode, averaged over all ranks; nothing changes.

        Args:
          batch: this rank's samples.

        Returns:
          0-dim tensor on the device.

        Communication: one gather, and an all-reduce of one number over each of the two groups.

        Raises:
          LeafError: inside torch.func: the result has no derivative.
        """
        refuse_derivative("Trainer.eval", (), "call it outside of torch.func")
        batch = to_device(batch, self._home.device)
        buffers = self._program.buffers.copies(self.state.buffers)
        with (
            torch.no_grad(),
            self._program.evaluating(),
            defer(self.state.params, self.groups, self._eval_schedule) as full,
        ):
            loss = self._program(full, buffers, batch).loss
        return mean_over_ranks(self._home, loss.clone())

    def params(self) -> Tree:
        """Full parameters as plain tensors, on every rank, for export.

        Returns:
          The tree that was sharded; for a module a dict from name to tensor. Where replicas are
          apart, those of this rank's replica.

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
        shown = progress and self._home.position == 0
        bar, batches = Progress(steps, log_every, shown=shown), self._epochs.batches(loader)
        try:
            for _ in range(steps):
                metrics.append(self.step(next(batches)))
                bar.update(metrics)
        finally:
            bar.close()
        if not metrics:
            return metrics
        losses = mean_over_ranks(self._home, torch.stack([m.loss for m in metrics]))
        return [m._replace(loss=loss) for m, loss in zip(metrics, losses, strict=True)]
