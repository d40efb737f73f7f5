# ruff: noqa: E501 - texts are pinned as they are shown
"""Wrong arguments: each is refused where it enters, in words that name it and a mend.

Each row is a call as a user would write it, and all that its error says. `...` in a text stands for
what depends on the machine.
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
from mics_fn import checkpoint, optim, placement, replicas, schedules, testing, tree  # noqa: F401

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


class Eighths(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.register_buffer("scale", torch.ones(2).to(torch.float8_e4m3fn))


TABLE = r"""
# Optimizers
>>> optim.lion(-1)
PlanError: lion: lr=-1, expected a finite number of at least 0
  fix: pass a number such as 1e-3, a 0-dim tensor, or a function of the step
>>> optim.adamw(-1)
PlanError: adamw: lr=-1, expected a finite number of at least 0
  fix: pass a number such as 1e-3, a 0-dim tensor, or a function of the step
>>> optim.sgd("0.1")
PlanError: sgd: lr='0.1', expected a finite number of at least 0
  fix: pass a number such as 1e-3, a 0-dim tensor, or a function of the step
>>> optim.adam(True)
PlanError: adam: lr=True, expected a finite number of at least 0
  fix: pass a number such as 1e-3, a 0-dim tensor, or a function of the step
>>> optim.lion(torch.ones(2))
PlanError: lion: lr is a tensor of shape (2,) and torch.float32 on cpu, expected a number
  fix: pass a number, or torch.tensor(number)
>>> optim.sgd(torch.tensor(0.1, device="meta"))
PlanError: sgd: lr is a tensor of shape () and torch.float32 on meta, expected a number
  fix: pass a number, or torch.tensor(number)
>>> optim.sgd(torch.tensor(True))
PlanError: sgd: lr is a tensor of shape () and torch.bool on cpu, expected a number
  fix: pass a number, or torch.tensor(number)
>>> optim.sgd(0.1, momentum=-1)
PlanError: sgd: momentum=-1, expected a finite number of at least 0
>>> optim.sgd(0.1, momentum=0.9, nesterov="no")
PlanError: sgd: nesterov='no', expected True or False
>>> optim.adam(0.1, betas=(0.9, 1.0))
PlanError: adam: betas[1]=1.0, expected a finite number of at least 0 and below 1
>>> optim.adamw(0.1, eps=nan)
PlanError: adamw: eps=nan, expected a finite number of at least 0
>>> optim.lion(0.1, weight_decay=None)
PlanError: lion: weight_decay=None, expected a finite number of at least 0
>>> optim.lion(0.1, decay_mask="bias")
PlanError: lion: decay_mask='bias', expected a function from the path of a leaf to a bool
  fix: pass a function such as lambda path: 'bias' not in path
>>> mf.opt_step(state(optim.adamw(0.1, decay_mask=lambda path: "no")), shards())
PlanError: adamw: decay_mask('b')='no', expected True or False
  fix: let the function return a bool
>>> mf.opt_step(state(optim.lion(0.1, decay_mask=lambda path: x)), shards())
PlanError: lion: decay_mask('b') is of type Tensor, expected True or False
  fix: let the function return a bool
>>> mf.opt_step(state(optim.lion(lambda step: nan)), shards())
PlanError: lion: lr(0)=nan, expected a finite number of at least 0
  fix: let the function of the step give a rate for every step
>>> mf.opt_step(state(optim.sgd(lambda step: torch.tensor(nan))), shards())
PlanError: sgd: lr(0)=nan, expected a finite number of at least 0
  fix: let the function of the step give a rate for every step
>>> optim.warmup_cosine(1.0, 100, 10)
PlanError: warmup_cosine: warmup_steps=100, total_steps=10
  the rate would never fall: the warmup is a part of the whole
  fix: the order is peak, warmup_steps, total_steps, floor
>>> optim.warmup_cosine(-1.0, 1, 10)
PlanError: warmup_cosine: peak=-1.0, expected a finite number of at least 0
  fix: the order is peak, warmup_steps, total_steps, floor
>>> optim.warmup_cosine(1.0, 1.5, 10)
PlanError: warmup_cosine: warmup_steps=1.5, expected an int of at least 0
  fix: the order is peak, warmup_steps, total_steps, floor
>>> optim.warmup_cosine(1.0, 1, 10, 2.0)
PlanError: warmup_cosine: floor=2.0, expected a finite number of at least 0 and of at most 1
  fix: the order is peak, warmup_steps, total_steps, floor
>>> optim.from_torch(torch.optim.RMSprop, lr=-1)
PlanError: from_torch: lr=-1, expected a finite number of at least 0
  fix: pass a number such as 1e-3, a 0-dim tensor, or a function of the step
>>> optim.from_torch(torch.optim.Adam, decay_mask="bias")
PlanError: from_torch: decay_mask='bias', expected a function from the path of a leaf to a bool
  fix: pass a function such as lambda path: 'bias' not in path
>>> optim.from_torch(None, lr=0.1)
PlanError: from_torch: NoneType cannot be used: it is not a class of torch.optim.Optimizer
  fix: use an elementwise one: SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop
>>> optim.chain([optim.sgd(0.1)])
PlanError: list is not an optimizer of init and update
  fix: chain(a, b) makes one of several
>>> optim.chain(torch.optim.SGD)
PlanError: the class SGD is not an optimizer of init and update
  fix: pass from_torch(SGD, lr=...), or an instance
>>> optim.clip_by_value(None)
PlanError: clip_by_value: max_value=None, expected a number above 0
>>> optim.clip_by_global_norm(nan, groups)
PlanError: clip_by_global_norm: max_norm=nan, expected a number above 0
>>> optim.clip_by_global_norm(1.0, None)
GroupsError: clip_by_global_norm: groups is None
  fix: make groups first: groups = mics_fn.make_groups(partition_size)
>>> optim.Guard(max_norm="1")
PlanError: Guard: max_norm='1', expected a number above 0
>>> optim.Guard(spike=True)
PlanError: Guard: spike=True, expected a watch
  fix: make one with norm_spike
>>> optim.Guard(on_nonfinite="stop")
PlanError: Guard: on_nonfinite='stop', expected 'skip', 'raise', 'ignore' or None
>>> optim.Guard(optim.LossScale("static", nan))
PlanError: LossScale: value=nan, expected a finite number above 0
>>> optim.LossScale("dynamic", 8.0, max=4.0)
PlanError: LossScale: max=4.0, expected a finite number of at least 8
  fix: a scale lies between min and max
>>> optim.norm_spike(1)
PlanError: norm_spike: factor=1, expected a finite number above 1
>>> optim.norm_spike(warmup=200)
PlanError: norm_spike: warmup=200, expected at most window=100
>>> optim.norm_spike(action="warn")
PlanError: norm_spike: action='warn', expected 'skip' or 'report'
>>> optim.global_norm(None, groups)
LeafError: global_norm: tree is None
  fix: pass a tree of tensors or shards

# States
>>> mf.init_state(None, optim.sgd(0.1))
LeafError: init_state: params is None
  fix: pass what shard gave
>>> mf.init_state({"w": x}, optim.sgd(0.1))
LeafError: init_state: params.w is Tensor, not a shard
  fix: make shards with shard(params, groups)
>>> mf.init_state(shards(), None)
PlanError: NoneType is not an optimizer of init and update
  fix: pass a Transform, e.g. adamw(1e-3) or from_torch(torch.optim.RMSprop, lr=1e-3)
>>> mf.init_state(shards(), torch.optim.SGD([x], 0.1))
PlanError: SGD is not an optimizer of init and update
  fix: pass from_torch(torch.optim.SGD, lr=...), which makes one for shards
>>> mf.init_state(shards(), optim.sgd)
PlanError: the function sgd is not an optimizer of init and update
  fix: call it: sgd(...)
>>> mf.init_state(shards(), optim.sgd(0.1), buffers={"a": 5})
PlanError: init_state: buffers.a=5, expected a tensor
  fix: pass tensors by name, as dict(model.named_buffers())
>>> mf.opt_step(state(), shards(), donate="no")
PlanError: opt_step: donate='no', expected True or False
>>> optim.guarded_step(state(), shards(), None, groups)
PlanError: guarded_step: guard=None, expected a Guard
  fix: the order is guarded_step(state, grads, guard, groups)
>>> optim.guarded_step(state(), shards(), optim.Guard(), groups, donate="no")
PlanError: guarded_step: donate='no', expected True or False
>>> mf.opt_step(replace(state(), transform=optim.lion(0.1)), shards())
PlanError: opt_step: the state of the optimizer is of type OptimizerState, and not that of lion
  fix: make it with init_state(params, optimizer), or load it with the optimizer of the save
>>> mf.opt_step(replace(state(optim.lion(0.1)), transform=optim.adam(0.1)), shards())
PlanError: opt_step: the state of the optimizer is of type OptimizerState, and not that of adam
  fix: make it with init_state(params, optimizer), or load it with the optimizer of the save
>>> mf.opt_step(replace(state(), transform=optim.chain(optim.clip_by_value(1.0), optim.sgd(0.1))), shards())
PlanError: opt_step: the state of the optimizer is of type OptimizerState, and not that of a chain of 2
  fix: make it with init_state(params, optimizer), or load it with the optimizer of the save
>>> optim.same_step(state(), groups, heal="no")
PlanError: same_step: heal='no', expected True or False
>>> optim.same_replicas(state(), groups, on_drift="fix")
PlanError: same_replicas: on_drift='fix', expected 'raise' or 'heal'

# Shards
>>> mf.shard(None, groups)
LeafError: shard: params is None
  fix: pass a tree of tensors or shards
>>> mf.shard({"w": x}, None)
GroupsError: shard: groups is None
  fix: make groups first: groups = mics_fn.make_groups(partition_size)
>>> mf.gather(shards, mf.Groups)
GroupsError: gather: groups is the class Groups
  fix: make groups first: groups = mics_fn.make_groups(partition_size)
>>> mf.shard({"w": x}, 5)
LeafError: groups.w: got int, which is no groups
  fix: pass groups for all leaves, a function from the path of a leaf, or a tree
>>> mf.shard({"w": x}, groups, frozen=lambda path: "no")
PlanError: shard: frozen('w')='no', expected True or False
  fix: let the function return a bool
>>> mf.shard({"w": x}, groups, bucket_bytes="1 MB of it")
PlanError: shard: bucket_bytes='1 MB of it', expected a number of bytes of at least 1
  fix: pass an int, or a text such as '512MiB' or '1GB'
>>> mf.shard({"w": x}, groups, replicas=None)
PlanError: shard: replicas=None, expected 'check' or 'broadcast'
>>> mf.shard({"w": x}, groups, source_rank="0")
PlanError: shard: source_rank='0', expected None or an int of at least 0
>>> mf.gather(None, groups)
LeafError: gather: shards is None
  fix: pass a tree of tensors or shards
>>> mf.gather(state(), groups)
LeafError: gather: shards.step is int, not a shard
  fix: of a TrainState pass its params
>>> mf.unshard({"w": x}, groups)
LeafError: unshard: shards.w is Tensor, not a shard
  fix: make shards with shard(params, groups)
>>> mf.reduce_grads(None, groups)
LeafError: reduce_grads: grads is None
  fix: pass a tree of tensors or shards
>>> mf.scatter_grads({"w": x}, groups, like={"w": x})
LeafError: scatter_grads: like.w is Tensor, not a shard
  fix: make shards with shard(params, groups)
>>> mf.opt_step(two, mf.scatter_grads({"b": x, "w": x + 1}, groups))
LeafError: opt_step: grads.b does not match its parameter
  expected Sharded(shape=(4, 2), float32, here 8 of 8) on cpu, at 0 of bucket 0 (8 elements)
  got Sharded(shape=(4, 2), float32, here 8 of 8) on cpu, at 0 of bucket 0 (16 elements)
  fix: do both hops first: reduce_grads(grads, groups, like=state.params)
>>> mf.sync_replicas(shards(), groups, donate="no")
PlanError: sync_replicas: donate='no', expected True or False
>>> mf.bucket_sizes(None)
LeafError: bucket_sizes: shards is None
  fix: pass a tree of tensors or shards

# Schedules
>>> mf.on_demand(live_bytes=1.5)
PlanError: on_demand: live_bytes=1.5, expected a number of bytes of at least 0
  fix: pass an int, or a text such as '512MiB' or '1GB'
>>> schedules.OnDemand(live_bytes=-1, prefetch=4)
PlanError: OnDemand: live_bytes=-1, expected None or an int of at least 0
  fix: on_demand(live_bytes=) also takes a text such as '512MiB'
>>> schedules.OnDemand(None, prefetch="a")
PlanError: OnDemand: prefetch='a', expected an int of at least 0
  fix: 0 fetches nothing ahead
>>> schedules.OnDemand(None, 0, planner="plan")
PlanError: OnDemand: planner='plan', expected a function from a record and sizes to a Schedule
  fix: pass a function such as schedules.plan
>>> schedules.plan(record, [nan], live_bytes=None)
PlanError: plan: sizes=[nan], expected a list with an int of at least 0 per bucket
  fix: pass what bucket_sizes(shards, groups) gave
>>> schedules.plan(record, [8], live_bytes="x")
PlanError: plan: live_bytes='x', expected a number of bytes of at least 0
  fix: pass an int, or a text such as '512MiB' or '1GB'
>>> schedules.plan(record, [8], live_bytes=None, prefetch=None)
PlanError: plan: prefetch=None, expected an int of at least 0
  fix: 0 fetches nothing ahead
>>> schedules.Action("fech", (0,))
PlanError: Action: kind='fech', buckets=(0,)
  expected fetch, drop or reduce and one bucket, use and ascending buckets, or backward alone
  fix: write it as in Action('use', (1, 2)) or Action('fetch', (0,))
>>> schedules.Action(None, None)
PlanError: Action: kind=None, buckets=None
  expected fetch, drop or reduce and one bucket, use and ascending buckets, or backward alone
  fix: write it as in Action('use', (1, 2)) or Action('fetch', (0,))
>>> schedules.Schedule([("use", (0,))])
PlanError: Schedule: actions[0] is ('use', (0,))
  expected fetch, drop or reduce and one bucket, use and ascending buckets, or backward alone
  fix: give a list of Action, or read a text with Schedule.parse(text)
>>> mf.defer(shards(), groups, None)
PlanError: defer: schedule=None is neither a schedule nor a policy
  fix: pass a Schedule, on_demand(...) or keep_all()
>>> mf.defer(shards(), groups, mf.keep_all(), into=mf.GradSum)
PlanError: defer: into is the class GradSum, expected a GradSum
  fix: make one: total = GradSum()
>>> mf.record(None, shards(), x)
PlanError: record: loss_fn=None, expected a function that gives a loss
  fix: pass a function of full parameters and a batch, such as lambda full, x: ...
>>> mf.record(lambda full, x: full["w"], shards(), x)
LeafError: record: the loss has shape (2,), expected one number
  fix: take the mean() over its samples
>>> mf.record(lambda full, x: full["w"].sum(), None, x)
LeafError: record: shards is None
  fix: pass a tree of tensors or shards
>>> mf.record(lambda full, x: full["w"].sum(), shards(), x, mark_backward="yes")
PlanError: record: mark_backward='yes', expected True or False
>>> mf.GradSum(0)
PlanError: GradSum: micro_steps=0, expected an int of at least 1
>>> mf.GradSum(dtype="f32")
PlanError: GradSum: dtype='f32' is not a torch.dtype
  fix: pass one of torch.float32, torch.bfloat16, torch.float16, torch.float64
>>> mf.GradSum(where="params: host")
PlanError: GradSum: where='params: states=host' has no effect: it does not say where grads lie
  fix: write grads=, as in where='grads=host'
>>> summed(lambda full: full["w"])
LeafError: GradSum.backward: the loss has shape (2,), expected one number
  fix: take the mean() over its samples
>>> summed(lambda full: 1.0)
LeafError: GradSum.backward: the loss is float, expected one number
  fix: return the tensor, without item() or float()
>>> summed(lambda full: full["w"].sum().backward())
LeafError: defer(into=): another backward went through it than that of its GradSum
  fix: call total.backward(loss), not loss.backward()

# Groups
>>> mf.groups.Topology((2, 2.5))
PlanError: Topology: sizes[1]=2.5 is not an int of at least 1
>>> mf.groups.plan_groups(8, 2).chunk("1")
PlanError: position 1 is outside the world of 8 ranks
>>> mf.make_groups("1")
PlanError: partition_size='1' is not an int of at least 1
  world: 1 ranks = node 1 x rank 1
  sizes that work: 1
  fix: pass one of these as partition_size=
>>> mf.make_groups(topology=8)
PlanError: make_groups: topology=8, expected a Topology
  fix: pass Topology((2, 8)) or the like
>>> mf.make_groups(device="cuda:99")
GroupsError: make_groups: cuda:99 is asked for, and this process sees ... devices of its kind
  fix: pass device='cpu', or use a torch and a driver for this device
>>> mf.make_groups(device="meta")
GroupsError: make_groups: device='meta', which holds no data
  fix: pass device='cpu', or use a torch and a driver for this device
>>> mf.make_groups(device="cpu", backend="nccl")
PlanError: make_groups: backend='nccl' serves cuda, not cpu
  fix: pass the backend of the device, or leave it out
>>> mf.make_groups(device="cpuu")
GroupsError: make_groups: device='cpuu', which torch does not know
  fix: pass device='cpu', or use a torch and a driver for this device
>>> mf.make_groups(device=0)
GroupsError: make_groups: device=0, expected the name of a device
  fix: pass device='cpu', or use a torch and a driver for this device
>>> mf.make_groups(backend="glooo")
PlanError: make_groups: backend='glooo', expected one of gloo, ...
  fix: pass 'gloo'
>>> mf.make_groups(timeout_s=nan)
PlanError: make_groups: timeout_s=nan is not a time limit
  fix: pass seconds above 0
>>> mf.make_groups(heartbeat_s="10")
PlanError: make_groups: heartbeat_s='10' is not a time limit
  fix: pass seconds above 0
>>> mf.make_groups(heartbeat_s=0.1)
PlanError: make_groups: heartbeat_s=0.1 would take ranks for lost that are well
  signs of life come every 0.25 s
  fix: pass at least 0.75
>>> mf.make_groups(mean_over=1.5)
PlanError: make_groups: mean_over=1.5 is not a positive int
  fix: pass the number of data-parallel ranks whose losses are averaged
>>> mf.make_groups(whole="no")
PlanError: make_groups: whole='no', expected True or False
>>> mf.make_groups(partition_sizes=1)
TypeError: make_groups: there is no option partition_sizes=
  fix: did you mean partition_size=?
>>> mf.init_distributed(device=None)
GroupsError: init_distributed: a rank does not have the device that was asked for
  rank 0: device=None, expected the name of a device, on ...
  fix: pass device='auto' or 'cpu', or use a torch and a driver for this device
>>> mf.init_distributed(device="meta")
GroupsError: init_distributed: a rank does not have the device that was asked for
  rank 0: device='meta', which holds no data, on ...
  fix: pass device='auto' or 'cpu', or use a torch and a driver for this device
>>> mf.init_distributed(timeout_s=-1)
PlanError: init_distributed: timeout_s=-1, expected a finite number above 0 and below 1e+08
>>> mf.init_distributed(cpu_groups="no")
PlanError: init_distributed: cpu_groups='no', expected True or False
>>> mf.reset(None)
GroupsError: reset: got no groups, expected Groups
  fix: pass what make_groups or place gave
>>> mf.groups.StopRequest(groups, "TERM")
PlanError: StopRequest: signals=['T', 'E', 'R', 'M'], expected a list of signals
  fix: pass signals that a process can handle, such as [signal.SIGTERM]

# Models
>>> mf.init_model(lambda: nn.Linear(2, 1), groups, seed="0")
PlanError: init_model: seed='0', expected an int of at least 0
  fix: pass the same number on all ranks
>>> mf.init_model(lambda: nn.Linear(2, 1), groups, seed=0, bucket_byte=1)
TypeError: init_model: there is no option bucket_byte=
  fix: did you mean bucket_bytes=?
>>> mf.init_model(lambda: nn.Linear(2, 1), groups, seed=0, weights="nope.safetensors")
WeightsNotFound: init_model: weights='nope.safetensors' does not exist
  fix: pass a file of weights, an index of such, or a folder that has one of them
>>> mf.init_model(lambda: nn.Linear(2, 1), groups, seed=0, weights={}, missing=lambda name: "no")
PlanError: init_model: missing('weight')='no', expected True or False
  fix: let the function return a bool
>>> mf.load_shards("nope", groups)
WeightsNotFound: load_shards: path='nope' does not exist
  fix: pass a file of weights, an index of such, or a folder that has one of them
>>> mf.load_shards({"w": x}, groups, dtype="f32")
PlanError: load_shards: dtype='f32' is not a torch.dtype
  fix: pass one of torch.float32, torch.bfloat16, torch.float16, torch.float64
>>> mf.load_shards({"w": x}, groups, strict="no")
PlanError: load_shards: strict='no', expected True or False

# Trainers
>>> trainer(None)
PlanError: Trainer: model=None, expected an nn.Module or a function loss_fn(params, batch)
  fix: the order is Trainer(model, optimizer, groups, loss=...)
>>> trainer(nn.Linear)
PlanError: Trainer: model is the class Linear, expected an instance
  fix: pass Linear(...), not Linear
>>> trainer(nn.Linear(2, 1), groups, optim.sgd(0.1))
GroupsError: Trainer: groups is of type Transform, expected groups
  fix: the order is Trainer(model, optimizer, groups, loss=...)
>>> trainer(nn.Linear(2, 1), 0.1)
PlanError: float is not an optimizer of init and update
  fix: pass a Transform, e.g. adamw(1e-3) or from_torch(torch.optim.RMSprop, lr=1e-3)
>>> trainer(nn.Linear(2, 1), optim.sgd(0.1), 5)
LeafError: groups.bias: got int, which is no groups
  fix: pass groups for all leaves, a function from the path of a leaf, or a tree
>>> trainer(frozen)
LeafError: Trainer: no parameter is trained: all are frozen, or there is none
  fix: leave requires_grad=True on some, and out of frozen=
>>> trainer(shedule=None)
TypeError: Trainer: there is no option shedule=
  fix: did you mean schedule=?
>>> trainer(nonsense=2)
TypeError: Trainer: there is no option nonsense=
  fix: help(Trainer) lists what there is
>>> trainer(loss="mse")
PlanError: Trainer: loss='mse', expected a function loss(model, batch)
  fix: call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(accumulate=0)
PlanError: Trainer: accumulate=0, expected an int of at least 1
>>> trainer(guard="skip")
PlanError: Trainer: guard='skip', expected a Guard
  fix: make one: optim.Guard(...)
>>> trainer(deterministic="yes")
PlanError: Trainer: deterministic='yes', expected True or False
>>> trainer(check_replicas=-1)
PlanError: Trainer: check_replicas=-1, expected an int of at least 0
  fix: 0 never compares replicas
>>> trainer(on_drift=None)
PlanError: Trainer: on_drift=None, expected 'raise' or 'heal'
>>> trainer(recoverable="no")
PlanError: Trainer: recoverable='no', expected True or False
>>> trainer(live_bytes=1.5)
PlanError: Trainer: live_bytes=1.5, expected a number of bytes of at least 0
  fix: pass an int, or a text such as '512MiB' or '1GB'
>>> trainer(prefetch=None)
PlanError: Trainer: prefetch=None, expected an int of at least 0
  fix: 0 fetches nothing ahead
>>> trainer(schedule="fetch 0")
PlanError: Trainer: schedule='fetch 0', expected a Schedule or a policy
  fix: pass a Schedule, on_demand(...) or keep_all()
>>> trainer(grad_dtype=torch.int32)
PlanError: Trainer: grad_dtype=torch.int32 is not a float dtype
  fix: pass one of torch.float32, torch.bfloat16, torch.float16, torch.float64
>>> trainer(checkpoint="folder")
PlanError: Trainer: checkpoint='folder', expected a Checkpoints
  fix: pass Checkpoints(folder)
>>> trainer().step(x[:0])
LeafError: Trainer: the batch has no sample
  fix: give each rank a sample in each step, as DataLoader(..., drop_last=True) does
>>> trainer().step(None)
LeafError: Trainer: the batch is None
  fix: return a batch from what makes them, such as the collate_fn of a DataLoader
>>> trainer().step(DataLoader([1.0]))
LeafError: Trainer: the batch is a DataLoader, which gives batches
  fix: pass it to trainer.fit(loader, steps), or pass one of its batches
>>> trainer().step(iter([x]))
LeafError: Trainer: the batch is a list_iterator, which gives batches
  fix: pass it to trainer.fit(loader, steps), or pass one of its batches
>>> trainer().eval(x for _ in range(2))
LeafError: Trainer: the batch is a generator, which gives batches
  fix: pass it to trainer.fit(loader, steps), or pass one of its batches
>>> trainer(loss=lambda model: model(x).sum())
PlanError: Trainer: loss cannot be called as loss(model, batch)
  it takes (model): too many positional arguments
  fix: call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> mf.Trainer(lambda params: params["w"].sum(), optim.sgd(0.1), groups, params={"w": x})
PlanError: Trainer: model cannot be called as model(params, batch)
  it takes (params): too many positional arguments
  fix: write loss_fn(params, batch), with full tensors as params, and return one number
>>> trainer(hop2=lambda grads: grads)
PlanError: reduced_by: hop2 cannot be called as hop2(grads, groups)
  it takes (grads): too many positional arguments
  fix: it is given gradients of this replica, and returns their mean over all
>>> replicas.reduced_by(lambda grads, groups: grads, init=lambda params: 0)
PlanError: reduced_by: hop2 cannot be called as hop2(grads, state, groups)
  it takes (grads, groups): too many positional arguments
  fix: it is given gradients of this replica, and returns their mean over all
>>> replicas.reduced_by(lambda grads, state, groups: grads, init=lambda: 0)
PlanError: reduced_by: init cannot be called as init(params)
  it takes (): too many positional arguments
  fix: it returns the first state
>>> trainer().fit(None, 1)
PlanError: Trainer.fit: loader=None, expected batches
  fix: the order is fit(loader, steps); a loader gives a batch per step
>>> trainer().fit([x], -1)
PlanError: Trainer.fit: steps=-1, expected an int of at least 0
  fix: pass the number of optimizer steps to take
>>> trainer().fit([x], 1, log_every=0)
PlanError: Trainer.fit: log_every=0, expected an int of at least 1
  fix: progress=False shows nothing
>>> trainer().fit([x], 1, progress="no")
PlanError: Trainer.fit: progress='no', expected True or False
>>> trainer().fit([x], 1, stop=True)
PlanError: Trainer.fit: stop=True, expected a StopRequest
  fix: with StopRequest(groups) as stop: trainer.fit(loader, steps, stop=stop)
>>> trainer().fit([], 1, progress=False)
LeafError: Trainer.fit: the loader gave no batch
  fix: give it at least one sample per rank
>>> trainer().fit((x for _ in range(2)), 3, progress=False)
LeafError: Trainer.fit: the loader gave no batch in this pass: generator can be gone through only once
  fix: pass a list, a DataLoader, or another object that can be gone through again
>>> mf.sampler(groups, range(4))
GroupsError: sampler: groups is range
  fix: pass the dataset first, then the groups whose ranks take different samples
>>> mf.sampler(range(4), groups, seed=None)
PlanError: sampler: seed=None, expected an int of at least 0
  fix: pass the same number on all ranks
>>> mf.sampler(range(4), groups, seed=2**63)
PlanError: sampler: seed=9223372036854775808, expected an int of at most 2**63 - 1
  fix: pass a smaller number, such as 0
>>> mf.sampler(range(4), groups, shuffle="no")
PlanError: sampler: shuffle='no', expected True or False
>>> mf.Checkpoints(None)
PlanError: Checkpoints: folder=None, expected a str or os.PathLike that is not empty
>>> mf.Checkpoints("a", every=0)
PlanError: Checkpoints: every=0, expected an int of at least 1
>>> mf.Checkpoints("a", keep=True)
PlanError: Checkpoints: keep=True, expected None or an int of at least 1
>>> mf.Checkpoints("a", resume="no")
PlanError: Checkpoints: resume='no', expected True or False
>>> mf.Checkpoints("a", on_corrupt="skip")
PlanError: Checkpoints: on_corrupt='skip', expected 'raise' or 'previous'
>>> trainer(checkpoint=mf.Checkpoints("/proc/nope"))
FileError: Checkpoints: cannot write to /proc/nope
  [Errno 2] No such file or directory: '/proc/nope'
  fix: make room or give the right to write there, and save again; all else is as it was
>>> replicas.local_sgd(None)
PlanError: local_sgd: every=None, expected an int of at least 1
  fix: give the steps from one merge to the next
>>> replicas.diloco(2, 5)
PlanError: int is not an optimizer of init and update
  fix: pass a Transform, e.g. adamw(1e-3) or from_torch(torch.optim.RMSprop, lr=1e-3)
>>> replicas.local_sgd(2).after(shards(), state(), groups)
PlanError: ReplicaSync.after: state is of type TrainState, expected a SyncState
  fix: pass what init or the last after gave; a TrainState is another thing

# The first day
>>> trainer(loss=None).step((x, y))
LeafError: Trainer: the Linear cannot be called with this batch, as model(Tensor, Tensor)
  its forward takes (input: torch.Tensor) -> torch.Tensor: too many positional arguments
  fix: pass loss=, such as lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(loss=None, precision="compute=bf16").eval((x, y))
LeafError: Trainer: the Linear cannot be called with this batch, as model(Tensor, Tensor)
  its forward takes (input: torch.Tensor) -> torch.Tensor: too many positional arguments
  fix: pass loss=, such as lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(loss=None).step({"x": x, "y": y})
LeafError: Trainer: the Linear cannot be called with this batch, as model(x=, y=)
  its forward takes (input: torch.Tensor) -> torch.Tensor: missing a required argument: 'input'
  fix: name the arguments of forward in the batch, or pass loss=: it is given (model, batch)
>>> trainer(loss=None).step(x)
LeafError: Trainer: the Linear gave shape (4, 1), and without loss= that is the loss
  expected one number, or a result with a .loss
  fix: pass loss=, such as lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(Giving(lambda out: {"out": out}), loss=None).step(x)
LeafError: Trainer: the Giving gave dict, and without loss= that is the loss
  expected one number, or a result with a .loss
  fix: pass loss=, such as lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(Giving(lambda out: SimpleNamespace(loss=None)), loss=None).step(x)
LeafError: Trainer: the Giving gave no loss: its .loss is None
  fix: give the batch what it computes the loss from: labels
>>> trainer(Giving(lambda out: out + None), loss=None).step(x)
TypeError: unsupported operand type(s) for +: 'Tensor' and 'NoneType'
>>> trainer(Giving(lambda out: sum(out, 1, 2)), loss=None).step(x)
TypeError: sum() takes at most 2 arguments (3 given)
>>> trainer(loss=nn.functional.cross_entropy)
PlanError: Trainer: loss=cross_entropy takes (input, target), expected loss(model, batch)
  fix: call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(loss=nn.MSELoss())
PlanError: Trainer: loss=MSELoss takes (input, target), expected loss(model, batch)
  fix: call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(loss=lambda out, y: (out - y).square().mean())
PlanError: Trainer: loss=<lambda> takes (out, y), expected loss(model, batch)
  fix: call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(loss=lambda model, x, y: nn.functional.mse_loss(model(x), y))
PlanError: Trainer: loss cannot be called as loss(model, batch)
  it takes (model, x, y): missing a required argument: 'y'
  fix: call the model in it: lambda model, batch: cross_entropy(model(batch[0]), batch[1])
>>> trainer(loss=lambda a, b: (a - b).square().mean()).step((x, y))
TypeError: unsupported operand type(s) for -: 'Linear' and 'tuple'
  Trainer called loss(model, batch) with the Linear and a tuple, the whole batch
>>> trainer(loss=lambda model, batch: model(batch.inputs).mean()).step({"inputs": x})
AttributeError: 'dict' object has no attribute 'inputs'
  Trainer called loss(model, batch) with the Linear and a dict, the whole batch
>>> trainer(Giving(lambda out: out.nope), loss=mse).step(x)
AttributeError: 'Tensor' object has no attribute 'nope'
>>> trainer(loss=lambda model, x: None).step(x)
LeafError: Trainer: the loss is None, expected one number
  fix: return the loss
>>> trainer(loss=lambda model, x: model(x).square()).step(x)
LeafError: Trainer: the loss has shape (4, 1), expected one number
  fix: take the mean() over its samples
>>> trainer(loss=lambda model, x: {"loss": mse(model, x), "seen": 4}).step(x)
LeafError: Trainer: the loss is dict of loss, seen, expected one number
  fix: return the loss alone, and append what else is to be seen to a list of your own
>>> trainer(loss=lambda model, x: (mse(model, x), model(x))).step(x)
LeafError: Trainer: the loss is tuple, expected one number
  fix: return the loss alone, and append what else is to be seen to a list of your own
>>> trainer(loss=lambda model, x: mse(model, x).item()).step(x)
LeafError: Trainer: the loss is float, expected one number
  fix: return the tensor, without item() or float()
>>> trainer(loss=lambda model, x: SimpleNamespace(loss=mse(model, x))).step(x)
LeafError: Trainer: the loss is SimpleNamespace, expected one number
  fix: return its .loss
>>> trainer(loss=lambda model, x: mse(model, x).backward()).step(x)
LeafError: Trainer: the loss called backward(), which Trainer does once the loss is returned
  fix: return the loss, and leave out backward(), zero_grad() and the optimizer's step()
>>> trainer(loss=lambda model, x: mse(model, x).backward(), live_bytes=0).step(x)
LeafError: Trainer: the loss called backward(), which Trainer does once the loss is returned
  fix: return the loss, and leave out backward(), zero_grad() and the optimizer's step()
>>> mf.shard(nn.Linear(2, 1), groups)
LeafError: shard: params is Linear, expected torch.Tensor
  fix: pass dict(model.named_parameters()); a Trainer takes the module itself
>>> mf.shard(nn.Linear(2, 1).parameters(), groups)
LeafError: shard: params is generator, expected torch.Tensor
  fix: pass dict(model.named_parameters()), or list(model.parameters())
>>> functional_call(nn.Linear(2, 1), of_linear(), (x,))
TypeError: Sharded(...) is not an instance of torch.Tensor
>>> trainer().save("run")
AttributeError: Trainer has no attribute 'save'
  fix: Trainer(checkpoint=Checkpoints(folder, every=100)) saves, and goes on; for weights alone full = trainer.state_dict() on all ranks, and torch.save(full, path) on one
>>> trainer().train()
AttributeError: Trainer has no attribute 'train'
  fix: trainer.step(batch) is one step, with backward and optimizer; trainer.fit(loader, steps)
>>> trainer().optimizer.zero_grad()
AttributeError: Trainer has no attribute 'optimizer'
  fix: trainer.state.opt is its state; the optimizer itself is a function of values
>>> trainer().nope
AttributeError: Trainer has no attribute 'nope'
>>> pickle.dumps(trainer())
GroupsError: a Trainer belongs to this process: it cannot be in a pickle or a deep copy
  fix: take trainer.state_dict(), or save it with Trainer(checkpoint=Checkpoints(folder))
>>> trainer(Eighths())
LeafError: Trainer: buffer 'scale' is torch.float8_e4m3fn, which has no mean over ranks
  fix: keep it as bfloat16, or register it with persistent=False

# Checkpoints
>>> checkpoint.save(None, state(), groups, step=1)
PlanError: save: path=None, expected a str or os.PathLike that is not empty
>>> checkpoint.save("a", 5, groups, step=2)
LeafError: save: the state has no tensor to save
  fix: pass a TrainState, or a tree with shards or tensors
>>> checkpoint.save("a", state(), None, step=1)
GroupsError: save: groups is None
  fix: make groups first: groups = mics_fn.make_groups(partition_size)
>>> checkpoint.save("a", state(), groups, step=-1)
PlanError: save: step=-1, expected an int of at least 0
>>> checkpoint.save("a", state(), groups, step=1, keep="2")
PlanError: save: keep='2', expected an int of at least 1
>>> checkpoint.save("a", state(), groups, step=1, overwrite=True)
PlanError: save: overwrite=True, expected 'never' or 'newer'
>>> checkpoint.load("a", state(), groups, step="3")
PlanError: load: step='3', expected None or an int of at least 0
  fix: None takes the newest one
>>> checkpoint.load("a", state(), groups, on_corrupt=None)
PlanError: load: on_corrupt=None, expected 'raise' or 'previous'
>>> checkpoint.verify("a", True)
PlanError: verify: step=True, expected None or an int of at least 0
  fix: None takes the newest one
>>> checkpoint.save_pretrained(None, shards(), groups)
PlanError: save_pretrained: path=None, expected a str or os.PathLike that is not empty
>>> checkpoint.save_pretrained("a", shards(), groups, max_file_bytes="x")
PlanError: save_pretrained: max_file_bytes='x', expected a number of bytes of at least 1
  fix: pass an int, or a text such as '512MiB' or '1GB'
>>> checkpoint.save_pretrained("a", shards(), groups, names=lambda name: 5)
PlanError: save_pretrained: names(...)=5, expected a str or None
>>> checkpoint.save_dcp("a", shards(), groups, dtype="f32")
PlanError: save_dcp: dtype='f32' is not a torch.dtype
  fix: pass one of torch.float32, torch.bfloat16, torch.float16, torch.float64
>>> checkpoint.save_dcp("a", shards(), groups, param_group={"lr": 0.1})
PlanError: save_dcp: param_group= has no effect
  fix: pass a TrainState, or leave it out

# Functions and collectives of one's own
>>> mf.shards.map(torch.neg, None)
LeafError: map: shards is None
  fix: pass a tree of tensors or shards
>>> optim.from_update(None, max)
PlanError: from_update: init=None, expected a function
  fix: the order is from_update(init, update, facts)
>>> optim.from_update(max, optim.sgd(0.1))
PlanError: from_update: update is of type Transform, expected a function
  fix: the order is from_update(init, update, facts)
>>> mf.opt_step(state(optim.from_update(lambda p: None, lambda g, s, p: (None, s))), shards())
LeafError: from_update: the updates that update gave do not fit the parameters
  updates.b is missing
  fix: return (updates, state) with updates as shards.map makes them from the gradients
>>> mf.opt_step(state(optim.from_update(lambda p: None, lambda g, s, p: ({"b": x, "w": x}, s))), shards())
LeafError: from_update: the updates that update gave do not fit the parameters
  updates.b: expected a piece of 3 elements, got 2
  fix: return (updates, state) with updates as shards.map makes them from the gradients
>>> mf.collectives.all_gather(comm, x, name=5)
PlanError: all_gather: name=5, expected a text
>>> mf.collectives.start(comm, x, [x], name="mine", sent_bytes=0)
PlanError: start: issue is of type Tensor, expected a function that starts the collective
  fix: pass functools.partial of a function of torch.distributed, with its tensors
>>> mf.collectives.start(comm, max, [x], name=None, sent_bytes=0)
PlanError: start: name=None, expected a text
>>> mf.collectives.start(comm, max, [x], name="mine", sent_bytes=-1)
PlanError: start: sent_bytes=-1, expected an int of at least 0
>>> mf.groups.Topology((2, 2), (1, 2))
PlanError: Topology: names (1, 2) do not name 2 sizes (2, 2)
  fix: pass one distinct name per size, and not 'flat', or no names
>>> mf.make_groups(ranks=x)
PlanError: make_groups: ranks=[tensor([1., 1.]), ...] are not distinct ranks of a world of 1
  fix: give each of 0 to 0 at most once

# Places
>>> mf.move(None, "states=host")
LeafError: move: value=None, expected a TrainState or a tree of shards
  fix: make one with init_state, or with shard

# Looking inside, faults, trees
>>> mf.get(shards(), groups, "w")
LeafError: groups.b: got str, which is no groups
  fix: pass groups for all leaves, a function from the path of a leaf, or a tree
>>> mf.set(roots(), "opt.moments.exp_avg_sq.w", -1.0, groups)
LeafError: set: opt.moments.exp_avg_sq.w has a value that state=int8[256] cannot hold
  fix: pass finite numbers of at least 0
>>> mf.set(roots(), "opt.moments.exp_avg.w", math.inf, groups)
LeafError: set: opt.moments.exp_avg.w has a value that state=int8[256] cannot hold
  fix: pass finite numbers
>>> mf.notebook.start(2, nodes=0)
PlanError: notebook.start: nodes=0, expected None or an int of at least 1
  fix: give 1 or more
>>> mf.summary(None)
LeafError: summary: shards=None, expected shards or tensors
  fix: pass a tree of shards, or a TrainState such as trainer.state
>>> mf.summary(shards(), rows=1)
PlanError: summary: rows=1, expected None or an int of at least 2
>>> injected(rank=-1)
PlanError: inject: rank=-1, expected None or an int of at least 0
  fix: None means every rank
>>> injected(rank=5)
PlanError: inject: rank=5 in a world of 1
  fix: pass one of 0 to 0, or None for every rank
>>> injected(step="1")
PlanError: inject: step='1', expected an int of at least 0
  fix: 1 is the first one
>>> injected(operation=None)
PlanError: inject: operation=None, expected a text that is not empty
  fix: pass a part of the name of a point, such as 'step' or 'hop 1'
>>> tree.node(None)
LeafError: tree.node: None is not a dataclass
  fix: write @tree.node above @dataclass(frozen=True)
"""


def names_for(groups: Any) -> dict[str, Any]:
    """What the calls above may name."""

    def shards() -> Any:
        return mf.shard({"b": torch.ones(3), "w": torch.ones(2)}, groups)

    def state(optimizer: Any = None) -> Any:
        return mf.init_state(shards(), optimizer or optim.adam(0.1))

    def of_linear() -> Any:
        return mf.shard(dict(nn.Linear(2, 1).named_parameters()), groups, replicas="broadcast")

    def roots() -> Any:
        full = {"w": torch.zeros(4096)}
        return mf.init_state(mf.shard(full, groups, precision="state=int8"), optim.adam(0.1))

    def trainer(*given: Any, **options: Any) -> Any:
        usual: list[Any] = [nn.Linear(2, 1), optim.sgd(0.1), groups]
        options = {"loss": mse, "replicas": "broadcast", **options}
        return mf.Trainer(*given, *usual[len(given) :], **options)

    def injected(**given: Any) -> None:
        with testing.inject(**{"rank": 0, "step": 1, "operation": "step", "fault": "nan", **given}):
            pass

    def summed(loss: Any) -> None:
        total = mf.GradSum()
        with mf.defer(shards(), groups, mf.keep_all(), into=total) as full:
            total.backward(loss(full))

    watched = trainer()
    with mf.inspection.watch():
        watched.step(x)
    timeline, comm = watched.last_step.timeline(), groups.communicators["partition"]
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
    with pytest.raises((mf.MicsError, TypeError, AttributeError)) as caught:
        eval(call, dict(names))
    error = caught.value
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def fits(text: str, found: str) -> bool:
    return re.fullmatch(re.escape(text).replace(re.escape("..."), ".*"), found) is not None


@pytest.mark.parametrize(("call", "text"), rows(), ids=[call for call, _ in rows()])
def test_a_wrong_argument_is_named(names, call: str, text: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = said(call, names)
    assert fits(text, found), found
    assert not list(tmp_path.iterdir())


def said_on_a_rank(calls: list[str]) -> list[str]:
    return [said(call, names_for(mf.make_groups(2))) for call in calls]


def test_the_errors_of_the_first_day_are_those_of_all_ranks(ranks):
    begin = TABLE.partition("# The first day\n")[2].partition("\n#")[0]
    table = [(call, text) for call, text in rows() if f">>> {call}\n" in begin]
    assert len(table) > 30
    for found in ranks(2).run(said_on_a_rank, [call for call, _ in table]):
        for (call, text), got in zip(table, found, strict=True):
            assert fits(text, got), f"{call}\n{got}"


def test_sizes_can_be_written_with_units():
    with mf.make_groups(1) as groups:
        given: dict[str, Any] = {"live_bytes": "1 GiB", "bucket_bytes": "25MB"}
        trainer = mf.Trainer(nn.Linear(2, 1), optim.sgd(0.1), groups, loss=mse, **given)
        trainer.step(x)
        assert mf.on_demand(live_bytes="0.5kB").live_bytes == 500
        assert mf.on_demand(live_bytes=1e9).live_bytes == 1_000_000_000
        assert mf.on_demand(live_bytes="4096").live_bytes == 4096


# What people of other libraries try first


def test_backward_through_gather_needs_pieces_that_require_a_gradient():
    """As torch says of any loss; `gather` tells how, and `GradSum.backward` needs neither.

    An error of this library would need results that require a gradient. Then each forward pass
    keeps its activations, and `numpy()`, `out=`, `deepcopy` and dlpack refuse what is gathered.
    """
    with mf.make_groups(1) as groups:
        shards = mf.shard({"w": torch.ones(2)}, groups)
        with pytest.raises(RuntimeError, match="does not require grad"):
            mf.gather(shards, groups)["w"].square().sum().backward()
        explained = " ".join((mf.gather.__doc__ or "").split())
        assert "element 0 of tensors does not require grad" in explained
        assert "requires_grad_()" in explained
        full = mf.gather(shards, groups)["w"]
        assert not full.requires_grad
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
        with pytest.raises(mf.errors.LeafError) as caught:
            torch.save(full["w"], BytesIO())
        assert str(caught.value) == (
            "torch.save and pickle want the memory of a gathered parameter, one of bucket 0\n"
            "  shape (2,); the bucket holds w\n"
            "  fix: save shards, as checkpoint.save does, or a clone()"
        )
        return deepcopy(full["w"]).tolist()


def test_ranks_with_other_budgets_are_told_of_budgets(ranks):
    for text in ranks(2).run(other_budgets):
        assert text == (
            "defer: ranks disagree on the schedule\n"
            "  rank 0: schedule on_demand(live_bytes=0, prefetch=4)\n"
            "  rank 1: schedule on_demand(live_bytes=1, prefetch=4)\n"
            "  fix: pass the same live_bytes=, prefetch= or schedule on every rank"
        )


def other_budgets() -> str:
    groups = mf.make_groups(2)
    shards = mf.shard({"w": torch.ones(2)}, groups)
    with pytest.raises(mf.errors.DesyncError) as caught:
        mf.defer(shards, groups, mf.on_demand(live_bytes=groups.rank))
    return str(caught.value)


def test_a_rank_that_is_refused_keeps_no_other_waiting(ranks):
    ours, theirs = ranks(2).run(refused_alone)
    assert theirs == "PlanError: init_model: seed='0', expected an int of at least 0"
    assert ours == "DesyncError: init_model: it failed on other ranks"


def refused_alone() -> str:
    groups = mf.make_groups(2)
    seed: Any = "0" if groups.rank else 0
    with pytest.raises(mf.MicsError) as caught:
        mf.init_model(lambda: nn.Linear(2, 1), groups, seed=seed)
    return f"{type(caught.value).__name__}: {caught.value}".partition("\n")[0]
