"""Files and derivatives: what is stored is a constant, and nothing is stored inside torch.func."""

from pathlib import Path
from typing import Any

import pytest
import torch

import mics_fn as mf
from mics_fn.errors import LeafError
from mics_fn.offload import Block, Scratch, empty, read, store, stream


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path)


def test_what_a_file_holds_is_a_constant(scratch: Scratch):
    w, held = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    stored = store(held, scratch)
    for loss in (lambda x: (x * read(stored)).sum(), lambda x: (x * (stored + 0)).sum()):
        assert torch.equal(torch.func.grad(loss)(w), held)
        leaf = w.clone().requires_grad_()
        loss(leaf).backward()
        assert torch.equal(leaf.grad, held)  # pyright: ignore[reportArgumentType]


def test_a_stored_argument_gets_its_derivative(scratch: Scratch):
    stored = store(torch.tensor([1.0, 2.0]), scratch)
    for loss in (lambda x: (x**2).sum(), lambda x: (read(x) ** 2).sum()):
        assert torch.equal(torch.func.grad(loss)(stored), torch.tensor([2.0, 4.0]))


def streamed(w: torch.Tensor, scratch: Scratch) -> Any:
    stored = empty(scratch, (2,), torch.float32)
    return sum(part.sum() for _, (part,) in stream([Block([stored], [stored])])) * w


def moved(x: Any, scratch: Scratch) -> Any:
    shards = mf.move(x, f"params=disk:{scratch.folder}")
    return mf.gather(shards, mf.make_groups(1))["w"]


@pytest.mark.parametrize(
    ("verb", "call"), [("store", store), ("move", moved), ("stream", streamed)]
)
def test_nothing_is_written_where_a_derivative_is_asked_for(verb: str, call: Any, scratch: Scratch):
    given: Any = torch.ones(2)
    if verb == "move":
        given = mf.shard({"w": given}, mf.make_groups(1))
    with pytest.raises(LeafError, match=f"{verb}: its result has no derivative"):
        torch.func.grad(lambda x: call(x, scratch).sum())(given)


def test_a_tensor_that_was_computed_from_others_is_not_stored(scratch: Scratch):
    leaf = torch.ones(2).requires_grad_()
    assert torch.equal(read(store(leaf, scratch)), torch.ones(2))
    with pytest.raises(LeafError, match="store: its result has no derivative"):
        store(leaf * 2, scratch)
    with torch.no_grad():
        assert torch.equal(read(store(leaf * 2, scratch)), 2 * torch.ones(2))
