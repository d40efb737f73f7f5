"""Everything around the library: ranks, a model and a text, the demo, benches, and the doctor.

Nothing in the library imports this wing, and a user needs none of it. It is here to show that the
library works, to measure it, and to test it.

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
- `report.py` has the formulas for what a step sends, prints tables, and has types of
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
