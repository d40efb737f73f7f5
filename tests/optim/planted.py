"""Mistakes in steps, guards and replicas; `planting.py` checks that tests catch them."""

_C, _D, _G, _N = "optim/columns.py", "optim/comparing.py", "optim/guard.py", "optim/norms.py"

PLANTED = [
    (
        "parts of a column end inside of the lines of a fused kernel",
        _C,
        "inner = stretch.start - (stretch.start - start) // LINE * LINE",
        "inner = start",
        "optim/test_moving.py -k parts_of_a_column",
    ),
    (
        "a step in place does not see that tensors overlap",
        _C,
        "if a[0] == b[0] and b[1] < a[1] + a[2]}",
        "if a[0] == b[0] and b[1] < a[1]}",
        "optim/test_optim.py -k odd_memory",
    ),
    (
        "a step without donate writes to the files of the old state",
        _C,
        "if not donate or is_held(self._old[k][r]):",
        "if is_held(self._old[k][r]):",
        "optim/test_moving.py -k tears_nothing",
    ),
    (
        "padding of moments that are codes is not cleared",
        _C,
        "        if empty:\n",
        "        if not empty:\n",
        "optim/test_coded_moments.py -k padding",
    ),
    (
        "a state is healed although no replica has all of it",
        _D,
        "any(newest not in part for part in parts)",
        "all(newest not in part for part in parts)",
        "optim/test_steps.py",
    ),
    (
        "replicas are healed from the odd one",
        _D,
        "(right, ranks), *others = votes",
        "*others, (right, ranks) = votes",
        "optim/test_drift.py -k healed",
    ),
    (
        "moments of replicas are not compared",
        _D,
        "opt = self._state.opt if self._moments else ()\n        leaves, _",
        "opt = ()\n        leaves, _",
        "optim/test_drift.py -k flipped_bit",
    ),
    (
        "ranks of a partition group decide for themselves",
        _G,
        "comms = [home.partition, home.replicas] if len(homes) > 1 else [home.replicas]",
        "comms = [home.replicas]",
        "optim/test_guard.py -k share_only",
    ),
    (
        "an overflow does not lower the scale",
        _G,
        "value = max(value / self.factor, self.min)",
        "value = max(value, self.min)",
        "optim/test_guard.py -k overflow_on_one_rank",
    ),
    (
        "a refused norm is remembered by the watch",
        _G,
        'if spike and self.action == "skip":',
        'if spike and self.action == "never":',
        "optim/test_guard.py -k spikes",
    ),
    (
        "the last leaf that is not finite is named, not the first",
        _G,
        '"leaf that is not finite").amin(0)',
        '"leaf that is not finite").amax(0)',
        "optim/test_nonfinite.py -k first_leaf",
    ),
    (
        "the norm of float16 is taken in float16",
        _N,
        "norms: list[_Norm] = [(False, None)] * len(pieces)\n"
        "    # The norm of a float16 tensor may exceed float16 although no element does.\n"
        "    for dtype, narrow in ((torch.float32, True)",
        "norms: list[_Norm] = [(False, None)] * len(pieces)\n"
        "    for dtype, narrow in ((None, True)",
        "optim/test_guard.py -k above_what",
    ),
    (
        "clipping scales small gradients up",
        _N,
        "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "max_norm / (norm + 1e-6)",
        "optim/test_guard.py -k single_process",
    ),
    (
        "a state that a step has torn is taken for whole",
        "optim/state.py",
        'writing.covers_leaves(before.leaves, before.spec, "params", to)',
        "pass",
        "optim/test_arriving.py -k whole_or_known",
    ),
    (
        "the fused SGD skips 16-bit elements",
        "optim/optimizers.py",
        'options = {**options, "fused": False}',
        "options = {**options}",
        "optim/test_optim.py -k moves_all",
    ),
    (
        "lion decays what its mask leaves out",
        "optim/optimizers.py",
        "if column.key is not False:\n                    p.mul_",
        "if column.key is not None:\n                    p.mul_",
        "optim/test_optim.py -k lion",
    ),
]
