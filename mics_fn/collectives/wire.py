"""`Wire`: what travels in the place of values, and on which levels.

A gather sends codes of parameters, and hop 1 codes of gradients, on the named level of a route and
on those outside of it, which are slower. All other levels send the values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mics_fn.collectives.codec import Codec
from mics_fn.collectives.means import mean_by_rows
from mics_fn.errors import PlanError, message
from mics_fn.groups import Route

SHORT_NAMES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
}


@dataclass(frozen=True)
class Rounded:
    """A dtype in the place of a `Codec`: values are cast to it, and sent as they are.

    Args:
      dtype: the dtype that is sent.

    Example:
      >>> codec = Rounded(torch.bfloat16)
      >>> codec.nbytes(3), codec.decode(codec.encode(torch.ones(3)), 3, torch.float32)
      (6, tensor([1., 1., 1.]))
    """

    dtype: torch.dtype
    block = 1  # no value depends on its neighbours

    def nbytes(self, n: int) -> int:
        """Bytes of `n` elements."""
        return n * self.dtype.itemsize

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The bytes of x (*batch, n) in this dtype, as uint8 (*batch, nbytes(n))."""
        codes = x.to(self.dtype).contiguous().view(torch.uint8)
        return codes if out is None else out.copy_(codes)

    def decode(
        self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """Values (*batch, n) in another dtype."""
        values = codes.view(self.dtype)[..., :n]
        return values.to(dtype) if out is None else out.copy_(values)

    def decode_mean(self, parts: Sequence[Tensor], own: Tensor | None, out: Tensor) -> Tensor:
        """The mean in float32 or wider of bytes and of values (n,), added up in their order."""
        wide = torch.promote_types(self.dtype, torch.float32)
        rows = [x.view(self.dtype) if x.dtype == torch.uint8 else x for x in parts]
        return mean_by_rows(rows if own is None else [own, *rows], out, wide)

    def __str__(self) -> str:
        return SHORT_NAMES.get(self.dtype, f"{self.dtype}")


def block_of(codec: Codec | Rounded) -> int:
    """Elements of a block of codes, which every codec knows once it is made."""
    return codec.block or 1


@dataclass(frozen=True)
class Wire:
    """What travels in the place of values, and on which levels.

    Args:
      codec: makes bytes of values, and values of bytes.
      level: the innermost level on which they travel; "" means all.

    Example:
      >>> str(Wire(Codec.parse("int8[256]"), "node"))
      'int8[256]@node'
    """

    codec: Codec | Rounded
    level: str = ""

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return block_of(self.codec)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return f"{self.codec}@{self.level}" if self.level else f"{self.codec}"

    def levels(self, route: Route) -> int:
        """How many levels of a route it is used on, counted from the outermost.

        Raises:
          PlanError: the groups have no level of that name.
        """
        if not self.level or not route.levels:
            return len(route.levels)
        check_level(self, route.names)
        last = route.names.index(self.level)
        return sum(route.names.index(level.reach or level.name) <= last for level in route.levels)


def check_level(wire: Wire, names: tuple[str, ...]) -> None:
    """Raise PlanError if a wire names a level that is not one of these."""
    if wire.level and wire.level not in names:
        text = f"precision: {wire} names a level that these groups do not have"
        fix = f"name one of {', '.join(names) or 'none'}, or leave out @{wire.level}"
        raise PlanError(message(text, fix=fix))
