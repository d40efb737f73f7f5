"""`help(mics_fn.shards)` names what a bucket goes through, in the order in which it runs."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cases import Layout, groups_of
from test_wings import WINGS

import mics_fn as mf

ROOT = Path(mf.__file__).parent


@contextmanager
def calls() -> Iterator[list[str]]:
    """All calls of functions of the package, as `wing.function` and `file.function`."""
    found: list[str] = []

    def watch(frame: Any, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            wing, name = path.relative_to(ROOT).parts[0], frame.f_code.co_qualname
            found.append(f"{path.stem if wing == 'shards' else wing}.{name}")

    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)


def step_of_rank() -> list[str]:
    torch.manual_seed(0)
    groups, full = groups_of(Layout((2, 2), 2)), {"w": torch.randn(8, 8)}
    with calls() as found:
        params = mf.shard(full, groups)
        state = mf.init_state(params, mf.optim.adamw(1e-2))
        grads = torch.func.grad(lambda shards: mf.gather(shards, groups)["w"].sum())(params)
        mf.opt_step(state, mf.reduce_grads(grads, groups))
    return found


def test_a_bucket_goes_the_way_that_the_page_says(ranks: Callable):
    page = re.search(r"^One bucket on its way.*?(?=^Where)", f"{mf.shards.__doc__}", re.S | re.M)
    named = re.findall(r"`(\w+\.\w+)`", page[0] if page else "")
    assert len(named) > 12
    files = {path.stem for path in (ROOT / "shards").iterdir()} | {*WINGS}
    assert {name.partition(".")[0] for name in named} <= files
    for ran in ranks(4).run(step_of_rank):
        remaining = iter(ran)
        missing = [name for name in named if name not in remaining]
        assert missing == []
