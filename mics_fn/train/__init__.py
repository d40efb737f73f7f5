"""A short loop around the verbs: Trainer, data, when replicas merge."""

from mics_fn.train.data import sampler
from mics_fn.train.replica_sync import ReplicaSync, SyncState, diloco, every_step, local_sgd
from mics_fn.train.trainer import StepMetrics, Trainer

__all__ = [
    "ReplicaSync",
    "StepMetrics",
    "SyncState",
    "Trainer",
    "diloco",
    "every_step",
    "local_sgd",
    "sampler",
]
