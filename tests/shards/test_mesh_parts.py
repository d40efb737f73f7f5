"""Groups that are a part of a larger mesh, and leaves on groups of fewer ranks than dense ones."""

import math

import pytest
import torch
import torch.distributed as dist
from cases import Layout, full_of, groups_of, same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import grad, jvp, vmap

import mics_fn as mf
from mics_fn import tree

F64 = torch.float64
WIDTH, TOKENS = 4, 8


def whole(seed, *shape):
    """Small whole numbers, of which sums and products are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(F64)


# Experts over 2 of 4 ranks, against one process that has all of them.


BATCHES = [whole(10 + rank, TOKENS, WIDTH) for rank in range(4)]
PARAMS = {"dense": whole(0, WIDTH, WIDTH), "experts": [whole(1, WIDTH), whole(2, WIDTH)]}


def contribution(dense, expert, which, x):
    """What the tokens that are routed to an expert add to the loss of their rank."""
    mine = x[(x[:, 0] > 0) == bool(which)]
    out = (mine @ dense) * expert
    return (out * out).sum() / TOKENS


def by_one_process():
    def loss(params):
        losses = [
            sum(contribution(params["dense"], params["experts"][e], e, BATCHES[r]) for e in (0, 1))
            for r in range(4)
        ]
        return sum(losses) / 4

    return loss, grad(loss)(PARAMS)


class Experts:
    """This rank's place: dense leaves on all 4 ranks, expert e on those of column e."""

    def __init__(self, dense_size, expert_size, **options):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        self.mine = dist.get_rank() % 2
        self.part = [rank for rank in range(4) if rank // 2 == dist.get_rank() // 2]
        dense = groups_of(Layout((4,), dense_size))
        experts = mf.make_groups(expert_size, mesh=mesh["dp"], timeout_s=20, **options)
        self.groups = {"dense": dense, "expert": experts}
        full = {"dense": PARAMS["dense"], "expert": PARAMS["experts"][self.mine]}
        self.shards = mf.shard(full, self.groups, bucket_bytes=8)

    def loss(self, full):
        """This rank's expert sees the tokens of all ranks of its part, as after an all-to-all."""
        dense, expert = full["dense"], full["expert"]
        losses = [contribution(dense, expert, self.mine, BATCHES[rank]) for rank in self.part]
        return torch.stack(losses).sum()

    def loss_of_shards(self, shards, schedule=None):
        return self.loss(full_of(shards, self.groups, schedule))

    def check(self, grads, want):
        full = mf.unshard(grads, self.groups)
        assert torch.equal(full["dense"], want["dense"])
        assert torch.equal(full["expert"], want["experts"][self.mine])


def zero1(groups):
    return mf.placement.place(groups, "zero1")


def summed(here, micro_steps, place=lambda groups: groups):
    total, groups = mf.GradSum(micro_steps), tree.map_leaves(place, here.groups)
    full = mf.defer(here.shards, groups, mf.on_demand(live_bytes=0), into=total).params
    for _ in range(micro_steps):
        total.backward(here.loss(full))
    return total.grads()


def full_grads(here):
    full = mf.unshard(here.shards, here.groups)
    return grad(here.loss)(full)


WAYS = {
    "grad": lambda here: mf.reduce_grads(grad(here.loss_of_shards)(here.shards), here.groups),
    "grad with a schedule": lambda here: mf.reduce_grads(
        grad(here.loss_of_shards)(here.shards, mf.on_demand()), here.groups
    ),
    "GradSum of two": lambda here: summed(here, 2),
    "GradSum, reduced at the end": lambda here: summed(here, 2, zero1),
    "full": lambda here: mf.reduce_grads(full_grads(here), here.groups, like=here.shards),
}


def experts_as_one_process(sizes):
    here = Experts(*sizes, mean_over=4)
    _, want = by_one_process()
    with here.groups["expert"]:
        for way in WAYS.values():
            here.check(way(here), want)
        same = mf.sync_replicas(here.shards, here.groups, exact=True)
        same_bits(mf.unshard(same, here.groups), mf.unshard(here.shards, here.groups))
        trainer = mf.Trainer(
            lambda full, batch: here.loss(full),
            mf.optim.sgd(0.5),
            here.groups,
            params=mf.unshard(here.shards, here.groups),
            replica_sync=mf.replicas.every_step(),
        )
        trainer.step(torch.ones(1))
        assert torch.equal(trainer.params()["dense"], PARAMS["dense"] - 0.5 * want["dense"])
        moved = PARAMS["experts"][here.mine] - 0.5 * want["experts"][here.mine]
        assert torch.equal(trainer.params()["expert"], moved)
        assert "gradients times 0.5" in here.groups["expert"].describe()


@pytest.mark.parametrize("sizes", [(4, 2), (2, 1), (1, 1)], ids=str)
@pytest.mark.short("(4, 2)", "(2, 1)")
def test_the_gradient_of_an_expert_is_that_of_one_process(ranks, sizes):
    ranks(4).run(experts_as_one_process, sizes)


def experts_differentiated_twice(sizes):
    """Hop 1 in second derivatives and in batches: a product with the Hessian, three ways."""
    here = Experts(*sizes, mean_over=4)
    loss, _ = by_one_process()
    along = {"dense": whole(5, WIDTH, WIDTH), "experts": [whole(6, WIDTH), whole(7, WIDTH)]}
    want = jvp(grad(loss), (PARAMS,), (along,))[1]
    mine = {"dense": along["dense"], "expert": along["experts"][here.mine]}
    with here.groups["expert"]:
        v = mf.shard(mine, here.groups, bucket_bytes=8)
        forward = jvp(grad(here.loss_of_shards), (here.shards,), (v,))[1]
        here.check(mf.reduce_grads(forward, here.groups), want)
        twice = tree.map_leaves(lambda a: torch.stack([a, 2 * a]), v)

        def product(v):
            return jvp(grad(here.loss_of_shards), (here.shards,), (v,))[1]

        both = vmap(product)(twice)
        second = tree.map_leaves(lambda a: a[1] / 2, both)
        here.check(mf.reduce_grads(second, here.groups), want)


@pytest.mark.parametrize("sizes", [(2, 1), (4, 2)], ids=str)
@pytest.mark.short("(2, 1)")
def test_second_derivatives_through_experts_are_those_of_one_process(ranks, sizes):
    ranks(4).run(experts_differentiated_twice, sizes)


@pytest.mark.parametrize("value", [0, 2.0, True])
def test_a_mean_over_nothing_is_refused(value):
    with pytest.raises(mf.errors.PlanError, match="mean_over=.* an int of at least 1"):
        mf.make_groups(1, mean_over=value)


def test_one_rank_with_a_mean_over_more():
    """A world of one: the gradient is divided once, and is not written to where it lies."""
    groups = mf.make_groups(1, mean_over=4)
    shards = mf.shard({"w": torch.ones(3), "v": torch.ones(2)}, groups)
    given = {"w": torch.full((3,), 4.0), "v": torch.full((2,), 8.0)}
    reduced = mf.reduce_grads(given, groups, like=shards)
    assert reduced["w"].data.tolist() == [1.0] * 3
    assert given["w"].tolist() == [4.0] * 3
    total = mf.GradSum()
    full = mf.defer(shards, groups, mf.on_demand(), into=total).params
    total.backward((full["w"] * given["w"]).sum() + (full["v"] * given["v"]).sum())
    assert total.grads()["v"].data.tolist() == [2.0] * 2
    assert given["v"].tolist() == [8.0] * 2


# Norms.


REFUSED = {
    "global_norm": mf.optim.global_norm,
    "max_norm": mf.optim.Guard(max_norm=1.0).judge,
    "spike": mf.optim.Guard(spike=mf.optim.norm_spike()).judge,
    "check": mf.optim.Guard(on_nonfinite="skip").judge,
    "scale": mf.optim.Guard(mf.optim.dynamic_scale()).judge,
}
NEED_A_NORM = ("global_norm", "max_norm", "spike")


def a_part(how):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    given: dict = {"mesh": mesh["dp"]} if how == "mesh" else {"ranks": mesh["dp"].mesh.tolist()}
    with mf.make_groups(2 if how == "mesh" else 1, **given, timeout_s=20) as groups:
        # One leaf is cut over the tensor parallel ranks, the other is the same on all.
        grads = mf.shard({"cut": whole(dist.get_rank() % 2, 6), "copied": whole(9, 3)}, groups)
        calls = [(call, groups) for call in REFUSED.values()]
        routes = (groups.hierarchy, groups.flat, mf.placement.fixed_order(groups))
        for call, route in [*calls, *((mf.optim.global_norm, route) for route in routes)]:
            with pytest.raises(mf.errors.PlanError, match="these groups are a part of") as caught:
                call(grads, route)
            assert "make_groups(whole=True)" in str(caught.value)
        clips: dict = {"params": grads, "guard": mf.optim.Guard(max_norm=1.0)}
        with pytest.raises(mf.errors.PlanError, match="Guard.judge: these groups"):
            mf.Trainer(lambda p, b: p["cut"], mf.optim.sgd(0.1), groups, **clips)
        verdict = mf.optim.Guard().judge(grads, groups)
        assert (verdict.accept, verdict.norm) == (True, None)


@pytest.mark.parametrize("how", ["mesh", "ranks"])
def test_norms_on_a_part_of_a_mesh_are_refused(ranks, how):
    ranks(4).run(a_part, how)


def all_of_it(beside):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    options: dict = {"mesh": mesh["dp"], "whole": True} if beside else {"mesh": mesh}
    with mf.make_groups(2, **options, timeout_s=20) as groups:
        grad = whole(dist.get_rank() % 2 if beside else 0, 8)
        grads = mf.shard([grad], groups)
        for call in REFUSED.values():
            call(grads, groups)
        assert mf.optim.global_norm(grads, groups).item() == math.sqrt(float(grad.square().sum()))


@pytest.mark.parametrize("beside", [False, True], ids=["a whole mesh", "a job beside others"])
def test_norms_on_all_that_holds_a_model_are_taken(ranks, beside):
    ranks(4).run(all_of_it, beside)


def experts_of_other_ranks():
    here = Experts(4, 2, mean_over=4)
    with here.groups["expert"]:
        for name, call in REFUSED.items():
            if name in NEED_A_NORM:
                text = "leaves live on groups of different ranks"
                with pytest.raises(mf.errors.PlanError, match=text):
                    call(here.shards, here.groups)
            else:  # all ranks hear whether something is not finite
                verdict = call(here.shards, here.groups)
                assert (verdict.accept, verdict.norm) == (True, None)
        params, norm = mf.unshard(here.shards, here.groups), PARAMS["dense"].norm().item()
        dense = {"dense": here.shards["dense"]}
        assert mf.optim.global_norm(dense, here.groups["dense"]).item() == norm
        # What is not trained has no gradient, so that nothing is left out.
        frozen = mf.shard(params, here.groups, frozen=lambda path: "expert" in path)
        assert mf.optim.global_norm(frozen, here.groups).item() == norm


def test_norms_over_leaves_on_other_ranks_are_refused(ranks):
    ranks(4).run(experts_of_other_ranks)


def part_of_a_dtensor():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    weight = distribute_tensor(whole(0, 4, 3), mesh["tp"], [Shard(0)])
    with mf.make_groups(1, mesh=mesh["dp"], timeout_s=20) as groups:
        with pytest.raises(mf.errors.LeafError, match=r"params.w is a DTensor") as caught:
            mf.shard({"w": weight}, groups)
        assert "make_groups(mesh=, model=)" in str(caught.value)
        shards = mf.shard({"w": weight.to_local()}, groups)
        assert mf.unshard(shards, groups)["w"].shape == (2, 3)


def test_a_dtensor_on_groups_without_parts_is_refused(ranks):
    ranks(2).run(part_of_a_dtensor)
