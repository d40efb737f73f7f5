"""The Trainer: the user's module stays as it is, buffers are values, loops do what they say."""

import contextlib
import copy
import io
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random, same_bits
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import mics_fn as mf
from mics_fn.errors import LeafError, PlanError

TWO_BY_TWO = Layout((2, 2), 2)


def snapshot(module):
    """Everything about a module that a careless library changes."""
    plain = [{k: id(v) for k, v in m.__dict__.items()} for m in module.modules()]
    kept = [{k: dict(v) for k, v in m.__dict__.items() if "hooks" in k} for m in module.modules()]
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    held = {k: (id(x), x.data_ptr(), x._version, x.grad) for k, x in tensors.items()}
    return f"{plain} {kept} {held} {[type(m) for m in module.modules()]}"


def untouched(layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1, bias=False))
    model[0].weight.grad = torch.ones(4, 3)
    model.register_forward_hook(lambda *args: None)
    before = snapshot(model)
    how: Any = {"loss": lambda model, x: model(x).square().mean()}
    trainer = mf.Trainer(model, mf.optim.sgd(0.1), groups_of(layout), **how)
    trainer.step(random(dist.get_rank(), 4, 3))
    trainer.eval(random(0, 4, 3))
    trainer.params()
    assert snapshot(model) == before


def test_the_module_is_not_touched(ranks):
    ranks(4).run(untouched, TWO_BY_TWO)


class Counting(nn.Module):
    """Replaces one buffer by a new tensor, and keeps a cache that is not part of its state."""

    seen: torch.Tensor
    turned: torch.Tensor
    cache: torch.Tensor

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("turned", torch.zeros((), dtype=torch.complex64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.seen = self.seen + x.sum()
        self.turned = self.turned + 1j * x.sum()
        self.cache.add_(x.mean(0))
        return (self.w * x).sum()


def replaced_buffers(layout):
    trainer = mf.Trainer(Counting(), mf.optim.sgd(0.1), groups_of(layout), accumulate=2)
    rank = dist.get_rank()
    trainer.step(torch.full((4, 2), float(rank)))
    buffers = trainer.state.buffers
    n = layout.world_size
    assert buffers["seen"].item() == sum(8.0 * r for r in range(n)) / n
    assert buffers["turned"].item() == 1j * buffers["seen"].item()
    assert buffers["cache"].tolist() == [2.0 * rank] * 2  # not persistent: it stays this rank's
    before = trainer.state
    trainer.eval(torch.ones(4, 2))
    assert trainer.state is before
    assert trainer.state.buffers["seen"] is buffers["seen"]


def test_buffers_are_values(ranks):
    ranks(4).run(replaced_buffers, TWO_BY_TWO)


class Sharing(nn.Module):
    """Writes to a buffer by one name, and reads it by another."""

    seen: torch.Tensor
    same: torch.Tensor

    def __init__(self, view=False):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("same", self.seen[:1] if view else self.seen, persistent=False)

    def forward(self, x):
        self.seen.add_(x.mean(0))
        return (self.w * x + self.same).sum()


def test_a_buffer_of_two_names_is_one_tensor():
    trainer = mf.Trainer(Sharing(), mf.optim.sgd(0.0), mf.make_groups(1))
    x = torch.ones(4, 2)
    for step in (1, 2):
        assert trainer.step(x).loss == 8 + 8 * step
        buffers = dict(trainer.state.buffers)
        assert buffers["same"].tolist() == buffers["seen"].tolist() == [step] * 2
        buffers = {name: value.clone() for name, value in buffers.items()}
        trainer.state = replace(trainer.state, buffers=buffers)
    with pytest.raises(mf.errors.LeafError, match="buffer 'same' lies in the memory of buffer"):
        mf.Trainer(Sharing(view=True), mf.optim.sgd(0.0), mf.make_groups(1))


def test_evaluation_mode_is_left_again():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4), nn.Dropout())
    model[1].eval()  # the user's own choice for one module must survive
    loss = lambda model, x: model(x).square().sum()  # noqa: E731
    trainer = mf.Trainer(model, mf.optim.sgd(0.0), mf.make_groups(1), loss=loss)
    x = random(0, 8, 4)
    assert trainer.eval(x) == trainer.eval(x)
    means = trainer.state.buffers["2.running_mean"].clone()
    trainer.step(x)
    assert not torch.equal(trainer.state.buffers["2.running_mean"], means), "step did not train"
    skeleton: Any = trainer.program.skeleton
    assert [m.training for m in skeleton.modules()] == [True, True, False, True, True]


class TakesWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x, y=0, scale=1.0):
        return SimpleNamespace(loss=((x * self.w).sum(-1) - y).square().mean() * scale)


def test_default_loss_spreads_the_batch():
    x, y = random(0, 4, 3), random(1, 4)
    losses = []
    for batch in ((x, y), {"x": x, "y": y}, {"x": x, "y": y, "scale": 1.0}):
        trainer = mf.Trainer(TakesWords(), mf.optim.sgd(0.1), mf.make_groups(1), accumulate=2)
        losses.append(trainer.step(batch).loss)
    assert losses[0] == losses[1] == losses[2]
    assert mf.Trainer(TakesWords(), mf.optim.sgd(0.1), mf.make_groups(1)).step(x).samples == 4


def nothing_used(layout):
    """On one rank the loss uses no parameter: the others must not wait for it."""
    loss = lambda model, x: model(x).sum() if dist.get_rank() else x.sum()  # noqa: E731
    torch.manual_seed(0)
    trainer = mf.Trainer(nn.Linear(2, 1), mf.optim.sgd(0.1), groups_of(layout), loss=loss)
    before = trainer.params()["weight"].clone()
    trainer.step(torch.ones(1, 2))
    share = (layout.world_size - 1) / layout.world_size
    assert (before - trainer.params()["weight"] - 0.1 * share).abs().max() < 1e-6


def test_a_rank_whose_loss_uses_no_parameter(ranks):
    ranks(4).run(nothing_used, TWO_BY_TWO)


def fitted(layout):
    loader = [(random(i + 10 * dist.get_rank(), 4, 3), random(i, 4)) for i in range(3)]
    trainer, again = (
        mf.Trainer(TakesWords(), mf.optim.sgd(0.05), groups_of(layout)) for _ in range(2)
    )
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        found = trainer.fit(loader, 5)
    losses = [again.step(loader[i % 3]).loss for i in range(5)]
    same_bits(trainer.params(), again.params())
    assert [m.step for m in found] == list(range(1, 6))
    assert [m.loss.item() for m in found] == [loss.item() for loss in losses]
    return [m.loss.item() for m in found], "5/5" in shown.getvalue()


def test_fit_cycles_the_loader_and_averages_losses(ranks):
    found = ranks(4).run(fitted, TWO_BY_TWO)
    assert all(losses == found[0][0] for losses, _ in found)
    assert [shown for _, shown in found] == [True, False, False, False]  # one bar, on one rank


# `Trainer.state_dict` is what the module itself would save.

X = torch.linspace(-1, 1, 24).view(8, 3)


class Everything(nn.Module):
    """Tied weights, buffers of all kinds, a parametrization, and a state of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.normed = weight_norm(nn.Linear(4, 4))
        self.second = nn.Linear(4, 3)
        self.again = nn.Linear(3, 4, bias=False)
        self.again.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))
        self.scratch: torch.Tensor
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def get_extra_state(self):
        return {"format": 3}

    def set_extra_state(self, state):
        assert state == {"format": 3}

    def forward(self, x):
        self.seen += 1
        hidden = self.normed(self.norm(self.first(x)))
        return self.second(hidden + self.again(x)).square().mean() * self.scratch[0]


def made() -> Everything:
    torch.manual_seed(0)
    return Everything()


def exported(layout: Layout, steps: int, **options):
    groups = groups_of(layout)
    trainer = mf.Trainer(made(), mf.optim.adamw(1e-2), groups, **options)
    for step in range(steps):
        trainer.step(X + step + 0.1 * groups.rank)
    found: Any = trainer.state_dict()
    kept = copy.deepcopy(found)
    trainer.step(X)  # which writes into the memory of the state
    same_bits(dict(found), dict(kept))
    loss = trainer.eval(X).item()
    return found, trainer.state_dict(), loss


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 2)], ids=str)
def test_the_module_takes_it_and_computes_what_the_trainer_computes(ranks, layout: Layout):
    results = ranks(layout.world_size).run(exported, layout, 2)
    for found, last, loss in results:
        model = made()
        own: Any = model.state_dict()
        assert list(found) == list(own)
        assert "scratch" not in found
        assert found["_extra_state"] == {"format": 3}
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
                assert not found[name].requires_grad
        assert torch.equal(found["again.weight"], found["first.weight"])
        assert not torch.equal(found["first.weight"], own["first.weight"])
        assert found["seen"] == found["norm.num_batches_tracked"] == 2
        assert found._metadata == own._metadata  # the versions of modules
        assert str(model.load_state_dict(last, strict=True)) == "<All keys matched successfully>"
        assert model.again.weight is model.first.weight
        with torch.no_grad():
            assert model.eval()(X).item() == pytest.approx(loss, rel=1e-5)
        same_bits(dict(last), dict(results[0][1]))


class Odd(nn.Linear):
    """It saves a tensor that it holds neither as a parameter nor as a buffer."""

    def get_extra_state(self):
        return self.weight.to("meta")


def test_what_has_no_state_dict_is_refused_by_name():
    groups = mf.make_groups(1)
    odd = mf.Trainer(Odd(3, 1), mf.optim.sgd(0.1), groups, loss=lambda m, x: m(x).sum())
    with pytest.raises(mf.errors.LeafError, match="'_extra_state', which is neither a parameter"):
        odd.state_dict()


# How far `fit` is.


def test_fit_prints_lines_where_tqdm_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    trainer = mf.Trainer(made(), mf.optim.sgd(0.01), mf.make_groups(1))
    trainer.fit([X], steps=7, progress=False)
    assert capsys.readouterr() == ("", "")
    trainer.fit([X], steps=7, log_every=3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert all("loss 0." in line and line.endswith(" samples/s") for line in lines)


# What a Trainer is given is checked when it is made, and not at its first step.


class TiedParts(nn.Module):
    def __init__(self, width: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, width), nn.Linear(width, 3)
        self.c = nn.Linear(3, width)
        if tied:
            self.c.weight = self.a.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return (self.b(self.a(x)) + self.b(self.c(x))).square().mean()


def made_as_shards(groups: Any, model: Any = TiedParts, **options: Any) -> tuple[nn.Module, dict]:
    return mf.init_model(model, groups, seed=0, **options)


def trainer_of(model: Any, groups: Any, **options: Any) -> mf.Trainer:
    return mf.Trainer(model, mf.optim.sgd(0.1), groups, **options)


def wrong() -> None:
    groups = groups_of(Layout((2,), 2))
    skeleton, shards = made_as_shards(groups)
    lacks, more = dict(list(shards.items())[1:]), {**shards, "d": shards["b.bias"]}
    of_wide = made_as_shards(groups, lambda: TiedParts(5))[1]
    of_untied = made_as_shards(groups, lambda: TiedParts(tied=False))[1]
    counts = {**shards, "b.bias": mf.shards.Fixed(torch.zeros(3, dtype=torch.int64))}
    half = made_as_shards(groups, precision="compute=bf16")[1]
    full = {k: p.detach() for k, p in TiedParts().named_parameters(remove_duplicate=False)}
    names = "params= are not those of the model\n  params."

    def loss(params: Any, x: Any) -> Any:
        return x

    cases: list[tuple[type, str, Any, Any]] = [
        (LeafError, names + "a.weight: expected .* got None", skeleton, {"params": lacks}),
        (LeafError, names + "d: expected None", skeleton, {"params": more}),
        (LeafError, names + r"a.weight: expected .* \(4, 3\), got .* \(5, 3\)", skeleton,
         {"params": of_wide}),
        (LeafError, names + "c.weight: expected .* tied to 'a.weight' .*, got floats of", skeleton,
         {"params": of_untied}),
        (LeafError, names + "b.bias: expected floats .* got int64", skeleton, {"params": counts}),
        (PlanError, r"params.a.bias was not made with this precision=", skeleton,
         {"params": half, "precision": "output=f32"}),
        (LeafError, "params.a.bias is on meta", skeleton, {}),
        (LeafError, names + "c.weight: expected .* tied to 'a.weight' .*, got floats of", skeleton,
         {"params": {k: x.clone() for k, x in full.items()}}),
        (PlanError, "Trainer: bucket_bytes=: params= are shards already", skeleton,
         {"params": shards, "bucket_bytes": 64}),
        (LeafError, "buffer 'seen' is on meta", TiedParts().to("meta"),
         {"params": shards}),
        (LeafError, "params.w is on meta", loss, {"params": {"w": torch.ones(2, device="meta")}}),
        (LeafError, "a loss_fn takes no loss=", loss, {"params": full, "loss": max}),
    ]  # fmt: skip
    for kind, text, model, options in cases:
        with pytest.raises(kind, match=text):
            trainer_of(model, groups, **options)
    with pytest.raises(PlanError, match="Trainer: shards are cut in 2, the groups have 1 rank"):
        trainer_of(skeleton, groups_of(Layout((2,), 1)), params=shards)


def test_what_does_not_fit_is_refused_when_a_trainer_is_made(ranks):
    ranks(2).run(wrong)
