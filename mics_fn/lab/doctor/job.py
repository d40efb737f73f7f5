"""`python -m mics_fn doctor` as a rank of a job: whether the ranks of all nodes reach each other.

It is the smallest job there is, for the first minute on new nodes: one process per node is enough,
and one per GPU is the real thing. It moves known values over all ranks, along the nodes and across
them, and says which are wrong and how long it took.
"""

import os
import time

import torch

import mics_fn as mf
from mics_fn import _device
from mics_fn.lab.doctor.rank import Check
from mics_fn.lab.doctor.report import OK, WRONG, Finding, as_text

SIZE = 1_000_000  # elements that are moved
START_S = 60.0  # until all ranks must have started
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_job(device: str) -> int:
    """What each rank does; the first one prints. Returns the exit code: 1 if something is wrong.

    Args:
        device: "auto", or a type of device.

    Raises:
        MicsError: the ranks do not find each other in a minute, or one failed.
    """
    began = time.monotonic()
    chosen = mf.init_distributed(device=device, timeout_s=START_S)
    checks = [Check("until ranks are connected", time.monotonic() - began, unit="s")]
    world = torch.distributed.get_world_size()
    with mf.make_groups(world, device=chosen, timeout_s=START_S) as groups:
        topology, rank = groups.plan.topology, groups.rank
        checks += _gather(groups)
    with mf.make_groups(device=chosen, timeout_s=START_S) as groups:  # one replica per node
        checks += _means(groups)
    finding = Finding("job", OK if all(c.ok for c in checks) else WRONG, world, checks=checks)
    if rank == 0:
        sizes = " x ".join(map(str, topology.sizes))
        print(f"{world} ranks ({sizes}) on {chosen.type}, torch {torch.__version__}")
        for name in INTERFACES:
            print(f"{name}: {os.environ.get(name, 'not set')}")
        seconds = time.monotonic() - began
        print("\n" + as_text(Finding(finding.name, finding.verdict, world, seconds, checks)))
        print("\nall ranks reach each other" if finding.well else "\nsome values are wrong")
    return 0 if finding.well else 1


def _gather(groups: mf.Groups) -> list[Check]:
    """Every rank has a part of known values, and gathers all of them, across nodes first."""
    want = torch.arange(SIZE, dtype=torch.float32, device=groups.device)
    shards = mf.shard({"known": want}, groups)
    mf.unshard(shards, groups)  # the first one also makes connections
    _device.finish(groups.device)
    began = time.monotonic()
    full = mf.unshard(shards, groups)["known"]
    _device.finish(groups.device)
    seconds = time.monotonic() - began
    return [
        Check("elements that are wrong in a gather", int((full != want).sum()), 0),
        Check(f"a gather of {SIZE * 4 // 10**6} MB over all ranks", seconds, unit="s"),
    ]


def _means(groups: mf.Groups) -> list[Check]:
    """Both hops of a gradient: each rank gives its number, and finds the mean of all numbers."""
    shards = mf.shard({"known": torch.zeros(SIZE, device=groups.device)}, groups)
    mine = {"known": torch.full((SIZE,), float(groups.position), device=groups.device)}
    wanted, seconds = (groups.world_size - 1) / 2, 0.0
    for _ in range(2):  # the first one also makes connections
        began = time.monotonic()
        means = mf.reduce_grads(mf.scatter_grads(mine, groups, like=shards), groups)
        _device.finish(groups.device)
        seconds = time.monotonic() - began
    wrong = int((mf.unshard(means, groups)["known"] != wanted).sum())
    return [
        Check("elements that are wrong after both hops", wrong, 0),
        Check("both hops, with one replica per node", seconds, unit="s"),
    ]
