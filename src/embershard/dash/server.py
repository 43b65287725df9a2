"""Serve the panel: one page, and its samples as server-sent events to any number of pages."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import ipaddress
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from embershard.dash.page import build_page
from embershard.dash.sampler import PanelSample, Sampler
from embershard.proto.errors import EmbershardError
from embershard.proto.monitoring.exporter import names_this_machine

_MOST_PAGES = 64
MOST_TABLES = 50  # that an open shard shows at once: thousands would take the browser long, and nobody reads them
_WAITING = 20  # samples for a page that does not read: it is dropped, and asks for all when it comes back
_CONNECTIONS = 256


class PanelCannotListen(EmbershardError):
    """The panel cannot serve at its address."""

    template = (
        "the panel cannot listen on {address}: {reason}; choose another address with --listen; port 0 is a free one"
    )


class Pages:
    """Sends each sample to all open pages, from one text."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._queues: set[asyncio.Queue[str | None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closing = False

    def start(self) -> None:
        """Start the sampler; call it on the loop that serves."""
        self._loop = asyncio.get_running_loop()
        self._sampler.start(self._publish)

    async def stop(self) -> None:
        """End the streams, then the sampler."""
        self.closing = True
        for queue in self._queues:
            _put(queue, None)
        await asyncio.to_thread(self._sampler.close)

    @property
    def full(self) -> bool:
        """Whether so many pages are open that no other one is served."""
        return len(self._queues) >= _MOST_PAGES

    async def stream(self) -> AsyncIterator[str]:
        """The events of one page: `hello` with everything until now, then each `sample`."""
        queue: asyncio.Queue[str | None] = asyncio.Queue(_WAITING + 1)
        self._queues.add(queue)  # before the history is read: the page leaves out what it gets twice
        try:
            yield _event("hello", await asyncio.to_thread(self._sampler.history))
            while not self.closing and (text := await queue.get()) is not None:
                yield text
        finally:
            self._queues.discard(queue)

    def _publish(self, sample: PanelSample) -> None:
        assert self._loop is not None
        if self._queues:
            text = _event("sample", sample.as_json())
            self._loop.call_soon_threadsafe(self._send, text)

    def _send(self, text: str) -> None:
        for queue in list(self._queues):
            if queue.qsize() >= _WAITING:
                self._queues.discard(queue)
                _put(queue, None)
            else:
                queue.put_nowait(text)


class OwnHosts:
    """Lets requests pass that name this server by an IP address, as localhost or by a name that it was given."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 421."""
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            if not names_this_machine(headers.get(b"host", b"").decode("latin-1"), self._names):
                refusal = PlainTextResponse("this panel is not served under that name; see --host\n", 421)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def make_app(sampler: Sampler, hosts: frozenset[str] = frozenset()) -> Starlette:
    """The panel as an ASGI application, which starts and ends the sampler; it answers GET alone."""
    page, pages = build_page(), Pages(sampler)
    common = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
    common["Cross-Origin-Resource-Policy"] = "same-origin"

    async def show(_: Request) -> Response:
        return Response(page.html, headers={**common, "Content-Security-Policy": page.policy}, media_type="text/html")

    async def stream(_: Request) -> Response:
        if pages.full:
            # not an error of HTTP, of which an EventSource tells its page nothing; it asks again
            full = f"retry: 10000\nevent: full\ndata: {_MOST_PAGES}\n\n"
            return Response(full, headers=common, media_type="text/event-stream")
        return StreamingResponse(pages.stream(), headers=common, media_type="text/event-stream")

    async def state(_: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(sampler.state), headers=common)

    async def tables(request: Request) -> Response:
        query = request.query_params
        found = await asyncio.to_thread(sampler.tables, query.get("shard", ""), query.get("match", ""))
        shown = [dataclasses.asdict(table) for table in found[:MOST_TABLES]]
        return JSONResponse({"matching": len(found), "tables": shown}, headers=common)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.pages = pages
        pages.start()
        yield
        await pages.stop()

    routes = [Route("/", show), Route("/stream", stream), Route("/state.json", state), Route("/tables.json", tables)]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.add_middleware(OwnHosts, names=hosts | {"localhost"})
    return app


def listen(address: str, *, or_free_port: bool = False) -> socket.socket:
    """A socket that listens on host:port; on a free port, if asked for, where that one is in use. PanelCannotListen."""
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    if not bare or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise PanelCannotListen(address=address, reason="it is not of the form host:port")
    try:
        family = socket.getaddrinfo(bare, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((bare, int(port)), family=family, backlog=128)
    except OSError as error:
        if or_free_port and int(port):
            return listen(f"{host}:0")
        raise PanelCannotListen(address=address, reason=_reason(error, int(port))) from None


def _reason(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use"
    if error.errno is None or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)  # create_server writes the address once more behind it


class PanelServer(uvicorn.Server):
    """uvicorn, which ends the pages' streams before it waits for them."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all streams, then everything else."""
        app = self.config.app
        assert isinstance(app, Starlette)
        await app.state.pages.stop()
        await super().shutdown(sockets)


def serve(sampler: Sampler, sock: socket.socket, hosts: frozenset[str] = frozenset()) -> None:
    """Serve the panel on a socket until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        make_app(sampler, hosts),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=2,
    )
    PanelServer(config).run(sockets=[sock])


def is_loopback(sock: socket.socket) -> bool:
    """Whether a socket listens where only this machine reaches it."""
    return ipaddress.ip_address(sock.getsockname()[0]).is_loopback


def url_of(sock: socket.socket) -> str:
    """The address of the page."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _event(name: str, value: object) -> str:
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n"


def _put(queue: asyncio.Queue[str | None], text: str | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(text)
