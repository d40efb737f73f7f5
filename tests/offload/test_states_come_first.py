"""Guarded steps on states in files: the bits of memory, and one that is refused writes nothing."""

import gc
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from disks import files_of as open_files
from torch import Tensor

import mics_fn as mf
from mics_fn import offload, optim, tree
from mics_fn.offload import in_file
from mics_fn.optim.flat import by_leaf
from mics_fn.shards import GradStream

SHAPES = {"a": (301, 43), "b": (7,), "c": (300, 330), "d": (90, 11), "none": (0, 3)}
HOST_BYTES = 2**20
ALONE, PAIR, SPLIT, BOTH = (Layout(*x) for x in (((1,), 1), ((2,), 1), ((2,), 2), ((2, 2), 2)))
# Leaves of one bucket lie in several places.
PLACES = "states=disk:{0}/x, grads=host, params=disk:{0}/x; *b*: params=host; *d*: states=host"
PLACES += "; *c*: states=disk:{0}/y, params=device"
OPTIMIZERS: dict[str, Any] = {
    "adamw": optim.adamw(1e-2),
    "by_path": optim.by_path({"*a*": optim.lion(1e-3)}, default=optim.adam(1e-2)),
    "chain": optim.chain(optim.clip_by_value(0.5), optim.sgd(0.1, momentum=0.9)),
}
GUARDS: dict[str, Callable[[], optim.Guard]] = {
    "skip": lambda: optim.Guard(on_nonfinite="skip"),
    "clip": lambda: optim.Guard(max_norm=0.1, max_value=0.05, on_nonfinite="ignore"),
    "all": lambda: optim.Guard(
        optim.dynamic_scale(8.0), max_norm=1.0, spike=optim.norm_spike(10.0, warmup=1)
    ),
}
FACTORS = [1.0, math.nan, 1e4, 1.5]  # of the loss of each step: taken or refused


def values(shapes: dict[str, Any]) -> dict[str, Tensor]:
    return {k: random(i, *shape) for i, (k, shape) in enumerate(shapes.items())}


def loss_of(full: Any, step: int, rank: int) -> Tensor:
    losses = [(x * (step + 1 + rank / 8)).sin().mean() for k, x in full.items() if k != "none"]
    return torch.stack(losses).sum() * FACTORS[step]


def summed(state: Any, groups: mf.Groups, guard: optim.Guard, step: int, where: Any) -> Any:
    """Gradients of which hop 2 is under way."""
    total = mf.GradSum(where=where)
    with mf.defer(state.params, groups, mf.on_demand(live_bytes=0), into=total) as full:
        total.backward(guard.scale.scale(loss_of(full, step, groups.rank)))
    return total


def read(state: Any) -> Any:
    held = state.params, by_leaf(state.opt)
    return tree.map_leaves(lambda x: x + 0 if isinstance(x, Tensor) else x, held)


def files_of(state: Any) -> list[bytes]:
    """The contents of all parts of scratch files that a state lies in."""
    parts = {x.extent: x.extent for x in tree.flatten(state)[0] if in_file(x)}
    return [bytes(part.view(0, part.nbytes).tolist()) for part in parts]


def made(groups: mf.Groups, optimizer: Any, where: Any, shapes: Any = SHAPES) -> Any:
    params = mf.shard(values(shapes), groups, bucket_bytes=400_000, where=where)
    return mf.init_state(params, optimizer, where=where)


def guarded_step(
    state: Any, grads: Any, guard: optim.Guard, groups: mf.Groups, donate: bool
) -> tuple[Any, Any]:
    """A step on gradients that are judged once its states are asked for, as that of a `Trainer`."""
    found = list[Any]()

    def judged() -> Any:
        found.append(guard.judge(grads, groups, donate))
        if not found[0].accept:
            raise optim.StepRefused
        return found[0].grads

    try:
        return mf.opt_step(state, optim.lazy_grads(grads, judged), donate=donate), found[0]
    except optim.StepRefused:
        return state, found[0]


def guarded(
    groups: mf.Groups, name: str, guard: optim.Guard, text: str, kind: str, donate: bool
) -> list[Any]:
    """What each step gave. Refused ones leave the state, its files and the threads as they were."""
    where = offload.where(text, host_bytes=HOST_BYTES)
    state, found = made(groups, OPTIMIZERS[name], where), []
    for step in range(len(FACTORS)):
        total = summed(state, groups, guard, step, where if kind == "placed" else None)
        grads = total.grads() if kind == "tree" else total
        before, held, files = state, read(state), files_of(state)
        threads = threading.active_count()
        if text:
            state, verdict = guarded_step(state, grads, guard, groups, donate=donate)
        else:  # the slow twin
            verdict = guard.judge(grads, groups)
            state = mf.opt_step(state, verdict.grads) if verdict.accept else state
        assert threading.active_count() <= threads
        if not verdict.accept:
            assert state is before
            assert files_of(state) == files or not donate  # else new parts may have been taken
        if not (verdict.accept and donate and text):
            same_bits(read(before), held)
        total.release()
        guard = verdict.next
        found.append((read(state), verdict._replace(grads=None, next=None), f"{guard}"))
    return found


def of_bits(layout: Layout, name: str, guard: str, kind: str, folder: str) -> list[bool]:
    groups = groups_of(layout)
    want = guarded(groups, name, GUARDS[guard](), "", "tree", donate=False)
    for donate in (False, True):
        text = PLACES.format(folder)
        found = guarded(groups, name, GUARDS[guard](), text, kind, donate)
        for (got, verdict, after), (other, want_verdict, want_after) in zip(
            found, want, strict=True
        ):
            same_bits(got, other)
            assert repr(verdict) == repr(want_verdict)
            assert after == want_after
        gc.collect()
    return [verdict.accept for _, verdict, _ in want]


def nothing_open(folder: str) -> None:
    gc.collect()  # a busy rank may have a file for a moment longer
    assert not open_files(folder)


@pytest.mark.parametrize(
    ("layout", "name", "guard", "kind"),
    [
        (ALONE, "by_path", "skip", "placed"),
        (PAIR, "adamw", "all", "sum"),
        pytest.param(SPLIT, "chain", "clip", "tree", marks=pytest.mark.thorough),
        pytest.param(BOTH, "chain", "all", "placed", marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_the_bits_of_judge_and_opt_step_in_memory(ranks, tmp_path, layout, name, guard, kind):
    taken = ranks(layout.world_size).run(of_bits, layout, name, guard, kind, f"{tmp_path}")
    refused = {"skip": [1], "clip": [], "all": [1, 2]}[guard]
    assert taken == [[step not in refused for step in range(len(FACTORS))]] * layout.world_size
    ranks(layout.world_size).run(nothing_open, f"{tmp_path}")


def of_few_elements(folder: str) -> None:
    """A rank without elements of what is in files judges with the others, and writes nothing."""
    groups = groups_of(Layout((4,), 4))
    guard = optim.Guard(max_norm=1.0, on_nonfinite="skip")
    for where in ("", f"states=disk:{folder}"):
        params = mf.shard({"w": random(0, 3), "v": random(1, 2)}, groups, bucket_bytes=12)
        state = mf.init_state(params, optim.adamw(1e-2), where=where)
        for factor in (1.0, math.nan, 2.0):
            grads = {k: random(2, *x.shape) * factor for k, x in params.items()}
            grads = mf.reduce_grads(grads, groups, like=state.params)
            before, held = state, read(state)
            state, verdict = guarded_step(state, grads, guard, groups, donate=True)
            assert verdict.accept is math.isfinite(factor)
            if not verdict.accept:
                assert state is before
                same_bits(read(state), held)
        assert state.step == 2


def test_ranks_without_elements_judge_with_the_others(ranks, tmp_path):
    ranks(4).run(of_few_elements, f"{tmp_path}")


class Given:
    """Gradients by bucket, all of which are here."""

    def __init__(self, grads: Any):
        self._grads = grads

    def __grad_stream__(self) -> GradStream:
        found = [x.data for x in self._grads.values()]
        order = [[i] for i in range(len(found))]
        take = lambda place: [found[place]]  # noqa: E731
        return GradStream(self._grads, None, order, lambda _: True, take)


@pytest.mark.parametrize("kind", ["tree", "arriving", "late"])
def test_gradients_in_the_memory_of_parameters(tmp_path, kind):
    """Of one rank they lie where they were made: none may change before it is used."""
    groups, plain = mf.make_groups(1), {k: random(i, 50) for i, k in enumerate("abc")}
    guard = optim.Guard(on_nonfinite="skip")
    for where in (None, f"states=disk:{tmp_path}"):
        found = []
        for shared in (False, True):
            shards = mf.shard(plain, groups, bucket_bytes=200)
            state = mf.init_state(shards, optim.sgd(0.5, momentum=0.9), where=where)
            held = {k: x.data for k, x in state.params.items()}
            grads = {"a": held["b"], "b": held["c"], "c": held["a"]}
            grads = grads if shared else {k: x.clone() for k, x in grads.items()}
            grads = mf.reduce_grads(grads, groups, like=state.params)
            assert (grads["a"].data.data_ptr() == held["b"].data_ptr()) is shared
            if kind == "late":
                state = mf.opt_step(
                    state, optim.lazy_grads(Given(grads), lambda g=grads: g), donate=True
                )
            else:
                given = grads if kind == "tree" else Given(grads)
                state, _ = guarded_step(state, given, guard, groups, donate=True)
            found.append(read(state))
        same_bits(*found)
