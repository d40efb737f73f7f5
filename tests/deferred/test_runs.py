"""Runs through a schedule: orders that are pinned, that change, and that differ between ranks."""

import time
import warnings
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from cases import Layout, forget_groups, full_of, groups_of, random
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import mics_fn as mf
from mics_fn import _torch, tree
from mics_fn.collectives import pending
from mics_fn.deferred.live import LiveBuckets
from mics_fn.deferred.reduction import Reduction
from mics_fn.errors import DesyncError
from mics_fn.schedules import desync

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


def make_trainer(groups, blocks=4, **options):
    torch.manual_seed(0)
    return mf.Trainer(
        Blocks(blocks),
        mf.optim.sgd(0.1),
        groups,
        loss=lambda model, batch: model(batch["x"], **batch["how"]).square().mean(),
        bucket_bytes=BLOCK_BYTES,
        **options,
    )


def batch_of(rank, **how):
    return {"x": random(rank, 4, WIDTH), "how": how}


def twin(steps, ranks, blocks=4):
    """A single process over all ranks' batches; `steps` says for each how the model runs."""
    torch.manual_seed(0)
    model = Blocks(blocks)
    for how in steps:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for rank in range(ranks):
            (model(random(rank, 4, WIDTH), **how).square().mean() / ranks).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)  # pyright: ignore
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
        trainer = make_trainer(groups, live_bytes=live, prefetch=prefetch, accumulate=accumulate)
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
    for layout in (PAIR, Layout((2, 2), 2), WIDE):
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


# Orders that change, on all ranks alike.


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
    "ends early": [{}, {}, {"skip": (3,)}, {"skip": (2, 3)}, {}],
    "goes on longer": [{"skip": (2, 3)}, {"skip": (2, 3)}, {}, {}],
    "uses one twice": [{}, {}, {"order": (0, 1, 0, 2, 3)}, {}],
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("live", [0, TWO_BLOCKS, None])
@pytest.mark.parametrize("layout", [PAIR, WIDE], ids=str)
@pytest.mark.covering("ways", "live")
def test_an_order_that_changes_is_right_and_told_once(ranks, live, ways, layout):
    for told in ranks(layout.world_size).run(changing, layout, live, ways):
        if live is None:
            assert told == []
        else:
            assert len(told) == 1
            assert "this warning is given once" in told[0]


# Orders that differ between ranks.


def differing(layout, live, ways, odd_rank, odd_way):
    forget_groups(layout)
    groups = groups_of(layout, timeout_s=30.0)
    trainer = make_trainer(groups, live_bytes=live)
    rank = dist.get_rank()
    for how in ways:
        trainer.step(batch_of(rank, **how))
    started = time.monotonic()
    try:
        for _ in range(2):  # an order that ends early is missed at the next step at the latest
            trainer.step(batch_of(rank, **(odd_way if rank == odd_rank else {})))
    except DesyncError as error:
        return str(error), time.monotonic() - started
    finally:
        forget_groups(layout)
    return "no error", 0.0


ODD = {
    "first step": ([], SKIP, ("bucket 1", "bucket 2")),
    "later": ([{}, {}], SKIP, ("bucket 1", "bucket 2")),
    "ends early": ([{}, {}], {"skip": (3,)}, ("bucket 3", "bucket 1")),  # 2 is current already
    "turns round": ([{}, {}], BACKWARDS, ("bucket 0", "bucket 3")),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize(("layout", "odd_rank"), [(PAIR, 0), (PAIR, 1), (WIDE, 2)], ids=str)
@pytest.mark.covering
def test_ranks_on_different_ways_are_told_who_and_where(ranks, case, layout, odd_rank):
    ways, odd_way, buckets = ODD[case]
    found = ranks(layout.world_size).run(differing, layout, 0, ways, odd_rank, odd_way)
    for text, seconds in found:
        assert text.startswith("defer: ranks use parameters in different orders")
        assert f"rank {odd_rank}" in text
        for bucket in buckets:
            assert f"{bucket} (blocks.{bucket[-1]}" in text
        assert seconds < 15, "within a bounded time"
    assert len({text for text, _ in found}) == 1, "the same words everywhere"


# Ways of which one is longer: nobody may wait in reductions while others wait for a fetch.


def stepping(groups):
    trainer = make_trainer(groups, live_bytes=0)
    return lambda **how: trainer.step(batch_of(dist.get_rank(), **how))


def accumulating(groups):
    trainer = make_trainer(groups, live_bytes=0, accumulate=2)
    return lambda **how: trainer.step(batch_of(dist.get_rank(), **how))


def evaluating(groups):
    trainer = make_trainer(groups, live_bytes=0)
    return lambda **how: trainer.eval(batch_of(dist.get_rank(), **how))


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
        return torch.func.functional_call(skeleton, full, (x,), how).square().mean()

    def run(**how):
        if differentiate:
            mf.reduce_grads(torch.func.grad(loss)(shards, how), groups)
        else:
            with torch.no_grad():
                loss(shards, how)

    return run


def differentiating(groups):
    return by_hand(groups, True)


def generating(groups):
    return by_hand(groups, False)


KINDS = [stepping, accumulating, evaluating, differentiating, generating]
SHORTER = {
    "shorter": {"skip": (2, 3)},
    "longer": {"order": (0, 1, 2, 3, 1, 0)},
    "recomputes": {"recompute": True},
}


def one_rank_differs(layout, kind, before, odd_way):
    forget_groups(layout)
    groups = groups_of(layout, timeout_s=30.0)
    run = kind(groups)
    for _ in range(before):
        run()
    started = time.monotonic()
    try:
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(pending, "_STALL_S", 0.3)
            warnings.simplefilter("ignore")  # that a rank leaves its schedule
            for _ in range(2):  # what is generated last is missed in the next run
                run(**(odd_way if dist.get_rank() == 0 else {}))
    except DesyncError as error:
        return str(error), time.monotonic() - started
    finally:
        forget_groups(layout)
    return "no error", 0.0


# torch.func has no checkpoints, and nothing is recomputed without a backward pass.
CASES = [
    (kind, way)
    for kind in KINDS
    for way in SHORTER
    if way != "recomputes" or kind in (stepping, accumulating)
]


@pytest.mark.parametrize("before", [0, 2], ids=["first run", "later"])
@pytest.mark.parametrize(("kind", "way"), CASES)
@pytest.mark.parametrize("layout", [PAIR, Layout((2, 2), 2)], ids=str)
@pytest.mark.covering("kind", "way")
def test_a_rank_whose_way_is_shorter_or_longer_is_told_of_in_time(ranks, kind, way, before, layout):
    found = ranks(layout.world_size).run(one_rank_differs, layout, kind, before, SHORTER[way])
    if kind is generating:  # nothing is sent between replicas, so the others go on
        assert found[2:] == [("no error", 0.0)] * (layout.world_size - 2)
        found = found[:2]
    for text, seconds in found:
        assert text.startswith(("defer: ranks use parameters", "ranks wait for")), text
        assert "rank 0: " in text
        assert "rank 1: " in text
        assert seconds < 15, "and not 30"
    assert len({text for text, _ in found}) == 1, "the same words everywhere"


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store):
        self.store, self.calls = store, 0

    def __getattr__(self, name):
        self.calls += 1
        return getattr(self.store, name)


def counted_groups(layout):
    """New groups, and their store, which counts."""
    forget_groups(layout)
    store = Counting(_torch.default_store())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch, "default_store", lambda: store)
        return groups_of(layout), store


def messages(layout, kind):
    """Messages to the store in each of a few equal runs."""
    (groups, store), found = counted_groups(layout), []
    run = kind(groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending, "_STALL_S", 60.0)  # a wait for a slow rank would look
        for _ in range(9):
            store.calls = 0
            run()
            found.append(store.calls)
    forget_groups(layout)
    return found


@pytest.mark.parametrize(
    ("layout", "kind"),
    [(PAIR, kind) for kind in KINDS]
    + [(Layout((2,), 1), kind) for kind in (stepping, accumulating, evaluating)],
)
def test_runs_that_repeat_send_no_message(ranks, layout, kind):
    for first, *later in ranks(2).run(messages, layout, kind):
        assert first > 0
        # The second may say what it learned from the first, the third whether it repeats that, and
        # later ones delete what these have said.
        assert later[-2:] == [0, 0]
        assert layout == PAIR or later[2:] == [0] * 6
        assert later[2] == 0


def looks(layout, live, seconds):
    """Messages of equal steps that end at such times, where the host looks as on an accelerator."""
    (groups, store), found, close = counted_groups(layout), [], LiveBuckets.close
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() * 1e-9 + now, sleep=time.sleep)

    def close_and_look(buckets):
        close(buckets)
        buckets.run.look()

    now = -10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending, "_STALL_S", 60.0)  # a wait for a slow rank would look
        patch.setattr(desync, "time", clock)
        trainer = make_trainer(groups, live_bytes=live)
        patch.setattr(LiveBuckets, "close", close_and_look)
        # What the first two runs wrote is deleted four runs later.
        for now in (*range(-9, -2), *seconds):  # noqa: B007  # the clock reads it
            store.calls = 0
            trainer.step(batch_of(dist.get_rank()))
            found.append(store.calls)
    forget_groups(layout)
    return found[7:]


@pytest.mark.parametrize(
    "layout", [PAIR, pytest.param(WIDE, marks=pytest.mark.thorough), Layout((2, 2), 2)], ids=str
)
def test_a_host_that_never_waits_looks_once_a_second_by_one_message(ranks, layout):
    seconds, want = (0, 0, 0.4, 0.9, 1.1, 1.9, 2.0, 2.2, 7), (1, 0, 0, 0, 1, 0, 0, 1, 1)
    for found in ranks(layout.world_size).run(looks, layout, 0, seconds):
        assert found == list(want)
    for found in ranks(layout.world_size).run(looks, layout, None, seconds):
        assert found == [0] * len(want), "where everything is kept nobody leaves"


def uneven(layout, steps):
    """With everything kept, ranks may use different parameters."""
    groups = groups_of(layout)
    rank, n = dist.get_rank(), layout.world_size
    trainer = make_trainer(groups, live_bytes=None)
    for _ in range(steps):
        trainer.step(batch_of(rank, **(SKIP if rank % 2 else {})))
    torch.manual_seed(0)
    model = Blocks()
    for _ in range(steps):
        losses = [
            model(random(r, 4, WIDTH), **(SKIP if r % 2 else {})).square().mean() for r in range(n)
        ]
        grads = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.sub_(grad, alpha=0.1)
    same_params(trainer, dict(model.named_parameters()))


def test_what_is_kept_may_be_used_unevenly(ranks):
    for layout in (PAIR, WIDE, Layout((2, 2), 2)):
        ranks(layout.world_size).run(uneven, layout, 3)


# Schedules and policies of one's own.


def own_schedules(layout):
    groups = groups_of(layout)
    rank = dist.get_rank()
    torch.manual_seed(0)
    shards = mf.shard(dict(Blocks(3).named_parameters()), groups, bucket_bytes=BLOCK_BYTES)
    policy = mf.on_demand(live_bytes=0)
    skeleton = Blocks(3).to("meta")

    def grads_with(schedule):
        total = mf.GradSum()
        run = mf.defer(shards, groups, schedule, into=total)
        full = run.params
        loss = torch.func.functional_call(skeleton, full, (random(rank, 4, WIDTH),))
        total.backward(loss.square().mean())
        run.close()
        return mf.unshard(total.grads(), groups), run

    want, _ = grads_with(policy)
    want, run_of = grads_with(policy)
    assert run_of.following
    text = str(policy.schedule)
    again = mf.schedules.Schedule.parse(text)
    assert again == policy.schedule
    own = mf.schedules.Schedule.parse(
        "fetch 2; fetch 0; use 0; fetch 1; use 1; use 2; drop 0; drop 2; use 1; drop 1"
    )
    wrong = mf.schedules.Schedule.parse("fetch 0; fetch 1; use 1; use 0; drop 0; drop 1")
    by_hand = mf.on_demand(
        plan=lambda record, sizes: mf.schedules.plan(record, sizes, live_bytes=0)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for schedule, follows in [
            (again, 2),
            (own, 2),
            (wrong, 0),
            (by_hand, 1),
            (mf.keep_all(), 0),
        ]:
            followed = 0
            for _ in range(2):
                got, run_of = grads_with(schedule)
                followed += run_of.following
                for name, value in want.items():
                    assert torch.equal(got[name], value), "a schedule never changes numbers"
            assert followed == follows, str(schedule)
    assert sum("order of use changed" in str(w.message) for w in caught) == 1
    with pytest.raises(mf.errors.PlanError, match=r"actions\[0\] is 'use 0'"):
        grads_with(mf.schedules.Schedule.parse("use 0"))
    with pytest.raises(mf.errors.PlanError, match="bucket"):
        grads_with(mf.schedules.Schedule.parse("fetch 7; use 7"))


def test_schedules_of_ones_own(ranks):
    ranks(2).run(own_schedules, PAIR)
    ranks(4).run(own_schedules, WIDE)


def different_schedules(layout):
    forget_groups(layout)
    groups = groups_of(layout)
    shards = mf.shard([torch.ones(4)], groups)
    try:
        mf.defer(shards, groups, mf.on_demand(live_bytes=dist.get_rank()))
    except DesyncError as error:
        return str(error)
    finally:
        forget_groups(layout)


def test_ranks_with_different_schedules_are_told(ranks):
    for text in ranks(2).run(different_schedules, PAIR):
        assert text.startswith("defer: ranks disagree on the schedule")
        assert "rank 0: schedule on_demand(live_bytes=0, prefetch=4" in text


def mixed_gathers(layout):
    """Gathers at once, deferred ones, and their transfers may be under way together."""
    groups = groups_of(layout)
    first = mf.shard([random(i, 40) for i in range(4)], groups, bucket_bytes=8)
    second = mf.shard([random(i + 9, 50) for i in range(3)], groups, bucket_bytes=8)
    keep, policy = mf.keep_all(), mf.on_demand(live_bytes=0)
    for _ in range(4):
        a = mf.defer(first, groups, keep).params  # all under way
        b = mf.shards.start_gather(second, groups)
        c = mf.defer(second, groups, policy).params
        assert torch.equal(mf.gather(second, groups)[1], random(10, 50))
        for i in (2, 0, 1):
            assert torch.equal(a[i] + c[i][:40], random(i, 40) + random(i + 9, 50)[:40])
        assert torch.equal(a[3], random(3, 40))
        assert torch.equal(b.wait()[2], random(11, 50))


def test_gathers_of_all_kinds_mix(ranks):
    for layout in (PAIR, WIDE, Layout((2, 2, 2), 8)):
        ranks(layout.world_size).run(mixed_gathers, layout)


def wider_sum(layout):
    """Small gradients after a large one: a sum in bf16 loses them, one in float32 does not."""
    groups = groups_of(layout)
    shards = mf.shard({"w": torch.ones(6, dtype=torch.bfloat16)}, groups)
    found = []
    for dtype in (torch.bfloat16, None):
        total = mf.GradSum(9, dtype=dtype)
        full = mf.defer(shards, groups, mf.on_demand(), into=total).params
        for x in [256.0] + [0.5] * 8:
            total.backward((full["w"] * x).sum())
        found.append(mf.unshard(total.grads(), groups)["w"][0].item())
    return found


def test_gradients_are_summed_in_a_dtype_of_their_own(ranks):
    nearest = torch.tensor(260 / 9).bfloat16().item()
    lost = torch.tensor(256 / 9).bfloat16().item()
    assert nearest != lost
    for layout in (PAIR, Layout((2, 2), 2), Layout((2, 2), 1)):
        for found in ranks(layout.world_size).run(wider_sum, layout):
            assert found == [lost, nearest]


# Leaves on several groups.


def experts_elsewhere(layout, live, steps):
    """Two blocks on partition groups, two on every rank for itself: one run agrees in both."""
    dense, alone = groups_of(layout), groups_of(Layout(layout.sizes, 1))
    torch.manual_seed(0)
    trainer = mf.Trainer(
        Blocks(4),
        mf.optim.sgd(0.1),
        lambda path: alone if "blocks.0" in path or "blocks.2" in path else dense,
        loss=lambda model, batch: model(batch["x"], **batch["how"]).square().mean(),
        bucket_bytes=BLOCK_BYTES,
        live_bytes=live,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for how in steps:
            trainer.step(batch_of(dist.get_rank(), **how))
    same_params(trainer, twin(steps, layout.world_size))


@pytest.mark.parametrize("live", [None, 0])
@pytest.mark.parametrize("layout", [PAIR, Layout((2, 2), 2), WIDE], ids=str)
def test_leaves_on_several_groups(ranks, layout, live):
    steps = [{}, {}, SKIP, BACKWARDS, {}]
    ranks(layout.world_size).run(experts_elsewhere, layout, live, steps)


# Gradients that torch gives as sparse tensors, and graphs that several backwards go through.


SCHEDULES = {
    "at once": lambda: None,
    "on demand": lambda: mf.on_demand(live_bytes=0),
    "keep_all": mf.keep_all,
}


def sparse_gradients(layout):
    """They become dense ones, those of the same module without `sparse=True`."""
    groups = groups_of(layout)
    weight = {"weight": random(1, 5, 3)}
    shards = mf.shard(weight, groups)
    x = torch.tensor([1, 1, 3, dist.get_rank() if dist.is_initialized() else 0])
    sparse, dense = (nn.Embedding(5, 3, sparse=each) for each in (True, False))

    def loss(module, full):
        return functional_call(module, full, (x,)).pow(2).sum()

    own = torch.func.grad(lambda full: loss(dense, full))(weight)
    want = mf.unshard(mf.reduce_grads(own, groups), groups)["weight"]

    def check(grads):
        assert tree.flatten(grads)[0][0].layout is torch.strided
        assert torch.equal(mf.unshard(mf.reduce_grads(grads, groups), groups)["weight"], want)

    for how, schedule in SCHEDULES.items():
        policy = schedule()
        gathered = lambda s: loss(sparse, full_of(s, groups, policy))  # noqa: B023, E731
        if how == "at once" and layout.partition_size == 1:
            with pytest.raises(RuntimeError, match="sparse"):
                torch.func.grad(gathered)(shards)
            continue
        check(torch.func.grad(gathered)(shards))
        variables = tree.map_leaves(lambda x: x.detach().requires_grad_(), shards)
        pieces, spec = tree.flatten(variables)
        check(spec.unflatten(torch.autograd.grad(gathered(variables), pieces)))
    variable = weight["weight"].clone().requires_grad_()
    (given,) = torch.autograd.grad(loss(sparse, {"weight": variable}), variable)
    assert given.layout is torch.sparse_coo
    check(mf.scatter_grads({"weight": given}, groups))
    check(mf.scatter_grads({"weight": given}, groups, like=shards))
    check(mf.shards.start_scatter_grads({"weight": given}, groups).wait())
    total = mf.GradSum(2)
    full = mf.defer(shards, groups, mf.on_demand(), into=total).params
    total.backward(loss(sparse, full))
    total.backward(loss(sparse, full))
    assert torch.equal(mf.unshard(total.grads(), groups)["weight"], want)


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2,), 2), Layout((2,), 1)], ids=str)
def test_sparse_gradients_become_dense(ranks, layout):
    ranks(layout.world_size).run(sparse_gradients, layout)


def several_backwards(layout):
    groups = groups_of(layout)
    shards = mf.shard({"w": random(1, 6)}, groups)
    value = shards["w"].data
    for schedule in SCHEDULES.values():
        variables = tree.map_leaves(lambda x: x.detach().requires_grad_(), shards)
        pieces = tree.flatten(variables)[0]
        full = full_of(variables, groups, schedule())["w"]
        loss, other = full.pow(2).sum(), full.sum()
        (first,) = torch.autograd.grad(loss, pieces, retain_graph=True)
        (again,) = torch.autograd.grad(loss, pieces, retain_graph=True)
        (third,) = torch.autograd.grad(other, pieces)
        for got, want in ((first, 2 * value), (again, 2 * value), (third, torch.ones_like(value))):
            assert torch.equal(got, want)
        policy = schedule()
        _, pull = torch.func.vjp(  # pyright: ignore
            lambda s, policy=policy: full_of(s, groups, policy)["w"].pow(2).sum(), shards
        )
        for _ in range(2):
            assert torch.equal(pull(torch.ones(()), retain_graph=True)[0]["w"].data, 2 * value)


def into(shards, groups, passes=1):
    total = mf.GradSum(passes)
    return total, mf.defer(shards, groups, mf.on_demand(), into=total).params["w"]


def several_sums(layout):
    """Two sums on one loss, and one loss twice into a sum."""
    groups = groups_of(layout)
    shards = mf.shard({"w": random(1, 6)}, groups)
    value = shards["w"].data
    (a, x), (b, y) = into(shards, groups), into(shards, groups)
    loss = (x * y).sum()  # each needs what the other one's backward would let go of
    a.backward(loss, retain_graph=True)
    b.backward(loss)
    for total in (a, b):
        assert torch.equal(total.grads()["w"].data, value)
    total, x = into(shards, groups, passes=2)
    loss = x.pow(2).sum()
    total.backward(loss, retain_graph=True)
    total.backward(loss)
    assert torch.equal(total.grads()["w"].data, 2 * value)
    (a, x), (b, y) = into(shards, groups), into(shards, groups)
    loss = (x * y).sum()
    a.backward(loss)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        b.backward(loss)
    total, x = into(shards, groups)
    loss = x.pow(2).sum()
    with pytest.raises(mf.errors.LeafError, match="call total.backward"):
        torch.autograd.grad(loss, cast(Any, total._bound).variables, retain_graph=True)
    total.backward(loss)
    assert torch.equal(total.grads()["w"].data, 2 * value)


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2,), 2), Layout((2,), 1)], ids=str)
def test_several_backwards_through_one_gather(ranks, layout):
    ranks(layout.world_size).run(several_backwards, layout)
    ranks(layout.world_size).run(several_sums, layout)


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
