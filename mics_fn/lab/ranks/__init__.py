"""Ranks on this machine: forked for tests and notebooks, or launched."""
