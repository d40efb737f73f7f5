"""Which parts of a file are free, against a set of pages; memory that begins at a page; sums."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mics_fn.offload.scratch import PAGE, UNIT, aligned, sums


@given(st.integers(0, 9 * UNIT // PAGE), st.integers(0, 2**32), st.data())
def test_a_flipped_bit_changes_one_sum(pages: int, seed: int, data):
    memory = aligned(pages * PAGE)
    assert memory.numel() == pages * PAGE
    assert pages == 0 or memory.data_ptr() % PAGE == 0
    memory.random_(generator=torch.Generator().manual_seed(seed))
    before = sums(memory)
    words = memory.view(torch.int64)
    assert before.tolist() == [int(part.sum()) for part in words.split(UNIT // 8) if len(part)]
    if pages:
        at = data.draw(st.integers(0, len(memory) - 1))
        memory[at] ^= 1 << data.draw(st.integers(0, 7))
        changed = (sums(memory) != before).nonzero().flatten().tolist()
        assert changed == [at // UNIT]


def test_sums_are_made_on_the_thread_that_asks_for_them():
    """Those that read and write must not start teams of threads beside those that compute."""
    memory, before = aligned(64 * UNIT).zero_(), torch.get_num_threads()

    def started(work: Callable[[Tensor], Tensor]) -> int:
        """How many threads of the system arise while a new thread works."""

        def count() -> int:
            known = set(os.listdir("/proc/self/task"))
            work(memory)
            return len(set(os.listdir("/proc/self/task")) - known)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(count).result()

    torch.set_num_threads(4)
    try:
        assert started(lambda x: x.view(torch.int64).sum()) > 0, "torch makes no teams here"
        assert min(started(sums) for _ in range(3)) == 0  # other tests' threads may arise
    finally:
        torch.set_num_threads(before)
