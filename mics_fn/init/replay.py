"""Running parts of a tape for real, with the random numbers that a whole run would have drawn.

[Note: random streams] A random op must begin in the state that its generator would have had. Only
the kernel of an op knows how far it moves that state, so every draw of the tape runs once, in
order: a draw that some part needs runs there, and any other runs on scratch memory that is dropped
at once. States are kept as long as an op that is still to run begins with them, 5 KB each on CPU.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.errors import first_line
from mics_fn.init.tape import NotRecorded, Op, Tape, View

Memory = dict[int, Any]  # torch's storages, by their numbers on the tape
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")


class Replay:
    """Runs any part of a tape at any time.

    Args:
      tape: it may grow in between.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._after: dict[int, Tensor] = {}  # states of generators after random ops
        self._uses: Counter[int] | None = None  # how many times each is still wanted, once known

    @torch.no_grad()
    def run(self, ops: Sequence[int], memory: Memory, keep: Callable[[int], bool]) -> None:
        """Run ops in order.

        Args:
          ops: all ops that the kept storages need and that did not run yet.
          memory: the storages that exist; those that the ops make are added.
          keep: whether a storage stays after its last use here.
        """
        last: dict[int, int] = {}
        for index in ops:
            last.update(dict.fromkeys(self.tape.ops[index].storages, index))
        for index in ops:
            op = self.tape.ops[index]
            if op.generator is not None:
                op.generator.set_state(self._state(op.start))
            self._run(op, memory)
            if op.generator is not None:
                self._keep_state_after(index, op.generator)
            for storage in op.storages:
                if last[storage] == index and not keep(storage):
                    memory.pop(storage, None)

    def _run(self, op: Op, memory: Memory) -> None:
        own = {view.storage for view in op.made if view is not None}
        shown = {storage: self._bind(storage, memory) for storage in {*op.storages} - own}
        named = tree.map_leaves(
            lambda x: x.on(shown[x.storage]) if isinstance(x, View) else x, op.named
        )
        try:
            outs = tree.flatten(op.func(**named))[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            first = first_line(error)
            raise NotRecorded(f"{op.func}, repeated: {type(error).__name__}: {first}") from error
        if len(outs) != len(op.made):
            text = f"{op.func} gave {len(outs)} values, and {len(op.made)} when recorded"
            raise NotRecorded(text)
        taken = {_torch.storage_id_of(storage) for storage in memory.values()}
        for view, out in zip(op.made, outs, strict=True):
            if view is None or view.storage in memory:
                continue
            _check(op, view, out, self.tape.storages[view.storage].nbytes)
            if _torch.storage_id(out) in taken:
                raise NotRecorded(f"{op.func} gave memory that was there before")
            if _torch.op_name(op.func) in EMPTY:
                out.zero_()  # code that reads it before it writes finds the same on every rank
            memory[view.storage] = out.untyped_storage()

    def _bind(self, storage: int, memory: Memory) -> Any:
        """A storage of torch for one of the tape; a new one holds what was there at first."""
        if storage not in memory:
            given = self.tape.storages[storage]
            if given.value is None:
                raw = torch.empty(given.nbytes, dtype=torch.uint8, device=given.device)
            else:
                raw = torch.empty_like(given.value).copy_(given.value)
            memory[storage] = raw.untyped_storage()
        return memory[storage]

    def show(self, view: View, memory: Memory) -> Tensor:
        """A view as a tensor; its storage must be in memory, or never have been written to."""
        return view.on(self._bind(view.storage, memory))

    def parts(self, storages: Iterable[int], use: Callable[[int, Memory], None]) -> None:
        """Make the content of each storage by itself, one after the other, and drop it again.

        The tape must be complete.

        Args:
          storages: whose content is wanted.
          use: called with each storage and the memory that holds it.

        Raises:
          NotRecorded: an op that some storage needs cannot run again, or gives something else.
        """
        wanted = {key: part.ops for key in storages if (part := self.tape.needed([key]))}
        ops = self.tape.ops
        randoms = {k: [i for i in v if ops[i].generator is not None] for k, v in wanted.items()}
        self._count(index for draws in randoms.values() for index in draws)
        # In the order of the last draw, so that most states are used soon after they are reached.
        for storage in sorted(wanted, key=lambda key: randoms[key][-1:]):
            memory: Memory = {}
            try:
                self.run(wanted[storage], memory, keep=storage.__eq__)
            except NotRecorded as error:
                raise NotRecorded(str(error), storage) from error
            use(storage, memory)
            for index in randoms[storage]:
                self._count_use(ops[index].start)

    def finish(self) -> None:
        """Do the draws that nothing needed, so that all generators are as after the last op."""
        states = [self._state(state) for _, state in self.tape.finals]  # this may draw elsewhere
        for (generator, _), state in zip(self.tape.finals, states, strict=True):
            generator.set_state(state)

    def _state(self, start: int | Tensor | None) -> Tensor:
        if isinstance(start, int):
            return self._state_after(start)
        if start is None:
            raise NotRecorded("a random op without a generator")
        return start

    def _state_after(self, index: int) -> Tensor:
        """A generator's state after a random op, which runs on scratch if it did not run yet."""
        missing = []  # the chain of ops may be too long for recursion
        while index not in self._after:
            missing.append(index)
            start = self.tape.ops[index].start
            if not isinstance(start, int):
                break
            index = start
        for index in reversed(missing):
            self.run(self.tape.inputs_of(index).ops, {}, keep=lambda storage: False)
        return self._after[index]

    def _keep_state_after(self, index: int, generator: torch.Generator) -> None:
        if index not in self._after and (self._uses is None or self._uses[index]):
            self._after[index] = generator.get_state()
            self._count_use(self.tape.ops[index].start)

    def _count(self, pending: Iterable[int]) -> None:
        """Drop, from now on, each state with which no op begins any more."""
        ops = self.tape.ops
        later = [i for i in self.tape.randoms if i not in self._after]
        inputs = (j for i in later if ops[i].reads for j in self.tape.inputs_of(i).ops[:-1])
        starts = [ops[i].start for i in (*pending, *later, *inputs)]
        starts += [state for _, state in self.tape.finals]
        self._uses = Counter(start for start in starts if isinstance(start, int))
        self._after = {i: state for i, state in self._after.items() if self._uses[i]}

    def _count_use(self, start: int | Tensor | None) -> None:
        if isinstance(start, int) and self._uses is not None:
            self._uses[start] -= 1
            if not self._uses[start]:
                self._after.pop(start, None)


def _check(op: Op, view: View, out: Tensor, nbytes: int) -> None:
    """Refuse an output that is not as recorded, because later ops would read it wrongly."""
    strides = zip(view.shape, view.stride, out.stride(), strict=False)
    if (
        (tuple(out.shape), out.storage_offset(), out.dtype) != (view.shape, view.offset, view.dtype)
        or any(size > 1 and a != b for size, a, b in strides if out.numel())
        or out.untyped_storage().nbytes() < nbytes
    ):
        got = f"shape {tuple(out.shape)}, strides {out.stride()}, {out.dtype}"
        want = f"shape {view.shape}, strides {view.stride}, {view.dtype}"
        raise NotRecorded(f"{op.func} gave {got}; its rule for tensors without data says {want}")
