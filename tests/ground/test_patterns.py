"""Patterns of paths, the overrides that have them, and the options that choose leaves by path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mics_fn as mf
from mics_fn.offload import in_file
from mics_fn.optim import by_leaf

BIASES = {"0.bias", "1.norm.bias", "bias.bias"}
NAMES = (*BIASES, "0.weight", "1.norm.weight", "bias.weight")


def params() -> dict[str, Tensor]:
    return {name: torch.ones(2) for name in sorted(NAMES)}


def stepped(groups: mf.Groups, optimizer: Any) -> set[str]:
    """The leaves that a step without gradients changes."""
    state = mf.init_state(mf.shard(params(), groups), optimizer)
    state = mf.opt_step(state, mf.reduce_grads({k: torch.zeros(2) for k in NAMES}, groups))
    return {k for k, x in state.params.items() if not torch.equal(x.data, torch.ones(2))}


def laid(groups: mf.Groups, is_chosen: Callable[[Any], bool], **options: Any) -> set[str]:
    shards = mf.shard(params(), groups, **options)
    return {name for name, leaf in shards.items() if is_chosen(leaf)}


PATTERNS: dict[str, Callable[[mf.Groups, Any, str], set[str]]] = {
    "shard(precision=)": lambda g, by, _: laid(
        g, lambda x: x.bucket.compute == torch.bfloat16, precision=f"{by}: compute=bf16"
    ),
    "shard(where=)": lambda g, by, folder: laid(
        g, lambda x: in_file(x.data), where=f"{by}: params=disk:{folder}", bucket=lambda p: p
    ),
    "init_state(where=)": lambda g, by, folder: placed(g, f"{by}: states=disk:{folder}"),
    "by_path": lambda g, by, _: stepped(
        g, mf.optim.by_path({by: mf.optim.adamw(1.0, weight_decay=0.5)}, default=mf.optim.sgd(0.0))
    ),
}


def placed(groups: mf.Groups, where: str) -> set[str]:
    shards = mf.shard(params(), groups, bucket=lambda path: path)
    state = mf.init_state(shards, mf.optim.sgd(1.0, momentum=0.5), where=where)
    moments = by_leaf(state.opt).moments["momentum_buffer"]
    return {name for name, leaf in moments.items() if in_file(leaf.data)}


@pytest.mark.parametrize("option", PATTERNS)
def test_the_biases_are_chosen_as_users_of_torch_write_it(option: str, tmp_path: Path):
    with mf.make_groups(1) as groups:
        assert PATTERNS[option](groups, "*.bias", f"{tmp_path}") == BIASES
        assert PATTERNS[option](groups, "0.bias", f"{tmp_path}") == {"0.bias"}
        for pattern in ("*.bais", "bias", "['0.bias']"):
            with pytest.raises(mf.MicsError, match="matches no (trained )?leaf") as caught:
                PATTERNS[option](groups, pattern, f"{tmp_path}")
            assert repr(pattern) in f"{caught.value}"
            assert "0.bias" in f"{caught.value}".partition("nearest: ")[2]
