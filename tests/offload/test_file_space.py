"""Which parts of a file are free, against a set of pages; memory that begins at a page; sums."""

import torch
from hypothesis import given
from hypothesis import strategies as st

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
