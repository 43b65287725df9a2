"""Addresses that a shard may listen at, what it logs, and how it ends."""

import logging
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from embershard.proto.errors import CannotListen
from embershard.proto.wire import local_socket
from embershard.ps import server
from embershard.ps.monitoring.log_lines import PER_MINUTE, LineFormatter, LinesPerMinute
from embershard.ps.options import ServerOptions
from embershard.ps.transport.address import Address

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")


def bind(text):
    """The address that was bound, for a moment."""
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no-such-host.invalid:7700", r"unknown host 'no-such-host\.invalid'.*--advertise"),
        ("192.0.2.1:0", r"Cannot assign requested address; .*0\.0\.0\.0"),
        ("unix:/nowhere/s", "No such file or directory; .*a folder that is there"),
    ],
)
def test_an_address_of_nobody_or_of_another_machine_is_named(text, reason):
    with pytest.raises(CannotListen, match=reason):
        bind(text)


def test_a_file_in_the_place_of_a_unix_socket_is_left_and_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CannotListen, match="something else than a socket has this path; remove it"):
        bind(f"unix:{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.8.9.1:1", "localhost:1", "[::1]:1", "unix:/tmp/x"])
@pytest.mark.parametrize("other", ["0.0.0.0:1", "[::]:1", "192.0.2.1:1"])
def test_an_address_that_is_not_loopback_needs_the_flag_that_says_so(text, other, caplog):
    Address.parse(text).check(insecure=False)
    with pytest.raises(CannotListen, match="--insecure"):
        Address.parse(other).check(insecure=False)
    Address.parse(other).check(insecure=True)
    assert f"anyone who reaches {other}" in caplog.text


def test_port_0_gives_a_port_which_is_then_in_use_for_another_shard():
    first = Address.parse("localhost:0")
    sockets = first.listen()
    host, port = first.bound(sockets[0]).rsplit(":", 1)
    assert host == "127.0.0.1"
    with pytest.raises(CannotListen, match=f"port {port} is in use"):
        bind(f"{host}:{port}")
    for sock in sockets:
        sock.close()


def test_a_port_in_use_is_said_before_anything_takes_long():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ServerOptions(shard=0, of=1, listen=f"127.0.0.1:{port}")
        with pytest.raises(CannotListen, match=f"port {port} is in use"):
            server._check(options, Address.parse(options.listen))


@on_linux
def test_a_unix_socket_lies_beside_a_tcp_port_and_goes_with_it():
    main, beside = Address.parse("127.0.0.1:0").listen()
    name = local_socket("127.0.0.1", main.getsockname()[1])
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(name)
    main.close()
    beside.close()
    with socket.socket(socket.AF_UNIX) as worker, pytest.raises(ConnectionRefusedError):
        worker.connect(name)


@on_linux
def test_a_shard_serves_over_tcp_alone_where_the_socket_beside_is_taken(caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(local_socket("127.0.0.1", port))
        assert bind(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
    assert "workers on this machine use TCP" in caplog.text


def test_a_unix_socket_that_another_process_serves_is_not_taken_over(tmp_path):
    path = tmp_path / "shard.sock"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        with pytest.raises(CannotListen, match="another process listens there"):
            bind(f"unix:{path}")
    # left behind by a process that died
    assert bind(f"unix:{path}") == f"unix:{path}"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"shard": 2}, "shard 2 of 2"),
        ({"queue_bytes": 0}, "queue_bytes"),
        ({"durability": "log"}, "log_dir"),
        ({"durability": "memory", "log_dir": Path("logs")}, "log_dir"),
    ],
)
def test_options_without_sense_are_refused(options, what):
    with pytest.raises(ValueError, match=what):
        ServerOptions(**{"shard": 0, "of": 2, **options})


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


def test_ten_lines_a_minute_and_the_number_of_the_others(caplog):
    now = [120.0]
    lines = LinesPerMinute(logging.getLogger("l"), "%d more", clock=lambda: now[0])
    assert sum(lines.may_log() for _ in range(25)) == PER_MINUTE
    assert caplog.text == ""
    now[0] = 180.0
    assert lines.may_log()
    assert caplog.messages == ["15 more"]
    now[0] = 240.0
    assert lines.may_log()
    assert caplog.messages == ["15 more"]


FAILS = """
import sys, resource
from pathlib import Path
from embershard.ps import server
from embershard.ps.options import ServerOptions
from embershard.proto.errors import CannotListen
{before}
try:
    server.serve(ServerOptions(shard=0, of=1, listen=sys.argv[1], announce=Path(sys.argv[2])))
except CannotListen as error:
    sys.exit(7)
"""
FEW_FILES = "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))"
# what gRPC says where it cannot, and what the system says of the file after it
NO_GRPC = """
from embershard.ps.security import hidden_socket
from embershard.ps.transport import transports
tempfile, made = hidden_socket.tempfile.mkdtemp, []
def mkdtemp(prefix, dir):
    made.append(tempfile(prefix=prefix, dir=sys.argv[2]))
    Path(made[-1], "grpc").mkdir()
    return made[-1]
hidden_socket.tempfile.mkdtemp, hidden_socket._LONGEST_FOLDER = mkdtemp, 1000
"""


@pytest.mark.parametrize("before", [FEW_FILES, NO_GRPC])
def test_a_shard_that_cannot_start_says_so_and_leaves_no_file_behind(before, tmp_path):
    command = [sys.executable, "-c", FAILS.format(before=before), f"unix:{tmp_path}/s", str(tmp_path)]
    assert subprocess.run(command, timeout=120).returncode == 7
    assert list(tmp_path.iterdir()) == []


RECOVERS = """
import sys, time
from pathlib import Path
from embershard.ps import server
from embershard.ps.options import ServerOptions
def recover(*_):
    print("recovers", flush=True)
    time.sleep(3600)
server._recover = recover
server.serve(ServerOptions(shard=0, of=1, listen=sys.argv[1], announce=Path(sys.argv[2])))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_shard_that_a_signal_ends_while_it_recovers_leaves_no_file_behind(tmp_path, number):
    command = [sys.executable, "-c", RECOVERS, f"unix:{tmp_path}/s", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shard:
        try:
            assert "recovers" in shard.stdout.readline()
            assert len(list(tmp_path.iterdir())) == 2
            shard.send_signal(number)
            assert shard.wait(120) == 0
        finally:
            shard.kill()
    assert list(tmp_path.iterdir()) == []


NO_THREAD = """
import faulthandler
from embershard.ps import server
from embershard.ps.options import ServerOptions
def refuse(*_, **__):
    raise RuntimeError("unable to start watchdog thread")
faulthandler.dump_traceback_later = refuse
server.serve(ServerOptions(shard=0, of=1, listen="127.0.0.1:0"))
"""


def test_a_shard_ends_on_sigterm_where_the_system_gives_no_thread_to_watch_it():
    with subprocess.Popen([sys.executable, "-c", NO_THREAD], stdout=subprocess.PIPE, text=True) as shard:
        try:
            assert "serving" in shard.stdout.readline()
            shard.terminate()
            assert shard.wait(60) == 0
        finally:
            shard.kill()


HANGS = """
import asyncio
from embershard.ps import server
from embershard.ps.options import ServerOptions
from embershard.ps.transport.transports import Transports
server.GRACE_SECONDS, server.LAST_SECONDS = 0.1, 0.1
async def hang(self):
    await asyncio.sleep(3600)
Transports.close = hang
server.serve(ServerOptions(shard=0, of=1, listen="127.0.0.1:0"))
"""


def test_a_shard_ends_on_sigterm_also_where_something_hangs():
    command = [sys.executable, "-c", HANGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shard:
        try:
            assert "serving" in shard.stdout.readline()
            shard.terminate()
            assert shard.wait(120) == 1
            assert "Timeout" in shard.stderr.read()
        finally:
            shard.kill()


@pytest.mark.parametrize(("reason", "why"), [("No space left on device",) * 2, ("", "did not take them within 4 s")])
def test_a_shard_that_ends_before_its_log_is_written_says_why(reason, why):
    log = SimpleNamespace(status=lambda: ("log", 2**20, 1234, 0.5, reason))
    assert re.match(f"the last 1,234 bytes of events are not in the event log: .*{why}. Nobody", server._unwritten(log))
