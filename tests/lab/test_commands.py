"""Commands of the lab: flags that cannot work, and `python -m mics_fn verify`."""

import shlex
from pathlib import Path

import pytest
import torch

import mics_fn as mf
from mics_fn.__main__ import main
from mics_fn.lab import demo, doctor
from mics_fn.lab.bench import turns

JOB = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
JOB |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("bench step --dim 10 --heads 4", "a width of 10 is no multiple of 4 heads"),
        ("bench bytes --ranks 6 --node-size 4", "4"),
        ("bench opt --json no/such/folder/f.json", "there is no folder no/such/folder"),
        ("bench step --peers fsdp", "invalid choice: 'fsdp'"),
        ("bench step --peers plain", "none is measured with 4 ranks"),
        ("bench step --precision 'bf16; *norm*: f32'", "fsdp2 has one for all leaves"),
        ("bench bytes --precision hop2=int9[64]", "'int9[64]' is not a codec"),
        ("bench step --overlap --peers keep fsdp2", "--overlap: fsdp2 has no timeline"),
        ("bench step --overlap --ranks 2", "--overlap: one replica has no hop 2"),
        ("bench step --rates 200mbits", "200mbits: it is not a rate"),
        ("bench step --rates 1gbit", "MICS_FN_LINKS=no_such_module: No module named"),
        ("bench step --rss", "--rss in a job"),
        ("bench step --ranks 2", "--ranks 2 in a job of 4"),
        ("demo --ranks 4 --partition-size 3", "partition_size=3 does not fit 4 ranks"),
        ("demo --steps 1", "argument --steps: 1 is less than 2"),
        ("demo --out /dev/null", "--out /dev/null: File exists\n  fix: pass --out with a folder"),
        ("demo --steps 1e9", "argument --steps: invalid integer value: '1e9'"),
    ],
)
def test_bad_flags_end_before_any_process_starts(
    command: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name in ((turns, "launch"), (demo, "launch"), (doctor, "run_bounded")):
        monkeypatch.setattr(module, name, lambda *args, **options: pytest.fail("it ran"))
    monkeypatch.setenv("MICS_FN_LINKS", "no_such_module")
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    for name, value in JOB.items():
        monkeypatch.delenv(name, raising=False)
        if "job" in text:
            monkeypatch.setenv(name, value)
    try:
        code = main(shlex.split(command))
    except SystemExit as error:  # of argparse
        code = error.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert text in captured.err
    assert "Traceback" not in captured.err


# `verify`


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
