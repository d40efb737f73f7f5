"""Where the moments of a new state are made: each goes to its place before the next is made.

[Note: coded moments] With `state=int8[256]` in the precision of shards, moments of large leaves are
kept as codes. A step decodes a part of a column, lets the optimizer write to it, and codes what it
has written; see `elsewhere`. Leaves begin on borders of blocks and so do chunks, so that no block
has elements of two leaves or two ranks: codes, and with them all numbers, do not depend on how many
ranks share a tensor. Second moments are kept by their roots; see [Note: roots] in `offload.codes`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.errors import OptimizerError, message
from mics_fn.offload import coded, is_coded
from mics_fn.shards import Sharded, is_leaf
from mics_fn.tree import Tree

Taking = Callable[[Any, int, Tensor], Tensor]  # from a layout, the number of a run and its moment

_TAKING: ContextVar[Taking | None] = ContextVar("taking", default=None)


@contextmanager
def making(taking: Taking) -> Iterator[None]:
    """A block in which each new moment is given to a function, and what that gives is kept."""
    token = _TAKING.set(taking)
    try:
        yield
    finally:
        _TAKING.reset(token)


# What torch's optimizers keep, by name: means, and what goes into an update by its root.
_MEANS = ("mean", "exp_avg", "momentum_buffer", "grad_avg")
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta")


def made(layout: Any, r: int, moment: Tensor, name: str) -> Tensor:
    """A moment of this name that was just made for a run of a layout, as codes and in its place.

    Raises:
      OptimizerError: `state=` of a precision asks for codes, and there are none for this moment.
    """
    bucket, taking = layout.runs[r].bucket, _TAKING.get()
    if bucket is not None and bucket.state is not None:
        text = f"init_state: state={bucket.state} of a precision"
        if name not in (*_MEANS, *_SQUARES):
            fix = "use adamw, adam, sgd or lion; or shard without state="
            raise OptimizerError(message(f"{text}: there are no codes for {name!r}", fix=fix))
        if moment.ndim > 1 or _torch.inside_torch_func():
            fix = "shard without state= where derivatives or vmap are wanted"
            raise OptimizerError(message(f"{text}: codes have no derivative", fix=fix))
        moment = coded(moment, bucket.state, name in _SQUARES, f"{bucket.names}, {name}")
    return moment if taking is None else taking(layout, r, moment)


def check_coded(params: Tree, opt: Any) -> None:
    """Raise OptimizerError if moments are to be kept as codes, and an optimizer keeps its own."""
    codecs = {x.bucket: x.bucket.state for x in tree.flatten(params, is_leaf)[0] if _is_coded(x)}
    if not codecs:
        return
    found = tree.flatten(opt, is_leaf)[0]
    for path, x in zip(tree.paths(opt, "opt", is_leaf), found, strict=True):
        own = isinstance(x, Tensor) and x.ndim > 0
        if own or (_is_coded(x) and not is_coded(x.data)):
            text = f"init_state: {path} is not kept as the codes that precision= asks for"
            lines = [f"state={next(iter(codecs.values()))}"]
            fix = "use an optimizer of this package or of torch; or shard without state="
            raise OptimizerError(message(text, lines, fix))


def _is_coded(leaf: Any) -> bool:
    return isinstance(leaf, Sharded) and leaf.bucket.state is not None
