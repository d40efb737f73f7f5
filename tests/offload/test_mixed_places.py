"""Leaves of one tree on the device, on the host and in two folders: the bits of all in memory."""

import gc
import signal
import threading
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from children import await_interrupt, in_child
from torch import Tensor

import mics_fn as mf
from mics_fn import offload, optim, tree
from mics_fn.offload import is_stored
from mics_fn.optim.flat import by_leaf

SHAPES = {"a": (301, 23), "b": (7,), "c": (64, 33), "d": (90, 11), "none": (0, 3)}
# What is said of parameters, then of states; leaves of one bucket lie in several places.
PLACES = {
    "params": "params=disk:{0}/x; *b*: params=host; *c*: params=disk:{0}/y; *d*: params=device",
    "states": "states=disk:{0}/x; *b*: states=host; *c*: states=disk:{0}/y; *d*: states=device",
    "both": "params=disk:{0}/x, states=device; *c*: states=disk:{0}/y; *a*: params=host",
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": optim.adamw(1e-2),
    "chain": optim.chain(optim.clip_by_value(0.5), optim.sgd(0.1, momentum=0.9)),
    "by_path": optim.by_path({"*a*": optim.lion(1e-3)}, default=optim.adam(1e-2)),
}


def values(seed: int) -> dict[str, Tensor]:
    return {k: random(seed + i, *shape) for i, (k, shape) in enumerate(SHAPES.items())}


def loss_of(full: Any, step: int) -> Tensor:
    return torch.stack([(x * (step + 1)).sin().sum() for x in full.values()]).sum()


def stepped(
    groups: mf.Groups, name: str, text: str, bucket_bytes: int, donate: bool
) -> tuple[list[Any], bool]:
    """The states after three steps, of which the second is on a sum that arrives.

    And whether some of this rank's part is in files.
    """
    where = offload.where(text, host_bytes=2**20)
    params = mf.shard(values(0), groups, bucket_bytes=bucket_bytes, where=where)
    state, found = mf.init_state(params, OPTIMIZERS[name], where=where), []
    for step in range(3):
        total = mf.GradSum()
        with mf.defer(state.params, groups, mf.on_demand(), into=total) as full:
            total.backward(loss_of(full, step))
        before, held = state, read(state)
        state = mf.opt_step(state, total if step == 1 else total.grads(), donate=donate)
        if not donate:
            same_bits(read(before), held)
        total.release()
        found.append(read(state))
    return found, any(is_stored(x) for x in tree.flatten(state)[0])


def read(state: Any) -> Any:
    kept = state.params, by_leaf(state.opt)
    return tree.map_leaves(lambda x: x + 0 if isinstance(x, Tensor) else x, kept)


def of_bits(folder: str, layout: Layout, name: str, place: str, bucket_bytes: int) -> bool:
    """Whether some of this rank's part was in files; it may have a leaf in memory alone."""
    groups = groups_of(layout)
    want, stored = stepped(groups, name, "", bucket_bytes, donate=False)
    assert not stored
    for donate in (False, True):
        text = PLACES[place].format(f"{folder}/{groups.position}-{donate}")
        found, stored = stepped(groups, name, text, bucket_bytes, donate)
        same_bits(found, want)
        gc.collect()
    return stored


ALONE, PAIR, BOTH = Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2)
CASES = list(product([ALONE, PAIR, BOTH], OPTIMIZERS, PLACES, [600, 100_000]))


@pytest.mark.covering
@pytest.mark.parametrize(("layout", "name", "place", "bucket_bytes"), CASES, ids=str)
def test_mixed_places_have_the_bits_of_memory(ranks, tmp_path, layout, name, place, bucket_bytes):
    how = f"{tmp_path}", layout, name, place, bucket_bytes
    assert any(ranks(layout.world_size).run(of_bits, *how))
    assert not list(tmp_path.rglob("*.scratch"))


def test_ctrl_c_in_a_step_leaves_no_thread_and_the_old_state(tmp_path):
    """At many instants of a step that writes new files, and of one in place, which ends first."""
    assert in_child(partial(interrupted, tmp_path)) == 0


def interrupted(folder: Path) -> None:
    groups = mf.make_groups(1)
    where = offload.where(f"states=disk:{folder}", host_bytes=2**20)
    params = mf.shard({"w": random(0, 400, 400)}, groups)
    grads = mf.reduce_grads({"w": random(1, 400, 400)}, groups)
    state = mf.init_state(params, OPTIMIZERS["adamw"], where=where)
    state, threads = mf.opt_step(state, grads), threading.active_count()
    held, want = read(state), read(mf.opt_step(state, grads))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    stopped = 0
    for trial in range(24):
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005 * (1 + trial))
            mf.opt_step(state, grads)
            time.sleep(0.1)
        except KeyboardInterrupt:
            stopped += 1
        limit = time.monotonic() + 5
        while threading.active_count() > threads and time.monotonic() < limit:
            time.sleep(0.001)
        assert threading.active_count() <= threads
        same_bits(read(state), held)
    assert stopped
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        state = mf.opt_step(state, grads, donate=True)
        await_interrupt()
    except KeyboardInterrupt:
        pass
    same_bits(read(state), want)
