"""Parameters that are fetched at the ops that need them, and gradients reduced during backward.

`defer` gives *deferred* parameters: tensors without data, each of which fetches its bucket at the
op that needs it, in forward and again in backward. Autograd saves them instead of the weights, so
nothing holds a gathered weight from one use to the next. There are no hooks. A step with two
micro-steps:

  >>> groups = make_groups(1)
  >>> shards = shard({"w": torch.ones(2)}, groups)
  >>> policy = on_demand(live_bytes=0)  # remembers the order of use, so keep one for each program
  >>> total = GradSum(micro_steps=2)
  >>> with defer(shards, groups, policy, into=total) as full:
  ...     for x in (1.0, 3.0):
  ...         total.backward((full["w"] * x).sum())  # hop 1; in the last pass hop 2 begins too
  >>> total.grads()["w"].data
  tensor([2., 2.])
  >>> total.release()  # its memory serves the next step

Without `into=`, `torch.func.grad` and the other transforms work on a function that calls `defer`:
hop 1 overlaps backward, and `reduce_grads` does hop 2. Between steps a rank holds 1/p of parameters
and optimizer state. Within a step it also holds `live_bytes` and one bucket of gathered parameters,
1/p of the gradients, and a few buckets of them in full: those on their way, one per level of links
and one more (with `live_bytes=0` one alone), and those that backward is making.

`GradSum(where="grads=host")`, or `Trainer(where=)`, keeps the sum over micro-steps in host memory,
or in files: see [Note: sums elsewhere] in `reduction`. Give `Guard.judge` and `opt_step` the
`GradSum` itself, and one bucket at a time is brought; `grads()` brings all. Files are for sums that
fit nowhere else: each pass reads and writes them, and on a device the host waits for that.

Its words: a bucket is *live* while its full buffer is in memory. A *run* is one use of a tree under
a schedule, from `defer` to the end of its block. A *pass* is one backward. The *late* levels are
those of hop 1 that a placement leaves to the last pass. A *lease* is memory for one bucket's
gradients in flight.

Limits:

- Writing to a deferred parameter raises LeafError. Views of one and casts of contiguous ones are
  deferred too, but what an op copies from it, such as a transposed `contiguous()`, is an ordinary
  tensor, which stays until backward if autograd saves it.
- On the CPU, what a rank holds in full needs no fetch: under `keep_all` such parameters are plain
  tensors on the memory of the shards, and a write to one is an error at the end of the run; see
  [Note: copy on write] in `live`.
- Kernels that read raw pointers (Triton, DLPack, C++ that is not an op to torch) need
  `weight.clone()`, and asking for an address raises. `other.data = weight` cannot be refused and
  has no memory to take: use `other.copy_(weight)`.
- Of `torch.compile`, what takes deferred parameters is a region (`mf.compile`, `mf.compile_blocks`,
  or what is compiled in the model of a `Trainer`); see [Note: regions] in `regions`. In any other
  compiled function such a parameter raises. Results of a region that lie in a bucket are copied. In
  a region that is recomputed or differentiated twice what torch says of compiled code holds.
- `vmap` over shards raises LeafError; `vmap` inside the loss works.
- `torch.utils.checkpoint` works with `use_reentrant=False`; the other form raises LeafError. Run
  backward inside the `functional_call`, as `Trainer` does; outside of it the module would recompute
  with parameters of its own.
- An op on a deferred weight costs 20 us of host time, or 53 us if each op changes the bucket.

Where to start reading: `deferring`, then [Note: deferred parameters] in `live` and [Note: join
and fetch] in `deferring`. `live` fetches and drops, `reduction` does both hops, `memory` says where
both of them put buckets, and a `GradSum` runs backward. To treat an op specially, add a handler to
`Deferred.handlers` in `live`; to change when buckets are fetched, write a policy in the wing
`schedules`, and leave this one alone. Compiled code is called in `regions`.
"""

from mics_fn.deferred import live, memory, reduction
from mics_fn.deferred.deferring import GradSum, bucket_sizes, check_loss, defer, record
from mics_fn.deferred.regions import Region
