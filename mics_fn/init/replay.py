"""Running parts of a tape for real, with the random numbers that a whole run would have drawn.

[Note: random streams] A random op must begin in the state of its generator that it would have had.
How far an op moves that state is known only to its kernel, so every draw of the tape runs once, in
order: a draw that some part needs runs there, any other on scratch memory that is dropped at once.
States are kept while an op that is still to run begins with them, 5 KB each on the CPU.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.init.tape import NotRecorded, Op, Tape, View

Memory = dict[int, Any]  # storages by cell
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")


class Replay:
    """Runs ops of a tape, any part of it at any time.

    Args:
      tape: may grow in between.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._after: dict[int, Tensor] = {}  # states of generators after random ops
        self._uses: Counter[int] | None = None  # how many times each is still wanted, once known

    @torch.no_grad()
    def run(self, ops: Sequence[int], memory: Memory, keep: Callable[[int], bool]) -> None:
        """Run ops in order.

        Args:
          ops: all that the cells to be kept need, and do not hold yet.
          memory: what is there; gets what the ops make.
          keep: cells that stay after their last use here.
        """
        last: dict[int, int] = {}
        for index in ops:
            op = self.tape.ops[index]
            last.update(dict.fromkeys(op.cells, index))
        for index in ops:
            op = self.tape.ops[index]
            if op.generator is not None:
                op.generator.set_state(self._before(index))
            self._run(op, memory)
            if op.generator is not None:
                self._came_after(index, op.generator)
            for cell in op.cells:
                if last[cell] == index and not keep(cell):
                    memory.pop(cell, None)

    def _run(self, op: Op, memory: Memory) -> None:
        shown = {cell: self._bind(cell, memory) for cell in op.cells if _is_old(op, cell)}
        named = tree.map_leaves(
            lambda x: tensor_of(x, shown[x.cell]) if isinstance(x, View) else x, op.named
        )
        try:
            outs = tree.flatten(op.func(**named))[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            first = str(error).partition("\n")[0]
            raise NotRecorded(f"{op.func}, repeated: {type(error).__name__}: {first}") from error
        if len(outs) != len(op.made):
            raise NotRecorded(
                f"{op.func} gave {len(outs)} values, and {len(op.made)} when recorded"
            )
        taken = {_torch.storage_id_of(storage) for storage in memory.values()}
        for view, out in zip(op.made, outs, strict=True):
            if view is None or view.cell in memory:
                continue
            _check(op, view, out, self.tape.cells[view.cell].nbytes)
            if _torch.storage_id(out) in taken:
                raise NotRecorded(f"{op.func} gave memory that was there before")
            if _torch.op_name(op.func) in EMPTY:
                out.zero_()  # somebody reads it before it is written: then the same on every rank
            memory[view.cell] = out.untyped_storage()

    def _bind(self, cell: int, memory: Memory) -> Any:
        """The storage of a cell, made with what it held at first if it is not there."""
        if cell not in memory:
            given = self.tape.cells[cell]
            if given.value is None:
                raw = torch.empty(given.nbytes, dtype=torch.uint8, device=given.device)
            else:
                raw = torch.empty_like(given.value).copy_(given.value)
            memory[cell] = raw.untyped_storage()
        return memory[cell]

    def show(self, view: View, memory: Memory) -> Tensor:
        """A view of a cell as a tensor; the cell's storage must be there, or never written."""
        return tensor_of(view, self._bind(view.cell, memory))

    def parts(self, cells: Iterable[int], ready: Callable[[int, Memory], None]) -> None:
        """Make the content of each cell by itself, one after the other, and drop it again.

        The tape must be complete.

        Args:
          cells: whose content is wanted.
          ready: called with each cell and memory that holds it.

        Raises:
          NotRecorded: an op that some cell needs can not run again, or gives something else.
        """
        wanted = {cell: part.ops for cell in cells if (part := self.tape.needed([cell]))}
        randoms = {cell: [i for i in ops if self._is_random(i)] for cell, ops in wanted.items()}
        self._count(index for draws in randoms.values() for index in draws)
        # In the order of the last draw, so that a stream is mostly used as it goes.
        for cell in sorted(wanted, key=lambda cell: randoms[cell][-1:]):
            memory: Memory = {}
            try:
                self.run(wanted[cell], memory, keep=cell.__eq__)
            except NotRecorded as error:
                raise NotRecorded(str(error), cell) from error
            ready(cell, memory)
            for index in randoms[cell]:
                self._used(self.tape.ops[index].start)

    def finish(self) -> None:
        """Do the draws that nobody needed: then all generators are as after the last op."""
        states = [self._state(state) for _, state in self.tape.finals]  # which may draw elsewhere
        for (generator, _), state in zip(self.tape.finals, states, strict=True):
            generator.set_state(state)

    def _is_random(self, index: int) -> bool:
        return self.tape.ops[index].generator is not None

    def _before(self, index: int) -> Tensor:
        return self._state(self.tape.ops[index].start)

    def _state(self, start: int | Tensor | None) -> Tensor:
        if isinstance(start, int):
            return self._after_of(start)
        if start is None:
            raise NotRecorded("a random op without a generator")
        return start

    def _after_of(self, index: int) -> Tensor:
        """A generator's state after a random op, which runs on scratch if it did not run yet."""
        missing = []  # a chain that may be long: no recursion
        while index not in self._after:
            missing.append(index)
            start = self.tape.ops[index].start
            if not isinstance(start, int):
                break
            index = start
        for index in reversed(missing):
            self.run(self.tape.inputs_of(index).ops, {}, keep=lambda cell: False)
        return self._after[index]

    def _came_after(self, index: int, generator: torch.Generator) -> None:
        if index not in self._after and (self._uses is None or self._uses[index]):
            self._after[index] = generator.get_state()
            if self._uses is not None:
                self._used(self.tape.ops[index].start)

    def _count(self, pending: Iterable[int]) -> None:
        """From now on drop states that nothing begins with any more."""
        ops = self.tape.ops
        later = [i for i in self.tape.randoms if i not in self._after]
        inputs = (j for i in later if ops[i].reads for j in self.tape.inputs_of(i).ops[:-1])
        starts = [ops[i].start for i in (*pending, *later, *inputs)]
        starts += [state for _, state in self.tape.finals]
        self._uses = Counter(start for start in starts if isinstance(start, int))
        self._after = {i: state for i, state in self._after.items() if self._uses[i]}

    def _used(self, start: int | Tensor | None) -> None:
        if isinstance(start, int) and self._uses is not None:
            self._uses[start] -= 1
            if not self._uses[start]:
                self._after.pop(start, None)


def tensor_of(view: View, storage: Any) -> Tensor:
    """A view as a tensor on a storage."""
    empty = torch.empty(0, dtype=view.dtype, device=storage.device)
    return empty.set_(storage, view.offset, view.shape, view.stride)


def _is_old(op: Op, cell: int) -> bool:
    return all(view is None or view.cell != cell for view in op.made)


def _check(op: Op, view: View, out: Tensor, nbytes: int) -> None:
    """Refuse an output that is not as recorded: later ops would take it for something else."""
    strides = zip(view.shape, view.stride, out.stride(), strict=False)
    if (
        (tuple(out.shape), out.storage_offset(), out.dtype) != (view.shape, view.offset, view.dtype)
        or any(size > 1 and a != b for size, a, b in strides if out.numel())
        or out.untyped_storage().nbytes() < nbytes
    ):
        got = f"shape {tuple(out.shape)}, strides {out.stride()}, {out.dtype}"
        want = f"shape {view.shape}, strides {view.stride}, {view.dtype}"
        raise NotRecorded(f"{op.func} gave {got}; its rule for tensors without data says {want}")
