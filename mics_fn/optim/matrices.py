"""Optimizers of whole matrices, such as Muon, Adafactor and a researcher's own.

Each matrix lies on one rank of a partition group, which steps it alone: a step sends nothing, and
r replicas do the same work. With `placement.hybrid` each matrix lies once in the world.

[Note: what a matrix keeps] Tensors of the shape of the parameter are kept as `FlatShards`, so they
may be codes, or lie on the host, as the moments of any optimizer. All others, such as the factors
of Adafactor or Shampoo, are shards of companions: buckets that lay a tensor of any shape on the
rank that has the matrix. They are values on the device. All are saved and loaded as any shard.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, checks, shards, tree
from mics_fn.checks import check_matched
from mics_fn.errors import FileError, LeafError, PlanError, human_bytes, message
from mics_fn.offload import in_file, placed_like, read, scratch
from mics_fn.optim import flat
from mics_fn.optim.columns import Columns, map_columns, updating
from mics_fn.optim.flat import FlatShards, Unpacked, unpacked
from mics_fn.optim.optimizers import Facts, Rate, Transform, check_rule, of_another, rate_at
from mics_fn.optim.state import TrainState
from mics_fn.shards import Bucket, Fixed, Sharded, companion, is_leaf, pieces
from mics_fn.tree import Tree

Kept = dict[str, Tensor]
MatrixStep = Callable[[str, Tensor, Tensor, Kept], None]  # with the path of the leaf first
_OTHERS = "give it matrices alone, by by_path; and the rest another optimizer"


class MatrixState(NamedTuple):
    """What an optimizer of whole matrices keeps; see [Note: what a matrix keeps].

    Args:
      count: steps done.
      moments: by name, what has the shapes of the parameters.
      factors: by path and name, everything else.
    """

    count: int
    moments: dict[str, FlatShards]
    factors: dict[str, dict[str, Sharded]]


def matrixwise(
    init: Callable[[Tensor], Kept],
    step: Callable[[Tensor, Tensor, Kept, int], None],
    *,
    facts: Facts | None = None,
    stacked: Mapping[str, int] | None = None,
) -> Transform:
    """Make a `Transform` of what is done to one whole matrix; a step of it sends nothing.

    Args:
      init: `init(matrix) -> kept`, tensors by name, each of any shape. It may be given a matrix on
        meta, and then gives tensors there.
      step: `step(matrix, grad, kept, count)` writes the new values into `matrix` and `kept`, and
        leaves `grad` as it is; `count` is the number of steps done before.
      facts: its options by name, for ranks to compare. Without it they compare nothing, and say so.
      stacked: of how many matrices of equal size, one below the other, a leaf consists, by pattern
        of its path, as {"*qkv*": 3}. A leaf of more dims is a stack of its last two, as experts.

    Returns:
      A `Transform`, whose `whole` is for `shard`. It has no derivatives.

    Memory: what `init` keeps, for the matrices of this rank.

    Raises:
      LeafError: when a state is made, a leaf is no matrix, or is cut between ranks.
      PlanError: a derivative is asked for.

    Example:
      >>> def step(p, g, kept, count):  # along the gradient, scaled to a norm of 1
      ...     p.sub_(g / g.norm(), alpha=0.1)
      >>> optimizer = matrixwise(lambda p: {}, step)
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.zeros(2, 2)}, groups, whole=optimizer.whole)
      >>> grads = reduce_grads({"w": torch.ones(2, 2)}, groups, like=shards)
      >>> opt_step(init_state(shards, optimizer), grads).params["w"].data
      tensor([-0.0500, -0.0500, -0.0500, -0.0500])
    """

    def at(count: int) -> MatrixStep:
        return lambda path, matrix, grad, kept: step(matrix, grad, kept, count)

    return Matrixwise("matrixwise", init, at, dict(stacked or {})).transform(facts)


def muon(
    lr: Rate,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    adjust_lr_fn: str | None = None,
    ns_steps: int = 5,
    stacked: Mapping[str, int] | None = None,
) -> Transform:
    """Muon (Jordan et al., 2024), by the arithmetic of `torch.optim.Muon`, on whole matrices.

    Give it the matrices of hidden layers, by `by_path`, and another optimizer the rest.

    Args:
      lr: learning rate, a number or a 0-dim tensor, or a function of the step.
      momentum: how much of the running mean of gradients remains after a step.
      nesterov: take the gradient one step ahead (Nesterov's momentum).
      weight_decay: each step multiplies parameters by 1 - lr * weight_decay.
      adjust_lr_fn: how the rate depends on the shape: "original", which None means too, or
        "match_rms_adamw", with which rates and decay are those of AdamW (arXiv:2502.16982).
      ns_steps: iterations of Newton and Schulz, which orthogonalize the update.
      stacked: of how many matrices a leaf consists, as for `matrixwise`.

    Returns:
      A `Transform`, whose `whole` is for `shard`. Each rank orthogonalizes the matrices it holds.

    Memory: one more copy of the shards.

    Raises:
      PlanError: an option is out of its range, or of the wrong type.

    Example:
      >>> matrices = {"*attention*weight": muon(0.02), "*mlp*weight": muon(0.02)}
      >>> optimizer = optim.by_path(matrices, default=optim.adamw(3e-4))
    """
    check_rule("muon", lr, momentum=momentum, weight_decay=weight_decay)
    checks.number("muon", "ns_steps", ns_steps, least=1, below=100)
    checks.choice("muon", "nesterov", nesterov, True, False)
    checks.choice("muon", "adjust_lr_fn", adjust_lr_fn, None, "original", "match_rms_adamw")
    options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
    options |= {"weight_decay": weight_decay, "adjust_lr_fn": adjust_lr_fn}

    def at(count: int) -> MatrixStep:
        rate = rate_at("muon", lr, count)

        def step(path: str, matrix: Tensor, grad: Tensor, kept: Kept) -> None:
            _torch.muon(matrix, grad, kept["momentum_buffer"], lr=rate, **options)

        return step

    facts = {"optimizer": "muon", **options, "lr": lr}
    begin = lambda matrix: {"momentum_buffer": torch.zeros_like(matrix)}  # noqa: E731
    return Matrixwise("muon", begin, at, dict(stacked or {})).transform(facts)


@dataclass(frozen=True)
class Matrixwise:
    """What is done to one matrix, done to the matrices of a tree.

    Args:
      verb: its name.
      init: gives what is kept for one.
      at: gives what a step does to one, by the number of steps done.
      stacked: as of `matrixwise`; None takes leaves of any shape as they are.
    """

    verb: str
    init: Callable[[Tensor], Kept]
    at: Callable[[int], MatrixStep]
    stacked: Mapping[str, int] | None

    def transform(self, facts: Facts | None) -> Transform:
        """Make a `Transform` of it."""
        return Transform(self.start, self.update, self.step, facts, whole=lambda path: True)

    def forms(self, params: Unpacked) -> list[tuple[int, ...]]:
        """The shape of each leaf as a stack of matrices, (number, *shape of one)."""
        check_matched(f"{self.verb}: stacked", list(self.stacked or ()), params.paths)
        return [
            _form(self.verb, path, bucket, slot, self.stacked)
            for path, bucket, slot in zip(params.paths, *params.geometry[:2], strict=True)
        ]

    def start(self, params: Tree) -> MatrixState:
        """The state before the first step."""
        found = unpacked(params)
        if _torch.inside_torch_func():
            raise _no_derivative(self.verb)
        pairs = zip(found.pieces, self.forms(found), strict=True)
        kept = [_begun(self.init, x, form) for x, form in pairs]
        names = dict.fromkeys(name for each in kept for name in each)
        alike = [name for name in names if _is_moment(name, kept, found)]
        return MatrixState(0, _moments(found, kept, alike), _factors(found, kept, alike))

    def step(
        self, grads: Unpacked, state: MatrixState, params: Unpacked, donate: bool
    ) -> tuple[Unpacked, MatrixState]:
        """As `step` of a `Transform`."""
        if not isinstance(state, MatrixState):
            raise of_another(self.verb, state)
        forms, paths, run = self.forms(params), params.paths, self.at(state.count)
        factors = {
            path: {
                name: Sharded(x.data if donate else x.data.clone(), x.bucket, x.slot)
                for name, x in own.items()
            }
            for path, own in state.factors.items()
        }
        keys = range(len(paths))  # so that each column is one leaf
        work = Columns([params, *state.moments.values()], [grads], keys, donate=donate, entire=True)
        if work.live or params.geometry[3] is not None:  # or pieces have batch dimensions
            raise _no_derivative(self.verb)
        for block in work:
            for column in block:
                key: Any = column.key
                number, *shape = forms[key]
                matrices, *moments, given = (_stack(x, number, shape) for x in column.tensors)
                own: dict[str, Any] = dict(zip(state.moments, moments, strict=True))
                for name, x in factors.get(paths[key], {}).items():
                    own[name] = x.data.view(number, *x.shape[number > 1 :])
                with updating([column]):
                    for j in range(number):
                        mine = {name: x[j] for name, x in own.items()}
                        _step_one(run, paths[key], matrices[j], given[j], mine)
        after, *kept = work.targets()
        kept = dict(zip(state.moments, kept, strict=True))
        return after, MatrixState(state.count + 1, kept, factors)

    def update(self, grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        """As `update` of a `Transform`."""
        found, state = self.step(unpacked(grads), state, unpacked(params), False)
        return map_columns(lambda n, p: n.sub_(p), found.shards, params), state


def _form(
    verb: str, path: str, bucket: Bucket, slot: int, stacked: Mapping[str, int] | None
) -> tuple[int, ...]:
    """A leaf as a stack of matrices, (number, *shape of one)."""
    shape = bucket.shapes[slot]
    if not prod(shape):
        raise LeafError(f"{verb}: {path} of shape {shape} has no elements", fix=_OTHERS)
    if not bucket.whole:
        fix = "shard with whole=optimizer.whole; Trainer does, where it gets no params="
        raise LeafError(f"{verb}: {path} may be cut between ranks", fix=fix)
    if stacked is None and not bucket.cut:
        return (1, *shape)
    stacked = stacked or {}
    own = [number for pattern, number in stacked.items() if checks.matches(pattern, path)]
    number = own[-1] if own else prod(shape[:-2])
    if bucket.cut and (own or bucket.cut[slot] >= len(shape) - 2):
        what = f"{verb}: {path} of shape {shape} is one of the parts of a matrix, cut along dim"
        raise LeafError(f"{what} {bucket.cut[slot]}", fix=_OTHERS)
    if len(shape) < 2 or number < 1 or prod(shape[:-1]) % number:
        what = f"{verb}: {path} of shape {shape} is no matrix, and no stack of {number}"
        raise LeafError(what, fix=_OTHERS)
    return (number, prod(shape[:-1]) // number, shape[-1])


def _stack(x: Tensor, number: int, shape: Sequence[int]) -> Tensor:
    """The matrices of a leaf in a column, which may go on to a whole line."""
    return x[: number * prod(shape)].view(number, *shape)


def _begun(init: Callable[[Tensor], Kept], piece: Tensor, form: tuple[int, ...]) -> Kept:
    """What is kept for the matrices of a leaf at first; on meta where another rank has them."""
    (number, *_), here = form, piece.numel() > 0
    stack = read(piece).view(form) if here else torch.empty(form, dtype=piece.dtype, device="meta")
    with torch.no_grad():
        every = [init(x) for x in stack]
        if number > 1:
            every = [{name: torch.stack([each[name] for each in every]) for name in every[0]}]
    return {name: x if here else x.to("meta") for name, x in every[0].items()}


def _piece(x: Tensor, like: Tensor) -> Tensor:
    """This rank's part of what is kept: all of it, flat, or nothing."""
    if x.is_meta and not like.is_meta:
        return torch.empty(0, dtype=x.dtype, device=like.device)
    return x.to(like.device).contiguous().view(-1)


def _is_moment(name: str, kept: Sequence[Kept], found: Unpacked) -> bool:
    """Whether all leaves keep a tensor of this name that has their number of elements."""
    numels = [bucket.numels[slot] for bucket, slot in zip(*found.geometry[:2], strict=True)]
    pairs = zip(kept, numels, strict=True)
    return all(name in own and own[name].ndim > 1 and own[name].numel() == n for own, n in pairs)


def _moments(found: Unpacked, kept: Sequence[Kept], names: Sequence[str]) -> dict[str, FlatShards]:
    layout, moments = found.layout(), dict[str, FlatShards]()
    for name in names:
        wholes = []
        for r, run in enumerate(layout.runs):
            (i,) = run.members
            x = _piece(kept[i][name], found.pieces[i])
            wholes.append(flat.made(layout, r, x, name))
        moments[name] = flat.with_wholes(layout, wholes)
    _check_files(found, list(moments.values()))
    return moments


def _check_files(found: Unpacked, moments: Sequence[FlatShards]) -> None:
    """Raise FileError if what is in files of a matrix does not travel in one part."""
    for r, run in enumerate(found.layout().runs):
        row: list[Any] = [found.pieces[run.members[0]], *(x.wholes[r] for x in moments)]
        here = [x for x in row if in_file(x)]
        sizes = [x.extent.scratch.host_bytes for x in here]
        most = scratch.block_bytes(min(sizes, default=0))
        if (needed := sum(x.nbytes for x in here)) > most:
            text = f"init_state: {here[-1].leaf} and what is stepped with it take "
            text += f"{human_bytes(needed)}; of files {human_bytes(most)} travel at a time at most"
            fix = "give host_bytes= of where more, or use states=host"
            raise FileError(message(text, fix=fix), leaf=here[-1].leaf)


def _factors(
    found: Unpacked, kept: Sequence[Kept], moments: Sequence[str]
) -> dict[str, dict[str, Sharded]]:
    """What is kept besides moments, in companions of the buckets."""
    shapes, factors = defaultdict[Any, dict](dict), dict[str, dict[str, Sharded]]()
    others = [sorted(own.keys() - {*moments}) for own in kept]
    rows = list(zip(found.paths, found.trained, kept, others, strict=True))
    for _, leaf, own, names in rows:
        for name in names:
            shapes[leaf.bucket, own[name].dtype, name][leaf.slot] = tuple(own[name].shape)
    made = {key: companion(key[0], key[1], key[2], shapes[key]) for key in shapes}
    for path, leaf, own, names in rows:
        for name in names:
            bucket, data = made[leaf.bucket, own[name].dtype, name], _piece(own[name], leaf.data)
            factors.setdefault(path, {})[name] = Sharded(data, bucket, leaf.slot)
    return factors


def _step_one(run: MatrixStep, path: str, matrix: Tensor, grad: Tensor, kept: Kept) -> None:
    """Step one matrix; what is kept may be written to, or replaced."""
    new = dict(kept)
    with torch.no_grad():
        run(path, matrix, grad, new)
        for name, x in kept.items():
            if new[name] is not x:
                x.copy_(new[name])


def _no_derivative(verb: str) -> PlanError:
    fix = "call it outside of torch.func, under torch.no_grad()"
    return PlanError(f"opt_step: {verb} has no derivative, and here one is asked for", fix=fix)


# Between layouts: a run may take up or leave an optimizer of whole matrices.


def relayout(state: TrainState, like: TrainState, groups: Any) -> TrainState:
    """Lay out the values of a state as those of another one, which has other buckets.

    Args:
      state: the state, which stays as it is.
      like: one of the same model and optimizer, as `init_state` makes it for other shards, such as
        those of `shard(params, groups, whole=optimizer.whole)`.
      groups: those of both.

    Returns:
      A new state with the layout and the places of `like`, and the values of `state`.

    Communication: each bucket of parameters and moments is gathered once.

    Memory: a second state, and one full bucket at a time.

    Raises:
      LeafError: the two have other leaves, such as those of another optimizer; a leaf of `like` is
        missing in `state`.

    Example:
      >>> groups, sgd = make_groups(1), optim.sgd(0.1, momentum=0.9)
      >>> values = {"w": torch.ones(2, 2)}
      >>> flat, whole = (shard(values, groups, whole=x) for x in (None, lambda path: True))
      >>> state = relayout(init_state(flat, sgd), init_state(whole, sgd), groups)
      >>> state.params["w"].bucket.whole
      True
    """
    given, goal = ((x.params, flat.by_leaf(x.opt)) for x in (state, like))
    before, into = tree.flatten(given, is_leaf), tree.flatten(goal, is_leaf)
    where = tree.first_mismatch(goal, given, "state", is_leaf)
    if before[1] != into[1] or where:
        lines, fix = [where] if where else [], "make both for one model, with the same optimizer"
        raise LeafError("relayout: the states have other leaves", lines, fix)
    leaves = list(before[0])
    data = [x.data for x in leaves if isinstance(x, Sharded | Fixed)]
    shards.refuse_derivative("relayout", data, "call it outside, and differentiate what came back")
    by_bucket: dict[Bucket, list[int]] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, Sharded | Fixed) and x.bucket is not None:
            by_bucket.setdefault(x.bucket, []).append(i)
    for mine in by_bucket.values():
        full = shards.unshard([leaves[i] for i in mine], groups)
        for i, values in zip(mine, full, strict=True):
            leaves[i] = _cut(values, into[0][i], groups)
    params, opt = into[1].unflatten(leaves)
    opt = flat.replaced(like.opt, goal[1], opt)
    return replace(state, params=params, opt=opt, transform=like.transform)


def _cut(values: Tensor, like: Any, groups: Any) -> Any:
    """This rank's piece of a full leaf, where another one lies."""
    piece = pieces(like.bucket, groups.hierarchy.route.chunk)[like.slot]
    data = values.reshape(-1)[piece.origin : piece.origin + piece.length].clone()
    (data,) = placed_like([data], [like.data])
    return type(like)(data, like.bucket, like.slot)
