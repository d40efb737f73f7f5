"""Stored tensors: every op that reads gives what the file holds, and nothing writes to them."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import DonatedError, FileError, LeafError
from mics_fn.offload import Scratch, Stored, is_stored, read, renewed, store

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
        assert is_stored(kept)
        assert not is_stored(x)
        assert (kept.shape, kept.dtype, kept.device) == (x.shape, x.dtype, x.device)
        same_bits(read(kept), x)
        same_bits(kept.clone(), x)
        assert read(x) is x
        same_bits(read(store(kept, scratch)), x)  # from a file to a file


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
        assert is_stored(found) == (name in VIEWS)
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
        with pytest.raises(LeafError, match=r"(?s)a stored tensor, w, shape.*fix: "):
            write(kept, y)
        assert torch.equal(kept, x)
        assert torch.equal(y, before)


def test_what_was_given_away_raises(scratch: Scratch):
    kept = store(torch.ones(5000), scratch, "w")
    other, part = store(torch.ones(3), scratch), kept[:7]
    (new,) = renewed([kept])
    for old in (kept, part):
        for use in (lambda x: x + 1, read, lambda x: renewed([x]), lambda x: x[:2]):
            with pytest.raises(DonatedError, match=r": w, shape.*overwritten"):
                use(old)
    assert torch.equal(new, torch.ones(5000))
    assert torch.equal(other, torch.ones(3))


@settings(max_examples=40)
@given(
    st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 12)))
)
def test_giving_a_part_away_leaves_the_other_parts(n: int, calls: list[tuple[bool, int, int]]):
    """A value is void exactly if some of its bytes were given away after it was made."""
    with tempfile.TemporaryDirectory() as folder:
        scratch, parts = Scratch(folder), list[list[Any]]()
        whole = store(torch.arange(float(n)), scratch)
        for gives, a, b in calls:
            low, high = sorted((min(a, n), min(b, n)))
            part = Stored(
                whole.extent, 4 * low, torch.empty(high - low, device="meta"), whole.device
            )
            if gives:
                (part,) = renewed([part])
                for other in parts:
                    other[3] |= max(low, other[1]) < min(high, other[2])
            parts.append([part, low, high, False])
        for part, low, high, void in parts:
            if void:
                with pytest.raises(DonatedError):
                    read(part)
            else:
                assert read(part).tolist() == list(range(low, high))
        scratch.close()


@settings(max_examples=25)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), max_size=12))
def test_space_is_used_again(calls: list[tuple[bool, int]]):
    """Whatever is made and dropped in any order: the rest keeps its values, the file its size."""
    with tempfile.TemporaryDirectory() as folder:
        scratch, held, most = Scratch(folder), list[tuple[Tensor, Stored]](), 0
        for makes, number in calls:
            if makes:
                x = torch.full((number,), float(number))
                held.append((x, store(x, scratch)))
            elif held:
                held.pop(number % len(held))
            most = max(most, scratch.nbytes)
            assert all(torch.equal(x, kept) for x, kept in held)
        assert os.path.getsize(scratch.path) <= 4096 + 3 * most
        held.clear()
        assert scratch.nbytes == 0
        scratch.close()


def test_the_file_lives_as_long_as_its_tensors(tmp_path: Path):
    scratch = Scratch(tmp_path)
    path, part = scratch.path, store(torch.arange(9.0), scratch)[2:4]
    del scratch
    gc.collect()
    assert path.exists()
    assert part.tolist() == [2.0, 3.0]
    del part
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_closed_file(scratch: Scratch):
    kept = store(torch.ones(3), scratch, "w")
    scratch.close()
    scratch.close()
    assert not scratch.path.exists()
    for use in (lambda: kept + 1, lambda: store(torch.ones(3), scratch)):
        with pytest.raises(FileError, match="was closed"):
            use()
    assert "Stored(shape=(3,)" in repr(kept)
