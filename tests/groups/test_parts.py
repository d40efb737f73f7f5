"""Groups of models in parts: which ranks they reach, and that training over them is as one process.

Values are small whole numbers in float64, whose sums and products are exact: equality is of bits.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad

import mics_fn as mf
from mics_fn.groups import GroupState
from mics_fn.groups.groups import Model
from mics_fn.groups.make import Parts, _create, cut_rule, dp_ranks_of
from mics_fn.groups.topology import Topology, plan_groups
from mics_fn.shards.pack import watchers

F64 = torch.float64


# Which ranks are reached, without processes.


class Mesh:
    """What `make_groups` reads of a `DeviceMesh`."""

    def __init__(self, sizes, names):
        self.ndim, self.mesh_dim_names = len(sizes), tuple(names)
        self.mesh = torch.arange(torch.Size(sizes).numel()).view(*sizes)

    def size(self, dim):
        return self.mesh.shape[dim]


def known(value) -> Any:
    assert value is not None
    return value


def over(groups) -> Model:
    return known(groups.model)


def without_processes(dp_ranks, p, parts, rank):
    """Groups of a rank as `make_groups` makes them, which move no data."""
    state = GroupState(tuple(r for ranks in dp_ranks for r in ranks), rank)
    state.rejoining = True
    plan, device = plan_groups(Topology((len(dp_ranks[0]),)), p), torch.device("cpu")
    held = Parts(dp_ranks, parts, cut_rule(""))
    mine = next(ranks for ranks in dp_ranks if rank in ranks)
    return _create(state, None, 0.0, plan, mine, device, None, held)


@settings(deadline=None, max_examples=40)
@given(
    st.permutations(["stages", "data", "model"]),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]),
    st.integers(1, 3),
)
def test_groups_of_parts_reach_each_rank_once(names, stages, sizes, parts):
    r, p = sizes
    shape = {"stages": stages, "data": r * p, "model": parts}
    mesh = Mesh([shape[name] for name in names], names)
    world = stages * r * p * parts
    given: Any = mesh
    dp_ranks, data, number = dp_ranks_of(None, given, 0, world, "model", "stages")
    assert (data, number) == ((r * p,), parts)
    every = {rank: without_processes(dp_ranks, p, parts, rank) for rank in range(world)}
    for rank, groups in every.items():
        copies = groups.copies
        for home in (groups, copies):
            assert sorted(home.stacked_ranks) == list(range(world))
            assert home.num_pieces == world // home.num_replicas
            assert all(rank in comm.ranks for comm in home.axes)
            # Along the axes, one after the other, each rank is met once, as in `stacked_ranks`.
            met = [rank]
            for axis in range(len(home.axes)):
                others = [
                    (every[x] if home is groups else every[x].copies).axes[axis].ranks for x in met
                ]
                met = [x for row in zip(*others, strict=True) for x in row]
            assert met == home.stacked_ranks
        assert copies.partition is groups.partition
        assert copies.hierarchy is groups.hierarchy
        assert copies.ranks[copies.position] == rank
        if parts == 1:
            assert copies is groups
            continue
        # Those that have the same chunk of a copy, in each part of this stage.
        place = groups.position % p
        mine = [ranks for ranks in dp_ranks if set(ranks) & set(copies.ranks)]
        assert copies.replicas.ranks == tuple(x for ranks in mine for x in ranks[place::p])
        assert over(groups).parts.ranks == tuple(ranks[groups.position] for ranks in mine)
        alone = groups.replica
        assert set(alone.copies.ranks) == {
            ranks[i] for ranks in mine for i in groups.plan.partition_group(groups.position)
        }
        assert alone.copies.replicas.ranks == over(groups).parts.ranks


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"model": "tp"}, "pass mesh="),
        ({"mesh": Mesh((2, 2), ("dp", "tp")), "model": "x"}, "the mesh has dims"),
        ({"mesh": Mesh((2, 2), ("dp", "tp")), "model": "tp", "stages": "tp"}, "two of its"),
        ({"mesh": Mesh((1, 1, 2, 2), "abcd"), "model": "d"}, "no shard dimension"),
    ],
    ids=["no mesh", "no such dimension", "one for both", "three that are left"],
)
def test_a_mesh_without_these_dimensions_is_refused(how, says):
    given: dict = {"ranks": None, "mesh": None, "rank": 0, "world_size": 4, **how}
    with pytest.raises(mf.errors.PlanError, match=says):
        dp_ranks_of(**given)


@pytest.mark.parametrize("text", ["*.up", "*.up: x", ": 0", "*.up: -1"])
def test_a_rule_without_a_dim_is_refused(text):
    with pytest.raises(mf.errors.PlanError, match="no pattern, or no dim"):
        mf.make_groups(1, cut=text)


# A toy of two blocks over TP x p x r, with collectives of its own, against one process.

WIDTH, HIDDEN, TOKENS = 4, 8, 4
CUT = "*.up: 0; *.down: 1"


def whole(seed, *shape, most=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(F64)


def values():
    found = {"embed": whole(1, WIDTH, WIDTH)}
    for i in range(2):
        found |= {f"{i}.scale": whole(2 + i, WIDTH), f"{i}.up": whole(4 + i, HIDDEN, WIDTH)}
        found |= {f"{i}.down": whole(6 + i, WIDTH, HIDDEN), f"{i}.bias": whole(8 + i, WIDTH)}
    return found


def samples(place, step=0):
    return whole(50 + 10 * step + place, TOKENS, WIDTH, most=1)


class Sum(torch.autograd.Function):
    """Adds up over the parts in forward; its backward is the identity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, comm):
        return mf.collectives.all_gather(comm, x.contiguous().clone()).sum(0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.comm = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return Enter.apply(g, ctx.comm), None


class Enter(torch.autograd.Function):
    """The identity in forward; its backward adds up over the parts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, comm):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.comm = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return Sum.apply(g, ctx.comm), None


def loss_of(params, x, comm=None, *, forgets=False):
    enter = (lambda y: y) if comm is None or forgets else (lambda y: Enter.apply(y, comm))
    add = (lambda y: y) if comm is None else (lambda y: Sum.apply(y, comm))
    x = x @ params["embed"]
    for i in range(2):
        hidden = enter(x * params[f"{i}.scale"]) @ params[f"{i}.up"].T
        x = x + add(hidden.clamp(min=0) @ params[f"{i}.down"].T) + params[f"{i}.bias"]
    return (x.sum() + (x[:, 0] * x[:, 1]).sum()) / len(x)


def part(params, number, parts):
    rule = cut_rule(CUT)
    cut = {name: rule(name) for name in params}
    return {
        name: x if cut[name] is None else x.chunk(parts, cut[name])[number].contiguous()
        for name, x in params.items()
    }


class Parallel:
    """This rank's place in TP x p x r, and one process that has all of it."""

    def __init__(self, parts, p, **options):
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world // parts, parts), mesh_dim_names=("dp", "tp"))
        self.groups = mf.make_groups(p, mesh=mesh, model="tp", cut=CUT, timeout_s=20, **options)
        self.data, self.parts = world // parts, parts
        self.place, self.number = self.groups.position, over(self.groups).parts.rank
        self.comm = self.groups.communicators["parts"]

    def loss(self, full, x):
        return loss_of(full, x, self.comm)

    def mine(self, params):
        return part(params, self.number, self.parts)

    def reference(self, params, step=0):
        every = [samples(place, step) for place in range(self.data)]
        return grad(lambda full: sum(loss_of(full, x) for x in every) / self.data)(params)

    def check(self, shards, want):
        got = mf.unshard(shards, self.groups)
        for name, x in self.mine(want).items():
            assert torch.equal(got[name], x), name


def by_verbs(here, shards, x):
    loss = lambda s: here.loss(mf.gather(s, here.groups), x)  # noqa: E731
    return mf.reduce_grads(grad(loss)(shards), here.groups)


def by_sum(here, shards, x, live_bytes, micro_steps=2):
    total = mf.GradSum(micro_steps)
    policy = mf.on_demand(live_bytes=live_bytes)
    with mf.defer(shards, here.groups, policy, into=total) as full:
        for half in x.chunk(micro_steps):
            total.backward(here.loss(full, half))
    return total.grads()


ROOTS = 4 * torch.finfo(F64).eps  # of each piece a root is taken, squared and added up


def gradients_of_parts(parts, p):
    here, params = Parallel(parts, p), values()
    with here.groups:
        shards = mf.shard(here.mine(params), here.groups, bucket_bytes=200)
        cut = {name: bool(x.bucket.cut) for name, x in shards.items()}
        assert cut == {name: cut_rule(CUT)(name) is not None for name in params}
        want = here.reference(params)
        x = samples(here.place)
        found = {"verbs": by_verbs(here, shards, x)}
        found |= {f"sum {n}": by_sum(here, shards, x, n, 1) for n in (0, None)}
        for grads in found.values():
            here.check(grads, want)
            norm = mf.optim.global_norm(grads, here.groups)
            total = sum(float(x.square().sum()) for x in want.values())
            assert float(norm) == pytest.approx(total**0.5, rel=ROOTS)
            inner = mf.optim.inner(grads, shards, here.groups)
            assert float(inner) == sum(float((want[k] * params[k]).sum()) for k in want)
            with pytest.raises(mf.errors.PlanError, match="a hierarchy has one part of the model"):
                mf.optim.global_norm(grads, here.groups.hierarchy)
            norms = mf.optim.leaf_norms(grads, here.groups)
            for name, x in want.items():
                assert float(norms[name]) == pytest.approx(float(x.norm()), rel=ROOTS), name


@pytest.mark.parametrize(("parts", "p"), [(2, 2), (2, 1), (4, 1)], ids=str)
def test_gradients_and_norms_of_parts_are_those_of_one_process(ranks, parts, p):
    ranks(4).run(gradients_of_parts, parts, p)


@pytest.mark.thorough
@pytest.mark.parametrize(("parts", "p"), [(2, 2), (2, 4), (4, 2), (2, 1)], ids=str)
def test_gradients_of_parts_on_eight_ranks(ranks, parts, p):
    ranks(8).run(gradients_of_parts, parts, p)


RATE = 2.0**-20


def clipped_steps(p, options):
    here, params = Parallel(2, p), values()
    with here.groups:
        guard = mf.optim.Guard(max_norm=2.0**40, on_nonfinite="skip")
        how = {"params": here.mine(params), "guard": guard, "bucket_bytes": 200, **options}
        faults = mf.FaultPolicy(check_replicas=1)
        trainer = mf.Trainer(here.loss, mf.optim.sgd(RATE), here.groups, faults=faults, **how)
        for step in range(2):  # values of the first one are exact
            metrics = trainer.step(samples(here.place, step))
            want = here.reference(params, step)
            total = sum(float(x.square().sum()) for x in want.values())
            assert known(metrics.grad_norm).item() == pytest.approx(total**0.5, rel=1e-12)
            assert metrics.samples == here.data * TOKENS
            params = {name: params[name] - RATE * want[name] for name in params}
            got = trainer.params()
            for name, x in here.mine(params).items():
                bound = step * 1e3 * torch.finfo(F64).eps * float(x.abs().max())
                assert float((got[name] - x).abs().max()) <= bound, name
        copies = {k: x for k, x in trainer.params().items() if cut_rule(CUT)(k) is None}
        every = mf.collectives.all_gather(
            here.comm, torch.cat([x.flatten() for x in copies.values()])
        )
        assert all(torch.equal(each, every[0]) for each in every)


HOW = {
    "live 0": {"live_bytes": 0},
    "all kept": {"live_bytes": None},
    "two micro-steps": {"accumulate": 2, "live_bytes": 0},
    "sums on the host": {"where": "states=host, grads=host"},
}


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("how", list(HOW))
def test_steps_of_parts_are_those_of_one_process(ranks, how, p):
    ranks(4).run(clipped_steps, p, HOW[how])


def what_does_not_fit():
    here, params = Parallel(2, 2), values()
    with here.groups as groups:
        own = here.mine(params)
        if here.number:
            own = own | {"embed": own["embed"] + 1}
        with pytest.raises(mf.errors.DesyncError, match=r"first difference: params\.embed"):
            mf.shard(own, groups)
        with pytest.raises(mf.errors.LeafError, match=r"0\.up of \(\) has no dim 0"):
            mf.shard({"0.up": 1.0}, groups)
        shards = mf.shard(here.mine(params), groups)
        loss = lambda s: mf.optim.global_norm(s, groups)  # noqa: E731
        with pytest.raises(mf.errors.LeafError, match="over the parts of a model has no deriv"):
            grad(loss)(shards)
        matrices = mf.shard(here.mine(params), groups, whole=lambda path: True)
        muon = mf.optim.by_path({"*.up": mf.optim.muon(0.1)}, default=mf.optim.sgd(0.1))
        with pytest.raises(mf.errors.LeafError, match=r"0\.up .* is one of the parts"):
            mf.init_state(matrices, muon)
        # Stacks are cut between matrices.
        experts = mf.shard({"0.up": whole(here.number, 2, 3, 4)}, groups, whole=lambda path: True)
        mf.init_state(experts, mf.optim.muon(0.1))


def test_what_does_not_fit_parts_is_refused(ranks):
    ranks(4).run(what_does_not_fit)


def other_gradients_of_copies(mistake, p):
    here, params = Parallel(2, p), values()
    with here.groups as groups:
        loss, x = here.loss, samples(here.place)
        if mistake == "a backward that does not add up":
            loss = lambda full, x: loss_of(full, x, here.comm, forgets=True)  # noqa: E731
        if mistake == "other batches":
            x = samples(here.place + 10 * here.number)
        trainer = mf.Trainer(loss, mf.optim.sgd(RATE), groups, params=here.mine(params))
        if mistake:
            with pytest.raises(mf.errors.DesyncError, match="parts of the model have other grad"):
                trainer.step(x)
        else:
            for _ in range(2):
                trainer.step(x)
        assert not [each for each in watchers if "CopiesCheck" in repr(each)]


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("mistake", ["", "a backward that does not add up", "other batches"])
def test_parts_with_other_gradients_of_copies_are_named(ranks, mistake, p):
    ranks(4).run(other_gradients_of_copies, mistake, p)


# Experts: dense leaves are on all ranks, those of an expert on the ranks that have it.


def experts_with_a_norm():
    world, tokens = dist.get_world_size(), 8
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    dense = mf.make_groups(2, timeout_s=20)
    how: dict = {"model": "ep", "cut": "*: 0", "mean_over": world}
    experts = mf.make_groups(2, mesh=mesh, **how, timeout_s=20)
    full = {"dense": whole(0, WIDTH, WIDTH), "expert": whole(1, 2, WIDTH)}
    batches = [whole(10 + rank, tokens, WIDTH) for rank in range(world)]

    def contribution(params, e, x):
        mine = x[(x[:, 0] > 0) == bool(e)]
        return ((mine @ params["dense"]) * params["expert"][e]).square().sum() / tokens

    def all_of_it(params):
        return sum(contribution(params, e, x) for x in batches for e in (0, 1)) / world

    number = over(experts).parts.rank
    row = [rank for rank in range(world) if rank // 2 == dist.get_rank() // 2]

    def here(params, batch):
        params = params | {"expert": params["expert"].expand(2, -1)}
        return torch.stack([contribution(params, number, batches[rank]) for rank in row]).sum()

    with dense, experts:
        one = mf.make_groups(2, mesh=mesh, **{**how, "cut": "expert: 0"}, timeout_s=20)
        with one, pytest.raises(mf.errors.LeafError, match="params.dense is a copy on groups with"):
            mf.shard(full, one)
        groups = lambda path: experts if path == "expert" else dense  # noqa: E731
        mine = full | {"expert": full["expert"][number : number + 1]}
        guard = mf.optim.Guard(max_norm=2.0**-4)
        trainer = mf.Trainer(here, mf.optim.sgd(0.5), groups, params=mine, guard=guard)
        want = grad(all_of_it)(full)
        norm = torch.cat([x.flatten() for x in want.values()]).norm()
        metrics = trainer.step(torch.ones(3))
        assert known(metrics.grad_norm).item() == pytest.approx(norm.item(), rel=1e-15)
        assert metrics.samples == 3 * world
        factor = 0.5 * 2.0**-4 / (norm + 1e-6)
        after, bound = trainer.params(), 4 * torch.finfo(F64).eps
        wanted = {name: x - factor * want[name] for name, x in full.items()}
        wanted["expert"] = wanted["expert"][number : number + 1]
        for name, x in wanted.items():
            assert (after[name] - x).abs().max() <= bound * x.abs().max(), name


def test_a_clipped_step_of_experts_is_that_of_one_process(ranks):
    ranks(4).run(experts_with_a_norm)


def parts_and_experts():
    """Each of 4 ranks has an expert, and the dense leaves are cut over 2."""
    here, params, experts = Parallel(2, 2), values(), whole(30, 4, WIDTH)
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("edp", "ep"))
    how: dict = {"mesh": mesh, "model": "ep", "cut": "*: 0", "mean_over": 2, "timeout_s": 20}
    every = [samples(place) for place in range(2)]

    def contribution(expert, e, x):
        return (x[x[:, 0] == e - 1] * expert).square().sum() / TOKENS

    def all_of_it(full):
        routed = sum(contribution(full["expert"][e], e, x) for e in range(4) for x in every)
        return sum(loss_of(full["dense"], x) for x in every) / 2 + routed / 2

    def loss(full, x):
        routed = [contribution(full["expert"][0], dist.get_rank(), x) for x in every]
        return here.loss(full["dense"], x) + torch.stack(routed).sum()

    with here.groups, mf.make_groups(1, **how) as of_experts:
        groups = {"dense": here.groups, "expert": of_experts}
        mine = {"dense": here.mine(params), "expert": experts[dist.get_rank()][None].clone()}
        guard = mf.optim.Guard(max_norm=2.0**40)
        trainer = mf.Trainer(loss, mf.optim.sgd(RATE), groups, params=mine, guard=guard)
        metrics = trainer.step(samples(here.place))
        want = grad(all_of_it)({"dense": params, "expert": experts})
        leaves = [*want["dense"].values(), want["expert"]]
        norm = sum(float(x.square().sum()) for x in leaves) ** 0.5
        assert known(metrics.grad_norm).item() == pytest.approx(norm, rel=ROOTS)
        here.check(
            trainer.state.params["dense"], {k: params[k] - RATE * want["dense"][k] for k in params}
        )
        moved = experts - RATE * want["expert"]
        assert torch.equal(trainer.params()["expert"][0], moved[dist.get_rank()])


def test_a_step_of_parts_and_experts_is_that_of_one_process(ranks):
    ranks(4).run(parts_and_experts)


# Stages of a pipeline hold other leaves; schedules are the user's.


def stages_of_a_pipeline():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    with mf.make_groups(2, mesh=mesh, stages="pp", timeout_s=20) as groups:
        stage = over(groups).stages.rank
        trees = [{"a": whole(0, 3)}, {"b": whole(1, 2, 2), "c": whole(2, 5)}]
        shards = mf.shard(trees[stage], groups)
        total = sum(float(x.square().sum()) for tree in trees for x in tree.values())
        norm = torch.tensor(total, dtype=F64).sqrt().item()
        assert float(mf.optim.global_norm(shards, groups)) == pytest.approx(norm, rel=ROOTS)
        guard = mf.optim.Guard(max_norm=norm / 2, on_nonfinite="skip")
        state = mf.init_state(shards, mf.optim.sgd(0.5))
        assert mf.same_step(state, groups) is state
        grads = mf.reduce_grads(trees[stage], groups, like=shards)
        verdict = guard.judge(grads, groups)
        assert verdict.accept
        assert float(known(verdict.norm)) == pytest.approx(norm, rel=ROOTS)
        mf.opt_step(state, verdict.grads)
        bad = {name: x * (float("nan") if stage else 1.0) for name, x in trees[stage].items()}
        verdict = guard.judge(mf.reduce_grads(bad, groups, like=shards), groups)
        assert not verdict.accept
        assert known(verdict.nonfinite).startswith("grads.b is NaN on ranks 2, 3")
        steps = replace(state, step=dist.get_rank() // 2)
        with pytest.raises(mf.errors.LostStateError, match="ranks 2, 3: step 1"):
            mf.same_step(steps, groups)


def test_stages_of_a_pipeline_have_one_norm_and_one_verdict(ranks):
    ranks(4).run(stages_of_a_pipeline)
