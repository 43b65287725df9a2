"""Pass requests from a transport to the shard: some are answered at once, the others by the apply thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from embershard.proto.errors import EmbershardError, InternalError, QuotaExceeded
from embershard.proto.messages import METHODS, Declare, GetStatus, Hello, Pull, Push, Reply, Request, ShardStatus
from embershard.proto.monitoring.tracing import Context, RequestTracer
from embershard.ps.apply_thread import ApplyThread
from embershard.ps.journal.progress import RecoveryProgress
from embershard.ps.monitoring.log_lines import LinesPerMinute
from embershard.ps.security.access import AUDITED, Access, Principal, is_audited, of_nobody
from embershard.ps.security.audit import AuditLog
from embershard.ps.shard import Shard

T = TypeVar("T")


@dataclass(slots=True)
class _Incoming(Generic[T]):
    """A request that a transport has brought; see Dispatch.submit."""

    kind: type[Request]
    read: Callable[[], Request]
    write: Callable[[Reply], T]
    num_bytes: int
    deadline: float
    peer: str
    principal: Principal | None
    is_small: bool


class _FirstRead:
    """A request that is read to be looked at, and need not be read again for its first try."""

    def __init__(self, read: Callable[[], Request]) -> None:
        self._read = read
        self._request: Request | None = None

    def passes(self, check: Callable[[Request], bool]) -> bool:
        """Whether the request passes; one that cannot be read does: its error is soon made again."""
        with suppress(Exception):
            self._request = self._read()
            return check(self._request)
        return True

    def __call__(self) -> Request:
        request, self._request = self._request, None
        return self._read() if request is None else request


_log = logging.getLogger(__name__)


class Dispatch:
    """The shard as every transport sees it. `submit` may be called from any thread.

    Hello and Status are answered at once in the caller's thread: health does not wait behind pushes. Small pulls and
    pushes are, too, while nothing else runs. Everything else goes through the apply thread, reading and writing
    included, so that no I/O thread works for longer than a small call.

    While a `recovery` makes the shard's state, in another thread, only Status is answered, until `open`. `access` says
    who may do what; without it, everybody may do everything.
    """

    def __init__(
        self,
        shard: Shard,
        apply: ApplyThread,
        recovery: RecoveryProgress | None = None,
        access: Access | None = None,
    ) -> None:
        self.access = access
        self._shard = shard
        self._apply = apply
        self._recovery = recovery
        self.budget_bytes = shard.core.budget.limit  # read now: a replay lifts it
        if recovery is None:
            apply.watch(shard)
        self.counters = apply.counters
        self.tracer: RequestTracer | None = None
        self._answered = 0  # Hello and Status, which the shard does not see
        self._lock = threading.Lock()  # of _answered
        self._defect_lines = LinesPerMinute(_log, "%d more defects in an earlier minute, without their tracebacks")

    def open(self) -> None:
        """Answer all requests: the shard has its state."""
        self._recovery = None
        self._apply.watch(self._shard)

    def status(self) -> ShardStatus:
        """The shard's status with what only its transports know."""
        status, recovery = self._shard.status(), self._recovery
        if recovery is not None:
            status.recovering, status.budget_bytes = True, self.budget_bytes
            status.log_bytes, status.recovered_bytes = recovery.total_bytes, recovery.done_bytes
            status.recovery_seconds, status.waits_for_room = recovery.seconds_left, recovery.waits_for_room
        status.requests += self._answered
        status.queued_bytes = self._apply.queued_bytes
        self.counters.fill(status)
        if self.access is not None:
            status.rejected.update(dict(self.access.refusals))
        return status

    @property
    def instance(self) -> str:
        """The name of the shard's process, new at each start."""
        return self._shard.greeting.instance

    @property
    def keeps_arrays(self) -> bool:
        """Whether the shard may need arrays of a request after its reply."""
        return self._shard.keeps_arrays

    def set_activity_probe(self, last_seen: Callable[[int, int], float]) -> None:
        """Tell the shard when bytes of a worker arrived last; see Shard.set_activity_probe."""
        self._shard.set_activity_probe(last_seen)

    def submit(
        self,
        kind: type[Request],
        read: Callable[[], Request],
        write: Callable[[Reply], T],
        *,
        num_bytes: int,
        deadline: float,
        peer: str = "",
        principal: Principal | None = None,
        is_small: bool = False,
    ) -> Future[T]:
        """Queue the request that `read` gives; the future has `write` of its reply, or an EmbershardError.

        `num_bytes` is what the request holds while it waits; `deadline`, on time.monotonic()'s clock, is when nobody
        waits for the reply any more: its future is cancelled then.
        `peer` is where it comes from, for people, and `principal` who sent it: NotAllowed where they may not, before a
        byte of it is decoded. Cancelling a future drops work that has not begun. What `is_small` is done before this
        returns, where nothing else runs or waits, and the shard finds that it is quick.
        A request that has to wait for other workers is read again each time that it may be answered.
        """
        incoming = _Incoming(kind, read, write, num_bytes, deadline, peer, principal, is_small)
        if self.access is not None:
            try:
                self.access.check(principal, kind)
                if principal is not None and principal.usage.is_limited:
                    return self._submit_limited(incoming, principal)
            except QuotaExceeded as error:
                return _failed(error)
            except EmbershardError as error:
                self.access.refused(principal, peer, METHODS[kind][0], error)
                return _failed(error)
        return self._submit(incoming)

    def _submit_limited(self, incoming: _Incoming[T], principal: Principal) -> Future[T]:
        """As submit, of a principal with quotas."""
        principal.usage.take_bytes(incoming.num_bytes)
        future = self._submit(incoming)
        future.add_done_callback(lambda _: principal.usage.give_bytes(incoming.num_bytes))
        return future

    def _submit(self, incoming: _Incoming[T]) -> Future[T]:
        kind, principal = incoming.kind, incoming.principal
        if (recovery := self._recovery) is not None and kind is not GetStatus:
            return _failed(recovery.error())
        if kind not in (Hello, GetStatus):
            try:
                future = self._apply_to(incoming)
                audit = None if self.access is None else self.access.audit
                if audit is None or principal is None or principal.role != "admin" or kind not in AUDITED:
                    return future
                return _when_noted(future, audit)
            except EmbershardError as error:
                return _failed(error)
        done: Future[T] = Future()
        try:
            done.set_result(self._guarded(kind, lambda: incoming.write(self._at_once(incoming.read()))))
        except EmbershardError as error:
            return _failed(error)
        return done

    def _apply_to(self, incoming: _Incoming[T]) -> Future[T]:
        """Have the tables answer; ShardBusy where too much waits for them."""
        num_bytes, deadline = incoming.num_bytes, incoming.deadline
        if not incoming.is_small:
            return self._apply.submit(partial(self._handled, incoming), num_bytes, deadline)
        incoming.read = reading = _FirstRead(incoming.read)
        work = partial(self._handled, incoming)
        is_quick = partial(reading.passes, self._shard.is_quick)
        done = self._apply.run_now(work, num_bytes, deadline, is_quick)
        return self._apply.submit(work, num_bytes, deadline, is_quick) if done is None else done

    def _handled(self, incoming: _Incoming[T]) -> T:
        """Read a request, answer it, and write the reply; the caller holds the tables."""
        tracer = self.tracer
        if tracer is None:
            return self._guarded(
                incoming.kind,
                lambda: incoming.write(self._handle(incoming.read(), incoming.peer, incoming.principal)),
            )
        try:
            return self._guarded(incoming.kind, lambda: self._traced(tracer, incoming))
        finally:
            tracer.end()  # only now: the log of a defect belongs to the request

    def _traced(self, tracer: RequestTracer, incoming: _Incoming[T]) -> T:
        """As _handled, with the spans of a request that is marked."""
        moments = [self._apply.arrived, time.monotonic()]
        request = incoming.read()
        moments.append(time.monotonic())
        context = Context.read(request.trace) if isinstance(request, (Pull, Push)) else None
        if context is not None:
            tracer.begin(context)
        reply = self._handle(request, incoming.peer, incoming.principal)
        moments.append(time.monotonic())
        written = incoming.write(reply)
        if context is not None:
            kind = "gather" if isinstance(request, Pull) else "apply"
            tracer.handled(
                context, METHODS[type(request)][0], [*moments, time.monotonic()], ("queue", "decode", kind, "encode")
            )
        return written

    def _handle(self, request: Request, peer: str, principal: Principal | None) -> Reply:
        """The shard's reply, where the request is about what its principal may reach; on the apply thread."""
        access = self.access
        if access is None or principal is None:
            return self._shard.handle(request, self._apply.arrived, peer)
        try:
            if principal.is_limited:
                access.admit(principal, request, self._shard.tables_of_restore)
            if isinstance(request, Declare):
                access.admit_declare(principal, request, self._shard.core.only_compares)
            if isinstance(request, Pull) and principal.role == "read":
                request = of_nobody(request)
        except EmbershardError as error:
            access.refused(principal, peer, METHODS[type(request)][0], error)
            raise
        if principal.usage.is_limited:
            rows = principal.usage.take_rows(request)
            try:
                return self._noted(access, principal, request, peer)
            except EmbershardError as error:
                if error.retryable:
                    principal.usage.give_rows(rows)
                raise
        return self._noted(access, principal, request, peer)

    def _noted(self, access: Access, principal: Principal, request: Request, peer: str) -> Reply:
        """The shard's reply, with a line of the audit log where it is an act."""
        quotas = principal.table_quotas
        if access.audit is None or not is_audited(request):
            return self._shard.handle(request, self._apply.arrived, peer, quotas)
        outcome = "done"
        try:
            return self._shard.handle(request, self._apply.arrived, peer, quotas)
        except Exception as error:  # a defect, too: nothing was done
            again = isinstance(error, EmbershardError) and error.retryable
            outcome = "" if again else type(error).__name__
            raise
        finally:
            if outcome:
                access.note(principal, peer, request, outcome)

    def _guarded(self, kind: type[Request], answer: Callable[[], T]) -> T:
        """The answer; what is no error of ours is a defect, which the log describes and the client only learns of."""
        try:
            return answer()
        except EmbershardError:
            raise
        except Exception as error:
            if self._defect_lines.may_log():  # a client may ask for the same again, thousands of times a second
                _log.exception("a defect while handling %s", kind.__name__)
            raise InternalError(
                reason=f"{type(error).__name__} in {kind.__name__}: {error}; see the shard's output"
            ) from error

    def _at_once(self, request: Request) -> Reply:
        with self._lock:
            self._answered += 1
        return self._shard.greeting if isinstance(request, Hello) else self.status()


def _when_noted(future: Future[T], audit: AuditLog) -> Future[T]:
    """A future that ends as this one does, but not before what the log has to say of it is on the disk."""
    noted: Future[T] = Future()

    def end() -> None:
        if not noted.set_running_or_notify_cancel():
            return
        if (error := future.exception()) is not None:
            noted.set_exception(error)
        else:
            noted.set_result(future.result())

    def done(_: Future[T]) -> None:
        if future.cancelled():
            noted.cancel()
        else:
            audit.when_safe(end)

    future.add_done_callback(done)
    noted.add_done_callback(lambda _: future.cancel())  # drops work that nobody waits for any more
    return noted


def _failed(error: EmbershardError) -> Future[T]:
    future: Future[T] = Future()
    future.set_exception(error)
    return future
