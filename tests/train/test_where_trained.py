"""A `Trainer` with states or gradients in files, or which steps before all is there: same bits."""

import copy
import gc
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
    "none": {"guard": optim.Guard(on_nonfinite="ignore")},
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
    ranks(4).run(gc.collect)  # a rank on a busy machine may have a file for a moment longer
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


EVERYWHERE = [
    *("", "grads=host", "grads=disk:D", "params=host", "params=disk:D", "states=disk:D"),
    *(
        "params=disk:D, states=disk:D, grads=disk:D",
        "params=disk:D, grads=disk:D; *weight*: grads=device",
    ),
]


def exact_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def of_the_twin(layout: Layout, placement: str, options: dict[str, Any]) -> None:
    """Steps of all ranks are those of one process, in float64, on the batches of all."""
    layout = layout._replace(partition_size=1) if placement == "ddp" else layout
    groups, accumulate = placed_as(groups_of(layout), placement), options["accumulate"]
    torch.manual_seed(0)
    model, twin = (copy.deepcopy(x) for x in [Net().double()] * 2)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    trainer = mf.Trainer(
        model, optim.sgd(0.1, momentum=0.9), groups, loss=exact_loss, bucket_bytes=600, **options
    )
    for step in range(3):
        count = groups.world_size * accumulate * 2
        x, y = (random(9 * step + k, count, k, dtype=torch.float64) for k in (6, 3))
        own = slice(groups.rank * accumulate * 2, (groups.rank + 1) * accumulate * 2)
        trainer.step((x[own], y[own]))
        optimizer.zero_grad()
        exact_loss(twin, (x, y)).backward()
        optimizer.step()
    params = trainer.params()
    for name, want in twin.named_parameters():
        torch.testing.assert_close(params[name], want.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", [Layout((2,), 2), Layout((2, 2), 2), Layout((2, 2), 4)], ids=str)
@pytest.mark.parametrize("placement", mf.placement.PLACEMENTS)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("live_bytes", [0, 600, None])
@pytest.mark.covering("placement", where="grads=disk:D")
def test_every_placement_trains_as_one_process_wherever_things_lie(
    ranks, tmp_path, layout, placement, where, accumulate, live_bytes
):
    options: dict[str, Any] = {"where": where.replace("D", f"{tmp_path}")}
    options |= {"accumulate": accumulate, "live_bytes": live_bytes}
    ranks(layout.world_size).run(of_the_twin, layout, placement, options)


def by_path(parts: int, last: Any) -> Any:
    patterns = ["*bias*", "*norm*", "*last*"][:parts]
    given = [optim.sgd(0.1), optim.chain(optim.clip_by_value(0.01), optim.adamw(1e-2)), last]
    return optim.by_path(dict(zip(patterns, given, strict=False)), default=last)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: optim.adamw(1e-2),
    "chain": lambda groups: optim.chain(optim.clip_by_value(1.0), optim.adamw(1e-2)),
    "by_path": lambda groups: by_path(1, optim.adamw(1e-2)),
    "by_path of three": lambda groups: by_path(3, optim.lion(1e-3)),
    "by_path of torch's": lambda groups: by_path(2, optim.from_torch(torch.optim.RMSprop, lr=1e-3)),
    "chain of by_path": lambda groups: optim.chain(
        optim.clip_by_global_norm(0.1, groups), by_path(2, optim.sgd(0.1, momentum=0.9))
    ),
}


def of_optimizer(layout: Layout, name: str, where: str, bucket_bytes: int, how: str) -> None:
    """Steps give the bits of steps in memory, whatever becomes of the states before them."""
    groups, found = groups_of(layout), []
    for places in ("", where):
        torch.manual_seed(0)
        params = {k: x.detach().clone() for k, x in Net().named_parameters()}
        shards = mf.shard(params, groups, bucket_bytes=bucket_bytes, where=places)
        state = mf.init_state(shards, OPTIMIZERS[name](groups), where=places)
        for step in range(3):
            grads = {k: random(step, *x.shape) for k, x in params.items()}
            before = [x.data.clone() for x in state.params.values()]
            hold = mf.offload.Hold([x.data for x in state.params.values()] if how == "held" else [])
            old, donate = state, how != "kept" and step > 0
            means = mf.reduce_grads(grads, groups, like=state.params)
            state = mf.opt_step(state, means, donate=donate)
            hold.release()
            if not donate:
                same_bits([x.data.clone() for x in old.params.values()], before)
        found.append(([x.data.clone() for x in state.params.values()], mf.move(state, "").opt))
    same_bits(found[1][0], found[0][0])
    same_bits(by_leaf(found[1][1]), by_leaf(found[0][1]))


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2,), 2)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("where", [x for x in EVERYWHERE if "params" in x or "states" in x])
@pytest.mark.parametrize("bucket_bytes", [25 * 2**20, 300])
@pytest.mark.parametrize("how", ["given", "kept", "held"])
@pytest.mark.covering("name", where="params=disk:D")
def test_every_optimizer_steps_wherever_things_lie(
    ranks, tmp_path, layout, name, where, bucket_bytes, how
):
    where = where.replace("D", f"{tmp_path}")
    ranks(layout.world_size).run(of_optimizer, layout, name, where, bucket_bytes, how)


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
        ({"where": "states=nowhere"}, "Place: kind='nowhere'"),
        ({"overlap_step": 1}, "overlap_step"),
    ]
    for options, text in wrong:
        with pytest.raises(mf.errors.PlanError, match=text):
            mf.Trainer(model, optim.sgd(0.1), groups, loss=loss_of, **options)
