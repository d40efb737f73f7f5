"""A `Trainer` with states or gradients in files, or which steps before all is there: same bits."""

from itertools import product
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, placed_as, random, same_bits
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import optim, tree
from mics_fn.offload import is_stored
from mics_fn.optim.flat import by_leaf

LAYOUT = Layout((2, 2), 2)
PLACEMENTS = ["zero3", "zero2", "hpz", "fixed_order"]
PRECISIONS = [None, "param=f32, compute=bf16", "param=f32, reduce=bf16"]
GUARDS: dict[str, dict[str, Any]] = {
    "none": {},
    "clip": {"guard": optim.Guard(max_norm=0.1)},
    "scale": {"guard": optim.Guard(optim.dynamic_scale(8.0))},
}
MERGES: dict[str, Any] = {"steps": {}, "diloco": {"replica_sync": mf.replicas.diloco(2)}}
SCHEDULES: dict[str, Any] = {"all": {"live_bytes": None}, "few": {"live_bytes": 600}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 20), nn.LayerNorm(20), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]).float() - batch[1]).square().mean()


def trained(placement: str, options: dict[str, Any]) -> tuple[list[Tensor], Any]:
    groups = groups_of(LAYOUT)
    if placement != "zero3":
        groups = placed_as(groups, placement)
    torch.manual_seed(0)
    trainer = mf.Trainer(
        Net(), optim.adamw(1e-2), groups, loss=loss_of, accumulate=2, bucket_bytes=300, **options
    )
    rank, losses = groups.rank, []
    for step in range(3):
        batch = random(50 * step + rank, 4, 6), random(50 * step + rank + 7, 4, 3)
        losses.append(trainer.step(batch).loss)
    return losses, trainer.state


def of_bits(placement: str, named: Any, moved: dict[str, Any]) -> None:
    precision, guard, merge, schedule = named
    options = {"precision": precision, **GUARDS[guard], **MERGES[merge], **SCHEDULES[schedule]}
    want, before = trained(placement, options)
    got, after = trained(placement, {**options, **moved})
    same_bits(got, want)
    same_bits(after.params, before.params)
    moments = [x for x in tree.flatten(after.opt.moments)[0] if isinstance(x, Tensor)]
    assert all(is_stored(x) for x in moments) is ("states=disk" in moved.get("where", ""))
    same_bits(by_leaf(mf.move(after, "").opt), by_leaf(before.opt))


def cases() -> list[Any]:
    """Each value of each option once in the short suite, and all in the thorough one."""
    every = product(PLACEMENTS, PRECISIONS, GUARDS, MERGES, SCHEDULES)
    short = {
        ("zero3", None, "none", "steps", "few"),
        ("zero2", PRECISIONS[1], "clip", "diloco", "all"),
        ("hpz", PRECISIONS[2], "scale", "steps", "few"),
        ("fixed_order", None, "none", "steps", "all"),
    }
    return [
        pytest.param(*case, marks=() if case in short else pytest.mark.thorough) for case in every
    ]


@pytest.mark.parametrize(("placement", "precision", "guard", "merge", "schedule"), cases())
def test_states_elsewhere_train_with_the_same_bits(
    ranks, tmp_path, placement, precision, guard, merge, schedule
):
    moved = {"where": f"states=disk:{tmp_path}", "overlap_step": True}
    ranks(4).run(of_bits, placement, (precision, guard, merge, schedule), moved)
    assert not list(tmp_path.glob("*.scratch"))


SOME = [
    *product(PLACEMENTS, [None], ["none"], MERGES, SCHEDULES),
    *product(["zero3", "zero2"], PRECISIONS, GUARDS, ["steps"], ["few"]),
]
SHORT = [SOME[1], ("zero2", PRECISIONS[1], "clip", "steps", "few")]


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
@pytest.mark.parametrize(
    ("placement", "precision", "guard", "merge", "schedule"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.thorough) for case in SOME[::3])],
)
@pytest.mark.short(
    "zero3-None-none-steps-few-early", "zero2-param=f32, compute=bf16-clip-steps-few-early"
)
def test_gradients_elsewhere_train_with_the_same_bits(
    ranks, tmp_path, placement, precision, guard, merge, schedule, early
):
    where = f"grads=disk:{tmp_path}/grads" + f", states=disk:{tmp_path}" * early
    moved = {"where": where, "overlap_step": early}
    ranks(4).run(of_bits, placement, (precision, guard, merge, schedule), moved)


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
def test_the_same_of_one_rank_whose_gradients_lie_apart(tmp_path, monkeypatch, early):
    """As autograd gave them: kernels round the end of a long tensor in another way."""
    monkeypatch.setitem(globals(), "LAYOUT", Layout((1,), 1))
    moved = {"where": f"grads=disk:{tmp_path}", "overlap_step": early}
    of_bits("zero3", (None, "none", "steps", "few"), moved)


def of_refusal(folder: str) -> None:
    """A guard names the leaf that is not finite, and a hop 2 of one's own gets plain shards."""
    groups, where = groups_of(Layout((2,), 2)), f"grads=disk:{folder}"
    guard = optim.Guard(max_norm=1.0, on_nonfinite="skip")
    batch = random(1, 4, 6), random(2, 4, 3)

    def own(grads: Any, groups: Any) -> Any:
        assert not any(is_stored(x) for x in tree.flatten(grads)[0])
        return mf.reduce_grads(grads, groups)

    torch.manual_seed(0)
    options: list[dict[str, Any]] = [{"guard": guard}, {"hop2": own}]
    for option in options:
        found = []
        for text in (where, ""):
            trainer = mf.Trainer(Net(), optim.sgd(0.1), groups, loss=loss_of, where=text, **option)
            torch.manual_seed(0)
            found.append((trainer.step(batch), trainer.step((batch[0] * torch.nan, batch[1]))))
        for got, want in zip(*found, strict=True):
            assert got.nonfinite == want.nonfinite
            assert got.accepted == want.accepted
        assert found[0][1].nonfinite is not None
        assert (found[0][0].accepted, found[0][1].accepted) == (True, False)


def test_a_refused_step_and_a_hop_2_of_ones_own(ranks, tmp_path):
    ranks(2).run(of_refusal, f"{tmp_path}")


def test_overlap_alone(ranks):
    named = None, "none", "steps", "few"
    ranks(4).run(of_bits, "zero3", named, {"overlap_step": True})


def test_what_does_not_go_together_is_refused():
    groups, model = mf.make_groups(1), Net()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"overlap_step": True, "recoverable": True}, "recoverable=True"),
        ({"where": "states=nowhere"}, "is not a place"),
        ({"overlap_step": 1}, "overlap_step"),
    ]
    for options, text in wrong:
        with pytest.raises(mf.errors.PlanError, match=text):
            mf.Trainer(model, optim.sgd(0.1), groups, loss=loss_of, **options)
