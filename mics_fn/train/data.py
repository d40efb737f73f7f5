"""Which samples a rank takes, and passes over a loader in an order of their own.

The sampler is torch's; so is every loader that takes one.
"""

from collections.abc import Generator, Iterable, Sized
from typing import Any

from torch.utils.data import DistributedSampler

from mics_fn.collectives import same_call
from mics_fn.errors import GroupsError, LeafError, MicsError, TreeError, message
from mics_fn.groups import Groups
from mics_fn.shards import require_groups


def sampler(
    dataset: Sized, groups: Groups, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler:
    """torch's `DistributedSampler` for the ranks of these groups: each takes samples of its own.

    Pass it to a loader: `DataLoader(dataset, batch_size=8, sampler=sampler(dataset, groups))`. It
    goes in the same way to torchdata's `StatefulDataLoader`, whose `state_dict` knows how far a
    pass has come, not which pass: save the sampler's `epoch` next to it, and `set_epoch` it again
    before you resume.

    Args:
      dataset: anything with a length and an index; as long on every rank.
      groups: who shares the samples. A rank's share follows from its position in them, not from its
        global rank: where they cover the data-parallel part of a mesh, tensor parallel ranks of
        equal position draw the same samples.
      shuffle: another order in each epoch. `Trainer.fit` says which one it is; in a loop of your
        own call `set_epoch(epoch)` before each pass, or every pass has the same order.
      seed: of the order; equal on every rank.
      drop_last: where the ranks do not divide the length n, leave out the last n % world_size
        samples of the order, instead of taking its first ones again until they do.

    Returns:
      The sampler. Every rank gets equally many samples, so that means over ranks are means over
      samples; without `drop_last` up to world_size - 1 of an epoch come twice.

    Communication: two small all-gathers over each of the two groups, to compare the arguments. All
      ranks of the groups must call it.

    Memory: an epoch's order (8 bytes a sample) while it is gone through.

    Raises:
      GroupsError: `groups` are no `Groups`; a tree of them has no one answer.
      LeafError: the dataset has no length.
      TreeError: not a single sample is left for each rank.
      DesyncError: ranks differ in the length of the dataset or in an argument.

    Example:
      >>> with make_groups(1) as groups:
      ...     list(sampler(range(5), groups, shuffle=False))
      [0, 1, 2, 3, 4]
    """
    require_groups("sampler", groups)
    if not isinstance(groups, Groups):
        fix = "pass the groups whose ranks take different samples"
        raise GroupsError(message(f"sampler: groups is {type(groups).__name__}", fix=fix))
    groups.partition.check_open()
    ranks, size = groups.world_size, len(dataset) if isinstance(dataset, Sized) else -1
    error: MicsError | None = None
    if size < 0:
        fix = "a dataset that is only iterable cuts itself, by groups.position and world_size"
        error = LeafError(message(f"sampler: {type(dataset).__name__} has no length", fix=fix))
    elif size == 0 or (drop_last and size < ranks):
        text = f"sampler: {size} samples for {ranks} ranks, drop_last={drop_last}"
        error = TreeError(message(text, fix="give each rank a sample at least"))
    about = f"{size} samples, shuffle={shuffle}, seed={seed}, drop_last={drop_last}"
    same_call("sampler", [groups], about, error)
    if error is not None:
        raise error
    return DistributedSampler(
        dataset,  # pyright: ignore[reportArgumentType]
        num_replicas=ranks,
        rank=groups.position,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


class Epochs:
    """Goes through loaders again and again, and tells those that shuffle by epoch which one it is.

    The first pass has the epoch at which the sampler is, so that a resumed run can set it.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, int] = (None, 0)  # who was told last, and what

    def batches(self, loader: Iterable[Any]) -> Generator[Any, None, None]:
        """Batches of pass after pass, without end.

        Raises:
          ValueError: a pass gave no batch.
        """
        shuffler, (told, epoch) = _shuffler(loader), self._last
        now = getattr(shuffler, "epoch", epoch if shuffler is told else 0)
        # Left in the middle of a pass, it would give the beginning of the same order again.
        epoch = now + 1 if shuffler is told and now == epoch else now
        while True:
            if shuffler is not None:
                shuffler.set_epoch(epoch)
                self._last = (shuffler, epoch)
            empty = True
            for batch in loader:
                empty = False
                yield batch
            if empty:
                raise ValueError("Trainer.fit: the loader gave no batch")
            epoch += 1


def _shuffler(loader: Any) -> Any:
    """What of a loader has an order for each epoch: itself or one of its samplers; or None."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return next((part for part in parts if callable(getattr(part, "set_epoch", None))), None)
