"""Mistakes that implementations of gradient compression are known for, each tried end to end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pytest
import torch

import embershard as es
from embershard.in_process import InProcessShards
from embershard.proto.codec.choice import Codec
from embershard.proto.codec.values import ValuesCodec
from embershard.proto.codec_errors import BadCodec
from embershard.proto.errors import EmbershardError, InvalidRequest, LeaseLost, ShardUnavailable, UnknownRoute
from embershard.proto.messages import Array, Push, Reply, Request
from embershard.proto.routing import Placement, Route, ascending, make_route
from embershard.proto.spec import TableSpec
from embershard.ps.optim import OptimizerRegistry
from embershard.ps.shard import Shard
from embershard.worker.carrier import Unreachable
from embershard.worker.carriers.local import LocalCarrier
from embershard.worker.client import Client
from embershard.worker.membership import Terms
from embershard.worker.session import Session

Floats = npt.NDArray[np.float32]
Shards = Callable[..., list[Shard]]

DIM, NUM_IDS = 4, 50
SPEC = TableSpec(name="t", dim=DIM, optimizer=es.SGD(lr=1.0), initializer=es.Constant())
IDS = np.arange(NUM_IDS)


class Link(LocalCarrier):
    """A shard that loses, after it was applied or before, or refuses, the pushes that it is told to."""

    def __init__(self, shard: Shard, address: str) -> None:
        super().__init__(shard.handle, address)
        self.lost_replies = self.refused = 0
        self.error: EmbershardError = InvalidRequest(reason="not today")
        self.forgets = False  # what a pull left there
        self.seen: list[Push] = []

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Array] = ()):  # type: ignore[no-untyped-def]
        if isinstance(request, Push):
            self.seen.append(request)
            if self.refused:
                self.refused -= 1
                return _Failed(self.error)
            if self.forgets:
                self.forgets = False
                return _Failed(UnknownRoute(worker=0, route=1, table="t"))
            if self.lost_replies:
                self.lost_replies -= 1
                super().submit(request, timeout, into)
                raise Unreachable("the reply was lost")
        return super().submit(request, timeout, into)


class _Failed:
    num_bytes = 0

    def __init__(self, error: EmbershardError) -> None:
        self._error = error

    def result(self) -> Reply:
        raise self._error


class Wired:
    """A client with one table whose rows are 0 and show, with SGD of rate 1, minus what was applied."""

    def __init__(self, shards: list[Shard], push: str, spec: TableSpec = SPEC, **settings: object) -> None:
        self.links = [Link(shard, f"local/{number}") for number, shard in enumerate(shards)]
        self.client = Client(self.links, timeout=timedelta(seconds=30))
        self.client.compressor.settings = es.Compression(push=push, **settings)  # type: ignore[arg-type]
        self.client.declare(spec)
        self.spec, self.clock = spec, 0
        self.pushed = np.zeros((NUM_IDS, spec.dim))

    def push(self, rows: Floats, ids: npt.NDArray[np.int64] = IDS, lr_scale: float = 1.0) -> None:
        route = make_route(ids, self.spec.space_key, self.client.placement)
        ordered = np.empty_like(rows)
        ordered[route.index] = rows
        self.pushed[ids] += np.where(np.isfinite(rows).all(1, keepdims=True), rows, 0).astype(np.float64) * lr_scale
        self.clock += 1
        self.client.push([("t", route, ordered)], clock=self.clock - 1, lr_scale=lr_scale)

    def applied(self) -> npt.NDArray[np.float64]:
        route = make_route(IDS, self.spec.space_key, self.client.placement)
        (rows,) = self.client.pull([("t", route)])
        return -rows[route.index].astype(np.float64)

    def held(self) -> npt.NDArray[np.float64]:
        rows, held = np.zeros_like(self.pushed), self.client.compressor.held("t")
        rows[held.ids] = held.rows.astype(np.float64) * held.rates[:, None]
        return rows

    def check(self) -> None:
        """What was applied and what is held add up to what was pushed."""
        np.testing.assert_allclose(self.applied() + self.held(), self.pushed, atol=1e-5 * np.abs(self.pushed).max())


def gradients(seed: int, count: int = NUM_IDS) -> Floats:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


def test_lost_signs_what_topk_sends_has_its_sign(make_shards: Shards) -> None:
    wired, rows = Wired(make_shards(2), "topk:0.2"), -np.abs(gradients(0))
    wired.push(rows)
    applied = wired.applied()
    assert np.count_nonzero(applied < 0) == pytest.approx(0.2 * rows.size, abs=1)
    assert (applied <= 0).all()
    wired.check()


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


def test_what_gives_way_in_a_full_table_is_sent(make_shards: Shards) -> None:
    wired = Wired(make_shards(2), "topk:0.05", residual_rows=10)
    rng = np.random.default_rng(0)
    for step in range(40):
        wired.push(gradients(step, 8), ids=rng.choice(NUM_IDS, 8, replace=False))
        assert len(wired.client.compressor.held("t").ids) <= 10
    wired.check()


def test_what_is_held_counts_by_its_own_learning_rate_and_0_loses_nothing(make_shards: Shards) -> None:
    wired = Wired(make_shards(2), "topk:0.1")
    for step, lr_scale in enumerate([1.0, 0.5, 0.0, 2.0, 1e-9, 0.25, 0.0, 1.0]):
        wired.push(gradients(step), lr_scale=lr_scale)
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
    clients = [Client(shards.carriers(), worker=rank) for rank in range(2)]

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
    wired.client.compressor.choose("t", pull=Codec())
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
    wired.client.compressor.choose("t", push=Codec.parse(codec))
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
        wired.client.compressor.choose("t", push=Codec.parse(codec))
        if codec == "int8":  # rounds at random, and keeps no account of it
            wired.client.compressor.choose("t", push=Codec.parse("none"))
        wired.push(gradients(2 * step + 1))
        wired.check()
    assert not len(wired.client.compressor.held("t").ids)
