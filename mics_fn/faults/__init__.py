"""Faults of ranks: signs of life, who failed and why, groups after that, and ends of jobs.

Nothing of the core imports this wing. `groups` has a few hooks, all of which do nothing by default,
and this page sets them: without it all verbs work, and a rank that is lost is found by `timeout_s`.

While groups are open, a thread watches the other ranks; see [Note: signs of life] in `monitor`. One
that raises, exits, is killed or gives no sign of life is named by a `PeerFailed` on all others; see
[Note: no torn step] in `journal` for when they raise it. A signal before preemption ends all
ranks after the same step: `StopRequest` in `monitor.py`.

After a fault, `reset` gives all ranks new groups. A rank whose process is gone may be started again
for it, on its own or as a spare, with the same environment and the same script, as long as the
store of the job outlives it. So a launcher that starts ranks one by one holds a `TCPStore` at
MASTER_ADDR and MASTER_PORT, and sets TORCHELASTIC_USE_AGENT_STORE=True, as torchrun's agent does
(which itself ends all ranks with the first one). If rank 0 holds the store and is lost, the job is
over, and the error says so. In a process that comes back `init_distributed` and `make_groups` do
not wait for the other ranks. What it compares is taken to be equal, what would move data raises
PeerFailed of kind "returned", and `reset` is where it meets the others, which wait for it there,
`timeout_s` at most; see [Note: rejoining] in `monitor`. torch's default group is made once,
and not again: it is of no use after a rank was lost, and nothing here moves data over it.

Start reading at `heartbeat.py` (the thread that talks to the store, and what is known of other
processes), then `journal.py` (what ranks say of failures, and what a rank does about them),
`monitor.py` (the threads that do all this, the end of a process, and what a rank does afterwards);
`comparing.py` is what ranks compare of states, and how one is mended.
"""

import mics_fn.faults.order  # noqa: F401  (it takes the place of the plain `Channel`)
from mics_fn.faults import comparing
from mics_fn.faults.comparing import NO_STEP, Comparison, compare_states, same_replicas, same_step
from mics_fn.faults.monitor import MONITOR, StopRequest, entering, limit_s, replaced, reset
from mics_fn.groups import hooks

hooks.enter, hooks.join, hooks.limit_s = entering, MONITOR.join, limit_s
hooks.compare, hooks.busy = compare_states, MONITOR.busy
