"""A short loop around the verbs: Trainer, data, when replicas merge."""

from mics_fn.train import replicas
from mics_fn.train.data import sampler
from mics_fn.train.trainer import StepMetrics, Trainer

__all__ = [
    "StepMetrics",
    "Trainer",
    "replicas",
    "sampler",
]
