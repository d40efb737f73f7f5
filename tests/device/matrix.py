"""The scenarios that run on the simulated device, and what a rank sees in one."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mics_fn as mf
from mics_fn import optim

BUCKET_BYTES = 4096  # about two leaves of a block
FILE_RUNS = 17  # buckets of `Net`: the host writes each to its file once it has come back
MODES = ("never", "always", "sometimes")  # whether an event is over when asked


class Seen(NamedTuple):
    """What a rank saw in one run of a program on the device."""

    races: list[str]
    waits: dict[str, int]  # of the host in a steady step, by cause
    recorded_streams: int  # calls of record_stream in that step
    issued: list[tuple[str, str, int]]  # group, op and bytes of each collective of the run
    numbers: dict[str, Any]  # tensors on the CPU


@dataclass(frozen=True)
class Scenario:
    """A program on so many ranks, with options of its own, made anew for each run."""

    program: str
    ranks: int
    partition: int
    node: int
    place: str | None
    options: Callable[[], Mapping[str, Any]]
    host_waits: int | None  # in a steady step; None where the update is one of the host
    parts: int = 1  # of the model


def _of(
    ranks: int = 2,
    partition: int = 2,
    place: str | None = None,
    waits: int | None = 0,
    program: str = "trained",
    guard: Mapping[str, Any] | None = None,
    sync: Callable[[int], Any] | None = None,
    parts: int = 1,
    **options: Any,
) -> Scenario:
    """A scenario in nodes of two ranks; guards, schedules and syncs of replicas have a state."""

    def made() -> Mapping[str, Any]:
        found = dict(options)
        if found.get("schedule") == "keep all":
            found["schedule"] = mf.keep_all()
        if guard is not None:
            scale = {"scale": optim.dynamic_scale(16.0)} if "scale" in guard else {}
            spike = {"spike": optim.norm_spike(3.0, warmup=1)} if "spike" in guard else {}
            found["guard"] = optim.Guard(**{**guard, **scale, **spike})
        return found if sync is None else {**found, "replica_sync": sync(2)}

    node = 3 if ranks == 3 else min(2, ranks)
    return Scenario(program, ranks, partition, node, place, made, waits, parts)


_BF16 = "param=f32, compute=bf16, reduce=f32, output=f32"
_F16 = "param=f32, compute=f16, reduce=f32, output=f32"
_PARAMS_BF16 = "param=bf16, compute=bf16, reduce=f32, output=f32"
_CODES = "gather=int8[64], hop1=int8[64], hop2=int8[64]"
_FAR_CODES = "gather=int8[64]@node, hop1=int8[64]@node"
_TWO = 2 * BUCKET_BYTES
_HOST, _STATES, _GRADS = "params=host", "states=host", "grads=host"
_FILES = f"states=disk:{tempfile.gettempdir()}"
_ADAM = {"live_bytes": _TWO, "optimizer": optim.adamw(1e-2)}
_IGNORE = {"on_nonfinite": "ignore"}
_OVERLAPPED: dict[str, Any] = {"overlap_step": True, "guard": _IGNORE}
_BY_HAND: dict[str, Any] = {"where": _HOST, "waits": None}

SCENARIOS: dict[str, Scenario] = {
    "alone": _of(1, 1, live_bytes=0),
    "three ranks": _of(3, 3, live_bytes=0),
    # Budgets, over one level and over two.
    "budget 0": _of(live_bytes=0),
    "budget 2 buckets": _of(live_bytes=_TWO),
    "keep all": _of(live_bytes=None),
    "two levels, budget": _of(4, 4, live_bytes=_TWO, accumulate=2),
    "two replicas, budget": _of(4, live_bytes=_TWO, accumulate=2),
    "two replicas, keep all": _of(4, live_bytes=None),
    "two replicas, keep all to the end": _of(4, schedule="keep all"),
    # Placements.
    "zero2": _of(place="zero2", live_bytes=_TWO, accumulate=2),
    "ddp": _of(partition=1, live_bytes=None),
    "hpz": _of(4, 4, "hpz", live_bytes=_TWO),
    "hybrid": _of(4, 4, "hybrid", live_bytes=0, accumulate=2),
    # Precision.
    "bf16": _of(live_bytes=_TWO, precision=_BF16, accumulate=2),
    # Codes, on all levels and on the outer one.
    "codes, two replicas": _of(4, live_bytes=_TWO, precision=_CODES, accumulate=2),
    "codes, two levels": _of(4, 4, live_bytes=0, precision=_FAR_CODES),
    # The wait is for the guard: no fused kernel of torch steps by lion.
    "bf16 parameters": _of(
        waits=1, live_bytes=_TWO, precision=_PARAMS_BF16, optimizer=optim.lion(1e-2)
    ),
    "f16 with a loss scale": _of(
        waits=1, live_bytes=_TWO, precision=_F16, guard={"scale": 16.0, "max_norm": 1.0}
    ),
    # Parameters in host memory, brought for each fetch, and updated there.
    "on the host": _of(waits=None, live_bytes=_TWO, where=_HOST),
    "on the host, hpz": _of(4, 4, "hpz", None, live_bytes=_TWO, where=_HOST),
    "on the host, codes": _of(4, waits=None, live_bytes=_TWO, precision=_CODES, where=_HOST),
    "on the host, codes, hpz": _of(4, 4, "hpz", None, live_bytes=0, precision=_CODES, where=_HOST),
    "on the host, torch.func": _of(program="transformed", **_BY_HAND),
    "on the host, deferred": _of(program="transformed_deferred", **_BY_HAND),
    # Places, and steps on gradients that still arrive.
    "states on the host": _of(waits=2, where=_STATES, **_ADAM),
    "states on the host, guarded": _of(
        4, waits=2, where=_STATES, guard={"max_norm": 1.0, "on_nonfinite": "skip"}, **_ADAM
    ),
    "all on the host": _of(4, waits=None, where=f"{_STATES}, {_HOST}", accumulate=2, **_ADAM),
    "states in files": _of(waits=FILE_RUNS + 1, where=_FILES, **_ADAM),
    "states in files, overlapped": _of(
        4, waits=FILE_RUNS, where=_FILES, accumulate=2, **_ADAM, **_OVERLAPPED
    ),
    "gradients on the host": _of(4, waits=1, live_bytes=_TWO, where=_GRADS, accumulate=2),
    "gradients on the host, zero1": _of(
        place="zero1", waits=1, live_bytes=0, where=_GRADS, accumulate=2
    ),
    "gradients on the host, bf16, zero2, clipped": _of(
        *(2, 2, "zero2", 1, "trained", {"max_norm": 1.0}),
        **{"live_bytes": _TWO, "precision": _BF16, "where": _GRADS, "accumulate": 4},
    ),
    "gradients and states on the host": _of(
        waits=1, where=f"{_GRADS}, {_STATES}", **_ADAM, **_OVERLAPPED
    ),
    "overlapped": _of(4, live_bytes=_TWO, accumulate=2, **_OVERLAPPED),
    # Guards and replicas.
    "clipping": _of(live_bytes=_TWO, guard={"max_norm": 1.0}),
    "a guard that refuses": _of(
        waits=1, live_bytes=_TWO, guard={"spike": 3.0, "on_nonfinite": "skip"}
    ),
    "local_sgd": _of(partition=1, waits=1, live_bytes=0, sync=mf.replicas.local_sgd),
    "diloco": _of(4, waits=1, live_bytes=_TWO, sync=mf.replicas.diloco),
    "fixed order": _of(4, live_bytes=_TWO, deterministic=True),
    "watched": _of(4, program="watched", live_bytes=_TWO, accumulate=2),
    "saved while it trains": _of(4, program="saved", live_bytes=_TWO),
    # Parts that send over communicators of the groups, and hop 2 of copies.
    "parts, two replicas": _of(4, 1, program="in_parts", parts=2, accumulate=2),
    "parts, clipped": _of(4, program="in_parts", parts=2, live_bytes=0, guard={"max_norm": 8.0}),
    "parts, overlapped": _of(4, 1, program="in_parts", parts=2, accumulate=2, **_OVERLAPPED),
    # What users do around it.
    "recomputation": _of(program="recomputed", live_bytes=0, accumulate=2),
    "an update before the run has ended": _of(program="updated_early"),
    "float16 on the wire": _of(program="in_float16"),
    "a stream of the user's": _of(program="own_stream", live_bytes=0),
    "two compute streams, budget": _of(program="forked", live_bytes=0),
    "two compute streams, keep all": _of(program="forked", live_bytes=None),
    "torch.func": _of(program="transformed"),
    "torch.func, deferred": _of(program="transformed_deferred"),
    "never waited for": _of(4, 4, program="left_in_flight"),
}


# Options of a `Trainer` whose device stalls; see `stalled`.

_IGNORES = optim.Guard(on_nonfinite="ignore")
_SKIPS = optim.Guard(max_norm=1.0, spike=optim.norm_spike(1e3), on_nonfinite="skip")
_MUON = optim.by_path({"*up.weight": optim.muon(0.02)}, default=optim.adamw(1e-2))
TRAINERS: dict[str, dict[str, Any]] = {
    "masked": {},
    "ignored": {"guard": _IGNORES},
    "clipped": {"guard": optim.Guard(max_norm=0.5)},
    "decided": {"guard": _SKIPS},
    "overlapped": {"guard": _IGNORES, "overlap_step": True},
    "accumulated": {"accumulate": 2, "live_bytes": 0},
    "muon": {"optimizer": _MUON},
    "states on the host": {"where": "states=host"},
    "ignored, on the host": {"where": "states=host, params=host", "guard": _IGNORES},
    "recoverable": {"faults": mf.FaultPolicy(recoverable=True)},
}
MASKED = {"masked", "clipped", "accumulated"}  # of which no abort loses a state
