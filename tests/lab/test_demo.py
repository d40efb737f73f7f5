"""The demo as a user runs it, and the launcher under it: numbers, interrupts, ranks that die."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from children import left_of
from rank_pool import run_ranks

from mics_fn.__main__ import main
from mics_fn.lab import demo

ROOT = Path(__file__).parents[2]
TINY = ["--sequences", "2", "--context", "16", "--dim", "16"]
NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def environment() -> dict[str, str]:
    """Without what this test run's own launcher may have set."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return {k: v for k, v in os.environ.items() if k != "CI"} | {"PYTHONPATH": path}


def run_demo(out: Path, *flags: str) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, "-m", "mics_fn", "demo", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(
        [*command, *TINY, *flags], capture_output=True, text=True, timeout=110, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "leaked" not in done.stderr, done.stderr
    return done.stdout, json.loads((out / "results.json").read_text())


def forked_demo(out: Path, *flags: str) -> tuple[str, dict[str, Any]]:
    """The same in this process, with ranks that are forked and need not import torch."""
    said = io.StringIO()
    with mock.patch.object(demo, "launch", run_ranks), contextlib.redirect_stdout(said):
        assert main(["demo", "--device", "cpu", "--out", str(out), *TINY, *flags]) == 0
    return said.getvalue(), json.loads((out / "results.json").read_text())


LAYOUTS = {
    "1 group of 2": (2, 2, 2, {"gather rank": (1, 1 / 2), "reduce rank": (2, 1 / 2)}),
    "2 levels": (
        *(4, 4, 3, {"gather node": (1, 1 / 4), "gather rank": (1, 1 / 2)}),
        {"reduce node": (3, 1 / 4), "reduce rank": (3, 1 / 2)},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.short("1 group of 2")
def test_the_demo_trains_counts_and_agrees_with_one_process(layout: str, tmp_path: Path) -> None:
    ranks, p, accumulate, *parts = LAYOUTS[layout]
    shares = {what: share for part in parts for what, share in part.items()}
    flags = ["--ranks", f"{ranks}", "--partition-size", f"{p}", "--accumulate", f"{accumulate}"]
    run = forked_demo if ranks == 2 else run_demo
    said, figures = run(tmp_path / "out", "--node-size", "2", "--steps", "5", *flags)
    assert figures["check"]["ok"] is True
    assert figures["check"]["loss_max_rel"] < 1e-5
    assert figures["check"]["param_rel"] < 1e-4
    assert len(figures["losses"]) == len(figures["losses_alone"]) == 5
    assert figures["losses"][-1] < figures["losses"][0]
    assert [step for step, _ in figures["held_out"]] == [0, 1, 2, 3, 4, 5]
    full = figures["full_bytes"]
    assert 4 * figures["num_params"] <= full < 4 * figures["num_params"] + 4096
    totals = figures["traffic"].pop("step totals")
    assert totals["counted"] == [totals["formula"]] * ranks
    assert set(figures["traffic"]) == set(shares)
    for what, (times, share) in shares.items():
        assert figures["traffic"][what]["counted"] == [times * share * full] * ranks, what
        assert figures["traffic"][what]["formula"] == times * share * full
    # Each rank holds 1/p of parameters and state; what is over is padding.
    assert max(figures["state_bytes"]) <= figures["full_state_bytes"] / p + 4096
    assert sum(figures["state_bytes"]) <= figures["full_state_bytes"] * ranks / p + 4096
    assert "within the bounds: ok" in said
    lines = [line for line in said.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= demo.COLUMNS
    image = (tmp_path / "out" / "loss.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    for name in ("run", "run-2", "run-3"):
        folder = demo.folder_for(tmp_path / "run")
        assert folder == tmp_path / name
        (folder / "results.json").write_text("kept")


# The launcher.


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def started_demo(out: Path, *, trains: bool) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """An endless demo and its ranks' processes, once they were started, or once they train."""
    command = [sys.executable, "-m", "mics_fn", "demo", "--device", "cpu", "--out", str(out)]
    process = subprocess.Popen(
        [*command, *TINY, "--ranks", "2", "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | {"TMPDIR": str(out)},
        start_new_session=True,  # so that it has a process group as in a terminal
    )
    deadline = time.monotonic() + 60
    while len(started := sorted(children(process.pid))) < 3:  # the first one is Python's own
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    assert process.stderr is not None
    seen = ""
    while trains and "step/s, loss" not in seen:
        assert time.monotonic() < deadline
        seen += process.stderr.read(20)
    ranks = dict(enumerate(started[1:]))
    return process, ranks


@NEEDS_PROC
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "trains", "code", "says"),
    [
        ("Ctrl-C", False, 130, "demo: interrupted\n"),
        ("Ctrl-C", True, 130, "demo: interrupted\n"),
        ("a killed rank", True, 1, "\n  rank 1: RankDied: process was killed by SIGKILL\n"),
        ("a killed launcher", True, -9, ""),
    ],
)
def test_all_end_at_once_with_one_message(
    how: str, trains: bool, code: int, says: str, tmp_path: Path
) -> None:
    process, ranks = started_demo(tmp_path, trains=trains)
    begin = time.monotonic()
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(ranks[1] if how == "a killed rank" else process.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10  # about one second where the machine is free
    assert process.returncode == code
    assert says in errors
    assert "Traceback" not in errors
    assert left_of(ranks.values()) == []
    assert how != "Ctrl-C" or not list(tmp_path.glob("mics_ranks_*"))
