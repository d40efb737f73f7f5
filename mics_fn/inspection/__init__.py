"""Sharded values for people at a prompt: one leaf by its path, and a table of all leaves.

`summary` shows what a tree of shards or a `TrainState` holds on this rank, and communicates
nothing. `get` gives one leaf in full on every rank: after small messages, each rank receives p - 1
times the leaf's largest piece. `set` gives a copy of the value with one leaf replaced; the ranks
compare a digest of what they are about to set. All three take paths as errors write them, with
brackets or with dots alone.

A *leaf* is a piece of a bucket (trained or frozen), a replicated tensor, a buffer, or a number. Its
*path* is what Python would write to reach it: `params['h.0.w']`, `opt.moments['exp_avg']['h.0.w']`.
Where a path means no leaf, the error names the nearest ones. `get` and `set` must be called by all
ranks, and every call is compared between them first: at a prompt, ranks differ easily.

Example:
  >>> groups = make_groups(1)
  >>> values = {"w": torch.ones(2, 3), "b": torch.zeros(3)}
  >>> state = init_state(shard(values, groups), optim.sgd(0.1))
  >>> print(summary(state, groups))
  path         shape   dtype    kind     bucket  groups               here  full
  params['b']  (3,)    float32  trained       0  n=1 p=1 levels=none  12 B  12 B
  params['w']  (2, 3)  float32  trained       0  n=1 p=1 levels=none  24 B  24 B
  2 leaves of 9 elements: 36 B here and 12 B of padding, 36 B in full
  >>> get(set(state, "params.b", 7.0, groups), "b", groups)
  tensor([7., 7., 7.])

Start reading at `access.py`: it has both verbs, and the helpers below them in the order in which
they are called. `paths.py` lists the leaves of a value, finds the one that a path means, and lets
the ranks agree; `table.py` draws the table as text and as HTML. To show one more fact of each leaf,
add a field to `SummaryRow`, its column to `_HEAD`, and its value to `_row`. For a new verb about a
leaf, take `leaves_of` and `Leaves.agreed`, so that ranks which differ raise instead of hanging.
"""

from mics_fn.inspection.access import get, set
from mics_fn.inspection.table import Summary, summary

__all__ = [
    "Summary",
    "get",
    "set",
    "summary",
]
