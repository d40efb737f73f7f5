"""`python -m mics_fn verify`."""

from pathlib import Path

import pytest
import torch

import mics_fn as mf
from mics_fn.__main__ import main


def test_it_names_all_that_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with mf.make_groups(1) as groups:
        shards = mf.shard({"w": torch.arange(100.0)}, groups)
        for step in range(1, 5):
            mf.checkpoint.save(tmp_path, shards, groups, step=step)
    file = tmp_path / "step-00000002" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    (tmp_path / "step-00000003" / "MANIFEST.json").write_bytes(b"{}")
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("step 4: 1 tensors in 1 files")
    for step, said in ((2, f"{file}"), (2, "w[0:100]: its values are not"), (3, "MANIFEST.json")):
        assert main(["verify", str(tmp_path), "--step", str(step)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
