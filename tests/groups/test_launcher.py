"""The launcher's environment, as plain mappings, and a start of torch.distributed from it."""

import os
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs import free_port
from rank_pool import run_ranks
from test_groups import heard

from mics_fn.errors import GroupsError
from mics_fn.groups.make import make_groups
from mics_fn.groups.startup import Launch, init_distributed, launcher_of, read_launch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "123456",
    "MASTER_ADDR": "node0",
}

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "7",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


STEP = {"SLURM_STEP_NUM_TASKS": "8"}
DAEMON = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
BATCH = without(SLURM, *STEP) | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
OF_TORCHRUN = Launch("torchrun", 5, 8, 1, "node0", 29400)
OF_SLURM = Launch("Slurm", 5, 8, 1, "node0", 23456)
OF_MPI = Launch("Open MPI", 5, 8, 1, "node0", 7)


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        (TORCHRUN, OF_TORCHRUN),
        (SLURM | TORCHRUN, OF_TORCHRUN),
        (OPEN_MPI | TORCHRUN, OF_TORCHRUN),
        (SLURM, OF_SLURM),
        (SLURM | {"MASTER_PORT": "7"}, OF_SLURM._replace(master_port=7)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "6"}, OF_SLURM._replace(world_size=6)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (  # on one node they meet there
            without(SLURM, "MASTER_ADDR") | {"SLURM_NNODES": "1"},
            OF_SLURM._replace(master_addr="127.0.0.1"),
        ),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}, OF_SLURM),
        (BATCH, None),  # the script is the first task of a job of many, but no step of it
        (BATCH | STEP, OF_SLURM._replace(rank=0, local_rank=0)),  # srun in that script
        (without(SLURM, "SLURM_PROCID", "SLURM_LOCALID", *STEP), None),  # a shell of salloc
        (OPEN_MPI, OF_MPI),
        (SLURM | DAEMON | OPEN_MPI, OF_MPI),  # srun started mpirun's daemon
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        (
            without(OPEN_MPI, "MASTER_ADDR", "MASTER_PORT")
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PBS_JOBID": "123456.server"},
            OF_MPI._replace(master_addr="127.0.0.1", master_port=23456),
        ),
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0"}, None),
    ],
)
def test_the_launcher_that_is_nearest_says_the_place_of_a_rank(env, launch):
    assert read_launch(env) == launch
    assert launcher_of(env) == (launch and launch.source)


@pytest.mark.parametrize("size", ["PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"])
def test_ranks_of_another_launcher_never_train_alone(size: str):
    """Nor as the rank of the daemon that srun started for it; their script names their place."""
    for env in ({size: "8"}, SLURM | DAEMON | {size: "8"}):
        with pytest.raises(GroupsError) as caught:
            read_launch(env)
        assert str(caught.value) == (
            f"init_distributed: {size}=8, of a launcher that is not known\n  fix: let the script "
            "that it runs set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
        )
        assert read_launch(env | TORCHRUN) == OF_TORCHRUN
    assert read_launch({size: "1"}) is None


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (
            without(TORCHRUN, "LOCAL_RANK", "MASTER_ADDR"),
            "init_distributed: torchrun started this process, without LOCAL_RANK, MASTER_ADDR\n"
            "  fix: launch with torchrun, or set them all",
        ),
        (without(SLURM, "MASTER_ADDR"), "Slurm started this process, without MASTER_ADDR"),
        (without(SLURM, *STEP), "Slurm started this process, without SLURM_STEP_NUM_TASKS"),
        (
            without(OPEN_MPI, "MASTER_ADDR", "MASTER_PORT"),
            "init_distributed: Open MPI started this process, without MASTER_ADDR, MASTER_PORT",
        ),
    ],
)
def test_broken_environments(env: dict[str, str], text: str):
    with pytest.raises(GroupsError, match=re.escape(text)):
        read_launch(env)


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
