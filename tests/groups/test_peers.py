"""A rank fails, and all others raise soon, with its name; one that is only late is left alone."""

import ctypes
import importlib
import io
import json
import logging
import os
import pdb
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mics_fn as mf
from mics_fn import _torch
from mics_fn.collectives import pending
from mics_fn.errors import MicsError
from mics_fn.groups import distributed, make, uncaught
from mics_fn.groups.monitor import Monitor, monitor
from mics_fn.groups.peers import Journal, Process, main_thread
from mics_fn.spans import LOG

N, STEPS, AT = 4, 6, 3  # ranks, steps, and the step in which one of them fails
LIMIT_S = 1.5


class Ranks:
    """Forked processes, each of which calls a function and leaves what it returned in a file."""

    def __init__(self, folder: Any, program: Callable[..., Any], args: Any, n: int, served: bool):
        self.folder, self.pids, self.alive = folder, [], set(range(n))
        # One of loopback alone, so that the store looks for no names of hosts, which may take long.
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = port = self.listening.getsockname()[1]
        if not served:
            self.listening.close()
        importlib.import_module("torch._dynamo")  # else each of them would
        for rank in range(n):
            pid = os.fork()
            if pid == 0:
                os.environ["LISTENING"] = str(self.listening.fileno())
                self.child(rank, n, port, lambda: program(*args))
            self.pids.append(pid)
        self.listening.close()

    def child(self, rank: int, n: int, port: int, program: Callable[[], Any]) -> None:
        os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{n}", LOCAL_RANK=f"{rank}")
        os.environ.update(LOCAL_WORLD_SIZE=f"{n}", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(self.folder / f"out{rank}", "w") as out:
            os.dup2(out.fileno(), 2)
        try:
            found = program()
        except SystemExit:
            found = "exit"
        except BaseException as error:
            found, sys.last_value = f"{type(error).__name__}: {error}", error
        (self.folder / f"tmp{rank}").write_text(json.dumps(found))
        (self.folder / f"tmp{rank}").rename(self.folder / f"{rank}")
        uncaught._end()  # as at the exit of any process
        os._exit(0)

    def wait(self, ranks: set[int], limit_s: float = 30.0) -> dict[int, Any]:
        """What these ranks found; they have ended."""
        deadline = time.monotonic() + limit_s
        while self.alive & ranks and time.monotonic() < deadline:
            for rank in list(self.alive & ranks):
                if os.waitpid(self.pids[rank], os.WNOHANG)[0]:
                    self.alive.discard(rank)
            time.sleep(0.01)
        assert not self.alive & ranks, f"{self.alive & ranks} hang"
        return {rank: json.loads((self.folder / f"{rank}").read_text()) for rank in ranks}

    def end(self) -> None:
        for rank in self.alive:
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
        self.alive.clear()


@pytest.fixture
def fork(tmp_path: Any) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def start(program: Callable[..., Any], *args: Any, n: int = N, served: bool = True) -> Ranks:
        made.append(Ranks(tmp_path, program, args, n, served))
        return made[-1]

    yield start
    for each in made:
        each.end()


def grouped(heartbeat_s: float = LIMIT_S, timeout_s: float = 30.0) -> Any:
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    given: dict[str, Any] = {"master_listen_fd": int(os.environ["LISTENING"])} if rank == 0 else {}
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1", port, size, rank == 0, wait_for_workers=False, **given
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return mf.make_groups(2, timeout_s=timeout_s, heartbeat_s=heartbeat_s)


def fail(fault: str) -> None:
    """What a rank does that fails, or that is late by half the limit."""
    if fault == "raised":
        raise KeyError("mine")
    if fault == "interrupted":
        raise KeyboardInterrupt
    if fault == "exited":
        sys.exit()
    if fault == "killed":
        os._exit(3)
    if fault == "silent":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "late":
        time.sleep(LIMIT_S / 2)
    if fault == "holds its interpreter":
        ctypes.PyDLL(None).usleep(int(LIMIT_S / 2 * 1e6))


def train(fault: str, odd: int) -> Any:
    """Steps by hand, over both hops; how many were done, and the error of this rank."""
    groups, rank = grouped(), int(os.environ["RANK"])
    shards = mf.shard({"w": torch.ones(8)}, groups)
    for k in range(STEPS):
        began = time.time()
        if k == AT and rank == odd:
            fail(fault)
        try:
            mf.gather(shards, groups)
            mf.reduce_grads({"w": torch.ones(8)}, groups, like=shards)
        except MicsError as error:
            kind, who = getattr(error, "kind", type(error).__name__), getattr(error, "rank", None)
            groups.life.abandon(error)
            return k, kind, who, time.time() - began, str(error)
    return STEPS, "", None, 0.0, ""


@pytest.mark.parametrize("odd", [2, 0], ids=["a rank", "the rank that holds the store"])
@pytest.mark.parametrize("fault", ["raised", "exited", "killed", "silent"])
@pytest.mark.short(
    "silent-a rank", "raised-a rank", "killed-the rank that holds the store", "exited-a rank"
)
def test_all_others_raise_soon_and_name_the_rank(fork: Any, fault: str, odd: int) -> None:
    others = set(range(N)) - {odd}
    found = fork(train, fault, odd).wait(others)
    within_s = 1.0 + (LIMIT_S if fault == "silent" else 0.0)
    for done, kind, who, seconds, text in found.values():
        assert (done, kind, who) == (AT, fault, odd), text
        assert seconds < within_s, text
        assert f"rank {odd}" in text
        assert "fix: " in text


def told_by(fault: str) -> Any:
    """All that the error of another rank says, where one rank fails in the loss of a step."""
    groups, rank = grouped(), int(os.environ["RANK"])

    def loss(model: Any, x: Any) -> Any:
        found = model(x).square().mean()
        if trainer.state.step == 1 and rank == 2:
            fail(fault)
        return found

    model = torch.nn.Linear(3, 3)
    trainer = mf.Trainer(model, mf.optim.sgd(0.1), groups, loss=loss, live_bytes=0)
    try:
        for _ in range(3):
            trainer.step(torch.ones(2, 3))
    except mf.errors.PeerFailed as error:
        return vars(error)
    return {}


@pytest.mark.parametrize("fault", ["raised", "interrupted"])
def test_an_error_says_all_that_the_rank_knew(fork: Any, fault: str) -> None:
    name = {"raised": "KeyError", "interrupted": "KeyboardInterrupt"}[fault]
    for found in fork(told_by, fault).wait({0, 1, 3}).values():
        trace, leaf = found.pop("remote_traceback"), found.pop("leaf")
        assert "fetch of bucket 0" in found.pop("operation")
        assert found == {"rank": 2, "kind": fault, "step": 2}
        assert "in loss" in trace
        assert name in trace
        assert "weight" in leaf


def elsewhere() -> Any:
    """As if each rank were on a host of its own."""
    own = Process.own()
    setattr(Process, "own", lambda: Process("", own.pid, own.started))  # noqa: B010
    return train("killed", 2)


def test_a_rank_of_another_host_is_named_once_it_is_silent_for_the_limit(fork: Any) -> None:
    for done, kind, who, seconds, text in fork(elsewhere).wait({0, 1, 3}).values():
        assert (done, kind, who) == (AT, "silent", 2), text
        assert LIMIT_S - 0.5 < seconds < LIMIT_S + 1.0


@pytest.mark.parametrize("alive", [True, False])
def test_only_a_process_that_has_ended_was_killed(alive: bool) -> None:
    """However long it was silent before ranks meet; and its next silence is found again."""
    watching: Any = Monitor()
    own, asked = Process.own(), list[Any]()
    child = subprocess.Popen(["sleep", "30"])
    time.sleep(0.2)  # until it sleeps
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    names = {1: f"{own.host} {child.pid} {started}", 2: "elsewhere 7 1"}
    watching._own, watching._ask = own, asked.append
    life = mf.groups.GroupState((0, 1, 2), 0, "groups", heartbeat_s=LIMIT_S)
    watching._lives[life], beats = Journal(life.key), {r: f"1 open {names[r]}" for r in names}
    try:
        for _ in range(12):
            watching._judge(beats, 0.25)
        assert len(asked) == 2, "both are silent"
        assert watching._listen(life)
        if not alive:
            child.kill()
            child.wait()
        watching.name(life, "again", names)
        assert set(life.standing) == (set() if alive else {1})
        for how in ({}, names):
            assert watching._ended_of(how or dict.fromkeys(names, "")) == life.standing
        del asked[:]
        for _ in range(4):
            watching._judge(beats, 0.25)
        assert not asked
        for _ in range(4):
            watching._judge(beats, 0.25)
        assert len(asked) == 1 + alive
    finally:
        child.kill()
        child.wait()


def thawed(pause_s: float) -> Any:
    """A rank is stopped until the others have failed; they meet again once it goes on."""
    groups, errors = grouped(), []
    shards = mf.shard({"w": torch.ones(8)}, groups)
    rank, began = int(os.environ["RANK"]), time.monotonic()
    while time.monotonic() < began + 12.0:
        try:
            mf.gather(shards, groups)
            mf.reduce_grads({"w": torch.ones(8)}, groups, like=shards)
            if errors:
                break
            time.sleep(0.01)
        except MicsError as error:
            errors.append(f"{type(error).__name__}: {error}")
            if len(errors) > 1:
                break
            time.sleep(pause_s * (rank > 0))  # no sign of life where the store was lost
            groups = mf.reset(groups)
    return errors


@pytest.mark.parametrize("pause_s", [0.0, 3 * LIMIT_S], ids=["at once", "later"])
@pytest.mark.parametrize("odd", [2, 0], ids=["a rank", "the rank that holds the store"])
def test_silence_before_a_meeting_means_nothing_after_it(
    fork: Any, odd: int, pause_s: float
) -> None:
    started = fork(thawed, pause_s)
    time.sleep(1.5)
    os.kill(started.pids[odd], signal.SIGSTOP)
    time.sleep(2 * LIMIT_S)
    os.kill(started.pids[odd], signal.SIGCONT)
    for rank, errors in started.wait(set(range(N))).items():
        assert len(errors) == 1, (rank, errors)
        assert f"rank {odd}" in errors[0] or rank == odd, (rank, errors)


@pytest.mark.parametrize("fault", ["late", "holds its interpreter"])
def test_a_rank_that_is_late_is_no_alarm(fork: Any, fault: str) -> None:
    found = fork(train, fault, 2).wait(set(range(N)))
    assert {tuple(each) for each in found.values()} == {(STEPS, "", None, 0.0, "")}


def stalled(how: str) -> Any:
    """A rank that lives and makes no call; what the others raise, and of what they are warned."""
    groups, rank = grouped(heartbeat_s=1.0, timeout_s=4.0), int(os.environ["RANK"])
    shards, warned = mf.shard({"w": torch.ones(8)}, groups), logging.StreamHandler(io.StringIO())
    LOG.addHandler(warned)
    for k in range(AT):
        began = time.monotonic()
        try:
            if k == AT - 1 and rank == 2:
                stuck_here(how)
            mf.gather(shards, groups)
            mf.reduce_grads({"w": torch.ones(8)}, groups, like=shards)
        except MicsError as error:
            took_s = time.monotonic() - began
            kind, who = getattr(error, "kind", type(error).__name__), getattr(error, "rank", None)
            time.sleep(10.0 if rank == 0 else 0.0)  # it holds the store
            return kind, who, took_s, str(error), warned.stream.getvalue()
    return "", None, 0.0, "", warned.stream.getvalue()


def stuck_here(how: str) -> None:
    if how == "debugger":
        read, write = os.pipe()
        threading.Timer(12.0, os.close, [write]).start()
        with suppress(BdbQuit), os.fdopen(read) as keys, open(os.devnull, "w") as screen:
            pdb.Pdb(stdin=keys, stdout=screen, nosigint=True).set_trace()
            sys.settrace(None)
    else:
        time.sleep({"hangs": 12.0, "slow": 2.8}[how])


@pytest.mark.parametrize("how", ["hangs", "debugger", "slow"])
@pytest.mark.short("hangs", "slow")
def test_a_rank_that_makes_no_call_is_named_and_one_that_is_slow_goes_on(
    fork: Any, how: str
) -> None:
    found = fork(stalled, how).wait(set(range(N)))
    for rank, (kind, who, seconds, text, warned) in found.items():
        assert ("rank 2 is behind: it lives, but makes no call" in warned) is (rank == 0), warned
        if how == "slow":  # for longer than `heartbeat_s`, but not than `timeout_s`
            assert not kind, text
            continue
        assert (kind, who) == ("stalled", 2), (rank, text)
        assert "in stuck_here" in text
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
    is_done, until = pending.Collective.done, time.monotonic() + seconds

    def done(self: Any) -> bool:
        return time.monotonic() > until and is_done(self)

    pending.Collective.done = done  # pyright: ignore[reportAttributeAccessIssue]


def test_a_step_that_the_culprit_has_done_is_done_by_all(fork: Any) -> None:
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


def test_ctrl_c_is_heard_while_the_store_is_stopped(fork: Any) -> None:
    found = fork(stopped_store, n=2).wait({1}, 10.0)
    assert found[1] < 1.5


def caught(kind: str, both: bool) -> Any:
    """An error in a step that a rank catches at once, or that all ranks do, a little apart."""
    groups, rank = grouped(), int(os.environ["RANK"])
    raises = iter([both or rank == 0])

    def loss(model: Any, x: Any) -> Any:
        if next(raises, False):
            raise ValueError("in a step")
        return model(x).square().mean()

    trainer = mf.Trainer(torch.nn.Linear(4, 4), mf.optim.sgd(0.1), groups, loss=loss)
    try:
        trainer.step(torch.ones(2, 4))
    except ValueError:
        time.sleep(0.4 * rank if kind == "apart" else 0)
    for _ in range(2):
        trainer.step(torch.ones(2, 4))
    return trainer.state.step


@pytest.mark.parametrize("kind", ["at once", "apart"])
def test_an_error_that_all_ranks_share_leaves_the_groups_as_they_were(fork: Any, kind: str) -> None:
    assert set(fork(caught, kind, True).wait(set(range(N))).values()) == {2}


def start_without(how: str) -> Any:
    """One rank never comes to the start, or dies in it."""
    rank, began = int(os.environ["RANK"]), time.monotonic()
    if how == "absent" and rank == 1:
        return ""
    try:
        mf.init_distributed(device="cpu", timeout_s=1.5)
        if how == "no groups":
            if rank == 1:
                time.sleep(4)
                return ""
            mf.make_groups(2, timeout_s=1.5)
        if rank == 1:
            monitor.join(mf.groups.GroupState((0, 1), 1), 1.0)
            os._exit(1)
        mf.make_groups(2, timeout_s=20.0)
    except MicsError as error:
        return type(error).__name__, f"{error}", time.monotonic() - began
    return "no error"


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("absent", "CollectiveError", "init_distributed: rank 1 did not call it within 1.5"),
        ("no groups", "CollectiveError", "make_groups: rank 1 did not call it within 1.5"),
        ("dies", "PeerFailed", "rank 1 is gone"),
    ],
)
def test_a_start_is_bounded_and_names_who_is_missing(
    fork: Any, how: str, kind: str, text: str
) -> None:
    name, said, seconds = fork(start_without, how, n=2, served=False).wait({0})[0]
    assert name == kind, said
    assert text in said
    assert seconds < 15, "of 1.5, and not what is usual"


def killed_at(place: str) -> Any:
    """Rank 2 is killed at some point of the start; what the others raise."""
    rank, count = int(os.environ["RANK"]), iter(range(9))

    def die(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def third(*args: Any, **options: Any) -> Any:
        return die() if next(count) == 2 else new_group(*args, **options)

    new_group = _torch.new_group
    plants = {
        "before it has met the others": (distributed, "meet", die),
        "before it connects": (dist, "init_process_group", die),
        "before groups": (make, "meet_once", die),
        "before the first group": (_torch, "new_group", die),
        "before the third group": (_torch, "new_group", third),
    }
    if rank == 2:
        setattr(*plants[place])
    try:
        mf.init_distributed(device="cpu", timeout_s=2.0)
        mf.make_groups(2, timeout_s=2.0, heartbeat_s=1.0)
    except MicsError as error:
        if rank == 0:
            time.sleep(1.0)  # it holds the store
        return type(error).__name__, str(error)
    return "no error"


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("before it has met the others", "CollectiveError"),
        ("before it connects", "PeerFailed"),
        ("before groups", "PeerFailed"),
        ("before the first group", "PeerFailed"),
        ("before the third group", "PeerFailed"),
    ],
)
def test_a_rank_that_is_killed_at_the_start_is_the_one_that_is_named(
    fork: Any, place: str, kind: str
) -> None:
    for name, text in fork(killed_at, place, served=False).wait({0, 1, 3}).values():
        assert name == kind, text
        assert "rank 2 " in text.splitlines()[0]
        assert not re.search("rank [013]", text.splitlines()[0])


def unanswered() -> Any:
    began = time.monotonic()
    try:
        mf.init_distributed(device="cpu", timeout_s=1.0)
    except MicsError as error:
        return type(error).__name__, f"{error}", time.monotonic() - began
    return "no error"


def test_a_store_that_nobody_holds_is_named_with_its_address(fork: Any) -> None:
    started = fork(lambda: unanswered() if os.environ["RANK"] == "1" else "", n=2, served=False)
    name, said, seconds = started.wait({1})[1]
    assert name == "CollectiveError"
    assert f"127.0.0.1:{started.port}" in said
    assert seconds < 15, "of 1, and not what is usual"


def test_frames_of_a_thread_that_runs_are_read_without_a_crash() -> None:
    """A walk through frame objects of a running thread ended the process now and then."""
    found, ended = [], time.monotonic() + 1.0

    def read() -> None:
        while time.monotonic() < ended:
            found.append(main_thread())

    def deep(n: int) -> int:
        return sum(deep(n - 1) for _ in range(2)) if n else 1

    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        deep(8)
    assert len(found) > 10
    assert all(frames and at.startswith(f"at {frames[0]}") for at, frames in found)
    assert any("in deep" in frames[0] for _, frames in found)
