"""`Where` as a value: its text, its patterns, and what it refuses."""

from pathlib import Path

import pytest
import torch
from torch import nn

import mics_fn as mf
from mics_fn.errors import PlanError
from mics_fn.offload import Where, where

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("", "w", "device device device"),
        ("states=host", "w", "device host device"),
        ("states=host, grads = host", "w", "device host host"),
        ("params=disk:/a:b;*norm*: params=device", "norm.w", "device device device"),
        ("*w*: states=host; w: params=host", "w", "host host device"),
        ("states=host; *a*: states=disk:/x; *b*: states=device", "ab", "device device device"),
    ],
)
def test_places_of_a_leaf(text: str, path: str, expected: str):
    found = Where.parse(text)
    fields = "params", "states", "grads"
    assert " ".join(found.at(path, field, CUDA) for field in fields) == expected
    assert Where.parse(f"{found}") == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("states=gpu", "'gpu' is no place"),
        ("state=host", "'state=host' gives no place for a field"),
        ("states=host; device", "no pattern in 'device'"),
        ("states=disk:", "'disk:' is no place"),
        ("states=host:/nvme", "'host:/nvme' is no place"),
        ("host", "'host' gives no place for a field"),
        ("states=host, states=disk", "gives no place for a field, or two"),
    ],
)
def test_refusals(text: str, said: str):
    with pytest.raises(PlanError, match=f"(?s){said}"):
        where(text)


@pytest.mark.parametrize("how", ["shards", "Trainer"])
def test_a_pattern_that_matches_no_leaf_is_refused(how: str, tmp_path: Path):
    model, text = nn.Linear(2, 2), f"params=disk:{tmp_path}; *haed*: states=device"
    with mf.make_groups(1) as groups:
        move = lambda: mf.move(mf.shard(dict(model.named_parameters()), groups), text)  # noqa: E731
        train = lambda: mf.Trainer(model, mf.optim.adamw(0.1), groups, where=text)  # noqa: E731
        with pytest.raises(PlanError, match="^move: where: .*'.haed.'"):
            (train if how == "Trainer" else move)()
