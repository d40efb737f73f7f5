"""Each bench end to end on tiny sizes: figures that agree with each other; nothing about speed."""

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from rank_pool import run_ranks

from mics_fn.__main__ import main
from mics_fn.lab.bench import turns as turns_module
from mics_fn.lab.bench.turns import (
    BenchPeer,
    BenchTurns,
    memory_bytes,
    peak_bytes,
    ratio,
    reset_peak,
    spread,
    take_turns,
)
from mics_fn.lab.models import GPT, GPTConfig

TINY = ["--dim", "16", "--heads", "2", "--blocks", "1", "--vocab", "256", "--context", "8"]
MODEL = GPT(GPTConfig(256, context=8, dim=16, num_heads=2, num_blocks=1))
NUM_PARAMS = sum(p.numel() for p in MODEL.parameters())
CPU = torch.device("cpu")

# A cluster whose links never change, but which writes down who asked for what.
LINKS = """
import os
def set_rate(rate):
    with open(os.environ["ASKED"] + os.environ["RANK"], "a") as file:
        print(rate, file=file)
"""

pytestmark = pytest.mark.limit(300)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves are no rank of a job, whatever runs them."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.short("1")
def test_step(
    n: int, forked_bench: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_links.py").write_text(LINKS)
    monkeypatch.setenv("MICS_FN_LINKS", "toy_links")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.syspath_prepend(tmp_path)
    argv = ["step", "--ranks", f"{n}", "--rounds", "2", "--accumulate", "2"]
    argv += ["--rates", "1gbit:2"] if n == 4 else ["--steps", "2"]
    peers = ["keep", "zero3", "fsdp2", "fsdp2-keep", "fsdp2-full" if n == 4 else "plain"]
    peers += ["ddp", "disk"]
    argv += ["--folder", f"{tmp_path}"]
    figures, printed = forked_bench(*argv, *TINY, "--peers", *peers)
    p, ours = min(n, 2), ["keep", "zero3", "disk"]
    titles = [f"Trainer p={p}, keep", f"Trainer p={p}, two buckets"]
    titles += [f"FSDP2 p={p}, default", f"FSDP2 p={p}, keep"]
    titles += ["FSDP2 full p=4, default" if n == 4 else "plain torch loop", "DDP"]
    titles += [f"Trainer p={p}, keep, on disk"]
    found = {peer["name"]: peer for peer in figures["peers"]}
    assert [*found] == peers
    assert [peer["title"] for peer in found.values()] == titles
    assert (figures["params"], figures["ranks"], figures["ours"]) == (NUM_PARAMS, n, ours)
    for name, peer in found.items():
        seconds = peer["seconds_by_round"]
        assert len(seconds) == 2
        assert peer["seconds"] == spread(seconds)
        assert peer["processor"]["least"] > 0
        over = {x: ratio(found[x]["seconds_by_round"], seconds) for x in ours}
        assert peer["over_it"] == {x: over[x] for x in ours if x != name}
        # The same batches from the same parameters: only the order of sums differs.
        assert len(peer["losses"]) == 2 + 2 * 2
        assert min(peer["losses"]) < peer["losses"][0]
        assert peer["losses"] == pytest.approx(found["keep"]["losses"], rel=1e-5)
        assert peer["largest_loss_gap"] <= 1e-5
        assert f"{name}: {peer['title']}" in printed
    links = ", links 1gbit" if n == 4 else ""
    world = f"\nnodes of {p}, p = {p}, {NUM_PARAMS:,} parameters, accumulate 2{links}: 2 rounds"
    assert f"{world} of 2 steps" in printed
    asked = [path.read_text() for path in tmp_path.glob("asked*")]
    assert asked == ["1gbit\n"] * (4 if n == 4 else 0)


@pytest.mark.thorough
def test_step_in_several_precisions(forked_bench: Callable) -> None:
    f32, bf16 = "f32", "compute=bf16,reduce=bf16"
    argv = ["step", "--rounds", "2", "--steps", "1", "--warmup", "1", "--precision", f32, bf16]
    figures, printed = forked_bench(*argv, *TINY, "--peers", "least", "hpz", "fsdp2")
    peers = {peer["name"]: peer for peer in figures["peers"]}
    assert [*peers] == [f"{x}@{text}" for x in ("least", "hpz", "fsdp2") for text in (f32, bf16)]
    assert figures["ours"] == ["least", "hpz"]
    first = peers["least@f32"]["losses"]
    for label, peer in peers.items():
        name, _, text = label.partition("@")
        seconds = peer["seconds_by_round"]
        over = {x: peers[f"{x}@{text}"]["seconds_by_round"] for x in figures["ours"] if x != name}
        over = {x: ratio(found, seconds) for x, found in over.items()}
        assert peer["over_it"] == over, "peers are compared in one precision"
        same = peers[f"{name}@f32"]["seconds_by_round"]
        assert peer["over_first"] == (ratio(seconds, same) if text == bf16 else None)
        close = 3e-2 if text == bf16 else 1e-5  # some roundings of 2**-9 in a loss of about 5
        assert peer["losses"] == pytest.approx(first, rel=close)
        assert text == f32 or peer["losses"] != first
    assert "over f32" in printed


@pytest.mark.thorough
def test_step_that_overlaps_hop_2(forked_bench: Callable) -> None:
    argv = ["step", "--overlap", "--ranks", "2", "--node-size", "1"]
    figures, printed = forked_bench(*argv, *TINY, "--rounds", "2", "--steps", "2", "--warmup", "1")
    whole, overlapped = figures["peers"]
    assert (whole["name"], overlapped["name"]) == ("keep", "overlap")
    for peer in figures["peers"]:
        assert peer["largest_loss_gap"] == 0.0
        assert 0 < peer["exposed"]["least"] <= peer["optimizer"]["most"]
        assert 0 <= peer["hidden"]["least"] <= peer["hidden"]["most"] < 1
    assert whole["hidden"]["most"] == 0, "all waits come before its optimizer"
    assert "hidden: the share of the optimizer" in printed


@pytest.mark.thorough
def test_step_of_a_model_in_parts(forked_bench: Callable) -> None:
    argv = ["step", "--mesh", "--rounds", "2", "--steps", "2", "--warmup", "1"]
    figures, printed = forked_bench(*argv, *TINY, "--heads", "4", "--accumulate", "2")
    found = {peer["name"]: peer for peer in figures["peers"]}
    assert [*found] == ["keep", "zero3", "fsdp2", "fsdp2-keep"]
    for peer in found.values():  # from the same parameters, with the same limit on the norm
        assert peer["losses"] == pytest.approx(found["keep"]["losses"], rel=1e-5)
        assert min(peer["losses"]) < peer["losses"][0]
    assert f"{NUM_PARAMS:,} parameters, accumulate 2, cut over 2: 2 rounds" in printed


def test_what_takes_no_model_in_parts_is_refused(capsys: pytest.CaptureFixture) -> None:
    for ranks, peer, what in (("4", "ddp", "ddp"), ("5", "keep", "a world of 5")):
        assert main(["bench", "step", "--mesh", "--ranks", ranks, "--peers", "keep", peer]) == 2
        assert f"--mesh: {what} takes no model in parts" in capsys.readouterr().err


@pytest.mark.thorough
def test_memory_of_a_peer_alone(forked_bench: Callable) -> None:
    argv = ["step", "--rss", "--ranks", "2", "--rounds", "1", "--steps", "1", "--peers", "zero3"]
    figures, printed = forked_bench(*argv, *TINY)
    (peer,) = figures["peers"]
    assert peer["title"] == "Trainer p=2, two buckets"
    assert peer["before"] > 50e6  # torch is loaded
    for grown in (peer["resident"], peer["used"], peer["made"]):
        assert grown is None or 0 <= grown < 100e6
    assert "resident" in printed


def test_opt(forked_bench: Callable) -> None:
    argv = ["opt", "--rounds", "2", "--steps", "2", "--small-leaves", "9"]
    figures, printed = forked_bench(*argv, *TINY)
    few, many = figures["trees"]
    assert (few["elements"], many["leaves"]) == (NUM_PARAMS, 9)
    assert many["elements"] == 2 * (64 + 16 * 64 + 256 + 8 * 32) + 64
    for part in (few, many):
        assert part["largest_param_gap"] <= 1e-6
        ours, theirs = part["peers"]
        for peer in part["peers"]:
            ns = [seconds / part["elements"] * 1e9 for seconds in peer["seconds_by_round"]]
            assert peer["ns_per_element"] == spread(ns)
        by_round = ratio(ours["seconds_by_round"], theirs["seconds_by_round"])
        assert theirs["opt_step_ratio"] == by_round
    assert [step["leaves"] for step in figures["steps"]] == [4, 22]
    assert figures["making"]["seconds"] > 0
    assert all(min(step["us_a_leaf"].values()) > 0 for step in figures["steps"])
    assert "opt_step(donate=True)" in printed


def test_muon(forked_bench: Callable) -> None:
    figures, printed = forked_bench("opt", "--muon", "--rounds", "2", "--steps", "1", *TINY)
    full, two, gathered, four = figures["peers"].values()
    for peer in (full, two, four, gathered):
        assert peer["over"]["least"] > 0
    assert full["over"] == spread([1.0, 1.0])
    assert set(figures["padding"]) == {"2", "4"}
    for p in (2, 4):
        assert f"optim.muon, p={p}" in printed


@pytest.mark.thorough
@pytest.mark.thorough
@pytest.mark.parametrize("live", [(), ("--live-bytes", "0")])
def test_touch(forked_bench: Callable, live: tuple[str, ...]) -> None:
    argv = ["--ranks", "2", "--layers", "3", "--rounds", "1", "--steps", "2", *live]
    figures, printed = forked_bench("touch", *argv)
    parts = {name: part["median"] for name, part in figures["parts"].items()}
    steps = {name: step["median"] for name, step in figures["steps"].items()}
    assert parts["uses"] == pytest.approx(steps["uses"] - steps["plain"])
    assert parts["hops"] == pytest.approx(steps["hops"] - steps["uses"])
    own = steps["Trainer.step"] - steps["plain step"]
    assert sum(parts[name] for name in ("uses", "hops", "step")) == pytest.approx(own)
    assert own == pytest.approx(parts["all, over plain"])
    assert "uses" in printed
    assert "FSDP2, over plain" in printed


def test_predictions(forked_bench: Callable) -> None:
    figures, printed = forked_bench("plan", *TINY, "--steps", "1", "--warmup", "3")
    assert len(figures["rows"]) == 8
    for row in figures["rows"]:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert 0 < row["predicted_s"] < 1
    assert "8 settings: median error" in printed
    assert "node 2 x rank 2 of cpu" in printed


@pytest.mark.thorough
def test_bytes_equal_the_formulas_at_every_partition_size(forked_bench: Callable) -> None:
    figures, printed = forked_bench("bytes", "--steps", "2", "--accumulate", "3", *TINY)
    levels = {}
    for part in figures["partition_sizes"]:
        full, p = part["full_bytes"], part["partition_size"]
        assert part["steady"]
        assert 4 * NUM_PARAMS <= full <= 4 * NUM_PARAMS + 2000
        for row in part["rows"].values():
            assert row["ledger"] == [row["formula"]] * 4
            assert row["why"] != "not part of a step"
        levels[p] = part["levels"]
        totals = part["rows"].pop("step totals")["formula"]
        assert totals == {1: 48, 2: 32 + 32, 4: 48}[p]
        total = sum(row["formula"] for row in part["rows"].values())
        r, micro_steps = 4 // p, 3
        hops = (1 + micro_steps) * (p - 1) / p + 2 * (r - 1) / r / p
        assert total == pytest.approx(hops * full)
    assert levels == {1: [], 2: [["rank", 2]], 4: [["node", 2], ["rank", 2]]}
    assert "NOT THE SAME" not in printed


@pytest.mark.thorough
def test_saves(forked_bench: Callable, tmp_path: Path) -> None:
    argv = ["checkpoint", "--mib", "3", "--rounds", "1", "--folder", str(tmp_path)]
    figures, printed = forked_bench(*argv)
    assert len(figures["ratios"]) == 6
    assert all(found["median"] > 0 for found in figures["ratios"].values())
    assert all(name in printed for name in figures["ratios"])


def said_in_a_job(*argv: str) -> tuple[int, str]:
    """What a rank of a job prints."""
    said = io.StringIO()
    job = mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    with job, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        return main([*argv]), said.getvalue()


def test_as_ranks_of_a_job_only_the_first_prints(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    argv = ["bench", "bytes", *TINY, "--steps", "1", "--partition-size", "2", "--json", str(file)]
    (code, said), other = run_ranks(said_in_a_job, 2, *argv)
    assert (code, other) == (0, (0, ""))
    assert "p = 2, levels rank 2" in said
    figures = json.loads(file.read_text())
    assert (figures["ranks"], figures["config"]["node_size"]) == (2, 2)


def test_peers_take_turns_and_each_begins() -> None:
    order, fences = [], []
    peers = [BenchPeer(name, lambda step, n=name: order.append((n, step))) for name in "ab"]
    turns = BenchTurns(rounds=2, steps=2, warmup=1)
    laps = take_turns(peers, turns, device=CPU, fence=lambda: fences.append(len(order)))
    assert "".join(name for name, _ in order) == "ab" + "aabb" + "bbaa"
    assert [step for name, step in order if name == "b"] == list(range(turns.all_steps))
    assert [(lap.name, len(lap.seconds)) for lap in laps] == [("a", 2), ("b", 2)]
    assert fences == [0, 1, 1, 2, 2, 4, 4, 6, 6, 8, 8, 10]  # around each turn


def test_memory_and_its_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = reset_peak(CPU)
    torch.ones(8_000_000)
    assert before is None or (peak_bytes(CPU) or 0) >= before + 30e6
    monkeypatch.setattr(turns_module, "STATUS", tmp_path / "status")
    assert memory_bytes(CPU) is None
    (tmp_path / "status").write_text("VmHWM:\t    50 kB\nVmRSS:\t    40 kB\n")
    assert (memory_bytes(CPU), peak_bytes(CPU)) == (40 * 1024, 50 * 1024)
