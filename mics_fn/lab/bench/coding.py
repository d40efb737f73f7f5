"""`bench codec`: how fast codecs encode, decode and average, beside a copy in memory.

Each works on float32 in one process, and speeds count the bytes of these. The plain form of a
codec is its definition as one expression, with a temporary of full size per op.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mics_fn.collectives import Codec
from mics_fn.errors import PlanError, message
from mics_fn.lab.bench.turns import (
    BenchPeer,
    BenchTurns,
    Laps,
    between,
    is_first,
    on_ranks,
    ratio,
    say,
    spread,
    start,
    take_turns,
)
from mics_fn.lab.report import add_count, table

OPS = ("encode", "decode", "decode_mean")


@dataclass(frozen=True)
class CodecConfig:
    """Everything that decides what is measured.

    Args:
        turns: how many steps.
        numel: float32 values that an op takes or gives.
        codecs: the texts of codecs.
        device: "auto", "cpu" or "cuda".
    """

    turns: BenchTurns = field(default_factory=BenchTurns)
    numel: int = 2**22
    codecs: tuple[str, ...] = ("int8[256]", "int4[64]", "fp8[256]")
    device: str = "auto"


def add_codec_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the bench of codecs."""
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add_count(parser, "warmup", 2, "steps before measuring")
    add_count(parser, "rounds", 9, "turns of each peer")
    add_count(parser, "steps", 2, "steps of a turn")
    add_count(parser, "mib", 16, "MiB of float32 values")
    default = " ".join(CodecConfig.codecs)
    text = f"codecs, each a text such as int8[128] (default {default})"
    parser.add_argument("--codec", default=CodecConfig.codecs, help=text, metavar="TEXT", nargs="+")


def codecs_config_of(args: argparse.Namespace, ranks: int) -> CodecConfig:
    """What the flags say."""
    codecs = tuple(str(Codec.parse(text)) for text in args.codec)
    numel = args.mib * 2**18
    for text in codecs:
        if numel % (Codec.parse(text).block or 1):
            fix = "use blocks of a power of two"
            raise PlanError(message(f"--codec {text}: {numel} values are no full blocks", fix=fix))
    turns = BenchTurns(args.rounds, args.steps, args.warmup)
    return CodecConfig(turns=turns, numel=numel, codecs=codecs, device=args.device)


def measure_codecs(config: CodecConfig) -> dict[str, Any]:
    """A copy, and each codec with its plain form, in turns, on one thread of one process.

    Returns:
        On rank 0 the figures; {} on the others.
    """
    device = start(config.device)
    if not is_first():
        return {}
    say("codecs and a copy in memory take turns ...")
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        laps = take_turns(list(_peers(config, device)), config.turns, device=device)
    finally:
        torch.set_num_threads(threads)
    copy, *rest = laps
    pairs = zip(rest[::2], rest[1::2], strict=True)
    found = [_figures(ours, copy, plain, config) for ours, plain in pairs]
    return {"copy": _speeds(copy, config), "ops": found}


def plain_encode(codec: Codec, x: Tensor) -> Tensor:
    """What `Codec.encode` gives for a multiple of a block, as one expression.

    >>> codec, x = Codec("int4", 2), torch.tensor([1.0, -7.0, 0.5, 3.5])
    >>> torch.equal(plain_encode(codec, x), codec.encode(x))
    True
    """
    blocks = x.view(-1, codec.block or 1)
    top = {"int8": 127, "int4": 7, "fp8": 448}[codec.name]
    scale = (blocks.abs().amax(1, keepdim=True) / top).clamp(min=2.0**-126).to(torch.bfloat16)
    quotients = (blocks / scale.to(torch.float32)).clamp(-top, top).flatten()
    if codec.name == "fp8":
        codes = quotients.to(torch.float8_e4m3fn).view(torch.uint8)
    elif codec.name == "int8":
        codes = quotients.round().to(torch.int8).view(torch.uint8)
    else:
        pairs = (quotients.round() + 8).to(torch.uint8).view(-1, 2)
        codes = pairs[:, 0] | (pairs[:, 1] << 4)
    padding = codes.new_zeros(len(codes) % 2)
    return torch.cat([codes, padding, scale.flatten().view(torch.uint8)])


def plain_decode(codec: Codec, codes: Tensor, n: int) -> Tensor:
    """What `Codec.decode` gives for a multiple of a block, as one expression.

    >>> codec, x = Codec("int4", 2), torch.tensor([1.0, -7.0, 0.5, 3.5])
    >>> plain_decode(codec, codec.encode(x), 4)
    tensor([ 1.0000, -7.0000,  0.5000,  3.5000])
    """
    scale = codes[codec.nbytes(n) - 2 * (n // (codec.block or 1)) :].view(torch.bfloat16)
    if codec.name == "int4":
        pairs = codes[: n // 2]
        values = torch.stack([pairs & 15, pairs >> 4], 1).to(torch.float32) - 8
    else:
        kind = torch.int8 if codec.name == "int8" else torch.float8_e4m3fn
        values = codes[:n].view(kind).to(torch.float32)
    return (values.view(len(scale), -1) * scale.to(torch.float32).unsqueeze(1)).flatten()


def _peers(config: CodecConfig, device: torch.device) -> Iterator[BenchPeer]:
    """The copy, and then each op of each codec, followed by its plain form."""
    x = torch.randn(config.numel, device=device)
    out = torch.empty_like(x)
    yield _peer("copy", partial(out.copy_, x))
    for text in config.codecs:
        codec = Codec.parse(text)
        codes = codec.encode(x)
        coded = torch.empty_like(codes)
        ops: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
            "encode": (
                partial(codec.encode, x, out=coded),
                partial(plain_encode, codec, x),
            ),
            "decode": (
                partial(codec.decode, codes, len(x), x.dtype, out=out),
                partial(plain_decode, codec, codes, len(x)),
            ),
            "decode_mean": (
                partial(codec.decode_mean, [codes], x, out),
                partial(_plain_mean, codec, codes, x),
            ),
        }
        for op in OPS:
            ours, plain = ops[op]
            yield _peer(f"{codec} {op}", ours)
            yield _peer(f"{codec} {op}, plain", plain)


def _plain_mean(codec: Codec, codes: Tensor, own: Tensor) -> Tensor:
    return torch.stack([own, plain_decode(codec, codes, len(own))]).mean(0)


def _peer(name: str, work: Callable[[], Any]) -> BenchPeer:
    def step(number: int) -> None:
        work()

    return BenchPeer(name, step, lambda: 0)


def _figures(ours: Laps, copy: Laps, plain: Laps, config: CodecConfig) -> dict[str, Any]:
    return {
        "name": ours.name,
        **_speeds(ours, config),
        "over_copy": ratio(ours.seconds, copy.seconds)._asdict(),
        "over_plain": ratio(ours.seconds, plain.seconds)._asdict(),
    }


def _speeds(lap: Laps, config: CodecConfig) -> dict[str, Any]:
    """GB of float32 per second, by the clock and by the time that the processor gave."""
    amount = 4e-9 * config.numel
    return {
        "gb_per_s": spread([amount / s for s in lap.seconds])._asdict(),
        "gb_per_cpu_s": spread([amount / s for s in lap.cpu_seconds])._asdict(),
    }


def render_codecs(figures: dict[str, Any], config: CodecConfig) -> str:
    """The figures as a table."""
    title = f"{config.numel} float32 values on one thread: {config.turns}"
    rows: list[tuple[str, ...]] = [
        ("op", "GB/s", "GB per CPU second", "time over a copy", "time over plain")
    ]
    for found in [{"name": "copy", **figures["copy"]}, *figures["ops"]]:
        speeds = [between(found[key], ".2f") for key in ("gb_per_s", "gb_per_cpu_s")]
        ratios = [found.get(key) for key in ("over_copy", "over_plain")]
        over = [between(found, ".2f") if found else "" for found in ratios]
        rows.append((found["name"], *speeds, *over))
    note = "plain: one expression with a temporary per op; decode_mean: of one coded part and one\n"
    return table(title, rows) + "\n\n" + note + "that is not. Bytes are those of the values."


def _run(config: CodecConfig, ranks: int) -> dict:
    return on_ranks(measure_codecs, ranks, config)


BENCH = (
    "codecs: speed of encoding, decoding and means, against plain forms and a copy in memory",
    codecs_config_of,
    _run,
    render_codecs,
)
