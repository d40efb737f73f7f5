"""What a rank holds: leaves in flat buckets; shard, gather, unshard, both hops of gradients."""

from mics_fn.shards.bucket import BUCKET_BYTES, Bucket, Piece, pieces
from mics_fn.shards.contents import PLAIN, leaves_of, map_contents
from mics_fn.shards.gathering import PendingTree, gather, start_gather, unshard
from mics_fn.shards.leaf import (
    Fixed,
    Leaf,
    Nothing,
    Sharded,
    Tied,
    donate,
    dtype_name,
    is_leaf,
    names,
    needs_derivative,
    owner_index,
    refuse_derivative,
    refuse_tracing,
)
from mics_fn.shards.linear import deal, linear_map, put
from mics_fn.shards.memory import (
    Place,
    each_once,
    overlaps,
    owners_of,
    refuse_overlaps,
    same_tensor,
)
from mics_fn.shards.opened import (
    BucketUse,
    Opened,
    check_equal,
    check_leaves,
    grouped,
    homes_of,
    open_shards,
    require_groups,
)
from mics_fn.shards.pack import dense, pack_chunk, pack_full, split_chunk, whole_chunk
from mics_fn.shards.precision import Precision, precision_of
from mics_fn.shards.reducing import reduce_grads, scatter_grads, start_scatter_grads, sync_replicas
from mics_fn.shards.rows import in_front
from mics_fn.shards.sharding import layout_of, shard

__all__ = [
    "BUCKET_BYTES",
    "Bucket",
    "BucketUse",
    "Fixed",
    "Leaf",
    "Nothing",
    "Opened",
    "PLAIN",
    "PendingTree",
    "Piece",
    "Place",
    "Precision",
    "Sharded",
    "Tied",
    "check_equal",
    "check_leaves",
    "deal",
    "dense",
    "donate",
    "dtype_name",
    "each_once",
    "gather",
    "grouped",
    "homes_of",
    "in_front",
    "is_leaf",
    "layout_of",
    "leaves_of",
    "linear_map",
    "map_contents",
    "names",
    "needs_derivative",
    "open_shards",
    "overlaps",
    "owner_index",
    "owners_of",
    "pack_chunk",
    "pack_full",
    "pieces",
    "precision_of",
    "put",
    "reduce_grads",
    "refuse_derivative",
    "refuse_overlaps",
    "refuse_tracing",
    "require_groups",
    "same_tensor",
    "scatter_grads",
    "shard",
    "split_chunk",
    "start_gather",
    "start_scatter_grads",
    "sync_replicas",
    "unshard",
    "whole_chunk",
]
