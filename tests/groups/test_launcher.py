"""The launcher's environment, as plain mappings."""

import pytest

from mics_fn.errors import GroupsError
from mics_fn.groups.environment import (
    Launch,
    launched_world_size,
    node_of,
    read_launch,
    tasks_per_node,
)

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
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
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


def test_torchrun_goes_before_slurm() -> None:
    expected = Launch("torchrun", 5, 8, 1, 4, "node0", 29400)
    assert read_launch(TORCHRUN) == read_launch(SLURM | TORCHRUN) == expected


def test_slurm() -> None:
    assert read_launch(SLURM) == Launch("Slurm", 5, 8, 1, 4, "node0", 23456)
    assert read_launch(SLURM | {"MASTER_PORT": "7"}) == Launch("Slurm", 5, 8, 1, 4, "node0", 7)
    uneven = read_launch(SLURM | {"SLURM_TASKS_PER_NODE": "4,3,1"})
    assert uneven is not None
    assert uneven.node_size is None


def test_open_mpi() -> None:
    env = OPEN_MPI
    assert read_launch(env) == Launch("Open MPI", 5, 8, 1, 4, "node0", 7)
    assert launched_world_size(env) == 8
    assert node_of(env, 5) is None, "their hosts tell, since it maps ranks in any way"
    daemon = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    assert read_launch(SLURM | daemon | env) == read_launch(env), "srun started mpirun's daemon"
    assert node_of(daemon | env, 5) is None
    assert read_launch(env | TORCHRUN) == read_launch(TORCHRUN)
    one = {name: value.replace("8", "1").replace("5", "0") for name, value in env.items()}
    assert read_launch(one) is None


@pytest.mark.parametrize("size", ["PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"])
def test_ranks_of_another_launcher_never_train_alone(size: str) -> None:
    """Nor as the rank of the daemon that srun started for it; their script names their place."""
    daemon = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    for env in ({size: "8"}, SLURM | daemon | {size: "8"}):
        with pytest.raises(GroupsError) as caught:
            read_launch(env)
        assert str(caught.value) == (
            f"init_distributed: {size}=8, of a launcher that is not known\n  fix: let the script "
            "that it runs set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
        )
        assert launched_world_size(env) == 8
        assert read_launch(env | TORCHRUN) == read_launch(TORCHRUN)
    assert read_launch({size: "1"}) is None


def test_open_mpi_on_one_node_meets_on_it_at_a_port_of_its_job() -> None:
    env = without(OPEN_MPI, "MASTER_ADDR", "MASTER_PORT") | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
    launch = read_launch(env | {"PBS_JOBID": "123456.server"})
    assert launch is not None
    assert (launch.master_addr, launch.master_port) == ("127.0.0.1", 23456)


def test_srun_with_pmi_is_srun() -> None:
    step = SLURM | {"SLURM_STEP_NUM_TASKS": "8"}
    assert read_launch(step | {"PMI_RANK": "5", "PMI_SIZE": "8"}) == read_launch(step)


def test_slurm_on_one_node_meets_on_it() -> None:
    launch = read_launch(without(SLURM, "MASTER_ADDR") | {"SLURM_NNODES": "1"})
    assert launch is not None
    assert launch.master_addr == "127.0.0.1"


def test_the_step_counts_and_not_the_job() -> None:
    launch = read_launch(SLURM | {"SLURM_STEP_NUM_TASKS": "6"})
    assert launch is not None
    assert launch.world_size == 6
    assert read_launch(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None


def test_what_a_batch_script_calls_runs_alone() -> None:
    """The script is the first task of a job of many, but no step of it."""
    batch = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"}
    assert read_launch(batch) is None
    assert launched_world_size(batch) == 1
    launch = read_launch(batch | {"SLURM_STEP_NUM_TASKS": "8"})  # srun in that script
    assert launch is not None
    assert (launch.rank, launch.world_size) == (0, 8)
    allocated = without(SLURM, "SLURM_PROCID", "SLURM_LOCALID")  # a shell of salloc
    assert read_launch(allocated) is None


@pytest.mark.parametrize("env", [{}, {"WORLD_SIZE": "1"}, {"SLURM_PROCID": "0"}], ids=str)
def test_no_launch(env: dict[str, str]) -> None:
    assert read_launch(env) is None
    assert launched_world_size(env) == 1


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (
            without(TORCHRUN, "LOCAL_RANK", "MASTER_ADDR"),
            "init_distributed: the environment has RANK, WORLD_SIZE, MASTER_PORT but not "
            "LOCAL_RANK, MASTER_ADDR\n  fix: launch with torchrun, or set them all",
        ),
        (
            {"WORLD_SIZE": "2"},
            "init_distributed: the environment has WORLD_SIZE but not RANK, LOCAL_RANK, "
            "MASTER_ADDR, MASTER_PORT\n  fix: launch with torchrun, or set them all",
        ),
        (
            TORCHRUN | {"WORLD_SIZE": "0"},
            "WORLD_SIZE='0' is not a positive number\n  fix: set it, or unset it",
        ),
        (
            without(SLURM, "MASTER_ADDR"),
            "init_distributed: Slurm runs 8 ranks, without MASTER_ADDR\n"
            "  fix: put this line before srun in the batch script: export MASTER_ADDR="
            '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "8"},
            "init_distributed: the environment has SLURM_STEP_NUM_TASKS but not SLURM_PROCID, "
            "SLURM_LOCALID\n  fix: launch with Slurm, or set them all",
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_LOCALID": "3"},
            "init_distributed: the environment has SLURM_PROCID, SLURM_LOCALID but not "
            "SLURM_NTASKS\n  fix: launch with Slurm, or set them all",
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "4"},
            "init_distributed: the environment has OMPI_COMM_WORLD_SIZE but not "
            "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK\n"
            "  fix: launch with Open MPI, or set them all",
        ),
        (
            without(OPEN_MPI, "MASTER_ADDR", "MASTER_PORT"),
            "init_distributed: Open MPI runs 8 ranks, without MASTER_ADDR and MASTER_PORT\n"
            "  fix: export the host name of rank 0's node as MASTER_ADDR and a free port of it as "
            "MASTER_PORT, to all ranks: mpirun -x MASTER_ADDR -x MASTER_PORT",
        ),
    ],
)
def test_broken_environments(env: dict[str, str], text: str) -> None:
    with pytest.raises(GroupsError) as caught:
        read_launch(env)
    assert str(caught.value) == text


def test_tasks_per_node() -> None:
    assert tasks_per_node("8") == (8,)
    assert tasks_per_node("2(x3),1,4(x2)") == (2, 2, 2, 1, 4, 4)
    for bad in ("", "4(x0)", "0", "4(x2", "-1", "1２"):
        with pytest.raises(TypeError):
            tasks_per_node(bad)


def test_nodes_of_ranks() -> None:
    def nodes(env: dict[str, str]) -> list[int | None]:
        return [found[0] if (found := node_of(env, rank)) else None for rank in range(6)]

    assert nodes({"LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS_PER_NODE": "3"}) == [0, 0, 1, 1, 2, 2]
    assert nodes({"SLURM_NTASKS_PER_NODE": "3"}) == [0, 0, 0, 1, 1, 1]
    assert nodes({"SLURM_TASKS_PER_NODE": "3,1,2"}) == [0, 0, 0, 1, 2, 2]
    assert nodes({"SLURM_TASKS_PER_NODE": "3,1"}) == [0, 0, 0, 1, None, None]
    assert nodes({"SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_TASKS_PER_NODE": "6"}) == [
        *(0, 0, 1, 1),
        *(2, 2),
    ]
    assert node_of({}, 3) is None
