"""`Cluster`: the ranks of a notebook, and what a person asks of them."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from mics_fn import checks
from mics_fn.errors import CellError, message, name_ranks, rank_lines
from mics_fn.notebook import engine
from mics_fn.notebook.cells import Cell, Outcome
from mics_fn.notebook.folding import FOLLOWS, Refused, folded, plain
from mics_fn.notebook.processes import Processes, gone

_ASK_AGAIN_S = 0.3


class Places(NamedTuple):
    """What ranks are told at their start."""

    environment: Callable[[int], Mapping[str, str]]  # by rank
    begin: str  # as `engine.begin` reads it


class Cluster:
    """Ranks that a notebook drives; made by `start`.

    In cells that begin with `%%ranks`, all ranks run what the cell says; `%%ranks 0` and
    `%%ranks 0,2` are for some. What a cell defines is there in the next one. Output that is the
    same on all ranks is shown once. As a context manager it stops the ranks at its end.

    Args:
      size: number of ranks.
      processes: what forks and watches them.
      client: the client of ipyparallel.
      connection: what engines need to reach ipyparallel's controller.
      places: makes what ranks are told at a start, and the store that they meet in.
      folder: the folder for files of this cluster.
    """

    def __init__(
        self,
        size: int,
        processes: Processes,
        client: Any,
        connection: Mapping[str, Any],
        places: Callable[[], tuple[Places, Any]],
        folder: str,
    ) -> None:
        self.size = size
        self._processes, self._client, self._connection = processes, client, connection
        self._make_places, self._folder = places, folder
        self._places: Places | None = None
        self._store: Any = None  # which ranks meet in; it outlives each of them
        self._engines: dict[int, int] = {}  # ipyparallel's number of each rank
        self._count = 0  # engines so far
        self._busy: dict[int, Any] = {}  # what ranks were left with that did not react
        self._facts: dict[int, dict[str, str]] = {}
        self._owner = os.getpid()  # a fork of it ends nothing
        self.stopped = False

    # Cells and functions

    def cell(self, code: str, ranks: Sequence[int] | None = None) -> None:
        """Run code on ranks, as `%%ranks` does, and show what they print.

        Args:
          code: the text of a cell.
          ranks: which; None takes all.

        Communication: what the code sends.

        Raises:
          CellError: it failed on some ranks; each different error is shown once.
          GroupsError: some of these ranks are gone or busy.
        """
        checks.instance("Cluster.cell", "code", code, str, "the text of a cell")
        self._done(self._run(ranks, lambda view: view.execute(code, silent=False, block=False)))

    def run(self, fn: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list:
        """Call a function on ranks, and return what it returns on each, in their order.

        Args:
          fn: any function, also one of the notebook; names that it uses and does not define are
            those of the ranks. It, its arguments and results are copied by ipyparallel.
          args: its arguments.
          ranks: which; None takes all.

        Returns:
          One result per rank.

        Communication: what the function sends.

        Raises:
          CellError, GroupsError: as `cell`.
        """
        fix = "pass a function such as lambda: rank, and its arguments after it"
        checks.function("Cluster.run", "fn", fn, "to call on ranks", fix, optional=False)
        found = self._run(ranks, lambda view: view.apply_async(engine.call, fn, args))
        self._done(found)
        return [found.values[rank][0] for rank in sorted(found.values)]

    def push(self, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Define names on ranks, such as `cluster.push(x=1)`; values are copied by ipyparallel.

        Args:
          ranks: which; None takes all.
          values: by name.

        Raises:
          CellError, GroupsError: as `cell`.
        """
        told = list(values), list(values.values())
        self._done(self._run(ranks, lambda view: view.apply_async(engine.define, *told)))

    def pull(self, name: str, rank: int | None = None) -> Any:
        """The value of a name on a rank; of all ranks, a list.

        Args:
          name: what cells call it.
          rank: which; None takes all.

        Returns:
          The value, copied by ipyparallel.

        Raises:
          CellError, GroupsError: as `cell`.
        """
        chosen = None if rank is None else [rank]
        found = self._run(chosen, lambda view: view.apply_async(engine.value_of, name))
        self._done(found)
        every = [found.values[rank][0] for rank in sorted(found.values)]
        return every if rank is None else every[0]

    # After a fault

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what ranks run, as the stop button of a notebook does."""
        self._processes.signal(range(self.size), signal.SIGINT)

    def reset(self) -> None:
        """`groups = mf.reset(groups)` on all ranks: new groups after an error ended the old ones.

        States and shards stay as they are. A `Trainer` has a `reset` of its own, for a cell.

        Communication: that of `reset`.

        Raises:
          CellError, GroupsError: as `cell`; a rank that is gone has to be restarted before.
        """
        self.cell("groups = mf.reset(groups)")

    def restart(self) -> None:
        """End all ranks and start new ones, without what cells had defined there.

        Communication: the start of torch.distributed, and small messages.

        Raises:
          GroupsError, CollectiveTimeoutError: they do not start.
        """
        self._check_open()
        self._processes.kill()
        self._busy.clear()
        self.begin()
        print("all ranks are new: what cells had defined is gone, so run those cells again")

    def stop(self) -> None:
        """End all ranks, and whatever was started for them. Stopping twice is fine."""
        if self.stopped or self._owner != os.getpid():
            return
        self.stopped = True
        with contextlib.suppress(Exception):  # of sockets whose other end is gone
            self._client.close(linger=0)
        self._processes.stop()
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        if self.stopped:
            return f"Cluster({self.size} ranks, stopped)"
        ended = self._processes.look()
        lines = rank_lines({rank: f"on {facts['device']}" for rank, facts in self._facts.items()})
        lines += sorted({f"groups: {facts['groups']}" for facts in self._facts.values()})
        if ended:
            lines.append(f"{gone(ended)}; restart() starts new ones")
        busy = [rank for rank, sent in self._busy.items() if not sent.ready()]
        if busy:
            lines.append(f"{name_ranks(busy)}: busy, and does not react to an interrupt")
        state = "" if ended or busy else ", all alive"
        return message(f"Cluster({self.size} ranks{state})", lines)

    # How ranks begin

    def begin(self, timeout_s: float = 60.0) -> None:
        """Start all ranks, and torch.distributed on them, in a new store; `start` calls it.

        Args:
          timeout_s: for all of it.
        """
        deadline, ranks = time.monotonic() + timeout_s, range(self.size)
        self._places, self._store = self._make_places()
        self._engines = {rank: self._count + rank for rank in ranks}
        self._count += self.size  # no number is used twice
        self._processes.start(self._told, self._connection)
        while not set(self._engines.values()) <= set(self._client.ids):
            self._processes.check_start(deadline, "ranks")
        self._meet(ranks, deadline)
        begin = self._places.begin
        found = self._run(None, lambda view: view.apply_async(engine.begin, begin))
        self._done(found)
        self._facts = found.values

    def _meet(self, ranks: Sequence[int], deadline: float) -> None:
        """Wait until each rank answers; what is sent to an engine before it listens is lost."""
        waiting = {rank: list[Any]() for rank in ranks}
        asked = 0.0
        while waiting:
            if time.monotonic() - asked > _ASK_AGAIN_S:
                asked = time.monotonic()
                for rank, sent in waiting.items():
                    view = self._client[self._engines[rank]]
                    sent.append(view.execute("", silent=False, block=False))
            for rank in list(waiting):
                if any(one.ready() and one.wait_for_output(0) for one in waiting[rank]):
                    del waiting[rank]
            self._processes.check_start(deadline, "ranks")

    def _told(self, rank: int) -> Mapping[str, Any]:
        environment = self._places.environment(rank) if self._places else {}
        return {"environment": environment, "engine": self._engines[rank]}

    # How cells run

    def _run(self, ranks: Sequence[int] | None, send: Callable[[Any], Any]) -> Outcome:
        self._check_open()
        chosen = self._chosen(ranks)
        self._check_alive(chosen)
        sent = {rank: send(self._client[self._engines[rank]]) for rank in chosen}
        others = [rank for rank in range(self.size) if rank not in chosen]
        stop = partial(self._processes.signal, number=signal.SIGINT)
        cell = Cell(sent, others, self._processes.look, self._aside, stop)
        outcome = cell.wait()
        self._busy.update((rank, sent[rank]) for rank in outcome.busy)
        return outcome

    def _aside(self, rank: int) -> None:
        if rank not in self._busy:
            self._client[self._engines[rank]].apply_async(engine.aside)

    def _done(self, outcome: Outcome) -> None:
        """Raise what a cell came to, if it did not end well."""
        if not outcome.failures:
            return
        lines, fixes = folded(outcome.failures), []
        kinds = {failed.kind for failed in outcome.failures.values()}
        if "busy" in kinds or "gone" in kinds:
            fixes.append("cluster.restart() starts new ranks, without what cells defined")
        elif not kinds.isdisjoint(FOLLOWS):
            fixes.append("cluster.reset() makes new groups; states stay as they are")
        lines += [f"fix: {fix}" for fix in fixes]
        texts = {rank: failed.line for rank, failed in outcome.failures.items()}
        if outcome.interrupted:
            raise Interrupted(lines, plain(lines))
        raise CellError(plain(lines), texts, lines)

    def _chosen(self, ranks: Sequence[int] | None) -> list[int]:
        if ranks is None:
            return list(range(self.size))
        every = list(ranks) if isinstance(ranks, Iterable) else [ranks]
        wrong = [rank for rank in every if type(rank) is not int or not 0 <= rank < self.size]
        if wrong or not every or not isinstance(ranks, Iterable):
            what = f"notebook: ranks={ranks!r} of a cluster of {self.size}"
            raise Refused(message(what, fix=f"give a list of some of 0 to {self.size - 1}"))
        return sorted(set(every))

    def _check_open(self) -> None:
        if self.stopped:
            fix = "start another one: cluster = mf.notebook.start()"
            raise Refused(message("notebook: this cluster was stopped", fix=fix))

    def _check_alive(self, ranks: Sequence[int]) -> None:
        """Raise GroupsError if ranks cannot run a cell."""
        ended = {rank: how for rank, how in self._processes.look().items() if rank in ranks}
        if ended:
            fix = "cluster.restart() starts new ranks, without what cells defined"
            raise Refused(message(f"notebook: {gone(ended)}", fix=fix))
        self._busy = {rank: sent for rank, sent in self._busy.items() if not sent.ready()}
        busy = [rank for rank in ranks if rank in self._busy]
        if busy:
            what = f"notebook: {name_ranks(busy)} still at an earlier cell, inside C++ or stopped"
            fix = "wait until that ends, or call cluster.restart()"
            raise Refused(message(what, fix=fix))


class Interrupted(KeyboardInterrupt):
    """The kernel was interrupted while ranks ran a cell; shows where each of them was."""

    def __init__(self, lines: Sequence[str], text: str) -> None:
        super().__init__(text)
        self._lines = list(lines)

    def _render_traceback_(self) -> list[str]:
        return self._lines
