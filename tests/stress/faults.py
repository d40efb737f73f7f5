"""`stress faults`: faults of every kind, one in each of many small jobs, and what came of them.

Each job is judged against one without a fault, bit for bit. What may not happen: a rank that lives
and neither ends nor raises, a process that dies although nothing ended it, a state that is none of
the twin's, an alarm without a cause, an error that does not say which rank began it.

seconds: from the fault to the last error of a living rank; goal in the next column. hang: ranks
that live and say nothing. death: processes that nothing ended. wrong: a state that the same job
without a fault never has. alarm: an error although nothing was wrong. untyped: an error of another
library. unnamed: an error that does not name the rank. late: later than the goal. reset: not right
after `reset`. unreached: the fault did not happen, or nobody noticed it. made again: some rank, or
the store at the start, was not heard in time, with nothing worse; tried once more, alone and with
eight times the limits; at most 5 % of trials.
"""

import importlib
import multiprocessing as mp
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mics_fn.errors import GroupsError
from mics_fn.lab.report import table
from tests.stress.fault_trials import SAVED, STEPS, STORE, Found, Told, Trial, run_trial

LANE_LIMIT_S = 240.0  # of one trial, if all else fails
HARMLESS = ("slow", "gil", "disk_full")
ENDS_SOON = ("raise", "interrupt", "oom", "torn", "exit", "kill")
FAULTS = (*ENDS_SOON, "stop", *STORE, "nan", "flip", "wrong_call", *HARMLESS)
PLACES = {
    "start": ("start: init_distributed", "start: make_groups"),
    "build": ("build: Trainer", "build: shard", "comparison"),
    "step": ("step", "fetch", "reduction", "over 'replicas'", "step totals", "opt_step", "commit"),
    "save": ("save", "save: write", "save: commit"),
    "load": ("load",),
}
ON_DISK = (*PLACES["save"], *PLACES["load"])
# Where an error says who tells it, and which group that is.
OWN_PLACE = re.compile(r"on rank \d+;|(waiting: rank \d+ of|its group is) ranks? [\d ,-]+")
SOON_S, DESYNC_S = 1.0, 1.5  # what each kind of fault may take
SLACK_S, START_S = 1.0, 1.5  # beyond a limit; at the start rank 0 keeps the store for a second
PROBLEMS = ("hang", "death", "wrong", "alarm", "untyped", "unnamed", "late", "reset", "unreached")
# A machine that is shared makes some processes wait, which is nobody's fault. Then errors are late;
# a rank that is not heard in time is named instead of the culprit; or a job ends before its fault.
# Such a trial is worthless. It is made again, alone and with longer limits.
LATE_SHARE, AGAIN_SHARE = 0.05, 0.05  # of all trials may be so
TIMED = {"unnamed", "late", "unreached"}
NO_ANSWER = "no answer"
TIMES = 8  # the limits of the trials that are made again


@dataclass(frozen=True)
class FaultsConfig:
    """What `stress faults` does.

    Args:
      trials: how many faults.
      ranks: the sizes of jobs.
      seed: chooses them.
      lanes: how many jobs run at the same time.
      heartbeat_s, timeout_s: limits of the groups.
    """

    trials: int = 500
    ranks: tuple[int, ...] = (4, 8)
    seed: int = 0
    lanes: int = 2
    heartbeat_s: float = 2.0
    timeout_s: float = 5.0


def trials_of(config: FaultsConfig) -> Iterator[Trial]:
    """Trials drawn by a seed, uniform over faults, places, ranks and partition sizes.

    A job whose fault is in a save or a load saves after one of its steps, and loads that again.
    """
    draw = random.Random(config.seed)
    for number in range(config.trials):
        n = draw.choice(config.ranks)
        sizes = [p for p in range(1, n + 1) if n % p == 0]
        p, fault = draw.choice(sizes), FAULTS[number % len(FAULTS)]
        if fault == "flip":  # which only another replica can tell
            p = draw.choice(sizes[:-1])
        operation = _operation(draw, fault, n, p)
        step = draw.randrange(1, STEPS) if operation in PLACES["step"] else 0
        if operation in ON_DISK:
            step = SAVED
        # At the start nothing else bounds a wait.
        timeout_s = config.timeout_s - (2.0 if operation in PLACES["start"] else 0.0)
        # One rank commits for all.
        place = (operation, step, 0 if operation == "save: commit" else draw.randrange(n))
        how = (draw.random() < 0.5, draw.random() < 0.5, config.heartbeat_s, timeout_s)
        yield Trial(number, n, p, fault, *place, *how)


def _operation(draw: random.Random, fault: str, n: int, p: int) -> str:
    """A point at which this fault can be."""
    only = {"torn": ["commit"], "flip": ["opt_step"], "nan": ["reduction"]}
    only["wrong_call"] = ["comparison", "reduction"]
    if fault in only:
        return draw.choice(only[fault])
    # A full disk does no harm elsewhere, and saves on one have tests of their own.
    places = [name for name in PLACES if fault != "disk_full" or name not in ("save", "load")]
    found = PLACES[draw.choice(places)]
    missing = [PLACES["start"][0]] if fault in STORE else []  # there is no store yet
    missing += ["over 'replicas'"] if p == n else []
    return draw.choice([name for name in found if name not in missing])


Twins = dict[tuple[int, int, int], dict[int, dict[int, str]]]  # digests by job, rank and step


def measure_faults(config: FaultsConfig) -> dict[str, Any]:
    """Run all trials, several at a time, and judge them."""
    importlib.import_module("torch._dynamo")  # which each rank would import
    torch.set_num_threads(1)
    trials, started = list(trials_of(config)), time.monotonic()
    plain = {twin for trial in trials for twin in _twins(trial)}
    with mp.get_context("fork").Pool(config.lanes) as lanes:
        twins: Twins = {}
        for found in _all(lanes, sorted(plain, reverse=True)):
            errors = [told.text for told in found.told.values() if told.error]
            if errors or len(found.told) < found.trial.ranks:
                raise GroupsError(f"faults: a job without a fault failed: {errors[:1]}")
            told = found.told.values()
            twins[_key(found.trial)] = {each.rank: each.digests for each in told}
        rows = {found.trial.number: _row(found, twins) for found in _all(lanes, trials)}
        again = [number for number, row in rows.items() if worthless(row)]
        for trial in trials:
            if trial.number in again:
                [found] = _all(lanes, [_patient(trial)])
                rows[trial.number] = _row(found, twins)
    ordered = [rows[trial.number] for trial in trials]
    figures = {"rows": ordered, "seconds": time.monotonic() - started, "again": sorted(again)}
    return {**figures, "missed": missed(ordered, len(again))}


def worthless(row: Mapping[str, Any]) -> bool:
    """Whether all that is wrong with a trial may be that ranks waited for the machine."""
    problems = set(row["problems"])
    if "alarm" in problems and set(row["kinds"]) <= {"silent", NO_ANSWER}:
        problems -= {"alarm", "late"}
        return problems <= TIMED
    return bool(problems - {"late"}) and problems <= TIMED


def _patient(trial: Trial) -> Trial:
    """A trial with longer limits."""
    heartbeat_s, timeout_s = TIMES * trial.heartbeat_s, TIMES * trial.timeout_s
    return trial._replace(heartbeat_s=heartbeat_s, timeout_s=timeout_s)


def _row(found: Found, twins: Twins) -> dict[str, Any]:
    rows = [judged(found, twins[_key(twin)]) for twin in _twins(found.trial)]
    return min(rows, key=lambda row: len(row["problems"]))


def _all(lanes: Any, trials: Sequence[Trial]) -> Iterator[Found]:
    results = lanes.imap_unordered(run_trial, trials)
    for _ in trials:
        yield results.next(timeout=LANE_LIMIT_S)


def _twins(trial: Trial) -> list[Trial]:
    """Jobs without a fault, one of which all ranks must be like.

    A step that is refused is one that was never there. A NaN in what only fills up a bucket refuses
    none, and changes nothing.
    """
    plain = trial._replace(number=0, fault="", operation="", step=0, rank=0, script=False)
    plain = plain._replace(apart=False, skips=0, timeout_s=60.0, heartbeat_s=60.0)
    return [plain._replace(skips=trial.step), plain] if trial.fault == "nan" else [plain]


def _key(trial: Trial) -> tuple[int, int, int]:
    return trial.ranks, trial.partition_size, trial.skips


def _kind(told: Any) -> str:
    """The kind of a `PeerFailed`; `NO_ANSWER` if the store did not answer in time at the start."""
    late = told.error == "CollectiveError" and "answer within" in told.text
    return told.kind or (NO_ANSWER if late else "")


def culprit_of(trial: Trial) -> int | None:
    """The rank that errors should name; None where it is the store, in a process of its own."""
    if trial.fault in STORE:
        return None if trial.apart else 0
    return trial.rank


def judged(found: Found, twin: dict[int, dict[int, str]]) -> dict[str, Any]:
    """A row: the trial, what was wrong with it, and how long errors took."""
    trial, problems = found.trial, Counter[str]()
    problems["hang"], problems["death"] = len(found.silent), len(found.died)
    for told in [*found.told.values(), *found.again.values()]:
        known = twin.get(told.rank, {})
        compared = told.digests if not (trial.fault == "flip" and told.error) else {}
        same = all(known.get(step, "") == value for step, value in compared.items() if step)
        problems["wrong"] += not same or (not told.error and not compared)
    others = [told for told in found.told.values() if told.rank != trial.rank]
    errors = [told for told in others if told.error]
    if trial.fault in (*HARMLESS, "nan", ""):
        problems["alarm"] = sum(bool(told.error) for told in found.told.values())
    else:
        problems["untyped"] = sum(not told.typed for told in errors)
        problems["unnamed"] = sum(not named(told, culprit_of(trial)) for told in errors)
        # A step that repeats asks the store for nothing, so the last one may go on without it.
        noticed = trial.fault in STORE or not others or bool(errors)
        problems["unreached"] = not noticed
    problems["unreached"] += found.happened is None
    problems["reset"] = sum(not _goes_on(told, trial, twin) for told in found.again.values())
    seconds = max((told.at - (found.happened or told.at) for told in errors), default=None)
    goal = goal_s(trial)
    problems["late"] = seconds is not None and goal is not None and seconds > goal
    texts = {told.rank: f"{told.error}({told.kind}): {told.text}" for told in found.told.values()}
    again = {told.rank: f"{told.error}: {told.text}" for told in found.again.values()}
    row = {**trial._asdict(), "goal_s": goal, "seconds": seconds, "took_s": found.seconds}
    row |= {"problems": {k: int(v) for k, v in problems.items() if v}, "texts": texts}
    row["kinds"] = sorted({_kind(told) for told in found.told.values() if told.error})
    return row | {"again": again, "stacks": found.silent, "died": found.died}


def _goes_on(told: Told, trial: Trial, twin: dict[int, dict[int, str]]) -> bool:
    """Whether a rank has the right state after `reset`, or says that no replica has one."""
    if told.error:
        torn = trial.operation in ("opt_step", "commit") and trial.partition_size == trial.ranks
        return torn and told.error == "LostStateError"
    return told.digests.get(STEPS) == twin.get(told.rank, {}).get(STEPS)


def named(told: Told, culprit: int | None) -> bool:
    """Whether an error says which rank began it, in its field or by itself in its text."""
    if culprit is None:
        return "store" in told.text
    if told.names is not None:
        return told.names == culprit
    text = OWN_PLACE.sub("", told.text)
    return re.search(rf"\branks?\b[\d ,-]*\b{culprit}\b", text) is not None


def goal_s(trial: Trial) -> float | None:
    """How long the ranks may take to raise; None where none does."""
    if trial.fault in (*HARMLESS, "nan", "flip"):
        return None
    if trial.operation in PLACES["start"]:
        return trial.timeout_s + START_S
    if trial.fault == "wrong_call":
        return DESYNC_S
    return SOON_S if trial.fault in ENDS_SOON else trial.heartbeat_s + SLACK_S


def missed(rows: Sequence[dict[str, Any]], again: int = 0) -> list[str]:
    """The goals that were missed, by name.

    Args:
      rows: one per trial, as `judged` gives them.
      again: how many of them were made once more.
    """
    count = Counter(name for row in rows for name in row["problems"])
    late = count["late"] > LATE_SHARE * sum(row["goal_s"] is not None for row in rows)
    names = [name for name in PROBLEMS if count[name] and (name != "late" or late)]
    if again > max(1, AGAIN_SHARE * len(rows)):
        names.append("made again")
    return names


def render_faults(figures: dict[str, Any], config: FaultsConfig) -> str:
    """The figures as a table, a row per fault, and what went wrong first."""
    lines: list[tuple[str, ...]] = [("", "trials", "seconds", "goal", *PROBLEMS)]
    starts = [row for row in figures["rows"] if row["operation"] in PLACES["start"]]
    others = [row for row in figures["rows"] if row not in starts]
    for fault in FAULTS:
        lines += _line(fault, [row for row in others if row["fault"] == fault])
    lines += [*_line("any, at the start", starts), *_line("all", figures["rows"])]
    count, seconds = len(figures["rows"]), figures["seconds"]
    sizes = " and ".join(map(str, config.ranks))
    title = f"{count} faults on {sizes} ranks, heartbeat {config.heartbeat_s:g} s, seed"
    title += f" {config.seed}: {seconds:.0f} s, {len(figures['again'])} made again"
    verdict = f"goals missed: {', '.join(figures['missed'])}" if figures["missed"] else "goals met"
    bad = [row for row in figures["rows"] if row["problems"]][:5]
    shown = ("number", "fault", "operation", "rank", "problems", "texts", "again", "stacks", "died")
    wrong = [str({key: row[key] for key in shown}) for row in bad]
    return "\n".join([table(title, lines), "", __doc__ or "", *wrong, verdict])


def _line(name: str, rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The line of some rows, if there are any."""
    seconds = sorted(row["seconds"] for row in rows if row["seconds"] is not None)
    goals = {f"{row['goal_s'] or 0:g}" for row in rows}
    spread = f"{seconds[len(seconds) // 2]:.2f} (most {seconds[-1]:.2f})" if seconds else "-"
    counts = [sum(problem in row["problems"] for row in rows) for problem in PROBLEMS]
    goal = goals.pop() if len(goals) == 1 else "-"
    found = (name, str(len(rows)), spread, goal, *(str(count or "-") for count in counts))
    return [found] if rows else []
