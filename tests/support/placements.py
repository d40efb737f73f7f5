"""Placements by name, and over how many ranks each of them cuts what."""

from typing import Any

from costs import Cut

import mics_fn as mf
from mics_fn.groups import placement

# Over how many ranks a placement cuts states, parameters and gradients: "n" are all ranks, "k"
# those of a node, "1" is whole.
PLACES = {
    "ddp": "111",
    "zero1": "n11",
    "zero2": "n1n",
    "zero3": "nnn",
    "mics": "kkk",
    "fsdp": "kkk",
    "hpz": "nkn",
    "hybrid": "nkk",
}


def cut_of(name: str, num_ranks: int, node_size: int) -> Cut:
    """The numbers of a placement in a world."""
    sizes = {"n": num_ranks, "k": node_size, "1": 1}
    return Cut(*(sizes[letter] for letter in PLACES[name]))


def make_place(name: str, num_ranks: int, node_size: int, **options: Any) -> mf.Groups:
    """Groups of a placement, made by all ranks.

    Args:
      name: a key of `PLACES`.
      num_ranks, node_size: the world.
      options: other options of `make_groups`.
    """
    partition_size = cut_of(name, num_ranks, node_size).states
    groups = mf.make_groups(partition_size, node_size=node_size, **options)
    return placement.place(groups, name)
