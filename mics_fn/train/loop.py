"""A loop of steps, and what it needs around them: reproducible numbers, and how far it is.

The sampler is torch's `DistributedSampler`, so any loader that accepts one can be used.

[Note: going on in a pass] A loader shuffles by the number of the pass, by a generator of its own,
or by random numbers that it draws when a pass begins. So the first two, and all random states at
that moment, give the order of the pass again. A loader that has `state_dict` and `load_state_dict`,
such as torchdata's `StatefulDataLoader`, goes on from its own state. Any other is begun again, and
gives its first batches once more, which are thrown away: that costs the time of loading them. Then
the random states of the save are put back, which dropout and later passes draw from. What is drawn
from the process' own generators *during* a pass, by a sampler or by a dataset without workers, is
drawn again only if training draws nothing from the same generator in between.

After an error and `Trainer.reset` the next `fit` goes on in the same way, and begins with the batch
of the step that was not done. That step then draws other random numbers, such as those of dropout.
A rank that came back takes from another one how far the pass has come, and has the same samples as
before if the order follows from the number of the pass. An iterator, such as a generator, cannot
give a batch again, so it goes on behind that batch.
"""

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import deterministic as torch_deterministic
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from mics_fn import checks
from mics_fn.collectives import same_call
from mics_fn.errors import FileError, GroupsError, LeafError, MicsError, message
from mics_fn.groups import Groups, StopRequest, reports_step
from mics_fn.shards import require_groups
from mics_fn.train.metrics import StepMetrics
from mics_fn.train.plain import Randoms, as_plain, from_plain
from mics_fn.train.program import count

# Which samples a rank takes.

_LARGEST_SEED = 2**63 - 1  # torch takes a sum of seed and epoch that is below 2**64


def sampler(
    dataset: Sized, groups: Groups, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler:
    """torch's `DistributedSampler` for the ranks of these groups, each with samples of its own.

    Pass it to a loader: `DataLoader(dataset, batch_size=8, sampler=sampler(dataset, groups))`.
    torchdata's `StatefulDataLoader` takes it in the same way. Its `state_dict` says how far a pass
    has come, but not which pass it is. `Trainer.fit` notes both; in a loop of your own save the
    sampler's `epoch` next to it, and call `set_epoch` again before you resume.

    Args:
      dataset: anything with a length and an index; equally long on every rank.
      groups: the groups whose ranks share the samples. A rank's share follows from its position in
        them, not from its global rank. So if they cover the data-parallel part of a mesh, tensor
        parallel ranks of equal position draw the same samples.
      shuffle: use another order in each epoch. `Trainer.fit` tells the sampler which epoch it is.
        In a loop of your own call `set_epoch(epoch)` before each pass, or every pass has the same
        order.
      seed: seed of the order; equal on every rank.
      drop_last: if the length n is not a multiple of the number of ranks, leave out the last
        n % world_size samples of the order, instead of repeating its first ones.

    Returns:
      The sampler. Every rank gets equally many samples, so that means over ranks are means over
      samples. Without `drop_last` up to world_size - 1 samples of an epoch occur twice.

    Communication: two small all-gathers over each of the two groups, to compare the arguments. All
      ranks of the groups must call it.

    Memory: the order of an epoch (8 bytes per sample) during its pass.

    Raises:
      PlanError: `seed` is not an int from 0 to 2**63 - 1, or another option is not a bool.
      GroupsError: `groups` is not a `Groups`; with a tree of them the shares would be ambiguous.
      LeafError: there is not one sample for each rank.
      DesyncError: ranks differ in the length of the dataset or in an argument.

    Example:
      >>> with make_groups(1) as groups:
      ...     list(sampler(range(5), groups, shuffle=False))
      [0, 1, 2, 3, 4]
    """
    require_groups("sampler", groups)
    if not isinstance(groups, Groups):
        fix = "pass the dataset first, then the groups whose ranks take different samples"
        raise GroupsError(f"sampler: groups is {type(groups).__name__}", fix=fix)
    checks.flag("sampler", "shuffle", shuffle)
    checks.flag("sampler", "drop_last", drop_last)
    checks.integer("sampler", "seed", seed, 0, fix="pass the same number on all ranks")
    if seed > _LARGEST_SEED:
        expected, fix = "an int of at most 2**63 - 1", "pass a smaller number, such as 0"
        checks.refuse("sampler", "seed", seed, expected, fix)
    groups.partition.check_open()
    ranks, size = groups.world_size, len(dataset)
    error: MicsError | None = None
    if size == 0 or (drop_last and size < ranks):
        text = f"sampler: {size} samples for {ranks} ranks, drop_last={drop_last}"
        error = LeafError(text, fix="give each rank at least one sample")
    about = f"{size} samples, shuffle={shuffle}, seed={seed}, drop_last={drop_last}"
    same_call("sampler", [groups], about, error)
    if error is not None:
        raise error
    return DistributedSampler(
        dataset,  # pyright: ignore[reportArgumentType]
        num_replicas=ranks,
        rank=groups.position,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


# How far a pass over a loader has come, as a value; and a loader that goes on from there.

_ORDER = ("shuffle", "seed")  # facts of a loader that other numbers of ranks share, too


@dataclass(frozen=True)
class Position:
    """Position in a pass over a loader.

    Args:
      epoch: the number of the pass.
      start: the random states when it began.
      generators: the states of the loader's own generators then.
      ranks: how many ranks took batches.
      batches: how many batches were used.
      samples: how many samples of this rank they held.
      facts: what tells whether a loader is like this one; see `facts_of`.
      loader: the state that the loader gave behind these batches, and those of its generators;
        None if it gives none.
    """

    epoch: int
    start: Randoms
    generators: tuple[Tensor, ...]
    ranks: int
    batches: int = 0
    samples: int = 0
    facts: Mapping[str, str] | None = None
    loader: Any = None

    @classmethod
    def begin(cls, epoch: int, loader: Any, device: torch.device, ranks: int) -> "Position":
        """The position in a pass that begins now."""
        states = tuple(generator.get_state() for generator in generators_of(loader))
        return cls(epoch, Randoms.now(device), states, ranks)

    def used(self, samples: int) -> "Position":
        """The position one batch further."""
        return replace(self, batches=self.batches + 1, samples=self.samples + samples)

    def plain(self, loader: Any, *, exact: bool) -> dict[str, Any]:
        """The position in the form in which it is saved.

        Args:
          loader: the one that gave the batches; None if it is gone.
          exact: whether all batches that it gave were used, so that its own state can be taken.

        Raises:
          LeafError: the state of the loader holds something that cannot be saved.
        """
        state = None
        if exact and has_state(loader):
            kept = as_plain(loader.state_dict(), f"the state_dict() of {type(loader).__name__}")
            own = [generator.get_state() for generator in generators_of(loader)]
            state = {"state": kept, "generators": own}
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found |= {"start": self.start.plain(), "generators": list(self.generators)}
        facts = self.facts if loader is None else facts_of(loader)
        return {**found, "facts": facts, "loader": state}

    @classmethod
    def from_plain(cls, saved: Any, path: str) -> "Position":
        """The position that `plain` gave in this form.

        Raises:
          LeafError: this is not a position.
        """
        names, numbers = {f.name for f in fields(cls)}, ("epoch", "ranks", "batches", "samples")
        good = isinstance(saved, dict) and set(saved) == names
        if not good or not all(type(saved[name]) is int and saved[name] >= 0 for name in numbers):
            text = f"{path}: this is not the position in a pass"
            raise LeafError(text, fix="take what `carried` gave")
        start = Randoms.from_plain(saved["start"])
        if saved["loader"] is not None:  # what cannot be read is found before anything changes
            from_plain(saved["loader"]["state"])
        return cls(**{**saved, "start": start, "generators": tuple(saved["generators"])})


@dataclass(frozen=True)
class Resume:
    """How a resumed run begins its first loader; see [Note: going on in a pass].

    Args:
      at: the position.
      saved: the same in the form in which it was saved.
      now: the random states of the save.
      exact: whether these are the states of this very rank, of as many ranks as there are now.
      strict: whether a loader that is not like the saved one is an error, or a warning.
      optional: whether a pass begins instead if the loader is not like that one.
    """

    at: Position
    saved: dict[str, Any]
    now: Randoms
    exact: bool
    strict: bool
    optional: bool = False

    def suits(self, loader: Iterable[Any]) -> bool:
        """Return whether a run resumes with this loader, or raise."""
        if not self.optional:
            return True
        return not isinstance(loader, Iterator) and facts_of(loader) == self.at.facts

    def behind(
        self, loader: Any, device: torch.device, ranks: int
    ) -> tuple[Iterable[Any], Position]:
        """The batches of the pass that were not used yet, and the position before them.

        With another number of ranks, batches are skipped until all ranks together have skipped as
        many samples as were used, and random states stay as they are.

        Raises:
          LeafError: the loader is not like the one of the position.
        """
        if not self.exact:
            return self._behind_samples(loader, device, ranks)
        own = self._check_like(loader)
        self.at.start.put_back(device)
        _set_states(own, self.at.generators)
        if not self.at.batches:
            return loader, self.at
        if self.at.loader is not None and has_state(loader):
            loader.load_state_dict(from_plain(self.at.loader["state"]))
            batches = iter(loader)
            # Some loaders draw more than this when they begin a pass, others less.
            _set_states(own, self.at.loader["generators"])
        else:
            batches = iter(loader)
            for _ in range(self.at.batches):
                _skip(batches, self.at.batches)
        self.now.put_back(device)
        return batches, self.at

    def _check_like(self, loader: Any) -> list[torch.Generator]:
        """The loader's own generators, once it is found to be like the saved one."""
        saved, now = self.at.facts or {}, facts_of(loader)
        now = now if self.exact else {name: now[name] for name in _ORDER}
        odd = [name for name in now if name in saved and now[name] != saved[name]]
        if odd:
            lines = [f"{name}: saved {saved.get(name)}, now {now[name]}" for name in odd]
            text = "Trainer.fit: this loader is not like the one of the saved run"
            fix = (
                "pass a loader like the saved one; Checkpoints(other_options='warn') takes this one"
            )
            if self.strict:
                raise LeafError(text, lines, fix)
            warnings.warn(message(text, lines), stacklevel=5)
        return generators_of(loader)

    def _behind_samples(
        self, loader: Iterable[Any], device: torch.device, ranks: int
    ) -> tuple[Iterable[Any], Position]:
        """`behind` by the samples of all ranks."""
        self._check_like(loader)
        at = Position.begin(self.at.epoch, loader, device, ranks)
        batches, wanted = iter(loader), self.at.samples * self.at.ranks
        while at.samples * ranks < wanted:
            at = at.used(max(1, count(_skip(batches, self.at.batches))[0]))
        return batches, at


def _set_states(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    """Put states back into a loader's own generators."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)


def _skip(batches: Iterator[Any], used: int) -> Any:
    """Take a batch, which is thrown away."""
    try:
        return next(batches)
    except StopIteration:
        text = f"Trainer.fit: a pass ended before what {used} batches of the saved run had used"
        raise LeafError(text, fix="pass a loader of the same data") from None


def has_state(loader: Any) -> bool:
    """Whether a loader can save its own position."""
    return all(callable(getattr(loader, f"{verb}state_dict", None)) for verb in ("", "load_"))


def parts_of(loader: Any) -> tuple[Any, ...]:
    """A loader of torch and its samplers; None where it has none."""
    batches = getattr(loader, "batch_sampler", None)
    return (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))


def shuffler_of(loader: Any) -> Any:
    """The object that shuffles by epoch: a loader or one of its samplers; None if there is none."""
    return next((x for x in parts_of(loader) if callable(getattr(x, "set_epoch", None))), None)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers were given, each once."""
    found = [getattr(part, "generator", None) for part in parts_of(loader)]
    return list({id(x): x for x in found if isinstance(x, torch.Generator)}.values())


def facts_of(loader: Any) -> dict[str, str]:
    """Return the facts of a loader that a saved position depends on."""
    length = samples = None
    with suppress(Exception):  # an endless one may raise anything
        length = len(loader)
    with suppress(Exception):  # nor need a stream of samples have a length
        samples = len(loader.dataset)
    return {
        "batches per pass": f"{length}",
        "batch_size": f"{getattr(loader, 'batch_size', None)}",
        "samples": f"{samples}",
        **_order_of(loader),
        "shuffles by epoch": f"{shuffler_of(loader) is not None}",
        "own generators": f"{len(generators_of(loader))}",
        "has state_dict": f"{has_state(loader)}",
    }


def _order_of(loader: Any) -> dict[str, str]:
    """Whether and by which seed samples are shuffled, and whether the last ones are left out.

    A loader without a sampler says it itself, unless it has a state of its own that may set it.
    """
    given = None if has_state(loader) else loader
    sampler = next((part for part in parts_of(loader)[:0:-1] if part is not None), given)
    found = {name: getattr(sampler, name, None) for name in ("shuffle", "seed", "drop_last")}
    if found["shuffle"] is None and sampler is not given:
        kinds = {SequentialSampler: False, RandomSampler: True}
        known = (shuffles for kind, shuffles in kinds.items() if isinstance(sampler, kind))
        found["shuffle"] = next(known, type(sampler).__name__)
    if not found["shuffle"]:
        found["seed"] = None
    return {k: f"{x if isinstance(x, bool | int | str) else None}" for k, x in found.items()}


# Passes over loaders, each in an order of its own, and how far the last one has come.


class Epochs:
    """Iterate over loaders without end, and set the epoch of those that shuffle by it.

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
        """Return the position of an interrupted pass, for processes that replace lost ones."""
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
          LeafError: a pass gave no batch, or the loader does not fit the position that the run
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
        """Return the rest of a resumed pass; on all ranks, or on none of them."""
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

    @property
    def place_before(self) -> Position | None:
        """Before the step under way; see `go_back`."""
        return self._at

    def go_back(self, place: Position | None) -> None:
        """Count a batch as not used, since the step that took it is to be made again."""
        self._at = place

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
        """Set the position at which the next `batches` begins; None for a new pass."""
        self._resume, self._at, self._samples = resume, None, None


def _no_batch(loader: Any) -> LeafError:
    """The error of a pass without a batch."""
    text, fix = "Trainer.fit: the loader gave no batch", "give it at least one sample per rank"
    if isinstance(loader, Iterator):
        text += f" in this pass: {type(loader).__name__} can be gone through only once"
        fix = "pass a list, a DataLoader, or another object that can be gone through again"
    return LeafError(text, fix=fix)


def _nothing() -> None:
    """Return None: in the place of a loader that is gone."""


def _place(home: Groups | None) -> tuple[torch.device, int]:
    """The device of this rank, and between how many ranks samples are dealt."""
    return (torch.device("cpu"), 1) if home is None else (home.device, home.world_size)


@contextmanager
def reproducible(on: bool) -> Iterator[None]:
    """A block in which torch uses deterministic algorithms only, if `on`."""
    if not on:
        yield
        return
    mode, filled = torch.get_deterministic_debug_mode(), fills_memory()
    tuned = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # That mode would also write to all new memory, to reveal code that reads it uninitialised.
    torch_deterministic.fill_uninitialized_memory = False  # pyright: ignore
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = tuned
        torch_deterministic.fill_uninitialized_memory = filled  # pyright: ignore


@contextmanager
def learning(deterministic: bool) -> Iterator[None]:
    """A block in grad mode, and `reproducible`; an interrupt leaves grad mode as it was.

    Inside of torch's own contexts it may be raised when the mode is set and nobody is to reset it.
    """
    before = torch.is_grad_enabled()
    try:
        torch.set_grad_enabled(True)
        with reproducible(deterministic):
            yield
    finally:
        torch.set_grad_enabled(before)


def fills_memory() -> bool:
    """Whether torch writes to new memory in its deterministic mode."""
    return bool(torch_deterministic.fill_uninitialized_memory)  # pyright: ignore


def check_fit(loader: Any, steps: Any, log_every: Any, progress: Any, stop: Any) -> None:
    """Raise PlanError unless the arguments of `Trainer.fit` are what they should be."""
    verb, fix = "Trainer.fit", "the order is fit(loader, steps); a loader gives a batch per step"
    if isinstance(loader, str | bytes | Mapping):  # would be gone through by character or by key
        checks.refuse(verb, "loader", loader, "batches", fix)
    checks.instance(verb, "loader", loader, Iterable, "batches", fix)
    checks.integer(verb, "steps", steps, 0, fix="pass the number of optimizer steps to take")
    checks.integer(verb, "log_every", log_every, fix="progress=False shows nothing")
    checks.flag(verb, "progress", progress)
    fix = "with StopRequest(groups) as stop: trainer.fit(loader, steps, stop=stop)"
    checks.instance(verb, "stop", stop, StopRequest | None, "a StopRequest", fix)


class ProgressBar:
    """A progress bar, if one is wanted; lines if tqdm is not installed."""

    def __init__(self, steps: int, log_every: int, *, shown: bool) -> None:
        self._steps, self._log_every, self._started = steps, log_every, time.perf_counter()
        self._bar: Any = None
        self._shown = shown
        if shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=steps, unit="step")

    def update(self, metrics: list[Any]) -> None:
        """Count one more step. The loss is read only every `log_every` steps."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.update()
        done = len(metrics)
        if done % self._log_every == 0 or done == self._steps:
            seconds = time.perf_counter() - self._started
            tokens, samples = sum(m.tokens for m in metrics), sum(m.samples for m in metrics)
            rate, unit = (tokens, "tokens") if tokens else (samples, "samples")
            text = f"loss {metrics[-1].loss.item():.3f}, {rate / seconds:,.0f} {unit}/s"
            if self._bar is not None:
                self._bar.set_postfix_str(text)
            else:
                print(f"step {done}/{self._steps}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.close()


def train_for(
    trainer: Any, loader: Iterable[Any], steps: int, bar: ProgressBar, stop: StopRequest | None
) -> list[StepMetrics]:
    """Take steps until there are so many, or all ranks stop after the same one."""
    metrics: list[StepMetrics] = []
    home = trainer.member.home
    try:
        with (
            reports_step(home.life, trainer.state.step + 1),  # of the loader, or of the bar
            closing(trainer.epochs.batches(loader, home)) as batches,
        ):
            for _ in range(steps):
                batch = next(batches)
                before = trainer.ahead.step
                try:
                    metrics.append(trainer.step(batch))
                except FileError:
                    # If the step is taken, an earlier save failed: this may be the last chance.
                    if trainer.ahead.step > before and stop is not None and stop.due():
                        trainer.checkpoint.save(trainer)
                    raise
                bar.update(metrics)
                if stop is not None and stop.due():
                    trainer.checkpoint.save(trainer)
                    break
    except BaseException:
        trainer.epochs.interrupted = True
        raise
    finally:
        bar.close()
    trainer.checkpoint.close()
    return metrics
