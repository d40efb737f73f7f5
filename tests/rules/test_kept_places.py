"""What a verb gives lies where its argument lay, and has the bits of the same in memory.

The twin is the same verb on the same values in memory.
"""

import inspect
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from test_api import public_functions
from torch import Tensor

import mics_fn as mf
from mics_fn import offload, optim, tree
from mics_fn.collectives import collect_bytes
from mics_fn.offload import Scratch, in_file, placed_like, store
from mics_fn.optim.flat import by_leaf

SHAPES = {"a": (301, 23), "b": (7,), "c": (64, 33), "none": (0, 3), "still": (5, 2)}
PARAMS = "params=disk:{0}; *b*: params=device"
BOTH = "params=disk:{0}/p, states=disk:{0}/s; *b*: params=device; *c*: states=device"
LEAST = 2**20
ADAMW = optim.adamw(1e-2)


def values(seed: int) -> dict[str, Tensor]:
    found = {k: random(seed + i, *shape) for i, (k, shape) in enumerate(SHAPES.items())}
    return {**found, "still": torch.nn.Parameter(found["still"], requires_grad=False)}


def shards_in(groups: mf.Groups, text: str, seed: int = 0) -> Any:
    return mf.shard(values(seed), groups, bucket_bytes=10_000, where=offload.where(text))


def grads_of(groups: mf.Groups, seed: int = 5) -> Any:
    return mf.reduce_grads(values(seed), groups, like=shards_in(groups, ""))


def state_in(groups: mf.Groups, text: str) -> Any:
    """A state of one step, so that no moment is zero."""
    where = offload.where(text, host_bytes=LEAST)
    params = mf.shard(values(0), groups, bucket_bytes=10_000, where=where)
    state = mf.init_state(params, ADAMW, where=where)
    return mf.opt_step(state, grads_of(groups), donate=True)


def places(value: Any) -> list[str]:
    """Where each tensor lies, by the paths of the tree without its nodes for optimizers."""
    plain = by_leaf(value)
    named = zip(tree.paths(plain), tree.flatten(plain)[0], strict=True)
    return [f"{path}: {place(x)}" for path, x in named if isinstance(x, Tensor) and x.numel()]


def place(x: Any) -> str:
    return str(x.extent.scratch.folder) if in_file(x) else str(x.device)


def merged(make: Callable[[], Any], donate: bool, params: Any, groups: mf.Groups) -> Any:
    sync = make()
    state = sync.init(params, groups)
    moved = mf.shards.map(lambda x: x + groups.position, params)
    return sync.after(moved, state, groups, donate=donate)[0]


def loaded(value: Any, groups: mf.Groups) -> Any:
    with tempfile.TemporaryDirectory() as own:
        folder = collect_bytes(groups, own.encode())[groups.ranks[0]].decode()
        mf.checkpoint.save(folder, value, groups, step=1)
        found = mf.checkpoint.load(folder, value, groups).state
        collect_bytes(groups, b"")  # all have read it
        return found


def judged(guard: Any, donate: bool, grads: Any, groups: mf.Groups) -> Any:
    return guard.judge(grads, groups, donate=donate).grads


# By the name of the verb: functions from a tree of shards, and from a state.
OF_SHARDS: dict[str, Callable[[Any, mf.Groups], Any]] = {
    "shards.map": lambda x, groups: mf.shards.map(lambda a, b: a * 2 + b, x, x),
    "shards.map, the same": lambda x, groups: mf.shards.map(lambda a: a, x),
    "set": lambda x, groups: mf.set(x, "a", 2.0, groups),
    "set, frozen": lambda x, groups: mf.set(x, "still", 2.0, groups),
    "sync_replicas": mf.sync_replicas,
    "sync_replicas, exact": partial(mf.sync_replicas, exact=True),
    "reduce_grads": mf.reduce_grads,
    "checkpoint.load": loaded,
    "opt_step": lambda x, groups: (
        mf.opt_step(
            mf.init_state(x, optim.from_torch(torch.optim.Adagrad, lr=0.1)), grads_of(groups)
        ).params
    ),
    "opt_step, donated": lambda x, groups: (
        mf.opt_step(mf.init_state(x, optim.lion(0.1)), grads_of(groups), donate=True).params
    ),
    "init_state": lambda x, groups: mf.init_state(x, optim.sgd(0.1)).params,
    "Guard.judge": partial(judged, optim.Guard(max_norm=0.1), False),
    "Guard.judge, donated": partial(judged, optim.Guard(optim.static_scale(8.0)), True),
    "local_sgd": partial(merged, lambda: mf.replicas.local_sgd(1), False),
    "local_sgd, donated": partial(merged, lambda: mf.replicas.local_sgd(1), True),
    "diloco": partial(merged, lambda: mf.replicas.diloco(1), False),
    "diloco, donated": partial(merged, lambda: mf.replicas.diloco(1), True),
    "diloco, its anchor": lambda x, groups: mf.replicas.diloco(2).init(x, groups).outer.params,
    "tree of shards": lambda x, groups: tree.map_leaves(lambda leaf: leaf, x),
}


OF_STATES: dict[str, Callable[[Any, mf.Groups], Any]] = {
    "opt_step": lambda x, groups: mf.opt_step(x, grads_of(groups, 11)),
    "opt_step, donated": lambda x, groups: mf.opt_step(x, grads_of(groups, 11), donate=True),
    "set, a parameter": lambda x, groups: mf.set(x, "params.a", 2.0, groups),
    "set, a moment": lambda x, groups: mf.set(x, "opt.moments.exp_avg.a", 2.0, groups),
    "same_step": mf.same_step,
    "same_replicas": mf.same_replicas,
    "checkpoint.load": loaded,
    "optim.relayout": lambda x, groups: mf.optim.relayout(x, x, groups),
}
# Public functions of shards or states that give none, or whose places are an argument.
OTHERS = {
    *("gather", "unshard", "defer", "get", "summary", "shards.as_dtensors"),  # full values
    *("record", "bucket_sizes", "optim.global_norm", "optim.leaf_norms", "optim.inner"),  # numbers
    *("checkpoint.save", "checkpoint.start_save", "checkpoint.save_pretrained"),
    *("checkpoint.save_dcp", "checkpoint.verify", "sampler", "placement.place"),
    *("move", "shard", "load_shards"),  # they have `where=`
    "scatter_grads",  # gradients of full values arise on the device
}


def kept(verb: Callable[..., Any], make: Callable[..., Any], text: str, layout: Layout) -> None:
    groups = groups_of(layout)
    with tempfile.TemporaryDirectory() as folder:
        want, given = verb(make(groups, ""), groups), make(groups, text.format(folder))
        before = places(given)
        assert any(folder in each for each in before)
        found = verb(given, groups)
        assert places(found) == before
        same_bits(as_read(found), as_read(want))
        del given, found


def as_read(value: Any) -> Any:
    return tree.map_leaves(
        lambda x: offload.read(x) if isinstance(x, Tensor) else x, by_leaf(value)
    )


ALONE, COPIES, MIXED = Layout((1,), 1), Layout((2,), 1), Layout((2, 2), 2)


@pytest.mark.parametrize("name", OF_SHARDS)
def test_shards_stay_where_they_are(name):
    kept(OF_SHARDS[name], shards_in, PARAMS, ALONE)


@pytest.mark.parametrize("name", OF_STATES)
def test_states_stay_where_they_are(name):
    kept(OF_STATES[name], state_in, BOTH, ALONE)


def every_verb(layout: Layout) -> None:
    for verb in OF_SHARDS.values():
        kept(verb, shards_in, PARAMS, layout)
    for verb in OF_STATES.values():
        kept(verb, state_in, BOTH, layout)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [COPIES, MIXED], ids=str)
def test_all_verbs_on_ranks(ranks, layout):
    ranks(layout.world_size).run(every_verb, layout)


def test_every_verb_of_shards_is_asked():
    """By the names of first arguments: who adds a verb says where its result lies."""
    of_shards = {"shards", "state", "params", "grads", "like", "value", "a"}
    known = {name.partition(",")[0] for name in (*OF_SHARDS, *OF_STATES)} | OTHERS
    for name, fn in public_functions().items():
        own = set(itertools.islice(inspect.signature(fn).parameters, 2))
        if own & of_shards and not name.startswith(("offload.", "where", "init_model")):
            assert name in known, name


def test_a_trainer_that_takes_its_state_back(tmp_path):
    groups = mf.make_groups(1)

    def made(**options: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 1))
        loss = lambda model, x: model(x).square().mean()  # noqa: E731
        return mf.Trainer(model, ADAMW, groups, loss=loss, **options)

    first, second = made(), made(where=f"params=disk:{tmp_path}, states=disk:{tmp_path}")
    first.step(random(1, 4, 40))
    before = places(second.state)
    mf.Checkpoints(tmp_path / "saved").save(first)
    mf.Checkpoints(tmp_path / "saved").begin(second)
    assert places(second.state) == before
    same_bits(as_read(second.state.params), first.state.params)
    for trainer in (first, second):
        trainer.step(random(2, 4, 40))
    same_bits(as_read(second.state.params), first.state.params)
    assert places(second.state) == before


def test_what_lay_together_does_so_again(tmp_path):
    """Pieces of one part of a file, with gaps, and in two files."""
    one, other = Scratch(tmp_path / "one"), Scratch(tmp_path / "other")
    whole, far = store(random(1, 10_000), one, "w"), store(random(2, 50), other, "far")
    old = [whole[5_000:6_000], whole[:3], far, whole[4_000:5_000], whole[7:7]]
    new = [random(10 + i, *x.shape) for i, x in enumerate(old)]
    found: list[Any] = placed_like(new, old)
    same_bits([offload.read(x) for x in found], new)
    assert [x.extent.scratch for x in found] == [one, one, other, one, one]
    assert [x.start for x in found] == [x.start for x in old]  # pyright: ignore
    assert {found[i].extent for i in (0, 1, 3, 4)} == {found[0].extent} != {whole.extent}  # pyright: ignore
    again = placed_like(found, old)
    assert all(x is y for x, y in zip(again, found, strict=True)), "what is in its file stays"
    moved: list[Any] = placed_like([whole], [far])
    assert moved[0].extent.scratch is other
    same_bits([offload.read(moved[0])], [random(1, 10_000)])
    assert not in_file(placed_like([whole], [torch.ones(1)])[0])


def test_what_carries_a_derivative_stays_in_memory(tmp_path):
    groups = mf.make_groups(1)
    shards = shards_in(groups, f"params=disk:{tmp_path}")
    factor = torch.tensor(2.0, requires_grad=True)
    found = mf.shards.map(lambda x, c: x * c, shards, factor)
    assert not in_file(found["a"].data)
    found["a"].data.sum().backward()
    assert torch.allclose(factor.grad, values(0)["a"].sum())  # pyright: ignore
    with torch.no_grad():
        assert in_file(mf.shards.map(lambda x, c: x * c, shards, factor)["a"].data)
