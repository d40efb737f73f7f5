"""The report of the doctor: what each part found, as JSON and as text that a user can send."""

import getpass
import json
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mics_fn.errors import human_bytes, name_ranks
from mics_fn.lab.doctor.rank import Check
from mics_fn.lab.ranks.bounded import Ended
from mics_fn.lab.report import table

OK, WRONG, FAILED, HANGS, LEFT_OUT = "ok", "WRONG", "FAILED", "HANGS", "left out"
TRACE_LINES = 25
# A path loses its folders, and an address its numbers.
_PATH = re.compile(
    r"(?<![\w.:/])(?:~|[A-Za-z]:)?(?:[\\/][^\s\\/:,;'\"()<>\[\]]+)*[\\/](?=[^\s\\/])"
)
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){3,7}\b")
_COMMON = ("localhost", "root", "user", "nobody")  # these tell nobody apart


@dataclass(frozen=True)
class Finding:
    """What came of one part.

    Args:
        name: of the part.
        verdict: one of the words above.
        ranks, seconds: what it took.
        checks: what it looked at.
        errors: how ranks ended that did not end well, and where; or why it was left out.
    """

    name: str
    verdict: str
    ranks: int
    seconds: float = 0.0
    checks: Sequence[Check] = ()
    errors: Sequence[str] = ()
    facts: dict[str, Any] = field(default_factory=dict)  # of the environment

    @property
    def well(self) -> bool:
        """Whether nothing is wrong here."""
        return self.verdict in (OK, LEFT_OUT)


def checks_of(folder: Path, ranks: int) -> list[Check]:
    """What the ranks found; of a check that several ranks made, the worst value."""
    worst: dict[str, Check] = {}
    for rank in range(ranks):
        with suppress(FileNotFoundError):
            for line in (folder / f"checks{rank}").read_text().splitlines():
                check = Check(*json.loads(line))
                seen = worst.setdefault(check.what, check)
                if check.value is not None and seen.value is not None:
                    worst[check.what] = max(seen, check, key=lambda c: c.value or 0.0)
    return list(worst.values())


def errors_of(ended: Sequence[Ended]) -> list[str]:
    """How ranks ended that did not end well, each distinct text once, then their tracebacks."""
    shared: dict[str, list[int]] = {}
    for rank, one in enumerate(ended):
        if not one.well:
            tail = [*one.trace.splitlines(), *([] if one.error else one.output.splitlines())]
            text = "\n".join([one.error or one.how, *tail[-TRACE_LINES:]])
            shared.setdefault(clean(text), []).append(rank)
    return [f"{name_ranks(ranks)}: {text}" for text, ranks in shared.items()]


def clean(text: str) -> str:
    """A text without folders, names of hosts and users, and addresses.

    >>> clean('File "/home/ann/env/lib/torch/nn.py", line 3: peer 10.0.0.7 closed')
    'File "nn.py", line 3: peer <address> closed'
    """
    text = _ADDRESS.sub("<address>", _PATH.sub("", text))
    for name, stand_in in _names().items():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", stand_in, text, flags=re.IGNORECASE)
    return re.sub(r"0x[0-9a-f]+", "0x..", text)


def _names() -> dict[str, str]:
    """What tells this machine and its user apart, and what is written instead."""
    found = {}
    host = socket.gethostname()
    for name in (host, host.partition(".")[0]):
        found[name] = "<host>"
    with suppress(OSError, KeyError, ImportError):
        found[getpass.getuser()] = "<user>"
    found[Path.home().name] = "<user>"
    return {name: own for name, own in found.items() if len(name) > 2 and name not in _COMMON}


def as_json(findings: Sequence[Finding], device: str, seconds: float) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "report": "mics_fn doctor",
        "device": device,
        "seconds": round(seconds, 1),
        "well": all(one.well for one in findings),
        "environment": next((one.facts for one in findings if one.facts), {}),
        "parts": [
            {
                "name": one.name,
                "verdict": one.verdict,
                "ranks": one.ranks,
                "seconds": round(one.seconds, 1),
                "checks": [check._asdict() | {"ok": check.ok} for check in one.checks],
                "errors": list(one.errors),
            }
            for one in findings
        ],
    }


def as_text(finding: Finding) -> str:
    """One part for people: its verdict, its checks, and what went wrong."""
    if finding.verdict == LEFT_OUT:
        return f"{finding.name}: {LEFT_OUT}, because {finding.errors[0]}"
    ranks = f"{finding.ranks} rank" + ("s" if finding.ranks > 1 else "")
    title = f"{finding.name}: {finding.verdict} ({ranks}, {finding.seconds:.0f} s)"
    rows: list[tuple[str, ...]] = [(name, _fact(fact)) for name, fact in finding.facts.items()]
    lines = [_facts_table(title, rows) if rows else table(title, _rows(finding.checks))]
    lines += [f"  {line}" for error in finding.errors for line in error.splitlines()]
    return "\n".join(lines)


def _facts_table(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:{width}}  {fact}" for name, fact in rows)])


def _fact(fact: Any) -> str:
    return ("; ".join(fact) or "none") if isinstance(fact, list) else str(fact)


def _rows(checks: Sequence[Check]) -> list[tuple[str, ...]]:
    rows = []
    for check in checks:
        if check.value is None:
            rows.append((check.what, "not available", "", ""))
            continue
        limit = "" if check.limit is None else f"of {_figure(check.limit, check.unit)}"
        mark = "" if check.ok else WRONG
        rows.append((check.what, _figure(check.value, check.unit), limit, mark))
    return rows or [("nothing was found", "")]


def _figure(value: float, unit: str) -> str:
    if unit == "bytes":
        return human_bytes(value)
    if unit:
        return f"{value:.3f} {unit}"
    return f"{value:d}" if isinstance(value, int) else f"{value:.1e}"
