"""What ranks find after an abort of collectives for which their devices have waited.

A device that is behind goes on with garbage then: see `stall` in `simcuda.nccl`. Each function
gives the texts of what is wrong with what a rank has, or gives out, after that.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from matrix import BUCKET_BYTES, TRAINERS
from models import Net, batches, loss_of
from simcuda import nccl, torch_cuda
from torch.func import functional_call, grad_and_value
from torch.utils import _pytree as pytree

import mics_fn as mf
from mics_fn import _torch, errors, faults, optim
from mics_fn.optim import guard
from mics_fn.shards import any_lost
from mics_fn.train.resuming import guard_numbers

STEPS, AT = 5, 2  # of a run; and after how many the device stalls


class ByHand:
    """A loop of the verbs, in the form of a `Trainer`."""

    def __init__(self, groups: Any, donate: bool) -> None:
        torch.manual_seed(0)
        self.groups, self.donate, self.kept = groups, donate, list[Any]()
        self.model = Net().to(groups.device)
        params = mf.shard(dict(self.model.named_parameters()), groups, bucket_bytes=BUCKET_BYTES)
        self.state = mf.init_state(params, optim.adamw(1e-2))

    def reduced(self, batch: Any) -> Any:
        def loss(shards: Any) -> Any:
            full = mf.gather(shards, self.groups)
            return loss_of(lambda x: functional_call(self.model, full, (x,)), batch)

        grads, _ = grad_and_value(loss)(self.state.params)
        return mf.reduce_grads(grads, self.groups)

    def step(self, batch: Any) -> None:
        grads = self.reduced(batch)
        if not self.donate:  # trees of one's own know nothing of groups
            self.kept.append(self.state)
            grads = pytree.tree_map(lambda x: x * 1.0, grads)
        self.state = mf.opt_step(self.state, grads, donate=self.donate)

    def params(self) -> Any:
        return mf.unshard(self.state.params, self.groups)

    def reset(self) -> None:
        self.groups = mf.reset(self.groups)
        self.state = faults.same_step(self.state, self.groups, heal=True)


def _made(name: str, groups: Any, loss: Any = loss_of) -> Any:
    if name.startswith("by hand"):
        return ByHand(groups, donate=name == "by hand")
    torch.manual_seed(0)
    options = {"optimizer": optim.adamw(1e-2), "bucket_bytes": BUCKET_BYTES, **TRAINERS[name]}
    return mf.Trainer(Net().to(groups.device), groups=groups, loss=loss, **options)


def _facts(trainer: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """The numbers of a state and of what goes with it, and its tensors on this rank."""
    leaves = mf.tree.flatten(trainer.state)[0]
    tensors = [x.detach().cpu().clone() for x in leaves if isinstance(x, torch.Tensor)]
    told = [x for x in leaves if isinstance(x, int | float)]
    if isinstance(trainer, mf.Trainer):
        told += [trainer.sync_state.step, *guard_numbers(trainer.guard)]
    return [trainer.state.step, *told], tensors


def _same(found: Any, wanted: Any) -> bool:
    pairs = zip(found[1], wanted[1], strict=True)
    return found[0] == wanted[0] and all(torch.equal(*pair) for pair in pairs)


def _tried(call: Callable[[], Any]) -> tuple[str, Any]:
    """The name of the error of this library that a call raises, or ""; and what it gave."""
    try:
        return "", call()
    except mf.MicsError as error:
        return type(error).__name__, None


def abort(groups: Any) -> None:
    """What the monitor does where another rank is gone."""
    groups.state.fail(errors.CollectiveError("planted"), raised=False)
    for job in groups.state.abort():
        job.done.wait(10.0)


def _stall(groups: Any, results: int, late: Sequence[int] = ()) -> None:
    """Stall after so many collectives; ranks that are not late get the result of one more."""
    more = bool(late) and dist.get_rank() not in late
    flag, end = _torch.abort_flag(groups.device), lambda: abort(groups)
    nccl.stall(results + more, sends=results + bool(late), flag=flag, at_wait=end)


def _groups(partition: int) -> Any:
    torch_cuda.answer_queries("always")
    return mf.make_groups(partition, device=torch.device("cuda", dist.get_rank()), timeout_s=30)


def _undisturbed(name: str, groups: Any, data: Sequence[Any]) -> tuple[list[Any], int, Any]:
    """What a run has after each step, the collectives of a step, and the full parameters."""
    trainer, found, issued, full = _made(name, groups), [], [], []
    for batch in [None, *data]:
        if batch is not None:
            trainer.step(batch)
        found.append(_facts(trainer))
        issued.append(len(nccl.issued))
        full.append({key: x.cpu() for key, x in trainer.params().items()})
        issued[-1] = len(nccl.issued)
    before = len(nccl.issued)
    trainer.step(data[0])
    return found, len(nccl.issued) - before, full


def _data(groups: Any) -> list[Any]:
    return [*batches(groups.device), *batches(groups.device)][:STEPS]


def torn(name: str, late: Sequence[int], ahead: int, stride: int) -> tuple[list[str], list[str]]:
    """What is wrong after stalls at many instants; and what each `reset` raised.

    Args:
      name: of what is trained.
      late: ranks that do not get the result of a collective that others get; if none, it is equal.
      ahead: how many steps the host goes on, unless one of them raises.
      stride: of instants, in collectives; the last ones are all tried.
    """
    groups, wrong, raised = _groups(2), [], []
    data = _data(groups)
    want, count, _ = _undisturbed(name, groups, data)
    for at in sorted({*range(0, count, stride), *range(count - 3, count + 2)}):
        trainer = _made(name, groups)
        for batch in data[:AT]:
            trainer.step(batch)
        _facts(trainer)  # all of it is over
        _stall(groups, at, late)
        text, said = f"{name}, stalled after {at} of {count}", []
        for batch in data[AT : AT + ahead]:
            error, metrics = _tried(partial(trainer.step, batch))
            said += [metrics] * (metrics is not None)
            if error:
                break
        if torch_cuda.stalled():
            abort(groups)
        counts = [_tried(lambda each=each: each.samples)[1] for each in said]
        wrong += [f"{text}: {n} samples" for n in counts if n not in (None, 4 * groups.world_size)]
        for verb in ("params", "state_dict") if groups.rank % 2 else ():  # others have not looked
            if not _tried(getattr(trainer, verb, trainer.params))[0]:
                wrong.append(f"{text}: {verb} after an abort")
        raised.append(_tried(trainer.reset)[0])
        groups = trainer.groups
        kept = getattr(trainer, "kept", [])[: AT + 1]
        wrong += [f"{text}: kept {x.step}" for x in kept if any_lost(x) and x.step <= AT]
        if raised[-1] not in ("", "LostStateError"):
            wrong.append(f"{text}: {raised[-1]}")
        if raised[-1]:
            wrong += [] if any_lost(trainer.state) or late else [f"{text}: {raised[-1]}, not lost"]
            continue
        found = _facts(trainer)
        if found[0][0] < AT or not _same(found, want[found[0][0]]):
            wrong.append(f"{text}: other bits at step {found[0][0]}, in {found[0][1:]}")
        for batch in data[found[0][0] :]:
            trainer.step(batch)
        if not _same(_facts(trainer), want[STEPS]):
            wrong.append(f"{text}: other bits at the end")
    groups.close()
    return wrong + torch_cuda.misuse, raised


def exported() -> list[str]:
    """What is wrong with what leaves while the device stalls: parameters, a leaf, a loss."""
    groups, wrong = _groups(2), []
    data = _data(groups)
    _, _, full = _undisturbed("masked", groups, data)
    path = "params.blocks.0.up.weight"
    calls: dict[str, Callable[[Any], Any]] = {
        "params": lambda trainer: trainer.params(),
        "state_dict": lambda trainer: trainer.state_dict(),
        "get": lambda trainer: {path[7:]: mf.inspection.get(trainer.state, path, trainer.groups)},
        "eval": lambda trainer: {"loss": trainer.eval(data[1])},
    }
    whole = _made("masked", groups)
    whole.step(data[0])
    full[1]["loss"] = whole.eval(data[1]).cpu()
    for what, call in calls.items():
        for at in (0, 2, 3, 7):
            trainer = _made("masked", groups)
            trainer.step(data[0])
            for _ in range(3):  # ranks compare trees and schedules in the first ones
                call(trainer)
            _stall(groups, at)
            error, found = _tried(partial(call, trainer))
            if torch_cuda.stalled():
                abort(groups)
            nccl.Stall.results = None
            found = {} if error else {k: x.cpu() for k, x in found.items()}
            none = what == "eval" and found.get("loss", torch.ones(())).isnan()
            if not none and any(not torch.equal(x, full[1][k]) for k, x in found.items()):
                wrong.append(f"{what}, stalled after {at}: other bits")
            trainer.reset()
            groups = trainer.groups
    groups.close()
    return wrong + torch_cuda.misuse


def _begun(folder: str, trainer: Any, groups: Any) -> Any:
    how: dict[str, Any] = {"step": trainer.state.step, "overwrite": "newer"}
    return mf.checkpoint.start_save(folder, trainer.state, groups, **how)


def saves(name: str, when: str, stride: int) -> list[str]:
    """What is wrong with saves begun before, amid and after a stall: all that load are right.

    Args:
      name: of what is trained.
      when: "before", "amid" or "after".
      stride: of instants, in collectives.
    """
    groups, wrong = _groups(2), []
    data = _data(groups)
    want, count, _ = _undisturbed(name, groups, data)
    folder = f"{tempfile.gettempdir()}/mics_fn-stalled-{os.getppid()}"
    for at in range(0, count, stride):
        trainer, text = _made(name, groups), f"{name}, {when}, stalled after {at}"
        save = partial(_begun, folder, trainer)

        for batch in data[:AT]:
            trainer.step(batch)
        save(groups).wait()
        trainer.step(data[AT])
        pending = save(groups) if when == "before" else None
        _stall(groups, at)
        _tried(partial(trainer.step, data[AT + 1]))
        if when == "after" and torch_cuda.stalled():
            abort(groups)
        if pending is None:
            _, pending = _tried(partial(save, groups))
        if torch_cuda.stalled():
            abort(groups)
        if pending is not None:
            _tried(pending.wait)
        groups = mf.reset(groups)
        _, pending = _tried(partial(save, groups))
        if pending is not None:
            pending.wait()
        for step in mf.checkpoint.steps(folder):
            fresh = _made(name, groups)
            loaded = mf.checkpoint.load(folder, fresh.state, groups, step=step)
            fresh.state, told = loaded.state, want[step]
            found = _facts(fresh)
            if found[0][0] != step or not _same(([], found[1]), ([], told[1])):
                wrong.append(f"{text}: other bits are saved as step {step}")
    if groups.position == 0:
        shutil.rmtree(folder)
    groups.close()
    return wrong + torch_cuda.misuse


def healed(stride: int) -> list[str]:
    """What is wrong after an abort amid a heal: ranks 0 and 1 have nothing, and take it again."""
    groups, wrong = _groups(2), []
    data, at = _data(groups), 0
    want, *_ = _undisturbed("ignored", groups, data)
    while True:
        trainer = _made("ignored", groups)
        trainer.step(data[0])
        torch_cuda.answer_queries("never" if dist.get_rank() < 2 else "always")
        trainer.step(data[1])
        abort(groups)
        torch_cuda.answer_queries("always")
        groups = mf.reset(groups)
        nccl.stall(at, at_wait=partial(abort, groups))
        error, state = _tried(partial(faults.same_step, trainer.state, groups, heal=True))
        ended = nccl.Stall.results is not None and nccl.Stall.results >= 0  # no garbage was left
        if torch_cuda.stalled():
            abort(groups)
        nccl.Stall.results = None
        groups = mf.reset(groups)
        trainer.state = trainer.state if error else state
        trainer.state = faults.same_step(trainer.state, groups, heal=True)
        found = _facts(trainer)
        if found[0][0] != 2 or not _same(([], found[1]), ([], want[2][1])):
            wrong.append(f"aborted after {at} collectives of a heal: other bits")
        at += stride
        if ended:
            groups.close()
            return wrong + torch_cuda.misuse


def judged_late() -> list[str]:
    """What is wrong where an abort comes while the host still waits for a step that is whole."""
    groups, wrong = _groups(2), []
    data, own = _data(groups), guard.HostCopy.__init__
    want, *_ = _undisturbed("masked", groups, data)
    trainer = _made("masked", groups)
    trainer.step(data[0])

    def stalled(copy: Any, numbers: Any) -> None:  # behind the flag
        nccl.stall(at_wait=lambda: abort(groups))
        own(copy, numbers)

    with patch.object(guard.HostCopy, "__init__", stalled):
        trainer.step(data[1])
    abort(groups)
    trainer.reset()
    wrong += [] if _same(_facts(trainer), want[2]) else ["a step that was whole is not kept"]
    trainer.groups.close()
    return wrong + torch_cuda.misuse


def peer_raises(name: str) -> tuple[str, list[str]]:
    """The error of each rank as the last one raises while others wait; and what is wrong then."""
    groups, wrong = _groups(2), []
    data, fails = _data(groups), []
    want, *_ = _undisturbed(name, groups, data)

    def loss(model: Any, batch: Any) -> Any:
        if fails:
            raise KeyError("mine")
        return loss_of(model, batch)

    trainer = _made(name, groups, loss=loss)
    for batch in data[:AT]:
        trainer.step(batch)
    _facts(trainer)
    fails += [True] * (groups.rank == groups.world_size - 1)
    nccl.stall(flag=_torch.abort_flag(groups.device))
    error = ""
    try:
        for batch in data[AT:]:
            trainer.step(batch)
    except (KeyError, mf.MicsError) as raised:
        error = f"{type(raised).__name__}: {raised}".split("\n")[0]
    fails.clear()
    if _tried(trainer.reset)[0]:
        return error, [*wrong, "lost"]
    found = _facts(trainer)
    wrong += [] if _same(found, want[AT]) else [f"other bits: {found[0]}, not {want[AT][0]}"]
    for batch in data[AT:]:
        trainer.step(batch)
    wrong += [] if _same(_facts(trainer), want[STEPS]) else ["other bits at the end"]
    trainer.groups.close()
    return error, wrong + torch_cuda.misuse


def stale() -> list[str]:
    """What is wrong with gradients of which collectives were aborted, once all go on."""
    groups, wrong = _groups(2), []
    data, trainer = _data(groups), _made("by hand", groups)
    for batch in data[:AT]:
        trainer.step(batch)
    _stall(groups, 0)
    grads = trainer.reduced(data[AT])
    abort(groups)
    trainer.reset()
    if _tried(lambda: mf.opt_step(trainer.state, grads))[0] != "GroupsError":
        wrong.append("they are stepped")
    trainer.groups.close()
    return wrong + torch_cuda.misuse
