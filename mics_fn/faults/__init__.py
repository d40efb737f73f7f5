"""What finds and names faults of ranks, beside the verbs, which work without it.

`order.py` compares the order of calls between ranks before data moves, and carries what ranks
report of errors. Once imported, it takes the place of the plain `Channel` of `schedules`.
"""

import mics_fn.faults.order  # noqa: F401  (it registers)

__all__: list[str] = []
