"""Shards that are filled leaf by leaf, so that the full values never exist all at once."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mics_fn import tree
from mics_fn.collectives import Parts, collect_all, in_parts
from mics_fn.errors import disagreement
from mics_fn.groups import Groups
from mics_fn.init.chunks import Chunks
from mics_fn.offload import where_of
from mics_fn.shards import (
    Fixed,
    Leaf,
    Piece,
    Sharded,
    checksum_of,
    is_leaf,
    layout_of,
    pieces,
    refuse_overlaps,
)

BLOCK_BYTES = 2**24  # that are read at once


class Filling:
    """Shards of named parameters with the layout that `shard` would choose, filled with zeros.

    Args:
      verb: for errors.
      params: by name; only their shapes, dtypes, kinds, devices and ties are read.
      groups: as for `shard`.
      options: as for `shard`.

    Communication: a digest of the tree.

    Memory: this rank's shards; of those that live in files, `host_bytes` or one bucket.

    Raises:
      TreeError, LeafError, PlanError, DesyncError: as `shard`.
    """

    def __init__(
        self, verb: str, params: Mapping[str, Tensor], groups: Any, options: dict[str, Any]
    ) -> None:
        names, _ = tree.flatten({name: name for name in params})
        homes = tree.spread(
            groups, params, what="groups", is_value=lambda value: isinstance(value, Groups)
        )
        self.groups: list[Groups] = list(dict.fromkeys(homes))
        for home in self.groups:
            # Even if this tree was compared before, another rank may now come with a different one.
            home.agreed.difference_update([seen for seen in home.agreed if seen[0] == verb])
        shapes = layout_of(verb, "params", dict(params), groups, **options)
        self.verb = verb
        self.homes: dict[str, Groups] = dict(zip(names, homes, strict=True))
        leaves = dict(zip(names, tree.flatten(shapes, is_leaf)[0], strict=True))
        self.shards: dict[str, Leaf] = {name: leaves[name] for name in params}
        trained = [f"params.{k}" for k, leaf in leaves.items() if isinstance(leaf, Sharded)]
        refuse_overlaps(verb, {f"params.{k}": value for k, value in params.items()}, trained)
        self._chunks = Chunks(where_of(options.get("where")))
        for name, leaf in self.shards.items():
            home = self.homes[name]
            if isinstance(leaf, Sharded | Fixed) and leaf.bucket is not None:
                self._chunks.add(home, leaf.bucket, leaf.slot, name)
            elif isinstance(leaf, Fixed):
                whole = torch.zeros(leaf.shape, dtype=leaf.dtype, device=home.device)
                self.shards[name] = replace(leaf, data=whole)
        self.order = self._chunks.order(self.shards)
        self._sums: dict[Groups, tuple[list[str], Tensor]] = {}
        self._parts = Parts()

    def part(self, name: str) -> tuple[int, int]:
        """Start and stop of the elements that this rank keeps; 0 and 0 for a leaf that is tied."""
        leaf = self.shards[name]
        if not isinstance(leaf, Sharded | Fixed):
            return 0, 0
        if leaf.bucket is None:
            return 0, leaf.data.numel()
        piece: Piece = pieces(leaf.bucket, self.homes[name].hierarchy.route.chunk)[leaf.slot]
        return piece.origin, piece.origin + piece.length

    def put(self, name: str, full: Tensor) -> None:
        """Keep this rank's part of a full value."""
        start, stop = self.part(name)
        self._parts.hear()
        if start < stop:
            self._open(name).copy_(full.detach().reshape(-1)[start:stop])
            self._chunks.filled(name)

    def read(self, name: str, source: Callable[[int, int], Tensor]) -> None:
        """Keep this rank's part of a value; `source` gives the elements between two indices."""
        start, stop = self.part(name)
        if start < stop:
            data = self._open(name)
            step = max(1, BLOCK_BYTES // data.itemsize)
            for low in range(start, stop, step):
                high = min(low + step, stop)
                self._parts.hear()
                data[low - start : high - start].copy_(source(low, high))
            self._chunks.filled(name)

    def _open(self, name: str) -> Tensor:
        """The memory of this rank's part of a value."""
        return self._chunks.memory(name) if self._chunks.has(name) else self._data(name)

    def _data(self, name: str) -> Tensor:
        data: Any = self.shards[name].data  # pyright: ignore[reportAttributeAccessIssue]
        return data.view(-1)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The block in which all values are put; at its end all pieces are in their places.

        Communication: as `in_parts`.

        Raises:
          OffloadError: a file cannot be made, read or written.
          PeerOffloadError, DesyncError: the block raised on other ranks.
        """
        with in_parts(self.verb, self.groups) as self._parts:
            yield
            for name, data in self._chunks.settled(self._parts.hear).items():
                self.shards[name] = replace(self.shards[name], data=data)  # pyright: ignore
            for home in self.groups:
                self._add_up(home)

    def _add_up(self, home: Groups) -> None:
        """Take the checksums that `check_copies` compares, which reads what lies in files."""
        names = [name for name in self.shards if self.homes[name] is home]
        names = [name for name in names if isinstance(self.shards[name], Sharded | Fixed)]
        if home.num_replicas > 1 and names:
            sums = list[Tensor]()
            for name in names:
                self._parts.hear()
                sums.append(checksum_of(self._data(name)))
            self._sums[home] = names, torch.stack(sums).to(home.device)

    def check_copies(self) -> None:
        """Compare this rank's shards with those of the ranks that keep the same part.

        Each rank made or read its values alone, so they differ if its machine computes otherwise.

        Communication: 8 bytes per leaf.

        Raises:
          DesyncError: on every rank, with the first leaf that differs and the ranks that differ.
        """
        for home, (names, sums) in self._sums.items():
            found, p = collect_all(home, sums), home.partition_size
            differs = {
                rank: (found[rank] != found[home.ranks[position % p]]).nonzero().flatten().tolist()
                for position, rank in enumerate(home.ranks)
            }
            odd = [rank for rank, at in differs.items() if at]
            if odd:
                first = f"first difference: params.{names[min(differs[odd[0]])]}"
                fix = "let all ranks make or read the same values, on machines that compute alike"
                text = f"{self.verb}: replicas hold different values"
                said = dict.fromkeys(odd, "not as in the first replica")
                raise disagreement(text, said, fix, [first])
