"""Each law of `laws.py` sees what breaks it, in runs that are made up here."""

import laws
import pytest
import torch
from laws import LAWS, Law, Run
from matrix import SCENARIOS, Seen

GATHER, REDUCE = ("gather rank", "all_gather", 64), ("reduce rank", "reduce_scatter", 64)
NAME = "budget 0"
CPU = {"w": torch.tensor([1.0, 2.0]), "eval": torch.tensor(4.0)}
GOOD = Seen([], {}, 0, [GATHER, REDUCE], 64, 64, CPU)


def run_of(second_rank: Seen, mode: str = "never") -> Run:
    """Two ranks, of which the first saw nothing wrong."""
    modes = {"never": GOOD, "always": GOOD}
    return [(CPU, modes), (CPU, modes | {mode: second_rank})]


BAD: dict[Law, Seen] = {
    laws.ordered: GOOD._replace(races=["read after write"]),
    laws.no_host_waits: GOOD._replace(waits={".item()": 1}),
    laws.equal_numbers: GOOD._replace(numbers=CPU | {"w": torch.tensor([1.0, 2.0 + 2**-22])}),
    laws.one_order: GOOD._replace(issued=[REDUCE, GATHER]),
    laws.no_timing: GOOD._replace(issued=[GATHER]),
    laws.kept_by_references: GOOD._replace(recorded_streams=1),
    laws.within_plan: GOOD._replace(kept_bytes=65),
}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_law_sees_what_breaks_it_and_nothing_else(law: Law):
    assert law(NAME, run_of(GOOD)) == []
    assert law(NAME, run_of(BAD[law]))
    assert law(NAME, run_of(BAD[law], "always"))
    others = [bad for other, bad in BAD.items() if {law, other} != {laws.one_order, laws.no_timing}]
    assert sum(bool(law(NAME, run_of(bad))) for bad in others) == 1


def test_a_law_sees_what_only_looks_right():
    nan = GOOD._replace(numbers=CPU | {"w": torch.tensor([1.0, torch.nan])})
    assert laws.equal_numbers(NAME, run_of(nan))
    name = next(name for name, scenario in SCENARIOS.items() if scenario.host_waits)
    assert len(laws.no_host_waits(name, run_of(GOOD))) == 4, "a guard that decides waits once"
    idle = GOOD._replace(issued=[])
    assert laws.one_order(NAME, [(CPU, {"never": idle})] * 2)
    assert not laws.one_order("alone", [(CPU, {"never": idle})])
