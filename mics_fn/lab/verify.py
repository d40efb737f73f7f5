"""`python -m mics_fn verify DIR`: its flags, and what it prints; it needs neither ranks nor GPU."""

import argparse
import sys

from mics_fn.checkpoint import steps, verify
from mics_fn.errors import FileError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("folder", help="the folder that save was given")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="which step (default the newest)")
    which.add_argument("--all", action="store_true", help="every committed step")


def main(args: argparse.Namespace) -> int:
    """Compare every value of a step with its checksum, and print what was compared.

    With `--all`, damage in one step does not keep the others from being compared; the last line
    says how many steps are as they were saved.

    Returns:
        0, or 1 if something is not as it was saved.

    Raises:
        CheckpointNotFound: there is no such step, or none at all.
        FileError: the step is not as it was saved.
    """
    found, damaged = steps(args.folder) if args.all else [], 0
    if not found:
        print(verify(args.folder, args.step), flush=True)
        return 0
    for step in found:
        try:
            print(verify(args.folder, step), flush=True)
        except FileError as error:
            damaged += 1
            print(f"step {step}: {error}", file=sys.stderr, flush=True)
    print(f"{len(found) - damaged} of {len(found)} steps are as they were saved")
    return 1 if damaged else 0
