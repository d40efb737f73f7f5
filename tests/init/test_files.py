"""`load_shards` gives the values of the file, and each rank reads only its own part."""

import json
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, Layout, groups_of, random, same_bits
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import tree
from mics_fn.init import model as init_module
from mics_fn.init.files import DTYPES as CODED
from mics_fn.init.files import File
from mics_fn.init.model import open_weights
from mics_fn.shards.leaf import is_leaf

LAYOUTS = [Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2), Layout((4,), 4)]
CODES = {getattr(torch, name): code for code, name in CODED.items()}


def write_safetensors(path: Path, tensors: dict[str, Tensor], **extra: Any) -> None:
    """Write a file without the library, so that the reader is not tested by itself."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}, **extra}
    data = b""
    for name, x in tensors.items():
        raw = bytes(x.contiguous().view(-1).view(torch.uint8).tolist()) if x.numel() else b""
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": CODES[x.dtype], "shape": list(x.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_indexed(folder: Path, tensors: dict[str, Tensor]) -> None:
    names, half = list(tensors), len(tensors) // 2
    files = {"model-00001-of-00002.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, part in files.items():
        write_safetensors(folder / file, {name: tensors[name] for name in part})
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_torch(path: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, path)


WRITERS: dict[str, tuple[str, Callable[[Path, dict[str, Tensor]], None]]] = {
    "safetensors": ("a.safetensors", write_safetensors),
    "torch": ("a.pt", write_torch),
    "index": ("", write_indexed),
    "folder": ("", lambda folder, x: write_safetensors(folder / "model.safetensors", x)),
    "old-folder": ("", lambda folder, x: write_torch(folder / "pytorch_model.bin", x)),
}


def tensors_of(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "h.10.w": random(1, 7, 5, dtype=dtype),
        "h.2.w": random(2, 33, dtype=dtype),
        "scalar": random(3, dtype=dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
        "deep": random(4, 2, 3, 4, dtype=dtype),
        "count": torch.tensor([5, -7]),
        "mask": torch.tensor([True, False, True]),
        "half": random(5, 9, dtype=torch.bfloat16),
    }


def module_order(params: dict[str, Any]) -> Callable[[str], int]:
    place = {name: i for i, name in enumerate(params)}
    return lambda path: place[path]


def data_of(shards: Any) -> list[Tensor]:
    """The data of all leaves that have some, including frozen and replicated ones."""
    leaves = tree.flatten(shards, is_leaf)[0]
    return [leaf.data for leaf in leaves if isinstance(leaf, mf.shards.Sharded | mf.shards.Fixed)]


def same_shards(found: Any, want: Any) -> None:
    assert tree.flatten(found)[1] == tree.flatten(want)[1]
    same_bits(data_of(found), data_of(want))


# What is read.


def loaded(layout: Layout, path: Path, dtype: torch.dtype) -> None:
    groups, tensors = groups_of(layout), tensors_of(dtype)
    for bucket_bytes in (64, 25 * 2**20):
        want = mf.shard(tensors, groups, bucket_bytes=bucket_bytes)
        same_shards(mf.load_shards(path, groups, bucket_bytes=bucket_bytes), want)
    same_shards(mf.load_shards(tensors, groups), mf.shard(tensors, groups))
    wide = {k: x.double() if x.is_floating_point() else x for k, x in tensors.items()}
    how: Any = {"precision": "param=float64"}
    same_shards(mf.load_shards(path, groups, **how), mf.shard(tensors, groups, **how))
    meta = {k: torch.empty_like(x, device="meta") for k, x in wide.items()}
    like = mf.load_shards(path, groups, like=meta)
    same_shards(like, mf.shard(wide, groups, order=module_order(meta)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.short("safetensors-2-p2", "torch-2x2-p2")
def test_the_shards_are_those_of_the_tensors_in_the_file(ranks, tmp_path, layout, kind):
    name, write = WRITERS[kind]
    for dtype in DTYPES:
        write(tmp_path / name, tensors_of(dtype))
        ranks(layout.world_size).run(loaded, layout, tmp_path / name, dtype)


def test_every_dtype_of_safetensors_that_torch_has(tmp_path):
    tensors = {str(dtype): torch.arange(12).view(3, 4).to(dtype) for dtype in CODES}
    write_safetensors(tmp_path / "a.safetensors", tensors)
    with open_weights("test", tmp_path / "a.safetensors", trust=False) as found:
        assert list(found) == list(tensors)
        for name, x in tensors.items():
            entry = found[name]
            assert (entry.shape, entry.dtype) == ((3, 4), x.dtype)
            bits = x.view(-1)[2:7].view(torch.uint8)
            assert torch.equal(entry.read(2, 7).view(torch.uint8), bits)


# Only this rank's part is read.


def counted(layout: Layout, path: Path) -> int:
    """Bytes of tensors that a rank reads of a file, which are as many as its part of each has."""
    read, plain = Counter[str](), File.read

    def watched(self: File, offset: int, length: int, leaf: str = "") -> bytearray:
        read[leaf] += length
        return plain(self, offset, length, leaf)

    with mock.patch.object(File, "read", watched):
        shards: Any = mf.load_shards(path, groups_of(layout), bucket_bytes=4096)
    del read[""]
    assert read == {name: x.data.nbytes for name, x in shards.items() if x.data.numel()}
    return read.total()


@pytest.mark.parametrize(("layout", "kind"), [(LAYOUTS[2], "torch"), (LAYOUTS[3], "safetensors")])
def test_exactly_a_ranks_bytes_of_a_file_are_read(ranks, tmp_path, layout, kind):
    name, write = WRITERS[kind]
    write(tmp_path / name, {f"w{i}": random(i, 61, 17) for i in range(9)})
    found = ranks(layout.world_size).run(counted, layout, tmp_path / name)
    assert sum(found) == layout.world_size // layout.partition_size * 9 * 61 * 17 * 4


def large_blocks(layout: Layout, path: Path, tensors: dict[str, Tensor]) -> None:
    """Load with blocks that are much smaller than a piece."""
    with mock.patch.object(init_module, "BLOCK_BYTES", 12):
        same_shards(mf.load_shards(path, groups_of(layout)), mf.shard(tensors, groups_of(layout)))


def test_large_pieces_are_read_in_blocks(ranks, tmp_path):
    write_safetensors(tmp_path / "a.safetensors", tensors_of())
    ranks(2).run(large_blocks, LAYOUTS[1], tmp_path / "a.safetensors", tensors_of())


# Modules.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def module_cases(layout: Layout, folder: Path) -> None:
    groups = groups_of(layout)
    torch.manual_seed(3)
    model = Tied()
    params = dict(model.named_parameters(remove_duplicate=False))
    want = mf.shard(params, groups, order=module_order(params))
    with torch.device("meta"):
        skeleton = Tied()
    drawn, _ = mf.init_model(Tied, groups, seed=0)
    for like in (model, skeleton, drawn, params):
        for file in ("full.pt", "untied.safetensors"):
            strict = isinstance(like, nn.Module)
            same_shards(mf.load_shards(folder / file, groups, like=like, strict=strict), want)
    renamed = mf.load_shards(
        folder / "wrapped.pt",
        groups,
        like=skeleton,
        names=lambda name: None if name == "step" else name.removeprefix("module."),
    )
    same_shards(renamed, want)
    with_weights, shards = mf.init_model(Tied, groups, seed=5, weights=folder / "full.pt")
    same_shards(shards, want)
    saved = torch.load(folder / "full.pt")
    for name, value in with_weights.named_buffers():
        assert torch.equal(value, saved.get(name, model.get_buffer(name))), name
    assert (with_weights.get_buffer("norm.running_mean") == 1).all()


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_a_module_says_what_is_tied_frozen_and_expected(ranks, tmp_path, layout):
    torch.manual_seed(3)
    model = Tied()
    state = model.state_dict()
    state["norm.running_mean"] += 1
    torch.save(state, tmp_path / "full.pt")
    untied = {k: x for k, x in state.items() if k != "embed.weight"}
    write_safetensors(tmp_path / "untied.safetensors", untied)
    wrapped = {f"module.{k}": x for k, x in state.items()} | {"step": torch.tensor(3)}
    torch.save(wrapped, tmp_path / "wrapped.pt")
    ranks(layout.world_size).run(module_cases, layout, tmp_path)


# Mistakes.


def test_what_does_not_match_is_named(tmp_path):
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(4), "count": torch.tensor(3)}
    path = tmp_path / "a.safetensors"
    write_safetensors(path, tensors)
    like = {"a": torch.ones(3, 2), "c": torch.ones(4), "count": torch.ones(())}
    with mf.make_groups(1) as groups:
        with pytest.raises(mf.errors.LeafError) as error:
            mf.load_shards(path, groups, like=like)
        text = str(error.value)
        assert "params.a: expected shape (3, 2), got (2, 3)" in text
        assert "params.c is missing" in text
        assert "params.count: expected float32, got int64" in text
        assert "'b' is not expected" in text
        assert "fix: " in text
        state = nn.BatchNorm1d(2).state_dict() | {"running_mean": torch.ones(3)}
        with pytest.raises(
            mf.errors.LeafError, match=r"buffers.running_mean: expected shape \(2,\)"
        ):
            mf.init_model(lambda: nn.BatchNorm1d(2), groups, seed=0, weights=state)


def load_own(layout: Layout, folder: Path, kind: str) -> None:
    mf.load_shards(folder / f"{kind}-{dist.get_rank()}.safetensors", groups_of(layout))


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("absent", ["No such file"]),
        ("shape", ["rank 2: params.w (7, 5) float32"]),
        ("value", ["first difference: params.w", "rank 2: not as in the first replica"]),
    ],
)
def test_files_that_differ_between_ranks_are_refused_on_all(ranks, tmp_path, kind, lines):
    for rank in range(4):
        shape = (7, 5) if kind == "shape" and rank == 2 else (5, 7)
        x = random(0, *shape)
        x[0, 0] += kind == "value" and rank == 2
        if kind != "absent" or rank != 2:
            write_safetensors(tmp_path / f"{kind}-{rank}.safetensors", {"w": x})
    for rank, failure in enumerate(ranks(4).try_run(load_own, LAYOUTS[2], tmp_path, kind)):
        text = f"{failure.type_name}: {failure.message}"
        own = kind == "absent" and rank == 2
        assert text.startswith("FileNotFoundError: " if own else "DesyncError: load_")
        assert all(line in text for line in lines), text


# `init_model(weights=, names=, missing=)`: what the weights lack is as the model makes it.


class Adapted(nn.Module):
    """A linear layer with a product of two narrow ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def adapted() -> nn.Sequential:
    model = plain()
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])  # type: ignore[arg-type]
    return model


def is_new(name: str) -> bool:
    return ".down." in name or ".up." in name


def name_here(name: str) -> str:
    layer, _, rest = name.partition(".")
    return name if layer == "1" else f"{layer}.base.{rest}"


def saved(path: Path) -> nn.Module:
    torch.manual_seed(9)
    model = plain()
    model[1].running_mean += 3.0  # pyright: ignore
    torch.save(model.state_dict(), path)
    return model


def made(layout: Layout, path: Path):
    groups = groups_of(layout)
    options = {"names": name_here, "missing": is_new, "frozen": lambda name: not is_new(name)}
    skeleton, shards = mf.init_model(adapted, groups, seed=4, weights=path, **options)
    frozen = {name for name, leaf in shards.items() if not isinstance(leaf, mf.shards.Sharded)}
    return mf.unshard(shards, groups), dict(skeleton.named_buffers()), frozen


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 2)], ids=str)
def test_old_parameters_are_read_and_new_ones_are_made(ranks, tmp_path: Path, layout: Layout):
    old = saved(tmp_path / "old.pt")
    torch.manual_seed(4)
    want = adapted()
    missing, extra = want.load_state_dict(
        {name_here(k): x for k, x in old.state_dict().items()}, strict=False
    )
    assert extra == []
    assert all(map(is_new, missing))
    for params, buffers, frozen in ranks(layout.world_size).run(made, layout, tmp_path / "old.pt"):
        same_bits(params, {name: x.detach() for name, x in want.named_parameters()})
        same_bits(buffers, dict(want.named_buffers()))
        assert frozen == {name for name in params if not is_new(name)}


@pytest.mark.parametrize("how", [{"names": name_here}, {"missing": is_new}])
def test_what_is_said_of_weights_that_are_not_given_is_refused(how: dict[str, Any]):
    with pytest.raises(mf.errors.PlanError, match="names= and missing= are about weights="):
        mf.init_model(adapted, mf.make_groups(1), seed=0, **how)


def test_what_is_missing_and_not_new_is_an_error(tmp_path: Path):
    saved(tmp_path / "old.pt")
    groups = mf.make_groups(1)
    with pytest.raises(mf.errors.LeafError) as caught:
        mf.init_model(
            adapted,
            groups,
            seed=0,
            weights=tmp_path / "old.pt",
            names=lambda name: None if name == "0.bias" else name_here(name),
            missing=is_new,
        )
    assert "  params.0.base.bias is missing\n  fix: " in str(caught.value)
