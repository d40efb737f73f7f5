"""Optimizers of whole matrices: on any layout the bits of torch's classes in one process."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import LAYOUTS, Layout, groups_of, random, small_first
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import optim
from mics_fn.errors import FileError, LeafError, PlanError
from mics_fn.shards import Sharded, is_leaf, pieces
from mics_fn.shards.bucket import WASTE, Formats, LeafSpec, plan_buckets

PAIR, BOTH = Layout((2,), 2), Layout((2, 2), 2)
STEPS = 3
SHAPES = {
    **{f"blocks.{i}.{name}": (24 * rows, 24 * columns) for i in range(3)
       for name, rows, columns in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4))},
    "embed": (70, 24),
    "norm": (24,),
}  # fmt: skip
KINDS = {
    "muon": (partial(optim.muon, 0.02), partial(torch.optim.Muon, lr=0.02)),
    "Muon": (
        partial(optim.from_torch, torch.optim.Muon, lr=0.02, adjust_lr_fn="match_rms_adamw"),
        partial(torch.optim.Muon, lr=0.02, adjust_lr_fn="match_rms_adamw"),
    ),
    "Adafactor": (
        partial(optim.from_torch, torch.optim.Adafactor, lr=0.02),
        partial(torch.optim.Adafactor, lr=0.02),
    ),
}


def values() -> dict[str, Tensor]:
    return {name: random(i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}


def exact_grads(step: int, rank: int) -> dict[str, Tensor]:
    """Gradients of whole numbers, whose means over up to 8 ranks are exact in any order."""
    made = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randint(-64, 64, shape, generator=made).float()
        for name, shape in SHAPES.items()
    }


def mean_grads(step: int, n: int) -> dict[str, Tensor]:
    every = [exact_grads(step, rank) for rank in range(n)]
    return {name: sum(each[name] for each in every) / n for name in SHAPES}  # pyright: ignore


def by_kind(kind: str) -> optim.Transform:
    return optim.by_path({"blocks*": KINDS[kind][0]()}, default=optim.adamw(3e-4))


def twin(kind: str, steps: int, n: int) -> dict[str, Tensor]:
    """One process with all of each parameter, by torch alone."""
    params = {name: x.requires_grad_() for name, x in values().items()}
    mine = [x for name, x in params.items() if name.startswith("blocks")]
    others = [x for name, x in params.items() if not name.startswith("blocks")]
    both = [KINDS[kind][1](mine), torch.optim.AdamW(others, 3e-4, weight_decay=1e-2, fused=True)]
    for step in range(steps):
        for name, grad in mean_grads(step, n).items():
            params[name].grad = grad
        for each in both:
            each.step()
    return {name: x.detach() for name, x in params.items()}


def all_shards(state: Any) -> list[Any]:
    leaves = mf.tree.flatten((state.params, optim.by_leaf(state.opt)), is_leaf)[0]
    return [x for x in leaves if isinstance(x, Sharded)]


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, x in wanted.items():
        assert torch.equal(found[name], x), name


# Bits, bytes and layouts


def poison_padding(shards: Any, groups: mf.Groups) -> None:
    """Make what no leaf has of this rank's chunks NaN."""
    for bucket in {x.bucket for x in shards.values()}:
        data = next(x.data for x in shards.values() if x.bucket is bucket)
        chunk = torch.empty(0).set_(data.untyped_storage())
        assert len(chunk) == bucket.chunk
        padding = torch.ones(bucket.chunk, dtype=torch.bool)
        for start, length, _ in pieces(bucket, groups.hierarchy.route.chunk):
            padding[start : start + length] = False
        chunk[padding] = float("nan")


def stepped(layout: Layout, kind: str, scheme: str = "", where: str = "") -> None:
    groups, optimizer = groups_of(layout), by_kind(kind)
    if scheme:
        groups = mf.placement.place(groups, scheme)
    shards = mf.shard(values(), groups, whole=optimizer.whole, bucket_bytes=40_000)
    for name, x in shards.items():
        if name.startswith("blocks"):
            assert x.data.numel() in (0, math.prod(SHAPES[name])), name
    poison_padding(shards, groups)
    state, n = mf.init_state(shards, optimizer, where=where or None), layout.world_size
    for step in range(STEPS):
        grads = mf.reduce_grads(exact_grads(step, groups.rank), groups, like=state.params)
        mf.unshard(grads, groups)
        groups.traffic.clear()
        before = state
        state = mf.opt_step(state, grads, donate=step % 2 > 0)
        assert step == 0 or not groups.traffic.sent_bytes  # the first one compares options
        if not step % 2:  # what was not donated is as it was
            again = mf.opt_step(before, grads)
            same(mf.unshard(again.params, groups), mf.unshard(state.params, groups))
    same(mf.unshard(state.params, groups), twin(kind, STEPS, n))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", small_first(LAYOUTS), ids=str)
@pytest.mark.short("2x2-p2-muon", "2x2-p4-Adafactor", "1-p1-Muon")
def test_a_step_has_the_bits_of_torch_and_sends_nothing(ranks, layout: Layout, kind: str):
    ranks(layout.world_size).run(stepped, layout, kind)


@pytest.mark.parametrize(
    ("scheme", "where"),
    [("hybrid", ""), ("zero1", ""), ("hpz", ""), ("", "states=host"), ("", "states=disk:{}")],
)
@pytest.mark.parametrize("kind", ["muon", "Adafactor"])
@pytest.mark.short("hybrid--muon", "-states=disk:{}-muon")
def test_every_placement_and_place(ranks, tmp_path: Path, kind: str, scheme: str, where: str):
    ranks(4).run(stepped, Layout((2, 2), 4), kind, scheme, where.format(tmp_path))


class Linear(nn.Module):
    """A loss that is linear in the parameters, so that its gradients are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.names = {name.replace(".", "_"): name for name in SHAPES}
        for own, name in self.names.items():
            self.register_parameter(own, nn.Parameter(values()[name]))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        """The sum of products with gradients, the mean over samples."""
        pairs = [(getattr(self, own), grads[name]) for own, name in self.names.items()]
        return torch.stack([(p * g.mean(0)).sum() for p, g in pairs]).sum()


OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "kept": {"live_bytes": None},
    "one bucket": {"live_bytes": 0, "accumulate": 2},
    "overlapped": {"overlap_step": True, "guard": optim.Guard(on_nonfinite="ignore")},
    "guarded": {"guard": optim.Guard(max_norm=1e9, on_nonfinite="skip")},
    "recoverable": {"faults": mf.FaultPolicy(recoverable=True), "deterministic": True},
    "away": {"where": "states=host, params=host"},
    "gradients away": {"where": "grads=host", "accumulate": 2},
}


def trained(options: str) -> None:
    """A `Trainer` lays leaves out by itself; it goes on after a fault with the same bits."""
    groups = mf.make_groups(2, node_size=2, timeout_s=20)
    optimizer = optim.by_path({"blocks*": optim.muon(0.02)}, default=optim.adamw(3e-4))
    how = {"bucket_bytes": 40_000, **OPTIONS[options]}
    with groups:
        trainer = mf.Trainer(Linear(), optimizer, groups, loss=lambda m, x: m(x), **how)
        for step in range(STEPS):
            grads = exact_grads(step, groups.rank)
            batch = {name: torch.stack([x, x]) for name, x in grads.items()}
            if step == 1 and options in ("usual", "recoverable"):
                trainer.reset()
            trainer.step(batch)
        found = {trainer_name(k): x for k, x in trainer.params().items()}
        assert all(x.bucket.whole for k, x in trainer.state.params.items() if k[:6] == "blocks")
    same(found, twin("muon", STEPS, 4))


def trainer_name(own: str) -> str:
    return next(name for name in SHAPES if name.replace(".", "_") == own)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.short("overlapped", "recoverable")
def test_a_trainer_has_the_bits_of_one_process(ranks, options: str):
    ranks(4).run(trained, options)


def made(folder: str) -> None:
    """Models are made and read with leaves that lie whole."""
    groups = groups_of(PAIR)
    optimizer = optim.by_path({"*weight": optim.muon(0.02)}, default=optim.adamw(1e-2))

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    skeleton, shards = mf.init_model(model, groups, seed=0, whole=optimizer.whole)
    torch.manual_seed(0)
    plain = {name: x.detach() for name, x in model().named_parameters()}
    same(mf.unshard(shards, groups), plain)
    mf.checkpoint.save_pretrained(folder, shards, groups)
    again = mf.load_shards(folder, groups, whole=optimizer.whole)
    same(mf.unshard(again, groups), plain)
    for found in (shards, again):
        kinds = {name: getattr(x.bucket, "whole", None) for name, x in found.items()}
        assert kinds == {name: name.endswith("weight") for name in plain}
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    trainer = mf.Trainer(skeleton, optimizer, groups, params=again, loss=loss, live_bytes=0)
    losses = [trainer.step(torch.ones(2, 8)).loss.item() for _ in range(3)]
    assert losses[2] < losses[0]


def test_models_are_made_and_read_whole(ranks, tmp_path: Path):
    ranks(2).run(made, str(tmp_path / "model"))


# How leaves are dealt

shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=25)


@given(shapes, st.sampled_from([1, 2, 3, 4, 8]), st.integers(64, 20_000))
def test_no_leaf_is_cut_and_none_overlaps(found: list[tuple[int, int]], parts: int, nbytes: int):
    formats = Formats(torch.float32)
    specs = [LeafSpec(f"{i}", x, formats, parts, whole=True) for i, x in enumerate(found)]
    every = plan_buckets(specs, bucket_bytes=nbytes)
    assert [bucket.shapes[slot] for bucket, slot in every] == found
    used = set(every)
    assert len(used) == len(found)
    for bucket in {bucket for bucket, _ in every}:
        end, spans = 0, zip(bucket.offsets, bucket.numels, strict=True)
        assert bucket.numel % (parts * formats.align) == 0
        for start, length in spans:
            assert start >= end
            assert start % formats.align == 0
            assert start // bucket.chunk == (start + length - 1) // bucket.chunk
            end = start + length
        assert end <= bucket.numel


MODELS = {
    "GPT-2": (12, [(2304, 768), (768, 768), (3072, 768), (768, 3072)]),
    "Llama-3-8B": (32, [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 3),
    "Qwen2.5-0.5B": (24, [(896, 896)] * 2 + [(128, 896)] * 2 + [(4864, 896)] * 3),
}


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_padding_of_known_models_is_within_its_bound(model: str, p: int):
    layers, found = MODELS[model]
    specs = [
        LeafSpec(f"{i}.{k}", shape, Formats(torch.float32), p, whole=True)
        for i in range(layers)
        for k, shape in enumerate(found)
    ]
    total = layers * sum(map(math.prod, found))
    for layers_in_a_bucket in (0.1, 1, p / 2, p):
        most = int(layers_in_a_bucket * 4 * total / layers) + 1
        planned = {bucket for bucket, _ in plan_buckets(specs, bucket_bytes=most)}
        assert sum(bucket.numel for bucket in planned) <= (1 + WASTE) * total


def padded() -> None:
    """One layer on four ranks: what is sent is planned, with its padding."""
    groups = groups_of(Layout((4,), 4))
    params = {name: x for name, x in values().items() if name.startswith("blocks.0")}
    shards = mf.shard(params, groups, whole=lambda path: True)
    (bucket,) = {x.bucket for x in shards.values()}
    assert bucket.numel > (1 + WASTE) * sum(x.numel() for x in params.values())
    groups.traffic.clear()
    mf.unshard(shards, groups)
    assert groups.traffic.sent_bytes["gather rank"] == bucket.nbytes * 3 // 4
    text = str(mf.inspection.summary(shards, groups))
    total = 4 * sum(x.numel() for x in params.values())
    assert f"{mf.errors.human_bytes(bucket.nbytes - total)} of padding of whole leaves" in text, (
        text
    )


def test_padding_is_said_and_sent(ranks):
    ranks(4).run(padded)


# Stacks of matrices


def stacks() -> None:
    """A leaf of several matrices is stepped as these would be by themselves."""
    groups, rows = groups_of(PAIR), {"qkv": (3, 48, 24), "experts": (4, 24, 48)}
    every = {name: random(i, *shape) for i, (name, shape) in enumerate(rows.items())}
    grads = {name: random(9 + i, *shape) for i, (name, shape) in enumerate(rows.items())}
    one = {f"{name}.{k}": x for name, each in every.items() for k, x in enumerate(each)}
    each = {f"{name}.{k}": x for name, own in grads.items() for k, x in enumerate(own)}
    every["qkv"], grads["qkv"] = (x["qkv"].flatten(0, 1) for x in (every, grads))

    def begin(matrix: Tensor) -> dict[str, Tensor]:
        return {"left": torch.zeros(len(matrix), len(matrix)), "mean": torch.zeros_like(matrix)}

    def step(matrix: Tensor, grad: Tensor, kept: dict[str, Tensor], count: int) -> None:
        kept["left"] = kept["left"] + grad @ grad.T
        kept["mean"].lerp_(grad, 0.5)
        matrix -= (kept["left"] @ kept["mean"]) * 1e-3 / (count + 1)

    for make in (optim.muon, lambda lr, **how: optim.matrixwise(begin, step, **how)):
        found = []
        for params, own, how in ((every, grads, {"qkv": 3}), (one, each, {})):
            optimizer = make(0.02, stacked=how)
            state = mf.init_state(mf.shard(params, groups, whole=optimizer.whole), optimizer)
            for _ in range(2):
                reduced = mf.reduce_grads(own, groups, like=state.params)
                state = mf.opt_step(state, reduced, donate=True)
            found.append(mf.unshard(state.params, groups))
        for name, shape in rows.items():
            for k, x in enumerate(found[0][name].view(shape)):
                assert torch.equal(x, found[1][f"{name}.{k}"]), (name, k)


def test_a_stack_is_stepped_as_its_matrices(ranks):
    ranks(2).run(stacks)


def tied_and_frozen() -> None:
    """What is tied is one matrix, and what is frozen is none."""
    groups, muon = groups_of(PAIR), optim.muon(0.02)
    w, still = nn.Parameter(random(1, 8, 8)), nn.Parameter(random(2, 5), requires_grad=False)
    params, grad = {"a": w, "b": w, "still": still}, random(3, 8, 8)
    state = mf.init_state(mf.shard(params, groups, whole=muon.whole), muon)
    grads = {"a": grad, "b": torch.zeros(8, 8), "still": None}
    state = mf.opt_step(state, mf.reduce_grads(grads, groups, like=state.params))
    found = mf.unshard(state.params, groups)
    wanted = nn.Parameter(w.detach().clone())
    wanted.grad = grad
    torch.optim.Muon([wanted], 0.02).step()
    same(found, {"a": wanted, "b": wanted, "still": still})


def test_tied_and_frozen_leaves(ranks):
    ranks(2).run(tied_and_frozen)


# From one layout to another, in memory and through a checkpoint


def after_steps(groups: mf.Groups, optimizer: Any, state: Any, first: int, steps: int) -> Any:
    for step in range(first, first + steps):
        grads = mf.reduce_grads(exact_grads(step, groups.rank), groups, like=state.params)
        state = mf.opt_step(state, grads)
    return state


def converted(folder: str, precision: str, where: str) -> None:
    groups, adamw = groups_of(PAIR), optim.adamw(0.1)
    kinds = [None, lambda path: path.startswith("blocks")]
    flat, whole = (
        mf.init_state(mf.shard(values(), groups, whole=x, precision=precision), adamw, where=where)
        for x in kinds
    )
    state = after_steps(groups, adamw, flat, 0, 2)
    there = optim.relayout(state, whole, groups)
    back = optim.relayout(there, flat, groups)
    mf.checkpoint.save(f"{folder}/flat", state, groups, step=1)
    mf.checkpoint.save(f"{folder}/whole", there, groups, step=1)
    loaded = (mf.checkpoint.load(f"{folder}/flat", whole, groups).state,
              mf.checkpoint.load(f"{folder}/whole", flat, groups).state)  # fmt: skip
    for other in (there, back, *loaded):
        pairs = zip(*(mf.unshard(all_shards(x), groups) for x in (state, other)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    found = [after_steps(groups, adamw, x, 2, 1) for x in (state, there)]
    same(*(mf.unshard(x.params, groups) for x in found))
    with pytest.raises(LeafError, match="relayout: the states have other leaves"):
        optim.relayout(state, mf.init_state(whole.params, optim.sgd(0.1)), groups)


@pytest.mark.parametrize(
    ("precision", "where"),
    [("", ""), ("state=int8[64]", ""), ("", "states=host"), ("", "states=disk:{}")],
)
@pytest.mark.short("-", "state=int8[64]-")
def test_a_state_goes_to_another_layout_and_back(ranks, tmp_path, precision: str, where: str):
    ranks(2).run(converted, str(tmp_path), precision, where.format(tmp_path))


def saved(folder: str, kind: str) -> None:
    groups, optimizer = groups_of(BOTH), by_kind(kind)
    state = mf.init_state(mf.shard(values(), groups, whole=optimizer.whole), optimizer)
    mf.checkpoint.save(folder, after_steps(groups, optimizer, state, 0, 2), groups, step=2)


def loaded(folder: str, kind: str, layout: Layout) -> None:
    groups, optimizer = groups_of(layout), by_kind(kind)
    like = mf.init_state(mf.shard(values(), groups, whole=optimizer.whole), optimizer)
    state = mf.checkpoint.load(folder, like, groups).state
    same(mf.unshard(state.params, groups), twin(kind, 2, 4))
    mine = mean_grads(2, 4)
    state = mf.opt_step(state, mf.reduce_grads(mine, groups, like=state.params))
    wanted = twin(kind, 3, 4)
    same(mf.unshard(state.params, groups), wanted)


@pytest.mark.parametrize("kind", ["muon", "Adafactor"])
def test_a_checkpoint_loads_on_other_ranks(ranks, tmp_path: Path, kind: str):
    ranks(4).run(saved, str(tmp_path), kind)
    for layout in (Layout((1,), 1), PAIR, Layout((4,), 4)):
        ranks(layout.world_size).run(loaded, str(tmp_path), kind, layout)


# Moments as codes


def coded(layout: Layout) -> tuple[list[Tensor], float]:
    """What is stepped with coded momentum, and how far that is from a step without codes."""
    groups, optimizer = groups_of(layout), optim.muon(0.02, weight_decay=0.0)
    params = {name: random(i, 64, 80) for i, name in enumerate("abcde")}
    found = []
    for precision in ("", "state=int8[64]"):
        shards = mf.shard(params, groups, whole=optimizer.whole, precision=precision)
        state = mf.init_state(shards, optimizer)
        for step in range(STEPS):
            grads = {name: random(10 * step + i, 64, 80) for i, name in enumerate("abcde")}
            state = mf.opt_step(state, mf.reduce_grads(grads, groups, like=state.params))
        found.append(list(mf.unshard(state.params, groups).values()))
    start, (exact, near) = list(params.values()), found
    moved = math.sqrt(sum((a - b).square().sum() for a, b in zip(exact, start, strict=True)))
    gap = math.sqrt(sum((a - b).square().sum() for a, b in zip(near, exact, strict=True)))
    return near, gap / moved


def test_coded_momentum_does_not_depend_on_the_ranks(ranks):
    """Codes are off by half a step of 1/127 of the largest of a block, which is some 3 sigma.

    So momentum is off by about 3 / 254 / sqrt(3) of itself, 0.7 %. Newton and Schulz give the
    orthogonal factor, whose change is that of the matrix over its least singular values: here those
    of a random 64 x 80 matrix, of which the least is a tenth of the root mean square.
    """
    (wanted, gap), *_ = ranks(1).run(coded, Layout((1,), 1))
    assert 0 < gap < 0.07
    for layout in (PAIR, Layout((2, 2), 4)):
        for found, _ in ranks(layout.world_size).run(coded, layout):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# What is refused


def refusals(folder: str) -> None:
    groups, muon = groups_of(PAIR), optim.muon(0.02)

    def begun(shape: Any, optimizer: Any = muon, where: Any = "", whole: Any = muon.whole) -> Any:
        shards = mf.shard({"w": torch.ones(shape)}, groups, whole=whole)
        return mf.init_state(shards, optimizer, where=where)

    for call, kind, text in (
        (partial(begun, (4, 4), whole=None), LeafError, "muon: w may be cut between ranks"),
        (partial(begun, 4), LeafError, r"muon: w of shape \(4,\) is no matrix"),
        (partial(begun, (0, 4)), LeafError, r"muon: w of shape \(0, 4\) has no elements"),
        (partial(begun, (4, 4), optim.muon(0.1, stacked={"w": 3})), LeafError, "no stack of 3"),
        (partial(begun, (4, 4), optim.muon(0.1, stacked={"v": 3})), PlanError, "'v'"),
        (partial(optim.muon, -1.0), PlanError, "lr"),
        (partial(optim.muon, 0.1, adjust_lr_fn="rms"), PlanError, "adjust_lr_fn"),
    ):
        with pytest.raises(kind, match=text):
            call()
    state, grads = begun((4, 4)), {"w": torch.ones(4, 4)}
    reduced = mf.reduce_grads(grads, groups, like=state.params)
    live = mf.shards.map(lambda x: x.clone().requires_grad_(), reduced)
    with pytest.raises(PlanError, match="muon has no derivative"):
        mf.opt_step(state, live)
    twice = partial(mf.tree.map_leaves, lambda x: torch.stack([x, x]))  # as vmap leaves them
    kept = state.opt._replace(moments=twice(state.opt.moments))
    batched = replace(state, params=twice(state.params), opt=kept)
    with pytest.raises(PlanError, match="muon has no derivative"):
        mf.opt_step(batched, twice(reduced))
    with pytest.raises(PlanError, match="the state of the optimizer"):
        mf.opt_step(replace(state, opt=()), reduced)
    assert torch.equal(mf.unshard(state.params, groups)["w"], grads["w"])
    small = mf.where(f"states=disk:{folder}", host_bytes="1MiB")
    if groups.rank == 0:  # which has the matrix; the other hears of it at its next wait
        with pytest.raises(FileError, match="w and what is stepped with it take"):
            begun((400, 600), where=small)
    else:
        begun((400, 600), where=small)


def test_what_is_refused_is_refused_by_name(ranks, tmp_path: Path):
    ranks(2).run(refusals, str(tmp_path))
