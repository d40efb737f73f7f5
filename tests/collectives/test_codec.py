"""Codecs: each byte and each value against a slow twin in plain Python numbers."""

import math
import struct
from collections.abc import Sequence

import pytest
import torch
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from mics_fn.collectives import Codec
from mics_fn.collectives import codec as coding
from mics_fn.errors import LeafError, PlanError

LARGEST = float(torch.finfo(torch.float32).max)
NAMES = ("int8", "int4", "fp8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FORMS = [(name, block) for name in NAMES for block in (4, 8, 64, 0)]
codecs = st.sampled_from([Codec(*form) for form in FORMS])
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows = st.lists(floats | st.sampled_from([0.0, -0.0, LARGEST, -LARGEST, 1e-45]), max_size=200)


# The twin: one number at a time, in float64, where all of these quotients and products are exact
# or nearly so


def bfloat16(x: float) -> float:
    """The nearest bfloat16, of a tie the even one, from the bits of a float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", bits >> 16 << 16))[0]


def float32(x: float) -> float:
    """The nearest float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def scale_of(codec: Codec, block: Sequence[float]) -> float:
    top = {"int8": 127, "int4": 7, "fp8": 448}[codec.name]
    return bfloat16(max(2.0**-126, float32(max(map(abs, block))) * float32(1 / top)))


def float8s() -> list[float]:
    """All that e4m3 has from 0 up, from its definition."""
    small = [m / 8 * 2.0**-6 for m in range(8)]
    large = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return [*small, *large][:-1]  # the last one is NaN


def bound(codec: Codec, x: float, scale: float) -> float:
    """How far a decoded value may be from what was coded, as the docstring of `Codec` says."""
    if codec.name == "fp8":
        return max(abs(x) / 16, scale * 2.0**-10) * (1 + 2.0**-20)
    return scale * (0.5 + 2.0**-15)


def blocks_of(codec: Codec, row: Sequence[float]) -> list[list[float]]:
    return [list(row[i : i + codec.block]) for i in range(0, len(row), codec.block)]


def decoded_by_hand(codec: Codec, codes: bytes, n: int) -> list[float]:
    """From the description of the bytes alone."""
    whole = -(-n // codec.block) * codec.block
    start = whole // 2 if codec.name == "int4" else whole
    values = []
    for i in range(n):
        at = start + 2 * (i // codec.block)
        (scale,) = struct.unpack("<f", b"\0\0" + codes[at : at + 2])
        if codec.name == "int4":
            code = (codes[i // 2] >> 4 * (i % 2) & 15) - 8
        elif codec.name == "int8":
            code = codes[i] - 256 * (codes[i] > 127)
        else:
            code = math.copysign(float8s()[codes[i] & 127], 0.5 - (codes[i] > 127))
        values.append(code * scale)
    return values


def as_tensor(row: Sequence[float]) -> Tensor:
    return torch.tensor(row, dtype=torch.float32)


def decode(codec: Codec, codes: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return codec.decode(codes, n, dtype)


def mean_of(codec: Codec, parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """The mean of values and of codes, written to `out`."""
    codec.decode_row([codec.blocks_of(part, len(out)) for part in parts], out)
    return out


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, but any NaN equals any other."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0), b.nan_to_num(0))


@examples(30, 100)
@given(codecs, rows)
def test_what_is_decoded_is_as_near_as_promised_and_codes_stay(codec: Codec, row: list[float]):
    n, codes = len(row), codec.encode(as_tensor(row))
    assert codes.shape == (codec.nbytes(n),)
    found = decode(codec, codes, n)
    assert found.tolist() == decoded_by_hand(codec, bytes(codes.tolist()), n)
    for i, block in enumerate(blocks_of(codec, row)):
        scale = scale_of(codec, block)
        begin = i * (codec.block)
        for x, y in zip(block, found[begin : begin + len(block)].tolist(), strict=True):
            assert abs(x - y) <= bound(codec, x, scale), (x, y, scale)
            assert y == 0 or x != 0
    assert torch.equal(codec.encode(found), codes)


@examples(20, 60)
@given(codecs, rows, st.data())
def test_a_block_that_is_not_finite_is_nan_and_no_other_notices(codec, row, data):
    if not row:
        return
    place = data.draw(st.integers(0, len(row) - 1))
    clean = decode(codec, codec.encode(as_tensor(row)), len(row))
    row[place] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    codes = codec.encode(as_tensor(row))
    found = decode(codec, codes, len(row))
    size = codec.block
    first = place // size * size
    assert found[first : first + size].isnan().all()
    clean[first : first + size] = math.nan
    assert same(found, clean)
    assert torch.equal(codec.encode(found), codes)
    for dtype in DTYPES:
        assert decode(codec, codes, len(row), dtype)[first : first + size].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_every_rounding_of_a_scale_leaves_the_largest_value_its_code(name: str):
    """See [Note: no clamp]: the ends of all intervals that round to one bfloat16, at all powers."""
    codec, top = Codec(name, 4), coding.KINDS[name].top
    mantissas = torch.arange(2**16, 2**17, dtype=torch.float64) / 2**16
    powers = torch.tensor([-125, -124, -1, 0, 1, 15, 120], dtype=torch.float64)
    largest = (mantissas * top).unsqueeze(1).mul(2.0**powers).flatten().to(torch.float32)
    largest = largest[largest.isfinite()]
    rows = functional.pad(largest.unsqueeze(1), (0, 3)).flatten()
    codes = codec.encode(rows)
    first = {"int8": 127, "int4": 15 + 8 * 16, "fp8": 126}[name]
    assert codec.blocks(codes, len(rows))[0][:, 0].unique().tolist() == [first]
    assert torch.equal(codec.encode(decode(codec, codes, len(rows))), codes)


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_values_of_a_dtype_stay_finite(name: str, dtype: torch.dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, largest * 0.996, 0], dtype=dtype)
    codec = Codec(name)
    codes = codec.encode(x)
    assert decode(codec, codes, 4, dtype).isfinite().all()
    if dtype == torch.float16:  # a sum in float32 has no room above the others
        mean = mean_of(codec, [codes, codes], torch.empty(4, dtype=dtype))
        assert mean.isfinite().all()


def test_what_a_dtype_cannot_hold_is_infinite_or_nan_in_its_block():
    codec = Codec("int8", 4)
    codes = codec.encode(torch.tensor([1e6, -1e6, 1e6, 0, 1.0]))
    found = decode(codec, codes, 5, torch.float16).tolist()
    assert found == [math.inf, -math.inf, math.inf, 0, 1]
    x = torch.tensor([1e39, 1.0, 2.0, 4.0, 2.0, 4.0], dtype=torch.float64)
    found = decode(codec, codec.encode(x), 6)
    assert found[:4].isnan().all()
    assert (found[4:] - x[4:]).abs().max() <= bound(codec, 4, scale_of(codec, [4]))
    # A sum beyond float32 is infinite although the mean is not.
    codes = codec.encode(torch.full((4,), 3e38))
    assert decode(codec, codes, 4).isfinite().all()
    assert mean_of(codec, [codes, codes], torch.empty(4)).isinf().all()


# Shapes: pieces, batches, strides


SHAPES = [(5,), (0, 4), (4, 0), (3, 7), (2, 3, 1001), (300, 257), (2, 65541)]


@pytest.mark.parametrize("form", [("int8", 256), ("int4", 64), ("int4", 4), ("fp8", 65536)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bands_are_the_same_as_one_expression(
    form: tuple[str, int], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    codec, n = Codec(*form), shape[-1]
    torch.manual_seed(0)
    for dtype in DTYPES:
        x = (torch.randn(shape) * torch.randn(shape).exp()).to(dtype)
        found = []
        for band in (2**10, 2**30):
            monkeypatch.setattr(coding, "BAND", band)
            codes = codec.encode(x)
            found.append((codes, decode(codec, codes, n, dtype)))
        (codes, values), other = found
        assert codes.shape == (*shape[:-1], codec.nbytes(n))
        assert values.shape == shape
        assert torch.equal(codes, other[0])
        assert torch.equal(values, other[1])


# Means


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mean_adds_in_the_order_of_its_parts(name: str, dtype: torch.dtype):
    codec, n = Codec(name, 8), 66_001
    torch.manual_seed(0)
    x, y, own = (torch.randn(n).to(dtype) for _ in range(3))
    codes = codec.encode(x), codec.encode(y)
    wide = torch.promote_types(dtype, torch.float32)
    terms = [own, *(decode(codec, c, n) for c in codes)]
    expected = (terms[0].to(wide) + terms[1].to(wide) + terms[2].to(wide)) / 3
    found = mean_of(codec, [own, *codes], torch.empty(n, dtype=dtype))
    assert torch.equal(found, expected.to(dtype))
    expected = (terms[1].to(wide) + terms[0].to(wide) + terms[2]) / 3
    mean_of(codec, [codes[0], own, codes[1]], own)  # into the part itself
    assert torch.equal(own, expected.to(dtype))


# Values with a text


@examples(30, 100)
@given(codecs, st.integers(0, 10_000))
def test_a_text_is_read_back_and_bytes_are_by_formula(codec: Codec, n: int):
    assert Codec.parse(str(codec)) == codec
    assert Codec.parse(f" {codec.name} [ {codec.block} ] ") == codec
    bits = {"int8": 8, "int4": 4, "fp8": 8}[codec.name]
    assert codec.nbytes(n) == math.ceil(n / codec.block) * (codec.block * bits // 8 + 2)


def test_the_usual_block_is_written_out():
    assert [str(Codec(name)) for name in NAMES] == ["int8[256]", "int4[64]", "fp8[256]"]


@pytest.mark.parametrize(
    "text",
    ["int7", "int8[2]", "int8[6]", "int8[0]", "int8[131072]", "int8[]", "int8[8]x", "int8[２]", ""],
)
def test_what_is_no_codec_is_refused_with_a_mend(text: str):
    with pytest.raises(PlanError, match=r"(?s)Codec.*fix: "):
        Codec.parse(text)


def test_derivatives_are_refused_and_none_is_wrong():
    codec, x = Codec("int8", 4), torch.ones(8)

    def through(v: Tensor) -> Tensor:
        return codec.decode(codec.encode(v), 8, torch.float32).sum()

    for call in (
        lambda: codec.encode(x.clone().requires_grad_()),
        lambda: grad(through)(x),
        lambda: vmap(codec.encode)(x.view(2, 4)),
    ):
        with pytest.raises(LeafError, match="no derivative"):
            call()
    with torch.no_grad():
        codec.encode(x.clone().requires_grad_())


# A device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_cuda_device_gives_the_values_of_the_cpu(form: tuple[str, int]):
    codec, n = Codec(*form), 70_001
    x, own = torch.randn(2, n), torch.randn(2, n)
    codes = codec.encode(x)
    far = codec.encode(x.cuda())
    for here, there in zip(codes, far, strict=True):
        assert torch.equal(codec.blocks(there, n)[1].cpu(), codec.blocks(here, n)[1])
    assert (far.cpu() != codes).sum() <= 2  # quotients that lie halfway
    assert torch.equal(codec.decode(codes.cuda(), n, torch.float32).cpu(), decode(codec, codes, n))
    found = mean_of(codec, [own[0].cuda(), codes[0].cuda()], torch.empty_like(own[0].cuda()))
    assert torch.equal(found.cpu(), mean_of(codec, [own[0], codes[0]], torch.empty_like(own[0])))
