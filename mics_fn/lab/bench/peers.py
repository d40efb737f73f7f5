"""The peers of `bench step`: `Trainer` in several modes, and the ways to train of torch itself."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mics_fn as mf
from mics_fn._device import is_async
from mics_fn.errors import PlanError, message
from mics_fn.lab.bench.formulas import Cut, cut_of, make_place, memory_formula
from mics_fn.lab.bench.stage import Stage, StepConfig, make_model
from mics_fn.lab.bench.turns import Peer, nbytes
from mics_fn.lab.models import gpt
from mics_fn.lab.report import buckets_of
from mics_fn.shards import Precision

HOST = "states=host, params=host"


def _trainer(
    stage: Stage,
    *,
    live: int | None,
    wide: bool = False,
    place: str | None = None,
    where: str = "",
    overlap: bool = False,
) -> Peer:
    """`Trainer` with the partition groups of the stage, `wide` ones of all ranks, or a placement.

    It keeps all gathered parameters, or has a budget of `live` buckets. Two give the memory of
    ZeRO-3: a bucket in use, the next one, and one more that `live_bytes` allows. States may lie
    elsewhere, and buckets be stepped while others are in hop 2.
    """
    config, n, p = stage.config, stage.world_size, stage.partition_size
    p = n if wide else p
    cut = cut_of(place, n, config.node_size) if place else Cut(p, p, p)
    if stage.own is not None:
        groups = mf.make_groups(1, ranks=[dist.get_rank()], device=stage.device)
    elif place:
        groups = make_place(place, n, config.node_size, device=stage.device)
    else:
        groups = mf.make_groups(p, node_size=config.node_size, device=stage.device)
    stage.closing.enter_context(groups)
    model = make_model(config, stage.device)
    # A parameter that is larger than a bucket has a bucket of its own.
    largest = max(parameter.numel() for parameter in model.parameters())
    largest *= stage.precision.dtypes("", torch.float32).compute.itemsize
    budget = None if live is None else live * largest
    trainer = mf.Trainer(
        model,
        mf.optim.adamw(config.lr),
        groups,
        loss=gpt.loss,
        accumulate=config.accumulate,
        live_bytes=budget,
        precision=stage.precision,
        where=where,
        overlap_step=overlap,
        guard=mf.optim.Guard(on_nonfinite="ignore") if overlap else None,
    )
    del model
    joined = [tuple(map(torch.cat, zip(*micros, strict=True))) for micros in stage.batches]

    def held() -> int:
        return nbytes((trainer.state.params, trainer.state.opt))

    needs = memory_formula(
        buckets_of(trainer.state.params),
        cut,
        groups.hierarchy.route.sizes,
        live_bytes=budget,
        num_replicas=groups.num_replicas,
        micro_steps=config.accumulate,
        exchanged=not is_async(stage.device),
    )
    del needs["states"]  # measured
    how = [place or {None: "keep", 0: "least", 2: "two buckets"}[live]]
    how += [where] * bool(where) + ["overlapped"] * overlap
    name, host = f"Trainer p={cut.states}, {', '.join(how)}", ("states",) if where else ()
    return Peer(name, lambda step: trainer.step(joined[step]).loss, held, needs, host)


def _plain(stage: Stage) -> Peer:
    return _torch_loop("plain torch loop", stage, make_model(stage.config, stage.device))


def _ddp(stage: Stage) -> Peer:
    model = DistributedDataParallel(
        make_model(stage.config, stage.device), gradient_as_bucket_view=True
    )

    def begin(last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else model.no_sync()

    return _torch_loop("DDP", stage, model, begin)


def _fsdp2(stage: Stage, *, full: bool, keep: bool, offload: bool = False) -> Peer:
    """FSDP2 on a (replicate, shard) mesh, or on one of all ranks.

    With `keep` parameters are gathered once per step, otherwise again for backward. With `offload`
    parameters, gradients and states lie in host memory, all of them: it knows nothing in between.
    """
    config, p = stage.config, stage.world_size if full else stage.partition_size
    dtypes = stage.precision.dtypes("", torch.float32)
    model = make_model(config, stage.device).to(dtypes.param)
    options: dict[str, Any] = {"mesh": _mesh(stage, full), "reshard_after_forward": not keep}
    options["mp_policy"] = MixedPrecisionPolicy(dtypes.compute, dtypes.reduce)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=is_async(stage.device))
    for block in model.blocks:
        fully_shard(block, **options)
    root = fully_shard(model, **options)

    def begin(last: bool) -> contextlib.AbstractContextManager:
        # As in MiCS: hop 1 in each micro-step, hop 2 in the last one.
        root.set_requires_all_reduce(last)
        if keep:
            root.set_reshard_after_backward(last)
        return contextlib.nullcontext()

    size = dtypes.compute.itemsize
    blocks = [sum(x.numel() * size for x in block.parameters()) for block in model.blocks]
    whole = sum(x.numel() * size for x in model.parameters())
    name = ("FSDP2 full" if full else "FSDP2") + f" p={p}, " + ("keep" if keep else "default")
    name += ", offloaded" * offload
    wider = dtypes.param.itemsize / size
    needs = _needs([*blocks, whole - sum(blocks)], p, keep=keep, wider=wider)
    peer = _torch_loop(name, stage, model, begin, needs)
    return peer._replace(host=("states", "sums")) if offload else peer


def _mesh(stage: Stage, full: bool) -> DeviceMesh:
    kind, p = stage.device.type, stage.partition_size
    if stage.own is not None:
        return DeviceMesh.from_group(stage.own, kind)
    if full:
        return init_device_mesh(kind, (stage.world_size,))
    sizes = (stage.world_size // p, p)
    return init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard"))


def _torch_loop(
    name: str,
    stage: Stage,
    model: nn.Module,
    begin: Callable[[bool], contextlib.AbstractContextManager] = lambda last: (
        contextlib.nullcontext()
    ),
    needs: dict[str, float] | None = None,
) -> Peer:
    """A training loop of plain torch; `begin` is told whether a micro-step is the last one."""
    config = stage.config
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, fused=True)
    last = config.accumulate - 1

    def step(number: int) -> Tensor:
        losses = []
        for micro, batch in enumerate(stage.batches[number]):
            with begin(micro == last):
                loss = gpt.loss(model, batch)
                (loss / config.accumulate if last else loss).backward()
            losses.append(loss.detach())
        optimizer.step()
        # At the end, so that no gradients stay in memory between steps, as for every peer.
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    if needs is None:
        full = sum(x.numel() * x.itemsize for x in model.parameters())
        needs = {"parameters": 0, "sums": full, "hops": 0, "in full": 0}
    return Peer(name, step, lambda: _held(model, optimizer), needs)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters and optimizer state on this rank."""
    tensors: list[Any] = [*model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.nbytes for t in local)


def _needs(units: Iterable[int], p: int, *, keep: bool, wider: float) -> dict[str, float]:
    """The least bytes that a step of FSDP2 needs beyond states, for units of such bytes.

    Gathered parameters are all of them, or two units. Of gradients it has this rank's part, in a
    dtype that is `wider` by a factor, one unit that is packed while it is reduced, and one in full.
    """
    ordered = sorted(units, reverse=True)
    total, largest, two = sum(ordered), ordered[0], sum(ordered[:2])
    if p == 1:  # the states themselves are in full
        return {"parameters": 0, "sums": total * wider, "hops": 0, "in full": 0}
    gathered = total if keep else two
    return {"parameters": gathered, "sums": total * wider / p, "hops": largest, "in full": largest}


class Kind(NamedTuple):
    """A way to train: what builds it, and where it makes sense."""

    build: Callable[[Stage], Peer]
    ours: bool = False
    alone: bool = True  # in a world of one
    together: bool = True
    mixed: bool = True  # takes precisions


def _placed(place: str) -> Kind:
    return Kind(partial(_trainer, live=2, place=place), ours=True, alone=False)


PEERS = {
    "keep": Kind(partial(_trainer, live=None), ours=True),
    "zero3": Kind(partial(_trainer, live=2), ours=True),
    "least": Kind(partial(_trainer, live=0), ours=True),
    "wide-keep": Kind(partial(_trainer, wide=True, live=None), ours=True, alone=False),
    "wide-zero3": Kind(partial(_trainer, wide=True, live=2), ours=True, alone=False),
    **{name: _placed(name) for name in ("zero1", "zero2", "hpz", "hybrid")},
    "overlap": Kind(partial(_trainer, live=None, overlap=True), ours=True, alone=False),
    "host": Kind(partial(_trainer, live=2, where=HOST), ours=True),
    "fsdp2": Kind(partial(_fsdp2, full=False, keep=False)),
    "fsdp2-keep": Kind(partial(_fsdp2, full=False, keep=True)),
    "fsdp2-offload": Kind(partial(_fsdp2, full=False, keep=False, offload=True)),
    "fsdp2-full": Kind(partial(_fsdp2, full=True, keep=False), alone=False),
    "fsdp2-full-keep": Kind(partial(_fsdp2, full=True, keep=True), alone=False),
    "ddp": Kind(_ddp, alone=False, mixed=False),
    "plain": Kind(_plain, together=False, mixed=False),
}


def kind_of(label: str) -> Kind:
    """A peer by its label: a name, or a name and a precision as in `phases`."""
    return PEERS[label.partition("@")[0]]


def build(stage: Stage, label: str) -> Peer:
    """The peer with a label."""
    return kind_of(label).build(stage._replace(precision=Precision.parse(label.partition("@")[2])))


def phases(config: StepConfig, world_size: int) -> dict[int, list[str]]:
    """The world sizes to measure in, each with the labels of the peers that make sense there.

    With precisions, a peer that takes them is there once per precision, as "name@precision".
    """
    found = {}
    if config.alone or world_size == 1:
        found[1] = [name for name in config.peers if PEERS[name].alone]
    if world_size > 1:
        found[world_size] = [name for name in config.peers if PEERS[name].together]
    return {size: _with_precisions(config, names) for size, names in found.items() if names}


def _with_precisions(config: StepConfig, names: Iterable[str]) -> list[str]:
    found = []
    for name in names:
        mixed = PEERS[name].mixed and config.precisions
        found += [f"{name}@{precision}" for precision in config.precisions] if mixed else [name]
    return found


def check_peers(config: StepConfig, world_size: int) -> None:
    """Raise PlanError for names that are not those of peers, and if nothing is left to measure."""
    asked = f"--peers {' '.join(config.peers)}"
    wrong = [name for name in config.peers if name not in PEERS]
    if wrong:
        what = f"{asked}: there is no peer {' '.join(wrong)}"
        raise PlanError(message(what, fix=f"choose from {' '.join(PEERS)}"))
    if len(set(config.peers)) < len(config.peers):
        raise PlanError(message(f"{asked}: one is given twice", fix="give each once"))
    if not phases(config, world_size):
        every = replace(config, peers=tuple(PEERS), precisions=())
        fits = " ".join(phases(every, world_size)[world_size])
        what = f"{asked}: none of these is measured with {world_size} ranks"
        raise PlanError(message(what, fix=f"choose from {fits}"))
    others = [name for name in config.peers if PEERS[name].mixed and not PEERS[name].ours]
    own = [text for text in config.precisions if Precision.parse(text).overrides]
    if own and others:
        what = f"--precision {own[0]!r}: {others[0]} has one precision for all parameters"
        raise PlanError(message(what, fix="leave the overrides out, or that peer"))
