"""Passes over loaders, each in an order of its own, and how far the last one has come."""

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from mics_fn.collectives import same_call
from mics_fn.errors import TreeError, message
from mics_fn.groups import Groups
from mics_fn.train.batch import count
from mics_fn.train.plain import Randoms
from mics_fn.train.position import Position, Resume, facts_of, has_state, shuffler_of


class Epochs:
    """Passes over loaders without end, and tells those that shuffle by epoch which epoch it is.

    The first pass has the epoch that the sampler is set to, so that a resumed run can choose it.
    A batch counts as used once the step that took it is done.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, int] = (None, 0)  # the last sampler and its epoch
        self._loader: Callable[[], Any] = _nothing  # gives the last loader, if it is still there
        self._at: Position | None = None  # in its last pass
        self._given = 0  # how many batches of this pass were given
        self._samples: int | None = None  # of the batch that a step of `fit` is at
        self._running = False  # whether batches are taken now
        self._resume: Resume | None = None  # what the next `batches` begins with
        self._begins: int | None = None  # the epoch that the first pass here has
        self.interrupted = False  # whether an error has ended the last run

    @property
    def epoch(self) -> int | None:
        """The epoch of the last pass, of this process or of others; None if there was none."""
        if self._last[0] is not None:
            return self._last[1]
        return None if self._begins is None else self._begins - 1

    def begin_after(self, epoch: int | None) -> None:
        """Let the first pass follow one that another process has made, if it made one."""
        self._begins, self._last = None if epoch is None else epoch + 1, (None, 0)
        self.go_on(None)  # what was begun here meanwhile has no meaning

    @property
    def place(self) -> list[Any] | None:
        """How far the pass of an interrupted run has come, for ranks that came back."""
        at = self._at
        if at is None or not self.interrupted:
            return None
        return [at.epoch, at.batches, at.samples, at.ranks, dict(at.facts or {})]

    def repeat(self, place: list[Any], device: torch.device) -> None:
        """Let the next `batches` repeat what an interrupted run had not used of its last pass.

        It does so if it gets a loader like the last one. An iterator cannot give a batch again: it
        goes on behind what it gave.

        Args:
          place: of another rank, for one that has none as it came back.
          device: of this rank, which has random states.
        """
        if self._resume is not None:
            return
        now, exact = Randoms.now(device), self._at is not None
        if self._at is not None:
            # Without the own state of the loader, which may hold what cannot be kept on one rank.
            saved = self._at.plain(self._loader(), exact=False)
            at = Position.from_plain(saved, "the position in the data")
        else:
            epoch, batches, samples, ranks, facts = place
            at = Position(epoch, now, (), ranks, batches, samples, facts)
            saved = at.plain(None, exact=False)
        self.go_on(Resume(at, saved, now, exact, True, optional=True))

    def batches(
        self, loader: Iterable[Any], home: Groups | None = None
    ) -> Generator[Any, None, None]:
        """The batches of one pass after another, without end.

        Args:
          loader: what to go through.
          home: the groups whose ranks do this together; None for this process alone.

        Communication: that of `same_call` at the first batch of a run that goes on; else none.

        Raises:
          TreeError: a pass gave no batch, or the loader does not fit the position that the run
            should go on from.
        """
        if self._resume is not None and not self._resume.suits(loader):
            self._resume = None
        shuffler, resume, place = shuffler_of(loader), self._resume, _place(home)
        epoch = self._next_epoch(shuffler) if resume is None else resume.at.epoch
        self._loader, self._running, self._samples = lambda: loader, True, None
        self.interrupted = False
        try:
            while True:
                if shuffler is not None:
                    shuffler.set_epoch(epoch)
                    self._last = (shuffler, epoch)
                empty = resume is None  # of a pass that is gone on with, nothing may be left
                if resume is None:
                    self._at, self._given = Position.begin(epoch, loader, *place), 0
                    rest = loader
                else:
                    rest = self._again(loader, resume, home, place)
                for batch in rest:
                    empty = False
                    self._given += 1
                    yield batch
                if empty:
                    raise _no_batch(loader)
                epoch, resume = epoch + 1, None
        finally:
            self._running = False
            if self._at is not None:
                self._at = replace(self._at, facts=facts_of(loader))
            # Nothing here keeps a loader alive, which may have processes of its own.
            self._loader = weakref.ref(loader) if has_state(loader) else _nothing

    def _next_epoch(self, shuffler: Any) -> int:
        """The epoch of the next pass; 0 if nobody asks for it."""
        if shuffler is None:
            return 0
        last, epoch = self._last
        if self._begins is not None and last is None:
            return self._begins
        now = getattr(shuffler, "epoch", epoch if shuffler is last else 0)
        # A pass that was left in the middle is not repeated: its first samples have been used.
        return now + 1 if shuffler is last and now == epoch else now

    def _again(
        self,
        loader: Iterable[Any],
        resume: Resume,
        home: Groups | None,
        place: tuple[torch.device, int],
    ) -> Iterable[Any]:
        """The rest of the pass that the run goes on with; on all ranks, or on none of them."""
        error, rest, at = None, loader, resume.at
        try:
            rest, at = resume.behind(loader, *place)
        except Exception as wrong:
            error = wrong
        if home is not None:
            text = f"go on behind batch {resume.at.batches} of pass {resume.at.epoch}"
            same_call("Trainer.fit", [home], text, error)
        if error is not None:
            raise error
        self._at, self._given, self._resume = at, at.batches, None
        return rest

    def using(self, batch: Any) -> tuple[int, int]:
        """Note that a step begins with a batch; returns its numbers of samples and of tokens."""
        samples, tokens = count(batch)
        self._samples = samples if self._running else None
        return samples, tokens

    def took(self) -> None:
        """Count the batch of a step as used, since the step is done; only steps of `fit` count."""
        if self._samples is not None and self._at is not None:
            self._at, self._samples = self._at.used(self._samples), None

    def kept(self) -> dict[str, Any] | None:
        """The position in the last pass, in the form in which it is saved; None before any.

        Raises:
          LeafError: the state of the loader holds something that cannot be saved.
        """
        if self._resume is not None:  # nothing was used since
            return self._resume.saved
        if self._at is None:
            return None
        loader = self._loader()
        return self._at.plain(loader, exact=self._given == self._at.batches)

    def go_on(self, resume: Resume | None) -> None:
        """Let the next `batches` go on from a position; None lets it begin a pass."""
        self._resume, self._at, self._samples = resume, None, None


def _no_batch(loader: Any) -> TreeError:
    """The error of a pass without a batch."""
    text, fix = "Trainer.fit: the loader gave no batch", "give it at least one sample per rank"
    if isinstance(loader, Iterator):
        text += f" in this pass: {type(loader).__name__} can be gone through only once"
        fix = "pass a list, a DataLoader, or another object that can be gone through again"
    return TreeError(message(text, fix=fix))


def _nothing() -> None:
    """Return None: in the place of a loader that is gone."""


def _place(home: Groups | None) -> tuple[torch.device, int]:
    """The device of this rank, and between how many ranks samples are dealt."""
    return (torch.device("cpu"), 1) if home is None else (home.device, home.world_size)
