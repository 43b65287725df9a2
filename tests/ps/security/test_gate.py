"""How a shard decides at its start whom it asks who they are."""

import pytest

from embershard.proto.errors import BadAccessFile, BadToken, CannotListen, NotAuthenticated
from embershard.proto.security import loopback
from embershard.proto.security.tokens import new_token, token_digest, write_private
from embershard.ps.security import gate as module
from embershard.ps.security.gate import Gate
from embershard.ps.security.peers import Peer

PEER = Peer("127.0.0.1:5000")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(loopback, "runtime_folders", lambda: (tmp_path / "embershard",))
    return tmp_path / "embershard"


@pytest.fixture
def file(tmp_path):
    token = new_token()
    write_private(tmp_path / "token", token)
    entry = f"- {{name: a, role: read, token_sha256: '{token_digest(token).hex()}'}}"
    write_private(tmp_path / "access.yaml", entry)
    return tmp_path / "access.yaml"


def test_on_loopback_a_token_is_written_and_taken_back(folder):
    gate = Gate.on_loopback("127.0.0.1", 7700, None, insecure=False)
    token = loopback.find_loopback_token("127.0.0.1", 7700)
    assert gate.access.identify(PEER, token).role == "admin"
    with pytest.raises(NotAuthenticated):
        gate.access.identify(PEER)
    gate.close()
    assert list(folder.iterdir()) == []


def test_insecure_loopback_asks_nobody_unless_a_file_says_who_may_do_what(file, folder):
    assert Gate.on_loopback("127.0.0.1", 7700, None, insecure=True).access is None
    gate = Gate.on_loopback("127.0.0.1", 7700, file, insecure=True)
    with pytest.raises(NotAuthenticated):
        gate.access.identify(PEER)
    gate.close()
    assert not folder.exists()


def test_without_a_safe_place_for_its_token_a_shard_does_not_start_unless_a_file_says_who_comes(monkeypatch, file):
    def refuse(ip, port):
        raise BadToken(path="/tmp/x", reason="taken")

    monkeypatch.setattr(module, "write_loopback_token", refuse)
    with pytest.raises(CannotListen):
        Gate.on_loopback("127.0.0.1", 7700, None, insecure=False)
    Gate.on_loopback("127.0.0.1", 7700, file, insecure=False).close()


def test_beyond_loopback_a_file_decides_and_a_unix_socket_always_asks(file, tmp_path):
    assert Gate.on_network(None).access is None
    gate = Gate.on_network(file)
    assert gate.access.identify(PEER, (tmp_path / "token").read_text()).name == "a"
    gate.close()
    assert Gate.at_unix_socket(None).access is not None
    (tmp_path / "access.yaml").write_text("nonsense")
    with pytest.raises(BadAccessFile):
        Gate.on_network(file)
