"""Checkpoints: a state becomes a folder that counts once it is whole, and comes back anywhere.

`save` writes a state as a step, all ranks together and each byte once; `load` reads it on any
number of ranks, with any levels and placement, bit for bit:

  >>> import tempfile
  >>> groups, folder = make_groups(1), tempfile.mkdtemp()
  >>> state = init_state(shard({"w": torch.ones(4)}, groups), optim.adamw(0.1))
  >>> path = checkpoint.save(folder, state, groups, step=10, extra={"epoch": 1})
  >>> sorted(file.name for file in path.iterdir())
  ['MANIFEST.json', 'rank-00000.safetensors']
  >>> found = checkpoint.load(folder, state, groups)
  >>> found.step, found.extra, checkpoint.verify(folder).tensors
  (10, {'epoch': 1}, 4)

`start_save` copies what it writes and returns; a thread writes while training goes on. What lies in
files is not copied: steps leave it as it is until it is saved.
`Trainer(checkpoint=Checkpoints(folder, every=100))` does all of it, and a new `Trainer` goes on
from the newest step: with random states, the place in the data and the guard, to the bit.
`python -m mics_fn verify FOLDER` needs neither ranks nor a GPU.

Its words:

- A *step* is a folder, such as `step-00000120`. It is *committed* when it counts: when all of it
  is on the disk. `steps` and `latest` name committed steps only, and whatever a job leaves that was
  killed in a save never matters: the next save removes it.
- A step that is saved after a rollback *replaces* those from it on: they do not count from the
  moment in which it does, whether they can be removed or not. See [Note: epochs] in `directory`.
- A folder has one *owner*, the newest job that went on from it or saved there. An older one that
  still runs gets an error that names the owner, and changes nothing.
- Each rank writes one file. Replicas hold the same shards, so each writes a part of these; which
  one follows from their sizes, so nothing is planned or gathered.
- A *slice* is a range of a flattened tensor in a file, at most 4 MiB, that is read at once.
- The *manifest* is one JSON object: the dtype and shape of each tensor, a table of the slices of
  each file with a checksum each, and a digest of itself. See [Note: slices] in `directory`: any
  number of ranks reads the slices that overlap its part, and compares each.
- Dense tensors are saved of every dtype that torch computes with, down to complex32 and float4.
  `save` refuses others, such as quantized ones, by name, and before a byte is written.
- All ranks of a *model in parts* write one step; see [Note: parts are saved] in `saving`. It loads
  in any number of parts that its leaves can be cut in evenly, also in none, and values of leaves
  and moments are the same to the bit; codes load in as many parts. Stages of a pipeline load as as
  many.
- The *state* is equal on all ranks, up to who holds which piece; each rank adds an *extra*, where
  tensors that are its own belong. Leaves
  that are not trained, and are kept as codes, are saved as these codes, and load as these.

What it promises: a committed step is never lost or changed by a save that fails, and at least two
are kept, one of which may be a replaced one right after a rollback. A load goes back to an older
step only if asked to, and only from one that is found to be damaged. All ranks come to one end: if
one of them cannot write, or finds damage, all raise the same error, and training can go on. While
replicas are independent, as with `local_sgd`, each of them is saved, and the same number of
replicas can load it. What is not promised: the checksums find accidents, not people who mean harm;
but nothing in a file is run, and no file outside of the folder is opened.

Checkpoints of others: `save_pretrained` writes what `from_pretrained` of transformers loads, and
`load_shards` reads it. `save_dcp` writes what `torch.distributed.checkpoint.load` reads into plain
tensors or DTensors, so that FSDP2 and torchtitan go on from it, with the optimizer if a
`TrainState` is given; `load_shards` reads what these wrote, each rank only the chunks that overlap
its part; `names=` takes off what names begin with. The ranks of the first replica write, (p-1)/p M
travels, and a rank holds a file and twice a bucket. Of a model in parts whole leaves are written,
by the ranks of all parts; stages of a pipeline are refused. Such a directory is there as a whole or
not at all, and nothing is overwritten. Nothing in one that is read is run: DCP's `.metadata` is a
pickle, but its opcodes are read as a description, so it needs no trust. `trust=True` only allows
names that lead out of the directory.

  >>> shards = shard({"w": torch.ones(2, 3)}, groups)
  >>> save_dcp(f"{folder}/a", shards, groups, prefix="model.")
  >>> load_shards(f"{folder}/a", groups, names=lambda name: name.removeprefix("model."))
  {'w': Sharded(shape=(2, 3), float32, here 6 of 6)}

Start reading at `directory` (what is on the disk: the table of slices, and which steps count); then
`saving` (what a state holds, who writes it, and how all ranks come to one end), and `loading` for
what is read. Directories of others are written by `exported`, and read by `init`. To add another
format to write, take `saved_leaves` and `in_files`, and give `export` what writes a file. To add
what is kept with a `Trainer`, add it to `resuming` in the wing `train`. To change the format, raise
`VERSION` in `directory`.

`load` returns a `Loaded` of state, step and extra, and `verify` a `Verified` of what it compared.
"""

from mics_fn.checkpoint.directory import Folder
from mics_fn.checkpoint.exported import save_dcp, save_pretrained
from mics_fn.checkpoint.loading import Loaded, Verified, latest, load, steps, verify
from mics_fn.checkpoint.saving import PendingSave, save, start_save, take_folder

__all__ = [
    "latest",
    "load",
    "save",
    "save_dcp",
    "save_pretrained",
    "start_save",
    "steps",
    "verify",
]
