"""What ranks do in the scenarios: the same on the simulated device and on the CPU."""

import ast
import contextlib
import importlib
import os
import re
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from in_parts import CUT, batch_of, mesh_of, params_of, trainer_in_parts
from matrix import BUCKET_BYTES, MODES, SCENARIOS, Scenario, Seen
from models import STEPS, Forked, Net, Recomputed, batches, loss_of
from simcuda import nccl, torch_cuda
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from watching import Watch

import mics_fn as mf
from mics_fn import _torch, optim

Numbers = dict[str, Tensor]


def on_device(function: Callable[..., Any], *args: Any) -> Any:
    """Call it on a rank with a device of its own."""
    torch.cuda.set_device(dist.get_rank())
    _torch.is_locked = lambda memory: True  # there is no pinned memory without CUDA
    return function(*args)


def compared(name: str, modes: tuple[str, ...] = MODES) -> tuple[Numbers, dict[str, Seen]]:
    """The numbers of a scenario on the CPU, and what was seen on the device, by mode."""
    scenario, found = SCENARIOS[name], {}
    cpu = _run(scenario, Watch(torch.device("cpu")))
    for mode in modes:
        torch_cuda.answer_queries(mode, seed=dist.get_rank())
        nccl.issued.clear()
        torch_cuda.reset()
        watch = Watch(torch.device("cuda", dist.get_rank()))
        found[mode] = watch.seen(_run(scenario, watch))
    return cpu, found


def _run(scenario: Scenario, watch: Watch) -> Numbers:
    torch.manual_seed(0)
    how: dict[str, Any] = {"device": watch.device, "timeout_s": 30}
    if scenario.parts > 1:
        how |= {"mesh": mesh_of(scenario.parts), "model": "tp", "cut": CUT}
    with mf.make_groups(scenario.partition, node_size=scenario.node, **how) as groups:
        if scenario.place is not None:
            groups = mf.placement.place(groups, scenario.place)
        options = dict(scenario.options())
        numbers = globals()[scenario.program](groups, watch, **options)
        return {name: value.detach().cpu() for name, value in numbers.items()}


def _trainer(
    groups: Any, model: nn.Module, optimizer: optim.Transform | None = None, **options: Any
) -> mf.Trainer:
    how = {"loss": loss_of, "bucket_bytes": BUCKET_BYTES, **options}
    return mf.Trainer(model.to(groups.device), optimizer or optim.sgd(0.1), groups, **how)


def trained(groups: Any, watch: Watch, model: nn.Module | None = None, **options: Any) -> Numbers:
    """Steps of a `Trainer`, an evaluation, and the parameters."""
    trainer = _trainer(groups, model or Net(), **options)
    losses, data = [], batches(watch.device)
    for batch in data:
        with watch.step():
            losses.append(trainer.step(batch).loss)
    loss = trainer.eval(data[0])
    return {"losses": torch.stack(losses), "eval": loss, **trainer.params()}


def in_parts(groups: Any, watch: Watch, **options: Any) -> Numbers:
    """Steps of a model whose parts add up over a communicator, in numbers that are exact."""
    to_device = lambda values: {name: x.to(watch.device) for name, x in values.items()}  # noqa: E731
    options = {"params": to_device(params_of(groups)), "bucket_bytes": 64, **options}
    trainer, losses = trainer_in_parts(groups, **options), []
    data = [tuple(x.to(watch.device) for x in batch_of(groups, step)) for step in range(STEPS)]
    for batch in data:
        with watch.step():
            losses.append(trainer.step(batch).loss)
    return {"losses": torch.stack(losses), "eval": trainer.eval(data[0]), **trainer.params()}


def recomputed(groups: Any, watch: Watch, **options: Any) -> Numbers:
    return trained(groups, watch, Recomputed(), **options)


def forked(groups: Any, watch: Watch, **options: Any) -> Numbers:
    return trained(groups, watch, Forked(), **options)


def own_stream(groups: Any, watch: Watch, **options: Any) -> Numbers:
    """Training on a stream of the user's; what it leaves is let go outside of it."""
    if watch.device.type == "cpu":
        return trained(groups, watch, **options)
    main, own = torch.accelerator.current_stream(), torch.Stream(watch.device)
    own.wait_stream(main)
    with own:
        numbers = trained(groups, watch, **options)
    main.wait_stream(own)
    return numbers


def watched(groups: Any, watch: Watch, **options: Any) -> Numbers:
    """Every step is watched; after them the bytes of the last one, and in which order it went."""
    with mf.inspection.watch():
        trainer, losses = _trainer(groups, Net(), **options), []
        for batch in batches(watch.device):
            groups.traffic.clear()
            with watch.step():
                losses.append(trainer.step(batch).loss)
        ledger = dict(groups.traffic.sent_bytes)
    timeline = trainer.last_step.timeline()
    transfers = sorted(f"{e.kind} {e.buckets} {e.level}" for e in timeline.events if e.level)
    assert timeline.sent_bytes() == ledger
    assert transfers
    assert all(event.end_s >= event.start_s for event in timeline.events)
    same = torch.tensor([sum(map(ord, text)) for text in transfers])
    memory = torch.tensor(trainer.last_step.memory()[:4])
    return {"losses": torch.stack(losses), "transfers": same, "memory": memory, **trainer.params()}


def saved(groups: Any, watch: Watch, **options: Any) -> Numbers:
    """A state is copied to the host and written while steps go on in its memory, and is read."""
    folder = f"{tempfile.gettempdir()}/mics_fn-{os.getppid()}-{watch.device.type}"
    trainer = _trainer(groups, Net(), optim.adamw(1e-2), **options)
    pending, numbers = [], {}
    for k, batch in enumerate(batches(watch.device)):
        with watch.step():
            trainer.step(batch)
        if k == 1:
            pending.append(mf.checkpoint.start_save(folder, trainer.state, groups, step=k))
    pending[0].wait()
    for donate in (False, True):
        found = mf.checkpoint.load(folder, trainer.state, groups, donate=donate)
        for name, x in mf.unshard(found.state.params, groups).items():
            numbers[f"{name} {donate}"] = x.cpu()  # so all ranks have read
    if groups.position == 0:
        shutil.rmtree(folder)
    return numbers


def _by_hand(watch: Watch, groups: Any, where: str = "") -> tuple[Net, Any]:
    model = Net().to(watch.device)
    names = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    params = dict(model.named_parameters())
    how = {"bucket_bytes": BUCKET_BYTES, "order": lambda path: names[path], "where": where}
    shards = mf.shard(params, groups, **how)
    return model, mf.init_state(shards, optim.sgd(0.1))


def transformed(groups: Any, watch: Watch, where: str = "", policy: Any = None) -> Numbers:
    """Steps by hand under torch.func, through a policy if there is one, else vmap at the end."""
    model, state = _by_hand(watch, groups, where)

    def loss_fn(shards: Any, batch: Any) -> Tensor:
        whole = contextlib.nullcontext
        how = mf.defer(shards, groups, policy) if policy else whole(mf.gather(shards, groups))
        with how as full:
            return loss_of(lambda x: functional_call(model, full, (x,)), batch)

    losses = []
    for batch in batches(watch.device):
        with watch.step():
            grads, loss = grad_and_value(loss_fn)(state.params, batch)
            state = mf.opt_step(state, mf.reduce_grads(grads, groups), donate=True)
        losses.append(loss)
    found = {"losses": torch.stack(losses), **mf.unshard(state.params, groups)}

    def hidden(row: Tensor) -> Tensor:
        gathered, begin = mf.gather(state.params, groups), "blocks.0."
        inner = {k.removeprefix(begin): v for k, v in gathered.items() if k.startswith(begin)}
        return functional_call(model.blocks[0], inner, (row,)).sum()

    x = mf.gather(state.params, groups)["embedding.weight"].detach()
    return found if policy else {**found, "vmapped": vmap(grad(hidden))(x)}


def transformed_deferred(groups: Any, watch: Watch, where: str = "") -> Numbers:
    """Parameters are fetched at the op that needs them."""
    return transformed(groups, watch, where, mf.on_demand(live_bytes=BUCKET_BYTES))


def updated_early(groups: Any, watch: Watch) -> Numbers:
    """Shards are updated in place while buckets that were fetched and not used are on their way."""
    _, state = _by_hand(watch, groups)
    for _ in range(STEPS):
        with watch.step():
            total = mf.GradSum()
            with mf.defer(state.params, groups, mf.keep_all(), into=total) as full:
                total.backward(full["embedding.weight"].square().mean())
                state = mf.opt_step(state, total.grads(), donate=True)
            total.release()
    return mf.unshard(state.params, groups)


def in_float16(groups: Any, watch: Watch) -> Numbers:
    """Gradients of many sizes, which travel in float16, and their means."""
    random = torch.Generator().manual_seed(dist.get_rank())
    params = {"w": torch.zeros(64, 64, device=watch.device)}
    shards = mf.shard(params, groups, precision="param=f32, compute=f32, reduce=f16")
    means = []
    for _ in range(STEPS):
        sizes = 2.0 ** torch.randint(-20, 10, (64, 64), generator=random)
        grads = {"w": (sizes * torch.rand(64, 64, generator=random)).to(watch.device)}
        with watch.step():
            found = mf.scatter_grads(grads, groups, like=shards)
        means.append(mf.unshard(found, groups)["w"])
    return {"rounded to float16": torch.stack(means)}


def left_in_flight(groups: Any, watch: Watch) -> Numbers:
    """Gathers under way beside compute; some are let go without a wait."""
    _, state = _by_hand(watch, groups)
    for _ in range(STEPS):
        with watch.step():
            run, left = (mf.defer(state.params, groups, mf.keep_all()) for _ in range(2))
            x = torch.full((64, 64), 0.5, device=watch.device)
            y = x @ x
            grads = {name: value * 0 + 1 for name, value in run.params.items()}
            del run, left
            shards = mf.scatter_grads(grads, groups, like=state.params)
            del grads
            z = y @ x
            state = mf.opt_step(state, mf.sync_replicas(shards, groups), donate=True)
            scratch = [torch.ones(1000, device=watch.device) for _ in range(5)]
    return {"z": z, "scratch": torch.stack(scratch), **mf.unshard(state.params, groups)}


def doctor(name: str, folder: str) -> list[str]:
    """A part of the doctor's report, which leaves its checks in a folder; the races in it."""
    from mics_fn.lab.doctor_gpu import PARTS  # not needed by any other program
    from mics_fn.lab.doctor_parts import DoctorConfig
    from mics_fn.lab.models import GPTConfig

    before = ["default"]

    def set_sync_debug_mode(mode: str) -> None:
        """CUDA raises, or warns, at the op that waits; here it is at the end of the block.

        CUDA has nothing against a wait for an event. A step has one, for the totals of the step
        before, and no other is allowed here.
        """
        waits = torch_cuda.host_waits() if before[0] != "default" else {}
        if waits.get("event.synchronize") == 1:
            del waits["event.synchronize"]
        if waits and before[0] == "error":
            raise RuntimeError(f"the host waited: {waits}")
        for _ in range(sum(waits.values())):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        before[0] = mode
        races.extend(torch_cuda.races())
        torch_cuda.reset()

    def sleep(cycles: int) -> None:
        torch_cuda.lib.sim_busy(torch.cuda.current_stream().stream_id, cycles / 2000)

    races: list[str] = []
    torch.cuda.set_sync_debug_mode, torch.cuda._sleep = set_sync_debug_mode, sleep
    small = GPTConfig(context=16, dim=32, num_blocks=2)
    PARTS[name].run(DoctorConfig(device="cuda", model=small, folder=folder))
    return races + torch_cuda.races()


class Noted:
    """A context variable that notes reads on threads other than the one that made it."""

    def __init__(self, name: str, variable: Any, reads: set[str]) -> None:
        self.name, self.variable, self.reads = name, variable, reads
        self.set, self.reset = variable.set, variable.reset
        self.own = threading.get_ident()

    def get(self, *default: Any) -> Any:
        where = "" if threading.get_ident() == self.own else " on another thread"
        self.reads.add(self.name + where)
        return self.variable.get(*default)


def context_of() -> dict[str, str]:
    """The context variables of the source, by name, with their modules; all are at its top."""
    found, root = {}, Path(mf.__file__).parent
    for path in root.rglob("*.py"):
        text, module = path.read_text(), path.relative_to(root).with_suffix("").parts
        calls = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call)]
        made = [ast.unparse(each.func).split(".")[-1] for each in calls]
        names = re.findall(r"^(\w+)\b.* = (?:\w+\.)?ContextVar\(", text, re.MULTILINE)
        assert made.count("ContextVar") == len(names), f"a context variable in {path}"
        assert not {"local", "copy_context"} & {*made}, f"a variable of threads in {path}"
        found |= dict.fromkeys(names, ".".join(["mics_fn", *module]))
    return found


def reads_of_backward(names: list[str]) -> tuple[list[str], list[str], int]:
    """The context variables, those that were read, and how much other threads have issued."""
    reads, threads, own = set[str](), [], nccl.SimNCCL._issue
    for name, module in context_of().items():
        variable = getattr(importlib.import_module(module), name)
        noted = Noted(name, variable, reads)
        for each in [m for key, m in sys.modules.items() if key.startswith("mics_fn")]:
            for key in [key for key, value in vars(each).items() if value is variable]:
                setattr(each, key, noted)

    def issue(*args: Any) -> Any:
        threads.append(threading.get_ident() != threading.main_thread().ident)
        return own(*args)

    setattr(nccl.SimNCCL, "_issue", issue)  # noqa: B010
    for name in names:
        _run(SCENARIOS[name], Watch(torch.device("cuda", dist.get_rank())))
    return sorted(context_of()), sorted(reads), sum(threads)
