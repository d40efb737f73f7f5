"""A snapshot has what was there when it was taken, however the tensors lie in memory."""

from pathlib import Path

import torch
from torch import Tensor

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.checkpoint import saving
from mics_fn.checkpoint.saving import copied


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
