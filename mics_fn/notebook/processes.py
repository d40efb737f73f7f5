"""The processes of a cluster as the kernel sees them: two, of which one forks the ranks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from mics_fn.errors import CollectiveTimeoutError, GroupsError, message, name_ranks

BOOT = Path(__file__).with_name("boot.py")
_LOOK_S = 0.02
_PATIENCE_S = 5.0  # for a process that was told to end


class Processes:
    """ipyparallel's controller, the process that forks ranks, and the ranks.

    Args:
      folder: the folder of the cluster, which nobody else can read.
      size: number of ranks.
    """

    def __init__(self, folder: str, size: int) -> None:
        self._folder, self._size = folder, size
        self._started: list[subprocess.Popen] = []
        self._node, self._theirs = Pipe()  # to the process that forks ranks
        self._lost = False  # whether that process ended
        self.ended: dict[int, str] = {}  # how ranks ended, by rank
        self._killed = set[int]()

    def boot(self) -> None:
        """Start both processes."""
        self._boot("controller")
        descriptor = self._theirs.fileno()
        self._boot("node", pass_fds=[descriptor], descriptor=descriptor)
        self._theirs.close()

    def _boot(self, work: str, pass_fds: Sequence[int] = (), **told: Any) -> None:
        """Start a process, which the Ctrl-C of a terminal does not reach."""
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

    def wait_for_controller(self, deadline: float) -> tuple[str, dict[str, Any]]:
        """The file for clients of ipyparallel's controller, and what engines need to know."""
        folder = Path(self._folder) / "security"
        files = folder / "ipcontroller-client.json", folder / "ipcontroller-engine.json"
        while not all(file.exists() and file.read_text().endswith("}") for file in files):
            self._check(deadline, "ipyparallel's controller")
        return str(files[0]), json.loads(files[1].read_text())

    def start(
        self, told: Callable[[int], Mapping[str, Any]], connection: Mapping[str, Any]
    ) -> None:
        """Fork all ranks.

        Args:
          told: what a rank needs, by rank.
          connection: what engines need to reach ipyparallel's controller.
        """
        ranks = {rank: told(rank) for rank in range(self._size)}
        self._tell({"do": "start", "ranks": ranks, "connection": connection})
        self.ended.clear()
        self._killed.clear()

    def signal(self, ranks: Sequence[int], number: int) -> None:
        """Send a signal to ranks."""
        self._tell({"do": "signal", "ranks": list(ranks), "number": number})

    def kill(self) -> None:
        """End all ranks, and wait until they are gone."""
        ranks = list(range(self._size))
        self._tell({"do": "kill", "ranks": ranks})
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            self.look()
            if all(rank in self._killed or rank in self.ended for rank in ranks):
                return
            time.sleep(_LOOK_S)

    def _tell(self, order: Mapping[str, Any]) -> None:
        """Give an order to the process that forks ranks, unless it ended."""
        try:
            self._node.send_bytes(json.dumps(order).encode())
        except OSError:
            self._lost = True

    def look(self) -> dict[int, str]:
        """How ranks ended that did so since the start, by rank; never waits."""
        try:
            while not self._lost and self._node.poll():
                said = json.loads(self._node.recv_bytes())
                if "ended" in said:
                    self.ended[said["ended"]] = _ending(said["code"], said["output"])
                self._killed.update(said.get("killed", ()))
        except (EOFError, OSError):
            self._lost = True
        if self._lost:
            for rank in range(self._size):
                self.ended.setdefault(rank, "the process that forked it ended")
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
        """The last lines that both processes printed."""
        files = [Path(self._folder) / f"{work}.txt" for work in ("controller", "node")]
        return [line for file in files for line in file.read_text().splitlines()[-4:]]

    def stop(self) -> None:
        """End all processes."""
        self._node.close()  # the process at its other end ends with it
        for process in self._started:
            # Its group is its session, with all that it forked.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ending(code: int, output: str) -> str:
    """How a process ended, in words."""
    how = f"exited with code {code}"
    if code < 0:
        how = f"killed by {signal.Signals(-code).name}"
    last = output.strip().splitlines()[-4:]
    return "\n".join([how, *last])


def gone(ended: Mapping[int, str]) -> str:
    """Which ranks are gone, and how, in one line."""
    by_how: dict[str, list[int]] = {}
    for rank, how in sorted(ended.items()):
        by_how.setdefault(how.partition("\n")[0], []).append(rank)
    return "; ".join(f"{name_ranks(ranks)}: {how}" for how, ranks in by_how.items())
