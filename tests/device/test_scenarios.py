"""Every law in every scenario on the simulated CUDA device, however far it is behind the host.

See [Note: the simulated device] in `simcuda`. Each scenario runs once, and the laws look at what
its ranks saw.
"""

import pytest
from laws import LAWS
from matrix import SCENARIOS
from simcuda.server import Server

# In which most things meet; the others differ from these in one.
COMPOSED = {
    *("codes, two replicas", "two levels, budget", "hybrid", "on the host, codes, hpz", "diloco"),
    *("states in files, overlapped", "saved while it trains", "f16 with a loss scale"),
    *("recomputation", "torch.func, deferred", "parts, two replicas"),
}
assert not COMPOSED - set(SCENARIOS)

pytestmark = pytest.mark.limit(600)


def check_laws(device: Server, name: str):
    run = device.run("compared", SCENARIOS[name].ranks, name)
    for law in LAWS:
        wrong = law(name, run)
        assert not wrong, f"{law.__doc__}\n" + "\n".join(wrong)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in COMPOSED])
def test_laws(device: Server, name: str):
    check_laws(device, name)


@pytest.mark.thorough
@pytest.mark.parametrize("half", [0, 1])
def test_laws_where_most_things_meet(device: Server, half: int):
    for name in sorted(COMPOSED)[half::2]:
        check_laws(device, name)
