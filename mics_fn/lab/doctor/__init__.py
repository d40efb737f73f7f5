"""`python -m mics_fn doctor`: is this machine fit, and are the numbers right on its GPUs?"""
