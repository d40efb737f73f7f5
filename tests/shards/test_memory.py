"""Tensors that lie over each other: buffers keep doing so, parameters that do are refused."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random, same_bits
from covering import examples
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import tree
from mics_fn.shards import overlaps

ALONE, PAIR, COPIES = Layout((1,), 1), Layout((2,), 2), Layout((2,), 1)
F64 = torch.float64


@examples(50, 200)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 9)), max_size=6))
@example([(0, 0, 9), (0, 1, 2), (0, 6, 7)])  # the third lies in the first, not in the second
def test_overlaps_are_those_of_their_stretches(found: list[tuple[int, int, int]]):
    memories = [torch.zeros(10), torch.zeros(10)]
    sets = [{(m, i) for i in range(low, high)} for m, low, high in found]
    groups = [{i} for i in range(len(found))]
    for i, j in itertools.combinations(range(len(found)), 2):
        if sets[i] & sets[j] and groups[i] is not groups[j]:
            groups[i] |= groups[j]
            for k in groups[j]:
                groups[k] = groups[i]
    want = {tuple(sorted(group)) for group in groups if len(group) > 1}
    tensors = [memories[m][low : max(low, high)] for m, low, high in found]
    assert overlaps(tensors) == sorted(map(list, want))
    columns = torch.zeros(2, 2)
    assert overlaps([columns[:, 0], columns[:, 1]]) == [[0, 1]]


# Buffers.


class Holder(nn.Module):
    """Has buffers, and does something to each of them at each call."""

    def __init__(self, buffers: dict[str, Tensor], replaces: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.replaces = replaces
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=name != "cache")

    def forward(self, x: Tensor) -> Tensor:
        for i, (name, buffer) in enumerate(list(self.named_buffers())):
            if name in self.replaces:
                setattr(self, name, buffer * 2 + i)
            elif buffer.is_floating_point():
                buffer.mul_(0.5).add_(x.detach().mean() + i)
            else:
                buffer.add_(i + 1)
            x = x + getattr(self, name).double().sum()
        return x


def views_of_one() -> list[Holder]:
    every = torch.arange(6, dtype=F64).view(2, 3)
    return [Holder({"every": every, "row": every[1]}), Holder({"cache": every.t()[1:]})]


def halves_and_counters() -> list[Holder]:
    both, count = torch.zeros(8, dtype=F64), torch.tensor(3)
    left, right = Holder({"left": both[:4], "n": count}), Holder({"right": both[4:]})
    return [left, right, Holder({"cache": count, "own": torch.tensor(1)})]


def replaced() -> list[Holder]:
    stat = torch.zeros(3, dtype=F64)
    parts = [Holder({"stat": stat}), Holder({"stat": stat}, ("stat",)), Holder({"cache": stat})]
    return [*parts, Holder({"own": torch.ones(2, dtype=F64)}, ("own",))]


SHARED = [halves_and_counters, replaced]


def model_of(case) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2, dtype=F64), *case())


def batch_of(step: int, rank: int) -> Tensor:
    return random(10 * step + rank, 4, 2, dtype=F64)


def shared_buffers(layout: Layout, case, copied: bool) -> tuple[list[Tensor], dict]:
    model = model_of(case)
    trainer = mf.Trainer(
        model, mf.optim.sgd(0.1), groups_of(layout), loss=lambda m, x: m(x).sum(), accumulate=2
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for step in range(2):
        losses.append(trainer.eval(batch_of(step, 0)))
        losses.append(trainer.step(batch_of(step, rank)).loss)
        if copied:  # as what writes states to files does it
            trainer.state = tree.map_leaves(
                lambda x: x.clone() if isinstance(x, Tensor) else x, trainer.state
            )
    return losses, trainer.state.buffers


def shared_buffers_alone(case, n: int) -> list[tuple[list[Tensor], dict]]:
    """Each rank's plain module; after each step its float buffers are the ranks' mean."""
    models = [model_of(case) for _ in range(n)]
    losses: list[list[Tensor]] = [[] for _ in models]
    for step in range(2):
        evaluated = copy.deepcopy(models[0])(batch_of(step, 0)).sum().detach()
        grads, own = [], []
        for rank, model in enumerate(models):
            parts = [model(part).sum() for part in batch_of(step, rank).chunk(2)]
            own.append(torch.stack(parts).mean())
            model.zero_grad()
            own[-1].backward()
            grads.append([p.grad for p in model.parameters()])
        for each in losses:
            each += [evaluated, torch.stack(own).mean().detach()]
        for model in models:
            for p, *each in zip(model.parameters(), *grads, strict=True):
                p.data -= 0.1 * torch.stack(each).mean(0)
        values = [dict(m.named_buffers(remove_duplicate=False)) for m in models]
        means = {
            name: torch.stack([each[name] for each in values]).mean(0)
            for name, value in values[0].items()
            if value.is_floating_point() and "cache" not in name
        }
        for each in values:
            for name, mean in means.items():
                each[name].copy_(mean)
    return [
        (found, dict(model.named_buffers(remove_duplicate=False)))
        for found, model in zip(losses, models, strict=True)
    ]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.__name__)
def test_buffers_that_share_memory_do_so_in_a_step(ranks, case):
    for layout, copied in ((ALONE, True), (PAIR, False), (COPIES, True)):
        n = layout.world_size
        expected = shared_buffers_alone(case, n)
        found = ranks(n).run(shared_buffers, layout, case, copied)
        for (losses, buffers), (want, values) in zip(found, expected, strict=True):
            torch.testing.assert_close(losses, want, rtol=1e-12, atol=1e-12)
            assert list(buffers) == list(values)
            torch.testing.assert_close(buffers, values, rtol=1e-12, atol=1e-12)


def test_buffers_in_the_memory_of_others_are_refused():
    first, weight = nn.Linear(2, 2), nn.Linear(2, 2).weight
    first.register_buffer("copy", first.weight.data)
    same = nn.Linear(2, 2)
    same.weight = weight
    same.register_buffer("mine", weight)
    mixed = nn.Linear(2, 2)
    memory = torch.zeros(4)
    mixed.register_buffer("a", memory)
    mixed.register_buffer("b", memory.view(torch.int32)[:1])
    with mf.make_groups(1) as groups:
        for model, said in (
            (first, "buffer 'copy' lies in the memory of parameter 'weight'"),
            (same, "buffer 'mine' lies in the memory of parameter 'weight'"),
            (mixed, "buffer 'b' lies in the memory of buffer 'a'"),
            (model_of(views_of_one), "buffer '2.cache' lies in the memory of buffer '1.every'"),
        ):
            with pytest.raises(mf.errors.LeafError, match=said):
                mf.Trainer(model, mf.optim.sgd(0.1), groups)


# Parameters.


class Overlapping(nn.Module):
    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        memory = torch.randn(4, 2)
        self.a = nn.Parameter(memory[:3], trained)
        self.b = nn.Parameter(memory[2:], trained)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a.t()).sum() + (x @ self.b.t()).sum()


class Apart(Overlapping):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        memory = torch.randn(6, 2)
        self.a, self.b = nn.Parameter(memory[:3]), nn.Parameter(memory[3:])
        self.c = nn.Parameter(memory[:3])


def refused(layout: Layout) -> None:
    groups = groups_of(layout)
    torch.manual_seed(0)
    model = Overlapping()
    params = dict(model.named_parameters())
    for verb, call in {
        "shard": lambda: mf.Trainer(model, mf.optim.sgd(0.1), groups),
        "init_model": lambda: mf.init_model(Overlapping, groups, seed=0),
        "load_shards": lambda: mf.load_shards(params, groups, like=model),
    }.items():
        text = f"{verb}: params.a and params.b overlap in memory, and are not the same tensor"
        with pytest.raises(mf.errors.LeafError, match=text):
            call()
    for values in (Apart(), Overlapping(trained=False)):
        params = dict(values.named_parameters(remove_duplicate=False))
        want = {k: v.detach() for k, v in params.items()}
        same_bits(mf.unshard(mf.shard(params, groups), groups), want)
    shards = mf.init_model(Apart, groups, seed=0)[1]
    assert isinstance(shards["c"], mf.shards.Tied)


@pytest.mark.parametrize("layout", [ALONE, PAIR], ids=str)
def test_parameters_that_overlap_are_refused(ranks, layout):
    ranks(layout.world_size).run(refused, layout)
