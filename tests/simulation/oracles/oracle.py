"""What is promised of a shard's log and of its answers, checked at each event, reply and recovery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from embershard.proto.codec.values.registry import find_values
from embershard.proto.errors import EmbershardError, LogDamaged, MemoryLost, UnknownTable
from embershard.proto.messages import (
    DELTA,
    GetStatus,
    Heartbeat,
    Hello,
    Load,
    Pull,
    Push,
    Pushed,
    PushToken,
    Rows,
    Split,
)
from embershard.proto.routing import Placement
from embershard.ps.coordination.outcome import Outcome
from embershard.ps.core import Core
from embershard.ps.events import Event, PushEvent, Settled, Term, encode_event
from embershard.ps.journal.reader import LogReader
from embershard.ps.recovery import EventReader

from ..machinery.disk import MachineDisk
from ..machinery.network import SimulatedCall
from ..machinery.world import World
from .model import OPTIMIZERS, ModelShard

READS = (Pull, Heartbeat, Hello, GetStatus)
MOST_TRIES = 6  # at one process, of a push that is refused for good, however its link fails
Token = tuple[int, int, int]  # worker, epoch, seq


@dataclass
class Sent:
    """A push or load as its client sent it first."""

    request: Push | Load
    content: bytes
    state: str = "open"  # "early": answered before it was safe; "acknowledged", "refused"
    is_safe: bool = False  # a process has told its sender so, perhaps before the answer came
    taken: float = -1.0  # when it became an event, to the last
    refused: float = -1.0  # when the shard refused it, to the last


@dataclass
class Logged:
    """An event as the shard gave it to its log."""

    body: bytes
    event: Event
    failed: bool  # it ended with an error, and changed no more than that it leaves new rows


@dataclass
class ShardOracle:
    """Of one shard. History: all events that count, from LSN 1 on."""

    world: World
    shard: int
    mode: str
    history: list[Logged] = field(default_factory=list)
    model: ModelShard = field(default_factory=ModelShard)
    sent: dict[Token, Sent] = field(default_factory=dict)
    contents: dict[bytes, Token] = field(default_factory=dict)
    lsn_of: dict[Token, int] = field(default_factory=dict)
    released: int = 0  # the highest LSN that an answer which has left stands for
    may_lose: bool = False  # since the last recovery the machine lost power in mode `log`
    logged: set[Token] = field(default_factory=set)  # that were events once
    missing: set[Token] = field(default_factory=set)  # answered early, and lost; their senders have them
    damaged: Any = None  # (LSN, path name) that was flipped in a file
    damaged_base: str = ""  # name of the base in which a bit was flipped
    lost: set[Token] = field(default_factory=set)  # acknowledged, and lost with the machine's power
    unknown: Counter[tuple[Token, int]] = field(default_factory=Counter)  # tries, by process
    has_lost: bool = False  # whether anything that was answered is lost with the machine's power
    served_at: float = 0.0  # since when the shard serves, as it was last begun
    settled: dict[Token, int] = field(default_factory=dict)  # LSN of the event by which it was refused
    term: int = 0
    expired: int = 0
    recoveries: int = 0
    bases: int = 0  # that recoveries began with
    on_event: Callable[[Event], None] = lambda event: None  # called with each that was applied

    def fail(self, what: str) -> None:
        self.world.fail(f"shard {self.shard}: {what}")

    # clients

    def submitted(self, call: SimulatedCall) -> None:
        """A client sends a request, for the first time or again."""
        request = call.request
        if isinstance(request, Load) and request.token is None:
            self._check_content(request, (request.worker, 0, len(self.contents)))
        if not isinstance(request, Push | Load) or request.token is None:
            return
        token = _token(request)
        known = self.sent.get(token)
        if known is None:
            self.sent[token] = Sent(request, _content(request))
            self._check_content(request, token)
            before = self.sent.get((token[0], token[1], token[2] - 1))
            if (
                before is not None
                and before.state == "open"
                and isinstance(before.request, Push)
                and isinstance(request, Push)
            ):
                self.fail(f"worker {token[0]} sends push {token[2]} although push {token[2] - 1} was not answered")
        elif known.content != _content(request):
            self.fail(f"worker {token[0]} sends push {token[2]} again with other bytes")

    def _check_content(self, request: Push | Load, token: Token) -> None:
        content = _content(request)
        if len(content) < 16:
            return
        other = self.contents.setdefault(content, token)
        if other != token and other[:1] == token[:1]:
            self.fail(f"worker {token[0]} sends {type(request).__name__} {token} again, which was {other} before")

    def keeps(self, token: PushToken, seqs: set[int], most: int) -> None:
        """The sender of a push keeps these of its pushes: those that were answered early, and no more than it may."""
        if len(seqs) > most:
            self.fail(f"worker {token.worker} keeps {len(seqs)} pushes")
        states = {key[2]: sent.state for key, sent in self.sent.items() if key[:2] == (token.worker, token.epoch)}
        safe = max((seq for seq, state in states.items() if state == "acknowledged"), default=0)
        for seq, state in states.items():
            if state == "early" and seq > safe and seq not in seqs:
                self.fail(f"worker {token.worker} does not keep push {seq}, which was answered early and is not safe")

    def answered(self, call: SimulatedCall, outcome: object) -> None:
        """A client has its reply, or knows that none comes."""
        request = call.request
        for token in self._acknowledged_by(request, outcome):
            self.sent[token].is_safe = True
            if self.sent[token].state == "early":
                self.sent[token].state = "acknowledged"
                if token in self.missing and self.has_lost:  # this was on its way while the machine lost power
                    self.missing.discard(token)
                    self.lost.add(token)
        if not isinstance(request, Push | Load) or request.token is None:
            return
        sent = self.sent[_token(request)]
        if isinstance(outcome, EmbershardError):
            is_refused = not outcome.retryable and type(outcome).__name__ != "UnknownRoute"
            if is_refused and sent.taken <= sent.refused:  # else it is late: the push came again, and was taken
                sent.state = "refused"
                self.missing.discard(_token(request))
                self.lost.discard(_token(request))  # it came again, and its sender is told that it is not applied
            if isinstance(outcome, UnknownTable):
                self.unknown[_token(request), request.term] += 1  # a kept push is sent to each process that comes after
                if self.unknown[_token(request), request.term] > MOST_TRIES:
                    self.fail(f"push {_token(request)} is sent again and again, although its table is unknown")
            if isinstance(outcome, MemoryLost):
                self.world.covered["loss of power told by MemoryLost"] += 1
                self.world.note("memory lost", self.shard, _token(request))
        elif not isinstance(outcome, Exception):
            self.world.covered["duplicates answered"] += isinstance(outcome, Pushed) and outcome.duplicate
            self.world.covered["pushes answered early"] += isinstance(outcome, Pushed) and outcome.early
            is_late = sent.taken <= sent.refused
            if sent.state == "refused" and is_late and isinstance(outcome, Pushed) and outcome.early:
                return  # it is late: the push came again to the next process, which has refused it
            if not (isinstance(outcome, Pushed) and outcome.early) or sent.is_safe:
                sent.state = "acknowledged"
            elif sent.state != "acknowledged":
                sent.state = "early"
            if sent.state == "early" and _token(request) not in self.lsn_of:
                self.missing.add(_token(request))  # its answer was on its way while the machine lost power
            elif _token(request) not in self.lsn_of and self.has_lost and _token(request) in self.logged:
                self.lost.add(_token(request))  # its answer was on its way while the machine lost power
            elif _token(request) not in self.lsn_of:
                self.fail(f"push {_token(request)} was acknowledged and is no event")

    # the shard

    def appended(self, lsn: int, event: Event, outcome: Outcome) -> None:
        """The shard has applied an event, and gave it to its log."""
        body = b"".join(bytes(piece) for piece in encode_event(event))
        event = EventReader()(memoryview(body))  # with arrays of its own
        if lsn != len(self.history) + 1:
            self.fail(f"LSN {lsn} after {len(self.history)}")
            return
        kind = type(event).__name__
        self.world.covered[f"event {kind}" + (" that ends with an error" if outcome.error is not None else "")] += 1
        self.world.note("event", self.shard, lsn, kind, outcome.version, outcome.clock)
        self.history.append(Logged(body, event, outcome.error is not None))
        self.expired += kind == "Expired"
        if isinstance(event, Term):
            if event.term <= self.term:
                self.fail(f"term {event.term} after term {self.term}")
            self.term = event.term
        if isinstance(event, Settled):
            self.settled[event.worker, event.epoch, event.seq] = lsn
        elif isinstance(event, PushEvent) and outcome.error is not None:
            self.settled[_token(event.push)] = lsn
        rows = self._apply(lsn, self.history[-1])
        if outcome.error is not None:
            rows = outcome.rows
        for what, got, want in (
            ("rows", outcome.rows, rows),
            ("version", outcome.version, self.model.version),
            ("clock", outcome.clock, self.model.open),
        ):
            if got != want:
                self.fail(f"LSN {lsn}, {kind}: {what} {got}, not {want}")
        self.on_event(event)
        if isinstance(outcome.reply, Split) and outcome.reply.index != self.model.given:
            self.fail(f"LSN {lsn}: worker {event.worker} is given part {outcome.reply.index}, not {self.model.given}")

    def _apply(self, lsn: int, logged: Logged) -> tuple[int, int]:
        event = logged.event
        request = event.push if isinstance(event, PushEvent) else event
        if isinstance(request, Push | Load) and request.token is not None:
            token = _token(request)
            sent = self.sent.get(token)
            if sent is None:
                self.fail(f"LSN {lsn} is push {token}, which nobody sent")
            elif logged.failed:  # it may come again, where its sender was not told
                self._check_event(lsn, event, sent)
            elif token in self.lsn_of:
                self.fail(f"push {token} is LSN {self.lsn_of[token]} and LSN {lsn}")
            else:
                self.lsn_of[token] = lsn
                sent.taken = self.world.now
                self.logged.add(token)
                self.missing.discard(token)
                self.lost.discard(token)  # its sender still had it
                self._check_event(lsn, event, sent)
        return self.model.apply(event)

    def _check_event(self, lsn: int, event: Event, sent: Sent) -> None:
        """An event has what its client sent, and its client has been told of what was lost before it."""
        request = event.push if isinstance(event, PushEvent) else event
        if _content(request) != sent.content:
            self.fail(f"LSN {lsn} is not what its client sent as {_token(request)}")
        worker, epoch, seq = _token(request)
        gone = [token for token in self.lost if token[:2] == (worker, epoch) and token[2] < seq]
        if gone:
            self.fail(f"push {_token(request)} was taken although push {gone[0]}, acknowledged, is lost")
        gone = [token for token in self.missing if token[:2] == (worker, epoch) and token[2] < seq]
        if gone:
            self.fail(f"push {_token(request)} was taken although push {gone[0]}, answered early, did not come again")

    def refuses(self, request: object) -> None:
        """An error leaves the shard: that a push was refused for good is an event, which counts as answered."""
        if isinstance(request, Push | Load) and request.token is not None:
            self.released = max(self.released, self.settled.get(_token(request), 0))
            self.sent[_token(request)].refused = self.world.now

    def reply(self, request: object, reply: object) -> None:
        """The shard has made a reply, which may leave later."""
        if isinstance(request, Pull) and isinstance(reply, Rows):
            if request.required_clock > self.model.open:
                self.fail(f"a pull that needs clock {request.required_clock} is answered at {self.model.open}")
            if reply.version != self.model.version:
                self.fail(f"a pull shows version {reply.version}, not {self.model.version}")
            codecs = reply.codecs or ("",) * len(reply.tables)
            for part, codec, rows in zip(request.tables, codecs, reply.tables, strict=True):
                want = self.model.tables[part.table].gather(part.ids)
                if codec and codec != DELTA:
                    payload = np.empty(find_values(codec).nbytes(*want.shape), np.uint8)
                    find_values(codec).encode(want, payload, None)
                    want = payload
                self.world.covered["tables of pulls compared"] += 1
                if codec != DELTA and rows.tobytes() != want.tobytes():
                    self.fail(f"a pull of {part.table} shows rows that are not those of LSN {len(self.history)}")

    def rows(self, request: Pull) -> list[np.ndarray]:
        """The rows that a pull has to show now."""
        return [self.model.tables[part.table].gather(part.ids) for part in request.tables]

    def leaves(self, request: object, reply: object, lsn: int) -> None:
        """An answer that was made when this was the last LSN leaves the shard."""
        safe = [self.lsn_of[token] for token in self._acknowledged_by(request, reply) if token in self.lsn_of]
        self.released = max([self.released, *safe])
        is_kept = isinstance(reply, Pushed) and reply.early  # by its sender
        waits = not isinstance(request, READS) or (isinstance(request, Heartbeat) and request.flush)
        if waits and not is_kept:
            self.released = max(self.released, lsn)

    def _acknowledged_by(self, request: Any, reply: object) -> list[Token]:
        """The pushes that a reply says to be safe, beside the one that it answers."""
        seq = getattr(reply, "acknowledged", 0)
        if not seq:
            return []
        sender = request.token if isinstance(request, Push) else request
        return [token for token in self.sent if token[:2] == (sender.worker, sender.epoch) and token[2] <= seq]

    # recovery

    def before_recovery(self, disk: MachineDisk, folder: Any, manifest: Any) -> None:
        """Read what survived: a prefix of the history, with all that was answered."""
        self.recoveries += 1
        self.world.covered["recoveries"] += 1
        if manifest is None:
            if self.released:
                self.fail("the log is gone")
            self._cut(0)
            return
        reader, first, last = LogReader(disk, folder, manifest), 0, 0
        try:
            for record in reader.records():
                lsn = record.header.lsn
                first = first or lsn
                if lsn > len(self.history) or self.history[lsn - 1].body != bytes(record.body):
                    self.fail(f"LSN {lsn} of the log is not what was logged")
                    return
                last = lsn
        except LogDamaged as error:
            if self.damaged is None or error.fields["lsn"] != self.damaged[0]:
                self.fail(f"damage where none is: {error.fields}")
            raise
        if self.damaged is not None and self.may_lose and last < self.damaged[0]:
            self.damaged = None  # it is behind what the kernel had not written, as far as anybody can tell
        if self.damaged is not None:
            self.fail(f"damage of LSN {self.damaged[0]} was not found: the log ends with LSN {last}")
        needed = manifest.bases[-1].lsn if manifest.bases else 0
        if last < needed or first > max(1, manifest.first_lsn):
            self.fail(f"the log has LSN {first} to {last}, its base is of {needed} and needs {manifest.first_lsn}")
        self.bases += len(manifest.bases)
        self.world.covered["recoveries from an image"] += len(manifest.bases) == 1
        self.world.covered["recoveries from increments"] += len(manifest.bases) > 1
        self.world.covered["recoveries of a log whose first events are removed"] += first > 1
        self.world.covered[f"recoveries of a log that ends {reader.end.state}"] += 1
        if last < self.released and not self.may_lose:
            self.fail(f"LSN {self.released} was acknowledged, the log ends with {last}")
        self.has_lost |= last < self.released
        self._cut(last)

    def _cut(self, last: int) -> None:
        for token, lsn in list(self.lsn_of.items()):
            if lsn > last:
                del self.lsn_of[token]
                self.sent[token].is_safe = False  # where it comes again, the next process has to say so anew
                if self.sent[token].state == "acknowledged":
                    self.lost.add(token)
                elif self.sent[token].state == "early":
                    self.missing.add(token)
        self.settled = {token: lsn for token, lsn in self.settled.items() if lsn <= last}
        if last < len(self.history):
            del self.history[last:]
            self.model, self.lsn_of = ModelShard(), {}
            for lsn, logged in enumerate(self.history, start=1):
                self._apply(lsn, logged)
        self.released = min(self.released, last)
        self.may_lose = False

    def recovered(self, core: Core) -> None:
        """A shard serves again."""
        self.served_at = self.world.now
        if not self.history or not isinstance(self.history[-1].event, Term):
            self.fail("a recovery that is no event")
        if self.damaged_base:
            self.fail(f"damage of {self.damaged_base} was not found")
        self.compare(core, "after a recovery")

    def replay(self, core: Core, placement: Placement, max_message_bytes: int) -> None:
        """The state beside the rows is that of another core which has taken all events, from the first on."""
        other = Core(self.shard, placement, OPTIMIZERS, max_message_bytes=max_message_bytes)
        for lsn, logged in enumerate(self.history, start=1):
            other.apply(EventReader()(memoryview(logged.body)))
            if other.lsn != lsn:
                self.fail(f"a replay: LSN {other.lsn}, not {lsn}")
                return
        mine, its = core.control(), other.control()
        for name in its:
            if msgpack.packb(mine[name]) != msgpack.packb(its[name]):
                self.fail(f"{name} is {mine[name]}, in a replay {its[name]}")
                return

    def compare(self, core: Core, when: str) -> None:
        """The whole state is that of the history."""
        control, model = core.control(), self.model
        windows = {
            worker: [one.epoch, one.first, one.settled, [[seq, *reply] for seq, reply in one.replies.items()]]
            for worker, one in model.windows.items()
        }
        found = {worker: [*rest[:3], [list(one) for one in rest[3]]] for worker, *rest in control["pushes"]["windows"]}
        members = sorted((m.worker, m.epoch, m.clock, m.paused) for m in model.members.values())
        mine = sorted((m.worker, m.epoch, m.clock, m.paused) for m in core.clock.members.values())
        pairs = [
            ("LSN", core.lsn, len(self.history)),
            ("version", core.clock.updates.version, model.version),
            ("clock", core.clock.open, model.open),
            ("members", mine, members),
            ("windows", found, windows),
            ("tables", sorted(core.tables.names()), sorted(model.tables)),
        ]
        for table in core.tables.all():
            pairs.append((table.spec.name, plain_rows(table), plain_rows(model.tables[table.spec.name])))
        for what, got, want in pairs:
            if got != want:
                detail = f"{got}, not {want}" if not isinstance(got, dict) or what == "windows" else "differ"
                self.fail(f"{when}: {what}: {detail}")
                return


def plain_rows(table: Any) -> dict[int, tuple[bytes, bytes]]:
    """Id -> the bits of its row and state."""
    found = {}
    for ids, rows, states in table.scan():
        states = states.reshape(len(ids), -1)
        for id_, row, state in zip(ids.tolist(), rows, states, strict=True):
            found[id_] = row.tobytes(), state.astype(np.float32).tobytes()
    return found


def _token(request: Push | Load) -> Token:
    token = request.token
    return token.worker, token.epoch, token.seq


def _content(request: Push | Load) -> bytes:
    """What a request changes, in bytes; without the ids, which a retry may add."""
    if isinstance(request, Load):
        return b"load" + request.table.encode() + request.ids.tobytes() + request.rows.tobytes()
    return b"".join(part.table.encode() + part.gradients.tobytes() for part in request.tables)
