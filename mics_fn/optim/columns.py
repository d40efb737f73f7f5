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
from the host does not depend on either. So such a step is begun with `lazy_grads`: `ColumnBlocks`
begins to bring the first parts of the states, as many as its memory holds, and only then asks for
the gradients, which are made and judged meanwhile. If they are refused, an exception ends the step
before its first write: what was brought is dropped, and the state is as it was.
"""

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby, pairwise, repeat
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


def _nothing() -> None:
    pass


class Column(NamedTuple):
    """Corresponding tensors of several trees, each a run of neighbouring pieces or a single one."""

    key: Hashable
    tensors: tuple[Tensor, ...]
    bucket: Bucket | None = None  # the run, as `FlatRun` has it
    finish: Callable[[], None] = _nothing  # takes results that lie elsewhere where they belong


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
        """Free the gradients of a run, which were used."""
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
    parts, plain = list[Tensor](), list[Tensor]()
    dense, odd = list[tuple[int, int, int]](), set[int]()
    for each in targets:
        for r in range(len(each.runs)):
            parts += each.parts(r)
    for x in parts:
        if not isinstance(x, offload.Placed):
            plain.append(x)
            if flat.is_dense(x):
                dense.append((_torch.storage_id(x), int(x.storage_offset()), x.numel()))
        elif offload.in_file(x):
            plain.append(x)
    finish_readers(plain)
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
            device = home.device(r)
            if each.device(r) != device:
                each.change(r, lambda run, x, device=device: flat.copied(run, x.to(device)))
                continue
            parts = each.parts(r)
            dense = all(map(Tensor.is_contiguous, parts)) and not any(map(Tensor.is_neg, parts))
            there = not {offload.FileTensor, offload.Coded}.isdisjoint(map(type, parts))
            if there or not dense or not written.isdisjoint(map(_torch.storage_id, parts)):
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


def parts_of(
    stretch: Stretch, low: int, high: int, cut: Callable[[int, int], Sequence[Tensor]], written: int
) -> Iterator[Column]:
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
            yield Column(None, tuple(cut(a, b)))
        else:
            yield _divided(stretch, a, cut(a, b), written)


def _divided(stretch: Stretch, start: int, given: Sequence[Tensor], written: int) -> Column:
    """A part of one line, in a tensor of the length of that line."""
    begin = start - (start - stretch.start) % LINE
    length, at, count = min(LINE, stretch.full - begin), start - begin, given[0].numel()
    whole = [x.new_zeros(length) for x in given]
    mine = [x.narrow(0, at, count) for x in whole]
    _torch.foreach_copy(mine, list(given))

    def finish() -> None:
        _torch.foreach_copy(list(given[:written]), mine[:written])

    return Column(None, tuple(whole), None, finish)


# Parts of runs, which hold all of what is in memory and a window of what is placed.

_AHEAD = 2  # parts that are on the device besides the one that is computed with
_CODED = 2**17  # elements of a part that is decoded, a multiple of every block
Tensors = dict[int, Any]  # by the number of the target


class Part(NamedTuple):
    """A range of elements of a run, with what was fetched of it.

    Args:
      run: the number of the run.
      low, high: its elements.
      here: of targets that are placed what was fetched, which begins at the first element.
      goals: where it is to be stored.
    """

    run: int
    low: int
    high: int
    here: Tensors
    goals: Tensors


def staged(parts: Iterator[Part], device: torch.device, *, ahead: bool) -> Iterator[Part]:
    """Fetch parts from the host to a device, and store each once the next one is asked for.

    Args:
      parts: with tensors on the host.
      device: where they are computed with.
      ahead: whether the next part may be asked for before one has gone back.

    Memory: on the device a few parts.
    """
    if not _device.is_async(device):
        yield from parts
    elif ahead:
        yield from _overlapped(
            parts, device, _device.own_stream(device), _device.own_stream(device)
        )
    else:
        for part in parts:
            fetched = _on_device(part, device)
            yield fetched
            _store(fetched)
            _device.synchronize(device)


def _overlapped(
    parts: Iterator[Part], device: torch.device, up: torch.Stream, down: torch.Stream
) -> Iterator[Part]:
    """Yield each part on the device, while others are stored back and prefetched."""

    def prefetched() -> Any:
        part = next(parts, None)
        if part is None:
            return None
        with _device.keep_stream(device):
            torch.accelerator.set_stream(up)
            return _on_device(part, device), _device.record(device)

    written_back: deque[tuple[Part, torch.Event]] = deque()
    try:
        fetched = prefetched()
        while fetched is not None:
            part, event = fetched
            fetched = prefetched()
            _device.wait(device, event)
            yield part
            with _device.keep_stream(device):
                _device.follow(down, device)
                _store(part)
                written_back.append((part, _device.record(device)))
            if len(written_back) > _AHEAD:
                _, event = written_back.popleft()
                up.wait_event(event)  # which uses its memory next
    except BaseException:  # such as that of a step that is refused
        up.synchronize()  # what is on the host may be written to next
        raise
    finally:
        down.synchronize()  # from here on the host may read


def _on_device(part: Part, device: torch.device) -> Part:
    here = {k: x.to(device, non_blocking=True) for k, x in part.here.items()}
    return part._replace(here=here)


def _store(part: Part) -> None:
    for k, x in part.here.items():
        part.goals[k].copy_(x, non_blocking=True)


class ColumnBlocks:
    """The columns of a step, in blocks of what is here at the same time.

    Args:
      targets: to be written, the parameters first; changed to what the step gives.
      reads: what is read: gradients, which may be a stream.
      keys, donate: as for `columns`.
    """

    def __init__(
        self,
        targets: Sequence[WorkingTree],
        reads: Sequence[WorkingTree],
        keys: Sequence[Hashable] | None,
        donate: bool,
    ) -> None:
        self._targets, self._reads, self._keys, self._donate = targets, reads, keys, donate
        self._runs = targets[0].runs
        self._written = in_place(targets) if donate else set[int]()
        self._old: list[Tensors] = []  # by run, of what is fetched to the device that computes
        for r in range(len(self._runs)):
            device, placed = targets[0].device(r), dict[int, Any]()
            for k, each in enumerate(targets):
                old: Any = each.wholes[r]
                if isinstance(old, offload.Placed) or (old is not None and old.device != device):
                    placed[k] = old
                    if not donate or offload.is_locked(old):  # which a save reads
                        each.wholes[r] = _like(old, device)
                elif not donate:
                    each.change(r, flat.copied)
            self._old.append(placed)
        self.any_placed = any(self._old)

    def run(self) -> Generator[list[Column]]:
        """Yield the columns of each block; results are stored before the next one."""
        ready = _ready(self._targets[0], self._reads, self._written)
        every, written = [*self._targets, *self._reads], len(self._targets)
        for parts in self._fetched(ready) if self.any_placed else self._in_memory(ready):
            found: list[Column] = []
            for part in parts:
                if part.here:
                    line = LINE if self._coded(part.run) else 1
                    found += _columns_of_part(every, part, self._keys, written, line)
                else:
                    found += _columns_of_run(every, part.run, self._keys)
            if self._donate and found:
                note_write()
            yield found
            for part in parts:
                if part.here:
                    self._finish(part, found)
                if part.high == self._runs[part.run].numel:
                    for each in self._reads:
                        if each.stream is not None:
                            each.drop(part.run)

    def _in_memory(self, ready: Iterator[list[int]]) -> Iterator[list[Part]]:
        """Yield the runs whose gradients have arrived, each as one part."""
        for runs in ready:
            parts = list[Part]()
            for r in runs:
                parts.append(Part(r, 0, self._runs[r].numel, {}, {}))
            yield parts

    def _fetched(self, ready: Iterator[list[int]]) -> Iterator[list[Part]]:
        """Yield the parts of all runs with what is placed, once their gradients have arrived."""
        there = set[int]()
        with closing(self._travelling()) as parts:
            for part in parts:
                while part.run not in there:
                    there.update(next(ready))
                old = self._old[part.run]
                coded = {k: old[k][part.low : part.high] for k in self._coded(part.run)}
                codes = {k: offload.read(x) for k, x in coded.items()}
                yield [part._replace(here={**part.here, **codes})]
        self._decide()  # where this rank has no part of what is placed
        for each in self._targets:  # put what was written into their pieces
            for r, whole in enumerate(each.wholes):
                if whole is not None:
                    each.put(r, whole)

    def _finish(self, part: Part, found: Sequence[Column]) -> None:
        """Take the results of a part where they belong; padding of codes becomes zero before."""
        for column in found:
            column.finish()
        r, low, high, here, _ = part
        bounds = [(max(low, a) - low, min(high, b) - low) for a, b in self._runs[r].gaps]
        for k in self._coded(r):
            empty = [here[k][a:b] for a, b in bounds if a < b]
            if empty:
                _torch.foreach_zero(empty)
            self._new(k, r).write(low, here[k])

    def _travelling(self) -> Generator[Part]:
        """Yield the parts of all runs on their device, and store them; those of codes are there."""
        order = _order(self._runs, self._reads)
        files = [self._old[r][k] for r in order for k in self._in_files(r)]
        host_bytes = min((x.extent.scratch.host_bytes for x in files), default=offload.HOST_BYTES)
        parts = [(r, low, high) for r in order for low, high in self._cuts(r, host_bytes)]
        blocks = (self._block(*at) for at in parts if self._in_files(at[0]))
        windows: Any = offload.stream(blocks, host_bytes)  # begins to read
        with closing(windows):
            if files:
                self._decide()
            for device, near in groupby(parts, lambda at: self._targets[0].device(at[0])):
                mine = (self._part(*at, windows) for at in near)
                yield from staged(mine, device, ahead=not files)
            for _ in windows:  # its end is when all is written
                pass

    def _decide(self) -> None:
        for each in self._reads:
            if each.stream is not None:
                each.stream.first()

    def _coded(self, r: int) -> list[int]:
        return [k for k, x in self._old[r].items() if offload.is_coded(x)]

    def _in_files(self, r: int) -> list[int]:
        return [k for k, x in self._old[r].items() if offload.in_file(x)]

    def _new(self, k: int, r: int) -> Any:
        """Where the new values go."""
        return self._targets[k].wholes[r]

    def _part(self, r: int, low: int, high: int, windows: Iterator[Any]) -> Part:
        """A part on the host: what is in files in the window through which it travels."""
        placed = {k: x for k, x in self._old[r].items() if not offload.is_coded(x)}
        here = {k: x.narrow(0, low, high - low) for k, x in placed.items()}
        goals = {k: self._new(k, r).narrow(0, low, high - low) for k in placed}
        files = self._in_files(r)
        window = dict(zip(files, next(windows)[1], strict=True)) if files else {}
        return Part(r, low, high, {**here, **window}, {**goals, **window})

    def _block(self, r: int, low: int, high: int) -> offload.Block:
        """What is in files of a part."""
        old = [self._old[r][k].narrow(0, low, high - low) for k in self._in_files(r)]
        new = [self._new(k, r).narrow(0, low, high - low) for k in self._in_files(r)]
        return offload.Block(old, new, r)

    def _cuts(self, r: int, host_bytes: int) -> list[tuple[int, int]]:
        numel, placed = self._runs[r].numel, self._old[r]
        sizes = [x.dtype.itemsize for x in placed.values() if not offload.is_coded(x)]
        if sizes:
            return offload.cuts(numel, sizes, host_bytes)
        if not placed:
            return [(0, numel)]
        return [(low, min(numel, low + _CODED)) for low in range(0, numel, _CODED)]


def _spans(
    run: flat.FlatRun, keys: Sequence[Hashable] | None, singly: bool
) -> Iterator[tuple[Hashable, flat.FlatPart, int]]:
    """The columns of a run: keys, first pieces and lengths; each piece by itself if `singly`."""
    near = groupby(run.parts, lambda x: (keys[x.index] if keys else None, singly and x.index))
    for (key, _), mine in near:
        first, *_, last = [*mine] * 2
        yield key, first, last.start + last.length - first.start


def _columns_of_part(
    every: Sequence[WorkingTree],
    part: Part,
    keys: Sequence[Hashable] | None,
    written: int,
    line: int,
) -> Iterator[Column]:
    """The columns of a part of a run.

    Args:
      every: the targets and the reads.
      part: with what was fetched of some targets.
      keys: as for `columns`.
      written: how many trees are written, from the first on.
      line: columns are stepped as if they went on to a multiple of so many elements.
    """
    r, low, high, here, _ = part
    run, singly = every[0].runs[r], any(each.wholes[r] is None for each in every)
    for key, first, length in _spans(run, keys, singly):
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
        for column in parts_of(stretch, low, high, cut, written):
            yield column._replace(key=key, bucket=run.bucket)


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
    blocks = ColumnBlocks(done, others, keys, donate)
    found = blocks.run()
    return Columns(closed_after(found) if streams or blocks.any_placed else found, live, done)


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
    return changed(shards, flat.copied)


def in_chunks(shards: Tree) -> Tree:
    """The tree with copies of everything that does not lie in a chunk of its own.

    In groups of one rank a gradient is a view of what autograd gave, which may belong to others.
    """
    return changed(shards, lambda run, x: x if flat.is_in_chunk(run, x) else flat.copied(run, x))


def changed(shards: Tree, fn: Callable[[flat.FlatRun, Tensor], Tensor]) -> Tree:
    """A tree of shards, or `FlatShards`, with `fn(run, x)` for each run or piece x.

    It is the same object if all of it is as it was.
    """
    (working,) = working_trees([shards])
    before = list(working.pieces or working.wholes)
    for r in range(len(working.runs)):
        if working.pieces:
            working.join(r)
        working.change(r, fn)
    if all(a is b for a, b in zip(before, working.pieces or working.wholes, strict=True)):
        return shards
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
        rows = zip(*map(WorkingTree.single, every, repeat(r)), strict=True)
        for part, tensors in zip(run.parts, rows, strict=True):
            yield Column(keys[part.index] if keys else None, tensors, run.bucket)
    elif keys is None and run.numel:
        yield Column(None, tuple(wholes), run.bucket)
    elif keys is not None:
        for key, first, length in _spans(run, keys, singly=False):
            cut = tuple([x.narrow(0, first.start, length) for x in wholes])
            yield Column(key, cut, run.bucket)
