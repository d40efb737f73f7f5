"""Twelve schedules, reductions, optimizers and models that researchers wanted, in a few lines each.

They use public names only, and no rank does anything that the others do not. `test_recipes.py` has
a slow twin of each.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import mics_fn as mf

# 1. Prefetch two buckets, and keep some of them for the whole step


def prefetch_two_and_keep(kept: Sequence[int]) -> Any:
    """A policy: two buckets are fetched ahead; those in `kept` stay from first to last use."""

    def plan(record: mf.schedules.Schedule, sizes: Sequence[int]) -> mf.schedules.Schedule:
        uses = record.uses
        last = {bucket: i for i, use in enumerate(uses) for bucket in use}

        def stays(k: int) -> set[int]:
            return _near(uses[k + 1 :], 1) | {b for b in kept if last[b] > k}

        return _planned(record, lambda k: _near(uses[k:], 2), stays)

    return mf.on_demand(live_bytes=0, plan=plan)


def _planned(record: Any, wanted: Callable[[int], Any], stays: Callable[[int], Any]) -> Any:
    """A schedule by which buckets are there in the k-th use, and which stay behind it."""
    live, actions, k = set[int](), [], 0
    for action in record.actions:
        if action.kind == "use":
            actions += [f"fetch {b}" for b in wanted(k) if b not in live]
            live |= wanted(k)
            actions += [str(action), *(f"drop {b}" for b in sorted(live - stays(k)))]
            live &= stays(k)
            k += 1
        elif action.kind == "reduce":
            actions.append(str(action))
    return mf.schedules.Schedule.parse("; ".join(actions))


def _near(uses: Sequence[tuple[int, ...]], ahead: int) -> set[int]:
    """The buckets of the next use, and so many others that come after them."""
    found = set(uses[0]) if uses else set()
    most = len(found) + ahead
    for bucket in (bucket for use in uses for bucket in use):
        found |= {bucket} if len(found) < most else set()
    return found


# 2. Some layers in full for the whole step, the others sharded: hybrid by layer


def hybrid_by_layer(groups: mf.Groups, whole: Callable[[str], bool]) -> Callable[[str], mf.Groups]:
    """Groups by path: what `whole` says is gathered once in a step, as in ZeRO-2."""
    once = mf.placement.place(groups, params=1)
    return lambda path: once if whole(path) else groups


# 3. A gather whose levels come in another order


def permuted_groups(sizes: Sequence[int], order: Sequence[int]) -> mf.Groups:
    """Groups of all ranks, which cross the levels of the machine in another order.

    Args:
      sizes: of the levels, the slowest link first, as ranks are numbered.
      order: which of them is crossed first, second, ...
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes).permute(*order).flatten().tolist()
    names = tuple(f"level {level}" for level in order)
    topology = mf.groups.Topology(tuple(sizes[level] for level in order), names)
    return mf.make_groups(len(ranks), topology=topology, ranks=ranks, timeout_s=20.0)


# 4. Hop 2 in every second step


class EverySecond:
    """Replicas keep their gradients for a step, and average those of two; with SGD no step is lost.

    `Trainer(replica_sync=mf.replicas.reduced_by(EverySecond.hop2, init=EverySecond.init))`.
    """

    @staticmethod
    def init(params: Any) -> Any:
        return {"sum": mf.shards.map(torch.zeros_like, params), "count": torch.zeros(())}

    @staticmethod
    def hop2(grads: Any, state: Any, groups: mf.Groups) -> tuple[Any, Any]:
        total, count = mf.shards.map(torch.add, state["sum"], grads), state["count"] + 1
        nothing = mf.shards.map(torch.zeros_like, grads)
        if count % 2:
            return nothing, {"sum": total, "count": count}
        return mf.sync_replicas(total, groups), {"sum": nothing, "count": count}


# 5. Hop 2 in eight bits, with error feedback


class Int8:
    """Each replica sends its gradient in 8 bits, and adds what was rounded away in the next step.

    `Trainer(replica_sync=mf.replicas.reduced_by(Int8.hop2, init=Int8.init))`.
    """

    @staticmethod
    def init(params: Any) -> Any:
        return mf.shards.map(torch.zeros_like, params)

    @staticmethod
    def hop2(grads: Any, rest: Any, groups: mf.Groups) -> tuple[Any, Any]:
        comm, wanted = groups.communicators["replicas"], mf.shards.map(torch.add, grads, rest)

        def mean(x: Tensor) -> Tensor:
            codes, unit = _coded(x)
            every, units = (mf.collectives.all_gather(comm, each) for each in (codes, unit))
            return (every * units.view(-1, 1)).mean(0).to(x.dtype)

        def lost(x: Tensor) -> Tensor:
            codes, unit = _coded(x)
            return x - codes * unit

        return mf.shards.map(mean, wanted), mf.shards.map(lost, wanted)


def _coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A piece as integers of 8 bits, and what one of them is worth."""
    unit = torch.cat([x.abs(), x.new_full((1,), 1e-30)]).amax() / 127
    return (x / unit).round().to(torch.int8), unit


# 6. Optimizers and rates by path


def optimizer_by_path(peak: float) -> mf.optim.Transform:
    """SGD for the embedding, AdamW without decay and at half the rate for norms, AdamW for all."""
    rest = mf.optim.warmup_cosine(peak, 2, 10)
    return mf.optim.by_path(
        {
            "*embed*": mf.optim.sgd(peak, momentum=0.9),
            "*norm*": mf.optim.adamw(lambda step: rest(step) / 2, weight_decay=0.0),
        },
        default=mf.optim.adamw(rest, weight_decay=0.1),
    )


# 7. Hop 1 of one micro-batch while the next one is computed


def overlapped_grads(
    loss: Callable[[Any, Any], Tensor], params: Any, batches: Sequence[Any], groups: mf.Groups
) -> Any:
    """The mean gradient over micro-batches and ranks; nothing waits before `grads`."""
    total = mf.GradSum(len(batches))
    with mf.defer(params, groups, mf.keep_all(), into=total) as full:
        for batch in batches:
            total.backward(loss(full, batch))
    return total.grads()


# 8. LAMB, whose trust ratios are norms of whole leaves


def lamb(lr: float, groups: Any, *, decay: float = 0.01, eps: float = 1e-6) -> mf.optim.Transform:
    """LAMB (You et al., arXiv:1904.00962); all norms of a step are one all-gather."""

    def init(params: Any) -> Any:
        zeros = mf.shards.map(torch.zeros_like, params)
        return {"count": 0, "mean": zeros, "square": mf.shards.map(torch.zeros_like, params)}

    def update(grads: Any, state: Mapping[str, Any], params: Any) -> tuple[Any, Any]:
        count = state["count"] + 1
        mean = mf.shards.map(lambda m, g: m.lerp(g, 0.1), state["mean"], grads)
        square = mf.shards.map(lambda v, g: v.lerp(g * g, 0.001), state["square"], grads)

        def adam(m: Tensor, v: Tensor, p: Tensor) -> Tensor:
            return m / (1 - 0.9**count) / ((v / (1 - 0.999**count)).sqrt() + eps) + decay * p

        step = mf.shards.map(adam, mean, square, params)
        norms = mf.optim.leaf_norms({"params": params, "step": step}, groups)

        def scaled(s: Tensor, p_norm: Tensor, s_norm: Tensor) -> Tensor:
            ratio = torch.where((p_norm > 0) & (s_norm > 0), p_norm / s_norm, 1.0)
            return -lr * ratio.to(s.dtype) * s

        updates = mf.shards.map(scaled, step, norms["params"], norms["step"])
        return updates, {"count": count, "mean": mean, "square": square}

    options = {"optimizer": f"lamb, lr={lr}, decay={decay}, eps={eps}"}
    return mf.optim.from_update(init, update, options)


# 9. What FSDP2 does: one bucket ahead, and all are dropped after forward


def as_fsdp2() -> Any:
    """A policy: the next bucket is fetched during each use, in forward and in backward."""

    def plan(record: mf.schedules.Schedule, sizes: Sequence[int]) -> mf.schedules.Schedule:
        uses, turns = record.uses, sorted({*record.backwards, len(record.uses)})

        def near(k: int, start: int, ahead: int) -> set[int]:
            """Of the uses from `start` to the end of the pass in which the k-th one is."""
            return _near(uses[start : next(turn for turn in turns if turn > k)], ahead)

        return _planned(record, lambda k: near(k, k, 1), lambda k: near(k, k + 1, 0))

    return mf.on_demand(live_bytes=0, plan=plan)


# 10. A collective of one's own


def highest(values: Any, groups: mf.Groups) -> Tensor:
    """The largest absolute value of a tree of shards, over all ranks; two maxima of one number."""
    most: list[Tensor] = [torch.zeros((), dtype=torch.float64)]
    mf.shards.map(lambda x: most.append(x.abs().amax().double()) or x if len(x) else x, values)
    found = torch.stack(most).amax()
    for name in ("partition", "replicas"):
        comm = groups.communicators[name]
        if comm.size > 1:
            issue = partial(dist.all_reduce, found, op=dist.ReduceOp.MAX)
            how = {"name": f"highest over {name}", "sent_bytes": 2 * found.nbytes}
            mf.collectives.start(comm, issue, [found], **how).wait()
    return found


# 11. Shampoo, a matrix optimizer: its factors lie on the rank that has the matrix


def shampoo(lr: float, *, eps: float = 1e-4) -> mf.optim.Transform:
    """Shampoo (Gupta et al., arXiv:1802.09568) for trees of matrices; a step sends nothing."""

    def init(matrix: Tensor) -> dict[str, Tensor]:
        eye = partial(torch.eye, dtype=matrix.dtype, device=matrix.device)
        rows, columns = matrix.shape
        return {"left": eye(rows) * eps, "right": eye(columns) * eps}

    def step(matrix: Tensor, grad: Tensor, kept: dict[str, Tensor], count: int) -> None:
        kept["left"] += grad @ grad.T
        kept["right"] += grad.T @ grad
        matrix -= lr * fourth_root(kept["left"]) @ grad @ fourth_root(kept["right"])

    return mf.optim.matrixwise(init, step, facts={"optimizer": "shampoo", "lr": lr, "eps": eps})


def fourth_root(x: Tensor) -> Tensor:
    """The inverse fourth root of a positive matrix."""
    values, vectors = torch.linalg.eigh(x)
    return (vectors * values.pow(-0.25)) @ vectors.T


# 12. A small Llama, cut over a dimension of a mesh by torch, and over MiCS groups


class LlamaBlock(nn.Module):
    """RMSNorm, rotary attention and SwiGLU; a rank that has a part of it has some of the heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.width = nn.RMSNorm(dim), nn.RMSNorm(dim), dim // heads
        linear = partial(nn.Linear, bias=False)
        self.q, self.k, self.v, self.out = (linear(dim, dim) for _ in range(4))
        self.gate, self.up, self.down = (
            linear(dim, 2 * dim),
            linear(dim, 2 * dim),
            linear(2 * dim, dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        attended = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor) -> Tensor:
    """Queries or keys, in which each pair of numbers is turned by an angle of its position."""
    time, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.outer(torch.arange(time), 10_000.0 ** (-torch.arange(half) / half)).to(x)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def make_llama(vocab: int, dim: int, heads: int, blocks: int) -> nn.Sequential:
    """Tokens to logits."""
    inner = [LlamaBlock(dim, heads) for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(vocab, dim), *inner, nn.RMSNorm(dim), nn.Linear(dim, vocab))


def llama_in_parts(model: nn.Sequential, mesh: Any, optimizer: Any, **options: Any) -> mf.Trainer:
    """A trainer on a mesh with dimensions "dp" and "tp", whose batches are equal along "tp"."""
    up, down = ColwiseParallel(), RowwiseParallel()
    plan = {**dict.fromkeys(("q", "k", "v", "gate", "up"), up), "out": down, "down": down}
    for block in (x for x in model if isinstance(x, LlamaBlock)):
        parallelize_module(block, mesh["tp"], plan)
    groups = mf.make_groups(mesh["dp"].size(), mesh=mesh, model="tp")

    def loss(model: Any, tokens: Tensor) -> Tensor:
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return mf.Trainer(model, optimizer, groups, loss=loss, **options)
