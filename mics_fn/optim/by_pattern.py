"""`by_path`: other transforms for some leaves, by patterns of their paths."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mics_fn.errors import OptimizerError, message
from mics_fn.optim.flat import Unpacked, unpacked
from mics_fn.optim.transform import Facts, Transform, as_transform, step_of
from mics_fn.patterns import check_matched, matches
from mics_fn.shards import Nothing, Sharded
from mics_fn.tree import Tree


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
      OptimizerError: there is no pattern, or a transform has no `init` and `update`. When a state
        is made also if a pattern has no leaf, or if a leaf has neither a pattern nor a default.

    Example:
      >>> optimizer = by_path({"*embed*": optim.sgd(0.1)}, default=optim.sgd(0.5))
      >>> groups = make_groups(1)
      >>> params = shard({"embed": torch.ones(2), "w": torch.ones(2)}, groups)
      >>> state = init_state(params, optimizer)
      >>> state = opt_step(state, reduce_grads({k: torch.ones(2) for k in params}, groups))
      >>> state.params["embed"].data, state.params["w"].data
      (tensor([0.9000, 0.9000]), tensor([0.5000, 0.5000]))
    """
    texts = isinstance(transforms, Mapping) and all(isinstance(each, str) for each in transforms)
    if not texts or not transforms:
        text = f"by_path: transforms={transforms!r:.60}"
        fix = "pass a dict from patterns to transforms, such as {'*embed*': optim.sgd(0.1)}"
        raise OptimizerError(message(text, fix=fix))
    patterns = list(transforms)
    parts = [as_transform(each) for each in transforms.values()]
    if default is not None:
        parts.append(as_transform(default))

    def owners(paths: Sequence[str]) -> list[int]:
        return _owners(paths, patterns, with_default=default is not None)

    def init(params: Tree) -> tuple:
        found = unpacked(params)
        shares = _shares(found, owners(found.paths), len(parts))
        return tuple(part.init(share.closed()) for part, share in zip(parts, shares, strict=True))

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
        call = lambda part, g, s, p: part.update(g.closed(), s, p.closed())  # noqa: E731
        found, after = spread(call, unpacked(grads), states, unpacked(params))
        return found.closed(), after

    def step_unpacked(
        grads: Unpacked, states: tuple, params: Unpacked, donate: bool
    ) -> tuple[Unpacked, tuple]:
        call = lambda part, g, s, p: step_of(part, g, s, p, donate)  # noqa: E731
        return spread(call, grads, states, params)

    def step(grads: Tree, states: tuple, params: Tree, donate: bool) -> tuple[Tree, tuple]:
        found, after = step_unpacked(unpacked(grads), states, unpacked(params), donate)
        return found.closed(), after

    return Transform(init, update, step, step_unpacked, _facts(patterns, parts, owners))


def _owners(paths: Sequence[str], patterns: Sequence[str], with_default: bool) -> list[int]:
    """For each leaf the number of its transform; that of the default comes last."""
    found = []
    for path in paths:
        mine = [i for i, pattern in enumerate(patterns) if matches(pattern, path)]
        if not mine and not with_default:
            lines = [f"patterns: {', '.join(map(repr, patterns))}"]
            text = f"by_path: {path} matches no pattern, and there is no default"
            raise OptimizerError(
                message(text, lines, "pass default=, or a pattern that matches it")
            )
        found.append(mine[-1] if mine else len(patterns))
    for i, pattern in enumerate(patterns):
        if i not in found:
            check_matched("by_path", [pattern], paths, leaf="trained leaf", kind=OptimizerError)
            text = f"by_path: {pattern!r} has only leaves that a later pattern matches, too"
            raise OptimizerError(message(text, fix="write the pattern of more leaves first"))
    return found


def _shares(found: Unpacked, owners: Sequence[int], count: int) -> list[Unpacked]:
    """The tree of each part: its own leaves, and `Nothing` in the place of all others.

    A tied leaf has no data, and frozen ones are nobody's, so no part needs them.
    """
    number = iter(owners)
    by_leaf = [next(number) if _is_held(leaf) else None for leaf in found.leaves]
    shares = []
    for part in range(count):
        leaves = [
            leaf if owner == part else Nothing()
            for leaf, owner in zip(found.leaves, by_leaf, strict=True)
        ]
        shares.append(found.part(leaves, [i for i, owner in enumerate(owners) if owner == part]))
    return shares


def _is_held(leaf: Any) -> bool:
    return isinstance(leaf, Sharded | Tensor)


def _facts(
    patterns: Sequence[str],
    parts: Sequence[Transform],
    owners: Callable[[Sequence[str]], list[int]],
) -> Facts | None:
    """The facts of all transforms, each under its pattern; None if one has none."""
    every = [part.facts for part in parts]
    if None in every:
        return None

    def facts(paths: Sequence[str]) -> dict[str, str]:
        mine, found = owners(paths), {}
        for i, each in enumerate(every):
            title = f"by_path[{patterns[i]!r}]" if i < len(patterns) else "by_path default"
            own = [path for path, owner in zip(paths, mine, strict=True) if owner == i]
            found[f"{title}: leaves"] = f"{own}"
            texts = each(own) if each is not None else {}
            found |= {f"{title}: {name}": text for name, text in texts.items()}
        return found

    return facts
