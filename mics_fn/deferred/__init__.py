"""Parameters fetched at the op that needs them, gradients reduced during backward."""

from mics_fn.deferred.deferring import bucket_sizes, defer
from mics_fn.deferred.grad_sum import GradSum
from mics_fn.deferred.recording import record

__all__ = ["GradSum", "bucket_sizes", "defer", "record"]
