"""Runs through a schedule: orders that are pinned, that change, and that differ between ranks."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Layout, forget_groups, full_of, groups_of, random, same_bits
from telling import told
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives import pending
from mics_fn.deferred.live import LiveBuckets
from mics_fn.deferred.reduction import Reduction
from mics_fn.faults.heartbeat import BoundedStore

PAIR = Layout((2,), 2)
WIDE = Layout((2, 2), 4)
WIDTH = 8
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4
TWO_BLOCKS = 2 * (BLOCK_BYTES + 32)  # with padding for four ranks


class Blocks(nn.Module):
    """One bucket a block; a batch says which blocks run."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x, skip=(), order=None, recompute=False):
        way = [i for i in order or range(len(self.blocks)) if i not in skip]
        if recompute:
            first, way = way[:2], way[2:]
            x = checkpoint(self.through, first, x, use_reentrant=False)
        return self.through(way, x)

    def through(self, way, x):
        for i in way:
            x = torch.tanh(self.blocks[i](x))
        return x


def make_trainer(groups, **options):
    torch.manual_seed(0)
    return mf.Trainer(
        Blocks(), mf.optim.sgd(0.1), groups, bucket_bytes=BLOCK_BYTES, **options,
        loss=lambda model, batch: model(batch["x"], **batch["how"]).square().mean(),
    )  # fmt: skip


def batch_of(rank, **how):
    return {"x": random(rank, 4, WIDTH), "how": how}


def twin(steps, ranks, odd=None):
    """A single process over all ranks' batches; `steps` says for each how the model runs.

    With `odd` each second rank runs it in that way.
    """
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), 0.1 / ranks)
    for how in steps:
        optimizer.zero_grad(set_to_none=False)
        for rank in range(ranks):
            way = odd if rank % 2 and odd else how
            model(random(rank, 4, WIDTH), **way).square().mean().backward()
        optimizer.step()
    return dict(model.named_parameters())


def same_params(trainer, want):
    # gradients of order one, re-associated sums of some hundred terms, a few steps of 0.1
    for name, value in trainer.params().items():
        assert torch.allclose(value, want[name], rtol=0, atol=1e-5), name


# The collectives of a small model, pinned.


class Log:
    """What is started, in order, as 'gather 2' or 'reduce 0'."""

    def __init__(self, monkeypatch):
        self.events, real_fetch, real_start = [], LiveBuckets._fetch, Reduction._start

        def fetch(self_, index):
            self.events.append(f"gather {index}")
            return real_fetch(self_, index)

        def start(self_, index, *rest):
            self.events.append(f"reduce {index}")
            return real_start(self_, index, *rest)

        monkeypatch.setattr(LiveBuckets, "_fetch", fetch)
        monkeypatch.setattr(Reduction, "_start", start)


def pinned(layout, live, prefetch, accumulate, want):
    groups = groups_of(layout)
    with pytest.MonkeyPatch.context() as patch:
        log = Log(patch)
        schedule = mf.on_demand(live_bytes=live, prefetch=prefetch)
        trainer = make_trainer(groups, schedule=schedule, accumulate=accumulate)
        found = []
        for _ in range(4):
            log.events.clear()
            groups.traffic.clear()
            batch = batch_of(dist.get_rank())
            batch["x"] = batch["x"][:1].repeat(accumulate, 1)
            trainer.step(batch)
            found.append((" ".join(log.events), groups.traffic.snapshot()))
    assert found[1] == found[2] == found[3], "step 2 issues the same collectives as step 3"
    assert found[2][0] == want
    gathers = want.count("gather")
    levels = [f"gather {level.name}" for level in groups.hierarchy.route.levels]
    for level in levels:
        assert found[2][1][level][0] == gathers
    hop2 = found[2][1].get("replicas", (0, 0))[0]
    assert hop2 == (4 if groups.num_replicas > 1 else 0), "one hop 2 a bucket and step"


PINNED = {
    (None, 0, 1): "gather 0 gather 1 gather 2 gather 3 reduce 3 reduce 2 reduce 1 reduce 0",
    (0, 0, 1): "gather 0 gather 1 gather 2 gather 3 reduce 3 gather 2 reduce 2 gather 1 reduce 1 "
    "reduce 0",
    (TWO_BLOCKS, 0, 1): "gather 0 gather 1 gather 2 gather 3 reduce 3 reduce 2 gather 1 "
    "reduce 1 reduce 0",
    (None, 0, 2): "gather 0 gather 1 gather 2 gather 3"
    + " reduce 3 reduce 2 reduce 1 reduce 0" * 2,
}


@pytest.mark.parametrize(("live", "prefetch", "accumulate"), PINNED)
def test_the_collectives_of_a_step_are_pinned(ranks, live, prefetch, accumulate):
    """The first block's weight is not needed in backward: its input has no gradient."""
    want = PINNED[live, prefetch, accumulate]
    for layout in (PAIR, Layout((2, 2), 2)):
        ranks(layout.world_size).run(pinned, layout, live, prefetch, accumulate, want)


def early(layout):
    """Hop 1 of a bucket starts while backward still runs, under autograd and under torch.func."""
    groups = groups_of(layout)
    events = []

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(i, x, w):
            return x * w

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.i = inputs[0]
            ctx.save_for_backward(*inputs[1:])

        @staticmethod
        def backward(ctx, grad):
            events.append(f"backward {ctx.i}")
            x, w = ctx.saved_tensors
            return None, grad * w, grad * x

    def loss(shards):
        full = mf.defer(shards, groups, policy).params
        x = torch.ones(6)
        for i, w in enumerate(full):
            x = Mark.apply(i, x, w)
        return x.sum()

    shards = mf.shard([random(i, 6) for i in range(3)], groups, bucket_bytes=8)
    leaves, spec = tree.flatten(shards)
    with pytest.MonkeyPatch.context() as patch:
        log = Log(patch)
        log.events = events
        for live in (None, 0):
            policy = mf.on_demand(live_bytes=live)
            for _ in range(2):
                torch.func.grad(loss)(shards)
                variables = [x.detach().requires_grad_() for x in leaves]
                torch.autograd.grad(loss(spec.unflatten(variables)), variables)
    steps = [e for e in events if not e.startswith("gather")]
    once = ["backward 2", "reduce 2", "backward 1", "reduce 1", "backward 0", "reduce 0"]
    assert steps == once * 8


def test_hop_1_overlaps_backward(ranks):
    ranks(2).run(early, PAIR)


def changing(layout, live, ways):
    groups = groups_of(layout)
    trainer = make_trainer(groups, live_bytes=live)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for how in ways:
            trainer.step(batch_of(dist.get_rank(), **how))
    same_params(trainer, twin(ways, layout.world_size))
    return [str(w.message) for w in caught if "order of use changed" in str(w.message)]


SKIP, BACKWARDS = {"skip": (1,)}, {"order": (3, 2, 1, 0)}
WAYS = {
    "skips a block": [{}, {}, {}, SKIP, SKIP, {}, {}],
    "alternates": [{}, SKIP, {}, SKIP, {}],
    "turns round": [{}, {}, BACKWARDS, BACKWARDS, {}],
    "goes on longer": [{"skip": (2, 3)}, {"skip": (2, 3)}, {}, {}],
    "uses one twice": [{}, {}, {"order": (0, 1, 0, 2, 3)}, {}],
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("live", [0, TWO_BLOCKS, None])
@pytest.mark.parametrize("layout", [PAIR, WIDE], ids=str)
@pytest.mark.short("2-p2-0-skips a block")
def test_an_order_that_changes_is_right_and_told_once(ranks, live, ways, layout):
    for said in ranks(layout.world_size).run(changing, layout, live, ways):
        assert len(said) == (live is not None)
        assert all("this warning is given once" in text for text in said)


# Orders that differ between ranks.


def training(groups, verb="step", **options):
    trainer = make_trainer(groups, live_bytes=0, **options)
    return lambda **how: getattr(trainer, verb)(batch_of(dist.get_rank(), **how))


def by_hand(groups, differentiate):
    torch.manual_seed(0)
    params = dict(Blocks().named_parameters())
    # The last block that is used comes first here, so that some reductions need not wait for it.
    order = list(reversed(params)).index
    shards = mf.shard(params, groups, bucket_bytes=4, order=order)
    policy, skeleton = mf.on_demand(live_bytes=None), Blocks().to("meta")

    def loss(shards, how):
        full = mf.defer(shards, groups, policy).params
        x = random(dist.get_rank(), 4, WIDTH)
        return functional_call(skeleton, full, (x,), how).square().mean()

    def run(**how):
        if differentiate:
            mf.reduce_grads(torch.func.grad(loss)(shards, how), groups)
        else:
            with torch.no_grad():
                loss(shards, how)

    return run


KINDS = {
    "steps": training,
    "accumulates": partial(training, accumulate=2),
    "evaluates": partial(training, verb="eval"),
    "differentiates": partial(by_hand, differentiate=True),
    "generates": partial(by_hand, differentiate=False),
}
# How one rank goes another way, and the buckets that are named if all run the same blocks before.
WAYS_OF_ONE = {
    "skips": (SKIP, ("bucket 1", "bucket 2")),
    "ends early": ({"skip": (3,)}, ("bucket 3", "bucket 1")),  # 2 is current already
    "turns round": (BACKWARDS, ("bucket 0", "bucket 3")),
    # Nobody may wait in reductions while others wait for a fetch.
    "shorter": ({"skip": (2, 3)}, ()),
    "longer": ({"order": (0, 1, 2, 3, 1, 0)}, ()),
    "recomputes": ({"recompute": True}, ()),
}


def one_rank_differs(layout, kind, before, odd_way, odd_rank):
    def make(groups):
        run = KINDS[kind](groups)
        for _ in range(before):
            run()
        way = odd_way if dist.get_rank() == odd_rank else {}
        # What is last is missed in the next run, or one later where it was fetched ahead.
        return lambda: [run(**way) for _ in range(3)]

    return told(layout, make)


# torch.func has no checkpoints, and nothing is recomputed without a backward pass.
CASES = [
    (kind, way)
    for kind in KINDS
    for way, (_, names) in WAYS_OF_ONE.items()
    if kind == "steps" or (not names and (way != "recomputes" or kind == "accumulates"))
]


@pytest.mark.parametrize("before", [0, 2], ids=["first run", "later"])
@pytest.mark.parametrize(("kind", "way"), CASES)
@pytest.mark.parametrize(
    ("layout", "odd"), [(PAIR, 0), (PAIR, 1), (Layout((2, 2), 2), 0), (WIDE, 2)], ids=str
)
@pytest.mark.covering
def test_a_rank_that_goes_another_way_is_told_of_in_time(ranks, kind, way, before, layout, odd):
    n, (how, names) = layout.world_size, WAYS_OF_ONE[way]
    found = ranks(n).run(one_rank_differs, layout, kind, before, how, odd)
    if kind == "generates":  # nothing is sent between replicas, so the others go on
        assert found[layout.partition_size :] == [("no error", 0.0)] * (n - layout.partition_size)
        found = found[: layout.partition_size]
    # Later runs drop what their schedule is done with, and fetch it again.
    if way == "longer" and kind in ("differentiates", "generates") and not before:
        assert {text for text, _ in found} == {"no error"}, "all stays live, so no fetch differs"
        return
    for text, seconds in found:
        assert "ranks differ in it" in text or text.startswith("ranks wait for"), text
        assert f"rank {odd}" in text
        assert "rank 1" in text or layout is WIDE
        if "ranks differ" in text:
            assert all(f"{name} (blocks.{name[-1]}" in text for name in names), text
        assert seconds < 15, "and not 30"
    assert len({text for text, _ in found}) == 1, "the same words everywhere"


def messages(layout, kind):
    """Messages to the store in each of a few equal runs."""
    forget_groups(layout)
    sent, found, send = list[str](), [], BoundedStore.later

    def counted(self, name, *args):
        sent.append(name)
        return send(self, name, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedStore, "later", counted)
        run = KINDS[kind](groups_of(layout))
        patch.setattr(pending, "_STALL_S", 60.0)  # a wait for a slow rank would look
        for _ in range(9):
            sent.clear()
            run()
            found.append(len(sent))
    forget_groups(layout)
    return found


@pytest.mark.parametrize(
    ("layout", "kind"),
    [*((PAIR, kind) for kind in KINDS), (Layout((2,), 1), "accumulates")],
    ids=str,
)
@pytest.mark.short("2-p2-steps", "2-p2-generates", "2-p1-accumulates")
def test_runs_that_repeat_send_no_message(ranks, layout, kind):
    for first, *later in ranks(2).run(messages, layout, kind):
        assert first > 0
        # The second may say what it learned from the first, the third whether it repeats that, and
        # later ones delete what these have said.
        assert later[-2:] == [0, 0]
        assert layout == PAIR or later[2:] == [0] * 6
        assert later[2] == 0


# Schedules and policies of one's own.


def own_schedules(layout):
    groups, policy = groups_of(layout), mf.on_demand(live_bytes=0)
    torch.manual_seed(0)
    shards = mf.shard(dict(Blocks(3).named_parameters()), groups, bucket_bytes=BLOCK_BYTES)
    skeleton, x = Blocks(3).to("meta"), random(dist.get_rank(), 4, WIDTH)

    def grads_with(schedule):
        total = mf.GradSum()
        with (run := mf.defer(shards, groups, schedule, into=total)) as full:
            total.backward(functional_call(skeleton, full, (x,)).square().mean())
        return mf.unshard(total.grads(), groups), run.following

    grads_with(policy)
    want, followed = grads_with(policy)
    assert followed
    parse = mf.schedules.Schedule.parse
    assert parse(str(policy.schedule)) == policy.schedule
    own = "fetch 2; fetch 0; use 0; fetch 1; use 1; use 2; drop 0; drop 2; use 1; drop 1"
    wrong = parse("fetch 0; fetch 1; use 1; use 0; drop 0; drop 1")
    by_hand = mf.on_demand(plan=lambda *given: mf.schedules.plan(*given, live_bytes=0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for schedule, follows in [
            (policy.schedule, 2), (parse(own), 2), (wrong, 0), (by_hand, 1), (mf.keep_all(), 0)
        ]:  # fmt: skip
            followed = 0
            for _ in range(2):
                got, follows_now = grads_with(schedule)
                followed += follows_now
                same_bits(got, want)  # a schedule never changes numbers
            assert followed == follows, str(schedule)
    assert sum("order of use changed" in str(w.message) for w in caught) == 1
    with pytest.raises(mf.errors.PlanError, match=r"actions\[0\] is 'use 0'"):
        grads_with(parse("use 0"))
    with pytest.raises(mf.errors.PlanError, match="bucket"):
        grads_with(parse("fetch 7; use 7"))


def mixed_gathers(layout):
    """Gathers at once, deferred ones, and their transfers may be under way together."""
    groups = groups_of(layout)
    first = mf.shard([random(i, 40) for i in range(4)], groups, bucket_bytes=8)
    second = mf.shard([random(i + 9, 50) for i in range(3)], groups, bucket_bytes=8)
    keep, policy = mf.keep_all(), mf.on_demand(live_bytes=0)
    for _ in range(4):
        a = mf.defer(first, groups, keep).params  # all under way
        b = mf.defer(second, groups, keep).params
        c = mf.defer(second, groups, policy).params
        assert torch.equal(mf.gather(second, groups)[1], random(10, 50))
        for i in (2, 0, 1):
            assert torch.equal(a[i] + c[i][:40], random(i, 40) + random(i + 9, 50)[:40])
        assert torch.equal(a[3], random(3, 40))
        assert torch.equal(b[2], random(11, 50))


@pytest.mark.parametrize("law", [own_schedules, mixed_gathers])
@pytest.mark.parametrize("layout", [PAIR, Layout((2, 2), 2)], ids=str)
@pytest.mark.short("2-p2-mixed_gathers")
def test_runs(ranks, law, layout):
    ranks(layout.world_size).run(law, layout)


# Gradients that torch gives as sparse tensors, and graphs that several backwards go through.


def sparse_gradients(layout):
    """They become dense ones, those of the same module without `sparse=True`."""
    groups, weight = groups_of(layout), {"weight": random(1, 5, 3)}
    shards = mf.shard(weight, groups)
    x = torch.tensor([1, 1, 3, dist.get_rank()])
    sparse, dense = (nn.Embedding(5, 3, sparse=each) for each in (True, False))

    def loss(module, full):
        return functional_call(module, full, (x,)).pow(2).sum()

    own = torch.func.grad(lambda full: loss(dense, full))(weight)
    want = mf.unshard(mf.reduce_grads(own, groups), groups)

    def check(grads):
        assert tree.flatten(grads)[0][0].layout is torch.strided
        same_bits(mf.unshard(mf.reduce_grads(grads, groups), groups), want)

    for schedule in (
        mf.on_demand(live_bytes=0),
        mf.keep_all(),
        *[None] * (groups.partition_size > 1),
    ):
        check(torch.func.grad(lambda s: loss(sparse, full_of(s, groups, schedule)))(shards))  # noqa: B023
    variable = weight["weight"].clone().requires_grad_()
    (given,) = torch.autograd.grad(loss(sparse, {"weight": variable}), variable)
    assert given.layout is torch.sparse_coo
    check(mf.scatter_grads({"weight": given}, groups))


@pytest.mark.parametrize("layout", [PAIR, Layout((2,), 1)], ids=str)
def test_sparse_gradients_become_dense(ranks, layout):
    ranks(2).run(sparse_gradients, layout)


def other_backward(layout):
    groups = groups_of(layout)
    shards = mf.shard({"w": random(1, 6)}, groups)
    value, total = shards["w"].data, mf.GradSum()
    x = mf.defer(shards, groups, mf.on_demand(), into=total).params["w"]
    loss = x.pow(2).sum()
    with pytest.raises(mf.errors.LeafError, match="call total.backward"):
        torch.autograd.grad(loss, total._variables, retain_graph=True)
    total.backward(loss)
    same_bits(total.grads()["w"].data, 2 * value)


@pytest.mark.parametrize("layout", [PAIR, Layout((2,), 1)], ids=str)
def test_another_backward_than_that_of_the_sum_is_refused(ranks, layout):
    ranks(2).run(other_backward, layout)


def test_gradients_that_autograd_gives_as_one_tensor_are_summed_apart():
    groups, x = mf.make_groups(1), torch.tensor([1.0, 2.0, 3.0])
    shards = mf.shard({"a": torch.zeros(3), "b": torch.zeros(3)}, groups)
    total = mf.GradSum(2)
    full = mf.defer(shards, groups, mf.keep_all(), into=total).params
    for _ in range(2):
        total.backward(((full["a"] + full["b"]) * x).sum())
    grads = mf.unshard(total.grads(), groups)
    assert torch.equal(grads["a"], grads["b"])
    assert torch.equal(grads["a"], x)  # the mean of both micro-steps
