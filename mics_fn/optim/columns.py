"""Elementwise work on trees of shards as work on a few long tensors.

If all trees have the pieces of a run in one stretch of memory, a column is a whole run; see
[Note: runs] in `flat`. Otherwise columns are single pieces. That is so in groups of one rank, where
gradients lie wherever autograd made them.

[Note: dense] In groups of one rank a gradient is what autograd gave: expanded, strided, negated as
a view. torch's fused kernels, and whoever looks at memory, take a tensor for `numel` numbers in a
row. So columns are dense: whatever is not is copied first.

[Note: lines] torch's kernels work on vectors of elements from the beginning of a tensor on, and on
the last few one by one, which may round in another way. So the bits of a step would depend on where
a column is cut. A *line* is 64 elements from the beginning of the column on, a multiple of every
vector. A part of a column is stepped line by line as in memory: a line that a cut divides is
computed in a small tensor that has its length, with the elements in their places. Columns whose
moments are codes are taken to end with a whole line, so that all of their elements are stepped as
those of lines are: their bits do not depend on where buckets and shards end.

[Note: where a step computes] A column is computed on the device of its parameter; what lies
elsewhere comes there part by part and goes back. So the bits of a step are those of a step in
memory, on every kind of device; and with parameters in host memory the step is one of the host.
Parts of files travel through a fixed amount of host memory, the `host_bytes` of their `Where`.
Parts that are codes are decoded into memory of `_CODED` elements for each, and coded again when
they are written; padding between leaves becomes zero before, so that it sets no scale.

[Note: states come first] A step on gradients of which all have to be known first, as by a guard or
for a norm, waits for hop 2 and for that norm before it writes anything. What it needs from files or
from the host does not depend on either. So such a step is begun with `lazy_grads`: `PlacedColumns`
begins to bring the first parts of the states, as many as its memory holds, and only then asks for
the gradients, which are made and judged meanwhile. If they are refused, an exception ends the step
before its first write: what was brought is dropped, and the state is as it was.
"""

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _device, _torch, spans, tree
from mics_fn.collectives import finish_readers
from mics_fn.errors import LeafError, MicsError, PlanError
from mics_fn.offload import (
    HOST_BYTES,
    Block,
    FileTensor,
    cuts,
    in_file,
    is_coded,
    is_held,
    is_placed,
    placed_like,
    read,
    stream,
)
from mics_fn.optim import flat
from mics_fn.shards import Bucket, closed_after, needs_derivative, note_write
from mics_fn.tree import Tree

# `Column`: corresponding tensors of several trees, on which an optimizer works in one go.


class Column(NamedTuple):
    """Corresponding tensors of several trees, each a run of neighbouring pieces or a single one."""

    key: Hashable
    tensors: tuple[Tensor, ...]
    bucket: Bucket | None = None  # the run, as `FlatRun` has it


def updating(found: Sequence[Column]) -> Any:
    """A block that writes to these columns, for those who watch."""
    if not spans.seen():
        return spans.UNSEEN
    buckets = dict.fromkeys(x.bucket for x in found if x.bucket is not None)
    return spans.Span("opt", list(buckets), device=found[0].tensors[0].device if found else None)


# Trees on their way through a step: the pieces of each run as one tensor, or one by one.


class WorkingTree(NamedTuple):
    """A tree on its way through a step: the pieces of each run as one tensor, or one by one."""

    given: flat.Unpacked | flat.FlatShards
    runs: tuple[flat.FlatRun, ...]
    pieces: list[Tensor]  # all of the tree; none where it is kept as runs
    wholes: list[Tensor | None]  # by run

    @property
    def tensors(self) -> list[Any]:
        """What the tree was given as: its pieces or its runs."""
        return self.pieces or self.wholes

    @property
    def batched(self) -> bool:
        """Whether it is kept as runs with batch dimensions, whose pieces are not rows of memory."""
        return isinstance(self.given, flat.FlatShards) and any(
            run.bucket is not None and whole is not None and whole.ndim > 1
            for run, whole in zip(self.runs, self.wholes, strict=True)
        )

    def look(self) -> "WorkingTree":
        """Find runs that are contiguous in memory; fetch the others into contiguous memory.

        Kernels round the last elements of a tensor in another way, so leaf by leaf bits differ.
        """
        if isinstance(self.given, flat.FlatShards) or self.given.stream is not None:
            return self
        pieces = list(self.pieces)
        return self._replace(wholes=[_brought(run, pieces) for run in self.runs], pieces=pieces)

    def arrived(self, ready: Sequence[int]) -> "WorkingTree":
        """Call `look` for the runs whose pieces are available."""
        wholes: list[Tensor | None] = [None] * len(self.runs)
        pieces = list(self.given.pieces)  # pyright: ignore
        for r in ready:
            wholes[r] = _brought(self.runs[r], pieces)
        return self._replace(pieces=pieces, wholes=wholes)

    def parts(self, r: int) -> list[Tensor]:
        """What a run consists of: one tensor, or its pieces that are not empty."""
        whole = self.wholes[r]
        if whole is not None:
            return [whole] if whole.numel() else []
        return [self.pieces[i] for i, _, _ in self.runs[r].laid]

    def single(self, r: int) -> list[Tensor]:
        """The pieces of a run that are not empty."""
        whole, run = self.wholes[r], self.runs[r]
        if isinstance(self.given, flat.FlatShards) and whole is not None:
            found = self.given.cut(r, whole)
        else:
            found = [self.pieces[i] for i, _, _ in run.laid]
        return [x.detach() for x in found] if flat.any_requires_grad(found) else found

    def change(
        self, fn: Callable[[flat.FlatRun, Tensor], Tensor], only: Sequence[int] | None = None
    ) -> "WorkingTree":
        """The same with `fn(run, x)` in place of each part x of each run, empty pieces too."""
        pieces, wholes = list(self.pieces), list(self.wholes)
        numbers = range(len(self.runs)) if only is None else only
        for r in numbers:
            run, old = self.runs[r], wholes[r]
            if old is None:
                for i in run.members:
                    pieces[i] = fn(run, pieces[i])
                continue
            new = wholes[r] = fn(run, old)
            if pieces and new is not old:
                for i, piece in zip(run.members, flat.split(run, new), strict=True):
                    pieces[i] = piece
        return self._replace(pieces=pieces, wholes=wholes)

    def renewed(self) -> flat.Unpacked | flat.FlatShards:
        """What it holds, in new nodes, where it lay before."""
        if isinstance(self.given, flat.Unpacked):
            old, new = self.given.pieces, self.pieces
            # To ask each of them takes long.
            return self.given.with_pieces(
                placed_like(new, old) if FileTensor in map(type, old) else new
            )
        wholes = [
            flat.joined(run, [self.pieces[i] for i in run.members]) if whole is None else whole
            for run, whole in zip(self.runs, self.wholes, strict=True)
        ]
        return flat.with_wholes(self.given.layout, wholes, self.given.cuts)


def _brought(run: flat.FlatRun, pieces: list[Tensor]) -> Tensor | None:
    """Fetch pieces from several places of files into one run, and return `whole_run`."""
    whole, mine = flat.whole_run(run, pieces), [pieces[i] for i in run.members]
    if whole is None and run.laid and FileTensor in map(type, mine):
        device = next(x.device for x in mine if in_file(x))
        whole = flat.joined(run, [read(x.detach()).to(device) for x in mine])
        for i, piece in zip(run.members, flat.split(run, whole), strict=True):
            pieces[i] = piece
    return whole


def held_of(trees: Sequence[Tree]) -> list[WorkingTree]:
    found: list[WorkingTree] = []
    for shards in trees:
        if isinstance(shards, flat.FlatShards):
            runs = shards.layout.runs
            if found and runs is not found[0].runs and runs != found[0].runs:
                fix = "pass the optimizer's state of these parameters"
                raise LeafError("opt_step: the state is of another tree", fix=fix)
            found.append(WorkingTree(shards, runs, [], list(shards.wholes)))
            continue
        given = flat.unpacked(shards)
        runs = found[0].runs if found else given.runs()
        if len(given.pieces) != sum(len(run.members) for run in runs):
            raise LeafError("opt_step: trees of different numbers of leaves")
        found.append(WorkingTree(given, runs, given.pieces, [None] * len(runs)))
    return found


def in_place(held: Sequence[WorkingTree]) -> list[WorkingTree]:
    """Return trees to write in place, with copies of tensors that overlap or are not dense."""
    parts = [x for each in held for r in range(len(each.runs)) for x in each.parts(r)]
    finish_readers([x for x in parts if not is_coded(x)])
    parts = [x for x in parts if not is_placed(x)]
    far = {id(x) for each in held for x in each.wholes}  # whose parts are brought here later
    spans = sorted(
        (_torch.storage_id(x), int(x.storage_offset()), x.numel())
        for x in parts
        if flat.is_dense(x)
    )
    odd = {a[0] for a, b in pairwise(spans) if a[0] == b[0] and b[1] < a[1] + a[2]}

    def settled(run: flat.FlatRun, x: Tensor) -> Tensor:
        if is_placed(x):
            return x if id(x) in far else flat.copied(run, x)
        return (
            x
            if flat.is_dense(x) and not (odd and _torch.storage_id(x) in odd)
            else flat.copied(run, x)
        )

    return [each.change(settled) for each in held]


def readable(
    held: Sequence[WorkingTree], targets: Sequence[WorkingTree], only: Sequence[int] | None = None
) -> list[WorkingTree]:
    """Trees to be read from: with copies of what is in files, not dense, or going to be written to.

    Each run comes to the device of the first target, which computes.
    """
    parts = [x for each in targets for r in range(len(each.runs)) for x in each.parts(r)]
    written = {_torch.storage_id(x) for x in parts if not is_placed(x)}
    first = {id(run): targets[0].parts(r)[:1] for r, run in enumerate(targets[0].runs)}

    def settled(run: flat.FlatRun, x: Tensor) -> Tensor:
        if any(x.device != home.device for home in first.get(id(run), ())):
            return flat.copied(run, x.to(first[id(run)][0].device))
        here = not in_file(x) and flat.is_dense(x)
        return x if here and _torch.storage_id(x) not in written else flat.copied(run, x)

    return [each.change(settled, only) for each in held]


# Parts of a column that give the bits of the whole one.

LINE = 64  # elements


class Stretch(NamedTuple):
    """Where a column lies in its run, in elements; it is stepped as if it went on by `more`."""

    start: int
    stop: int
    more: int = 0

    @property
    def full(self) -> int:
        """The end that it is stepped with."""
        return self.stop + self.more


class ColumnPart(NamedTuple):
    """A part of a column, as tensors to step on; `finish` takes the results where they belong."""

    tensors: tuple[Tensor, ...]
    finish: Callable[[], None]


def parts_of(
    stretch: Stretch, low: int, high: int, cut: Callable[[int, int], Sequence[Tensor]], written: int
) -> Iterator[ColumnPart]:
    """What lies of a column between two elements of its run.

    Args:
      stretch: the column.
      low, high: the range of the run.
      cut: gives the tensors of the column between two elements of the run.
      written: how many of them, from the first on, are written.
    """
    start, stop = max(low, stretch.start), min(high, stretch.stop)
    if start >= stop:
        return
    inner = stretch.start - (stretch.start - start) // LINE * LINE  # rounded up to whole lines
    until = stop if stop == stretch.full else stop - (stop - stretch.start) % LINE
    bounds = sorted({start, stop, min(inner, stop), max(until, start)})
    for a, b in pairwise(bounds):
        if (a, b) == (inner, until):
            yield ColumnPart(tuple(cut(a, b)), _nothing)
        else:
            yield _divided(stretch, a, cut(a, b), written)


def _divided(stretch: Stretch, start: int, given: Sequence[Tensor], written: int) -> ColumnPart:
    """A part of one line, in a tensor of the length of that line."""
    begin = start - (start - stretch.start) % LINE
    length, at, count = min(LINE, stretch.full - begin), start - begin, given[0].numel()
    whole = [x.new_zeros(length) for x in given]
    mine = [x.narrow(0, at, count) for x in whole]
    _torch.foreach_copy(mine, list(given))

    def finish() -> None:
        _torch.foreach_copy(list(given[:written]), mine[:written])

    return ColumnPart(tuple(whole), finish)


def _nothing() -> None:
    """Results are where they belong."""


# Parts of tensors on their way between host memory and a device, beside the computation.

_AHEAD = 2  # parts that are on the device besides the one that is computed with


def staged(
    parts: Iterator[Any], device: torch.device, *, ahead: bool
) -> Iterator[tuple[int, int, int, dict[int, Tensor]]]:
    """Bring each part to a device, and take it back once the next one is asked for.

    Args:
      parts: a `Moving` each.
      device: where they are computed with.
      ahead: whether the next part may be asked for before one has gone back.

    Memory: on the device a few parts.
    """
    if not _device.is_async(device):
        for part in parts:
            yield part.run, part.low, part.high, part.sources
    elif not ahead:
        for part in parts:
            here = {k: x.to(device, non_blocking=True) for k, x in part.sources.items()}
            yield part.run, part.low, part.high, here
            for k, x in here.items():
                part.goals[k].copy_(x, non_blocking=True)
            _device.synchronize(device)
    else:
        ways = _Ways(device)
        try:
            yield from ways.through(parts)
        except BaseException:  # such as that of a step that is refused
            ways.settle()
            raise


class _Ways:
    """Streams of a device to it and from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = _device.own_stream(device), _device.own_stream(device)

    def settle(self) -> None:
        """Wait until nothing is read from the host any more, which may be written to next."""
        self._up.synchronize()
        self._down.synchronize()

    def through(self, parts: Iterator[Any]) -> Iterator[tuple[int, int, int, dict[int, Tensor]]]:
        """Yield each part on the device, while others are stored back and prefetched."""
        gone: deque[tuple[Any, torch.Event]] = deque()
        coming = self._bring(next(parts, None))
        while coming is not None:
            part, here, event = coming
            coming = self._bring(next(parts, None))
            _device.wait(self._device, event)
            yield part.run, part.low, part.high, here
            gone.append((here, self._take_back(part, here)))
            if len(gone) > _AHEAD:
                _, event = gone.popleft()
                self._up.wait_event(event)  # which uses its memory next
        self._down.synchronize()  # from here on the host may read

    def _bring(self, part: Any) -> Any:
        if part is None:
            return None
        with _device.keep_stream(self._device):
            torch.accelerator.set_stream(self._up)
            here = {k: x.to(self._device, non_blocking=True) for k, x in part.sources.items()}
            return part, here, _device.record(self._device)

    def _take_back(self, part: Any, here: dict[int, Tensor]) -> torch.Event:
        with _device.keep_stream(self._device):
            _device.follow(self._down, self._device)
            for k, x in here.items():
                part.goals[k].copy_(x, non_blocking=True)
            return _device.record(self._device)


# Steps on states that are not there as values: in host memory, in files, or kept as codes.

_CODED = 2**17  # elements of a part that is decoded, a multiple of every block
Tensors = dict[int, Tensor]  # by the number of the target


def far_runs(targets: Sequence[WorkingTree]) -> list[list[int]]:
    """Return for each run the targets that must be fetched to the computing device."""
    found = []
    for r in range(len(targets[0].runs)):
        device, wholes = _device_of(targets[0], r), [each.wholes[r] for each in targets]
        far = [x is not None and (is_placed(x) or x.device != device) for x in wholes]
        found.append([k for k, is_far in enumerate(far) if is_far])
    return found


def _device_of(params: WorkingTree, r: int) -> torch.device:
    whole, run = params.wholes[r], params.runs[r]
    return (params.pieces[run.members[0]] if whole is None else whole).device


class Moving(NamedTuple):
    """A range of elements of some targets, fetched to a device and stored back.

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


class PlacedColumns:
    """One step on trees of which some runs are placed in host memory, in files or as codes.

    Args:
      targets: to be written, the parameters first; changed to what the step gives.
      reads: what is read: gradients.
      coming: these, if they still arrive.
      keys, donate: as for `columns`.
    """

    def __init__(
        self,
        targets: Sequence[WorkingTree],
        reads: Sequence[WorkingTree],
        coming: flat.Unpacked | None,
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
        """Yield the columns part by part; results are stored before the next part."""
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
        if self._coming is not None and self._coming.stream is not None:
            self._coming.stream.first()

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
        """Yield the parts of all runs with fetched tensors, and store these back."""
        order = list(order)
        files = [r for r in order if any(in_file(self._old[k][r]) for k in self._far[r])]
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
                stored = [k for k in far if in_file(sources[k])]
                memory = dict(zip(stored, next(coming)[1], strict=True))
                sources, goals = {**sources, **memory}, {**goals, **memory}
            yield Moving(r, low, high, sources, goals)

    def _in_files(self, runs: Iterable[int]) -> Iterator[Block]:
        for r in runs:
            stored = [k for k in self._far[r] if in_file(self._old[k][r])]
            for low, high in self._cuts(r):
                old = [self._old[k][r].narrow(0, low, high - low) for k in stored]
                new = [self._new(k, r).narrow(0, low, high - low) for k in stored]
                yield Block(old, new, r)

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
        stored = [self._old[k][r] for r, k in self._moved() if in_file(self._old[k][r])]
        return min((x.extent.scratch.host_bytes for x in stored), default=HOST_BYTES)

    def _finish(self) -> None:
        """Put what was written into the pieces of the targets."""
        for each in self.targets:
            for run, whole in zip(each.runs, each.wholes, strict=True):
                if each.pieces and whole is not None:
                    for i, piece in zip(run.members, flat.split(run, whole), strict=True):
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

    run: flat.FlatRun
    low: int
    high: int
    given: Sequence[Tensor | Mapping[int, Tensor]]
    brought: set[int]
    keys: Sequence[Hashable] | None
    whole: int = 1

    def parts(self, written: int) -> Iterator[tuple[Hashable, ColumnPart]]:
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


def _given(each: WorkingTree, r: int, device: torch.device | None = None) -> Any:
    """What a tree has of a run: a long tensor, or its pieces by their numbers."""
    whole = each.wholes[r]
    if whole is not None:
        return whole if device is None else whole.to(device)
    found = {laid.index: each.pieces[laid.index].detach() for laid in each.runs[r].laid}
    return found if device is None else {i: x.to(device) for i, x in found.items()}


def _like(old: Tensor, device: torch.device) -> Tensor:
    """Room for a new value of a tensor, where the old one lies."""
    if is_placed(old):
        return old.unset()  # pyright: ignore[reportAttributeAccessIssue]
    return _device.host_buffer(old.nbytes, device).view(old.dtype).view(old.shape)


def _arrivals(
    targets: Sequence[WorkingTree], reads: Sequence[WorkingTree], coming: flat.Unpacked | None
) -> Generator[Any, Any]:
    """First the order of runs; then, for each run that is sent, what is read, once it is there."""
    runs = targets[0].runs
    if coming is None:
        ready = readable(reads, targets)
        sent = yield range(len(runs))
        while True:
            sent = yield ready
    left, ready, there = dict(enumerate(runs)), dict[int, list[WorkingTree]](), set[int]()
    stream: Any = coming.stream
    place = {i: k for k, bucket in enumerate(stream.order) for i in bucket}
    sent = yield sorted(range(len(runs)), key=lambda r: max(place[i] for i in runs[r].members))
    stream.first()
    batches = coming.completed()
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


# Gradients that are made, judged or limited once a step has asked for its states.


class StepRefused(MicsError):
    """A step is not taken, since its gradients were refused; nothing was written."""


def needs_fetch(params: Tree, opt: Any) -> bool:
    """Return whether a step fetches states from a file or another device, on this rank."""
    held = [x for x in tree.flatten(opt)[0] if isinstance(x, Tensor)]
    held += flat.unpacked(params).pieces
    return FileTensor in map(type, held) or len(set(flat.devices(held))) > 1


class Columns(NamedTuple):
    """Several trees as columns.

    Args:
      blocks: the columns, of which those of one block are here together: write them before the next
        block is asked for. The tensors of a column are those of the targets and then of the reads.
        Columns cover every element once, and apart from that only padding between pieces.
      live: whether derivatives may be asked of what is written.
      targets: gives the targets in new nodes, once the columns are written: `Unpacked` trees, and
        `FlatShards`.
    """

    blocks: Iterable[list[Column]]
    live: bool
    targets: Callable[[], list[Any]]


def columns(
    targets: Sequence[Tree],
    reads: Sequence[Tree] = (),
    keys: Sequence[Hashable] | None = None,
    *,
    by: Sequence[Any] = (),
    donate: bool = False,
) -> Columns:
    """Corresponding pieces of several trees, joined to as few long tensors as their memory allows.

    Args:
      targets: trees of shards, `Unpacked` or not, or `FlatShards`; columns are to be written to,
        and are copies.
      reads: trees that are only read, or gradients that are a stream. All trees have the leaves
        of the first one, in its order.
      keys: one per piece; only neighbours with equal keys are joined. Default: all are equal.
      by: what else results depend on and may be differentiated by, such as a learning rate.
      donate: write to the targets themselves; to copies only where pieces are not dense, or overlap
        with other pieces of any target.

    Returns:
      `Columns`. Where `needs_derivative` holds, or pieces have batch dimensions, they are single
      pieces, and the copies are differentiable.

    Memory: a copy of the targets, none with `donate`.

    Raises:
      PlanError: `donate` where a derivative is asked for.
      LeafError: the trees do not have the same leaves.
    """
    held, n = held_of([*targets, *reads]), len(targets)
    live = needs_derivative(by) or (
        torch.is_grad_enabled() and any(flat.any_requires_grad(each.tensors) for each in held)
    )
    if live and any(is_coded(x) for each in held for x in each.wholes):
        text = "opt_step: a derivative is asked for, and moments are kept as codes"
        raise PlanError(text, fix="shard without state=, or call it under torch.no_grad()")
    if live and donate:
        text = "opt_step: donate=True where a derivative is asked for"
        raise PlanError(text, fix="pass donate=False, or call it under torch.no_grad()")
    streams = (x for x in reads if isinstance(x, flat.Unpacked) and x.stream is not None)
    coming = next(streams, None)
    if live or any(each.batched for each in held):
        if coming is not None:
            return columns(targets, [coming.whole()], keys, by=by, donate=donate)
        done, found = _by_leaf(held, n, keys, by)
        blocks = [found]
    else:
        held = [each.look() for each in held]
        far = far_runs(held[:n])
        done = in_place(held[:n]) if donate else _copies(held[:n], far)
        if any(far):
            blocks = closed_after(PlacedColumns(done, held[n:], coming, keys, donate).blocks())
        elif coming is None:
            blocks = _all(done, held[n:], keys, donate)
        else:
            blocks = closed_after(_as_they_arrive(done, held[n], coming, keys, donate))
    return Columns(blocks, live, lambda: [each.renewed() for each in done])


def map_columns(fn: Callable[..., None], target: Tree, *rest: Tree, donate: bool = False) -> Tree:
    """Apply an in-place elementwise function to a tree of shards.

    Args:
      fn: called as `fn(target, *rest)` with corresponding long tensors; it writes its result into
        the first.
      target: tree of shards.
      rest: trees of the same structure, read only.
      donate: write into `target` itself instead of a copy.

    Returns:
      The tree with the results.

    Memory: as `columns`.
    """
    work = columns([target], rest, donate=donate)
    for block in work.blocks:
        for column in block:
            with updating([column]):
                fn(*column.tensors)
    return _closed(work.targets()[0])


def fresh(shards: Tree) -> Tree:
    """A copy in new memory, or in new parts of the files that it lies in.

    Where the tree holds all leaves of a bucket, its chunk is copied as a whole, so that it stays a
    chunk. Otherwise runs are copied, and nothing of what the tree lacks.
    """
    if _torch.inside_torch_func():
        return tree.map_leaves(torch.clone, shards)
    (held,) = held_of([shards])
    return _closed(held.look().change(flat.copied).renewed())


def in_chunks(shards: Tree) -> Tree:
    """The tree with copies of everything that does not lie in a chunk of its own.

    In groups of one rank a gradient is a view of what autograd gave, which may belong to others.
    """
    (held,) = held_of([shards])
    held = held.look().change(lambda run, x: x if flat.is_in_chunk(run, x) else flat.copied(run, x))
    return _closed(held.renewed())


def _closed(value: flat.Unpacked | flat.FlatShards) -> Tree:
    return value.closed() if isinstance(value, flat.Unpacked) else value


def _by_leaf(
    held: Sequence[WorkingTree], n: int, keys: Sequence[Hashable] | None, by: Sequence[Any]
) -> tuple[list[WorkingTree], list[Column]]:
    """Columns of single pieces, for which nobody looks at memory; the first `n` are targets."""
    given = [x.given.pieces() if isinstance(x.given, flat.FlatShards) else x.pieces for x in held]
    others = [value for value in by if isinstance(value, Tensor)]
    rows = list(zip(*given, strict=True))
    made = [[_livecopied(x, [*row, *others]) for x in row[:n]] for row in rows]
    found = [
        Column(keys[i] if keys else None, (*new, *row[n:]))
        for i, (new, row) in enumerate(zip(made, rows, strict=True))
    ]
    apart = [None] * len(held[0].runs)
    done = [
        each._replace(pieces=[new[k] for new in made], wholes=apart)
        for k, each in enumerate(held[:n])
    ]
    return done, found


def _livecopied(piece: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A copy to write to in place; batched under vmap where any of the others is."""
    copy = piece.clone()
    if not _torch.inside_torch_func():
        return copy
    for other in others:
        never = torch.zeros_like(other, dtype=torch.bool)
        copy = torch.where(never, other.to(copy.dtype), copy)
    return copy


def _columns_of_run(
    every: Sequence[WorkingTree], r: int, keys: Sequence[Hashable] | None
) -> Iterator[Column]:
    run, wholes = every[0].runs[r], [each.wholes[r] for each in every]
    if any(whole is None for whole in wholes):
        singles = zip(run.laid, *(each.single(r) for each in every), strict=True)
        for laid, *tensors in singles:
            yield Column(keys[laid.index] if keys else None, tuple(tensors), run.bucket)
    elif keys is None and run.numel:
        yield Column(None, tuple(wholes), run.bucket)  # pyright: ignore[reportArgumentType]
    elif keys is not None:
        for key, near in groupby(run.laid, lambda laid: keys[laid.index]):
            first, *_, last = [*near] * 2
            length = last.start + last.length - first.start
            cut = (x.narrow(0, first.start, length) for x in wholes if x is not None)
            yield Column(key, tuple(cut), run.bucket)


def _copies(held: Sequence[WorkingTree], far: Sequence[Sequence[int]]) -> list[WorkingTree]:
    """Trees to be written to in the place of others; what lies elsewhere is left for later."""
    return [
        each.change(flat.copied, [r for r, others in enumerate(far) if k not in others])
        for k, each in enumerate(held)
    ]


def _all(
    targets: Sequence[WorkingTree],
    reads: Sequence[WorkingTree],
    keys: Sequence[Hashable] | None,
    donate: bool,
) -> Iterator[list[Column]]:
    """The columns of all runs."""
    every = [*targets, *readable(reads, targets)]
    found = [x for r in range(len(targets[0].runs)) for x in _columns_of_run(every, r, keys)]
    if donate:
        note_write()
    yield found


def _as_they_arrive(
    targets: Sequence[WorkingTree],
    grads: WorkingTree,
    coming: flat.Unpacked,
    keys: Sequence[Hashable] | None,
    donate: bool,
) -> Generator[list[Column]]:
    """The columns of each run, once the gradients that it needs have arrived.

    What arrives from other ranks has memory of its own. A gradient that arises here may lie in that
    of any parameter; but those are here at once, and copied before anything is written.
    """
    left, there = dict(enumerate(grads.runs)), set[int]()
    stream: Any = coming.stream
    stream.first()
    for numbers in coming.completed():
        there.update(numbers)
        ready = [r for r, run in left.items() if there.issuperset(run.members)]
        every = [*targets, *readable([grads.arrived(ready)], targets, ready)]
        for r in ready:
            del left[r]
        found = [x for r in ready for x in _columns_of_run(every, r, keys)]
        if donate and found:
            note_write()
        yield found
        coming.drop(i for r in ready for i in grads.runs[r].members)
