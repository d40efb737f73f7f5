"""Which parts of a model are compiled regions: those that its user compiled, or names.

What a region is, and what it saves, is in [Note: regions] in `deferred.regions`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from mics_fn import _torch, checks
from mics_fn.deferred import Region
from mics_fn.errors import PlanError
from mics_fn.init import copy_with

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def compile(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` of a function that may be given deferred parameters.

    Args:
      fn: a function of tensors, in any pytrees; a block of a model as `block(params, x)`.
      options: those of `torch.compile`.

    Returns:
      The compiled function. A call is one use of all buckets whose parameters it is given. Inside
      of `torch.func` it runs as it is, uncompiled.

    Raises:
      PlanError: an option that compiled code with deferred parameters cannot have.

    Example:
      >>> groups = make_groups(1)
      >>> square = compile(lambda params, x: (params["w"] * x).square().sum(), backend="eager")
      >>> shards, total = shard({"w": torch.ones(2)}, groups), GradSum()
      >>> with defer(shards, groups, on_demand(live_bytes=0), into=total) as full:
      ...     total.backward(square(full, torch.ones(2)))
      >>> total.grads()["w"].data
      tensor([2., 2.])
    """
    _check("compile", options)
    return Region(fn, torch.compile(fn, **options))


def compile_blocks(model: nn.Module, pattern: str, **options: Any) -> nn.Module:
    """A copy of a module, with the same tensors, in which some submodules are compiled regions.

    Args:
      model: a module, or a skeleton that `init_model` made; it is not changed.
      pattern: of names as in `model.named_modules()`, such as "blocks.*"; of modules inside of each
        other the outermost counts.
      options: those of `torch.compile`.

    Returns:
      The copy, for `Trainer` or `torch.func.functional_call`. Blocks of one class share a graph. A
      region is one use of its buckets; a `Trainer` lets buckets end where regions do.

    Raises:
      PlanError: no module matches, or an option that regions cannot have.

    Example:
      >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
      >>> compiled = compile_blocks(model, "*", backend="eager")
      >>> compiled[0].weight is model[0].weight, model(torch.ones(2)).equal(compiled(torch.ones(2)))
      (True, True)
    """
    _check("compile_blocks", options)
    tensors = [*model.parameters(), *model.buffers()]
    copied = copy_with(model, {id(x): x for x in tensors})
    name_regions(copied, pattern, options)
    return copied


def name_regions(copied: nn.Module, pattern: str, options: dict[str, Any]) -> None:
    """Make regions of the submodules of a copy whose names match a pattern."""
    names = [name for name, _ in copied.named_modules() if name and checks.matches(pattern, name)]
    if not names:
        every = [name for name, _ in copied.named_modules() if name]
        checks.check_matched("compile", [pattern], every, leaf="module")
    made: dict[Any, Callable[..., Any]] = {}
    for name in names:
        if not any(name.startswith(f"{outer}.") for outer in names):
            _make_region(copied.get_submodule(name), partial(torch.compile, **options), made)


def regions_of(model: nn.Module, copied: nn.Module) -> list[str]:
    """Make regions, in a copy of a model, of what was compiled in it.

    Args:
      model: as its user has it.
      copied: the copy, which is changed.

    Returns:
      The names of all regions, as in `model.named_modules()`; of those inside of each other only
      the outermost is one.
    """
    made: dict[Any, Callable[..., Any]] = {}
    names = list[str]()
    for name, given in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in names)
        target, how = copied.get_submodule(name), _compiler_of(given)
        if inside:
            if hasattr(given, "dynamo_ctx"):  # else it would call the model of the user
                target.forward = _inner(target).__call__
        elif isinstance(vars(target).get("forward"), Region):
            names.append(name)
        elif how is not None:
            _make_region(target, how, made)
            names.append(name)
    return names


def region_of(names: list[str], path: str) -> str:
    """The region in which a parameter lies; "" if in none."""
    found = (name for name in names if path.startswith(f"{name}.") or not name)
    return next((f"region {name}" for name in found), "")


def _inner(module: nn.Module) -> nn.Module:
    """The module in what `torch.compile(module)` gives; any other module itself."""
    return getattr(module, "_orig_mod", module)


def _compiler_of(given: nn.Module) -> Compiler | None:
    """What compiles another function as a user compiled a module; None if it was not compiled."""
    call = _torch.compiled_call(given)
    if hasattr(given, "dynamo_ctx"):
        call = given
    elif call is None and _torch.compiled_from(vars(given).get("forward")) is not None:
        call = vars(given)["forward"]
    if call is not None:
        return _torch.compiler_of(call) or torch.compile
    return None if _torch.compiled_from(type(given).forward) is None else lambda fn: fn


def _make_region(module: nn.Module, how: Compiler, made: dict[Any, Any]) -> None:
    """Let a module of a copy call a region; equal classes share what `made` has."""
    target = _inner(module)
    own, of_class = vars(target).get("forward"), type(target).forward
    if own is not None and _torch.compiled_from(own) is None:
        module.forward = Region(own, how(own), target)
        return
    slow = _torch.compiled_from(of_class) or of_class
    key = slow, how if isinstance(how, partial) else id(how)
    if key not in made:
        made[key] = of_class if slow is not of_class else how(slow)
    module.forward = Region(slow, made[key], target, (target,))


def _check(verb: str, options: dict[str, Any]) -> None:
    """Raise PlanError for options that replay addresses, which those of buckets are not."""
    if options.get("mode") in ("reduce-overhead", "max-autotune"):
        fix = "use mode='default' or 'max-autotune-no-cudagraphs': buckets move from step to step"
        raise PlanError(f"{verb}: mode={options['mode']!r} replays graphs of CUDA", fix=fix)
