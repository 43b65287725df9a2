"""One shard as a process: listen, say so on stdout, serve until a signal, finish what was accepted, end."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from embershard.proto.errors import CannotListen
from embershard.proto.monitoring.logs import LogFormat, log_as_json
from embershard.ps.monitoring.systemd import notify
from embershard.ps.security.access_file import read_access_file
from embershard.ps.security.audit import AuditLog
from embershard.ps.security.gate import Gate
from embershard.ps.security.places import SnapshotPlaces
from embershard.ps.transport.address import BACKLOG, Address

if TYPE_CHECKING:
    from grpc.aio import Server
    from grpc_health.v1.health import aio as health_aio

    from embershard.proto.monitoring.exporter import MetricsServer
    from embershard.proto.monitoring.tracing import RequestTracer
    from embershard.proto.security.credentials import CertificateFolder
    from embershard.proto.security.tls import TLS
    from embershard.ps.apply_thread import ApplyThread
    from embershard.ps.dispatch import Dispatch
    from embershard.ps.journal.progress import RecoveryProgress
    from embershard.ps.monitoring.export import MonitoredShard
    from embershard.ps.recovery import ShardLog
    from embershard.ps.security.access import Access
    from embershard.ps.security.hidden_socket import HiddenSocket
    from embershard.ps.security.peers import Peer
    from embershard.ps.shard import Shard
    from embershard.ps.transport.stream import StreamServer
    from embershard.ps.transport.tls import TLSPort
    from embershard.ps.transport.torch_rpc import RpcServer

GRACE_SECONDS = 30.0  # for what was accepted before a signal came
LAST_SECONDS = 8.0  # after them, for all that is left: less than a supervisor waits before it kills
_LOG_SECONDS = 4.0  # for what is not written yet
_REPLY_SECONDS = 2.0  # for the last replies; a health check's open stream would use all of a longer time
_PARENT_POLL_SECONDS = 0.5

Durability = Literal["memory", "log", "fsync"]

_log = logging.getLogger("embershard.ps")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The options that one shard's process is started with.

    `listen` is "host:port" (port 0: any free one), or "unix:/path". `imports` are modules with row optimizers
    and codecs. `memory` bytes are what the tables may take, by default 80 % of the machine's. More than `connections`
    at a time are refused. `parent_pid`, if not 0, is the process without which this one ends. `rpc` is "host:port" for
    torch.distributed.rpc, which is not served without it; `rpc_executes_pickles` allows it to be an address that other
    machines reach. `durability` says when a change is acknowledged: "memory" at once; "log" once the kernel has its
    record in `log_dir`, "fsync" once the disk has. By default it is "log" with a `log_dir`, else "memory". `log_bytes`
    is what the shard's folder there may take, where that is enough for two images of its state and a few segments.
    `restarts` is how often its supervisor has started it again, for its status. `metrics` is "host:port" for /metrics
    and the probes; port 0: any free one. `log_format` is that of its log, on stderr. `trace` is the URL
    of the OpenTelemetry collector that gets the spans of traced requests.
    With `tls`, whoever comes over TCP has to have a certificate of an authority that its folder names.
    `snapshots` are the folders and URLs at or below which snapshots may lie; without one they may lie nowhere, or,
    where no other machine reaches the shard, anywhere. `access` is the file that says who may do what. On loopback the
    shard's own user needs no line in it, but for other users of the machine only `insecure_loopback` opens it. In the
    folder `audit` it keeps a log of who came, and what they did. In the folder `announce` it tells clients its address,
    which is the one that it listens to, or `advertise`, as HOST or HOST:PORT.
    """

    shard: int
    of: int
    listen: str = "127.0.0.1:7700"
    imports: tuple[str, ...] = ()
    insecure: bool = False
    queue_bytes: int = 256 * 2**20
    memory: int | None = None
    connections: int = 10_000
    parent_pid: int = 0
    rpc: str = ""
    rpc_executes_pickles: bool = False
    durability: Durability | None = None
    log_dir: Path | None = None
    log_bytes: int | None = None
    restarts: int = 0
    metrics: str = ""
    log_format: LogFormat = "text"
    trace: str = ""
    tls: TLS | None = None
    snapshots: tuple[str, ...] = ()
    access: Path | None = None
    insecure_loopback: bool = False
    audit: Path | None = None
    announce: Path | None = None
    advertise: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.of:
            raise ValueError(f"shard must be 0..of-1, got shard {self.shard} of {self.of}")
        if self.connections < 1:
            raise ValueError(f"connections must be at least 1, got {self.connections}")
        if self.queue_bytes < 1:
            raise ValueError(f"queue_bytes must be at least 1, got {self.queue_bytes}")
        check_durability(self.durability, self.log_dir)


def check_durability(durability: Durability | None, log_dir: Path | None) -> Durability:
    """The mode of a shard; ValueError where it has no folder for its log, or one that it would not use."""
    mode = durability or ("memory" if log_dir is None else "log")
    if mode != "memory" and log_dir is None:
        raise ValueError(f"durability {mode} needs a folder for the log: log_dir")
    if mode == "memory" and log_dir is not None:
        raise ValueError("durability memory writes no log: leave out log_dir, or choose log or fsync")
    return mode


def serve(options: ServerOptions) -> int:
    """Run the shard until SIGTERM or SIGINT; its exit code: 0, 130 after SIGINT, 1 where accepted work was dropped.

    CannotListen where the address is not to be had, BadAccessFile where nobody can say who may do what.
    """
    json_log = None
    if options.log_format == "json":
        json_log = log_as_json(sys.stderr, shard=options.shard)
    else:
        log = logging.StreamHandler(sys.stderr)
        log.setFormatter(LineFormatter(f"%(asctime)s shard {options.shard} %(levelname)s %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[log])
    _allow_files()
    if options.parent_pid:
        threading.Thread(target=_end_with, args=(options.parent_pid,), name="parent", daemon=True).start()
    address = Address.parse(options.listen)
    certificates = _certificates(options)
    _check(options, address)
    places = SnapshotPlaces(options.snapshots or (None if address.is_local else ()))
    with _metrics_server(options) as metrics, _tracer(options) as tracer:
        shard = _make_shard(options, places)
        if json_log is not None:
            json_log.fields["instance"] = shard.greeting.instance

        import uvloop

        return uvloop.run(_serve(shard, address, options, certificates, metrics, tracer))


def _check(options: ServerOptions, address: Address) -> None:
    """CannotListen where others than who may could reach the shard, and BadAccessFile, before anything takes long."""
    has_tls = options.tls is not None and not address.path
    address.check(options.insecure, encrypted=has_tls, asks=has_tls or options.access is not None)
    if options.announce is not None or options.advertise:
        from embershard.ps.transport.announce import check_advertise

        check_advertise(options.advertise, options.listen, address.host, announces=options.announce is not None)
    if options.access is not None:
        read_access_file(options.access)
    if options.audit is not None and options.access is None and (has_tls or not address.is_local):
        raise CannotListen(address=options.listen, reason="an audit log needs to know who comes: pass --access, too")
    if options.rpc and (options.access is not None or not (options.insecure_loopback or options.insecure)):
        raise CannotListen(
            address=options.rpc,
            reason="torch.distributed.rpc asks nobody who they are, and runs what it is sent: pass "
            "--insecure-loopback, if no other user of this machine is a stranger, and leave out --access",
        )


@contextmanager
def _tracer(options: ServerOptions) -> Iterator[RequestTracer | None]:
    """What makes spans of traced requests; None where nobody wants them."""
    if not options.trace:
        yield None
        return
    from embershard.proto.monitoring.tracing import RequestTracer, SpanSender

    with SpanSender(options.trace, "embershard-shard", shard=options.shard) as sender:
        yield RequestTracer(sender)


@contextmanager
def _metrics_server(options: ServerOptions) -> Iterator[MetricsServer | None]:
    """The server of --metrics, which shows nothing yet; None where none was asked for."""
    if not options.metrics:
        yield None
        return
    from embershard.proto.monitoring.exporter import MetricsServer
    from embershard.proto.monitoring.metrics import SHARD_METRICS

    with MetricsServer(options.metrics, SHARD_METRICS, {"shard": str(options.shard)}) as server:
        yield server


def _certificates(options: ServerOptions) -> CertificateFolder | None:
    if options.tls is None:
        return None
    from embershard.proto.security.credentials import CertificateFolder  # a shard without TLS need not load this

    return CertificateFolder(options.tls)


def _make_shard(options: ServerOptions, places: SnapshotPlaces) -> Shard:
    # imported here: the address and the log are checked before numba is imported
    from embershard.proto.codec.user_defined import CodecRegistry
    from embershard.proto.compiled.jit import compile_missing
    from embershard.proto.routing import Placement
    from embershard.ps.shard import Shard
    from embershard.ps.table.optimizers import OptimizerRegistry

    compile_missing()  # not during the first requests: workers would wait for their answers in vain
    placement, optimizers = Placement.even(options.of), OptimizerRegistry(options.imports)
    codecs = CodecRegistry(options.imports)
    return Shard(
        options.shard,
        placement,
        optimizers,
        codecs=codecs,
        version=_version(),
        memory=options.memory,
        places=places,
    )


def _recover(shard: Shard, options: ServerOptions, progress: RecoveryProgress) -> ShardLog | None:
    """Give the shard what its log says; None where it has none."""
    mode = check_durability(options.durability, options.log_dir)
    if mode == "memory" or options.log_dir is None:
        return None
    from embershard.ps.journal.folder import LogFolder, check_log_dir, log_folder
    from embershard.ps.journal.progress import RecoveryRate
    from embershard.ps.recovery import recover, sha256_of_modules

    rate = RecoveryRate(_seconds_since_start())
    check_log_dir(options.log_dir.absolute(), options.shard, options.of)
    path = log_folder(options.log_dir.absolute(), options.shard)
    modules = sha256_of_modules(options.imports)
    folder = LogFolder.open(path, shard=options.shard, num_shards=options.of, modules=modules, package=_version())
    log = recover(shard, folder, mode, progress=progress, rate=rate, limit_bytes=options.log_bytes)
    log.start()
    return log


def _seconds_since_start() -> float:
    """The age of this process; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


async def _serve(
    shard: Shard,
    address: Address,
    options: ServerOptions,
    certificates: CertificateFolder | None = None,
    metrics: MetricsServer | None = None,
    tracer: RequestTracer | None = None,
) -> int:
    from embershard.ps.transport.announce import advertised, announced

    sockets = address.listen()
    audit = None if options.audit is None else AuditLog(options.audit / f"shard-{options.shard}" / "audit.jsonl")
    gate = _gate(address, sockets[0], options, audit)  # before anybody is answered: a client reads the token then
    bound = advertised(options.advertise, address.bound(sockets[0]))
    try:
        with announced(options.announce, shard.greeting, bound, options.tls):
            return await _serve_at(sockets, bound, gate.access, shard, address, options, certificates, metrics, tracer)
    finally:
        gate.close()


def _gate(address: Address, main: socket.socket, options: ServerOptions, audit: AuditLog | None) -> Gate:
    if address.path:
        return Gate.at_unix_socket(options.access, audit)
    if address.is_local and options.tls is None:
        ip, port = main.getsockname()[:2]
        return Gate.on_loopback(ip, port, options.access, audit, insecure=options.insecure_loopback)
    return Gate.on_network(options.access, audit)  # with certificates, nobody but who has one gets so far


async def _serve_at(
    sockets: list[socket.socket],
    bound: str,
    access: Access | None,
    shard: Shard,
    address: Address,
    options: ServerOptions,
    certificates: CertificateFolder | None,
    metrics: MetricsServer | None,
    tracer: RequestTracer | None,
) -> int:
    from embershard.ps.apply_thread import ApplyThread
    from embershard.ps.dispatch import Dispatch
    from embershard.ps.journal.progress import RecoveryProgress
    from embershard.ps.monitoring.counters import Counters

    loop = asyncio.get_running_loop()
    stop = _Stop(loop)
    apply = ApplyThread(max_bytes=options.queue_bytes, counters=Counters(options.restarts))
    progress = RecoveryProgress()
    dispatch = Dispatch(shard, apply, progress, access)
    dispatch.tracer = tracer
    if metrics is not None:
        metrics.monitored = _monitored(dispatch, apply, loop, None if address.path else certificates)
    transports = await _Transports.start(dispatch, sockets, options, certificates)
    # in a thread: workers are told meanwhile how far it is
    recovery = loop.run_in_executor(None, _recover, shard, options, progress)
    either: tuple[asyncio.Future[Any], ...] = recovery, stop.received
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not recovery.done():
            _end_while_recovering(stop.received.result())
        log = await recovery
    except BaseException:
        await transports.close()
        raise
    dispatch.open()
    await transports.open()
    ready = {"event": "serving", "shard": options.shard, "of": options.of, "address": bound, "pid": os.getpid()}
    if transports.rpc is not None:
        ready["rpc"] = transports.rpc.address
    if metrics is not None:
        ready["metrics"] = metrics.address
    _settle()
    print(json.dumps(ready), flush=True)
    notify(f"READY=1\nSTATUS=shard {options.shard} of {options.of} serves at {bound}")
    loop.run_in_executor(
        None, import_module, "embershard.proto.snapshot.storage"
    )  # the first snapshot need not wait for it
    _log.info("serving at %s (shard %d of %d, instance %s)", bound, options.shard, options.of, shard.greeting.instance)

    signum = await stop.received
    notify("STOPPING=1")
    _log.info("%s: finishing %d queued bytes", signal.Signals(signum).name, apply.queued_bytes)
    await transports.health.enter_graceful_shutdown()
    apply.close()  # from here on, new requests are told that the shard is shutting down
    done = await asyncio.to_thread(apply.join, GRACE_SECONDS)
    if log is not None and done:  # the last answers wait for it
        done = await asyncio.to_thread(log.close, _LOG_SECONDS)
    await transports.close()
    if address.path:
        Path(address.path).unlink(missing_ok=True)
    if not done:
        _log.error(
            "dropped %d queued bytes: they were not applied within %.0f s of the stop",
            apply.queued_bytes,
            GRACE_SECONDS,
        )
        return 1
    _log.info("done: everything accepted was applied")
    return 130 if signum == signal.SIGINT else 0


def _monitored(
    dispatch: Dispatch, apply: ApplyThread, loop: asyncio.AbstractEventLoop, certificates: CertificateFolder | None
) -> MonitoredShard:
    """The shard as its exporter sees it."""
    from embershard.proto.monitoring.exporter import LoopWatch
    from embershard.ps.monitoring.export import MonitoredShard

    watch = LoopWatch(loop)
    return MonitoredShard(
        dispatch.status,
        dispatch.counters,
        lambda: {"I/O loop": watch.idle_seconds, "apply thread": apply.idle_seconds},
        certificates,
    )


def _end_while_recovering(signum: int) -> NoReturn:
    """End the process: nothing was accepted, and a recovery that is broken off leaves a log that is as good."""
    _log.info("%s: the recovery is broken off; the next start begins it again", signal.Signals(signum).name)
    sys.stdout.flush()
    os._exit(130 if signum == signal.SIGINT else 0)


@dataclass(frozen=True)
class _Transports:
    """What brings requests to the shard."""

    grpc: list[Server]
    health: health_aio.HealthServicer
    stream: StreamServer
    listeners: list[asyncio.Server]
    rpc: RpcServer | None
    hidden: list[HiddenSocket]  # at which gRPC listens: others come by the shard's own address
    following: asyncio.Task[None] | None  # of the files of certificates

    @classmethod
    async def start(
        cls,
        dispatch: Dispatch,
        sockets: list[socket.socket],
        options: ServerOptions,
        certificates: CertificateFolder | None,
    ) -> _Transports:
        from grpc_health.v1 import health
        from grpc_health.v1.health_pb2 import HealthCheckResponse

        from embershard.proto.messages import SERVICE
        from embershard.ps.security.hidden_socket import HiddenSocket
        from embershard.ps.transport.grpc import ShardService, make_server
        from embershard.ps.transport.pipe import PipedServer
        from embershard.ps.transport.stream import StreamServer

        rpc = await _start_rpc(dispatch, options) if options.rpc else None
        healthy = health.aio.HealthServicer()
        for name in ("", SERVICE):
            await healthy.set(name, HealthCheckResponse.NOT_SERVING)
        hidden = [HiddenSocket()]
        piped = PipedServer(hidden[0].path)
        server = make_server(ShardService(dispatch, piped.peers, certificates), healthy, certificates)
        server.add_insecure_port(hidden[0].target)
        hidden[0].hide()
        piped.path = hidden[0].path
        servers, tls, following = [server], None, None
        if certificates is not None and sockets[0].family != socket.AF_UNIX:
            hidden += [HiddenSocket(), HiddenSocket()]
            tls, refusing = _tls_port(server, certificates, hidden[1:], piped.peers)
            servers.append(refusing)
        for one in servers:
            await one.start()
        stream = StreamServer(dispatch, foreign=piped, tls=tls, max_connections=options.connections)
        if certificates is not None:
            from embershard.ps.transport.tls import follow

            following = asyncio.create_task(follow(certificates, stream.check_certificates))
        listeners = [await _listen(stream, sock) for sock in sockets]
        return cls(servers, healthy, stream, listeners, rpc, hidden, following)

    async def open(self) -> None:
        """Say to those who ask about the health of this server that it serves."""
        from grpc_health.v1.health_pb2 import HealthCheckResponse

        from embershard.proto.messages import SERVICE

        for name in ("", SERVICE):
            await self.health.set(name, HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Stop listening, and send the last replies."""
        for listener in self.listeners:
            listener.close()
        if self.following is not None:
            self.following.cancel()
        servers = (server.stop(_REPLY_SECONDS) for server in self.grpc)
        await asyncio.gather(self.stream.close(_REPLY_SECONDS), *servers)
        for hidden in self.hidden:
            hidden.close()
        if self.rpc is not None:
            await self.rpc.close()


async def _start_rpc(dispatch: Dispatch, options: ServerOptions) -> RpcServer:
    from embershard.ps.transport.torch_rpc import RpcServer  # imports torch, which a shard does not need otherwise

    place = Address.parse(options.rpc)
    return await RpcServer.start(dispatch, place.host, place.port, executes_pickles=options.rpc_executes_pickles)


def _tls_port(
    server: Server, certificates: CertificateFolder, hidden: list[HiddenSocket], peers: dict[str, Peer]
) -> tuple[TLSPort, Server]:
    """What connections over TCP go through, with a second gRPC server, which refuses those without TLS.

    They listen at the two `hidden` sockets; `peers` are the server's.
    """
    import grpc.aio

    from embershard.proto.errors import BadCertificate, TLSRequired
    from embershard.ps.transport.grpc import Refuses, server_credentials
    from embershard.ps.transport.pipe import PipedServer
    from embershard.ps.transport.tls import TLSPort

    try:
        server.add_secure_port(hidden[0].target, server_credentials(certificates))
    except RuntimeError:  # gRPC has a TLS library of its own, which is stricter, and says why on stderr alone
        for one in hidden:
            one.close()
        raise BadCertificate(
            path=str(certificates.tls.path),
            problem="unreadable",
            reason="gRPC cannot use its certificate or its key",
            remedy="Issue one with the key usage digitalSignature (`embershard keys issue`)",
        ) from None
    refusing = grpc.aio.server()
    refusing.add_generic_rpc_handlers((Refuses(TLSRequired()),))
    refusing.add_insecure_port(hidden[1].target)
    for one in hidden:
        one.hide()
    return TLSPort(certificates, PipedServer(hidden[0].path, peers), PipedServer(hidden[1].path)), refusing


def _settle() -> None:
    """Take what exists now out of later garbage collections: it stays, and looking at it cost more than serving."""
    gc.collect()
    gc.freeze()


async def _listen(stream: StreamServer, sock: socket.socket) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    if sock.family == socket.AF_UNIX:
        return await loop.create_unix_server(stream.protocol, sock=sock, backlog=BACKLOG)
    return await loop.create_server(stream.protocol, sock=sock, backlog=BACKLOG)


class LineFormatter(logging.Formatter):
    """One line for each record, and indented ones for a traceback: no text of a peer can look like another record."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record, its control characters escaped."""
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """The traceback, its lines indented and their control characters escaped."""
        return "\n".join(f"    {_escaped(line)}" for line in super().formatException(ei).split("\n"))


# C0, DEL, C1, and what else ends a line
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}


def _escaped(text: str) -> str:
    return text.translate(_CONTROLS)


def _allow_files() -> None:
    """Have as many descriptors as the system allows without asking: a connection to gRPC takes three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Stop:
    """The first SIGTERM or SIGINT; the second ends the process on the spot."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.received: asyncio.Future[int] = loop.create_future()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)

    def _on_signal(self, signum: int) -> None:
        if self.received.done():
            os._exit(128 + signum)
        # whatever hangs, a library's threads included: the process ends, and says where it was
        faulthandler.dump_traceback_later(GRACE_SECONDS + LAST_SECONDS, exit=True)
        self.received.set_result(signum)


def _end_with(parent_pid: int) -> None:
    """End this process once its parent is gone, however the parent ended.

    Asked twice a second: PR_SET_PDEATHSIG would end it with the parent's thread instead and exists on Linux only, and
    a pipe stays open in whatever else the parent forked (a data loader's processes).
    """
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_POLL_SECONDS)
    _log.warning("the process that started this shard is gone")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS + 5)
    os._exit(1)


def _version() -> str:
    try:
        return version("embershard")
    except PackageNotFoundError:
        return "unknown"
