"""A store that only this machine can reach, and how torch's elastic agent finds its ranks with it.

torch's own `TCPStore` listens on every address of the host, and what is in a store is trusted. The
agent's `c10d` rendezvous even unpickles it: whoever reaches the port runs code. So the store of
ranks that are all on this machine is given a socket that is bound to loopback alone, and the agent
meets nobody.
"""

from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from mics_fn import _torch

ADDRESS = "127.0.0.1"
BACKEND = "mics_fn_loopback"


def serve_store(port: int = 0) -> Any:
    """A store that listens on a port of the loopback address; 0 takes a free one."""
    return _torch.serve_store(ADDRESS, port)


class _Alone(RendezvousHandler):
    """The rendezvous of one agent, which meets no other; its ranks share its store."""

    def __init__(self, run_id: str) -> None:
        self._run_id, self._store = run_id, serve_store()

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(ADDRESS, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _alone(params: RendezvousParameters) -> RendezvousHandler:
    return _Alone(params.run_id)


rendezvous_handler_registry.register(BACKEND, _alone)
