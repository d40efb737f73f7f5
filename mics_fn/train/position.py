"""How far a pass over a loader has come, as a value; and a loader that goes on from there.

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

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SequentialSampler

from mics_fn.errors import TreeError, message
from mics_fn.train.batch import count
from mics_fn.train.plain import Randoms, as_plain, from_plain

_ORDER = ("shuffle", "seed")  # facts of a loader that other numbers of ranks share, too


@dataclass(frozen=True)
class Position:
    """How far a pass has come.

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
          TreeError: this is not a position.
        """
        names, numbers = {f.name for f in fields(cls)}, ("epoch", "ranks", "batches", "samples")
        good = isinstance(saved, dict) and set(saved) == names
        if not good or not all(type(saved[name]) is int and saved[name] >= 0 for name in numbers):
            text = f"{path}: this is not the position in a pass"
            raise TreeError(message(text, fix="take what `carried` gave"))
        start = Randoms.from_plain(saved["start"], f"{path}.start")
        if saved["loader"] is not None:  # what cannot be read is found before anything changes
            from_plain(saved["loader"]["state"])
        return cls(**{**saved, "start": start, "generators": tuple(saved["generators"])})


@dataclass(frozen=True)
class Resume:
    """What a run that goes on does with its first loader; see [Note: going on in a pass].

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
        """Whether a run goes on with this loader, or raises."""
        if not self.optional:
            return True
        return not isinstance(loader, Iterator) and facts_of(loader) == self.at.facts

    def behind(
        self, loader: Iterable[Any], device: torch.device, ranks: int
    ) -> tuple[Iterable[Any], Position]:
        """The batches of the pass that were not used yet, and the position before them.

        With another number of ranks, batches are skipped until all ranks together have skipped as
        many samples as were used, and random states stay as they are.

        Raises:
          TreeError: the loader is not like the one of the position.
        """
        if not self.exact:
            return self._behind_samples(loader, device, ranks)
        own = self._check_like(loader)
        self.at.start.put_back(device)
        _set_states(own, self.at.generators)
        if not self.at.batches:
            return loader, self.at
        if self.at.loader is not None and has_state(loader):
            _load_state(loader, from_plain(self.at.loader["state"]))
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
                raise TreeError(message(text, lines, fix))
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
        raise TreeError(message(text, fix="pass a loader of the same data")) from None


def has_state(loader: Any) -> bool:
    """Whether a loader can save its own position."""
    return all(callable(getattr(loader, f"{verb}state_dict", None)) for verb in ("", "load_"))


def _load_state(loader: Any, state: Any) -> None:
    """Give a loader its own state back."""
    try:
        loader.load_state_dict(state)
    except Exception as error:
        text = f"Trainer.fit: {type(loader).__name__} refused the state that it had saved"
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise TreeError(message(text, [why], "pass the same kind of loader")) from error


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
    """What must be the same for a position to mean the same batches, as far as a loader tells."""
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
