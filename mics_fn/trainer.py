"""A short stateful loop around the verbs; all that it does, a hand-written step can do."""

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mics_fn import tree
from mics_fn.collectives import mean_over_ranks
from mics_fn.columns import map_columns
from mics_fn.errors import LeafError, TreeError, message
from mics_fn.gather import gather, unshard
from mics_fn.grads import scatter_grads, sync_replicas
from mics_fn.groups import Groups
from mics_fn.leaf import Sharded, is_leaf
from mics_fn.optim import TrainState, init_state, opt_step
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


class _Program(nn.Module):
    """Model and loss as one module, so that backward runs while `functional_call` has the parameters swapped in.

    A model that recomputes activations in backward would otherwise recompute with the skeleton's
    own.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any, variables: list[Tensor]) -> tuple[Tensor, tuple]:
        return _value_and_grad(self.loss(self.model, batch), variables)


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
      replicas, source_rank, frozen, bucket_bytes: as for `shard`.

    Communication: building it as `shard`. A step: one gather of the parameters, hop 1 each
      micro-step, one hop 2; persistent float buffers are averaged over all ranks at the end of each
      step (integer and non-persistent ones stay as this rank computed them).

    Memory: states of 1/p; within a step the full parameters and the full gradients of one
      micro-step.

    Example:
      >>> groups = make_groups(1)
      >>> trainer = Trainer(torch.nn.Linear(2, 1), sgd(0.1), groups, loss=lambda m, x:
      m(x).square().mean())
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
        **options: Any,
    ) -> None:
        if not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"Trainer: accumulate={accumulate}, expected an int of at least 1")
        self.groups, self.accumulate = groups, accumulate
        buffers: dict[str, Tensor] = {}
        self._averaged: list[str] = []
        if isinstance(model, nn.Module):
            skeleton, params, buffers, self._averaged = _take_apart(model)
            self._program = _Program(skeleton, loss or _own_loss)
            self._modes = [(m, m.training) for m in skeleton.modules()]
            place = {f"[{name!r}]": i for i, name in enumerate(params)}
            options.setdefault("order", lambda path: place[path])
        elif params is None:
            raise TreeError(
                message("Trainer: a loss_fn needs params=", fix="pass the pytree it is called with")
            )
        else:
            self._loss_fn, self._program, self._modes = model, None, []
        shards = shard(params, groups, **options)
        homes = tree.spread(groups, params, what="groups", is_value=lambda v: isinstance(v, Groups))
        self._home: Groups = homes[0] if homes else groups
        self.state: TrainState = init_state(shards, optimizer, buffers=buffers)

    def step(self, batch: Any) -> StepMetrics:
        """One optimizer step on this rank's samples of it.

        Args:
          batch: pytree of tensors, this rank's samples of the whole step along dim 0.

        Raises:
          TreeError: a tensor's dim 0 can not be cut in `accumulate` equal parts.
        """
        started = time.perf_counter()
        batch = _to(batch, self._home.device)
        parts = _cut(batch, self.accumulate)
        state, total, losses = self.state, None, []
        with torch.no_grad():
            full = gather(state.params, self.groups)
        buffers = {name: value.clone() for name, value in state.buffers.items()}
        for done, part in enumerate(parts):
            loss, grads, buffers = self._value_and_grad(state.params, full, buffers, part)
            losses.append(loss)
            hop1 = scatter_grads(grads, self.groups, like=state.params)
            del grads
            # torch may return one tensor as two gradients, so the first sum goes to new memory.
            add = total is not None
            total = (
                map_columns(lambda a, b: a.add_(b), total, hop1, donate=done > 1) if add else hop1
            )
        del full
        if self.accumulate > 1:
            total = map_columns(lambda a: a.div_(self.accumulate), total, donate=True)
        grads = sync_replicas(total, self.groups, donate=True)
        self.state = replace(opt_step(state, grads, donate=True), buffers=self._average(buffers))
        samples, tokens = _count(batch)
        n, loss = self._home.world_size, torch.stack(losses).mean()
        return StepMetrics(
            self.state.step, loss, samples * n, tokens * n, time.perf_counter() - started
        )

    def _value_and_grad(
        self, params: Tree, full: Tree, buffers: dict[str, Tensor], batch: Any
    ) -> tuple[Tensor, Tree, dict[str, Tensor]]:
        """Loss and full gradients (None where there is none), and the buffers after it."""
        slots, spec = tree.flatten(params, is_leaf)
        given = spec.flatten_up_to(full)
        fresh: dict[int, Tensor] = {}  # tied leaves are one tensor, so they become one variable
        for slot, value in zip(slots, given, strict=True):
            if isinstance(slot, Sharded):
                fresh[id(value)] = value.detach().requires_grad_()
        values = spec.unflatten([fresh.get(id(value), value) for value in given])
        variables = list(fresh.values())
        with torch.enable_grad():
            if self._program is None:
                loss, found = _value_and_grad(self._loss_fn(values, batch), variables)
            else:
                loss, found = self._call(values, buffers, batch, variables)
        by_id = dict(zip(fresh, found, strict=True))
        grads = [
            by_id[id(value)] if isinstance(slot, Sharded) else None
            for slot, value in zip(slots, given, strict=True)
        ]
        return loss, spec.unflatten(grads), buffers

    def _call(
        self, params: Tree, buffers: dict[str, Tensor], batch: Any, variables: list[Tensor]
    ) -> Any:
        tensors = {f"model.{name}": value for name, value in {**params, **buffers}.items()}
        out = functional_call(
            self._program, tensors, (batch, variables), tie_weights=False, strict=True
        )
        # A module that replaces a buffer, instead of writing to it, leaves the new one in the dict.
        buffers.update({name: tensors[f"model.{name}"].detach() for name in buffers})
        return out

    def _average(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._home.world_size > 1 and self._averaged:
            for dtype in dict.fromkeys(buffers[name].dtype for name in self._averaged):
                mine = [name for name in self._averaged if buffers[name].dtype == dtype]
                flat = torch.cat([buffers[name].flatten() for name in mine])
                sizes = [buffers[name].numel() for name in mine]
                for name, part in zip(
                    mine, mean_over_ranks(self._home, flat).split(sizes), strict=True
                ):
                    buffers[name] = part.view(buffers[name].shape)
        return buffers

    def eval(self, batch: Any) -> Tensor:
        """The loss of a batch in evaluation mode, averaged over all ranks; nothing changes.

        Args:
          batch: this rank's samples.

        Communication: one gather, and an all-reduce of one number over each of the two groups.
        """
        batch = _to(batch, self._home.device)
        try:
            for module, _ in self._modes:
                module.training = False
            with torch.no_grad():
                full = gather(self.state.params, self.groups)
                buffers = {name: value.clone() for name, value in self.state.buffers.items()}
                if self._program is None:
                    loss = self._loss_fn(full, batch)
                else:
                    loss, _ = self._call(full, buffers, batch, [])
        finally:
            for module, mode in self._modes:
                module.training = mode
        return mean_over_ranks(self._home, loss.detach().clone())

    def params(self) -> Tree:
        """Full parameters as plain tensors, on every rank; for export. Communication as `unshard`."""
        return unshard(self.state.params, self.groups)

    def fit(
        self, loader: Iterable[Any], steps: int, *, log_every: int = 10, progress: bool = True
    ) -> list[StepMetrics]:
        """Train for a number of steps, with one progress bar on the first rank (needs tqdm, from the `demo` extra).

        Args:
          loader: gives this rank's batches; it is started again when it ends.
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
        started, batches = time.perf_counter(), _cycle(loader)
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


def _take_apart(
    model: nn.Module,
) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor], list[str]]:
    """A skeleton on meta, the parameters, copies of the buffers, and the names of buffers to average."""
    params: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    memo: dict[int, Any] = {}
    for value in (*params.values(), *buffers.values()):
        empty = torch.empty_like(value, device="meta")
        is_param = isinstance(value, nn.Parameter)
        memo[id(value)] = nn.Parameter(empty, value.requires_grad) if is_param else empty
    saved = model.state_dict(keep_vars=True)
    averaged = [name for name, b in buffers.items() if name in saved and b.is_floating_point()]
    copies = {name: b.detach().clone() for name, b in buffers.items()}
    return copy.deepcopy(model, memo), params, copies, averaged


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    return out if isinstance(out, Tensor) else out.loss


def _value_and_grad(loss: Tensor, variables: list[Tensor]) -> tuple[Tensor, tuple]:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise LeafError(
            message(
                f"Trainer: the loss has {got}, expected one number", fix="return a scalar tensor"
            )
        )
    if not loss.requires_grad:  # nothing trained was used: every gradient is missing
        return loss.detach().reshape(()), (None,) * len(variables)
    return loss.detach().reshape(()), torch.autograd.grad(loss, variables, allow_unused=True)


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


def _cycle(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError("Trainer.fit: the loader gave no batch")


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
