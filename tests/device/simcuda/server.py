"""A process that has imported torch with the simulated device, and runs calls on forked ranks.

Each request is run in a fork of this process, which imports `mics_fn` from the folder that the
request names, and forks the ranks itself. So no test sees the streams or the memory of another,
and copies of the package with a mistake in them need no process that imports torch anew.
"""

import importlib
import os
import pickle
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

_IMPORTED_ONCE = ("torch._dynamo", "torch.optim", "torch.distributed.fsdp", "optree")
TESTS = Path(__file__).parents[2]
REPOSITORY = TESTS.parent


class Request(NamedTuple):
    """A call of a function of `programs` or `apart` on n ranks."""

    root: str  # the folder that `mics_fn` is imported from
    name: str
    n: int
    args: tuple
    timeout_s: float


class Server:
    """The client's side: starts the process, and asks it."""

    def __init__(self) -> None:
        self._conn, theirs = Pipe()
        paths = [str(TESTS / "device"), str(TESTS / "support")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "simcuda.server", str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def run(
        self, name: str, n: int, *args: Any, root: Path = REPOSITORY, timeout_s: float = 90.0
    ) -> list[Any]:
        """The results of `<name>(*args)` by rank.

        Raises:
          RuntimeError: a rank raised, died or hung; with the text of the ranks' error.
        """
        self._conn.send(Request(str(root), name, n, args, timeout_s))
        if not self._conn.poll(timeout_s + 60.0):
            self.close()
            raise RuntimeError(f"{name}: the server of simulated ranks gives no answer")
        done, value = self._conn.recv()
        if not done:
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        self._conn.close()  # which ends the process
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(conn: Connection) -> None:
    """Answer requests until the client is gone."""
    importlib.import_module("simcuda.torch_cuda")  # before torch
    nccl, *_ = map(importlib.import_module, ("simcuda.nccl", *_IMPORTED_ONCE))
    nccl.join_default_group()
    while True:
        try:
            request = conn.recv()
        except EOFError:
            return
        child = os.fork()
        if not child:
            _answer(conn, request)
        _, status = os.waitpid(child, 0)
        if status:
            conn.send((False, f"{request.name}: its process ended with {status}"))


def _answer(conn: Connection, request: Request) -> None:
    sys.path.insert(0, request.root)
    try:
        ranks: Any = importlib.import_module("rank_pool")
        lending: Any = importlib.import_module("mics_fn.deferred.reduction")
        lending.LEAST_RING = 0  # the ring of a small model is short, too
        modules = [importlib.import_module(name) for name in ("programs", "apart", "stalled")]
        (function,) = (getattr(m, request.name) for m in modules if hasattr(m, request.name))
        call = (modules[0].on_device, request.n, function, *request.args)
        reply = True, ranks.run_ranks(*call, timeout_s=request.timeout_s, grace_s=3.0)
    except BaseException as error:
        reply = False, f"{type(error).__name__}: {error}"
    conn.send_bytes(pickle.dumps(reply))
    os._exit(0)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
