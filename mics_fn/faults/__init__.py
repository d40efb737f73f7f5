"""Faults of ranks: signs of life, who failed and why, groups after that, and ends of jobs.

Nothing of the core imports this wing. `groups` has a few hooks, all of which do nothing by default,
and this page sets them: without it all verbs work, and a rank that is lost is found by `timeout_s`.

While groups are open, a thread watches the other ranks; see [Note: signs of life] in `monitor`. One
that raises, exits, is killed or gives no sign of life is named by a `PeerFailed` on all others; see
[Note: no torn step] in `journal` for when they raise it. After that `reset` gives all ranks new
groups, and a rank that was lost may come back there; see [Note: coming back] in `rejoin`. A signal
before preemption ends all ranks after the same step: `StopRequest` in `stop.py`.

Start reading at `heartbeat.py` (the thread that talks to the store, and what is known of other
processes), then `journal.py` (what ranks say of failures, and what a rank does about them),
`monitor.py` (the threads that do all this, and the end of a process) and `rejoin.py`.
"""

from mics_fn.faults.monitor import limit_s, watched
from mics_fn.faults.rejoin import entering, replaced, reset
from mics_fn.faults.stop import StopRequest
from mics_fn.groups import hooks

hooks.enter, hooks.join, hooks.limit_s = entering, watched, limit_s
