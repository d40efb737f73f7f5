"""Where a leaf lives: on the device, in host memory or in a file, as a value.

A rank touches its optimizer states once per step, and with AdamW they are twice its shard and more.
So they may lie where memory is cheaper, and frozen parameters, shards and the sum of gradients over
micro-steps may do so too:

  >>> where("states=disk:/nvme/run1, params=host; *norm*: states=device")
  Where(rules=(('', 'states', 'disk:/nvme/run1'), ('', 'params', 'host'), ...), ...)

A place never changes structure or numbers: a leaf is the same leaf wherever its piece lies, and a
step on states elsewhere gives the same bits as in memory. A piece on the *host* is a tensor on the
CPU, in locked memory where a device can copy from it by itself. One on *disk* is a `FileTensor`,
which has a shape and a dtype but no memory: an op on it reads the file.

  >>> import tempfile
  >>> folder = tempfile.TemporaryDirectory()
  >>> scratch = Scratch(folder.name)
  >>> momentum = store(torch.ones(6), scratch, "w")
  >>> momentum.sum()
  tensor(6.)
  >>> momentum.zero_()
  Traceback (most recent call last):
  mics_fn.errors.LeafError: aten.zero_.default: writes to a tensor in a file, w, shape (6,) in ...
    fix: write through stream(), or move() it to the device first

What `store` puts into a file of a `Scratch` is written by `stream`. It fetches blocks of files
through a fixed amount of host memory (`host_bytes`, 64 MiB), reads ahead and writes behind while
the caller computes:

  >>> parts = [momentum[a:b] for a, b in cuts(6, [4])]
  >>> for block, (part,) in stream([Block([part], [part]) for part in parts]):
  ...     part *= 0.9
  >>> read(momentum)
  tensor([0.9000, 0.9000, 0.9000, 0.9000, 0.9000, 0.9000])

To keep the old values, write to a new tensor, which `empty` makes. A part of a file is free again
when no value refers to it, and the file with the last of them. While a save reads it, a `ReadLock`
keeps it as it is, and steps write to other parts: see [Note: locked parts] in `placed.py`.

Files are scratch: a run that dies goes on from a checkpoint, never from them. A file has no name,
so that nobody else can cut it off, replace it or write to it, and nothing is left of it when the
process ends, killed or not. Data have no checksums: what a disk changes is not noticed, as in
memory. Room is taken before anything is written, so a full disk is an error that names the folder
and the leaf, and leaves the old state as it was. Choose a disk of the node.

Verbs leave leaves where they lie: what they give is in the files, on the host or on the device
where their arguments were, but where a derivative is asked for. An error of a file in `opt_step`,
`move`, `init_state` or a step of `Trainer` is told to all ranks, which raise `PeerFileError`,
with the same folder and leaf. After one in a step all call `reset`: some may have taken that step.
After one in `shard`, `load_shards` or `init_model` nothing is left on any rank, and the
groups can be used.

Data go past the cache of the system where the file system has direct I/O, elsewhere through it;
`Scratch.direct` says which. Three threads read and write, and each of four blocks under way is one
task after the other, so that four copies of the largest block are all the memory that is needed.
That memory is asked for in huge pages, from which a disk takes fewer and larger requests.
What that costs a step is what `python -m mics_fn bench step --peers keep disk` measures.

The options of DeepSpeed's config and what stands for each here, or why nothing does:

    offload_optimizer
      device, nvme_path        `states=host`, `states=disk:FOLDER`, for some leaves by patterns. A
                               step is computed where the parameter is: with `params=host` on the
                               CPU, as DeepSpeed always does, else on the device
      pin_memory               host memory is locked wherever a device is to copy from it
      buffer_count             always four blocks, which share `host_bytes`
      pipeline_read, _write    always both: blocks come and go while one is stepped
      fast_init                `init_state(where=)` makes moments at their places, run by run
      ratio                    patterns, such as `*.mlp.*: states=host`: by leaf and not by share
      super_offload            `overlap_step` steps a bucket while others arrive, but nothing is
                               stepped on trial: a guard that clips or refuses sees all before
      cpuadam_cores_perc       `torch.set_num_threads`, as for any op: there is no other process
    offload_param
      device, nvme_path        `params=host`, `params=disk:FOLDER`
      pin_memory               as above
      buffer_count, _size      the schedule fetches ahead, and `live_bytes` is its budget
      max_in_cpu               patterns say which leaves lie where, the same in every step
    aio
      block_size               a block is a fourth of `host_bytes`, in calls of 16 MiB at most
      queue_depth              a thread has one request under way
      intra_op_parallelism     `threads` of `stream`; an older name of it is `thread_count`
      single_submit,           for libaio only, which would have to be compiled: `preadv` and
        overlap_events           `pwrite` in threads reach the speed of one disk
      io_backend               direct I/O where the file system has it, else through its cache
      use_gds                  data go through host memory

Values may be kept as codes, too: a `Coded` is a tensor of float32 that takes a byte for each, or
less, and is decoded where an op reads it. Moments of an optimizer are, and frozen parameters. See
[Note: coded tensors] and [Note: two kinds of codes] in `placed.py`.

Start reading at `scratch.py`, with its notes; then `placed.py`. To add a place, let `Where` read
it, and say in `placed.py` how tensors get there.
"""

from mics_fn.offload import placed, scratch
from mics_fn.offload.placed import (
    Coded,
    FileTensor,
    Placed,
    ReadLock,
    coded,
    empty,
    empty_at,
    in_file,
    is_coded,
    is_locked,
    is_placed,
    place_tensor,
    placed_like,
    read,
    store,
    transfer,
    unset_like,
)
from mics_fn.offload.scratch import DEVICE, HOST_BYTES, Block, Scratch, Where, cuts, stream, where
