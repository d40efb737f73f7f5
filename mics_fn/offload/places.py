"""`Where`: the places of parameters, states and gradients, as a value with a text."""

import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from mics_fn import _device, checks
from mics_fn.errors import PlanError
from mics_fn.offload.scratch import HOST_BYTES, LEAST_HOST_BYTES

KINDS = ("device", "host", "disk")
_FIELDS = ("params", "states", "grads")
_OVERRIDE = re.compile(r"([^=]*):\s*(\w+\s*=.*)", re.DOTALL)  # a pattern and its fields
_SHORT = re.compile(r"([^=]*?):\s*(device|host|disk:[^=]*)", re.DOTALL)  # a pattern and a place


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: on the device that computes, in host memory, or in a file.

    Args:
      kind: "device", "host" (locked memory, where a device can copy from it by itself) or "disk".
      folder: of the scratch files, for "disk"; "" otherwise. Each rank has files of its own there,
        so a disk of the node is best. A relative one is made absolute here.

    Raises:
      PlanError: there is no such place, or the folder is missing or not wanted.

    Example:
      >>> Place.parse("disk:/nvme/run1")
      Place(kind='disk', folder='/nvme/run1')
    """

    kind: Literal["device", "host", "disk"]
    folder: str = ""

    def __post_init__(self) -> None:
        checks.choice("Place", "kind", self.kind, *KINDS)
        if bool(self.folder) != (self.kind == "disk"):
            expected = "a folder" if self.kind == "disk" else f"none for {self.kind!r}"
            checks.refuse("Place", "folder", self.folder, expected, "write it as disk:/nvme/run1")
        there = os.path.abspath(self.folder) if self.folder else ""
        object.__setattr__(self, "folder", there)

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Read "device", "host" or "disk:FOLDER".

        Raises:
          PlanError: it is none of these.
        """
        kind, _, folder = text.strip().partition(":")
        return cls(kind, folder.strip())  # pyright: ignore[reportArgumentType]

    def seen_from(self, device: torch.device) -> "Place":
        """The same place for tensors of a device; on the CPU the host is the device."""
        here = self.kind == "host" and not _device.is_async(device)
        return DEVICE if here else self

    def __str__(self) -> str:
        return f"{self.kind}:{self.folder}" if self.folder else self.kind


DEVICE = Place("device")


class Places(NamedTuple):
    """The places of one leaf.

    Args:
      params: of its shard.
      states: of the optimizer's states and masters.
      grads: of the sum of its gradients over micro-steps.

    Example:
      >>> where("states=host").at("w").states
      Place(kind='host', folder='')
    """

    params: Place
    states: Place
    grads: Place


@dataclass(frozen=True)
class Where:
    """Where leaves live. `str` gives a canonical text, which `parse` reads.

    Args:
      params: place of the shards that are gathered from; None means the device.
      states: place of the optimizer's states and masters; None means the device.
      grads: place of the sum of gradients over micro-steps; None means the device.
      overrides: pairs of a pattern and a `Where`. The places that this one sets replace those above
        for leaves whose whole path matches, as in `Precision`; the last one counts.
      host_bytes: host memory through which data of files travel, on each rank; at least 1 MiB.

    Raises:
      PlanError: a place is not a `Place`.

    Example:
      >>> where = Where.parse("states=disk:/nvme/run1, params=host; *norm*: states=device")
      >>> str(where.at("h.0.norm.weight").states), str(where.at("w").states)
      ('device', 'disk:/nvme/run1')
    """

    params: Place | None = None
    states: Place | None = None
    grads: Place | None = None
    overrides: tuple[tuple[str, "Where"], ...] = ()  # any iterable of pairs is taken
    host_bytes: int = HOST_BYTES

    def __post_init__(self) -> None:
        for name, place in self._fields():
            checks.instance("Where", name, place, Place, "a Place", "pass Place('host')")
        object.__setattr__(
            self,
            "overrides",
            tuple(checks.checked_override(x, Where, marks=";=") for x in self.overrides),
        )
        checks.integer("Where", "host_bytes", self.host_bytes, LEAST_HOST_BYTES)

    @classmethod
    def parse(cls, text: str) -> "Where":
        """Read the text form; `parse(str(where))` equals `where`.

        A text is `field=place, ...`, followed by `; pattern: field=place, ...` for each override. A
        place without a field means `states`. `host_bytes=` may stand among the first fields.

        Raises:
          PlanError: a clause does not give a place for a field, or gives two for the same one.
        """
        base: dict[str, Any] | None = None
        overrides = []
        for clause in filter(None, map(str.strip, text.split(";"))):
            found = _OVERRIDE.fullmatch(clause) or _SHORT.fullmatch(clause)
            if found and not (found.re is _SHORT and found[1].strip() in KINDS):
                overrides.append((found[1].strip(), cls(**_read(clause, found[2]))))
            elif base is None and not overrides:
                base = _read(clause, clause)
            else:
                fix = "write overrides as in '*norm*: states=device', after the rest"
                raise PlanError(f"where: no pattern in {clause!r}", fix=fix)
        return cls(**(base or {}), overrides=tuple(overrides))

    def __str__(self) -> str:
        own = [f"{name}={place}" for name, place in self._fields()]
        if self.host_bytes != HOST_BYTES:
            own.append(f"host_bytes={self.host_bytes}")
        parts = [", ".join(own)] if own else []
        return "; ".join([*parts, *(f"{p}: {where}" for p, where in self.overrides)])

    def _fields(self) -> list[tuple[str, Place]]:
        return [(name, getattr(self, name)) for name in _FIELDS if getattr(self, name) is not None]

    def at(self, path: str) -> Places:
        """The places of one leaf."""
        found = dict(self._fields())
        for pattern, where in self.overrides:
            if checks.matches(pattern, path):
                found.update(where._fields())
        return Places(*(found.get(name, DEVICE) for name in _FIELDS))

    @property
    def patterns(self) -> list[str]:
        """The patterns of its overrides."""
        return [pattern for pattern, _ in self.overrides]

    @cached_property
    def moved(self) -> set[str]:
        """The fields in which a leaf may lie elsewhere than on the device."""
        every = [self, *(where for _, where in self.overrides)]
        return {name for each in every for name, place in each._fields() if place != DEVICE}


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
      'params=host, states=disk:/nvme/run1, host_bytes=134217728'
    """
    found = where_of(value)
    if host_bytes is None:
        return found
    nbytes = checks.nbytes("where", "host_bytes", host_bytes, LEAST_HOST_BYTES)
    return Where(found.params, found.states, found.grads, found.overrides, nbytes)


def where_of(value: Where | str | None) -> Where:
    """The `Where` that an argument means: one, its text, or None for the device."""
    if not value:
        return ON_DEVICE
    return Where.parse(value) if isinstance(value, str) else value


def _read(clause: str, fields: str) -> dict[str, Any]:
    """The fields that a clause of a text sets, with their places."""
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, fields.split(","))):
        name, equals, value = map(str.strip, part.partition("="))
        name, value = (name, value) if equals else ("states", part)
        if name in found or name not in (*_FIELDS, "host_bytes"):
            text = f"where: {part!r} in {clause!r} gives no place for another field"
            raise PlanError(text, [f"fields are {', '.join(_FIELDS)}, host_bytes"])
        found[name] = (
            checks.nbytes("where", "host_bytes", value)
            if name == "host_bytes"
            else Place.parse(value)
        )
    return found


ON_DEVICE = Where()
