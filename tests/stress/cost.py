"""`stress faults --cost`: what watching over ranks costs a step, in time and in messages.

Turns with the monitor and without it alternate in one run, as [Note: taking turns] in `turns` says.
"""

import importlib
import statistics
import threading
import time
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mics_fn as mf
from mics_fn.lab.bench.turns import between, of_all_ranks, on_ranks, ratio, spread
from mics_fn.lab.report import table

RATIO, CPU_SHARE = 1.01, 0.01  # the goals
CALLS = ("set", "get", "check", "add", "compare_set", "delete_key")
DIM, WARMUP, NEVER_S = 256, 6, 1e6


@dataclass(frozen=True)
class CostConfig:
    """What `stress faults --cost` measures.

    Args:
      rounds: pairs of turns, one with the monitor and one without.
      steps: of a turn.
      ranks: of the job.
      step_s: how long a step is to take, about.
    """

    rounds: int = 20
    steps: int = 5
    ranks: int = 2
    step_s: float = 0.1


def run_cost(config: CostConfig) -> dict[str, Any]:
    """Measure on new ranks."""
    return on_ranks(measure_cost, config.ranks, config)


def measure_cost(config: CostConfig) -> dict[str, Any]:
    """Take turns, as one rank of several."""
    mf.init_distributed(device="cpu", timeout_s=120.0)
    groups = mf.make_groups(timeout_s=120.0)
    watch = Watch(groups)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    trainer = mf.Trainer(
        model, mf.optim.adamw(1e-3), groups, loss=lambda m, x: m(x).square().mean()
    )
    batch = torch.randn(256, DIM)
    took_s = max(_turn(trainer, batch, WARMUP) for _ in range(2))
    rows = max(of_all_ranks(max(1, int(256 * config.step_s / took_s))))
    batch = torch.randn(rows, DIM)
    _turn(trainer, batch, WARMUP)
    messages, cpu_s, started = watch.messages, watch.cpu_s(), time.perf_counter()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(config.rounds):
        for on in (True, False) if number % 2 else (False, True):
            watch.put(on)
            dist.barrier()
            seconds[on].append(_turn(trainer, batch, config.steps))
    wall_s, cpu_s = time.perf_counter() - started, watch.cpu_s() - cpu_s
    mine = {"messages": watch.messages - messages, "cpu_share": 2 * cpu_s / wall_s}
    ranks = of_all_ranks(mine)
    found = ratio(seconds[True], seconds[False])
    figures = {
        "step_s": statistics.median(seconds[True]),
        "ratio": found._asdict(),
        "cpu_share": spread([rank["cpu_share"] for rank in ranks])._asdict(),
        "messages": max(rank["messages"] for rank in ranks),
    }
    return {**figures, "missed": _missed(figures)}


def _turn(trainer: mf.Trainer, batch: torch.Tensor, steps: int) -> float:
    """Seconds per step."""
    started = time.perf_counter()
    for _ in range(steps):
        trainer.step(batch)
    return (time.perf_counter() - started) / steps


class Watch:
    """The monitor of this process, as one who measures it sees it.

    Args:
      groups: those that it watches.
    """

    def __init__(self, groups: mf.Groups) -> None:
        self._listen: Any = groups.life.listen
        self._module: Any = importlib.import_module("mics_fn.groups.peers")  # there is no option
        self._tick_s = self._module._TICK_S
        self.messages = 0  # to the store by the main thread
        kind: Any = type(groups.hierarchy.channel.job.store)
        for name in CALLS:
            setattr(kind, name, self._counted(getattr(kind, name)))

    def _counted(self, call: Any) -> Any:
        @wraps(call)
        def counted(*args: Any) -> Any:
            self.messages += threading.current_thread() is threading.main_thread()
            return call(*args)

        return counted

    def put(self, on: bool) -> None:
        """Let it tick, or not; there is no option for that."""
        self._module._TICK_S = self._tick_s if on else NEVER_S
        self._listen()
        time.sleep(0.05)

    def cpu_s(self) -> float:
        """The time that its threads had a processor."""
        ids = [each.native_id for each in threading.enumerate() if each.name.startswith("mics_fn")]
        paths = [Path(f"/proc/self/task/{number}/schedstat") for number in ids]
        return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


def _missed(figures: dict[str, Any]) -> list[str]:
    """The goals that were missed, by name."""
    wrong = {
        "messages": figures["messages"] > 0,
        "time": figures["ratio"]["median"] > RATIO,
        "CPU": figures["cpu_share"]["most"] > CPU_SHARE,
    }
    return [name for name, missed in wrong.items() if missed]


def render_cost(figures: dict[str, Any], config: CostConfig) -> str:
    """The figures as a table."""
    share = {name: 100 * value for name, value in figures["cpu_share"].items()}
    rows = [
        ("a step with it / without", between(figures["ratio"], ".4f"), f"<= {RATIO:g}"),
        ("% of a processor for its threads", between(share, ".3f"), f"<= {100 * CPU_SHARE:g}"),
        ("messages by the main thread", str(figures["messages"]), "0"),
    ]
    title = f"the monitor in steps of {1e3 * figures['step_s']:.0f} ms on {config.ranks} ranks, "
    title += f"{config.rounds} pairs of turns of {config.steps} steps"
    verdict = f"goals missed: {', '.join(figures['missed'])}" if figures["missed"] else "goals met"
    return f"{table(title, rows)}\n\n{verdict}"
