"""FileTensor tensors: every op that reads gives what the file holds, and nothing writes to them."""

import gc
import math
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import same_bits
from children import in_child
from disks import taken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import mics_fn as mf
from mics_fn import _torch
from mics_fn.errors import LeafError
from mics_fn.offload import (
    HOST_BYTES,
    Block,
    FileTensor,
    Scratch,
    empty,
    in_file,
    read,
    store,
    stream,
)
from mics_fn.offload.placed import scratch_in, transfer

DTYPES = [torch.bfloat16, torch.float64, torch.bool]
SHAPES = [(), (2, 0, 3), (4096,), (70, 1025), (600_000,)]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    gen = torch.Generator().manual_seed(math.prod(shape))
    made = torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8, generator=gen)
    return made.ne(7).all(-1) if dtype == torch.bool else made.view(dtype).view(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(scratch: Scratch, shape: tuple[int, ...]):
    for dtype in DTYPES:
        x = values(shape, dtype)
        kept = store(x, scratch, "w")
        assert in_file(kept)
        assert not in_file(x)
        assert (kept.shape, kept.dtype, kept.device) == (x.shape, x.dtype, x.device)
        same_bits(read(kept), x)
        same_bits(kept.clone(), x)
        assert read(x) is x
        same_bits(read(store(kept, scratch)), x)  # from a file to a file
        goal = torch.empty_like(x).view(-1)
        for _ in transfer(kept.view(-1), goal):
            pass
        same_bits(goal.view(x.shape), x)


VIEWS = {
    "flat": lambda x: x.reshape(-1),
    "rows": lambda x: x[2:5],
    "cut": lambda x: x.flatten()[7:1001],
    "split": lambda x: x.split(3)[1],
}
READS = {
    "transpose": lambda x: x.t(),
    "stride": lambda x: x[::2],
    "bits": lambda x: x.view(torch.int32),
    "into": lambda x: torch.zeros(10, 2000).copy_(x),
    "item": lambda x: torch.tensor(x[0, 0].item()),
    "numpy": lambda x: torch.tensor(x.numpy().copy()),
    "out": lambda x: torch.add(x, x, out=torch.empty(0)),
    "vmap": lambda x: torch.func.vmap(lambda row: row.sum() * row)(x),
    "grad": lambda x: torch.func.grad(lambda w: (w * w).sum())(x),
    "autograd": lambda x: torch.autograd.grad(
        (x * (w := torch.ones(2000, requires_grad=True))).sum(), w
    )[0],
}


def test_ops_read(scratch: Scratch):
    x = torch.randn(10, 2000, generator=torch.Generator().manual_seed(1))
    kept = store(x, scratch)
    for name, op in {**VIEWS, **READS}.items():
        found = op(kept)
        assert in_file(found) == (name in VIEWS)
        same_bits(read(found), op(x))
        same_bits(read(kept), x)


WRITES = {
    "copy_": lambda x, y: x.copy_(y),
    "setitem": lambda x, y: x.__setitem__(0, 1.0),
    "foreach": lambda x, y: _torch.foreach_add([y, x], 1.0),
    "out": lambda x, y: torch.add(y, y, out=x),
    "pointer": lambda x, y: x.data_ptr(),
    "dlpack": lambda x, y: torch.from_dlpack(x),
    "pickle": lambda x, y: pickle.dumps(x),
    "adamw": lambda x, y: (
        torch.optim.SGD([x], lr=0.1).step()
        or setattr(x, "grad", y)
        or torch.optim.SGD([x], lr=0.1).step()
    ),
}


def test_writes_raise(scratch: Scratch):
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    before = y.clone()
    for write in WRITES.values():
        kept = store(x, scratch, "w")
        with pytest.raises(LeafError, match=r"(?s)a tensor in a file, w, shape.*fix: "):
            write(kept, y)
        assert torch.equal(kept, x)
        assert torch.equal(y, before)


def streamed(w: Tensor, scratch: Scratch) -> Tensor:
    stored = empty(scratch, (2,), torch.float32)
    return sum(part.sum() for _, (part,) in stream([Block([stored], [stored])])) * w


def moved(w: Any, scratch: Scratch) -> Tensor:
    shards = mf.move({"w": w}, f"params=disk:{scratch.folder}")
    return mf.gather(shards, mf.make_groups(1))["w"]


@pytest.mark.parametrize("call", [store, moved, streamed])
def test_nothing_is_written_where_a_derivative_is_asked_for(tmp_path: Path, call: Any):
    given: Any = torch.ones(2)
    if call is moved:
        given = mf.shard({"w": given}, mf.make_groups(1))["w"]
    with pytest.raises(LeafError, match="its result has no derivative"):
        torch.func.grad(lambda x: call(x, Scratch(tmp_path)).sum())(given)
    with pytest.raises(LeafError, match="store: its result has no derivative"):
        store(torch.ones(2).requires_grad_() * 2, Scratch(tmp_path))


@settings(max_examples=25)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), max_size=12))
@example([(True, 20_000), (True, 5), (False, 0), (True, 3_000), (True, 3_001)])
def test_space_is_used_again(calls: list[tuple[bool, int]]):
    """Whatever is made and dropped in any order: the rest keeps its values, the file its size."""
    with tempfile.TemporaryDirectory() as folder:
        scratch, held, most = Scratch(folder), list[tuple[Tensor, FileTensor]](), 0
        for makes, number in calls:
            if makes:
                x = torch.full((number,), float(number))
                held.append((x, store(x, scratch)))
            elif held:
                held.pop(number % len(held))
            most = max(most, taken(scratch))
            assert all(torch.equal(x, kept) for x, kept in held)
        assert scratch._size <= 3 * most
        held.clear()
        assert taken(scratch) == 0


def test_the_file_lives_as_long_as_its_tensors(tmp_path: Path):
    gc.collect()  # else files of other tests are closed below
    before = len(os.listdir("/proc/self/fd"))
    part = store(torch.arange(9.0), Scratch(tmp_path))[2:4]
    gc.collect()
    assert part.tolist() == [2.0, 3.0]
    assert len(os.listdir("/proc/self/fd")) > before
    assert not list(tmp_path.iterdir()), "nobody else can open it"
    del part
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_process_has_a_file_of_its_own(tmp_path: Path):
    kept = store(torch.ones(3), scratch_in(f"{tmp_path}", HOST_BYTES))

    def another() -> None:
        assert torch.equal(kept, torch.ones(3))
        mine = scratch_in(f"{tmp_path}", HOST_BYTES)
        assert mine is not kept.extent.scratch
        assert torch.equal(store(torch.zeros(3), mine), torch.zeros(3))

    assert in_child(another) == 0
    assert torch.equal(kept, torch.ones(3))
