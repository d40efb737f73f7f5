"""What this machine and its torch are, without names of hosts, users or folders."""

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

from mics_fn import _device, _torch
from mics_fn._version import __version__
from mics_fn.groups import nccl_problems
from mics_fn.lab.doctor.rank import Job, Rank
from mics_fn.lab.report import human_bytes

BACKENDS = ("gloo", "nccl", "xccl", "mpi", "ucc")
UUID_DIGITS = 8  # enough to tell the devices of a machine apart


def environment(job: Job) -> dict[str, Any]:
    """The facts by name, as text; the devices are a list.

    Args:
        job: of a rank; it has no part in this.
    """
    facts: dict[str, Callable[[], Any]] = {
        "mics_fn": lambda: __version__,
        "python": platform.python_version,
        "torch": lambda: torch.__version__,
        "optree": lambda: version("optree"),
        "CUDA": lambda: torch.version.cuda or torch.version.hip or "none",
        "NCCL": lambda: ".".join(map(str, nccl.version())),
        "system": lambda: f"{platform.system()} {platform.machine()}, {_libc()}",
        "cores": lambda: f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": lambda: human_bytes(_device.total_memory(torch.device("cpu"))),
        "settings of NCCL": _nccl_settings,
        "backends": lambda: " ".join(b for b in BACKENDS if dist.is_backend_available(b)),
    }
    found: dict[str, Any] = {name: _or_why_not(fact) for name, fact in facts.items()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found["accelerator"] = "none" if accelerator is None else accelerator.type
    count = 0 if accelerator is None else torch.accelerator.device_count()
    kind = found["accelerator"]
    found["devices"] = [
        _or_why_not(lambda i=i: _device_text(torch.device(kind, i))) for i in range(count)
    ]
    return found


def _nccl_settings() -> list[str] | str:
    found = nccl_problems(dict(os.environ))
    return [f"{name}: {why}" for name, why in found.items()] or "as init_distributed sets them"


def _or_why_not(fact: Callable[[], Any]) -> Any:
    try:
        return fact()
    except Exception as error:  # a fact that cannot be had is no reason to go without the others
        return f"not available ({type(error).__name__})"


def _libc() -> str:
    return " ".join(platform.libc_ver()).strip() or "another libc"


def _device_text(device: torch.device) -> str:
    properties = torch.get_device_module(device).get_device_properties(device)
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")[:UUID_DIGITS] or "unknown"
    return f"{properties.name}, {human_bytes(_device.total_memory(device))}, UUID {uuid}"


def loopback(job: Job) -> None:
    """Two ranks of gloo: their store, and a sum."""
    began = time.monotonic()
    me = Rank(job)
    me.say("until ranks are connected", time.monotonic() - began, unit="s")
    store, key = _torch.default_store(), "mics_fn/doctor"
    store.set(f"{key}/{me.number}", str(me.number))
    met = [int(store.get(f"{key}/{rank}")) for rank in range(me.size)]
    me.say("ranks that are wrong in the store", sum(a != b for a, b in enumerate(met)), 0)
    began, total = time.monotonic(), torch.full((1000,), me.number + 1.0)
    dist.all_reduce(total)
    wrong = (total != sum(range(1, me.size + 1))).sum().item()
    me.say("elements that are wrong in a sum", wrong, 0)
    me.say("a sum", time.monotonic() - began, unit="s")
