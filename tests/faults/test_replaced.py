"""A rank that was frozen, declared silent, replaced, and thaws: it hears why, and stops nobody."""

import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mics_fn as mf
from mics_fn import _torch
from mics_fn.errors import MicsError
from mics_fn.faults import heartbeat, monitor
from mics_fn.faults.heartbeat import BoundedStore, heartbeat_of
from mics_fn.store import poll
from tests.stress.fault_trials import end, fork, free_port, host_store, take_place

N, ODD, AT = 4, 1, 3  # ranks, the one that is replaced, and the step at which that begins
AFTER = 40  # steps of the others once it has thawed, in more than a second


def say(folder: Path, name: str, **what: Any) -> None:
    with open(folder / name, "a") as file:
        file.write(json.dumps(what) + "\n")


def said(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(folder: Path) -> float:
    """The last step, once the test has said so, well before it comes."""
    return int((folder / "end").read_text()) if (folder / "end").exists() else float("inf")


def freeze(folder: Path, where: str) -> None:
    """Let this process stop at one instant, in whichever thread comes there."""
    plants: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "before a sign of life": (heartbeat, "claim", lambda *given: given[1] == heartbeat_of(ODD)),
        "in a meeting": (BoundedStore, "claim", lambda *given: "/calls/" not in given[1]),
        "in a reset": (_torch, "new_group", lambda *given: True),
    }
    place, name, fits = plants[where]
    before = getattr(place, name)

    def stop(*given: Any, **options: Any) -> Any:
        if fits(*given):
            setattr(place, name, before)
            say(folder, "frozen", pid=os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
        return before(*given, **options)

    setattr(place, name, stop)


def train(folder: Path, rank: int, where: str, name: str, *, again: bool) -> None:
    """What a script does that goes on after a fault; all ranks have one batch."""
    mf.init_distributed(device="cpu", timeout_s=20)
    groups = mf.make_groups(2, node_size=2, timeout_s=20, heartbeat_s=1.5)
    torch.manual_seed(0)
    trainer = mf.Trainer(
        torch.nn.Linear(3, 3),
        mf.optim.sgd(0.01),
        groups,
        loss=lambda model, x: model(x).square().mean(),
        faults=mf.FaultPolicy(recoverable=True),
    )
    resets, frozen = int(again), False
    while trainer.state.step < last_step(folder):
        try:
            if resets:
                resets = 0
                trainer.reset()
            if rank == ODD and not again and trainer.state.step == AT and not frozen:
                frozen = True
                freeze(folder, where)
                if where != "before a sign of life":
                    raise mf.errors.CollectiveError("its own error, after which all reset")
            trainer.step(torch.ones(2, 3))
            say(folder, name, step=trainer.state.step)
            time.sleep(0.03)
        except MicsError as error:
            kind, who = getattr(error, "kind", ""), getattr(error, "rank", None)
            say(folder, name, kind=kind, rank=who, text=f"{error}")
            if sum("kind" in each for each in said(folder, name)) > 6:
                return
            resets = 1
    say(folder, name, total=float(sum(x.sum() for x in trainer.params().values())))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[Path, Callable[..., int]]]:
    importlib.import_module("torch._dynamo")  # else each of them would
    port = free_port(0)
    pids = [fork(lambda: host_store(port))]  # the store outlives every rank

    def start(rank: int, where: str = "", *, again: bool = False) -> int:
        def program() -> None:
            take_place(rank, N, port, apart=True)
            train(tmp_path, rank, where, f"{rank}{'b' * again}", again=again)
            monitor._at_exit()

        pids.append(fork(program))
        return pids[-1]

    yield tmp_path, start
    end(pids)


def until(done: Callable[[], Any]) -> bool:
    return poll(done, 1, time.monotonic() + 60.0)


@pytest.mark.limit(200)
@pytest.mark.parametrize("where", ["before a sign of life", "in a meeting", "in a reset"])
def test_a_rank_that_thaws_after_it_was_replaced_hears_so_and_stops_nobody(job, where):
    folder, start = job
    for rank in range(N):
        start(rank, where)
    assert until(lambda: said(folder, "frozen")), "it never came there"
    old, new = said(folder, "frozen")[0]["pid"], start(ODD, again=True)
    names = ["0", "1b", "2", "3"]

    def steps(name: str) -> int:
        return max((each["step"] for each in said(folder, name) if "step" in each), default=0)

    assert until(lambda: all(steps(name) > AT + 2 for name in names)), "the job does not go on"
    before = {name: sum("kind" in each for each in said(folder, name)) for name in names}
    thawed_at = max(steps(name) for name in names)
    os.kill(old, signal.SIGCONT)
    assert until(lambda: all(steps(name) > thawed_at + AFTER for name in names))
    heard = [each for each in said(folder, f"{ODD}") if "kind" in each]
    said_end = folder / "said_end"
    said_end.write_text(f"{max(steps(name) for name in names) + 30}")
    said_end.rename(folder / "end")
    assert until(lambda: all("total" in said(folder, name)[-1] for name in names))
    for name in names:
        assert before[name] == sum("kind" in each for each in said(folder, name)), name
    assert len({said(folder, name)[-1]["total"] for name in names}) == 1
    own = [each for each in heard if each["kind"] == "replaced"]
    assert len(own) > 1, "at its next call, and at each one after that"
    for each in own:
        assert each["rank"] == ODD
        assert f"this process was replaced by process {new}, epoch " in each["text"]
    assert [each["kind"] for each in heard[-len(own) :]] == ["replaced"] * len(own), heard
