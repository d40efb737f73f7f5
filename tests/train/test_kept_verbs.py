"""Frozen leaves kept as codes, in all that is done with a model besides training it.

The twin is always the same call over plain leaves with the values that the codes stand for.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, same_bits
from test_kept_training import batch, decoded, is_base, made, trainer_of
from torch import Tensor

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import DesyncError, PlanError
from mics_fn.offload import Coded, Stored
from tests.stress.rejoin import judged, run_loss
from tests.stress.rejoin_ranks import Heard, Loss, Rank
from tests.stress.rejoin_ranks import made as rejoin_trainer

PRECISION = "*base*: param=int4[64]"
TWO_BY_TWO = Layout((2, 2), 2)


def rows_of(params: Any) -> list[Tensor]:
    """The memory of all codes, each once."""
    held = [x.data.codes.row for x in params.values() if isinstance(x.data, Coded)]
    return list({id(row): row for row in held if row is not None}.values())


def buckets_of_codes(params: Any) -> int:
    return len({x.bucket for x in params.values() if getattr(x.bucket, "codes", None)})


def codes_of(params: Any) -> dict[str, list[Tensor]]:
    """Copies of the codes of each leaf, and of their scales."""
    held = {k: x.data for k, x in params.items() if isinstance(x.data, Coded)}
    return {k: [part.clone() for part in x.part_codes()] for k, x in held.items()}


def full(shards: Any, groups: Any) -> dict[str, Tensor]:
    return {k: x.float() for k, x in mf.unshard(shards, groups).items()}


# Replicas that are apart

SYNCS = {
    "local_sgd": lambda: mf.replicas.local_sgd(2),
    "diloco": lambda: mf.replicas.diloco(2),
}


def merged(layout: Layout, name: str, plain: bool) -> Any:
    groups = groups_of(layout)
    how = {"replica_sync": SYNCS[name](), "deterministic": True}
    trainer = trainer_of(groups, plain=plain, **how)
    before = codes_of(trainer.state.params)
    losses, found = [], []
    for i in range(5):  # the last step is not merged
        losses.append(float(trainer.step(batch(i, groups.rank)).loss))
        found.append(full(trainer.state.params, groups))
    same_bits(codes_of(trainer.state.params), before)
    outer = getattr(trainer.sync_state.outer, "params", None)
    return losses, found, {} if outer is None else full(outer, groups)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("diloco", Layout((2,), 1)),
        pytest.param("diloco", TWO_BY_TWO, marks=pytest.mark.thorough),
        pytest.param("local_sgd", TWO_BY_TWO, marks=pytest.mark.thorough),
    ],
)
def test_merges_of_replicas_are_those_over_plain_weights(ranks, name, layout):
    pool = ranks(layout.world_size)
    got, want = (pool.run(merged, layout, name, plain) for plain in (False, True))
    for mine, theirs in zip(got, want, strict=True):
        assert mine[0] == theirs[0]
        same_bits(mine[1:], theirs[1:])


def synced(plain: bool) -> Any:
    """The mean of replicas whose adapters differ, and elementwise functions of them."""
    groups = groups_of(TWO_BY_TWO)
    trainer = trainer_of(groups, plain=plain)
    params = trainer.state.params
    apart = mf.shards.map(lambda x: x * (1 + groups.rank // 2), params)
    one = mf.shards.sync_replicas(apart, groups)
    both = mf.shards.map(torch.add, apart, one)
    if not plain:
        for each in (apart, one, both):
            assert all(each[k].data is params[k].data for k in params if is_base(k))
        donated = mf.shards.sync_replicas(apart, groups, donate=True)
        same_bits(full(donated, groups), full(one, groups))
    return full(one, groups), full(both, groups)


def test_sync_replicas_and_map_leave_codes_as_they_are(ranks):
    for got, want in zip(ranks(4).run(synced, False), ranks(4).run(synced, True), strict=True):
        same_bits(got, want)


# Ranks that are lost


def lose(layout: Layout, lost: int, plain: bool, differs: bool) -> Any:
    """A rank forgets what it trained, as a new process has; its base is that of its script."""
    both = (mf.make_groups(layout.partition_size, timeout_s=20) for _ in range(2))
    trainer, other = (trainer_of(x, plain=plain, deterministic=True) for x in both)
    rank = trainer.groups.rank
    for each in (trainer, other):
        each.step(batch(0, rank))
    if rank == lost:
        for x in tree.flatten(trainer.state)[0]:
            x.fill_(0) if isinstance(x, Tensor) else None
        trainer.sync_state = replace(trainer.sync_state, step=0)
        trainer.state, trainer.member.lost = replace(trainer.state, step=0), True
        base: Any = trainer.state.params["1.base.bias"].data
        if differs:
            (base if plain else base.part_codes()[0])[:1] += 1
    before, text = trainer.groups.traffic.sent_bytes["replicas"], ""
    try:
        trainer.reset()
    except DesyncError as error:
        text = str(error)
    sent = trainer.groups.traffic.sent_bytes["replicas"] - before
    if not differs:
        for each in (trainer, other):
            each.step(batch(1, rank))
        same_bits(trainer.params(), other.params())
        same_bits(codes_of(trainer.state.params), codes_of(other.state.params))
    for each in (trainer, other):
        each.groups.close()
    nbytes = sum(x.nbytes for x in tree.flatten(other.state)[0] if isinstance(x, Tensor))
    return sent, nbytes, text


WORDS = 1200  # bytes of what all ranks compare in a reset


@pytest.mark.parametrize(
    "layout", [Layout((2,), 1), pytest.param(TWO_BY_TWO, marks=pytest.mark.thorough)], ids=str
)
def test_a_lost_rank_takes_what_is_trained_from_its_replica(ranks, layout):
    last, p = layout.world_size - 1, layout.partition_size
    found = ranks(layout.world_size).run(lose, layout, last, False, False)
    for rank, (sent, nbytes, text) in enumerate(found):
        asked = rank == last - p
        assert asked * nbytes <= sent <= asked * nbytes + WORDS * (layout.world_size // p)
        assert text == ""


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_lost_rank_that_comes_back_with_another_base_is_refused(ranks, plain):
    for _, _, text in ranks(2).run(lose, Layout((2,), 1), 1, plain, True):
        assert text.startswith("Trainer.reset: replicas have drifted apart")
        assert "first difference: state.params.1.base.bias" in text
        assert "fix: start all ranks with the same leaves that are not trained" in text


KEPT: dict[str, Any] = {"frozen": lambda path: ".0." in path, "precision": "*.0.*: param=int8[64]"}


class Kept(Rank):
    """Whose first layer is kept as codes."""

    def make(self) -> mf.Trainer:
        return rejoin_trainer(self.trial, **KEPT)


@cache
def alone(trial: Loss) -> dict[int, Heard]:
    return run_loss(trial, Kept).heard


@pytest.mark.parametrize(
    "trial",
    [
        Loss(0, 4, 2, (3,), 3, 0.0, steps=6, timeout_s=15.0),
        Loss(0, 4, 2, (0, 1), 3, 0.0, steps=6, timeout_s=15.0, scheme="zero2"),
    ],
)
@pytest.mark.thorough
def test_a_run_with_a_loss_equals_one_without(trial: Loss) -> None:
    """Processes are killed and started again."""
    found = run_loss(trial, Kept)
    row = judged(found, alone(trial.plain))
    assert row["problems"] == [], row["problems"]
    assert row["resets"] >= 1


# One leaf by its path


def got(plain: bool) -> Any:
    groups = groups_of(TWO_BY_TWO)
    trainer = trainer_of(groups, plain=plain, deterministic=True)
    trainer.step(batch(0, groups.rank))
    found = [mf.get(trainer.state, name, groups) for name in trainer.state.params]
    new = torch.linspace(-1, 1, 50)
    held = decoded(new) if plain else new
    state = mf.set(trainer.state, "0.base.bias", held, groups)
    state = mf.set(state, "1.down.weight", 0.25, groups)
    assert len(rows_of(state.params)) == (0 if plain else buckets_of_codes(state.params))
    trainer.state = state
    loss = float(trainer.step(batch(1, groups.rank)).loss)
    return found, loss, full(trainer.state.params, groups)


def test_get_and_set_on_a_state(ranks):
    for mine, theirs in zip(ranks(4).run(got, False), ranks(4).run(got, True), strict=True):
        same_bits(mine[0], theirs[0])
        assert mine[1] == theirs[1]
        same_bits(mine[2], theirs[2])


# Directories of others


def written(folder: str) -> Any:
    """What is written of codes and of plain leaves; and what is read of the latter, as codes."""
    groups = groups_of(TWO_BY_TWO)
    kept, plain = (trainer_of(groups, plain=plain) for plain in (False, True))
    for each in (kept, plain):
        each.step(batch(0, groups.rank))
    how: dict[str, Any] = {"frozen": is_base, "precision": PRECISION, "bucket_bytes": 1500}
    same, found = {k: x.float() for k, x in kept.params().items()}, []
    for name, trainer in (("kept", kept), ("plain", plain)):
        params = trainer.state.params
        mf.checkpoint.save_pretrained(f"{folder}/{name}", params, groups)
        mf.checkpoint.save_dcp(f"{folder}/{name}.dcp", trainer.state, groups)
    for name in ("kept", "plain"):
        found.append(mf.load_shards(f"{folder}/{name}", groups, **how))
        path = f"{folder}/{name}.dcp"
        found.append(mf.checkpoint.load_dcp(path, groups, like=made(), strict=False, **how))
    for params in found:
        assert len(rows_of(params)) == buckets_of_codes(params) > 0
        same_bits(full(params, groups), same)
    return {k: x.float() for k, x in plain.params().items()}


@pytest.mark.thorough
def test_directories_have_decoded_values_which_give_the_same_codes(ranks, tmp_path: Path):
    from safetensors.torch import load_file

    want = ranks(4).run(written, str(tmp_path))[0]
    for name in ("kept", "plain"):
        same_bits(load_file(tmp_path / name / "model.safetensors"), want)


# Places: codes lie on the device, whatever lies elsewhere


def in_files(folder: str, plain: bool) -> Any:
    """Adapters and their moments in files; a `Trainer` leaves frozen leaves where they are."""
    where = f"params=disk:{folder}, states=disk:{folder}"
    groups = mf.make_groups(1)
    trainer = trainer_of(groups, plain=plain, where="" if plain else where)
    losses = [float(trainer.step(batch(i, 0)).loss) for i in range(3)]
    kinds = {k: type(x.data) for k, x in trainer.state.params.items()}
    if not plain:
        assert all(kind is (Coded if is_base(k) else Stored) for k, kind in kinds.items())
    return losses, {k: x.float() for k, x in trainer.params().items()}


def test_adapters_in_files_over_codes(tmp_path: Path):
    (losses, params), (want, plain) = (in_files(str(tmp_path), x) for x in (False, True))
    assert losses == want
    same_bits(params, plain)


def test_codes_elsewhere_are_refused_before_anything_is_made(tmp_path: Path):
    groups, folder = mf.make_groups(1), tmp_path / "new"
    model = dict(made().named_parameters())
    torch.save({k: x.detach() for k, x in model.items()}, tmp_path / "weights.pt")
    mf.checkpoint.save_dcp(tmp_path / "dcp", mf.shard(model, groups), groups)
    how: dict[str, Any] = {"frozen": is_base, "precision": PRECISION}
    how["where"] = f"params=disk:{folder}"
    attempts: dict[str, Any] = {
        "shard": lambda: mf.shard(model, groups, **how),
        "load_shards": lambda: mf.load_shards(tmp_path / "weights.pt", groups, **how),
        "init_model": lambda: mf.init_model(made, groups, seed=0, **how),
        "load_dcp": lambda: mf.checkpoint.load_dcp(tmp_path / "dcp", groups, like=None, **how),
    }
    for verb, attempt in attempts.items():
        with pytest.raises(PlanError) as caught:
            attempt()
        text = str(caught.value)
        kept = "leaves that are kept as codes lie on the device, not on disk"
        assert text.startswith(f"{verb}: {kept}"), text
        assert "param=int4[64]" in text
        assert not folder.exists(), verb
    how["where"] += "; *base*: params=device"
    shards = mf.shard(model, groups, **how)
    assert all(type(x.data) is (Coded if is_base(k) else Stored) for k, x in shards.items())
