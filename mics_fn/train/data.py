"""Which samples a rank takes.

The sampler is torch's `DistributedSampler`, so any loader that accepts one can be used.
"""

from collections.abc import Sized

from torch.utils.data import DistributedSampler

from mics_fn import checks
from mics_fn.collectives import same_call
from mics_fn.errors import GroupsError, LeafError, MicsError, TreeError, message
from mics_fn.groups import Groups
from mics_fn.shards import require_groups

_LARGEST_SEED = 2**63 - 1  # torch takes a sum of seed and epoch that is below 2**64


def sampler(
    dataset: Sized, groups: Groups, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler:
    """torch's `DistributedSampler` for the ranks of these groups, each with samples of its own.

    Pass it to a loader: `DataLoader(dataset, batch_size=8, sampler=sampler(dataset, groups))`.
    torchdata's `StatefulDataLoader` takes it in the same way. Its `state_dict` says how far a pass
    has come, but not which pass it is. `Trainer.fit` notes both; in a loop of your own save the
    sampler's `epoch` next to it, and call `set_epoch` again before you resume.

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
      PlanError: `seed` is not an int from 0 to 2**63 - 1, or another option is not a bool.
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
        fix = "pass the dataset first, then the groups whose ranks take different samples"
        raise GroupsError(message(f"sampler: groups is {type(groups).__name__}", fix=fix))
    checks.flag("sampler", "shuffle", shuffle)
    checks.flag("sampler", "drop_last", drop_last)
    checks.integer("sampler", "seed", seed, 0, fix="pass the same number on all ranks")
    if seed > _LARGEST_SEED:
        expected, fix = "an int of at most 2**63 - 1", "pass a smaller number, such as 0"
        checks.refuse("sampler", "seed", seed, expected, fix)
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
