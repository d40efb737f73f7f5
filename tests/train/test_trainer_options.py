"""What a real run asks of `Trainer`: dtypes, scaled losses, refused steps, clipping, equal bits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, same_bits
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import tree

LAYOUTS = [Layout((1,), 1), Layout((2, 2), 2), Layout((2, 2), 4)]
LR = 0.05


class Net(nn.Module):
    """Two layers and a norm, with a buffer that each training call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.dtype)
        x = self.first(x)
        return self.last(torch.tanh(self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)))


def rank_here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    draws = (torch.randn(4, n, generator=random, dtype=torch.float64) for n in (6, 3))
    x, y = (draw.to(dtype) for draw in draws)
    return x, y


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def copied(trainer: mf.Trainer) -> Any:
    """Everything that a refused step must leave as it is."""
    return tree.map_leaves(lambda x: x.clone() if isinstance(x, Tensor) else x, trainer.state)


# Clipping.


def clipped(layout: Layout, accumulate: int, options: dict[str, Any]) -> tuple[dict, list[float]]:
    """With leaves on several groups if `options` have `apart`."""
    groups: Any = groups_of(layout)
    alone, options = groups_of(Layout(layout.sizes, 1)), dict(options)
    if options.pop("apart", False):
        groups = lambda path, dense=groups: alone if "norm" in path else dense  # noqa: E731
    guard = mf.optim.Guard(max_norm=0.5, max_value=0.1)
    options |= {"loss": loss_of, "accumulate": accumulate, "guard": guard, "bucket_bytes": 300}
    sgd = mf.optim.sgd(LR, momentum=0.9)
    trainer = mf.Trainer(net(dtype=torch.float64), sgd, groups, **options)
    norms = []
    for step in range(3):
        metrics = trainer.step(batch_of(rank_here(), step, torch.float64))
        assert metrics.grad_norm is not None
        norms.append(metrics.grad_norm.item())
    return trainer.params(), norms


def clipped_alone(n: int) -> tuple[dict, list[float]]:
    model = net(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9)
    norms = []
    for step in range(3):
        parts = [batch_of(rank, step, torch.float64) for rank in range(n)]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss_of(model, (x, y)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
    return dict(model.named_parameters()), norms


@pytest.mark.parametrize(
    ("layout", "accumulate", "options"),
    [
        (LAYOUTS[0], 2, {}),
        (LAYOUTS[1], 1, {}),
        (LAYOUTS[2], 2, {}),
        (LAYOUTS[1], 2, {"apart": True}),
        (LAYOUTS[2], 1, {"apart": True, "deterministic": True}),
    ],
    ids=str,
)
def test_clipping_is_that_of_one_process(ranks, layout, accumulate, options):
    params, norms = clipped_alone(layout.world_size)
    assert max(norms) > 0.5  # it clips
    for found, seen in ranks(layout.world_size).run(clipped, layout, accumulate, options):
        assert seen == pytest.approx(norms, rel=1e-12)
        for name, value in params.items():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-12, atol=1e-13)


# Refused steps.


def overflowing(layout: Layout) -> None:
    """float16 whose gradient overflows in some steps on one rank only."""
    guard = mf.optim.Guard(mf.optim.dynamic_scale(2.0**10, interval=2, hysteresis=2))
    how = {"precision": "compute=f16,reduce=f16,output=f32", "guard": guard, "bucket_bytes": 300}
    trainer = mf.Trainer(net(), mf.optim.adamw(LR), groups_of(layout), loss=loss_of, **how)
    expected, taken = guard.scale, 0
    for step, overflows in enumerate([False, True, True, False, False, True, False]):
        before = copied(trainer)
        x, y = batch_of(rank_here(), step)
        if overflows and rank_here() == layout.world_size - 1:
            y = y * float("inf")
        metrics = trainer.step((x, y))
        assert metrics.scale == expected.value  # the one of the forward
        assert metrics.accepted is not overflows
        expected = expected.adjust(not overflows)
        assert trainer.guard.scale == expected
        taken += not overflows
        assert trainer.state.step == metrics.step == taken
        if overflows:
            same_bits(before, trainer.state)
    assert expected.value == 2.0**10  # down at the second overflow, up again, and spared once
    assert {piece.dtype for piece in tree.flatten(trainer.state.params)[0]} == {torch.float32}
    assert set(trainer.program.skeleton.seen) == {torch.float16}  # pyright: ignore


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_a_step_that_overflows_anywhere_changes_nothing_but_the_scale(ranks, layout):
    ranks(layout.world_size).run(overflowing, layout)


def scaled_against_not(layout: Layout) -> None:
    """Powers of two change no bit, also in the step after the scale has grown."""
    groups, found, optim = groups_of(layout), [], mf.optim
    scales = optim.no_scale(), optim.static_scale(64.0), optim.dynamic_scale(8.0, interval=1)
    for scale in scales:
        how = {"loss": loss_of, "guard": optim.Guard(scale)}
        trainer = mf.Trainer(net(), optim.sgd(LR, momentum=0.9), groups, **how)
        for step in range(3):
            trainer.step(batch_of(rank_here(), step))
        found.append((trainer.params(), trainer.guard.scale.value))
    assert [value for _, value in found] == [1.0, 64.0, 64.0]
    for params, _ in found[1:]:
        same_bits(found[0][0], params)


def test_a_scale_changes_no_bit(ranks):
    ranks(4).run(scaled_against_not, LAYOUTS[1])


def spiking(layout: Layout, action: Any) -> None:
    guard = mf.optim.Guard(spike=mf.optim.norm_spike(20.0, warmup=3, action=action))
    trainer = mf.Trainer(net(), mf.optim.sgd(1e-3), groups_of(layout), loss=loss_of, guard=guard)
    for step in range(6):
        x, y = batch_of(rank_here(), step)
        before = copied(trainer)
        metrics = trainer.step((x, y * 1e4 if step == 4 else y))
        assert metrics.spike == (step == 4)
        assert metrics.accepted == (step != 4 or action == "report")
        if not metrics.accepted:
            same_bits(before, trainer.state)


@pytest.mark.parametrize("action", ["skip", "report"])
def test_a_spike_is_skipped_or_reported(ranks, action):
    ranks(4).run(spiking, LAYOUTS[1], action)


# Dtypes.


def half(layout: Layout, as_function: bool) -> None:
    """bf16 with a norm in float32; what the model gets and gives."""
    policy = "compute=bf16, output=f32; *norm*: compute=f32"
    model, seen = net(), []

    def loss(model, batch):
        out = model(batch[0])
        seen.append((batch[0].dtype, out.dtype, model.first.weight.dtype, model.norm.weight.dtype))
        assert model.first.in_features == 6  # all else is the model's own
        return (out - batch[1]).square().mean()

    def loss_fn(params, batch):
        seen.append((batch[0].dtype, params["w"].dtype, params["norm"].dtype))
        return ((batch[0] @ params["w"]).to(params["norm"].dtype) * params["norm"]).square().mean()

    given, how = (model, {"loss": loss}) if not as_function else (loss_fn, {})
    if as_function:
        how = {"params": {"w": torch.ones(6, 3), "norm": torch.ones(3)}}
    groups = groups_of(layout)
    trainer = mf.Trainer(given, mf.optim.adamw(LR), groups, precision=policy, **how)
    assert trainer.step(batch_of(rank_here(), 0)).loss.dtype == torch.float32
    assert trainer.eval(batch_of(rank_here(), 9)).dtype == torch.float32
    b, f = torch.bfloat16, torch.float32
    assert set(seen) == {(b, b, f) if as_function else (f, f, b, f)}
    if not as_function:
        assert set(trainer.program.skeleton.seen) == {b}  # pyright: ignore
    assert {value.dtype for value in trainer.params().values()} == {f}
    assert {x.dtype for x in tree.flatten(trainer.state.opt.moments)[0]} == {f}


@pytest.mark.parametrize("as_function", [False, True])
def test_masters_stay_and_the_model_computes_in_the_policys_dtypes(ranks, as_function):
    ranks(4).run(half, LAYOUTS[1], as_function)


# Equal bits.


def run_twice(layout: Layout) -> None:
    groups, runs = groups_of(layout), []
    for live in (None, 0):
        trainer = mf.Trainer(
            net(), mf.optim.adamw(LR), groups, loss=loss_of, deterministic=True,
            precision="compute=bf16,reduce=bf16,output=f32", live_bytes=live, accumulate=2,
        )  # fmt: skip
        for step in range(3):
            trainer.step(batch_of(rank_here(), step))
        assert not torch.are_deterministic_algorithms_enabled()
        assert "in fixed order" in trainer.groups.describe()
        runs.append(trainer.params())
    same_bits(*runs)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_deterministic_runs_have_equal_bits(ranks, layout):
    ranks(layout.world_size).run(run_twice, layout)


def test_deterministic_says_which_op_is_not_and_restores_the_mode():
    def loss(params: dict, batch: Tensor) -> Tensor:
        assert torch.are_deterministic_algorithms_enabled()
        if batch.sum() > 0:
            raise RuntimeError("this op does not have a deterministic implementation")
        return (params["w"] * batch).sum()

    with mf.make_groups(1) as groups:
        trainer = mf.Trainer(
            loss, mf.optim.sgd(LR), groups, params={"w": torch.ones(2)}, deterministic=True
        )
        trainer.step(torch.zeros(2))
        with pytest.raises(RuntimeError, match="deterministic"):
            trainer.step(torch.ones(2))
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore


# Models made as shards.


def made_as_shards(layout: Layout, precision: str | None) -> None:
    groups = groups_of(layout)
    skeleton, shards = mf.init_model(Net, groups, seed=7, precision=precision, bucket_bytes=300)
    assert all(p.is_meta for p in skeleton.parameters())
    options = {"loss": loss_of, "precision": precision}
    found = [
        mf.Trainer(skeleton, mf.optim.adamw(LR), groups, params=shards, **options),
        mf.Trainer(net(7), mf.optim.adamw(LR), groups, bucket_bytes=300, **options),
    ]
    for trainer in found:
        for step in range(2):
            trainer.step(batch_of(rank_here(), step))
    same_bits(*(trainer.params() for trainer in found))
    same_bits(*(dict(trainer.state.buffers) for trainer in found))
    assert found[0].state.buffers["calls"] == 2


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(LAYOUTS[0], "param=f32, compute=bf16, output=f32; *norm*: compute=f32"), (LAYOUTS[1], None)],
)
def test_a_model_made_as_shards_trains_as_one_made_in_full(ranks, layout, precision):
    ranks(layout.world_size).run(made_as_shards, layout, precision)
