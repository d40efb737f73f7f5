"""Where a leaf lives: on the device, in host memory or in a file, as a value.

A rank touches its optimizer states once per step, and with AdamW they are twice its shard and more.
So they may lie where memory is cheaper, and frozen parameters, shards and the sum of gradients over
micro-steps may do so too:

  >>> where("states=disk:/nvme/run1, params=host; *norm*: states=device")
  Where(params=Place(kind='host', folder=''), states=Place(kind='disk', folder='/nvme/run1'), ...)

A place never changes structure or numbers: a leaf is the same leaf wherever its piece lies, and a
step on states elsewhere gives the same bits as in memory. A piece on the *host* is a tensor on the
CPU, in locked memory where a device can copy from it by itself. One on *disk* is a `Stored`, which
has a shape and a dtype but no memory: an op on it reads the file.

  >>> import tempfile
  >>> folder = tempfile.TemporaryDirectory()
  >>> scratch = Scratch(folder.name, "states-rank0")
  >>> momentum = store(torch.ones(6), scratch, "w")
  >>> momentum.sum()
  tensor(6.)
  >>> momentum.zero_()
  Traceback (most recent call last):
  mics_fn.errors.LeafError: aten.zero_.default: writes to a stored tensor, w, shape (6,) in ...
    fix: write through stream(), or move() it to the device first

What is stored is written by `stream` alone. It brings blocks of files through a fixed amount of
host memory (`host_bytes`, 64 MiB), reads ahead and writes behind while the caller computes:

  >>> (new,) = renewed([momentum])  # to be overwritten, so `momentum` may not be used any more
  >>> blocks = [Block([new[a:b]], [new[a:b]]) for a, b in cuts(6, [4])]
  >>> for block, (part,) in stream(blocks):
  ...     part *= 0.9
  >>> read(new)
  tensor([0.9000, 0.9000, 0.9000, 0.9000, 0.9000, 0.9000])
  >>> momentum + 1
  Traceback (most recent call last):
  mics_fn.errors.DonatedError: offload: w, shape (6,) in ... was overwritten by a step ...
    fix: use the new state, or pass donate=False

To keep the old values, write to a new tensor, which `empty` makes. A part of a file is free again
when no value refers to it, and the file is removed with the last of them. While a save reads it, a
`Hold` keeps it as it is, and steps write elsewhere: see [Note: held parts] in `stored.py`.

Files are scratch: a run that dies goes on from a checkpoint, never from them. The file is locked,
its first page says whose it is, and each 64 KiB has a checksum, kept in memory. So a file that
somebody has cut off, replaced or written to, and a block that the disk has lost, is an
`FileError` that names the file and the leaf. Room is taken before anything is written, so a full
disk is an error that leaves the old state as it was. What a killed run leaves is removed by the
next scratch file in that folder, unless another machine has made it. Choose a disk of the node.

Verbs leave leaves where they lie: what they give is in the files, on the host or on the device
where their arguments were, but where a derivative is asked for. An error of a file in `opt_step`,
`move`, `init_state` or a step of `Trainer` is told to all ranks, which raise `PeerFileError`,
with the same file and leaf. After one in a step all call `reset`: some may have taken that step.
After one in `shard`, `load_shards`, `load_dcp` or `init_model` nothing is left on any rank, and the
groups can be used.

Data go past the cache of the system where the file system has direct I/O, elsewhere through it;
`Scratch.direct` says which. Three threads read and write, and each of four blocks under way is one
task after the other, so that four copies of the largest block are all the memory that is needed.
That memory is asked for in huge pages, from which a disk takes fewer and larger requests.
A step of AdamW on moments of 537 MB in a file, through 64 MiB of host memory, had 0.87 of the speed
of plain reading and writing of the same bytes by direct I/O, at 2.6 GB/s.

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
                               stepped on trial: a guard that clips or refuses sees all before,
                               while the first blocks of the states are read
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
      use_gds                  data go through host memory, where their checksums are taken

Values may be kept as codes, too: a `Coded` is a tensor of float32 that takes a byte for each, or
less, and is decoded where an op reads it. Moments of an optimizer are, and frozen parameters. See
[Note: coded tensors] in `apart.py`, and [Note: two kinds of codes] in `apart.py`.

Start reading at `places.py`; then `scratch.py`, with its note; `apart.py`; `stored.py`; and
`streaming.py`. To add a place, give `Place` a kind,
and say in `stored.py` what reading from it means.
"""

from mics_fn.offload.apart import AT_REST, Coded, as_codes, coded, is_apart, is_coded
from mics_fn.offload.places import DEVICE, HOST_BYTES, Place, Where, where, where_of
from mics_fn.offload.scratch import Scratch, read_all, write_all
from mics_fn.offload.stored import (
    Hold,
    Stored,
    copied_from,
    copied_into,
    empty,
    is_held,
    is_stored,
    laid_like,
    mapped,
    read,
    renewed,
    set_part,
    store,
    unset_like,
)
from mics_fn.offload.streaming import Block, cuts, stream

__all__ = [
    "AT_REST",
    "DEVICE",
    "HOST_BYTES",
    "Block",
    "Coded",
    "Hold",
    "Place",
    "Scratch",
    "Stored",
    "Where",
    "as_codes",
    "coded",
    "copied_from",
    "copied_into",
    "cuts",
    "empty",
    "is_apart",
    "is_coded",
    "is_held",
    "is_stored",
    "laid_like",
    "mapped",
    "read",
    "read_all",
    "renewed",
    "set_part",
    "store",
    "stream",
    "unset_like",
    "where",
    "where_of",
    "write_all",
]
