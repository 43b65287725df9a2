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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.proto.errors import CannotListen
from embershard.proto.monitoring.logs import log_as_json
from embershard.proto.user_modules import sha256_of_modules, version_of
from embershard.ps.monitoring.log_lines import log_as_lines
from embershard.ps.monitoring.systemd import notify
from embershard.ps.options import ServerOptions, check_durability
from embershard.ps.security.access_file import read_access_file
from embershard.ps.security.audit import AuditLog
from embershard.ps.security.gate import Gate
from embershard.ps.security.places import SnapshotPlaces
from embershard.ps.transport.address import Address

if TYPE_CHECKING:
    from embershard.proto.monitoring.exporter import MetricsServer
    from embershard.proto.monitoring.tracing import RequestTracer
    from embershard.proto.security.credentials import CertificateFolder
    from embershard.ps.apply_thread import ApplyThread
    from embershard.ps.dispatch import Dispatch
    from embershard.ps.journal.progress import RecoveryProgress
    from embershard.ps.monitoring.export import MonitoredShard
    from embershard.ps.recovery import ShardLog
    from embershard.ps.security.access import Access
    from embershard.ps.shard import Shard
    from embershard.ps.transport.transports import Transports

GRACE_SECONDS = 30.0  # for what was accepted before a signal came
LAST_SECONDS = 8.0  # after them, for all that is left: less than a supervisor waits before it kills
_LEAST_FILES = 64  # 25 to serve, and those that are open for a moment: of imports, the log, snapshots
_LOG_SECONDS = 4.0  # for what is not written yet
_PARENT_POLL_SECONDS = 0.5

_log = logging.getLogger("embershard.ps")


def serve(options: ServerOptions) -> int:
    """Run the shard until SIGTERM or SIGINT; its exit code: 0, 130 after SIGINT, 1 where accepted work was dropped.

    CannotListen where the address is not to be had, BadAccessFile where nobody can say who may do what.
    """
    json_log = None
    if options.log_format == "json":
        json_log = log_as_json(sys.stderr, shard=options.shard)
    else:
        log_as_lines(options.shard)
    _allow_files(options)
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

        return uvloop.run(_ShardServer(options, address, shard, certificates, metrics, tracer).run())


def _check(options: ServerOptions, address: Address) -> None:
    """CannotListen where others than who may could reach the shard, and BadAccessFile, before anything takes long."""
    has_tls = options.tls is not None and not address.path
    address.check(options.insecure, encrypted=has_tls, asks=has_tls or options.access is not None)
    address.check_free()
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
        version=version_of(),
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
    from embershard.ps.recovery import recover

    rate = RecoveryRate(_seconds_since_start())
    check_log_dir(options.log_dir.absolute(), options.shard, options.of)
    path = log_folder(options.log_dir.absolute(), options.shard)
    modules = sha256_of_modules(options.imports)
    folder = LogFolder.open(path, shard=options.shard, num_shards=options.of, modules=modules, package=version_of())
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


@dataclass(frozen=True, slots=True)
class _ShardServer:
    """What serves one shard at its address, and those who watch it."""

    options: ServerOptions
    address: Address
    shard: Shard
    certificates: CertificateFolder | None
    metrics: MetricsServer | None
    tracer: RequestTracer | None

    async def run(self) -> int:
        """Serve until a signal; the exit code."""
        from embershard.ps.transport.announce import advertised, announced

        stop = _Stop(asyncio.get_running_loop())
        options, sockets = self.options, self.address.listen()
        with _ended_while_recovering(), ExitStack() as stack:
            if self.address.path:
                stack.callback(Path(self.address.path).unlink, missing_ok=True)
            log = None if options.audit is None else AuditLog(options.audit / f"shard-{options.shard}" / "audit.jsonl")
            gate = self._gate(sockets[0], log)  # before anybody is answered: a client reads the token then
            stack.callback(gate.close)
            bound = advertised(options.advertise, self.address.bound(sockets[0]))
            stack.enter_context(announced(options.announce, self.shard.greeting, bound, options.tls))
            return await self._serve(sockets, bound, gate.access, stop)

    def _gate(self, main: socket.socket, audit: AuditLog | None) -> Gate:
        options = self.options
        if self.address.path:
            return Gate.at_unix_socket(options.access, audit)
        if self.address.is_local and options.tls is None:
            ip, port = main.getsockname()[:2]
            return Gate.on_loopback(ip, port, options.access, audit, insecure=options.insecure_loopback)
        return Gate.on_network(options.access, audit)  # with certificates, nobody but who has one gets so far

    async def _serve(self, sockets: list[socket.socket], bound: str, access: Access | None, stop: _Stop) -> int:
        from embershard.ps.apply_thread import ApplyThread
        from embershard.ps.dispatch import Dispatch
        from embershard.ps.journal.progress import RecoveryProgress
        from embershard.ps.monitoring.counters import Counters
        from embershard.ps.transport.transports import Transports

        loop = asyncio.get_running_loop()
        apply = ApplyThread(max_bytes=self.options.queue_bytes, counters=Counters(self.options.restarts))
        progress = RecoveryProgress()
        dispatch = Dispatch(self.shard, apply, progress, access)
        dispatch.tracer = self.tracer
        if self.metrics is not None:
            certificates = None if self.address.path else self.certificates
            self.metrics.monitored = _monitored(dispatch, apply, loop, certificates)
        transports = await Transports.start(dispatch, sockets, self.options, self.certificates)
        # in a thread: workers are told meanwhile how far it is
        recovery = loop.run_in_executor(None, _recover, self.shard, self.options, progress)
        either: tuple[asyncio.Future[Any], ...] = recovery, stop.received
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not recovery.done():
                raise _RecoveryBrokenOff(stop.received.result())
            log = await recovery
        except BaseException:
            await transports.close()
            raise
        dispatch.open()
        await transports.open()
        self._report_serving(bound, transports)
        # the first snapshot need not wait for it
        loop.run_in_executor(None, import_module, "embershard.proto.snapshot.storage")
        return await self._finish(await stop.received, apply, log, transports)

    def _report_serving(self, bound: str, transports: Transports) -> None:
        """Say on stdout, to systemd and in the log that the shard serves, and where."""
        shard, of = self.options.shard, self.options.of
        ready = {"event": "serving", "shard": shard, "of": of, "address": bound, "pid": os.getpid()}
        if transports.rpc is not None:
            ready["rpc"] = transports.rpc.address
        if self.metrics is not None:
            ready["metrics"] = self.metrics.address
        _settle()
        print(json.dumps(ready), flush=True)
        notify(f"READY=1\nSTATUS=shard {shard} of {of} serves at {bound}")
        _log.info("serving at %s (shard %d of %d, instance %s)", bound, shard, of, self.shard.greeting.instance)

    async def _finish(self, signum: int, apply: ApplyThread, log: ShardLog | None, transports: Transports) -> int:
        """Apply what was accepted before the signal, and close everything; the exit code."""
        notify("STOPPING=1")
        _log.info("%s: finishing %d queued bytes", signal.Signals(signum).name, apply.queued_bytes)
        await transports.health.enter_graceful_shutdown()
        apply.close()  # from here on, new requests are told that the shard is shutting down
        done = await asyncio.to_thread(apply.join, GRACE_SECONDS)
        unwritten = ""
        if log is not None and done and not await asyncio.to_thread(log.close, _LOG_SECONDS):  # the last answers wait
            unwritten = _unwritten(log)
        await transports.close()
        if unwritten:
            _log.error("%s", unwritten)
            return 1
        if not done:
            _log.error(
                "dropped %d queued bytes: they were not applied within %.0f s of the stop",
                apply.queued_bytes,
                GRACE_SECONDS,
            )
            return 1
        _log.info("done: everything accepted was applied")
        return 130 if signum == signal.SIGINT else 0


def _unwritten(log: ShardLog) -> str:
    """Say what a log lacks that was closed before all was written."""
    _, _, num_bytes, _, reason = log.status()
    why = reason or f"the disk did not take them within {_LOG_SECONDS:.0f} s"
    return (
        f"the last {num_bytes:,} bytes of events are not in the event log: {why}. Nobody was told that they are safe, "
        "and workers that still run send these changes again"
    )


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


class _RecoveryBrokenOff(Exception):
    """A signal came while the shard recovered: nothing was accepted, and the log that it leaves is as good."""


@contextmanager
def _ended_while_recovering() -> Iterator[None]:
    """End the process on the spot where the recovery was broken off: its thread goes on, and would be waited for."""
    try:
        yield
    except _RecoveryBrokenOff as end:
        signum = end.args[0]
        _log.info("%s: the recovery is broken off; the next start begins it again", signal.Signals(signum).name)
        sys.stdout.flush()
        os._exit(130 if signum == signal.SIGINT else 0)


def _settle() -> None:
    """Take what exists now out of later garbage collections: it stays, and looking at it cost more than serving."""
    gc.collect()
    gc.freeze()


def _allow_files(options: ServerOptions) -> None:
    """Have as many descriptors as the system allows without asking: a connection to gRPC takes three.

    CannotListen where they are too few: gRPC would abort the process, and a compiler's error name another cause.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        raise CannotListen(
            address=options.listen,
            reason=f"this process may open {soft} files, and a shard without workers needs {_LEAST_FILES}; raise the "
            "limit (ulimit -n 65536, LimitNOFILE= in systemd)",
        )


class _Stop:
    """The first SIGTERM, SIGHUP (unless nohup has it ignored) or SIGINT; the second ends the process on the spot."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.received: asyncio.Future[int] = loop.create_future()
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                loop.add_signal_handler(signum, self._on_signal, signum)

    def _on_signal(self, signum: int) -> None:
        if self.received.done():
            os._exit(128 + signum)
        self.received.set_result(signum)
        with suppress(RuntimeError):  # where memory is short the system gives it no thread
            # whatever hangs, a library's threads included: the process ends, and says where it was
            faulthandler.dump_traceback_later(GRACE_SECONDS + LAST_SECONDS, exit=True)


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
