"""`Trainer.state_dict` is what the module itself would save, and lines of `fit` without tqdm."""

import copy
import sys
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, same_bits
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import mics_fn as mf

X = torch.linspace(-1, 1, 24).view(8, 3)


class Everything(nn.Module):
    """Tied weights, buffers of all kinds, a parametrization, and a state of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.normed = weight_norm(nn.Linear(4, 4))
        self.second = nn.Linear(4, 3)
        self.again = nn.Linear(3, 4, bias=False)
        self.again.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))
        self.scratch: torch.Tensor
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def get_extra_state(self):
        return {"format": 3}

    def set_extra_state(self, state):
        assert state == {"format": 3}

    def forward(self, x):
        self.seen += 1
        hidden = self.normed(self.norm(self.first(x)))
        return self.second(hidden + self.again(x)).square().mean() * self.scratch[0]


def made() -> Everything:
    torch.manual_seed(0)
    return Everything()


def exported(layout: Layout, steps: int, **options):
    groups = groups_of(layout)
    trainer = mf.Trainer(made(), mf.optim.adamw(1e-2), groups, **options)
    for step in range(steps):
        trainer.step(X + step + 0.1 * groups.rank)
    found: Any = trainer.state_dict()
    kept = copy.deepcopy(found)
    trainer.step(X)  # which writes into the memory of the state
    same_bits(dict(found), dict(kept))
    loss = trainer.eval(X).item()
    return found, trainer.state_dict(), loss


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 2)], ids=str)
def test_the_module_takes_it_and_computes_what_the_trainer_computes(ranks, layout: Layout):
    results = ranks(layout.world_size).run(exported, layout, 2)
    for found, last, loss in results:
        model = made()
        own: Any = model.state_dict()
        assert list(found) == list(own)
        assert "scratch" not in found
        assert found["_extra_state"] == {"format": 3}
        for name, value in own.items():
            if isinstance(value, torch.Tensor):
                assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
                assert not found[name].requires_grad
        assert torch.equal(found["again.weight"], found["first.weight"])
        assert not torch.equal(found["first.weight"], own["first.weight"])
        assert found["seen"] == found["norm.num_batches_tracked"] == 2
        assert found._metadata == own._metadata  # the versions of modules
        assert str(model.load_state_dict(last, strict=True)) == "<All keys matched successfully>"
        assert model.again.weight is model.first.weight
        with torch.no_grad():
            assert model.eval()(X).item() == pytest.approx(loss, rel=1e-5)
        same_bits(dict(last), dict(results[0][1]))


class Odd(nn.Linear):
    """It saves a tensor that it holds neither as a parameter nor as a buffer."""

    def get_extra_state(self):
        return self.weight.to("meta")


def test_what_has_no_state_dict_is_refused_by_name():
    groups = mf.make_groups(1)
    odd = mf.Trainer(Odd(3, 1), mf.optim.sgd(0.1), groups, loss=lambda m, x: m(x).sum())
    with pytest.raises(mf.errors.LeafError, match="'_extra_state', which is neither a parameter"):
        odd.state_dict()


# How far `fit` is.


def test_fit_prints_lines_where_tqdm_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    trainer = mf.Trainer(made(), mf.optim.sgd(0.01), mf.make_groups(1))
    trainer.fit([X], steps=7, progress=False)
    assert capsys.readouterr() == ("", "")
    trainer.fit([X], steps=7, log_every=3)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert [line.partition(":")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert all("loss 0." in line and line.endswith(" samples/s") for line in lines)
