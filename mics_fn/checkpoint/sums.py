"""Checksums of blocks: the CRC-32 of each, and what they say of many blocks at once.

[Note: many blocks at once] A file has a checksum for each block, so that any part of it can be
checked. But `zlib.crc32` lets other threads run only while it works, and for a single block it
works for some microseconds: threads that check block by block mostly wait for one another. So a
reader takes one checksum of all that it has read, and compares it with the one that follows from
those of the blocks. CRC-32 is linear: what a block does to the checksum of all before it does not
depend on its content, apart from its own checksum, which is added bit by bit.
"""

import struct
import zlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 16 * 2**10  # bytes; a multiple of the size of every dtype
_ZEROS = bytes(BLOCK)


def block_sums(tensor: Tensor) -> str:
    """The CRC-32 of each block of a dense tensor on the CPU, 8 hexadecimal digits each."""
    flat: Any = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element has any stride
    return sums_of(memoryview(flat.view(torch.uint8).numpy()))


def sums_of(data: memoryview) -> str:
    """The CRC-32 of each block of some bytes."""
    return "".join(f"{zlib.crc32(data[i : i + BLOCK]):08x}" for i in range(0, len(data), BLOCK))


def joined(sums: str, nbytes: int) -> int:
    """The CRC-32 of some bytes, from that of each of their blocks; see [Note: many blocks at once].

    Args:
      sums: as `sums_of` gives them.
      nbytes: the number of bytes, at least 1; the last block may be shorter than the others.

    Raises:
      ValueError: there is not a checksum for each block.

    >>> data = bytes(range(250)) * 200
    >>> joined(sums_of(memoryview(data)), len(data)) == zlib.crc32(data)
    True
    """
    raw, count = bytes.fromhex(sums), -(-nbytes // BLOCK)
    if len(raw) != 4 * count:
        raise ValueError(f"{len(raw)} bytes of checksums for {count} blocks")
    *whole, last = struct.unpack(f">{count}I", raw)
    a, b, c, d = _behind_block()
    crc = 0
    for each in whole:
        crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24] ^ each
    return _behind_zeros(crc, nbytes - len(whole) * BLOCK) ^ last


def _behind_zeros(crc: int, count: int) -> int:
    """What the checksum of some bytes adds to that of these bytes and `count` more."""
    zeros = memoryview(_ZEROS)[:count]
    return zlib.crc32(zeros, crc) ^ zlib.crc32(zeros)


@cache
def _behind_block() -> list[list[int]]:
    """`_behind_zeros` for a block, as the sum of what each of the four bytes of `crc` gives."""
    tables = []
    for low in range(0, 32, 8):
        table = [0]
        for bit in range(low, low + 8):
            column = _behind_zeros(1 << bit, BLOCK)
            table += [x ^ column for x in table]
        tables.append(table)
    return tables
