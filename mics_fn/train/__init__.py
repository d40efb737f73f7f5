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

Its step is `train_step` in `stepping`, a pure function, here with nothing around it. A copy of its
text behind `from mics_fn.train.stepping import *` runs in a notebook: change there what you like.

  >>> from mics_fn.train.stepping import Program, RunState, StepOptions, train_step
  >>> model, loss = torch.nn.Linear(2, 1), lambda model, x: model(x).square().mean()
  >>> program = Program(model, loss)
  >>> params, buffers = program.take()
  >>> groups = make_groups(1)
  >>> train = init_state(shard(params, groups), optim.adamw(1e-2), buffers=buffers)
  >>> state = RunState(train, guard=optim.Guard(max_norm=1.0))
  >>> options = StepOptions(program, groups, groups, accumulate=2)
  >>> for _ in range(3):
  ...     state, metrics = train_step(options, state, torch.ones(4, 2))
  >>> state.train.step, metrics.samples
  (3, 4)

Its words:

- A *program* is a model or a loss function as one call, which gives a loss and runs its backward
  while the parameters are swapped in.
- A *batch* is tensors in tuples, lists, mappings (such as transformers' `BatchEncoding`),
  dataclasses or pytree nodes. Tensors are cut along dim 0 into micro-batches, and so are lists of
  strings with one per sample. Numbers and other strings go to each micro-step, and what cannot be
  opened is refused. Give all ranks equally many samples, as `sampler` does, so that the mean over
  ranks is the mean over samples; or the loss a `weight=`, such as its number of valid tokens.
- A step whose loss or gradient is not finite on some rank is *refused*: it changes nothing, but the
  guard, and the third in a row raises NonFiniteError. Loss, norm, samples and tokens of all ranks
  travel in one message of 32 bytes at the end of a step; see [Note: one message] in `optim.guard`.
  On an accelerator the fused optimizers are masked there, and the host looks a step later.
- *Buffers* of a module, such as BatchNorm's statistics, are values in `TrainState`. A buffer that
  has two names stays one tensor; one in the memory of another tensor raises LeafError.
- Replicas are *independent* while each steps on gradients of its own, and a *merge* makes them
  equal. `Trainer(replica_sync=local_sgd(16))` averages parameters every 16 steps instead of
  gradients in each; with `diloco(16)` an outer optimizer follows what the replicas did. Between
  merges `unshard` gives the parameters of this replica. The state of the inner optimizer always
  stays its own.
- Hop 2 may be a function of your own: `replica_sync=reduced_by(f)`, or with a state on each rank,
  such as what a compressed mean leaves out, `reduced_by(f, init=g)`.

Equal runs: `Trainer(deterministic=True)` uses torch's deterministic algorithms and
`placement.fixed_order(groups)`, with which every reduction adds up in the order of ranks: hop 1
level by level from the innermost, then micro-steps in order, then replicas. Two runs then give
equal bits, which gloo and NCCL alone do not promise.

Ctrl-C: a step is taken in full or not at all, on all ranks that reduce together, and
`KeyboardInterrupt` is raised right after its last write; see [Note: commit] in `threads`. A
merge of replicas behind it waits for others, so Ctrl-C waits for it, `timeout_s` at most.

What cannot wait, such as memory that runs out while a step is written, leaves no state: from then
on each use of it raises LostStateError, and so does the next step. `reset` takes the state from a
replica, or goes back to a save; or load one, `trainer.state = loaded`. A step that had not begun to
write leaves the state as it was. Other ranks may have taken the step, so the groups are finished in
either case. A merge that fails leaves all replicas whole, and `reset` makes it again. Replicas that
are independent go on only if all have taken the same steps.

Lost ranks: replicas are checkpoints. A rank that is killed, or a whole partition group, is started
again with the same script, and takes parameters, moments, buffers, the guard and its place in the
data from the ranks that hold the same part: no file is read, and no step is lost. This loop goes on
after a fault, on ranks old and new:

    while trainer.state.step < steps:
        try:
            trainer.step(batch_of(trainer.state.step))
        except mf.errors.PeerFailed:  # also in a process that has come back, at its first step
            trainer.reset()

A rank that is killed while others write a step may tear it: some have written it, and some that
held the same parts as the lost rank have not. `Trainer(faults=FaultPolicy(recoverable=True))`
excludes that, for one small all-gather over each of the two groups per step. If no replica holds
some part, all ranks go back to the newest step that was saved; without one they raise
LostStateError, on groups that are good. Independent replicas hold nothing for each other. A model
with dropout goes on, but not to the same bits, as nobody else has the random numbers of a rank. A
rank that is lost before all have built their `Trainer` ends the job. `groups` says what the
launcher has to do, and [Note: replicas are checkpoints] in `resuming` how it is done.

Preemption: `with mf.StopRequest(groups) as stop:` around `trainer.fit(loader, steps,
stop=stop)` lets SIGTERM or SIGUSR1, on any rank, end the loop on all ranks after the same step.
Then `stop.stopping` is true, and a `Trainer` with `checkpoint=` is saved: exit with 0. A loop by
hand asks `stop.due()` after a step.

Going on: `Trainer(checkpoint=Checkpoints(folder, every=100))` saves while it trains, and a new one
goes on from the newest step: `trainer.fit(loader, steps=1000 - trainer.state.step)`. See [Note:
going on in a pass] in `loop` for the place in the data. With the same options on as many ranks it
has the bits of a run that was not cut, in the middle of a pass, too; options that would change
numbers are refused.

Limits: a layer that mixes dtypes, such as a norm in float32 inside a bfloat16 model, must accept
the inputs that it gets, since only calls of the model are cast. A refused step changes nothing but
the guard. On NCCL the host does not wait for collectives, so it notices a rank that left a schedule
only when a run ends.

Start reading at `train_step` in `stepping`, then `trainer`, which has the arguments and what a job
adds to a step. `loop` is about samples, batches and passes, `replicas` about merges, and `resuming`
about going on: from a replica after a fault, or from a save.

To add a way of merging, write a function in `replicas` that returns a `ReplicaSync` with a `begin`
and a `merge`. To add an option of the step, build it as a value of a lower wing first, so that
loops written by hand have it too.

A step returns its `StepMetrics`.
"""

from mics_fn.train import replicas
from mics_fn.train.compiling import compile, compile_blocks
from mics_fn.train.loop import sampler
from mics_fn.train.resuming import Checkpoints
from mics_fn.train.stepping import StepMetrics
from mics_fn.train.trainer import FaultPolicy, Trainer
