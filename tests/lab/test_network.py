"""What the lab starts listens on loopback alone."""

import os

import pytest
import torch
import torch.distributed as dist
from rank_pool import run_ranks
from sockets import HAS_LIST, listening

import mics_fn as mf
from mics_fn.lab.ranks import launch

pytestmark = pytest.mark.skipif(not HAS_LIST, reason="needs /proc/net/tcp")


def sockets_of_a_step() -> tuple[list[str], list[str]]:
    """Where this rank and the process that started it listen, in the middle of a job."""
    mf.init_distributed(device="cpu", timeout_s=60)
    with mf.make_groups(2, node_size=1) as groups:
        shards = mf.shard({"w": torch.ones(4)}, groups)
        mf.unshard(shards, groups)
        found = listening(), listening(os.getppid())
        dist.barrier()
    return found


def check(found: list[list[str]]) -> None:
    """All on loopback, and every process has a socket, so that an empty list proves nothing."""
    assert all(found)
    assert {address for each in found for address in each} == {"127.0.0.1"}


@pytest.mark.thorough
def test_launched_ranks_and_their_launcher_listen_on_loopback(monkeypatch: pytest.MonkeyPatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for own, parent in launch(sockets_of_a_step, 2):
        check([own, parent])


def test_ranks_of_a_pool_listen_on_loopback():
    found = run_ranks(sockets_of_a_step, 2)  # new ones: other tests open stores of their own
    check([own for own, _ in found])
