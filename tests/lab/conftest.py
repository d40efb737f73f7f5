"""Benches in this process, with ranks that are forked from it."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_pool import run_ranks

from mics_fn.__main__ import main

Bench = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def forked_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Bench:
    """The figures of a bench, and what it printed.

    Ranks that torch's launcher starts would first import torch, for seconds each; the demo's tests
    do that.
    """

    def run(*argv: str) -> tuple[dict[str, Any], str]:
        file = tmp_path / "figures.json"
        assert main(["bench", *argv, "--json", str(file)]) == 0
        return json.loads(file.read_text()), capsys.readouterr().out

    def forked(fn: Callable[..., Any], n: int, *args: Any) -> list[Any]:
        return run_ranks(as_in_a_new_process, n, fn, *args, timeout_s=240.0)

    for module in ("turns", "step"):
        monkeypatch.setattr(f"mics_fn.lab.bench.{module}.launch", forked)
    return run


def as_in_a_new_process(fn: Callable[..., Any], *args: Any) -> Any:
    """Call it where garbage is collected as often as in a process without all that this one has.

    What is measured counts garbage in circles until then.
    """
    gc.freeze()
    gc.collect()
    return fn(*args)
