"""The ages of rows of which only elements are sent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import embershard as es
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import decode
from embershard.proto.messages import Push
from embershard.proto.routing import make_route
from embershard.proto.transport.local import LocalTransport
from embershard.ps.shard import Shard
from embershard.worker.client.client import Client

NUM_IDS, DIM = 60, 4
Shards = Callable[..., list[Shard]]


def pushes(shards: list[Shard], optimizer: es.Optimizer, codec: str, steps: int) -> tuple[Client, list[Push]]:
    """A client after some pushes of all rows, and what it sent."""
    seen: list[Push] = []

    def handle(request):
        if isinstance(request, Push):
            seen.append(request)
        return shards[0].handle(request)

    client = Client([LocalTransport(handle, "local")])
    spec = es.TableSpec(name="t", dim=DIM, optimizer=optimizer, initializer=es.Constant())
    client.declare(spec)
    client.compressor.choose("t", push=CodecName.parse(codec))
    route = make_route(np.arange(NUM_IDS), spec.space_key, client.placement)
    for step in range(steps):
        rows = np.random.default_rng(step).standard_normal((NUM_IDS, DIM)).astype(np.float32)
        client.push([("t", route, rows)], clock=step)
    return client, seen


@pytest.mark.parametrize("codec", ["topk:0.05", "topk:0.05+fp16s", "randomk:0.05", "dgc:0.05"])
def test_an_age_counts_the_pushes_since_anything_of_a_row_was_sent(make_shards, codec):
    _, seen = pushes(make_shards(1), es.Adagrad(lr=0.1), codec, 12)
    last, told = np.full(NUM_IDS, -1), []
    for step, push in enumerate(seen):
        (part,) = push.tables
        sent = decode(part.gradients, NUM_IDS, DIM)  # type: ignore[arg-type]
        ages = np.ones(len(sent.rows)) if sent.ages is None else sent.ages
        np.testing.assert_array_equal(ages, step - last[sent.positions])
        last[sent.positions] = step
        told += ages.tolist()
    assert max(told) > 3


def test_sgd_is_not_told_ages_which_it_would_not_heed(make_shards):
    for optimizer, aged in ((es.SGD(lr=0.1), False), (es.SGD(lr=0.1, weight_decay=0.1), True), (es.Adam(lr=0.1), True)):
        _, seen = pushes(make_shards(1), optimizer, "topk:0.05", 4)
        payloads = [decode(push.tables[0].gradients, NUM_IDS, DIM) for push in seen]  # type: ignore[arg-type]
        assert any(payload.ages is not None for payload in payloads) == aged


def test_with_ages_adam_moves_nearer_to_where_it_would_have_been(make_shards):
    moved = {}
    for codec in ("none", "topk:0.05"):
        client, _ = pushes(make_shards(1), es.Adam(lr=0.001), codec, 200)
        route = make_route(np.arange(NUM_IDS), client.spec("t").space_key, client.placement)
        moved[codec] = client.pull([("t", route)])[0].astype(np.float64)
    rate = (moved["none"] * moved["topk:0.05"]).sum() / (moved["none"] ** 2).sum()
    assert rate > 0.65  # 0.42 without
