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
    law: str  # that it breaks
    changes: tuple[Change, ...]


def _of(scenario: str, *changes: Change, law: str = "ordered") -> Mistake:
    return Mistake(scenario, law, changes)


_PENDING, _SUM, _COLUMNS = "collectives/pending.py", "deferred/reduction.py", "optim/columns.py"
_POOL, _RING, _LIVE = "groups/groups.py", "deferred/memory.py", "deferred/live.py"
_LET_GO = Change(
    _PENDING, 'if getattr(self, "_keep", None) and self.ready is not None:', "if False:"
)
_SCATTER = "yield from collectives.levels.scatter_steps(hops.now, full, out, spare, bucket.hop1)"
_RECORD = "self.ready = state.ready = _torch.record(self._device)"
_WAIT = "_torch.wait(self._device, self.ready)\n        self._keep"


def _unordered(comm: str) -> Change:
    """Queue on the stream of a communicator without a wait for the current one."""
    stream = f"{comm}.stream(self._device)"
    follow, switch = f"follow({stream}, self._device)", f"torch.accelerator.set_stream({stream})"
    return Change(_PENDING, f"_torch.{follow}", switch)


MISTAKES: dict[str, Mistake] = {
    "a collective does not wait for its inputs": _of(
        "budget 2 buckets", _unordered("self._comms[0]")
    ),
    "a result is not waited for": _of("torch.func", Change(_PENDING, _WAIT, "self._keep")),
    "tensors in flight are not kept": _of(
        "never waited for",
        Change(_PENDING, "comms, list[Any](keep)", "comms, list[Any]()"),
        Change(_PENDING, "self._keep.append(collective)", "pass"),
    ),
    "what is let go is not waited for": _of("never waited for", _LET_GO),
    "a stream reads a bucket without a wait": _of(
        "two compute streams, budget", Change(_LIVE, "stream.wait_event(self._ready)", "pass")
    ),
    "a drop does not wait for other streams": _of(
        "two compute streams, budget",
        Change(_LIVE, "_torch.current_stream(each.full.device).wait_stream(stream)", "pass"),
    ),
    "a buffer is taken without a wait": _of(
        "never waited for", Change(_POOL, "_torch.wait(free.raw.device, free.event)", "pass")
    ),
    "a lease is taken without a wait": _of(
        "two replicas, budget",
        Change(
            _RING,
            "in self._lent\n        ):\n            self._lent.popleft().until()",
            "in self._lent\n        ):\n            self._lent.popleft()",
        ),
    ),
    "a lease is free before hop 1 is over": _of(
        "two replicas, budget",
        Change(_SUM, "if not hops.copies and placed is None:", "if False:"),
        Change(_SUM, _SCATTER, f"free_lease(lease)\n        {_SCATTER}"),
    ),
    "a lease is free before hop 2 of codes": _of(
        "codes, two replicas",
        Change(_SUM, "if not hops.copies and placed is None:", "if True:"),
        Change(_SUM, "if hops.copies or placed is not None:", "if False:"),
    ),
    "gradients are not waited for": _of(
        "two replicas, budget",
        Change("deferred/deferring.py", "self._check()\n        self.wait()", "self._check()"),
    ),
    "a reduction writes what it reads": _of(
        "two levels, budget", Change(_SUM, "[levels % 2 if", "[1 - levels % 2 if")
    ),
    "the host waits for a result": _of(
        "torch.func",
        Change(_PENDING, _WAIT, "self.ready.synchronize()\n        self._keep"),
        law="no_host_waits",
    ),
    "numbers of leaves are copied to the device": _of(
        "parts, clipped",
        Change(
            "optim/norms.py",
            "torch.cat([every[:0], *(each[i] for i in index)])",
            "every[index]",
        ),
        law="no_host_waits",
    ),
    "states go back to the host before they are updated": _of(
        "states on the host",
        Change(_COLUMNS, "_torch.follow(down, device)", "torch.accelerator.set_stream(down)"),
    ),
    "a file is written before states have come back": _of(
        "states in files",
        Change(_COLUMNS, "if not ahead:\n                down.synchronize()", "if not ahead:"),
        law="no_host_waits",
    ),
    "float16 values are not halved before they are added": _of(
        "float16 on the wire",
        Change("collectives/levels.py", " parts.mul_(before)", " pass"),
        law="equal_numbers",
    ),
    "memory is recorded on the stream of a collective": _of(
        "never waited for",
        Change(
            _PENDING,
            _RECORD,
            "kept = [t for t in self._keep if isinstance(t, Tensor)]\n"
            "            [t.record_stream(_torch.current_stream(t.device)) for t in kept]\n"
            f"            {_RECORD}",
        ),
        law="kept_by_references",
    ),
    "an update does not wait for gathers of what it writes": _of(
        "an update before the run has ended",
        Change(_PENDING, "if _memory_of(pending.reads) in storages:", "if False:"),
    ),
}


class Torn(NamedTuple):
    """A change of the source, and the call of `stalled` or `programs` that finds what it breaks."""

    program: str
    ranks: int
    args: tuple
    changes: tuple[Change, ...]


def _torn(name: str, *changes: Change, late: tuple[int, ...] = ()) -> Torn:
    ranks = 4 if late else 2
    return Torn("torn", ranks, (name, late, 1 if late else 2, 15), changes)


_ABORT = "self._lose_queued(patience_s)\n        mesh_groups, self.mesh_groups"
_ENDED = "ended([abort_group(x) for x in self.live()], 5.0)\n        "
_ABORTED = "if any_aborted() if home is None else home.partition.state.aborted:"
_EARLY = "self.flag = _torch.abort_flag(device).clone() if"
_FIRST = """state = trainer.state  # first: whether its last step was taken decides the others
    member, sync, lost = trainer.member, trainer.sync_state, ""
"""
_LAST = """member, sync, lost = trainer.member, trainer.sync_state, ""
    state = trainer.state
"""
TORN: dict[str, Torn] = {
    "what is queued is not judged": _torn(
        "ignored", Change("_torch.py", "_QUEUED.popleft().judge()", "_QUEUED.popleft()")
    ),
    "what is lost is not marked": _torn("by hand", Change("_torch.py", "self._lose()", "pass")),
    "totals of an aborted step are read": _torn(
        "ignored", Change("_torch.py", "self.lost = True", "pass")
    ),
    "it is judged after the abort": _torn(
        "by hand", Change("groups/communicator.py", _ABORT, _ENDED + _ABORT)
    ),
    "the flag is read before the collectives": _torn(
        "masked",
        Change("train/trainer.py", "self.flag = _torch.abort_flag(device) if", _EARLY),
    ),
    "a step on what was aborted before is not lost": _torn(
        "ignored, on the host",
        Change("shards/leaf.py", _ABORTED, "if False:"),
    ),
    "gradients of before an abort are stepped": Torn(
        "stale", 2, (), (Change("optim/state.py", "if torn:", "if False:"),)
    ),
    "gradients that know no groups are stepped": _torn(
        "by hand, kept",
        Change("optim/state.py", "is None and after.pieces:", "is None and home is not None:"),
    ),
    "a lost state is handed on": _torn(
        "ignored",
        Change("train/resuming.py", "if shards.any_lost((state, sync)):", "if False:"),
        Change("faults/comparing.py", "lost = shards.any_lost(", "lost = bool and print("),
        late=(0, 1),
    ),
    "a step that is ready is not written": _torn(
        "recoverable",
        Change("train/resuming.py", "old.state.aborted = False", "pass"),
        late=(1,),
    ),
    "a rank reports the calls of a step that it has not taken": _torn(
        "masked", Change("train/resuming.py", _FIRST, _LAST)
    ),
    "what is lost is saved": Torn(
        "saves",
        2,
        ("by hand", "amid", 15),
        (
            Change(
                "shards/leaf.py",
                'if name == "data" and is_lost(self):\n',
                'if name == "data" and is_lost(self):\n'
                "            return self._donated[0][-1].memory[id(self)]\n",
            ),
        ),
    ),
    "what was received in a heal is not checked": Torn(
        "healed",
        4,
        (8,),
        (Change("faults/comparing.py", "home.partition.check_open()  # else it may be", "#"),),
    ),
    "parameters that leave are not checked": Torn(
        "exported", 2, (), (Change("shards/verbs.py", "use.home.partition.check_done", "repr"),)
    ),
    "a loss that leaves is not checked": Torn(
        "exported",
        2,
        (),
        (Change("train/stepping.py", "    if flag is None:\n", "    if True:\n"),),
    ),
    "a leaf that leaves is not checked": Torn(
        "exported",
        2,
        (),
        (Change("inspection/access.py", "hierarchy.partition.check_done", "repr"),),
    ),
    "a step that is whole is not kept": Torn(
        "judged_late", 2, (), (Change("optim/guard.py", " and found[5:] != [0.0]", ""),)
    ),
    "backward reads a context variable": Torn(
        "reads_of_backward",
        2,
        (("budget 0",),),
        (
            Change(
                "deferred/reduction.py",
                _SCATTER,
                f"__import__('mics_fn.shards.leaf').shards.leaf.note_write()\n        {_SCATTER}",
            ),
        ),
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
