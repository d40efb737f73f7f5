"""Torch's default group and its store, by private names of torch: as a late process needs them.

Groups are made from both, and no data moves over the default group itself.
"""

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_connections: list[tuple[Any, Any]] = []  # a default group, and the store for groups made from it


def connection() -> Any:
    """The connection to the store with which groups are made; see `leave_connection`."""
    default = c10d._get_default_group()
    _, store = c10d._world.pg_map[default]
    if _connections and _connections[0][0] is default:
        if _connections[0][1] is None:
            try:
                _connections[0] = default, store.clone()  # pyright: ignore[reportAttributeAccessIssue]
            except (AttributeError, NotImplementedError):
                _connections.clear()
                return store
        return _connections[0][1]
    return store


def leave_connection() -> None:
    """Make groups over another connection from now on, as a call that was given up holds this one.

    A connection serves one call at a time, and one that waits for an address of a rank that is gone
    ends only with its time limit.
    """
    if dist.is_initialized():
        _connections[:] = [(c10d._get_default_group(), None)]


def start_alone(backend: str, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Start torch.distributed in a process whose peers have started theirs long ago.

    Its default group knows the ranks and the store, under the keys that the others use, but it is
    connected to nobody: groups are made from it, and it moves no data itself.
    """
    name, own = c10d._process_group_name([], use_hashed_name=False), default_part(store)
    own.set_timeout(timedelta(seconds=timeout_s))
    group, world = dist.ProcessGroup(own, rank, world_size), c10d._world
    group._set_group_name(name)
    group._set_group_desc("default_pg")
    world.pg_map[group] = (backend, own)  # pyright: ignore[reportArgumentType]
    world.pg_names[group] = name
    c10d._register_process_group(name, group)  # pyright: ignore[reportPrivateImportUsage]
    config = c10d.BackendConfig(c10d.Backend(backend))  # pyright: ignore[reportArgumentType]
    world.pg_backend_config[group] = str(config)
    world.pg_to_tag[group] = "default"
    world.tags_to_pg.setdefault("default", []).append(group)
    c10d._update_default_pg(group)
    world.pg_group_ranks[group] = {i: i for i in range(world_size)}


def default_part(store: Any) -> Any:
    """The part of a store that the default group of a process, its first group, hands on."""
    return dist.PrefixStore("0/", store)  # pyright: ignore[reportPrivateImportUsage]


def serve_store(address: str, port: int = 0) -> Any:
    """A store that listens at one address of this machine; torch's own listens at all of them.

    Args:
      address: of this machine; the loopback address keeps others away.
      port: 0 takes a free one.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((address, port))
    listening.listen()
    port = listening.getsockname()[1]
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # the store closes it
    )
