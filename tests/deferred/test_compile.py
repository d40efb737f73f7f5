"""torch.compile: what a compiled region may take, what is refused, and what is dropped."""

import warnings
from typing import Any

import pytest
import torch
from cases import random
from torch import nn
from torch.nn import functional as F

import mics_fn as mf


def block(w, b, x):
    return torch.tanh(F.linear(x, w, b))


def gradients(groups, shards, x, run):
    total = mf.GradSum()
    full = mf.defer(shards, groups, mf.on_demand(), into=total).params
    total.backward(run(full, x).square().sum())
    return mf.unshard(total.grads(), groups)


def compiled(fullgraph):
    groups = mf.make_groups(1, ranks=[0])
    shards = mf.shard({"w": random(0, 4, 3), "b": random(1, 4)}, groups)
    x, fast = random(2, 5, 3), torch.compile(block, backend="eager", fullgraph=fullgraph)
    want = gradients(groups, shards, x, lambda full, x: block(full["w"], full["b"], x))
    said = "enters a compiled region(.|\n)*use gather around compiled code"
    with pytest.raises(Exception, match=said):
        gradients(groups, shards, x, lambda full, x: fast(full["w"], full["b"], x))
    # A clone at the edge is one touch, and what enters is an ordinary tensor.
    edge = lambda full, x: fast(full["w"].clone(), full["b"].clone(), x)  # noqa: E731
    got = gradients(groups, shards, x, edge)
    for name, value in want.items():
        assert torch.allclose(got[name], value, rtol=1e-5, atol=1e-6), name


def quiet(fn, *args):
    with warnings.catch_warnings(action="ignore"):  # dynamo's own, of .grad of a clone and the like
        fn(*args)


@pytest.mark.parametrize("fullgraph", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_deferred_parameter_is_refused_and_a_clone_is_right(ranks, fullgraph):
    ranks(1).run(quiet, compiled, fullgraph)


# In a Trainer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.down.weight = self.up.weight

    def forward(self, x):
        return torch.tanh(self.down(self.norm(self.up(x))))


def square(model, x):
    return model(x).square().mean()


def wrap(model) -> Any:
    return torch.compile(model, backend="eager")


def with_first(model, kind):
    model[0] = kind(model[0])
    return model


class Decorated(Block):
    forward = torch.compile(Block.forward, backend="eager")


def with_class(model):
    model[1].__class__ = Decorated
    return model


def with_forward(model):
    model[1].forward = wrap(model[1].forward)
    return model


def trained(groups, model, loss=square):
    """Losses and parameters after some steps."""
    torch.manual_seed(0)
    model = model(nn.Sequential(Block(), Block(), nn.Linear(4, 1)))
    trainer = mf.Trainer(model, mf.optim.adamw(0.01), groups, loss=loss)
    losses = [trainer.step(random(i, 8, 4)).loss.item() for i in range(3)]
    losses.append(trainer.eval(random(9, 8, 4)).item())
    return losses, {k.replace("_orig_mod.", ""): v for k, v in trainer.state_dict().items()}


def whole():
    """Where each rank holds all parameters, compiled code trains as the model itself does."""
    groups = mf.make_groups(1)
    want = trained(groups, lambda m: m)
    for model, loss in ((wrap, square), (with_class, square), (lambda m: m, wrap(square))):
        torch._dynamo.reset()
        losses, values = trained(groups, model, loss)
        assert losses == want[0]
        assert all(torch.equal(values[k], x) for k, x in want[1].items())


def test_compiled_modules_train_where_ranks_hold_all_parameters(ranks):
    ranks(1).run(quiet, whole)


def refused():
    groups = mf.make_groups(2)
    for name, made in {
        "model": (wrap,),
        "model.1": (with_class,),
        "model.0, loss": (lambda m: with_first(m, wrap), wrap(square)),
    }.items():
        with pytest.raises(mf.errors.PlanError, match=f"torch.compile wraps {name}\n"):
            trained(groups, *made)
    skeleton, shards = mf.init_model(lambda: wrap(Block()), groups, seed=0)
    with pytest.raises(mf.errors.PlanError, match="torch.compile wraps model"):
        mf.Trainer(skeleton, mf.optim.sgd(0.1), groups, params=shards, loss=square)
    for each in (groups, mf.make_groups(1)):
        with pytest.raises(
            mf.errors.PlanError, match="it takes neither .*, nor others than its own"
        ):
            trained(each, with_forward)


def test_compiled_modules_that_would_be_given_deferred_parameters_are_refused(ranks):
    ranks(2).run(quiet, refused)


def compiling(module):
    module.compile(backend="eager")
    return module


def dropped(p):
    groups = mf.make_groups(p)
    with pytest.warns(UserWarning, match="compile.. of model.0 is dropped") as caught:
        found = trained(groups, lambda m: with_first(m, compiling))
    assert [each.filename for each in caught] == [__file__]
    assert found[0] == trained(groups, lambda m: m)[0]


def test_compile_of_a_module_is_dropped_with_one_warning(ranks):
    ranks(2).run(dropped, 2)
