"""Elementwise work on trees of shards as work on a few long tensors.

If all trees have the pieces of a run in one stretch of memory, a column is a whole run; see
[Note: runs] in `flat`. Otherwise columns are single pieces. That is so in groups of one rank, where
gradients lie wherever autograd made them. There small ones are copied to one tensor first: that
takes less time than a column for each, whose objects Python would search for garbage as well.

[Note: dense] In groups of one rank a gradient is what autograd gave: expanded, strided, negated as
a view. torch's fused kernels, and whoever looks at memory, take a tensor for `numel` numbers in a
row. So columns are dense: whatever is not is copied first.

[Note: lines] torch's kernels work on vectors of elements from the beginning of a tensor on, and on
the last few one by one, which may round in another way. So the bits of a step would depend on where
a column is cut. A *line* is 64 elements from the beginning of the column on, a multiple of every
vector. A part of a column is stepped line by line as in memory: one that does not begin and end
with a line is computed in tensors of whole lines, with the elements in their places. Columns whose
moments are codes are taken to end with a whole line, so that all of their elements are stepped as
those of lines are: their bits do not depend on where buckets and shards end.

[Note: where a step computes] A column is computed on the device of its parameter; what lies
elsewhere comes there part by part and goes back. So the bits of a step are those of a step in
memory, on every kind of device; and with parameters in host memory the step is one of the host.
Parts of files travel through a fixed amount of host memory, the `host_bytes` of their `Where`.
Parts that are codes are decoded into memory of `_CODED` elements for each, and coded again when
they are written; padding between leaves becomes zero before, so that it sets no scale.
"""

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, groupby, pairwise, repeat
from operator import add, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, offload, spans, tree
from mics_fn.collectives import finish_readers
from mics_fn.errors import LeafError, PlanError
from mics_fn.optim import flat
from mics_fn.shards import Bucket, check_leaves, closed_after, needs_derivative, note_write
from mics_fn.tree import Tree

# `Column`: corresponding tensors of several trees, on which an optimizer works in one go.


_PLACED = {offload.FileTensor, offload.Coded}
_SMALL = 4096  # elements of a gradient, on average, below which those of a run are copied together


class Column(NamedTuple):
    """Corresponding tensors of several trees, each a run of neighbouring pieces or a single one."""

    key: Hashable
    tensors: tuple[Tensor, ...]
    bucket: Bucket | None = None  # the run, as `FlatRun` has it
    finish: Callable[[], None] | None = None  # takes results that lie elsewhere where they belong


def updating(found: Sequence[Column]) -> Any:
    """A block that writes to these columns, for those who watch."""
    if not spans.seen():
        return spans.UNSEEN
    buckets = dict.fromkeys(x.bucket for x in found if x.bucket is not None)
    return spans.Span("opt", list(buckets), device=found[0].tensors[0].device if found else None)


class WorkingTree:
    """A tree on its way through a step: the pieces of each run as one tensor, or one by one.

    Args:
      given: the tree.
      runs: those of all trees of the step.
    """

    def __init__(self, given: Any, runs: tuple[flat.FlatRun, ...]) -> None:
        self.given, self.runs = given, runs
        self.stream: Any = getattr(given, "stream", None)  # of gradients that are not all complete
        self.wholes: list[Any] = [None] * len(runs)  # by run
        self.pieces: list[Tensor] = []  # all of the tree; none where it is kept as runs
        if isinstance(given, flat.FlatShards):
            self.wholes = given.wholes
        else:  # those of a stream are freed as they are used, which another list would prevent
            self.pieces = given.pieces if self.stream is not None else list(given.pieces)

    def join(self, r: int) -> None:
        """Take a run as one tensor if it is contiguous in memory, or if it is in a file.

        Kernels round the last elements of a tensor in another way, so leaf by leaf bits differ.
        """
        run, pieces = self.runs[r], self.pieces
        self.wholes[r] = whole = flat.whole_run(run, pieces)
        mine = [pieces[i] for i in run.members] if whole is None else []
        if offload.FileTensor in map(type, mine):
            device = next(x.device for x in mine if offload.in_file(x))
            self.wholes[r] = self.spread(r, self.joined(r, device))

    def joined(self, r: int, device: torch.device) -> Tensor:
        """Copy the pieces of a run to a device, as one tensor."""
        mine = [self.pieces[i] for i in self.runs[r].members]
        if not _PLACED.isdisjoint(map(type, mine)) or set(map(flat.DEVICE, mine)) != {device}:
            mine = [offload.read(x).to(device) for x in mine]
        return flat.joined(self.runs[r], mine)

    def spread(self, r: int, whole: Tensor) -> Tensor:
        """Let a long tensor hold the pieces of a run."""
        if self.pieces:
            members = self.runs[r].members
            for i, piece in zip(members, flat.split(self.runs[r], whole), strict=True):
                self.pieces[i] = piece
        return whole

    def parts(self, r: int) -> list[Tensor]:
        """What a run consists of: one tensor, or its pieces that are not empty."""
        whole = self.wholes[r]
        if whole is not None:
            return [whole] if whole.numel() else []
        return [self.pieces[i] for i in self.runs[r].index]

    def single(self, r: int) -> list[Tensor]:
        """The pieces of a run that are not empty."""
        if self.pieces:
            return [self.pieces[i] for i in self.runs[r].index]
        return [x for x in flat.split(self.runs[r], self.wholes[r]) if x.numel()]

    def change(self, r: int, fn: Callable[[flat.FlatRun, Tensor], Tensor]) -> None:
        """Put `fn(run, x)` in the place of each part x of a run, empty pieces too."""
        run, whole = self.runs[r], self.wholes[r]
        if whole is None:
            for i in run.members:
                self.pieces[i] = fn(run, self.pieces[i])
            return
        new = fn(run, whole)
        if new is not whole:
            self.wholes[r] = self.spread(r, new)

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
        if pieces:  # of a step leaf by leaf
            self.wholes = [flat.joined(run, [pieces[i] for i in run.members]) for run in self.runs]
        return flat.with_wholes(given.layout, self.wholes)


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
            if len(given.trained) < len(given.leaves):
                check_leaves("optim", given.shards, given.leaves, "tree")
            runs = found[0].runs if found else flat.runs_of(*given.geometry[:3])
            if found and len(found[0].pieces or given.pieces) != len(given.pieces):
                raise LeafError("opt_step: trees of different numbers of leaves")
        found.append(WorkingTree(given, runs))
    return found


def written_storages(targets: Sequence[WorkingTree]) -> set[int] | None:
    """The storages of trees; None if some parts overlap or are not dense, so that none is written.

    Once it returns nobody reads them any more.
    """
    plain, found = list[Tensor](), list[tuple[int, int, int]]()
    for each in targets:
        for r in range(len(each.runs)):
            for x in each.parts(r):
                if type(x) is not offload.Coded:
                    plain.append(x)
                    if type(x) is not offload.FileTensor:
                        found.append((_torch.storage_id(x), int(x.storage_offset()), x.numel()))
    finish_readers(plain)
    if not flat.all_dense(plain):
        return None
    found.sort()
    for a, b in pairwise(found):
        if a[0] == b[0] and b[1] < a[1] + a[2]:
            return None
    return set(map(itemgetter(0), found))


# Parts of a column that give the bits of the whole one.

LINE = 64  # elements


def in_lines(given: Sequence[Tensor], written: int, before: int, after: int) -> Column:
    """A part of a column, in tensors of whole lines if it does not consist of such.

    Args:
      given: its tensors.
      written: how many of them, from the first on, are written.
      before, after: how many elements of its first and of its last line are outside of it.
    """
    if not (before or after):
        return Column(None, tuple(given))
    whole = [x.new_zeros(before + len(x) + after) for x in given]
    mine = [x.narrow(0, before, len(x) - before - after) for x in whole]
    _torch.foreach_copy(mine, given)

    def finish() -> None:
        _torch.foreach_copy(given[:written], mine[:written])

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

    def block(self) -> offload.Block:
        """What of it is in files."""
        files = [k for k, x in self.here.items() if offload.in_file(x)]
        return offload.Block([self.here[k] for k in files], [self.goals[k] for k in files], files)

    def through(self, windows: Iterator[Any]) -> "Part":
        """The part with what is in files in the window through which it travels."""
        files = self.block().key
        window = dict(zip(files, next(windows)[1], strict=True)) if files else {}
        return self._replace(here={**self.here, **window}, goals={**self.goals, **window})


def staged(parts: Iterator[Part], device: torch.device, *, ahead: bool) -> Iterator[Part]:
    """Fetch parts from the host to a device, and store each once the next one is asked for.

    Args:
      parts: with tensors on the host.
      device: where they are computed with.
      ahead: whether the next part may be asked for before one has gone back.

    Memory: on the device a few parts.
    """
    if not _torch.is_async(device):
        yield from parts
        return
    up, down = _torch.own_stream(device), _torch.own_stream(device)
    fetched, written = deque[tuple[Part, torch.Event]](), deque[tuple[Part, torch.Event]]()
    try:
        while True:
            while len(fetched) <= ahead and (part := next(parts, None)) is not None:
                with _torch.keep_stream(device):
                    torch.accelerator.set_stream(up)
                    here = {
                        k: x if offload.is_coded(x) else x.to(device, non_blocking=True)
                        for k, x in part.here.items()
                    }
                    fetched.append((part._replace(here=here), _torch.record(device)))
            if not fetched:
                break
            part, event = fetched.popleft()
            _torch.wait(device, event)
            yield part
            with _torch.keep_stream(device):
                _torch.follow(down, device)
                for k, x in part.here.items():
                    if not offload.is_coded(x):
                        part.goals[k].copy_(x, non_blocking=True)
                written.append((part, _torch.record(device)))
            if not ahead:
                down.synchronize()
                written.clear()
            if len(written) > _AHEAD:
                _, event = written.popleft()
                up.wait_event(event)  # which uses its memory next
    except BaseException:  # such as that of a step that is refused
        up.synchronize()  # what is on the host may be written to next
        raise
    finally:
        if ahead:
            down.synchronize()  # from here on the host may read


class Columns:
    """Corresponding pieces of several trees, joined to as few long tensors as their memory allows.

    Iterating gives the columns in blocks, of which those of one block are here together: write them
    before the next block is asked for. The tensors of a column are those of the targets and then of
    the reads. Columns cover every element once, and apart from that only padding between pieces.
    Where `needs_derivative` holds, or pieces have batch dimensions, columns are single pieces, and
    the copies are differentiable.

    Args:
      targets: trees of shards, `Unpacked` or not, or `FlatShards`; columns are to be written to,
        and are copies.
      reads: trees that are only read, or gradients that are a stream. All trees have the leaves
        of the first one, in its order.
      keys: one per piece; only neighbours with equal keys are joined. Default: all are equal.
      by: what else results depend on and may be differentiated by, such as a learning rate.
      donate: write to the targets themselves; to copies only where pieces are not dense, or overlap
        with other pieces of any target.
      entire: whether what lies elsewhere comes run by run, and not in parts of these.

    Memory: a copy of the targets, none with `donate`; at most `_SMALL` elements for each gradient.

    Raises:
      PlanError: `donate` where a derivative is asked for.
      LeafError: the trees do not have the same leaves.
    """

    def __init__(
        self,
        targets: Sequence[Tree],
        reads: Any,
        keys: Any = None,
        *,
        by: Any = (),
        donate: bool,
        entire: bool = False,
    ) -> None:
        every, n = working_trees([*targets, *reads]), len(targets)
        tensors = list[Any]()
        self._stream: Any = None  # the gradients, if they are not all complete
        for each in every:
            tensors += each.pieces or each.wholes
            self._stream = each if each.stream is not None else self._stream
        self._single: list[Column] | None = None  # where columns are single pieces
        live = torch.is_grad_enabled() and flat.any_requires_grad(tensors)
        self.live = live or needs_derivative(by)  # may derivatives be asked of what is written?
        self._every, self._written, self._keys = every, n, keys
        self._entire = entire
        if self.live:
            _refuse_live(tensors, donate)
        if self.live or not set(map(Tensor.dim, tensors)) <= {1}:
            self._single = self._by_leaf(by)
            return
        for each in every:
            if each.stream is None and each.pieces:
                for r in range(len(each.runs)):
                    each.join(r)
        own = written_storages(every[:n]) if donate else None
        self._own, self._donate = own or set[int](), own is not None
        self._runs = every[0].runs
        self._placed = list(map(self._begin, range(len(self._runs))))

    def __iter__(self) -> Iterator[list[Column]]:
        if self._single is not None:
            return iter([self._single])
        return closed_after(self._fetched() if any(self._placed) else self._in_memory())

    def targets(self) -> list[Any]:
        """The targets in new nodes, once the columns are written: `Unpacked`, and `FlatShards`."""
        return list(map(WorkingTree.renewed, self._every[: self._written]))

    def _begin(self, r: int) -> dict[int, Any]:
        """What is fetched of the targets of a run, by their number; the others become copies."""
        placed, device = dict[int, Any](), self._every[0].device(r)
        for k, each in enumerate(self._every[: self._written]):
            old = each.wholes[r]
            if offload.is_placed(old) or (old is not None and old.device != device):
                placed[k] = old
                if not self._donate or offload.is_locked(old):  # which a save reads
                    each.wholes[r] = offload.unset_like(old, device)
            elif not self._donate:
                each.change(r, flat.copied)
        return placed

    def _in_memory(self) -> Generator[list[Column]]:
        """Yield the columns of the runs whose gradients have arrived."""
        for runs in self._ready():
            found = list(chain.from_iterable(map(self._of_run, runs)))
            if self._donate and found:
                note_write()
            yield found
            if self._stream is not None:
                self._drop(runs)

    def _ready(self) -> Iterator[list[int]]:
        """Yield the runs whose gradients are here, as they arrive, with these in their own memory.

        What arrives from other ranks has such. A gradient that arises here may lie in the memory of
        any parameter; but those are here at once, and copied before anything is written.
        """
        remaining, there, stream = list(range(len(self._runs))), set[int](), self._stream
        if stream is None:
            for each in self._every[self._written :]:
                self._make_readable(each, remaining)
            yield remaining
            return
        for numbers in stream.given.completed():
            there.update(numbers)
            ready = [r for r in remaining if there.issuperset(self._runs[r].members)]
            remaining = [r for r in remaining if r not in ready]
            for r in ready:
                stream.join(r)
            self._make_readable(stream, ready)
            yield ready

    def _make_readable(self, each: WorkingTree, runs: Iterable[int]) -> None:
        """Copy runs that are elsewhere, in files, not dense, or going to be written to.

        Those of many small gradients become one tensor, too.
        """
        home = self._every[0]
        for r in runs:
            run, whole, device, parts = each.runs[r], each.wholes[r], home.device(r), each.parts(r)
            small = self._keys is None and run.numel < _SMALL * len(run.index)
            small = small and whole is None and home.wholes[r] is not None
            dense = each.device(r) == device and _PLACED.isdisjoint(map(type, parts))
            dense = dense and flat.all_dense(parts)
            if dense and not small and self._own.isdisjoint(map(_torch.storage_id, parts)):
                continue
            if whole is not None:
                each.wholes[r] = each.spread(r, flat.copied(run, whole.to(device)))
                continue
            made = each.joined(r, device)
            if small:
                each.wholes[r] = made
            else:
                each.spread(r, made)  # columns stay single pieces

    def _drop(self, runs: Iterable[int]) -> None:
        """Free the gradients of runs, which were used."""
        for r in runs:
            self._stream.wholes[r] = None
            for i in self._runs[r].members:
                self._stream.pieces[i] = self._stream.pieces[i].new_empty(0)

    def _of_run(self, r: int) -> Iterator[Column]:
        """The columns of a run in memory."""
        run, keys, wholes = self._runs[r], self._keys, list[Any]()
        for each in self._every:
            wholes.append(each.wholes[r])
        if type(None) in map(type, wholes):
            rows = zip(*map(WorkingTree.single, self._every, repeat(r)), strict=True)
            for i, tensors in zip(run.index, rows, strict=True):
                yield Column(keys[i] if keys else None, tensors, run.bucket)
        elif keys is None and run.numel:
            yield Column(None, tuple(wholes), run.bucket)
        else:
            yield from self._of_part(Part(r, 0, run.numel, {}, {}), {})

    def _by_leaf(self, by: Sequence[Any]) -> list[Column]:
        """Columns of single pieces, wherever their memory is."""
        given, n = list[Sequence[Tensor]](), self._written
        for each in self._every:
            own: Any = each.given
            own = own if each.stream is None else own.whole()
            given.append(flat.unpacked(flat.by_leaf(own)).pieces)
        others, found = [x for x in by if isinstance(x, Tensor)], list[Column]()
        for i, row in enumerate(zip(*given, strict=True)):
            made = [_livecopied(x, [*row, *others]) for x in row[:n]]
            found.append(Column(self._keys[i] if self._keys else None, (*made, *row[n:])))
        for k, each in enumerate(self._every[:n]):
            each.pieces = [column.tensors[k] for column in found]
        return found

    # States that are placed travel in parts, of which a few are on the device at the same time.

    def _fetched(self) -> Generator[list[Column]]:
        """Yield the columns of one part after the other; results are stored before the next."""
        there, ready = set[int](), self._ready()
        with closing(self._travelling()) as parts:
            for part in parts:
                r = part.run
                while r not in there:
                    there.update(next(ready))
                here = {k: offload.read(x) for k, x in part.here.items()}
                found = list(self._of_part(part, here) if here else self._of_run(r))
                if self._donate and found:
                    note_write()
                yield found
                for column in found:
                    if column.finish is not None:
                        column.finish()
                self._encode(part, here)
                if self._stream is not None and part.high == self._runs[r].numel:
                    self._drop([r])
        for each in self._every[: self._written]:  # put what was written into their pieces
            for r, whole in enumerate(each.wholes):
                if whole is not None:
                    each.spread(r, whole)

    def _encode(self, part: Part, here: Tensors) -> None:
        """Code what was written; padding becomes zero before."""
        run, low, high = self._runs[part.run], part.low, part.high
        gaps = list(zip(map(add, run.starts, run.lengths), run.starts[1:], strict=False))
        for k, goal in part.goals.items():
            if offload.is_coded(goal):
                for a, b in gaps:
                    if a < high and low < b:
                        here[k][max(0, a - low) : b - low] = 0.0
                goal.write(0, here[k])

    def _travelling(self) -> Generator[Part]:
        """Yield the parts of all runs on their device, and store them; those of codes are there."""
        order = list(range(len(self._runs)))
        if self._stream is not None:  # in the order in which gradients complete
            place = {i: k for k, mine in enumerate(self._stream.stream.order) for i in mine}
            order.sort(key=lambda r: max(place.get(i, 0) for i in self._runs[r].members))
        placed = [x for r in order for x in self._placed[r].values()]
        sizes = [x.extent.scratch.host_bytes for x in placed if offload.in_file(x)]
        host_bytes = min(sizes, default=offload.HOST_BYTES)
        parts = [part for r in order for part in self._parts(r, host_bytes)]
        blocks = [part.block() for part in parts]
        windows: Any = offload.stream([x for x in blocks if x.key], host_bytes)  # begins to read
        with closing(windows):
            for device, near in groupby(parts, lambda part: self._every[0].device(part.run)):
                yield from staged((x.through(windows) for x in near), device, ahead=not sizes)
            for _ in windows:  # its end is when all is written
                pass

    def _parts(self, r: int, host_bytes: int) -> Iterator[Part]:
        """The parts of a run, of which nothing is fetched yet."""
        numel, placed = self._runs[r].numel, self._placed[r]
        sizes = [x.dtype.itemsize for x in placed.values() if not offload.is_coded(x)]
        cuts = offload.cuts(numel, sizes, host_bytes) if sizes else [(0, numel)]
        if self._entire:
            cuts = [(0, numel)] if numel else []
        elif placed and not sizes:
            cuts = [(low, min(numel, low + _CODED)) for low in range(0, numel, _CODED)]
        for low, high in cuts:
            here = {k: x[low:high] for k, x in placed.items()}
            yield Part(r, low, high, here, {k: self._every[k].wholes[r][low:high] for k in here})

    def _of_part(self, part: Part, here: Tensors) -> Iterator[Column]:
        """The columns of a part of a run, as if they went on to a whole line if some are codes."""
        r, low, high, *_ = part
        run, coded = self._runs[r], any(map(offload.is_coded, part.goals.values()))
        singly = any(each.wholes[r] is None for each in self._every)
        for key, index, first, stop in _spans(run, self._keys, singly):
            a, b, found = max(low, first), min(high, stop), list[Tensor]()
            if a >= b:
                continue
            for k, each in enumerate(self._every):
                whole = each.wholes[r]
                if k in here:
                    found.append(here[k].narrow(0, a - low, b - a))
                elif whole is not None:
                    found.append(whole.narrow(0, a, b - a))
                else:
                    found.append(each.pieces[index].detach().narrow(0, a - first, b - a))
            after = (first - b) % LINE if coded else min(stop - b, (first - b) % LINE)
            column = in_lines(found, self._written, (a - first) % LINE, after)
            yield column._replace(key=key, bucket=run.bucket)


def _refuse_live(tensors: Sequence[Tensor], donate: bool) -> None:
    """Raise PlanError for a step with a derivative that has none."""
    if any(map(offload.is_coded, tensors)):
        text = "opt_step: a derivative is asked for, and moments are kept as codes"
        raise PlanError(text, fix="shard without state=, or call it under torch.no_grad()")
    if donate:
        text = "opt_step: donate=True where a derivative is asked for"
        raise PlanError(text, fix="pass donate=False, or call it under torch.no_grad()")


def _spans(run: flat.FlatRun, keys: Any, singly: bool) -> Iterator[tuple[Any, int, int, int]]:
    """Yield keys, first pieces, starts and ends of the columns of a run, or of its pieces."""
    places = zip(run.index, run.starts, map(add, run.starts, run.lengths), strict=True)
    key_of = lambda x: (keys[x[0]] if keys else None, singly and x[0])  # noqa: E731
    for (key, _), mine in groupby(places, key_of):
        first, *_, last = [*mine] * 2
        yield key, first[0], first[1], last[2]


def _livecopied(piece: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A copy to write to in place; batched under vmap where any of the others is."""
    copy = piece.clone()
    for other in others if _torch.inside_torch_func() else ():
        never = torch.zeros_like(other, dtype=torch.bool)
        copy = torch.where(never, other.to(copy.dtype), copy)
    return copy


# Trees as columns.


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

    Memory: as `Columns`.
    """
    work = Columns([target], rest, donate=donate)
    for block in work:
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
