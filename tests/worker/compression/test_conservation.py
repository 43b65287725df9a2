"""Nothing of a gradient is lost or applied twice, whatever is held back: pushes that are lost, refused, or fail in the
making; leases that end within a push; and the mistakes that gradient compression is known for, tried end to end."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count

import numpy as np
import pytest
import torch

import embershard as es
from embershard.local_shards import InProcessShards
from embershard.proto.codec.name import CodecName
from embershard.proto.codec.payload import decode
from embershard.proto.errors import BadCodec, InvalidRequest, ShardUnavailable, UnknownRoute
from embershard.proto.messages import Push
from embershard.proto.routing import Route, ascending, make_route
from embershard.proto.transport.local import LocalTransport
from embershard.proto.transport.transport import Unreachable
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from embershard.worker.compression.residual_store import ResidualRows
from embershard.worker.compression.residuals import Residuals
from embershard.worker.session.session import Session

DIM, NUM_IDS = 4, 50
IDS = np.arange(NUM_IDS)
LEASE = timedelta(hours=1)  # that no heartbeat renews while a test runs


def gradients(seed: int, count: int = NUM_IDS, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


class FaultyShard:
    """A shard to which the next pushes bring the events of a list, one each: before a message, or after it."""

    def __init__(self, shard):
        self.shard = shard
        self.late = 0.0  # seconds that have passed for this shard alone
        self.pushes = []  # all that came
        self.before, self.after = [], []  # the last message of a push, or a push of one message
        self.before_first, self.after_first = [], []  # the first one of several

    def handle(self, request):
        if not isinstance(request, Push):
            return self.shard.handle(request, time.monotonic() + self.late)
        self.pushes.append(request)
        before, after = (self.before, self.after) if request.last else (self.before_first, self.after_first)
        self.meet(before)
        reply = self.shard.handle(request, time.monotonic() + self.late)
        self.meet(after)
        return reply

    def meet(self, events):
        if events:
            events.pop(0)(self)


def fail(error):
    def event(shard):
        raise error

    return event


be_silent = fail(Unreachable("nobody answers"))
refuse = fail(InvalidRequest(reason="not today"))


def lose_lease(shard):
    shard.late += 2 * LEASE.total_seconds()
    shard.shard.advance(time.monotonic() + shard.late)


def lose_lease_in_silence(shard):
    lose_lease(shard)
    be_silent(shard)


class Pusher:
    """A client of one table whose rows are 0 and show, with SGD of rate 1, minus what was applied."""

    def __init__(self, transports, codec, optimizer=None, dim=DIM, num_ids=NUM_IDS, worker=0, **settings):
        self.client = Client(transports, worker=worker)
        self.sink, self.compressor = self.client, self.client.compressor
        self.compressor.settings = es.Compression(push=codec, **settings)
        optimizer = optimizer or es.SGD(lr=1.0)
        self.spec = es.TableSpec(name="t", dim=dim, optimizer=optimizer, initializer=es.Constant())
        self.client.declare(self.spec)
        self.ids, self.clock = np.arange(num_ids), 0
        self.pushed = np.zeros((num_ids, dim))

    def route(self, ids):
        return make_route(ids, self.spec.space_key, self.client.placement)

    def join(self, **terms):
        return self.client.join(Terms(**{"workers": 1, "staleness": 0, "lease": LEASE, **terms}))

    def push(self, rows, ids=IDS, lr_scale=1.0):
        route = self.route(ids)
        ordered = np.empty_like(rows)
        ordered[route.index] = rows
        self.pushed[ids] += np.where(np.isfinite(rows).all(1, keepdims=True), rows, 0).astype(np.float64) * lr_scale
        clock = max(self.clock, self.client.membership.first if self.client.membership else 0)
        self.clock = clock + 1
        self.sink.push([("t", route, ordered)], clock=clock, lr_scale=lr_scale)

    def step(self):
        self.push(gradients(self.clock, *self.pushed.shape), self.ids)

    def pull(self):
        (rows,) = self.client.pull([("t", self.route(self.ids))])
        return rows[self.route(self.ids).index]

    def applied(self):
        return -self.pull().astype(np.float64)

    def held_ids(self):
        return self.compressor.residual("t").ids

    def held(self):
        rows, held = np.zeros_like(self.pushed), self.compressor.residual("t")
        rows[held.ids] = held.rows.astype(np.float64) * held.rates[:, None]
        return rows

    def check(self):
        """What was applied and what is held add up to what was pushed, but for what still waits to be sent."""
        if self.client._pushes.is_empty:
            total = self.applied() + self.held()
            np.testing.assert_allclose(total, self.pushed, atol=1e-5 * np.abs(self.pushed).max())

    def choose(self, codec):
        self.compressor.choose("t", push=CodecName.parse(codec))


@pytest.fixture
def connect(make_shards):
    """Make pushers, each to fresh shards that `pusher.shards` gives faults."""
    with ExitStack() as stack:

        def make(codec, shards=2, max_message_bytes=2**20, **options):
            faulty = [FaultyShard(shard) for shard in make_shards(shards, max_message_bytes=max_message_bytes)]
            pusher = Pusher([LocalTransport(shard.handle, "local") for shard in faulty], codec, **options)
            stack.callback(pusher.client.close)
            pusher.shards = faulty
            return pusher

        yield make


@pytest.mark.parametrize("codec", ["topk:0.2", "rows:0.3", "randomk:0.2", "dgc:0.2", "topk:0.3+fp16s", "rows:0.3+int8"])
def test_residual_lost_on_retry_a_reply_that_was_lost_loses_and_doubles_nothing(codec, connect):
    pusher = connect(codec, warmup_steps=1)
    pusher.client.timeout = timedelta(seconds=0.1)
    for step in range(10):
        # every other time, so often that the push ends without an answer
        pusher.shards[step % 2].after = [be_silent] * (step % 4)
        with suppress(ShardUnavailable):
            pusher.push(gradients(step))
        for shard in pusher.shards:
            shard.after = []
    pusher.client.timeout = timedelta(seconds=60)  # the machine may stop for a moment
    pusher.push(gradients(99))
    pusher.check()
    assert len(pusher.held_ids())
    for shard in pusher.shards:
        sent = {(push.token, push.tables[0].gradients.tobytes()) for push in shard.pushes}
        assert len(sent) == len({token for token, _ in sent}) < len(shard.pushes)  # sent again as it was


def test_rows_that_are_not_finite_are_counted_and_never_held(connect):
    pusher, rows = connect("topk:0.1"), gradients(0)
    rows[3, 1], rows[7] = np.nan, np.inf
    pusher.push(rows)
    assert pusher.client.stats.skipped_rows == 2
    assert np.isfinite(pusher.held()).all()
    for step in range(1, 5):
        pusher.push(gradients(step))
    pusher.check()


def test_ids_that_a_shard_forgot_are_sent_after_all(connect):
    pusher = connect("topk:0.2")
    route = ascending(pusher.route(IDS))
    pusher.client.pull([("t", route)], keep=True)
    for shard in pusher.shards:
        shard.before = [fail(UnknownRoute(worker=0, route=1, table="t"))]
    rows = gradients(0)[route.ids]
    pusher.pushed[route.ids] += rows
    pusher.client.push([("t", route, rows)], clock=0)
    for shard in pusher.shards:
        (first,), (second,) = (push.tables for push in shard.pushes)
        assert (first.route > 0, first.packed) == (True, None)
        assert (second.route, second.packed is None) == (0, False)
    pusher.check()


@pytest.mark.parametrize("codec", ["topk:0.2+fp16s", "rows:0.3+int8", "dgc:0.2+fp16s"])
def test_a_codec_that_fails_at_the_second_shard_or_table_takes_nothing_of_the_step(codec, connect):
    pusher = connect(codec, momentum=0.0, clip_norm=1.0 if codec.startswith("dgc") else None, residual_rows=60)
    pusher.client.declare(replace(pusher.spec, name="u"))
    pusher.push(gradients(0))
    before, held, find = pusher.applied(), pusher.held(), pusher.compressor.find
    for number in (1, 2, 3):  # of four parts, by shard and table
        calls = count()

        def failing(name, calls=calls, number=number):
            if next(calls) == number:
                raise BadCodec(codec=name, reason="it raised")
            return find(name)

        pusher.compressor.find = failing
        parts = [("t", pusher.route(IDS)), ("u", make_route(IDS, pusher.spec.space_key, pusher.client.placement))]
        with pytest.raises(BadCodec):
            pusher.client.push([(*part, gradients(number)) for part in parts], clock=1)
        pusher.compressor.find = find
        pusher.client.push([], clock=2)
        np.testing.assert_array_equal(pusher.applied(), before)
        np.testing.assert_allclose(pusher.held(), held, atol=1e-6)


@pytest.mark.parametrize("codec", ["rows:0.9+int8", "topk:0.1+fp16s"])
def test_what_gives_way_is_sent_apart_where_a_shard_could_not_take_all_of_it_decoded(codec, connect):
    pusher = connect(codec, shards=1, max_message_bytes=2**16, dim=32, num_ids=1200, residual_rows=10)
    for step in range(3):
        pusher.push(gradients(step, 400, 32), np.arange(400 * step, 400 * (step + 1)))
    assert max(len(push.tables) for push in pusher.shards[0].pushes) == 1
    pusher.check()


@pytest.mark.parametrize("codec", ["none", "topk:0.2"])
def test_a_step_that_weighs_nothing_takes_nothing_of_what_is_held(codec, connect):
    pusher = connect("topk:0.1")
    pusher.join()
    pusher.push(gradients(0))
    pusher.choose(codec)
    for clock, pushed in ((1, []), (2, [("t", pusher.route(IDS), np.zeros((NUM_IDS, DIM), np.float32))])):
        pusher.client.push(pushed, clock=clock, weight=0.0)  # as a step that is skipped; shards that gather drop it
        pusher.check()
    pusher.clock = 3
    pusher.push(gradients(1))
    pusher.check()


def sent(push, table=0):
    """What a shard decodes of a push, and its ids."""
    part = push.tables[table]
    return decode(part.gradients, len(part.ids), DIM), part.ids


def test_a_row_that_gives_way_says_how_many_pushes_it_stands_for(connect):
    pusher = connect("topk:0.1", shards=1, residual_rows=2)
    for _ in range(3):  # an element of row 1 is sent each time, row 2 waits
        pusher.push(np.array([[8, 7, 6, 5], [1, 1, 1, 1]], np.float32), ids=np.array([1, 2]))
    pusher.push(gradients(0, 2), ids=np.array([3, 4]))
    gone, ids = sent(pusher.shards[0].pushes[-1], table=1)
    assert len(pusher.held_ids()) == 2
    assert dict(zip(ids.tolist(), gone.ages.tolist(), strict=True)) == {1: 1, 2: 3}


@pytest.mark.parametrize("codec", ["topk:0.05", "topk:0.05+fp16s", "randomk:0.05", "dgc:0.05"])
def test_an_age_counts_the_pushes_since_anything_of_a_row_was_sent(codec, connect):
    pusher = connect(codec, shards=1, optimizer=es.Adagrad(lr=0.1))
    last, found = np.full(NUM_IDS, -1), []
    for step in range(12):
        pusher.step()
        elements, _ = sent(pusher.shards[0].pushes[-1])
        ages = np.ones(len(elements.rows)) if elements.ages is None else elements.ages
        np.testing.assert_array_equal(ages, step - last[elements.positions])
        last[elements.positions] = step
        found += ages.tolist()
    assert max(found) > 3


@pytest.mark.parametrize(
    ("optimizer", "aged"), [(es.SGD(lr=0.1), False), (es.SGD(lr=0.1, weight_decay=0.1), True), (es.Adam(lr=0.1), True)]
)
def test_ages_travel_to_the_optimizers_that_use_them(optimizer, aged, connect):
    pusher = connect("topk:0.05", shards=1, optimizer=optimizer)
    for _ in range(4):
        pusher.step()
    assert any(sent(push)[0].ages is not None for push in pusher.shards[0].pushes) == aged


@pytest.mark.parametrize("codec", ["int8", "randomk:0.2"])
def test_two_workers_with_one_gradient_round_and_draw_apart(codec, connect):
    payloads = set()
    for worker in (0, 1):
        pusher = connect(codec, shards=1, worker=worker)
        for _ in range(2):
            pusher.push(gradients(0))
        payloads |= {push.tables[0].gradients.tobytes() for push in pusher.shards[0].pushes}
    assert len(payloads) == 4


def test_what_is_held_counts_by_its_own_learning_rate_and_0_loses_nothing(connect):
    pusher = connect("topk:0.1")
    for step, lr_scale in enumerate([1, 0.5, 0, 2, 1e-9, 0.25, 0, 1]):
        pusher.push(gradients(step), lr_scale=lr_scale)
        pusher.check()


def test_momentum_applied_twice_dgc_is_that_of_the_paper(connect):
    pusher = connect("dgc:0.1", shards=1, momentum=0.7, warmup_steps=0)
    u, v, w = (np.zeros((NUM_IDS, DIM), np.float32) for _ in range(3))
    for step in range(20):
        pusher.push(gradients(step))
        u = np.float32(0.7) * u + gradients(step)
        v = v + u
        chosen = np.abs(v) >= np.sort(np.abs(v).ravel())[-round(0.1 * v.size)]
        w -= np.where(chosen, v, 0)
        u[chosen] = v[chosen] = 0
        np.testing.assert_allclose(pusher.pull(), w, atol=1e-5)


def test_topk_is_that_of_the_paper_under_a_schedule(connect):
    pusher = connect("topk:0.1", shards=1)
    e, w = np.zeros((NUM_IDS, DIM), np.float32), np.zeros((NUM_IDS, DIM), np.float32)
    before = 1.0
    for step in range(20):
        rate = 1.0 / (1 + step // 3)
        pusher.push(gradients(step), lr_scale=rate)
        p = gradients(step) + e * np.float32(before / rate)
        chosen = np.abs(p) >= np.sort(np.abs(p).ravel())[-round(0.1 * p.size)]
        w -= np.float32(rate) * np.where(chosen, p, 0)
        e, before = np.where(chosen, 0, p), rate
        np.testing.assert_allclose(pusher.pull(), w, atol=1e-5)


def test_workers_that_step_together_lose_nothing():
    shards = InProcessShards(2)
    pushers = [Pusher(shards.transports(), "dgc:0.1+fp16s", worker=rank, warmup_steps=1) for rank in range(2)]

    def work(pusher):
        pusher.join(workers=2, wait_timeout=timedelta(seconds=60))
        for step in range(6):
            pusher.push(gradients(10 * pusher.client.worker + step))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, pushers))
    total = 2.0 * pushers[0].applied() + sum(pusher.held() for pusher in pushers)  # the mean of two
    for pusher in pushers:
        pusher.client.close()
    np.testing.assert_allclose(total, pushers[0].pushed + pushers[1].pushed, atol=1e-4)


@pytest.mark.parametrize("odd", [1.0, np.nan, np.inf])
def test_dgc_bounds_the_norm_of_a_gradient_before_it_adds_up(odd, connect):
    pusher = connect("dgc:0.5", clip_norm=2.0, warmup_steps=0)
    pusher.compressor.workers = 4
    rows = gradients(0)
    rows[7, 2] = odd  # a row that is not sent has no part in the norm
    pusher.push(rows)
    assert np.linalg.norm(pusher.applied() + pusher.held()) == pytest.approx(1.0, rel=1e-5)  # 2 / sqrt(4)


@pytest.mark.parametrize("codec", ["topk:0.05", "rows:0.05", "randomk:0.05"])
def test_tail_starvation_every_row_of_equal_ones_has_its_turn(codec, connect):
    pusher = connect(codec)
    for _ in range(80):
        pusher.push(np.ones((NUM_IDS, DIM), np.float32))
    assert pusher.applied().max(axis=1).min() > 20
    pusher.check()


@pytest.mark.parametrize("codec", ["topk:0.1", "dgc:0.1", "rows:0.2"])
def test_local_steps_push_differences_of_which_nothing_is_lost(codec, connect):
    pusher = connect(codec, warmup_steps=1)
    session = Session(pusher.client, local_steps=3, compression=pusher.compressor.settings)
    session.table(pusher.spec)
    pusher.sink = session.local_steps
    for _ in range(9):
        pusher.step()
    assert len(pusher.held_ids())
    applied = -session.tables[0].pull(torch.arange(NUM_IDS)).numpy().astype(np.float64)
    np.testing.assert_allclose(applied - pusher.held(), pusher.pushed, atol=1e-4)


def test_a_plain_push_sends_the_very_array_that_it_was_given(connect):
    pusher, rows = connect("none", shards=1), gradients(0, 3)
    pusher.client.push(
        [("t", Route(np.arange(3), np.array([0, 3]), np.arange(3), space_key=0, epoch=1), rows)], clock=0
    )
    (part,) = pusher.shards[0].pushes[0].tables
    assert part.gradients.base is rows
    assert (part.codec, part.packed) == ("", None)


def test_a_codec_that_follows_another_loses_nothing(connect):
    pusher = connect("topk:0.1", shards=3)
    for codec in ["rows:0.2", "dgc:0.1", "int8", "randomk:0.3", "none", "topk:0.5", "none"]:
        pusher.step()
        pusher.choose(codec)
        if codec == "int8":  # rounds at random, and keeps no account of it
            pusher.choose("none")
        pusher.step()
        pusher.check()
    assert not len(pusher.held_ids())


# Faults of the second of two shards that gather a push from several messages, and drop the first with the last one.

FAULTY_CLOCK, LAST_CLOCK = 2, 6


@pytest.fixture(params=["topk:0.2", "rows:0.3+int8", "dgc:0.2+fp16s"])
def train(request, connect):
    """Make a member that has trained up to the step that meets faults, and runs on from there."""

    def make(staleness=0, **faults):
        pusher = connect(request.param, max_message_bytes=2**13, dim=16, num_ids=400, warmup_steps=1)
        pusher.member = pusher.join(staleness=staleness)
        while pusher.clock < FAULTY_CLOCK:
            pusher.step()
        pusher.faulty = pusher.shards[1]
        pusher.faulty.pushes.clear()
        pusher.faulty.member = pusher.member
        vars(pusher.faulty).update(faults)
        return pusher

    return make


def run_on(pusher):
    while pusher.clock <= LAST_CLOCK:
        pusher.step()
    pusher.check()


@pytest.mark.parametrize("staleness", [0, 3])
@pytest.mark.parametrize(
    ("moment", "fault", "lost_leases"),
    [
        ("before", lose_lease, 1),
        ("before", lambda shard: (lose_lease(shard), shard.member.rejoin(0)), 1),  # by a thread that finds it lost
        ("before_first", refuse, 0),
        ("before", refuse, 0),
        ("after_first", lose_lease_in_silence, 1),
        ("after", lose_lease_in_silence, None),  # the push was complete
    ],
)
def test_what_was_gathered_is_given_back_and_not_what_was_applied(train, moment, fault, lost_leases, staleness):
    pusher = train(staleness, **{moment: [fault]})
    with pytest.raises(InvalidRequest) if fault is refuse else nullcontext():
        pusher.step()
    assert len(pusher.faulty.pushes) > 1
    pusher.check()
    run_on(pusher)
    assert lost_leases in (None, pusher.member.lost_leases)


def test_what_was_gathered_is_remembered_while_the_last_message_waits(train):
    pusher = train(before=[be_silent] * 1000)
    pusher.client.timeout = timedelta(seconds=0.3)
    with pytest.raises(ShardUnavailable):
        pusher.step()
    pusher.faulty.before.clear()
    pusher.client.timeout = timedelta(seconds=60)
    lose_lease(pusher.faulty)
    run_on(pusher)
    assert pusher.member.lost_leases == 1


def test_what_was_held_is_held_again_where_the_push_that_drains_it_is_lost(train):
    pusher = train(before=[lose_lease])
    pusher.choose("none")
    pusher.step()
    assert pusher.member.lost_leases == 1
    assert len(pusher.held_ids())
    pusher.check()
    pusher.step()
    assert not len(pusher.held_ids())
    pusher.check()


def keep(held, ids, rows, rate=1.0):
    """What is held of ids is replaced by rows; what it was, with ages, and what gave way."""
    at, rows = np.array(ids, np.int64), np.array(rows, np.float32).reshape(len(ids), held.dim)
    slots = held.find(at)
    before, ages = np.zeros((len(ids), held.dim), np.float32), np.ones(len(ids), np.float32)
    held.add_to(slots, before, ages, rate)
    return before, ages, held.keep(at, slots, rows, ages, rate)


def residuals(ids, rows, ages=1, rates=1):
    ages, rates = (np.full(len(ids), value, np.float32) for value in (ages, rates))
    return ResidualRows(np.array(ids), np.array(rows, np.float32).reshape(len(ids), -1), ages, rates)


@pytest.mark.parametrize("capacity", [None, 5, 40])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_doubled_whatever_comes(capacity, seed):
    rng = np.random.default_rng(seed)
    held, known = Residuals(2, capacity), {}  # id -> row by a rate of 1, age
    for _ in range(200):
        ids = rng.choice(100, rng.integers(0, 12), replace=False).tolist()
        rows, rate = rng.integers(-1, 2, (len(ids), 2)), float(2.0 ** rng.integers(-2, 3))
        before, ages, gone = keep(held, ids, rows, rate)
        was = [known.pop(number, ([0, 0], 0)) for number in ids]
        assert (before * rate).tolist() == [row for row, _ in was]
        assert ages.tolist() == [1 + age for _, age in was]
        known |= {n: (r, a) for n, r, a in zip(ids, (rows * rate).tolist(), ages, strict=True) if any(r)}
        for number, row, age in zip(gone.ids.tolist(), gone.rows * gone.rates[:, None], gone.ages, strict=True):
            assert known.pop(number) == (row.tolist(), age)
        now = held.rows_by_id()
        found = zip((now.rows * now.rates[:, None]).tolist(), now.ages, strict=True)
        assert dict(zip(now.ids.tolist(), found, strict=True)) == known
        assert len(held) == len(known) <= (capacity or 100)


def test_without_room_the_row_that_was_not_met_for_longest_gives_way_whole():
    held = Residuals(1, 3)
    for number in (1, 2, 3, 1):
        keep(held, [number], [number])
    _, _, gone = keep(held, [4], [4])
    assert (gone.ids.tolist(), gone.rows.tolist()) == ([2], [[2]])
    assert sorted(held.rows_by_id().ids.tolist()) == [1, 3, 4]


def test_what_gives_way_is_sent_in_the_order_of_ids_each_row_with_its_age():
    found = residuals([5, 2, 9], [1, 2, 3], ages=[4, 0, 7], rates=0.5).scaled(2.0)
    assert found.ids.tolist() == [2, 5, 9]
    assert found.rows.ravel().tolist() == [0.5, 0.25, 0.75]
    assert found.ages.tolist() == [1, 4, 7]  # at least the push that it goes with
    assert found.rates.tolist() == [2.0] * 3


def test_what_is_given_back_is_held_even_above_the_capacity_and_gives_way_later():
    held = Residuals(1, 2)
    keep(held, [1, 2], [1, 1])
    held.restore_residual(residuals([1, 3, 4], [1, 1, 1]), 1.0)
    assert dict(zip(held.rows_by_id().ids.tolist(), held.rows_by_id().rows[:, 0].tolist(), strict=True)) == {
        1: 2,
        2: 1,
        3: 1,
        4: 1,
    }
    assert sum(len(keep(held, [number], [1])[2].ids) for number in range(5, 9)) == 4


@pytest.mark.parametrize("capacity", [None, 256])
def test_a_state_is_restored_whole_above_the_capacity_and_over_what_was_held(capacity):
    held, again = Residuals(2, capacity), Residuals(2, capacity)
    held.restore_residual(residuals(range(600), np.ones((600, 2))), 1.0)
    keep(again, [-1], [5, 5])
    again.load_state_dict(held.state_dict())
    assert again.rows_by_id().ids.tolist() == list(range(600))
    assert keep(again, [599, -1], np.zeros((2, 2)))[0].tolist() == [[1, 1], [0, 0]]
    with pytest.raises(ValueError, match="not 3"):
        Residuals(3, None).load_state_dict(held.state_dict())
