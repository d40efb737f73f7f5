"""Each recipe against a slow twin: one process, full tensors, the batches of all ranks together."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import recipes
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import mics_fn as mf
from mics_fn import tree

PAIR, COPIES = Layout((2,), 2), Layout((2,), 1)
BOTH = Layout((2, 2), 2)  # two replicas of two ranks
STEPS, SAMPLES, LAYERS = 4, 2, 3


def make_params() -> dict[str, Tensor]:
    sizes = {"embed": (5, 6), "head": (6, 3), "norm": (6,)}
    sizes |= {f"layers.{i}.{part}": (6, 6) for i in range(LAYERS) for part in ("attn", "mlp")}
    return {
        name: random(i, *shape, dtype=torch.float64) / 2
        for i, (name, shape) in enumerate(sizes.items())
    }


def loss_fn(full: Any, batch: Any) -> Tensor:
    x, y = batch
    x = x @ full["embed"] * full["norm"]
    for i in range(LAYERS):
        x = x + (x @ full[f"layers.{i}.attn"]).sin()
        x = x + (x @ full[f"layers.{i}.mlp"]).tanh()
    return (x @ full["head"] - y).square().mean()


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    seed = 1000 + 20 * step + rank
    return (
        random(seed, SAMPLES, 5, dtype=torch.float64),
        random(seed + 500, SAMPLES, 3, dtype=torch.float64),
    )


def mean_grads(params: Any, step: int, n: int) -> Any:
    """The gradient of the loss over the samples of all ranks."""
    parts = zip(*(batch_of(step, rank) for rank in range(n)), strict=True)
    return torch.func.grad(loss_fn)(params, tuple(torch.cat(each) for each in parts))


def trained_by_torch(groups_of_params: Any, n: int, steps: int = STEPS) -> dict[str, Tensor]:
    """The parameters after some steps of torch's own optimizers: `groups_of_params` makes them."""
    params = {k: x.clone().requires_grad_() for k, x in make_params().items()}
    optimizers = groups_of_params(params)
    for step in range(steps):
        for name, grad in mean_grads({k: x.detach() for k, x in params.items()}, step, n).items():
            params[name].grad = grad
        for optimizer, rate in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
    return {k: x.detach() for k, x in params.items()}


def sgd_twin(n: int, lr: float = 0.1) -> dict[str, Tensor]:
    return trained_by_torch(lambda p: [(torch.optim.SGD(p.values()), lambda step: lr)], n)


def close(got: Any, want: Any, bound: float = 1e-12) -> None:
    assert sorted(got) == sorted(want)
    for name, x in want.items():
        error = float((got[name] - x).abs().max())
        assert error <= bound, (name, error)


def trainer_of(groups: Any, optimizer: Any, **options: Any) -> mf.Trainer:
    options = {"bucket_bytes": 400, "params": make_params(), **options}
    return mf.Trainer(loss_fn, optimizer, groups, **options)


def run(trainer: mf.Trainer, steps: int = STEPS) -> Any:
    for step in range(steps):
        trainer.step(batch_of(step, dist.get_rank()))
    return trainer.params()


def by_leaf(groups: Any) -> dict[str, Any]:
    """Options of `trainer_of`: a bucket for each leaf."""
    params = mf.shard(make_params(), groups, bucket=lambda path: path)
    return {"params": params, "bucket_bytes": None}


# 1 and 9: policies


def own_policy(layout: Layout, name: str) -> None:
    groups = groups_of(layout)
    params = by_leaf(groups)["params"]
    leaves = tree.flatten(params, lambda x: isinstance(x, mf.shards.Sharded))[0]
    paths = dict(zip((leaf.bucket.index for leaf in leaves), tree.paths(params), strict=True))
    attention = [i for i, path in paths.items() if "attn" in path]
    kept = recipes.prefetch_two_and_keep(attention)
    policy = kept if name == "keep" else recipes.as_fsdp2()
    trainer = trainer_of(groups, mf.optim.sgd(0.1), schedule=policy, **by_leaf(groups))
    close(run(trainer), sgd_twin(layout.world_size))
    schedule, sizes = policy.schedule, mf.bucket_sizes(params, groups)
    fetches = [schedule.fetches.count(i) for i in range(len(sizes))]
    if name == "keep":
        assert {fetches[i] for i in attention} == {1}
        assert max(fetches) == 2
    else:
        # No gradient needs the embedding, and the head is used last in forward, first in backward.
        assert fetches.count(2) == len(sizes) - 2
        assert schedule.peak_bytes(sizes) <= 2 * max(sizes)
    record = mf.record(loss_fn, params, batch_of(0, 0), mark_backward=True)
    assert policy.planner(record, sizes) == schedule


# 2: hybrid by layer


def hybrid(layout: Layout) -> None:
    groups, sent = groups_of(layout), []
    by_path = recipes.hybrid_by_layer(groups, lambda path: "attn" in path)
    for given in (groups, by_path):
        trainer = trainer_of(given, mf.optim.sgd(0.1), live_bytes=0, **by_leaf(given))
        run(trainer, STEPS - 1)
        groups.traffic.clear()
        trainer.step(batch_of(STEPS - 1, dist.get_rank()))
        found = groups.traffic.snapshot()
        sent.append(sum(nbytes for what, (_, nbytes) in found.items() if "gather" in what))
        close(trainer.params(), sgd_twin(layout.world_size))
    # Attention is gathered once in a step, and not twice.
    assert sent[0] - sent[1] == LAYERS * 6 * 6 * 8 // 2


# 3: a permuted route


def permuted(layout: Layout, order: tuple[int, ...]) -> None:
    sizes = layout.sizes
    with recipes.permuted_groups(sizes, order) as groups:
        params = mf.shard(make_params(), groups)
        close(mf.unshard(params, groups), make_params(), 0.0)
        levels = [c for name, c in groups.communicators.items() if name.startswith("gather")]
        for comm, level in zip(levels, order, strict=True):
            assert comm.name == f"gather level {level}"
            steps = {b - a for a, b in zip(comm.ranks, comm.ranks[1:], strict=False)}
            assert steps == {int(torch.tensor(sizes)[level + 1 :].prod())}
        close(run(trainer_of(groups, mf.optim.sgd(0.1))), sgd_twin(len(groups.ranks)))


# 4 and 5: reductions over replicas


def every_second(layout: Layout) -> None:
    groups = groups_of(layout)
    sync = mf.replicas.reduced_by(recipes.EverySecond.hop2, init=recipes.EverySecond.init)
    trainer = trainer_of(groups, mf.optim.sgd(0.1), replica_sync=sync)
    want = make_params()
    for step in range(STEPS):
        groups.traffic.clear()
        trainer.step(batch_of(step, dist.get_rank()))
        if step % 2:
            two = [mean_grads(want, at, layout.world_size) for at in (step - 1, step)]
            want = {k: x - 0.1 * (two[0][k] + two[1][k]) for k, x in want.items()}
        close(trainer.params(), want)
        nbytes = sum(x.numel() * 8 for x in tree.flatten(trainer.state.params)[0])
        sent = groups.traffic.snapshot().get("replicas", (0, 0))[1]
        assert (sent >= nbytes) is bool(step % 2)


def coded(x: Tensor) -> Tensor:
    unit = max(x.abs().max(), torch.tensor(1e-30)) / 127
    return (x / unit).round() * unit


def int8(layout: Layout) -> None:
    """On groups of one rank a piece is a leaf, so the twin needs no layout."""
    groups, n = groups_of(layout), layout.world_size
    sync = mf.replicas.reduced_by(recipes.Int8.hop2, init=recipes.Int8.init)
    trainer = trainer_of(groups, mf.optim.sgd(0.1), replica_sync=sync)
    want, rests = make_params(), [dict.fromkeys(make_params(), 0.0) for _ in range(n)]
    for step in range(STEPS):
        groups.traffic.clear()
        trainer.step(batch_of(step, dist.get_rank()))
        grads = [torch.func.grad(loss_fn)(want, batch_of(step, rank)) for rank in range(n)]
        for name in want:
            exact = [grads[rank][name] + rests[rank][name] for rank in range(n)]
            sent = [coded(x) for x in exact]
            for rank in range(n):
                rests[rank][name] = exact[rank] - sent[rank]
            want[name] = want[name] - 0.1 * torch.stack(sent).mean(0)
        close(trainer.params(), want, 1e-9)
    elements = sum(x.numel() for x in make_params().values())
    nbytes = groups.traffic.snapshot().get("replicas", (0, 0))[1]
    assert nbytes <= (n - 1) * (elements + 8 * len(want)) + 200  # 8 bits each, and comparisons


# 6 and 8: optimizers


def by_path(layout: Layout) -> None:
    def made(params: Any) -> Any:
        rate = mf.optim.warmup_cosine(0.02, 2, 10)
        rest = [x for name, x in params.items() if name not in ("embed", "norm")]
        sgd = torch.optim.SGD([params["embed"]], lr=0.02, momentum=0.9)
        norm = torch.optim.AdamW([params["norm"]], weight_decay=0.0)
        adamw = torch.optim.AdamW(rest, weight_decay=0.1)
        return [(sgd, lambda _: 0.02), (norm, lambda i: rate(i) / 2), (adamw, rate)]

    trainer = trainer_of(groups_of(layout), recipes.optimizer_by_path(0.02))
    close(run(trainer), trained_by_torch(made, layout.world_size), 1e-9)


class Lamb(torch.optim.Optimizer):
    """LAMB written out, for full tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state.setdefault(p, {"t": 0, "m": 0 * p.data, "v": 0 * p.data})
                kept["t"] += 1
                kept["m"] = 0.9 * kept["m"] + 0.1 * p.grad
                kept["v"] = 0.999 * kept["v"] + 0.001 * p.grad**2
                m, v = kept["m"] / (1 - 0.9 ** kept["t"]), kept["v"] / (1 - 0.999 ** kept["t"])
                step = m / (v.sqrt() + 1e-6) + 0.01 * p.data
                p.data -= group["lr"] * p.data.norm() / step.norm() * step


def lamb(layout: Layout) -> None:
    groups = groups_of(layout)
    want = trained_by_torch(lambda p: [(Lamb(p.values()), lambda _: 0.05)], layout.world_size)
    trainer = trainer_of(groups, recipes.lamb(0.05, groups))
    close(run(trainer), want, 1e-9)
    calls = groups.traffic.snapshot().get("partition", (0, 0))[0]
    mf.optim.leaf_norms({"a": trainer.state.params, "b": trainer.state.params}, groups)
    now = groups.traffic.snapshot().get("partition", (0, 0))[0]
    assert now - calls == int(layout.partition_size > 1)


# 7: overlapped micro-batches; 10: a collective of one's own


def overlapped(layout: Layout) -> None:
    groups, n = groups_of(layout), layout.world_size
    params = mf.shard(make_params(), groups, bucket_bytes=400)
    for count in (1, 3):
        batches = [batch_of(step, dist.get_rank()) for step in range(count)]
        found = mf.unshard(recipes.overlapped_grads(loss_fn, params, batches, groups), groups)
        each = [mean_grads(make_params(), step, n) for step in range(count)]
        close(found, {k: sum(grads[k] for grads in each) / count for k in found})


def own_collective(layout: Layout) -> None:
    groups = groups_of(layout)
    values = {"a": random(1, 7, dtype=torch.float64), "b": random(2, 3, dtype=torch.float64)}
    params = mf.shard(values, groups)
    mine = mf.shards.map(lambda x: x * (1 + groups.replicas.rank), params)
    most = max(float(x.abs().max()) for x in values.values())
    assert float(recipes.highest(mine, groups)) == most * groups.num_replicas


# 11: Shampoo


class Shampoo(torch.optim.Optimizer):
    """Shampoo on full matrices, and plain steps of all else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self) -> None:
        """Step all parameters."""
        for p in self.param_groups[0]["params"]:
            if p.ndim < 2:
                p.data -= 0.1 * p.grad
                continue
            eyes = (1e-4 * torch.eye(n, dtype=p.dtype) for n in p.shape)
            kept = self.state[p] or dict(zip(("left", "right"), eyes, strict=True))
            self.state[p] = kept
            kept["left"] = kept["left"] + p.grad @ p.grad.T
            kept["right"] = kept["right"] + p.grad.T @ p.grad
            left, right = (recipes.fourth_root(kept[side]) for side in ("left", "right"))
            p.data -= 0.05 * left @ p.grad @ right


def shampoo(layout: Layout) -> None:
    """The gradients are those of `torch.func`, the same to some bits as those of the twin."""
    groups = groups_of(layout)
    want = trained_by_torch(lambda p: [(Shampoo(p.values()), lambda _: 0.05)], layout.world_size)
    optimizer = mf.optim.by_path({"norm": mf.optim.sgd(0.1)}, default=recipes.shampoo(0.05))
    close(run(trainer_of(groups, optimizer)), want, 1e-9)


# 12: a Llama in parts


def llama(layout: Layout) -> None:
    torch.manual_seed(0)
    plain = recipes.make_llama(11, dim=8, heads=4, blocks=2).double()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    mesh = init_device_mesh("cpu", layout.sizes, mesh_dim_names=("dp", "tp"))
    guard = mf.optim.Guard(max_norm=0.1)
    trainer = recipes.llama_in_parts(
        copy.deepcopy(plain), mesh, mf.optim.sgd(0.1), guard=guard, live_bytes=0
    )
    for step in range(STEPS):
        tokens = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        logits = plain(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        metrics: Any = trainer.step(tokens.chunk(2)[mesh["dp"].get_local_rank()])
        assert abs(metrics.loss - loss) <= 1e-12
        assert abs(metrics.grad_norm - norm) <= 1e-12
    found = {k: getattr(x, "full_tensor", lambda x=x: x)() for k, x in trainer.state_dict().items()}
    close(found, plain.state_dict())
    trainer.groups.close()


CASES: list[Any] = [
    *((own_policy, PAIR, "keep"), (own_policy, BOTH, "fsdp2"), (hybrid, PAIR)),
    *((permuted, Layout((2, 2), 4), (1, 0)), (every_second, BOTH), (int8, COPIES)),
    *((by_path, PAIR), (lamb, BOTH), (overlapped, BOTH), (own_collective, BOTH)),
    *((shampoo, BOTH), (llama, BOTH)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__} {case[1]}")
def test_a_recipe_is_its_twin(ranks, case):
    recipe, layout, *given = case
    ranks(layout.world_size).run(recipe, layout, *given)


def test_recipes_use_public_names():
    source = Path(recipes.__file__).read_text()
    assert "from mics_fn" not in source
    table = set(re.findall(r"^  `([\w.]+)` - ", mf.__doc__ or "", flags=re.MULTILINE))
    assert set(re.findall(r"\bmf\.([\w.]*\w)", source)) <= table | {"schedules.Schedule.parse"}
