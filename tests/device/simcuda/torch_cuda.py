"""`torch.cuda` on a torch without CUDA: generic streams and events, on the simulated device.

Importing this loads the library before torch, so that torch finds a device of type CUDA. After
that come the parts of `torch.cuda` that are written in Python around a real CUDA.
"""

import ctypes
import os
import re
import sys
import threading
from collections import namedtuple

from simcuda.build import library

assert "torch" not in sys.modules, "the simulated device must be loaded before torch"
lib = ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)
lib.sim_text.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
lib.sim_text.restype = ctypes.c_size_t
lib.sim_op.argtypes = [
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.c_int,
    ctypes.c_int,
]
lib.sim_costs.argtypes = [ctypes.c_double] * 3
lib.sim_busy.argtypes = [ctypes.c_int64, ctypes.c_double]
lib.sim_time.argtypes, lib.sim_time.restype = [ctypes.c_int64, ctypes.c_int], ctypes.c_double

import torch  # noqa: E402

MEMORY = 80 * 2**30
Properties = namedtuple("Properties", "name total_memory major minor")


def index_of(device=None) -> int:
    """The index of a device, given as torch.cuda takes it."""
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return torch._C._accelerator_getDeviceIndex() if found is None else found


class Stream(torch.Stream):
    """What `torch.cuda.Stream` makes."""

    def __new__(cls, device=None, priority=0, **_):
        return torch.Stream(device=torch.device("cuda", index_of(device)), priority=priority)


class Event(torch.Event):
    """What `torch.cuda.Event` makes."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, **_):
        return torch.Event("cuda", enable_timing=enable_timing)


class Device:
    """`with torch.cuda.device(...)`."""

    def __init__(self, device):
        self.index = index_of(device)

    def __enter__(self):
        self.before = torch._C._accelerator_exchangeDevice(self.index)

    def __exit__(self, *_):
        torch._C._accelerator_exchangeDevice(self.before)


generators = tuple(torch.Generator(device=f"cuda:{index}") for index in range(8))


def manual_seed_all(seed):
    for generator in generators:
        generator.manual_seed(seed)


REPLACED = {
    "_lazy_init": lambda: None,
    "_lazy_call": lambda fn, **_: None,
    "_is_in_bad_fork": lambda: False,
    "is_available": lambda: True,
    "is_initialized": lambda: False,  # so that ranks may be forked
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 8,
    "current_device": index_of,
    "set_device": lambda device: torch._C._accelerator_setDeviceIndex(index_of(device)),
    "current_stream": lambda device=None: torch._C._accelerator_getStream(index_of(device)),
    "stream": lambda stream: stream,  # a generic stream is a context itself
    "Stream": Stream,
    "Event": Event,
    "device": Device,
    "synchronize": lambda device=None: torch._C._accelerator_synchronizeDevice(index_of(device)),
    "get_device_properties": lambda device=None: Properties("simulated", MEMORY, 9, 0),
    "mem_get_info": lambda device=None: (MEMORY, MEMORY),
    "default_generators": generators,
    "manual_seed": lambda seed: generators[index_of()].manual_seed(seed) and None,
    "manual_seed_all": manual_seed_all,
}
for name, replacement in REPLACED.items():
    assert hasattr(torch.cuda, name), f"torch.cuda.{name} is gone: look for what replaced it"
    setattr(torch.cuda, name, replacement)


# What the checker found.

misuse: list[str] = []  # what the stand-in for NCCL found
_sites: list[str] = []
_site_ids: dict[str, int] = {}
_SHOWN = ("/mics_fn/", "/torch/distributed/fsdp/", "/tests/device/")
_HIDDEN = "/tests/device/simcuda/"


def _site() -> int:
    """A number for the lines of Python that issue an op."""
    frame, lines = sys._getframe(0).f_back, []
    while frame is not None and len(lines) < 8:
        name = frame.f_code.co_filename
        if _HIDDEN not in name and any(part in name for part in _SHOWN):
            lines.append(f"{os.path.basename(name)}:{frame.f_lineno}")
        frame = frame.f_back
    text = " < ".join(lines) or "autograd engine"
    if text not in _site_ids:
        _site_ids[text] = len(_sites)
        _sites.append(text)
    return _site_ids[text]


_callback = ctypes.CFUNCTYPE(ctypes.c_int)(_site)
lib.sim_trace(_callback)


def _text(which: int) -> str:
    room = lib.sim_text(which, None, 0) + 1
    buffer = ctypes.create_string_buffer(room)
    lib.sim_text(which, buffer, room)
    return buffer.value.decode()


def _counts(which: int) -> dict[str, int]:
    return {why: int(n) for n, why in (line.split("\t") for line in _text(which).splitlines())}


def races() -> list[str]:
    """Each kind of race and misuse once, with the lines of Python that issued the two ops."""

    def line(match: re.Match) -> str:
        return f"[{_sites[int(match[1])]}]" if int(match[1]) >= 0 else ""

    found = [re.sub(r"\[site (-?\d+)\]", line, text) for text in _text(0).splitlines()]
    return list(dict.fromkeys([*misuse, *found]))


def host_waits() -> dict[str, int]:
    """How often the host waited for the device since `reset`, by cause."""
    return _counts(1)


def recorded_streams() -> int:
    """Calls of `record_stream` since `reset`."""
    return sum(_counts(2).values())


def reset() -> None:
    """Forget what was found; what is ordered after what stays."""
    misuse.clear()
    lib.sim_reset()


def answer_queries(how: str, seed: int = 0) -> None:
    """Whether events are over when asked: "never" before a wait, "always", or "sometimes"."""
    lib.sim_answer_queries(("never", "always", "sometimes").index(how), seed)


def costs(per_op_us: float = 0.0, per_byte_us: float = 0.0, per_flop_us: float = 0.0) -> None:
    """What ops take in modelled time."""
    lib.sim_costs(per_op_us, per_byte_us, per_flop_us)


# A device that comes no further, until its collectives are aborted.

PATIENCE_S = 30.0  # of a host that waits for it
_aborted = threading.Event()
_aborted.set()
_at_wait: list = []


def _wait() -> int:
    for call in _at_wait:
        call()
    if not _aborted.wait(PATIENCE_S):
        misuse.append("the host waits for a device that comes no further, and nobody aborts")
        go_on()
    return 0


_waits = ctypes.CFUNCTYPE(ctypes.c_int)(_wait)


def stall(at_wait=lambda: None) -> None:
    """Let the device come no further; a host that waits for it calls `at_wait` first."""
    _aborted.clear()
    _at_wait[:] = [at_wait]
    lib.sim_stall(_waits)


def stalled() -> bool:
    return not _aborted.is_set()


def go_on() -> None:
    """Let all that was issued be over, as after an abort of collectives."""
    lib.sim_stall(None)
    _aborted.set()
