"""Mutations of files, and what a file makes a process do that reads it."""

import codecs
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOSTILE: list[Any] = [-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 0.0, 1.5, 1e300, True, None, "", "x"]
HOSTILE += ["../x", "/etc/passwd", "a\0b", "\ud800", [], [[]], {}, {"a": {}}, [0, 4], [4, 0], "I64"]
HOSTILE += ["model.safetensors.index.json", "b.safetensors", ".", "link", "fifo"]
FORBIDDEN = ("exec", "compile", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess")
SECONDS = 5.0  # of the processor, for one call
FORBIDDEN += ("pickle.find_class", "marshal", "socket", "ctypes", "mmap", "os.remove", "os.rename")


def flip(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at : at + rng.choice([1, 4, 8])] = rng.choice([b"\0", b"\xff"]) * rng.choice([1, 4, 8])


def cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def append(rng: random.Random, data: bytearray) -> None:
    data += rng.randbytes(rng.randrange(1, 40))


def insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.randrange(1, 9))


def remove(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.randrange(1, 9)]


def move(rng: random.Random, data: bytearray) -> None:
    source, at, length = rng.randrange(len(data)), rng.randrange(len(data)), rng.randrange(1, 60)
    data[at : at + length] = data[source : source + length]


def replace_in_json(rng: random.Random, value: Any) -> Any:
    """The same value with another one at one place of it."""
    inside = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not inside or rng.random() < 0.1:
        return rng.choice(HOSTILE)
    key = rng.choice(inside)
    if isinstance(value[key], dict | list) and rng.random() < 0.8:
        value[key] = replace_in_json(rng, value[key])
    elif isinstance(value, dict) and rng.random() < 0.2:
        value[f"{rng.choice(HOSTILE)}"] = value.pop(key)
    else:
        value[key] = rng.choice(HOSTILE)
    return value


class Watch:
    """Notes what a file makes the process do, by Python's audit events."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.on = str(folder), False
        self.seen: list[str] = []
        for name in ("raw_unicode_escape", "unicode_escape", "latin-1", "cp437"):
            codecs.lookup(name)  # which are imported when they are first used
        sys.addaudithook(self.hear)

    def error_of(
        self, what: Any, call: Callable[[], Any], kind: type[Exception], *, on: bool = True
    ) -> Any:
        """What a call raises, which opens nothing elsewhere, runs nothing, and takes no long time.

        Args:
          what: for errors.
          call: reads files.
          kind: the errors that it may raise.
          on: whether to watch it; the first calls may import modules.
        """
        started, self.on, error = time.process_time(), on, None
        try:
            call()
        except kind as raised:
            error = raised
        finally:
            self.on = False
        assert not self.seen, (what, self.seen)
        assert time.process_time() - started < SECONDS, what
        return error

    def hear(self, event: str, args: tuple) -> None:
        if not self.on:
            return
        if event == "open" and not os.path.abspath(args[0]).startswith(self.folder):
            self.seen.append(f"{event} {args[0]}")
        if event.startswith(FORBIDDEN):
            self.seen.append(f"{event} {args}")


BYTES: list[Callable[[random.Random, bytearray], None]]
BYTES = [flip, overwrite, cut, append, insert, remove, move]
