"""Links between simulated processes: requests and replies are bytes that get lost, come twice, late or out of order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np

from embershard.proto.arrays import Array
from embershard.proto.errors import EmbershardError, from_wire, to_wire
from embershard.proto.messages import METHODS, Reply, Request, Rows, arrays, replace
from embershard.proto.protobuf import head_bytes, read
from embershard.proto.transport.transport import TransportClosed, Unreachable

from .world import Process, World

LATENCY = 3e-4  # seconds


class Network:
    """All links. `serve` gives a request to a shard; `fate` says what happens to a message."""

    def __init__(
        self,
        world: World,
        serve: Callable[[SimulatedCall], None],
        fate: Callable[[SimulatedCall, str], str],
    ) -> None:
        self.world, self._serve, self._fate = world, serve, fate
        self.cuts: dict[tuple[int, int, str], float] = {}  # worker, shard, direction -> until when
        self.open: list[SimulatedCall] = []  # calls that are not over

    def send(self, call: SimulatedCall) -> None:
        """A request leaves its client."""
        self.open.append(call)
        self._deliver(call, "request", call.kind, lambda: self._serve(call))

    def reply(self, call: SimulatedCall, data: tuple[type, bytes, list[bytes]], expected: object = None) -> None:
        """A reply leaves its shard; `expected` is what the oracle says of it."""
        self._deliver(call, "reply", data[0], lambda: call.receive(data, expected))

    def refuse(self, call: SimulatedCall, seconds: float, reason: str) -> None:
        """A call gets no reply, and its client learns of it."""
        self.world.at(seconds, lambda: call.fail(Unreachable(reason)), call.process)

    def open_calls(self, shard: int) -> list[SimulatedCall]:
        """The calls to a shard that are not over."""
        return [call for call in self.open if call.shard == shard]

    def _deliver(self, call: SimulatedCall, direction: str, kind: type, arrive: Callable[[], None]) -> None:
        random = self.world.random
        process = call.process if direction == "reply" else None
        seconds = LATENCY * random.uniform(0.3, 2.0)
        fate = self._fate(call, direction)
        if self.cuts.get((call.worker, call.shard, direction), -1.0) > self.world.now:
            fate = "drop"
        token = getattr(call.request, "token", None)
        seqs = f" seq {token.seq}, all below {token.first_incomplete} acknowledged" if token is not None else ""
        self.world.note(call.process.name, direction, call.shard, f"{kind.__name__}{seqs}", fate)
        if fate in ("drop", "silence"):
            # mostly the connection breaks; else nothing is heard until the deadline
            if fate == "drop" and random.random() < 0.85:
                self.refuse(call, random.uniform(0.002, 0.3), "the connection broke")
            return
        if fate == "delay":
            seconds = random.uniform(0.01, 1.5)
        elif fate == "reorder":
            seconds = random.uniform(1.0, 30.0) * LATENCY
        self.world.at(seconds, arrive, process)
        if fate == "repeat":
            self.world.at(seconds + random.uniform(0.0, 0.2), arrive, process)


class SimulatedTransport:
    """A worker's way to a shard, see Transport."""

    def __init__(self, network: Network, process: Process, worker: int, shard: int, sent: Callable[..., None]) -> None:
        self.address = f"shard-{shard}"
        self.sent_bytes = self.received_bytes = 0
        self.is_closed = False
        self.network, self.process, self.worker, self.shard = network, process, worker, shard
        self.sent = sent  # called with each call, and with its outcome

    def submit(self, request: Request, timeout: timedelta, into: Sequence[Array] = ()) -> SimulatedCall:
        if self.is_closed:
            raise TransportClosed
        call = SimulatedCall(self, request, timeout.total_seconds(), into)
        self.sent(call, None)
        self.network.send(call)
        return call

    def close(self) -> None:
        self.is_closed = True


class SimulatedCall:
    """A request on its way, and its outcome."""

    def __init__(self, transport: SimulatedTransport, request: Request, seconds: float, into: Sequence[Array]) -> None:
        self.transport, self.process = transport, transport.process
        self.worker, self.shard = transport.worker, transport.shard
        self.request, self.kind, self.seconds = request, type(request), seconds
        self.into = into
        self.head, self.bulk = head_bytes(request), [array.tobytes() for array in arrays(request)]
        self.num_bytes = len(self.head) + sum(map(len, self.bulk))
        transport.sent_bytes += self.num_bytes
        self.served_by: Process | None = None  # the shard's process that has it
        self.expected: object = None  # what the oracle says of the reply that arrived
        self._outcome: Reply | Exception | None = None
        self._over = self.process.clock.event()
        self.process.world.at(seconds / self.process.rate, lambda: self.fail(Unreachable("no answer")), self.process)

    @property
    def is_over(self) -> bool:
        return self._outcome is not None

    def read(self) -> Request:
        """The request, of its bytes."""
        return read(self.kind, self.head, [bytearray(part) for part in self.bulk])

    def result(self) -> Reply:
        self._over.wait()
        assert self._outcome is not None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def receive(self, data: tuple[type, bytes, list[bytes]], expected: object) -> None:
        """A reply arrives."""
        if self.is_over:
            return
        self.expected = expected
        kind, head, bulk = data
        self.num_bytes += len(head) + sum(map(len, bulk))
        if issubclass(kind, EmbershardError):
            self._end(from_wire(head, ""))
            return
        reply = read(METHODS[self.kind][1], head, [bytearray(part) for part in bulk])
        if isinstance(reply, Rows) and len(self.into) == len(reply.tables):
            reply = replace(reply, tables=tuple(map(_placed, self.into, reply.tables)))
        self._end(reply)

    def fail(self, error: Exception) -> None:
        """It ends without a reply."""
        if not self.is_over:
            self._end(error)

    def _end(self, outcome: Reply | Exception) -> None:
        self._outcome = outcome
        self.transport.network.open.remove(self)
        self.transport.sent(self, outcome)
        self._over.set()


def as_bytes(reply: Reply | EmbershardError) -> tuple[type, bytes, list[bytes]]:
    """What travels of a reply or an error."""
    if isinstance(reply, EmbershardError):
        return type(reply), to_wire(reply)[1], []
    return type(reply), head_bytes(reply), [np.ascontiguousarray(array).tobytes() for array in arrays(reply)]


def _placed(array: Array, received: Array) -> Array:
    """The caller's own array, with what was received, where it fits."""
    if array.nbytes != received.nbytes or array.dtype != received.dtype:
        return received
    array.reshape(-1)[:] = received
    return array
