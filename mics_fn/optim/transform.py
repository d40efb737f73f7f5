"""Optimizers, and parts of optimizers, as pure functions over trees of shards."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, checks, tree
from mics_fn.checks import check_matched, matches
from mics_fn.errors import LeafError, PlanError
from mics_fn.optim import columns
from mics_fn.optim.flat import Unpacked, as_before, lazy_grads, unpacked
from mics_fn.shards import Nothing, Sharded, is_leaf, names
from mics_fn.tree import Tree

# A learning rate, or a function from the step, counted from 0, to one. A tensor may be
# differentiated by.
Rate = float | Tensor | Callable[[int], float | Tensor]
Facts = Mapping[str, Any]  # see `Transform`
Mask = Callable[[str], bool]  # from the path of a leaf to whether it is selected
Optimizer = Any  # what can be made a `Transform`: an object with `init` and `update`


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
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    step: Callable[[Unpacked, Any, Unpacked, bool], tuple[Unpacked, Any]]
    facts: Facts | None = None
    masked: bool = False


def from_update(
    init: Callable[[Tree], Any],
    update: Callable[..., tuple[Tree, Any]],
    facts: Facts | None = None,
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

    def step(grads: Unpacked, state: Any, params: Unpacked, donate: bool) -> tuple[Unpacked, Any]:
        updates, after = update(grads.whole().shards, state, params.shards)
        updates = unpacked(updates)
        where = _difference(updates, params)
        if where:
            fix = "return (updates, state) with updates as shards.map makes them from the gradients"
            what = "from_update: the updates that update gave do not fit the parameters"
            raise LeafError(what, [where], fix)
        found = columns.map_columns(lambda p, u: p.add_(u), params, updates, donate=donate)
        return unpacked(found), as_before(after, state)

    return Transform(init, update, step, facts)


def _difference(updates: Unpacked, params: Unpacked) -> str:
    """Where updates do not fit the parameters, in words; "" if they do."""
    if updates.spec != params.spec:
        return tree.first_mismatch(params.shards, updates.shards, "updates", is_leaf)
    _, _, lengths, _ = params.geometry
    _, _, others, _ = updates.geometry
    if lengths == others:
        return ""
    rows = zip(params.paths, lengths, others, strict=True)
    path, want, got = next(row for row in rows if row[1] != row[2])
    return f"{tree.join('updates', path)}: expected a piece of {want} elements, got {got}"


def check_rate(verb: str, name: str, lr: Any, fix: str) -> None:
    """Raise PlanError unless a rate is a number of at least 0, or a tensor with such a number.

    The number in a tensor on an accelerator is not looked at, because the host would wait for it.
    """
    if not isinstance(lr, Tensor):
        checks.number(verb, name, lr, least=0, fix=fix)
        return
    if lr.ndim or lr.is_complex() or lr.is_meta or lr.dtype == torch.bool:
        what = f"a tensor of shape {tuple(lr.shape)} and {lr.dtype} on {lr.device}"
        text = f"{verb}: {name} is {what}, expected a number"
        raise PlanError(text, fix="pass a number, or torch.tensor(number)")
    # The number is looked at where nothing is waited for or cut off by that.
    plain = type(lr) in (Tensor, torch.nn.Parameter) and not _torch.is_wrapped(lr)
    if plain and lr.is_cpu and not _torch.is_tracing():
        checks.number(verb, name, lr.item(), least=0, fix=fix)


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
    if not callable(lr) or isinstance(lr, type):
        fix = "pass a number such as 1e-3, a 0-dim tensor, or a function of the step"
        check_rate(verb, "lr", lr, fix)
    for name, value in numbers.items():
        if name != "betas":
            checks.number(verb, name, value, least=0)
            continue
        for i, beta in zip(range(2), value, strict=True):
            checks.number(verb, f"betas[{i}]", beta, least=0, below=1)


def as_transform(optimizer: Any) -> Transform:
    """A `Transform` from an optimizer of this or of another library.

    Args:
      optimizer: a `Transform`, or an object with `init` and `update` as optax and torchopt define
        them. Such an object gets this rank's pieces as a dict from path to 1D tensor.

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
    options = {"inplace": False} if "inplace" in takes else {}
    by_name = "params" in takes and takes["params"].kind is inspect.Parameter.KEYWORD_ONLY

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        plain = _plain(params)
        given, named = ((), {"params": plain}) if by_name else ((plain,), {})
        updates, state = optimizer.update(_plain(grads), state, *given, **named, **options)
        return tree.flatten(grads)[1].unflatten([updates[path] for path in names(grads)]), state

    return from_update(lambda params: optimizer.init(_plain(params)), update)


def _facts(parts: Mapping[str, Transform]) -> Facts | None:
    """Join the facts of parts under their names; None if one has none."""
    every = {name: part.facts for name, part in parts.items()}
    return None if None in every.values() else every


def _plain(shards: Tree) -> dict[str, Tensor]:
    return dict(zip(names(shards), tree.flatten(shards)[0], strict=True))


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

    def check(states: Any) -> None:
        if type(states) is not tuple or len(states) != len(parts):
            raise of_another(f"a chain of {len(parts)}", states)

    def before_last(grads: Tree, states: tuple, params: Tree) -> tuple[Tree, list]:
        new = []
        for part, state in zip(parts[:-1], states[:-1], strict=True):
            grads, state = part.update(grads, state, params)
            new.append(state)
        return grads, new

    def update(grads: Tree, states: tuple, params: Tree) -> tuple[Tree, tuple]:
        check(states)
        grads, new = before_last(grads, states, params)
        grads, last = parts[-1].update(grads, states[-1], params)
        return grads, (*new, last)

    def step(
        grads: Unpacked, states: tuple, params: Unpacked, donate: bool
    ) -> tuple[Unpacked, tuple]:
        check(states)
        new: list[Any] = []

        def made() -> Tree:
            given, found = before_last(grads.whole().shards, states, params.shards)
            new.extend(as_before(found, list(states[:-1])))
            return given

        # See [Note: states come first] in `columns`. What the others have in files comes through
        # the same memory, and so before.
        lazy = columns.needs_fetch(params, states[-1]) and not columns.needs_fetch([], states[:-1])
        given = unpacked(lazy_grads(grads.shards, made) if lazy else made())
        after, last = parts[-1].step(given, states[-1], params, donate)
        return after, (*new, last)

    return Transform(init, update, step, _facts({f"chain[{i}]": x for i, x in enumerate(parts)}))


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
    patterns = list(transforms)
    parts = [as_transform(each) for each in transforms.values()]
    if default is not None:
        parts.append(as_transform(default))

    def owners(paths: Sequence[str]) -> list[int]:
        return _owners(paths, patterns, with_default=default is not None)

    def init(params: Tree) -> tuple:
        found = unpacked(params)
        shares = _shares(found, owners(found.paths), len(parts))
        return tuple(part.init(share.shards) for part, share in zip(parts, shares, strict=True))

    def spread(call: Callable[..., Any], grads: Unpacked, states: tuple, params: Unpacked) -> Any:
        """The tree and the states that each part gives for its own leaves."""
        mine = owners(params.paths)
        shares = _shares(params, mine, len(parts))
        given = _shares(grads, mine, len(parts))
        pairs = [
            call(part, gradient, state, share)
            for part, gradient, state, share in zip(parts, given, states, shares, strict=True)
        ]
        found = [iter(unpacked(each).pieces) for each, _ in pairs]
        tree = params.with_pieces([next(found[owner]) for owner in mine])
        return tree, tuple(state for _, state in pairs)

    def update(grads: Tree, states: tuple, params: Tree) -> tuple[Tree, tuple]:
        call = lambda part, g, s, p: part.update(g.shards, s, p.shards)  # noqa: E731
        found, after = spread(call, unpacked(grads), states, unpacked(params))
        return found.shards, after

    def step(
        grads: Unpacked, states: tuple, params: Unpacked, donate: bool
    ) -> tuple[Unpacked, tuple]:
        call = lambda part, g, s, p: part.step(g, s, p, donate)  # noqa: E731
        return spread(call, grads, states, params)

    titles = [*(f"by_path[{pattern!r}]" for pattern in patterns), "by_path default"]
    return Transform(init, update, step, _facts(dict(zip(titles, parts, strict=False))))


def _owners(paths: Sequence[str], patterns: Sequence[str], with_default: bool) -> list[int]:
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
    number = iter(owners)
    by_leaf = [
        next(number) if isinstance(leaf, Sharded | Tensor) else None for leaf in found.leaves
    ]
    shares = []
    for part in range(count):
        leaves = [
            leaf if owner == part else Nothing()
            for leaf, owner in zip(found.leaves, by_leaf, strict=True)
        ]
        shares.append(found.part(leaves, [i for i, owner in enumerate(owners) if owner == part]))
    return shares
