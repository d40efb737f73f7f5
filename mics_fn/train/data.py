"""Which samples a rank takes, and passes over a loader, each in an order of its own.

The sampler is torch's `DistributedSampler`, so any loader that accepts one can be used.
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
    """torch's `DistributedSampler` for the ranks of these groups, each with samples of its own.

    Pass it to a loader: `DataLoader(dataset, batch_size=8, sampler=sampler(dataset, groups))`.
    torchdata's `StatefulDataLoader` takes it in the same way. Its `state_dict` says how far a pass
    has come, but not which pass it is: save the sampler's `epoch` next to it, and call `set_epoch`
    again before you resume.

    Args:
      dataset: anything with a length and an index; equally long on every rank.
      groups: the groups whose ranks share the samples. A rank's share follows from its position in
        them, not from its global rank. So if they cover the data-parallel part of a mesh, tensor
        parallel ranks of equal position draw the same samples.
      shuffle: use another order in each epoch. `Trainer.fit` tells the sampler which epoch it is.
        In a loop of your own call `set_epoch(epoch)` before each pass, or every pass has the same
        order.
      seed: seed of the order; equal on every rank.
      drop_last: if the length n is not a multiple of the number of ranks, leave out the last
        n % world_size samples of the order, instead of repeating its first ones.

    Returns:
      The sampler. Every rank gets equally many samples, so that means over ranks are means over
      samples. Without `drop_last` up to world_size - 1 samples of an epoch occur twice.

    Communication: two small all-gathers over each of the two groups, to compare the arguments. All
      ranks of the groups must call it.

    Memory: the order of an epoch (8 bytes per sample) during its pass.

    Raises:
      GroupsError: `groups` is not a `Groups`; with a tree of them the shares would be ambiguous.
      LeafError: the dataset has no length.
      TreeError: there is not one sample for each rank.
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
        error = TreeError(message(text, fix="give each rank at least one sample"))
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
    """Passes over loaders without end, and tells those that shuffle by epoch which epoch it is.

    The first pass has the epoch that the sampler is set to, so that a resumed run can choose it.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, int] = (None, 0)  # the last sampler and its epoch

    def batches(self, loader: Iterable[Any]) -> Generator[Any, None, None]:
        """The batches of one pass after another, without end.

        Raises:
          ValueError: a pass gave no batch.
        """
        shuffler, (last, epoch) = _shuffler(loader), self._last
        now = getattr(shuffler, "epoch", epoch if shuffler is last else 0)
        # A pass that was left in the middle is not repeated: its first samples have been used.
        epoch = now + 1 if shuffler is last and now == epoch else now
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
    """The object that shuffles by epoch: a loader or one of its samplers; None if there is none."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return next((part for part in parts if callable(getattr(part, "set_epoch", None))), None)
