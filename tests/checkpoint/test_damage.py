"""Whatever happens to the files of a step: a typed error that names the file, and nothing else."""

import hashlib
import json
import os
import random
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of
from mutating import BYTES, Watch, replace_in_json
from rank_pool import run_ranks
from steps import damage_values, load_at, save_at

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.errors import CheckpointNotFound, FileError

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


HAPPENINGS = [*[change_bytes] * 8, remove_file, *[swap] * 3, become_something_else]


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


# Of strangers: manifests with a right digest, and what lies in the place of a file.

PART, STEP, MANIFEST = "rank-00000.safetensors", "step-00000001", "MANIFEST.json"
GROWTH = 100 * 2**20  # bytes that a process may grow by while it reads small files


def state(groups: mf.Groups) -> Any:
    return {"w": mf.shard({"w": torch.arange(6.0)}, groups), "plain": torch.ones(5), "epoch": 3}


def save(folder: Path, groups: mf.Groups) -> None:
    checkpoint.save(folder, state(groups), groups, step=1, extra={"x": [1, torch.ones(2)]})


def sealed(text: bytes) -> bytes:
    """A manifest with a right digest."""
    return b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'",' + text[1:]


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / STEP / "MANIFEST.json"
    body = json.loads(path.read_bytes())
    body.pop("sha256")
    change(body)
    path.write_bytes(sealed(json.dumps(body, separators=(",", ":")).encode()))


def put(key: str, *path: Any) -> Callable[[Path], None]:
    """Put a value at a place of the manifest."""
    *place, last, value = (key, *path)

    def change(body: Any) -> None:
        for each in place:
            body = body[each]
        body[last] = value

    return lambda folder: change_manifest(folder, change)


def raw(text: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / STEP / MANIFEST).write_bytes(sealed(text))


def in_text(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Replace a part of the manifest's text, for what no JSON writer writes."""

    def change(folder: Path) -> None:
        path = folder / STEP / "MANIFEST.json"
        text = b"{" + path.read_bytes()[77:]
        assert old in text
        path.write_bytes(sealed(text.replace(old, new, 1)))

    return change


def instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Something else in the place of a file."""

    def change(folder: Path) -> None:
        path = folder / STEP / name
        path.rename(folder / "kept")
        make(path)

    return change


def extra(text: str) -> Callable[[Path], None]:
    """Another text in the place of what a rank gave besides the state."""
    return put("files", 0, 1, text)


# What is done to a checkpoint, and what the error says.
CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no JSON": (raw(b"{nope"), "is damaged"),
    "deep nesting": (raw(b'{"a":' + b"[" * 10**6), "is damaged"),
    "deep values": (in_text(b'epoch":3', b'epoch":' + b"[" * 900 + b"]" * 900), ""),
    "empty": (lambda folder: os.truncate(folder / STEP / MANIFEST, 0), "is damaged"),
    "unknown version": (put("version", 2), "known here is version 4"),
    "twice": (in_text(b'"step":1', b'"step":1,"step":1'), "a name is there twice"),
    "half a character": (put("files", 0, 0, 0, 0, "\ud800"), "ud800"),
    "a link": (instead(PART, lambda path: path.symlink_to("/etc/passwd")), "a symbolic link"),
    "a FIFO": (instead(PART, os.mkfifo), "is not a regular file"),
    "a link as folder": (
        lambda folder: [(folder / STEP).rename(folder / "x"), (folder / STEP).symlink_to("x")],
        "it is a symbolic link",
    ),
    "no file": (put("files", []), "has 0 elements in its slices"),
    "overflow": (put("tensors", "w.w", 1, [2**40, 2**40]), "overflows"),
    "more than its slices": (put("tensors", "w.w", 1, [7]), "has 6 elements in its slices"),
    "a gap": (put("files", 0, 0, 0, 1, 1), "plain[1:5] is not the next"),
    "no elements": (put("files", 0, 0, 0, 2, 0), "plain[0:0] is not the next"),
    "beyond the file": (put("files", 0, 0, 0, 3, 2**40), "not behind the slice"),
    "of another tensor": (put("files", 0, 0, 0, 0, "v"), "v is not a tensor"),
    "dtype of a module": (put("tensors", "w.w", 0, "_dynamo"), "is of '_dynamo'"),
    "checksum wrong": (put("files", 0, 0, 0, 4, 0), "are not those that were saved"),
    "huge shape": (put("tensors", "w.w", 1, [2**50]), "has 6 elements in its slices"),
    "other dtype": (put("tensors", "w.w", 0, "float64"), "not behind the slice"),
    "extra is no JSON": (extra("{nope"), "$extra"),
    "extra without its tensor": (extra('{"$tensor":["no","int8",3]}'), "$extra"),
    "extra of wrong types": (extra('{"$tuple":3}'), "$extra"),
    "deep extra": (extra("[" * 10**5), "$extra"),
}
# What `verify` does not see, as it compares files with checksums and knows no state.
LOAD_ONLY = ["deep values", *(name for name in CASES if "extra" in name)]


def look(case: str, folder: Path) -> list[str]:
    """Load and verify a hostile checkpoint, in a process of its own."""
    groups, texts = mf.make_groups(1), list[str]()
    save(folder, groups)
    checkpoint.load(folder, state(groups), groups)
    checkpoint.verify(folder)
    change, _ = CASES[case]
    change(folder)
    watch, before = Watch(folder), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    verbs: list[Any] = [lambda: checkpoint.load(folder, state(groups), groups)]
    verbs += [] if case in LOAD_ONLY else [lambda: checkpoint.verify(folder)]
    for verb in verbs:
        text = str(watch.error_of(case, verb, FileError))
        assert str(folder) in text
        assert len(text) < 3000
        texts.append(text.encode().decode())
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < GROWTH, grown
    return texts


def look_at_all(folder: Path, cases: list[str]) -> dict[str, str]:
    """What is wrong with the errors of these cases."""
    wrong = {}
    for i, case in enumerate(cases):
        try:
            texts = look(case, folder / str(i))
            fragment = CASES[case][1]
            if not all(fragment in text for text in texts):
                wrong[case] = f"{fragment!r} is not in {texts}"
        except BaseException as error:
            wrong[case] = f"{type(error).__name__}: {error}"[:600]
    return wrong


def test_what_is_hostile_is_refused_by_name(tmp_path: Path) -> None:
    (wrong,) = run_ranks(look_at_all, 1, tmp_path, list(CASES))
    assert not wrong, "\n".join(f"{k}: {v}" for k, v in wrong.items())


def rewrite_at_random(folder: Path, first: int, count: int) -> int:
    """Replace something in a manifest, with a right digest, and load it."""
    groups, watch, refused = mf.make_groups(1), Watch(folder), 0
    save(folder, groups)
    kept = {path: path.read_bytes() for path in (folder / STEP).iterdir()}
    for seed in range(first, first + count):
        rng = random.Random(seed)
        try:
            change_manifest(folder, lambda body: replace_in_json(rng, body))  # noqa: B023
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            continue  # no JSON writer writes it, or it is not a manifest any more
        for verb in (
            lambda: checkpoint.load(folder, state(groups), groups),
            lambda: checkpoint.verify(folder),
        ):
            error = watch.error_of(seed, verb, FileError, on=seed > first + 20)
            refused += error is not None and str(folder) in str(error)
        for path, data in kept.items():
            path.write_bytes(data)
    return refused


@pytest.mark.parametrize(
    "count", [80, pytest.param(1200, marks=[pytest.mark.thorough, pytest.mark.limit(500)])]
)
def test_any_value_at_any_place_is_refused_or_read(tmp_path: Path, count: int) -> None:
    (refused,) = run_ranks(rewrite_at_random, 1, tmp_path, count, count, timeout_s=450.0)
    assert refused > count / 2


def test_where_no_step_is(tmp_path: Path) -> None:
    path, groups = tmp_path / "jobs", mf.make_groups(1)
    for seen in ("it has: no folder", "it has: .tmp-step"):
        assert (checkpoint.steps(path), checkpoint.latest(path)) == ([], None)
        for verb in (checkpoint.verify, lambda p: checkpoint.load(p, state(groups), groups)):
            with pytest.raises(CheckpointNotFound, match=seen) as raised:
                verb(path)
            assert str(path) in str(raised.value)
        (path / ".tmp-step-00000001-ab").mkdir(parents=True, exist_ok=True)


def test_a_step_that_lost_its_manifest_is_not_passed_over(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    for step in (1, 2):
        checkpoint.save(tmp_path, state(groups), groups, step=step)
    (tmp_path / "step-00000002" / MANIFEST).unlink()
    with pytest.raises(FileError, match=MANIFEST):
        checkpoint.load(tmp_path, state(groups), groups)
    found = checkpoint.load(tmp_path, state(groups), groups, on_corrupt="previous")
    assert found.step == 1
    checkpoint.save(tmp_path, state(groups), groups, step=3)
    assert (tmp_path / "step-00000002" / PART).exists()  # nobody else may know that it was there
