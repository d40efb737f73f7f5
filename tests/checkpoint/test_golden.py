"""Checkpoints of every released version load for ever; `python tests/checkpoint/test_golden.py`.

That command writes the folder of this version, which is committed once, when it is released.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import checkpoint, optim, tree
from mics_fn.checkpoint import manifest
from mics_fn.lab.ranks.pool import RankPool, run_ranks

Pools = Callable[[int], RankPool]
GOLDEN = Path(__file__).parent / "golden"
THIS = f"{manifest.MAJOR}.{manifest.MINOR}"


def values() -> dict[str, Any]:
    """Parameters that follow from arithmetic alone: dtypes, ties, frozen and replicated leaves."""
    shared = torch.arange(24.0).view(6, 4) / 8
    return {
        "a": torch.arange(35.0).view(5, 7) / 4 - 3,
        "b": torch.arange(9, dtype=torch.bfloat16) / 2,
        "frozen": nn.Parameter(torch.arange(10.0) ** 2, requires_grad=False),
        "count": torch.tensor([3, 1]),
        "scalar": torch.tensor(0.5),
        "wte": shared,
        "zhead": shared.detach(),
    }


def state_on(groups: mf.Groups, *, steps: int) -> Any:
    """A state after steps of SGD with momentum whose numbers are exact in every dtype."""
    params = mf.shard(values(), groups, bucket_bytes=120)
    buffers = {"mean": torch.tensor([0.25, 4.0]), "own": torch.tensor(0)}
    state = mf.init_state(params, optim.sgd(0.5, momentum=0.5), buffers=buffers)
    for _ in range(steps):
        state = mf.opt_step(state, tree.map_leaves(torch.ones_like, state.params))
    return state


def extra_of(position: int) -> dict[str, Any]:
    bits = torch.tensor([position, 255], dtype=torch.uint8)
    return {"position": position, "rate": float("inf"), "order": (1, "ä"), "bits": bits}


def write(folder: str) -> None:
    """What four ranks in two replicas save."""
    with mf.make_groups(2) as groups:
        state = state_on(groups, steps=2)
        state.buffers["own"] += groups.position
        checkpoint.save(folder, state, groups, step=2, extra=extra_of(groups.position))


def read(folder: str, partition_size: int) -> tuple[Any, list[Any], list[Any]]:
    """What is loaded, and what it has to be: extra, and everything in the state."""
    with mf.make_groups(partition_size) as groups:
        like, want = state_on(groups, steps=0), state_on(groups, steps=2)
        want.buffers["own"] += groups.position
        found = checkpoint.load(folder, like, groups)
        parts = [[x.params, optim.by_leaf(x.opt), x.buffers, x.step] for x in (found.state, want)]
        frozen = [
            [x.params[name].data for name in ("frozen", "count")] for x in (found.state, want)
        ]
        lists = [tree.flatten([*part, kept])[0] for part, kept in zip(parts, frozen, strict=True)]
        return found.extra, *lists  # pyright: ignore


def check(found: Any, position: int) -> None:
    extra, got, want = found
    wanted = extra_of(position)
    assert torch.equal(extra.pop("bits"), wanted.pop("bits"))
    assert extra == wanted
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


FOLDERS = sorted(path.name for path in GOLDEN.iterdir()) if GOLDEN.is_dir() else []


def test_this_version_has_a_folder() -> None:
    assert THIS in FOLDERS


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("partition_size", [1, 2, 4])
def test_a_released_checkpoint_loads(ranks: Pools, name: str, partition_size: int) -> None:
    folder = str(GOLDEN / name)
    assert checkpoint.verify(folder).step == 2
    if partition_size == 2:  # the buffer that each rank has for itself comes back there alone
        for position, found in enumerate(ranks(4).run(read, folder, partition_size)):
            check(found, position)
    else:
        for found in ranks(4).try_run(read, folder, partition_size):
            assert "buffers.own differed between ranks 0-3" in str(found)


if __name__ == "__main__":
    target = GOLDEN / (sys.argv[1] if len(sys.argv) > 1 else THIS)
    run_ranks(write, 4, str(target))
    (target / ".lock").unlink(missing_ok=True)
