"""Collectives that send codes in the place of values.

[Note: codes] Codes are sent between ranks and never added. In a gather every rank decodes the same
codes, those of its own chunk too, so that all have the same bits. In a mean each rank decodes what
arrives and adds its own part as it is: a part is rounded once, on its way to another rank. In hop 2
the mean of each part is coded again and gathered, and all replicas decode the same codes. What is
coded begins and ends on blocks, because leaves and chunks of such a bucket do.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mics_fn.collectives.codec import Codec
from mics_fn.collectives.derivatives import inside_a_rule
from mics_fn.collectives.levels import all_gather, swap_codes
from mics_fn.collectives.pending import Steps
from mics_fn.collectives.wire import Rounded, block_of
from mics_fn.groups import Comm

AnyCodec = Codec | Rounded


def exchange_bytes(codec: AnyCodec, numel: int, size: int) -> int:
    """Bytes of memory that `exchange_codes` needs for parts of so many elements."""
    return 2 * (size - 1) * codec.nbytes(numel)


def exchange_codes(
    comm: Comm, codec: AnyCodec, part: Callable[[int], Tensor], memory: Tensor, mean: Tensor
) -> Steps:
    """Send codes of part j to the rank at place j, and average what arrives into `mean`.

    Args:
      comm: the communicator.
      codec: encodes parts.
      part: gives a part, which is 1D, by the place of its rank.
      memory: 1D, uint8, of `exchange_bytes`; overwritten.
      mean: 1D, of the size of a part. It may lie in that of this rank, or where any part did that
        goes to another rank.
    """
    others = [place for place in range(comm.size) if place != comm.rank]
    numel, nbytes = mean.numel(), codec.nbytes(mean.numel())
    sent, received = memory[: exchange_bytes(codec, numel, comm.size)].view(2, -1, nbytes)
    with inside_a_rule():
        for row, place in zip(sent, others, strict=True):
            codec.encode(part(place), out=row)
    yield swap_codes(comm, sent, received)
    parts = list(received)
    parts.insert(comm.rank, part(comm.rank))  # as it is, and added in the order of ranks
    with inside_a_rule():
        codec.decode_mean(parts, None, mean)
    return mean


def mean_numel(codec: AnyCodec, numel: int, size: int) -> int:
    """Elements of each part in `coded_mean_steps`: whole blocks, the same number for each rank."""
    block = block_of(codec)
    return -(-numel // (block * size)) * block


def mean_bytes(codec: AnyCodec, numel: int, size: int) -> int:
    """Bytes of memory that `coded_mean_steps` needs."""
    part = mean_numel(codec, numel, size)
    return part * torch.float32.itemsize + exchange_bytes(codec, part, size)


def coded_mean_steps(
    comms: Sequence[Comm], tensor: Tensor, codec: AnyCodec, memory: Tensor | None = None
) -> Steps:
    """Average a contiguous tensor over some ranks, in place, in two collectives of codes.

    Args:
      comms: the communicators of the two, which have the same ranks in the same order.
      tensor: contiguous.
      codec: encodes parts, and then their means.
      memory: 1D, uint8, of `mean_bytes`; None allocates it.
    """
    (comm, second), flat = comms, tensor.view(-1)
    size = comm.size
    if memory is None:
        nbytes = mean_bytes(codec, flat.numel(), size)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
    numel = mean_numel(codec, flat.numel(), size)
    first = numel * torch.float32.itemsize
    mean, memory = memory[:first].view(torch.float32), memory[first:]

    def part(place: int) -> Tensor:
        values = flat[place * numel : (place + 1) * numel]
        missing = numel - values.numel()
        return torch.cat([values, values.new_zeros(missing)]) if missing else values

    yield from exchange_codes(comm, codec, part, memory, mean)
    codes = memory[: size * codec.nbytes(numel)].view(size, -1)
    encode_to(codec, mean, codes[comm.rank])
    yield all_gather(second, codes, codes[comm.rank])
    for place, row in enumerate(codes):
        decode_to(codec, row, numel, flat[place * numel : (place + 1) * numel])
    return tensor


def encode_to(codec: AnyCodec, values: Tensor, out: Tensor) -> None:
    """Write the codes of values to `out`, inside of a verb that has a derivative."""
    with inside_a_rule():
        codec.encode(values, out=out)


def decode_to(codec: AnyCodec, codes: Tensor, numel: int, out: Tensor) -> None:
    """Write the first of `numel` values that codes stand for to `out`; see `encode_to`."""
    with inside_a_rule():
        if out.numel() == numel:
            codec.decode(codes, numel, out.dtype, out=out)
        elif out.numel():
            out.copy_(codec.decode(codes, numel, out.dtype)[: out.numel()])
