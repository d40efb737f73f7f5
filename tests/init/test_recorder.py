"""A tape holds what a program does: any part of it can be run again, bit by bit."""

import copy
import math

import pytest
import torch
from cases import same_bits
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import LeafError
from mics_fn.init.tape import Recorder

SEED = 11


class Interpreter:
    """Runs a list of small steps on a few tensors; what they do is the same in every run."""

    def __init__(self) -> None:
        self.at = [torch.empty(0) for _ in range(4)]
        self.own = torch.Generator().manual_seed(1)
        self.read: list[float] = []
        for i in range(4):
            self.at[i] = torch.full((4, 6), float(i))
        self.at[0].normal_(generator=self.own)

    def run(self, steps: list[tuple[int, int, int, int]]) -> None:
        kinds = [self.draw, self.write, self.view, self.copy, self.make, self.look, self.reseed]
        for kind, a, b, n in steps:
            kinds[kind % len(kinds)](a % 4, b % 4, n)

    def part(self, i: int, n: int) -> Tensor:
        x = self.at[i]
        if x.ndim != 2 or x.numel() < 8 or not x.is_contiguous():
            return x
        parts = [x, x.t(), x[:1], x.view(-1)[n % 5 :], x[..., ::2], x.unsqueeze(0), x.diagonal()]
        return parts[n % len(parts)]

    def draw(self, a: int, b: int, n: int) -> None:
        part, own = self.part(a, n), self.own if n % 3 == 0 else None
        draws = [
            lambda: part.normal_(generator=own),
            lambda: part.uniform_(-1, n + 1, generator=own),
            lambda: part.bernoulli_(0.5, generator=own),
            lambda: part.copy_(torch.rand(part.shape, generator=own)),
            lambda: part.mul_(torch.rand_like(part)),
            lambda: part.copy_(torch.poisson(part.abs().contiguous() + n, own)),
        ]
        draws[n // 3 % len(draws)]()

    def write(self, a: int, b: int, n: int) -> None:
        part = self.part(a, n)
        writes = [
            lambda: part.fill_(n),
            lambda: part.add_(1),
            lambda: part.zero_(),
            lambda: part.mul_(self.at[b].sum()),
            lambda: part.div_(self.at[b].double().norm() + 1),
            lambda: part.clamp_(-n, n),
        ]
        writes[n // 7 % len(writes)]()

    def view(self, a: int, b: int, n: int) -> None:
        part = self.part(b, n)
        self.at[a] = part if part.numel() > 1 else part.clone()
        if n % 4 == 0:
            self.at[b].unsqueeze_(0).squeeze_(0)

    def copy(self, a: int, b: int, n: int) -> None:
        if self.at[a].shape == self.at[b].shape:
            self.at[a].copy_(self.at[b].clone())
        elif n % 2:
            self.at[a].data = self.at[b].detach().clone()

    def make(self, a: int, b: int, n: int) -> None:
        x = self.at[b]
        makes = [
            lambda: torch.zeros(4, 6),
            lambda: torch.randn(4, 6),
            lambda: x.double().to(torch.bfloat16).float(),
            lambda: x + self.at[a].flatten()[0],
            lambda: torch.cat([x.flatten(), self.at[a].flatten()])[:24].clone(),
            lambda: torch.where(x > x.mean(), x, torch.randn(())),
            lambda: copy.deepcopy(x),
        ]
        self.at[a] = makes[n % len(makes)]()

    def look(self, a: int, b: int, n: int) -> None:
        x = self.at[b]
        self.read.append(float(x.double().sum()))
        if self.read[-1] > 0:
            x[x > x.mean()] = 0.5
        self.read.append(float(x.flatten()[0]))

    def reseed(self, a: int, b: int, n: int) -> None:
        states = [torch.get_rng_state(), self.own.get_state()]
        if n % 3 == 0:
            torch.manual_seed(n)
        elif n % 3 == 1:
            torch.rand(n)
            torch.set_rng_state(states[0])
        else:
            self.own.set_state(states[0])


STEPS = st.tuples(*[st.integers(0, 6)] * 3, st.integers(0, 41))


@examples(25, 100)
@given(steps=st.lists(STEPS, max_size=25), chosen=st.sets(st.integers(0, 3), min_size=1))
def test_any_program_is_repeated_bit_by_bit(steps, chosen: set[int]):
    torch.manual_seed(SEED)
    real = Interpreter()
    real.run(steps)
    want, state = [x.clone() for x in real.at], torch.get_rng_state()
    torch.manual_seed(SEED)
    with Recorder() as recorder:
        found = Interpreter()
        found.run(steps)
    assert found.read == real.read or any(map(math.isnan, real.read))
    recorder.finish()
    got = {i: recorder.value(found.at[i]).clone() for i in chosen}
    recorder.finish_generators()
    same_bits(got, {i: want[i] for i in chosen})
    assert all(got[i].stride() == want[i].stride() for i in chosen)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(real.own.get_state(), found.own.get_state())


# What such programs seldom meet.


def test_an_op_that_writes_to_several_tensors_leaves_what_came_later():
    with Recorder():
        x, places = torch.tensor([[1.0, 5.0], [4.0, 2.0]]), torch.full((4,), 7)
        most = torch.zeros(2)
        torch.max(x, 0, out=(most, places[:2]))
        most.add_(1)
        assert most.tolist() == [5, 6]
        assert (most + places[:2]).tolist() == [6, 6]
        assert places.tolist() == [1, 0, 7, 7]
        assert most.tolist() == [5, 6]


def test_a_write_that_leaves_something_keeps_what_was_there():
    with Recorder():
        x = torch.arange(12.0)
        x.as_strided((3, 4), (2, 1)).fill_(-1)  # as many elements as there are, some of them twice
        assert x.tolist() == [-1.0] * 8 + [8.0, 9.0, 10.0, 11.0]
        y = torch.arange(4.0)
        y.expand(3, 4)[1].fill_(2)
        assert y.tolist() == [2, 2, 2, 2]


def test_a_value_that_was_asked_for_is_asked_for_again_after_a_write():
    with Recorder() as recorder:
        x = torch.ones(2)
        assert float(x[0]) == 1
        x.add_(1)
    recorder.finish()
    assert recorder.value(x).tolist() == [2, 2]


class Uninitialised:
    """`torch.cuda` before its first use: generators exist only from `init` on."""

    default_generators: tuple[torch.Generator, ...] = ()

    def init(self) -> None:
        made = tuple(torch.Generator().manual_seed(i) for i in range(2))
        self.default_generators = self.default_generators or made


def test_draws_are_recorded_before_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch):
    module = Uninitialised()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)  # there is no CUDA here
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    with Recorder() as recorder:
        for device in ("cuda:0", "cuda"):
            assert torch.empty(4, device=device).normal_().device.type == "cuda"
        torch.rand(2)
    draws = [op.draw[0] for op in recorder.tape.ops if op.draw]
    assert [*map(id, draws)] == [*map(id, (*module.default_generators, torch.default_generator))]


def test_draws_on_devices_whose_state_is_not_known_name_a_way_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_torch, "default_generator", lambda device: torch.Generator())
    with pytest.raises(LeafError, match="drawn on mps:0 cannot be replayed") as caught, Recorder():
        torch.empty(4, device="mps:0").normal_()
    assert "fix: draw on the CPU: " in str(caught.value)
    monkeypatch.setattr(_torch, "default_generator", lambda device: None)
    with pytest.raises(LeafError, match="drawn on xla:0 cannot be replayed"), Recorder():
        torch.rand(4, device="xla:0")
