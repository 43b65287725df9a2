"""A shard in the worker's own process: for tests, notebooks and models that fit one machine."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps it in enums, which takes ten times as long
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Protocol, cast

import numpy as np

from embershard.proto.arrays import Array, Floats
from embershard.proto.errors import ClockAhead, EmbershardError
from embershard.proto.messages import Load, Pull, Push, Reply, Request, Rows, bulk_bytes
from embershard.proto.transport.transport import TransportClosed, Unreachable

_POLL_SECONDS = 0.05  # leases end by the time, of which nobody tells


class LocalTransport:
    """Calls `handle` in the caller's thread; `handle` must bear the threads that its callers use."""

    def __init__(self, handle: Callable[[Request], Reply], address: str) -> None:
        self.address = address
        self.sent_bytes = 0
        self.received_bytes = 0
        self._handle = handle
        self._is_closed = False
        self._moved = threading.Condition()  # notified when what was refused with ClockAhead may be answered

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Array] = ()) -> _LocalReply:
        """Handle the request at once, if it need not wait for other workers. TransportClosed after `close`."""
        if self._is_closed:
            raise TransportClosed
        if not isinstance(request, Pull) or len(into) != len(request.tables):
            return _LocalReply(self, request, timeout)
        return _LocalReply(self, _with_places(request, into), timeout, into)

    def close(self) -> None:
        """Take no further request, as a connection that was closed takes none."""
        self._is_closed = True

    def _try(self, request: Request) -> tuple[Reply | EmbershardError, threading.Lock | None]:
        """The reply, or the error in its place; and a lock that is held until it may be shown, None: it may."""
        try:
            return self._handle(request), None
        except EmbershardError as error:
            return error, None


class SharedShard(Protocol):
    """The shard of ps/shard.py, as far as its callers in this process know it."""

    @property
    def generation(self) -> int:
        """Grows with whatever may let a request be answered that had to wait."""
        ...

    @property
    def keeps_arrays(self) -> bool:
        """Whether it keeps the arrays of a push."""
        ...

    def handle(self, request: Request) -> Reply:
        """The reply to a request; for one thread at a time."""
        ...

    def when_may_leave(self, end: Callable[[], None]) -> None:
        """Call `end` once the answer to the request that was handled last may leave: at once, or later, anywhere."""
        ...


class SharedTransport(LocalTransport):
    """Calls a shard that other threads call by transports of their own: one request at a time, all within `moved`."""

    def __init__(self, shard: SharedShard, address: str, moved: threading.Condition) -> None:
        super().__init__(shard.handle, address)
        self._shard, self._moved = shard, moved

    def _try(self, request: Request) -> tuple[Reply | EmbershardError, threading.Lock | None]:
        shard, released = self._shard, threading.Lock()
        released.acquire()
        with _uninterrupted(), self._moved:
            before = shard.generation
            try:
                outcome, _ = super()._try(_kept(request) if shard.keeps_arrays else request)
            finally:
                if shard.generation != before:
                    self._moved.notify_all()
            shard.when_may_leave(released.release)
        return outcome, released


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a Ctrl-C take effect at the end: a request that it ends halfway would be applied in part, and then again."""
    before, came = _signal.getsignal(_signal.SIGINT), []
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        _signal.signal(_signal.SIGINT, lambda *signalled: came.append(signalled))
        yield
    finally:
        _signal.signal(_signal.SIGINT, before)
        if came:
            before(*came[0])


def _kept(request: Request) -> Request:
    """The request with arrays of its own: a shard keeps those that it gathers or logs; its caller may reuse them."""
    if isinstance(request, Load):
        return replace(request, ids=request.ids.copy(), rows=request.rows.copy())
    if not isinstance(request, Push):
        return request
    tables = (replace(part, ids=part.ids.copy(), gradients=part.gradients.copy()) for part in request.tables)
    return replace(request, tables=tuple(tables))


def _with_places(pull: Pull, into: Sequence[Array]) -> Pull:
    """A pull whose rows are written into these arrays, where they are wanted as float32."""
    parts = [
        replace(part, into=cast(Floats, array).reshape(-1))
        if not part.codec and array.dtype == np.float32 and array.flags.c_contiguous
        else part
        for part, array in zip(pull.tables, into, strict=True)
    ]
    return replace(pull, tables=tuple(parts))


def _in_place(reply: Rows, into: Sequence[Array]) -> Rows:
    """The reply with the caller's own arrays where the rows came there."""
    tables = [
        cast(Floats, array) if rows.ctypes.data == array.ctypes.data and rows.nbytes == array.nbytes else rows
        for rows, array in zip(reply.tables, into, strict=True)
    ]
    return replace(reply, tables=tuple(tables))


class _LocalReply:
    """A reply, or the error in its place."""

    def __init__(
        self, transport: LocalTransport, request: Request, timeout: timedelta, into: Sequence[Array] = ()
    ) -> None:
        self._transport, self._request, self._into = transport, request, into
        self._end = time.monotonic() + timeout.total_seconds()
        self.num_bytes = bulk_bytes(request)  # see PendingReply
        transport.sent_bytes += self.num_bytes
        self._outcome: Reply | EmbershardError
        self._released: threading.Lock | None
        self._take(*transport._try(request))

    def _take(self, outcome: Reply | EmbershardError, released: threading.Lock | None) -> None:
        self._outcome, self._released = outcome, released
        if not isinstance(outcome, EmbershardError):
            received = bulk_bytes(outcome)
            self.num_bytes += received
            self._transport.received_bytes += received

    def result(self) -> Reply:
        if isinstance(self._outcome, ClockAhead):
            self._wait()
        if self._released is not None:
            if not self._released.acquire(timeout=max(0.0, self._end - time.monotonic())):
                raise Unreachable("the shard's event log has not accepted the request in time")
            self._released = None
        if isinstance(self._outcome, EmbershardError):
            raise self._outcome
        if self._into and isinstance(self._outcome, Rows):
            return _in_place(self._outcome, self._into)
        return self._outcome

    def _wait(self) -> None:
        moved = self._transport._moved
        with moved:  # so that no move is missed between a try and the wait
            while isinstance(self._outcome, ClockAhead) and time.monotonic() < self._end:
                self._take(*self._transport._try(self._request))
                if isinstance(self._outcome, ClockAhead):
                    moved.wait(max(0.0, min(_POLL_SECONDS, self._end - time.monotonic())))
