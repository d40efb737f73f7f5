"""Gathers of codes, which each rank encodes once and may send several times."""

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives.coded import decode_to, encode_to
from mics_fn.collectives.hierarchical import gather_comms, gather_steps
from mics_fn.collectives.pending import Pending, Steps, What
from mics_fn.collectives.sources import reads
from mics_fn.collectives.tasks import Task
from mics_fn.collectives.wire import Wire
from mics_fn.groups import Buffers, Route


class Codes:
    """What a rank sends of its chunk in the place of values; later gathers send it again.

    Args:
      wire: what travels, and on which levels of the route.
      route: the levels. What is gathered over the first `hold` of them is kept: as codes if further
        levels send codes, else as values, which the caller keeps.
      pool: has the memory, which `release` gives back.
      numel: elements of a chunk.
      mine: the codes of this rank's chunk, in memory that belongs to somebody else.
      coming: a stand-in for the chunk while it lies elsewhere: the first gather brings it and fills
        `mine`. None once `mine` has the codes.

    Memory: the codes of all chunks that are kept.
    """

    def __init__(
        self,
        wire: Wire,
        route: Route,
        pool: Buffers,
        numel: int,
        mine: Tensor,
        coming: Tensor | None = None,
    ) -> None:
        self.codec, self.count, self.pool = wire.codec, wire.levels(route), pool
        self.numel, self.device, self.mine = numel, mine.device, mine
        self.coming = coming
        self._own: list[Tensor] = []  # what it has taken from the pool, but for `held`
        held = route.split(route.hold)[0].size if self.count > route.hold else 1
        self.held = self.room(held) if held > 1 else None
        self.sent = False  # whether the chunks that are held were gathered

    @classmethod
    def of(cls, wire: Wire, route: Route, chunk: Tensor, pool: Buffers) -> "Codes":
        """Those of this rank's chunk, contiguous and 1D, in memory of the pool."""
        made = cls.to_be_made(wire, route, chunk, pool, chunk.device)
        made.encode(chunk)
        return made

    @classmethod
    def to_be_made(
        cls, wire: Wire, route: Route, chunk: Tensor, pool: Buffers, device: torch.device
    ) -> "Codes":
        """Those of a chunk that the first gather brings to a device, for which a tensor stands."""
        mine = pool.take((wire.codec.nbytes(chunk.numel()),), torch.uint8, device)
        made = cls(wire, route, pool, chunk.numel(), mine, chunk)
        made._own.append(mine)
        return made

    def encode(self, chunk: Tensor) -> None:
        """Make the codes, of this rank's chunk on the device."""
        encode_to(self.codec, chunk, self.mine)
        self.coming = None

    def room(self, count: int) -> Tensor:
        """Memory for the codes of so many chunks, 1D."""
        nbytes = count * self.codec.nbytes(self.numel)
        return self.pool.take((nbytes,), torch.uint8, self.device)

    def release(self) -> None:
        """Give the memory back, once no gather reads it any more."""
        for codes in (*self._own, *([] if self.held is None else [self.held])):
            self.pool.give(codes)


def start_coded_gather(
    route: Route,
    codes: Codes,
    held: Tensor | None,
    out: Tensor | None,
    what: What,
    bring: Task | None = None,
) -> Pending:
    """Start to gather a bucket as codes on the outer levels, and as values on the others.

    Args:
      route: the levels.
      codes: of this rank's chunk.
      held: 1D, memory for the values that meet over the first `hold` levels, in the dtype that is
        sent; None if these are kept as codes, or if `hold` is 0.
      out: 1D, memory for the whole bucket, in the dtype that is sent; None if `held` is that.
      what: as for `Pending`.
      bring: where the chunk lies elsewhere and no codes were made yet, what copies it to memory on
        the device, with zeros as its padding.

    Returns:
      A `Pending` whose result is the whole bucket: what was decoded, this rank's chunk too.

    Communication: as `start_all_gather`, with the bytes of codes on the outer levels. Levels whose
      codes are kept are left out when they are sent again.

    Memory: the codes of the chunks that meet over the coded levels, until they are decoded; before
      that the chunk that `bring` copies, until it is encoded.
    """
    coded, plain = route.split(codes.count)
    first, later = coded.split(route.hold if codes.held is not None else 0)
    gathers = [] if codes.sent or codes.held is None else [(first, codes.mine, codes.held)]
    mine = codes.mine if codes.held is None else codes.held
    every = codes.room(coded.size) if later.size > 1 else mine
    gathers += [(later, mine, every)] if later.size > 1 else []
    codes.sent = True
    both = [(plain, out)]
    if held is not None:  # the levels that send values, up to those that are held and behind them
        before, behind = plain.split(route.hold - codes.count)
        both = [(before, held), (behind, out)]
    values = [(levels, target) for levels, target in both if target is not None]
    source = codes.coming
    near = None
    if bring is not None and source is not None:
        near = codes.pool.take((codes.numel,), source.dtype, codes.device)

    def steps() -> Steps:
        if bring is not None and near is not None:
            yield bring.to(near)
            with _torch.without_torch_func():  # whatever advances this may be inside of it
                codes.encode(near)
                codes.pool.give(near)
        for levels, source, target in gathers:
            yield from gather_steps(levels, source, target.view(levels.size, -1))
        full = every
        for levels, target in values:
            run = target.view(levels.size, -1)[levels.chunk]
            if full is every:
                _decode(codes, every, run)
                if every is not mine:
                    codes.pool.give(every)
            else:
                run.copy_(full)
            yield from gather_steps(levels, run, target.view(levels.size, -1))
            full = target
        return full

    comms = [comm for levels, source, _ in gathers for comm in gather_comms(levels, source)]
    comms += [comm for levels, target in values for comm in gather_comms(levels, target)]
    keep = [codes.mine, mine, every, *(target for _, target in values)]
    if bring is None or near is None or source is None:
        return Pending(steps(), comms, keep=keep, device=codes.device, what=what)
    comms.insert(0, bring.comm)
    keep.append(near)
    found = Pending(steps(), comms, keep=keep, device=codes.device, what=what)
    return reads(found, comms, source)


def _decode(codes: Codes, every: Tensor, out: Tensor) -> None:
    """Decode the codes of some chunks into one run of values."""
    rows = every.view(-1, codes.codec.nbytes(codes.numel))
    for row, values in zip(rows, out.view(len(rows), -1), strict=True):
        decode_to(codes.codec, row, codes.numel, values)
