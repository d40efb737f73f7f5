"""Adapters that are trained over a base model kept as codes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from torch import Tensor, nn
from torch.func import functional_call

import mics_fn as mf
from mics_fn.collectives import Codec
from mics_fn.errors import PlanError
from mics_fn.offload import Coded
from mics_fn.train.carried import carried, take_back

KIND = "int4[64]"
PRECISION = f"*base*: param={KIND}"
EPS = torch.finfo(torch.float32).eps


class Adapted(nn.Module):
    """A linear layer with a product of two narrow ones beside it."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.base = nn.Linear(ins, outs)
        self.down = nn.Linear(ins, 2, bias=False)
        self.up = nn.Linear(2, outs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def made() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Adapted(30, 50), Adapted(50, 6))


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


def trained(layout: Layout, steps: int, options: dict[str, Any], plain: bool = False) -> Any:
    groups = groups_of(layout)
    trainer = trainer_of(groups, plain=plain, **options)
    rank = groups.rank
    losses = [float(trainer.step(batch(i % 2, rank)).loss) for i in range(steps)]
    return losses, {k: x.float() for k, x in trainer.params().items()}


LAYOUTS = [Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2), Layout((2, 2), 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"live_bytes": 0}, {"accumulate": 2, "live_bytes": None}], ids=str
)
@pytest.mark.covering
def test_adapters_train_as_over_plain_decoded_weights(ranks, layout, options):
    """To the bit: losses, adapters, and the base, which does not change."""
    pool, options = ranks(layout.world_size), {"deterministic": True, **options}
    got = pool.run(trained, layout, 6, options)
    want = pool.run(trained, layout, 6, options, True)
    for (losses, params), (expected, plain) in zip(got, want, strict=True):
        assert losses == expected
        same_bits(params, plain)
    start = dict(over_decoded().named_parameters())
    for name, x in got[0][1].items():
        assert torch.equal(x, start[name].detach()) == is_base(name), name
    assert got[0][0][-1] < got[0][0][0]


# Against one process in float64


def linear_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) * y).sum() / len(x)


def gradients(layout: Layout, live: bool) -> dict[str, Tensor]:
    groups = groups_of(layout)
    model = made()
    params = mf.shard(dict(model.named_parameters()), groups, frozen=is_base, precision=PRECISION)
    x, y = batch(7, groups.rank)

    def loss(shards: Any) -> Tensor:
        if live:
            full = mf.defer(shards, groups, mf.on_demand(live_bytes=0)).params
        else:
            full = mf.gather(shards, groups)
        return linear_loss(lambda x: functional_call(model, full, (x,)), x, y)

    grads = mf.reduce_grads(torch.func.grad(loss)(params), groups)
    return {k: v for k, v in mf.unshard(grads, groups).items() if not is_base(k)}


def wide(world: int, magnitudes: bool) -> dict[str, Tensor]:
    """Gradients in float64 of the batch of all ranks; or the sums of all terms' magnitudes."""
    model = over_decoded().double()
    x, y = (torch.cat(x).double() for x in zip(*(batch(7, r) for r in range(world)), strict=True))
    if magnitudes:
        x, y = x.abs(), y.abs()
        with torch.no_grad():
            for w in model.parameters():
                w.abs_()
    linear_loss(model, x, y).backward()
    return {k: w.grad for k, w in model.named_parameters() if not is_base(k)}  # pyright: ignore


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.covering
def test_gradients_of_adapters_are_those_of_one_process_in_float64(ranks, layout, live):
    """The loss is linear in each of its factors, so that no cancellation hides in the bound.

    A term is rounded at most once in each addition and multiplication that it goes through: those
    of two layers, forward and backward, of the batch, and of the mean over ranks.
    """
    roundings = 2 * (30 + 50 + 6 + 2 + 2) + 4 + layout.world_size + 16
    want, sizes = (wide(layout.world_size, each) for each in (False, True))
    for found in ranks(layout.world_size).run(gradients, layout, live):
        for name, x in want.items():
            bound = roundings * EPS * sizes[name]
            assert bool(((found[name].double() - x).abs() <= bound).all()), name


# Checkpoints and what a Trainer does besides


def fitted(layout: Layout, folder: str, counts: list[int]) -> dict[str, Tensor]:
    """Jobs one after the other, each of which goes on for so many steps."""
    groups, found = groups_of(layout), {}
    for count in counts:
        trainer = trainer_of(
            groups, checkpoint=mf.Checkpoints(folder, every=2, keep=2), deterministic=True
        )
        trainer.fit([batch(i, groups.rank) for i in range(6)], steps=count)
        found = trainer.params()
    return found


@pytest.mark.parametrize("layout", [Layout((2,), 2), Layout((2, 2), 2)], ids=str)
@pytest.mark.covering
@pytest.mark.short("2-p2")
def test_a_job_goes_on_to_the_bit(ranks, tmp_path: Path, layout):
    pool = ranks(layout.world_size)
    want = pool.run(fitted, layout, str(tmp_path / "a"), [6])
    for got, whole in zip(pool.run(fitted, layout, str(tmp_path / "b"), [4, 2]), want, strict=True):
        same_bits(got, whole)


def goes_on(layout: Layout, folder: str) -> Any:
    """The parameters of a trainer that loads, with codes that were others before."""
    groups = groups_of(layout)
    other = mf.shard(
        {k: x.detach() + 1 for k, x in made().named_parameters()},
        groups,
        frozen=is_base,
        precision=PRECISION,
        bucket_bytes=1500,
    )
    like = mf.init_state(other, mf.optim.adamw(3e-2))
    before = mf.unshard(other, groups)
    found = mf.checkpoint.load(folder + "/state", like, groups)
    same_bits(mf.unshard(other, groups), before)  # it is read into memory of its own
    held = [x.data for x in found.state.params.values() if isinstance(x.data, Coded)]
    own = len({x.codes.row.data_ptr() for x in held if x.codes.row is not None})
    assert own == len({leaf.bucket for leaf in found.state.params.values() if is_kept(leaf)})
    return {k: x.float() for k, x in mf.unshard(found.state.params, groups).items()}


def is_kept(leaf: Any) -> bool:
    return isinstance(leaf.data, Coded)


def saves(layout: Layout, folder: str) -> Any:
    groups = groups_of(layout)
    trainer = trainer_of(groups)
    trainer.step(batch(0, groups.rank))
    mf.checkpoint.save(folder + "/state", trainer.state, groups, step=1)
    mf.checkpoint.start_save(folder + "/state", trainer.state, groups, step=2).wait()
    return {k: x.float() for k, x in mf.unshard(trainer.state.params, groups).items()}


PAIRS = [(LAYOUTS[i], LAYOUTS[j]) for i, j in [(1, 1), (1, 3), (3, 0), (2, 1), (0, 2)]]


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=str)
@pytest.mark.covering(before=LAYOUTS[1], after=LAYOUTS[3])
def test_codes_are_saved_as_they_are_and_load_on_any_ranks(ranks, tmp_path: Path, before, after):
    want = ranks(before.world_size).run(saves, before, str(tmp_path))[0]
    for found in ranks(after.world_size).run(goes_on, after, str(tmp_path)):
        same_bits(found, want)
    files = list((tmp_path / "state").glob("step-*1/*"))
    nbytes = sum(x.numel() for k, x in want.items() if is_base(k))
    others = sum(x.numel() for k, x in want.items() if not is_base(k))
    # Codes of half a byte and 2 bytes for 64 of them, whole blocks, three float32 per adapter.
    assert sum(each.stat().st_size for each in files) < 0.54 * nbytes + 12 * others + 20_000


def taken_back(layout: Layout, folder: str) -> Any:
    """A trainer of other weights that takes back the state of this one."""
    groups = groups_of(layout)
    trainer = trainer_of(groups)
    trainer.step(batch(0, groups.rank))
    state, extra = carried(trainer)
    mf.checkpoint.save(folder, state, groups, step=1)
    model = made()
    with torch.no_grad():
        for x in model.parameters():
            x += 1
    other = mf.Trainer(
        model,
        mf.optim.adamw(3e-2),
        groups,
        loss=loss_of,
        bucket_bytes=1500,
        frozen=is_base,
        precision=PRECISION,
    )
    take_back(other, mf.checkpoint.load(folder, carried(other)[0], groups).state, extra)
    return trainer.params(), other.params()


def test_a_trainer_takes_back_codes(ranks, tmp_path: Path):
    for mine, theirs in ranks(2).run(taken_back, Layout((2,), 2), str(tmp_path)):
        same_bits(theirs, mine)


def drifted(layout: Layout) -> str:
    """What the comparison of replicas says once one rank holds other codes."""
    groups = groups_of(layout)
    trainer = trainer_of(groups)
    if groups.rank == 1:
        leaf = trainer.state.params["1.base.weight"]
        leaf.data.part_codes()[0][3] += 1
    try:
        mf.optim.same_replicas(trainer.state, groups)
    except mf.errors.DesyncError as error:
        return str(error)
    return "nothing"


def test_replicas_with_other_codes_are_found(ranks):
    for text in ranks(2).run(drifted, Layout((2,), 1)):
        assert "state.params.1.base.weight" in text


def given(own: str, precision: str | None) -> str:
    groups = mf.make_groups(1)
    model = made().to(getattr(torch, own))
    params = mf.shard(dict(model.named_parameters()), groups, frozen=is_base, precision=PRECISION)
    try:
        trainer = mf.Trainer(
            model, mf.optim.sgd(0.1), groups, params=params, loss=loss_of, precision=precision
        )
    except PlanError as error:
        return str(error)
    x, y = batch(0, 0)
    dtype = getattr(torch, own)
    return "" if float(trainer.step((x.to(dtype), y.to(dtype))).loss) > 0 else "no loss"


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
def test_shards_that_are_given_are_compared_with_the_precision(own):
    assert given(own, PRECISION) == ""
    assert given(own, None) == ""
    text = given(own, "*base*: param=int8[64]")
    assert "params.0.base.bias is not kept as this precision= says" in text
    assert "expected param=int8[64]\n  got param=int4[64]" in text
