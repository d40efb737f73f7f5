"""How codes are sent in the place of values; `codec` makes them.

Codes are sent between ranks and never added. In a gather every rank decodes the same codes, those
of its own chunk too, so that all have the same bits. In a mean each rank decodes what is received
and adds its own part as it is: a part is rounded once, on its way to another rank. In hop 2 the
mean of each part is coded again and gathered, and all replicas decode the same codes. What is coded
begins and ends on blocks, because leaves and chunks of such a bucket do.

`levels.SENDERS` has what levels call for a `Codec`. A gather is given `SentCodes` where it would be
given a chunk.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mics_fn.collectives import levels
from mics_fn.collectives.codec import Codec, Wire
from mics_fn.collectives.pending import Pending, Steps, Task, What
from mics_fn.groups import Buffers, Comm, Route

# Hop 1, and the first half of hop 2: codes of each part go to its rank, which adds what they mean.


def exchange_bytes(codec: Codec, numel: int, size: int) -> int:
    """Bytes of memory that `exchange_codes` needs for parts of so many elements."""
    return 2 * (size - 1) * codec.nbytes(numel)


def exchange_codes(
    comm: Comm, codec: Codec, part: Callable[[int], Tensor], memory: Tensor, mean: Tensor
) -> Steps:
    """Send codes of part j to the rank at place j, and average what is received into `mean`.

    Args:
      comm: the communicator.
      codec: encodes parts.
      part: gives a part, which is 1D and of whole blocks, by the place of its rank.
      memory: 1D, uint8, of `exchange_bytes`; overwritten.
      mean: 1D, of the size of a part. It may lie in that of this rank, or where any part did that
        goes to another rank.
    """
    others = [place for place in range(comm.size) if place != comm.rank]
    numel, nbytes = mean.numel(), codec.nbytes(mean.numel())
    sent, received = memory[: exchange_bytes(codec, numel, comm.size)].view(2, -1, nbytes)
    for row, place in zip(sent, others, strict=True):
        codec.encode_row(part(place), row)
    sizes = [nbytes] * comm.size
    sizes[comm.rank] = 0
    yield levels.send_parts(comm, received.view(-1), sent.view(-1), sizes)
    parts = list(received)
    parts.insert(comm.rank, part(comm.rank))  # as it is, and added in the order of ranks
    codec.decode_row([codec.blocks_of(each, numel) for each in parts], mean)
    return mean


# What levels call; arguments as those of `levels`, codes first.


def spare_numel(wire: Wire, route: Route, numel: int, itemsize: int) -> int:
    """Elements of the second buffer that `scatter_steps` needs; see `levels.spare_numel`."""
    coded, plain = route.split(wire.levels(route))
    most, here = levels.spare_numel(plain, numel, direct=False), numel // plain.size
    for comm in coded.reductions:
        here //= comm.size
        most = max(most, -(-exchange_bytes(wire.codec, here, comm.size) // itemsize))
    return most


def scatter_steps(wire: Wire, route: Route, full: Tensor, out: Tensor, spare: Tensor) -> Steps:
    """Average over a partition group as `levels.scatter_steps`, with codes on outer levels."""
    coded, plain = route.split(wire.levels(route))
    here, there = full.view(-1), spare.view(-1)
    if plain.size > 1:
        # An exchange leaves the mean where part 0 was; torch's op writes to the other buffer.
        if len(plain.levels) % 2 and not levels.exchanges(plain.reductions[0]):
            here, there = there, here
        here = here[: full.numel() // plain.size]
        yield from levels.scatter_steps(plain, full.view(plain.size, -1), here, spare)
    for comm in coded.reductions:
        parts = here.view(comm.size, -1)
        here = parts[(comm.rank + 1) % comm.size]
        if comm is coded.reductions[-1]:
            here = out.view(-1)
        memory = there.view(torch.uint8)
        needs = exchange_bytes(wire.codec, here.numel(), comm.size)
        if memory.numel() < needs:  # the levels before have needed less
            memory = memory.new_empty(needs)
        yield from exchange_codes(comm, wire.codec, parts.__getitem__, memory, here)
    return out


# Hop 2: the means of parts are coded, too, and gathered.


def mean_comms(comm: Comm) -> list[Comm]:
    """The communicators of `mean_steps`; the next mean begins while this one is gathered."""
    return [comm, comm.second if comm.second is not None and comm.second.connected else comm]


def mean_steps(codec: Codec, comm: Comm, tensor: Tensor, memory: Tensor | None = None) -> Steps:
    """Average a contiguous tensor over some ranks, in place, in two collectives of codes.

    Args:
      codec: encodes parts, and then their means.
      comm: the communicator.
      tensor: contiguous.
      memory: 1D, uint8, of `mean_bytes`; None allocates it.
    """
    first, second = mean_comms(comm)
    flat, size = tensor.view(-1), comm.size
    if memory is None:
        nbytes = mean_bytes(codec, flat.numel(), size)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
    numel = _mean_numel(codec, flat.numel(), size)
    end = numel * torch.float32.itemsize
    mean, memory = memory[:end].view(torch.float32), memory[end:]

    def part(place: int) -> Tensor:
        values = flat[place * numel : (place + 1) * numel]
        missing = numel - len(values)
        return functional.pad(values, (0, missing)) if missing else values

    yield from exchange_codes(first, codec, part, memory, mean)
    codes = memory[: size * codec.nbytes(numel)].view(size, -1)
    codec.encode_row(mean, codes[comm.rank])
    yield levels.gather_level(second, codes, codes[comm.rank])
    for place, row in enumerate(codes):
        values = flat[place * numel : (place + 1) * numel]
        codec.decode_row([codec.blocks(row, numel)], values)
    return tensor


levels.SENDERS[Codec] = sys.modules[__name__]


def _mean_numel(codec: Codec, numel: int, size: int) -> int:
    """Elements of each part in `mean_steps`: whole blocks, the same number for each rank."""
    return -(-numel // (codec.block * size)) * codec.block


def mean_bytes(codec: Codec, numel: int, size: int) -> int:
    """Bytes of memory that `mean_steps` needs."""
    part = _mean_numel(codec, numel, size)
    return part * torch.float32.itemsize + exchange_bytes(codec, part, size)


# Gathers of codes, which each rank encodes once and may send several times.


class SentCodes:
    """What a rank sends of its chunk in the place of values; later gathers send it again.

    Args:
      wire: what travels, and on which levels of the route.
      route: the levels. What is gathered over the first `outer_params` of them is kept: as codes
        if further levels send codes, else as values, which the caller keeps.
      pool: has the memory, which `release` gives back.
      numel: elements of a chunk.
      chunk: this rank's, contiguous and 1D, which the first gather encodes; or what stands for it
        while it is placed.
      row: the codes of the chunk, if somebody keeps them.
      device: of the codes.

    Memory: the codes of this rank's chunk, unless somebody keeps them, and of all that are kept.
    """

    def __init__(
        self,
        wire: Wire,
        route: Route,
        pool: Buffers,
        numel: int,
        *,
        chunk: Tensor | None,
        row: Tensor | None,
        device: torch.device,
    ) -> None:
        self._codec, self._count, self._pool = wire.codec, wire.levels(route), pool
        self._numel, self._device = numel, device
        self._taken: list[Tensor] = []  # from the pool
        self._chunk = chunk if row is None else None  # until it is encoded
        self._mine = self._take(1) if row is None else row
        self._kept: Tensor | None = None  # codes of the chunks of the outer levels
        size = route.split(route.outer_params)[0].size
        if self._count > route.outer_params and size > 1:
            self._kept = self._take(size)
        self._sent = False  # whether these were gathered

    def _take(self, count: int) -> Tensor:
        """Memory for the codes of so many chunks, until `release`."""
        self._taken.append(self._room(count))
        return self._taken[-1]

    def _room(self, count: int) -> Tensor:
        nbytes = count * self._codec.nbytes(self._numel)
        return self._pool.take((nbytes,), torch.uint8, self._device)

    def release(self) -> None:
        """Give the memory back, once no gather reads it any more."""
        for codes in self._taken:
            self._pool.give(codes)

    def start_gather(
        self,
        route: Route,
        outer_out: Tensor | None,
        out: Tensor | None,
        what: What,
        fetch: Task | None = None,
    ) -> Pending:
        """Start to gather a bucket as codes on the outer levels, and as values on the others.

        Args:
          route, outer_out, out, what: as for `start_fetch`; `outer_out` is None, too, if codes are
            kept in its place.
          fetch: as there, with zeros as the padding of the chunk.

        Returns:
          A `Pending` whose result is the whole bucket: what was decoded, this rank's chunk too.

        Communication: as `start_all_gather`, with the bytes of codes on the outer levels. Levels
          whose codes are kept are left out when they are sent again.

        Memory: the codes of the chunks that meet over the coded levels, until they are decoded;
          before that the chunk that `fetch` copies, until it is encoded.
        """
        coded, plain = route.split(self._count)
        mine, gathers = self._mine, list[tuple[Route, Tensor, Tensor]]()
        count = coded.size
        if self._kept is not None:
            outer, coded = coded.split(route.outer_params)
            gathers += [] if self._sent else [(outer, mine, self._kept)]
            mine = self._kept
        every = mine
        if coded.size > 1:
            every = self._room(count)
            gathers.append((coded, mine, every))
        values = [(plain, out)]
        if outer_out is not None:  # the levels that send values, up to `outer_params` and behind
            before, behind = plain.split(route.outer_params - self._count)
            values = [(before, outer_out), (behind, out)]
        values = [(each, target) for each, target in values if target is not None]
        sent = [*((each, source) for each, source, _ in gathers), *values]
        comms = [comm for each, source in sent for comm in levels.gather_comms(each, source)]
        chunk = values_here = self._chunk
        if chunk is not None and fetch is not None:
            values_here = self._pool.take((self._numel,), chunk.dtype, self._device)
            comms.insert(0, fetch.comm)
        kept = (self._mine, mine, every, chunk, values_here)
        keep = [*(x for x in kept if x is not None), *(target for _, target in values)]
        self._sent, self._chunk = True, None

        def steps() -> Steps:
            if values_here is not None:
                if fetch is not None:
                    yield fetch.to(values_here)
                self._codec.encode_row(values_here, self._mine)
                if fetch is not None:
                    self._pool.give(values_here)
            for each, source, target in gathers:
                yield from levels.gather_steps(each, source, target.view(each.size, -1))
            full = every
            for each, target in values:
                run = target.view(each.size, -1)[each.chunk]
                if full is every:
                    self._decode(every, run)
                    if every is not mine:
                        self._pool.give(every)
                else:
                    run.copy_(full)
                yield from levels.gather_steps(each, run, target.view(each.size, -1))
                full = target
            return full

        return Pending(steps(), comms, keep=keep, device=self._device, what=what, reads=chunk)

    def _decode(self, every: Tensor, out: Tensor) -> None:
        """Decode the codes of some chunks into one run of values."""
        rows = every.view(-1, self._codec.nbytes(self._numel))
        for row, values in zip(rows, out.view(len(rows), -1), strict=True):
            self._codec.decode_row([self._codec.blocks(row, self._numel)], values)
