"""`python -m mics_fn bench`: times, traffic and memory, against torch, FSDP2 and formulas.

Figures. Each is one command; all peers of a comparison take turns in one run. CPU with gloo on
two shared cores, torch 2.13.0, where nothing else is said. Ratios are medians over rounds, with the
least and the most; below 1 is in favour of this library. The model is a GPT of 13.7 M float32
parameters in 53 leaves.

- `Trainer` over a plain torch loop, world of 1: 1.09 (1.05 to 1.15); that is host time at ops of
  1 ms and less. The same over FSDP2 in a world of 1: 0.66 (0.65 to 0.71). `keep` and `zero3` do
  the same there. `python -m mics_fn bench step --ranks 1 --peers keep zero3 plain fsdp2`
- `opt_step(donate=True)` over torch's fused AdamW, time per element: 1.08 (1.06 to 1.10) with 53
  leaves, 1.22 (1.16 to 3.04) with 2,000 leaves of 400 elements; the median of rounds, and the least
  and the most. `python -m mics_fn bench opt`
- A step of Muon on matrices that lie whole on one rank each, over `torch.optim.Muon` and AdamW with
  all parameters on every rank, four ranks at once: 0.52 with p = 2, 0.25 with p = 4; a gather of
  each matrix instead 1.36. Padding, which is all that a step sends more, is 3.8 % and 0 %.
  `python -m mics_fn bench opt --muon --rounds 3 --steps 2`
- On one H200, torch 2.11, a world of 1, and a model so small that it is host time alone: a step of
  `Trainer` takes 2.08 (2.07 to 2.29) of a plain loop, 1.69 of DDP and 0.72 of FSDP2.
  `python -m mics_fn bench step --ranks 1 --device cuda --dim 64 --peers keep plain ddp fsdp2`
- Host time of a layer of 12 tiny leaves beyond plain torch, of 32 layers, in microseconds: world of
  1, all kept: 74 and 94 for uses of parameters, 25 and 14 for hops, 64 and 55 for the step, 158 and
  142 in all (85 to 221), FSDP2 978 and 904; two ranks, one bucket at a time: 449, 117 and 127, in
  all 706, FSDP2 5,009. `python -m mics_fn bench touch` (`--ranks 2 --live-bytes 0`)
- Predicted times of steps beside measured ones, on 2 nodes of 2 ranks that share two cores: at
  500 and 200 Mbit/s, with 8 placements, budgets and codes, 16 settings in all, the median error is
  11 %, the largest 19 %. At 1 Gbit/s, where the cores are busier than the link, all but one are
  within 19 % in two runs; p = 1, whose ring goes through all ranks, is predicted 31 % and 34 % too
  short. On each rank of such nodes: `python -m mics_fn bench plan --rates 500mbit 200mbit`
- Compiled blocks, by the default compiler, two ranks with p = 2: two buckets at a time take 0.72 of
  FSDP2 with compiled blocks, all kept 0.59, and 0.71 where FSDP2 keeps what it gathered. `python -m
  mics_fn bench step --compile --ranks 2 --partition-size 2 --rounds 5 --peers keep zero3 fsdp2
  fsdp2-keep`. In a world of one 1.08 of a plain loop with compiled blocks (eager: 1.06 of a plain
  loop); compiling gains nothing on these cores. `... --compile --ranks 1 --rounds 5 --peers keep
  plain`
- A model cut over two ranks by torch (tensor parallel), with the norm of its gradients limited, two
  data-parallel ranks with p = 2, and sizes at which it is host time alone: a step of `Trainer` is
  0.77 and 0.78 of FSDP2 with the same model, and 0.85 and 0.84 where FSDP2 keeps what it gathered,
  in two runs (0.48 to 2.10, on a machine that other work shared); with two buckets 0.79 of FSDP2.
  With `live_bytes=0` it takes 1.50: leaves that are cut and copies have buckets of their own, which
  are then fetched in turns. `python -m mics_fn bench step --mesh --dim 64 --rounds 15 --peers keep
  zero3 least fsdp2 fsdp2-keep`
- Bytes on each level over the formulas, on 2 nodes of 2 ranks: 1.0000 for p = 2 and p = 4.
  `python -m mics_fn bench bytes --ranks 4 --node-size 2 --partition-size 2` (or 4)
- Bytes of codes over the formulas, and what leaves a node of two ranks in MB, beside values. p = 2,
  `hop2=int8[256]`: 1.0000, 13.80 beside 54.77; `hop2=int4[64]` 7.27; that is twice the row
  `replicas`. p = 4 on a budget, gather and hop 1 `int8[256]`, on all levels or at `@node`: 1.0000,
  19.38 beside 76.89; that is twice the rows `gather node` and `reduce node`. `python -m mics_fn
  bench bytes --partition-size 2 --precision f32 "hop2=int8[256]"`, and `--partition-size 4
  --live-buckets 2 --warmup 3 --precision f32 "gather=int8[256], hop1=int8[256]"`
- Peak memory of a rank beyond the loaded code, p = 2, resident: 219 to 243 MB keeping all, FSDP2
  377 MB; on a budget 302 MB and 342 MB. `python -m mics_fn bench step --rss --ranks 4 --node-size 2
  --partition-size 2 --peers keep` (or `zero3`, `fsdp2-keep`, `fsdp2`)
- The same with 103 M parameters, p = 4 on 2 nodes of 2 ranks, resident, and in use (an allocator
  that returns freed memory at once): `live_bytes=0` 735 MB and 526 MB, two buckets 815 MB and 564
  MB, FSDP2 886 MB and 613 MB; keeping all 873 MB and 800 MB, FSDP2 980 MB and 856 MB. With p = 2
  in a world of 2: 1.04 GB and 926 MB, 1.07 GB and 960 MB, 1.28 GB and 997 MB; keeping all 1.14 GB
  and 1.11 GB, FSDP2 1.42 GB and 1.16 GB. `python -m mics_fn bench step --rss --ranks 4 --node-size
  2 --partition-size 4 --dim 1024 --blocks 8 --heads 16 --rounds 1 --steps 2 --peers least` (or
  `zero3`, `fsdp2`, `keep`, `fsdp2-keep`)
- Saving a state of 403 MB in one process, on a disk that other machines share, medians of three
  runs of 5 or 7 rounds (least to most of all rounds): 0.90 (0.48 to 1.21) of the speed of plain
  writing, 0.87 (0.81 to 1.03) of plain reading where the system has forgotten the file, and 0.45
  (0.33 to 0.48) where it lies in memory, since every byte goes through a checksum. `start_save`
  takes 1.10 (0.99 to 1.33) of a copy in memory, and a step while the file is written 0.99 (0.87 to
  1.09). `python -m mics_fn bench checkpoint --rounds 7`
- A step with the states of the optimizer in a file over one that keeps them in memory, world of 1,
  with equal losses: 1.22 (0.98 to 1.57), on a machine that other work shared. `python -m mics_fn
  bench step --ranks 1 --peers keep disk`, whose files are in `--folder`
- Of the seconds of the optimizer, 0.96 (0.95 to 0.97) are hidden behind hop 2 with
  `Trainer(overlap_step=True)`, and none without, on 2 nodes of 2 ranks at 200 Mbit/s, with 3.7 M
  parameters and p = 2; the losses are equal. A second counts as hidden only if a hop 2 was
  certainly under way. On each rank of such nodes: `python -m mics_fn bench step --overlap
  --partition-size 2 --dim 256 --rounds 3 --rates 200mbit:1`

What the same commands print beside these: the processor time of a step, also of DDP (`bench step
--partition-size 1 --peers keep ddp`), the most memory until a peer is built (`made` of `--rss`),
what optimizers cost a new process (`bench opt`), and loading beside `torch.load` (`bench
checkpoint`).

Steps over emulated nodes with shaped links, 2 nodes of 2 ranks, in seconds (medians of 3 rounds,
all peers of a line in one run). "On a budget" is `live_bytes` of two buckets; FSDP2 has a bucket
per block, on a (replicate, shard) mesh, or over all ranks (full).

    one micro-step            not shaped   1 Gbit/s   200 Mbit/s
    p = 2, keeps all                0.43       0.69         2.57
    p = 2, on a budget              0.52       0.73         2.59
    FSDP2, p = 2                    0.71       1.02         2.86
    p = 4, on a budget              0.60       0.80         3.62
    FSDP2, full                     0.59       1.80         7.33

    four micro-steps          not shaped   1 Gbit/s
    p = 2, keeps all                1.12       1.43
    p = 2, on a budget              1.56       1.71
    FSDP2, p = 2                    1.71       1.99
    FSDP2, full                     2.13       6.90

In `compute=bf16,reduce=bf16` a step at 200 Mbit/s takes 0.50 (0.50 to 0.51) of its time in
float32, at p = 2 and with all kept: 1.24 s against 2.47 (FSDP2: 1.40 against 2.81). At p = 4 on a
budget, `hpz` takes 0.75 (0.71 to 1.01) of the time of `zero3` there. The flags are `--precision
f32 compute=bf16,reduce=bf16`, and peers `wide-zero3 hpz`.

With codes, in float32 otherwise, a step takes at 200 Mbit/s: p = 2 with `hop2=int8[256]` 0.32 of
its time without (0.79 s against 2.48); p = 4 with `gather=int8[256], hop1=int8[256]@node` 0.23 and,
on another day, 0.27, which was 0.12 of the time of FSDP2, full (0.89 s against 7.38). At 1 Gbit/s
p = 2 takes 0.76 and 0.79 (0.73 to 0.85), and on another day 0.84 to 0.87 in three runs: four ranks
share two cores there, and each codes for 0.03 to 0.07 s of a processor in a step of 0.5 s.

The command on each rank of such nodes is `python -m mics_fn bench step --rounds 3 --partition-size
2 --peers keep zero3 wide-zero3 fsdp2 fsdp2-full --rates 200mbit:1` (or `1gbit:2`, or without
`--rates`), with `--accumulate 4` for the lower table. `--rates` needs a module `rigmark` (or what
`MICS_FN_LINKS` names) with `set_rate(rate)` to shape the links; without it leave the flag out.
"""
