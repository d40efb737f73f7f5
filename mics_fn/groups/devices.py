"""Which accelerator a rank uses, and whether another rank uses the same one."""

import os
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mics_fn import _device, checks
from mics_fn.errors import GroupsError, PlanError, by_value, message, name_ranks


class Machine:
    """The accelerators that this process sees."""

    def kind(self) -> str:
        """Their type, such as "cuda"; "cpu" if there are none with a backend of their own."""
        found = torch.accelerator.current_accelerator(check_available=True)
        kind = "cpu" if found is None else found.type
        return (
            kind if dist.Backend.default_device_backend_map.get(kind, "gloo") != "gloo" else "cpu"
        )

    def count(self) -> int:
        """How many of them this process sees."""
        return torch.accelerator.device_count()

    def with_index(self, device: torch.device) -> torch.device:
        """The device with the number of the current one, if it has none."""
        return _device.with_index(device)

    def use(self, device: torch.device) -> None:
        """Make one of them the current one."""
        torch.accelerator.set_device_index(device)

    def uuid(self, device: torch.device) -> str:
        """What tells one of them from all others, if torch knows it."""
        properties = torch.get_device_module(device).get_device_properties(device)
        return str(getattr(properties, "uuid", ""))


machine = Machine()  # all that this wing asks about hardware; tests put another one here


def device_of(device: Any) -> tuple[torch.device, str]:
    """The device that an argument means, and why this process cannot use it."""
    if not isinstance(device, str | torch.device):
        text = f"{checks.given('device', device)}, expected the name of a device"
        return torch.device("cpu"), text
    try:
        wanted = torch.device(device)
    except RuntimeError:
        return torch.device("cpu"), f"device={device!r}, which torch does not know"
    if wanted.type == "meta":
        return torch.device("cpu"), f"device={str(device)!r}, which holds no data"
    count = machine.count() if machine.kind() == wanted.type else 0
    if not _device.is_async(wanted) or (wanted.index or 0) < count:
        return wanted, ""
    return wanted, f"{wanted} is asked for, and this process sees {count} devices of its kind"


def backends_of(config: str) -> dict[str, str]:
    """The backend of each type of device, from "cpu:gloo,cuda:nccl" or from "nccl" alone."""
    if ":" not in config:
        return dict.fromkeys(dist.Backend.backend_capability.get(config, ()), config)
    return dict(part.split(":", 1) for part in config.split(","))


def check_served(backend: str | None, device: torch.device) -> None:
    """Raise PlanError if torch knows which devices a backend serves, and this is none of them."""
    found = backends_of("" if backend is None else backend.lower())
    if found and device.type not in found:
        what = f"make_groups: backend={backend!r} serves {', '.join(found)}, not {device.type}"
        raise PlanError(message(what, fix="pass the backend of the device, or leave it out"))


class Spot(NamedTuple):
    """The device of a rank, as the other ranks hear of it."""

    device: str  # such as "cuda:0"
    host: str
    unit: str  # equal on ranks that share an accelerator; empty if that does no harm


def spot_of(device: torch.device, *, alone: bool) -> Spot:
    """Where this rank computes.

    Args:
      device: its device.
      alone: whether the other ranks must use other devices, as every backend but gloo requires.
    """
    host, unit = socket.gethostname(), ""
    if _device.is_async(device) and alone:
        # A number alone says nothing where each process sees other devices.
        masks = sorted(x for x in os.environ.items() if x[0].endswith(("VISIBLE_DEVICES", "_MASK")))
        unit = machine.uuid(device) or f"{device} of {host}, {masks}"
        # NCCL accepts ranks that share a GPU if this tells them apart, as people do in tests.
        unit = " ".join((unit, os.environ.get("NCCL_HOSTID", ""))).strip()
    return Spot(str(device), host, unit)


def check_distinct(verb: str, spots: Mapping[int, Spot]) -> None:
    """Raise GroupsError if several ranks share an accelerator; NCCL would fail later, or hang."""
    users = by_value({rank: spot.unit for rank, spot in spots.items() if spot.unit})
    lines = [
        f"{name_ranks(ranks)} on {spots[ranks[0]].host}: {spots[ranks[0]].device}, {unit}"
        for unit, ranks in users
        if len(ranks) > 1
    ]
    if lines:
        fix = "start one rank per device, show each rank one of its own (srun --gpus-per-task=1), "
        fix += "or pass device='cpu'; to share one in a test, set another NCCL_HOSTID on each rank"
        what = f"{verb}: several ranks use one device"
        raise GroupsError(message(what, [*lines[:8], *(["..."] if len(lines) > 8 else [])], fix))
