"""Call every shard of one placement at once, with deadlines and retries; each call is timed and counted.

A request is retried with identical bytes: a push is recognised by its token, everything else may be repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple, TypeVar

from embershard.proto.arrays import Array
from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.errors import (
    ClientClosed,
    ClockAhead,
    EmbershardError,
    LoadLost,
    LogStalled,
    MemoryLost,
    MessageTooLarge,
    NotAllowed,
    OtherTerm,
    ShardBusy,
    ShardRecovering,
    ShardRestarted,
    ShardUnavailable,
    TableLoading,
    UnknownTable,
)
from embershard.proto.messages import (
    PUT_BACK_SECONDS,
    Greeting,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Load,
    Pull,
    Push,
    Pushed,
    Reply,
    Request,
    Restore,
    Rows,
    ShardStatus,
    Snapshot,
    TableKey,
    replace,
)
from embershard.proto.routing import Route
from embershard.proto.timing import Deadline, charge_to, pauses, sleep, span
from embershard.proto.transport.shared_socket import Poller
from embershard.proto.transport.transport import PendingReply, TransportClosed, Unreachable
from embershard.proto.wire import MAX_BUFFERS, MAX_HEAD_BYTES
from embershard.worker.client.byte_counts import ByteCounter, ByteCounts
from embershard.worker.client.kept import KeptPushes, with_first_incomplete
from embershard.worker.client.shard_connection import (
    FailedCall,
    ShardConnection,
    labelled,
    submit,
    unavailable,
)

RECOVERY_TIMEOUT = timedelta(minutes=30)  # for a shard that recovers its rows

# what protobuf adds to the arrays, generously: tags, lengths and numbers, once per message and once per table
MESSAGE_OVERHEAD = 256
TABLE_OVERHEAD = 64
_MEMBER_OVERHEAD = 16  # of a table in a bundle, beside its name

_log = logging.getLogger(__name__)


_ANSWERED_WITHOUT_LOG = (Rows, Greeting, ShardStatus)  # also while a shard cannot write its event log

Outcome = Reply | EmbershardError
Places = Mapping[int, Sequence[Array]]  # shard -> memory for the rows of its reply
_Part = TypeVar("_Part")
Watch = Callable[[Mapping[int, Request], Mapping[int, Outcome], float], None]  # requests, replies, seconds


@dataclass(slots=True)
class ClientStats:
    """Counters of a client since its start."""

    wait_seconds: float = 0.0  # spent waiting for shards, and for what they wait for
    workers_wait_seconds: float = 0.0  # of these, for other workers: a clock that is not closed, a collective
    data_wait_seconds: float = 0.0  # of these, for a loader that had no batch
    pulled_rows: int = 0
    pushed_rows: int = 0  # rows that shards applied
    skipped_rows: int = 0  # gradient rows that held NaN or Inf
    sent_bytes: int = 0
    received_bytes: int = 0
    cache_hits: int = 0  # rows that a session's cache gave
    cache_lookups: int = 0  # rows that it was asked for
    lost_leases: int = 0  # times that the other workers went on without this one
    volume: ByteCounts = field(default_factory=dict)  # the bytes by direction and part


class ShardConnections:
    """All shards of a placement. Safe for use by several threads."""

    def __init__(
        self,
        connections: Sequence[ShardConnection],
        worker: int,
        timeout: timedelta,
        recovery_timeout: timedelta = RECOVERY_TIMEOUT,
        clock: SystemClock = SYSTEM_CLOCK,
    ) -> None:
        self.timeout = timeout  # of every call that gives no other
        self.recovery_timeout = recovery_timeout  # of every call to a shard that recovers its rows
        self.clock = clock
        self.stats = ClientStats()
        self.lock = clock.lock()  # of the stats
        self.byte_counter = ByteCounter()
        self.settings_revision = 0  # of the compression settings that the shards were given, as replies show it
        self.watch: Watch | None = None  # called after every call that is counted
        self.say: Callable[[str], object] | None = None  # told, beside the log, that a shard has no room for its log
        self.heartbeat: Heartbeat | None = None  # sent over a new connection: it tells the shard which member this is
        self.lineage = 0  # of the rows of all shards, once this client has declared a table or compared them
        self.restoring: set[int] = set()  # lineages that a restore of this client is giving to the shards
        self.recoveries = 0  # times that a shard came back with its rows in a new process
        self.kept = KeptPushes(clock)
        self._connections = {connection.greeting.shard: connection for connection in connections}
        self._verifying = {shard: clock.lock() for shard in self._connections}  # held by who asks it who it is
        self._worker = worker
        pollers = [getattr(connection.transport, "poller", None) for connection in connections]
        self._poller: Poller | None = pollers[0] if all(pollers) else None  # a thread that waits reads its replies
        self._lost: ShardRestarted | None = None  # once rows are gone, every later call says so

    def __del__(self) -> None:
        """Leave no connection open where nobody has these any more and nobody closed them."""
        for connection in self._connections.values():
            if (release := getattr(connection.transport, "release", None)) is not None:
                release()

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[ShardConnection]:
        return iter(self._connections.values())

    @property
    def shards(self) -> tuple[int, ...]:
        """Ids of all shards, ascending."""
        return tuple(self._connections)

    def __getitem__(self, shard: int) -> ShardConnection:
        return self._connections[shard]

    def term(self, shard: int) -> int:
        """Return the term of the shard's process, as far as it is known; 0 without a log."""
        return self._connections[shard].greeting.term

    def call_all(self, request: Request) -> list[Outcome]:
        """Send one request to every shard; the replies in the order of `shards`. Raises the first error."""
        outcomes = self.call(dict.fromkeys(self.shards, request))
        raise_first(outcomes)
        return [outcomes[shard] for shard in self.shards]

    def call(
        self,
        requests: Mapping[int, Request],
        into: Places | None = None,
        *,
        timeout: timedelta | None = None,
        counted: bool = True,
        awaits_recovery: bool = True,
        asks_all_again: bool = False,
    ) -> dict[int, Outcome]:
        """Send one request to each of the shards named, all at once, and wait for their replies or errors.

        `into`: memory for the rows of pulls, see Transport.submit. With `counted` its time is part of `stats`.
        Busy, loading, stopping and unreachable shards are asked again, after growing pauses, until the timeout; one
        that put a request back for other workers' sake, so near to it that no answer could come in time, is not. The
        timeout of a shard begins anew whenever it says that it recovers its rows, or that it cannot write its event
        log, for `recovery_timeout` from the first time on, unless `awaits_recovery` is False. The call ends once one
        of them is waited for no longer. With `asks_all_again`, those that have answered are asked again too, as long
        as another has to be.
        """
        whole = left = self.timeout if timeout is None else timeout
        start, deadline = time.perf_counter(), Deadline(left, self.clock)
        deadlines = dict.fromkeys(requests, deadline)
        stalled: dict[int, Deadline] = {}  # for shards that cannot write their logs, since they have said so first
        held = 0.0  # seconds, for other workers
        outcomes: dict[int, Outcome] = {}
        waiting = requests
        try:
            with span("wait") if counted else nullcontext():  # a transport may charge parts of it to other spans
                growing = pauses(self.clock)
                while True:
                    try:
                        if self._poller is not None:
                            self._poller.begin()
                        waiting = self._try(waiting, into or {}, left, deadline, outcomes)
                    finally:
                        if self._poller is not None:
                            self._poller.end()
                    if any([isinstance(outcome, ClockAhead) for outcome in outcomes.values()]):
                        held = time.perf_counter() - start  # put back: the next try counts anew
                    if not waiting:
                        break
                    pause = max(next(growing), _wanted_pause(waiting, outcomes, self.clock))
                    if any(isinstance(outcomes.get(shard), _AnswersAgain) for shard in waiting):
                        pause = 0.0
                    comes_back = [
                        shard
                        for shard in waiting
                        if awaits_recovery and self._comes_back(shard, outcomes.get(shard), stalled)
                    ]
                    sleep(pause, deadline)
                    if asks_all_again:
                        comes_back += requests.keys() - waiting.keys()
                        waiting = requests
                    deadlines |= dict.fromkeys(comes_back, Deadline(whole, self.clock))
                    deadline = min((deadlines[shard] for shard in waiting), key=lambda one: one.seconds)
                    if deadline.seconds <= 0:
                        break
                    left = deadline.remaining
                if waiting:
                    outcomes = self._with_unanswered(waiting, outcomes, deadlines)
                # shards work side by side, but for those of this process: the slowest is waited for
                coding = held_there = 0.0
                for reply in outcomes.values():
                    if isinstance(reply, (Rows, Pushed)):
                        coding = max(coding, reply.coding_seconds)
                        self.settings_revision = max(self.settings_revision, reply.settings)
                    if isinstance(reply, Rows):
                        held_there = max(held_there, reply.held_seconds)
                charge_to("shards", coding)
            held += held_there
            if counted and (watch := self.watch) is not None:
                watch(requests, outcomes, time.perf_counter() - start)
            return outcomes
        finally:
            if counted:
                with self.lock:
                    seconds = time.perf_counter() - start
                    self.stats.wait_seconds += seconds
                    self.stats.workers_wait_seconds += min(held, seconds)

    def _try(
        self,
        requests: Mapping[int, Request],
        into: Places,
        left: timedelta,
        deadline: Deadline,
        outcomes: dict[int, Outcome],
    ) -> dict[int, Request]:
        """Ask each shard once and note its outcome; the requests that have to be sent again."""
        if self._lost is not None:
            outcomes.update(dict.fromkeys(requests, self._lost))
            return {}
        waiting, pending = dict(requests), dict[int, PendingReply]()
        suspects = list[int]()
        for shard, request in requests.items():
            if self._connections[shard].suspect:
                suspects.append(shard)
            else:
                transport = self._connections[shard].transport
                try:  # as `submit`, a call less
                    pending[shard] = transport.submit(request, left, into.get(shard, ()))
                except Unreachable as error:
                    pending[shard] = FailedCall(error)
        for shard in suspects:  # after the others were asked: a shard that is unresponsive must not cost their leases
            outcomes[shard] = self._verify_rows(shard, deadline) or _AnswersAgain()
            if isinstance(outcomes[shard], (ClientClosed, NotAllowed, MemoryLost)):  # as it will be another time
                del waiting[shard]
            else:
                waiting[shard] = self._renewed(shard, waiting[shard])
        for shard, answer in pending.items():
            outcome = outcomes[shard] = self._outcome(shard, requests[shard], answer, deadline)
            self.byte_counter.count(requests[shard], outcome, answer)
            if isinstance(outcome, OtherTerm):  # another process, and nobody has noticed, or another thread has
                waiting[shard] = self._renewed(shard, requests[shard])
                if waiting[shard] is requests[shard]:
                    self._connections[shard].suspect = True
            put_back = isinstance(outcome, ClockAhead) and deadline.seconds < _too_short(deadline)
            if put_back or not getattr(outcome, "retryable", False):
                del waiting[shard]
        return waiting

    def _comes_back(self, shard: int, outcome: Outcome | None, stalled: dict[int, Deadline]) -> bool:
        """Whether a shard that is asked again recovers its rows, or has no room for its log, and may go on with it."""
        if isinstance(outcome, ShardRecovering):
            earliest = self.clock.now() - self.recovery_timeout.total_seconds()
            return self._connections[shard].recovering_since > earliest
        if isinstance(outcome, LogStalled):
            return stalled.setdefault(shard, Deadline(self.recovery_timeout, self.clock)).seconds > 0
        return False

    def _with_unanswered(
        self, waiting: Iterable[int], outcomes: dict[int, Outcome], deadlines: Mapping[int, Deadline]
    ) -> dict[int, Outcome]:
        """The outcomes, with those of requests that no try was left for; the first are those that ended the call."""
        late = sorted(waiting, key=lambda shard: deadlines[shard].seconds > 0)
        ended = {shard: self._unanswered(shard, outcomes.get(shard), deadlines[shard]) for shard in late}
        return ended | {shard: outcome for shard, outcome in outcomes.items() if shard not in ended}

    def _unanswered(self, shard: int, last: Outcome | None, deadline: Deadline) -> Outcome:
        """The outcome of a request that no try was left for."""
        if isinstance(last, ShardRecovering):
            return self._gave_up(shard, last)
        if last is not None and not isinstance(last, _Retry):
            return last
        connection, reason = self._connections[shard], "no time was left to ask" if last is None else last.reason
        return unavailable(connection.name, connection.transport.address, reason, deadline)

    def _gave_up(self, shard: int, last: ShardRecovering) -> ShardUnavailable:
        """The outcome of a request to a shard whose recovery takes longer than may be waited for."""
        connection = self._connections[shard]
        waited, limit = self.clock.now() - connection.recovering_since, self.recovery_timeout.total_seconds()
        reason = (
            f"{last.progress}, and this worker waits for {limit:.0f} s: raise "
            "recovery_timeout, in a job train.recovery_timeout"
        )
        return ShardUnavailable(
            shard=connection.name, seconds=waited, reason=reason, address=connection.transport.address
        )

    def _outcome(
        self, shard: int, request: Request, answer: PendingReply, deadline: Deadline, *, verifies: bool = True
    ) -> Outcome:
        connection = self._connections[shard]
        try:
            reply = answer.result()
            if isinstance(reply, (Pushed, Rows, HeartbeatAck)) and reply.acknowledged:
                term = request.term if isinstance(request, (Push, Pull, Heartbeat)) else None
                self.kept.acknowledge(shard, reply.acknowledged, term)
            if connection.has_stalled and _shows_room(request, reply):
                connection.has_stalled = False
                self._say(f"{connection.name} writes its event log again")
            return reply
        except TransportClosed:
            return labelled(ClientClosed(), connection.name)
        except Unreachable as error:
            connection.suspect = True
            return _Retry(error.reason)
        except ShardRecovering as error:
            connection.suspect = True
            return self._recovering(connection, error)
        except TableLoading as error:
            if error.fields.get("worker") != self._worker:
                return labelled(error, connection.name)
            # an earlier process of this worker has loaded it, or this one: neither does so again
            return labelled(LoadLost(table=error.fields["table"], worker=self._worker), connection.name)
        except LogStalled as error:
            labelled(error, connection.name)
            if not connection.has_stalled:
                connection.has_stalled = True
                self._say(f"waiting for {error}")
            return error
        except UnknownTable as error:
            # every table was declared before it was used: either a mistake in its name, or an empty shard
            return (self._verify_rows(shard, deadline) if verifies else None) or labelled(error, connection.name)
        except EmbershardError as error:
            return labelled(error, connection.name)

    def _say(self, text: str) -> None:
        _log.warning("%s", text)
        if self.say is not None:
            self.say(text)

    def _verify_rows(self, shard: int, deadline: Deadline) -> EmbershardError | None:
        """Ask a shard behind a broken connection who it is: None if it has our rows, else ShardRestarted.

        The process of before has them, and one that recovered our lineage, to which the pushes that may be lost are
        sent before anything else. Where it does not know all that were acknowledged, it says so (MemoryLost): to the
        heartbeat of a member, whose next push may wait for the clock that was lost, else to the next push.
        """
        if not self._verifying[shard].acquire(blocking=False):
            return _Retry("another call asks who it is")
        try:
            return self._verify(shard, deadline)
        finally:
            self._verifying[shard].release()

    def _verify(self, shard: int, deadline: Deadline) -> EmbershardError | None:
        connection = self._connections[shard]
        try:
            reply = submit(connection.transport, Hello(worker=self._worker), deadline.remaining).result()
        except TransportClosed:
            return labelled(ClientClosed(), connection.name)
        except Unreachable as error:
            return _Retry(error.reason)
        except ShardRecovering as error:
            return self._recovering(connection, error)
        except NotAllowed as error:  # its token was revoked: the shard will not know it another time, either
            return labelled(error, connection.name)
        except EmbershardError as error:
            return _Retry(str(error))
        if isinstance(reply, Greeting) and self._has_our_rows(connection.greeting, reply):
            if self.heartbeat is not None:  # first: the bytes of what comes now keep the lease
                known = replace(self.heartbeat, first_incomplete=self.kept.first_incomplete(shard))
                connection.heartbeat = submit(connection.transport, known, deadline.remaining)
            if reply.instance != connection.greeting.instance:
                failed = self.kept.resend(shard, reply.term, lambda push: self._send_again(connection, push, deadline))
                if failed is not None:  # one that has no room for its log, or recovers once more, is waited for longer
                    return failed if isinstance(failed, ShardBusy) else _Retry(str(failed))
                if (failed := _outcome_of(connection.heartbeat)) is not None:
                    return labelled(failed, connection.name)
                _log.warning("%s is back, with its rows (term %d)", connection.name, reply.term)
                self.recoveries += 1
            connection.greeting, connection.suspect, connection.recovering_since = reply, False, 0.0
            return None
        got = reply.instance if isinstance(reply, Greeting) else type(reply).__name__
        self._lost = ShardRestarted(
            shard=connection.name, address=connection.transport.address, got=got, want=connection.greeting.instance
        )
        return self._lost

    def _send_again(self, connection: ShardConnection, push: Push, deadline: Deadline) -> Outcome:
        """The outcome of a push that is kept."""
        answer = submit(connection.transport, push, deadline.remaining)
        outcome = self._outcome(connection.greeting.shard, push, answer, deadline, verifies=False)  # this is part of it
        self.byte_counter.count(push, outcome, answer)
        return outcome

    def _renewed(self, shard: int, request: Request) -> Request:
        """The request, meant for the process of the shard that is known now."""
        term = self.term(shard)
        if not isinstance(request, (Push, Pull, Load, Heartbeat)) or request.term in (0, term):
            return request
        request = replace(request, term=term)
        if not isinstance(request, (Push, Load)) or request.token is None:
            return request
        return with_first_incomplete(request, self.kept.first_incomplete(shard, request.token.seq))

    def _recovering(self, connection: ShardConnection, error: ShardRecovering) -> EmbershardError:
        error.shard = connection.name
        if not connection.recovering_since:
            connection.recovering_since = self.clock.now()
            _log.warning("waiting for %s", error)
        return error

    def _has_our_rows(self, known: Greeting, reply: Greeting) -> bool:
        if reply.instance == known.instance:
            return True
        lineage = self.lineage or known.lineage  # 0: there were no rows, and this client has declared nothing
        ours = lineage in (0, reply.lineage) or reply.lineage in self.restoring
        return reply.shard == known.shard and ours


class _Retry(EmbershardError):
    """No answer came; stands for the outcome until the request was sent again."""

    retryable = True

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason=reason)


class _AnswersAgain(_Retry):
    """The shard behind a connection that broke has our rows, and was not asked yet."""

    def __init__(self) -> None:
        super().__init__("it answers again")


def _shows_room(request: Request, reply: Reply) -> bool:
    """Whether a shard that gives this reply can write its event log."""
    if isinstance(request, Heartbeat):
        return request.flush
    is_cancelled = isinstance(request, (Snapshot, Restore)) and request.step == "cancel"
    return not is_cancelled and not isinstance(reply, _ANSWERED_WITHOUT_LOG)


def _outcome_of(heartbeat: PendingReply | None) -> MemoryLost | _Retry | None:
    """What a new process of a shard said of the pushes that a member knows to be acknowledged; None: it has them."""
    try:
        if heartbeat is not None:
            heartbeat.result()
    except MemoryLost as error:
        return error
    except (Unreachable, TransportClosed) as error:
        return _Retry(str(error))
    except EmbershardError as error:
        return _Retry(str(error)) if error.retryable else None  # the next request is told of a lease that is lost
    return None


def raise_first(outcomes: Mapping[int, Outcome]) -> None:
    """Raise the first error among outcomes, if there is one."""
    for outcome in outcomes.values():
        if isinstance(outcome, EmbershardError):
            raise outcome


class Chunk(NamedTuple):
    """Rows of one table of a request that one message to one shard carries."""

    part: int  # number of the table in the request
    start: int  # the first row, counted among those of its shard
    rows: slice  # where they lie in the table's route
    is_whole: bool  # whether they are all rows of this table and shard


@lru_cache(2048)  # asked for each message, and of a bundle as long as its names are many
def table_overhead(table: TableKey) -> int:
    """Bytes that a message's head takes for a table or a bundle, at most."""
    if isinstance(table, str):
        return TABLE_OVERHEAD + len(table.encode())
    return TABLE_OVERHEAD + sum([_MEMBER_OVERHEAD + len(member.encode()) for member in table])


class MessageRoom:
    """Count how much more a message to a shard can hold: of `limit` bytes in all, of its head, and of its arrays.

    A frame has at most MAX_BUFFERS arrays (two for each table) and MAX_HEAD_BYTES of head; see proto/wire.py.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.nbytes = self._head = self._tables = 0  # left of the message that is filled; there is none yet

    def begin(self) -> None:
        """Count for a new, empty message from here on."""
        self.nbytes, self._head = self._limit - MESSAGE_OVERHEAD, MAX_HEAD_BYTES - MESSAGE_OVERHEAD
        self._tables = MAX_BUFFERS // 2  # ids and gradients of each

    def fits(self, overhead: int, nbytes: int) -> bool:
        """Whether there is room for a table: its `table_overhead`, and its arrays' bytes."""
        return self._tables > 0 and overhead <= self._head and overhead + nbytes <= self.nbytes

    def take(self, overhead: int, nbytes: int) -> None:
        """Take the room of a table, which fits or is alone in its message."""
        self._tables -= 1
        self._head -= overhead
        self.nbytes -= overhead + nbytes


def fill_messages(parts: Iterable[tuple[_Part, TableKey, int]], limit: int) -> list[tuple[_Part, ...]]:
    """Messages that have room for parts with these arrays (MessageRoom), in order: each part, its table, its bytes."""
    messages, room = list[tuple[_Part, ...]](), MessageRoom(limit)
    for part, table, nbytes in parts:
        overhead = table_overhead(table)
        if not room.fits(overhead, nbytes):
            messages.append(())
            room.begin()
        messages[-1] += (part,)
        room.take(overhead, nbytes)
    return messages


def split_into_messages(
    parts: Sequence[tuple[TableKey, Route]], shard: int, row_bytes: Sequence[int], limit: int
) -> list[list[Chunk]]:
    """Messages that have room for it (MessageRoom), and carry a shard's rows of each (table, route), in order.

    `row_bytes` is what a row of each table takes. Tables without rows are left out. MessageTooLarge where not even one
    row fits.
    """
    messages, room = list[list[Chunk]](), MessageRoom(limit)
    for part, ((table, route), size) in enumerate(zip(parts, row_bytes, strict=True)):
        overhead = table_overhead(table)
        first, end = int(route.splits[shard]), int(route.splits[shard + 1])
        start = first
        while start < end:
            if not room.fits(overhead, size):
                room.begin()
                if not room.fits(overhead, size):
                    raise MessageTooLarge(got=MESSAGE_OVERHEAD + overhead + size, limit=limit)
                messages.append([])
            stop = min(end, start + (room.nbytes - overhead) // size)
            messages[-1].append(Chunk(part, start - first, slice(start, stop), stop - start == end - first))
            room.take(overhead, (stop - start) * size)
            start = stop
    return messages


def _wanted_pause(waiting: Mapping[int, Request], outcomes: Mapping[int, Outcome], clock: SystemClock) -> float:
    """Seconds that busy shards ask for, jittered; 0 where none does."""
    busy = [o.fields.get("retry_after_ms") for s in waiting if isinstance(o := outcomes.get(s), ShardBusy)]
    wanted = max((ms / 1000 for ms in busy if isinstance(ms, int | float)), default=0.0)
    return wanted * clock.uniform(1.0, 1.2)


def _too_short(deadline: Deadline) -> float:
    """Seconds: a shard that puts a request back does it with less than this left."""
    return min(2 * PUT_BACK_SECONDS, deadline.timeout.total_seconds() / 4)
