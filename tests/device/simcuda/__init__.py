"""A simulated CUDA device for a torch without CUDA: real numbers, modelled streams.

[Note: the simulated device] Tensors of device "cuda" live in host memory, and every op runs at once
on the CPU. But each op, copy and collective is booked on the stream that is current in its thread,
and a happens-before checker reports what CUDA would not order: reads and writes by byte range, the
reuse of freed memory, input and output of a collective that overlap. It also counts what makes the
host wait, and models the time at which each stream is through. Autograd runs its device thread, and
the stand-in for NCCL follows the rules of streams of the real one, so the code under test is that
which runs on a GPU.

A collective that fails after it was issued is modelled as a device that comes no further from an
instant on that a test chooses: nothing that is issued later is over when asked, collectives leave
garbage and ops run on it, while the host goes on until it waits. An abort ends that, with all over,
on garbage. Errors that NCCL itself raises are left out: an abort is all that ends a collective.

Not modelled: real memory and real speed, and what a device reads of host memory in its own time,
but for the flag of an abort. Ops have the CPU's kernels, with their rounding and their faults, such
as those of fused SGD in 16 bits.

Files: `checker` (clocks, accesses, modelled time), `device` (guard, allocator, events, generators),
`operators` (every op, on the CPU), all three in C++ and built by `build.py`; `torch_cuda` (the
Python half of torch.cuda, and what was found), `nccl` (the process group), `server` (forked ranks).
"""

from typing import NamedTuple


class Issued(NamedTuple):
    """One collective, in the order in which this rank issued them."""

    group: str  # its description
    op: str
    nbytes: int  # that it writes
    done_us: float  # modelled time at which it is through
