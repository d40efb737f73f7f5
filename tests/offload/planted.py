"""Mistakes in what lies in files that would give wrong values or hangs; `planting.py` checks."""

_S = "offload/scratch.py"
_F = "offload/streaming.py"

PLANTED = [
    (
        "two tensors get the same part of a file",
        _S,
        "[(offset + nbytes, size - nbytes)]",
        "[(offset, size - nbytes)]",
        "offload/test_file_space.py",
    ),
    (
        "values are not compared with their checksums",
        _S,
        "if any(differs and state == _SUMMED for differs, state in wrong):",
        "if not wrong:",
        "offload/test_scratch_faults.py -k changed_file",
    ),
    (
        "what was written in part can be read",
        _S,
        "            self._state[touched] = bytes([_UNSET]) * count\n",
        "",
        "offload/test_scratch_faults.py -k written_in_part",
    ),
    (
        "a part that was given away can be read",
        _S,
        "return start < stop and any(last > generation for",
        "return start < stop < 0 and any(last > generation for",
        "offload/test_stored.py -k giv",
    ),
    (
        "the file of a process that lives is removed",
        _S,
        "                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                path",
        "                path",
        "offload/test_scratch_faults.py -k living",
    ),
    (
        "errors of the last writes are lost",
        _F,
        "        for job in self._jobs:\n            self._await(job)\n",
        "",
        "offload/test_scratch_faults.py -k broken_disk",
    ),
    (
        "a disk that hangs is waited for without end",
        _F,
        "if time.monotonic() > deadline:",
        "if time.monotonic() < 0:",
        "offload/test_streams.py -k hangs",
    ),
    (
        "a large tensor is stored with the values of its beginning",
        "offload/stored.py",
        "part.copy_(flat[low // size : high // size])",
        "part.copy_(flat[: (high - low) // size])",
        "offload/test_stored.py -k there_and_back",
    ),
    (
        "a step writes to what a save is reading",
        _S,
        "        if self.is_held:\n            fix =",
        "        if self.is_held is None:\n            fix =",
        "checkpoint/test_saves_of_files.py -k what_is_held",
    ),
    (
        "other ranks are not told that a step failed on a disk",
        "optim/state.py",
        "        home.life.finish(error)  # the others may have taken this step",
        "        pass",
        "offload/test_errors_on_all_ranks.py -k same_error",
    ),
]
