"""`python -m tests.stress faults`: a few faults of each kind, and its parts on tiny sizes."""

import pytest
from rank_pool import run_ranks

from tests.stress.cost import CostConfig, measure_cost, render_cost
from tests.stress.faults import FaultsConfig, measure_faults, render_faults
from tests.stress.soak import SoakConfig, render_soak, soak


@pytest.mark.thorough
@pytest.mark.limit(300)
def test_many_faults():
    config = FaultsConfig(trials=24, seed=4)
    figures = measure_faults(config)
    # A machine that runs other tests, too, is no clock.
    bad = [row for row in figures["rows"] if set(row["problems"]) - {"late"}]
    assert bad == [], render_faults(figures, config)
    assert len(figures["rows"]) == config.trials
    assert figures["missed"] in ([], ["late"])


@pytest.mark.thorough
def test_what_grows():
    config = SoakConfig(steps=8, saves=8, resets=4, trainers=14)
    figures = run_ranks(soak, config.ranks, config)[0]
    missed = set(figures["missed"]) - {"memory"}  # the allocator is warm later
    assert missed == set(), render_soak(figures, config)


@pytest.mark.thorough
def test_what_watching_costs():
    config = CostConfig(rounds=1, steps=12)  # longer than the monitor sleeps
    figures = run_ranks(measure_cost, config.ranks, config)[0]
    assert figures["messages"] == 0, render_cost(figures, config)
    assert 0 < figures["cpu_share"]["most"] < 1
