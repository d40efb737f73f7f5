"""Steps on states in files, and on gradients that still arrive: the bits of a step in memory."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import mics_fn as mf
from mics_fn import optim, tree
from mics_fn.offload import in_file, where
from mics_fn.optim.columns import LINE, in_lines
from mics_fn.optim.flat import by_leaf
from mics_fn.shards import GradStream, grad_stream

LEAST = 2**20  # bytes of host memory: blocks of 32,768 elements with two moments
SHAPES = {"a": (70_001,), "b": (7,), "c": (301, 203), "none": (0, 3), "d": (40, 5)}
BUCKET_BYTES = 300_000
# Leaves of one bucket lie in several places.
PLACES = "states=disk:{0}/x, params=disk:{0}/x; *b*: params=host; *d*: states=host"
PLACES += "; *c*: states=disk:{0}/y, params=device"


def values(seed: int) -> dict[str, Tensor]:
    return {k: random(seed + i, *shape) for i, (k, shape) in enumerate(SHAPES.items())}


def spares_small(path: str) -> bool:
    return "b" not in path and "d" not in path


PATTERNS = {"*c*": optim.lion(1e-3), "*b*": optim.sgd(0.1, momentum=0.9)}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda groups: optim.adamw(1e-2, decay_mask=spares_small),
    "sgd": lambda groups: optim.sgd(0.1, momentum=0.9),
    "lion": lambda groups: optim.lion(1e-3, weight_decay=0.1, decay_mask=spares_small),
    "adagrad": lambda groups: optim.from_torch(torch.optim.Adagrad, lr=0.1),
    "by_path": lambda groups: optim.by_path(PATTERNS, default=optim.adam(1e-2)),
    "chain": lambda groups: optim.chain(
        optim.clip_by_global_norm(0.1, groups), optim.clip_by_value(0.5), optim.adamw(1e-2)
    ),
    "own": lambda groups: optim.from_update(
        lambda params: mf.shards.map(torch.zeros_like, params),
        lambda grads, mean, params: (
            mf.shards.map(lambda m, g: -0.1 * (m + g), mean, grads),
            mf.shards.map(lambda m, g: 0.9 * m + g, mean, grads),
        ),
    ),
}


def total_of(shards: Any, groups: Any, seed: int) -> mf.GradSum:
    """Gradients of two micro-steps."""
    total, policy = mf.GradSum(2), mf.on_demand(live_bytes=BUCKET_BYTES)
    with mf.defer(shards, groups, policy, into=total) as full:
        for part in range(2):
            grads = values(100 * seed + 10 * part + groups.rank)
            total.backward(torch.stack([(full[k] * grads[k]).sum() for k in SHAPES]).sum())
    return total


def stepped(groups: Any, make: Any, *, early: bool, donate: bool, place: Any = None) -> Any:
    params = mf.shard(values(0), groups, bucket_bytes=BUCKET_BYTES, where=place)
    state = mf.init_state(params, make(groups), where=place)
    for step in range(2):
        total = total_of(state.params, groups, step)
        old, before = state, copy.deepcopy((state.params, by_leaf(mf.move(state, "").opt)))
        state = mf.opt_step(state, total if early else total.grads(), donate=donate)
        if not donate:
            same_bits((old.params, by_leaf(mf.move(old, "").opt)), before)
        total.release()
    return state


def of_bits(folder: str, name: str, layout: Layout) -> None:
    groups, make = groups_of(layout), OPTIMIZERS[name]
    files, mixed = (
        where(x, host_bytes=LEAST) for x in (f"states=disk:{folder}", PLACES.format(folder))
    )
    want = stepped(groups, make, early=False, donate=False)
    for place, early in ((None, True), (files, False), (mixed, True)):
        for donate in (False, True):
            got = stepped(groups, make, early=early, donate=donate, place=place)
            moments = [x for x in tree.flatten(got.opt)[0] if isinstance(x, Tensor) and x.ndim]
            assert early or all(map(in_file, moments))
            same_bits(mf.move(got, "").params, want.params)
            same_bits(by_leaf(mf.move(got, "").opt), by_leaf(want.opt))


LAYOUTS = [Layout((1,), 1), Layout((2,), 1), Layout((2, 2), 2), Layout((2, 2), 4)]
CASES = [(layout, "adamw") for layout in LAYOUTS]
CASES += [(LAYOUTS[i], name) for name in OPTIMIZERS for i in (0, 1) if name != "adamw"]


@pytest.mark.parametrize(("layout", "name"), CASES, ids=str)
def test_a_step_on_files_or_on_a_stream_has_the_bits_of_one_in_memory(
    ranks, tmp_path, layout, name
):
    ranks(layout.world_size).run(of_bits, f"{tmp_path}", name, layout)


class Fault(Exception):
    pass


class Broken:
    """Gradients of which one bucket never comes."""

    def __init__(self, total: mf.GradSum, at: int):
        self.total, self.at = total, at

    def __grad_stream__(self) -> Any:
        found: Any = grad_stream(self.total)
        calls = iter(range(100))

        def take(place: int) -> Any:
            if next(calls) == self.at:
                raise Fault
            return found.take(place)

        return replace(found, take=take, here=lambda place: False)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("at", [0, 1])
def test_a_state_is_whole_or_known_to_be_lost(donate, at):
    groups = mf.make_groups(1)
    params = mf.shard(values(0), groups, bucket_bytes=BUCKET_BYTES)
    state = mf.init_state(params, optim.adamw(1e-2))
    before = tree.map_leaves(torch.clone, state.params)
    total = total_of(state.params, groups, 0)
    with pytest.raises(Fault):
        mf.opt_step(state, Broken(total, at), donate=donate)
    if at and donate:
        lost = "is lost: opt_step at step 0 was cut short while it wrote it"
        with pytest.raises(mf.errors.LostStateError, match=lost):
            mf.gather(state.params, groups)
        with pytest.raises(mf.errors.LostStateError, match=lost):
            by_leaf(state.opt)
    else:
        same_bits(state.params, before)
    total.release()


@settings(max_examples=40)
@drawn(st.integers(0, 300), st.integers(1, 700), st.lists(st.integers(0, 1000), max_size=4))
def test_parts_of_a_column_have_the_bits_of_the_whole(start, length, cuts):
    """Of a fused kernel, which rounds the last elements of a tensor in another way."""
    stop = start + length
    every = [random(length + i, stop) for i in range(4)]
    every[2] = every[2].square()

    def step(p: Tensor, m: Tensor, v: Tensor, g: Tensor) -> None:
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            *([p], [g], [m], [v], [], [torch.tensor(3.0)]), lr=1e-2, beta1=0.9, beta2=0.999,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    want, got = [x.clone() for x in every], [x.clone() for x in every]
    step(*(x[start:] for x in want))
    bounds = sorted({start, stop, *(cut for cut in cuts if start < cut < stop)})
    for a, b in zip(bounds, bounds[1:], strict=False):
        after = min(stop - b, (start - b) % LINE)
        part = in_lines([x[a:b] for x in got], 3, (a - start) % LINE, after)
        step(*part.tensors)
        if part.finish is not None:
            part.finish()
    same_bits(got, want)


class Given:
    """Gradients by bucket, all of which are here."""

    def __init__(self, grads: Any):
        self._grads = grads

    def __grad_stream__(self) -> GradStream:
        found = [x.data for x in self._grads.values()]
        order = [[i] for i in range(len(found))]
        return GradStream(self._grads, None, order, lambda _: True, lambda place: [found[place]])


@pytest.mark.parametrize("given", [dict, Given])
def test_gradients_in_the_memory_of_parameters(tmp_path, given):
    """Of one rank they lie where they were made: none may change before it is used."""
    groups, plain = mf.make_groups(1), {k: random(i, 50) for i, k in enumerate("abc")}
    for place in (None, f"states=disk:{tmp_path}"):
        found = []
        for shared in (False, True):
            shards = mf.shard(plain, groups, bucket_bytes=200)
            state = mf.init_state(shards, optim.sgd(0.5, momentum=0.9), where=place)
            own = {k: x.data for k, x in state.params.items()}
            grads = {"a": own["b"], "b": own["c"], "c": own["a"]}
            grads = grads if shared else {k: x.clone() for k, x in grads.items()}
            grads = mf.reduce_grads(grads, groups, like=state.params)
            assert (grads["a"].data.data_ptr() == own["b"].data_ptr()) is shared
            state = mf.opt_step(state, given(grads), donate=True)
            found.append((state.params, by_leaf(mf.move(state, "").opt)))
        same_bits(*found)
