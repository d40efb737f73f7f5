"""`Where` as a value: its text, its patterns, and what it refuses."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mics_fn as mf
from mics_fn.errors import PlanError
from mics_fn.offload import Place, Where, where, where_of

DEVICE, HOST = Place("device"), Place("host")
folders = st.text("abz/:._- *?[]'", min_size=1, max_size=8).filter(
    lambda x: x == x.strip() and not os.path.abspath(x).endswith(" ")
)
places = st.one_of(st.just(DEVICE), st.just(HOST), st.builds(Place, st.just("disk"), folders))
maybe = st.one_of(st.none(), places)
patterns = st.text("ab*?[]'.: ", min_size=1, max_size=6).filter(lambda x: x == x.strip())
fields = st.builds(Where, maybe, maybe, maybe)
overrides = st.tuples(patterns, fields.filter(lambda x: x != Where()))
wheres = st.builds(
    Where, maybe, maybe, maybe, st.lists(overrides, max_size=3), st.integers(2**20, 2**40)
)


@settings(max_examples=60)
@given(wheres)
def test_a_text_gives_the_same_value(value: Where):
    text = str(value)
    assert Where.parse(text) == value
    assert str(Where.parse(text)) == text
    assert where_of(text) == where(value) == value


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
