"""`Where` says where leaves live: places of parameters, states and gradients, with a text."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mics_fn import _torch, checks
from mics_fn.errors import PlanError

HOST_BYTES = 64 * 2**20
LEAST_HOST_BYTES = 2**20

# A place is "device", "host" or "disk:FOLDER" with an absolute path. Each rank has scratch files of
# its own in that folder, so a disk of the node is best.
DEVICE, HOST, DISK = "device", "host", "disk:"
_FIELDS = ("params", "states", "grads")
# A pattern, and its fields or a place.
_OVERRIDE = re.compile(r"(?!disk:)([^=]*?):\s*((?:\w+\s*=|device|host|disk:).*)", re.DOTALL)


@dataclass(frozen=True)
class Where:
    """Where leaves live. `str` gives its text, which `parse` reads.

    Args:
      rules: each a pattern, a field ("params", "states" or "grads") and the place that this has for
        leaves whose whole path matches; the last one counts. The pattern "" is that of all leaves.
      host_bytes: host memory through which data of files travel, on each rank; at least 1 MiB.

    Example:
      >>> where = Where.parse("states=disk:/nvme/run1, params=host; *norm*: states=device")
      >>> where.rules[-1], where.at("w", "states", torch.device("cuda"))
      (('*norm*', 'states', 'device'), 'disk:/nvme/run1')
    """

    rules: tuple[tuple[str, str, str], ...] = ()
    host_bytes: int = HOST_BYTES

    def __post_init__(self) -> None:
        checks.integer("Where", "host_bytes", self.host_bytes, LEAST_HOST_BYTES)

    @classmethod
    def parse(cls, value: "Where | str | None") -> "Where":
        """Read the text form; `parse(str(where))` equals `where`. None is the device for all.

        A text is `field=place, ...`, followed by `; pattern: field=place, ...` for each override. A
        place without a field means `states`. `host_bytes=` may stand among the first fields.

        Raises:
          PlanError: a clause does not give a place for a field, or gives two for the same one.
        """
        if isinstance(value, Where):
            return value
        rules, sizes = list[tuple[str, str, str]](), dict[str, int]()
        for number, clause in enumerate(filter(None, map(str.strip, (value or "").split(";")))):
            found = _OVERRIDE.fullmatch(clause)
            if number and not found:
                fix = "write overrides as in '*norm*: states=device', after the rest"
                raise PlanError(f"where: no pattern in {clause!r}", fix=fix)
            pattern, fields = found.groups() if found else ("", clause)
            for name, text in _fields_in(clause, fields):
                if name == "host_bytes":
                    sizes[name] = checks.nbytes("where", name, text)
                else:
                    rules.append((pattern.strip(), name, _place(text)))
        return cls(tuple(rules), **sizes)

    def __str__(self) -> str:
        own = [] if self.host_bytes == HOST_BYTES else [f"host_bytes={self.host_bytes}"]
        clauses = {"": own}
        for pattern, field, place in self.rules:
            clauses.setdefault(pattern, []).append(f"{field}={place}")
        texts = {pattern: ", ".join(parts) for pattern, parts in clauses.items() if parts}
        return "; ".join(f"{p}: {text}" if p else text for p, text in texts.items())

    def at(self, path: str, field: str, device: torch.device) -> str:
        """Find the place of one leaf on a device; on the CPU the host is the device."""
        found = DEVICE
        for pattern, name, place in self.rules:
            if name == field and (not pattern or checks.matches(pattern, path)):
                found = place
        return DEVICE if found == HOST and not _torch.is_async(device) else found

    @property
    def patterns(self) -> list[str]:
        """The patterns of its overrides."""
        return [pattern for pattern, _, _ in self.rules if pattern]

    @cached_property
    def moved(self) -> set[str]:
        """The fields in which a leaf may lie elsewhere than on the device."""
        return {field for _, field, place in self.rules if place != DEVICE}


def where(value: "Where | str | None" = "", *, host_bytes: int | str | None = None) -> Where:
    """Where parameters, states and gradients live, as a value.

    Args:
      value: a `Where`, or its text: `field=place, ...` with the fields `params`, `states` and
        `grads` and the places `device`, `host` and `disk:FOLDER`, followed by `; pattern:
        field=place` for leaves whose path matches. "" leaves everything on the device.
      host_bytes: host memory on each rank through which data of files travel, in bytes or a text
        such as "1GiB"; None keeps that of `value`, by default 64 MiB.

    Returns:
      A `Where`.

    Raises:
      PlanError: the text has no such form, or a place does not exist.

    Example:
      >>> str(where("states=disk:/nvme/run1,params=host", host_bytes="128MiB"))
      'host_bytes=134217728, states=disk:/nvme/run1, params=host'
    """
    found = Where.parse(value)
    if host_bytes is None:
        return found
    nbytes = checks.nbytes("where", "host_bytes", host_bytes, LEAST_HOST_BYTES)
    return replace(found, host_bytes=nbytes)


def _fields_in(clause: str, fields: str) -> Iterator[tuple[str, str]]:
    """The fields that a clause of a text sets, each with its text."""
    seen = set[str]()
    for part in filter(None, map(str.strip, fields.split(","))):
        name, equals, value = map(str.strip, part.partition("="))
        name, value = (name, value) if equals else ("states", part)
        if name in seen or name not in (*_FIELDS, "host_bytes"):
            text = f"where: {part!r} in {clause!r} gives no place for another field"
            raise PlanError(text, [f"fields are {', '.join(_FIELDS)}, host_bytes"])
        seen.add(name)
        yield name, value


def _place(text: str) -> str:
    """Read a place."""
    kind, colon, folder = map(str.strip, text.partition(":"))
    if kind == "disk" and folder:
        return f"{DISK}{os.path.abspath(folder)}"
    if colon or kind not in (DEVICE, HOST):
        fix = "write device, host, or disk:/nvme/run1"
        raise PlanError(f"where: {text!r} is no place", fix=fix)
    return kind
