"""`init_model(weights=, names=, missing=)`: what the weights lack is as the model makes it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, same_bits
from torch import nn

import mics_fn as mf


class Adapted(nn.Module):
    """A linear layer with a product of two narrow ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def adapted() -> nn.Sequential:
    model = plain()
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])  # type: ignore[arg-type]
    return model


def is_new(name: str) -> bool:
    return ".down." in name or ".up." in name


def name_here(name: str) -> str:
    layer, _, rest = name.partition(".")
    return name if layer == "1" else f"{layer}.base.{rest}"


def saved(path: Path) -> nn.Module:
    torch.manual_seed(9)
    model = plain()
    model[1].running_mean += 3.0  # pyright: ignore
    torch.save(model.state_dict(), path)
    return model


def made(layout: Layout, path: Path):
    groups = groups_of(layout)
    options = {"names": name_here, "missing": is_new, "frozen": lambda name: not is_new(name)}
    skeleton, shards = mf.init_model(adapted, groups, seed=4, weights=path, **options)
    frozen = {name for name, leaf in shards.items() if not isinstance(leaf, mf.shards.Sharded)}
    return mf.unshard(shards, groups), dict(skeleton.named_buffers()), frozen


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 2)], ids=str)
def test_old_parameters_are_read_and_new_ones_are_made(ranks, tmp_path: Path, layout: Layout):
    old = saved(tmp_path / "old.pt")
    torch.manual_seed(4)
    want = adapted()
    missing, extra = want.load_state_dict(
        {name_here(k): x for k, x in old.state_dict().items()}, strict=False
    )
    assert extra == []
    assert all(map(is_new, missing))
    for params, buffers, frozen in ranks(layout.world_size).run(made, layout, tmp_path / "old.pt"):
        same_bits(params, {name: x.detach() for name, x in want.named_parameters()})
        same_bits(buffers, dict(want.named_buffers()))
        assert frozen == {name for name in params if not is_new(name)}


@pytest.mark.parametrize("how", [{"names": name_here}, {"missing": is_new}])
def test_what_is_said_of_weights_that_are_not_given_is_refused(how: dict[str, Any]):
    with pytest.raises(mf.errors.PlanError, match="names= and missing= are about weights="):
        mf.init_model(adapted, mf.make_groups(1), seed=0, **how)


def test_what_is_missing_and_not_new_is_an_error(tmp_path: Path):
    saved(tmp_path / "old.pt")
    groups = mf.make_groups(1)
    with pytest.raises(mf.errors.LeafError) as caught:
        mf.init_model(
            adapted,
            groups,
            seed=0,
            weights=tmp_path / "old.pt",
            names=lambda name: None if name == "0.bias" else name_here(name),
            missing=is_new,
        )
    assert "  params.0.base.bias is missing\n  fix: " in str(caught.value)
