"""`python -m mics_fn bench`."""
