"""What a pickle of `torch.save` describes, without running it.

A pickle is a program for a small machine with a stack. Here its opcodes are read, and what they
name is never imported or called: a tensor becomes a `Stored`, plain values become themselves, and
anything else an `Other`, of which only the name is kept. See [Note: files of strangers].
"""

import pickletools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from mics_fn.init.reading import check_shape, is_text, shown, span

_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
_STORED = {f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()}
_NEWER = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
_NEWER += ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_DTYPES = {f"torch.{name}": getattr(torch, name) for name in _NEWER if hasattr(torch, name)}
# Every dtype that a pickle may name by itself.
NAMED_DTYPES = {f"{dtype}": dtype for dtype in _STORAGES.values()} | _DTYPES
_REBUILT = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on meta, without values",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
}
_PLAIN_TENSORS = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
_VALUES = ("BIN", "SHORT_BIN", "INT", "LONG", "FLOAT", "STRING", "UNICODE")  # opcodes of them


class Global(NamedTuple):
    """A class or function that a pickle names."""

    name: str


class Other(NamedTuple):
    """A value that is neither plain nor a tensor."""

    name: str  # of what would make it, or in words


@dataclass(eq=False)
class Made:
    """An instance of a class that the caller knows, which is not made."""

    name: str  # of the class
    state: Any = field(default_factory=dict)  # what it would be given, in most cases attributes


class Storage(NamedTuple):
    """Memory that tensors lie in."""

    key: str  # of the record with its bytes
    dtype: torch.dtype | None  # None: that of the tensor


class Stored(NamedTuple):
    """A tensor in a storage."""

    storage: str
    dtype: torch.dtype
    offset: int  # in elements, as strides
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """Bytes of the storage up to its last element."""
        return (self.offset + span(self.shape, self.strides)) * self.dtype.itemsize


def read_pickle(data: bytes | bytearray, classes: Collection[str] = ()) -> Any:
    """The value that a pickle describes: of dicts, lists, tuples, plain values and the above.

    Args:
      data: the pickle.
      classes: names of classes whose instances become `Made`; others become `Other`.

    Raises:
      ValueError: it is damaged, or has something that `torch.save` does not write.
    """
    machine = _Machine(classes)
    try:
        for opcode, argument, _ in pickletools.genops(bytes(data)):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument)
    except (IndexError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"its pickle is damaged ({type(error).__name__})") from None
    raise ValueError("its pickle is cut")


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self, classes: Collection[str] = ()) -> None:
        self.classes = classes
        self.stack: list[Any] = []
        self.marks: list[int] = []  # places in the stack
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Do what one opcode says."""
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[name])
            case "EMPTY_SET":
                stack.append(Other("set"))
            case "TUPLE" | "LIST":
                items = self.since_mark()
                stack.append(tuple(items) if name == "TUPLE" else items)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self.pop(int(name[-1]))))
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(Global(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                stack.append(Global(".".join(self.pop(2))))
            case "BINPERSID":
                stack.append(_storage(*self.pop(1)))
            case "NEWOBJ" if getattr(stack[-2], "name", "") in self.classes:
                stack.append(Made(self.pop(2)[0].name))
            case "REDUCE" | "NEWOBJ":
                stack.append(_called(*self.pop(2)))
            case "BUILD":
                state = self.pop(1)[0]  # such as the versions of modules in a state dict
                if isinstance(stack[-1], Made):
                    stack[-1].state = state
            case "APPEND" | "SETITEM":
                self.put(self.pop(1 + (name == "SETITEM")), name == "SETITEM")
            case "APPENDS" | "SETITEMS" | "ADDITEMS":
                self.put(self.since_mark(), name == "SETITEMS")
            case _ if name.startswith(_VALUES):
                stack.append(argument)
            case _:
                raise ValueError(f"its pickle has the opcode {name}")

    def pop(self, count: int) -> list[Any]:
        """The last values of the stack."""
        place = len(self.stack) - count
        if not 0 <= place <= len(self.stack):
            raise IndexError("pop from an empty stack")
        found = self.stack[place:]
        del self.stack[place:]
        return found

    def since_mark(self) -> list[Any]:
        """The values above the last mark."""
        return self.pop(len(self.stack) - self.marks.pop())

    def put(self, items: list[Any], in_pairs: bool) -> None:
        """Add items to the value on top of the stack."""
        target = self.stack[-1]
        if in_pairs and isinstance(target, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                key = _as_name(key)
                if key in target:
                    name = key.name if isinstance(key, Other) else shown(key)
                    raise ValueError(f"the name {name} is there twice")
                target[key] = value
        elif not in_pairs and isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Other):
            raise TypeError("items are put into what takes none")


def _as_name(key: Any) -> Any:
    """A key of a dict as something that is hashed in no time, and not as its writer wishes.

    Hashing what is nested deeply may crash, and numbers can be chosen so that all of them have the
    same hash. The hash of a text is another one in each process.
    """
    if isinstance(key, str | Made | None):
        return key
    kind = type(key).__name__
    plain = isinstance(key, float) or (isinstance(key, int) and key.bit_length() <= 1000)
    return Other(f"{kind} {key!r}" if plain else kind)


def _storage(name: Any) -> Storage | Other:
    """What a persistent id stands for."""
    kind, made_of, key, *_ = name if isinstance(name, tuple) and len(name) == 5 else [None] * 3
    if kind != "storage" or not isinstance(made_of, Global) or not isinstance(key, str):
        return Other("a persistent object")
    if made_of.name == "torch.storage.UntypedStorage":
        return Storage(key, None)
    dtype = _STORED.get(made_of.name)
    return Other(made_of.name) if dtype is None else Storage(key, dtype)


def _called(what: Any, args: Any) -> Any:
    """What a call of a named function would give."""
    name = what.name if isinstance(what, Global) else "an object"
    values: Any = args if isinstance(args, tuple) else ()
    match name, len(values):
        case "collections.OrderedDict", 0:
            return {}
        case "torch.Size", 1 if isinstance(values[0], tuple):
            return values[0]
        case "torch._utils._rebuild_tensor_v2", 6 | 7:
            return _tensor(values, getattr(values[0], "dtype", None), values[6:])
        case "torch._utils._rebuild_tensor_v3", 7 | 8:
            return _tensor(values, _DTYPES.get(getattr(values[6], "name", "")), values[7:])
        case "torch._utils._rebuild_parameter", 3:
            return values[0]
        case "torch._utils._rebuild_parameter_with_state", 4:
            return values[0]
        case "torch._tensor._rebuild_from_type_v2", 4:
            if getattr(values[1], "name", "") in _PLAIN_TENSORS:
                return _called(values[0], values[2])
            name = getattr(values[1], "name", name)
    return Other(_REBUILT.get(name, name))


def _tensor(values: Any, dtype: torch.dtype | None, bits: Any) -> Stored | Other:
    """A tensor of a storage; `bits` says whether it is negated or conjugated when it is read."""
    storage, offset, shape, strides = values[:4]
    if isinstance(storage, Other):
        return storage
    if any(bits):
        return Other("a view that negates or conjugates")
    if not isinstance(storage, Storage) or dtype is None:
        return Other("a tensor of a dtype that is not read")
    check_shape(shape, dtype)
    numbers = [offset, *strides] if isinstance(strides, tuple) else [None]
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or len(strides) != len(shape):
        raise ValueError(f"strides {shown(strides)} do not fit the shape {shown(shape)}")
    if not is_text(storage.key):
        raise ValueError("a storage has no name")
    return Stored(storage.key, dtype, offset, tuple(shape), strides)
