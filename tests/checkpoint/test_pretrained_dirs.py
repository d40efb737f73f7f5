"""`save_pretrained` writes what transformers reads, on any ranks, and all of it or nothing."""

import errno
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from cases import Layout, groups_of, same_bits
from steps import Recorder, every_kind, every_shard
from zoo_transformers import DECODER, GPT2, T5, transformers

import mics_fn as mf
from mics_fn.checkpoint import exported, save_pretrained

LAYOUTS = [Layout((1,), 1), Layout((2,), 2), Layout((2,), 1), Layout((2, 2), 2)]
MODELS = {
    "gpt2": (transformers.GPT2LMHeadModel, GPT2),
    "llama": (transformers.LlamaForCausalLM, DECODER | {"tie_word_embeddings": False}),
    "t5": (transformers.T5ForConditionalGeneration, T5),
}
ONE_FILE = 5_000_000_000


def make(name: str) -> Any:
    model_class, settings = MODELS[name]
    return model_class(model_class.config_class(**settings))


def save_model(layout: Layout, path: Path, name: str, **options: Any) -> None:
    groups = groups_of(layout)
    model, shards = mf.init_model(lambda: make(name), groups, seed=7)
    config = getattr(model, "config")  # noqa: B009
    save_pretrained(path, shards, groups, config=config, **options)


def whole(name: str) -> Any:
    torch.manual_seed(7)
    return make(name)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """What is in the files of a directory, read without this library."""
    from safetensors.torch import load_file

    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {name: x for file in files for name, x in file.items()}


@pytest.mark.parametrize(
    ("name", "layout", "max_file_bytes"),
    [
        ("llama", LAYOUTS[1], ONE_FILE),
        ("gpt2", LAYOUTS[3], 6000),
        pytest.param("t5", LAYOUTS[2], 6000, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_transformers_loads_it_bit_for_bit(
    ranks, tmp_path: Path, layout: Layout, name: str, max_file_bytes: int
):
    path = tmp_path / "saved"
    save = partial(save_model, max_file_bytes=max_file_bytes)
    ranks(layout.world_size).run(save, layout, path, name)
    want = whole(name)
    found, info = type(want).from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    same_bits(found.state_dict(), want.state_dict())
    want.save_pretrained(tmp_path / "theirs")
    assert {*read_all(path)} == {*read_all(tmp_path / "theirs")}  # tied ones under the same name
    assert sorted(os.listdir(tmp_path)) == ["saved", "theirs"]
    files = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if max_file_bytes == ONE_FILE:
        assert [file.name for file in files] == ["model.safetensors"]
        assert not index.exists()
        return
    held = json.loads(index.read_text())
    assert set(held["weight_map"].values()) == {file.name for file in files}
    sizes = [x.nbytes for x in want.parameters()]  # tied ones once
    assert held["metadata"]["total_size"] == sum(sizes)
    assert max(file.stat().st_size for file in files) <= max(6000, *sizes) + 2000


# Without transformers.


def save_tree(layout: Layout, path: Path, **options: Any) -> None:
    groups = groups_of(layout)
    save_pretrained(path, every_shard(groups), groups, **options)


@pytest.mark.parametrize(
    ("layout", "max_file_bytes"), [(LAYOUTS[0], 1), (LAYOUTS[2], ONE_FILE), (LAYOUTS[3], 100)]
)
def test_every_kind_of_leaf_is_written_once(
    ranks, tmp_path: Path, layout: Layout, max_file_bytes: int
):
    save = partial(save_tree, max_file_bytes=max_file_bytes)
    ranks(layout.world_size).run(save, layout, tmp_path / "new" / "a")
    want = every_kind() | {"buffer": torch.arange(8.0)[::2]}
    del want["a"]  # the same tensor as "z", which comes first
    same_bits(read_all(tmp_path / "new" / "a"), want)


def test_names_can_be_changed_and_left_out(ranks, tmp_path: Path):
    def rename(name: str) -> str | None:
        return None if name in ("z", "buffer") else f"model.{name}"

    with mf.make_groups(1) as groups:
        shards = mf.shard(every_kind(), groups)
        save_pretrained(tmp_path / "a", shards, groups, names=rename, config={"model_type": "a"})
        want = {f"model.{name}": x for name, x in every_kind().items() if name != "z"}
        same_bits(read_all(tmp_path / "a"), want)
        assert json.loads((tmp_path / "a" / "config.json").read_text()) == {"model_type": "a"}
        with pytest.raises(mf.errors.LeafError, match="would both be 'x'"):
            save_pretrained(tmp_path / "b", shards, groups, names=lambda name: "x")
        with pytest.raises(mf.errors.LeafError, match="there is no leaf to write"):
            save_pretrained(tmp_path / "b", shards, groups, names=lambda name: None)
    assert os.listdir(tmp_path) == ["a"]


def of_replicas(layout: Layout, path: Path) -> None:
    groups = groups_of(layout)
    shards: Any = mf.shard({"w": torch.zeros(10), "v": torch.zeros(3)}, groups)
    for leaf in shards.values():
        leaf.data.add_(dist.get_rank() // 2)  # as between two synchronisations
    save_pretrained(path, shards, groups, max_file_bytes=1)


def test_the_values_are_those_of_the_first_replica(ranks, tmp_path: Path):
    ranks(4).run(of_replicas, LAYOUTS[3], tmp_path / "a")
    same_bits(read_all(tmp_path / "a"), {"w": torch.zeros(10), "v": torch.zeros(3)})


# Mistakes and faults: the same error on all ranks, and nothing is left.


def refused(layout: Layout, paths: dict[int, Path], **options: Any) -> str:
    try:
        save_tree(layout, paths[dist.get_rank()], **options)
    except mf.MicsError as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_what_is_there_is_not_overwritten(ranks, tmp_path: Path):
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir()
    empty.mkdir()
    (full / "note").write_text("mine")
    file.write_text("mine")
    for path in (full, file):
        (text,) = set(ranks(2).run(refused, LAYOUTS[1], {0: path, 1: path}))
        assert text.startswith(f"FileError save_pretrained: {path} is neither new nor an empty")
    assert (full / "note").read_text() == file.read_text() == "mine"
    assert set(ranks(2).run(refused, LAYOUTS[1], {0: empty, 1: empty})) == {""}
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "full"]


def on_full_disk(layout: Layout, path: Path, rank: int) -> str:
    """Save while the disk of one rank is full."""
    plain = safetensors.torch.save_file

    def limited(tensors: Any, file: Path, **kwargs: Any) -> None:
        if dist.get_rank() == rank:
            file.write_bytes(b"a part")
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        plain(tensors, file, **kwargs)

    safetensors.torch.save_file = limited
    try:
        return refused(layout, dict.fromkeys(range(4), path), max_file_bytes=100)
    finally:
        safetensors.torch.save_file = plain


def test_a_full_disk_is_the_same_error_on_all_ranks(ranks, tmp_path: Path):
    path = tmp_path / "a"
    (text,) = set(ranks(4).run(on_full_disk, LAYOUTS[3], path, 1))
    assert text.startswith(f"FileError save_pretrained: cannot write {path}\n  on rank 1\n")
    assert "No space left" in text
    assert os.listdir(tmp_path) == []
    ranks(4).run(save_tree, LAYOUTS[3], path)  # nothing is broken
    assert "model.safetensors" in os.listdir(path)


def differing(layout: Layout, path: Path, what: str) -> str:
    rank = dist.get_rank()
    options: dict[str, Any] = {"names": lambda name: f"{name}{rank}"}
    if what == "config":
        options = {"config": torch.nn.Linear(1, 1) if rank else None}
    return refused(layout, {rank: path}, **options)


def test_ranks_that_differ_are_told(ranks, tmp_path: Path):
    texts = ranks(2).run(differing, LAYOUTS[1], tmp_path / "c", "names")
    said = "DesyncError save_pretrained: ranks disagree on the tree\n"
    assert all(x.startswith(said) for x in texts), texts
    ours, theirs = ranks(2).run(differing, LAYOUTS[1], tmp_path / "c", "config")
    assert theirs.startswith("LeafError save_pretrained: config is Linear")
    assert "rank 1: LeafError: save_pretrained: config is Linear" in ours
    assert os.listdir(tmp_path) == []


def test_all_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: Any):
    recorder = Recorder()
    with mf.make_groups(1) as groups, monkeypatch.context() as patch:
        recorder.install(patch.setattr)
        shards = mf.shard(every_kind(), groups)
        save_pretrained(tmp_path / "a", shards, groups, config={}, max_file_bytes=100)
    events = [each for each in recorder.did if each[0] in ("fsync", "rename")]
    at = next(i for i, (what, _) in enumerate(events) if what == "rename")
    folder = events[at][1]
    synced = [path for what, path in events[:at] if what == "fsync"]
    assert synced[-1] == folder
    assert synced[-2] == f"{folder}/model.safetensors.index.json"
    assert {Path(path).name for path in synced[:-1]} == set(os.listdir(tmp_path / "a"))
    assert events[at + 1 :] == [("fsync", str(tmp_path))]


def test_files_are_packed_up_to_their_limit():
    leaves = [exported.Saved(f"{n}", "", (n,), torch.uint8, 0) for n in (3, 4, 3, 20, 1)]
    files = exported.in_files("test", leaves, 10)
    assert [[leaf.nbytes for leaf in file] for file in files] == [[3, 4, 3], [20], [1]]
