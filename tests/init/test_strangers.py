"""Files of strangers: what is refused, that nothing in them runs, and that all ranks hear of it."""

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random, same_bits
from mutating import BYTES, Watch, flip, replace_in_json
from rank_pool import run_ranks
from safetensors.torch import load as load_safetensors
from test_files import write_indexed, write_safetensors, write_torch

import mics_fn as mf
from mics_fn.init import files
from mics_fn.init.files import read_pickle
from mics_fn.init.model import open_weights


def safetensors(header: Any, data: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def leaf(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def rezipped(data: bytes, change: Callable[[dict[str, bytes]], Any], **options: Any) -> bytes:
    """The same zip file with other records."""
    with zipfile.ZipFile(io.BytesIO(data)) as old:
        found = {name: old.read(name) for name in old.namelist()}
    change(found)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as new:
        for name, content in found.items():
            new.writestr(name, content)
    return file.getvalue()


class Runs:
    """Its pickle runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ("echo this must not run",)


X = torch.ones(2)
ONE = saved({"x": X})
PICKLE = "archive/data.pkl"

# The bytes of a file, the leaf that its error names, and what the error says.
DAMAGED: dict[str, tuple[bytes, str, str]] = {
    "huge number": (safetensors({"x": leaf([10**4000])}), "x", "overflows"),
    "size": (safetensors({"x": leaf([2], [0, 4])}, 4), "x", "does not fit bytes 0 to 4"),
    "beyond the file": (safetensors({"x": leaf([4], [0, 16])}), "x", "does not fit bytes 0 to 16"),
    "nested": (saved({"model": {"a": X}}), "model", "got dict"),
    "overlap": (
        safetensors({"x": leaf(), "y": leaf([1], [4, 8])}),
        "y",
        "its bytes 4 to 8 overlap others",
    ),
    "gap": (safetensors({"x": leaf([1], [4, 8])}), "x", "leave a gap before them"),
    "trailing": (safetensors({"x": leaf()}, data=11), "", "3 bytes follow the last tensor"),
    "dtype of a list": (safetensors({"x": leaf(dtype=["F32"])}), "x", "torch has no dtype"),
    "cut": (ONE[:-30], "", "File is not a zip file"),
    "compressed": (
        rezipped(ONE, lambda x: None, compression=zipfile.ZIP_DEFLATED),
        "",
        "is compressed or encrypted",
    ),
    "short storage": (
        rezipped(ONE, lambda x: x.update({"archive/data/0": b"1234"})),
        "x",
        "does not fit 4 bytes",
    ),
    "runs": (saved({"x": X, "run": Runs()}), "run", "got posix.system"),
    "sparse": (saved({"x": X.to_sparse()}), "x", "got torch._utils._rebuild_sparse_tensor"),
    "expanded": (saved({"x": torch.ones(1).expand(10)}), "x", "save it with contiguous()"),
    "negated": (saved({"x": torch.ones(1, dtype=torch.cfloat).conj().imag}), "x", "negates"),
}


@pytest.fixture(scope="module")
def groups() -> Any:
    with mf.make_groups(1) as made:
        yield made


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_refused_by_name(tmp_path: Path, groups: mf.Groups, name: str):
    content, leaf, line = DAMAGED[name]
    path = tmp_path / "a.weights"
    path.write_bytes(content)
    with pytest.raises(mf.errors.FileError) as error:
        mf.load_shards(path, groups)
    text = str(error.value)
    assert text.startswith(f"load_shards: {path} ")
    assert line in text
    assert "\n  fix: " in text
    assert "weights_only=False" not in text
    assert (error.value.path, error.value.leaf) == (str(path), leaf)


@pytest.mark.parametrize("step", [1, 2**61 - 1, -(2.0**61), 2**2000])
def test_no_writer_of_a_file_chooses_the_hashes_of_names(step: float):
    names = {i * step: i for i in range(1, 200)}
    found = read_pickle(pickle.dumps(names, protocol=2))
    assert list(found.values()) == list(range(1, 200))
    assert len({hash(name) for name in found}) == 199


def test_a_header_that_fits_no_memory_is_refused(tmp_path, groups, monkeypatch):
    monkeypatch.setattr(files.File.header, "__defaults__", (100,))
    for write in (write_safetensors, write_torch):
        write(tmp_path / "a", {f"w{i}": torch.ones(2) for i in range(5)})
        with pytest.raises(mf.errors.FileError, match="has a header of .* bytes, at most 100"):
            mf.load_shards(tmp_path / "a", groups)


# Names that lead elsewhere.


def indexed(folder: Path, name: Any, text: str | None = None) -> Path:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}) if text is None else text)
    return index


def outside(folder: Path) -> Path:
    (folder / "other").mkdir()
    (folder / "here").mkdir()
    write_safetensors(folder / "other" / "secret.safetensors", {"x": X})
    return folder / "here"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../other/secret.safetensors", "it leads out of the folder"),
        ("link", "it is a symbolic link, or behind one"),
        ("folder/secret.safetensors", "it is a symbolic link, or behind one"),
        ("fifo", "is not a regular file"),
        ("model.safetensors.index.json", "is neither a safetensors file nor"),
        ("absent", "No such file"),
        ("a\0b", "that is not the name of a file"),
        (["a"], "that is not the name of a file"),
        ("a" * 5000, "File name too long"),
    ],
)
def test_names_in_an_index_stay_in_its_folder(tmp_path, groups, name, reason):
    here = outside(tmp_path)
    (here / "link").symlink_to(tmp_path / "other" / "secret.safetensors")
    (here / "folder").symlink_to(tmp_path / "other")
    os.mkfifo(here / "fifo")
    indexed(here, name)
    with pytest.raises(mf.errors.FileError) as error:
        mf.load_shards(here, groups)
    assert reason in str(error.value)
    assert str(here) in str(error.value)
    if "symbolic" in reason or "leads out" in reason:
        shards: Any = mf.load_shards(here, groups, trust=True)
        same_bits(shards["x"].data, X)


@pytest.mark.parametrize("text", ["[]", '{"weight_map": {"x": "a", "x": "b"}}', "[" * 10**5, "\0"])
def test_an_index_of_something_else_is_refused(tmp_path, groups, text):
    index = indexed(tmp_path, "", text)
    with pytest.raises(mf.errors.FileError, match="has no weight_map of names to files") as error:
        mf.load_shards(index, groups)
    assert error.value.path == str(index)


def test_only_regular_files_are_opened(tmp_path, groups):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(mf.errors.FileError, match=f"{path} is not a regular file"):
            mf.load_shards(path, groups, trust=True)


def test_a_link_that_the_user_names_is_followed_and_one_in_a_folder_is_not(tmp_path, groups):
    here = outside(tmp_path)
    link = here / "model.safetensors"
    link.symlink_to(tmp_path / "other" / "secret.safetensors")
    assert list(mf.load_shards(link, groups)) == ["x"]
    with pytest.raises(mf.errors.FileError, match="is not opened: it is a symbolic link"):
        mf.load_shards(here, groups)
    assert list(mf.load_shards(here, groups, trust=True)) == ["x"]
    linear = {"weight": torch.ones(1, 1), "bias": torch.ones(1)}
    write_safetensors(tmp_path / "other" / "secret.safetensors", linear)
    mf.init_model(lambda: torch.nn.Linear(1, 1), groups, seed=0, weights=here, trust=True)


# What torch.save writes.


def kept() -> dict[str, Any]:
    x = torch.arange(24.0).view(4, 6)
    with_state = torch.ones(3)
    with_state.note = "of a user"  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "plain": x,
        "part": x[1:3],
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "parameter_with_state": torch.nn.Parameter(with_state),
        "scalar": torch.tensor(3.0),
        "empty": torch.ones(0, 5),
        "one": torch.ones(5, 5)[:, :1][:1],
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "complex": torch.ones(3, dtype=torch.cfloat),
        "bool": torch.tensor([True, False]),
    }


@pytest.mark.parametrize("protocol", [2, 5])
def test_all_that_torch_saves_of_tensors_is_read_as_torch_reads_it(tmp_path, protocol):
    path = tmp_path / "a.pt"
    values = OrderedDict(kept())
    values._metadata = {"": {"version": 1}}  # pyright: ignore[reportAttributeAccessIssue]
    torch.save(values, path, pickle_protocol=protocol)
    with open_weights("test", path, trust=False) as found:
        want = torch.load(path, weights_only=False)  # which knows every protocol
        assert list(found) == list(want)
        for name, x in want.items():
            assert (found[name].shape, found[name].dtype) == (tuple(x.shape), x.dtype), name
            flat = x.detach().reshape(-1)
            for start, stop in ((0, x.numel()), (1, x.numel() - 1), (x.numel() // 2, x.numel())):
                if 0 <= start <= stop:
                    got = found[name].read(start, stop)
                    assert torch.equal(got.view(torch.uint8), flat[start:stop].view(torch.uint8))


# Reading is agreed.


def cut_on_one(layout: Layout, path: Path, odd: int, verb: str) -> None:
    """Read files of which one is cut after it was opened."""
    rank, own = dist.get_rank(), Path(f"{path}{dist.get_rank()}")

    def order(path: str) -> int:  # is asked for when the file is open
        if rank == odd:
            os.truncate(own, 9)
        return 0

    if verb == "load_shards":
        mf.load_shards(own, groups_of(layout), order=order)
    else:
        make = partial(torch.nn.Linear, 8, 64)
        mf.init_model(make, groups_of(layout), seed=0, weights=own, order=order)


@pytest.mark.parametrize(
    ("layout", "write", "verb"),
    [
        (Layout((2,), 1), write_safetensors, "load_shards"),
        (Layout((2, 2), 2), write_torch, "init_model"),
    ],
)
def test_what_cannot_be_read_on_one_rank_is_an_error_on_all(ranks, tmp_path, layout, write, verb):
    odd = layout.world_size - 2
    for rank in range(layout.world_size):
        tensors = {"weight": random(0, 64, 8), "bias": random(1, 64)}
        write(tmp_path / f"w{rank}", tensors)
    found = ranks(layout.world_size).try_run(cut_on_one, layout, tmp_path / "w", odd, verb)
    for failure in found:
        text = f"{failure.type_name}: {failure.message}"
        assert text.startswith(f"FileError: {verb}: {tmp_path}/w{odd} was cut while it was")
        assert f"\n  on rank {odd}\n" in text


# Mutated files: each is an error that names the file, or is read as other readers read it.

TENSORS = {
    "h.0.w": torch.arange(12.0).view(3, 4),
    "h.1.w": torch.arange(5, dtype=torch.float64),
    "count": torch.tensor([5, -7]),
    "more": torch.arange(6.0).view(2, 3),
    "scalar": torch.tensor(2.0),
    "empty": torch.zeros(0, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
}


def rewrite(rng: Random, data: bytearray) -> None:
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
        rng = Random(f"{kind} {seed}")
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
