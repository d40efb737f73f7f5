"""Which parts of a file are free, against a set of pages; memory that begins at a page; sums."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mics_fn.offload.scratch import PAGE, UNIT, Space, aligned, layout, padded, sums


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


@given(st.lists(st.integers(0, 3 * PAGE), max_size=5))
def test_layout(sizes: list[int]):
    starts, end = layout(sizes)
    assert [start % PAGE for start in starts] == [0] * len(sizes)
    assert [*starts, end][1:] == [a + padded(n) for a, n in zip(starts, sizes, strict=True)]


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


def advice_on(address: int) -> list[str]:
    """What the system was asked to do with the memory at an address; [] where it does not say."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if name == "VmFlags:" and inside:
            return rest.split()
        if not name.endswith(":"):
            low, high = (int(end, 16) for end in name.split("-"))
            inside = low <= address < high
    return []


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages"
)
def test_large_memory_is_asked_for_in_huge_pages():
    """A disk fills it with a fraction of the requests."""
    memory = aligned(2**23)
    assert "hg" in advice_on(memory.data_ptr() + len(memory) // 2)
