"""Probe shards: ask each in every way that it can be reached, all at once, by one deadline."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from embershard.proto.errors import EmbershardError, ShardRecovering
from embershard.proto.messages import GetStatus, Greeting, Hello, ShardStatus
from embershard.proto.security.tls import TLS
from embershard.proto.timing import Deadline
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.io_thread import connect_beside, io_loop
from embershard.proto.transport.transport import Transport, Unreachable
from embershard.proto.wire import HELLO_BYTES, Feature, client_hello, read_server_hello

DEADLINE = timedelta(seconds=3)
_STEP = timedelta(seconds=1)  # the most for one question: what is silent must leave time for the others
_CALLS = 20
_BETWEEN_SECONDS = 0.3  # the two looks at a shard's counters


@dataclass(slots=True)
class Probe:
    """One address. A problem is empty where there is none; what was not asked says why."""

    address: str
    resolve_problem: str = "it was not looked up in time"
    port_problem: str = "not tried"
    stream_problem: str = "not asked"
    grpc_problem: str = "not asked"
    recovering: ShardRecovering | None = None  # what it says in place of its greeting
    stream_greeting: Greeting | None = None
    grpc_greeting: Greeting | None = None
    beside: bool = False  # a worker here would use the Unix socket beside the port
    asks: bool | None = None  # who comes over TCP has to say who it is; None: not known
    here: bool = False  # it runs on this machine
    # of its clock, at least: that of this machine is behind it; below 0: ahead of it
    ahead_seconds: float | None = None
    call_seconds: float | None = None  # of a small call, median
    before: ShardStatus | None = None  # a first look
    status: ShardStatus | None = None  # the last one

    @property
    def greeting(self) -> Greeting | None:
        """Return its greeting, over whichever transport it answers."""
        return self.stream_greeting or self.grpc_greeting

    @property
    def is_two(self) -> bool:
        """Whether different processes answer on stream and on gRPC."""
        one, other = self.stream_greeting, self.grpc_greeting
        return one is not None and other is not None and one.instance != other.instance

    @property
    def name(self) -> str:
        """Index and address, or the address alone."""
        return self.address if self.greeting is None else f"shard {self.greeting.shard} at {self.address}"

    @property
    def is_rpc(self) -> bool:
        """Whether it is torch.distributed.rpc's, which is not asked anything: it would execute what it answers."""
        return self.address.startswith(("rpc://", "rpc-executes-pickles://"))

    @property
    def bare(self) -> str:
        """The address without its scheme: host:port or unix:/path."""
        return self.address.removeprefix("grpc+").rpartition("://")[2]


def probe_all(addresses: Sequence[str], tls: TLS | None = None) -> list[Probe]:
    """Ask all of them at once; what is not known by DEADLINE stays as it was."""
    probes = [Probe(address) for address in addresses]
    limit = Deadline(DEADLINE)
    # daemon threads: looking a name up cannot be interrupted, and must not hold up the end of the process
    threads = [threading.Thread(target=_ask, args=(probe, limit, tls), daemon=True) for probe in probes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, limit.seconds))
    return [replace(probe) for probe in probes]  # what comes later does not change them


def _ask(probe: Probe, limit: Deadline, tls: TLS | None) -> None:
    with contextlib.suppress(Unreachable, EmbershardError, TimeoutError):  # it has gone: what is known of it is told
        if _reaches(probe, limit) and not probe.is_rpc:
            _question(probe, limit, tls)


def _question(probe: Probe, limit: Deadline, tls: TLS | None) -> None:
    stream = transport_for(probe.address if probe.address.startswith("tcp://") else probe.bare, tls=tls)
    grpc = transport_for(f"grpc+{probe.bare}" if probe.bare.startswith("unix:") else f"grpc://{probe.bare}", tls=tls)
    try:
        probe.stream_greeting, probe.stream_problem = _greeting(probe, stream, limit)
        probe.grpc_greeting, probe.grpc_problem = _greeting(probe, grpc, limit)
        by_grpc = probe.stream_greeting is None or (probe.grpc_greeting and probe.address.startswith("grpc"))
        if probe.greeting is not None:
            probe.asks = _asks(probe, limit)
            _look(probe, grpc if by_grpc else stream, limit)
    finally:
        stream.close()
        grpc.close()


def _reaches(probe: Probe, limit: Deadline) -> bool:
    """Whether its name has an address and its port takes a connection."""
    if probe.bare.startswith("unix:"):
        path = probe.bare.removeprefix("unix:")
        probe.here = True
        probe.resolve_problem = "" if Path(path).is_socket() else f"{path} is no socket"
        probe.port_problem = probe.resolve_problem or _connect_problem(socket.AF_UNIX, path, limit)
        return not probe.port_problem
    host, _, port = probe.bare.rpartition(":")
    host = host.strip("[]")
    try:
        places = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        probe.resolve_problem = f"{host!r} is unknown ({getattr(error, 'strerror', None) or error})"
        return False
    probe.resolve_problem = ""
    problems = [_connect_problem(family, place, limit) for family, _, _, _, place in places]
    probe.port_problem = "" if "" in problems else problems[0]
    if probe.port_problem or probe.is_rpc:
        return not probe.port_problem
    beside = asyncio.run_coroutine_threadsafe(connect_beside(host, int(port)), io_loop()).result(_STEP.total_seconds())
    if beside is not None:
        beside.close()
        probe.here, probe.beside = True, "://" not in probe.address
    return True


def _connect_problem(family: int, place: object, limit: Deadline) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(max(0.01, min(_STEP, limit.remaining).total_seconds()))
        try:
            sock.connect(place)  # type: ignore[arg-type]
        except TimeoutError:
            return "it takes no connection: nothing answers there, or a firewall drops it"
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""


def _greeting(probe: Probe, transport: Transport, limit: Deadline) -> tuple[Greeting | None, str]:
    try:
        reply = transport.submit(Hello(), min(_STEP, limit.remaining)).result()
    except ShardRecovering as error:
        probe.recovering = error
        return None, ""
    except (Unreachable, EmbershardError) as error:
        return None, error.reason if isinstance(error, Unreachable) else str(error)
    return (reply, "") if isinstance(reply, Greeting) else (None, f"it said {type(reply).__name__}")


def _asks(probe: Probe, limit: Deadline) -> bool | None:
    """Whether a peer at its TCP port has to show a token; a Unix socket's peers are known."""
    if probe.bare.startswith("unix:"):
        return True
    host, _, port = probe.bare.rpartition(":")
    with contextlib.suppress(OSError, EmbershardError):
        seconds = max(0.01, min(_STEP, limit.remaining).total_seconds())
        with socket.create_connection((host.strip("[]"), int(port)), seconds) as sock:
            sock.sendall(client_hello(Feature.TOKEN))
            answer = sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
            if len(answer) == HELLO_BYTES:
                return Feature.TOKEN in read_server_hello(answer).features
    return None


def _look(probe: Probe, transport: Transport, limit: Deadline) -> None:
    """Its status, how far its clock is ahead, the time of a small call, and its status a little later."""
    asked = time.time()
    probe.before = probe.status = _status(transport, limit)
    if probe.status is not None and probe.status.system_time:
        # somewhere between the question and the answer
        earliest, latest = probe.status.system_time - time.time(), probe.status.system_time - asked
        probe.ahead_seconds = earliest if earliest > 0 else min(0.0, latest)
    seconds = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        transport.submit(Hello(), min(_STEP, limit.remaining)).result()
        seconds.append(time.perf_counter() - start)
        probe.call_seconds = statistics.median(seconds)
    time.sleep(max(0.0, min(_BETWEEN_SECONDS, limit.seconds)))
    probe.status = _status(transport, limit) or probe.status


def _status(transport: Transport, limit: Deadline) -> ShardStatus | None:
    reply = transport.submit(GetStatus(), min(_STEP, limit.remaining)).result()
    return reply if isinstance(reply, ShardStatus) else None
