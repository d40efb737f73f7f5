"""The doctor: every part on gloo, what it sees if something is wrong, and what it keeps private."""

import getpass
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import run_ranks
from test_bench import said_in_a_job

import mics_fn as mf
from mics_fn.__main__ import main
from mics_fn.lab import doctor as command
from mics_fn.lab import doctor_parts as parts
from mics_fn.lab.models import GPTConfig
from mics_fn.lab.ranks import RankFailure, run_bounded

ROOT = Path(__file__).parents[2]
SMALL = parts.DoctorConfig(model=GPTConfig(context=16, dim=32, num_blocks=2))


def forked(fn: Callable[..., Any], n: int, *args: Any, **how: Any) -> dict[int, Any]:
    """As `run_bounded`, with ranks that are forked from here and need not import torch."""
    environment = how.get("environment", lambda rank: {})
    found = run_ranks(with_variables, n, environment, fn, *args, timeout_s=how["limit_s"])
    return dict(enumerate(found))


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


LONG = [name for name in parts.PARTS if name != "alone"]
PARTS = ["alone", *(pytest.param(name, marks=pytest.mark.thorough) for name in LONG)]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_finds_nothing_wrong_on_gloo(name: str, doctor):
    code, found, text = doctor("--gpu", "--device", "cpu", "--parts", name)
    assert (code, found["well"], found["device"]) == (0, True, "cpu"), text
    assert [part["name"] for part in found["parts"]] == ["environment", "loopback", name]
    assert {part["verdict"] for part in found["parts"]} == {"ok"}
    checks = {check["what"]: check for check in found["parts"][-1]["checks"]}
    assert all(check["ok"] for check in checks.values())
    errors = [c["value"] for what, c in checks.items() if what.endswith("error of the update")]
    assert len(errors) == {"alone": 3, "ways": 5, "levels": 4}.get(name, 0)
    assert all(error > 1e-8 for error in errors)  # it is not compared with itself
    if name == "delays":
        late = [check["value"] for what, check in checks.items() if what.endswith("delays")]
        assert len(late) == len(parts.LATE)
        assert min(late) > 5
    for secret in (getpass.getuser(), socket.gethostname(), str(ROOT), str(Path.home())):
        assert secret in command._COMMON or secret not in text + json.dumps(found)


def of_a_job(node_size: int, *flags: str) -> tuple[int, str]:
    """What a rank of a job prints; nodes of so many ranks are pretended."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(node_size)}):
        return said_in_a_job("doctor", "--device", "cpu", *flags)


def test_as_a_rank_of_a_job_it_checks_the_job(ranks):
    (code, text), *others = ranks(4).run(of_a_job, 2)
    assert code == 0
    assert text.startswith(f"4 ranks (2 x 2) on cpu, torch {torch.__version__}\n")
    assert "GLOO_SOCKET_IFNAME: lo" in text
    assert "elements that are wrong in a gather             0  of 0" in text
    assert text.endswith("\nall ranks reach each other\n")
    assert others == [(0, "")] * 3


def lose_a_value(n: int) -> tuple[int, str]:
    lost = lambda shards, groups: {k: x + 1 for k, x in unshard(shards, groups).items()}  # noqa: E731
    unshard = mf.unshard
    with mock.patch.object(mf, "unshard", lost):
        return of_a_job(n)


@pytest.mark.thorough
def test_a_job_with_wrong_values_or_flags_that_start_ranks_says_so(ranks):
    (code, text), (other, _) = ranks(2).run(lose_a_value, 1)
    assert (code, other) == (1, 1)
    assert text.count("WRONG") == 3
    assert text.endswith("\nsome values are wrong\n")
    for code, text in ranks(2).run(of_a_job, 1, "--gpu"):
        assert code == 2
        assert "fix: leave out --gpu, --parts and --out to check the job" in text


def run_part(name: str, left_s: float = 60.0) -> command.Finding:
    return command.run_part(name, parts.PARTS[name], SMALL, left_s)


def test_wrong_numbers_are_seen(monkeypatch: pytest.MonkeyPatch):
    """The reference learns a thousandth faster than what is compared with it."""
    monkeypatch.setattr(command, "run_bounded", forked)
    reference = parts.reference
    monkeypatch.setattr(
        parts, "reference", lambda job, *a, **k: reference(replace(job, lr=1.001 * job.lr), *a, **k)
    )
    found = run_part("alone")
    assert found.verdict == "WRONG"
    wrong = [check.what for check in found.checks if not check.ok]
    assert wrong == ["float32: error of the update", "deterministic: error of the update"]
    assert command.as_text(found).count("WRONG") == 3  # bf16 rounds by more than that


FINE = parts.Check("a sum", 0, 0)
BAD = RankFailure("KeyError", "'x'", "")
HUNG = RankFailure("RankTimeout", "process was stopped", 'File "/home/ann/x.py", line 3\nsaid\n')


@pytest.mark.parametrize(
    ("replies", "checks", "verdict", "says"),
    [
        ([None, None], [FINE], "ok", ""),
        ([None, None], [FINE, FINE._replace(value=1)], "WRONG", "WRONG"),
        (
            [None, HUNG],
            [FINE],
            "HANGS",
            'rank 1: RankTimeout: process was stopped\n  File "x.py", line 3\n  said',
        ),
        ([BAD, BAD], [], "FAILED", "ranks 0, 1: KeyError"),
    ],
)
def test_whatever_becomes_of_a_part_is_a_line_and_the_next_one_runs(
    replies: list[RankFailure | None],
    checks: list[parts.Check],
    verdict: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    doctor,
):
    def run(fn: Any, n: int, *args: Any, **options: Any) -> dict[int, Any]:
        if fn is command.environment:
            return {0: {"accelerator": "none", "devices": 0}}
        if fn is parts.ways:
            lines = "".join(json.dumps(check) + "\n" for check in checks)
            Path(args[0].folder, "checks0").write_text(lines)
            return dict(enumerate(replies))
        return dict.fromkeys(range(n))

    monkeypatch.setattr(command, "run_bounded", run)
    code, found, text = doctor("--gpu", "--device", "cpu", "--parts", "ways", "pools")
    verdicts = [part["verdict"] for part in found["parts"]]
    assert verdicts == ["ok", "ok", verdict, "ok"]
    assert code == (verdict != "ok")
    left_out = run_part("levels", left_s=1.0)
    assert command.as_text(left_out) == "levels: left out, because no time is left"
    assert says in text
    assert "look at: ways\n" in text or verdict == "ok"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('File "/home/ann/env/lib/nn.py", line 3', 'File "nn.py", line 3'),
        ("[/__w/gloo/pair.cc:5] peer [10.0.0.7]:4 left", "[pair.cc:5] peer [<address>]:4 left"),
        ("fe80:0:0:0:12ab::1 is down at 12:30:01", "<address> is down at 12:30:01"),
        ("Box-7, box-7.lab.org, sandbox-7", "<host>, <host>, sandbox-7"),
        ("user anna of annabel, 3/4 of it", "user <user> of annabel, 3/4 of it"),
        (r"C:\Users\ann\x.py failed", "x.py failed"),
        ("<Thing at 0x7f3a>", "<Thing at 0x..>"),
    ],
)
def test_a_report_names_no_folder_host_or_user(
    text: str, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(socket, "gethostname", lambda: "box-7.lab.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    assert command.clean(text) == expected


# Ranks that are processes of their own.


def one_of_two(folder: str) -> str:
    if os.environ["RANK"] == "1":
        raise KeyError(os.environ["OF_TEST"])
    Path(folder, "pid").write_text(str(os.getpid()))
    time.sleep(600)
    return "never"


@pytest.mark.thorough
def test_ranks_end_in_time_and_say_how(tmp_path: Path):
    how: dict[str, Any] = {"environment": lambda number: {"OF_TEST": f"rank {number}"}}
    folder = str(tmp_path)
    began = time.monotonic()
    found = run_bounded(one_of_two, 2, folder, limit_s=60.0, grace_s=3.0, **how)
    assert time.monotonic() - began < 50
    assert [*found] == [1, 0]
    assert found[1][:2] == ("KeyError", "'rank 1'")
    assert "in one_of_two\n" in found[1].traceback
    assert found[0][:2] == ("RankTimeout", "no answer within 3 s after another failed")
    if (tmp_path / "pid").exists():  # else it was stopped before it began
        assert "in one_of_two\n" in found[0].traceback
        assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
