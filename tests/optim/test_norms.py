"""Norms by leaf, inner products, optimizers by path and of one's own: against full tensors."""

from typing import Any

import pytest
import torch
from cases import TREES, Layout, groups_of, poison
from torch import Tensor

import mics_fn as mf
from mics_fn import tree
from mics_fn.shards.leaf import Nothing, is_leaf

ALONE, PAIR, BOTH = Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2)
BOUND = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-6, torch.float16: 1e-6}


def sharded_pairs(params: Any, shards: Any) -> list[tuple[str, Tensor]]:
    """Path and full values of each trained leaf."""
    leaves, fulls = tree.flatten(shards, is_leaf)[0], iter(tree.flatten(params)[0])
    pairs = []
    for path, leaf in zip(tree.paths(shards, "", is_leaf), leaves, strict=True):
        full = None if isinstance(leaf, Nothing) else next(fulls)
        pairs += [(path, full)] if isinstance(leaf, mf.shards.Sharded) else []
    return pairs


def norms_of(layout: Layout, name: str, dtype: torch.dtype) -> None:
    groups = groups_of(layout)
    params = TREES[name](dtype, 3)
    shards = poison(mf.shard(params, groups, bucket_bytes=200))
    groups.traffic.clear()
    norms = mf.optim.leaf_norms(shards, groups)
    calls, sent = groups.traffic.snapshot().get("partition", (0, 0))
    found = dict(zip(tree.paths(norms, "", is_leaf), tree.flatten(norms, is_leaf)[0], strict=True))
    pairs = sharded_pairs(params, shards)
    for path, full in pairs:
        want = full.double().square().sum().sqrt()
        assert found[path].shape == ()
        assert found[path].dtype == torch.float64
        assert abs(float(found[path] - want)) <= BOUND[full.dtype] * (1 + float(want)) * 4, path
    total = torch.stack([found[path].square() for path, _ in pairs] or [torch.zeros(())]).sum()
    assert abs(float(total.sqrt() - mf.optim.global_norm(shards, groups))) <= 1e-6 * (1 + total)
    if layout.partition_size > 1 and pairs:
        assert (calls, sent) == (1, (layout.partition_size - 1) * 8 * len(pairs))
    product = mf.optim.inner(shards, shards, groups)
    assert abs(float(product - total)) <= 1e-5 * (1 + float(total))


@pytest.mark.parametrize("layout", [ALONE, PAIR, BOTH], ids=str)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.covering
def test_norms_of_leaves_and_inner_products(ranks, layout, name, dtype):
    ranks(layout.world_size).run(norms_of, layout, name, dtype)


def test_what_cannot_be_is_named():
    groups = mf.make_groups(1)
    a = mf.shard({"w": torch.ones(4), "v": torch.ones(3)}, groups)
    b = mf.shard({"w": torch.ones(4)}, groups)
    c = mf.shard({"w": torch.ones(4), "v": torch.ones(3)}, groups, bucket_bytes=4)
    sgd = mf.optim.sgd(0.1)

    def by_path(parts: Any, **how: Any) -> Any:
        return mf.init_state(a, mf.optim.by_path(parts, **how))

    for call, text in (
        (lambda: mf.optim.leaf_norms({"w": torch.ones(3)}, groups), "shards.w is Tensor"),
        (lambda: mf.optim.inner(a, b, groups), "inner: the trees differ"),
        (lambda: mf.optim.inner(a, c, groups), "inner: the trees differ"),
        (lambda: mf.optim.inner(a, {"w": 1, "v": 2}, groups), "b.v is int, not a shard"),
        (lambda: mf.optim.leaf_norms(a, None), "leaf_norms: groups is None"),
        (lambda: mf.optim.by_path({"w": 3}), "int is not an optimizer"),
        (lambda: by_path({"*w*": sgd}), "by_path: v matches no pattern, and there is no default"),
        (lambda: by_path({"w.*": sgd}, default=sgd), "the pattern 'w.*' matches no trained leaf"),
        (lambda: by_path({"*w*": sgd, "*": sgd}), "'*w*' has only leaves that a later pattern"),
    ):
        with pytest.raises(mf.MicsError) as caught:
            call()
        assert text in str(caught.value), caught.value
        assert "\n  fix: " in str(caught.value)
