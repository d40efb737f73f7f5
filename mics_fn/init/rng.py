"""Where in a generator's stream a recorded op begins, although no op draws while recording.

[Note: generators while recording] No random number is drawn while ops are recorded, so the state of
a generator would never move. Each random op therefore writes its index on the tape into the state.
The next random op reads there where it begins: after the op of that index, even if code saved and
restored the state in between; or, if the state holds no index, in that state, which code has set.
"""

import torch
from torch import Tensor

from mics_fn import _device
from mics_fn.errors import LeafError, message

MARK = 0x6D694353  # tells a state with an index from a real one
ON_CUDA = 2  # words of a state there: the seed, and how many numbers were drawn


def with_index(state: Tensor, index: int) -> Tensor:
    """A generator's state that holds the index of an op; its seed can still be read.

    >>> generator = torch.Generator().manual_seed(5)
    >>> generator.set_state(with_index(generator.get_state(), 7)).initial_seed()
    5
    >>> index_in(generator.get_state()), index_in(torch.Generator().get_state())
    (7, None)
    """
    words = state.clone().view(torch.int64)
    if len(words) == ON_CUDA:
        words[1] = MARK << 32 | index * 4
    else:
        words[3:6] = torch.tensor([MARK, MARK + 1, index])
    return words.view(torch.uint8)


def index_in(state: Tensor) -> int | None:
    """The index that `with_index` wrote into a state; None if there is none."""
    words = state.view(torch.int64)
    if len(words) == ON_CUDA:
        offset = int(words[1])
        return offset % 2**32 // 4 if offset >> 32 == MARK else None
    first, second, index = words[3:6].tolist()
    return index if (first, second) == (MARK, MARK + 1) else None


def start_of(generator: torch.Generator) -> int | Tensor:
    """Where the next op begins: the index of the op that it follows, or a state."""
    state = generator.get_state()
    index = index_in(state)
    return state if index is None else index


def default_generator(device: torch.device) -> torch.Generator:
    """The generator of ops that are not given one.

    Raises:
      LeafError: for such devices torch keeps no generator, or one whose state is not known here.
    """
    found = _device.default_generator(device)
    if found is None or device.type not in ("cpu", "cuda"):
        raise LeafError(message(f"{device}: random numbers on this device cannot be replayed"))
    return found
