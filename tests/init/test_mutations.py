"""Mutated files: each is an error that names the file, or is read as other readers read it."""

import json
import os
import random
import struct
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mutating import BYTES, Watch, flip, replace_in_json
from rank_pool import run_ranks
from safetensors.torch import load as load_safetensors
from test_files import write_indexed, write_safetensors, write_torch

import mics_fn as mf

TENSORS = {
    "h.0.w": torch.arange(12.0).view(3, 4),
    "h.1.w": torch.arange(5, dtype=torch.float64),
    "count": torch.tensor([5, -7]),
    "more": torch.arange(6.0).view(2, 3),
    "scalar": torch.tensor(2.0),
    "empty": torch.zeros(0, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
}


def rewrite(rng: random.Random, data: bytearray) -> None:
    """Another header of a safetensors file, or another index; otherwise one bit."""
    try:
        if data[:1] == b"{":
            data[:] = json.dumps(replace_in_json(rng, json.loads(data))).encode()
            return
        length = int.from_bytes(data[:8], "little")
        header = replace_in_json(rng, json.loads(data[8 : 8 + length]))
        text = json.dumps(header).encode()
        data[: 8 + length] = struct.pack("<Q", len(text)) + text
    except (ValueError, TypeError, OverflowError):  # it is none, or no longer
        flip(rng, data)


MUTATIONS = [flip, *BYTES, rewrite, rewrite]
WRITERS: dict[str, Callable[[Path], None]] = {
    "safetensors": lambda folder: write_safetensors(folder / "model.safetensors", TENSORS),
    "torch": lambda folder: write_torch(folder / "pytorch_model.bin", TENSORS),
    "index": lambda folder: write_indexed(folder, TENSORS),
}


def check_values(folder: Path, kind: str, shards: dict[str, Any]) -> None:
    """What was read is what another reader reads, or what the file held before."""
    flat = [leaf.data.reshape(-1) for leaf in shards.values()]
    original = [TENSORS[name].reshape(-1) for name in shards if name in TENSORS]
    wanted = [original]
    if kind == "torch":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                other = torch.load(folder / "pytorch_model.bin", weights_only=True)
                wanted.append([other[name].detach().reshape(-1) for name in shards])
            except Exception:  # torch is stricter about records that hold no tensor
                other = {}
    else:
        files = [load_safetensors(x.read_bytes()) for x in folder.glob("*.safetensors")]
        every = {name: x for file in files for name, x in file.items()}
        wanted = [[every[name].reshape(-1) for name in shards]]
    same = [
        len(want) == len(flat)
        and all(
            a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(flat, want, strict=True)
        )
        for want in wanted
    ]
    assert any(same), ("values that no other reader reads", shards, wanted)


def campaign(kind: str, folder: Path, first: int, count: int) -> Counter[str]:
    """Mutate files, read them, and count what came of it."""
    WRITERS[kind](folder)
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("/etc/passwd")
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "link"]
    originals = {path: path.read_bytes() for path in files}
    groups, found, watch = mf.make_groups(1), Counter[str](), Watch(folder)
    for seed in range(first, first + count):
        rng = random.Random(f"{kind} {seed}")
        target = rng.choice(files)
        data = bytearray(originals[target])
        # torch refuses some files whose values are as they were; after two changes none could tell.
        for _ in range(1 if kind == "torch" else rng.choice([1, 1, 1, 2, 3])):
            rng.choice(MUTATIONS)(rng, data or bytearray(b"\0"))
        target.write_bytes(data)
        shards: dict[str, Any] = {}
        call = lambda: shards.update(mf.load_shards(folder, groups))  # noqa: B023, E731
        refused = watch.error_of(seed, call, mf.errors.FileError, on=seed > first + 20)
        if refused is None:
            check_values(folder, kind, shards)
        else:
            assert str(folder) in str(refused), seed
            assert refused.path.startswith(str(folder)), seed
        found["read" if refused is None else "refused"] += 1
        target.write_bytes(originals[target])
    return found


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    "count",
    [60, pytest.param(700, marks=[pytest.mark.thorough, pytest.mark.limit(500)])],
)
def test_mutated_files_are_refused_by_name_or_read_as_others_read_them(tmp_path, kind, count):
    (found,) = run_ranks(campaign, 1, kind, tmp_path, 0, count, timeout_s=450.0)
    assert sum(found.values()) == count
    assert found["refused"] > count / 4
    assert found["read"] > 0
