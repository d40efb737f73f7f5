"""Every byte that is read is compared with the checksum of its slice."""

from pathlib import Path

import pytest
import torch

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.errors import FileError


def test_damage_anywhere_in_what_is_read_at_once_is_found(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    shards = mf.shard({"a": torch.arange(1.1 * 2**20), "b": torch.arange(9000.0)}, groups)
    file = checkpoint.save(tmp_path, shards, groups, step=0) / "rank-00000.safetensors"
    plain = file.read_bytes()
    begin = 8 + int.from_bytes(plain[:8], "little")
    swapped, half = bytearray(plain), 4096
    swapped[begin : begin + 2 * half] = (
        plain[begin + half : begin + 2 * half] + plain[begin : begin + half]
    )
    cases = [bytes(swapped)]
    for at in (begin, begin + half, begin + 4 * 2**20 - 1, begin + 4 * 2**20, len(plain) - 1):
        cases.append(plain[:at] + bytes([plain[at] ^ 16]) + plain[at + 1 :])
    for case in cases:
        file.write_bytes(case)
        with pytest.raises(FileError, match="its values are not those that were saved"):
            checkpoint.load(tmp_path, shards, groups)
    file.write_bytes(plain)
    found = checkpoint.load(tmp_path, mf.shard(mf.gather(shards, groups), groups), groups).state
    assert all(torch.equal(found[name].data, shards[name].data) for name in shards)
