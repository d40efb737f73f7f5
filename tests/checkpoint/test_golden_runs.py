"""A run that a released version saved goes on for ever.

`python tests/checkpoint/test_golden_runs.py` writes the folder of this version, and
what a rank that loads it has to find.
"""

import json
import sys
import warnings
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
from mics_fn.shards import Sharded, is_leaf
from mics_fn.train.carried import state_of

Pools = Callable[[int], RankPool]
GOLDEN = Path(__file__).parent / "golden_runs"
THIS = f"{manifest.MAJOR}.{manifest.MINOR}"
FOLDERS = sorted(path.name for path in GOLDEN.iterdir()) if GOLDEN.is_dir() else []
STEPS = 4


def made(folder: str, groups: mf.Groups) -> mf.Trainer:
    """AdamW with a guard over a model in which some leaves are tied, frozen or of another dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 5), nn.Linear(5, 5), nn.Linear(5, 6, bias=False))
    model[2].weight = model[0].weight  # pyright: ignore
    model[1].bias.requires_grad = False  # pyright: ignore
    return mf.Trainer(
        model,
        optim.adamw(0.125, weight_decay=0.25),
        groups,
        loss=lambda model, x: model(x).square().mean(),
        guard=optim.Guard(max_norm=1.0),
        checkpoint=mf.Checkpoints(folder, every=STEPS),
    )


def values_of(trainer: mf.Trainer) -> list[Any]:
    """Parameters and optimizer state in full, as JSON keeps them to the bit."""
    groups = trainer.member.home
    found = [trainer.params(), optim.by_leaf(trainer.state.opt), trainer.sync_state.step]
    full = list[Any]()
    for leaf in tree.flatten(found, is_leaf)[0]:
        x = mf.unshard([leaf], groups)[0] if isinstance(leaf, Sharded) else leaf
        if isinstance(x, Tensor | int | float):
            full.append(x.double().tolist() if isinstance(x, Tensor) else x)
    return full


def write(folder: str) -> list[Any]:
    """What four ranks in two replicas save; and what they hold then."""
    with mf.make_groups(2) as groups:
        trainer = made(folder, groups)
        batches = [torch.tensor([groups.position, i % 6]) for i in range(8)]
        trainer.fit(batches, STEPS, progress=False)
        return values_of(trainer)


def read(folder: str, partition_size: int) -> list[Any]:
    """What a new trainer goes on from, once it has taken another step."""
    with mf.make_groups(partition_size) as groups, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions, and of random states of other ranks
        trainer = made(folder, groups)
        found = values_of(trainer)
        extra = checkpoint.load(folder, state_of(trainer), groups).extra
        trainer.step(torch.tensor([0, 1]))
        data = extra["data"]
        return [trainer.state.step, data["batches"], data["samples"], found]


def test_this_version_has_a_run() -> None:
    assert THIS in FOLDERS


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize(("n", "partition_size"), [(1, 1), (2, 2), (4, 2), (4, 4), (2, 1)])
def test_a_run_of_a_released_version_goes_on(
    ranks: Pools, tmp_path: Path, name: str, n: int, partition_size: int
) -> None:
    folder = GOLDEN / name
    assert checkpoint.verify(folder).step == STEPS
    want = json.loads((folder / "expected.json").read_text())
    before = sorted(path.name for path in folder.rglob("*"))
    for found in ranks(n).run(read, str(folder), partition_size):
        assert found == [STEPS + 1, STEPS, 2 * STEPS, want]
    assert sorted(path.name for path in folder.rglob("*")) == before


if __name__ == "__main__":
    target = GOLDEN / (sys.argv[1] if len(sys.argv) > 1 else THIS)
    expected = run_ranks(write, 4, str(target))[0]
    (target / "expected.json").write_text(json.dumps(expected))
    (target / ".lock").unlink(missing_ok=True)
