"""What ranks compare of states: options, steps, and the bits of replicas; and how one is mended.

An optimizer is a few functions, which ranks cannot compare. So a `Transform` has `facts`, its
options by name. A learning rate that is a function of the step is compared at steps 0, 1, 10 and
1,000, and a mask by the leaves that it selects.

A rank that lacks a state takes it from a replica, by a broadcast in its replication group. Ranks
that need nothing take nothing of it.

[Note: one step] A rank that was interrupted may be a step behind the others. Its shards must not be
mixed with theirs: every number would stay finite, and the result would be the state of no step. So
the first `opt_step` with gradients that come from new groups compares `state.step` over them before
anything is written, and with it the options of the optimizer. `Trainer` compares both earlier.

[Note: drift] Every step adds the same update to each replica, so one that differs, by a bit that
flipped or by a rule that some ranks did not apply, differs for ever, and the loss hardly shows it.
So a sum of 64 bits of each leaf of parameters, moments and averaged buffers is compared between
replicas. It is collected from all ranks, so that all of them know who differs, and in what.
"""

import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, checks, collectives, errors, shards, tree
from mics_fn._version import __version__
from mics_fn.collectives import checksum, levels, refuse_unequal
from mics_fn.groups import Groups
from mics_fn.offload import is_placed, read
from mics_fn.optim import as_before, by_leaf, fresh

# Options that change numbers: compared between ranks before the first step, by name.

Facts = Mapping[str, str]
_STEPS = (0, 1, 10, 1_000)
_VERSION = "version of "
_OPTIONS = "options"  # in `Groups.agreed`: those of an optimizer were compared


def same_options(verb: str, facts: Facts, homes: Iterable[Any]) -> None:
    """Compare options between the ranks of groups.

    Args:
      verb: the call, for errors.
      facts: texts by the name of the option.
      homes: the groups of the leaves.

    Communication: 32 bytes over each partition group and each replication group.

    Raises:
      DesyncError: on all ranks, naming the first option that differs, and who has what.
    """
    fix = "pass the same options, and use one version, on all ranks"
    mine = [(_OPTIONS, f"{name}: {text}") for name, text in sorted({**facts, **versions()}.items())]
    for home in _distinct(homes):
        if len(home.state.ranks) > 1:
            collectives.agree(home, verb, mine, {_OPTIONS: fix})
            home.agreed.add(_OPTIONS)


def differing(said: Sequence[Facts]) -> tuple[list[str], list[str]]:
    """The names of options that differ: those that change numbers, and small steps of versions."""
    names = sorted({name for each in said for name in each})
    odd = [name for name in names if len({each.get(name) for each in said}) > 1]
    # A version is near if it is the same up to its first dot.
    near = [name for name in odd if len({x.get(name, "").split(".")[0] for x in said}) == 1]
    small = [name for name in near if name.startswith(_VERSION)]
    return [name for name in odd if name not in small], small


@cache
def versions() -> dict[str, str]:
    """The first two numbers of versions, which ranks compare, by the name of that fact."""
    own = {"mics_fn": __version__, "torch": torch.__version__, "Python": platform.python_version()}
    return {f"{_VERSION}{name}": ".".join(x.split(".")[:2]) for name, x in own.items()}


def optimizer_facts(verb: str, transform: Any, paths: Sequence[str], several: bool) -> Facts:
    """Describe the options of a `Transform` as texts, by name.

    Args:
      verb: the call, for a warning.
      transform: the optimizer.
      paths: of the trained leaves.
      several: whether there are other ranks, so that a transform without facts is worth a warning.
    """
    if transform.facts is not None:
        return texts_of(transform.facts, paths)
    if several:
        text = f"{verb}: this optimizer has no facts, so ranks cannot compare its options"
        fix = "give its Transform facts= of its options, or make sure that all ranks have the same"
        warnings.warn(errors.message(text, fix=fix), stacklevel=4)
    return {"optimizer": "a function"}


def texts_of(options: Mapping[str, Any], paths: Sequence[str]) -> dict[str, str]:
    """Describe options by name: of parts too, rates at some steps, and masks at all paths."""
    found: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": text for inner, text in texts_of(value, paths).items()}
        elif name == "lr" and callable(value):
            rates = ", ".join(_text(_rate(value, step)) for step in _STEPS)
            found[f"lr at steps {', '.join(map(str, _STEPS))}"] = rates
        elif name == "decay_mask" and value is not None:
            found[name] = f"decays {[path for path in paths if value(path)]}"
        else:
            found[name] = _text(value)
    return found


def _rate(lr: Callable[[int], Any], step: int) -> Any:
    try:
        return lr(step)
    except Exception as error:  # a schedule may end before
        return f"{type(error).__name__}"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_torch.unwrapped(value).detach().tolist()}"
    return "a function" if callable(value) else f"{value}"


def _distinct(homes: Iterable[Any]) -> list[Groups]:
    """The `Groups` that were given, each once; those of copies reach the same ranks as these.

    Stages of a pipeline may have leaves of either kind.
    """
    return [*dict.fromkeys(home.origin for home in homes if isinstance(home, Groups))]


def _replicas(home: Groups) -> list[Sequence[int]]:
    """List the ranks of each replication group, in all parts of a model."""
    p = home.partition_size
    return [ranks[place::p] for ranks in home.dp_ranks for place in range(p)]


# At which step ranks are: compared on new groups, and mended from a replica.

_SEEN = "steps"  # in `Groups.agreed`: their ranks were at one step
NO_STEP = -1  # of a rank without a state


def same_step(state: Any, groups: Any, *, heal: bool = False) -> Any:
    """The same state, once all ranks are known to be at one step.

    Args:
      state: a `TrainState`.
      groups: those of its parameters, with all replicas.
      heal: let ranks that are behind, or whose state is lost as a write of it was cut short, take
        trained leaves, optimizer state and buffers from a replica that is not. Frozen leaves stay
        as each rank has them; `same_replicas` compares these, too.

    Returns:
      The state; a new one on ranks that were behind.

    Communication: 8 bytes over the partition group and over the replication group. To heal, each
      replication group that has ranks behind sends the state of one rank to the others.

    Memory: to heal, a second copy of the state on ranks that are behind, but not where it is lost.

    Raises:
      LostStateError: on all ranks, if they are at different steps. With `heal` only if no rank has
        some part of the newest state, or if leaves live on several groups.
      PlanError: `heal` is not a bool.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.1))
      >>> same_step(state, groups) is state
      True
    """
    checks.choice("same_step", "heal", heal, True, False)
    lost = shards.any_lost((state.params, state.opt))  # by a write that was cut short
    given, state = state, shards.reclaimed(state)
    opened = shards.open_shards(
        "same_step", state.params, groups, root="state.params"
    ).require_replicas()
    # A replica of a part has all of it, copies too; one in another part has the copies alone.
    homes = _distinct(opened.homes)
    for home in homes:
        steps = _steps(NO_STEP if lost else state.step, home)
        if len(set(steps.values())) > 1 or max(steps.values()) == NO_STEP:
            if not heal or len(homes) > 1 or _lost(steps, home):
                raise _torn("same_step", steps, home)
            given = _healed(state, steps, home)
        home.agreed.add(_SEEN)
        home.copies.agreed.add(_SEEN)
    return given


def compare_states(verb: str, state: Any, homes: Iterable[Any]) -> None:
    """Compare the optimizers of ranks, and at which step they are; in `opt_step` once.

    Args:
      verb: "init_state", which begins at step 0, or "opt_step".
      state: a `TrainState`.
      homes: the groups of its leaves.

    Communication: 8 bytes for the step, and 32 for the options.

    Raises:
      LostStateError: on all ranks, if they are at different steps.
      DesyncError: on all ranks, if they have other options; see `same_options`.
    """
    homes, begins = list(dict.fromkeys(homes)), verb == "init_state"
    several = [x for x in _distinct(homes) if len(x.state.ranks) > 1]
    with _torch.without_torch_func():
        for home in several:
            if not begins and _SEEN not in home.agreed:
                steps = _steps(state.step, home)
                if len(set(steps.values())) > 1:
                    raise _torn(verb, steps, home)
        if begins or any(_OPTIONS not in home.agreed for home in several):
            warns = begins and any(home.partition_size * home.num_replicas > 1 for home in homes)
            facts = optimizer_facts(verb, state.transform, shards.names(state.params), warns)
            same_options(verb, facts, several)
    for home in homes:
        home.agreed.add(verb)


def _steps(step: int, home: Groups) -> dict[int, int]:
    """The step of each rank, by global rank."""
    mine = torch.tensor(step, dtype=torch.int64, device=home.device)
    steps = collectives.collect_values(home, mine)
    if len(set(steps.values())) == 1:
        home.agreed.add(_SEEN)
    return steps


def _torn(verb: str, steps: dict[int, int], home: Groups) -> errors.LostStateError:
    lines = errors.rank_lines(
        {rank: f"step {x}" if x >= 0 else "lost" for rank, x in steps.items()}
    )
    fix = "same_step(state, groups, heal=True) takes the newer state from a replica"
    if _lost(steps, home):
        fix = "no replica has all of the newest state: go back to one that all ranks have saved"
    return errors.LostStateError(f"{verb}: ranks are at different steps", lines, fix)


def _lost(steps: dict[int, int], home: Groups) -> bool:
    """Whether no rank has some part of the newest state."""
    newest = max(steps.values())
    parts = [[steps[rank] for rank in ranks] for ranks in _replicas(home)]
    return newest == NO_STEP or any(newest not in part for part in parts)


@torch.no_grad()
def _healed(state: Any, steps: dict[int, int], home: Groups) -> Any:
    """Take the newest state from a replica; all ranks of the groups call it.

    Args:
      state: a `TrainState`, of equal structure and sizes on the ranks of a replication group.
      steps: of each rank, by global rank; NO_STEP if its state is lost.
      home: the groups.

    Returns:
      A new state on ranks that are behind, else the same.

    Raises:
      DesyncError: on all ranks, if states of a replication group have other sizes.
    """
    newest, own, before = max(steps.values()), steps[home.rank], state
    ranks, takes = home.replicas.ranks, own < newest
    source = next(rank for rank in ranks if steps[rank] == newest)
    if takes:  # one that is lost may be written over
        state = _room_for(state) if own == NO_STEP else _in_new_memory(state)
    leaves, spec = tree.flatten(state)
    plain = [i for i, x in enumerate(leaves) if isinstance(x, int | float)]
    numbers = torch.tensor([leaves[i] for i in plain], dtype=torch.float64, device=home.device)
    sent = [numbers, *(x.detach() for x in leaves if isinstance(x, Tensor) and x.numel())]
    fix = "start the rank that came back with the same script and the same options"
    sizes = tree.digest(f"{tuple(x.shape)} {x.dtype}" for x in sent)
    number = torch.tensor(int.from_bytes(sizes[:8], signed=True), device=home.device)
    refuse_unequal("reset", home, {"the sizes of the state": number}, fix)
    if all(steps[rank] == newest for rank in ranks):
        return before
    for x in sent:  # one at a time
        if takes or home.rank == source:
            data = read(x).to(home.device).contiguous()
        else:  # what this rank has stays as it is
            data = torch.empty(x.shape, dtype=x.dtype, device=home.device)
        levels.send_from(home.replicas, data.view(-1).view(torch.uint8), source)
        if takes and data.data_ptr() != x.data_ptr():
            x.copy_(data)
    if not takes:
        return before
    received = numbers.tolist()  # one wait for all of it
    home.partition.check_open()  # else it may be no state of any rank
    for i, number in zip(plain, received, strict=True):
        leaves[i] = type(leaves[i])(number)
    return as_before(spec.unflatten(leaves), before)


def _room_for(state: Any) -> Any:
    """A state in memory that is to be overwritten: what is in files, or is codes, is not read."""

    def room(x: Any) -> Any:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if is_placed(x) else x

    return tree.map_leaves(room, state)


def _in_new_memory(state: Any) -> Any:
    """Copy a state to write another one into, without what is in files or is codes."""
    state = _room_for(state)
    copied = lambda x: x.clone() if isinstance(x, Tensor) else x  # noqa: E731
    opt, buffers = tree.map_leaves(copied, (state.opt, state.buffers))
    return replace(state, params=fresh(state.params), opt=opt, buffers=buffers)


# Whether replicas still hold the same bits, which nothing later in training would show.


def same_replicas(state: Any, groups: Any) -> Any:
    """The same state, once all replicas are known to hold the same bits.

    Args:
      state: a `TrainState`.
      groups: those of its parameters, with all replicas.

    Returns:
      The state.

    Communication: 8 bytes per leaf, of parameters and of each moment, over the partition group and
      over the replication group.

    Raises:
      DesyncError: on all ranks of the groups of the first leaf that differs, naming it, and which
        ranks have what.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.1))
      >>> same_replicas(state, groups) is state
      True
    """
    Comparison("same_replicas", state, groups, list(state.buffers)).finish()
    return state


class _Compared(NamedTuple):
    """A leaf whose bits replicas compare."""

    path: str
    data: Tensor
    home: Any  # whose replicas hold it; None for those of all groups


class Comparison:
    """A pending comparison of replicas; `finish` raises what it has found.

    Args:
      verb: the call, for errors.
      state: a `TrainState`, which must not change before `finish`.
      groups: as for `same_replicas`.
      buffers: the names of those that are equal on all ranks.
      moments: whether the state of the optimizer is compared too.
    """

    def __init__(
        self, verb: str, state: Any, groups: Any, buffers: Sequence[str], *, moments: bool = True
    ) -> None:
        self._verb, owners = verb, shards.homes_of(verb, groups, state.params)
        leaves = list(_compared(state, owners, buffers, moments))
        self._parts: list[tuple[Groups, list[_Compared], collectives.Pending]] = []
        for home in dict.fromkeys([*_distinct(owners), *owners]):
            if isinstance(home, Groups) and home.num_replicas > 1:
                home.partition.check_open()
                # What belongs to no leaf, such as a buffer, need not be equal in all parts.
                mine = [x for x in leaves if x.home is home or (x.home is None and not home.of)]
                sums = [checksum(x.data).to(home.device) for x in mine]
                pending = levels.start_collect(home.stage.axes, torch.stack(sums))
                self._parts.append((home, mine, pending))

    def finish(self) -> None:
        """Raise DesyncError if replicas differ, as `same_replicas` does."""
        for home, leaves, pending in self._parts:
            ranks = home.stage.stacked_ranks
            table = pending.wait().view(len(ranks), -1).tolist()
            home.partition.check_open()  # else these may be no values of any rank
            rows = dict(zip(ranks, table, strict=True))
            for i, leaf in enumerate(leaves):
                found = [{rank: rows[rank][i] for rank in ranks} for ranks in _replicas(home.stage)]
                if any(len(set(sums.values())) > 1 for sums in found):
                    raise collectives.report_outside(home.stage, self._error(leaf, found))

    def _error(self, leaf: _Compared, found: Sequence[Mapping[int, int]]) -> errors.DesyncError:
        """Name the first leaf that differs, from its sums by replication group."""
        lines = [f"first difference: {leaf.path}"]
        for sums in found:
            (_, most), *others = errors.by_value(sums)
            # Of two nobody knows which is right.
            known, odd = ("the same", "odd") if len(most) > 1 else ("own", "other bits")
            if others:
                lines.append(f"{errors.name_ranks(most)}: {known} bits")
                lines += [f"{errors.name_ranks(ranks)}: {odd}" for _, ranks in others]
        fix = "find what differs there; a rank that is started again takes its state from a replica"
        return errors.DesyncError(f"{self._verb}: replicas have drifted apart", lines, fix)


def _compared(
    state: Any, owners: Sequence[Any], buffers: Sequence[str], moments: bool
) -> Iterator[_Compared]:
    """Yield the step and the leaves of a state, which are equal on all replicas."""
    yield _Compared("state.step", torch.tensor(state.step), None)
    params = tree.flatten(state.params, shards.is_leaf)[0]
    homes = {id(x): home for x, home in zip(params, owners, strict=True)}
    homes |= {
        x.bucket: homes[id(x)] for x in params if isinstance(x, shards.Sharded)
    }  # moments are of the same buckets
    opt = by_leaf(state.opt) if moments else ()
    kept = {name: state.buffers[name] for name in buffers}
    for root, part in (("params", state.params), ("opt", opt), ("buffers", kept)):
        leaves = tree.flatten(part, shards.is_leaf)[0]
        for path, x in zip(tree.paths(part, f"state.{root}", shards.is_leaf), leaves, strict=True):
            data = getattr(x, "data", x)
            if isinstance(data, Tensor):
                home = homes.get(id(x)) or homes.get(getattr(x, "bucket", 0))
                yield _Compared(path, data, home)
