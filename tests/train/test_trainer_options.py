"""What a real run asks of `Trainer`: dtypes, scaled losses, refused steps, clipping, equal bits."""

import copy

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


# Refused steps.


def overflowing(layout: Layout) -> None:
    """float16 whose gradient overflows in some steps on one rank only."""
    guard = mf.optim.Guard(mf.optim.dynamic_scale(2.0**10, interval=2))
    how = {"precision": "compute=f16,reduce=f16,output=f32", "guard": guard, "bucket_bytes": 300}
    trainer = mf.Trainer(net(), mf.optim.adamw(LR), groups_of(layout), loss=loss_of, **how)
    expected, taken = guard.scale, 0
    for step, overflows in enumerate([False, True, True, False, False, True, False]):
        before = copy.deepcopy(trainer.state)
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
    assert expected.value == 2.0**8  # down twice, up after two good steps, and down
    assert {piece.dtype for piece in tree.flatten(trainer.state.params)[0]} == {torch.float32}
    assert set(trainer.program.skeleton.seen) == {torch.float16}  # pyright: ignore


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_a_step_that_overflows_anywhere_changes_nothing_but_the_scale(ranks, layout):
    ranks(layout.world_size).run(overflowing, layout)


# Dtypes.


def half(layout: Layout) -> None:
    """bf16 with a norm in float32: what a loss function gets, and what its masters are."""
    seen, params = [], {"w": torch.ones(6, 3), "norm": torch.ones(3)}

    def loss_fn(params, batch):
        seen.append((batch[0].dtype, params["w"].dtype, params["norm"].dtype))
        return ((batch[0] @ params["w"]).to(params["norm"].dtype) * params["norm"]).square().mean()

    how = {"params": params, "precision": "compute=bf16, output=f32; *norm*: compute=f32"}
    trainer = mf.Trainer(loss_fn, mf.optim.adamw(LR), groups_of(layout), **how)
    assert trainer.step(batch_of(rank_here(), 0)).loss.dtype == torch.float32
    assert trainer.eval(batch_of(rank_here(), 9)).dtype == torch.float32
    assert set(seen) == {(torch.bfloat16, torch.bfloat16, torch.float32)}
    masters = [*trainer.params().values(), *tree.flatten(trainer.state.opt.moments)[0]]
    assert {x.dtype for x in masters} == {torch.float32}


def test_masters_stay_and_a_loss_computes_in_the_policys_dtypes(ranks):
    ranks(4).run(half, LAYOUTS[1])


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
