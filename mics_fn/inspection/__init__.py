"""One leaf by its path, and tables: for people at a prompt."""

from mics_fn.inspection.access import get, set
from mics_fn.inspection.table import Summary, summary

__all__ = [
    "Summary",
    "get",
    "set",
    "summary",
]
