"""What torch keeps beside the values of tensors, by private names of torch."""

from typing import Any

import torch


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy that is made when one of both is written to; None for memory of another owner."""
    try:
        return torch._lazy_clone(tensor)  # pyright: ignore[reportPrivateImportUsage]
    except RuntimeError:  # such as memory of numpy, of a file, or shared between processes
        return None


def is_lazy_clone(tensor: torch.Tensor) -> bool:
    """Whether such a copy still has no memory of its own; also if a view of it was written to."""
    return torch._C._is_cow_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def hooks_of(tensor: torch.Tensor) -> list[str]:
    """The hooks registered on a tensor, by the names of the methods that register them."""
    kinds = {
        "register_hook": "_backward_hooks",
        "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
    }
    return [method for method, kept in kinds.items() if getattr(tensor, kept, None)]


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; 0 for one of inference mode, which does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def set_order(ctx: Any, number: int) -> None:
    """Set when a node of autograd runs in backward: of those that can, the largest number first."""
    ctx._set_sequence_nr(number)
