"""What only some devices can do. Where one cannot, a check says so instead of failing."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import mics_fn as mf
from mics_fn import _torch

CYCLES = 2_000_000  # about a millisecond of a GPU
HOST_DELAY_S = 1e-3
# What is late, and which share of it.
LATE = {
    "compute": {"compute": 0.02},
    "gathers": {"gather": 0.5},
    "reductions": {"reduce": 0.5},
    "all of them": {"compute": 0.01, "gather": 0.2, "reduce": 0.2},
}


class Seam:
    """The abilities of one device.

    Args:
        device: where the ranks compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        module = torch.get_device_module(device)
        self._forbid: Callable[[str], Any] | None = getattr(module, "set_sync_debug_mode", None)
        self._sleep = _torch.stream_delay(device)
        if not _works(self._forbid, "default"):
            self._forbid = None
        if not _works(self._sleep, 1):
            self._sleep = None

    @property
    def finds_waits(self) -> bool:
        """Whether `without_waits` can find something."""
        return self._forbid is not None

    @property
    def delays_streams(self) -> bool:
        """Whether `delay` makes a stream late; otherwise it makes the host late."""
        return self._sleep is not None

    @contextlib.contextmanager
    def without_waits(self) -> Iterator[None]:
        """A block in which an op raises RuntimeError if the host waits for the device in it.

        Not for an event, such as that of the totals of the step before, which is long over.
        """
        if self._forbid is None:
            yield
            return
        self._forbid("error")
        try:
            yield
        finally:
            self._forbid("default")

    def delay(self) -> None:
        """Make what is queued next on the current stream late, by about a millisecond."""
        if self._sleep is None:
            time.sleep(HOST_DELAY_S)
        else:
            self._sleep(CYCLES)


def _works(call: Callable[[Any], Any] | None, argument: Any) -> bool:
    """Whether there is such a function, and this build of torch has what it calls."""
    if call is None:
        return False
    try:
        call(argument)
    except (AttributeError, RuntimeError):
        return False
    return True


class Delays(_torch.DispatchMode):
    """Makes what is queued late while it is active, in backward too.

    It sees each op before torch queues it, and each collective when the ledger of its groups does,
    on the stream on which it will be. So gathers and reductions are late on their own streams, and
    compute on its own. What is late is drawn from a seed, which should differ between ranks.

    Args:
        seam: of the device.
        groups: whose collectives are made late.
        kind: what is late, a key of `LATE`.
        seed: of the draws.
    """

    def __init__(self, seam: Seam, groups: mf.Groups, kind: str, seed: int) -> None:
        super().__init__()
        self.count = 0
        self._seam, self._traffic, self._late = seam, groups.traffic, LATE[kind]
        self._random = random.Random(f"{kind} {seed}")

    def __enter__(self) -> "Delays":
        count = self._traffic.add

        def add(what: str, nbytes: int) -> None:
            count(what, nbytes)
            self._draw("gather" if what.startswith("gather") else "reduce")

        vars(self._traffic)["add"] = add
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        del vars(self._traffic)["add"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _torch.PLAIN for kind in types):
            return NotImplemented
        if func.namespace != "c10d":
            self._draw("compute")
        return func(*args, **(kwargs or {}))

    def _draw(self, kind: str) -> None:
        if self._random.random() < self._late.get(kind, 0.0):
            self.count += 1
            self._seam.delay()
