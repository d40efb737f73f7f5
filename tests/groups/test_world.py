"""Starting torch.distributed from a launcher's environment, and what is refused before that."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs import free_port
from test_groups import heard

from mics_fn.errors import GroupsError
from mics_fn.groups.make import make_groups
from mics_fn.groups.startup import init_distributed
from mics_fn.lab.ranks import run_ranks


@pytest.mark.parametrize(
    ("name", "source"), [("WORLD_SIZE", "torchrun"), ("SLURM_STEP_NUM_TASKS", "Slurm")]
)
def test_make_groups_before_init(monkeypatch: pytest.MonkeyPatch, name: str, source: str):
    monkeypatch.setenv(name, "4")
    with pytest.raises(GroupsError) as caught:
        make_groups()
    assert str(caught.value) == (
        f"make_groups: {source} started several ranks, without torch.distributed\n"
        "  fix: call mics_fn.init_distributed() first"
    )


def start_over(env: dict[str, str]) -> Any:
    rank = str(dist.get_rank())
    dist.barrier()  # else one may close connections that the other is still making
    dist.destroy_process_group()
    kept = {k: v for k, v in os.environ.items() if "RANK" not in k and "WORLD_SIZE" not in k}
    mine = env | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
    with mock.patch.dict(os.environ, kept | mine, clear=True):
        for _ in range(2):  # the second time: nothing
            assert init_distributed(device="cpu", timeout_s=30) == torch.device("cpu")
        with make_groups(timeout_s=20) as groups:
            seen = dist.get_rank(), heard(groups.partition), groups.describe()
        groups = make_groups(1, timeout_s=20)  # over a TCP store this time
        seen += (heard(groups.replicas),)
    dist.destroy_process_group()
    with pytest.raises(GroupsError, match="is used after torch.distributed was shut down"):
        groups.replicas.process_group()
    groups.close()
    return seen


def test_a_job_of_slurm_from_its_start_to_its_end():
    env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "1"}
    results = run_ranks(start_over, 2, env | {"MASTER_PORT": f"{free_port(0)}"})
    assert results == [(rank, (0, 1), "n=2 p=2 levels=rank:2", (0, 1)) for rank in range(2)]
