"""A model whose frozen leaves are kept as codes: its adapters are trained, and all else is done.

The twin is always the same over plain leaves with the values that the codes stand for.
"""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives import Codec
from mics_fn.errors import DesyncError
from mics_fn.offload import Coded

KIND = "int4[64]"
PRECISION = f"*base*: param={KIND}"
ONE, PAIR, COPIES = Layout((1,), 1), Layout((2,), 2), Layout((2,), 1)
TWO_BY_TWO, FOUR = Layout((2, 2), 2), Layout((2, 2), 4)


def made() -> nn.Sequential:
    torch.manual_seed(3)
    layers = {"first": nn.Linear(30, 40), "base": nn.Linear(40, 50), "last": nn.Linear(50, 6)}
    return nn.Sequential(OrderedDict(layers))


def is_base(path: str) -> bool:
    return "base" in path


def decoded(x: Tensor) -> Tensor:
    """The whole leaf, coded and decoded in one process."""
    codec, flat = Codec.parse(KIND), x.detach().reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % 64))
    return codec.decode(codec.encode(flat), len(flat), x.dtype)[: x.numel()].view(x.shape)


def over_decoded() -> nn.Sequential:
    """The model whose base has the values that codes stand for."""
    model = made()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if is_base(name):
                x.copy_(decoded(x))
    return model


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]).tanh() - batch[1]).square().mean()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    return random(100 * step + rank, 4, 30), random(100 * step + rank + 50, 4, 6).tanh()


def trainer_of(groups: Any, *, plain: bool = False, **options: Any) -> mf.Trainer:
    model = over_decoded() if plain else made()
    options = {"bucket_bytes": 1500, "frozen": is_base, **options}
    if not plain:
        options = {"precision": PRECISION, **options}
    return mf.Trainer(model, mf.optim.adamw(3e-2), groups, loss=loss_of, **options)


def codes_of(params: Any) -> dict[str, list[Tensor]]:
    """Copies of the codes of each leaf, and of their scales."""
    held = {k: x.data for k, x in params.items() if isinstance(x.data, Coded)}
    return {k: [x.clone() for x in c.part_codes()] for k, c in held.items()}


def full(shards: Any, groups: Any) -> dict[str, Tensor]:
    return {k: x.float() for k, x in mf.unshard(shards, groups).items()}


def as_over_plain(ranks: Any, layout: Layout, function: Any, *given: Any) -> list[Any]:
    """What ranks found, which is the same to the bit over plain leaves."""
    pool = ranks(layout.world_size)
    found, want = (pool.run(function, layout, *given, plain) for plain in (False, True))
    same_bits(found, want)
    return found


def trained(layout: Layout, options: dict[str, Any], plain: bool) -> Any:
    groups = groups_of(layout)
    trainer = trainer_of(groups, plain=plain, deterministic=True, **options)
    losses = [float(trainer.step(batch(i % 2, groups.rank)).loss) for i in range(4)]
    return losses, {k: x.float() for k, x in trainer.params().items()}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (ONE, {"live_bytes": 0}),
        (FOUR, {"accumulate": 2, "live_bytes": None}),
        pytest.param(TWO_BY_TWO, {"live_bytes": 0}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_adapters_train_and_the_base_stays(ranks, layout, options):
    (losses, params), *_ = as_over_plain(ranks, layout, trained, options)
    start = dict(over_decoded().named_parameters())
    for name, x in params.items():
        assert torch.equal(x, start[name].detach()) == is_base(name), name
    assert losses[-1] < losses[0]


# Replicas


def lose(layout: Layout, lost: int, differs: bool) -> Any:
    """A rank forgets what it trained, as a new process has; its base is that of its script."""
    both = (mf.make_groups(layout.partition_size, timeout_s=20) for _ in range(2))
    trainer, other = (trainer_of(x, deterministic=True) for x in both)
    rank, text = trainer.groups.rank, ""
    for each in (trainer, other):
        each.step(batch(0, rank))
    if rank == lost:
        for x in tree.flatten(trainer.state)[0]:
            x.fill_(0) if isinstance(x, Tensor) else None
        trainer.sync_state = replace(trainer.sync_state, step=0)
        trainer.state, trainer.member.lost = replace(trainer.state, step=0), True
        trainer.state.params["base.bias"].data.part_codes()[0][:1] += differs
    before = trainer.groups.traffic.sent_bytes["replicas"]
    try:
        trainer.reset()
    except DesyncError as error:
        text = str(error)
    sent = trainer.groups.traffic.sent_bytes["replicas"] - before
    for each in (trainer, other) if not differs else ():
        each.step(batch(1, rank))
    if not differs:
        same_bits(trainer.params(), other.params())
        same_bits(codes_of(trainer.state.params), codes_of(other.state.params))
    for each in (trainer, other):
        each.groups.close()
    return sent, sum(x.nbytes for x in tree.flatten(other.state)[0] if isinstance(x, Tensor)), text


@pytest.mark.parametrize(
    "layout", [COPIES, pytest.param(TWO_BY_TWO, marks=pytest.mark.thorough)], ids=str
)
def test_a_lost_rank_takes_what_is_trained_from_its_replica(ranks, layout):
    last, p = layout.world_size - 1, layout.partition_size
    words = 1200 * (layout.world_size // p)  # what all ranks compare in a reset
    found = ranks(layout.world_size).run(lose, layout, last, False)
    for rank, (sent, nbytes, text) in enumerate(found):
        asked = rank == last - p
        assert asked * nbytes <= sent <= asked * nbytes + words
        assert text == ""


def test_a_lost_rank_that_comes_back_with_another_base_is_refused(ranks):
    for _, _, text in ranks(2).run(lose, COPIES, 1, True):
        assert text.startswith("Trainer.reset: replicas have drifted apart")
        assert "first difference: state.params.base.bias" in text
