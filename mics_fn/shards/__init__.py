"""What a rank holds: a tree of shards, and the verbs that make, gather and reduce it.

A sharded model is a pytree. A *verb* is a function of all ranks on such trees, as `gather` is; it
takes values and returns values. So all of it composes
with `torch.func`, and the gradient of a gather is hop 1:

  >>> groups = make_groups(1)
  >>> shards = shard({"w": torch.ones(2, 3), "steps": torch.tensor(7)}, groups)
  >>> shards["w"]
  Sharded(shape=(2, 3), float32, here 6 of 6)
  >>> loss_fn = lambda s, x: (gather(s, groups)["w"] @ x).sum()
  >>> grads = torch.func.grad(loss_fn)(shards, torch.arange(3.0))
  >>> grads = reduce_grads(grads, groups)  # hop 1 is done, so this is hop 2
  >>> unshard(grads, groups)["w"]
  tensor([[0., 1., 2.],
          [0., 1., 2.]])

Such a step holds all parameters in full, and in backward all gradients. `defer`, in the wing
`deferred`, gives the same numbers in less memory.

Its words:

- A *bucket* is the leaves that travel in one collective. They lie in one padded flat buffer, which
  is cut into p *chunks*, one per rank. A leaf's *piece* is the part of it in this rank's chunk, and
  its *slot* is its number in the bucket. A leaf is never cut between buckets, so no memory budget
  can be smaller than the largest leaf, which often is the embedding. Leaves that are used together
  should be near each other in `order=` of `shard`, or one op needs many buckets; `bucket=` says
  where one has to end, such as at the end of a layer.
- A leaf's *home* is the groups over which it is cut. The leaves of one tree may have several.
- *Frozen* leaves (`requires_grad=False`, or chosen by `frozen=`) are sharded and gathered, but
  never reduced or updated. Integer and boolean leaves are replicated. Both are `Fixed`.
- A *tied* leaf is a tensor that occurs twice. It stays one shard: it is gathered as one tensor, the
  gradients of its uses are added, and it counts once in a norm.
- A *missing* leaf: a tree may hold only some of the leaves that were sharded together. Those in
  other trees stay as they are.
- A piece lies *elsewhere* if it is in host memory beside an accelerator, or in a file, as `where=`
  says. It is brought to the device where it is gathered, and its leaf and bucket are the same.
- To *donate* a value is to let a verb write into its memory. Using it afterwards raises
  `DonatedError`, which names it. Nothing is ever overwritten without `donate=True`.

A parameter that the loss does not use gets a gradient of zeros, the same on all ranks, and weight
decay and momentum apply to it. (`torch.optim` skips parameters whose gradient is None.) Sparse
gradients become dense; in a group of one rank they need `defer`.

A step of thousands of leaves makes so many objects that Python searches its whole heap for garbage
in it, with all of torch there. That is a third of the time of the step, which `gc.freeze()` saves
once model and state are built; see `python -m mics_fn bench opt`.

What travels may be codes instead of values: `gather`, `hop1` and `hop2` of a `Precision`. Leaves of
such a bucket begin on blocks of its codecs, so its padding is larger: see [Note: flat buckets] in
`bucket`. Where ranks hold a bucket in full (p = 1) nothing is coded but in hop 2.

Frozen leaves may be kept as codes, too, as the base of a model on which adapters are trained: with
`frozen=is_base, precision="*base*: param=int4[64]"` a leaf takes 0.53 bytes an element, in memory
and on the wire, and is decoded where it is gathered. `shard`, `load_shards` and `init_model` code
one bucket after the other, so that nobody holds all values. What is decoded does not depend on the
number of ranks; see [Note: kept codes] in `pack`.

Arithmetic of your own: `map` applies an elementwise function to the pieces of trees, and numbers of
whole tensors (`optim.leaf_norms`, `optim.inner`) are passed to it, so that it has a derivative.
Trees of
shards may be copied, and saved by `torch.save`, each rank's by itself; `pickle` takes the whole
chunk with each leaf.

One bucket on its way through a step, as file and function in the order in which they run. Files
are of this wing, if they are not of `collectives` or `optim`:

1. `verbs.shard` puts leaves into buckets (`bucket.plan_buckets`). It packs one bucket after the
   other in full (`pack.pack_full`), and keeps this rank's chunk of it. The shards are the pieces
   of leaves in this chunk, as views (`pack.split_chunk`).
2. `verbs.gather` finds the buckets of a tree, and their groups (`opened.open_shards`). All of them
   go through one node of autograd (`linear.apply`), in turns (`linear.run`): the pieces of a
   bucket are its chunk again (`pack.pack_chunk`), cast to the dtype of computation, and one
   all-gather at each level (`collectives.start_all_gather`) brings the chunks of other ranks. Full
   leaves are views of the buffer that was filled (`pack.split_full`).
3. Backward is hop 1, since a gradient of a gather is a mean over the partition group: it packs the
   full gradients of a bucket into a buffer (`pack.pack_full`), reduces it level by level
   (`collectives.start_reduce_scatter`), and keeps this rank's chunk (`pack.split_chunk`). So the
   gradients are shards like the parameters, in the same buckets.
4. `verbs.reduce_grads` does hop 2: the mean of a chunk over the ranks that hold the same chunk in
   other replicas (`collectives.start_mean`). Where it is given full gradients, it does hop 1 first.
5. `optim.opt_step` updates this rank's chunks, which are shards of the next step.

Where to start reading: the notes of `bucket`, `leaf` and `linear`, in this order. Then `opened`
(what every verb does first) and `verbs`. `pack` is about buffers and where pieces lie, and the end
of `bucket` about dtypes.

To add a verb, begin it with `open_shards`, which checks the tree and its groups and gives the
leaves by bucket, and end it with `build` or `rebuild`. If it moves data, add its map and the
transpose of that to the tables in `linear`. `tests/rules/test_derivatives.py` asks of every public
verb for its derivative, or for the reason why it has none. To add a property of the layout, give
`Formats` or `Bucket` a field: ranks compare all of them.
"""

from mics_fn.collectives import needs_derivative, refuse_derivative
from mics_fn.shards import pack
from mics_fn.shards.bucket import (
    BUCKET_BYTES,
    Bucket,
    LeafSpec,
    Precision,
    check_dtype,
    companion,
    pieces,
    plan_buckets,
)
from mics_fn.shards.leaf import (
    Fixed,
    GradStream,
    Leaf,
    MemoryPlace,
    Nothing,
    Sharded,
    Tied,
    Writing,
    any_lost,
    closed_after,
    donate,
    dtype_name,
    grad_stream,
    is_donated,
    is_leaf,
    lose_if_aborted,
    mark_reduced,
    names,
    note_write,
    overlaps,
    owner_index,
    owners_of,
    places_of,
    reclaimed,
    reduction_groups,
    refuse_overlaps,
    refuse_tracing,
)
from mics_fn.shards.linear import as_part, deal, linear_map, put
from mics_fn.shards.opened import (
    BucketUse,
    GroupsTree,
    Opened,
    TreeLayout,
    check_equal,
    check_leaves,
    grouped,
    homes_of,
    open_shards,
    require_groups,
)
from mics_fn.shards.verbs import (
    LayoutOptions,
    as_dtensors,
    check_tensor,
    gather,
    join_parts,
    layout_of,
    map,
    place_chunk,
    reduce_grads,
    scatter_grads,
    shard,
    sync_replicas,
    unshard,
)

__all__ = ["Sharded", "as_dtensors", "map"]
