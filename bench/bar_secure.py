"""Attack a shard: whoever is not meant to gets nothing, and what they try costs the shard no memory.

- Every method x role x transport (stream over a Unix socket, over TCP, gRPC): 0 answers other than the table of roles
  says.
- 100,000 hostile handshakes (noise, half a hello, no token, a wrong token, TLS, HTTP/2; with certificates also half a
  handshake, noise inside one, and a stranger's certificate): memory +<= 64 MiB, and the shard still serves.
- Paths and URLs that lead out of --snapshots: 0 of them are read or written, and nobody is called.
- Its audit log has nothing wrong; of the copies in which one byte was changed, each is found.

All of it on a shard without certificates, where tokens have roles, and on one with them, where certificates have roles,
too, and nothing is answered over TCP and gRPC without one, whatever the token. Prints one JSON line; exits 1 on
anything else.
"""

from __future__ import annotations

import argparse
import itertools
import random
import socket
import ssl
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np

from embershard.deploy.authority import Authority
from embershard.deploy.supervisor import LocalShards, ShardSettings
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


def ask(transport: Transport, request: Request) -> object:
    return transport.submit(request, PATIENCE).result()


@dataclass(frozen=True)
class Peer:
    """Who asks: a token, a certificate or both. `role` is what access.yaml gives it; "none" where it has no entry."""

    role: str
    token: Path | None = None
    tls: TLS | None = None

    def transport(self, address: str) -> Transport:
        return transport_for(address, tls=self.tls, token=None if self.token is None else TokenFile(self.token))


def wrong_answers(address: str, peers: list[Peer], schemes: dict[str, str], seen: Counter[str]) -> list[str]:
    """Requests that were answered though they must not be, or refused though they must not be."""
    wrong = []
    with closing(next(peer for peer in peers if peer.role == "admin").transport(address)) as transport:
        ask(transport, Declare(TABLE))  # a reader may declare what is there
    for (transport_name, scheme), peer in itertools.product(schemes.items(), peers):
        with closing(peer.transport(scheme + address)) as transport:
            for request in REQUESTS:
                may = peer.role in ROLES and ROLES.index(peer.role) >= ROLES.index(LEAST_ROLE[type(request)])
                try:
                    ask(transport, request)
                    got = True
                except EmbershardError as error:
                    got = not isinstance(error, NotAllowed)
                seen["requests"] += 1
                if got is not may:
                    by = "token" if peer.token else "certificate"
                    with_tls = "" if peer.tls is None else " with TLS"
                    method = METHODS[type(request)][0]
                    wrong.append(f"{peer.role} by {by} over {transport_name}{with_tls}: {method} gave {got}")
    return wrong


def answered_without_certificate(address: str, token: Path, seen: Counter[str]) -> list[str]:
    """Requests that a shard with certificates answers to a client without."""
    answered = []
    for scheme in filter(None, SCHEMES.values()):
        with closing(transport_for(scheme + address, token=TokenFile(token))) as transport:
            for request in REQUESTS:
                seen["requests"] += 1
                try:
                    ask(transport, request)
                except TLSRequired:
                    continue
                except EmbershardError as error:
                    answered.append(f"{scheme} no certificate: {METHODS[type(request)][0]} gave {type(error).__name__}")
                else:
                    answered.append(f"{scheme} no certificate: {METHODS[type(request)][0]} was answered")
    return answered


def hostile(chooser: random.Random) -> list[bytes]:
    """What a hostile peer says, a piece at a time."""
    asks, plain = client_hello(Feature.TOKEN), client_hello(Feature(0))
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
            [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chooser.randbytes(100)],
            [b"GET / HTTP/1.1\r\n\r\n"],
        ]
    )


def client_hello_of_tls(context: ssl.SSLContext) -> bytes:
    """The first message of a TLS handshake."""
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()


def hostile_in_tls(chooser: random.Random, context: ssl.SSLContext) -> list[bytes]:
    """What a hostile peer says to a shard with certificates."""
    asks, hello = client_hello(Feature.TLS), client_hello_of_tls(context)
    return chooser.choice(
        [
            [asks],
            [asks, hello],
            [asks, hello[: chooser.randrange(1, len(hello))]],
            [asks, hello, chooser.randbytes(chooser.randrange(1, 4000))],
            [asks, b"\x16\x03\x03\x40\x00" + chooser.randbytes(4000)],
            [hello],
            [hello, chooser.randbytes(2000)],
            [client_hello(Feature.TLS | Feature.TOKEN), pack_token(new_token())],
        ]
    )


def shake_hands(sock: socket.socket, context: ssl.SSLContext) -> None:
    """A whole TLS handshake with a certificate of nobody's, as far as it gets, and a hello inside it."""
    sock.sendall(client_hello(Feature.TLS))
    sock.recv(len(client_hello(Feature.TLS)), socket.MSG_WAITALL)
    with context.wrap_socket(sock, server_hostname="localhost", suppress_ragged_eofs=False) as inside:
        inside.sendall(client_hello(Feature(0)))
        if inside.recv(1):
            raise SystemExit("a shard answered a hello behind a certificate that its authority has not signed")


def flood(address: str, count: int, chooser: random.Random, stranger: ssl.SSLContext | None) -> None:
    """So many hostile handshakes, up to 200 of them open at once; `stranger` where the shard has certificates."""
    host, _, port = address.rpartition(":")
    open_ones: list[socket.socket] = []
    for number in range(count):
        sock = socket.socket()
        sock.settimeout(5)
        with suppress(OSError):
            sock.connect((host, int(port)))
            if stranger is not None and number % 100 == 0:
                shake_hands(sock, stranger)
                continue
            says = hostile(chooser) if stranger is None or number % 2 else hostile_in_tls(chooser, stranger)
            for piece in says:
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
    remote = "s3 gs abfs s3a gcs az abfss hdfs hf oss oci gdrive dbfs FILE data".split()
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


def make_peers(folder: Path, authority: Authority | None) -> list[Peer]:
    """Peers of each role and one of none, by tokens, and by certificates of an authority; and their access.yaml."""
    peers, lines = [], []

    def certificate(name: str) -> TLS | None:
        if authority is None:
            return None
        (folder / name).mkdir()
        for file, data in authority.issue(name, ("localhost", "127.0.0.1"), timedelta(days=60)).items():
            write_private(folder / name / file, data.decode())
        return TLS(folder / name)

    common = certificate("worker")
    certificate("shard")
    for role in (*ROLES, "none"):
        write_private(folder / f"{role}.token", token := new_token())
        peers.append(Peer(role, folder / f"{role}.token", common))
        if role in ROLES:
            lines.append(f"- {{name: {role}er, role: {role}, token_sha256: '{token_digest(token).hex()}'}}\n")
        if authority is not None:
            peers.append(Peer(role, None, certificate(f"{role}-node")))
            if role in ROLES:
                lines.append(f"- {{name: {role}-node, role: {role}, certificate: {role}-node}}\n")
    write_private(folder / "access.yaml", "".join(lines))
    return peers


def attack(folder: Path, authority: Authority | None, args: argparse.Namespace, seen: Counter[str]) -> list[str]:
    """What a shard fell for, with certificates where there is an `authority`."""
    chooser = random.Random(args.seed)
    root = folder / "places" / "root"
    (root / "inner").mkdir(parents=True)
    (root.parent / "other").mkdir()
    (root / "out").symlink_to(root.parent)
    (root.parent / "link").symlink_to(root)
    peers = make_peers(folder, authority)
    by_socket = [peer for peer in peers if peer.token]  # a Unix socket shows the shard no certificate
    options = ["--access", str(folder / "access.yaml"), "--audit", str(folder), "--snapshots", str(root)]
    stranger = None
    if authority is not None:
        options += ["--tls", str(folder / "shard")]
        foreign = Authority.create("a stranger").issue("worker", ("localhost",), timedelta(days=60))
        (folder / "foreign.pem").write_bytes(foreign["tls.key"] + foreign["tls.crt"])
        stranger = ssl.create_default_context(cafile=str(folder / "shard" / "ca.crt"))
        stranger.load_cert_chain(folder / "foreign.pem")
    unix, tcp = ({name: scheme for name, scheme in SCHEMES.items() if bool(scheme) is far} for far in (False, True))
    with LocalShards(1, ShardSettings(options=options)) as shard, socket.create_server(("127.0.0.1", 0)) as listener:
        (address,) = shard.addresses
        failures = wrong_answers(address, by_socket, unix, seen) + wrong_answers(address, peers, tcp, seen)
        if authority is not None:
            for token in filter(None, (peer.token for peer in peers)):
                failures += answered_without_certificate(address, token, seen)
        flood(address, min(args.handshakes, 2000), chooser, stranger)  # what a shard keeps ready for many is no leak
        before = memory_of(address)
        flood(address, args.handshakes, chooser, stranger)
        grown = memory_of(address) - before
        seen["grown_mib"] = max(seen["grown_mib"], grown >> 20)
        if grown > MOST_BYTES:
            failures.append(f"memory grew by {grown >> 20} MiB in {args.handshakes} hostile handshakes")
        failures += placed(address, root, listener, seen)
        with closing(peers[0].transport(f"tcp://{address}")) as transport:
            if shard.failure or not isinstance(ask(transport, Hello()), Greeting):
                failures.append("the shard no longer serves")
    failures += unfound_changes(folder / "shard-0" / "audit.jsonl", chooser)
    return [f"{'without' if authority is None else 'with'} TLS: {failure}" for failure in failures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--handshakes", type=int, default=100_000, help="with each shard")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    seen, began = Counter[str](), time.monotonic()
    assert {type(request) for request in REQUESTS} == set(METHODS)
    with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as secured:
        failures = attack(Path(plain), None, args, seen)
        failures += attack(Path(secured), Authority.create("the bench's authority"), args, seen)
    result = {
        "bar": "secure",
        "tls": [False, True],
        "load": load(),
        "requests": seen["requests"],
        "handshakes": args.handshakes,
        "grown_mib": seen["grown_mib"],
        "tricks": seen["tricks"],
        "tricks_refused": seen["tricks refused"],
        "changes_of_the_audit_log": 2 * CHANGES,
        "seconds": round(time.monotonic() - began, 1),
    }
    finish(result, failures)


if __name__ == "__main__":
    main()
