"""A worker whose token is revoked ends at once, with the error that says so; a shard that is away is waited for."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from embershard.proto.errors import NotAuthenticated
from embershard.proto.messages import Declare
from embershard.proto.security.tokens import TokenFile, new_token, token_digest, write_private
from embershard.ps.security.access import Access
from embershard.ps.transport import stream
from embershard.worker.client.client import Client
from embershard.worker.client.membership import Terms
from harness.eventually import eventually
from harness.served import ServedShard, shard_process
from harness.shards import table

TIMEOUT = timedelta(seconds=60)  # what a worker would wait for that does not notice
AT_ONCE = 15.0  # seconds


def entry(token):
    return f"- {{name: p, role: train, token_sha256: '{token_digest(token).hex()}'}}"


@pytest.fixture
def token(tmp_path):
    """The file of a token that access.yaml has."""
    write_private(tmp_path / "token", token := new_token())
    write_private(tmp_path / "access.yaml", entry(token))
    return TokenFile(tmp_path / "token")


def revoke(tmp_path):
    write_private(tmp_path / "access.yaml", entry(new_token()))


def status(client):
    return client.status()[0].shard


def seconds_until_refused(client):
    """How long a call takes to end with NotAuthenticated."""
    start = time.monotonic()
    with pytest.raises(NotAuthenticated):
        status(client)
    return time.monotonic() - start


@pytest.fixture
def shard(tmp_path, token, monkeypatch):
    monkeypatch.setattr(stream, "SWEEP_SECONDS", 0.05)
    served = ServedShard(access=Access(tmp_path / "access.yaml"))
    served.shard.handle(Declare(table()))
    yield served
    served.stop()


def test_the_next_call_is_refused_though_the_connection_has_ended_meanwhile(shard, token, tmp_path):
    client = Client.connect([shard.address], timeout=TIMEOUT, token=token)
    assert status(client) == 0
    revoke(tmp_path)
    assert shard.dispatch.access.reload()
    assert eventually(lambda: shard.connections == 0)
    assert seconds_until_refused(client) < AT_ONCE
    client.close()


def test_who_waits_for_other_workers_is_refused_while_it_waits(shard, token, tmp_path):
    client = Client.connect([shard.address], timeout=TIMEOUT, token=token)
    member = client.join(Terms(workers=2, staleness=0))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(member.rendezvous, "r", participants=(0, 1))
        time.sleep(0.3)
        assert not waits.done()
        revoke(tmp_path)
        shard.dispatch.access.reload()
        with pytest.raises(NotAuthenticated):
            waits.result(AT_ONCE)
    client.close()


@pytest.mark.integration
@pytest.mark.parametrize("scheme", ["tcp://", "grpc://"])
@pytest.mark.parametrize("is_revoked", [True, False])
def test_a_shard_that_is_away_is_waited_for_and_its_refusal_ends_the_wait(tmp_path, token, scheme, is_revoked):
    options = ("--access", str(tmp_path / "access.yaml"))
    with ThreadPoolExecutor(1) as pool, shard_process(*options) as first:
        client = Client.connect([scheme + first.address], timeout=TIMEOUT, token=token)
        assert status(client) == 0
        first.popen.kill()
        first.popen.wait()
        if is_revoked:
            revoke(tmp_path)
        waits = pool.submit(status, client)
        time.sleep(0.5)
        assert not waits.done()  # nobody is there to refuse it
        with shard_process(*options, listen=first.address):
            if is_revoked:
                with pytest.raises(NotAuthenticated):
                    waits.result(AT_ONCE)
            else:
                assert waits.result(AT_ONCE) == 0
        client.close()
