"""Pushes that are lost, refused, or fail in the making: nothing of what they held back is lost, or applied twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from wired_client import DIM, IDS, NUM_IDS, SPEC, Wired, gradients

import embershard as es
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.values.registry import ValuesCodec
from embershard.proto.errors import BadCodec, InvalidRequest, LeaseLost, ShardUnavailable
from embershard.proto.messages import Push, Reply, Request
from embershard.proto.routing import Placement, ascending, make_route
from embershard.proto.transport.local import LocalTransport
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.session.session import Session

Shards = Callable[..., list[Shard]]


@pytest.mark.parametrize("codec", ["topk:0.2", "rows:0.3", "randomk:0.2", "dgc:0.2", "topk:0.3+fp16s", "rows:0.3+int8"])
def test_residual_lost_on_retry_a_reply_that_was_lost_loses_and_doubles_nothing(
    codec: str, make_shards: Shards
) -> None:
    wired = Wired(make_shards(2), codec, warmup_steps=1)
    wired.client.timeout = timedelta(seconds=0.1)
    for step in range(10):
        wired.links[step % 2].lost_replies = step % 4  # every other time, so often that the push ends without an answer
        try:
            wired.push(gradients(step))
        except ShardUnavailable:
            for link in wired.links:
                link.lost_replies = 0
    wired.client.timeout = timedelta(seconds=30)  # the machine may stand still for a moment
    wired.push(gradients(99))
    wired.check()
    assert len(wired.client.compressor.held("t").ids)


def test_a_push_that_is_sent_again_has_the_same_bytes(make_shards: Shards) -> None:
    wired = Wired(make_shards(1), "rows:0.5+int8")
    wired.push(gradients(0))
    wired.links[0].lost_replies = 2
    wired.push(gradients(1))
    first, second, third = wired.links[0].seen[1:]
    assert first.token == second.token == third.token
    assert bytes(first.tables[0].gradients) == bytes(second.tables[0].gradients) == bytes(third.tables[0].gradients)


@pytest.mark.parametrize("codec", ["topk:0.2", "dgc:0.2", "rows:0.5+int8"])
def test_a_push_that_is_refused_is_given_back(codec: str, make_shards: Shards) -> None:
    wired = Wired(make_shards(2), codec)
    wired.push(gradients(0))
    before = wired.applied()
    for link in wired.links:
        link.refused = 1
    with pytest.raises(InvalidRequest, match="not today"):
        wired.push(gradients(1))
    np.testing.assert_array_equal(wired.applied(), before)
    wired.check()
    wired.push(gradients(2))
    wired.check()


def test_rows_that_are_not_finite_are_counted_and_never_held(make_shards: Shards) -> None:
    wired, rows = Wired(make_shards(2), "topk:0.1"), gradients(0)
    rows[3, 1], rows[7] = np.nan, np.inf
    wired.push(rows)
    assert wired.client.stats.skipped_rows == 2
    assert np.isfinite(wired.client.compressor.held("t").rows).all()
    for step in range(1, 5):
        wired.push(gradients(step))
    wired.check()


def test_ids_that_a_shard_forgot_are_sent_after_all(make_shards: Shards) -> None:
    wired = Wired(make_shards(2), "topk:0.2", pull="fp16s")
    route = ascending(make_route(IDS, SPEC.space_key, wired.client.placement))
    wired.client.pull([("t", route)], keep=True)
    for link in wired.links:
        link.forgets = True
    rows = gradients(0)[route.ids]
    wired.pushed[route.ids] += rows
    wired.client.push([("t", route, rows)], clock=0)
    for link in wired.links:
        first, second = link.seen
        assert first.tables[0].route
        assert first.tables[0].packed is None
        assert not second.tables[0].route
        assert second.tables[0].packed is not None
    wired.client.compressor.choose("t", pull=CodecName())
    wired.check()


def test_a_codec_that_fails_at_the_second_shard_sends_nothing_to_the_first(make_shards: Shards) -> None:
    wired = Wired(make_shards(2), "topk:0.2+fp16s")
    wired.push(gradients(0))
    before, held, find = wired.applied(), wired.held(), wired.client.compressor.find
    calls = iter(range(100))

    def failing(name: str) -> ValuesCodec:
        if next(calls) == 1:
            raise BadCodec(codec=name, reason="it raised")
        return find(name)

    wired.client.compressor.find = failing
    rows = gradients(1)
    with pytest.raises(BadCodec):
        wired.push(rows)
    wired.client.compressor.find = find
    wired.client.push([], clock=wired.clock)
    np.testing.assert_array_equal(wired.applied(), before)
    assert np.abs(wired.held() - held).max() <= np.abs(rows).max() + 1e-6


def test_a_codec_that_fails_at_the_second_table_loses_nothing_of_the_first(make_shards: Shards) -> None:
    wired = Wired(make_shards(1), "topk:0.2+fp16s")
    other = dataclasses.replace(SPEC, name="u")
    wired.client.declare(other)
    wired.push(gradients(0))
    find, calls = wired.client.compressor.find, iter(range(100))

    def failing(name: str) -> ValuesCodec:
        if next(calls) == 1:
            raise BadCodec(codec=name, reason="it raised")
        return find(name)

    wired.client.compressor.find = failing
    parts = [(spec.name, make_route(IDS, spec.space_key, wired.client.placement)) for spec in (SPEC, other)]
    with pytest.raises(BadCodec):
        wired.client.push([(*part, np.zeros((NUM_IDS, DIM), np.float32)) for part in parts], clock=1)
    wired.client.compressor.find = find
    wired.check()


@pytest.mark.parametrize("codec", ["rows:0.9+int8", "topk:0.1+fp16s"])
def test_what_gives_way_is_sent_apart_where_a_shard_could_not_take_all_of_it_decoded(codec: str) -> None:
    spec, count = dataclasses.replace(SPEC, dim=32), 400
    shard = Shard(0, Placement.even(1), OptimizerRegistry(), max_message_bytes=2**16)
    wired = Wired([shard], codec, spec, residual_rows=10)
    wired.pushed = np.zeros((3 * count, 32))
    for step in range(3):
        rows = np.random.default_rng(step).standard_normal((count, 32)).astype(np.float32)
        wired.push(rows, np.arange(count * step, count * (step + 1)))
    assert max(len(push.tables) for push in wired.links[0].seen) == 1


@pytest.mark.parametrize("codec", ["none", "topk:0.2"])
def test_a_step_that_weighs_nothing_takes_nothing_of_what_is_held(codec: str, make_shards: Shards) -> None:
    wired = Wired(make_shards(2), "topk:0.1")
    wired.client.join(Terms(workers=1, staleness=0))
    wired.push(gradients(0))
    wired.client.compressor.choose("t", push=CodecName.parse(codec))
    route = make_route(IDS, SPEC.space_key, wired.client.placement)
    for clock, pushed in ((1, []), (2, [("t", route, np.zeros((NUM_IDS, DIM), np.float32))])):
        wired.client.push(pushed, clock=clock, weight=0.0)  # as a step that is skipped; shards that gather drop it
        wired.check()
    wired.clock = 3
    wired.push(gradients(1))
    wired.check()


def test_what_a_worker_without_a_lease_pushed_is_given_back(make_shards: Shards) -> None:
    wired = Wired(make_shards(2), "topk:0.2")
    wired.client.join(Terms(workers=1, staleness=4))
    wired.push(gradients(0))
    for link in wired.links:
        link.refused, link.error = 1, LeaseLost(worker=0, lease_ms=1000)
    wired.push(gradients(1))  # dropped without an error: others went on meanwhile
    wired.check()
    assert len(wired.client.compressor.held("t").ids)


def test_ids_of_a_table_whose_pushes_alone_are_coded_travel_packed(make_shards: Shards) -> None:
    heard: list[Push] = []

    def handle(shard: Shard, request: Request) -> Reply:
        if isinstance(request, Push):
            heard.append(request)
        return shard.handle(request)

    transports = [LocalTransport(partial(handle, shard), "local") for shard in make_shards(2)]
    session = Session(Client(transports), compression=es.Compression(push="topk:0.1"))
    model = es.wrap(nn.Sequential(nn.EmbeddingBag(300, 4, mode="sum")), session, optimizer=es.SGD(lr=0.1))
    batches = [torch.randint(0, 300, (40, 4), generator=torch.Generator().manual_seed(n)) for n in range(6)]
    # each overlaps the one before, and its other rows are pulled ahead
    for ids in session.prefetch(batches, inputs=lambda ids: {"0": ids}):
        model(ids).square().mean().backward()
        session.step()
    session.close()
    assert len(heard) == 12
    assert all(part.route or part.packed is not None for push in heard for part in push.tables)
