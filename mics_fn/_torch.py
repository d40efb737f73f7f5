"""What uses private names of torch, or names that differ between releases.

Written for torch 2.11 and newer: where a release renames or hides something, look here first.

The public `torch.profiler.record_function` calls an op, which transforms and modes around the
caller would see. What is called here goes to the profilers alone. Groups are made from torch's
default group and its store, and no data moves over the default group itself.

Its last part has the streams, events, memory and generators of a device, and is all that knows
kinds of devices. It is written against `torch.accelerator` and `torch.Stream`, so CUDA, ROCm, XPU
and others that torch knows need nothing of their own. On the CPU work is done when a call returns,
so nothing of it is called but `is_async`, `lazy_zeros` and `total_memory`.
"""

import ctypes
import functools
import inspect
import logging
import mmap
import os
import re
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.utils._pytree as torch_pytree
from torch.autograd import forward_ad, profiler
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

# Ranges of torch's profilers, by private names of torch.


def is_read(watchers: Sequence[Any], log: logging.Logger) -> bool:
    """Whether somebody reads ranges: a watcher, a log at DEBUG, or a profiler of torch."""
    return bool(watchers) or profiler._is_profiler_enabled or log.isEnabledFor(logging.DEBUG)


# Open a profiler range of this thread, from its name, and end it; the last one ends first.
enter_range: Any = torch.autograd._record_function_with_args_enter  # pyright: ignore
exit_range: Any = torch.autograd._record_function_with_args_exit  # pyright: ignore


@contextmanager
def _unrecorded() -> Iterator[None]:
    torch.autograd._enable_record_function(False)  # pyright: ignore
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)  # pyright: ignore


def unrecorded(on: bool) -> AbstractContextManager[None]:
    """A block in which profilers record nothing of this thread, if `on`.

    What gloo's threads do would be recorded with a copy of the issuing thread's state, in which
    `torch.utils.checkpoint` keeps hooks in Python. Such a thread needs the interpreter to let go of
    them while it holds the lock of its transfer, and `is_completed` waits for that lock with the
    interpreter in its hands: both would wait for ever.
    """
    return _unrecorded() if on and profiler._is_profiler_enabled else nullcontext()


# Torch's default group and its store, by private names of torch: as a late process needs them.

_connections: dict[Any, Any] = {}  # by default group: the store for groups made from it, if another


def connection() -> Any:
    """The connection to the store with which groups are made; see `drop_connection`."""
    default = c10d._get_default_group()
    _, store = c10d._world.pg_map[default]
    if _connections.get(default, store) is None:
        _connections[default] = cloned(store)
    return _connections.get(default, store)


def cloned(store: Any) -> Any:
    """Another connection to the same store; the store itself if it cannot be cloned."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError):
        return store


def drop_connection() -> None:
    """Make groups over another connection from now on, as a call that was given up holds this one.

    A connection serves one call at a time, and one that waits for an address of a rank that is gone
    ends only with its time limit.
    """
    if dist.is_initialized():
        _connections[c10d._get_default_group()] = None  # a new one, as soon as it is needed


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


PrefixStore: Any = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]


def default_part(store: Any) -> Any:
    """The part of a store that the default group of a process, its first group, hands on."""
    return PrefixStore("0/", store)


def serve_store(address: str, port: int = 0) -> Any:
    """A store that listens at one address of this machine; torch's own listens at all of them.

    Args:
      address: of this machine; the loopback address keeps others away.
      port: 0 takes a free one.
    """
    listening = socket.create_server((address, port))
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # the store closes it
    )


Function = TypeVar("Function", bound=Callable[..., Any])

# 2.13 renamed these and warns about the old names; 2.11 and 2.12 have only the old ones.
all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


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
    made: Any = c10d._new_process_group_helper(
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
    c10d._world.pg_group_ranks[made[0]] = {rank: place for place, rank in enumerate(ranks)}
    return made[0]


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


# The key-value store that the default process group was created with.
default_store: Callable[[], Any] = c10d._get_default_store


def groups_named(name: str | None) -> list[dist.ProcessGroup]:
    """The process groups that `new_group` has made, or is about to return, of a name, or of any."""
    return [group for group, own in list(c10d._world.pg_names.items()) if name in (None, own)]


# The calls of a process group that give something to wait for, which only their texts say.
_TEXTS = {name: x.__doc__ or "" for name, x in vars(dist.ProcessGroup).items()}
_GIVES_WORK = re.compile(r"-> [\w.:]*\bWork\b")
GROUP_CALLS = [k for k, x in _TEXTS.items() if _GIVES_WORK.search(x) and k != "_end_coalescing"]
group_named: Callable[[str], Any] = c10d._resolve_process_group  # pyright: ignore


def name_in_mesh(mesh: Any, dim: str | None) -> str:
    """The name of torch's group along a dimension of a mesh; "" if it has none."""
    with suppress(RuntimeError):
        return mesh.get_group(dim).group_name if dim else ""
    return ""


def put_in_place(name: str, group: dist.ProcessGroup) -> None:
    """Let torch find this process group under the name of another one, of the same ranks."""
    own, world = group_named(name), c10d._world
    for known in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
        known[group] = known[own]  # pyright: ignore
    c10d._unregister_process_group(name)  # pyright: ignore
    c10d._register_process_group(name, group)  # pyright: ignore


# Of torch's own pytree, which `torch.func` uses.
register_node = torch_pytree.register_pytree_node

# Leaves and structure by torch's own pytree, with which other libraries register classes; and a
# value of that structure with other leaves.
flatten, unflatten = torch_pytree.tree_flatten, torch_pytree.tree_unflatten


# A block in which a module has other tensors by name, as in `torch.func.functional_call`; after it
# the dict has what the module had at the end.
class SwappedIn:
    """Places of a module's parameters and buffers, where values by name replace them in a block.

    Args:
      module: its structure stays as it is; what a forward assigns to a name is in the values
        afterwards.
      names: of all tensors that may be replaced.
    """

    def __init__(self, module: torch.nn.Module, names: Iterable[str]) -> None:
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        for path in names:
            prefix, _, name = path.rpartition(".")
            owner = module.get_submodule(prefix)
            own = owner._parameters if name in owner._parameters else owner._buffers
            self._places[path] = cast(Any, own), name

    @contextmanager
    def __call__(self, values: dict[str, Any]) -> Iterator[None]:
        kept: list[tuple[str, Any]] = []
        try:
            for path, value in values.items():
                own, name = self._places[path]
                kept.append((path, own[name]))
                own[name] = value
            yield
        finally:
            for path, _ in kept:
                own, name = self._places[path]
                values[path] = own.get(name, values[path])
            for path, before in reversed(kept):  # two names may be of one place
                own, name = self._places[path]
                own[name] = before


# Views made in such a block are no views to autograd.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView  # pyright: ignore


def optimizer_init_group(optimizer: torch.optim.Optimizer, group: dict) -> None:
    """Make a torch optimizer create its initial state for `group` without taking a step."""
    init = optimizer._init_group  # pyright: ignore[reportAttributeAccessIssue]
    num_lists = len(inspect.signature(init).parameters) - 1
    init(group, *([] for _ in range(num_lists)))


# A number that is equal for tensors of one storage and for no others, on meta or fake too.
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_address  # pyright: ignore


# The `torch.func` transform that is running around the caller, if there is one.
inside_torch_func: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore


def saved_tensors_hooks() -> Any:
    """The innermost hooks on saved tensors that are active here: (pack, unpack), or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore


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


def quick_apply(node: Any) -> Callable[..., Any]:
    """`node.apply` of an autograd function, without the binding of its arguments if that is idle.

    It is for the transforms of `torch.func`, and takes four times as long as all the rest.
    """
    return node.apply if inside_torch_func() else super(torch.autograd.Function, node).apply  # pyright: ignore


# The mode that traces ops with proxies around the caller, as `make_fx` and `linearize` do, if any.
is_tracing: Callable[[], Any] = functools.partial(
    torch._C._get_dispatch_mode,  # pyright: ignore[reportAttributeAccessIssue]
    torch._C._TorchDispatchModeKey.PROXY,  # pyright: ignore[reportAttributeAccessIssue]
)


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


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor keeps its values in inner tensors, as quantised ones do."""
    return hasattr(type(tensor), "__tensor_flatten__")


def is_dtensor(x: Any) -> bool:
    """Whether a value is a DTensor, without importing them."""
    return type(x).__name__ == "DTensor" and hasattr(x, "placements")


def local_of(x: Any) -> Any:
    """What this rank has of a DTensor, as a parameter if it is one; any other value itself."""
    if not is_dtensor(x):
        return x
    local = x.to_local().detach() if x.is_leaf else x.to_local()
    if isinstance(x, torch.nn.Parameter):
        return torch.nn.Parameter(local, x.requires_grad)
    return local


def as_dtensor(local: torch.Tensor, mesh: Any, placements: Any) -> Any:
    """A DTensor of this rank's part; nothing is compared, or copied."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False)


def compiled_from(function: Any) -> Any:
    """The function that `torch.compile` compiled; None if it made nothing of this one.

    One that is kept from being compiled is none.
    """
    if getattr(function, "_torchdynamo_disable", False):
        return None
    return getattr(function, "_torchdynamo_orig_callable", None)


def compiler_of(made: Any) -> Any:
    """What compiles another function as this one or module was compiled; None if unknown."""
    own = getattr(made, "dynamo_ctx", None)  # of an `OptimizedModule`
    if own is None and inspect.isfunction(made):
        own = inspect.getclosurevars(made).nonlocals.get("self")
    return own if hasattr(own, "compiler_config") else None


_COMPILES: list[Any] = []  # what is told that torch compiles, and what ends its silence


def _compile_begins(_: Any) -> None:
    _COMPILES[0](True)
    _COMPILES[1:] = [warnings.catch_warnings()]
    _COMPILES[1].__enter__()
    # The compiler reads `.grad` of everything, also of what autograd gives none.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")


def _compile_ends(_: Any) -> None:
    for silence in _COMPILES[1:]:  # none, where what compiles began before this was registered
        silence.__exit__(None, None, None)
    del _COMPILES[1:]
    _COMPILES[0](False)


def on_compile(call: Callable[[bool], None], skips: Sequence[Any]) -> None:
    """Call a function with True where `torch.compile` begins to compile, and with False behind.

    Args:
      call: the function.
      skips: functions that are not to be compiled where they are called amid compiled code.
    """
    from torch._dynamo import eval_frame
    from torch._dynamo.callback import callback_handler

    _COMPILES[:1] = [call]
    if _compile_begins not in callback_handler.start_callbacks:  # which a reset of it has cleared
        callback_handler.register_start_callback(_compile_begins)
        callback_handler.register_end_callback(_compile_ends)
        for each in skips:
            eval_frame.skip_code(each.__code__)


def own_parameters(module: torch.nn.Module) -> dict[str, Any]:
    """The parameters of a module itself by name, in the place from which it takes them."""
    return module._parameters


def compiled_call(module: torch.nn.Module) -> Any:
    """What `module.compile()` made, which a copy of the module does not keep; None if nothing."""
    return module._compiled_call_impl


LIVE_GROUPS = c10d._world.pg_map  # all process groups that were not destroyed


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


def op_writes(func: Any) -> dict[str, bool]:
    """The arguments that an op writes to; the value says whether it is an `out=` argument."""
    written = [x for x in func._schema.arguments if x.alias_info and x.alias_info.is_write]
    return {argument.name: argument.is_out for argument in written}


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
    kinds = {"register_hook": "_backward_hooks"}
    kinds["register_post_accumulate_grad_hook"] = "_post_accumulate_grad_hooks"
    return [method for method, kept in kinds.items() if getattr(tensor, kept, None)]


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; 0 for one of inference mode, which does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def set_order(ctx: Any, number: int) -> None:
    """Set when a node of autograd runs in backward: of those that can, the largest number first."""
    ctx._set_sequence_nr(number)


# Where a derivative may be asked for. A raw collective under torch.func raises nothing, and its
# derivative is zeros: what has no rule for it must ask first.


def needs_derivative(values: Iterable[Any]) -> bool:
    """Return whether a result of these values could be differentiated; only tensors count."""
    if inside_torch_func() or inside_forward_ad():
        return True
    for value in values if torch.is_grad_enabled() else ():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return True
    return False


# Streams, events, memory and generators of a device.


def is_async(device: torch.device) -> bool:
    """Whether work on a device is queued on streams while the host goes on."""
    return device.type not in ("cpu", "meta")


def with_index(device: torch.device) -> torch.device:
    """The device with the number of the current one, if it has none."""
    if device.index is not None or not is_async(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that ops on a device are queued on now."""
    return torch.accelerator.current_stream(device)


def own_stream(device: torch.device) -> torch.Stream:
    """A new stream for collectives, whose kernels go before those of compute streams.

    Compute would otherwise fill the device with blocks that a short collective has to wait for.
    """
    return torch.Stream(device, priority=-1)


@contextmanager
def keep_stream(device: torch.device) -> Iterator[torch.Stream]:
    """A block that may queue work on other streams; its value is the stream before and after it."""
    with torch.accelerator.device_index(device.index):  # `set_stream` changes the current device
        before = current_stream(device)
        try:
            yield before
        finally:
            torch.accelerator.set_stream(before)


def follow(stream: torch.Stream, device: torch.device) -> None:
    """Queue later work on `stream`, behind everything queued on the current stream."""
    current = current_stream(device)
    if stream != current:
        stream.wait_stream(current)
        torch.accelerator.set_stream(stream)


def record(device: torch.device, *, timed: bool = False) -> torch.Event:
    """An event that is over once all work on the current stream is done, and may say when."""
    return current_stream(device).record_event(torch.Event(device, enable_timing=timed))


def wait(device: torch.device, event: torch.Event) -> None:
    """Make the current stream wait for an event; the host goes on."""
    current_stream(device).wait_event(event)


def finish(device: torch.device) -> None:
    """Make the host wait for all work that is queued on a device, on any stream."""
    if is_async(device):
        torch.accelerator.synchronize(device)


class Queued:
    """What is queued on the current stream of a device until now, and whether it ends well.

    [Note: aborted collectives] The host runs ahead of a device. Where collectives are aborted,
    their kernels end without a result, and what is queued behind them goes on with whatever is in
    their memory. So an event that is over says nothing after an abort: what was not over before it
    is lost. A device can tell by itself: it copies `abort_flag` from the host behind the last
    collective. If that was 0, no abort had begun, so all before it was done. What is handed out
    without such an event, such as full parameters, is waited for, and is right if none had begun.

    Args:
        device: that it is queued on.
        lose: called where collectives are aborted before it is over; it runs on any thread.
    """

    def __init__(self, device: torch.device, lose: Callable[[], None] = lambda: None) -> None:
        self.lost, self._lose, self._event = False, lose, record(device)
        with _LOCK:
            while _QUEUED and _QUEUED[0].has_ended():
                _QUEUED.popleft()
            _QUEUED.append(self)

    def has_ended(self) -> bool:
        """Whether the device is done with it, however it ended; the host does not wait."""
        return self._event.query()

    def wait(self) -> bool:
        """Make the host wait for its end; returns whether it ended well."""
        self._event.synchronize()
        return not self.lost

    def judge(self) -> None:
        """Say that it is lost, unless it is over."""
        if not self.has_ended():
            self.lost = True
            self._lose()


_LOCK = threading.RLock()  # of these two, which the monitor empties; a signal may come in between
_QUEUED = deque[Queued]()  # in the order in which it was queued; those at the front may be over
_FLAGS: list[torch.Tensor] = []  # the one of now, if a step asked for it since the last abort


def abort_flag(device: torch.device) -> torch.Tensor | None:
    """A number in host memory that becomes 1 as soon as collectives are aborted.

    None if a device cannot read host memory in its own time.
    """
    with _LOCK:
        if not _FLAGS:
            _FLAGS.append(host_buffer(4, device).view(torch.float32)[0].zero_())
        flag = _FLAGS[0]
    return flag if is_locked(flag) else None


def is_locked(memory: torch.Tensor) -> bool:
    """Whether a device copies from this memory of the host in its own time, not at the call."""
    return memory.is_pinned()


def lose_queued(patience_s: float = 0.0) -> None:
    """Judge all that is queued, before collectives are aborted; it has so much time to end."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with _LOCK:  # other threads queue, too
            if all(each.has_ended() for each in _QUEUED):
                break
        time.sleep(1e-3)
    with _LOCK:
        while _FLAGS:
            _FLAGS.pop().fill_(1)
        while _QUEUED:
            _QUEUED.popleft().judge()


def host_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Host memory that a device can copy to while the host goes on, if it has such memory."""
    if is_async(device):
        with suppress(RuntimeError):  # the system may not lock so much memory
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


_LAZY_BYTES = 2**20  # below which memory that is used again costs less


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make zeros; on the host they take memory page by page as they are written."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cpu" or nbytes < _LAZY_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def place_in_dcp(file: str, start: int, length: int) -> Any:
    """A place in a file as torch.distributed.checkpoint describes it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, length)


def total_memory(device: torch.device) -> int:
    """Bytes of memory of a device; of the machine for the CPU."""
    if not is_async(device):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.get_device_module(device).get_device_properties(device).total_memory


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator of ops that are not given one; None if torch keeps none for such devices."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device) if is_async(device) else None
    if not hasattr(module, "default_generators"):
        return None
    module.init()  # makes the generators, which exist only from then on
    return module.default_generators[with_index(device).index]


def muon(matrix: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, **options: Any) -> None:
    """Step by torch's Muon on one matrix, in place."""
    from torch.optim import _muon

    fixed = {"ns_coefficients": (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)}
    _muon.muon([matrix], [grad], [mean], **fixed, eps=_muon.EPS, has_complex=False, **options)
