"""Mistakes in deferred parameters and sums; `planting.py` checks that tests catch them."""

_L, _R, _T = "deferred/live.py", "deferred/reduction.py", "deferred/tensor.py"
_G = "deferred/grad_sum.py"

PLANTED = [
    (
        "the sum over micro-steps is not divided by their number",
        _R,
        "return self.micro_steps / use.route.grad_factor",
        "return 1 / use.route.grad_factor",
        "deferred/test_placement.py -k single_process",
    ),
    (
        "a sum without other ranks lies in what autograd gave twice",
        _R,
        "copy = written or self._divisor(use) != 1",
        "copy = False",
        "deferred/test_runs.py -k one_tensor",
    ),
    (
        "gradients take the memory of parameters in the first of several passes",
        _R,
        "return self.last and moves and fits and self._run.lets_go(index)",
        "return moves and fits and self._run.lets_go(index)",
        "deferred/test_let_go.py -k same_bits",
    ),
    (
        "the ring of reductions is twice as large",
        _R,
        "return max(*needs, few, LEAST_RING), count",
        "return 2 * max(*needs, few, LEAST_RING), count",
        "deferred/test_hops.py",
    ),
    (
        "a sum in files forgets the passes before",
        _R,
        "if number:\n                before",
        "if number > 1:\n                before",
        "deferred/test_placed_sums.py -k sums_in_files",
    ),
    (
        "a bucket without a gradient on one rank is left out there",
        _R,
        "self.add(index, [None] * len(self.uses[index].members))",
        "self.skip(index)",
        "deferred/test_uneven.py",
    ),
    (
        "a bucket is read though its shards were written to",
        _L,
        "if version(self._chunks[i]) != self._versions[i]:",
        "if self._closed:",
        "deferred/test_donated.py -k refused_once",
    ),
    (
        "a write to a parameter that needs no fetch is not found",
        _L,
        "wrong = [not torch.equal(_bits(now), _bits(before)) for now, before in pairs]",
        "wrong = [False for _ in pairs]",
        "deferred/test_copies.py",
    ),
    (
        "a parameter is used after its run ended",
        _L,
        "if self._closed:\n            text",
        "if not self.buckets:\n            text",
        "deferred/test_ends.py",
    ),
    (
        "an update does not wait for gathers of what it writes to",
        "optim/columns.py",
        "finish_readers([x for x in parts if not is_coded(x)])",
        "pass",
        "deferred/test_donated.py -k when_it_began",
    ),
    (
        "the result of an op lies in the memory of a bucket",
        _T,
        "if bucket.low <= at < bucket.high and out.numel():",
        "if bucket.low < at < bucket.high and out.numel():",
        "deferred/test_deferred.py -k never_share",
    ),
    (
        "as_strided reads one element of the next leaf",
        _T,
        "if at < start or stop > start + numel:",
        "if at < start or stop > start + numel + 1:",
        "deferred/test_deferred.py -k what_people_do",
    ),
    (
        "out= writes to a parameter",
        _T,
        "_search([given.get(name) for name in _torch.op_writes(func)], [])",
        "_search(args, [])",
        "deferred/test_deferred.py -k what_people_do",
    ),
    (
        "a step is refused though one rank has a gradient",
        _G,
        "if n == 1 or self._run.tally(self._event(), 0) == n:",
        "if n == 1 or self._run.tally(self._event(), 0) > 0:",
        "deferred/test_graph.py -k one_rank_with",
    ),
]
