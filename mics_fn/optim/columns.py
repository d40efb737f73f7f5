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
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _device, _torch, offload, spans, tree
from mics_fn.collectives import finish_readers
from mics_fn.errors import LeafError, MicsError, PlanError
from mics_fn.optim import flat
from mics_fn.shards import Bucket, GradStream, closed_after, needs_derivative, note_write
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


class WorkingTree:
    """A tree on its way through a step: the pieces of each run as one tensor, or one by one.

    Args:
      given: the tree.
      runs: those of all trees of the step.
    """

    def __init__(
        self, given: flat.Unpacked | flat.FlatShards, runs: tuple[flat.FlatRun, ...]
    ) -> None:
        self.given, self.runs = given, runs
        self.wholes: list[Tensor | None] = [None] * len(runs)  # by run
        self.stream: GradStream | None = None  # of gradients that are not all complete
        self.pieces: list[Tensor] = []  # all of the tree; none where it is kept as runs
        if isinstance(given, flat.FlatShards):
            self.wholes = list(given.wholes)
        elif given.stream is None:
            self.pieces = list(given.pieces)
        else:  # they are freed as they are used, which another list would prevent
            self.stream, self.pieces = given.stream, given.pieces

    @property
    def batched(self) -> bool:
        """Whether it is kept as runs with batch dimensions, whose pieces are not rows of memory."""
        return isinstance(self.given, flat.FlatShards) and any(
            run.bucket is not None and whole is not None and whole.ndim > 1
            for run, whole in zip(self.runs, self.wholes, strict=True)
        )

    def join(self, r: int) -> None:
        """Take a run as one tensor if it is contiguous in memory, or if it is in a file.

        Kernels round the last elements of a tensor in another way, so leaf by leaf bits differ.
        """
        run, pieces = self.runs[r], self.pieces
        whole = flat.whole_run(run, pieces)
        if whole is None and run.parts:
            mine = [pieces[i] for i in run.members]
            if offload.FileTensor in map(type, mine):
                device = next(x.device for x in mine if offload.in_file(x))
                self.put(r, flat.joined(run, [offload.read(x.detach()).to(device) for x in mine]))
                return
        self.wholes[r] = whole

    def put(self, r: int, whole: Tensor) -> None:
        """Replace a run by a long tensor."""
        self.wholes[r] = whole
        if self.pieces:
            members = self.runs[r].members
            for i, piece in zip(members, flat.split(self.runs[r], whole), strict=True):
                self.pieces[i] = piece

    def parts(self, r: int) -> list[Tensor]:
        """What a run consists of: one tensor, or its pieces that are not empty."""
        whole = self.wholes[r]
        if whole is not None:
            return [whole] if whole.numel() else []
        return [self.pieces[x.index] for x in self.runs[r].parts]

    def single(self, r: int) -> list[Tensor]:
        """The pieces of a run that are not empty."""
        whole = self.wholes[r]
        if isinstance(self.given, flat.FlatShards) and whole is not None:
            found = self.given.cut(r, whole)
        else:
            found = [self.pieces[x.index] for x in self.runs[r].parts]
        return [x.detach() for x in found] if flat.any_requires_grad(found) else found

    def change(self, r: int, fn: Callable[..., Tensor], *more: Any) -> None:
        """Put `fn(run, x, *more)` in the place of each part x of a run, empty pieces too."""
        run, whole = self.runs[r], self.wholes[r]
        if whole is None:
            for i in run.members:
                self.pieces[i] = fn(run, self.pieces[i], *more)
            return
        new = fn(run, whole, *more)
        if new is not whole:
            self.put(r, new)

    def drop(self, r: int) -> None:
        """Free the gradients of a run of a stream, which were used."""
        if self.stream is not None:
            self.wholes[r] = None
            for i in self.runs[r].members:
                self.pieces[i] = self.pieces[i].new_empty(0)

    def device(self, r: int) -> torch.device:
        """The device of a run."""
        whole = self.wholes[r]
        return (self.pieces[self.runs[r].members[0]] if whole is None else whole).device

    def renewed(self) -> flat.Unpacked | flat.FlatShards:
        """What it holds, in new nodes, where it lay before."""
        given, pieces = self.given, self.pieces
        if isinstance(given, flat.Unpacked):
            if offload.FileTensor in map(type, given.pieces):  # to ask each of them takes long
                pieces = offload.placed_like(pieces, given.pieces)
            return given.with_pieces(pieces)
        wholes: list[Any] = self.wholes
        if pieces:  # of a step leaf by leaf
            wholes = [flat.joined(run, [pieces[i] for i in run.members]) for run in self.runs]
        return flat.with_wholes(given.layout, wholes, given.cuts)


def working_trees(trees: Sequence[Tree]) -> list[WorkingTree]:
    """Trees of the same leaves on their way through a step."""
    found: list[WorkingTree] = []
    for shards in trees:
        if isinstance(shards, flat.FlatShards):
            given, runs = shards, shards.layout.runs
            if found and runs is not found[0].runs and runs != found[0].runs:
                fix = "pass the optimizer's state of these parameters"
                raise LeafError("opt_step: the state is of another tree", fix=fix)
        else:
            given = flat.unpacked(shards)
            runs = found[0].runs if found else flat.runs_of(*given.places, given.lengths)
            if found and len(found[0].pieces or given.pieces) != len(given.pieces):
                raise LeafError("opt_step: trees of different numbers of leaves")
        found.append(WorkingTree(given, runs))
    return found


def in_place(targets: Sequence[WorkingTree]) -> set[int]:
    """Copy parts of trees to be written in place that overlap with others or are not dense.

    Returns:
      The storages that are written.
    """
    parts, dense, odd = list[Tensor](), list[tuple[int, int, int]](), set[int]()
    for each in targets:
        for r in range(len(each.runs)):
            parts += each.parts(r)
    finish_readers([x for x in parts if not offload.is_coded(x)])
    for x in parts:
        if not offload.is_placed(x) and flat.is_dense(x):
            dense.append((_torch.storage_id(x), int(x.storage_offset()), x.numel()))
    dense.sort()
    for a, b in pairwise(dense):
        if a[0] == b[0] and b[1] < a[1] + a[2]:
            odd.add(a[0])
    if odd or len(dense) < len(parts):
        for each in targets:
            for r, whole in enumerate(each.wholes):
                if not offload.is_placed(whole):
                    each.change(r, _separated, odd)
    return {storage for storage, _, _ in dense} - odd


def readable(
    reads: Sequence[WorkingTree], home: WorkingTree, written: set[int], runs: Iterable[int]
) -> None:
    """Copy parts of trees to be read that are in files, not dense, or going to be written to.

    Args:
      reads: the trees.
      home: the parameters, on whose device each run is computed.
      written: the storages that are written.
      runs: the numbers of the runs.
    """
    for each in reads:
        for r in runs:
            if each.device(r) != home.device(r):
                device = home.device(r)
                each.change(r, lambda run, x, device=device: flat.copied(run, x.to(device)))
            else:
                each.change(r, _separated, written)


def _separated(run: flat.FlatRun, x: Tensor, taken: set[int]) -> Tensor:
    """A part of a run; a copy where it is not dense, is placed, or lies in a storage of these."""
    if offload.is_placed(x) or not flat.is_dense(x) or (taken and _torch.storage_id(x) in taken):
        return flat.copied(run, x)
    return x


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
            yield ColumnPart(tuple(cut(a, b)), lambda: None)  # results are where they belong
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
            ways.synchronize()
            raise


class _Ways:
    """Streams of a device to it and from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = _device.own_stream(device), _device.own_stream(device)

    def synchronize(self) -> None:
        """Wait until nothing is read from the host any more, which may be written to next."""
        self._up.synchronize()
        self._down.synchronize()

    def through(self, parts: Iterator[Any]) -> Iterator[tuple[int, int, int, dict[int, Tensor]]]:
        """Yield each part on the device, while others are stored back and prefetched."""
        written_back: deque[tuple[Any, torch.Event]] = deque()
        fetched = self._fetch(next(parts, None))
        while fetched is not None:
            part, here, event = fetched
            fetched = self._fetch(next(parts, None))
            _device.wait(self._device, event)
            yield part.run, part.low, part.high, here
            written_back.append((here, self._take_back(part, here)))
            if len(written_back) > _AHEAD:
                _, event = written_back.popleft()
                self._up.wait_event(event)  # which uses its memory next
        self._down.synchronize()  # from here on the host may read

    def _fetch(self, part: Any) -> Any:
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


def placed_runs(targets: Sequence[WorkingTree]) -> list[list[int]]:
    """Return for each run the targets that must be fetched to the computing device."""
    found: list[list[int]] = []
    for r in range(len(targets[0].runs)):
        device, placed = targets[0].device(r), list[int]()
        for k, each in enumerate(targets):
            whole = each.wholes[r]
            if whole is not None and (offload.is_placed(whole) or whole.device != device):
                placed.append(k)
        found.append(placed)
    return found


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
      reads: what is read: gradients, which may be a stream.
      placed: as `placed_runs` gives it.
      written: the storages that are written in place.
      keys, donate: as for `columns`.
    """

    def __init__(
        self,
        targets: Sequence[WorkingTree],
        reads: Sequence[WorkingTree],
        placed: list[list[int]],
        written: set[int],
        keys: Sequence[Hashable] | None,
        donate: bool,
    ) -> None:
        self.targets, self._reads, self._keys = targets, reads, keys
        self._placed = placed
        self._runs, self._donate, self._written = targets[0].runs, donate, written
        self._old: list[list[Any]] = [list(each.wholes) for each in targets]
        moved = [(self._old[k][r], r, k) for r, trees in enumerate(placed) for k in trees]
        sizes = [x.extent.scratch.host_bytes for x, _, _ in moved if offload.in_file(x)]
        self._host_bytes = min(sizes, default=offload.HOST_BYTES)
        for old, r, k in moved:
            if not donate or offload.is_locked(old):  # which a save reads
                targets[k].wholes[r] = _like(old, targets[0].device(r))

    def blocks(self) -> Generator[list[Column]]:
        """Yield the columns part by part; results are stored before the next part."""
        ready, there = _ready(self.targets[0], self._reads, self._written), set[int]()
        every = [*self.targets, *self._reads]
        with closing(self._fetched(_order(self._runs, self._reads))) as parts:
            for r, low, high, here in parts:
                while r not in there:
                    there.update(next(ready))
                run, coded = (
                    self._runs[r],
                    [k for k in self._placed[r] if offload.is_coded(self._old[k][r])],
                )
                here = {**here, **{k: offload.read(self._old[k][r][low:high]) for k in coded}}
                at, line = (r, low, high), LINE if coded else 1
                found = list(_parts_of_run(every, at, here, self._keys, len(self.targets), line))
                if self._donate:
                    note_write()
                yield [Column(key, part.tensors, run.bucket) for key, part in found]
                for _, part in found:
                    part.finish()
                bounds = [(max(low, a) - low, min(high, b) - low) for a, b in run.gaps]
                empty = [here[k][a:b] for k in coded for a, b in bounds if a < b]
                if empty:
                    _torch.foreach_zero(empty)
                for k in coded:
                    self._new(k, r).write(low, here[k])
                if high == run.numel:
                    for each in self._reads:
                        each.drop(r)
        self._decide()  # where this rank has no part of what is elsewhere
        for each in self.targets:  # put what was written into their pieces
            for r, whole in enumerate(each.wholes):
                if whole is not None:
                    each.put(r, whole)

    def _decide(self) -> None:
        for each in self._reads:
            if each.stream is not None:
                each.stream.first()

    def _fetched(self, order: Sequence[int]) -> Generator[tuple[int, int, int, Tensors]]:
        """Yield the parts of all runs with fetched tensors, and store these back."""
        files = [r for r in order if any(offload.in_file(self._old[k][r]) for k in self._placed[r])]
        travelling: Any = offload.stream(self._in_files(files), self._host_bytes)  # begins to read
        with closing(travelling) as fetched:
            if files:
                self._decide()
            for device, near in groupby(order, lambda r: self.targets[0].device(r)):
                moving = (x for r in near for x in self._movings(r, fetched, r in files))
                yield from staged(moving, device, ahead=not files)
            for _ in fetched:  # its end is when all is written
                pass

    def _movings(self, r: int, fetched: Iterator[Any], in_files: bool) -> Iterator[Moving]:
        """The parts of one run, those in files in the memory through which these travel."""
        placed = [k for k in self._placed[r] if not offload.is_coded(self._old[k][r])]
        if not self._placed[r]:
            yield Moving(r, 0, self._runs[r].numel, {}, {})
            return
        for low, high in self._cuts(r):
            sources = {k: self._old[k][r].narrow(0, low, high - low) for k in placed}
            goals = {k: self._new(k, r).narrow(0, low, high - low) for k in placed}
            if in_files:
                from_files = [k for k in placed if offload.in_file(sources[k])]
                memory = dict(zip(from_files, next(fetched)[1], strict=True))
                sources, goals = {**sources, **memory}, {**goals, **memory}
            yield Moving(r, low, high, sources, goals)

    def _in_files(self, runs: Iterable[int]) -> Iterator[offload.Block]:
        for r in runs:
            from_files = [k for k in self._placed[r] if offload.in_file(self._old[k][r])]
            for low, high in self._cuts(r):
                old = [self._old[k][r].narrow(0, low, high - low) for k in from_files]
                new = [self._new(k, r).narrow(0, low, high - low) for k in from_files]
                yield offload.Block(old, new, r)

    def _new(self, k: int, r: int) -> Any:
        """Where the new values go."""
        return self.targets[k].wholes[r]

    def _cuts(self, r: int) -> list[tuple[int, int]]:
        placed = [x for x in (self._old[k][r] for k in self._placed[r]) if not offload.is_coded(x)]
        numel, sizes = self._runs[r].numel, [x.dtype.itemsize for x in placed]
        if sizes:
            return offload.cuts(numel, sizes, self._host_bytes)
        return [(low, min(numel, low + _CODED)) for low in range(0, numel, _CODED)]


def _spans(
    run: flat.FlatRun, keys: Sequence[Hashable] | None, singly: bool
) -> Iterator[tuple[Hashable, flat.FlatPart, int]]:
    """The columns of a run: keys, first pieces and lengths; each piece by itself if `singly`."""
    near = groupby(run.parts, lambda x: (keys[x.index] if keys else None, singly and x.index))
    for (key, _), mine in near:
        first, *_, last = [*mine] * 2
        yield key, first, last.start + last.length - first.start


def _parts_of_run(
    every: Sequence[WorkingTree],
    at: tuple[int, int, int],
    here: Tensors,
    keys: Sequence[Hashable] | None,
    written: int,
    line: int,
) -> Iterator[tuple[Hashable, ColumnPart]]:
    """The columns of a run between two of its elements.

    Args:
      every: the targets and the reads.
      at: the number of the run, and the elements.
      here: of some targets the tensor that was brought, which begins at the first element.
      keys: as for `columns`.
      written: how many trees are written, from the first on.
      line: columns are stepped as if they went on to a multiple of so many elements.
    """
    r, low, high = at
    singly = any(each.wholes[r] is None for each in every)
    for key, first, length in _spans(every[0].runs[r], keys, singly):
        start = first.start

        def cut(a: int, b: int, index: int = first.index, start: int = start) -> list[Tensor]:
            found = []
            for k, each in enumerate(every):
                whole = each.wholes[r]
                if k in here:
                    found.append(here[k].narrow(0, a - low, b - a))
                elif whole is not None:
                    found.append(whole.narrow(0, a, b - a))
                else:
                    found.append(each.pieces[index].detach().narrow(0, a - start, b - a))
            return found

        stretch = Stretch(start, start + length, -length % line)
        for part in parts_of(stretch, low, high, cut, written):
            yield key, part


def _like(old: Tensor, device: torch.device) -> Tensor:
    """Room for a new value of a tensor, where the old one lies."""
    if offload.is_placed(old):
        return old.unset()  # pyright: ignore[reportAttributeAccessIssue]
    return _device.host_buffer(old.nbytes, device).view(old.dtype).view(old.shape)


def _order(runs: Sequence[flat.FlatRun], reads: Sequence[WorkingTree]) -> list[int]:
    """The runs in the order in which their gradients complete."""
    place: dict[int, int] = {}
    for each in reads:
        if each.stream is not None:
            place = {i: k for k, bucket in enumerate(each.stream.order) for i in bucket}
    return sorted(range(len(runs)), key=lambda r: max(place.get(i, 0) for i in runs[r].members))


def _ready(
    home: WorkingTree, reads: Sequence[WorkingTree], written: set[int]
) -> Iterator[list[int]]:
    """Yield the runs whose gradients are here, as they arrive, with these in memory of their own.

    What arrives from other ranks has such. A gradient that arises here may lie in the memory of any
    parameter; but those are here at once, and copied before anything is written.
    """
    remaining, there = list(range(len(home.runs))), set[int]()
    fetched = None
    for each in reads:
        if each.stream is not None:
            each.stream.first()
            fetched = each
    if fetched is None:
        readable(reads, home, written, remaining)
        yield remaining
        return
    for numbers in fetched.given.completed():  # pyright: ignore[reportAttributeAccessIssue]
        there.update(numbers)
        ready = [r for r in remaining if there.issuperset(home.runs[r].members)]
        remaining = [r for r in remaining if r not in ready]
        for r in ready:
            fetched.join(r)
        readable(reads, home, written, ready)
        yield ready


# Gradients that are made, judged or limited once a step has asked for its states.


class StepRefused(MicsError):
    """A step is not taken, since its gradients were refused; nothing was written."""


def needs_fetch(params: Tree, opt: Any) -> bool:
    """Return whether a step fetches states from a file or another device, on this rank."""
    working = [x for x in tree.flatten(opt)[0] if isinstance(x, Tensor)]
    working += flat.unpacked(params).pieces
    return offload.FileTensor in map(type, working) or len(set(flat.devices(working))) > 1


class Columns(NamedTuple):
    """Several trees as columns.

    Args:
      blocks: the columns, of which those of one block are here together: write them before the next
        block is asked for. The tensors of a column are those of the targets and then of the reads.
        Columns cover every element once, and apart from that only padding between pieces.
      live: whether derivatives may be asked of what is written.
      done: the targets, once the columns are written.
    """

    blocks: Iterable[list[Column]]
    live: bool
    done: list[WorkingTree]

    def targets(self) -> list[Any]:
        """The targets in new nodes: `Unpacked` trees, and `FlatShards`."""
        found = []
        for each in self.done:
            found.append(each.renewed())
        return found


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
    working, n = working_trees([*targets, *reads]), len(targets)
    tensors: list[Any] = []
    for each in working:
        tensors += each.pieces or each.wholes
    live = needs_derivative(by) or (torch.is_grad_enabled() and flat.any_requires_grad(tensors))
    if live and any(map(offload.is_coded, tensors)):
        text = "opt_step: a derivative is asked for, and moments are kept as codes"
        raise PlanError(text, fix="shard without state=, or call it under torch.no_grad()")
    if live and donate:
        text = "opt_step: donate=True where a derivative is asked for"
        raise PlanError(text, fix="pass donate=False, or call it under torch.no_grad()")
    done, others, streams = working[:n], working[n:], False
    for each in others:
        streams = streams or each.stream is not None
    if live or (not flat.all_rows(tensors) and any(each.batched for each in working)):
        if streams:
            return columns(targets, [others[0].given.whole()], keys, by=by, donate=donate)  # pyright: ignore
        return Columns([_by_leaf(working, n, keys, by)], live, done)
    for each in working:
        if each.stream is None and each.pieces:
            for r in range(len(each.runs)):
                each.join(r)
    placed, written = placed_runs(done), set[int]()
    if donate:
        written = in_place(done)
    else:
        for r, trees in enumerate(placed):
            for k, each in enumerate(done):
                if k not in trees:
                    each.change(r, flat.copied)
    if any(placed):
        blocks = PlacedColumns(done, others, placed, written, keys, donate).blocks()
    else:
        blocks = _blocks(done, others, written, keys, donate)
    return Columns(closed_after(blocks) if streams or any(placed) else blocks, live, done)


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
    return _changed(shards, flat.copied)


def in_chunks(shards: Tree) -> Tree:
    """The tree with copies of everything that does not lie in a chunk of its own.

    In groups of one rank a gradient is a view of what autograd gave, which may belong to others.
    """
    return _changed(shards, lambda run, x: x if flat.is_in_chunk(run, x) else flat.copied(run, x))


def _changed(shards: Tree, fn: Callable[[flat.FlatRun, Tensor], Tensor]) -> Tree:
    (working,) = working_trees([shards])
    for r in range(len(working.runs)):
        if working.pieces:
            working.join(r)
        working.change(r, fn)
    return _closed(working.renewed())


def _closed(value: flat.Unpacked | flat.FlatShards) -> Tree:
    return value.shards if isinstance(value, flat.Unpacked) else value


def _by_leaf(
    working: Sequence[WorkingTree], n: int, keys: Sequence[Hashable] | None, by: Sequence[Any]
) -> list[Column]:
    """Columns of single pieces, wherever their memory is; the first `n` are targets."""
    given = [x.pieces or flat.unpacked(flat.by_leaf(x.given)).pieces for x in working]
    others = [value for value in by if isinstance(value, Tensor)]
    rows = list(zip(*given, strict=True))
    made = [[_livecopied(x, [*row, *others]) for x in row[:n]] for row in rows]
    for k, each in enumerate(working[:n]):
        each.pieces = [new[k] for new in made]
    return [
        Column(keys[i] if keys else None, (*new, *row[n:]))
        for i, (new, row) in enumerate(zip(made, rows, strict=True))
    ]


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
    run, wholes = every[0].runs[r], list[Any]()
    for each in every:
        wholes.append(each.wholes[r])
    if type(None) in map(type, wholes):
        singles = zip(run.parts, *(each.single(r) for each in every), strict=True)
        for part, *tensors in singles:
            yield Column(keys[part.index] if keys else None, tuple(tensors), run.bucket)
    elif keys is None and run.numel:
        yield Column(None, tuple(wholes), run.bucket)
    elif keys is not None:
        for key, first, length in _spans(run, keys, singly=False):
            cut = tuple([x.narrow(0, first.start, length) for x in wholes])
            yield Column(key, cut, run.bucket)


def _blocks(
    targets: Sequence[WorkingTree],
    reads: Sequence[WorkingTree],
    written: set[int],
    keys: Sequence[Hashable] | None,
    donate: bool,
) -> Generator[list[Column]]:
    """The columns of all runs, or of those whose gradients have arrived."""
    every = [*targets, *reads]
    for ready in _ready(targets[0], reads, written):
        found: list[Column] = []
        for r in ready:
            found += _columns_of_run(every, r, keys)
        if donate and found:
            note_write()
        yield found
        for r in ready:
            for each in reads:
                each.drop(r)
