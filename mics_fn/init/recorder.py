"""Running the code that makes a model without its memory: ops are put on a tape instead.

See [Note: recorded tensors] in `without_data`, [Note: tape] in `tape` and [Note: generators while
recording] in `rng`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device, _torch, tree
from mics_fn.collectives import checksum
from mics_fn.init.replay import Memory, Replay
from mics_fn.init.rng import default_generator, start_of, with_index
from mics_fn.init.tape import NotRecorded, Op, Tape, View
from mics_fn.init.without_data import (
    META,
    Recorded,
    left_behind,
    on_meta,
    recorded_in,
    tensors_in,
)
from mics_fn.shards import MemoryPlace

# In-place ops whose result does not depend on what was there.
OVERWRITES = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"}
OVERWRITES |= {"exponential_", "log_normal_", "cauchy_", "geometric_"}


class Recorder(_torch.DispatchMode):
    """While it is active, ops are put on its tape, and new tensors have no data.

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
        self._numbers: dict[int, int] = {}  # of storages on the tape, by `storage_id`
        self._alive: list[_torch.WeakStorage] = []  # one per storage of the tape
        self._stand_ins: dict[MemoryPlace, Recorded] = {}  # for tensors that were made outside
        self._sums: list[tuple[Tensor, Tensor]] = []  # with checksums, if others can write to them
        self._first: dict[int, tuple[torch.Generator, Tensor]] = {}  # states before the first op
        self._memory: Memory = {}  # kept from the last value that was asked for
        self._have: dict[int, int] = {}  # each storage of it, as it was before which op
        self._paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import all of torch.compile, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        if func is _torch.ASK_DEVICE:
            return args[0].device
        if func is _torch.ASK_COMPATIBLE:
            return isinstance(args[0], Recorded) == isinstance(args[1], Recorded)
        self.last = func
        if _torch.op_name(func) == "lift_fresh" and not isinstance(args[0], Recorded):
            return self._constant(args[0], outside=not args[0].untyped_storage().resizable())
        return self._record(func, _torch.op_arguments(func, args, kwargs or {}))

    def _record(self, func: Any, named: dict[str, Any]) -> Any:
        named = tree.map_leaves(lambda x: self._stand_in(x) if isinstance(x, Tensor) else x, named)
        moves = torch.Tag.inplace_view in func.tags  # it changes where a tensor lies, not memory
        writes = {} if moves else _torch.op_writes(func)
        written = [x for name in writes for x in recorded_in(named.get(name))]
        for x in written:
            if self.tape.storages[self.view_of(x).storage].outside:
                raise NotRecorded(f"{func} writes to a tensor that was made outside")
        device = self._device(named)
        given: dict[int, tuple[Recorded, Tensor]] = {}

        def bare(x: Any) -> Any:
            if not isinstance(x, Recorded):
                return x
            meta = on_meta(x)
            given[id(meta)] = (x, meta)
            return meta

        metas = tree.map_leaves(bare, named)
        out = self._result(func, named, metas)
        for x, meta in given.values():
            if MemoryPlace.of(x) != MemoryPlace.of(meta):
                x.data = self._wrap(meta, self.device_of(x))
        known = len(self.tape.storages)
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
        written: list[Recorded],
        out: Any,
        known: int,
    ) -> None:
        """Add an op, unless it only gives views; so many storages were `known` before."""
        outs = [self.view_of(x) if isinstance(x, Recorded) else None for x in tree.flatten(out)[0]]
        made = [view if view and view.storage >= known else None for view in outs]
        if not written and not any(made):
            return
        fresh = next(filter(None, made), None)
        if fresh and not recorded_in(named):
            # A replay must not depend on the defaults that torch has by then.
            now = {"dtype": fresh.dtype, "device": self.tape.storages[fresh.storage].device}
            named = named | {k: v for k, v in now.items() if _torch.op_takes(func, k)}
        blind = _torch.op_name(func) in OVERWRITES
        over = {name for name, is_out in writes.items() if blind or is_out}
        read = recorded_in({name: value for name, value in named.items() if name not in over})
        changes = {view.storage: True for view in made if view}
        for name in writes:
            for view in map(self.view_of, recorded_in(named.get(name))):
                whole = view.covers(self.tape.storages[view.storage].nbytes)
                changes[view.storage] = changes.get(view.storage, True) and name in over and whole
        generator, start = None, None
        where = self.tape.storages[next(iter(changes))].device
        if torch.Tag.nondeterministic_seeded in func.tags and where.type != "meta":
            generator = named.get("generator") or default_generator(where)
            start = self._start_next(generator)
        views = tree.map_leaves(lambda x: self.view_of(x) if isinstance(x, Recorded) else x, named)
        reads = sorted({self.view_of(x).storage for x in read})
        self.tape.add(Op(func, views, made, tuple(reads), changes, generator, start))

    def _result(self, func: Any, named: dict[str, Any], metas: dict[str, Any]) -> Any:
        """The op's result without data, by torch's rules; where these need data, by running it."""
        metas |= {name: None for name in ("generator", "pin_memory") if name in metas}
        makes = not recorded_in(named) and _torch.op_takes(func, "device")
        if makes or named.get("device") is not None:
            metas["device"] = META
        try:
            return func(**metas)
        except Exception:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise
            return self._for_real(func, named, metas)

    def _for_real(self, func: Any, named: dict[str, Any], metas: dict[str, Any]) -> Any:
        """Run an op whose result depends on data, or for which torch has no rule."""
        args = tree.map_leaves(lambda x: self.value(x) if isinstance(x, Recorded) else x, named)
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

    def ask(self, x: Recorded, question: Callable[[Tensor], Any]) -> Any:
        """The answer to a question about the value that the tensor would hold now."""
        if not self.active:
            raise left_behind("reading")
        value = self.value(x)
        with self._pause():
            return question(value)

    def value(self, x: Recorded) -> Tensor:
        """The value that a tensor would hold now, from a replay."""
        view = self.view_of(x)
        with self._pause():
            part = self.tape.needed([view.storage], have=self._have)
            if part is None:
                self._memory, self._have = {}, {}
                part = self.tape.needed([view.storage])
            ops, partial = part or ((), ())
            memory, have, self._memory, self._have = self._memory, self._have, {}, {}
            self.replay.run(ops, memory, keep=lambda k: k == view.storage or bool(self._alive[k]))
            touched = {k: i + 1 for i in ops for k in self.tape.ops[i].storages}
            found = self.replay.show(view, memory).clone()
            if touched or view.storage in have:
                have = {view.storage: have.get(view.storage, 0)} | touched
                self._have = {k: t for k, t in have.items() if k in memory and k not in partial}
                self._memory = {k: memory[k] for k in self._have}
            return found

    def finish(self) -> None:
        """End the tape, and set all generators to their state before the first op.

        Raises:
          NotRecorded: code that is not an op wrote to memory that an op reads.
        """
        self.active, self._memory, self._have = False, {}, {}
        for tensor, bits in self._sums:
            if not torch.equal(_bits(tensor), bits):
                raise NotRecorded("a tensor shares memory that other code wrote to (numpy?)")
        self.tape.finals = [(g, start_of(g)) for g, _ in self._first.values()]
        self.forget()

    def forget(self) -> None:
        """Set all generators to their state before the first op, and record no more."""
        self.active = False
        for generator, state in self._first.values():
            generator.set_state(state)

    def view_of(self, x: Tensor) -> View:
        """Where a recorded tensor lies."""
        return View.of(x, self._numbers[_torch.storage_id(x)])

    def device_of(self, x: Tensor) -> torch.device:
        """The device on which a recorded tensor would lie."""
        return self.tape.storages[self.view_of(x).storage].device

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Run ops as usual in this block; afterwards generators are as before it."""
        states = [(g, g.get_state()) for g, _ in self._first.values()]
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
            for generator, state in states:
                generator.set_state(state)

    def _wrap(self, x: Any, device: torch.device, **fields: Any) -> Any:
        """A tensor on meta as a recorded one; a new storage goes on the tape, with `fields`."""
        if not isinstance(x, Tensor):
            return x
        if not x.is_meta:
            return self._stand_in(x)
        if x.is_conj() or x.is_neg():
            raise NotRecorded(f"{self.last} gives a conjugate or negative view")
        key, nbytes = _torch.storage_id(x), x.untyped_storage().nbytes()
        if key not in self._numbers:
            self._numbers[key] = self.tape.new_storage(device, nbytes, **fields)
            self._alive.append(_torch.WeakStorage(x))
        known = self.tape.storages[self._numbers[key]]
        if known.nbytes != nbytes and known.nbytes:
            raise NotRecorded(f"{self.last} resizes memory")
        known.nbytes = nbytes
        recorded = _torch.pretend(Recorded, x, known.device)
        recorded.recorder = self
        return recorded

    def _stand_in(self, x: Tensor) -> Tensor:
        """The recorded tensor that stands for one that was made outside."""
        if isinstance(x, Recorded):
            return x
        key = MemoryPlace.of(x)
        if key not in self._stand_ins:
            self._stand_ins[key] = self._constant(x, outside=True)
        return self._stand_ins[key]

    def _constant(self, x: Tensor, *, outside: bool) -> Recorded:
        value = x.detach()
        if outside and not x.untyped_storage().resizable():
            self._sums.append((value, _bits(value)))
        meta = torch.empty_like(value, device=META)
        return self._wrap(meta, x.device, value=value, outside=outside)

    def _device(self, named: dict[str, Any]) -> torch.device:
        """Where an op puts its results."""
        if named.get("device") is not None:
            device = torch.device(named["device"])
            return _device.with_index(device)
        given = sorted(recorded_in(named), key=lambda x: x.ndim == 0)  # a number may lie on the CPU
        return self.device_of(given[0]) if given else torch.device("cpu")

    def _start_next(self, generator: torch.Generator) -> int | Tensor:
        """Where the next op of the tape begins in a generator's stream; move the stream past it."""
        state = generator.get_state()
        self._first.setdefault(_torch.generator_id(generator), (generator, state))
        start = start_of(generator)
        generator.set_state(with_index(state, len(self.tape.ops)))
        return start


def _bits(x: Tensor) -> Tensor:
    return checksum(x.contiguous().view(-1).view(torch.uint8))
