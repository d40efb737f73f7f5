"""What is done with gradients: optimizers, clipping, loss scale, refused steps."""

from mics_fn.optim.clip import clip_by_global_norm, clip_by_value, global_norm
from mics_fn.optim.columns import fresh, map_columns
from mics_fn.optim.flat import by_leaf, replaced
from mics_fn.optim.guard import Guard, Verdict, norm_spike
from mics_fn.optim.loss_scale import LossScale, dynamic_scale, no_scale, static_scale
from mics_fn.optim.optimizers import adam, adamw, lion, sgd, warmup_cosine
from mics_fn.optim.state import TrainState, init_state, opt_step
from mics_fn.optim.torch_optim import from_torch
from mics_fn.optim.transform import Transform, as_transform, chain

__all__ = [
    "Guard",
    "LossScale",
    "TrainState",
    "Transform",
    "Verdict",
    "adam",
    "adamw",
    "as_transform",
    "by_leaf",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "dynamic_scale",
    "fresh",
    "from_torch",
    "global_norm",
    "init_state",
    "lion",
    "map_columns",
    "no_scale",
    "norm_spike",
    "opt_step",
    "replaced",
    "sgd",
    "static_scale",
    "warmup_cosine",
]
