"""Optimizers, and parts of optimizers, as pure functions over trees of shards.

The arithmetic of `sgd`, `adam` and `adamw` is that of torch's kernels, which step on lists of
tensors in one call; where a derivative is asked for it is that of torch's functions.

[Note: masked steps] On an accelerator a step whose gradient may not be finite is launched before
the host knows: torch's fused kernels read a number of the device, `found_inf`, and write nothing if
it is 1. So the host need not wait for the norm in each step. It reads the number a step later, and
takes back what only the host has, the counts of steps. It is 1 as well if collectives were aborted
before the last of them was done, so that an abort leaves the state before the step, whole.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam as _torch_adam
from torch.optim.sgd import sgd as _torch_sgd

from mics_fn import _torch, checks, tree
from mics_fn.checks import check_matched, matches
from mics_fn.errors import LeafError, PlanError
from mics_fn.optim import flat
from mics_fn.optim.columns import Column, Columns, map_columns, updating
from mics_fn.optim.flat import FlatShards, Unpacked, as_before, unpacked
from mics_fn.shards import Nothing, Sharded, is_leaf, names
from mics_fn.tree import Tree

_TENSORS = attrgetter("tensors")

# A learning rate, or a function from the step, counted from 0, to one. A tensor may be
# differentiated by.
Rate = float | Tensor | Callable[[int], float | Tensor]
Facts = Mapping[str, Any]  # see `Transform`
Stepped = tuple[Unpacked, Any]  # parameters and state after a step
Mask = Callable[[str], bool]  # from the path of a leaf to whether it is selected


class Optimizer(Protocol):
    """What can be made a `Transform`: an object with `init` and `update`, as optax defines them."""

    @property
    def init(self) -> Callable[..., Any]: ...  # init(params) -> state

    @property
    def update(self) -> Callable[..., Any]: ...  # update(grads, state, params) -> updates, state


FOUND_INF: ContextVar[Tensor | None] = ContextVar("found_inf", default=None)  # of `masked_by`


@contextmanager
def masked_by(number: Tensor | None) -> Iterator[None]:
    """A block whose fused steps write nothing if a number of the device is 1.

    Args:
      number: 0-dim float32 tensor, 0 or 1; None masks nothing.
    """
    token = FOUND_INF.set(number)
    try:
        yield
    finally:
        FOUND_INF.reset(token)


class Transform(NamedTuple):
    """An optimizer, or a part of one, as pure functions.

    Args:
      init: `init(params) -> state`.
      update: `update(grads, state, params) -> (updates, state)`; updates are to be added to the
        parameters.
      step: `step(grads, state, params, donate) -> (params, state)`, which adds the updates itself;
        with `donate` it may write into the memory of `state` and `params`. Gradients and parameters
        are `Unpacked`, as every part of a step needs them.
      facts: its options by name, for ranks to compare. Without it they compare nothing, and say so.
      masked: whether steps can be those of [Note: masked steps].
      whole: of which leaves a step needs all, by path; that is the `whole` of `shard`.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    step: Callable[[Unpacked, Any, Unpacked, bool], Stepped]
    facts: Facts | None = None
    masked: bool = False
    whole: Mask | None = None


def from_update(
    init: Callable[[Tree], Any], update: Callable[..., tuple[Tree, Any]], facts: Facts | None = None
) -> Transform:
    """An elementwise optimizer of one's own: a `Transform` from its `init` and `update`.

    Its step adds the updates to the parameters. `shards.map` writes both in terms of pieces.

    Args:
      init: `init(params) -> state`, a pytree: trees of shards, tensors, numbers.
      update: `update(grads, state, params) -> (updates, state)`. It must not write to what it is
        given. Shards are pieces, so it has to work element by element; `optim.leaf_norms` and
        `optim.inner` give numbers of whole tensors.
      facts: its options by name, for ranks to compare. Without it they compare nothing, and say so.

    Returns:
      A `Transform`. It is differentiated as `update` is.

    Memory: what `update` makes, and the state.

    Raises:
      LeafError: in a step, the updates do not fit the parameters.

    Example:
      >>> def update(grads, mean, params):
      ...     mean = shards.map(lambda m, g: 0.9 * m + g, mean, grads)
      ...     return shards.map(lambda m: -0.1 * m, mean), mean
      >>> optimizer = from_update(lambda params: shards.map(torch.zeros_like, params), update)
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optimizer)
      >>> opt_step(state, reduce_grads({"w": torch.ones(2)}, groups)).params["w"].data
      tensor([0.9000, 0.9000])
    """

    def step(grads: Unpacked, state: Any, params: Unpacked, donate: bool) -> Stepped:
        updates, after = update(grads.whole().shards, state, params.shards)
        updates = unpacked(updates)
        if updates.spec != params.spec or updates.geometry[:3] != params.geometry[:3]:
            where = tree.first_mismatch(params.shards, updates.shards, "updates", is_leaf)
            fix = "return (updates, state) with updates as shards.map makes them from the gradients"
            what = "from_update: the updates that update gave do not fit the parameters"
            raise LeafError(what, [where] if where else [], fix)
        found = map_columns(lambda p, u: p.add_(u), params, updates, donate=donate)
        return unpacked(found), as_before(after, state)

    return Transform(init, update, step, facts)


def check_rate(verb: str, name: str, lr: Any) -> None:
    """Raise PlanError unless a rate is a number of at least 0, or a tensor of one number.

    The number in a tensor on an accelerator is not looked at, because the host would wait for it.
    """
    fix = "pass a number such as 1e-3, a 0-dim tensor, or a function of the step that gives one"
    known = isinstance(lr, Tensor) and lr.is_cpu and not (_torch.is_wrapped(lr) or lr.ndim)
    if known and not _torch.is_tracing():
        lr = lr.item()
    if not isinstance(lr, Tensor):
        checks.number(verb, name, lr, least=0, fix=fix)
    elif lr.ndim:
        raise PlanError(f"{verb}: {name} is a tensor of shape {tuple(lr.shape)}", fix=fix)


def rate_at(verb: str, lr: Any, count: int) -> Any:
    """The learning rate of a step, checked."""
    if callable(lr):
        lr = lr(count)
        check_rate(verb, f"lr({count})", lr)
    return lr


def of_another(kind: str, state: Any) -> PlanError:
    """The error for a state that is not that of this optimizer."""
    text = f"opt_step: the state of the optimizer is of type {type(state).__name__}, "
    fix = "make it with init_state(params, optimizer), or load it with the optimizer of the save"
    return PlanError(f"{text}and not that of {kind}", fix=fix)


def check_rule(verb: str, lr: Rate, **numbers: Any) -> None:
    """Refuse options of an optimizer that have no meaning.

    Args:
      verb: the optimizer, for errors.
      lr: its learning rate, or a function of the step.
      numbers: of at least 0, by name; and `betas`, a pair of numbers from 0 to below 1.

    Raises:
      PlanError: an option is not what it should be.
    """
    if not callable(lr):
        check_rate(verb, "lr", lr)
    for i, beta in enumerate(numbers.pop("betas", ())):
        checks.number(verb, f"betas[{i}]", beta, least=0, below=1)
    for name, value in numbers.items():
        checks.number(verb, name, value, least=0)


def as_transform(optimizer: Any) -> Transform:
    """A `Transform` from an optimizer of this or of another library.

    Args:
      optimizer: a `Transform`, or an object with `init` and `update` as optax and torchopt define
        them, with the parameters as `params=`. It gets this rank's pieces as a dict from path to
        1D tensor.

    Raises:
      PlanError: it has no `init` and `update`.
    """
    if isinstance(optimizer, Transform):
        return optimizer
    for name in ("init", "update"):
        if not callable(getattr(optimizer, name, None)):
            what = getattr(optimizer, "__name__", type(optimizer).__name__)
            fix = "pass a Transform: adamw(1e-3), from_torch(torch.optim.SGD, lr=0.1), chain(a, b)"
            raise PlanError(f"{what} is not an optimizer of init and update", fix=fix)
    takes = inspect.signature(optimizer.update).parameters
    options: Any = {"inplace": False} if "inplace" in takes else {}  # of torchopt

    def plain(shards: Tree) -> dict[str, Tensor]:
        return dict(zip(names(shards), tree.flatten(shards)[0], strict=True))

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        updates, state = optimizer.update(plain(grads), state, params=plain(params), **options)
        return tree.flatten(grads)[1].unflatten([updates[path] for path in names(grads)]), state

    return from_update(lambda params: optimizer.init(plain(params)), update)


def _facts(parts: Mapping[str, Transform]) -> Facts | None:
    """Join the facts of parts under their names; None if one has none."""
    every = {name: part.facts for name, part in parts.items()}
    return None if None in every.values() else every


# `chain`: transforms in sequence, as clipping before an optimizer.


def chain(*transforms: Optimizer) -> Transform:
    """Transforms in sequence: each gets the updates of the one before it as gradients.

    Args:
      transforms: at least one; the last one takes the step.

    Returns:
      One `Transform`, whose state is the tuple of their states.

    Raises:
      PlanError: no transform was given, or one has no `init` and `update`.

    Example:
      >>> groups = make_groups(1)
      >>> optimizer = chain(optim.clip_by_global_norm(1.0, groups), optim.adamw(1e-3))
    """
    parts = [as_transform(part) for part in transforms]
    if not parts:
        raise PlanError("chain: needs at least one transform")

    def init(params: Tree) -> tuple:
        return tuple(part.init(params) for part in parts)

    def before_last(grads: Tree, states: Any, params: Tree) -> tuple[Tree, list]:
        if type(states) is not tuple or len(states) != len(parts):
            raise of_another(f"a chain of {len(parts)}", states)
        new = []
        for part, state in zip(parts[:-1], states[:-1], strict=True):
            grads, state = part.update(grads, state, params)
            new.append(state)
        return grads, new

    def update(grads: Tree, states: tuple, params: Tree) -> tuple[Tree, tuple]:
        grads, new = before_last(grads, states, params)
        grads, last = parts[-1].update(grads, states[-1], params)
        return grads, (*new, last)

    def step(grads: Unpacked, states: tuple, params: Unpacked, donate: bool) -> Stepped:
        given, new = before_last(grads.whole().shards, states, params.shards)
        new = as_before(new, list(states[:-1]))
        after, last = parts[-1].step(unpacked(given), states[-1], params, donate)
        return after, (*new, last)

    facts, asks = _facts({f"chain[{i}]": x for i, x in enumerate(parts)}), parts[-1].whole
    return Transform(init, update, step, facts, whole=asks)


# `by_path`: other transforms for some leaves, by patterns of their paths.


def by_path(transforms: Mapping[str, Any], *, default: Any = None) -> Transform:
    """Other transforms for some leaves: other learning rates, other optimizers, none at all.

    Each transform sees a tree of the leaves that are its own, and keeps a state for these alone; a
    norm in it is the norm of these.

    Args:
      transforms: by pattern; the leaves are those whose whole path, such as `h.0.weight`, it
        matches, as in a `Precision`: `*` stands for any characters and `?` for one, and if several
        patterns match, the last one counts.
      default: for all other leaves.

    Returns:
      A `Transform`, whose state is the tuple of their states, in the order of the patterns and with
      that of `default` last.

    Raises:
      PlanError: a transform has no `init` and `update`; or, when a state is made, a pattern has no
        leaf, or a leaf has neither a pattern nor a default.

    Example:
      >>> optimizer = by_path({"*embed*": optim.sgd(0.1)}, default=optim.sgd(0.5))
      >>> groups = make_groups(1)
      >>> params = shard({"embed": torch.ones(2), "w": torch.ones(2)}, groups)
      >>> state = init_state(params, optimizer)
      >>> state = opt_step(state, reduce_grads({k: torch.ones(2) for k in params}, groups))
      >>> state.params["embed"].data, state.params["w"].data
      (tensor([0.9000, 0.9000]), tensor([0.5000, 0.5000]))
    """
    patterns = tuple(transforms)
    parts = [as_transform(each) for each in transforms.values()]
    if default is not None:
        parts.append(as_transform(default))

    def owners_of(params: Unpacked) -> Sequence[int]:
        return _owners(tuple(params.paths), patterns, default is not None)

    def init(params: Tree) -> tuple:
        found = unpacked(params)
        shares = _shares(found, owners_of(found), len(parts))
        return tuple(part.init(share.shards) for part, share in zip(parts, shares, strict=True))

    def spread(call: Callable[..., Any], grads: Unpacked, states: tuple, params: Unpacked) -> Any:
        """The tree and the states that each part gives for its own leaves."""
        owners = owners_of(params)
        given, shares = (_shares(each, owners, len(parts)) for each in (grads, params))
        pairs = list(map(call, parts, given, states, shares))
        found = [iter(unpacked(each).pieces) for each, _ in pairs]
        new = params.with_pieces([next(found[owner]) for owner in owners])
        return new, tuple(state for _, state in pairs)

    def update(grads: Tree, states: tuple, params: Tree) -> tuple[Tree, tuple]:
        call = lambda part, g, s, p: part.update(g.shards, s, p.shards)  # noqa: E731
        found, after = spread(call, unpacked(grads), states, unpacked(params))
        return found.shards, after

    def step(grads: Unpacked, states: tuple, params: Unpacked, donate: bool) -> Stepped:
        call = lambda part, g, s, p: part.step(g, s, p, donate)  # noqa: E731
        return spread(call, grads, states, params)

    def whole(path: str) -> bool:
        mine = [i for i, pattern in enumerate(patterns) if matches(pattern, path)]
        asks = parts[mine[-1] if mine else -1].whole
        return asks is not None and asks(path)

    titles = [*(f"by_path[{pattern!r}]" for pattern in patterns), "by_path default"]
    facts = _facts(dict(zip(titles, parts, strict=False)))
    return Transform(init, update, step, facts, whole=whole)


@lru_cache(maxsize=64)
def _owners(paths: tuple[str, ...], patterns: tuple[str, ...], with_default: bool) -> Sequence[int]:
    """For each leaf the number of its transform; that of the default comes last."""
    found = []
    for path in paths:
        mine = [i for i, pattern in enumerate(patterns) if matches(pattern, path)]
        if not mine and not with_default:
            lines = [f"patterns: {', '.join(map(repr, patterns))}"]
            text = f"by_path: {path} matches no pattern, and there is no default"
            raise PlanError(text, lines, "pass default=, or a pattern that matches it")
        found.append(mine[-1] if mine else len(patterns))
    for i, pattern in enumerate(patterns):
        if i not in found:
            check_matched("by_path", [pattern], paths, leaf="trained leaf")
            text = f"by_path: {pattern!r} has only leaves that a later pattern matches, too"
            raise PlanError(text, fix="write the pattern of more leaves first")
    return found


def _shares(found: Unpacked, owners: Sequence[int], count: int) -> list[Unpacked]:
    """The tree of each part: its own leaves, and `Nothing` in the place of all others.

    A tied leaf has no data, and frozen ones are nobody's, so no part needs them.
    """
    number, shares = iter(owners), []
    by_leaf = [next(number) if isinstance(leaf, Sharded) else None for leaf in found.leaves]
    for part in range(count):
        pairs = zip(found.leaves, by_leaf, strict=True)
        leaves = [leaf if owner == part else Nothing() for leaf, owner in pairs]
        shares.append(found.part(leaves, [i for i, owner in enumerate(owners) if owner == part]))
    return shares


# What optimizers keep, and how they step on columns.


class OptimizerState(NamedTuple):
    """What an optimizer keeps from step to step.

    Args:
      count: steps done.
      moments: by torch's names, what it keeps for each element: `FlatShards` of the parameters'
        tree.
      scalars: by name, what torch keeps for each parameter: 0-dim tensors, equal for all leaves.
    """

    count: int
    moments: dict[str, FlatShards]
    scalars: dict[str, Tensor]


class Now(NamedTuple):
    """What a rule is given besides columns.

    Args:
      scalars: those of the state before the step.
      first: whether it is the first step.
      rate: the learning rate; None for the default of a class.
      decays: whether these columns decay.
      live: whether a derivative is asked for.
    """

    scalars: dict[str, Tensor]
    first: bool
    rate: Any
    decays: bool
    live: bool


# A rule writes to columns and gives the new scalars. It takes the parameters, each of the moments
# and the gradients as lists of tensors, and then `Now`.
Rule = Callable[..., dict[str, Tensor]]


def by_rule(
    verb: str, rule: Rule, options: Any, moments: tuple, scalars: tuple = (), begins: Any = None
) -> Transform:
    """Make a `Transform` of a rule.

    Args:
      verb: its name.
      rule: what it does to columns.
      options: by name, with `lr` and `decay_mask`.
      moments, scalars: the names of what it keeps.
      begins: gives what it begins with, by name and for one element of a parameter like a tensor;
        default zeros.
    """
    lr, mask = options["lr"], options["decay_mask"]

    def init(params: Tree) -> OptimizerState:
        like = next(iter(unpacked(params).pieces), torch.zeros(0))
        if like.is_meta or _torch.inside_torch_func():
            like = torch.zeros(0)
        first: Any = begins or (lambda name, like: torch.zeros((), device=like.device))
        kept = [flat.zeros(params, name, begins and partial(begins, name)) for name in moments]
        every = dict(zip(moments, kept, strict=True))
        return OptimizerState(0, every, {name: first(name, like) for name in scalars})

    @lru_cache(maxsize=8)
    def decays(paths: tuple[str, ...]) -> list[bool]:
        return [checks.answer(verb, f"decay_mask({path!r})", mask(path)) for path in paths]

    def step(grads: Unpacked, state: Any, params: Unpacked, donate: bool) -> Stepped:
        own = isinstance(state, OptimizerState)
        if not own or {*state.moments, *state.scalars} != {*moments, *scalars}:
            raise of_another(verb, state)
        keys = None if mask is None else decays(tuple(params.paths))
        rate = rate_at(verb, lr, state.count) if callable(lr) else lr
        targets = [params, *state.moments.values()]
        work = Columns(targets, [grads], keys, by=[rate], donate=donate)
        now = Now(state.scalars, state.count == 0, rate, True, work.live)
        after = _step_columns(rule, work, now)
        if after is None:
            # A rank that holds no element has to count steps nevertheless.
            device = params.pieces[0].device if params.pieces else torch.device("cpu")
            after = rule(*[[torch.zeros(1, device=device)]] * (2 + len(moments)), now)
        params, *kept = work.targets()
        kept = dict(zip(state.moments, kept, strict=True))
        return params, OptimizerState(state.count + 1, kept, after)

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        found, state = step(unpacked(grads), state, unpacked(params), False)
        return map_columns(lambda n, p: n.sub_(p), found.shards, params), state

    masked = verb in ("sgd", "adam", "adamw")  # by torch's fused kernels
    return Transform(init, update, step, {"optimizer": verb, **options}, masked)


def _step_columns(rule: Rule, work: Columns, now: Now) -> dict[str, Tensor] | None:
    """Apply a rule to all columns; gives the new scalars, or None if there are no columns."""
    after = None
    for block in work:
        by_key: dict[Any, list[Column]] = {}
        for column in block:
            key = column.key, column.tensors[0].dtype  # kernels take tensors of one dtype
            by_key.setdefault(key, []).append(column)
        for (decays, _), found in by_key.items():
            given = map(list, zip(*map(_TENSORS, found), strict=True))
            with updating(found):  # torch updates all of them in one call
                after = rule(*given, now._replace(decays=decays is not False))
    return after


def fused_skips(params: Iterable[Tensor]) -> bool:
    """Whether torch's fused SGD would skip most elements: pytorch issue 191763."""
    return any(p.itemsize == 2 and p.is_cpu for p in params)


# Optimizers by functions on columns: fused kernels of torch, or ops that have derivatives.


def sgd(
    lr: Rate,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay_mask: Mask | None = None,
) -> Transform:
    """Stochastic gradient descent, by torch's fused `SGD`.

    Args:
      lr: learning rate, a number or a 0-dim tensor, or a function of the step.
      momentum: how much of the running sum of gradients remains after a step.
      nesterov: take the gradient one step ahead (Nesterov's momentum).
      weight_decay: L2 penalty: this times the parameter is added to its gradient.
      decay_mask: whether a leaf is decayed, by its path; default all are.

    Returns:
      A `Transform`.

    Memory: one more copy of the shards with momentum, else none.

    Raises:
      PlanError: an option is out of its range, or of the wrong type.

    Example:
      >>> optimizer = sgd(0.1, momentum=0.9, nesterov=True)
    """
    options = {"momentum": momentum, "weight_decay": weight_decay}
    check_rule("sgd", lr, **options)
    checks.choice("sgd", "nesterov", nesterov, True, False)

    def rule(params: list, *given: Any) -> dict[str, Tensor]:
        *buffers, grads, now = given
        own: Any = {"momentum": momentum, "nesterov": nesterov, "lr": now.rate, "dampening": 0.0}
        own |= {"weight_decay": weight_decay if now.decays else 0.0, "maximize": False}
        own |= {"fused": not now.live and not fused_skips(params), "foreach": False}
        moving: list[Any] = buffers[0] if buffers else [None] * len(params)  # zeros at first
        _torch_sgd(params, grads, moving, found_inf=FOUND_INF.get(), **own)
        return {}

    options |= {"nesterov": nesterov, "lr": lr, "decay_mask": decay_mask}
    return by_rule("sgd", rule, options, ("momentum_buffer",) if momentum else ())


def adam(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_mask: Mask | None = None,
) -> Transform:
    """Adam (Kingma and Ba, arXiv:1412.6980) with an L2 penalty, by torch's fused `Adam`.

    Args:
      lr: learning rate, a number or a 0-dim tensor, or a function of the step.
      betas: how much of the running mean, and of the running square, remains after a step.
      eps: added to the denominator.
      weight_decay: L2 penalty: this times the parameter is added to its gradient.
      decay_mask: whether a leaf is decayed, by its path; default all are.

    Returns:
      A `Transform`.

    Memory: two more copies of the shards.

    Raises:
      PlanError: an option is out of its range, or of the wrong type.

    Example:
      >>> optimizer = adam(1e-3)
    """
    return _adam("adam", lr, decay_mask, betas=betas, eps=eps, weight_decay=weight_decay)


def adamw(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decay_mask: Mask | None = None,
) -> Transform:
    """Adam with decoupled weight decay (arXiv:1711.05101), by torch's fused `AdamW`.

    Args:
      lr: learning rate, a number or a 0-dim tensor, or a function of the step.
      betas: how much of the running mean, and of the running square, remains after a step.
      eps: added to the denominator.
      weight_decay: each step multiplies parameters by 1 - lr * weight_decay.
      decay_mask: whether a leaf is decayed, by its path; default all are.

    Returns:
      A `Transform`.

    Memory: two more copies of the shards.

    Raises:
      PlanError: an option is out of its range, or of the wrong type.

    Example:
      >>> optimizer = adamw(1e-3, decay_mask=lambda path: "bias" not in path)
    """
    return _adam("adamw", lr, decay_mask, betas=betas, eps=eps, weight_decay=weight_decay)


def _adam(verb: str, lr: Rate, decay_mask: Mask | None, **options: Any) -> Transform:
    check_rule(verb, lr, **options)
    (beta1, beta2), decoupled = options["betas"], verb == "adamw"

    def rule(params: list, means: list, squares: list, grads: list, now: Now) -> dict[str, Tensor]:
        count, before = len(params), now.scalars["step"]
        own: Any = {"beta1": beta1, "beta2": beta2, "eps": options["eps"], "lr": now.rate}
        own["weight_decay"] = options["weight_decay"] if now.decays else 0.0
        own |= {"amsgrad": False, "maximize": False}
        if not now.live:  # the kernel, without the host's time of torch's function around it
            step, found_inf = before.to(params[0].device) + 1, FOUND_INF.get()
            update = _torch.fused_adamw if decoupled else _torch.fused_adam
            update(params, grads, means, squares, [], [step] * count, found_inf=found_inf, **own)
            return {"step": step if found_inf is None else step - found_inf}
        # What torch computes from a count in float32 would have no more digits than that.
        steps = list(before.double().repeat(count).unbind())
        own |= {"foreach": False, "differentiable": True, "decoupled_weight_decay": decoupled}
        _torch_adam(params, grads, means, squares, [], steps, **own)
        return {"step": steps[0].to(before.dtype)}

    facts = {**options, "lr": lr, "decay_mask": decay_mask}
    return by_rule(verb, rule, facts, ("exp_avg", "exp_avg_sq"), ("step",))


def lion(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    decay_mask: Mask | None = None,
) -> Transform:
    """Lion (Chen et al., arXiv:2302.06675): steps along the sign of an interpolated gradient.

    Args:
      lr: learning rate, a number or a 0-dim tensor, or a function of the step.
      betas: weight of the running mean in the interpolation whose sign is taken, and how much of
        the running mean remains after a step.
      weight_decay: each step multiplies parameters by 1 - lr * weight_decay.
      decay_mask: whether a leaf is decayed, by its path; default all are.

    Returns:
      A `Transform`.

    Memory: one more copy of the shards.

    Raises:
      PlanError: an option is out of its range, or of the wrong type.

    Example:
      >>> optimizer = lion(1e-4, weight_decay=0.1)
    """
    options: dict[str, Any] = {"betas": betas, "weight_decay": weight_decay}
    check_rule("lion", lr, **options)

    def rule(params: list, means: list, grads: list, now: Now) -> dict[str, Tensor]:
        for p, m, g in zip(params, means, grads, strict=True):
            if now.decays:
                p.mul_(1 - now.rate * weight_decay)
            p.sub_(torch.lerp(m, g, 1 - betas[0]).sign_().mul_(now.rate))
            m.lerp_(g, 1 - betas[1])
        return {}

    return by_rule("lion", rule, options | {"lr": lr, "decay_mask": decay_mask}, ("exp_avg",))


# Learning rates.


def warmup_cosine(
    peak: float, warmup_steps: int, total_steps: int, floor: float = 0.0
) -> Callable[[int], float]:
    """A learning rate that rises linearly to `peak`, then falls along half a cosine to `floor`.

    Args:
      peak: the highest rate, reached at step `warmup_steps` - 1.
      warmup_steps: how many steps the rise takes.
      total_steps: the first step at which the rate has reached `floor`.
      floor: the lowest rate.

    Returns:
      A function from the step, counted from 0, to the rate, which optimizers take as `lr`.

    Raises:
      PlanError: the warmup leaves no step to fall in.

    Example:
      >>> lr = warmup_cosine(1.0, 2, 6)
      >>> [round(lr(step), 3) for step in range(7)]
      [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if not 0 <= warmup_steps < total_steps:
        text = f"warmup_cosine: warmup_steps={warmup_steps}, total_steps={total_steps}"
        raise PlanError(text, fix="the order is peak, warmup_steps, total_steps, floor")

    def lr(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return lr
