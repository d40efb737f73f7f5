"""Running the code that makes a model, without making its memory: ops go on a tape instead.

See [Note: hollow tensors] in `without_data`, [Note: tape] in `tape` and [Note: stamps] in `rng`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.collectives import checksum
from mics_fn.init.replay import Memory, Replay
from mics_fn.init.rng import default_generator, stamped, start_of
from mics_fn.init.tape import NotRecorded, Op, Tape, View, geometry, place
from mics_fn.init.without_data import META, Hollow, hollows_in, left_behind, on_meta, tensors_in

# In-place ops of which no result depends on what was there.
OVERWRITES = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"}
OVERWRITES |= {"exponential_", "log_normal_", "cauchy_", "geometric_"}


class Recorder(_torch.DispatchMode):
    """While it is active, ops go on its tape and tensors are hollow.

    Example:
      >>> with Recorder() as recorder:
      ...     x = torch.ones(2).mul_(3)
      ...     y = float(x.sum())
      >>> y, [str(op.func) for op in recorder.tape.ops]
      (6.0, ['aten.ones.default', 'aten.mul_.Tensor', 'aten.sum.default'])
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self.replay = Replay(self.tape)
        self.active = True
        self.last: Any = None  # the op that came last, for errors
        self._cells: dict[int, int] = {}  # by storage
        self._alive: list[_torch.WeakStorage] = []  # by cell
        self._twins: dict[Any, Hollow] = {}  # of tensors made outside
        self._sums: list[tuple[Tensor, Tensor]] = []  # memory that others can write, and its bits
        self._first: dict[int, tuple[torch.Generator, Tensor]] = {}  # states before all
        self._memory: Memory = {}  # what the last value followed from
        self._have: dict[int, int] = {}  # as it was before which op
        self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or all of torch.compile would be imported, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        if func is _torch.ASK_DEVICE:
            return args[0].device
        if func is _torch.ASK_COMPATIBLE:
            return isinstance(args[0], Hollow) == isinstance(args[1], Hollow)
        self.last = func
        if _torch.op_name(func) == "lift_fresh" and not isinstance(args[0], Hollow):
            return self._constant(args[0], outside=not args[0].untyped_storage().resizable())
        return self._record(func, _torch.op_arguments(func, args, kwargs or {}))

    def _record(self, func: Any, named: dict[str, Any]) -> Any:
        named = tree.map_leaves(lambda x: self._twin(x) if isinstance(x, Tensor) else x, named)
        moves = torch.Tag.inplace_view in func.tags  # it changes where a tensor lies, not memory
        writes = {} if moves else _torch.op_writes(func)
        written = [h for name in writes for h in hollows_in(named.get(name))]
        for hollow in written:
            if self.tape.cells[self.view_of(hollow).cell].outside:
                raise NotRecorded(f"{func} writes to a tensor that was made outside")
        device = self._device(named)
        given: dict[int, tuple[Hollow, Tensor]] = {}

        def bare(x: Any) -> Any:
            if not isinstance(x, Hollow):
                return x
            meta = on_meta(x)
            given[id(meta)] = (x, meta)
            return meta

        metas = tree.map_leaves(bare, named)
        out = self._result(func, named, metas)
        for hollow, meta in given.values():
            if place(hollow) != place(meta):
                hollow.data = self._wrap(meta, self.device_of(hollow))
        known = len(self.tape.cells)
        shown = tree.map_leaves(
            lambda x: given[id(x)][0] if id(x) in given else self._wrap(x, device), out
        )
        self._put_on_tape(func, named, writes, written, shown, known)
        return shown

    def _put_on_tape(
        self,
        func: Any,
        named: dict[str, Any],
        writes: dict[str, bool],
        written: list[Hollow],
        out: Any,
        known: int,
    ) -> None:
        """Write an op down, unless all that it gives are views; `known` cells were there before."""
        outs = [self.view_of(x) if isinstance(x, Hollow) else None for x in tree.flatten(out)[0]]
        made = [view if view is not None and view.cell >= known else None for view in outs]
        if not written and not any(made):
            return
        fresh = next((view for view in made if view is not None), None)
        if fresh is not None and not hollows_in(named):
            # The defaults that count are those of now.
            now = {"dtype": fresh.dtype, "device": self.tape.cells[fresh.cell].device}
            named = named | {k: v for k, v in now.items() if _torch.op_takes(func, k)}
        blind = _torch.op_name(func) in OVERWRITES
        over = {name for name, is_out in writes.items() if blind or is_out}
        read = hollows_in({name: value for name, value in named.items() if name not in over})
        changes = {view.cell: True for view in made if view is not None}
        for name in writes:
            for view in map(self.view_of, hollows_in(named.get(name))):
                whole = view.is_dense and view.nbytes == self.tape.cells[view.cell].nbytes
                changes[view.cell] = changes.get(view.cell, True) and name in over and whole
        generator, start = None, None
        where = self.tape.cells[next(iter(changes))].device
        if torch.Tag.nondeterministic_seeded in func.tags and where.type != "meta":
            generator = named.get("generator") or default_generator(where)
            start = self._stamp(generator)
        views = tree.map_leaves(lambda x: self.view_of(x) if isinstance(x, Hollow) else x, named)
        reads = sorted({self.view_of(hollow).cell for hollow in read})
        self.tape.add(Op(func, views, made, tuple(reads), changes, generator, start))

    def _result(self, func: Any, named: dict[str, Any], metas: dict[str, Any]) -> Any:
        """The op's result without data, by torch's rules, or where they do not know by its data."""
        metas |= {name: None for name in ("generator", "pin_memory") if name in metas}
        if named.get("device") is not None or (
            not hollows_in(named) and _torch.op_takes(func, "device")
        ):
            metas["device"] = META
        try:
            return func(**metas)
        except Exception:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise
            return self._for_real(func, named, metas)

    def _for_real(self, func: Any, named: dict[str, Any], metas: dict[str, Any]) -> Any:
        """Run an op whose result depends on data, or for which torch has no rule."""
        args = tree.map_leaves(lambda x: self.value(x) if isinstance(x, Hollow) else x, named)
        with self._pause(), torch.no_grad():
            out = func(**args)
        same = {id(x): meta for x, meta in zip(*map(tensors_in, (args, metas)), strict=True)}
        used = {_torch.storage_id(x) for x in tensors_in(args)}

        def bare(x: Any) -> Any:
            if not isinstance(x, Tensor) or id(x) in same:
                return same.get(id(x), x)
            if _torch.storage_id(x) in used:
                raise NotRecorded(f"{func} gives views, and torch has no rule for them")
            return torch.empty_like(x, device=META)

        return tree.map_leaves(bare, out)

    def ask(self, hollow: Hollow, question: Callable[[Tensor], Any]) -> Any:
        """What it would answer with what it would hold now."""
        if not self.active:
            raise left_behind("reading")
        value = self.value(hollow)
        with self._pause():
            return question(value)

    def value(self, hollow: Hollow) -> Tensor:
        """What a hollow tensor would hold now, replayed."""
        view = self.view_of(hollow)
        with self._pause():
            part = self.tape.needed([view.cell], have=self._have)
            if part is None:
                self._memory, self._have = {}, {}
                part = self.tape.needed([view.cell])
            ops, partial = part or ((), ())
            memory, have, self._memory, self._have = self._memory, self._have, {}, {}
            self.replay.run(ops, memory, keep=lambda c: c == view.cell or bool(self._alive[c]))
            touched = {c: i + 1 for i in ops for c in self.tape.ops[i].cells}
            found = self.replay.show(view, memory).clone()
            if touched or view.cell in have:
                have = {view.cell: have.get(view.cell, 0)} | touched
                self._have = {c: t for c, t in have.items() if c in memory and c not in partial}
                self._memory = {c: memory[c] for c in self._have}
            return found

    def finish(self) -> None:
        """No more ops, and all generators as they were before the first; the tape is complete.

        Raises:
          NotRecorded: memory that an op reads was written to by code that is no op.
        """
        self.active, self._memory, self._have = False, {}, {}
        for tensor, bits in self._sums:
            if not torch.equal(_bits(tensor), bits):
                raise NotRecorded("a tensor shares memory that other code wrote to (numpy?)")
        self.tape.finals = [(g, start_of(g)) for g, _ in self._first.values()]
        self.forget()

    def forget(self) -> None:
        """No more ops, and all generators as they were before the first."""
        self.active = False
        for generator, state in self._first.values():
            generator.set_state(state)

    def view_of(self, hollow: Tensor) -> View:
        """Where a hollow tensor lies."""
        cell = self._cells[_torch.storage_id(hollow)]
        shape, stride, offset = geometry(hollow)
        return View(cell, shape, stride, offset, hollow.dtype)

    def device_of(self, hollow: Tensor) -> torch.device:
        """The device of its memory."""
        return self.tape.cells[self._cells[_torch.storage_id(hollow)]].device

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Ops run as usual, and generators are afterwards as before."""
        states = [(g, g.get_state()) for g, _ in self._first.values()]
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
            for generator, state in states:
                generator.set_state(state)

    def _wrap(self, x: Any, device: torch.device, **cell: Any) -> Any:
        """A tensor on meta as a hollow one; its memory gets a cell if it is new."""
        if not isinstance(x, Tensor):
            return x
        if not x.is_meta:
            return self._twin(x)
        if x.is_conj() or x.is_neg():
            raise NotRecorded(f"{self.last} gives a conjugate or negative view")
        key, nbytes = _torch.storage_id(x), x.untyped_storage().nbytes()
        if key not in self._cells:
            self._cells[key] = self.tape.cell(device, nbytes, **cell)
            self._alive.append(_torch.WeakStorage(x))
        known = self.tape.cells[self._cells[key]]
        if known.nbytes != nbytes and known.nbytes:
            raise NotRecorded(f"{self.last} resizes memory")
        known.nbytes = nbytes
        hollow = _torch.pretend(Hollow, x, known.device)
        hollow.recorder = self
        return hollow

    def _twin(self, x: Tensor) -> Tensor:
        """Stands for a tensor that was made outside."""
        if isinstance(x, Hollow):
            return x
        key = (*place(x), x.dtype)
        if key not in self._twins:
            self._twins[key] = self._constant(x, outside=True)
        return self._twins[key]

    def _constant(self, x: Tensor, *, outside: bool) -> Hollow:
        value = x.detach()
        if outside and not x.untyped_storage().resizable():
            self._sums.append((value, _bits(value)))
        meta = torch.empty_like(value, device=META)
        return self._wrap(meta, x.device, value=value, outside=outside)

    def _device(self, named: dict[str, Any]) -> torch.device:
        """Where an op puts its results."""
        if named.get("device") is not None:
            device = torch.device(named["device"])
            if device.type == "cuda" and device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            return device
        hollows = hollows_in(named)
        hollows.sort(key=lambda h: h.ndim == 0)  # a number may lie on the CPU
        return self.device_of(hollows[0]) if hollows else torch.device("cpu")

    def _stamp(self, generator: torch.Generator) -> int | Tensor:
        """Where the next op of the tape begins in a generator's stream."""
        state = generator.get_state()
        self._first.setdefault(_torch.generator_id(generator), (generator, state))
        start = start_of(generator)
        generator.set_state(stamped(state, len(self.tape.ops)))
        return start


def _bits(x: Tensor) -> Tensor:
    return checksum(x.contiguous().view(-1).view(torch.uint8))
