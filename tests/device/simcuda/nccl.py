"""A process group that does with streams what torch's ProcessGroupNCCL does; gloo moves the bytes.

With `async_op=True` each group has a stream of its own, which first waits for the current one;
tensors are held until `wait`, which makes the current stream wait. With `async_op=False` the
collective is queued on the current stream. The host waits for the other ranks when it issues a
collective, as gloo moves the bytes at once: so any difference in the order of issue hangs.

`stall` lets a device come no further, as that of a rank that waits for a lost one. The host runs
ahead: collectives leave garbage, which is what they leave once they are aborted, and ops run on it.
Nothing of that is over until an abort. Garbage is finite and of the size of what this rank has, so
that no guard sees it; of integers it is what this rank has, as if all ranks had the same.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from simcuda import Issued, torch_cuda

BACKEND = "simnccl"
dist: Any = torch.distributed
_C: Any = torch._C


issued: list[Issued] = []
us_per_byte: dict[str, float] = {}  # by the last word of a group's description; others are free


class Stall:
    """Of the device of this process: how many collectives it still takes part in; None is all."""

    results: int | None = None  # of whose results it sees
    sends: int = 0  # that others can see the results of; those behind are garbage on all ranks
    begin: list[Callable[[], None]] = []  # noqa: RUF012  at that instant

    @classmethod
    def next(cls) -> tuple[bool, bool]:
        """Whether the next collective is sent, and whether this rank gets its result."""
        if cls.results is None:
            return True, True
        if cls.results == 0 and not torch_cuda.stalled():
            cls.begin[0]()
        cls.results, cls.sends = cls.results - 1, cls.sends - 1
        return cls.sends >= 0, cls.results >= 0


def stall(
    results: int = 0,
    *,
    sends: int | None = None,
    flag: Tensor | None = None,
    at_wait: Callable[[], None] = lambda: None,
) -> None:
    """Let the device come no further than so many collectives, until these are aborted.

    Args:
      results: after how many more, whose results it gets.
      sends: how many of them other ranks get results of; one more where they are ahead.
      flag: a number in host memory that an abort sets to 1: what the device reads from then on.
      at_wait: called where the host begins to wait for the device, as another thread would act.
    """

    def begin() -> None:
        torch_cuda.stall(at_wait)
        if flag is not None:
            flag.fill_(1)

    Stall.results, Stall.sends, Stall.begin[:] = results, max(results, sends or 0), [begin]
    if results == 0:
        begin()


def _garbage(op: str, source: Tensor, to: Tensor) -> None:
    """Write what an aborted collective may leave, unlike on each rank and in each call."""
    if not to.numel():
        return
    own = source.flatten().clone()
    own = own.repeat(-(-to.numel() // own.numel()))[: to.numel()].view(to.shape)
    if own.is_floating_point():
        random = torch.Generator().manual_seed(1000 * dist.get_rank() + len(issued))
        own = own * (0.5 + torch.rand(own.shape, generator=random)).to(own.dtype)
    to.copy_(own ^ 1 if op == "broadcast" else own)  # which writes over what may be right


class Work(_C._distributed_c10d.Work):
    """A collective in flight."""

    def __init__(self, stream: torch.Stream, tensors: Any):
        super().__init__()
        self._event, self._device, self._tensors = stream.record_event(), stream.device, tensors

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        self._tensors = None  # NCCL's stash: let go only once the current stream waits
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._event.query()


class SimNCCL(dist.ProcessGroup):
    """The group of one communicator."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._rank, self._size, self._stream = rank, size, None
        self._name, self._description, self._aborted = "?", "?", False
        store = dist.PrefixStore("simnccl", store)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:  # noqa: N802  names that torch calls
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._description)

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def shutdown(self) -> None:
        """Collective, as that of NCCL: a rank that comes alone waits for the others."""
        self._gloo.barrier().wait()

    def abort(self) -> None:
        """Its own part only. Whatever the device waits for is over, without a result."""
        if not self._aborted:
            self._aborted, Stall.results = True, None
            torch_cuda.go_on()

    def _end(self, work: Any) -> None:
        """Wait for what gloo moves; the host of a real one does not, so an abort ends the wait."""
        while not work.is_completed():
            if self._aborted:
                raise RuntimeError(f"collectives of '{self._description}' were aborted")
            time.sleep(5e-5)
        work.wait()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        def move(source: Tensor, to: Tensor) -> None:
            parts = [torch.empty_like(source).view(-1) for _ in range(self._size)]
            self._end(self._gloo.allgather([parts], [source.clone().view(-1)]))
            to.copy_(torch.cat(parts).view(to.shape))

        return self._issue("all_gather", input, output, opts, move)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        def move(source: Tensor, to: Tensor) -> None:
            total = self._scattered(source, opts).view(self._size, -1)
            to.copy_(total[self._rank].view(to.shape))

        return self._issue("reduce_scatter", input, output, opts, move)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        (tensor,) = tensors
        move = lambda source, to: to.copy_(self._reduced(source, opts))  # noqa: E731
        return self._issue("all_reduce", tensor, tensor, opts, move)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, out_sizes: Any, in_sizes: Any, opts: Any = None
    ) -> Any:
        def move(source: Tensor, to: Tensor) -> None:
            received = torch.empty_like(to)
            sizes = list(out_sizes), list(in_sizes)
            self._end(self._gloo.alltoall_base(received, source.clone(), *sizes))
            to.copy_(received)

        return self._issue("all_to_all", input, output, opts, move)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        def move(source: Tensor, to: Tensor) -> None:
            value, how = source.clone(), dist.BroadcastOptions()
            how.rootRank = opts.rootRank
            self._end(self._gloo.broadcast([value], how))
            to.copy_(value)

        (tensor,) = tensors
        return self._issue("broadcast", tensor, tensor, opts, move)

    def barrier(self, opts: Any = None) -> Work:
        self._gloo.barrier().wait()
        return Work(torch.cuda.current_stream(), ())

    # The names of these in older code.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _reduced(self, source: Tensor, opts: Any) -> Tensor:
        """The sum or mean over ranks, added up in their order."""
        wide = self._collected(source)
        return wide.sum(0) / (self._size if opts.reduceOp == dist.ReduceOp.AVG else 1)

    def _scattered(self, source: Tensor, opts: Any) -> Tensor:
        """As `_reduced`; a mean of two rounds as that of `mics_fn` on gloo does, to equal bits."""
        if self._size == 2 and opts.reduceOp == dist.ReduceOp.AVG:
            first, second = self._collected(source)
            return torch.lerp(first, second, 0.5)
        return self._reduced(source, opts)

    def _collected(self, source: Tensor) -> Tensor:
        parts = [torch.empty_like(source) for _ in range(self._size)]
        self._end(self._gloo.allgather([parts], [source.clone()]))
        return torch.stack(parts).to(torch.promote_types(source.dtype, torch.float32))

    def _issue(
        self, op: str, source: Tensor, to: Tensor, opts: Any, move: Callable[[Tensor, Tensor], Any]
    ) -> Work | None:
        with _C._DisableFuncTorch(), torch.no_grad():  # as below the dispatcher
            source, to = _plain(source), _plain(to)
            for tensor in (source, to):
                assert tensor.is_cuda, f"{op} of {tensor.device}"
                assert tensor.is_contiguous(), f"{op} of strides {tensor.stride()}"
            self._check_in_place(op, source, to)
            own, stream = getattr(opts, "asyncOp", True), torch.cuda.current_stream(to.device)
            if own:
                self._stream = self._stream or torch_cuda.Stream(to.device)
                self._stream.wait_stream(stream)
                stream = self._stream
            sent, done = Stall.next()
            self._book(op, stream, source, to)
            held, source, to = (source, to), _on_cpu(source), _on_cpu(to)
            if sent:
                move(source, to)
            if not done and getattr(opts, "rootRank", None) != self._rank:
                _garbage(op, source, to)
            return Work(stream, held) if own else None

    def _book(self, op: str, stream: torch.Stream, source: Tensor, to: Tensor) -> None:
        ranges = [source.data_ptr(), source.nbytes, to.data_ptr(), to.nbytes]
        name = f"{op}({self._description})".encode()
        lib, at = torch_cuda.lib, stream.stream_id
        lib.sim_op(name, at, (ctypes.c_uint64 * 4)(*ranges), 1, 1)
        level = self._description.split()[-1]
        lib.sim_busy(at, to.nbytes * us_per_byte.get(level, 0.0))
        issued.append(Issued(self._description, op, to.nbytes, lib.sim_time(at, 0)))

    def _check_in_place(self, op: str, source: Tensor, to: Tensor) -> None:
        """NCCL allows input and output to overlap only where the one is its place in the other."""
        low, high = source.data_ptr(), to.data_ptr()
        apart = low + source.nbytes <= high or high + to.nbytes <= low
        places = {
            "all_gather": high + self._rank * source.nbytes == low,
            "reduce_scatter": low + self._rank * to.nbytes == high,
            "all_reduce": low == high,
            "broadcast": low == high,
        }
        if source.numel() and to.numel() and not apart and not places.get(op, False):
            text = f"{op}({self._description}): input and output overlap, not as NCCL allows"
            torch_cuda.misuse.append(text)


def _plain(tensor: Tensor) -> Tensor:
    """The tensor below torch.func's wrappers, as the dispatcher hands it to a real backend."""
    while _C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _C._functorch.get_unwrapped(tensor)
    return tensor.detach()


def _on_cpu(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a CPU tensor."""
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)


dist.Backend.register_backend(BACKEND, SimNCCL, devices=["cuda"])


def join_default_group() -> None:
    """From now on, also in forked processes, a default group of gloo serves the device too."""
    init = dist.init_process_group

    def with_device(backend: str, **how: Any) -> None:
        assert backend == "gloo"
        init(f"cpu:gloo,cuda:{BACKEND}", **how)

    dist.init_process_group = with_device
