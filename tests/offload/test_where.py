"""`Where` as a value: its text, its patterns, and what it refuses."""

from pathlib import Path

import pytest
from torch import nn

import mics_fn as mf
from mics_fn.errors import PlanError
from mics_fn.offload import Place, Where, where

DEVICE, HOST = Place("device"), Place("host")


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("", "w", "device device device"),
        ("host", "w", "device host device"),
        ("states=host, grads = host", "w", "device host host"),
        ("params=disk:/a:b;*norm*: params=device", "norm.w", "device device device"),
        ("*w*: host; w: params=host", "w", "host host device"),
        ("states=host; *a*: states=disk:/x; *b*: states=device", "ab", "device device device"),
    ],
)
def test_places_of_a_leaf(text: str, path: str, expected: str):
    assert " ".join(map(str, Where.parse(text).at(path))) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("states=gpu", "kind='gpu', expected 'device', 'host' or 'disk'"),
        ("state=host", "'state=host' in 'state=host' gives no place for another field"),
        ("host; device", "no pattern in 'device'"),
        ("states=disk:", "expected a folder"),
        ("states=host:/nvme", "expected none for 'host'"),
        ("states=disk:/a=b", "has a text form"),
        ("*w*: host_bytes=2MiB", "sets what a leaf does not have"),
        ("host_bytes=10", "host_bytes=10"),
    ],
)
def test_refusals(text: str, said: str):
    with pytest.raises(PlanError, match=f"(?s){said}"):
        where(text)


@pytest.mark.parametrize("how", ["shards", "Trainer"])
def test_a_pattern_that_moves_nothing_is_told(how: str, tmp_path: Path):
    """A frozen leaf stays where `shard` has placed it; a wrong name is an error."""
    model = nn.ModuleDict({"base": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    model["base"].requires_grad_(False)

    def moved(groups: mf.Groups, text: str) -> None:
        if how == "Trainer":
            mf.Trainer(model, mf.optim.adamw(0.1), groups, where=text)
        else:
            mf.move(mf.shard(dict(model.named_parameters()), groups), text)

    with mf.make_groups(1) as groups:
        with pytest.warns(UserWarning, match="^move: where: .*'.base.' matches no leaf that is tr"):
            moved(groups, f"params=disk:{tmp_path}; *base*: params=device")
        with pytest.raises(PlanError, match="^move: where: the pattern '.haed.' matches no leaf"):
            moved(groups, f"params=disk:{tmp_path}; *haed*: states=device")
