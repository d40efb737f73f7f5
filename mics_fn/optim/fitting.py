"""Whether gradients fit the parameters that a step is taken on."""

from typing import Any

from torch import Tensor

from mics_fn import _device, _torch, tree
from mics_fn.errors import LeafError, TreeError, message
from mics_fn.optim.flat import Unpacked, unpacked
from mics_fn.optim.runs import any_requires_grad, devices
from mics_fn.shards import Sharded, dtype_name, is_leaf


def check_grads(want: Unpacked, got: Unpacked) -> bool:
    """Check that trees fit; whether parameters are leaves of autograd, and nothing else derives.

    Raises:
      TreeError, LeafError: a gradient does not fit its parameter, by name.
    """
    if want.spec != got.spec:
        where = tree.first_mismatch(want.closed(), got.closed(), "grads", is_leaf)
        fix = "differentiate with respect to state.params"
        raise TreeError(
            message("opt_step: the gradients' tree differs from the parameters'", [where], fix=fix)
        )
    if not _fits(want, got):
        for i, (a, b) in enumerate(zip(want.leaves, got.leaves, strict=True)):
            if not _fits(unpacked(a), unpacked(b)):
                raise _mismatch(tree.join("grads", tree.spec_paths(want.spec)[i]), a, b)
    if any_requires_grad(got.pieces) or _torch.inside_torch_func():
        return False
    variables = [x for x in want.pieces if x.requires_grad]
    return bool(variables) and all(x.is_leaf for x in variables)


def _facts(found: Unpacked) -> tuple[Any, ...]:
    """What a gradient has in common with its parameter, piece by piece."""
    # Shapes of tensors take long to read.
    shapes = found.lengths if found.in_rows else [x.shape for x in found.pieces]
    return found.places, shapes


def _fits(want: Unpacked, got: Unpacked) -> bool:
    """Whether gradients fit; those of parameters on the host may be on a device."""
    homes, own = devices(want.pieces), devices(got.pieces)
    fit = homes == own or all(
        home == x or (home.type == "cpu" and _device.is_async(x))
        for home, x in zip(homes, own, strict=False)
    )
    return fit and _facts(want) == _facts(got)


def _mismatch(path: str, param: Any, grad: Any) -> TreeError | LeafError:
    """The error for a gradient that does not fit its parameter."""
    what, fix = "does not match its parameter", "pass like=state.params to reduce_grads"
    lines = [f"expected {param}", f"got {grad if is_leaf(grad) else type(grad).__name__}"]
    if not isinstance(param, Sharded):
        fix = "differentiate with respect to state.params"
    elif isinstance(grad, Tensor):
        fix = "do both hops first: reduce_grads(grads, groups, like=state.params)"
    elif isinstance(grad, Sharded) and grad.data.device != param.data.device:
        text = f"opt_step: {path} is on {grad.data.device}, its parameter on {param.data.device}"
        return LeafError(message(text, fix="move it to the parameter's device"))
    elif isinstance(grad, Sharded) and grad.shape == param.shape:
        lines = [f"it lies at {_place(grad)}, the parameter at {_place(param)}"]
    return TreeError(message(f"opt_step: {path} {what}", lines, fix=fix))


def _place(leaf: Sharded) -> str:
    bucket = leaf.bucket
    size = f"{bucket.numel} x {dtype_name(bucket.dtype)}"
    return f"{bucket.offsets[leaf.slot]} of bucket {bucket.index} ({size})"
