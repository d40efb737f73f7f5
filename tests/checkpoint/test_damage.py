"""Whatever happens to the files of a step: a typed error that names the file, and nothing else."""

import json
import os
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import Layout, groups_of
from mutating import BYTES, Watch
from rank_pool import run_ranks
from steps import damage_values, load_at, save_at

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.errors import FileError

STEPS = (1, 2)
LAYOUT = Layout((2, 2), 2)


def save_steps(layout: Layout, folder: str, steps: Any = STEPS) -> None:
    groups = groups_of(layout)
    for step in steps:
        save_at(folder, step, groups)


# What can happen to files: each returns where, or None if nothing has changed.


def change_bytes(rng: random.Random, folder: Path) -> Path | None:
    path = of_step(rng, folder)
    data = bytearray(path.read_bytes())
    before = bytes(data)
    rng.choice(BYTES[:1] if rng.random() < 0.5 else BYTES)(rng, data or bytearray(b"\0"))
    path.write_bytes(data)
    return path if bytes(data) != before else None


def of_step(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.glob("step-*2/*")))


def remove_file(rng: random.Random, folder: Path) -> Path:
    path = of_step(rng, folder)
    path.unlink()
    return path


def rename_file(rng: random.Random, folder: Path) -> Path:
    path = of_step(rng, folder)
    path.rename(path.with_name(f"{path.name}.{rng.randrange(9)}"))
    return path


def swap(rng: random.Random, folder: Path) -> Path | None:
    """Two files of a step, or of two steps, or these, change their places."""
    a, b = rng.sample(sorted(folder.glob("step-*2/*")), 2)
    other = folder / "step-00000001"
    a, b = rng.choice([(a, b), (a, other / a.name), (folder / "step-00000002", other)])
    if a.is_file() and a.read_bytes() == b.read_bytes():
        return None
    a.rename(a.with_name("other"))
    b.rename(a)
    a.with_name("other").rename(b)
    return a


def become_something_else(rng: random.Random, folder: Path) -> Path:
    path = of_step(rng, folder)
    path.rename(folder / "kept")
    make = [lambda: path.symlink_to(folder / "kept"), lambda: os.mkfifo(path), path.mkdir]
    rng.choice(make)()
    return path


HAPPENINGS = [*[change_bytes] * 8, remove_file, rename_file, *[swap] * 3, become_something_else]


def leaf_at(path: Path, offset: int) -> str:
    """The tensor of a file that has a byte; "" for the header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    facts = json.loads(data[8 : 8 + length])
    for name, each in facts.items():
        low, high = each["data_offsets"]
        if low <= offset - 8 - length < high:
            return name
    return ""


def restore(kept: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)


def campaign(kept: Path, folder: Path, first: int, count: int) -> Counter[str]:
    """Damage a step in many ways, load it and look at it."""
    groups, found, watch = mf.make_groups(1), Counter[str](), Watch(folder)
    restore(kept, folder)
    assert load_at(folder, groups, None) == STEPS[-1]
    checkpoint.verify(folder)
    for seed in range(first, first + count):
        rng = random.Random(seed)
        happening = rng.choice(HAPPENINGS)
        path = happening(rng, folder)
        if path is not None:
            for verb in (checkpoint.verify, lambda f, step: load_at(f, groups, step)):  # noqa: B023
                call, what = partial(verb, folder, step=2), (seed, happening.__name__, path)
                error = watch.error_of(what, call, FileError, on=seed > first + 20)
                assert error is not None, what
                assert error.path.startswith(str(folder)), (seed, error)
                assert error.path in str(error), (seed, error)
            found[happening.__name__] += 1
        restore(kept, folder)
    return found


@pytest.mark.parametrize(
    "count", [50, pytest.param(1000, marks=[pytest.mark.thorough, pytest.mark.limit(550)])]
)
def test_all_damage_is_an_error_that_names_a_file(ranks, tmp_path: Path, count: int) -> None:
    ranks(4).run(save_steps, LAYOUT, str(tmp_path / "kept"))
    args = tmp_path / "kept", tmp_path / "work", count, count
    (tmp_path / "work").mkdir()
    (found,) = run_ranks(campaign, 1, *args, timeout_s=500.0)
    assert sum(found.values()) > 0.8 * count
    assert len(found) >= len(set(HAPPENINGS)) - 1


@pytest.mark.parametrize("part", ["MANIFEST.json", "rank-00000.safetensors"])
def test_a_flipped_bit_is_named_with_its_leaf(ranks, tmp_path: Path, part: str) -> None:
    """One bit after the other of a file: the error names it, and the leaf."""
    ranks(4).run(save_steps, LAYOUT, str(tmp_path))
    groups, path = mf.make_groups(1), tmp_path / "step-00000002" / part
    plain = path.read_bytes()
    for at in range(0, len(plain), len(plain) // 30):
        data = bytearray(plain)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        for verb in (checkpoint.verify, lambda f: load_at(f, groups)):
            with pytest.raises(FileError) as raised:
                verb(tmp_path)
            assert str(path) in str(raised.value)
            if part != "MANIFEST.json":
                path.write_bytes(plain)
                assert raised.value.leaf == leaf_at(path, at)
                path.write_bytes(data)


def go_back(layout: Layout, folder: str, donate: bool) -> tuple[int, str]:
    """Load with a way back; and what is raised without one."""
    groups = groups_of(layout)
    with pytest.raises(FileError) as raised:
        load_at(folder, groups, None)
    step = load_at(folder, groups, on_corrupt="previous", donate=donate)
    with pytest.raises(FileError):
        load_at(folder, groups, 3, on_corrupt="previous")
    return step, str(raised.value)


def test_all_ranks_go_back_if_one_of_them_sees_damage(ranks, tmp_path: Path) -> None:
    for donate in (False, True):
        folder = tmp_path / str(donate)
        ranks(4).run(save_steps, LAYOUT, str(folder), (1, 2, 3))
        damage_values(folder / "step-00000003" / "rank-00003.safetensors")
        damage_values(folder / "step-00000002" / "rank-00000.safetensors")
        found = ranks(4).run(go_back, LAYOUT, str(folder), donate)
        assert {step for step, _ in found} == {1}
        assert len({text for _, text in found}) == 1
        assert "rank-00003.safetensors" in found[0][1]
