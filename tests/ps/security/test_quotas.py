"""What one principal may use of a shard."""

import pytest

from embershard.proto.errors import QuotaExceeded, ShardBusy
from embershard.proto.messages import Declare, Hello, Pushed, Rows
from embershard.proto.security.tokens import new_token, token_digest, write_private
from embershard.proto.wire import Feature
from embershard.ps.security.access import Access
from embershard.ps.security.access_file import Quotas
from embershard.ps.security.quotas import Usage
from harness.eventually import eventually
from harness.hostile_peers import Peer, framed, pull, push
from harness.raises import raises
from harness.served import ServedShard
from harness.shards import table


def usage(now=lambda: 0.0, **limits):
    return Usage("p", Quotas(**limits), now)


def test_rows_come_back_at_their_rate():
    at = [0.0]
    used = usage(lambda: at[0], rows_per_second=10)
    assert [used.take_rows(pull(50)), used.take_rows(push(50))] == [50, 50]
    with raises(QuotaExceeded, who="p", what="rows a second", limit=10, would=30, retry_after_ms=3000):
        used.take_rows(pull(30))
    at[0] = 2.9
    with pytest.raises(QuotaExceeded):
        used.take_rows(pull(30))
    at[0] = 3.1
    assert used.take_rows(pull(30)) == 30
    used.give_rows(30)
    assert used.take_rows(pull(30)) == 30


def test_a_request_of_more_rows_than_fit_passes_once_and_is_paid_for():
    at = [0.0]
    used = usage(lambda: at[0], rows_per_second=10)
    assert used.take_rows(pull(1000)) == 1000
    at[0] = 50.0
    with pytest.raises(QuotaExceeded):
        used.take_rows(pull(1))
    at[0] = 95.0
    assert used.take_rows(pull(1)) == 1


def test_bytes_in_flight_and_connections_are_given_back():
    used = usage(bytes_in_flight=100, connections=1)
    used.take_bytes(500)  # alone, however large
    with raises(QuotaExceeded, limit=100, would=501):
        used.take_bytes(1)
    used.give_bytes(500)
    used.take_bytes(1)
    used.connect()
    with raises(QuotaExceeded, what="connections"):
        used.connect()
    used.connect(is_new=False)  # it was there before the quota was
    for _ in range(2):
        used.disconnect()
    used.connect()


def test_a_client_waits_where_a_quota_is_used_up():
    assert issubclass(QuotaExceeded, ShardBusy)
    assert QuotaExceeded.retryable


@pytest.fixture
def connect(tmp_path):
    token, served, peers = new_token(), [], []

    def start(quotas):
        if not served:
            entry = f"- {{name: p, role: train, token_sha256: '{token_digest(token).hex()}', quotas: {{{quotas}}}}}"
            write_private(tmp_path / "access.yaml", entry)
            served.append(ServedShard(access=Access(tmp_path / "access.yaml")))
            served[0].shard.handle(Declare(table("items", 4)))
        peers.append(Peer(served[0].address, Feature.TOKEN, token=token))
        return peers[-1]

    yield start
    for peer in peers:
        peer.sock.close()
    for one in served:
        one.stop()


def test_a_shard_refuses_rows_over_the_rate_and_answers_the_rest(connect):
    peer = connect("rows_per_second: 1")
    assert isinstance(peer.ask(push(10)), Pushed)
    with raises(QuotaExceeded, who="p"):
        peer.ask(pull(10))
    peer.ask(Hello())


def test_a_shard_refuses_connections_over_the_quota_until_one_ends(connect):
    first, second = connect("connections: 1"), connect("")
    first.ask(Hello())
    with raises(QuotaExceeded, what="connections"):
        second.reply()
    assert second.was_dropped()
    first.sock.close()

    def is_served():
        try:
            connect("").ask(Hello())
        except QuotaExceeded:
            return False
        return True

    assert eventually(is_served)


def test_bytes_in_flight_are_counted_until_the_answer(connect):
    peer = connect("bytes_in_flight: 1")
    for _ in range(20):
        assert isinstance(peer.ask(pull()), Rows)
    peer.send(b"".join(framed(push(seq=n), call=n) for n in range(1, 30)))
    outcomes = set()
    for _ in range(29):
        try:
            outcomes.add(type(peer.reply()))
        except QuotaExceeded as error:
            outcomes.add(type(error))
    assert Pushed in outcomes
