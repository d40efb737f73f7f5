"""Each bench end to end on tiny sizes: figures that agree with each other; nothing about speed."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from init_peak import peak_growth

from mics_fn.__main__ import main
from mics_fn.errors import PlanError
from mics_fn.groups.communicator import Comm, GroupState, Traffic
from mics_fn.inspection import Event, Timeline
from mics_fn.lab.bench import bytes as bench_bytes
from mics_fn.lab.bench import links
from mics_fn.lab.bench import turns as turns_module
from mics_fn.lab.bench.bytes import RankBytes, leaving_share
from mics_fn.lab.bench.links import Counters, Rate, read_counters, read_rates, sent_bytes
from mics_fn.lab.bench.stage import PEERS, StepConfig, build, make_stage
from mics_fn.lab.bench.step import updates_of
from mics_fn.lab.bench.turns import (
    BenchPeer,
    BenchSetting,
    BenchTurns,
    memory_bytes,
    nbytes,
    peak_bytes,
    ratio,
    reset_peak,
    spread,
    take_turns,
)
from mics_fn.lab.models.gpt import GPT, GPTConfig

TINY = ["--dim", "16", "--heads", "2", "--blocks", "1", "--vocab", "256", "--context", "8"]
ROOT = Path(bench_bytes.__file__).parents[3]
MODEL = GPT(GPTConfig(256, context=8, dim=16, num_heads=2, num_blocks=1))
NUM_PARAMS = sum(p.numel() for p in MODEL.parameters())
CPU = torch.device("cpu")
NODE = 2  # ranks
TOGETHER = [name for name, kind in PEERS.items() if kind.together]

# A cluster whose links never change, but which writes down who asked for what.
LINKS = """
import os
def set_rate(rate):
    with open(os.environ["ASKED"] + os.environ["RANK"], "a") as file:
        print(rate, file=file)
"""

# Launched ranks import torch first, all of them on the cores of one machine.
pytestmark = pytest.mark.limit(300)


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves are no rank of a job, whatever runs them."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def launched_bench(tmp_path: Path, *argv: str) -> tuple[dict[str, Any], str]:
    """The figures of a bench as a user runs it, and what it printed.

    In a process of its own: torch's launcher leaves files open in the one that calls it.
    """
    file = tmp_path / "figures.json"
    line = [sys.executable, "-m", "mics_fn", "bench", *argv, *TINY, "--json", str(file)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.mark.parametrize("n", [1, 4])
def test_step(n: int, forked_bench: Callable) -> None:
    argv = ["step", "--ranks", f"{n}", "--rounds", "2", "--steps", "2", "--accumulate", "2"]
    figures, printed = forked_bench(*argv, *TINY)
    assert (figures["params"], figures["ranks"]) == (NUM_PARAMS, n)
    titles, p = {peer["name"]: peer["title"] for peer in figures["peers"]}, min(n, 2)
    alone = {"plain": "plain torch loop"} if n == 1 else {}
    assert titles == {
        "keep": f"Trainer p={p}, keep",
        "zero3": f"Trainer p={p}, two buckets",
        "fsdp2": f"FSDP2 p={p}, default",
        "fsdp2-keep": f"FSDP2 p={p}, keep",
        **alone,
    }
    (at,) = figures["rates"]
    assert (at["rate"], at["steps"], figures["ours"]) == ("as-is", 2, ["keep", "zero3"])
    check_rate(at, figures["ours"], rounds=2)
    check_peers_agree(figures, steps_taken=2 + 2 * 2)
    assert all(f"{name}: {title}" in printed for name, title in titles.items())
    assert f"\nnodes of {p}, p = {p}, {NUM_PARAMS:,} parameters, accumulate 2: 2 rounds" in printed
    assert "a node sends" in printed


@pytest.mark.thorough
def test_step_with_every_peer_at_several_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_bench: Callable
) -> None:
    (tmp_path / "toy_links.py").write_text(LINKS)
    monkeypatch.setenv("MICS_FN_LINKS", "toy_links")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    peers = [",".join(TOGETHER[:3]), *TOGETHER[3:]]
    argv = ["step", "--rounds", "2", "--warmup", "1", "--peers", *peers]
    argv += ["--rates", "unshaped:2,1gbit", "--steps", "1"]
    part, printed = forked_bench(*argv, *TINY)
    assert [peer["name"] for peer in part["peers"]] == TOGETHER
    assert [(at["rate"], at["steps"]) for at in part["rates"]] == [("unshaped", 2), ("1gbit", 1)]
    for at in part["rates"]:
        check_rate(at, [name for name in TOGETHER if PEERS[name].ours], rounds=2)
        assert f"links {at['rate']}: 2 rounds of {at['steps']} steps" in printed
    check_peers_agree(part, steps_taken=1 + 2 * (2 + 1))
    # Before the first step, and in each round.
    for rank in range(4):
        asked = (tmp_path / f"asked{rank}").read_text().split()
        assert asked == ["unshaped", *["unshaped", "1gbit"] * 2]


def check_rate(at: dict, ours: list[str], *, rounds: int) -> None:
    """The times at one rate agree with each other."""
    seconds = {peer["name"]: peer["seconds_by_round"] for peer in at["peers"]}
    for peer in at["peers"]:
        own = seconds[peer["name"]]
        assert len(own) == rounds
        assert min(own) > 0
        assert peer["seconds"] == spread(own)._asdict()
        others = [name for name in ours if name != peer["name"]]
        over = {name: ratio(seconds[name], own)._asdict() for name in others}
        assert peer["over_it"] == over
        assert peer["node_bytes"] is None  # the nodes are pretended ones
        assert peer["largest_loss_gap"] <= 1e-5
        assert peer["over_first"] is None


@pytest.mark.thorough
def test_step_with_precisions(forked_bench: Callable) -> None:
    f32, bf16 = "f32", "compute=bf16,reduce=bf16"
    argv = ["step", "--rounds", "2", "--steps", "1"]
    argv += ["--peers", "keep", "hpz", "fsdp2", "--precision", f32, bf16]
    part, printed = forked_bench(*argv, *TINY)
    peers = {peer["name"]: peer for peer in part["rates"][0]["peers"]}
    mixed = [
        f"{name}@{precision}" for name in ("keep", "hpz", "fsdp2") for precision in (f32, bf16)
    ]
    assert list(peers) == mixed
    assert part["ours"] == ["keep", "hpz"]
    for label, peer in peers.items():
        name, _, precision = label.partition("@")
        seconds = peer["seconds_by_round"]
        others = [f"{x}@{precision}" for x in part["ours"] if x != name]
        over = [ratio(peers[x]["seconds_by_round"], seconds)._asdict() for x in others]
        assert list(peer["over_it"].values()) == over, "peers are compared in one precision"
        first = peers[f"{name}@{f32}"]["seconds_by_round"] if precision == bf16 else None
        assert peer["over_first"] == (first and ratio(seconds, first)._asdict())
    losses = {peer["name"]: peer["losses"] for peer in part["peers"]}
    for label, found in losses.items():
        close = 3e-2 if bf16 in label else 1e-5  # some roundings of 2**-9 in a loss of about 5
        assert found == pytest.approx(losses["keep@f32"], rel=close)
        assert bf16 not in label or found != losses["keep@f32"]
    assert "over f32" in printed


def check_peers_agree(part: dict, *, steps_taken: int) -> None:
    """All went through the same steps."""
    first = part["peers"][0]
    for peer in part["peers"]:
        assert len(peer["losses"]) == steps_taken
        assert min(peer["losses"]) < peer["losses"][0]
        # The same batches from the same parameters: only the order of sums differs.
        assert peer["losses"] == pytest.approx(first["losses"], rel=1e-5)
        assert peer["largest_loss_gap"] <= 1e-5


def held_by_peers(labels: list[str]) -> dict[str, int]:
    """The bytes that this rank holds of each peer after a step."""
    config = StepConfig(node_size=NODE, partition_size=NODE, model=MODEL.config)
    found = {}
    for label in labels:
        with contextlib.ExitStack() as closing:
            peer = build(make_stage(config, CPU, closing, steps=1), label)
            peer.step(0)
            found[label] = peer.held_bytes()
    return found


@pytest.mark.thorough
def test_each_peer_holds_its_share(ranks: Callable) -> None:
    """Parameters and two moments of four bytes each, shared by so many ranks, and padding."""
    labels = [*TOGETHER, *(f"{x}@compute=bf16,reduce=bf16" for x in ("keep", "hpz", "fsdp2"))]
    every = ranks(4).run(held_by_peers, labels)
    for label in labels:
        name = label.partition("@")[0]
        wide = name == "hpz" or "wide" in name or "full" in name
        least = 12 * NUM_PARAMS / (4 if wide else NODE)
        # A leaf is padded to 16 bytes of what travels: 8 elements at most.
        padding = 3 * 4 * 8 * len(list(MODEL.parameters())) if "@" in label else 2000
        assert least <= max(found[label] for found in every) <= least + padding, label


def test_a_step_that_overlaps_hop_2(forked_bench: Callable) -> None:
    argv = ["step", "--overlap", "--ranks", "2", "--node-size", "1"]
    argv += ["--rounds", "2", "--steps", "2", "--warmup", "1"]
    figures, printed = forked_bench(*argv, *TINY)
    assert figures["params"] == NUM_PARAMS
    assert all(peer["largest_loss_gap"] == 0.0 for peer in figures["peers"])
    (at,) = figures["rates"]
    whole, overlapped = at["peers"]
    assert [whole["name"], overlapped["name"]] == ["keep", "overlap"]
    for peer in at["peers"]:
        assert 0 < peer["exposed"]["least"] <= peer["optimizer"]["most"]
        assert 0 <= peer["hidden"]["least"] <= peer["hidden"]["most"] < 1
        assert peer["title"] in printed
    assert whole["hidden"]["most"] == 0, "all waits come before its optimizer"
    assert whole["exposed"] == pytest.approx(whole["optimizer"])
    assert "optimizer" in printed
    assert "hidden: the share of the optimizer" in printed


def test_what_is_hidden_by_hop_2() -> None:
    def hop(start: float, end: float) -> Event:
        return Event("hop2", "w", (0,), "replicas", 1, start, end)

    def wait(start: float, end: float, about: str = "hop2 bucket 0: w") -> Event:
        return Event("wait", about, (0,), "", 0, start, end)

    def opt(start: float, end: float) -> Event:
        return Event("opt", "w", (0,), "", 0, start, end)

    for events, hidden in (
        ([opt(1, 2)], 0),
        ([hop(0, 4), opt(1, 2), wait(2, 4)], 1),
        ([hop(1.5, 4), opt(1, 2), wait(2, 4)], 0.5),  # it began in the middle
        ([hop(0, 2), opt(1, 2), wait(2, 4)], 0),  # the wait found it done
        ([hop(0, 2.0005), opt(1, 2), wait(2, 4)], 0),  # or may have
        ([hop(0, 4), opt(1, 2), wait(2, 4, "hop1 bucket 0: w")], 0),
        ([hop(0, 4), opt(1, 2), opt(3, 5), wait(2, 4)], 2),
        ([hop(0, 3), hop(0.5, 4), opt(1, 2), wait(2, 4)], 1),  # two at once count once
        ([hop(0, 3), opt(1, 2), wait(2, 3), hop(3, 6), opt(3, 5), wait(5, 6), opt(6, 7)], 3),
    ):
        total = sum(event.seconds for event in events if event.kind == "opt")
        found = updates_of(Timeline("step 1", tuple(events), 7.0))
        assert found == pytest.approx((total, total - hidden)), events


@pytest.mark.thorough  # fresh processes for each measurement
def test_memory_of_each_peer_alone(tmp_path: Path) -> None:
    argv = ["step", "--rss", "--ranks", "2", "--rounds", "1", "--steps", "1", "--peers", "zero3"]
    figures, printed = launched_bench(tmp_path, *argv)
    assert figures["params"] == NUM_PARAMS
    (peer,) = figures["peers"]
    full, parts = 4 * NUM_PARAMS, peer["formula"]
    assert peer["title"] == "Trainer p=2, two buckets"
    assert 3 * full / 2 <= parts["states"] <= 3 * full / 2 + 2000
    assert 0 < parts["parameters"] <= full + 2000
    assert parts["sums"] == pytest.approx(full / 2, abs=2000)
    assert 0 < parts["hops"] <= parts["in full"] <= 2 * full + 2000
    assert parts["activations"] > 0
    assert list(parts) == ["states", "parameters", "sums", "hops", "in full", "activations"]
    assert peer["before"] > 50e6  # torch is loaded
    assert peer["used"] is None or 0 <= peer["used"] < 100e6
    assert "used/formula" in printed


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
            assert peer["ns_per_element"] == spread(ns)._asdict()
        by_round = ratio(ours["seconds_by_round"], theirs["seconds_by_round"])
        assert theirs["opt_step_ratio"] == by_round._asdict()
        assert ours["opt_step_ratio"]["median"] == 1
    assert "opt_step(donate=True)" in printed


def test_bytes_equal_the_formulas_at_every_partition_size(forked_bench: Callable) -> None:
    figures, printed = forked_bench("bytes", "--steps", "2", "--accumulate", "3", *TINY)
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
        totals = part["rows"].pop("step totals")["formula"]
        assert totals == {1: 48, 2: 32 + 32, 4: 48}[p]
        total = sum(row["formula"] for row in part["rows"].values())
        r, micro_steps = 4 // p, 3
        hops = (1 + micro_steps) * (p - 1) / p + 2 * (r - 1) / r / p
        assert total == pytest.approx(hops * full)
    assert levels == {1: [], 2: [["rank", 2]], 4: [["node", 2], ["rank", 2]]}
    # By hand, of M, per node: a ring of 4 over 2 nodes is cut once a node; hop 2 of both ranks;
    # and the outer level of both ranks, once for the gather and three times for hop 1.
    assert crossing == {1: {1.5}, 2: {1.0}, 4: {2 * (1 + 3) / 4}}
    assert "bytes that leave a node are not counted" in printed
    assert "NOT THE SAME" not in printed


def test_bytes_of_codes_equal_the_formulas(forked_bench: Callable) -> None:
    coded = "gather=int8[64]@node,hop1=int4[32],hop2=int8[64]; *norm*: hop2=f32"
    figures, printed = forked_bench("bytes", "--steps", "1", "--precision", coded, *TINY)
    found = {part["partition_size"]: part for part in figures["partition_sizes"]}
    for part in found.values():
        assert part["steady"]
        assert part["precision"] == coded
        for row in part["rows"].values():
            assert row["ledger"] == [row["formula"]] * 4
            assert row["why"] in printed
    words = {p: {k: row["why"] for k, row in part["rows"].items()} for p, part in found.items()}
    assert words[1]["replicas"] == words[2]["replicas"] == "2 (r-1)/r M/p as int8[64], f32"
    assert words[2]["reduce rank"] == "s (2-1) M/2 as int4[32]"
    assert words[2]["gather rank"] == words[4]["gather rank"] == "(2-1) M/2"  # inside of nodes
    assert words[4]["gather node"] == "(2-1) M/4 as int8[64]"
    leaving = {p: part["wire"][0]["formula"] for p, part in found.items()}
    for p, plain in ((1, 1.5), (2, 1.0), (4, 1.0)):  # of M, as values
        assert 0 < leaving[p] < 0.45 * plain * found[p]["full_bytes"]
    # Values go around a ring, which leaves a node of two ranks once; codes straight to each rank.
    sent = found[1]["rows"]["replicas"]["formula"]
    assert sent < leaving[1] <= 4 / 3 * sent
    assert "out of a node" in printed


@pytest.mark.thorough
def test_the_bytes_of_the_figures_on_a_budget(forked_bench: Callable) -> None:
    """The GPT of the figures, of 13.7 M parameters: 4 ranks of 2 nodes are one partition group."""
    coded = "gather=int8[256], hop1=int8[256]"
    argv = ["bytes", "--partition-size", "4", "--live-buckets", "2", "--steps", "1"]
    figures, _ = forked_bench(*argv, "--warmup", "3", "--precision", "f32", coded)
    plain, part = figures["partition_sizes"]
    for found in (plain, part):
        assert found["steady"]
        assert all(row["ledger"] == [row["formula"]] * 4 for row in found["rows"].values())
        assert found["rows"]["gather node"]["why"].startswith("f (2-1) M/4")
    assert [wire["formula"] for wire in plain["wire"]] == [76_889_088] * 2
    assert [wire["formula"] for wire in part["wire"]] == [19_376_832] * 2


@pytest.mark.thorough
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
        (["step", "--dim", "10", "--heads", "4"], "--dim 10 is not a multiple of --heads 4"),
        (["bytes", "--ranks", "6", "--node-size", "4"], "4"),
        (["bytes", "--precision", "hop2=int9[64]"], "'int9[64]' is not a codec"),
        (["opt", "--json", "no/such/folder/f.json"], "there is no folder no/such/folder"),
        (["step", "--peers", "keep,fsdp"], "there is no peer fsdp\n  fix: choose from keep zero3"),
        (["step", "--peers", "keep", "keep"], "one is given twice"),
        (["step", "--peers", "plain"], "none of these is measured with 4 ranks"),
        (
            ["step", "--peers", "fsdp2-full", "--ranks", "1"],
            "choose from keep zero3 least fsdp2 fsdp2-keep plain",
        ),
        (["step", "--precision", "compute=bf17"], "'bf17' is not a torch.dtype"),
        (["step", "--precision", "f32", "compute=fp32"], "one of them is given twice"),
        (
            ["step", "--precision", "bf16; *norm*: f32"],
            "fsdp2 has one precision for all parameters",
        ),
        (["step", "--rates", "200mbits"], "200mbits is not a rate"),
        (["step", "--rates", "1gbit:0"], "1gbit:0 is not a rate"),
        (["step", "--rates", "1gbit,as-is"], "as-is cannot be combined"),
        (["step", "--rates", "1gbit"], "MICS_FN_LINKS=no_such_module: No module named"),
        (["step", "--overlap", "--peers", "keep", "fsdp2"], "--overlap: fsdp2 has no timeline"),
        (["step", "--overlap", "--ranks", "2"], "a partition group of all 2 ranks has no hop 2"),
    ],
)
def test_bad_sizes_are_refused_before_a_rank_starts(
    argv: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("mics_fn.lab.bench.turns.launch", None)
    monkeypatch.setenv("MICS_FN_LINKS", "no_such_module")
    assert main(["bench", *argv]) == 2
    assert said in capsys.readouterr().err


def test_what_can_not_set_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICS_FN_LINKS", "json")
    with pytest.raises(PlanError, match="MICS_FN_LINKS=json: it has no set_rate\n  fix: "):
        read_rates(["1gbit"], 5)
    monkeypatch.setattr(json, "set_rate", print, raising=False)
    assert read_rates(["1gbit", "unshaped:3"], 5) == (Rate("1gbit", 5), Rate("unshaped", 3))


def test_memory_is_not_measured_in_a_job_or_at_rates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("MICS_FN_LINKS", "json")
    monkeypatch.setattr(json, "set_rate", print, raising=False)
    assert main(["bench", "step", "--rss", "--rates", "1gbit"]) == 2
    assert "--rss with --rates" in capsys.readouterr().err
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (job | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "step", "--rss"]) == 2
    assert "--rss in a job" in capsys.readouterr().err


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
    peers = [BenchPeer(name, lambda step, n=name: order.append((n, step))) for name in "ab"]
    turns = BenchTurns(rounds=2, steps=1, warmup=1)
    laps = take_turns(peers, turns, device=CPU)
    assert [name for name, _ in order] == list("ab" + "ab" + "ba")
    assert [step for name, step in order if name == "b"] == list(range(turns.all_steps()))
    assert [lap.name for lap in laps] == ["a", "b"]
    assert [(len(lap.seconds), lap.sent_bytes) for lap in laps] == [(2, [None, None])] * 2
    assert nbytes({"x": torch.zeros(3), "y": [1, torch.zeros(2, dtype=torch.int8)]}) == 14


def test_peers_take_turns_under_each_setting() -> None:
    seen: list[str] = []
    peers = [BenchPeer(name, lambda step, n=name: seen.append(n)) for name in "ab"]
    settings = [BenchSetting(steps, lambda s=steps: seen.append(f"{s}:")) for steps in (2, 1)]
    turns = BenchTurns(rounds=2, steps=5, warmup=1)
    fence = iter(range(100))
    laps = take_turns(
        peers,
        turns,
        device=CPU,
        fence=lambda: next(fence),
        settings=settings,
        gauge=lambda: 6 * len([name for name in seen if name in "ab"]),
    )
    assert "".join(seen) == "2:ab" + "2:aabb1:ab" + "2:bbaa1:ba"
    assert turns.all_steps(2, 1) == len([name for name in seen if name == "a"])
    assert [lap.sent_bytes for lap in laps] == [[6] * 4] * 2  # a step
    assert next(fence) == 4 * 2 * (1 + 2 * 2)  # twice before a turn, twice after


def test_memory_and_its_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = reset_peak(CPU)
    if before is not None:
        assert peak_growth(lambda: torch.ones(8_000_000), CPU) >= 30e6  # type: ignore[operator]
        assert (peak_bytes(CPU) or 0) >= before + 30e6
    monkeypatch.setattr(turns_module, "STATUS", tmp_path / "status")
    assert memory_bytes(CPU) is None
    (tmp_path / "status").write_text("VmHWM:\t    50 kB\nVmRSS:\t    40 kB\n")
    assert (memory_bytes(CPU), peak_bytes(CPU)) == (40 * 1024, 50 * 1024)
    monkeypatch.setattr(turns_module, "CLEAR_REFS", tmp_path / "no" / "clear_refs")
    assert reset_peak(CPU) is None
    done: list[int] = []
    assert peak_growth(lambda: done.append(1), CPU) is None
    assert done == [1]


def test_what_leaves_a_node() -> None:
    def leaving(*ranks: int, ring: bool = True) -> list[float]:
        comms = [Comm("c", ranks, i, None, 1.0, Traffic(), GroupState()) for i in range(len(ranks))]
        return [leaving_share(comm, node_size=2, ring=ring) for comm in comms]

    assert leaving(0) == leaving(0, ring=False) == [0]
    assert leaving(0, 1) == leaving(0, 1, ring=False) == [0, 0]
    assert leaving(1, 3) == leaving(1, 3, ring=False) == [1, 1]
    assert leaving(0, 1, 2, 3) == [0, 1, 0, 1]
    assert leaving(0, 1, 2, 3, ring=False) == [2 / 3] * 4
    assert leaving(0, 1, 2, ring=False) == [1 / 2, 1 / 2, 1]


def test_counters_of_an_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Inter-| Receive | Transmit\n face |bytes\n  eth0: 1 2 0 0 0 0 0 0 300 4 0 0 0 0 0 0\n"
    (tmp_path / "dev").write_text(text)
    monkeypatch.setattr(links, "NET_DEV", tmp_path / "dev")
    assert read_counters("eth0") == Counters(300, 4)
    assert Counters(300, 4) - Counters(100, 3) == (200, 1)
    assert (sent_bytes("eth0"), sent_bytes(None)) == (300, None)
    assert read_counters("eth1") is None
    monkeypatch.setattr(links, "NET_DEV", tmp_path / "nothing")
    assert read_counters("eth0") is None


def test_the_wire_is_a_mean_over_steps_without_headers() -> None:
    rank = RankBytes([], {}, 500.0, Counters(2 * 1000 + 3 * 66, 3))
    wire = bench_bytes._wire([rank, rank], steps=2)
    assert wire == {"formula": 1000.0, "counted": 1099.0, "payload": 1000.0}
