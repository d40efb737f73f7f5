"""A `Trainer` with states or gradients in files, or which steps before all is there: same bits."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, placed_as, random, same_bits
from disks import files_of
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import optim, tree
from mics_fn.offload import in_file
from mics_fn.optim.flat import by_leaf

ALONE, BOTH = Layout((1,), 1), Layout((2, 2), 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 20), nn.LayerNorm(20), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]).to(batch[1].dtype) - batch[1]).square().mean()


def trained(layout: Layout, placement: str, options: dict[str, Any]) -> tuple[list[Tensor], Any]:
    groups = placed_as(groups_of(layout), placement)
    torch.manual_seed(0)
    options = {"loss": loss_of, "accumulate": 2, "bucket_bytes": 300, **options}
    if options.pop("merged", False):
        options["replica_sync"] = mf.replicas.diloco(2)
    if "hop2" in options:
        options["replica_sync"] = mf.replicas.reduced_by(options.pop("hop2"))
    trainer = mf.Trainer(Net(), optim.adamw(1e-2), groups, **options)
    losses = []
    for step in range(3):
        seed = 50 * step + groups.rank
        losses.append(trainer.step((random(seed, 4, 6), random(seed + 7, 4, 3))).loss)
    return losses, trainer.state


def of_bits(layout: Layout, placement: str, options: Any, where: str, early: bool) -> None:
    want, before = trained(layout, placement, options)
    got, after = trained(layout, placement, {**options, "where": where, "overlap_step": early})
    same_bits(got, want)
    same_bits(after.params, before.params)
    moments = [x for x in tree.flatten(after.opt.moments)[0] if isinstance(x, Tensor)]
    assert all(in_file(x) for x in moments) is ("states=disk" in where)
    same_bits(by_leaf(mf.move(after, "").opt), by_leaf(before.opt))


def own_hop(grads: Any, groups: Any) -> Any:
    """A hop 2 of one's own gets plain shards, wherever sums of gradients lie."""
    assert not any(in_file(x) for x in tree.flatten(grads)[0])
    return mf.sync_replicas(grads, groups)


STATES, GRADS = "states=disk:D", "grads=disk:D/grads"
ALL: dict[str, Any] = {"guard": optim.Guard(on_nonfinite="ignore"), "live_bytes": 600}
CLIPPED: dict[str, Any] = {"guard": optim.Guard(max_norm=0.1), "precision": "compute=bf16"}
SCALED: dict[str, Any] = {"guard": optim.Guard(optim.dynamic_scale(8.0)), "live_bytes": 600}


def nothing_open(folder: str) -> None:
    gc.collect()  # a busy rank may have a file for a moment longer
    assert Path(folder) not in files_of(folder)  # sums below it stay with their groups


@pytest.mark.parametrize(
    ("layout", "placement", "options", "where", "early"),
    [
        (BOTH, "zero3", ALL, "", True),
        (BOTH, "zero3", ALL, STATES, True),
        (BOTH, "zero2", CLIPPED | {"merged": True}, STATES, False),
        (BOTH, "hpz", SCALED | {"precision": "reduce=bf16"}, STATES, False),
        (BOTH, "fixed_order", ALL, STATES, True),
        (BOTH, "zero3", ALL, f"{GRADS}, {STATES}", True),
        (BOTH, "zero2", CLIPPED, f"{GRADS}, {STATES}", False),
        (BOTH, "zero2", SCALED, GRADS, False),
        (BOTH, "zero3", {"hop2": own_hop}, GRADS, False),
        # Gradients lie apart: kernels round the end of a long tensor in another way.
        (ALONE, "zero3", ALL, GRADS, False),
        (ALONE, "zero3", ALL, GRADS, True),
    ],
)
@pytest.mark.short(
    "layout1-zero3-options1-states=disk:D-True",
    "layout3-hpz-options3-states=disk:D-False",
    "layout6-zero2-options6-grads=disk:D/grads, states=disk:D-False",
    "layout8-zero3-options8-grads=disk:D/grads-False",
    "layout9-zero3-options9-grads=disk:D/grads-False",
)
def test_training_has_the_bits_of_all_in_memory(
    ranks, tmp_path, layout, placement, options, where, early
):
    where = where.replace("D", f"{tmp_path}")
    ranks(layout.world_size).run(of_bits, layout, placement, options, where, early)
    ranks(layout.world_size).run(nothing_open, f"{tmp_path}")


EVERYWHERE = ["", "grads=host", "grads=disk:D", "params=host", "states=disk:D"]
EVERYWHERE += ["params=disk:D, states=disk:D, grads=disk:D"]
EVERYWHERE += ["params=disk:D, grads=disk:D; *weight*: grads=device"]


def of_the_twin(layout: Layout, placement: str, options: dict[str, Any]) -> None:
    """Clipped steps of all ranks are those of one process, in float64, on the batches of all."""
    dense, accumulate = groups_of(layout), options["accumulate"]
    alone: Any = groups_of(layout._replace(partition_size=1))
    apart = {"ddp": alone, "apart": lambda path: alone if "norm" in path else dense}
    groups = apart.get(placement) or placed_as(dense, placement)
    torch.manual_seed(0)
    model, twin = (copy.deepcopy(x) for x in [Net().double()] * 2)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    options |= {"loss": loss_of, "bucket_bytes": 600}
    options |= {"guard": optim.Guard(max_norm=0.3)}
    trainer = mf.Trainer(model, optim.sgd(0.1, momentum=0.9), groups, **options)
    for step in range(3):
        count = layout.world_size * accumulate * 2
        x, y = (random(9 * step + k, count, k, dtype=torch.float64) for k in (6, 3))
        own = slice(dense.rank * accumulate * 2, (dense.rank + 1) * accumulate * 2)
        found = trainer.step((x[own], y[own])).grad_norm
        optimizer.zero_grad()
        loss_of(twin, (x, y)).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        assert norm > 0.3  # it clips
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0, check_dtype=False)
        optimizer.step()
    params = trainer.params()
    for name, want in twin.named_parameters():
        torch.testing.assert_close(params[name], want.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", [Layout((2,), 2), Layout((2, 2), 2), Layout((2, 2), 4)], ids=str)
@pytest.mark.parametrize("placement", [*mf.placement.PLACEMENTS, "fixed_order", "apart"])
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
