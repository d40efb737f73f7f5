"""What a Trainer is given is checked when it is made, and not at its first step."""

from typing import Any

import pytest
import torch
from cases import Layout, groups_of, same_bits
from torch import Tensor, nn

import mics_fn as mf
from mics_fn.errors import LeafError, PlanError


class Net(nn.Module):
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


def made(groups: Any, model: Any = Net, **options: Any) -> tuple[nn.Module, dict]:
    return mf.init_model(model, groups, seed=0, **options)


def trainer(model: Any, groups: Any, **options: Any) -> mf.Trainer:
    return mf.Trainer(model, mf.optim.sgd(0.1), groups, **options)


def wrong() -> None:
    groups = groups_of(Layout((2,), 2))
    skeleton, shards = made(groups)
    lacks, more = dict(list(shards.items())[1:]), {**shards, "d": shards["b.bias"]}
    of_wide = made(groups, lambda: Net(5))[1]
    of_untied = made(groups, lambda: Net(tied=False))[1]
    counts = {**shards, "b.bias": mf.shards.Fixed(torch.zeros(3, dtype=torch.int64))}
    half = made(groups, precision="compute=bf16")[1]
    full = {k: p.detach() for k, p in Net().named_parameters(remove_duplicate=False)}
    names = "params= are not those of the model\n  params."

    def loss(params: Any, x: Any) -> Any:
        return x

    cases: list[tuple[type, str, Any, Any]] = [
        (LeafError, names + "a.weight is missing", skeleton, {"params": lacks}),
        (LeafError, names + "d is not expected", skeleton, {"params": more}),
        (LeafError, names + r"a.weight: expected .* \(4, 3\), .*, got .* \(5, 3\)", skeleton,
         {"params": of_wide}),
        (LeafError, names + "c.weight: expected .* tied to 'a.weight', got .* not tied", skeleton,
         {"params": of_untied}),
        (LeafError, names + "b.bias: expected floats .* got int64", skeleton, {"params": counts}),
        (PlanError, r"params.a.bias was not made with this precision=", skeleton,
         {"params": half, "precision": "output=f32"}),
        (LeafError, "params.a.bias is on meta, without a value", skeleton, {}),
        (LeafError, names + "c.weight: expected .* tied to 'a.weight', got .* not tied", skeleton,
         {"params": {k: x.clone() for k, x in full.items()}}),
        (PlanError, "Trainer: replicas=: params= are shards already", skeleton,
         {"params": shards, "replicas": "check"}),
        (LeafError, "buffer 'seen' is on meta, without a value", Net().to("meta"),
         {"params": shards}),
        (LeafError, "params.w is on meta", loss, {"params": {"w": torch.ones(2, device="meta")}}),
        (LeafError, "a loss_fn takes no loss=", loss, {"params": full, "loss": max}),
    ]  # fmt: skip
    for kind, text, model, options in cases:
        with pytest.raises(kind, match=text):
            trainer(model, groups, **options)
    with pytest.raises(PlanError, match="Trainer: shards are cut in 2, the groups have 1 rank"):
        trainer(skeleton, groups_of(Layout((2,), 1)), params=shards)


def test_what_does_not_fit_is_refused_when_a_trainer_is_made(ranks):
    ranks(2).run(wrong)


def right() -> None:
    """The same model, given in several ways."""
    groups, x = groups_of(Layout((2,), 2)), torch.ones(2, 3)
    torch.manual_seed(0)
    model = Net()
    full = {k: p.detach() for k, p in model.named_parameters(remove_duplicate=False)}
    skeleton, shards = made(groups)
    cut = mf.shard(full, groups)
    found = [
        trainer(model, groups),
        trainer(model, groups, params=full, bucket_bytes=64),
        trainer(skeleton, groups, params=shards),
        trainer(skeleton, groups, params=full, replicas="broadcast", source_rank=0),
        trainer(model, groups, params=cut),
    ]
    for each in found:
        each.step(x)
    for each in found[1:]:
        same_bits(each.params(), found[0].params())


def test_what_fits_trains_alike(ranks):
    ranks(2).run(right)
