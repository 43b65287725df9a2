"""A link of a given bandwidth, emulated: what one worker sends, and what it receives, over all its shards together.

Full duplex: each direction has the whole bandwidth, and passes bytes in chunks of about a millisecond, so that a
message arrives when its last byte would have. What is counted are the frames of the `stream` transport: the headers of
Ethernet, IP and TCP, some 4 % of a real link, are not.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fcntl import ioctl
from termios import FIONREAD

UNLIMITED = "unlimited"

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(kbit|mbit|gbit)(?:/s)?", re.IGNORECASE)
_WRITE = f"write a number with its unit, as in 100mbit or 1gbit (kbit, mbit and gbit are known), or {UNLIMITED}"

_CHUNK_SECONDS = 0.001  # timers of an event loop know milliseconds
_SMALLEST_CHUNK = 1024
_SLACK_SECONDS = 0.0005  # as little ahead of the link is on time: half of what a timer knows


def parse_bandwidth(text: str) -> int | None:
    """Bits per second of "100mbit" or "1.5gbit"; None for "unlimited". ValueError says what to write."""
    if text.strip().lower() == UNLIMITED:
        return None
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no bandwidth: {_WRITE}")
    bits = round(float(found[1]) * _UNITS[found[2].lower()])
    if bits < 1:
        raise ValueError(f"{text!r} lets nothing through: {_WRITE}")
    return bits


class TokenBucket:
    """One direction of a link of `rate` bytes per second, as a token bucket of one chunk.

    `clock` gives seconds. It keeps when the link will be done with all that was given to it, so that neither rounding
    nor a timer that comes late changes the rate of what waits for it, and an idle link saves nothing up.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._done = clock()

    def take(self, num_bytes: int, *, waited: bool) -> None:
        """Let bytes pass; `waited`: they were there while the link was busy with those before."""
        if not waited:
            self._done = max(self._done, self._clock())
        self._done += num_bytes / self._rate

    def wait(self) -> float:
        """Seconds until more may pass; 0.0 for now."""
        seconds = self._done - self._clock()
        return seconds if seconds > _SLACK_SECONDS else 0.0


@dataclass(slots=True, eq=False)
class _Lane:
    """The bytes that one connection has still to send."""

    transport: asyncio.Transport
    pieces: deque[memoryview] = field(default_factory=deque)
    num_bytes: int = 0

    def next_chunk(self, limit: int) -> memoryview:
        """Its next bytes, at most `limit`."""
        piece = self.pieces.popleft()
        if len(piece) > limit:
            self.pieces.appendleft(piece[limit:])
            piece = piece[:limit]
        self.num_bytes -= len(piece)
        return piece

    def unread(self) -> bool:
        """Whether the system holds bytes that were received and not read."""
        if self.transport.is_closing():
            return False
        waiting = ioctl(self.transport.get_extra_info("socket").fileno(), FIONREAD, bytes(4))
        return waiting != bytes(4)


class EmulatedLink:
    """The link between one worker and all its shards, `bits` per second each way; of the thread of `loop` alone.

    Sending: a queue that is written from as the link permits, the connections by turns. Receiving: reading pauses, and
    the system has the shard wait.
    """

    def __init__(self, bits: int, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        rate = bits / 8
        self.chunk_bytes = max(_SMALLEST_CHUNK, int(rate * _CHUNK_SECONDS))  # most that one read may take
        self._loop = loop
        self._out, self._in = TokenBucket(rate, clock), TokenBucket(rate, clock)
        self._lanes: dict[asyncio.Transport, _Lane] = {}
        self._turns: deque[_Lane] = deque()  # lanes with something to send
        self._sending: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None  # while reading is paused
        self._behind = False  # whether what is read next was there before

    def join(self, transport: asyncio.Transport) -> None:
        """Add a connection, which shares this link's rate."""
        self._lanes[transport] = _Lane(transport)
        if self._reading is not None:
            transport.pause_reading()

    def leave(self, transport: asyncio.Transport) -> None:
        """A connection ends; nothing of what it has still to send is touched any more."""
        lane = self._lanes.pop(transport, None)
        if lane is not None and lane.pieces:
            self._turns.remove(lane)

    def send(self, transport: asyncio.Transport, pieces: Iterable[bytes | memoryview]) -> None:
        """Write to a connection, in order, as fast as the link permits."""
        lane = self._lanes.get(transport)
        if lane is None:
            return  # it is ending
        if not lane.pieces:
            self._turns.append(lane)
        for piece in pieces:
            lane.pieces.append(memoryview(piece))
            lane.num_bytes += len(piece)
        if self._sending is None:
            self._pass_on(waited=False)

    def unsent(self, transport: asyncio.Transport) -> int:
        """Bytes of a connection that wait for the link."""
        lane = self._lanes.get(transport)
        return 0 if lane is None else lane.num_bytes

    def received(self, num_bytes: int) -> None:
        """A connection has read bytes: every one pauses for as long as these take."""
        self._in.take(num_bytes, waited=self._behind)
        seconds = self._in.wait()
        if not seconds:
            self._behind = any(lane.unread() for lane in self._lanes.values())
        elif self._reading is None:
            for transport in self._lanes:
                transport.pause_reading()
            self._reading = self._loop.call_later(seconds, self._resume)

    def _pass_on(self, *, waited: bool = True) -> None:
        self._sending = None
        while self._turns:
            if seconds := self._out.wait():
                self._sending = self._loop.call_later(seconds, self._pass_on)
                return
            lane = self._turns.popleft()
            chunk = lane.next_chunk(self.chunk_bytes)
            if lane.pieces:
                self._turns.append(lane)
            self._out.take(len(chunk), waited=waited)
            lane.transport.write(chunk)
            waited = True

    def _resume(self) -> None:
        self._reading = None
        if seconds := self._in.wait():
            self._reading = self._loop.call_later(seconds, self._resume)
            return
        self._behind = any(lane.unread() for lane in self._lanes.values())
        for transport in self._lanes:
            transport.resume_reading()
