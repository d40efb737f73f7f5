"""Everything around the library: plans, simulated steps, the demo, benches, and the doctor.

Nothing in the library imports this wing, and training needs none of it. It says what a model would
take on a cluster that nobody has yet, shows that the library works, measures it, and tests it.

- `hardware.py` has clusters as values, from texts such as "64 x 8 h100, 8 x 400 Gbit", from the
  profiles that `doctor --profile FILE` writes, or by hand, of a `Topology`, `Link`s and a `Device`.
- `simulator.py`: `simulate` replays a `Schedule`, the value that a real run follows or one of your
  own, over streams and links. It gives a timeline as `inspection.watch` does, the memory by kind,
  and bytes and counts of collectives that equal those of a real run. `followed(trainer)` is what a
  trainer follows.
- `planner.py`: `plan` ranks what a model can take on a cluster by simulated steps, and says why;
  `python -m mics_fn plan llama-3-70b "64 x 8 h100, 8 x 400 Gbit"`.

- `ranks.py` starts processes. `launch` runs a function as n ranks of a job on this machine, as
  `torchrun` would, `run_bounded` also with a time limit; both name the rank, the traceback and the
  stack if one of them fails or hangs, and listen on loopback alone.
- `models.py` has a small GPT, written plainly, text that exists on every machine, and
  `TrainingTask`, which has batches of it by rank, for all that trains.
- `demo.py` is `python -m mics_fn demo`: it trains the GPT sharded over ranks, trains it again in
  one process of plain torch, and compares the two.
- `bench/` is `python -m mics_fn bench WHAT`: `step` and `opt` compare times with torch and FSDP2,
  `bytes` traffic with formulas, `checkpoint` with plain reading and writing.
- `doctor.py` is `python -m mics_fn doctor`: what this machine and its torch are, and whether two
  ranks reach each other. With `--gpu` it checks, in ten minutes at most, what `doctor_parts.py` and
  `doctor_gpu.py` have: numbers against float64 on the CPU, that the host never waits and is faster
  than the device, real NCCL ranks (several on one GPU where there are too few), equal bits under
  random delays on streams, memory against the plan and of communicators, an error on one rank, and
  a rank that is killed and started again; `bench step` has times. With `--gpus` ranks have a GPU
  each, and measure links and devices; `--profile` writes that to a file for plans and simulations.
  Each part has processes and a time limit of its own, so one that fails or
  hangs is a line of the report. That has no names of hosts, users or folders, and `--out` writes it
  to a file that can be sent. As one of several ranks that `torchrun` or another launcher has
  started, on one node or on many, it checks instead that these ranks reach each other, and with
  `--gpus` or `--profile` measures their links.
- `verify.py` is `python -m mics_fn verify`: are the files of a checkpoint as they were saved?
- `cluster.py` has clusters as values: links, devices, and ranks, well-known ones by a text.
- `simulate.py` replays a schedule on such a cluster: the events of a step, its time, and its
  memory, without processes. `followed(trainer)` is the schedule that a `Trainer` follows.
- `report.py` has the formulas for what a step sends and holds, prints tables, and has types of
  flags.

Words: a *peer* is one of the things that a comparison compares. Peers take *turns* in one run,
round by round, because two times taken minutes apart on a shared machine cannot be compared
([Note: taking turns] in `bench/turns.py`). A *formula* says what a step should send or hold; a
bench prints it beside what was counted.

Example:
  >>> from mics_fn.lab.report import gather_bytes, table
  >>> sent = gather_bytes((2, 4), 800)  # over 2 nodes, then over the 4 ranks of a node
  >>> print(table("one gather", [("node", f"{sent[0]:.0f} B"), ("rank", f"{sent[1]:.0f} B")]))
  one gather
    node   100 B
    rank   600 B

Start reading at `demo.py`, which has both ways to train side by side, or at
`bench/alone.py`, the shortest benches. To add a bench, write a frozen dataclass for its config, a
function that measures as one rank and returns figures as plain data, and a function that renders
them as text; then add a line to `BENCHES` in `bench/command.py`, with a function that makes the
config from the flags. To add a peer of `bench step`, write a function from
`Stage` to `BenchPeer` and add it to `PEERS` in `bench/step.py`. To add a part of the doctor, write
a function of a `DoctorConfig` that calls `Rank.say` with what it finds, and add it to `PARTS` in
`doctor_gpu.py`.
"""

from mics_fn.lab.hardware import Device, Hardware, Link
from mics_fn.lab.planner import plan
from mics_fn.lab.simulator import Simulated, followed, scheduled, simulate

__all__ = ["Device", "Hardware", "Link", "Simulated", "followed", "plan", "scheduled", "simulate"]
