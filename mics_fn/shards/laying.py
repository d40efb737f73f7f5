"""Where the chunks of new shards go: `where=` of the verbs that make some."""

from collections.abc import Sequence

from torch import Tensor

from mics_fn import _device, _torch
from mics_fn.groups import Home
from mics_fn.offload import DEVICE, Place, Scratch, Where, store
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.kept import coded_pieces
from mics_fn.shards.pack import split_chunk


class Laying:
    """Puts pieces where `Where.params` says, and has one scratch file for each folder.

    Args:
      where: the places.
    """

    def __init__(self, where: Where) -> None:
        self._where, self._files = where, dict[str, Scratch]()

    def place(self, path: str, home: Home) -> Place:
        """Where the piece of a leaf lies; on the CPU the device is the host."""
        place = self._where.at(path).params
        return DEVICE if place.kind == "host" and not _device.is_async(home.device) else place

    @property
    def host_bytes(self) -> int:
        """Host memory through which data of files travel."""
        return self._where.host_bytes

    def put(
        self,
        home: Home,
        bucket: Bucket,
        flat: Tensor,
        places: Sequence[Place],
        names: Sequence[str],
    ) -> list[Tensor]:
        """The pieces of a chunk, by slot, each in its place.

        Args:
          home: the groups of the bucket.
          bucket: the bucket.
          flat: this rank's chunk, in memory of its own.
          places: one per slot.
          names: paths of the leaves, for errors.

        Raises:
          OffloadError: a file cannot be made or written.
          LeafError: a value is not finite, and is to be kept as codes.
        """
        chunk = home.hierarchy.route.chunk
        if bucket.codes is not None and flat.numel() and not _torch.has_no_data(flat):
            return coded_pieces(bucket, chunk, flat, names)
        if _torch.has_no_data(flat) or not flat.numel() or set(places) == {DEVICE}:
            return split_chunk(bucket, chunk, flat)
        if len(set(places)) == 1:  # so that they are parts of one tensor there, too
            title = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            return split_chunk(bucket, chunk, self._moved(home, flat, places[0], title))
        found = zip(split_chunk(bucket, chunk, flat), places, names, strict=True)
        return [self._moved(home, piece.clone(), place, name) for piece, place, name in found]

    def _moved(self, home: Home, data: Tensor, place: Place, name: str) -> Tensor:
        """A tensor in its place: itself, or a copy."""
        if place == DEVICE or not data.numel():
            return data
        if place.kind == "host":
            made = _device.host_buffer(data.numel() * data.itemsize, home.device)
            return made.view(data.dtype).copy_(data)
        if place.folder not in self._files:
            own = home.partition.ranks[home.partition.rank]
            made = Scratch(place.folder, f"params-rank{own}", host_bytes=self.host_bytes)
            self._files[place.folder] = made
        return store(data, self._files[place.folder], name)
