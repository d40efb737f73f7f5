"""A rank fails, and all others raise soon, with its name; one that is only late is left alone."""

import ctypes
import importlib
import io
import itertools
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from children import left_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import mics_fn as mf
from mics_fn import _torch
from mics_fn.errors import MicsError
from mics_fn.faults import monitor
from mics_fn.faults.heartbeat import Process
from mics_fn.groups import startup
from mics_fn.spans import LOG
from mics_fn.store import poll
from tests.stress import fault_trials as processes
from tests.stress.fault_trials import take_place

N, STEPS, AT = 4, 6, 3  # ranks, steps, and the step in which one of them fails
LIMIT_S = 1.5


class Ranks:
    """Forked processes, each of which calls a function and leaves what it returned in a file."""

    def __init__(self, folder: Path, port: int, program: Callable[..., Any], args: Any, n: int):
        self.folder, self.port = folder, port
        importlib.import_module("torch._dynamo")  # else each of them would
        start = partial(self.child, n, lambda: program(*args))
        self.pids = [processes.fork(partial(start, rank)) for rank in range(n)]

    def child(self, n: int, program: Callable[[], Any], rank: int) -> None:
        take_place(rank, n, self.port, apart=False)
        os.chdir(self.folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            found = program()
        except SystemExit:
            found = "exit"
        except BaseException as error:
            found, sys.last_value = f"{type(error).__name__}: {error}", error
        Path(f"tmp{rank}").write_text(json.dumps(found))
        Path(f"tmp{rank}").rename(f"{rank}")
        monitor._at_exit()  # as at the exit of any process

    def wait(self, ranks: set[int], limit_s: float = 30.0) -> dict[int, Any]:
        """What these ranks found; they have ended."""
        left = left_of([self.pids[rank] for rank in ranks], limit_s)
        assert not left, f"{left} hang"
        return {rank: json.loads((self.folder / f"{rank}").read_text()) for rank in ranks}


def until(done: Callable[[], Any], limit_s: float = 12.0) -> bool:
    """Sleep until something is so; whether it is in time."""
    return poll(done, 1, time.monotonic() + limit_s)


@pytest.fixture
def fork(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def start(program: Callable[..., Any], *args: Any, n: int = N) -> Ranks:
        (folder := tmp_path / f"{len(made)}").mkdir()
        made.append(Ranks(folder, processes.free_port(len(made)), program, args, n))
        return made[-1]

    yield start
    processes.end(pid for each in made for pid in each.pids)


def grouped(heartbeat_s: float = LIMIT_S, timeout_s: float = 30.0) -> Any:
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank == 0:
        store = _torch.serve_store("127.0.0.1", port)
    else:
        store: Any = dist.TCPStore("127.0.0.1", port, size, False)  # pyright: ignore
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return mf.make_groups(2, timeout_s=timeout_s, heartbeat_s=heartbeat_s)


def fail(fault: str) -> None:
    """What a rank does that fails, or that is late by half the limit."""
    if fault == "raised":
        raise KeyError("mine")
    if fault == "exited":
        sys.exit()
    if fault in ("killed", "elsewhere"):
        os._exit(3)
    if fault == "silent":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "late":
        time.sleep(LIMIT_S / 2)
    if fault == "holds its interpreter":
        ctypes.PyDLL(None).usleep(int(LIMIT_S / 2 * 1e6))


def ended(k: int, began: float, groups: Any, error: MicsError) -> tuple[int, str, Any, float, str]:
    """What a rank says of the step in which it gave its groups up."""
    kind, who = getattr(error, "kind", type(error).__name__), getattr(error, "rank", None)
    groups.state.abandon(error)
    return k, kind, who, time.time() - began, str(error)


def train(faults: dict[int, str]) -> Any:
    """Steps by hand, over both hops; how many were done, and the error of this rank."""
    rank = int(os.environ["RANK"])
    if "elsewhere" in faults.values():  # as if each rank were on a host of its own
        own = Process.own()
        setattr(Process, "own", lambda: Process("", own.pid, own.started))  # noqa: B010
    groups = grouped()
    shards = mf.shard({"w": torch.ones(8)}, groups)
    for k in range(STEPS):
        began = time.time()
        if k == AT:
            fail(faults.get(rank, ""))
        try:
            mf.gather(shards, groups)
            mf.reduce_grads({"w": torch.ones(8)}, groups, like=shards)
        except MicsError as error:
            return ended(k, began, groups, error)
    return STEPS, "", None, 0.0, ""


@pytest.mark.parametrize(
    ("faults", "odd", "most_s"),
    [
        ({"raised": "raised"}, 2, 1.0),
        ({"exited": "exited"}, 2, 1.0),
        ({"killed": "killed"}, 0, 1.0),  # which holds the store
        ({"silent": "silent", "elsewhere": "silent"}, 2, LIMIT_S + 1.0),
        pytest.param({"silent": "silent"}, 0, LIMIT_S + 1.0, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_all_others_raise_soon_and_name_the_rank(fork, faults, odd, most_s):
    started = [(fork(train, {odd: fault}), kind) for fault, kind in faults.items()]
    for each, kind in started:
        for done, how, who, seconds, text in each.wait(set(range(N)) - {odd}).values():
            assert (done, how, who) == (AT, kind, odd), text
            assert most_s - 1.5 < seconds < most_s, text
            assert f"rank {odd}" in text
            assert "fix: " in text


class Failing(nn.Module):
    """A layer whose call fails on one rank, while another part waits for it in torch."""

    fault, k = "", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.k == AT:
            fail(self.fault)
        return x


def train_in_parts(odd: int, fault: str, sizes: tuple[int, ...]) -> Any:
    """Steps of a model whose parts meet in groups of the mesh, which torch made."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = _torch.serve_store("127.0.0.1", port) if rank == 0 else None
    store = store or dist.TCPStore("127.0.0.1", port, size, False)  # pyright: ignore
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "tp"))
    how: dict[str, Any] = {"timeout_s": 30.0, "heartbeat_s": LIMIT_S, "stages": "pp"}
    groups = mf.make_groups(sizes[1], mesh=mesh, model="tp", **how)
    model = nn.Sequential(nn.Linear(4, 8), Failing(), nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    trainer = mf.Trainer(model, mf.optim.sgd(0.1), groups, loss=lambda m, x: m(x).square().mean())
    for k in range(STEPS):
        began, Failing.k, Failing.fault = time.time(), k, fault if rank == odd else ""
        try:
            trainer.step(torch.ones(2, 4))
        except MicsError as error:
            return ended(k, began, groups, error)
    return STEPS, "", None, 0.0, ""


@pytest.mark.parametrize(
    ("fault", "odd", "sizes", "most_s"),
    [
        ("raised", 2, (1, 2, 2), 1.0),
        ("killed", 1, (1, 2, 2), 1.0),
        ("silent", 2, (1, 2, 2), LIMIT_S + 1.0),
        ("exited", 3, (2, 1, 2), 1.0),  # of the second stage
    ],
    ids=str,
)
def test_a_rank_of_one_part_is_named_on_all_others(fork, fault, odd, sizes, most_s):
    """Also on those that share no group with it, and where ranks wait for parts in torch."""
    found = fork(train_in_parts, odd, fault, sizes).wait(set(range(N)) - {odd})
    for done, how, who, seconds, text in found.values():
        kind = "raised" if fault == "exited" else fault  # in a step both are an exception
        assert (done, how, who) == (AT, kind, odd), text
        assert seconds < most_s, text
        assert f"rank {odd}" in text
        assert "fix: " in text


def refused() -> str:
    """Rank 1 is gone, and NCCL says at the next call of an all-to-all that it lost its peer."""
    groups, text = grouped(), "NCCL Error 6: remote process exited or there was a network error"
    shards = mf.shard({"w": torch.ones(8)}, groups)
    if os.environ["RANK"] == "1":
        until(Path("called").exists)
        os._exit(3)

    def lost(*args: Any, **kwargs: Any) -> None:
        Path("called").touch()
        raise RuntimeError(text)  # as the functions do that torch calls for an all-to-all

    setattr(_torch, "all_gather_single", lost)  # noqa: B010
    try:
        mf.gather(shards, groups)
    except MicsError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_call_that_nccl_refuses_waits_for_the_name_of_the_rank(fork: Any):
    found = fork(refused, n=2).wait({0})
    assert found[0].startswith("PeerFailed: rank 1 is gone"), found


def test_a_rank_that_is_late_is_no_alarm(fork: Any):
    found = fork(train, {1: "holds its interpreter", 2: "late"}).wait(set(range(N)))
    assert {tuple(each) for each in found.values()} == {(STEPS, "", None, 0.0, "")}


def stalled(is_slow: bool) -> Any:
    """A rank that lives and makes no call; what the others raise, and of what they are warned."""
    groups, rank = grouped(heartbeat_s=1.0, timeout_s=4.0), int(os.environ["RANK"])
    shards, warned = mf.shard({"w": torch.ones(8)}, groups), logging.StreamHandler(io.StringIO())
    LOG.addHandler(warned)
    for k in range(AT):
        began = time.monotonic()
        try:
            if rank == 2 and k == 1 and is_slow:
                time.sleep(2.8)  # more than `heartbeat_s`, and less than `timeout_s`
            if rank == 2 and k == 2:
                until(lambda: groups.state.standing)  # others have named this rank
            mf.gather(shards, groups)
            mf.reduce_grads({"w": torch.ones(8)}, groups, like=shards)
        except MicsError as error:
            took_s = time.monotonic() - began
            kind, who = getattr(error, "kind", type(error).__name__), getattr(error, "rank", None)
            if rank == 0:  # it holds the store
                until(Path("2").exists)
            return k, kind, who, took_s, str(error), warned.stream.getvalue()
    return "no error"


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.thorough
def test_a_rank_that_makes_no_call_is_named_and_one_that_is_slow_goes_on(fork: Any, is_slow: bool):
    found = fork(stalled, is_slow).wait(set(range(N)))
    for rank, (done, kind, who, seconds, text, warned) in found.items():
        behind = warned.count("rank 2 is behind: it lives, but makes no call")
        assert behind == (rank == 0) * (1 + is_slow), warned
        assert (done, kind, who) == (2, "stalled", 2), (rank, text)
        assert "in until" in text
        assert rank == 2 or 3.5 < seconds < 11, (rank, seconds)


def torn() -> Any:
    """Rank 1 raises right after a gather that rank 0 has issued too, but which it sees late."""
    groups, rank = grouped(), int(os.environ["RANK"])
    shards, done, error = mf.shard({"w": torch.ones(8)}, groups), 0, ""
    try:
        with groups:
            for k in range(STEPS):
                if k == AT and rank == 0:
                    slow(0.8)
                mf.gather(shards, groups)
                done = k + 1
                if k == AT and rank == 1:
                    raise KeyError("mine")
    except (MicsError, KeyError) as found:
        error = type(found).__name__
    return done, error


def slow(seconds: float) -> None:
    """See no collective as done for some seconds."""
    is_done, until = dist.Work.is_completed, time.monotonic() + seconds

    def done(self: Any) -> bool:
        return time.monotonic() > until and is_done(self)

    dist.Work.is_completed = done


def test_a_step_that_the_culprit_has_done_is_done_by_all(fork: Any):
    found = fork(torn, n=2).wait({0, 1})
    assert found == {0: [AT + 1, "PeerFailed"], 1: [AT + 1, "KeyError"]}


def stopped_store() -> Any:
    """The rank that holds the store is stopped; rank 1 is interrupted in its wait."""
    groups, rank = grouped(heartbeat_s=20.0), int(os.environ["RANK"])
    shards = mf.shard({"w": torch.ones(8)}, groups)
    mf.gather(shards, groups)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)
    signal.setitimer(signal.ITIMER_REAL, 0.7)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    began = time.monotonic()
    try:
        mf.gather(mf.shard({"w": torch.ones(3)}, groups), groups)
    except KeyboardInterrupt:
        return time.monotonic() - began
    return "no interrupt"


@pytest.mark.thorough
def test_ctrl_c_is_heard_while_the_store_is_stopped(fork: Any):
    found = fork(stopped_store, n=2).wait({1}, 10.0)
    assert found[1] < 1.5


def caught() -> Any:
    """All ranks catch an error in their first step, a little apart; then rank 1 is interrupted."""
    groups, rank, calls = grouped(), int(os.environ["RANK"]), itertools.count(1)

    def loss(model: Any, x: Any) -> Any:
        found = model(x).square().mean()
        if (call := next(calls)) == 1:
            raise ValueError("in a step")
        if call == 3 and rank == 1:
            raise KeyboardInterrupt
        return found

    trainer = mf.Trainer(torch.nn.Linear(3, 3), mf.optim.sgd(0.1), groups, loss=loss, live_bytes=0)
    with pytest.raises(ValueError, match="in a step"):
        trainer.step(torch.ones(2, 3))
    time.sleep(0.4 * rank)
    try:
        for _ in range(2):
            trainer.step(torch.ones(2, 3))
    except mf.errors.PeerFailed as error:
        return vars(error)
    return {}


def test_an_error_of_all_is_none_of_the_groups_and_one_of_a_rank_says_all_that_it_knew(fork: Any):
    found = fork(caught, n=2).wait({0})[0]
    trace, leaf = found.pop("remote_traceback"), found.pop("leaf")
    assert "fetch of bucket 0" in found.pop("operation")
    assert found == {"rank": 1, "kind": "interrupted", "step": 2}
    assert "in loss" in trace
    assert "KeyboardInterrupt" in trace
    assert "weight" in leaf


def start_without_a_store() -> Any:
    began = time.monotonic()
    if os.environ["RANK"] == "0":
        return ""
    try:
        mf.init_distributed(device="cpu", timeout_s=1.0)
    except MicsError as error:
        return type(error).__name__, f"{error}", time.monotonic() - began
    return "no error"


def test_a_start_is_bounded_and_names_the_store_that_is_missing(fork: Any):
    started = fork(start_without_a_store, n=2)
    name, said, seconds = started.wait({1})[1]
    assert name == "CollectiveError", said
    assert f"127.0.0.1:{started.port}" in said
    assert seconds < 15, "of 1, and not what is usual"


def killed_at(place: str) -> Any:
    """Rank 2 is killed at some point of the start; what the others raise."""
    rank, count, new_group = int(os.environ["RANK"]), iter(range(9)), _torch.new_group

    def die(*args: Any, **options: Any) -> Any:
        if place != "before the third group" or next(count) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return new_group(*args, **options)

    plants: dict[str, tuple[Any, str]] = {
        "before it has met the others": (startup, "meet"),
        "before it connects": (dist, "init_process_group"),
        "before the third group": (_torch, "new_group"),
    }
    if rank == 2:
        setattr(*plants[place], die)
    try:
        mf.init_distributed(device="cpu", timeout_s=2.0)
        mf.make_groups(2, timeout_s=2.0, heartbeat_s=1.0)
    except MicsError as error:
        if rank == 0:
            time.sleep(1.0)  # it holds the store
        return type(error).__name__, str(error).splitlines()[0]
    return "no error"


@pytest.mark.parametrize(
    ("place", "kind", "named"),
    [
        ("before it has met the others", "CollectiveError", True),
        pytest.param("before it connects", "CollectiveError", False, marks=pytest.mark.thorough),
        ("before the third group", "PeerFailed", True),
    ],
)
def test_a_rank_that_is_killed_at_the_start_ends_it_and_is_named(fork, place, kind, named):
    for rank, (name, text) in fork(killed_at, place).wait({0, 1, 3}).items():
        assert name == kind, text
        assert re.findall(r"rank (\d) ", text) == (["2"] if named else [f"{rank}"])
