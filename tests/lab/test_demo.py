"""The demo as a user runs it, and the launcher under it: numbers, interrupts, ranks that die."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mics_fn.__main__ import main
from mics_fn.errors import PlanError
from mics_fn.lab.demo import command as command_module
from mics_fn.lab.demo import command as demo
from mics_fn.lab.demo import training as demo_run
from mics_fn.lab.models import gpt
from mics_fn.lab.ranks import launch
from mics_fn.lab.report import gather_bytes, step_bytes

ROOT = Path(__file__).parents[2]
TINY = ["--sequences", "2", "--context", "16", "--dim", "16"]
NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def environment() -> dict[str, str]:
    """Without what this test run's own launcher may have set."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return {k: v for k, v in os.environ.items() if k != "CI"} | {"PYTHONPATH": path}


def run_demo(out: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "mics_fn", "demo", "--device", "cpu", "--out", str(out)]
    done = subprocess.run(
        [*command, *TINY, *flags], capture_output=True, text=True, timeout=110, env=environment()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads((out / "results.json").read_text())


LAYOUTS = {
    "1 group of 2": (
        ["--node-size", "2", "--partition-size", "2", "--accumulate", "2"],
        {"gather rank": (1, 1 / 2), "reduce rank": (2, 1 / 2)},
    ),
    "2 replicas of 2": (
        ["--node-size", "2", "--partition-size", "2", "--accumulate", "2"],
        {"gather rank": (1, 1 / 2), "reduce rank": (2, 1 / 2), "replicas": (1, 1 / 2)},
    ),
    "2 levels": (
        ["--node-size", "2", "--partition-size", "4", "--accumulate", "3"],
        {
            "gather node": (1, 1 / 4),
            "gather rank": (1, 1 / 2),
            "reduce node": (3, 1 / 4),
            "reduce rank": (3, 1 / 2),
        },
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.short("1 group of 2")
def test_the_demo_trains_counts_and_agrees_with_one_process(layout: str, tmp_path: Path) -> None:
    (flags, shares), ranks = LAYOUTS[layout], 2 if layout == "1 group of 2" else 4
    done, figures = run_demo(tmp_path / "out", "--ranks", f"{ranks}", "--steps", "5", *flags)
    assert figures["check"]["ok"] is True
    assert figures["check"]["loss_max_rel"] < 1e-5
    assert figures["check"]["param_rel"] < 1e-4
    assert len(figures["losses"]) == len(figures["losses_alone"]) == 5
    assert figures["losses"][-1] < figures["losses"][0]
    assert [step for step, _ in figures["held_out"]] == [0, 1, 2, 3, 4, 5]
    p = figures["config"]["partition_size"]
    full = figures["full_bytes"]
    assert 4 * figures["num_params"] <= full < 4 * figures["num_params"] + 4096
    totals = figures["traffic"].pop("step totals")
    assert totals["counted"] == [totals["formula"]] * ranks
    assert set(figures["traffic"]) == set(shares)
    for what, (times, share) in shares.items():
        assert figures["traffic"][what]["counted"] == [times * share * full] * ranks, what
        assert figures["traffic"][what]["formula"] == times * share * full
    # Each rank holds 1/p of parameters and state; what is over is padding.
    assert max(figures["held_bytes"]) <= figures["full_held_bytes"] / p + 4096
    assert sum(figures["held_bytes"]) <= figures["full_held_bytes"] * ranks / p + 4096
    assert "within the bounds: ok" in done.stdout
    lines = [line for line in done.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= demo.COLUMNS
    assert done.stderr.count("5/5") >= 1
    assert "Traceback" not in done.stdout + done.stderr
    image = (tmp_path / "out" / "loss.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000


@pytest.mark.thorough
def test_with_a_precision_the_demo_says_how_far_losses_are_from_float32(tmp_path: Path) -> None:
    flags = ["--ranks", "2", "--node-size", "1", "--steps", "4", "--seed", "3", "--lr", "3e-4"]
    done, figures = run_demo(tmp_path, *flags, "--precision", "hop2=int8[64]; *norm*: hop2=f32")
    check = figures["check"]
    assert figures["config"]["precision"] == "hop2=int8[64]; *norm*: hop2=f32"
    assert (figures["config"]["seed"], figures["config"]["lr"]) == (3, 3e-4)
    assert (check["ok"], check["loss_bound"], check["late_steps"]) == (True, None, 2)
    assert check["late_bound"] == 5e-3
    means = [sum(figures[x][-2:]) / 2 for x in ("losses", "losses_alone")]
    assert check["late_losses"] == pytest.approx(means, rel=1e-6)
    assert 1e-7 < check["loss_max_rel"] < 1e-2, "codes round, and only a little"
    sent = figures["traffic"]["replicas"]
    assert sent["counted"] == [sent["formula"]] * 2
    assert 0.25 < sent["formula"] / figures["full_bytes"] < 0.5
    assert sent["why"] == "2 (r-1)/r M/p as int8[64], f32"
    assert "bound on that for these codes: 0.5%\n  within the bounds: ok" in done.stdout
    lines = [line for line in done.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= demo.COLUMNS


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("", False),
        ("f32", False),
        ("param=f64; *norm*: hop2=f32", False),
        ("bf16", True),
        ("hop2=int8", True),
        ("state=int8", True),
        ("f32; *norm*: hop1=int4@node", True),
    ],
)
def test_which_precisions_have_no_bounds(text: str, rounds: bool) -> None:
    """With an error of 10 % the verdict is "out of bounds", or that there are none."""
    config = demo_run.DemoConfig(1, 1, 1, 2, 1, 1, "cpu", precision=text)
    assert config.rounds == rounds
    assert config.bounded != rounds
    assert not replace(config, seed=1).bounded
    assert not replace(config, lr=3e-4).bounded
    parameter = {"w": torch.ones(3)}
    run = demo_run.RankResult([2.0, 1.0], [0.1], [(2, 1.0)], 12, 12, {}, {}, "cpu", parameter)
    alone = demo_run.AloneResult([2.0, 1.1], 1.0, 12, parameter)
    check = demo.summarize(config, [run], alone).check
    assert check["ok"] is (None if rounds else False)
    assert check["late_losses"] == pytest.approx([1.0, 1.1])
    verdict = "no bounds" if rounds else "OUT OF BOUNDS"
    shown = demo.render_check(check)
    assert verdict in shown
    assert "mean of the last 1 losses: 1.0000, alone 1.1000, -9.09%" in shown


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("hop2=int8", 5e-3),
        ("gather=fp8; *norm*: hop2=f32", 5e-3),
        ("gather=int8,hop1=int4@node", 1e-2),
        ("hop2=int8; *norm*: hop2=int4", 1e-2),
        ("", None),
        ("bf16,hop2=int8", None),
        ("hop2=bf16", None),
        ("state=int8,hop2=int8", None),
    ],
)
def test_runs_that_send_codes_at_a_small_rate_are_bounded(text: str, bound: float | None) -> None:
    config = demo_run.DemoConfig(1, 1, 1, 60, 1, 1, "cpu", precision=text, lr=3e-4, seed=2)
    assert config.coded_bound == bound
    assert replace(config, lr=1e-4).coded_bound == bound
    assert replace(config, lr=1e-3).coded_bound is None
    assert replace(config, steps=61).coded_bound is None
    parameter = {"w": torch.ones(3)}
    alone = demo_run.AloneResult([2.0, 1.0], 1.0, 12, parameter)
    for last, ok in ((1.0049, True), (1.0051, False), (0.9949, False), (1.0101, False)):
        losses = [2.0, last]
        run = demo_run.RankResult(losses, [0.1], [(2, 1.0)], 12, 12, {}, {}, "cpu", parameter)
        check = demo.summarize(config, [run], alone).check
        wanted = {None: None, 5e-3: ok, 1e-2: last < 1.01}[bound]
        assert check["ok"] is wanted
        words = {None: "no bounds", True: "within the bounds: ok", False: "OUT OF BOUNDS"}
        assert words[wanted] in (shown := demo.render_check(check))
        assert max(map(len, shown.splitlines())) <= demo.COLUMNS


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--precision", "hop2=int9"], "Codec.parse: 'int9' is not a codec"),
        (["--precision", "*norm*: hop1=int8@rack"], "int8[256]@rack names a level that these"),
        (["--ranks", "4", "--partition-size", "3"], "partition_size=3 does not divide the world"),
        (["--ranks", "4", "--node-size", "3"], "node_size=3 does not divide"),
        (["--ranks", "6", "--node-size", "3", "--partition-size", "2"], "crosses a node"),
        (["--dim", "30"], "--dim 30 is not a multiple of 4 heads"),
        (["--steps", "1"], "a curve needs at least 2"),
        (["--device", "cuda", "--ranks", "99"], "--device cuda with 99 ranks needs as many GPUs"),
        (["--dim", "1000000"], "--dim 1000000: 4 ranks need at least 1920.71 TB"),
        (["--ranks", "100000"], "--ranks 100000: 100000 ranks need at least "),
        (["--sequences", "9" * 30], "  activations and batches: "),
        (["--context", "400000"], "--context 400000: the shortest part of the text has "),
        (["--out", "/dev/null"], "--out /dev/null: File exists\n  fix: pass --out with a folder"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
        (["--out", "a" * 300], "File name too long"),
        (["--out", "a\0b"], "embedded null byte"),
    ],
)
def test_bad_flags_end_before_any_process_starts(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "launch", lambda *args: pytest.fail("a process was started"))
    assert main(["demo", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("\npython -m mics_fn demo: ")
    assert text in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ranks", "0"], "argument --ranks: 0 is less than 1"),
        (["--ranks", "x"], "argument --ranks: 'x' is not an integer"),
        (["--steps", "1e9"], "argument --steps: '1e9' is not an integer"),
        (["--out", ""], "argument --out: it is empty"),
        (["--lr", "fast"], "argument --lr: 'fast' is not a number"),
        (["--lr", "nan"], "argument --lr: nan is not between 0 and 1"),
    ],
)
def test_flags_that_are_of_no_use_are_refused_by_name(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["demo", *flags])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_too_many_steps_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--steps", "1000001"])
    assert "argument --steps: 1000001 is more than 1000000" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(command_module.tempfile, "TemporaryFile", refuse)
    with pytest.raises(PlanError) as caught:
        command_module.folder_for(tmp_path, overwrite=False)
    assert str(caught.value) == (
        f"--out {tmp_path}: Read-only file system\n"
        "  fix: pass --out with a folder that you may write to"
    )


def test_nothing_is_overwritten_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mics_fn_demo", "mics_fn_demo-2", "mics_fn_demo-3"):
        folder = command_module.folder_for(None, overwrite=False)
        assert str(folder) == name
        (folder / "results.json").write_text("kept")
    with pytest.raises(PlanError) as caught:
        command_module.folder_for(Path("mics_fn_demo"), overwrite=False)
    assert str(caught.value) == (
        "--out mics_fn_demo: it has the results of an earlier run\n  results.json\n"
        "  fix: pass another --out, or --overwrite to replace them"
    )
    assert str(command_module.folder_for(None, overwrite=True)) == "mics_fn_demo"
    assert command_module.folder_for(Path("mics_fn_demo-3"), overwrite=True).is_dir()
    assert {path.read_text() for path in tmp_path.glob("*/results.json")} == {"kept"}


def test_the_estimate_of_memory_is_below_what_a_run_takes() -> None:
    """Parameters of the real model, exactly; and one step more than fits is refused."""
    config = demo_run.DemoConfig(2, 2, 2, 2, 1, 1, "cpu", model=gpt.GPTConfig(dim=64))
    parts = command_module.needed_bytes(config)
    real = 2 * 4 * gpt.num_params(config.model) * (1 + 3 / 2)
    assert 0.9 * real < parts["parameters and their states"] <= real
    command_module.check_memory(config, [], sum(parts.values()))
    with pytest.raises(PlanError, match="the defaults: 2 ranks need at least .*, and this machine"):
        command_module.check_memory(config, [], sum(parts.values()) - 1)


def test_a_missing_extra_is_one_line_and_the_rest_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = demo_run.DemoConfig(1, 1, 1, 2, 1, 1, "cpu", held_out_sequences=1)
    parameter = {"w": torch.ones(3)}
    run = demo_run.RankResult(
        [2.0, 1.0], [0.1], [(0, 2.0), (2, 1.0)], 12, 12, {}, {}, "cpu", parameter
    )
    alone = demo_run.AloneResult([2.0, 1.1], 1.0, 12, parameter)
    summary = demo.summarize(config, [run], alone)
    assert summary.check["ok"] is False
    assert "OUT OF BOUNDS" in demo.render(summary)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    demo._write(tmp_path, config, summary, run, alone)
    said = capsys.readouterr().out
    assert "needs matplotlib; pip install 'mics-fn[demo]'" in said
    assert (tmp_path / "results.json").exists()
    assert list(demo._progress(range(3))) == [0, 1, 2]


def test_formulas() -> None:
    # From the paper: over nodes first, what enters a node falls from (p-1)M/p to (p-k)M/p.
    k, nodes, total = 8, 4, 32.0
    between, inside = gather_bytes((nodes, k), total)
    assert between * k == (nodes * k - k) * total / (nodes * k)
    assert between + inside == (nodes * k - 1) * total / (nodes * k)
    assert step_bytes([], [], 1, 100, 3) == {}
    assert step_bytes([], [], 4, 100, 3)["replicas"] == (150.0, "2 (r-1)/r M/p")


# The launcher.


def launched(kind: str) -> tuple[int, torch.Tensor]:
    dist.init_process_group("gloo")
    rank, total = dist.get_rank(), torch.ones(2)
    dist.all_reduce(total)
    print(f"hello from rank {rank}")
    if kind == "raise" and rank == 1:
        raise ValueError("no such thing\nsecond line")
    if kind == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit" and rank == 1:
        os._exit(7)
    dist.barrier()
    return rank, total


def launch_main(kind: str) -> None:
    """What the tests run in a process of its own."""
    try:
        results = launch.launch(launched, 2, kind)
        print([(rank, total.tolist()) for rank, total in results])
    except launch.LaunchError as err:
        print(err, file=sys.stderr)
        sys.exit(err.exit_code)


def launch_in_process(kind: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    code = f"import test_demo; test_demo.launch_main({kind!r})"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment() | {"TMPDIR": str(tmp_path)},
    )


@pytest.mark.thorough  # the demo above gets results in this way too
def test_results_come_back_and_only_rank_0_prints(tmp_path: Path) -> None:
    done = launch_in_process("fine", tmp_path)
    assert done.stdout == "hello from rank 0\n[(0, [2.0, 2.0]), (1, [2.0, 2.0])]\n"
    assert done.returncode == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("raise", "rank 1 of 2 failed: ValueError: no such thing\n  second line\n  full traceback"),
        pytest.param("killed", "rank 1 of 2 was killed by SIGKILL\n", marks=pytest.mark.thorough),
        pytest.param("exit", "rank 1 of 2 exited with code 7\n", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.thorough
def test_a_rank_that_fails_is_named_in_one_message(kind: str, says: str, tmp_path: Path) -> None:
    done = launch_in_process(kind, tmp_path)
    assert done.returncode == 1
    assert done.stdout in ("", "hello from rank 0\n"), "only rank 0 prints"
    assert done.stderr.startswith(says)
    assert done.stderr.endswith("the other ranks were stopped\n")
    assert len(done.stderr.splitlines()) < 6
    if kind == "raise":
        trace = re.search(r"full traceback: (.*)", done.stderr)
        assert trace is not None
        assert "in launched\n" in Path(trace[1]).read_text()


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


def gone_within(pids: list[int], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def start_endless_demo(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mics_fn", "demo", "--device", "cpu", "--out", str(out)]
    return subprocess.Popen(
        [*command, *TINY, "--ranks", "2", "--steps", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | {"TMPDIR": str(out)},
        start_new_session=True,  # so that it has a process group as in a terminal
    )


def wait_for(demo_process: subprocess.Popen[str], *, trains: bool) -> list[int]:
    """The ranks' processes, once they were started, or once they train."""
    deadline = time.monotonic() + 60
    while len(started := children(demo_process.pid)) < 2:
        assert time.monotonic() < deadline
        assert demo_process.poll() is None
        time.sleep(0.01)
    assert demo_process.stderr is not None
    seen = ""
    while trains and "step/s, loss" not in seen:
        assert time.monotonic() < deadline
        seen += demo_process.stderr.read(20)
    return started


@NEEDS_PROC
@pytest.mark.thorough
@pytest.mark.parametrize("trains", [False, True])
def test_ctrl_c_ends_all_at_once_with_one_message(trains: bool, tmp_path: Path) -> None:
    process = start_endless_demo(tmp_path)
    started = wait_for(process, trains=trains)
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10  # about one second where the machine is free
    assert process.returncode == 130
    assert errors.endswith("python -m mics_fn demo: interrupted: all 2 ranks were stopped\n")
    assert "Traceback" not in errors
    assert gone_within(started, 5)
    assert not list(tmp_path.glob("mics_launch_*"))


@NEEDS_PROC
@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all_with_one_message(victim: int, tmp_path: Path) -> None:
    process = start_endless_demo(tmp_path)
    started = wait_for(process, trains=True)
    rank_of = {}
    for pid in started:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        rank_of[next(v for v in variables if v.startswith("RANK="))] = pid
    begin = time.monotonic()
    os.kill(rank_of[f"RANK={victim}"], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10
    assert process.returncode == 1
    assert f"\npython -m mics_fn demo: rank {victim} of 2 was killed by SIGKILL\n" in errors
    assert "Traceback" not in errors
    assert gone_within(started, 5)


@NEEDS_PROC
@pytest.mark.thorough
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = start_endless_demo(tmp_path)
    started = wait_for(process, trains=True)
    process.kill()
    process.communicate(timeout=30)
    assert gone_within(started, 5)
