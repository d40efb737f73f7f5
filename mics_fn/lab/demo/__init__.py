"""`python -m mics_fn demo`."""
