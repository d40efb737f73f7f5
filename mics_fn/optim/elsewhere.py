"""Steps on states that are not there as values: in host memory, in files, or kept as codes.

[Note: where a step computes] A column is computed on the device of its parameter; what lies
elsewhere comes there part by part and goes back. So the bits of a step are those of a step in
memory, on every kind of device; and with parameters in host memory the step is one of the host.
Parts of files travel through a fixed amount of host memory, the `host_bytes` of their `Where`.
Parts that are codes are decoded into memory of `_CODED` elements for each, and coded again when
they are written; padding between leaves becomes zero before, so that it sets no scale.
"""

from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _device, _torch
from mics_fn.offload import (
    HOST_BYTES,
    Block,
    cuts,
    empty,
    is_apart,
    is_coded,
    is_held,
    is_stored,
    read,
    renewed,
    stream,
)
from mics_fn.optim.column import Column
from mics_fn.optim.coming import Coming
from mics_fn.optim.held import Held, readable
from mics_fn.optim.lines import LINE, Part, Stretch, parts_of
from mics_fn.optim.runs import Run, split
from mics_fn.optim.staging import staged
from mics_fn.shards import note_write

_CODED = 2**17  # elements of a part that is decoded, a multiple of every block
Tensors = dict[int, Tensor]  # by the number of the target


def far_runs(targets: Sequence[Held]) -> list[list[int]]:
    """For each run the targets whose part of it has to be brought to where it is computed."""
    found = []
    for r in range(len(targets[0].runs)):
        device, wholes = _device_of(targets[0], r), [each.wholes[r] for each in targets]
        far = [x is not None and (is_apart(x) or x.device != device) for x in wholes]
        found.append([k for k, is_far in enumerate(far) if is_far])
    return found


def _device_of(params: Held, r: int) -> torch.device:
    whole, run = params.wholes[r], params.runs[r]
    return (params.pieces[run.members[0]] if whole is None else whole).device


class Moving(NamedTuple):
    """The same elements of some targets, which are brought to a device and go back.

    Args:
      run: the number of the run.
      low, high: its elements.
      sources: where they come from, on the host.
      goals: where they go.
    """

    run: int
    low: int
    high: int
    sources: Tensors
    goals: Tensors


class Elsewhere:
    """One step on trees of which some runs lie elsewhere.

    Args:
      targets: to be written, the parameters first; changed to what the step gives.
      reads: what is read: gradients.
      coming: these, if they still arrive.
      keys, donate: as for `columns`.
    """

    def __init__(
        self,
        targets: Sequence[Held],
        reads: Sequence[Held],
        coming: Coming | None,
        keys: Sequence[Hashable] | None,
        donate: bool,
    ) -> None:
        self.targets, self._reads, self._coming, self._keys = targets, reads, coming, keys
        self._runs, self._donate = targets[0].runs, donate
        self._far = far_runs(targets)
        self._old: list[list[Any]] = [list(each.wholes) for each in targets]
        for r, k in self._moved():
            if not donate or is_held(self._old[k][r]):  # which a save reads
                targets[k].wholes[r] = _like(self._old[k][r], _device_of(targets[0], r))

    def _moved(self) -> Iterator[tuple[int, int]]:
        yield from ((r, k) for r, far in enumerate(self._far) for k in far)

    def blocks(self) -> Generator[list[Column]]:
        """The columns, part by part; what they have written goes back before the next ones."""
        arrived, reads, last = _arrivals(self.targets, self._reads, self._coming), [], -1
        order = next(arrived)
        with closing(self._brought(order)) as parts:
            for r, low, high, here in parts:
                if r != last:
                    reads, last = arrived.send(r), r
                device, run = _device_of(self.targets[0], r), self._runs[r]
                here = {**here, **self._decoded(r, low, high)}
                every = enumerate(self.targets)
                given: list[Any] = [here.get(k, _given(each, r)) for k, each in every]
                given += [_given(each, r, device) for each in reads]
                cut = _Cut(
                    run, low, high, given, set(here), self._keys, LINE if self._coded(r) else 1
                )
                found = list(cut.parts(len(self.targets)))
                if self._donate:
                    note_write()
                yield [Column(key, part.tensors, run.bucket) for key, part in found]
                for _, part in found:
                    part.finish()
                self._encode(r, low, high, here)
        self._decide()  # where this rank has no part of what is elsewhere
        self._finish()

    def _decide(self) -> None:
        if self._coming is not None:
            self._coming.arrival.first()

    def _coded(self, r: int) -> list[int]:
        """The targets that are kept as codes."""
        return [k for k in self._far[r] if is_coded(self._old[k][r])]

    def _decoded(self, r: int, low: int, high: int) -> Tensors:
        return {k: read(self._old[k][r][low:high]) for k in self._coded(r)}

    def _encode(self, r: int, low: int, high: int, here: Tensors) -> None:
        """Code what was written between two elements of a run."""
        coded = self._coded(r)
        bounds = [(max(low, a) - low, min(high, b) - low) for a, b in self._runs[r].gaps]
        empty = [here[k][a:b] for k in coded for a, b in bounds if a < b]
        if empty:
            _torch.foreach_zero(empty)
        for k in coded:
            self._new(k, r).write(low, here[k])

    def _brought(self, order: Iterable[int]) -> Generator[tuple[int, int, int, Tensors]]:
        """The parts of all runs, with what was brought for each, which then goes back."""
        order = list(order)
        files = [r for r in order if any(is_stored(self._old[k][r]) for k in self._far[r])]
        travelling: Any = stream(self._in_files(files), self._host_bytes())  # begins to read
        with closing(travelling) as coming:
            if files:
                self._decide()
            for device, near in groupby(order, lambda r: _device_of(self.targets[0], r)):
                moving = (x for r in near for x in self._movings(r, coming, r in files))
                yield from staged(moving, device, ahead=not files)
            for _ in coming:  # its end is when all is written
                pass

    def _movings(self, r: int, coming: Iterator[Any], in_files: bool) -> Iterator[Moving]:
        """The parts of one run, those in files in the memory through which these travel."""
        far = [k for k in self._far[r] if not is_coded(self._old[k][r])]
        if not self._far[r]:
            yield Moving(r, 0, self._runs[r].numel, {}, {})
            return
        for low, high in self._cuts(r):
            sources = {k: self._old[k][r].narrow(0, low, high - low) for k in far}
            goals = {k: self._new(k, r).narrow(0, low, high - low) for k in far}
            if in_files:
                stored = [k for k in far if is_stored(sources[k])]
                memory = dict(zip(stored, next(coming)[1], strict=True))
                sources, goals = {**sources, **memory}, {**goals, **memory}
            yield Moving(r, low, high, sources, goals)

    def _in_files(self, runs: Iterable[int]) -> Iterator[Block]:
        for r in runs:
            stored = [k for k in self._far[r] if is_stored(self._old[k][r])]
            for low, high in self._cuts(r):
                old = [self._old[k][r].narrow(0, low, high - low) for k in stored]
                new = [self._new(k, r).narrow(0, low, high - low) for k in stored]
                same = [self._in_place(k, r) for k in stored]
                pairs = zip(old, new, same, strict=True)
                yield Block(old, [a if is_same else b for a, b, is_same in pairs], r)

    def _in_place(self, k: int, r: int) -> bool:
        """Whether what lies in a file is overwritten there."""
        return self._new(k, r).extent is self._old[k][r].extent

    def _new(self, k: int, r: int) -> Any:
        """Where the new values go."""
        return self.targets[k].wholes[r]

    def _cuts(self, r: int) -> list[tuple[int, int]]:
        far = [x for x in (self._old[k][r] for k in self._far[r]) if not is_coded(x)]
        numel, sizes = self._runs[r].numel, [x.dtype.itemsize for x in far]
        if sizes:
            return cuts(numel, sizes, self._host_bytes())
        return [(low, min(numel, low + _CODED)) for low in range(0, numel, _CODED)]

    def _host_bytes(self) -> int:
        stored = [self._old[k][r] for r, k in self._moved() if is_stored(self._old[k][r])]
        return min((x.extent.scratch.host_bytes for x in stored), default=HOST_BYTES)

    def _finish(self) -> None:
        """Put what was written into new values, of which those in files are new at once."""
        if self._donate:
            stored = [(r, k) for r, k in self._moved() if is_stored(self._old[k][r])]
            at = [(r, k) for r, k in stored if self._in_place(k, r)]
            new = renewed([self._old[k][r] for r, k in at])
            for (r, k), x in zip(at, new, strict=True):
                self.targets[k].wholes[r] = x
        for each in self.targets:
            for run, whole in zip(each.runs, each.wholes, strict=True):
                if each.pieces and whole is not None:
                    for i, piece in zip(run.members, split(run, whole), strict=True):
                        each.pieces[i] = piece


class _Cut(NamedTuple):
    """The columns of one run between two of its elements.

    Args:
      run, low, high: the run, and the elements.
      given: of each tree the tensor, which begins at `low` if it was brought, or its pieces.
      brought: the numbers of those that were.
      keys: as for `columns`.
      whole: columns are stepped as if they went on to a multiple of so many elements.
    """

    run: Run
    low: int
    high: int
    given: Sequence[Tensor | Mapping[int, Tensor]]
    brought: set[int]
    keys: Sequence[Hashable] | None
    whole: int = 1

    def parts(self, written: int) -> Iterator[tuple[Hashable, Part]]:
        """What there is to step on; the first `written` tensors of each are written."""
        for key, near in self._joined():
            first, last = near[0], near[-1]
            start, stop = first.start, last.start + last.length
            stretch = Stretch(start, stop, (start - stop) % self.whole)

            def cut(a: int, b: int, first: Any = first) -> list[Tensor]:
                return [self._cut(k, first, a, b) for k in range(len(self.given))]

            for part in parts_of(stretch, self.low, self.high, cut, written):
                yield key, part

    def _joined(self) -> Iterator[tuple[Hashable, list[Any]]]:
        """The pieces that are one column in memory."""
        laid, keys = self.run.laid, self.keys
        if any(isinstance(x, Mapping) for x in self.given):
            yield from ((keys[x.index] if keys else None, [x]) for x in laid)
        elif laid:
            near = groupby(laid, lambda x: keys[x.index] if keys else None)
            yield from ((key, list(mine)) for key, mine in near)

    def _cut(self, k: int, first: Any, a: int, b: int) -> Tensor:
        x = self.given[k]
        if isinstance(x, Mapping):
            return x[first.index].narrow(0, a - first.start, b - a)
        return x.narrow(0, a - self.low if k in self.brought else a, b - a)


def _given(each: Held, r: int, device: torch.device | None = None) -> Any:
    """What a tree has of a run: a long tensor, or its pieces by their numbers."""
    whole = each.wholes[r]
    if whole is not None:
        return whole if device is None else whole.to(device)
    found = {laid.index: each.pieces[laid.index].detach() for laid in each.runs[r].laid}
    return found if device is None else {i: x.to(device) for i, x in found.items()}


def _like(old: Tensor, device: torch.device) -> Tensor:
    """Room for a new value of a tensor, where the old one lies."""
    stored: Any = old
    if is_coded(old):
        return stored.unset()
    if is_stored(old):
        return empty(
            stored.extent.scratch, old.shape, old.dtype, leaf=stored.leaf, device=old.device
        )
    return _device.host_buffer(old.nbytes, device).view(old.dtype).view(old.shape)


def _arrivals(
    targets: Sequence[Held], reads: Sequence[Held], coming: Coming | None
) -> Generator[Any, Any]:
    """First the order of runs; then, for each run that is sent, what is read, once it is there."""
    runs = targets[0].runs
    if coming is None:
        ready = readable(reads, targets)
        sent = yield range(len(runs))
        while True:
            sent = yield ready
    left, ready, there = dict(enumerate(runs)), dict[int, list[Held]](), set[int]()
    sent = yield coming.run_order(runs)
    coming.arrival.first()
    batches = coming.arriving()
    while True:
        while sent not in ready:
            there.update(next(batches))
            now = [r for r, run in left.items() if there.issuperset(run.members)]
            # What arrives together may lie in memory that the first step of it writes to.
            ready.update(dict.fromkeys(now, readable([reads[0].arrived(now)], targets, now)))
            for r in now:
                del left[r]
        last = sent
        sent = yield ready.pop(last)
        coming.drop(runs[last].members)
