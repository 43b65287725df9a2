"""Each transport asks who a peer is, and lets it do what its role may and no more; clients of ours and raw bytes."""

import socket
import threading
import time
from contextlib import closing
from datetime import timedelta

import grpc
import numpy as np
import pytest

from embershard.proto.codec.name import CodecName
from embershard.proto.errors import (
    BadToken,
    EmbershardError,
    InvalidRequest,
    NotAllowed,
    NotAuthenticated,
    TableMismatch,
    TablesInTheWay,
)
from embershard.proto.messages import (
    METHODS,
    READ_ONLY_WORKER,
    SERVICE,
    Compress,
    Declare,
    Declared,
    GetStatus,
    Greeting,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Load,
    Pull,
    Push,
    PushToken,
    Rendezvous,
    Restore,
    Snapshot,
    TableGradients,
    TableIds,
    TakeSplit,
)
from embershard.proto.security.client_token import ClientToken
from embershard.proto.security.tokens import TokenFile, new_token, pack_token, token_digest, write_private
from embershard.proto.transport.grpc import GrpcTransport
from embershard.proto.transport.stream import StreamTransport
from embershard.proto.wire import Feature
from embershard.ps.security.access import Access
from embershard.ps.security.roles import LEAST_ROLE, ROLES
from embershard.ps.transport import stream, stream_connection
from harness.eventually import eventually
from harness.hostile_peers import Peer, begun, framed, pull, push
from harness.raises import raises
from harness.shards import table

PATIENCE = timedelta(seconds=60)
TOKENS = {role: new_token() for role in ROLES}
REQUESTS = (
    Hello(), GetStatus(), pull(), Declare(table("items", 4)), push(),
    Load("items", 1, np.arange(3), np.ones((3, 4), np.float32)),
    Join(worker=1, epoch=1, workers=1, lease_ms=60_000), Heartbeat(worker=1, epoch=1), Leave(worker=1, epoch=1),
    Rendezvous(1, 1, "r", np.empty(0, np.uint8)), TakeSplit(worker=1, epoch=1, num_splits=1, done=-1),
    Snapshot(name="s", step="watch"), Restore(name="s", step="watch"), Compress(),
)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    entries = [
        f"- {{name: {role}er, role: {role}, token_sha256: '{token_digest(token).hex()}'}}"
        for role, token in TOKENS.items()
    ]
    write_private(tmp_path / "access.yaml", "\n".join(entries))
    return tmp_path / "access.yaml"


@pytest.fixture
def access(path):
    return Access(path)


@pytest.fixture(params=["stream", "grpc"])
def connected(request, access, serve, serve_grpc, tmp_path):
    """A client of our own, over a transport, that shows a token or none."""
    server = serve(access=access) if request.param == "stream" else serve_grpc(access=access)
    if request.param == "stream":
        server.shard.handle(Declare(table("items", 4)))
    transport = StreamTransport if request.param == "stream" else GrpcTransport
    made = []

    def connect(token):
        shown = None
        if token is not None:
            write_private(file := tmp_path / f"token-{len(made)}", token)
            shown = ClientToken(TokenFile(file), asked_for=True)
        made.append(transport(server.address, token=shown))
        return made[-1]

    yield connect
    for one in made:
        one.close()


def ask(transport, request):
    return transport.submit(request, PATIENCE).result()


def refusal(transport, request):
    """Why a request is refused; None where it was not for who asks."""
    try:
        ask(transport, request)
    except NotAllowed as error:
        return error
    except EmbershardError:
        return None  # of what the request says
    return None


def test_there_is_a_request_of_each_method():
    assert {type(request) for request in REQUESTS} == set(METHODS)


@pytest.mark.parametrize("role", ROLES)
def test_over_each_transport_a_role_may_call_its_methods_and_no_others(connected, role):
    transport = connected(TOKENS[role])
    for request in REQUESTS:
        error = refusal(transport, request)
        may = ROLES.index(role) >= ROLES.index(LEAST_ROLE[type(request)])
        assert (error is None) is may, request
        if error is not None:
            assert (error.fields["who"], error.fields["what"]) == (f"{role}er", METHODS[type(request)][0])
    assert isinstance(ask(transport, Hello()), Greeting)  # the connection goes on


@pytest.mark.parametrize("token", [None, new_token()], ids=["no token", "another token"])
def test_over_each_transport_who_is_not_known_may_call_nothing(connected, token):
    transport = connected(token)
    for request in REQUESTS:
        with pytest.raises(NotAuthenticated):
            ask(transport, request)


def test_a_token_whose_entry_is_gone_is_of_no_use_from_then_on(connected, access, path):
    transport, other = connected(TOKENS["admin"]), connected(TOKENS["read"])
    ask(transport, GetStatus())
    ask(other, GetStatus())
    write_private(path, path.read_text().replace(token_digest(TOKENS["admin"]).hex(), "0" * 64))
    assert access.reload()
    with pytest.raises(NotAuthenticated):
        ask(transport, GetStatus())
    ask(other, GetStatus())


def test_who_has_the_same_token_in_a_changed_entry_goes_on_with_what_it_allows(connected, access, path):
    transport = connected(TOKENS["train"])
    ask(transport, Hello())
    path.write_text(path.read_text().replace("role: train", "role: read"))
    assert access.reload()
    assert isinstance(ask(transport, Hello()), Greeting)
    with raises(NotAllowed, who="trainer", what="Join"):
        ask(transport, Join(worker=1, epoch=1, workers=1, lease_ms=60_000))


def test_a_token_file_that_others_can_read_is_named_before_anything_is_sent(connected, tmp_path):
    transport = connected(TOKENS["read"])
    (tmp_path / "token-0").chmod(0o644)
    with raises(BadToken, path=str(tmp_path / "token-0")):
        ask(transport, Hello())


CHANGES = {
    "another table": Declare(table("more", 2)),
    "a loader": Declare(table("items", 2), load=True),
    "dense": Declare(table("items", 2), dense=True),
    "codecs of a worker": Declare(table("items", 2, pull_codec=CodecName.parse("fp16s"))),
    "a lineage": Declare(table("items", 2), lineage=7, begins_lineage=True),
    "a number of rows": Declare(table("items", 2), num_rows=9),
}


@pytest.mark.parametrize("role", ["read", "train"])
@pytest.mark.parametrize("declare", CHANGES.values(), ids=CHANGES)
def test_who_only_reads_declares_nothing_that_changes_a_table(serve_grpc, access, declare, role, tmp_path):
    server = serve_grpc(access=access)

    def state():
        return server.shard.core.control(), server.shard.status().tables

    before = state()
    write_private(tmp_path / "token", TOKENS[role])
    with closing(GrpcTransport(server.address, token=ClientToken(TokenFile(tmp_path / "token"), True))) as transport:
        for worker in (0, READ_ONLY_WORKER):
            same = Declare(table("items", 2), worker=worker)
            assert ask(transport, same) == Declared(created=False, loading=False)
        with pytest.raises(TableMismatch):
            ask(transport, Declare(table("items", 3)))
        assert state() == before
        if role == "train":
            ask(transport, declare)
            assert declare.load or declare.num_rows or state() != before  # one that exists already takes no loader
        else:
            with raises(NotAllowed, who="reader", what="Declare"):
                ask(transport, declare)
            assert state() == before


def test_who_only_reads_is_no_worker_whatever_its_pull_says(serve, access):
    served = serve(access=access)
    trainer, reader = (Peer(served.address, Feature.TOKEN, token=TOKENS[role]) for role in ("train", "read"))
    trainer.ask(Declare(table("items", 2)))
    trainer.ask(Join(worker=0, epoch=1, staleness=-1, workers=1, lease_ms=60_000))
    own, others, ones = np.arange(2), np.arange(2) + 7, np.ones((2, 2), np.float32)
    trainer.ask(Pull(1, (TableIds("items", own, route=5),), epoch=1))
    before = served.shard.status().members[0].lease_seconds
    time.sleep(0.01)
    reader.ask(Pull(1, (TableIds("items", others, route=5),), epoch=1))
    assert served.shard.status().members[0].lease_seconds < before
    with raises(InvalidRequest, reason="worker 65535 is no member here; it has to join first"):
        reader.ask(Pull(1, (TableIds("items", own),), epoch=0, required_clock=1))  # which told the worker's epoch
    by_route = TableGradients("items", np.empty(0, np.int64), ones, route=5)
    trainer.ask(Push(PushToken(0, 1, 1, 1), 0, 1, (by_route,)))
    rows = trainer.ask(Pull(1, (TableIds("items", np.concatenate([own, others])),)))
    assert np.all(rows.tables[0] == np.repeat([-1, 0], 4).astype(np.float32))
    trainer.sock.close()
    reader.sock.close()


class TestStream:
    @pytest.fixture
    def served(self, serve, access, monkeypatch):
        monkeypatch.setattr(stream, "SWEEP_SECONDS", 0.05)
        return serve(access=access)

    def test_a_peer_whose_entry_is_gone_is_dropped_though_it_asks_nothing(self, served, access, path):
        peer = Peer(served.address, Feature.TOKEN, token=TOKENS["read"])
        assert isinstance(peer.ask(Hello()), Greeting)
        path.write_text(path.read_text().replace(token_digest(TOKENS["read"]).hex(), "0" * 64))
        access.reload()
        with raises(NotAuthenticated, who="reader"):
            peer.reply()
        assert peer.was_dropped()
        peer.sock.close()

    def test_a_client_that_knows_no_tokens_is_told_why(self, served):
        peer = Peer(served.address)
        with pytest.raises(NotAuthenticated):
            peer.reply()
        assert peer.was_dropped()
        peer.sock.close()

    @pytest.mark.parametrize("sent", [b"", pack_token(TOKENS["read"])[:63]], ids=["nothing", "most of it"])
    def test_a_peer_that_does_not_finish_its_token_is_dropped(self, served, monkeypatch, sent):
        monkeypatch.setattr(stream_connection, "HELLO_SECONDS", 0.3)
        peer = Peer(served.address, Feature.TOKEN, token="x")  # a record of 64 bytes that is refused
        peer.sock.close()
        with socket.create_connection(tuple(peer_address(served))) as sock:
            sock.sendall(stream_connection.MAGIC + b"\2\0\2\0" + bytes([Feature.TOKEN, 0, 0, 0]))
            assert len(sock.recv(16, socket.MSG_WAITALL)) == 16
            sock.sendall(sent)
            sock.settimeout(60)
            try:
                assert sock.recv(1) == b""
            except ConnectionResetError:
                pass

    def test_no_memory_is_taken_for_what_a_role_may_not_send(self, served):
        peer = Peer(served.address, Feature.TOKEN, token=TOKENS["read"])
        peer.send(begun(2**25, call=3))
        with raises(NotAllowed, who="reader"):
            peer.reply()
        assert served.stream.receiving_bytes == 0
        peer.sock.close()

    def test_what_a_refused_peer_still_sends_does_not_keep_it_from_reading_why(self, served):
        peer = Peer(served.address, Feature.TOKEN, token=new_token())
        for _ in range(50):
            peer.send(framed(push(1000)))
            time.sleep(0.001)
        with pytest.raises(NotAuthenticated):
            peer.reply()
        peer.sock.close()
        assert eventually(lambda: served.connections == 0)

    def test_bytes_that_are_no_text_are_no_token(self, served):
        for record in (b"\xff" * 64, bytes(range(64)), b"\0" * 64, b"a" * 64):
            with socket.create_connection(peer_address(served)) as sock:
                sock.sendall(stream_connection.MAGIC + b"\2\0\2\0" + bytes([Feature.TOKEN, 0, 0, 0]) + record)
                assert b"NotAuthenticated" in read_all(sock)

    def test_a_shard_that_asks_nobody_wants_no_token(self, serve):
        with closing(StreamTransport(serve().address)) as transport:
            assert isinstance(ask(transport, Hello()), Greeting)


def test_grpc_takes_a_bearer_token_and_shows_its_schema_to_nobody(serve_grpc, access):
    with grpc.insecure_channel(serve_grpc(access=access).address) as channel:
        hello = channel.unary_unary(f"/{SERVICE}/Hello")
        for value in (f"Bearer {TOKENS['read']}", f"bearer  {TOKENS['read']}"):
            hello(b"", metadata=(("authorization", value),), timeout=60)
        for value in (TOKENS["read"], f"Basic {TOKENS['read']}", "Bearer", "Bearer ", f"Bearer {TOKENS['read']} x"):
            with pytest.raises(grpc.RpcError) as caught:
                hello(b"\xff", metadata=(("authorization", value),), timeout=60)  # which cannot be decoded
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        schema = channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as caught:
            schema(b"", metadata=(("authorization", f"Bearer {TOKENS['admin']}"),), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_grpc_refuses_who_may_not_call_before_the_message_is_read(serve_grpc, access):
    gate = threading.Event()

    def late():
        gate.wait(60)
        yield b""

    with grpc.insecure_channel(serve_grpc(access=access).address) as channel:
        hello = channel.stream_unary(f"/{SERVICE}/Hello")
        try:
            with pytest.raises(grpc.RpcError) as caught:
                hello(late(), timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        finally:
            gate.set()
        with pytest.raises(grpc.RpcError) as caught:
            hello(iter(()), metadata=(("authorization", f"Bearer {TOKENS['read']}"),), timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("patterns", [["other"], ["items", "other*"]])
def test_a_principal_with_tables_of_its_own_leaves_those_of_others_alone(serve, tmp_path, patterns):
    token = new_token()
    entry = f"- {{name: p, role: train, token_sha256: '{token_digest(token).hex()}', tables: {patterns}}}"
    write_private(tmp_path / "access.yaml", entry)
    served = serve(access=Access(tmp_path / "access.yaml"))
    served.shard.handle(Declare(table("items", 4)))
    peer, owns = Peer(served.address, Feature.TOKEN, token=token), "items" in patterns
    served.shard.handle(Declare(table("other", 4)))
    ids = np.arange(2)
    both = Pull(1, (TableIds("", ids, members=("other", "items"), counts=(1, 1)),))
    for request in (pull(), push(), both, Declare(table("items", 4)), Restore(id=1, step="begin", replace=True)):
        try:
            peer.ask(request)
        except NotAllowed:
            assert not owns
        else:
            assert owns
    if owns:
        peer.ask(Restore(id=1, step="cancel"))
    with pytest.raises(TablesInTheWay):
        peer.ask(Restore(id=2, url=str(tmp_path), step="begin"))
    peer.sock.close()


def peer_address(served):
    host, port = served.address.removeprefix("tcp://").split(":")
    return host, int(port)


def read_all(sock):
    sock.settimeout(60)
    data = b""
    while got := sock.recv(4096):
        data += got
    return data
