"""A short loop around the verbs: `Trainer`, the samples of a rank, and when replicas are merged.

`Trainer` composes the verbs of the lower wings; a loop written by hand can do the same. It reads
a module and never changes it. One call is one step, with `accumulate` micro-steps:

  >>> from mics_fn.optim import sgd
  >>> groups = make_groups(1)
  >>> loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
  >>> model = torch.nn.Linear(1, 1)
  >>> trainer = Trainer(model, sgd(0.3), groups, loss=loss, accumulate=2)
  >>> x = torch.linspace(-1, 1, 8).unsqueeze(1)
  >>> metrics = trainer.fit([(x, 2 * x + 1)], steps=60, progress=False)
  >>> round(trainer.params()["weight"].item(), 2), round(metrics[-1].loss.item(), 4)
  (2.0, 0.0)

Its words:

- A *program* is a model or a loss function as one call, which gives a loss and runs its backward
  while the parameters are swapped in.
- A *batch* is tensors in tuples, lists, mappings (such as transformers' `BatchEncoding`),
  dataclasses or pytree nodes. Tensors are cut along dim 0 into micro-batches, and so are lists of
  strings with one per sample. Numbers and other strings go to each micro-step, and what cannot be
  opened is refused. Give all ranks equally many samples, as `sampler` does, so that the mean over
  ranks is the mean over samples.
- *Buffers* of a module, such as BatchNorm's statistics, are values in `TrainState`. Those that
  share memory go on doing so; one in the memory of a parameter raises LeafError.
- Replicas are *apart* while each steps on gradients of its own, and a *merge* makes them equal.
  `Trainer(replica_sync=local_sgd(16))` averages parameters every 16 steps instead of gradients in
  each; with `diloco(16)` an outer optimizer follows what the replicas did. Between merges `unshard`
  gives the parameters of this replica. The state of the inner optimizer always stays its own.

Equal runs: `Trainer(deterministic=True)` uses torch's deterministic algorithms and
`placement.fixed_order(groups)`, with which every reduction adds up in the order of ranks: hop 1
level by level from the innermost, then micro-steps in order, then replicas. Two runs then give
equal bits, which gloo and NCCL alone do not promise.

Ctrl-C: a step is taken in full or not at all, on all ranks that reduce together, and
`KeyboardInterrupt` is raised right after its last write; see [Note: commit] in `interrupts`. A
merge of replicas communicates while it writes, so Ctrl-C waits for it, `timeout_s` at most.

Preemption: `with mf.groups.StopRequest(groups) as stop:` around `trainer.fit(loader, steps,
stop=stop)` lets SIGTERM or SIGUSR1, on any rank, end the loop on all ranks after the same step.
Then `stop.stopping` is true: save, and exit with 0. A loop by hand asks `stop.due()` after a step.

Limits: a layer that mixes dtypes, such as a norm in float32 inside a bfloat16 model, must accept
the inputs that it gets, since only calls of the model are cast. A refused step changes nothing but
the guard. On NCCL the host does not wait for collectives, so it notices a rank that left a schedule
only when a run ends. There is no checkpoint format yet: save `trainer.params()` on one rank, which
does not include optimizer state.

Where to start reading: `Trainer.step` in `trainer`, then `program`, `given` (arguments and their
checks), `batch` and `buffers`. `syncing` and `replicas` are about merges, and `data` about samples.
To add a way of merging, write a function in `replicas` that returns a `ReplicaSync` with a `begin`
and a `merge`. To add an option of the step, build it as a value of a lower wing first, so that
loops written by hand have it too.
"""

from mics_fn.train import replicas
from mics_fn.train.data import sampler
from mics_fn.train.metrics import StepMetrics
from mics_fn.train.trainer import Trainer

__all__ = [
    "StepMetrics",
    "Trainer",
    "replicas",
    "sampler",
]
