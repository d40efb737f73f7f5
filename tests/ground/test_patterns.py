"""Patterns of paths, the overrides that have them, and the options that choose leaves by path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import checks
from mics_fn.offload import Where, is_stored
from mics_fn.optim import by_leaf
from mics_fn.shards import Precision, Sharded

BIASES = {"0.bias", "1.norm.bias", "bias.bias"}
NAMES = (*BIASES, "0.weight", "1.norm.weight", "bias.weight")
ENDS = lambda name: name.endswith("bias")  # noqa: E731


def params() -> dict[str, Tensor]:
    return {name: torch.ones(2) for name in sorted(NAMES)}


def stepped(groups: mf.Groups, optimizer: Any) -> set[str]:
    """The leaves that a step without gradients changes."""
    state = mf.init_state(mf.shard(params(), groups), optimizer)
    state = mf.opt_step(state, mf.reduce_grads({k: torch.zeros(2) for k in NAMES}, groups))
    return {k for k, x in state.params.items() if not torch.equal(x.data, torch.ones(2))}


def decayed(make: Callable[..., Any]) -> Any:
    how = {"weight_decay": 0.5}
    return lambda groups, by, _: stepped(groups, make(1.0, decay_mask=by, **how))


def laid(groups: mf.Groups, is_chosen: Callable[[Any], bool], **options: Any) -> set[str]:
    shards = mf.shard(params(), groups, **options)
    return {name for name, leaf in shards.items() if is_chosen(leaf)}


def together(groups: mf.Groups, by: Any, _: str) -> set[str]:
    """The leaves of buckets in which all leaves are chosen: the key of a bucket is the answer."""
    shards = mf.shard(params(), groups, order=by, bucket=by)
    mine = shards["0.bias"].bucket
    return {name for name, leaf in shards.items() if leaf.bucket == mine}


def made(groups: mf.Groups, by: Any, folder: str) -> set[str]:
    """The parameters that weights may lack."""

    def make() -> nn.Module:
        inner = nn.ModuleDict({"norm": nn.LayerNorm(2)})
        return nn.ModuleDict({"0": nn.Linear(2, 2), "1": inner, "bias": nn.Linear(2, 2)})

    whole = {k: x for k, x in make().state_dict().items() if not k.endswith("bias")}
    _, shards = mf.init_model(make, groups, seed=0, weights=whole, missing=by)
    return {name for name in shards if name not in whole}


FUNCTIONS: dict[str, Callable[[mf.Groups, Any, str], set[str]]] = {
    "shard(frozen=)": lambda g, by, _: laid(g, lambda x: not isinstance(x, Sharded), frozen=by),
    "shard(order=, bucket=)": together,
    "init_model(missing=)": made,
    "adamw(decay_mask=)": decayed(mf.optim.adamw),
    "sgd(decay_mask=)": decayed(mf.optim.sgd),
    "from_torch(decay_mask=)": decayed(
        lambda lr, **how: mf.optim.from_torch(torch.optim.AdamW, lr=lr, **how)
    ),
}
PATTERNS: dict[str, Callable[[mf.Groups, Any, str], set[str]]] = {
    "shard(precision=)": lambda g, by, _: laid(
        g, lambda x: x.bucket.compute == torch.bfloat16, precision=f"{by}: compute=bf16"
    ),
    "shard(where=)": lambda g, by, folder: laid(
        g, lambda x: is_stored(x.data), where=f"{by}: params=disk:{folder}", bucket=lambda p: p
    ),
    "init_state(where=)": lambda g, by, folder: placed(g, f"{by}: states=disk:{folder}"),
    "move(where=)": lambda g, by, folder: placed(g, "", f"{by}: states=disk:{folder}"),
    "by_path": lambda g, by, _: stepped(
        g, mf.optim.by_path({by: mf.optim.adamw(1.0)}, default=mf.optim.sgd(0.0))
    ),
}


def placed(groups: mf.Groups, first: str, then: str | None = None) -> set[str]:
    shards = mf.shard(params(), groups, bucket=lambda path: path)
    state = mf.init_state(shards, mf.optim.sgd(1.0, momentum=0.5), where=first)
    state = state if then is None else mf.move(state, then)
    moments = by_leaf(state.opt).moments["momentum_buffer"]
    return {name for name, leaf in moments.items() if is_stored(leaf.data)}


@pytest.mark.parametrize("option", [*FUNCTIONS, *PATTERNS])
def test_the_biases_are_chosen_as_users_of_torch_write_it(option: str, tmp_path: Path):
    with mf.make_groups(1) as groups:
        if option in FUNCTIONS:
            assert FUNCTIONS[option](groups, ENDS, f"{tmp_path}") == BIASES
            return
        assert PATTERNS[option](groups, "*.bias", f"{tmp_path}") == BIASES
        assert PATTERNS[option](groups, "0.bias", f"{tmp_path}") == {"0.bias"}
        for pattern in ("*.bais", "bias", "['0.bias']"):
            with pytest.raises(mf.MicsError, match="matches no (trained )?leaf") as caught:
                PATTERNS[option](groups, pattern, f"{tmp_path}")
            assert repr(pattern) in f"{caught.value}"
            assert "0.bias" in f"{caught.value}".partition("nearest: ")[2]


@pytest.mark.parametrize("kind", [Precision, Where])
@pytest.mark.parametrize("override", ["*", ("*",), ("*", None), (None, Precision()), ("*", 1, 2)])
def test_an_override_is_a_pair_of_a_pattern_and_a_value(kind, override: Any):
    with pytest.raises(mf.errors.PlanError, match=f"^{kind.__name__}: override .* is not a pair"):
        checks.checked_override(override, kind)


@pytest.mark.parametrize("pattern", ["", " a", "a ", "a;b", "a\nb", "a=b"])
def test_a_pattern_has_a_text_form(pattern):
    with pytest.raises(mf.errors.PlanError, match="has a pattern without a text form") as caught:
        checks.checked_override((pattern, Where()), Where, marks=";=")
    fix = "write ? for ';', for '=' and for spaces at its ends"
    assert f"the override {pattern!r}" in f"{caught.value}"
    assert f"{caught.value}".endswith(fix)


def test_what_means_nothing_in_a_text_form_may_be_in_a_pattern():
    assert checks.checked_override(["a=b", Precision()], Precision) == ("a=b", Precision())
