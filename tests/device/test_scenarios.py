"""Every law in every scenario on the simulated CUDA device, however far it is behind the host.

See [Note: the simulated device] in `simcuda`. Each scenario runs once, and the laws look at what
its ranks saw.
"""

from collections.abc import Callable
from typing import Any

import laws
import pytest
from laws import LAWS, Law, Run
from matrix import SCENARIOS
from simcuda.server import Server

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]


@pytest.fixture(scope="module")
def run(device: Server) -> Callable[[str], Run]:
    """What the ranks of a scenario saw; run when first asked for."""
    found: dict[str, Any] = {}

    def ran(name: str) -> Run:
        if name not in found:
            try:
                found[name] = device.run("compared", SCENARIOS[name].ranks, name)
            except RuntimeError as error:
                found[name] = error
        if isinstance(found[name], RuntimeError):
            raise found[name]
        return found[name]

    return ran


@pytest.mark.parametrize(
    ("name", "law"),
    [
        pytest.param(name, law, id=f"{name}-{law.__name__}")
        for name in SCENARIOS
        for law in LAWS
        if law is not laws.within_plan or SCENARIOS[name].plans
    ],
)
def test_laws(run: Callable[[str], Run], name: str, law: Law):
    wrong = law(name, run(name))
    assert not wrong, f"{law.__doc__}\n" + "\n".join(wrong)
