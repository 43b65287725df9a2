"""Who a client is at a shard with certificates and access.yaml: by its token, which goes inside TLS, or certificate."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta

import pytest

from embershard.deploy.authority import Authority
from embershard.proto.errors import EmbershardError, NotAllowed, NotAuthenticated
from embershard.proto.messages import Declare, Declared, GetStatus, ShardStatus
from embershard.proto.security.tokens import TokenFile, new_token, token_digest, write_private
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.transport import Unreachable
from embershard.proto.wire import HELLO_BYTES, Feature, client_hello, server_hello
from embershard.ps.security.access import Access
from harness.certificates import AUTHORITY, issue
from harness.eventually import eventually
from harness.secure_shard import SecureShard
from harness.shards import table

SECONDS = timedelta(seconds=10)
BOTH = pytest.mark.parametrize("scheme", ["tcp", "grpc"])
TOKEN = new_token()
TRAINER = f"- {{name: trainer, role: train, token_sha256: '{token_digest(TOKEN).hex()}'}}\n"
SERVING = "- {name: serving, role: read, certificate: 'spiffe://lab/serving'}\n"


@pytest.fixture
def serving(tmp_path):
    return issue(tmp_path / "serving", covered=["spiffe://lab/serving"])


@pytest.fixture
def nobody(tmp_path):
    """Of the trusted authority, but in no entry."""
    return issue(tmp_path / "nobody", covered=["spiffe://lab/nobody"])


@pytest.fixture
def token(tmp_path):
    write_private(tmp_path / "trainer.token", TOKEN)
    return TokenFile(tmp_path / "trainer.token")


@pytest.fixture
def shard(tmp_path):
    write_private(tmp_path / "access.yaml", TRAINER + SERVING)
    made = SecureShard(issue(tmp_path / "shard", "shard-0"), access=Access(tmp_path / "access.yaml"))
    yield made
    made.stop()


def ask(shard, scheme, request, tls, token=None):
    with closing(transport_for(f"{scheme}://{shard.address}", tls=tls, token=token)) as transport:
        return transport.submit(request, SECONDS).result()


def refused(*asked):
    with pytest.raises(EmbershardError) as caught:
        ask(*asked)
    return caught.value


@BOTH
def test_a_client_is_who_its_certificate_says_and_may_do_what_its_role_does(shard, serving, scheme):
    assert isinstance(ask(shard, scheme, GetStatus(), serving), ShardStatus)
    error = refused(shard, scheme, Declare(table("new", 4)), serving)
    assert type(error) is NotAllowed
    assert error.fields["who"] == "serving"


@BOTH
def test_a_common_name_is_no_spiffe_id(shard, tmp_path, scheme):
    """An authority that says which URIs a client may have may let it choose its common name."""
    named = issue(tmp_path / "named", "spiffe://lab/serving", covered=["localhost"])
    assert type(refused(shard, scheme, GetStatus(), named)) is NotAuthenticated


@BOTH
def test_a_token_goes_before_the_certificate(shard, serving, token, scheme):
    assert ask(shard, scheme, Declare(table("new", 4)), serving, token) == Declared(created=True, loading=False)


@BOTH
def test_a_certificate_in_no_entry_does_not_suffice_but_with_a_token_it_does(shard, nobody, token, scheme):
    assert isinstance(refused(shard, scheme, GetStatus(), nobody), NotAuthenticated)
    assert isinstance(ask(shard, scheme, GetStatus(), nobody, token), ShardStatus)


@BOTH
def test_a_token_that_nobody_knows_is_refused_whatever_the_certificate(shard, serving, tmp_path, scheme):
    write_private(tmp_path / "other.token", new_token())
    error = refused(shard, scheme, GetStatus(), serving, TokenFile(tmp_path / "other.token"))
    assert isinstance(error, NotAuthenticated)


def test_a_client_that_was_refused_is_gone_soon(shard, nobody):
    assert isinstance(refused(shard, "tcp", GetStatus(), nobody), NotAuthenticated)
    assert eventually(lambda: not shard.stream.connections and not shard.stream.open_connections)


def test_connections_without_a_trusted_certificate_are_counted(shard, tmp_path, serving):
    stranger = issue(tmp_path / "stranger", authority=Authority.create("another"), trusts=AUTHORITY)
    for tls in (None, stranger):
        refused(shard, "tcp", GetStatus(), tls)
    assert eventually(lambda: ask(shard, "tcp", GetStatus(), serving).rejected["tls"] == 2)


ANSWERS = {
    "a token, and no TLS": Feature.TOKEN,
    "TLS and a token": Feature.TLS | Feature.TOKEN,
    "all": Feature.TLS | Feature.TOKEN | Feature.CHECKSUM,
    "nothing": Feature(0),
}


@pytest.mark.parametrize("again", [False, True], ids=["silent then", "and again in plain"])
@pytest.mark.parametrize("agreed", ANSWERS.values(), ids=ANSWERS)
def test_a_token_is_never_sent_in_answer_to_the_hello_outside_tls(serving, token, agreed, again):
    """Whoever answers there, and whatever they say that they want, gets a TLS handshake or nothing."""
    answer, _ = server_hello(client_hello(agreed), agreed)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def received():
            peer, _ = server.accept()
            with peer:
                peer.settimeout(60)
                hello = peer.recv(HELLO_BYTES, socket.MSG_WAITALL)
                peer.sendall(answer * (2 if again else 1))
                data = b""
                with suppress(OSError):
                    while part := peer.recv(4096):
                        data += part
                        peer.settimeout(0.2)  # the client waits for a handshake that does not go on
                return hello, data

        heard = pool.submit(received)
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with closing(transport_for(address, tls=serving, token=token)) as transport:
            with pytest.raises((EmbershardError, Unreachable)):
                transport.submit(GetStatus(), SECONDS).result()
            hello, data = heard.result(60)
    assert hello == client_hello(Feature.TLS)  # it wants nothing else there
    assert TOKEN.encode() not in hello + data
    assert data[:1] == (b"\x16" if Feature.TLS in agreed else b"")  # a TLS record
