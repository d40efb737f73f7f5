"""The layout of a tree that is about to be cut: what decides it, and how ranks compare it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from mics_fn import checks
from mics_fn.collectives import agree
from mics_fn.errors import PlanError, message
from mics_fn.groups import Groups
from mics_fn.offload import DEVICE, Place
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.bucketing import LeafSpec
from mics_fn.shards.laying import Laying
from mics_fn.shards.leaf import dtype_name
from mics_fn.shards.options import Chosen


class Layout(NamedTuple):
    """The leaves of a tree, and where each of them will lie."""

    verb: str
    spec: Any
    leaves: list[Tensor]
    paths: list[str]  # beginning with the name of the tree
    homes: list[Groups]
    owners: list[int]  # for each leaf the first one that is the same tensor
    slots: dict[int, tuple[Bucket, int]]  # for the float leaves that own their data
    places: list[Place]  # where their pieces will lie
    laying: Laying  # which puts them there


def specs_of(
    verb: str,
    leaves: Sequence[Tensor],
    bare: Sequence[str],
    homes: Sequence[Groups],
    owners: Sequence[int],
    options: Chosen,
) -> dict[int, LeafSpec]:
    """What decides the bucket of each float leaf that owns its data, by its number."""
    precision, found = options.precision, dict[int, LeafSpec]()
    numbers = {home: number for number, home in enumerate(dict.fromkeys(homes))}
    for i, (leaf, path) in enumerate(zip(leaves, bare, strict=True)):
        if not leaf.is_floating_point() or owners[i] != i:
            continue
        dtypes = precision.dtypes(path, leaf.dtype)
        trained = not _is_frozen(verb, leaf, path, options.frozen)
        found[i] = LeafSpec(
            path=path,
            shape=tuple(leaf.shape),
            dtype=dtypes.param,
            parts=homes[i].partition_size,
            trainable=trained,
            group=(numbers[homes[i]], leaf.is_meta),
            travel=dtypes[1:],
            sent=precision.wires(path, leaf.dtype),
            state=precision.state_codes(path, dtypes.param, leaf.numel()) if trained else None,
            codes=precision.codes(path, leaf.dtype),
        )
    return found


def _is_frozen(verb: str, leaf: Tensor, path: str, frozen: Callable[[str], bool] | None) -> bool:
    answer = frozen is not None and checks.answer(verb, f"frozen({path!r})", frozen(path))
    return answer or (isinstance(leaf, nn.Parameter) and not leaf.requires_grad)


def check_ties(
    verb: str, owners: Sequence[int], paths: Sequence[str], homes: Sequence[Groups]
) -> None:
    """Raise PlanError if tied leaves are to live on different groups."""
    for i, owner in enumerate(owners):
        if homes[i] is not homes[owner]:
            raise PlanError(
                message(
                    f"{verb}: {paths[i]} is tied to {paths[owner]}, but on other groups",
                    [f"{homes[owner].describe()} against {homes[i].describe()}"],
                    fix="give tied leaves the same groups, or clone one of them",
                )
            )


def check_kept_place(verb: str, bucket: Bucket, place: Place) -> None:
    """Raise PlanError if leaves that are kept as codes are to lie elsewhere."""
    if bucket.codes is not None and place != DEVICE:
        text = f"{verb}: leaves that are kept as codes lie on the device, not on {place.kind}"
        lines = [f"bucket {bucket.index} ({bucket.names}): param={bucket.codes}"]
        fix = "give param= or where= a pattern that leaves these out"
        raise PlanError(message(text, lines, fix))


def agree_on(layout: Layout) -> None:
    """Compare paths, shapes, dtypes, groups and layout between ranks."""
    for home in dict.fromkeys(layout.homes):
        facts = [("groups", home.describe())]
        for i, leaf in enumerate(layout.leaves):
            if layout.homes[i] is home:
                text = f"{tuple(leaf.shape)} {dtype_name(leaf.dtype)}"
                text += " meta" if leaf.is_meta else ""
                if layout.owners[i] != i:
                    text += f" tied to {layout.paths[layout.owners[i]]}"
                elif i in layout.slots:
                    bucket, slot = layout.slots[i]
                    text += "" if bucket.trainable else " frozen"
                    travel = (bucket.dtype, bucket.compute, bucket.reduce, bucket.accumulate)
                    if len({leaf.dtype, *travel}) > 1:
                        text += f" as {'/'.join(map(dtype_name, travel))}"
                    text += f" sent as {bucket.wires}" if bucket.wires else ""
                    text += f" state={bucket.state}" if bucket.state else ""
                    text += f" kept as {bucket.codes}" if bucket.codes else ""
                    text += f" at {bucket.offsets[slot]} of bucket {bucket.index}"
                    if layout.places[i] != DEVICE:
                        text += f" on {layout.places[i].kind}"
                facts.append((layout.paths[i], text))
        agree(home, layout.verb, facts)
