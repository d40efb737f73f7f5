"""Ranks that a notebook drives: what cells show, and that no fault makes one hang."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from children import left_of, running
from jobs import free_port
from sockets import HAS_LIST, listening

import mics_fn as mf
from mics_fn.notebook import cluster as kernel

ROOT = Path(__file__).parents[2]
LONGEST_S = 10.0  # that any cell which cannot go on may take
SHARDED = "s = mf.shard({'w': torch.arange(6.0)}, groups)"


@pytest.fixture(scope="module")
def clusters() -> Iterator[list[mf.notebook.Cluster]]:
    started: list[mf.notebook.Cluster] = []
    yield started
    for cluster in started:
        cluster.stop()


@pytest.fixture
def cluster(clusters: list[mf.notebook.Cluster]) -> mf.notebook.Cluster:
    """The one of this module; a new one after a test that has started its own, which ends it."""
    if not clusters or clusters[-1].stopped:
        clusters.append(mf.notebook.start(2, device="cpu", timeout_s=100))
        clusters[-1].cell(SHARDED)
    return clusters[-1]


def failing(cluster: mf.notebook.Cluster, code: str, ranks: list[int] | None = None) -> str:
    """The error of a cell, which must come in time."""
    begun = time.monotonic()
    with pytest.raises(mf.errors.CellError) as raised:
        cluster.cell(code, ranks)
    assert time.monotonic() - begun < LONGEST_S
    return str(raised.value)


def typed(source: str) -> Any:
    """A function as a notebook defines it: the names that it uses are those of the ranks."""
    return eval(source, {"__name__": "__main__"})


def gathers(cluster: mf.notebook.Cluster) -> bool:
    """Whether the next cell works."""
    cluster.cell("full = mf.gather(s, groups)['w']")
    return all(torch.equal(full, torch.arange(6.0)) for full in cluster.pull("full"))


@pytest.mark.thorough
def test_equal_output_is_shown_once_and_that_of_a_long_cell_streams(cluster, capsys):
    cluster.cell("print('same'); x = rank + 1")
    cluster.cell("print(x)\nx == 3")
    assert capsys.readouterr().out == "same\nrank 0: 1\nrank 1: 2\nFalse\n"
    cluster.cell("import warnings\nwarnings.warn('beware')")
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("UserWarning: beware") == 1
    seen: list[str] = []
    threading.Timer(1.5, lambda: seen.append(capsys.readouterr().out)).start()
    cluster.cell("import time\nprint('early')\ntime.sleep(2.5)\nprint('late')")
    assert seen == ["early\n"]
    assert capsys.readouterr().out == "late\n"


def test_values_go_there_and_back(cluster):
    table = torch.randn(3, 4)
    cluster.push(table=table, factor=2, twice=typed("lambda x: factor * x"))
    assert cluster.run(typed("lambda: twice(rank)")) == [0, 2]
    assert torch.equal(cluster.pull("table", rank=1), table)
    assert cluster.pull("rank") == [0, 1]
    cluster.push(order={"b": 1, "a": {"d": 2, "c": 3}})
    assert [str(x) for x in cluster.pull("order")] == ["{'b': 1, 'a': {'d': 2, 'c': 3}}"] * 2
    assert cluster.run(typed("lambda x: x * factor + rank"), 5) == [10, 11]
    assert cluster.run(torch.square, table, ranks=[1])[0].equal(table.square())


def test_an_error_of_all_ranks_is_shown_once(cluster):
    text = failing(cluster, "print(made_later)")
    assert text.startswith("ranks 0, 1:\n")
    assert text.count("NameError: name 'made_later' is not defined") == 1
    inside = failing(cluster, "mf.gather(3, groups)")
    assert "Cell In" in inside
    assert "mics_fn/" not in inside  # frames of the library say nothing to a user
    assert gathers(cluster)


@pytest.mark.thorough
def test_the_error_of_one_rank_comes_first_and_names_what_to_do(cluster):
    text = failing(cluster, "if rank == 1:\n    raise ValueError('mine')\nmf.gather(s, groups)")
    assert text.startswith("rank 1:\n")
    assert "rank 0: PeerFailed: rank 1 failed: ValueError: mine" in text
    assert text.endswith("fix: cluster.reset() makes new groups; states stay as they are")
    cluster.reset()
    fails = typed("lambda only: {}['mine'] if rank == only else mf.gather(s, groups)")
    with pytest.raises(mf.errors.CellError) as raised:
        cluster.run(fails, 0)
    assert raised.value.errors[0] == "KeyError: 'mine'"
    assert raised.value.errors[1].startswith("PeerFailed: rank 0 failed")
    cluster.reset()
    assert gathers(cluster)


def test_a_collective_that_not_all_ranks_call_ends(cluster):
    text = failing(cluster, "mf.gather(s, groups)", [0])
    assert "PeerFailed: rank 1 failed: CellEnded: it has ended this cell" in text
    cluster.reset()
    assert gathers(cluster)


@pytest.mark.thorough
def test_a_cell_on_one_rank_may_take_its_time_and_the_next_may_be_uneven(cluster):
    cluster.cell("import time\ntime.sleep(1.5)", [0])  # the others have told that they are idle
    cluster.cell("time = __import__('time')\ntime.sleep(rank)\nmf.gather(s, groups)")
    assert gathers(cluster)


def test_an_interrupt_ends_the_cell_on_all_ranks(cluster):
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="ranks 0, 1:"):
        cluster.cell("while True:\n    mf.gather(s, groups)")
    assert time.monotonic() - begun < LONGEST_S
    cluster.reset()
    threading.Timer(0.5, cluster.interrupt).start()
    assert "KeyboardInterrupt" in failing(cluster, "while True:\n    pass")
    cluster.reset()
    assert gathers(cluster)


def test_ranks_that_do_not_exist_are_refused(cluster):
    wrong: list[Any] = [[2], [], "0"]
    for ranks in wrong:
        with pytest.raises(mf.errors.GroupsError, match=r"of a cluster of 2"):
            cluster.cell("1", ranks)
    for line in ("0 x", "-1", "1-0", "0-99999999999"):  # and none of them takes all ranks
        with pytest.raises(mf.errors.GroupsError, match=r"is not a rank of a cluster of 2"):
            kernel.ranks_in(line, 2)


def test_a_cell_does_not_end_its_rank_and_does_not_await(cluster):
    assert "SystemExit" in failing(cluster, "raise SystemExit")
    assert "SyntaxError: 'await' outside function" in failing(cluster, "await None")
    assert gathers(cluster)


def test_a_cell_before_start_says_what_to_call(monkeypatch):
    known: list[tuple[Any, ...]] = []
    shell = SimpleNamespace(register_magic_function=lambda *given: known.append(given))
    monkeypatch.setattr(kernel, "shell_here", lambda: shell)
    monkeypatch.setattr(kernel, "current", None)
    kernel.offer_magic()  # as the import of this library does
    [(run_cell, *names)] = known
    assert names == ["cell", "ranks"]
    with pytest.raises(mf.errors.GroupsError) as raised:
        run_cell("", "1")
    text = "GroupsError: %%ranks: no cluster was started\n  fix: cluster = mf.notebook.start()"
    shown: Any = raised.value
    assert shown._render_traceback_() == [text]  # IPython shows this, and no frames


@pytest.mark.thorough
def test_a_rank_that_is_killed_is_named_and_restart_goes_on(cluster, capsys):
    kill = "import os\nif rank == 1:\n    os.kill(os.getpid(), 9)\nmf.gather(s, groups)"
    text = failing(cluster, kill)
    assert text.startswith("rank 1: gone: killed by SIGKILL\nrank 0: PeerFailed: rank 1 is gone")
    assert "rank 1: killed by SIGKILL; restart()" in repr(cluster)
    with pytest.raises(mf.errors.GroupsError, match=r"cluster\.restart\(\)"):
        cluster.cell("x = 1")
    cluster.cell("alive = True", [0])
    cluster.restart()
    assert "run those cells again" in capsys.readouterr().out
    assert "all alive" in repr(cluster)
    assert "NameError" in failing(cluster, "s")
    cluster.cell(SHARDED)
    assert gathers(cluster)


@pytest.mark.thorough
def test_a_rank_that_is_stuck_inside_torch_does_not_hold_the_notebook(cluster, monkeypatch):
    monkeypatch.setattr(kernel, "_GRACE_S", 0.5)
    monkeypatch.setattr(kernel, "_REACT_S", 0.5)
    stuck = "if rank == 1:\n    raise ValueError\ntorch.distributed.all_reduce(torch.ones(3))"
    text = failing(cluster, stuck)
    assert "rank 0: busy: does not react to an interrupt" in text
    assert "rank 0: busy" in repr(cluster)
    with pytest.raises(mf.errors.GroupsError, match="rank 0 still at an earlier cell"):
        cluster.cell("1")
    cluster.restart()
    cluster.cell(SHARDED)
    assert gathers(cluster)


BAR = """
model, loss = torch.nn.Linear(1, 1), lambda model, x: model(x).sum()
trainer = mf.Trainer(model, mf.optim.sgd(0.1), groups, loss=loss)
found = trainer.fit([torch.ones(2, 1)], 3, log_every=3)
"""


def test_a_bar_of_fit_is_shown_once(cluster, capsys):
    """That of the first rank, which writes it to the standard error output."""
    pytest.importorskip("tqdm")
    cluster.cell(BAR)
    found = capsys.readouterr()
    assert (found.out, found.err.count("3/3 ["), found.err.count("loss ")) == ("", 1, 1)
    assert found.err.rstrip().rpartition("\r")[2].startswith("100%|"), found.err


def processes_of(cluster: mf.notebook.Cluster) -> list[int]:
    """The processes that were started for a cluster here, and all that they have started."""
    own, found = {f"{process.pid}" for process in (cluster._controller, *cluster._ranks)}, []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            if fields[3] in own and fields[0] != "Z":  # its session
                found.append(int(file.parent.name))
    return found


@pytest.mark.skipif(not HAS_LIST, reason="needs /proc/net/tcp")
def test_a_cluster_listens_on_loopback_alone(cluster):
    pids = [os.getpid(), *processes_of(cluster)]
    assert set(cluster.run(os.getpid)) <= set(pids)
    assert {address for pid in pids for address in listening(pid)} == {"127.0.0.1"}


def test_a_cluster_that_was_stopped_says_so(cluster):  # the last one that uses it
    pids = [*cluster.run(os.getpid), *processes_of(cluster)]
    assert len(set(pids)) >= 4
    cluster.stop()
    assert left_of(pids, LONGEST_S) == []
    cluster.stop()
    assert repr(cluster) == "Cluster(2 ranks, stopped)"
    with pytest.raises(mf.errors.GroupsError, match="was stopped"):
        cluster.cell("1")


KERNEL = """
import os, time
import mics_fn as mf
cluster = mf.notebook.start(1, device="cpu", timeout_s=100)
from multiprocessing.forkserver import _forkserver as forks
print(cluster.run(os.getpid)[0], cluster._controller.pid, forks._forkserver_pid)
print(cluster._folder, flush=True)
time.sleep(100)
"""


@pytest.mark.thorough
def test_nothing_is_left_when_the_kernel_is_killed():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KERNEL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as kernel:
        assert kernel.stdout is not None
        pids = [int(pid) for pid in kernel.stdout.readline().split()]
        folder = Path(kernel.stdout.readline().strip())
        assert all(map(running, pids))
        kernel.kill()
    assert left_of(pids, LONGEST_S) == []
    assert not folder.exists()


ENGINE = """
import torch, mics_fn as mf
device = mf.init_distributed(device="cpu", timeout_s=30)
groups = mf.make_groups(device=device, timeout_s=5)
s = mf.shard({"w": torch.arange(6.0)}, groups)
"""


@pytest.mark.thorough
@pytest.mark.limit(200)
def test_engines_of_ipyparallel_run_cells_as_the_page_says(tmp_path):
    """As on several machines: a launcher starts them, and each is a rank by its variables."""
    import ipyparallel

    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path)}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    files, tools = tmp_path / "shared/security", Path(sys.executable).parent
    engine, client = files / "ipcontroller-engine.json", files / "ipcontroller-client.json"
    controller = [f"{tools}/ipcontroller", "--ip=127.0.0.1", f"--profile-dir={tmp_path}/shared"]
    launcher = [f"{tools}/torchrun", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    launcher += [f"--master-port={free_port(0)}", "--no-python", f"{tools}/ipengine"]
    started, deadline = [subprocess.Popen(controller, env=env)], time.monotonic() + 60
    try:
        while not all(x.exists() and x.read_text().endswith("}") for x in (engine, client)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        started.append(subprocess.Popen([*launcher, f"--file={engine}"], env=env))
        with ipyparallel.Client(str(client)) as every:
            every.wait_for_engines(2, timeout=60)
            ranks = every[:]
            ranks.execute(ENGINE).get(timeout=60)
            failing = "if groups.rank == 1:\n    raise ValueError\nmf.gather(s, groups)"
            with pytest.raises(ipyparallel.CompositeError) as raised:
                ranks.execute(failing).get(timeout=30)
            kinds = {error[0] for error in raised.value.elist} - {"PeerFailed", "CollectiveError"}
            assert kinds == {"ValueError"}
            ranks.execute("groups = mf.reset(groups)\nfull = mf.gather(s, groups)['w']").get(30)
            assert all(torch.equal(full, torch.arange(6.0)) for full in ranks["full"])
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(20)
