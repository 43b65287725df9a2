"""Bandwidths as texts, the bucket's arithmetic, and a client behind an emulated link."""

from __future__ import annotations

import asyncio
import heapq
import socket
from collections.abc import Callable
from datetime import timedelta
from itertools import chain, count
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from embershard.proto.errors import BadAddress, ShardUnavailable
from embershard.proto.messages import Declare, Hello, Pull, TableIds
from embershard.proto.routing import make_route
from embershard.proto.spec import SGD, TableSpec
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.emulated_link import EmulatedLink, TokenBucket, parse_bandwidth
from embershard.proto.transport.io_thread import io_loop
from embershard.proto.transport.stream import StreamTransport
from embershard.proto.transport.transport import Unreachable
from embershard.worker.client.client import Client
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.session.connect import connect


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 100_000_000),
        ("1gbit", 1_000_000_000),
        ("2.5 Gbit/s", 2_500_000_000),
        ("64KBIT", 64_000),
        ("unlimited", None),
        (" Unlimited ", None),
    ],
)
def test_a_bandwidth_is_a_number_of_bits_per_second(text, bits):
    assert parse_bandwidth(text) == bits


@pytest.mark.parametrize(
    "text", ["100", "", "0mbit", "-5mbit", "nan mbit", "100mb", "100mbyte", "1e3mbit", "mbit", "0.0001kbit"]
)
def test_a_bandwidth_without_unit_or_above_nothing_is_refused_with_what_to_write(text):
    with pytest.raises(ValueError, match=r"100mbit or 1gbit .* or unlimited"):
        parse_bandwidth(text)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_bytes_take_their_time_through_a_bucket(clock):
    bucket = TokenBucket(1_000_000, clock)
    assert bucket.wait() == 0.0
    bucket.take(250_000, waited=False)
    assert bucket.wait() == pytest.approx(0.25)
    clock.now += 0.1
    assert bucket.wait() == pytest.approx(0.15)


def test_an_idle_bucket_saves_nothing_up(clock):
    bucket = TokenBucket(1_000_000, clock)
    clock.now += 60.0
    bucket.take(250_000, waited=False)
    assert bucket.wait() == pytest.approx(0.25)


def test_a_timer_that_comes_late_does_not_slow_what_waited(clock):
    bucket = TokenBucket(1_000_000, clock)
    bucket.take(100_000, waited=False)
    clock.now += 0.17  # 0.07 late
    bucket.take(100_000, waited=True)
    assert bucket.wait() == pytest.approx(0.03)
    clock.now += 0.17
    bucket.take(100_000, waited=False)  # came after the link had fallen idle
    assert bucket.wait() == pytest.approx(0.1)


@pytest.mark.parametrize("late", [0.0, 0.0004, 0.003, 0.04])
def test_the_rate_is_exact_whatever_the_timers_do(clock, late):
    bucket, start, sent = TokenBucket(12_500_000, clock), clock.now, 0
    bucket.take(0, waited=False)
    while sent < 50_000_000:
        if seconds := bucket.wait():
            clock.now += seconds + late
        bucket.take(12_500, waited=True)
        sent += 12_500
    assert clock.now + bucket.wait() - start == pytest.approx(4.0, abs=late + 0.001)


class Loop:
    """Timers of a clock that jumps from one to the next."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def call_later(self, delay: float, call: Callable[[], None]) -> object:
        heapq.heappush(self.timers, (self.clock.now + delay, next(self._numbers), call))
        return object()

    def run_until(self, moment: float) -> None:
        while self.timers and self.timers[0][0] <= moment:
            self.clock.now, _, call = heapq.heappop(self.timers)
            call()
        self.clock.now = moment


class Transport:
    """Keeps what is written, and has `unread` bytes that a socket pair holds."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.reading = True
        self.mine, self.peer = socket.socketpair()

    def write(self, data: memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> socket.socket:
        return self.mine

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


@pytest.fixture
def transports():
    made = [Transport(), Transport()]
    yield made
    for transport in made:
        transport.mine.close()
        transport.peer.close()


@pytest.fixture
def loop(clock):
    return Loop(clock)


@pytest.fixture
def link(loop, clock, transports):
    """8 Mbit/s: a chunk of 1,000 bytes per millisecond, 1,024 at least."""
    link = EmulatedLink(8_000_000, cast(asyncio.AbstractEventLoop, loop), clock)
    for transport in transports:
        link.join(cast(asyncio.Transport, transport))
    return link


def sent(transports: list[Transport]) -> int:
    return sum(map(len, chain.from_iterable(transport.written for transport in transports)))


def test_all_connections_share_what_may_be_sent_and_take_turns(link, loop, transports):
    first, second = b"a" * 30_000, b"b" * 5_000
    start = loop.clock.now
    link.send(cast(asyncio.Transport, transports[0]), [first[:10], first[10:]])
    link.send(cast(asyncio.Transport, transports[1]), [memoryview(second)])
    for milliseconds in (0, 3, 10, 20, 34):
        loop.run_until(start + milliseconds / 1000)
        assert sent(transports) == pytest.approx(1000 * milliseconds, abs=2 * link.chunk_bytes)
    loop.run_until(start + 0.012)
    assert len(b"".join(transports[1].written)) == 5_000  # it did not wait for the long one
    loop.run_until(start + 0.04)
    assert [b"".join(transport.written) for transport in transports] == [first, second]


def test_what_a_connection_has_still_to_send_is_known_and_ends_with_it(link, loop, transports):
    one = cast(asyncio.Transport, transports[0])
    link.send(one, [b"a" * 10_000])
    loop.run_until(loop.clock.now + 0.005)
    assert link.unsent(one) == 10_000 - sent(transports) > 0
    before = sent(transports)
    link.leave(one)
    loop.run_until(loop.clock.now + 1)
    assert link.unsent(one) == 0
    assert sent(transports) == before


def test_reading_pauses_everywhere_for_as_long_as_what_was_read_takes(link, loop, transports):
    start = loop.clock.now
    link.received(4_000)
    assert not any(transport.reading for transport in transports)
    loop.run_until(start + 0.0039)
    assert not any(transport.reading for transport in transports)
    loop.run_until(start + 0.0041)
    assert all(transport.reading for transport in transports)


@pytest.mark.parametrize(("waiting", "pause"), [(b"x", 0.002), (b"", 0.01)])
def test_only_bytes_that_were_there_make_up_for_a_late_timer(link, loop, transports, waiting, pause):
    link.received(4_000)
    transports[1].peer.sendall(waiting)
    loop.clock.now += 0.012  # the timer was due 0.008 before
    loop.run_until(loop.clock.now)
    transports[1].mine.setblocking(False)
    link.received(10_000)
    start = loop.clock.now
    loop.run_until(start + pause - 0.0001)
    assert not transports[0].reading
    loop.run_until(start + pause + 0.0001)
    assert transports[0].reading


SPEC = TableSpec(name="items", dim=16, optimizer=SGD(lr=1.0))


def test_rows_pass_an_emulated_link_as_they_are(stream_shard):
    client = Client.connect([stream_shard], bandwidth=200_000_000)
    try:
        client.declare(SPEC)
        route = make_route(np.arange(2_000), SPEC.space_key, client.placement)
        (before,) = client.pull([(SPEC.name, route)])
        gradients = np.arange(2_000 * 16, dtype=np.float32).reshape(-1, 16)
        client.push([(SPEC.name, route, gradients)], clock=0)
        (after,) = client.pull([(SPEC.name, route)])
        np.testing.assert_array_equal(after, before - gradients)
    finally:
        client.close()


def test_a_call_that_the_link_is_too_slow_for_ends_by_its_deadline_and_the_next_one_goes_through(stream_shard):
    client = Client.connect([stream_shard], bandwidth=400_000, timeout=timedelta(seconds=1))
    try:
        client.declare(SPEC)
        few = make_route(np.arange(3), SPEC.space_key, client.placement)
        (rows,) = client.pull([(SPEC.name, few)])
        many = make_route(np.arange(60_000), SPEC.space_key, client.placement)
        with pytest.raises(ShardUnavailable):
            client.pull([(SPEC.name, many)])  # 480 kB of ids
        wide = make_route(np.arange(8_000), SPEC.space_key, client.placement)
        with pytest.raises(ShardUnavailable):
            client.pull([(SPEC.name, wide)])  # 512 kB of rows
        np.testing.assert_array_equal(client.pull([(SPEC.name, few)])[0], rows)
    finally:
        client.close()


def test_nothing_of_a_call_is_sent_after_its_deadline(stream_shard):
    transport = StreamTransport(stream_shard, link=EmulatedLink(1_000_000, io_loop()))
    try:
        transport.submit(Declare(SPEC), timedelta(seconds=20)).result()
        first = transport.submit(Pull(1, (TableIds("items", np.arange(2_000)),)), timedelta(seconds=20))
        long = transport.submit(Pull(1, (TableIds("items", np.arange(60_000)),)), timedelta(seconds=0.5))
        with pytest.raises(Unreachable, match="while it was sent"):
            long.result()  # rows of the first arrive meanwhile: the shard lives
        with pytest.raises(Unreachable):
            first.result()
        transport.submit(Hello(), timedelta(seconds=20)).result()
    finally:
        transport.close()


@pytest.mark.parametrize("address", ["grpc://127.0.0.1:7700", "grpc+unix:/tmp/x", "rpc://127.0.0.1:7700"])
def test_a_transport_that_no_link_slows_down_is_refused(address):
    with pytest.raises(BadAddress, match="emulated in the stream transport"):
        transport_for(address, EmulatedLink(1_000_000, io_loop()))


def test_a_session_refuses_a_bandwidth_that_is_none():
    with pytest.raises(ValueError, match="100mbit"):
        connect("127.0.0.1:7700", bandwidth="100")


JOB = """
model: {name: gmf}
data: {reader: ncf, prefix: none-such}
embedding: {optimizer: {name: sgd, lr: 0.1}}
train: {batch_size: 4, steps: 1}
"""


def mistakes(tmp_path: Path, *overrides: str) -> str:
    (tmp_path / "job.yaml").write_text(JOB)
    with pytest.raises(JobFileError) as caught:
        load_job(tmp_path / "job.yaml", overrides)
    return str(caught.value)


@pytest.mark.parametrize("bandwidth", ["100", "0mbit", "null"])
def test_a_job_says_what_to_write_for_a_bandwidth(tmp_path, bandwidth):
    text = mistakes(tmp_path, f"network.bandwidth={bandwidth}")
    assert "network.bandwidth" in text
    assert "write a number with its unit, as in 100mbit" in text


def test_a_bandwidth_is_refused_where_not_all_that_travels_goes_to_shards(tmp_path):
    assert "has none" in mistakes(tmp_path, "strategy=ddp", "network.bandwidth=100mbit")
    assert "all-reduced" in mistakes(tmp_path, "strategy=hybrid", "network.bandwidth=100mbit")
    assert "network" not in mistakes(tmp_path, "strategy=hybrid", "network.bandwidth=unlimited")
