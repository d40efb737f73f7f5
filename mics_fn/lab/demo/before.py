"""What is checked before the demo starts a process: where it writes, and how much memory it needs.

The estimate is a lower bound, so what is refused could not have run.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from mics_fn import _device
from mics_fn.errors import PlanError, human_bytes, message
from mics_fn.lab.demo.run import DemoConfig

RESULTS, CURVE = "results.json", "loss.png"
PROCESS_BYTES = 150_000_000  # of Python and torch alone
FLOAT = 4  # bytes


def folder_for(out: Path | None, overwrite: bool) -> Path:
    """A folder that can be written to and holds no results, which is made here.

    Args:
        out: the one that was asked for; None for the first of `mics_fn_demo`, `mics_fn_demo-2`
            and so on that is free.
        overwrite: whether results of an earlier run may be replaced.

    Raises:
        PlanError: it cannot be written to, or has results of an earlier run.
    """
    folder, number = out or Path("mics_fn_demo"), 1
    while out is None and not overwrite and _results(folder):
        number += 1
        folder = Path(f"mics_fn_demo-{number}")
    there = _results(folder)
    if there and not overwrite:
        fix = "pass another --out, or --overwrite to replace them"
        what = f"--out {folder}: it has the results of an earlier run"
        raise PlanError(message(what, [", ".join(there)], fix))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as err:
        fix, why = "pass --out with a folder that you may write to", getattr(err, "strerror", err)
        raise PlanError(message(f"--out {folder}: {why}", fix=fix)) from err
    return folder


def _results(folder: Path) -> list[str]:
    return [name for name in (RESULTS, CURVE) if os.path.exists(folder / name)]


def check_text(config: DemoConfig, lengths: Sequence[int]) -> None:
    """Raise PlanError if a sample is longer than one of the parts of the text, in bytes."""
    if config.model.context >= min(lengths):
        what = f"--context {config.model.context}: the shortest part of the text has"
        fix = "pass a smaller --context, such as 128"
        raise PlanError(message(f"{what} {min(lengths):,} bytes", fix=fix))


def check_memory(config: DemoConfig, given: Sequence[str], has: int | None = None) -> None:
    """Raise PlanError if the ranks cannot fit into the memory of this machine.

    Args:
        config: what they train.
        given: the flags that are not at their defaults, such as "--dim 1000000".
        has: bytes of memory; by default those of the machine.
    """
    has = _device.total_memory(torch.device("cpu")) if has is None else has
    parts = needed_bytes(config)
    if sum(parts.values()) <= has:
        return
    lines = [f"{what}: {human_bytes(size)}" for what, size in parts.items()]
    flags = " ".join(given) or "the defaults"
    what = f"{flags}: {config.ranks} ranks need at least {human_bytes(sum(parts.values()))}"
    fix = "pass smaller sizes; --help names the defaults"
    raise PlanError(message(f"{what}, and this machine has {human_bytes(has)}", lines, fix))


def needed_bytes(config: DemoConfig) -> dict[str, int]:
    """Bytes that all ranks together need at least, by what they are for; nothing is allocated.

    On a GPU states and activations are elsewhere, but each rank makes its model on the CPU.
    """
    model = config.model
    numel = model.num_blocks * 12 * model.dim**2
    numel += (2 * model.vocab_size + model.context) * model.dim
    tokens = config.sequences * model.context
    # What backward needs: 14 tensors as wide as the stream per block, and logits with their log.
    least = 2 if config.rounds else FLOAT  # bytes of what is computed
    saved = tokens * (14 * model.num_blocks * model.dim + 2 * model.vocab_size)
    batch = 2 * 8 * config.accumulate * tokens  # int64, in and out
    on_cpu = config.device == "cpu"
    # The model, and shards with two moments, which may be kept in bfloat16 or as codes.
    shards = 1 if config.rounds else 3
    states = numel * (1 + (shards / config.partition_size if on_cpu else 0))
    return {
        "processes": config.ranks * PROCESS_BYTES,
        "parameters and their states": int(config.ranks * FLOAT * states),
        "activations and batches": config.ranks * (least * saved * on_cpu + batch),
    }
