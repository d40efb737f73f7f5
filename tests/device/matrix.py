"""The scenarios that run on the simulated device, and what a rank sees in one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mics_fn as mf
from mics_fn import optim

BUCKET_BYTES = 4096  # about two leaves of a block
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
    host_waits: int = 0  # in a steady step

    @property
    def plans(self) -> bool:
        """Whether a trainer follows a schedule of gathered buckets, within a budget or not."""
        with_trainer = self.program in ("trained", "recomputed", "forked", "own_stream")
        return with_trainer and self.partition > 1 and self.place not in ("zero1", "zero2")


def _options(**options: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: options


_BF16 = "param=f32, compute=bf16, reduce=f32, output=f32"
_F16 = "param=f32, compute=f16, reduce=f32, output=f32"
_TWO_BUCKETS = 2 * BUCKET_BYTES

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
    "bf16 parameters": Scenario(
        options=lambda: {
            "live_bytes": _TWO_BUCKETS,
            "precision": "param=bf16, compute=bf16, reduce=f32, output=f32",
            "optimizer": optim.lion(1e-2),
        }
    ),
    "f16 with a loss scale": Scenario(
        options=lambda: {
            "live_bytes": _TWO_BUCKETS,
            "precision": _F16,
            "guard": optim.Guard(optim.dynamic_scale(16.0), max_norm=1.0),
        },
        host_waits=1,
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
        partition=1, options=lambda: {"live_bytes": 0, "replica_sync": mf.replicas.local_sgd(2)}
    ),
    "diloco": Scenario(
        ranks=4,
        options=lambda: {"live_bytes": _TWO_BUCKETS, "replica_sync": mf.replicas.diloco(2)},
    ),
    "fixed order": Scenario(ranks=4, options=_options(live_bytes=_TWO_BUCKETS, deterministic=True)),
    # What users do around it.
    "recomputation": Scenario("recomputed", options=_options(live_bytes=0, accumulate=2)),
    "a use that does not come": Scenario(
        "unused", ranks=4, partition=4, options=_options(live_bytes=None)
    ),
    "an update before the run has ended": Scenario("updated_early"),
    "float16 on the wire": Scenario("in_float16"),
    "made as shards": Scenario("made_as_shards"),
    "two trainers": Scenario("two_trainers"),
    "a stream of the user's": Scenario("own_stream", options=_options(live_bytes=0)),
    "two compute streams, budget": Scenario("forked", options=_options(live_bytes=0)),
    "two compute streams, keep all": Scenario("forked", options=_options(live_bytes=None)),
    "torch.func": Scenario("transformed"),
    "torch.func, deferred": Scenario("transformed_deferred"),
    "verbs by hand": Scenario("by_hand", ranks=4),
    "never waited for": Scenario("left_in_flight", ranks=4, partition=4),
}
