"""One shard as a worker knows it: the handshake that finds it, requests to it, and errors that name it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from embershard.proto.arrays import Array
from embershard.proto.errors import (
    ClientClosed,
    EmbershardError,
    NotAShard,
    ShardRecovering,
    ShardUnavailable,
    WrongShards,
)
from embershard.proto.messages import Greeting, Hello, Reply, Request
from embershard.proto.timing import Deadline, pauses, sleep
from embershard.proto.transport.transport import PendingReply, Transport, TransportClosed, Unreachable

_SILENT_WAIT = timedelta(seconds=3)  # waiting for longer than this is logged, once

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ShardConnection:
    """One shard as a worker knows it."""

    transport: Transport
    greeting: Greeting  # of the process that answered last
    suspect: bool = False  # the connection broke: another process may answer now
    recovering_since: float = 0.0  # clock.now() when it said so first; 0: it does not
    has_stalled: bool = False  # it cannot write its event log, and a warning said so
    heartbeat: PendingReply | None = None  # on its way; held because gRPC cancels a call that is forgotten

    @property
    def name(self) -> str:
        """Index and address, for errors."""
        return f"shard {self.greeting.shard} at {self.transport.address}"


def handshake(
    transports: Sequence[Transport], worker: int, deadline: Deadline, recovery_timeout: timedelta = timedelta(0)
) -> list[ShardConnection]:
    """Connect to all shards, in the order of their index; waits for those that start later.

    The deadline begins anew whenever a shard says that it recovers its rows, for `recovery_timeout` at most.
    ShardUnavailable where none answers by the deadline, NotAShard where something else does, WrongShards where the
    shards do not make one placement.
    """
    found: dict[int, Greeting] = {}
    clock = deadline.clock
    silent: Deadline | None = Deadline(_SILENT_WAIT, clock)
    recovery = Deadline(recovery_timeout, clock)
    for pause in pauses(clock):
        waiting = [i for i in range(len(transports)) if i not in found]
        pending = {i: submit(transports[i], Hello(worker=worker), deadline.remaining) for i in waiting}
        reasons: dict[int, str] = {}
        recovering = False
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
                    raise labelled(error, label) from None
                reasons[i] = str(error)
                recovering |= isinstance(error, ShardRecovering)
            else:
                if not isinstance(reply, Greeting):
                    raise NotAShard(address=transports[i].address, reason=f"it said {type(reply).__name__}")
                found[i] = reply
        if not reasons:
            return _in_order([ShardConnection(transports[i], found[i]) for i in range(len(transports))])
        first, reason = next(iter(reasons.items()))
        if silent is not None and silent.seconds <= 0:
            silent = None
            _log.warning("waiting for the server at %s (%s)", transports[first].address, reason)
        recovering = recovering and recovery.seconds > 0
        if not (sleep(pause, deadline) or recovering):
            break
        if recovering:
            deadline = Deadline(deadline.timeout, clock)
    raise unavailable(f"the server at {transports[first].address}", transports[first].address, reason, deadline)


def _in_order(connections: list[ShardConnection]) -> list[ShardConnection]:
    """The connections by index. WrongShards names what does not fit."""
    first = connections[0].greeting
    by_index: dict[int, ShardConnection] = {}
    for connection in connections:
        mine = connection.greeting
        where = f"{connections[0].transport.address} and {connection.transport.address}"
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
            other = by_index[mine.shard]
            remedy = "start each with its own --shard"
            if mine.instance == other.greeting.instance:
                remedy = "one process answers at both, so name each shard by one address"
            both = f"{other.transport.address} and {connection.transport.address}"
            raise WrongShards(reason=f"{both} are both shard {mine.shard}; {remedy}")
        by_index[mine.shard] = connection
    missing = [str(i) for i in range(first.num_shards) if i not in by_index]
    if missing:
        raise WrongShards(
            reason=f"of {first.num_shards} shards, {', '.join(missing)} is not among the addresses "
            f"{', '.join(connection.transport.address for connection in connections)}; name the address of every shard"
        )
    return [by_index[i] for i in range(first.num_shards)]


def submit(transport: Transport, request: Request, timeout: timedelta, into: Sequence[Array] = ()) -> PendingReply:
    """Send one request; where not even that can be done, its reply raises Unreachable."""
    try:
        return transport.submit(request, timeout, into)
    except Unreachable as error:
        return FailedCall(error)


class FailedCall:
    """A request that could not even be sent."""

    num_bytes = 0

    def __init__(self, error: Unreachable) -> None:
        self._error = error

    def result(self) -> Reply:
        """Raise why it was not sent."""
        raise self._error


def labelled(error: EmbershardError, name: str) -> EmbershardError:
    """The error, which names the shard unless it names one already."""
    error.shard = error.shard or name
    return error


@contextmanager
def with_shard_name(name: str) -> Iterator[None]:
    """Add the name of the shard to errors raised inside."""
    try:
        yield
    except EmbershardError as error:
        labelled(error, name)
        raise


def unavailable(name: str, address: str, reason: str, deadline: Deadline) -> ShardUnavailable:
    """The error of a shard that gave no answer until the deadline."""
    return ShardUnavailable(shard=name, seconds=deadline.timeout.total_seconds(), reason=reason, address=address)
