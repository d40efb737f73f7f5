"""Compare what ranks must agree on before data moves: trees, calls, and the values of replicas.

Ranks that disagree on a shape or an order get wrong numbers or abort, with an error that does not
say why. So each new tree is compared once, by a digest. Only if digests differ do the ranks
exchange their descriptions, to name the leaf and the ranks.

[Note: parts] What ranks read, make and write by themselves may take minutes, and one of them may
fail in the first second, as its disk is full. It then writes a key into the store, of which the
monitors of the others hear at their next tick, and they leave their work before its next part. At
the end of the block all ranks compare how it went, so they raise at the same place: the groups stay
usable, and whatever the block has made goes with the error. Where parts send something, all ranks
go on to the last part, as the others wait for it there, but they do nothing else any more.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mics_fn.collectives.levels import collect
from mics_fn.errors import DesyncError, MicsError, by_value, disagreement
from mics_fn.groups import Failure, Groups, GroupState, Home, failure_of
from mics_fn.store import CHANGES, later
from mics_fn.tree import digest, flatten

E = TypeVar("E", bound=Exception)


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
    if groups.partition_size * groups.num_replicas == 1 or (what, mine) in groups.agreed:
        return
    sent = torch.tensor(list(mine), dtype=torch.uint8, device=groups.device)
    if len(set(map(bytes, collect_values(groups, sent).values()))) > 1:
        raise report_outside(groups, _difference(groups, what, facts, fixes or {}))
    groups.agreed.add((what, mine))


def _difference(
    groups: Home, what: str, facts: Sequence[tuple[str, str]], fixes: Mapping[str, str]
) -> DesyncError:
    """The error that names the first path at which ranks differ, the same on every rank."""
    sent = collect_bytes(groups, json.dumps(list(facts)).encode())
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
    """Report an error that all ranks of `home` raise to the other ranks of the groups."""
    channel = home.hierarchy.channel
    if channel.job_size > home.partition_size * home.num_replicas:
        channel.refuse(str(error))
    return error


def refuse_unequal(
    verb: str, home: Home, paths: Sequence[str], sums: Tensor, fix: str, *, whole: bool = False
) -> None:
    """Raise DesyncError on every rank unless replicas have the same checksums of pieces.

    Args:
      verb: for errors.
      home: the groups.
      paths: of the leaves.
      sums: this rank's `checksum` of each.
      fix: for errors.
      whole: whether they are of full values, so that all ranks have to have the same.

    Communication: 8 bytes per leaf, over the partition group and over the replication group.
    """
    if len(home.stacked_ranks) == 1 or not paths:
        return
    found, p = collect_values(home, sums), 1 if whole else home.partition_size
    odd = [r for k, r in enumerate(home.ranks) if found[r] != found[home.ranks[k % p]]]
    if odd:
        first = found[home.ranks[home.ranks.index(odd[0]) % p]]
        at = next(i for i, x in enumerate(found[odd[0]]) if x != first[i])
        text = f"{verb}: {'ranks' if whole else 'replicas'} hold different values"
        said = "not as on the first rank" if whole else "not as in the first replica"
        lines = [f"first difference: {paths[at]}"]
        raise disagreement(text, dict.fromkeys(odd, said), fix, lines)


def collect_values(groups: Home, tensor: Tensor) -> dict[int, Any]:
    """The values of a small tensor from each rank, as `tolist` gives them, by global rank.

    Raises:
      GroupsError: collectives were aborted while the host waited, so these are no rank's values.
    """
    stacked = collect(groups.replicas, collect(groups.partition, tensor)).flatten(0, 1)
    found = stacked.tolist()  # one wait for all of them
    groups.partition.check_open()
    return dict(zip(groups.stacked_ranks, found, strict=True))


def collect_bytes(groups: Home, data: bytes) -> dict[int, bytes]:
    """A byte string from each rank of `groups`, by global rank; lengths may differ."""
    device = groups.device
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = {rank: n for rank, (n,) in collect_values(groups, length).items()}
    padded = torch.zeros(max(*lengths.values(), 1), dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    found = collect_values(groups, padded)
    return {rank: bytes(found[rank][:n]) for rank, n in lengths.items()}


def same_call(
    verb: str,
    homes: Sequence[Home],
    text: str,
    error: Exception | None = None,
    *,
    skipped: bool = False,
) -> None:
    """Compare a call between ranks; returns if all make the same call and none has an error.

    Args:
      verb: the call, for errors.
      homes: each `Groups` or `Hierarchy` whose ranks make the call.
      text: what this rank is about to do.
      error: why this rank cannot do it, if it cannot. Then this returns on this rank, and the
        caller raises the error.
      skipped: whether this rank has left something out, because another one failed.

    Raises:
      PeerFileError: a file of another rank failed; it names the same file and leaf.
      DesyncError: calls differ, or other ranks have another error; on every rank without an error
        of its own.

    Communication: two all-gathers over each partition group, and over each replication group of
      `Groups`: 8 bytes, and as many as the longest text has.
    """
    found: dict[int, Any] = {}
    for home in [home for home in homes if len(home.stacked_ranks) > 1]:
        rank = home.partition.state.rank
        failed = None if error is None else asdict(failure_of(error, rank, final=False))
        said = collect_bytes(home, json.dumps([text, failed, skipped]).encode())
        found |= {rank: json.loads(answer) for rank, answer in sorted(said.items())}
    calls = {rank: call for rank, (call, _, _) in found.items()}
    failures = {rank: Failure(**failed) for rank, (_, failed, _) in found.items() if failed}
    left = any(skipped for _, _, skipped in found.values())
    if error is not None or not (failures or left or len(set(calls.values())) > 1):
        return
    of_file = [failure for failure in failures.values() if failure.file_error is not None]
    if of_file:
        text = f"{verb}: rank {of_file[0].rank} failed: {of_file[0].text}"
        differs = replace(of_file[0], text=text).error("", ends=False)
    elif failures:
        fix = "see what these ranks raise; nothing was changed on any rank"
        texts = {rank: failure.text for rank, failure in failures.items()}
        differs = disagreement(f"{verb}: it failed on other ranks", texts, fix)
    elif left:
        fix = "call the same verbs in the same order on every rank"
        raise DesyncError(f"{verb}: a rank has left it, as one failed elsewhere", fix=fix)
    else:
        fix = f"call {verb} with the same arguments on every rank"
        differs = disagreement(f"{verb}: ranks differ in what they ask for", calls, fix)
    for home in homes:
        report_outside(home, differs)
    try:
        raise differs
    finally:
        del differs  # else it would refer to itself, and keep what a block has made


# Long work of all ranks that is done part by part; an error of one rank ends it on all of them.

R = TypeVar("R")


class Parts:
    """What a block of work knows of the other ranks; made by `in_step`.

    Args:
      homes: the groups whose ranks do it.
      sends: whether parts send something, so that all ranks have to come to the last one.
    """

    def __init__(self, homes: Sequence[Groups] = (), *, sends: bool = False) -> None:
        self._sends = sends
        self.error: Exception | None = None  # of this rank
        self.others_failed = False  # whether another rank has failed
        self.skipped = False  # whether this rank has therefore left something out
        self._keys: dict[GroupState, str] = {}  # in the store, written by a rank that fails
        self._new = True
        for state in dict.fromkeys(home.state for home in homes):
            if len(state.ranks) > 1:
                state.works += 1
                self._keys[state] = f"{state.key}/parts/{state.works}"
                state.listeners.append(self._listen)

    def _listen(self, store: Any, changed: bool) -> None:
        """Called by the monitor at each tick, with its own connection to the store."""
        changed, self._new = changed or self._new, False
        if changed and any(store.check([key]) for key in self._keys.values()):
            self.others_failed = True

    def part(self, work: Callable[[], R]) -> R | None:
        """Do one part by itself, which sends nothing.

        Returns:
          What it gives; None if some rank has failed and all go on to the last part.
        """
        self.check_others()
        if self.skipped or self.error is not None:
            return None
        try:
            return work()
        except Exception as error:
            if not self._sends:
                raise
            self.fail(error)
            return None

    def check_others(self) -> None:
        """Leave the block if another rank has failed; called where nothing is half done."""
        if self.others_failed:
            self.skipped = True
            if not self._sends:
                raise _Skipped

    def fail(self, error: Exception) -> None:
        """Record the error of this rank, and report it to the others."""
        if self.error is not None:
            return
        self.error = error
        for state, key in self._keys.items():
            if state.channel.store is not None:
                later(state.channel.store, "set", key, "")
                later(state.channel.store, "add", CHANGES, 1)

    def end(self) -> None:
        """Stop listening."""
        for state in self._keys:
            state.listeners.remove(self._listen)


class _Skipped(MicsError):
    """Raised inside `in_step` if another rank has failed."""


@contextmanager
def in_step(what: str, groups: Any, fact: str = "", *, sends: bool = False) -> Iterator[Parts]:
    """A block of work that may be done part by part; if it raises on some ranks, all ranks raise.

    Args:
      what: the verb, for errors.
      groups: `Groups` or a tree of them. If it is a function from paths to groups, these are not
        known yet, and nothing is compared.
      fact: a description of the arguments, which must be equal on all ranks.
      sends: whether its parts send something. Then what each rank does by itself is wrapped in
        `Parts.part`, which notes an error until the end of the block.

    Yields:
      A `Parts`. A long block that sends nothing calls its `check_others` or `part` now and then.

    Raises:
      PeerFileError, DesyncError: as `same_call`; the groups can be used afterwards. A rank on which
        the block raised gets that error instead.

    Communication: as `same_call`; a failure writes one key into the store.
    """
    homes = list(dict.fromkeys(x for x in flatten(groups)[0] if isinstance(x, Groups)))
    parts = Parts(homes, sends=sends)
    try:
        yield parts
    except _Skipped:
        pass
    except Exception as found:
        parts.fail(found)
    finally:
        parts.end()
    error, parts.error = parts.error, None
    try:
        if error is None or all(home.state.failed is None for home in homes):
            same_call(what, homes, fact, error, skipped=parts.skipped)
        if error is not None:
            raise error
    finally:
        error = None  # else it would refer to itself, and keep what the block has made
