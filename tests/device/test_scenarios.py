"""Every law in every scenario on the simulated CUDA device, however far it is behind the host.

See [Note: the simulated device] in `simcuda`. Each scenario runs once, and the laws look at what
its ranks saw.
"""

import laws
import pytest
from laws import LAWS
from matrix import SCENARIOS
from simcuda.server import Server

# In which most things meet; the others differ from these in one.
COMPOSED = {
    *("codes, two replicas", "states in files, overlapped", "two levels, budget", "hybrid"),
    *("on the host, codes, hpz", "saved while it trains", "diloco", "recomputation"),
    *("two trainers", "a guard that refuses", "torch.func, deferred", "f16 with a loss scale"),
    *("gradients on the host, bf16, zero2, clipped", "a stream of the user's"),
    *("on the host, torch.func", "an update before the run has ended"),
}
assert not COMPOSED - set(SCENARIOS)

pytestmark = pytest.mark.limit(300)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.thorough if name in COMPOSED else pytest.mark.exhaustive
        )
        for name in SCENARIOS
    ],
)
def test_laws(device: Server, name: str):
    run = device.run("compared", SCENARIOS[name].ranks, name)
    for law in LAWS:
        if law is not laws.within_plan or SCENARIOS[name].plans:
            wrong = law(name, run)
            assert not wrong, f"{law.__doc__}\n" + "\n".join(wrong)
