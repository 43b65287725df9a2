"""Show a process to Prometheus and to probes over HTTP: /metrics, /livez, /readyz and /status.json."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, Self

from embershard.proto.errors import CannotListen
from embershard.proto.monitoring.exposition import CONTENT_TYPE, Exposition
from embershard.proto.monitoring.metrics import Metric, Sample

LOOPBACK = ("127.0.0.1", "::1")  # in the order in which they are tried
_IDLE_SECONDS = 10.0  # for a client to ask, and to take the answer
_TICK_SECONDS = 1.0
_MOST_CLIENTS = 16  # at a time; a scraper is one

_log = logging.getLogger(__name__)


class Monitored(Protocol):
    """A process that the exporter shows: its metrics, health and status. Any thread may call it at any time."""

    def samples(self) -> Iterable[Sample]:
        """The values of its metrics now."""
        ...

    def not_live(self) -> str:
        """Why it should be started again; empty where it should not."""
        ...

    def not_ready(self) -> str:
        """Why it cannot do its work now; empty where it can."""
        ...

    def as_json(self) -> Mapping[str, object]:
        """Its state, for programs that do not read metrics."""
        ...


STUCK_SECONDS = 30.0  # a thread that did not move for so long is taken to hang


class LoopWatch:
    """Looks every second whether an event loop still runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._looked = time.monotonic()
        loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._looked = time.monotonic()
        self._loop.call_later(_TICK_SECONDS, self._look)

    @property
    def idle_seconds(self) -> float:
        """Return the seconds since it last ran."""
        return time.monotonic() - self._looked


def stuck(idle_seconds: Mapping[str, float]) -> str:
    """Which of the parts of a process hang, by how long they have not moved; empty where none does."""
    found = {name: seconds for name, seconds in idle_seconds.items() if seconds > STUCK_SECONDS}
    return "; ".join(f"the {name} has not moved for {seconds:.0f} s" for name, seconds in found.items())


def loopback_host() -> str:
    """Return the address at which processes of this machine reach each other: 127.0.0.1, or ::1 where it has no IPv4.

    127.0.0.1, too, where it has neither: whoever listens there says so.
    """
    return next(filter(_can_listen, LOOPBACK), LOOPBACK[0])


def _can_listen(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port", ":port" or "port", the last two on loopback; CannotListen where it is none."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise CannotListen(address=text, reason="write host:port, with a port of 0..65535")
    return host.strip("[]") or loopback_host(), int(port)


def names_this_machine(host: str, names: Collection[str] = ("localhost",)) -> bool:
    """Whether a request's Host is an IP address or one of these names.

    Another name may be one of a stranger's page, which now resolves to this machine (DNS rebinding).
    """
    name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    try:
        ipaddress.ip_address(name.strip("[]"))
        return True
    except ValueError:
        return name.lower() in names


def show_address(host: str, port: int) -> str:
    """The address as it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class MetricsServer:
    """Answers in threads of its own, until it is closed; what it shows is `monitored`, once there is something.

    `metrics` are those that may be shown, `labels` stand at each of them. Opening takes the port: CannotListen where
    it is not to be had.
    """

    def __init__(self, address: str, metrics: Iterable[Metric], labels: Mapping[str, str]) -> None:
        self.monitored: Monitored | None = None
        self._exposition, self._writing = Exposition(metrics, labels), threading.Lock()
        self._server = _listen(address, self)
        host, port = self._server.server_address[:2]
        self.address = show_address(str(host), int(port))
        self._is_local = ipaddress.ip_address(host).is_loopback  # type: ignore[arg-type]
        if not self._is_local:
            _log.warning("anyone who reaches %s can read the metrics, names of tables included", self.address)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving, and free the port."""
        self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which looks up twice a second otherwise
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def text(self) -> bytes:
        """The metrics now, as Prometheus reads them."""
        with self._writing:
            return self._exposition.text(() if self.monitored is None else self.monitored.samples())

    def answer(self, path: str, host: str = LOOPBACK[0]) -> tuple[HTTPStatus, str, bytes]:
        """The status, content type and body of a page; `host` is how the client names this server."""
        if self._is_local and not names_this_machine(host):
            refusal = b"metrics on loopback are not served under that name: ask for 127.0.0.1 or localhost\n"
            return HTTPStatus.MISDIRECTED_REQUEST, "text/plain", refusal
        shown = self.monitored
        match path.partition("?")[0]:
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE, self.text()
            case "/livez":
                return _verdict("" if shown is None else shown.not_live())
            case "/readyz":
                return _verdict("it is starting" if shown is None else shown.not_ready())
            case "/status.json":
                body = {} if shown is None else dict(shown.as_json())
                return HTTPStatus.OK, "application/json", json.dumps(body).encode() + b"\n"
        return HTTPStatus.NOT_FOUND, "text/plain", b"there are /metrics, /livez, /readyz and /status.json\n"


def check_addresses(address: str, count: int) -> list[str]:
    """The addresses of so many processes, from a port on: each is free now. CannotListen names one that is not."""
    host, first = parse_address(address)
    if first + count > 65536:
        raise CannotListen(address=address, reason=f"there are no {count} ports from {first} on")
    addresses = [show_address(host, first + i if first else 0) for i in range(count)]
    for one in addresses:
        _HTTPServer(one, BaseHTTPRequestHandler).server_close()
    return addresses


def _verdict(reason: str) -> tuple[HTTPStatus, str, bytes]:
    status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
    return status, "text/plain", f"{reason or 'ok'}\n".encode()


class _HTTPServer(ThreadingHTTPServer):
    """Takes a few clients at a time; one that is slow, or goes away, is dropped without a word.

    Of too many the one that has been there for longest is: clients that say nothing must not keep a probe out, which
    would have its process ended.
    """

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, address: str, handler: type[BaseHTTPRequestHandler]) -> None:
        host, port = parse_address(address)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._clients, self._changing = dict[socket.socket, None](), threading.Lock()  # the oldest first
        try:
            super().__init__((host, port), handler)
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                reason = f"port {port} is in use; stop the process that has it, or choose another port for --metrics"
            raise CannotListen(address=show_address(host, port), reason=reason) from None

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, which may take long."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changing:
            self._clients[request] = None
            if len(self._clients) > _MOST_CLIENTS:
                oldest = next(iter(self._clients))
                del self._clients[oldest]
                with contextlib.suppress(OSError):  # it has ended
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changing:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection whose client has gone."""
        _log.debug("a client of the metrics has gone", exc_info=True)


def _listen(address: str, owner: MetricsServer) -> _HTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = _IDLE_SECONDS
        server_version, sys_version = "embershard", ""

        def do_GET(self) -> None:
            try:
                status, content_type, body = owner.answer(self.path, self.headers.get("Host", LOOPBACK[0]))
            except Exception:
                _log.exception("a defect while answering %s", self.path)
                status, content_type, body = HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", b"see the log\n"
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: a scrape is worth no line."""

    return _HTTPServer(address, Handler)
