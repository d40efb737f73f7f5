"""States that are functions of their step: what is saved as a step is known when it is loaded."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cases import random
from torch import Tensor

import mics_fn as mf
from mics_fn import checkpoint, spans, tree

# What changes a disk, or makes it durable; pathlib and shutil look these up in `os`.
OPERATIONS = ("open", "write", "pwrite", "ftruncate", "fsync", "rename", "mkdir", "unlink", "rmdir")


def state_at(step: int, groups: mf.Groups) -> dict[str, Any]:
    """Shards of several dtypes, a tensor and a number."""
    full = {"w": torch.arange(9000.0).view(90, 100), "b": torch.arange(7.0)}
    full["h"] = torch.arange(40.0).bfloat16()
    params = tree.map_leaves(lambda x: x + step, mf.shard(full, groups))
    return {"params": params, "seen": torch.full((3,), step), "step": step}


def save_at(
    folder: Any, step: int, groups: mf.Groups, *, background: bool = False, **how: Any
) -> None:
    """Save the state of a step."""
    state, extra = state_at(step, groups), {"step": step, "cursor": torch.arange(4) + step}
    if background:
        checkpoint.start_save(folder, state, groups, step=step, extra=extra, **how).wait()
    else:
        checkpoint.save(folder, state, groups, step=step, extra=extra, **how)


def load_at(folder: Any, groups: mf.Groups, step: int | None = None, **how: Any) -> int:
    """Load a step, compare every bit, and return its number."""
    found = checkpoint.load(folder, state_at(0, groups), groups, step=step, **how)
    wanted = state_at(found.step, groups)
    pairs = zip(tree.flatten(found.state)[0], tree.flatten(wanted)[0], strict=True)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
    assert (found.extra["step"], int(found.extra["cursor"][0])) == (found.step, found.step)
    return found.step


def check_step(folder: Any, step: int, groups: mf.Groups) -> None:
    """The newest step is this one, and right to the bit."""
    assert load_at(folder, groups) == checkpoint.verify(folder).step == step


def damage_values(file: Path) -> None:
    """Flip a bit of a value in a file."""
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)


def trainer_in(folder: Any, groups: mf.Groups, width: int = 2) -> mf.Trainer:
    """A trainer that saves each step."""
    torch.manual_seed(0)
    model, loss = torch.nn.Linear(2, width), lambda model, x: model(x).mean()
    saved = mf.Checkpoints(folder, every=1, keep=2)
    return mf.Trainer(model, mf.optim.adamw(0.01), groups, loss=loss, checkpoint=saved)


class Recorder:
    """Notes what is done to the disk.

    Args:
      before: called with the number of each operation, and what writes half of what it would.
    """

    def __init__(self, before: Callable[[int, Callable[[], Any]], Any] = lambda *_: None) -> None:
        self.before, self.did = before, list[tuple[str, str]]()

    def install(self, put: Callable[[Any, str, Any], Any]) -> None:
        """Stand before these functions of `os`; `put` is `setattr`."""
        for name in OPERATIONS:
            put(os, name, self.watched(name, getattr(os, name)))

    def watched(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return plain(*args, **kwargs)
            is_open = name in ("write", "pwrite", "ftruncate", "fsync")
            path = os.readlink(f"/proc/self/fd/{args[0]}") if is_open else os.fsdecode(args[0])
            half = lambda: plain(args[0], bytes(args[1])[: len(args[1]) // 2])  # noqa: E731
            self.did.append((name, path))
            self.before(len(self.did) - 1, half if name == "write" else lambda: None)
            return plain(*args, **kwargs)

        return call


def every_kind() -> dict[str, Tensor]:
    """A tensor of each kind that an export may meet; two of them are the same one."""
    shared = random(0, 5, 3)
    return {
        "z": shared,
        "a": shared,
        "h.10.w": random(1, 7, 5),
        "h.2.w": random(2, 33, dtype=torch.bfloat16),
        "scalar": random(3),
        "empty": torch.zeros(0, 4),
        "count": torch.tensor([5, -7]),
        "mask": torch.tensor([True, False, True]),
        "turned": random(4, 3, 4).t(),
    }


def every_shard(groups: mf.Groups) -> dict[str, Any]:
    """These as shards, one of them frozen, and a tensor beside them."""
    shards = mf.shard(every_kind(), groups, bucket_bytes=64, frozen=lambda path: "turned" in path)
    return {**shards, "buffer": torch.arange(8.0)[::2]}


@contextmanager
def at(name: str, act: Callable[[], Any]) -> Iterator[None]:
    """A block in which something is done wherever a save passes the point of a name."""

    def observe(point: spans.Point) -> None:
        if point.name == name:
            act()

    spans.observers.append(observe)
    try:
        yield
    finally:
        spans.observers.remove(observe)
