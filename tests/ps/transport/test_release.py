"""With a log, an answer leaves when its event is safe, by every transport, released by the thread of the log."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from embershard.proto.errors import WrongDim
from embershard.proto.messages import Heartbeat, Pull, Pushed, TableIds
from embershard.proto.transport.grpc import GrpcTransport
from embershard.proto.transport.local import SharedTransport
from embershard.proto.transport.stream import StreamTransport
from embershard.proto.transport.transport import Unreachable
from embershard.ps.events import PushEvent, Settled
from harness.eventually import eventually
from harness.held_log import HeldLog
from harness.served import ServedShard
from harness.shards import gradients, ids_of, join, make_shard, push, table

PATIENCE = timedelta(seconds=60)
PUSH = push(gradients([1, 2], dim=2))
PULL = Pull(1, (TableIds("items", ids_of(1)),))


class Logged:
    """A shard with a log, one way to it, and requests whose answers are waited for in threads."""

    def __init__(self, shard, transport, apply=None) -> None:
        self.shard, self.transport, self.apply, self.log = shard, transport, apply, HeldLog()
        shard._log = self.log
        self._pool = ThreadPoolExecutor(8)

    def send(self, request):
        """The reply, in the future."""
        pending = self.transport.submit(request, PATIENCE)
        return self._pool.submit(pending.result)

    def send_held(self, request):
        """The same, once its answer waits for the log."""
        before = self.log.held
        answer = self.send(request)
        assert eventually(lambda: self.log.held == before + 1)
        return answer


@pytest.fixture(params=["stream", "grpc", "local"])
def logged(request, serve_grpc):
    if request.param == "grpc":
        server = serve_grpc()
        made = Logged(server.shard, GrpcTransport(server.address), server.apply)
    elif request.param == "stream":
        server = ServedShard(shard=make_shard(table(dim=2)))
        made = Logged(server.shard, StreamTransport(server.address), server.apply)
    else:
        shard = make_shard(table(dim=2))
        made = Logged(shard, SharedTransport(shard, "local/0", threading.Condition()))
    yield made
    made.log.sync()
    made.transport.close()
    if request.param == "stream":
        server.stop()


def test_an_answer_leaves_when_its_event_is_safe_one_to_a_repeated_push_no_earlier_and_a_pull_at_once(logged):
    log = logged.log
    bad = push(replace(PUSH.tables[0], ids=ids_of(1)), seq=2)
    first, again, refused = (logged.send_held(request) for request in (PUSH, PUSH, bad))
    assert logged.send(PULL).result(60).tables[0].reshape(-1).tolist() == [-1, -1]
    assert [type(event) for event in log.events] == [PushEvent, Settled]
    assert not any(answer.done() for answer in (first, again, refused))
    if logged.apply is not None:
        assert logged.apply.queued_bytes > 0
    log.sync()
    assert (first.result(60), again.result(60)) == (Pushed(False, 2, 0), Pushed(True, 2, 0))
    with pytest.raises(WrongDim):
        refused.result(60)
    assert logged.send(PUSH).result(60).duplicate  # safe already
    if logged.apply is not None:
        assert eventually(lambda: logged.apply.queued_bytes == 0)


def test_a_join_waits_and_a_heartbeat_does_not(logged):
    joined = logged.send_held(join())
    assert logged.send(Heartbeat(worker=0, epoch=1)).result(60).members == [0]
    assert not joined.done()
    logged.log.sync()
    assert joined.result(60).member


def test_a_call_within_a_process_ends_by_its_deadline_though_the_log_hangs():
    shard = make_shard(table(dim=2), log=HeldLog())
    shard._log.sync()
    transport = SharedTransport(shard, "local/0", threading.Condition())
    answer = transport.submit(PUSH, timedelta(seconds=0.05))
    with pytest.raises(Unreachable):
        answer.result()
