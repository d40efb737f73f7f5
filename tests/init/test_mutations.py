"""Mutated files: each is an error that names the file, or is read as other readers read it."""

import codecs
import json
import os
import random
import struct
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_safetensors
from test_files import write_indexed, write_safetensors, write_torch

import mics_fn as mf
from mics_fn.lab.ranks import pool

TENSORS = {
    "h.0.w": torch.arange(12.0).view(3, 4),
    "h.1.w": torch.arange(5, dtype=torch.float64),
    "count": torch.tensor([5, -7]),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "scalar": torch.tensor(2.0),
    "empty": torch.zeros(0, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
}
HOSTILE: list[Any] = [-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 0.0, 1.5, 1e300, True, None, "", "x"]
HOSTILE += ["../x", "/etc/passwd", "a\0b", "\ud800", [], [[]], {}, {"a": {}}, [0, 4], [4, 0], "I64"]
HOSTILE += ["model.safetensors.index.json", "b.safetensors", ".", "link", "fifo"]
FORBIDDEN = ("exec", "compile", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess")
FORBIDDEN += ("pickle.find_class", "marshal", "socket", "ctypes", "mmap", "os.remove", "os.rename")
SECONDS = 5.0  # of the processor, for one file


def flip(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at : at + rng.choice([1, 4, 8])] = rng.choice([b"\0", b"\xff"]) * rng.choice([1, 4, 8])


def cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def append(rng: random.Random, data: bytearray) -> None:
    data += rng.randbytes(rng.randrange(1, 40))


def insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.randrange(1, 9))


def remove(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randrange(1, 9)]


def move(rng: random.Random, data: bytearray) -> None:
    source, at, length = rng.randrange(len(data)), rng.randrange(len(data)), rng.randrange(1, 60)
    data[at : at + length] = data[source : source + length]


def replace_in_json(rng: random.Random, value: Any) -> Any:
    """The same value with another one at one place of it."""
    inside = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not inside or rng.random() < 0.1:
        return rng.choice(HOSTILE)
    key = rng.choice(inside)
    if isinstance(value[key], dict | list) and rng.random() < 0.8:
        value[key] = replace_in_json(rng, value[key])
    elif isinstance(value, dict) and rng.random() < 0.2:
        value[f"{rng.choice(HOSTILE)}"] = value.pop(key)
    else:
        value[key] = rng.choice(HOSTILE)
    return value


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


MUTATIONS: list[Callable[[random.Random, bytearray], None]]
MUTATIONS = [flip, flip, overwrite, cut, append, insert, remove, move, rewrite, rewrite]
WRITERS: dict[str, Callable[[Path], None]] = {
    "safetensors": lambda folder: write_safetensors(folder / "model.safetensors", TENSORS),
    "torch": lambda folder: write_torch(folder / "pytorch_model.bin", TENSORS),
    "index": lambda folder: write_indexed(folder, TENSORS),
}


class Watch:
    """Notes what a file makes the process do, by Python's audit events."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.on = str(folder), False
        self.seen: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple) -> None:
        if not self.on:
            return
        if event == "open" and not os.path.abspath(args[0]).startswith(self.folder):
            self.seen.append(f"{event} {args[0]}")
        if event.startswith(FORBIDDEN):
            self.seen.append(f"{event} {args}")


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
    for name in ("raw_unicode_escape", "unicode_escape", "latin-1"):  # imported when first used
        codecs.lookup(name)
    groups, found, watch = mf.make_groups(1), Counter[str](), Watch(folder)
    for seed in range(first, first + count):
        rng = random.Random(f"{kind} {seed}")
        target = rng.choice(files)
        data = bytearray(originals[target])
        # torch refuses some files whose values are as they were; after two changes none could tell.
        for _ in range(1 if kind == "torch" else rng.choice([1, 1, 1, 2, 3])):
            rng.choice(MUTATIONS)(rng, data or bytearray(b"\0"))
        target.write_bytes(data)
        started = time.process_time()
        watch.on = seed > first + 20  # the first ones may import modules
        try:
            shards = mf.load_shards(folder, groups)
            refused = None
        except mf.errors.FileError as error:
            refused, shards = error, {}
        watch.on = False
        if refused is None:
            check_values(folder, kind, shards)
        else:
            assert str(folder) in str(refused), seed
            assert refused.path.startswith(str(folder)), seed
        found["read" if refused is None else "refused"] += 1
        assert not watch.seen, (seed, watch.seen)
        assert time.process_time() - started < SECONDS, seed
        target.write_bytes(originals[target])
    return found


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    "count",
    [100, pytest.param(3400, marks=[pytest.mark.thorough, pytest.mark.limit(500)])],
)
def test_mutated_files_are_refused_by_name_or_read_as_others_read_them(tmp_path, kind, count):
    (found,) = pool.run_ranks(campaign, 1, kind, tmp_path, 0, count, timeout_s=450.0)
    assert sum(found.values()) == count
    assert found["refused"] > count / 4
    assert found["read"] > 0
