"""Flat buckets as arithmetic: formats of leaves, where each lies, and which part a chunk holds.

[Note: flat buckets] The leaves of a bucket lie in one padded 1D buffer of `numel` elements, which
is cut into `parts` equal, contiguous chunks. Each rank of a partition group keeps one of them; the
route of its groups says which. A leaf's local piece is the part of its range that lies in the
chunk, and may be empty. A gather is then an all-gather whose output *is* the parameters, as views.
A `Bucket` does not depend on the rank that holds it, so structures compare across ranks.

Padding lies between leaves and behind them. It is never part of a leaf, so it never reaches a
result, but it is kept and sent as elements of leaves are. A leaf begins at a multiple of 16 bytes
in each dtype in which it travels, and of the longest block of the codes that it is kept or sent as,
which is a power of two. The buffer ends at `parts` times such a multiple. So a leaf of 5 elements
takes 8 in float32, and 256 with `hop2=int8[256]`: long blocks suit large leaves.

[Note: whole leaves] What an optimizer does to a matrix may need all of it. With `whole=` of `shard`
leaves are dealt to the chunks of their bucket, the longest first, each to the emptiest. So each
lies on one rank, which steps it without a message to others; gathers, hops, schedules and
checkpoints see nothing but other offsets. Chunks have one length, and what the shorter ones lack is
padding. A bucket is closed at the last leaf within `bucket_bytes` up to which at most `WASTE` of
the leaves' elements are padding; it goes beyond where there is none.

A `Precision` gives leaves their formats, by path. A pattern of it that matches no leaf is an error.
A tied leaf goes by the path of the one that it is tied to, integers are replicated as they are, and
frozen leaves have no gradients and no moments: a field that says something else about these has no
effect.
"""

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from heapq import heapreplace
from itertools import accumulate, chain
from math import prod
from typing import Any, NamedTuple, cast

import torch

from mics_fn import checks
from mics_fn.collectives import SHORT_NAMES, Codec, Wire
from mics_fn.errors import PlanError
from mics_fn.tree import digest, natural

BUCKET_BYTES = 25 * 2**20
ALIGN_BYTES = 16  # for vector loads and NCCL; the size of most leaves is a multiple of it anyway


@dataclass(frozen=True)
class Formats:
    """The dtypes and codes that a leaf is kept, computed and sent in.

    Args:
      dtype: of the shards.
      compute: dtype of the full leaf, in which a gather sends it; default `dtype`.
      reduce: dtype in which gradients travel; default `dtype`.
      accumulate: dtype of their sum over micro-steps; default `reduce`, but at least float32.
      gather: what travels in gathers; None means values in `compute`.
      hop1: what travels in hop 1; None means values in `reduce`.
      hop2: what travels in hop 2, or in which dtype; None means values in `reduce`.
      state: the codes that moments are kept as; None means values in `dtype`.
      codes: the codes that a leaf is kept as, which gathers send; None means values. Such leaves
        are frozen, and float32 is their dtype: it holds what codes stand for.
    """

    dtype: torch.dtype
    compute: torch.dtype = None  # pyright: ignore[reportAssignmentType]
    reduce: torch.dtype = None  # pyright: ignore[reportAssignmentType]
    accumulate: torch.dtype = None  # pyright: ignore[reportAssignmentType]
    gather: Wire | None = None
    hop1: Wire | None = None
    hop2: Codec | torch.dtype | None = None
    state: Codec | None = None
    codes: Codec | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "compute", self.compute or self.dtype)
        put(self, "reduce", self.reduce or self.dtype)
        least = torch.promote_types(self.reduce, torch.float32)
        put(self, "accumulate", self.accumulate or least)

    @property
    def align(self) -> int:
        """Elements that leaves are aligned to, of which all others are divisors.

        In a block of codes the largest element sets the scale, so no block has parts of two leaves.
        """
        least = min(self.dtype.itemsize, self.compute.itemsize, self.reduce.itemsize)
        coded = (self.gather, self.hop1, self.hop2, self.state, self.codes)
        blocks = [x.block for x in coded if isinstance(x, Wire | Codec)]
        return max(1, ALIGN_BYTES // least, *blocks)

    @property
    def formats(self) -> "Formats":
        """These alone, also of a bucket."""
        return Formats(*(getattr(self, field.name) for field in fields(Formats)))

    def __str__(self) -> str:
        """The dtype, and what differs from it."""
        found = {field.name: getattr(self, field.name) for field in fields(Formats)}
        own = found.pop("dtype")
        others = [f"{n}={_text(x)}" for n, x in found.items() if x not in (own, None)]
        return ", ".join([_text(own), *others])


def _text(value: Any) -> str:
    return SHORT_NAMES.get(value, f"{value}")


_BUCKETS: weakref.WeakValueDictionary[tuple, "Bucket"] = weakref.WeakValueDictionary()


class _Unique(type):
    """Makes equal buckets one object, so that comparing them is comparing identities."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        return _BUCKETS.setdefault(tuple(made.facts().values()), made)


@dataclass(frozen=True, eq=False, kw_only=True)
class Bucket(Formats, metaclass=_Unique):
    """Leaves that travel in one collective, all of the same formats.

    Args:
      index: its number among the buckets of its tree.
      parts: number of chunks, which is the size p of the partition group.
      shapes: the leaves' full shapes, in the order in which they lie in the buffer.
      offsets: where each leaf begins, in elements.
      numel: length of the buffer in elements, padding included; a multiple of `parts`.
      trainable: whether its leaves get gradients.
      names: some of the leaves' paths and a digest of all, so that trees of one layout differ.
      whole: whether each leaf lies in one chunk; see [Note: whole leaves].
      cut: for each leaf the dim along which it is a part of a larger one; () for copies. See [Note:
        models in parts] in `groups.groups`.
    """

    index: int
    parts: int
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int
    trainable: bool = True
    names: str = ""
    whole: bool = False
    cut: tuple[int, ...] = ()

    __hash__ = object.__hash__
    __eq__ = object.__eq__  # pyright: ignore[reportAssignmentType]

    def facts(self) -> dict[str, Any]:
        """Its fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __reduce__(self) -> tuple:
        return partial(Bucket, **self.facts()), ()

    @cached_property
    def chunk(self) -> int:
        """Elements of each rank's chunk, padding included."""
        return self.numel // self.parts

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the gathered buffer, padding included."""
        return self.numel * self.compute.itemsize

    @cached_property
    def exact(self) -> "Bucket":
        """This bucket with `compute` and `reduce` set to its own dtype, so that nothing rounds."""
        sent = {"gather": None, "hop1": None, "hop2": None}
        return replace(self, compute=self.dtype, reduce=self.dtype, **sent)

    @cached_property
    def uncoded(self) -> "Bucket":
        """This bucket, which sends values in the place of codes, in the dtypes that it has."""
        hop2 = None if isinstance(self.hop2, Codec) else self.hop2
        return replace(self, gather=None, hop1=None, hop2=hop2)

    @cached_property
    def hop2_format(self) -> torch.dtype | Codec:
        """What hop 2 sends: values in a dtype, or codes."""
        return self.hop2 or self.reduce

    @cached_property
    def gather_wire(self) -> Wire | None:
        """What a gather sends in the place of values: the codes that leaves are kept as, if any."""
        return self.gather if self.codes is None else Wire(self.codes)

    @cached_property
    def _title(self) -> str:
        layout = short_digest(map(str, self.facts().values()))
        return f"bucket {self.index} ({self.names}; layout {layout})"

    def __str__(self) -> str:
        """What ranks compare before they move it."""
        return self._title

    @cached_property
    def title(self) -> str:
        """Its number, its first leaf and how many there are, as `inspection.watch` shows it."""
        first = self.names.partition(", ")[0]
        more = " ..." if ", " in self.names else ""
        count = f" ({len(self.shapes)} leaves)" if len(self.shapes) > 1 else ""
        return f"bucket {self.index}: {first}{more}{count}"

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each leaf."""
        return tuple(prod(shape) for shape in self.shapes)


def short_digest(texts: Iterable[str]) -> str:
    """Eight hex digits of a digest of these texts."""
    return digest(texts).hex()[:8]


# Ranges of elements: the part of a bucket that a chunk holds of each leaf, and padding.


class Piece(NamedTuple):
    """What one chunk holds of one leaf; lengths in elements."""

    start: int  # in the chunk
    length: int
    origin: int  # in the flattened leaf


@lru_cache(maxsize=4096)
def pieces(bucket: Bucket, chunk: int) -> tuple[Piece, ...]:
    """What chunk number `chunk` holds of each leaf of the bucket; length 0 if it holds nothing.

    >>> how = {"shapes": ((6,),), "offsets": (0,), "numel": 8}
    >>> bucket = Bucket(torch.float32, index=0, parts=2, **how)
    >>> pieces(bucket, 0), pieces(bucket, 1)
    ((Piece(start=0, length=4, origin=0),), (Piece(start=0, length=2, origin=4),))
    """
    low, high = chunk * bucket.chunk, (chunk + 1) * bucket.chunk
    found = []
    for offset, numel in zip(bucket.offsets, bucket.numels, strict=True):
        start, stop = max(low, offset), min(high, offset + numel)
        if start < stop:
            found.append(Piece(start - low, stop - start, start - offset))
        else:
            found.append(Piece(0, 0, 0))
    return tuple(found)


# Which leaves share a bucket, and where in it each of them lies.


class LeafSpec(NamedTuple):
    """What `plan_buckets` needs to know about a leaf."""

    path: str
    shape: tuple[int, ...]
    formats: Formats
    parts: int
    trainable: bool = True
    group: Hashable = None  # leaves of different groups never share a bucket
    whole: bool = False  # whether one chunk must hold all of it
    cut: int | None = None  # the dim along which it is a part of a larger one


WASTE = 0.05  # padding of buckets of whole leaves, relative to their elements


def plan_buckets(
    leaves: Sequence[LeafSpec],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    order: Callable[[str], object] | None = None,
    bucket: Callable[[str], object] | None = None,
) -> list[tuple[Bucket, int]]:
    """Decide which leaves share a bucket, and where each of them lies in it.

    Args:
      leaves: the leaves, in tree order.
      bucket_bytes: a bucket is closed before it would grow past this size. A leaf that is larger
        gets a bucket of its own.
      order: sort key of a path. By default numbers in paths compare as numbers, so that `layers.2`
        comes before `layers.10`.
      bucket: key of a path. Of leaves that could share a bucket, neighbours share one only if their
        keys are equal. By default all are.

    Returns:
      For each leaf its bucket and its slot in that bucket.

    Example:
      >>> spec = LeafSpec("w", (3, 2), Formats(torch.float32), 2)
      >>> [(bucket, slot)] = plan_buckets([spec])
      >>> bucket.numel, bucket.chunk, slot
      (8, 4, 0)
    """
    keys: list[Any] = [(order or natural)(leaf.path) for leaf in leaves]
    ranked = sorted(range(len(leaves)), key=lambda i: (keys[i], i))
    last: dict[Hashable, tuple[list[int], int, object]] = {}  # members, bytes and key, by kind
    every: list[list[int]] = []
    for i in ranked:
        leaf = leaves[i]
        kind = (leaf.formats, leaf.parts, leaf.trainable, leaf.group, leaf.whole)
        own = None if bucket is None else bucket(leaf.path)
        members, nbytes, key = last.get(kind, ([], 0, own))
        size = prod(leaf.shape) * leaf.formats.dtype.itemsize
        if not members or key != own or (nbytes + size > bucket_bytes and not leaf.whole):
            members, nbytes = [], 0
            every.append(members)
        members.append(i)
        last[kind] = members, nbytes + size, own
    numbers = {i: number for number, i in enumerate(ranked)}
    closed = [each for members in every for each in _closed(members, leaves, bucket_bytes)]
    closed.sort(key=lambda members: numbers[members[0]])
    found: dict[int, tuple[Bucket, int]] = {}
    for index, members in enumerate(closed):
        made, placed = _bucket_from(index, [leaves[i] for i in members])
        found.update({members[k]: (made, slot) for slot, k in enumerate(placed)})
    return [found[i] for i in range(len(leaves))]


def _closed(members: list[int], leaves: Sequence[LeafSpec], bucket_bytes: int) -> list[list[int]]:
    """Cut leaves of one kind into buckets; see [Note: whole leaves]."""
    first, done, near, fit = leaves[members[0]], list[list[int]](), list[int](), 0
    if not first.whole:  # they are cut already
        return [members]
    most, waiting, size = bucket_bytes // first.formats.dtype.itemsize, deque(members), 0
    while waiting:
        size += prod(leaves[waiting[0]].shape)
        if fit and size > most:
            done.append(near[:fit])
            waiting.extendleft(reversed(near[fit:]))
            near, fit, size = [], 0, 0
        else:
            near.append(waiting.popleft())
            fit = len(near) if _waste(leaves, near) <= WASTE else fit  # where it may end
    for k in range(len(done), -1, -1):  # what is left may have to join the buckets before it
        joined = [*chain.from_iterable(done[k:]), *near]
        if _waste(leaves, joined) <= WASTE:
            return [*done[:k], joined]
    return [*done, near]


def _waste(leaves: Sequence[LeafSpec], members: Sequence[int]) -> float:
    """The padding of a bucket of these leaves, relative to their elements."""
    own = [leaves[i] for i in members]
    return _dealt(own)[2] / max(1, sum(prod(leaf.shape) for leaf in own)) - 1


def _dealt(leaves: Sequence[LeafSpec]) -> tuple[list[int], list[int], int]:
    """The order in which leaves of a bucket lie, the offset of each, and the bucket's length."""
    first, align = leaves[0], leaves[0].formats.align
    lengths = [-(-prod(leaf.shape) // align) * align for leaf in leaves]
    if not first.whole:
        ends, unit = [0, *accumulate(lengths)], first.parts * align
        return list(range(len(leaves))), ends[:-1], -(-ends[-1] // unit) * unit
    # Of leaves of one length those that cost most come first: work on (m, n) is about m * m * n.
    costs = [prod(leaf.shape) * min(leaf.shape[-2:], default=0) for leaf in leaves]
    chunks: list[list[int]] = [[] for _ in range(first.parts)]
    emptiest = [(0, 0, k) for k in range(first.parts)]  # a heap of lengths, costs and chunks
    for i in sorted(range(len(leaves)), key=lambda i: (-lengths[i], -costs[i], i)):
        length, cost, k = emptiest[0]
        chunks[k].append(i)
        heapreplace(emptiest, (length + lengths[i], cost + costs[i], k))
    chunk, order, offsets = max(emptiest)[0], list[int](), list[int]()
    for k, mine in enumerate(chunks):
        starts = [0, *accumulate(lengths[i] for i in mine)]
        offsets += [k * chunk + start for start in starts[:-1]]
        order += mine
    return order, offsets, chunk * first.parts


def _bucket_from(index: int, given: Sequence[LeafSpec]) -> tuple[Bucket, list[int]]:
    """A bucket of these leaves, and the order in which they lie in it."""
    (order, offsets, numel), first = _dealt(given), given[0]
    leaves = [given[i] for i in order]
    made = Bucket(
        index=index,
        parts=first.parts,
        shapes=tuple(leaf.shape for leaf in leaves),
        offsets=tuple(offsets),
        numel=numel,
        trainable=first.trainable,
        names=_named([leaf.path for leaf in leaves]),
        whole=first.whole,
        cut=() if first.cut is None else tuple(cast(int, leaf.cut) for leaf in leaves),
        **vars(first.formats),
    )
    return made, order


def companion(
    bucket: Bucket, dtype: torch.dtype, name: str, shapes: Mapping[int, tuple[int, ...]]
) -> Bucket:
    """A bucket of other tensors, each on the rank that has the whole leaf of the same slot.

    Args:
      bucket: of whole leaves.
      dtype: of the new one.
      name: what they are.
      shapes: by slot; other leaves have nothing.
    """
    formats = Formats(dtype)
    ends, places = [0] * bucket.parts, list[tuple[int, int]]()
    every = tuple(shapes.get(slot, (0,)) for slot in range(len(bucket.shapes)))
    for shape, offset in zip(every, bucket.offsets, strict=True):
        owner = offset // bucket.chunk
        places.append((owner, ends[owner]))
        ends[owner] += -(-prod(shape) // formats.align) * formats.align
    chunk = max(ends)
    offsets = [owner * chunk + start for owner, start in places]
    own = {"shapes": every, "offsets": tuple(offsets), "numel": chunk * bucket.parts}
    own |= {"names": f"{name} of {bucket.names}", "index": bucket.index, "parts": bucket.parts}
    return Bucket(**vars(formats), **own, whole=True)


def _named(paths: Sequence[str]) -> str:
    """Paths of leaves as a short text, different for different paths.

    >>> _named(["w"]), _named(["a", "b", "c"])
    ('w', 'a, b, ..., paths 13e22856')
    """
    if len(paths) < 3:
        return ", ".join(paths)
    return f"{paths[0]}, {paths[1]}, ..., paths {short_digest(paths)}"


# The fields of a `Precision`, and what each of them may be.

NAMES = {
    **{name: dtype for dtype, name in SHORT_NAMES.items()},
    **{f"{dtype}".removeprefix("torch."): dtype for dtype in SHORT_NAMES},
    **{"fp32": torch.float32, "fp64": torch.float64},
    **{"fp16": torch.float16, "half": torch.float16},
}
FIELDS = ("param", "compute", "reduce", "output", "accumulate", "gather", "hop1", "hop2", "state")
_CODED = ("param", "gather", "hop1", "hop2", "state")  # a dtype or a codec
_LEVELED = ("gather", "hop1")  # a codec may name a level
# Lines of a column, and parts of files, have whole blocks of moments.
_STATE_BLOCKS = range(64, 4097)
CODED_NUMEL = 4096  # elements of a tensor from which on its moments are coded


def read_field(name: str, given: Any) -> torch.dtype | Codec | Wire:
    """A field of a precision, from its value or its text.

    Raises:
      PlanError: it is not what this field may be, nor a text of that.
    """
    value: Any = given
    level = ""
    if isinstance(given, str):
        text, at, level = given.removeprefix("torch.").partition("@")
        value = NAMES.get(text, given)
        if value is given and name in _CODED:
            value = Codec.parse(text)
        if at and not (name in _LEVELED and isinstance(value, Codec) and level.isidentifier()):
            fix = "codecs of gather and hop1 may name a level behind @, as in int8[256]@node"
            raise PlanError(f"Precision: {name}={given}: it has no such level", fix=fix)
    if name == "state" and value != torch.float32:
        if isinstance(value, Codec) and value.name == "int8" and value.block in _STATE_BLOCKS:
            return value
        fix = "use int8, as in state=int8[256], with a block of 64 to 4096 elements; or f32"
        raise PlanError(f"Precision: state={_text(value)} is not a way to keep moments", fix=fix)
    if isinstance(value, Codec) and name in _CODED:
        return Wire(value, level) if name in _LEVELED else value
    if not (isinstance(value, Wire) and name in _LEVELED):
        check_dtype("Precision", name, value)
    return value


def check_dtype(verb: str, name: str, dtype: Any) -> None:
    """Raise PlanError unless a value is one of the dtypes that parameters can have here."""
    if not isinstance(dtype, torch.dtype) or dtype not in SHORT_NAMES:
        fix = f"pass one of {', '.join(map(str, SHORT_NAMES))}"
        raise PlanError(f"{verb}: {name}={dtype!r} is not a float dtype of torch", fix=fix)


@dataclass(frozen=True)
class Precision:
    """The dtypes of training, and what travels. `str` gives a canonical text, which `parse` reads.

    `shard` writes them into the layout of the shards, and every verb follows it. Shards in bfloat16
    are rounded to nearest in an update, without stochastic rounding or Kahan summation: torch has
    neither, and torchao's rounding is private and compiles each parameter.

    Args:
      param: dtype of shards and of the optimizer's state; None means that of each tensor. For
        frozen leaves it may be a `Codec`, such as "int4[64]": they are kept as codes, sent as these
        codes, and decoded in `compute` (None means the dtype of each tensor) where they are
        gathered. Their shards count as float32, which holds exactly what codes stand for.
      compute: dtype of gathered parameters, which are cast before they are sent, and of a model's
        inputs; None means `param`.
      reduce: dtype of gradients in hop 1 and hop 2; None means `param`.
      output: dtype of what a model returns; None leaves it as it is.
      accumulate: dtype of the sum of gradients over micro-steps; None means the wider of float32
        and `reduce`.
      overrides: pairs of a pattern and a `Precision`. The fields that this one sets replace those
        above for leaves whose whole path matches; if several patterns match, the last one counts.
        Patterns are those of `mics_fn.checks`: `*` stands for any characters and `?` for one.
        `shard` refuses a pattern that matches no leaf.
      gather: what a gather sends: a `Codec` such as "int8[256]"; None, or that dtype, means
        `compute`. With "@node" behind it, it is sent on the level "node" and on those outside of
        it, and `compute` on the others. Every rank uses what was decoded, its own chunk too.
      hop1: what hop 1 sends, in the same way; None means `reduce`, and another dtype is that of
        hop 1 alone. A rank's own part of a mean is not rounded.
      hop2: what hop 2 sends, a dtype or a `Codec`; None means `reduce`. It has no levels.
      state: how moments of an optimizer are kept: a `Codec` "int8", whose blocks have 64 to 4096
        elements, or float32; None means values in `param`. It needs shards in float32, and leaves
        with at least 4,096 elements in full; those of others stay values. An element whose
        gradients are below about 1/127 of the largest of its block takes smaller steps than without
        codes. See [Note: coded moments] in `optim.flat`, and [Note: roots] in `offload.placed`.

    Leaves are padded to the longest of the blocks of their codecs.

    Codes are sent only between ranks. Derivatives of derivatives, forward-mode tangents, values
    under `vmap`, and what `unshard`, `get`, `checkpoint` and `sync_replicas(exact=True)` send are
    never coded; nor are the parameters that `replicas.local_sgd` averages.

    Raises:
      PlanError: a dtype is not float32, bfloat16, float16 or float64; an override sets no field, or
        one that a leaf does not have; a codec is unknown, or hop 2 names a level; moments cannot be
        kept as `state` says.

    Example:
      >>> precision = Precision.parse("param=f32, compute=bf16; *norm*: compute=f32")
      >>> precision.formats("h.0.norm.weight", torch.float32).compute
      torch.float32
    """

    param: torch.dtype | Codec | str | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    overrides: tuple[tuple[str, "Precision"], ...] = ()  # any iterable of pairs is taken
    gather: torch.dtype | Codec | Wire | str | None = None
    hop1: torch.dtype | Codec | Wire | str | None = None
    hop2: torch.dtype | Codec | str | None = None
    state: torch.dtype | Codec | str | None = None

    def __post_init__(self) -> None:
        for name, value in self._fields():
            object.__setattr__(self, name, read_field(name, value))
        object.__setattr__(self, "overrides", tuple(self.overrides))
        for pattern, own in self.overrides:
            if not own._fields() or own.overrides or own.output:
                fix = f"set some of {', '.join(name for name in FIELDS if name != 'output')}"
                raise PlanError(f"Precision: the override {pattern!r} sets no field", fix=fix)

    @classmethod
    def parse(cls, value: "Precision | str | None") -> "Precision":
        """Read the text form; `parse(str(precision))` equals `precision`. None is the default.

        A text is `field=dtype, ...`, followed by `; pattern: field=dtype, ...` for each override. A
        dtype without a field means `compute`. The fields `param`, `gather`, `hop1`, `hop2` and
        `state` take codecs too, as in `hop1=int8[256]@node`.

        Raises:
          PlanError: a clause does not give a dtype for a field, or gives two for the same one.
        """
        if isinstance(value, Precision):
            return value
        base, overrides = dict[str, Any](), list[tuple[str, Precision]]()
        for number, clause in enumerate(filter(None, map(str.strip, (value or "").split(";")))):
            pattern, colon, fields = clause.rpartition(":")
            if colon:
                overrides.append((pattern.strip(), cls(**_read(clause, fields))))
            elif number:
                fix = "write overrides as in '*norm*: compute=f32', after the rest"
                raise PlanError(f"Precision.parse: no pattern in {clause!r}", fix=fix)
            else:
                base = _read(clause, fields)
        return cls(**base, overrides=tuple(overrides))

    def __str__(self) -> str:
        own = ",".join(f"{name}={_text(value)}" for name, value in self._fields())
        parts = [own] if own else []
        return "; ".join([*parts, *(f"{p}: {precision}" for p, precision in self.overrides)])

    def _fields(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in FIELDS if getattr(self, name) is not None]

    def at(self, path: str) -> "Precision":
        """The precision of one leaf, without overrides."""
        found = dict(self._fields())
        for pattern, precision in self.overrides:
            if checks.matches(pattern, path):
                found.update(precision._fields())
        return Precision(**found)

    def formats(
        self, path: str, own: torch.dtype, numel: int = CODED_NUMEL, trained: bool = True
    ) -> Formats:
        """The formats of a leaf of this dtype; if it is not a float tensor all are its own.

        Args:
          path: its path.
          own: its dtype.
          numel: its elements.
          trained: whether it has moments.

        Raises:
          PlanError: a gather would send another dtype than that of computation, or moments would be
            codes of shards that are not in float32.
        """
        if not own.is_floating_point:
            return Formats(own, own, own, own)
        here = self.at(path) if self.overrides else self
        if isinstance(here.param, Codec):  # the dtype of what codes stand for, and no gradients
            return Formats(torch.float32, here.compute or own, codes=here.param)
        param: Any = here.param or own
        gather, hop1, hop2, reduce = here.gather, here.hop1, here.hop2, here.reduce or param
        compute = here.compute or param
        if isinstance(hop1, torch.dtype):  # what gradients are packed in
            reduce, hop1, hop2 = hop1, None, hop2 or reduce
        if isinstance(gather, torch.dtype) and gather != compute:
            text = f"Precision: gather={_text(gather)} for {path}, which is computed in {compute}"
            raise PlanError(text, fix="set compute to it, or send codes, as in gather=int8[256]")
        is_coded = trained and isinstance(here.state, Codec) and numel >= CODED_NUMEL
        if is_coded and param != torch.float32:
            text = f"Precision: state={here.state} for {path}, whose shards are {param}"
            fix = "give it param=f32, or write state=f32 for it behind a pattern"
            raise PlanError(text, fix=fix)
        sent: Any = {"hop1": hop1, "hop2": None if hop2 == reduce else hop2}
        sent["gather"] = None if gather == compute else gather
        sent["state"] = here.state if is_coded else None
        return Formats(param, compute, reduce, here.accumulate, **sent)  # pyright: ignore

    @property
    def patterns(self) -> list[str]:
        """The patterns of its overrides."""
        return [pattern for pattern, _ in self.overrides]

    @property
    def inputs(self) -> torch.dtype | None:
        """The dtype that inputs of a model are cast to; None leaves them as they are."""
        return self.compute or (None if isinstance(self.param, Codec) else self.param)  # pyright: ignore


def _read(clause: str, fields: str) -> dict[str, Any]:
    """The fields that a clause of a text sets, as texts."""
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, fields.split(","))):
        name, equals, value = map(str.strip, part.rpartition("="))
        name = name if equals else "compute"
        if name in found or name not in FIELDS:
            fix = f"give each of {', '.join(FIELDS)} once at most"
            raise PlanError(f"Precision.parse: {part!r} in {clause!r}", fix=fix)
        found[name] = value
    return found
