"""The machines of a cluster as the kernel sees them: one process on each, which forks its ranks."""

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener, Pipe
from pathlib import Path
from typing import Any

from mics_fn.errors import CollectiveTimeoutError, GroupsError, message, name_ranks

BOOT = Path(__file__).with_name("boot.py")
_LOOK_S = 0.02
_PATIENCE_S = 5.0  # for a process that was told to end


class Machine:
    """One machine: the connection to its process, and which ranks are there.

    Args:
      connection: to the process that forks ranks.
      process: that process, if it was started from here.
      place: a folder of that machine for files; "" lets it make one.
    """

    def __init__(self, connection: Any, process: Any = None, place: str = "") -> None:
        self.connection, self.process, self.place = connection, process, place
        self.ranks: list[int] = []
        self.lost = False  # whether its process ended, or the connection to it

    def tell(self, order: Mapping[str, Any]) -> None:
        """Give an order, unless the machine is lost."""
        try:
            self.connection.send_bytes(json.dumps(order).encode())
        except OSError:
            self.lost = True

    def heard(self) -> list[dict[str, Any]]:
        """What it has said since; never waits."""
        said = []
        try:
            while not self.lost and self.connection.poll():
                said.append(json.loads(self.connection.recv_bytes()))
        except (EOFError, OSError):
            self.lost = True
        return said


class Machines:
    """All machines of a cluster, this one first; their ranks are numbered in this order.

    Args:
      folder: the folder of the cluster on this machine, which nobody else can read.
      each: number of ranks on each machine.
    """

    def __init__(self, folder: str, each: int) -> None:
        self._folder, self._each = folder, each
        self._all: list[Machine] = []
        self._started: list[subprocess.Popen] = []
        self.ended: dict[int, str] = {}  # how ranks ended, by rank
        self._killed = set[int]()
        self._listener: Listener | None = None

    def start_here(self, listen: str, encrypted: bool) -> None:
        """Start ipyparallel's controller, and the process that forks the ranks of this machine."""
        self._boot("controller", listen=listen, encrypted=encrypted)
        ours, theirs = Pipe()
        process = self._boot("node", pass_fds=[theirs.fileno()], descriptor=theirs.fileno())
        theirs.close()
        self._add(Machine(ours, process, self._folder))

    def _boot(self, work: str, pass_fds: Sequence[int] = (), **told: Any) -> subprocess.Popen:
        """Start a process of this machine, which the Ctrl-C of a terminal does not reach."""
        told |= {"work": work, "parent": os.getpid(), "path": sys.path, "folder": self._folder}
        with open(f"{self._folder}/{work}.txt", "wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(BOOT), json.dumps(told)],
                pass_fds=pass_fds,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "IPYTHONDIR": f"{self._folder}/ipython"},
            )
        self._started.append(process)
        return process

    def listen(self, address: str) -> str:
        """Let other machines join; returns the line to run on them."""
        key = os.urandom(32)
        self._listener = Listener((address, 0), authkey=key)
        _, port = self._listener.address
        told = json.dumps([address, port, base64.b64encode(key).decode()])
        secret = base64.urlsafe_b64encode(told.encode()).decode()
        return f"MICS_FN_NOTEBOOK={secret} python -m mics_fn.notebook"

    def wait_for_others(self, count: int, deadline: float) -> None:
        """Wait until so many other machines have joined.

        Raises:
          CollectiveTimeoutError: they did not in time.
        """
        listener = self._listener
        if listener is None:
            return
        inner: Any = listener._listener  # pyright: ignore[reportAttributeAccessIssue]
        inner._socket.settimeout(0.2)  # so that Ctrl-C is heard, and the time limit kept
        while len(self._all) < count + 1:
            with contextlib.suppress(TimeoutError, OSError, EOFError):
                self._add(Machine(_kept_alive(listener.accept())))
            if time.monotonic() > deadline:
                what = f"notebook.start: {len(self._all)} of {count + 1} machines are there"
                fix = "run the line that was printed on each other machine, or pass timeout_s="
                raise CollectiveTimeoutError(message(what, fix=fix))
        listener.close()
        self._listener = None

    def _add(self, machine: Machine) -> None:
        first = len(self._all) * self._each
        machine.ranks = list(range(first, first + self._each))
        self._all.append(machine)

    def wait_for_controller(self, deadline: float) -> tuple[str, dict[str, Any]]:
        """The file for clients of ipyparallel's controller, and what engines need to know."""
        folder = Path(self._folder) / "security"
        files = folder / "ipcontroller-client.json", folder / "ipcontroller-engine.json"
        while not all(file.exists() and file.read_text().endswith("}") for file in files):
            self._check(deadline, "ipyparallel's controller")
        return str(files[0]), json.loads(files[1].read_text())

    def start(
        self,
        ranks: Sequence[int],
        told: Callable[[int, int], Mapping[str, Any]],
        connection: Mapping[str, Any],
    ) -> None:
        """Fork ranks on their machines.

        Args:
          ranks: which.
          told: what a rank needs, by rank and its number on its machine.
          connection: what engines need to reach ipyparallel's controller.
        """
        for machine in self._all:
            mine = {
                rank: told(rank, local) for local, rank in enumerate(machine.ranks) if rank in ranks
            }
            order = {"do": "start", "ranks": mine, "connection": connection}
            machine.tell(order | {"folder": machine.place})
        for rank in ranks:
            self.ended.pop(rank, None)
            self._killed.discard(rank)

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks."""
        for machine in self._all:
            machine.tell({"do": "signal", "ranks": _both(ranks, machine), "number": number})

    def kill(self, ranks: Sequence[int]) -> None:
        """End ranks, and wait until they are gone."""
        for machine in self._all:
            machine.tell({"do": "kill", "ranks": _both(ranks, machine)})
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            self.look()
            if all(rank in self._killed or rank in self.ended for rank in ranks):
                return
            time.sleep(_LOOK_S)

    def look(self) -> dict[int, str]:
        """How ranks ended that did so since the start, by rank; never waits."""
        for machine in self._all:
            for said in machine.heard():
                if "ended" in said:
                    self.ended[said["ended"]] = _ending(said["code"], said["output"])
                self._killed.update(said.get("killed", ()))
            if machine.lost:
                for rank in machine.ranks:
                    self.ended.setdefault(rank, "its machine is lost, or the process that ran it")
        return self.ended

    def check_start(self, deadline: float, what: str) -> None:
        """Raise if some rank ended, or if time is up; then wait for a moment.

        Raises:
          GroupsError: a rank or a process ended.
          CollectiveTimeoutError: time is up.
        """
        for rank, how in self.look().items():
            fix = "look at what it says, and start again"
            raise GroupsError(message(f"notebook.start: rank {rank} ended", [how], fix))
        self._check(deadline, what)

    def _check(self, deadline: float, what: str) -> None:
        for process in self._started:
            if process.poll() is not None:
                text = "notebook.start: a process ended that ranks need"
                raise GroupsError(message(text, self._printed(), "look at what it says"))
        if time.monotonic() > deadline:
            text = f"notebook.start: {what} took too long"
            raise CollectiveTimeoutError(message(text, self._printed(), "pass timeout_s="))
        time.sleep(_LOOK_S)

    def _printed(self) -> list[str]:
        """The last lines that the processes of this machine printed."""
        files = [Path(self._folder) / f"{work}.txt" for work in ("controller", "node")]
        return [line for file in files for line in file.read_text().splitlines()[-4:]]

    def stop(self) -> None:
        """End all processes."""
        for machine in self._all:
            machine.connection.close()  # the process at its other end ends with it
        if self._listener is not None:
            self._listener.close()
        for process in self._started:
            # Its group is its session, with all that it forked.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _both(ranks: Sequence[int], machine: Machine) -> list[int]:
    return [rank for rank in ranks if rank in machine.ranks]


def _ending(code: int, output: str) -> str:
    """How a process ended, in words."""
    how = f"exited with code {code}"
    if code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    last = output.strip().splitlines()[-4:]
    return "\n".join([how, *last])


def _kept_alive(connection: Connection) -> Connection:
    """A connection that notices within a minute that the machine at its other end is gone."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def gone(ended: Mapping[int, str]) -> str:
    """Which ranks are gone, and how, in one line."""
    by_how: dict[str, list[int]] = {}
    for rank, how in sorted(ended.items()):
        by_how.setdefault(how.partition("\n")[0], []).append(rank)
    return "; ".join(f"{name_ranks(ranks)}: {how}" for how, ranks in by_how.items())
