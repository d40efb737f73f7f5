"""What was committed is never lost: kills at any moment, and at each operation of a save."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import in_child
from steps import Recorder, check_step, save_at

import mics_fn as mf
from mics_fn import checkpoint
from tests.stress.kills import KillsConfig, measure_kills, render_kills


@pytest.mark.parametrize(
    ("kills", "lanes"),
    [(2, 2), pytest.param(60, 2, marks=[pytest.mark.thorough, pytest.mark.limit(600)])],
)
def test_no_step_is_lost_when_ranks_are_killed(kills: int, lanes: int) -> None:
    config = KillsConfig(kills, seed=kills, lanes=lanes)
    figures = measure_kills(config)
    assert figures["missed"] == [], render_kills(figures, config)
    assert figures["found"]["kills"] == kills
    assert figures["found"]["inside"] >= kills / 2


@pytest.mark.parametrize(
    "kind", ["pruning", pytest.param("rolled back", marks=pytest.mark.thorough)]
)
def test_a_kill_at_any_operation_loses_nothing(tmp_path: Path, kind: str) -> None:
    groups = mf.make_groups(1)
    how: dict[str, Any] = {"keep": 2} if kind == "pruning" else {"overwrite": "newer"}
    step = 4 if kind == "pruning" else 2

    def save(folder: Path, deadly: int) -> None:
        def kill(number: int, write: Callable[[], Any]) -> None:
            if number == deadly:
                write()
                os.kill(os.getpid(), signal.SIGKILL)

        Recorder(kill).install(setattr)
        save_at(folder, step, groups, **how)

    killed, plain = 0, tmp_path / "plain"
    plain.mkdir()
    for before in (1, 2, 3):
        save_at(plain, before, groups)
    for deadly in range(200):
        folder = shutil.copytree(plain, tmp_path / f"{deadly}")
        status = in_child(lambda: save(folder, deadly))  # noqa: B023
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
        newest = checkpoint.latest(folder)
        assert newest in (3, step), deadly
        check_step(folder, newest, groups)
        save_at(folder, step, groups, **{**how, "overwrite": "newer"})
        check_step(folder, step, groups)
        left = [x for x in os.listdir(folder) if not x.startswith(".epoch-")]
        assert len(left) == len(checkpoint.steps(folder)), left
    assert killed >= 9
    check_step(folder, step, groups)


def test_the_disk_has_each_thing_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, folder = mf.make_groups(1), tmp_path / "new" / "jobs"
    for step in (1, 2, 3, 4):
        recorder = Recorder()
        with monkeypatch.context() as patch:
            recorder.install(patch.setattr)
            save_at(folder, step, groups, keep=None if step < 4 else 2)
        if step == 1:  # also a new folder, with all above it
            synced = [path for name, path in recorder.did if name == "fsync"]
            assert {str(tmp_path), str(folder.parent), str(folder)} <= set(synced)
    did = [(name, Path(path).name) for name, path in recorder.did]
    synced = [path for name, path in did if name == "fsync"]
    part, manifest = "rank-00000.safetensors", "MANIFEST.json"
    order = [("fsync", part), ("open", manifest), ("write", manifest), ("fsync", manifest)]
    temporary = next(path for _, path in did if path.startswith(".tmp-"))
    order += [("fsync", temporary), ("rename", temporary), ("fsync", "jobs")]
    at = -1
    for each in order:
        at = did.index(each, at + 1)  # which raises where it does not come after the last one
    assert synced[-1] == "jobs"
    first = "rename", "step-00000001"
    gone = [i for i, x in enumerate(did) if x[0] in ("unlink", "rmdir") or x == first]
    assert min(gone) > at


def test_what_is_written_can_be_read_by_those_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_at(tmp_path, 1, mf.make_groups(1))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("step-*/*")}
    assert set(modes.values()) == {0o640}, modes
