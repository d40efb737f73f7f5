"""Commands of the lab with flags that cannot work: refused before any process starts."""

import shlex

import pytest

from mics_fn.__main__ import main
from mics_fn.lab import demo, doctor
from mics_fn.lab.bench import turns

JOB = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
JOB |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("bench step --partition-size 3", "3"),
        ("bench step --dim 10 --heads 4", "--dim 10 is not a multiple of --heads 4"),
        ("bench bytes --ranks 6 --node-size 4", "4"),
        ("bench opt --json no/such/folder/f.json", "there is no folder no/such/folder"),
        ("bench step --peers fsdp", "there is no peer fsdp\n  fix: choose from keep zero3"),
        ("bench step --peers plain", "none of these is measured with 4 ranks"),
        ("bench step --precision compute=bf17", "'bf17' is not a float dtype"),
        ("bench step --precision 'bf16; *norm*: f32'", "fsdp2 has one for all leaves"),
        ("bench bytes --precision hop2=int9[64]", "'int9[64]' is not a codec"),
        ("bench step --overlap --peers keep fsdp2", "--overlap: fsdp2 has no timeline"),
        ("bench step --overlap --ranks 2", "--overlap: one replica has no hop 2"),
        ("bench step --rates 200mbits", "200mbits: it is not a rate"),
        ("bench step --rates 1gbit", "MICS_FN_LINKS=no_such_module: No module named"),
        ("bench step --rates unshaped", "MICS_FN_LINKS=json: module 'json' has no attribute"),
        ("bench step --rss", "--rss in a job"),
        ("bench step --ranks 2", "--ranks 2 in a job of 4"),
        ("demo --precision hop2=int9", "Codec.parse: 'int9' is not a codec"),
        ("demo --precision '*norm*: hop1=int8@rack'", "int8[256]@rack names a level that these"),
        ("demo --ranks 4 --partition-size 3", "partition_size=3 does not fit 4 ranks"),
        ("demo --dim 30", "--dim 30 is not a multiple of 4 heads"),
        ("demo --steps 1", "argument --steps: 1 is less than 2"),
        ("demo --device cuda --ranks 99", "--device cuda with 99 ranks needs as many GPUs"),
        ("demo --context 400000", "--context 400000: the shortest part of the text has "),
        ("demo --out /dev/null", "--out /dev/null: File exists\n  fix: pass --out with a folder"),
        ("demo --ranks 0", "argument --ranks: 0 is less than 1"),
        ("demo --steps 1e9", "argument --steps: invalid integer value: '1e9'"),
        ("demo --lr x", "argument --lr: invalid learning_rate value: 'x'"),
        ("demo --lr nan", "argument --lr: nan is not between 0 and 1"),
        ("doctor --out nowhere/report.json", "there is no folder nowhere"),
        ("doctor --parts ways none", "invalid choice: 'none'"),
    ],
)
def test_bad_flags_end_before_any_process_starts(
    command: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name in ((turns, "launch"), (demo, "launch"), (doctor, "run_bounded")):
        monkeypatch.setattr(module, name, lambda *args, **options: pytest.fail("it ran"))
    monkeypatch.setenv("MICS_FN_LINKS", "json" if "unshaped" in command else "no_such_module")
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    for name, value in JOB.items():
        if "job" in text:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    try:
        code = main(shlex.split(command))
    except SystemExit as error:  # of argparse
        code = error.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert text in captured.err
    assert "Traceback" not in captured.err
