"""What uses private names of torch, or names that differ between releases.

Written for torch 2.11 and newer: where a release renames or hides something, look here first.

The public `torch.profiler.record_function` calls an op, which transforms and modes around the
caller would see. What is called here goes to the profilers alone. Groups are made from torch's
default group and its store, and no data moves over the default group itself.
"""

import ctypes
import functools
import inspect
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils._pytree as torch_pytree
from torch.autograd import forward_ad, profiler
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import stateless
from torch.utils._python_dispatch import TorchDispatchMode

# Ranges of torch's profilers, by private names of torch.


def profiling() -> bool:
    """Whether a profiler of torch is on: `torch.profiler.profile`, or `emit_nvtx`."""
    return profiler._is_profiler_enabled


def enter_range(name: str) -> Any:
    """Open a profiler range of this thread; `exit_range` closes it."""
    return torch.autograd._record_function_with_args_enter(name)  # pyright: ignore


def exit_range(record: Any) -> None:
    """End a range; those of a thread end in reverse order."""
    torch.autograd._record_function_with_args_exit(record)  # pyright: ignore


@contextmanager
def _unrecorded() -> Iterator[None]:
    torch.autograd._enable_record_function(False)  # pyright: ignore
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)  # pyright: ignore


_NOTHING = nullcontext()


def unrecorded(on: bool) -> AbstractContextManager[None]:
    """A block in which profilers record nothing of this thread, if `on`.

    What gloo's threads do would be recorded with a copy of the issuing thread's state, in which
    `torch.utils.checkpoint` keeps hooks in Python. Such a thread needs the interpreter to let go of
    them while it holds the lock of its transfer, and `is_completed` waits for that lock with the
    interpreter in its hands: both would wait for ever.
    """
    return _unrecorded() if on and profiling() else _NOTHING


# Torch's default group and its store, by private names of torch: as a late process needs them.

_connections: list[tuple[Any, Any]] = []  # a default group, and the store for groups made from it


def connection() -> Any:
    """The connection to the store with which groups are made; see `drop_connection`."""
    default = c10d._get_default_group()
    _, store = c10d._world.pg_map[default]
    if _connections and _connections[0][0] is default:
        if _connections[0][1] is None:
            try:
                _connections[0] = default, store.clone()  # pyright: ignore[reportAttributeAccessIssue]
            except (AttributeError, NotImplementedError):
                _connections.clear()
                return store
        return _connections[0][1]
    return store


def drop_connection() -> None:
    """Make groups over another connection from now on, as a call that was given up holds this one.

    A connection serves one call at a time, and one that waits for an address of a rank that is gone
    ends only with its time limit.
    """
    if dist.is_initialized():
        _connections[:] = [(c10d._get_default_group(), None)]


def start_alone(backend: str, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Initialize torch.distributed in a process that replaces a lost one.

    Its default group knows the ranks and the store, under the keys that the others use, but it is
    connected to nobody: groups are made from it, and it moves no data itself.
    """
    name, own = c10d._process_group_name([], use_hashed_name=False), default_part(store)
    own.set_timeout(timedelta(seconds=timeout_s))
    group, world = dist.ProcessGroup(own, rank, world_size), c10d._world
    group._set_group_name(name)
    group._set_group_desc("default_pg")
    world.pg_map[group] = (backend, own)  # pyright: ignore[reportArgumentType]
    world.pg_names[group] = name
    c10d._register_process_group(name, group)  # pyright: ignore[reportPrivateImportUsage]
    config = c10d.BackendConfig(c10d.Backend(backend))  # pyright: ignore[reportArgumentType]
    world.pg_backend_config[group] = str(config)
    world.pg_to_tag[group] = "default"
    world.tags_to_pg.setdefault("default", []).append(group)
    c10d._update_default_pg(group)
    world.pg_group_ranks[group] = {i: i for i in range(world_size)}


def default_part(store: Any) -> Any:
    """The part of a store that the default group of a process, its first group, hands on."""
    return dist.PrefixStore("0/", store)  # pyright: ignore[reportPrivateImportUsage]


def serve_store(address: str, port: int = 0) -> Any:
    """A store that listens at one address of this machine; torch's own listens at all of them.

    Args:
      address: of this machine; the loopback address keeps others away.
      port: 0 takes a free one.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((address, port))
    listening.listen()
    port = listening.getsockname()[1]
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # the store closes it
    )


Function = TypeVar("Function", bound=Callable[..., Any])

# 2.13 renamed these and warns about the old names; 2.11 and 2.12 have only the old ones.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def new_group(
    ranks: Sequence[int], *, timeout_s: float, backend: str, name: str, purpose: str
) -> dist.ProcessGroup:
    """A process group that only its members create, in the order given.

    `dist.new_group` names a group after its ranks and the number of groups that are alive. Ranks
    that made other groups before would disagree on such a name, and after some groups were closed
    a living group may have it already. Here the caller names it.

    Args:
      ranks: global ranks, this one among them.
      timeout_s: bound in seconds of its collectives.
      backend: such as "gloo".
      name: equal on its ranks, and never given to another group of the job.
      purpose: for people.
    """
    default, store = c10d._get_default_group(), connection()
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(default.rank()),
        list(ranks),
        c10d.Backend(backend),
        store,
        name,  # pyright: ignore[reportArgumentType]
        timeout=timedelta(seconds=timeout_s),
        device_id=default.bound_device_id,
        group_desc=purpose,
    )
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError(f"torch made no group of {list(ranks)} on rank {default.rank()}")
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def abort(group: dist.ProcessGroup) -> None:
    """Give up a process group without its other members; NCCL may wait for them all the same."""
    never_destruct(group)
    c10d._abort_process_group(group)


def never_destruct(group: Any) -> None:
    """Keep a process group until the process is gone: gloo's destructor waits for its members."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connect the members of a group on an accelerator now; block until all are connected."""
    dist.barrier(group, device_ids=[device.index])


def default_store() -> Any:
    """The key-value store that the default process group was created with."""
    return c10d._get_default_store()


def store_host(store: Any) -> tuple[int | None, str]:
    """The rank that holds a store, if a rank does, and the address of the store, if it has one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    of_tcp = hasattr(store, "port")
    return None if agent or not of_tcp else 0, f"{store.host}:{store.port}" if of_tcp else ""


def groups_named(name: str | None) -> list[dist.ProcessGroup]:
    """The process groups that `new_group` has made, or is about to return, of a name, or of any."""
    return [group for group, own in list(c10d._world.pg_names.items()) if name in (None, own)]


def prefixed(store: Any, prefix: str) -> Any:
    """Return a view of a store whose keys have a prefix of their own."""
    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]


def num_process_groups() -> int:
    """How many process groups are alive here."""
    return len(c10d._world.pg_names)


def register_torch_node(
    cls: type, flatten: Callable[[Any], tuple[list, Any]], unflatten: Callable[[list, Any], Any]
) -> None:
    """Register a pytree node with torch's own pytree, which `torch.func` uses."""
    torch_pytree.register_pytree_node(
        cls,
        flatten,
        lambda children, context: unflatten(list(children), context),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )


def flatten(values: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list, Any]:
    """Leaves and structure by torch's own pytree, with which other libraries register classes."""
    return torch_pytree.tree_flatten(values, is_leaf)


def unflatten(leaves: list, spec: Any) -> Any:
    """A value of the structure that `flatten` returned, with these leaves."""
    return torch_pytree.tree_unflatten(leaves, spec)


def optimizer_init_group(optimizer: torch.optim.Optimizer, group: dict) -> None:
    """Make a torch optimizer create its initial state for `group` without taking a step."""
    init = optimizer._init_group  # pyright: ignore[reportAttributeAccessIssue]
    num_lists = len(inspect.signature(init).parameters) - 1
    init(group, *([] for _ in range(num_lists)))


def storage_id(tensor: torch.Tensor) -> int:
    """A number that is equal for tensors of one storage and for no others, on meta or fake too."""
    return tensor.untyped_storage()._cdata


def inside_torch_func() -> bool:
    """Whether a `torch.func` transform is running around the caller."""
    stack = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore[reportAttributeAccessIssue]
    return stack is not None


def inside_forward_ad() -> bool:
    """Whether a level of forward-mode differentiation is active around the caller."""
    return forward_ad._current_level >= 0


def keeps_grad_mode(fn: Function) -> Function:
    """A function that restores grad mode, at whatever instant a signal's handler raises.

    torch's own contexts are Python: an interrupt between their first line and the change of mode,
    or behind it, leaves the mode of the block. Here nothing looks for signals before the mode is
    back: one call into C is all there is.
    """
    put_back = torch._C._set_grad_enabled

    @functools.wraps(fn)
    def kept(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            return fn(*args, **kwargs)
        finally:
            put_back(before)

    return kept  # pyright: ignore[reportReturnType]


def is_tracing() -> bool:
    """Whether torch is tracing ops with proxies, as `make_fx` and `linearize` do."""
    key = torch._C._TorchDispatchModeKey.PROXY  # pyright: ignore[reportAttributeAccessIssue]
    return torch._C._get_dispatch_mode(key) is not None  # pyright: ignore[reportAttributeAccessIssue]


def inside_functionalize() -> bool:
    """Whether `torch.func.functionalize` is running around the caller."""
    if not inside_torch_func():
        return False
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    kind = functorch.TransformType.Functionalize
    return any(each.key() == kind for each in functorch.get_interpreter_stack())


# Whether a tensor is a wrapper that a `torch.func` transform put around another one.
is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside all wrappers of `torch.func`, with the dimensions that `vmap` hides."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)  # pyright: ignore
    return tensor


def wrapper_without_data(cls: type, geometry: tuple, dtype: torch.dtype, device: Any) -> Any:
    """A tensor of a subclass that has metadata only; asking for its memory raises.

    Args:
      cls: the subclass.
      geometry: size, strides and storage offset.
      dtype, device: what the tensor reports.
    """
    size, stride, offset = geometry
    made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
        cls, size, strides=stride, storage_offset=offset, dtype=dtype, device=device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)  # pyright: ignore[reportAttributeAccessIssue]
    return made


# The `__torch_function__` of a tensor subclass that intercepts ops in `__torch_dispatch__` only.
no_torch_function: Any = torch._C._disabled_torch_function_impl  # pyright: ignore


# A block in which new tensors are not wrapped by the `torch.func` transforms around it.
without_torch_func: Any = torch._C._DisableFuncTorch  # pyright: ignore[reportAttributeAccessIssue]


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data because it is on meta or fake."""
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


def fake_mode_of(value: Any) -> Any:
    """The mode that a fake tensor belongs to; None for anything else."""
    return value.fake_mode if type(value).__name__ == "FakeTensor" else None


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing DTensor."""
    return type(tensor).__name__ == "DTensor"


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor keeps its values in inner tensors, as quantised ones do."""
    return hasattr(type(tensor), "__tensor_flatten__")


def is_compiled(function: Any) -> bool:
    """Whether `torch.compile` made a function; one that is kept from being compiled is none."""
    made = hasattr(function, "_torchdynamo_orig_callable")
    return made and not getattr(function, "_torchdynamo_disable", False)


def with_constant_size(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor, of which a compiler takes one size for a constant."""
    if tensor.is_cuda:
        torch._dynamo.mark_static(tensor, dim)  # pyright: ignore
    return tensor


def is_of_compiler(error: Exception) -> bool:
    """Whether torch.compile raised an error because it could not compile."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def compiles_itself(module: torch.nn.Module) -> bool:
    """Whether `module.compile()` was called, which a copy of the module does not keep."""
    return module._compiled_call_impl is not None


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a group still exists: not destroyed, neither by itself nor with the default group."""
    return group in c10d._world.pg_map


# Each works on a list of tensors in one kernel; torch's own optimizers and FSDP2 use them too.
foreach_copy: Callable[..., None] = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
foreach_zero: Callable[..., None] = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]
foreach_add: Callable[..., None] = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
foreach_div: Callable[..., None] = torch._foreach_div_  # pyright: ignore[reportPrivateImportUsage]
foreach_norm: Callable[..., Any] = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
fused_adam: Callable[..., None] = torch._fused_adam_  # pyright: ignore[reportPrivateImportUsage]
fused_adamw: Callable[..., None] = torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]


# While such a mode is active it receives every op, including those that only create tensors.
DispatchMode = TorchDispatchMode
# A mode leaves an op on any other type to it; its ops on plain tensors come to the mode themselves.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def generator_id(generator: torch.Generator) -> int:
    """A number of a generator; an op gets a new Python object for the same generator each time."""
    return generator._cdata  # pyright: ignore[reportAttributeAccessIssue]


def weak_storage(tensor: torch.Tensor) -> StorageWeakRef:
    """A weak reference to a storage, whose `storage_id` is not reused while the reference lives."""
    return StorageWeakRef(tensor.untyped_storage())


def pretend(cls: type, meta: torch.Tensor, device: torch.device) -> Any:
    """A tensor of a subclass that shares a meta tensor's storage but reports `device` to C++."""
    make: Any = torch.Tensor._make_subclass  # pyright: ignore[reportAttributeAccessIssue]
    made = make(cls, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(made)  # pyright: ignore[reportAttributeAccessIssue]
    return made


# Queries that are dispatched like ops: the device of a tensor, and whether `.data =` accepts it.
ASK_DEVICE = torch.ops.prim.device.default
ASK_COMPATIBLE = torch.ops.aten._has_compatible_shallow_copy_type.default


def op_name(func: Any) -> str:
    """The name of an op without its namespace and overload."""
    return func._schema.name.partition("::")[2]


def op_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an op, by name."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def op_takes(func: Any, name: str) -> bool:
    """Whether an op has an argument of that name."""
    return any(argument.name == name for argument in func._schema.arguments)


def op_views(func: Any) -> bool:
    """Whether an op gives a view of a tensor, and not, as `to` may, a copy on another device."""
    return func.is_view and not op_takes(func, "device")


def op_changes(func: Any) -> bool:
    """Whether an op writes to any of its arguments."""
    return func._schema.is_mutable


def op_writes(func: Any) -> dict[str, bool]:
    """The arguments that an op writes to; the value says whether it is an `out=` argument."""
    found = (
        a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
    )
    return {argument.name: argument.is_out for argument in found}


def stream_delay(device: torch.device) -> Callable[[int], None] | None:
    """What lets the current stream of a device idle for so many cycles; None if it has nothing."""
    return getattr(torch.get_device_module(device), "_sleep", None)


# What torch keeps beside the values of tensors, by private names of torch.


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy that is made when one of both is written to; None for memory of another owner."""
    try:
        return torch._lazy_clone(tensor)  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError:  # such as memory of numpy, of a file, or shared between processes
        return None


def is_lazy_clone(tensor: torch.Tensor) -> bool:
    """Whether such a copy still has no memory of its own; also if a view of it was written to."""
    return torch._C._is_cow_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def hooks_of(tensor: torch.Tensor) -> list[str]:
    """The hooks registered on a tensor, by the names of the methods that register them."""
    kinds = {
        "register_hook": "_backward_hooks",
        "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
    }
    return [method for method, kept in kinds.items() if getattr(tensor, kept, None)]


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; 0 for one of inference mode, which does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def set_order(ctx: Any, number: int) -> None:
    """Set when a node of autograd runs in backward: of those that can, the largest number first."""
    ctx._set_sequence_nr(number)


# Where a derivative may be asked for. A raw collective under torch.func raises nothing, and its
# derivative is zeros: what has no rule for it must ask first.

_RULES = threading.local()


@contextmanager
def inside_a_rule() -> Iterator[None]:
    """Mark a block whose results get their derivative from the rule of a verb around it."""
    before, _RULES.inside = getattr(_RULES, "inside", False), True
    try:
        yield
    finally:
        _RULES.inside = before


def needs_derivative(values: Iterable[Any]) -> bool:
    """Return whether a result of these values could be differentiated; only tensors count."""
    if getattr(_RULES, "inside", False):
        return False
    if inside_torch_func() or inside_forward_ad():
        return True
    for value in values if torch.is_grad_enabled() else ():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
    return False


def swapped(module: torch.nn.Module, values: dict[str, torch.Tensor]) -> AbstractContextManager:
    """A block in which a module has these values by name; what it assigns is in the dict then.

    As in `torch.func.functional_call`, whose `strict=True` would walk the module at every call.
    """
    return stateless._reparametrize_module(module, values)
