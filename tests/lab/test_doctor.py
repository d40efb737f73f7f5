"""The doctor: every part on gloo, what it sees if something is wrong, and what it keeps private."""

import argparse
import contextlib
import getpass
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mics_fn as mf
from mics_fn.__main__ import main
from mics_fn.lab.doctor import command, parts, rank, report, training
from mics_fn.lab.models.gpt import GPTConfig
from mics_fn.lab.ranks.bounded import Ended, run_bounded
from mics_fn.lab.ranks.pool import RankError, RankTimeoutError, run_ranks

ROOT = Path(__file__).parents[2]
WELL = Ended(None, "exited with code 0", 1.0, False, "", "", "")
SMALL = training.Training(GPTConfig(context=16, dim=32, num_blocks=2))


def forked(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    limit_s: float,
    grace_s: float = 10.0,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> list[Ended]:
    """As `run_bounded`, with ranks that are forked from here and need not import torch."""
    try:
        found = run_ranks(
            with_variables, n, environment, fn, *args, timeout_s=limit_s, grace_s=grace_s
        )
        return [WELL._replace(result=result) for result in found]
    except RankError as error:
        ended = []
        for number in range(n):
            failure = error.errors.get(number)
            text = f"{failure.type_name}: {failure.message}" if failure else ""
            how = "exited with code 1" if failure else WELL.how
            stopped = isinstance(error, RankTimeoutError) and text.startswith("RankTimeout")
            trace = failure.traceback if failure else ""
            ended.append(Ended(None, how, 1.0, stopped, text, trace, ""))
        return ended


def with_variables(environment: Callable[[int], Mapping[str, str]], fn: Any, *args: Any) -> Any:
    os.environ.update(environment(dist.get_rank()))
    return fn(*args)


@pytest.fixture
def doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """The exit code, the report and the text of a run with forked ranks."""
    monkeypatch.setattr(command, "run_bounded", forked)

    def run(*argv: str) -> tuple[int, dict[str, Any], str]:
        file = tmp_path / "report.json"
        code = main(["doctor", *argv, "--out", str(file)])
        return code, json.loads(file.read_text()), capsys.readouterr().out

    return run


# A forked rank that fails lives on, so the others of `ends` would wait for it.
LONG = [name for name in parts.PARTS if name not in ("alone", "ends")]
PARTS = ["alone", *(pytest.param(name, marks=pytest.mark.thorough) for name in LONG)]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_finds_nothing_wrong_on_gloo(name: str, doctor):
    code, found, text = doctor("--gpu", "--device", "cpu", "--parts", name)
    assert (code, found["well"], found["device"]) == (0, True, "cpu"), text
    assert [part["name"] for part in found["parts"]] == ["environment", "loopback", name]
    assert {part["verdict"] for part in found["parts"]} == {"ok"}
    assert found["environment"]["torch"] == torch.__version__
    checks = {check["what"]: check for check in found["parts"][-1]["checks"]}
    assert all(check["ok"] for check in checks.values())
    errors = [c["value"] for what, c in checks.items() if what.endswith("error of the update")]
    assert len(errors) == {"alone": 3, "ways": 6, "levels": 4}.get(name, 0)
    assert all(error > 1e-8 for error in errors)  # it is not compared with itself
    if name == "delays":
        late = [check["value"] for what, check in checks.items() if what.endswith("delays")]
        assert len(late) == len(training.LATE)
        assert min(late) > 5
    if name == "speed":
        assert {c["unit"] for c in checks.values()} == {"s", "x"}
    for secret in (getpass.getuser(), socket.gethostname(), str(ROOT), str(Path.home())):
        assert secret in report._COMMON or secret not in text + json.dumps(found)


def of_a_job(node_size: int, *flags: str) -> tuple[int, str]:
    """What a rank of a job prints; nodes of so many ranks are pretended."""
    said, wrong = io.StringIO(), io.StringIO()
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(node_size)}
    with (
        mock.patch.dict(os.environ, launch),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(wrong),
    ):
        code = main(["doctor", "--device", "cpu", *flags])
    return code, said.getvalue() + wrong.getvalue()


@pytest.mark.parametrize(("n", "node_size"), [(2, 1), (4, 2)])
def test_as_a_rank_of_a_job_it_checks_the_job(ranks, n: int, node_size: int):
    (code, text), *others = ranks(n).run(of_a_job, node_size)
    assert code == 0
    assert text.startswith(f"{n} ranks (2 x {n // 2}) on cpu, torch {torch.__version__}\n")
    assert "GLOO_SOCKET_IFNAME: lo" in text
    assert "elements that are wrong in a gather             0  of 0" in text
    assert "elements that are wrong after both hops         0  of 0" in text
    assert text.endswith("\nall ranks reach each other\n")
    assert others == [(0, "")] * (n - 1)


def lose_a_value(n: int) -> tuple[int, str]:
    unshard = mf.unshard
    mf.unshard = lambda shards, groups: {k: x + 1 for k, x in unshard(shards, groups).items()}
    try:
        return of_a_job(n)
    finally:
        mf.unshard = unshard


def test_a_job_with_wrong_values_is_said_to_have_them(ranks):
    (code, text), (other, _) = ranks(2).run(lose_a_value, 1)
    assert (code, other) == (1, 1)
    assert text.count("WRONG") == 3
    assert text.endswith("\nsome values are wrong\n")


def test_flags_that_start_ranks_are_refused_in_a_job(ranks):
    for code, text in ranks(2).run(of_a_job, 1, "--gpu"):
        assert code == 2
        assert text == (
            "\npython -m mics_fn doctor: doctor: a launcher started this process as one of several"
            " ranks\n  fix: leave out --gpu, --parts and --out to check the job; or start it"
            " without a launcher\n"
        )


def test_wrong_numbers_are_seen(monkeypatch: pytest.MonkeyPatch):
    """The reference learns a thousandth faster than what is compared with it."""
    monkeypatch.setattr(command, "run_bounded", forked)
    reference = training.reference
    monkeypatch.setattr(
        rank, "reference", lambda job, *a, **k: reference(replace(job, lr=1.001 * job.lr), *a, **k)
    )
    found = command.run_part("alone", parts.PARTS["alone"], rank.DoctorConfig("cpu", SMALL), 60.0)
    assert found.verdict == "WRONG"
    wrong = [check.what for check in found.checks if not check.ok]
    assert wrong == ["float32: error of the update", "deterministic: error of the update"]
    assert report.as_text(found).count("WRONG") == 3  # bf16 rounds by more than that


def test_bits_that_depend_on_delays_are_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "run_bounded", forked)
    monkeypatch.setattr(parts, "train", train_late)
    found = command.run_part("delays", parts.PARTS["delays"], rank.DoctorConfig("cpu", SMALL), 60.0)
    values = [check.value for check in found.checks if "not equal" in check.what]
    assert found.verdict == "WRONG"
    assert values == [0, *[1] * len(training.LATE)]


def train_late(job: Any, groups: Any, around: Any = None, **options: Any) -> training.Trained:
    """A stand-in whose parameter is how often something was late."""
    mode = around(0) if around else contextlib.nullcontext()
    with mode:
        for _ in range(100):
            groups.traffic.add("gather rank", 1)
            groups.traffic.add("reduce rank", 1)
            torch.zeros(1)
    count = torch.tensor(getattr(mode, "count", 0))
    return training.Trained([], {"w": count}, None)  # pyright: ignore[reportArgumentType]


def test_delays_reach_backward_and_leave_the_ledger_right():
    groups, counts = mf.make_groups(1), {}
    traffic = groups.traffic
    x = torch.ones(2, requires_grad=True)
    for kind in training.LATE:
        with training.Delays(training.Seam(torch.device("cpu")), groups, kind, 0) as mode:
            for _ in range(30):
                traffic.add("gather rank", 8)
                traffic.add("replicas", 8)
            (total,) = [x.exp().sum() for _ in range(1)]
            before = mode.count
            for _ in range(300):
                torch.autograd.grad(total, x, retain_graph=True)
        counts[kind] = before, mode.count - before
    assert traffic.snapshot() == {"gather rank": (120, 960), "replicas": (120, 960)}
    assert counts["gathers"][0] > 5
    assert counts["reductions"][0] > 5
    assert counts["gathers"][1] == counts["reductions"][1] == 0
    assert counts["compute"][1] > 5  # only backward, in this thread or in that of a device
    traffic.add("gather rank", 8)
    assert mode.count == sum(counts["all of them"])


FINE = rank.Check("a sum", 0, 0)
BAD = Ended(None, "exited with code 1", 2.0, False, "KeyError: 'x'", "", "")
HUNG = Ended(None, "was stopped", 9.0, True, "", 'File "/home/ann/x.py", line 3', "said\n")


@pytest.mark.parametrize(
    ("ended", "checks", "verdict", "says"),
    [
        ([WELL, WELL], [FINE], "ok", ""),
        ([WELL, WELL], [FINE, FINE._replace(value=1)], "WRONG", "WRONG"),
        ([BAD, WELL], [FINE], "FAILED", "rank 0: KeyError: 'x'"),
        ([WELL, HUNG], [FINE], "HANGS", 'rank 1: was stopped\n  File "x.py", line 3\n  said'),
        ([BAD, HUNG], [], "FAILED", "nothing was found"),
        ([BAD, BAD], [], "FAILED", "ranks 0, 1: KeyError"),
    ],
)
def test_whatever_becomes_of_a_part_is_a_line_and_the_next_one_runs(
    ended: list[Ended],
    checks: list[rank.Check],
    verdict: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    doctor,
):
    def run(fn: Any, n: int, *args: Any, **options: Any) -> list[Ended]:
        if fn is report.environment:
            return [WELL._replace(result={"accelerator": "none", "devices": []})]
        if fn is parts.ways:
            lines = "".join(json.dumps(check) + "\n" for check in checks)
            Path(args[0].folder, "checks0").write_text(lines)
            return ended
        return [WELL] * n

    monkeypatch.setattr(command, "run_bounded", run)
    code, found, text = doctor(
        "--gpu", "--device", "cpu", "--parts", "ways,levels,pools", "--ranks", "2"
    )
    verdicts = {part["name"]: part["verdict"] for part in found["parts"]}
    assert verdicts == {
        "environment": "ok",
        "loopback": "ok",
        "ways": verdict,
        "levels": "left out",
        "pools": "ok",
    }
    assert code == (verdict != "ok")
    assert "levels: left out, because it needs more ranks than --ranks allows" in text
    assert says in text
    assert "look at: ways\n" in text or verdict == "ok"


def test_parts_without_time_are_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "run_bounded", lambda *args, **options: pytest.fail("it ran"))
    found = command.run_part("ways", parts.PARTS["ways"], rank.DoctorConfig("cpu", SMALL), 4.9)
    assert (found.verdict, found.errors) == ("left out", ["no time is left"])


def test_a_part_never_gets_more_time_than_is_left(monkeypatch: pytest.MonkeyPatch):
    limits = []
    monkeypatch.setattr(
        command, "run_bounded", lambda *args, limit_s, **options: limits.append(limit_s) or [WELL]
    )
    for left in (7.0, 1e6):
        command.run_part("ways", parts.PARTS["ways"], rank.DoctorConfig("cpu", SMALL), left)
    assert limits == [7.0, parts.PARTS["ways"].limit_s]


OWN_ERROR = BAD._replace(error=f'KeyError: "{parts.MINE}"')


@pytest.mark.parametrize(
    ("ended", "wrong"),
    [
        ([BAD, OWN_ERROR], []),
        ([BAD, BAD], ["ranks that lost their own error"]),
        ([WELL, OWN_ERROR], ["ranks that saw no error"]),
        (
            [BAD._replace(stopped=True, seconds=50.0), OWN_ERROR],
            ["ranks that had to be stopped", "from the first end to the last"],
        ),
    ],
)
def test_how_ranks_must_end_after_an_error(ended: list[Ended], wrong: list[str]):
    assert [check.what for check in parts.ended_right(ended) if not check.ok] == wrong


@pytest.mark.parametrize("asked", [[], ["--device", "xpu"]])
def test_without_an_accelerator_it_is_one_line(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    facts = {"accelerator": "cuda" if asked else "none", "devices": []}
    monkeypatch.setattr(command, "run_bounded", lambda *a, **k: [WELL._replace(result=facts)])
    assert main(["doctor", "--gpu", *asked]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 2  # an empty line before it
    name = "xpu" if asked else "accelerator"
    assert f"doctor: torch finds no {name} here; --device cpu runs all parts" in said.err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--parts", "ways"], "--parts ways without --gpu"),
        (["--gpu", "--dim", "30"], "--dim 30 is not a multiple of 4 heads"),
        (["--out", "nowhere/report.json"], "there is no folder nowhere"),
    ],
)
def test_bad_flags_start_no_process(
    flags: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "run_bounded", lambda *args, **options: pytest.fail("it ran"))
    assert main(["doctor", *flags]) == 2
    assert text in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["doctor", "--gpu", "--parts", "ways,none"])
    assert "none: choose from alone ways" in capsys.readouterr().err


def test_ranks_on_one_gpu_say_that_they_are_other_hosts():
    args = argparse.Namespace(parts=("ways", "levels", "speed"), ranks=4)
    for devices, shared, ranks in (
        (1, [True, True], 1),
        (2, [False, True], 2),
        (8, [False] * 2, 4),
    ):
        planned = command._planned(args, devices)
        own = [[planned[name].variables(i) for i in range(2)] for name in ("ways", "levels")]
        assert ["NCCL_HOSTID" in first for first, _ in own] == shared
        assert all(
            (first != second) == one for (first, second), one in zip(own, shared, strict=True)
        )
        assert planned["speed"].ranks == ranks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('File "/home/ann/env/lib/nn.py", line 3', 'File "nn.py", line 3'),
        ("cannot open ~/runs/1/log.txt: no", "cannot open log.txt: no"),
        ("[/__w/gloo/pair.cc:5] peer [10.0.0.7]:4 left", "[pair.cc:5] peer [<address>]:4 left"),
        ("fe80:0:0:0:12ab::1 is down at 12:30:01", "<address> is down at 12:30:01"),
        (
            "Box-7 failed; box-7.lab.org too; sandbox-7 not",
            "<host> failed; <host> too; sandbox-7 not",
        ),
        ("user anna of annabel", "user <user> of annabel"),
        ("1.5 GB/s, 3/4 of it, torch.nn", "1.5 GB/s, 3/4 of it, torch.nn"),
        (r"C:\Users\ann\x.py failed", "x.py failed"),
        ("<Thing at 0x7f3a>", "<Thing at 0x..>"),
    ],
)
def test_a_report_names_no_folder_host_or_user(
    text: str, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(socket, "gethostname", lambda: "box-7.lab.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    assert report.clean(text) == expected


def test_the_worst_rank_counts(tmp_path: Path):
    for number, value in enumerate((1, 3, 2)):
        checks = [rank.Check("a", value, 2), rank.Check("b", None, 0)]
        text = "".join(json.dumps(check) + "\n" for check in checks)
        (tmp_path / f"checks{number}").write_text(text)
    worst, unknown = report.checks_of(tmp_path, 4)
    assert (worst.value, worst.ok) == (3, False)
    assert unknown.ok
    assert "not available" in report.as_text(report.Finding("x", "ok", 1, checks=[unknown]))


# Ranks that are processes of their own.


def one_of_two(folder: str) -> str:
    if os.environ["RANK"] == "1":
        raise KeyError(os.environ["OF_TEST"])
    Path(folder, "pid").write_text(str(os.getpid()))
    time.sleep(600)
    return "never"


@pytest.mark.thorough
def test_ranks_end_in_time_and_say_how(tmp_path: Path):
    sleeps, raises = run_bounded(
        one_of_two,
        2,
        str(tmp_path),
        limit_s=60.0,
        grace_s=3.0,
        environment=lambda number: {"OF_TEST": f"rank {number}"},
    )
    assert (raises.error, raises.how) == ("KeyError: 'rank 1'", "exited with code 1")
    assert "in one_of_two\n" in raises.trace
    assert not raises.stopped
    assert not raises.well
    assert (sleeps.result, sleeps.stopped, sleeps.how) == (None, True, "was stopped")
    assert sleeps.seconds - raises.seconds == pytest.approx(3.0, abs=2.0)
    if (tmp_path / "pid").exists():  # else it was stopped before it began
        assert "in one_of_two\n" in sleeps.trace
        assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@pytest.mark.thorough
@pytest.mark.limit(400)
def test_the_command_runs_every_part_in_processes_of_its_own(tmp_path: Path):
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "mics_fn", "doctor", "--gpu", "--device", "cpu"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, "--out", str(file)],
        capture_output=True,
        text=True,
        timeout=380,
        cwd=tmp_path,
        env=env | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [part["name"] for part in found["parts"]] == ["environment", "loopback", *parts.PARTS]
    assert {part["verdict"] for part in found["parts"]} == {"ok"}
    ends = next(part for part in found["parts"] if part["name"] == "ends")
    assert f'rank 1: KeyError: "{parts.MINE}"' in ends["errors"]
    assert "nothing is wrong" in done.stdout
