"""`Where` as a value: its text, its patterns, and what it refuses."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import PlanError
from mics_fn.offload import HOST_BYTES, Place, Where, is_stored, where, where_of

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
        ("disk:/nvme/a b", "w", "device disk:/nvme/a b device"),
        ("states=host, grads = host", "w", "device host host"),
        ("params=disk:/a:b;*norm*: params=device", "w", "disk:/a:b device device"),
        ("params=disk:/a:b;*norm*: params=device", "norm.w", "device device device"),
        ("host; *w*: disk:/x", "w", "device disk:/x device"),
        ("*w*: host; w: params=host", "w", "host host device"),
        ("states=host; *a*: states=disk:/x; *b*: states=device", "ab", "device device device"),
    ],
)
def test_places_of_a_leaf(text: str, path: str, expected: str):
    assert " ".join(map(str, Where.parse(text).at(path))) == expected


def test_what_moves():
    assert not where("").moves()
    assert not where("states=device").moves()
    assert where("*w*: params=host").moves("params")
    assert not where("*w*: params=host").moves("states", "grads")


def test_host_bytes():
    assert where("host").host_bytes == HOST_BYTES
    assert where("host", host_bytes="128MiB") == where("states=host, host_bytes=128MiB")
    assert where(where("host", host_bytes=2**21)).host_bytes == 2**21


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("states=gpu", "kind='gpu', expected 'device', 'host' or 'disk'"),
        ("state=host", "'state=host' in 'state=host' gives no place for another field"),
        ("states=host, states=device", "'states=device' in .* gives no place for another field"),
        ("host; device", "no pattern in 'device'"),
        ("*w*: params=host; states=host", "no pattern in 'states=host'"),
        ("states=disk", "expected a folder"),
        ("states=disk:", "expected a folder"),
        ("states=host:/nvme", "expected none for 'host'"),
        ("states=disk:/a=b", "has a text form"),
        ("*w*: host_bytes=2MiB", "sets what a leaf does not have"),
        ("host_bytes=10", "host_bytes=10"),
        ("host_bytes=many", "host_bytes='many'"),
    ],
)
def test_refusals(text: str, said: str):
    with pytest.raises(PlanError, match="(?s)" + said.replace("(", r"\(")):
        where(text)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Where("host"),  # pyright: ignore
        lambda: Where(overrides=[("w", HOST)]),  # pyright: ignore
        lambda: Where(overrides=(("w", Where()),)),
        lambda: Where(overrides=(("a=b", Where(HOST)),)),
        lambda: Where(host_bytes=1),
        lambda: Place("gpu"),  # pyright: ignore
        lambda: Place("disk", "a;b"),
        lambda: where("", host_bytes=1),
    ],
)
def test_values_that_are_refused(call):
    with pytest.raises(PlanError):
        call()


@pytest.mark.parametrize("how", ["a state", "shards", "Trainer"])
def test_a_pattern_that_moves_nothing_is_told(how: str, tmp_path: Path):
    """A frozen leaf stays where `shard` has placed it; a wrong name is an error."""
    model = nn.ModuleDict({"base": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    model["base"].requires_grad_(False)

    def moved(groups: mf.Groups, text: str) -> None:
        if how == "Trainer":
            mf.Trainer(model, mf.optim.adamw(0.1), groups, where=text)
        else:
            params = mf.shard(dict(model.named_parameters()), groups)
            mf.move(params if how == "shards" else mf.init_state(params, mf.optim.sgd(0.1)), text)

    with mf.make_groups(1) as groups:
        with pytest.warns(UserWarning, match="^move: where: .*'.base.' matches no leaf that is tr"):
            moved(groups, f"params=disk:{tmp_path}; *base*: params=device")
        with pytest.raises(PlanError, match="^move: where: the pattern '.haed.' matches no leaf"):
            moved(groups, f"params=disk:{tmp_path}; *haed*: states=device")


def test_move_takes_the_name_of_a_device(tmp_path):
    with mf.make_groups(1) as groups:
        state = mf.init_state(mf.shard({"w": torch.ones(3)}, groups), mf.optim.adam(0.1))
        moved = mf.move(state, f"states=disk:{tmp_path}", device="cpu")
        found = [x for x in tree.flatten(moved.opt)[0] if is_stored(x)]
        assert len(found) == 2
