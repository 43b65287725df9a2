"""Mistakes that implementations of gradient compression are known for, each tried end to end.

Those of pushes that fail are in test_compression_failures.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch
from wired_client import DIM, IDS, NUM_IDS, SPEC, Link, Wired, gradients

import embershard as es
from embershard.local_shards import InProcessShards
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import decode
from embershard.proto.routing import Route, make_route
from embershard.ps.shard import Shard
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.session.session import Session

Shards = Callable[..., list[Shard]]


def test_lost_signs_what_topk_sends_has_its_sign(make_shards: Shards) -> None:
    wired, rows = Wired(make_shards(2), "topk:0.2"), -np.abs(gradients(0))
    wired.push(rows)
    applied = wired.applied()
    assert np.count_nonzero(applied < 0) == pytest.approx(0.2 * rows.size, abs=1)
    assert (applied <= 0).all()
    wired.check()


def test_what_gives_way_in_a_full_table_is_sent(make_shards: Shards) -> None:
    wired = Wired(make_shards(2), "topk:0.05", residual_rows=10)
    rng = np.random.default_rng(0)
    for step in range(40):
        wired.push(gradients(step, 8), ids=rng.choice(NUM_IDS, 8, replace=False))
        assert len(wired.client.compressor.held("t").ids) <= 10
    wired.check()


def test_a_row_that_gives_way_says_how_many_pushes_it_stands_for(make_shards: Shards) -> None:
    wired = Wired(make_shards(1), "topk:0.1", residual_rows=2)
    for _ in range(3):  # an element of row 1 is sent each time, row 2 waits
        wired.push(np.array([[8, 7, 6, 5], [1, 1, 1, 1]], np.float32), ids=np.array([1, 2]))
    wired.push(gradients(0, 2), ids=np.array([3, 4]))
    _, gone = wired.links[0].seen[-1].tables
    sent = decode(gone.gradients, len(gone.ids), DIM)  # type: ignore[arg-type]
    assert dict(zip(gone.ids.tolist(), sent.ages.tolist(), strict=True)) == {1: 1, 2: 3}


@pytest.mark.parametrize("codec", ["int8", "randomk:0.2"])
def test_two_workers_with_one_gradient_round_and_draw_apart(codec: str, make_shards: Shards) -> None:
    sent = set()
    for worker in (0, 1):
        wired = Wired(make_shards(1), codec, worker=worker)
        for _ in range(2):
            wired.push(gradients(0))
        sent |= {push.tables[0].gradients.tobytes() for push in wired.links[0].seen}
    assert len(sent) == 4


def test_what_is_held_counts_by_its_own_learning_rate_and_0_loses_nothing(make_shards: Shards) -> None:
    wired = Wired(make_shards(2), "topk:0.1")
    for step, lr_scale in enumerate([1.0, 0.5, 0.0, 2.0, 1e-9, 0.25, 0.0, 1.0]):
        wired.push(gradients(step), lr_scale=lr_scale)
        wired.check()


def test_momentum_applied_twice_dgc_is_that_of_the_paper(make_shards: Shards) -> None:
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


def test_topk_is_that_of_the_paper_under_a_schedule(make_shards: Shards) -> None:
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
def test_workers_that_step_together_lose_nothing(codec: str) -> None:
    shards = InProcessShards(2)
    terms = Terms(workers=2, staleness=0, patience=timedelta(seconds=20))
    clients = [Client(shards.transports(), worker=rank) for rank in range(2)]

    def work(client: Client) -> None:
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


def test_dgc_bounds_the_norm_of_a_gradient_before_it_adds_up(make_shards: Shards) -> None:
    wired = Wired(make_shards(2), "dgc:0.5", clip_norm=2.0, warmup_steps=0)
    wired.client.compressor.workers = 4
    rows = gradients(0)
    wired.push(rows)
    assert np.linalg.norm(wired.applied() + wired.held()) == pytest.approx(1.0, rel=1e-5)  # 2 / sqrt(4)


def test_dgc_sends_more_at_first(make_shards: Shards) -> None:
    wired = Wired(make_shards(1), "dgc:0.01", warmup_steps=2)
    sizes = []
    for step in range(10):
        wired.push(gradients(step))
        sizes.append(wired.links[0].seen[-1].tables[0].gradients.nbytes)
    assert sizes[0] > sizes[2] > sizes[4] >= sizes[8]
    assert sizes[0] > 8 * sizes[8]


@pytest.mark.parametrize("codec", ["topk:0.05", "rows:0.05", "randomk:0.05"])
def test_tail_starvation_every_row_of_equal_ones_has_its_turn(codec: str, make_shards: Shards) -> None:
    wired = Wired(make_shards(2), codec)
    for _ in range(80):
        wired.push(np.ones((NUM_IDS, DIM), np.float32))
    assert wired.applied().max(axis=1).min() > 20
    wired.check()


@pytest.mark.parametrize("codec", ["topk:0.1", "dgc:0.1", "rows:0.2"])
def test_local_steps_push_differences_of_which_nothing_is_lost(codec: str, make_shards: Shards) -> None:
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


def test_a_plain_push_sends_the_very_array_that_it_was_given(make_shards: Shards) -> None:
    wired = Wired(make_shards(1), "none")
    route = Route(np.arange(3), np.array([0, 3]), np.arange(3))
    rows = gradients(0, 3)
    wired.client.push([("t", route, rows)], clock=0)
    (part,) = wired.links[0].seen[0].tables
    assert part.gradients.base is rows
    assert (part.codec, part.packed) == ("", None)


def test_a_codec_that_follows_another_loses_nothing(make_shards: Shards) -> None:
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
