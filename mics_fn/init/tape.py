"""A program over memory: the ops that made a model, and which of them a tensor needs.

[Note: tape] While a model is recorded no op runs. What is kept of a tensor is a `View`: where it
lies in a storage, the piece of memory that torch calls by this name. Views of views, `.data` and
swaps of parameters then need no special care, because each of them is another view of a storage.
Only ops that write are on the tape. To learn what a storage holds, walk back from the last write to
it, and from there to whatever each of those ops read. A write that covers a whole storage and reads
nothing of it ends the walk, so the draws of a module's own reset are skipped when other
code initialises it again.

[Note: generators while recording] No random number is drawn while ops are recorded, so the state of
a generator would never move. Each random op therefore writes its index on the tape into the state.
The next random op reads there where it begins: after the op of that index, even if code saved and
restored the state in between; or, if the state holds no index, in that state, which code has set.

[Note: recorded tensors] While a model is recorded every new tensor is `Recorded`: it reports the
real device to all code that asks, and has no data. So code takes the branches that it would take
with real tensors. Tensors on meta do not give that: initialisers of torch and of other libraries
skip them. Where code asks for a value (`.item()`, `bool`, `.numpy()`), the ops that determine it
are replayed at once. Little is left that cannot be recorded: an op that writes to a tensor made
outside, code that wants the address of a tensor, and layouts other than strided.

[Note: random streams] A random op must begin in the state that its generator would have had. Only
the kernel of an op knows how far it moves that state. So where a draw is needed whose predecessors
did not run yet, these run in order on scratch memory, which is dropped at once. The state after
each draw is kept, 5 KB on CPU.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mics_fn import _torch, tree
from mics_fn.collectives import checksum
from mics_fn.errors import LeafError, first_line
from mics_fn.shards import MemoryPlace


class NotRecorded(LeafError):
    """The construction of a model cannot be recorded or replayed; the line says where it failed."""

    def __init__(self, why: str) -> None:
        text = "init_model: this model cannot be made in parts"
        fix = "mend that, or make it in full: shard(dict(model.named_parameters()), groups)"
        super().__init__(text, [why], fix)


@dataclass(frozen=True)
class View:
    """A tensor as a place in a storage of the tape; stride and offset count elements."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, storage: int) -> "View":
        """The view that a tensor is of the storage with this number."""
        return cls(storage, tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    def on(self, memory: Any) -> Tensor:
        """The tensor that this view is of a storage of torch."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory, self.offset, self.shape, self.stride)

    def covers(self, nbytes: int) -> bool:
        """Whether its elements fill so many bytes, one after the other."""
        dense = torch.empty(self.shape, dtype=self.dtype, device=META)
        return dense.stride() == self.stride and dense.nbytes == nbytes


@dataclass
class TapeStorage:
    """A piece of memory on the tape.

    Args:
      device: where it lies.
      nbytes: its length.
      value: what it holds before the first write, if it was made outside the tape.
      outside: whether code outside the tape can see it, so that no write to it may be delayed.
      writes: the indices of the ops that write to it, ascending.
    """

    device: torch.device
    nbytes: int
    value: Tensor | None = None
    outside: bool = False
    writes: list[int] = field(default_factory=list)


class Op(NamedTuple):
    """One op that writes memory; storages are given by their numbers."""

    func: Any  # an OpOverload
    named: dict[str, Any]  # its arguments by name, tensors as `View`
    made: list[View | None]  # one per output: a view of a storage that the op made, or None
    reads: tuple[int, ...]
    writes: dict[int, bool]  # by storage: whether everything that was there before is lost
    draw: Any = None  # of a random op its generator, and where that begins: after an op, or a state

    @property
    def storages(self) -> tuple[int, ...]:
        """All storages that it reads or writes."""
        return (*self.reads, *self.writes)


Memory = dict[int, Any]  # torch's storages, by their numbers on the tape
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")


class Tape:
    """Storages and ops, in the order in which they were made; any part runs again at any time.

    Example:
      >>> tape, cpu = Tape(), torch.device("cpu")
      >>> a, b = tape.new_storage(cpu, 8), tape.new_storage(cpu, 8)
      >>> for reads, writes in [((), {a: True}), ((a,), {a: False}), ((a,), {b: True})]:
      ...     tape.add(Op(None, {}, [], reads, writes))
      >>> tape.add(Op(None, {}, [], (), {a: True}))
      >>> tape.needed([b]), tape.needed([a])
      ([0, 1, 2], [3])
    """

    def __init__(self) -> None:
        self.storages: list[TapeStorage] = []
        self.ops: list[Op] = []
        self._after: dict[int, Tensor] = {}  # states of generators after random ops

    def new_storage(self, device: torch.device, nbytes: int, **fields: Any) -> int:
        """Add a storage; returns its number."""
        self.storages.append(TapeStorage(device, nbytes, **fields))
        return len(self.storages) - 1

    def add(self, op: Op) -> None:
        """Append an op."""
        index = len(self.ops)
        self.ops.append(op)
        for storage in op.writes:
            self.storages[storage].writes.append(index)

    def needed(self, storages: Iterable[int], end: int | None = None) -> list[int]:
        """The ops that determine what some storages hold, in order.

        Args:
          storages: whose content is wanted.
          end: the content as it is before this op; default after the last one.
        """
        found: set[int] = set()
        seen: set[tuple[int, int]] = set()  # storages, as an op left them
        todo = [(storage, len(self.ops) if end is None else end) for storage in storages]
        while todo:
            storage, before = todo.pop()
            writes = self.storages[storage].writes
            place = bisect_left(writes, before)
            if not place or (storage, writes[place - 1]) in seen:
                continue
            index = writes[place - 1]
            seen.add((storage, index))
            found.add(index)
            todo += [(read, index) for read in self.ops[index].reads]
            if not self.ops[index].writes[storage]:  # something of what was there before stays
                todo.append((storage, index))
        return sorted(found)

    # Running parts of it for real, with the random numbers that a whole run would have drawn.

    def content(self, storage: int) -> Any:
        """A storage of torch with what a storage of the tape holds after the last op.

        Raises:
          NotRecorded: an op cannot run again, or gives something else than it was recorded to give.
        """
        memory = self._run_all(self.needed([storage]), kept=storage)
        return self._bind(storage, memory)

    def state(self, start: int | Tensor) -> Tensor:
        """The state in which a random op begins: after another op, or one that code has set."""
        missing, at = [], start  # the chain of ops may be too long for recursion
        while isinstance(at, int) and at not in self._after:
            missing.append(at)
            at = self.ops[at].draw[1]
        for index in reversed(missing):
            inputs = self.needed(self.ops[index].reads, index)
            self._run_all([*inputs, index], kept=None)
        return self._after[start] if isinstance(start, int) else start

    @torch.no_grad()
    def _run_all(self, ops: Sequence[int], kept: int | None) -> Memory:
        """Run ops in order, and drop each storage after its last use, but for one."""
        memory: Memory = {}
        last = {storage: index for index in ops for storage in self.ops[index].storages}
        for index in ops:
            op = self.ops[index]
            if op.draw is None:
                self._run(op, memory)
            else:
                generator, start = op.draw
                generator.set_state(self.state(start))
                self._run(op, memory)
                self._after[index] = generator.get_state()
            for storage in op.storages:
                if last[storage] == index and storage != kept:
                    memory.pop(storage, None)
        return memory

    def _run(self, op: Op, memory: Memory) -> None:
        own = {view.storage for view in op.made if view is not None}
        shown = {storage: self._bind(storage, memory) for storage in {*op.storages} - own}
        put = lambda x: x.on(shown[x.storage]) if isinstance(x, View) else x  # noqa: E731
        named = tree.map_leaves(put, op.named)
        try:
            outs = tree.flatten(op.func(**named))[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            first = first_line(error)
            raise NotRecorded(f"{op.func}, repeated: {type(error).__name__}: {first}") from error
        for view, out in zip(op.made, outs, strict=True):
            if view is None or view.storage in memory:
                continue
            _check(op, view, out, self.storages[view.storage].nbytes)
            if _torch.op_name(op.func) in EMPTY:
                out.zero_()  # code that reads it before it writes finds the same on every rank
            memory[view.storage] = out.untyped_storage()

    def _bind(self, storage: int, memory: Memory) -> Any:
        """A storage of torch for one of the tape; a new one holds what was there at first."""
        if storage not in memory:
            given = self.storages[storage]
            if given.value is None:
                raw = torch.empty(given.nbytes, dtype=torch.uint8, device=given.device)
            else:
                raw = torch.empty_like(given.value).copy_(given.value)
            memory[storage] = raw.untyped_storage()
        return memory[storage]


def _check(op: Op, view: View, out: Tensor, nbytes: int) -> None:
    """Refuse an output that is not as recorded, because later ops would read it wrongly."""
    got = View.of(out, view.storage)
    strides = zip(view.shape, view.stride, got.stride, strict=False)
    other = any(size > 1 and a != b for size, a, b in strides if out.numel())
    small = out.untyped_storage().nbytes() < nbytes
    if other or small or replace(got, stride=view.stride) != view:
        raise NotRecorded(f"{op.func} gave {got}; its rule for tensors without data says {view}")


# Where in a generator's stream a recorded op begins, although no op draws while recording.

MARK = 0x6D694353  # tells a state with an index from a real one
ON_CUDA = 2  # words of a state there: the seed, and how many numbers were drawn


def with_index(state: Tensor, index: int) -> Tensor:
    """A generator's state that holds the index of an op; its seed can still be read.

    >>> generator = torch.Generator().manual_seed(5)
    >>> generator.set_state(with_index(generator.get_state(), 7)).initial_seed()
    5
    >>> start_of(generator.get_state()), torch.is_tensor(start_of(torch.Generator().get_state()))
    (7, True)
    """
    words = state.clone().view(torch.int64)
    if len(words) == ON_CUDA:
        words[1] = MARK << 32 | index * 4
    else:
        words[3:6] = torch.tensor([MARK, MARK + 1, index])
    return words.view(torch.uint8)


def start_of(state: Tensor) -> int | Tensor:
    """Where the next op begins: the index of the op that it follows, or a state."""
    words = state.view(torch.int64)
    if len(words) == ON_CUDA:
        mark, place = divmod(int(words[1]), 2**32)
        return place // 4 if mark == MARK else state
    first, second, index = words[3:6].tolist()
    return index if (first, second) == (MARK, MARK + 1) else state


def default_generator(device: torch.device) -> torch.Generator:
    """The generator of ops that are not given one.

    Raises:
      LeafError: for such devices torch keeps no generator, or one whose state is not known here.
    """
    found = _torch.default_generator(device)
    if found is None or device.type not in ("cpu", "cuda"):
        text = f"init_model: random numbers that are drawn on {device} cannot be replayed"
        fix = "draw on the CPU: torch.nn.init.normal_(torch.empty(..., device='cpu')).to(device)"
        raise LeafError(text, fix=fix)
    return found


# Tensors without data that stand for those of a model while its construction is recorded.

META = torch.device("meta")


class Recorded(Tensor):
    """A tensor without data; what it would hold is on the tape of a `Recorder`."""

    recorder: "Recorder"
    __torch_function__ = _torch.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _torch.ASK_DEVICE:
            return args[0].device
        if func is _torch.ASK_COMPATIBLE:
            return True
        if recorded_in(args)[0].recorder.active:
            raise NotRecorded(f"{func} makes a tensor of another class, as lazy modules do")
        raise without_data(f"{func}")

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The device on which it would lie."""
        return self.recorder.device_of(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Its value, read-only, since a write to it would not be recorded."""
        array = self.recorder.ask(self, lambda x: x.numpy(force=force))
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Its value as numbers."""
        return self.recorder.ask(self, Tensor.tolist)

    def __format__(self, spec: str) -> str:
        return self.recorder.ask(self, lambda x: format(x, spec))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Recorded(shape={tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        # The same as torch does, whose own code asks a tensor of another class for its address.
        if not self.is_leaf:
            raise RuntimeError("only tensors that no op computed can be copied by deepcopy")
        if not self.recorder.active:
            made = self.recorder.value(self, keep=True)
            if isinstance(self, nn.Parameter):
                made = nn.Parameter(made, self.requires_grad)
            memo[id(self)] = made.requires_grad_(self.requires_grad)
            vars(made).update(marks_of(self))
            return made
        copied = self.detach()
        if isinstance(self, nn.Parameter):
            copied = copied.clone()
        else:  # all of its storage, and once for all tensors there
            copies = memo.setdefault("storages of recorded tensors", {})
            key, length = _torch.storage_id(self), self.untyped_storage().nbytes() // self.itemsize
            if key not in copies:
                copies[key] = copied.as_strided((length,), (1,), 0).view(torch.uint8).clone()
            place = self.shape, self.stride(), self.storage_offset()
            copied = copies[key].view(self.dtype).as_strided(*place)
        copied.requires_grad_(self.requires_grad)
        for name, value in vars(self).items():
            setattr(copied, name, value)
        memo[id(self)] = copied
        return copied


OWN = {"recorder", "_is_param"}  # attributes of a recorded tensor that its user did not set


def marks_of(x: Tensor) -> dict[str, Any]:
    """The attributes that users set on a tensor, such as `no_decay`."""
    return {k: v for k, v in vars(x).items() if k not in OWN and not isinstance(v, Recorded)}


def without_data(what: str) -> LeafError:
    """The error for a tensor that is still without data after its model was made."""
    text = f"{what} on a tensor that init_model left without data: it was made with the model"
    fix = "keep it in the module, as a buffer or an attribute, where init_model finds it"
    return LeafError(text, fix=fix)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a pytree."""
    return [x for x in tree.flatten(value)[0] if isinstance(x, Tensor)]


def recorded_in(value: Any) -> list[Recorded]:
    """The recorded tensors of a pytree."""
    return [x for x in tensors_in(value) if isinstance(x, Recorded)]


# Running the code that makes a model without its memory: ops are put on a tape instead.

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
        self.active = True
        self.last: Any = None  # the op that came last, for errors
        self._numbers: dict[int, int] = {}  # of storages on the tape, by `storage_id`
        self._kept_alive: list[Any] = []  # so that no number of a storage is used again
        self._stand_ins: dict[MemoryPlace, Recorded] = {}  # for tensors that were made outside
        self._sums: list[tuple[Tensor, Tensor]] = []  # with checksums, if others can write to them
        self._first: dict[int, tuple[torch.Generator, Tensor]] = {}  # states before the first op
        self._last: list[tuple[torch.Generator, int | Tensor]] = []  # after the last op
        self._replayed: Memory = {}  # once nothing is recorded any more
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
        device = self._device(named)
        given: dict[int, tuple[Recorded, Tensor]] = {}

        def bare(x: Any) -> Any:
            if not isinstance(x, Recorded):
                return x
            # On meta, for torch's rules of shapes; it shares the storage without data.
            meta = View.of(x, 0).on(x.untyped_storage())
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
        self._put_on_tape(func, named, writes, shown, known)
        return shown

    def _put_on_tape(
        self, func: Any, named: dict[str, Any], writes: dict[str, bool], out: Any, known: int
    ) -> None:
        """Add an op, unless it only gives views; so many storages were `known` before."""
        outs = [self.view_of(x) if isinstance(x, Recorded) else None for x in tree.flatten(out)[0]]
        made = [view if view and view.storage >= known else None for view in outs]
        blind = _torch.op_name(func) in OVERWRITES
        over = {name for name, is_out in writes.items() if blind or is_out}
        changes = {view.storage: True for view in made if view}
        for name in writes:
            for view in map(self.view_of, recorded_in(named.get(name))):
                storage = self.tape.storages[view.storage]
                if storage.outside:
                    raise NotRecorded(f"{func} writes to a tensor that was made outside")
                whole = name in over and view.covers(storage.nbytes)
                changes[view.storage] = changes.get(view.storage, True) and whole
        if not changes:
            return
        fresh = next(filter(None, made), None)
        if fresh and not recorded_in(named):
            # A replay must not depend on the defaults that torch has by then.
            now = {"dtype": fresh.dtype, "device": self.tape.storages[fresh.storage].device}
            named = named | {k: v for k, v in now.items() if _torch.op_takes(func, k)}
        read = recorded_in({name: value for name, value in named.items() if name not in over})
        draw = None
        where = self.tape.storages[next(iter(changes))].device
        if torch.Tag.nondeterministic_seeded in func.tags and where.type != "meta":
            generator = named.get("generator") or default_generator(where)
            draw = generator, self._start_next(generator)
        views = tree.map_leaves(lambda x: self.view_of(x) if isinstance(x, Recorded) else x, named)
        reads = sorted({self.view_of(x).storage for x in read})
        self.tape.add(Op(func, views, made, tuple(reads), changes, draw))

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
        """Run an op on data: its result depends on data, or torch has no meta rule."""
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
            raise without_data("reading")
        value = self.value(x)
        with self._pause():
            return question(value)

    def value(self, x: Tensor, *, keep: bool = False) -> Tensor:
        """The value that a tensor would hold now, from a replay.

        Args:
          x: the tensor.
          keep: whether the storages that were replayed before stay in memory.
        """
        view = self.view_of(x)
        with self._pause():
            if self.active:  # what comes later may write to it
                return view.on(self.tape.content(view.storage))
            if view.storage not in self._replayed:
                if not keep:
                    self._replayed.clear()
                self._replayed[view.storage] = self.tape.content(view.storage)
            return view.on(self._replayed[view.storage])

    def finish(self) -> None:
        """End the tape, and set all generators to their state before the first op.

        Raises:
          NotRecorded: code that is not an op wrote to memory that an op reads.
        """
        self.active = False
        for tensor, bits in self._sums:
            if not torch.equal(_bits(tensor), bits):
                raise NotRecorded("a tensor shares memory that other code wrote to (numpy?)")
        self._last = [(g, start_of(g.get_state())) for g, _ in self._first.values()]
        self.forget()

    def forget(self) -> None:
        """Set all generators to their state before the first op, and record no more."""
        self.active = False
        for generator, state in self._first.values():
            generator.set_state(state)

    def finish_generators(self) -> None:
        """Set all generators to their state after the last op, by the draws that nothing needed."""
        states = [self.tape.state(state) for _, state in self._last]  # it draws elsewhere
        for (generator, _), state in zip(self._last, states, strict=True):
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
            self._kept_alive.append(StorageWeakRef(x.untyped_storage()))
        known = self.tape.storages[self._numbers[key]]
        if known.nbytes not in (0, nbytes):
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
            return _torch.with_index(device)
        given = sorted(recorded_in(named), key=lambda x: x.ndim == 0)  # a number may lie on the CPU
        return self.device_of(given[0]) if given else torch.device("cpu")

    def _start_next(self, generator: torch.Generator) -> int | Tensor:
        """Where the next op of the tape begins in a generator's stream; move the stream past it."""
        state = generator.get_state()
        self._first.setdefault(_torch.generator_id(generator), (generator, state))
        generator.set_state(with_index(state, len(self.tape.ops)))
        return start_of(state)


def _bits(x: Tensor) -> Tensor:
    return checksum(x.contiguous().view(-1).view(torch.uint8))
