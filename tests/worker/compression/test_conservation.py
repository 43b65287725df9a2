"""Nothing of a gradient is lost or applied twice, whatever is held back: pushes that are lost, refused, or fail in the
making; leases that end within a push; and the mistakes that gradient compression is known for, tried end to end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
from faulty_training import FAULTY_CLOCK, Once, Training, be_silent, lose_lease, nothing, refuse
from torch import nn
from wired_client import DIM, IDS, NUM_IDS, SPEC, Link, Wired, gradients

import embershard as es
from embershard.local_shards import InProcessShards
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import decode
from embershard.proto.errors import BadCodec, InvalidRequest, LeaseLost, ShardUnavailable
from embershard.proto.messages import Push
from embershard.proto.routing import Placement, Route, ascending, make_route
from embershard.proto.transport.local import LocalTransport
from embershard.ps.shard import Shard
from embershard.ps.table.optimizers import OptimizerRegistry
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.session.session import Session

Shards = Callable[..., list[Shard]]


@pytest.mark.parametrize("codec", ["topk:0.2", "rows:0.3", "randomk:0.2", "dgc:0.2", "topk:0.3+fp16s", "rows:0.3+int8"])
def test_residual_lost_on_retry_a_reply_that_was_lost_loses_and_doubles_nothing(codec, make_shards):
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


def test_a_push_that_is_sent_again_has_the_same_bytes(make_shards):
    wired = Wired(make_shards(1), "rows:0.5+int8")
    wired.push(gradients(0))
    wired.links[0].lost_replies = 2
    wired.push(gradients(1))
    first, second, third = wired.links[0].seen[1:]
    assert first.token == second.token == third.token
    assert bytes(first.tables[0].gradients) == bytes(second.tables[0].gradients) == bytes(third.tables[0].gradients)


@pytest.mark.parametrize("codec", ["topk:0.2", "dgc:0.2", "rows:0.5+int8"])
def test_a_push_that_is_refused_is_given_back(codec, make_shards):
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


def test_rows_that_are_not_finite_are_counted_and_never_held(make_shards):
    wired, rows = Wired(make_shards(2), "topk:0.1"), gradients(0)
    rows[3, 1], rows[7] = np.nan, np.inf
    wired.push(rows)
    assert wired.client.stats.skipped_rows == 2
    assert np.isfinite(wired.client.compressor.held("t").rows).all()
    for step in range(1, 5):
        wired.push(gradients(step))
    wired.check()


def test_ids_that_a_shard_forgot_are_sent_after_all(make_shards):
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


def test_a_codec_that_fails_at_the_second_shard_sends_nothing_to_the_first(make_shards):
    wired = Wired(make_shards(2), "topk:0.2+fp16s")
    wired.push(gradients(0))
    before, held, find = wired.applied(), wired.held(), wired.client.compressor.find
    calls = iter(range(100))

    def failing(name):
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


def test_a_codec_that_fails_at_the_second_table_loses_nothing_of_the_first(make_shards):
    wired = Wired(make_shards(1), "topk:0.2+fp16s")
    other = dataclasses.replace(SPEC, name="u")
    wired.client.declare(other)
    wired.push(gradients(0))
    find, calls = wired.client.compressor.find, iter(range(100))

    def failing(name):
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
def test_what_gives_way_is_sent_apart_where_a_shard_could_not_take_all_of_it_decoded(codec):
    spec, count = dataclasses.replace(SPEC, dim=32), 400
    shard = Shard(0, Placement.even(1), OptimizerRegistry(), max_message_bytes=2**16)
    wired = Wired([shard], codec, spec, residual_rows=10)
    wired.pushed = np.zeros((3 * count, 32))
    for step in range(3):
        rows = np.random.default_rng(step).standard_normal((count, 32)).astype(np.float32)
        wired.push(rows, np.arange(count * step, count * (step + 1)))
    assert max(len(push.tables) for push in wired.links[0].seen) == 1


@pytest.mark.parametrize("codec", ["none", "topk:0.2"])
def test_a_step_that_weighs_nothing_takes_nothing_of_what_is_held(codec, make_shards):
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


def test_what_a_worker_without_a_lease_pushed_is_given_back(make_shards):
    wired = Wired(make_shards(2), "topk:0.2")
    wired.client.join(Terms(workers=1, staleness=4))
    wired.push(gradients(0))
    for link in wired.links:
        link.refused, link.error = 1, LeaseLost(worker=0, lease_ms=1000)
    wired.push(gradients(1))  # dropped without an error: others went on meanwhile
    wired.check()
    assert len(wired.client.compressor.held("t").ids)


def test_ids_of_a_table_whose_pushes_alone_are_coded_travel_packed(make_shards):
    heard: list[Push] = []

    def handle(shard, request):
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


def test_lost_signs_what_topk_sends_has_its_sign(make_shards):
    wired, rows = Wired(make_shards(2), "topk:0.2"), -np.abs(gradients(0))
    wired.push(rows)
    applied = wired.applied()
    assert np.count_nonzero(applied < 0) == pytest.approx(0.2 * rows.size, abs=1)
    assert (applied <= 0).all()
    wired.check()


def test_what_gives_way_in_a_full_table_is_sent(make_shards):
    wired = Wired(make_shards(2), "topk:0.05", residual_rows=10)
    rng = np.random.default_rng(0)
    for step in range(40):
        wired.push(gradients(step, 8), ids=rng.choice(NUM_IDS, 8, replace=False))
        assert len(wired.client.compressor.held("t").ids) <= 10
    wired.check()


def test_a_row_that_gives_way_says_how_many_pushes_it_stands_for(make_shards):
    wired = Wired(make_shards(1), "topk:0.1", residual_rows=2)
    for _ in range(3):  # an element of row 1 is sent each time, row 2 waits
        wired.push(np.array([[8, 7, 6, 5], [1, 1, 1, 1]], np.float32), ids=np.array([1, 2]))
    wired.push(gradients(0, 2), ids=np.array([3, 4]))
    _, gone = wired.links[0].seen[-1].tables
    sent = decode(gone.gradients, len(gone.ids), DIM)  # type: ignore[arg-type]
    assert dict(zip(gone.ids.tolist(), sent.ages.tolist(), strict=True)) == {1: 1, 2: 3}


@pytest.mark.parametrize("codec", ["int8", "randomk:0.2"])
def test_two_workers_with_one_gradient_round_and_draw_apart(codec, make_shards):
    sent = set()
    for worker in (0, 1):
        wired = Wired(make_shards(1), codec, worker=worker)
        for _ in range(2):
            wired.push(gradients(0))
        sent |= {push.tables[0].gradients.tobytes() for push in wired.links[0].seen}
    assert len(sent) == 4


def test_what_is_held_counts_by_its_own_learning_rate_and_0_loses_nothing(make_shards):
    wired = Wired(make_shards(2), "topk:0.1")
    for step, lr_scale in enumerate([1.0, 0.5, 0.0, 2.0, 1e-9, 0.25, 0.0, 1.0]):
        wired.push(gradients(step), lr_scale=lr_scale)
        wired.check()


def test_momentum_applied_twice_dgc_is_that_of_the_paper(make_shards):
    wired = Wired(make_shards(1), "dgc:0.1", momentum=0.7, warmup_steps=0)
    u, v, w = (np.zeros((NUM_IDS, DIM), np.float32) for _ in range(3))
    for step in range(20):
        rows = gradients(step)
        wired.push(rows)
        u = np.float32(0.7) * u + rows
        v = v + u
        sent = np.zeros(v.size, bool)
        sent[np.argsort(-np.abs(v.ravel()), kind="stable")[: round(0.1 * v.size)]] = True
        sent = sent.reshape(v.shape)
        w -= np.where(sent, v, 0)
        u[sent] = v[sent] = 0
        np.testing.assert_allclose(-wired.applied(), w, atol=1e-5)


def test_topk_is_that_of_the_paper_under_a_schedule(make_shards):
    wired = Wired(make_shards(1), "topk:0.1")
    e, w = np.zeros((NUM_IDS, DIM), np.float32), np.zeros((NUM_IDS, DIM), np.float32)
    before = 1.0
    for step in range(20):
        rows, rate = gradients(step), 1.0 / (1 + step // 3)
        wired.push(rows, lr_scale=rate)
        p = rows + e * np.float32(before / rate)
        sent = np.abs(p) >= np.sort(np.abs(p).ravel())[-round(0.1 * p.size)]
        w -= np.float32(rate) * np.where(sent, p, 0)
        e, before = np.where(sent, 0, p), rate
        np.testing.assert_allclose(-wired.applied(), w, atol=1e-5)


@pytest.mark.parametrize("codec", ["topk:0.1", "rows:0.3", "dgc:0.1+fp16s"])
def test_workers_that_step_together_lose_nothing(codec):
    shards = InProcessShards(2)
    terms = Terms(workers=2, staleness=0, wait_timeout=timedelta(seconds=20))
    clients = [Client(shards.transports(), worker=rank) for rank in range(2)]

    def work(client):
        client.compressor.settings = es.Compression(push=codec, warmup_steps=1)
        client.join(terms)
        client.declare(SPEC)
        route = make_route(IDS, SPEC.space_key, client.placement)
        for step in range(6):
            ordered = np.empty((NUM_IDS, DIM), np.float32)
            ordered[route.index] = gradients(10 * client.worker + step)
            client.push([("t", route, ordered)], clock=step)

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    route = make_route(IDS, SPEC.space_key, clients[0].placement)
    (rows,) = clients[0].pull([("t", route)])
    total = -2.0 * rows[route.index].astype(np.float64)  # the mean of two
    for client in clients:
        held = client.compressor.held("t")
        total[held.ids] += held.rows
        client.close()
    want = sum(gradients(10 * rank + step).astype(np.float64) for rank in range(2) for step in range(6))
    np.testing.assert_allclose(total, want, atol=1e-4)


def test_dgc_bounds_the_norm_of_a_gradient_before_it_adds_up(make_shards):
    wired = Wired(make_shards(2), "dgc:0.5", clip_norm=2.0, warmup_steps=0)
    wired.client.compressor.workers = 4
    rows = gradients(0)
    wired.push(rows)
    assert np.linalg.norm(wired.applied() + wired.held()) == pytest.approx(1.0, rel=1e-5)  # 2 / sqrt(4)


def test_dgc_sends_more_at_first(make_shards):
    wired = Wired(make_shards(1), "dgc:0.01", warmup_steps=2)
    sizes = []
    for step in range(10):
        wired.push(gradients(step))
        sizes.append(wired.links[0].seen[-1].tables[0].gradients.nbytes)
    assert sizes[0] > sizes[2] > sizes[4] >= sizes[8]
    assert sizes[0] > 8 * sizes[8]


@pytest.mark.parametrize("codec", ["topk:0.05", "rows:0.05", "randomk:0.05"])
def test_tail_starvation_every_row_of_equal_ones_has_its_turn(codec, make_shards):
    wired = Wired(make_shards(2), codec)
    for _ in range(80):
        wired.push(np.ones((NUM_IDS, DIM), np.float32))
    assert wired.applied().max(axis=1).min() > 20
    wired.check()


@pytest.mark.parametrize("codec", ["topk:0.1", "dgc:0.1", "rows:0.2"])
def test_local_steps_push_differences_of_which_nothing_is_lost(codec, make_shards):
    client = Client([Link(shard, f"local/{number}") for number, shard in enumerate(make_shards(2))])
    session = Session(client, local_steps=3, compression=es.Compression(push=codec, warmup_steps=1))
    table = session.table(SPEC)
    total = np.zeros((NUM_IDS, DIM))
    for step in range(9):
        rows, route = gradients(step), make_route(IDS, SPEC.space_key, client.placement)
        ordered = np.empty_like(rows)
        ordered[route.index] = rows
        total += rows
        assert session.local_steps is not None
        session.local_steps.push([("t", route, ordered)], clock=step)
    held, applied = client.compressor.held("t"), -table.pull(torch.arange(NUM_IDS)).numpy().astype(np.float64)
    assert len(held.ids)
    applied[held.ids] -= held.rows
    np.testing.assert_allclose(applied, total, atol=1e-4)


def test_a_plain_push_sends_the_very_array_that_it_was_given(make_shards):
    wired = Wired(make_shards(1), "none")
    route = Route(np.arange(3), np.array([0, 3]), np.arange(3))
    rows = gradients(0, 3)
    wired.client.push([("t", route, rows)], clock=0)
    (part,) = wired.links[0].seen[0].tables
    assert part.gradients.base is rows
    assert (part.codec, part.packed) == ("", None)


def test_a_codec_that_follows_another_loses_nothing(make_shards):
    wired = Wired(make_shards(3), "topk:0.1")
    codecs = ["rows:0.2", "dgc:0.1", "int8", "randomk:0.3", "none", "topk:0.5", "none"]
    for step, codec in enumerate(codecs):
        wired.push(gradients(2 * step))
        wired.client.compressor.choose("t", push=CodecName.parse(codec))
        if codec == "int8":  # rounds at random, and keeps no account of it
            wired.client.compressor.choose("t", push=CodecName.parse("none"))
        wired.push(gradients(2 * step + 1))
        wired.check()
    assert not len(wired.client.compressor.held("t").ids)


# A shard drops the first messages of a push with its last one.

MakeTraining = Callable[..., Training]


@pytest.fixture(params=["topk:0.2", "rows:0.3+int8", "dgc:0.2+fp16s"])
def make_training(request):
    with ExitStack() as stack:

        def make(staleness, timeout=timedelta(seconds=60)):
            training = Training(request.param, staleness, timeout)
            stack.callback(training.client.close)
            return training

        yield make


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_lease_that_ends_within_a_push_gives_back_what_was_gathered_and_not_what_was_applied(
    make_training, staleness
):
    training = make_training(staleness)
    training.faulty.at_last = Once(lose_lease)
    training.run()
    assert training.member.lost_leases == 1
    assert [push.last for push in training.faulty.taken] == [False] * len(training.faulty.taken) != []


@pytest.mark.parametrize("staleness", [0, 3])
@pytest.mark.parametrize("moment", ["at_first", "at_last"])
def test_a_message_that_is_refused_gives_back_what_was_gathered_and_not_what_was_applied(
    make_training, moment, staleness
):
    training = make_training(staleness)
    setattr(training.faulty, moment, Once(refuse))
    training.run(InvalidRequest)


def test_an_acknowledgement_that_comes_after_the_lease_counts_fornothing(make_training):
    training = make_training(0)
    training.faulty.after_first = Once(lose_lease, be_silent)
    training.run()
    assert training.member.lost_leases == 1


def test_a_push_that_was_complete_before_the_lease_ended_is_not_given_back(make_training):
    training = make_training(0)
    training.faulty.after_last = Once(lose_lease, be_silent)
    training.run()


def test_what_was_gathered_is_remembered_while_the_last_message_waits(make_training):
    training = make_training(0, timedelta(seconds=1))
    training.faulty.at_last = be_silent
    while training.clock < FAULTY_CLOCK:
        training.step()
    with pytest.raises(ShardUnavailable):
        training.step()
    training.faulty.at_last = nothing
    lose_lease(training.faulty)
    training.run()
    assert training.member.lost_leases == 1


def test_a_push_whose_worker_joined_again_meanwhile_is_dropped_without_an_error(make_training):
    training = make_training(0)

    def join_again(faulty):  # as a thread does that finds the lease lost
        training.member.rejoin(0)

    training.faulty.at_last = Once(lose_lease, join_again)
    training.run()
    assert training.member.lost_leases == 1


def test_what_was_held_is_held_again_where_the_push_that_drains_it_is_lost(make_training):
    training = make_training(0)
    while training.clock < FAULTY_CLOCK:
        training.step()
    compressor = training.client.compressor
    compressor.choose("t", push=CodecName.parse("none"))
    training.faulty.at_last = Once(lose_lease)
    training.step()
    assert training.member.lost_leases == 1
    assert len(compressor.held("t").ids)
    training.check()
    training.step()
    assert not len(compressor.held("t").ids)
    training.check()
