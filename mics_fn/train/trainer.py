"""A short stateful loop around the verbs; a hand-written step can do everything that it does."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mics_fn.collectives import mean_over_ranks
from mics_fn.deferred import GradSum, bucket_sizes, defer
from mics_fn.groups import StopRequest, Telling
from mics_fn.interrupts import Commit
from mics_fn.optim import Guard, TrainState, Verdict, init_state, opt_step, same_step
from mics_fn.schedules import OnDemand, Schedule
from mics_fn.shards import Precision, precision_of, refuse_derivative, unshard
from mics_fn.train.batch import count, cut, to_device
from mics_fn.train.buffers import Values
from mics_fn.train.data import Epochs
from mics_fn.train.defaults import schedules_for
from mics_fn.train.given import as_shards, check_buffers, homes_for
from mics_fn.train.loop import Progress, learning, train_for
from mics_fn.train.metrics import StepMetrics, averaged
from mics_fn.train.options import compare_options, start_comparison
from mics_fn.train.program import program_of
from mics_fn.train.replicas import every_step
from mics_fn.train.resetting import at_one_step, on_new_groups
from mics_fn.train.syncing import ReplicaSync
from mics_fn.tree import Tree


class Trainer:
    """Trains a model whose states are sharded, one call per step.

    Args:
      model: an `nn.Module`, which is read once and never changed (its parameters, buffers and tied
        weights are found); or a pure `loss_fn(params, batch) -> scalar`.
      optimizer: a `Transform`, or any object with `init` and `update`.
      groups: as for `shard`, with or without a placement. Buffers and metrics use the first groups
        in it.
      loss: `loss(model, batch) -> scalar`. By default the model is called with the batch (a tuple
        or dict is unpacked), and the loss is its result, or the `.loss` of that.
      params: a pytree of tensors, for a `loss_fn`; or the shards that `init_model` gave with this
        skeleton.
      accumulate: the number of micro-steps per step. Every tensor of a batch, and every list of
        strings with one per sample, is cut into so many parts along dim 0.
      precision: a `Precision` or its text. At each call of the model its inputs are cast to
        `compute` and its result to `output`; `loss` gets a stand-in for the model that does this.
      guard: scales the loss, clips gradients, and decides which steps are refused.
      replica_sync: when replicas are merged; by default hop 2 in every step.
      deterministic: make equal runs give equal bits. In a step torch then uses deterministic
        algorithms, and reductions add up in the order of ranks.
      check_replicas: every so many steps replicas are compared bit by bit; 0 for never.
      on_drift: raise DesyncError if they differ, or "heal" as `optim.same_replicas` does.
      live_bytes: budget for gathered parameters, as for `on_demand`. "auto" is a quarter of the
        memory of the smallest device, or of a rank's share of the CPU's memory. With None, or if
        all parameters fit, it is as with `keep_all`, until the last backward pass: there gradients
        take the memory of their parameters, once nothing needs these.
      prefetch: as for `on_demand`.
      schedule: a `Schedule` or a policy, used instead of `live_bytes` and `prefetch`.
      grad_dtype: dtype of the sum of gradients over micro-steps; default that of the precision, at
        least float32.
      replicas, source_rank, frozen: as for `shard`. These and the next two cannot be given with
        shards.
      bucket_bytes: as for `shard`; default a sixteenth of the parameters, from 1 to 25 MiB.
      order: as for `shard`; default the module's own order.

    Communication: that of `shard` when it is made, and 32 bytes to compare options. In a step each
      bucket is gathered once if all fit the budget, else each time that it is needed again. There
      is one hop 1 per micro-step, one hop 2, and what the guard needs. At the end persistent float
      buffers are averaged over all ranks, or over those of a replica while replicas are apart;
      integer and non-persistent buffers stay as this rank computed them.

    Memory: 1/p of the states. Within a step also `live_bytes` and one bucket of gathered
      parameters, 1/p of the gradients, and a few buckets of them in full. With None these 1/p lie
      in the memory of the parameters if `accumulate` is 1 and they travel in the dtype of the
      shards. Placements keep more.

    Raises:
      TreeError: names, shapes or ties of `params` differ from those of the model.
      LeafError: a parameter or buffer has no value, is on another device than the groups, or
        overlaps with another one in memory.
      PlanError: shards were made for other groups or another precision, or an option has no effect.
      DesyncError: ranks have other options that change numbers; on all of them, by name.

    Example:
      >>> from mics_fn.optim import sgd
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
        check_replicas: int = 100,
        on_drift: Literal["raise", "heal"] = "raise",
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
        self.on_drift: Literal["raise", "heal"] = on_drift
        self.replica_sync, self.grad_dtype = replica_sync or every_step(), grad_dtype
        self.check_replicas = check_replicas
        self._program = program_of(model, loss, params, self.precision)
        own, buffers = self._program.take()
        groups, self._home = homes_for(groups, own if params is None else params, deterministic)
        self.groups, self._step_groups = groups, self.replica_sync.groups(groups)
        check_buffers(buffers, self._home)
        options: dict[str, Any] = {
            "replicas": replicas, "source_rank": source_rank, "frozen": frozen,
            "bucket_bytes": bucket_bytes, "order": order,
        }  # fmt: skip
        options = {name: value for name, value in options.items() if value is not None}
        wanted = None if precision is None else self.precision
        params = as_shards(own, params, groups, self._home, wanted, options)
        self.guard.check_groups(params, groups)
        full_bytes = sum(bucket_sizes(params, groups))
        chosen, self._eval_schedule = schedules_for(live_bytes, prefetch, full_bytes, self._home)
        self.schedule = schedule or chosen
        self.state: TrainState = init_state(params, optimizer, buffers=buffers)
        compare_options(self, params, groups)
        self.sync_state = self.replica_sync.init(params, groups)
        # Whether all ranks are known to be at one step; replicas that are apart need not be.
        self._epochs, self._compared = Epochs(), self.replica_sync.apart

    def step(self, batch: Any) -> StepMetrics:
        """One optimizer step.

        Args:
          batch: this rank's samples of the whole step, along dim 0 of tensors, in tuples, lists,
            mappings, dataclasses or pytree nodes.

        Returns:
          `StepMetrics`; the new state is `self.state`.

        Communication: gathers, hop 1 in each micro-step, one hop 2, what the guard needs, and the
          mean of the buffers. The first one compares `state.step` between ranks.

        Raises:
          TreeError: dim 0 of a tensor is not a multiple of `accumulate`, or an object that has to
            be cut or moved cannot be opened.
          LeafError: the loss gave no parameter a gradient on any rank; or it is called inside
            torch.func, where a step has no derivative.
          TornStepError: in the first call, if ranks hold states of different steps.
          DesyncError: replicas have drifted apart; the step was not taken.
          PeerFailed: another rank failed in this step.
          GroupsError: the groups were closed or have failed, or another thread uses them.
          NonFiniteError: the guard raises it; the step was not taken.
        """
        refuse_derivative("Trainer.step", (), "call it outside of torch.func")
        with self._home.life.turns.alone(), Telling(self._home.life, self.state.step):
            return self._one_step(batch)

    def _one_step(self, batch: Any) -> StepMetrics:
        if not self._compared:  # a state may have been put in its place since
            same_step(self.state, self.groups)
            self._compared = True
        started, guard = time.perf_counter(), self.guard
        batch = to_device(batch, self._home.device)
        parts, state, losses = cut(batch, self.accumulate), self.state, []
        drift = start_comparison(self, self._program.buffers.averaged)
        buffers = self._program.buffers.copies(state.buffers)
        total, commit = GradSum(self.accumulate, dtype=self.grad_dtype), Commit()
        total.before_last = commit.hold  # see [Note: commit] in `interrupts`
        with commit, learning(self.deterministic):
            with defer(state.params, self._step_groups, self.schedule, into=total) as full:
                for part in parts:
                    loss, buffers = self._program(
                        full, buffers, part, lambda loss: total.backward(guard.scale.scale(loss))
                    )
                    losses.append(loss)
            del full  # else the update would copy shards that parameters share
            commit.hold()
            grads = total.grads()
            if drift is not None:
                self.state = drift.finish(self.on_drift)
            verdict = self._update(grads, buffers, commit)
            total.release()
        loss = torch.stack(losses).mean()
        samples, tokens = (number * self._home.world_size for number in count(batch))
        seconds, scale = time.perf_counter() - started, guard.scale.value
        found = verdict.norm, scale, verdict.accept, verdict.spike, verdict.nonfinite
        return StepMetrics(self.state.step, loss, samples, tokens, seconds, *found)

    @torch.no_grad()
    def _update(self, grads: Tree, buffers: Values, commit: Commit) -> Verdict:
        """The optimizer's step if the guard accepts it, and the merge of replicas if it is due."""
        verdict, state = self.guard.judge(grads, self.groups, donate=True), self.state
        sync, home = self.replica_sync, self._home
        if verdict.accept:
            home = home if sync.due(self.sync_state) else sync.groups(home)
            buffers = self._program.buffers.average(buffers, home)
        commit.write()  # no collective is left, but those of a merge
        if verdict.accept:
            state = replace(opt_step(state, verdict.grads, donate=True), buffers=buffers)
        merged = sync.after(state.params, self.sync_state, self.groups, donate=True)
        params, self.sync_state = merged
        self.state, self.guard = replace(state, params=params), verdict.next
        return verdict

    def eval(self, batch: Any) -> Tensor:
        """The loss of a batch in evaluation mode, averaged over all ranks; no state changes.

        Args:
          batch: this rank's samples.

        Returns:
          0-dim tensor on the device.

        Communication: the gathers of one forward, and an all-reduce of one number over each of the
          two groups.

        Raises:
          LeafError: it is called inside torch.func, where the result has no derivative.
        """
        refuse_derivative("Trainer.eval", (), "call it outside of torch.func")
        batch = to_device(batch, self._home.device)
        buffers = self._program.buffers.copies(self.state.buffers)
        with (
            self._home.life.turns.alone(),
            torch.no_grad(),
            self._program.evaluating(),
            defer(self.state.params, self.groups, self._eval_schedule) as full,
        ):
            loss = self._program(full, buffers, batch).loss
        return mean_over_ranks(self._home, loss.clone())

    def params(self) -> Tree:
        """Full parameters as plain tensors, on every rank, for export.

        Returns:
          The tree that was sharded; for a module a dict from name to tensor. While replicas are
          apart they are those of this rank's replica.

        Communication: as for `unshard`.
        """
        return unshard(self.state.params, self.groups)

    def reset(self, *, heal: bool = True) -> None:
        """Go on after an error has ended the groups: new ones, all ranks at one step. All call it.

        The state, the guard, when replicas are merged, the epochs of `fit` and the learned order of
        fetches are kept, and nothing of a step that was not completed.

        Args:
          heal: let a rank that is behind take the newer state from a replica.

        Communication: that of `mics_fn.reset`, and small all-gathers over the partition group and
          over the replication group. To heal, that of `optim.same_step`.

        Raises:
          TornStepError: on all ranks, if they are at different steps, and `heal` is false or no
            replica that steps together with the others has all of the newest state.
          CollectiveTimeoutError: some rank did not call it in time.
        """
        self.groups, self._home = on_new_groups(self.groups, self.state.params, self._home)
        self._step_groups, self._compared = self.replica_sync.groups(self.groups), False
        self.state, self.sync_state, self.guard = at_one_step(self, heal=heal)
        self._compared = True

    def fit(
        self,
        loader: Iterable[Any],
        steps: int,
        *,
        log_every: int = 10,
        progress: bool = True,
        stop: StopRequest | None = None,
    ) -> list[StepMetrics]:
        """Train for a number of steps; the first rank shows a progress bar where tqdm is installed.

        Args:
          loader: gives this rank's batches, and is started again when it ends. If it or its sampler
            has `set_epoch`, that is called before each pass, so that each has another order. A
            later `fit` goes on with the next epoch.
          steps: the number of optimizer steps.
          log_every: steps between updates of the bar's loss and rate.
          progress: whether to show the bar.
          stop: with it, a signal ends the loop on all ranks after the same step, in which
            `stop.stopping` becomes true; its metrics are the last ones.

        Returns:
          The metrics of each step, with losses averaged over ranks.

        Communication: that of the steps, and one small all-reduce over each of the two groups at
          the end.

        Raises:
          ValueError: the loader is empty.
        """
        bar = Progress(steps, log_every, shown=progress and self._home.position == 0)
        batches = self._epochs.batches(loader)
        return averaged(train_for(self.step, batches, steps, bar, stop), self._home)
