"""Rendezvous of a job's workers: each sends bytes, and reads those of the others once all have come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from embershard.proto.arrays import Bytes
from embershard.proto.errors import InvalidRequest, MessageTooLarge, RendezvousOver, ShardBusy
from embershard.proto.messages import Rendezvous, RendezvousResult
from embershard.ps.coordination.clock import Clock, Member, MustWait, Plain
from embershard.ps.coordination.outcome import Outcome

MAX_PAYLOAD_BYTES = 16 * 2**20  # of a worker
MAX_NAME = 200  # characters
# What workers that wait, and replies that were lost, make a shard keep.
MAX_BYTES = 2**30
MAX_OPEN = 64
KEPT = 8  # completed ones, in case a reply was lost
KEPT_BYTES = 256 * 2**20
KEPT_NAMES = 4096
_RETRY_MS = 100


@dataclass(slots=True)
class _Rendezvous:
    """The payloads of those who have come."""

    payloads: dict[int, Bytes] = field(default_factory=dict)
    result: RendezvousResult | None = None  # once it is complete
    answered: set[int] = field(default_factory=set)  # and who was told since
    nbytes: int = 0  # of the payloads


class RendezvousRegistry:
    """The rendezvous of one job, by name. A name is used once."""

    def __init__(self, clock: Clock, max_message_bytes: int) -> None:
        self.last = ""  # the last one that was completed
        self._clock = clock
        self._max_message_bytes = max_message_bytes
        self._by_name: dict[str, _Rendezvous] = {}  # in the order of their begin
        self._over: dict[str, None] = {}  # the names of those that are forgotten, the oldest first

    def join(self, request: Rendezvous) -> Outcome:
        """Return who came, with payloads; it waits while a live member that is expected has not come.

        A worker that comes again, as after a lost reply, and one that comes after the others are through, read what
        they read.
        """
        member = self._clock.member(request.worker, request.epoch)
        rendezvous = self._find(request)
        came = False
        if rendezvous.result is None:
            self._check_room(rendezvous, request)
            self._by_name.setdefault(request.name, rendezvous)
            known = rendezvous.payloads.get(member.worker)
            came = known is None or not np.array_equal(known, request.payload)
            if came:
                rendezvous.nbytes += request.payload.nbytes - (0 if known is None else known.nbytes)
                rendezvous.payloads[member.worker] = request.payload
            missing = list(self._missing(rendezvous, request))
            if missing or not self._clock.started:
                return Outcome(changed=came, waiting=MustWait(missing))
            self._complete(request.name, rendezvous)
            came = True
        assert rendezvous.result is not None
        if request.want_payloads and (size := rendezvous.nbytes) > self._max_message_bytes:
            error = MessageTooLarge(got=size, limit=self._max_message_bytes)
            return Outcome(changed=came, error=error)
        changed = came or member.worker not in rendezvous.answered
        rendezvous.answered.add(member.worker)
        forgot = self._forget()
        result = rendezvous.result if request.want_payloads else RendezvousResult(rendezvous.result.workers, ())
        return Outcome(result, changed or forgot)

    def control(self, *, payloads: bool) -> Plain:
        """All of them in plain values; without `payloads` only the names of those that are forgotten."""
        return {
            "last": self.last,
            "over": list(self._over),
            "open": [
                [name, [[worker, payload.tobytes()] for worker, payload in one.payloads.items()],
                 one.result is not None, sorted(one.answered)]
                for name, one in (self._by_name.items() if payloads else ())
            ],
        }  # fmt: skip

    def restore(self, control: Plain) -> None:
        """Replace the state by what `control` returned."""
        self.last, self._over = control["last"], dict.fromkeys(control["over"])
        for name, payloads, is_complete, answered in control["open"]:
            found = {worker: np.frombuffer(payload, np.uint8) for worker, payload in payloads}
            result = _result(found) if is_complete else None
            nbytes = sum(map(len, found.values()))
            self._by_name[name] = _Rendezvous(found, result, set(answered), nbytes)

    def _find(self, request: Rendezvous) -> _Rendezvous:
        """The rendezvous of a request, or a new one for its first."""
        name, size = request.name, request.payload.nbytes
        if not 0 < len(name) <= MAX_NAME:
            raise InvalidRequest(reason=f"the name of a rendezvous has 1 to {MAX_NAME} characters, not {len(name)}")
        if size > MAX_PAYLOAD_BYTES:
            raise MessageTooLarge(got=size, limit=MAX_PAYLOAD_BYTES)
        if name in self._over:
            raise RendezvousOver(name=name)
        if name not in self._by_name and len(self._by_name) >= MAX_OPEN:
            raise ShardBusy(queued_bytes=self._nbytes, retry_after_ms=_RETRY_MS)
        return self._by_name.get(name) or _Rendezvous()

    @property
    def _nbytes(self) -> int:
        return sum(rendezvous.nbytes for rendezvous in self._by_name.values())

    def _check_room(self, rendezvous: _Rendezvous, request: Rendezvous) -> None:
        if request.worker not in rendezvous.payloads and self._nbytes + request.payload.nbytes > MAX_BYTES:
            raise ShardBusy(queued_bytes=self._nbytes, retry_after_ms=_RETRY_MS)

    def _missing(self, rendezvous: _Rendezvous, request: Rendezvous) -> Iterator[Member]:
        for worker, member in self._clock.members.items():
            if worker not in rendezvous.payloads and (not request.participants or worker in request.participants):
                yield member

    def _complete(self, name: str, rendezvous: _Rendezvous) -> None:
        rendezvous.result = _result(rendezvous.payloads)
        self.last = name
        self._clock.generation += 1

    def _forget(self) -> bool:
        """Forget rendezvous that no worker will ask for again: completed ones, and those whose workers are gone.

        Whether there were any.
        """
        live = self._clock.members.keys()
        done = [
            name
            for name, it in self._by_name.items()
            if not (it.payloads.keys() - it.answered if it.result else it.payloads.keys()) & live
        ]
        nbytes = sum(self._by_name[name].nbytes for name in done)
        forgot = False
        while done and (len(done) > KEPT or nbytes > KEPT_BYTES):
            name = done.pop(0)
            rendezvous = self._by_name.pop(name)
            nbytes -= rendezvous.nbytes
            if rendezvous.result is not None:
                self._over[name] = None
            forgot = True
        while len(self._over) > KEPT_NAMES:
            del self._over[next(iter(self._over))]
        return forgot


def _result(payloads: dict[int, Bytes]) -> RendezvousResult:
    workers = tuple(sorted(payloads))
    return RendezvousResult(workers, tuple(payloads[worker] for worker in workers))
