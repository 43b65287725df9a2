"""What a pipe tells of a handshake of TLS that passes through it, whose server says nothing about it."""

import ssl
from contextlib import suppress

import pytest

from embershard.deploy.authority import Authority
from embershard.ps.transport.pipe import _Handshake
from harness.certificates import AUTHORITY, issue


class Handshake:
    """A client and a server of OpenSSL; what they send is passed on in parts of `size` bytes, and followed."""

    def __init__(self, client, server, size=2**16):
        self.outcomes, self.size = [], size
        self.followed = _Handshake(self.outcomes.append)
        self.to_client, self.to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=client.path / "ca.crt")
        context.load_cert_chain(client.path / "tls.crt", client.path / "tls.key")
        self.client = context.wrap_bio(self.to_client, self.to_server, server_hostname="localhost")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=server.path / "ca.crt")
        context.load_cert_chain(server.path / "tls.crt", server.path / "tls.key")
        context.verify_mode = ssl.CERT_REQUIRED
        self._from_client, self._at_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.server = context.wrap_bio(self._at_server, self._from_client, server_side=True)

    def client_turn(self):
        """The client's next messages."""
        with suppress(ssl.SSLError):
            self.client.do_handshake()
        while data := self.to_server.read(self.size):
            self.followed.client_sent(data)
            self._at_server.write(data)

    def server_turn(self):
        """The server's next messages."""
        with suppress(ssl.SSLError):
            self.server.do_handshake()
        while data := self._from_client.read(self.size):
            self.followed.server_sent(data)
            self.to_client.write(data)


@pytest.fixture
def good(tmp_path):
    return issue(tmp_path / "good")


@pytest.fixture
def foreign(tmp_path):
    return issue(tmp_path / "foreign", authority=Authority.create("another"), trusts=AUTHORITY)


@pytest.mark.parametrize("size", [1, 7, 2**16])
def test_a_handshake_succeeds_when_the_server_answers_what_the_client_sent_last(good, size):
    shake = Handshake(good, good, size)
    shake.client_turn()
    shake.server_turn()
    shake.client_turn()
    assert shake.outcomes == []  # the client thinks that it is connected; the server has not looked at its certificate
    shake.server_turn()
    shake.followed.client_left()
    assert shake.outcomes == [False]


@pytest.mark.parametrize("size", [1, 7, 2**16])
def test_an_alert_in_answer_to_the_client_is_no_success(good, foreign, size):
    shake = Handshake(foreign, good, size)
    for turn in (shake.client_turn, shake.server_turn, shake.client_turn, shake.server_turn):
        turn()
    with pytest.raises(ssl.SSLError, match="ALERT"):
        shake.client.read(1)  # there is one
    assert shake.outcomes == []
    shake.followed.server_left()
    assert shake.outcomes == [True]


@pytest.mark.parametrize(("turns", "failed"), [(1, False), (3, True)])
def test_a_client_that_leaves_has_refused_the_server_only_if_it_answered_it(good, foreign, turns, failed):
    shake = Handshake(good, foreign)
    for turn in (shake.client_turn, shake.server_turn, shake.client_turn)[:turns]:
        turn()
    shake.followed.client_left()
    shake.followed.server_left()
    assert shake.outcomes == [failed]


def test_records_of_a_client_that_come_before_the_servers_are_no_answer_to_them(good):
    """Else a client could end the count of its handshake while the server still waits."""
    shake = Handshake(good, good)
    shake.followed.client_sent(bytes.fromhex("1703030020") + bytes(32))
    shake.client_turn()
    shake.server_turn()
    assert shake.outcomes == []
