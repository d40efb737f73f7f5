"""Text that exists on every machine: the bytes of Python's own library, cut into batches.

The seed and the place of a batch (part, step, micro-step, rank) alone decide which bytes it holds,
so that one process can make the batches of all ranks again.
"""

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mics_fn.errors import MicsError

HELD_OUT_EVERY = 10  # files

Part = Literal["train", "held_out"]


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and bytes of other files for tests."""

    train: Tensor  # 1D uint8
    held_out: Tensor  # 1D uint8
    num_files: int

    def batch(
        self,
        part: Part,
        *,
        step: int,
        rank: int,
        size: int,
        context: int,
        micro: int = 0,
        seed: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Draw sequences of the text, the same on every machine for equal arguments.

        Args:
            part: "train" or "held_out".
            step, micro, rank: the place of this batch in the run.
            size: number of sequences.
            context: length of a sequence in tokens.
            seed: the seed of the whole run.

        Returns:
            `(tokens_in, tokens_out)`, each int64 [size, context]; the second is one byte ahead.

        Example:
            >>> text = load_text(max_bytes=100_000)
            >>> tokens_in, tokens_out = text.batch("train", step=0, rank=1, size=2, context=8)
            >>> tokens_in.shape, bool((tokens_in[:, 1:] == tokens_out[:, :-1]).all())
            (torch.Size([2, 8]), True)
        """
        data: Tensor = getattr(self, part)
        # Python defines the sequence that a string seeds for every platform and version.
        places = random.Random(f"{seed} {part} {step} {micro} {rank}")
        starts = [places.randrange(len(data) - context) for _ in range(size)]
        rows = torch.stack([data[at : at + context + 1] for at in starts]).to(torch.int64)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def load_text(max_bytes: int = 4_000_000) -> Text:
    """Read the sources of Python's library in the order of names; every tenth is held out.

    Args:
        max_bytes: how many bytes to read at most.

    Raises:
        MicsError: the library of this Python is not on disk as sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    remaining = max_bytes
    files = sorted(folder.glob("*.py"), key=lambda path: path.name)
    for index, path in enumerate(files):
        content = path.read_bytes()[:remaining]
        parts[index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(content)
        remaining -= len(content)
        if remaining <= 0:
            break
    train, held_out = (b"".join(part) for part in parts)
    if not train or not held_out:
        raise MicsError(
            "load_text: this Python has no library sources to read",
            [f"{folder}: {len(files)} files that end in .py"],
            "use a Python whose standard library is a folder of sources",
        )
    as_tensor = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out)]
    return Text(*as_tensor, num_files=sum(map(len, parts)))
