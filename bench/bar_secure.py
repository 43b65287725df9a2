"""Attack a shard: whoever is not meant to gets nothing, and what they try costs the shard no memory.

- Every method x role x transport (stream over a Unix socket, over TCP, gRPC), without TLS and with it: 0 answers other
  than the table of roles says; with TLS none over TCP and gRPC without a certificate, whatever the token.
- 100,000 hostile handshakes (noise, half a hello, no token, a wrong token, TLS, HTTP/2) each without TLS and with it:
  memory +<= 64 MiB, and the shard still serves.
- Paths and URLs that lead out of --snapshots: 0 of them are read or written, and nobody is called.
- Its audit log has nothing wrong; of the copies in which one byte was changed, each is found.

Prints one JSON line; exits 1 on anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import numpy as np

from embershard.deploy.authority import Authority
from embershard.proto import spec
from embershard.proto.errors import AuditDamaged, EmbershardError, NotAllowed, PlaceNotAllowed, TLSRequired
from embershard.proto.messages import (
    METHODS,
    Compress,
    Declare,
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
    Request,
    Restore,
    ShardStatus,
    Snapshot,
    TableGradients,
    TableIds,
    TakeSplit,
)
from embershard.proto.security.tls import TLS
from embershard.proto.security.tokens import TokenFile, new_token, pack_token, token_digest, write_private
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.transport import Transport
from embershard.proto.wire import Feature, client_hello
from embershard.ps.security.audit import verify
from embershard.ps.security.roles import LEAST_ROLE, ROLES
from timing import finish, load

SCHEMES = {"stream, Unix": "", "stream, TCP": "tcp://", "grpc": "grpc://"}
MOST_BYTES = 64 * 2**20
PATIENCE = timedelta(seconds=60)
CHANGES = 500  # of the audit log
IDS = np.arange(3, dtype=np.int64)
TABLE = spec.TableSpec(name="items", dim=4, optimizer=spec.SGD(lr=1.0), initializer=spec.Constant(value=0.0))
FLOATS = np.ones((3, 4), np.float32)
REQUESTS: tuple[Request, ...] = (
    Hello(), GetStatus(), Pull(1, (TableIds("items", IDS),)), Declare(TABLE),
    Push(PushToken(1, 1, 1, 1), 0, 1, (TableGradients("items", IDS, FLOATS),)), Load("items", 1, IDS, FLOATS),
    Join(worker=1, epoch=1, workers=1, lease_ms=60_000, staleness=-1), Heartbeat(worker=1, epoch=1),
    Leave(worker=1, epoch=1), Rendezvous(1, 1, "r", np.empty(0, np.uint8)),
    TakeSplit(worker=1, epoch=1, num_splits=1, done=-1), Snapshot(name="s", step="watch"),
    Restore(name="s", step="watch"), Compress(),
)  # fmt: skip


@contextmanager
def shard(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A shard on loopback, and its address."""
    command = [sys.executable, "-m", "embershard.cli", "ps", "--shard", "0", "--of", "1", "--listen", "127.0.0.1:0"]
    command += ["--parent-pid", str(os.getpid()), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"], process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def ask(transport: Transport, request: Request) -> object:
    return transport.submit(request, PATIENCE).result()


def wrong_answers(address: str, tokens: dict[str, Path], tls: TLS | None, seen: Counter[str]) -> list[str]:
    """Requests that were answered though they must not be, or refused though they must not be."""
    wrong = []
    with closing(transport_for(address, token=TokenFile(tokens["admin"]))) as transport:
        ask(transport, Declare(TABLE))  # a reader may declare what is there
    for transport_name, scheme in SCHEMES.items():
        for role, file in tokens.items():
            with closing(transport_for(scheme + address, tls=tls, token=TokenFile(file))) as transport:
                for request in REQUESTS:
                    may = role in ROLES and ROLES.index(role) >= ROLES.index(LEAST_ROLE[type(request)])
                    try:
                        ask(transport, request)
                        got = True
                    except EmbershardError as error:
                        got = not isinstance(error, NotAllowed)
                    seen["requests"] += 1
                    if got is not may:
                        wrong.append(f"{role} over {transport_name}: {METHODS[type(request)][0]} gave {got}")
            if tls is not None and scheme:
                wrong += [f"{role} over {transport_name}, {one}" for one in without_certificate(scheme + address, file)]
                seen["requests"] += len(REQUESTS)
    return wrong


def without_certificate(address: str, token: Path) -> list[str]:
    """Requests that a shard with certificates answers to a client without."""
    answered = []
    with closing(transport_for(address, token=TokenFile(token))) as transport:
        for request in REQUESTS:
            try:
                ask(transport, request)
            except TLSRequired:
                continue
            except EmbershardError as error:
                answered.append(f"no certificate: {METHODS[type(request)][0]} gave {type(error).__name__}")
            else:
                answered.append(f"no certificate: {METHODS[type(request)][0]} was answered")
    return answered


@cache
def tls_hello() -> bytes:
    """The first message of a client that speaks TLS, with no certificate, as gRPC's would."""
    context, outgoing = ssl.create_default_context(), ssl.MemoryBIO()
    context.set_alpn_protocols(["h2"])
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def hostile(chooser: random.Random) -> list[bytes]:
    """What a hostile peer says, a piece at a time."""
    asks, plain, hello = client_hello(Feature.TOKEN), client_hello(Feature(0)), tls_hello()
    return chooser.choice(
        [
            [chooser.randbytes(chooser.randrange(1, 2000))],
            [plain[: chooser.randrange(1, 16)]],
            [plain, chooser.randbytes(64)],
            [asks, pack_token(new_token())],
            [asks, chooser.randbytes(64), chooser.randbytes(4096)],
            [asks, pack_token(None)],
            [asks],
            [b"\x16\x03\x01" + chooser.randbytes(200)],
            [hello],
            [hello, chooser.randbytes(200)],
            [client_hello(Feature.TLS)],
            [client_hello(Feature.TLS), hello],
            [client_hello(Feature.TLS), hello, chooser.randbytes(200)],
            [client_hello(Feature.TLS), plain],
            [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chooser.randbytes(100)],
            [b"GET / HTTP/1.1\r\n\r\n"],
        ]
    )


def flood(address: str, count: int, chooser: random.Random) -> None:
    """So many hostile handshakes, up to 200 of them open at once."""
    host, _, port = address.rpartition(":")
    open_ones: list[socket.socket] = []
    for _ in range(count):
        sock = socket.socket()
        sock.settimeout(5)
        with suppress(OSError):
            sock.connect((host, int(port)))
            for piece in hostile(chooser):
                sock.sendall(piece)
        open_ones.append(sock)
        if len(open_ones) > 200:
            open_ones.pop(chooser.randrange(len(open_ones))).close()
    for sock in open_ones:
        sock.close()


def tricks(root: Path, port: int) -> list[str]:
    """Places that are not below a root, however they are written."""
    above, host = root.parent, f"127.0.0.1:{port}"
    never = ["http", "https", "ftp", "sftp", "ssh", "github", "webhdfs", "smb", "zip", "simplecache", "memory", "local"]
    remote = [
        "s3",
        "gs",
        "abfs",
        "s3a",
        "gcs",
        "az",
        "abfss",
        "hdfs",
        "hf",
        "oss",
        "oci",
        "gdrive",
        "dbfs",
        "FILE",
        "data",
    ]
    return [
        *(f"{scheme}://{host}/x" for scheme in never + remote),
        *(f"{scheme}:{root}" for scheme in never + remote),
        *(f"{scheme}://{host}/x::{inner}" for scheme in never for inner in (root, f"file://{root}")),
        *(f"{scheme}::{inner}" for scheme in never for inner in (f"ftp://{host}/x", f"http://{host}/x", f"file://{root}")),
        *(f"{start}{root}{tail}" for start in ("", "file://", "file:") for tail in (
            "/..", "/../", "/../other", "/inner/../..", "/inner/../../other", "/out", "/out/other",
            "/inner/../out/other", "other", "/./../other", "//../other", "/\0", "/a\nb", "\\..\\other",
            "/../root/out")),
        *(f"{above}{tail}" for tail in ("", "/", "/other", "/rootless", "/Root", "/root2", "/link/out", "/link/..")),
        "/", "//", "/etc", "/tmp", "~", "~root", "~/x", ".", "..", "root", "./root", "file:root", "file:~", "file://",
        "file:///", f"file://localhost{root}", f"file://{host}{root}", " ", "\t", "x" * 10_000,
        *(f"s3://{host}@bucket/{tail}" for tail in ("", "..", "%2e%2e", "?x", "*")),
    ]  # fmt: skip


def placed(address: str, root: Path, listener: socket.socket, seen: Counter[str]) -> list[str]:
    """Tricks that a shard fell for."""
    fell = []
    with closing(transport_for(address)) as transport:
        ask(transport, Declare(TABLE))
        for number, url in enumerate(tricks(root, listener.getsockname()[1]), 1):
            for request in (
                Snapshot(url=url, name="trick", id=number, step="begin"),
                Restore(url=url, name="trick", id=number, sha256="0" * 64, step="begin", replace=True),
            ):
                seen["tricks"] += 1
                try:
                    reply = ask(transport, request)
                    while getattr(reply, "state", "") in ("writing", "reading", "waiting"):
                        time.sleep(0.01)
                        again = Snapshot if isinstance(request, Snapshot) else Restore
                        reply = ask(transport, again(url=url, name="trick", id=number, step="watch"))
                    fell.append(f"{type(request).__name__} {url[:100]!r}: {reply}")
                except PlaceNotAllowed:
                    seen["tricks refused"] += 1
                except EmbershardError as error:
                    fell.append(f"{type(request).__name__} {url[:100]!r}: {type(error).__name__}")
    listener.setblocking(False)
    with suppress(BlockingIOError):
        listener.accept()
        fell.append("the shard called a server that a peer named")
    fell += [f"{path} was written" for path in root.parent.rglob("trick*") if not path.is_relative_to(root)]
    return fell


def unfound_changes(log: Path, chooser: random.Random) -> list[str]:
    """Changes of one byte of an audit log that nobody finds."""
    whole, copy, unfound = log.read_bytes(), log.with_name("copy"), []
    verify(log)
    for _ in range(CHANGES):
        at = chooser.randrange(len(whole))
        copy.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << chooser.randrange(8))]) + whole[at + 1 :])
        with suppress(AuditDamaged):
            verify(copy)
            unfound.append(f"a change of byte {at} of the audit log")
    return unfound


def memory_of(address: str) -> int:
    with closing(transport_for(address)) as transport:
        status = ask(transport, GetStatus())
        assert isinstance(status, ShardStatus)
        return int(status.resident_bytes)


def attacked(
    folder: Path, tls: TLS | None, handshakes: int, chooser: random.Random, seen: Counter[str]
) -> tuple[int, list[str]]:
    """By how many bytes a shard has grown, and what it let happen."""
    root = folder / "places" / "root"
    (root / "inner").mkdir(parents=True)
    (root.parent / "other").mkdir()
    (root / "out").symlink_to(root.parent)
    (root.parent / "link").symlink_to(root)
    tokens = {role: folder / role for role in (*ROLES, "none")}
    lines = []
    for role, file in tokens.items():
        write_private(file, token := new_token())
        if role in ROLES:
            lines.append(f"- {{name: {role}er, role: {role}, token_sha256: '{token_digest(token).hex()}'}}\n")
    write_private(folder / "access.yaml", "".join(lines))
    options = ["--access", str(folder / "access.yaml"), "--audit", str(folder), "--snapshots", str(root)]
    options += [] if tls is None else ["--tls", str(tls.path)]
    with shard(*options) as (address, process), socket.create_server(("127.0.0.1", 0)) as listener:
        failures = wrong_answers(address, tokens, tls, seen)
        flood(address, min(handshakes, 2000), chooser)  # what a shard keeps ready for many is no leak
        before = memory_of(address)
        flood(address, handshakes, chooser)
        grown = memory_of(address) - before
        if grown > MOST_BYTES:
            failures.append(f"memory grew by {grown >> 20} MiB in {handshakes} hostile handshakes")
        failures += placed(address, root, listener, seen)
        token = TokenFile(tokens["admin"])
        with closing(transport_for(f"tcp://{address}", tls=tls, token=token)) as transport:
            if process.poll() is not None or not isinstance(ask(transport, Hello()), Greeting):
                failures.append("the shard no longer serves")
    return grown, failures + unfound_changes(folder / "shard-0" / "audit.jsonl", chooser)


def certificates(folder: Path) -> TLS:
    """A folder that the shard and its clients use."""
    folder.mkdir()
    for name, data in Authority.create("bench").issue("bench", ["127.0.0.1", "localhost"], timedelta(days=30)).items():
        write_private(folder / name, data.decode())
    return TLS(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--handshakes", type=int, default=100_000, help="each without TLS and with it")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chooser, seen, began = random.Random(args.seed), Counter[str](), time.monotonic()
    assert {type(request) for request in REQUESTS} == set(METHODS)
    grown, failures = dict[str, float](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        for side, tls in (("plain", None), ("tls", certificates(Path(name) / "keys"))):
            (Path(name) / side).mkdir()
            num_bytes, wrong = attacked(Path(name) / side, tls, args.handshakes, chooser, seen)
            grown[side] = round(num_bytes / 2**20, 1)
            failures += [f"{side}: {one}" for one in wrong]
    result = {
        "bar": "secure",
        "load": load(),
        "requests": seen["requests"],
        "handshakes": args.handshakes,
        "grown_mib": grown,
        "tricks": seen["tricks"],
        "tricks_refused": seen["tricks refused"],
        "changes_of_the_audit_log": 2 * CHANGES,
        "seconds": round(time.monotonic() - began, 1),
    }
    finish(result, failures)


if __name__ == "__main__":
    main()
