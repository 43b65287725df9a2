"""The `rpc` transport's side of a shard: torch.distributed.rpc, for those who run it. Importing this imports torch.

torch rpc executes what it is sent (pickles), so this is served only where it was asked for, and beyond loopback only
where somebody said that they know.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import logging
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import cast
from urllib.parse import urlsplit

import psutil
import torch
from torch.distributed import rpc
from torch.distributed.rpc.api import _is_current_rpc_agent_set

from embershard.proto.arrays import MAX_MESSAGE_BYTES
from embershard.proto.errors import (
    CannotListen,
    EmbershardError,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    clipped,
    to_wire,
)
from embershard.proto.messages import METHODS, Reply, arrays
from embershard.proto.protobuf import head_bytes, read
from embershard.proto.torch_rpc import GREETING, Answer, addresses_of, serve_with, start_agent, tensor
from embershard.ps.dispatch import Dispatch

_SIOCGIFADDR = 0x8915  # Linux: the first IPv4 address of an interface
_ASKING_SECONDS = 10.0  # for whoever connects
_LEAVING_SECONDS = 0.2  # torch rpc does not say when a reply has left

_log = logging.getLogger(__name__)
_counting = threading.Lock()  # of this transport's counters: the agent has several threads
_KINDS = {method: kind for kind, (method, _) in METHODS.items()}


class RpcServer:
    """The agent of this process, and the socket at which workers learn where it listens."""

    def __init__(self, host: str, interface: str) -> None:
        self.address = ""
        self._host = host
        self._interface = interface
        self._agent_url = ""
        self._restarting = asyncio.Lock()
        self._server: asyncio.Server

    @classmethod
    async def start(cls, dispatch: Dispatch, host: str, port: int, *, executes_pickles: bool) -> RpcServer:
        """Serve at an IPv4 address of this machine. CannotListen where that is not possible, or not wanted."""
        where = f"{host}:{port}"
        if not host:
            raise CannotListen(address="--rpc", reason="torch.distributed.rpc needs host:port")
        if not ipaddress.ip_address(host).is_loopback:
            if not executes_pickles:
                raise CannotListen(
                    address=where,
                    reason="torch.distributed.rpc executes the pickles that it is sent: anyone who reaches this "
                    "address could run any program as this user. Listen on 127.0.0.1, or pass "
                    "--rpc-executes-pickles if the network keeps strangers out",
                )
            _log.warning("--rpc-executes-pickles: anyone who reaches %s can run programs as this user", where)
        served = cls(host, _interface_of(host, where))
        served._start_agent()
        serve_with(lambda method, head, bulk, seconds: _answer(dispatch, method, head, bulk, seconds))
        try:
            served._server = await asyncio.get_running_loop().create_server(
                lambda: _Greeter(served._listening_agent), host, port
            )
        except OSError as error:
            rpc.shutdown(graceful=False)
            raise CannotListen(address=where, reason=error.strerror or str(error)) from None
        served.address = f"{host}:{served._server.sockets[0].getsockname()[1]}"
        return served

    async def close(self) -> None:
        """Let the last replies leave, and end the agent."""
        self._server.close()
        await asyncio.sleep(_LEAVING_SECONDS)
        serve_with(None)
        async with self._restarting:
            await asyncio.to_thread(rpc.shutdown, graceful=False)

    def _start_agent(self) -> None:
        agent = start_agent("embershard-shard", self._interface)
        self._agent_url = addresses_of(agent).get("embershard-shard").decode()
        if urlsplit(self._agent_url).hostname != self._host:
            rpc.shutdown(graceful=False)
            raise CannotListen(address=self._host, reason=f"torch.distributed.rpc listens at {self._agent_url} instead")

    async def _listening_agent(self) -> str:
        """Return the URL of the agent, after starting it again where it takes no connections any more.

        TensorPipe closes its listener for good when a connection ends before its first message: that of a worker
        killed at this moment, or of a port scan. Workers that were connected connect again and repeat their requests.
        """
        async with self._restarting:
            if not _is_listening(self._agent_url):
                _log.warning("torch.distributed.rpc closed its port after a connection that broke; starting it again")
                await asyncio.to_thread(self._restart_agent)
            return self._agent_url

    def _restart_agent(self) -> None:
        if _is_current_rpc_agent_set():  # not where the last try to start it failed
            rpc.shutdown(graceful=False)
        self._start_agent()


def _is_listening(url: str) -> bool:
    """Whether this process listens at this URL; asked without connecting, which is what closes TensorPipe's port."""
    place = urlsplit(url)
    return any(
        open_socket.laddr == (place.hostname, place.port) and open_socket.status == psutil.CONN_LISTEN
        for open_socket in psutil.Process().net_connections("tcp4")
    )


class _Greeter(asyncio.Protocol):
    """Tells whoever asks where the agent listens."""

    def __init__(self, url: Callable[[], Awaitable[str]]) -> None:
        self._url = url
        self._transport: asyncio.Transport
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        asyncio.get_running_loop().call_later(_ASKING_SECONDS, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._answering is None:  # whatever was asked, there is one answer
            self._answering = asyncio.ensure_future(self._answer())

    async def _answer(self) -> None:
        try:
            self._transport.write(GREETING + (await self._url()).encode() + b"\n")
        finally:
            self._transport.close()


def _answer(
    dispatch: Dispatch, method: str, head: bytes, bulk: Sequence[torch.Tensor], seconds: float
) -> torch.futures.Future[Answer]:
    """The reply, or the error in its place; runs in a thread of the agent, which it does not hold up."""
    answer: torch.futures.Future[Answer] = torch.futures.Future()
    kind = _KINDS.get(method)
    size, arrived = len(head) + sum(part.nbytes for part in bulk), time.monotonic()
    counters = dispatch.counters.transports["rpc"]
    with _counting:
        counters.received_bytes += size
    if kind is None:
        answer.set_result(_failure(InvalidRequest(reason=f"no method {method!r}; there are {', '.join(_KINDS)}")))
        return answer
    if size > MAX_MESSAGE_BYTES:
        answer.set_result(_failure(MessageTooLarge(got=size, limit=MAX_MESSAGE_BYTES)))
        return answer

    def write(reply: Reply) -> Answer:
        return False, head_bytes(reply), [tensor(array) for array in arrays(reply)]

    def finish(future: Future[Answer]) -> None:
        if future.cancelled():  # its deadline passed: nobody reads this, but torch counts calls without a reply
            with _counting:
                counters.expired(kind)
            answer.set_result((True, b"", []))
            return
        error = future.exception()
        with _counting:
            counters.answered(kind, time.monotonic() - arrived, error)
            if error is None:
                _, head, bulk = future.result()
                counters.sent_bytes += len(head) + sum(part.nbytes for part in bulk)
        answer.set_result(future.result() if error is None else _failure(error))

    request = kind
    dispatch.submit(
        kind,
        lambda: read(request, head, [part.numpy().data for part in bulk]),
        write,
        num_bytes=size,
        deadline=time.monotonic() + seconds,
    ).add_done_callback(finish)
    return answer


def _failure(error: BaseException) -> Answer:
    if not isinstance(error, EmbershardError):
        error = InternalError(reason=f"{type(error).__name__}: {error}; see the shard's output")
    return True, to_wire(clipped(error))[1], []


def _interface_of(host: str, where: str) -> str:
    """The network interface with this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24]
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(found) == host:
                return name
    raise CannotListen(
        address=where,
        reason="torch.distributed.rpc listens on one interface: name the IPv4 address that one has (127.0.0.1 for "
        "this machine only)",
    )
