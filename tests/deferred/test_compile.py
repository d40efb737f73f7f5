"""torch.compile: deferred parameters are refused where they enter a compiled region."""

import warnings

import pytest
import torch
from cases import random
from torch.nn import functional as F

import mics_fn as mf


def block(w, b, x):
    return torch.tanh(F.linear(x, w, b))


def gradients(groups, shards, x, run):
    total = mf.GradSum()
    full = mf.defer(shards, groups, mf.on_demand(), into=total).params
    total.backward(run(full, x).square().sum())
    return mf.unshard(total.grads(), groups)


def compiled(backend, fullgraph):
    torch._dynamo.reset()
    groups = mf.make_groups(1, ranks=[0])
    shards = mf.shard({"w": random(0, 4, 3), "b": random(1, 4)}, groups)
    x, fast = random(2, 5, 3), torch.compile(block, backend=backend, fullgraph=fullgraph)
    want = gradients(groups, shards, x, lambda full, x: block(full["w"], full["b"], x))
    with pytest.raises(Exception, match="a deferred parameter enters a compiled region"):
        gradients(groups, shards, x, lambda full, x: fast(full["w"], full["b"], x))
    # A clone at the edge is one touch, and what enters is an ordinary tensor.
    edge = gradients(
        groups, shards, x, lambda full, x: fast(full["w"].clone(), full["b"].clone(), x)
    )
    full = mf.gather(shards, groups)
    variables = {k: v.detach().requires_grad_() for k, v in full.items()}
    loss = fast(variables["w"], variables["b"], x).square().sum()
    now = dict(zip(variables, torch.autograd.grad(loss, list(variables.values())), strict=True))
    for name, value in want.items():
        assert torch.allclose(edge[name], value, rtol=1e-5, atol=1e-6), name
        assert torch.allclose(now[name], value, rtol=1e-5, atol=1e-6), name


def quietly(backend, fullgraph):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's own, of .grad of a clone and the like
        compiled(backend, fullgraph)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_deferred_parameter_is_refused_and_a_clone_is_right(ranks, backend, fullgraph):
    ranks(1).run(quietly, backend, fullgraph)
