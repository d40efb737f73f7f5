"""Models in parts are saved as one step, load in any number of parts, and are exported whole."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from cases import random, same_bits
from steps import at, damage_values
from torch.distributed.device_mesh import init_device_mesh

import mics_fn as mf
from mics_fn import checkpoint, optim, tree
from mics_fn.checkpoint import save_dcp, save_pretrained
from mics_fn.errors import FileError, GroupsError, LeafError, PlanError
from mics_fn.optim.flat import by_leaf

CUT = "*up*: 0; *down: 1; *deep: 2"
DIMS = {"up.w": 0, "up.b": 0, "down": 1, "deep": 2}


class Parts(NamedTuple):
    """A world of 4 ranks: how many parts and stages there are, and the size of partition groups."""

    parts: int
    partition_size: int
    stages: int = 1


_made: dict[Parts, mf.Groups] = {}


def groups_in(layout: Parts) -> mf.Groups:
    """This rank's groups, made once; without parts and stages those of a plain job."""
    if layout not in _made or _made[layout].closed:
        shape = layout.stages, 4 // layout.parts // layout.stages, layout.parts
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
        how: dict[str, Any] = {"mesh": mesh["dp", "tp"], "model": "tp"}
        if layout.stages > 1:
            how = {"mesh": mesh, "model": "tp", "stages": "pp"}
        how = {**how, "cut": CUT} if layout.parts * layout.stages > 1 else {}
        _made[layout] = mf.make_groups(layout.partition_size, timeout_s=20, **how)
    return _made[layout]


def whole(seed: int) -> dict[str, torch.Tensor]:
    """Leaves that are cut along each dim, copies, and one that no chunk has much of."""
    shapes = {"up.w": (8, 6), "up.b": (8,), "down": (5, 8), "deep": (3, 2, 4, 3), "norm": (6,)}
    return {name: random(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def part_of(full: dict[str, torch.Tensor], groups: mf.Groups) -> dict[str, torch.Tensor]:
    if groups.model is None:
        return full
    place, count = groups.model.parts.rank, groups.model.parts.size
    return {k: x.chunk(count, DIMS[k])[place] if k in DIMS else x for k, x in full.items()}


def state_in(layout: Parts, seed: int = 3, **options: Any) -> tuple[Any, mf.Groups]:
    """A state after two steps of AdamW, so that moments have values; and its groups."""
    groups = groups_in(layout)
    stage = groups.model.stages.rank if groups.model else 0
    params = mf.shard(
        part_of(whole(seed + 100 * stage), groups), groups, bucket_bytes=300, **options
    )
    state = mf.init_state(params, optim.adamw(0.1), buffers={"mean": torch.arange(7.0) + stage})
    for k in range(2):
        grads = mf.shard(part_of(whole(9 + k), groups), groups, bucket_bytes=300, **options)
        state = mf.opt_step(state, grads)
    return replace(state, step=state.step + 10 * stage), groups


def everything(state: Any, groups: mf.Groups) -> Any:
    """All of a state, as it would be without parts."""
    plain = by_leaf(state)
    moments = {kind: mf.unshard(x, groups, model=True) for kind, x in plain.opt.moments.items()}
    params = mf.unshard(plain.params, groups, model=True)
    return params, moments, plain.opt.count, plain.opt.scalars, plain.buffers, plain.step


def saved_in(layout: Parts, folder: str, how: str = "save") -> Any:
    state, groups = state_in(layout)
    extra = {"rank": groups.rank}
    if how == "save":
        path = checkpoint.save(folder, state, groups, step=2, extra=extra)
    else:
        path = checkpoint.start_save(folder, state, groups, step=2, extra=extra).wait()
    return path, everything(state, groups)


def loaded_in(layout: Parts, folder: str, where: str = "", donate: bool = False) -> Any:
    like, groups = state_in(layout, 50)
    like = mf.move(like, where) if where else like
    found = checkpoint.load(folder, like, groups, donate=donate)
    got = everything(found.state, groups)
    grads = tree.map_leaves(torch.ones_like, mf.move(found.state.params, ""))
    assert mf.opt_step(found.state, grads).step == found.state.step + 1
    return found.extra, got


SOURCE = Parts(2, 2)
TARGETS = [SOURCE, Parts(1, 4), Parts(4, 1), Parts(2, 1), Parts(1, 2)]


def test_parts_are_saved_once_and_load_in_any_number_of_parts(ranks, tmp_path: Path) -> None:
    found = ranks(4).run(saved_in, SOURCE, f"{tmp_path}")
    paths, states = zip(*found, strict=True)
    assert len({*paths}) == 1
    for state in states:
        same_bits(state, states[0])
    names = json.loads((paths[0] / "MANIFEST.json").read_text())["tensors"]
    assert names["params.up.w in parts along 0"] == ["float32", [2, 4, 6]]
    assert names["opt.moments.exp_avg.deep in parts along 2"] == ["float32", [2, 3, 2, 2, 3]]
    assert names["params.norm"] == ["float32", [6]]
    nbytes = 0
    for file in paths[0].glob("*.safetensors"):
        header = int.from_bytes(file.read_bytes()[:8], "little")
        nbytes += file.stat().st_size - 8 - header
    full = sum(x.nbytes for x in whole(0).values())
    assert nbytes <= 3 * full + 8 * 5 + 7 * 4 + 4 * 16, "each byte is there once"
    for i, target in enumerate(TARGETS):
        got = ranks(4).run(loaded_in, target, f"{tmp_path}", "", bool(i % 2))
        for rank, (extra, state) in enumerate(got):
            same_bits(state, states[0])
            assert (target is not SOURCE) or extra == {"rank": rank}
    assert checkpoint.verify(tmp_path).files == 4


@pytest.mark.parametrize(("source", "target"), [(Parts(1, 4), Parts(4, 1)), (Parts(4, 1), SOURCE)])
def test_a_model_is_cut_anew(ranks, tmp_path: Path, source: Parts, target: Parts) -> None:
    state = ranks(4).run(saved_in, source, f"{tmp_path}", "start_save")[0][1]
    for where in ("", f"states=disk:{tmp_path}"):
        for _, got in ranks(4).run(loaded_in, target, f"{tmp_path}", where):
            same_bits(got, state)


def stages_in(layout: Parts, folder: str) -> Any:
    """Save and load stages with other leaves under equal names."""
    state, groups = state_in(layout)
    assert groups.model is not None
    mine = {
        "train": state,
        f"only {groups.model.stages.rank}": torch.ones(groups.model.stages.rank),
    }
    checkpoint.save(folder, mine, groups, step=1, extra=groups.rank)
    like = {**mine, "train": state_in(layout, 70)[0]}
    found = checkpoint.load(folder, like, groups)
    assert found.extra == groups.rank
    same_bits(everything(found.state["train"], groups), everything(state, groups))
    assert found.state["train"].step == state.step == 2 + 10 * groups.model.stages.rank
    stage = groups.model.stages.rank
    other = {**mine, "train": replace(state, step=stage * groups.rank)}  # not even in a stage
    with pytest.raises(mf.errors.DesyncError) as caught:
        checkpoint.save(folder, other, groups, step=2)
    return str(caught.value), checkpoint.steps(folder)


@pytest.mark.parametrize("layout", [Parts(1, 2, 2), Parts(2, 1, 2)])
def test_stages_are_saved_as_one_step(ranks, tmp_path: Path, layout: Parts) -> None:
    found = ranks(4).run(stages_in, layout, f"{tmp_path}")
    assert all(steps == [1] for _, steps in found)
    for rank, (text, _) in enumerate(found):
        told = "disagree on the train.step of stage 1\n  rank 2: " if rank > 1 else "another stage"
        assert told in text
    names = json.loads((next(tmp_path.glob("step-*")) / "MANIFEST.json").read_text())
    assert names["values"]["train.step of stage 1"] == 12
    assert {"only 0 of stage 0", "only 1 of stage 1"} <= {*names["tensors"]}
    assert checkpoint.verify(tmp_path).files == 4
    ranks(4).run(other_stages, SOURCE, f"{tmp_path}")
    ranks(4).run(other_stages, Parts(1, 1, 4), f"{tmp_path}")


def other_stages(layout: Parts, folder: str) -> None:
    state, groups = state_in(layout)
    with pytest.raises(FileError, match="stage"):
        checkpoint.load(folder, {"train": state}, groups)


def error_of(begin: Any, *args: Any) -> str:
    try:
        begin(*args, step=2).wait()
    except FileError as error:
        return str(error)
    return "nothing"


def refused_in(folder: str) -> None:
    """What fails on one rank of one part, and what does not fit, is an error of all."""
    state, groups = state_in(SOURCE)
    checkpoint.save(folder, state, groups, step=1)

    def fail() -> None:
        if groups.rank == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for begin in (checkpoint.save, checkpoint.start_save):
        with at("save: write", fail):
            caught = error_of(begin, folder, state, groups)
        assert "on rank 3" in caught
        assert "No space left" in caught
    assert checkpoint.steps(folder) == [1]
    found = checkpoint.load(folder, state_in(SOURCE, 60)[0], groups)
    same_bits(everything(found.state, groups), everything(state, groups))
    wider = {**part_of(whole(0), groups), "up.b": torch.ones(6)}
    like = mf.init_state(mf.shard(wider, groups, bucket_bytes=300), optim.adamw(0.1))
    with pytest.raises(FileError, match=r"params.up.b: saved \(8,\) float32, expected \(12,\)"):
        checkpoint.load(folder, replace(like, buffers=state.buffers), groups)
    plain = groups_in(Parts(1, 2))
    with pytest.raises(PlanError, match="pass the groups that the tree was sharded with"):
        checkpoint.save(folder, state, plain, step=3)
    with pytest.raises(PlanError, match="has parts of leaves, the groups have whole ones"):
        mf.unshard(state.params, plain, model=True)
    with pytest.raises(GroupsError, match="a hierarchy"):
        mf.unshard(state.params, groups.hierarchy, model=True)
    got = mf.unshard(state.params, groups)
    same_bits(got, mf.unshard(state.params, groups.hierarchy))
    assert got["down"].shape == (5, 4)
    if groups.rank == 0:
        damage_values(next(Path(folder).glob("step-*")) / "rank-00003.safetensors")
    with pytest.raises(FileError, match="is damaged") as caught:
        checkpoint.load(folder, state, groups)
    assert "rank-00003" in str(caught.value)


def test_errors_are_of_all_ranks_of_all_parts(ranks, tmp_path: Path) -> None:
    ranks(4).run(refused_in, f"{tmp_path}")
    with pytest.raises(FileError, match="rank-00003"):
        checkpoint.verify(tmp_path)


def independent_in(folder: str) -> None:
    """Replicas that have values of their own, in two parts each: all are saved."""
    layout = Parts(2, 1)
    state, groups = state_in(layout)
    assert groups.model is not None
    shift = groups.position + 2.0 * groups.model.parts.rank
    own = replace(state, params=mf.shards.map(lambda x: x + shift, state.params))
    checkpoint.save(folder, own, groups, step=1, replicas="independent")
    found = checkpoint.load(folder, state_in(layout, 5)[0], groups, replicas="independent")
    pairs = zip(*(tree.flatten(x)[0] for x in (found.state, own)), strict=True)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
    for other in (layout, Parts(1, 1)):
        how: Any = {} if other is layout else {"replicas": "independent"}
        like, on = state_in(other)
        with pytest.raises(FileError, match="does not fit"):
            checkpoint.load(folder, like, on, **how)


def test_replicas_of_their_own_are_saved_part_by_part(ranks, tmp_path: Path) -> None:
    ranks(4).run(independent_in, f"{tmp_path}")


CODED = "*up.w: param=int4[64]; *norm: param=int8[64]"


def codes_in(folder: str) -> None:
    frozen: dict[str, Any] = {"frozen": lambda path: path in ("up.w", "norm")}
    layout = Parts(2, 1)
    state, groups = state_in(layout, precision=CODED, **frozen)
    checkpoint.save(folder, state, groups, step=1)
    for other in (layout, SOURCE):  # of other p
        like, on = state_in(other, 9, precision=CODED, **frozen)
        found = checkpoint.load(folder, like, on)
        same_bits(everything(found.state, on), everything(state, groups))
    like, on = state_in(Parts(4, 1), precision=CODED, **frozen)
    with pytest.raises(FileError, match=r"up.w as int4\[64\] in 2 parts along 0"):
        checkpoint.load(folder, like, on)


def test_codes_load_in_as_many_parts_alone(ranks, tmp_path: Path) -> None:
    ranks(4).run(codes_in, f"{tmp_path}")


def experts_in(folder: str) -> None:
    """Dense leaves on groups of all ranks, and experts in parts: groups of their own, one step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    experts = mf.make_groups(2, mesh=mesh, model="ep", cut="*: 0", timeout_s=20)
    groups = {"dense": groups_in(Parts(1, 4)), "experts": {"w": experts}}
    full = {"dense": random(1, 5, 7), "experts": {"w": random(2, 4, 3)}}
    mine = {**full, "experts": {"w": full["experts"]["w"].chunk(2)[dist_part(experts)]}}
    with experts:
        state = mf.init_state(mf.shard(mine, groups), optim.adamw(0.1))
        checkpoint.save(folder, state, groups, step=1)
        zeros = tree.map_leaves(torch.zeros_like, mine)
        like = mf.init_state(mf.shard(zeros, groups), optim.adamw(0.1))
        found = checkpoint.load(folder, like, groups)
        same_bits(mf.unshard(found.state.params, groups, model=True), full)
    plain = groups_in(Parts(1, 2))
    like = mf.init_state(mf.shard(tree.map_leaves(torch.zeros_like, full), plain), optim.adamw(0.1))
    found = checkpoint.load(folder, like, plain)
    same_bits(mf.unshard(found.state.params, plain), full)


def dist_part(groups: mf.Groups) -> int:
    assert groups.model is not None
    return groups.model.parts.rank


def test_experts_and_dense_leaves_are_one_step(ranks, tmp_path: Path) -> None:
    ranks(4).run(experts_in, f"{tmp_path}")
    assert checkpoint.verify(tmp_path).tensors == 2 * 3 + 1


# Exports, which join parts.


def exported_in(layout: Parts, folder: str) -> Any:
    state, groups = state_in(layout)
    params = {**state.params, "buffer": torch.arange(8.0)[::2]}
    save_pretrained(f"{folder}/pretrained", params, groups, max_file_bytes=200)
    save_dcp(f"{folder}/dcp", state, groups, prefix="model.", max_file_bytes=300)
    return everything(state, groups)


@pytest.mark.parametrize("layout", [SOURCE, Parts(2, 1), Parts(4, 1)])
@pytest.mark.short("layout0")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_exports_have_whole_leaves(ranks, tmp_path: Path, layout: Parts) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    params, moments, *_ = ranks(4).run(exported_in, layout, f"{tmp_path}")[0]
    files = [*(tmp_path / "pretrained").glob("*.safetensors")]
    assert len(files) > 4, "several rounds"
    found = {name: x for file in files for name, x in safetensors.torch.load_file(file).items()}
    same_bits(found, {**params, "buffer": torch.arange(8.0)[::2]})
    like = {f"model.{k}": torch.zeros_like(x) for k, x in params.items()}
    kept = {f"optimizer.state.{k}.{kind}": x for kind in moments for k, x in moments[kind].items()}
    got = {**like, **{name: torch.zeros_like(x) for name, x in kept.items()}}
    nested = {"model": {k.removeprefix("model."): x for k, x in got.items() if k in like}}
    nested["optimizer"] = {k.removeprefix("optimizer."): x for k, x in got.items() if k not in like}
    load(nested, checkpoint_id=tmp_path / "dcp", no_dist=True)
    same_bits(nested["model"], params)
    same_bits(nested["optimizer"], {k.removeprefix("optimizer."): x for k, x in kept.items()})


def joined_in(layout: Parts) -> None:
    groups = groups_in(layout)
    for dtype in (torch.float32, torch.bfloat16):
        full = {k: x.to(dtype) for k, x in whole(4).items()}
        full["empty"] = torch.zeros(0, 4, dtype=dtype)
        shards = mf.shard({**part_of(full, groups), "count": torch.tensor([3])}, groups)
        got = mf.unshard(shards, groups, model=True)
        same_bits(got, {**full, "count": torch.tensor([3])})
        assert len({x.untyped_storage().data_ptr() for x in got.values() if x.numel()}) == 6


def test_unshard_joins_parts(ranks) -> None:
    for layout in (SOURCE, Parts(4, 1), Parts(1, 2)):
        ranks(4).run(joined_in, layout)


def stages_are_not_exported(folder: str) -> None:
    state, groups = state_in(Parts(2, 1, 2))
    for export in (save_pretrained, save_dcp):
        with pytest.raises(PlanError, match="leaves of one stage alone"):
            export(f"{folder}/a", state.params, groups)


def test_stages_are_not_exported(ranks, tmp_path: Path) -> None:
    ranks(4).run(stages_are_not_exported, f"{tmp_path}")
    assert os.listdir(tmp_path) == []


# A `Trainer` whose module has DTensors.


def module_of(mesh: Any) -> torch.nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4), torch.nn.Dropout(0.25)
    model = torch.nn.Sequential(*layers)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def trained_in(folder: str, steps: int, begun: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with mf.make_groups(2, mesh=mesh, model="tp", timeout_s=20) as groups:
        torch.manual_seed(groups.position)  # the same in all parts, as is what dropout draws
        trainer = mf.Trainer(
            module_of(mesh["tp"]),
            optim.adamw(0.1),
            groups,
            loss=lambda model, x: model(x).square().mean(),
            checkpoint=mf.Checkpoints(folder, every=2) if folder else None,
            guard=optim.Guard(max_norm=0.1),
        )
        if not begun:
            torch.manual_seed(groups.position)
        assert trainer.state.step == begun
        losses = [float(trainer.step(random(k, 3, 4)).loss) for k in range(begun, steps)]
        full = everything(trainer.state, groups)
    return losses, full


def test_a_trainer_of_dtensors_goes_on_to_the_bit(ranks, tmp_path: Path) -> None:
    want = ranks(4).run(trained_in, "", 5, 0)
    first = ranks(4).run(trained_in, f"{tmp_path}", 3, 0)
    assert checkpoint.latest(tmp_path) == 2
    second = ranks(4).run(trained_in, f"{tmp_path}", 5, 2)
    for (losses, full), (before, _), (after, got) in zip(want, first, second, strict=True):
        assert (before[:2], after) == (losses[:2], losses[2:])
        same_bits(got, full)


class Whole(torch.nn.Module):
    """A module with these leaves, which one process would have; `tied` is `up.w`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 8)
        self.down = torch.nn.Parameter(torch.randn(5, 8))
        self.deep = torch.nn.Parameter(torch.randn(3, 2, 4, 3), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.randn(6))
        self.up_tied = self.up.weight


def read_in(layout: Parts, folder: str) -> None:
    groups = groups_in(layout)
    full = {**whole(4), "count": torch.tensor([3])}
    for path in (full, f"{folder}/a.safetensors", f"{folder}/dcp"):
        got = mf.load_shards(path, groups, bucket_bytes=300)
        want = mf.shard({**part_of(full, groups), "count": full["count"]}, groups, bucket_bytes=300)
        pairs = zip(*(tree.flatten(x, mf.shards.is_leaf)[0] for x in (got, want)), strict=True)
        assert all(a.bucket is b.bucket and torch.equal(a.data, b.data) for a, b in pairs)
    _, made = mf.init_model(Whole, groups, seed=5)
    torch.manual_seed(5)
    model = Whole()
    same_bits(
        mf.unshard(made, groups, model=True), dict(model.named_parameters(remove_duplicate=False))
    )
    assert isinstance(made["deep"], mf.shards.Fixed)
    assert isinstance(made["up_tied"], mf.shards.Tied)
    assert (made["down"].shape == (5, 8)) is (groups.model is None)
    if groups.model is not None:
        mesh = init_device_mesh("cpu", (4 // layout.parts, layout.parts), mesh_dim_names=("d", "t"))
        like = module_of(mesh["t"])
        wanted = {k: random(3, *x.shape) for k, x in like.named_parameters()}
        found = mf.load_shards(wanted, groups, like=like)
        same_bits(mf.unshard(found, groups, model=True), wanted)
        assert found["2.weight"].shape == (4, 8 // layout.parts)
        with pytest.raises(LeafError, match=r"params.up.b of \(7,\) is cut unevenly along dim 0"):
            mf.load_shards({**full, "up.b": torch.ones(7)}, groups)


@pytest.mark.parametrize("layout", [SOURCE, Parts(4, 1), Parts(1, 2)])
@pytest.mark.short("layout0")
def test_full_leaves_are_read_into_parts(ranks, tmp_path: Path, layout: Parts) -> None:
    full = {**whole(4), "count": torch.tensor([3])}
    safetensors.torch.save_file(full, tmp_path / "a.safetensors")
    one = mf.make_groups(1)
    save_dcp(tmp_path / "dcp", {**mf.shard(full, one)}, one)
    ranks(4).run(read_in, layout, f"{tmp_path}")
