"""`load`: a state as it was saved, on these ranks, however many wrote it and however it was cut."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from math import gcd, inf, prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, checks, shards, spans, tree
from mics_fn.checkpoint import directory
from mics_fn.checkpoint.saving import Contents, contents_of, folder_to_read, main_home
from mics_fn.collectives import together
from mics_fn.errors import FileError, human_bytes, message
from mics_fn.groups import Groups
from mics_fn.offload import is_placed
from mics_fn.optim import by_leaf, replaced
from mics_fn.spans import LOG
from mics_fn.threads import Job, ended
from mics_fn.tree import Tree

# Whether the files of a step fit a state, and what a rank reads from them.

_READERS = 2  # threads of a rank: while one reads, another compares; more would read out of order
_SHOWN = 8  # at most so many mismatches are listed
_KINDS = (bool, int, float, str)  # of values; one of numpy has that of Python in a file


def refuse_other_state(path: Path, saved: directory.Manifest, target: Contents) -> None:
    """Raise FileError unless everything in the target is in a step, and nothing else."""
    count = target.home.model.stages.size if target.stage and target.home.model else 0
    others = [f" of stage {i} " for i in range(count) if f" of stage {i}" != target.stage]
    want, got = _described(target), _described(saved)  # other stages compare what is theirs
    got = {name: x for name, x in got.items() if not any(end in f"{name} " for end in others)}
    wrong = [
        f"{name}: saved {got.get(name, 'nothing')}, expected {want.get(name, 'nothing')}"
        for name in want | got
        if got.get(name) != want.get(name)
    ]
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        text = f"load: {path} does not fit the state"
        fix = "pass like= as it was saved: the same model, optimizer, options and stages"
        raise FileError(message(text, [*wrong[:_SHOWN], *more], fix), str(path))


def _described(state: Contents | directory.Manifest) -> dict[str, str]:
    """What is compared of a state: the forms of its tensors, and the types of its values.

    Of leaves in parts the forms are those of whole ones, so the number of parts may differ.
    """
    found = dict[str, str]()
    for name, (kind, shape) in state.tensors.items():
        base, whole, _ = directory.whole_form(name, shape)
        found.update({name: f"{shape} {kind}"} if base in found else {base: f"{whole} {kind}"})
    for name, x in state.values.items():
        kind = next((k for k in _KINDS if isinstance(x, k)), type(x))
        found[name] = kind.__name__
    return found


def fill(path: Path, saved: directory.Manifest, target: Contents) -> Any:
    """Read all that the target has on this rank; returns what this rank gave as extra."""
    wanted, filled = list[Wanted](), list[tuple[Any, Tensor]]()
    sources = {directory.whole_form(k, shape)[0]: k for k, (_, shape) in saved.tensors.items()}
    for name, piece in target.pieces.items():
        if saved.tensors.get(name) != target.tensors[name]:  # it is in other parts, or in none
            source, x = sources[directory.whole_form(name, piece.shape)[0]], piece.data
            flat = torch.empty(x.numel(), dtype=x.dtype) if is_placed(x) else x.view(-1)
            filled.append((x, flat))
            forms = (source, saved.tensors[source][1]), (name, piece.shape)
            runs = partial(_runs, forms, piece.origin, x.numel())
            wanted += [(file, part, flat, runs) for part, file in saved.slices.get(source, ())]
            continue
        stop = piece.origin + piece.data.numel()
        for part, file in saved.slices.get(name, ()):
            if part.start < stop and part.stop > piece.origin:
                wanted.append((file, part, piece.data, piece.origin))
    files, given, home = saved.files, dict[str, Tensor](), target.home
    me = home.all_ranks.index(home.rank) % len(files)  # on fewer or more ranks that of another one
    giver = me if files[me].extra else 0
    for part in files[giver].slices:
        if part.name not in saved.tensors:
            name, nbytes = part.name.rpartition(" of rank ")[0], saved.slices[part.name][-1][0].stop
            memory = given.setdefault(name, torch.empty(nbytes, dtype=torch.uint8))
            wanted.append((giver, part, memory, 0))
    _read(path, saved, wanted)
    for x, values in filled:
        if is_placed(x):
            x.fill(0, values)
    try:
        return directory.decoded(files[giver].extra, given)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:  # also of recursion
        path /= directory.NAME
        what = message(f"load: {path} cannot be read", [f"{directory.EXTRA}: {error}"])
        raise FileError(what, str(path), damaged=True) from error


Run = tuple[int, int, int]  # of elements: where it begins and ends, and where it begins in a slice
# File, slice, target; its first element, or the runs of a slice that lie in it.
Wanted = tuple[int, directory.Slice, Any, int | Callable[[directory.Slice], Iterable[Run]]]


def _division(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """In how many parts a leaf is, the elements of each, and how many lie together in the leaf."""
    dim = directory.whole_form(name, shape)[2]
    if dim is None:
        return 1, prod(shape), prod(shape)
    return shape[0], prod(shape[1:]), prod(shape[1 + dim :])


def _runs(forms: Any, origin: int, size: int, part: directory.Slice) -> Iterator[Run]:
    """Which elements of a slice of a leaf in some parts lie in a range of the leaf in others."""
    (count, numel, inner), (parts, length, row) = (_division(*form) for form in forms)
    low = part.start
    step = gcd(inner, row)  # so many lie together in both
    while low < part.stop:
        high = min(part.stop, (low // step + 1) * step)
        whole = (low % numel // inner * count + low // numel) * inner + low % inner
        block, within = divmod(whole, row)
        at = block % parts * length + block // parts * row + within - origin
        first, last = max(at, 0), min(at + high - low, size)
        if first < last:
            yield first, last, low - part.start + first - at
        low = high


def _read(path: Path, saved: directory.Manifest, wanted: list[Wanted]) -> None:
    """Read slices with a few threads, in the order in which they lie.

    Each slice is read as a whole; what a part of the same flattened tensor wants of it is kept.
    """
    wanted.sort(key=lambda want: (want[0], want[1].offset))

    def read(want: Wanted) -> None:
        number, part, target, origin = want
        if not isinstance(origin, int):
            runs = list(origin(part))
            values = torch.empty(part.stop - part.start if runs else 0, dtype=target.dtype)
            if runs:
                reads[number](part, directory.memory_of(values))
            for low, high, first in runs:
                target[low:high].copy_(values[first : first + high - low])
            return
        low, high = max(part.start, origin), min(part.stop, origin + target.numel())
        placed = is_placed(target)
        flat: Any = target if placed else target.view(-1)
        place = slice(low - origin, high - origin)
        if target.is_cpu and not placed and (low, high) == (part.start, part.stop):
            reads[number](part, directory.memory_of(flat[place]))
            return
        values = torch.empty(part.stop - part.start, dtype=target.dtype)
        reads[number](part, directory.memory_of(values))
        values = values[low - part.start : high - part.start]
        if placed:
            flat.fill(place.start, values)
        else:
            flat[place].copy_(values)

    with ExitStack() as opened:
        reads = {
            number: opened.enter_context(directory.part_file(path, saved, number))
            for number in sorted({number for number, *_ in wanted})
        }
        each(read, wanted, _READERS, "mics_fn load")


def each(work: Callable[[Any], Any], items: Iterable[Any], count: int, name: str) -> None:
    """Do some work for each item on several threads; raise the first error.

    Nobody works on any of them once this has returned or raised.

    >>> each(print, ["one item"], 1, "example")
    one item
    """
    rest = iter(items)  # its `next` is one instruction; a small item costs nothing else

    def run() -> None:
        try:
            for item in rest:
                work(item)
        finally:
            deque(rest, 0)  # after an error the other threads end, too

    jobs = [Job(run) for _ in range(count)]
    try:
        for job in jobs:
            job.begin(name)
        for job in jobs:
            job.result()
    finally:
        deque(rest, 0)
        ended(jobs)


class Loaded(NamedTuple):
    """What `load` found.

    Args:
      state: as it was saved, in the structure of `like`.
      step: the number of the step.
      extra: what this rank gave when it saved.
    """

    state: Tree
    step: int
    extra: Any


def load(
    path: str | os.PathLike[str],
    like: Tree,
    groups: Any,
    *,
    step: int | None = None,
    on_corrupt: Literal["raise", "previous"] = "raise",
    replicas: directory.Replicas = "equal",
    donate: bool = False,
) -> Loaded:
    """A state that was saved, for any number of ranks, levels, placement and parts of the model.

    All ranks call it. If the model is in other parts than it was saved in, a rank reads all slices
    that have something of its leaves, which may be all rows for a few columns of each.

    A save to the folder that is under way on these ranks is waited for.

    Args:
      path: the folder that `save` was given.
      like: a state of the same structure, shapes and dtypes, such as that of before the first step.
        Its values are not used, so it may be lost. Leaves that are kept as codes were saved as the
        same codes.
      groups: those that `like` is sharded with.
      step: which one; default the newest committed one.
      on_corrupt: "previous" goes back to the next older step, on all ranks, where one is found to
        be damaged, and logs a warning. It stays as it is until a later save removes it as any
        other step. Where the system cannot read a file, nothing is known of it, which is an error.
      replicas: as it was saved.
      donate: read into the memory of `like`. If this raises, its values are lost.

    Returns:
      A `Loaded`: state, step and extra. Every value is compared with its checksum before it is
      used; a checksum that is missing is an error.

    Communication: a few small all-gathers over the partition group and the replication group.

    Memory: a second copy of the state, none with `donate`; and two buffers of 4 MiB while it reads
      what does not lie in host memory, or not in one piece. What lies in files, and is in other
      parts than it was saved in, is in host memory first.

    Raises:
      CheckpointNotFound: there is no such step.
      FileError: it is damaged; on all
        ranks, with the file and the leaf.
      FileError: the system cannot read a file; or a save of this process to the folder, which
        was under way, failed; on all ranks.
      FileError: it does not fit `like`; all differences are named. Codes, and replicas that
        are independent, fit in as many parts alone, and a pipeline in as many stages.
      DesyncError: ranks load other states.
      PlanError: an argument is not what it should be.

    Example:
      >>> import tempfile
      >>> groups, folder = make_groups(1), tempfile.mkdtemp()
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.adamw(0.1))
      >>> path = checkpoint.save(folder, state, groups, step=7, extra={"seen": 70})
      >>> like = init_state(shard({"w": torch.zeros(2)}, groups), optim.adamw(0.1))
      >>> found = checkpoint.load(folder, like, groups)
      >>> found.step, found.extra, found.state.params["w"].data
      (7, {'seen': 70}, tensor([1., 1.]))
    """
    shards.refuse_derivative("checkpoint.load", (), "call it outside of torch.func")
    checks.integer("load", "step", step, 0, optional=True, fix="None takes the newest one")
    checks.choice("load", "on_corrupt", on_corrupt, "raise", "previous")
    checks.choice("load", "donate", donate, True, False)
    spans.passing("load")
    like = shards.reclaimed(like)  # of what a write that was cut short has left, only the memory
    home = main_home("load", like, groups)
    folder, refused = directory.Folder(path), dict[int, FileError]()
    # Several steps may be read into this memory one after the other, but it is given away once.
    given = memory_like(like, donate=True) if donate else like
    with shards.Writing() as writing:
        if donate:
            writing.covers(like, "like", "checkpoint.load")
        while True:
            with together("load", home) as exchange:
                folder_to_read("load", path, raises=True)
                if home.rank == home.all_ranks[0]:
                    exchange.mine = _chosen(folder, step, refused)
            number, place = exchange.all[home.all_ranks[0]]
            try:
                into = writing if donate else None
                return _load(Path(place), number, given, groups, home, replicas, into)
            except FileError as error:
                if on_corrupt == "raise" or step is not None or not error.damaged:
                    raise
                refused[number] = error
                if home.rank == home.all_ranks[0]:
                    text = "load: step %d is refused, and an older one tried: %s"
                    LOG.warning(text, number, error)


def _chosen(
    folder: directory.Folder, step: int | None, refused: Mapping[int, FileError]
) -> list[Any]:
    """The step to load, and its folder; raises the first error if no step is left."""
    older = [each for each in folder.committed() if each < min(refused, default=inf)]
    if refused and not older:
        raise refused[max(refused)]
    number, path = folder.find(max(older) if refused else step)
    return [number, str(path)]


def _load(
    path: Path,
    step: int,
    like: Tree,
    groups: Any,
    home: Groups,
    replicas: directory.Replicas,
    writing: shards.Writing | None,
) -> Loaded:
    """Read one step; with `writing` into the memory of `like`, which it covers."""
    with together("load", home) as exchange, torch.no_grad():
        saved, exchange.mine = directory.manifest_in(path, step)
        state = memory_like(like, donate=writing is not None)
        target = contents_of("load", state, groups, home, replicas)
        refuse_other_state(path, saved, target)
    if len(set(exchange.all.values())) > 1:
        text = f"load: ranks see different files in {path}"
        raise FileError(message(text, fix="load from a folder that ranks share"), damaged=True)
    with together("load", home), torch.no_grad():
        if writing is not None:
            writing.mark_donated()
        extra = fill(path, saved, target)
        own = {k.removesuffix(target.stage): saved.values[k] for k in target.values}
        state = with_values(state, own)
    return Loaded(state, step, extra)


def memory_like(state: Tree, *, donate: bool = False) -> Tree:
    """A state whose tensors are to be read into, which share memory where they did before.

    Args:
      state: any pytree of shards and tensors.
      donate: whether that is their own memory; else it is new, of zeros. In the place of tensors in
        files come new ones, in these files; of those that are codes, of their kind; and of those
        that do not lie in one piece, or whose memory has other values, such that do.
    """
    kept: dict[tuple[Any, ...], Tensor] = {}  # new memory, by that in whose place it is

    def renewed(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        key = storage.data_ptr(), storage.nbytes(), x.device
        if key not in kept:
            kept[key] = _torch.lazy_zeros((storage.nbytes(),), torch.uint8, x.device)
        view, memory = torch.empty(0, dtype=x.dtype, device=x.device), kept[key].untyped_storage()
        return view.set_(memory, x.storage_offset(), x.size(), x.stride())

    def new(x: Any) -> Tensor:
        if shards.pack.has_codes(x):  # it is read into as bytes
            return x.within(x.codes.row if donate else renewed(x.codes.row))
        if is_placed(x):
            return x.unset()
        if x.is_conj() or x.is_neg() or not x.is_contiguous():
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return x if donate else renewed(x)

    def leaf_of(x: Any) -> Any:
        if isinstance(x, shards.Sharded | shards.Fixed):
            return type(x)(new(x.data.detach()), x.bucket, x.slot)  # pyright: ignore
        return new(x.detach()) if isinstance(x, Tensor) else x

    return tree.map_leaves(leaf_of, state, is_leaf=shards.is_leaf)


def with_values(state: Tree, values: Mapping[str, Any]) -> Tree:
    """The state with these numbers and texts."""
    plain = by_leaf(state)
    leaves, spec = tree.flatten(plain, shards.is_leaf)
    names = tree.paths(plain, is_leaf=shards.is_leaf)
    out = [values.get(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    return replaced(state, plain, spec.unflatten(out))


# Which steps a folder has, and whether their files are as they were saved; without ranks.

_VERIFY_THREADS = 4


def steps(path: str | os.PathLike[str]) -> list[int]:
    """The committed steps in a folder, oldest first.

    Args:
      path: the folder that `save` was given.

    Returns:
      Their numbers; none for a folder that does not exist. A save of this process to it that is
      under way is waited for.

    Raises:
      FileError: the folder cannot be read.

    Example:
      >>> checkpoint.steps("no such folder")
      []
    """
    return sorted(folder_to_read("steps", path).committed())


def latest(path: str | os.PathLike[str]) -> int | None:
    """The newest committed step in a folder; None if there is none.

    Args:
      path: the folder that `save` was given.

    Returns:
      Its number. A save of this process to it that is under way is waited for. A step that another
      process is writing, or whose save failed, is not committed.

    Raises:
      FileError: the folder cannot be read.

    Example:
      >>> checkpoint.latest("no such folder") is None
      True
    """
    return max(folder_to_read("latest", path).committed(), default=None)


class Verified(NamedTuple):
    """Result of `verify`: a step whose files equal what was saved.

    Args:
      step: the number of the step.
      path: the folder of the step.
      files: number of files of values.
      tensors: number of tensors.
      nbytes: bytes of all files together.
    """

    step: int
    path: Path
    files: int
    tensors: int
    nbytes: int

    def __str__(self) -> str:
        what = f"{self.tensors} tensors in {self.files} files, {human_bytes(self.nbytes)}"
        return f"step {self.step}: {what}, as they were saved"


def verify(path: str | os.PathLike[str], step: int | None = None) -> Verified:
    """Read all files of a step and compare every value with its checksum.

    Args:
      path: the folder that `save` was given.
      step: which one; default the newest committed one.

    Returns:
      What was compared. `python -m mics_fn verify DIR` prints it.

    Memory: 4 MiB for each of 4 files that are read at once.

    Raises:
      CheckpointNotFound: there is no such step.
      PlanError: `step` is not an int.
      FileError: something is not as it was
        saved, or a checksum is missing; the text names file and leaf.

    Example:
      >>> import tempfile
      >>> groups, folder = make_groups(1), tempfile.mkdtemp()
      >>> path = checkpoint.save(folder, shard([torch.ones(8)], groups), groups, step=3)
      >>> checkpoint.verify(folder).tensors
      1
    """
    checks.integer("verify", "step", step, 0, optional=True, fix="None takes the newest one")
    number, place = folder_to_read("verify", path).find(step)
    saved, _ = directory.manifest_in(place, number)

    def check(position: int) -> None:
        with directory.part_file(place, saved, position) as read:
            for one in saved.files[position].slices:
                read(one, memoryview(bytearray(saved.nbytes(one))))

    count = len(saved.files)
    each(check, range(count), _VERIFY_THREADS, "mics_fn verify")
    nbytes = sum((place / directory.part_name(i)).stat().st_size for i in range(count))
    return Verified(number, place, count, len(saved.tensors), nbytes)
