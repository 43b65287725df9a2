"""Pushes that a shard may lose with its machine: kept until they are safe, and sent again to its next process.

A shard that keeps its log on the disk answers a push before the disk has it, and says in later replies up to which push
all are safe (docs/wire.md). So the disk is not waited for, and neither the shard nor this worker alone can lose a push.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from embershard.proto.clock import SYSTEM_CLOCK, SystemClock
from embershard.proto.errors import EmbershardError, UnknownRoute
from embershard.proto.messages import Load, Push, Pushed, Reply

# of a shard; more than that waits until the shard says that some are safe
KEPT_BYTES = 64 * 2**20
KEPT_PUSHES = 2048

Sent = TypeVar("Sent", bound=Push | Load)


@dataclass(slots=True)
class _KeptPush:
    """A push, and whether it was answered."""

    push: Push
    num_bytes: int
    is_answered: bool = False


class KeptPushes:
    """The pushes of one client that are on their way or not safe yet, by shard and in order; any thread may use it."""

    def __init__(self, clock: SystemClock = SYSTEM_CLOCK) -> None:
        self.is_empty = True  # no push is kept or refused, and no load is on its way
        self._lock = clock.lock()
        self._kept: defaultdict[int, deque[_KeptPush]] = defaultdict(deque)
        self._bytes: defaultdict[int, int] = defaultdict(int)
        self._acknowledged: defaultdict[int, int] = defaultdict(int)  # up to this seq they are safe
        self._terms: defaultdict[int, int] = defaultdict(int)  # of the process that what is kept was sent to again
        self._refused: list[tuple[int, Push, EmbershardError]] = []
        self._last: defaultdict[int, int] = defaultdict(int)  # seq of the last that was kept or acknowledged
        # shard -> the first load of which nobody knows that it was answered
        self._loading: dict[int, int] = {}
        # shard, seq -> what its next process has said to a push before its sender knew of an answer
        self._said: dict[tuple[int, int], Reply | EmbershardError] = {}

    def add(self, shard: int, push: Push) -> None:
        """Keep a push that is sent now, perhaps again."""
        with self._lock:
            self.is_empty = False
            kept = self._kept[shard]
            if not kept or kept[-1].push.token.seq < push.token.seq:
                kept.append(_KeptPush(push, _num_bytes(push)))
                self._bytes[shard] += kept[-1].num_bytes
                self._last[shard] = push.token.seq

    def answered(self, shard: int, push: Push) -> None:
        """A push was answered before it is safe."""
        with self._lock:
            kept = next((one for one in self._kept[shard] if one.push.token.seq == push.token.seq), None)
            if kept is not None:
                kept.is_answered = True
            said = self._said.pop((shard, push.token.seq), None)
            self._drop(shard)
        # it was sent again while another shard was waited for
        if kept is not None and said is not None and not _is_early(said):
            self._settle_answered(shard, kept.push, said)

    def settle(self, shard: int, push: Push, outcome: Reply | EmbershardError) -> Reply | EmbershardError:
        """A push is safe, and so are those that were answered before it, or it was refused; what became of it.

        What one process refused, the next one may have taken while another shard was waited for.
        """
        with self._lock:
            said = self._said.pop((shard, push.token.seq), None)
            outcome = said if isinstance(outcome, EmbershardError) and isinstance(said, Pushed) else outcome
        if _is_early(outcome):
            self.answered(shard, push)
            return outcome
        with self._lock:
            kept = self._kept[shard]
            for one in kept:
                if one.push.token.seq == push.token.seq:
                    self._bytes[shard] -= one.num_bytes
                    kept.remove(one)
                    break
            self._look()
        if isinstance(outcome, Pushed):
            self.acknowledge(shard, push.token.seq)
        return outcome

    def acknowledge(self, shard: int, seq: int, term: int | None = None) -> None:
        """A shard says that what it has answered is safe up to this push.

        With the `term` of the process that says so: what is read after its pushes were sent to the next one counts no
        more.
        """
        with self._lock:
            if seq > self._acknowledged[shard] and (term is None or term >= self._terms[shard]):
                self._acknowledged[shard] = seq
                self._last[shard] = max(self._last[shard], seq)
                self._end_loads(shard, seq)
                self._drop(shard)

    def first_incomplete(self, shard: int, seq: int | None = None) -> int:
        """The first of a shard's pushes and loads up to `seq` (None: that were sent) that is not known to be safe.

        With a `seq` this one is about to be sent: what a process has said to it before counts no more.
        """
        with self._lock:  # a reply to another thread may drop it in between
            if seq is not None:
                self._said.pop((shard, seq), None)
            seq = self._last[shard] + 1 if seq is None else seq
            kept = self._kept[shard]
            first = kept[0].push.token.seq if kept else seq  # beyond `seq` where that one is safe by now
            return min(first, seq, self._loading.get(shard, seq))

    def load_begins(self, shard: int, seq: int) -> None:
        """Note that a load is sent, which is not known to be safe until `loads_end`."""
        with self._lock:
            self.is_empty = False
            self._loading.setdefault(shard, seq)

    def loads_end(self, shard: int, seq: int) -> None:
        """Note that a shard has answered the loads up to `seq`, or a push of this seq, which came after them, for good.

        The early answer to a push ends none: a push that is lost and comes again must not say that they were answered.
        """
        with self._lock:
            self._end_loads(shard, seq)
            self._look()

    def forget(self) -> None:
        """Keep nothing: a restore puts other rows in the place of those that it was sent for."""
        with self._lock:
            for held in (self._kept, self._bytes, self._loading, self._said):
                held.clear()
            self._look()

    def num_bytes(self, shard: int) -> int:
        """Bytes of the pushes that are kept for a shard."""
        return self._bytes[shard]

    def is_full(self, shard: int, push: Push) -> bool:
        """Whether a push has to wait until some of these are safe."""
        with self._lock:
            kept = len(self._kept[shard])
            return kept >= KEPT_PUSHES or (kept > 0 and self._bytes[shard] + _num_bytes(push) > KEPT_BYTES)

    def unsafe(self, shards: Iterable[int]) -> list[int]:
        """Return the shards that have answered a push which is not safe yet."""
        with self._lock:
            return [shard for shard in shards if (kept := self._kept[shard]) and kept[0].is_answered]

    def resend(self, shard: int, term: int, send: Callable[[Push], Reply | EmbershardError]) -> EmbershardError | None:
        """Send all that is kept to the shard's process of this term, in order; an error where that is not done.

        The idempotency keys are those of before, so what the process has is not applied again.
        """
        with self._lock:
            waiting, self._terms[shard] = list(self._kept[shard]), term
            if waiting:  # what the process before has said of these counts no more: this one may have to take them anew
                self._acknowledged[shard] = min(self._acknowledged[shard], waiting[0].push.token.seq - 1)
        for kept in waiting:
            first = self.first_incomplete(shard, kept.push.token.seq)
            push = with_first_incomplete(replace(kept.push, term=term), first)
            outcome = send(push)
            if isinstance(outcome, UnknownRoute):  # a pull had left the ids with the process of before
                outcome = send(replace(push, tables=tuple(replace(part, route=0) for part in push.tables)))
            if isinstance(outcome, EmbershardError) and outcome.retryable:
                return outcome
            with self._lock:
                is_answered = kept.is_answered  # else its sender is told
                if not is_answered:
                    self._said[shard, push.token.seq] = outcome
            if is_answered and not _is_early(outcome):
                self._settle_answered(shard, push, outcome)
        return None

    def _settle_answered(self, shard: int, push: Push, outcome: Reply | EmbershardError) -> None:
        """Settle a push that had been answered early; its refusal is kept for `take_refused`."""
        if isinstance(outcome, EmbershardError):
            with self._lock:
                self._refused.append((shard, push, outcome))
        self.settle(shard, push, outcome)

    def take_refused(self) -> list[tuple[int, Push, EmbershardError]]:
        """The pushes that a shard had answered, and its next process has refused: told of once."""
        with self._lock:
            refused, self._refused = self._refused, []
            self._look()
        return refused

    def _end_loads(self, shard: int, seq: int) -> None:
        if self._loading.get(shard, seq + 1) <= seq:  # a push before a load may be answered late
            del self._loading[shard]

    def _drop(self, shard: int) -> None:
        kept, acknowledged = self._kept[shard], self._acknowledged[shard]
        while kept and kept[0].is_answered and kept[0].push.token.seq <= acknowledged:
            self._bytes[shard] -= kept.popleft().num_bytes
        self._look()

    def _look(self) -> None:
        self.is_empty = not (self._refused or self._loading or any(self._kept.values()))


def with_first_incomplete(request: Sent, first: int) -> Sent:
    """The push or load, which says that those before `first` are safe.

    Else a shard that has lost one of them with its machine's power would take it.
    """
    token = request.token
    if token is None or first <= token.first_incomplete:
        return request
    return replace(request, token=replace(token, first_incomplete=first))


def _is_early(outcome: Reply | EmbershardError) -> bool:
    return isinstance(outcome, Pushed) and outcome.early


def _num_bytes(push: Push) -> int:
    return sum(part.ids.nbytes + part.gradients.nbytes for part in push.tables)
