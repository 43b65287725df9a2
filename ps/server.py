"""One shard as a process: listen, say so on stdout, serve until a signal, finish what was accepted, end."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from embershard.proto.errors import CannotListen

if TYPE_CHECKING:
    import grpc.aio

    from embershard.ps.shard import Shard

GRACE_SECONDS = 30.0  # for what was accepted before a signal came
_REPLY_SECONDS = 2.0  # for the last replies; a health check's open stream would use all of a longer time
_PARENT_POLL_SECONDS = 0.5

_log = logging.getLogger("embershard.ps")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What one shard's process is started with.

    `listen` is "host:port" (port 0: any free one), or "unix:/path". `imports` are modules with row optimizers.
    `parent_pid`, if not 0, is the process without which this one ends.
    """

    shard: int
    of: int
    listen: str = "127.0.0.1:7700"
    imports: tuple[str, ...] = ()
    insecure: bool = False
    queue_bytes: int = 256 * 2**20
    parent_pid: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.of:
            raise ValueError(f"shard must be 0..of-1, got shard {self.shard} of {self.of}")
        if self.queue_bytes < 1:
            raise ValueError(f"queue_bytes must be at least 1, got {self.queue_bytes}")


def serve(options: ServerOptions) -> int:
    """Run the shard until SIGTERM or SIGINT; its exit code: 0, 130 after SIGINT, 1 where accepted work was given up.

    CannotListen where the address is not to be had.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s shard {options.shard} %(levelname)s %(message)s"
    )
    if options.parent_pid:
        threading.Thread(target=_end_with, args=(options.parent_pid,), name="parent", daemon=True).start()
    address = Address.parse(options.listen)
    address.check(options.insecure)
    _announce_compilation()
    shard = _make_shard(options)

    import uvloop

    return uvloop.run(_serve(shard, address, options))


def _make_shard(options: ServerOptions) -> Shard:
    # imported here: a cold cache compiles during these imports, and the log should say so first
    from embershard.proto.routing import Placement
    from embershard.ps.optim import OptimizerRegistry
    from embershard.ps.shard import Shard

    return Shard(options.shard, Placement.even(options.of), OptimizerRegistry(options.imports), version=_version())


async def _serve(shard: Shard, address: Address, options: ServerOptions) -> int:
    from grpc_health.v1 import health
    from grpc_health.v1.health_pb2 import HealthCheckResponse

    from embershard.proto.messages import SERVICE
    from embershard.ps.apply import ApplyThread
    from embershard.ps.dispatch import Dispatch
    from embershard.ps.service import ShardService, make_server

    stop = _Stop(asyncio.get_running_loop())
    apply = ApplyThread(max_bytes=options.queue_bytes)
    healthy = health.aio.HealthServicer()
    server = make_server(ShardService(Dispatch(shard, apply)), healthy)
    bound = address.bind(server)
    await server.start()
    for name in ("", SERVICE):
        await healthy.set(name, HealthCheckResponse.SERVING)
    ready = {"event": "serving", "shard": options.shard, "of": options.of, "address": bound, "pid": os.getpid()}
    print(json.dumps(ready), flush=True)
    _log.info("serving at %s (shard %d of %d, instance %s)", bound, options.shard, options.of, shard.greeting.instance)

    signum = await stop.received
    _log.info("%s: finishing %d queued bytes", signal.Signals(signum).name, apply.queued_bytes)
    await healthy.enter_graceful_shutdown()
    apply.close()  # from here on, new requests are told that the shard is shutting down
    done = await asyncio.to_thread(apply.join, GRACE_SECONDS)
    await server.stop(_REPLY_SECONDS)
    if not done:
        _log.error("gave up %d queued bytes after %.0f s", apply.queued_bytes, GRACE_SECONDS)
        return 1
    _log.info("done: everything accepted was applied")
    return 130 if signum == signal.SIGINT else 0


class _Stop:
    """The first SIGTERM or SIGINT; the second ends the process on the spot."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.received: asyncio.Future[int] = loop.create_future()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)

    def _on_signal(self, signum: int) -> None:
        if self.received.done():
            os._exit(128 + signum)
        self.received.set_result(signum)


@dataclass(frozen=True)
class Address:
    """Where a shard listens: (host, port), or the path of a Unix socket."""

    text: str
    host: str = ""
    port: int = 0
    path: str = ""

    @staticmethod
    def parse(text: str) -> Address:
        """The address of "host:port", "[v6]:port" or "unix:/path"; CannotListen says what is wrong with it."""
        if text.startswith("unix:"):
            if not text[5:]:
                raise CannotListen(address=text, reason="write unix:/path/of/the/socket")
            return Address(text, path=text[5:])
        name, _, port = text.rpartition(":")
        if not (name and port.isascii() and port.isdigit() and int(port) < 65536):
            raise CannotListen(address=text, reason="write host:port, with a port of 0..65535, or unix:/path")
        try:
            # One literal address: gRPC binds what it can of a name with several, and calls that success.
            found = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            raise CannotListen(address=text, reason=f"unknown host {name!r} ({error.strerror})") from None
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        return Address(text, host=str(found[0][4][0]), port=int(port))

    def check(self, insecure: bool) -> None:
        """CannotListen where others than this machine could reach the shard and nobody said that they may."""
        if self.path or ipaddress.ip_address(self.host).is_loopback:
            return
        if not insecure:
            raise CannotListen(
                address=self.text,
                reason="it can be reached from other machines, and there is neither encryption nor a password: "
                "anyone there could read and change the model. Listen on 127.0.0.1, or pass --insecure "
                "if the network keeps strangers out",
            )
        _log.warning("--insecure: anyone who reaches %s can read and change the model", self.text)

    def bind(self, server: grpc.aio.Server) -> str:
        """Listen, and give the address that was really bound. CannotListen where that is not possible."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.path and _answers(self.path):  # gRPC would unlink the socket under the other server
            raise CannotListen(address=self.text, reason="another process listens there; choose another path")
        try:
            port = server.add_insecure_port(self.text if self.path else f"{host}:{self.port}")
        except RuntimeError:
            raise CannotListen(address=self.text, reason=self._obstacle()) from None
        return self.text if self.path else f"{host}:{port}"

    def _obstacle(self) -> str:
        """What the system says about this address: gRPC only says that it failed."""
        family = socket.AF_UNIX if self.path else socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(self.path or (self.host, self.port))
                probe.listen()
            except OSError as error:
                if self.port and error.errno == errno.EADDRINUSE:
                    return f"port {self.port} is in use; stop the process that has it, or choose another port"
                return error.strerror or str(error)
        return "gRPC could not bind it"


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


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


def _announce_compilation() -> None:
    """Say once that kernels are being compiled: without a cache the start takes several times as long."""
    from numba.core import event

    class Announcer(event.Listener):  # type: ignore[misc]
        said = False

        def on_start(self, event: object) -> None:
            if not self.said:
                self.said = True
                _log.info("compiling kernels; kept on disk where it can be, so that the next start is quick")

        def on_end(self, event: object) -> None:
            pass

    event.register("numba:compile", Announcer())


def _version() -> str:
    try:
        return version("embershard")
    except PackageNotFoundError:
        return "unknown"
