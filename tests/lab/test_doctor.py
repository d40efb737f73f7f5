"""The doctor: every part on gloo, what it sees if something is wrong, and what it keeps private."""

import getpass
import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import run_ranks
from test_bench import said_in_a_job

import mics_fn as mf
from mics_fn.__main__ import main
from mics_fn.errors import GroupsError
from mics_fn.lab import doctor as command
from mics_fn.lab import doctor_gpu
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


QUICK = ["alone", "speed"]
LONG = [name for name in command.PARTS if name not in (*QUICK, "lost")]  # that kills a process
PARTS = [*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in LONG)]


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
    if name == "alone":
        curve = checks["50 losses of float32: error of one, over the first"]
        assert 1e-9 < curve["value"] < curve["limit"] < 1e-4
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
    for code, text in ranks(2).run(of_a_job, 1, "--gpu"):  # --gpus is for a job, too
        assert code == 2
        assert "fix: leave out --gpu, --parts and --out to check the job" in text


def run_part(name: str, left_s: float = 60.0) -> command.Finding:
    return command.run_part(name, command.PARTS[name], SMALL, left_s)


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
    update, curve = "error of the update", "50 losses of float32: error of one, over the first"
    assert wrong == [f"float32: {update}", f"deterministic: {update}", curve]
    assert command.as_text(found).count("WRONG") == 4  # bf16 rounds by more than that


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


# A rank that is killed.


def test_a_shard_that_reads_as_something_else_is_seen():
    with mf.make_groups(1) as groups:
        trainer, (batch, *_) = parts.trainer_of(SMALL, groups)
        trainer.step(batch)
        kept = {name: x.data.clone() for name, x in trainer.state.params.items()}
        assert doctor_gpu._damaged(trainer, kept) == 0
        kept["norm.weight"][0] += 1e-3
        assert doctor_gpu._damaged(trainer, kept) == 1
        lost = mock.Mock(side_effect=mf.errors.LostStateError("it is lost"))
        with mock.patch.object(mf.shards, "map", lost):  # which says so by name
            assert doctor_gpu._damaged(trainer, kept) == 0


@pytest.mark.thorough
def test_a_rank_that_is_killed_is_named_and_started_again():
    found = run_part("lost", left_s=100.0)
    assert (found.verdict, found.errors) == ("ok", [])
    values = {check.what: check.value for check in found.checks}
    seconds = values.pop("from a kill to the error on the others")
    assert seconds is not None
    assert 0 < seconds < doctor_gpu.LOST_S
    assert list(values.values()) == [0, 0, 0]


# What the host waits for, and what communicators take.


@pytest.mark.parametrize("most", [0, 1])
def test_waits_of_the_host_are_counted_in_steady_steps(most: int, monkeypatch: pytest.MonkeyPatch):
    modes, said = [], []
    module = SimpleNamespace(set_sync_debug_mode=modes.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    def train(job: Any, groups: Any, around: Callable[[int], Any]) -> None:
        for step in range(parts.STEADY + 2):
            with around(step):
                if step == parts.STEADY + 1:  # as torch says once
                    warnings.warn("it may not detect all synchronizing operations", stacklevel=1)
                for _ in range(step - 2):  # one, and then two
                    warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    monkeypatch.setattr(parts, "train", train)
    me: Any = SimpleNamespace(device=None, job=None, say=lambda *check: said.append(check))
    parts.Rank.limit_waits(me, "x", me, most)
    assert modes == [("error", "warn")[most], "default"] * 2
    assert said == [("x: waits of the host in a steady step", 2, most)]
    assert not parts.Check(*said[0]).ok


def test_ranks_that_share_a_gpu_must_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_HOSTID", "rank1")

    def found(error: Exception | None) -> int:
        def groups() -> Any:
            assert "NCCL_HOSTID" not in os.environ
            return mock.Mock(**({"close.side_effect": error} if error else {}))

        me: Any = SimpleNamespace(groups=groups)
        answer = doctor_gpu._sharing(me)
        assert os.environ["NCCL_HOSTID"] == "rank1"
        return answer

    right = GroupsError("make_groups: several ranks use one device")
    others = GroupsError("make_groups: rank 0 cannot connect: Duplicate GPU"), None
    assert [found(error) for error in (right, *others)] == [0, 1, 1]


def test_the_bytes_of_a_communicator_are_those_of_all_ranks_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(doctor_gpu, "used_bytes", lambda device: 900 + 4 * 3 * 7)
    state = SimpleNamespace(live=lambda: [None] * 4)
    groups: Any = SimpleNamespace(state=state, device=None)
    check = doctor_gpu.communicator_check(groups, 900, ranks=3)
    assert check == parts.Check("each of 4 communicators", 7, 300 * 2**20, "bytes")


def test_what_nccl_says_of_connections_is_found():
    """Lines of NCCL 2.28; the first three are connections, the others are not."""
    text = """\
vm:1:1 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0
vm:1:1 [0] NCCL INFO Channel 02/0 : 0[0] -> 1[1] via P2P/CUMEM
vm:1:1 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 0
vm:1:1 [0] NCCL INFO Connected to proxy localRank 0 -> connection 0x7f8e
vm:1:1 [0] NCCL INFO ncclCommInitRankConfig comm 0x55 rank 0 nranks 2 - Init COMPLETE"""
    assert len(doctor_gpu.CONNECTION.findall(text)) == 3


def test_codes_have_the_time_that_the_fastest_link_would_take(monkeypatch: pytest.MonkeyPatch):
    times = iter([1e-3, 2e-3])
    monkeypatch.setattr(
        doctor_gpu, "seconds_of", lambda work, device, times_: (work(), next(times))
    )
    me: Any = SimpleNamespace(job=replace(SMALL, timed=True), device=torch.device("cpu"))
    check = doctor_gpu._coding(me)
    assert check.value == pytest.approx(1e3 + 1.5 * 2e3)
    share = 1 - (1 + 2 / 256) / 4  # a byte for a value, and a scale for a block
    assert check.limit == pytest.approx(share * 2**26 / 50e9 * 1e6)


# Links.


def test_the_rates_of_a_link_are_those_of_the_formula(monkeypatch: pytest.MonkeyPatch):
    """Each collective takes as long as its formula says; what is found is what was put in."""
    n, latency_us, gb_per_s = 4, 30.0, 20.0

    def seconds_of(work: Any, device: Any, times: int) -> tuple[None, float]:
        full, part, _ = work.args
        assert full.numel() == n * part.numel()
        ring = 1e-6 * latency_us * (n - 1) + (n - 1) / n * full.nbytes / (1e9 * gb_per_s)
        calls = {name: call for name, (call, _) in doctor_gpu.COLLECTIVES.items()}
        return None, ring * (2 if work.func is calls["all_reduce"] else 1)

    monkeypatch.setattr(doctor_gpu, "seconds_of", seconds_of)
    comm: Any = SimpleNamespace(size=n, process_group=lambda: None)
    for name in doctor_gpu.COLLECTIVES:
        points = doctor_gpu._points(name, comm, torch.device("cpu"), timed=False)
        assert len(points) == len(doctor_gpu.SIZES[False])
        found = doctor_gpu.fit(points, n)
        assert found == pytest.approx((latency_us, gb_per_s), rel=1e-6)


def test_a_latency_that_noise_hides_is_none_and_no_negative_one():
    latency, rate = doctor_gpu.fit([(10**6, 0.8e-4), (10**7, 1.0e-3), (10**8, 1.0e-2)], 2)
    assert latency == 0.0
    assert 4 < rate < 7


def with_small_sizes(file: str, *flags: str) -> tuple[int, str]:
    with mock.patch.object(doctor_gpu, "SIZES", ((2**12, 2**16),) * 2):
        return of_a_job(2, "--profile", file, *flags)


def test_a_job_writes_what_its_links_do(ranks, tmp_path: Path):
    (code, text), *others = ranks(4).run(with_small_sizes, str(tmp_path / "profile"))
    assert (code, others) == (0, [(0, "")] * 3), text
    assert "each of 6 communicators" in text
    for level in ("node", "rank"):
        for name in doctor_gpu.COLLECTIVES:
            assert text.count(f"  {name} over {level} (2 ranks)") == 3
    assert "compute waits for a hop2: share of a step" in text
    found = json.loads((tmp_path / "profile").read_text())
    assert [(level["name"], level["ranks"]) for level in found["levels"]] == [
        ("node", 2),
        ("rank", 2),
    ]
    assert all(level["gb_per_s"] > 0 <= level["latency_us"] for level in found["levels"])
    device = found["device"]
    assert sorted(device) == ["copy_gb_per_s", "flops", "gb_per_s", "memory_bytes", "name"]
    assert sorted(device["flops"]) == ["bf16", "f32"]
    assert min(device["copy_gb_per_s"], device["memory_bytes"], *device["flops"].values()) > 0


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (1, "--gpus: there is one device here"),
        (2, ["links", "ways", "delays", "pools", "ends"]),
        (8, ["links", "ways", "lost", "communicators", "levels", "delays", "pools", "ends"]),
    ],
)
def test_several_gpus_have_one_rank_each(
    devices: int, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
):
    ran = {}

    def run(fn: Any, n: int, job: Any, **options: Any) -> dict[int, Any]:
        if fn is command.environment:
            return {0: {"accelerator": "cuda", "devices": devices}}
        if fn is not parts.loopback:
            ran[fn.__name__] = n
            assert n <= devices
            assert (job.device, job.timed, job.profile) == ("cuda", True, tmp_path / "profile")
            assert "NCCL_HOSTID" not in options["environment"](1)
        return dict.fromkeys(range(n))

    monkeypatch.setattr(command, "run_bounded", run)
    code = main(["doctor", "--gpus", "--profile", str(tmp_path / "profile")])
    if devices == 1:
        assert (code, ran) == (2, {})
        assert expected in capsys.readouterr().err
    else:
        assert (code, list(ran), ran["links"]) == (0, expected, devices)


@pytest.mark.parametrize("flags", ["--gpu --gpus", "--gpus --parts ways", "--profile x"])
def test_flags_of_one_gpu_and_of_several_do_not_fit_together(
    flags: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(command, "run_bounded", lambda *args, **how: pytest.fail("it ran"))
    assert main(["doctor", *flags.split()]) == 2
    assert "fix: pass --gpu, or --gpus with or without --profile FILE" in capsys.readouterr().err


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
