"""Which device each rank takes, with hardware that is made up: `Fake` in place of torch's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs import free_port

from mics_fn import _torch
from mics_fn.errors import DesyncError, GroupsError, MicsError, PeerFailed
from mics_fn.groups import make_groups
from mics_fn.groups.make import device_and_backend
from mics_fn.groups.startup import (
    NCCL_SETTINGS,
    Launch,
    accelerator,
    choose_device,
    facts_of,
    init_distributed,
    nccl_problems,
    own_failures,
)
from mics_fn.groups.topology import Topology


class Fake:
    """A process that sees as many devices as it has uuids; it stands for their module, too."""

    def __init__(self, kind: str, *uuids: str) -> None:
        self.kind, self.uuids, self.used = kind, uuids, -1

    def use(self, device: torch.device) -> None:
        self.used = device.index

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(uuid=self.uuids[device.index])


NONE = Fake("cpu")


@contextmanager
def machine(fake: Fake, **env: str) -> Iterator[Fake]:
    hardware = {
        "current_accelerator": lambda **_: torch.device(fake.kind),
        "current_device_index": lambda: 0,
        "device_count": lambda: len(fake.uuids),
        "set_device_index": fake.use,
    }
    first = mock.patch.multiple(torch.accelerator, **hardware)
    module = mock.patch.object(torch, "get_device_module", return_value=fake)
    with first, module, mock.patch.dict(os.environ, env):
        yield fake


@pytest.mark.parametrize(
    ("asked", "fake", "want"),
    [
        ("auto", Fake("cuda", "G"), "cuda:0"),  # the launcher shows each process its own
        ("auto", Fake("cuda", "G", "H", "I", "J"), "cuda:3"),
        ("auto", Fake("cuda", "G", "H"), "cuda:1"),
        ("auto", NONE, "cpu"),
        ("cpu", Fake("cuda", "G"), "cpu"),
        ("cuda:1", Fake("cuda", "G", "H"), "cuda:1"),
    ],
)
def test_the_fourth_rank_of_a_node_takes(asked: str, fake: Fake, want: str):
    with machine(fake):
        assert choose_device(asked, Launch("Slurm", 3, 4, 3, "a", 1)) == (torch.device(want), "")


def test_without_a_launcher_it_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with machine(Fake("xpu", "G", "H")) as fake:
        assert init_distributed(device="xpu:1") == torch.device("xpu", 1)
        with pytest.raises(GroupsError, match="xpu:2 is asked for, and this process sees 2 "):
            init_distributed(device="xpu:2")
    assert fake.used == 1


def test_what_torch_says_of_the_hardware(monkeypatch: pytest.MonkeyPatch):
    for found, kind in (("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cpu"), (None, "cpu")):
        answer = found and torch.device(found)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: answer)  # noqa: B023
        assert accelerator() == kind


def start(port: str, seen: list[tuple[str, ...]], hostid: str, options: dict[str, Any]) -> Any:
    """What `init_distributed` answers on a rank that sees these GPUs, or its error."""
    rank, started = dist.get_rank(), mock.Mock()
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"{hostid}{rank}"}
    fake = Fake("cuda" if seen[rank] else "cpu", *seen[rank])
    with (
        machine(fake, **(env if hostid else env | {"NCCL_HOSTID": ""})),
        mock.patch("socket.gethostname", return_value="here"),
        mock.patch.object(dist, "is_initialized", return_value=False),
        mock.patch.object(dist, "init_process_group", started),
    ):
        try:
            chosen = init_distributed(**options)
        except MicsError as error:
            first, line, *_ = str(error).splitlines()
            return type(error), first.removeprefix("init_distributed: "), line
        given = started.call_args
        assert given.kwargs["rank"] == rank
        order = os.environ.pop("NCCL_LAUNCH_ORDER_IMPLICIT", "")
        return str(chosen), fake.used, given.args[0], given.kwargs["timeout"].seconds, order


ONE_EACH, ONE_FOR_ALL = [("G",), ("H",)], [("G",), ("G",)]
SHARED = "several ranks use one device", "  ranks 0, 1 on here: cuda:0, G"
MIXED = "ranks disagree on device", "  device: cuda on rank 0; cpu on rank 1"
MISSING = (
    "a rank does not have the device that was asked for",
    "  rank 1: cuda is asked for, and this process sees 0 devices of its kind, on here: cuda",
)


@pytest.mark.parametrize(
    ("seen", "hostid", "options", "want"),
    [
        (ONE_EACH, "", {"timeout_s": 700}, [("cuda:0", 0, "nccl", 700, "1")] * 2),
        (ONE_FOR_ALL, "host", {}, [("cuda:0", 0, "nccl", 600, "1")] * 2),
        (ONE_FOR_ALL, "", {"device": "cpu"}, [("cpu", -1, "gloo", 600, "")] * 2),
        ([()] * 2, "", {}, [("cpu", -1, "gloo", 600, "")] * 2),
        (ONE_FOR_ALL, "", {}, [(GroupsError, *SHARED)] * 2),
        ([("G",), ()], "", {}, [(DesyncError, *MIXED)] * 2),
        ([("G",), ()], "", {"device": "cuda"}, [(GroupsError, *MISSING)] * 2),
    ],
)
def test_ranks_agree_on_devices_before_they_start(ranks, seen, hostid, options, want):
    assert ranks(2).run(start, f"{free_port(0)}", seen, hostid, options) == want


def shared_in_groups(hostids: list[str]) -> str:
    with (
        machine(Fake("cuda", "G"), NCCL_HOSTID=hostids[dist.get_rank()]),
        mock.patch("socket.gethostname", return_value="here"),
        pytest.raises((GroupsError, PeerFailed)) as caught,
    ):
        make_groups(backend="nccl", timeout_s=20)
    return str(caught.value)


def test_groups_refuse_ranks_on_one_device(ranks):
    """Also where the user starts torch.distributed."""
    for text in ranks(2).run(shared_in_groups, ["", ""]):
        assert text.startswith(f"make_groups: {SHARED[0]}\n{SHARED[1]}\n")


def test_a_device_without_a_uuid_is_known_by_what_the_process_sees():
    def unit(device: str, visible: str) -> str:
        with machine(Fake("npu", "", ""), ASCEND_RT_VISIBLE_DEVICES=visible):
            return facts_of({}, torch.device(device), "").unit

    first = unit("xpu:0", "0,1")
    assert unit("xpu:0", "0,1") == first
    assert len({first, unit("xpu:1", "0,1"), unit("xpu:0", "1,0")}) == 3
    with machine(Fake("xpu", "G")):
        assert not facts_of({"backend": "gloo"}, torch.device("xpu:0"), "").unit
        assert not facts_of({}, torch.device("cpu"), "").unit


@pytest.mark.parametrize(
    ("config", "fake", "want"),
    [
        ("cuda:nccl", Fake("cuda", "G"), ("cuda:0", "nccl")),
        ("cpu:gloo,cuda:nccl", Fake("cuda", "G"), ("cuda:0", "nccl")),
        ("xpu:xccl", Fake("xpu", "G"), ("xpu:0", "xccl")),
        ("cpu:gloo,cuda:gloo", Fake("cuda", "G"), ("cpu", "gloo")),
        ("cpu:gloo,cuda:nccl", NONE, ("cpu", "gloo")),
    ],
)
def test_groups_take_the_device_that_the_default_group_serves(monkeypatch, config, fake, want):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    with machine(fake):
        device, backend, problem = device_and_backend(None, None, None)
    assert (str(device), backend, problem) == (*want, "")
    if "cpu" not in config:
        problem = device_and_backend("cpu", None, None)[2]
        assert problem == f"the default group serves {config}, not cpu"


ORDER, HANDLING, MONITOR = (
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
)


@pytest.mark.parametrize(
    ("given", "begun", "becomes", "problems"),
    [
        ({}, False, {ORDER: "1", HANDLING: "0", MONITOR: "0"}, ()),
        ({}, True, {ORDER: "1", HANDLING: "0"}, (ORDER, MONITOR)),
        ({ORDER: "1", MONITOR: "0"}, True, {HANDLING: "0"}, ()),
        ({ORDER: "0"}, False, {ORDER: "0"}, (ORDER,)),
        ({HANDLING: "1"}, False, {HANDLING: "1"}, (HANDLING,)),
        ({HANDLING: "1", "TORCHELASTIC_RUN_ID": "1"}, False, {HANDLING: "0"}, ()),
    ],
)
def test_this_library_owns_the_failures_of_nccl(given, begun, becomes, problems):
    env = dict(given)
    found = nccl_problems(env, begun=begun)
    assert env.items() >= becomes.items()
    assert set(NCCL_SETTINGS) <= set(env)
    assert set(found) == set(problems)
    if begun:
        assert nccl_problems(env, begun=True) == {}, "set by then"


def test_a_setting_of_nccl_that_forbids_to_go_on_is_warned_of(monkeypatch: pytest.MonkeyPatch):
    for name, (value, _) in NCCL_SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(ORDER, "0")
    own_failures("gloo", begun=False)
    with pytest.warns(UserWarning, match=f"{ORDER}\\n  it is '0', expected '1': kernels of two"):
        own_failures("nccl", begun=False)


def connected(fails_on: int) -> Any:
    """Which groups a rank connects as on an accelerator, although they are gloo's."""
    seen: list[tuple[str, int]] = []
    warm_up = _torch.warm_up

    def record(group: Any, device: torch.device) -> None:
        if dist.get_rank() == fails_on:
            raise RuntimeError("no route\nmore")
        warm_up(group, device)
        seen.append((group.group_desc.removeprefix("mics_fn "), group.size()))

    before = len(_torch.groups_named(None))
    with machine(Fake("cuda", "G")), mock.patch.object(_torch, "warm_up", record):
        options: Any = {"topology": Topology((2, 2, 2)), "device": "cuda", "backend": "gloo"}
        try:
            with make_groups(4, timeout_s=2 if fails_on >= 0 else 20, **options):
                made = len(_torch.groups_named(None)) - before
        except (GroupsError, PeerFailed) as error:
            return str(error).splitlines()[:2], len(_torch.groups_named(None)) - before
    return seen, made


def test_communicators_are_connected_in_one_order(ranks):
    purposes = ["gather node", "reduce node", "gather rank", "reduce rank"]
    want = [*((purpose, 2) for purpose in purposes), ("reduce flat", 4), ("replicas", 2)]
    assert ranks(8).run(connected, -1) == [(want, 7)] * 8, "the first backward connects nothing"


@pytest.mark.thorough
def test_a_rank_that_cannot_be_connected_says_to_whom(ranks):
    text = "make_groups: rank 2 cannot connect 'gather node' of ranks 0, 2"
    assert ranks(8).run(connected, 2)[2] == ([text, "  no route"], 0)
