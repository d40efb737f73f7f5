"""`stress faults --cost`: what watching over ranks costs a step, in processor time and messages."""

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
from mics_fn.lab.bench.turns import between, of_all_ranks, on_ranks, spread
from mics_fn.lab.report import table

CPU_SHARE = 0.01  # the goal
CALLS = ("set", "get", "check", "add", "compare_set", "delete_key")
DIM, WARMUP = 256, 6


@dataclass(frozen=True)
class CostConfig:
    """What `stress faults --cost` measures.

    Args:
      rounds: turns.
      steps: of a turn.
      ranks: of the job.
    """

    rounds: int = 40
    steps: int = 5
    ranks: int = 2


def run_cost(config: CostConfig) -> dict[str, Any]:
    """Measure on new ranks."""
    return on_ranks(measure_cost, config.ranks, config)


def measure_cost(config: CostConfig) -> dict[str, Any]:
    """Take steps, as one rank of several, and look at what the monitor does meanwhile."""
    mf.init_distributed(device="cpu", timeout_s=120.0)
    groups = mf.make_groups(timeout_s=120.0)
    messages = count_messages(groups)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
    trainer = mf.Trainer(
        model, mf.optim.adamw(1e-3), groups, loss=lambda m, x: m(x).square().mean()
    )
    batch, seconds = torch.randn(4096, DIM), list[float]()  # steps of about 0.1 s
    for _ in range(WARMUP):
        trainer.step(batch)
    dist.barrier()
    before, cpu_s, started = sum(messages), threads_s(), time.perf_counter()
    for _ in range(config.rounds):
        begun = time.perf_counter()
        for _ in range(config.steps):
            trainer.step(batch)
        seconds.append((time.perf_counter() - begun) / config.steps)
    wall_s = time.perf_counter() - started
    mine = {"messages": sum(messages) - before, "cpu_share": (threads_s() - cpu_s) / wall_s}
    ranks = of_all_ranks(mine)
    share = spread([rank["cpu_share"] for rank in ranks])
    most = max(rank["messages"] for rank in ranks)
    wrong = {"messages": most > 0, "CPU": share["most"] > CPU_SHARE}
    figures = {"step_s": statistics.median(seconds), "messages": most}
    missed = [name for name, is_missed in wrong.items() if is_missed]
    return {**figures, "cpu_share": share, "missed": missed}


def count_messages(groups: mf.Groups) -> list[int]:
    """A list that gets a number for each call of the store: 1 by the main thread, else 0."""
    found, kind = list[int](), type(groups.hierarchy.channel.store)

    def counted(call: Any) -> Any:
        @wraps(call)
        def wrapped(*args: Any) -> Any:
            found.append(threading.current_thread() is threading.main_thread())
            return call(*args)

        return wrapped

    for name in CALLS:
        setattr(kind, name, counted(getattr(kind, name)))
    return found


def threads_s() -> float:
    """The time that the monitor's threads had a processor."""
    ids = [each.native_id for each in threading.enumerate() if each.name.startswith("mics_fn")]
    paths = [Path(f"/proc/self/task/{number}/schedstat") for number in ids]
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


def render_cost(figures: dict[str, Any], config: CostConfig) -> str:
    """The figures as a table."""
    share = {name: 100 * value for name, value in figures["cpu_share"].items()}
    rows = [
        ("% of a processor for its threads", between(share, ".3f"), f"<= {100 * CPU_SHARE:g}"),
        ("messages by the main thread", str(figures["messages"]), "0"),
    ]
    title = f"the monitor in steps of {1e3 * figures['step_s']:.0f} ms on {config.ranks} ranks"
    verdict = f"goals missed: {', '.join(figures['missed'])}" if figures["missed"] else "goals met"
    return f"{table(title, rows)}\n\n{verdict}"
