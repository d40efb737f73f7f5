"""Options that change numbers and differ between ranks are named before the first step."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of
from torch import nn

import mics_fn as mf
from mics_fn.optim import comparing

PAIR, FOUR = Layout((2,), 2), Layout((2, 2), 2)
optim = mf.optim


def cosine(peak: float) -> Any:
    return optim.warmup_cosine(peak, 5, 5_000)


def torchs(kind: Any, **options: Any) -> Any:
    return optim.from_torch(kind, lr=1e-2, **options)


# What an error names; what all ranks but one are given, and what that one is.
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "lr": (optim.adamw(1e-2), optim.adamw(2e-2)),
    "lr at steps 0, 1, 10, 1000": (optim.lion(cosine(0.1)), optim.lion(cosine(0.2))),
    "weight_decay": (optim.adamw(1e-2), optim.adamw(1e-2, weight_decay=0.1)),
    "optimizer": (torchs(torch.optim.Adam), torchs(torch.optim.AdamW)),
    "chain[0].max_value": (
        optim.chain(optim.clip_by_value(1.0), optim.sgd(0.1)),
        optim.chain(optim.clip_by_value(2.0), optim.sgd(0.1)),
    ),
}
outer = optim.sgd(0.5, momentum=0.9, nesterov=True)
OPTIONS: dict[str, tuple[str, Any, Any]] = {
    "accumulate": ("accumulate", 1, 2),
    "guard max_norm": ("guard", optim.Guard(max_norm=1.0), optim.Guard(max_norm=0.1)),
    "precision": ("precision", None, "output=f32"),
    "grad_dtype": ("grad_dtype", None, torch.float64),
    "outer lr": ("replica_sync", mf.replicas.diloco(2), mf.replicas.diloco(2, outer)),
}
CASES = {name: ("optimizer", *pair) for name, pair in OPTIMIZERS.items()} | OPTIONS


def errors_of(layout: Layout, names: list[str], odd: int | None) -> list[str]:
    """What each option gives if it differs on a rank."""
    found = []
    for name in names:
        torch.manual_seed(0)
        option, usual, other = CASES[name]
        given: dict[str, Any] = {"optimizer": optim.sgd(0.1)}
        given[option] = other if dist.get_rank() == odd else usual
        try:
            with warnings.catch_warnings(action="error"):
                mf.Trainer(nn.Linear(8, 8), given.pop("optimizer"), groups_of(layout), **given)
            found.append("")
        except mf.errors.DesyncError as error:
            found.append(str(error))
    return found


def test_an_option_that_differs_is_named_on_all_ranks(ranks):
    found, same = ranks(2).run(errors_of, PAIR, [*CASES], 1)
    assert found == same
    for name, text in zip(CASES, found, strict=True):
        head = f"Trainer: ranks differ in what changes numbers: {name}\n  rank 0: {name}: "
        assert text.startswith(head), text
        assert f"\n  rank 1: {name}: " in text
    assert ranks(2).run(errors_of, PAIR, [*CASES], None) == [[""] * len(CASES)] * 2
    for (text,) in ranks(4).run(errors_of, FOUR, ["lr"], 2):
        assert "\n  ranks 0, 1, 3: lr: 0.01\n  rank 2: lr: 0.02\n  fix: pass the same" in text


def by_hand(verb: str, odd: bool) -> str:
    """The error of `init_state` with groups, or of a first step that nobody compared before."""
    with mf.make_groups(2, timeout_s=20) as groups:
        shards = mf.shard({"w": torch.ones(4)}, groups)
        optimizer = optim.sgd(0.5 * (1 + odd * dist.get_rank()))
        state = mf.init_state(shards, optimizer)
        try:
            if verb == "init_state":
                mf.init_state(shards, optimizer, groups=groups)
            for _ in range(2):
                grads = mf.reduce_grads({"w": torch.ones(4)}, groups)
                state = mf.opt_step(state, grads)
        except mf.errors.DesyncError as error:
            assert set(state.params["w"].data.tolist()) <= {1.0}
            return str(error)
        return ""


@pytest.mark.parametrize("verb", ["init_state", "opt_step"])
def test_a_loop_by_hand_compares_its_optimizer(ranks, verb):
    for text in ranks(2).run(by_hand, verb, True):
        assert text.startswith(f"{verb}: ranks differ in what changes numbers: lr\n")
        assert "\n  rank 0: lr: 0.5\n  rank 1: lr: 1.0\n" in text
    assert ranks(2).run(by_hand, verb, False) == ["", ""]


def with_versions(*torch_versions: str) -> tuple[str, str]:
    """The error and the warning if ranks have these versions."""
    groups, found = groups_of(PAIR), ""
    shards = mf.shard({"w": torch.ones(4)}, groups)
    usual = comparing.versions
    versions = {**usual(), "version of torch": torch_versions[dist.get_rank()]}
    comparing.versions = lambda: versions  # pyright: ignore
    try:
        with warnings.catch_warnings(record=True, action="always") as seen:
            mf.init_state(shards, optim.sgd(0.1), groups=groups)
    except mf.errors.DesyncError as error:
        found = str(error)
    finally:
        comparing.versions = usual
    return found, " ".join(str(x.message) for x in seen)


def test_versions_that_are_near_are_a_warning(ranks):
    lines = "\n  rank 0: version of torch: 2.13.0\n  rank 1: version of torch: 2.13.1\n"
    for error, warning in ranks(2).run(with_versions, "2.13.0", "2.13.1"):
        assert error == ""
        assert warning.startswith(f"init_state: ranks differ in the version of torch{lines}")
    for error, warning in ranks(2).run(with_versions, "2.13.0", "3.0.0"):
        assert error.startswith(
            "init_state: ranks differ in what changes numbers: version of torch"
        )
        assert warning == ""
