"""The line that `notebook.start(hosts=...)` prints: let this machine's ranks join that notebook."""

import base64
import json
import os
import sys
import tempfile
from multiprocessing.connection import Client

NAME = "MICS_FN_NOTEBOOK"


def main() -> int:
    """Join, and serve until the notebook ends."""
    secret = os.environ.pop(NAME, "")  # not an argument, which all users of a machine can read
    try:
        address, port, key = json.loads(base64.urlsafe_b64decode(secret))
    except ValueError:
        print(f"{NAME} is not set to what notebook.start printed", file=sys.stderr)
        return 2
    with Client((address, port), authkey=base64.b64decode(key)) as connection:
        from mics_fn.notebook.node import serve

        with tempfile.TemporaryDirectory(prefix="mics_fn_notebook_") as folder:
            serve(connection, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
