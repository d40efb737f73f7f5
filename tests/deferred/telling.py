"""What ranks are told of one that goes another way."""

import time
import warnings

import pytest
from cases import forget_groups, groups_of

from mics_fn.collectives import pending
from mics_fn.errors import DesyncError


def told(layout, make):
    """The words of a DesyncError, and after how long; `make` gives what runs on new groups."""
    forget_groups(layout)
    run = make(groups_of(layout, timeout_s=30.0))
    started = time.monotonic()
    try:
        # Not of a rank that leaves its schedule.
        with warnings.catch_warnings(action="ignore"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(pending, "_STALL_S", 0.3)
            run()
    except DesyncError as error:
        return str(error), time.monotonic() - started
    finally:
        forget_groups(layout)
    return "no error", 0.0
