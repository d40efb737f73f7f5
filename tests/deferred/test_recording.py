"""`record`: the order of use without data is that of a real step."""

import torch
from cases import Layout, full_of, groups_of
from torch import nn
from torch.func import functional_call

import mics_fn as mf

PAIR = Layout((2,), 2)


def make():
    torch.manual_seed(0)
    embed = nn.Embedding(7, 6)
    return nn.Sequential(
        embed, nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), nn.Linear(6, 7)
    )


def recorded(layout):
    groups = groups_of(layout)
    model = make()
    params = {**dict(model.named_parameters()), "steps": torch.tensor(3)}
    params["2.bias"].requires_grad_(False)
    shards = mf.shard(params, groups, bucket_bytes=200)
    skeleton = make().to("meta")

    def loss_fn(full, batch):
        values = {k: v for k, v in full.items() if k != "steps"}
        return functional_call(skeleton, values, (batch,)).square().mean()

    tokens = torch.arange(6).view(2, 3)
    groups.traffic.clear()
    hollow = mf.record(loss_fn, shards, tokens)
    assert groups.traffic.snapshot() == {}, "nothing is sent without groups"
    total = mf.GradSum()
    with (run := mf.defer(shards, groups, mf.on_demand(), into=total)) as full:
        total.backward(loss_fn(full, tokens))
    total.wait()
    real = run.record
    assert groups.traffic.snapshot()["gather rank"][0] > 1
    assert hollow == real, (str(hollow), str(real))
    marked = mf.record(loss_fn, shards, tokens, mark_backward=True)
    assert (len(marked.backwards), marked.unmarked) == (1, hollow)
    assert shards["2.bias"].bucket.index not in hollow.reduces, "it is frozen"
    buckets = {x.bucket.index: x.bucket.nbytes for x in shards.values() if x.bucket}
    schedule = mf.schedules.plan(hollow, [buckets[i] for i in sorted(buckets)], live_bytes=0)
    total = mf.GradSum()
    full = full_of(shards, groups, schedule, into=total)
    total.backward(loss_fn(full, tokens))
    return str(hollow)


def test_a_record_without_data_is_that_of_a_real_step(ranks):
    first, second = ranks(2).run(recorded, PAIR)
    assert first == second
