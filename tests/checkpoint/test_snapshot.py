"""A save has what was there at its instant, in memory and in files."""

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from disks import taken
from torch import Tensor

import mics_fn as mf
from mics_fn import checkpoint, offload, tree
from mics_fn.checkpoint import saving
from mics_fn.checkpoint.saving import copied
from mics_fn.errors import PlanError
from mics_fn.offload import in_file
from mics_fn.optim.flat import by_leaf


def tensors() -> dict[str, Tensor]:
    """Tensors that overlap, and that are no plain memory."""
    flat, pairs = torch.arange(100.0), torch.complex(torch.arange(9.0), torch.ones(9))
    found = {"first": flat[:10], "over": flat[5:15], "none": flat[60:60], "halves": flat[::2]}
    found |= {"columns": flat[20:32].view(3, 4).T, "bytes": flat[50:60].view(torch.uint8)}
    found |= {"negative": pairs.conj().imag, "scalar": torch.tensor(3.0), "half": flat.bfloat16()}
    return found | {"grad": torch.ones(3, requires_grad=True), "flags": torch.tensor([True, False])}


def test_a_copy_is_equal_and_stays() -> None:
    given = tensors()
    for _ in range(2):  # the second time in memory that is there
        kept = {name: x.detach().clone() for name, x in given.items()}
        block = copied(given)
        for x in given.values():
            with torch.no_grad():
                x.copy_(torch.ones_like(x))
        with block as copies:
            assert list(copies) == list(given)
            for name, x in copies.items():
                assert x.dtype == kept[name].dtype
                assert x.shape == kept[name].shape
                assert torch.equal(x, kept[name]), name
                assert not x.is_neg()
                assert x.is_contiguous()
        given = dict(reversed(tensors().items()))
    with copied({}) as copies:
        assert copies == {}


def test_saves_to_many_folders_take_the_memory_of_one(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    params = mf.shard({"w": torch.zeros(100_000)}, groups)
    saving.FREE.clear()
    for i in range(4):
        checkpoint.start_save(tmp_path / f"{i}", params, groups, step=1).wait()
    assert [len(memory) // 400_000 for memory in saving.FREE.values()] == [1]
    first, second = copied(params_of(1.0)), copied(params_of(2.0))
    with first as one, second as two:
        assert (one["w"][0], two["w"][0]) == (1.0, 2.0)
    assert len(saving.FREE["cpu"]) >= 400_000, "the larger one of two is kept"


def params_of(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((10,), value)}


# States in files, while steps go on in the same files; the twin takes these steps in memory.

ADAMW = mf.optim.adamw(1e-2)
SIZES = {"a": (301, 23), "b": (40, 33), "norm": (50,)}
PLACES = [
    "states=disk:{}",
    "states=disk:{}, params=disk:{}",
    "params=disk:{}; *norm*: states=disk:{}",
]


def values(seed: int) -> dict[str, Tensor]:
    return {k: random(seed + i, *size) for i, (k, size) in enumerate(SIZES.items())}


def stepped(state: Any, groups: mf.Groups, seed: int, *, donate: bool = True) -> Any:
    grads = mf.reduce_grads(values(seed), groups, like=state.params)
    return mf.opt_step(state, grads, donate=donate)


def copy_of(state: Any) -> Any:
    return tree.map_leaves(lambda x: x + 0, (state.params, by_leaf(state.opt)))


def files_in(state: Any) -> list[Any]:
    """The scratch files of a state."""
    found = [x for x in tree.flatten((state.params, by_leaf(state.opt)))[0] if in_file(x)]
    return list({id(x.extent.scratch): x.extent.scratch for x in found}.values())


def paused(go: threading.Event) -> Any:
    """A block in which saves read files only once they may."""
    real = offload.FileTensor.mapped

    def mapped(x: Any) -> Tensor:
        assert go.wait(60)
        return real(x)

    return mock.patch.object(offload.FileTensor, "mapped", mapped)


def saved(layout: Layout, place: str, folder: str, donate: bool) -> None:
    groups = groups_of(layout)
    where = mf.where(place.replace("{}", f"{folder}/scratch"), host_bytes=2**20)

    def made(where: Any) -> Any:
        shards = mf.shard(values(0), groups, bucket_bytes=10_000)
        return mf.move(mf.init_state(shards, ADAMW), where)

    twin, state = stepped(made(""), groups, 5), stepped(made(where), groups, 5)
    (scratch, *_) = files_in(state)
    before = list(map(taken, files_in(state)))
    at_once, go = copy_of(state), threading.Event()
    saving.FREE.clear()
    with paused(go):
        pending = checkpoint.start_save(f"{folder}/saved", state, groups, step=1)
        for seed in (9, 13, 17):  # in parts of their own, and then in place in these
            twin = stepped(twin, groups, seed)
            state = stepped(state, groups, seed, donate=donate)
            same_bits(copy_of(state), copy_of(twin))
        assert taken(scratch) > before[0]
        go.set()
        pending.wait()
    copies = sum(map(len, saving.FREE.values()))
    in_memory = [x for x in tree.flatten(state)[0] if isinstance(x, Tensor) and not in_file(x)]
    assert copies <= 8192 + sum(x.nbytes for x in in_memory), "what lies in files is not copied"
    loaded = checkpoint.load(f"{folder}/saved", made(where), groups).state
    same_bits(copy_of(loaded), at_once)
    del loaded, pending
    state, twin = stepped(state, groups, 21, donate=True), stepped(twin, groups, 21)
    assert list(map(taken, files_in(state))) == before, "what was held is free again"
    same_bits(copy_of(state), copy_of(twin))


@pytest.mark.parametrize(
    ("layout", "place", "donate"),
    [
        (Layout((1,), 1), PLACES[0], True),
        (Layout((2,), 2), PLACES[1], False),
        (Layout((2, 2), 2), PLACES[2], True),
    ],
    ids=str,
)
def test_a_save_has_the_bits_of_its_instant(ranks, tmp_path, layout, place, donate):
    ranks(layout.world_size).run(saved, layout, place, f"{tmp_path}", donate)


def test_what_is_held_is_not_overwritten(tmp_path):
    x = offload.store(torch.arange(5.0), offload.Scratch(tmp_path), "w")
    hold, other = offload.ReadLock([x, torch.ones(2)]), offload.ReadLock([x])
    with pytest.raises(PlanError, match="w is read by a save"):
        list(offload.stream([offload.Block([x], [x])]))
    hold.release()
    assert offload.is_locked(x)
    del other  # as if the save had never begun
    assert not offload.is_locked(x)
    assert torch.equal(offload.read(x), torch.arange(5.0))
    list(offload.stream([offload.Block([x], [x])]))
