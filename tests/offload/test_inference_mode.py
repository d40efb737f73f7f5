"""What lies in files or is kept as codes, used under `torch.inference_mode`: the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random, same_bits

import mics_fn as mf
from mics_fn import optim, tree

KINDS: dict[str, dict[str, Any]] = {
    "parameters in files": {"where": "params=disk:{}"},
    "a part of them": {"where": "params=disk:{}; *b*: params=device"},
    "states in files": {"where": "states=disk:{}"},
    "sent as codes": {"where": "params=disk:{}", "precision": "gather=int8[64]"},
    "kept as codes": {"precision": "param=int4[64]", "frozen": lambda path: True},
    "moments as codes": {"precision": "state=int8[64]"},
}


def values() -> dict[str, torch.Tensor]:
    return {"a": random(0, 30, 41), "b": random(1, 70)}


def deferred(shards: Any, groups: mf.Groups) -> Any:
    with mf.defer(shards, groups, mf.on_demand(live_bytes=0)) as full:
        return [x.sin().sum() for x in full.values()]


def stepped(shards: Any, groups: mf.Groups, where: dict[str, Any]) -> Any:
    grads = mf.reduce_grads(values(), groups, like=shards)
    state = mf.opt_step(mf.init_state(shards, optim.adamw(0.1), **where), grads)
    return mf.unshard(mf.opt_step(state, grads, donate=True).params, groups)


def outcomes(kind: str, groups: mf.Groups, folder: str) -> list[Any]:
    how = {name: x.format(folder) if name == "where" else x for name, x in KINDS[kind].items()}
    where = {name: x for name, x in how.items() if name == "where"}
    shards = mf.shard(values(), groups, **how)
    mf.checkpoint.save(f"{folder}/steps", shards, groups, step=1, overwrite="newer")
    found = [
        mf.gather(shards, groups.hierarchy),
        mf.unshard(mf.checkpoint.load(f"{folder}/steps", shards, groups).state, groups),
        [mf.get(shards, name, groups) for name in shards],
        deferred(shards, groups),
    ]
    return found if "frozen" in how else [*found, stepped(shards, groups, where)]


def verbs(layout: Layout, kind: str, folder: str) -> None:
    groups = groups_of(layout)
    with torch.no_grad():
        want = outcomes(kind, groups, folder)
    with torch.inference_mode():
        found = outcomes(kind, groups, folder)
    same_bits(tree.map_leaves(torch.clone, found), want)
    with torch.no_grad():  # what was made in that mode and is kept can be written to
        same_bits(outcomes(kind, groups, folder), want)


@pytest.mark.parametrize("kind", KINDS)
def test_verbs_have_the_same_bits(ranks: Callable[[int], Any], tmp_path: Any, kind: str):
    ranks(2).run(verbs, Layout((2,), 2), kind, f"{tmp_path}")
