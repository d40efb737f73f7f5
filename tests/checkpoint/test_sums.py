"""One checksum of many blocks says what those of all of them say, and readers take turns."""

import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.checkpoint.manifest import BLOCK, joined, sums_of
from mics_fn.errors import FileError


@settings(max_examples=15)
@given(numbers=st.lists(st.integers(0, 255), min_size=2, max_size=9), rest=st.integers(1, BLOCK))
def test_any_blocks_join(numbers: list[int], rest: int) -> None:
    data = b"".join(bytes([x]) * BLOCK for x in numbers)[: (len(numbers) - 1) * BLOCK + rest]
    sums = sums_of(memoryview(data))
    assert joined(sums, len(data)) == zlib.crc32(data)
    for i in range(len(numbers)):  # a wrong checksum of any block is one of all
        wrong = f"{int(sums[8 * i : 8 * i + 8], 16) ^ 1 << numbers[i] % 32:08x}"
        assert joined(sums[: 8 * i] + wrong + sums[8 * i + 8 :], len(data)) != zlib.crc32(data)


def test_damage_anywhere_in_what_is_read_at_once_is_found(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    shards = mf.shard({"a": torch.arange(1.1 * 2**20), "b": torch.arange(9000.0)}, groups)
    file = checkpoint.save(tmp_path, shards, groups, step=0) / "rank-00000.safetensors"
    plain = file.read_bytes()
    begin = 8 + int.from_bytes(plain[:8], "little")
    swapped = bytearray(plain)
    swapped[begin : begin + 2 * BLOCK] = (
        plain[begin + BLOCK : begin + 2 * BLOCK] + plain[begin : begin + BLOCK]
    )
    cases = [bytes(swapped)]
    for at in (begin, begin + BLOCK, begin + 4 * 2**20 - 1, begin + 4 * 2**20, len(plain) - 1):
        cases.append(plain[:at] + bytes([plain[at] ^ 16]) + plain[at + 1 :])
    for case in cases:
        file.write_bytes(case)
        with pytest.raises(FileError, match="its values are not those that were saved"):
            checkpoint.load(tmp_path, shards, groups)
    file.write_bytes(plain)
    found = checkpoint.load(tmp_path, mf.shard(mf.gather(shards, groups), groups), groups).state
    assert all(torch.equal(found[name].data, shards[name].data) for name in shards)
