"""Which parts of a file are free, against a set of pages; memory that begins at a page; sums."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mics_fn.offload.scratch import PAGE, UNIT, Space, aligned, sums


@example([(True, 2), (True, 1), (False, 0), (True, 1), (True, 1)])  # the rest of a freed part
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6))))
def test_parts_never_overlap(calls: list[tuple[bool, int]]):
    space, taken = Space(PAGE), list[tuple[int, int]]()
    used: set[int] = set()
    for takes, number in calls:
        if takes:
            offset = space.take(number * PAGE)
            pages = {offset // PAGE + i for i in range(number)}
            assert not pages & used
            assert 0 not in pages
            used |= pages
            taken.append((offset, number * PAGE))
        elif taken:
            offset, nbytes = taken.pop(number % len(taken))
            used -= {offset // PAGE + i for i in range(nbytes // PAGE)}
            space.give(offset, nbytes)
        assert space.used == PAGE * len(used)
        assert space.end == PAGE * (max(used, default=0) + 1)


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
