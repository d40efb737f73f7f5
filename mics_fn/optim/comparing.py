"""What ranks compare of states: options, steps, and the bits of replicas; and how one is mended.

An optimizer is a few functions, which ranks cannot compare. So a `Transform` has `facts`, from the
paths of the trained leaves to texts by the name of an option. A learning rate that is a function of
the step is compared at steps 0, 1, 10 and 1,000.

Ranks that need nothing send nothing, but for those that are asked: in each round a rank of a
replication group hands its part of the state to one other rank, and all make the same calls.

[Note: one step] A rank that was interrupted may be a step behind the others. Its shards must not be
mixed with theirs: every number would stay finite, and the result would be the state of no step. So
the first `opt_step` with gradients that come from new groups compares `state.step` over them before
anything is written, and with it the options of the optimizer. `Trainer` compares both earlier.

[Note: drift] Every step adds the same update to each replica, so one that differs, by a bit that
flipped or by a rule that some ranks did not apply, differs for ever, and the loss hardly shows it.
So a sum of 64 bits of each run of parameters, moments, averaged buffers and leaves that do not
train is compared between replicas. It is collected from all ranks, so that all of them know who
differs, and only then sums of single leaves follow, to name the first one.
"""

import json
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from mics_fn import _torch, checks, tree
from mics_fn._version import __version__
from mics_fn.collectives import (
    Pending,
    checksum,
    collect_bytes,
    collect_values,
    hand_over,
    send_from,
    start_collect,
)
from mics_fn.errors import (
    DesyncError,
    LostStateError,
    by_value,
    disagreement,
    message,
    name_ranks,
    rank_lines,
)
from mics_fn.groups import Groups
from mics_fn.offload import read
from mics_fn.optim.columns import fresh
from mics_fn.optim.flat import FlatShards, by_leaf, joined, split, unpacked, whole_run
from mics_fn.optim.moving import as_before, room_for
from mics_fn.shards import (
    Fixed,
    Nothing,
    Sharded,
    any_lost,
    checksum_of,
    homes_of,
    is_leaf,
    names,
    open_shards,
    reclaimed,
)
from mics_fn.tree import digest

# Options that change numbers: compared between ranks before the first step, by name.

Facts = Mapping[str, str]
_STEPS = (0, 1, 10, 1_000)
_VERSION = "version of "
OPTIONS = "options"  # in `Groups.agreed`: those of an optimizer were compared


def same_options(verb: str, facts: Facts, homes: Iterable[Any]) -> None:
    """Compare options between the ranks of groups.

    Args:
      verb: the call, for errors.
      facts: texts by the name of the option.
      homes: the groups of the leaves.

    Communication: 32 bytes over each partition group and each replication group.

    Raises:
      DesyncError: on all ranks, naming the options that differ, and who has what. Versions that
        differ after the first number are a warning.
    """
    homes = [x for x in dict.fromkeys(homes) if isinstance(x, Groups) and x.world_size > 1]
    mine = {**facts, **versions()} if homes else {}
    for home in homes:
        sent = tree.digest(f"{name}\n{text}" for name, text in sorted(mine.items()))
        digest = torch.tensor(list(sent), dtype=torch.uint8, device=home.device)
        if len(set(map(bytes, collect_values(home, digest).values()))) > 1:
            found = collect_bytes(home, json.dumps(mine).encode())
            _differ(verb, {rank: json.loads(text) for rank, text in found.items()})
        home.agreed.add(OPTIONS)


def _differ(verb: str, said: Mapping[int, Facts]) -> None:
    grave, small = differing(list(said.values()))
    lines = {
        rank: ", ".join(f"{name}: {each.get(name, 'not given')}" for name in grave or small)
        for rank, each in said.items()
    }
    if grave:
        text = f"{verb}: ranks differ in what changes numbers: {', '.join(grave)}"
        raise disagreement(text, lines, "pass the same options, and use one version, on all ranks")
    text = f"{verb}: ranks differ in the {', '.join(small)}"
    warnings.warn(message(text, rank_lines(lines), "use one version on all ranks"), stacklevel=4)


def differing(said: Sequence[Facts]) -> tuple[list[str], list[str]]:
    """The names of options that differ: those that change numbers, and small steps of versions."""
    names = sorted({name for each in said for name in each})
    odd = [name for name in names if len({each.get(name) for each in said}) > 1]
    small = [name for name in odd if name.startswith(_VERSION) and _near(name, said)]
    return [name for name in odd if name not in small], small


def _near(name: str, said: Iterable[Facts]) -> bool:
    """Whether a version is the same up to its first dot on all ranks."""
    return len({each.get(name, "").partition(".")[0] for each in said}) == 1


@cache
def versions() -> dict[str, str]:
    """The versions that ranks compare, by the name of that fact."""
    found = {
        "mics_fn": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    return {f"{_VERSION}{name}": f"{text}" for name, text in found.items()}


def optimizer_facts(verb: str, transform: Any, paths: Sequence[str], several: bool) -> Facts:
    """The facts of a `Transform`, by the name of the option.

    Args:
      verb: the call, for a warning.
      transform: the optimizer.
      paths: of the trained leaves.
      several: whether there are other ranks, so that a transform without facts is worth a warning.
    """
    if transform.facts is not None:
        return transform.facts(paths)
    if several:
        text = f"{verb}: this optimizer has no facts, so ranks cannot compare its options"
        fix = "give its Transform facts= of its options, or make sure that all ranks have the same"
        warnings.warn(message(text, fix=fix), stacklevel=4)
    return {"optimizer": "a function"}


def facts_from(kind: str, options: Mapping[str, Any]) -> Callable[[Sequence[str]], Facts]:
    """Facts of an optimizer that is made with options; those that are masks see all paths."""

    def facts(paths: Sequence[str]) -> Facts:
        found = {"optimizer": kind}
        for name, value in options.items():
            if name == "lr" and callable(value):
                rates = ", ".join(_text(_rate(value, step)) for step in _STEPS)
                found[f"lr at steps {', '.join(map(str, _STEPS))}"] = rates
            elif name == "decay_mask" and value is not None:
                found[name] = f"decays {[path for path in paths if value(path)]}"
            else:
                found[name] = _text(value)
        return found

    return facts


def _rate(lr: Callable[[int], Any], step: int) -> Any:
    try:
        return lr(step)
    except Exception as error:  # a schedule may end before
        return f"{type(error).__name__}"


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_torch.unwrapped(value).detach().tolist()}"
    return "a function" if callable(value) else f"{value}"


# A state that ranks take from a replica, in as few bytes as it has.

_PARCEL_BYTES = 2**24  # that are sent at once, and copied for it


def handed_over(state: Any, home: Groups, sources: Mapping[int, int], *, in_place: bool) -> Any:
    """The same state on all ranks of each replication group, from those that have it.

    Args:
      state: a `TrainState`, of equal structure and sizes on the ranks of a replication group.
      home: the groups.
      sources: the rank that hands it over, by the rank that takes it; of all replication groups.
      in_place: whether a rank that takes one may do so in the memory of its own.

    Returns:
      A new state on ranks that take one, else the same.

    Communication: each part that is taken travels once, from its source.

    Memory: a parcel of 16 MiB on each side, and without `in_place` a second copy of the state where
      one is taken.

    Raises:
      DesyncError: on all ranks, if states of a replication group have other sizes.
    """
    taken, before = home.rank in sources, state
    if taken:
        state = room_for(state) if in_place else in_new_memory(state)
    leaves, spec = tree.flatten(state)
    plain = [i for i, x in enumerate(leaves) if isinstance(x, int | float)]
    numbers = torch.tensor([leaves[i] for i in plain], dtype=torch.float64, device=home.device)
    sent = [numbers, *(x.detach() for x in leaves if isinstance(x, Tensor) and x.numel())]
    _check_equal(sent, home)
    with torch.no_grad():
        for pairs in _rounds(sources, home.replicas.ranks):
            for parcel in _parcels(sent):
                _send(parcel, home, pairs)
    if not taken:
        return state
    for i, number in zip(plain, numbers.tolist(), strict=True):
        leaves[i] = type(leaves[i])(number)
    return as_before(spec.unflatten(leaves), before)


def in_new_memory(state: Any) -> Any:
    """A state to write another one into: a copy, without what is in files or is codes."""
    state = room_for(state)
    opt, buffers = tree.map_leaves(_copied, (state.opt, state.buffers))
    return replace(state, params=fresh(state.params), opt=opt, buffers=buffers)


def _check_equal(sent: list[Tensor], home: Groups) -> None:
    """Raise DesyncError on all ranks unless equal parts have equal sizes."""
    mine = digest(f"{tuple(x.shape)} {x.dtype}" for x in sent)
    said = torch.tensor(list(mine), dtype=torch.uint8, device=home.device)
    found = {rank: bytes(row) for rank, row in collect_values(home, said).items()}
    for place in range(home.partition_size):
        ranks = home.ranks[place :: home.partition_size]
        if len({found[rank] for rank in ranks}) > 1:
            fix = "start the rank that came back with the same script and the same options"
            raise DesyncError(f"reset: {name_ranks(ranks)} hold states of different sizes", fix=fix)


def _rounds(sources: Mapping[int, int], ranks: tuple[int, ...]) -> Iterator[dict[int, int]]:
    """The pairs of one replication group, in rounds in which a rank sends once at most."""
    left = {taker: source for taker, source in sources.items() if taker in ranks}
    while left:
        pairs = {source: taker for taker, source in reversed(left.items())}
        yield {taker: source for source, taker in pairs.items()}
        for taker in pairs.values():
            del left[taker]


def _parcels(sent: list[Tensor]) -> Iterator[list[tuple[Tensor, Tensor, slice]]]:
    """Parts of tensors with their bytes, in runs that are sent at once."""
    run, room = [], _PARCEL_BYTES
    for x in sent:
        flat, at = read(x).contiguous().view(-1).view(torch.uint8), 0
        while at < flat.numel():
            stop = min(flat.numel(), at + room)
            run.append((x, flat, slice(at, stop)))
            room, at = room - (stop - at), stop
            if not room:
                yield run
                run, room = [], _PARCEL_BYTES
    if run:
        yield run


def _send(
    parcel: list[tuple[Tensor, Tensor, slice]], home: Groups, pairs: Mapping[int, int]
) -> None:
    """Hand over one parcel, and write it where it is taken."""
    count = sum(part.stop - part.start for _, _, part in parcel)
    asked = home.rank in pairs.values()
    parts = [flat[part] for _, flat, part in parcel] if asked else []
    data = torch.cat(parts).to(home.device) if asked else None
    got = hand_over(home.replicas, data, count, pairs, home.device)
    if got is None:
        return
    for x, flat, part in parcel:
        piece, got = got[: part.stop - part.start], got[part.stop - part.start :]
        flat[part].copy_(piece)
        if flat.data_ptr() != x.data_ptr() and part.stop == flat.numel():
            x.copy_(flat.view(x.dtype).view(x.shape))


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


# At which step ranks are: compared on new groups, and mended from a replica.

_SEEN = "steps"  # in `Groups.agreed`: their ranks were at one step
_NO_STEP = -1  # of a rank without a state


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

    Memory: to heal, a second copy of the state on ranks that are behind.

    Raises:
      LostStateError: on all ranks, if they are at different steps. With `heal` only if no rank has
        some part of the newest state, or if leaves live on several groups.
      PlanError: `heal` is not a bool.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.1))
      >>> optim.same_step(state, groups) is state
      True
    """
    checks.flag("same_step", "heal", heal)
    lost = any_lost((state.params, state.opt))  # by a write that was cut short
    given, state = state, reclaimed(state)
    opened = open_shards("same_step", state.params, groups, root="state.params").require_replicas()
    homes = [home for home in dict.fromkeys(opened.homes) if isinstance(home, Groups)]
    for home in homes:
        steps = _steps(_NO_STEP if lost else state.step, home)
        if len(set(steps.values())) > 1 or max(steps.values()) == _NO_STEP:
            if not heal or len(homes) > 1 or _lost(steps, home):
                raise _torn("same_step", steps, home)
            given = _healed(state, steps, home)
            home.agreed.add(_SEEN)
    return given


def compare_once(state: Any, home: Any) -> None:
    """Compare step and optimizer between the ranks of groups, unless that was done on them before.

    Args:
      state: a `TrainState`.
      home: the groups.

    Communication: 8 bytes for the step, and 32 for the options.

    Raises:
      LostStateError: on all ranks, if they are at different steps.
      DesyncError: on all ranks, if they have other options; see `same_options`.
    """
    if not isinstance(home, Groups) or home.world_size == 1 or {_SEEN, OPTIONS} <= home.agreed:
        return
    with _torch.without_torch_func():
        if _SEEN not in home.agreed:
            steps = _steps(state.step, home)
            if len(set(steps.values())) > 1:
                raise _torn("opt_step", steps, home)
        if OPTIONS not in home.agreed:
            facts = optimizer_facts("opt_step", state.transform, names(state.params), several=False)
            same_options("opt_step", facts, [home])


def _steps(step: int, home: Groups) -> dict[int, int]:
    """The step of each rank, by global rank."""
    mine = torch.tensor(step, dtype=torch.int64, device=home.device)
    steps = collect_values(home, mine)
    if len(set(steps.values())) == 1:
        home.agreed.add(_SEEN)
    return steps


def _torn(verb: str, steps: dict[int, int], home: Groups) -> LostStateError:
    said = {rank: f"step {step}" if step >= 0 else "lost" for rank, step in steps.items()}
    lines = rank_lines(said)
    fix = "optim.same_step(state, groups, heal=True) takes the newer state from a replica"
    if _lost(steps, home):
        fix = "no replica has all of the newest state: go back to one that all ranks have saved"
    return LostStateError(f"{verb}: ranks are at different steps", lines, fix)


def _lost(steps: dict[int, int], home: Groups) -> bool:
    """Whether no rank has some part of the newest state."""
    p, newest = home.partition_size, max(steps.values())
    parts = [[steps[rank] for rank in home.ranks[place::p]] for place in range(p)]
    return newest == _NO_STEP or any(newest not in part for part in parts)


def _healed(state: Any, steps: dict[int, int], home: Groups) -> Any:
    newest, ranks = max(steps.values()), home.replicas.ranks
    if all(steps[rank] == newest for rank in ranks):
        return state
    source = next(rank for rank in ranks if steps[rank] == newest)
    return replaced_from(state, home, source, behind=steps[home.rank] < newest)


def replaced_from(state: Any, home: Groups, source: int, *, behind: bool) -> Any:
    """The state that one rank of the replication group has, on all of them.

    Args:
      state: a `TrainState`.
      home: the groups.
      source: global rank.
      behind: whether this rank has other values. It gets them in new memory; on the other ranks
        the same bits arrive where they are already.
    """
    before = state
    if behind:
        state = in_new_memory(state)
    leaves, spec = tree.flatten(state)
    plain = [i for i, x in enumerate(leaves) if isinstance(x, int | float)]
    numbers = torch.tensor([leaves[i] for i in plain], dtype=torch.float64, device=home.device)
    with torch.no_grad():
        send_from(home.replicas, numbers, source)
        for i, number in zip(plain, numbers.tolist(), strict=True):
            leaves[i] = type(leaves[i])(number)
        for x in leaves:
            if isinstance(x, Tensor) and x.numel():
                sent = read(x.detach()).to(home.device).contiguous()
                send_from(home.replicas, sent.view(-1).view(torch.uint8), source)
                if behind and sent.data_ptr() != x.data_ptr():
                    x.copy_(sent)
    return as_before(spec.unflatten(leaves), before)


# Whether replicas still hold the same bits, which nothing later in training would show.

_ODD = 2862933555777941757  # multiplies a sum before the next one is added

Action = Literal["raise", "heal"]


def same_replicas(state: Any, groups: Any, *, on_drift: Action = "raise") -> Any:
    """The same state, once all replicas are known to hold the same bits.

    Args:
      state: a `TrainState`.
      groups: those of its parameters, with all replicas.
      on_drift: "heal" gives ranks that differ the state of those that most replicas agree with; of
        two replicas, that of the first.

    Returns:
      The state; a new one on ranks that differed and were healed.

    Communication: 8 bytes per run of leaves in a bucket, of parameters and of each moment, over the
      partition group and over the replication group. To heal, the states of ranks that differ.

    Memory: to heal, a second copy of the state on ranks that differ.

    Raises:
      DesyncError: on all ranks of the groups of the first leaf that differs, naming it, and which
        ranks have what; with "heal" only if it is not trained, or leaves live on several groups.
      PlanError: `on_drift` is something else.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.1))
      >>> optim.same_replicas(state, groups) is state
      True
    """
    checks.choice("same_replicas", "on_drift", on_drift, "raise", "heal")
    return Comparison("same_replicas", state, groups, list(state.buffers)).finish(on_drift)


class Comparison:
    """A pending comparison of replicas; `finish` returns its result.

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
        self._verb, self._state, self._moments = verb, state, moments
        self._buffers = {name: state.buffers[name] for name in buffers}
        owners = homes_of(verb, groups, state.params)
        homes = dict.fromkeys(owners)
        self._parts: list[Comparison] = []
        self._home = next(iter(homes), None)
        self._pending: Pending | None = None
        if len(homes) > 1:
            for i, home in enumerate(homes):
                part, own = _part(state, owners, home), [] if i else buffers
                self._parts.append(Comparison(verb, part, home, own, moments=moments))
        elif isinstance(self._home, Groups) and self._home.num_replicas > 1:
            self._home.partition.check_open()
            comms = [self._home.partition, self._home.replicas]
            sums = [x.to(self._home.device) for x in self._sums()]
            self._pending = start_collect(comms, torch.stack(sums))

    def finish(self, on_drift: Action) -> Any:
        """The state, as `same_replicas` gives it."""
        home = self._home
        for part in self._parts:
            part.finish("raise")  # what one rank lacks, several groups would have to give
        if self._pending is None or not isinstance(home, Groups):
            return self._state
        table = self._pending.wait().view(home.world_size, -1).tolist()
        home.partition.check_open()  # else these may be no values of any rank
        rows = dict(zip(home.stacked_ranks, map(tuple, table), strict=True))
        places = [home.ranks[place :: home.partition_size] for place in range(home.partition_size)]
        if all(len({rows[rank] for rank in ranks}) == 1 for ranks in places):
            return self._state
        error, trained = self._error(home, places)
        if on_drift == "raise" or not trained:
            raise error
        votes = by_value({rank: rows[rank] for rank in home.replicas.ranks})
        (right, ranks), *others = votes
        if not others:
            return self._state
        return replaced_from(self._state, home, ranks[0], behind=rows[home.rank] != right)

    def _sums(self) -> list[Tensor]:
        """A sum for each run of parameters and moments, each buffer, each leaf without training."""
        found = unpacked(self._state.params)
        sums: list[Tensor] = []
        for run in found.runs():
            pieces = [found.pieces[i] for i in run.members]
            if not any(run.sizes[::2]):  # a sum does not depend on where a rank has them in memory
                whole = whole_run(run, found.pieces)
                pieces = [joined(run, pieces) if whole is None else whole]
            sums.append(_sum(pieces))
        sums += [checksum_of(leaf.data) for leaf in found.leaves if isinstance(leaf, Fixed)]
        for leaf in self._opt():
            if isinstance(leaf, FlatShards):
                for run, whole in zip(leaf.layout.runs, leaf.wholes, strict=True):
                    sums.append(_sum(split(run, whole) if any(run.sizes[::2]) else [whole]))
            else:
                sums.append(checksum(leaf))
        sums += [checksum(x) for x in self._buffers.values()]
        return [*sums, torch.tensor(self._state.step)]

    def _opt(self) -> list[Any]:
        opt = self._state.opt if self._moments else ()
        leaves, _ = tree.flatten(opt, lambda x: isinstance(x, FlatShards))
        return [x for x in leaves if isinstance(x, FlatShards | Tensor)]

    def _error(self, home: Groups, places: Sequence[Sequence[int]]) -> tuple[DesyncError, bool]:
        """The error that names the first leaf that differs, and whether it is trained."""
        opt = by_leaf(self._state.opt) if self._moments else ()
        parts = {"params": self._state.params, "opt": opt, "buffers": self._buffers}
        leaves, paths = [], []
        for root, part in parts.items():
            leaves += tree.flatten(part, is_leaf)[0]
            paths += tree.paths(part, f"state.{root}", is_leaf)
        data = [getattr(leaf, "data", leaf) for leaf in leaves]
        kept = [i for i, x in enumerate(data) if isinstance(x, Tensor)]
        sums = [torch.tensor(self._state.step), *(checksum_of(data[i]).cpu() for i in kept)]
        rows = collect_values(home, torch.stack(sums).to(home.device))
        at = next(
            i for i in range(len(sums)) if any(_bits_differ(rows, ranks, i) for ranks in places)
        )
        lines = [f"first difference: {paths[kept[at - 1]] if at else 'state.step'}"]
        for ranks in places:
            if _bits_differ(rows, ranks, at):
                lines += _who({rank: rows[rank][at] for rank in ranks})
        trained = at == 0 or isinstance(leaves[kept[at - 1]], Sharded | Tensor)
        fix = "find what differs between these ranks, or pass on_drift='heal'"
        if not trained:
            fix = "start all ranks with the same leaves that are not trained"
        return DesyncError(f"{self._verb}: replicas have drifted apart", lines, fix), trained


def _part(state: Any, owners: Sequence[Any], home: Any) -> Any:
    """The state with only those leaves that live on some groups; `owners` has those of each."""
    leaves, spec = tree.flatten(state.params, is_leaf)
    mine = [leaf for leaf, owner in zip(leaves, owners, strict=True) if owner is home]
    others = {x.bucket for x in leaves if isinstance(x, Sharded)}
    others -= {x.bucket for x in mine if isinstance(x, Sharded)}

    def kept(leaf: Any) -> Any:
        return Nothing() if isinstance(leaf, Sharded) and leaf.bucket in others else leaf

    params = [x if owner is home else Nothing() for x, owner in zip(leaves, owners, strict=True)]
    moments, form = tree.flatten(by_leaf(state.opt), is_leaf)
    opt = form.unflatten([kept(leaf) for leaf in moments])
    return replace(state, params=spec.unflatten(params), opt=opt)


def _bits_differ(rows: dict[int, list[int]], ranks: Sequence[int], at: int) -> bool:
    return len({rows[rank][at] for rank in ranks}) > 1


def _who(values: dict[int, int]) -> list[str]:
    """Which ranks of a replication group hold the same bits, and which are odd."""
    first, *others = by_value(values)
    odd = len(first[1]) > 1
    lines = [
        f"{name_ranks(first[1])}: the same bits" if odd else f"{name_ranks(first[1])}: own bits"
    ]
    return [*lines, *(f"{name_ranks(x)}: {'odd' if odd else 'other bits'}" for _, x in others)]


def _sum(pieces: Sequence[Tensor]) -> Tensor:
    total = checksum(pieces[0])
    for piece in pieces[1:]:
        total = total * _ODD + checksum(piece)
    return total
