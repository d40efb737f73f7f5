"""Each bench end to end on tiny sizes: figures that agree with each other; nothing about speed."""

import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mics_fn.__main__ import main
from mics_fn.comm import Comm, Life, Traffic
from mics_fn.lab import bench_bytes
from mics_fn.lab.bench_bytes import Counters, RankBytes, leaves_node, read_counters
from mics_fn.lab.bench_measure import PEAK_STEPS, Peer, Turns, nbytes, ratio, spread, take_turns
from mics_fn.lab.gpt import GPT, GPTConfig

TINY = ["--dim", "16", "--heads", "2", "--blocks", "1", "--vocab", "256", "--context", "8"]
ROOT = Path(bench_bytes.__file__).parents[2]
MODEL = GPT(GPTConfig(256, context=8, dim=16, num_heads=2, num_blocks=1))
NUM_PARAMS = sum(p.numel() for p in MODEL.parameters())

# Launched ranks import torch first, all of them on the cores of one machine.
pytestmark = pytest.mark.limit(300)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves are no rank of a job, whatever runs them."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def run_bench(tmp_path: Path, *argv: str) -> tuple[dict[str, Any], str]:
    """The figures of a bench, and what it printed.

    In a process of its own: torch's launcher leaves files open in the one that calls it.
    """
    file = tmp_path / "figures.json"
    line = [sys.executable, "-m", "mics_fn", "bench", *argv, *TINY, "--json", str(file)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def test_step(tmp_path: Path) -> None:
    argv = ["step", "--rounds", "2", "--steps", "2", "--accumulate", "2"]
    figures, printed = run_bench(tmp_path, *argv)
    assert figures["params"] == NUM_PARAMS
    alone, together = figures["alone"], figures["together"]
    assert (alone["ranks"], together["ranks"]) == (1, 4)
    names = [[peer["name"] for peer in part["peers"]] for part in (alone, together)]
    assert names[0] == ["Trainer, p = 1", "plain torch loop"]
    assert names[1] == ["Trainer, p = 2", "FSDP2, default", "FSDP2, gathers once"]
    for part in (alone, together):
        ours = part["peers"][0]
        for peer in part["peers"]:
            check_peer(peer, ours, rounds=2, steps_taken=2 + 2 * 2 + PEAK_STEPS)
    # Parameters and two moments of four bytes each; what p ranks share is a p-th, and padding.
    full, half = alone["peers"][0]["held_bytes"], together["peers"][0]["held_bytes"]
    assert 12 * NUM_PARAMS <= full <= 12 * NUM_PARAMS + 2000
    assert 6 * NUM_PARAMS <= half <= 6 * NUM_PARAMS + 2000
    assert all(name in printed for name in names[0] + names[1])


def check_peer(peer: dict, ours: dict, *, rounds: int, steps_taken: int) -> None:
    seconds = peer["seconds_by_round"]
    assert len(seconds) == rounds
    assert min(seconds) > 0
    assert peer["seconds"]["median"] == statistics.median(seconds)
    assert (peer["seconds"]["least"], peer["seconds"]["most"]) == (min(seconds), max(seconds))
    by_round = [a / b for a, b in zip(ours["seconds_by_round"], seconds, strict=True)]
    assert peer["trainer_ratio"] == spread(by_round)._asdict()
    assert len(peer["losses"]) == steps_taken
    assert peer["losses"][-1] < peer["losses"][0]
    # The same batches from the same parameters: only the order of sums differs.
    assert peer["losses"] == pytest.approx(ours["losses"], rel=1e-5)
    assert peer["largest_loss_gap"] <= 1e-5
    assert peer["peak_bytes"] is None or peer["peak_bytes"] >= 0


def test_opt(tmp_path: Path) -> None:
    argv = ["opt", "--rounds", "2", "--steps", "2", "--small-leaves", "9"]
    figures, printed = run_bench(tmp_path, *argv)
    few, many = figures["trees"]
    assert (few["elements"], many["leaves"]) == (NUM_PARAMS, 9)
    assert many["elements"] == 2 * (64 + 16 * 64 + 256 + 8 * 32) + 64
    for part in (few, many):
        assert part["largest_param_gap"] <= 1e-6
        ours, theirs = part["peers"]
        for peer in part["peers"]:
            ns = [seconds / part["elements"] * 1e9 for seconds in peer["seconds_by_round"]]
            assert peer["ns_per_element"] == spread(ns)._asdict()
            assert 12 * part["elements"] <= peer["held_bytes"] <= 12 * part["elements"] + 2000
        by_round = ratio(ours["seconds_by_round"], theirs["seconds_by_round"])
        assert theirs["opt_step_ratio"] == by_round._asdict()
        assert ours["opt_step_ratio"]["median"] == 1
    assert "opt_step(donate=True)" in printed


def test_bytes_equal_the_formulas_at_every_partition_size(tmp_path: Path) -> None:
    figures, printed = run_bench(tmp_path, "bytes", "--steps", "2", "--accumulate", "3")
    assert figures["interface"] is None  # the nodes are pretended ones
    levels, crossing = {}, {}
    for part in figures["partition_sizes"]:
        full, p = part["full_bytes"], part["partition_size"]
        assert part["steady"]
        assert 4 * NUM_PARAMS <= full <= 4 * NUM_PARAMS + 2000
        for row in part["rows"].values():
            assert row["ledger"] == [row["formula"]] * 4
            assert row["why"] != "not part of a step"
        levels[p] = part["levels"]
        crossing[p] = {wire["formula"] / full for wire in part["wire"]}
        assert all(wire["counted"] is None for wire in part["wire"])
        total = sum(row["formula"] for row in part["rows"].values())
        r, micro_steps = 4 // p, 3
        hops = (1 + micro_steps) * (p - 1) / p + 2 * (r - 1) / r / p
        assert total == pytest.approx(hops * full)
    assert levels == {1: [], 2: [["rank", 2]], 4: [["node", 2], ["rank", 2]]}
    # By hand, of M, per node: a ring of 4 over 2 nodes is cut once a node; hop 2 of both ranks;
    # and the outer level of both ranks, once for the gather and three times for hop 1.
    assert crossing == {1: {1.5}, 2: {1.0}, 4: {2 * (1 + 3) / 4}}
    assert "what leaves a node is not counted" in printed
    assert "NOT THE SAME" not in printed


def test_as_ranks_of_a_job_only_the_first_prints(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "mics_fn", "bench", "bytes", *TINY, "--steps", "1"]
    argv += ["--partition-size", "2", "--json", str(tmp_path / "figures.json")]
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    procs = []
    try:
        for rank in ("0", "1"):
            env = os.environ | job | {"RANK": rank, "LOCAL_RANK": rank}
            options: dict[str, Any] = {"env": env, "cwd": ROOT, "text": True}
            procs.append(subprocess.Popen(argv, stdout=subprocess.PIPE, **options))
        printed = [proc.communicate(timeout=200)[0] for proc in procs]
    finally:
        for proc in procs:
            proc.kill()
            proc.wait()
    assert [proc.returncode for proc in procs] == [0, 0]
    assert "p = 2, levels rank 2" in printed[0]
    assert printed[1] == ""
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["ranks"], figures["config"]["node_size"]) == (2, 2)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["step", "--partition-size", "3"], "3"),
        (["step", "--dim", "10", "--heads", "4"], "--dim 10 is no multiple of --heads 4"),
        (["bytes", "--ranks", "6", "--node-size", "4"], "4"),
        (["opt", "--json", "no/such/folder/f.json"], "there is no folder no/such/folder"),
    ],
)
def test_bad_sizes_are_refused_before_a_rank_starts(
    argv: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("mics_fn.lab.bench_measure.launch", None)
    assert main(["bench", *argv]) == 2
    assert said in capsys.readouterr().err


def test_other_ranks_than_the_job_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    for name, value in (job | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "step", "--ranks", "2"]) == 2
    assert "--ranks 2 in a job of 4" in capsys.readouterr().err


def test_peers_take_turns_and_each_begins() -> None:
    order = []
    peers = [Peer(name, lambda step, n=name: order.append((n, step)), lambda: 7) for name in "ab"]
    turns = Turns(rounds=2, steps=1, warmup=1)
    laps = take_turns(peers, turns, device=torch.device("cpu"))
    assert [name for name, _ in order] == list("ab" + "ab" + "ba" + "aa" + "bb")
    assert [step for name, step in order if name == "b"] == list(range(turns.all_steps))
    assert [(lap.name, lap.held_bytes) for lap in laps] == [("a", 7), ("b", 7)]
    assert [len(lap.seconds) for lap in laps] == [2, 2]
    assert nbytes({"x": torch.zeros(3), "y": [1, torch.zeros(2, dtype=torch.int8)]}) == 14


def test_what_leaves_a_node() -> None:
    def leaving(*ranks: int) -> list[bool]:
        comms = [Comm("c", ranks, i, None, 1.0, Traffic(), Life()) for i in range(len(ranks))]
        return [leaves_node(comm, node_size=2) for comm in comms]

    assert leaving(0, 1) == [False, False]
    assert leaving(1, 3) == [True, True]
    assert leaving(0, 1, 2, 3) == [False, True, False, True]


def test_counters_of_an_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Inter-| Receive | Transmit\n face |bytes\n  eth0: 1 2 0 0 0 0 0 0 300 4 0 0 0 0 0 0\n"
    (tmp_path / "dev").write_text(text)
    monkeypatch.setattr(bench_bytes, "NET_DEV", tmp_path / "dev")
    snmp = "Ip: Forwarding\nIp: 1\nTcp: OutSegs RetransSegs InErrs\nTcp: 70 5 0\nUdp: A\nUdp: 1\n"
    (tmp_path / "snmp").write_text(snmp)
    monkeypatch.setattr(bench_bytes, "SNMP", tmp_path / "snmp")
    assert read_counters("eth0") == Counters(300, 4, 5)
    assert read_counters("eth1") is None
    monkeypatch.setattr(bench_bytes, "SNMP", tmp_path / "nothing")
    assert read_counters("eth0") == Counters(300, 4, 0)
    monkeypatch.setattr(bench_bytes, "NET_DEV", tmp_path / "nothing")
    assert read_counters("eth0") is None


def test_the_wire_is_a_mean_over_steps_without_headers() -> None:
    rank = RankBytes([], {}, 500.0, Counters(2 * 1000 + 3 * 66, 3, 4), [])
    wire = bench_bytes._wire([rank, rank], steps=2)
    assert wire == {"formula": 1000.0, "counted": 1099.0, "payload": 1000.0, "resent": 2.0}
