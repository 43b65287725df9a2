"""Mutual TLS at one port, for both transports: what is encrypted, and what each side says to bad certificates."""

import gc
import ssl
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ed25519

from embershard.deploy import authority as authorities
from embershard.deploy.authority import Authority, pem
from embershard.proto.errors import (
    BadCertificate,
    CertificateRefused,
    EmbershardError,
    TLSNotOffered,
    TLSRequired,
    UntrustedCertificate,
)
from embershard.proto.messages import GetStatus, ShardStatus
from embershard.proto.security import credentials, handshake
from embershard.proto.security.tls import TLS
from embershard.proto.transport.addresses import transport_for
from embershard.proto.wire import Feature, client_hello
from embershard.ps.transport import stream
from harness.certificates import AUTHORITY, DAY, issue, replace, revoke
from harness.eventually import eventually
from harness.hostile_peers import connected
from harness.secure_shard import SecureShard

SECONDS = timedelta(seconds=10)
BOTH = pytest.mark.parametrize("scheme", ["tcp", "grpc"])


@pytest.fixture
def serve(tmp_path):
    shards = []

    def start(tls="issued", **options):
        if tls == "issued":
            tls = issue(tmp_path / "shard", "shard-0")
        shards.append(SecureShard(tls, **options))
        return shards[-1]

    yield start
    for shard in shards:
        shard.stop()


@pytest.fixture
def worker(tmp_path):
    return issue(tmp_path / "worker", "worker-1")


def ask(address, tls):
    with closing(transport_for(address, tls=tls)) as transport:
        return transport.submit(GetStatus(), SECONDS).result()


def refused(scheme, shard, tls):
    """The error that a client gets at its first call."""
    with pytest.raises(EmbershardError) as caught:
        ask(f"{scheme}://{shard.address}", tls)
    return caught.value


@BOTH
def test_a_client_and_a_shard_of_one_authority_talk(serve, worker, scheme):
    assert isinstance(ask(f"{scheme}://{serve().address}", worker), ShardStatus)


@pytest.mark.parametrize(("side", "error"), [("shard", UntrustedCertificate), ("worker", CertificateRefused)])
def test_a_key_that_grpc_does_not_know_is_named_and_the_other_transport_takes_it(
    serve, worker, tmp_path, monkeypatch, caplog, side, error
):
    plain = issue(tmp_path / "plain", "shard-0")
    monkeypatch.setattr(authorities.ec, "generate_private_key", lambda _: ed25519.Ed25519PrivateKey.generate())
    other = issue(tmp_path / "ed25519", side)
    shard, client = (serve(other), worker) if side == "shard" else (serve(plain), other)
    assert isinstance(ask(shard.tcp, client), ShardStatus)
    said = refused("grpc", shard, client)
    assert isinstance(said, error)
    assert "P-256" in str(said)
    assert ("gRPC does not know the kind of key" in caplog.text) == (side == "shard")


def test_the_bytes_on_the_wire_are_those_of_tls_1_3(serve, worker):
    shard = serve()
    with closing(transport_for(shard.tcp, tls=worker)) as transport:
        transport.submit(GetStatus(), SECONDS).result()
        (connection,) = shard.stream.connections
        assert connection._transport.get_extra_info("ssl_object").version() == "TLSv1.3"


@pytest.mark.parametrize(
    ("covered", "identity"),
    [
        (("localhost", "spiffe://lab/worker/1", "a@b.example"), "spiffe://lab/worker/1"),
        (("localhost", "a@b.example"), "a@b.example"),
        (("localhost",), "worker"),
    ],
)
def test_a_connection_knows_whom_the_certificate_of_its_peer_names(serve, tmp_path, covered, identity):
    shard = serve()
    with closing(transport_for(shard.tcp, tls=issue(tmp_path / "worker", covered=covered))) as transport:
        transport.submit(GetStatus(), SECONDS).result()
        assert shard.identities() == [identity]


@BOTH
def test_a_client_without_certificates_is_told_that_it_needs_some(serve, scheme):
    assert isinstance(refused(scheme, serve(), None), TLSRequired)


@BOTH
def test_a_client_with_certificates_sends_nothing_to_a_shard_without(serve, worker, scheme):
    assert isinstance(refused(scheme, serve(None), worker), TLSNotOffered)


@BOTH
@pytest.mark.parametrize(
    ("problem", "certificate"),
    [
        ("expired", {"start": -2 * DAY, "days": 1}),
        ("not_yet_valid", {"start": 2 * DAY}),
        ("foreign", {"authority": Authority.create("another")}),
        ("wrong_name", {"covered": ("elsewhere.example", "10.9.9.9")}),
    ],
)
def test_a_client_says_what_is_wrong_with_the_certificate_of_a_shard(
    serve, worker, tmp_path, monkeypatch, scheme, problem, certificate
):
    """A shard does not start with a certificate that it sees is bad; one of its authority's authority may be so."""
    monkeypatch.setattr(credentials, "_check_dates", lambda path, leaf: None)
    shard = serve(issue(tmp_path / "shard", **certificate, trusts=certificate.get("authority")))
    error = refused(scheme, shard, worker)
    assert isinstance(error, UntrustedCertificate)
    assert error.fields["problem"] == problem


@BOTH
@pytest.mark.parametrize(
    ("problem", "certificate"),
    [
        ("expired", {"start": -2 * DAY, "days": 1}),
        ("other", {"start": 2 * DAY}),  # TLS has no word for a certificate that is not valid yet
        ("foreign", {"authority": Authority.create("another")}),
    ],
)
def test_a_client_is_told_what_a_shard_thinks_of_its_certificate(
    serve, tmp_path, monkeypatch, caplog, scheme, problem, certificate
):
    shard = serve()
    monkeypatch.setattr(credentials, "_check_dates", lambda path, leaf: None)
    error = refused(scheme, shard, issue(tmp_path / "worker", **certificate, trusts=AUTHORITY))
    assert isinstance(error, CertificateRefused)
    assert error.fields["problem"] == problem
    if scheme == "tcp":  # gRPC's handshake is its own
        assert eventually(lambda: "dropping the connection" in caplog.text)


def test_a_handshake_that_fails_leaves_no_exception_that_nobody_retrieves(serve, worker, tmp_path, caplog):
    shard = serve(issue(tmp_path / "shard", covered=["elsewhere.example"]))
    assert isinstance(refused("tcp", shard, worker), UntrustedCertificate)
    assert eventually(lambda: not shard.stream.connections)
    gc.collect()
    assert "never retrieved" not in caplog.text


def self_signed(folder):
    """A certificate of no authority but itself; its side trusts the tests' one."""
    key = Authority.create("nobody").key
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nobody")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, now - DAY, now + DAY)
    certificate = builder.sign(key, hashes.SHA256())
    replace(folder, {"tls.crt": pem(certificate), "tls.key": pem(key), "ca.crt": pem(AUTHORITY.certificate)})
    return TLS(folder)


@BOTH
def test_a_self_signed_certificate_is_told_as_what_it_is(serve, tmp_path, worker, caplog, scheme):
    error = refused(scheme, serve(self_signed(tmp_path / "shard")), worker)
    assert isinstance(error, UntrustedCertificate)
    assert error.fields["problem"] == "self_signed"
    error = refused(scheme, serve(issue(tmp_path / "other")), self_signed(tmp_path / "worker"))
    assert isinstance(error, CertificateRefused)
    assert error.fields["problem"] == "foreign"  # TLS has no word for it
    assert eventually(lambda: "self-signed" in caplog.text)


def encrypted(shard, context, first=b""):
    """A raw connection that has asked for TLS and done its part of the handshake."""
    sock = connected(shard.tcp)
    sock.settimeout(10)
    sock.sendall(client_hello(Feature.TLS) + first)
    assert sock.recv(16)[12] == Feature.TLS
    return context.wrap_socket(sock, server_hostname="localhost")


@pytest.fixture
def without_certificate(worker):
    return ssl.create_default_context(cafile=worker.path / "ca.crt")


def test_a_client_that_shows_no_certificate_gets_an_alert_in_place_of_the_hello(serve, without_certificate, caplog):
    with encrypted(serve(), without_certificate) as sock:
        sock.sendall(client_hello(Feature(0)))
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            sock.recv(1)
    assert eventually(lambda: "it sent none" in caplog.text)


def test_a_client_of_tls_1_2_is_refused_by_both_transports(serve, worker):
    shard, context = serve(), ssl.create_default_context(cafile=worker.path / "ca.crt")
    context.load_cert_chain(worker.path / "tls.crt", worker.path / "tls.key")
    context.set_alpn_protocols(["h2"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        encrypted(shard, context)
    with connected(shard.tcp) as sock, pytest.raises(OSError, match=r"EOF|reset"):
        context.wrap_socket(sock, server_hostname="localhost")
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    with connected(shard.tcp) as sock, context.wrap_socket(sock, server_hostname="localhost") as inner:
        assert inner.version() == "TLSv1.3"
        assert inner.recv(1)  # gRPC's settings


def test_a_client_that_does_not_wait_for_the_answer_is_served(serve, worker):
    """Its handshake has come with its hello, and uvloop must not have read it too early."""
    context = ssl.create_default_context(cafile=worker.path / "ca.crt")
    context.load_cert_chain(worker.path / "tls.crt", worker.path / "tls.key")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    with connected(serve().tcp) as sock:
        sock.settimeout(10)
        sock.sendall(client_hello(Feature.TLS) + outgoing.read())
        assert sock.recv(16)[12] == Feature.TLS
        while True:
            incoming.write(sock.recv(65536))
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                pass
        tls.write(client_hello(Feature(0)))
        sock.sendall(outgoing.read())
        incoming.write(sock.recv(65536))
        assert tls.read(16)[:8] == client_hello(Feature(0))[:8]


@pytest.mark.parametrize(
    "said", [b"EMBF" + bytes(28), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01" + bytes(29)]
)
def test_what_begins_without_a_hello_inside_tls_is_dropped(serve, worker, said):
    context = ssl.create_default_context(cafile=worker.path / "ca.crt")
    context.load_cert_chain(worker.path / "tls.crt", worker.path / "tls.key")
    shard = serve()
    with encrypted(shard, context) as sock:
        sock.sendall(said)
        with suppress(OSError):
            assert sock.recv(1) == b""
    assert eventually(lambda: not shard.stream.connections)


def test_handshakes_are_bounded_in_number_and_time(serve, worker, monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.5)
    shard = serve()
    shard.stream.tls.max_handshakes = 2
    idle = [connected(shard.tcp) for _ in range(3)]
    try:
        for sock in idle:
            sock.settimeout(10)
            sock.sendall(client_hello(Feature.TLS))
        said = [sock.recv(17) for sock in idle[:2]] + [idle[2].recv(17) and idle[2].recv(1)]
        assert [len(answer) for answer in said] == [16, 16, 0]
        assert [sock.recv(1) for sock in idle[:2]] == [b"", b""]  # their time is over
    except ConnectionResetError:
        pass  # cut
    finally:
        for sock in idle:
            sock.close()
    assert eventually(lambda: shard.stream.tls.handshakes == 0)
    assert shard.stream.rejected["handshakes"] == 1
    assert isinstance(ask(shard.tcp, worker), ShardStatus)


def test_handshakes_of_grpc_count_among_those_that_are_bounded(serve, worker):
    shard = serve()
    shard.stream.tls.max_handshakes = 0
    assert shake_grpc(shard, grpc_context(worker.path)) == b""
    assert shard.stream.rejected["handshakes"] == 1


def grpc_context(folder, trusts=None):
    """That of a client of gRPC's, with the certificate of a folder."""
    context = ssl.create_default_context(cafile=(trusts or folder) / "ca.crt")
    if folder is not None:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.set_alpn_protocols(["h2"])
    return context


def shake_grpc(shard, context):
    """The first byte that gRPC's server says to a client whose part of the handshake is done; none where it refuses."""
    with connected(shard.tcp) as sock:
        sock.settimeout(10)
        with suppress(OSError), context.wrap_socket(sock, server_hostname="localhost") as inner:
            return inner.recv(1)
    return b""


def counted(shard):
    """Connections refused for their TLS, once no handshake is under way."""
    assert eventually(lambda: shard.stream.tls.handshakes == 0)
    return shard.stream.rejected["tls"]


def test_handshakes_with_grpc_that_fail_are_counted_and_logged(serve, tmp_path, worker, caplog):
    shard = serve()
    foreign = issue(tmp_path / "foreign", authority=Authority.create("another"))
    old = grpc_context(worker.path)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    failing = {
        "a certificate of another authority": grpc_context(foreign.path, trusts=worker.path),
        "no certificate": grpc_context(None, trusts=worker.path),
        "a client that does not trust the shard": grpc_context(worker.path, trusts=foreign.path),
        "TLS 1.2": old,
    }
    for number, (case, context) in enumerate(failing.items(), 1):
        assert shake_grpc(shard, context) == b"", case
        assert eventually(lambda number=number: counted(shard) == number), case
    assert caplog.text.count("the TLS handshake of gRPC") == len(failing)


def test_handshakes_with_grpc_that_succeed_or_are_given_up_are_not_counted(serve, worker):
    shard = serve()
    assert shake_grpc(shard, grpc_context(worker.path))
    with closing(transport_for(shard.grpc, tls=worker)) as transport:
        transport.submit(GetStatus(), SECONDS).result()
        assert counted(shard) == 0  # while the connection is open
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        grpc_context(worker.path).wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    with connected(shard.tcp) as sock:
        sock.settimeout(10)
        for byte in outgoing.read():
            sock.sendall(bytes([byte]))
        assert sock.recv(1) == b"\x16"
        assert shard.stream.tls.handshakes == 1
    assert counted(shard) == 0


def test_a_client_of_grpc_that_is_told_to_use_tls_is_counted(serve):
    shard = serve()
    assert isinstance(refused("grpc", shard, None), TLSRequired)
    assert shard.stream.rejected["tls"] == 1


@BOTH
def test_a_revoked_client_is_refused_and_one_that_is_connected_is_dropped(serve, tmp_path, worker, scheme):
    shard = serve(TLS(issue(tmp_path / "shard").folder, poll_interval=timedelta(milliseconds=20)))
    with closing(transport_for(f"{scheme}://{shard.address}", tls=worker)) as transport:
        assert isinstance(transport.submit(GetStatus(), SECONDS).result(), ShardStatus)
        revoke(tmp_path / "shard", tmp_path / "worker")
        assert eventually(lambda: shard.certificates.current.revoked)
        assert eventually(lambda: not shard.stream.connections)
        with pytest.raises(EmbershardError) as caught:
            transport.submit(GetStatus(), SECONDS).result()
        assert isinstance(caught.value, UntrustedCertificate)
        assert caught.value.fields["problem"] == "revoked"
        assert shard.stream.rejected["tls"] > 0


@BOTH
def test_a_client_refuses_a_shard_whose_certificate_was_revoked(serve, tmp_path, worker, scheme):
    shard = serve()
    revoke(tmp_path / "worker", tmp_path / "shard")
    error = refused(scheme, shard, worker)
    assert isinstance(error, UntrustedCertificate)
    assert error.fields["problem"] == "revoked"


@BOTH
def test_a_server_name_stands_in_for_an_address_that_no_certificate_can_foresee(serve, tmp_path, worker, scheme):
    shard = serve(issue(tmp_path / "shard", covered=["ads.shards.embershard"]))
    tls = TLS(worker.folder, server_name="ads.shards.embershard")
    assert isinstance(ask(f"{scheme}://{shard.address}", tls), ShardStatus)


@BOTH
def test_new_certificates_are_used_without_a_restart(serve, tmp_path, scheme):
    quick = {"poll_interval": timedelta(milliseconds=20)}
    shard = serve(TLS(issue(tmp_path / "shard").folder, **quick))
    client = TLS(issue(tmp_path / "worker").folder, **quick)
    with closing(transport_for(f"{scheme}://{shard.address}", tls=client)) as transport:
        transport.submit(GetStatus(), SECONDS).result()
        # both move to another authority, which the other side trusts first
        other = Authority.create("the next")
        for folder in ("shard", "worker"):
            issue(tmp_path / folder, authority=other)
        # ca.crt comes last, and a look at the files may fall before it
        assert eventually(lambda: shard.certificates.current.authorities == pem(other.certificate))
        assert isinstance(ask(f"{scheme}://{shard.address}", client), ShardStatus)
        assert isinstance(transport.submit(GetStatus(), SECONDS).result(), ShardStatus)


def test_files_that_do_not_fit_leave_the_certificates_of_before_in_use(serve, tmp_path, worker, caplog):
    shard = serve(TLS(issue(tmp_path / "shard").folder, poll_interval=timedelta(milliseconds=20)))
    (tmp_path / "shard" / "tls.key").write_bytes((tmp_path / "worker" / "tls.key").read_bytes())
    assert eventually(lambda: "does not fit" in caplog.text)
    assert isinstance(ask(shard.tcp, worker), ShardStatus)
    assert isinstance(ask(shard.grpc, worker), ShardStatus)


def test_a_look_at_the_files_that_fails_is_not_the_last_one(serve, tmp_path, worker, caplog, monkeypatch):
    shard = serve(TLS(issue(tmp_path / "shard").folder, poll_interval=timedelta(milliseconds=20)))
    with monkeypatch.context() as broken:
        broken.setattr(credentials, "_signature", lambda folder: 1 // 0)
        assert eventually(lambda: "cannot look at" in caplog.text)
    before = shard.certificates.current
    issue(tmp_path / "shard")
    assert eventually(lambda: shard.certificates.current is not before)
    assert isinstance(ask(shard.tcp, worker), ShardStatus)


@BOTH
def test_a_connection_ends_when_it_is_old_and_calls_go_on_over_another(serve, tmp_path, worker, monkeypatch, scheme):
    monkeypatch.setattr(stream, "SWEEP_SECONDS", 0.02)
    shard = serve(TLS(issue(tmp_path / "shard").folder, connection_lifetime=timedelta(milliseconds=200)))
    with closing(transport_for(f"{scheme}://{shard.address}", tls=worker)) as transport:
        transport.submit(GetStatus(), SECONDS).result()
        assert shard.stream.open_connections == 1
        assert eventually(lambda: not shard.stream.open_connections)
        assert isinstance(transport.submit(GetStatus(), SECONDS).result(), ShardStatus)


@pytest.mark.parametrize("tls", ["issued", None])
def test_connections_of_grpc_end_after_a_day_where_there_are_certificates(serve, monkeypatch, tls):
    made, make = [], grpc.aio.server
    monkeypatch.setattr(grpc.aio, "server", lambda **settings: made.append(settings) or make(**settings))
    serve(tls)
    ages = [dict(settings.get("options", ())).get("grpc.max_connection_age_ms") for settings in made]
    assert ages.pop(0) == (None if tls is None else 24 * 3600 * 1000)


def test_a_unix_socket_needs_no_tls(serve, tmp_path, worker):
    shard = serve(listen=f"unix:{tmp_path}/socket")
    for address in (shard.address, f"grpc+{shard.address}"):
        for tls in (worker, None):
            assert isinstance(ask(address, tls), ShardStatus)


@pytest.mark.parametrize("scheme", ["", "grpc+"])
def test_the_path_of_a_unix_socket_may_have_any_characters(serve, tmp_path, scheme):
    shard = serve(None, listen=f"unix:{tmp_path}/a #%41?")
    assert isinstance(ask(f"{scheme}{shard.address}", None), ShardStatus)


def test_on_the_same_machine_a_tcp_address_means_the_unix_socket_beside_it(serve, worker):
    shard = serve()
    with closing(transport_for(shard.address, tls=worker)) as transport:
        transport.submit(GetStatus(), SECONDS).result()
        assert shard.identities() == [""]


def test_a_folder_that_cannot_be_used_is_an_error_before_anything_is_sent(tmp_path):
    with pytest.raises(BadCertificate) as caught:
        transport_for("127.0.0.1:1", tls=TLS(tmp_path / "nothing"))
    assert caught.value.fields["problem"] == "missing"


def test_a_certificate_that_grpc_cannot_use_is_named_before_the_shard_serves(serve, tmp_path):
    own = Authority.create("an authority's own")
    replace(tmp_path, {"tls.crt": pem(own.certificate), "tls.key": pem(own.key), "ca.crt": pem(own.certificate)})
    with pytest.raises(BadCertificate):
        serve(TLS(tmp_path))
