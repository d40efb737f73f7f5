"""`Task`: what a rank does by itself before a collective, such as reading what it is to send.

A `Pending` issues it like a collective, in the order of a queue of its own, and goes on when it is
done. So a fetch that begins with a file waits as any other does: bounded, and open to Ctrl-C.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mics_fn.collectives.collective import Collective
from mics_fn.errors import CollectiveTimeoutError, message
from mics_fn.groups import Comm
from mics_fn.threads import Latch, start

Work = Callable[[Tensor], Iterator[object]]  # does one part after the other on this memory


class Task(Collective):
    """A copy in parts, made by a thread; or by the host, if it is queued on a stream.

    Args:
      comm: of this rank alone, whose queue and stream it uses.
      op: its name, for error texts.
      work: given the memory to fill, does one part of the work after the other.
    """

    def __init__(self, comm: Comm, op: str, work: Work) -> None:
        super().__init__(comm, op, 0, work)
        self._work = work
        self._memory: Tensor | None = None
        self._errors: list[BaseException] = []
        self._stop = Latch()
        self._thread: threading.Thread | None = None

    def to(self, memory: Tensor) -> "Task":
        """The same task, which fills this memory."""
        self._memory = memory
        return self

    def issue(self, *, async_op: bool) -> None:
        """Begin; without `async_op` the host does it now, and what it queues is on this stream."""
        self.comm.check_open()
        memory, self._memory = self._memory, None
        if memory is None:
            return
        # Without a reference to this task: a thread ends soon after nobody waits for it any more.
        run = partial(_run, self._work, memory, self._stop, self._errors)
        if async_op:
            thread = threading.Thread(target=run, name=f"mics_fn {self.op}", daemon=True)
            try:
                self._thread = start(thread)
                return
            except RuntimeError:  # there is no memory for one
                pass
        run()
        if not async_op:
            self.finish()

    def done(self) -> bool:
        """Whether it has ended, without waiting."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Let go of one that is done, or raise what it has raised."""
        if self._errors:
            raise self._errors[0]

    def late(self) -> CollectiveTimeoutError:
        """The error to raise if it does not finish in time."""
        self._stop.set()
        text = f"{self.op} did not finish in {self.comm.timeout_s:g} s"
        return CollectiveTimeoutError(message(text, fix="look at the disk of this machine"))

    def __del__(self) -> None:
        self._stop.set()


def _run(work: Work, memory: Tensor, stop: Latch, errors: list[BaseException]) -> None:
    """Do part after part until all are done, or nobody waits for them."""
    try:
        # In inference mode what lies elsewhere could not be cut; leaving it records derivatives.
        with torch.inference_mode(mode=False), torch.no_grad():
            for _ in work(_writable(memory)):
                if stop.is_set():
                    return
    except BaseException as error:
        errors.append(error)


def _writable(memory: Tensor) -> Tensor:
    """The same memory as a tensor that may be written outside of inference mode."""
    if not memory.is_inference():
        return memory
    place = memory.storage_offset(), memory.size(), memory.stride()
    made = torch.empty(0, dtype=memory.dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), *place)
