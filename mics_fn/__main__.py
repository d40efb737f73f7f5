"""The command line: `python -m mics_fn demo`, `plan`, `bench`, `verify` and `doctor`."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from mics_fn._version import __version__
from mics_fn.errors import MicsError, PlanError

COMMANDS = {
    "demo": "train a small GPT, sharded over ranks of this machine, and check the result",
    "plan": "rank partition sizes, placements and budgets for a model on a cluster",
    "bench": "measure this library against plain torch and FSDP2",
    "verify": "compare every value of a checkpoint with its checksum",
    "doctor": "check this machine and its GPUs, and make a report to send",
}
FILES = {"bench": "bench.command", "plan": "planner"}  # the others have the names of their commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for bad arguments, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m mics_fn", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mics_fn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        # Only the command that runs is imported, because each has imports that others do not need.
        if argv[:1] == [name]:
            module = importlib.import_module(f"mics_fn.lab.{FILES.get(name, name)}")
            module.add_arguments(command)
            command.set_defaults(run=module.main)
    args = parser.parse_args(argv)
    try:
        return args.run(args) or 0
    except (MicsError, KeyboardInterrupt) as error:
        print(f"\n{parser.prog} {args.command}: {str(error) or 'interrupted'}", file=sys.stderr)
        return {PlanError: 2, KeyboardInterrupt: 130}.get(type(error), 1)


if __name__ == "__main__":
    sys.exit(main())
