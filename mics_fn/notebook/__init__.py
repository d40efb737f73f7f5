r"""Ranks that a notebook drives, cell by cell, on ipyparallel (the extra "notebook").

`cluster = mf.notebook.start()` starts one rank per GPU, or four on the CPU, with torch.distributed
and groups. A cell that begins with `%%ranks` runs on all of them, `%%ranks 0,2` on some. What it
defines is there in the next cell; `mf`, `torch`, `groups`, `rank` and `device` are there from the
start. `cluster.run(fn, *args)` calls a function on all ranks, `push` and `pull` move values:

  >>> with notebook.start(2, device="cpu", partition_size=1) as cluster:
  ...     cluster.cell("print(groups.num_replicas)")  # what `%%ranks` does
  ...     cluster.run(lambda: 6 * 7)
  2
  [42, 42]

*Output.* What is printed alike is shown once, other texts with the numbers of their ranks. In a
cell that takes longer the text of its first rank streams. Pictures and progress bars are those of
the first rank. An error that ranks share is one traceback, without frames of this library where its
error explains itself; ranks that only waited for one that failed are one line.

*Faults.* A cell ends on all ranks within ten seconds, whatever happens to one of them; see [Note:
no cell hangs] and [Note: a cell is a unit] in `cluster.py`. After an error that
ended the groups `cluster.reset()` makes new ones, and states stay. After a rank was killed, or
where one is stuck inside C++, `cluster.restart()` starts all anew, and their names are gone.

*Processes.* The fork server of `multiprocessing` imports torch once, and forks ipyparallel's
controller, which passes messages, and the ranks. So a start takes about as long as one import of
torch, and `restart()` a few seconds. The store in which ranks meet is held by the kernel, and
outlives each of them. All of these processes end once the kernel is gone, also by `kill -9`;
`stop()` leaves the fork server alone for the next start. Nothing listens beyond loopback, where
messages are signed and not encrypted. A script that calls `start` does so under `if __name__ ==
"__main__":`.

*Several machines.* `start` starts ranks on this machine alone. ipyparallel's own engines run the
same code on several: any launcher that `init_distributed` knows starts an engine as each rank, in a
folder that the machines share:

    ipcontroller --ip=10.0.0.1 --enable-curve --profile-dir=shared  # on the first machine
    # on each, with --node-rank 0 and up; with Slurm: srun ipengine --file=...
    torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr 10.0.0.1 \
      --master-port 29500 --no-python ipengine --file=shared/security/ipcontroller-engine.json

In the notebook `ranks = ipyparallel.Client("shared/security/ipcontroller-client.json")[:]` and
`ranks.activate()` offer `%%px`. The first such cell calls `device = mf.init_distributed()` and
`groups = mf.make_groups(device=device, timeout_s=60)`; engines have numbers of their own, so a
cell asks `groups.rank`. Output is that of each engine. A rank that waits for one whose cell failed
waits for `timeout_s`, `ranks.client.send_signal(signal.SIGINT)` interrupts all, `mf.reset(groups)`
goes on, and after a rank was killed the launcher starts all of them anew.

Start reading at `cluster.py`: what a cell shows, how it is waited for, what runs in each process,
and `start`. To add something that a person asks of ranks, write a function there, which runs on
each of them, and a method of `Cluster` that sends it by `_apply`.
"""

from mics_fn.notebook.cluster import Cluster, offer_magic, start

__all__ = ["Cluster", "start"]

offer_magic()
