"""Addresses that a shard may listen at."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc.aio
import pytest

from embershard.proto.errors import CannotListen
from embershard.ps.server import Address, ServerOptions
from embershard.ps.service import SERVER_OPTIONS


def bind(text: str) -> str:
    async def scene() -> str:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        try:
            return Address.parse(text).bind(server)
        finally:
            await server.stop(0)

    return asyncio.run(scene())


@pytest.mark.parametrize("text", ["", "7700", ":7700", "localhost", "localhost:", "127.0.0.1:70000", "a:-1", "unix:"])
def test_an_address_that_is_none_is_refused(text: str):
    with pytest.raises(CannotListen, match="write "):
        Address.parse(text)


def test_a_host_that_nobody_knows_is_named():
    with pytest.raises(CannotListen, match=r"unknown host 'no-such-host\.invalid'"):
        Address.parse("no-such-host.invalid:7700")


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.8.9.1:1", "localhost:1", "[::1]:1", "unix:/tmp/x"])
def test_loopback_needs_no_flag(text: str):
    Address.parse(text).check(insecure=False)


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "192.0.2.1:1"])
def test_another_address_needs_the_flag_that_says_so(text: str, caplog: pytest.LogCaptureFixture):
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
    async def scene() -> None:
        first = grpc.aio.server(options=SERVER_OPTIONS)
        address = Address.parse("127.0.0.1:0").bind(first)
        await first.start()
        second = grpc.aio.server(options=SERVER_OPTIONS)
        with pytest.raises(CannotListen, match="in use"):
            Address.parse(address).bind(second)
        await first.stop(0)

    asyncio.run(scene())


def test_an_address_of_another_machine_cannot_be_bound():
    with pytest.raises(CannotListen, match="Cannot assign requested address"):
        bind("192.0.2.1:0")


def test_a_unix_socket_that_another_process_serves_is_not_taken_over(tmp_path: Path):
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
