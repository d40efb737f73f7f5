"""The scenarios that run on the simulated device, and what a rank sees in one."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    kept_bytes: int  # gathered buckets that pools keep after the last step
    planned_bytes: int | None  # gathered buckets at once, by the schedule
    numbers: dict[str, Any]  # tensors on the CPU


@dataclass(frozen=True)
class Scenario:
    """A program on so many ranks, with options of its own."""

    program: str = "trained"
    ranks: int = 2
    partition: int = 2
    node: int = 2
    place: str | None = None
    options: Callable[[], Mapping[str, Any]] = field(default=dict)
    host_waits: int | None = 0  # in a steady step; None where the update is one of the host

    @property
    def plans(self) -> bool:
        """Whether a trainer follows a schedule of gathered buckets, within a budget or not."""
        with_trainer = self.program in ("trained", "recomputed", "forked", "own_stream")
        return with_trainer and self.partition > 1 and self.place not in ("zero1", "zero2")


def _options(**options: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: options


def _in_files() -> Mapping[str, Any]:
    where = f"states=disk:{tempfile.gettempdir()}"
    return {"live_bytes": _TWO_BUCKETS, "where": where, "optimizer": optim.adamw(1e-2)}


_BF16 = "param=f32, compute=bf16, reduce=f32, output=f32"
_F16 = "param=f32, compute=f16, reduce=f32, output=f32"
_CODES = "gather=int8[64], hop1=int8[64], hop2=int8[64]"
_FAR_CODES = "gather=int8[64]@node, hop1=int8[64]@node"
_TWO_BUCKETS = 2 * BUCKET_BYTES
_OVERLAPPED = {"overlap_step": True, "guard": optim.Guard(on_nonfinite="ignore")}

SCENARIOS: dict[str, Scenario] = {
    "alone": Scenario(ranks=1, partition=1, node=1, options=_options(live_bytes=0)),
    "three ranks": Scenario(ranks=3, partition=3, node=3, options=_options(live_bytes=0)),
    # Budgets, over one level and over two.
    "budget 0": Scenario(options=_options(live_bytes=0)),
    "budget 2 buckets": Scenario(options=_options(live_bytes=_TWO_BUCKETS)),
    "no prefetch": Scenario(options=_options(live_bytes=_TWO_BUCKETS, prefetch=0)),
    "keep all": Scenario(options=_options(live_bytes=None)),
    "two levels, budget": Scenario(
        ranks=4, partition=4, options=_options(live_bytes=_TWO_BUCKETS, accumulate=2)
    ),
    "two levels, keep all": Scenario(ranks=4, partition=4, options=_options(live_bytes=None)),
    "two replicas, budget": Scenario(
        ranks=4, options=_options(live_bytes=_TWO_BUCKETS, accumulate=2)
    ),
    "two replicas, keep all": Scenario(ranks=4, options=_options(live_bytes=None)),
    "two replicas, keep all to the end": Scenario(
        ranks=4, options=lambda: {"schedule": mf.keep_all()}
    ),
    # Placements.
    "zero1": Scenario(place="zero1", options=_options(live_bytes=_TWO_BUCKETS, accumulate=2)),
    "zero2": Scenario(place="zero2", options=_options(live_bytes=_TWO_BUCKETS, accumulate=2)),
    "ddp": Scenario(partition=1, options=_options(live_bytes=None)),
    "hpz": Scenario(ranks=4, partition=4, place="hpz", options=_options(live_bytes=_TWO_BUCKETS)),
    "hybrid": Scenario(
        ranks=4, partition=4, place="hybrid", options=_options(live_bytes=0, accumulate=2)
    ),
    # Precision.
    "bf16": Scenario(options=_options(live_bytes=_TWO_BUCKETS, precision=_BF16, accumulate=2)),
    "bf16, two replicas": Scenario(
        ranks=4, options=_options(live_bytes=0, precision=_BF16, accumulate=2)
    ),
    # Codes, on all levels and on the outer one.
    "codes, two replicas": Scenario(
        ranks=4, options=_options(live_bytes=_TWO_BUCKETS, precision=_CODES, accumulate=2)
    ),
    "codes, keep all": Scenario(ranks=4, options=_options(live_bytes=None, precision=_CODES)),
    "codes, two levels": Scenario(
        ranks=4, partition=4, options=_options(live_bytes=0, precision=_FAR_CODES)
    ),
    "codes, hpz": Scenario(
        ranks=4, partition=4, place="hpz", options=_options(live_bytes=0, precision=_CODES)
    ),
    "bf16 parameters": Scenario(
        options=lambda: {
            "live_bytes": _TWO_BUCKETS,
            "precision": "param=bf16, compute=bf16, reduce=f32, output=f32",
            "optimizer": optim.lion(1e-2),
        },
        host_waits=1,  # for the guard: no fused kernel of torch steps by lion
    ),
    "f16 with a loss scale": Scenario(
        options=lambda: {
            "live_bytes": _TWO_BUCKETS,
            "precision": _F16,
            "guard": optim.Guard(optim.dynamic_scale(16.0), max_norm=1.0),
        },
        host_waits=1,
    ),
    # Parameters in host memory, brought for each fetch, and updated there.
    "on the host": Scenario(
        options=_options(live_bytes=_TWO_BUCKETS, where="params=host"), host_waits=None
    ),
    "on the host, alone": Scenario(
        ranks=1,
        partition=1,
        node=1,
        options=_options(live_bytes=0, where="params=host"),
        host_waits=None,
    ),
    "on the host, bf16": Scenario(
        ranks=4,
        options=_options(live_bytes=0, precision=_BF16, where="params=host"),
        host_waits=None,
    ),
    "on the host, hpz": Scenario(
        ranks=4,
        partition=4,
        place="hpz",
        options=_options(live_bytes=_TWO_BUCKETS, where="params=host"),
        host_waits=None,
    ),
    "on the host, codes": Scenario(
        ranks=4,
        options=_options(live_bytes=_TWO_BUCKETS, precision=_CODES, where="params=host"),
        host_waits=None,
    ),
    "on the host, codes, hpz": Scenario(
        ranks=4,
        partition=4,
        place="hpz",
        options=_options(live_bytes=0, precision=_CODES, where="params=host"),
        host_waits=None,
    ),
    "on the host, torch.func": Scenario(
        "transformed", options=_options(where="params=host"), host_waits=None
    ),
    "on the host, deferred": Scenario(
        "transformed_deferred", options=_options(where="params=host"), host_waits=None
    ),
    "on the host, by hand": Scenario(
        "by_hand", ranks=4, options=_options(where="params=host"), host_waits=None
    ),
    # Places, and steps on gradients that still arrive.
    "states on the host": Scenario(
        options=lambda: {
            "live_bytes": _TWO_BUCKETS,
            "where": "states=host",
            "optimizer": optim.adamw(1e-2),
        },
        host_waits=2,
    ),
    "states on the host, overlapped": Scenario(
        ranks=4,
        options=lambda: {
            "live_bytes": _TWO_BUCKETS,
            "where": "states=host",
            "overlap_step": True,
            "guard": optim.Guard(on_nonfinite="ignore"),
            "optimizer": optim.adamw(1e-2),
        },
        host_waits=1,
    ),
    "states on the host, guarded": Scenario(
        ranks=4,
        options=lambda: {
            "live_bytes": _TWO_BUCKETS,
            "where": "states=host",
            "guard": optim.Guard(max_norm=1.0, on_nonfinite="skip"),
            "optimizer": optim.adamw(1e-2),
        },
        host_waits=2,
    ),
    "all on the host": Scenario(
        ranks=4,
        options=lambda: {
            "live_bytes": _TWO_BUCKETS,
            "where": "states=host, params=host",
            "accumulate": 2,
            "optimizer": optim.adamw(1e-2),
        },
        host_waits=None,
    ),
    "states in files": Scenario(options=_in_files, host_waits=FILE_RUNS + 1),
    "states in files, overlapped": Scenario(
        ranks=4,
        options=lambda: {**_in_files(), **_OVERLAPPED, "accumulate": 2},
        host_waits=FILE_RUNS,
    ),
    "gradients on the host": Scenario(
        ranks=4,
        options=_options(live_bytes=_TWO_BUCKETS, where="grads=host", accumulate=2),
        host_waits=1,
    ),
    "gradients on the host, alone": Scenario(
        ranks=1,
        partition=1,
        node=1,
        options=_options(live_bytes=0, where="grads=host", accumulate=2),
        host_waits=1,
    ),
    "gradients on the host, zero1": Scenario(
        place="zero1",
        options=_options(live_bytes=0, where="grads=host", accumulate=2),
        host_waits=1,
    ),
    "gradients on the host, keep all": Scenario(
        options=_options(live_bytes=None, where="grads=host"), host_waits=1
    ),
    "gradients on the host, bf16, zero2, clipped": Scenario(
        place="zero2",
        options=lambda: {
            "live_bytes": _TWO_BUCKETS,
            "precision": _BF16,
            "where": "grads=host",
            "guard": optim.Guard(max_norm=1.0),
            "accumulate": 4,
        },
        host_waits=1,
    ),
    "gradients and states on the host": Scenario(
        options=lambda: {
            "live_bytes": _TWO_BUCKETS,
            "where": "grads=host, states=host",
            **_OVERLAPPED,
            "optimizer": optim.adamw(1e-2),
        },
        host_waits=1,
    ),
    "overlapped": Scenario(
        ranks=4, options=_options(live_bytes=_TWO_BUCKETS, accumulate=2, **_OVERLAPPED)
    ),
    # Guards and replicas.
    "clipping": Scenario(
        options=lambda: {"live_bytes": _TWO_BUCKETS, "guard": optim.Guard(max_norm=1.0)}
    ),
    "a guard that refuses": Scenario(
        options=lambda: {
            "live_bytes": _TWO_BUCKETS,
            "guard": optim.Guard(spike=optim.norm_spike(3.0, warmup=1), on_nonfinite="skip"),
        },
        host_waits=1,
    ),
    "local_sgd": Scenario(
        partition=1,
        options=lambda: {"live_bytes": 0, "replica_sync": mf.replicas.local_sgd(2)},
        host_waits=1,
    ),
    "diloco": Scenario(
        ranks=4,
        options=lambda: {"live_bytes": _TWO_BUCKETS, "replica_sync": mf.replicas.diloco(2)},
        host_waits=1,
    ),
    "fixed order": Scenario(ranks=4, options=_options(live_bytes=_TWO_BUCKETS, deterministic=True)),
    "watched": Scenario(
        "watched", ranks=4, options=_options(live_bytes=_TWO_BUCKETS, accumulate=2)
    ),
    "saved while it trains": Scenario("saved", ranks=4, options=_options(live_bytes=_TWO_BUCKETS)),
    # What users do around it.
    "recomputation": Scenario("recomputed", options=_options(live_bytes=0, accumulate=2)),
    "a use that does not come": Scenario(
        "unused", ranks=4, partition=4, options=_options(live_bytes=None)
    ),
    "an update before the run has ended": Scenario("updated_early"),
    "float16 on the wire": Scenario("in_float16"),
    "made as shards": Scenario("made_as_shards"),
    "two trainers": Scenario("two_trainers", host_waits=1),  # for the totals of each
    "a stream of the user's": Scenario("own_stream", options=_options(live_bytes=0)),
    "two compute streams, budget": Scenario("forked", options=_options(live_bytes=0)),
    "two compute streams, keep all": Scenario("forked", options=_options(live_bytes=None)),
    "torch.func": Scenario("transformed"),
    "torch.func, deferred": Scenario("transformed_deferred"),
    "verbs by hand": Scenario("by_hand", ranks=4),
    "never waited for": Scenario("left_in_flight", ranks=4, partition=4),
}
