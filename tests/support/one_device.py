"""All gloo groups of a process on one device.

Torch gives each group a device of its own, and each device a thread that wakes a hundred times a
second for as long as the group exists. Ranks that live through the session make many groups, and
those that a test breaks on purpose are never destroyed, since that would wait for what is under
way: with 40 groups, eight idle ranks take a third of a core.
"""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

Gloo: Any = dist.ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

_device: dict[int, Any] = {}  # by process: threads of a device do not survive a fork


class OneDevice(Gloo):
    """A gloo group on the one device of its process."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: Any):
        if os.getpid() not in _device:
            interface = os.environ["GLOO_SOCKET_IFNAME"]
            _device[os.getpid()] = Gloo.create_device(interface=interface)
        options = Gloo._Options()
        options._devices = [_device[os.getpid()]]
        options._threads = 2  # as many as with a device of its own
        options._timeout = timeout
        for name, value in others.items():  # which only some releases of torch give
            setattr(options, name, value)
        super().__init__(store, rank, size, options)


def install() -> None:
    """From now on, also in processes that are forked, torch makes gloo groups in this way."""
    distributed_c10d.ProcessGroupGloo = OneDevice
