"""Addresses that a shard may listen at."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys

import pytest

from embershard.proto.errors import CannotListen
from embershard.proto.wire import local_socket
from embershard.ps.server import LineFormatter, ServerOptions
from embershard.ps.transport.address import Address


def bind(text: str) -> str:
    address = Address.parse(text)
    sockets = address.listen()
    try:
        return address.bound(sockets[0])
    finally:
        for sock in sockets:
            sock.close()


@pytest.mark.parametrize("text", ["", "7700", ":7700", "localhost", "localhost:", "127.0.0.1:70000", "a:-1", "unix:"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(CannotListen, match="write "):
        Address.parse(text)


def test_a_host_that_nobody_knows_is_named():
    with pytest.raises(CannotListen, match=r"unknown host 'no-such-host\.invalid'"):
        Address.parse("no-such-host.invalid:7700")


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.8.9.1:1", "localhost:1", "[::1]:1", "unix:/tmp/x"])
def test_loopback_needs_no_flag(text):
    Address.parse(text).check(insecure=False)


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "192.0.2.1:1"])
def test_another_address_needs_the_flag_that_says_so(text, caplog):
    with pytest.raises(CannotListen, match="--insecure"):
        Address.parse(text).check(insecure=False)
    Address.parse(text).check(insecure=True)
    assert f"anyone who reaches {text}" in caplog.text


def test_port_0_gives_the_port_that_was_bound():
    host, port = bind("localhost:0").rsplit(":", 1)
    assert host == "127.0.0.1"
    assert int(port) > 0


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port} is in use"):
            bind(f"127.0.0.1:{port}")


def test_a_port_of_another_shard_is_in_use_too():
    first = Address.parse("127.0.0.1:0")
    sockets = first.listen()
    with pytest.raises(CannotListen, match="in use"):
        bind(first.bound(sockets[0]))
    for sock in sockets:
        sock.close()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
def test_a_unix_socket_lies_beside_a_tcp_port_and_goes_with_it():
    address = Address.parse("127.0.0.1:0")
    main, beside = address.listen()
    name = local_socket("127.0.0.1", main.getsockname()[1])
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(name)
    main.close()
    beside.close()
    with socket.socket(socket.AF_UNIX) as worker, pytest.raises(ConnectionRefusedError):
        worker.connect(name)


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
def test_a_shard_serves_over_tcp_alone_where_the_socket_beside_is_taken(caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(local_socket("127.0.0.1", port))
        assert bind(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
    assert "workers on this machine use TCP" in caplog.text


def test_an_address_of_another_machine_cannot_be_bound():
    with pytest.raises(CannotListen, match="Cannot assign requested address"):
        bind("192.0.2.1:0")


def test_a_unix_socket_that_another_process_serves_is_not_taken_over(tmp_path):
    path = tmp_path / "shard.sock"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        with pytest.raises(CannotListen, match="another process listens there"):
            bind(f"unix:{path}")
    # left behind by a process that died
    assert bind(f"unix:{path}") == f"unix:{path}"


def test_options_without_sense_are_refused():
    with pytest.raises(ValueError, match="shard 2 of 2"):
        ServerOptions(shard=2, of=2)
    with pytest.raises(ValueError, match="queue_bytes"):
        ServerOptions(shard=0, of=1, queue_bytes=0)


def test_a_log_record_is_one_line_whatever_a_peer_says():
    formatter = LineFormatter("shard %(levelname)s %(message)s")
    evil = "x\nshard ERROR all is lost\r\x1b[2J\x9b1m\u2028y"
    try:
        raise ValueError(evil)
    except ValueError:
        record = logging.LogRecord("l", logging.INFO, "f", 1, "peer %s", (evil,), sys.exc_info())
    first, *rest = formatter.format(record).split("\n")
    assert first == r"shard INFO peer x\x0ashard ERROR all is lost\x0d\x1b[2J\x9b1m\u2028y"
    assert all(line.startswith("    ") for line in rest)
    assert not any(mark in line for line in rest for mark in "\r\x1b\x9b\u2028")


HANGS = """
import asyncio
from embershard.ps import server
server.GRACE_SECONDS, server.LAST_SECONDS = 0.5, 0.5
async def hang(self):
    await asyncio.sleep(3600)
server._Transports.close = hang
server.serve(server.ServerOptions(shard=0, of=1, listen="127.0.0.1:0"))
"""


def test_a_shard_ends_on_sigterm_also_where_something_hangs():
    shard = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert shard.stdout is not None
        assert "serving" in shard.stdout.readline()
        shard.terminate()
        assert shard.wait(120) == 1
        assert shard.stderr is not None
        assert "Timeout" in shard.stderr.read()
    finally:
        shard.kill()
        shard.wait()
