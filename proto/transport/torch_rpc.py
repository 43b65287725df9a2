"""A shard behind torch.distributed.rpc, for those who run it.

torch rpc executes the pickles that it receives, replies included. So it is used where the address says `rpc://`, which
stays on this machine, or `rpc-executes-pickles://`, which says what it means to leave it.
"""

from __future__ import annotations

import atexit
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from datetime import timedelta
from itertools import count
from secrets import token_hex

import torch
from torch.distributed import rpc
from torch.distributed.rpc import TensorPipeAgent, WorkerInfo
from torch.distributed.rpc.api import _get_current_rpc_agent, _is_current_rpc_agent_set

from embershard.proto.arrays import Array
from embershard.proto.errors import BadAddress, EmbershardError, NotAShard, from_wire
from embershard.proto.messages import METHODS, Reply, Request, arrays
from embershard.proto.protobuf import head_bytes, read
from embershard.proto.timing import Deadline
from embershard.proto.torch_rpc import (
    GREETING,
    MAX_GREETING_BYTES,
    QUESTION,
    Answer,
    addresses_of,
    call,
    start_agent,
    tensor,
)
from embershard.proto.transport.transport import TransportClosed, Unreachable
from embershard.proto.wire import wrong_version

CONNECT_SECONDS = 5.0  # to be told where a shard's agent listens; a call waits no longer than its own deadline
_SHORTEST = 0.001  # seconds; torch rounds to ms, and takes 0 for no deadline at all
_LOCAL, _ANYWHERE = "rpc://", "rpc-executes-pickles://"

_agent_lock = threading.Lock()
# ids of shards in this process's group: from the top, since a user's own group counts its ranks from the bottom
_numbers = count(2**15 - 1, -1)


def _agent() -> TensorPipeAgent:
    """The agent of this process: the user's own, or one that is started now and ended with the process."""
    with _agent_lock:
        if not _is_current_rpc_agent_set():
            # nobody calls a worker, so its agent listens where nobody else can
            start_agent(f"embershard-worker-{os.getpid()}", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")
            atexit.register(_end_agent)
        agent = _get_current_rpc_agent()
        assert isinstance(agent, TensorPipeAgent)
        return agent


def _end_agent() -> None:
    if _is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)


class _RpcCall:
    """A request under way, and its reply."""

    def __init__(self, request: Request, timeout: timedelta) -> None:
        self.method, self.reply = METHODS[type(request)]
        self.head = head_bytes(request)
        self.bulk = [tensor(array) for array in arrays(request)]
        self.num_bytes = len(self.head) + sum(part.nbytes for part in self.bulk)
        self.deadline = Deadline(timeout)
        self._answer: Future[Reply] = Future()

    def result(self) -> Reply:
        """Wait for the reply and return it; see PendingReply."""
        try:
            return self._answer.result(max(0.0, self.deadline.seconds))
        except FutureTimeout:
            raise Unreachable("no answer") from None

    def end(self, outcome: Reply | Exception) -> None:
        """End with a reply or an error, unless it has ended."""
        with suppress(InvalidStateError):  # another thread may end it at the same moment
            if isinstance(outcome, Exception):
                self._answer.set_exception(outcome)
            else:
                self._answer.set_result(outcome)


class RpcTransport:
    """A shard at "rpc://host:port" (its `--rpc host:port`), found at the first call, and again when it must."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.sent_bytes = 0
        self.received_bytes = 0
        self._lock = threading.Lock()  # of everything below
        self._shard: WorkerInfo | None = None  # as this process's agent knows it
        self._finding = False
        self._waiting: list[_RpcCall] = []  # until the shard is found
        self._calls: set[_RpcCall] = set()  # under way
        self._closed = False

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Array] = ()) -> _RpcCall:
        """Send a request without waiting for its reply, which comes in memory of its own."""
        under_way = _RpcCall(request, timeout)
        with self._lock:
            if self._closed:
                raise TransportClosed
            self.sent_bytes += under_way.num_bytes
            shard = self._shard
            if shard is None:
                self._waiting.append(under_way)
                if not self._finding:
                    self._finding = True
                    threading.Thread(target=self._find, name="embershard-rpc", daemon=True).start()
        if shard is not None:
            self._send(under_way, shard)
        return under_way

    def close(self) -> None:
        """Cancel the calls in flight and forget the shard."""
        with self._lock:
            self._closed = True
            shard, self._shard = self._shard, None
            calls, self._waiting, self._calls = [*self._waiting, *self._calls], [], set()
        for under_way in calls:
            under_way.end(TransportClosed())
        if shard is not None:
            _forget(shard)

    def _find(self) -> None:
        """Find the shard and send what waits for it. A thread of its own: `submit` does not wait."""
        error: Exception | None = None
        shard: WorkerInfo | None = None
        try:
            shard = _introduce(self._look_up())
        except (EmbershardError, Unreachable) as known:
            error = known
        except (OSError, UnicodeError) as failure:  # a name that cannot be one is a UnicodeError
            silent = isinstance(failure, TimeoutError)
            reason = "it takes connections and says nothing" if silent else getattr(failure, "strerror", None)
            error = Unreachable(reason or str(failure))
        except RuntimeError as failure:  # torch's
            error = Unreachable(_short(failure))
        with self._lock:
            self._finding = False
            waiting, self._waiting = self._waiting, []
            closed = self._closed
            if not closed:
                self._shard = shard
        for request in waiting:
            if shard is None:
                request.end(error or TransportClosed())
            else:
                self._send(request, shard)
        if closed and shard is not None:
            _forget(shard)

    def _look_up(self) -> str:
        """The URL of the shard's agent."""
        host, _, port = self.address.removeprefix(_LOCAL).removeprefix(_ANYWHERE).rpartition(":")
        deadline = Deadline(timedelta(seconds=CONNECT_SECONDS))
        found = socket.getaddrinfo(host.strip("[]"), int(port), socket.AF_INET, socket.SOCK_STREAM)  # as its shards do
        places = [(str(place[0]), int(place[1])) for *_, place in found]
        if self.address.startswith(_LOCAL) and not all(ipaddress.ip_address(ip).is_loopback for ip, _ in places):
            raise BadAddress(
                address=self.address,
                reason="torch.distributed.rpc executes the pickles that it receives, and this is another machine; "
                f"write {_ANYWHERE}{host}:{port} if you trust it and the network",
            )
        line = b""
        with _connected(places) as sock:
            sock.sendall(QUESTION)
            while not line.endswith(b"\n") and len(line) < MAX_GREETING_BYTES:
                sock.settimeout(max(_SHORTEST, deadline.seconds))
                data = sock.recv(MAX_GREETING_BYTES)
                if not data:
                    break
                line += data
        if not line:
            raise Unreachable("it closed the connection")
        if other := re.match(rb"embershard rpc (\d{1,5}) ", line) if not line.startswith(GREETING) else None:
            raise wrong_version(int(other[1]))
        if not (line.startswith(GREETING) and line.endswith(b"\n")):
            raise NotAShard(address=self.address, reason=f"it says {line[:60]!r}")
        return line.removeprefix(GREETING).decode("ascii", "replace").strip()

    def _send(self, request: _RpcCall, shard: WorkerInfo) -> None:
        seconds = request.deadline.seconds
        if seconds <= 0:
            request.end(Unreachable("no answer"))
            return
        with self._lock:
            self._calls.add(request)
        try:
            arguments = (request.method, request.head, request.bulk, seconds)
            answer = rpc.rpc_async(shard, call, args=arguments, timeout=max(_SHORTEST, seconds))
        except RuntimeError as error:  # torch's, where the agent was shut down
            self._finish(request, shard, Unreachable(_short(error)))
            return
        answer.add_done_callback(lambda done: self._finish(request, shard, _outcome(done, self.address)))

    def _finish(self, request: _RpcCall, shard: WorkerInfo, outcome: Answer | Exception) -> None:
        """End a call with its reply or its error; in a thread of the agent."""
        with self._lock:
            self._calls.discard(request)
        if isinstance(outcome, Exception):
            if not isinstance(outcome, _NoAnswer):  # a broken connection stays broken: the next call makes another
                self._lose(shard)
            request.end(outcome)
            return
        failed, head, bulk = outcome
        num_bytes = len(head) + sum(part.nbytes for part in bulk)
        request.num_bytes += num_bytes
        with self._lock:
            self.received_bytes += num_bytes
        if failed:
            request.end(from_wire(head, ""))
            return
        try:
            request.end(read(request.reply, head, [part.numpy().data for part in bulk]))
        except EmbershardError as error:
            request.end(NotAShard(address=self.address, reason=str(error)))

    def _lose(self, shard: WorkerInfo) -> None:
        with self._lock:
            lost = self._shard is shard
            if lost:
                self._shard = None
        if lost:
            _forget(shard)


class _NoAnswer(Unreachable):
    """The deadline passed; the connection may be sound."""


def _introduce(url: str) -> WorkerInfo:
    """Make a shard's agent known to this process's, under a name and a number that no other has."""
    agent = _agent()
    shard = WorkerInfo(f"embershard-{token_hex(8)}", next(_numbers))
    addresses_of(agent).set(shard.name, url)
    agent._update_group_membership(shard, [], {}, True)
    return shard


def _connected(places: Sequence[tuple[str, int]]) -> socket.socket:
    """A connection to the first place that takes one; the OSError of the last where none does."""
    for place in places[:-1]:
        with suppress(OSError):
            return socket.create_connection(place, CONNECT_SECONDS)
    return socket.create_connection(places[-1], CONNECT_SECONDS)


def _forget(shard: WorkerInfo) -> None:
    """Take a shard out of the agent's group, or a user's graceful shutdown would take leave of it."""
    if _is_current_rpc_agent_set():
        _agent()._update_group_membership(shard, [], {}, False)


def _outcome(done: torch.futures.Future[Answer], address: str) -> Answer | Exception:
    """The reply of a call, or the error that torch raised, as one of ours."""
    try:
        return done.value()
    except Exception as error:  # torch raises RuntimeError, and again whatever was raised in the other process
        text = str(error)
        if text.startswith("RPCErr:1:"):
            return _NoAnswer("no answer")
        if text.startswith("On WorkerInfo"):
            return NotAShard(address=address, reason=" ".join(text.split("\n")[1:2]))
        return Unreachable(_short(error))


def _short(error: Exception) -> str:
    """What torch says, without the place in its source."""
    return str(error).partition(" (this error originated")[0] or type(error).__name__
