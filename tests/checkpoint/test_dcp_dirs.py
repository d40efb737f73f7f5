"""Directories of torch.distributed.checkpoint: FSDP2 reads what is written here, and vice versa."""

import os
import pickle
import random as python_random
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from mutating import BYTES, Watch
from steps import every_kind, every_shard
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mics_fn as mf
from mics_fn.checkpoint import save_dcp

LAYOUTS = [Layout((2,), 1), Layout((2,), 2), Layout((2, 2), 2)]


class Model(nn.Module):
    """Shapes that do not divide, a bias, a tied weight, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.inner = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6, bias=False))
        self.one = nn.Parameter(torch.randn(1, 3))
        self.inner[1].weight.requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(x))) * self.one.sum()


def make(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def torchs(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of torch that may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


def fsdp2(seed: int) -> Model:
    model = make(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.inner, model):
        fully_shard(part, mesh=mesh)
    return model


def full(model: nn.Module) -> dict[str, Tensor]:
    return {k: getattr(x, "full_tensor", x.clone)() for k, x in model.state_dict().items()}


def shards_of(groups: mf.Groups, seed: int) -> dict[str, Any]:
    return mf.shard(dict(make(seed).named_parameters()), groups, bucket_bytes=64)


# What is written here, torch reads.


def to_fsdp2(layout: Layout, path: Path, prefix: str) -> None:
    groups = groups_of(layout)
    save_dcp(path, shards_of(groups, 3), groups, prefix=prefix, max_file_bytes=100)
    if not prefix:  # the other verbs read it, too
        _, drawn = mf.init_model(Model, groups, seed=0, weights=path)
        same_bits(mf.unshard(drawn, groups), mf.unshard(shards_of(groups, 3), groups))
    model = fsdp2(4)
    state: dict[str, Any] = model.state_dict()
    torchs(load, {"model": state} if prefix else state, checkpoint_id=path)
    model.load_state_dict(state)
    same_bits(full(model), dict(make(3).state_dict()))


@pytest.mark.parametrize(("layout", "prefix"), [(LAYOUTS[0], ""), (LAYOUTS[2], "model.")], ids=str)
def test_fsdp2_loads_what_is_written_here(ranks, tmp_path: Path, layout: Layout, prefix: str):
    path = tmp_path / "new" / "a"
    ranks(layout.world_size).run(to_fsdp2, layout, path, prefix)
    assert os.listdir(path.parent) == ["a"]
    state: Any = {k: torch.zeros_like(x) for k, x in make(3).state_dict().items()}
    torchs(load, {"model": state} if prefix else state, checkpoint_id=path, no_dist=True)
    same_bits(state, dict(make(3).state_dict()))  # on one rank, as plain tensors


def save_values(layout: Layout, path: Path, **options: Any) -> None:
    groups = groups_of(layout)
    save_dcp(path, every_shard(groups), groups, **options)


@pytest.mark.parametrize(
    ("layout", "max_file_bytes"), [(LAYOUTS[1], 1), (LAYOUTS[2], 10**9)], ids=str
)
def test_every_kind_of_leaf_is_written_once(
    ranks, tmp_path: Path, layout: Layout, max_file_bytes: int
):
    write = partial(save_values, max_file_bytes=max_file_bytes, prefix="a.b.c_")
    ranks(layout.world_size).run(write, layout, tmp_path / "a")
    want = every_kind() | {"buffer": torch.arange(8.0)[::2]}
    torchs(dcp_to_torch_save, tmp_path / "a", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    same_bits(found, {"a": {"b": {f"c_{k}": x.contiguous() for k, x in want.items()}}})


def trained(groups: mf.Groups, seed: int) -> mf.TrainState:
    """A state after two steps with gradients of its own."""
    optimizer = mf.optim.chain(mf.optim.clip_by_value(0.5), mf.optim.adamw(0.1))
    state = mf.init_state(shards_of(groups, seed), optimizer)
    for step in range(2):
        grads = {
            name: random(step, *x.shape) if x.requires_grad else None
            for name, x in make(seed).named_parameters()
        }
        state = mf.opt_step(state, mf.reduce_grads(grads, groups, like=state.params))
    return state


def resumed(layout: Layout, path: Path) -> None:
    """As torchtitan does it: parameters at the top, the optimizer flattened."""
    groups = groups_of(layout)
    state = trained(groups, 3)
    group = torch.optim.AdamW([torch.ones(1)], lr=0.3, betas=(0.8, 0.9)).param_groups[0]
    save_dcp(path, state, groups, param_group=group, max_file_bytes=100)
    model = fsdp2(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    held = torchs(get_optimizer_state_dict, model, optimizer, options=flat)
    states = {**model.state_dict(), "optimizer": held}
    torchs(load, states, checkpoint_id=path)
    torchs(set_optimizer_state_dict, model, optimizer, held, options=flat)
    want: Any = mf.unshard(state.params, groups)
    same_bits(full(model), want)
    kept = state.opt[1]
    for kind, moment in kept.moments.items():
        pieces = mf.unshard(moment.by_leaf(), groups)
        for name, x in model.named_parameters():
            if x.requires_grad:
                same_bits(optimizer.state[x][kind].full_tensor(), pieces[name])
                assert optimizer.state[x]["step"] == 2
        trained_ones = {name: x for name, x in pieces.items() if x is not None}
        ours = {f"optimizer.state.{name}.{kind}": name for name in trained_ones}
        found = mf.load_shards(path, groups, like=trained_ones, names=ours.get)
        same_bits(mf.unshard(found, groups), trained_ones)
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_an_optimizer_of_torch_goes_on(ranks, tmp_path: Path, layout: Layout):
    ranks(layout.world_size).run(resumed, layout, tmp_path / "a")


# What torch writes, is read here.


def bare(name: str) -> str:
    return name.removeprefix("model.")


def from_fsdp2(layout: Layout, path: Path) -> None:
    groups = groups_of(layout)
    model = fsdp2(5)
    torchs(save, {"model": model.state_dict(), "step": 3}, checkpoint_id=path)
    want = mf.shard(dict(make(5).named_parameters()), groups)
    for like in (make(6), dict(make(6).named_parameters())):
        found = mf.load_shards(path, groups, names=bare, like=like)
        same_bits(mf.unshard(found, groups), mf.unshard(want, groups))
    by_name = mf.load_shards(path, groups, names=bare, bucket_bytes=64)
    same_bits(mf.unshard(by_name, groups), mf.unshard(want, groups))


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_what_fsdp2_wrote_is_loaded(ranks, tmp_path: Path, layout: Layout):
    ranks(layout.world_size).run(from_fsdp2, layout, tmp_path / "a")
    with mf.make_groups(1) as groups:  # on another number of ranks
        model, shards = mf.init_model(Model, groups, seed=0, weights=dict(make(5).state_dict()))
        found = mf.load_shards(tmp_path / "a", groups, like=model, names=bare)
        same_bits(found, shards)


# Any cuts: a writer of the test's own, as torch's needs processes.

Cuts = list[list[int]]  # for each dimension the borders between chunks


def write_dcp(folder: Path, tensors: dict[str, tuple[Tensor, Cuts]]) -> Metadata:
    """A directory in which each tensor is cut along all of its dimensions, a file per tensor."""
    folder.mkdir(exist_ok=True)
    described, places = {}, {}
    kind: Any = filesystem._StorageInfo
    for number, (name, (x, cuts)) in enumerate(tensors.items()):
        chunks = []
        with (folder / f"__{number}_0.distcp").open("wb") as file:
            for offsets, part in cut(x, cuts):
                start, offset = file.tell(), torch.Size(offsets)
                torch.save(part.clone(), file)
                chunks.append(ChunkStorageMetadata(offset, part.shape))
                at = kind(f"__{number}_0.distcp", start, file.tell() - start)
                places[MetadataIndex(name, offset, len(chunks) - 1)] = at
        described[name] = TensorStorageMetadata(TensorProperties(x.dtype), x.shape, chunks)
    found = Metadata(described, {}, places, version="1.0.0")
    write_metadata(folder, found)
    return found


def write_metadata(folder: Path, value: Any, protocol: int = 4) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(value, protocol))


def cut(x: Tensor, cuts: Cuts) -> list[tuple[tuple[int, ...], Tensor]]:
    found: list[tuple[tuple[int, ...], Tensor]] = [((), x)]
    for dim, borders in enumerate(cuts):
        ends = [0, *borders, x.shape[dim]]
        found = [
            ((*offsets, a), part.narrow(dim, a, b - a))
            for offsets, part in found
            for a, b in zip(ends, ends[1:], strict=False)
        ]
    return found


@st.composite
def cut_tensors(draw: Any) -> tuple[Tensor, Cuts]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    cuts = [sorted(draw(st.sets(st.integers(1, max(1, n - 1))))) if n > 1 else [] for n in shape]
    return random(draw(st.integers(0, 9)), *shape), cuts


@settings(max_examples=25)
@given(first=cut_tensors(), second=cut_tensors(), protocol=st.integers(2, 5))
def test_any_cuts_are_put_together(tmp_path_factory, first, second, protocol):
    folder = tmp_path_factory.mktemp("cut")
    found = write_dcp(folder, {"a": first, "b": second})
    write_metadata(folder, found, protocol)
    with mf.make_groups(1) as groups:
        shards = mf.load_shards(folder, groups)
        want = {"a": first[0], "b": second[0]}
        same_bits(mf.unshard(shards, groups), want)
    shutil.rmtree(folder)


# Directories of strangers: nothing runs, and errors name the file.


class Runs:
    """Its pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


HOSTILE: dict[str, Callable[[Metadata, Runs], Any]] = {
    "all of it": lambda found, value: value,
    "planner data": lambda found, value: put(found, "planner_data", value),
    "a tensor": lambda found, value: put(found, "state_dict_metadata", {"w": value}),
    "a place": lambda found, value: put(
        found, "storage_data", dict.fromkeys(found.storage_data or {}, value)
    ),
    "a key": lambda found, value: put(found, "storage_data", {value: 1}),
}


def put(value: Any, name: str, other: Any) -> Any:
    setattr(value, name, other)
    return value


@pytest.mark.parametrize("where", HOSTILE)
def test_nothing_in_a_description_runs(tmp_path: Path, where: str):
    mark = tmp_path / "it ran"
    for trust in (False, True):
        found = write_dcp(tmp_path, {"w": (torch.ones(4), [[2]])})
        write_metadata(tmp_path, HOSTILE[where](found, Runs(mark)))
        with mf.make_groups(1) as groups:
            if where == "planner data":  # which is not needed
                mf.load_shards(tmp_path, groups, trust=trust)
                continue
            with pytest.raises(mf.errors.FileError) as error:
                mf.load_shards(tmp_path, groups, trust=trust)
            assert error.value.path == str(tmp_path / ".metadata")
            assert str(error.value).startswith(f"load_shards: {tmp_path / '.metadata'} is damaged")
    assert not mark.exists()
    torchs(pickle.loads, (tmp_path / ".metadata").read_bytes())
    assert mark.exists()  # so this is what would have run


def places(found: Metadata) -> list[Any]:
    return list((found.storage_data or {}).values())


def described(found: Metadata) -> Any:
    return found.state_dict_metadata["w"]


INDEX, FILE = ".metadata", "__0_0.distcp"
# What is changed, and what the error says; it names the index, or the file of the chunk.
DAMAGED: dict[str, tuple[Callable[[Metadata], Any], str, str]] = {
    "gap": (lambda m: described(m).chunks.pop(), INDEX, "chunks of 8 elements in all"),
    "overlap": (
        lambda m: described(m).chunks.__setitem__(1, described(m).chunks[0]),
        INDEX,
        "its chunks overlap",
    ),
    "another dtype": (
        lambda m: put(described(m).properties, "dtype", torch.float64),
        FILE,
        "should be torch.float64 of shape (2, 4)",
    ),
    "beyond the file": (lambda m: put(places(m)[1], "length", 10**9), FILE, "it ends early"),
    "another place": (lambda m: put(places(m)[0], "offset", 3), FILE, "is damaged"),
    "a file elsewhere": (
        lambda m: put(places(m)[0], "relative_path", "../other"),
        INDEX,
        "it leads out of the folder",
    ),
    "a link": (lambda m: put(places(m)[0], "relative_path", "link"), INDEX, "a symbolic link"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_is_damaged_is_refused_by_name(tmp_path: Path, what: str):
    change, name, line = DAMAGED[what]
    here = tmp_path / "here"
    found = write_dcp(here, {"w": (random(0, 4, 4), [[2], []])})
    (here / "link").symlink_to(here / "__0_0.distcp")
    shutil.copy(here / "__0_0.distcp", tmp_path / "other")
    change(found)
    write_metadata(here, found)
    with mf.make_groups(1) as groups:
        with pytest.raises(mf.errors.FileError) as error:
            mf.load_shards(here, groups, like={"w": torch.empty(4, 4)})
        if what in ("a file elsewhere", "a link"):
            mf.load_shards(here, groups, like={"w": torch.empty(4, 4)}, trust=True)
    text = str(error.value)
    assert text.startswith(f"load_shards: {here / name} ")
    assert line in text
    assert "\n  fix: " in text
    assert error.value.path == str(here / name)


def test_a_chunk_that_is_listed_twice_is_refused_by_name(tmp_path: Path):
    found: Any = write_dcp(tmp_path, {"w": (random(0, 4, 4), [[2], []])})
    found.storage_data[MetadataIndex("W", torch.Size((0, 0)))] = places(found)[1]
    write_metadata(tmp_path, found)
    index = tmp_path / INDEX
    index.write_bytes(index.read_bytes().replace(b"\x8c\x01W", b"\x8c\x01w"))
    text = r"'w': it lists chunk \(0, 0\) twice"
    with mf.make_groups(1) as groups, pytest.raises(mf.errors.FileError, match=text):
        mf.load_shards(tmp_path, groups)


def test_changed_bytes_never_do_harm(tmp_path: Path):
    """Whatever is changed, the result is an error of this library, or tensors of the right form."""
    write_dcp(tmp_path, {"w": (random(0, 4, 4), [[2], []]), "b": (random(1, 3), [[]])})
    dice, outcomes, watch = python_random.Random(0), set(), Watch(tmp_path)
    with mf.make_groups(1) as groups:
        mf.load_shards(tmp_path, groups)
        for file in (INDEX, FILE):
            whole = (tmp_path / file).read_bytes()
            for i in range(70):
                data = bytearray(whole)
                dice.choice(BYTES)(dice, data)
                (tmp_path / file).write_bytes(bytes(data))
                found: dict[str, Any] = {}
                call = lambda: found.update(mf.load_shards(tmp_path, groups))  # noqa: B023, E731
                error = watch.error_of(i, call, mf.MicsError, on=i > 20)
                assert all(isinstance(x, mf.shards.Sharded) for x in found.values())
                outcomes.add(type(error).__name__)
            (tmp_path / file).write_bytes(whole)
    assert {"NoneType", "FileError"} <= outcomes
