"""Pieces in files that travel as codes: every verb gives the same bits as for pieces in memory.

The twin is the same tree of shards, with the same precision, all of it in memory.
"""

import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Layout, groups_of, placed_as, random, same_bits
from torch import Tensor

import mics_fn as mf
from mics_fn import tree
from mics_fn.deferred import live as live_module
from mics_fn.errors import FileError
from mics_fn.offload import Scratch, is_stored
from mics_fn.shards import is_leaf

LAYOUTS = [Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2), Layout((2, 2), 4)]
PRECISIONS = [
    "gather=int8[64]",
    "gather=int4[32]@node; *b*: gather=f32",
    "compute=bf16, gather=fp8[64], hop1=int8[64], hop2=int4[64]",
    "param=bf16, gather=int8[32]; *a*: gather=int4[64]",
    "gather=bf16",
]
PLACES = {
    "all": "params=disk:{}",
    "some": "params=disk:{}; *a*: params=device; *c*: params=host",
    "few": "*b*: params=disk:{}",
}
SCHEDULES = [lambda: mf.on_demand(live_bytes=4000), mf.keep_all]


def values() -> dict[str, Tensor]:
    sizes = {"a": (130,), "b": (9, 50), "c": (2, 3), "d": (700,), "e": (5,)}
    return {k: random(i, *size) * 3 for i, (k, size) in enumerate(sizes.items())}


def pair(groups: mf.Groups, precision: str, place: str, folder: str) -> tuple[Any, Any]:
    """The shards of a tree in memory and in files; padding is poisoned in both."""
    how: dict[str, Any] = {"precision": precision, "bucket_bytes": 1500}
    how["frozen"] = lambda path: "e" in path
    stored = mf.shard(values(), groups, where=PLACES[place].format(folder), **how)
    in_memory = mf.shard(values(), groups, **how)
    every = [leaf.data for leaf in tree.flatten(stored, is_leaf)[0]]
    assert any(is_stored(x) for x in every) or all(not x.numel() for x in every)
    return in_memory, stored


def loss_of(full: Any) -> Tensor:
    return torch.stack([((x.double() + i) ** 3).sum() for i, x in enumerate(full.values())]).sum()


def found_by(shards: Any, groups: mf.Groups) -> list[Any]:
    """What each verb gives that gathers."""
    found = [mf.gather(shards, groups), mf.shards.start_gather(shards, groups).wait()]
    found.append(mf.unshard(shards, groups))
    with torch.no_grad():
        for make in SCHEDULES:
            schedule = make()
            for _ in range(2):  # the second run follows what the first one has learned
                with mf.defer(shards, groups, schedule) as full:
                    found.append({k: x * 1 for k, x in full.items()})
                    found.append({k: x * 1 for k, x in reversed(full.items())})
    return found


def deferred_once(shards: Any, groups: mf.Groups) -> Any:
    with torch.no_grad(), mf.defer(shards, groups, mf.on_demand(live_bytes=0)) as full:
        return {k: x * 1 for k, x in full.items()}


def derived(shards: Any, groups: mf.Groups) -> list[Any]:
    policy = mf.on_demand(live_bytes=0)

    def later(shards: Any) -> Tensor:
        with mf.defer(shards, groups, policy) as full:
            return loss_of(full)

    found = [torch.func.grad(lambda s: loss_of(mf.gather(s, groups)))(shards)]
    found += [torch.func.grad(later)(shards) for _ in range(2)]
    for live in (0, None):
        total, live_bytes = mf.GradSum(micro_steps=2), live
        schedule = mf.keep_all() if live_bytes is None else mf.on_demand(live_bytes=live_bytes)
        with mf.defer(shards, groups, schedule, into=total) as full:
            for _ in range(2):
                total.backward(loss_of(full))
        found.append(total.grads())
        total.release()
    directions = tree.map_leaves(lambda x: torch.ones(x.shape, dtype=x.dtype), shards)
    found += torch.func.jvp(later, (shards,), (directions,))
    return found


def verbs(layout: Layout, precision: str, place: str, scheme: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        groups = groups_of(layout)
        precision = precision if len(layout.sizes) > 1 else precision.replace("@node", "")
        in_memory, stored = pair(groups, precision, place, folder)
        if scheme is not None:
            groups = placed_as(groups, scheme)
        for a, b in zip(found_by(in_memory, groups), found_by(stored, groups), strict=True):
            same_bits(a, b)
        for a, b in zip(derived(in_memory, groups), derived(stored, groups), strict=True):
            same_bits(a, b)
        for path in in_memory:
            same_bits(mf.get(in_memory, path, groups), mf.get(stored, path, groups))
        lacking = [{k: x for k, x in shards.items() if k != "a"} for shards in (in_memory, stored)]
        same_bits(*(deferred_once(shards, groups) for shards in lacking))


CASES = [
    (LAYOUTS[1], PRECISIONS[3], "some", None),
    (LAYOUTS[3], PRECISIONS[2], "few", "hpz"),
    (LAYOUTS[0], PRECISIONS[0], "some", None),
    (LAYOUTS[1], PRECISIONS[0], "all", None),
    (LAYOUTS[1], PRECISIONS[2], "few", "zero1"),
    (LAYOUTS[2], PRECISIONS[1], "some", "zero1"),
    (LAYOUTS[2], PRECISIONS[2], "all", None),
    (LAYOUTS[3], PRECISIONS[1], "all", "hybrid"),
    (LAYOUTS[3], PRECISIONS[4], "some", None),
    (LAYOUTS[3], PRECISIONS[0], "all", "hpz"),
]


@pytest.mark.parametrize(
    ("layout", "precision", "place", "scheme"),
    [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.thorough) for case in CASES[2:])],
)
def test_the_same_bits_as_in_memory(ranks, layout, precision, place, scheme):
    ranks(layout.world_size).run(verbs, layout, precision, place, scheme)


def moved(layout: Layout) -> None:
    """A state goes to files and back, and trains there to the same bits."""
    groups = groups_of(layout)
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for where in ("", f"params=disk:{folder}, states=disk:{folder}", "params=host"):
            shards = mf.shard(values(), groups, precision="gather=int8[64]", bucket_bytes=1500)
            state = mf.init_state(shards, mf.optim.adamw(0.1))
            state = mf.move(state, where)
            for _ in range(3):
                grads = torch.func.grad(lambda s: loss_of(mf.gather(s, groups)))(state.params)
                state = mf.opt_step(state, mf.reduce_grads(grads, groups), donate=True)
            found.append(mf.unshard(state.params, groups))
            state = mf.move(state, "")
            found.append(mf.unshard(state.params, groups))
            del state, grads
        for other in found[1:]:
            same_bits(other, found[0])


@pytest.mark.parametrize(
    "layout", [LAYOUTS[1], pytest.param(LAYOUTS[2], marks=pytest.mark.thorough)], ids=str
)
def test_a_state_moves_and_trains(ranks, layout):
    ranks(layout.world_size).run(moved, layout)


def read_once(layout: Layout) -> None:
    """A run reads and codes each bucket once, and sends the codes again at later fetches."""
    groups = groups_of(layout)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        how: dict[str, Any] = {"precision": "gather=int8[64]", "bucket_bytes": 1500}
        shards = mf.shard(values(), groups, where=f"params=disk:{folder}", **how)
        held = {x.bucket for x in shards.values() if x.data.numel()}  # each is a leaf's
        read = []
        real = live_module.copied_with_zeros
        with (
            mock.patch.object(
                live_module, "copied_with_zeros", lambda *a, **k: read.append(1) or real(*a, **k)
            ),
            mf.defer(shards, groups, mf.on_demand(live_bytes=0)) as full,
        ):
            for _ in range(3):
                for x in full.values():
                    x.sum()
        assert len(read) == len(held) > 1
        pool = groups.hierarchy.pools.codes
        waiting = pool.waiting_bytes
        for _ in range(3):
            with mf.defer(shards, groups, mf.on_demand(live_bytes=0)) as full:
                loss_of(full)
        assert pool.waiting_bytes == waiting, "no memory is lost"


def test_a_bucket_is_read_once_in_a_run(ranks):
    ranks(2).run(read_once, LAYOUTS[1])


def broken(layout: Layout) -> None:
    """A file that cannot be read is an error of the fetch, on all ranks."""
    groups = mf.make_groups(layout.partition_size, timeout_s=20)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        shards = mf.shard(
            values(), groups, precision="gather=int8[64]", where=f"params=disk:{folder}"
        )
        fails = groups.position == 1
        check = mock.Mock(side_effect=FileError("it is broken", folder, "a"))
        with (
            mock.patch.object(Scratch, "check", check if fails else Scratch.check),
            pytest.raises(FileError if fails else mf.MicsError),
            mf.defer(shards, groups, mf.on_demand(live_bytes=0)) as full,
        ):
            loss_of(full)
        groups.life.abandon(KeyboardInterrupt())


def test_a_file_that_cannot_be_read_is_an_error_on_all_ranks(ranks):
    ranks(2).run(broken, LAYOUTS[1])
