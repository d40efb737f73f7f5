"""Mistakes in the use of the device, as small changes of the source; a law must see each.

A change names its file and what it replaces, which must occur there exactly once, so a table that
the source has outgrown fails by name.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import mics_fn

PACKAGE = Path(mics_fn.__file__).parent


class Change(NamedTuple):
    """Text of a file that is replaced by another."""

    file: str
    old: str
    new: str


class Mistake(NamedTuple):
    """Changes of the source, and the scenario that shows them."""

    scenario: str
    changes: list[Change]
    law: str = "ordered"  # that it breaks


_PENDING, _SUM = "collectives/pending.py", "deferred/reduction.py"
_LET_GO = Change(
    _PENDING, 'if getattr(self, "_keep", None) and self.ready is not None:', "if False:"
)
_DROP = Change(
    "deferred/live.py", "coming.wait()\n            self.buckets", "pass\n            self.buckets"
)
_SCATTER = "yield from scatter_steps(now, full, out, whole(slot.second, reduce), hop1)"

# Hop 2 of codes has two levels, which come after that of hop 1.
_SECOND = Change(
    _PENDING,
    "_device.follow(collective.comm.stream(self._device), self._device)",
    "stream = collective.comm.stream(self._device)\n"
    "            if self.level == 2:\n"
    "                torch.accelerator.set_stream(stream)\n"
    "            else:\n"
    "                _device.follow(stream, self._device)",
)


def _unordered(comm: str) -> Change:
    """Queue on the stream of a communicator without a wait for the current one."""
    stream = f"{comm}.stream(self._device)"
    follow, switch = f"follow({stream}, self._device)", f"torch.accelerator.set_stream({stream})"
    return Change(_PENDING, f"_device.{follow}", switch)


MISTAKES: dict[str, Mistake] = {
    "a collective does not wait for its inputs": Mistake(
        "budget 2 buckets", [_unordered("self._comms[0]")]
    ),
    "a level does not wait for the one before": Mistake(
        "two levels, budget", [_unordered("collective.comm")]
    ),
    "a result is not waited for": Mistake(
        "torch.func",
        [
            Change(
                _PENDING, "_device.wait(self._device, self.ready)\n        self._keep", "self._keep"
            )
        ],
    ),
    "the event of a result is recorded too early": Mistake(
        "budget 2 buckets",
        [
            Change(_PENDING, "self.ready = _device.record(self._device)", "pass"),
            Change(
                _PENDING,
                "while not self.finished:\n                self._advance()",
                "self.ready = _device.record(self._device)\n"
                "            while not self.finished:\n                self._advance()",
            ),
        ],
    ),
    "tensors in flight are not kept": Mistake(
        "never waited for",
        [
            Change(_PENDING, "comms, list[Any](keep)", "comms, list[Any]()"),
            Change(_PENDING, "self._keep.append(collective)", "pass"),
        ],
    ),
    "what is let go is not waited for": Mistake("never waited for", [_LET_GO]),
    "a stream reads a bucket without a wait": Mistake(
        "two compute streams, budget",
        [Change("deferred/tensor.py", "stream.wait_event(self._ready)", "pass")],
    ),
    "a drop does not wait for other streams": Mistake(
        "two compute streams, budget",
        [
            Change(
                "deferred/tensor.py",
                "_device.current_stream(self.full.device).wait_stream(stream)",
                "pass",
            )
        ],
    ),
    "a buffer is taken without a wait": Mistake(
        "never waited for",
        [Change("groups/buffers.py", "_device.wait(raw.device, event)", "pass")],
    ),
    "a slot is taken without a wait": Mistake(
        "two replicas, budget",
        [
            Change(
                "groups/buffers.py",
                "in self._lent):\n            self._lent.popleft().until()",
                "in self._lent):\n            self._lent.popleft()",
            )
        ],
    ),
    "a slot is free before hop 1 is over": Mistake(
        "two replicas, budget",
        [
            Change(_SUM, "free_slot(slot)\n            if last:", "pass\n            if last:"),
            Change(_SUM, _SCATTER, f"free_slot(slot)\n            {_SCATTER}"),
        ],
    ),
    "a slot is free before hop 2 of codes": Mistake(
        "codes, two replicas",
        [
            Change(_SUM, "if not copies:\n                free_slot(slot)", "free_slot(slot)"),
            Change(_SUM, "if copies:\n                free_slot(slot)", "pass"),
        ],
    ),
    "the second gather of hop 2 does not wait for its codes": Mistake(
        "codes, two replicas", [_SECOND]
    ),
    "gradients are not waited for": Mistake(
        "two replicas, budget",
        [
            Change(
                "deferred/grad_sum.py",
                "bound.reduction.wait()\n        bound.passes",
                "bound.passes",
            )
        ],
    ),
    "sums go back to the pool before hop 2": Mistake(
        "two replicas, keep all to the end",
        [
            Change(_SUM, 'self._give_back(pool, taken, "gradient shards")', "pass"),
            Change(
                _SUM,
                "                free_slot(slot)\n            if last:\n",
                "                free_slot(slot)\n            if last:\n"
                "                use.hierarchy.pools.chunks.give(total)\n",
            ),
        ],
    ),
    "a reduction writes what it reads": Mistake(
        "two levels, budget",
        [Change("deferred/reduction.py", "[levels % 2 if", "[1 - levels % 2 if")],
    ),
    "the host waits for a result": Mistake(
        "torch.func",
        [
            Change(
                _PENDING,
                "_device.wait(self._device, self.ready)\n        self._keep",
                "self.ready.synchronize()\n        self._keep",
            )
        ],
        law="no_host_waits",
    ),
    "states go back to the host before they are updated": Mistake(
        "states on the host",
        [
            Change(
                "optim/columns.py",
                "_device.follow(self._down, self._device)",
                "torch.accelerator.set_stream(self._down)",
            )
        ],
    ),
    "states are updated before they have come from the host": Mistake(
        "states on the host",
        [
            Change(
                "optim/columns.py",
                "_device.wait(self._device, event)\n            yield part.run",
                "yield part.run",
            )
        ],
    ),
    "a file is written before states have come back": Mistake(
        "states in files",
        [Change("optim/columns.py", "_device.synchronize(device)", "pass")],
        law="no_host_waits",
    ),
    "float16 values are not halved before they are added": Mistake(
        "float16 on the wire",
        [Change("collectives/levels.py", " parts.mul_(before)", " pass")],
        law="equal_numbers",
    ),
    "memory is recorded on the stream of a collective": Mistake(
        "never waited for",
        [
            Change(
                _PENDING,
                "self.ready = _device.record(self._device)",
                "kept = [t for t in self._keep if isinstance(t, Tensor)]\n"
                "            [t.record_stream(_device.current_stream(t.device)) for t in kept]\n"
                "            self.ready = _device.record(self._device)",
            ),
        ],
        law="kept_by_references",
    ),
    "an update does not wait for gathers of what it writes": Mistake(
        "an update before the run has ended",
        [Change("collectives/pending.py", "if storage in storages:", "if False:")],
    ),
    "a drop does not wait for a fetch that nobody used": Mistake(
        "a use that does not come", [_DROP, _LET_GO]
    ),
}


def copied(folder: Path, *changes: Change) -> Path:
    """A copy of the package with these changes, in `folder`, which is returned."""
    copy = folder / "mics_fn"
    shutil.copytree(PACKAGE, copy)
    for change in changes:
        path = copy / change.file
        text = path.read_text()
        assert text.count(change.old) == 1, f"{change.file} has changed around {change.old!r}"
        path.write_text(text.replace(change.old, change.new))
    return folder
