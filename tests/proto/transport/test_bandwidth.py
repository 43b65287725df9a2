"""Bandwidths as texts, the bucket's arithmetic, and a client behind an emulated link."""

import heapq
import socket
from contextlib import closing
from datetime import timedelta
from itertools import count

import numpy as np
import pytest

from embershard.proto.errors import BadAddress, ShardUnavailable
from embershard.proto.messages import Declare, Hello, Pull, TableIds
from embershard.proto.routing import make_route
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.emulated_link import EmulatedLink, TokenBucket, parse_bandwidth
from embershard.proto.transport.io_thread import io_loop
from embershard.proto.transport.stream import StreamTransport
from embershard.proto.transport.transport import Unreachable
from embershard.worker.client.client import Client
from embershard.worker.job.load import JobFileError, load_job
from embershard.worker.session.connect import connect
from harness.shards import table


def test_a_bandwidth_is_a_number_of_bits_per_second():
    texts = {"100mbit": 10**8, "1gbit": 10**9, "2.5 Gbit/s": 2_500_000_000, "64KBIT": 64_000}
    for text, bits in {**texts, "unlimited": None, " Unlimited ": None}.items():
        assert parse_bandwidth(text) == bits


@pytest.mark.parametrize(
    "text", ["100", "", "0mbit", "-5mbit", "nan mbit", "100mb", "100mbyte", "1e3mbit", "mbit", "0.0001kbit"]
)
def test_a_bandwidth_without_unit_or_above_nothing_is_refused_with_what_to_write(text):
    with pytest.raises(ValueError, match=r"100mbit or 1gbit .* or unlimited"):
        parse_bandwidth(text)


class Loop:
    """Timers of a clock, which jumps from one to the next."""

    def __init__(self):
        self.now, self.timers, self._numbers = 1000.0, [], count()

    def clock(self):
        return self.now

    def call_later(self, delay, call):
        heapq.heappush(self.timers, (self.now + delay, next(self._numbers), call))
        return object()

    def run_until(self, moment):
        while self.timers and self.timers[0][0] <= moment:
            self.now, _, call = heapq.heappop(self.timers)
            call()
        self.now = moment


@pytest.fixture
def loop():
    return Loop()


def test_bytes_take_their_time_through_a_bucket_which_saves_nothing_up_while_idle(loop):
    bucket = TokenBucket(1_000_000, loop.clock)
    assert bucket.wait() == 0.0
    loop.now += 60.0
    bucket.take(250_000, waited=False)
    assert bucket.wait() == pytest.approx(0.25)
    loop.now += 0.1
    assert bucket.wait() == pytest.approx(0.15)


def test_a_timer_that_comes_late_does_not_slow_what_waited(loop):
    bucket = TokenBucket(1_000_000, loop.clock)
    bucket.take(100_000, waited=False)
    loop.now += 0.17  # 0.07 late
    bucket.take(100_000, waited=True)
    assert bucket.wait() == pytest.approx(0.03)
    loop.now += 0.17
    bucket.take(100_000, waited=False)  # came after the link had fallen idle
    assert bucket.wait() == pytest.approx(0.1)


@pytest.mark.parametrize("late", [0.0, 0.0004, 0.003, 0.04])
def test_the_rate_is_exact_whatever_the_timers_do(loop, late):
    bucket, start = TokenBucket(12_500_000, loop.clock), loop.now
    bucket.take(0, waited=False)
    for _ in range(4000):
        if seconds := bucket.wait():
            loop.now += seconds + late
        bucket.take(12_500, waited=True)
    assert loop.now + bucket.wait() - start == pytest.approx(4.0, abs=late + 0.001)


class Connection:
    """Keeps what is written; what its socket's peer sends is there to be read."""

    def __init__(self):
        self.written, self.reading = b"", True
        self.mine, self.peer = socket.socketpair()

    def write(self, data):
        self.written += data

    def is_closing(self):
        return False

    def get_extra_info(self, _):
        return self.mine

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True


@pytest.fixture
def both():
    made = [Connection(), Connection()]
    yield made
    for connection in made:
        connection.mine.close()
        connection.peer.close()


@pytest.fixture
def link(loop, both):
    """8 Mbit/s: a chunk of 1,000 bytes per millisecond, 1,024 at least."""
    link = EmulatedLink(8_000_000, loop, loop.clock)
    for connection in both:
        link.join(connection)
    return link


def test_all_connections_share_what_may_be_sent_and_take_turns(link, loop, both):
    first, second, start = b"a" * 30_000, b"b" * 5_000, loop.now
    link.send(both[0], [first[:10], first[10:]])
    link.send(both[1], [memoryview(second)])
    for milliseconds in (0, 3, 10, 12, 20, 34):
        loop.run_until(start + milliseconds / 1000)
        sent = [len(connection.written) for connection in both]
        assert sum(sent) == pytest.approx(1000 * milliseconds, abs=2 * link.chunk_bytes)
        assert milliseconds != 12 or sent[1] == 5_000  # it did not wait for the long one
    loop.run_until(start + 0.04)
    assert [connection.written for connection in both] == [first, second]


def test_what_a_connection_has_still_to_send_is_known_and_ends_with_it(link, loop, both):
    link.send(both[0], [b"a" * 10_000])
    loop.run_until(loop.now + 0.005)
    before = len(both[0].written)
    assert link.unsent(both[0]) == 10_000 - before > 0
    link.leave(both[0])
    loop.run_until(loop.now + 1)
    assert (link.unsent(both[0]), len(both[0].written)) == (0, before)


def test_reading_pauses_everywhere_for_as_long_as_what_was_read_takes(link, loop, both):
    start = loop.now
    link.received(4_000)
    for seconds, reading in [(0, False), (0.0039, False), (0.0041, True)]:
        loop.run_until(start + seconds)
        assert [connection.reading for connection in both] == [reading] * 2


@pytest.mark.parametrize(("waiting", "pause"), [(b"x", 0.002), (b"", 0.01)])
def test_only_bytes_that_were_there_make_up_for_a_late_timer(link, loop, both, waiting, pause):
    link.received(4_000)
    both[1].peer.sendall(waiting)
    loop.now += 0.012  # the timer was due 0.008 before
    loop.run_until(loop.now)
    link.received(10_000)
    start = loop.now
    for seconds, reading in [(pause - 0.0001, False), (pause + 0.0001, True)]:
        loop.run_until(start + seconds)
        assert both[0].reading == reading


ITEMS = table(dim=16)


def pulled(client, num_rows):
    route = make_route(np.arange(num_rows), ITEMS.space_key, client.placement)
    return client.pull([("items", route)])[0]


def test_a_call_that_the_link_is_too_slow_for_ends_by_its_deadline_and_others_go_through_as_they_are(stream_shard):
    gradients = np.arange(300 * 16, dtype=np.float32).reshape(-1, 16)
    with closing(Client.connect([stream_shard], worker=1)) as fast:
        fast.declare(ITEMS)
        pulled(fast, 3)  # the kernels are there before the deadlines are short
    with closing(Client.connect([stream_shard], bandwidth=800_000, timeout=timedelta(seconds=1))) as client:
        client.declare(ITEMS)
        route = make_route(np.arange(300), ITEMS.space_key, client.placement)
        client.push([("items", route, gradients)], clock=0)
        for too_many in (60_000, 8_000):  # 480 kB of ids, and 512 kB of rows
            with pytest.raises(ShardUnavailable):
                pulled(client, too_many)
        np.testing.assert_array_equal(client.pull([("items", route)])[0], -gradients)


def test_nothing_of_a_call_is_sent_after_its_deadline(stream_shard):
    with closing(StreamTransport(stream_shard, link=EmulatedLink(1_000_000, io_loop()))) as transport:
        transport.submit(Declare(ITEMS), timedelta(seconds=20)).result()
        first = transport.submit(Pull(1, (TableIds("items", np.arange(2_000)),)), timedelta(seconds=20))
        long = transport.submit(Pull(1, (TableIds("items", np.arange(60_000)),)), timedelta(seconds=0.5))
        with pytest.raises(Unreachable, match="while it was sent"):
            long.result()  # rows of the first arrive meanwhile: the shard lives
        with pytest.raises(Unreachable):
            first.result()
        transport.submit(Hello(), timedelta(seconds=20)).result()


@pytest.mark.parametrize("address", ["grpc://127.0.0.1:7700", "grpc+unix:/tmp/x", "rpc://127.0.0.1:7700"])
def test_a_transport_that_no_link_slows_down_is_refused(address):
    with pytest.raises(BadAddress):
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


@pytest.mark.parametrize(
    ("strategy", "bandwidth", "words"),
    [
        *[("ps", wrong, "write a number with its unit, as in 100mbit") for wrong in ("100", "0mbit", "null")],
        ("ddp", "100mbit", "has no shards"),  # not all that travels goes to shards
        ("hybrid", "100mbit", "all-reduced"),
        ("hybrid", "unlimited", None),
    ],
)
def test_a_job_says_what_is_wrong_with_a_bandwidth(tmp_path, strategy, bandwidth, words):
    (tmp_path / "job.yaml").write_text(JOB)
    with pytest.raises(JobFileError) as caught:  # there is no data
        load_job(tmp_path / "job.yaml", [f"strategy={strategy}", f"network.bandwidth={bandwidth}"])
    assert ("network" in str(caught.value)) == (words is not None)
    assert words is None or words in str(caught.value)
