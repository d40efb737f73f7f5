"""Points that a program passes, where observers may look or act; there are none by default.

[Note: points] The library says where it is: `start` and `build` of groups, of shards and of a
`Trainer`; `step` where `Trainer.step` begins; each collective as it is started, in the words of
`schedules.call_text` and with the names of its communicators; each of its levels as it is issued,
such as "all-reduce (...) over 'replicas'"; `opt_step`; `commit`, from which on the memory of a
state is written, once its gradients have come and are accepted; "offload: write" and "offload:
read", with the names of leaves, where data of a scratch file are about to be moved; "save" where a
checkpoint begins, "save: write" before each rank's file, "save: commit" on the rank that commits
it, and "load". `testing.inject` makes faults there. While nobody observes, a point costs one look
at an empty list.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Point(NamedTuple):
    """One point, as it is passed.

    Args:
      name: what happens there.
      step: the step that begins or is written, as `StepMetrics` counts; None elsewhere.
      tensors: what is sent or written.
      comms: the communicators of a collective.
    """

    name: str
    step: int | None = None
    tensors: Sequence[Any] = ()
    comms: Sequence[Any] = ()


observers: list[Callable[[Point], None]] = []  # called at each point, in this order


def passing(
    name: str, step: int | None = None, tensors: Sequence[Any] = (), comms: Sequence[Any] = ()
) -> None:
    """Show a point to all observers, which may raise."""
    for observe in list(observers):
        observe(Point(name, step, tensors, comms))


def calling(text: str, tensors: Sequence[Any], comms: Sequence[Any]) -> None:
    """Show the start of a collective.

    >>> observers.append(lambda point: print(point.name))
    >>> calling("gather: gather of bucket 0 (w), 8 bytes", (), ())
    gather: gather of bucket 0 (w), 8 bytes
    >>> del observers[:]
    """
    over = ", ".join(f"'{comm.name}'" for comm in comms)
    passing(f"{text} over {over}" if over else text, None, tensors, comms)
