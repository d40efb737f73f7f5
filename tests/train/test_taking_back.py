"""What another trainer or another loader makes of a save: refused, or gone on with."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_carried import Net, Rows, fit
from test_data import Numbers, Run, gone_on, seed, stateful, train
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

import mics_fn as mf
from mics_fn import optim
from mics_fn.checkpoint.directory import decoded, encoded
from mics_fn.errors import LeafError, PlanError
from mics_fn.optim import Guard, dynamic_scale, norm_spike, static_scale


def made(groups: Any, last: Any = None, **given: Any) -> mf.Trainer:
    torch.manual_seed(0)
    model = Net()
    model.forgiving, model.last = True, model.last if last is None else last
    every: dict[str, Any] = {"guard": Guard(dynamic_scale(8.0), spike=norm_spike())} | given
    return mf.Trainer(model, every.pop("optimizer", optim.adam(1e-2)), groups, **every)


OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "rate": (lambda: {"optimizer": optim.adam(2e-2)}, "lr: saved 0.01, now 0.02"),
    "guard": (lambda: {"guard": Guard(static_scale(8.0))}, "guard scale kind: saved dynamic, now"),
    "factor": (lambda: {"guard": Guard(dynamic_scale(8.0, factor=4.0), spike=norm_spike())},
               "guard scale factor: saved 2.0, now 4.0"),
    "precision": (lambda: {"precision": "compute=bf16"}, "precision: saved as given, now compute"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_options(tmp_path, name: str) -> None:
    """They are an error, or on request a warning; then the run goes on with the new ones."""
    groups, (given, text) = mf.make_groups(1), OTHERS[name]
    trainer = made(groups)
    fit(trainer, DataLoader(Rows(1), 4, shuffle=True), 3)
    mf.Checkpoints(tmp_path).save(trainer)
    with pytest.raises(PlanError, match=text):
        made(groups, checkpoint=mf.Checkpoints(tmp_path), **given())
    with pytest.warns(UserWarning, match="differs from the saved one") as caught:
        other = made(groups, checkpoint=mf.Checkpoints(tmp_path, other_options="warn"), **given())
    assert text in str(caught[0].message)
    assert fit(other, DataLoader(Rows(1), 4, shuffle=True), 2)[-1].step == 5
    if name == "guard":
        assert other.guard.scale.value == 8.0


def test_a_buffer_of_another_shape_is_refused_by_name(tmp_path) -> None:
    groups = mf.make_groups(1)
    mf.Checkpoints(tmp_path).save(made(groups))
    with pytest.raises(LeafError, match="buffer 'last' is not as it was saved"):
        made(groups, last=torch.zeros(2, dtype=torch.int64), checkpoint=mf.Checkpoints(tmp_path))


# Other loaders, and other numbers of ranks


def by_epoch(n: int = 12, ranks: int = 1, **options: Any) -> DataLoader:
    data = Numbers(n)
    return DataLoader(data, 3, sampler=DistributedSampler(data, ranks, 0, **options))


def plain(n: int = 12, batch: int = 3, **options: Any) -> DataLoader:
    return DataLoader(Numbers(n), batch, **options)


OTHER_ORDERS: dict[str, tuple[Any, Callable[[], Any], str]] = {
    # What is saved and what is passed, and how they differ.
    "shuffle": (by_epoch, lambda: by_epoch(shuffle=False), "now: .* shuffle=False"),
    "without a sampler": (lambda: by_epoch(shuffle=False), plain, ""),
    "of torch": (plain, lambda: plain(shuffle=True), "now: .* shuffle=True"),
    "samples": (plain, lambda: plain(13), "now: samples=13"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_another_order_of_samples_is_refused_or_begins_a_new_pass(name: str) -> None:
    saved, now, text = OTHER_ORDERS[name]
    run = Run()
    train(run.over(saved()), run, 1)
    for exact in (True, False):
        if not text:
            assert next(gone_on(run, exact=exact).over(now())).tolist() == [3, 4, 5]
            continue
        other = gone_on(run, exact=exact)
        for _ in range(2):  # an error does not make the next `fit` begin anew
            with pytest.raises(LeafError, match=text) as caught:
                next(other.over(now()))
        assert "other_options='warn'" in str(caught.value)
        with pytest.warns(UserWarning, match=text) as warned:
            gone_on(run, exact=exact, strict=False).over(now()).send(None)
        assert "a new pass begins" in str(warned[0].message)


def test_another_size_of_batches_goes_on_behind_the_same_samples() -> None:
    run = Run()
    train(run.over(stateful(Numbers(12), 3)), run, 2)
    for make in (plain, lambda **size: stateful(Numbers(12), size["batch"])):
        assert next(gone_on(run).over(make(batch=2))).tolist() == [6, 7]
    other = gone_on(run)
    for _ in range(2):  # an error does not make the next `fit` begin anew
        with pytest.raises(LeafError, match="a pass ended before the 6 samples"):
            next(other.over(DataLoader(Numbers(12), 3, sampler=SequentialSampler(range(3)))))


@settings(max_examples=20)
@given(ranks=st.integers(1, 4), batch=st.integers(1, 4), used=st.integers(1, 5))
def test_another_number_of_ranks_goes_on_behind_the_same_samples(
    ranks: int, batch: int, used: int
) -> None:
    data, run = Numbers(24 * ranks), Run()
    seed(0)
    sampler = DistributedSampler(data, ranks, 0)
    loader = DataLoader(data, batch, sampler=sampler)
    train(run.over(loader, ranks), run, used, ranks)
    alone = DistributedSampler(data, 1, 0)
    other = gone_on(run, exact=False)
    found = next(other.over(DataLoader(data, 2, sampler=alone)))
    skipped = math.ceil(ranks * batch * used / 2) * 2
    assert found.tolist() == list(alone)[skipped : skipped + 2]
    assert other.kept(0) is not None


# Values and states


def test_plain_values_come_back() -> None:
    inner = [None, True, -(2**70), 1e-300, "\ud800", (), [], {}, ("dict",), {"tuple": [1, (2,)]}]
    value = {"dict": inner, "": tuple(inner), "tuple": {"dict": {"tuple": inner}}}
    assert repr(decoded(*encoded(value))) == repr(value)
