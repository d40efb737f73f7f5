"""`python -m mics_fn bench`: times, traffic and memory, against torch, FSDP2 and formulas."""
