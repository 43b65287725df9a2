"""Every shard of one placement, called at once, with deadlines and retries.

A request is retried with identical bytes: a push is recognised by its token, everything else may be repeated.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from embershard.proto.arrays import Array
from embershard.proto.errors import (
    ClientClosed,
    ClockAhead,
    EmbershardError,
    NotAShard,
    ShardBusy,
    ShardRestarted,
    ShardUnavailable,
    UnknownTable,
    WrongShards,
)
from embershard.proto.messages import PUT_BACK_SECONDS, Greeting, Hello, Reply, Request
from embershard.proto.transport.transport import Deadline, PendingReply, Transport, TransportClosed, Unreachable
from embershard.worker.client.byte_counts import Volume

_FIRST_PAUSE = 0.02  # seconds; doubles with every try
_LONGEST_PAUSE = 1.0
_PATIENCE = timedelta(seconds=3)  # waiting for longer than this is said, once

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ShardConnection:
    """One shard as a worker knows it."""

    transport: Transport
    greeting: Greeting
    suspect: bool = False  # the connection broke: another process may answer now
    sign: PendingReply | None = None  # a word on its way whose answer nobody needs; gRPC would take it back

    @property
    def name(self) -> str:
        """Index and address, for errors."""
        return f"shard {self.greeting.shard} at {self.transport.address}"


Outcome = Reply | EmbershardError


def greet(transports: Sequence[Transport], worker: int, deadline: Deadline) -> list[ShardConnection]:
    """Links to all shards, in the order of their index; waits for those that start later.

    ShardUnavailable where none answers by the deadline, NotAShard where something else does, WrongShards where the
    shards do not make one placement.
    """
    found: dict[int, Greeting] = {}
    patience: Deadline | None = Deadline(_PATIENCE)
    for pause in _pauses(deadline):
        waiting = [i for i in range(len(transports)) if i not in found]
        pending = {i: _submit(transports[i], Hello(worker), deadline) for i in waiting}
        reasons: dict[int, str] = {}
        for i, answer in pending.items():
            try:
                reply = answer.result()
            except TransportClosed:
                raise ClientClosed() from None
            except Unreachable as error:
                reasons[i] = error.reason
            except EmbershardError as error:
                if not error.retryable:
                    label = "" if isinstance(error, NotAShard) else f"the server at {transports[i].address}"
                    raise _labelled(error, label) from None
                reasons[i] = str(error)
            else:
                if not isinstance(reply, Greeting):
                    raise NotAShard(address=transports[i].address, reason=f"it said {type(reply).__name__}")
                found[i] = reply
        if not reasons:
            return _in_order([ShardConnection(transports[i], found[i]) for i in range(len(transports))])
        first, reason = next(iter(reasons.items()))
        if patience is not None and patience.seconds <= 0:
            patience = None
            _log.warning("waiting for the server at %s (%s)", transports[first].address, reason)
        if not _sleep(pause, deadline):
            break
    raise _unavailable(f"the server at {transports[first].address}", transports[first].address, reason, deadline)


def _in_order(links: list[ShardConnection]) -> list[ShardConnection]:
    """Links by index. WrongShards names what does not fit."""
    first = links[0].greeting
    by_index: dict[int, ShardConnection] = {}
    for link in links:
        mine = link.greeting
        where = f"{links[0].transport.address} and {link.transport.address}"
        if mine.num_shards != first.num_shards:
            raise WrongShards(
                reason=f"{where} were started for {first.num_shards} and {mine.num_shards} shards; "
                "give every shard the same --of, and name the shards of one job only"
            )
        if mine.placement_epoch != first.placement_epoch:
            raise WrongShards(
                reason=f"{where} hold placement epochs {first.placement_epoch} and {mine.placement_epoch}; "
                "restart the shards together"
            )
        if mine.shard in by_index:
            other = by_index[mine.shard].transport.address
            raise WrongShards(
                reason=f"{other} and {link.transport.address} are both shard {mine.shard}; "
                "start each with its own --shard"
            )
        by_index[mine.shard] = link
    missing = [str(i) for i in range(first.num_shards) if i not in by_index]
    if missing:
        raise WrongShards(
            reason=f"of {first.num_shards} shards, {', '.join(missing)} is not among the addresses "
            f"{', '.join(link.transport.address for link in links)}; name the address of every shard"
        )
    return [by_index[i] for i in range(first.num_shards)]


class ShardConnections:
    """All shards of a placement. Safe for use by several threads."""

    def __init__(self, links: Sequence[ShardConnection], worker: int) -> None:
        self._links = links
        self._worker = worker
        self.volume = Volume()
        self.sign: Request | None = None  # what tells a shard over a new connection which member this is
        self._lost: ShardRestarted | None = None  # once rows are gone, every later call says so

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[ShardConnection]:
        return iter(self._links)

    def __getitem__(self, shard: int) -> ShardConnection:
        return self._links[shard]

    def call(
        self, requests: Mapping[int, Request], deadline: Deadline, into: Mapping[int, Sequence[Array]] | None = None
    ) -> dict[int, Outcome]:
        """Send one request to each of the shards named, all at once, and wait for what becomes of them.

        `into`: memory for the rows of pulls, see Transport.submit.
        Busy, loading, stopping and unreachable shards are asked again, after growing pauses, until the deadline; one
        that put a request back for other workers' sake, so near to it that no answer could come in time, is not.
        """
        outcomes: dict[int, Outcome] = {}
        waiting = dict(requests)
        for pause in _pauses(deadline):
            if self._lost is not None:
                return {shard: self._lost for shard in requests}
            suspects = [s for s in waiting if self._links[s].suspect]
            ready = [s for s in waiting if s not in suspects]
            places = into or {}
            pending = {s: _submit(self._links[s].transport, waiting[s], deadline, places.get(s, ())) for s in ready}
            for shard in suspects:  # after the others were asked: a shard that stands still must not cost their leases
                outcomes[shard] = self._recognise(shard, deadline) or _Retry("it answers again")
                if isinstance(outcomes[shard], ClientClosed):
                    del waiting[shard]
            for shard, answer in pending.items():
                outcomes[shard] = self._outcome(shard, answer, deadline)
                self.volume.count(waiting[shard], outcomes[shard], answer)
                outcome = outcomes[shard]
                put_back = isinstance(outcome, ClockAhead) and deadline.seconds < _too_short(deadline)
                if put_back or not getattr(outcome, "retryable", False):
                    del waiting[shard]
            busy = [o.fields.get("retry_after_ms") for s in waiting if isinstance(o := outcomes.get(s), ShardBusy)]
            wanted = max((ms / 1000 for ms in busy if isinstance(ms, int | float)), default=0.0)
            if not waiting or not _sleep(max(pause, wanted * random.uniform(1.0, 1.2)), deadline):
                break
        for shard in waiting:
            link, last = self._links[shard], outcomes.get(shard)
            if last is None or isinstance(last, _Retry):
                reason = last.reason if isinstance(last, _Retry) else "no time was left to ask"
                outcomes[shard] = _unavailable(link.name, link.transport.address, reason, deadline)
        return outcomes

    def _outcome(self, shard: int, answer: PendingReply, deadline: Deadline) -> Outcome:
        link = self._links[shard]
        try:
            return answer.result()
        except TransportClosed:
            return _labelled(ClientClosed(), link.name)
        except Unreachable as error:
            link.suspect = True
            return _Retry(error.reason)
        except UnknownTable as error:
            # every table was declared before it was used: either a mistake in its name, or an empty shard
            return self._recognise(shard, deadline) or _labelled(error, link.name)
        except EmbershardError as error:
            return _labelled(error, link.name)

    def _recognise(self, shard: int, deadline: Deadline) -> EmbershardError | None:
        """Ask a shard behind a broken connection who it is: None if it is the process that has our rows."""
        link = self._links[shard]
        try:
            reply = _submit(link.transport, Hello(self._worker), deadline).result()
        except TransportClosed:
            return _labelled(ClientClosed(), link.name)
        except Unreachable as error:
            return _Retry(error.reason)
        except EmbershardError as error:
            return _Retry(str(error))
        if isinstance(reply, Greeting) and reply.instance == link.greeting.instance:
            link.suspect = False
            if self.sign is not None:  # first: the bytes of what comes now keep the lease
                link.sign = _submit(link.transport, self.sign, deadline)
            return None
        got = reply.instance if isinstance(reply, Greeting) else type(reply).__name__
        self._lost = ShardRestarted(
            shard=link.name, address=link.transport.address, got=got, want=link.greeting.instance
        )
        return self._lost


class _Retry(EmbershardError):
    """No answer came; stands for the outcome until the request was sent again."""

    retryable = True

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason=reason)


def _submit(transport: Transport, request: Request, deadline: Deadline, into: Sequence[Array] = ()) -> PendingReply:
    try:
        return transport.submit(request, deadline.remaining, into)
    except Unreachable as error:
        return _Failed(error)


class _Failed:
    """A request that could not even be sent."""

    num_bytes = 0

    def __init__(self, error: Unreachable) -> None:
        self._error = error

    def result(self) -> Reply:
        raise self._error


def _labelled(error: EmbershardError, name: str) -> EmbershardError:
    error.shard = error.shard or name
    return error


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Have an error of what a shard sent name the shard."""
    try:
        yield
    except EmbershardError as error:
        _labelled(error, name)
        raise


def _unavailable(name: str, address: str, reason: str, deadline: Deadline) -> ShardUnavailable:
    return ShardUnavailable(shard=name, seconds=deadline.timeout.total_seconds(), reason=reason, address=address)


def _pauses(deadline: Deadline) -> Iterator[float]:
    """Seconds to wait after each try: growing, and jittered so that workers do not come back together."""
    pause = _FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _too_short(deadline: Deadline) -> float:
    """Seconds: a shard that puts a request back does it with less than this left."""
    return min(2 * PUT_BACK_SECONDS, deadline.timeout.total_seconds() / 4)


def _sleep(seconds: float, deadline: Deadline) -> bool:
    """Whether time is left after a pause."""
    time.sleep(max(0.0, min(seconds, deadline.seconds)))
    return deadline.seconds > 0
