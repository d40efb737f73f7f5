"""`stress faults`: what it calls wrong, a few faults of each kind, and its parts on tiny sizes."""

from typing import Any

import pytest

from mics_fn.lab.ranks.pool import run_ranks
from mics_fn.testing.injector import FAULTS as KNOWN
from tests.stress.__main__ import main
from tests.stress.cost import CostConfig, measure_cost, render_cost
from tests.stress.fault_ranks import FUNCTIONS, STEPS, Told, Trial
from tests.stress.fault_trials import Found
from tests.stress.faults import (
    FAULTS,
    PLACES,
    FaultsConfig,
    goal_s,
    judged,
    measure_faults,
    missed,
    render_faults,
    trials_of,
    worthless,
)
from tests.stress.soak import SoakConfig, grown, render_soak, soak

TRIAL = Trial(7, 2, 1, "raise", "fetch", 2, 1, False, False, heartbeat_s=2.0, timeout_s=5.0)
TWIN = {rank: {step: f"{rank}/{step}" for step in range(STEPS + 1)} for rank in range(2)}
RIGHT = {1: "0/1"}


def told(rank: int = 0, **how: Any) -> Told:
    """An error of a rank, as it should be."""
    error = {"error": "PeerFailed", "typed": True, "names": 1, "text": "rank 1 raised"}
    return Told(**{"rank": rank, "at": 10.5, "digests": RIGHT, **error, **how})


def problems(trial: Trial = TRIAL, *others: Told, **how: Any) -> dict[str, int]:
    """What is wrong where rank 1 raised and rank 0 said this."""
    culprit = told(1, error="InjectedError", typed=False, names=None, digests={1: "1/1"})
    every = {each.rank: each for each in (culprit, *others)}
    found = {"happened": 10.0, "told": every, "again": {}, "silent": {}, "died": {}, "seconds": 1.0}
    return judged(Found(trial, **{**found, **how}), TWIN)["problems"]


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"names": 0}, "unnamed"),
        ({"names": None, "text": "on rank 0; its group is ranks 0, 1"}, "unnamed"),
        ({"typed": False}, "untyped"),
        ({"at": 12.0}, "late"),
        ({"digests": {1: "0/2"}}, "wrong"),
        ({"error": ""}, "unreached"),
    ],
)
def test_one_thing_that_is_wrong_with_an_error(how: dict[str, Any], problem: str):
    assert problems(TRIAL, told()) == {}
    assert problems(TRIAL, told(**how)) == {problem: 1}


def test_ranks_that_say_nothing_and_jobs_that_should_have_gone_on():
    assert problems(TRIAL, silent={0: "its stack"})["hang"] == 1
    assert problems(TRIAL, told(), died={0: -6})["death"] == 1
    assert problems(TRIAL, told(), happened=None)["unreached"] == 1
    harmless = TRIAL._replace(fault="slow")
    assert problems(harmless, told())["alarm"] == 2
    last = {STEPS: f"0/{STEPS}"}
    both = {0: told(error="", digests=last), 1: told(1, error="", digests={STEPS: f"1/{STEPS}"})}
    assert problems(TRIAL, told(), again=both) == {}
    assert problems(TRIAL, told(), again={**both, 0: told()}) == {"reset": 1}
    assert problems(harmless, told=both) == {}


def test_trials_are_uniform_and_the_same_for_a_seed():
    trials = list(trials_of(FaultsConfig(trials=600)))
    assert trials == list(trials_of(FaultsConfig(trials=600)))
    assert trials[:50] != list(trials_of(FaultsConfig(trials=50, seed=1)))
    assert {trial.fault for trial in trials} == set(FAULTS) == {*KNOWN, *FUNCTIONS}
    assert {trial.operation for trial in trials} == {name for at in PLACES.values() for name in at}
    assert {trial.rank for trial in trials} == set(range(8))
    assert {goal_s(trial) for trial in trials} >= {None, 1.0, 3.0}


def check(config: FaultsConfig) -> None:
    figures = measure_faults(config)
    # A machine that runs other tests, too, is no clock.
    bad = [row for row in figures["rows"] if set(row["problems"]) - {"late"}]
    assert bad == [], render_faults(figures, config)
    assert len(figures["rows"]) == config.trials
    assert figures["missed"] in ([], ["late"])


def judged_as(*kinds: str, **problems: Any) -> bool:
    return worthless({"problems": problems, "kinds": kinds})


def test_only_trials_without_a_worse_problem_are_made_again_and_few_of_them():
    assert judged_as("silent", unnamed=1)
    assert judged_as("no answer", "silent", alarm=2)  # of the store, at the start
    assert not judged_as("silent", late=1)
    assert not judged_as("killed", "silent", alarm=2)
    for worse in ("hang", "death", "wrong", "untyped", "reset"):
        also: dict[str, Any] = {worse: 1}
        assert not judged_as("silent", unnamed=1, **also)
    right: dict[str, Any] = {"problems": {}, "goal_s": 1.0}
    late: dict[str, Any] = {"problems": {"late": 1}, "goal_s": 1.0}
    assert missed([right] * 19 + [late]) == [] == missed([right] * 40, again=2)
    assert missed([right] * 18 + [late] * 2) == ["late"]
    assert missed([right] * 40, again=3) == ["made again"]


@pytest.mark.thorough
@pytest.mark.limit(300)
def test_many_faults():
    check(FaultsConfig(trials=24, seed=4))


@pytest.mark.thorough
def test_what_grows():
    config = SoakConfig(steps=8, saves=8, resets=4, trainers=14)
    figures = run_ranks(soak, config.ranks, config)[0]
    assert not [
        what for what in figures["missed"] if what != "memory"
    ]  # the allocator is warm later
    printed = render_soak(figures, config)
    assert [line.split()[0] for line in printed.splitlines()[2:14:3]] == list(figures["looks"])


def test_what_has_grown_is_said():
    def looks(*keys: float, memory: float = 0.0) -> list[list[dict[str, float]]]:
        rest = {"descriptors": 9.0, "threads": 3.0}
        return [[{**rest, "store keys": count, "memory": memory * count} for count in keys]]

    flat = {name: looks(2, 5, 5) for name in ("steps", "resets", "trainers")}
    assert grown(flat) == []
    assert grown({**flat, "resets": looks(2, 5, 6)}) == ["store keys in resets"]
    assert grown({**flat, "trainers": looks(2, 5, 5, memory=1e6)}) == ["memory"]


def test_what_watching_costs():
    config = CostConfig(rounds=1, steps=2)
    figures = run_ranks(measure_cost, config.ranks, config)[0]
    assert figures["messages"] == 0
    assert 0 < figures["cpu_share"]["most"] < 1
    assert "messages by the main thread" in render_cost(figures, config)


def test_its_flags(capsys: pytest.CaptureFixture):
    code = main(["faults", "--trials", "1", "--ranks", "2", "--lanes", "1"])
    printed = capsys.readouterr().out.rstrip()
    assert "1 faults on 2 ranks" in printed
    # A machine that runs other tests, too, is no clock.
    assert code == int(printed.endswith("goals missed: late"))
    assert code or "goals missed" not in printed
