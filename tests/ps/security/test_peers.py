"""Who may connect to a shard's Unix sockets, and that nobody finds the one that gRPC listens at."""

import os
import socket
import stat
import subprocess
import sys

import pytest

from embershard.proto.errors import CannotListen
from embershard.proto.wire import HELLO_BYTES, Feature, client_hello, local_socket
from embershard.ps.security import hidden_socket
from embershard.ps.security.hidden_socket import HiddenSocket
from embershard.ps.security.peers import Peer, peer_of
from embershard.ps.transport import address
from harness.eventually import eventually
from harness.served import shard_process

NOBODY = 65534
AS_NOBODY = f"""
import os, socket, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
for place in sys.argv[1:]:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    try:
        sock.connect(place.replace("@", "\\0", 1))
        sock.sendall(bytes.fromhex("{client_hello(Feature(0)).hex()}"))
        print(len(sock.recv(64)), flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""


@pytest.fixture
def pair():
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        yield near


def test_a_peer_of_a_unix_socket_has_the_user_that_the_system_says(pair):
    assert peer_of(pair) == Peer(f"uid:{os.getuid()}", os.getuid())


@pytest.mark.parametrize(("uid", "admitted"), [(0, True), (1000, True), (1001, False), (NOBODY, False)])
def test_a_unix_socket_is_for_the_shards_own_user_and_root(monkeypatch, uid, admitted):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Peer("", uid).is_admitted is admitted


def test_a_peer_over_tcp_is_known_by_its_address():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            assert peer_of(far) == Peer("{}:{}".format(*near.getsockname()))
            assert peer_of(far).is_admitted


def test_a_socket_with_a_path_is_its_owners_alone(tmp_path):
    with address.Address.parse(f"unix:{tmp_path}/s").listen()[0]:
        assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600


def test_a_hidden_socket_has_no_name_and_this_process_reaches_it():
    hidden = HiddenSocket()
    folder = os.path.dirname(hidden.path)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(hidden.target.removeprefix("unix:"))
        server.listen()
        hidden.hide()
        assert not os.path.exists(folder)
        client.connect(hidden.path)
    hidden.close()
    assert not os.path.exists(hidden.path)


def test_without_a_place_for_the_hidden_socket_a_shard_does_not_start(monkeypatch):
    def refuse(prefix, dir):
        raise PermissionError(13, "Permission denied", dir)

    monkeypatch.setattr(hidden_socket.tempfile, "mkdtemp", refuse)
    with pytest.raises(CannotListen):
        HiddenSocket()


@pytest.mark.integration
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_machine_gets_no_byte_of_a_shard(tmp_path):
    tmp_path.chmod(0o755)
    with shard_process() as tcp, shard_process(listen=f"unix:{tmp_path}/s") as path:
        host, port = tcp.address.split(":")
        beside = local_socket(host, int(port))
        (tmp_path / "s").chmod(0o777)  # as careless as can be
        places = [beside.replace("\0", "@"), f"{tmp_path}/s"]
        with socket.socket(socket.AF_UNIX) as own:
            own.connect(beside)
            own.sendall(client_hello(Feature(0)))
            assert len(own.recv(HELLO_BYTES, socket.MSG_WAITALL)) == HELLO_BYTES
        done = subprocess.run([sys.executable, "-c", AS_NOBODY, *places], capture_output=True, text=True, timeout=60)
        assert len(done.stdout.split()) == 2, done.stderr
        assert set(done.stdout.split()) <= {"0", "ConnectionResetError", "BrokenPipeError", "PermissionError"}
        with open("/proc/net/unix") as names:
            hidden = [line.split()[-1] for line in names if line.rstrip().endswith("/grpc")]
        assert hidden
        assert eventually(lambda: not any(map(os.path.exists, hidden)))  # another shard may be starting
        assert path.popen.poll() is None
