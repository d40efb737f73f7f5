"""What ranks do on the simulated device in tests of their own."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from matrix import BUCKET_BYTES
from models import Net, batches, loss_of
from simcuda import Issued, nccl, torch_cuda

import mics_fn as mf
from mics_fn import _torch, optim
from mics_fn.errors import CollectiveError
from mics_fn.shards import any_lost


def left_by_an_error() -> tuple[str, float]:
    """The error of each rank when rank 1 raises, and the seconds that it took to get out."""
    device = torch.device("cuda", dist.get_rank())
    raised = time.monotonic()
    try:
        with mf.make_groups(dist.get_world_size(), device=device, timeout_s=8) as groups:
            trainer = mf.Trainer(Net().to(device), optim.sgd(0.1), groups, loss=loss_of)
            for batch in batches(device):
                raised = time.monotonic()
                if trainer.state.step > 1 and groups.rank == 1:
                    raise KeyError("mine")
                trainer.step(batch)
    except (KeyError, mf.MicsError) as error:
        return type(error).__name__, time.monotonic() - raised
    raise AssertionError("no rank has failed")


def aborted(late: Sequence[int]) -> dict[str, Any]:
    """What a rank finds after collectives were aborted, on some ranks before a step was over.

    The guard lets a step be written whatever its gradients are, so nothing masks it.

    Args:
      late: the ranks whose device has not come to the end of the last step.
    """
    rank, found = dist.get_rank(), dict[str, Any]()
    with mf.make_groups(2, device=torch.device("cuda", rank), timeout_s=30) as groups:
        model = Net().to(groups.device)
        guard = optim.Guard(on_nonfinite="ignore")
        trainer = mf.Trainer(model, optim.adamw(1e-2), groups, loss=loss_of, guard=guard)
        first, *data = batches(groups.device)
        trainer.step(first)
        torch_cuda.answer_queries("never" if rank in late else "always", seed=0)
        for batch in data:
            trainer.step(batch)
        groups.state.fail(CollectiveError("planted"))
        groups.state.abort()
        torch_cuda.answer_queries("always", seed=0)
        found["lost"] = any_lost(trainer.state)
        found["used"] = _error_of(lambda: mf.shards.map(torch.sqrt, trainer.state.params))
        found["reset"] = _error_of(trainer.reset)
        found["params"] = None
        if not found["reset"]:
            found["params"] = {name: x.cpu() for name, x in trainer.params().items()}
    return found


def aborted_within() -> dict[str, Any]:
    """What a rank finds after a step in which an abort of collectives had begun, and the next one.

    Those of the simulated device are done all the same, so that only the flag tells.
    """
    device = torch.device("cuda", dist.get_rank())
    with mf.make_groups(2, device=device, timeout_s=30) as groups:
        aborts = []

        def loss(model: Any, batch: Any) -> torch.Tensor:
            if aborts:
                _torch.lose_queued()
            return loss_of(model, batch)

        trainer = mf.Trainer(Net().to(device), optim.adamw(1e-2), groups, loss=loss)
        first, second, third, _ = batches(device)
        trainer.step(first)
        trainer.step(second)
        before = {name: x.cpu() for name, x in trainer.params().items()}
        calls = trainer.sync_state.step
        aborts.append(True)
        metrics = trainer.step(third)
        found: dict[str, Any] = {"accepted": metrics.accepted, "why": metrics.nonfinite}
        found |= {"lost": any_lost(trainer.state), "step": trainer.state.step}
        found["calls"] = trainer.sync_state.step - calls
        after = {name: x.cpu() for name, x in trainer.params().items()}
        found["same"] = all(torch.equal(after[name], x) for name, x in before.items())
        aborts.clear()
        found["next"] = trainer.step(third).accepted, trainer.state.step
        return found


def _error_of(call: Callable[[], Any]) -> str:
    """The name and the text of the error that a call raises; "" if it raises none."""
    try:
        call()
    except mf.MicsError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def with_defaults() -> tuple[str, str, int]:
    """The devices that groups and `init_distributed` take, and what a default budget gathers."""
    with mf.make_groups(dist.get_world_size()) as groups:
        trainer = mf.Trainer(Net().to(groups.device), optim.sgd(0.1), groups, loss=loss_of)
        trainer.step(batches(groups.device)[0])
        gathered = groups.hierarchy.pools.fetched.waiting_bytes
        return str(groups.device), str(mf.init_distributed()), gathered


def timed(us_per_byte: dict[str, float]) -> list[Issued]:
    """The collectives of one step in modelled time, by what a byte takes on each kind of group."""
    device = torch.device("cuda", dist.get_rank())
    with mf.make_groups(2, node_size=2, device=device, timeout_s=30) as groups:
        torch.manual_seed(0)
        trainer = mf.Trainer(
            Net(depth=8).to(device),
            optim.sgd(0.1),
            groups,
            loss=loss_of,
            bucket_bytes=2 * BUCKET_BYTES,
            live_bytes=4 * BUCKET_BYTES,
        )
        *first, last = batches(device)
        for batch in first:
            trainer.step(batch)
        torch.accelerator.synchronize()
        start_us = torch_cuda.lib.sim_time(groups.rank, 0)  # by the default stream
        nccl.issued.clear()
        nccl.us_per_byte.update(us_per_byte)
        torch_cuda.costs(per_flop_us=0.01)
        trainer.step(last)
        return [each._replace(done_us=each.done_us - start_us) for each in nccl.issued]


def masked() -> list[Any]:
    """A default guard on some device: what each step said, read late, and whether it was taken.

    The loss of rank 1 is not finite in steps 2, 4 and 5; and from 7 on, until that is an error.
    """
    found, numbers = [], []
    for device in (torch.device("cpu"), torch.device("cuda", dist.get_rank())):
        backend: Any = {"backend": "gloo"} if device.type == "cpu" else {}
        with mf.make_groups(dist.get_world_size(), device=device, timeout_s=8, **backend) as groups:
            torch.manual_seed(0)
            net = torch.nn.Linear(5, 4).to(device)
            rate = optim.warmup_cosine(0.1, 3, 30)
            loss = lambda model, x: model(x).square().mean() * x[0, 0].sign()  # noqa: E731
            trainer = mf.Trainer(net, optim.adamw(rate), groups, loss=loss, bucket_bytes=64)
            said, error = [], ""
            for step in range(1, 10):
                x = torch.ones(6, 5) + torch.arange(30).view(6, 5) * (groups.rank + step) / 30
                x[0, 0] = float("nan") if step in (2, 4, 5, 7, 8, 9) and groups.rank else 1.0
                try:
                    said.append(trainer.step(x.to(device)))
                except mf.errors.NonFiniteError as raised:
                    error = f"{raised}".split("\n")[1].strip()
            told = [(m.step, m.accepted, m.skipped, m.samples) for m in said]
            state = trainer.state
            values = [*trainer.params().values(), *mf.tree.flatten((state.opt, state.buffers))[0]]
            values = [torch.as_tensor(x, dtype=torch.float64).cpu().flatten() for x in values]
            found.append((told, error, state.step, trainer.guard.skipped))
            numbers.append(values)
    gap = (torch.cat(numbers[0]) - torch.cat(numbers[1])).abs().max()  # they round in other ways
    return [*found, float(gap)]
