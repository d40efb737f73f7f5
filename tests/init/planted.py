"""Mistakes in making and reading models that would give other values; `planting.py` checks."""

_T = "init/tape.py"
_S = "init/files.py"

PLANTED = [
    (
        "bytes of a safetensors file that belong to no tensor are accepted",
        _S,
        "        if begin != last:\n",
        "        if begin < last:\n",
        "init/test_strangers.py -k refused_by_name",
    ),
    (
        "bytes of a tensor may not be as many as its shape needs",
        _S,
        "if end - begin != prod(shape) * kind.itemsize or not",
        "if not",
        "init/test_strangers.py -k refused_by_name",
    ),
    (
        "a file of an index may be a link that leads out of its folder",
        _S,
        "if os.path.realpath(place / name) != str(place.joinpath(*parts)):",
        "if not parts:",
        "init/test_strangers.py -k link",
    ),
    (
        "a FIFO or a device is opened",
        _S,
        "if not stat.S_ISREG(facts.st_mode):",
        "if stat.S_ISDIR(facts.st_mode):",
        "init/test_strangers.py -k regular",
    ),
    (
        "a range of a tensor is read from its beginning",
        _S,
        "data = self.read(base + start * size, (stop - start) * size, leaf)",
        "data = self.read(base, (stop - start) * size, leaf)",
        "init/test_files.py -k every_dtype",
    ),
    (
        "the writer of a file chooses the hashes of its names",
        _S,
        "super().__setitem__(key if plain else Symbol(type(key).__name__), value)",
        "super().__setitem__(key, value)",
        "init/test_strangers.py -k hashes",
    ),
    (
        "what a pickle names is imported",
        _S,
        'return Symbol(f"{module}.{name}")',
        "return super().find_class(module, name)",
        "init/test_strangers.py -k refused_by_name",
    ),
    (
        "chunks that overlap overwrite one another",
        _S,
        "if not bool((seen == 1).all()):",
        "if seen is None:",
        "checkpoint/test_dcp_dirs.py -k refused_by_name",
    ),
    (
        "a write that keeps a part of a storage is taken for all of it",
        _T,
        "if not self.ops[index].writes[storage]:",
        "if storage is None:",
        "init/test_recorder.py -k any_program",
    ),
    (
        "a random op begins where the generator happens to be",
        _T,
        "generator.set_state(self.state(start))",
        "self.state(start)",
        "init/test_init.py -k one_rank_has",
    ),
    (
        "a view of a part is taken for the whole storage",
        _T,
        "return dense and prod(self.shape) * self.dtype.itemsize == nbytes",
        "return True",
        "init/test_recorder.py -k any_program",
    ),
    (
        "memory that nothing sets is left as it was on each rank",
        _T,
        "                out.zero_()  #",
        "                out.fill_(1)  #",
        "init/test_init.py -k nothing_sets",
    ),
    (
        "generators do not end as after a plain construction",
        _T,
        "strict=True):\n            generator.set_state(state)\n",
        "strict=True):\n            generator.get_state()\n",
        "init/test_init.py -k generators_of_others",
    ),
    (
        "replicas that read other values are not compared",
        "collectives/agreement.py",
        "    if odd:\n        first = found",
        "    if len(odd) > len(home.ranks):\n        first = found",
        "init/test_files.py -k differ_between",
    ),
    (
        "each block of a piece overwrites the one before",
        "init/model.py",
        "part = data[low : low + step]",
        "part = data[: min(step, len(data) - low)]",
        "init/test_files.py -k large_pieces",
    ),
    (
        "a tensor of the file that no parameter takes is dropped without a word",
        "init/model.py",
        "    if strict:\n",
        "    if strict is None:\n",
        "init/test_files.py -k does_not_match",
    ),
]
