"""`python -m mics_fn verify DIR`: its flags, and what it prints; it needs neither ranks nor GPU."""

import argparse

from mics_fn.checkpoint import steps, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.add_argument("folder", help="the folder that save was given")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="which step (default the newest)")
    which.add_argument("--all", action="store_true", help="every committed step")


def main(args: argparse.Namespace) -> int:
    """Compare every value of a step with its checksum, and print what was compared.

    Raises:
        CheckpointError: something is not as it was saved.
    """
    for step in steps(args.folder) if args.all else [args.step]:
        print(verify(args.folder, step), flush=True)
    return 0
