"""Mistakes in what lies in files that would give wrong values or hangs; `planting.py` checks."""

_S = "offload/scratch.py"

PLANTED = [
    ("two tensors get the same part of a file", _S, "insort(self._taken, (at, at + size))",
     "insort(self._taken, (at, at))", "offload/test_placed.py -k space_is_used"),
    ("errors of the last writes are lost", _S,
     "        for job in jobs:\n            _await(job, scratch)\n", "",
     "offload/test_scratch_faults.py -k broken_disk"),
    ("a disk that hangs is waited for without end", _S, "if time.monotonic() > deadline:",
     "if time.monotonic() < 0:", "offload/test_streams.py -k hangs"),
    ("a large tensor is stored with the values of its beginning", "offload/placed.py",
     "found.copy_(source[low : low + step])", "found.copy_(source[: len(found)])",
     "offload/test_placed.py -k there_and_back"),
    ("a forked process writes to the file of its parent", "offload/placed.py",
     "key = os.getpid(), folder, host_bytes", "key = 0, folder, host_bytes",
     "offload/test_placed.py -k forked"),
    ("a step writes to what a save is reading", _S,
     "        if self.holders:\n            text =",
     "        if self.holders is None:\n            text =",
     "checkpoint/test_snapshot.py -k what_is_held"),
    ("other ranks are not told that a step failed on a disk", "optim/state.py",
     "        home.state.finish(error)  # the others may have taken this step", "        pass",
     "offload/test_errors_on_all_ranks.py -k same_error"),
    ("a block is given before it was read", _S,
     "            _await(jobs[i], scratch)\n            yield block",
     "            yield block", "offload/test_streams.py -k in_place"),
    ("all portions of a file are read to the beginning of a tensor", "offload/placed.py",
     "goal.narrow(0, low, len(found)).copy_(found)", "goal.narrow(0, 0, len(found)).copy_(found)",
     "offload/test_placed.py -k there_and_back"),
    ("the last block reaches beyond the tensor", _S, "return [(low, min(numel, low + step)) for",
     "return [(low, low + step) for", "offload/test_streams.py -k cuts"),
]  # fmt: skip
