"""AdamW under a hard limit of memory that its states exceed: the losses of a run without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, resource, sys, threading

import torch

import mics_fn as mf
from mics_fn import offload, optim

SIZE, LAYERS, STEPS = 1024, 6, 3
STATES = 2 * 4 * SIZE * SIZE * LAYERS
folder, kind = sys.argv[1], sys.argv[2]
torch.set_num_threads(1)
threading.stack_size(2**19)  # stacks of threads count as memory


def data_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("VmData"))


def loss_of(full, step, size):
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(step))
    for name in sorted(full):
        x = torch.tanh(x @ full[name])
    return x.square().mean()


def made(seed, size):
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) / 32


def trained(size, where, steps):
    params = {f"w{i}": made(i, size) for i in range(LAYERS)}
    params = mf.shard(params, groups, bucket_bytes=2**22)
    if size == SIZE and kind != "free":
        # Beside what is there, gradients fit, and a quarter of the states.
        room = data_bytes() + STATES // 2 + STATES // 4
        resource.setrlimit(resource.RLIMIT_DATA, (room, room))
    state = mf.init_state(params, optim.adamw(1e-2), where=where)
    policy, losses = mf.keep_all(), []
    for step in range(steps):
        total = mf.GradSum()
        with mf.defer(state.params, groups, policy, into=total) as full:
            loss = loss_of(full, step, size)
            total.backward(loss)
            losses.append(loss.item())
        del full, loss  # else the step would copy what parameters share with shards
        state = mf.opt_step(state, total, donate=True)
        total.release()
        del total
    return losses


groups = mf.make_groups(1)
where = offload.where(f"states=disk:{folder}", host_bytes=2**21) if kind == "disk" else None
trained(8, where, 2)  # what torch imports and keeps for itself
try:
    losses = trained(SIZE, where, STEPS)
except (RuntimeError, MemoryError) as error:
    losses = "memory" if "memory" in f"{error} {type(error).__name__}".lower() else f"{error}"
print(json.dumps(losses))
"""


def run(folder: Path, kind: str) -> object:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    # What is freed goes back to the system at once.
    allocator = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, str(script), str(folder / "scratch"), kind]
    options = {"capture_output": True, "text": True, "timeout": 100}
    found = subprocess.run(command, env={**os.environ, **allocator}, **options)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
@pytest.mark.thorough
def test_states_four_times_the_memory_that_is_left_train(tmp_path):
    """The limit leaves room for gradients and a quarter of the states, and in memory it is hit."""
    free = run(tmp_path, "free")
    assert run(tmp_path, "disk") == free
    assert run(tmp_path, "memory") == "memory"
    assert isinstance(free, list)
    assert len(set(free)) == 3
