"""Compare what ranks must agree on before data moves: trees, calls, and the values of replicas.

Ranks that disagree on a shape or an order get wrong numbers or abort, with an error that does not
say why. So each new tree is compared once, by a digest. Only if digests differ do the ranks
exchange their descriptions, to name the leaf and the ranks.

[Note: together] What ranks read, make and write by themselves may fail on one of them, as its disk
is full. At the end of the block all ranks compare how it went, so they raise at the same place: the
groups stay usable, and whatever the block has made goes with the error.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from mics_fn.collectives.levels import collect
from mics_fn.errors import DesyncError, FileError, by_value, disagreement, name_ranks
from mics_fn.groups import Groups, Hierarchy, Home
from mics_fn.tree import digest, flatten

E = TypeVar("E", bound=Exception)
# Bytes that a message is a multiple of: calls of one size repeat, and are foreseen by all ranks.
_ROUND = 512


def agree(
    groups: Home,
    what: str,
    facts: Sequence[tuple[str, str]],
    fixes: Mapping[str, str] | None = None,
) -> None:
    """Compare (path, description) pairs between all ranks of `groups`, once for equal facts.

    Args:
      groups: their ranks must agree; for a `Hierarchy`, those of the partition group.
      what: the verb and the tree, for errors.
      facts: one pair per leaf, in tree order.
      fixes: what to do if ranks differ in something other than a leaf, by the name of that.

    Raises:
      DesyncError: on every rank, naming ranks and the first path at which they differ; on ranks of
        other partition groups when they wait for these.

    Communication: an all-gather of 32 bytes over the partition group, and one over the replication
      group, the first time for these facts.
    """
    mine = digest(f"{path}\n{text}" for path, text in facts)
    if len(groups.stacked_ranks) == 1 or (what, mine) in groups.agreed:
        return
    sent = torch.tensor(list(mine), dtype=torch.uint8, device=groups.device)
    if len(set(map(bytes, collect_values(groups.stage, sent).values()))) > 1:
        raise report_outside(groups.stage, _difference(groups, what, facts, fixes or {}))
    groups.agreed.add((what, mine))


def _difference(
    groups: Home, what: str, facts: Sequence[tuple[str, str]], fixes: Mapping[str, str]
) -> DesyncError:
    """The error that names the first path at which ranks differ, the same on every rank."""
    sent = collect_bytes(groups.stage, json.dumps(list(facts)).encode())
    every = {rank: [tuple(pair) for pair in json.loads(text)] for rank, text in sent.items()}
    nothing, found = ("(no more leaves)", ""), {}
    for i in range(max(map(len, every.values()))):
        found = {rank: pairs[i] if i < len(pairs) else nothing for rank, pairs in every.items()}
        if len(set(found.values())) > 1:
            break
    path, texts = by_value(found)[0][0][0], {rank: " ".join(fact) for rank, fact in found.items()}
    if path in fixes:
        return disagreement(f"{what}: ranks disagree on the {path}", texts, fixes[path])
    fix = "build the same tree on every rank: same keys in the same order, same shapes and dtypes"
    first = [f"first difference: {path}"]
    return disagreement(f"{what}: ranks disagree on the tree", texts, fix, first)


def report_outside(home: Home, error: E) -> E:
    """Report an error to the other ranks of the groups than those of `home`, which all raise it."""
    channel = home.hierarchy.channel
    if channel.job_size > len(home.stacked_ranks):
        channel.report(str(error))
    return error


def refuse_unequal(
    verb: str, home: Groups, sums: Mapping[str, Tensor], fix: str, *, whole: bool = False
) -> None:
    """Raise DesyncError on every rank unless replicas have the same checksums of pieces.

    Args:
      verb: for errors.
      home: the groups.
      sums: this rank's `checksum` of each leaf, by its path.
      fix: for errors.
      whole: whether they are of full values, so that all ranks have to have the same.

    Communication: 8 bytes per leaf, over the partition group and over the replication group.
    """
    if len(home.stacked_ranks) == 1 or not sums:
        return
    found = collect_values(home.stage, torch.stack([*sums.values()]))
    p = 1 if whole else home.partition_size
    pairs = [(x, each[k % p]) for each in home.stage.dp_ranks for k, x in enumerate(each)]
    odd = [(rank, like) for rank, like in pairs if found[rank] != found[like]]
    if odd:
        first = found[odd[0][1]]
        at = next(i for i, x in enumerate(found[odd[0][0]]) if x != first[i])
        text = f"{verb}: {'ranks' if whole else 'replicas'} hold different values"
        said = "not as on the first rank" if whole else "not as in the first replica"
        lines = [f"first difference: {list(sums)[at]}"]
        raise disagreement(text, dict.fromkeys(dict(odd), said), fix, lines)


def collect_values(groups: Home, tensor: Tensor) -> dict[int, Any]:
    """The values of a small tensor from each rank, as `tolist` gives them, by global rank.

    Args:
      groups: whose ranks; `groups.stage` has none of other stages of a pipeline.
      tensor: this rank's; of one shape on all of them.

    Raises:
      GroupsError: collectives were aborted while the host waited, so these are no rank's values.
    """
    ranks, stacked = groups.stacked_ranks, tensor
    for comm in groups.axes:
        stacked = collect(comm, stacked)
    found = stacked.reshape(len(ranks), *tensor.shape).tolist()  # one wait for all of them
    groups.partition.check_open()
    return dict(zip(ranks, found, strict=True))


def collect_bytes(groups: Home, data: bytes) -> dict[int, bytes]:
    """A byte string from each rank of `groups`, by global rank; lengths may differ."""
    device = groups.device
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = {rank: n for rank, (n,) in collect_values(groups, length).items()}
    whole = -(-max(lengths.values()) // _ROUND) * _ROUND
    padded = torch.zeros(whole, dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    found = collect_values(groups, padded)
    return {rank: bytes(found[rank][:n]) for rank, n in lengths.items()}


R = TypeVar("R")


@dataclass(eq=False)
class Exchange:
    """What ranks exchange at the end of a block: `mine`, which JSON can hold, and that of each."""

    mine: Any = None
    fact: str = ""  # a description of the arguments, which must be equal on all ranks
    all: dict[int, Any] = field(default_factory=dict)  # by global rank
    error: Exception | None = None  # of this rank, until the end of the block

    def differing(self, key: str) -> dict[int, Any]:
        """What each rank gave under a key of a dict, if that differs; else nothing."""
        found = {rank: each[key] for rank, each in self.all.items()}
        return found if len(set(found.values())) > 1 else {}

    def part(self, work: Callable[[], R]) -> R | None:
        """Do a part that sends nothing, in a block that does: an error waits for its end.

        Returns:
          What it gives; None if it or one before it has failed.
        """
        try:
            return work() if self.error is None else None
        except Exception as error:
            self.error = error
            return None


@contextmanager
def together(verb: str, groups: Any, fact: str = "") -> Iterator[Exchange]:
    """A block of work that each rank does by itself; if it raises on some ranks, all ranks raise.

    Args:
      verb: the caller, for errors.
      groups: `Groups`, a `Hierarchy` or a tree of them. If it is a function from paths to groups,
        these are not known yet, and nothing is compared.
      fact: as that of an `Exchange`; the block may set it.

    Yields:
      An `Exchange`; after the block it has what each rank gave.

    Raises:
      FileError: a file of some rank failed: on all ranks, with the same text, which names the rank.
      DesyncError: the facts differ, or the block raised something else on other ranks. A rank on
        which it raised gets that error instead.

    Communication: two all-gathers over each partition group, and over each replication group of
      `Groups`: 8 bytes, and as many as the longest text has.
    """
    homes = list(dict.fromkeys(x for x in flatten(groups)[0] if isinstance(x, Groups | Hierarchy)))
    exchange = Exchange(fact=fact)
    try:
        yield exchange
    except Exception as error:
        exchange.error = error
    error, exchange.error = exchange.error, None
    try:
        if error is None or all(home.partition.state.failed is None for home in homes):
            verdict = _verdict(verb, homes, exchange, error)
            if verdict is not None and (error is None or isinstance(error, FileError)):
                raise verdict from error
        if error is not None:
            raise error
    finally:
        error = verdict = None  # else they would keep what the block has made


def _verdict(
    verb: str, homes: Sequence[Home], exchange: Exchange, error: Exception | None
) -> Exception | None:
    """Exchange facts, errors and values; return the error that ranks raise together, if any."""
    said = json.dumps([exchange.fact, encoded_error(error), exchange.mine]).encode()
    found: dict[int, bytes] = {}
    for home in homes:
        found |= collect_bytes(home, said)
    answers = {rank: json.loads(text) for rank, text in sorted(found.items())}
    exchange.all = {rank: value for rank, (_, _, value) in answers.items()}
    facts = {rank: own for rank, (own, *_) in answers.items()}
    failed = {rank: wrong for rank, (_, wrong, _) in answers.items() if wrong}
    if len(answers) < 2 or (not failed and len(set(facts.values())) < 2):
        return None
    fix = f"call {verb} with the same arguments on every rank"
    verdict: Exception = disagreement(f"{verb}: ranks differ in what they ask for", facts, fix)
    if failed and failed[first_failure(failed)][2]:
        verdict = decoded_error(failed)
    elif failed:
        texts = {rank: text.partition("\n")[0] for rank, (_, text, _) in failed.items()}
        fix = "see what these ranks raise; nothing was changed on any rank"
        verdict = disagreement(f"{verb}: it failed on other ranks", texts, fix)
    for home in homes:
        report_outside(home, verdict)
    return verdict


def encoded_error(error: BaseException | None) -> list[Any] | None:
    """An error for the other ranks: its kind, its text, and what else a `FileError` has."""
    if error is None:
        return None
    kind, file = type(error).__name__, None
    if isinstance(error, FileError):
        file = [f"{error.path}", f"{error.leaf}", error.damaged]
    return [kind, f"{error}" if file else f"{kind}: {error}", file]


def decoded_error(failed: Mapping[int, list[Any]]) -> FileError:
    """The error that all ranks raise, by rank: the first one, with the ranks it occurred on."""
    name, text, file = failed[first_failure(failed)]
    path, leaf, damaged = file or ("", "", None)
    kinds = [x for x in FileError.__subclasses__() if x.__name__ == name]
    kind = next((x for x in kinds if issubclass(x, FileNotFoundError)), FileError)
    alike = [rank for rank, each in failed.items() if each[0] == name]
    head, *rest = text.split("\n")
    lines = [head, f"  on {name_ranks(alike)}", *rest]
    return kind("\n".join(lines), path, leaf, damaged=damaged)


def first_failure(failed: Mapping[int, list[Any]]) -> int:
    """The rank whose error counts: of damage only if no rank has another one.

    Of two errors all ranks must raise one, or some would try an older step without the others.
    """
    return min(failed, key=lambda rank: (bool((failed[rank][2] or [False])[-1]), rank))
