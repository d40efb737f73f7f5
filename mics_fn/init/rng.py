"""Where in a generator's stream an op begins, while none of the ops draws.

[Note: stamps] No random number is drawn while ops are recorded, so a generator would stay as it is.
Each random op stamps its number in the state instead. The next op reads where it begins: after the
op of that number, also if code saved and restored the state in between; or, without a stamp, in the
state that is there, which code has set.
"""

import torch
from torch import Tensor

from mics_fn.errors import LeafError, message

STAMP = 0x6D694353
ON_CPU = 632  # words of a state there: the seed, two more, then what mt19937 draws from
ON_CUDA = 2  # words of a state there: the seed, and how many numbers were drawn


def stamped(state: Tensor, number: int) -> Tensor:
    """A generator's state with a number in it, in which its seed can still be read.

    >>> generator = torch.Generator().manual_seed(5)
    >>> generator.set_state(stamped(generator.get_state(), 7)).initial_seed()
    5
    >>> number_in(generator.get_state()), number_in(torch.Generator().get_state())
    (7, None)
    """
    words = state.clone().view(torch.int64)
    if len(words) == ON_CUDA:
        words[1] = STAMP << 32 | number * 4
    else:
        words[3:6] = torch.tensor([STAMP, STAMP + 1, number])
    return words.view(torch.uint8)


def number_in(state: Tensor) -> int | None:
    """The number that `stamped` put in a state; None if there is none."""
    words = state.view(torch.int64)
    if len(words) == ON_CUDA:
        offset = int(words[1])
        return offset % 2**32 // 4 if offset >> 32 == STAMP else None
    first, second, number = words[3:6].tolist()
    return number if (first, second) == (STAMP, STAMP + 1) else None


def start_of(generator: torch.Generator) -> int | Tensor:
    """After which op a generator is, or its state."""
    state = generator.get_state()
    number = number_in(state)
    return state if number is None else number


def default_generator(device: torch.device) -> torch.Generator:
    """The generator of ops that are not given one.

    Raises:
      LeafError: torch keeps none, or one of unknown state, for such devices.
    """
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    raise LeafError(message(f"{device}: random numbers there can not be replayed"))
