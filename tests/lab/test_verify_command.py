"""`python -m mics_fn verify`."""

from pathlib import Path

import pytest
import torch

import mics_fn as mf
from mics_fn.__main__ import main


def saved(folder: Path, *steps: int) -> None:
    groups = mf.make_groups(1)
    shards = mf.shard({"w": torch.arange(100.0)}, groups)
    for step in steps:
        mf.checkpoint.save(folder, shards, groups, step=step)


def test_it_names_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved(tmp_path, 1, 2)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("step 2: 1 tensors in 1 files")
    file = tmp_path / "step-00000001" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    assert main(["verify", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path), "--all"]) == 1
    text = capsys.readouterr().err
    assert str(file) in text
    assert "w[0:100]: its values are not those that were saved" in text


def test_all_steps_are_compared_though_one_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    saved(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000002" / "MANIFEST.json").write_bytes(b"{}")
    assert main(["verify", str(tmp_path), "--all"]) == 1
    out, err = capsys.readouterr()
    assert [line[:7] for line in out.splitlines()] == ["step 1:", "step 3:", "2 of 3 "]
    assert "step 2: " in err
