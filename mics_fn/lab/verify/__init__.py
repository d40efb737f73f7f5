"""`python -m mics_fn verify`: are the files of a checkpoint as they were saved?"""
