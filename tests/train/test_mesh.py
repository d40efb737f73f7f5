"""Models cut by torch's `parallelize_module`, trained with groups of parts.

The twins are FSDP2 on the same modules, and one process that has all of the model and all batches.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

import mics_fn as mf
from mics_fn import tree
from mics_fn.lab.bench import mesh as bench
from mics_fn.lab.models import GPT, GPTConfig, loss_of

F64 = torch.float64
CONFIG = GPTConfig(vocab_size=32, context=8, dim=16, num_heads=4, num_blocks=1)
CUTS = ("tp", "sp")
TP, SAMPLES, MAX_NORM, RATE = 2, 4, 0.1, 0.1
# An element of a gradient is a sum of at most so many products (samples, positions, width of the
# MLP), which are of the size of the largest element, and each order of them rounds in another way.
TERMS = 4 * SAMPLES * CONFIG.context * 4 * CONFIG.dim
BOUND = TERMS * torch.finfo(F64).eps


def mesh_of() -> Any:
    n = dist.get_world_size()
    return init_device_mesh("cpu", (n // TP, TP), mesh_dim_names=("dp", "tp"))


def groups_of(mesh: Any, p: int = 2) -> mf.Groups:
    return mf.make_groups(p, mesh=mesh, model="tp", timeout_s=20)


def make_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).to(F64)


def cut_gpt(mesh: Any, kind: str) -> Any:
    if kind == "tp":
        return bench.parallelized(make_gpt(), mesh["tp"])
    return along_sequences(make_gpt(), mesh["tp"])


def along_sequences(model: Any, mesh: Any) -> Any:
    """Cut positions, too: norms and embeddings are whole, and see a half of them."""
    whole, cut, norm = Replicate(), Shard(1), SequenceParallel()
    rows = partial(RowwiseParallel, input_layouts=whole)
    head = ColwiseParallel(input_layouts=cut, output_layouts=whole)
    plan: Any = {"tokens": rows(output_layouts=cut), "positions": rows(output_layouts=Shard(0))}
    parallelize_module(model, mesh, plan | {"norm": norm, "head": head})
    up, down = ColwiseParallel(input_layouts=cut), RowwiseParallel(output_layouts=cut)
    plan = {"attention.qkv": up, "attention.out": down, "mlp.0": up, "mlp.2": down}
    for block in model.blocks:
        parallelize_module(block, mesh, plan | {"norm1": norm, "norm2": norm})
    return model


def tokens(step: int, micro: int, mesh: Any) -> Any:
    """The samples of all ranks, and those of this one, which the other parts have, too."""
    random = torch.Generator().manual_seed(100 * step + micro)
    size = mesh["dp"].size() * SAMPLES, CONFIG.context + 1
    every = torch.randint(0, CONFIG.vocab_size, size, generator=random)
    own = every.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    return [(x[:, :-1], x[:, 1:]) for x in (every, own)]


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(got: Any, want: Any, bound: float = BOUND) -> None:
    assert [*got] == [*want]
    for name, x in want.items():
        error = float((whole(got[name]) - whole(x)).detach().abs().max())
        assert error <= bound * float(whole(x).detach().abs().max()), (name, error)


# Against FSDP2 with the same parallel modules.


class Fsdp2:
    """FSDP2 over the data-parallel ranks, whose norm is that of all parts."""

    def __init__(self, mesh: Any, kind: str, accumulate: int) -> None:
        self.mesh, self.accumulate, self.model = mesh, accumulate, cut_gpt(mesh, kind)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(self.model, mesh=mesh["dp"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE)

    def grads(self, step: int) -> dict[str, Tensor]:
        for micro in range(self.accumulate):
            _, own = tokens(step, micro, self.mesh)
            with warnings.catch_warnings():  # what `head` gives is a view
                warnings.filterwarnings("ignore", "FSDP2-wrapped module")
                loss = loss_of(self.model, own)
            (loss / self.accumulate).backward()
        return {name: whole(x.grad) for name, x in self.model.named_parameters()}

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.grads(step)
        bench.clip(self.model.parameters(), MAX_NORM)
        self.optimizer.step()


def by_hand(mesh: Any, groups: mf.Groups, model: Any, live: int | None, accumulate: int) -> Any:
    """The gradients of the first step, by the verbs."""
    params = dict(model.named_parameters())
    shards, total = mf.shard(params, groups), mf.GradSum(accumulate)
    policy = mf.keep_all() if live is None else mf.on_demand(live_bytes=live)
    with mf.defer(shards, groups, policy, into=total) as parts:
        for micro in range(accumulate):
            full = mf.shards.as_dtensors(parts, params)
            tokens_in, tokens_out = tokens(0, micro, mesh)[1]
            logits = functional_call(model, full, (tokens_in,))
            total.backward(cross_entropy(logits.flatten(0, 1), tokens_out.flatten()))
    return mf.shards.as_dtensors(mf.unshard(total.grads(), groups), params)


def bytes_by_formula(shards: Any, groups: mf.Groups) -> dict[str, float]:
    """What a rank sends in a step that gathers each bucket once; messages of totals aside."""
    leaves = tree.flatten(shards, lambda x: isinstance(x, mf.shards.Sharded))[0]
    sizes = {x.bucket: x.bucket.numel * x.bucket.dtype.itemsize for x in leaves}
    p, r = groups.partition_size, groups.copies.num_replicas
    copies = sum(size for bucket, size in sizes.items() if not bucket.cut)
    level, r_cut = (p - 1) / p * sum(sizes.values()), groups.num_replicas
    hops = {"copies": (r, copies), "replicas": (r_cut, sum(sizes.values()) - copies)}
    hops = {name: 2 * (r - 1) / r * size / p for name, (r, size) in hops.items() if r > 1}
    return {"gather": level, "reduce": level} | {k: x for k, x in hops.items() if x}


def as_fsdp2(kind: str, live: int | None, accumulate: int) -> None:
    mesh = mesh_of()
    theirs, model = Fsdp2(mesh, kind, accumulate), cut_gpt(mesh, kind)
    with groups_of(mesh) as groups:
        close(by_hand(mesh, groups, model, live, accumulate), theirs.grads(0))
        trainer = mf.Trainer(
            model, mf.optim.sgd(RATE), groups, loss=loss_of, accumulate=accumulate,
            live_bytes=live, guard=mf.optim.Guard(max_norm=MAX_NORM),
        )  # fmt: skip
        for step in range(3):
            groups.traffic.clear()
            theirs.step(step)
            own = [tokens(step, micro, mesh)[1] for micro in range(accumulate)]
            metrics: Any = trainer.step(tuple(map(torch.cat, zip(*own, strict=True))))
            assert metrics.grad_norm > 2 * MAX_NORM, "it is limited"
        sent = {k.split()[0]: n for k, (_, n) in groups.traffic.snapshot().items()}
        got = trainer.state_dict()
        close(
            {name: got[name] for name, _ in model.named_parameters()},
            dict(theirs.model.named_parameters()),
        )
        assert sent.pop("step") == 2 * 32, "a message over the partition group, one over the parts"
        want = bytes_by_formula(trainer.state.params, groups)
        want["reduce"] *= accumulate
        if live is None:
            assert sent == want
        else:
            assert sent.pop("gather") >= want.pop("gather")
            assert sent == want


CASES = [(kind, live, s) for kind in CUTS for live in (0, None) for s in (1, 2)]


@pytest.mark.parametrize(("kind", "live", "accumulate"), CASES)
@pytest.mark.short("tp-0-2", "sp-None-1")
def test_gradients_and_steps_are_those_of_fsdp2(ranks, kind, live, accumulate):
    ranks(4).run(as_fsdp2, kind, live, accumulate)


# Against one process.


def as_one_process(p: int, kind: str) -> None:
    mesh, plain = mesh_of(), make_gpt()
    model, optimizer = cut_gpt(mesh, kind), torch.optim.SGD(plain.parameters(), RATE)
    with groups_of(mesh, p) as groups:
        trainer = mf.Trainer(
            model, mf.optim.sgd(RATE), groups, loss=loss_of, live_bytes=0,
            guard=mf.optim.Guard(max_norm=MAX_NORM),
        )  # fmt: skip
        for step in range(3):
            every, own = tokens(step, 0, mesh)
            optimizer.zero_grad()
            loss = loss_of(plain, every)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
            optimizer.step()
            metrics: Any = trainer.step(own)
            assert metrics.loss.item() == pytest.approx(loss.item(), rel=BOUND)
            assert metrics.grad_norm.item() == pytest.approx(norm.item(), rel=BOUND)
        close(trainer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.short("1-tp")
def test_steps_are_those_of_one_process(ranks, p, kind):
    ranks(4).run(as_one_process, p, kind)


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.thorough
def test_steps_of_eight_ranks_are_those_of_one_process(ranks, p, kind):
    ranks(8).run(as_one_process, p, kind)


# What a model of DTensors may have besides.


class Layers(nn.Module):
    """An embedding, two blocks of which the first may be computed again in backward, and a head."""

    def __init__(self, *, again: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.again, self.embed = again, nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(8), "up": nn.Linear(8, 16)}) for _ in range(2)
        )
        self.downs = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block, down in zip(self.blocks, self.downs, strict=True):

            def inner(x: Tensor, block: Any = block, down: Any = down) -> Tensor:
                return down(gelu(block["up"](block["norm"](x))))

            x = x + (checkpoint(inner, x, use_reentrant=False) if self.again else inner(x))
        return self.head(x)


def frozen(model: Layers) -> None:
    for weight in (model.blocks[0]["up"].weight, model.blocks[1]["norm"].weight):  # pyright: ignore
        weight.requires_grad_(False)


KINDS: dict[str, tuple[dict[str, Any], Callable[[Layers], Any]]] = {
    "computed again": ({"again": True}, lambda model: None),
    "tied": ({"tied": True}, lambda model: None),
    "frozen": ({}, frozen),
}


def layers(mesh: Any = None, dtype: torch.dtype = F64, **options: bool) -> Any:
    torch.manual_seed(0)
    model = Layers(**options).to(dtype)
    if mesh is not None:
        plan: dict[str, Any] = {"blocks.*.up": ColwiseParallel(), "downs.*": RowwiseParallel()}
        if options.get("tied"):
            plan["embed"] = RowwiseParallel(input_layouts=Replicate())
            plan["head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], plan)
        if options.get("tied"):
            model.head.weight = model.embed.weight
    return model


def token_loss(model: Any, x: Tensor) -> Tensor:
    return cross_entropy(model(x).flatten(0, 1), x.flatten())


def words(step: int, mesh: Any) -> tuple[Tensor, Tensor]:
    every, own = tokens(step, 0, mesh)
    return every[0] % 12, own[0] % 12


def own_layers(kind: str, live: int | None) -> None:
    mesh, (options, change) = mesh_of(), KINDS[kind]
    plain, model = layers(**options), layers(mesh, **options)
    change(plain)
    change(model)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([x for x in plain.parameters() if x.requires_grad], RATE)
    with groups_of(mesh) as groups:
        trainer = mf.Trainer(model, mf.optim.sgd(RATE), groups, loss=token_loss, live_bytes=live)
        for step in range(3):
            every, own = words(step, mesh)
            optimizer.zero_grad()
            token_loss(plain, every).backward()
            optimizer.step()
            trainer.step(own)
        every, own = words(3, mesh)
        assert trainer.eval(own).item() == pytest.approx(token_loss(plain, every).item(), rel=BOUND)
        close(model.state_dict(), before, 0.0)
        assert all(x.grad is None for x in model.parameters())
        part = trainer.params()["blocks.0.up.weight"]
        assert type(part) is Tensor
        assert part.shape == (16 // TP, 8)
        model.load_state_dict(trainer.state_dict())
    assert type(model.blocks[0]["up"].weight.data) is DTensor
    close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("live", [0, None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.short("tied-0", "computed again-None")
def test_a_model_of_dtensors_trains_and_is_never_changed(ranks, kind, live):
    ranks(4).run(own_layers, kind, live)


BF16 = "param=f32, compute=bf16, reduce=f32, output=f32"


def rounded() -> None:
    """Against one process in the same precision, which rounds sums elsewhere."""
    mesh, kinds = mesh_of(), set()

    def loss(model: Any, x: Tensor) -> Tensor:
        weight = model.blocks[0]["up"].weight
        kinds.add((type(weight), weight.dtype))
        return token_loss(model, x)

    plain, model = layers(dtype=torch.float32), layers(mesh, dtype=torch.float32)
    how: dict[str, Any] = {"precision": BF16, "guard": mf.optim.Guard(max_norm=MAX_NORM)}
    with groups_of(mesh) as groups, mf.make_groups(1, ranks=[dist.get_rank()], whole=True) as one:
        trainer = mf.Trainer(model, mf.optim.sgd(RATE), groups, loss=loss, **how)
        twin = mf.Trainer(plain, mf.optim.sgd(RATE), one, loss=token_loss, **how)
        for step in range(3):
            every, own = words(step, mesh)
            got: Any = trainer.step(own)
            want: Any = twin.step(every)
            # Activations pass some 8 roundings of at most 2**-8 on each way.
            for a, b in ((got.loss, want.loss), (got.grad_norm, want.grad_norm)):
                assert a.item() == pytest.approx(b.item(), rel=8 * 2**-8)
        after, unlike = trainer.state_dict(), twin.state_dict()
        for name, x in plain.state_dict().items():
            moved = float((unlike[name] - x).norm())
            error = float((whole(after[name]) - unlike[name]).norm())
            assert error <= 16 * 2**-8 * moved, (name, error, moved)
    assert kinds == {(DTensor, torch.bfloat16)}


def test_a_model_of_dtensors_is_computed_in_bf16(ranks):
    ranks(4).run(rounded)


# What is refused.


def refused() -> None:
    mesh = mesh_of()
    model = layers(mesh)
    params = dict(model.named_parameters())
    with groups_of(mesh) as groups:
        shards, own = mf.shard(params, groups), words(0, mesh)[1]

        def loss(shards: Any) -> Tensor:
            full = mf.shards.as_dtensors(mf.gather(shards, groups), params)
            return functional_call(model, full, (own,)).sum()

        with pytest.raises(mf.errors.LeafError, match="as_dtensors: DTensors do not go through"):
            grad(loss)(shards)
        parts = mf.unshard(shards, groups)
        with pytest.raises(mf.errors.LeafError, match=r"full.head.weight is missing, as in like"):
            mf.shards.as_dtensors({k: x for k, x in parts.items() if k != "head.weight"}, params)
        wrong = {**parts, "blocks.0.up.weight": torch.ones(16, 8)}
        text = r"full.blocks.0.up.weight is of \(16, 8\), and the model's part of \(8, 8\)"
        with pytest.raises(mf.errors.LeafError, match=text):
            mf.shards.as_dtensors(wrong, params)
        compiled: dict[str, Any] = {"loss": token_loss, "compile": "blocks.*"}
        with pytest.raises(mf.errors.PlanError, match="take no parameters that are DTensors"):
            mf.Trainer(model, mf.optim.sgd(RATE), groups, **compiled)
        model.register_buffer("scale", distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]))
        with pytest.raises(mf.errors.LeafError, match="buffer 'scale' is a DTensor"):
            mf.Trainer(model, mf.optim.sgd(RATE), groups, loss=token_loss)


def test_what_does_not_go_through_dtensors_is_refused(ranks):
    ranks(4).run(refused)
