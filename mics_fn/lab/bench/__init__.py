"""`python -m mics_fn bench`: times, traffic and memory, against torch, FSDP2 and formulas.

Figures. Each is one command; all peers of a comparison take turns in one run. CPU with gloo on
two shared cores, torch 2.13.0; a figure on GPUs does not exist yet. Ratios are medians over
rounds, with the least and the most; below 1 is in favour of this library. The model is a GPT of
13.7 M float32 parameters in 53 leaves.

- `Trainer` over a plain torch loop, world of 1: 1.05 (0.85 to 1.38); that is host time at ops of
  1 ms and less. The same over FSDP2 in a world of 1: 0.60 (0.52 to 0.79). Medians of six peers in
  three runs, in which `keep` and `zero3` do the same. `python -m mics_fn bench step --ranks 1
  --peers keep zero3 plain fsdp2`
- `opt_step(donate=True)` over torch's fused AdamW, time per element: 1.00 (0.93 to 1.10) with 53
  leaves, 0.90 (0.84 to 1.02) with 2,000 leaves of 400 elements; the medians of three runs, and the
  least and the most of any round. `python -m mics_fn bench opt`
- Bytes on each level over the formulas, on 2 nodes of 2 ranks: 1.0000 for p = 2 and p = 4.
  `python -m mics_fn bench bytes --ranks 4 --node-size 2 --partition-size 2` (or 4)
- Peak memory of a rank beyond the loaded code, p = 2, resident: 189 MB keeping all, FSDP2 419
  MB; on a budget 302 MB and 342 MB. `python -m mics_fn bench step --rss --ranks 4 --node-size 2
  --partition-size 2 --peers keep` (or `zero3`, `fsdp2-keep`, `fsdp2`)
- The same with 103 M parameters, p = 4 on 2 nodes of 2 ranks, resident, and in use (an allocator
  that returns freed memory at once): a budget of two buckets 815 MB and 564 MB, FSDP2 886 MB and
  613 MB; keeping all 873 MB and 800 MB, FSDP2 980 MB and 856 MB. `python -m mics_fn bench step
  --rss --ranks 4 --node-size 2 --partition-size 4 --dim 1024 --blocks 8 --heads 16 --rounds 1
  --steps 2 --peers zero3` (or `fsdp2`, `keep`, `fsdp2-keep`)
- Saving a state of 403 MB in one process, on a disk that other machines share, medians of three
  runs of 5 or 7 rounds (least to most of all rounds): 0.90 (0.48 to 1.21) of the speed of plain
  writing, 0.87 (0.81 to 1.03) of plain reading where the system has forgotten the file, and 0.45
  (0.33 to 0.48) where it lies in memory, since every byte goes through a checksum. `start_save`
  takes 1.10 (0.99 to 1.33) of a copy in memory, and a step while the file is written 0.99 (0.87 to
  1.09). `python -m mics_fn bench checkpoint --rounds 7`

Steps over emulated nodes with shaped links, 2 nodes of 2 ranks, in seconds (medians of 3 rounds,
all peers of a line in one run) and MB of a step that left a node by its network interface. "On a
budget" is `live_bytes` of two buckets; FSDP2 has a bucket per block, on a (replicate, shard) mesh,
or over all ranks (full).

    one micro-step            not shaped   1 Gbit/s   200 Mbit/s   MB a node sends
    p = 2, keeps all                0.43       0.69         2.57              54.9
    p = 2, on a budget              0.52       0.73         2.59              54.9
    FSDP2, p = 2                    0.71       1.02         2.86              54.9
    FSDP2, full                     0.59       1.80         7.33             164.7

    four micro-steps          not shaped   1 Gbit/s                MB a node sends
    p = 2, keeps all                1.12       1.43                           54.9
    p = 2, on a budget              1.56       1.71                           54.9
    FSDP2, p = 2                    1.71       1.99                           54.9
    FSDP2, full                     2.13       6.90                          658.8

The command on each rank of such nodes is `python -m mics_fn bench step --rounds 3 --partition-size
2 --peers keep zero3 fsdp2 fsdp2-full --rates 200mbit:1` (or `1gbit:2`, or without `--rates`), with
`--accumulate 4` for the lower table. `--rates` needs a module `rigmark` (or what `MICS_FN_LINKS`
names) with `set_rate(rate)` to shape the links; without it leave the flag out.
"""
