"""Leaves that are kept in another form than they were saved in: as values, or as other codes.

[Note: other codes] A frozen leaf that is kept as codes is saved as these codes, so a state that
keeps the same codes gets them back exactly. A state that keeps the leaf as values, or as other
codes, can load it as well, and the other way round. What was saved is read into memory of its own
and decoded, and then it is rounded to what the state keeps, as `shard` does with full values. One
leaf after the other is converted, so this takes the memory of one piece.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn.checkpoint.contents import Contents, Held, names_of_codes
from mics_fn.checkpoint.layout import Stored
from mics_fn.collectives import Codec
from mics_fn.errors import PlanError
from mics_fn.offload import is_apart, set_part
from mics_fn.shards import check_finite

_CODES = re.compile(r"(.*) as (\w+\[\d+\])( of replica \d+)?", re.DOTALL | re.ASCII)


class Conversion(NamedTuple):
    """What is read of a leaf that was saved in another form, and how it gets its own.

    Args:
      held: the leaf as this rank holds it.
      saved: what it was saved as: its values, or its codes and their scales.
      codec: of these codes; None for values.
    """

    held: Held
    saved: list[Stored]
    codec: Codec | None

    def memory(self) -> list[tuple[str, Tensor, int]]:
        """New tensors to read into: each with its name, and the element that it begins with."""
        data: Any = self.held.data
        first, end = self.held.origin, self.held.origin + data.numel()
        if self.codec is None:
            return [
                (self.saved[0].name, torch.empty(end - first, dtype=self.saved[0].dtype), first)
            ]
        block: Any = self.codec.block
        low, numel = first // block, (-(-end // block) - first // block) * block
        row = torch.empty(self.codec.nbytes(numel), dtype=torch.uint8)
        codes, scales = self.codec.blocks(row, numel)
        places = (low * codes.shape[1], low)
        parts = zip(self.saved, (codes, scales), places, strict=True)
        return [(stored.name, part.view(-1), place) for stored, part, place in parts]

    def put(self, found: list[Tensor]) -> None:
        """Write what was read, in the order of `memory`, in the form that the leaf has here.

        Raises:
          LeafError: a value is not finite, and codes cannot hold it.
        """
        data: Any = self.held.data
        values = found[0]
        if self.codec is not None:
            block: Any = self.codec.block
            codes, scales = found[0].view(len(found[1]), -1), found[1].view(-1, 1)
            out = torch.empty(len(scales), block)
            self.codec.decode_blocks(codes, scales, out)
            values = out.view(-1)[self.held.origin % block :][: data.numel()]
        if self.held.codec is not None:
            values = values.float()
            check_finite(f"load: {self.held.name}", self.held.codec, values)
            data.write(0, values.to(data.device))
        elif is_apart(data):
            set_part(data, 0, values.to(data.dtype))
        else:
            data.copy_(values)


def as_saved(target: Contents, saved: Mapping[str, Stored]) -> tuple[Contents, list[Conversion]]:
    """The contents of a state in the form in which they were saved, and what has to be converted.

    Args:
      target: the contents of the state that is loaded into.
      saved: what the checkpoint holds, by name.
    """
    codecs, found, gone = _codecs_in(saved), list[Conversion](), set[str]()
    for held in target.leaves:
        name = f"{held.name}{held.image}"
        codec = codecs.get(name)
        # What is not there in any form is left to the check that names it.
        if all(part in saved for part in held.parts) or (codec is None and name not in saved):
            continue
        if codec is None and held.codec is None:
            continue
        gone.update(held.parts)
        found.append(Conversion(held, _stored(held, codec, saved), codec))
    cut = [x for x in target.cut if x.name not in gone]
    cut += [stored for each in found for stored in each.saved]
    pieces = {name: piece for name, piece in target.held.items() if name not in gone}
    own = [each for each in found if each.held.data is not None and each.held.data.numel()]
    return replace(target, cut=cut, held=pieces), own


def _stored(held: Held, codec: Codec | None, saved: Mapping[str, Stored]) -> list[Stored]:
    """What a leaf of this shape is saved as; whether that is what was saved is checked later."""
    if codec is None:
        name = f"{held.name}{held.image}"
        dtype = saved[name].dtype
        return [Stored(name, dtype if dtype.is_floating_point else torch.float32, held.shape)]
    block: Any = codec.block
    numel = Stored(held.name, torch.float32, held.shape).numel
    blocks = -(-numel // block)
    row = torch.empty(codec.nbytes(block), dtype=torch.uint8, device="meta")
    nbytes = codec.blocks(row, block)[0].shape[1]
    first, second = names_of_codes(held.name, codec, held.image)
    shapes = (first, torch.uint8, (blocks * nbytes,)), (second, torch.bfloat16, (blocks,))
    return [Stored(*each) for each in shapes]


def _codecs_in(saved: Iterable[str]) -> dict[str, Codec]:
    """The codecs of the leaves that were saved as codes, by their names."""
    found = {}
    for name in saved:
        parts = _CODES.fullmatch(name)
        if parts:
            try:
                found[f"{parts[1]}{parts[3] or ''}"] = Codec.parse(parts[2])
            except PlanError:  # of a later version: its codes are named as not expected
                continue
    return found
