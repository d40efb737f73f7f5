"""Models made or read as shards: construction recorded and replayed, files read in part."""

from mics_fn.init.loading import load_shards
from mics_fn.init.model import init_model
from mics_fn.init.skeleton import on_meta_copy, refuse_lazy

__all__ = [
    "init_model",
    "load_shards",
    "on_meta_copy",
    "refuse_lazy",
]
