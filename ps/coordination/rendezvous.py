"""Meetings of a job's workers: each puts bytes down, and reads those of the others once all have come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from embershard.proto.arrays import Bytes
from embershard.proto.errors import InvalidRequest, MessageTooLarge, RendezvousOver, ShardBusy
from embershard.proto.messages import Rendezvous, RendezvousResult
from embershard.ps.coordination.clock import Clock, Member

MAX_PAYLOAD_BYTES = 16 * 2**20  # of a worker
MAX_NAME = 200  # characters
# What workers that wait, and replies that were lost, make a shard keep.
MAX_BYTES = 2**30
MAX_OPEN = 64
KEPT = 8  # meetings that were held, for a reply that was lost
KEPT_BYTES = 256 * 2**20
KEPT_NAMES = 4096
_RETRY_MS = 100


@dataclass(slots=True)
class _Meeting:
    """Who has come, and what they put down."""

    payloads: dict[int, Bytes] = field(default_factory=dict)
    met: RendezvousResult | None = None  # once it was held
    answered: set[int] = field(default_factory=set)  # and who was told since

    @property
    def nbytes(self) -> int:
        return sum(payload.nbytes for payload in self.payloads.values())


class RendezvousRegistry:
    """The meetings of one job, by name. A name is used once."""

    def __init__(self, clock: Clock, max_message_bytes: int) -> None:
        self.last = ""  # the last one that was held
        self._clock = clock
        self._max_message_bytes = max_message_bytes
        self._rendezvous: dict[str, _Meeting] = {}  # in the order of their begin
        self._over: dict[str, None] = {}  # the names of those that are forgotten, the oldest first

    def rendezvous(self, request: Rendezvous, now: float) -> RendezvousResult:
        """Who came. ClockAhead while a live member is expected that has not come.

        A worker that comes again, as after a lost reply, and one that comes after the others are through, read what
        they read.
        """
        member = self._clock.member(request.worker, request.epoch, now)
        meeting = self._meeting(request)
        if meeting.met is None:
            self._check_room(meeting, request)
            meeting.payloads[member.worker] = request.payload
            missing = list(self._missing(meeting, request))
            if missing or not self._clock.started:
                raise self._clock.waits_for(missing)
            self._hold(request.name, meeting)
        assert meeting.met is not None
        if request.want_payloads and (size := meeting.nbytes) > self._max_message_bytes:
            raise MessageTooLarge(got=size, limit=self._max_message_bytes)
        meeting.answered.add(member.worker)
        self._forget()
        return meeting.met if request.want_payloads else RendezvousResult(meeting.met.workers, ())

    def _meeting(self, request: Rendezvous) -> _Meeting:
        """The meeting of a request, which may be its first."""
        name, size = request.name, request.payload.nbytes
        if not 0 < len(name) <= MAX_NAME:
            raise InvalidRequest(reason=f"the name of a meeting has 1 to {MAX_NAME} characters, not {len(name)}")
        if size > MAX_PAYLOAD_BYTES:
            raise MessageTooLarge(got=size, limit=MAX_PAYLOAD_BYTES)
        if name in self._over:
            raise RendezvousOver(name=name)
        if name not in self._rendezvous and len(self._rendezvous) >= MAX_OPEN:
            raise ShardBusy(queued_bytes=self._nbytes, retry_after_ms=_RETRY_MS)
        return self._rendezvous.setdefault(name, _Meeting())

    @property
    def _nbytes(self) -> int:
        return sum(meeting.nbytes for meeting in self._rendezvous.values())

    def _check_room(self, meeting: _Meeting, request: Rendezvous) -> None:
        if request.worker not in meeting.payloads and self._nbytes + request.payload.nbytes > MAX_BYTES:
            raise ShardBusy(queued_bytes=self._nbytes, retry_after_ms=_RETRY_MS)

    def _missing(self, meeting: _Meeting, request: Rendezvous) -> Iterator[Member]:
        for worker, member in self._clock.members.items():
            if worker not in meeting.payloads and (not request.participants or worker in request.participants):
                yield member

    def _hold(self, name: str, meeting: _Meeting) -> None:
        workers = tuple(sorted(meeting.payloads))
        meeting.met = RendezvousResult(workers, tuple(meeting.payloads[worker] for worker in workers))
        self.last = name
        self._clock.generation += 1

    def _forget(self) -> None:
        """Let go of what nobody will ask for again: of meetings that were held, and of those whose workers are gone."""
        live = self._clock.members.keys()
        done = [
            name
            for name, meeting in self._rendezvous.items()
            if not (meeting.payloads.keys() - meeting.answered if meeting.met else meeting.payloads.keys()) & live
        ]
        nbytes = sum(self._rendezvous[name].nbytes for name in done)
        while done and (len(done) > KEPT or nbytes > KEPT_BYTES):
            name = done.pop(0)
            meeting = self._rendezvous.pop(name)
            nbytes -= meeting.nbytes
            if meeting.met is not None:
                self._over[name] = None
        while len(self._over) > KEPT_NAMES:
            del self._over[next(iter(self._over))]
