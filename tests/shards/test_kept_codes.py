"""Frozen leaves kept as codes: values that no layout changes, bytes by formula, errors by name."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from cases import Layout, groups_of, placed_as, random, same_bits
from costs import buckets_of, counted, gathered, level_sizes
from torch import Tensor, nn
from torch.func import grad, grad_and_value, jvp, vmap

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives import Codec
from mics_fn.errors import PlanError
from mics_fn.init.filling import Filling
from mics_fn.offload import Coded, as_codes, set_part
from mics_fn.shards import Fixed, Sharded

KINDS = ["int4[64]", "int8[32]", "fp8[2]"]
# The smallest ranks first; in the last the ranks of a group meet over two levels.
LAYOUTS = [Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2), Layout((4,), 4), Layout((2, 2), 4)]


def values(seed: int = 0) -> dict[str, Tensor]:
    """Leaves that end inside of blocks, one of which is far larger than its neighbours."""
    return {
        "base.big": random(seed, 9, 50) * 1000,
        "base.bias": random(seed + 1, 7),
        "base.half": random(seed + 2, 130).bfloat16(),
        "base.none": torch.zeros(0, 3),
        "base.one": torch.tensor(-2.5),
        "base.wide": random(seed + 3, 300, dtype=torch.float64),
        "new.a": random(seed + 4, 5, 3),
        "steps": torch.tensor(3),
    }


def is_base(path: str) -> bool:
    return "base" in path


def coded(groups: Any, kind: str, full: Any = None, **how: Any) -> Any:
    how = {"precision": f"*base*: param={kind}", **how}
    return mf.shard(values() if full is None else full, groups, frozen=is_base, **how)


def decoded(x: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """The slow twin: the whole leaf is coded and decoded in one process, by itself."""
    codec, flat = Codec.parse(kind), x.reshape(-1).to(torch.float32)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % (codec.block or 1)))
    found = codec.decode(codec.encode(flat), len(flat), dtype)
    return found[: x.numel()].view(x.shape)


def twin(full: Any, kind: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    return {k: decoded(x, kind, dtype or x.dtype) if is_base(k) else x for k, x in full.items()}


def rows(shards: Any) -> list[Tensor]:
    """The memory of all codes, each once."""
    found = [x.data for x in tree.flatten(shards, lambda v: isinstance(v, Fixed | Sharded))[0]]
    held = [x.codes.row for x in found if isinstance(x, Coded)]
    return list({id(row): row for row in held if row is not None}.values())


# Values


def gathers(layout: Layout, kind: str, compute: str, scheme: str) -> Any:
    """What all ways to full values give, and what a gather has sent, and would by its formula."""
    groups = counted(placed_as(groups_of(layout), scheme))
    shards = coded(groups, kind, precision=f"{compute}*base*: param={kind}", bucket_bytes=1200)
    groups.traffic.clear()
    now = mf.gather(shards, groups)
    ledger = {k: v for k, v in groups.traffic.snapshot().items() if k.startswith("gather")}
    route = groups.hierarchy.route
    sizes = level_sizes(layout) or ()
    want: dict[str, list[int]] = {}
    for bucket in buckets_of(shards):
        for level, sent in zip(route.levels, gathered(bucket, sizes, route), strict=True):
            calls, total = want.get(f"gather {level.name}", [0, 0])
            want[f"gather {level.name}"] = [calls + bool(sent), total + sent]
    assert {k: list(v) for k, v in ledger.items()} == {k: v for k, v in want.items() if v[0]}
    same_bits(mf.shards.start_gather(shards, groups).wait(), now)
    for policy in (mf.keep_all(), mf.on_demand(live_bytes=0), mf.on_demand(live_bytes=4000)):
        for _ in range(2):
            with mf.defer(shards, groups, policy) as full:
                same_bits({name: x.clone() for name, x in full.items()}, now)
                same_bits({name: x.clone() for name, x in reversed(full.items())}, now)
    one = {name: mf.get(shards, name, groups) for name in shards}
    held = sum(row.numel() for row in rows(shards))
    kept = sum(b.codes.nbytes(b.chunk) for b in buckets_of(shards) if b.codes is not None)
    return now, mf.unshard(shards, groups), one, (held, kept)


@pytest.mark.parametrize("scheme", ["mics", "zero2", "hpz"])
@pytest.mark.parametrize("compute", ["", "compute=bf16; "])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.covering
def test_what_is_gathered_is_the_twin_on_any_ranks(ranks, layout, kind, compute, scheme):
    dtype = torch.bfloat16 if compute else None
    want = twin(values(), kind, dtype)
    if dtype is not None:
        want = {k: x.to(dtype) if x.is_floating_point() else x for k, x in want.items()}
    wide = {k: decoded(x, kind, torch.float32) if is_base(k) else x for k, x in values().items()}
    for now, whole, one, (held, kept) in ranks(layout.world_size).run(
        gathers, layout, kind, compute, scheme
    ):
        same_bits(now, want)
        same_bits(whole, wide)
        same_bits(one, wide)
        assert held == kept


# Derivatives


class Results(NamedTuple):
    """What transforms of one loss give, in full."""

    grads: Any
    loss: Any
    tangent: Any = None
    product: Any = None
    stack: Any = None


def transformed(params: Any, groups: Any, policy: Any) -> Results:
    """Derivatives of a loss over frozen and trained leaves, by all kinds of transforms."""

    def full_of(shards: Any) -> Any:
        if policy is None:
            return mf.gather(shards, groups)
        return mf.defer(shards, groups, policy).params

    def loss(shards: Any) -> Tensor:
        full = full_of(shards)
        base = full["base.big"].float()[:5, :3] + full["base.half"].float().sum()
        return ((base * full["new.a"]).sin() * full["steps"]).sum()

    def unmade(shards: Any) -> Any:
        return mf.unshard(shards, groups)["new.a"]

    grads, value = grad_and_value(loss)(params)
    if policy is not None:
        return Results(unmade({"new.a": grads["new.a"]}), value)
    tangent = jvp(loss, (params,), (grads,))[1]
    product = jvp(grad(loss), (params,), (grads,))[1]
    data = grads["new.a"].data
    many = {**params, "new.a": Sharded(torch.stack([data, -data]), *_of(params["new.a"]))}
    rows = vmap(grad(loss))(many)["new.a"].data
    stack = [unmade({"new.a": Sharded(x, *_of(params["new.a"]))}) for x in rows]
    wide = unmade({"new.a": product["new.a"]})
    return Results(unmade({"new.a": grads["new.a"]}), value, tangent, wide, stack)


def _of(leaf: Any) -> tuple[Any, int]:
    return leaf.bucket, leaf.slot


def both_transformed(layout: Layout, policy: bool) -> Any:
    groups = groups_of(layout)
    kept = coded(groups, "int4[64]")
    plain = mf.shard(twin(values(), "int4[64]"), groups, frozen=is_base)
    policies = [mf.on_demand(live_bytes=0) if policy else None for _ in range(2)]
    return [transformed(x, groups, each) for x, each in zip((kept, plain), policies, strict=True)]


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 4)], ids=str)
@pytest.mark.covering
def test_derivatives_are_those_over_decoded_values(ranks, layout, policy):
    """To the bit: the same leaves, frozen as the values that codes stand for, are the twin."""
    for got, want in ranks(layout.world_size).run(both_transformed, layout, policy):
        for name, a, b in zip(Results._fields, got, want, strict=True):
            assert (a is None) == (b is None), name
            same_bits(a, b) if a is not None else None


def plain_backward(layout: Layout) -> Any:
    """`loss.backward()` over deferred parameters, with the gradients in a sum."""
    groups, found = groups_of(layout), []
    kept = coded(groups, "fp8[128]")
    plain = mf.shard(twin(values(), "fp8[128]"), groups, frozen=is_base)
    for params in (kept, plain):
        total = mf.GradSum()
        with mf.defer(params, groups, mf.on_demand(live_bytes=0), into=total) as full:
            loss = (full["base.big"][:5, :3] * full["new.a"].exp()).sum() * full["base.one"]
            total.backward(loss)
        found.append(mf.unshard(total.grads()["new.a"], groups))
    return found


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 2)], ids=str)
def test_backward_is_that_over_decoded_values(ranks, layout):
    for got, want in ranks(layout.world_size).run(plain_backward, layout):
        same_bits(got, want)


# From files, and one bucket at a time


def as_list(groups: Any, shards: Any) -> list[Any]:
    """The rows of codes as lists, which are equal only to the bit."""
    return [row.tolist() for row in rows(shards)]


def read_from_files(layout: Layout, path: str) -> Any:
    groups = groups_of(layout)
    how = {"precision": "*base*: param=int4[64]", "frozen": is_base, "bucket_bytes": 1200}
    order = list(values())
    how["order"] = lambda name: order.index(name)
    want = mf.shard({k: x for k, x in values().items() if x.ndim}, groups, **how)
    got = mf.load_shards(path, groups, **how)
    assert as_list(groups, got) == as_list(groups, want)
    return mf.unshard(got, groups), mf.unshard(want, groups)


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.covering
def test_files_are_read_into_the_codes_that_shard_makes(ranks, tmp_path, layout):
    torch.save({k: x for k, x in values().items() if x.ndim}, tmp_path / "weights.pt")
    for got, want in ranks(layout.world_size).run(
        read_from_files, layout, str(tmp_path / "weights.pt")
    ):
        same_bits(got, want)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(20, 33)
        self.new = nn.Linear(33, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.new(self.base(x))


def made_as_codes(layout: Layout, path: str) -> Any:
    """A model made as shards, and one whose base is read and whose adapter is made."""
    groups = groups_of(layout)
    how: Any = {"precision": "*base*: param=fp8[32]", "frozen": is_base}
    _, drawn = mf.init_model(Adapted, groups, seed=5, **how)
    _, read = mf.init_model(
        Adapted, groups, seed=5, weights=path, missing=lambda name: "new" in name, **how
    )
    assert len(rows(drawn)) == len(rows(read)) == 1
    return mf.unshard(drawn, groups), mf.unshard(read, groups)


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=str)
@pytest.mark.covering
def test_models_are_made_as_codes(ranks, tmp_path, layout):
    torch.manual_seed(8)
    base = {f"base.{k}": x for k, x in nn.Linear(20, 33).state_dict().items()}
    torch.save(base, tmp_path / "base.pt")
    torch.manual_seed(5)
    model = {k: x.detach() for k, x in Adapted().named_parameters()}
    want = [twin(full, "fp8[32]") for full in (model, {**model, **base})]
    for found in ranks(layout.world_size).run(made_as_codes, layout, str(tmp_path / "base.pt")):
        for got, full in zip(found, want, strict=True):
            same_bits(got, full)


def test_one_chunk_of_values_at_a_time_is_in_memory():
    full = {f"base.{i}": random(i, 40, 50) for i in range(12)}
    groups = mf.make_groups(1)
    options = {
        "frozen": is_base,
        "precision": "param=int4[64]",
        "bucket_bytes": 3 * 4 * 2048,
    }
    filling, seen = Filling("load_shards", full, groups, options), []
    with filling.under_way():
        for name in filling.order:

            def read(low: int, high: int, name: str = name) -> Tensor:
                chunks = [chunk.flat for chunk in filling._chunks._found.values()]
                seen.append(sum(x.nbytes for x in chunks if x is not None))
                return full[name].reshape(-1)[low:high]

            filling.read(name, read)
    assert max(seen) == 3 * 4 * 2048  # of the 12 leaves those of one bucket, in whole blocks
    same_bits(mf.unshard(filling.shards, groups), twin(full, "int4[64]"))


# What verbs do with codes


def used(layout: Layout) -> Any:
    """Values after a copy, a pickle, a cut, a change of one leaf, and over a part of the tree."""
    groups, kind = groups_of(layout), "int8[32]"
    shards, found = coded(groups, kind), {}
    full = mf.unshard(shards, groups)
    found["copied"] = mf.unshard(copy.deepcopy(shards), groups)
    found["pickled"] = mf.unshard(pickle.loads(pickle.dumps(shards)), groups)
    assert as_list(groups, pickle.loads(pickle.dumps(shards))) == as_list(groups, shards)
    found["cut"] = mf.unshard(mf.shards.cut(full, groups, like=shards, check=True), groups)
    found["mapped"] = mf.unshard(mf.shards.map(torch.clone, shards), groups)
    found["synced"] = mf.unshard(mf.shards.sync_replicas(shards, groups), groups)
    part = {name: shards[name] for name in ("base.bias", "base.one", "base.none")}
    some = mf.gather(part, groups)
    same_bits(some, {name: full[name].to(some[name].dtype) for name in part})
    with mf.defer(part, groups, mf.on_demand(live_bytes=0)) as later:
        same_bits({name: x.clone() for name, x in later.items()}, some)
    # Leaves of one bucket in memories of their own, and one of another tree.
    apart = {
        k: Fixed(x.data.copied(), *_of(x)) if is_base(k) and x.data.numel() else x
        for k, x in shards.items()
    }
    found["apart"] = mf.unshard(apart, groups)
    more = coded(groups, kind, values(50))
    mixed = mf.unshard({**shards, "base.big": more["base.big"]}, groups)
    same_bits(mixed.pop("base.big"), mf.unshard(more, groups)["base.big"])
    found["mixed"] = {**mixed, "base.big": full["base.big"]}
    new = mf.set(shards, "base.bias", torch.arange(7.0), groups)
    found["set"] = {**mf.unshard(new, groups), "base.bias": full["base.bias"]}
    text = str(mf.summary(shards, groups))
    return full, found, mf.get(new, "base.bias", groups), text


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1], LAYOUTS[3]], ids=str)
@pytest.mark.covering
def test_copies_and_changes_keep_all_other_codes(ranks, layout):
    want = decoded(torch.arange(7.0), "int8[32]", torch.float32)
    for full, found, changed, text in ranks(layout.world_size).run(used, layout):
        for name, values_ in found.items():
            same_bits({"": name, **values_}, {"": name, **full})
        same_bits(changed, want)
        (line,) = [each for each in text.splitlines() if "base.wide" in each]
        assert line.split()[2:4] == ["int8[32]", "frozen"]
        assert line.endswith("320 B")  # 300 codes, and 10 scales of 2 bytes


@pytest.mark.parametrize("size", [1, 7])
def test_threads_fill_a_tensor_together(size):
    whole = as_codes(torch.zeros(4096), Codec.parse("int8[64]"))
    kept, want = whole.unset(), random(0, 4096)
    parts = list(zip(range(0, 4096, 128), want.split(128), strict=True))
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda each: set_part(kept, *each), parts))
    assert torch.equal(kept + 0, decoded(want, "int8[64]", torch.float32))


# Errors


def refused(layout: Layout) -> list[str]:
    """The error on this rank of each mistake."""
    groups, found = groups_of(layout), []
    bad = values()
    bad["base.wide"][299] = float("inf")  # in the part of one rank
    shards = coded(groups, "int4[64]")
    full = mf.unshard(shards, groups)
    plain = {k: Fixed(x.data + 0, *_of(x)) if is_base(k) else x for k, x in shards.items()}
    big = coded(groups, "int4[2]")["base.big"].data
    other = {**shards, "base.big": Fixed(big, *_of(shards["base.big"]))}

    outside = values()

    def inside(x: Tensor) -> Tensor:
        return mf.gather(coded(groups, "int4[64]", outside), groups)["new.a"].sum() * x

    with TemporaryDirectory() as folder:
        attempts = [
            lambda: mf.shard(values(), groups, precision="param=int4[64]"),
            lambda: coded(groups, "int4[64]", bad),
            lambda: coded(groups, "int4[64]", where=f"params=disk:{folder}"),
            lambda: mf.gather(plain, groups),
            lambda: mf.defer(other, groups, mf.on_demand(live_bytes=0)),
            lambda: mf.set(shards, "base.one", float("nan"), groups),
            lambda: mf.shards.cut({**full, **bad}, groups, like=shards),
            lambda: shards["base.big"].data.mul_(2),
            lambda: grad(inside)(torch.ones(())),
        ]
        for attempt in attempts:
            try:
                attempt()
                found.append("nothing")
            except mf.MicsError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


NOT_FINITE = "has a value that is not finite, which param=int4[64] cannot hold"
WORDS = [
    ("PlanError", "trained cannot be kept as codes", "params.base.big: param=int4[64]"),
    ("LeafError", "params.base.wide", NOT_FINITE),  # on the other rank in a DesyncError
    ("PlanError", "leaves that are kept as codes lie on the device, not on disk", "param=int4[64]"),
    ("LeafError", "gather: leaf", "expected codes, int4[64]"),
    ("LeafError", "of int4[2]", "expected codes, int4[64]"),
    ("LeafError", "set: base.one", NOT_FINITE),
    ("LeafError", "cut: full.base.wide", NOT_FINITE),
    ("LeafError", "writes to a coded tensor", "set()"),
    ("LeafError", "shard: its result has no derivative", "outside of torch.func"),
]


def test_errors_are_named_on_all_ranks(ranks):
    for texts in ranks(2).run(refused, Layout((2,), 2)):
        for text, (kind, *words) in zip(texts, WORDS, strict=True):
            assert kind in text, text
            assert all(word in text for word in words), text


@pytest.mark.parametrize("text", ["int4[64]", "int8[256]", "fp8[2]"])
def test_texts_of_codes(text):
    precision = mf.Precision.parse(f"*base*: param={text}; *.bias*: param=f32")
    assert mf.Precision.parse(str(precision)) == precision
    assert precision.codes("base.w", torch.bfloat16) == Codec.parse(text)
    assert precision.codes("base.bias", torch.bfloat16) is None
    assert mf.Precision(param=text).param == Codec.parse(text)  # pyright: ignore
    assert not mf.Precision(param=text).casts  # pyright: ignore
    with pytest.raises(PlanError, match="is not a codec"):
        mf.Precision.parse("param=int8[3x]")


def test_shards_on_meta_have_the_layout_and_no_codes():
    groups = mf.make_groups(1)
    shards = coded(groups, "int4[64]", {k: x.to("meta") for k, x in values().items()})
    assert rows(shards) == []
    assert mf.gather(shards, groups)["base.half"].dtype == torch.bfloat16
    real = coded(groups, "int4[64]")
    assert {k: x.bucket for k, x in shards.items()} != {}
    assert [b.codes for b in buckets_of(shards)] == [b.codes for b in buckets_of(real)]
