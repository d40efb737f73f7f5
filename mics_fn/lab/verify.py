"""`python -m mics_fn verify DIR`: its flags, and what it prints; it needs neither ranks nor GPU."""

import argparse

from mics_fn.checkpoint import verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("folder", help="the folder that save was given")
    parser.add_argument("--step", type=int, help="which step (default the newest)")


def main(args: argparse.Namespace) -> int:
    """Compare every value of a step with its checksum, and print what was compared.

    Raises:
        CheckpointNotFound: there is no such step, or none at all.
        FileError: the step is not as it was saved.
    """
    print(verify(args.folder, args.step), flush=True)
    return 0
