"""What a module may hold and how a loss may use it: right as in plain torch, or refused by name."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import weight_norm
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import mics_fn as mf

X = torch.linspace(-1, 1, 12).view(4, 3)


class Net(nn.Module):
    """A model with a method of its own, parts by name, and an output that is no plain tensor."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.heads = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 2)})
        self.gain = 1.0

    def forward(self, x):
        return self.heads["a"](self.body(x)) * self.gain

    def encode(self, x):
        return self.body(x)


def through_parts(model, x):
    for layer in model.body:
        x = layer(x)
    return model.heads["b"](x)


def with_gain(model, x):
    model.gain = 3.0
    assert model.gain == 3.0
    assert isinstance(model, Net)
    return model(x)


WAYS = {
    "call": lambda model, x: model(x),
    "method": lambda model, x: model.encode(x),
    "part": lambda model, x: model.body(x),
    "slice": lambda model, x: model.body[:2](x),
    "iteration and key": through_parts,
    "set attribute": with_gain,
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "functional_call": lambda model, x: functional_call(
        model, {k: v * 2 for k, v in model.named_parameters()}, (x,)
    ),
    "weight": lambda model, x: model(x).float() + model.heads["a"].weight.float().sum(),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_loss_calls_on_a_model_is_cast(way: str):
    """The twin is a plain module in bfloat16, cast by hand at its edges."""
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model).bfloat16()

    def loss(model, x):
        out = WAYS[way](model, x)
        assert out.dtype == torch.float32
        return out.square().mean()

    trainer = mf.Trainer(
        model, mf.optim.sgd(1.0), mf.make_groups(1), loss=loss, precision="compute=bf16, output=f32"
    )
    got = trainer.step(X).loss
    want = WAYS[way](twin, X.bfloat16()).float().square().mean()
    want.backward()
    assert torch.equal(got, want.detach())
    for (name, after), p in zip(trainer.params().items(), twin.parameters(), strict=True):
        before = model.state_dict()[name]
        grad = torch.zeros_like(before) if p.grad is None else p.grad.float()
        torch.testing.assert_close(after, before - grad, rtol=2**-20, atol=2**-22)
    assert model.gain == 1.0, "the user's module was changed"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's old weight_norm
def test_a_tensor_that_a_forward_computes_again_is_no_obstacle():
    model = nn.Sequential(weight_norm(nn.Linear(3, 3)), nn.Linear(3, 1))
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    trainer = mf.Trainer(model, mf.optim.sgd(0.1), mf.make_groups(1), loss=loss)
    want = loss(model, X)
    want.backward()
    torch.testing.assert_close(trainer.step(X).loss, want.detach(), rtol=1e-6, atol=1e-7)
    for name, value in trainer.params().items():
        p = model.get_parameter(name)
        assert p.grad is not None
        torch.testing.assert_close(value, (p - 0.1 * p.grad).detach(), rtol=1e-5, atol=1e-6)


class Cached(nn.Module):
    """Uses a product that was computed once, from weights that have moved on since."""

    def __init__(self, held):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        product = self.linear.weight @ self.linear.weight.t()
        self.cache = [product] if held else product

    def forward(self, x):
        cache = self.cache[0] if isinstance(self.cache, list) else self.cache
        return self.linear(x) @ cache


def test_a_model_shares_what_has_no_copy():
    """Such as a lock, a file, or a process group."""

    class Locked(nn.Module):
        kept: Any

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.kept = nn.Linear(2, 1), {"lock": threading.Lock(), "calls": 0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.kept["lock"]:
                self.kept["calls"] += 1
            return self.linear(x).square().mean()

    groups, model = mf.make_groups(1), Locked()
    trainer = mf.Trainer(nn.Sequential(model), mf.optim.sgd(0.1), groups)
    trainer.step(torch.ones(3, 2))
    assert model.kept["calls"] == 1
    skeleton, shards = mf.init_model(lambda: nn.Sequential(Locked()), groups, seed=0)
    assert all(x.is_meta for x in skeleton.parameters())
    assert [*shards] == ["0.linear.weight", "0.linear.bias"]


@pytest.mark.parametrize(
    ("held", "error", "text"), [(False, TypeError, "NoneType"), (True, RuntimeError, "deepcopy")]
)
def test_a_product_of_old_parameters_is_refused(held: bool, error: type, text: str):
    """It would be out of date after a step."""
    groups = mf.make_groups(1)
    with pytest.raises(error, match=text):
        mf.Trainer(Cached(held), mf.optim.sgd(0.1), groups, loss=lambda m, x: m(x).sum()).step(X)
    if held:
        with pytest.raises(error, match=text):
            mf.init_model(lambda: Cached(held), groups, seed=0)
        return
    skeleton, shards = mf.init_model(lambda: Cached(held), groups, seed=0)
    with pytest.raises(error, match=text):
        functional_call(skeleton, mf.gather(shards, groups.hierarchy), (X,))


def wrapped():
    """Parameters such as quantised weights, whose values lie in other tensors."""
    model = nn.Linear(3, 3)
    two = TwoTensor(torch.ones(3, 3), torch.ones(3, 3))
    model.weight = nn.Parameter(two, requires_grad=False)
    return model


def hooked():
    model = nn.Linear(3, 3)
    model.weight.register_post_accumulate_grad_hook(lambda *given: None)
    return model


def taken_by_shard(model):
    mf.shard(dict(model.named_parameters()), mf.make_groups(1))


def taken_by_trainer(model):
    mf.Trainer(model, mf.optim.sgd(0.1), mf.make_groups(1))


@pytest.mark.parametrize(
    ("take", "text"),
    [
        (lambda: taken_by_shard(wrapped()), "weight is TwoTensor, which keeps its values in other"),
        (lambda: taken_by_trainer(hooked()), r"weight has hooks \(register_post_accumulate_grad"),
        (
            lambda: mf.init_model(hooked, mf.make_groups(1), seed=0),
            "init_model: params.weight has hooks",
        ),
        (lambda: taken_by_trainer(nn.LazyLinear(2)), "LazyLinear has parameters without a shape"),
    ],
    ids=["wrapper", "hook", "init_model", "lazy"],
)
def test_parameters_that_would_lose_something_are_refused(take, text):
    with pytest.raises(mf.errors.LeafError, match=text):
        take()
