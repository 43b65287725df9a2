"""Ask shards how they are, each on a connection of its own, and work out rates from two answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta

from embershard.dash.events import Event, Severity
from embershard.proto.errors import (
    BadCertificate,
    BadToken,
    CertificateRefused,
    EmbershardError,
    NotAllowed,
    TLSNotOffered,
    TLSRequired,
    UntrustedCertificate,
    log_stalled,
    waits_for_room,
)
from embershard.proto.messages import GetStatus, ShardStatus
from embershard.proto.monitoring.histogram import quantile
from embershard.proto.security.tls import TLS
from embershard.proto.transport.addresses import transport_for
from embershard.proto.transport.transport import Unreachable

_TIMEOUT = timedelta(seconds=2)
_PATIENCE_SECONDS = 0.15  # for the answers of one round: who is later is in the next
# what is turned away for who sends it, by the reasons of ShardStatus.rejected
_REFUSALS = {
    "not_authenticated": "logins without a token or a certificate that it knows (NotAuthenticated)",
    "not_allowed": "requests that their sender's role or tables do not allow (NotAllowed)",
    "tls": "connections without a certificate that it trusts (TLS)",
    "other_user": "connections of other users of its machine",
}
# why a shard that is up tells its watcher nothing: one of the two does not trust the other
_NO_ACCESS = (
    NotAllowed,
    BadToken,
    BadCertificate,
    UntrustedCertificate,
    CertificateRefused,
    TLSRequired,
    TLSNotOffered,
)
_WINDOW_SECONDS = 2.0  # of latencies: half a second has too few requests for a p99


@dataclass(frozen=True, slots=True)
class TableRow:
    """One table on one shard."""

    name: str
    rows: int
    bytes: int
    dim: int
    optimizer: str
    push_codec: str
    pull_codec: str


@dataclass(slots=True, kw_only=True)
class ShardRow:
    """One shard, as it answered last; `age` is how many seconds ago that was."""

    address: str
    health: str = "starting"
    problem: str = ""  # why it does not answer, or what its updates failed with
    age: float | None = None  # None: it never answered
    stale: bool = True  # it did not answer for more than a second: rates are not known
    shard: int | None = None
    num_shards: int = 0
    num_tables: int = 0
    rows: int = 0
    table_bytes: int = 0
    used_bytes: int = 0
    budget_bytes: int = 0
    resident_bytes: int = 0
    uptime: float = 0.0
    queued_bytes: int = 0
    log_bytes: int = 0
    log_waiting_bytes: int = 0
    durability: str = "memory"
    connections: int = 0
    requests: float | None = None  # per second, as all of these
    pulled_rows: float | None = None
    pushed_rows: float | None = None
    received: float | None = None  # bytes
    sent: float | None = None
    busy: float | None = None  # share of the time that the thread of the tables works
    queue_p99: float | None = None  # milliseconds, as all of these
    pull_p50: float | None = None
    pull_p99: float | None = None
    push_p50: float | None = None
    push_p99: float | None = None


class ShardWatch:
    """Hold what one shard answered, and what follows from it."""

    def __init__(self, address: str, tls: TLS | None = None) -> None:
        self.address = address
        self._transport = transport_for(address, tls=tls)
        self._answers: deque[tuple[float, ShardStatus]] = deque()  # of one process, the window and one before
        self._asked: Future[ShardStatus] | None = None
        self._asked_at = 0.0
        self.problem = ""
        self.latencies: deque[float | None] = deque(maxlen=240)  # p99 of pulls, round by round
        self._down = False
        self._silence = "down"  # the health of a shard that does not answer

    def ask(self, pool: ThreadPoolExecutor) -> Future[ShardStatus]:
        """Ask it, unless an answer is due still."""
        if self._asked is None:
            self._asked_at = time.monotonic()
            self._asked = pool.submit(self._ask)
        return self._asked

    def take(self, now: float) -> list[Event]:
        """Take in its answer, if there is one; what happened to it."""
        if self._asked is None or not self._asked.done():
            return []
        asked, self._asked = self._asked, None
        try:
            new = asked.result()
        except Unreachable as error:
            self._silence = "down"
            is_silent = error.reason == "no answer"
            reason = f"nothing came within {_TIMEOUT.seconds} s; it may be stopped" if is_silent else error.reason
            return self._lost(now, reason, "does not answer")
        except EmbershardError as error:
            self._silence = "no access" if isinstance(error, _NO_ACCESS) else "down"
            return self._lost(now, str(error), "does not say how it is")
        self.problem = problem_of(new)
        before, was_down, self._down = self.status, self._down, False
        events = self._compare(before, new, now, was_down)
        if before is not None and (before.instance != new.instance or before.recovering):
            self._answers.clear()  # a replay counts again what was counted before
        self._answers.append((self._asked_at, new))
        while len(self._answers) > 2 and self._answers[1][0] < self._asked_at - _WINDOW_SECONDS:
            self._answers.popleft()
        return events

    @property
    def status(self) -> ShardStatus | None:
        """The shard's last status, however old; None before its first."""
        return self._answers[-1][1] if self._answers else None

    @property
    def is_stale(self) -> bool:
        """Whether the last answer is more than a second old."""
        return not self._answers or time.monotonic() - self._answers[-1][0] > 1.0 + _PATIENCE_SECONDS

    def since(self, name: str) -> Sequence[int]:
        """Return how far a histogram of durations has grown in the window, by bucket."""
        if self.is_stale or len(self._answers) < 2:
            return ()
        old, new = (getattr(answer, name).counts for _, answer in (self._answers[0], self._answers[-1]))
        return [count - (old[i] if i < len(old) else 0) for i, count in enumerate(new)]

    def row(self, *, lost: bool) -> ShardRow:
        """Return it as a row of the page; `lost` says that its rows do not belong to those of the others."""
        row = ShardRow(address=self.address, problem=self.problem, stale=self.is_stale)
        status = self.status
        if status is None:
            row.health = self._silence if self.problem else "starting"
            return row
        row.age = round(max(0.0, time.monotonic() - self._answers[-1][0]), 1)
        row.health = self._silence if row.stale else health_of(status, lost=lost)
        row.shard, row.num_shards, row.uptime = status.shard, status.num_shards, status.uptime_seconds
        row.num_tables = len(status.tables)
        row.rows, row.table_bytes = sum(t.rows for t in status.tables), sum(t.bytes for t in status.tables)
        for name in ("used_bytes", "budget_bytes", "resident_bytes", "queued_bytes", "log_bytes", "log_waiting_bytes"):
            setattr(row, name, getattr(status, name))
        row.durability = status.durability
        row.connections = _total(status, "connections")
        if not row.stale:
            self._add_rates(row)
        self.latencies.append(row.pull_p99)
        return row

    def tables(self, match: str = "") -> list[TableRow]:
        """Its tables in the order of their declaration: those whose names contain `match`, in any case."""
        match = match.casefold()
        return [
            TableRow(t.name, t.rows, t.bytes, t.dim, t.optimizer, codec_of(t.push_codec), codec_of(t.pull_codec))
            for t in (() if self.status is None else self.status.tables)
            if match in t.name.casefold()
        ]

    def close(self) -> None:
        """Close the connection to the shard; a call under way ends with an error."""
        self._transport.close()

    def _ask(self) -> ShardStatus:
        reply = self._transport.submit(GetStatus(), _TIMEOUT).result()
        assert isinstance(reply, ShardStatus)
        return reply

    def _lost(self, now: float, problem: str, what: str) -> list[Event]:
        self.problem = problem
        if self._down:
            return []
        self._down = True
        return [Event(now, Severity.ERROR, f"{self._name} {what}: {problem}")]

    @property
    def _name(self) -> str:
        return f"the shard at {self.address}" if self.status is None else f"shard {self.status.shard}"

    def _compare(self, old: ShardStatus | None, new: ShardStatus, now: float, was_down: bool) -> list[Event]:
        name = f"shard {new.shard}"
        if old is None:
            return [Event(now, Severity.INFO, f"{name} answers")] if was_down else []
        if old.instance != new.instance:
            kept = (
                f"with its event log, term {new.term}"
                if new.term
                else "without its rows"
                if sum(table.rows for table in old.tables)
                else "anew"
            )
            return [Event(now, Severity.WARNING, f"{name} was started again, {kept}")]
        events = [Event(now, Severity.INFO, f"{name} answers again")] if was_down else []
        if old.recovering and not new.recovering:
            events.append(Event(now, Severity.INFO, f"{name} has recovered its rows"))
        if new.waits_for_room and not old.waits_for_room:
            events.append(Event(now, Severity.ERROR, f"{name}: {problem_of(new)}"))
        if new.draining and not old.draining:
            events.append(Event(now, Severity.WARNING, f"{name} finishes what it accepted, and ends"))
        if new.last_snapshot > old.last_snapshot:
            events.append(Event(new.last_snapshot, Severity.INFO, f"{name} wrote its part of a snapshot"))
        if new.skipped_rows > old.skipped_rows and not old.recovering:
            skipped = new.skipped_rows - old.skipped_rows
            events.append(Event(now, Severity.WARNING, f"{name} left out {skipped:,} gradient rows with NaN or Inf"))
        for reason, count in new.rejected.items():
            if count > old.rejected.get(reason, 0):
                grown = count - old.rejected.get(reason, 0)
                what = _REFUSALS.get(reason)
                text = f"turned {grown:,} requests away: {reason}" if what is None else f"refused {what}: {grown:,}"
                events.append(Event(now, Severity.WARNING, f"{name} {text}"))
        if new.failed_update and not old.failed_update:
            events.append(Event(now, Severity.ERROR, f"an update failed on {name}: {new.failed_update}"))
        return events

    def _add_rates(self, row: ShardRow) -> None:
        if len(self._answers) < 2:
            return
        (then, old), (now, new) = self._answers[-2], self._answers[-1]
        seconds = max(now - then, 1e-9)
        own = 1  # this question itself
        row.requests = max(0.0, (new.requests - old.requests - own) / seconds)
        row.pulled_rows = (new.pulled_rows - old.pulled_rows) / seconds
        row.pushed_rows = (new.pushed_rows - old.pushed_rows) / seconds
        if new.transports:
            row.received = (_total(new, "received_bytes") - _total(old, "received_bytes")) / seconds
            row.sent = (_total(new, "sent_bytes") - _total(old, "sent_bytes")) / seconds
        row.busy = min(1.0, max(0.0, (new.apply_busy_seconds - old.apply_busy_seconds) / seconds))
        row.queue_p99 = milliseconds(self.since("queue_seconds"), 0.99)
        for name in ("pull", "push"):
            counts = self.since(f"{name}_seconds")
            setattr(row, f"{name}_p50", milliseconds(counts, 0.5))
            setattr(row, f"{name}_p99", milliseconds(counts, 0.99))


class ShardWatches:
    """All shards of a job; `ask` asks them at once, and waits a moment for their answers."""

    def __init__(self, addresses: Sequence[str], tls: TLS | None = None) -> None:
        self.watches = [ShardWatch(address, tls) for address in addresses]
        # a thread for each: one that is slow, or gone, holds up no other
        self._pool = ThreadPoolExecutor(max(1, len(addresses)), "ask") if addresses else None

    def ask(self) -> list[Event]:
        """A round: what happened since the last one."""
        if self._pool is None:
            return []
        wait([watch.ask(self._pool) for watch in self.watches], _PATIENCE_SECONDS)
        now = time.time()
        return [event for watch in self.watches for event in watch.take(now)]

    @property
    def fresh(self) -> list[ShardStatus]:
        """The statuses of those that answer."""
        return [watch.status for watch in self.watches if watch.status is not None and not watch.is_stale]

    def milliseconds(self, name: str, share: float) -> float | None:
        """Milliseconds of a histogram over all shards."""
        parts = [watch.since(name) for watch in self.watches]
        width = max(map(len, parts), default=0)
        return milliseconds([sum(part[i] for part in parts if i < len(part)) for i in range(width)], share)

    def close(self) -> None:
        """Close the connections to all shards; calls under way end with errors."""
        for watch in self.watches:
            watch.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def codec_of(name: str) -> str:
    """The name that is shown of a table's codec."""
    return "float32" if name in ("", "none") else name


def milliseconds(counts: Sequence[int], share: float) -> float | None:
    """Milliseconds that a share of the requests did not exceed; None where there were none."""
    return 1e3 * quantile(list(counts), share) if any(counts) else None


def _total(status: ShardStatus, name: str) -> int:
    return sum(getattr(transport, name) for transport in status.transports)


def problem_of(status: ShardStatus) -> str:
    """Return why a shard that answers cannot work, as a sentence: no room for its log, or a failed update; else ""."""
    if not status.waits_for_room:
        return status.failed_update
    return (waits_for_room if status.recovering else log_stalled)(status.waits_for_room)


def health_of(status: ShardStatus, *, lost: bool) -> str:
    """The state of a shard that answers in one or two words; `lost` says that its rows do not belong to the others'."""
    if lost:
        return "rows lost"
    if status.recovering:
        return "recovering"
    if status.draining:
        return "ending"
    if status.waits_for_room:
        return "log stalled"
    if status.failed_update:
        return "update failed"
    return "loading" if any(table.loading for table in status.tables) else "serving"
