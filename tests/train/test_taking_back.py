"""What `take_back` refuses, and that nothing has changed then; and what a trainer tells a saver."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from test_carried import Net, Rows, fit, held, loaded, saved
from test_data import Numbers, Run, gone_on, seed, stateful, train
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

import mics_fn as mf
from mics_fn import optim, tree
from mics_fn.checkpoint.directory import decoded, encoded
from mics_fn.errors import LeafError, MicsError, PlanError
from mics_fn.optim import Guard, dynamic_scale, norm_spike, static_scale
from mics_fn.train.resuming import carried, take_back

PAIR = Layout((2,), 2)


def made(groups: Any, **given: Any) -> mf.Trainer:
    torch.manual_seed(0)
    model = Net()
    model.forgiving = True
    every: dict[str, Any] = {"guard": Guard(dynamic_scale(8.0), spike=norm_spike())} | given
    return mf.Trainer(model, every.pop("optimizer", optim.adam(1e-2)), groups, **every)


def run(groups: Any, steps: int = 3, **given: Any) -> mf.Trainer:
    trainer = made(groups, **given)
    fit(trainer, DataLoader(Rows(1), 4, shuffle=True), steps)
    return trainer


def unchanged(trainer: mf.Trainer, act: Callable[[], None], kind: type, *texts: str) -> None:
    """An act raises an error with these texts, and leaves all as it was."""
    before, guard = copy.deepcopy(held(trainer)), trainer.guard
    random = torch.get_rng_state()
    with pytest.raises(kind) as caught:
        act()
    for text in texts:
        assert text in str(caught.value)
    same_bits(before, held(trainer))
    assert trainer.guard is guard
    assert torch.equal(random, torch.get_rng_state())


# What is refused


BAD: dict[str, tuple[list[Any], Any, str]] = {
    "no scale": (["guard"], None, "this is not what was saved"),
    "buffers of others": (["buffers"], {}, "extra.buffers.last is missing"),
    "a long buffer": (["buffers", "last"], torch.ones(2), "got a tensor of (2,)"),
    "random states": (["random", "cpu"], torch.ones(3), "this is not what was saved"),
    "numpy's": (["random", "numpy", 1], "x", "this is not what was saved"),
    "a position": (["data"], {"epoch": 1}, "this is not what was saved"),
    "no number": (["data", "samples"], "8", "this is not what was saved"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_extra(name: str) -> None:
    groups = mf.make_groups(1)
    trainer, (path, value, text) = run(groups), BAD[name]
    state, extra = loaded(trainer, saved(trainer))
    inner = extra
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    unchanged(trainer, lambda: take_back(trainer, state, extra), LeafError, text)


def test_every_part_is_needed_of_a_state_of_the_same_model() -> None:
    groups = mf.make_groups(1)
    trainer = run(groups)
    state, extra = carried(trainer)
    for name in extra:
        part = {key: value for key, value in extra.items() if key != name}
        unchanged(trainer, partial(take_back, trainer, state, part), LeafError, name)
    other = {"train": state["train"], "sync": 3}
    odd = tree.map_leaves(lambda x: x.double() if isinstance(x, Tensor) else x, state)
    foreign = carried(run(groups, optimizer=optim.lion(1e-3)))[0]
    for wrong, text in (
        (other, "state.sync.step"), (odd, "torch.float64, on cpu, expected a tensor of"),
        (foreign, "take_back: it does not fit this trainer"),
    ):  # fmt: skip
        unchanged(trainer, partial(take_back, trainer, wrong, extra), LeafError, text)


OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "rate": (lambda: {"optimizer": optim.adam(2e-2)}, "lr: saved 0.01, now 0.02"),
    "guard": (lambda: {"guard": Guard(static_scale(8.0))}, "guard scale kind: saved dynamic, now"),
    "factor": (lambda: {"guard": Guard(dynamic_scale(8.0, factor=4.0), spike=norm_spike())},
               "guard scale factor: saved 2.0, now 4.0"),
    "precision": (lambda: {"precision": "compute=bf16"}, "precision: saved as given, now compute"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_options(name: str) -> None:
    """They are an error, or on request a warning; then the run goes on with the new ones."""
    groups, (given, text) = mf.make_groups(1), OTHERS[name]
    first, other = run(groups), made(groups, **given())
    found = loaded(other, saved(first))
    unchanged(other, lambda: take_back(other, *found), PlanError, text)
    with pytest.warns(UserWarning, match="differs from the saved one") as caught:
        take_back(other, *found, other_options="warn")
    assert text in str(caught[0].message)
    assert fit(other, DataLoader(Rows(1), 4, shuffle=True), 2)[-1].step == 5
    if name == "guard":
        assert other.guard.scale.value == 8.0


def one_bad_rank(what: str) -> str:
    trainer = run(groups_of(PAIR))
    state, extra = carried(trainer)
    if dist.get_rank() == 1 and what == "guard":
        extra["guard"] = 7
    elif dist.get_rank() == 1:
        state = {**state, "sync": mf.replicas.SyncState(9)}
    before = copy.deepcopy(held(trainer))
    with pytest.raises(MicsError) as caught:
        take_back(trainer, state, extra)
    same_bits(before, held(trainer))
    return f"{caught.typename}: {caught.value}"


def test_one_bad_rank_is_an_error_on_all(ranks) -> None:
    other, own = ranks(2).run(one_bad_rank, "guard")
    assert other.startswith("DesyncError: take_back: it failed on other ranks")
    assert "rank 1: LeafError: take_back: this is not what was saved" in other
    assert own.startswith("LeafError: take_back: this is not what was saved")
    for text in ranks(2).run(one_bad_rank, "step"):
        assert text.startswith("DesyncError: ")
        assert "rank 1: go on at call 9" in text


# Other loaders, and other numbers of ranks


def by_epoch(n: int = 12, ranks: int = 1, **options: Any) -> DataLoader:
    data = Numbers(n)
    return DataLoader(data, 3, sampler=DistributedSampler(data, ranks, 0, **options))


def plain(n: int = 12, batch: int = 3, **options: Any) -> DataLoader:
    return DataLoader(Numbers(n), batch, **options)


OTHER_ORDERS: dict[str, tuple[Any, Callable[[], Any], str]] = {
    # What is saved and what is passed, and how they differ.
    "shuffle": (by_epoch, lambda: by_epoch(shuffle=False), "shuffle: saved True, now False"),
    "without a sampler": (lambda: by_epoch(shuffle=False), plain, ""),
    "of torch": (plain, lambda: plain(shuffle=True), "shuffle: saved False, now True"),
    "samples": (plain, lambda: plain(13), "samples: saved 12, now 13"),
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
    with pytest.raises(LeafError, match="a pass ended before the 6 samples"):
        next(gone_on(run).over(DataLoader(Numbers(12), 3, sampler=SequentialSampler(range(3)))))


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


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": [0, {1, 2}]}, "save: $extra.data.loader.a.1 is set"),
        ({"a": {3: 4}}, "save: $extra.data.loader.a is dict"),
    ],
)
def test_a_state_that_cannot_be_saved(state: Any, text: str) -> None:
    with pytest.raises(LeafError) as caught:
        encoded({"data": {"loader": state}})
    assert text in str(caught.value)
