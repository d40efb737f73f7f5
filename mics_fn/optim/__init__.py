"""What is done with gradients: optimizers, clipping, loss scales, and steps that are refused.

This wing begins where both hops are done. It gets parameters and gradients as trees of shards, and
everything in it works on this rank's pieces alone; only a norm needs the other ranks. All that
training carries from step to step is one value, a `TrainState`, and `opt_step` gives the next:

  >>> groups = make_groups(1)
  >>> params = shard({"b": torch.zeros(2), "w": torch.ones(2, 2)}, groups)
  >>> optimizer = chain(clip_by_global_norm(1.0, groups), adamw(0.1, weight_decay=0.0))
  >>> state = init_state(params, optimizer)
  >>> grads = reduce_grads({"b": torch.ones(2), "w": torch.ones(2, 2)}, groups)
  >>> state = opt_step(state, grads, donate=True)
  >>> get(state, "b", groups)
  tensor([-0.1000, -0.1000])
  >>> get(state, "opt.1.moments.exp_avg_sq.b", groups) < 1
  tensor([True, True])

Its words:

- A *transform* is an optimizer or a part of one: a `Transform` of pure functions `init`, `update`
  and `step`. `chain` makes one of several.
- A *moment* is what an optimizer keeps for each element of the parameters. Moments are stored by
  bucket, as `FlatShards`: one long tensor for each *run*, which is a stretch of a bucket's leaves
  with nothing but padding between them. `moment.by_leaf()` and `moment["w"]` show them leaf by
  leaf; `get`, `set` and `summary` take the path of a leaf, as above.
- A *column* is a long tensor of the parameters together with those of the gradients and moments
  that belong to it. Optimizers are elementwise, so that a step is a few kernels on columns, however
  many leaves there are.
- To *donate* a state is to let the step write into its memory; using it afterwards raises.
- A *guard* stands between reduction and update: it divides by the scale of the loss, looks whether
  the gradient is finite and its norm usual, and clips. Its *verdict* says whether to step at all.

Rules:

- A shard is a flat piece, so an optimizer is elementwise, or says of which leaves it needs all:
  `whole` of a `Transform` is that of `shard`, which lays each on one rank; `Trainer` does so by
  itself. `muon`, `matrixwise` and `from_torch` of `Muon` and `Adafactor` step such leaves without a
  message. `from_torch` takes all classes of torch but `LBFGS` and `SparseAdam`, and others with
  `elementwise=True`. The arithmetic is torch's; that of lion alone is written here. `sgd`, `adam`
  and `adamw` call torch's functions; an object of a class, as `from_torch` makes for each step,
  imports `torch._dynamo`: 80 MB and a second in every process.
- With a scale, a watch or `on_nonfinite="skip"` a gradient that is not finite, in any dtype,
  refuses the step on all ranks: nothing changes but the scale and its counts, and the host reads
  two numbers per step. `Verdict.nonfinite` names the leaf and the ranks on which it arose; "raise"
  raises it. A guard that only clips never makes the host wait. `Trainer(guard=)` does all this, and
  its `StepMetrics` has `grad_norm`, `scale`, `accepted`, `spike` and `nonfinite`.
- A guard is a value and does not change under a step, so that a gradient is always divided by the
  scale that its loss was multiplied by.
- A norm needs groups of all ranks that hold a part of the model. Where groups cover a part of the
  world, as with tensor or pipeline parallelism, or leaves live on groups of different ranks, as
  experts do, `global_norm`, `clip_by_global_norm` and a `Guard` with `max_norm` or a watch raise
  `PlanError`; so does one that decides, unless some of the groups reach all ranks. What other ranks
  do in a job of their own does not count: say `make_groups(whole=True)`.
- `opt_step` with `sgd`, `adam`, `adamw`, `lion` or an optimizer of your own is differentiable, by a
  tensor `lr` too, as unrolled inner loops need it. Each rank gets the derivative by the rate
  through its own shards: add them up over the partition group. `from_torch` and `donate=True` raise
  `PlanError` where a derivative is asked for. Outside `torch.func`,
  parameters that are leaves are constants unless their gradients were taken with
  `create_graph=True`. Under `torch.no_grad()` nothing is tracked, as in `Trainer`.

- Ranks compare what nothing later would show: at which step they are, on new groups (`same_step`);
  all options that change numbers, by `facts` of a `Transform` (`Trainer`, `init_state(groups=)`);
  and the bits of replicas (`same_replicas`, or every 100 steps of a `Trainer`). `faults` does that.
- Moments may lie in host memory or in files (`init_state(where=)`, `move`). A step brings them part
  by part to where the parameter is, and its bits are those of a step in memory. `opt_step` takes a
  `GradSum`, too, of which each bucket is stepped once its hop 2 is done. So does `Guard.judge`, and
  of a sum elsewhere (`GradSum(where=)`) both bring one bucket at a time.
- Moments may take a byte each: `shard(precision="state=int8[256]")` keeps those of leaves with at
  least 4,096 elements as codes, 2.03 bytes for the two of AdamW instead of 8. Rounding is right on
  average, and the numbers of these leaves do not depend on ranks or buckets; see [Note: coded
  moments] in `flat`. The loss of a small GPT after 250 steps was within 0.3 % of that with
  values. int8 has 127 sizes in a block: where gradients stay below about 1/127 of the largest one
  of their block, AdamW takes smaller steps, a tenth of its own at a thousandth: use short blocks.
  On one core of a CPU a step of AdamW takes 13 ns an element, not 2. Such states stay on
  the device and have no derivatives. An optimizer whose state has no codes (`Rprop`, `ASGD`,
  `Adamax`), and one of one's own, raise. `get`, `set` and checkpoints give and take values; a save
  takes memory for them, and what is loaded goes on to the same bits.
- Ctrl-C cannot tear a step: `opt_step(donate=True)` raises it once its result is assigned.

Where to start reading: a step from top to bottom is `opt_step` in `state`, which checks gradients
and covers what is written; `_by_rule` in `optimizers`, which gives columns to a rule such as that
of `lion`; and `Columns` in `columns`, which makes them of `flat` runs, part by part where states
are placed. Then `norms` for clipping and studies, and `guard` for loss scales and verdicts.

An optimizer of your own is `from_update(init, update)`, with `shards.map` for what is elementwise
and `leaf_norms` and `inner` for numbers of whole tensors: LAMB is fifteen lines of it. Rates, or
optimizers, by path are `by_path({"*embed*": adamw(1e-4)}, default=adamw(1e-3))`.

To add an optimizer: if torch has the class, `from_torch(cls, lr=..., **options)` is enough.
Otherwise write a rule that writes to columns in place, as that of `lion` does. Objects with `init`
and `update` of other libraries can be used as they are. Add it to the twins in `tests/optim`, which
hold it to a slow program written out by hand.

A `Rate` is a number, a tensor, or a function of the step. The scales of a `Guard` are values of
type `LossScale`: `no_scale`, `static_scale`, `dynamic_scale`; `adjust` gives that of the next step.
"""

from mics_fn.optim.classes import from_torch
from mics_fn.optim.columns import fresh, map_columns
from mics_fn.optim.flat import as_before, by_leaf, replaced
from mics_fn.optim.guard import (
    TOTALS,
    Guard,
    LossScale,
    StepTotals,
    Verdict,
    dynamic_scale,
    no_scale,
    norm_spike,
    static_scale,
)
from mics_fn.optim.matrices import matrixwise, muon, relayout
from mics_fn.optim.norms import clip_by_global_norm, clip_by_value, global_norm, inner, leaf_norms
from mics_fn.optim.optimizers import (
    Optimizer,
    Rate,
    Transform,
    adam,
    adamw,
    as_transform,
    by_path,
    chain,
    from_update,
    lion,
    masked_by,
    sgd,
    warmup_cosine,
)
from mics_fn.optim.state import TrainState, init_state, move, opt_step, record_memory

__all__ = ["Guard", "Transform", "adam", "adamw", "by_path", "chain", "clip_by_global_norm"]
__all__ += ["clip_by_value", "dynamic_scale", "from_torch", "from_update", "global_norm", "inner"]
__all__ += [
    "leaf_norms",
    "lion",
    "matrixwise",
    "muon",
    "norm_spike",
    "relayout",
    "sgd",
    "static_scale",
    "warmup_cosine",
]
