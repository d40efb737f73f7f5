"""Frozen leaves kept as codes: values that no layout changes, bytes by formula, errors by name."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import Layout, full_of, groups_of, placed_as, random, same_bits
from costs import counted
from storage_count import StorageCount
from torch import Tensor, nn
from torch.func import grad, grad_and_value, jvp, vmap

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives import Codec
from mics_fn.init.model import Filling
from mics_fn.lab.report import buckets_of, gathered
from mics_fn.offload import Coded
from mics_fn.offload import coded as coded_tensor
from mics_fn.shards import Fixed, Sharded

KINDS = ["int4[64]", "int8[32]", "fp8[4]"]
# The smallest ranks first; in the last the ranks of a group meet over two levels.
LAYOUTS = [Layout((1,), 1), Layout((2,), 2), Layout((2, 2), 2), Layout((2, 2), 4)]


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


def pieces(shards: Any) -> list[Coded]:
    """The pieces that are codes."""
    found = [x.data for x in tree.flatten(shards, lambda v: isinstance(v, Fixed | Sharded))[0]]
    return [x for x in found if isinstance(x, Coded)]


def rows(shards: Any) -> list[Tensor]:
    """The memory of all codes, each once."""
    return list({id(x.codes.row): x.codes.row for x in pieces(shards)}.values())


# Values


def gathers(layout: Layout, kind: str, compute: str, scheme: str) -> Any:
    """What all ways to full values give, and what a gather has sent, and would by its formula."""
    groups = counted(placed_as(groups_of(layout), scheme))
    shards = coded(groups, kind, precision=f"{compute}*base*: param={kind}", bucket_bytes=1200)
    groups.traffic.clear()
    now = mf.gather(shards, groups)
    ledger = {k: v for k, v in groups.traffic.snapshot().items() if k.startswith("gather")}
    route = groups.hierarchy.route
    want: dict[str, list[float]] = {}
    for bucket in buckets_of(shards):
        for level, sent in zip(route.levels, gathered(bucket, route), strict=True):
            calls, total = want.get(f"gather {level.name}", [0, 0])
            want[f"gather {level.name}"] = [calls + bool(sent.nbytes), total + sent.nbytes]
    assert {k: list(v) for k, v in ledger.items()} == {k: v for k, v in want.items() if v[0]}
    for policy in (mf.keep_all(), mf.on_demand(live_bytes=4000)):
        for _ in range(2):
            with mf.defer(shards, groups, policy) as full:
                same_bits({name: x.clone() for name, x in full.items()}, now)
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


def transformed(params: Any, groups: Any, policy: Any) -> list[Any]:
    """Derivatives of a loss over frozen and trained leaves, by all kinds of transforms."""

    def loss(shards: Any) -> Tensor:
        full = full_of(shards, groups, policy)
        base = full["base.big"].float()[:5, :3] + full["base.half"].float().sum()
        return ((base * full["new.a"]).sin() * full["steps"]).sum()

    def unmade(data: Tensor) -> Any:
        return mf.unshard({"new.a": Sharded(data, *_of(params["new.a"]))}, groups)["new.a"]

    grads, value = grad_and_value(loss)(params)
    data = grads["new.a"].data
    if policy is not None:
        total = mf.GradSum()
        with mf.defer(params, groups, mf.on_demand(live_bytes=0), into=total) as full:
            total.backward((full["base.wide"][:15] * full["new.a"].flatten().exp()).sum())
        return [unmade(data), value, unmade(total.grads()["new.a"].data)]
    tangent = jvp(loss, (params,), (grads,))[1]
    product = jvp(grad(loss), (params,), (grads,))[1]["new.a"].data
    many = {**params, "new.a": Sharded(torch.stack([data, -data]), *_of(params["new.a"]))}
    rows = vmap(grad(loss))(many)["new.a"].data
    return [value, tangent, *map(unmade, (data, product, *rows))]


def _of(leaf: Any) -> tuple[Any, int]:
    return leaf.bucket, leaf.slot


def both_transformed(layout: Layout) -> Any:
    groups = groups_of(layout)
    kept = coded(groups, "int4[64]")
    plain = mf.shard(twin(values(), "int4[64]"), groups, frozen=is_base)
    for deferred in (False, True):
        policies = [mf.on_demand(live_bytes=0) if deferred else None for _ in range(2)]
        found = zip((kept, plain), policies, strict=True)
        same_bits(*(transformed(x, groups, policy) for x, policy in found))


@pytest.mark.parametrize("layout", [Layout((2,), 2), Layout((2, 2), 4)], ids=str)
@pytest.mark.short("2-p2")
def test_derivatives_are_those_over_decoded_values(ranks, layout):
    """To the bit: the same leaves, frozen as the values that codes stand for, are the twin."""
    ranks(layout.world_size).run(both_transformed, layout)


# From files, and one bucket at a time


def as_list(shards: Any) -> list[Any]:
    """The codes of pieces as lists, which are equal only to the bit."""
    return [x.copied().codes.row.tolist() for x in pieces(shards)]


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(20, 33)
        self.new = nn.Linear(33, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.new(self.base(x))


def made_as_codes(layout: Layout, path: str) -> Any:
    """A model made as shards, one whose base is read and whose adapter is made, and one read."""
    groups = groups_of(layout)
    how: Any = {"precision": "*base*: param=fp8[32]", "frozen": is_base}
    _, drawn = mf.init_model(Adapted, groups, seed=5, **how)
    missing = lambda name: "new" in name  # noqa: E731
    _, read = mf.init_model(Adapted, groups, seed=5, weights=path, missing=missing, **how)
    only = mf.load_shards(path, groups, **how)
    full = [mf.unshard(each, groups) for each in (drawn, read, only)]
    assert as_list(only) == as_list(mf.shard(torch.load(path), groups, **how))
    return full


@pytest.mark.parametrize("layout", LAYOUTS[1:3], ids=str)
@pytest.mark.short("2-p2")
def test_models_are_made_and_read_as_codes(ranks, tmp_path, layout):
    torch.manual_seed(8)
    base = {f"base.{k}": x for k, x in nn.Linear(20, 33).state_dict().items()}
    torch.save(base, tmp_path / "base.pt")
    torch.manual_seed(5)
    model = {k: x.detach() for k, x in Adapted().named_parameters()}
    want = [twin(full, "fp8[32]") for full in (model, {**model, **base}, base)]
    for found in ranks(layout.world_size).run(made_as_codes, layout, str(tmp_path / "base.pt")):
        for got, full in zip(found, want, strict=True):
            same_bits(got, full)


def test_one_chunk_of_values_at_a_time_is_in_memory():
    full = {f"base.{i}": random(i, 40, 50) for i in range(12)}
    groups = mf.make_groups(1)
    options = {"frozen": is_base, "precision": "param=int4[64]", "bucket_bytes": 3 * 4 * 2048}
    filling, seen = Filling("load_shards", full, groups, options), []
    with StorageCount() as count:

        def source(name: str) -> Any:
            def read(low: int, high: int) -> Tensor:
                seen.append(count.now - sum(row.nbytes for row in rows(filling.shards)))
                return full[name].reshape(-1)[low:high]

            return read

        filling.fill(source)
    assert max(seen) == 3 * 4 * 2048  # of the 12 leaves those of one bucket, in whole blocks
    same_bits(mf.unshard(filling.shards, groups), twin(full, "int4[64]"))


# What verbs do with codes


def used(layout: Layout) -> Any:
    """Values after a copy, a change of one leaf, and over a part of the tree."""
    groups, kind = groups_of(layout), "int8[32]"
    shards, found = coded(groups, kind), {}
    full = mf.unshard(shards, groups)
    found["copied"] = mf.unshard(copy.deepcopy(shards), groups)
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


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[2]], ids=str)
@pytest.mark.short("2-p2")
def test_copies_and_changes_keep_all_other_codes(ranks, layout):
    want = decoded(torch.arange(7.0), "int8[32]", torch.float32)
    for full, found, changed, text in ranks(layout.world_size).run(used, layout):
        for name, values_ in found.items():
            same_bits({"": name, **values_}, {"": name, **full})
        same_bits(changed, want)
        (line,) = [each for each in text.splitlines() if "base.wide" in each]
        assert line.split()[2:4] == ["int8[32]", "frozen"]
        assert line.endswith("320 B")  # 300 codes, and 10 scales of 2 bytes


def test_threads_fill_a_tensor_together():
    whole = coded_tensor(torch.zeros(4096), Codec.parse("int8[64]"), None)
    kept, want = whole.unset(), random(0, 4096)
    parts = list(zip(range(0, 4096, 128), want.split(128), strict=True))
    with ThreadPoolExecutor(7) as pool:
        list(pool.map(lambda each: kept.fill(*each), parts))
    assert torch.equal(kept + 0, decoded(want, "int8[64]", torch.float32))


# Errors


NOT_FINITE = "has a value that is not finite, which param=int4[64] cannot hold"


def refused() -> None:
    groups, bad, outside = groups_of(Layout((2,), 2)), values(), values()
    bad["base.wide"][299] = float("inf")  # in the part of one rank
    shards = coded(groups, "int4[64]")
    plain = {k: Fixed(x.data + 0, *_of(x)) if is_base(k) else x for k, x in shards.items()}
    big = coded(groups, "int4[4]")["base.big"].data
    other = {**shards, "base.big": Fixed(big, *_of(shards["base.big"]))}
    elsewhere: Any = {"where": "params=disk:/tmp"}

    def inside(x: Tensor) -> Tensor:
        return mf.gather(coded(groups, "int4[64]", outside), groups)["new.a"].sum() * x

    for words, call in (
        (
            ["PlanError", "trained cannot be kept as codes", "params.base.bias: param=int4[64]"],
            lambda: mf.shard(values(), groups, precision="param=int4[64]"),
        ),
        # On the other rank in a DesyncError.
        (["LeafError", "params.base.wide", NOT_FINITE], lambda: coded(groups, "int4[64]", bad)),
        (["device, not on disk"], lambda: coded(groups, "int4[64]", **elsewhere)),
        (["a leaf of bucket", "float32, not int4[64]"], lambda: mf.gather(plain, groups)),
        (["a leaf of bucket", "int4[4], not int4[64]"], lambda: mf.gather(other, groups)),
        (["base.one", NOT_FINITE], lambda: mf.set(shards, "base.one", float("nan"), groups)),
        (["writes to a coded tensor", "set()"], lambda: shards["base.big"].data.mul_(2)),
        (["shard: its result has no derivative"], lambda: grad(inside)(torch.ones(()))),
    ):
        with pytest.raises(mf.MicsError) as caught:
            call()
        text = f"{type(caught.value).__name__}: {caught.value}"
        assert all(word in text for word in words), text


def test_errors_are_named_on_all_ranks(ranks):
    ranks(2).run(refused)


def test_shards_on_meta_have_the_layout_and_no_codes():
    groups = mf.make_groups(1)
    shards = coded(groups, "int4[64]", {k: x.to("meta") for k, x in values().items()})
    assert rows(shards) == []
    assert mf.gather(shards, groups)["base.half"].dtype == torch.bfloat16
    real = coded(groups, "int4[64]")
    assert {k: x.bucket for k, x in shards.items()} != {}
    assert [b.codes for b in buckets_of(shards)] == [b.codes for b in buckets_of(real)]
