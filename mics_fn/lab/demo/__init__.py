"""`python -m mics_fn demo`: the same training, sharded over ranks and in one process."""
