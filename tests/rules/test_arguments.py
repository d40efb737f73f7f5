# ruff: noqa: E501 - texts are pinned as they are shown
"""Wrong arguments: each is refused where it enters, in words that name it and a mend.

Each row is a call as a user would write it, and the first line of its error, or more of it. `...`
stands for what depends on the machine.
"""

import math
import pickle  # noqa: F401 - the calls below name it
import re
from copy import deepcopy
from dataclasses import replace  # noqa: F401 - the calls below name it
from io import BytesIO
from types import SimpleNamespace  # noqa: F401 - the calls below name it
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call  # noqa: F401 - the calls below name it
from torch.utils.data import DataLoader  # noqa: F401 - the calls below name it

import mics_fn as mf
from mics_fn import checkpoint, optim, placement, replicas, schedules, testing  # noqa: F401

nan = math.nan
x, y = torch.ones(4, 2), torch.ones(4, 1)
record = schedules.Schedule.parse("use 0; reduce 0")


def mse(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


class Giving(nn.Module):
    """A linear layer, whose result a function makes into another."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(2, 1), made

    def forward(self, x: torch.Tensor) -> Any:
        return self.made(self.linear(x))


TABLE = r"""
# Optimizers
>>> optim.lion(-1)
PlanError: lion: lr=-1, expected a finite number of at least 0
>>> optim.adam(0.1, betas=(0.9, 1.0))
PlanError: adam: betas[1]=1.0, expected a finite number of at least 0 and below 1
>>> mf.opt_step(state(optim.lion(lambda step: nan)), shards())
PlanError: lion: lr(0)=nan, expected a finite number of at least 0
>>> optim.warmup_cosine(1.0, 100, 10)
PlanError: warmup_cosine: warmup_steps=100, total_steps=10
>>> optim.from_torch(torch.optim.LBFGS, lr=0.1)
PlanError: from_torch: LBFGS is not known to be elementwise, and a shard is a flat piece
>>> optim.chain([optim.sgd(0.1)])
PlanError: list is not an optimizer of init and update
>>> optim.Guard(on_nonfinite="stop")
PlanError: Guard: on_nonfinite='stop', expected 'skip', 'raise', 'ignore' or None

# States
>>> mf.init_state({"w": x}, optim.sgd(0.1))
LeafError: init_state: params.w is Tensor, not a shard
>>> mf.init_state(shards(), optim.sgd)
PlanError: sgd is not an optimizer of init and update
>>> mf.opt_step(replace(state(), transform=optim.lion(0.1)), shards())
PlanError: opt_step: the state of the optimizer is of type OptimizerState, and not that of lion

# Shards
>>> mf.shard({"w": x}, None)
GroupsError: shard: groups is None
>>> mf.shard({"w": x}, groups, frozen=lambda path: "no")
PlanError: shard: frozen('w')='no', expected True or False
>>> mf.shard({"w": x}, groups, bucket_bytes="1 MB of it")
PlanError: shard: bucket_bytes='1 MB of it', expected a number of bytes of at least 1
>>> mf.gather(state(), groups)
LeafError: gather: shards.step is int, not a shard
>>> mf.scatter_grads({"w": x}, groups, like={"w": x})
LeafError: scatter_grads: like.w is Tensor, not a shard
>>> mf.opt_step(two, mf.scatter_grads({"b": x, "w": x + 1}, groups))
LeafError: opt_step: grads.b does not match its parameter

# Schedules
>>> mf.on_demand(live_bytes=1.5)
PlanError: on_demand: live_bytes=1.5, expected a number of bytes of at least 0
>>> schedules.Schedule([schedules.Action("fech", (0,))]).check([8])
PlanError: Schedule.check: actions[0] is 'fech 0'
>>> mf.defer(shards(), groups, None)
PlanError: defer: schedule=None, expected a schedule or a policy
>>> mf.record(lambda full, x: full["w"], shards(), x)
LeafError: record: the loss has shape (2,), expected one number
>>> mf.GradSum(0)
PlanError: GradSum: micro_steps=0, expected an int of at least 1
>>> mf.GradSum(where="states=host")
PlanError: GradSum: where='states=host' has no effect: it does not say where grads lie
>>> mf.GradSum(where="params: host")
PlanError: where: 'host' gives no place for a field, or two
>>> summed(lambda full: full["w"])
LeafError: GradSum.backward: the loss has shape (2,), expected one number
>>> summed(lambda full: full["w"].sum().backward())
LeafError: defer(into=): another backward went through it than that of its GradSum

# Groups
>>> mf.make_groups("1")
PlanError: partition_size='1' does not fit 1 ranks = node 1 x rank 1
>>> mf.make_groups(device="cuda:99")
GroupsError: make_groups: a rank does not have the device that was asked for
  rank 0: cuda:99 is asked for, and this process sees ... devices of its kind, on ...
>>> mf.make_groups(timeout_s=nan)
PlanError: make_groups: timeout_s=nan, expected a finite number above 0 and below 1e+08
>>> mf.make_groups(heartbeat_s=0.1)
PlanError: make_groups: heartbeat_s=0.1 would take ranks for lost that are well
>>> mf.reset(None)
GroupsError: reset: got NoneType, expected Groups

# Models
>>> mf.init_model(lambda: nn.Linear(2, 1), groups, seed="0")
PlanError: init_model: seed='0', expected an int of at least 0

# Trainers
>>> trainer(None)
PlanError: Trainer: model=None, expected an nn.Module or a function loss_fn(params, batch)
>>> trainer(nn.Linear(2, 1), groups, optim.sgd(0.1))
GroupsError: Trainer: groups is of type Transform, expected groups
>>> trainer(frozen)
LeafError: Trainer: no parameter is trained: all are frozen, or there is none
>>> mf.init_model(lambda: nn.Linear(2, 1), groups, seed=0, weights="f", trust="no")
PlanError: init_model: trust='no', expected True or False
>>> trainer(loss="mse")
PlanError: Trainer: loss='mse', expected a function loss(model, batch)
>>> trainer(schedule="fetch 0").step(x)
PlanError: defer: schedule='fetch 0', expected a schedule or a policy
>>> trainer(checkpoint="folder")
PlanError: Trainer: checkpoint='folder', expected a Checkpoints
>>> trainer().step(x[:0])
LeafError: Trainer: the batch has no sample
>>> trainer().step(DataLoader([1.0]))
LeafError: Trainer: the batch is a DataLoader
>>> trainer(loss=lambda model: model(x).sum())
PlanError: Trainer: loss cannot be called as loss(model, batch)
>>> replicas.reduced_by(lambda grads, groups: grads, init=lambda params: 0)
PlanError: reduced_by: hop2 cannot be called as hop2(grads, state, groups)
>>> trainer().fit([], 1, progress=False)
LeafError: Trainer.fit: the loader gave no batch
>>> trainer().fit((x for _ in range(2)), 3, progress=False)
LeafError: Trainer.fit: the loader gave no batch: generator can be gone through only once
>>> mf.sampler(groups, range(4))
GroupsError: sampler: groups is range
>>> trainer(checkpoint=mf.Checkpoints("/proc/nope"))
FileError: Checkpoints: cannot write to /proc/nope
>>> replicas.local_sgd(2).after(shards(), state(), groups)
PlanError: ReplicaSync.after: state is of type TrainState, expected a SyncState

# The first day
>>> trainer(loss=nn.functional.cross_entropy)
PlanError: Trainer: loss=cross_entropy takes (input, target), expected loss(model, batch)
  fix: call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(Giving(lambda out: {"out": out}), loss=None).step(x)
LeafError: Trainer: the Giving gave dict, and without loss= that is the loss
>>> trainer(loss=lambda model, x: None).step(x)
LeafError: Trainer: the loss is NoneType, expected one number
>>> trainer(loss=None).step((x, y))
TypeError: Linear.forward() takes 2 positional arguments but 3 were given
  Trainer called the model with parts of the batch; pass loss=, such as lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(loss=None).step({"x": x, "y": y})
TypeError: Linear.forward() got an unexpected keyword argument 'x'
>>> trainer(loss=None).step(x)
LeafError: Trainer: the Linear gave shape (4, 1), and without loss= that is the loss
>>> trainer(Giving(lambda out: SimpleNamespace(loss=None)), loss=None).step(x)
LeafError: Trainer: the Giving gave SimpleNamespace, and without loss= that is the loss
  expected one number, or a result whose .loss is one: give the batch its labels
  fix: pass loss=, such as lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(Giving(lambda out: out + None), loss=None).step(x)
TypeError: unsupported operand type(s) for +: 'Tensor' and 'NoneType'
>>> trainer(loss=lambda model, x, y: nn.functional.mse_loss(model(x), y))
PlanError: Trainer: loss cannot be called as loss(model, batch)
  it takes (model, x, y): missing a required argument: 'y'
  fix: call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(loss=lambda a, b: (a - b).square().mean()).step((x, y))
TypeError: unsupported operand type(s) for -: 'Linear' and 'tuple'
  Trainer called the loss with the model and a tuple
>>> trainer(loss=lambda model, batch: model(batch.inputs).mean()).step({"inputs": x})
AttributeError: 'dict' object has no attribute 'inputs'
  Trainer called the loss with the model and a dict
>>> trainer(Giving(lambda out: out.nope), loss=mse).step(x)
AttributeError: 'Tensor' object has no attribute 'nope'
>>> trainer(loss=lambda model, x: (mse(model, x), model(x))).step(x)
LeafError: Trainer: the loss is tuple, expected one number
>>> trainer(loss=lambda model, x: model(x).square()).step(x)
LeafError: Trainer: the loss has shape (4, 1), expected one number
>>> trainer(loss=lambda model, x: mse(model, x).item()).step(x)
LeafError: Trainer: the loss is float, expected one number
>>> trainer(loss=lambda model, x: mse(model, x).backward()).step(x)
LeafError: Trainer: the loss called backward(), which Trainer does once the loss is returned
  fix: return the loss, and leave out backward(), zero_grad() and the optimizer's step()
>>> mf.shard(nn.Linear(2, 1), groups)
LeafError: shard: params is Linear, expected torch.Tensor
>>> functional_call(nn.Linear(2, 1), of_linear(), (x,))
TypeError: Sharded(...) is not an instance of torch.Tensor
>>> trainer().save("run")
AttributeError: Trainer has no attribute 'save'
  fix: pass checkpoint=; weights are state_dict()
>>> trainer().train()
AttributeError: Trainer has no attribute 'train'
  fix: trainer.step(batch) is a whole step
>>> trainer().optimizer.zero_grad()
AttributeError: Trainer has no attribute 'optimizer'
  fix: trainer.state.opt is its state; the optimizer itself is a function of values

# Checkpoints
>>> checkpoint.save("a", 5, groups, step=2)
LeafError: save: the state has no tensor to save
>>> checkpoint.save("a", state(), groups, step=1, overwrite=True)
PlanError: save: overwrite=True, expected 'never' or 'newer'

# Functions and collectives of one's own
>>> mf.opt_step(state(optim.from_update(lambda p: None, lambda g, s, p: (None, s))), shards())
LeafError: from_update: the updates that update gave do not fit the parameters
>>> mf.collectives.start(comm, x, [x], name="mine", sent_bytes=0)
PlanError: start: issue is of type Tensor, expected a function that starts it

# Looking inside, faults, trees
>>> mf.get(shards(), groups, "w")
LeafError: groups.b: got str, which is no groups
>>> mf.set(roots(), "opt.moments.exp_avg_sq.w", -1.0, groups)
LeafError: set: opt.moments.exp_avg_sq.w has a value that state=int8[256] cannot hold
>>> injected(rank=5)
PlanError: inject: rank=5 in a world of 1
"""


def names_for(groups: Any) -> dict[str, Any]:
    """What the calls above may name."""

    def shards() -> Any:
        return mf.shard({"b": torch.ones(3), "w": torch.ones(2)}, groups)

    def state(optimizer: Any = None) -> Any:
        return mf.init_state(shards(), optimizer or optim.adam(0.1))

    def of_linear() -> Any:
        return mf.shard(dict(nn.Linear(2, 1).named_parameters()), groups)

    def roots() -> Any:
        full = {"w": torch.zeros(4096)}
        return mf.init_state(mf.shard(full, groups, precision="state=int8"), optim.adam(0.1))

    def trainer(*given: Any, **options: Any) -> Any:
        usual: list[Any] = [nn.Linear(2, 1), optim.sgd(0.1), groups]
        options = {"loss": mse, **options}
        return mf.Trainer(*given, *usual[len(given) :], **options)

    def injected(**given: Any) -> None:
        with testing.inject(**{"rank": 0, "step": 1, "operation": "step", "fault": "nan", **given}):
            pass

    def summed(loss: Any) -> None:
        total = mf.GradSum()
        with mf.defer(shards(), groups, mf.keep_all(), into=total) as full:
            total.backward(loss(full))

    comm = groups.communicators["partition"]
    two = mf.init_state(mf.shard({"b": x, "w": x + 1}, groups, bucket_bytes=32), optim.sgd(0.1))
    frozen = nn.Linear(2, 1).requires_grad_(False)
    return {**globals(), **locals()}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return names_for(mf.make_groups(1))


def rows() -> list[tuple[str, str]]:
    """Each call of the table with the text of its error."""
    parts = re.split(r"^>>> ", re.sub(r"\n# .*\n", "\n", TABLE), flags=re.MULTILINE)[1:]
    return [(call, text.strip()) for call, text in (part.split("\n", 1) for part in parts)]


def said(call: str, names: dict[str, Any]) -> str:
    """The error of a call, with its notes."""
    with pytest.raises((mf.MicsError, TypeError, AttributeError, FileNotFoundError)) as caught:
        eval(call, dict(names))
    error = caught.value
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def fits(text: str, found: str) -> bool:
    begin = "\n".join(found.splitlines()[: text.count("\n") + 1])
    return re.fullmatch(re.escape(text).replace(re.escape("..."), ".*"), begin) is not None


@pytest.mark.parametrize(("call", "text"), rows(), ids=[call for call, _ in rows()])
def test_a_wrong_argument_is_named(names, call: str, text: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = said(call, names)
    assert fits(text, found), found
    assert not list(tmp_path.iterdir())


def said_on_a_rank(calls: list[str]) -> list[str]:
    return [said(call, names_for(mf.make_groups(2))) for call in calls]


@pytest.mark.thorough
def test_the_errors_of_the_first_day_are_those_of_all_ranks(ranks):
    begin = TABLE.partition("# The first day\n")[2].partition("\n#")[0]
    table = [(call, text) for call, text in rows() if f">>> {call}\n" in begin]
    assert len(table) > 20
    for found in ranks(2).run(said_on_a_rank, [call for call, _ in table]):
        for (call, text), got in zip(table, found, strict=True):
            assert fits(text, got), f"{call}\n{got}"


def test_sizes_can_be_written_with_units():
    with mf.make_groups(1) as groups:
        sizes: Any = {"live_bytes": "1 GiB", "bucket_bytes": "25MB"}
        mf.Trainer(nn.Linear(2, 1), optim.sgd(0.1), groups, loss=mse, **sizes).step(x)
    given: tuple[Any, ...] = ("0.5kB", 1e9, "4096")
    assert [mf.on_demand(live_bytes=x).live_bytes for x in given] == [500, 1_000_000_000, 4096]


# What people of other libraries try first


def test_backward_through_gather_needs_pieces_that_require_a_gradient():
    """As torch says of any loss; `gather` tells how, and `GradSum.backward` needs neither."""
    with mf.make_groups(1) as groups:
        shards = mf.shard({"w": torch.ones(2)}, groups)
        full = mf.gather(shards, groups)["w"]
        with pytest.raises(RuntimeError, match="does not require grad"):
            full.square().sum().backward()
        assert "element 0 of tensors does not require grad" in " ".join(
            f"{mf.gather.__doc__}".split()
        )
        assert full.numpy().tolist() == deepcopy(full).tolist() == [1.0, 1.0]
        shards["w"].data.requires_grad_()
        mf.gather(shards, groups)["w"].square().sum().backward()
        assert shards["w"].data.grad.tolist() == [2.0, 2.0]  # pyright: ignore


def test_a_deferred_tensor_is_copied_and_never_pickled(ranks):
    assert ranks(2).run(pickled) == [[1.0, 1.0]] * 2


def pickled() -> list[float]:
    groups = mf.make_groups(2)
    shards = mf.shard({"w": torch.ones(2)}, groups)
    with mf.defer(shards, groups, mf.on_demand(live_bytes=0)) as full:
        with pytest.raises(mf.errors.LeafError, match=r"bucket 0\n.*holds w\n  fix: save shards"):
            torch.save(full["w"], BytesIO())
        return deepcopy(full["w"]).tolist()


def test_ranks_with_other_budgets_are_told_of_budgets(ranks):
    for found in ranks(2).try_run(other_budgets):
        first, *budgets, fix = found.message.splitlines()
        assert (found.type_name, first) == ("DesyncError", "defer: ranks disagree on the schedule")
        assert [f"rank {i}:" in x and f"live_bytes={i}," in x for i, x in enumerate(budgets)] == [
            True
        ] * 2
        assert "live_bytes=" in fix


def other_budgets() -> None:
    groups = mf.make_groups(2)
    shards = mf.shard({"w": torch.ones(2)}, groups)
    mf.defer(shards, groups, mf.on_demand(live_bytes=groups.rank))
