"""What a Trainer is given is checked when it is made, and not at its first step."""

import inspect
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, same_bits
from torch import Tensor, nn

import mics_fn as mf
from mics_fn.errors import LeafError, PlanError

LAYOUTS = [Layout((1,), 1), Layout((2,), 2)]


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


def wrong(layout: Layout) -> None:
    groups = groups_of(layout)
    skeleton, shards = made(groups)
    others = {"lacks": dict(list(shards.items())[1:]), "more": {**shards, "d": shards["b.bias"]}}
    of_wide = made(groups, lambda: Net(5))[1]
    of_untied = made(groups, lambda: Net(tied=False))[1]
    counts = {**shards, "b.bias": mf.shards.Fixed(torch.zeros(3, dtype=torch.int64))}
    half = made(groups, precision="compute=bf16")[1]
    full = {k: p.detach() for k, p in Net().named_parameters(remove_duplicate=False)}
    names = "params= are not those of the model\n  "
    cases: list[tuple[type, str, Any]] = [
        (LeafError, names + r"params.a.weight is missing", {"params": others["lacks"]}),
        (LeafError, names + r"params.d is not expected", {"params": others["more"]}),
        (LeafError, names + r"params.a.bias is missing", {"params": [*shards.values()]}),
        (LeafError, names + r"params.a.weight: expected \(4, 3\), got \(5, 3\)",
         {"params": of_wide}),
        (LeafError, names + r"params.c.weight: expected tied to 'a.weight', got not tied",
         {"params": of_untied}),
        (LeafError, names + r"params.b.bias: expected float32, got int64",
         {"params": counts}),
        (PlanError, r"params.a.bias was not made with this precision=\n"
         "  expected float32/float32/float32/float32\n  got float32/bfloat16/float32/float32",
         {"params": half, "precision": "output=f32"}),
        (LeafError, r"params.a.bias is on meta, without a value", {}),
        (LeafError, names + r"params.c.weight: expected tied to 'a.weight', got not tied",
         {"params": {k: x.clone() for k, x in full.items()}}),
        (LeafError, names + r"params.seen is not expected",
         {"params": dict(Net().state_dict())}),
    ]  # fmt: skip
    for kind, text, options in cases:
        with pytest.raises(kind, match=text):
            trainer(skeleton, groups, **options)
    for options in (
        {"replicas": "check"}, {"source_rank": 0}, {"bucket_bytes": 100},
        {"frozen": lambda path: False}, {"order": lambda path: path},
    ):  # fmt: skip
        (name,) = options
        with pytest.raises(PlanError, match=f"Trainer: {name}=: params= are shards already"):
            trainer(skeleton, groups, params=shards, **options)
    with pytest.raises(LeafError, match="buffer 'seen' is on meta, without a value"):
        trainer(Net().to("meta"), groups, params=shards)
    with pytest.raises(LeafError, match=r"params.w is on meta"):
        trainer(lambda params, x: x, groups, params={"w": torch.ones(2, device="meta")})
    with pytest.raises(LeafError, match="a loss_fn takes no loss="):
        trainer(lambda params, x: x, groups, params=full, loss=max)
    with pytest.raises(LeafError, match="shard: params is None"):
        mf.shard(None, groups)
    with pytest.raises(PlanError, match="shard: source_rank=0 has no effect"):
        mf.shard(full, groups, source_rank=0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_does_not_fit_is_refused_when_a_trainer_is_made(ranks, layout):
    ranks(layout.world_size).run(wrong, layout)


def other_groups() -> None:
    pair, apart = groups_of(Layout((2,), 2)), groups_of(Layout((2,), 1))
    skeleton, shards = made(pair)
    with pytest.raises(PlanError, match="Trainer: shards are cut in 2, the groups have 1 rank"):
        trainer(skeleton, apart, params=shards)


def test_shards_of_other_groups_are_refused(ranks):
    ranks(2).run(other_groups)


def right(layout: Layout) -> None:
    """The same model, given in several ways."""
    groups, x = groups_of(layout), torch.ones(2, 3)
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


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_fits_trains_alike(ranks, layout):
    ranks(layout.world_size).run(right, layout)


def test_every_option_has_a_name():
    kinds = {p.kind for p in inspect.signature(mf.Trainer).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    with mf.make_groups(1) as groups:
        skeleton, shards = made(groups)
        with pytest.raises(TypeError, match="nonsense"):
            trainer(skeleton, groups, params=shards, nonsense=1)
