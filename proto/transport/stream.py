"""A shard behind the `stream` transport: frames over TCP or a Unix socket (docs/wire.md).

A thread that has a request sends it itself, and reads what arrives while it waits for its reply; otherwise one I/O
thread moves the bytes of all shards, on a uvloop, and always where TLS or an emulated link is between. Replies are
received straight into the arrays that the caller named, requests leave from the memory of their arrays.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, cast

import numpy as np

from embershard.proto.arrays import Array, Bytes, Floats
from embershard.proto.errors import EmbershardError
from embershard.proto.messages import GetStatus, Hello, Pull, Push, Reply, Request, Rows, arrays
from embershard.proto.protobuf import head_bytes
from embershard.proto.security.client_token import ClientToken
from embershard.proto.shared_memory import SHARED_FROM_BYTES, SharedHeap
from embershard.proto.timing import span
from embershard.proto.transport.announcements import current_address, folder_of
from embershard.proto.transport.emulated_link import EmulatedLink
from embershard.proto.transport.io_thread import connect_beside, has_ended, io_loop, io_poller, runs_here
from embershard.proto.transport.stream_connection import StreamConnection
from embershard.proto.transport.transport import TransportClosed, Unreachable
from embershard.proto.wire import IN_FRAME, MAX_BUFFERS, Feature

if TYPE_CHECKING:
    from embershard.proto.transport.client_tls import ClientTLS

_RELEASE_SECONDS = 0.1  # between two looks whether a connection that nobody has is idle
CONNECT_SECONDS = 5.0  # for a connection and its hello; a call waits no longer than its own deadline
# A call whose deadline has passed ends once nothing writes into its arrays any more. So much later we stop waiting.
_GRACE_SECONDS = 10.0
# So long a thread waits for another one to read its reply, before it looks whether one does.
_FIRST_SLICE_SECONDS, _LONGEST_SLICE_SECONDS = 0.02, 0.2


@dataclass(slots=True, eq=False)
class StreamCall:
    """A request under way, and its reply."""

    owner: StreamTransport
    request: type[Request]
    head: bytes
    bulk: list[Array]  # C-contiguous
    into: Sequence[Array]
    seconds: float
    started: float = field(default_factory=time.monotonic)
    number: int = 0
    sent_bytes: int = 0  # of its frames, with what lies in shared memory in place of them
    received_bytes: int = 0
    in_memory: list[Array] = field(default_factory=list)  # what the shard reads or writes in shared memory
    into_offsets: Sequence[int] = ()  # where the arrays of the reply may lie there, or IN_FRAME
    end: int = 0  # of its bytes among those sent on its connection
    gone: int = 0  # bytes of its connection that had arrived before it was sent
    places: Sequence[memoryview] | None = None  # where its reply arrives
    outcome: Reply | Exception | None = None  # once it has ended
    ended: threading.Event | None = None  # of the threads that wait for that and do not read
    reader: int = 0  # the thread that waits for that and reads; another one may read its reply

    @property
    def num_bytes(self) -> int:
        """The bytes that the call has moved until now, both ways."""
        return self.sent_bytes + self.received_bytes

    def result(self) -> Reply:
        """Wait for the reply and return it; see PendingReply."""
        end = self.started + self.seconds
        if not self._wait(end):
            self.owner.expire(self)
            self._wait(time.monotonic() + _GRACE_SECONDS)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome is None:
            raise Unreachable("no answer")
        return self.outcome

    def is_done(self) -> bool:
        """Whether the call has its reply, or an error in its place."""
        return self.outcome is not None

    def _wait(self, end: float) -> bool:
        """Wait until it has ended, or until the time `end`; whether it has."""
        poller, began, slice_seconds = self.owner.poller, 0.0, _FIRST_SLICE_SECONDS
        while self.outcome is None and (now := time.monotonic()) < end:
            self.reader = threading.get_ident()
            if poller is None:
                self._ended().wait(end - now)
            elif not poller.run_until(self.is_done, end):
                began = began or now
                self._ended().wait(min(slice_seconds, end - now))
                slice_seconds = min(2 * slice_seconds, _LONGEST_SLICE_SECONDS)
                if self.outcome is None:
                    poller.take_over(time.monotonic() - began)
        return self.outcome is not None

    def _ended(self) -> threading.Event:
        """What is set when another thread ends it."""
        with self.owner.lock:
            ended = self.ended = self.ended or threading.Event()
        if self.outcome is not None:  # before the event was there to be set
            ended.set()
        return ended

    def fail(self, error: Exception) -> None:
        """End with an error, unless it has ended."""
        self._end(error)

    def _end(self, outcome: Reply | Exception) -> None:
        """End, unless it has ended, and wake who waits."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        if self.ended is not None:  # looked for only now: who waits puts it there and then looks at the outcome
            self.ended.set()
        if self.reader not in (0, threading.get_ident()) and (poller := self.owner.poller) is not None:
            poller.wake()

    def lay_out(self, heap: SharedHeap) -> tuple[list[Array], list[int]]:
        """Return the arrays of the request's frame, and where each lies in shared memory, or IN_FRAME.

        Large gradients are copied there, unless they lie there already. Behind the ids of a pull come the arrays for
        its rows, where a shard can write them there.
        """
        travels = [IN_FRAME] * len(self.bulk)
        if self.request is Push:
            placed = [_in_heap(heap, array) for array in self.bulk]
            self.bulk, offsets = [array for array, _ in placed], [offset for _, offset in placed]
            self.in_memory = [array for array, offset in zip(self.bulk, offsets, strict=True) if offset != IN_FRAME]
            return self.bulk, offsets
        if self.request is Pull and len(self.into) == len(self.bulk) <= MAX_BUFFERS // 2:
            places = [_offset(heap, array) for array in self.into]
            if any([place != IN_FRAME for place in places]):
                self.into_offsets, none = places, self.bulk[0][:0]
                self.in_memory = [array for array, place in zip(self.into, places, strict=True) if place != IN_FRAME]
                into = [none if place == IN_FRAME else array for array, place in zip(self.into, places, strict=True)]
                return [*self.bulk, *into], travels + places
        return self.bulk, travels

    def place(self, lengths: Sequence[int]) -> Sequence[memoryview]:
        """Return the memory for an array of the reply: the caller's own, where it fits."""
        if len(lengths) != len(self.into):
            self.into = [np.empty(length, np.uint8) for length in lengths]
        return [
            (array if array.nbytes == length else np.empty(length, np.uint8)).data
            for array, length in zip(self.into, lengths, strict=True)
        ]

    def finish(self, reply: Reply) -> None:
        """End with the reply, whose rows are the caller's own arrays where they came there, unless it has ended."""
        if isinstance(reply, Rows):
            reply = Rows(
                tuple(map(_same, self.into, reply.tables)),
                reply.version,
                reply.codecs,
                reply.settings,
                reply.coding_seconds,
                reply.held_seconds,
                reply.acknowledged,
            )
        self._end(reply)


def _same(array: Array, received: Floats | Bytes) -> Floats | Bytes:
    """The caller's own array, where it is what was received into, see place."""
    same = array.nbytes == received.nbytes and array.dtype == received.dtype
    return cast("Floats | Bytes", array) if same else received


def _in_heap(heap: SharedHeap, array: Array) -> tuple[Array, int]:
    """An array, or its copy in shared memory where that spares the socket much, and its `_offset` there."""
    offset = _offset(heap, array)
    if offset != IN_FRAME or array.dtype != np.float32 or array.nbytes < SHARED_FROM_BYTES:
        return array, offset
    copied = heap.copy(cast(Floats, array))
    return (array, offset) if copied is None else (copied, _offset(heap, copied))


def _offset(heap: SharedHeap, array: Array) -> int:
    """Where an array of float32 lies in shared memory; IN_FRAME where it does not, or is small."""
    if array.nbytes < SHARED_FROM_BYTES or array.dtype != np.float32 or not array.flags.c_contiguous:
        return IN_FRAME
    offset = heap.offset_of(array)
    return IN_FRAME if offset is None else offset


class StreamTransport:
    """One connection to `address`, made at the first call and again when it must.

    Once it was lost, another process may answer there: until a Hello is sent, all but GetStatus is Unreachable.

    "host:port" is a Unix socket where the shard runs on this machine, else TCP; "tcp://host:port" is always TCP, and
    "unix:/path" is a socket of the user's choice; "file:DIR#2" is where shard 2 is announced in a folder, looked up at
    each connection. `checksum` has the arrays checked too, for a network that is not
    trusted to do it. `link` is the emulated one that it shares with the worker's other transports. With `tls`, nothing
    is sent over TCP that is not encrypted, to nobody but a shard whose certificate is trusted. `token` says what to
    show to shards that ask who it is.
    """

    def __init__(
        self,
        address: str,
        *,
        checksum: bool = False,
        link: EmulatedLink | None = None,
        tls: ClientTLS | None = None,
        token: ClientToken | None = None,
    ) -> None:
        self.address = address
        self.link = link
        self.tls = tls
        self.token = token or ClientToken()
        self.sent_bytes = 0
        self.received_bytes = 0
        self._features = Feature.CHECKSUM if checksum else Feature(0)
        self._loop = io_loop()
        # TLS and the emulated link are the loop's: only its thread may touch their connections
        self.poller = io_poller() if tls is None and link is None else None
        self.lock = threading.RLock()  # of all that follows, and of the connection
        self._unstarted: deque[StreamCall] = deque()  # calls that the loop has still to start
        self._connection: StreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._was_answered = self._was_lost = False  # a request; the connection then, and no Hello was sent since
        self._waiting: list[StreamCall] = []
        self._numbers = count(1)
        self.closed = False

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Array] = ()) -> StreamCall:
        """Send a request without waiting for its reply; the rows of a pull are received into `into`, if given.

        The arrays of both must stay as they are until the reply, or the error in its place, is there.
        """
        if self.closed:
            raise TransportClosed
        if not runs_here(self._loop):
            # the parent's tokens too: pushes of both would be taken for retries of one another
            raise RuntimeError(f"the connection to {self.address} is that of the process that forked; make one here")
        with span("encode"):
            bulk = [cast(Array, np.ascontiguousarray(array)) for array in arrays(request)]
            call = StreamCall(self, type(request), head_bytes(request), bulk, into, timeout.total_seconds())
        with self.lock:
            connection = None if self._unstarted or self._was_lost else self._connection
            if connection is not None and connection.is_shared:
                self._send(connection, call)
                return call
            if has_ended():
                raise RuntimeError(
                    f"Python is ending, and nothing is sent to {self.address} any more: call atexit.register behind "
                    "`import embershard`, as what is registered last runs first"
                )
            self._unstarted.append(call)
        self._loop.call_soon_threadsafe(self._start)
        return call

    def close(self) -> None:
        """Cancel the calls in flight and close the connection."""
        self.closed = True
        self._loop.call_soon_threadsafe(self._close)

    def release(self) -> None:
        """Close the connection as soon as no call is under way: nobody has this transport any more.

        Without it the connection stays, which the loop knows, and which knows this transport.
        """
        if runs_here(self._loop) and not self.closed:
            with suppress(RuntimeError):  # the loop has ended, at the interpreter's end
                self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        with self.lock:
            calls = self._unstarted or self._waiting or (self._connection is not None and not self._connection.is_idle)
        if calls:
            self._loop.call_later(_RELEASE_SECONDS, self._release)
        else:
            self.close()

    def _close(self) -> None:
        with self.lock:
            if self._connecting is not None:
                self._connecting.cancel()
            if self._connection is not None:
                self._connection.drop(str(TransportClosed()))
            self._fail_waiting(TransportClosed())

    def _start(self) -> None:
        with self.lock:
            while self._unstarted:
                call = self._unstarted.popleft()
                if self.closed:
                    call.fail(TransportClosed())
                    continue
                self._was_lost = self._was_lost and call.request is not Hello
                if self._was_lost and call.request is not GetStatus:
                    call.fail(Unreachable("the connection was lost"))
                elif self._connection is not None:
                    self._send(self._connection, call)
                elif not call.is_done():  # its deadline may have passed
                    self._waiting.append(call)
                    if self._connecting is None:
                        self._connecting = self._loop.create_task(self._connect())

    def _send(self, connection: StreamConnection, call: StreamCall) -> None:
        call.number = next(self._numbers) & 0xFFFFFFFF or next(self._numbers) & 0xFFFFFFFF
        if not call.is_done():
            connection.send(call)

    def expire(self, call: StreamCall) -> None:
        """End a call whose deadline has passed, as soon as nothing is received into its arrays or sent from them."""
        with self.lock:
            if self._connection is None or self._connection.is_shared:
                self._expire(call)
                return
        self._loop.call_soon_threadsafe(self._expire, call)

    def _expire(self, call: StreamCall) -> None:
        with self.lock:
            if call in self._waiting:
                self._waiting.remove(call)
            elif self._connection is not None and not self._connection.expire(call):
                return
            call.fail(Unreachable("no answer"))

    async def _connect(self) -> None:
        error: Exception
        try:
            connection = await self._greeted()
        except TimeoutError:
            error = Unreachable("it takes connections and says nothing, or does not answer at all")
        except EmbershardError as known:
            error = known
        except Unreachable as unreachable:
            error = unreachable
        except (OSError, ValueError) as failure:  # a name that cannot be one is a UnicodeError
            error = Unreachable(getattr(failure, "strerror", None) or str(failure))
        else:
            with self.lock:
                self._connecting = None
                if self.poller is not None:
                    connection.share(self.poller)
                self._connection = connection
                waiting, self._waiting = self._waiting, []
                for call in waiting:
                    self._send(connection, call)
            return
        with self.lock:
            self._connecting = None
            self._fail_waiting(error)

    def _fail_waiting(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.fail(error)

    async def _greeted(self) -> StreamConnection:
        """A connection whose hello was answered."""
        async with asyncio.timeout(CONNECT_SECONDS):
            connection = await self._open()
            try:
                await connection.ready
            except BaseException:
                connection.drop("no hello")
                raise
        if connection.uses_tls:
            assert self.tls is not None
            async with asyncio.timeout(CONNECT_SECONDS):
                await connection.start_tls(self.tls)
        if connection.lost is not None:  # it said hello and left
            raise connection.refused or connection.lost
        return connection

    async def _open(self) -> StreamConnection:
        protocol = lambda: StreamConnection(self)  # noqa: E731
        address = self.address
        if folder_of(address) is not None:  # in a thread: the folder may be on a slow network
            address = await asyncio.to_thread(current_address, address)
            if self.tls is not None and address.startswith("unix:"):
                raise Unreachable(f"it is announced at a Unix socket ({address}), which shows no certificate")
        if address.startswith("unix:"):
            _, connection = await self._loop.create_unix_connection(protocol, address.removeprefix("unix:"))
            return connection
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        host = host.strip("[]")
        # an emulated network has TCP's buffers: a Unix socket's hold less than the millisecond or two that a busy shard
        # takes to fill them again, and at 1 Gbit/s a tenth of the bandwidth was lost
        tcp = address.startswith("tcp://") or self.link is not None
        beside = None if tcp else await connect_beside(host, int(port))
        if beside is not None:
            _, connection = await self._loop.create_unix_connection(protocol, sock=beside)
        else:
            _, connection = await self._loop.create_connection(protocol, host, int(port))
        return connection

    def lost(self, connection: StreamConnection) -> None:
        """A connection has ended; the next call makes another."""
        if self._connection is connection:
            self._connection = None
            self._was_lost = self._was_answered = self._was_answered or connection.was_answered
