"""Parameters that need no fetch: plain tensors, whose writes are found at the end of the run."""

import gc
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch
from cases import plain_values, same_bits
from torch import Tensor
from torch.nn import functional as F

from mics_fn import Trainer, _torch, defer, keep_all, make_groups, shard
from mics_fn.deferred.live import Deferred
from mics_fn.errors import LeafError
from mics_fn.optim import sgd


def _shards(groups):
    values = {"w": torch.arange(6.0).view(2, 3), "b": torch.full((2,), float("nan"))}
    return shard(values, groups)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "an op in place": lambda w: w.mul_(2),
    "an op in place on a view": lambda w: w[0].zero_(),
    "out=": lambda w: torch.ones(2, 3, out=w),
    "data": lambda w: w.data.add_(1),
    "numpy": lambda w: w.numpy().__setitem__(0, 3.0),
    "other data": lambda w: setattr(w, "data", torch.ones(2, 3)),
    "other memory": lambda w: w.set_(torch.ones(2, 3)),  # pyright: ignore
    "a norm of an embedding": lambda w: F.embedding(torch.tensor([1]), w, max_norm=0.1),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_raises_at_the_end_and_reaches_no_shard(name: str) -> None:
    groups = make_groups(1)
    shards = _shards(groups)
    before = plain_values(shards)
    with (
        torch.no_grad(),
        pytest.raises(LeafError, match=r"w was written to"),
        defer(shards, groups, keep_all()) as full,
    ):
        WRITES[name](full["w"])
    same_bits(shards, before)


def test_a_write_in_a_step_raises_before_the_update() -> None:
    class Clamps(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.01, 0.01)
            return super().forward(x)

    trainer = Trainer(
        Clamps(3, 2), sgd(0.1), make_groups(1), loss=lambda m, x: m(x).square().mean()
    )
    before = plain_values(trainer.state.params)
    with pytest.raises(LeafError, match=r"weight was written to"):
        trainer.step(torch.ones(4, 3))
    same_bits(trainer.state.params, before)
    assert trainer.state.step == 0


def test_what_writes_nothing_or_puts_it_back_is_no_error() -> None:
    groups = make_groups(1)
    with torch.no_grad(), defer(_shards(groups), groups, keep_all()) as full:
        full["b"].data_ptr()  # copies the bucket, whose NaN equals itself
        full["w"].mul_(2).div_(2)


def test_values_that_outlive_the_run_keep_their_values() -> None:
    groups = make_groups(1)
    shards = _shards(groups)
    with torch.no_grad(), defer(shards, groups, keep_all()) as full:
        pass
    shards["w"].data.zero_()
    assert torch.equal(full["w"], torch.arange(6.0).view(2, 3))


def test_without_a_block_a_write_is_a_warning_at_the_latest() -> None:
    groups = make_groups(1)
    run = defer(_shards(groups), groups, keep_all())
    with torch.no_grad():
        run.params["b"].zero_()
    kept = [run]
    del run
    with pytest.warns(UserWarning, match=r"b was written to"):
        kept.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = defer(_shards(groups), groups, keep_all())
        del run
        gc.collect()


def test_what_is_cast_or_cannot_be_shared_stays_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = make_groups(1)
    cast = shard({"w": torch.ones(2)}, groups, precision="compute=bf16")
    with torch.no_grad(), defer(cast, groups, keep_all()) as full:
        assert type(full["w"]) is Deferred
    assert _torch.lazy_clone(torch.from_numpy(numpy.ones(6))) is None
    monkeypatch.setattr(_torch, "lazy_clone", lambda chunk: None)
    with torch.no_grad(), defer(_shards(groups), groups, keep_all()) as full:
        assert type(full["w"]) is Deferred
        assert full["w"].sum() == 15
