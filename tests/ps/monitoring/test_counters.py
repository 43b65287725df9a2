"""What a shard counts, as its status shows it."""

import contextlib
import socket
import time
from datetime import timedelta

import numpy as np
import pytest

from embershard.proto.errors import ShardBusy, UnknownTable
from embershard.proto.messages import Declare, GetStatus, Pull, TableIds
from embershard.proto.transport.stream import StreamTransport
from embershard.proto.transport.transport import Unreachable
from embershard.proto.wire import HELLO_BYTES
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.monitoring.counters import EXPIRED, OK
from harness.eventually import eventually
from harness.served import ServedShard
from harness.shards import gradients, ids_of, join, make_shard, push, rows, table

SOON = timedelta(seconds=20)


@pytest.fixture
def served():
    shard = ServedShard()
    transport = StreamTransport(shard.address)
    yield shard, transport
    transport.close()
    shard.stop()


def ask(transport, request):
    return transport.submit(request, SOON).result()


def test_a_status_shows_durations_bytes_and_connections_of_what_was_asked(served):
    _, transport = served
    ask(transport, Declare(table()))
    ask(transport, Pull(1, (TableIds("items", ids_of(1, 2)),)))
    ask(transport, push(gradients([1, 2])))
    status = ask(transport, GetStatus())
    assert (sum(status.pull_seconds.counts), sum(status.push_seconds.counts)) == (1, 1)
    assert sum(status.queue_seconds.counts) == 3  # a status does not queue
    assert 0 < status.pull_seconds.sum < 20
    assert 0 < status.apply_busy_seconds < status.uptime_seconds
    (stream,) = (one for one in status.transports if one.name == "stream")
    assert stream.connections == 1
    assert stream.received_bytes == HELLO_BYTES + transport.sent_bytes
    reply = transport.received_bytes - (stream.sent_bytes - HELLO_BYTES)  # the status itself was not sent yet
    assert 0 < reply < 1000


def test_requests_are_counted_by_method_and_outcome(served):
    shard, transport = served
    with pytest.raises(UnknownTable):
        ask(transport, Pull(1, (TableIds("no_such_table", ids_of(1)),)))
    ask(transport, GetStatus())
    outcomes = shard.dispatch.counters.transports["stream"].outcomes
    assert outcomes[Pull, "UnknownTable"] == 1
    assert eventually(lambda: outcomes[GetStatus, OK] == 1)


def test_a_request_that_nobody_waits_for_is_counted_as_expired(served):
    shard, transport = served
    ask(transport, Declare(table()))
    held = shard.apply.submit(lambda: time.sleep(0.2), 0, time.monotonic() + 10)
    late = transport.submit(Declare(table("late")), timedelta(milliseconds=20))
    with pytest.raises(Unreachable):
        late.result()
    held.result()
    outcomes = shard.dispatch.counters.transports["stream"].outcomes
    assert eventually(lambda: outcomes[Declare, EXPIRED] == 1)


def test_what_is_turned_away_is_counted_by_its_reason(served):
    shard, transport = served
    ask(transport, GetStatus())
    shard.stream.max_connections = 1
    with socket.create_connection(shard.address.removeprefix("tcp://").split(":")) as other:
        with contextlib.suppress(ConnectionResetError):
            assert other.recv(1) == b""
    assert ask(transport, GetStatus()).rejected == {"connections": 1}


def test_a_full_queue_is_counted():
    thread = ApplyThread(max_requests=1)
    held = thread.submit(lambda: time.sleep(0.2), 1, time.monotonic() + 10)
    with pytest.raises(ShardBusy):
        thread.submit(lambda: None, 1, time.monotonic() + 10)
    held.result()
    assert thread.counters.rejected["queue"] == 1
    assert eventually(lambda: thread.counters.busy_seconds >= 0.2)
    thread.close()
    assert thread.join(10)
    assert thread.counters.draining


@pytest.mark.parametrize("staleness", [0, -1])
def test_rows_are_counted_by_table_once_whether_they_are_gathered_or_not(staleness):
    shard = make_shard(table(), table("others"))
    for worker in (0, 1):
        shard.handle(join(worker, staleness=staleness, workers=2))
    broken = np.full((2, 3), [[1.0], [np.nan]], np.float32)
    for worker in (0, 1):
        parts = gradients([1, 2, 3]), gradients([4, 5], name="others", gradients=broken)
        shard.handle(push(*parts, worker=worker))
    rows(shard, 1, 2)
    counted = {one.name: (one.pulled_rows, one.pushed_rows, one.skipped_rows) for one in shard.status().tables}
    assert counted == {"items": (2, 6, 0), "others": (0, 2, 2)}
