"""Mistakes in reading, setting and watching values; `planting.py` checks that tests catch them."""

_A = "inspection/access.py"
_W = "inspection/watching.py"

PLANTED = [
    (
        "set writes into the shards that it was given",
        _A,
        "if flat is None else flat.clone()",
        "if flat is None else flat",
        "inspection/test_access.py -k set_changes_one_leaf",
    ),
    (
        "get gives the memory of a buffer itself",
        _A,
        "return value.detach().clone() if",
        "return value.detach() if",
        "inspection/test_access.py -k shares_memory",
    ),
    (
        "set keeps the memory of the caller",
        _A,
        "value = value.clone(memory_format=torch.contiguous_format)",
        "value = value.detach()",
        "inspection/test_access.py -k shares_memory",
    ),
    (
        "ranks may set different values",
        _A,
        'text = f"values of digest {int(checksum(new)) % 2**64:016x}"',
        'text = "values"',
        "inspection/test_access.py -k different_values",
    ),
    (
        "integers that a dtype cannot hold are rounded without a word",
        _A,
        "return torch.equal(cast.to(moved.dtype), moved)",
        "return True",
        "inspection/test_access.py -k do_not_fit",
    ),
    (
        "a leaf is gathered over groups that it was not sharded with",
        _A,
        "if route.size != bucket.parts or data.shape != (here,):",
        "if not bucket.parts:",
        "inspection/test_access.py -k groups_must_be",
    ),
    (
        "a piece of an unknown optimizer is given as a whole tensor",
        _A,
        "if isinstance(leaf, Tensor) and leaf.ndim and found.in_optimizer(at):",
        "if leaf is None:",
        "inspection/test_access.py -k another_library",
    ),
    (
        "a buffer with two names is set under one of them",
        _A,
        "return dict.fromkeys([at, *alike], value)",
        "return {at: value}",
        "inspection/test_access.py -k two_names",
    ),
    (
        "set writes a piece from the beginning of the value",
        _A,
        "value.reshape(-1)[piece.origin : piece.origin + piece.length]",
        "value.reshape(-1)[: piece.length]",
        "inspection/test_access.py -k set_changes_one_leaf",
    ),
    (
        "the peak of memory is what is there at the end",
        _W,
        "max(self._peaks[kind], self._sums[kind])",
        "self._sums[kind]",
        "inspection/test_watching.py -k formula",
    ),
    (
        "bytes of a level are those of its last transfer",
        _W,
        "found[event.level] += event.sent_bytes",
        "found[event.level] = event.sent_bytes",
        "inspection/test_watching.py -k ledger",
    ),
    (
        "what has watched a block goes on after it",
        _W,
        "        spans.watchers.remove(self)\n",
        "",
        "inspection/test_watching.py -k nobody_has_watched",
    ),
    (
        "a tied tensor counts twice in a summary",
        _A,
        'for row in self.rows if row.kind != "tied")',
        "for row in self.rows)",
        "inspection/test_access.py -k summary_counts",
    ),
    (
        "padding of a bucket counts its leaves",
        _A,
        "        total -= sum(piece.size_bytes if coded else piece.nbytes for piece in data)\n",
        "",
        "inspection/test_access.py -k summary_counts",
    ),
]
