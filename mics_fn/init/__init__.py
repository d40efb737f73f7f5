"""Models that are made or read as shards, so that no rank ever holds one in full.

`init_model` takes the function that makes a model and gives what every other verb needs: the
structure of the module, with its parameters on meta, and the parameters as shards. The values are,
bit for bit, those of making the model in full after `torch.manual_seed(seed)`. `load_shards` reads
the same shards from safetensors files, files of `torch.save`, folders of them, or directories of
torch.distributed.checkpoint, and each rank reads only its own part. With
`init_model(make_model, groups, weights="model.safetensors")` both happen at once; what is new in
the model, such as adapters, is then made, and the rest is read (`missing=`).

Every rank draws all random numbers, so `init_model` takes somewhat more time than a plain
construction. Its peak of memory is the rank's shards, one bucket and the largest parameter.

How `init_model` works: while the function runs, a *recorder* puts each op on a *tape*
(`tape.py`) instead of running it. The model then holds *recorded* tensors, which report shape,
dtype and device but have no data. A parameter's values follow from a part of the tape, and *replay*
runs that part alone, each random op from the state that its generator would have had. A *filling*
(`model.py`) lays out the shards and keeps this rank's part of each value; the *skeleton* is a copy
of the module, as `copy.deepcopy` makes it, with parameters on meta. A model that cannot be recorded
is refused, with what it did.

How `load_shards` works: `open_weights` opens what a path stands for as named entries, from which
any range of elements can be read; names are matched with the parameters, and the filling reads the
ranges that this rank keeps. Files may come from strangers, so nothing in them is run, mapped, or
believed: `files.py` opens only regular files, says why in [Note: files of strangers], and reads
safetensors, the zip files and pickles of `torch.save`, and DCP directories, whose files hold chunks
of tensors. What cannot be read on one rank is an error on all of them.

Example:
  >>> make_model = lambda: torch.nn.Linear(2, 3)
  >>> groups = make_groups(1)
  >>> skeleton, shards = init_model(make_model, groups, seed=0)
  >>> whole = (torch.manual_seed(0), make_model())[1]
  >>> skeleton.weight.is_meta, torch.equal(gather(shards, groups)["weight"], whole.weight)
  (True, True)

Start reading at `model.py`, then the notes [Note: tape], [Note: recorded tensors] and [Note: random
streams]. To add a format of files, write a function of a `File` that gives an `Entry` for each
tensor, and call it from `_of_file` in `model.py`. To record an op that torch cannot compute on
meta, nothing is needed: it is run on replayed inputs. An op that draws random numbers on another
kind of device needs a generator in `tape.py`.
"""

from mics_fn.init.files import DTYPES, File, check_shape, is_text, strict_json
from mics_fn.init.model import copy_with, init_model, load_shards, on_meta_copy, refuse_lazy
